"""How many processes the tests run on with ``--numprocesses auto``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

COUNTS = """
import os
from pathlib import Path


def test_count():
    Path("count").write_text(os.environ["PYTEST_XDIST_WORKER_COUNT"])
"""


@pytest.mark.parametrize(
    ("variables", "count"),
    [({}, (os.cpu_count() or 1) + 1), ({"PYTEST_XDIST_AUTO_NUM_WORKERS": "1"}, 1)],
)
def test_there_is_one_process_more_than_cores(
    tmp_path: Path, variables: dict[str, str], count: int
) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    (tmp_path / "test_count.py").write_text(COUNTS, encoding="utf-8")
    plugins = ("-p", "trainworks_testing.plugin", "-p", "no:cacheprovider")
    command = (sys.executable, "-m", "pytest", *plugins, "--numprocesses", "auto")
    subprocess.run(command, cwd=tmp_path, env=os.environ | variables, check=True, timeout=300)
    assert int((tmp_path / "count").read_text(encoding="utf-8")) == count
