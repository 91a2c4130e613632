"""Layers read where docker keeps them are the layers that ``docker save`` streams."""

from __future__ import annotations

import json
import posixpath
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.helpers import BASE, request
from trainworks.build.layer_audit import compare_layers
from trainworks.engine.archive import layers_of
from trainworks.engine.docker import layer_folders
from trainworks.engine.entries import WHITEOUT, Entry, entries_of
from trainworks.engine.overlay_layers import LayerFolder, readable
from trainworks.engine.protocol import Engine, Layer

DOCKERFILE = f"""\
FROM {BASE}
RUN mkdir -p /d/e && echo a > /d/one && echo b > /d/e/two && ln -s one /d/link && ln /d/one /d/hard
RUN rm /d/one && rm -r /d/e && mkdir /d/e && echo c > /d/e/three
RUN chmod 600 /etc/passwd && chown 1000:1001 /d /d/link -h && chgrp 1002 /d/hard && mkfifo /d/pipe
RUN touch -d @172800 /d/e
"""


def facts(layers: Iterator[Layer]) -> list[dict[str, Entry]]:
    """Return all facts of every path, of all layers, in an order of their own."""
    layer_entries = []
    for layer in layers:
        entries = entries_of(layer.archive)
        # The root itself, which some archives have.
        entries.pop("/", None)
        layer_entries.append(entries)
    return sorted(layer_entries, key=lambda entries: sorted(entries))


def contents(layers: Iterator[Layer]) -> list[list[tuple[str, str, bytes]]]:
    """Return name, kind and content of every member, of all layers, in an order of their own."""
    layer_members = []
    for layer in layers:
        members = []
        for member in layer.archive:
            if member.name == ".":  # the root itself, which some archives have
                continue
            kind = "link" if member.issym() else "file"
            if member.isdir():
                kind = "folder"
            content = b""
            file = layer.archive.extractfile(member) if member.isreg() else None
            if file is not None:
                with file:
                    content = file.read()
            # One of a file's two names is a file of its own in a folder, and a
            # reference in an archive.
            if member.name.endswith(("/hard", "/one")):
                content = b""
            members.append((member.name.strip("/"), kind, content))
        layer_members.append(sorted(members))
    return sorted(layer_members)


@pytest.mark.engine
def test_folders_have_what_the_engine_streams(engine: Engine, tag: str, tmp_path: Path) -> None:
    if engine.name != "docker":
        pytest.skip(f"{engine.name} has no daemon that packs layers slowly")
    engine.build(request(tmp_path / "context", DOCKERFILE, tags=(tag,)), lambda _event: None)
    with engine.layers(tag) as layers:
        listed = list(layers)
    if not all(isinstance(layer.archive, LayerFolder) for layer in listed):
        pytest.skip(
            "NOT TESTED: this daemon's layers cannot be read here (another driver,"
            " another machine, not root)"
        )
    read = contents(iter(listed))
    with subprocess.Popen(("docker", "save", tag), stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        streamed = contents(layers_of(child.stdout))
    assert read == streamed
    compared, expected = facts(iter(listed)), saved(tag)
    for here, there in zip(compared, expected, strict=True):
        marks = {path for path in here if posixpath.basename(path).startswith(WHITEOUT)}
        assert here.keys() == there.keys()
        for path in here.keys() - marks:
            assert here[path] == there[path]
    entry_at = {path: entry for entries in compared for path, entry in entries.items()}
    assert (entry_at["/d/link"].owner, entry_at["/d/link"].group, entry_at["/d/link"].target) == (
        1000,
        1001,
        "one",
    )
    assert entry_at["/d/e"].time == 172_800
    assert entry_at["/d/pipe"].type == "pipe"
    names = [name for members in read for name, _, _ in members]
    assert "d/.wh.one" in names
    assert "d/e/.wh..wh..opq" in names


@pytest.mark.engine
def test_a_byte_that_changed_on_the_disk_is_seen(engine: Engine, tag: str, tmp_path: Path) -> None:
    if engine.name != "docker":
        pytest.skip(f"{engine.name} has no folder of a layer that a test can find")
    # By a name of its own: the engine's cache would give the damaged layer to the next run.
    steps = f"FROM {BASE}\nRUN : {tag} && head -c 100000 /dev/urandom > /damaged\n"
    image = engine.build(request(tmp_path / "context", steps, tags=(tag,)), lambda _event: None)
    with engine.layers(tag) as layers:
        folders = [layer.archive for layer in layers]
    if not all(isinstance(folder, LayerFolder) for folder in folders):
        pytest.skip("NOT TESTED: this daemon's layers cannot be changed by a test")
    assert all(layer_result.passed for layer_result in compare_layers(image, engine))
    (store,) = (path for path in layer_paths(tag) if (path / "damaged").exists())
    with (store / "damaged").open("r+b") as file:
        file.seek(50_000)
        (byte,) = file.read(1)
        file.seek(50_000)
        file.write(bytes([byte ^ 1]))
    check_result = compare_layers(image, engine)[0]
    assert not check_result.passed
    assert "damaged" in check_result.detail


def layer_paths(tag: str) -> list[Path]:
    described = subprocess.run(
        ("docker", "inspect", tag), stdout=subprocess.PIPE, check=True
    ).stdout
    return list(layer_folders(json.loads(described)[0]).values())


def saved(tag: str) -> list[dict[str, Entry]]:
    with subprocess.Popen(("docker", "save", tag), stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        return facts(layers_of(child.stdout))


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
    single = {
        "GraphDriver": {"Name": "overlay2", "Data": {"UpperDir": "/a"}},
        "RootFS": {"Layers": ["one"]},
    }
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
