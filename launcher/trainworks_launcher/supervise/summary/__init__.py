"""What a job took: figures of each host, gathered by the leader, and a line of the log."""
