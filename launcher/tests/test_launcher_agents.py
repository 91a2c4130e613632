"""Test the commands that mpirun's agent starts on another host: by way of both launchers, and ended
with the job.

A stand-in for mpirun: any program that runs the agent of its command line with
a host and words, as Open MPI does.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from launcher_support import (
    LAUNCHER,
    TIME_OUT,
    Launcher,
    pids_with_variable,
    write_inputs,
    write_manifest,
)
from test_launcher_processes import LEADER, WORKER, two_hosts

from trainworks_launcher.contract.json_values import Json
from trainworks_launcher.supervise.outcome.starter_reports import find_mpirun_reason
from trainworks_launcher.supervise.processes import mpirun_agents, output
from trainworks_launcher.supervise.processes.processes import Child

MPI: dict[str, Json] = {"sagemaker_mpi_enabled": "true"}
RANK = LAUNCHER / "trainworks_launcher/programs/rank.py"
MPIRUN = f"""#!{sys.executable}
import os, signal, subprocess, sys
agent = sys.argv[sys.argv.index("plm_ssh_agent") + 1].split()
def run(*words, host="{WORKER}"):
    done = subprocess.run((*agent, host, *words), capture_output=True, text=True)
    print("status", done.returncode, "said", done.stderr.strip(), flush=True)
def begin_a_rank(fifo):
    # From then on a command that fails is no daemon that could not start.
    rank = ("OMPI_COMM_WORLD_RANK=1", "{sys.executable}", "-I", "{RANK}")
    run(*rank, "--", "sh", "-c", f"'echo here >{{fifo}}'")
    open(fifo).readline()
"""


def image(tmp_path: Path, mpirun: str) -> dict[str, str]:
    """The variable that names an image with this mpirun."""
    program = tmp_path / "mpirun"
    program.write_text(MPIRUN + mpirun, encoding="utf-8")
    program.chmod(0o755)
    manifest_file = write_manifest(
        tmp_path / "image.json", {"python": sys.executable, "mpirun": str(program)}
    )
    return {"TRAINWORKS_IMAGE_MANIFEST": str(manifest_file)}


def wait_for_end(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    assert select.select([descriptor], [], [], TIME_OUT)[0], f"process {pid} goes on"
    os.close(descriptor)


def pid_in(launcher: Launcher) -> int:
    launcher.read_until("started ")
    launcher.read_until("\n", launcher.output.count(b"\n"))
    return int(launcher.text.partition("started ")[2].split()[0])


def test_words_run_on_the_other_host_and_the_agent_waits_for_none(tmp_path: Path) -> None:
    here, gate, after = (tmp_path / name for name in ("here", "gate", "after"))
    for fifo in (here, gate, after):
        os.mkfifo(fifo)
    mpirun = (
        f"begin_a_rank({str(here)!r})\n"
        f"run('NAME=value ; export NAME ; read line <{gate};',"
        " 'sh', '-c', '\"echo host $SM_CURRENT_HOST $NAME $TMPDIR\"')\n"
        "run('echo', 'why', '>&2;', 'exit', '3')\n"
        "run('true', host='elsewhere')\n"
        f"run('true', host='{LEADER}')\n"
        "run('x' * 70000)\n"
        f"open({str(gate)!r}, 'w').write('go\\n')\n"
        f"open({str(after)!r}).readline()\n"
    )
    release = os.open(after, os.O_RDWR)
    with two_hosts(tmp_path, "", hyperparameters=MPI, variables=image(tmp_path, mpirun)) as (
        leader,
        worker,
    ):
        worker.read_until("host ")
        worker.read_until("why")
        os.write(release, b"\n")
        assert (leader.wait(), worker.wait()) == (0, 0), leader.text + worker.text
    lines = [line for line in leader.text.splitlines() if line.startswith("status ")]
    where = "is not another host of this job, or mpirun has ended"
    assert lines == [
        *["status 0 said "] * 3,
        *(f"status 255 said trainworks: {host!r} {where}" for host in ("elsewhere", LEADER)),
        "status 255 said trainworks: mpirun's command has more than 60000 bytes",
    ]
    os.close(release)
    line = next(line for line in worker.text.splitlines() if line.startswith("host "))
    assert line.startswith(
        f"host {WORKER} value {(tmp_path / WORKER / 'tmp').resolve()}/trainworks-"
    ), line


def test_a_daemon_that_cannot_start_ends_the_job_and_its_host_is_named(tmp_path: Path) -> None:
    mpirun = "run('echo no such file >&2; exit 127')\nsignal.pause()\n"
    with two_hosts(tmp_path, "", hyperparameters=MPI, variables=image(tmp_path, mpirun)) as (
        leader,
        worker,
    ):
        assert (leader.wait(), worker.wait()) == (66, 66), leader.text + worker.text
    expected = (
        f"mpirun's daemon on host {WORKER} ended before it had started a rank: exit status 127\n"
        "no such file"
    )
    assert leader.failure == worker.failure == expected


def test_what_an_agent_started_ends_with_the_job(tmp_path: Path) -> None:
    """End also a process that has left its session, as mpirun's daemons do.

    With mpirun, and with a launcher that is killed.
    """
    mpirun = "run('echo started $$; exec sleep 1000')\nrun('setsid sleep 1001 >/dev/null 2>&1 &')\n"
    ends = {"TERM": "signal.pause()", "KILL": "signal.pause()", "itself": "os.kill(os.getpid(), 9)"}
    for name, end in ends.items():
        base = tmp_path / name
        base.mkdir()
        with two_hosts(
            base, "", hyperparameters=MPI, variables=image(base, mpirun + end + "\n")
        ) as (leader, worker):
            pid = pid_in(worker)
            leader.read_until("status 0", 2)
            if name != "itself":
                leader.process.send_signal(signal.Signals[f"SIG{name}"])
            leader.wait()
            assert worker.wait() != 0
            wait_for_end(pid)
            for host in (leader, worker):
                assert pids_with_variable("SAGEMAKER_BASE_DIR", str(host.base)) == []


CALLER = f"""
import os, signal, subprocess, sys
agent = [sys.executable, "-I", "{LAUNCHER}/trainworks_launcher/programs/agent.py"]
def run(*words, host="{WORKER}"):
    done = subprocess.run([*agent, host, *words], capture_output=True, text=True)
    print("status", done.returncode, "said", done.stderr.strip().replace("\\n", " / "), flush=True)
if os.environ["SM_CURRENT_HOST"] == "LEADS":
"""


def called(asks: str, *lines: str) -> str:
    """A program that calls the agent on one host, as the mpirun that it starts does."""
    return CALLER.replace("LEADS", asks) + "".join(f"    {line}\n" for line in (*lines, "pass"))


def test_without_a_distribution_an_agent_waits_as_ssh_does(tmp_path: Path) -> None:
    """The other host's own program has ended before, or has not."""
    lines = (
        "run('echo', 'on', '$SM_CURRENT_HOST')",
        "run('echo why >&2; exit 3')",
        "run('kill', '-15', '$$')",
        "run('true', host='elsewhere')",
        "run('true', host='localhost')",
        "run('x' * 70000)",
    )
    with two_hosts(tmp_path, called(LEADER, *lines)) as (leader, worker):
        assert (leader.wait(), worker.wait()) == (0, 0), leader.text + worker.text
    matching_lines = [line for line in leader.text.splitlines() if line.startswith("status ")]
    reason, where = (
        f"trainworks: what mpirun started on {WORKER} ended:",
        "is not another host of this job",
    )
    assert matching_lines == [
        "status 0 said ",
        f"status 3 said {reason} exit status 3 / why",
        f"status 143 said {reason} killed by SIGTERM (exit status 143)",
        f"status 255 said trainworks: 'elsewhere' {where}, or mpirun has ended",
        f"status 255 said trainworks: 'localhost' {where}, or mpirun has ended",
        "status 255 said trainworks: mpirun's command has more than 60000 bytes",
    ]
    assert f"on {WORKER}\n" in worker.text


def test_a_copy_of_a_script_that_calls_mpirun_waits_and_ends_as_the_first_hosts_does(
    tmp_path: Path,
) -> None:
    """Both hosts run the script, as docs/migrate.md says.

    The status is that of the first one, and of its ranks.
    """
    script = (
        CALLER.partition("if os.environ")[0] + "if os.environ['SM_CURRENT_HOST'] == '{leader}':\n"
        "    open({came!r}).readline()\n"
        "    run('echo', 'rank', 'on', '$SM_CURRENT_HOST')\n"
        "    sys.exit({status})\n"
        "asked = subprocess.Popen([*agent, '{leader}', 'true'])\n"
        "print('asks', flush=True)\n"
        "asked.wait()\n"
        "print('went on', flush=True)\n"
    )
    for status in (0, 9):
        base = tmp_path / str(status)
        base.mkdir()
        came = base / "came"
        os.mkfifo(came)
        filled = script.format(leader=LEADER, came=str(came), status=status)
        with two_hosts(base, filled) as (leader, worker):
            worker.read_until("the program here waits")
            came.write_text("go\n", encoding="utf-8")
            assert (leader.wait(), worker.wait()) == (status, status), leader.text + worker.text
        assert f"rank on {WORKER}\n" in worker.text
        assert "went on" not in worker.text
        assert "warning: mpirun was called on this host alone" not in worker.text
        assert leader.failure == worker.failure
        assert leader.succeeded == worker.succeeded == (status == 0)


def test_a_mpirun_that_only_another_host_calls_starts_nothing_and_says_so(tmp_path: Path) -> None:
    with two_hosts(tmp_path, called(WORKER, f"run('true', host='{LEADER}')")) as (leader, worker):
        assert (leader.wait(), worker.wait()) == (0, 0), leader.text + worker.text
    assert "warning: mpirun was called on this host alone, not on the first one" in worker.text


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="NOT TESTED: no mpirun is here")
def test_the_cause_of_a_scripts_mpirun_that_could_not_start_is_its_reason(tmp_path: Path) -> None:
    """A real Open MPI, which asks for more slots than there are and ends with a
    status that says nothing.
    """
    write_inputs(tmp_path, "", {}, {})
    (tmp_path / "code/run.sh").write_text(
        "mpirun --allow-run-as-root --host localhost:1 -np 7 true\n", encoding="utf-8"
    )
    write_inputs(tmp_path, "", {"sagemaker_program": "run.sh"}, {})
    with Launcher(tmp_path) as launcher:
        assert launcher.wait() not in (0, 64), launcher.text
    assert launcher.failure.startswith(
        "There are not enough slots available in the system to satisfy the 7 slots"
    ), launcher.text


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (
            (
                f"{'-' * 40}\n"
                "PRTE has lost communication with a remote daemon.\n"
                "\n"
                "  HNP daemon: x\n"
                f"{'-' * 40}\n"
            ),
            "PRTE has lost communication with a remote daemon",
        ),
        ("-" * 40 + "\n| epoch | loss |\n" + "-" * 40 + "\n", ""),
        ("Traceback: mpirun\n", ""),
    ],
)
def test_only_mpiruns_own_help_is_a_reason(message: str, reason: str) -> None:
    assert find_mpirun_reason(message.encode()) == reason


def test_what_a_programs_agent_started_ends_with_the_job(tmp_path: Path) -> None:
    """End also a process that has left its session, and after the agent has gone."""
    for name, line in {
        "waits": "exec sleep 1000",
        "gone": "setsid sleep 1001 >/dev/null 2>&1 &",
    }.items():
        base = tmp_path / name
        base.mkdir()
        lines = (
            f"agent = subprocess.Popen([*agent, '{WORKER}', 'echo started $$; {line}'])",
            "signal.pause()",
        )
        with two_hosts(base, called(LEADER, *lines)) as (leader, worker):
            pid = pid_in(worker)
            leader.process.send_signal(signal.SIGTERM)
            leader.wait()
            assert worker.wait() != 0
            wait_for_end(pid)
            for host in (leader, worker):
                assert pids_with_variable("SAGEMAKER_BASE_DIR", str(host.base)) == []


def test_check_says_who_may_join_and_lead(tmp_path: Path) -> None:
    hosts = {
        "TRAINWORKS_HOSTS": "one,two",
        "TRAINWORKS_HOST": "two",
        "TRAINWORKS_CONTROL_PORT": "7999",
    }
    secret = {"TRAINWORKS_JOB_SECRET": "0123456789abcdef0123456789abcdef"}
    expected = {
        "without TRAINWORKS_JOB_SECRET: who comes first may join, or lead and start programs": (
            hosts
        ),
        "with TRAINWORKS_JOB_SECRET: only who knows it may join or lead": {**hosts, **secret},
    }
    for sentence, variables in expected.items():
        with Launcher(tmp_path, "check", variables=variables) as launcher:
            launcher.wait()
        assert f"the launchers of this job talk on port 7999 of one, {sentence}\n" in launcher.text


# --- a daemon that is lost ------------------------------------------------------------------------
def test_an_orphans_status_counts_when_nothing_is_left_that_could_start_a_rank(
    tmp_path: Path,
) -> None:
    """The starts of a daemon leave other processes behind.

    One of these may fail while the daemon comes up.
    """
    reports: list[str] = []
    alive = [True]
    shown = output.Output()
    started: list[Child] = []

    def start(argv: Sequence[str]) -> Child:
        started.append(Child(argv, {"PATH": os.environ["PATH"]}, str(tmp_path), shown, b""))
        return started[-1]

    daemons = mpirun_agents.Daemons(
        start,
        has_ranks=lambda: False,
        may_start_ranks=lambda: alive[0],
        tell=lambda kind, **fields: reports.append(
            f"{kind} {fields['status']} {fields['certain']}"
        ),
    )
    daemons.start(LEADER, {"line": "exit 0"})
    deadline = time.monotonic() + TIME_OUT
    while daemons.pids and time.monotonic() < deadline:
        os.waitid(os.P_PID, started[0].pid, os.WEXITED | os.WNOWAIT)
        daemons.reap()
    daemons.orphans_ended([3])
    daemons.orphans_ended([0])
    assert reports == [], "the daemon, or what it has started, still runs"
    alive[0] = False
    daemons.orphans_ended([])
    daemons.orphans_ended([])
    shown.close()
    assert reports == [f"{mpirun_agents.LOST} 3 False"]
