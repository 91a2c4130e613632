"""Test the table of the features that AWS's pages describe: each row that works has a test, and
none is lost without a word.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from coverage_table import (
    TABLE,
    TORCH,
    collect,
    page_markdown,
    problems,
    read_record,
    read_table,
    recorded,
)

TEXT = TABLE.read_text(encoding="utf-8")
SMALL = """
[[page]]
name = "tips"
title = "Tips"

[[item]]
page = "tips"
number = 1
item = "two hosts"
state = "Y"
where = "[tips](tips.md)"
tests = ["tests/test_tips.py::test_hosts[one]"]

[[item]]
page = "tips"
number = 2
item = "a device"
state = "P"
reason = "no device has run it"
"""
WORKED = ("1 two hosts",)
IDS = ("tests/test_tips.py::test_hosts[one]", "tests/test_tips.py::test_hosts[two]")


def test_the_table_is_sound() -> None:
    assert problems(read_table(TEXT), read_record()) == []


def test_each_test_of_the_table_is_there() -> None:
    table = read_table(TEXT)
    ids = collect(table.named)
    assert problems(table, read_record(), ids) == []
    assert {test_id.partition("/")[0] for test_id in ids} == {
        "launcher",
        "tests",
        *(["smdistributed"] if TORCH.is_file() else []),
    }


def test_a_sound_table_of_two_rows() -> None:
    assert problems(read_table(SMALL), WORKED, IDS) == []


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('tests = ["tests/test_tips.py::test_hosts[one]"]', "", "row 1: state Y without a test"),
        (
            "test_hosts[one]",
            "test_hosts[three]",
            "row 1: test tests/test_tips.py::test_hosts[three] is gone",
        ),
        ("test_hosts[one]", "test_gone", "row 1: test tests/test_tips.py::test_gone is gone"),
        ("test_tips.py::test_hosts[one]", "test_gone.py", "row 1: test tests/test_gone.py is gone"),
        (
            "number = 1",
            "number = 3",
            "row '1 two hosts' worked, and no row has this number and these words",
        ),
        (
            'item = "two hosts"',
            'item = "three hosts"',
            "row '1 two hosts' worked, and no row has this number and these",
        ),
        (
            'item = "two hosts"',
            'item = "three hosts"',
            "row 1: works, and tests/coverage-worked.txt lacks it",
        ),
        (
            '"Y"\nwhere = "[tips](tips.md)"',
            '"P"\nreason = "why"',
            "row 1: worked, and has the state P: mend it",
        ),
        (
            'reason = "no',
            'fell = "why"\nreason = "no',
            "row 2: `fell` is for a row that worked and does no more",
        ),
        (
            'where = "',
            'fell = "why"\nwhere = "',
            "row 1: `fell` is for a row that worked and does no more",
        ),
        ('where = "[tips](tips.md)"', 'reason = "none"', "row 1: state Y says `where`"),
        ('reason = "no device has run it"', "", "row 2: state P says its `reason`"),
        ('state = "P"', 'state = "maybe"', "row 2: state 'maybe' is not one of"),
        ("number = 2", "number = 1", "row 1: is there twice"),
        (
            'page = "tips"\nnumber = 2',
            'page = "tricks"\nnumber = 2',
            "row 2: page 'tricks' is not known",
        ),
    ],
)
def test_what_is_wrong_is_said(old: str, new: str, message: str) -> None:
    assert old in SMALL
    found_problems = problems(read_table(SMALL.replace(old, new)), WORKED, IDS)
    assert [problem for problem in found_problems if problem.startswith(message)], found_problems


def test_a_row_that_fell_says_why_and_stays_in_the_record() -> None:
    fell = SMALL.replace(
        '"Y"\nwhere = "[tips](tips.md)"', '"P"\nfell = "AWS took it away"\nreason = "gone"'
    )
    table = read_table(fell)
    assert problems(table, WORKED, IDS) == []
    assert recorded(table, WORKED) == [*WORKED]
    assert recorded(read_table(SMALL), ()) == [*WORKED]


def test_a_suite_whose_python_is_missing_is_not_asked() -> None:
    other = SMALL.replace(
        "tests/test_tips.py::test_hosts[one]", "smdistributed/tests/test_x.py::test_y"
    )
    assert problems(read_table(other), WORKED, IDS) == []


def test_a_reader_sees_what_is_there_and_why_not() -> None:
    assert page_markdown(read_table(SMALL)).splitlines() == [
        (
            "1 of 2 items are there, each with a test that shows it; 1 are there partly, 0 are not,"
            " and 0 is not ours."
        ),
        "",
        "## Tips",
        "",
        "| described | there | where, or why not |",
        "|---|---|---|",
        "| two hosts | yes | [tips](tips.md) |",
        "| a device | partly | no device has run it |",
    ]


def test_the_tree_has_what_was_asked_for(root: Path) -> None:
    file_names = {path.name for path in root.iterdir()}
    assert file_names >= {"images", "templates", "launcher", "build.py", "tests", "buildspec.yml"}
