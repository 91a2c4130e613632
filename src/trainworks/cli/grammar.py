"""Describe a command: its options, and a help with examples, exit statuses and the next command.

A ``Grammar`` is an ``argparse`` parser that keeps this description as data, for ``--help``,
``build.py help --format json`` and the tests that run the examples.
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
from trainworks.plan.names import suggestion, together
from trainworks.suggestions import nearest
from trainworks.terminal.output import put

WIDTH = 100
"""Columns of a help at most."""

TARGET = "pytorch-2.4.1-cu121-py311-debian12"
CPU_TARGET = "pytorch-2.13.0-cpu-py311-debian12"
"""Targets for examples; a test looks for them in the matrix."""


@dataclass(frozen=True)
class Example:
    """A command line that works. A test parses each one, and runs those that need nothing.

    Attributes:
        words: The words after ``python build.py``.
        does: What it does, in the imperative, without a full stop.
        needs: What it needs besides a checkout, such as ``an engine``; ``""`` for nothing.
    """

    words: str
    does: str
    needs: str = ""

    @property
    def line(self) -> str:
        """The command line as it is typed."""
        return f"python build.py {self.words}".rstrip()

    @property
    def arguments(self) -> tuple[str, ...]:
        """``words`` as a shell splits them."""
        return tuple(shlex.split(self.words))


@dataclass(frozen=True)
class Source:
    """A file, folder or environment variable that a command reads besides its command line."""

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
"""Returns what is wrong with parsed words, given the checkout: words that do
not go together, and unknown names.
"""


class Grammar(argparse.ArgumentParser):
    """The command line of one command.

    Args:
        command: Its name.
        summary: What it does, in one line of a list, in the imperative.
        details: The same in a few sentences.
        examples: Command lines that work, the simplest first.
        result: What it writes where, and the next command.
        done: What exit status 0 means.
        fails: The errors that it can end with, besides those of every command.
        reads: Files and variables that it reads.
        see_also: Commands (``push``) and pages (``docs/ship.md``).
        usage: The usage line; default: the required words and ``[options]``.
        program: How the command is called; default: ``build.py COMMAND``.
        check: Looks at the values of the words.
    """

    def __init__(
        self,
        command: str,
        *,
        summary: str,
        details: str,
        examples: Sequence[Example],
        result: str,
        done: str = "done",
        fails: Sequence[type[TrainworksError]] = (),
        reads: Sequence[Source] = (),
        see_also: Sequence[str] = (),
        usage: str | None = None,
        program: str = "",
        check: Check = lambda _options, _root: (),
    ) -> None:
        """Make a grammar with ``--help`` and ``--root``."""
        super().__init__(
            prog=program or f"build.py {command}",
            usage=usage,
            formatter_class=_Formatter,
            allow_abbrev=False,
            add_help=False,
        )
        # From Python 3.14 on argparse writes colours, which are codes of a terminal.
        self.color = False
        self.command = command
        self.summary = summary
        self.details = details
        self.examples = tuple(examples)
        self.result = result
        self.exit_statuses = _exit_statuses(done, fails)
        self.reads = tuple(reads)
        self.see_also = tuple(see_also)
        self._check = check
        self._problems: list[str] = []
        self._parsed: argparse.Namespace | None = None
        self._given: dict[str, str] = {}
        general = self.add_argument_group("general")
        general.add_argument("-h", "--help", action="help", help="show this help")
        general.add_argument(
            "--root",
            type=Path,
            metavar="DIR",
            help="read this checkout, or a folder with your own images/ or templates/",
        )

    def arguments(self) -> list[dict[str, Any]]:
        """Return all options and positional arguments, in the order of the
        help, as values that JSON can write.
        """
        return [
            _as_values(action, group.title or "")
            for group in self._action_groups
            for action in group._group_actions  # noqa: SLF001 - argparse tells an action's group in no other way
        ]

    def usage_line(self) -> str:
        """Return how the command is called, without optional words."""
        if self.usage:
            return self.usage
        words = [self.prog, "[options]"]
        for argument in self.arguments():
            if argument["names"]:
                words += (
                    [f"{argument['names'][-1]} {argument['value']}"] if argument["required"] else []
                )
            else:
                value = argument["value"] + (" ..." if argument["repeats"] else "")
                words.append(value if argument["required"] else f"[{value}]")
        return " ".join(words)

    def as_values(self) -> dict[str, Any]:
        """Return everything in the help as values that JSON can write."""
        return {
            "command": self.command,
            "summary": self.summary,
            "details": self.details,
            "usage": self.usage_line(),
            "arguments": self.arguments(),
            "examples": [
                {"line": each.line, "does": each.does, "needs": each.needs}
                for each in self.examples
            ],
            "result": self.result,
            "exit_statuses": [
                {"status": status, "meaning": meaning} for status, meaning in self.exit_statuses
            ],
            "reads": [asdict(source) for source in self.reads],
            "see_also": list(self.see_also),
        }

    def format_help(self) -> str:
        """Return the help, as wide as the terminal but at most ``WIDTH`` columns."""
        width = _width()
        self.usage = self.usage_line()
        examples = "\n".join(
            f"  {_shell_lines(each.line, width)}\n      {each.does}" for each in self.examples
        )
        self.description = f"{_fill(self.details, width)}\n\nexamples:\n{examples}"
        reads = [
            _fill(f"  {each.name}: {each.meaning}", width, indent="    ") for each in self.reads
        ]
        statuses = ", ".join(f"{status} {meaning}" for status, meaning in self.exit_statuses)
        parts = [
            _fill(f"result: {self.result}", width),
            *(["\n".join(["reads:", *reads])] if reads else []),
            _fill(f"exit status: {statuses}", width, indent="  "),
            *(
                [_fill(f"see also: {', '.join(self.see_also)}", width, indent="  ")]
                if self.see_also
                else []
            ),
        ]
        self.epilog = "\n\n".join(parts)
        return super().format_help()

    def print_help(self, file: IO[str] | None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Write the help to stdout."""
        put(self.format_help())

    # Errors: all problems at once, each with a suggestion.

    def read(self, words: Sequence[str], root: Path) -> argparse.Namespace:
        """Parse words and check their values; one error has all their problems.

        Args:
            words: Those after the command.
            root: The checkout, if the words name no other.

        Raises:
            CommandLineError: The words are wrong; unknown names among them are problems too.
            UnknownNameError: Nothing but names is wrong.
        """
        problems: tuple[str, ...] = ()
        try:
            options: argparse.Namespace | None = self.parse_args(words)
        except CommandLineError as error:
            problems, options = error.problems, self._parsed
        found: Sequence[str | UnknownNameError] = ()
        if options is not None:
            try:
                found = self._check(options, options.root or root)
            except TrainworksError:
                if not problems:
                    raise
        unknown = [each for each in found if isinstance(each, UnknownNameError)]
        self._problems = [*problems, *(each for each in found if isinstance(each, str))]
        if self._problems or options is None:
            self._problems += [each.line for each in unknown]
            self._fail()
        if unknown:
            raise together(unknown)
        return options

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse words; one ``CommandLineError`` has all their problems.

        What it returns has ``given``, too: the options that are among the words, by the names of
        their values. A value that is none of an option's choices is the default there.
        """
        self._problems, self._parsed = [], None
        parsed = super().parse_known_args(self._with_known_options(args or ()), namespace)
        self._parsed = parsed[0]
        self._parsed.given = dict(self._given)
        for action in self._actions:
            if (
                action.choices
                and action.nargs is None
                and getattr(self._parsed, action.dest) not in action.choices
            ):
                setattr(self._parsed, action.dest, action.default)
        if self._problems:
            self._fail()
        return parsed

    def error(self, message: str) -> NoReturn:
        """Raise a problem that argparse, or the command itself, found, and those before it."""
        self._problems.append(message)
        self._fail()

    def _fail(self) -> NoReturn:
        problems, self._problems = tuple(dict.fromkeys(self._problems)), []
        raise CommandLineError(
            problems, hint=f"`python build.py {self.command} --help` shows examples"
        )

    def _with_known_options(self, words: Sequence[str]) -> list[str]:
        """Note unknown options, and replace each by the closest known one, so
        that the other words are checked too.
        """
        result: list[str] = []
        known = self._option_string_actions
        given = self._given = {}
        for number, word in enumerate(words):
            if word == "--":
                return [*result, *words[number:]]
            name, equals, value = word.partition("=")
            option = known.get(name)
            if option is None and not name.startswith("--"):
                option = known.get(name[:2])
            # argparse would silently take the last of two values.
            once = (
                option is not None and option.nargs is None and not isinstance(option.default, list)
            )
            if option is not None:
                if once and option.dest in given:
                    self._problems.append(f"{name} is given twice; it takes one value")
                given[option.dest] = option.option_strings[-1]
            if (
                not word.startswith("-")
                or word == "-"
                or " " in name
                or {name, name[:2]} & known.keys()
            ):
                result.append(word)
                continue
            # A single letter has no close word.
            near = (
                nearest(name, (option for option in known if option.startswith("--")))
                if len(name) > 2
                else ""
            )
            self._problems.append(
                f"unknown option {name}" + (f"; did you mean {near}?" if near else "")
            )
            if near and near != "--help" and bool(equals) <= (known[near].nargs != 0):
                given[known[near].dest] = near
                result.append(f"{near}{equals}{value}")
        return result

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as error:
            self._problems.append(str(error))
            return arg_string

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            name = "/".join(action.option_strings) or action.metavar
            said = suggestion(str(value), map(str, action.choices))
            self._problems.append(f"argument {name}: invalid choice: {value!r}; {said}")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Keeps texts as they are, and wraps options at ``WIDTH`` columns."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=_width(), max_help_position=26)


def _width() -> int:
    return min(shutil.get_terminal_size().columns, WIDTH)


def _fill(text: str, width: int, indent: str = "") -> str:
    return textwrap.fill(
        text, width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )


def _shell_lines(line: str, width: int) -> str:
    """Return a command line on several lines, as a shell takes them."""
    lines = textwrap.wrap(line, width - 6, break_on_hyphens=False, break_long_words=False)
    return " \\\n    ".join(lines)


def _exit_statuses(
    done: str, fails: Sequence[type[TrainworksError]]
) -> tuple[tuple[int, str], ...]:
    """Return each exit status of a command with its meaning: those of every
    command, and those of these errors.
    """
    errors: set[type[TrainworksError]] = {
        TrainworksError,
        CommandLineError,
        OutputError,
        InterruptionError,
        *fails,
    }
    return (0, done), *sorted((error.exit_status, error.meaning) for error in errors)


def _as_values(action: argparse.Action, group: str) -> dict[str, Any]:
    flag = action.nargs == 0
    positional = not action.option_strings
    default = action.default
    return {
        "names": action.option_strings,
        "value": "" if flag or (action.choices and not positional) else str(action.metavar),
        "choices": [str(choice) for choice in action.choices or ()],
        "help": action.help or "",
        "default": None if flag or default in (None, [], argparse.SUPPRESS) else str(default),
        "required": action.nargs not in ("?", "*") if positional else action.required,
        "repeats": action.nargs in ("+", "*") or isinstance(default, list),
        "group": group,
    }
