"""The examples of docs/jobs.md, run as they are printed: each client in local
mode, with the page's own settings.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from documentation.blocks import Block
from sdk.support import PEERS, PROGRAMS, removed_afterwards
from trainworks_testing.clock import PATIENCE

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("line", ["v3", "v2"])
def test_the_examples_of_the_page_on_jobs(
    line: str, page_blocks: list[Block], image: str, tmp_path: Path
) -> None:
    settings, example = page_blocks
    assert f'"{image}"' in example.text, "the page names the image that is built here"
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").write_bytes((PROGRAMS / "plain.py").read_bytes())
    (tmp_path / "example.py").write_text(example.text, encoding="utf-8")
    variables = {
        name: os.environ[name]
        for name in ("PATH", "DOCKER_HOST", "DOCKER_CONFIG")
        if name in os.environ
    }
    environment = {**variables, "HOME": str(tmp_path), "TMPDIR": str(tmp_path), "LANG": "C.UTF-8"}
    isolated = (
        ("unshare", "--net") if os.geteuid() == 0 else ("unshare", "--map-root-user", "--net")
    )
    python = PEERS / f"sdk-{line}" / "bin" / "python"
    with removed_afterwards(tmp_path, environment):
        done = subprocess.run(
            (*isolated, "bash", "-euc", f"{settings.text}\n{shlex.quote(str(python))} example.py"),
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    assert done.returncode == 0, done.stdout[-6000:]
    # Compose stops the other host when one has ended, even before the last lines of that one.
    assert "job succeeded on every host" in done.stdout
