"""Test the status and cause of every host of a job at each kind of end: the promises of the
launcher, under the real programs.

Hosts are network namespaces (``launcher_network``), the processes are Open MPI's and torchrun's
own. The bounds are the ones that were promised; torchrun's own time, to load torch and to end, is
measured and taken off.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from launcher_network import PREFIX, Host, Network, engine_manifest, job_on, need, network_of
from launcher_support import GLOO_ENDS, TIME_OUT, WAIT_FOR_SIGNALS, Launcher, write_inputs

from trainworks_launcher.contract.json_values import Json
from trainworks_testing.clock import assert_within

pytestmark = pytest.mark.engine

MODES: dict[str, dict[str, Json]] = {
    "mpi": {"sagemaker_mpi_enabled": "true"},
    "torch_distributed": {"sagemaker_torch_distributed_enabled": "true"},
    "none": {},
}
RANKS = """
import os, signal, sys, time
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["RANK"])
host = os.environ["SM_CURRENT_HOST"]
def say(*words):
    print(*words, time.monotonic(), flush=True)
"""
"""The start of scripts: who am I, in either mode, without torch or MPI, which
would take seconds to load.
"""

WAITING = RANKS + 'say("ready")\nwhile True: signal.pause()\n'


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    need("mpirun", "torchrun")
    return engine_manifest(tmp_path)


@pytest.fixture(scope="module")
def shared() -> Iterator[Network]:
    """Two hosts that no test spoils."""
    with network_of(2) as new_network:
        yield new_network


@pytest.fixture
def network() -> Iterator[Network]:
    """Two hosts for one test, which may cut them off."""
    with network_of(2) as new_network:
        yield new_network


def text_of(hosts: Sequence[Host]) -> str:
    return "\n".join(f"--- {host.base.name}\n{host.text}" for host in hosts)


def moments(hosts: Sequence[Host], word: str) -> list[float]:
    """Return when the ranks said a word, in seconds of the clock that all processes of this machine
    share.
    """
    return [
        float(moment) for moment in re.findall(rf"{word} (\d+\.\d+)$", text_of(hosts), re.MULTILINE)
    ]


def wait_all(hosts: Sequence[Host]) -> tuple[list[int], float]:
    """(exit statuses, the moment in which the last host had ended)."""
    statuses = [host.wait() for host in hosts]
    return statuses, time.monotonic()


def read_ready(hosts: Sequence[Host]) -> None:
    for host in hosts:
        host.read_until("ready")


def seconds_until_torchruns_rank(folder: Path) -> float:
    """Return torchrun's own time until its rank starts, two at a time as in these tests.

    The rank is loading torch; nothing of that is ours or was promised.
    """
    script = folder / "moment.py"
    script.write_text("import time; print(time.monotonic(), flush=True)\n", encoding="ascii")
    started = time.monotonic()
    words = (
        str(PREFIX / "bin/torchrun"),
        "--standalone",
        "--local-addr=127.0.0.1",
        "--nproc-per-node=1",
        str(script),
    )
    both = [
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) for _ in range(2)
    ]
    ranks = [float(process.communicate(timeout=TIME_OUT)[0]) for process in both]
    return max(ranks) - started


def torchrun_of(host: Host) -> int:
    """A file descriptor of the host's torchrun, which can be read once it has ended."""
    words = {
        pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in host.processes()
    }
    (torchrun_pid,) = (
        pid for pid, line in words.items() if os.fsencode(PREFIX / "bin/torchrun") in line
    )
    return os.pidfd_open(torchrun_pid)


def wait_for_torchruns(descriptors: Sequence[int]) -> float:
    """The moment in which the last of them had ended.

    The agent takes seconds after its rank, most of all where the store of its exit barrier is gone
    already (https://github.com/pytorch/pytorch/issues/69520).
    """
    for descriptor in descriptors:
        assert select.select([descriptor], [], [], TIME_OUT)[0]
        os.close(descriptor)
    return time.monotonic()


@pytest.mark.parametrize("mode", ["mpi", "torch_distributed"])
def test_a_job_that_does_nothing(
    shared: Network, manifest: Path, tmp_path: Path, mode: str
) -> None:
    torchrun = mode == "torch_distributed"
    before = seconds_until_torchruns_rank(tmp_path) if torchrun else 0.0
    for host in shared.hosts:
        os.mkfifo(tmp_path / f"{host}.go")
    script = RANKS + f'say("ready")\nopen("{tmp_path}/" + host + ".go").read()\nsay("end")\n'
    with job_on(shared, tmp_path, script, MODES[mode], manifest=manifest) as hosts:
        read_ready(hosts)
        descriptors = [torchrun_of(host) for host in hosts] if torchrun else []
        for host in shared.hosts:
            (tmp_path / f"{host}.go").write_text("")
        torchruns_ended = wait_for_torchruns(descriptors)
        statuses, end_time = wait_all(hosts)
        assert statuses == [0, 0], text_of(hosts)
        assert all(host.succeeded for host in hosts)
        ranks_ended = moments(hosts, "end")
        assert len(ranks_ended) == 2
        programs_ended = torchruns_ended if torchrun else max(ranks_ended)
        assert_within(1, programs_ended, end_time, text_of(hosts))
        torchruns_own = before + programs_ended - max(ranks_ended)
        assert_within(
            5, min(host.started for host in hosts) + torchruns_own, end_time, text_of(hosts)
        )


@pytest.mark.parametrize("mode", ["mpi", "torch_distributed"])
def test_a_rank_on_the_second_host_raises(
    shared: Network, manifest: Path, tmp_path: Path, mode: str
) -> None:
    script = (
        WAIT_FOR_SIGNALS
        + RANKS
        + 'if rank == 1:\n    say("raises")\n    raise ValueError("the cause")\n'
        + "signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))\nwait_for_signals()\n"
    )
    with job_on(shared, tmp_path, script, MODES[mode], manifest=manifest) as hosts:
        statuses, end_time = wait_all(hosts)
        assert statuses == [1, 1], text_of(hosts)
        assert_within(5, max(moments(hosts, "raises")), end_time, text_of(hosts))
    assert hosts[0].failure == hosts[1].failure
    assert hosts[0].failure.startswith("ValueError: the cause\n"), hosts[0].failure
    assert "Traceback (most recent call last)" in hosts[0].failure
    assert "algo-2" in hosts[0].failure
    assert not any(host.succeeded for host in hosts)


@pytest.mark.parametrize("mode", ["mpi", "torch_distributed"])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_host_is_killed(
    shared: Network, manifest: Path, tmp_path: Path, mode: str, lost: int
) -> None:
    with job_on(shared, tmp_path, WAITING, MODES[mode], manifest=manifest) as hosts:
        read_ready(hosts)
        killed = time.monotonic()
        hosts[lost].kill()
        other = hosts[1 - lost]
        assert other.wait() == 66, text_of(hosts)
        assert_within(15, killed, time.monotonic(), other.text)
    assert other.failure.startswith(f"lost host algo-{lost + 1}: ")
    assert not other.succeeded


@pytest.mark.parametrize("mode", ["mpi", "torch_distributed"])
def test_a_host_is_cut_off(network: Network, manifest: Path, tmp_path: Path, mode: str) -> None:
    limit = {"TRAINWORKS_HEARTBEAT_LIMIT_SECONDS": "4"}
    with job_on(
        network, tmp_path, WAITING, MODES[mode], manifest=manifest, variables=limit
    ) as hosts:
        read_ready(hosts)
        cut = time.monotonic()
        network.cut("algo-2")
        statuses, end_time = wait_all(hosts)
        assert statuses == [66, 66], text_of(hosts)
        # The limit, and the time that processes have to end.
        assert_within(4 + 5, cut, end_time, text_of(hosts))
    assert hosts[0].failure.startswith("lost host algo-2: no message from it for ")
    assert hosts[1].failure.startswith("lost host algo-1: no message from it for ")


@pytest.mark.parametrize("mode", ["mpi", "torch_distributed"])
def test_a_host_is_paused(shared: Network, manifest: Path, tmp_path: Path, mode: str) -> None:
    limit = {"TRAINWORKS_HEARTBEAT_LIMIT_SECONDS": "4"}
    with job_on(
        shared, tmp_path, WAITING, MODES[mode], manifest=manifest, variables=limit
    ) as hosts:
        read_ready(hosts)
        paused = time.monotonic()
        hosts[1].pause()
        assert hosts[0].wait() == 66, text_of(hosts)
        assert_within(4 + 5, paused, time.monotonic(), hosts[0].text)
        hosts[1].resume()
        assert hosts[1].wait() == 66, text_of(hosts)
    assert hosts[0].failure.startswith("lost host algo-2: no message from it for ")
    assert "lost host algo-" in hosts[1].failure


def test_mpirun_refuses_to_start(shared: Network, manifest: Path, tmp_path: Path) -> None:
    options = "--display no-such-kind-of-display"
    hyperparameters: dict[str, Json] = {**MODES["mpi"], "sagemaker_mpi_custom_mpi_options": options}
    with job_on(shared, tmp_path, WAITING, hyperparameters, manifest=manifest) as hosts:
        statuses, end_time = wait_all(hosts)
        assert statuses[0] == statuses[1] != 0, text_of(hosts)
        assert_within(5, min(host.started for host in hosts), end_time, text_of(hosts))
    assert hosts[0].failure == hosts[1].failure
    assert "no-such-kind-of-display" in hosts[0].failure


@pytest.mark.parametrize("mode", ["mpi", "torch_distributed"])
def test_every_host_is_stopped(shared: Network, manifest: Path, tmp_path: Path, mode: str) -> None:
    script = RANKS + (
        "seen = []\nsignal.signal(signal.SIGTERM, lambda *_: seen.append(1))\nsay('ready')\n"
        "while not seen: signal.sigtimedwait([signal.SIGUSR1], 0.05)\n"
        "say('saw SIGTERM')\ntime.sleep(3)\n"  # longer than mpirun would give it
        "open(os.path.join(os.environ['SM_MODEL_DIR'], 'checkpoint'),"
        " 'w').write('whole')\nsay('saved')\n"
    )
    with job_on(shared, tmp_path, script, MODES[mode], manifest=manifest) as hosts:
        for host in hosts:
            (host.base / "model").mkdir(exist_ok=True)
        read_ready(hosts)
        for host in hosts:
            host.signal_process_one(signal.SIGTERM)
        statuses, end_time = wait_all(hosts)
        assert statuses == [0, 0], text_of(hosts)
        assert len(moments(hosts, "saw SIGTERM")) == len(moments(hosts, "saved")) == 2, text_of(
            hosts
        )
        assert_within(5, max(moments(hosts, "saved")), end_time, text_of(hosts))
        for host in hosts:
            assert (host.base / "model/checkpoint").read_text(encoding="ascii") == "whole"
            assert "job stopped" in host.text
            assert not host.succeeded


@pytest.mark.parametrize(
    ("mode", "seconds"),
    [
        ("mpi", 4),  # mpirun sends KILL a second after the first rank that dies
        ("torch_distributed", 33),  # torchrun after 30 s
    ],
)
def test_ranks_save_while_others_have_died_of_the_stop(
    shared: Network, manifest: Path, tmp_path: Path, mode: str, seconds: int
) -> None:
    """Two ranks on each host, of which one saves and the other dies of SIGTERM."""
    script = (
        RANKS + "def save(*_):\n"
        f"    time.sleep({seconds})\n"
        "    open(os.path.join(os.environ['SM_MODEL_DIR'], 'checkpoint'), 'w').write('whole')\n"
        "    say('saved')\n"
        "    sys.exit(0)\n"
        "if rank % 2: signal.signal(signal.SIGTERM, save)\n"
        "say('ready')\nwhile True: time.sleep(0.1)\n"
    )
    hyperparameters: dict[str, Json] = {
        **MODES[mode],
        "sagemaker_mpi_num_of_processes_per_host": "2",
    }
    with job_on(shared, tmp_path, script, hyperparameters, manifest=manifest) as hosts:
        for host in hosts:
            (host.base / "model").mkdir(exist_ok=True)
            host.read_until("ready", 2)
        hosts[1].signal_process_one(signal.SIGTERM)  # the other one is only told
        hosts[0].read_until(
            "SIGTERM: passed on; the ranks have the time"
            " that the platform of the stopped host leaves"
        )
        statuses, _ = wait_all(hosts)
        assert statuses == [143, 143], text_of(hosts)
        assert len(moments(hosts, "saved")) == 2, text_of(hosts)
        for host in hosts:
            assert (host.base / "model/checkpoint").read_text(encoding="ascii") == "whole"
            assert host.failure.startswith("stopped by SIGTERM"), host.failure


def test_a_host_that_was_only_told_of_the_stop_ends_with_the_stopped_one(
    shared: Network, manifest: Path, tmp_path: Path
) -> None:
    """The platform's KILL of one host: nothing would end the other one, whose
    rank ignores SIGTERM.
    """
    script = (
        "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('ready', flush=True)\n"
        "while True: signal.pause()\n"
    )
    with job_on(shared, tmp_path, script, MODES["none"], manifest=manifest) as hosts:
        read_ready(hosts)
        hosts[1].signal_process_one(signal.SIGTERM)
        for host in hosts:
            host.read_until("SIGTERM: passed on")
        hosts[1].signal_process_one(signal.SIGKILL)
        assert hosts[0].wait() in (66, 137), hosts[0].text
    assert "lost host algo-2" in hosts[0].text or "stopped by SIGTERM" in hosts[0].failure


@pytest.mark.parametrize("mode", ["mpi", "torch_distributed"])
def test_one_host_never_comes(shared: Network, manifest: Path, tmp_path: Path, mode: str) -> None:
    limit = {"TRAINWORKS_JOIN_LIMIT_SECONDS": "2"}
    for started, missing in (("algo-1", "algo-2"), ("algo-2", "algo-1")):
        folder = tmp_path / started
        job = job_on(
            shared, folder, "", MODES[mode], manifest=manifest, variables=limit, started=(started,)
        )
        with job as (host,):
            assert host.wait() == 66, host.text
            host.assert_ended_within(2 + 5)
        assert missing in host.failure


@pytest.mark.parametrize("mode", ["mpi", "torch_distributed", "none"])
@pytest.mark.parametrize("slow", [0, 1])
def test_hosts_end_together_after_the_last_one(
    shared: Network, manifest: Path, tmp_path: Path, mode: str, slow: int
) -> None:
    script = (
        "import os, time\n"
        f"if os.environ['SM_CURRENT_HOST'] == 'algo-{slow + 1}': time.sleep(4)\n"
        "print('end', time.monotonic(), flush=True)\n"
        "open(os.path.join(os.environ['SM_MODEL_DIR'], 'model'), 'w').write('complete')\n"
    )
    with job_on(shared, tmp_path, script, MODES[mode], manifest=manifest) as hosts:
        for host in hosts:
            (host.base / "model").mkdir(exist_ok=True)
        hosts[1 - slow].read_until("end ")
        statuses, end_time = wait_all(hosts)
        assert statuses == [0, 0], text_of(hosts)
        first, last = sorted(moments(hosts, "end"))
        assert last - first > 3
        assert_within(1, hosts[0].end_time, end_time, text_of(hosts))
        for host in hosts:
            assert host.succeeded
            assert (host.base / "model/model").read_text(encoding="ascii") == "complete"


# --- torchrun that goes on ------------------------------------------------------------------------
TRAIN = (
    GLOO_ENDS
    + """
import os, signal, sys, time
import torch
import torch.distributed as distributed
host, life = os.environ["SM_CURRENT_HOST"], os.environ["TORCHELASTIC_RESTART_COUNT"]
folder = os.environ["SM_HP_SHARED"]
saved = os.path.join(folder, "checkpoint")
distributed.init_process_group("gloo")
rank, world = distributed.get_rank(), distributed.get_world_size()
step = torch.tensor([int(open(saved).read()) if rank == 0 and os.path.exists(saved) else 0])
distributed.broadcast(step, 0)
print("life", life, "rank", rank, "of", world, "on", host, "from step", int(step), flush=True)
if life == "0" and rank == 0:
    assert host == "algo-1" and world == len(__import__("json").loads(os.environ["SM_HOSTS"]))
while int(step) < 40:
    time.sleep(0.1)
    one = torch.ones(1)
    distributed.all_reduce(one)
    assert int(one) == world
    step += 1
    if rank == 0:
        open(saved + ".new", "w").write(str(int(step)))
        os.replace(saved + ".new", saved)
    if int(step) == 10:
        print("step ten", flush=True)
print("trained", host, flush=True)
distributed.barrier()
distributed.destroy_process_group()
"""
)


FAILS_ON_ONE_HOST = (
    GLOO_ENDS
    + """
import json, os, signal
import torch
import torch.distributed as distributed
host, again = os.environ["SM_CURRENT_HOST"], os.environ["TRAINWORKS_RESTART_COUNT"]
resume = os.environ.get("TRAINWORKS_RESUME_FROM", "-")
distributed.init_process_group("gloo")
print("start", again, "from", os.path.basename(resume), flush=True)
distributed.all_reduce(torch.ones(1))
if again == "0" and host == "algo-2":
    place = os.environ["TRAINWORKS_CHECKPOINT_DIRECTORY"] + "/checkpoint-7"
    os.makedirs(place)
    json.dump({}, open(place + "/trainer_state.json", "w"))
    raise SystemExit(3)
if again == "0":
    signal.pause()  # until torchrun ends this rank for the other one
distributed.barrier()
distributed.destroy_process_group()
"""
)


def test_all_hosts_go_on_from_the_checkpoint_after_one_has_failed(
    shared: Network, manifest: Path, tmp_path: Path
) -> None:
    """torchrun counts a restart on the failed host alone, and starts the ranks of both again."""
    saved = tmp_path / "saved"
    saved.mkdir()
    variables = {"TRAINWORKS_CHECKPOINT_DIRECTORY": str(saved)}
    hyperparameters = {
        **MODES["torch_distributed"],
        "sagemaker_torch_distributed_max_restarts": "1",
    }
    with job_on(
        shared, tmp_path, FAILS_ON_ONE_HOST, hyperparameters, manifest=manifest, variables=variables
    ) as hosts:
        assert wait_all(hosts)[0] == [0, 0], text_of(hosts)
        for host in hosts:
            starts = sorted(set(re.findall(r"start \d from \S+", host.text)))
            assert starts == ["start 0 from -", "start 1 from checkpoint-7"]


def elastic(folder: Path, **more: Json) -> dict[str, Json]:
    return {
        **MODES["torch_distributed"],
        "sagemaker_torch_distributed_min_hosts": "2",
        "shared": str(folder),
        **more,
    }


@pytest.mark.parametrize("how", ["kill", "pause", "cut"])
def test_torchrun_goes_on_without_a_lost_host(manifest: Path, tmp_path: Path, how: str) -> None:
    """Three hosts; one is lost at step 10.

    The others begin again from the checkpoint and end well.
    """
    limit = {"TRAINWORKS_HEARTBEAT_LIMIT_SECONDS": "4"}
    with (
        network_of(3) as three,
        job_on(
            three, tmp_path, TRAIN, elastic(tmp_path), manifest=manifest, variables=limit
        ) as hosts,
    ):
        for host in hosts:
            host.read_until("step ten")
        if how == "kill":
            hosts[1].kill()
        elif how == "pause":
            hosts[1].pause()
        else:
            three.cut("algo-2")
        lost = time.monotonic()
        statuses, end_time = wait_all((hosts[0], hosts[2]))
        assert statuses == [0, 0], text_of(hosts)
        print(f"{how}: {end_time - lost:.1f} s from the loss to the end")
        if how == "pause":
            hosts[1].resume()
        if how != "kill":
            assert hosts[1].wait() == 66, text_of(hosts)
            assert "lost host algo-" in hosts[1].failure
            assert not hosts[1].succeeded
    for host in (hosts[0], hosts[2]):
        assert "lost host algo-2: " in host.text
        assert "continuing with 2 of 3 hosts" in host.text
        assert f"trained {host.base.name}" in host.text
        assert host.succeeded
    lives = re.findall(r"life (\d+) rank (\d+) of (\d+) on (\S+) from step (\d+)", text_of(hosts))
    assert sorted((host, world) for life, _, world, host, _ in lives if life == "0") == [
        ("algo-1", "3"),
        ("algo-2", "3"),
        ("algo-3", "3"),
    ]
    again = [(int(rank), world, host) for life, rank, world, host, _ in lives if life == "1"]
    assert sorted(again) == [(0, "2", "algo-1"), (1, "2", "algo-3")], text_of(hosts)
    assert all(int(step) >= 10 for life, *_, step in lives if life == "1")


def test_torchrun_restarts_a_rank_that_fails(
    shared: Network, manifest: Path, tmp_path: Path
) -> None:
    script = (
        RANKS
        + "mark = os.path.join(os.environ['SM_HP_SHARED'], 'lived-on-')\nif not os.path.exists(mark"
        " + host):\n    open(mark + host, 'w').close()\n    while not os.path.exists(mark +"
        " 'algo-1'): signal.sigtimedwait([signal.SIGUSR1], 0.05)\n    if rank == 1: sys.exit(3)\n"
        "    signal.pause()\nsay('second life on', host)\n"
    )
    hyperparameters: dict[str, Json] = {
        **MODES["torch_distributed"],
        "sagemaker_torch_distributed_max_restarts": "1",
    }
    hyperparameters["shared"] = str(tmp_path)
    with job_on(shared, tmp_path, script, hyperparameters, manifest=manifest) as hosts:
        statuses, _ = wait_all(hosts)
        assert statuses == [0, 0], text_of(hosts)
    assert all("second life on " + host.base.name in host.text for host in hosts)


def test_the_cause_is_of_the_last_life(shared: Network, manifest: Path, tmp_path: Path) -> None:
    """Fail each time: the last failure, after the restarts that were allowed, ends the job."""
    script = (
        RANKS + "mark = os.path.join(os.environ['SM_HP_SHARED'], 'second')\n"
        "second = os.path.exists(mark)\n"
        "if rank == 1:\n    open(mark, 'w').close()\n"
        "    raise ValueError('in the last life' if second else 'in the first life')\n"
        "while True: signal.pause()\n"
    )
    hyperparameters: dict[str, Json] = {
        **MODES["torch_distributed"],
        "sagemaker_torch_distributed_max_restarts": "1",
    }
    hyperparameters["shared"] = str(tmp_path)
    with job_on(shared, tmp_path, script, hyperparameters, manifest=manifest) as hosts:
        statuses, _ = wait_all(hosts)
        assert statuses == [1, 1], text_of(hosts)
    assert "in the first life" in hosts[1].text
    for host in hosts:
        assert host.failure.startswith("ValueError: in the last life\n"), host.failure


def test_restarts_that_lead_nowhere_end_the_job(
    shared: Network, manifest: Path, tmp_path: Path
) -> None:
    """A rank fails at the same step in each life.

    Its output differs only in times and numbers of processes.
    """
    script = (
        RANKS + "print(time.strftime('%Y-%m-%d %H:%M:%S'), 'process', os.getpid(), 'of rank', rank,"
        " 'reads', hex(id(rank)))\nif rank == 1: raise ValueError('always the same, of process"
        " %d' % os.getpid())\nwhile True: signal.pause()\n"
    )
    hyperparameters: dict[str, Json] = {
        **MODES["torch_distributed"],
        "sagemaker_torch_distributed_max_restarts": "50",
    }
    with job_on(shared, tmp_path, script, hyperparameters, manifest=manifest) as hosts:
        statuses, _ = wait_all(hosts)
        assert statuses == [1, 1], text_of(hosts)
    assert "the last restart got no step further (2 in a row; 3 end the job)" in hosts[0].text
    for host in hosts:
        assert host.failure.startswith(
            "3 restarts in a row without a step further: ValueError: always the same"
        )
        assert "rank 1" in host.failure


def test_restarts_that_lead_further_go_on(shared: Network, manifest: Path, tmp_path: Path) -> None:
    """Each life does one more step, which only one host shows, by the file in
    which it says its step.
    """
    script = (
        RANKS + "last, step = os.path.join(os.environ['SM_HP_SHARED'], 'last'),"
        " int(os.environ['TORCHELASTIC_RESTART_COUNT'])\nprint('step', step if rank else 'by"
        " step')\nif rank == 1: open(os.environ['TRAINWORKS_HEARTBEAT_FILE'],"
        " 'w').write(str(step))\nif rank == 1 and step < 5: raise ValueError('always the"
        " same')\nif rank == 1: open(last, 'w').close()\nwhile not os.path.exists(last):"
        " signal.sigtimedwait([signal.SIGUSR1], 0.05)\n"
    )
    hyperparameters: dict[str, Json] = {
        **MODES["torch_distributed"],
        "sagemaker_torch_distributed_max_restarts": "5",
    }
    hyperparameters["shared"] = str(tmp_path)
    beat = {"TRAINWORKS_HEARTBEAT_FILE": str(tmp_path / "beat")}
    with job_on(
        shared, tmp_path, script, hyperparameters, manifest=manifest, variables=beat
    ) as hosts:
        statuses, _ = wait_all(hosts)
        assert statuses == [0, 0], text_of(hosts)
    assert "step 5" in hosts[1].text


def test_a_stopped_job_is_not_restarted(shared: Network, manifest: Path, tmp_path: Path) -> None:
    """A rank that dies of the stop signal is no failure that torchrun should mend."""
    hyperparameters: dict[str, Json] = {
        **MODES["torch_distributed"],
        "sagemaker_torch_distributed_max_restarts": "3",
    }
    with job_on(shared, tmp_path, WAITING, hyperparameters, manifest=manifest) as hosts:
        read_ready(hosts)
        stopped = time.monotonic()
        for host in hosts:
            host.signal_process_one(signal.SIGTERM)
        statuses, end_time = wait_all(hosts)
        assert statuses[0] == statuses[1] != 0, text_of(hosts)
        assert_within(10, stopped, end_time, text_of(hosts))
    for host in hosts:
        assert "job stopped" in host.text
        assert host.failure.startswith("stopped by SIGTERM")


# --- other processes that end beside it -----------------------------------------------------------
def pids_of(host: Host, name: str) -> list[int]:
    """The processes of a host whose program has this name, the oldest first:
    their numbers begin again some time.
    """
    starts = []
    for pid in host.processes():
        with contextlib.suppress(OSError):
            head, _, rest = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")
            if head.endswith(f"({name}"):
                starts.append((int(rest.split()[19]), pid))  # `starttime` of proc(5)
    return [pid for _, pid in sorted(starts)]


def test_ranks_that_ignore_the_stop_signal_end_with_the_status_of_a_kill(
    shared: Network, manifest: Path, tmp_path: Path
) -> None:
    script = (
        RANKS + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nsay('ready')\nwhile True:"
        " signal.pause()\n"
    )
    grace = {"TRAINWORKS_STOP_GRACE_SECONDS": "1"}
    with job_on(
        shared, tmp_path, script, MODES["mpi"], manifest=manifest, variables=grace
    ) as hosts:
        read_ready(hosts)
        hosts[1].signal_process_one(signal.SIGTERM)
        statuses, _ = wait_all(hosts)
        assert statuses == [137, 137], text_of(hosts)
    assert hosts[0].failure == hosts[1].failure
    assert hosts[0].failure.startswith("stopped by SIGTERM")


def test_on_one_host_too_the_status_is_that_of_a_kill(manifest: Path, tmp_path: Path) -> None:
    script = (
        RANKS + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nsay('ready')\nwhile True:"
        " signal.pause()\n"
    )
    write_inputs(
        tmp_path, script, {**MODES["mpi"], "sagemaker_mpi_num_of_processes_per_host": "2"}, {}
    )
    variables = {"TRAINWORKS_STOP_GRACE_SECONDS": "1", "TRAINWORKS_IMAGE_MANIFEST": str(manifest)}
    with Launcher(tmp_path, variables=variables) as launcher:
        launcher.read_until("ready", 2)
        launcher.process.send_signal(signal.SIGTERM)
        assert launcher.wait() == 137, launcher.text
    assert "killed by SIGKILL (exit status 137" in launcher.failure


def test_the_host_whose_daemon_of_mpirun_dies_is_named(
    shared: Network, manifest: Path, tmp_path: Path
) -> None:
    with job_on(shared, tmp_path, WAITING, MODES["mpi"], manifest=manifest) as hosts:
        read_ready(hosts)
        daemons = pids_of(hosts[1], "prted") or pids_of(hosts[1], "orted")
        for pid in daemons:
            os.kill(pid, signal.SIGKILL)
        statuses, _ = wait_all(hosts)
        assert statuses == [66, 66], text_of(hosts)
    assert hosts[0].failure == hosts[1].failure
    first = "mpirun lost its daemon on host algo-2, or could not start it"
    assert hosts[0].failure.splitlines()[0] == first, hosts[0].failure


def test_orphans_are_reaped_beside_mpiruns_daemons(
    shared: Network, manifest: Path, tmp_path: Path
) -> None:
    script = RANKS + (
        "import subprocess\nsay('ready')\nmark = os.environ['SM_HP_MARK']\n"
        "while not os.path.exists(mark): time.sleep(0.05)\n"
        "def zombies():\n"
        "    found = 0\n"
        "    for pid in filter(str.isdecimal, os.listdir('/proc')):\n"
        "        try: state = open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()\n"
        "        except OSError: continue\n"  # it was reaped meanwhile
        "        found += state[0] == 'Z' and state[1] == '1'\n"
        "    return found\n"
        "for _ in range(20): subprocess.run(['setsid', '-f', 'true'])\n"
        "deadline = time.monotonic() + 30\n"
        "while zombies() and time.monotonic() < deadline: time.sleep(0.05)\n"
        "say('zombies', zombies())\n"
    )
    hyperparameters: dict[str, Json] = {**MODES["mpi"], "mark": str(tmp_path / "mark")}
    with job_on(shared, tmp_path, script, hyperparameters, manifest=manifest) as hosts:
        read_ready(hosts)
        (tmp_path / "mark").touch()
        statuses, _ = wait_all(hosts)
        assert statuses == [0, 0], text_of(hosts)
    assert "zombies 0 " in hosts[1].text
