"""Test which recorded builds count: those of today's recipes, also from facts that another machine
read elsewhere.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest

from trainworks.attestation.subject_image import read_checkout
from trainworks.build.image import ImageResult
from trainworks.build.record import prepare_record, record, record_result
from trainworks.cli import main
from trainworks.engine import create
from trainworks.engine.protocol import BuiltImage
from trainworks.errors import FactsError
from trainworks.facts.data import FOLDERS
from trainworks.facts.load import load
from trainworks.facts.rows import Built, Facts
from trainworks.inspect.listing import WIDTH, format_list
from trainworks.plan.resolve import plan_row
from trainworks.render.build_records import find_current_builds, inputs_of_target
from trainworks.render.dockerfile import render

CPU = "pytorch-2.13.0-cpu-py311-debian12"
CU121 = "pytorch-2.4.1-cu121-py311-debian12"
IMAGE_ID = f"sha256:{'5' * 64}"


def built(target: str, inputs: str) -> Built:
    return Built(
        target=target, inputs=inputs, engine="docker", date="2026-11-22", megabytes=1000, seconds=9
    )


def digests(facts: Facts) -> dict[str, str]:
    """Return the digests of both targets."""
    rows = {facts.name_of(row): row for row in facts.targets}
    return {name: inputs_of_target(rows[name], facts) for name in (CPU, CU121)}


@pytest.fixture(scope="module")
def recorded(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a copy of the checkout in which two targets were built as they are,
    and no other ever.
    """
    folder = tmp_path_factory.mktemp("recorded")
    for name in FOLDERS:
        shutil.copytree(
            root / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
        )
    (folder / "images" / "built.toml").unlink()
    for name, inputs in digests(load(folder)).items():
        record(built(name, inputs), (CPU, CU121), folder, os.environ)
    return folder


@pytest.fixture
def built_today(recorded: Path, tmp_path: Path) -> Path:
    """Give a copy of ``recorded`` that a test may change."""
    return shutil.copytree(recorded, tmp_path, dirs_exist_ok=True)


def test_builds_of_todays_recipes_count(
    built_today: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = load(built_today)
    assert find_current_builds(facts).keys() == {CPU, CU121}
    assert (
        format_list(facts.targets, facts, find_current_builds(facts)).count(
            "  2026-11-22, 1000 MB\n"
        )
        == 2
    )
    assert main(["--root", str(built_today), "--list", "--format", "json"]) == 0
    rows = {row["name"]: row["built"] for row in json.loads(capsys.readouterr().out)}
    assert {name for name, row in rows.items() if row} == {CPU, CU121}
    assert rows[CPU]["current"] is True


@pytest.mark.parametrize(
    ("file", "old", "new", "still"),
    [
        ("templates/components/mpi4py.j2", r"(?m)^COPY ", "RUN true\nCOPY ", set()),
        ("launcher/trainworks_launcher/contract/names.py", r"\Z", "\nONE_MORE = 1\n", set()),
        ("launcher/entrypoint/train", r"(?m)^import ", "import json\nimport ", set()),
        ("smdistributed/trainworks_smdistributed/__init__.py", r"\Z", "\nONE_MORE = 1\n", set()),
        ("smdistributed/pyproject.toml", r"(?m)^smddprun = .*\n", "", set()),
        ("images/instances.toml", r"gpus = 1\b", "gpus = 2", set()),
        (f"images/lock/{CPU}.toml", r'sha256 = "\w+"', f'sha256 = "{"1" * 64}"', {CU121}),
        ("images/pytorch.toml", "^# ", "# What decides no image: ", {CPU, CU121}),
    ],
    ids=[
        "recipe",
        "launcher",
        "entry point",
        "smdistributed",
        "its programs",
        "instance",
        "lock",
        "comment",
    ],
)
def test_builds_of_other_inputs_do_not(
    file: str, old: str, new: str, still: set[str], built_today: Path
) -> None:
    path = built_today / file
    text, changes = re.subn(old, new, path.read_text(encoding="utf-8"), count=1)
    path.write_text(text, encoding="utf-8")
    facts = load(built_today)
    assert changes == 1
    assert find_current_builds(facts).keys() == still
    older = 2 - len(still)
    assert (
        format_list(facts.targets, facts, find_current_builds(facts)).count("  older, 2026-11-22\n")
        == older
    )


HTOP = """
[[component]]
name = "htop"
summary = "htop, to look at processes"
debian = ["htop"]
without = "no htop"
source = "Debian archive: htop"
"""
"""The row of a component that no target has by default."""


def test_a_component_that_no_target_has_changes_no_image_and_makes_no_build_an_older_one(
    built_today: Path,
) -> None:
    def renderings() -> list[tuple[str, str]]:
        facts = load(built_today)
        plans = [plan_row(row, facts) for row in facts.targets]
        return [(plan.as_json(), render(plan, facts).digest) for plan in plans]

    before = renderings()
    with (built_today / "images" / "components.toml").open("a", encoding="utf-8") as file:
        file.write(HTOP)
    (built_today / "templates" / "components" / "htop.j2").write_text("{#\n#}\n", encoding="utf-8")
    assert find_current_builds(load(built_today)).keys() == {CPU, CU121}
    assert renderings() == before


def test_what_an_image_lacks_makes_no_build_an_older_one(built_today: Path) -> None:
    """A new default of another kind of target is said by the manifest, and is not in the image."""
    with (built_today / "images" / "components.toml").open("a", encoding="utf-8") as file:
        file.write(HTOP.replace("debian", 'default = true\nsources = ["vendor"]\ndebian', 1))
    (built_today / "templates" / "components" / "htop.j2").write_text("{#\n#}\n", encoding="utf-8")
    facts = load(built_today)
    (cpu,) = (plan_row(row, facts) for row in facts.targets if facts.name_of(row) == CPU)
    assert "htop" in {missing.component for missing in cpu.missing}
    assert find_current_builds(facts).keys() == {CPU, CU121}


def test_the_digest_is_the_same_on_every_machine(facts: Facts, built_today: Path) -> None:
    """Another folder, other times, and permissions as another umask makes them."""
    for path in built_today.rglob("*"):
        os.utime(path, (1, 1))
        path.chmod(path.stat().st_mode | 0o020)
    assert digests(load(built_today)) == digests(facts)


def test_builds_that_end_at_once_are_all_recorded(built_today: Path) -> None:
    names = sorted(load(built_today).locks)
    writers = [
        Thread(
            target=record,
            args=(built(name, f"sha256:{number:064x}"), names, built_today, os.environ),
        )
        for number, name in enumerate(names)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [(row.target, int(row.inputs[7:], 16)) for row in load(built_today).built] == [
        (name, number) for number, name in enumerate(names)
    ]


def commit_all(folder: Path) -> str:
    """Make a folder a git repository with one commit; return the commit."""
    who = ("-c", "user.name=test", "-c", "user.email=test@example.com")
    git = ("git", "-C", str(folder), *who)
    for words in (("init", "--quiet"), ("add", "--all"), ("commit", "--quiet", "--message", "all")):
        subprocess.run((*git, *words), check=True)
    head = subprocess.run((*git, "rev-parse", "HEAD"), check=True, capture_output=True, text=True)
    return head.stdout.strip()


def test_the_record_does_not_make_the_sources_of_an_image_changed(built_today: Path) -> None:
    """A release is built with `--record` and proven afterwards: its provenance
    names the commit, without changes.
    """
    commit_all(built_today)
    record(built(CPU, f"sha256:{'0' * 64}"), (CPU, CU121), built_today, os.environ)
    assert not read_checkout(built_today, ()).changed
    with (built_today / "images" / "pytorch.toml").open("a", encoding="utf-8") as file:
        file.write("# One more line.\n")
    assert read_checkout(built_today, ()).changed


def record_build(folder: Path) -> Built:
    """Record a build of the cpu image, as `build.py --record` does after its tests; return the row
    as it is read again.
    """
    facts = load(folder)
    (row,) = (row for row in facts.targets if facts.name_of(row) == CPU)
    recipe = prepare_record(plan_row(row, facts), facts, folder)
    image = BuiltImage(
        reference=CPU, identifier=IMAGE_ID, size=709_000_000, labels={}, environment={}
    )
    result = ImageResult(image=image, engine=create("buildah"), seconds=9.4)
    record_result(recipe, result, facts, folder, os.environ)
    return load(folder).built_by_target[CPU]


def test_a_row_has_the_commit_and_the_id_of_its_image(built_today: Path) -> None:
    commit = commit_all(built_today)
    row = record_build(built_today)
    assert (row.commit, row.image, row.engine, row.seconds) == (commit, IMAGE_ID, "buildah", 9)
    # A record changes no image: the next target has the same commit.
    assert record_build(built_today).commit == commit
    with (built_today / "templates" / "components" / "mpi4py.j2").open(
        "a", encoding="utf-8"
    ) as file:
        file.write("{# One more line. #}\n")
    assert (record_build(built_today).commit, row.image) == ("", IMAGE_ID)


def test_a_row_of_a_folder_outside_of_git_has_no_commit(built_today: Path) -> None:
    assert record_build(built_today).commit == ""


def test_older_rows_without_commit_and_id_are_read(built_today: Path) -> None:
    text = (built_today / "images" / "built.toml").read_text(encoding="utf-8")
    assert "\ncommit = " not in text
    assert [(row.commit, row.image) for row in load(built_today).built] == [("", ""), ("", "")]


def test_a_variant_is_not_recorded_as_the_target(
    built_today: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (built_today / "images" / "built.toml").read_bytes()
    line = [
        "--root",
        str(built_today),
        "--framework",
        "pytorch",
        "--cuda",
        "cpu",
        "--without",
        "mpi4py",
        "--record",
    ]
    assert main(line) == 9
    assert f"this image is a variant of {CPU}" in capsys.readouterr().err
    assert main([*line, "--until", "build"]) == 2
    assert "--record is for tested images" in capsys.readouterr().err
    assert (built_today / "images" / "built.toml").read_bytes() == before


def test_the_record_of_a_target_that_is_gone_goes_with_the_next_build(built_today: Path) -> None:
    path = built_today / "images" / "built.toml"
    path.write_text(
        path.read_text(encoding="utf-8").replace(CU121, "pytorch-0.1"), encoding="utf-8"
    )
    assert find_current_builds(load(built_today)).keys() == {CPU}
    record(built(CPU, f"sha256:{'0' * 64}"), (CPU, CU121), built_today, os.environ)
    assert [(row.target, row.inputs[-1]) for row in load(built_today).built] == [(CPU, "0")]


def test_a_record_without_a_digest_is_named(built_today: Path) -> None:
    path = built_today / "images" / "built.toml"
    path.write_text(
        path.read_text(encoding="utf-8").replace("sha256:", "sha1:", 1), encoding="utf-8"
    )
    with pytest.raises(FactsError, match=r"images/built.toml: built 1: key 'inputs': 'sha1:"):
        load(built_today)


def test_a_checkout_without_records_has_no_build(built_today: Path) -> None:
    (built_today / "images" / "built.toml").unlink()
    assert find_current_builds(load(built_today)) == {}


def test_every_target_has_one_line_of_a_terminal(facts: Facts) -> None:
    """Use the longest words about a build: today's, of a large image."""
    today = {
        facts.name_of(row): replace(built("x", "y"), target=facts.name_of(row), megabytes=12345)
        for row in facts.targets
    }
    for current in ({}, today):
        for is_whole in (True, False):
            text = format_list(facts.targets, facts, current, whole=is_whole)
            assert [line for line in text.splitlines() if len(line) > WIDTH] == []
