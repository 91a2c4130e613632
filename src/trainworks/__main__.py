"""``python -m trainworks``: the command line, wherever the package lies."""

import sys

from trainworks.cli import main

if __name__ == "__main__":
    sys.exit(main())
