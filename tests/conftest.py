"""What the tests of several layers share: the checkout, its facts, and a copy of it that a test may spoil."""

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

from aws import SECRET
from trainworks.facts.load import load
from trainworks.facts.rows import Facts

ROOT = Path(__file__).resolve().parent.parent

UPDATE = "TRAINWORKS_UPDATE_GOLDEN"

# A hundred tests start `build.py`: it is compiled once, also where this shell wants no bytecode.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# `python3` is the Python of these tests: a version manager's shim takes ten times as long to start.
if shutil.which("python3") != (python := shutil.which("python3", path=f"{sys.base_prefix}/bin")) and python:
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

MEMORY = Path("/dev/shm")
ROOM = 2 << 30
"""Bytes that the files of a whole run fit in, with much to spare; a container's own /dev/shm has 64 MB."""

ENGINES = ("engine", "core")
"""Markers of the tests that build images, as `-m` has them."""

ENGINE_ROOM = 10 << 30
"""Bytes of disk below which no engine test starts: one image with the cache of its build."""


def pytest_configure(config: pytest.Config) -> None:
    """Keep the tests' files in memory: a disk that has to delete ten thousand of them takes seconds. Images are large.

    Args:
        config: Its ``-m`` says whether images are built.

    Raises:
        pytest.UsageError: There is too little disk to build images: say so once, and not in each of 400 tests.
    """
    if config.getoption("markexpr") in ENGINES:
        for folder in filter(Path.is_dir, map(Path, (tempfile.gettempdir(), "/var/lib/docker", "/var/lib/containers"))):
            if (free := shutil.disk_usage(folder).free) < ENGINE_ROOM:
                raise pytest.UsageError(
                    f"{free >> 30} GB are free in {folder}, and tests that build images need {ENGINE_ROOM >> 30}; "
                    "`tools/make-room 40` removes the engines' build caches"
                )
    if config.getoption("markexpr") == "not engine" and "TMPDIR" not in os.environ and MEMORY.is_dir():
        found = os.statvfs(MEMORY)
        if found.f_bavail * found.f_frsize > ROOM and not found.f_flag & os.ST_NOEXEC and os.access(MEMORY, os.W_OK):
            os.environ["TMPDIR"] = tempfile.tempdir = str(MEMORY)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return one more than the cores: a fifth of the time tests wait for time-outs, disks and other processes."""
    return (os.cpu_count() or 1) + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let engine tests of images and those of jobs run side by side: both wait more than they compute.

    A process takes the next file when it has ended one, those that take longest first. Whoever wants an image first
    builds it, and the others wait (``image.support.build_once``).

    Args:
        config: Its ``-m`` says whether images are built.
        log: Of pytest-xdist.
    """
    if config.getoption("markexpr") not in ENGINES:
        return None
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

    class Files(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return _scope(nodeid)

    config.option.loadscopereorder = False
    return Files(config, log)


LONGEST = (
    *("tests/image/test_fabric.py", "tests/sdk", "tests/image/test_bad_sources.py", "tests/image/test_vendor_build.py"),
    *("tests/image/test_tensorflow_jobs.py", "tests/image/test_extension.py", "tests/image/test_many_builds.py"),
    *("tests/launcher/test_launcher_scenarios.py", "tests/launcher/test_launcher_hang_engine.py"),
)
"""Scopes of engine tests that take longest: images are built in the first ones, which others use."""


def _scope(nodeid: str) -> str:
    """Return what stays in one process: a file, and all clients of the SDK, whose networks have one name."""
    return "tests/sdk" if nodeid.startswith("tests/sdk/") else nodeid.partition("::")[0]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the engine tests that take longest: what is left in the end is short."""
    if config.getoption("markexpr") in ENGINES:
        order = {scope: number for number, scope in enumerate(LONGEST)}
        items.sort(key=lambda item: order.get(_scope(item.nodeid), len(order)))


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over the four thousand tests: it would look at each of them every time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def root() -> Path:
    """Give the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder that all processes of this run of tests have together."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def facts() -> Facts:
    """Give the real facts; they are frozen, so every test may have the same ones."""
    return load(ROOT)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Give a copy of the facts that a test may spoil."""
    for name in ("images", "templates", "launcher"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


@pytest.fixture(scope="session")
def validate() -> Callable[[Any, Any], None]:
    """Give jsonschema's function; with its formats it loads for two seconds, which other tests need not wait for."""
    import jsonschema

    return jsonschema.validate


COMPARED: set[Path] = set()
"""Golden files that this run has compared."""


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail ``pytest -k golden``, which is the gate, if there are golden files that no test of it has compared."""
    config = session.config
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    parallel = "PYTEST_XDIST_WORKER" in os.environ or bool(config.getoption("numprocesses", None))
    if config.getoption("keyword") != "golden" or not whole or parallel:
        return
    files = {path for path in (ROOT / "tests" / "golden").rglob("*") if path.is_file()}
    if not session.testsfailed and (left := files - COMPARED):
        named = ", ".join(sorted(str(path.relative_to(ROOT)) for path in left))
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        sys.stderr.write(f"\nno test compares these golden files; delete them, or mend the test: {named}\n")


@pytest.fixture(scope="session")
def golden() -> Callable[[str, str], None]:
    """Give a comparison with a file below ``tests/golden``, byte for byte; ``UPDATE`` writes the file instead."""

    def compare(name: str, text: str) -> None:
        path = ROOT / "tests" / "golden" / name
        COMPARED.add(path)
        if os.environ.get(UPDATE):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode())
        advice = f"if the change is meant: `make golden` (or {UPDATE}=1 with pytest), then read `git diff tests/golden`"
        assert path.is_file(), f"{path.relative_to(ROOT)} is missing; {advice}"
        assert text == path.read_bytes().decode(), f"{path.relative_to(ROOT)} differs; {advice}"

    return compare


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have AWS credentials, and none of this machine's own AWS settings."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_CA_BUNDLE", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDOFTHETEST")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
