"""Small programs of their own, run by path: the launcher starts them, and
imports none of them to run it.

Each one says in its first lines which Python runs it and what it is given.
"""
