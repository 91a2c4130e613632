"""Test `tools/check`, which is `make check`: all refusals in one run, and for each the command to
run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PLUGIN = ("-p", "trainworks_testing.plugin")
"""Programs that run the tests of all three packages."""

PROGRAMS = ("ruff", "mypy", "lint-imports", "python")


@pytest.fixture
def checked(root: Path, tmp_path: Path) -> Path:
    """Give a folder with the script and programs that refuse everything if
    there is a file `refuse`.
    """
    (tmp_path / "tools").mkdir()
    shutil.copy(root / "tools" / "check", tmp_path / "tools" / "check")
    for package in ("launcher", "smdistributed"):
        (tmp_path / package).mkdir()
    for folder, names in ((".venv/bin", PROGRAMS), (".cache/peers/smdistributed/bin", ("python",))):
        (tmp_path / folder).mkdir(parents=True)
        for name in names:
            program = tmp_path / folder / name
            text = (
                f'#!/bin/sh\n[ ! -e "{tmp_path}/refuse" ] && [ -z "$TRAINWORKS_UPDATE_GOLDEN" ]\n'
            )
            program.write_text(text, encoding="utf-8")
            program.chmod(0o755)
    return tmp_path


def run(checked: Path) -> subprocess.CompletedProcess[str]:
    # With the variable, tests would write golden files instead of comparing them.
    env = {**os.environ, "TRAINWORKS_UPDATE_GOLDEN": "1"}
    return subprocess.run(
        [checked / "tools" / "check"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=env,
    )


def test_every_refusal_says_what_to_run(checked: Path) -> None:
    (checked / "refuse").touch()
    done = run(checked)
    assert done.returncode == 1
    commands = done.stdout.splitlines()
    assert len(commands) == 10
    head, *advice_lines = done.stderr.strip().splitlines()
    assert head == "make check: 10 of its commands failed. What to run, or to do:"
    assert [line.strip().split(": ", 1)[0] for line in advice_lines] == commands
    advice = dict(line.strip().split(": ", 1) for line in advice_lines)
    assert advice[".venv/bin/ruff format --check ."].startswith("make fix")
    assert advice[".venv/bin/python tools/generate.py --check"].startswith("make docs")
    assert advice[".venv/bin/python tools/write_buildspec.py --check"].startswith("make docs")
    assert advice[".venv/bin/python -m pytest --quiet -k golden"].startswith("make golden")


def test_what_finds_nothing_says_nothing(checked: Path) -> None:
    done = run(checked)
    assert (done.returncode, done.stderr) == (0, "")


COMPARES = """
def test_golden(golden):
    golden("one.txt", "same")
"""


@pytest.mark.parametrize(
    ("test", "status", "message"),
    [
        (COMPARES, 0, ""),
        (
            "def test_golden(): ...",
            1,
            "no test compares these golden files; delete them, or mend the test: tests/golden/",
        ),
        ("def test_other(): ...", 1, "no test compares these golden files"),
    ],
    ids=["compared", "not-compared", "no-test"],  # by their names none of these is one of the gate
)
def test_a_gate_that_has_compared_nothing_fails(
    root: Path, tmp_path: Path, test: str, status: int, message: str
) -> None:
    (tmp_path / "tests" / "golden").mkdir(parents=True)
    (tmp_path / "tests" / "golden" / "one.txt").write_text("same", encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = tests\n", encoding="utf-8")
    (tmp_path / "tests" / "test_one.py").write_text(test, encoding="utf-8")
    argv = (
        sys.executable,
        "-m",
        "pytest",
        *PLUGIN,
        "--quiet",
        "-k",
        "golden",
        "-p",
        "no:cacheprovider",
    )
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTEST_", "TRAINWORKS_"))
    }
    env["PYTHONPATH"] = str(root / "testing")
    done = subprocess.run(
        argv, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300, env=env
    )
    assert (done.returncode, message in done.stderr) == (status, True), done.stdout + done.stderr


SENDS_ITSELF_SIGNALS = """
import subprocess
import sys

import pytest


@pytest.mark.parametrize("name", ["SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1"])
def test_child_has_the_default(name):
    ignored = f"import signal; print(signal.getsignal(signal.{name}) is signal.SIG_IGN)"
    assert subprocess.check_output([sys.executable, "-c", ignored], text=True) == "False\\n"
"""


def test_what_nohup_ignores_is_not_passed_on_to_the_programs_of_tests(
    root: Path, tmp_path: Path
) -> None:
    """`nohup make test` ignores SIGHUP; a script of CI may ignore others."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = tests\n", encoding="utf-8")
    test = tmp_path / "tests" / "test_one.py"
    test.write_text(SENDS_ITSELF_SIGNALS, encoding="utf-8")
    pytest_argv = (sys.executable, "-m", "pytest", *PLUGIN, "--quiet", "-p", "no:cacheprovider")
    ignoring = ("sh", "-c", """trap '' HUP INT QUIT TERM USR1; exec "$@" """, "sh")
    env = {**os.environ, "PYTHONPATH": str(root / "testing")}
    done = subprocess.run(
        ignoring + pytest_argv,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=env,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 passed" in done.stdout


def test_every_target_that_is_advised_is_one_of_make(root: Path) -> None:
    """`make fix`, `make docs`, `make golden`."""
    makefile = (root / "Makefile").read_text(encoding="utf-8")
    script = (root / "tools" / "check").read_text(encoding="utf-8")
    for target in ("fix", "docs", "golden"):
        assert f'"make {target}' in script
        assert f"\n{target}:" in makefile
