"""What a host does before its command starts, step by step, and what a failed step says."""
