"""Test the inputs that decide the bytes of the parts of an image."""

from __future__ import annotations

from trainworks.facts.rows import Facts, SourceFile
from trainworks.plan.resolve import plan_row
from trainworks.render.dockerfile import render
from trainworks.render.inputs import inputs_of


def test_every_file_of_a_context_is_an_input_of_some_part(facts: Facts) -> None:
    """Check that nothing that decides an image's bytes is missing in its provenance."""
    for row in facts.targets:
        plan = plan_row(row, facts)
        rendering = render(plan, facts)
        input_names = {name for part in inputs_of(plan, rendering).values() for name in part}
        unseen = [
            file.path
            for file in rendering.files
            if is_content(file) and f"file {file.path}" not in input_names
        ]
        assert unseen == [], facts.name_of(row)


def is_content(file: SourceFile) -> bool:
    """Lists of downloads are inputs line by line.

    The folders beside them hold local copies of the same files.
    """
    return not file.path.startswith(("requirements/", "artifacts/", "wheels/"))
