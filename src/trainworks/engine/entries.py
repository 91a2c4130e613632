"""Entries of a layer: the same facts from an engine's folders and from an archive, to compare."""

from __future__ import annotations

import posixpath
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import Final

from trainworks.engine.overlay_layers import ATTRIBUTE

WHITEOUT: Final = ".wh."
"""Before the name of a file that a layer removes: ``.wh.NAME``."""

OPAQUE: Final = ".wh..wh..opq"
"""The name of an empty file: its folder has nothing of the layers below."""

_KINDS: Final = {
    tarfile.DIRTYPE: "folder",
    tarfile.SYMTYPE: "link",
    tarfile.CHRTYPE: "character device",
    tarfile.BLKTYPE: "block device",
    tarfile.FIFOTYPE: "pipe",
}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A path of a layer.

    Every field is compared, so every reader of layers has to fill every field.

    Attributes:
        type: ``file``, ``folder``, ``link``, ``pipe``, ``character device`` or ``block device``.
        mode: The bits of its mode; 0 for a link, whose mode means nothing.
        owner: The number of its user.
        group: The number of its group.
        size: Bytes of a file; 0 for everything else.
        target: Where a link leads, as it is written in it; of a device its two numbers.
        time: When its content was changed, in whole seconds since 1970:
            archives of engines have no more.
        attributes: Its extended attributes that belong to the image: name to
            value, surrogate escapes for bytes.
    """

    type: str
    mode: int
    owner: int
    group: int
    size: int
    target: str
    time: int
    attributes: Mapping[str, str] = field(default_factory=dict)

    def words(self) -> dict[str, str]:
        """Return each fact as text for a person, by its name; a missing fact is ``none``.

        For example ``{"type": "file", "mode": "0644", "size": "12 B", "target": "none", ...}``.
        """
        mode = "none"
        if self.type != "link":
            mode = f"{self.mode:04o}"
        size = "none"
        if self.type == "file":
            size = f"{self.size} B"
        return {
            "type": self.type,
            "mode": mode,
            "owner": str(self.owner),
            "group": str(self.group),
            "size": size,
            "target": self.target or "none",
            "time": datetime.fromtimestamp(self.time, UTC).isoformat(timespec="seconds"),
            "attributes": ", ".join(sorted(self.attributes)) or "none",
        }

    def differences(self, before: Entry) -> list[str]:
        """Return the names of the facts that differ from those before: ``["mode", "time"]``."""
        names = [fact.name for fact in fields(self)]
        return [name for name in names if getattr(self, name) != getattr(before, name)]


def path_of(member: tarfile.TarInfo) -> str:
    """Return the path of a member of a layer, absolute: ``/usr/bin`` for ``./usr/bin/``."""
    path = posixpath.normpath(f"/{member.name}")
    # POSIX gives two slashes at the beginning a meaning of their own, so they stay.
    return path.removeprefix("/") if path.startswith("//") else path


def entries_of(members: Iterable[tarfile.TarInfo]) -> dict[str, Entry]:
    """Return the entry of each path of a layer, by path; whiteouts by their names in an archive.

    A hard link is another name of a file of its layer: the link has the facts of that file, as a
    folder shows them.
    """
    entry_by_path: dict[str, Entry] = {}
    for member in members:
        entry = None
        if member.islnk():
            entry = entry_by_path.get(path_of_target(member))
        if entry is None:
            entry = _entry(member)
        entry_by_path[path_of(member)] = entry
    return entry_by_path


def path_of_target(member: tarfile.TarInfo) -> str:
    """Return the absolute path of the file of which a hard link is another name."""
    return posixpath.normpath(f"/{member.linkname}")


def _entry(member: tarfile.TarInfo) -> Entry:
    """Return the facts of a member of a layer that is not a hard link."""
    target = ""
    if member.issym():
        target = member.linkname
    if member.ischr() or member.isblk():
        target = f"{member.devmajor}, {member.devminor}"
    attributes = {}
    for name, value in member.pax_headers.items():
        if name.startswith(ATTRIBUTE):
            attributes[name.removeprefix(ATTRIBUTE)] = value
    mode = 0
    if not member.issym():
        mode = member.mode & 0o7777
    return Entry(
        type=_KINDS.get(member.type, "file"),
        mode=mode,
        owner=member.uid,
        group=member.gid,
        size=member.size if member.isreg() else 0,
        target=target,
        time=int(member.mtime),
        attributes=attributes,
    )
