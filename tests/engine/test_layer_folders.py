"""Layers read where docker keeps them are the layers that ``docker save`` streams."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.helpers import BASE, request
from trainworks.engine.archive import layers_of
from trainworks.engine.docker import layer_folders
from trainworks.engine.folders import LayerFolder, readable
from trainworks.engine.protocol import Engine, Layer

DOCKERFILE = f"""\
FROM {BASE}
RUN mkdir -p /d/e && echo a > /d/one && echo b > /d/e/two && ln -s one /d/link && ln /d/one /d/hard
RUN rm /d/one && rm -r /d/e && mkdir /d/e && echo c > /d/e/three
RUN chmod 600 /etc/passwd
"""


def contents(layers: Iterator[Layer]) -> list[list[tuple[str, str, bytes]]]:
    """Return name, kind and content of every member, of all layers, in an order of their own."""
    found = []
    for layer in layers:
        members = []
        for member in layer.archive:
            if member.name == ".":  # the root itself, which some archives have
                continue
            kind = "folder" if member.isdir() else "link" if member.issym() else "file"
            content = b""
            file = layer.archive.extractfile(member) if member.isreg() else None
            if file is not None:
                with file:
                    content = file.read()
            # One of a file's two names is a file of its own in a folder, and a reference in an archive.
            if member.name.endswith(("/hard", "/one")):
                content = b""
            members.append((member.name.strip("/"), kind, content))
        found.append(sorted(members))
    return sorted(found)


@pytest.mark.engine
def test_folders_have_what_the_engine_streams(engine: Engine, tag: str, tmp_path: Path) -> None:
    if engine.name != "docker":
        pytest.skip(f"{engine.name} has no daemon that packs layers slowly")
    engine.build(request(tmp_path / "context", DOCKERFILE, tags=(tag,)), lambda _event: None)
    with engine.layers(tag) as layers:
        listed = list(layers)
    if not all(isinstance(layer.archive, LayerFolder) for layer in listed):
        pytest.skip("NOT TESTED: this daemon's layers cannot be read here (another driver, another machine, not root)")
    read = contents(iter(listed))
    with subprocess.Popen(("docker", "save", tag), stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        streamed = contents(layers_of(child.stdout))
    assert read == streamed
    names = [name for members in read for name, _, _ in members]
    assert "d/.wh.one" in names
    assert "d/e/.wh..wh..opq" in names


def described(**changes: Any) -> dict[str, Any]:
    data = {"UpperDir": "/store/top/diff", "LowerDir": "/store/middle/diff:/store/base/diff"}
    return {
        "GraphDriver": {"Name": "overlay2", "Data": data},
        "RootFS": {"Layers": ["base", "middle", "top"]},
    } | changes


def test_folders_belong_to_layers_lowest_first() -> None:
    assert layer_folders(described()) == {
        "base": Path("/store/base/diff"),
        "middle": Path("/store/middle/diff"),
        "top": Path("/store/top/diff"),
    }
    single = {"GraphDriver": {"Name": "overlay2", "Data": {"UpperDir": "/a"}}, "RootFS": {"Layers": ["one"]}}
    assert layer_folders(single) == {"one": Path("/a")}


@pytest.mark.parametrize(
    "changes",
    [
        {"GraphDriver": {"Name": "overlayfs", "Data": None}},
        {"GraphDriver": None},
        {"RootFS": {"Layers": ["base", "top"]}},
        {"RootFS": {}},
        {"GraphDriver": {"Name": "overlay2", "Data": {}}},
    ],
)
def test_a_daemon_that_does_not_say_is_asked_for_the_archive(changes: dict[str, Any]) -> None:
    assert layer_folders(described(**changes)) == {}


def test_folders_that_are_not_here_are_not_read(tmp_path: Path) -> None:
    assert readable([tmp_path])
    assert not readable([tmp_path, tmp_path / "none"])
    assert not readable([])
