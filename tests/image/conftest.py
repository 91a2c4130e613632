"""The real `cpu` image, as each engine builds it."""

from __future__ import annotations

import pytest

from image.support import BuiltByCommand, build_once
from trainworks.engine import ENGINES


@pytest.fixture(scope="session", params=list(ENGINES))
def image(request: pytest.FixtureRequest) -> BuiltByCommand:
    """Give the image as each engine built it."""
    return build_once(request.param)


@pytest.fixture(scope="session")
def docker_image() -> BuiltByCommand:
    """Give the image as Docker built it, for jobs of several containers on a private network."""
    return build_once("docker")
