"""``build.py mirror``: fills a folder with everything that targets download."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path

from trainworks.cli.grammar import FACTS, HOST_SETTINGS, TARGET, Example, Grammar, Manual
from trainworks.cli.options import add_format, add_only
from trainworks.errors import FactsError, HostError, LockError, UnknownNameError
from trainworks.terminal.output import put_result


def parser() -> Grammar:
    """Return the grammar of ``build.py mirror``."""
    manual = Manual(
        command="mirror",
        summary="fill a folder with everything that targets download",
        details=(
            "Fills a folder with everything that targets download: files of components, git commits"
            " as bundles, and Python files. Each is verified."
        ),
        examples=(
            Example(
                f"mirror files --only {TARGET}",
                "download the files of one target",
                needs="the network",
            ),
            Example(
                "mirror /srv/mirror", "download missing files of all targets", needs="the network"
            ),
        ),
        result=(
            "the folder's name. `build.py --mirror DIR` builds from it, also with the URL of a"
            " server that has it."
        ),
        done="complete",
        fails=(FactsError, UnknownNameError, HostError, LockError),
        reads=(FACTS, HOST_SETTINGS),
        see_also=("lock", "docs/lock.md"),
    )
    grammar = Grammar(manual)
    grammar.add_argument(
        "folder",
        type=Path,
        metavar="DIR",
        help="fill this folder; files that it has are not downloaded again",
    )
    add_only(grammar)
    add_format(grammar)
    return grammar


def run(options: Namespace, root: Path) -> int:
    """Download the missing files of targets into a folder, and print the folder's name."""
    from trainworks.facts.load import load
    from trainworks.host.settings import read_host_settings
    from trainworks.inputs.fill_mirror import fill_mirror
    from trainworks.plan.select import rows_like

    facts = load(root)
    rows = rows_like(options.only, facts)
    fill_mirror(rows, facts, options.folder, read_host_settings(os.environ))
    content = {"folder": str(options.folder), "targets": [facts.name_of(row) for row in rows]}
    put_result(options.format, content, f"{options.folder}\n")
    return 0
