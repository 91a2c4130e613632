"""Image archives: the same bytes for the same files, nothing lost, one pass."""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
from pathlib import Path

import pytest

from trainworks.engine.archive import ImageConfiguration, images_in, layers_of, write_archive
from trainworks.errors import BuildError, OutputError

CREATED = 1_700_000_000


def rootfs(folder: Path) -> Path:
    (folder / "etc").mkdir(parents=True)
    (folder / "etc" / "hostname").write_text("tiny\n")
    (folder / "etc" / "link").symlink_to("hostname")
    (folder / "etc" / "hard").hardlink_to(folder / "etc" / "hostname")
    (folder / "empty").mkdir(mode=0o1777)
    (folder / "empty").chmod(0o1777)
    (folder / ("long" * 50)).write_text("a name longer than a tar header's field")
    (folder / "ümläut").write_text("not ASCII")
    os.mkfifo(folder / "pipe")
    for path in (folder / "etc" / "hostname", folder / "etc"):
        os.utime(path, (1_600_000_000, 1_600_000_000))
    return folder


def write(folder: Path, destination: Path) -> str:
    return write_archive(
        folder,
        destination,
        name="tiny:one",
        configuration=ImageConfiguration(
            created=CREATED, environment={"PATH": "/bin"}, command=("/bin/sh",)
        ),
    )


def test_the_same_files_give_the_same_bytes(tmp_path: Path) -> None:
    first = write(rootfs(tmp_path / "a"), tmp_path / "a.tar")
    second = write(rootfs(tmp_path / "b"), tmp_path / "b.tar")
    assert first == second
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()


def test_identifier_manifest_and_layer_agree(tmp_path: Path) -> None:
    identifier = write(rootfs(tmp_path / "a"), tmp_path / "a.tar")
    with tarfile.open(tmp_path / "a.tar") as outer:
        members = {member.name: outer.extractfile(member) for member in outer}
        contents = {name: file.read() for name, file in members.items() if file is not None}
    (manifest,) = json.loads(contents["manifest.json"])
    configuration = contents[manifest["Config"]]
    assert identifier == "sha256:" + hashlib.sha256(configuration).hexdigest()
    (difference,) = json.loads(configuration)["rootfs"]["diff_ids"]
    assert difference == "sha256:" + hashlib.sha256(contents[manifest["Layers"][0]]).hexdigest()
    assert json.loads(configuration)["config"] == {"Env": ["PATH=/bin"], "Cmd": ["/bin/sh"]}
    assert images_in(tmp_path / "a.tar") == (("tiny:one",),)


def test_every_kind_of_file_is_kept(tmp_path: Path) -> None:
    write(rootfs(tmp_path / "a"), tmp_path / "a.tar")
    with (tmp_path / "a.tar").open("rb") as file:
        layers = 0
        for layer in layers_of(file):
            members = {member.name: member for member in layer.archive}
            layers += 1
        assert layers == 1
    assert members["etc/link"].linkname == "hostname"
    assert members["etc/hostname"].islnk()
    assert members["etc/hostname"].linkname == "etc/hard"
    assert members["etc/hard"].mtime == 1_600_000_000
    assert members["empty"].mode == 0o1777
    assert members["pipe"].isfifo()
    assert "long" * 50 in members
    assert "ümläut" in members
    assert max(member.mtime for member in members.values()) <= CREATED


def test_contents_come_through_the_stream(tmp_path: Path) -> None:
    write(rootfs(tmp_path / "a"), tmp_path / "a.tar")
    with (tmp_path / "a.tar").open("rb") as file:
        for layer in layers_of(file):
            texts = {
                member.name: content.read()
                for member in layer.archive
                if member.isreg() and (content := layer.archive.extractfile(member)) is not None
            }
    assert texts["etc/hard"] == b"tiny\n"


def test_layers_that_are_not_read_are_passed_over(tmp_path: Path) -> None:
    write(rootfs(tmp_path / "a"), tmp_path / "a.tar")
    with (tmp_path / "a.tar").open("rb") as file:
        assert len([layer.name for layer in layers_of(file)]) == 1


def test_no_half_archive_is_left(tmp_path: Path) -> None:
    target = tmp_path / "folder" / "a.tar"
    with pytest.raises(OutputError, match="cannot write"):
        write(rootfs(tmp_path / "a"), target)
    (tmp_path / "out").mkdir()
    with pytest.raises(OutputError, match="nothing-there"):
        write(tmp_path / "nothing-there", tmp_path / "out" / "a.tar")
    assert list((tmp_path / "out").iterdir()) == []


def test_what_is_no_archive_says_so(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no archive")
    with pytest.raises(BuildError, match="not an image archive"):
        images_in(tmp_path / "text")
    with pytest.raises(OutputError, match="cannot read"):
        images_in(tmp_path / "missing")
