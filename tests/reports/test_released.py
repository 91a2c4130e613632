"""What `tools/release` left becomes part of the catalogue: where images are, their sizes, what changed."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from trainworks.cli import main
from trainworks.errors import FactsError
from trainworks.facts.load import load
from trainworks.facts.rows import Facts
from trainworks.inspect.released import Released, changes, read_released
from trainworks.plan.select import sorted_rows

CPU = "pytorch-2.13.0-cpu-py311-debian12"
ADDRESS = f"registry.example/team/pytorch@sha256:{'7' * 64}"


def bill(**versions: str) -> dict[str, Any]:
    return {"components": [{"purl": f"pkg:pypi/{name}@{each}", "version": each} for name, each in versions.items()]}


FILES: dict[str, Any] = {
    "steps.json": {"inputs": "", "steps": {"build": "2026-11-26T01:00:00Z", "push to x/y": "2026-11-26T02:00:00Z"}},
    "push.json": {"image": CPU, "pushed": [{"image_uri": ADDRESS, "digest": "", "tags": [], "repository": ""}]},
    "outdated.json": {"updates": [{}, {}]},
    "report.json": {"parts": [{"component": "torch", "size": 700_000_000}, {"component": "ssh", "size": 9_000_000}]},
    "before.cdx.json": bill(torch="2.12.0", numpy="2.4.0", gone="1"),
    "sbom.cdx.json": bill(torch="2.13.0", numpy="2.4.0", added="3"),
}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Give the results of a release of one target; another one was not pushed."""
    folder = tmp_path / "release" / CPU
    folder.mkdir(parents=True)
    for name, content in FILES.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    (tmp_path / "release" / "pytorch-2.4.1-cu121-py311-debian12").mkdir()
    return tmp_path / "release"


def test_what_was_released_is_read(results: Path) -> None:
    assert read_released(results) == {
        CPU: Released(
            date="2026-11-26T02:00:00Z",
            addresses=(ADDRESS,),
            updates=2,
            sizes=(("torch", 700_000_000), ("ssh", 9_000_000)),
            changed=("pypi/added 3, new", "pypi/gone 1, gone", "pypi/torch 2.12.0 -> 2.13.0"),
        )
    }
    (results / CPU / "before.cdx.json").unlink()
    assert read_released(results)[CPU].changed == ()
    assert changes({"a": "1"}, {"a": "1"}) == ()


def test_the_page_says_how_to_pull_and_what_changed(
    results: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["catalogue", "--release", str(results)], root) == 0
    article = re.search(rf'<article class="panel" id="{CPU}".*?</article>', capsys.readouterr().out, re.DOTALL)
    assert article
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", article[0]))
    assert f"docker pull {ADDRESS}" in text
    assert "released on 2026-11-26T02:00:00Z, without 2 security updates" in text
    assert "The image has 709 MB: torch 700 MB ssh 9 MB" in text
    assert "3 packages changed since the release before" in text


@pytest.mark.parametrize("file", ["push.json", "report.json", "sbom.cdx.json"])
def test_results_that_are_none_are_named(
    file: str, results: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (results / CPU / file).write_text("{}", encoding="utf-8")
    assert main(["catalogue", "--release", str(results)], root) == 9
    assert f"{results / CPU}: not the results of a release: KeyError" in capsys.readouterr().err
    assert main(["catalogue", "--release", str(results / "nothing")], root) == 9
    assert "nothing is not a folder" in capsys.readouterr().err


def test_each_version_but_the_newest_has_its_end_of_patches(facts: Facts) -> None:
    ends = {facts.name_of(row): end.date if (end := facts.end_of_patch(row)) else "" for row in facts.targets}
    assert ends["pytorch-2.4.1-cu121-py311-debian12"] == "2024-10-17"
    newest: dict[str, str] = {}
    for row in sorted_rows(facts):
        newest[row.framework] = row.version.rpartition(".")[0]
    open_ = {(row.framework, row.version.rpartition(".")[0]) for row in facts.targets if not ends[facts.name_of(row)]}
    assert open_ <= {*newest.items()}, "write the rows of images/end-of-patch.toml"


def test_a_day_that_is_none_is_refused(root: Path, tmp_path: Path) -> None:
    for name in ("templates", "launcher", "smdistributed"):
        (tmp_path / name).symlink_to(root / name)
    shutil.copytree(root / "images", tmp_path / "images")
    file = tmp_path / "images" / "end-of-patch.toml"
    file.write_text(file.read_text(encoding="utf-8").replace("2026-10-28", "2026-10-38"), encoding="utf-8")
    with pytest.raises(FactsError, match=r"end-of-patch.toml: ended pytorch 2.14: key 'date': 2026-10-38 is not a day"):
        load(tmp_path)
