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
    fits_any,
    get_lock,
    list_python_patterns,
    list_python_requirements,
    parse_distribution_name,
)
from trainworks.plan.target import TargetContext, find_artifact_rows
from trainworks.plan.wheel_tags import wheel_tags


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """A distribution that a target's components require.

    Attributes:
        asked: The text in the component's row, such as ``numpy<1.24`` or ``ray[train]``.
        version: The version; ``""`` for any.
        build: Whether the distribution is only for build stages.
    """

    asked: str
    version: str
    build: bool

    def __str__(self) -> str:
        """Return the requirement in pip's form: ``numpy<1.24``, or ``torch==VERSION``."""
        if not self.version:
            return self.asked
        if self.range:
            return f"{self.asked},=={self.version}"
        return f"{self.asked}=={self.version}"

    @property
    def name(self) -> str:
        """The distribution's name alone."""
        return parse_distribution_name(self.asked)

    @property
    def range(self) -> str:
        """The range in the component's row, ``""`` if none."""
        return parse_range(self.asked)


def parse_range(requirement: str) -> str:
    """Return the range of a requirement (``<1.24`` of ``numpy<1.24``), ``""`` if it has none."""
    match = re.search(r"[<>=!~].*", requirement)
    if match is None:
        return ""
    return match[0]


def list_requirements(target: TargetContext, facts: Facts) -> tuple[Requirement, ...]:
    """Return the requirements of a target's lock: the distributions of every
    component that it can have.

    A component that downloads its wheel by itself is locked for the requirements of the wheel: as
    the index's file of the same public version (without the ``+cu124``), or as the artifact's own
    ``requires_dist``.
    """
    versions = dict(target.versions)
    for wheel in find_own_wheels(target, facts):
        versions[wheel.name] = _strip_local_version(wheel.version)
    requirements = []
    for component in target.components.values():
        is_for_build = component.name == BUILDER or component.build_only
        # The first distribution of a component has the component's version.
        version = versions.get(component.name, "")
        for text in list_python_requirements(component, target.cell):
            # A pattern such as ``nvidia-*`` takes the packages that others require.
            if "*" not in text:
                requirements.append(Requirement(asked=text, version=version, build=is_for_build))
            version = ""
    return tuple(requirements)


def find_own_wheels(target: TargetContext, facts: Facts) -> list[Artifact]:
    """Return the wheels that a target's components download by themselves."""
    wheels: list[Artifact] = []
    for component in target.components.values():
        if component.python:
            wheels += find_artifact_rows(component, target, facts)
    return wheels


def check_lock(target: TargetContext, facts: Facts) -> None:
    """Refuse a target without a lock, and a lock that the target cannot be built from.

    Raises:
        LockError: With all its problems.
    """
    get_lock(target)
    problems = find_lock_problems(target, facts)
    if problems:
        name = target.name
        raise LockError(
            f"images/lock/{name}.toml does not fit its rows:\n  " + "\n  ".join(problems),
            hint=f"`python build.py lock --only {name}` makes it again",
        )


def find_lock_problems(target: TargetContext, facts: Facts) -> tuple[str, ...]:
    """Return all problems of the lock of a target that has one, one sentence each.

    A package that is missing or left over from another lock, versions that differ from the rows,
    files of another package or version, and wheels that the target's Python on its base cannot
    load. A lock does not have the versions that a package accepts of another: the image test ``pip
    check`` does.
    """
    packages = get_lock(target)
    return (
        *_find_foreign_files(packages),
        *_find_unfit_wheels(target, packages),
        *_find_unmet_requirements(target, facts, packages),
        *_find_missing_requirements(packages),
    )


def _find_foreign_files(packages: tuple[LockedPackage, ...]) -> Iterator[str]:
    """Yield the packages with the file of another package or version."""
    for package in packages:
        file = _parse_file_name(package.file)
        # ``2`` and ``2.0`` are the same version.
        has_version = canonicalize_version(file.version) == canonicalize_version(package.version)
        if file.name != package.name or not has_version:
            yield (
                f"{package.name} {package.version}:"
                f" its file is {package.file}, of another package or version"
            )


def _find_unfit_wheels(target: TargetContext, packages: tuple[LockedPackage, ...]) -> Iterator[str]:
    """Yield the wheels for another Python, machine or C library than the target's."""
    base = target.base
    loadable = _list_loadable_tags(target.python, MACHINES[base.architecture], base.glibc)
    for package in packages:
        tags = _parse_file_name(package.file).tags
        # A source archive has no tags, and fits every Python.
        if tags and loadable.isdisjoint(tags):
            # The end of the name: ``cp311-cp311-manylinux_2_28_x86_64``.
            tag = "-".join(package.file.removesuffix(".whl").rsplit("-", 3)[-3:])
            yield (
                f"{package.name} {package.version}: its file is for {tag}, "
                f"not for Python {target.python}, {MACHINES[base.architecture]}, glibc {base.glibc}"
            )


@lru_cache(maxsize=64)
def _list_loadable_tags(python: str, machine: str, glibc: str) -> frozenset[Tag]:
    """Return the tags of the wheels that a platform can load; the cache saves most of the time."""
    return frozenset(wheel_tags(python=python, machine=machine, glibc=glibc))


@dataclass(frozen=True, kw_only=True)
class _FileName:
    """The parts of the name of a wheel or source archive.

    Attributes:
        name: The distribution's normalized name; ``""`` for another file.
        version: Its version.
        tags: The tags of a wheel; none for a source archive.
    """

    name: str = ""
    version: str = ""
    tags: frozenset[Tag] = frozenset()


@lru_cache(maxsize=8192)
def _parse_file_name(file: str) -> _FileName:
    """Parse the name of a wheel or source archive: ``torch-2.6-cp311-cp311-linux_x86_64.whl``."""
    try:
        if file.endswith(".whl"):
            name, version, _, tags = parse_wheel_filename(file)
            return _FileName(name=name, version=str(version), tags=tags)
        name, version = parse_sdist_filename(file)
    except ValueError:
        return _FileName()
    return _FileName(name=name, version=str(version))


def _find_unmet_requirements(
    target: TargetContext, facts: Facts, packages: tuple[LockedPackage, ...]
) -> Iterator[str]:
    """Yield requirements of the rows that the lock does not fulfil."""
    for limit in target.row.limits:
        for package in packages:
            is_limited = package.name == parse_distribution_name(limit) and not package.build
            if is_limited and not satisfies(package.version, parse_range(limit), {}):
                yield f"has {package.name} {package.version}, the target's limit is {limit}"
    build_versions = {package.name: package.version for package in packages if package.build}
    image_versions = {package.name: package.version for package in packages if not package.build}
    for requirement in list_requirements(target, facts):
        versions = image_versions
        if requirement.build:
            versions = build_versions
        version = versions.get(requirement.name)
        if version is None:
            yield f"{requirement} is missing"
        elif requirement.version and requirement.version not in (
            version,
            _strip_local_version(version),
        ):
            yield (
                f"has {requirement.name} {version}, the target's version is {requirement.version}"
            )
        elif requirement.range and not satisfies(version, requirement.range, {}):
            yield (f"has {requirement.name} {version}, its component's row asks for {requirement}")
    yield from _find_absent_versions(target, packages)
    yield from _check_cuda_packages(target, facts, packages)


def _find_absent_versions(
    target: TargetContext, packages: tuple[LockedPackage, ...]
) -> Iterator[str]:
    """Yield components with a version that no distribution of their first pattern has.

    For example version 12.6 of a component with ``nvidia-cuda-runtime*``. Requirements with exact
    names have their version already.
    """
    for component in target.components.values():
        version = target.versions.get(component.name, "")
        pattern = next(iter(list_python_patterns(component, target.cell)), "")
        if not version or "*" not in pattern:
            continue
        locked = {}
        for package in packages:
            if package.build is component.build_only and fnmatchcase(package.name, pattern):
                locked[package.name] = package.version
        if version not in locked.values():
            names = [f"{name} {locked_version}" for name, locked_version in locked.items()]
            content = ", ".join(names) or f"no {pattern}"
            yield f"has {content}, the target's version of {component.name} is {version}"


def _check_cuda_packages(
    target: TargetContext, facts: Facts, packages: tuple[LockedPackage, ...]
) -> Iterator[str]:
    """Yield the packages of CUDA in the lock of a cell without CUDA: they come
    with another build of its framework.
    """
    if target.cell.version:
        return
    versions = {package.name: package.version for package in packages if not package.build}
    names = find_cuda_packages(versions, facts)
    if not names:
        return
    shown = [f"{name} {versions[name]}" for name in names[:3]]
    content = ", ".join(shown)
    if len(names) > 3:
        content += f" and {len(names) - 3} more"
    yield (f"has {content}, packages of CUDA; the target's cell {target.cell.name} is without CUDA")


def find_cuda_packages(names: Iterable[str], facts: Facts) -> list[str]:
    """Return the distributions that components of CUDA name by a pattern, such as
    ``nvidia-*``; sorted.
    """
    cuda_names: set[str] = set()
    for component in facts.components:
        if component.needs_cuda:
            cuda_names.update(parse_distribution_name(row) for row in component.python)
    patterns = [name for name in cuda_names if "*" in name]
    return sorted(name for name in names if fits_any(name, patterns))


def _find_missing_requirements(packages: tuple[LockedPackage, ...]) -> Iterator[str]:
    """Yield requirements of packages that the lock does not have."""
    # Packages of the image and of build stages are installed apart: neither serves the other.
    for build in (False, True):
        group = [package for package in packages if package.build == build]
        names = {package.name for package in group}
        for package in group:
            for name in package.requires:
                if name not in names:
                    yield f"{package.name} requires {name}, which is missing"


def _strip_local_version(version: str) -> str:
    """Return a version without its local part: ``2.9`` of ``2.9+cu130``."""
    return version.partition("+")[0]


def refuse_unlocked(plan: ImagePlan) -> None:
    """Refuse to build a plan with inputs that have no recorded hash: a build cannot check them.

    Raises:
        LockError: The plan has such inputs; all of them are named.
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
