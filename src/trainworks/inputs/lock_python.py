"""``build.py lock``: resolves the Python files of targets into ``images/lock``,
one file each, pinned by hash.
"""

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
from trainworks.host.uv import uv_program
from trainworks.inputs.sizes import file_sizes
from trainworks.plan.locks import own_wheels, requirements_of
from trainworks.plan.target import context_of
from trainworks.plan.wheel_tags import wheel_tags

SECONDS = 600.0
"""How long one resolution may take."""

ANNOTATION = re.compile(r"^(?P<name>[a-z0-9._-]+)==\S+.*?# via (?P<via>.+)$")


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
        upgrade: Whether everything gets its newest version; default: what is
            locked stays as far as the rows allow it.

    Raises:
        LockError: When no set of versions fits, or the index does not answer; with uv's own words.
    """
    target = context_of(row, facts)
    platform = _Platform(
        machine=MACHINES[target.base.architecture], glibc=target.base.glibc, python=target.python
    )
    packages: list[LockedPackage] = []
    for build in (False, True):
        wanted = [
            str(requirement)
            for requirement in requirements_of(target, facts)
            if requirement.build == build
        ]
        wheels = () if build else own_wheels(target, facts)
        kept = () if upgrade else tuple(each for each in target.lock or () if each.build == build)
        packages += _resolve(
            wanted, wheels, kept, platform, row, settings, environment, build=build
        )
    return tuple(packages)


def without_versions(row: TargetRow, facts: Facts) -> tuple[TargetRow, Facts]:
    """Return a row and facts that ask for no version: what is resolved for them
    is the newest that goes together.

    A version with a build of its own (behind its ``+``) stays: without it
    another build would be the newest.
    """
    # A distribution with a CUDA version in its name would hold the framework back to that version.
    components = tuple(
        replace(each, python=tuple(name for name in each.python if "{" not in name))
        for each in facts.components
    )
    stacks = tuple(
        replace(stack, components=dict.fromkeys(stack.components, "")) for stack in facts.stacks
    )
    versions = {name: version if "+" in version else "" for name, version in row.versions.items()}
    return replace(row, versions=versions), replace(facts, stacks=stacks, components=components)


def moves(before: Sequence[LockedPackage], after: Sequence[LockedPackage]) -> list[str]:
    """Return how one lock differs from another, a line for each package: ``NAME OLD -> NEW``."""
    old, new = (
        {(each.name, each.build): each for each in packages} for packages in (before, after)
    )
    lines = []
    for key in sorted(old.keys() | new.keys()):
        name = f"{key[0]} (to build)" if key[1] else key[0]
        one, other = old.get(key), new.get(key)
        if one is None or other is None:
            lines.append(
                f"{name} {other.version} is new" if other else f"{name} {old[key].version} goes"
            )
        elif one.version != other.version:
            lines.append(f"{name} {one.version} -> {other.version}")
        elif one.sha256 != other.sha256:
            lines.append(f"{name} {one.version}: another file, {other.file}")
    return lines


@dataclass(frozen=True, kw_only=True)
class _Platform:
    """What wheels are chosen for: processor, the newest level of the C library,
    and Python's ``MAJOR.MINOR``.
    """

    machine: str
    glibc: str
    python: str


def _resolve(
    requirements: Sequence[str],
    wheels: Sequence[Artifact],
    kept: Sequence[LockedPackage],
    platform: _Platform,
    row: TargetRow,
    settings: HostSettings,
    environment: Mapping[str, str],
    *,
    build: bool,
) -> list[LockedPackage]:
    tags = {
        tag: rank
        for rank, tag in enumerate(
            wheel_tags(python=platform.python, machine=platform.machine, glibc=platform.glibc)
        )
    }
    with private_folder() as folder:
        (folder / "requirements.in").write_text("\n".join(requirements) + "\n", encoding="utf-8")
        limits = () if build else row.limits
        (folder / "constraints.in").write_text(
            "".join(f"{limit}\n" for limit in limits), encoding="utf-8"
        )
        local = [str(path) for path in settings.pip.local_folders]
        configuration = uv_configuration(settings.pip, vendor_index=row.wheel_index, folders=local)
        metadata = "".join(map(_metadata, wheels))
        (folder / "uv.toml").write_text(configuration + metadata, encoding="utf-8")
        arguments = (
            *("pip", "compile", "requirements.in", "--quiet", "--no-header"),
            *("--python-version", platform.python),
            *("--python-platform", uv_platform(platform.machine, platform.glibc)),
            *("--config-file", "uv.toml", "--constraints", "constraints.in"),
        )
        lock_path, edges_path = folder / "pylock.toml", folder / "edges.txt"
        what = f"{row.framework} {row.version} {row.cuda} on {row.base}"
        # uv keeps the versions that it finds in the file that it is to write.
        names = ", ".join(
            f'{{ name = "{each.name}", version = "{each.version}" }}' for each in kept
        )
        lock_path.write_text(
            f'lock-version = "1.0"\ncreated-by = "trainworks"\npackages = [{names}]\n',
            encoding="utf-8",
        )
        run_uv(
            (*arguments, "--format", "pylock.toml", "--output-file", lock_path.name),
            folder,
            what,
            environment,
        )
        content = tomllib.loads(lock_path.read_text(encoding="utf-8"))
        pins = (
            f"{package['name']}=={package['version']}\n" for package in content.get("packages", ())
        )
        edges_path.write_text("".join(pins), encoding="utf-8")
        run_uv(
            (*arguments, "--annotation-style", "line", "--output-file", edges_path.name),
            folder,
            what,
            environment,
        )
        edges = edges_path.read_text(encoding="utf-8")
    requires: dict[str, list[str]] = {}
    for line in edges.splitlines():
        match = ANNOTATION.match(line)
        if match:
            for parent in match["via"].split(", "):
                requires.setdefault(canonicalize_name(parent), []).append(
                    canonicalize_name(match["name"])
                )
    found, urls = [], []
    for package in content.get("packages", ()):
        name = canonicalize_name(package["name"])
        url, sha256 = _best_file(package, tags)
        urls.append(url)
        found.append(
            LockedPackage(
                name=name,
                version=package["version"],
                file=unquote(url).rsplit("/", 1)[-1],
                sha256=sha256,
                requires=tuple(sorted(requires.get(name, ()))),
                build=build,
            )
        )
    sizes = file_sizes(urls, settings)
    return [
        replace(package, size=sizes.get(url, 0)) for package, url in zip(found, urls, strict=True)
    ]


def _metadata(wheel: Artifact) -> str:
    """Return what uv has to know of a wheel that requires something else than
    the index's file of the same version.
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
    arguments: Sequence[str], folder: Path, what: str, environment: Mapping[str, str]
) -> str:
    """Run uv in a folder and return what it prints.

    Raises ``LockError`` that says ``what`` cannot be resolved.
    """
    # pip's own variables would be read a second time, and differently, by uv.
    clean = {
        name: value for name, value in environment.items() if not name.startswith(("PIP_", "UV_"))
    }
    # Only metadata of wheels are read: uv needs no interpreter of that version,
    # and would look for one on the network.
    clean["UV_PYTHON_DOWNLOADS"] = "never"
    done = run((_uv(), "--directory", str(folder), *arguments), timeout=SECONDS, environment=clean)
    if done.status != 0:
        said = f"no answer within {SECONDS:.0f} s" if done.timed_out else done.words
        raise LockError(f"{what} cannot be resolved:\n{said}")
    return done.output.decode()


def _uv() -> str:
    """Return the uv that was installed with the builder, whatever PATH has.

    Raises ``LockError``.
    """
    try:
        return uv_program()
    except FileNotFoundError as error:
        raise LockError(
            "uv is not installed", hint="`make setup` installs what the builder needs"
        ) from error


@cache
def uv_platform(machine: str, glibc: str) -> str:
    """Return uv's name of a platform: of the newest C library that it knows and
    that is not newer than ``glibc``.

    uv knows some levels only, and none that is newer than itself; wheels of a
    level in between are passed by.

    Args:
        machine: As of ``uname -m``.
        glibc: The C library's version, such as ``2.41``.

    Raises:
        LockError: uv knows no such machine, or only newer libraries.
    """
    help_text = run(
        (_uv(), "pip", "compile", "--help"), timeout=SECONDS, environment={}
    ).output.decode()
    known = {
        int(level)
        for level in re.findall(rf"\b{re.escape(machine)}-manylinux_2_(\d+)\b", help_text)
    }
    fitting = [level for level in known if (2, level) <= tuple(map(int, glibc.split(".")[:2]))]
    if not fitting:
        names = ", ".join(f"2.{level}" for level in sorted(known)) or "none for this machine"
        raise LockError(
            f"uv resolves nothing for {machine} with glibc {glibc}",
            hint=f"levels that it knows: {names}",
        )
    return f"{machine}-manylinux_2_{max(fitting)}"


def _best_file(package: Mapping[str, Any], tags: Mapping[Tag, int]) -> tuple[str, str]:
    """Return URL and hash of the file that an installer on the base would take:
    the best wheel, else the source.
    """
    ranked: list[tuple[int, str, str, str]] = []
    for wheel in package.get("wheels", ()):
        file = unquote(wheel["url"]).rsplit("/", 1)[-1]
        try:
            ranks = [tags[tag] for tag in parse_wheel_filename(file)[3] if tag in tags]
        except InvalidWheelFilename:
            continue
        ranked += [(min(ranks), file, wheel["url"], wheel["hashes"]["sha256"])] if ranks else []
    if ranked:
        return min(ranked)[2:]
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
