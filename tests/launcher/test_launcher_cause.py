"""Which of the things that a job printed is the cause of its end: real deaths, under the real launcher."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from launcher_support import Launcher, write_inputs
from test_launcher_logs import ranks

from ports import free_port
from trainworks_launcher.contract.values import Json
from trainworks_launcher.supervise.control.messages import read_suspect, suspect_fields
from trainworks_launcher.supervise.outcome.cause import Said, after_early_end, failure_of, last_words
from trainworks_launcher.supervise.outcome.outcome import EARLIER, FAILED, SUCCEEDED, Outcome, Suspect, with_status
from trainworks_launcher.supervise.outcome.starters import Report, report_of

HANDLED = """
import ctypes, faulthandler, logging, os, signal, sys, time, traceback
logging.basicConfig(level=logging.INFO)
try:
    open("/no/such/cache")
except OSError:
    traceback.print_exc()
"""
LOGGED = HANDLED.replace("traceback.print_exc()", "logging.exception('no cache, going on')")
SILENT = "import ctypes, faulthandler, os, signal, sys, time, traceback\n"
TRAINING = "for step in range(3000): print('step', step, 'loss', 1 / (step + 1))\n"
LOGGING = "for step in range(4): logging.info('step %d', step)\n"
BARS = "for step in range(9): sys.stderr.write(f'\\r {step}0%|## | {step}/9 [00:01<00:02, 3.1it/s]')\n"
THROWN = """sys.stderr.write('''\\
terminate called after throwing an instance of 'c10::Error'
  what():  no kernel image
''')
sys.stderr.flush()
"""
FRAMES = "sys.stderr.write('frame #1: f() in libc10.so\\n' * 9)\nsys.stderr.flush()\n"
ABORT = "os.abort()\n"
NO_CACHE = "No such file or directory: '/no/such/cache'"


def killed_by(name: str) -> str:
    return f"os.kill(os.getpid(), signal.{name})\n"


def run(base: Path, script: str, variables: Mapping[str, str] | None = None) -> Launcher:
    write_inputs(base, script, {}, {})
    with Launcher(base, variables=variables) as made:
        made.status = made.wait()
    return made


def assert_cause(made: Launcher, words: str) -> None:
    """The first line of the failure, the field ``cause`` and the log's last line agree."""
    first = made.failure.splitlines()[0]
    assert words in first, made.failure
    document = json.loads((made.base / "output/failure.json").read_text(encoding="utf-8"))
    assert (document["cause"], document["text"]) == (first, made.failure)
    assert first in made.text.splitlines()[-1]


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (HANDLED + TRAINING + killed_by("SIGSEGV"), "killed by SIGSEGV"),
        (HANDLED + killed_by("SIGKILL"), "killed by SIGKILL"),
        (HANDLED + TRAINING + killed_by("SIGBUS"), "killed by SIGBUS"),
        (LOGGED + LOGGING + killed_by("SIGFPE"), "killed by SIGFPE"),
        (HANDLED + TRAINING + "sys.exit('loss is nan, giving up')", "loss is nan, giving up"),
        (LOGGED + LOGGING + "sys.exit('loss is nan, giving up')", "loss is nan, giving up"),
        (HANDLED + BARS + "sys.exit('\\nloss is nan, giving up')", "loss is nan, giving up"),
        (HANDLED + TRAINING + "sys.exit(3)", "exit status 3"),
        (LOGGED + LOGGING + "os._exit(3)", "exit status 3"),
        (HANDLED + TRAINING + "import argparse\nargparse.ArgumentParser().parse_args(['--x'])", "arguments: --x"),
        (HANDLED + TRAINING + THROWN + FRAMES + ABORT, "c10::Error: no kernel image"),
        (HANDLED + TRAINING + "raise KeyError('a later one')", "KeyError: 'a later one'"),
        (HANDLED + TRAINING + "logging.error('the disk is full')\nos._exit(1)", "the disk is full"),
        (HANDLED + "time.sleep(2.5)\nsys.exit('later')", "later"),
        (HANDLED + "time.sleep(2.5)\nsys.exit(3)", "exit status 3"),
        (HANDLED + TRAINING + ABORT, "killed by SIGABRT"),
        (
            HANDLED.replace("traceback.print_exc()", "logging.warning('again', exc_info=True)") + "os._exit(17)",
            "exit status 17",
        ),
    ],
)
def test_a_traceback_that_the_script_handled_is_only_context(tmp_path: Path, script: str, words: str) -> None:
    made = run(tmp_path, script)
    assert_cause(made, words)
    if "a later one" not in words:
        assert "earlier it had printed: FileNotFoundError" in made.failure
        assert NO_CACHE in made.failure


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (HANDLED + "sys.exit(3)", NO_CACHE),
        (HANDLED + "sys.exit('cannot go on')", NO_CACHE),
        ("print('x' * 5000)\nopen('/no/such/cache')", NO_CACHE),
        ("import warnings, atexit\natexit.register(warnings.warn, 'not destroyed')\nopen('/no/such/cache')", NO_CACHE),
        ("import atexit, os\natexit.register(os.write, 2, b'wandb: x\\n' * 9)\nopen('/no/such/cache')", NO_CACHE),
        ("class A:\n    def __del__(self): raise KeyError('gone')\na = A()\nopen('/no/such/cache')", NO_CACHE),
        (SILENT + "try: open('/no/such/cache')\nexcept OSError:\n    traceback.print_exc()\n    os.abort()", NO_CACHE),
    ],
)
def test_the_exception_that_a_process_died_of_is_the_cause(tmp_path: Path, script: str, words: str) -> None:
    assert_cause(run(tmp_path, script), words)


ASSERTIONS = (
    "import os\nfor n in range(3000):\n    os.write(2, b'/a/Indexing.cu:1239: select: block: [%d,0,0], thread: [3,0,0]"
    " Assertion `index < size` failed.\\n' % n)\nraise RuntimeError('CUDA error: device-side assert triggered')"
)


@pytest.mark.parametrize(
    ("script", "cause", "note"),
    [
        (
            "import subprocess, sys\nsubprocess.run((sys.executable, '-c', 'raise ValueError(1)'), check=True)",
            "ValueError: 1",
            "",
        ),
        (
            "import subprocess, sys\nsubprocess.run((sys.executable, '-c', 'exit(3)'), check=True)",
            "subprocess.CalledProcessError: Command",
            "",
        ),
        (
            "raise RuntimeError('Error(s) in loading state_dict for Net:\\n\\tsize mismatch for fc.weight')",
            "RuntimeError: Error(s) in loading state_dict for Net: size mismatch for fc.weight",
            "",
        ),
        ("raise ValueError('\\nbad shape\\nof a batch')", "ValueError: bad shape", ""),
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
        (ASSERTIONS, "RuntimeError: CUDA error: device-side assert", "Assertion `index < size` failed."),
    ],
)
def test_what_an_exception_hides_is_told(tmp_path: Path, script: str, cause: str, note: str) -> None:
    made = run(tmp_path, script)
    assert_cause(made, cause)
    assert note in "\n".join(made.failure.splitlines()[:4])


GROUP = """\
  + Exception Group Traceback (most recent call last):
  |   File "train.py", line 7, in <module>
  |     raise ExceptionGroup("2 shards failed", errors)
  | ExceptionGroup: 2 shards failed (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "train.py", line 5, in read
    |     open(name)
    | FileNotFoundError: [Errno 2] No such file or directory: 'shard-3'
    +---------------- 2 ----------------
    | KeyError: 'labels'
    +------------------------------------
"""


def test_a_group_tells_of_its_first_member() -> None:
    text = failure_of(what="x", host="a", mode="none", returncode=1, said=Said(GROUP.encode(), GROUP.encode())).text
    assert text.splitlines()[0] == "ExceptionGroup: 2 shards failed (2 sub-exceptions)"
    assert text.splitlines()[2] == "caused by FileNotFoundError: [Errno 2] No such file or directory: 'shard-3'"


BOX = """
import sys
print("┏" + "━" * 30, file=sys.stderr)
sys.stderr.write('''\\
╭─────────────────── Traceback (most recent call last) ───────────────────╮
│ /opt/ml/code/train.py:5 in <module>                                     │
│                                                                         │
│ ❱ 5 model(batch)                                                        │
╰─────────────────────────────────────────────────────────────────────────╯
ValueError: shapes do not match
''')
sys.exit(1)
"""


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("import argparse\np = argparse.ArgumentParser()\np.add_argument('--lr', required=1)\np.parse_args()", "--lr"),
        ("import sys; print('a'); sys.exit('no data in /opt/ml/input')", "no data in /opt/ml/input"),
        (BOX, "ValueError: shapes do not match"),
        (SILENT + THROWN + ABORT, "c10::Error: no kernel image"),
        (SILENT + THROWN + FRAMES + ABORT, "c10::Error: no kernel image"),
        (SILENT + "os.write(2, b'free(): invalid pointer\\n')\n" + ABORT, "free(): invalid pointer"),
        (SILENT + "faulthandler.enable()\n" + ABORT, "Fatal Python error: Aborted"),
        (SILENT + "faulthandler.dump_traceback_later(0.1, exit=True)\ntime.sleep(60)", "Timeout (0:00:00.1"),
        (SILENT + "print('Error: no checkpoint', file=sys.stderr)\n" + BARS + "os._exit(4)", "Error: no checkpoint"),
        (SILENT + BARS + "os._exit(4)", "exit status 4"),
        ("import sys\nfor n in range(5): print('epoch', n, file=sys.stderr)\nsys.exit(4)", "exit status 4"),
        ("import sys; print('epoch 7 done'); sys.exit(4)", "exit status 4"),
        ("import sys; sys.exit('cannot start:\\n  no data\\n  no model')", "cannot start: no data no model"),
        (SILENT + "faulthandler.dump_traceback()\nsys.exit('loss is nan')", "loss is nan"),
        ("import logging, sys\nlogging.error('corrupt')\nlogging.warning('bye')\nsys.exit(3)", "corrupt"),
        ("import sys; print('ERROR: the bucket is empty'); sys.exit(4)", "ERROR: the bucket is empty"),
        (
            "import atexit, sys\natexit.register(lambda: 1 / 0)\nsys.exit('accuracy is below 0.9')",
            "accuracy is below 0.9",
        ),
        (
            SILENT
            + "os.write(2, b'F1126 01:00:00.01 7 x.cc:9] Check failed: n > 0\\n*** Check failure stack trace: ***\\n"
            "    @     0x7f0  (unknown)\\n')\n" + ABORT,
            "F1126 01:00:00.01 7 x.cc:9] Check failed: n > 0",
        ),
        (
            SILENT
            + "os.write(2, b'ERROR: Could not consume arg: --lr\\nUsage: train.py <flags>\\n  optional flags: --epochs"
            "\\n\\nFor detailed information on this command, run:\\n  train.py --help\\n')\nos._exit(2)",
            "ERROR: Could not consume arg: --lr",
        ),
        (
            SILENT
            + "os.write(2, b'throw new Error()\\n\\nError: no config\\n    at f (/a.js:3)\\n\\nNode.js v20.11.0\\n')\n"
            "os._exit(1)",
            "Error: no config",
        ),
        (
            SILENT + "os.write(2, b'panic: index 7\\n\\ngoroutine 1 [running]:\\nmain.main()\\nexit status 2\\n');"
            "os._exit(1)",
            "panic: index 7",
        ),
    ],
)
def test_without_a_traceback_the_last_line_of_an_error_is_the_cause(tmp_path: Path, script: str, words: str) -> None:
    assert_cause(run(tmp_path, script), words)


def test_the_stack_of_a_crash_is_shown(tmp_path: Path) -> None:
    made = run(tmp_path, SILENT + "faulthandler.enable()\ndef inner(): ctypes.string_at(0)\ninner()")
    assert_cause(made, "killed by SIGSEGV")
    assert "in inner" in made.failure


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("cp /no/such/file /tmp", "cannot stat '/no/such/file'"),
        ("no-such-tool --x", "no-such-tool"),
        (f"{sys.executable} -c 'open(\"/no/such/cache\")' || {{ echo training failed >&2; exit 5; }}", NO_CACHE),
        (f"{sys.executable} -c 'open(\"/no/such/cache\")' 2>&1 | cat; exit 5", NO_CACHE),
        (
            f"{sys.executable} -c 'open(\"/no/such/cache\")' || {{ for i in 1 2 3; do echo $i >&2; done; exit 5; }}",
            NO_CACHE,
        ),
        ("echo 'fatal: no repository' >&2; echo 'Please check that it exists.' >&2; exit 128", "fatal: no repository"),
        ("if then fi", "syntax error"),
        ("set -u; echo $NO_SUCH_NAME", "NO_SUCH_NAME: unbound variable"),
        (f"{sys.executable} -c 'import os; os.kill(os.getpid(), 11)'", "killed by SIGSEGV"),
    ],
)
def test_a_shell_script_dies_of_what_its_tool_said(tmp_path: Path, script: str, words: str) -> None:
    write_inputs(tmp_path, "", {"sagemaker_program": "run.sh"}, {})
    (tmp_path / "code/run.sh").write_text(f"#!/bin/bash\nset -e\n{script}\n", encoding="utf-8")
    with Launcher(tmp_path) as made:
        assert made.wait() != 0
    assert_cause(made, words)


FIRST = 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\nValueError: first\n'


@pytest.mark.parametrize(
    ("output", "code", "shell", "died_of_it", "line"),
    [
        ((FIRST, "giving up\n"), 1, False, True, ""),
        ((FIRST, "step 1\n", "giving up\n"), 1, False, False, "giving up"),
        ((FIRST, "step 1\n", "giving up\n"), 5, True, True, ""),  # Python's own buffer, then the shell's word
        ((FIRST, "step 1\n"), 1, False, True, ""),
    ],
)
def test_what_is_printed_in_between_shows_that_a_process_went_on(
    output: tuple[str, ...], code: int, *, shell: bool, died_of_it: bool, line: str
) -> None:
    errors = "".join(piece for piece in output if not piece.startswith("step"))
    found = last_words(Said("".join(output).encode(), errors.encode(), shell=shell), code)
    assert (found.died_of is not None, found.line) == (died_of_it, line)


@pytest.mark.parametrize(("code", "status"), [(-9, "killed by SIGKILL"), (1, "exit status 1"), (None, "it failed")])
def test_the_kernels_counter_comes_first(code: int | None, status: str) -> None:
    said = Said(FIRST.encode(), FIRST.encode())
    text = failure_of(what="x.py", host="a", mode="none", returncode=code, said=said, oom_kills=2).text
    lines = text.splitlines()
    assert lines[0] == "out of memory: the kernel killed 2 process(es) of host a"
    assert status in lines[1]
    assert lines[2] == "earlier it had printed: ValueError: first"


def test_the_end_that_another_host_knows_is_weighed_like_any_other() -> None:
    """mpirun knows the signal, the rank's own host knows what it printed."""
    said = Said(FIRST.encode(), FIRST.encode())
    told = failure_of(what="x.py", host="b", mode="mpi", returncode=None, said=said, rank=3)
    segv, one = with_status(told, -11), with_status(told, 1)
    place = "x.py on host b, rank 3 (mode mpi): "
    assert segv.text.splitlines()[:2] == [f"{place}killed by SIGSEGV (exit status 139)", f"{EARLIER}ValueError: first"]
    assert one.text.splitlines()[:2] == ["ValueError: first", f"{place}exit status 1"]
    assert (segv.cause, one.cause) == ("", "ValueError: first")
    bare = failure_of(what="x.py", host="b", mode="mpi", returncode=None, said=Said(b""), rank=3)
    assert "SIGBUS" in with_status(bare, -7).text


@pytest.mark.parametrize("words", ["it failed", "killed by SIGKILL (exit status 137)"])
def test_a_users_own_words_are_kept_where_another_host_knows_the_end(words: str) -> None:
    errors = FIRST.replace("ValueError: first", f"RuntimeError: forward(x): {words}").encode()
    said = Said(errors, errors)
    told = failure_of(what="x.py", host="b", mode="mpi", returncode=None, said=said, rank=3)
    lines = [f"RuntimeError: forward(x): {words}", "x.py on host b, rank 3 (mode mpi): exit status 1"]
    assert with_status(told, 1).text.splitlines()[:2] == lines
    assert read_suspect(suspect_fields(Suspect(1.0, told, certain=True), 1.0), "b", 1.0).outcome == told


# --------------------------------------------------------------------------------------- a rank that ended too early
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
        assert report_of(words, ranks_by) == Report(3, 0, "algo-2", ended_early=True, starter="mpirun")


MPIRUN = """\
--------------------------------------------------------------------------
prterun detected that one or more processes exited with non-zero status,
thus causing the job to be terminated. The first process to do so was:

   Process name: [prterun-a-77@1,1]
   Exit code:    42
--------------------------------------------------------------------------
"""


def test_mpiruns_help_is_no_ranks_last_word() -> None:
    text = failure_of(
        what="x.py", host="a", mode="mpi", returncode=42, said=Said(f"step 1\n{MPIRUN}".encode()), rank=1, reported=True
    ).text
    assert text == "x.py on host a, rank 1 (mode mpi): exit status 42\nstep 1"


@pytest.mark.parametrize(
    "line",
    [
        "[pi-launcher:00010] PMIX ERROR: PMIX_ERR_NOT_FOUND in file /prrte/src/prted/pmix/pmix_server.c at line 1747",
        "[a:00010] plm:ssh: Warning: setpgid(14,14) failed in parent with errno=Permission denied(13)",
        "[a.b:12] PRTE ERROR: Not found in file rmaps_base.c at line 98",
    ],
)
def test_what_mpiruns_daemons_log_is_no_ranks_last_word(line: str) -> None:
    """They miss the rank that failed, at the same time as mpirun tells of it."""
    said = Said(f"step 1\n{line}\n{MPIRUN}".encode())
    made = failure_of(what="x.py", host="a", mode="mpi", returncode=42, said=said, rank=1, reported=True)
    assert made.cause == ""
    assert made.text.startswith("x.py on host a, rank 1 (mode mpi): exit status 42\n")
    own = Said(f"error: no data\n{line}\n{MPIRUN}".encode())
    assert failure_of(what="x", host="a", mode="mpi", returncode=42, said=own, rank=1, reported=True).cause == (
        "error: no data"
    )


def ended(rank: int, at: float, code: int, text: str) -> Suspect:
    return Suspect(at, Outcome(FAILED if code else SUCCEEDED, code, "a", text, rank), bool(code))


def unknown(rank: int, at: float) -> Suspect:
    """A rank whose status its starter took first."""
    found = failure_of(what="x.py", host="a", mode="mpi", returncode=None, said=Said(b"step 1"), rank=rank)
    return Suspect(at, found, certain=False)


BROKEN = "RuntimeError: [pair.cc:534] Connection closed by peer"


@pytest.mark.parametrize(
    ("text", "suspects", "rank"),
    [
        (BROKEN, [ended(3, 1.0, 0, "early 3"), ended(2, 2.0, 1, BROKEN)], 3),
        (BROKEN, [ended(2, 2.0, 1, BROKEN)], 2),
        (BROKEN, [ended(3, 9.0, 0, "late 3"), ended(2, 2.0, 1, BROKEN)], 2),
        (BROKEN, [ended(3, 1.5, 0, "early 3"), ended(1, 1.0, 0, "early 1"), ended(2, 2.0, 1, BROKEN)], 1),
        ("RuntimeError: Timed out waiting 1800000ms for recv operation", [ended(3, 1.0, 0, "early 3")], 3),
        (BROKEN, [unknown(3, 1.0), ended(2, 2.0, 1, BROKEN)], 3),
        (BROKEN, [unknown(3, 2.5), ended(2, 2.0, 1, BROKEN)], 2),  # perhaps ended by the starter
        ("ValueError: shapes differ", [ended(3, 1.0, 0, "early 3"), ended(2, 2.0, 1, "ValueError")], 2),
    ],
)
def test_a_rank_that_ended_before_the_others_missed_it_is_the_cause(
    text: str, suspects: list[Suspect], rank: int
) -> None:
    judged = after_early_end(Outcome(FAILED, 1, "a", text, 2), suspects)
    assert (judged.rank, judged.status, judged.kind) == (rank, 1, FAILED)
    assert text in judged.text


EARLY = """
import os, sys
pipe = os.path.join(os.environ["SM_OUTPUT_DIR"], "pipe")
if os.environ["RANK"] == "1":
    open(pipe, "w").close()
    os._exit(0)
open(pipe).read()
raise RuntimeError("[pair.cc:534] Connection closed by peer")
"""


def test_under_torchrun_a_rank_that_ended_with_0_is_named_where_the_others_needed_it(tmp_path: Path) -> None:
    (tmp_path / "output").mkdir()
    os.mkfifo(tmp_path / "output/pipe")
    with ranks(tmp_path, EARLY, 2) as made:
        assert made.wait() == 1
    assert_cause(made, "train.py on host algo-1, rank 1 (mode torch_distributed): ended with exit status 0")
    assert (
        "rank 0 on host algo-1 failed after that: RuntimeError: [pair.cc:534] Connection closed by peer" in made.failure
    )


# ---------------------------------------------------------------------------------------------- the user's own starter
TORCHRUN = """\
W1125 16:47:10.646000 14273 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 1 closing signal
E1125 16:47:10.647000 14273 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: CODE) local_rank: 1
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


FT_LAUNCHER = """\
[2026-11-26 05:40:45,669] [ERROR] [ft_launcher18548@vm] failed (exitcode: CODE) local_rank: 1 (pid: 8327) of binary: /py
[2026-11-26 05:40:45,670] [INFO] [ft_launcher18548@vm] Stopping workers... Timeout = 30 sec.
[2026-11-26 05:40:45,671] [WARNING] [RankMonServer18723@vm:<none>] No active connection to close
"""
"""What ft_launcher of nvidia-resiliency-ext logs of a failed round, and FT_ENDED at its own end."""
FT_ENDED = """\
[2026-11-26 05:40:46,157] [INFO] [ft_launcher18548@vm] Rendezvous don't have any nodes. Leaving the store process...
[2026-11-26 05:40:46,223] [ERROR] [ft_launcher18548@vm] Some rank(s) exited with non-zero exit code: \
{0: ProcessFailure(local_rank=0, pid=8301, exitcode=-15, error_file='<N/A>', message='SIGTERM', timestamp=1795671645), \
9: ProcessFailure(local_rank=1, pid=8327, exitcode=CODE, error_file='<N/A>', message='', timestamp=1795671645)}. \
Agent's exit code = 1
"""


def ft_launcher(code: int) -> str:
    return (FT_LAUNCHER + FT_ENDED).replace("CODE", f"{code}")


NO_OTHERS: Mapping[str, tuple[str, str]] = {}


def own_starter(base: Path, said: str, host: str = "", others: Mapping[str, tuple[str, str]] = NO_OTHERS) -> None:
    """The inputs of a host whose script starts its ranks itself, and fails with what they and their starter said.

    Hosts have one script: with ``others`` it is for each of them what it waits for and what is said there.
    """
    config: dict[str, Json] = {"hosts": [*others], "current_host": host} if others else {}
    write_inputs(base, "", {"sagemaker_program": "run.sh"}, config)
    lines = ["#!/bin/bash", *(f"[ $SM_CURRENT_HOST != {name} ] || {{ {wait}; }}" for name, (wait, _) in others.items())]
    for name, (_, words) in (others or {"": ("", said)}).items():
        condition = f"[ $SM_CURRENT_HOST != {name} ] || " if name else ""
        lines.append(f"{condition}cat >&2 <<'END'\n{words}END")
    (base / "code/run.sh").write_text("\n".join([*lines, "exit 1", ""]), encoding="utf-8")


def torchrun(rank: int, code: int) -> str:
    return TORCHRUN.replace("RANK", f"{rank}").replace("CODE", f"{code}")


GLOO = FIRST.replace("ValueError: first", BROKEN)
DEEPSPEED = (
    "[2026-11-25 10:00:00,001] [ERROR] [launch.py:325:sigkill_handler] ['/opt/venv/bin/python', '-u', 'train.py',"
    " '--local_rank=1'] exits with return code = 7\n"
)


@pytest.mark.parametrize(
    ("said", "cause", "rank"),
    [
        (torchrun(1, 7), "rank 1 (mode none): exit status 7", 1),
        (GLOO + torchrun(1, 7), "rank 1 (mode none): exit status 7", 1),
        (GLOO + torchrun(1, -11), "rank 1 (mode none): killed by SIGSEGV", 1),
        (GLOO + "step 1\n" * 80 + FIRST + GLOO + torchrun(1, 1), "ValueError: first", 1),
        ("".join(f"[rank1]: {line}\n" for line in FIRST.splitlines()) + GLOO + torchrun(1, 1), "ValueError: first", 1),
        ("error: no data in /opt/ml/input\n" + torchrun(0, 1), "error: no data in /opt/ml/input", 0),
        (GLOO + FIRST + GLOO + ft_launcher(1), "ValueError: first", 9),
        (GLOO + FIRST + ft_launcher(-9), "rank 9 (mode none): killed by SIGKILL", 9),
        (GLOO + FIRST + GLOO + FT_LAUNCHER.replace("CODE", "1"), "ValueError: first", None),
        (DEEPSPEED, "rank 1 (mode none): exit status 7", 1),
        (IMPROPERLY.replace("PROGRAM", "prterun"), "rank 3 (mode none): ended with exit status 0", 3),
    ],
)
def test_the_report_of_a_starter_that_the_script_started_is_read(
    tmp_path: Path, said: str, cause: str, rank: int | None
) -> None:
    own_starter(tmp_path, said)
    with Launcher(tmp_path) as made:
        assert made.wait() == 1
    assert_cause(made, cause)
    assert json.loads((tmp_path / "output/failure.json").read_text(encoding="utf-8"))["rank"] == rank
    assert "torch/distributed/elastic" not in made.failure
    assert "ft_launcher18548" not in made.failure


def test_of_two_hosts_the_one_whose_rank_broke_the_connection_tells_why(tmp_path: Path) -> None:
    """The other one's torchrun ends first, of its own rank's broken connection."""
    hosts = ("127.0.0.1", "127.0.0.2")
    os.mkfifo(tmp_path / "gone")
    parts = {
        hosts[0]: (f"echo gone > {tmp_path}/gone", GLOO + torchrun(0, 1)),
        hosts[1]: (f"cat {tmp_path}/gone; sleep 0.5", GLOO + torchrun(3, 7)),
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
