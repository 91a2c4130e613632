"""Test that what may run on an old Python does: the probe of images, and the front door's error."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from trainworks_testing.old_python import NOT_TESTED, find_oldest_python


@pytest.fixture
def python() -> str:
    """Return the path of the oldest Python; skip the test without one."""
    path = find_oldest_python()
    if not path:
        pytest.skip(NOT_TESTED)
    return path


def test_the_front_door_names_the_python_that_it_needs(root: Path, python: str) -> None:
    done = subprocess.run(
        (python, "-B", str(root / "build.py"), "--list"),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: Python 3.11 or later is needed, this is 3.8")


def test_the_probe_of_an_image_is_imported_on_the_oldest_python(root: Path, python: str) -> None:
    """Each file that an image's own Python runs; its types are evaluated, too."""
    probe = root / "src/trainworks/imagetest/probe"
    names = sorted(path.stem for path in probe.glob("[a-z]*.py"))
    modules = [f"trainworks.imagetest.probe.{name}" for name in names]
    modules += ["trainworks.imagetest.imports", "trainworks.imagetest.interpreter"]
    script = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\n"
    done = subprocess.run(
        (python, "-B", "-W", "error", "-c", script, *modules),
        env={"PYTHONPATH": str(root / "src"), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
