"""Runs nccl-tests' all_reduce_perf and says what its figure means: ``measure.py ASKED MPIRUN...
all_reduce_perf ...``.

ASKED is a JSON object: ``limit`` in seconds, ``ranks``, ``hosts``, their ``type``, and
``gigabits``: what the network of one host carries in a second, each way; 0 if that is not known.
The figure comes by a file, as NCCL's log may stand between the lines of the program. A run that
does not end is a warning: a job may have more time, or fewer hosts.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Sequence

_END_SECONDS = 20.0
"""For mpirun to end the ranks of all hosts."""

_SLOW = 0.5
"""A figure below this part of what the network carries is a warning: EFA
reaches more, TCP on such hosts does not.
"""


def main(document: str, command: Sequence[str]) -> int:
    """Run it; the exit status of mpirun, 0 where it does not end."""
    asked: dict[str, Any] = json.loads(document)
    among = f"{asked['ranks']} ranks on {asked['hosts']} host(s)"
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "all_reduce.json")
        running = subprocess.Popen((*command, "--output_file", str(report)))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: running.send_signal(number))
        try:
            status = running.wait(asked["limit"])
        except subprocess.TimeoutExpired:
            _end(running)
            _log(
                f"warning: the all-reduce of {among} has not ended within {asked['limit']:g} s: run"
                " it again with NCCL_DEBUG=INFO, which says where NCCL waits"
            )
            return 0
        if status:
            return status if status > 0 else 128 - status
        try:
            figure = float(
                json.loads(report.read_text(encoding="utf-8"))["average_bus_bandwidth"]["bandwidth"]
            )
        except (OSError, ValueError, KeyError, TypeError):
            _log(
                "warning: all_reduce_perf left no figure on this host:"
                " see its line `Avg bus bandwidth`"
            )
            return 0
    beside = (
        f"; the network of {asked['type']} carries {asked['gigabits'] / 8:g} GB/s"
        if asked["gigabits"]
        else ""
    )
    _log(f"all-reduce of {among}: {figure:.2f} GB/s bus bandwidth{beside}")
    if figure < _SLOW * asked["gigabits"] / 8:
        _log(
            "warning: that is less than half of it: see whether EFA is used (docs/efa.md), and"
            " whether one host is slow"
        )
    return 0


def _end(running: subprocess.Popen[bytes]) -> None:
    running.terminate()
    try:
        running.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        running.kill()
        running.wait()


def _log(line: str) -> None:
    sys.stderr.write(f"trainworks: {line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
