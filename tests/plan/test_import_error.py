"""The import of an extension's modules, tried in the image's own Python."""

from __future__ import annotations

import shutil
import subprocess
import venv
from pathlib import Path

import pytest

import trainworks

SOURCE = Path(trainworks.__file__).parent
WARNING = "import sys; print('DeprecationWarning: old', file=sys.stderr)\n"


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("", ""),
        ("raise ImportError('no part of it')", "ImportError: no part of it"),
        (
            f"{WARNING}import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
            "import ended by SIGSEGV: DeprecationWarning: old",
        ),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "import ended by SIGKILL"),
        ("import os; os._exit(3)", "import ended with status 3"),
    ],
)
def test_the_end_of_an_import_is_told(tmp_path: Path, code: str, line: str) -> None:
    venv.create(tmp_path / "venv", symlinks=True)
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (packages / "part.py").write_text(code, encoding="utf-8")
    for file in (SOURCE / "extend" / "build_stage.py", SOURCE / "imagetest" / "imports.py"):
        shutil.copy(file, tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    answer = tmp_path / "answer"
    subprocess.run(
        (python, tmp_path / "build_stage.py", "ask", answer, "part"), check=True, timeout=300
    )
    assert (answer / "error").read_text(encoding="utf-8") == line
