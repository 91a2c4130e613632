#!/usr/bin/env python3
"""Measures how long a job of many hosts needs to start on its control channel,
with and without the data-path trial.

Every host of the job is an end of the channel as the launcher has it, with an address of its own on
loopback. Four processes have a quarter of the ends each, on one loop each, which is harder than in
a job: there each host has a process. Measured is the time from the first process's start until the
leader lets the ranks start.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.queues import Queue
from pathlib import Path

from measure import ROOT, Figure, Section, describe, load, machine, write

sys.path.insert(0, str(ROOT / "launcher"))

from trainworks_launcher.contract.json_values import Json
from trainworks_launcher.job.network import Limits
from trainworks_launcher.plan.plan import Control
from trainworks_launcher.supervise.control import Events, Role, data_path
from trainworks_launcher.supervise.control.handshake import Credentials
from trainworks_launcher.supervise.control.leader import Leader
from trainworks_launcher.supervise.control.worker import Worker
from trainworks_launcher.supervise.event_loop import Loop

HOSTS, PROCESSES = 512, 4
JOB: Mapping[str, Json] = {"job name": "benchmark"}


class End:
    """One host of the job: its role, and its part in the trial."""

    def __init__(self, loop: Loop, control: Control, host: str, store: int) -> None:
        """store: port of rank 0's store; 0: the data path is not tried."""
        self.started = False
        self.problems: list[str] = []
        self._loop, self._control, self._host, self._store = loop, control, host, store
        self._data_path: data_path.DataPath | None = None
        events = Events(
            welcome=self._welcome,
            go=self._go,
            stop=lambda: None,
            restart=lambda: None,
            suspect=lambda _: None,
            judge=lambda outcome: outcome,
            inquire=lambda _, then: then(),
            finish=lambda outcome: self.problems.append(outcome.text),
            left=lambda: None,
            told=self._told,
            log=lambda _: None,
        )
        self.role: Role
        if host == control.leader:
            self.role = Leader(
                loop, control, Limits(), Credentials(control.leader, JOB, ""), events
            )
        else:
            self.role = Worker(loop, control, Limits(), Credentials(host, JOB, ""), events)

    def _welcome(self) -> None:
        if not self._store:
            self.role.ready()
            return
        own = data_path.LocalHost(
            host=self._host,
            place=data_path.DataInterface(self._host, "lo", "the benchmark"),
            store=data_path.Store(self._store, needed=True),
            needs_path=True,
            may_lose_hosts=False,
        )
        trial = data_path.Events(
            done=self.role.ready, warn=self.problems.append, fail=self.problems.append
        )
        self._data_path = data_path.DataPath(self._loop, own, self._control.hosts, self.role, trial)
        self._data_path.begin()

    def _told(self, host: str, kind: str, message: Mapping[str, Json]) -> None:
        if kind == data_path.KIND and self._data_path is not None:
            self._data_path.receive(host, message)

    def _go(self) -> None:
        self.started = True
        if self._data_path is not None:
            self._data_path.close()


def run_ends(
    control: Control, hosts: Sequence[str], store: int, told: Queue[tuple[float, list[str]]]
) -> None:
    """Run some ends in this process until the ranks of all of them may start.

    Tell when, and what went wrong.
    """
    loop = Loop()
    ends = [End(loop, control, host, store) for host in hosts]

    def look() -> None:
        if all(end.started or end.problems for end in ends):
            loop.stop()
        else:
            loop.after(0.01, look)

    for end in ends:
        end.role.begin()
    look()
    loop.run()
    told.put((time.monotonic(), [problem for end in ends for problem in end.problems]))
    time.sleep(1)  # the others may still read what was sent
    for end in ends:
        end.role.close()


def free_port() -> int:
    """Return a port that no program has."""
    with socket.create_server(("", 0)) as probe:
        return int(probe.getsockname()[1])


def start_job(count: int, *, trial: bool) -> float:
    """Return how many seconds a job needs until all its ranks may start.

    Raises:
        RuntimeError: A host says that something does not work.
    """
    hosts = tuple(f"127.{10 + number // 250}.0.{1 + number % 250}" for number in range(count))
    control = Control(hosts[0], hosts, free_port(), 0)
    store = free_port() if trial else 0
    context = multiprocessing.get_context("fork")
    told: Queue[tuple[float, list[str]]] = context.Queue()
    parts = [hosts[place::PROCESSES] for place in range(PROCESSES)]
    processes = [
        context.Process(target=run_ends, args=(control, part, store, told)) for part in parts
    ]
    began = time.monotonic()
    for process in processes:
        process.start()
    answers = [told.get(timeout=300) for _ in processes]
    for process in processes:
        process.join()
    if problems := [problem for _, some in answers for problem in some]:
        raise RuntimeError(f"{len(problems)} problems, the first: {problems[0]}")
    return max(at for at, _ in answers) - began


def main() -> int:
    """Measure, print, and with ``--write`` record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=HOSTS)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument(
        "--write", action="store_true", help=f"record it in {Path('benchmarks/results.md')}"
    )
    asked = parser.parse_args()
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    found = machine()
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(asked.repeat):
        for trial, made in seconds.items():
            made.append(start_job(asked.hosts, trial=trial))
            print(f"trial {trial}: {made[-1]:.2f} s, load {load()}", file=sys.stderr, flush=True)
    found["load at the end"] = load()
    section = Section(
        title=(
            f"Start of {asked.hosts} hosts on the control channel,"
            f" in {PROCESSES} processes of one machine"
        ),
        machine=found,
        figures=(
            Figure(name="with the data-path trial", unit="s", ours=tuple(seconds[True])),
            Figure(name="without it", unit="s", ours=tuple(seconds[False])),
        ),
        peer="",
    )
    print(describe(section))
    if asked.write:
        write("channel", section)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
