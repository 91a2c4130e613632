"""A page for each command, in the order that manual pages have, from the data of its grammar."""

from __future__ import annotations

import re
from itertools import groupby

from trainworks.cli.commands import COMMANDS, GROUPS, grammar_of
from trainworks.cli.grammar import Argument, Example, Grammar
from trainworks.errors import TrainworksError
from website.markdown import block, code, definitions, directive, link, prose, table

FOLDER = "commands"
INDEX = f"{FOLDER}/index.md"
STATUSES = "reference/exit-statuses.md"
TRAIN = f"{FOLDER}/train.md"

GENERAL = "general"
"""The group of the options that every command has."""


def grammars() -> tuple[Grammar, ...]:
    """Return the grammar of every command."""
    return tuple(map(grammar_of, COMMANDS))


def page_of(command: str) -> str:
    """Return the path of a command's page."""
    return f"{FOLDER}/{command}.md"


def manual_name(grammar: Grammar) -> str:
    """Return what ``man`` calls a command: ``build.py-push``."""
    return grammar.prog.replace(" ", "-")


def command_pages() -> dict[str, str]:
    """Return the page of each command of ``build.py``, by its path."""
    return {page_of(grammar.command): _page(grammar) for grammar in grammars()}


def index_page() -> str:
    """Return the page that lists all commands, those of the launcher too."""
    names = "\n".join((*COMMANDS, "train"))
    return (
        "# Commands\n\nEach with its options, examples and exit statuses. The same pages are there for a terminal: "
        f"`man -M build/site/man build.py-push`. What the statuses mean: {link('exit statuses', STATUSES, INDEX)}.\n\n"
        f"{command_table(INDEX)}\n```{{toctree}}\n:hidden:\n{names}\n```\n"
    )


def status_page() -> str:
    """Return the page of exit statuses: what each means, what happened, and which commands can end with it."""
    ends: dict[int, list[str]] = {}
    for grammar in grammars():
        for status, _ in grammar.exit_statuses:
            ends.setdefault(status, []).append(link(grammar.command, page_of(grammar.command), STATUSES))
    rows = [
        (
            str(error.exit_status),
            error.meaning,
            # What follows a semicolon is about the class.
            prose(re.split(r"[;\n]", error.__doc__ or "")[0].rstrip(".")),
            ", ".join(ends.get(error.exit_status, ())),
        )
        for error in sorted(TrainworksError.__subclasses__(), key=lambda error: error.exit_status)
    ]
    return (
        "# Exit statuses\n\nOf `build.py`: 0 where all that was asked for is done, otherwise one status for each "
        "kind of error. The error itself is on stderr, and says what is wrong, where, and what to do; with "
        f"`--format json` it is on stdout, too ({link('results for programs', 'docs/json.md', STATUSES)}).\n\n"
        f"{table(('status', 'meaning', 'what happened', 'commands'), rows)}\n"
        f"Those of a training job are {link('those of train', TRAIN, STATUSES, 'exit-status')}.\n"
    )


def command_table(page: str) -> str:
    """Return a table of all commands, each with a link to its page."""
    rows = [
        (group, link(grammar.prog, page_of(grammar.command), page), prose(grammar.summary))
        for group, names in GROUPS.items()
        for grammar in map(grammar_of, names)
    ]
    return table(
        ("to", "command", "what it does"),
        [*rows, ("run a job", link("train", TRAIN, page), "run this host's part of a job, inside an image")],
    )


def _page(grammar: Grammar) -> str:
    page = page_of(grammar.command)
    sections = (
        ("NAME", f"{manual_name(grammar)} - {prose(grammar.summary)}\n"),
        ("SYNOPSIS", block("\n".join(f"python {line.strip()}" for line in grammar.usage_line().splitlines()))),
        ("DESCRIPTION", f"{prose(grammar.details, page)}\n\nResult: {prose(grammar.result, page)}\n"),
        ("OPTIONS", directive("program", grammar.prog, "") + options(grammar.arguments(), page)),
        ("EXAMPLES", "\n".join(_example(example, page) for example in grammar.examples)),
        ("EXIT STATUS", definitions((str(number), prose(text)) for number, text in grammar.exit_statuses)),
        ("FILES AND ENVIRONMENT", definitions((code(each.name), prose(each.meaning, page)) for each in grammar.reads)),
        ("SEE ALSO", ", ".join(_see(name, page) for name in grammar.see_also) + "\n"),
    )
    return f"# {grammar.prog}\n\n" + "\n".join(f"## {title}\n\n{text}" for title, text in sections if text.strip())


def options(arguments: tuple[Argument, ...], page: str) -> str:
    """Return options and other arguments, below the titles of their groups; what every command has comes last."""
    ordered = sorted(arguments, key=lambda argument: argument.group == GENERAL)
    groups = [(title, list(found)) for title, found in groupby(ordered, key=lambda argument: argument.group)]
    return "\n".join(
        f"### {title}\n\n" + "\n".join(option(argument, page) for argument in found) for title, found in groups
    )


def option(argument: Argument, page: str) -> str:
    """Return one option, or an argument that has a place instead of a name."""
    value = argument.value or (f"{{{','.join(argument.choices)}}}" if argument.choices else "")
    names = ", ".join(f"{name} {value}".rstrip() for name in argument.names) or value
    notes = [
        *(["required"] if argument.required and argument.names else []),
        *(["may be repeated"] if argument.repeats and "again" not in argument.help else []),
        *([f"default: {code(argument.default)}"] if argument.default and "default" not in argument.help else []),
    ]
    said = prose(argument.help, page)
    return directive("option", names, f"{said} ({'; '.join(notes)})" if notes else said)


def _example(example: Example, page: str) -> str:
    needs = f" Needs {prose(example.needs)}." if example.needs else ""
    return f"{prose(example.does[:1].upper() + example.does[1:], page)}.{needs}\n\n{block(example.line, 'sh')}"


def _see(name: str, page: str) -> str:
    if name.endswith(".md"):
        return link(name, name, page)
    # `lock --check` is said where only that of a command is meant.
    command, _, rest = name.partition(" ")
    return f"{link(f'{manual_name(grammar_of(command))}(1)', page_of(command), page)} {prose(rest)}".rstrip()
