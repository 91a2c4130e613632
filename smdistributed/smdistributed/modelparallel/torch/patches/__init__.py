"""What scripts import in the place of torch's own functions."""
