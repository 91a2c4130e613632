"""``build.py help``: what there is to do, and how."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from trainworks.cli.commands import COMMANDS, GROUPS, grammar_of
from trainworks.cli.grammar import Example, Grammar, add_format
from trainworks.terminal.output import put, put_json

START = """\
Builds, tests, delivers and proves the container images in which people train deep-learning models.

usage: build.py [COMMAND] [options]
"""

END = """
start here:
  python build.py --list                             what can be built
  python build.py --framework pytorch --cuda cu121   build and test; no command: `build`
  python build.py help COMMAND                       what a command does, with examples that work

A wrong word is answered with the nearest right one. For programs: `--format json`, errors too.
"""


def parser() -> Grammar:
    """Return the grammar of ``build.py help``."""
    grammar = Grammar(
        "help",
        summary="list the commands, or explain one",
        details="Lists all commands by what one wants to do, or explains one of them.",
        examples=(
            Example("help", "all commands, with one line each"),
            Example("help push", "the same as `python build.py push --help`"),
            Example("help --format json", "options, examples and exit statuses of all commands, for programs"),
        ),
        result="text for people; as JSON everything that it is made from.",
        done="shown",
    )
    grammar.add_argument("command", nargs="?", choices=COMMANDS, metavar="COMMAND", help="default: list them all")
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
        f"\n{title}:\n" + "".join(f"  {name:<{width}}  {grammar_of(name).summary}\n" for name in names)
        for title, names in GROUPS.items()
    )
    return START + "".join(groups) + END
