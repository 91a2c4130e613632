"""The image that the clients start: the real `cpu` one, as Docker built it."""

from __future__ import annotations

from pathlib import Path

import pytest

from image.support import build_once


@pytest.fixture(scope="session")
def image(shared: Path) -> str:
    """Give the reference of the image."""
    return build_once(shared, "docker").reference
