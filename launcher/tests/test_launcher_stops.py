"""Stop signals: before the supervisor runs, the time that is left for the
failure file, and checkpoints.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from launcher_support import (
    LAUNCHER,
    TIME_OUT,
    TRAIN,
    WAIT_FOR_SIGNALS,
    Launcher,
    environment,
    plan,
    write_inputs,
    write_manifest,
)

from trainworks_launcher.contract import names
from trainworks_launcher.contract.json_values import Json
from trainworks_launcher.contract.redaction import Redactor
from trainworks_launcher.contract.stop_signals import EarlyStops, StoppedError
from trainworks_launcher.environment import platforms
from trainworks_launcher.supervise.attribution.failure import Verdict
from trainworks_launcher.supervise.outcome.outcome import Outcome
from trainworks_launcher.supervise.supervisor import run_plan
from trainworks_testing.clock import assert_within

PID_ONE = ("unshare", "--fork", "--pid", "--mount-proc", "--kill-child=SIGTERM")


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + TIME_OUT
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.01)


# --- before the supervisor runs -------------------------------------------------------------------
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("prefix", [(), PID_ONE], ids=["child", "process one"])
def test_a_stop_signal_while_the_host_is_probed_ends_the_job_at_once(
    tmp_path: Path, prefix: tuple[str, ...], number: signal.Signals
) -> None:
    """An nvidia-smi that does not answer for a while stands for all that takes
    time before the supervisor runs.
    """
    if prefix and subprocess.run((*prefix, "true"), check=False, capture_output=True).returncode:
        pytest.skip("no PID namespace can be made here")
    probing = tmp_path / "probing"
    slow = tmp_path / "bin" / "nvidia-smi"
    slow.parent.mkdir()
    slow.write_text(f"#!/bin/sh\ntouch {probing}\nexec sleep 100\n", encoding="utf-8")
    slow.chmod(0o755)
    write_inputs(tmp_path, "print('ran')", {}, {})
    with Launcher(
        tmp_path, variables={"PATH": f"{slow.parent}:{os.environ['PATH']}"}, prefix=prefix
    ) as launcher:
        wait_for(probing)
        stopped = time.monotonic()
        if prefix:
            launcher.signal_process_one(number)
        else:
            launcher.process.send_signal(number)
        assert launcher.wait() == 128 + number
        assert_within(3, stopped, time.monotonic(), launcher.text)
    assert launcher.failure == f"stopped by {number.name} before the program was started"
    assert f"job stopped (exit status {128 + number}" in launcher.text
    assert "ran\n" not in launcher.text
    assert "Traceback" not in launcher.text


def test_a_stop_signal_is_raised_while_the_job_is_read_and_noted_once_it_is_planned() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with EarlyStops() as stops:
        with pytest.raises(StoppedError):
            os.kill(os.getpid(), signal.SIGTERM)
        stops.hold()
        os.kill(os.getpid(), signal.SIGINT)
        assert stops.numbers == [signal.SIGTERM, signal.SIGINT]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_noted_stop_signal_starts_nothing(tmp_path: Path) -> None:
    job_environment = environment(base_directory=str(tmp_path))
    assert run_plan(plan(job_environment), job_environment, stopped=[signal.SIGTERM]) == 143
    text = (tmp_path / "output/failure").read_text(encoding="utf-8")
    assert text == "stopped by SIGTERM before the program was started\n"


# --- stops and checkpoints ------------------------------------------------------------------------
SAVES_OR_NOT = (
    WAIT_FOR_SIGNALS
    + """
import os, signal, sys
def stop(number, frame):
    if SAVES:
        open(os.environ["TRAINWORKS_CHECKPOINT_DIRECTORY"] + "/model", "w").close()
    sys.exit(STATUS)
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
wait_for_signals()
"""
)


@pytest.mark.parametrize(
    ("saves", "status", "place", "is_said"),
    [
        (False, 3, "checkpoints", True),
        (False, 0, "checkpoints", True),
        (True, 3, "checkpoints", False),
        (False, 3, "elsewhere", True),  # named by the variable
        (False, 3, "", False),  # it is not known where checkpoints would be
    ],
)
def test_a_stop_without_a_checkpoint_is_said(
    tmp_path: Path, saves: bool, status: int, place: str, is_said: bool
) -> None:
    write_inputs(
        tmp_path, SAVES_OR_NOT.replace("SAVES", str(saves)).replace("STATUS", str(status)), {}, {}
    )
    variables = {}
    if place:
        (tmp_path / place).mkdir()
        (tmp_path / place / "checkpoint-1").write_text("of an earlier job", encoding="utf-8")
        os.utime(tmp_path / place / "checkpoint-1", (1, 1))
    if place == "elsewhere":
        variables["TRAINWORKS_CHECKPOINT_DIRECTORY"] = str(tmp_path / place)
    with Launcher(tmp_path, variables=variables) as launcher:
        launcher.read_until("ready")
        launcher.process.send_signal(signal.SIGTERM)
        assert launcher.wait() == status
    words = (
        f"; no checkpoint was written: no file in {tmp_path / place} is younger than the program's"
        " start"
    )
    assert (words in launcher.text) is is_said
    expected = "stopped by SIGTERM" if status else ""
    if status and is_said:
        expected += words
    assert launcher.failure.partition("\n")[0] == expected


def test_the_last_host_to_end_does_not_hide_that_the_leader_saved_nothing(tmp_path: Path) -> None:
    stopped = Outcome("stopped", 143, "algo-2", "Traceback of algo-2", stopped="stopped by SIGTERM")
    directory = tmp_path / "checkpoints"
    directory.mkdir()
    job_environment = environment(hosts=("algo-1", "algo-2"), checkpoint_directory=str(directory))
    verdict = Verdict(plan(job_environment), str(tmp_path), Redactor({}))
    assert verdict.judge(stopped) == stopped  # it was stopped before the start
    verdict.started_at = time.time()
    assert (
        verdict.judge(stopped).text
        == f"stopped by SIGTERM; no checkpoint was written: no file in {directory} is younger than"
        " the program's start\nTraceback of algo-2"
    )


# --- the platform's time, its restarts ------------------------------------------------------------
BATCH = {
    "AWS_BATCH_JOB_NUM_NODES": "1",
    "AWS_BATCH_JOB_NODE_INDEX": "0",
    "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
}
SLURM = {
    "SLURM_JOB_ID": "1",
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_STEP_NODELIST": "n1",
    "SLURM_NODEID": "0",
}
PLAIN = {"TRAINWORKS_HOSTS": "a", "TRAINWORKS_HOST": "a"}
SET = {"TRAINWORKS_STOP_GRACE_SECONDS": "60"}
SAGEMAKER: Mapping[str, Json] = {"hosts": ["algo-1"], "current_host": "algo-1"}


@pytest.mark.parametrize(
    ("variables", "config", "contained", "grace", "restarts"),
    [
        ({}, {}, True, None, "0"),  # docker stop
        (PLAIN, {}, True, None, "0"),
        ({}, SAGEMAKER, True, None, "0"),
        (SLURM, {}, False, None, "0"),
        ({**SLURM, "SLURM_RESTART_COUNT": "2"}, {}, True, None, "2"),
        ({**SLURM, "SLURM_RESTART_COUNT": "x"}, {}, True, None, "0"),
        ({**BATCH, "AWS_BATCH_JOB_ATTEMPT": "1"}, {}, True, None, "0"),
        ({**BATCH, "AWS_BATCH_JOB_ATTEMPT": "3"}, {}, True, None, "2"),
        # A shell on a machine: nothing but us would end it.
        (
            {},
            {},
            False,
            names.STOP_SECONDS,
            "0",
        ),
        (PLAIN, {}, False, names.STOP_SECONDS, "0"),
        ({"MASTER_ADDR": "a", "RANK": "0", "WORLD_SIZE": "1"}, {}, False, names.STOP_SECONDS, "0"),
        (SET, {}, True, 60, "0"),
        ({**SLURM, **SET}, {}, False, 60, "0"),
    ],
)
def test_a_bound_of_ours_exists_only_where_nothing_else_would_end_the_job(
    variables: Mapping[str, str],
    config: Mapping[str, Json],
    contained: bool,
    grace: float | None,
    restarts: str,
) -> None:
    platform = platforms.describe(platforms.Sources(variables, config, "box"))
    node_plan = plan(
        environment(variables={"PATH": "/bin", **variables}, platform=platform, contained=contained)
    )
    assert node_plan.limits.stop_grace == grace
    assert node_plan.env["TRAINWORKS_RESTART_COUNT"] == restarts


def test_a_process_of_a_container_is_known_by_its_namespace() -> None:
    """Read where this test runs and in a namespace of its own.

    One of the two is always a container's.
    """
    code = f"import sys; sys.path.insert(0, {str(LAUNCHER)!r})\n"
    code += "from trainworks_launcher.environment import cgroups; print(cgroups.is_contained())"
    inside = subprocess.run(
        (*PID_ONE, sys.executable, "-c", code), check=False, capture_output=True, text=True
    )
    if inside.returncode:
        pytest.skip(f"no PID namespace can be made here: {inside.stderr}")
    assert inside.stdout.strip() == "True"
    own = str(Path("/proc/self/ns/pid").readlink())
    outside = subprocess.run(
        (sys.executable, "-c", code), check=True, capture_output=True, text=True
    )
    assert outside.stdout.strip() == str(own != "pid:[4026531836]")


SAVES_LONG = """
import os, signal, sys, time
got = []
def stop(number, frame):
    got.append(number)
    print("got", number, flush=True)
    if len(got) > 1:
        return
    until = time.monotonic() + 7  # longer than the launcher has ever waited by itself
    while time.monotonic() < until or not os.path.exists("enough"):
        time.sleep(0.05)
    open(os.path.join(os.environ["SM_MODEL_DIR"], "checkpoint"), "w").write("whole")
    print("saved after", len(got), "signal(s)", flush=True)
    sys.exit(STATUS)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
print("ready", flush=True)
while True: time.sleep(0.1)
"""


@pytest.mark.parametrize("status", [0, 3])
def test_the_ranks_have_all_the_time_that_the_platform_leaves(tmp_path: Path, status: int) -> None:
    """The outcome is there while they save, further signals shorten nothing,
    and the files are written again.
    """
    if subprocess.run((*PID_ONE, "true"), check=False, capture_output=True).returncode:
        pytest.skip("no PID namespace can be made here")
    write_inputs(tmp_path, SAVES_LONG.replace("STATUS", str(status)), {}, {})
    (tmp_path / "model").mkdir()
    with Launcher(tmp_path, prefix=PID_ONE) as launcher:
        launcher.read_until("ready")
        launcher.signal_process_one(signal.SIGTERM)
        launcher.read_until("got 15")
        wait_for(tmp_path / "output/failure")
        document = json.loads((tmp_path / "output/failure.json").read_text(encoding="utf-8"))
        assert (document["kind"], document["status"], document["retry"]) == ("stopped", 143, True)
        assert document["cause"] == launcher.failure == "stopped by SIGTERM, the ranks are saving"
        for number in (
            signal.SIGTERM,
            signal.SIGINT,
            signal.SIGINT,
        ):
            # No terminal: Slurm, or a proxy of signals.
            launcher.signal_process_one(number)
            launcher.read_until(f"{number.name} again: it changes nothing")
        (tmp_path / "code/enough").touch()
        assert launcher.wait() == status, launcher.text
    assert (tmp_path / "model/checkpoint").read_text(encoding="ascii") == "whole"
    assert "saved after 1 signal(s)" in launcher.text
    assert "KILL itself" in launcher.text
    assert launcher.failure.partition("\n")[0] == ("stopped by SIGTERM" if status else "")
    assert (tmp_path / "output/failure.json").exists() is bool(status)
    assert not launcher.succeeded


SAVES_BEHIND_A_SHELL = """
import os, signal, sys, time
shell = os.getppid()
def stop(number, frame):
    print("got", number, flush=True)
    while not os.path.exists("enough"):
        time.sleep(0.05)
    whole = "whole" if os.getppid() == shell else "saved behind a shell that has died"
    open(os.path.join(os.environ["SM_MODEL_DIR"], "checkpoint"), "w").write(whole)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
while True: time.sleep(0.1)
"""

IN_FRONT = {
    "run.sh": f"#!/bin/bash\n{sys.executable} train.py 2>&1 | tee log\n",
    "trap.sh": f"#!/bin/bash\ntrap 'echo trapped' TERM\n{sys.executable} train.py\n",
    "wrapper.py": "import subprocess, sys\nsubprocess.run([sys.executable, 'train.py'])\n",
}
"""Programs that start the script, and wait for it."""


@pytest.mark.parametrize("program", IN_FRONT)
def test_a_program_in_front_of_the_script_does_not_cut_its_time_short(
    tmp_path: Path, program: str
) -> None:
    """A shell without a trap dies of SIGTERM, and the launcher took that for the program's end."""
    write_inputs(tmp_path, SAVES_BEHIND_A_SHELL, {"sagemaker_program": program}, {})
    (tmp_path / "code" / program).write_text(IN_FRONT[program], encoding="utf-8")
    (tmp_path / "model").mkdir()
    with Launcher(tmp_path) as launcher:
        launcher.read_until("ready")
        launcher.process.send_signal(signal.SIGTERM)
        launcher.read_until("got 15")
        wait_for(tmp_path / "output/failure")
        (tmp_path / "code/enough").touch()
        launcher.wait()
    assert (tmp_path / "model/checkpoint").read_text(encoding="ascii") == "whole", launcher.text
    assert "job stopped" in launcher.text
    assert launcher.text.count("got 15") == 1


def test_a_shell_does_not_go_on_with_its_next_line_after_a_stop(tmp_path: Path) -> None:
    write_inputs(tmp_path, SAVES_BEHIND_A_SHELL, {"sagemaker_program": "run.sh"}, {})
    os.mkfifo(tmp_path / "code/never")
    (tmp_path / "code/run.sh").write_text(
        f"#!/bin/bash\n{sys.executable} train.py\nread line < never\n", encoding="utf-8"
    )
    (tmp_path / "model").mkdir()
    (tmp_path / "code/enough").touch()
    with Launcher(tmp_path) as launcher:
        launcher.read_until("ready")
        launcher.process.send_signal(signal.SIGTERM)
        assert launcher.wait() == 143, launcher.text
    assert (tmp_path / "model/checkpoint").read_text(encoding="ascii") == "whole", launcher.text


HAS_A_HELPER = """
import subprocess, sys, time
HELPER = "import signal, time; signal.signal(15, lambda *_: None); print('helps', flush=True)"
subprocess.Popen([sys.executable, "-c", HELPER + "\\nwhile True: time.sleep(0.1)"])
while True: time.sleep(0.1)
"""
"""No handler for SIGTERM, and a helper that has one and goes on."""


def test_a_program_without_a_handler_does_not_wait_for_its_helper(tmp_path: Path) -> None:
    write_inputs(tmp_path, HAS_A_HELPER, {}, {})
    with Launcher(tmp_path) as launcher:
        launcher.read_until("helps")
        launcher.process.send_signal(signal.SIGTERM)
        assert launcher.wait() == 143, launcher.text


HAS_WORDS_OF_ITS_OWN = """
import os, signal, sys, time
folder = os.environ["SM_OUTPUT_DIR"]
def stop(*_):
    while not os.path.exists(folder + "/failure.json"):
        time.sleep(0.05)
    open(folder + "/failure", "w").write("saved at step 7")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
while True: time.sleep(0.1)
"""


def test_a_stopped_jobs_own_words_stay_without_those_of_the_launcher(tmp_path: Path) -> None:
    """The launcher's file still said that the ranks were saving, and that a retry makes sense."""
    write_inputs(tmp_path, HAS_WORDS_OF_ITS_OWN, {}, {})
    with Launcher(tmp_path) as launcher:
        launcher.read_until("ready")
        launcher.process.send_signal(signal.SIGTERM)
        assert launcher.wait() == 0, launcher.text
    assert launcher.failure == "saved at step 7"
    assert not (tmp_path / "output/failure.json").exists()


def test_a_second_interrupt_at_a_terminal_ends_the_ranks_now(tmp_path: Path) -> None:
    """Use a pseudo-terminal, a launcher that it controls, and the signal that Ctrl-C sends."""
    write_inputs(tmp_path, SAVES_LONG.replace("STATUS", "0"), {}, {})
    variables = {
        **os.environ,
        "SAGEMAKER_BASE_DIR": str(tmp_path),
        "TRAINWORKS_IMAGE_MANIFEST": "",
        "TMPDIR": "/tmp",
    }
    child, terminal = pty.fork()
    if not child:
        os.execve(TRAIN[0], TRAIN, variables)
    shown = b""

    def read_until(words: bytes) -> None:
        nonlocal shown
        while words not in shown:
            assert select.select([terminal], [], [], TIME_OUT)[0], shown
            shown += os.read(terminal, 65536)

    try:
        read_until(b"ready")
        os.write(terminal, b"\x03")
        read_until(b"got 2")
        os.write(terminal, b"\x03")
        read_until(b"SIGINT again: the ranks of all hosts are ended now")
        _, wait_status = os.waitpid(child, 0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.close(terminal)
    assert os.waitstatus_to_exitcode(wait_status) == 137
    assert (tmp_path / "output/failure").read_text(encoding="utf-8").startswith("stopped by SIGINT")


def test_the_line_of_a_bound_names_its_setting(tmp_path: Path) -> None:
    """A starter of ranks that ignores SIGTERM is told again before it is
    killed, which takes longest.
    """
    torchrun = tmp_path / "torchrun"
    torchrun.write_text(
        "#!/bin/sh\ntrap '' TERM\necho ready\nwhile :; do sleep 100; done\n", encoding="utf-8"
    )
    torchrun.chmod(0o755)
    image = write_manifest(
        tmp_path / "image.json", {"python": sys.executable, "torchrun": str(torchrun)}
    )
    hyperparameters: dict[str, Json] = {"sagemaker_torch_distributed_enabled": "true"}
    write_inputs(tmp_path, "", hyperparameters, {})
    variables = {"TRAINWORKS_IMAGE_MANIFEST": str(image), "TRAINWORKS_STOP_GRACE_SECONDS": "0.2"}
    with Launcher(tmp_path, variables=variables) as launcher:
        launcher.read_until("ready")
        launcher.process.send_signal(signal.SIGTERM)
        assert launcher.wait() == 137
    assert "KILL follows in 0.2 s (TRAINWORKS_STOP_GRACE_SECONDS)" in launcher.text
    assert "TRAINWORKS_STOP_GRACE_SECONDS=0.2 is over: KILL" in launcher.text
    assert launcher.failure.startswith("stopped by SIGTERM")
