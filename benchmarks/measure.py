"""What the benchmarks share: times of whole processes, figures beside a peer, and the file that
they are written to.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent

LIMIT = 1800.0
"""Seconds after which a process is given up; far above what any of them takes."""

HEAD = """\
# Measured

Written by the benchmarks with `--write`; do not edit. Every figure of a section was measured in
one run on one machine, ours and the peer's taking turns where a figure has more than one
measurement: the ratio is what to compare, the seconds belong to that machine and to what else it
did (its load is given; above the number of cores, everything waits). Medians, with the smallest
and the largest measurement in brackets.

Again: `make benchmark`, or `.venv/bin/python benchmarks/builds.py --help`; beside it commands.py,
extend.py, start.py, pipeline.py, restarts.py, sharding.py and channel.py.
"""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One line of a table.

    Attributes:
        name: What was measured.
        unit: ``s``, ``ms``, ``kB`` or ``MB`` (1 MB = 1,000,000 bytes).
        ours: Our measurements, in the order in which they were made.
        peer: The peer's; empty where there is none.
        promise: The most that it may be, as promised; 0 where nothing is.
        note: What one has to know to judge it.
    """

    name: str
    unit: str
    ours: tuple[float, ...]
    peer: tuple[float, ...] = ()
    promise: float = 0
    note: str = ""

    @property
    def ratio(self) -> float:
        """How many times ours the peer's is: above 1, ours is less."""
        return statistics.median(self.peer) / statistics.median(self.ours) if self.peer else 0


@dataclass(frozen=True, kw_only=True)
class Section:
    """What one run of one benchmark found.

    Attributes:
        title: What was measured, and with what.
        machine: Facts of the machine and of the run.
        figures: The table.
        peer: What the peer is, in words; "" where there is none.
        details: Further tables and paragraphs, in Markdown.
    """

    title: str
    machine: Mapping[str, str]
    figures: tuple[Figure, ...]
    peer: str
    details: tuple[str, ...] = field(default=())


def clock(action: Callable[[], object]) -> float:
    """Return how many seconds an action takes."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def clock_process(command: Sequence[str], *, environment: Mapping[str, str] | None = None) -> float:
    """Return how many seconds a process takes from its start to its end.

    Raises:
        SystemExit: It failed; says with what words.
    """
    return clock(lambda: run(command, environment=environment))


def run(command: Sequence[str], *, environment: Mapping[str, str] | None = None) -> str:
    """Run a process and return what it wrote to stdout.

    Raises:
        SystemExit: It failed; says with what words.
    """
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            env=dict(environment) if environment is not None else None,
            timeout=LIMIT,
        )
    except subprocess.TimeoutExpired as error:
        raise SystemExit(f"{' '.join(command)} had not ended after {LIMIT:g} s") from error
    if done.returncode != 0:
        raise SystemExit(
            f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}"
        )
    return done.stdout


def machine(**more: str) -> dict[str, str]:
    """Return the facts of this machine that a reader needs, and no name of it."""
    commit = ("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*")
    described = subprocess.run(commit, capture_output=True, text=True, check=False)
    return {
        "date": datetime.now(tz=UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cores": str(len(os.sched_getaffinity(0))),
        "processor": platform.machine(),
        "system": platform.system() + " " + platform.release().split("-", 1)[0],
        "Python": platform.python_version(),
        "commit": described.stdout.strip() or "unknown",
        "load at the start": load(),
        **more,
    }


def load() -> str:
    """Return how many processes wanted a core, on average over the last minute."""
    return f"{os.getloadavg()[0]:.1f}"


def amount(values: Sequence[float], unit: str) -> str:
    """Return the median of measurements for a table, with the smallest and the
    largest where there are several.
    """
    if not values:
        return ""
    median = statistics.median(values)
    digits = 0 if unit == "MB" else 1 if median >= 10 else 2 if median >= 0.1 else 3
    text = f"{median:,.{digits}f} {unit}"
    if len(values) > 1 and unit in ("s", "ms"):
        text += f" ({min(values):.{digits}f}..{max(values):.{digits}f})"
    return text


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows, the first one the heads, as a Markdown table that reads well
    in a terminal too.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def describe(section: Section) -> str:
    """Return a section as Markdown."""
    rows = [("", "ours", "peer", "peer / ours", "promised")]
    for figure in section.figures:
        promised = ""
        if figure.promise:
            kept = statistics.median(figure.ours) <= figure.promise
            promised = f"at most {figure.promise:,g} {figure.unit}: {'kept' if kept else 'BROKEN'}"
        rows.append(
            (
                figure.name,
                amount(figure.ours, figure.unit),
                amount(figure.peer, figure.unit),
                f"{figure.ratio:.2f}" if figure.peer else "",
                promised,
            )
        )
    parts = [
        f"## {section.title}",
        ", ".join(f"{name}: {value}" for name, value in section.machine.items()) + ".",
        table(rows) if section.figures else "",
        "\n".join(f"- {figure.name}: {figure.note}" for figure in section.figures if figure.note),
        f"The peer: {section.peer}" if section.peer else "",
        *section.details,
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def write(name: str, section: Section, folder: Path = HERE) -> None:
    """Record a section below ``folder``, in the place of an earlier one of its name, and write
    ``results.md`` anew.
    """
    results = folder / "results.json"
    known: dict[str, Any] = (
        json.loads(results.read_text(encoding="utf-8")) if results.exists() else {}
    )
    known[name] = asdict(section)
    results.write_text(json.dumps(dict(sorted(known.items())), indent=2) + "\n", encoding="utf-8")
    sections = [_section(content) for _, content in sorted(known.items())]
    (folder / "results.md").write_text(
        "\n".join([HEAD, *map(describe, sections)]), encoding="utf-8"
    )


def _section(content: Mapping[str, Any]) -> Section:
    figures = tuple(
        Figure(**{**figure, "ours": tuple(figure["ours"]), "peer": tuple(figure["peer"])})
        for figure in content["figures"]
    )
    return Section(**{**content, "figures": figures, "details": tuple(content["details"])})
