"""The commands of ``build.py``, one file each: ``parser()`` returns its
grammar, ``run(options, root)`` runs it.

``run`` returns the exit status, writes its result with ``terminal.output.put``, and raises a
``TrainworksError`` for every problem that a user can act on. Imports that take long stand inside
``run``, because ``help`` asks every command for its grammar.
"""

from __future__ import annotations

import importlib
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, cast

from trainworks.cli.grammar import Grammar

BUILD = "build"
"""The command if none is named."""

GROUPS: Mapping[str, tuple[str, ...]] = {
    "build": (BUILD, "extend"),
    "choose": ("check",),
    "pin what goes in": ("lock", "mirror"),
    "look into images": ("report", "diff", "outdated"),
    "deliver": ("push", "promote", "prove", "verify"),
    "the builder itself": ("help",),
}
"""The commands by purpose."""

COMMANDS = tuple(name for names in GROUPS.values() for name in names)


class Command(Protocol):
    """The functions of a command's file."""

    def parser(self) -> Grammar:
        """Return the command's grammar."""

    def run(self, options: Namespace, root: Path) -> int:
        """Run the command, and return its exit status.

        Args:
            options: The parsed words of the command line.
            root: The checkout.

        Raises:
            TrainworksError: A problem that a user can act on; the error has the exit status.
        """


def command_named(name: str) -> Command:
    """Import and return the module of one of ``COMMANDS``; no other command is imported."""
    return cast("Command", importlib.import_module(f"trainworks.cli.commands.{name}"))


def grammar_of(name: str) -> Grammar:
    """Return the grammar of one of ``COMMANDS``."""
    return command_named(name).parser()
