"""From requirements and what a base has to releases with hashes, and the lock of them."""
