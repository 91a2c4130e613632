"""``build.py changelog``: the changelog of a series of images."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from trainworks.cli.grammar import DOCKER_HOST, FACTS, TARGET, Example, Grammar, add_engine, add_format
from trainworks.errors import (
    EngineError,
    EngineUnavailableError,
    FactsError,
    ImageTestError,
    OutputError,
    UnknownNameError,
)
from trainworks.terminal.output import put_result, say, write_file


def parser() -> Grammar:
    """Return the grammar of ``build.py changelog``."""
    grammar = Grammar(
        "changelog",
        summary="write what changed from each image of a series to the next",
        details="Writes the changelog of a series of images as Markdown, from the differences of each to the next.",
        examples=(
            Example("changelog old/image:1 old/image:2", "what changed between two images", needs="an engine"),
            Example(
                f"changelog my/train:3 {TARGET} --file CHANGES.md",
                "add what is new in the target's image to a changelog that has the rest",
                needs="an engine",
            ),
        ),
        result="Markdown, the newest image first; with --file the name of the file.",
        done="written",
        fails=(FactsError, UnknownNameError, EngineError, EngineUnavailableError, ImageTestError),
        reads=(FACTS, DOCKER_HOST),
        see_also=("diff", "report"),
    )
    grammar.add_argument("images", nargs="+", metavar="IMAGE|TARGET", help="the oldest first")
    grammar.add_argument("--file", type=Path, metavar="FILE", help="add new entries to this changelog; default: stdout")
    add_engine(grammar)
    add_format(grammar)
    return grammar


def run(options: Namespace, root: Path) -> int:
    """Write a changelog."""
    from trainworks.engine import choose
    from trainworks.facts.load import load
    from trainworks.inspect.image_difference import changelog
    from trainworks.inspect.inspected_image import inspect_image
    from trainworks.inspect.targets import reference_of

    existing = ""
    if options.file is not None and options.file.exists():
        try:
            existing = options.file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise OutputError(f"cannot read {options.file} ({error})") from error
    facts = load(root)
    engine = choose(options.engine, report=say)
    images = [inspect_image(engine, reference_of(name, facts), facts, digests=True) for name in options.images]
    text = changelog(images, existing)
    if options.file is not None:
        write_file(options.file, text)
    file = None if options.file is None else str(options.file)
    content = {"images": [contents.image.reference for contents in images], "file": file, "changelog": text}
    put_result(options.format, content, text if file is None else f"{file}\n")
    return 0
