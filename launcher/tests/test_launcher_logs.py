"""Test logs of many ranks, and the facts about the ranks: real processes that print, fail, hang and
are stopped.

A stand-in for torchrun starts the ranks: it keeps torchrun's order of words and
its variables, and costs nothing.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
from launcher_support import WAIT_FOR_SIGNALS, Launcher, write_inputs, write_manifest

from trainworks_launcher import __version__
from trainworks_launcher.contract.json_values import Json
from trainworks_launcher.contract.redaction import Redactor
from trainworks_launcher.environment.manifest import Manifest
from trainworks_launcher.supervise.attribution import outcome_files
from trainworks_launcher.supervise.outcome.outcome import Outcome

STARTER = """#!{python}
import os, signal, subprocess, sys

words = sys.argv[1:]
count = next(int(word.partition("=")[2]) for word in words if word.startswith("--nproc-per-node="))
command = words[words.index("--no-python") + 1 :]
ranks = []
for rank in range(count):
    variables = dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count))
    variables["TORCHELASTIC_ERROR_FILE"] = "%s-error-%d.json" % (sys.argv[0], rank)
    ranks.append(subprocess.Popen(command, env=variables))
signal.signal(signal.SIGTERM, lambda number, frame: [rank.kill() for rank in ranks])
codes = [rank.wait() for rank in ranks]
failed = [(rank, code) for rank, code in enumerate(codes) if code not in (0, -15)]
for rank, code in failed[-1:]:
    print("Root Cause (first observed failure):")
    print("  rank      : %d (local_rank: 0)\\n  exitcode  : %d" % (rank, code))
sys.exit(1 if failed else 0)
"""


def ranks(
    base: Path,
    script: str,
    count: int,
    *,
    variables: Mapping[str, str] | None = None,
    stderr: int = subprocess.STDOUT,
    hyperparameters: Mapping[str, Json] | None = None,
) -> Launcher:
    """A job with ``count`` ranks on one host, started."""
    base.mkdir(exist_ok=True)
    starter = base / "torchrun"
    starter.write_text(STARTER.format(python=sys.executable), encoding="utf-8")
    starter.chmod(0o755)
    manifest = write_manifest(
        base / "image.json", {"python": sys.executable, "torchrun": str(starter)}
    )
    job_hyperparameters: dict[str, Json] = {
        "sagemaker_torch_distributed_enabled": "true",
        "sagemaker_mpi_num_of_processes_per_host": count,
        **(hyperparameters or {}),
    }
    config: dict[str, Json] = {"hosts": ["algo-1"], "current_host": "algo-1"}
    write_inputs(base, script, job_hyperparameters, config)
    return Launcher(
        base,
        variables={"TRAINWORKS_IMAGE_MANIFEST": str(manifest), **(variables or {})},
        stderr=stderr,
    )


def test_lines_of_eight_ranks_stay_whole_and_have_one_prefix_each(tmp_path: Path) -> None:
    """Multi-byte text cut anywhere, two pieces per line, CR LF, empty lines,
    and a line that no pipe holds.
    """
    script = """
import os

rank = int(os.environ["RANK"])
for number in range(500):
    end = b"\\r\\n" if number % 7 == 0 else b"\\n"
    line = f"größe {number} 火車 rank {rank} ".encode() * 2 + end
    if number == 250:
        line = b"x" * 400_000 + str(rank).encode() + b"\\n\\n"
    cut = (number * 13) % len(line)
    for piece in (line[:cut], line[cut:]):
        while piece:
            piece = piece[os.write(1, piece) :]
"""
    with ranks(tmp_path, script, 8, stderr=subprocess.DEVNULL) as launcher:
        assert launcher.wait() == 0
    lines = launcher.output.split(b"\n")
    assert lines.pop() == b""
    lines_by_rank: dict[int, list[bytes]] = {rank: [] for rank in range(8)}
    for line in lines:
        prefix, _, rest = line.partition(b"] ")
        assert b"[algo-1 rank " not in rest
        lines_by_rank[int(prefix.removeprefix(b"[algo-1 rank "))].append(rest)
    for rank in range(8):
        expected = []
        for number in range(500):
            if number == 250:
                expected += [b"x" * 400_000 + str(rank).encode(), b""]
            else:
                carriage_return = b"\r" if number % 7 == 0 else b""
                expected.append(f"größe {number} 火車 rank {rank} ".encode() * 2 + carriage_return)
        assert lines_by_rank[rank] == expected, rank


def test_a_line_without_an_end_is_shown_and_ended_by_whoever_speaks_next(tmp_path: Path) -> None:
    script = "import os; os.write(1, b'no newline from ' + os.environ['RANK'].encode())"
    with ranks(tmp_path, script, 2, stderr=subprocess.DEVNULL) as launcher:
        assert launcher.wait() == 0
    assert sorted(launcher.output.split(b"\n")) == [
        f"[algo-1 rank {n}] no newline from {n}".encode() for n in range(2)
    ]


def test_a_progress_bar_is_shown_while_it_runs(tmp_path: Path) -> None:
    script = (
        WAIT_FOR_SIGNALS
        + """
import os, signal
signal.signal(signal.SIGTERM, lambda *_: exit())
if os.environ["RANK"] == "0":
    os.write(2, b"\\r 10%")
    os.write(2, b"\\r 20%")
wait_for_signals()
"""
    )
    with ranks(tmp_path, script, 2) as launcher:
        launcher.read_until("[algo-1 rank 0] \r 10%\r 20%")
        launcher.process.send_signal(signal.SIGTERM)
        launcher.wait()


def test_standard_output_and_error_stay_apart(tmp_path: Path) -> None:
    script = "import sys; print('to out'); print('to error', file=sys.stderr)"
    with ranks(tmp_path, script, 2, stderr=subprocess.PIPE) as launcher:
        assert launcher.wait() == 0
        assert launcher.process.stderr is not None
        with launcher.process.stderr as stream:
            error = stream.read()
    assert sorted(launcher.output.splitlines()) == [
        b"[algo-1 rank 0] to out",
        b"[algo-1 rank 1] to out",
    ]
    assert b"[algo-1 rank 1] to error\n" in error
    assert b"to out" not in error


def test_the_prefix_can_be_switched_off(tmp_path: Path) -> None:
    with ranks(
        tmp_path, "print('bare')", 2, variables={"TRAINWORKS_LOG_PREFIX": "off"}
    ) as launcher:
        assert launcher.wait() == 0
    assert launcher.text.splitlines().count("bare") == 2


def test_a_prefix_that_is_neither_on_nor_off_is_refused(tmp_path: Path) -> None:
    with ranks(tmp_path, "", 2, variables={"TRAINWORKS_LOG_PREFIX": "of"}) as launcher:
        assert launcher.wait() == 64
    assert "did you mean 'off'?" in launcher.failure


def test_a_rank_may_open_its_standard_output_again(tmp_path: Path) -> None:
    script = (
        "print('first', flush=True)\n"
        "with open('/dev/stdout', 'w') as again: print('again', file=again)"
    )
    with ranks(tmp_path, script, 2) as launcher:
        assert launcher.wait() == 0
    for rank in range(2):
        assert f"[algo-1 rank {rank}] first\n" in launcher.text
        assert f"[algo-1 rank {rank}] again\n" in launcher.text


def test_a_rank_without_a_launcher_goes_on_with_the_output_it_has(tmp_path: Path) -> None:
    script = "import os; os.execv('/bin/sh', ['sh', '-c', 'echo still here'])"
    variables = {**os.environ, "TRAINWORKS_RUNTIME_DIRECTORY": str(tmp_path), "RANK": "0"}
    rank = Path(__file__).resolve().parents[2] / "launcher/trainworks_launcher/programs/rank.py"
    command = (sys.executable, "-I", str(rank), "--", sys.executable, "-c", script)
    done = subprocess.run(command, env=variables, capture_output=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, b"still here\n")
    assert b"runs without the launcher of its host" in done.stderr


def test_a_slow_reader_loses_nothing_and_the_cause_is_known_all_the_same(tmp_path: Path) -> None:
    """Leave our output unread until the job has decided its end: the pipe is full, and the
    traceback behind it.
    """
    script = "print('x' * 150_000)\nraise ValueError('behind a full pipe')"
    write_inputs(tmp_path, script, {}, {})
    with Launcher(tmp_path, stderr=subprocess.DEVNULL) as launcher:
        failure = tmp_path / "output/failure"
        while not failure.exists() and launcher.process.poll() is None:
            os.sched_yield()
        assert launcher.wait() == 1
    assert launcher.failure.startswith("ValueError: behind a full pipe\n")
    assert failure.read_text(encoding="utf-8") == f"{launcher.failure}\n", "ends with a newline"
    assert launcher.output == b"x" * 150_000 + b"\n"


def test_a_reader_that_takes_a_page_each_second_gets_every_line(tmp_path: Path) -> None:
    """It reads all the time, so the launcher does not leave before it has read the rest."""
    write_inputs(tmp_path, "print('x' * 40_000)", {}, {})
    never = threading.Event()
    with Launcher(tmp_path, stderr=subprocess.DEVNULL) as launcher:
        pipe = launcher.process.stdout
        assert pipe is not None
        # A pipe of one page: the launcher can write what was read, and no more.
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, select.PIPE_BUF)
        output = b""
        while page := os.read(pipe.fileno(), select.PIPE_BUF):
            output += page
            # The reader is slow on purpose; nothing is waited for.
            never.wait(1.0)
        assert launcher.wait() == 0
    assert output == b"x" * 40_000 + b"\n"


# --- failing ranks --------------------------------------------------------------------------------
def test_the_failing_rank_its_status_and_its_own_last_words(tmp_path: Path) -> None:
    script = """
import os, signal, sys
if os.environ["RANK"] == "2":
    print("rank 2 gives up", file=sys.stderr)
    sys.exit(42)
print("innocent " * 50)
"""
    with ranks(tmp_path, script, 4) as launcher:
        assert launcher.wait() == 42
    place = "train.py on host algo-1, rank 2 (mode torch_distributed): exit status 42"
    assert launcher.failure == f"{place}\nrank 2 gives up"
    document = json.loads((tmp_path / "output/failure.json").read_text(encoding="utf-8"))
    assert document == {
        "schema": 1,
        "kind": "failed",
        "status": 42,
        "mode": "torch_distributed",
        "host": "algo-1",
        "rank": 2,
        "cause": place,
        "text": launcher.failure,
        "retry": False,
        "restarts": 0,
        "lost_steps": 0,
        "earlier": [],
        "versions": {"launcher": __version__, "smdistributed": None},
    }


@pytest.mark.parametrize(
    ("manifest", "version"),
    [
        (
            Manifest(protected={"trainworks-smdistributed": "0.2.0"}, components={"smp": "0.2.0"}),
            "0.2.0",
        ),
        (Manifest(components={"smddp": "2.6.0"}), "2.6.0"),
        (Manifest(), None),
        (None, None),
    ],
)
def test_a_failure_says_with_which_versions(
    tmp_path: Path, manifest: Manifest | None, version: str | None
) -> None:
    outcome_files.write(
        str(tmp_path), Outcome("failed", 3, "algo-1", "why"), Redactor(), manifest=manifest
    )
    document = json.loads((tmp_path / "failure.json").read_text(encoding="utf-8"))
    assert document["versions"] == {"launcher": __version__, "smdistributed": version}


def test_a_secret_is_in_no_failure_text_and_in_no_line_of_ours(tmp_path: Path) -> None:
    script = "import os; raise ValueError('cannot log in with ' + os.environ['HUB_TOKEN'])"
    with ranks(tmp_path, script, 2, variables={"HUB_TOKEN": "s3cr3t-value"}) as launcher:
        assert launcher.wait() == 1
    assert launcher.failure.startswith("ValueError: cannot log in with ******\n")
    assert "s3cr3t-value" not in launcher.failure
    assert not [
        line
        for line in launcher.text.splitlines()
        if line.startswith("trainworks") and "s3cr3t" in line
    ]


@pytest.mark.parametrize("padding", [0, 300, 380, 500, 900])
def test_a_token_that_is_no_variables_value_leaves_no_part_of_it(
    tmp_path: Path, padding: int
) -> None:
    """Redact the token also where the text is shortened in its middle."""
    token = "ghp_" + "aB3dE5gH7j" * 4
    script = (
        f"raise ValueError('x' * {padding} + ' cannot clone"
        f" with ' + open('token').read() + ' y' * {padding})"
    )
    write_inputs(tmp_path, script, {}, {})
    (tmp_path / "code/token").write_text(token, encoding="ascii")
    with Launcher(tmp_path) as launcher:
        assert launcher.wait() == 1
    text = (
        launcher.failure
        + (tmp_path / "output/failure.json").read_text(encoding="utf-8")
        + launcher.text.splitlines()[-1]
    )
    assert "aB3dE5gH7j" not in text
    assert "ValueError: " in text


def test_a_stop_signal_reaches_each_rank_once_and_a_second_one_changes_nothing(
    tmp_path: Path,
) -> None:
    script = """
import os, signal, time
seen = []
def note(number, frame):
    seen.append(number)
    print("signal", len(seen), flush=True)
signal.signal(signal.SIGTERM, note)
print("ready", flush=True)
while not (seen and os.path.exists("enough")):
    time.sleep(0.05)
print("checkpoint after", len(seen), flush=True)
"""
    with ranks(tmp_path, script, 2) as launcher:
        launcher.read_until("ready", 2)
        launcher.process.send_signal(signal.SIGTERM)
        launcher.read_until("signal 1", 2)
        launcher.process.send_signal(signal.SIGTERM)
        launcher.read_until("SIGTERM again: it changes nothing, the ranks have theirs")
        (tmp_path / "code" / "enough").touch()
        assert launcher.wait() == 0
    assert launcher.text.count("checkpoint after 1\n") == 2
    assert "job stopped (exit status 0" in launcher.text
    assert not launcher.succeeded
    assert launcher.failure == ""


def test_what_a_rank_leaves_behind_in_a_session_of_its_own_is_ended(tmp_path: Path) -> None:
    script = (
        "import subprocess\n"
        "child = subprocess.Popen(['sleep', '300'], start_new_session=True, stdout=-3, stderr=-3)\n"
        "print('left', child.pid, 'end')"
    )
    with ranks(tmp_path, script, 1) as launcher:
        assert launcher.wait() == 0
    pid = int(launcher.text.partition("left ")[2].split()[0])
    state = Path(f"/proc/{pid}/stat")
    assert (
        not state.exists() or state.read_text(encoding="ascii").rpartition(")")[2].split()[0] == "Z"
    )


# --- values by file -------------------------------------------------------------------------------
@pytest.mark.parametrize("count", [0, 2])
def test_sixty_hyperparameters_of_2400_characters_train(tmp_path: Path, count: int) -> None:
    """More than the platform allows in all.

    SM_HPS is over the kernel's limit of one string, so it comes by file.
    """
    script = """
import json, os, sys
assert "SM_HPS" not in os.environ
values = json.load(open(os.environ["SM_HPS_FILE"]))
assert all(values[f"text{n}"] == "v" * 2400 for n in range(60)), values.keys()
assert os.environ["SM_HP_TEXT7"] == "v" * 2400
assert sys.argv[sys.argv.index("--text59") + 1] == "v" * 2400
print("all there")
"""
    hyperparameters: dict[str, Json] = {f"text{number}": "v" * 2400 for number in range(60)}
    if count:
        with ranks(tmp_path, script, count, hyperparameters=hyperparameters) as launcher:
            assert launcher.wait() == 0, launcher.text[-3000:]
    else:
        write_inputs(tmp_path, script, hyperparameters, {})
        with Launcher(tmp_path) as launcher:
            assert launcher.wait() == 0, launcher.text[-3000:]
    assert launcher.text.count("all there") == max(1, count)
    assert (
        "SM_HPS is too long for the kernel: SM_HPS_FILE names a file with its value"
        in launcher.text
    )


# --- hidden failures ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("line", "warned"),
    [
        ("python x.py | tee log; echo done", True),
        ("python x.py 2>&1 | tee log", True),
        ("python x.py || true", True),
        ("python x.py; echo goes on >&2", True),
        ("python x.py; python -c pass", False),
        ('python -c \'import subprocess as s; s.run(["python", "x.py"])\'', False),
        ("python -c 'print(1)' | tee log", False),
    ],
)
def test_a_shell_that_hides_a_traceback_is_warned(line: str, warned: bool, tmp_path: Path) -> None:
    write_inputs(tmp_path, "", {}, {})
    (tmp_path / "code/x.py").write_text("raise ValueError('boom')", encoding="ascii")
    (tmp_path / "code/run.sh").write_text(
        line.replace("python", sys.executable) + "\n", encoding="utf-8"
    )
    with Launcher(tmp_path, variables={"SAGEMAKER_PROGRAM": "run.sh"}) as launcher:
        assert launcher.wait() == 0
    message = "warning: the status is 0, and the last Python died of ValueError: boom"
    assert (message in launcher.text) is warned


# --- long texts -----------------------------------------------------------------------------------
STATE_DICT = """
keys = ", ".join(f'"model.layers.{number}.mlp.down_proj.weight"' for number in range(1440))
raise RuntimeError(
    f"Error(s) in loading state_dict for Llama:\\n\\tMissing key(s) in state_dict: {keys}. "
)
"""


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("script", "cause"),
    [
        (
            STATE_DICT,
            (
                "RuntimeError: Error(s) in loading state_dict for Llama:"
                " Missing key(s) in state_dict: "
            ),
        ),
        ("raise ValueError('no such file: ' + 'x' * 200_000)", "ValueError: no such file: xxx"),
        (
            "raise ValueError('\\n  '.join(['one of many:', *map(str, range(40_000))]))",
            "ValueError: one of many: 0",
        ),
    ],
)
def test_an_exception_with_a_long_text_keeps_its_type_and_beginning(
    script: str, cause: str, count: int, tmp_path: Path
) -> None:
    with ranks(tmp_path, script, count) as launcher:
        assert launcher.wait() == 1
    assert launcher.failure.startswith(cause)
    assert len(launcher.failure.encode()) <= 1024
    assert f": {cause}" in launcher.text.splitlines()[-1]
