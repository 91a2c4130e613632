"""Print the use of the GPUs until the input ends: ``gpu_use.py FIRST LONGEST [GPU...]``.

Each line is a JSON list with [index, percent of the time, bytes of memory] of each GPU. FIRST and
LONGEST are seconds between two lines; each pause is twice the one before. GPU: the GPUs that the
job may use, by number or UUID; default all.
"""

from __future__ import annotations

import json
import os
import select
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))  # noqa: PTH100, PTH120

from trainworks_launcher.checks.gpus import read_use

_LIMIT = 60.0
"""Seconds for one answer: a driver that starts its GPUs takes a while."""


def main(first: str, longest: str, *visible: str) -> int:
    """Print the use of the GPUs at intervals; return 0.

    Ends when standard input ends, with the launcher, or when the GPUs do not report their use.

    Args:
        first: Seconds of the first pause.
        longest: Seconds of the longest pause.
        visible: The GPUs that the job may use, by number or UUID; none for all.
    """
    pause = float(first)
    while rows := read_use(visible or None, _LIMIT):
        sys.stdout.write(f"{json.dumps(rows)}\n")
        sys.stdout.flush()
        if select.select((sys.stdin,), (), (), pause)[0]:
            break
        pause = min(2 * pause, float(longest))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
