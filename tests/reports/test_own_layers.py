"""An image is compared with the layers that its label names: the same ones, others, or more of them."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import cast

from trainworks.assemble.image import ImageSpec, unchanged_image
from trainworks.assemble.order import BuildOptions
from trainworks.assemble.own_layers import compare_layers, layers_of
from trainworks.engine.protocol import BuiltImage, Engine, Layer
from trainworks.host.settings import read_host_settings
from trainworks.render.dockerfile import INPUTS_LABEL, LAYERS_LABEL, Rendering

BASE, SYSTEM, TOP = (f"sha256:{digit * 64}" for digit in "123")
IMAGE = BuiltImage(
    reference="one:1",
    identifier="sha256:a",
    size=1,
    labels={},
    environment={},
    layers=(BASE, SYSTEM),
)
IMAGE = replace(IMAGE, labels={LAYERS_LABEL: layers_of(IMAGE)})


@dataclass(frozen=True, kw_only=True)
class Layers:
    """The one thing that is asked of an engine: what is in each layer, as types of members by their names."""

    content: Mapping[str, Mapping[str, bytes]]

    @contextmanager
    def layers(self, _reference: str) -> Iterator[Iterator[Layer]]:
        yield (Layer(name=name, archive=packed(members)) for name, members in self.content.items())


@dataclass(frozen=True)
class Store:
    """The one thing that is asked of an engine: the image of a name."""

    image: BuiltImage

    def inspect(self, _reference: str) -> BuiltImage:
        return self.image


def packed(members: Mapping[str, bytes]) -> tarfile.TarFile:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, kind in members.items():
            member = tarfile.TarInfo(name)
            member.type = kind
            member.linkname = "UTC" if kind == tarfile.SYMTYPE else ""
            member.mode = 0o1777 if (name, len(members)) == ("tmp", 3) else member.mode
            archive.addfile(member)
    stream.seek(0)
    return tarfile.open(fileobj=stream, mode="r|")


def lines(image: BuiltImage, top: Mapping[str, bytes] | None = None) -> list[str]:
    base = {"etc": tarfile.DIRTYPE, "etc/localtime": tarfile.REGTYPE, "tmp": tarfile.DIRTYPE}
    content = {BASE: base, SYSTEM: {"etc/motd": tarfile.REGTYPE}, TOP: top or {}}
    outcome = compare_layers(image, cast("Engine", Layers(content=content)))
    assert outcome is not None
    assert outcome.passed == (not outcome.detail)
    return outcome.detail.splitlines()


def test_an_image_of_the_layers_that_its_label_names_is_the_one_that_was_built() -> None:
    assert lines(IMAGE) == []
    assert compare_layers(replace(IMAGE, labels={}), cast("Engine", Layers(content={}))) is None


def test_layers_that_are_other_ones_or_missing_are_counted() -> None:
    assert lines(replace(IMAGE, layers=(TOP, SYSTEM))) == ["layer 1 of 2 is not the one that was built"]
    assert lines(replace(IMAGE, layers=(BASE,))) == ["layer 2 of 2 is not the one that was built"]
    assert len(lines(replace(IMAGE, layers=(TOP,)))) == 2


def test_a_layer_on_top_is_told_with_what_it_changes_removes_and_replaces() -> None:
    top = {
        "etc": tarfile.DIRTYPE,
        "etc/localtime": tarfile.SYMTYPE,
        "etc/motd": tarfile.REGTYPE,
        "etc/.wh.passwd": tarfile.REGTYPE,
        "etc/pipe.conf": tarfile.FIFOTYPE,
        "tmp": tarfile.DIRTYPE,
        "opt/data/.wh..wh..opq": tarfile.REGTYPE,
        "opt/bad\nname": tarfile.REGTYPE,
    }
    image = replace(IMAGE, layers=(BASE, SYSTEM, TOP))
    assert lines(image, top) == [
        "/etc/passwd is removed (layer 1 on top)",
        "/etc/localtime has type link, was file, target UTC, was none (layer 1 on top)",
        "/etc/motd is written again (layer 1 on top)",
        "/etc/pipe.conf is new (layer 1 on top)",
        "/opt/bad\\nname is new (layer 1 on top)",
        "/opt/data has nothing left of what was in it (layer 1 on top)",
        "/tmp has mode 0644, was 1777 (layer 1 on top)",
    ]


def test_what_was_made_from_an_image_is_not_taken_for_it() -> None:
    rendering = Rendering(dockerfile="FROM x\n", files=(), stage_components={})
    spec = ImageSpec(name="one", tags=("one:1",), rendering=rendering, settings=read_host_settings({}), secrets={})
    built = replace(IMAGE, labels={**IMAGE.labels, INPUTS_LABEL: rendering.digest})
    for image, taken in ((built, True), (replace(built, layers=(*built.layers, TOP)), False), (IMAGE, False)):
        found = unchanged_image(spec, cast("Engine", Store(image)), BuildOptions())
        assert (found is not None) == taken


def test_a_large_layer_is_told_in_few_lines() -> None:
    image = replace(IMAGE, layers=(BASE, SYSTEM, TOP))
    found = lines(image, {f"opt/{number:03}": tarfile.REGTYPE for number in range(300)})
    assert found == ["/opt/ (300 files, as /opt/000) is new (layer 1 on top)"]
