"""What a release writes down of a target: which image was pushed, and what changed in it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from trainworks.errors import OutputError
from trainworks.facts.rows import Built

FILE = "released.json"


@dataclass(frozen=True, kw_only=True)
class Released:
    """What `tools/release` writes down of a target: where its image is, and
    what changed since the one before.

    Attributes:
        date: When it was pushed, ISO 8601.
        built: Its row of ``images/built.toml``.
        addresses: Of the image by its digest, one for each registry.
        updates: Number of security updates that it lacked then.
        packages: Version of each package, by its kind and name.
        changed: What is in it and was not in the release before, a line each;
            empty if there was none.
    """

    date: str
    built: Built
    addresses: Sequence[str]
    updates: int
    packages: Mapping[str, str]
    changed: Sequence[str]


def read_released(folder: Path) -> dict[str, Released]:
    """Return what was released, by the target's name.

    Args:
        folder: The results of `tools/release`, a folder for each target (docs/ship.md).

    Raises:
        OutputError: It is no folder, or a file in it is not one of these.
    """
    if not folder.is_dir():
        raise OutputError(
            f"{folder} is not a folder", hint="give the folder of results of `tools/release`"
        )
    return {path.parent.name: _read(path) for path in sorted(folder.glob(f"*/{FILE}"))}


def write_released(folder: Path, built: Built, date: str) -> Released:
    """Write down that a target was released, from what the commands of its
    release printed into its folder.

    It is written once the image is pushed: a release that fails before leaves the file that was.

    Args:
        folder: With ``push.json``, ``outdated.json`` and ``sbom.cdx.json``.
        built: As ``Released.built``.
        date: As ``Released.date``.

    Raises:
        OutputError: One of the files is missing, or is not what the commands write.
    """
    path = folder / FILE
    before = _read(path) if path.exists() else None
    try:
        now = Released(
            date=date,
            built=built,
            addresses=[each["image_uri"] for each in _result(folder, "push.json")["pushed"]],
            updates=len(_result(folder, "outdated.json")["updates"]),
            packages=_packages(_result(folder, "sbom.cdx.json")),
            changed=[],
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OutputError(
            f"{folder}: not the results of a release: {type(error).__name__}: {error}"
        ) from error
    if before is not None:
        # The same image may be pushed again, or to another repository.
        same = _digests(before) == _digests(now)
        changed = before.changed if same else changes(before.packages, now.packages)
        now = replace(now, changed=changed)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(asdict(now), indent=1), encoding="utf-8")
    part.replace(path)
    return now


def _result(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text(encoding="utf-8"))


def _packages(bill: Mapping[str, Any]) -> dict[str, str]:
    """Return the versions of the packages of a bill of materials, by kind and name."""
    named = [row for row in bill["components"] if row.get("purl")]
    return {
        row["purl"].partition("@")[0].removeprefix("pkg:"): row.get("version", "") for row in named
    }


def _digests(released: Released) -> set[str]:
    return {address.rpartition("@")[2] for address in released.addresses}


def _read(path: Path) -> Released:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return Released(**content | {"built": Built(**content["built"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        what = f"{path}: not what a release writes down: {type(error).__name__}: {error}"
        raise OutputError(what, hint="remove it, and run `tools/release` again") from error


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Return what is different between packages and their versions, a line each, by name."""
    lines = []
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        if old == new:
            continue
        if old is None:
            lines.append(f"{name} {new}, new")
        elif new is None:
            lines.append(f"{name} {old}, gone")
        else:
            lines.append(f"{name} {old} -> {new}")
    return lines
