"""``build.py --bake``: the file for `docker buildx bake`, beside it the
contexts and this machine's settings.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainworks.build.context import replace_output
from trainworks.build.image import ImageSpec, fill_context, on_archive
from trainworks.build.matrix import PlannedTarget
from trainworks.build.session import BuildSession
from trainworks.build.target import image_spec
from trainworks.errors import LockError, OutputError
from trainworks.inputs.source_code import SourceSupply, download_missing
from trainworks.plan.locks import refuse_unlocked
from trainworks.plan.model import ImagePlan
from trainworks.render.bake import SECRET, bake_name, render_bake_file
from trainworks.render.dockerfile import render
from trainworks.terminal.output import say

FILE = "docker-bake.json"


@dataclass(frozen=True, kw_only=True)
class BakeFile:
    """The file, and the names of its targets and groups."""

    file: Path
    targets: tuple[str, ...]
    groups: tuple[str, ...]


def write_bake(
    targets: Sequence[PlannedTarget],
    session: BuildSession,
    folder: Path,
    *,
    mirror: str | None,
    strict: bool,
) -> BakeFile:
    """Write the file, a context for each target, and this machine's settings as
    the secrets that the builds mount.

    Args:
        targets: What the file builds; targets with unlocked inputs are skipped.
        session: The run.
        folder: Where to write; it is made where it does not exist.
        mirror: The mirror as it was named, for an error.
        strict: Whether a target with unlocked inputs is an error.

    Raises:
        TrainworksError: A target cannot be planned; nothing was written then.
        LockError: With ``strict`` a target has unlocked inputs, or no target is left.
        HostError: A source of a target cannot be downloaded: the file must not depend on the
            machine that wrote it.
        OutputError: A file cannot be written.
    """
    chosen: list[tuple[ImagePlan, ImageSpec]] = []
    for target in targets:
        if target.plan is None:
            raise target.error or LockError(f"{target.name} has no plan")
        if target.plan.unlocked and not strict:
            say(f"{target.name}: skipped: {len(target.plan.unlocked)} inputs not locked")
            continue
        refuse_unlocked(target.plan)
        rendering = render(target.plan, session.facts)
        spec = image_spec(target.plan, rendering, session)
        if spec.base is not None:
            spec = on_archive(spec, spec.base, locked=False)
        chosen.append((target.plan, spec))
    if not chosen:
        raise LockError("no target is left: all of them have inputs that are not locked")
    supply = SourceSupply(places=session.places, settings=session.settings, mirror=mirror)
    for plan, _ in chosen:
        download_missing(plan, session.facts, supply)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for _, spec in chosen:
            context = folder / "contexts" / spec.name
            replace_output(spec.rendering, context)
            fill_context(spec, context)
            for identifier in dict.fromkeys(SECRET.findall(spec.rendering.dockerfile)):
                _write_secret(folder / "secrets", spec.name, identifier, spec.secrets[identifier])
        # They may hold passwords, and must not be committed.
        (folder / "secrets" / ".gitignore").write_text("*\n", encoding="utf-8")
        text = render_bake_file([(plan, spec.rendering) for plan, spec in chosen])
        (folder / FILE).write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{error.filename or folder}: {error.strerror or error}") from error
    names = tuple(bake_name(spec.name) for _, spec in chosen)
    return BakeFile(file=folder / FILE, targets=names, groups=tuple(json.loads(text)["group"]))


def _write_secret(folder: Path, target: str, identifier: str, content: bytes) -> None:
    """Write a secret of a target to a file that this user alone can read."""
    folder.mkdir(exist_ok=True, mode=0o700)
    folder.chmod(0o700)
    (folder / target).mkdir(exist_ok=True)
    path = folder / target / identifier
    path.touch(mode=0o600)
    path.write_bytes(content)
