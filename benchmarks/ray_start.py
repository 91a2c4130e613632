#!/usr/bin/env python3
"""Measures the start of a program on Ray of two hosts: `train --mode ray` beside `ray start` by hand on both.

From the start of both hosts (network namespaces, root) to the first line of the program on the first. By hand is as
people write it in shell: the head, then the worker, then the program, each as soon as the one before is up. Both take
turns, and the fastest of each counts. Needs Ray in .cache/peers/ray (`tools/set-up-peers ray`).
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure import ROOT

sys.path.insert(0, str(ROOT / "tests"))
sys.path.insert(0, str(ROOT / "tests" / "launcher"))

from launcher_network import Network, as_host, engine_manifest, job_on, two_namespaces

PROMISE = 1.5
"""How many times as long as by hand ours may take."""

PROGRAMS = {name: str(ROOT / ".cache/peers/ray/bin" / name) for name in ("ray", "python")}
FIRST = "print('first line', flush=True)\n"
BOTH = "--num-cpus=2 --num-gpus=0 --disable-usage-stats --object-store-memory=100000000"
HEAD = "{ray} start --head --port=7777 --node-ip-address={address} --include-dashboard=false {options} && touch up-1"
WORKER = (
    "until [ -e up-1 ]; do sleep 0.05; done; {ray} start --address={address}:7777 {options} && touch up-2; sleep 600"
)
PROGRAM = "until [ -e up-2 ]; do sleep 0.05; done; RAY_ADDRESS={address}:7777 {python} first.py"


def ours(network: Network, folder: Path) -> float:
    """Return the seconds with the launcher."""
    manifest = engine_manifest(folder, **PROGRAMS)
    begun = time.monotonic()
    with job_on(network, folder, FIRST, {"sagemaker_ray_enabled": "true"}, manifest=manifest) as made:
        made[0].read_until("first line")
        return time.monotonic() - begun


def by_hand(network: Network, folder: Path) -> float:
    """Return the seconds with Ray's own commands, which return when what they start is up."""
    (folder / "first.py").write_text(FIRST, encoding="utf-8")
    given = {**PROGRAMS, "address": network.address(network.hosts[0]), "options": BOTH}
    lines = (f"{HEAD}; {PROGRAM}".format(**given), WORKER.format(**given))
    begun = time.monotonic()
    with contextlib.ExitStack() as stack:
        made = []
        for host, line in zip(network.hosts, lines, strict=True):
            words = network.inside(host, *as_host(host, folder), "sh", "-c", f"cd {folder}; {line}")
            made.append(subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
            stack.callback(made[-1].wait)
            stack.callback(made[-1].kill)
        assert made[0].stdout is not None
        for line in made[0].stdout:
            if line == "first line\n":
                return time.monotonic() - begun
    raise SystemExit("by hand the program did not start")


def main() -> int:
    """Print the seconds of each turn and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=3)
    turns = parser.parse_args().turns
    seconds: dict[str, list[float]] = {"by hand": [], "train --mode ray": []}
    for _ in range(turns):
        for name, measured in zip(seconds, (by_hand, ours), strict=True):
            with two_namespaces() as network, tempfile.TemporaryDirectory() as folder:
                seconds[name].append(measured(network, Path(folder)))
                print(f"{name}: {seconds[name][-1]:.1f} s", flush=True)
    hand, train = (min(found) for found in seconds.values())
    print(f"ratio {train / hand:.2f} (promise: at most {PROMISE})")
    return int(train / hand > PROMISE)


if __name__ == "__main__":
    sys.exit(main())
