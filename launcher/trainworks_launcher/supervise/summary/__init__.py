"""What a job took: figures of each host, gathered by the leader, a line of the log and a file (names.SUMMARY_FILE)."""
