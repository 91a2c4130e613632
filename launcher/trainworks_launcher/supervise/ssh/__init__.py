"""ssh to hosts without a launcher, with keys that the platform mounted."""
