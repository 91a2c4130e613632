"""What the tests of the real `cpu` image share: it is built once for each engine, by the product's own command."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from trainworks.engine import create
from trainworks.engine.protocol import Engine
from trainworks.errors import EngineUnavailableError

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class BuiltByCommand:
    """What `build.py --format json` said of an image, and the engine that holds it."""

    engine: Engine
    reference: str
    report: dict[str, Any]
    progress: str


def build_command(engine: str, *more: str, framework: str = "pytorch") -> tuple[str, ...]:
    """Return the command line that builds a framework's `cpu` image with an engine."""
    return (
        *(sys.executable, str(ROOT / "build.py"), "--framework", framework, "--cuda", "cpu"),
        *("--engine", engine, "--format", "json", *more),
    )


def engine_that_answers(name: str) -> Engine:
    """Return an engine, or skip in its own words."""
    engine = create(name)
    try:
        engine.probe()
    except EngineUnavailableError as error:
        pytest.skip(f"{name} does not answer here: {error.message}")
    return engine


_BUILT: dict[tuple[str, str], BuiltByCommand] = {}


def build_once(name: str, framework: str = "pytorch") -> BuiltByCommand:
    """Build and test an image with an engine, the first time; a failed image test fails every test that wants it."""
    key = (name, framework)
    if key not in _BUILT:
        engine = engine_that_answers(name)
        command = build_command(name, framework=framework)
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1500)
        assert done.returncode == 0, done.stderr[-6000:]
        report = json.loads(done.stdout)
        _BUILT[key] = BuiltByCommand(engine=engine, reference=report["tags"][0], report=report, progress=done.stderr)
    return _BUILT[key]
