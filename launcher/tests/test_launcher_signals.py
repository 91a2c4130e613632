"""Signals that are for the script, and the end of a launcher that could not end
its job: real processes.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from launcher_support import (
    TIME_OUT,
    WAIT_FOR_SIGNALS,
    Launcher,
    pids_with_variable,
    write_inputs,
    write_manifest,
)

from trainworks_launcher.contract.stop_signals import PASSED_ON, STOP_SIGNALS, handled

PID_ONE = ("unshare", "--fork", "--pid", "--mount-proc", "--kill-child=SIGTERM")

SAVES = (
    WAIT_FOR_SIGNALS
    + """
import os, signal, sys

if HANDLER_AFTER:
    print("imports", flush=True)
    open(HANDLER_AFTER).read()

def save(number, frame):
    who = "worker" if os.getpid() != first else "rank"
    os.write(1, f"saved at {int(number)} in {who}\\n".encode())  # in one piece
    if os.getpid() != first:
        os._exit(0)
    if number != LAST:
        return
    os.kill(worker, signal.SIGKILL)
    sys.exit(0)

first = os.getpid()
for number in NUMBERS:
    signal.signal(number, save)
worker = os.fork()  # as a data loader does it: with its parent's handlers
if worker == 0:
    wait_for_signals()
print("ready", flush=True)
wait_for_signals()
"""
)


def saves(numbers: Sequence[int], handler_after: str = "") -> str:
    script = SAVES.replace("NUMBERS", repr([int(number) for number in numbers])).replace(
        "LAST", str(int(numbers[-1]))
    )
    return script.replace("HANDLER_AFTER", repr(handler_after))


def send(launcher: Launcher, number: int, prefix: Sequence[str] = ()) -> None:
    process_id = launcher.process_one() if prefix else launcher.process.pid
    os.kill(process_id, number)


# --- passed on, no stop ---------------------------------------------------------------------------
@pytest.mark.parametrize("prefix", [(), PID_ONE], ids=["child", "process one"])
def test_a_schedulers_signal_reaches_the_script_once_and_stops_nothing(
    tmp_path: Path, prefix: tuple[str, ...]
) -> None:
    if prefix and subprocess.run((*prefix, "true"), check=False, capture_output=True).returncode:
        pytest.skip("no PID namespace can be made here")
    numbers = (signal.SIGUSR1, signal.SIGALRM, signal.SIGXCPU, signal.SIGRTMIN + 3, signal.SIGUSR2)
    write_inputs(tmp_path, saves(numbers), {}, {})
    with Launcher(tmp_path, prefix=prefix) as launcher:
        launcher.read_until("ready")
        for number in numbers:
            send(launcher, number, prefix)
            launcher.read_until(f"saved at {int(number)} in rank")
        assert launcher.wait() == 0, launcher.text
    assert launcher.succeeded
    assert launcher.text.count("saved at") == len(numbers), launcher.text
    assert launcher.text.count("SIGUSR1: passed on to process ") == 1
    assert "stopped" not in launcher.text


def test_every_signal_that_would_end_the_launcher_without_a_word_is_handled() -> None:
    faults = {"ABRT", "BUS", "FPE", "ILL", "SEGV", "SYS", "TRAP"}
    left_alone = {
        "KILL",
        "CHLD",
        "PIPE",
        "XFSZ",
        "CONT",
        "WINCH",
        "URG",
        "TSTP",
        "TTIN",
        "TTOU",
        "STOP",
    }
    spared = {getattr(signal, f"SIG{name}") for name in faults | left_alone}
    assert signal.valid_signals() - spared == set(handled()) == {*STOP_SIGNALS, *PASSED_ON}


def test_a_shell_in_front_of_the_script_does_not_die_of_it(tmp_path: Path) -> None:
    """A shell without a trap would; the script behind it has the handler."""
    write_inputs(tmp_path, saves([signal.SIGUSR1]), {"sagemaker_program": "run.sh"}, {})
    (tmp_path / "code/run.sh").write_text(
        f"#!/bin/bash\n{sys.executable} train.py\necho code $?\n", encoding="utf-8"
    )
    with Launcher(tmp_path) as launcher:
        launcher.read_until("ready")
        send(launcher, signal.SIGUSR1)
        assert launcher.wait() == 0, launcher.text
    assert "code 0" in launcher.text


def test_a_signal_that_comes_before_the_handler_waits_for_it(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    write_inputs(tmp_path, saves([signal.SIGUSR1], str(gate)), {}, {})
    with Launcher(tmp_path) as launcher:
        launcher.read_until("imports")
        send(launcher, signal.SIGUSR1)
        launcher.read_until("SIGUSR1: kept until each rank of this host has a handler for it")
        gate.write_text("", encoding="ascii")
        assert launcher.wait() == 0, launcher.text
    assert launcher.text.count("saved at") == 1


def test_a_signal_that_comes_while_the_host_is_probed_waits_too(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    slow = tmp_path / "bin" / "nvidia-smi"
    slow.parent.mkdir()
    slow.write_text(f"#!/bin/sh\ncat {gate}\nexit 1\n", encoding="utf-8")
    slow.chmod(0o755)
    write_inputs(tmp_path, saves([signal.SIGUSR2]), {}, {})
    with Launcher(tmp_path, variables={"PATH": f"{slow.parent}:{os.environ['PATH']}"}) as launcher:
        with gate.open("w", encoding="ascii"):  # opens when the launcher has started nvidia-smi
            send(launcher, signal.SIGUSR2)
        assert launcher.wait() == 0, launcher.text
    assert launcher.text.count("saved at") == 1


# --- stops like TERM ------------------------------------------------------------------------------
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT])
@pytest.mark.parametrize("prefix", [(), PID_ONE], ids=["child", "process one"])
def test_a_hangup_stops_the_job_as_term_does(
    tmp_path: Path, number: signal.Signals, prefix: tuple[str, ...]
) -> None:
    if prefix and subprocess.run((*prefix, "true"), check=False, capture_output=True).returncode:
        pytest.skip("no PID namespace can be made here")
    write_inputs(tmp_path, saves([signal.SIGTERM]), {}, {})
    with Launcher(tmp_path, prefix=prefix) as launcher:
        launcher.read_until("ready")
        send(launcher, number, prefix)
        assert launcher.wait() == 0, launcher.text
    assert f"{number.name}: passed on as SIGTERM; " in launcher.text
    assert "job stopped" in launcher.text
    assert launcher.text.count(f"saved at {int(signal.SIGTERM)} in rank") == 1


def test_nohup_is_obeyed(tmp_path: Path) -> None:
    write_inputs(tmp_path, saves([signal.SIGUSR1]), {}, {})
    with Launcher(tmp_path, prefix=("nohup",)) as launcher:
        launcher.read_until("ready")
        send(launcher, signal.SIGHUP)
        send(launcher, signal.SIGUSR1)
        assert launcher.wait() == 0, launcher.text
    assert "SIGHUP" not in launcher.text


# --- the launcher is killed -----------------------------------------------------------------------
LEAVES = """
import os, signal, subprocess

pids = [os.getpid()]

def child(*words, **more):
    pids.append(subprocess.Popen(words, **more).pid)

child("sleep", "1000")
child("env", "-i", "/bin/sleep", "1000")
child("sleep", "1000", start_new_session=True)
orphan = "setsid sleep 1000 > /dev/null 2>&1 & echo $!"
shell = subprocess.run(["sh", "-c", orphan], stdout=subprocess.PIPE)
pids.append(int(shell.stdout))  # an orphan
worker = os.fork()
if worker == 0:
    os.setsid()
    while True:
        signal.pause()
pids.append(worker)
os.write(1, f"pids {' '.join(map(str, pids))} ready\\n".encode())
while True:
    signal.pause()
"""


def wait_for_ends(pids: Sequence[int]) -> None:
    """Wait until none of these processes is there; they are not children of this process."""
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        assert select.select([descriptor], [], [], TIME_OUT)[0], f"process {pid} goes on"
        os.close(descriptor)


def test_whatever_the_job_started_ends_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    write_inputs(tmp_path, LEAVES, {}, {})
    with Launcher(tmp_path) as launcher:
        launcher.read_until("ready")
        line = next(line for line in launcher.text.splitlines() if line.startswith("pids "))
        pids = [int(word) for word in line.split()[1:-1]]
        assert len(pids) == 6
        launcher.process.kill()
        wait_for_ends(pids)
        launcher.wait()  # its guard has closed the output, too
        assert (
            "the launcher has died; the processes of its job on this host were killed"
            in launcher.text
        )
        assert pids_with_variable("SAGEMAKER_BASE_DIR", str(tmp_path)) == []
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_script_that_overwrites_its_environment_ends_too(tmp_path: Path) -> None:
    """Overwrite it as setproctitle does: the kernel shows the bytes in that memory."""
    program = tmp_path / "bin/python"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec env -i {sys.executable} "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    image = write_manifest(tmp_path / "image.json", {"python": str(program)})
    write_inputs(
        tmp_path,
        "import os, signal\nprint('pid', os.getpid(), 'ready', flush=True)\nsignal.pause()\n",
        {},
        {},
    )
    with Launcher(tmp_path, variables={"TRAINWORKS_IMAGE_MANIFEST": str(image)}) as launcher:
        launcher.read_until("ready")
        pid = int(launcher.text.split("pid ")[1].split()[0])
        launcher.process.kill()
        wait_for_ends([pid])


def test_a_launcher_that_ends_in_order_leaves_no_guard(tmp_path: Path) -> None:
    write_inputs(tmp_path, "import os; os.system('ps -ewwo ppid,pid,args')", {}, {})
    with Launcher(tmp_path) as launcher:
        assert launcher.wait() == 0
    own = str((tmp_path / "tmp").resolve())
    guards = [
        line.split() for line in launcher.text.splitlines() if own in line and "guard.py" in line
    ]
    assert [int(words[0]) for words in guards] == [launcher.process.pid]
    with pytest.raises(ProcessLookupError):
        os.kill(int(guards[0][1]), 0)
