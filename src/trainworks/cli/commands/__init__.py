"""One file for each command of ``build.py``: ``parser()`` is its grammar, ``run(options, root)`` what it does.

``run`` returns the exit status, writes its result with ``cli.output.put`` and raises a ``TrainworksError`` for
everything that a user can act on. ``GROUPS`` names them. What takes long to import is imported inside ``run``: help
and completion ask every command for its grammar.
"""

from __future__ import annotations

import importlib
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, cast

from trainworks.cli.grammar import Grammar

BUILD = "build"
"""The command that is meant where none is named."""

GROUPS: Mapping[str, tuple[str, ...]] = {
    "build": (BUILD, "extend"),
    "choose": ("catalogue", "check"),
    "pin what goes in": ("lock", "mirror"),
    "look into images": ("report", "diff", "changelog", "vulnerabilities"),
    "deliver": ("push", "promote", "prove", "verify"),
    "the builder itself": ("help", "completion", "schema", "lint"),
}
"""The commands by what one wants to do; a command is one file beside this one."""

COMMANDS = tuple(name for names in GROUPS.values() for name in names)


class Command(Protocol):
    """What a command's file has."""

    def parser(self) -> Grammar:
        """Return its grammar."""

    def run(self, options: Namespace, root: Path) -> int:
        """Run it; return the exit status."""


def command_named(name: str) -> Command:
    """Return one of ``COMMANDS``; only its own file is imported."""
    return cast("Command", importlib.import_module(f"trainworks.cli.commands.{name}"))


def grammar_of(name: str) -> Grammar:
    """Return the grammar of one of ``COMMANDS``."""
    return command_named(name).parser()
