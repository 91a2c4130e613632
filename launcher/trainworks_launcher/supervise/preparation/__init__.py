"""What a host does before its command starts, and what a failed step says. Pure."""
