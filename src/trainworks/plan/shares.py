"""Shares the lock of a target out among its components: every Python file belongs to exactly one of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from fnmatch import fnmatchcase

from trainworks.errors import LockError
from trainworks.facts.rows import Component, Cuda, Facts, LockedPackage, TargetRow
from trainworks.plan.model import Step

BUILDER = "builder"
"""The component whose files serve the build stages and are never in an image."""


def lock_of(row: TargetRow, facts: Facts) -> tuple[LockedPackage, ...]:
    """Return the files of a target's lock; raises ``LockError`` where it has none."""
    name = facts.name_of(row)
    if name not in facts.locks:
        raise LockError(
            f"target {name} has no lock", hint=f"`python build.py lock --only {name}` makes images/lock/{name}.toml"
        )
    return facts.locks[name].packages


def python_requirements(component: Component, cuda: Cuda) -> tuple[str, ...]:
    """Return what a component asks of the package index for a CUDA cell: names, some with extras or a range."""
    rows = component.python if cuda.version else component.python_cpu or component.python
    return tuple(row.replace("{wheel_suffix}", cuda.wheel_suffix).replace("{cell}", cuda.name) for row in rows)


def python_patterns(component: Component, cuda: Cuda) -> tuple[str, ...]:
    """Return the names of a component's distributions for a CUDA cell; a name may have ``*``."""
    return tuple(distribution_name(row) for row in python_requirements(component, cuda))


def distribution_name(requirement: str) -> str:
    """Return the name of a requirement, without extras and range."""
    return re.split(r"[\[<>=!~]", requirement, maxsplit=1)[0]


def share_packages(
    components: Sequence[Component], cuda: Cuda, lock: Sequence[LockedPackage], *, fetched: Set[str] = frozenset()
) -> dict[str, tuple[LockedPackage, ...]]:
    """Share the files of a lock out among components: every file belongs to exactly one, in the order of components.

    Each component takes what its row names (exact names before patterns); what is left goes to the first component
    that depends on it. What no chosen component needs is left out. Build files belong to ``builder``, and only they
    do: a distribution that is needed both while building and in the image (``setuptools``) stands in the lock twice.
    What a component replaces is left out; of one that is ``fetched`` by itself, only what it depends on is taken.
    """
    lock = [
        package
        for package in lock
        if not any(fnmatchcase(package.name, pattern) for each in components for pattern in each.replaces)
    ]
    own_names = {
        name for each in components if each.name in fetched for name in python_patterns(each, cuda) if "*" not in name
    }
    runtime = {package.name: package for package in lock if not package.build}
    owners = [component for component in components if component.name != BUILDER]
    roots = {
        component.name: [name for name in python_patterns(component, cuda) if name in runtime] for component in owners
    }
    needed = _closure([name for names in roots.values() for name in names], runtime)
    owner: dict[str, str] = {}
    for exact in (True, False):
        for component in owners:
            for pattern in python_patterns(component, cuda):
                if ("*" not in pattern) is exact:
                    for name in needed:
                        if fnmatchcase(name, pattern):
                            owner.setdefault(name, component.name)
    for component in owners:
        own = [name for name in needed if owner.get(name) == component.name]
        for name in _closure(own, runtime):
            owner.setdefault(name, component.name)
    return {
        component.name: tuple(
            package
            for package in lock
            if package.name not in own_names
            and (BUILDER if package.build else owner.get(package.name)) == component.name
        )
        for component in components
    }


def _closure(names: Sequence[str], packages: Mapping[str, LockedPackage]) -> list[str]:
    """Return these packages and all that they depend on, in a stable order."""
    found = dict.fromkeys(names)
    pending = list(found)
    while pending:
        for need in packages[pending.pop(0)].requires:
            if need in packages and need not in found:
                found[need] = None
                pending.append(need)
    return list(found)


def compare_versions(
    steps: Sequence[Step], components: Mapping[str, Component], row: TargetRow, cuda: Cuda, facts: Facts
) -> None:
    """Refuse a lock that has other versions than the rows declare: the two must move together."""
    problems = []
    for step in steps:
        patterns = python_patterns(components[step.component], cuda)
        if not patterns or not step.version or step.artifacts:
            continue
        # The first distribution that a component's row names is the one whose version is the component's.
        locked = {package.name: package.version for package in step.python if fnmatchcase(package.name, patterns[0])}
        if step.version not in locked.values():
            found = ", ".join(f"{name} {version}" for name, version in locked.items()) or f"no {patterns[0]}"
            problems.append(f"{step.component}: the rows say {step.version}, the lock has {found}")
    if problems:
        name = facts.name_of(row)
        raise LockError(
            f"images/lock/{name}.toml does not fit its rows:\n  " + "\n  ".join(problems),
            hint=f"`python build.py lock --only {name}` makes it again",
        )
