"""``build.py completion``: what a shell needs to complete our command lines."""

from __future__ import annotations

import argparse
import shlex
import sys
from argparse import Namespace
from pathlib import Path

from trainworks.cli.grammar import FACTS, Example, Grammar, add_format
from trainworks.terminal.output import put, put_result

SHELLS = ("bash", "zsh", "fish")
"""Each has a script in ``cli/shells``."""


def parser() -> Grammar:
    """Return the grammar of ``build.py completion``."""
    grammar = Grammar(
        "completion",
        summary="print the script that makes TAB complete commands, options and values",
        details="Prints a script for a shell. With it TAB completes commands, options and their values, after "
        "`python build.py`, `./build.py` and `trainworks`: frameworks, their CUDA cells and versions, components, "
        "targets, files. The script names this checkout and this Python: TAB starts nothing else.",
        examples=(
            Example("completion bash", "to have it: `source <(python build.py completion bash)`, in ~/.bashrc too"),
            Example("completion zsh", "the same, behind `autoload -U compinit && compinit` in ~/.zshrc"),
            Example("completion fish", "kept: `... > ~/.config/fish/conf.d/trainworks.fish`"),
        ),
        result="a script on stdout. Print it again when the checkout or its virtual environment has moved.",
        done="printed",
        reads=(FACTS,),
        see_also=("help",),
    )
    grammar.add_argument("shell", choices=SHELLS, metavar="SHELL", help="bash, zsh or fish")
    # What the scripts ask: the words behind `--`, of which the last one is being typed.
    grammar.add_argument("typed", nargs="*", help=argparse.SUPPRESS)
    add_format(grammar)
    return grammar


def run(options: Namespace, root: Path) -> int:
    """Print the script; or, asked by it, what can follow."""
    if options.typed:
        from trainworks.cli.complete import complete

        # As they are: argparse takes a further `--` out.
        typed = options.words[options.words.index("--") + 1 :]
        put(complete(typed, root).as_text())
    else:
        script = script_for(options.shell, Path(sys.argv[0]))
        put_result(options, {"shell": options.shell, "script": script}, script)
    return 0


def script_for(shell: str, program: Path) -> str:
    """Return the script for a shell.

    Args:
        shell: One of ``SHELLS``.
        program: This program's file, which the script asks; nothing that is being typed is ever started.
    """
    text = (Path(__file__).parents[1] / "shells" / f"trainworks.{shell}").read_text(encoding="utf-8")
    asked = [sys.executable, "-P", str(program.resolve()), "completion"]
    return text.replace("@ASKED@", " ".join(map(shlex.quote, asked)))
