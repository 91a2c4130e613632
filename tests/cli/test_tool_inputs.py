"""Test that the programs in tools/ refuse bad files and words with a clear error, and start with
the Python of `make setup`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest


def run(*words: str | Path) -> tuple[int, str]:
    """Run a program; return its exit status and all that it printed."""
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a Python without packages, as a machine has it before `make setup`."""
    folder = tmp_path_factory.mktemp("python")
    venv.create(folder, with_pip=False)
    return folder / "bin" / "python"


@pytest.fixture
def tools(root: Path, checkout: Path) -> Path:
    """Give the tools of a copied checkout, whose rows a test may spoil."""
    for name in ("src", "smdistributed", "tools"):
        skipped = shutil.ignore_patterns("__pycache__", ".*_cache")
        shutil.copytree(root / name, checkout / name, ignore=skipped)
    return checkout / "tools"


TOOLS = ("generate.py", "instance_types.py", "image_inputs.py", "write_buildspec.py", "release")


@pytest.mark.parametrize("name", TOOLS)
def test_without_make_setup_a_tool_says_to_run_it(
    tools: Path, bare_python: Path, name: str
) -> None:
    status, printed = run(bare_python, tools / name)
    assert status == 1
    assert "hint: run `make setup`, then this again" in printed
    assert "Traceback" not in printed


def test_a_tool_takes_the_python_of_make_setup(tools: Path, bare_python: Path) -> None:
    (tools.parent / ".venv").symlink_to(sys.prefix)
    assert run(bare_python, tools / "instance_types.py") == (0, "")


@pytest.mark.parametrize("name", ["instance_types.py", "image_inputs.py"])
def test_bad_rows_are_named(tools: Path, name: str) -> None:
    (tools.parent / "images" / "families.toml").write_text("[[family\n", encoding="utf-8")
    status, printed = run(sys.executable, tools / name)
    assert status == 3
    assert "images/families.toml: not TOML" in printed
    assert "Traceback" not in printed


def test_bad_rows_end_the_batch_of_codebuild_with_the_words_of_the_builder(
    root: Path, tools: Path
) -> None:
    for name in ("build.py", "buildspec.yml"):
        shutil.copy(root / name, tools.parent / name)
    (tools.parent / "images" / "families.toml").write_text("[[family\n", encoding="utf-8")
    status, printed = run(sys.executable, tools / "write_buildspec.py")
    assert status == 1
    assert "images/families.toml: not TOML" in printed
    assert "build.py --list --format json` ended with status 3" in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[1]", "it is not a report of tests/gpu/run.py"),
        ("{", "it is not JSON"),
        ('{"schema": 1}', "the key 'device' is missing"),
        ('{"schema": 1, "device": "cuda", "versions": 3}', "it has another form"),
    ],
)
def test_a_bad_report_of_a_gpu_is_named(
    tools: Path, tmp_path: Path, content: str, words: str
) -> None:
    report = tmp_path / "report.json"
    report.write_text(content, encoding="utf-8")
    status, printed = run(sys.executable, tools / "evidence.py", "gpu", report)
    assert status == 1
    assert printed.startswith(f"{report}: {words}")
    assert printed.endswith("; no record is written\n")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[1]", "it is not a record: it has no digest"),
        ("{}", "it is not a record: it has no digest"),
        ("{", "it is not JSON"),
        (None, "No such file or directory"),
    ],
)
def test_a_bad_record_is_named(
    tools: Path, tmp_path: Path, content: str | None, words: str
) -> None:
    record = tmp_path / "record.json"
    if content is not None:
        record.write_text(content, encoding="utf-8")
    status, printed = run(sys.executable, tools / "evidence.py", "verify", record)
    assert status == 1
    assert printed.startswith(f"record.json: {words}")


BAD_WORDS = (
    ("evidence.py", ("run", "make a", "ls"), "write it as 'NAME: COMMAND', not 'ls'"),
    ("make-room", (), "tools/make-room 40"),
    ("make-room", ("much",), "not 'much'"),
    ("mutants", ("nothing", "--tests", "tests/plan"), "nothing is not in "),
    ("reading.py", ("nothing",), "nothing is not a folder"),
    ("propose", (), "usage: tools/propose NAME TITLE"),
    ("unpack-newer", ("one",), "usage: tools/unpack-newer FOLDER PACKAGE FILE"),
    ("set-up-python", ("one",), "usage: tools/set-up-python ENVIRONMENT LOCK PACKAGE"),
    ("install-packages", (), "usage: tools/install-packages ENVIRONMENT"),
)


@pytest.mark.parametrize(("name", "words", "message"), BAD_WORDS)
def test_bad_words_are_refused_before_anything_is_done(
    tools: Path, name: str, words: tuple[str, ...], message: str
) -> None:
    status, printed = run(tools / name, *words)
    assert status == 2
    assert message in printed


def test_a_damaged_record_of_steps_is_named(tools: Path, tmp_path: Path) -> None:
    """The file of an interrupted release, cut off."""
    script = (
        "import runpy, sys; from pathlib import Path\n"
        f"sys.path.insert(0, {str(tools)!r})\n"
        f"release = runpy.run_path({str(tools / 'release')!r})\n"
        "try:\n"
        "    release['StepRecord'](Path(sys.argv[1]), 'sha256:1')\n"
        "except release['StepError'] as error:\n"
        "    print(error)\n"
    )
    steps = tmp_path / "steps.json"
    steps.write_text('{"inputs": "sha', encoding="utf-8")
    expected = f"{steps} is not a record of steps: remove it, and all steps run again\n"
    assert run(sys.executable, "-c", script, steps) == (0, expected)
