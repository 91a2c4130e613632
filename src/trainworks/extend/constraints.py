"""The packages of a base image that an extension keeps, and those that it moves. Pure.

The rule is that of a job's installation (``launcher/trainworks_launcher/programs/install.py``):
packages that the image's manifest protects keep the version that is installed, and all others may
move, up or down.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from packaging.requirements import Requirement as Specification
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from trainworks.extend.requirements import BaseDistribution, ExtendedBase
from trainworks.facts.rows import Facts, SourceFile, TargetRow
from trainworks.plan.checks import Check, CommandCheck, PythonImportsCheck
from trainworks.plan.model import ImagePlan

PROBED = (
    "command",
    "import",
    "loaded-library",
    "loadable-library",
    "python-imports",
    "single-library",
)
"""Kinds of checks that say whether a component works, not how the image was made."""


def kept_of(
    protected: Mapping[str, str], distributions: Iterable[BaseDistribution], patterns: Sequence[str]
) -> dict[str, str]:
    """Return the distributions of an image that are never replaced, name to version.

    Args:
        protected: Those that the image's manifest protects; nothing for another maker's image.
        distributions: The installed distributions. An installed version wins over the manifest's.
        patterns: Names that the components of our images protect, for an image without a manifest.
    """
    kept: dict[str, str] = {canonicalize_name(name): version for name, version in protected.items()}
    installed = {canonicalize_name(row.name): row for row in distributions}
    for name, row in installed.items():
        is_protected = name in kept or not row.removable
        if not protected:
            matches = [pattern for pattern in patterns if fnmatchcase(name, pattern)]
            is_protected = is_protected or bool(matches)
        if is_protected:
            kept[name] = row.version
    return kept


@dataclass(frozen=True, kw_only=True)
class Move:
    """A distribution of the base that gets another version.

    Attributes:
        name: The distribution.
        old: The version in the base.
        new: The version in the extended image.
    """

    name: str
    old: str
    new: str


def moves_of(locked: Iterable[tuple[str, str]], base: ExtendedBase) -> tuple[Move, ...]:
    """Return the distributions of the base that get another version.

    Args:
        locked: The names and versions that the extension installs.
        base: The base.
    """
    installed = {canonicalize_name(row.name): row.version for row in base.distributions}
    moves = []
    for name, version in locked:
        old = installed.get(canonicalize_name(name))
        if old is not None and not same_version(old, version):
            moves.append(Move(name=name, old=old, new=version))
    return tuple(moves)


def same_version(one: str, other: str) -> bool:
    """Return whether two texts are the same version, such as 1.0 and 1.0.0."""
    try:
        return Version(one) == Version(other)
    except InvalidVersion:
        return one == other


def hidden_by(files: Iterable[SourceFile], base: ExtendedBase) -> str:
    """Return the warning for code that hides a module of the image or of Python; ``""`` for none.

    ``json.py`` beside the entry point would be imported instead of Python's own ``json``.
    """
    own_modules = set()
    for file in files:
        if file.path.endswith(".py"):
            own_modules.add(file.path.partition("/")[0].removesuffix(".py"))
    kept_modules = {name.replace("-", "_") for name in base.kept}
    hidden = sorted(own_modules & (kept_modules | sys.stdlib_module_names))
    if not hidden:
        return ""
    return f"warning: the code's own {', '.join(hidden)} would be imported instead of the image's"


def targets_for(
    requirements: Sequence[tuple[str, str]], base: ExtendedBase, facts: Facts
) -> list[str]:
    """Return targets of packages with versions for which a base's framework is too old.

    At most three. They have the base's kind of accelerator, and fulfil the requirements of the
    framework's companions too. If no target without CUDA fits, targets with CUDA are returned:
    their images also run on hosts without a GPU.

    Args:
        requirements: Names and specifiers, such as ``("torch", ">=2.14")``; ``python``
            is the target's Python.
        base: The base image.
        facts: All facts.
    """
    has_cuda = any(name.startswith("nvidia-") for name in base.kept)
    fitting: dict[bool, list[str]] = {True: [], False: []}
    for row in facts.targets:
        if facts.base_by_name[row.base].architecture != base.architecture:
            continue
        if facts.sources_of(row) != "packages":
            continue
        framework = row.framework.replace("pytorch", "torch")
        if framework not in base.kept and framework not in dict(requirements):
            continue
        if _fulfils(_versions_of(row, facts), requirements):
            target_has_cuda = bool(facts.cuda_by_name[row.cuda].version)
            fitting[target_has_cuda].append(facts.name_of(row))
    targets = fitting[has_cuda] or fitting[True]
    return targets[:3]


def _versions_of(row: TargetRow, facts: Facts) -> dict[str, str]:
    """Return the versions in a target's image, by name; ``python`` is its Python."""
    lock = facts.locks.get(facts.name_of(row))
    packages = lock.packages if lock else ()
    versions = {package.name: package.version for package in packages if not package.build}
    versions[row.framework.replace("pytorch", "torch")] = row.version
    versions["python"] = facts.python_of(row)
    return versions


def _fulfils(versions: Mapping[str, str], requirements: Sequence[tuple[str, str]]) -> bool:
    """Return whether each requirement has a version that its specifier contains."""
    for name, specifier in requirements:
        if name not in versions:
            return False
        requirement = Specification(f"{name}{specifier}")
        if not requirement.specifier.contains(versions[name], prereleases=True):
            return False
    return True


def checks_again(
    plan: ImagePlan | None,
    base: ExtendedBase,
    moves: Sequence[Move],
    *,
    locked: Container[str] = (),
) -> tuple[Check, ...]:
    """Return the checks of a base's own plan that say whether its components still work.

    They expect the versions after the moves. Nothing is checked again where nothing moved.

    Args:
        plan: This checkout's plan of the target in the base's label; ``None`` for
            another maker's image.
        base: The base.
        moves: The distributions that get another version.
        locked: Names of the packages that the extension installs, which it checks itself.
    """
    if plan is None or not moves or not base.components:
        return ()
    components = _unmoved_components(plan, base, moves)
    moved = {move.name for move in moves}
    checks: list[Check] = []
    for check in plan.checks:
        if check.kind not in PROBED or check.component not in components:
            continue
        if isinstance(check, CommandCheck):
            expect = check.expect
            for move in moves:
                if expect == move.old:
                    expect = move.new
            checks.append(replace(check, expect=expect))
        elif isinstance(check, PythonImportsCheck):
            names = [
                name for name in check.distributions if name not in locked and name not in moved
            ]
            if names:
                checks.append(replace(check, distributions=tuple(names)))
        else:
            checks.append(check)
    return tuple(checks)


def _unmoved_components(plan: ImagePlan, base: ExtendedBase, moves: Sequence[Move]) -> set[str]:
    """Return the components that are in the base as planned.

    A component without a version, such as the lists of licences, is left out: no package can break
    it. So is one that moves itself: the requirements decide its state.
    """
    moved = {move.name for move in moves}
    components = set()
    for step in plan.steps:
        name = step.component
        is_as_planned = bool(step.version) and base.components.get(name) == step.version
        if is_as_planned and name not in base.missing and name not in moved:
            components.add(name)
    return components
