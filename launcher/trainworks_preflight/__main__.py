"""``python -m trainworks_preflight`` is ``trainworks-preflight``."""

from __future__ import annotations

import sys

from trainworks_preflight.cli import main

if __name__ == "__main__":
    sys.exit(main())
