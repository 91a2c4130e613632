"""``build.py report``: the size of an image by component."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict
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
    """Return the grammar of ``build.py report``."""
    manual = Manual(
        command="report",
        summary="show image size by component",
        details=(
            "Shows where the bytes of an image are: components, packages and largest files, and the"
            " size budget. `build.py diff` shows what grew since another image."
        ),
        examples=(
            Example(f"report {TARGET}", "the image of a target", needs="an engine"),
            Example(
                "report my/train:2 --format json", "any image, for programs", needs="an engine"
            ),
        ),
        result="tables, the largest first.",
        done="reported, also if the image is over its budget",
        fails=(*PLANNING_ERRORS, *IMAGE_ERRORS),
        reads=(FACTS, DOCKER_HOST),
        see_also=("diff",),
    )
    grammar = Grammar(manual)
    grammar.add_argument(
        "image", metavar="IMAGE|TARGET", help="show this image of the engine, or of a target"
    )
    add_engine(grammar)
    add_format(grammar)
    return grammar


def run(options: Namespace, root: Path) -> int:
    """Print the sizes of an image's components, packages and files."""
    from trainworks.engine import choose
    from trainworks.facts.load import load
    from trainworks.inspect.inspected_image import inspect_image
    from trainworks.inspect.size_report import as_text, make_size_report
    from trainworks.inspect.targets import find_image, plan_of_target

    facts = load(root)
    engine = choose(options.engine, report=say)

    contents = inspect_image(engine, find_image(options.image, engine, facts), facts)
    report = make_size_report(contents, plan_of_target(contents.name, facts), facts)
    put_result(options.format, asdict(report), as_text(report))
    return 0
