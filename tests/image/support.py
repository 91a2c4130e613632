"""Share the real `cpu` image among its tests: it is built once for each engine, by the product's
own command.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
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
    """The report of `build.py --format json` on an image, the engine that holds the image, and the
    checkout with its record.
    """

    engine: Engine
    root: Path
    reference: str
    report: dict[str, Any]
    progress: str


def build_command(
    engine: str, *more: str, framework: str = "pytorch", cuda: str = "cpu"
) -> tuple[str, ...]:
    """Return the command line that builds an image with an engine."""
    return (
        *(sys.executable, str(ROOT / "build.py"), "--framework", framework, "--cuda", cuda),
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


def copied_checkout(folder: Path) -> Path:
    """Copy the files that an image is made of: the same bytes, at another place."""
    for name in ("images", "templates", "launcher", "smdistributed"):
        skipped = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*cache")
        shutil.copytree(ROOT / name, folder / name, ignore=skipped)
    return folder


@contextlib.contextmanager
def _one_at_a_time(name: str) -> Iterator[None]:
    """Let the other process of tests build first, if it has begun."""
    with Path(tempfile.gettempdir(), f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def given_image(variable: str = "TRAINWORKS_TEST_IMAGE") -> BuiltByCommand | None:
    """Return the image that a variable names, of Docker: tools/release tries
    jobs in each that it builds.
    """
    reference = os.environ.get(variable)
    if not reference:
        return None
    engine = engine_that_answers("docker")
    return BuiltByCommand(engine=engine, root=ROOT, reference=reference, report={}, progress="")


def build_once(
    shared: Path,
    name: str,
    framework: str = "pytorch",
    *,
    cuda: str = "cpu",
    more: tuple[str, ...] = (),
) -> BuiltByCommand:
    """Build and test an image with an engine, the first time in this run of tests.

    A failed image test fails every test that wants the image.

    Args:
        shared: The folder of that name (``tests/conftest.py``): another process reads the first
            one's report there.
        name: The engine.
        framework: As on the command line.
        cuda: As on the command line.
        more: Further words of the command line.
    """
    engine = engine_that_answers(name)
    title = f"trainworks-test-{name}-{framework}-{cuda}"
    root, description_file = shared / title, shared / f"{title}.json"
    with _one_at_a_time(title):
        if not description_file.exists():
            # In a copy, so that the record of the build does not change this checkout.
            shutil.rmtree(root, ignore_errors=True)
            # A variant of a target is another image than its record describes.
            record = () if "--without" in more else ("--record",)
            words = (*record, "--root", str(copied_checkout(root)), *more)
            command = build_command(name, *words, framework=framework, cuda=cuda)
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=1500
            )
            # Not the checks that passed: the one that did not is above them.
            complaints = [line for line in done.stderr.splitlines() if not line.startswith("ok  ")]
            assert done.returncode == 0, "\n".join(complaints)[-6000:]
            description_file.write_text(
                json.dumps({"report": json.loads(done.stdout), "progress": done.stderr}),
                encoding="utf-8",
            )
    description = json.loads(description_file.read_text(encoding="utf-8"))
    return BuiltByCommand(
        engine=engine, root=root, reference=description["report"]["tags"][0], **description
    )
