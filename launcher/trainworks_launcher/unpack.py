"""Unpacks a tar.gz of code, safely; a program of its own, so that a large archive does not stop the heartbeats.

Run as ``python3 -I unpack.py ARCHIVE DIRECTORY``. Only regular files, directories and links that stay inside are
accepted; anything else is an error that names the member, and nothing is unpacked then. Files of the archive take the
place of files of the same name: an upload wins over what the image has.
"""

from __future__ import annotations

import os
import sys
import tarfile


def inside(directory: str, path: str) -> bool:
    """Whether ``path``, with its links resolved, is the directory or below it."""
    root = os.path.realpath(directory)
    real = os.path.realpath(path)
    return real == root or real.startswith(root + os.sep)


def unsafe(member: tarfile.TarInfo, directory: str) -> str:
    """Why a member may not be unpacked; "" if it may."""
    target = os.path.join(directory, member.name)  # noqa: PTH118
    if os.path.isabs(member.name) or not inside(directory, target):  # noqa: PTH117
        return "its path leaves the directory"
    if member.issym() or member.islnk():
        start = os.path.dirname(target) if member.issym() else directory  # noqa: PTH120
        if os.path.isabs(member.linkname) or not inside(directory, os.path.join(start, member.linkname)):  # noqa: PTH117, PTH118
            return "it links out of the directory"
        return ""
    return "" if member.isfile() or member.isdir() else "it is a device or a pipe"


def unpack(archive: str, directory: str) -> None:
    """Unpack; raises ValueError for an unsafe member, OSError or tarfile.TarError for a bad archive."""
    os.makedirs(directory, exist_ok=True)  # noqa: PTH103
    with tarfile.open(archive, "r:*") as opened:
        members = opened.getmembers()
        for member in members:
            reason = unsafe(member, directory)
            if reason:
                raise ValueError(f"member {member.name!r}: {reason}")
        for member in members:
            # Again just before writing: a link unpacked a moment ago may have changed where this path leads.
            reason = unsafe(member, directory)
            if reason:
                raise ValueError(f"member {member.name!r}: {reason}")
            target = os.path.join(directory, member.name)  # noqa: PTH118
            if not member.isdir() and os.path.lexists(target):
                os.unlink(target)  # noqa: PTH108
            member.uid, member.gid = os.getuid(), os.getgid()
            member.mode = (member.mode & 0o755) | 0o600
            if hasattr(
                tarfile, "fully_trusted_filter"
            ):  # the members were checked above, by rules older than the filter
                opened.extract(member, directory, filter="fully_trusted")
            else:
                opened.extract(member, directory)


def main(arguments: list[str]) -> int:
    """Unpack; 0, or 1 with one line on standard error."""
    archive, directory = arguments
    try:
        unpack(archive, directory)
    except (ValueError, OSError, tarfile.TarError, EOFError) as error:
        sys.stderr.write(f"trainworks: cannot unpack {archive}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
