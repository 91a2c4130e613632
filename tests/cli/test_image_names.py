"""The name of a target means the image that the engine has: the usual one, or a
variant of it, in every command.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from cli.stand_in import write_stand_in
from trainworks.cli import main
from trainworks.engine import create
from trainworks.errors import UnknownNameError
from trainworks.facts.rows import Facts
from trainworks.inspect.targets import build_command, find_image
from trainworks.plan.resolve import make_plan
from trainworks.plan.select import request_for, row_named
from trainworks.plan.variants import image_named, request_of

TARGET = "pytorch-2.4.1-cu121-py311-debian12"
USUAL = "trainworks/pytorch-training:2.4.1-cu121-py311-debian12"
TCP = f"{USUAL}-tcp"
COST = "NCCL talks TCP between hosts"
BUILD = "python build.py --framework pytorch --cuda cu121 --framework-version 2.4.1 --python 3.11"

COMMANDS: Mapping[str, str] = {
    "report": "report {name}",
    "outdated": "outdated {name}",
    "diff": "diff {name} {name}",
    "push": "push {name} --repository r.example.org/a",
    "prove": "prove {name} --output proof",
    "extend": "extend --base {name} --tag my/train:1 --source code",
}
"""Every command that takes the name of an image."""

Store = Callable[..., None]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Give a function that fills the store of a stand-in for buildah.

    The folder has the files that commands read.
    """
    write_stand_in(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in ("PATH", "TMPDIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").touch()

    def fill(*names: str) -> None:
        image = json.dumps({"FromImageID": "1" * 64, "OCIv1": {}, "Manifest": ""})
        for name in names:
            (tmp_path / "images" / name.replace("/", "%")).write_text(image, encoding="utf-8")

    return fill


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ((USUAL,), USUAL),
        ((USUAL, TCP), USUAL),
        ((TCP,), TCP),
        ((f"{USUAL}-without-gdrcopy",), f"{USUAL}-without-gdrcopy"),
        ((f"{USUAL}-variant-0123456789ab",), f"{USUAL}-variant-0123456789ab"),
        ((f"{TCP}-with-rmm-python", TCP, f"{USUAL}-variant-0123456789ab"), TCP),
    ],
)
def test_a_target_is_the_image_that_is_there(
    names: tuple[str, ...],
    expected: str,
    store: Store,
    facts: Facts,
    capsys: pytest.CaptureFixture[str],
) -> None:
    store(*names, "my/train:1")
    assert find_image(TARGET, create("buildah"), facts) == expected
    output = capsys.readouterr().err
    assert output.count("\n") == (expected != USUAL)
    assert expected == USUAL or f"{TARGET}: buildah has {expected}" in output
    assert (COST in output) is ("-tcp" in expected)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (USUAL, USUAL),
        (TCP, TCP),
        (f"{TARGET}-tcp", TCP),
        ("my/train:1", "my/train:1"),
    ],
)
def test_an_image_is_itself(
    name: str, expected: str, store: Store, facts: Facts, capsys: pytest.CaptureFixture[str]
) -> None:
    store(USUAL, TCP, "my/train:1")
    assert find_image(name, create("buildah"), facts) == expected
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("name", "names", "message", "hint"),
    [
        (TARGET, (), f"buildah has no image {USUAL}", f"`{BUILD}` builds it"),
        (
            TARGET,
            (f"{USUAL}-arm64", f"{USUAL}-vendor", "trainworks/pytorch-training:2.4.1-cu121"),
            f"buildah has no image {USUAL}",
            f"`{BUILD}` builds it",
        ),
        (USUAL, (TCP,), f"buildah has no image {USUAL}", f"buildah has {TCP}; `{BUILD}` builds it"),
        (
            TCP,
            (USUAL,),
            f"buildah has no image {TCP}",
            (
                f"`{BUILD} --without aws-ofi-nccl --without"
                " gdrcopy --without libfabric-cuda` builds it"
            ),
        ),
        (
            "my/trian:1",
            ("my/train:1",),
            "buildah has no image my/trian:1",
            "did you mean my/train:1? ",
        ),
        (
            "pytorch-2.4.1-cu121",
            (),
            "buildah has no image pytorch-2.4.1-cu121",
            f"did you mean {TARGET}? ",
        ),
        (
            "nothing:1",
            ("my/train:1",),
            "buildah has no image nothing:1",
            "`buildah images` lists its images",
        ),
    ],
)
def test_an_image_that_is_not_there(
    name: str, names: tuple[str, ...], message: str, hint: str, store: Store, facts: Facts
) -> None:
    store(*names)
    with pytest.raises(UnknownNameError) as caught:
        find_image(name, create("buildah"), facts)
    assert caught.value.message == message
    assert caught.value.hint.startswith(hint)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_beginning_of_a_target_is_answered_with_its_name(
    command: str, store: Store, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store("my/train:1")
    assert (
        main(
            [*COMMANDS[command].format(name="pytorch-2.4.1-cu121").split(), "--engine", "buildah"],
            root,
        )
        == 4
    )
    assert f"did you mean {TARGET}? " in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_finds_the_image_of_a_target(
    command: str, store: Store, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*COMMANDS[command].format(name=TARGET).split(), "--engine", "buildah"]
    assert main(words, root) == 4
    assert f"`{BUILD}` builds it" in capsys.readouterr().err
    store(TCP)
    # The stand-in is no image that could be read: only the name was found.
    assert main(words, root) != 0
    output = capsys.readouterr().err
    assert (
        f"{TARGET}: buildah has {TCP}, built without aws-ofi-nccl, gdrcopy, libfabric-cuda: {COST}"
        in output
    )
    assert "has no image" not in output


def test_a_variant_is_a_request_and_back(facts: Facts) -> None:
    row = row_named(TARGET, facts)
    for variant in (
        "",
        "-tcp",
        "-without-gdrcopy",
        "-tcp-with-rmm-python-without-metis-without-py-spy",
    ):
        request = request_of(row, variant, facts)
        assert request is not None
        assert make_plan(request, facts).tags == (f"{USUAL}{variant}",)
    for wrong in (
        "-arm64",
        "-vendor",
        "-without-torch",
        "-with-nonsense",
        "-tcp-tcp",
        "-variant-0123456789ab",
    ):
        assert request_of(row, wrong, facts) is None


def test_every_target_has_a_name_and_a_command_of_its_own(facts: Facts) -> None:
    for row in facts.targets:
        name = facts.name_of(row)
        named_target = image_named(name, facts)
        assert named_target is not None
        assert (named_target.row, named_target.variant) == (row, "")
        assert make_plan(request_for(row, facts), facts).tags == (named_target.reference,)
        assert image_named(named_target.reference, facts) == named_target
    assert len({build_command(request_for(row, facts)) for row in facts.targets}) == len(
        facts.targets
    )


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        ("", [f"  or     {TCP}, if github.com cannot be reached\n"]),
        ("--with gdrcopy", []),
        ("--strict", []),
        ("--without aws-ofi-nccl --without gdrcopy --without libfabric-cuda", []),
    ],
)
@pytest.mark.usefixtures("store")
def test_a_plan_says_which_name_the_image_may_get(
    words: str, messages: list[str], root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--framework", "pytorch", "--cuda", "cu121", "--until", "plan", *words.split()]
    assert main(command, root) == 0
    output = capsys.readouterr().out
    assert [
        line for line in output.splitlines(keepends=True) if "github.com cannot be reached" in line
    ] == messages
    assert main([*command, "--format", "json"], root) == 0
    names = json.loads(capsys.readouterr().out)["name_without"]
    assert names.get("github.com") == (TCP if messages else None)
