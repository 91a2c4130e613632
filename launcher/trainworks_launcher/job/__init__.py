"""What the job is: program, placement and network, or all problems at once. Pure."""
