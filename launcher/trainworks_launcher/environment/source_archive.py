"""Judges an archive of code before any of it is written: what it holds, and
whether all of it stays in its directory.

Accepted are regular files, directories, hard links to files of the archive, and symbolic links that
stay inside; links are resolved as the kernel would, over what will be there in the end.
``programs/unpack.py`` writes what passed.
"""

from __future__ import annotations

import os
import tarfile
from contextlib import suppress
from typing import NamedTuple

_PATH_LIMIT = (
    1_000  # bytes of a member's path: with the directory before it, far below the kernel's 4,096
)
_NAME_LIMIT = 255  # bytes of one name, NAME_MAX
_LINKS_LIMIT = 40  # links on one way, as the kernel counts them, path_resolution(7)


class Contents(NamedTuple):
    """A judged archive: its directories, regular files, symbolic links (with their targets) and
    hard links (with the file they stand for), by path; of a path that is there twice the last.
    """

    directories: frozenset[tuple[str, ...]]
    files: dict[tuple[str, ...], tarfile.TarInfo]
    links: dict[tuple[str, ...], str]
    hard_links: dict[tuple[str, ...], tuple[str, ...]]


def members_of(opened: tarfile.TarFile) -> list[tarfile.TarInfo]:
    """Return all members of an archive that is whole: it is read to its end,
    where its checksum is.
    """
    members = opened.getmembers()
    while opened.fileobj.read(1 << 20):
        pass
    return members


def judge(members: list[tarfile.TarInfo], directory: str) -> Contents:
    """Judge all members of an archive that is to be unpacked into a directory,
    which need not exist.

    Raises ValueError that names the first member that may not be unpacked, and why.
    """
    directories: set[tuple[str, ...]] = set()
    files: dict[tuple[str, ...], tarfile.TarInfo] = {}
    links: dict[tuple[str, ...], str] = {}
    linked: dict[tuple[str, ...], str] = {}
    kinds: dict[tuple[str, ...], str] = {}
    for member in members:
        path = _path(member, member.name)
        kind = _kind(member)
        if not path and kind == "directory":
            continue
        if not path or kinds.setdefault(path, kind) != kind:
            raise _refused(member, "it is in the archive twice, as different things")
        if kind == "directory":
            directories.add(path)
        elif kind == "file":
            files[path] = member
        elif kind == "link":
            links[path] = member.linkname
        else:
            linked[path] = member.linkname
    for path in list(kinds):
        for length in range(1, len(path)):
            if kinds.setdefault(path[:length], "directory") != "directory":
                raise ValueError(f"member {'/'.join(path)!r}: it is below a file or a link")
            directories.add(path[:length])
    for path, kind in kinds.items():
        _check_place(path, kind, directory)
    for path, target in links.items():
        if _leads_out(path[:-1], target, links, kinds, directory):
            raise ValueError(f"member {'/'.join(path)!r}: it links out of the directory")
    hard_links = {path: _file_of(path, linked, files) for path in linked}
    return Contents(frozenset(directories), files, links, hard_links)


def _refused(member: tarfile.TarInfo, reason: str) -> ValueError:
    return ValueError(f"member {member.name!r}: {reason}")


def _path(member: tarfile.TarInfo, name: str) -> tuple[str, ...]:
    """Return a path of the archive in parts; () for the archive's root."""
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if name.startswith("/") or ".." in parts:
        raise _refused(member, "its path leaves the directory")
    if len(os.fsencode(name)) > _PATH_LIMIT or any(
        len(os.fsencode(part)) > _NAME_LIMIT for part in parts
    ):
        raise _refused(member, "its path is too long")
    return parts


def _kind(member: tarfile.TarInfo) -> str:
    if member.isdir():
        return "directory"
    if member.isreg():
        return "file"
    if member.issym():
        return "link"
    if member.islnk():
        return "hard link"
    raise _refused(member, "it is a device or a pipe")


def _check_place(path: tuple[str, ...], kind: str, directory: str) -> None:
    """Refuse a member that cannot take the place of what is in the directory already."""
    place = os.path.join(directory, *path)  # noqa: PTH118
    here = "link" if os.path.islink(place) else "directory" if os.path.isdir(place) else "file"  # noqa: PTH112, PTH114
    if os.path.lexists(place) and (kind == "directory") != (here == "directory"):
        raise ValueError(
            f"member {'/'.join(path)!r}: there is a {here} in its place, and it is a {kind}"
        )


def _leads_out(
    start: tuple[str, ...],
    target: str,
    links: dict[tuple[str, ...], str],
    kinds: dict[tuple[str, ...], str],
    directory: str,
) -> bool:
    """Return whether a link's target leaves the root, seen from the directory
    ``start`` once all is unpacked.
    """
    if not target or target.startswith("/") or len(os.fsencode(target)) > _PATH_LIMIT:
        return True
    way = list(start)
    ahead = target.split("/")[::-1]
    followed = 0
    while ahead:
        part = ahead.pop()
        if part in ("", "."):
            continue
        if part == "..":
            if not way:
                return True
            way.pop()
            continue
        way.append(part)
        path = tuple(way)
        found = links.get(path, "")
        if path not in kinds:
            with suppress(OSError, ValueError):  # not there, or no link
                found = os.readlink(os.path.join(directory, *path))  # noqa: PTH118
        if found:
            followed += 1
            if followed > _LINKS_LIMIT or found.startswith("/"):
                return True
            way.pop()
            ahead += found.split("/")[::-1]
    return False


def _file_of(
    path: tuple[str, ...],
    linked: dict[tuple[str, ...], str],
    files: dict[tuple[str, ...], tarfile.TarInfo],
) -> tuple[str, ...]:
    """Return the regular file of the archive that a hard link stands for."""
    seen = {path}
    target = path
    while target in linked:
        name = linked[target]
        target = tuple(part for part in name.split("/") if part not in ("", "."))
        if target in seen:
            break
        seen.add(target)
    if target not in files:
        raise ValueError(
            f"member {'/'.join(path)!r}:"
            " it is a hard link to something that is not a file of the archive"
        )
    return target
