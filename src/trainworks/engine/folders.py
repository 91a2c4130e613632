"""Layers as an engine keeps them on this machine, an overlay file system's folders, read without asking the engine.

An engine that streams a layer of gigabytes packs every byte of it; the search for keys reads the small files only.
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


class LayerFolder:
    """One layer's folder, with the members that the layer's archive has: whiteouts by their names in an archive."""

    def __init__(self, folder: Path) -> None:
        """Store the folder, the ``diff`` of an overlay file system."""
        self._folder = folder

    def __iter__(self) -> Iterator[tarfile.TarInfo]:
        """Yield every member, folders before their content; raises ``OSError`` if one cannot be read."""
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
                member = tarfile.TarInfo(name)
                member.mode = stat.S_IMODE(status.st_mode)
                member.type = _kind(status.st_mode)
                member.uid = status.st_uid
                if member.issym():
                    member.linkname = str(path.readlink())
                if member.isreg():
                    member.size = status.st_size
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


def _kind(mode: int) -> bytes:
    if stat.S_ISDIR(mode):
        return tarfile.DIRTYPE
    if stat.S_ISLNK(mode):
        return tarfile.SYMTYPE
    return tarfile.REGTYPE if stat.S_ISREG(mode) else tarfile.FIFOTYPE


def _is_opaque(folder: Path) -> bool:
    try:
        return os.getxattr(folder, _OPAQUE, follow_symlinks=False) == b"y"
    except OSError:
        return False


def readable(folders: list[Path]) -> bool:
    """Whether this user can read all of these folders, which belong to root."""
    return bool(folders) and all(os.access(folder, os.R_OK | os.X_OK) and folder.is_dir() for folder in folders)
