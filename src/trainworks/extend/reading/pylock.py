"""``pylock.toml`` (PEP 751): what of it a base image gets. Pure."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from packaging.pylock import (
    Package,
    PackageArchive,
    PackageDirectory,
    PackageSdist,
    PackageVcs,
    PackageWheel,
    Pylock,
    PylockSelectError,
)

from trainworks.extend.reading.selection import Chosen, add_index, check_names


def select_pylock(lock: Pylock, chosen: Chosen) -> None:
    """Choose from a lock what markers and files allow in the base."""
    base = chosen.base
    chosen.check_python(lock.requires_python)
    check_names(chosen, "extra", chosen.lock.extras, lock.extras or ())
    check_names(chosen, "group", chosen.lock.groups, lock.dependency_groups or ())
    if chosen.problems:
        return
    environment: Any = base.markers
    groups = (*(lock.default_groups or ()), *chosen.lock.groups)
    tags = base.tags
    seen: set[str] = set()
    for package in lock.packages:
        # One by one: a lock's every problem is said, and what is kept needs no file that fits.
        kept = package.name in chosen.kept.versions
        version = str(package.version or "")
        alone = replace(lock, packages=[_without_files(package) if kept else package], requires_python=None)
        try:
            found = list(
                alone.select(environment=environment, tags=tags, extras=chosen.lock.extras, dependency_groups=groups)
            )
        except PylockSelectError as error:
            chosen.problems.append(f"{chosen.place(package.name, version)}: {_plain(str(error))}")
            continue
        for _, file in found:
            if package.name in seen:
                chosen.problems.append(f"{chosen.place(package.name)}: two versions are for this base")
            seen.add(package.name)
            if kept:
                chosen.leave(package.name, version)
            else:
                _add_package(package, file, version, chosen)


def _without_files(package: Package) -> Package:
    """Return a package that any platform can take: what is compared needs no file."""
    return replace(
        package, wheels=None, sdist=None, vcs=None, archive=None, directory=PackageDirectory(path="."), version=None
    )


def _plain(text: str) -> str:
    return text.replace(" at packages[0]", "")


def _add_package(
    package: Package,
    file: PackageVcs | PackageDirectory | PackageArchive | PackageWheel | PackageSdist,
    version: str,
    chosen: Chosen,
) -> None:
    name = package.name
    match file:
        case PackageVcs():
            if file.type != "git":
                chosen.problems.append(f"{chosen.place(name)}: repositories of {file.type} are not read")
            else:
                chosen.add_git(name, file.url or file.path or "", file.commit_id, file.subdirectory or "")
        case PackageDirectory():
            chosen.add_folder(name, posixpath.join(file.path, file.subdirectory or ""))
        case PackageArchive():
            chosen.add_wheel(name, version, file.url or file.path or "", _sha256(file.hashes))
        case _:
            files = [*(package.wheels or ()), *((package.sdist,) if package.sdist else ())]
            for each in files:
                if each.path and not each.url:
                    add_index(posixpath.dirname(each.path), chosen)
            hashes = [digest for each in files for digest in _sha256(each.hashes)]
            # Which libraries of a framework's build something else needs is not in this format: they are limits.
            needed = not chosen.kept.has(name)
            if not needed:
                chosen.left.append(name)
            chosen.add_pin(name, version, hashes, needed=needed)
            if package.index:
                add_index(package.index, chosen)


def _sha256(hashes: Mapping[str, str]) -> list[str]:
    return [digest for name, digest in hashes.items() if name == "sha256"]
