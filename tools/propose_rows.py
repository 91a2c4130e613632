#!/usr/bin/env python3
"""Ask the package index for newer frameworks and Python components, and print the rows to add to images/.

uv resolves each framework's newest `packages` rows again, without their versions, with the indexes of this machine's
pip. The answer is the newest versions that go together. CUDA, cuDNN and NCCL are those that the framework's wheel
requires. The rows are printed as TOML, below the name of their file. Nothing is written.

Review the rows, add them to the files, and run `python build.py lock --only NAME` for each target. Components that are
not on the index, have a CUDA version in their name, or only build others have no row here. Comments name the newer tags
of what is fetched by git, newer rows of images/artifacts.toml than a stack has, newer frameworks than vendor targets
have, and what comes from a server that lists no versions.

Exit status: 0, or 1 if nothing could be resolved.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

try:
    from packaging.version import Version

    from trainworks.errors import LockError
    from trainworks.facts.load import load
    from trainworks.facts.rows import Artifact, Component, Cuda, Facts, Stack, TargetRow
    from trainworks.host.downloads import Client, UnreachableError
    from trainworks.host.git import tags_of
    from trainworks.host.settings import HostSettings, read_host_settings
    from trainworks.inputs.lock_python import write_python_lock
    from trainworks.plan.locks import cuda_packages
    from trainworks.plan.shares import distribution_name, python_requirements
    from trainworks.plan.target import context_of
except ModuleNotFoundError as error:
    # Started with a Python that has not what the builder needs.
    from build import explain

    explain(error)
    raise

TAG_SECONDS = 60.0
"""How long a repository may take to list its tags."""

UNKNOWN = "?"
"""A reviewer fills it in: a fact of a CUDA version that the package index does not have."""


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """What is new.

    Attributes:
        cudas: CUDA cells that no row has yet.
        stack: The stack with newer components, `None` if there are none.
        targets: Framework rows.
        notes: What a reviewer has to know, a sentence each.
    """

    cudas: tuple[Cuda, ...] = ()
    stack: Stack | None = None
    targets: tuple[TargetRow, ...] = ()
    notes: tuple[str, ...] = ()


def newest_rows(facts: Facts) -> tuple[TargetRow, ...]:
    """Return the newest `packages` row of each framework and base: one with CUDA, one without."""
    newest: dict[tuple[str, str, bool], TargetRow] = {}
    for row in facts.targets:
        if facts.sources_of(row) == "packages":
            key = (row.framework, row.base, bool(facts.cuda_by_name[row.cuda].version))
            if key not in newest or Version(row.version) > Version(newest[key].version):
                newest[key] = row
    # Those with CUDA first: the version that they get is the one to look for without CUDA.
    return tuple(row for with_cuda in (True, False) for key, row in newest.items() if key[2] == with_cuda)


def own_version(row: TargetRow) -> str:
    """Return the name of the component whose version is the framework's."""
    return next(name for name, version in row.versions.items() if Version(version).public == row.version)


def resolved(row: TargetRow, facts: Facts, settings: HostSettings, pins: Mapping[str, str]) -> dict[str, str]:
    """Return the newest versions that go together, by distribution.

    Args:
        row: The target.
        facts: All rows.
        settings: Whose indexes are asked.
        pins: Versions that are kept, by component.

    Raises:
        LockError: No versions work together, or no index answers.
    """
    free = {name: pins.get(name, "") for name in row.versions}
    # A distribution with a CUDA version in its name would hold the framework back to that version.
    components = tuple(
        replace(each, python=tuple(name for name in each.python if "{" not in name)) for each in facts.components
    )
    stacks = tuple(replace(stack, components=dict.fromkeys(stack.components, "")) for stack in facts.stacks)
    with tempfile.TemporaryDirectory(prefix="trainworks-propose-") as folder:
        root = Path(folder)
        (root / "images").mkdir()
        asked = replace(row, versions=free)
        path = write_python_lock(
            asked, replace(facts, stacks=stacks, components=components), settings, os.environ, root
        )
        packages = tomllib.loads(path.read_text(encoding="utf-8"))["package"]
    # What is there for building too comes twice; the image's own is the first.
    return {package["name"]: package["version"] for package in reversed(packages)}


def version_in(found: Mapping[str, str], component: Component, cuda: Cuda) -> str:
    """Return the version of a component's first distribution, `""` if it is not among what was found."""
    pattern = distribution_name(python_requirements(component, cuda)[0])
    return next((version for name, version in sorted(found.items()) if fnmatchcase(name, pattern)), "")


def cell_of(found: Mapping[str, str], row: TargetRow, facts: Facts, framework: str) -> Cuda:
    """Return the CUDA cell of the runtime that a framework's wheel requires; a new one if no row has it."""
    old = facts.cuda_by_name[row.cuda]
    runtime = version_in(found, context_of(row, facts).components["cuda"], old)
    major, minor = Version(runtime).release[:2]
    known = [cell for cell in facts.cudas if cell.version == f"{major}.{minor}" and cell.wheel_suffix]
    if known:
        return known[0]
    siblings = [cell for cell in facts.cudas if cell.version.startswith(f"{major}.")]
    nearest = max(siblings, key=lambda cell: Version(cell.version), default=None)
    origin = (
        f"minimum driver and architectures: as {nearest.name}" if nearest else "CUDA Toolkit release notes: fill in"
    )
    return Cuda(
        name=f"cu{major}{minor}",
        version=f"{major}.{minor}",
        wheel_suffix=f"cu{major}",
        minimum_driver=nearest.minimum_driver if nearest else UNKNOWN,
        architectures=nearest.architectures if nearest else (UNKNOWN,),
        source=f"CUDA runtime {runtime}, required by {framework}; {origin}",
    )


def propose(facts: Facts, settings: HostSettings, today: date) -> Proposal:
    """Ask for everything, and return what is newer than the rows.

    Raises:
        LockError: Nothing could be resolved at all.
    """
    cudas: dict[str, Cuda] = {}
    targets: list[TargetRow] = []
    notes: list[str] = []
    newest: dict[str, str] = {}
    found_by_row: list[tuple[TargetRow, dict[str, str]]] = []
    errors: list[LockError] = []
    for row in newest_rows(facts):
        name = own_version(row)
        local = Version(row.versions[name]).local
        pins = {name: f"{newest.get(row.framework, row.version)}+{local}"} if local else {}
        try:
            found = resolved(row, facts, settings, pins)
        except LockError as error:
            notes.append(error.message.strip())
            errors.append(error)
            if row.versions[name] in ("", pins.get(name, "")):
                continue
            # Each build of a framework has an index of its own, which may be behind the others.
            try:
                found = resolved(row, facts, settings, {name: row.versions[name]})
            except LockError:
                continue
            notes[-1] = f"{name} {pins[name]} is not on the indexes: {row.framework} for {row.cuda} stays {row.version}"
            errors.pop()
        found_by_row.append((row, found))
        components = context_of(row, facts).components
        cuda = facts.cuda_by_name[row.cuda]
        version = version_in(found, components[name], cuda)
        newest.setdefault(row.framework, Version(version).public)
        if Version(version).public == Version(row.version).public:
            continue
        wheel = f"the {distribution_name(python_requirements(components[name], cuda)[0])} {version} wheel"
        if cuda.version:
            cuda = cell_of(found, row, facts, wheel)
            if cuda.name not in facts.cuda_by_name:
                cudas[cuda.name] = cuda
        elif unwanted := cuda_packages(found, facts):
            notes.append(
                f"{row.framework} {version} for {row.cuda} on {row.base} is not proposed: {wheel} asks for CUDA "
                f"({', '.join(unwanted[:3])})"
            )
            continue
        if any((old.framework, old.cuda, old.base) == (row.framework, cuda.name, row.base) for old in facts.targets):
            notes.append(f"{row.framework} {version} for {cuda.name} on {row.base} can replace the row of that cell")
        versions = {  # what the index does not have stays as it is
            each: version_in(found, components[each], cuda) if components[each].python else old
            for each, old in row.versions.items()
        }
        unasked = [each for each in row.versions if not versions[each] and "{" in components[each].python[0]]
        if unasked:
            notes.append(
                f"{row.framework} {version} on {row.base}: add the version for {cuda.name} of: {', '.join(unasked)}"
            )
        missing = [each for each, value in versions.items() if not value and each not in unasked]
        if missing:
            notes.append(
                f"{row.framework} {version} on {row.base}: not on the index for {cuda.name}: {', '.join(missing)}"
            )
        source = f"Requires-Dist of {wheel} on the package index, CPython {facts.python_of(row)}; resolved {today}"
        new = replace(row, version=Version(version).public, cuda=cuda.name, versions=versions, source=source)
        targets.append(new)
    if errors and not found_by_row:
        raise errors[0]
    stack = newer_stack(found_by_row, facts, today)
    notes += [*vendor_notes(newest, facts), *artifact_notes(facts, settings)]
    if stack:
        targets = [replace(row, stack=stack.name) for row in targets]
    return Proposal(cudas=tuple(cudas.values()), stack=stack, targets=tuple(targets), notes=tuple(notes))


def newer_stack(found_by_row: Iterable[tuple[TargetRow, Mapping[str, str]]], facts: Facts, today: date) -> Stack | None:
    """Return the newest rows' stack with newer components; `None` if all are the newest that every target can have."""
    stacks: dict[str, dict[str, str]] = {}
    for row, found in found_by_row:
        components = context_of(row, facts).components
        versions = stacks.setdefault(row.stack, {})
        for name in facts.stack_by_name[row.stack].components.keys() - row.versions.keys():
            component = components.get(name)
            if component and component.python and not component.artifact and not component.build_only:
                version = version_in(found, component, facts.cuda_by_name[row.cuda])
                # One stack serves all its targets: the newest that each of them can have.
                if version and (name not in versions or Version(version) < Version(versions[name])):
                    versions[name] = version
    if not stacks:
        return None
    old = facts.stack_by_name[max(stacks)]
    newer = {name: new for name, new in stacks[old.name].items() if Version(new) > Version(old.components[name])}
    if not newer:
        return None
    name = f"packages-{today:%Y.%m}"
    return replace(
        old,
        name=name if name not in facts.stack_by_name else f"packages-{today:%Y.%m.%d}",
        components={**old.components, **newer},
        source=f"{old.name} with the newest releases on the package index on {today} of: {', '.join(sorted(newer))}",
    )


def vendor_notes(newest: Mapping[str, str], facts: Facts) -> Iterator[str]:
    """Yield the frameworks of which no vendor target is as new as the package index.

    Args:
        newest: The newest version on the index, by framework.
        facts: All rows.
    """
    for framework, version in newest.items():
        rows = [row for row in facts.targets if row.framework == framework and facts.sources_of(row) == "vendor"]
        ours = max((Version(row.version) for row in rows), default=None)
        if ours and ours < Version(version):
            yield f"{framework} {version} is on the package index; the newest vendor target has {ours}"


def artifact_notes(facts: Facts, settings: HostSettings) -> Iterator[str]:
    """Yield newer versions of what the newest stacks download by themselves, and what has no list of versions."""
    stacks = sorted(facts.stacks, key=lambda stack: stack.name)
    used = {name: version for stack in stacks for name, version in stack.components.items()}
    silent = []
    with Client(settings) as client:
        for name, rows in sorted(facts.artifacts_by_name.items()):
            newest = max(rows, key=lambda row: Version(public(row.version)))
            if name in used and Version(public(used[name])) < Version(public(newest.version)):
                yield f"{name}: images/artifacts.toml has {newest.version}, the newest stack {used[name]}"
            if not newest.git:
                silent.append(name)
                continue
            try:
                tags = tags_of(newest.git, ca_path=client.ca_path, seconds=TAG_SECONDS)
            except UnreachableError as error:
                yield f"{name}: its tags are not known: {error.message}"
                continue
            if tag := newer_tag(newest, tags):
                yield f"{name}: the tag {tag} is newer than the newest row, {newest.version}"
    if silent:
        yield f"not asked for, because their servers list no versions: {', '.join(silent)}"


def public(version: str) -> str:
    """Return the numbers of a vendor's version, which PEP 440 may not know: ``1.7`` of ``1.7-aws``."""
    found = re.search(r"\d+(\.\d+)*", version)
    return found[0] if found else "0"


def newer_tag(row: Artifact, tags: Iterable[str]) -> str:
    """Return the newest of the tags that are written as the row's own and have a higher version; ``""`` if none."""
    before, _, after = row.tag.partition(row.version)
    form = re.compile(re.escape(before) + r"(\d+(?:\.\d+)+)" + re.sub(r"\d+", lambda _: r"\d+", re.escape(after)))
    versions = {tag: Version(found[1]) for tag in tags if (found := form.fullmatch(tag))}
    newer = {tag: version for tag, version in versions.items() if version > Version(public(row.version))}
    return max(newer, key=newer.__getitem__, default="")


def as_toml(proposal: Proposal, frameworks: Iterable[str]) -> Iterator[str]:
    """Yield the lines of a proposal: notes as comments, and rows below the names of their files."""
    for note in proposal.notes:
        yield from (f"# {line}".rstrip() for line in note.splitlines())
    if proposal.cudas:
        yield "\n# images/cuda.toml"
    for cuda in proposal.cudas:
        architectures = ", ".join(f'"{each}"' for each in cuda.architectures)
        yield "\n[[cuda]]"
        yield from (f'{key} = "{getattr(cuda, key)}"' for key in ("name", "version", "wheel_suffix", "minimum_driver"))
        yield f"architectures = [{architectures}]"
        yield f'source = "{cuda.source}"'
    if proposal.stack:
        stack = proposal.stack
        yield "\n# images/stacks.toml"
        yield f'\n[[stack]]\nname = "{stack.name}"\nsources = "{stack.sources}"\nsource = "{stack.source}"'
        yield "\n[stack.components]"
        yield from (f'{name} = "{version}"' for name, version in stack.components.items())
    for framework in frameworks:
        rows = [row for row in proposal.targets if row.framework == framework]
        if rows:
            yield f"\n# images/{framework}.toml"
        for row in rows:
            versions = ", ".join(f'{name} = "{version}"' for name, version in row.versions.items() if version)
            yield "\n[[target]]"
            yield from (f'{key} = "{getattr(row, key)}"' for key in ("version", "cuda", "base", "stack"))
            yield f"versions = {{ {versions} }}"
            if row.limits:
                limits = ", ".join(f'"{limit}"' for limit in row.limits)
                yield f"limits = [{limits}]"
            yield f"size_budget_megabytes = {row.size_budget_megabytes}"
            yield from (f'{key} = "{getattr(row, key)}"' for key in ("python", "wheel_index") if getattr(row, key))
            yield f'source = "{row.source}"'


def main() -> int:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout whose rows are compared")
    facts = load(parser.parse_args().root)
    try:
        proposal = propose(facts, read_host_settings(os.environ), datetime.now(UTC).date())
    except LockError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1
    print("\n".join(as_toml(proposal, dict.fromkeys(row.framework for row in facts.targets))))
    if not (proposal.targets or proposal.stack):
        print("# Nothing is newer than the rows.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
