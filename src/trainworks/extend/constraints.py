"""What of a base image stays as it is, what else moves, and which requirements
cannot be fulfilled with it. Pure.

The rule is that of a job's installation (``launcher/trainworks_launcher/programs/install.py``):
what the image's manifest protects is kept, with the version that is installed, and everything else
may move, up or down.
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
from trainworks.facts.rows import Facts, SourceFile
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
    """Return what is never replaced in an image, name to version.

    Args:
        protected: What the image's manifest protects; nothing where it is another maker's.
        distributions: What is installed. Where something else of a protected name is, that is kept.
        patterns: Names of what the components of our images protect, for an
            image without a manifest.
    """
    installed = {canonicalize_name(row.name): row for row in distributions}
    kept: dict[str, str] = {canonicalize_name(name): version for name, version in protected.items()}
    kept |= {
        name: row.version for name, row in installed.items() if name in kept or not row.removable
    }
    if not protected:
        matching = [
            name for name in installed if any(fnmatchcase(name, pattern) for pattern in patterns)
        ]
        kept |= {name: installed[name].version for name in matching}
    return kept


@dataclass(frozen=True, kw_only=True)
class Move:
    """A distribution of the base that gets another version."""

    name: str
    old: str
    new: str


def moves_of(locked: Iterable[tuple[str, str]], base: ExtendedBase) -> tuple[Move, ...]:
    """Return what of the base gets another version."""
    installed = {canonicalize_name(row.name): row for row in base.distributions}
    return tuple(
        Move(name=name, old=row.version, new=version)
        for name, version in locked
        if (row := installed.get(canonicalize_name(name)))
        and not same_version(row.version, version)
    )


def same_version(one: str, other: str) -> bool:
    """Whether two texts are the same version, such as 1.0 and 1.0.0."""
    try:
        return Version(one) == Version(other)
    except InvalidVersion:
        return one == other


def hidden_by(files: Iterable[SourceFile], base: ExtendedBase) -> str:
    """Return the warning for code that is imported instead of a module that the
    image keeps, or of Python's own.
    """
    tops = {
        path.partition("/")[0].removesuffix(".py")
        for path in (file.path for file in files)
        if path.endswith(".py")
    }
    named = sorted(
        tops & {*(name.replace("-", "_") for name in base.kept), *sys.stdlib_module_names}
    )
    return (
        f"warning: the code's own {', '.join(named)} would be imported instead of the image's"
        if named
        else ""
    )


def targets_for(asked: Sequence[tuple[str, str]], base: ExtendedBase, facts: Facts) -> list[str]:
    """Return targets of packages that have what a base's framework is too old for, at most three.

    They have the base's kind of accelerator, and the companions that are asked for too. Where no
    target without CUDA has it, those with CUDA are named: their images run on hosts without a GPU,
    too.

    Args:
        asked: Names and specifiers, such as ``("torch", ">=2.14")``; ``python``
            is the target's Python.
        base: The base image.
        facts: All facts.
    """
    has_cuda = any(name.startswith("nvidia-") for name in base.kept)
    found: dict[bool, list[str]] = {True: [], False: []}
    for row in facts.targets:
        lock = facts.locks.get(facts.name_of(row))
        versions = {
            each.name: each.version for each in (lock.packages if lock else ()) if not each.build
        }
        framework = row.framework.replace("pytorch", "torch")
        versions[framework] = row.version
        versions["python"] = facts.python_of(row)
        fits = all(
            name in versions
            and Specification(f"{name}{wanted}").specifier.contains(
                versions[name], prereleases=True
            )
            for name, wanted in asked
        )
        is_ours = facts.base_by_name[row.base].architecture == base.architecture
        is_ours = is_ours and facts.sources_of(row) == "packages"
        if fits and is_ours and (framework in base.kept or framework in dict(asked)):
            found[bool(facts.cuda_by_name[row.cuda].version)].append(facts.name_of(row))
    return (found[has_cuda] or found[True])[:3]


def checks_again(
    plan: ImagePlan | None,
    base: ExtendedBase,
    moves: Sequence[Move],
    *,
    locked: Container[str] = (),
) -> tuple[Check, ...]:
    """Return the checks of a base's own plan that say whether its components
    still work, with the versions of now.

    Args:
        plan: What this checkout makes of the target that the base's label names; ``None`` for
            another maker's image.
        base: The base; a component that it lacks, or has in another version, is left out. So is one
            without a version, such as the lists of licences: no package that moves can break it.
        moves: What got another version. Nothing is asked again where nothing did. A component whose
            own distribution moved is what the requirements make of it, and is left out too.
        locked: Names of what the extension installs, which it checks itself.
    """
    if plan is None or not moves:
        return ()
    versions = {step.component: step.version for step in plan.steps}
    gone = {move.name for move in moves}
    same = {
        name
        for name, version in versions.items()
        if version
        and base.components.get(name) == version
        and name not in base.missing
        and name not in gone
    }
    found: list[Check] = []
    for check in plan.checks:
        if check.kind not in PROBED or check.component not in same or not base.components:
            continue
        if isinstance(check, CommandCheck):
            expect = check.expect
            for move in moves:
                expect = move.new if expect == move.old else expect
            found.append(replace(check, expect=expect))
        elif isinstance(check, PythonImportsCheck):
            names = tuple(
                name for name in check.distributions if name not in locked and name not in gone
            )
            found += [replace(check, distributions=names)] if names else []
        else:
            found.append(check)
    return tuple(found)
