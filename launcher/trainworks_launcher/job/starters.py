"""Find a program that starts ranks, such as torchrun, in the command line of a job. Pure.

In a mode that starts ranks, too, the job is refused: every rank of the mode would start ranks of a
separate job, and each of these jobs could end with success. In mode ``none`` on several hosts the
job is warned of if the starter is not told where the other hosts are (job/idle.py).

The starter is found in the words of the command line, also behind ``env``, ``nohup`` or
``bash -c``. Shell scripts are not read: in a rank, programs/python/sitecustomize.py compares RANK
and WORLD_SIZE with the plan.
"""

from __future__ import annotations

import re
import shlex
from typing import Mapping, NamedTuple, Sequence

from trainworks_launcher.contract.errors import Problem
from trainworks_launcher.contract.modes import MODES
from trainworks_launcher.environment.environment import Environment
from trainworks_launcher.job.placement import Placement
from trainworks_launcher.job.program import Program

_PYTHON_STARTERS = (
    "torchrun",
    "torchrun-script",
    "deepspeed",
    "deepspeed.pt",
    "horovodrun",
    "hyperpodrun",
    "composer",
)
_MPI_STARTERS = (
    "mpirun",
    "mpiexec",
    "mpiexec.hydra",
    "mpirun.mpich",
    "mpiexec.mpich",
    "mpirun.openmpi",
    "mpiexec.openmpi",
    "orterun",
    "prterun",
    "prun",
)
_SCHEDULER_STARTERS = ("srun", "jsrun", "flux", "aprun")
_PROGRAMS = frozenset((*_PYTHON_STARTERS, *_MPI_STARTERS, *_SCHEDULER_STARTERS))
"""Programs that start ranks."""

_SUBCOMMANDS = {
    "accelerate": "launch",
    "colossalai": "run",
    "fabric": "run",
    "lightning": "run",
    "flux": "run",
}
"""Program -> the only subcommand that starts ranks, as in ``accelerate launch``."""

_MODULES = frozenset(
    (
        "torch.distributed.run",
        "torch.distributed.launch",
        "torch.distributed.elastic.launcher.api",
        "accelerate.commands.launch",
        "accelerate.commands.accelerate_cli",
        "deepspeed.launcher.runner",
        "horovod.runner.launch",
        "composer.cli.launcher",
        "torch_xla.distributed.xla_spawn",
    )
)
"""Modules that start ranks, run with ``python -m``."""

_SHELLS = frozenset(("bash", "sh", "dash", "zsh", "ksh"))
_PYTHON = re.compile(r"python(\d+(\.\d+)*)?")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)

_WRAPPERS = {
    "chrt": ("",),
    "doas": ("u",),
    "env": ("u", "unset", "C", "chdir"),
    "exec": ("a",),
    "ionice": ("c", "class", "n", "classdata", "p", "pid"),
    "nice": ("n", "adjustment"),
    "nohup": ("",),
    "numactl": ("m", "membind", "N", "cpunodebind", "C", "physcpubind", "i", "interleave"),
    "setsid": ("",),
    "stdbuf": ("i", "input", "o", "output", "e", "error"),
    "sudo": ("u", "user", "g", "group"),
    "taskset": ("",),
    "time": ("f", "format", "o", "output"),
    "timeout": ("k", "kill-after", "s", "signal"),
    "xargs": ("n", "max-args", "P", "max-procs"),
}
"""Program that runs another program -> its options whose value is the next word: ``nice -n 5``."""

_COMMAND_IN_ONE_WORD = ("-S", "--split-string")
"""Options of env: the next word is split into the words of the command."""

_ARGUMENTS_OF_WRAPPER = {"chrt": 1, "taskset": 1, "timeout": 1}
"""Number of arguments before the other program: the time in ``timeout 60 PROGRAM``."""

_MAX_WRAPPERS = 8
"""Number of words and wrappers before a program that are looked through, as in ``env A=1 nice``."""

_PER_HOST = frozenset(("nproc-per-node", "num-gpus", "npernode", "ppn"))
"""Options of starters for the processes of each host, in the form of ``_option_and_value``."""

_OTHER_HOSTS = frozenset(
    (
        # torchrun, composer
        "rdzv-endpoint",
        "master-addr",
        # accelerate launch; its file may name the hosts, too
        "main-process-ip",
        "config-file",
        "deepspeed-hostfile",
        # fabric run
        "main-address",
        # deepspeed, mpirun, horovodrun, colossalai run
        "H",
        "host",
        "hosts",
        "hostfile",
        "machinefile",
        "default-hostfile",
        "host-discovery-script",
        "f",
    )
)
"""Options that say where the other hosts are, in the form of ``_option_and_value``."""

_NUMBERS_OF_HOSTS = frozenset(
    (
        "nnodes",
        "num-nodes",
        "nodes",
        "num-machines",
        "node-rank",
        "machine-rank",
        "master-port",
        "main-process-port",
        "main-port",
        "rdzv-backend",
        "rdzv-conf",
        "rdzv-id",
        "standalone",
    )
)
"""Other options about the hosts of a job, in the form of ``_option_and_value``."""

_VARIABLES_OF_TORCHRUN = ("PET_RDZV_ENDPOINT", "PET_MASTER_ADDR")
"""torchrun reads its options from variables, too: ``PET_`` and the name of the option."""

_THIS_HOST = re.compile(r"\[?(localhost|127(\.\d+){3}|::1|0\.0\.0\.0)\]?(:\d*)?", re.IGNORECASE)
"""Address by which a host reaches itself alone, with or without a port."""


class Starter(NamedTuple):
    """A program that starts ranks.

    Attributes:
        name: Its name in a message, such as ``torchrun`` or ``accelerate launch``.
        words: Its command line.
        arguments: The arguments in ``words``.
    """

    name: str
    words: tuple[str, ...]
    arguments: tuple[str, ...]


def starter_of(words: Sequence[str]) -> Starter | None:
    """Return the program that starts ranks in a command line; None for another command line.

    >>> starter_of(("env", "A=1", "nohup", "/opt/venv/bin/torchrun", "train.py")).name
    'torchrun'
    """
    words = tuple(words)
    # Each turn takes off an assignment, a shell or a wrapper; with more of them the answer is None.
    for _ in range(_MAX_WRAPPERS):
        if not words:
            return None
        name = _base_name(words[0])
        if _ASSIGNMENT.fullmatch(words[0]):
            words = words[1:]
        elif name in _SHELLS:
            words = _command_of_shell(words)
        elif name in _WRAPPERS:
            words = _wrapped_command(name, words[1:])
        elif _PYTHON.fullmatch(name):
            return _starter_of_python(words)
        else:
            return _starter_of_program(name, words)
    return None


def _base_name(path: str) -> str:
    """Return the last part of a path: ``/opt/venv/bin/torchrun`` is ``torchrun``."""
    return path.rpartition("/")[2]


def check(environment: Environment, program: Program, placement: Placement) -> list[Problem]:
    """Return a problem if both the mode and the program of a job start ranks; else ``[]``.

    The advice of the problem is the command line or the entry point to use instead.
    """
    mode = MODES[placement.mode]
    is_of_tasks = placement.tasks is not None
    # A mode with a program of its own, such as mpirun, starts ranks with it.
    starts_ranks = is_of_tasks or (bool(mode.programs) and not mode.one_per_host)
    if not starts_ranks:
        return []
    starter = starter_of(words_of(program))
    if starter is None:
        return []
    first_starter = f"mode {placement.mode}"
    if is_of_tasks:
        first_starter = environment.platform.platform
    problem = (
        f"{first_starter} starts the ranks,"
        f" and the program {starter.name} would start ranks in each of them"
    )
    script = script_line_of(starter)
    if is_of_tasks:
        advice = f"write: train -- {script}; or start one task on each host"
    elif environment.invocation.program:
        advice = f"write: {command_line_of(starter, placement.mode)}"
        is_one_host = len(placement.hosts) == 1
        if is_one_host or knows_other_hosts(starter, environment.variables):
            advice += f", or: train --mode none -- {shlex.join(starter.words)}"
    else:
        advice = (
            f"make the script itself the entry point ({script}), or switch the distribution off"
        )
    return [Problem(problem, "the program", advice)]


def mode_of(starter: Starter) -> str:
    """Return the mode that starts ranks as the starter does: ``mpi`` or ``torch_distributed``."""
    if starter.name in (*_MPI_STARTERS, "horovodrun"):
        return "mpi"
    return "torch_distributed"


def command_line_of(starter: Starter, mode: str, command: str = "train") -> str:
    """Return the command line of the launcher that replaces a starter, for a message.

    For example ``train --mode torch_distributed --processes-per-host 2 -- train.py --lr 0.1``.

    Args:
        starter: The starter.
        mode: The mode that replaces it.
        command: The launcher's command: ``train``, or for example ``train explain``.
    """
    options = f"--mode {mode}"
    count = _processes_per_host_of(starter)
    if count:
        options += f" --processes-per-host {count}"
    return f"{command} {options} -- {script_line_of(starter)}"


def script_line_of(starter: Starter) -> str:
    """Return the script behind a starter's options, with its arguments: ``train.py --lr 0.1``.

    ``YOUR_SCRIPT.py`` if no word is a script.
    """
    _, script = _split_at_script(starter)
    return shlex.join(script or ("YOUR_SCRIPT.py",))


def is_option_of_hosts(word: str) -> bool:
    """Return whether a starter has this option about the hosts of a job: ``--node_rank=1``."""
    option, _ = _option_and_value((word,), 0)
    return option in _OTHER_HOSTS or option in _NUMBERS_OF_HOSTS


def knows_other_hosts(starter: Starter, variables: Mapping[str, str]) -> bool:
    """Return whether a starter is told where the other hosts of the job are.

    A starter of a scheduler, such as srun, asks the scheduler.

    Args:
        starter: The starter.
        variables: The environment of the host; torchrun reads its options there, too.
    """
    if starter.name.partition(" ")[0] in _SCHEDULER_STARTERS:
        return True
    addresses: list[str] = []
    if "torch" in starter.name:
        addresses += [variables.get(name, "") for name in _VARIABLES_OF_TORCHRUN]
    options, _ = _split_at_script(starter)
    for index in range(len(options)):
        option, value = _option_and_value(options, index)
        if option in _OTHER_HOSTS:
            addresses.append(value)
    return any(address and not _THIS_HOST.fullmatch(address) for address in addresses)


def words_of(program: Program) -> tuple[str, ...]:
    """Return the command line of a job's program; ``()`` for a shell script, which is not read."""
    entry = program.entry
    if entry.kind == "line":
        return ("sh", "-c", entry.name)
    if entry.kind in ("module", "package"):
        return ("python", "-m", entry.module, *program.arguments)
    if entry.kind == "script":
        return ("python", entry.name, *program.arguments)
    if entry.kind == "command":
        return (entry.name, *program.arguments)
    return ()


def _command_of_shell(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the first command of ``bash -c LINES`` that starts ranks; ``()`` for none.

    ``()`` also for a line with an open quote before such a command. words: the command line of the
    shell.
    """
    script = _script_of_shell(words)
    for line in script.splitlines():
        try:
            lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
            lexer.whitespace_split = True
            tokens = list(lexer)
        except ValueError:
            return ()
        for command in _split_commands(tokens):
            while command and _ASSIGNMENT.fullmatch(command[0]):
                command = command[1:]
            if command and starter_of(command) is not None:
                return command
    return ()


def _script_of_shell(words: tuple[str, ...]) -> str:
    """Return LINES of ``bash -c LINES``, also of ``bash -lc LINES``; ``""`` without ``-c``."""
    for index, word in enumerate(words):
        if re.fullmatch(r"-[a-z]*c", word):
            return "".join(words[index + 1 : index + 2])
    return ""


def _split_commands(tokens: Sequence[str]) -> list[tuple[str, ...]]:
    """Split a line of shell at ``;``, ``&&`` and ``|`` into commands."""
    commands: list[tuple[str, ...]] = [()]
    for token in tokens:
        is_separator = bool(token) and not token.strip(";&|")
        if is_separator:
            commands.append(())
        else:
            commands[-1] = (*commands[-1], token)
    return commands


def _wrapped_command(wrapper: str, words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the command behind a wrapper: ``-k 5 60 torchrun`` of timeout is ``torchrun``.

    words: the words behind the wrapper's name.
    """
    arguments_left = _ARGUMENTS_OF_WRAPPER.get(wrapper, 0)
    index = 0
    while index < len(words):
        word = words[index]
        if word == "--":
            # The wrapper's own arguments stand behind it, too: ``timeout -- 60 torchrun``.
            return words[index + 1 + arguments_left :]
        if wrapper == "env" and word in _COMMAND_IN_ONE_WORD and index + 1 < len(words):
            return (*words[index + 1].split(), *words[index + 2 :])
        if word.startswith("-"):
            # ``-k5`` and ``--signal=TERM`` have their values in the same word.
            is_alone = len(word) == 2 or word.startswith("--")
            has_value = is_alone and word.lstrip("-") in _WRAPPERS[wrapper]
            index += 1
            if has_value:
                index += 1
        elif _ASSIGNMENT.fullmatch(word):
            index += 1
        elif arguments_left:
            arguments_left -= 1
            index += 1
        else:
            break
    return words[index:]


def _starter_of_python(words: tuple[str, ...]) -> Starter | None:
    """Return the starter that Python runs, as a module (``-m``) or as a file; None for another.

    words: the command line, Python first.
    """
    for index, word in enumerate(words[1:], 1):
        if word == "-m" and index + 1 < len(words):
            module = words[index + 1]
            if module in _MODULES:
                return Starter(f"python -m {module}", words, words[index + 2 :])
            # Some starters are modules with the name of their program: python -m deepspeed.
            return _starter_of_program(module, words[index + 1 :])
        if not word.startswith("-"):
            return _starter_of_program(_base_name(word), words[index:])
        if word == "-c":
            return None
    return None


def _starter_of_program(name: str, words: tuple[str, ...]) -> Starter | None:
    """Return the starter that a program is, None for another program. words: its command line."""
    if name in _SUBCOMMANDS:
        subcommand = _SUBCOMMANDS[name]
        if words[1:2] != (subcommand,):
            return None
        return Starter(f"{name} {subcommand}", words, words[2:])
    if name in _PROGRAMS:
        return Starter(name, words, words[1:])
    return None


def _split_at_script(starter: Starter) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split a starter's arguments into its own options, and the script with its arguments.

    The second part is ``()`` if no word is a script.
    """
    arguments = starter.arguments
    for index, word in enumerate(arguments):
        if word.endswith(".py"):
            return arguments[:index], arguments[index:]
        if word in ("-m", "--module") and index + 1 < len(arguments):
            return arguments[:index], ("-m", *arguments[index + 1 :])
    return arguments, ()


def _processes_per_host_of(starter: Starter) -> str:
    """Return the processes per host in a starter's options, such as ``8``; ``""`` for no number."""
    options, _ = _split_at_script(starter)
    for index in range(len(options)):
        option, value = _option_and_value(options, index)
        if option not in _PER_HOST:
            continue
        if value.isdecimal():
            return value
        return ""
    return ""


def _option_and_value(words: Sequence[str], index: int) -> tuple[str, str]:
    """Return the option at a place of a command line, in one spelling, and its value.

    ``--nproc_per_node=2``, ``-nproc-per-node 2`` are both ``("nproc-per-node", "2")``. Two empty
    texts for a word that is not an option; the value is ``""`` at the end of the line.
    """
    word = words[index]
    if not word.startswith("-"):
        return "", ""
    option, equals, value = word.lstrip("-").partition("=")
    if not equals:
        value = "".join(words[index + 1 : index + 2])
    return option.replace("_", "-"), value
