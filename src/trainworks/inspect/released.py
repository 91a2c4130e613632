"""What `tools/release` left of each target: where its image is, and what changed since the one before."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainworks.errors import OutputError


@dataclass(frozen=True, kw_only=True)
class Released:
    """A target's image in a registry.

    Attributes:
        date: When it was pushed, ISO 8601.
        addresses: Of the image by its digest, one for each registry.
        updates: Number of security updates that it lacked then.
        sizes: Component and bytes in the image, largest first.
        changed: What is in it and was not in the release before, a line each; empty if there was none.
    """

    date: str
    addresses: tuple[str, ...]
    updates: int
    sizes: tuple[tuple[str, int], ...]
    changed: tuple[str, ...]


def read_released(folder: Path) -> dict[str, Released]:
    """Return what was released, by the target's name. Targets that were not pushed are left out.

    Args:
        folder: The results of `tools/release`: a folder for each target, with what the commands printed (docs/push.md).

    Raises:
        OutputError: It is no folder, or a file in it is missing or is not what the commands write.
    """
    if not folder.is_dir():
        raise OutputError(f"{folder} is not a folder", hint="give the folder of results of `tools/release`")
    return {path.parent.name: _released(path.parent) for path in sorted(folder.glob("*/push.json"))}


def _released(folder: Path) -> Released:
    try:
        steps, pushed, outdated, report = (
            json.loads((folder / name).read_text(encoding="utf-8"))
            for name in ("steps.json", "push.json", "outdated.json", "report.json")
        )
        before = folder / "before.cdx.json"
        return Released(
            date=max(when for step, when in steps["steps"].items() if step.startswith("push ")),
            addresses=tuple(each["image_uri"] for each in pushed["pushed"]),
            updates=len(outdated["updates"]),
            sizes=tuple((part["component"], part["size"]) for part in report["parts"]),
            changed=changes(_packages(before), _packages(folder / "sbom.cdx.json")) if before.exists() else (),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OutputError(
            f"{folder}: not the results of a release: {type(error).__name__}: {error}", hint="run `tools/release` again"
        ) from error


def _packages(bill: Path) -> dict[str, str]:
    """Return the version of each package of a bill of materials, by its kind and name."""
    content: Any = json.loads(bill.read_text(encoding="utf-8"))
    return {
        each["purl"].partition("@")[0].removeprefix("pkg:"): each.get("version", "")
        for each in content["components"]
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
