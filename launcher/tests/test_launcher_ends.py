"""Test the end of a job whose starter is wrong about its ranks, or outlives them: real processes
under stand-ins for starters.

The stand-ins keep the order of words and the variables of mpirun and torchrun. Then they act as a
test says.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest
from launcher_support import WAIT_FOR_SIGNALS, Launcher, write_inputs, write_manifest

from trainworks_launcher.contract.json_values import Json
from trainworks_launcher.supervise.attribution.stuck_starter import options_of_starter

STARTER = """#!{python}
import os, signal, subprocess, sys, time

words = sys.argv[1:]
if {mpi}:
    count = int(words[words.index("-np") + 1])
    while not (words[0].endswith("python") or "python3" in words[0]):
        words = words[1:]
    command = words
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE")
else:
    option = "--nproc-per-node="
    count = next(int(word[len(option) :]) for word in words if word.startswith(option))
    command = words[words.index("--no-python") + 1 :]
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")

def start():
    ranks = []
    for rank in range(count):
        values = (str(rank), str(rank), str(count))
        ranks.append(subprocess.Popen(command, env=dict(os.environ, **dict(zip(names, values)))))
    return ranks

ranks = start()
{end}
"""
WAIT_FOR_ALL = "[rank.wait() for rank in ranks]\n"
STAYS = WAIT_FOR_ALL + "signal.pause()"
LAST_FAILS = """
import os, signal, sys
rank = int(os.environ.get("RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
if rank == 2:
    END
"""


def job(base: Path, mode: str, end: str, script: str, **more: Json) -> Launcher:
    """A job of three ranks on one host, whose starter is a stand-in."""
    base.mkdir(exist_ok=True)
    program = "mpirun" if mode == "mpi" else "torchrun"
    starter = base / program
    starter.write_text(
        STARTER.format(python=sys.executable, mpi=mode == "mpi", end=end), encoding="utf-8"
    )
    starter.chmod(0o755)
    manifest = write_manifest(
        base / "image.json", {"python": sys.executable, program: str(starter)}, components={}
    )
    hyperparameters: dict[str, Json] = {
        f"sagemaker_{mode}_enabled": "true",
        "sagemaker_mpi_num_of_processes_per_host": 3,
        **more,
    }
    write_inputs(base, script, hyperparameters, {"hosts": ["algo-1"], "current_host": "algo-1"})
    return Launcher(base, variables={"TRAINWORKS_IMAGE_MANIFEST": str(manifest)})


def failure_report(base: Path) -> dict[str, Json]:
    document: dict[str, Json] = json.loads(
        (base / "output/failure.json").read_text(encoding="utf-8")
    )
    return document


@pytest.mark.parametrize("mode", ["mpi", "torch_distributed"])
@pytest.mark.parametrize(
    ("end", "status", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by SIGKILL"),
        ("raise ValueError('the batch is empty')", 1, "ValueError: the batch is empty"),
    ],
)
def test_a_starter_that_outlives_its_ranks_is_ended(
    tmp_path: Path, mode: str, end: str, status: int, words: str
) -> None:
    with job(tmp_path, mode, STAYS, LAST_FAILS.replace("END", end)) as launcher:
        assert launcher.wait() == status
    assert words in launcher.failure
    assert failure_report(tmp_path)["rank"] == 2
    assert "has not ended 10 s after its ranks" in launcher.text


def test_an_argument_of_the_script_is_no_option_of_mpirun(tmp_path: Path) -> None:
    """mpirun goes on after a failure with ``--mca orte_enable_recovery 1``; the script has the
    argument ``--recover``.
    """
    script = LAST_FAILS.replace("END", "sys.exit(3)") + "signal.pause()"
    with job(tmp_path, "mpi", STAYS, script, recover="yes") as made:
        assert made.wait() == 3, made.text
    assert failure_report(tmp_path)["rank"] == 2
    assert "has not ended 10 s after its ranks" in made.text


@pytest.mark.parametrize(
    ("line", "options"),
    [
        (
            "torchrun --max-restarts=3 /opt/programs/rank.py -- train.py --max-restarts=many",
            "torchrun --max-restarts=3",
        ),
        ("torchrun --nnodes=1 train.py", "torchrun --nnodes=1 train.py"),
        ("", ""),
    ],
)
def test_the_options_of_a_starter_end_before_the_users_program(line: str, options: str) -> None:
    assert list(options_of_starter(line.split())) == options.split()


def test_ranks_that_all_end_well_are_a_success_whatever_becomes_of_mpirun(tmp_path: Path) -> None:
    with job(tmp_path, "mpi", STAYS, "") as launcher:
        assert launcher.wait() == 0, launcher.text
    assert launcher.succeeded


def test_a_failed_rank_that_its_agent_starts_again_is_not_the_end(tmp_path: Path) -> None:
    """The agent takes longer for that than a starter may live after its ranks."""
    script = LAST_FAILS.replace("END", "sys.exit(0 if 'AGAIN' in os.environ else 3)")
    again = (
        WAIT_FOR_ALL + "time.sleep(13); os.environ['AGAIN'] = '1'; ranks = start()\n" + WAIT_FOR_ALL
    )
    with job(
        tmp_path, "torch_distributed", again, script, sagemaker_torch_distributed_max_restarts=1
    ) as launcher:
        assert launcher.wait() == 0, launcher.text
    assert launcher.succeeded


def test_a_rank_that_ends_well_while_others_run_is_not_the_end(tmp_path: Path) -> None:
    script = "import os, time\ntime.sleep(0 if os.environ['OMPI_COMM_WORLD_RANK'] == '0' else 13)"
    with job(tmp_path, "mpi", WAIT_FOR_ALL, script) as launcher:
        assert launcher.wait() == 0, launcher.text
    assert launcher.succeeded


def test_the_host_is_believed_and_not_mpirun_which_names_a_peer(tmp_path: Path) -> None:
    """Rank 2 dies, rank 0 aborts for that, and mpirun tells of rank 0."""
    end = """
ranks[2].wait()
time.sleep(1)
ranks[0].send_signal(signal.SIGUSR1)
[rank.wait() for rank in ranks]
print("The first process to do so was:\\n")
print("   Process name: [prterun-algo-1-1@1,0]\\n   Exit code:    14\\n")
sys.exit(14)
"""
    script = (
        WAIT_FOR_SIGNALS
        + LAST_FAILS.replace("END", "os.kill(os.getpid(), signal.SIGKILL)")
        + "signal.signal(signal.SIGUSR1, lambda *_: os._exit(14))\n"
        + "if rank == 0: wait_for_signals()\n"
    )
    with job(tmp_path, "mpi", end, script) as launcher:
        assert launcher.wait() == 137, launcher.text
    assert failure_report(tmp_path)["rank"] == 2
    assert "rank 2 (mode mpi): killed by SIGKILL" in launcher.failure


@pytest.mark.parametrize("mode", ["mpi", "torch_distributed"])
def test_a_rank_that_somebody_ends_by_sigterm_is_the_first_to_fail(
    tmp_path: Path, mode: str
) -> None:
    """Let the starter end the others for that rank, and one of them fail of it."""
    end = """
ranks[2].wait()
for rank in ranks:
    rank.terminate()
[rank.wait() for rank in ranks]
if words[0].startswith("--n"):
    print("Root Cause (first observed failure):")
    print("  rank      : 2 (local_rank: 2)\\n  exitcode  : -15 (pid: 1)")
else:
    noticed = "mpirun noticed that process rank 2 with PID 1 on node algo-1"
    print(noticed, "exited on signal 15 (Terminated).")
sys.exit(1)
"""
    script = (
        WAIT_FOR_SIGNALS
        + LAST_FAILS.replace("END", "os.kill(os.getpid(), signal.SIGTERM)")
        + "signal.signal(signal.SIGTERM, lambda *_: sys.exit(9 if rank else 15))\n"
        + "wait_for_signals()\n"
    )
    with job(tmp_path, mode, end, script) as launcher:
        assert launcher.wait() == 143, launcher.text
    assert failure_report(tmp_path)["rank"] == 2


def test_a_starter_that_somebody_ends_is_not_told_as_a_rank(tmp_path: Path) -> None:
    end = "[rank.terminate() for rank in ranks]; [rank.wait() for rank in ranks]; sys.exit(7)"
    with job(tmp_path, "torch_distributed", end, "import signal; signal.pause()") as launcher:
        assert launcher.wait() == 7, launcher.text
    assert failure_report(tmp_path)["rank"] is None


def test_the_status_of_a_rank_is_known_also_after_its_starter_has_taken_it(tmp_path: Path) -> None:
    """mpirun reaps its ranks at once, and here it says nothing.

    A kernel before 6.15 may lose that race.
    """
    with job(
        tmp_path, "mpi", WAIT_FOR_ALL + "sys.exit(1)", LAST_FAILS.replace("END", "os._exit(17)")
    ) as launcher:
        assert launcher.wait() == 17, launcher.text
    assert "rank 2 (mode mpi): exit status 17" in launcher.failure


SAVES_BEHIND_A_SHELL = """
import os, signal, sys, time
def stop(number, frame):
    print("got", number, flush=True)
    while not os.path.exists("enough"):
        time.sleep(0.05)
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
while True: time.sleep(0.1)
"""


@pytest.mark.parametrize("mode", ["mpi", "torch_distributed"])
def test_ranks_behind_shells_get_a_stop_signal_and_their_time(tmp_path: Path, mode: str) -> None:
    """Only the shell of each rank got the signal, and died of it."""
    shell = tmp_path / "code/run.sh"
    shell.parent.mkdir()
    shell.write_text(f"{sys.executable} train.py\n:\n", encoding="utf-8")
    launcher = job(tmp_path, mode, WAIT_FOR_ALL, SAVES_BEHIND_A_SHELL, sagemaker_program="run.sh")
    with launcher:
        launcher.read_until("ready", 3)
        launcher.process.send_signal(signal.SIGTERM)
        launcher.read_until("got 15", 3)
        (tmp_path / "code/enough").touch()
        launcher.wait()
    assert launcher.text.count("saved") == 3, launcher.text
    assert "job stopped" in launcher.text
