"""Test that the files of a recipe are the same layer in every image, on each base and at each time
of a build.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.helpers import BASE, request
from trainworks.engine.archive import layers_of
from trainworks.engine.protocol import Engine, Layer
from trainworks.facts.load import load
from trainworks.plan.model import IMAGE_TIME
from trainworks.render.dockerfile import new_environment

ROOT = Path(__file__).resolve().parents[2]


def dockerfile(number: int, wheel: str) -> str:
    """Return a Dockerfile that installs the same files by another command into another image.

    Args:
        number: Another one for each image.
        wheel: The content of the files, new for each test: an engine finds a COPY in its cache by
            content alone.
    """
    environment = new_environment(load(ROOT).templates.items())
    as_layer = environment.from_string(
        "{% import 'macros.j2' as macros %}{{ macros.as_layer() }}"
    ).render()
    return f"""\
FROM {BASE} AS stage
RUN echo {number} && mkdir -p /opt/venv/lib && echo {wheel} > /opt/venv/lib/wheel \\
    && ln -s wheel /opt/venv/lib/link \\
    && {as_layer}
FROM {BASE}
RUN mkdir -p /opt/venv/lib && echo {number} > /opt/venv/lib/other
COPY --from=stage /opt/root /
"""


def times(layers: Iterator[Layer]) -> list[list[tuple[str, float]]]:
    """Return the members of all layers with their times.

    The archive's entry of the root itself is left out.
    """
    return [
        [
            (name, member.mtime)
            for member in layer.archive
            if (name := member.name.strip("/")) not in ("", ".")
        ]
        for layer in layers
    ]


def exported(engine: Engine, tag: str) -> list[list[tuple[str, float]]]:
    """Return the layers that a push would send of an image; docker's own folders would not say the
    times.
    """
    if engine.name != "docker":
        with engine.layers(tag) as layers:
            return times(layers)
    with subprocess.Popen(("docker", "save", tag), stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        return times(layers_of(child.stdout))


@pytest.mark.engine
def test_the_same_files_are_the_same_layer(engine: Engine, tag: str, tmp_path: Path) -> None:
    layer_lists = []
    for number in (1, 2):
        context = tmp_path / f"context-{number}"
        engine.build(request(context, dockerfile(number, tag), tags=(tag,)), lambda _event: None)
        layer_lists.append(
            next(layer for layer in exported(engine, tag) if "opt/venv/lib/wheel" in dict(layer))
        )
    assert layer_lists[0] == layer_lists[1]
    assert {time for _, time in layer_lists[0]} == {IMAGE_TIME}
    assert "opt/venv/lib/other" not in dict(layer_lists[0])
