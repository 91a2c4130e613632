"""Test that `make setup` and CI run programs that are pinned by a hash or a commit, and name no
index.
"""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^ ;\\]+)")
LAUNCHERS = "launcher/tests/requirements.lock"
COMMIT = re.compile(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")


def pins_of(text: str) -> Mapping[str, tuple[str, int]]:
    """Return version and number of hashes of each package of a lock."""
    pins: dict[str, tuple[str, int]] = {}
    name = ""
    for line in text.splitlines():
        if match := PIN.match(line):
            name = canonicalize_name(match[1])
            pins[name] = (match[2], 0)
        elif line.strip().startswith("--hash=sha256:"):
            version, hashes = pins[name]
            pins[name] = (version, hashes + 1)
    return pins


@pytest.fixture(scope="module")
def lock(root: Path) -> str:
    return (root / "tools" / "requirements.lock").read_text(encoding="utf-8")


def test_every_requirement_of_the_project_is_in_the_lock(root: Path, lock: str) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        requirements += extra
    pins = pins_of(lock)
    for text in requirements:
        requirement = Requirement(text)
        if requirement.name == project["name"]:
            continue
        version, _ = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(Version(version)), f"run `make lock-tools`: {text}"


def test_every_requirement_of_the_launchers_tests_is_in_their_lock(root: Path, lock: str) -> None:
    text = (root / "launcher" / "pyproject.toml").read_text(encoding="utf-8")
    pins = pins_of((root / LAUNCHERS).read_text(encoding="utf-8"))
    for line in tomllib.loads(text)["dependency-groups"]["test"]:
        requirement = Requirement(line)
        version, _ = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(Version(version)), f"run `make lock-tools`: {line}"
    assert pins.items() <= pins_of(lock).items(), (
        "run `make lock-tools`: it is a part of the root's"
    )


@pytest.mark.parametrize(("file", "least"), [("tools/requirements.lock", 51), (LAUNCHERS, 15)])
def test_every_pin_has_a_hash_and_no_index_is_named(root: Path, file: str, least: int) -> None:
    lock = (root / file).read_text(encoding="utf-8")
    pins = pins_of(lock)
    assert len(pins) >= least
    assert [name for name, (_, hashes) in pins.items() if hashes == 0] == []
    assert "://" not in lock
    assert "--index" not in lock
    assert "--find-links" not in lock


def test_uv_is_installed_first_in_the_same_version(root: Path, lock: str) -> None:
    first = pins_of((root / "tools" / "uv.lock").read_text(encoding="utf-8"))
    assert first == {"uv": pins_of(lock)["uv"]}


@pytest.mark.parametrize(
    ("folder", "lock_of_folder"),
    [(".", "tools/requirements.lock"), ("launcher", "tests/requirements.lock")],
)
def test_an_environment_is_made_again_after_a_change_of_what_makes_it(
    root: Path, folder: str, lock_of_folder: str
) -> None:
    words = ("make", "--dry-run", "--print-data-base", "--no-print-directory", "setup")
    done = subprocess.run(words, cwd=root / folder, capture_output=True, text=True, check=True)
    (rule,) = re.findall(r"^\S+/complete: (.+)", done.stdout, re.MULTILINE)
    named = {word.removeprefix("../") for word in rule.split()}
    needed = {"tools/uv.lock", "tools/set-up-python", "tools/install-packages", lock_of_folder}
    assert needed <= named


def test_actions_are_named_by_their_commit(root: Path) -> None:
    used = [
        line.split("uses:")[1].strip()
        for path in (root / ".github" / "workflows").glob("*.yml")
        for line in path.read_text(encoding="utf-8").splitlines()
        if "uses:" in line
    ]
    assert len(used) > 4
    assert [action for action in used if not COMMIT.fullmatch(action)] == []
