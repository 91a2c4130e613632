"""The rows of ``compatibility.toml``: which versions work together, as data."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

from packaging.specifiers import SpecifierSet

PRESENT = "present"
REFERENCE = re.compile(r"\{([a-z0-9-]+)\}")


@dataclass(frozen=True)
class Part:
    """How a Dockerfile says which version of a part it installs.

    Attributes:
        name: Rules use it.
        title: Messages use it.
        patterns: The groups of a match, joined by dots, are the version.
        several: A stage can have several versions; the first one counts.
    """

    name: str
    title: str
    patterns: tuple[re.Pattern[str], ...]
    several: bool


@dataclass(frozen=True)
class Incompatibility:
    """Versions that do not go together, or that have a known problem.

    Attributes:
        when: Ranges of versions by part; the row is for stages in which all of them hold.
        require: Ranges that must hold then; empty: what ``when`` describes is wrong by itself.
        reason: Why.
        instead: What to write instead.
        source: Where the fact comes from.
        advice: It is worth knowing, but not wrong.
    """

    when: Mapping[str, str]
    require: Mapping[str, str]
    reason: str
    instead: str
    source: str
    advice: bool


@dataclass(frozen=True)
class Table:
    """All rows; ``efa_moved_plugin`` is the first EFA installer with the NCCL plugin in another folder."""

    parts: tuple[Part, ...]
    rules: tuple[Incompatibility, ...]
    efa_moved_plugin: str


@cache
def table() -> Table:
    """Return the rows that come with this package."""
    content = tomllib.loads(resources.files("trainworks_lint").joinpath("compatibility.toml").read_text("utf-8"))
    return Table(
        tuple(
            Part(row["name"], row["title"], tuple(map(re.compile, row["patterns"])), row.get("several", False))
            for row in content["part"]
        ),
        tuple(
            Incompatibility(
                row["when"],
                row.get("require", {}),
                row["reason"],
                row["instead"],
                row["source"],
                row.get("severity") == "advice",
            )
            for row in content["rule"]
        ),
        content["efa_moved_plugin"],
    )


def holds(versions: Mapping[str, str], part: str, allowed: str) -> bool | None:
    """Return whether the version of a part is in a range.

    Args:
        versions: By part, as far as they are known.
        part: The part.
        allowed: ``>=1.2,<2``, ``11.8|12.1`` (12.1.1 is one), ``>={other part}`` or ``present``.

    Returns:
        None if a version that is needed for the answer is not known.
    """
    if allowed == PRESENT:
        return part in versions
    needed = [part, *REFERENCE.findall(allowed)]
    if any(name not in versions for name in needed):
        return None
    allowed = REFERENCE.sub(lambda match: versions[match[1]], allowed)
    return any(_is(versions[part], alternative) for alternative in allowed.split("|"))


def _is(version: str, condition: str) -> bool:
    if condition[0] in "<>=!":
        return SpecifierSet(condition).contains(version, prereleases=True)
    return version == condition or version.startswith(f"{condition}.")
