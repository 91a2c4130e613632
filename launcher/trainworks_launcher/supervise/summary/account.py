"""The figures of this host, those of the others, and what becomes of them at the end of the job."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Callable, Mapping, Sequence

from trainworks_launcher.contract import names
from trainworks_launcher.contract.values import Json
from trainworks_launcher.plan.plan import NodePlan
from trainworks_launcher.supervise.children.output import Tail
from trainworks_launcher.supervise.loop import Loop
from trainworks_launcher.supervise.outcome.outcome import Outcome
from trainworks_launcher.supervise.summary import figures
from trainworks_launcher.supervise.summary.figures import Figures, Looked, Summary
from trainworks_launcher.supervise.summary.gauges import Gauges
from trainworks_launcher.supervise.verdict import outcome_files

MESSAGE = "figures"
"""The kind of this room's message to the leader: the fields of ``Figures``."""


class Account:
    """The account of one run, from the start of the program. Every method runs in the loop's thread."""

    def __init__(self, loop: Loop, plan: NodePlan, output: str, log: Callable[[str], None]) -> None:
        """The program starts now. output: directory of the job's output, ``""`` for none. log: prints a line."""
        self._plan = plan
        self._file = Path(output, names.SUMMARY_FILE) if output else None
        self._log = log
        self._started = time.monotonic()
        self._others: dict[str, Figures] = {}
        self._own = Figures()
        self.gauges = Gauges(loop)

    def told(self, host: str, message: Mapping[str, Json]) -> None:
        """Another host has ended, and tells its figures."""
        self._others[host] = figures.read_figures(message)

    def close(
        self, tails: Sequence[Tail], restarts: int, idle: float | None, ranks: Mapping[int, Looked]
    ) -> Mapping[str, Json]:
        """Nothing runs on this host any more. Return the fields for the leader.

        Args:
            tails: What the program, or its ranks, printed.
            restarts: How often its ranks were started again.
            idle: Seconds without progress; None where that was not looked at.
            ranks: What looks at the ranks showed.
        """
        first = min((tail.first_at for tail in tails if tail.first_at), default=None)
        memory, gpus = self.gauges.memory(), self.gauges.gpus()
        self.gauges.end()
        output = None if first is None else max(0.0, first - self._started)
        self._own = Figures(output, restarts, idle, memory, gpus, ranks)
        return self._own.fields()

    def write(self, outcome: Outcome) -> None:
        """The leader knows the figures of all hosts: print the line, and write the file."""
        plan = self._plan
        member = plan.member or plan.host
        hosts = plan.control.hosts if plan.control is not None else (member,)
        known = {**self._others, member: self._own}
        summary = Summary(
            outcome, plan.mode, time.monotonic() - self._started, {host: known.get(host) for host in hosts}
        )
        self._log(summary.line())
        if self._file is None:
            return
        if self._file.exists() and not outcome_files.is_summary(self._file):
            self._log(f"{self._file} is the script's own file, and is kept: the summary is in the log only")
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            _replace(self._file, json.dumps(summary.document(), indent=2) + "\n")
        except OSError as error:
            self._log(f"cannot write {self._file}: {error.strerror or error}")


def _replace(file: Path, text: str) -> None:
    """Write a file so that it is never seen half written. Raises OSError."""
    new = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        new.write_text(text, encoding="utf-8")
        new.replace(file)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink()
        raise
