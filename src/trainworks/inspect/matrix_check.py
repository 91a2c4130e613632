"""``build.py check``: plan every target, and report each reason why one cannot be built."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from trainworks.errors import CompatibilityError, LockError, UnknownNameError
from trainworks.facts.rows import Facts, TargetRow
from trainworks.plan.compatibility import Conflict
from trainworks.plan.components import parts_of
from trainworks.plan.resolve import assemble
from trainworks.plan.select import rows_like
from trainworks.plan.target import context_of
from trainworks.plan.variants import usual_components
from trainworks.render.build_records import current_builds


@dataclass(frozen=True, kw_only=True)
class TargetCheck:
    """What a plan shows about one target before anything is built.

    Attributes:
        target: Its name.
        broken: Rules of ``images/compatibility.toml`` that reject it.
        unfit: Components without an artifact for this target, or whose needs are not in it.
        lock: What is wrong with its lock; ``""`` if nothing is.
        advice: Rules that only warn.
        unlocked: Inputs without a recorded hash. ``build.py lock`` records
            them; a build needs them.
        built: Whether a build of the present recipe is recorded.
    """

    target: str
    broken: tuple[Conflict, ...]
    unfit: tuple[str, ...]
    lock: str
    advice: tuple[Conflict, ...]
    unlocked: tuple[str, ...]
    built: bool

    @property
    def fits(self) -> bool:
        """Whether it can be built, once its inputs are locked."""
        return not (self.broken or self.unfit or self.lock)


def check_targets(facts: Facts, only: Sequence[str] = ()) -> tuple[TargetCheck, ...]:
    """Check every target, or some.

    Raises:
        UnknownNameError: A pattern of ``only`` fits no target.
        FactsError: A check in a recipe's front matter is malformed.
    """
    rows = rows_like(only, facts)
    current = current_builds(facts, rows)
    return tuple(_find(row, facts, built=facts.name_of(row) in current) for row in rows)


def _find(row: TargetRow, facts: Facts, *, built: bool) -> TargetCheck:
    target = context_of(row, facts)
    name = target.name
    try:
        components = usual_components(target, facts)
    except UnknownNameError as error:
        unfit = tuple(error.message.splitlines())
        return TargetCheck(
            target=name, broken=(), unfit=unfit, lock="", advice=(), unlocked=(), built=built
        )
    parts = parts_of(target, components, facts)
    lock = ""
    unlocked: tuple[str, ...] = ()
    # What a target takes from its lock depends on its artifacts.
    if not parts.unfit:
        try:
            unlocked = assemble(target, components, parts, facts).unlocked
        except LockError as error:
            lock = str(error)
    return TargetCheck(
        target=name,
        broken=parts.broken,
        unfit=parts.unfit,
        lock=lock,
        advice=parts.advice,
        unlocked=unlocked,
        built=built,
    )


def exit_status_of(findings: Sequence[TargetCheck]) -> int:
    """Return the exit status of the worst finding."""
    if any(finding.broken or finding.unfit for finding in findings):
        return CompatibilityError.exit_status
    return 0 if all(finding.fits for finding in findings) else LockError.exit_status


def as_json(findings: Sequence[TargetCheck]) -> str:
    """Return the findings for programs."""
    return (
        json.dumps([{**asdict(finding), "fits": finding.fits} for finding in findings], indent=2)
        + "\n"
    )


def as_text(findings: Sequence[TargetCheck]) -> str:
    """Return the findings for people: each target that fails, each warning once, and the totals."""
    lines: list[str] = []
    for finding in findings:
        if not finding.fits:
            lines.append(finding.target)
            for conflict in finding.broken:
                lines += _paragraph(conflict)
            lines += [f"  {problem}" for problem in finding.unfit]
            lines += [f"  {line}" for line in finding.lock.splitlines()]
    advice: dict[tuple[str, str, str], list[str]] = {}
    for finding in findings:
        for conflict in finding.advice:
            advice.setdefault((conflict.rule, conflict.reason, conflict.instead), []).append(
                finding.target
            )
    for (rule, reason, instead), targets in advice.items():
        lines.append(f"advice {rule} ({_counted(targets)}): {reason}; {instead}")
    unlocked = [finding for finding in findings if finding.unlocked]
    if unlocked:
        inputs = {each for finding in unlocked for each in finding.unlocked}
        lines.append(
            f"not locked yet: {_counted(inputs, 'input')} of {_counted(unlocked)};"
            " `build.py lock` records them"
        )
    rendered = sum(not finding.built for finding in findings)
    wrong = sum(not finding.fits for finding in findings)
    lines.append(
        f"{_counted(findings)}: {len(findings) - wrong} fit, {wrong} do not; {rendered} not built"
        " as they are today"
    )
    return "\n".join(lines) + "\n"


def _paragraph(conflict: Conflict) -> list[str]:
    return [
        (
            f"  {conflict.rule}:"
            f" {conflict.found}{f' (required: {conflict.wanted})' if conflict.wanted else ''}"
        ),
        f"    reason:  {conflict.reason}",
        f"    instead: {conflict.instead}",
        f"    source:  {conflict.source}",
    ]


def _counted(things: Sequence[object] | set[str], word: str = "target") -> str:
    return f"{len(things)} {word}{'s' if len(things) != 1 else ''}"
