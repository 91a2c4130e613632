"""Test the hooks in every Python of a job: its end waits for gloo's threads."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launcher_support import LAUNCHER, TIME_OUT, Launcher, environment, plan, write_inputs

from trainworks_launcher.contract import names
from trainworks_launcher.supervise import hooks
from trainworks_testing.clock import assert_within, start_clock

BUSY = """
import ctypes, os, sys, threading, time, types
sys.modules["torch.distributed"] = types.ModuleType("torch.distributed")
def thread_of_gloo():
    ctypes.CDLL(None).prctl(15, b"pt_gloo_runloop", 0, 0, 0)  # PR_SET_NAME
    ready.set()
    while not until or time.monotonic() < until[0]:
        pass
    os.write(1, b"the thread is idle\\n")
    threading.Event().wait()
ready, until = threading.Event(), []
threading.Thread(target=thread_of_gloo, daemon=True).start()
ready.wait()
os.write(1, b"the last line\\n")
until.append(time.monotonic() + SECONDS)
"""
"""A script whose last collective's thread still works, and needs the GIL for that."""


@pytest.mark.parametrize(
    ("variables", "waits"),
    [({}, True), ({"TRAINWORKS_CLEAN_EXIT": "off"}, False), ({"PYTHONPATH": "/tmp"}, True)],
)
def test_a_python_of_the_job_ends_when_gloos_threads_are_idle(
    tmp_path: Path, variables: dict[str, str], *, waits: bool
) -> None:
    seconds = "0.5" if waits else "1e9"
    write_inputs(tmp_path, BUSY.replace("SECONDS", seconds), {}, {})
    with Launcher(tmp_path, variables=variables) as launcher:
        assert launcher.wait() == 0, launcher.text
    assert ("the last line\nthe thread is idle" in launcher.text) is waits, launcher.text


def test_a_thread_that_never_rests_does_not_keep_the_process() -> None:
    env = {
        "PYTHONPATH": str(LAUNCHER / "trainworks_launcher/programs/python"),
        names.PYTHON_HOOKS_VARIABLE: "exit",
    }
    start_clock()
    started = time.monotonic()
    script = BUSY.replace("SECONDS", "1e9")
    done = subprocess.run(
        (sys.executable, "-c", script), env=env, capture_output=True, timeout=TIME_OUT, check=False
    )
    assert (done.returncode, done.stdout) == (0, b"the last line\n"), done.stderr
    assert_within(6, started, time.monotonic(), "a thread that never rests")


@pytest.mark.parametrize("script", ["", "import torch", "import torch.distributed"])
def test_a_process_without_gloos_threads_does_not_wait(tmp_path: Path, script: str) -> None:
    """torch has other threads, and without one of gloo there is nothing to wait for."""
    (tmp_path / "torch").mkdir()
    for name in ("__init__", "distributed"):
        (tmp_path / f"torch/{name}.py").touch()
    hook = LAUNCHER / "trainworks_launcher/programs/python"
    env = {
        "PYTHONPATH": f"{hook}{os.pathsep}{tmp_path}",
        names.PYTHON_HOOKS_VARIABLE: "exit",
        "RANK": "0",
    }
    traced = f"import select\nselect.select = None\n{script}"
    done = subprocess.run(
        (sys.executable, "-c", traced), env=env, capture_output=True, timeout=TIME_OUT, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("variables", "expected_hooks"),
    [
        ({}, "stacks exit end"),
        ({"TRAINWORKS_CLEAN_EXIT": "off"}, "stacks end"),
        ({"TRAINWORKS_HANG": "off"}, "exit end"),
        ({"TRAINWORKS_HANG": "off", "TRAINWORKS_CLEAN_EXIT": "off"}, "end"),
    ],
)
def test_which_hooks_a_job_has(variables: dict[str, str], expected_hooks: str) -> None:
    job_environment = environment(
        variables={"PATH": "/no/py-spy", "PYTHONPATH": "/own", **variables}
    )
    hook_variables = hooks.variables(plan(job_environment), job_environment)
    assert hook_variables.get(names.PYTHON_HOOKS_VARIABLE, "") == expected_hooks
    if expected_hooks:
        assert hook_variables["PYTHONPATH"].split(":")[1:] == ["/opt/ml/code", "/own"]
    else:
        assert not hook_variables


def test_the_program_that_has_the_hooks_knows_the_names() -> None:
    """The program imports nothing of ours, so it has our constants as text."""
    text = (LAUNCHER / "trainworks_launcher/programs/python/sitecustomize.py").read_text(
        encoding="utf-8"
    )
    assert f'"{names.PYTHON_HOOKS_VARIABLE}"' in text


IMPORTS = "import faulthandler, multiprocessing, os, signal, sys, threading, time, traceback\n"
AS_WITHOUT = {
    "passes": "pass",
    "raises": "def f(): 1 / 0\nf()",
    "exits": "sys.exit(3)",
    "exits with a text": "sys.exit('no data')",
    "catches an exit": (
        "try: sys.exit(3)\nexcept SystemExit as error: kept = error\nprint(repr(kept), kept.code)"
    ),
    "sends an exit to another process": (
        "import copy, pickle\ntry: sys.exit('no data')\nexcept SystemExit as error: kept = error\n"
        "print(repr(pickle.loads(pickle.dumps(kept))), repr(copy.copy(kept)))\n"
        "print(pickle.loads(pickle.dumps(sys.exit)) is sys.exit)"
    ),
    "exits in a thread": (
        "t = threading.Thread(target=sys.exit, args=(4,))\nt.start(); t.join(); print('on')"
    ),
    "exits with an object": "class C:\n    def __str__(self): return 'bad lr'\nsys.exit(C())",
    "exits with an exit of its own": "class E(SystemExit): pass\nraise E(5)",
    "exits in a handler of SIGTERM": (
        "signal.signal(15, lambda *_: sys.exit(6))\nos.kill(os.getpid(), 15)\ntime.sleep(9)"
    ),
    "exits, and has something to do at exit": (
        "import atexit\natexit.register(print, 'later')\nsys.exit('no data')"
    ),
    "ends hard": "print('said', flush=True)\nos._exit(5)",
    "aborts": "faulthandler.enable()\nos.abort()",
    "is interrupted": "os.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)",
    "has its own hook": "sys.excepthook = lambda *given: print(given[0], given[1])\n1 / 0",
    "has a hook around Python's": (
        "sys.excepthook = lambda *given: print('first', sys.__excepthook__(*given))\n1 / 0"
    ),
    "has a hook that fails": "def hook(*given): raise KeyError(2)\nsys.excepthook = hook\n1 / 0",
    "has no hook": "del sys.excepthook\n1 / 0",
    "has Python's hooks": (
        "print(sys.excepthook is sys.__excepthook__, threading.excepthook is"
        " threading.__excepthook__)"
    ),
    "prints what it handles": (
        "try: 1 / 0\nexcept ZeroDivisionError: sys.excepthook(*sys.exc_info())"
    ),
    "loses a thread": (
        "t = threading.Thread(target=lambda: 1 / 0, name='t')\nt.start(); t.join()\nprint('on')"
    ),
    "has a thread's own hook": (
        "threading.excepthook = lambda given: print(given.exc_type)\n"
        "t = threading.Thread(target=lambda: 1 / 0)\nt.start(); t.join()"
    ),
    "forks, and the child raises": "if not os.fork(): 1 / 0\nprint(os.wait()[1])",
    "forks, and the child exits": "if not os.fork(): sys.exit(4)\nprint(os.wait()[1])",
    "spawns": (
        "def work(): print('worked', flush=True); sys.exit(6)\n"
        "if __name__ == '__main__':\n"
        "    p = multiprocessing.get_context('spawn').Process(target=work);"
        " p.start(); p.join(); print(p.exitcode)"
    ),
    "has an exception without a text": (
        "class E(Exception):\n    def __str__(self): raise KeyError(1)\nraise E()"
    ),
    "recurses": "sys.tracebacklimit = 3\ndef f(): f()\nf()",
    "has no standard error": "os.close(2)\n1 / 0",
    "has a module with a name of Python's": (
        "open('json.py', 'w').write('print(\\'mine\\')')\nsys.path.insert(0, os.getcwd())\n1 / 0"
    ),
    "changes its directory": "os.chdir('/')\n1 / 0",
    "has a message that is no text": "raise ValueError('\\udc80', b'\\xff')",
}


IMPORTS_NOTHING = {
    "raises, and has imported nothing": "1 / 0",
    "is interrupted, and has imported nothing": (
        "import os\nos.kill(os.getpid(), 2)\nfor _ in range(10**9): pass"
    ),
    "raises KeyboardInterrupt": "raise KeyboardInterrupt",
    "raises KeyboardInterrupt in another": (
        "try: 1 / 0\nfinally: raise KeyboardInterrupt('by hand')"
    ),
    "raises a KeyboardInterrupt of its own": "class K(KeyboardInterrupt): pass\nraise K",
    "raises SystemExit": "raise SystemExit('no data')",
    "raises GeneratorExit": "raise GeneratorExit",
    "raises in what it runs": "exec('1 / 0')",
}


@pytest.mark.parametrize("runtime", ["", "gone"])
@pytest.mark.parametrize("name", [*AS_WITHOUT, *IMPORTS_NOTHING])
def test_a_script_behaves_as_without_the_hooks(tmp_path: Path, name: str, runtime: str) -> None:
    """Compare the status, and every byte of the output, with those of plain Python."""
    script = IMPORTS_NOTHING.get(name) or IMPORTS + AS_WITHOUT[name]
    (tmp_path / "x.py").write_text(script, encoding="utf-8")
    hooked = {
        "PYTHONPATH": str(LAUNCHER / "trainworks_launcher/programs/python"),
        names.PYTHON_HOOKS_VARIABLE: "stacks exit end leave",
        names.RUNTIME_DIRECTORY_VARIABLE: str(tmp_path / runtime),
    }
    for options in ((), ("-O",)):
        command = (sys.executable, *options, str(tmp_path / "x.py"))
        ends = []
        for env in ({}, hooked):
            done = subprocess.run(command, env=env, capture_output=True, cwd=tmp_path, check=False)
            ends.append((done.returncode, done.stdout, re.sub(rb"0x[0-9a-f]+", b"", done.stderr)))
        assert ends[0] == ends[1]


@pytest.mark.parametrize(
    ("raises", "message"),
    [
        ("raise subprocess.SubprocessError('x')", "subprocess.SubprocessError: x"),
        ("raise ValueError('x')", "ValueError: x"),
        ("class Own(Exception): pass\nraise Own('x')", "Own: x"),
    ],
)
def test_the_brief_record_names_the_type_as_the_whole_one_does(
    tmp_path: Path, raises: str, message: str
) -> None:
    hooked = {
        "PYTHONPATH": str(LAUNCHER / "trainworks_launcher/programs/python"),
        names.PYTHON_HOOKS_VARIABLE: "end leave",
        names.RUNTIME_DIRECTORY_VARIABLE: str(tmp_path),
    }
    command = (sys.executable, "-c", f"import subprocess\n{raises}")
    subprocess.run(command, env=hooked, capture_output=True, check=False)
    rows = [json.loads(line) for line in (tmp_path / "ends").read_text("utf-8").splitlines()]
    messages = [(row.get("brief", False), row["message"].strip()) for row in rows]
    assert messages == [(True, message), (False, message)]


def test_a_sitecustomize_of_the_users_own_is_read(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.excepthook = lambda *_: print('mine')", encoding="utf-8"
    )
    write_inputs(tmp_path, "raise ValueError('loss is nan')", {}, {})
    with Launcher(tmp_path, variables={"PYTHONPATH": str(tmp_path)}) as launcher:
        assert launcher.wait() == 1
    assert "\nmine\n" in launcher.text
    assert launcher.failure.startswith("ValueError: loss is nan\n")
