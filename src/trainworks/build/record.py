"""``build.py --record``: writes into ``images/built.toml`` that a target was
built, and that its image tests passed. A release adds which image it pushed.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from trainworks.build.context import one_at_a_time
from trainworks.build.image import ImageResult
from trainworks.errors import OutputError
from trainworks.facts.data import writable_root
from trainworks.facts.load import BUILT
from trainworks.facts.lockfile import rows_as_toml
from trainworks.facts.lockfile import write as write_facts
from trainworks.facts.rows import Built, Facts
from trainworks.host.checkout import read_checkout_state
from trainworks.plan.model import ImagePlan
from trainworks.render.build_records import inputs_of, inputs_of_target

HEADER = """\
# Written by `python build.py ... --record`; do not edit.
# The last build of each target that passed all its image tests.
# `inputs` is the digest of all that decides the image. A build counts as built for real while that
# is the digest of today's recipe; after a change it is shown as built from an older recipe.
# `seconds` is with what was cached, and absent where the engine had the image already.
# `commit` is absent where files that decide images differed from it. `image` is the id that the
# engine gives the image. `digest` is that of the image that a release pushed. Older rows have
# neither commit nor id.
"""


@dataclass(frozen=True, kw_only=True)
class RecordedRecipe:
    """What a build to record is made from, as it was before the build.

    Attributes:
        target: The target's name.
        inputs: As ``Built.inputs``.
        commit: As ``Built.commit``.
    """

    target: str
    inputs: str
    commit: str


def prepare_record(plan: ImagePlan, facts: Facts, root: Path) -> RecordedRecipe:
    """Return the recipe of a build that will be recorded; refuse one that cannot be.

    To be called before the build: the checkout may change while it runs.

    Raises:
        OutputError: The image is not the target's own, or the file cannot be written.
    """
    writable_root(root, "`--record`")
    row = next(row for row in facts.targets if facts.name_of(row) == plan.target.name)
    inputs = inputs_of(plan, facts)
    if inputs != inputs_of_target(row, facts):
        raise OutputError(
            f"--record: this image is a variant of {plan.target.name}, not the target itself",
            hint="remove --with and --without, or remove --record",
        )
    path = root / "images" / BUILT
    if not os.access(path if path.exists() else path.parent, os.W_OK) or not os.access(
        path.parent, os.W_OK
    ):
        raise OutputError(
            f"--record: cannot write {path}", hint="use a checkout that you can write (--root)"
        )
    checkout = read_checkout_state(root)
    commit = checkout.commit
    if checkout.changed:
        commit = ""
    return RecordedRecipe(target=plan.target.name, inputs=inputs, commit=commit)


def record_result(
    recipe: RecordedRecipe,
    result: ImageResult,
    facts: Facts,
    root: Path,
    environment: Mapping[str, str],
) -> Path:
    """Record a build whose image tests all passed; returns the file. Raises ``OutputError``."""
    built = Built(
        target=recipe.target,
        inputs=recipe.inputs,
        engine=result.engine.name,
        date=datetime.now(UTC).date().isoformat(),
        megabytes=round(result.image.size / 1_000_000),
        seconds=0 if result.unchanged else max(1, round(result.seconds)),
        commit=recipe.commit,
        image=result.image.identifier,
    )
    return record(built, {facts.name_of(row) for row in facts.targets}, root, environment)


def record(
    built: Built, targets: Collection[str], root: Path, environment: Mapping[str, str]
) -> Path:
    """Write a build into the file, in the place of the target's last one.

    Others that want to write wait.

    Args:
        built: The build.
        targets: The names of all targets: the records of others go.
        root: The checkout.
        environment: The process's environment, which says where the lock of the file lies.

    Raises:
        OutputError: The file cannot be read or written.
    """
    path = root / "images" / BUILT
    with one_at_a_time(str(path.resolve()), environment):
        rows = _read(path) | {built.target: built}
        _write(path, {name: row for name, row in rows.items() if name in targets})
    return path


def record_digest(target: str, digest: str, root: Path, environment: Mapping[str, str]) -> Built:
    """Write into the row of a target's last build which image was pushed; return the row.

    Raises:
        OutputError: There is no such row, or the file cannot be read or written.
    """
    path = root / "images" / BUILT
    with one_at_a_time(str(path.resolve()), environment):
        rows = _read(path)
        if target not in rows:
            raise OutputError(f"{path} has no build of {target}", hint="build it with `--record`")
        rows[target] = replace(rows[target], digest=digest)
        _write(path, rows)
    return rows[target]


def _write(path: Path, rows: Mapping[str, Built]) -> None:
    write_facts(path, HEADER + rows_as_toml("built", (rows[name] for name in sorted(rows))))


def _read(path: Path) -> dict[str, Built]:
    """Return the recorded builds by their target's name."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return {row["target"]: Built(**row) for row in content.get("built", [])}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise OutputError(f"cannot read {path}: {error}") from error
