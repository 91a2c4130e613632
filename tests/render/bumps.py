"""Facts in which one component of one target has another version: a person's change, and the answer
of a new lock.
"""

from __future__ import annotations

from dataclasses import replace

from trainworks.facts.rows import Artifact, Facts, LockedPackage, TargetRow
from trainworks.plan.resolve import make_plan
from trainworks.plan.select import request_for

NEWER = ".99"
"""Suffix of a version that no row has: newer than that version, and older than the next one.
"""


def bumped(facts: Facts, row: TargetRow, component: str) -> Facts:
    """Return facts in which one component of one target has another version, in its row and in its
    downloads.
    """
    name = facts.name_of(row)
    lock = facts.locks[name]
    step = next(
        step
        for step in make_plan(request_for(row, facts), facts).steps
        if step.component == component
    )
    version = f"{step.version}{NEWER}"

    def other_file(package: LockedPackage) -> LockedPackage:
        if step.artifacts or package not in step.python:
            return package
        newer = f"{package.version.partition('.post')[0]}{NEWER}"
        file = package.file.replace(f"-{package.version}", f"-{newer}")
        return replace(package, version=newer, file=file, sha256=package.sha256[::-1])

    changed = replace(row, versions={**row.versions, component: version})
    targets = [changed if other_row == row else other_row for other_row in facts.targets]
    return replace(
        facts,
        targets=tuple(targets),
        artifacts=(
            *facts.artifacts,
            *(_newer(artifact, version) for artifact in step.artifacts[:1]),
        ),
        locks={**facts.locks, name: replace(lock, packages=tuple(map(other_file, lock.packages)))},
    )


def _newer(artifact: Artifact, version: str) -> Artifact:
    if artifact.git:
        return replace(artifact, version=version, commit=artifact.commit[::-1])
    return replace(artifact, version=version, sha256=artifact.sha256[::-1])
