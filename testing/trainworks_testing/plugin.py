"""A plugin of pytest for the tests of all three packages: ``-p trainworks_testing.plugin``."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

UPDATE = "TRAINWORKS_UPDATE_GOLDEN"
"""The variable that has golden files written instead of compared."""

MEMORY = Path("/dev/shm")
ROOM = 2 << 30
"""Bytes that the files of a whole run fit in. A container's own /dev/shm has 64 MB."""

COMPARED: set[Path] = set()
"""Golden files that this run has compared."""

# Tests start Python programs a hundred times: these are compiled once, also where this shell wants
# no bytecode.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# pytest has read these options by now. The runs of pytest that some tests start get none of them.
os.environ.pop("PYTEST_ADDOPTS", None)

# `python3` is the Python of these tests: a version manager's shim takes ten times as long to start.
python = shutil.which("python3", path=f"{sys.base_prefix}/bin")
if python and shutil.which("python3") != python:
    os.environ["PATH"] = f"{Path(python).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"

# No deadline: a busy machine is not a defect.
settings.register_profile("short", max_examples=50, deadline=None)
settings.load_profile("short")

# `nohup` and a shell's background job pass on that they ignore a signal (SIGHUP, SIGINT, SIGQUIT).
# Each program that a test starts would inherit it and miss the signal that the test sends.
# Python itself ignores SIGPIPE and SIGXFSZ, and subprocess gives those two back to its children.
for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:
    if signal.getsignal(number) is signal.SIG_IGN:
        handler = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, handler)


def pytest_configure(config: pytest.Config) -> None:
    """Keep the tests' files in memory: to delete ten thousand of them from a disk takes seconds.

    Args:
        config: Its ``-m`` says whether images are built. Those are too large for memory.
    """
    if (
        config.getoption("markexpr") != "not engine"
        or "TMPDIR" in os.environ
        or not MEMORY.is_dir()
    ):
        return
    file_system = os.statvfs(MEMORY)
    large_enough = file_system.f_bavail * file_system.f_frsize > ROOM
    if large_enough and not file_system.f_flag & os.ST_NOEXEC and os.access(MEMORY, os.W_OK):
        os.environ["TMPDIR"] = tempfile.tempdir = str(MEMORY)


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """Return one more than the cores; None if pytest-xdist's own variable says how many.

    A fifth of the time tests wait for time-outs, disks and other processes.
    """
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    return (os.cpu_count() or 1) + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Share files out with ``--dist loadfile`` as ``FileSchedule`` does.

    Args:
        config: Its ``--dist`` says how tests are shared out.
        log: Of pytest-xdist.
    """
    if config.getoption("dist") != "loadfile":
        return None
    from trainworks_testing.schedule import FileSchedule

    return FileSchedule(config, log)


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over the thousands of tests, which stay until the end."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder that all processes of this run of tests have together."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Give a comparison with a file of the package's ``tests/golden``, byte for byte.

    With the variable ``UPDATE`` the fixture writes the file instead.
    """
    tests = next(folder for folder in request.path.parents if folder.name == "tests")

    def compare(name: str, text: str) -> None:
        path = tests / "golden" / name
        shown = path.relative_to(tests.parent)
        COMPARED.add(path)
        if os.environ.get(UPDATE):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode())
        advice = "if the change is meant: `make golden`, then read `git diff`"
        assert path.is_file(), f"{shown} is missing; {advice}"
        assert text == path.read_bytes().decode(), f"{shown} differs; {advice}"

    return compare


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail ``pytest -k golden``, the gate, if no test of it has compared some golden file."""
    config = session.config
    is_whole_suite = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    parallel = "PYTEST_XDIST_WORKER" in os.environ or bool(config.getoption("numprocesses", None))
    if config.getoption("keyword") != "golden" or not is_whole_suite or parallel:
        return
    folders = [config.rootpath / path / "golden" for path in config.getini("testpaths")]
    files = {path for folder in folders for path in folder.rglob("*") if path.is_file()}
    if not session.testsfailed and (left := files - COMPARED):
        named = ", ".join(sorted(str(path.relative_to(config.rootpath)) for path in left))
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        sys.stderr.write(
            f"\nno test compares these golden files; delete them, or mend the test: {named}\n"
        )
