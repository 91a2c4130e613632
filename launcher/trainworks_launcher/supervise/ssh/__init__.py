"""ssh between the hosts of one job: with its own keys, or with keys that the platform mounted."""
