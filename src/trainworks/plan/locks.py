"""Checks the lock of a target: required packages, their files, and their own requirements."""

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
    """A distribution that a target's components require.

    Attributes:
        asked: The text in the component's row: a name, some with extras or a range.
        version: The version; ``""`` for any.
        build: Whether it is only for build stages.
    """

    asked: str
    version: str
    build: bool

    def __str__(self) -> str:
        """Return it in pip's form: ``numpy<1.24``, or ``torch==VERSION``."""
        if not self.version:
            return self.asked
        separator = "," if self.range else ""
        return f"{self.asked}{separator}=={self.version}"

    @property
    def name(self) -> str:
        """The distribution's name alone."""
        return distribution_name(self.asked)

    @property
    def range(self) -> str:
        """The range in the component's row, ``""`` if none."""
        return range_of(self.asked)


def range_of(requirement: str) -> str:
    """Return the range of a requirement (``<1.24`` of ``numpy<1.24``), ``""`` if it has none."""
    match = re.search(r"[<>=!~].*", requirement)
    return match[0] if match else ""


def requirements_of(target: TargetContext, facts: Facts) -> tuple[Requirement, ...]:
    """Return the requirements of a target's lock: the distributions of every
    component that it can have.

    A component that downloads its wheel by itself is locked for the requirements of the wheel: as
    the index's file of the same public version (without the ``+cu124``), or as the artifact's own
    ``requires_dist``.
    """
    versions = dict(target.versions)
    for wheel in own_wheels(target, facts):
        versions[wheel.name] = _public(wheel.version)
    requirements = []
    for component in target.components.values():
        is_for_build = component.name == BUILDER or component.build_only
        # The first distribution of a component has the component's version.
        version = versions.get(component.name, "")
        for text in python_requirements(component, target.cell):
            if "*" not in text:
                requirements.append(Requirement(asked=text, version=version, build=is_for_build))
            version = ""
    return tuple(requirements)


def own_wheels(target: TargetContext, facts: Facts) -> list[Artifact]:
    """Return the wheels that a target's components download by themselves."""
    wheels: list[Artifact] = []
    for component in target.components.values():
        if component.python:
            wheels += artifact_rows(component, target, facts)
    return wheels


def check_lock(target: TargetContext, facts: Facts) -> None:
    """Refuse a target without a lock, and a lock that the target cannot be built from.

    Raises:
        LockError: With all its problems.
    """
    lock_of(target)
    problems = lock_problems(target, facts)
    if problems:
        name = target.name
        raise LockError(
            f"images/lock/{name}.toml does not fit its rows:\n  " + "\n  ".join(problems),
            hint=f"`python build.py lock --only {name}` makes it again",
        )


def lock_problems(target: TargetContext, facts: Facts) -> tuple[str, ...]:
    """Return all problems of the lock of a target that has one, one sentence each.

    A package that is missing or left over from another lock, versions that differ from the rows,
    files of another package or version, and wheels that the target's Python on its base cannot
    load. A lock does not have the versions that a package accepts of another: the image test ``pip
    check`` does.
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
        has_version = canonicalize_version(version) == canonicalize_version(package.version)
        if name != package.name or not has_version:
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
    """Yield requirements of the rows that the lock does not fulfil."""
    for limit in target.row.limits:
        for package in packages:
            is_limited = package.name == distribution_name(limit) and not package.build
            if is_limited and not satisfies(package.version, range_of(limit), {}):
                yield f"has {package.name} {package.version}, the target's limit is {limit}"
    build_versions = {package.name: package.version for package in packages if package.build}
    image_versions = {package.name: package.version for package in packages if not package.build}
    for requirement in requirements_of(target, facts):
        versions = build_versions if requirement.build else image_versions
        version = versions.get(requirement.name)
        if version is None:
            yield f"{requirement} is missing"
        elif requirement.version and requirement.version not in (version, _public(version)):
            yield (
                f"has {requirement.name} {version}, the target's version is {requirement.version}"
            )
        elif requirement.range and not satisfies(version, requirement.range, {}):
            yield (f"has {requirement.name} {version}, its component's row asks for {requirement}")
    yield from _pattern_problems(target, packages)
    yield from _cuda_problems(target, facts, packages)


def _pattern_problems(target: TargetContext, packages: tuple[LockedPackage, ...]) -> Iterator[str]:
    """Yield components with a version that no distribution has.

    Only those with a pattern for their first distribution.
    """
    for component in target.components.values():
        version = target.versions.get(component.name, "")
        pattern = next(iter(python_patterns(component, target.cell)), "")
        if not version or "*" not in pattern:
            continue
        locked = {
            package.name: package.version
            for package in packages
            if package.build is component.build_only and fnmatchcase(package.name, pattern)
        }
        if version not in locked.values():
            names = [f"{name} {locked_version}" for name, locked_version in locked.items()]
            content = ", ".join(names) or f"no {pattern}"
            yield f"has {content}, the target's version of {component.name} is {version}"


def _cuda_problems(
    target: TargetContext, facts: Facts, packages: tuple[LockedPackage, ...]
) -> Iterator[str]:
    """Yield the packages of CUDA in the lock of a cell without CUDA: they come
    with another build of its framework.
    """
    if target.cell.version:
        return
    versions = {package.name: package.version for package in packages if not package.build}
    names = cuda_packages(versions, facts)
    if not names:
        return
    shown = ", ".join(f"{name} {versions[name]}" for name in names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    yield (
        f"has {shown}{more}, packages of CUDA; the target's cell {target.cell.name} is without CUDA"
    )


def cuda_packages(names: Iterable[str], facts: Facts) -> list[str]:
    """Return the distributions that components of CUDA name by a pattern, such as
    ``nvidia-*``; sorted.
    """
    patterns = set()
    for component in facts.components:
        if component.needs_cuda:
            for row in component.python:
                pattern = distribution_name(row)
                if "*" in pattern:
                    patterns.add(pattern)
    return sorted(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))


def _gaps(packages: tuple[LockedPackage, ...]) -> Iterator[str]:
    """Yield requirements of packages that the lock does not have."""
    for build in (False, True):
        group = [package for package in packages if package.build == build]
        names = {package.name for package in group}
        for package in group:
            for name in package.requires:
                if name not in names:
                    yield f"{package.name} requires {name}, which is missing"


def _public(version: str) -> str:
    """Return a version without its local part: ``VERSION`` of ``VERSION+cu130``."""
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
