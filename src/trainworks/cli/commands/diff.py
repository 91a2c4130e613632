"""``build.py diff``: what is another between two images."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

from trainworks.cli.grammar import DOCKER_HOST, FACTS, TARGET, Example, Grammar, add_engine, add_format
from trainworks.cli.output import put
from trainworks.errors import EngineUnavailableError, FactsError, ImageTestError, UnknownNameError


def parser() -> Grammar:
    """Return the grammar of ``build.py diff``."""
    grammar = Grammar(
        "diff",
        summary="say what is another between two images",
        details="Says what is another between two images: components, Python and Debian packages, environment, "
        "labels, entry point, files and layers.",
        examples=(
            Example("diff my/train:1 my/train:2", "two images of the engine's store", needs="an engine"),
            Example(
                f"diff my/train:1 {TARGET} --format json",
                "an image and the one that was built for a target, for programs",
                needs="an engine",
            ),
        ),
        result="one line for each difference, `before -> after`, by kind; nothing is pulled, nothing is changed.",
        done="compared, whether or not they differ",
        fails=(FactsError, UnknownNameError, EngineUnavailableError, ImageTestError),
        reads=(FACTS, DOCKER_HOST),
        see_also=("report", "changelog"),
    )
    grammar.add_argument("before", metavar="IMAGE|TARGET", help="an image of the engine's store, or a target's name")
    grammar.add_argument("after", metavar="IMAGE|TARGET", help="the other one")
    add_engine(grammar)
    add_format(grammar)
    return grammar


def run(options: Namespace, root: Path) -> int:
    """Compare two images."""
    from trainworks.cli.contents import read_contents, reference_of
    from trainworks.cli.difference import as_text, difference
    from trainworks.engine import choose
    from trainworks.facts.load import load

    facts = load(root)
    engine = choose(options.engine)
    before = read_contents(engine, reference_of(options.before, facts), facts, digests=True)
    after = read_contents(engine, reference_of(options.after, facts), facts, digests=True)
    found = difference(before, after)
    put(json.dumps(found.as_values(), indent=2) + "\n" if options.format == "json" else as_text(found))
    return 0
