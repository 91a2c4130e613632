#!/usr/bin/env python3
"""Measures what a host costs the leader of a large job: CPU time and memory, with simulated hosts on loopback.

The leader is a process of its own. All other hosts are in one more process, each with the launcher's own code for a
worker and a connection of its own. They join with a secret, send heartbeats for a while, and end. What is measured is
the leader's process alone, for each number of hosts, divided by that number: it must not grow with it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from measure import ROOT, Figure, Section, describe, load, machine, write

sys.path.insert(0, str(ROOT / "launcher"))

from trainworks_launcher.job.network import Limits
from trainworks_launcher.plan.plan import Control
from trainworks_launcher.supervise.control import Events
from trainworks_launcher.supervise.control.leader import Leader
from trainworks_launcher.supervise.control.worker import Worker
from trainworks_launcher.supervise.loop import Loop
from trainworks_launcher.supervise.outcome.outcome import SUCCEEDED, Outcome

LEADER = "127.0.0.1"
JOB = {"job name": "benchmark"}
SECRET = "a secret of the benchmark, known to all hosts"
RUN_SECONDS = 10.0
"""How long the job runs, which is only heartbeats."""

GROWTH = 1.5
"""What a host may cost with the most hosts, as a multiple of what it costs with the fewest."""

_PAGE_KB = os.sysconf("SC_PAGESIZE") / 1000


def control_of(count: int, port: int) -> Control:
    """Return the channel of a job with so many hosts beside the leader."""
    return Control(LEADER, (LEADER, *(f"host-{number}" for number in range(count))), port)


def nothing(*_: object) -> None:
    """Do nothing."""


def events(**changes: Callable[..., object]) -> Events:
    """Return what a role tells, which is ignored but for the changes."""
    fields = ("welcome", "go", "stop", "restart", "suspect", "finish", "left", "told", "log")
    return Events(**{name: changes.get(name, nothing) for name in fields}, judge=lambda outcome: outcome)  # type: ignore[arg-type]


def memory_kb() -> float:
    """Return what this process has in memory, in kB."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE_KB


def lead(count: int, port: int) -> None:
    """Be the leader, and print what it cost."""
    found: dict[str, float] = {}
    loop = Loop()

    def go() -> None:
        found.update(joined=time.monotonic() - started, join=time.process_time() - before, memory=memory_kb() - empty)
        loop.after(RUN_SECONDS, end)

    def end() -> None:
        found["run"] = time.process_time() - before - found["join"]
        found["memory at the end"] = memory_kb() - empty
        role.ended(Outcome(SUCCEEDED, 0, LEADER))

    made = events(go=go, finish=lambda _: role.leave(), left=loop.stop)
    role = Leader(loop, control_of(count, port), Limits(), JOB, SECRET, made)
    empty = memory_kb()
    role.begin()
    role.ready()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    started, before = time.monotonic(), time.process_time()
    loop.run()
    sys.stdout.write(json.dumps(found) + "\n")


def measure(count: int) -> dict[str, float]:
    """Return what one job with so many simulated hosts cost its leader."""
    command = (sys.executable, __file__, "--be-the-leader-of", str(count))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as leader:
        if leader.stdin is None or leader.stdout is None:
            raise SystemExit("no pipes")
        port = int(leader.stdout.readline())
        leader.stdout.readline()
        leader.stdin.write("\n")
        leader.stdin.flush()
        loop, left = Loop(), 0

        def leave() -> None:
            nonlocal left
            left += 1
            if left == count:
                loop.stop()

        def simulate(host: str) -> None:
            made = events(
                welcome=lambda *_: role.ready(),
                go=lambda: role.ended(Outcome(SUCCEEDED, 0, host)),
                finish=lambda _: role.leave(),
                left=leave,
            )
            role = Worker(loop, control, Limits(), JOB, host, SECRET, made)
            role.begin()

        control = control_of(count, port)
        for host in control.hosts[1:]:
            simulate(host)
        loop.run()
        found: dict[str, float] = json.loads(leader.stdout.readline())
    return found


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[128, 512], metavar="N", help="default: 128 512")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="default: 3")
    parser.add_argument("--write", action="store_true", help="record in benchmarks/results.json and results.md")
    parser.add_argument("--be-the-leader-of", type=int, metavar="N", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.be_the_leader_of:
        import socket

        with socket.socket() as probe:
            probe.bind(("", 0))
            port = int(probe.getsockname()[1])
        sys.stdout.write(f"{port}\n")
        lead(options.be_the_leader_of, port)
        return 0
    if options.repeat < 1 or min(options.hosts) < 1:
        parser.error("--repeat and --hosts must be at least 1")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    facts = machine()
    rows = {count: [measure(count) for _ in range(options.repeat)] for count in sorted(options.hosts)}
    figures: list[Figure] = []
    kinds = (
        ("CPU time of the leader for the join, per host", "join", "ms", 1000.0),
        ("CPU time of the leader for a minute of heartbeats, per host", "run", "ms", 1000.0 * 60 / RUN_SECONDS),
        ("memory of the leader, per host", "memory at the end", "kB", 1.0),
    )
    for name, key, unit, factor in kinds:
        first = 0.0
        for count, found in rows.items():
            values = tuple(one[key] * factor / count for one in found)
            promise = round(first * GROWTH, 2) if first else 0
            figures.append(Figure(name=f"{count} hosts: {name}", unit=unit, ours=values, promise=promise))
            first = first or statistics.median(values)
    for count, found in rows.items():
        seconds = tuple(one["joined"] for one in found)
        note = "both processes on this machine, the one with all the other hosts is the busier one"
        figures.append(Figure(name=f"{count} hosts: until all have joined", unit="s", ours=seconds, note=note))
    section = Section(
        title="What a host costs the leader",
        machine={**facts, "load at the end": load()},
        figures=tuple(figures),
        peer=f"none. A host may cost at most {GROWTH:g} times what it costs with the fewest hosts. Memory is that of "
        "the process; the kernel's for each connection is not in it.",
    )
    sys.stdout.write(describe(section))
    if options.write:
        write("leader", section)
    return 0


if __name__ == "__main__":
    sys.exit(main())
