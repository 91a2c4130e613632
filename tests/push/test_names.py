"""Test names of images and tags of pushes: those that are derived, and those that are refused."""

from __future__ import annotations

import re
from datetime import UTC, datetime

import pytest

from trainworks.cli import main
from trainworks.errors import RegistryError
from trainworks.facts.rows import Facts
from trainworks.plan.resolve import make_plan
from trainworks.plan.select import request_for
from trainworks.registry.ecr import is_immutable_tag
from trainworks.registry.names import (
    DEFAULT_HOST,
    check_tags,
    derive_tags,
    split_image,
    split_reference,
)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("team/image:1", "'team' is not a host name"),
        ("registry.example/team/image", "names no image"),
        ("registry.example/team/image@sha256:12", "'sha256:12' is not a digest"),
        ("registry.example/Team:1", "'Team' is not a valid repository name"),
        ("user:word@registry.example/team:1", "must not contain a user or password"),
        ("h.example/team:1 2", "'1 2' is not a valid tag"),
    ],
)
def test_sources_that_are_none(source: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["promote", source, "registry.example/other"]) == 15
    output = capsys.readouterr().err
    assert words in output
    assert "word@" not in output


def test_a_source_may_have_both_a_tag_and_a_digest() -> None:
    digest = f"sha256:{'0' * 64}"
    assert split_image(f"host:5000/a/b:1.0@{digest}") == ("host:5000/a/b", digest)
    assert split_image("host:5000/a/b:1.0") == ("host:5000/a/b", "1.0")


def test_tags_follow_from_the_images_own() -> None:
    tags = derive_tags("trainworks/pytorch-training:2.4.1-cu121-py311-debian12")
    assert (tags.fixed, tags.dated, tags.moving) == (
        (),
        "2.4.1-cu121-py311-debian12",
        ("2.4.1-cu121-debian12",),
    )
    tags = derive_tags("host:5000/mine", ["1.0"])
    assert (tags.fixed, tags.dated, tags.moving) == (("1.0",), "", ())
    with pytest.raises(RegistryError, match="has no tag to derive"):
        derive_tags("host:5000/mine")
    with pytest.raises(RegistryError, match="cannot be a moving tag"):
        derive_tags("mine:1", (), ["1.0-20261121"])
    with pytest.raises(RegistryError, match="is not a valid tag"):
        derive_tags("mine:1", ["a b"])


@pytest.mark.parametrize("tag", ["2.4-ubuntu-20.04", "1.0-20261121", "1.0-20261121-0a1b2c3d"])
def test_a_moving_tag_that_ecr_would_freeze_is_rejected_before_a_push(tag: str) -> None:
    """ECR's filter and the check of moving tags are one: a tag that may move
    today may move tomorrow.
    """
    assert is_immutable_tag(tag)
    with pytest.raises(RegistryError, match=f"{re.escape(tag)} cannot be a moving tag"):
        check_tags((), [tag])
    with pytest.raises(RegistryError, match=f"{re.escape(tag)} cannot be a moving tag"):
        derive_tags(f"my/train:{tag}")
    assert derive_tags(f"my/train:{tag}", [], ["latest"]).moving == ("latest",)
    assert check_tags([tag], ["latest", "2026.11", "v20", "nightly-2026.11"]).fixed == (tag,)


def test_ecr_does_not_freeze_the_tags_of_cosign() -> None:
    """An attestation more is a new image under the same tag."""
    assert not is_immutable_tag(f"sha256-20{'0' * 62}.att")


def test_a_tag_cannot_be_both() -> None:
    with pytest.raises(RegistryError, match="1 cannot be a moving tag: --tag has it, too"):
        check_tags(["1"], ["1"])


def test_no_two_targets_have_one_moving_tag_and_every_dated_one_is_kept_by_ecr(
    facts: Facts,
) -> None:
    moving: dict[tuple[str, tuple[str, ...]], str] = {}
    for row in facts.targets:
        image = make_plan(request_for(row, facts), facts).tags[0]
        tags = derive_tags(image)
        assert moving.setdefault((row.framework, tags.moving), image) == image
        assert is_immutable_tag(f"{tags.dated}-{datetime(2026, 11, 21, tzinfo=UTC):%Y%m%d}")
        assert not any(map(is_immutable_tag, tags.moving))
    assert len(moving) == len(facts.targets)


@pytest.mark.parametrize(
    ("reference", "parts"),
    [
        ("debian", (DEFAULT_HOST, "library/debian", "latest")),
        ("ubuntu:20.04", (DEFAULT_HOST, "library/ubuntu", "20.04")),
        ("nvidia/cuda:11.3.1-base", (DEFAULT_HOST, "nvidia/cuda", "11.3.1-base")),
        (
            "public.ecr.aws/amazonlinux/amazonlinux:2023",
            ("public.ecr.aws", "amazonlinux/amazonlinux", "2023"),
        ),
        ("127.0.0.1:5000/a/b", ("127.0.0.1:5000", "a/b", "latest")),
        ("localhost/a:1", ("localhost", "a", "1")),
    ],
)
def test_references(reference: str, parts: tuple[str, str, str]) -> None:
    assert split_reference(reference) == parts
