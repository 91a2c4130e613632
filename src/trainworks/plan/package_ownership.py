"""Shares the lock of a target out among its components: every Python file
belongs to exactly one of them.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence, Set
from fnmatch import fnmatchcase

from trainworks.errors import LockError
from trainworks.facts.rows import Component, Cuda, Facts, LockedPackage
from trainworks.plan.model import Step
from trainworks.plan.target import TargetContext

BUILDER = "builder"
"""The component whose files serve the build stages and are never in an image."""


def lock_of(target: TargetContext) -> tuple[LockedPackage, ...]:
    """Return the files of a target's lock; raises ``LockError`` where it has none."""
    if target.lock is None:
        name = target.name
        raise LockError(
            f"target {name} has no lock",
            hint=f"`python build.py lock --only {name}` makes images/lock/{name}.toml",
        )
    return target.lock


def python_requirements(component: Component, cuda: Cuda) -> tuple[str, ...]:
    """Return what a component asks of the package index for a CUDA cell: names,
    some with extras or a range.
    """
    rows = component.python if cuda.version else component.python_cpu or component.python
    values = {"{wheel_suffix}": cuda.wheel_suffix, "{cell}": cuda.name, "{cuda}": cuda.version}
    return tuple(re.sub(r"\{\w+\}", lambda found: values[found[0]], row) for row in rows)


def python_patterns(component: Component, cuda: Cuda) -> tuple[str, ...]:
    """Return the names of a component's distributions for a CUDA cell; a name may have ``*``."""
    return tuple(distribution_name(row) for row in python_requirements(component, cuda))


def distribution_name(requirement: str) -> str:
    """Return the name of a requirement, without extras and range."""
    return re.split(r"[\[<>=!~]", requirement, maxsplit=1)[0]


def share_packages(
    components: Sequence[Component],
    cuda: Cuda,
    lock: Sequence[LockedPackage],
    *,
    fetched: Set[str] = frozenset(),
    lent: Set[str] = frozenset(),
) -> dict[str, tuple[LockedPackage, ...]]:
    """Share the files of a lock out among components: every file belongs to exactly one, in the
    order of components.

    Each component takes what its row names (exact names before patterns); what is left goes to the
    first component that depends on it. What no chosen component needs is left out. Build files
    belong to ``builder`` and to components that only build, which have nothing else: a distribution
    that is needed both while building and in the image (``setuptools``) is in the lock twice, maybe
    in two versions (the CUDA headers). What a component replaces is left out; of one that is
    ``fetched`` by itself, only what it depends on is taken. One that is ``lent``, built for another
    alone, has those of its files that nothing in the image needs.
    """
    replaced = [pattern for each in components for pattern in each.replaces]
    lock = [
        package
        for package in lock
        if not any(fnmatchcase(package.name, pattern) for pattern in replaced)
    ]
    own_names = {
        name
        for each in components
        if each.name in fetched
        for name in python_patterns(each, cuda)
        if "*" not in name
    }
    owners = {
        build: _owners(
            [
                each
                for each in components
                if each.name not in lent and (each.name == BUILDER or each.build_only) is build
            ],
            cuda,
            {package.name: package for package in lock if package.build is build},
        )
        for build in (False, True)
    }
    rest = {
        package.name: package
        for package in lock
        if not package.build and package.name not in owners[False]
    }
    owners[False] |= _owners([each for each in components if each.name in lent], cuda, rest)
    shares: dict[str, list[LockedPackage]] = {component.name: [] for component in components}
    for package in lock:
        owner = owners[package.build].get(package.name)
        if owner is not None and package.name not in own_names:
            shares[owner].append(package)
    return {name: tuple(packages) for name, packages in shares.items()}


def _owners(
    components: Sequence[Component], cuda: Cuda, packages: Mapping[str, LockedPackage]
) -> dict[str, str]:
    """Return which of these components has a package: who names it, else the
    first one that depends on it.
    """
    patterns = [
        (component.name, pattern)
        for component in components
        for pattern in python_patterns(component, cuda)
    ]
    needed = _closure([name for _, name in patterns if name in packages], packages)
    owner: dict[str, str] = {}
    for component_name, pattern in patterns:
        if pattern in packages:
            owner.setdefault(pattern, component_name)
    for component_name, pattern in patterns:
        if "*" in pattern:
            for name in needed:
                if fnmatchcase(name, pattern):
                    owner.setdefault(name, component_name)
    for component in components:
        own = [name for name in needed if owner.get(name) == component.name]
        for name in _closure(own, packages):
            owner.setdefault(name, component.name)
    return owner


def protected_distributions(
    components: Sequence[Component], steps: Sequence[Step]
) -> dict[str, str]:
    """Return what a job's requirements must not replace, name to version: exact
    names first, then patterns' matches.

    A component's own name that the lock does not have gets the component's version: a wheel that is
    downloaded by itself, or the name under which the index has another build of it (``tensorflow``,
    where ``tensorflow-cpu`` is in the image). The names that a component without packages of the
    index protects are its own: its files come with this repository.
    """
    locked = {
        package.name: package.version for step in steps if step.in_image for package in step.python
    }
    versions = {step.component: step.version for step in steps}
    found: dict[str, str] = {}
    for exact in (True, False):
        for component in components:
            own = {distribution_name(name) for name in (*component.python, *component.python_cpu)}
            own = own or {*component.protected}
            for pattern in component.protected:
                if ("*" not in pattern) is not exact:
                    continue
                for name, version in locked.items():
                    if fnmatchcase(name, pattern):
                        found.setdefault(name, version)
                if exact and pattern in own and versions.get(component.name):
                    found.setdefault(pattern, versions[component.name])
    return found


def companion_distributions(
    components: Sequence[Component], steps: Sequence[Step]
) -> dict[str, str]:
    """Return the distributions that are compiled against a component, and that
    no step has: name to component.
    """
    locked = {package.name for step in steps if step.in_image for package in step.python}
    return {
        name: component.name
        for component in components
        for name in component.companions
        if name not in locked
    }


def compiled_distributions(
    components: Sequence[Component], cuda: Cuda, facts: Facts
) -> dict[str, str]:
    """Return the distributions that compile for GPUs with a component that an
    image for CUDA lacks: name to that.
    """
    chosen = {component.name for component in components if not component.build_only}
    lacking = [
        each
        for each in facts.components
        if each.compiles and cuda.version and each.name not in chosen
    ]
    return {name: each.name for each in lacking for name in each.compiles}


def compilers_needed(there: Container[str], facts: Facts) -> dict[str, str]:
    """Return the distributions that are installed only with a component that is
    not there: name to component.
    """
    absent = [each for each in facts.components if each.name not in there]
    return {
        name: each.name
        for each in absent
        for name in each.compiles
        if name not in each.compiles_later
    }


def libraries_of_other_builds(
    components: Sequence[Component], steps: Sequence[Step], facts: Facts
) -> tuple[str, ...]:
    """Return what only other builds of a framework need, such as CUDA's libraries in an image
    without CUDA; sorted.

    ``pip freeze`` of such a build lists them, and so does a project's lock.
    """
    present = {package.name for step in steps if step.in_image for package in step.python}
    return library_names(
        components, present | protected_distributions(components, steps).keys(), facts
    )


def library_names(
    components: Sequence[Component], present: Set[str], facts: Facts
) -> tuple[str, ...]:
    """Return the same for an image by what it has; components: those whose frameworks count."""
    frameworks = {
        name for each in components if each.frameworks and each.protected for name in each.protected
    }
    patterns = {
        pattern for each in facts.components if each.needs_cuda for pattern in each.protected
    } | frameworks
    found: set[str] = set()
    for lock in facts.locks.values():
        packages = {package.name: package for package in lock.packages if not package.build}
        found.update(_closure([name for name in frameworks if name in packages], packages))
    return tuple(
        sorted(
            each
            for each in found - present
            if any(fnmatchcase(each, pattern) for pattern in patterns)
        )
    )


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
