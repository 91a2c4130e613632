"""The job: configuration, topology, process groups, and calls between ranks."""
