"""Share the checkout, its facts, and a copy of it that a test may spoil, among the tests of the
builder.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aws import SECRET
from documentation.blocks import Block, blocks_run_by
from trainworks.facts.load import load
from trainworks.facts.rows import Facts

ROOT = Path(__file__).resolve().parent.parent

ENGINES = ("engine", "core")
"""Markers of the tests that build images, as `-m` has them."""

ENGINE_ROOM = 10 << 30
"""Bytes of disk below which no engine test starts: one image with the cache of its build."""


def pytest_configure(config: pytest.Config) -> None:
    """Ask for room on the disk before images are built.

    Args:
        config: Its ``-m`` says whether images are built.

    Raises:
        pytest.UsageError: There is too little disk to build images: say so
            once, and not in each of 400 tests.
    """
    if config.getoption("markexpr") not in ENGINES:
        return
    for folder in filter(
        Path.is_dir, map(Path, (tempfile.gettempdir(), "/var/lib/docker", "/var/lib/containers"))
    ):
        if (free := shutil.disk_usage(folder).free) < ENGINE_ROOM:
            raise pytest.UsageError(
                f"{free >> 30} GB are free in {folder}, and tests that build images need"
                f" {ENGINE_ROOM >> 30}; `tools/make-room 40` removes the engines' build caches"
            )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let engine tests of images and those of jobs run side by side: both wait
    more than they compute.

    A process takes the next file when it has ended one, those that take longest first. The first
    process that wants an image builds it, and the others wait (``image.support.build_once``).

    Args:
        config: Its ``-m`` says whether images are built.
        log: Of pytest-xdist.
    """
    if config.getoption("markexpr") not in ENGINES:
        return None
    from trainworks_testing.schedule import FileSchedule

    class Files(FileSchedule):
        def _split_scope(self, nodeid: str) -> str:
            return _scope(nodeid)

    config.option.loadscopereorder = False
    return Files(config, log)


LONGEST = (
    *(
        "tests/image/test_fabric.py",
        "tests/sdk",
        "tests/image/test_bad_sources.py",
        "tests/image/test_vendor_build.py",
    ),
    *(
        "tests/image/test_tensorflow_jobs.py",
        "tests/image/test_extension.py",
        "tests/image/test_many_builds.py",
    ),
    *("launcher/tests/test_launcher_scenarios.py", "launcher/tests/test_launcher_hang_engine.py"),
)
"""Scopes of engine tests that take longest: images are built in the first ones,
which others use.
"""


def _scope(nodeid: str) -> str:
    """Return the key of tests that stay in one process: a file, and all clients of the SDK, whose
    networks have one name.
    """
    return "tests/sdk" if nodeid.startswith("tests/sdk/") else nodeid.partition("::")[0]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the engine tests that take longest, so that a run ends with short ones."""
    if config.getoption("markexpr") in ENGINES:
        order = {scope: number for number, scope in enumerate(LONGEST)}
        items.sort(key=lambda item: order.get(_scope(item.nodeid), len(order)))


@pytest.fixture(scope="session")
def root() -> Path:
    """Give the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def facts() -> Facts:
    """Give the real facts; they are frozen, so every test may have the same ones."""
    return load(ROOT)


@pytest.fixture
def page_blocks(request: pytest.FixtureRequest) -> list[Block]:
    """Give the blocks of the pages whose mark names the test (``documentation/blocks.py``)."""
    blocks = blocks_run_by(request.node.nodeid)
    assert blocks, "no mark of a page names this test"
    return blocks


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Give a copy of the facts that a test may spoil."""
    for name in ("images", "templates", "launcher"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


@pytest.fixture(scope="session")
def validate() -> Callable[[Any, Any], None]:
    """Give jsonschema's function.

    With its formats the validator loads for two seconds, which other tests need not wait for.
    """
    import jsonschema

    return jsonschema.validate


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have AWS credentials, and none of this machine's own AWS settings."""
    for name in (
        "AWS_PROFILE",
        "AWS_SESSION_TOKEN",
        "AWS_CA_BUNDLE",
        "AWS_REGION",
        "AWS_DEFAULT_REGION",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDOFTHETEST")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
