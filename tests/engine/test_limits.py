"""buildah where root may not raise limits, as in many containers."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.helpers import BASE, request
from trainworks.engine.buildah import BuildahEngine
from trainworks.engine.protocol import Engine

pytestmark = pytest.mark.engine

NEWER = '[containers]\ndefault_ulimits = ["nofile=1048576:1048576", "nproc=1048576:1048576"]\n'
"""Defaults of newer versions of buildah."""


def test_steps_and_containers_have_the_limits_of_this_process(
    engine: Engine, tag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not isinstance(engine, BuildahEngine):
        pytest.skip("docker's daemon has its own limits")
    (tmp_path / "containers.conf").write_text(NEWER)
    monkeypatch.setenv("CONTAINERS_CONF", str(tmp_path / "containers.conf"))
    engine.build(
        request(tmp_path / "context", f"FROM {BASE}\nRUN true\n", tags=(tag,)), lambda _: None
    )
    with engine.container(tag) as container:
        assert container.run(("true",)).status == 0
