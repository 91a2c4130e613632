"""What the launcher adds to every Python of a job: its end waits for gloo's threads."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launcher_support import LAUNCHER, TIME_OUT, Launcher, environment, plan, write_inputs

from clock import assert_within, start_clock
from trainworks_launcher.contract import names
from trainworks_launcher.supervise import hooks

BUSY = """
import ctypes, os, sys, threading, time, types
sys.modules["torch.distributed"] = types.ModuleType("torch.distributed")
def thread_of_gloo():
    ctypes.CDLL(None).prctl(15, b"pt_gloo_runloop", 0, 0, 0)  # PR_SET_NAME
    ready.set()
    while time.monotonic() < until:
        pass
    os.write(1, b"the thread is idle\\n")
    threading.Event().wait()
ready, until = threading.Event(), time.monotonic() + SECONDS
threading.Thread(target=thread_of_gloo, daemon=True).start()
ready.wait()
os.write(1, b"the last line\\n")
"""
"""A script whose last collective's thread still works, and needs the GIL for that."""


@pytest.mark.parametrize(
    ("variables", "waits"), [({}, True), ({"TRAINWORKS_CLEAN_EXIT": "off"}, False), ({"PYTHONPATH": "/tmp"}, True)]
)
def test_a_python_of_the_job_ends_when_gloos_threads_are_idle(
    tmp_path: Path, variables: dict[str, str], *, waits: bool
) -> None:
    write_inputs(tmp_path, BUSY.replace("SECONDS", "0.5"), {}, {})
    with Launcher(tmp_path, variables=variables) as made:
        assert made.wait() == 0, made.text
    assert ("the last line\nthe thread is idle" in made.text) is waits, made.text


def test_a_thread_that_never_rests_does_not_keep_the_process() -> None:
    env = {"PYTHONPATH": str(LAUNCHER / "trainworks_launcher/programs/python"), names.PYTHON_HOOKS_VARIABLE: "exit"}
    start_clock()
    started = time.monotonic()
    script = BUSY.replace("SECONDS", "1e9")
    done = subprocess.run((sys.executable, "-c", script), env=env, capture_output=True, timeout=TIME_OUT, check=False)
    assert (done.returncode, done.stdout) == (0, b"the last line\n"), done.stderr
    assert_within(6, started, time.monotonic(), "a thread that never rests")


@pytest.mark.parametrize("script", ["", "import torch", "import torch.distributed"])
def test_a_process_without_gloos_threads_does_not_wait(tmp_path: Path, script: str) -> None:
    """torch has other threads, and without one of gloo there is nothing to wait for."""
    (tmp_path / "torch").mkdir()
    for name in ("__init__", "distributed"):
        (tmp_path / f"torch/{name}.py").touch()
    hook = LAUNCHER / "trainworks_launcher/programs/python"
    env = {"PYTHONPATH": f"{hook}{os.pathsep}{tmp_path}", names.PYTHON_HOOKS_VARIABLE: "exit", "RANK": "0"}
    traced = f"import select\nselect.select = None\n{script}"
    done = subprocess.run((sys.executable, "-c", traced), env=env, capture_output=True, timeout=TIME_OUT, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, "stacks exit"),
        ({"TRAINWORKS_CLEAN_EXIT": "off"}, "stacks"),
        ({"TRAINWORKS_HANG": "off"}, "exit"),
        ({"TRAINWORKS_HANG": "off", "TRAINWORKS_CLEAN_EXIT": "off"}, ""),
    ],
)
def test_which_hooks_a_job_has(variables: dict[str, str], found: str) -> None:
    made = environment(variables={"PATH": "/no/py-spy", "PYTHONPATH": "/own", **variables})
    given = hooks.variables(plan(made), made)
    assert given.get(names.PYTHON_HOOKS_VARIABLE, "") == found
    if found:
        assert given["PYTHONPATH"].split(":")[1:] == ["/opt/ml/code", "/own"]
    else:
        assert not given


def test_the_program_that_has_the_hooks_knows_the_names() -> None:
    """It imports nothing of ours, so it has our constants as text."""
    text = (LAUNCHER / "trainworks_launcher/programs/python/sitecustomize.py").read_text(encoding="utf-8")
    assert f'"{names.PYTHON_HOOKS_VARIABLE}"' in text
