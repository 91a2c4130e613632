"""The optional parts of an attempt; ``part`` has their interface, ``supervisor`` chooses them."""
