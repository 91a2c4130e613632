"""The place of ``FOLDERS``: in a checkout, or in the installed package.

The wheel has a copy of them (``pyproject.toml``, ``force-include``). A folder of a checkout takes
the place of the package's own.
"""

from __future__ import annotations

from pathlib import Path

from trainworks.errors import OutputError

FOLDERS = ("images", "templates", "launcher", "smdistributed")
"""Rows, recipes, and the two distributions of this project that go into images."""

INSTALLED = Path(__file__).resolve().parents[1] / "data"
"""The data of an installed package.

A checkout, and an editable install of one, does not have this folder.
"""

PACKAGED = INSTALLED if INSTALLED.is_dir() else INSTALLED.parents[2]
"""The folder with the package's own ``FOLDERS``."""


def default_root(current: Path) -> Path:
    """Return the root for commands without ``--root``.

    It is the current folder if that has all of ``FOLDERS``, otherwise the package's own.
    """
    for name in FOLDERS:
        if not (current / name).is_dir():
            return PACKAGED
    return current


def data_folder(root: Path, name: str) -> Path:
    """Return one of ``FOLDERS``: that of ``root`` if it has one, else the package's own.

    Raises:
        OutputError: ``root`` has none of them.
    """
    if (root / name).is_dir():
        return root / name
    existing = [folder for folder in FOLDERS if (root / folder).is_dir()]
    if existing:
        return PACKAGED / name
    problem = f"{root} is not a folder"
    if root.is_dir():
        problem = f"{root} has no folder {', '.join(FOLDERS[:-1])} or {FOLDERS[-1]}"
    raise OutputError(
        problem,
        hint=(
            "--root takes a checkout of trainworks,"
            " or a folder with an images/ or templates/ of your own"
        ),
    )


def writable_root(root: Path, command: str) -> Path:
    """Return the root unchanged, if a command may write to it.

    Args:
        root: The root.
        command: The command that writes, for people: ``build.py lock``.

    Raises:
        OutputError: The root is the data of an installed package.
    """
    if root.resolve() == INSTALLED:
        raise OutputError(
            f"{command} writes into a checkout, and {root} is the data of the installed package",
            hint="clone the repository, and run this in the clone or with --root DIR",
        )
    return root
