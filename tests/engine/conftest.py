"""Engines to test, each with a base image made here.

An engine that does not answer skips, in its own words.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.helpers import BASE, CREATED, busybox, make_rootfs
from trainworks.engine import ENGINES, create
from trainworks.engine.archive import ImageConfiguration, write_archive
from trainworks.engine.protocol import Engine
from trainworks.errors import EngineUnavailableError


@pytest.fixture(scope="session")
def rootfs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = busybox()
    if program is None:
        pytest.skip("no busybox: `apt-get install busybox-static`")
    return make_rootfs(tmp_path_factory.mktemp("rootfs") / "root", program)


@pytest.fixture(scope="session")
def base_archive(rootfs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    archive = tmp_path_factory.mktemp("archive") / "base.tar"
    environment = {"PATH": "/bin:/usr/bin", "FLAVOUR": "tiny"}
    write_archive(
        rootfs,
        archive,
        name=BASE,
        configuration=ImageConfiguration(
            created=CREATED, environment=environment, command=("/bin/sh",)
        ),
    )
    return archive


@pytest.fixture(scope="session", params=list(ENGINES))
def engine(request: pytest.FixtureRequest, base_archive: Path) -> Engine:
    """Give an engine that answers and has the base image, which stays: it is
    tiny, and keeps the cache usable.
    """
    created_engine = create(request.param)
    try:
        created_engine.probe()
    except EngineUnavailableError as error:
        pytest.skip(f"{request.param} does not answer: {error.message}")
    created_engine.load(base_archive)
    return created_engine


@pytest.fixture
def tag(engine: Engine) -> Iterator[str]:
    """Give a name for an image, which is removed afterwards."""
    name = f"trainworks-conformance-{uuid.uuid4().hex[:12]}:one"
    yield name
    engine.remove(name)
