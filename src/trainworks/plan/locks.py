"""Whether the lock of a target can be built from: what it must have, and
whether its packages satisfy each other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache

from packaging.tags import Tag
from packaging.utils import canonicalize_version, parse_sdist_filename, parse_wheel_filename

from trainworks.errors import LockError
from trainworks.facts.ranges import satisfies
from trainworks.facts.rows import MACHINES, Artifact, Facts, LockedPackage
from trainworks.plan.model import ImagePlan
from trainworks.plan.package_ownership import (
    BUILDER,
    distribution_name,
    lock_of,
    python_patterns,
    python_requirements,
)
from trainworks.plan.target import TargetContext, artifact_rows
from trainworks.plan.wheel_tags import wheel_tags


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """A distribution that a target's components ask for; ``version`` is ``""`` where any will do.

    ``asked`` is the name as the component's row has it: with extras, and with a range where
    ``version`` is empty.
    """

    asked: str
    version: str
    build: bool

    def __str__(self) -> str:
        """Return it as pip writes it."""
        return (
            f"{self.asked}{',' if self.range else ''}=={self.version}"
            if self.version
            else self.asked
        )

    @property
    def name(self) -> str:
        """The distribution's name alone."""
        return distribution_name(self.asked)

    @property
    def range(self) -> str:
        """The range that the component's row gives it, ``""`` if none."""
        return range_of(self.asked)


def range_of(requirement: str) -> str:
    """Return the range of a requirement (``<1.24`` of ``numpy<1.24``), ``""`` if it has none."""
    found = re.search(r"[<>=!~].*", requirement)
    return found[0] if found else ""


def requirements_of(target: TargetContext, facts: Facts) -> tuple[Requirement, ...]:
    """Return what a target's lock is made for: the distributions of every
    component that it can have.

    A component that downloads its wheel by itself is locked for what the wheel requires: as the
    index's file of the same public version (without the ``+cu124``), or as the artifact's own
    ``requires_dist``.
    """
    versions = dict(target.versions)
    for wheel in own_wheels(target, facts):
        versions[wheel.name] = _public(wheel.version)
    return tuple(
        Requirement(
            asked=asked,
            # The first distribution of a component is the one whose version is the component's.
            version=versions.get(component.name, "") if number == 0 else "",
            build=component.name == BUILDER or component.build_only,
        )
        for component in target.components.values()
        for number, asked in enumerate(python_requirements(component, target.cell))
        if "*" not in asked
    )


def own_wheels(target: TargetContext, facts: Facts) -> list[Artifact]:
    """Return the wheels that a target's components download by themselves."""
    return [
        artifact
        for component in target.components.values()
        if component.python
        for artifact in artifact_rows(component, target, facts)
    ]


def check_lock(target: TargetContext, facts: Facts) -> None:
    """Refuse a target without a lock, and a lock that the target cannot be built from.

    Raises:
        LockError: With everything that is wrong with it.
    """
    lock_of(target)
    if problems := lock_problems(target, facts):
        name = target.name
        raise LockError(
            f"images/lock/{name}.toml does not fit its rows:\n  " + "\n  ".join(problems),
            hint=f"`python build.py lock --only {name}` makes it again",
        )


def lock_problems(target: TargetContext, facts: Facts) -> tuple[str, ...]:
    """Return everything that is wrong with the lock of a target that has one, one sentence each.

    A package that is missing or left over from another lock, versions that the rows do not say,
    files that are of another package or version than their row says, and wheels that the target's
    Python on its base cannot load. Which versions a package accepts of another is not in a lock:
    the image test ``pip check`` looks at that.
    """
    packages = lock_of(target)
    return (
        *_other_files(packages),
        *_unfit_wheels(target, packages),
        *_row_problems(target, facts, packages),
        *_gaps(packages),
    )


def _other_files(packages: tuple[LockedPackage, ...]) -> Iterator[str]:
    for package in packages:
        name, version, _ = _parts_of(package.file)
        if name != package.name or canonicalize_version(version) != canonicalize_version(
            package.version
        ):
            yield (
                f"{package.name} {package.version}:"
                f" its file is {package.file}, of another package or version"
            )


def _unfit_wheels(target: TargetContext, packages: tuple[LockedPackage, ...]) -> Iterator[str]:
    """Yield the wheels for another Python, machine or C library than the target's."""
    base = target.base
    loadable = _loadable(target.python, MACHINES[base.architecture], base.glibc)
    for package in packages:
        tags = _parts_of(package.file)[-1]
        if tags and loadable.isdisjoint(tags):
            tag = "-".join(package.file.removesuffix(".whl").rsplit("-", 3)[-3:])
            yield (
                f"{package.name} {package.version}: its file is for {tag}, "
                f"not for Python {target.python}, {MACHINES[base.architecture]}, glibc {base.glibc}"
            )


@lru_cache(maxsize=64)
def _loadable(python: str, machine: str, glibc: str) -> frozenset[Tag]:
    return frozenset(wheel_tags(python=python, machine=machine, glibc=glibc))


@lru_cache(maxsize=8192)
def _parts_of(file: str) -> tuple[str, str, frozenset[Tag]]:
    """Return name, version and tags in the name of a wheel or source archive.

    Nothing where it is neither.
    """
    try:
        if file.endswith(".whl"):
            name, version, _, tags = parse_wheel_filename(file)
            return name, str(version), tags
        name, version = parse_sdist_filename(file)
    except ValueError:
        return "", "", frozenset()
    return name, str(version), frozenset()


def _row_problems(
    target: TargetContext, facts: Facts, packages: tuple[LockedPackage, ...]
) -> Iterator[str]:
    """Yield what the rows ask for and the lock does not have so."""
    for limit in target.row.limits:
        for package in packages:
            limited = package.name == distribution_name(limit) and not package.build
            if limited and not satisfies(package.version, range_of(limit), {}):
                yield f"has {package.name} {package.version}, the target's limit is {limit}"
    for wanted in requirements_of(target, facts):
        locked = {
            package.name: package.version for package in packages if package.build == wanted.build
        }
        if wanted.name not in locked:
            yield f"{wanted} is missing"
        elif wanted.version and wanted.version not in (
            locked[wanted.name],
            _public(locked[wanted.name]),
        ):
            yield (
                f"has {wanted.name} {locked[wanted.name]}, the target's version is {wanted.version}"
            )
        elif wanted.range and not satisfies(locked[wanted.name], wanted.range, {}):
            yield f"has {wanted.name} {locked[wanted.name]}, its component's row asks for {wanted}"
    yield from _pattern_problems(target, packages)
    yield from _cuda_problems(target, facts, packages)


def _pattern_problems(target: TargetContext, packages: tuple[LockedPackage, ...]) -> Iterator[str]:
    """Yield components whose version no distribution has: those whose row names
    their first one by a pattern.
    """
    for component in target.components.values():
        version = target.versions.get(component.name, "")
        pattern = next(iter(python_patterns(component, target.cell)), "")
        if version and "*" in pattern:
            locked = {
                each.name: each.version
                for each in packages
                if each.build is component.build_only and fnmatchcase(each.name, pattern)
            }
            if version not in locked.values():
                found = (
                    ", ".join(f"{name} {version}" for name, version in locked.items())
                    or f"no {pattern}"
                )
                yield f"has {found}, the target's version of {component.name} is {version}"


def _cuda_problems(
    target: TargetContext, facts: Facts, packages: tuple[LockedPackage, ...]
) -> Iterator[str]:
    """Yield the packages of CUDA in the lock of a cell without CUDA: they come
    with another build of its framework.
    """
    versions = {each.name: each.version for each in packages if not each.build}
    if not target.cell.version and (names := cuda_packages(versions, facts)):
        named = ", ".join(f"{name} {versions[name]}" for name in names[:3])
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        yield (
            f"has {named}{more}, packages of CUDA;"
            f" the target's cell {target.cell.name} is without CUDA"
        )


def cuda_packages(names: Iterable[str], facts: Facts) -> list[str]:
    """Return those names of distributions that components of CUDA name by a pattern, such as
    ``nvidia-*``; sorted.
    """
    patterns = {
        pattern
        for component in facts.components
        if component.needs_cuda
        for pattern in map(distribution_name, component.python)
        if "*" in pattern
    }
    return sorted(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))


def _gaps(packages: tuple[LockedPackage, ...]) -> Iterator[str]:
    for build in (False, True):
        names = {package.name for package in packages if package.build == build}
        yield from (
            f"{package.name} requires {name}, which is missing"
            for package in packages
            if package.build == build
            for name in package.requires
            if name not in names
        )


def _public(version: str) -> str:
    """Return a version without what stands behind its ``+``."""
    return version.partition("+")[0]


def refuse_unlocked(plan: ImagePlan) -> None:
    """Refuse to build a plan that has inputs without a recorded hash: they could not be checked.

    Raises:
        LockError: It has such inputs; all of them are named.
    """
    if plan.unlocked:
        raise LockError(
            f"{plan.target.name} has inputs that are not locked:\n  " + "\n  ".join(plan.unlocked),
            hint=(
                "on a machine that reaches their servers, `--trust-first-use` records what is"
                f" missing and builds; `python build.py lock --only {plan.target.name}` records it"
                " without a build"
            ),
        )
