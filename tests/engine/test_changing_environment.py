"""The variables of this process may change while an engine is asked: pytest sets one before each image test."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator

import pytest

from image.support import engine_that_answers
from trainworks.engine import create

pytestmark = pytest.mark.engine


@pytest.fixture
def changing() -> Iterator[None]:
    """Change a variable all the time, and let threads take turns often; skips without a daemon."""
    engine_that_answers("docker")
    over, interval = threading.Event(), sys.getswitchinterval()

    def change() -> None:
        while not over.is_set():
            os.environ["TRAINWORKS_COMES_AND_GOES"] = "here"
            os.environ.pop("TRAINWORKS_COMES_AND_GOES")

    thread = threading.Thread(target=change)
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        sys.setswitchinterval(interval)


@pytest.mark.usefixtures("changing")
def test_a_daemon_is_asked_while_the_environment_changes() -> None:
    engine = create("docker")
    engine.probe()
    for _ in range(100):
        assert engine.inspect("trainworks-test-no-such-image:1") is None
