"""``build.py schema``: writes the JSON schemas of the files in ``images/``."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from trainworks.cli.grammar import Example, Grammar, Source, add_format
from trainworks.terminal.output import put_result


def parser() -> Grammar:
    """Return the grammar of ``build.py schema``."""
    grammar = Grammar(
        "schema",
        summary="write the JSON schemas of the files in images/",
        details="Writes the JSON schemas of the files in images/ to images/schema, from the types of the rows. Editors "
        "check rows with them.",
        examples=(
            Example("schema", "write them again; the same types give the same bytes"),
            Example("schema --root ../trainworks", "write those of another checkout", needs="that checkout"),
        ),
        result="the names of the files that were written.",
        done="written",
        reads=(Source("images/schema", "of the checkout (--root, else the folder of build.py)"),),
        see_also=("check", "docs/architecture.md"),
    )
    add_format(grammar)
    return grammar


def run(options: Namespace, root: Path) -> int:
    """Write the schemas."""
    from trainworks.facts.data import writable_root
    from trainworks.facts.schema import write_schemas

    files = [str(path) for path in write_schemas(writable_root(root, "`schema`") / "images" / "schema")]
    put_result(options.format, {"files": files}, "".join(f"{file}\n" for file in files))
    return 0
