"""Set up an installation by the real pip without any index of this machine."""

from __future__ import annotations

import base64
import io
import os
import sys
import venv
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pip


def wheel(
    name: str, content: str, version: str = "1.0", requires: Sequence[str] = ()
) -> tuple[str, bytes]:
    """(file name, bytes) of a wheel with one module."""
    information = f"{name}-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {row}\n" for row in requires)
    files = {
        f"{name}.py": content,
        f"{information}/METADATA": (
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}"
        ),
        f"{information}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = f"{information}/RECORD"
    files[record] = "".join(f"{path},,\n" for path in (*files, record))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return f"{name}-{version}-py3-none-any.whl", buffer.getvalue()


def python_of_an_image(base: Path, installed: Mapping[str, str]) -> Path:
    """A Python of its own, with the pip that runs the tests and with one-module
    distributions: name to version.
    """
    venv.create(base, symlinks=True)
    site = base / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    (site / "pip").symlink_to(Path(pip.__file__).parent)
    (base / "bin/uv").symlink_to(Path(sys.executable).parent / "uv")
    for name, version in installed.items():
        _, content = wheel(name, "", version)
        zipfile.ZipFile(io.BytesIO(content)).extractall(site)
    return base / "bin/python"


def project_files() -> dict[str, str]:
    """A project that pip can install: its build backend is its own, so that pip needs no index."""
    _, content = wheel("project", "")
    return {
        "pyproject.toml": (
            '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
            '[project]\nname = "project"\nversion = "1.0"\n'
        ),
        "backend.py": (
            "import base64, os\n"
            "def build_wheel(directory, settings=None, metadata=None):\n"
            "    with open(os.path.join(directory, 'project-1.0-py3-none-any.whl'), 'wb') as out:\n"
            f"        out.write(base64.b64decode({base64.b64encode(content).decode()!r}))\n"
            "    return 'project-1.0-py3-none-any.whl'\n"
        ),
    }


def pip_variables(base: Path, **more: str) -> dict[str, str]:
    """A pip that knows no index of this machine, and installs into a directory of the test."""
    site = base / "site"
    clean = dict.fromkeys(
        ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL", "http_proxy", "HTTP_PROXY"), ""
    )
    return {
        **clean,
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "",
        "PIP_RETRIES": "0",
        "PIP_TARGET": str(site),
        "PYTHONPATH": str(site),
        "NO_PROXY": "127.0.0.1",
        "HOME": str(base),
        # pip asks `rustc` and `lsb_release` for their versions where it finds them.
        "PATH": str(Path(sys.executable).parent),
        **more,
    }
