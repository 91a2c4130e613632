"""``build.py help``: list the commands, or explain one."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

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
    """Explain."""
    if options.format == "json":
        groups = {name: group for group, names in GROUPS.items() for name in names}
        chosen = [options.command] if options.command else COMMANDS
        commands = [{"group": groups[name], **grammar_of(name).as_values()} for name in chosen]
        put_json({"commands": commands})
    else:
        put(grammar_of(options.command).format_help() if options.command else overview())
    return 0


def overview() -> str:
    """Return the list of all commands for people."""
    width = max(map(len, COMMANDS))
    groups = (
        f"\n{title}:\n"
        + "".join(f"  {name:<{width}}  {grammar_of(name).manual.summary}\n" for name in names)
        for title, names in GROUPS.items()
    )
    return START + "".join(groups) + END
