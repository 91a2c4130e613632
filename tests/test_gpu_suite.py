"""Test `make gpu` without a GPU: the runner, its parts on CPUs with gloo, and the record of a
report.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
RUN = ROOT / "tests" / "gpu" / "run.py"
EVIDENCE = ROOT / "tools" / "evidence.py"
TORCH = ROOT / ".cache" / "peers" / "smdistributed" / "bin" / "python"
PARTS = (
    "communication",
    "compiled",
    "data_parallel",
    "failures",
    "hangs",
    "launcher",
    "nccl_tests",
    "pipelines",
    "plugin",
)

TOYS = {
    "good": "def run(options):\n    return {'answer': 42}\n",
    "wrong": "def run(options):\n    print('before')\n    assert 1 == 2, 'one is not two'\n",
    "broken": "import no_such_module\n",
    "dies": "import os, signal\ndef run(options):\n    os.kill(os.getpid(), signal.SIGSEGV)\n",
    "silent": "import os\ndef run(options):\n    os._exit(0)\n",
    "absent": (
        "from together import NotTestedError\n"
        "def run(options):\n"
        "    raise NotTestedError('no such card')\n"
    ),
    "hangs": "import threading\ndef run(options):\n    threading.Event().wait()\n",
    # A child of its own session, which outlives its parent.
    "leaves": (
        """
import os, subprocess, sys

def run(options):
    child = subprocess.Popen(
        [sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True
    )
    return child.pid
"""
    ),
}


def run(*words: object, python: Path = Path(sys.executable), **variables: str) -> tuple[int, str]:
    result = subprocess.run(
        [str(python), str(RUN), *map(str, words)],
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
        timeout=3000,
    )
    return result.returncode, result.stdout + result.stderr


def toys(folder: Path, names: Sequence[str], bound: float = 60) -> Path:
    """Write parts of a few lines."""
    folder.mkdir()
    for name in names:
        head = (
            f'"""A toy that is {name}."""\nfrom together import main\nNEEDS = ()\nBOUND = {bound}\n'
        )
        (folder / f"{name}.py").write_text(
            f"{head}{TOYS[name]}\nif __name__ == '__main__':\n    main(globals())\n"
        )
    (folder / "helper.py").write_text("BOUND = 3\n")
    return folder


def test_the_parts_are_listed() -> None:
    status, output = run("--list")
    assert status == 0
    assert [line.split()[0] for line in output.splitlines()] == list(PARTS)
    bounds = [float(line.split()[1]) for line in output.splitlines()]
    assert all(0 < bound <= 600 for bound in bounds)


def test_without_torch_every_part_says_why_it_was_not_tested(tmp_path: Path) -> None:
    status, output = run("--report", tmp_path / "report.json")
    report = json.loads((tmp_path / "report.json").read_text())
    assert status == 3, output
    assert [part["part"] for part in report["parts"]] == list(PARTS)
    for part in report["parts"]:
        assert part["result"] == "NOT TESTED", part
        assert part["cause"].startswith("this Python cannot import torch"), part
    assert "nothing was tested" in output
    assert report["digest"].startswith("sha256:")
    assert report["versions"]["devices"] == []


def test_each_end_of_a_part_is_told(tmp_path: Path) -> None:
    status, output = run(
        "--parts",
        toys(tmp_path / "parts", sorted(TOYS.keys() - {"hangs", "leaves"})),
        "--report",
        tmp_path / "r",
    )
    results = {part["part"]: part for part in json.loads((tmp_path / "r").read_text())["parts"]}
    assert status == 1, output
    ends = {name: (part["result"], part["cause"]) for name, part in results.items()}
    assert ends == {
        "good": ("PASSED", ""),
        "wrong": ("FAILED", "AssertionError: one is not two"),
        "broken": ("FAILED", "ModuleNotFoundError: No module named 'no_such_module'"),
        "dies": ("FAILED", "it was killed by SIGSEGV"),
        "silent": ("FAILED", "it said nothing"),
        "absent": ("NOT TESTED", "no such card"),
    }
    assert results["good"]["figures"] == {"answer": 42}
    assert results["wrong"]["last_lines"][0] == "before"


def test_a_part_that_hangs_is_ended(tmp_path: Path) -> None:
    status, output = run(
        "--parts", toys(tmp_path / "parts", ["hangs"], bound=1), "--report", tmp_path / "r"
    )
    (part,) = json.loads((tmp_path / "r").read_text())["parts"]
    assert status == 1, output
    assert (part["result"], part["cause"]) == ("FAILED", "it had not ended after 1 s")


def test_what_a_part_leaves_behind_is_ended(tmp_path: Path) -> None:
    status, output = run(
        "--parts", toys(tmp_path / "parts", ["leaves"]), "--report", tmp_path / "r"
    )
    (part,) = json.loads((tmp_path / "r").read_text())["parts"]
    assert status == 0, output
    with pytest.raises(ProcessLookupError):
        os.kill(part["figures"], 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes a checkout another user's")
def test_the_commit_is_told_of_a_checkout_of_another_user(tmp_path: Path) -> None:
    """As in a container, which mounts the checkout of a user and runs as root."""
    (tmp_path / "tests").mkdir()
    shutil.copytree(RUN.parent, tmp_path / "tests" / "gpu")
    git = ("git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org")
    for words in (("init", "--quiet"), ("commit", "--quiet", "--allow-empty", "-m", "all")):
        subprocess.run((*git, *words), check=True)
    head = subprocess.check_output((*git, "rev-parse", "HEAD"), text=True).strip()
    for path in (tmp_path, *tmp_path.rglob("*")):
        os.chown(path, 1234, 1234)
    code = "import run; print(run.commit())"
    command = (sys.executable, "-c", code)
    printed = subprocess.check_output(command, cwd=tmp_path / "tests" / "gpu", text=True)
    assert printed.strip().removesuffix("+") == head


def test_one_part_alone_and_an_unknown_one(tmp_path: Path) -> None:
    folder = toys(tmp_path / "parts", ["good", "wrong"])
    status, output = run("--parts", folder, "--only", "good")
    assert status == 0, output
    assert "wrong" not in output
    status, output = run("--parts", folder, "--only", "bad")
    assert status == 2
    assert "there is no part bad" in output


@pytest.mark.engine
def test_the_same_parts_pass_on_cpus_with_gloo(tmp_path: Path) -> None:
    if not TORCH.exists():
        pytest.skip("NOT TESTED: make torch")
    status, output = run(
        "--device", "cpu", "--times", 10, "--report", tmp_path / "report.json", python=TORCH
    )
    report = json.loads((tmp_path / "report.json").read_text())
    assert status == 0, output
    results = {part["part"]: part["result"] for part in report["parts"]}
    assert results == {
        **dict.fromkeys(PARTS, "PASSED"),
        "nccl_tests": "NOT TESTED",
        "plugin": "NOT TESTED",
    }, output
    assert record(report, tmp_path)[0] == 1


# --- The row of docs/status.md --------------------------------------------------------------------

REPORT: dict[str, Any] = {
    "schema": 1,
    "date": "2026-11-25",
    "device": "cuda",
    "versions": {
        "python": "3.12.1",
        "torch": "2.11.0",
        "cuda": "13.0",
        "nccl": "2.28.9",
        "driver": "580.1",
        "devices": ["NVIDIA A | B"],
    },
    "commit": "0123456789abcdef",
    "digest": "sha256:" + "ab" * 32,
    "parts": [
        {"part": "communication", "result": "PASSED", "seconds": 20.0, "cause": ""},
        {"part": "pipelines", "result": "FAILED", "seconds": 100.4, "cause": "a | b\nc"},
        {"part": "plugin", "result": "NOT TESTED", "seconds": 1.0, "cause": "no archive"},
    ],
}


def record(report: dict[str, Any], folder: Path) -> tuple[int, str, list[dict[str, Any]]]:
    """Run `tools/evidence.py gpu` on a report, in a checkout of its own.

    Return its status, its errors, the records.
    """
    (folder / "tools").mkdir()
    program = folder / "tools" / "evidence.py"
    program.write_bytes(EVIDENCE.read_bytes())
    (folder / "report.json").write_text(json.dumps(report))
    result = subprocess.run(
        [sys.executable, str(program), "gpu", str(folder / "report.json")],
        capture_output=True,
        text=True,
    )
    return (
        result.returncode,
        result.stderr,
        [json.loads(path.read_text()) for path in folder.glob("evidence/*.json")],
    )


def test_a_report_becomes_a_record(tmp_path: Path) -> None:
    status, error, (record_written,) = record(REPORT, tmp_path)
    assert (status, error) == (0, "")
    assert (
        record_written["suite"],
        record_written["date"],
        record_written["commit"],
        record_written["changed"],
    ) == (
        "make gpu",
        "2026-11-25",
        "0123456789abcdef",
        False,
    )
    assert (
        record_written["where"].items()
        >= {
            "gpus": ["NVIDIA A | B"],
            "driver": "580.1",
            "torch": "2.11.0",
        }.items()
    )
    assert [(part["name"], part["result"], part["cause"]) for part in record_written["parts"]] == [
        ("communication", "passed", ""),
        ("pipelines", "failed", "a | b\nc"),
        ("plugin", "not tested", "no archive"),
    ]
    assert record_written["seconds"] == 121


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device": "cpu"}, "it is of a CPU"),
        ({"versions": {**REPORT["versions"], "devices": []}}, "it names no GPU"),
        ({"parts": [{**REPORT["parts"][2]}]}, "nothing was tested"),
        ({"schema": 2}, "it is not a report of tests/gpu/run.py"),
    ],
    ids=["cpu", "no device", "nothing tested", "another schema"],
)
def test_a_report_that_shows_nothing_of_a_gpu_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    status, error, records = record({**REPORT, **change}, tmp_path)
    assert (status, records) == (1, [])
    assert message in error


def test_the_page_says_that_nothing_ran_on_a_gpu_until_there_is_evidence() -> None:
    page = (ROOT / "docs" / "status.md").read_text(encoding="utf-8")
    records = [json.loads(path.read_text()) for path in ROOT.glob("evidence/*.json")]
    assert any(record_row["where"].get("gpus") for record_row in records) or "| a GPU |" in page
