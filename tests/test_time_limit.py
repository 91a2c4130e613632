"""Test that no test waits for ever: pytest ends the process of one that does, with and without
pytest-xdist.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

SETTINGS = ("pyproject.toml", "launcher/pyproject.toml", "smdistributed/pyproject.toml")

WAITS = """
import threading


def test_that_waits():
    threading.Event().wait()


def test_of_the_same_file():
    pass
"""

PASSES = """
def test_that_passes():
    pass
"""

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run_tests(root: Path, tmp_path: Path) -> Run:
    """Give a function that runs pytest on a test that waits and one that passes, with the settings
    of the root but for the seconds.
    """
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    exits = settings["tool"]["pytest"]["ini_options"]["faulthandler_exit_on_timeout"]
    (tmp_path / "pytest.ini").write_text(
        f"[pytest]\nfaulthandler_timeout = 5\nfaulthandler_exit_on_timeout = {exits}\n",
        encoding="utf-8",
    )
    (tmp_path / "test_a.py").write_text(WAITS, encoding="utf-8")
    (tmp_path / "test_b.py").write_text(PASSES, encoding="utf-8")

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        plugin = ("-p", "trainworks_testing.plugin", "-p", "no:cacheprovider")
        return subprocess.run(
            (sys.executable, "-m", "pytest", *plugin, *words),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    return run


def test_a_process_of_xdist_is_replaced_and_its_test_has_failed(run_tests: Run) -> None:
    """The test is not tried again: with ``--dist loadfile`` pytest-xdist alone would do so."""
    done = run_tests("--numprocesses", "1", "--dist", "loadfile", "--verbose")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "worker 'gw0' crashed while running 'test_a.py::test_that_waits'" in done.stdout
    assert "PASSED test_a.py::test_of_the_same_file" in done.stdout
    assert "PASSED test_b.py::test_that_passes" in done.stdout
    assert "1 failed, 2 passed" in done.stdout
    assert "in test_that_waits" in done.stderr


def test_a_run_without_xdist_ends_and_says_where_it_waited(run_tests: Run) -> None:
    done = run_tests("test_a.py")
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr.startswith("Timeout (0:00:05)!")
    assert "in test_that_waits" in done.stderr


@pytest.mark.parametrize("file", SETTINGS)
def test_each_package_has_the_limit(root: Path, file: str) -> None:
    settings = tomllib.loads((root / file).read_text(encoding="utf-8"))
    options = settings["tool"]["pytest"]["ini_options"]
    assert (options["faulthandler_timeout"], options["faulthandler_exit_on_timeout"]) == (
        1800,
        True,
    )


def test_suites_with_images_have_a_longer_limit(root: Path) -> None:
    """A build of an image may take longer than half an hour; a suite by hand takes hours."""
    goals = ("test", "test-all", "proof", "arm64")
    makefile = subprocess.run(
        ("make", "--dry-run", "--no-print-directory", *goals),
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    tests_of_images = re.compile("-m engine|tests/image")
    commands = [line for line in makefile.stdout.splitlines() if tests_of_images.search(line)]
    assert len(commands) == 5
    assert [line for line in commands if "faulthandler_timeout=" not in line] == []
