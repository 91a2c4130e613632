"""``python -m trainworks_launcher`` is ``train``.

So is running this file by its path, isolated or not.
"""

from __future__ import annotations

import sys

if not __package__:
    # Run by path: the package's parent is what has to be importable, not the
    # package's own directory.
    sys.path[:] = [
        __file__.rsplit("/", 2)[0],
        *(entry for entry in sys.path if entry != __file__.rsplit("/", 1)[0]),
    ]

from trainworks_launcher.command.cli import main

if __name__ == "__main__":
    sys.exit(main())
