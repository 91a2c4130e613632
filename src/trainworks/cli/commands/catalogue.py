"""``build.py catalogue``: the matrix as one HTML file."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from trainworks.cli.grammar import FACTS, Example, Grammar
from trainworks.cli.options import add_format
from trainworks.errors import FactsError, OutputError
from trainworks.terminal.output import put, put_result, write_file


def parser() -> Grammar:
    """Return the grammar of ``build.py catalogue``."""
    grammar = Grammar(
        "catalogue",
        summary="write every target to one HTML page, with search and filters",
        details=(
            "Writes one HTML file with every target, built ones first: search and filters,"
            " versions, sizes, checks, and how to use each. It needs no network and no engine,"
            " neither to write it nor to read it."
        ),
        examples=(
            Example("catalogue --output catalogue.html", "write the page; open it in a browser"),
            Example(
                "catalogue --release .cache/release --output index.html",
                "with where images are",
                "a release",
            ),
        ),
        result=(
            "the page, or with --output the name of the file. Each target on it shows the command"
            " that builds it."
        ),
        done="written",
        fails=(FactsError, OutputError),
        reads=(FACTS,),
        see_also=("build --list", "check"),
    )
    grammar.add_argument(
        "--output", type=Path, metavar="FILE", help="write to this file; default: stdout"
    )
    grammar.add_argument(
        "--release",
        type=Path,
        metavar="DIR",
        help="the results of tools/release: where images are, what changed",
    )
    add_format(grammar, ("html", "json"), "write the page, or what build --list has")
    return grammar


def run(options: Namespace, root: Path) -> int:
    """Write the catalogue."""
    from trainworks.facts.load import load
    from trainworks.inspect.catalogue import catalogue_of, read_released, render_catalogue
    from trainworks.inspect.listing import list_json
    from trainworks.render.build_records import current_builds

    facts = load(root)
    if options.format == "json" and options.output is None:
        put(list_json(facts.targets, facts, current_builds(facts)))
        return 0
    entries = catalogue_of(facts, read_released(options.release) if options.release else None)
    text = render_catalogue(entries, facts.templates[TEMPLATE])
    if options.output is None:
        put(text)
        return 0
    write_file(options.output, text)
    put_result(options.format, {"file": str(options.output)}, f"{options.output}\n")
    return 0


TEMPLATE = "catalogue.html.j2"
