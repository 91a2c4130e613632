"""An image is compared with the layers that its label names: the same ones,
others, or more of them.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest

from trainworks.build.image import ImageSpec, unchanged_image
from trainworks.build.layer_audit import compare_layers, layers_of
from trainworks.build.options import BuildOptions
from trainworks.engine.entries import entries_of
from trainworks.engine.protocol import BuiltImage, Engine
from trainworks.errors import EngineError
from trainworks.host.settings import read_host_settings
from trainworks.render.dockerfile import INPUTS_LABEL, LAYERS_LABEL, Rendering

Members = Mapping[str, bytes | tarfile.TarInfo]


@dataclass(frozen=True, kw_only=True)
class Archive:
    """The one thing that is asked of an engine: an archive of an image.

    ``words`` is why the archive ends too early.
    """

    name: str = "docker"
    content: bytes
    words: str = ""

    @contextmanager
    def archive(self, _reference: str) -> Iterator[io.BytesIO]:
        yield io.BytesIO(self.content)
        if self.words:
            raise EngineError(self.words)


@dataclass(frozen=True)
class Store:
    """The one thing that is asked of an engine: the image of a name."""

    image: BuiltImage

    def inspect(self, _reference: str) -> BuiltImage:
        return self.image


def packed(members: Members) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, kind in members.items():
            if isinstance(kind, tarfile.TarInfo):
                archive.addfile(kind, io.BytesIO(bytes(kind.size)))
                continue
            member = tarfile.TarInfo(name)
            member.type = kind
            member.linkname = "UTC" if kind == tarfile.SYMTYPE else ""
            member.mode = 0o1777 if (name, len(members)) == ("tmp", 3) else member.mode
            archive.addfile(member)
    return stream.getvalue()


def digest_of(layer: bytes) -> str:
    return f"sha256:{hashlib.sha256(layer).hexdigest()}"


BASE = packed({"etc": tarfile.DIRTYPE, "etc/localtime": tarfile.REGTYPE, "tmp": tarfile.DIRTYPE})
SYSTEM = packed({"etc/motd": tarfile.REGTYPE})
OTHER = packed({"etc/other": tarfile.REGTYPE})
IMAGE = BuiltImage(
    reference="one:1",
    identifier="sha256:a",
    size=1,
    labels={},
    environment={},
    layers=(digest_of(BASE), digest_of(SYSTEM)),
)
IMAGE = replace(IMAGE, labels={LAYERS_LABEL: layers_of(IMAGE)})


def lines(*layers: bytes) -> list[str]:
    """Return the lines about an image of these layers, which was built with two."""
    image = replace(IMAGE, layers=tuple(map(digest_of, layers)))
    intact, outcome = compare_layers(image, cast("Engine", Archive(content=saved(*layers))))
    assert intact.passed
    assert outcome.passed == (not outcome.detail)
    detail_lines = outcome.detail.splitlines()
    if len(layers) != 2:
        assert detail_lines.pop(0) == f"the image has {len(layers)} layers, and was built with 2"
    return detail_lines


def on_top(members: Members) -> list[str]:
    """Return the lines about the built image with a layer on top of it."""
    return lines(BASE, SYSTEM, packed(members))


def test_an_image_of_the_layers_that_its_label_names_is_the_one_that_was_built() -> None:
    assert lines(BASE, SYSTEM) == []
    nameless = replace(IMAGE, labels={})
    assert len(compare_layers(nameless, cast("Engine", Archive(content=saved(BASE, SYSTEM))))) == 1


def test_layers_that_are_other_ones_or_missing_are_counted() -> None:
    assert lines(OTHER, SYSTEM) == ["layer 1 of 2 is not the one that was built"]
    assert lines(BASE) == ["layer 2 of 2 is not the one that was built"]
    assert len(lines(OTHER)) == 2


def test_a_layer_on_top_is_told_with_what_it_changes_removes_and_replaces() -> None:
    top: Members = {
        "etc": tarfile.DIRTYPE,
        "etc/localtime": tarfile.SYMTYPE,
        "etc/motd": tarfile.REGTYPE,
        "etc/.wh.passwd": tarfile.REGTYPE,
        "etc/pipe.conf": tarfile.FIFOTYPE,
        "tmp": tarfile.DIRTYPE,
        "opt/data/.wh..wh..opq": tarfile.REGTYPE,
        "opt/bad\nname": tarfile.REGTYPE,
    }
    assert on_top(top) == [
        "/etc/passwd is removed (layer 1 on top)",
        "/etc/localtime has type link, was file, target UTC, was none (layer 1 on top)",
        "/etc/motd is written again (layer 1 on top)",
        "/etc/pipe.conf is new (layer 1 on top)",
        "/opt/bad\\nname is new (layer 1 on top)",
        "/opt/data has nothing left of what was in it (layer 1 on top)",
        "/tmp has mode 0644, was 1777 (layer 1 on top)",
    ]


def saved(*layers: bytes) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for number, layer in enumerate(layers):
            member = tarfile.TarInfo(f"{number}/layer.tar")
            member.size = len(layer)
            archive.addfile(member, io.BytesIO(layer))
    return stream.getvalue()


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        (Archive(content=saved(BASE, SYSTEM)), ""),
        (Archive(content=saved(gzip.compress(BASE), SYSTEM)), ""),
        (Archive(content=saved(BASE, OTHER)), "layer 2 of 2 has other bytes than its digest says"),
        (Archive(content=saved(BASE)), "layer 2 of 2 has other bytes than its digest says"),
        (
            Archive(content=saved(gzip.compress(BASE)[:-9], SYSTEM)),
            "the engine's copy of the image cannot be read",
        ),
        (Archive(content=b"\1" * 5000), "the engine's copy of the image cannot be read"),
        (
            Archive(content=saved(BASE), words='file integrity checksum failed for "etc/two"'),
            'file integrity checksum failed for "etc/two"',
        ),
        (
            Archive(content=b"", words="write /tmp/x: no space left on device"),
            "write /tmp/x: no space left on device",
        ),
    ],
)
def test_bytes_that_are_not_those_of_their_digest_are_told(engine: Archive, expected: str) -> None:
    result, _ = compare_layers(IMAGE, cast("Engine", engine))
    assert result.passed == (not expected)
    assert result.detail.startswith(expected)


def test_an_engine_that_fails_for_another_reason_says_nothing_of_the_image() -> None:
    with pytest.raises(EngineError):
        compare_layers(
            IMAGE, cast("Engine", Archive(content=saved(BASE, SYSTEM), words="the daemon is busy"))
        )


def changed(name: str, kind: bytes, **facts: Any) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type = kind
    for fact, value in facts.items():
        setattr(member, fact, value)
    return member


LINKED = "etc/localtime"
CAPABILITY = {"SCHILY.xattr.security.capability": "x"}
DAY = 86_400


@pytest.mark.parametrize(
    ("member", "expected"),
    [
        (changed("etc", tarfile.DIRTYPE, uid=1000), "/etc has owner 1000, was 0"),
        (changed("etc", tarfile.DIRTYPE, gid=1000), "/etc has group 1000, was 0"),
        (changed("etc", tarfile.DIRTYPE, mode=0o777), "/etc has mode 0777, was 0644"),
        (
            changed("etc", tarfile.DIRTYPE, mtime=DAY),
            "/etc has time 1970-01-02T00:00:00+00:00, was 1970-01-01T00:00:00+00:00",
        ),
        (changed(LINKED, tarfile.REGTYPE, uid=1000), "/etc/localtime has owner 1000, was 0"),
        (changed(LINKED, tarfile.REGTYPE, gid=1000), "/etc/localtime has group 1000, was 0"),
        (changed(LINKED, tarfile.REGTYPE, size=3), "/etc/localtime has size 3 B, was 0 B"),
        (changed(LINKED, tarfile.REGTYPE, mtime=DAY), "/etc/localtime is written again"),
        (
            changed(LINKED, tarfile.REGTYPE, pax_headers=CAPABILITY),
            "/etc/localtime has attributes security.capability, was none",
        ),
        (changed(LINKED, tarfile.FIFOTYPE), "/etc/localtime has type pipe, was file"),
        (
            changed(LINKED, tarfile.CHRTYPE, devmajor=1, devminor=3),
            "/etc/localtime has type character device, was file, target 1, 3, was none",
        ),
        (
            changed("etc", tarfile.DIRTYPE),
            "layer 1 on top changes no file: it has the folders of the image once more, or nothing",
        ),
    ],
)
def test_each_fact_of_a_path_is_compared(member: tarfile.TarInfo, expected: str) -> None:
    (line,) = on_top({member.name: member})
    assert line.removesuffix(" (layer 1 on top)") == expected


def test_an_empty_layer_on_top_is_told() -> None:
    (line,) = on_top({})
    assert line.startswith("layer 1 on top changes no file")


def test_a_hard_link_has_the_facts_of_its_file() -> None:
    file = changed("opt/one", tarfile.REGTYPE, uid=7, size=5)
    link = changed("opt/two", tarfile.LNKTYPE, linkname="opt/one")
    entries = entries_of([file, link])
    assert entries["/opt/two"] == entries["/opt/one"]
    assert entries["/opt/two"].owner == 7


def test_what_was_made_from_an_image_is_not_taken_for_it() -> None:
    rendering = Rendering(dockerfile="FROM x\n", files=(), stage_components={})
    spec = ImageSpec(
        name="one",
        tags=("one:1",),
        rendering=rendering,
        settings=read_host_settings({}),
        secrets={},
    )
    built = replace(IMAGE, labels={**IMAGE.labels, INPUTS_LABEL: rendering.digest})
    for image, taken in (
        (built, True),
        (replace(built, layers=(*built.layers, digest_of(OTHER))), False),
        (IMAGE, False),
    ):
        image_unchanged = unchanged_image(spec, cast("Engine", Store(image)), BuildOptions())
        assert (image_unchanged is not None) == taken


def test_a_large_layer_is_told_in_few_lines() -> None:
    change_lines = on_top({f"opt/{number:03}": tarfile.REGTYPE for number in range(300)})
    assert change_lines == ["/opt/ (300 files, as /opt/000) is new (layer 1 on top)"]
