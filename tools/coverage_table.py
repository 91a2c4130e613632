#!/usr/bin/env python3
"""Hold tests/coverage.toml to the tests that are there, and run the quick ones
that it names: `make coverage`.

The table has what AWS's pages describe, a row for each item. Its last word is a test: a row that
works has one, and a test that is gone is a failure. Each row that works is recorded by its words,
so that none falls without a word of why. `--all` runs the tests of smdistributed and those with
containers, too; `--record` adds what works now to the record.
"""

from __future__ import annotations

import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tests" / "coverage.toml"
RECORD = ROOT / "tests" / "coverage-worked.txt"
"""The rows that work or have worked, a line each as ``named`` writes it.

Lines are added, and none is taken away.
"""

LIBRARY = "smdistributed/"
"""Where tests begin that run with the Python that has torch, in a folder of their own."""

TORCH = ROOT / ".cache" / "peers" / "smdistributed" / "bin" / "python"
WORDS = {"Y": "yes", "P": "partly", "N": "no", "-": "not ours"}
"""State of a row to what a reader sees."""


@dataclass(frozen=True)
class Page:
    """A page of AWS's documentation.

    Attributes:
        name: By which rows name it.
        title: What a reader sees.
    """

    name: str
    title: str


@dataclass(frozen=True)
class Item:
    """One thing that a page describes.

    Attributes:
        page: The name of the page.
        number: Of the item, over all pages.
        item: What is described.
        state: A key of ``WORDS``.
        where: Where a reader finds it, with a link; ``""`` unless the state is Y.
        reason: Why it is not wholly there, in one line; ``""`` if the state is Y.
        fell: Why it worked and does no more, in one line; ``""`` for every other row.
        tests: Files, functions or cases, by their ids of pytest.
    """

    page: str
    number: int
    item: str
    state: str
    where: str = ""
    reason: str = ""
    fell: str = ""
    tests: tuple[str, ...] = ()

    @property
    def named(self) -> str:
        """Return its line of the record."""
        return f"{self.number} {self.item}"


@dataclass(frozen=True)
class Table:
    """The whole file."""

    pages: tuple[Page, ...]
    items: tuple[Item, ...]

    @property
    def named(self) -> tuple[str, ...]:
        """Return the ids of all tests that are named, once each."""
        return tuple(dict.fromkeys(test for item in self.items for test in item.tests))


def read_table(text: str) -> Table:
    """Read the text of the file; an unknown key is a ``TypeError``."""
    data = tomllib.loads(text)
    items = (Item(**{**row, "tests": tuple(row.get("tests", ()))}) for row in data["item"])
    return Table(tuple(Page(**row) for row in data["page"]), tuple(items))


def problems(table: Table, worked: Sequence[str], ids: Iterable[str] | None = None) -> list[str]:
    """Return what is wrong with the table.

    Args:
        table: The table.
        worked: The lines of the record.
        ids: Ids of all tests of the suites that are looked at. None: whether
            tests are there is not asked.
    """
    found = [problem for item in table.items for problem in _problems_of(item)]
    found += _fallen(table, worked)
    numbers = [item.number for item in table.items]
    found += [
        f"row {number}: is there twice"
        for number in sorted({n for n in numbers if numbers.count(n) > 1})
    ]
    names = {page.name for page in table.pages}
    found += [
        f"row {item.number}: page {item.page!r} is not known"
        for item in table.items
        if item.page not in names
    ]
    if ids is not None:
        there = _with_parents(ids)
        suites = {name.partition("/")[0] for name in there}
        found += [
            f"row {item.number}: test {test} is gone"
            for item in table.items
            for test in item.tests
            if test.partition("/")[0] in suites and test not in there
        ]
    return found


def _problems_of(item: Item) -> list[str]:
    """Return what is wrong with a row alone."""
    row = f"row {item.number}"
    if item.state not in WORDS:
        return [f"{row}: state {item.state!r} is not one of {', '.join(WORDS)}"]
    found = []
    if item.state == "Y" and not item.tests:
        found.append(
            f"{row}: state Y without a test: name one that shows it, or write P and a reason"
        )
    if item.state == "Y" and (item.reason or not item.where):
        found.append(f"{row}: state Y says `where`, and no `reason`")
    if item.state != "Y" and (item.where or not item.reason):
        found.append(f"{row}: state {item.state} says its `reason`, and not `where`")
    return found


def _fallen(table: Table, worked: Sequence[str]) -> list[str]:
    """Return what the record says of rows that work no more, and which rows it lacks."""
    record = RECORD.relative_to(ROOT)
    found = []
    rows = {item.named for item in table.items}
    found += [
        f"row {line!r} worked, and no row has this number and these words: bring it back, or write"
        f" the new in {record}"
        for line in worked
        if line not in rows
    ]
    for item in table.items:
        row = f"row {item.number}"
        works = item.state == "Y"
        has_worked = item.named in worked
        if works and not has_worked:
            found.append(
                f"{row}: works, and {record} lacks it: `{Path(__file__).relative_to(ROOT)}"
                " --record` adds it"
            )
        if has_worked and not works and not item.fell:
            found.append(
                f"{row}: worked, and has the state {item.state}: mend it, or say why in its `fell`"
            )
        if item.fell and (works or not has_worked):
            found.append(f"{row}: `fell` is for a row that worked and does no more")
    return found


def read_record() -> list[str]:
    """Return the lines of the record."""
    return RECORD.read_text(encoding="utf-8").splitlines()


def recorded(table: Table, worked: Sequence[str]) -> list[str]:
    """Return the lines of the record with those of all rows that work, by their numbers."""
    lines = {*worked, *(item.named for item in table.items if item.state == "Y")}
    return sorted(lines, key=lambda line: (int(line.partition(" ")[0]), line))


def _with_parents(ids: Iterable[str]) -> set[str]:
    """Return ids of tests with those of their functions and files."""
    found = set()
    for case in ids:
        function = case.partition("[")[0]
        found |= {case, function, function.partition("::")[0]}
    return found


def collect(tests: Sequence[str]) -> list[str]:
    """Return the ids of the tests in the files that these are in.

    The files that are there are asked.

    Tests of smdistributed are left out where the Python with torch is not: `make torch` makes it.
    """
    files = dict.fromkeys(test.partition("::")[0] for test in tests)
    files = {name: None for name in files if (ROOT / name).is_file()}
    library = [name.removeprefix(LIBRARY) for name in files if name.startswith(LIBRARY)]
    ids = _collected(sys.executable, ROOT, [name for name in files if not name.startswith(LIBRARY)])
    if TORCH.is_file():
        ids += [f"{LIBRARY}{each}" for each in _collected(str(TORCH), ROOT / LIBRARY, library)]
    return ids


def _collected(python: str, folder: Path, files: Sequence[str]) -> list[str]:
    if not files:
        return []
    # Every marker: tests with containers are named, too.
    command = [
        python,
        "-m",
        "pytest",
        "--collect-only",
        "--quiet",
        "-m",
        "",
        "-p",
        "no:cacheprovider",
        *files,
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            "pytest cannot collect the tests of"
            f" {folder}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        )
    return [line for line in done.stdout.splitlines() if "::" in line]


def page_markdown(table: Table) -> str:
    """Return the part of docs/coverage.md that follows from the table."""
    counts = {state: sum(item.state == state for item in table.items) for state in WORDS}
    summary = (
        f"{counts['Y']} of {len(table.items)} items are there, each with a test that shows it;"
        f" {counts['P']} are there partly, {counts['N']} are not, and {counts['-']} is not ours."
    )
    lines = [summary]
    for page in table.pages:
        lines += [
            "",
            f"## {page.title}",
            "",
            "| described | there | where, or why not |",
            "|---|---|---|",
        ]
        for item in table.items:
            if item.page == page.name:
                lines.append(f"| {item.item} | {WORDS[item.state]} | {item.where or item.reason} |")
    return "\n".join(lines) + "\n"


def main(words: Sequence[str]) -> int:
    """Check the table and run the tests; return the exit status."""
    table = read_table(TABLE.read_text(encoding="utf-8"))
    if "--record" in words:
        lines = recorded(table, read_record())
        RECORD.write_text("\n".join((*lines, "")), encoding="utf-8")
        return 0
    wrong = problems(table, read_record(), collect(table.named))
    for problem in wrong:
        print(f"{TABLE.relative_to(ROOT)}: {problem}", file=sys.stderr)
    if not TORCH.is_file():
        print(
            "the tests of smdistributed are not looked at: `make torch` sets their Python up",
            file=sys.stderr,
        )
    library = [test.removeprefix(LIBRARY) for test in table.named if test.startswith(LIBRARY)]
    own = [test for test in table.named if not test.startswith(LIBRARY)]
    processes = ["--numprocesses", "2", "--dist", "loadfile", "--quiet"]
    started = time.monotonic()
    # Without `-m` tests with containers are left out.
    status = [
        subprocess.run(
            [sys.executable, "-m", "pytest", *processes, *own], cwd=ROOT, check=False
        ).returncode
    ]
    if "--all" in words:
        torch = [str(TORCH), "-m", "pytest", *processes, *library]
        status.append(subprocess.run(torch, cwd=ROOT / LIBRARY, check=False).returncode)
        engine = [sys.executable, "-m", "pytest", "-m", "engine", *processes, *own]
        status.append(subprocess.run(engine, cwd=ROOT, check=False).returncode)
    seconds = time.monotonic() - started
    works = sum(item.state == "Y" for item in table.items)
    print(f"{works} of {len(table.items)} items have the state Y; their tests took {seconds:.0f} s")
    return 1 if wrong or any(status) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
