"""Prints which Python an image gives to a job and what is installed in it; that Python runs this file.

The source of this file is sent into a container. It has only the standard library of a Python that may be as old as
3.8: import nothing else, and use no newer syntax. It prints one line, ``MARKER`` followed by an ``Interpreter`` as
JSON; an older Python prints its version only.
"""

# ruff: noqa: PTH110, PTH118, PTH123
# The oldest interpreter decides, and this file does not need pathlib.

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from typing import TypedDict

MARKER = "trainworks-interpreter: "
OLDEST = (3, 8)


class InstalledDistribution(TypedDict):
    """A distribution, and those of its requirements that only an extra asks for."""

    name: str
    version: str
    extras: list[str]


class Interpreter(TypedDict):
    """The fields of ``trainworks.extend.requirements.ExtendedBase`` about the image's Python."""

    python: str
    version: str
    glibc: str
    machine: str
    managed: bool
    distribution: str
    suite: str
    compiler: bool
    launcher: bool
    pip: bool
    distributions: list[InstalledDistribution]
    complaints: list[str]


def look() -> Interpreter:
    """Look at the running interpreter."""
    found: Interpreter = {
        "python": sys.executable,
        "version": ".".join(map(str, sys.version_info[:2])),
        "glibc": platform.libc_ver()[1],
        "machine": platform.machine(),
        "managed": sys.prefix == sys.base_prefix
        and os.path.exists(os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED")),
        "distribution": "",
        "suite": "",
        "compiler": any(shutil.which(name) for name in ("cc", "gcc", "c++")),
        "launcher": os.path.exists("/opt/trainworks/image.json"),
        "pip": False,
        "distributions": [],
        "complaints": [],
    }
    if os.path.exists("/etc/os-release"):
        with open("/etc/os-release", encoding="utf-8") as opened:
            release = dict(line.strip().split("=", 1) for line in opened if "=" in line)
        found["distribution"] = release.get("ID", "").strip('"')
        found["suite"] = release.get("VERSION_CODENAME", "").strip('"')
    if sys.version_info[:2] < OLDEST:
        return found
    from importlib import metadata

    seen = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        # The first on sys.path is the one that is imported; broken remainders have no name.
        if name and name.lower() not in seen:
            extras = [text for text in distribution.requires or () if "extra" in text.partition(";")[2]]
            seen[name.lower()] = InstalledDistribution(name=name, version=distribution.version, extras=extras)
    found["distributions"] = sorted(seen.values(), key=lambda row: row["name"].lower())
    found["pip"] = "pip" in seen
    if found["pip"]:
        command = (sys.executable, "-m", "pip", "check", "--disable-pip-version-check")
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        found["complaints"] = done.stdout.splitlines() if done.returncode else []
    return found


if __name__ == "__main__":
    print(MARKER + json.dumps(look()))
