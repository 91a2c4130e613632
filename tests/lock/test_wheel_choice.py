"""A lock has the file that pip would take on the image's base: the order of
wheel tags is that of `packaging`.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.tags import sys_tags

from trainworks.errors import LockError
from trainworks.inputs.lock_python import _choose_file, run_uv, uv_platform
from trainworks.plan.wheel_tags import wheel_tags

GLIBC = platform.libc_ver()
MACHINE = platform.machine()
GLIBC_VERSION = GLIBC[1] if GLIBC[0] == "glibc" else ""
TAGS = wheel_tags(
    machine=MACHINE,
    glibc=GLIBC_VERSION,
    python=f"{sys.version_info.major}.{sys.version_info.minor}",
)
MANYLINUX = f"manylinux_2_17_{MACHINE}"
NEW = f"manylinux_2_99_{MACHINE}"
INTERPRETER = f"cp{sys.version_info.major}{sys.version_info.minor}"

pytestmark = pytest.mark.skipif(
    GLIBC[0] != "glibc", reason="NOT TESTED: wheels of this machine are not for glibc"
)


def test_the_tags_of_this_machine_are_those_of_packaging() -> None:
    """Compare all but ``linux_x86_64``, which no index takes and whose place changed between
    versions of packaging.
    """
    assert set(TAGS) == set(sys_tags())
    assert [tag for tag in TAGS if "-linux_" not in str(tag)] == [
        tag for tag in sys_tags() if "-linux_" not in str(tag)
    ]


@pytest.mark.parametrize(
    ("glibc", "level"),
    [
        ("2.17", 17),
        ("2.26", 17),
        ("2.30", 28),
        ("2.36", 36),
        ("2.40", 40),
        ("2.41", 40),
        ("2.99", 40),
        ("3.0", 40),
    ],
)
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_a_library_between_or_beyond_what_uv_knows_is_taken_for_an_older_one(
    tmp_path: Path, machine: str, glibc: str, level: int
) -> None:
    """Debian 13 has 2.41, Amazon Linux 2 has 2.26; a newer uv may know more."""
    platform_tag = uv_platform(machine, glibc)
    assert platform_tag.startswith(f"{machine}-manylinux_2_")
    newest = 99 if glibc == "3.0" else 0
    assert (
        level
        <= int(platform_tag.rpartition("_")[2])
        <= max(level, int(glibc.split(".")[1]), newest)
    )
    (tmp_path / "requirements.in").write_text("", encoding="utf-8")
    options = ("--offline", "--python", sys.executable, "--python-platform", platform_tag)
    run_uv(("pip", "compile", "requirements.in", *options), tmp_path, "nothing", {})


@pytest.mark.parametrize(("machine", "glibc"), [("x86_64", "2.16"), ("sparc", "2.36")])
def test_what_uv_has_no_platform_for_is_said(machine: str, glibc: str) -> None:
    with pytest.raises(LockError, match=f"uv resolves nothing for {machine} with glibc {glibc}"):
        uv_platform(machine, glibc)


@pytest.mark.parametrize(
    "tags",
    [
        ["py3-none-any", f"py3-none-{MANYLINUX}"],
        ["py2.py3-none-any", f"py2.py3-none-{MANYLINUX}", f"py3-none-{NEW}"],
        ["py3-none-any", f"{INTERPRETER}-none-any", f"{INTERPRETER}-{INTERPRETER}-{MANYLINUX}"],
        [
            f"cp37-abi3-{MANYLINUX}",
            f"{INTERPRETER}-{INTERPRETER}-manylinux2014_{MACHINE}",
            "py3-none-any",
        ],
        [f"{INTERPRETER}-{INTERPRETER}-{NEW}", f"py31-none-{MANYLINUX}", "py3-none-win_amd64"],
        [f"cp38-abi3-{MANYLINUX}.manylinux2014_{MACHINE}", "py32-none-any"],
    ],
)
def test_pip_takes_the_same_wheel(tags: list[str], tmp_path: Path) -> None:
    for tag in tags:
        with zipfile.ZipFile(tmp_path / f"demo-1.0-{tag}.whl", "w") as wheel:
            wheel.writestr(
                "demo-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: demo\nVersion: 1.0\n"
            )
            wheel.writestr("demo-1.0.dist-info/WHEEL", f"Wheel-Version: 1.0\nTag: {tag}\n")
            wheel.writestr("demo-1.0.dist-info/RECORD", "")
    command = (
        sys.executable,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--quiet",
        "--report",
        "-",
        "--no-index",
    )
    done = subprocess.run(
        (*command, "--find-links", str(tmp_path), "demo"),
        capture_output=True,
        text=True,
        check=True,
    )
    (taken,) = json.loads(done.stdout)["install"]
    wheels = [
        {"url": path.as_uri(), "hashes": {"sha256": path.name}}
        for path in sorted(tmp_path.iterdir())
    ]
    package = {"name": "demo", "version": "1.0", "wheels": wheels}
    assert (
        _choose_file(package, {tag: rank for rank, tag in enumerate(TAGS)})[0]
        == taken["download_info"]["url"]
    )


def test_what_fits_no_tag_is_refused_by_name() -> None:
    package = {
        "name": "demo",
        "version": "1.0",
        "wheels": [{"url": f"https://e.org/demo-1.0-py3-none-{NEW}.whl"}],
    }
    with pytest.raises(LockError, match=r"demo 1\.0 has no file for this Python and C library"):
        _choose_file(package, {tag: rank for rank, tag in enumerate(TAGS)})
