"""What mpirun's agent starts on another host: by way of both launchers, and ended with whoever asked for it.

A stand-in for mpirun: any program that runs the agent of its command line with a host and words, as Open MPI does.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from pathlib import Path

from launcher_support import LAUNCHER, TIME_OUT, Launcher, pids_with_variable, write_manifest
from test_launcher_processes import LEADER, WORKER, two_hosts

from trainworks_launcher.contract.values import Json

MPI: dict[str, Json] = {"sagemaker_mpi_enabled": "true"}
RANK = LAUNCHER / "trainworks_launcher/programs/rank.py"
MPIRUN = f"""#!{sys.executable}
import os, signal, subprocess, sys
agent = sys.argv[sys.argv.index("plm_ssh_agent") + 1].split()
def run(*words, host="{WORKER}"):
    done = subprocess.run((*agent, host, *words), capture_output=True, text=True)
    print("status", done.returncode, "said", done.stderr.strip(), flush=True)
def begin_a_rank():
    # From then on a command that fails is no daemon that could not start.
    run("OMPI_COMM_WORLD_RANK=1", "{sys.executable}", "-I", "{RANK}", "--", "true")
def start(*words):
    return subprocess.Popen((*agent, "{WORKER}", *words))
"""


def image(tmp_path: Path, mpirun: str) -> dict[str, str]:
    """The variable that names an image with this mpirun."""
    program = tmp_path / "mpirun"
    program.write_text(MPIRUN + mpirun, encoding="utf-8")
    program.chmod(0o755)
    made = write_manifest(tmp_path / "image.json", {"python": sys.executable, "mpirun": str(program)})
    return {"TRAINWORKS_IMAGE_MANIFEST": str(made)}


def wait_for_end(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    assert select.select([descriptor], [], [], TIME_OUT)[0], f"process {pid} goes on"
    os.close(descriptor)


def pid_in(made: Launcher) -> int:
    made.read_until("started ")
    made.read_until("\n", made.output.count(b"\n"))
    return int(made.text.partition("started ")[2].split()[0])


def test_words_run_on_the_other_host_and_their_status_comes_back(tmp_path: Path) -> None:
    mpirun = (
        "begin_a_rank()\n"
        "run('NAME=value ; export NAME ;', 'sh', '-c', '\"echo host $SM_CURRENT_HOST $NAME $TMPDIR\"')\n"
        "run('echo', 'why', '>&2;', 'exit', '3')\n"
        "run('kill', '-9', '$$')\n"
        "run('/does/not/exist')\n"
        "run('true', host='elsewhere')\n"
        f"run('true', host='{LEADER}')\n"
        "run('x' * 70000)\n"
    )
    variables = image(tmp_path, mpirun)
    with two_hosts(tmp_path, "", hyperparameters=MPI, variables=variables) as (leader, worker):
        assert (leader.wait(), worker.wait()) == (0, 0), leader.text + worker.text
    said = [line for line in leader.text.splitlines() if line.startswith("status ")]
    assert said[:4] == ["status 0 said ", "status 0 said ", "status 3 said why", "status 137 said "]
    assert said[4].startswith("status 127 said ")
    assert "/does/not/exist" in said[4]
    where = "is not another host of this job, or mpirun has ended"
    assert said[5:7] == [f"status 255 said trainworks: {host!r} {where}" for host in ("elsewhere", LEADER)]
    assert said[7] == "status 255 said trainworks: mpirun's command has more than 60000 bytes"
    line = next(line for line in worker.text.splitlines() if line.startswith("host "))
    assert line.startswith(f"host {WORKER} value {tmp_path / WORKER / 'tmp'}/trainworks-"), line


def test_a_daemon_that_cannot_start_ends_the_job_and_its_host_is_named(tmp_path: Path) -> None:
    mpirun = "start('echo no such file >&2; exit 127')\nsignal.pause()\n"
    with two_hosts(tmp_path, "", hyperparameters=MPI, variables=image(tmp_path, mpirun)) as (leader, worker):
        assert (leader.wait(), worker.wait()) == (66, 66), leader.text + worker.text
    expected = f"mpirun's daemon on host {WORKER} ended before it had started a rank: exit status 127\nno such file"
    assert leader.failure == worker.failure == expected


def test_what_an_agent_started_ends_with_it(tmp_path: Path) -> None:
    mpirun = (
        "agent = start('echo started $$; exec sleep 1000')\nsys.stdin = open('{0}')\nsys.stdin.read()\nagent.kill()\n"
    )
    gate, after = tmp_path / "gate", tmp_path / "after"
    os.mkfifo(gate)
    os.mkfifo(after)
    mpirun = mpirun.format(gate) + f"open({str(after)!r}).read()\n"
    with two_hosts(tmp_path, "", hyperparameters=MPI, variables=image(tmp_path, mpirun)) as (leader, worker):
        pid = pid_in(worker)
        gate.write_text("", encoding="ascii")
        wait_for_end(pid)
        after.write_text("", encoding="ascii")
        assert (leader.wait(), worker.wait()) == (0, 0), leader.text + worker.text


def test_what_an_agent_started_ends_with_the_job(tmp_path: Path) -> None:
    """Also what has left its session, as mpirun's daemons do; and with a launcher that is killed."""
    mpirun = "start('echo started $$; exec sleep 1000')\nrun('setsid sleep 1001 >/dev/null 2>&1 &')\nsignal.pause()\n"
    for number in (signal.SIGTERM, signal.SIGKILL):
        base = tmp_path / number.name
        base.mkdir()
        with two_hosts(base, "", hyperparameters=MPI, variables=image(base, mpirun)) as (leader, worker):
            pid = pid_in(worker)
            leader.read_until("status 0")
            leader.process.send_signal(number)
            leader.wait()
            assert worker.wait() != 0
            wait_for_end(pid)
            for host in (leader, worker):
                assert pids_with_variable("SAGEMAKER_BASE_DIR", str(host.base)) == []


def test_check_says_who_may_join_and_lead(tmp_path: Path) -> None:
    hosts = {"TRAINWORKS_HOSTS": "one,two", "TRAINWORKS_HOST": "two", "TRAINWORKS_CONTROL_PORT": "7999"}
    known = {"TRAINWORKS_JOB_SECRET": "0123456789abcdef0123456789abcdef"}
    expected = {
        "without TRAINWORKS_JOB_SECRET: who comes first may join, or lead and start programs under mpirun": hosts,
        "with TRAINWORKS_JOB_SECRET: only who knows it may join or lead": {**hosts, **known},
    }
    for said, variables in expected.items():
        with Launcher(tmp_path, "check", variables=variables) as made:
            made.wait()
        assert f"the launchers of this job talk on port 7999 of one, {said}\n" in made.text
