"""Test the record of `tools/release` about a target: the place of its image, and the changes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainworks.build.record import record, record_digest
from trainworks.errors import FactsError, OutputError
from trainworks.facts.data import FOLDERS
from trainworks.facts.load import load
from trainworks.facts.rows import Built, Facts
from trainworks.inspect.released import (
    Released,
    describe_package_changes,
    read_released,
    write_released,
)
from trainworks.plan.select import sorted_rows

CPU = "pytorch-2.13.0-cpu-py311-debian12"
ADDRESS = f"registry.example/team/pytorch@sha256:{'7' * 64}"
BUILT = Built(
    target=CPU,
    inputs=f"sha256:{'1' * 64}",
    engine="docker",
    date="2026-11-26",
    megabytes=709,
    digest=f"sha256:{'7' * 64}",
)


def bill(**versions: str) -> dict[str, Any]:
    return {
        "components": [
            {"purl": f"pkg:pypi/{name}@{version}", "version": version}
            for name, version in versions.items()
        ]
    }


FILES: dict[str, Any] = {
    "push.json": {
        "image": CPU,
        "pushed": [{"image_uri": ADDRESS, "digest": "", "tags": [], "repository": ""}],
    },
    "outdated.json": {"updates": [{}, {}]},
    "sbom.cdx.json": bill(torch="2.13.0", numpy="2.4.0", added="3"),
}
NEXT: dict[str, Any] = {
    "push.json": {"pushed": [{"image_uri": ADDRESS.replace("7", "8")}]},
    "sbom.cdx.json": bill(torch="2.13.1", numpy="2.4.0"),
}


def write(folder: Path, files: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Give the results of a release of one target; another one was not pushed."""
    write(tmp_path / CPU, FILES)
    write_released(tmp_path / CPU, BUILT, "2026-11-26T02:00:00Z")
    (tmp_path / "pytorch-2.4.1-cu121-py311-debian12").mkdir()
    return tmp_path


def test_what_was_released_is_read(results: Path) -> None:
    assert read_released(results) == {
        CPU: Released(
            date="2026-11-26T02:00:00Z",
            built=BUILT,
            addresses=[ADDRESS],
            updates=2,
            packages={"pypi/torch": "2.13.0", "pypi/numpy": "2.4.0", "pypi/added": "3"},
            changed=[],
        )
    }


def test_a_release_says_what_changed_since_the_one_before(results: Path) -> None:
    folder = results / CPU
    write(folder, {"sbom.cdx.json": NEXT["sbom.cdx.json"]})
    assert read_released(results)[CPU].packages["pypi/torch"] == "2.13.0", (
        "one that is not pushed yet changes nothing"
    )
    write(folder, NEXT)
    changed = ["pypi/added 3, gone", "pypi/torch 2.13.0 -> 2.13.1"]
    for day in (
        "2026-12-01",
        "2026-12-02",
    ):
        # Written again after a kill, or pushed elsewhere: the same image.
        write_released(folder, BUILT, day)
        assert (read_released(results)[CPU].date, read_released(results)[CPU].changed) == (
            day,
            changed,
        )
    assert describe_package_changes({"a": "1"}, {"a": "1", "b": "2"}) == ["b 2, new"]


def test_results_that_are_none_are_named(results: Path) -> None:
    (results / CPU / "released.json").write_text("{}", encoding="utf-8")
    with pytest.raises(OutputError, match=r"released.json: not what a release writes down"):
        read_released(results)
    with pytest.raises(OutputError, match="nothing is not a folder"):
        read_released(results / "nothing")


@pytest.fixture
def checkout(root: Path, tmp_path: Path) -> Path:
    """Give a copy of the checkout's facts, in which no target was built."""
    folder = tmp_path / "checkout"
    skipped = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*cache")
    for name in FOLDERS:
        shutil.copytree(root / name, folder / name, ignore=skipped)
    (folder / "images" / "built.toml").unlink()
    return folder


def test_results_of_other_machines_become_rows(results: Path, checkout: Path, root: Path) -> None:
    words = ("--collect", "--results", str(results), "--root", str(checkout))
    command = (sys.executable, str(root / "tools" / "release"), *words)
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout == f"{CPU}: {BUILT.digest}\n"
    assert load(checkout).built == (BUILT,)


def test_a_digest_is_written_into_the_row_of_its_build(checkout: Path) -> None:
    with pytest.raises(OutputError, match=f"has no build of {CPU}"):
        record_digest(CPU, BUILT.digest, checkout, os.environ)
    record(replace(BUILT, digest=""), (CPU,), checkout, os.environ)
    assert record_digest(CPU, BUILT.digest, checkout, os.environ) == BUILT
    assert load(checkout).built == (BUILT,)


@pytest.mark.parametrize("file", FILES)
def test_a_release_without_its_results_is_not_written_down(file: str, results: Path) -> None:
    before = read_released(results)
    (results / CPU / file).unlink()
    with pytest.raises(OutputError, match="not the results of a release: FileNotFoundError"):
        write_released(results / CPU, BUILT, "2026-12-01")
    assert read_released(results) == before


def test_each_version_but_the_newest_has_its_end_of_patches(facts: Facts) -> None:
    ends = {}
    for row in facts.targets:
        end = facts.end_of_patch(row)
        ends[facts.name_of(row)] = end.date if end else ""
    assert ends["pytorch-2.4.1-cu121-py311-debian12"] == "2024-10-17"
    newest: dict[str, str] = {}
    for row in sorted_rows(facts):
        newest[row.framework] = row.version.rpartition(".")[0]
    open_ = {
        (row.framework, row.version.rpartition(".")[0])
        for row in facts.targets
        if not ends[facts.name_of(row)]
    }
    assert open_ <= {*newest.items()}, "write the rows of images/end-of-patch.toml"


def test_a_day_that_is_none_is_refused(checkout: Path) -> None:
    file = checkout / "images" / "end-of-patch.toml"
    file.write_text(
        file.read_text(encoding="utf-8").replace("2026-10-28", "2026-10-38"), encoding="utf-8"
    )
    with pytest.raises(
        FactsError,
        match=r"end-of-patch.toml: ended pytorch 2.14: key 'date': 2026-10-38 is not a day",
    ):
        load(checkout)
