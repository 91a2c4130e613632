"""Cut a version: `tools/wheels.py` builds the same wheels twice and refuses versions that do not
agree, and `.github/workflows/version.yml` signs and attaches them.

GitHub has not run the workflow.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from push.support import ROOT, TOOLS

AUTHOR = ("-c", "user.name=a", "-c", "user.email=a@example.com")
TREES = ("src", "images", "templates", "launcher", "smdistributed")
FILES = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md")
"""What the wheels are made of."""

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
VERSION = PROJECT["version"]
NAMES = [
    f"trainworks-{VERSION}-py3-none-any.whl",
    f"trainworks_launcher-{VERSION}-py3-none-any.whl",
    f"trainworks_smdistributed-{VERSION}-py3-none-any.whl",
]


def git(folder: Path, *words: str) -> str:
    command = ("git", "-C", str(folder), *AUTHOR, *words)
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def committed(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a repository with one commit of this checkout's files, changed ones as they are."""
    folder = tmp_path_factory.mktemp("committed")
    listed = git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard", *TREES)
    for name in [*FILES, *filter(None, listed.split("\0"))]:
        if (root / name).is_file():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, target)
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "First")
    return folder


def build(root: Path, checkout: Path, *words: str, **options: Any) -> Any:
    """Run the tool of the checkout that is tested on another one."""
    command = (sys.executable, str(root / "tools" / "wheels.py"), "--root", str(checkout), *words)
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def wheels(root: Path, committed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the folder that the tool writes for the commit."""
    folder = tmp_path_factory.mktemp("wheels")
    done = build(root, committed, "--output", str(folder), umask=0o022)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(folder / name) for name in [*NAMES, "SHA256SUMS"]]
    return folder


def test_the_same_commit_gives_the_same_bytes(root: Path, wheels: Path, checkout: Path) -> None:
    """In another clone and folder, with another mask of modes, another time zone and seed;
    files that are not in the commit stay out, and wheels that were there before go.
    """
    git(checkout, "config", "tar.umask", "0077")
    (checkout / "src" / "trainworks" / "left_over.py").touch()
    second = checkout / "dist"
    second.mkdir()
    (second / "trainworks-0.0.9-py3-none-any.whl").touch()
    variables = {**os.environ, "TZ": "Asia/Tokyo", "PYTHONHASHSEED": "7", "LC_ALL": "C"}
    done = build(root, checkout, umask=0o077, env=variables)
    assert done.returncode == 0, done.stderr
    assert sorted(content(second)) == sorted([*NAMES, "SHA256SUMS"])
    assert content(second) == content(wheels)


def test_the_checksums_are_those_of_the_wheels(wheels: Path) -> None:
    check = ("sha256sum", "--check", "--strict", "SHA256SUMS")
    subprocess.run(check, cwd=wheels, check=True, capture_output=True)
    digests = [hashlib.sha256((wheels / name).read_bytes()).hexdigest() for name in NAMES]
    lines = (wheels / "SHA256SUMS").read_text(encoding="ascii").splitlines()
    assert lines == [f"{digest}  {name}" for digest, name in zip(digests, NAMES, strict=True)]


@pytest.fixture
def checkout(committed: Path, tmp_path: Path) -> Path:
    """Give a clone that a test may change."""
    git(tmp_path, "clone", "--quiet", str(committed), str(tmp_path / "checkout"))
    return tmp_path / "checkout"


def replace(checkout: Path, file: str, old: str, new: str) -> None:
    """Change the first such text in a file."""
    path = checkout / file
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


def commit(checkout: Path) -> None:
    git(checkout, "commit", "--quiet", "--all", "--allow-empty", "--message", "Change")


CHANGELOGS = ("CHANGELOG.md", "launcher/CHANGELOG.md", "smdistributed/CHANGELOG.md")


def write_headings(checkout: Path, day: str) -> None:
    """Write the day of the release into the first heading of each changelog."""
    for file in CHANGELOGS:
        lines = (checkout / file).read_text(encoding="utf-8").splitlines()
        heading = next(line for line in lines if line.startswith("## "))
        replace(checkout, file, heading, f"## {VERSION}, {day}")
    commit(checkout)


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("launcher/pyproject.toml", 'version = "{}"'),
        ("smdistributed/pyproject.toml", 'version = "{}"'),
        ("src/trainworks/__init__.py", '__version__ = "{}"'),
        ("launcher/trainworks_launcher/__init__.py", '__version__ = "{}"'),
        ("images/stacks.toml", 'smddp = "{}"'),
        ("images/stacks.toml", 'smp = "{}"'),
        *((changelog, "## {}, ") for changelog in CHANGELOGS),
    ],
)
def test_a_version_that_does_not_agree_is_refused_with_what_to_change(
    root: Path, checkout: Path, file: str, line: str
) -> None:
    replace(checkout, file, line.format(VERSION), line.format("99.0.0"))
    commit(checkout)
    done = build(root, checkout)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"wheels: the version is {VERSION}, and this does not agree:" in done.stderr
    assert f"\n  {file} has 99.0.0: write {VERSION}\n" in done.stderr
    assert not (checkout / "dist").exists()


def test_a_tag_of_another_version_names_each_place(root: Path, checkout: Path) -> None:
    done = build(root, checkout, "--tag", "v99.0.0")
    assert (done.returncode, done.stdout) == (1, "")
    for project in ("", "launcher/", "smdistributed/"):
        assert f"\n  {project}pyproject.toml has {VERSION}: write 99.0.0\n" in done.stderr


def test_a_release_has_its_day_in_each_changelog(root: Path, checkout: Path) -> None:
    write_headings(checkout, "unreleased")
    done = build(root, checkout, "--tag", f"v{VERSION}")
    assert done.returncode == 1
    for file in CHANGELOGS:
        assert f"{file}: write '## {VERSION}, YYYY-MM-DD', the release's day\n" in done.stderr
    write_headings(checkout, "2026-12-01")
    done = build(root, checkout, "--tag", f"v{VERSION}")
    assert done.returncode == 0, done.stderr
    assert sorted(content(checkout / "dist")) == sorted([*NAMES, "SHA256SUMS"])


@pytest.mark.parametrize("tag", ["0.1.0", "v0.1", "v0.1.0rc1", "latest"])
def test_a_tag_of_another_form_is_refused(root: Path, checkout: Path, tag: str) -> None:
    done = build(root, checkout, "--tag", tag)
    assert done.returncode == 1
    assert done.stderr == f"wheels: the tag of a release is vX.Y.Z, not {tag}\n"


def test_changes_that_are_not_committed_are_refused(root: Path, checkout: Path) -> None:
    """They would not be in the wheels."""
    (checkout / "README.md").write_text("changed\n", encoding="utf-8")
    done = build(root, checkout)
    assert (done.returncode, done.stdout) == (1, "")
    assert "not committed; commit them first\n M README.md" in done.stderr


@pytest.fixture(scope="module")
def workflow(root: Path) -> Any:
    return yaml.safe_load((root / ".github/workflows/version.yml").read_text(encoding="utf-8"))


def test_the_workflow_runs_on_tags_of_versions_and_may_write_a_release(workflow: Any) -> None:
    """YAML reads the key `on` as a boolean."""
    assert workflow[True] == {"push": {"tags": ["v*"]}}
    assert workflow["permissions"] == {"contents": "read"}
    (job,) = workflow["jobs"].values()
    assert job["permissions"] == {"contents": "write", "id-token": "write"}


def steps_of(workflow: Any) -> list[str]:
    """Return the commands of the workflow's only job."""
    (job,) = workflow["jobs"].values()
    return [step["run"] for step in job["steps"] if "run" in step]


def test_the_workflow_builds_signs_and_attaches(workflow: Any, root: Path, checkout: Path) -> None:
    """The first command is tried with a tag that does not fit."""
    setup, wheels, sign, attach = steps_of(workflow)
    assert setup == "make setup"
    words = shlex.split(wheels.replace("$GITHUB_REF_NAME", "v9.9.9"))
    assert words[0] == ".venv/bin/python"
    command = (sys.executable, str(root / words[1]), *words[2:], "--root", str(checkout))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "wheels: the version is 9.9.9, and this does not agree" in done.stderr
    assert "--key" not in sign
    attached = shlex.split(attach)
    assert attached[:5] == ["gh", "release", "create", "$GITHUB_REF_NAME", "dist/*"]
    assert (root / attached[attached.index("--notes-file") + 1]).is_file()


@pytest.mark.engine
def test_the_workflows_signature_is_accepted_and_a_changed_wheel_refused(
    workflow: Any, tmp_path: Path
) -> None:
    """Run the workflow's command with a key in place of the job's identity, by cosign."""
    cosign = TOOLS / "cosign"
    if not cosign.exists():
        pytest.skip("NOT TESTED: no cosign (tools/set-up-engine all)")
    for name in ("dist", "bin"):
        (tmp_path / name).mkdir()
    key = tmp_path / "wheels"
    variables = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "COSIGN_PASSWORD": ""}
    make = (str(cosign), "generate-key-pair", f"--output-key-prefix={key}")
    subprocess.run(make, env=variables, check=True, capture_output=True)
    wrapper = tmp_path / "bin" / "cosign"
    wrapper.write_text(
        f'#!/bin/sh\nexec {cosign} "$@" --key {key}.key --tlog-upload=false\n', encoding="utf-8"
    )
    wrapper.chmod(0o755)
    wheels = [tmp_path / "dist" / name for name in (*NAMES, "SHA256SUMS")]
    for wheel in wheels:
        wheel.write_text(wheel.name, encoding="ascii")
    sign = steps_of(workflow)[2]
    subprocess.run(("bash", "-ec", sign), cwd=tmp_path, env=variables, check=True)
    # Without it cosign asks the public key service of sigstore, which a key does not need.
    trusted = tmp_path / "root.json"
    trusted.write_text(
        '{"mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1"}',
        encoding="utf-8",
    )
    check = ("verify-blob", "--new-bundle-format", "--trusted-root", str(trusted))
    against = ("--insecure-ignore-tlog", "--key", f"{key}.pub")

    def status(wheel: Path) -> int:
        bundle = ("--bundle", f"{wheel}.sigstore.json", str(wheel))
        command = (str(cosign), *check, *against, *bundle)
        return subprocess.run(command, env=variables, capture_output=True, check=False).returncode

    assert [status(wheel) for wheel in wheels] == [0, 0, 0, 0]
    wheels[0].write_text("another wheel", encoding="ascii")
    assert [status(wheel) == 0 for wheel in wheels] == [False, True, True, True]
