"""The page of ``train``, from the launcher's own tables: its modes, options, names and exit statuses."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from trainworks_launcher import names
from trainworks_launcher.arguments import STYLES
from trainworks_launcher.options import COMMANDS, Option
from trainworks_launcher.registry import MODES, Mode
from website.markdown import block, code, definitions, directive, link, prose

PAGE = "commands/train.md"

DESCRIPTION = """\
The entry point of every image. Without arguments it reads the platform's files and variables, checks all of them at
once, makes a plan of this host, runs it, and ends every host of the job with the same status and the same cause.
A word that is none of its commands and does not begin with a dash is a program, and is executed as it is given.

How it does that: {launcher}. Variables and arguments of a script: {environment}.
"""

EXAMPLES = (
    ("train --plan", "Show what would be run on this host, as JSON; nothing is started"),
    ("train --plan --host algo-2", "The same for another host of the job"),
    ("train explain", "Show each flag and variable with its value, its origin and its reason"),
    ("docker run --rm -v JOB:/opt/ml IMAGE", "Run a job on this machine: the image's entry point is `train`"),
    ("docker run --rm -it IMAGE bash", "Execute anything else as it is given"),
)
"""A command line, and what it does."""


@dataclass(frozen=True)
class Name:
    """A constant of ``names.py``: what it is called there, its value, what is said of it, the heading it is under."""

    constant: str
    value: object
    text: str
    section: str


def documented_names() -> Iterator[Name]:
    """Yield the launcher's names in their order: each constant is followed by the text that documents it."""
    source = inspect.getsource(names)
    headings = {number: match[1] for number, line in enumerate(source.splitlines(), 1)
                if (match := re.fullmatch(r"# -+ (.+)", line))}  # fmt: skip
    body = ast.parse(source).body
    for statement, following in pairwise(body):
        if (
            isinstance(statement, ast.Assign)
            and isinstance(target := statement.targets[0], ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
        ):
            section = next((headings[line] for line in sorted(headings, reverse=True) if line < statement.lineno), "")
            text = inspect.cleandoc(str(following.value.value))
            yield Name(target.id, getattr(names, target.id), " ".join(text.split()), section)


ROOTS = ("BASE_DIRECTORY", "OWN_PREFIX", "RESERVED_PREFIX")
"""Beginnings of names, and no names themselves."""

ALL = tuple(documented_names())
CONSTANT = re.compile(rf"\b({'|'.join(sorted((name.constant for name in ALL), key=len, reverse=True))})\b")


def train_page() -> str:
    """Return the page."""
    commands = "\n".join(f"train {command.name} [OPTION...]" for command in COMMANDS)
    sections = (
        ("NAME", "train - runs this host's part of a training job, or says what it would do\n"),
        ("SYNOPSIS", block(f"train\n{commands}\ntrain --version | --help\nPROGRAM [ARGUMENT...]")),
        (
            "DESCRIPTION",
            DESCRIPTION.format(
                launcher=link("the launcher", "launcher/README.md", PAGE),
                environment=link("what a script is given", "docs/environment.md", PAGE),
            ),
        ),
        (
            "OPTIONS",
            "\n".join(
                f"### train {command.name}\n\n{prose(command.text[:1].upper() + command.text[1:])}.\n\n"
                + directive("program", f"train {command.name}", "")
                + "\n".join(map(_option, command.options))
                for command in COMMANDS
            ),
        ),
        (
            "MODES",
            "A hyperparameter, which the SDK makes of its `distribution` argument, says how the program is started:\n\n"
            + definitions((code(mode.name), _mode(mode)) for mode in MODES.values()),
        ),
        (
            "HYPERPARAMETERS",
            f"Names that begin with {code(names.RESERVED_PREFIX)} reach no script as arguments.\n\n"
            + _definitions("reserved hyperparameters"),
        ),
        ("ENVIRONMENT", _definitions("variables that are read")),
        ("FILES", f"Below {code(names.BASE_DIRECTORY)}:\n\n" + _definitions("paths below the base")),
        (
            "EXIT STATUS",
            "The script's own, untouched; 128 + N after signal N. The launcher's own refusals:\n\n"
            + definitions((str(name.value), text_of_name(name)) for name in ALL if name.constant.startswith("EXIT_")),
        ),
        ("EXAMPLES", "\n".join(f"{prose(does)}.\n\n{block(line, 'sh')}" for line, does in EXAMPLES)),
        (
            "SEE ALSO",
            link("build.py(1)", "commands/build.md", PAGE)
            + "".join(f", {link(name, name, PAGE)}" for name in ("docs/jobs.md", "docs/debug.md", "launcher/README.md"))
            + "\n",
        ),
    )
    return "# train\n\n" + "\n".join(f"## {title}\n\n{text}" for title, text in sections)


def _option(option: Option) -> str:
    notes = [*(["required"] if option.needed else []), *(["may be repeated"] if option.repeated else [])]
    said = prose(option.text)
    return directive(
        "option", f"{option.name} {option.value}".strip(), f"{said} ({'; '.join(notes)})" if notes else said
    )


def _mode(mode: Mode) -> str:
    parts = [
        f"switched on by {code(mode.switch)}" if mode.switch else "",
        f"started by {', '.join(map(code, mode.programs))}" if mode.programs else "",
        f"from {mode.minimum[0]} {mode.minimum[1]} on" if mode.minimum[0] else "",
        "one process on each host" if mode.one_per_host else "",
        "the number of processes per host has to be given" if mode.needs_count else "",
    ]
    return "; ".join(part for part in parts if part)


def _definitions(section: str) -> str:
    return definitions(
        (_shown(name), text_of_name(name))
        for name in ALL
        if name.section == section and isinstance(name.value, str | tuple) and name.constant not in ROOTS
    )


def _shown(name: Name) -> str:
    return ", ".join(map(code, name.value)) if isinstance(name.value, tuple) else code(str(name.value))


def text_of_name(name: Name) -> str:
    """Return what is said of a name, with the values of other names instead of what the source calls them."""
    text = re.sub(r"^OURS\. |\s*\(TT\)", "", name.text).replace("arguments.STYLES", ", ".join(STYLES))
    text = re.sub(r"\bTT\b", "sagemaker-training", text)

    def value(match: re.Match[str]) -> str:
        found = next(each.value for each in ALL if each.constant == match[1])
        return f"`{found:g}`" if isinstance(found, float) else f"`{found}`"

    parts = re.split(r"(``.+?``)", text)
    return prose("".join(part if part.startswith("``") else CONSTANT.sub(value, part) for part in parts), PAGE)
