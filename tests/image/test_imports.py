"""Which modules a distribution brings, and what is said of one that cannot be imported, with real distributions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest

from trainworks.imagetest import imports


@pytest.mark.parametrize(
    ("files", "modules"),
    [
        pytest.param(["yaml/__init__.py", "yaml/loader.py", "_yaml/__init__.py"], ["yaml"], id="a package"),
        pytest.param(["six.py", "../../../bin/six.py"], ["six"], id="a module, and a program elsewhere"),
        pytest.param(
            ["google/protobuf/__init__.py", "google/protobuf/internal/__init__.py", "google/_upb/_message.abi3.so"],
            ["google.protobuf"],
            id="a package in a folder that many share",
        ),
        pytest.param(["nvidia/cu13/lib/libcublas.so.13", "nvidia/cu13/lib/libx.so"], [], id="libraries alone"),
        pytest.param(["fast.abi3.so"], ["fast"], id="an extension module"),
        pytest.param(["tests/__init__.py", "a/__init__.py", "a/tests/x.py"], ["a"], id="tests beside the package"),
        pytest.param(["a-1.dist-info/METADATA", "torchvision.libs/lib.py"], [], id="no names of modules"),
    ],
)
def test_what_a_distribution_brings(files: list[str], modules: list[str]) -> None:
    assert imports.modules_of(map(PurePosixPath, files)) == modules


def ask(folder: Path, **sources: str) -> subprocess.CompletedProcess[str]:
    """Make a distribution of one module for each source, and have all of them imported."""
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)
        information = folder / f"{name}-1.0.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (information / "RECORD").write_text(f"{name}.py,,\n{information.name}/RECORD,,\n")
    return subprocess.run(
        (sys.executable, imports.__file__, *sources),
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(folder)},
        timeout=300,
    )


def test_everything_can_be_imported(tmp_path: Path) -> None:
    done = ask(tmp_path, first="x = 1", second="import first")
    assert (done.returncode, done.stdout) == (0, "")


def test_every_failure_is_named(tmp_path: Path) -> None:
    sources = {"first": "import nowhere", "second": "raise SystemExit('no')", "third": "x = 1"}
    crash = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    done = ask(tmp_path, **sources, fourth=crash, fifth="import third")
    assert done.stdout.splitlines() == [
        f"{imports.MARKER}first: import first: ModuleNotFoundError: No module named 'nowhere'",
        f"{imports.MARKER}second: import second: SystemExit: no",
        f"{imports.MARKER}fourth: its import was killed by signal 11",
    ]
