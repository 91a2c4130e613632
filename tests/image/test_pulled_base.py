"""A base image from a registry on loopback, on a machine without apt and mmdebstrap.

And without the registry.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from image.source_page import plain_registry
from image.support import ROOT, engine_that_answers
from push.support import TOOLS
from trainworks.build.base import ensure_base
from trainworks.engine.protocol import Engine
from trainworks.facts.load import load
from trainworks.host.settings import read_host_settings
from trainworks.plan.model import Request
from trainworks.plan.own_base import own_base
from trainworks.plan.resolve import base_reference, make_plan
from trainworks.render.dockerfile import ARCHIVES_LABEL, BASE_LABEL
from trainworks.terminal.build_progress import BuildProgress

sys.path.insert(0, str(ROOT / "benchmarks"))

from builds import freeze
from image.plain_targets import tags, write_targets

pytestmark = pytest.mark.engine


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A checkout with one small target, and a PATH with few programs."""

    root: Path
    path: str
    pattern: str
    tag: str
    engine: Engine

    def call(self, *words: str) -> tuple[int, dict[str, Any], str]:
        """Run `build.py`; return its status, its document and its messages."""
        done = subprocess.run(
            (
                sys.executable,
                str(self.root / "build.py"),
                *words,
                "--only",
                self.pattern,
                "--format",
                "json",
            ),
            cwd=self.root,
            env={**os.environ, "PATH": self.path, "XDG_CACHE_HOME": str(self.root / "cache")},
            capture_output=True,
            text=True,
            check=False,
            timeout=900,
        )
        return done.returncode, json.loads(done.stdout), done.stderr

    @property
    def base(self) -> str:
        """The name of the target's base image."""
        facts = load(self.root)
        (row,) = (base for base in facts.bases if base.name.endswith(self.pattern.lstrip("*")))
        return base_reference(row, facts)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    engine = engine_that_answers("docker")
    debian = own_base(make_plan(Request(framework="pytorch", cuda="cpu"), load(ROOT)))
    assert debian is not None
    ensure_base(debian, engine, read_host_settings(os.environ), BuildProgress())
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "docker").symlink_to(engine.probe().program)
    for name in ("git", "sh"):
        (programs / name).symlink_to(shutil.which(name) or name)
    root = tmp_path / "checkout"
    root.mkdir()
    freeze(root, own_caches=False)
    components = root / "images" / "components.toml"
    components.write_text(
        components.read_text(encoding="utf-8").replace("default = true", "default = false")
    )
    suffix = write_targets(root, load(root), ("pulled",))
    with plain_registry(tmp_path) as host:
        image = f"{host}/debian:slim"
        for words in (("tag", debian.name, image), ("push", "--quiet", image), ("rmi", image)):
            subprocess.run(("docker", *words), check=True, capture_output=True, timeout=300)
        bases = root / "images" / "bases.toml"
        text = bases.read_text(encoding="utf-8")
        bases.write_text(
            text.replace(f'"debian12pulled{suffix}/debian:bookworm-slim"', f'"{image}"')
        )
        (tag,) = tags(root, suffix)
        mine = Machine(
            root=root,
            path=f"{programs}:{TOOLS}",
            pattern=f"*pulled{suffix}",
            tag=tag,
            engine=engine,
        )
        names = {mine.base}
        try:
            yield mine
        finally:
            for name in (tag, *names, mine.base):
                engine.remove(name)


def test_the_digest_is_locked_and_the_base_is_pulled_by_it(machine: Machine) -> None:
    bootstrapped = machine.base
    status, document, output = machine.call("lock", "--upgrade", "system")
    assert (status, document.get("problems")) == (0, []), (document, output)
    digests = load(machine.root).digest_by_image
    (name, digest), *_ = (
        (name, digest) for name, digest in digests.items() if name.endswith("/debian:slim")
    )
    assert machine.base != bootstrapped
    status, document, output = machine.call("--until", "build")
    assert status == 0, output
    assert f"pulling {name.removesuffix(':slim')}@{digest[:20]}" in output
    image = machine.engine.inspect(machine.tag)
    assert image is not None
    assert image.labels[BASE_LABEL] == "pulled"
    assert "bookworm-security" in image.labels[ARCHIVES_LABEL]
    status, document, output = machine.call("--until", "build")
    assert document["targets"][0]["outcome"] == "unchanged"
    assert "pulling" not in output
    status, document, output = machine.call("--until", "build", "--pull")
    assert (status, document["targets"][0]["outcome"]) == (0, "done")
    assert f"pulling {name.removesuffix(':slim')}@{digest[:20]}" in output


def test_without_a_digest_a_machine_without_mmdebstrap_says_what_to_do(machine: Machine) -> None:
    status, document, output = machine.call("--until", "build")
    assert status == 10
    assert "mmdebstrap is not installed to make it" in document["targets"][0]["cause"]
    assert "`build.py lock --upgrade system` records the digest to pull" in output
