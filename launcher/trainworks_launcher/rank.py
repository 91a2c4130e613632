"""Started by mpirun once per rank: takes on the environment of its own host and becomes the user's program.

A program of its own, run as ``python3 -I rank.py --keep A,B -- PROGRAM...`` with only the standard library's smallest
modules, because it starts once per rank. It reads ``environment.json`` in the host's runtime directory, lays over it
what mpirun set (by prefix) and what the user exported with ``-x`` (``--keep``), notes its process id so that the host's
launcher can send signals to the rank itself, and executes the program. No shell, no copy, no process in between.
"""

from __future__ import annotations

import json
import os
import sys

_RUNTIME_DIRECTORY = (
    "TRAINWORKS_RUNTIME_DIRECTORY"  # names.RUNTIME_DIRECTORY_VARIABLE; this file imports nothing of ours
)
_FROM_MPIRUN = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "ORTE_", "OPAL_")


def main(arguments: list[str]) -> int:
    """Become the program; returns only if that fails, with a shell's status for it."""
    if len(arguments) < 4 or arguments[0] != "--keep" or arguments[2] != "--":
        sys.stderr.write("usage: rank.py --keep NAME,NAME -- PROGRAM [ARGUMENT...]\n")
        return 64
    keep = frozenset(arguments[1].split(","))
    program = arguments[3:]
    directory = os.environ.get(_RUNTIME_DIRECTORY, "")
    try:
        with open(os.path.join(directory, "environment.json"), encoding="utf-8") as opened:  # noqa: PTH118, PTH123
            host = json.load(opened)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"trainworks: this rank cannot read the environment of its host: {error}\n")
        return 70
    environment = dict(host["env"])
    environment.update(
        {name: value for name, value in os.environ.items() if name.startswith(_FROM_MPIRUN) or name in keep}
    )
    environment[_RUNTIME_DIRECTORY] = directory
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as opened:  # noqa: PTH123
            started = opened.read().rpartition(")")[2].split()[19]
        with open(os.path.join(directory, "ranks", str(os.getpid())), "w", encoding="ascii") as opened:  # noqa: PTH118, PTH123
            opened.write(started)
        os.chdir(host["cwd"])
        os.execvpe(program[0], program, environment)
    except OSError as error:
        sys.stderr.write(f"trainworks: cannot start {program[0]!r} in {host['cwd']!r}: {error}\n")
        return 126 if isinstance(error, PermissionError) else 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
