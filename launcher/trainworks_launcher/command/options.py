"""The options of each command, declared once: they are parsed, and shown in the
help, from the same rows. Pure.
"""

from __future__ import annotations

from typing import Mapping, NamedTuple, Sequence

from trainworks_launcher.contract import suggestions
from trainworks_launcher.contract.errors import nearest
from trainworks_launcher.contract.modes import MODES
from trainworks_launcher.environment.command_line import Invocation


class UsageError(Exception):
    """A command line that is not understood; the text says why and names the nearest right word."""


class Option(NamedTuple):
    """One option.

    Attributes:
        name: With its dashes.
        value: What stands for its value in the help; ``""`` for a switch.
        text: One line of help.
        choices: Values that are allowed; ``()`` for any.
        repeated: It may be given several times.
        needed: It must be given.
    """

    name: str
    value: str
    text: str
    choices: tuple[str, ...] = ()
    repeated: bool = False
    needed: bool = False


class Command(NamedTuple):
    """A command of ``train`` with its options."""

    name: str
    text: str
    options: tuple[Option, ...]


Parsed = Mapping[str, "tuple[str, ...]"]
"""Option -> its values; a switch has one empty value. An option that was not given is not there."""

_HOST = Option("--host", "NAME", "another host of the job; default: this one")
SECRETS = Option("--show-secrets", "", "do not mask passwords, tokens and keys")

_MODES = ("none", *(row.name for row in MODES.values() if row.switch))
_HOW = (
    Option(
        "--mode",
        "MODE",
        "how the processes are started; default: the job's hyperparameters, else none",
        _MODES,
    ),
    Option("--processes-per-host", "N", "processes on each host; default: one per GPU"),
    Option(
        "--max-restarts", "N", "start all hosts again after a failure, at most N times; default: 0"
    ),
)

TRAIN = Command("train", "run this host's part of the training job", _HOW)
"""The command without a word of its own."""

COMMANDS: tuple[Command, ...] = (
    Command("--plan", "print what would be run, as JSON; run nothing", (_HOST, SECRETS, *_HOW)),
    Command(
        "explain",
        "print every flag and variable with its origin and reason; run nothing",
        (
            _HOST,
            Option("--format", "FORMAT", "table (default) or json", ("table", "json")),
            SECRETS,
            *_HOW,
        ),
    ),
    Command(
        "check",
        "check this host as a job does before it starts; run nothing",
        (
            Option(
                "bandwidth",
                "",
                "then time an all-reduce over the GPUs of all hosts: start it on each of them",
            ),
        ),
    ),
)
"""The commands beside TRAIN."""

PROGRAM = "--"
"""What the program and its arguments stand behind."""


def _no_word(before: Sequence[str], rest: Sequence[str]) -> str:
    """Return what to write instead of a word that is no command: a program
    stands behind PROGRAM.
    """
    near = suggestions.nearest(rest[0], [row.name for row in COMMANDS])
    meant = f"did you mean {near!r}? If it is" if near else "to start"
    write = " ".join(("train", *before, PROGRAM, *rest))
    return f"{rest[0]!r} is not understood; {meant} a program, write: {write}"


def parse(command: Command, words: Sequence[str]) -> Parsed:
    """Read the words after the command; ``--name value`` and ``--name=value`` are the same.

    Raises UsageError for an unknown option, a value that is missing, too much or not allowed, a
    needed one not given.
    """
    known = {option.name: option for option in command.options}
    found: dict[str, tuple[str, ...]] = {}
    waiting = list(words)
    while waiting:
        name, equals, value = waiting.pop(0).partition("=")
        option = known.get(name)
        if option is None and not name.startswith("-"):
            before = list(words[: len(words) - len(waiting) - 1])
            if command is not TRAIN:
                before.insert(0, command.name)
            raise UsageError(_no_word(before, [name + equals + value, *waiting]))
        if option is None:
            candidates = list(known)
            if command is TRAIN:
                candidates += [row.name for row in COMMANDS]
                candidates += ["--help", "--version"]
            raise UsageError(f"{command.name} has no option {name!r}; {nearest(name, candidates)}")
        if not option.value:
            if equals:
                raise UsageError(f"{name} takes no value")
        elif not equals:
            if not waiting:
                raise UsageError(f"{name} needs a value: {name} {option.value}")
            value = waiting.pop(0)
        if option.choices and value not in option.choices:
            raise UsageError(f"{name} {value!r} is not known; {nearest(value, option.choices)}")
        if name in found and not option.repeated:
            raise UsageError(f"{name} is given twice")
        found[name] = (*found.get(name, ()), value)
    missing = [
        option.name for option in command.options if option.needed and option.name not in found
    ]
    if missing:
        raise UsageError(f"{command.name} needs {' and '.join(missing)}")
    return found


def value_of(parsed: Parsed, name: str, default: str = "") -> str:
    """Return the value of an option that is given at most once."""
    values = parsed.get(name)
    return values[0] if values else default


def _command_in(words: Sequence[str]) -> tuple[Command, list[str]]:
    """Return the command that the words name, at any place, and the words without its name.

    TRAIN if there is none.
    """
    valued = {
        option.name for command in (TRAIN, *COMMANDS) for option in command.options if option.value
    }
    named = {command.name: command for command in COMMANDS}
    for index, word in enumerate(words):
        if word in named and (index == 0 or words[index - 1] not in valued):
            return named[word], [*words[:index], *words[index + 1 :]]
    return TRAIN, list(words)


def read(words: Sequence[str], program: Sequence[str]) -> tuple[Command, Parsed, Invocation]:
    """Read a command line.

    Args:
        words: What stands before PROGRAM.
        program: PROGRAM and what follows it; ``()`` if it is not there.

    Returns:
        The command, its options, and what they and the program ask for.

    Raises:
        UsageError: It is not understood.
    """
    command, rest = _command_in(words)
    parsed = parse(command, rest)
    if program and not program[1:]:
        raise UsageError(
            f"no program after {PROGRAM!r}; write for example: train {PROGRAM} train.py --epochs 3"
        )
    counts = []
    for name in ("--processes-per-host", "--max-restarts"):
        count = value_of(parsed, name)
        if count and not (count.isdecimal() and 0 < int(count) < 10**6):
            raise UsageError(f"{name} {count!r} is not a whole number of at least 1")
        counts.append(int(count or 0))
    return command, parsed, Invocation(tuple(program[1:]), value_of(parsed, "--mode"), *counts)


def options_help(commands: Sequence[Command] = (TRAIN, *COMMANDS)) -> str:
    """Return the options of commands, for the help: each once, with all commands that have it.

    At most 120 columns.
    """
    having: dict[Option, list[str]] = {}
    for command in commands:
        for option in command.options:
            having.setdefault(option, []).append(command.name)
    lines: list[str] = []
    for names in dict.fromkeys(map(tuple, having.values())):
        *others, last = names
        lines.append(
            f"Options of {', '.join(others)} and {last}:" if others else f"Options of {last}:"
        )
        for option in (option for option, found in having.items() if tuple(found) == names):
            word = f"{option.name} {option.value}".rstrip()
            lines.append(f"  {word:<30}{option.text}{' (needed)' if option.needed else ''}")
    return "\n".join(lines) + "\n"
