"""What `tools/release` writes down of each target: where its image is, and what changed since the one before.

It is one file of each target, written once the image is pushed: a release that fails before leaves the one that was.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainworks.errors import OutputError

FILE = "released.json"


@dataclass(frozen=True, kw_only=True)
class Released:
    """A target's image in a registry.

    Attributes:
        date: When it was pushed, ISO 8601.
        addresses: Of the image by its digest, one for each registry.
        updates: Number of security updates that it lacked then.
        sizes: Component and bytes in the image, largest first.
        packages: Version of each package, by its kind and name.
        changed: What is in it and was not in the release before, a line each; empty if there was none.
    """

    date: str
    addresses: tuple[str, ...]
    updates: int
    sizes: tuple[tuple[str, int], ...]
    packages: Mapping[str, str]
    changed: tuple[str, ...]

    @property
    def digests(self) -> set[str]:
        """What the image is, wherever it lies."""
        return {address.rpartition("@")[2] for address in self.addresses}


def read_released(folder: Path) -> dict[str, Released]:
    """Return what was released, by the target's name.

    Args:
        folder: The results of `tools/release`, a folder for each target (docs/ship.md).

    Raises:
        OutputError: It is no folder, or a file in it is not one of these.
    """
    if not folder.is_dir():
        raise OutputError(f"{folder} is not a folder", hint="give the folder of results of `tools/release`")
    return {path.parent.name: _read(path) for path in sorted(folder.glob(f"*/{FILE}"))}


def write_released(folder: Path, date: str) -> None:
    """Write down that a target was released, from what the commands of its release printed into its folder.

    Args:
        folder: With ``push.json``, ``outdated.json``, ``report.json`` and ``sbom.cdx.json``.
        date: As ``Released.date``.

    Raises:
        OutputError: One of them is missing, or is not what the commands write.
    """
    path = folder / FILE
    before = _read(path) if path.exists() else None
    try:
        pushed, outdated, report, bill = (
            json.loads((folder / name).read_text(encoding="utf-8"))
            for name in ("push.json", "outdated.json", "report.json", "sbom.cdx.json")
        )
        now = Released(
            date=date,
            addresses=tuple(each["image_uri"] for each in pushed["pushed"]),
            updates=len(outdated["updates"]),
            sizes=tuple((part["component"], part["size"]) for part in report["parts"]),
            packages=_packages(bill),
            changed=(),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OutputError(f"{folder}: not the results of a release: {type(error).__name__}: {error}") from error
    if before is not None:
        same = before.digests == now.digests  # pushed again, or to another repository
        changed = before.changed if same else changes(before.packages, now.packages)
        now = Released(**vars(now) | {"changed": changed})
    part = path.with_suffix(".part")
    part.write_text(json.dumps(asdict(now), indent=1), encoding="utf-8")
    part.replace(path)


def _read(path: Path) -> Released:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        lists = {name: tuple(found[name]) for name in ("addresses", "changed")}
        return Released(**found | lists | {"sizes": tuple((name, size) for name, size in found["sizes"])})
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"{path}: not what a release writes down: {type(error).__name__}: {error}"
        raise OutputError(what, hint="remove it, and run `tools/release` again") from error


def _packages(bill: Any) -> dict[str, str]:
    """Return the version of each package of a bill of materials, by its kind and name."""
    return {
        each["purl"].partition("@")[0].removeprefix("pkg:"): each.get("version", "")
        for each in bill["components"]
        if each.get("purl")
    }


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[str, ...]:
    """Return what is different between packages and their versions, a line each, by name."""
    lines = []
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        if old is None:
            lines.append(f"{name} {new}, new")
        elif new is None:
            lines.append(f"{name} {old}, gone")
        elif old != new:
            lines.append(f"{name} {old} -> {new}")
    return tuple(lines)
