"""Stop signals: before the supervisor runs, the time that is left for the failure file, and checkpoints."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from launcher_support import TIME_OUT, Launcher, environment, plan, write_inputs, write_manifest

from clock import assert_within
from trainworks_launcher.contract import names
from trainworks_launcher.contract.masking import Masker
from trainworks_launcher.contract.stop_signals import EarlyStops, StoppedError
from trainworks_launcher.contract.values import Json
from trainworks_launcher.given import platforms
from trainworks_launcher.given.platforms import PLATFORMS
from trainworks_launcher.supervise.outcome.outcome import Outcome
from trainworks_launcher.supervise.supervisor import run_plan
from trainworks_launcher.supervise.verdict.verdict import Verdict

PID_ONE = ("unshare", "--fork", "--pid", "--mount-proc", "--kill-child=SIGTERM")


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + TIME_OUT
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.01)


# ------------------------------------------------------------------------------------------ before the supervisor runs
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("prefix", [(), PID_ONE], ids=["child", "process one"])
def test_a_stop_signal_while_the_host_is_probed_ends_the_job_at_once(
    tmp_path: Path, prefix: tuple[str, ...], number: signal.Signals
) -> None:
    """An nvidia-smi that does not answer for a while stands for all that takes time before the supervisor runs."""
    if prefix and subprocess.run((*prefix, "true"), check=False, capture_output=True).returncode:
        pytest.skip("no PID namespace can be made here")
    probing = tmp_path / "probing"
    slow = tmp_path / "bin" / "nvidia-smi"
    slow.parent.mkdir()
    slow.write_text(f"#!/bin/sh\ntouch {probing}\nexec sleep 100\n", encoding="utf-8")
    slow.chmod(0o755)
    write_inputs(tmp_path, "print('ran')", {}, {})
    with Launcher(tmp_path, variables={"PATH": f"{slow.parent}:{os.environ['PATH']}"}, prefix=prefix) as made:
        wait_for(probing)
        stopped = time.monotonic()
        if prefix:
            made.signal_process_one(number)
        else:
            made.process.send_signal(number)
        assert made.wait() == 128 + number
        assert_within(3, stopped, time.monotonic(), made.text)
    assert made.failure == f"stopped by {number.name} before the program was started"
    assert f"job stopped (exit status {128 + number}" in made.text
    assert "ran\n" not in made.text
    assert "Traceback" not in made.text


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
    made = environment(base_directory=str(tmp_path))
    assert run_plan(plan(made), made, stopped=[signal.SIGTERM]) == 143
    text = (tmp_path / "output/failure").read_text(encoding="utf-8")
    assert text == "stopped by SIGTERM before the program was started"


# ------------------------------------------------------------------------------------------------ stops and checkpoints
SAVES_OR_NOT = """
import os, signal, sys
def stop(number, frame):
    if SAVES:
        open(os.environ["TRAINWORKS_CHECKPOINT_DIRECTORY"] + "/model", "w").close()
    sys.exit(STATUS)
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
signal.pause()
"""


@pytest.mark.parametrize(
    ("saves", "status", "place", "said"),
    [
        (False, 3, "checkpoints", True),
        (False, 0, "checkpoints", True),
        (True, 3, "checkpoints", False),
        (False, 3, "elsewhere", True),  # named by the variable
        (False, 3, "", False),  # it is not known where checkpoints would be
    ],
)
def test_a_stop_without_a_checkpoint_is_said(tmp_path: Path, saves: bool, status: int, place: str, said: bool) -> None:
    write_inputs(tmp_path, SAVES_OR_NOT.replace("SAVES", str(saves)).replace("STATUS", str(status)), {}, {})
    variables = {}
    if place:
        (tmp_path / place).mkdir()
        (tmp_path / place / "checkpoint-1").write_text("of an earlier job", encoding="utf-8")
        os.utime(tmp_path / place / "checkpoint-1", (1, 1))
    if place == "elsewhere":
        variables["TRAINWORKS_CHECKPOINT_DIRECTORY"] = str(tmp_path / place)
    with Launcher(tmp_path, variables=variables) as made:
        made.read_until("ready")
        made.process.send_signal(signal.SIGTERM)
        assert made.wait() == status
    words = f"; no checkpoint was written: no file in {tmp_path / place} is younger than the job"
    assert (words in made.text) is said
    assert made.failure.partition("\n")[0] == ("" if status == 0 else f"stopped by SIGTERM{words if said else ''}")


def test_the_last_host_to_end_does_not_hide_that_the_leader_saved_nothing(tmp_path: Path) -> None:
    stopped = Outcome("stopped", 143, "algo-2", "Traceback of algo-2", stopped="stopped by SIGTERM")
    directory = tmp_path / "checkpoints"
    directory.mkdir()
    made = environment(hosts=("algo-1", "algo-2"), checkpoint_directory=str(directory))
    verdict = Verdict(plan(made), str(tmp_path), Masker({}))
    assert verdict.judge(stopped) == stopped  # it was stopped before the start
    verdict.started_at = time.time()
    assert verdict.judge(stopped).text == (
        f"stopped by SIGTERM; no checkpoint was written: no file in {directory} is younger than the job\n"
        "Traceback of algo-2"
    )


# --------------------------------------------------------------------------------- the platform's time, its restarts
BATCH = {"AWS_BATCH_JOB_NUM_NODES": "1", "AWS_BATCH_JOB_NODE_INDEX": "0", "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0"}
SLURM = {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_STEP_NODELIST": "n1", "SLURM_NODEID": "0"}


@pytest.mark.parametrize(
    ("variables", "config", "grace", "restarts"),
    [
        ({}, {}, 5, "0"),  # docker stop
        ({"TRAINWORKS_HOSTS": "a", "TRAINWORKS_HOST": "a"}, {}, 5, "0"),
        ({}, {"hosts": ["algo-1"], "current_host": "algo-1"}, 115, "0"),
        (SLURM, {}, 25, "0"),
        ({**SLURM, "SLURM_RESTART_COUNT": "2"}, {}, 25, "2"),
        ({**SLURM, "SLURM_RESTART_COUNT": "x"}, {}, 25, "0"),
        ({**BATCH, "AWS_BATCH_JOB_ATTEMPT": "1"}, {}, 25, "0"),
        ({**BATCH, "AWS_BATCH_JOB_ATTEMPT": "3"}, {}, 25, "2"),
        ({"TRAINWORKS_STOP_GRACE_SECONDS": "60"}, {}, 60, "0"),
    ],
)
def test_the_grace_is_the_platforms_time_less_that_of_the_failure_file(
    variables: Mapping[str, str], config: Mapping[str, Json], grace: float, restarts: str
) -> None:
    platform = platforms.describe(platforms.Given(variables, config, "box"))
    made = plan(environment(variables={"PATH": "/bin", **variables}, platform=platform))
    assert made.limits.stop_grace == grace
    assert made.env["TRAINWORKS_RESTART_COUNT"] == restarts


def test_the_failure_file_is_there_in_time_where_nothing_obeys(tmp_path: Path) -> None:
    """A starter of ranks that ignores SIGTERM is told again before it is killed, which takes longest."""
    torchrun = tmp_path / "torchrun"
    torchrun.write_text("#!/bin/sh\ntrap '' TERM\necho ready\nwhile :; do sleep 100; done\n", encoding="utf-8")
    torchrun.chmod(0o755)
    image = write_manifest(tmp_path / "image.json", {"python": sys.executable, "torchrun": str(torchrun)})
    asked: dict[str, Json] = {"sagemaker_torch_distributed_enabled": "true"}
    write_inputs(tmp_path, "", asked, {})
    grace = 0.2
    variables = {"TRAINWORKS_IMAGE_MANIFEST": str(image), "TRAINWORKS_STOP_GRACE_SECONDS": str(grace)}
    with Launcher(tmp_path, variables=variables) as made:
        made.read_until("ready")
        stopped = time.monotonic()
        made.process.send_signal(signal.SIGTERM)
        assert made.wait() == 137
        assert_within(grace + names.STOP_RESERVE_SECONDS, stopped, time.monotonic(), made.text)
    assert made.failure.startswith("stopped by SIGTERM")


def test_every_platform_leaves_time_to_its_ranks_and_to_the_failure_file() -> None:
    assert [row.name for row in PLATFORMS.values() if row.stop_seconds < 2 * names.STOP_RESERVE_SECONDS] == []
