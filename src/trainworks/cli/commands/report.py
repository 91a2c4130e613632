"""``build.py report``: the size of an image by component."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path

from trainworks.cli.grammar import DOCKER_HOST, FACTS, MEMORY, TARGET, Example, Grammar, add_engine, add_format
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
    """Return the grammar of ``build.py report``."""
    grammar = Grammar(
        "report",
        summary="show image size by component, and what grew",
        details="Shows where the bytes of an image are: components, packages, largest files and layers, and the size "
        "budget. Compares it with the last report on this machine of another image with the same name.",
        examples=(
            Example(f"report {TARGET}", "the image of a target", needs="an engine"),
            Example("report my/train:2 --since my/train:1 --format json", "what grew", needs="an engine"),
        ),
        result="tables, the largest first. Keep the report of --format json as a file for a later --since.",
        done="reported, also if the image is over its budget",
        fails=(
            FactsError,
            UnknownNameError,
            EngineError,
            EngineUnavailableError,
            ImageTestError,
            LockError,
            CompatibilityError,
        ),
        reads=(FACTS, DOCKER_HOST, MEMORY),
        see_also=("diff", "changelog"),
    )
    grammar.add_argument("image", metavar="IMAGE|TARGET", help="show this image of the engine, or of a target")
    grammar.add_argument(
        "--since", metavar="IMAGE|FILE", help="compare with this image, or a report of `--format json`"
    )
    add_engine(grammar)
    add_format(grammar)
    return grammar


def run(options: Namespace, root: Path) -> int:
    """Report on an image."""
    from trainworks.engine import choose
    from trainworks.facts.load import load
    from trainworks.inspect.inspected_image import inspect_image
    from trainworks.inspect.size_report import SizeReport, as_text, growth_of, read_report, remember, size_report
    from trainworks.inspect.targets import plan_of_target, reference_of

    facts = load(root)
    engine = choose(options.engine, report=say)

    def size(name: str) -> SizeReport:
        contents = inspect_image(engine, reference_of(name, facts), facts)
        return size_report(contents, plan_of_target(contents.name, facts), facts)

    report = size(options.image)
    before = remember(report, engine.name, os.environ)
    if options.since:
        before = read_report(Path(options.since)) if Path(options.since).is_file() else size(options.since)
    growth = growth_of(before, report) if before else None
    content = {**report.as_values(), "growth": growth and growth.as_values()}
    put_result(options.format, content, as_text(report, before))
    return 0
