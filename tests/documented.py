"""Read the promises of docs/json.md about each command's result, for the tests that have one."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = (Path(__file__).parents[1] / "docs" / "json.md").read_text(encoding="utf-8")


def _keys(text: str) -> set[str]:
    """Return the keys of the result itself, without those of its parts in parentheses."""
    return set(re.findall(r"`([a-z_0-9]+)`", re.sub(r"\([^)]*\)", "", text)))


def _keys_of_table(heading: str) -> set[str]:
    """Return the keys of the table below a heading of the page: the first cell of each row."""
    section = PAGE.partition(f"\n### {heading}\n")[2].partition("\n#")[0]
    return set(re.findall(r"^\| `([a-z_0-9]+)` \|", section, re.MULTILINE))


DOCUMENTED = {
    command.replace("`", ""): (kind, _keys(keys.partition(": a list with")[0]))
    for command, kind, keys in re.findall(
        r"^\| `([^|]+)` \| (list|object) \| (.*) \|$", PAGE, re.MULTILINE
    )
}
"""Row of the table to the kind of the result and all keys that it can have."""

# Results with a table of their own.
DOCUMENTED["build --until plan"] = ("object", _keys_of_table("A plan"))
DOCUMENTED["outdated"] = ("object", _keys_of_table("A report of outdated"))


def promised(command: str, *absent: str) -> set[str]:
    """Return the keys of a command's result, without those that this one cannot have."""
    keys = DOCUMENTED[command][1]
    assert keys >= set(absent), f"{absent} are not documented for {command}"
    return keys - set(absent)
