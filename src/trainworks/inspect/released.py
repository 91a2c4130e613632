"""Records the release of a target: the pushed image, and the changes of its packages."""

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
    """The record of `tools/release` about a target: the addresses of its image, and the changes
    since the release before.

    Attributes:
        date: Time of the push, ISO 8601.
        built: Its row of ``images/built.toml``.
        addresses: Of the image by its digest, one for each registry.
        updates: Number of security updates that the image lacked at the push.
        packages: Version of each package, by its kind and name: ``pypi/torch``.
        changed: The differences of packages to the release before, a line each; empty if there was
            no release before. See ``describe_package_changes``.
    """

    date: str
    built: Built
    addresses: Sequence[str]
    updates: int
    packages: Mapping[str, str]
    changed: Sequence[str]


def read_released(folder: Path) -> dict[str, Released]:
    """Return the releases, by the target's name.

    Args:
        folder: The results of `tools/release`, a folder for each target (docs/ship.md).

    Raises:
        OutputError: ``folder`` is not a folder, or one of its files is not the record of a release.
    """
    if not folder.is_dir():
        raise OutputError(
            f"{folder} is not a folder", hint="give the folder of results of `tools/release`"
        )
    paths = sorted(folder.glob(f"*/{FILE}"))
    return {path.parent.name: _read_released_file(path) for path in paths}


def write_released(folder: Path, built: Built, date: str) -> Released:
    """Record the release of a target, from the output of its commands in its folder.

    The record is written after the push: a release that fails before leaves the last record.

    Args:
        folder: The target's folder, with ``push.json``, ``outdated.json`` and ``sbom.cdx.json``.
        built: As ``Released.built``.
        date: As ``Released.date``.

    Raises:
        OutputError: One of the files is missing, or does not have the form that the commands write.
    """
    path = folder / FILE
    before = None
    if path.exists():
        before = _read_released_file(path)
    try:
        pushed = _read_result(folder, "push.json")["pushed"]
        now = Released(
            date=date,
            built=built,
            addresses=[image["image_uri"] for image in pushed],
            updates=len(_read_result(folder, "outdated.json")["updates"]),
            packages=_collect_versions(_read_result(folder, "sbom.cdx.json")),
            changed=[],
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OutputError(
            f"{folder}: not the results of a release: {type(error).__name__}: {error}"
        ) from error
    if before is not None:
        changed: Sequence[str] = describe_package_changes(before.packages, now.packages)
        # The same image may be pushed again, or to another repository: then the changes are still
        # those to the image before it.
        if _collect_digests(before) == _collect_digests(now):
            changed = before.changed
        now = replace(now, changed=changed)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(asdict(now), indent=1), encoding="utf-8")
    part.replace(path)
    return now


def _read_result(folder: Path, name: str) -> Any:
    """Return the JSON that a command of the release printed."""
    return json.loads((folder / name).read_text(encoding="utf-8"))


def _collect_versions(bill: Mapping[str, Any]) -> dict[str, str]:
    """Return the versions of the packages of a bill of materials (CycloneDX), by kind and name.

    For example ``{"pypi/torch": "2.6"}`` for ``"purl": "pkg:pypi/torch@2.6"``.
    """
    versions = {}
    for row in bill["components"]:
        # Components without a package URL are no packages, such as the operating system.
        if not row.get("purl"):
            continue
        name, _, _ = row["purl"].partition("@")
        versions[name.removeprefix("pkg:")] = row.get("version", "")
    return versions


def _collect_digests(released: Released) -> set[str]:
    """Return the digests of a release's image, one for each form of its manifest."""
    return {address.rpartition("@")[2] for address in released.addresses}


def _read_released_file(path: Path) -> Released:
    """Return the record of a release; raises ``OutputError`` for another file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return Released(**content | {"built": Built(**content["built"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        message = f"{path}: not what a release writes down: {type(error).__name__}: {error}"
        raise OutputError(message, hint="remove it, and run `tools/release` again") from error


def describe_package_changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Compare the versions of packages; return a line for each difference, by name.

    For example ``pypi/torch 2.5 -> 2.6``, ``pypi/numpy 2.1, new`` or ``... 2.1, gone``.
    """
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
