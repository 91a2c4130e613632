"""Programs that start ranks themselves, such as torchrun: refused in a mode that starts ranks, too.

Two starters would make worlds of their own that know nothing of each other, and each of them would
end well. Such a program is found in the words of a command line, behind ``env``, ``nohup`` or
``bash -c``. What a shell script starts is not read: each rank compares itself with the plan
(``programs/python/sitecustomize.py``). Pure.
"""

from __future__ import annotations

import re
import shlex
from typing import NamedTuple, Sequence

from trainworks_launcher.contract.errors import Problem
from trainworks_launcher.contract.modes import MODES
from trainworks_launcher.environment.environment import Environment
from trainworks_launcher.job.placement import Placement
from trainworks_launcher.job.program import Program

_PROGRAMS = frozenset(
    (
        *(
            "torchrun",
            "torchrun-script",
            "deepspeed",
            "deepspeed.pt",
            "horovodrun",
            "hyperpodrun",
            "composer",
        ),
        *(
            "mpirun",
            "mpiexec",
            "mpiexec.hydra",
            "mpirun.mpich",
            "mpiexec.mpich",
            "mpirun.openmpi",
            "mpiexec.openmpi",
        ),
        *("orterun", "prterun", "prun", "srun", "jsrun", "flux", "aprun"),
    )
)
_WITH_A_WORD = {
    "accelerate": "launch",
    "colossalai": "run",
    "fabric": "run",
    "lightning": "run",
    "flux": "run",
}
"""Programs that start ranks by one of their commands only."""

_MODULES = frozenset(
    (
        *(
            "torch.distributed.run",
            "torch.distributed.launch",
            "torch.distributed.elastic.launcher.api",
        ),
        *(
            "accelerate.commands.launch",
            "accelerate.commands.accelerate_cli",
            "deepspeed.launcher.runner",
        ),
        *("horovod.runner.launch", "composer.cli.launcher", "torch_xla.distributed.xla_spawn"),
    )
)
_SHELLS = frozenset(("bash", "sh", "dash", "zsh", "ksh"))
_PYTHON = re.compile(r"python(\d+(\.\d+)*)?")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)

_IN_FRONT = {
    "chrt": ("",),
    "doas": ("u",),
    "env": ("u", "C", "S"),
    "exec": ("a",),
    "ionice": ("c", "n", "p"),
    "nice": ("n",),
    "nohup": ("",),
    "numactl": ("m", "N", "C", "i"),
    "setsid": ("",),
    "stdbuf": ("i", "o", "e"),
    "sudo": ("u", "g"),
    "taskset": ("",),
    "time": ("f", "o"),
    "timeout": ("k", "s"),
    "xargs": ("n", "P"),
}
"""Program that becomes another one -> its short options with a value of their own."""

_WORDS_FIRST = {"chrt": 1, "taskset": 1, "timeout": 1}
"""How many words such a program takes before the other one: a time, a mask."""

_PER_HOST = frozenset(("--nproc-per-node", "--nproc_per_node", "--num_gpus", "--npernode", "--ppn"))


class Starter(NamedTuple):
    """A program that starts ranks.

    Attributes:
        name: What a person calls it: ``torchrun``, ``accelerate launch``.
        words: It and its arguments.
        rest: Its arguments.
    """

    name: str
    words: tuple[str, ...]
    rest: tuple[str, ...]


def starter_of(words: Sequence[str]) -> Starter | None:
    """Return the program that starts ranks in a command line, by its name or path.

    None if there is none.

    >>> starter_of(("env", "A=1", "nohup", "/opt/venv/bin/torchrun", "train.py")).name
    'torchrun'
    """
    words = tuple(words)
    for _ in range(8):  # programs in front of programs
        if not words:
            return None
        name = words[0].rpartition("/")[2]
        if _ASSIGNMENT.fullmatch(words[0]):
            words = words[1:]
        elif name in _SHELLS:
            words = _of_shell(words)
        elif name in _IN_FRONT:
            words = _behind(name, words[1:])
        elif _PYTHON.fullmatch(name):
            return _of_python(words)
        else:
            return _of_program(name, words)
    return None


def check(environment: Environment, program: Program, placement: Placement) -> list[Problem]:
    """Return a problem if the program of a mode that starts ranks is a starter itself."""
    mode = MODES[placement.mode]
    starts = (bool(mode.programs) and not mode.one_per_host) or placement.tasks is not None
    starter = starter_of(words_of(program)) if starts else None
    if starter is None:
        return []
    by = environment.platform.platform if placement.tasks is not None else f"mode {placement.mode}"
    problem = (
        f"{by} starts the ranks, and the program {starter.name} would start ranks in each of them"
    )
    script = shlex.join(_script_of(starter))
    if placement.tasks is not None:
        advice = f"write: train -- {script}; or start one task on each host"
    elif environment.invocation.program:
        count = _count_of(starter)
        per_host = f" --processes-per-host {count}" if count else ""
        advice = (
            f"write one of the two: train --mode {placement.mode}{per_host} -- {script}"
            f" | train --mode none -- {shlex.join(starter.words)}"
        )
    else:
        advice = (
            f"make the script itself the entry point ({script}), or switch the distribution off"
        )
    return [Problem(problem, "the program", advice)]


def words_of(program: Program) -> tuple[str, ...]:
    """Return the command line of a job's program, as far as it can be read."""
    entry = program.entry
    if entry.kind == "line":
        return ("sh", "-c", entry.name)
    if entry.kind in ("module", "package"):
        return ("python", "-m", entry.module, *program.arguments)
    if entry.kind == "script":
        return ("python", entry.name, *program.arguments)
    return (entry.name, *program.arguments) if entry.kind == "command" else ()


def _of_shell(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the words of the first command of ``bash -c LINE``; () for a script."""
    place = next((index for index, word in enumerate(words) if re.fullmatch(r"-[a-z]*c", word)), 0)
    if not place or place + 1 >= len(words):
        return ()
    for line in words[place + 1].splitlines():
        try:
            lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
            lexer.whitespace_split = True
            found = list(lexer)
        except ValueError:
            return ()
        for command in _commands(found):
            while command and _ASSIGNMENT.fullmatch(command[0]):
                command = command[1:]
            if command and starter_of(command) is not None:
                return command
    return ()


def _commands(words: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the commands of a line of shell that ``;``, ``&&`` and ``|`` divide."""
    found: list[tuple[str, ...]] = [()]
    for word in words:
        if word and not word.strip(";&|"):
            found.append(())
        else:
            found[-1] = (*found[-1], word)
    return found


def _behind(name: str, words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the words of the program that one such as ``env`` or ``timeout`` becomes."""
    index, first = 0, _WORDS_FIRST.get(name, 0)
    while index < len(words):
        word = words[index]
        if word == "--":
            index += 1
            break
        if not word.startswith("-"):
            if not first and not _ASSIGNMENT.fullmatch(word):
                break
            first -= 0 if _ASSIGNMENT.fullmatch(word) else 1
            index += 1
            continue
        takes = len(word) == 2 and word[1] in _IN_FRONT[name]
        index += 2 if takes else 1
    return words[index:]


def _of_python(words: tuple[str, ...]) -> Starter | None:
    """Return the starter that Python runs as a module (``-m``) or as a file."""
    for index, word in enumerate(words[1:], 1):
        if word == "-m" and index + 1 < len(words):
            module = words[index + 1]
            if module in _MODULES:
                return Starter(f"python -m {module}", words, words[index + 2 :])
            if module in _WITH_A_WORD or module in _PROGRAMS:
                return _of_program(module, words[index + 1 :])
            return None
        if not word.startswith("-"):
            return _of_program(word.rpartition("/")[2], words[index:])
        if word == "-c":
            return None
    return None


def _of_program(name: str, words: tuple[str, ...]) -> Starter | None:
    if name in _WITH_A_WORD:
        if words[1:2] != (_WITH_A_WORD[name],):
            return None
        return Starter(f"{name} {words[1]}", words, words[2:])
    return Starter(name, words, words[1:]) if name in _PROGRAMS else None


def _script_of(starter: Starter) -> tuple[str, ...]:
    """Return the script behind a starter's options, with its arguments.

    A stand-in where it cannot be told.
    """
    rest = starter.rest
    for index, word in enumerate(rest):
        if word.endswith(".py"):
            return rest[index:]
        if word in ("-m", "--module") and index + 1 < len(rest):
            return ("-m", *rest[index + 1 :])
    return ("YOUR_SCRIPT.py",)


def _count_of(starter: Starter) -> str:
    """Return the processes of each host that a starter is asked for, ``""`` if
    that is no number or not there.
    """
    for index, word in enumerate(starter.rest):
        option, equals, value = word.partition("=")
        if option in _PER_HOST:
            value = value if equals else "".join(starter.rest[index + 1 : index + 2])
            return value if value.isdecimal() else ""
    return ""
