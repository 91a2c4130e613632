"""Runs the command of an installation with a copy of the project: ``copied.py
COMMAND... -- . WORDS...``.

pip and uv build a project in its own folder. Hosts that share the folder would build into each
other, what is built would stay in the user's checkout, and a read-only mount cannot be built in. So
the project, ``.`` in the current directory, is copied to the job's private directory first;
``install.py`` does so with folders that a requirements file names. Versions may come from git, so
``.git`` is a link there.

Everything but source is left out: builds, caches, environments, and the directories in which this
job keeps results. A project that is too large to be copied, or that cannot be, is installed where
it is, and a line says so.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
import zlib

_RUNTIME_DIRECTORY = (
    "TRAINWORKS_RUNTIME_DIRECTORY"  # names.RUNTIME_DIRECTORY_VARIABLE; nothing of ours is imported
)
_RESULTS = (
    "SM_MODEL_DIR",
    "SM_OUTPUT_DIR",
    "SM_OUTPUT_DATA_DIR",
    "TRAINWORKS_CHECKPOINT_DIRECTORY",
)
_NO_SOURCE = frozenset(
    ("build", "dist", "__pycache__", ".git", ".hg", ".svn", ".tox", ".nox", "node_modules", "wandb")
)
_LIMIT_BYTES = 1 << 30


class _Copying:
    """One copy: what is left out, and how many bytes it has so far."""

    def __init__(self, top: str) -> None:
        self._top = top
        self._results = {
            os.path.realpath(os.environ[name]) for name in _RESULTS if os.environ.get(name)
        }
        self._bytes = 0
        self.links: list[str] = []  # links that lead out of the project, left out too

    def leave_out(self, folder: str, names: list[str]) -> list[str]:
        """Return the names in a folder that are not copied."""
        return [name for name in names if self._is_no_source(folder, name)]

    def _is_no_source(self, folder: str, name: str) -> bool:
        path = os.path.join(folder, name)  # noqa: PTH118
        is_package = os.path.exists(os.path.join(path, "__init__.py"))  # noqa: PTH110, PTH118
        made = folder == self._top and name in _NO_SOURCE and not is_package
        if made or name == "__pycache__" or name.endswith(".egg-info"):
            return True
        if (
            os.path.exists(os.path.join(path, "pyvenv.cfg"))  # noqa: PTH110, PTH118
            or os.path.realpath(path) in self._results
        ):
            return True
        kind = os.lstat(path).st_mode
        if stat.S_ISLNK(kind) and not os.path.realpath(path).startswith(
            f"{os.path.realpath(self._top)}/"
        ):
            self.links.append(path)
            return True
        return not (stat.S_ISREG(kind) or stat.S_ISDIR(kind) or stat.S_ISLNK(kind))

    def copy(self, source: str, target: str) -> str:
        """Copy a file, as ``shutil.copy2``. Raises OSError if there is too much."""
        self._bytes += os.stat(source).st_size  # noqa: PTH116
        if self._bytes > _LIMIT_BYTES:
            raise OSError(f"it has more than {_LIMIT_BYTES >> 30} GiB")
        return str(shutil.copy2(source, target))


def copy_of_folder(folder: str, around: str) -> str:
    """Return the path of a copy of a folder, as ``private_copy``.

    What lies around it, up to ``around``, is linked.
    """
    if folder == around or not folder.startswith(f"{around}/"):
        return private_copy(folder)
    # Each has a place of its own: what is linked there for one folder may be copied for another.
    place = above = private_copy(folder, f"folders/{zlib.crc32(os.fsencode(folder)):x}")
    while folder not in (place, around):
        folder, above = os.path.dirname(folder), os.path.dirname(above)  # noqa: PTH120
        for name in os.listdir(folder):  # noqa: PTH208
            if not os.path.lexists(os.path.join(above, name)):  # noqa: PTH118
                os.symlink(os.path.join(folder, name), os.path.join(above, name))  # noqa: PTH118, PTH211
    return place


def private_copy(top: str, root: str = "project") -> str:
    """Return the path of a copy of the project in ``top``; ``top`` itself where it cannot be made.

    root: a folder for copies in the private directory.
    """
    directory = os.environ.get(_RUNTIME_DIRECTORY, "")
    place = os.path.join(directory, root, top.strip("/"))  # noqa: PTH118
    if os.path.isdir(place):  # noqa: PTH112
        return place
    copying = _Copying(top)
    try:
        if not directory:
            raise OSError("no private directory")
        shutil.copytree(
            top,
            place,
            symlinks=True,
            ignore=copying.leave_out,
            copy_function=copying.copy,
            dirs_exist_ok=True,
        )
        for folder, _, _ in os.walk(place):
            os.chmod(folder, 0o700)  # noqa: PTH101
        for link in (*copying.links, os.path.join(top, ".git")):  # noqa: PTH118
            if os.path.exists(link):  # noqa: PTH110
                os.symlink(os.path.realpath(link), os.path.join(place, os.path.relpath(link, top)))  # noqa: PTH118, PTH211
    except (OSError, shutil.Error) as error:
        shutil.rmtree(place, ignore_errors=True)
        sys.stderr.write(
            f"trainworks: {top} is installed where it is, without a copy: {str(error)[:300]}\n"
        )
        return top
    return place


def main(words: list[str]) -> int:
    """Become the command."""
    at = words.index("--") + 1
    words = [
        *words[:at],
        *(private_copy(os.getcwd()) if word == "." else word for word in words[at:]),  # noqa: PTH109
    ]
    os.execv(words[0], words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
