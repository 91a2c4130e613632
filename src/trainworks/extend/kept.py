"""What of a base image stays as it is, what else moves, and which requirements cannot be fulfilled with it. Pure.

The rule is that of a job's installation (``launcher/trainworks_launcher/programs/install.py``): what the image's
manifest protects is kept, with the version that is installed, and everything else may move, up or down.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from packaging.requirements import InvalidRequirement
from packaging.requirements import Requirement as Specification
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from trainworks.extend.requirements import BaseDistribution, ExtendedBase, PackageRequirement
from trainworks.facts.rows import Facts
from trainworks.plan.checks import Check, CommandCheck, PythonImportsCheck
from trainworks.plan.model import ImagePlan

LARGE_BYTES = 50_000_000
"""Files of the base that were replaced stay in its layers: above this, the user is told how many bytes."""

PROBED = ("command", "import", "loaded-library", "loadable-library", "python-imports", "single-library")
"""Kinds of checks that say whether a component works, not how the image was made."""


def kept_of(
    protected: Mapping[str, str], distributions: Iterable[BaseDistribution], patterns: Sequence[str]
) -> dict[str, str]:
    """Return what is never replaced in an image, name to version.

    Args:
        protected: What the image's manifest protects; nothing where it is another maker's.
        distributions: What is installed. Where something else of a protected name is, that is kept.
        patterns: Names of what the components of our images protect, for an image without a manifest.
    """
    installed = {canonicalize_name(row.name): row for row in distributions}
    kept: dict[str, str] = {canonicalize_name(name): version for name, version in protected.items()}
    kept |= {name: row.version for name, row in installed.items() if name in kept or not row.removable}
    if not protected:
        matching = [name for name in installed if any(fnmatchcase(name, pattern) for pattern in patterns)]
        kept |= {name: installed[name].version for name in matching}
    return kept


@dataclass(frozen=True, kw_only=True)
class Move:
    """A distribution of the base that gets another version; ``size`` are the bytes that stay in the base's layers."""

    name: str
    old: str
    new: str
    size: int = 0


def moves_of(locked: Iterable[tuple[str, str]], base: ExtendedBase) -> tuple[Move, ...]:
    """Return what of the base gets another version."""
    installed = {canonicalize_name(row.name): row for row in base.distributions}
    return tuple(
        Move(name=name, old=row.version, new=version, size=row.size)
        for name, version in locked
        if (row := installed.get(canonicalize_name(name))) and not same_version(row.version, version)
    )


def same_version(one: str, other: str) -> bool:
    """Whether two texts are the same version, such as 1.0 and 1.0.0."""
    try:
        return Version(one) == Version(other)
    except InvalidVersion:
        return one == other


def left_behind(moves: Sequence[Move]) -> str:
    """Return the warning for replaced files that stay in the base's layers; ``""`` where they are small."""
    total = sum(move.size for move in moves)
    if total <= LARGE_BYTES:
        return ""
    largest = sorted(moves, key=lambda move: -move.size)[:3]
    named = ", ".join(f"{move.name} {move.old} {move.size / 1e6:,.0f} MB" for move in largest)
    return (
        f"  warning: {total / 1e6:,.0f} MB of replaced files stay in the base's layers and are downloaded with them "
        f"({named})"
    )


def fulfilled(text: str, versions: Mapping[str, str], base: ExtendedBase) -> bool:
    """Whether a line of a distribution's metadata is fulfilled by these versions; true for what is no requirement."""
    try:
        wanted = Specification(text)
    except InvalidRequirement:
        return True
    if wanted.marker is not None and not wanted.marker.evaluate({**base.markers, "extra": ""}):
        return True
    version = versions.get(canonicalize_name(wanted.name))
    return version is not None and wanted.specifier.contains(version, prereleases=True)


def broken_by(locked: Iterable[tuple[str, str]], base: ExtendedBase, removed: Container[str] = ()) -> tuple[str, ...]:
    """Return which distributions stay as they are and lose what they require.

    What the base itself lacks is its own affair.

    Args:
        locked: What is installed or replaced.
        base: The image.
        removed: Names of what is removed from it.
    """
    before: dict[str, str] = {canonicalize_name(row.name): row.version for row in base.distributions}
    moved: dict[str, str] = {canonicalize_name(name): version for name, version in locked}
    after: dict[str, str] = {name: version for name, version in (before | moved).items() if name not in removed}
    return tuple(
        sorted(
            canonicalize_name(row.name)
            for row in base.distributions
            if canonicalize_name(row.name) not in moved
            and canonicalize_name(row.name) not in removed
            and any(fulfilled(text, before, base) and not fulfilled(text, after, base) for text in row.requires)
        )
    )


def fits_kept(requirement: PackageRequirement, base: ExtendedBase) -> bool:
    """Whether what the base keeps fulfils a requirement, by its version or by its build (``torch==VERSION+cu121``)."""
    builds = [row.build for row in base.distributions if canonicalize_name(row.name) == requirement.name]
    versions = [base.kept[requirement.name], *filter(None, builds)]
    specifier = requirement.specification.specifier
    return not requirement.wheel and any(specifier.contains(version, prereleases=True) for version in versions)


def line_of(requirement: PackageRequirement, base: ExtendedBase) -> str:
    """Return a requirement for the resolution: what names the build of what is kept, names its version."""
    version = base.kept.get(requirement.name, "")
    if not version or requirement.specification.specifier.contains(version, prereleases=True):
        return requirement.text
    extras = ",".join(sorted(requirement.specification.extras))
    return f"{requirement.name}{f'[{extras}]' if extras else ''}=={version}"


def conflicts(requirements: Iterable[PackageRequirement], base: ExtendedBase, facts: Facts) -> list[str]:
    """Return why requirements cannot be fulfilled with what the base keeps: one text that names all their lines.

    What is compiled for another torch than the base's, such as torchvision, is named with the lines of torch.
    """
    applying = [requirement for requirement in requirements if requirement.applies(base)]
    wrong = [each for each in applying if each.name in base.kept and not fits_kept(each, base)]
    frameworks = {name for component in facts.components if component.companions for name in component.python}
    refused = [each.name for each in wrong if each.name in frameworks]
    fitting = _fitting_companions(base, facts)
    for each in applying:
        known = fitting.get(each.name)
        if known is None or each in wrong or each.wheel:
            continue
        fits = any(each.specification.specifier.contains(version, prereleases=True) for version in known)
        if not fits and (known or (refused and each.pinned)):
            wrong.append(each)
    if not wrong:
        return []
    wrong.sort(key=applying.index)
    kept = ", ".join(dict.fromkeys(f"{each.name} {base.kept[each.name]}" for each in wrong if each.name in base.kept))
    others = dict.fromkeys(each.name for each in wrong if each.name not in base.kept)
    compiled = ", ".join(f"{name} {' or '.join(sorted(fitting[name]))}".strip() for name in others)
    kept = kept or ", ".join(f"{name} {version}" for name, version in base.kept.items() if name in frameworks)
    kept += f" and goes with {compiled} for just that" if compiled else ""
    lines = "".join(f"\n    {each.place}" for each in wrong)
    ways = targets_for(wrong, base, facts)
    way = f", or extend {' or '.join(ways)}" if ways else f"; no target has {'it' if len(wrong) == 1 else 'them'}"
    these = "this line" if len(wrong) == 1 else "these lines"
    return [f"{base.reference} keeps {kept}. Take {these} out{way}:{lines}"]


def _fitting_companions(base: ExtendedBase, facts: Facts) -> dict[str, set[str]]:
    """Return the versions of each companion (torchvision...) that the locks have with the base's framework."""
    found: dict[str, set[str]] = {}
    for component in facts.components:
        for name in component.companions:
            if canonicalize_name(name) in base.kept:
                continue
            versions = found.setdefault(canonicalize_name(name), set())
            for lock in facts.locks.values():
                rows = {package.name: package.version for package in lock.packages if not package.build}
                own = base.kept.get(component.name, "")
                if own and name in rows and _public(rows.get(component.name, "")) == _public(own):
                    versions.add(_public(rows[name]))
    return found


def _public(version: str) -> str:
    return version.partition("+")[0]


def targets_for(wrong: Sequence[PackageRequirement], base: ExtendedBase, facts: Facts) -> list[str]:
    """Return the targets whose framework fulfils the requirements that the base's does not, at most three."""
    frameworks = {
        name: component
        for component in facts.components
        for name in component.python
        if component.frameworks and component.required
    }
    asked = [each for each in wrong if each.name in frameworks]
    found = []
    for row in facts.targets:
        versions = (row.version, f"{row.version}+{row.cuda}")
        fits = all(
            row.framework in frameworks[each.name].frameworks
            and any(each.specification.specifier.contains(version, prereleases=True) for version in versions)
            for each in asked
        )
        if asked and fits and facts.base_by_name[row.base].architecture == base.architecture:
            found.append(facts.name_of(row))
    return found[:3]


def checks_again(
    plan: ImagePlan | None,
    base: ExtendedBase,
    moves: Sequence[Move],
    *,
    removed: Sequence[str] = (),
    locked: Container[str] = (),
) -> tuple[Check, ...]:
    """Return the checks of a base's own plan that say whether its components still work, with the versions of now.

    Args:
        plan: What this checkout makes of the target that the base's label names; ``None`` for another maker's image.
        base: The base; a component that it lacks, or has in another version, is left out.
        moves: What got another version. Nothing is asked again where nothing did. A component whose own distribution
            moved is what the requirements make of it, and is left out too.
        removed: What was removed; likewise.
        locked: Names of what the extension installs, which it checks itself.
    """
    if plan is None or not (moves or removed):
        return ()
    versions = {step.component: step.version for step in plan.steps}
    gone = {*(move.name for move in moves), *removed}
    same = {
        name
        for name, version in versions.items()
        if base.components.get(name, "") == version and name not in base.missing and name not in gone
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
            names = tuple(name for name in check.distributions if name not in locked and name not in gone)
            found += [replace(check, distributions=names)] if names else []
        else:
            found.append(check)
    return tuple(found)
