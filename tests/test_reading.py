"""The figures of ``make reading``, on a program whose parts are counted by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from reading import PACKAGES, PEERS, Counts, figures_of, measure, measure_folders

TOOL = Path(__file__).resolve().parent.parent / "tools" / "reading.py"
PROGRAM = '''\
#!/usr/bin/env python3
"""Say what it does, with ``what`` in code."""

# Nobody asked them.
LIMIT = 3
"""The limit."""


def count(given, limit):
    found = [word for word in given if word]  # noqa: E501
    return len(found) if limit else 0
'''
"""Eleven lines, the tokens of its code lines:
LIMIT = 3                              3
def count ( given , limit ) :          8
found = [ word ... given if word ]    11
return len ( found ) if limit else 0   9
"""


def test_the_parts_of_a_program_are_counted() -> None:
    counts = measure(PROGRAM)
    assert counts == Counts(
        lines=11,
        wide_lines=0,
        comment_lines=2,  # the first line, too
        code_lines=4,
        tokens=3 + 8 + 11 + 9,
        conditionals=1,
        comprehensions=1,
        names=5,  # LIMIT, given, limit, found, word
        pronoun_names=2,  # given, found
        words=12,  # say what it does with in code / the limit / nobody asked them
        what=1,
        pronouns=2,  # it, them
    )


def test_figures_are_ratios_of_the_sums() -> None:
    figures = figures_of(measure(PROGRAM))
    assert (figures.tokens, figures.conditionals, figures.comprehensions) == ("7.8", "91", "91")
    assert (figures.comments, figures.wide, figures.names) == ("18.2", "0.0", "40.0")
    assert (figures.what, figures.pronouns) == ("83.3", "167")


def test_nothing_has_no_figures() -> None:
    assert set(vars(figures_of(Counts())).values()) == {"-"}


@pytest.mark.parametrize(("columns", "wide"), [(100, 0), (101, 1)])
def test_a_line_above_the_limit_is_wide(columns: int, wide: int) -> None:
    assert measure("#" * columns + "\n").wide_lines == wide


def test_files_of_a_folder_are_added_up(tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    for name in ("one.py", "room/two.py"):
        (tmp_path / name).write_text(PROGRAM, encoding="utf-8")
    (tmp_path / "notes.txt").write_text("no program", encoding="utf-8")
    counts = measure_folders([tmp_path])
    assert (counts.lines, counts.tokens) == (22, 62)


def test_the_table_has_every_package_and_every_peer() -> None:
    done = subprocess.run(
        (sys.executable, str(TOOL)),
        capture_output=True,
        text=True,
        check=True,
    )
    rows = {line[:22].strip() for line in done.stdout.splitlines()}
    assert rows - {""} == {*PACKAGES, *PEERS}


def test_another_folder_is_measured_instead(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    done = subprocess.run(
        (sys.executable, str(TOOL), str(tmp_path)),
        capture_output=True,
        text=True,
        check=True,
    )
    first = done.stdout.splitlines()[2]
    assert first.startswith(tmp_path.name[:22])
    assert first[22:].split() == ["7.8", "91", "91", "18.2", "0.0", "40.0", "83.3", "167"]
