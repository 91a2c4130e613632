"""``build.py lint`` hands over to ``trainworks-lint``; lint/tests has the tests of that."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_all_arguments_and_the_exit_status_are_handed_over(root: Path, tmp_path: Path) -> None:
    for name in ("Dockerfile", "-odd name"):
        (tmp_path / name).write_text("FROM debian:12\nRUN pip install a>=1\n", encoding="utf-8")
    argv = [sys.executable, str(root / "build.py"), "lint", "--format", "json", "--", "Dockerfile", "-odd name"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 14
    assert [file["file"] for file in json.loads(done.stdout)["files"]] == ["Dockerfile", "-odd name"]
