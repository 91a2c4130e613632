"""``build.py help``: list the commands, or explain one."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from trainworks.cli.commands import COMMANDS, GROUPS, grammar_of
from trainworks.cli.grammar import Example, Grammar, Manual
from trainworks.cli.options import add_format
from trainworks.terminal.output import put, put_json

START = """\
Build and test container images for distributed training.

usage: build.py [COMMAND] [options]
"""

END = """
first steps:
  python build.py --list                             list the targets
  python build.py --framework pytorch --cuda cu121   build and test an image
  python build.py help COMMAND                       explain a command, with examples
  python build.py --version                          print the version of this program

Every command has `--format json` for programs. Errors are JSON too.
"""


def parser() -> Grammar:
    """Return the grammar of ``build.py help``."""
    manual = Manual(
        command="help",
        summary="list the commands, or explain one",
        details="Lists all commands by purpose, or explains one of them.",
        examples=(
            Example("help", "list all commands"),
            Example("help push", "explain a command, as `python build.py push --help`"),
            Example(
                "help --format json", "write options, examples and exit statuses, for programs"
            ),
        ),
        result="text for people, or all of its data as JSON.",
        done="shown",
    )
    grammar = Grammar(manual)
    grammar.add_argument(
        "command",
        nargs="?",
        choices=COMMANDS,
        metavar="COMMAND",
        help="explain this command; default: list them all",
    )
    add_format(grammar)
    return grammar


def run(options: Namespace, _root: Path) -> int:
    """Print the help of a command, or without one the list of all commands; return 0."""
    if options.format == "json":
        put_json({"commands": _describe_commands(options.command)})
    elif options.command:
        put(grammar_of(options.command).format_help())
    else:
        put(overview())
    return 0


def _describe_commands(only: str | None) -> list[dict[str, Any]]:
    """Return the help of one command, or of all, as objects for JSON."""
    descriptions = []
    for group, names in GROUPS.items():
        for name in names:
            if only in (None, name):
                descriptions.append({"group": group, **grammar_of(name).as_values()})
    return descriptions


def overview() -> str:
    """Return the list of all commands by purpose, for people."""
    width = max(map(len, COMMANDS))
    parts = [START]
    for title, names in GROUPS.items():
        parts.append(f"\n{title}:\n")
        for name in names:
            summary = grammar_of(name).manual.summary
            parts.append(f"  {name:<{width}}  {summary}\n")
    parts.append(END)
    return "".join(parts)
