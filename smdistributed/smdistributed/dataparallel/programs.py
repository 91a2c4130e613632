"""The programs that launchers put before a rank's command. A program replaces itself by the
command.

sagemaker-training looks for ``smddprun`` and ``smddpmprun`` on the PATH; AWS's
container tests call the others.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import MutableMapping
from typing import NoReturn

from trainworks_smdistributed.environment import ADDRESS, complete, ranks_of, set_rendezvous

_CANNOT_RUN = 127
"""Exit status of a shell for a command that it cannot run."""


def smddprun() -> NoReturn:
    """Run a command as one rank: ``smddprun COMMAND...``, started by mpirun on each rank.

    Variables of the environment are set, and this process becomes the command. It ends with status
    2 for wrong arguments or a missing address, and with 127 if the command cannot be run.
    """
    parser = _parser("smddprun", "Run a command as one rank of a job that mpirun started.")
    command = parser.parse_args().command
    try:
        prepare(os.environ)
    except ValueError as error:
        parser.error(str(error))
    _become(command, parser)


def smddpmprun() -> NoReturn:
    """Run a command: ``smddpmprun -i INSTANCE_TYPE --allow-bypass COMMAND...``.

    This process becomes the command. It ends with status 2 for wrong arguments, and with 127 if the
    command cannot be run.
    """
    parser = _parser(
        "smddpmprun", "Run a command as one rank of a job with smdistributed.modelparallel."
    )
    parser.add_argument(
        "-i", metavar="INSTANCE_TYPE", help="has no effect: every instance type will do"
    )
    parser.add_argument("--allow-bypass", action="store_true", help="has no effect")
    _become(parser.parse_args().command, parser)


def smddpsinglenode() -> NoReturn:
    """Run a command on this host, once for each GPU, or once without one:
    ``smddpsinglenode COMMAND...``.

    Variables of ``-x`` are set in the environment, and this process becomes torchrun. It ends with
    status 2 for wrong arguments, and with 127 if torchrun cannot be run.
    """
    import torch

    parser = _parser("smddpsinglenode", "Run a command on this host, once for each GPU.")
    parser.add_argument(
        "-x", metavar="NAME=VALUE", action="append", default=[], help="set a variable for all ranks"
    )
    options = parser.parse_args()
    for setting in options.x:
        name, equals, value = setting.partition("=")
        if equals:
            os.environ[name] = value
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python"]
    _become(
        [*torchrun, f"--nproc-per-node={torch.cuda.device_count() or 1}", *options.command], parser
    )


def prepare(environment: MutableMapping[str, str]) -> None:
    """Set the variables that torch.distributed and scripts read, where they are missing.

    Args:
        environment: The environment variables of a rank that mpirun has started.

    Raises:
        ValueError: The ranks are on more than one host, and the address of rank 0 is missing; or a
            variable of the rank is not an integer.
    """
    complete(environment)
    ranks = ranks_of(environment)
    if "MASTER_ADDR" not in environment:
        # sagemaker-training passes this variable on to the ranks.
        address = environment.get("SMDATAPARALLEL_SERVER_ADDR", ADDRESS)
        if address == ADDRESS and ranks.size > ranks.local_size:
            raise ValueError(
                f"MASTER_ADDR is not set, and only {ranks.local_size} of the {ranks.size} ranks are"
                " on this host: let mpirun pass the address of rank 0's host, -x MASTER_ADDR=..."
            )
        environment["MASTER_ADDR"] = address
    set_rendezvous(environment)


def _parser(program: str, description: str) -> argparse.ArgumentParser:
    """Return a parser that takes the rest of the command line as ``command``.

    Args:
        program: Name of the program.
        description: What the program does, for its help.
    """
    parser = argparse.ArgumentParser(program, description=description, allow_abbrev=False)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command and its arguments")
    return parser


def _become(command: list[str], parser: argparse.ArgumentParser) -> NoReturn:
    """Replace this process by a command.

    If there is none, the process ends with status 2. If it cannot be run, the status is the
    shell's for that, 127, with the reason on standard error.

    Args:
        command: The program and its arguments.
        parser: Prints errors.

    Raises:
        SystemExit: There is no command, or it cannot be run.
    """
    if not command:
        parser.error("there is no command to run")
    try:
        os.execvp(command[0], command)
    except OSError as error:
        parser.exit(_CANNOT_RUN, f"{parser.prog}: cannot run {command[0]}: {error.strerror}\n")
