"""Test the cause of a job's end: real deaths, under the real launcher."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from launcher_support import Launcher, write_inputs
from test_launcher_logs import ranks

from trainworks_launcher.contract.json_values import Json
from trainworks_launcher.supervise.outcome.cause import OutsideEvidence, ProcessEnd, failure_of
from trainworks_launcher.supervise.outcome.outcome import ProgramPlace
from trainworks_launcher.supervise.outcome.records import Record
from trainworks_launcher.supervise.outcome.starter_reports import Report, report_of
from trainworks_testing.ports import free_port

IMPORTS = (
    "import atexit, logging, os, signal, subprocess, sys, threading, time, traceback, warnings\n"
)
HANDLED = (
    IMPORTS
    + """
try:
    open("/no/such/cache")
except OSError:
    traceback.print_exc()
"""
)
LOGGED = HANDLED.replace("traceback.print_exc()", "logging.exception('no cache, going on')")
BARS = (
    "for step in range(9): sys.stderr.write(f'\\r {step}0%|## | {step}/9 [00:01<00:02, 3.1it/s]')\n"
)
DIES = "raise ValueError('loss is nan')\n"
NO_CACHE = "No such file or directory: '/no/such/cache'"


def after(lines: str) -> str:
    """A script that dies, and whose libraries go on to print."""
    return f"{IMPORTS}atexit.register(os.write, 2, {lines.encode()!r})\n{DIES}"


def child(script: str) -> str:
    return f"subprocess.run((sys.executable, '-c', {script!r}), "


def run(base: Path, script: str, variables: Mapping[str, str] | None = None) -> Launcher:
    write_inputs(base, script, {}, {})
    with Launcher(base, variables=variables) as launcher:
        launcher.status = launcher.wait()
    return launcher


def assert_cause(launcher: Launcher, words: str) -> None:
    """The first line of the failure, the field ``cause`` and the log's last line agree."""
    first = launcher.failure.splitlines()[0]
    assert words in first, launcher.failure
    document = json.loads((launcher.base / "output/failure.json").read_text(encoding="utf-8"))
    assert (document["cause"], document["text"]) == (first, launcher.failure)
    assert first in launcher.text.splitlines()[-1]


IGNORED = """
class Iterator:
    def __del__(self): assert False, "can only test a child process"
kept = [Iterator() for _ in range(4)]
"""
TALKS = """
def talk():
    for number in range(12): print("prefetcher: queue", number, file=sys.stderr, flush=True)
threading.Thread(target=lambda: (threading.main_thread().join(), talk())).start()
"""
STATE = "', '.join(f'model.layers.{n}.self_attn.q_proj.weight' for n in range(2000))"


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (IMPORTS + TALKS + DIES, "ValueError: loss is nan"),
        (after("error: cannot reach the tracker\n" * 30), "ValueError: loss is nan"),
        (IMPORTS + "atexit.register(time.sleep, 2.5)\n" + DIES, "ValueError: loss is nan"),
        (IMPORTS + "atexit.register(lambda: 1 / 0)\n" + DIES, "ValueError: loss is nan"),
        (IMPORTS + "atexit.register(os.abort)\n" + DIES, "ValueError: loss is nan"),
        (IMPORTS + "atexit.register(os._exit, 9)\n" + DIES, "ValueError: loss is nan"),
        (
            IMPORTS + "sys.excepthook = lambda *_: print('sorry')\n" + DIES,
            "ValueError: loss is nan",
        ),
        (HANDLED + "raise KeyError('a later one')", "KeyError: 'a later one'"),
        (
            (
                "raise RuntimeError('Error(s)"
                f" in loading state_dict for Llama:\\n\\tMissing key(s): ' + {STATE})"
            ),
            "RuntimeErr",
        ),
        ("raise ValueError('x' * 200_000)", "ValueError: xxx"),
        ("raise ValueError('\\nbad shape\\nof a batch')", "ValueError: bad shape"),
        ("def f(:\n    pass", "SyntaxError: invalid syntax"),
        ("raise ValueError('two of these:\\n  lr\\n  epochs')", "ValueError: two of these: lr"),
        (
            IMPORTS + f"import runpy\nopen('m.py', 'w').write({DIES!r})\nrunpy.run_path('m.py')",
            "ValueError: loss is nan",
        ),
        # exceptions that only say that a started process failed
        (IMPORTS + child(DIES) + "check=True)", "ValueError: loss is nan"),
        (
            IMPORTS + child(IMPORTS + child(DIES) + "check=True)") + "check=True)",
            "ValueError: loss is nan",
        ),
        (
            IMPORTS + "sys.exit(" + child(DIES) + "check=False).returncode)",
            "ValueError: loss is nan",
        ),
        (IMPORTS + child("exit(3)") + "check=True)", "subprocess.CalledProcessError: Command"),
        # an error that another process raised, in the words of who passes it on
        (
            (
                'raise RuntimeError(\'-- Process 1 terminated:\\nTraceback:\\n  File "t.py", line'
                " 2\\nKeyError: 7\\n')"
            ),
            "RuntimeError: -- Process 1 terminated: KeyError: 7",
        ),
    ],
)
def test_the_exception_that_ended_the_process_is_the_cause(
    tmp_path: Path, script: str, words: str
) -> None:
    """Find the exception behind any later output, of any process, and with a text of any length."""
    assert_cause(run(tmp_path, script), words)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (HANDLED + "os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV"),
        (HANDLED + "os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL"),
        (LOGGED + "os.kill(os.getpid(), signal.SIGFPE)", "killed by SIGFPE"),
        (HANDLED + "os.abort()", "killed by SIGABRT"),
        (HANDLED + "os._exit(17)", "exit status 17"),
        (HANDLED + "sys.exit(3)", "exit status 3"),
        (LOGGED + "logging.info('going on')\nos._exit(1)", "exit status 1"),
        (HANDLED + "sys.exit('no token budget left')", "no token budget left"),
        (
            LOGGED + "print('error: the validation set is empty', file=sys.stderr)\nsys.exit(1)",
            "error: the validation",
        ),
        (
            HANDLED.replace("traceback.print_exc()", "warnings.warn(traceback.format_exc())")
            + "sys.exit(3)",
            "status 3",
        ),
        (HANDLED + BARS + "sys.exit('\\nloss is nan, giving up')", "loss is nan, giving up"),
        (HANDLED + BARS + "sys.exit(1)", "exit status 1"),
        # in a child that the script survives, or in a thread
        (
            IMPORTS
            + child("open('/no/such/cache')")
            + "check=False)\nsys.exit('the set is empty')",
            "the set is empty",
        ),
        (
            IMPORTS + child("open('/no/such/cache')") + "check=False)\n" + DIES,
            "ValueError: loss is nan",
        ),
        (
            IMPORTS + child("open('/no/such/cache')") + "check=False)\nos._exit(17)",
            "exit status 17",
        ),
        (
            IMPORTS + "thread = threading.Thread(target=open,"
            " args=('/no/such/cache',))\nthread.start()\nthread.join()\nsys.exit('configuration"
            " error: lr must be positive')",
            "configuration error: lr must be positive",
        ),
    ],
)
def test_a_handled_exception_is_never_the_cause(tmp_path: Path, script: str, words: str) -> None:
    launcher = run(tmp_path, script)
    assert_cause(launcher, words)
    assert NO_CACHE in launcher.failure or "loss is nan" in words


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (
            (
                "import argparse\n"
                "p = argparse.ArgumentParser()\n"
                "p.add_argument('--lr', required=1)\n"
                "p.parse_args()"
            ),
            "--lr",
        ),
        (IMPORTS + "print('a'); sys.exit('no data in /opt/ml/input')", "no data in /opt/ml/input"),
        (
            IMPORTS
            + "atexit.register(print, 'tracker: done', file=sys.stderr)\nsys.exit('no disk')",
            "no disk",
        ),
        (
            IMPORTS + 'sys.exit("größe \\"4\\" 火 \U0001f525 \\\\ x")',
            'größe "4" 火 \U0001f525 \\ x',
        ),
        (
            IMPORTS + "sys.exit('cannot start:\\n  no data\\n  no model')",
            "cannot start: no data no model",
        ),
        (IMPORTS + "logging.error('corrupt shard 7')\nsys.exit(1)", "corrupt shard 7"),
        (
            IMPORTS + "atexit.register(lambda: 1 / 0)\nsys.exit('accuracy is below 0.9')",
            "accuracy is below 0.9",
        ),
        (IMPORTS + IGNORED + "sys.exit('accuracy is below 0.9')", "accuracy is below 0.9"),
        (IMPORTS + BARS + "sys.exit(4)", "exit status 4"),
        (IMPORTS + "print('epoch 7 done', file=sys.stderr); sys.exit(4)", "exit status 4"),
        (IMPORTS + "print('epoch 7 done'); sys.exit(1)", "exit status 1"),
        (IMPORTS + "os.kill(os.getpid(), signal.SIGINT); time.sleep(9)", "killed by SIGINT"),
    ],
)
def test_a_python_that_no_exception_ended_says_why_at_last(
    tmp_path: Path, script: str, words: str
) -> None:
    assert_cause(run(tmp_path, script), words)


@pytest.mark.parametrize(
    ("script", "shown"),
    [
        (
            IMPORTS + "os.write(2, b'free(): invalid pointer\\n'); os.abort()",
            "free(): invalid pointer",
        ),
        (
            IMPORTS + "import faulthandler\nfaulthandler.enable()\nos.abort()",
            "Fatal Python error: Aborted",
        ),
        (
            IMPORTS + "print('Error: no checkpoint', file=sys.stderr); os._exit(4)",
            "Error: no checkpoint",
        ),
        (
            IMPORTS
            + "def hook(given):\n    traceback.print_exception(given.exc_value)\n    os._exit(1)\n"
            "threading.excepthook = hook\n"
            "threading.Thread(target=open, args=('/no/such/cache',)).start()\ntime.sleep(9)",
            NO_CACHE,
        ),
    ],
)
def test_what_leaves_no_record_is_shown_and_not_judged(
    tmp_path: Path, script: str, shown: str
) -> None:
    launcher = run(tmp_path, script)
    assert_cause(launcher, "train.py on host")
    assert shown in launcher.failure


def test_the_stack_of_a_crash_is_shown(tmp_path: Path) -> None:
    script = (
        "import ctypes, faulthandler\n"
        "faulthandler.enable()\n"
        "def inner(): ctypes.string_at(0)\n"
        "inner()"
    )
    launcher = run(tmp_path, script)
    assert_cause(launcher, "killed by SIGSEGV")
    assert "in inner" in launcher.failure


ASSERTIONS = (
    "import os\n"
    "for n in range(3000):\n"
    "    os.write(2, b'/a/Indexing.cu:1239: select: block:"
    " [%d,0,0], thread: [3,0,0] Assertion `index < size` failed.\\n' % n)\n"
    "raise RuntimeError('CUDA error: device-side assert triggered')"
)


@pytest.mark.parametrize(
    ("script", "cause", "note"),
    [
        (
            "try: {}['rank']\nexcept KeyError as error: raise OSError('no file') from error",
            "OSError: no file",
            "caused by KeyError: 'rank'",
        ),
        (
            "try: 1 / 0\nexcept ZeroDivisionError: raise OSError('no file')",
            "OSError: no file",
            "while handling ZeroDivisionError: division by zero",
        ),
        (
            ASSERTIONS,
            "RuntimeError: CUDA error: device-side assert",
            "Assertion `index < size` failed.",
        ),
        pytest.param(
            "raise ExceptionGroup('2 shards failed', [OSError('shard-3'), KeyError('labels')])",
            "OSError: shard-3 (in ExceptionGroup: 2 shards failed (2 sub-exceptions))",
            "OSError: shard-3",
            marks=pytest.mark.skipif(
                sys.version_info < (3, 11), reason="no groups before Python 3.11"
            ),
        ),
        (
            "import threading\n"
            "t = threading.Thread(target=open, args=('/no/x',), name='reader')\n"
            "t.start(); t.join()\n" + DIES,
            "ValueError: loss is nan",
            (
                "a thread (reader) had died of FileNotFoundError: [Errno 2] No such file or"
                " directory: '/no/x'"
            ),
        ),
    ],
)
def test_what_an_exception_hides_is_told(
    tmp_path: Path, script: str, cause: str, note: str
) -> None:
    launcher = run(tmp_path, script)
    assert_cause(launcher, cause)
    assert note in "\n".join(launcher.failure.splitlines()[:4])


@pytest.mark.parametrize(
    ("library", "is_advised"), [("json", False), ("smdistributed.modelparallel", True)]
)
def test_a_script_of_smp_in_mode_none_is_told_of_the_emulation(
    tmp_path: Path, library: str, is_advised: bool
) -> None:
    """The exception has no frame of smp: the script itself asks for CUDA after ``smp.init()``."""
    package = tmp_path / "code/smdistributed/modelparallel"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    no_gpu = "raise AssertionError('Torch not compiled with CUDA enabled')"
    launcher = run(tmp_path, f"import {library}\n{no_gpu}\n")
    assert ("SMP_CPU_EMULATION=1" in launcher.failure) is is_advised, launcher.failure


LONG_AGO = (
    "import subprocess, sys, os, time\n"
    "subprocess.run([sys.executable, '-c', 'import no_such_module'])\n"
)
LATER = "time.sleep(6)\n"
NOT_FOUND = "ModuleNotFoundError: No module named 'no_such_module'"


@pytest.mark.parametrize("later", [LATER, ""])
@pytest.mark.parametrize("end", ["os._exit(1)", "os.abort()"])
def test_an_exception_that_the_program_survived_is_a_note(
    tmp_path: Path, later: str, end: str
) -> None:
    """An optional import failed in a child, and was handled.

    NCCL's watchdog ends a rank by abort.
    """
    launcher = run(tmp_path, LONG_AGO + later + end)
    assert NOT_FOUND not in launcher.failure.splitlines()[0]
    assert f"before that, {NOT_FOUND}" in launcher.failure or NOT_FOUND in launcher.failure


def test_a_status_of_a_tool_is_not_that_of_an_older_child(tmp_path: Path) -> None:
    script = f"{sys.executable} -c 'import no_such_module' || echo going on\nsleep 6\nexit 1\n"
    write_inputs(tmp_path, "", {"sagemaker_program": "run.sh"}, {})
    (tmp_path / "code/run.sh").write_text(script, encoding="ascii")
    with Launcher(tmp_path) as launcher:
        assert launcher.wait() == 1
    assert NOT_FOUND not in launcher.failure.splitlines()[0]


@pytest.mark.parametrize(
    ("end", "status", "words"),
    [
        ("sys.exit('no checkpoint to start from')", 1, "no checkpoint to start from"),
        ("sys.exit(4)", 4, "exit status 4"),
    ],
)
def test_an_exception_that_a_library_handled_is_not_the_cause(
    tmp_path: Path, end: str, status: int, words: str
) -> None:
    """Raise an exception that ``code`` handles and leaves in sys.last_value, as pytest and IPython
    do.
    """
    script = (
        "import code, sys\n"
        "code.InteractiveInterpreter().runcode(compile('1 / 0', 'cell', 'exec'))\n"
    )
    launcher = run(tmp_path, script + end)
    assert launcher.status == status
    assert "ZeroDivisionError" not in launcher.failure.splitlines()[0]
    assert words in launcher.failure


def test_exceptions_of_threads_are_noted_up_to_a_bound(tmp_path: Path) -> None:
    threads = (
        "import threading\nfor number in range(500):\n"
        "    t = threading.Thread(target=open, args=(f'/no/{number}',)); t.start(); t.join()\n"
        "import os\nends = open(os.environ['TRAINWORKS_RUNTIME_DIRECTORY'] + '/ends').read()\n"
        "print('records', ends.count('FileNot'))\n"
    )
    launcher = run(tmp_path, threads + DIES)
    assert "records 64" in launcher.text
    assert_cause(launcher, "ValueError: loss is nan")


DIES_IN_SHELL = f"{sys.executable} -c 'open(\"/no/such/cache\")'"


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (DIES_IN_SHELL, NO_CACHE),
        (f"{DIES_IN_SHELL} || {{ echo training failed >&2; exit 5; }}", NO_CACHE),
        (f"{DIES_IN_SHELL} || {{ for i in 1 2 3; do echo $i >&2; done; exit 5; }}", NO_CACHE),
        (f"{DIES_IN_SHELL} 2>&1 | cat; exit 5", NO_CACHE),
        (f"{sys.executable} -c '{IMPORTS.strip()}; sys.exit(\"x\")' || {DIES_IN_SHELL}", NO_CACHE),
        (f"{DIES_IN_SHELL} || {sys.executable} -c 'pass'; cp /no/such/file /tmp", "run.sh on host"),
        ("cp /no/such/file /tmp", "run.sh on host"),
        (f"{sys.executable} -c 'import os; os.kill(os.getpid(), 11)'", "killed by SIGSEGV"),
        (f"env -u PYTHONPATH {DIES_IN_SHELL}", "run.sh on host"),
    ],
)
def test_a_shell_script_dies_of_the_python_that_it_ran(
    tmp_path: Path, script: str, words: str
) -> None:
    write_inputs(tmp_path, "", {"sagemaker_program": "run.sh"}, {})
    (tmp_path / "code/run.sh").write_text(f"#!/bin/bash\nset -e\n{script}\n", encoding="utf-8")
    with Launcher(tmp_path) as launcher:
        assert launcher.wait() != 0
    assert_cause(launcher, words)
    assert "/no/such/file" in launcher.failure or "cp " not in script


def died(message: str) -> Record:
    return Record(7, 1.0, 2.0, message)


@pytest.mark.parametrize(
    ("record", "code", "of_memory"),
    [
        (None, -9, True),
        (None, 137, True),
        (None, 1, True),
        (died("RuntimeError: DataLoader worker (pid 12) is killed by signal: Killed.\n"), 1, True),
        (
            died("BrokenProcessPool: A process in the process pool was terminated abruptly\n"),
            1,
            True,
        ),
        (died("ValueError: label 17 is out of range\n"), 1, False),
        (Record(7), 3, False),
    ],
)
def test_what_the_kernel_killed_is_the_cause_of_that_end_only(
    record: Record | None, code: int, *, of_memory: bool
) -> None:
    """A script may have survived the end of a helper, and die of something else much later."""
    records = [record] if record else []
    process_end = ProcessEnd(b"step 1\n", b"step 1\n", records, 7)
    text = failure_of(
        ProgramPlace("x.py", "a", "none"), code, process_end, OutsideEvidence(oom_kills=1)
    ).text
    cause = "out of memory: the kernel killed 1 process(es) of host a"
    assert text.startswith(cause) is of_memory
    assert cause in text


# --- a rank that ended too early ------------------------------------------------------------------
IMPROPERLY = """\
--------------------------------------------------------------------------
PROGRAM has exited due to process rank 3 with PID 34 on
node algo-2 exiting improperly. There are three reasons this could occur:

2. this process called "init", but exited without calling "finalize".
exiting or it will be considered an "abnormal termination"
--------------------------------------------------------------------------
"""


@pytest.mark.parametrize("program", ["mpirun", "prterun"])
def test_mpirun_says_which_rank_ended_too_early(program: str) -> None:
    words = IMPROPERLY.replace("PROGRAM", program).encode()
    for ranks_by in ("mpirun", ""):
        assert report_of(words, ranks_by) == Report(
            3, 0, "algo-2", ended_early=True, starter="mpirun"
        )


MPIRUN = """\
--------------------------------------------------------------------------
prterun detected that one or more processes exited with non-zero status,
thus causing the job to be terminated. The first process to do so was:

   Process name: [prterun-a-77@1,1]
   Exit code:    42
--------------------------------------------------------------------------
"""


def test_mpiruns_help_is_not_shown() -> None:
    process_end = ProcessEnd(f"step 1\n{MPIRUN}".encode())
    text = failure_of(ProgramPlace("x.py", "a", "mpi", 1), 42, process_end).text
    assert text == "x.py on host a, rank 1 (mode mpi): exit status 42\nstep 1"


EARLY = """
import os, sys
pipe = os.path.join(os.environ["SM_OUTPUT_DIR"], "pipe")
if os.environ["RANK"] == "1":
    open(pipe, "w").close()
    os._exit(0)
open(pipe).read()
raise RuntimeError("[pair.cc:534] Connection closed by peer")
"""


def test_under_torchrun_a_rank_that_ended_with_0_is_named_where_the_others_needed_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "output").mkdir()
    os.mkfifo(tmp_path / "output/pipe")
    with ranks(tmp_path, EARLY, 2) as launcher:
        assert launcher.wait() == 1
    assert_cause(
        launcher,
        "train.py on host algo-1, rank 1 (mode torch_distributed): ended with exit status 0",
    )
    assert (
        "rank 0 on host algo-1 failed after that: RuntimeError:"
        " [pair.cc:534] Connection closed by peer" in launcher.failure
    )


NO_HOOK = """
import os, sys
if not sys.flags.isolated:
    os.execv(sys.executable, [sys.executable, "-I", *sys.argv])
import json, traceback
def load(): raise ValueError("shard 7 is empty")
def record_exception(error):  # as torch's @record does it
    message = {"message": f"{type(error).__name__}: {error}"}
    message["extraInfo"] = {"py_callstack": traceback.format_exc(), "timestamp": "1"}
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as opened:
        json.dump({"message": message}, opened)
if os.environ["RANK"] == "1":
    os._exit(0)
try:
    load()
except ValueError as error:
    record_exception(error)
    END
"""


@pytest.mark.parametrize(
    ("end", "cause"),
    [
        ("os._exit(3)", "ValueError: shard 7 is empty"),
        ("os._exit(0)", ""),
        ("raise", "ValueError: shard"),
    ],
)
def test_torchs_error_file_tells_of_a_rank_that_has_left_no_record(
    tmp_path: Path, end: str, cause: str
) -> None:
    script = NO_HOOK.replace("END", end)
    with ranks(tmp_path, script, 2) as launcher:
        assert bool(launcher.wait()) is bool(cause), launcher.text
    if cause:
        assert_cause(launcher, cause)
        assert "in load" in launcher.failure


# --- the user's own starter -----------------------------------------------------------------------
TORCHRUN = """\
W1125 16:47:10.646000 14273 api.py:1028] Sending process 1 closing signal
E1125 16:47:10.647000 14273 api.py:1002] failed (exitcode: CODE) local_rank: 1
Traceback (most recent call last):
  File "/opt/venv/bin/torchrun", line 10, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
half.py FAILED
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-25_16:47:10
  host      : localhost
  rank      : RANK (local_rank: 1)
  exitcode  : CODE (pid: 14897)
  error_file: <N/A>
============================================================
"""


NO_OTHERS: Mapping[str, tuple[str, str]] = {}


def own_starter(
    base: Path, message: str, host: str = "", others: Mapping[str, tuple[str, str]] = NO_OTHERS
) -> None:
    """The inputs of a host whose script starts its ranks itself, and fails with the output of their
    starter.

    Hosts have one script: ``others`` has for each of them the first command and its output.
    """
    config: dict[str, Json] = {"hosts": [*others], "current_host": host} if others else {}
    write_inputs(base, "", {"sagemaker_program": "run.sh"}, config)
    lines = [
        "#!/bin/bash",
        *(f"[ $SM_CURRENT_HOST != {name} ] || {{ {wait}; }}" for name, (wait, _) in others.items()),
    ]
    for name, (_, words) in (others or {"": ("", message)}).items():
        condition = f"[ $SM_CURRENT_HOST != {name} ] || " if name else ""
        lines.append(f"{condition}cat >&2 <<'END'\n{words}END")
    (base / "code/run.sh").write_text("\n".join([*lines, "exit 1", ""]), encoding="utf-8")


def died_of(rank: int, exception: str) -> str:
    """A command of a shell: a rank that dies of an exception."""
    return f"RANK={rank} {sys.executable} -c 'raise {exception}'"


def one_after_the_other(base: Path, first: str, second: str) -> str:
    """A command of a shell: two ranks that run at the same time, and die in this order."""
    os.mkfifo(base / "pipe")
    waits = first.replace("'raise", f'\'open("{base}/pipe").read(); raise')
    then = f'import os, time; open("{base}/pipe", "w").close(); pid = os.environ["FIRST"]'
    polls = second.replace(
        "'raise", f'\'{then}\nwhile os.path.exists("/proc/" + pid): time.sleep(0.01)\nraise'
    )
    return f"{waits} &\nFIRST=$! {polls} &\nwait\n"


def torchrun(rank: int, code: int) -> str:
    return TORCHRUN.replace("RANK", f"{rank}").replace("CODE", f"{code}")


GONE = 'RuntimeError("[pair.cc:534] Connection closed by peer")'
DEEPSPEED = (
    "[2026-11-25 10:00:00,001] [ERROR] [launch.py:325:sigkill_handler] ['/opt/venv/bin/python',"
    " '-u', 'train.py', '--local_rank=1'] exits with return code = 7\n"
)


@pytest.mark.parametrize(
    ("ranks_died", "message", "cause", "rank"),
    [
        ((), torchrun(1, 7), "rank 1 (mode none): exit status 7", 1),
        ((0,), torchrun(1, 7), "rank 1 (mode none): exit status 7", 1),
        ((0,), torchrun(1, -11), "rank 1 (mode none): killed by SIGSEGV", 1),
        ((1, 0), torchrun(1, 1), "ValueError: first", 1),
        ((0,), torchrun(0, 1), "RuntimeError: [pair.cc:534] Connection closed by peer", 0),
        ((), DEEPSPEED, "rank 1 (mode none): exit status 7", 1),
        (
            (),
            IMPROPERLY.replace("PROGRAM", "prterun"),
            "rank 3 (mode none): ended with exit status 0",
            3,
        ),
        # The starter says nothing: the rank is that of the record.
        (
            (9, 0),
            "",
            "ValueError: first",
            9,
        ),
    ],
)
def test_the_report_of_a_starter_that_the_script_started_is_read(
    tmp_path: Path, ranks_died: tuple[int, ...], message: str, cause: str, rank: int | None
) -> None:
    """Rank 0 dies of a broken connection, the other one of an exception of its own before that."""
    own_starter(tmp_path, message)
    run_sh = tmp_path / "code/run.sh"
    deaths = died_of(0, GONE)
    if len(ranks_died) > 1:
        deaths = one_after_the_other(
            tmp_path, died_of(ranks_died[0], 'ValueError("first")'), deaths
        )
    if ranks_died:
        run_sh.write_text(
            f"#!/bin/bash\n{deaths}\n{run_sh.read_text(encoding='utf-8')}", encoding="utf-8"
        )
    with Launcher(tmp_path) as launcher:
        assert launcher.wait() == 1
    assert_cause(launcher, cause)
    assert (
        json.loads((tmp_path / "output/failure.json").read_text(encoding="utf-8"))["rank"] == rank
    )


def test_of_two_hosts_the_one_whose_rank_broke_the_connection_tells_why(tmp_path: Path) -> None:
    """The other one's torchrun ends first, of its own rank's broken connection."""
    hosts = ("127.0.0.1", "127.0.0.2")
    os.mkfifo(tmp_path / "gone")
    parts = {
        hosts[0]: (f"{died_of(0, GONE)}; echo gone > {tmp_path}/gone", torchrun(0, 1)),
        hosts[1]: (f"cat {tmp_path}/gone; sleep 0.5", torchrun(3, 7)),
    }
    for name, host in zip("ab", hosts, strict=True):
        own_starter(tmp_path / name, "", host, parts)
    variables = {"TRAINWORKS_CONTROL_PORT": f"{free_port()}"}
    with (
        Launcher(tmp_path / "a", variables=variables) as leader,
        Launcher(tmp_path / "b", variables=variables) as worker,
    ):
        assert (leader.wait(), worker.wait()) == (1, 1)
    assert leader.failure == worker.failure
    assert_cause(leader, "run.sh on host 127.0.0.2, rank 3 (mode none): exit status 7")
