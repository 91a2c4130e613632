"""The machine that the command lines run on: without settings of pip, so that
no wheels of this one are read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def machine() -> Iterator[None]:
    """Have none of this machine's settings of pip: to hash the wheels of its
    folders takes longer than the tests.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("PIP_")]:
            patch.delenv(name)
        patch.setenv("PIP_CONFIG_FILE", os.devnull)
        yield
