"""Makes the plan of an image from a request and the facts: one frozen value. Pure."""
