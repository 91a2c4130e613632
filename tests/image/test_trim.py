"""Test the removal of files and symbols from installed wheels: every RECORD lists the files that
are left.
"""

from __future__ import annotations

import base64
import csv
import ctypes
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from image.support import ROOT

TRIM = ROOT / "templates/files/builder/trim-python-packages"

SOURCE = (
    "static int hidden_in_it(void) { return 40; }\n"
    "int answer(void) { return hidden_in_it() + 2; }\n"
)


def trim(environment: Path, *words: str) -> None:
    subprocess.run(
        (sys.executable, str(TRIM), "--environment", str(environment), *words), check=True
    )


def install(packages: Path, name: str, files: dict[str, bytes]) -> Path:
    """Put files there as a wheel's installer does; return the RECORD."""
    record = packages / f"{name}-1.0.dist-info" / "RECORD"
    record.parent.mkdir(parents=True)
    rows = []
    for path, content in files.items():
        (packages / path).parent.mkdir(parents=True, exist_ok=True)
        (packages / path).write_bytes(content)
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={digest},{len(content)}\n")
    record.write_text("".join([*rows, f"{record.parent.name}/RECORD,,\n"]))
    return record


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    return tmp_path / "lib" / "python3.11" / "site-packages"


def test_removed_files_leave_no_row_and_others_keep_theirs(packages: Path) -> None:
    torch = install(
        packages,
        "torch",
        {
            "torch/a.py": b"a",
            "torch/test/atest": b"t",
            "torch/bin/test_api": b"",
            "torch/bin/shm": b"s",
        },
    )
    other = install(packages, "other", {"other/test/needed.py": b"n"})
    before = other.read_bytes(), other.stat().st_mtime_ns
    trim(
        packages.parents[2],
        "--remove",
        "torch/**/test",
        "--remove",
        "torch/test/*",
        "--remove",
        "torch/bin/*[Tt]est*",
        "--remove",
        "no/such*",
    )
    assert [row[0] for row in csv.reader(torch.read_text().splitlines())] == [
        "torch/a.py",
        "torch/bin/shm",
        "torch-1.0.dist-info/RECORD",
    ]
    files_left = sorted(
        path.relative_to(packages).as_posix() for path in packages.rglob("*") if path.is_file()
    )
    assert files_left == sorted(
        row[0] for record in (torch, other) for row in csv.reader(record.read_text().splitlines())
    )
    assert (other.read_bytes(), other.stat().st_mtime_ns) == before


def test_a_stripped_library_works_and_has_its_new_sum(packages: Path, tmp_path: Path) -> None:
    compiler, reader = shutil.which("gcc"), shutil.which("nm")
    if compiler is None or reader is None or shutil.which("strip") is None:
        pytest.skip("NOT TESTED: no gcc and binutils here (apt install gcc)")
    built = tmp_path / "built.so"
    command = (compiler, "-g", "-O0", "-shared", "-fPIC", "-x", "c", "-", "-o", str(built))
    subprocess.run(command, input=SOURCE, text=True, check=True)
    record = install(packages, "triton", {"triton/_C/libtriton.so": built.read_bytes()})
    library = packages / "triton/_C/libtriton.so"
    library.chmod(0o755)
    before = library.stat()
    trim(packages.parents[2], "--strip", "triton/_C/libtriton*.so")
    after = library.stat()
    assert (
        "hidden_in_it"
        not in subprocess.run(
            (reader, str(library)), capture_output=True, text=True, check=True
        ).stdout
    )
    assert after.st_size < before.st_size
    assert (after.st_mode, after.st_mtime_ns // 10**9) == (
        before.st_mode,
        before.st_mtime_ns // 10**9,
    )
    digest = (
        base64.urlsafe_b64encode(hashlib.sha256(library.read_bytes()).digest())
        .rstrip(b"=")
        .decode()
    )
    assert next(csv.reader(record.read_text().splitlines())) == [
        "triton/_C/libtriton.so",
        f"sha256={digest}",
        str(after.st_size),
    ]
    assert ctypes.CDLL(str(library)).answer() == 42
