"""Functions that scripts import in the place of torch's own ones."""
