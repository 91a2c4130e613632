"""Completion of command lines by argcomplete: commands and options from the
grammars, values from the facts.

No engine, registry or network is asked.
"""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import argcomplete
from argcomplete.lexers import split_line

from trainworks.cli.commands import BUILD, COMMANDS, grammar_of
from trainworks.cli.commands.build import FILTERS
from trainworks.cli.grammar import Grammar

COLUMNS: Mapping[str, str] = {
    "FRAMEWORK": "framework",
    "CELL": "cuda",
    "VERSION": "version",
    "PYTHON": "python",
    "TARGET": "name",
    "GLOB": "name",
}
"""Placeholders whose values are a key of each row of ``--list --format json``."""


def complete(root: Path) -> None:
    """Answer the shell function of argcomplete that started this process, and end the process.

    Args:
        root: The checkout whose facts are offered, unless the words name another with ``--root``.
    """
    start = int(os.environ["_ARGCOMPLETE"])
    typed = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])]
    *_, words, _ = split_line(typed)
    name = next(iter(words[start:]), "")
    if name in COMMANDS:
        # The command's own grammar reads the words after its name.
        os.environ["_ARGCOMPLETE"] = str(start + 1)
        grammar = grammar_of(name)
    else:
        grammar = grammar_of(BUILD)
        if not words[start:]:
            grammar.add_argument("command", nargs="?", choices=COMMANDS)
    _add_completers(grammar, root)
    argcomplete.autocomplete(grammar, always_complete_options="long")


def _add_completers(grammar: Grammar, root: Path) -> None:
    """Give each option of a grammar the function that completes its value.

    Args:
        grammar: The grammar; an option's ``metavar`` says what its value is: ``IMAGE|TARGET``.
        root: The checkout whose facts are offered.
    """
    for action in grammar._actions:  # noqa: SLF001 - argparse has no other list of its options
        for placeholder in str(action.metavar or "").split("|"):
            completer = _make_completer(placeholder, root, action.option_strings)
            if completer is not None:
                # argcomplete looks for this attribute.
                action.completer = completer  # type: ignore[attr-defined]


def _make_completer(
    placeholder: str, root: Path, flags: Sequence[str]
) -> Callable[..., list[str]] | None:
    """Return the function that completes the values of a placeholder.

    ``None`` leaves the completion to the shell, which offers files.

    Args:
        placeholder: The kind of the value: ``TARGET``.
        root: The checkout whose facts are offered, unless the words name another with ``--root``.
        flags: The names of the option: ``--with``.
    """
    if placeholder not in COLUMNS and placeholder not in ("ENGINE", "COMPONENT"):
        return None

    def find_values(parsed_args: Namespace, **_: Any) -> list[str]:
        checkout = parsed_args.root or root
        if placeholder == "ENGINE":
            from trainworks.engine import ENGINES

            return list(ENGINES)
        if placeholder == "COMPONENT":
            from trainworks.facts.load import load
            from trainworks.plan.select import find_optional_components

            flag = "--without" if "--without" in flags else "--with"
            return find_optional_components(flag, load(checkout).components)
        return _find_target_values(COLUMNS[placeholder], parsed_args, checkout)

    return find_values


def _find_target_values(key: str, options: Namespace, root: Path) -> list[str]:
    """Return the values of a key in the rows of ``--list`` that the other options allow.

    Args:
        key: A key of ``--list --format json``: ``cuda``.
        options: The options before the word that is completed: ``--framework`` limits the rows.
        root: The checkout.
    """
    from trainworks.facts.load import load
    from trainworks.inspect.listing import format_json_list

    filters = {}
    for option, row_key in FILTERS.items():
        value = getattr(options, option, None)
        # The value that is completed does not limit itself.
        if row_key != key and value is not None:
            filters[row_key] = value
    facts = load(root)
    values = set()
    for row in json.loads(format_json_list(facts.targets, facts, {})):
        if all(row[row_key] == value for row_key, value in filters.items()):
            values.add(row[key])
    return sorted(values)
