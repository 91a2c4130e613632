"""The options of each command, declared once: they are parsed, and shown in the
help, from the same rows. Pure.
"""

from __future__ import annotations

from typing import Mapping, NamedTuple, Sequence

from trainworks_launcher.contract import names, suggestions
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
        refusals: Values that are known but not allowed -> why.
        repeated: It may be given several times.
        needed: It must be given.
    """

    name: str
    value: str
    text: str
    choices: tuple[str, ...] = ()
    refusals: tuple[tuple[str, str], ...] = ()
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
_OTHER_MODES = tuple((row.name, row.selected_by) for row in MODES.values() if row.selected_by)
_HOW = (
    Option(
        "--mode",
        "MODE",
        "how the processes are started; default: the job's hyperparameters, else none",
        _MODES,
        _OTHER_MODES,
    ),
    Option("--processes-per-host", "N", "processes on each host; default: one per GPU"),
    Option(
        "--max-restarts", "N", "start the ranks again after a failure, at most N times; default: 0"
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
"""The word before the program and its arguments."""

_COUNT_LIMIT = 10**6
"""Numbers of processes or restarts are below this."""


def _describe_unknown_word(command: Command, before: Sequence[str], rest: Sequence[str]) -> str:
    """Return the error for a word that is not a command, with advice: it may be a program.

    Args:
        command: The command.
        before: The words before it, which were understood.
        rest: The word, and those after it.
    """
    from trainworks_launcher.job import starters  # takes time, and only a refusal needs it

    words = ["train"]
    if command is not TRAIN:
        words.append(command.name)
    starter = starters.starter_of(rest)
    if starter is not None:
        mode = starters.mode_of(starter)
        line = starters.command_line_of(starter, mode, " ".join(words))
        return (
            f"{rest[0]!r} is not understood;"
            f" mode {mode} does what {starter.name} does, write: {line}"
        )
    suggestion = suggestions.nearest(rest[0], [row.name for row in COMMANDS])
    question = "to start"
    if suggestion:
        question = f"did you mean {suggestion!r}? If it is"
    line = " ".join((*words, *before, PROGRAM, *rest))
    return f"{rest[0]!r} is not understood; {question} a program, write: {line}"


def _describe_unknown_option(command: Command, name: str) -> str:
    """Return the error for an option that the command does not have, with advice."""
    from trainworks_launcher.job import starters  # takes time, and only a refusal needs it

    error = f"{command.name} has no option {name!r}"
    if starters.is_option_of_hosts(name):
        return (
            f"{error}; leave it out: the hosts come from the platform,"
            f" or from the variables {names.HOSTS_VARIABLE} and {names.HOST_VARIABLE}"
        )
    candidates = [option.name for option in command.options]
    if command is TRAIN:
        candidates += [row.name for row in COMMANDS]
        candidates += ["--help", "--version"]
    return f"{error}; {nearest(name, candidates)}"


def _check_choice(option: Option, value: str) -> None:
    """Refuse a value that is not one of the option's choices: raises UsageError."""
    if not option.choices or value in option.choices:
        return
    refusals = dict(option.refusals)
    near = suggestions.nearest(value, (*option.choices, *refusals))
    if near in refusals:
        raise UsageError(f"{option.name} cannot choose {near!r}: {refusals[near]}")
    raise UsageError(f"{option.name} {value!r} is not known; {nearest(value, option.choices)}")


def parse(command: Command, words: Sequence[str]) -> Parsed:
    """Parse the options of a command; ``--name value`` and ``--name=value`` are the same.

    Args:
        command: The command.
        words: The words after it.

    Returns:
        Option -> its values, in order; ``("",)`` for an option without a value.

    Raises:
        UsageError: An option is unknown, given twice or missing, or its value is missing, not
            allowed or not one of its choices.
    """
    known = {option.name: option for option in command.options}
    parsed: dict[str, tuple[str, ...]] = {}
    waiting = list(words)
    while waiting:
        name, equals, value = waiting.pop(0).partition("=")
        option = known.get(name)
        if option is None and not name.startswith("-"):
            place = len(words) - len(waiting) - 1
            raise UsageError(_describe_unknown_word(command, words[:place], words[place:]))
        if option is None:
            raise UsageError(_describe_unknown_option(command, name))
        if not option.value:
            if equals:
                raise UsageError(f"{name} takes no value")
        elif not equals:
            if not waiting:
                raise UsageError(f"{name} needs a value: {name} {option.value}")
            value = waiting.pop(0)
        _check_choice(option, value)
        if name in parsed and not option.repeated:
            raise UsageError(f"{name} is given twice")
        parsed[name] = (*parsed.get(name, ()), value)
    missing = []
    for option in command.options:
        if option.needed and option.name not in parsed:
            missing.append(option.name)
    if missing:
        raise UsageError(f"{command.name} needs {' and '.join(missing)}")
    return parsed


def value_of(parsed: Parsed, name: str, default: str = "") -> str:
    """Return the value of an option that may be given once; the default if it is not given."""
    values = parsed.get(name)
    if not values:
        return default
    return values[0]


def _command_in(words: Sequence[str]) -> tuple[Command, list[str]]:
    """Find the command in the words before the program.

    Returns:
        The command, which may stand at any place, and the other words. TRAIN if there is none.
    """
    options_with_value: set[str] = set()
    for command in (TRAIN, *COMMANDS):
        options_with_value.update(option.name for option in command.options if option.value)
    commands = {command.name: command for command in COMMANDS}
    for index, word in enumerate(words):
        # The value of an option may be the name of a command: --host check.
        is_value = index > 0 and words[index - 1] in options_with_value
        if word in commands and not is_value:
            return commands[word], [*words[:index], *words[index + 1 :]]
    return TRAIN, list(words)


def read(words: Sequence[str], program: Sequence[str]) -> tuple[Command, Parsed, Invocation]:
    """Read a command line.

    Args:
        words: The words before PROGRAM.
        program: PROGRAM and the words after it; ``()`` without PROGRAM.

    Returns:
        The command, its options, and the invocation: the settings and the program.

    Raises:
        UsageError: The command line is not understood.
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
        is_number = count.isdecimal() and 0 < int(count) < _COUNT_LIMIT
        if count and not is_number:
            raise UsageError(f"{name} {count!r} is not a whole number of at least 1")
        counts.append(int(count or 0))
    return command, parsed, Invocation(tuple(program[1:]), value_of(parsed, "--mode"), *counts)


def options_help(commands: Sequence[Command] = (TRAIN, *COMMANDS)) -> str:
    """Return the options of commands, for the help: each once, with all commands that have it.

    At most 120 columns.
    """
    commands_of_option: dict[Option, list[str]] = {}
    for command in commands:
        for option in command.options:
            commands_of_option.setdefault(option, []).append(command.name)
    # Options of the same commands stand together.
    groups: dict[tuple[str, ...], list[Option]] = {}
    for option, command_names in commands_of_option.items():
        groups.setdefault(tuple(command_names), []).append(option)

    lines: list[str] = []
    for command_names_of_group, options in groups.items():
        *others, last = command_names_of_group
        heading = f"Options of {last}:"
        if others:
            heading = f"Options of {', '.join(others)} and {last}:"
        lines.append(heading)
        for option in options:
            word = f"{option.name} {option.value}".rstrip()
            needed = " (needed)" if option.needed else ""
            lines.append(f"  {word:<30}{option.text}{needed}")
    return "\n".join(lines) + "\n"
