"""What a layer says of each path: the same facts from an engine's folders and
from an archive, so that two compare.
"""

from __future__ import annotations

import posixpath
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import Final

from trainworks.engine.overlay_layers import ATTRIBUTE

WHITEOUT: Final = ".wh."
OPAQUE: Final = ".wh..wh..opq"

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
        """Return each fact as a person reads it, by its name.

        A fact that there is not is ``none``.
        """
        return {
            "type": self.type,
            "mode": f"{self.mode:04o}" if self.type != "link" else "none",
            "owner": str(self.owner),
            "group": str(self.group),
            "size": f"{self.size} B" if self.type == "file" else "none",
            "target": self.target or "none",
            "time": datetime.fromtimestamp(self.time, UTC).isoformat(timespec="seconds"),
            "attributes": ", ".join(sorted(self.attributes)) or "none",
        }

    def differences(self, before: Entry) -> list[str]:
        """Return the names of the facts that are other ones than before."""
        return [
            each.name
            for each in fields(self)
            if getattr(self, each.name) != getattr(before, each.name)
        ]


def path_of(member: tarfile.TarInfo) -> str:
    """Return the path of a member of a layer, absolute."""
    path = posixpath.normpath(f"/{member.name}")
    return path.removeprefix("/") if path.startswith("//") else path


def entries_of(members: Iterable[tarfile.TarInfo]) -> dict[str, Entry]:
    """Return what a layer says of each path, whiteouts by their names in an archive.

    A hard link is another name of a file of its layer: it has the facts of that
    file, as a folder shows them.
    """
    found: dict[str, Entry] = {}
    for member in members:
        original = found.get(path_of_target(member)) if member.islnk() else None
        found[path_of(member)] = original or _entry(member)
    return found


def path_of_target(member: tarfile.TarInfo) -> str:
    """Return the path of the file of which a hard link is another name."""
    return posixpath.normpath(f"/{member.linkname}")


def _entry(member: tarfile.TarInfo) -> Entry:
    target = ""
    if member.issym():
        target = member.linkname
    if member.ischr() or member.isblk():
        target = f"{member.devmajor}, {member.devminor}"
    attributes = {}
    for name, value in member.pax_headers.items():
        if name.startswith(ATTRIBUTE):
            attributes[name.removeprefix(ATTRIBUTE)] = value
    return Entry(
        type=_KINDS.get(member.type, "file"),
        mode=0 if member.issym() else member.mode & 0o7777,
        owner=member.uid,
        group=member.gid,
        size=member.size if member.isreg() else 0,
        target=target,
        time=int(member.mtime),
        attributes=attributes,
    )
