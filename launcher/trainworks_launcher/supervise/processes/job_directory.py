"""The host's private directory for the life of a job, and the environment that
is handed to its processes.

Mode 0700, removed at the end. It holds what must not be on a command line: the environment for
``rank.py``, the socket that ranks report to, in MPI jobs that of mpirun's agents, and values that
are too long for the kernel.
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
"""What all variables together may take: half of what exec accepts for arguments and variables with
the usual stack limit of 8 MiB (a quarter of it, execve(2)); the rest is for the arguments, and for
what the script's children add.
"""


def split_long_values(
    variables: Mapping[str, str], string_bytes: int = STRING_BYTES, all_bytes: int = ALL_BYTES
) -> tuple[str, ...]:
    """Names of the variables whose values have to go by file: each too long
    one, then the longest until all fit.
    """
    sizes = {
        name: len(os.fsencode(name)) + len(os.fsencode(value)) + 2
        for name, value in variables.items()
    }
    total = sum(sizes.values())
    chosen: list[str] = []
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
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
    """Make the directory in the first place that can be written.

    Raises RefusalError if there is none.
    """
    asked = [variables[name] for name in ("TMPDIR", "TEMP", "TMP") if variables.get(name)]
    reasons: list[str] = []
    for place in sorted(
        dict.fromkeys([*asked, *directories.TEMPORARY]), key=directories.is_too_long
    ):
        made = _make_directory_in(place)
        if isinstance(made, Path):
            return made
        reasons.append(f"{place}: {made}")
    problem = Problem(
        "no directory for temporary files can be written", ", ".join(reasons), _ADVICE
    )
    raise RefusalError([problem], names.EXIT_PREPARATION)


def _make_directory_in(place: str) -> Path | str:
    """Return the directory that was made there, or why none could be."""
    try:
        return Path(tempfile.mkdtemp(prefix="trainworks-", dir=Path(place).absolute()))
    except OSError as error:
        return error.strerror or str(error)


class NoRuntime:
    """In place of ``Runtime`` where none could be made: nothing is started, so
    nothing looks into it.
    """

    path = Path("/dev/null/trainworks")
    env: Mapping[str, str] = MappingProxyType({})
    by_file: tuple[str, ...] = ()

    def change(self, variables: Mapping[str, str]) -> None:
        """There are no processes."""

    def write_rank_environment(self, cwd: str, hidden: Sequence[str] = ()) -> None:
        """There are no ranks."""

    def remove(self) -> None:
        """There is nothing."""


class Runtime:
    """The directory.

    ``path``: where it is. ``env``: the environment for the job's processes. ``by_file``: names of
    variables that were left out because the kernel would refuse them; NAME_FILE names the file with
    the value.
    """

    def __init__(
        self, inherited: Mapping[str, str], planned: Mapping[str, str], own_ranks: bool = False
    ) -> None:
        """Make the directory and its files.

        Args:
            inherited: This process's environment.
            planned: The plan's variables, which lie over it; only they can be
                too long: the others came through exec.
            own_ranks: Every rank is a process of this host whose launcher this is.

        Raises:
            RefusalError: Nothing can be written.
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
        env = {**inherited, **planned, names.RUNTIME_DIRECTORY_VARIABLE: str(self.path)}
        # torch aborts a rank whose host has no such directory: it must not get there by what a
        # user's starter exports.
        if self._own_ranks and any(name in env for name in names.RECORDER_FILES):
            env.setdefault(names.RECORDER_PIPE, f"{self.path}/recorder-rank-")
        self.by_file = split_long_values(env)
        for number, name in enumerate(self.by_file):
            file = self.path / f"value-{number}"
            _write_private(file, env.pop(name))
            env[name + names.FILE_SUFFIX] = str(file)
        self.env: Mapping[str, str] = env

    def change(self, variables: Mapping[str, str]) -> None:
        """Change variables before anything is started with them; ``""`` takes one away."""
        self.env = {
            name: value
            for name, value in {**self.env, **variables}.items()
            if value or name not in variables
        }

    def write_rank_environment(self, cwd: str, hidden: Sequence[str] = ()) -> None:
        """Write what ``rank.py --keep`` reads. hidden: beginnings of variables
        that ranks do not get from here.
        """
        env = {
            name: value for name, value in self.env.items() if not name.startswith(tuple(hidden))
        }
        _write_private(self.path / "environment.json", json.dumps({"cwd": cwd, "env": env}))

    def remove(self) -> None:
        """Remove everything; errors no longer matter."""
        shutil.rmtree(self.path, ignore_errors=True)


def _write_private(path: Path, text: str) -> None:
    """Write a file that only this user can read."""
    descriptor = os.open(str(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="surrogateescape") as opened:
        opened.write(text)
