#!/usr/bin/env python3
"""Measures how long many hosts need to join: real launchers, each in a network namespace of its own, on one bridge.

Two figures for each number of hosts: from the start of the first launcher to the moment in which the script runs on
the last host (every host is a Python that this one machine has to start), and, with all others waiting already, from
the start of the leader to the same moment, which is the join itself. Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from measure import ROOT, Figure, Section, describe, load, machine, write
from trainworks.engine.scratch import private_folder

sys.path.insert(0, str(ROOT / "tests"))
sys.path.insert(0, str(ROOT / "tests" / "launcher"))

import launcher_support
from launcher_network import Host, Network, job_on, network_of

SCRIPT = "import time\nprint('first line', time.monotonic(), flush=True)\n"
PROMISED = {64: 6.0}  # seconds
SECRET = {"TRAINWORKS_JOB_SECRET": "a secret of the benchmark, known to all hosts"}


def write_manifest(folder: Path) -> Path:
    """Write the manifest of a made-up image with this Python; one on PATH may be a shell script that looks for one."""
    folder.mkdir(parents=True)
    return launcher_support.write_manifest(folder / "image.json", {"python": sys.executable})


def last_line(hosts: Sequence[Host]) -> float:
    """When the script's first line was printed on the last host; every host has to end well."""
    statuses = [host.wait() for host in hosts]
    if any(statuses):
        raise SystemExit("\n".join(host.text[-2000:] for host in hosts if host.process.returncode))
    return max(float(found) for host in hosts for found in re.findall(r"first line (\d+\.\d+)", host.text))


def measure_whole(network: Network, folder: Path) -> float:
    """Seconds from the start of the first launcher until the script runs on the last host."""
    manifest = write_manifest(folder)
    with job_on(network, folder, SCRIPT, {}, variables=SECRET, manifest=manifest) as hosts:
        return last_line(hosts) - hosts[0].started


def measure_join(network: Network, folder: Path) -> float:
    """Seconds from the start of the leader, which all others are looking for, until the script runs on the last."""
    leader, *others = network.hosts
    manifest = write_manifest(folder)
    with job_on(network, folder, SCRIPT, {}, variables=SECRET, manifest=manifest, started=others) as workers:
        for worker in workers:
            worker.read_until("joining ")
        leaders = job_on(network, folder, SCRIPT, {}, variables=SECRET, manifest=manifest, started=(leader,))
        with leaders as (first,):
            return last_line((first, *workers)) - first.started


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 64], metavar="N", help="default: 2 64")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="default: 3")
    parser.add_argument("--write", action="store_true", help="record in benchmarks/results.json and results.md")
    options = parser.parse_args()
    if options.repeat < 1 or min(options.hosts) < 2:
        parser.error("--repeat must be at least 1 and --hosts at least 2")
    facts = machine()
    figures = []
    for count in options.hosts:
        with network_of(count) as network, private_folder() as folder:
            whole, joining = (
                tuple(measure(network, folder / f"{measure.__name__}-{number}") for number in range(options.repeat))
                for measure in (measure_whole, measure_join)
            )
        figures += [
            Figure(
                name=f"{count} hosts: first launcher's start to the script on the last host",
                unit="s",
                ours=whole,
                promise=PROMISED.get(count, 0),
            ),
            Figure(
                name=f"{count} hosts: leader's start to the script on the last host",
                unit="s",
                ours=joining,
                note="the others look for it already, each at least once a second",
            ),
        ]
    section = Section(
        title="Hosts that join",
        machine={**facts, "load at the end": load()},
        figures=tuple(figures),
        peer="none. Every host is a network namespace with its own PID and UTS namespace on this one machine, joined "
        "by veth pairs and a bridge, and proves that it knows the job's secret; mode none, so no other program runs.",
    )
    sys.stdout.write(describe(section))
    if options.write:
        write("join", section)
    return 0


if __name__ == "__main__":
    sys.exit(main())
