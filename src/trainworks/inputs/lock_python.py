"""``build.py lock``: resolves Python files of targets into ``images/lock``, pinned by hash."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from packaging.tags import Tag
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from trainworks.engine.subprocesses import run
from trainworks.engine.temporary_folders import private_folder
from trainworks.errors import LockError
from trainworks.facts import lockfile
from trainworks.facts.rows import MACHINES, Artifact, Facts, LockedPackage, TargetRow
from trainworks.host.pip import uv_configuration
from trainworks.host.settings import HostSettings
from trainworks.host.uv import find_uv
from trainworks.inputs.sizes import request_file_sizes
from trainworks.plan.locks import find_own_wheels, list_requirements
from trainworks.plan.target import context_of
from trainworks.plan.wheel_tags import wheel_tags

SECONDS = 600.0
"""Seconds that one resolution may take."""

ANNOTATION = re.compile(r"^(?P<name>[a-z0-9._-]+)==\S+.*?# via (?P<via>.+)$")
"""A line of uv's output with comments: ``numpy==2.1 # via scipy, torch``."""


def lock_target(
    row: TargetRow,
    facts: Facts,
    settings: HostSettings,
    environment: Mapping[str, str],
    *,
    upgrade: bool = False,
) -> tuple[LockedPackage, ...]:
    """Resolve the Python files of one target.

    Args:
        upgrade: Whether all packages get their newest versions; default: locked
            packages stay as far as the rows allow.

    Raises:
        LockError: When no set of versions fits, or the index does not answer; with uv's own words.
    """
    target = context_of(row, facts)
    platform = _Platform(
        machine=MACHINES[target.base.architecture], glibc=target.base.glibc, python=target.python
    )
    packages: list[LockedPackage] = []
    # Packages of the image and of build stages are installed apart, maybe in two versions.
    for build in (False, True):
        all_requirements = list_requirements(target, facts)
        requirements = [str(row) for row in all_requirements if row.build == build]
        preferences: list[LockedPackage] = []
        if not upgrade and target.lock is not None:
            preferences = [package for package in target.lock if package.build == build]
        # Limits and wheels of the row are those of the image.
        limits: tuple[str, ...] = ()
        wheels: list[Artifact] = []
        if not build:
            limits = row.limits
            wheels = find_own_wheels(target, facts)
        resolution = _Resolution(
            name=f"{row.framework} {row.version} {row.cuda} on {row.base}",
            requirements=tuple(requirements),
            limits=limits,
            wheels=wheels,
            preferences=tuple(preferences),
            platform=platform,
            wheel_index=row.wheel_index,
        )
        resolved = _resolve_with_uv(resolution, settings, environment)
        packages += [replace(package, build=build) for package in resolved]
    return tuple(packages)


def remove_versions(row: TargetRow, facts: Facts) -> tuple[TargetRow, Facts]:
    """Return a row and facts without versions, to resolve the newest packages that fit together.

    A version with a build of its own (behind its ``+``) stays: without that version another build
    would be the newest.
    """
    components = []
    for component in facts.components:
        # A distribution with a CUDA version in its name would hold the framework back to that
        # version.
        python = tuple(name for name in component.python if "{" not in name)
        components.append(replace(component, python=python))
    stacks = []
    for stack in facts.stacks:
        no_versions = dict.fromkeys(stack.components, "")
        stacks.append(replace(stack, components=no_versions))
    versions = {}
    for name, version in row.versions.items():
        versions[name] = ""
        if "+" in version:
            versions[name] = version
    facts = replace(facts, stacks=tuple(stacks), components=tuple(components))
    return replace(row, versions=versions), facts


def describe_moves(before: Sequence[LockedPackage], after: Sequence[LockedPackage]) -> list[str]:
    """Return the differences between two locks, a line for each package: ``NAME OLD -> NEW``."""
    old_packages = {(package.name, package.build): package for package in before}
    new_packages = {(package.name, package.build): package for package in after}
    lines = []
    for key in sorted(old_packages.keys() | new_packages.keys()):
        name, build = key
        label = name
        if build:
            label += " (to build)"
        old, new = old_packages.get(key), new_packages.get(key)
        if old is None and new is not None:
            lines.append(f"{label} {new.version} is new")
        elif old is not None and new is None:
            lines.append(f"{label} {old.version} goes")
        elif old is not None and new is not None:
            if old.version != new.version:
                lines.append(f"{label} {old.version} -> {new.version}")
            elif old.sha256 != new.sha256:
                lines.append(f"{label} {old.version}: another file, {new.file}")
    return lines


@dataclass(frozen=True, kw_only=True)
class _Platform:
    """The platform of wheels: processor, newest level of the C library, Python ``MAJOR.MINOR``."""

    machine: str
    glibc: str
    python: str


@dataclass(frozen=True, kw_only=True)
class _Resolution:
    """The input of one resolution by uv.

    Attributes:
        name: The target for messages: ``FRAMEWORK VERSION CUDA on BASE``.
        requirements: The requirements, as lines of a requirements file.
        limits: Constraints.
        wheels: Wheels that are no files of an index, with their own metadata.
        preferences: Packages that stay, if they fit.
        platform: The platform of the wheels.
        wheel_index: The vendor's index, used if this machine names none.
    """

    name: str
    requirements: tuple[str, ...]
    limits: tuple[str, ...]
    wheels: Sequence[Artifact]
    preferences: tuple[LockedPackage, ...]
    platform: _Platform
    wheel_index: str


def _resolve_with_uv(
    resolution: _Resolution, settings: HostSettings, environment: Mapping[str, str]
) -> list[LockedPackage]:
    """Resolve requirements with uv, and return the packages with their files and sizes.

    Raises ``LockError``.
    """
    platform = resolution.platform
    with private_folder() as folder:
        _write_inputs(resolution, settings, folder)
        arguments = ["pip", "compile", "requirements.in", "--quiet", "--no-header"]
        arguments += ["--python-version", platform.python]
        arguments += ["--python-platform", uv_platform(platform.machine, platform.glibc)]
        arguments += ["--config-file", "uv.toml", "--constraints", "constraints.in"]
        lock_path, edges_path = folder / "pylock.toml", folder / "edges.txt"
        to_lock = [*arguments, "--format", "pylock.toml", "--output-file", lock_path.name]
        run_uv(to_lock, folder, resolution.name, environment)
        content = tomllib.loads(lock_path.read_text(encoding="utf-8"))
        # The lock has no edges between packages. uv writes them as comments into a requirements
        # file: a second run gets the same versions as pins.
        rows = content.get("packages", ())
        pins = [f"{row['name']}=={row['version']}\n" for row in rows]
        edges_path.write_text("".join(pins), encoding="utf-8")
        to_annotate = [*arguments, "--annotation-style", "line", "--output-file", edges_path.name]
        run_uv(to_annotate, folder, resolution.name, environment)
        requires = _parse_requirements_by_package(edges_path.read_text(encoding="utf-8"))

    tags = wheel_tags(python=platform.python, machine=platform.machine, glibc=platform.glibc)
    # An installer takes the wheel with the lowest rank.
    rank_by_tag = {tag: rank for rank, tag in enumerate(tags)}
    packages, urls = [], []
    for row in rows:
        name = canonicalize_name(row["name"])
        url, sha256 = _choose_file(row, rank_by_tag)
        package = LockedPackage(
            name=name,
            version=row["version"],
            file=unquote(url).rsplit("/", 1)[-1],
            sha256=sha256,
            requires=tuple(sorted(requires.get(name, ()))),
        )
        urls.append(url)
        packages.append(package)
    sizes = request_file_sizes(urls, settings)
    with_sizes = []
    for package, url in zip(packages, urls, strict=True):
        with_sizes.append(replace(package, size=sizes.get(url, 0)))
    return with_sizes


def _write_inputs(resolution: _Resolution, settings: HostSettings, folder: Path) -> None:
    """Write uv's input files: requirements, constraints, settings and preferred versions."""
    requirements = "\n".join(resolution.requirements) + "\n"
    (folder / "requirements.in").write_text(requirements, encoding="utf-8")
    constraints = "".join(f"{limit}\n" for limit in resolution.limits)
    (folder / "constraints.in").write_text(constraints, encoding="utf-8")
    local = [str(path) for path in settings.pip.local_folders]
    configuration = uv_configuration(
        settings.pip, vendor_index=resolution.wheel_index, folders=local
    )
    metadata = "".join(map(_render_metadata, resolution.wheels))
    (folder / "uv.toml").write_text(configuration + metadata, encoding="utf-8")
    # uv prefers the versions in the file that it will overwrite.
    preferences = []
    for package in resolution.preferences:
        preferences.append(f'{{ name = "{package.name}", version = "{package.version}" }}')
    (folder / "pylock.toml").write_text(
        f'lock-version = "1.0"\ncreated-by = "trainworks"\npackages = [{", ".join(preferences)}]\n',
        encoding="utf-8",
    )


def _parse_requirements_by_package(annotated: str) -> dict[str, list[str]]:
    """Parse the comments ``# via`` of uv; return the names that each package requires.

    For example ``{"torch": ["numpy"]}`` for the line ``numpy==VERSION # via torch``.
    """
    requires: dict[str, list[str]] = {}
    for line in annotated.splitlines():
        match = ANNOTATION.match(line)
        if match is None:
            continue
        name = canonicalize_name(match["name"])
        for parent in match["via"].split(", "):
            requires.setdefault(canonicalize_name(parent), []).append(name)
    return requires


def _render_metadata(wheel: Artifact) -> str:
    """Return uv's settings for a wheel with other requirements than the index's file.

    ``""`` for a wheel without such requirements.
    """
    if not wheel.requires_dist:
        return ""
    required = ", ".join(f'"{requirement}"' for requirement in wheel.requires_dist)
    return (
        "\n"
        "[[dependency-metadata]]\n"
        f'name = "{wheel.name}"\n'
        f'version = "{Version(wheel.version).public}"\n'
        f"requires-dist = [{required}]\n"
    )


def run_uv(
    arguments: Sequence[str], folder: Path, subject: str, environment: Mapping[str, str]
) -> str:
    """Run uv in a folder and return its output.

    Raises:
        LockError: uv failed; the message names ``subject``.
    """
    # uv would read pip's own variables a second time, and differently.
    foreign = [name for name in environment if name.startswith(("PIP_", "UV_"))]
    clean = {name: value for name, value in environment.items() if name not in foreign}
    # Only metadata of wheels are read: uv needs no interpreter of that version,
    # and would look for one on the network.
    clean["UV_PYTHON_DOWNLOADS"] = "never"
    argv = (_find_uv(), "--directory", str(folder), *arguments)
    result = run(argv, timeout=SECONDS, environment=clean)
    if result.status != 0:
        reason = result.words
        if result.timed_out:
            reason = f"no answer within {SECONDS:.0f} s"
        raise LockError(f"{subject} cannot be resolved:\n{reason}")
    return result.output.decode()


def _find_uv() -> str:
    """Return the path of the uv that was installed with the builder, not that of PATH.

    Raises ``LockError``.
    """
    try:
        return find_uv()
    except FileNotFoundError as error:
        raise LockError(
            "uv is not installed", hint="`make setup` installs what the builder needs"
        ) from error


@cache
def uv_platform(machine: str, glibc: str) -> str:
    """Return uv's name of a platform: ``x86_64-manylinux_2_36``.

    The level is the newest one of uv that is not newer than ``glibc``. uv has some levels only,
    and none that is newer than uv itself; wheels of a level in between are not used.

    Args:
        machine: As of ``uname -m``.
        glibc: The C library's version, such as ``2.41``.

    Raises:
        LockError: uv does not support the machine, or only newer libraries.
    """
    help_command = (_find_uv(), "pip", "compile", "--help")
    help_text = run(help_command, timeout=SECONDS, environment={}).output.decode()
    numbers = re.findall(rf"\b{re.escape(machine)}-manylinux_2_(\d+)\b", help_text)
    levels = {int(number) for number in numbers}
    newest = tuple(map(int, glibc.split(".")[:2]))
    fitting = [level for level in levels if (2, level) <= newest]
    if not fitting:
        names = ", ".join(f"2.{level}" for level in sorted(levels)) or "none for this machine"
        raise LockError(
            f"uv resolves nothing for {machine} with glibc {glibc}",
            hint=f"levels that it knows: {names}",
        )
    return f"{machine}-manylinux_2_{max(fitting)}"


def _choose_file(package: Mapping[str, Any], rank_by_tag: Mapping[Tag, int]) -> tuple[str, str]:
    """Return URL and hash of the file that an installer takes: the best wheel, or the source.

    Args:
        package: A package of ``pylock.toml``, with ``wheels`` and ``sdist``.
        rank_by_tag: The tags that the platform can load; the best has rank 0.
    """
    # Rank, file, URL and hash: of two wheels with the same rank, the name decides.
    ranked: list[tuple[int, str, str, str]] = []
    for wheel in package.get("wheels", ()):
        file = unquote(wheel["url"]).rsplit("/", 1)[-1]
        try:
            _, _, _, tags = parse_wheel_filename(file)
        except InvalidWheelFilename:
            continue
        ranks = [rank_by_tag[tag] for tag in tags if tag in rank_by_tag]
        if ranks:
            ranked.append((min(ranks), file, wheel["url"], wheel["hashes"]["sha256"]))
    if ranked:
        _, _, url, sha256 = min(ranked)
        return url, sha256
    source = package.get("sdist")
    if source is None:
        raise LockError(
            f"{package['name']} {package['version']} has no file for this Python and C library"
        )
    return source["url"], source["hashes"]["sha256"]


def write_python_lock(
    row: TargetRow, facts: Facts, packages: Sequence[LockedPackage], root: Path
) -> Path:
    """Write the lock of a target's Python files into ``images/lock`` below ``root``.

    Raises ``OutputError``.
    """
    path = lockfile.lock_path(root, facts.name_of(row))
    lockfile.write(path, lockfile.as_toml(LockedPackage, packages))
    return path
