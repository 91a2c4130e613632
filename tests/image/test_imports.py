"""Test which modules a distribution brings, and the reason given for one that cannot be imported,
with real distributions.
"""

from __future__ import annotations

import sys
from pathlib import Path, PurePosixPath
from typing import cast

import pytest

from image.here import Here
from trainworks.imagetest import imports
from trainworks.imagetest.probe_request import IMPORTS, ask_program
from trainworks.imagetest.test_promises import import_failure
from trainworks.plan.checks import PythonImportsCheck


@pytest.mark.parametrize(
    ("files", "modules"),
    [
        pytest.param(
            ["yaml/__init__.py", "yaml/loader.py", "_yaml/__init__.py"], ["yaml"], id="a package"
        ),
        pytest.param(
            ["six.py", "../../../bin/six.py"], ["six"], id="a module, and a program elsewhere"
        ),
        pytest.param(
            [
                "google/protobuf/__init__.py",
                "google/protobuf/internal/__init__.py",
                "google/_upb/_message.abi3.so",
            ],
            ["google.protobuf"],
            id="a package in a folder that many share",
        ),
        pytest.param(
            ["nvidia/cu13/lib/libcublas.so.13", "nvidia/cu13/lib/libx.so"], [], id="libraries alone"
        ),
        pytest.param(["fast.abi3.so"], ["fast"], id="an extension module"),
        pytest.param(
            ["tests/__init__.py", "a/__init__.py", "a/tests/x.py"],
            ["a"],
            id="tests beside the package",
        ),
        pytest.param(
            ["a-1.dist-info/METADATA", "torchvision.libs/lib.py"], [], id="no names of modules"
        ),
    ],
)
def test_what_a_distribution_brings(files: list[str], modules: list[str]) -> None:
    assert imports.modules_of(map(PurePosixPath, files)) == modules


def ask(folder: Path, *, names: str = "", **sources: str) -> list[imports.ImportFailure]:
    """Make a distribution of one module for each source, and have all of them
    imported, and those that are named.
    """
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)
        information = folder / f"{name}-1.0.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
        )
        (information / "RECORD").write_text(f"{name}.py,,\n{information.name}/RECORD,,\n")
    module_names = [*sources, *names.split()]
    container = Here({"PYTHONPATH": str(folder)})
    answer = ask_program(container, (sys.executable,), IMPORTS, module_names, timeout=300)
    assert answer["asked"] == len(module_names)
    return answer["failed"]


def test_everything_can_be_imported(tmp_path: Path) -> None:
    assert ask(tmp_path, first="x = 1", second="import first") == []


def test_what_an_earlier_build_left_in_a_wheel_does_not_count(tmp_path: Path) -> None:
    """Leave out a folder of a former name, as in sagemaker-mlflow 0.1.0.

    Top_level.txt has the new one alone.
    """
    for name, source in (("former", "import nowhere"), ("present", "x = 1")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(source)
    information = tmp_path / "present-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: present\nVersion: 1.0\n")
    (information / "RECORD").write_text("former/__init__.py,,\npresent/__init__.py,,\n")
    assert "import former" in ask(tmp_path, names="present")[0]["reason"]
    (information / "top_level.txt").write_text("present\n")
    assert ask(tmp_path, names="present") == []
    (information / "top_level.txt").write_text("neither\n")
    assert "import former" in ask(tmp_path, names="present")[0]["reason"]


def test_an_extension_of_torch_is_imported_after_it(tmp_path: Path) -> None:
    """Import torch before its extension, as `amp_C` of apex: the loader finds libc10.so where torch
    has loaded it.
    """
    linked = (
        "import sys\n"
        "if 'torch' not in sys.modules: raise ImportError('libc10.so:"
        " cannot open shared object file')"
    )
    assert ask(tmp_path, kernels=linked, torch="") == []
    missing = "raise ImportError('libcuda_of_another.so.1: cannot open shared object file')"
    assert "libcuda_of_another" in ask(tmp_path, other=missing)[0]["reason"]


def test_every_failure_is_named(tmp_path: Path) -> None:
    sources = {"first": "import nowhere", "second": "raise SystemExit('no')", "third": "x = 1"}
    crash = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    failures = ask(tmp_path, **sources, fourth=crash, fifth="import third")
    assert [(failure["name"], failure["reason"]) for failure in failures] == [
        ("first", "import first: ModuleNotFoundError: No module named 'nowhere'"),
        ("second", "import second: SystemExit: no"),
        ("fourth", "its import was killed by signal 11"),
    ]
    assert {failure["version"] for failure in failures} == {"1.0"}


@pytest.mark.parametrize(
    ("source", "module", "library"),
    [
        ("import nowhere.part", "nowhere", ""),
        ("import subject.part", "", ""),
        ("raise TypeError('Descriptors cannot be created directly')", "", ""),
        # A ModuleNotFoundError too, but the metadata of a distribution is missing.
        ("from importlib import metadata; metadata.version('a-name-of-before')", "", ""),
        (
            "raise ImportError('libGL.so.1: cannot open shared object file: No such file')",
            "",
            "libGL.so.1",
        ),
    ],
)
def test_what_is_missing_is_told_from_what_is_wrong(
    source: str, module: str, library: str, tmp_path: Path
) -> None:
    (failure,) = ask(tmp_path, subject=source)
    assert (failure["module"], failure["library"]) == (module, library)


@pytest.mark.parametrize(
    ("failed", "message"),
    [
        (
            {"module": "", "library": "", "reason": "import speed: TypeError: no"},
            (
                "speed 0.3.1.dev5, released 2020-11-05: import speed: TypeError: no\n"
                "  speed is installed, and fails: ask for another version of it"
            ),
        ),
        (
            {"module": "nowhere", "library": "", "reason": "import speed: ModuleNotFoundError: no"},
            (
                "speed 0.3.1.dev5, released 2020-11-05: import speed: ModuleNotFoundError: no\n"
                "  add the package that has the module nowhere (--requirements)"
            ),
        ),
        (
            {"module": "", "library": "libGL.so.1", "reason": "import speed: ImportError: no"},
            (
                "speed 0.3.1.dev5, released 2020-11-05: import speed: ImportError: no\n"
                "  add the Debian package that has libGL.so.1 (--apt)"
            ),
        ),
    ],
)
def test_the_advice_is_about_what_failed(failed: dict[str, str], message: str) -> None:
    check = PythonImportsCheck(
        component="extension", distributions=("speed",), released=(("speed", "2020-11-05"),)
    )
    failure = cast("imports.ImportFailure", {"name": "speed", "version": "0.3.1.dev5", **failed})
    assert import_failure(failure, check) == message
