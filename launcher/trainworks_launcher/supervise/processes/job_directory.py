"""The host's private directory during a job, and the environment of the job's processes.

Mode 0700, removed at the end. The directory holds what must not be on a command line: the
environment for ``rank.py``, the socket to which ranks report, in MPI jobs the socket of mpirun's
agents, and values that are too long for the kernel.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from types import MappingProxyType
from typing import Mapping, Sequence

from trainworks_launcher.contract import names
from trainworks_launcher.contract.errors import Problem, RefusalError
from trainworks_launcher.environment import directories

STRING_BYTES = 131072
"""The longest ``NAME=VALUE`` or argument, with its final zero, that exec accepts.

Source: execve(2), MAX_ARG_STRLEN.
"""

ALL_BYTES = 1 << 20
"""Limit for all variables together: half of what exec accepts for arguments and variables with the
usual stack limit of 8 MiB (a quarter of the stack limit, execve(2)). The other half is for the
arguments, and for variables that the script's children add.
"""


def split_long_values(
    variables: Mapping[str, str], string_bytes: int = STRING_BYTES, all_bytes: int = ALL_BYTES
) -> tuple[str, ...]:
    """Choose the variables whose values the kernel does not accept: they go to files.

    Args:
        variables: All variables of a process.
        string_bytes: Limit of one variable.
        all_bytes: Limit of all of them.

    Returns:
        The names of all variables above the first limit, then of the longest ones until the others
        are within the second.
    """
    sizes: dict[str, int] = {}
    for name, value in variables.items():
        # The equals sign and the final zero count, too.
        sizes[name] = len(os.fsencode(name)) + len(os.fsencode(value)) + 2
    total = sum(sizes.values())
    chosen: list[str] = []
    # By name among equal sizes, so that the choice is always the same.
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        # The longest come first: if this one fits, the shorter ones do.
        if sizes[name] <= string_bytes and total <= all_bytes:
            break
        chosen.append(name)
        total -= sizes[name]
    return tuple(chosen)


_ADVICE = (
    "mount a writable directory at /tmp,"
    " for example with docker run --tmpfs /tmp, or set TMPDIR to one"
)


def _make_directory(variables: Mapping[str, str]) -> Path:
    """Make a private directory in the first place for temporary files that can be written.

    Args:
        variables: May name a place: TMPDIR, TEMP or TMP.

    Raises:
        RefusalError: No place can be written.
    """
    requested = [variables[name] for name in ("TMPDIR", "TEMP", "TMP") if variables.get(name)]
    places = dict.fromkeys([*requested, *directories.TEMPORARY])
    reasons: list[str] = []
    # Places with a path that is too long for sockets come last.
    for place in sorted(places, key=directories.is_too_long):
        directory, reason = _make_directory_in(place)
        if directory is not None:
            return directory
        reasons.append(f"{place}: {reason}")
    problem = Problem(
        "no directory for temporary files can be written", ", ".join(reasons), _ADVICE
    )
    raise RefusalError([problem], names.EXIT_PREPARATION)


def _make_directory_in(place: str) -> tuple[Path | None, str]:
    """Make a private directory in a place.

    Returns:
        The directory and ``""``; None and the reason if it cannot be made.
    """
    try:
        return Path(tempfile.mkdtemp(prefix="trainworks-", dir=Path(place).absolute())), ""
    except OSError as error:
        return None, error.strerror or str(error)


class NoJobDirectory:
    """In place of ``JobDirectory`` where no directory could be made.

    No process is started then, so none reads the directory.
    """

    path = Path("/dev/null/trainworks")
    env: Mapping[str, str] = MappingProxyType({})
    by_file: tuple[str, ...] = ()

    def change(self, variables: Mapping[str, str]) -> None:
        """Do nothing: there are no processes."""

    def write_rank_environment(self, cwd: str, hidden: Sequence[str] = ()) -> None:
        """Do nothing: there are no ranks."""

    def remove(self) -> None:
        """Do nothing: there is no directory."""


class JobDirectory:
    """The directory, and the variables for the job's processes.

    Attributes:
        path: The directory.
        env: The environment of the job's processes.
        by_file: Names of variables that are not in ``env``, because their values are too long
            for the kernel. For each, NAME_FILE in ``env`` is a file with the value.
    """

    def __init__(
        self, inherited: Mapping[str, str], planned: Mapping[str, str], own_ranks: bool = False
    ) -> None:
        """Make the directory and its files.

        Args:
            inherited: This process's environment.
            planned: The plan's variables, which replace inherited ones. Only these can be too
                long: the inherited ones came through exec.
            own_ranks: Every rank is a process of this host, and reports to this launcher.

        Raises:
            RefusalError: No directory can be written.
        """
        self._own_ranks = own_ranks
        self.path = _make_directory({**inherited, **planned})
        try:
            self._fill(inherited, planned)
        except OSError as error:
            self.remove()
            problem = Problem(
                f"a temporary file cannot be written: {error}", str(self.path), _ADVICE
            )
            raise RefusalError([problem], names.EXIT_PREPARATION) from error

    def _fill(self, inherited: Mapping[str, str], planned: Mapping[str, str]) -> None:
        """Set ``env`` and ``by_file``, and write a file for each value that is too long.

        Raises OSError if a file cannot be written.
        """
        env = {**inherited, **planned, names.RUNTIME_DIRECTORY_VARIABLE: str(self.path)}
        # torch aborts a rank if its host lacks this directory. So the variable must not get to
        # another host, to which a user's starter may export it.
        if self._own_ranks and any(name in env for name in names.RECORDER_FILES):
            env.setdefault(names.RECORDER_PIPE, f"{self.path}/recorder-rank-")
        self.by_file = split_long_values(env)
        for number, name in enumerate(self.by_file):
            file = self.path / f"value-{number}"
            _write_private(file, env.pop(name))
            env[name + names.FILE_SUFFIX] = str(file)
        self.env: Mapping[str, str] = env

    def change(self, variables: Mapping[str, str]) -> None:
        """Change variables of processes that are started later; ``""`` removes a variable."""
        env = {**self.env, **variables}
        for name, value in variables.items():
            if not value:
                del env[name]
        self.env = env

    def write_rank_environment(self, cwd: str, hidden: Sequence[str] = ()) -> None:
        """Write the environment that ``rank.py --keep`` reads, to environment.json.

        Called once for an attempt. Raises OSError if the file cannot be written.

        Args:
            cwd: The working directory of ranks.
            hidden: Prefixes of variables that ranks do not get from this file.
        """
        visible = [name for name in self.env if not name.startswith(tuple(hidden))]
        env = {name: self.env[name] for name in visible}
        _write_private(self.path / "environment.json", json.dumps({"cwd": cwd, "env": env}))

    def remove(self) -> None:
        """Remove the directory; errors no longer matter."""
        shutil.rmtree(self.path, ignore_errors=True)


def _write_private(path: Path, text: str) -> None:
    """Write a new file that only this user can read. Raises OSError, also if it exists."""
    descriptor = os.open(str(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="surrogateescape") as opened:
        opened.write(text)
