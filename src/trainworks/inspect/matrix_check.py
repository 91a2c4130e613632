"""``build.py check``: plan every target, and report each reason why one cannot be built."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from trainworks.errors import CompatibilityError, LockError, UnknownNameError
from trainworks.facts.rows import Facts, TargetRow
from trainworks.plan.compatibility import Conflict
from trainworks.plan.components import choose_parts
from trainworks.plan.resolve import assemble
from trainworks.plan.select import rows_like
from trainworks.plan.target import context_of
from trainworks.plan.variants import choose_usual_components
from trainworks.render.build_records import find_current_builds


@dataclass(frozen=True, kw_only=True)
class TargetCheck:
    """The problems of one target that its plan shows, before anything is built.

    Attributes:
        target: Its name.
        broken: Rules of ``images/compatibility.toml`` that reject the target.
        unfit: Components without an artifact for this target, or without the components that they
            need.
        lock: The problems of its lock, a line each; ``""`` if there are none.
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
        """Whether the target can be built, once its inputs are locked."""
        return not (self.broken or self.unfit or self.lock)


def check_targets(facts: Facts, only: Sequence[str] = ()) -> tuple[TargetCheck, ...]:
    """Check every target, or some.

    Raises:
        UnknownNameError: A pattern of ``only`` fits no target.
        FactsError: A check in a recipe's front matter is malformed.
    """
    rows = rows_like(only, facts)
    current = find_current_builds(facts, rows)
    findings = []
    for row in rows:
        built = facts.name_of(row) in current
        findings.append(_check_target(row, facts, built=built))
    return tuple(findings)


def _check_target(row: TargetRow, facts: Facts, *, built: bool) -> TargetCheck:
    """Plan one target, and collect its problems.

    Args:
        row: The target.
        facts: All facts.
        built: Whether a build of the present recipe is recorded.
    """
    target = context_of(row, facts)
    name = target.name
    try:
        components = choose_usual_components(target, facts)
    except UnknownNameError as error:
        unfit = tuple(error.message.splitlines())
        return TargetCheck(
            target=name, broken=(), unfit=unfit, lock="", advice=(), unlocked=(), built=built
        )
    parts = choose_parts(target, components, facts)
    lock = ""
    unlocked: tuple[str, ...] = ()
    # The files that a target takes from its lock depend on its artifacts: with an unfit one the
    # problems of the lock would be consequences.
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
    """Return the exit status of the worst finding: 0 if every target fits."""
    if any(finding.broken or finding.unfit for finding in findings):
        return CompatibilityError.exit_status
    if any(finding.lock for finding in findings):
        return LockError.exit_status
    return 0


def as_json(findings: Sequence[TargetCheck]) -> str:
    """Return the findings for programs."""
    rows = [{**asdict(finding), "fits": finding.fits} for finding in findings]
    return json.dumps(rows, indent=2) + "\n"


def as_text(findings: Sequence[TargetCheck]) -> str:
    """Return the findings for people: each target that fails, each warning once, and the totals."""
    lines: list[str] = []
    for finding in findings:
        if not finding.fits:
            lines.append(finding.target)
            for conflict in finding.broken:
                lines += _format_conflict(conflict)
            lines += [f"  {problem}" for problem in finding.unfit]
            lines += [f"  {line}" for line in finding.lock.splitlines()]
    # Many targets get the same advice: it is one line, with the number of targets.
    targets_by_advice: dict[tuple[str, str, str], list[str]] = {}
    for finding in findings:
        for conflict in finding.advice:
            key = (conflict.rule, conflict.reason, conflict.instead)
            targets_by_advice.setdefault(key, []).append(finding.target)
    for (rule, reason, instead), targets in targets_by_advice.items():
        lines.append(f"advice {rule} ({_format_count(targets)}): {reason}; {instead}")
    unlocked = [finding for finding in findings if finding.unlocked]
    if unlocked:
        # Targets share inputs, such as a base image: each input counts once.
        inputs: set[str] = set()
        for finding in unlocked:
            inputs.update(finding.unlocked)
        lines.append(
            f"not locked yet: {_format_count(inputs, 'input')} of {_format_count(unlocked)};"
            " `build.py lock` records them"
        )
    rendered = sum(not finding.built for finding in findings)
    wrong = sum(not finding.fits for finding in findings)
    fitting = len(findings) - wrong
    lines.append(
        f"{_format_count(findings)}: {fitting} fit, {wrong} do not;"
        f" {rendered} not built as they are today"
    )
    return "\n".join(lines) + "\n"


def _format_conflict(conflict: Conflict) -> list[str]:
    """Return the lines about a rule that rejects a target."""
    first_line = f"  {conflict.rule}: {conflict.found}"
    if conflict.wanted:
        first_line += f" (required: {conflict.wanted})"
    return [
        first_line,
        f"    reason:  {conflict.reason}",
        f"    instead: {conflict.instead}",
        f"    source:  {conflict.source}",
    ]


def _format_count(things: Sequence[object] | set[str], word: str = "target") -> str:
    """Return a number with its noun: ``1 target``, ``3 targets``."""
    number = len(things)
    if number == 1:
        return f"1 {word}"
    return f"{number} {word}s"
