"""An image is compared with the one that was tested: equal, with layers on top, or with another configuration."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import pytest

from trainworks.assemble.same_content import differences, known_image, remember
from trainworks.engine.protocol import BuiltImage, Engine, Layer

BASE, SYSTEM, TOP = (f"sha256:{digit * 64}" for digit in "123")
IMAGE = BuiltImage(
    reference="one:1",
    identifier="sha256:a",
    size=1,
    labels={},
    environment={},
    layers=(BASE, SYSTEM),
    configuration={"Env": ["PATH=/bin"], "Labels": {"title": "x"}, "Entrypoint": ["train"]},
)


@dataclass(frozen=True, kw_only=True)
class Layers:
    """The one thing that is asked of an engine: what is in each layer, as types of members by their names."""

    content: Mapping[str, Mapping[str, bytes]]

    @contextmanager
    def layers(self, _reference: str) -> Iterator[Iterator[Layer]]:
        yield (Layer(name=name, archive=packed(members)) for name, members in self.content.items())


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


@pytest.fixture
def environment(tmp_path: Path) -> Mapping[str, str]:
    found = {"XDG_CACHE_HOME": str(tmp_path)}
    remember(IMAGE, "2026-11-26T18:00:00+00:00", 178, found)
    return found


def lines(image: BuiltImage, environment: Mapping[str, str], top: Mapping[str, bytes] | None = None) -> list[str]:
    tested = known_image(image, environment)
    assert tested is not None
    base = {"etc": tarfile.DIRTYPE, "etc/localtime": tarfile.REGTYPE, "tmp": tarfile.DIRTYPE}
    content = {BASE: base, SYSTEM: {"etc/motd": tarfile.REGTYPE}, TOP: top or {}}
    outcome = differences(image, tested, cast("Engine", Layers(content=content)))
    assert not outcome.passed
    return outcome.detail.splitlines()


def test_the_same_layers_and_configuration_are_the_image_that_was_tested(environment: Mapping[str, str]) -> None:
    tested = known_image(IMAGE, environment)
    assert tested is not None
    assert (tested.identifier, tested.checks) == (IMAGE.identifier, 178)
    assert known_image(replace(IMAGE, layers=(TOP, SYSTEM)), environment) is None
    assert known_image(replace(IMAGE, layers=(BASE,)), environment) is None


def test_a_layer_on_top_is_told_with_what_it_changes_removes_and_replaces(environment: Mapping[str, str]) -> None:
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
    image = replace(IMAGE, identifier="sha256:b", layers=(BASE, SYSTEM, TOP))
    assert lines(image, environment, top) == [
        "/etc/passwd is removed (layer 1)",
        "/etc/localtime has type link, was file, target UTC, was none (layer 1)",
        "/etc/motd is written again (layer 1)",
        "/etc/pipe.conf is new (layer 1)",
        "/opt/bad\\nname is new (layer 1)",
        "/opt/data has nothing left of what was in it (layer 1)",
        "/tmp has mode 0644, was 1777 (layer 1)",
    ]


def test_a_large_layer_is_told_in_few_lines(environment: Mapping[str, str]) -> None:
    image = replace(IMAGE, identifier="sha256:b", layers=(BASE, SYSTEM, TOP))
    found = lines(image, environment, {f"opt/{number:03}": tarfile.REGTYPE for number in range(300)})
    assert found == ["/opt/ (300 files, as /opt/000) is new (layer 1)"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"OnBuild": ["RUN false"]}, "ONBUILD is ['RUN false'], and was None"),
        ({"Healthcheck": {"Test": ["CMD", "false"]}}, "HEALTHCHECK is {'Test': ['CMD', 'false']}, and was None"),
        ({"ExposedPorts": {"22/tcp": {}}}, "EXPOSE is {'22/tcp': {}}, and was None"),
        ({"Shell": ["/bin/false"]}, "SHELL is ['/bin/false'], and was None"),
        ({"Volumes": {"/opt": {}}}, "VOLUME is {'/opt': {}}, and was None"),
        ({"Entrypoint": ["env"]}, "ENTRYPOINT is ['env'], and was ['train']"),
        ({"Env": ["PATH=/bin", "A=1"]}, "ENV A is '1', and was None"),
        ({"Labels": {"title": "y"}}, "LABEL title is 'y', and was 'x'"),
        ({"StopSignal": "SIGINT"}, "STOPSIGNAL is 'SIGINT', and was None"),
    ],
)
def test_another_configuration_is_told_by_instruction(
    environment: Mapping[str, str], changes: Mapping[str, object], said: str
) -> None:
    image = replace(IMAGE, identifier="sha256:b", configuration={**IMAGE.configuration, **changes})
    assert lines(image, environment) == [said]
