# PYTHON_ARGCOMPLETE_OK
"""The command line: what was asked for, one path through the layers, one exit status."""

from trainworks.cli.main import main

__all__ = ["main"]
