#!/usr/bin/env python3
"""Measures what copying a log costs: a script that prints an error word and then many lines, through `cat`, through our
launcher, and through the function with which sagemaker-training reads a script's output; and the launcher's memory.

The peer is `process.create` of sagemaker-training 5.1.4 with `capture_error=True`, as its framework images use it, from
`.cache/peers/sagemaker-training` (`make peers`); left out where that is not there. One Python runs the script for all.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from measure import ROOT, Figure, Section, describe, load, machine, write
from start import install_ours, write_inputs
from trainworks.engine.scratch import private_folder

PEER = ROOT / ".cache" / "peers" / "sagemaker-training" / "bin" / "python"
WATCH = """
import sys
from sagemaker_training import errors, process
process.create(sys.argv[1:], errors.ExecuteUserScriptError, 1, capture_error=True, cwd=".")
"""
SCRIPT = """
import sys
print("ValueError: an error word", file=sys.stderr, flush=True)
for number in range({lines}):
    print("step", number, "of an epoch, loss 0.123456, and some more words in a line", file=sys.stderr)
"""


def timed(command: Sequence[str], environment: Mapping[str, str]) -> tuple[float, float]:
    """Seconds and peak memory in MB of a command whose output goes through a pipe to a reader that drops it."""
    reader = subprocess.Popen(("cat",), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert reader.stdin is not None
    started = time.monotonic()
    process = subprocess.Popen(command, env=dict(environment), stdout=reader.stdin, stderr=reader.stdin)
    reader.stdin.close()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.monotonic() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    reader.wait()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with status {process.returncode}")
    return seconds, usage.ru_maxrss * 1024 / 1e6


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=100_000, metavar="N", help="default: 100000")
    parser.add_argument("--repeat", type=int, default=5, metavar="N", help="default: 5")
    parser.add_argument("--write", action="store_true", help="record in benchmarks/results.json and results.md")
    options = parser.parse_args()
    if options.repeat < 1 or options.lines < 1:
        parser.error("--repeat and --lines must be at least 1")
    facts = machine()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SM_", "SAGEMAKER_"))}
    environment["PYTHONUNBUFFERED"] = "1"  # as our launcher sets it, so that every line is a write for all of them
    with private_folder() as folder:
        train = str(install_ours(folder / "ours"))

        def job(lines: int) -> tuple[tuple[str, ...], Mapping[str, str], str]:
            base = folder / f"ml-{lines}"
            if not base.exists():
                write_inputs(base, SCRIPT.format(lines=lines), 1, {})
            return (sys.executable, "-I", train), {**environment, "SAGEMAKER_BASE_DIR": str(base)}, str(base)

        command, variables, base = job(options.lines)
        script = (sys.executable, str(Path(base, "code", "train.py")))
        copied, ours, peer = [], [], []
        for _ in range(options.repeat):
            copied.append(timed(("sh", "-c", 'exec 3>&1; "$@" 2>&1 >&3 | cat', "sh", *script), environment)[0])
            ours.append(timed(command, variables)[0])
        if PEER.exists():
            peer.append(timed((str(PEER), "-c", WATCH, *script), environment)[0])
        memory = [timed(*job(lines)[:2])[1] for lines in (options.lines // 10, options.lines * 5)]
    limit = 3 * sorted(copied)[len(copied) // 2]
    section = Section(
        title="Logs",
        machine={**facts, "load at the end": load()},
        figures=(
            Figure(name=f"{options.lines:,} lines after an error word, through cat", unit="s", ours=tuple(copied)),
            Figure(
                name=f"{options.lines:,} lines after an error word, whole job",
                unit="s",
                ours=tuple(ours),
                peer=tuple(peer),
                promise=round(limit, 3),
                note="promised: at most three times what cat takes; ours with the launcher's start",
            ),
            Figure(name=f"launcher's peak memory, {options.lines // 10:,} lines", unit="MB", ours=(memory[0],)),
            Figure(name=f"launcher's peak memory, {options.lines * 5:,} lines", unit="MB", ours=(memory[1],)),
        ),
        peer="`process.create(..., capture_error=True)` of sagemaker-training 5.1.4, measured once, without the rest "
        "of its `train`.",
    )
    sys.stdout.write(describe(section))
    if options.write:
        write("logs", section)
    return 0


if __name__ == "__main__":
    sys.exit(main())
