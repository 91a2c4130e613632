"""Share a clock, ports, certificates and a plugin among the tests of the three packages.

- ``plugin``: a plugin of pytest: signals, temporary files, worker processes, golden files.
- ``clock``: bounds in seconds that hold on a busy machine, too.
- ``ports``: a free TCP port.
- ``certificates``: a certificate authority of the tests' own.
"""
