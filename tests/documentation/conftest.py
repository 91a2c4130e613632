"""The site, written once for all tests: some ten seconds, so everything that needs it is in the run with engines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
sys.path.append(str(TOOLS))


def write_site(folder: Path, **environment: str) -> None:
    """Run the tool as a person does; it has nothing to complain about."""
    command = (sys.executable, TOOLS / "write-site", folder)
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{folder / 'index.html'}\n"


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the folder of the site."""
    folder = tmp_path_factory.mktemp("documentation") / "site"
    write_site(folder)
    return folder
