"""The builder stage: its files fit the image's Python, and the distribution's,
which may be older, installs them.
"""

from __future__ import annotations

import hashlib
import os
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
from trainworks.render.manifest import render_constraints, render_uv_settings

WANTS = "3.13"


def write_wheel(folder: Path, name: str = "demo", version: str = "1.0", python: str = WANTS) -> str:
    """Write a wheel that wants a newer Python than that of most distributions,
    and return its line with its hash.
    """
    path = folder / f"{name}-{version}-py3-none-any.whl"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += f"Requires-Python: >={python}\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", "")
        archive.writestr(f"{name}-{version}.dist-info/METADATA", metadata)
        archive.writestr(
            f"{name}-{version}.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr(f"{name}-{version}.dist-info/RECORD", f"{name}.py,,\n")
    return f"{name}=={version} --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"


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


@pytest.mark.parametrize("tool", ["pip", "uv", "uv-settings"])
def test_the_images_torch_is_not_replaced_by_its_release_for_another_cuda(
    facts: Facts, tmp_path: Path, tool: str
) -> None:
    """PyTorch's own indexes have each release for several CUDA, as VERSION+NAME."""
    row = next(row for row in facts.targets if row.cuda == "cu132")
    plan = make_plan(request_for(row, facts), facts)
    version = plan.protected["torch"]
    assert "+" not in version, "the wheel of the default index"
    write_wheel(tmp_path, "torch", version, "3")
    write_wheel(tmp_path, "torch", f"{version}+cpu", "3")
    (tmp_path / "constraints.txt").write_text(render_constraints(plan), encoding="utf-8")
    (tmp_path / "uv.toml").write_text(render_uv_settings(plan), encoding="utf-8")
    names = {"pip": "PIP_CONSTRAINT", "uv": "UV_CONSTRAINT", "uv-settings": "UV_CONFIG_FILE"}
    file = "uv.toml" if tool == "uv-settings" else "constraints.txt"
    variables = {**os.environ, names[tool]: str(tmp_path / file)}
    command: tuple[str, ...] = (sys.executable, "-m", "pip", "install", "--dry-run")
    if tool != "pip":
        uv = str(Path(sys.executable).with_name("uv"))
        command = (uv, "pip", "install", "--dry-run", "--target", str(tmp_path / "target"))
    command += ("--no-index", "--find-links", str(tmp_path))

    def install(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            (*command, *words), env=variables, capture_output=True, text=True, check=False
        )

    assert install("torch==" + version + "+cpu").returncode == 1
    for words in (("torch",), ("torch==" + version,), ("--upgrade", "torch")):
        done = install(*words)
        assert done.returncode == 0, done.stderr
        assert "+cpu" not in done.stdout + done.stderr
        assert f"torch-{version}" in done.stdout or f"torch=={version}" in done.stderr
