"""Started by mpirun or torchrun once per rank: reports to the launcher of its
host and becomes the user's program.

A program of its own, run as ``python3 -I rank.py [--size N] [--keep A,B] -- PROGRAM...`` with only
the standard library's smallest modules, because it starts once per rank. No shell, no copy of the
output, no process in between.

It connects to the launcher's socket in the runtime directory, makes two pipes, sends the read ends
with the rank's numbers (SCM_RIGHTS, unix(7)) and puts the write ends on its standard output and
error: real pipes, for scripts open /dev/stdout again. Where no launcher answers, the program runs
with the output that it was given.

With ``--keep`` (mpirun) the environment is the one in ``environment.json`` of this host, with what
mpirun set (by prefix) and what the user exported with ``-x`` (the names after ``--keep``) over it,
so that nothing host-specific comes from the leader. Without it (torchrun) the environment is the
inherited one.

Where no launcher runs on this host, nobody else has made the directories that
the program is told to write to.

With ``--size`` the number of ranks that mpirun says it started has to be the planned one: a part of
a job that trains on fewer processes than were paid for must not end in success.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
from typing import Mapping

# The names stand in contract/names.py, too: this file imports nothing of ours.
_RUNTIME_DIRECTORY = "TRAINWORKS_RUNTIME_DIRECTORY"  # names.RUNTIME_DIRECTORY_VARIABLE
_RESTARTS = "TRAINWORKS_RESTART_COUNT"  # names.RESTARTS_VARIABLE
_RESUME = "TRAINWORKS_RESUME_FROM"  # names.RESUME_VARIABLE
_PLACE = "TRAINWORKS_RANK"  # names.PLACE_VARIABLE
_CHECKPOINTS = "TRAINWORKS_CHECKPOINT_DIRECTORY"  # names.CHECKPOINT_DIRECTORY_VARIABLE
# places.RESULTS
_PLACES = ("SM_MODEL_DIR", "SM_OUTPUT_DIR", "SM_OUTPUT_DATA_DIR", "SM_OUTPUT_INTERMEDIATE_DIR")
_SOCKET = "ranks"  # ranks.SOCKET
_FAILURES = "TORCHELASTIC_RESTART_COUNT"
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_ANSWER_SECONDS = 30.0
_FROM_MPIRUN = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "ORTE_", "OPAL_")
_RANK = ("OMPI_COMM_WORLD_RANK", "RANK")
_SIZE = ("OMPI_COMM_WORLD_SIZE",)
_LOCAL_RANK = ("OMPI_COMM_WORLD_LOCAL_RANK", "LOCAL_RANK")


def main(arguments: list[str]) -> int:
    """Become the program; returns only if that fails, with a shell's status for it."""
    options = {}
    while len(arguments) > 2 and arguments[0] in ("--size", "--keep"):
        options[arguments[0]] = arguments[1]
        arguments = arguments[2:]
    if len(arguments) < 2 or arguments[0] != "--":
        sys.stderr.write("usage: rank.py [--size N] [--keep NAME,NAME] -- PROGRAM [ARGUMENT...]\n")
        return 64
    keep = frozenset(options["--keep"].split(",")) if "--keep" in options else None
    program = arguments[1:]
    directory = os.environ.get(_RUNTIME_DIRECTORY, "")
    if directory:
        attach(directory)
    else:
        try:
            for place in filter(None, map(os.environ.get, _PLACES)):
                os.makedirs(place, exist_ok=True)  # noqa: PTH103
                if not os.access(place, os.W_OK | os.X_OK):
                    raise PermissionError(f"it may not be written: {place}")
        except OSError as error:
            sys.stderr.write(
                f"trainworks: a directory that the script writes to cannot be used: {error}\n"
            )
            return 64
    size = _number(_SIZE)
    if size >= 0 and str(size) != options.get("--size", str(size)):
        sys.stderr.write(
            f"trainworks: mpirun started {size} rank(s), and the job has {options['--size']}\n"
        )
        return 66
    environment: Mapping[str, str] = {**os.environ, **restarted(), **place_in_the_plan()}
    place = os.curdir
    try:
        if keep is not None:
            with open(os.path.join(directory, "environment.json"), encoding="utf-8") as opened:  # noqa: PTH118, PTH123
                host = json.load(opened)
            environment = {
                **host["env"],
                **{
                    name: value
                    for name, value in os.environ.items()
                    if name.startswith(_FROM_MPIRUN) or name in keep
                },
                **place_in_the_plan(),
                _RUNTIME_DIRECTORY: directory,
            }
            place = host["cwd"]
    except (OSError, ValueError) as error:
        sys.stderr.write(
            f"trainworks: this rank cannot read the environment of its host: {error}\n"
        )
        return 70
    try:
        os.chdir(place)
        try:
            os.execvpe(program[0], program, environment)
        except OSError as error:
            if error.errno != errno.ENOEXEC or not program[0].endswith(".sh"):
                raise
            # A script without #!, as a shell does it.
            os.execve("/bin/sh", ("/bin/sh", *program), environment)
    except OSError as error:
        sys.stderr.write(f"trainworks: cannot start {program[0]!r} in {place!r}: {error}\n")
        return 126 if isinstance(error, PermissionError) else 127


def attach(directory: str) -> None:
    """Give this process's output to the launcher.

    Where it does not answer, the output stays, and a line says so.
    """
    try:
        _report(directory)
    except OSError as error:
        sys.stderr.write(f"trainworks: this rank runs without the launcher of its host: {error}\n")


def _report(directory: str) -> None:
    """Give the launcher the read ends of two new pipes and put the write ends on fd 1 and 2.

    Raises OSError.
    """
    errors = os.environ.get(_ERROR_FILE, "")
    header = {
        "rank": _number(_RANK),
        "local_rank": _number(_LOCAL_RANK),
        "errors": errors if len(errors) < 2048 else "",
    }
    place = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    pipes = (*os.pipe(), *os.pipe())
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_ANSWER_SECONDS)
            # By way of the descriptor: a path of more than 107 bytes does not
            # fit into a socket's address.
            connection.connect(f"/proc/self/fd/{place}/{_SOCKET}")
            rights = b"".join(end.to_bytes(4, sys.byteorder) for end in pipes[::2])
            message = json.dumps(header).encode() + b"\n"
            connection.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            if not connection.recv(1):
                raise ConnectionError("the launcher of this host did not answer")
        sys.stdout.flush()
        os.dup2(pipes[1], 1)
        os.dup2(pipes[3], 2)
    finally:
        for descriptor in (place, *pipes):
            os.close(descriptor)


def restarted() -> Mapping[str, str]:
    """Return what a rank that torchrun starts again is told: how often, and the
    checkpoint to go on from.

    torchrun counts on each host the failures of that host, but starts the ranks of all hosts again:
    so the starts are counted here, too.
    """
    again = _number((_FAILURES,))
    if again >= 0:
        again = max(again, _starts_before())
    if again <= 0:
        return {}
    found = {_RESTARTS: str(again + max(_number((_RESTARTS,)), 0))}
    if _CHECKPOINTS in os.environ:
        sys.path.insert(
            0,
            os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))),  # noqa: PTH100, PTH120
        )
        from trainworks_launcher.contract.checkpoints import newest_complete

        found[_RESUME] = newest_complete(os.environ[_CHECKPOINTS]) or os.environ.get(_RESUME, "")
    return {name: value for name, value in found.items() if value}


def place_in_the_plan() -> Mapping[str, str]:
    """Return the variable by which each Python below this rank can tell whether
    another starter has started it.
    """
    rank, world = _number(_RANK), _number((*_SIZE, "WORLD_SIZE"))
    return {_PLACE: f"{rank} of {world}"} if rank >= 0 and world > 0 else {}


def _starts_before() -> int:
    """Count this start of the rank in the host's runtime directory, and return how many there were
    before; 0 if that cannot be.
    """
    directory, place = os.environ.get(_RUNTIME_DIRECTORY, ""), max(_number(_LOCAL_RANK), 0)
    if not directory:
        return 0
    try:
        counted = os.open(
            f"{directory}/starts-{place}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600
        )
    except OSError:
        return 0
    try:
        os.write(counted, b".")
        return os.fstat(counted).st_size - 1
    except OSError:
        return 0
    finally:
        os.close(counted)


def _number(variables: tuple[str, ...]) -> int:
    """Return the number in the first of the variables that is set; -1 if none is."""
    for name in variables:
        value = os.environ.get(name, "")
        if value.isdecimal():
            return int(value)
    return -1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
