"""What every rank knows of its job: the configuration, which rank is where, the
groups, and calls between ranks.
"""
