"""Run the command of an installation with a copy of the project: ``copied.py COMMAND... -- .
WORDS...``.

pip and uv build a project in its own folder. Hosts that share the folder would build into each
other, the build would stay in the user's checkout, and a read-only mount cannot be built in. So the
project, ``.`` in the current directory, is first copied to the job's private directory.
``install.py`` copies folders in a requirements file in the same way. Versions may come from git, so
the copy has a link to ``.git``.

Only source is copied, without builds, caches, environments, and the directories with results of
this job. A project that is too large, or that cannot be copied, is installed without a copy, and a
line says so.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
import zlib

# As names.RUNTIME_DIRECTORY_VARIABLE, which this file does not import.
_RUNTIME_DIRECTORY = "TRAINWORKS_RUNTIME_DIRECTORY"
_RESULT_VARIABLES = (
    "SM_MODEL_DIR",
    "SM_OUTPUT_DIR",
    "SM_OUTPUT_DATA_DIR",
    "TRAINWORKS_CHECKPOINT_DIRECTORY",
)
_BUILD_FOLDERS = frozenset(
    ("build", "dist", "__pycache__", ".git", ".hg", ".svn", ".tox", ".nox", "node_modules", "wandb")
)
_LIMIT_BYTES = 1 << 30
"""Size of a project above which it is installed without a copy."""

_REASON_CHARACTERS = 300
"""Length of an error in the line that there is no copy."""


class _Copying:
    """One copy of a project: decides about each entry, and counts the bytes.

    Attributes:
        links: Links that lead out of the project, and were not copied.
    """

    def __init__(self, top: str) -> None:
        """Begin the copy of the project in ``top``."""
        self._top = top
        self._results = {
            os.path.realpath(os.environ[name]) for name in _RESULT_VARIABLES if os.environ.get(name)
        }
        self._bytes = 0
        self.links: list[str] = []

    def leave_out(self, folder: str, names: list[str]) -> list[str]:
        """Return the names in a folder that are not copied, as ``shutil.copytree`` asks."""
        return [name for name in names if not self._is_copied(folder, name)]

    def _is_copied(self, folder: str, name: str) -> bool:
        """Return whether an entry of a folder is source. Notes links that lead out.

        Results of builds, environments, directories with results of the job, and entries that are
        neither file, folder nor link are not copied.
        """
        path = os.path.join(folder, name)  # noqa: PTH118
        # A package of the project may have the name of a folder of builds.
        is_package = os.path.exists(os.path.join(path, "__init__.py"))  # noqa: PTH110, PTH118
        is_result_of_build = folder == self._top and name in _BUILD_FOLDERS and not is_package
        if is_result_of_build or name == "__pycache__" or name.endswith(".egg-info"):
            return False
        is_environment = os.path.exists(os.path.join(path, "pyvenv.cfg"))  # noqa: PTH110, PTH118
        if is_environment or os.path.realpath(path) in self._results:
            return False
        kind = os.lstat(path).st_mode
        top = f"{os.path.realpath(self._top)}/"
        if stat.S_ISLNK(kind) and not os.path.realpath(path).startswith(top):
            self.links.append(path)
            return False
        return stat.S_ISREG(kind) or stat.S_ISDIR(kind) or stat.S_ISLNK(kind)

    def copy(self, source: str, target: str) -> str:
        """Copy a file, as ``shutil.copy2``. Raises OSError above the limit of bytes."""
        self._bytes += os.stat(source).st_size  # noqa: PTH116
        if self._bytes > _LIMIT_BYTES:
            raise OSError(f"it has more than {_LIMIT_BYTES >> 30} GiB")
        return str(shutil.copy2(source, target))


def copy_of_folder(folder: str, around: str) -> str:
    """Copy a folder, and link the entries of the folders above beside the copy.

    So the copy finds them by relative paths.

    Args:
        folder: The folder.
        around: The uppermost folder whose entries are linked; if ``folder`` is not below it,
            nothing is linked.

    Returns:
        The path of the copy, as ``private_copy``.
    """
    if folder == around or not folder.startswith(f"{around}/"):
        return private_copy(folder)
    # A root for each folder: an entry that is linked for one folder may be copied for another.
    place = above = private_copy(folder, f"folders/{zlib.crc32(os.fsencode(folder)):x}")
    while folder not in (place, around):
        folder, above = os.path.dirname(folder), os.path.dirname(above)  # noqa: PTH120
        for name in os.listdir(folder):  # noqa: PTH208
            if not os.path.lexists(os.path.join(above, name)):  # noqa: PTH118
                os.symlink(os.path.join(folder, name), os.path.join(above, name))  # noqa: PTH118, PTH211
    return place


def private_copy(top: str, root: str = "project") -> str:
    """Copy a project to the job's private directory, once; later calls return the same copy.

    Args:
        top: The project's folder.
        root: A folder for copies in the private directory.

    Returns:
        The path of the copy; ``top`` itself, with a line on standard error, if that fails.
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
        # A build writes into the folders, which may be read-only in the project.
        for folder, _, _ in os.walk(place):
            os.chmod(folder, 0o700)  # noqa: PTH101
        for link in (*copying.links, os.path.join(top, ".git")):  # noqa: PTH118
            if os.path.exists(link):  # noqa: PTH110
                os.symlink(os.path.realpath(link), os.path.join(place, os.path.relpath(link, top)))  # noqa: PTH118, PTH211
    except (OSError, shutil.Error) as error:
        shutil.rmtree(place, ignore_errors=True)
        sys.stderr.write(
            f"trainworks: {top} is installed where it is, without a copy:"
            f" {str(error)[:_REASON_CHARACTERS]}\n"
        )
        return top
    return place


def main(words: list[str]) -> int:
    """Copy the project in the current directory, and become the command.

    Does not return. Raises OSError if the command cannot be started.

    Args:
        words: COMMAND, ``--`` and more words, of which ``.`` is replaced by the copy.
    """
    after_command = words.index("--") + 1
    command = words[:after_command]
    for word in words[after_command:]:
        command.append(private_copy(os.getcwd()) if word == "." else word)  # noqa: PTH109
    os.execv(command[0], command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
