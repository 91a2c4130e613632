"""Test the error for a file of the package index that differs from the lock, or for an index that
does not answer.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from image.support import ROOT, BuiltByCommand
from trainworks.errors import BuildError

pytestmark = pytest.mark.engine

LOCK = Path("images") / "lock" / "pytorch-2.13.0-cpu-py311-debian12.toml"
UNREACHABLE = "http://127.0.0.1:9/simple"


@pytest.fixture
def spoiled(tmp_path: Path) -> Path:
    """Give a checkout whose lock has another hash for pip: its step is new to
    every cache, and the only one.
    """
    for name in ("images", "templates", "launcher"):
        shutil.copytree(
            ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
        )
    lock = tmp_path / LOCK
    text = re.sub(
        r'(name = "pip"\n.*\n.*\nsha256 = ")[0-9a-f]{64}',
        r"\g<1>" + "f" * 64,
        lock.read_text(encoding="utf-8"),
    )
    lock.write_text(text, encoding="utf-8")
    return tmp_path


def build(root: Path, engine: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the product's command on another checkout."""
    command = (
        sys.executable,
        str(ROOT / "build.py"),
        "--root",
        str(root),
        "--framework",
        "pytorch",
        "--cuda",
        "cpu",
    )
    return subprocess.run(
        (*command, "--engine", engine, "--until", "build"),
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
        env={**os.environ, **variables},
    )


def test_a_wrong_hash_is_refused_by_name_and_nothing_is_built(
    image: BuiltByCommand, spoiled: Path
) -> None:
    done = build(spoiled, image.engine.name)
    assert done.returncode == BuildError.exit_status, done.stderr[-3000:]
    message = done.stderr[done.stderr.index("error: ") :]
    assert "failed in component python-environment" in message.splitlines()[0], message
    # Another step that fails, of a network say, has other last lines.
    assert "Hash mismatch for `pip==" in message, message
    assert done.stdout == ""


def test_an_index_that_does_not_answer_is_named(
    docker_image: BuiltByCommand, spoiled: Path
) -> None:
    done = build(
        spoiled,
        docker_image.engine.name,
        PIP_INDEX_URL=UNREACHABLE,
        PIP_EXTRA_INDEX_URL="",
        PIP_FIND_LINKS="",
    )
    assert done.returncode == BuildError.exit_status, done.stderr[-3000:]
    message = done.stderr[done.stderr.index("error: ") :]
    assert "127.0.0.1" in message
    # Or another step that installs packages: an engine may have forgotten it,
    # though it has the image.
    assert "failed in component " in message
    assert done.stdout == ""


def test_after_a_wrong_hash_the_right_one_is_built(image: BuiltByCommand, spoiled: Path) -> None:
    """The two contexts differ in one file, which has the same size in both: an
    engine must still see the difference.
    """
    assert build(spoiled, image.engine.name).returncode == BuildError.exit_status
    done = build(ROOT, image.engine.name)
    assert done.returncode == 0, done.stderr[-3000:]
