"""The variables of this process may change while an engine is asked: pytest
sets one before each image test.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator

import pytest

from image.support import engine_that_answers
from trainworks.engine.protocol import Engine

pytestmark = pytest.mark.engine


@pytest.fixture
def engine() -> Engine:
    """Give an engine that is connected."""
    return engine_that_answers("docker")


@pytest.fixture
def changing(engine: Engine) -> Iterator[None]:  # noqa: ARG001 - connected before
    """Change a variable all the time, and let threads take turns often."""
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
def test_a_daemon_is_asked_while_the_environment_changes(engine: Engine) -> None:
    """Ask 400 times. Before the repair one of 20 questions failed in 15 of 40 runs."""
    for _ in range(400):
        assert engine.inspect("trainworks-test-no-such-image:1") is None
