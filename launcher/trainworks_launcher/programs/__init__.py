"""Programs that the launcher starts by path, and does not import to run them.

The first lines of each say which Python runs it, and with which arguments.
"""
