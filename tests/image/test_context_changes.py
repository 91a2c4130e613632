"""A context lies at the same place for each build of a target: every change in
it must still be seen.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from image.support import ROOT, BuiltByCommand
from trainworks.build.context import replace_output, write_context
from trainworks.engine.protocol import BuildRequest
from trainworks.facts.load import load
from trainworks.facts.rows import SourceFile
from trainworks.plan.model import Request
from trainworks.plan.resolve import make_plan
from trainworks.render.dockerfile import Rendering

pytestmark = pytest.mark.engine

TAG = "trainworks-test/context-changes:latest"


def test_a_change_that_keeps_its_size_is_seen(image: BuiltByCommand, tmp_path: Path) -> None:
    base = make_plan(Request(framework="pytorch", cuda="cpu"), load(ROOT)).image
    dockerfile = f"# Written by trainworks\nFROM {base}\nCOPY word /word\n"
    seen = []
    for word in (b"one", b"two", b"one"):
        rendering = Rendering(
            dockerfile=dockerfile,
            files=(SourceFile(path="word", content=word),),
            stage_components={},
        )
        context = tmp_path / "context"
        replace_output(rendering, context)
        write_context(rendering, context)
        built = image.engine.build(
            BuildRequest(name="changes", context=context, tags=(TAG,)), lambda _event: None
        )
        with image.engine.container(built.identifier) as container:
            seen.append(container.run(("cat", "/word")).output)
    image.engine.remove(TAG)
    assert seen == ["one", "two", "one"]
