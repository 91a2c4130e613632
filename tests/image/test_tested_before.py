"""Test the memory of an image that passed its checks, and the changes that make it worthless."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

import pytest

from trainworks.build.passed_checks import (
    PassedChecks,
    identity_of_checks,
    now,
    passed_before,
    remember,
)
from trainworks.engine.protocol import BuiltImage, Engine, EngineInformation
from trainworks.imagetest.results import CheckResult
from trainworks.plan.checks import Check, ImportCheck

IMAGE = BuiltImage(reference="name:1", identifier="sha256:1", size=1, labels={}, environment={})
CHECKS = (
    ImportCheck(component="pytorch", module="torch"),
    ImportCheck(component="mpi4py", module="mpi4py"),
)
PASSED = tuple(
    CheckResult(
        component=check.component,
        title=f"import {check.module} succeeds",
        passed=True,
        detail="",
        seconds=0.5,
    )
    for check in CHECKS
)


@dataclass
class Probed:
    """The one thing that is asked of an engine."""

    version: str = "1.0"

    def probe(self) -> EngineInformation:
        return EngineInformation(name="docker", version=self.version, program="/usr/bin/docker")


def decides(
    *,
    image: BuiltImage = IMAGE,
    engine: object = None,
    checks: tuple[Check, ...] = CHECKS,
    forbidden: tuple[str, ...] = ("a-proxy", "an-index"),
    base: BuiltImage | None = None,
) -> str:
    return identity_of_checks(
        image, cast("Engine", engine or Probed()), checks, forbidden=forbidden, base=base
    )


def keep(cache: Path, results: tuple[CheckResult, ...] = PASSED, by: str = "") -> None:
    passed = PassedChecks(results=results, when=now())
    remember(IMAGE, passed, {"XDG_CACHE_HOME": str(cache)}, decided_by=by or decides())


def find_passed(cache: Path, **other: object) -> tuple[CheckResult, ...] | None:
    image = cast("BuiltImage", other.get("image", IMAGE))
    by = decides(**other)  # type: ignore[arg-type]
    passed_result = passed_before(image, {"XDG_CACHE_HOME": str(cache)}, decided_by=by)
    return passed_result.results if passed_result else None


def test_what_passed_is_known_with_its_time(tmp_path: Path) -> None:
    assert find_passed(tmp_path) is None
    keep(tmp_path)
    assert find_passed(tmp_path, forbidden=("an-index", "a-proxy")) == PASSED
    passed = passed_before(IMAGE, {"XDG_CACHE_HOME": str(tmp_path)}, decided_by=decides())
    assert passed is not None
    assert datetime.fromisoformat(passed.when) <= datetime.now(UTC)


@pytest.mark.parametrize(
    "other",
    [
        {"image": replace(IMAGE, identifier="sha256:2")},
        {"engine": Probed(version="1.1")},
        {"checks": CHECKS[:1]},
        {"checks": (*CHECKS[:1], replace(CHECKS[1], module="mpi4py.MPI"))},
        {"forbidden": ("another-proxy",)},
        {"base": IMAGE},
    ],
)
def test_anything_that_decides_a_result_makes_it_unknown(
    tmp_path: Path, other: dict[str, object]
) -> None:
    keep(tmp_path)
    assert find_passed(tmp_path, **other) is None


def test_two_checkouts_that_test_one_image_take_turns(tmp_path: Path) -> None:
    keep(tmp_path)
    keep(tmp_path, PASSED[:1], decides(forbidden=("another-proxy",)))
    assert find_passed(tmp_path) == PASSED
    assert find_passed(tmp_path, forbidden=("another-proxy",)) == PASSED[:1]


def test_a_failure_or_nothing_is_not_kept(tmp_path: Path) -> None:
    keep(tmp_path, ())
    keep(tmp_path, (PASSED[0], replace(PASSED[1], passed=False, detail="why")))
    assert find_passed(tmp_path) is None


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"results": [{}], "when": ""}', '{"results": []}']
)
def test_a_broken_file_is_as_none(tmp_path: Path, content: str) -> None:
    keep(tmp_path)
    (file,) = tmp_path.rglob("*.json")
    file.write_text(content, encoding="utf-8")
    assert find_passed(tmp_path) is None


def test_a_cache_that_cannot_be_written_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "trainworks").write_text("a file in the place of the folder", encoding="utf-8")
    keep(tmp_path)
    assert find_passed(tmp_path) is None


def test_a_user_without_a_home_folder_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run as a user id that the system does not know: the image is tested, and nothing fails behind
    it.
    """
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000_000)
    with pytest.raises(RuntimeError):
        Path.home()
    remember(IMAGE, PassedChecks(results=PASSED, when=now()), {}, decided_by=decides())
    assert passed_before(IMAGE, {}, decided_by=decides()) is None
