"""``build.py diff``: what differs between two images."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from trainworks.cli.grammar import CPU_TARGET, DOCKER_HOST, FACTS, TARGET, Example, Grammar, add_engine, add_format
from trainworks.errors import (
    CompatibilityError,
    EngineError,
    EngineUnavailableError,
    FactsError,
    ImageTestError,
    LockError,
    UnknownNameError,
)
from trainworks.terminal.output import put_result, say


def parser() -> Grammar:
    """Return the grammar of ``build.py diff``."""
    grammar = Grammar(
        "diff",
        summary="show what differs between two images, or two targets",
        details="Shows what differs between two images: components, Python and Debian packages, environment, "
        "labels, entry point, files and layers. --planned compares two targets by their rows and locks alone: "
        "what an upgrade would change, without an engine.",
        examples=(
            Example(f"diff --planned {CPU_TARGET} {TARGET}", "what would change from one target to another"),
            Example("diff my/train:1 my/train:2", "two images of the engine's store", needs="an engine"),
            Example(
                f"diff my/train:1 {TARGET} --format json",
                "an image and the one that was built for a target, for programs",
                needs="an engine",
            ),
        ),
        result="one line for each difference, `before -> after`, by kind; nothing is pulled, nothing is changed.",
        done="compared, whether or not they differ",
        fails=(
            FactsError,
            UnknownNameError,
            EngineError,
            EngineUnavailableError,
            ImageTestError,
            LockError,
            CompatibilityError,
        ),
        reads=(FACTS, DOCKER_HOST),
        see_also=("report", "changelog"),
    )
    grammar.add_argument("before", metavar="IMAGE|TARGET", help="an image of the engine's store, or a target's name")
    grammar.add_argument("after", metavar="IMAGE|TARGET", help="the other one")
    grammar.add_argument("--planned", action="store_true", help="compare two targets before they are built")
    add_engine(grammar)
    add_format(grammar)
    return grammar


def run(options: Namespace, root: Path) -> int:
    """Compare two images."""
    from trainworks.engine import choose
    from trainworks.facts.load import load
    from trainworks.inspect.image_difference import as_text, difference, planned_as_text
    from trainworks.inspect.inspected_image import inspect_image
    from trainworks.inspect.targets import plans_of_targets, reference_of
    from trainworks.plan.difference import plan_difference

    facts = load(root)
    if options.planned:
        before, after = plans_of_targets((options.before, options.after), facts)
        planned = plan_difference(before, after)
        put_result(options.format, planned.as_values(), planned_as_text(planned))
        return 0
    engine = choose(options.engine, report=say)
    found = difference(
        inspect_image(engine, reference_of(options.before, facts), facts, digests=True),
        inspect_image(engine, reference_of(options.after, facts), facts, digests=True),
    )
    put_result(options.format, found.as_values(), as_text(found))
    return 0
