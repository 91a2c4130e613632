"""All hosts start again together after a retryable failure.

Never ranks of two tries at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launcher_support import Launcher, environment, plan, write_inputs
from test_launcher_processes import LEADER, WORKER, two_hosts

from trainworks_launcher.contract import names
from trainworks_launcher.contract.json_values import Json
from trainworks_launcher.supervise.outcome.outcome import FAILED, STOPPED, SUCCEEDED, Outcome
from trainworks_launcher.supervise.processes import shared_memory
from trainworks_launcher.supervise.restart import AttemptHistory
from trainworks_testing.ports import free_port

HOSTS = (LEADER, WORKER)
SHARED = "SHARED"
SCRIPT = """
import fcntl, os, pathlib, signal, sys, time

shared = pathlib.Path(os.environ["SHARED"])
host, again = os.environ["SM_CURRENT_HOST"], os.environ["TRAINWORKS_RESTART_COUNT"]
# One lock for each try, shared by its hosts:
# a rank of another try that still runs would hold its own.
mine = open(shared / "tries", "a+")
fcntl.flock(mine, fcntl.LOCK_EX)
mine.seek(0)
running = [line.split() for line in mine.read().splitlines()]
alive = [pid for pid, number in running if number != again and os.path.exists(f"/proc/{pid}/cwd")]
print("two tries at once", alive) if alive else None
mine.write(f"{os.getpid()} {again}\\n")
mine.flush()
fcntl.flock(mine, fcntl.LOCK_UN)
resumed = os.environ.get("TRAINWORKS_RESUME_FROM", "nothing")
print(f"try {again} from", resumed, "pid", os.getpid(), flush=True)
"""
DIE = """
if again == "0" and host == os.environ["DIES"]:
    (shared / "checkpoints" / "step-7.ckpt").write_text("weights")
    (shared / "checkpoints" / "step-7.ckpt").rename(shared / "checkpoints/step-7-of-10.ckpt")
    os.kill(os.getpid(), signal.SIGKILL)
"""
WAIT = """
if again == "0":
    signal.pause()
"""


def shared(tmp_path: Path, **more: str) -> dict[str, str]:
    (tmp_path / "checkpoints").mkdir(parents=True)
    where = str(tmp_path / "checkpoints")
    return {
        "SHARED": str(tmp_path),
        "TRAINWORKS_CHECKPOINT_DIRECTORY": where,
        "TRAINWORKS_MAX_RESTARTS": "2",
        "TRAINWORKS_CONTROL_PORT": str(free_port()),
        **more,
    }


@contextlib.contextmanager
def host(base: Path, name: str, script: str, variables: dict[str, str]) -> Iterator[Launcher]:
    """Start one of two hosts, whose launcher a test may start anew."""
    config: dict[str, Json] = {
        "hosts": list(HOSTS),
        "current_host": name,
        "network_interface_name": "lo",
    }
    write_inputs(base, script, {}, config)
    with Launcher(base, variables=variables) as launcher:
        yield launcher


@pytest.mark.parametrize("dies", HOSTS)
def test_both_hosts_start_again_from_the_checkpoint_when_a_process_is_killed(
    tmp_path: Path, dies: str
) -> None:
    variables = shared(tmp_path, DIES=dies)
    with two_hosts(tmp_path, SCRIPT + DIE + WAIT, variables=variables) as (leader, worker):
        assert (leader.wait(), worker.wait()) == (0, 0), leader.text + worker.text
    for launcher in (leader, worker):
        assert f"try 1 from {tmp_path}/checkpoints/step-7-of-10.ckpt" in launcher.text
        assert "two tries at once" not in launcher.text
        assert "starting again on every host (1 of 2): train.py on host " + dies in launcher.text
        assert launcher.succeeded
        assert launcher.failure == ""


BEAT = """
beat = pathlib.Path(os.environ["TRAINWORKS_HEARTBEAT_FILE"])
if host == "127.0.0.2":
    beat.with_suffix(".new").write_text("12\\n")
    beat.with_suffix(".new").rename(beat)
    if again == "0":
        (shared / "checkpoints/step=7.ckpt").write_text("weights")
    sys.exit(3 + int(again))
signal.pause()
"""


@pytest.mark.parametrize("named", ["step=7.ckpt", "last.ckpt"])
def test_the_steps_that_are_lost_are_counted_where_the_script_says_its_step(
    tmp_path: Path, named: str
) -> None:
    """Write the file on one of the hosts; both tell the same.

    A checkpoint without a step leaves the time.
    """
    variables = shared(tmp_path, TRAINWORKS_HEARTBEAT_FILE=str(tmp_path / "beat"))
    script = SCRIPT + BEAT.replace("step=7.ckpt", named)
    with two_hosts(tmp_path, script, variables=variables) as (leader, worker):
        assert (leader.wait(), worker.wait()) == (5, 5), leader.text + worker.text
    has_step = named.startswith("step")
    for launcher in (leader, worker):
        assert (
            "; 5 step(s) are lost: the last try had come to step 12" in launcher.text
        ) is has_step
        assert (" s of the last try are lost" in launcher.text) is not has_step
        failure_file = json.loads(
            (launcher.base / "output/failure.json").read_text(encoding="utf-8")
        )
        assert failure_file["lost_steps"] == (10 if has_step else None)
        assert (
            "started again 2 time(s), 10 step(s) lost; before that:" in launcher.failure
        ) is has_step


def test_the_last_try_tells_of_the_earlier_ones(tmp_path: Path) -> None:
    script = SCRIPT + f"\nif host == '{WORKER}': sys.exit(3 + int(again))\nsignal.pause()\n"
    with two_hosts(tmp_path, script, variables=shared(tmp_path)) as (leader, worker):
        assert (leader.wait(), worker.wait()) == (5, 5), leader.text + worker.text
    for launcher in (leader, worker):
        failure_file = json.loads(
            (launcher.base / "output/failure.json").read_text(encoding="utf-8")
        )
        assert failure_file["restarts"] == 2
        assert [cause.rpartition("exit status ")[2] for cause in failure_file["earlier"]] == [
            "3",
            "4",
        ]
        assert "started again 2 time(s); before that:" in launcher.failure


def test_the_same_failure_without_a_new_checkpoint_ends_the_job(tmp_path: Path) -> None:
    script = (
        SCRIPT + f"\nif host == '{WORKER}': raise ValueError('of the script')\nsignal.pause()\n"
    )
    with two_hosts(tmp_path, script, variables=shared(tmp_path, TRAINWORKS_MAX_RESTARTS="9")) as (
        leader,
        worker,
    ):
        assert (leader.wait(), worker.wait()) == (1, 1), leader.text + worker.text
    assert "starting again on every host (1 of 9)" in leader.text
    assert "(2 of 9)" not in leader.text


@pytest.mark.parametrize("killed", HOSTS)
def test_a_host_that_its_platform_starts_anew_joins_the_one_that_waits(
    tmp_path: Path, killed: str
) -> None:
    """Kill the launcher, with all that it had started; the new one knows of no earlier try."""
    variables = shared(tmp_path)
    with contextlib.ExitStack() as stack:
        first = {
            name: stack.enter_context(host(tmp_path / name, name, SCRIPT + WAIT, variables))
            for name in HOSTS
        }
        for launcher in first.values():
            launcher.read_until("try 0 from")
        first[killed].process.send_signal(signal.SIGKILL)
        first[killed].wait()
        other = first[LEADER if killed == WORKER else WORKER]
        other.read_until("starting again on every host (1 of 2): lost host " + killed)
        new = stack.enter_context(host(tmp_path / killed, killed, SCRIPT + WAIT, variables))
        assert (other.wait(), new.wait()) == (0, 0), other.text + new.text
    for launcher in (other, new):
        assert "try 1 from nothing" in launcher.text
        assert "two tries at once" not in launcher.text


def test_a_host_that_does_not_come_back_ends_the_job_with_what_was_lost(tmp_path: Path) -> None:
    variables = shared(tmp_path, TRAINWORKS_JOIN_LIMIT_SECONDS="15")
    with two_hosts(tmp_path, SCRIPT + WAIT, variables=variables) as (leader, worker):
        for launcher in (leader, worker):
            launcher.read_until("try 0 from")
        worker.process.send_signal(signal.SIGKILL)
        assert leader.wait() == 66
    assert leader.failure.startswith(f"hosts that did not join within 15 s: {WORKER}")
    assert f"started again 1 time(s); before that:\nlost host {WORKER}" in leader.failure


def test_a_stop_signal_between_two_tries_ends_the_job(tmp_path: Path) -> None:
    with two_hosts(tmp_path, SCRIPT + WAIT, variables=shared(tmp_path)) as (leader, worker):
        for launcher in (leader, worker):
            launcher.read_until("try 0 from")
        worker.process.send_signal(signal.SIGKILL)
        leader.read_until("starting again on every host")
        leader.process.send_signal(signal.SIGTERM)
        assert leader.wait() == 143
    assert "stopped by SIGTERM before the program was started" in leader.failure


def test_a_script_of_one_host_starts_again(tmp_path: Path) -> None:
    write_inputs(tmp_path, SCRIPT + "\nsys.exit(0 if again == '2' else 10 + int(again))\n", {}, {})
    with Launcher(tmp_path, variables=shared(tmp_path / "shared")) as launcher:
        assert launcher.wait() == 0, launcher.text
    assert launcher.text.count("starting again on every host") == 2


LOST = Outcome(FAILED, names.EXIT_HOSTS, "a", "lost host b")
ENDED = Outcome(FAILED, 1, "a", "ValueError: x", 0, place="train.py on host a", end="exit status 1")
KILLED = ENDED._replace(status=137, cause="", end="killed by SIGKILL")
MEMORY = KILLED._replace(memory="out of memory: the kernel killed 1 process(es) of host a")
REFUSED = Outcome(FAILED, names.EXIT_CHECK, "a", "a GPU is broken")


@pytest.mark.parametrize(
    ("mode", "outcomes", "again"),
    [
        ("mpi", [LOST, ENDED], [True, True]),
        ("mpi", [ENDED, ENDED], [True, False]),
        ("mpi", [ENDED, ENDED._replace(rank=1)], [True, False]),
        ("mpi", [ENDED, ENDED._replace(cause="ValueError: y"), LOST], [True, True, False]),
        ("mpi", [KILLED, KILLED, KILLED], [True, True, False]),
        ("mpi", [MEMORY], [False]),
        ("mpi", [REFUSED], [False]),
        ("mpi", [Outcome(FAILED, names.EXIT_HANG, "a", "no progress")], [True]),
        ("mpi", [Outcome(SUCCEEDED), Outcome(STOPPED, 143)], [False, False]),
        ("torch_distributed", [ENDED, LOST], [False, True]),
    ],
)
def test_what_another_try_may_cure(mode: str, outcomes: list[Outcome], again: list[bool]) -> None:
    """torchrun starts its ranks again itself; not more tries than asked for."""
    variables = {"PATH": "/usr/bin", "TRAINWORKS_MAX_RESTARTS": "2"}
    hyperparameters: dict[str, Json] = {f"sagemaker_{mode}_enabled": "true"}
    history = AttemptHistory(
        plan(environment(hyperparameters, hosts=("algo-1", "algo-2"), variables=variables))
    )
    judgements = []
    for outcome in outcomes:
        judged = history.judge(outcome, started=True)
        judgements.append(judged.again)
        assert judged._replace(again=outcome.again) == outcome
        if judged.again:
            history.count(judged, 0.0)
    assert judgements == again


def test_a_job_that_never_started_is_not_started_again() -> None:
    """Wait for hosts that were never there; between two tries a host may be late once more."""
    history = AttemptHistory(
        plan(
            environment(
                hosts=("algo-1", "algo-2"), variables={"PATH": "", "TRAINWORKS_MAX_RESTARTS": "3"}
            )
        )
    )
    assert not history.judge(LOST, started=False).again
    assert "(1 of 3)" in history.count(LOST, 0.0)
    assert history.judge(LOST, started=False).again


def test_what_hosts_tell_each_other_of_their_tries() -> None:
    hosts_tries = [
        AttemptHistory(
            plan(
                environment(
                    hosts=("algo-1", "algo-2"),
                    variables={"PATH": "", "TRAINWORKS_MAX_RESTARTS": "3"},
                )
            )
        )
        for _ in range(2)
    ]
    here, there = hosts_tries
    there.count(LOST, 0.0)
    there.count(KILLED._replace(cause="second"), 0.0)
    assert not there.learn(here.fields())
    assert here.learn(there.fields())
    assert not here.learn(there.fields())
    assert (here.restarts, here.causes, here.lost) == (2, ("lost host b", "second"), 0)
    assert here.learn({**there.fields(), "step": 7})
    assert here.learn({"restarts": 99, "causes": "none", "lost": "none", "step": "none"})
    assert (here.restarts, here.causes, here.lost) == (3, (), None)


@pytest.mark.parametrize(
    ("name", "modified", "step", "message"),
    [
        ("step-7.ckpt", 960, "12\n", "5 step(s) are lost: the last try had come to step 12"),
        ("step-7.ckpt", 960, "5", "0 step(s) are lost: the last try had come to step 5"),
        ("", 0, "12", "12 step(s) are lost: the last try had come to step 12"),
        ("step-7.ckpt", 960, "half", "the last 40 s of the last try are lost"),
        ("last.ckpt", 960, "12", "the last 40 s of the last try are lost"),
        ("last.ckpt", 100, "", "the last 100 s of the last try are lost"),
        ("last.ckpt", 2000, "", "the last 0 s of the last try are lost"),
        ("", 0, "", "the last 100 s of the last try are lost"),
    ],
)
def test_what_a_restart_costs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    modified: int,
    step: str,
    message: str,
) -> None:
    """The try ran from 900 to 1000, in seconds of the clock."""
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    if name:
        (tmp_path / name).write_text("weights")
        os.utime(tmp_path / name, (modified, modified))
    beat = tmp_path / "beat"
    beat.write_text(step)
    os.utime(beat, (990, 990))
    variables = {
        "PATH": "",
        "TRAINWORKS_MAX_RESTARTS": "3",
        "TRAINWORKS_RESTART_COUNT": "4",
        "TRAINWORKS_CHECKPOINT_DIRECTORY": str(tmp_path),
    }
    read = environment(variables=variables)._replace(checkpoint_directory=str(tmp_path))
    history = AttemptHistory(plan(read), str(beat))
    history.count(KILLED, 900.0)
    assert history.of_job(KILLED).lost_steps is None, "the next try has not begun"
    changed, line = history.resume(*history.find_checkpoint())
    assert (
        line == "try 2 of the job continues from"
        f" {tmp_path / name if name else 'its beginning: no checkpoint'}; {message}"
    )
    assert changed["TRAINWORKS_RESUME_FROM"] == (str(tmp_path / name) if name else "")
    has_steps = "step(s)" in message
    assert history.of_job(KILLED).lost_steps == (int(message.split()[0]) if has_steps else None)
    os.utime(beat, (800, 800))  # of a job before this one
    history.count(KILLED, 900.0)
    assert "step(s)" not in history.resume(*history.find_checkpoint())[1]
    assert history.of_job(KILLED).lost_steps is None


@pytest.mark.parametrize(
    "message",
    ["object %r' % object()", "time %s' % __import__('time').time()", "pid %d' % os.getpid()"],
)
def test_a_failure_whose_message_differs_is_the_same_one(tmp_path: Path, message: str) -> None:
    write_inputs(
        tmp_path,
        f"import os\nprint('a try', flush=True)\nraise ValueError('bad {message})\n",
        {},
        {},
    )
    with Launcher(
        tmp_path, variables=shared(tmp_path / "shared", TRAINWORKS_MAX_RESTARTS="5")
    ) as launcher:
        assert launcher.wait() == 1
    assert launcher.text.count("a try\n") == 2, launcher.text


def test_three_restarts_that_end_in_the_same_kill_are_enough(tmp_path: Path) -> None:
    write_inputs(
        tmp_path,
        "import os, signal\nprint('a try', flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n",
        {},
        {},
    )
    with Launcher(
        tmp_path, variables=shared(tmp_path / "shared", TRAINWORKS_MAX_RESTARTS="9")
    ) as launcher:
        assert launcher.wait() == 137
    assert launcher.text.count("a try\n") == 4, launcher.text


# --- pauses between tries -------------------------------------------------------------------------
def test_tries_without_a_step_further_begin_later_and_later(tmp_path: Path) -> None:
    variables = {
        "PATH": "",
        "TRAINWORKS_MAX_RESTARTS": "99",
        "TRAINWORKS_CHECKPOINT_DIRECTORY": str(tmp_path),
    }
    job_environment = environment(variables=variables)._replace(checkpoint_directory=str(tmp_path))
    history = AttemptHistory(plan(job_environment), str(tmp_path.parent / "beat"))
    pauses = []
    for number in range(9):
        assert history.judge(ENDED._replace(cause=f"ValueError: {number}"), started=True).again
        pauses.append(history.pause)
    assert pauses == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    (tmp_path / "step-8.ckpt").touch()
    assert (history.judge(LOST, started=True).again, history.pause) == (True, 0)
    history.judge(LOST, started=True)
    assert history.pause == 1
    (tmp_path.parent / "beat").write_text("8", encoding="ascii")
    history.judge(LOST, started=True)
    assert history.pause == 0


def test_a_stop_ends_the_wait_on_both_hosts(tmp_path: Path) -> None:
    """Another exception each time, so that the job goes on; the fifth pause has eight seconds."""
    script = f"{SCRIPT}\nexec(chr(10) * int(again) + 'raise ValueError(again)')\n"
    variables = shared(tmp_path / "shared", TRAINWORKS_MAX_RESTARTS="99")
    both = (
        host(tmp_path / "a", LEADER, script, variables),
        host(tmp_path / "b", WORKER, script, variables),
    )
    with both[0] as leader, both[1] as worker:
        leader.read_until("the next one starts in 8 s")
        worker.process.send_signal(signal.SIGTERM)
        assert leader.wait() == worker.wait() == 143, leader.text + worker.text
    assert leader.failure.partition("\n")[0] == "stopped by SIGTERM before the program was started"
    for seconds in (1, 2, 4, 8):
        assert leader.text.count(f"the next one starts in {seconds} s") == 1
    assert "try 5 from" not in leader.text


# --- a file system that is dead -------------------------------------------------------------------
def test_a_try_waits_for_a_checkpoint_that_cannot_be_read_and_the_hosts_do_not(
    tmp_path: Path,
) -> None:
    """A FIFO without a writer blocks its reader, as a dead file system does.

    To begin anew would be wrong.
    """
    script = (
        SCRIPT + 'if host == os.environ["DIES"]:\n'
        '    os.mkfifo(shared / "checkpoints" / "step-7.ckpt")\n'
        "    os.kill(os.getpid(), signal.SIGKILL)\nsignal.pause()\n"
    )
    variables = shared(tmp_path / "shared", DIES=WORKER, TRAINWORKS_HEARTBEAT_LIMIT_SECONDS="2")
    both = (
        host(tmp_path / "a", LEADER, script, variables),
        host(tmp_path / "b", WORKER, script, variables),
    )
    with both[0] as leader, both[1] as worker:
        for launcher in (leader, worker):
            launcher.read_until("the file system does not answer; this host waits for it")
        leader.process.send_signal(signal.SIGTERM)
        assert leader.wait() == worker.wait() == 143, leader.text + worker.text
    assert leader.failure.startswith("stopped by SIGTERM") or "started again" in leader.failure
    assert "lost host" not in leader.text + worker.text
    assert "try 1 from" not in leader.text + worker.text


@contextlib.contextmanager
def silent_file_system(place: Path) -> Iterator[None]:
    """A file system over a directory whose server answers nothing, not even
    that it is there (fuse(4)).
    """
    try:
        server = os.open("/dev/fuse", os.O_RDWR)
    except OSError as error:
        pytest.skip(f"NOT TESTED: no FUSE here: {error}")
    options = f"fd={server},rootmode=40000,user_id=0,group_id=0".encode()
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        if libc.mount(b"silent", os.fsencode(place), b"fuse", 0, options):
            pytest.skip(f"NOT TESTED: no FUSE here: {os.strerror(ctypes.get_errno())}")
        yield
    finally:
        os.close(server)  # who waits for it gets an error, and goes on
        libc.umount2(os.fsencode(place), 2)  # MNT_DETACH


def test_a_file_system_that_dies_keeps_neither_the_hosts_nor_the_end(tmp_path: Path) -> None:
    """The file system dies under the checkpoints and the heartbeat file.

    Then a rank fails, and later a stop signal comes.
    """
    script = (
        SCRIPT + 'while not (shared / "now").exists(): time.sleep(0.05)\nraise ValueError(host)\n'
    )
    variables = shared(tmp_path / "shared")
    place = tmp_path / "shared" / "checkpoints"
    variables["TRAINWORKS_HEARTBEAT_FILE"] = str(place / "beat")
    both = (
        host(tmp_path / "a", LEADER, script, variables),
        host(tmp_path / "b", WORKER, script, variables),
    )
    with both[0] as leader, both[1] as worker:
        for launcher in (leader, worker):
            launcher.read_until("try 0 from")
        with silent_file_system(place):
            (tmp_path / "shared" / "now").touch()
            for launcher in (leader, worker):
                launcher.read_until("the file system does not answer; this host waits for it")
            worker.process.send_signal(signal.SIGTERM)
            assert leader.wait() == worker.wait() == 143, leader.text + worker.text
    assert "lost host" not in leader.text + worker.text
    assert "try 1 from" not in leader.text + worker.text


def test_a_job_ends_whose_output_is_on_a_file_system_that_died(tmp_path: Path) -> None:
    script = (
        "import os, time\n"
        "print('ready', flush=True)\n"
        "while not os.path.exists('now'): time.sleep(0.05)\n"
        "1 / 0\n"
    )
    write_inputs(tmp_path, script, {}, {})
    with Launcher(tmp_path) as launcher:
        launcher.read_until("ready")
        with silent_file_system(tmp_path / "output"):
            (tmp_path / "code" / "now").touch()
            assert launcher.wait() == 1, launcher.text
    assert f"cannot write below {tmp_path}/output: the file system does not answer" in launcher.text
    assert "ZeroDivisionError" in launcher.text


# --- /dev/shm -------------------------------------------------------------------------------------
OWN_MEMORY = (
    *("unshare", "--fork", "--pid", "--mount", "--ipc", "--mount-proc", "--kill-child"),
    *("sh", "-c", 'mount -t tmpfs "$0" /dev/shm && echo before > /dev/shm/before && exec "$@"'),
)
"""A container's /dev/shm.

The next word is the name of the file system: an engine calls it ``shm``.
"""

LEAVES_MEMORY = """
import mmap, os, signal

again = os.environ["TRAINWORKS_RESTART_COUNT"]
print("try", again, "finds", sorted(os.listdir("/dev/shm")), flush=True)
if again == "1":
    raise SystemExit
# As NCCL does; Python's own shared memory has a process that removes it.
with open("/dev/shm/left", "w+b") as opened:
    opened.write(bytes(1 << 20))
    opened.flush()
    mapped = mmap.mmap(opened.fileno(), 0)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("system", ["shm", "tmpfs"])
def test_what_a_killed_rank_left_in_shared_memory_is_removed_before_the_next_try(
    system: str,
) -> None:
    if subprocess.run((*OWN_MEMORY, system, "true"), check=False, capture_output=True).returncode:
        pytest.skip("no namespaces can be made here")
    base = Path(tempfile.mkdtemp(dir="/var/tmp"))
    try:
        write_inputs(base, LEAVES_MEMORY, {}, {})
        variables = {**shared(base / "shared"), "TMPDIR": "/var/tmp"}
        with Launcher(base, variables=variables, prefix=(*OWN_MEMORY, system)) as launcher:
            assert launcher.wait() == 0, launcher.text
    finally:
        shutil.rmtree(base)
    assert "try 0 finds ['before']" in launcher.text
    if system == "shm":
        assert "removed what dead ranks left: 1 file(s), 1 MiB, in /dev/shm" in launcher.text
        assert "try 1 finds ['before']" in launcher.text
    else:  # other jobs may use it, too
        assert (
            "dead ranks have left 1 file(s), 1 MiB, in /dev/shm; other jobs may use it too"
            in launcher.text
        )
        assert "try 1 finds ['before', 'left']" in launcher.text


def test_a_file_that_a_process_has_mapped_or_open_stays(tmp_path: Path) -> None:
    before = frozenset(shared_memory.files(str(tmp_path)))
    for name in ("mapped", "open", "left"):
        (tmp_path / name).write_bytes(bytes(4096))
    with (tmp_path / "mapped").open("r+b") as opened:
        mapped = mmap.mmap(opened.fileno(), 0)
    with (tmp_path / "open").open("rb"):
        cleaned = shared_memory.clean_up(before, str(tmp_path))
    mapped.close()
    assert cleaned is not None
    assert cleaned.number == 1
    assert not cleaned.removed, "this directory is not a container's /dev/shm"
    later = shared_memory.clean_up(before, str(tmp_path), until=1.0)
    assert later is None, "files of ranks that run now"
