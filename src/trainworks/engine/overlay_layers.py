"""Layers as an engine keeps them on this machine, an overlay file system's
folders, read without asking the engine.

An engine that streams a layer of gigabytes packs every byte of it; the search
for keys reads the small files only.
"""

from __future__ import annotations

import io
import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_OPAQUE = "trusted.overlay.opaque"
_WHITEOUT = ".wh."

ATTRIBUTE = "SCHILY.xattr."
"""What an archive's PAX header puts before the name of an extended attribute."""

_OF_THE_IMAGE = ("security.capability", "system.posix_acl_", "user.")
"""The extended attributes that belong to a file.

Others are this machine's (``security.selinux``, ``trusted.*``).
"""

_OF_THE_MACHINE = "user.overlay."
"""Attributes of an overlay file system that a user without root's rights has mounted."""


class LayerFolder:
    """One layer's folder, with the members that the layer's archive has:
    whiteouts by their names in an archive.
    """

    def __init__(self, folder: Path) -> None:
        """Store the folder, the ``diff`` of an overlay file system."""
        self._folder = folder

    def __iter__(self) -> Iterator[tarfile.TarInfo]:
        """Yield every member, folders before their content.

        Raises ``OSError`` if one cannot be read.
        """
        pending = [self._folder]
        while pending:
            folder = pending.pop()
            for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
                status = entry.stat(follow_symlinks=False)
                path = Path(entry.path)
                name = path.relative_to(self._folder).as_posix()
                if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
                    # The file system's mark for a deleted entry of a lower layer.
                    yield tarfile.TarInfo(str(Path(name).with_name(f"{_WHITEOUT}{entry.name}")))
                    continue
                member = _member(name, path, status)
                yield member
                if member.isdir():
                    pending.append(path)
                    if _is_opaque(path):
                        yield tarfile.TarInfo(f"{name}/.wh..wh..opq")

    def extractfile(self, member: tarfile.TarInfo) -> IO[bytes] | None:
        """Open a plain file, which the caller closes; a whiteout is empty."""
        if not member.isreg():
            return None
        path = self._folder / member.name
        return io.BytesIO() if path.name.startswith(_WHITEOUT) else path.open("rb")


def _member(name: str, path: Path, status: os.stat_result) -> tarfile.TarInfo:
    """Return a file of a folder as an archive has it: every fact that
    ``engine.entries`` compares.
    """
    member = tarfile.TarInfo(name)
    member.type = _kind(status.st_mode)
    member.mode = stat.S_IMODE(status.st_mode)
    member.uid = status.st_uid
    member.gid = status.st_gid
    # The engines' archives have whole seconds.
    member.mtime = int(status.st_mtime)
    member.pax_headers = dict(_attributes(path))
    if member.issym():
        member.linkname = str(path.readlink())
    if member.isreg():
        member.size = status.st_size
    if member.ischr() or member.isblk():
        member.devmajor = os.major(status.st_rdev)
        member.devminor = os.minor(status.st_rdev)
    return member


def _kind(mode: int) -> bytes:
    """Return tarfile's type for the mode of a file; a socket is as a pipe."""
    kinds = {
        stat.S_IFDIR: tarfile.DIRTYPE,
        stat.S_IFLNK: tarfile.SYMTYPE,
        stat.S_IFREG: tarfile.REGTYPE,
        stat.S_IFCHR: tarfile.CHRTYPE,
        stat.S_IFBLK: tarfile.BLKTYPE,
    }
    return kinds.get(stat.S_IFMT(mode), tarfile.FIFOTYPE)


def _attributes(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the extended attributes of a file that belong to the image, as an archive has them."""
    try:
        names = os.listxattr(path, follow_symlinks=False)
    except OSError:
        # A file system without extended attributes has none.
        return
    for name in names:
        if name.startswith(_OF_THE_IMAGE) and not name.startswith(_OF_THE_MACHINE):
            value = os.getxattr(path, name, follow_symlinks=False)
            # PAX values are text to tarfile; surrogate escapes carry the bytes through.
            yield ATTRIBUTE + name, value.decode("utf-8", "surrogateescape")


def _is_opaque(folder: Path) -> bool:
    """Return whether a layer's folder hides everything that lower layers have in it."""
    try:
        return os.getxattr(folder, _OPAQUE, follow_symlinks=False) == b"y"
    except OSError:
        return False


def readable(folders: list[Path]) -> bool:
    """Return whether this user can read all of an engine's folders; ``False`` for none.

    The folders belong to root.
    """
    return bool(folders) and all(
        os.access(folder, os.R_OK | os.X_OK) and folder.is_dir() for folder in folders
    )
