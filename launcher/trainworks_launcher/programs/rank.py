"""Start one rank, for mpirun or torchrun: report to the launcher of the host, then become the
user's program.

A program of its own, run as ``python3 -I rank.py [--size N] [--keep A,B] -- PROGRAM...``. It
imports only the smallest modules of the standard library, because it starts once per rank. There is
no shell, no copy of the output, and no process in between.

The rank connects to the launcher's socket in the runtime directory, makes two pipes, sends the read
ends with the rank's numbers (SCM_RIGHTS, unix(7)) and puts the write ends on its standard output
and error. Real pipes, because scripts open /dev/stdout again. If no launcher answers, the program
runs with the inherited output.

With ``--keep`` (mpirun) the environment is that of ``environment.json`` on this host, with
variables that mpirun set (by prefix) and that the user exported with ``-x`` (the names after
``--keep``). So no variable of the leader's host gets here. Without ``--keep`` (torchrun) the
environment is the inherited one.

If no launcher runs on this host, this program makes the directories for the user's results.

With ``--size`` the number of ranks that mpirun started has to be the planned one: a part of a job
that trains on fewer processes than were paid for must not end in success.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
from typing import Mapping

# As in contract/names.py, which this file does not import.
_RUNTIME_DIRECTORY = "TRAINWORKS_RUNTIME_DIRECTORY"  # names.RUNTIME_DIRECTORY_VARIABLE
_RESTARTS = "TRAINWORKS_RESTART_COUNT"  # names.RESTARTS_VARIABLE
_RESUME = "TRAINWORKS_RESUME_FROM"  # names.RESUME_VARIABLE
_PLACE = "TRAINWORKS_RANK"  # names.PLACE_VARIABLE
_CHECKPOINTS = "TRAINWORKS_CHECKPOINT_DIRECTORY"  # names.CHECKPOINT_DIRECTORY_VARIABLE
# directories.RESULTS
_RESULT_VARIABLES = (
    "SM_MODEL_DIR",
    "SM_OUTPUT_DIR",
    "SM_OUTPUT_DATA_DIR",
    "SM_OUTPUT_INTERMEDIATE_DIR",
)
_SOCKET = "ranks"  # ranks.SOCKET
_FAILURES_VARIABLE = "TORCHELASTIC_RESTART_COUNT"
_ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
_INT_BYTES = 4
"""Size of a C int: a descriptor in a message (SCM_RIGHTS, unix(7))."""

_MAX_PATH_CHARACTERS = 2047
"""Length of the path of torch's error file in the report, which is one message of bounded size."""

_USAGE, _OTHER_SIZE, _NO_ENVIRONMENT = 64, 66, 70
"""Exit statuses, see ``main``."""

_NOT_EXECUTABLE, _NOT_FOUND = 126, 127
"""Exit statuses of a shell for a program that it cannot start."""

_ANSWER_SECONDS = 30.0
_PREFIXES_OF_MPIRUN = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "ORTE_", "OPAL_")
_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "RANK")
_SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE",)
_LOCAL_RANK_VARIABLES = ("OMPI_COMM_WORLD_LOCAL_RANK", "LOCAL_RANK")


def main(arguments: list[str]) -> int:
    """Attach this rank to the launcher of its host, and become the program.

    Returns only if that fails, with a line on standard error: 64 for wrong words or directories,
    66 for another number of ranks than was planned, 70 without the host's environment, 126 or 127
    as a shell if the program cannot be started.

    Args:
        arguments: ``[--size N] [--keep A,B] -- PROGRAM...``
    """
    options = {}
    while len(arguments) > 2 and arguments[0] in ("--size", "--keep"):
        options[arguments[0]] = arguments[1]
        arguments = arguments[2:]
    if len(arguments) < 2 or arguments[0] != "--":
        sys.stderr.write("usage: rank.py [--size N] [--keep NAME,NAME] -- PROGRAM [ARGUMENT...]\n")
        return _USAGE
    keep = None
    if "--keep" in options:
        keep = frozenset(options["--keep"].split(","))
    program = arguments[1:]
    directory = os.environ.get(_RUNTIME_DIRECTORY, "")
    if directory:
        attach(directory)
    else:
        try:
            _make_result_directories()
        except OSError as error:
            sys.stderr.write(
                f"trainworks: a directory that the script writes to cannot be used: {error}\n"
            )
            return _USAGE
    # -1 under torchrun, which starts as many ranks as it was told.
    size = _number(_SIZE_VARIABLES)
    if size >= 0 and str(size) != options.get("--size", str(size)):
        sys.stderr.write(
            f"trainworks: mpirun started {size} rank(s), and the job has {options['--size']}\n"
        )
        return _OTHER_SIZE
    # Without --keep (torchrun) the rank has the inherited environment.
    environment: dict[str, str] = {**os.environ, **restarted(), **place_in_the_plan()}
    cwd = os.curdir
    try:
        if keep is not None:
            with open(os.path.join(directory, "environment.json"), encoding="utf-8") as opened:  # noqa: PTH118, PTH123
                host = json.load(opened)
            environment = {**host["env"], **_inherited(keep), **place_in_the_plan()}
            environment[_RUNTIME_DIRECTORY] = directory
            cwd = host["cwd"]
    except (OSError, ValueError) as error:
        sys.stderr.write(
            f"trainworks: this rank cannot read the environment of its host: {error}\n"
        )
        return _NO_ENVIRONMENT
    try:
        os.chdir(cwd)
        try:
            os.execvpe(program[0], program, environment)
        except OSError as error:
            if error.errno != errno.ENOEXEC or not program[0].endswith(".sh"):
                raise
            # A script without #! is run by sh, as a shell does it.
            os.execve("/bin/sh", ("/bin/sh", *program), environment)
    except OSError as error:
        sys.stderr.write(f"trainworks: cannot start {program[0]!r} in {cwd!r}: {error}\n")
        return _NOT_EXECUTABLE if isinstance(error, PermissionError) else _NOT_FOUND


def _make_result_directories() -> None:
    """Make the directories that the variables of results name.

    Raises OSError if one cannot be made or written.
    """
    for variable in _RESULT_VARIABLES:
        directory = os.environ.get(variable)
        if not directory:
            continue
        os.makedirs(directory, exist_ok=True)  # noqa: PTH103
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(f"it may not be written: {directory}")


def _inherited(keep: frozenset[str]) -> dict[str, str]:
    """Return the variables of this process that mpirun set, and those to keep."""
    names = [name for name in os.environ if name.startswith(_PREFIXES_OF_MPIRUN) or name in keep]
    return {name: os.environ[name] for name in names}


def attach(directory: str) -> None:
    """Hand this process's output to the launcher of the host.

    Without an answer the output stays as it is, and a line on standard error says so.

    Args:
        directory: The runtime directory.
    """
    try:
        _report(directory)
    except OSError as error:
        sys.stderr.write(f"trainworks: this rank runs without the launcher of its host: {error}\n")


def _report(directory: str) -> None:
    """Send the launcher the read ends of two new pipes, and put the write ends on fd 1 and 2.

    Args:
        directory: The runtime directory.

    Raises:
        OSError: The launcher does not answer; the output is as before.
    """
    errors = os.environ.get(_ERROR_FILE_VARIABLE, "")
    header = {
        "rank": _number(_RANK_VARIABLES),
        "local_rank": _number(_LOCAL_RANK_VARIABLES),
        "errors": errors if len(errors) <= _MAX_PATH_CHARACTERS else "",
    }
    runtime = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    # Read end and write end of standard output, then of standard error.
    pipes = (*os.pipe(), *os.pipe())
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_ANSWER_SECONDS)
            # Through the descriptor, because a socket's address holds at most 107 bytes of path.
            connection.connect(f"/proc/self/fd/{runtime}/{_SOCKET}")
            rights = b"".join(end.to_bytes(_INT_BYTES, sys.byteorder) for end in pipes[::2])
            message = json.dumps(header).encode() + b"\n"
            connection.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            if not connection.recv(1):
                raise ConnectionError("the launcher of this host did not answer")
        sys.stdout.flush()
        os.dup2(pipes[1], 1)
        os.dup2(pipes[3], 2)
    finally:
        for descriptor in (runtime, *pipes):
            os.close(descriptor)


def restarted() -> Mapping[str, str]:
    """Return variables for a rank that torchrun restarts: the count, and the newest checkpoint.

    {} at the first start of a rank, and for a rank that torchrun has not started. Each call counts
    a start, in a file. After a restart the directory of checkpoints is searched, which may take a
    while on a slow file system.
    """
    restarts = _number((_FAILURES_VARIABLE,))
    if restarts >= 0:
        # torchrun counts the failures of its own host, but restarts the ranks of all hosts.
        restarts = max(restarts, _count_start())
    if restarts <= 0:
        return {}
    # The variable has the restarts of the whole job.
    restarts_of_job = max(_number((_RESTARTS,)), 0)
    variables = {_RESTARTS: str(restarts + restarts_of_job)}
    if _CHECKPOINTS in os.environ:
        sys.path.insert(
            0,
            os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))),  # noqa: PTH100, PTH120
        )
        from trainworks_launcher.contract.checkpoints import newest_complete

        newest = newest_complete(os.environ[_CHECKPOINTS]) or os.environ.get(_RESUME, "")
        if newest:
            variables[_RESUME] = newest
    return variables


def place_in_the_plan() -> Mapping[str, str]:
    """Return the variable with the rank in the plan, for example ``3 of 16``; {} if not known.

    With it each Python below this rank can detect another starter in between.
    """
    rank, world = _number(_RANK_VARIABLES), _number((*_SIZE_VARIABLES, "WORLD_SIZE"))
    if rank < 0 or world <= 0:
        return {}
    return {_PLACE: f"{rank} of {world}"}


def _count_start() -> int:
    """Count this start of the rank, in a file of the runtime directory.

    Returns:
        The number of earlier starts; 0 if they cannot be counted.
    """
    directory = os.environ.get(_RUNTIME_DIRECTORY, "")
    local_rank = max(_number(_LOCAL_RANK_VARIABLES), 0)
    if not directory:
        return 0
    try:
        counter = os.open(
            f"{directory}/starts-{local_rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600
        )
    except OSError:
        return 0
    try:
        # A byte for each start, so that the file's size is the count.
        os.write(counter, b".")
        return os.fstat(counter).st_size - 1
    except OSError:
        return 0
    finally:
        os.close(counter)


def _number(variables: tuple[str, ...]) -> int:
    """Return the number in the first of these variables that has one; -1 if none has."""
    for name in variables:
        value = os.environ.get(name, "")
        if value.isdecimal():
            return int(value)
    return -1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
