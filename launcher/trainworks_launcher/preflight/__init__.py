"""``train preflight``: a job checked, and advised on, before a cluster is paid for."""
