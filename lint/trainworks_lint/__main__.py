"""``python -m trainworks_lint``: the same as ``trainworks-lint``."""

import sys

from trainworks_lint.command import main

if __name__ == "__main__":
    sys.exit(main())
