"""``python -m trainworks_launcher`` is ``train``."""

from __future__ import annotations

import sys

from trainworks_launcher.cli import main

if __name__ == "__main__":
    sys.exit(main())
