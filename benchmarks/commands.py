#!/usr/bin/env python3
"""Measures how long commands that build nothing take, as a multiple of `python
-c pass` in the same run.

All commands and Python alone take turns. `--before DIR` measures another
checkout beside this one: the peer.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path

from measure import ROOT, Figure, Section, clock_process, describe, load, machine, write
from trainworks.engine.temporary_folders import private_folder

TARGET = ("--framework", "pytorch", "--cuda", "cu121")

COMMANDS = {
    "--list": (("--list",), 10.0),
    "--until plan": ((*TARGET, "--until", "plan"), 15.0),
    "--until render": ((*TARGET, "--until", "render"), 0.0),
    "push --help": (("push", "--help"), 0.0),
}
"""What is measured: the words of the command line, and the most times that it may take.

0: nothing is promised.
"""


def main() -> int:
    """Measure, print, and with `--write` record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--before",
        type=Path,
        metavar="DIR",
        help="another checkout, to be measured beside this one",
    )
    parser.add_argument(
        "--repeat", type=int, default=15, metavar="N", help="measurements of each (default: 15)"
    )
    parser.add_argument(
        "--write", action="store_true", help="record the figures in benchmarks/results.json and .md"
    )
    options = parser.parse_args()
    facts = machine()
    programs = {"ours": ROOT / "build.py"} | (
        {"peer": options.before / "build.py"} if options.before else {}
    )
    alone: list[float] = []
    times: dict[tuple[str, str], list[float]] = {}
    with private_folder() as cache:
        environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
        # The first turn compiles bytecode; it does not count.
        for turn in range(options.repeat + 1):
            counts = turn > 0
            seconds = clock_process((sys.executable, "-c", "pass"), environment=environment)
            alone += [seconds] * counts
            for whose, program in programs.items():
                for name, (words, _) in COMMANDS.items():
                    command = (sys.executable, str(program), *words)
                    seconds = clock_process(command, environment=environment)
                    times.setdefault((whose, name), []).extend([seconds] * counts)
    python = statistics.median(alone)

    def ratios(whose: str, name: str) -> tuple[float, ...]:
        return tuple(seconds / python for seconds in times.get((whose, name), ()))

    section = Section(
        title="Start of a command",
        machine={**facts, "`python -c pass`": f"{python:.3f} s", "load at the end": load()},
        figures=tuple(
            Figure(
                name=f"`{name}`",
                unit="times",
                ours=ratios("ours", name),
                peer=ratios("peer", name),
                promise=most,
            )
            for name, (_, most) in COMMANDS.items()
        ),
        peer="the same commands of an earlier checkout, with the same Python."
        if options.before
        else "none.",
        details=("A figure is a multiple of the median time of `python -c pass` in the same run.",),
    )
    sys.stdout.write(describe(section))
    if options.write:
        write("commands", section)
    return 0


if __name__ == "__main__":
    sys.exit(main())
