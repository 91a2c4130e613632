"""Unpack an archive of code safely.

A program of its own, so that a large archive does not stop the heartbeats.

Run as ``python3 -I unpack.py ARCHIVE DIRECTORY``; a relative ARCHIVE is in the host's runtime
directory. Files of the archive replace files of the same name: an upload wins over the image.

There are two defences. All members are checked before the first write
(``environment.source_archive``): after one bad member no file is unpacked. And no write follows a
link: every directory on the way is opened by itself.
"""

from __future__ import annotations

import os
import shutil
import sys
import tarfile
from contextlib import suppress

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))  # noqa: PTH100, PTH120

from trainworks_launcher.contract import names
from trainworks_launcher.environment.source_archive import judge, members_of

_CHUNK_BYTES = 1 << 20


class _Tree:
    """Writes below one directory, and never follows a link in it.

    The last directory stays open, because archives list the files of a directory together.
    """

    def __init__(self, directory: str) -> None:
        """Make the directory if it is missing, and open it. Raises OSError."""
        os.makedirs(directory, exist_ok=True)  # noqa: PTH103
        self._root = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        self._parts: tuple[str, ...] = ()
        self._opened = os.dup(self._root)

    def close(self) -> None:
        """Close the open directories."""
        os.close(self._opened)
        os.close(self._root)

    def open_directory(self, parts: tuple[str, ...]) -> int:
        """Open a directory, and make it and those above if they are missing.

        Args:
            parts: The names on the way from the top, for example ``("src", "models")``.

        Returns:
            A descriptor, which is valid until the next call.

        Raises:
            OSError: A part is a link or a file.
        """
        # The last directory is still open. Else begin at the top, one part after the other.
        if parts != self._parts:
            current = os.dup(self._root)
            for part in parts:
                with suppress(FileExistsError):
                    os.mkdir(part, 0o755, dir_fd=current)
                above, current = current, -1
                try:
                    current = os.open(
                        part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above
                    )
                finally:
                    os.close(above)
            os.close(self._opened)
            self._parts, self._opened = parts, current
        return self._opened

    def clear(self, path: tuple[str, ...]) -> tuple[int, str]:
        """Remove the file or link at a path, if there is one; make its directory.

        Returns:
            The descriptor of its directory, as ``open_directory``, and its name.
        """
        parent = self.open_directory(path[:-1])
        with suppress(FileNotFoundError):
            os.unlink(path[-1], dir_fd=parent)
        return parent, path[-1]


def unpack(archive: str, directory: str) -> None:
    """Unpack an archive over the files of a directory.

    Args:
        archive: Path of a tar file, compressed or not.
        directory: The directory; made if it is missing.

    Raises:
        ValueError: A member is not allowed, or the disk has too little space: nothing is unpacked.
            tarfile raises other errors for a broken archive.
        OSError: A file cannot be read or written; earlier ones stay.
    """
    with tarfile.open(archive, "r:*") as opened:
        contents = judge(members_of(opened), directory)
        tree = _Tree(directory)
        try:
            required = sum(member.size for member in contents.files.values())
            free = shutil.disk_usage(directory).free
            if required > free:
                raise ValueError(
                    f"its files have {required:,} bytes, and {free:,} are free in {directory}"
                )
            for path in sorted(contents.directories):
                tree.open_directory(path)
            for path, member in contents.files.items():
                _write(opened, member, tree, path)
            # Links come after the files, so that no file is written through a link.
            for path, target in contents.links.items():
                parent, name = tree.clear(path)
                os.symlink(target, name, dir_fd=parent)
            for path, source in contents.hard_links.items():
                _link(tree, path, source)
        finally:
            tree.close()


def _write(
    opened: tarfile.TarFile, member: tarfile.TarInfo, tree: _Tree, path: tuple[str, ...]
) -> None:
    """Write one regular file, with the execute bits and the time of the archive.

    A file or link in its place is removed. Raises OSError; tarfile raises other errors for a
    broken archive.

    Args:
        opened: The archive.
        member: The file in it.
        tree: The directory to write below.
        path: Names on the way to the new file, and its own.
    """
    parent, name = tree.clear(path)
    descriptor = os.open(
        name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=parent
    )
    with os.fdopen(descriptor, "wb") as target:
        source = opened.extractfile(member)
        if source is not None:
            shutil.copyfileobj(source, target, _CHUNK_BYTES)
        # Before the time is set: a later write would change it.
        target.flush()
        # Without set-user-id, and not writable for others; this user can read and write it.
        os.fchmod(descriptor, (member.mode & 0o755) | 0o600)
        # The archive may have any number as a time.
        with suppress(OSError, OverflowError, ValueError):
            os.utime(descriptor, (member.mtime, member.mtime))


def _link(tree: _Tree, path: tuple[str, ...], source: tuple[str, ...]) -> None:
    """Make a hard link to a file that was written before. Raises OSError.

    Args:
        tree: The directory.
        path: The link.
        source: The file.
    """
    # A copy of the descriptor, because ``clear`` opens another directory.
    above = os.dup(tree.open_directory(source[:-1]))
    try:
        parent, name = tree.clear(path)
        os.link(source[-1], name, src_dir_fd=above, dst_dir_fd=parent, follow_symlinks=False)
    finally:
        os.close(above)


def main(arguments: list[str]) -> int:
    """Unpack ARCHIVE to DIRECTORY; return 0, or 1 with one line on standard error."""
    archive, directory = arguments
    try:
        runtime_directory = os.environ.get(names.RUNTIME_DIRECTORY_VARIABLE, "")
        unpack(os.path.join(runtime_directory, archive), directory)  # noqa: PTH118
    except Exception as error:  # noqa: BLE001  (a hostile archive makes tarfile raise nearly anything)
        sys.stderr.write(
            f"trainworks: cannot unpack {archive}: {str(error) or type(error).__name__}\n"
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
