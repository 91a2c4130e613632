"""Checks an archive of code before it is unpacked: every member must stay in the directory.

Accepted are regular files, directories, hard links to files of the archive, and symbolic links that
stay inside. A link is resolved as the kernel would resolve it after unpacking, over the files of
the archive and of the directory. ``programs/unpack.py`` unpacks an accepted archive.
"""

from __future__ import annotations

import os
import tarfile
from contextlib import suppress
from typing import NamedTuple

_PATH_LIMIT = 1_000
"""Bytes of a member's path. With the directory before it, it is far below the kernel's 4,096."""

_NAME_LIMIT = 255
"""Bytes of one name in a path: NAME_MAX."""

_LINKS_LIMIT = 40
"""Symbolic links that the kernel follows to resolve one path: path_resolution(7)."""


class Contents(NamedTuple):
    """The members of an accepted archive. Of two members with one path the last one counts.

    A path is a tuple: ``("package", "train.py")``.

    Attributes:
        directories: Paths of the directories.
        files: Path -> regular file.
        links: Path -> target of a symbolic link, for example ``../data``.
        hard_links: Path of a hard link -> path of its regular file.
    """

    directories: frozenset[tuple[str, ...]]
    files: dict[tuple[str, ...], tarfile.TarInfo]
    links: dict[tuple[str, ...], str]
    hard_links: dict[tuple[str, ...], tuple[str, ...]]


def members_of(opened: tarfile.TarFile) -> list[tarfile.TarInfo]:
    """Return all members of an archive.

    The archive is read to its end, where its checksum is: an incomplete one raises an error.
    """
    members = opened.getmembers()
    while opened.fileobj.read(1 << 20):
        pass
    return members


def judge(members: list[tarfile.TarInfo], directory: str) -> Contents:
    """Check all members of an archive.

    Args:
        members: The members, from ``members_of``.
        directory: The directory in which the archive will be unpacked; it need not exist.

    Raises:
        ValueError: A member may not be unpacked. The text names the member and the reason.
    """
    directories: set[tuple[str, ...]] = set()
    files: dict[tuple[str, ...], tarfile.TarInfo] = {}
    links: dict[tuple[str, ...], str] = {}
    hard_targets: dict[tuple[str, ...], str] = {}
    kinds: dict[tuple[str, ...], str] = {}  # path -> as ``_kind`` returns it
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
            hard_targets[path] = member.linkname
    # An archive may leave out the directories above its members.
    for path in list(kinds):
        for length in range(1, len(path)):
            parent = path[:length]
            if kinds.setdefault(parent, "directory") != "directory":
                raise ValueError(f"member {'/'.join(path)!r}: it is below a file or a link")
            directories.add(parent)
    for path, kind in kinds.items():
        _check_place(path, kind, directory)
    for path, target in links.items():
        if _leads_out(path[:-1], target, links, kinds, directory):
            raise ValueError(f"member {'/'.join(path)!r}: it links out of the directory")
    hard_links = {path: _find_file(path, hard_targets, files) for path in hard_targets}
    return Contents(frozenset(directories), files, links, hard_links)


def _refused(member: tarfile.TarInfo, reason: str) -> ValueError:
    return ValueError(f"member {member.name!r}: {reason}")


def _path(member: tarfile.TarInfo, name: str) -> tuple[str, ...]:
    """Return a member's path: ``("package", "train.py")``; () for the archive's root.

    Raises ValueError for a path that leaves the directory or is too long. member: for the message.
    """
    parts = _split(name)
    if name.startswith("/") or ".." in parts:
        raise _refused(member, "its path leaves the directory")
    longest = max((len(os.fsencode(part)) for part in parts), default=0)
    if len(os.fsencode(name)) > _PATH_LIMIT or longest > _NAME_LIMIT:
        raise _refused(member, "its path is too long")
    return parts


def _split(name: str) -> tuple[str, ...]:
    """Return the parts of a path, without empty ones and ``.``."""
    return tuple(part for part in name.split("/") if part not in ("", "."))


def _kind(member: tarfile.TarInfo) -> str:
    """Return ``directory``, ``file``, ``link`` (a symbolic one) or ``hard link``.

    Raises ValueError for any other member.
    """
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
    """Refuse a member that would replace a directory by a file or link, or the other way round.

    Raises ValueError. A member without a file in its place is accepted.

    Args:
        path: Path of the member.
        kind: Kind of the member, as ``_kind`` returns it.
        directory: The directory, with the files that exist.
    """
    place = os.path.join(directory, *path)  # noqa: PTH118
    if not os.path.lexists(place):
        return
    existing = "file"
    if os.path.islink(place):  # noqa: PTH114
        existing = "link"
    elif os.path.isdir(place):  # noqa: PTH112
        existing = "directory"
    if (kind == "directory") != (existing == "directory"):
        raise ValueError(
            f"member {'/'.join(path)!r}: there is a {existing} in its place, and it is a {kind}"
        )


def _leads_out(
    start: tuple[str, ...],
    target: str,
    links: dict[tuple[str, ...], str],
    kinds: dict[tuple[str, ...], str],
    directory: str,
) -> bool:
    """Return whether a symbolic link leaves the directory once the archive is unpacked.

    Follow the target part by part, as the kernel does; a link on the way replaces its own part.

    Args:
        start: Path of the link's directory.
        target: Target of the link, for example ``../data/train``.
        links: Path -> target of the archive's links.
        kinds: Path -> kind of all members.
        directory: The directory, with the files that exist.
    """
    if not target or target.startswith("/") or len(os.fsencode(target)) > _PATH_LIMIT:
        return True
    resolved = list(start)
    remaining = target.split("/")[::-1]  # the next part is the last one
    followed = 0
    while remaining:
        part = remaining.pop()
        if part in ("", "."):
            continue
        if part == "..":
            if not resolved:
                return True
            resolved.pop()
            continue
        resolved.append(part)
        path = tuple(resolved)
        next_target = links.get(path, "")
        if path not in kinds:
            with suppress(OSError, ValueError):  # the path does not exist, or is no link
                next_target = os.readlink(os.path.join(directory, *path))  # noqa: PTH118
        if next_target:
            followed += 1
            if followed > _LINKS_LIMIT or next_target.startswith("/"):
                return True
            resolved.pop()
            remaining += next_target.split("/")[::-1]
    return False


def _find_file(
    path: tuple[str, ...],
    hard_targets: dict[tuple[str, ...], str],
    files: dict[tuple[str, ...], tarfile.TarInfo],
) -> tuple[str, ...]:
    """Return the path of the regular file that a hard link leads to, over other hard links.

    Args:
        path: Path of the hard link.
        hard_targets: Path -> target of all hard links of the archive.
        files: Path -> regular file of the archive.

    Raises:
        ValueError: The link does not lead to a file of the archive.
    """
    seen = {path}
    target = path
    while target in hard_targets:
        target = _split(hard_targets[target])
        if target in seen:
            break
        seen.add(target)
    if target not in files:
        raise ValueError(
            f"member {'/'.join(path)!r}:"
            " it is a hard link to something that is not a file of the archive"
        )
    return target
