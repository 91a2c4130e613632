"""The package as `pip install` leaves it: the command works in any folder, on
the rows and recipes of the wheel.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import pytest
from uv import find_uv_bin

from trainworks.cli import main

Run = Callable[..., "subprocess.CompletedProcess[str]"]

PLAN = ("--framework", "pytorch", "--cuda", "cpu")


@pytest.fixture(scope="module")
def installed(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Install the wheel into an environment of its own, which takes its
    dependencies from that of the tests.
    """
    folder = tmp_path_factory.mktemp("installed")
    build = (sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder)
    subprocess.run(build, cwd=root, check=True, timeout=300, capture_output=True)
    (wheel,) = folder.glob("trainworks-*.whl")
    environment = folder / "environment"
    venv.create(environment, with_pip=False, symlinks=True)
    python = environment / "bin" / "python"
    install = (
        find_uv_bin(),
        "pip",
        "install",
        "--quiet",
        "--offline",
        "--no-deps",
        "--python",
        python,
        wheel,
    )
    subprocess.run(install, check=True, timeout=300)
    (site_packages,) = environment.glob("lib/python*/site-packages")
    # A path in a .pth file brings modules, but not the .pth files there: the
    # editable install stays out.
    (site_packages / "dependencies.pth").write_text(
        f"{sysconfig.get_path('purelib')}\n", encoding="utf-8"
    )
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
        argv = (environment / "bin" / "trainworks", *words)
        return subprocess.run(
            argv,
            cwd=elsewhere,
            env=variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    return run


def files_of(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        path.relative_to(folder).as_posix(): (path.read_bytes(), path.stat().st_mode & 0o777)
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_the_command_lists_what_the_checkout_does(
    installed: Run, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = installed("--list")
    assert main(["--list"], root) == 0
    assert (done.returncode, done.stdout) == (0, capsys.readouterr().out), done.stderr


def test_the_command_plans_what_the_checkout_does(
    installed: Run, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (*PLAN, "--until", "plan", "--format", "json")
    done = installed(*words)
    assert main(words, root) == 0
    assert (done.returncode, done.stdout) == (0, capsys.readouterr().out), done.stderr


def test_the_command_renders_the_bytes_that_the_checkout_does(
    installed: Run, root: Path, tmp_path: Path
) -> None:
    done = installed(*PLAN, "--until", "render", "--output", tmp_path / "installed")
    assert done.returncode == 0, done.stderr
    assert main([*PLAN, "--until", "render", "--output", str(tmp_path / "checkout")], root) == 0
    assert files_of(tmp_path / "installed") == files_of(tmp_path / "checkout")


def test_folders_of_root_take_the_place_of_the_packages_own(
    installed: Run, root: Path, tmp_path: Path
) -> None:
    shutil.copytree(root / "images", tmp_path / "images")
    instances = tmp_path / "images" / "instances.toml"
    instances.write_text(
        instances.read_text(encoding="utf-8").replace("gpus = 8", "gpus = -8"), encoding="utf-8"
    )
    done = installed("--list", "--root", tmp_path)
    assert done.returncode == 3
    assert "key 'gpus': -8 is negative" in done.stderr


@pytest.mark.parametrize("words", [("lock",), (*PLAN, "--record")])
def test_what_writes_into_a_checkout_says_that_it_needs_one(
    installed: Run, words: tuple[str, ...]
) -> None:
    done = installed(*words)
    assert done.returncode == 9, done.stderr
    assert "writes into a checkout" in done.stderr
    assert "--root DIR" in done.stderr
