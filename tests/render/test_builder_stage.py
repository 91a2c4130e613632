"""The builder stage: its files fit the image's Python, and the distribution's,
which may be older, installs them.
"""

from __future__ import annotations

import hashlib
import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from trainworks.facts.rows import Facts
from trainworks.plan.resolve import make_plan
from trainworks.plan.select import request_for
from trainworks.render.dockerfile import render

WANTS = "3.13"


def write_wheel(folder: Path) -> str:
    """Write a wheel that wants a newer Python than that of most distributions,
    and return its line with its hash.
    """
    path = folder / "demo-1.0-py3-none-any.whl"
    metadata = f"Metadata-Version: 2.1\nName: demo\nVersion: 1.0\nRequires-Python: >={WANTS}\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("demo.py", "")
        archive.writestr("demo-1.0.dist-info/METADATA", metadata)
        archive.writestr(
            "demo-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr("demo-1.0.dist-info/RECORD", "demo.py,,\n")
    return f"demo==1.0 --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"


@pytest.mark.skipif(sys.version_info >= (3, 13), reason=f"this Python is not older than {WANTS}")
def test_an_older_python_installs_what_the_image_s_python_needs(
    facts: Facts, tmp_path: Path
) -> None:
    row = next(row for row in facts.targets if facts.python_of(row) == WANTS)
    dockerfile = render(make_plan(request_for(row, facts), facts), facts).dockerfile
    (line,) = re.findall(r"python3 -m (pip install .*?)\n[A-Z]", dockerfile, re.DOTALL)
    (tmp_path / "wheels").mkdir()
    (tmp_path / "constraints.txt").write_text(write_wheel(tmp_path / "wheels"), encoding="utf-8")
    places = {
        "/run/wheels": str(tmp_path / "wheels"),
        "/opt/builder/lib": str(tmp_path / "lib"),
        "/opt/builder/constraints.txt": str(tmp_path / "constraints.txt"),
    }
    words = [places.get(word, word) for word in shlex.split(line.replace("\\\n", " "))]
    assert set(places.values()) < set(words)
    done = subprocess.run(
        [sys.executable, "-m", *words, "--no-index"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "lib" / "demo.py").exists()
