"""What the grammars of all commands have in common: options, a help that teaches, errors that name the right word.

A ``Grammar`` is an ``argparse`` parser that keeps what it says as data: ``--help``, the pages of the documentation,
``build.py help --format json`` and shell completion are all made from it.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

from trainworks.errors import CommandLineError, InterruptionError, OutputError, TrainworksError
from trainworks.plan.names import nearest
from trainworks.terminal.output import put

WIDTH = 100
"""Columns of a help at most."""

VALUES: Mapping[str, str] = {
    "ADDRESS": "an image in a registry: HOST/NAME:TAG or HOST/NAME@sha256:...",
    "CELL": "a CUDA release of the matrix, or cpu",
    "COMMAND": "a command of build.py",
    "COMPONENT": "a part that an image may have or lack",
    "DIR": "a folder",
    "ENGINE": "a container engine",
    "FILE": "a file",
    "FRAMEWORK": "a framework of the matrix",
    "GLOB": "names of targets, in which `*` and `?` stand for anything",
    "IMAGE": "an image of the engine's store",
    "KEY": "a key: a PEM file, or awskms:///alias/NAME",
    "N": "a number",
    "PACKAGE": "a Debian package",
    "PYTHON": "a Python of the matrix: MAJOR.MINOR",
    "REPOSITORY": "a repository of a registry: HOST/NAME",
    "TAG": "a tag of an image",
    "TARGET": "a target of --list",
    "URI": "an address",
    "URL": "an address",
    "VERSION": "a framework's version",
}
"""What the placeholders of the grammars stand for; ``A|B`` is either. Shell completion goes by them."""


TARGET = "pytorch-2.4.1-cu121-py311-debian12"
CPU_TARGET = "pytorch-2.13.0-cpu-py311-debian12"
"""Targets for examples; a test looks for them in the matrix."""


@dataclass(frozen=True)
class Example:
    """A command line that works as it stands: a test parses each, and runs those that need nothing.

    Attributes:
        words: What follows ``python build.py``.
        does: What it does, without a full stop.
        needs: What it takes besides a checkout, such as ``an engine``; empty where it takes nothing.
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
        """What a shell makes of ``words``."""
        return tuple(shlex.split(self.words))


@dataclass(frozen=True)
class Source:
    """A file, folder or environment variable that a command reads besides its command line."""

    name: str
    meaning: str


@dataclass(frozen=True, kw_only=True)
class Argument:
    """One option or positional argument, as the documentation and completion see it.

    Attributes:
        names: ``--engine``; several for ``-j`` and ``--jobs``; none for a positional one.
        value: Placeholder of its value, of ``VALUES``; empty for a flag, and where ``choices`` says it all.
        choices: All values that it can have; empty where they are not a fixed list.
        help: What it does.
        default: What holds where it is not given; None where that is nothing, or said by ``help``.
        required: Whether it must be given.
        repeats: Whether it may be given more than once.
        group: Title of the options that it stands among.
    """

    names: tuple[str, ...]
    value: str
    choices: tuple[str, ...]
    help: str
    default: str | None
    required: bool
    repeats: bool
    group: str


FACTS = Source("images/, templates/", "rows and recipes: of --root, else of the checkout or of the installed package")
HOST_SETTINGS = Source("pip.conf, PIP_*, *_proxy, NETRC", "this machine's indexes, proxies, CA and logins")
APT_SETTINGS = Source("/etc/apt", "where this machine's Debian packages come from")
DOCKER_HOST = Source("DOCKER_HOST", "the Docker daemon to ask; default: the local one")
LOGINS = Source("~/.docker/config.json", "logins of registries; ECR's come from AWS (docs/push.md)")
AWS_REGION = Source("AWS_REGION", "region of a key in AWS KMS that is not named by its ARN")
MEMORY = Source("XDG_CACHE_HOME", "folder of what is remembered of builds and reports; default: ~/.cache")


class Grammar(argparse.ArgumentParser):
    """The grammar of one command.

    Args:
        command: Its name.
        summary: What it does, on one line of a list.
        details: The same in a few sentences.
        examples: Command lines that work, the simplest first.
        result: What appears where, and what to do next.
        done: What exit status 0 means.
        fails: The errors that it can end with, besides those that every command can.
        reads: Files and variables that it reads.
        see_also: Commands (``push``) and pages (``docs/push.md``).
        usage: The usage line after ``usage: ``; default: what must be given, and ``[options]``.
        program: How the command is called; default: ``build.py COMMAND``.
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
    ) -> None:
        """Make a grammar with ``--help`` and ``--root``."""
        super().__init__(
            prog=program or f"build.py {command}",
            usage=usage,
            formatter_class=_Formatter,
            allow_abbrev=False,
            add_help=False,
        )
        self.command = command
        self.summary = summary
        self.details = details
        self.examples = tuple(examples)
        self.result = result
        self.exit_statuses = _exit_statuses(done, fails)
        self.reads = tuple(reads)
        self.see_also = tuple(see_also)
        self._problems: list[str] = []
        general = self.add_argument_group("general")
        general.add_argument("-h", "--help", action="help", help="show this")
        general.add_argument(
            "--root", type=Path, metavar="DIR", help="a checkout, or a folder with an images/ or templates/ of your own"
        )

    # What it says, as data.

    def arguments(self) -> tuple[Argument, ...]:
        """Return all options and positional arguments, in the order of the help."""
        return tuple(
            _argument(action, group.title or "")
            for group in self._action_groups
            for action in group._group_actions  # noqa: SLF001 - argparse tells an action's group in no other way
            if action.help is not argparse.SUPPRESS
        )

    def usage_line(self) -> str:
        """Return how the command is called, on one line."""
        if self.usage:
            return self.usage
        words = [self.prog, "[options]"]
        for argument in self.arguments():
            if argument.required and argument.names:
                words.append(f"{argument.names[-1]} {argument.value}")
            elif not argument.names:
                value = argument.value + (" ..." if argument.repeats else "")
                words.append(value if argument.required else f"[{value}]")
        return " ".join(words)

    def as_values(self) -> dict[str, Any]:
        """Return everything that the help says, as values that JSON can write."""
        return {
            "command": self.command,
            "summary": self.summary,
            "details": self.details,
            "usage": self.usage_line(),
            "arguments": [asdict(argument) for argument in self.arguments()],
            "examples": [{"line": each.line, "does": each.does, "needs": each.needs} for each in self.examples],
            "result": self.result,
            "exit_statuses": [{"status": status, "meaning": meaning} for status, meaning in self.exit_statuses],
            "reads": [asdict(source) for source in self.reads],
            "see_also": list(self.see_also),
        }

    # What it says, as text.

    def format_help(self) -> str:
        """Return the help, as wide as the terminal but at most ``WIDTH`` columns."""
        width = _width()
        self.usage = self.usage_line()
        examples = "\n".join(f"  {_shell_lines(each.line, width)}\n      {each.does}" for each in self.examples)
        self.description = f"{_fill(self.details, width)}\n\nexamples:\n{examples}"
        reads = [_fill(f"  {each.name}: {each.meaning}", width, indent="    ") for each in self.reads]
        statuses = ", ".join(f"{status} {meaning}" for status, meaning in self.exit_statuses)
        parts = [
            _fill(f"result: {self.result}", width),
            *(["\n".join(["reads:", *reads])] if reads else []),
            _fill(f"exit status: {statuses}", width, indent="  "),
            *([_fill(f"see also: {', '.join(self.see_also)}", width, indent="  ")] if self.see_also else []),
        ]
        self.epilog = "\n\n".join(parts)
        return super().format_help()

    def print_help(self, file: IO[str] | None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Write the help to stdout."""
        put(self.format_help())

    # Errors: all that can be found, each with the nearest right word.

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse words; all that is wrong with them is in one ``CommandLineError``."""
        self._problems = []
        parsed = super().parse_known_args(self._with_known_options(args or ()), namespace)
        if self._problems:
            self._fail()
        return parsed

    def error(self, message: str) -> NoReturn:
        """Raise what argparse, or the command itself, has to say about its words."""
        self._problems.append(message)
        self._fail()

    def _fail(self) -> NoReturn:
        problems, self._problems = tuple(dict.fromkeys(self._problems)), []
        raise CommandLineError(problems, hint=f"`python build.py {self.command} --help` explains it, with examples")

    def _with_known_options(self, words: Sequence[str]) -> list[str]:
        """Note options that do not exist; what was meant, probably, stands in for them, so that the rest is judged."""
        result: list[str] = []
        known = self._option_string_actions
        given: set[str] = set()
        for number, word in enumerate(words):
            if word == "--":
                return [*result, *words[number:]]
            name, equals, value = word.partition("=")
            option = known.get(name)
            # Of two values the last one would count, and nobody would be told.
            if option is not None and option.nargs is None and not isinstance(option.default, list):
                if option.dest in given:
                    self._problems.append(f"{name} is given twice; it takes one value")
                given.add(option.dest)
            if not word.startswith("-") or word == "-" or " " in name or {name, name[:2]} & known.keys():
                result.append(word)
                continue
            # One letter is like nothing: only words are held against words.
            near = nearest(name, (option for option in known if option.startswith("--"))) if len(name) > 2 else ""
            self._problems.append(f"unknown option {name}" + (f"; did you mean {near}?" if near else ""))
            if near and near != "--help" and bool(equals) <= (known[near].nargs != 0):
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
            choices = [str(choice) for choice in action.choices]
            near = nearest(str(value), choices)
            said = f"did you mean {near}? there is: " if near else "there is: "
            name = "/".join(action.option_strings) or action.metavar
            self._problems.append(f"argument {name}: invalid choice: {value!r}; {said}{', '.join(choices)}")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Shows texts as they are given, and options in ``WIDTH`` columns."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=_width(), max_help_position=26)


def _width() -> int:
    return min(shutil.get_terminal_size().columns, WIDTH)


def _fill(text: str, width: int, indent: str = "") -> str:
    return textwrap.fill(text, width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)


def _shell_lines(line: str, width: int) -> str:
    """Return a command line on as many lines as it takes, for a shell that is given them as they stand."""
    lines = textwrap.wrap(line, width - 6, break_on_hyphens=False, break_long_words=False)
    return " \\\n    ".join(lines)


def _exit_statuses(done: str, fails: Sequence[type[TrainworksError]]) -> tuple[tuple[int, str], ...]:
    """Return each exit status and its meaning: those that every command can end with, and those of these errors."""
    errors: set[type[TrainworksError]] = {CommandLineError, OutputError, InterruptionError, *fails}
    # build.py itself ends with 1 where the Python is too old, or lacks what `make setup` installs.
    return (0, done), (1, "not set up: make setup"), *sorted((error.exit_status, error.meaning) for error in errors)


def _argument(action: argparse.Action, group: str) -> Argument:
    flag = action.nargs == 0
    positional = not action.option_strings
    default = action.default
    return Argument(
        names=tuple(action.option_strings),
        value="" if flag or (action.choices and not positional) else str(action.metavar),
        choices=tuple(str(choice) for choice in action.choices or ()),
        help=action.help or "",
        default=None if flag or default in (None, [], argparse.SUPPRESS) else str(default),
        required=action.nargs not in ("?", "*") if positional else action.required,
        repeats=action.nargs in ("+", "*") or isinstance(default, list),
        group=group,
    )


# Options of more than one command.

Container = argparse._ActionsContainer  # noqa: SLF001 - the only name for "a parser, or a group of its options"


def add_format(
    container: Container, choices: Sequence[str] = ("text", "json"), note: str = "of the result on stdout"
) -> None:
    """Add ``--format``; the first choice is the default."""
    container.add_argument("--format", choices=choices, default=choices[0], help=f"{note} (default: {choices[0]})")


def add_engine(container: Container) -> None:
    """Add which engine to ask."""
    container.add_argument("--engine", metavar="ENGINE", help="docker or buildah; default: the first that answers")


def add_only(container: Container) -> None:
    """Add which targets are meant."""
    container.add_argument(
        "--only", action="append", default=[], metavar="TARGET", help="this target, and no other; may be repeated"
    )


def add_components(container: Container, chosen: str = "add an optional one", left: str = "leave one out") -> None:
    """Add which optional components an image has."""
    for option, note in (("with", chosen), ("without", left)):
        container.add_argument(
            f"--{option}", dest=f"{option}_components", action="append", default=[], metavar="COMPONENT", help=note
        )


def add_until(container: Container, stages: Sequence[str]) -> None:
    """Add how far to go; the last stage is the default."""
    container.add_argument(
        "--until", choices=stages, default=stages[-1], help=f"stop after this stage (default: {stages[-1]})"
    )


def add_build_options(container: Container) -> None:
    """Add what every build can be told."""
    container.add_argument("--output", type=Path, metavar="DIR", help="leave the build context in this folder")
    container.add_argument("--junit", type=Path, metavar="FILE", help="write the image tests' results as JUnit XML")
    container.add_argument("--no-cache", action="store_true", help="build every step again")
    container.add_argument("--verbose", action="store_true", help="show every line that the build prints")


def add_repositories(container: Container, *, required: bool = False) -> None:
    """Add where to push, and under which tags."""
    container.add_argument(
        "--repository",
        action="append",
        default=[],
        required=required,
        metavar="REPOSITORY",
        help="HOST/NAME, such as ACCOUNT.dkr.ecr.REGION.amazonaws.com/NAME; again for another region or registry",
    )
    add_tags(container, fixed=", instead of the one with today's date", moving=", instead of VERSION-CUDA-OS")


def add_tags(container: Container, *, fixed: str, moving: str = "") -> None:
    """Add tags for the registries.

    Args:
        container: The parser, or a group of its options.
        fixed: What holds without ``--tag``.
        moving: What holds without ``--moving-tag``.
    """
    container.add_argument(
        "--tag",
        action="append",
        default=[],
        dest="fixed_tags",
        metavar="TAG",
        help=f"a tag that never moves{fixed}",
    )
    container.add_argument(
        "--moving-tag",
        action="append",
        default=[],
        dest="moving_tags",
        metavar="TAG",
        help=f"a tag that points here from now on{moving}",
    )
