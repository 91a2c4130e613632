"""Run nccl-tests' all_reduce_perf and judge its figure: ``measure.py ASKED MPIRUN...
all_reduce_perf ...``.

ASKED is a JSON object: ``limit`` in seconds, ``ranks``, ``hosts``, their ``type``, and
``gigabits``: the bandwidth of one host's network in a second, each way; 0 if not known. The figure
comes in a file, because NCCL's log may stand between the lines of the program. A run without a
figure fails: it has measured nothing.
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
"""Time for mpirun to end the ranks of all hosts."""

_EXIT_HANG = 68
"""The launcher's own status for a hang: ``names.EXIT_HANG``. This program imports nothing of it."""

_EXIT_NO_FIGURE = 1

_SLOW = 0.5
"""Share of the network's bandwidth below which a figure is a warning: EFA reaches more, TCP on such
hosts does not.
"""


def main(document: str, command: Sequence[str]) -> int:
    """Run the command within a limit, and print the bandwidth that it has measured.

    Stop signals are passed on to the command. A command that does not end in time is ended.

    Args:
        document: ASKED, as above.
        command: mpirun's command line with all_reduce_perf.

    Returns:
        The exit status of mpirun, if that is not 0; ``_EXIT_HANG`` if mpirun does not end in time;
        ``_EXIT_NO_FIGURE`` if it leaves no figure; else 0.
    """
    options: dict[str, Any] = json.loads(document)
    ranks = f"{options['ranks']} ranks on {options['hosts']} host(s)"
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "all_reduce.json")
        running = subprocess.Popen((*command, "--output_file", str(report)))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: running.send_signal(number))
        try:
            status = running.wait(options["limit"])
        except subprocess.TimeoutExpired:
            _end(running)
            _log(
                f"failed: the all-reduce of {ranks} has not ended within {options['limit']:g} s:"
                " run it again with NCCL_DEBUG=INFO, which says where NCCL waits"
            )
            return _EXIT_HANG
        if status:
            # As a shell reports a signal: 128 and its number.
            return status if status > 0 else 128 - status
        try:
            content = json.loads(report.read_text(encoding="utf-8"))
            figure = float(content["average_bus_bandwidth"]["bandwidth"])
        except (OSError, ValueError, KeyError, TypeError):
            _log(
                "failed: all_reduce_perf left no figure: see its lines above; one that is older"
                " than the option --output_file prints only its usage"
            )
            return _EXIT_NO_FIGURE
    # In a second, as the figure. Without knowledge of the network nothing is slow.
    gigabytes = options["gigabits"] / 8
    network = ""
    if gigabytes:
        network = f"; the network of {options['type']} carries {gigabytes:g} GB/s"
    _log(f"all-reduce of {ranks}: {figure:.2f} GB/s bus bandwidth{network}")
    if figure < _SLOW * gigabytes:
        _log(
            "warning: that is less than half of it: see whether EFA is used (docs/efa.md), and"
            " whether one host is slow"
        )
    return 0


def _end(running: subprocess.Popen[bytes]) -> None:
    """End mpirun (SIGTERM), which ends its ranks; after a limit, kill it."""
    running.terminate()
    try:
        running.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        running.kill()
        running.wait()


def _log(line: str) -> None:
    """Print a line on standard error."""
    sys.stderr.write(f"trainworks: {line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
