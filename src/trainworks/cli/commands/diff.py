"""``build.py diff``: what differs between two images."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from trainworks.cli.grammar import (
    DOCKER_HOST,
    FACTS,
    IMAGE_ERRORS,
    PLANNING_ERRORS,
    TARGET,
    Example,
    Grammar,
    Manual,
)
from trainworks.cli.options import add_engine, add_format
from trainworks.terminal.output import put_result, say


def parser() -> Grammar:
    """Return the grammar of ``build.py diff``."""
    manual = Manual(
        command="diff",
        summary="show what differs between two images",
        details=(
            "Shows what differs between two images: components, Python and Debian packages,"
            " environment, labels, entry point, files and layers."
        ),
        examples=(
            Example(
                "diff my/train:1 my/train:2", "two images of the engine's store", needs="an engine"
            ),
            Example(
                f"diff my/train:1 {TARGET} --format json",
                "an image and the one that was built for a target, for programs",
                needs="an engine",
            ),
        ),
        result=(
            "one line for each difference, `before -> after`, by kind;"
            " nothing is pulled, nothing is changed."
        ),
        done="compared, whether or not they differ",
        fails=(*PLANNING_ERRORS, *IMAGE_ERRORS),
        reads=(FACTS, DOCKER_HOST),
        see_also=("report",),
    )
    grammar = Grammar(manual)
    grammar.add_argument(
        "before", metavar="IMAGE|TARGET", help="an image of the engine's store, or a target's name"
    )
    grammar.add_argument("after", metavar="IMAGE|TARGET", help="the other one")
    add_engine(grammar)
    add_format(grammar)
    return grammar


def run(options: Namespace, root: Path) -> int:
    """Compare two images, and print the differences; return 0 also if they differ."""
    from trainworks.engine import choose
    from trainworks.facts.load import load
    from trainworks.inspect.image_difference import as_text, compare_images
    from trainworks.inspect.inspected_image import inspect_image
    from trainworks.inspect.targets import find_image

    facts = load(root)
    engine = choose(options.engine, report=say)
    # Both names are looked up first: an unknown one is an error before minutes of reading.
    reference_before = find_image(options.before, engine, facts)
    reference_after = find_image(options.after, engine, facts)
    before = inspect_image(engine, reference_before, facts, digests=True)
    after = inspect_image(engine, reference_after, facts, digests=True)
    difference = compare_images(before, after)
    put_result(options.format, difference.as_values(), as_text(difference))
    return 0
