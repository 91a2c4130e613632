"""Describe a command: its options, and a help with examples, exit statuses and the next command.

A ``Grammar`` is an ``argparse`` parser with the command's ``Manual``, for ``--help``, ``build.py
help --format json`` and the tests that run the examples.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

from trainworks.errors import (
    CommandLineError,
    CompatibilityError,
    EngineError,
    EngineUnavailableError,
    FactsError,
    ImageTestError,
    InterruptionError,
    LockError,
    OutputError,
    TrainworksError,
    UnknownNameError,
)
from trainworks.plan.names import join_problems, suggest_names
from trainworks.suggestions import nearest
from trainworks.terminal.output import put

WIDTH = 100
"""Columns of a help at most."""

OPTION_COLUMNS = 26
"""The column at which the text about an option begins."""

TARGET = "pytorch-2.4.1-cu121-py311-debian12"
CPU_TARGET = "pytorch-2.13.0-cpu-py311-debian12"
"""Targets for examples; a test looks for them in the matrix."""


@dataclass(frozen=True)
class Example:
    """A command line that works. A test parses each one, and runs those that need nothing.

    Attributes:
        words: The words after ``python build.py``.
        does: The effect, in the imperative, without a full stop.
        needs: The needs of the example besides a checkout, such as ``an engine``, or ``""``.
    """

    words: str
    does: str
    needs: str = ""

    @property
    def line(self) -> str:
        """The command line as it is typed: ``python build.py push my/train:1``."""
        return f"python build.py {self.words}".rstrip()

    @property
    def arguments(self) -> tuple[str, ...]:
        """``words`` as a shell splits them."""
        return tuple(shlex.split(self.words))


@dataclass(frozen=True)
class Source:
    """A file, folder or environment variable that a command reads besides its command line.

    Attributes:
        name: The name or names: ``images/, templates/``.
        meaning: The content, for people.
    """

    name: str
    meaning: str


FACTS = Source(
    "images/, templates/",
    "rows and recipes: of --root, else of the checkout or of the installed package",
)
HOST_SETTINGS = Source(
    "pip.conf, PIP_*, *_proxy, NETRC", "this machine's indexes, proxies, CA and logins"
)
APT_SETTINGS = Source("/etc/apt", "this machine's Debian archives")
SNAPSHOT = Source("TRAINWORKS_SNAPSHOT", "address of Debian archives of other days (docs/lock.md)")
OSV_SERVICE = Source(
    "TRAINWORKS_OSV", "service with OSV's interface; default: images/advisories.toml; empty: none"
)
DOCKER_HOST = Source("DOCKER_HOST", "address of the Docker daemon; default: the local one")
LOGINS = Source("~/.docker/config.json", "logins of registries; ECR's come from AWS (docs/ship.md)")
MEMORY = Source(
    "XDG_CACHE_HOME", "folder for caches, which can be deleted at any time; default: ~/.cache"
)

PLANNING_ERRORS = (FactsError, UnknownNameError, LockError, CompatibilityError)
"""The errors of every command that plans a target."""

IMAGE_ERRORS = (EngineError, EngineUnavailableError, ImageTestError)
"""The errors of every command that runs something in an image."""


Check = Callable[[argparse.Namespace, Path], Sequence[str | UnknownNameError]]
"""Returns the problems of parsed words, given the checkout: words that exclude each other, and
unknown names.
"""


@dataclass(frozen=True, kw_only=True)
class Manual:
    """The manual of one command, besides its options.

    Attributes:
        command: The command's name.
        summary: The effect in one line of a list, in the imperative.
        details: The effect in a few sentences.
        examples: Command lines that work, the simplest first.
        result: The files and streams that the command writes, and the next command.
        done: The meaning of exit status 0.
        fails: The errors of the command, besides those of every command.
        reads: Files and variables that the command reads.
        see_also: Commands (``push``) and pages (``docs/ship.md``).
        usage: The usage line; default: the required words and ``[options]``.
        program: The program in the usage line; default: ``build.py COMMAND``.
    """

    command: str
    summary: str
    details: str
    examples: tuple[Example, ...]
    result: str
    done: str = "done"
    fails: tuple[type[TrainworksError], ...] = ()
    reads: tuple[Source, ...] = ()
    see_also: tuple[str, ...] = ()
    usage: str | None = None
    program: str = ""

    @property
    def exit_statuses(self) -> tuple[tuple[int, str], ...]:
        """The exit statuses of the command with their meanings, the lowest first."""
        return _list_exit_statuses(self.done, self.fails)


class Grammar(argparse.ArgumentParser):
    """The command line of one command.

    Attributes:
        manual: The manual of the command.
    """

    def __init__(self, manual: Manual, *, check: Check = lambda _options, _root: ()) -> None:
        """Make a grammar with ``--help`` and ``--root``.

        Args:
            manual: The manual of the command.
            check: Checks the values of the words; default: every value is right.
        """
        super().__init__(
            prog=manual.program or f"build.py {manual.command}",
            usage=manual.usage,
            formatter_class=_Formatter,
            allow_abbrev=False,
            add_help=False,
        )
        # From Python 3.14 on argparse writes colours, which are codes of a terminal.
        self.color = False
        self.manual = manual
        self._check = check
        # State of one parse: the problems so far, the result, and the options among the words,
        # each with the name of its value: ``{"fixed_tags": "--tag"}``.
        self._problems: list[str] = []
        self._parsed: argparse.Namespace | None = None
        self._used_options: dict[str, str] = {}
        general = self.add_argument_group("general")
        general.add_argument("-h", "--help", action="help", help="show this help")
        general.add_argument(
            "--root",
            type=Path,
            metavar="DIR",
            help="read this checkout, or a folder with your own images/ or templates/",
        )

    def arguments(self) -> list[dict[str, Any]]:
        """Return all options and positional arguments as objects for JSON, in the help's order."""
        arguments = []
        for group in self._action_groups:
            # argparse has no public way from a group to its actions.
            actions = group._group_actions  # noqa: SLF001
            arguments += [_describe_argument(action, group.title or "") for action in actions]
        return arguments

    def usage_line(self) -> str:
        """Return the usage line, with required options only: ``build.py push [options] IMAGE``."""
        if self.usage:
            return self.usage
        words = [self.prog, "[options]"]
        for argument in self.arguments():
            option_names, value = argument["names"], argument["value"]
            if option_names:
                if argument["required"]:
                    words.append(f"{option_names[-1]} {value}")
                continue
            if argument["repeats"]:
                value += " ..."
            if not argument["required"]:
                value = f"[{value}]"
            words.append(value)
        return " ".join(words)

    def as_values(self) -> dict[str, Any]:
        """Return everything in the help as an object for JSON."""
        manual = self.manual
        examples = [
            {"line": example.line, "does": example.does, "needs": example.needs}
            for example in manual.examples
        ]
        exit_statuses = [
            {"status": status, "meaning": meaning} for status, meaning in manual.exit_statuses
        ]
        return {
            "command": manual.command,
            "summary": manual.summary,
            "details": manual.details,
            "usage": self.usage_line(),
            "arguments": self.arguments(),
            "examples": examples,
            "result": manual.result,
            "exit_statuses": exit_statuses,
            "reads": [asdict(source) for source in manual.reads],
            "see_also": list(manual.see_also),
        }

    def format_help(self) -> str:
        """Return the help, as wide as the terminal but at most ``WIDTH`` columns.

        argparse writes ``usage``, ``description`` and ``epilog`` of this parser around the
        options; they are set from the manual.
        """
        manual = self.manual
        width = _find_width()
        self.usage = self.usage_line()
        lines = [_fill(manual.details, width), "", "examples:"]
        for example in manual.examples:
            lines.append(f"  {_wrap_shell_line(example.line, width)}")
            lines.append(f"      {example.does}")
        self.description = "\n".join(lines)

        parts = [_fill(f"result: {manual.result}", width)]
        if manual.reads:
            lines = ["reads:"]
            for source in manual.reads:
                text = f"  {source.name}: {source.meaning}"
                lines.append(_fill(text, width, indent="    "))
            parts.append("\n".join(lines))
        statuses = ", ".join(f"{status} {meaning}" for status, meaning in manual.exit_statuses)
        parts.append(_fill(f"exit status: {statuses}", width, indent="  "))
        if manual.see_also:
            parts.append(_fill(f"see also: {', '.join(manual.see_also)}", width, indent="  "))
        self.epilog = "\n\n".join(parts)
        return super().format_help()

    def print_help(self, file: IO[str] | None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Write the help to stdout."""
        put(self.format_help())

    # Errors: all problems at once, each with a suggestion.

    def read(self, words: Sequence[str], root: Path) -> argparse.Namespace:
        """Parse words and check their values; one error has all their problems.

        Args:
            words: The words after the command.
            root: The checkout, if the words name no other.

        Returns:
            The values of the options by name, and ``given``: see ``parse_known_args``.

        Raises:
            CommandLineError: The words are wrong; unknown names among them are problems too.
            UnknownNameError: Only names are wrong.
        """
        problems: tuple[str, ...] = ()
        try:
            options: argparse.Namespace | None = self.parse_args(words)
        except CommandLineError as error:
            # What could be parsed is checked, too, so that one error has all problems.
            problems, options = error.problems, self._parsed
        value_problems: Sequence[str | UnknownNameError] = ()
        if options is not None:
            try:
                value_problems = self._check(options, options.root or root)
            except TrainworksError:
                # Such as facts that cannot be read: the wrong words may be the reason.
                if not problems:
                    raise
        self._problems = list(problems)
        unknown_names = []
        for problem in value_problems:
            if isinstance(problem, UnknownNameError):
                unknown_names.append(problem)
            else:
                self._problems.append(problem)
        if self._problems or options is None:
            self._problems += [error.line for error in unknown_names]
            self._fail()
        if unknown_names:
            raise join_problems(unknown_names)
        return options

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse words as argparse does, and store the result for ``read``.

        Args:
            args: The words after the command.
            namespace: As of argparse.

        Returns:
            The values and the words that are left over. The values have ``given``, too: the
            options among the words, by the names of their values: ``{"fixed_tags": "--tag"}``.
            An invalid choice is replaced by the default.

        Raises:
            CommandLineError: It has all problems of the words.
        """
        self._problems, self._parsed = [], None
        parsed = super().parse_known_args(self._with_known_options(args or ()), namespace)
        self._parsed = parsed[0]
        self._parsed.given = dict(self._used_options)
        for action in self._actions:
            if not action.choices or action.nargs is not None:
                continue
            if getattr(self._parsed, action.dest) not in action.choices:
                setattr(self._parsed, action.dest, action.default)
        if self._problems:
            self._fail()
        return parsed

    def error(self, message: str) -> NoReturn:
        """Raise a problem of argparse, or of the command itself, and the problems before it."""
        self._problems.append(message)
        self._fail()

    def _fail(self) -> NoReturn:
        """Raise the problems so far as one ``CommandLineError``, and forget them."""
        # Without repetitions, in their order.
        problems = tuple(dict.fromkeys(self._problems))
        self._problems = []
        raise CommandLineError(
            problems, hint=f"`python build.py {self.manual.command} --help` shows examples"
        )

    def _with_known_options(self, words: Sequence[str]) -> list[str]:
        """Return words without unknown options: each is replaced by the closest option.

        argparse would stop at the first unknown option; with the replacements it checks the other
        words, too. Unknown options, and options with a second value, become problems.
        ``_used_options`` gets the options among the words.

        Args:
            words: The words after the command: ``--tga 1.0`` becomes ``--tag 1.0``.
        """
        result: list[str] = []
        actions = self._option_string_actions
        used = self._used_options = {}
        arguments = [action for action in self._actions if not action.option_strings]
        needs_no_argument = all(action.nargs == "?" for action in arguments)
        is_foreign_value = False
        for number, word in enumerate(words):
            # No word behind this one is an option.
            if word == "--":
                return [*result, *words[number:]]
            if is_foreign_value and not word.startswith("-"):
                # The value of an unknown option: as an argument it would be one more problem.
                is_foreign_value = False
                continue
            is_foreign_value = False
            name, equals, value = word.partition("=")
            action = actions.get(name)
            if action is None and not name.startswith("--"):
                # A short option may have its value in the same word: -nVALUE.
                action = actions.get(name[:2])
            if action is not None:
                takes_one_value = action.nargs is None and not isinstance(action.default, list)
                # argparse would silently take the last of two values.
                if takes_one_value and action.dest in used:
                    self._problems.append(f"{name} is given twice; it takes one value")
                used[action.dest] = action.option_strings[-1]
            # ``-`` is stdin, and a text with a blank is a value that begins with a dash.
            is_value = not word.startswith("-") or word == "-" or " " in name
            is_known = name in actions or name[:2] in actions
            if is_value or is_known:
                result.append(word)
                continue
            others, other_takes_value = self._find_other_commands(name)
            if others:
                self._problems.append(f"unknown option {name}: it belongs to {', '.join(others)}")
                is_foreign_value = other_takes_value and not equals
                continue
            near = self._closest_option(name)
            advice = f"; did you mean {near}?" if near else ""
            self._problems.append(f"unknown option {name}{advice}")
            # A word behind it may be its value, or the command's argument, which is likely after
            # other options only where it must be given.
            is_foreign_value = not near and not equals and bool(used) and needs_no_argument
            # ``--help`` would print the help and end the command, and the problems with it.
            if not near or near == "--help":
                continue
            takes_value = actions[near].nargs != 0
            # A flag with ``=VALUE`` would be one more problem of the same word.
            if takes_value or not equals:
                used[actions[near].dest] = near
                result.append(f"{near}{equals}{value}")
        return result

    def find_option(self, name: str) -> argparse.Action | None:
        """Return the option of a name such as ``--tag``; None for one that it does not have."""
        return self._option_string_actions.get(name)

    def _find_other_commands(self, name: str) -> tuple[list[str], bool]:
        """Return the other commands that have an option, and whether it takes a value there."""
        # Every command's grammar is imported: only an error needs it.
        from trainworks.cli.commands import COMMANDS, grammar_of

        commands = []
        takes_value = False
        for command in COMMANDS:
            action = grammar_of(command).find_option(name)
            if action is not None:
                commands.append(f"`{command}`")
                takes_value = action.nargs != 0
        return commands, takes_value

    def _closest_option(self, name: str) -> str:
        """Return the long option that is closest to an unknown option, or ``""``."""
        # One or two letters resemble too many words.
        if len(name.lstrip("-")) <= 2:
            return ""
        return nearest(name, [word for word in self._option_string_actions if word[:2] == "--"])

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Convert a value as argparse does; note a malformed one as a problem, and return it."""
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as error:
            self._problems.append(str(error))
            return arg_string

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Note a value that is not one of the choices as a problem, with the closest choice."""
        if action.choices is not None and value not in action.choices:
            name = "/".join(action.option_strings) or action.metavar
            advice = suggest_names(str(value), map(str, action.choices))
            self._problems.append(f"argument {name}: invalid choice: {value!r}; {advice}")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Leaves texts as they are, and wraps options at ``WIDTH`` columns."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=_find_width(), max_help_position=OPTION_COLUMNS)


def _find_width() -> int:
    """Return the columns of a help: those of the terminal, at most ``WIDTH``."""
    return min(shutil.get_terminal_size().columns, WIDTH)


def _fill(text: str, width: int, indent: str = "") -> str:
    """Wrap a paragraph at ``width`` columns; lines after the first one begin with ``indent``."""
    return textwrap.fill(
        text, width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )


def _wrap_shell_line(line: str, width: int) -> str:
    """Return a command line on several lines, each but the last one with a backslash at its end."""
    # Room for the indentation and the backslash.
    lines = textwrap.wrap(line, width - 6, break_on_hyphens=False, break_long_words=False)
    return " \\\n    ".join(lines)


def _list_exit_statuses(
    done: str, fails: Sequence[type[TrainworksError]]
) -> tuple[tuple[int, str], ...]:
    """Return the exit statuses of a command with their meanings, the lowest first.

    Args:
        done: The meaning of 0.
        fails: The errors of the command, besides those of every command.
    """
    errors: set[type[TrainworksError]] = {
        TrainworksError,
        CommandLineError,
        OutputError,
        InterruptionError,
        *fails,
    }
    failures = sorted((error.exit_status, error.meaning) for error in errors)
    return ((0, done), *failures)


def _describe_argument(action: argparse.Action, group: str) -> dict[str, Any]:
    """Return an option or a positional argument as an object for JSON.

    Args:
        action: The argument, as argparse has it.
        group: The title of its group in the help.
    """
    is_flag = action.nargs == 0
    is_positional = not action.option_strings
    has_choices = bool(action.choices) and not is_positional
    value = ""
    # The help of argparse shows the choices in the place of a value's name.
    if not is_flag and not has_choices:
        value = str(action.metavar)
    default = None
    if not is_flag and action.default not in (None, [], argparse.SUPPRESS):
        default = str(action.default)
    is_required = action.required
    if is_positional:
        is_required = action.nargs not in ("?", "*")
    return {
        "names": action.option_strings,
        "value": value,
        "choices": [str(choice) for choice in action.choices or ()],
        "help": action.help or "",
        "default": default,
        "required": is_required,
        "repeats": action.nargs in ("+", "*") or isinstance(action.default, list),
        "group": group,
    }
