#!/usr/bin/env python3
"""Check that the tests of tests/coverage.toml exist, and run the quick ones: `make coverage`.

The table has a row for each item that AWS's pages describe. A row that works names a test, and a
missing test is a failure. Each row that works is recorded by its words: a recorded row that stops
working needs a reason. `--all` runs the tests of smdistributed and those with containers, too;
`--record` adds the rows that work now to the record.
"""

from __future__ import annotations

import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from tool_start import FileError, exit_status_of, use_environment

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tests" / "coverage.toml"
RECORD = ROOT / "tests" / "coverage-worked.txt"
"""The rows that work or have worked, as lines of ``Item.named``.

Lines are added, and never removed.
"""

LIBRARY = "smdistributed/"
"""Beginning of the tests that run with the Python that has torch, in their own folder."""

TORCH = ROOT / ".cache" / "peers" / "smdistributed" / "bin" / "python"
WORDS = {"Y": "yes", "P": "partly", "N": "no", "-": "not ours"}
"""State of a row to what a reader sees."""


@dataclass(frozen=True)
class Page:
    """A page of AWS's documentation.

    Attributes:
        name: The name in rows.
        title: The title for readers.
    """

    name: str
    title: str


@dataclass(frozen=True)
class Item:
    """One thing that a page describes.

    Attributes:
        page: The name of the page.
        number: The number of the item, over all pages.
        item: The description.
        state: A key of ``WORDS``.
        where: The place of the documentation, with a link; ``""`` unless the state is Y.
        reason: The reason for another state than Y, in one line.
        fell: The reason why the item no longer works, in one line; ``""`` for other rows.
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
        """Return the item's line of the record."""
        return f"{self.number} {self.item}"


@dataclass(frozen=True)
class Table:
    """The complete file."""

    pages: tuple[Page, ...]
    items: tuple[Item, ...]

    @property
    def named(self) -> tuple[str, ...]:
        """Return the ids of all named tests, once each."""
        tests: dict[str, None] = {}
        for item in self.items:
            tests |= dict.fromkeys(item.tests)
        return tuple(tests)


Row = TypeVar("Row", Page, Item)


def read_table(text: str) -> Table:
    """Read the text of the file.

    Raises:
        FileError: It is not TOML, or a row has an unknown key or lacks one.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise FileError(f"tests/coverage.toml: not TOML: {error}") from error
    pages = [_read_row(Page, "page", row) for row in data.get("page", ())]
    items = []
    for row in data.get("item", ()):
        tests = tuple(row.get("tests", ()))
        items.append(_read_row(Item, "item", {**row, "tests": tests}))
    return Table(tuple(pages), tuple(items))


def _read_row(row_type: type[Row], kind: str, row: Mapping[str, Any]) -> Row:
    """Return a row of the file. Raises FileError for an unknown key, or one that is missing."""
    columns = fields(row_type)
    required = {column.name for column in columns if column.default is MISSING}
    unknown = row.keys() - {column.name for column in columns}
    problems = [f"unknown key {name!r}" for name in sorted(unknown)]
    problems += [f"key {name!r} is missing" for name in sorted(required - row.keys())]
    if problems:
        where = row.get("number", row.get("name", "without a number"))
        raise FileError(f"tests/coverage.toml: {kind} {where}: {', '.join(problems)}")
    return row_type(**row)


def problems(table: Table, worked: Sequence[str], ids: Iterable[str] | None = None) -> list[str]:
    """Return the problems of the table.

    Args:
        table: The table.
        worked: The lines of the record.
        ids: Ids of all tests of some suites; None: the existence of tests is
            not checked.
    """
    lines = []
    for item in table.items:
        lines += _problems_of(item)
    lines += _record_problems(table, worked)
    numbers = [item.number for item in table.items]
    repeated = {number for number in numbers if numbers.count(number) > 1}
    lines += [f"row {number}: is there twice" for number in sorted(repeated)]
    names = {page.name for page in table.pages}
    for item in table.items:
        if item.page not in names:
            lines.append(f"row {item.number}: page {item.page!r} is not known")
    if ids is not None:
        lines += _missing_tests(table, ids)
    return lines


def _missing_tests(table: Table, ids: Iterable[str]) -> list[str]:
    """Return a line for each named test that is in none of the suites with these ids."""
    existing = _with_parents(ids)
    suites = {name.partition("/")[0] for name in existing}
    lines = []
    for item in table.items:
        for test in item.tests:
            suite = test.partition("/")[0]
            if suite in suites and test not in existing:
                lines.append(f"row {item.number}: test {test} is gone")
    return lines


def _problems_of(item: Item) -> list[str]:
    """Return the problems of a row alone."""
    row = f"row {item.number}"
    if item.state not in WORDS:
        return [f"{row}: state {item.state!r} is not one of {', '.join(WORDS)}"]
    lines = []
    if item.state == "Y" and not item.tests:
        lines.append(
            f"{row}: state Y without a test: name one that shows it, or write P and a reason"
        )
    if item.state == "Y" and (item.reason or not item.where):
        lines.append(f"{row}: state Y says `where`, and no `reason`")
    if item.state != "Y" and (item.where or not item.reason):
        lines.append(f"{row}: state {item.state} says its `reason`, and not `where`")
    return lines


def _record_problems(table: Table, worked: Sequence[str]) -> list[str]:
    """Return the differences between the record and the table.

    They are rows that no longer work, and rows that the record lacks.
    """
    record = RECORD.relative_to(ROOT)
    rows = {item.named for item in table.items}
    missing = [line for line in worked if line not in rows]
    lines = [
        f"row {line!r} worked, and no row has this number and these words: bring it back,"
        f" or write the new in {record}"
        for line in missing
    ]
    for item in table.items:
        row = f"row {item.number}"
        works = item.state == "Y"
        has_worked = item.named in worked
        if works and not has_worked:
            program = Path(__file__).relative_to(ROOT)
            lines.append(f"{row}: works, and {record} lacks it: `{program} --record` adds it")
        if has_worked and not works and not item.fell:
            lines.append(
                f"{row}: worked, and has the state {item.state}: mend it, or say why in its `fell`"
            )
        if item.fell and (works or not has_worked):
            lines.append(f"{row}: `fell` is for a row that worked and does no more")
    return lines


def read_record() -> list[str]:
    """Return the lines of the record."""
    return RECORD.read_text(encoding="utf-8").splitlines()


def recorded(table: Table, worked: Sequence[str]) -> list[str]:
    """Return the lines of the record with those of all rows that work, by their numbers."""
    lines = {*worked, *(item.named for item in table.items if item.state == "Y")}
    return sorted(lines, key=lambda line: (int(line.partition(" ")[0]), line))


def _with_parents(ids: Iterable[str]) -> set[str]:
    """Return ids of tests with those of their functions and files."""
    all_ids = set()
    for case in ids:
        function = case.partition("[")[0]
        all_ids |= {case, function, function.partition("::")[0]}
    return all_ids


def collect(tests: Sequence[str]) -> list[str]:
    """Return the ids of all tests in the existing files of these tests.

    Tests of smdistributed are left out without the Python with torch, which `make torch` makes.
    """
    library_files = []
    own_files = []
    for name in dict.fromkeys(test.partition("::")[0] for test in tests):
        if not (ROOT / name).is_file():
            continue
        if name.startswith(LIBRARY):
            library_files.append(name.removeprefix(LIBRARY))
        else:
            own_files.append(name)
    ids = _collect_files(sys.executable, ROOT, own_files)
    if TORCH.is_file():
        library_ids = _collect_files(str(TORCH), ROOT / LIBRARY, library_files)
        ids += [f"{LIBRARY}{test}" for test in library_ids]
    return ids


def _collect_files(python: str, folder: Path, files: Sequence[str]) -> list[str]:
    if not files:
        return []
    command = [python, "-m", "pytest", "--collect-only", "--quiet", "-p", "no:cacheprovider"]
    # Every marker: tests with containers are named, too.
    command += ["-m", "", *files]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(
            "pytest cannot collect the tests of"
            f" {folder}:\n{result.stdout[-3000:]}{result.stderr[-3000:]}"
        )
    return [line for line in result.stdout.splitlines() if "::" in line]


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
    """Check the table and run the tests; return the exit status.

    Raises:
        FileError: The table cannot be read.
    """
    table = read_table(TABLE.read_text(encoding="utf-8"))
    if "--record" in words:
        lines = recorded(table, read_record())
        RECORD.write_text("\n".join((*lines, "")), encoding="utf-8")
        return 0
    table_problems = problems(table, read_record(), collect(table.named))
    for problem in table_problems:
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
    quick = [sys.executable, "-m", "pytest", *processes, *own]
    statuses = [subprocess.run(quick, cwd=ROOT, check=False).returncode]
    if "--all" in words:
        torch = [str(TORCH), "-m", "pytest", *processes, *library]
        statuses.append(subprocess.run(torch, cwd=ROOT / LIBRARY, check=False).returncode)
        # As the Makefile has it: tests that build images need longer.
        limit = ["-o", "faulthandler_timeout=7200"]
        engine = [sys.executable, "-m", "pytest", "-m", "engine", *limit, *processes, *own]
        statuses.append(subprocess.run(engine, cwd=ROOT, check=False).returncode)
    seconds = time.monotonic() - started
    works = sum(item.state == "Y" for item in table.items)
    print(f"{works} of {len(table.items)} items have the state Y; their tests took {seconds:.0f} s")
    return 1 if table_problems or any(statuses) else 0


if __name__ == "__main__":
    use_environment()
    sys.exit(exit_status_of(lambda: main(sys.argv[1:])))
