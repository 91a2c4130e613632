"""Test the launcher as it runs: real processes, real sockets, two hosts on loopback addresses."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from launcher_support import (
    LAUNCHER,
    REPOSITORY,
    TIME_OUT,
    TRAIN,
    WAIT_FOR_SIGNALS,
    Launcher,
    write_inputs,
    write_manifest,
)
from test_launcher_logs import ranks

from trainworks_launcher.contract.json_values import Json
from trainworks_testing.ports import free_port

LEADER, WORKER = "127.0.0.1", "127.0.0.2"
HOSTS = (LEADER, WORKER)
WAIT_FOR_TERM = (
    WAIT_FOR_SIGNALS
    + """
import os, signal, sys

def stop(number, frame):
    # Not with print(), which may be what the signal interrupts:
    # "reentrant call", and the script fails.
    os.write(1, f"saw {signal.Signals(number).name}\\n".encode())
    sys.exit(STATUS)

signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
wait_for_signals()
"""
)
IGNORE_TERM = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
while True:
    signal.pause()
"""


def run(
    base: Path, script: str, *, variables: Mapping[str, str] | None = None, **hyperparameters: Json
) -> Launcher:
    """Run one host's job to its end; return its launcher."""
    write_inputs(base, script, hyperparameters, {})
    with Launcher(base, variables=variables) as launcher:
        launcher.status = launcher.wait()
    return launcher


def test_success(tmp_path: Path) -> None:
    launcher = run(
        tmp_path, "import sys, os; print(sys.argv, os.environ['SM_HP_EPOCHS'])", epochs="3"
    )
    assert launcher.status == 0
    assert "['train.py', '--epochs', '3'] 3" in launcher.text
    assert launcher.succeeded
    assert launcher.failure == ""


def test_the_scripts_own_status(tmp_path: Path) -> None:
    launcher = run(tmp_path, "raise SystemExit(42)")
    assert launcher.status == 42
    assert launcher.failure == f"train.py on host {os.uname().nodename} (mode none): exit status 42"
    assert not launcher.succeeded


def test_death_by_signal(tmp_path: Path) -> None:
    launcher = run(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert launcher.status == 137
    assert "killed by SIGKILL (exit status 137" in launcher.failure


def test_the_failure_text_leads_with_the_cause(tmp_path: Path) -> None:
    launcher = run(
        tmp_path,
        "def deep(n):\n    if n: deep(n - 1)\n    raise ValueError('größe ' * 3)\ndeep(9)\n",
    )
    assert launcher.status == 1
    assert launcher.failure.startswith("ValueError: größe größe größe\ntrain.py on host")
    assert launcher.failure.endswith(
        "raise ValueError('größe ' * 3)\nValueError: größe größe größe "
    )
    assert len(launcher.failure) <= 1024


def test_a_failure_text_of_the_users_own_is_kept(tmp_path: Path) -> None:
    script = (
        "import os\n"
        "open(os.environ['SM_OUTPUT_DIR'] + '/failure', 'w').write('my own words')\n"
        "raise SystemExit(3)"
    )
    (tmp_path / "output").mkdir()
    launcher = run(tmp_path, script)
    assert (launcher.status, launcher.failure) == (3, "my own words")


OWN_WORDS = "open(os.environ['SM_OUTPUT_DIR'] + '/failure', 'w').write({words})"


def test_a_failure_text_of_the_users_own_is_shortened_to_what_the_platform_shows(
    tmp_path: Path,
) -> None:
    (tmp_path / "output").mkdir()
    words = "'the cause: ' + 'x' * 2_000_000 + ' the end'"
    launcher = run(tmp_path, f"import os\n{OWN_WORDS.format(words=words)}\nraise SystemExit(3)")
    assert len(launcher.failure) == 1024
    assert launcher.failure.startswith("the cause: x")
    assert launcher.failure.endswith("x the end")
    assert (
        json.loads((tmp_path / "output/failure.json").read_text(encoding="utf-8"))["text"]
        == launcher.failure
    )


@pytest.mark.parametrize("padding", [0, 395, 2000])
def test_a_secret_in_a_failure_text_of_the_users_own_is_masked(
    tmp_path: Path, padding: int
) -> None:
    """Redact also a secret that would be cut in two where the text is shortened."""
    (tmp_path / "output").mkdir()
    words = f"'x' * {padding} + ' no login with ' + os.environ['HUB_TOKEN'] + ' ' + 'y' * {padding}"
    write_inputs(
        tmp_path, f"import os\n{OWN_WORDS.format(words=words)}\nraise SystemExit(3)", {}, {}
    )
    with Launcher(tmp_path, variables={"HUB_TOKEN": "s3cr3t-value"}) as launcher:
        assert launcher.wait() == 3
    assert "s3cr3t" not in launcher.failure
    assert "s3cr3t" not in (tmp_path / "output/failure.json").read_text(encoding="utf-8")
    assert "no login with ******" in launcher.failure or padding == 2000


@pytest.mark.parametrize(
    ("script", "status"), [("print('hello')", 0), ("print('hello')\nraise SystemExit(5)", 5)]
)
def test_a_reader_that_went_before_the_first_line_does_not_change_the_status(
    tmp_path: Path, script: str, status: int
) -> None:
    write_inputs(tmp_path, script, {}, {})
    command = (sys.executable, "-I", str(LAUNCHER / "trainworks_launcher" / "__main__.py"))
    reader, writer = os.pipe()
    os.close(reader)
    env = {**os.environ, "SAGEMAKER_BASE_DIR": str(tmp_path)}
    done = subprocess.run(
        command, env=env, stdout=writer, stderr=writer, timeout=TIME_OUT, check=False
    )
    os.close(writer)
    assert done.returncode == status
    outcome_name = "failure" if status else "success"
    assert (tmp_path / "output" / outcome_name).exists()


@pytest.mark.parametrize(
    ("closed", "script", "status"),
    [
        ("<&- >&- 2>&-", "print('hello')", 0),
        ("<&- >&- 2>&-", "raise SystemExit(5)", 5),
        (">&- 2>&-", "print('hello')", 0),
        ("2>&-", "raise SystemExit(5)", 5),
    ],
)
def test_standard_streams_may_be_closed(
    tmp_path: Path, script: str, status: int, closed: str
) -> None:
    write_inputs(tmp_path, script, {}, {})
    command = ("sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-IS")
    main = str(LAUNCHER / "trainworks_launcher" / "__main__.py")
    env = {**os.environ, "SAGEMAKER_BASE_DIR": str(tmp_path)}
    done = subprocess.run(
        (*command, main), env=env, stdout=subprocess.PIPE, timeout=TIME_OUT, check=False
    )
    assert done.returncode == status
    outcome_name = "failure" if status else "success"
    assert (tmp_path / "output" / outcome_name).exists()
    refused = subprocess.run(
        (*command, main, "--plam"), env=env, stdout=subprocess.PIPE, timeout=TIME_OUT, check=False
    )
    assert refused.returncode == 64


def test_files_of_an_earlier_run_are_removed(tmp_path: Path) -> None:
    (tmp_path / "output").mkdir()
    (tmp_path / "output/failure").write_text("old", encoding="utf-8")
    (tmp_path / "output/success").touch()
    assert run(tmp_path, "").failure == ""
    assert not run(tmp_path, "raise SystemExit(1)").succeeded


def test_refused_inputs_start_nothing_and_say_so_in_the_failure_file(tmp_path: Path) -> None:
    launcher = run(
        tmp_path,
        "print('started')",
        sagemaker_mpi_enabled="true",
        sagemaker_torch_distributed_enabled="true",
    )
    assert launcher.status == 64
    assert "both switched on" in launcher.failure
    assert "started" not in launcher.text


def test_output_is_streamed_byte_for_byte(tmp_path: Path) -> None:
    data = bytes(range(256)) * 4096 + "größe\n".encode() * 1000 + b"no newline at the end"
    (tmp_path / "data").write_bytes(data)
    write_inputs(
        tmp_path,
        f"import sys; sys.stdout.buffer.write(open({str(tmp_path / 'data')!r}, 'rb').read())",
        {},
        {},
    )
    with Launcher(tmp_path, stderr=subprocess.DEVNULL) as launcher:
        assert launcher.wait() == 0
    assert launcher.output == data


def test_a_reader_that_goes_away_does_not_stop_the_job(tmp_path: Path) -> None:
    write_inputs(tmp_path, "for i in range(30000): print('line', i)", {}, {})
    with Launcher(tmp_path, stderr=subprocess.DEVNULL) as launcher:
        launcher.read_until("line 10")
        assert launcher.process.stdout is not None
        launcher.process.stdout.close()
        assert launcher.process.wait(TIME_OUT) == 0
    assert launcher.succeeded


@pytest.mark.parametrize(("status", "is_kept"), [(0, False), (7, True)])
def test_sigterm_reaches_the_script_which_has_its_grace(
    tmp_path: Path, status: int, is_kept: bool
) -> None:
    write_inputs(tmp_path, WAIT_FOR_TERM.replace("STATUS", str(status)), {}, {})
    with Launcher(tmp_path) as launcher:
        launcher.read_until("ready")
        launcher.process.send_signal(signal.SIGTERM)
        assert launcher.wait() == status
    assert "saw SIGTERM" in launcher.text
    assert f"job stopped (exit status {status}" in launcher.text
    assert launcher.failure.startswith("stopped by SIGTERM") is is_kept
    assert not launcher.succeeded


def test_who_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    write_inputs(tmp_path, IGNORE_TERM, {}, {})
    with Launcher(tmp_path, variables={"TRAINWORKS_STOP_GRACE_SECONDS": "0.3"}) as launcher:
        launcher.read_until("ready")
        launcher.process.send_signal(signal.SIGTERM)
        assert launcher.wait() == 137
    assert "TRAINWORKS_STOP_GRACE_SECONDS=0.3 is over: KILL" in launcher.text
    assert launcher.failure.startswith("stopped by SIGTERM")


def test_what_the_script_leaves_behind_is_ended(tmp_path: Path) -> None:
    script = (
        "import subprocess\nprint('pid', subprocess.Popen(['sleep', '300']).pid, 'end', flush=True)"
    )
    launcher = run(tmp_path, script)
    assert launcher.status == 0
    pid = int(launcher.text.partition("pid ")[2].split()[0])
    state = Path(f"/proc/{pid}/stat")
    assert (
        not state.exists() or state.read_text(encoding="ascii").rpartition(")")[2].split()[0] == "Z"
    )


def test_a_daemon_in_a_session_of_its_own_with_an_empty_environment_is_ended(
    tmp_path: Path,
) -> None:
    script = (
        "import subprocess\n"
        "for _ in range(3): subprocess.run(['setsid', '-f', 'env', '-i', 'sh', '-c', 'exit 0'])\n"
        "subprocess.run(['setsid', '-f', 'env', '-i', 'sh', '-c', 'echo daemon $$ end;"
        " exec sleep 300 >&- 2>&-'])\n"
    )
    launcher = run(tmp_path, script)
    assert launcher.status == 0
    assert not Path(f"/proc/{launcher.text.partition('daemon ')[2].split()[0]}").exists()


@pytest.mark.parametrize("kind", ["pipe", "link to a device", "link", "directory"])
def test_a_failure_file_that_is_not_a_file_is_replaced(tmp_path: Path, kind: str) -> None:
    (tmp_path / "output").mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("not ours", encoding="utf-8")
    statement = {
        "pipe": "os.mkfifo(p)",
        "link to a device": "os.symlink('/dev/zero', p)",
        "link": f"os.symlink({str(elsewhere)!r}, p)",
        "directory": "os.mkdir(p)",
    }[kind]
    place = "p = os.environ['SM_OUTPUT_DIR'] + '/failure'"
    launcher = run(tmp_path, f"import os\n{place}\n{statement}\nraise SystemExit(3)")
    assert launcher.status == 3
    assert elsewhere.read_text(encoding="utf-8") == "not ours"
    if kind == "directory":
        assert "cannot write below" in launcher.text
    elif kind == "link":
        assert launcher.failure == "not ours"
    else:
        assert launcher.failure.startswith("train.py on host ")
        assert not (tmp_path / "output/failure").is_symlink()


def test_nothing_is_left_in_the_temporary_directory(tmp_path: Path) -> None:
    script = (
        "import os; print(sorted(os.listdir(os.environ['TRAINWORKS_RUNTIME_DIRECTORY'])),"
        " os.environ['TMPDIR'])"
    )
    launcher = run(tmp_path, script)
    scratch = (tmp_path / "tmp").resolve()
    assert f"\n[] {scratch}\n" in launcher.text
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("memory", [False, True])
def test_without_a_directory_for_temporary_files_the_job_is_refused(
    tmp_path: Path, memory: bool
) -> None:
    """Make only the results writable, and in Docker /dev/shm too.

    Never is anything put into the user's code.
    """
    if os.geteuid() != 0:
        pytest.skip("mount namespaces need root")
    write_inputs(
        tmp_path, "import os; print('in', os.environ['TRAINWORKS_RUNTIME_DIRECTORY'])", {}, {}
    )
    results = [tmp_path / name for name in ("output", "model")]
    for place in results:
        place.mkdir()
    read_only = ["/tmp", "/var/tmp", *([] if memory else ["/dev/shm"])]
    lines = [f"mount --bind {place} {place}" for place in results]
    lines += [f"mountpoint -q {path} || mount --bind {path} {path}" for path in read_only]
    lines += [f"mount -o remount,ro,bind {path}" for path in read_only]
    setup = "\n".join(["set -e", *lines, f"cd {tmp_path}/code", 'exec "$@"'])
    with Launcher(tmp_path, prefix=("unshare", "--mount", "sh", "-c", setup, "sh")) as launcher:
        status = launcher.wait()
    assert status == (0 if memory else 65), launcher.text
    assert "Traceback" not in launcher.text
    assert not list((tmp_path / "code").glob("trainworks-*"))
    if memory:
        assert "in /dev/shm/trainworks-" in launcher.text
    else:
        assert launcher.failure.startswith(
            "cannot start the job: no directory for temporary files can be written ("
        )
        assert "docker run --tmpfs /tmp" in launcher.failure


def test_requirements_that_cannot_be_installed_name_themselves(tmp_path: Path) -> None:
    write_inputs(tmp_path, "print('started')", {}, {})
    (tmp_path / "code/requirements.txt").write_text("./absent-package\n", encoding="utf-8")
    programs = {"python": sys.executable}
    manifest = write_manifest(tmp_path / "image.json", programs)
    with Launcher(tmp_path, variables={"TRAINWORKS_IMAGE_MANIFEST": str(manifest)}) as launcher:
        assert launcher.wait() == 65
    reason, place = launcher.failure.splitlines()[:2]
    assert "absent-package" in reason
    assert place.startswith("installing requirements.txt on host")
    assert "started" not in launcher.text.replace("cannot be started", "")


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (b"#!/bin/sh\r\necho started\r\n", "its lines end with CR LF, as on Windows"),
        (
            b"#!/no/such/shell -e\necho started\n",
            "its first line names the interpreter '/no/such/shell', which does not",
        ),
        (b"\x7fELF\0\0another machine's", "Exec format error"),
    ],
)
def test_a_script_that_cannot_be_started_is_told_what_is_wrong_with_it(
    tmp_path: Path, script: bytes, words: str
) -> None:
    """The kernel says of the first two that there is no such file."""
    write_inputs(tmp_path, "", {"sagemaker_program": "run.sh"}, {})
    (tmp_path / "code/run.sh").write_bytes(script)
    (tmp_path / "code/run.sh").chmod(0o755)
    with Launcher(tmp_path) as launcher:
        assert launcher.wait() == 65
    assert words in launcher.failure
    assert launcher.failure.startswith(f"cannot start ./run.sh in {tmp_path}/code: ")


@pytest.mark.parametrize("name", ["run.sh", "run"])
def test_a_script_without_a_first_line_for_the_kernel_is_run_by_sh(
    tmp_path: Path, name: str
) -> None:
    """Give the script the execute bit.

    As `/bin/sh -c ./run.sh` does, with which sagemaker-training starts scripts.
    """
    write_inputs(tmp_path, "", {"sagemaker_program": name, "lr": "0.1"}, {})
    (tmp_path / "code" / name).write_bytes(b'echo "started $0 with $*"\nexit 4\n')
    (tmp_path / "code" / name).chmod(0o755)
    with Launcher(tmp_path) as launcher:
        assert launcher.wait() == 4
    assert f"started ./{name} with --lr 0.1\n" in launcher.text


def pack(path: Path, members: Mapping[str, bytes], *, link: str = "") -> str:
    """A tar.gz; ``link`` adds a symbolic link to it."""
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        if link:
            member = tarfile.TarInfo("link")
            member.type, member.linkname = tarfile.SYMTYPE, link
            archive.addfile(member)
    return str(path)


def test_code_comes_from_an_archive_and_wins_over_what_is_there(tmp_path: Path) -> None:
    archive = pack(
        tmp_path / "sourcedir.tar.gz",
        {"train.py": b"import helper", "helper.py": b"print('from archive')"},
    )
    launcher = run(tmp_path, "print('baked in')", sagemaker_submit_directory=archive)
    assert launcher.status == 0
    assert "from archive" in launcher.text
    assert "baked in" not in launcher.text


@pytest.mark.parametrize(
    ("members", "link", "words"),
    [
        ({"../outside.py": b""}, "", "'../outside.py': its path leaves the directory"),
        ({}, "/etc", "'link': it links out of the directory"),
        ({}, "../..", "'link': it links out of the directory"),
    ],
)
def test_an_archive_cannot_write_outside(
    tmp_path: Path, members: dict[str, bytes], link: str, words: str
) -> None:
    archive = pack(tmp_path / "sourcedir.tar.gz", {"train.py": b"", **members}, link=link)
    launcher = run(tmp_path, "", sagemaker_submit_directory=archive)
    assert launcher.status == 64
    assert words in launcher.failure
    assert not (tmp_path / "outside.py").exists()


def test_a_shell_script_gets_its_arguments_unsplit(tmp_path: Path) -> None:
    write_inputs(tmp_path, "", {"sagemaker_program": "run.sh", "text": "a  b; $HOME"}, {})
    (tmp_path / "code/run.sh").write_text('printf "<%s>" "$@"\n', encoding="utf-8")
    with Launcher(tmp_path) as launcher:
        assert launcher.wait() == 0
    assert "<--text><a  b; $HOME>" in launcher.text


def test_anything_but_train_is_executed_as_given(tmp_path: Path) -> None:
    with Launcher(tmp_path, "printf", "%s", "a  b") as launcher:
        assert launcher.wait() == 0
    assert launcher.text == "a  b"
    with Launcher(tmp_path, "no-such-program") as launcher:
        assert launcher.wait() == 127
    assert "cannot execute 'no-such-program'" in launcher.text


def test_plan_prints_json_and_runs_nothing(tmp_path: Path) -> None:
    write_inputs(tmp_path, "print('started')", {}, {"hosts": list(HOSTS), "current_host": LEADER})
    for arguments, host in ((("--plan",), LEADER), (("train", "--plan", "--host", WORKER), WORKER)):
        with Launcher(tmp_path, *arguments) as launcher:
            assert launcher.wait() == 0
        assert json.loads(launcher.text)["host"] == host
        assert "started" not in launcher.text
    assert not (tmp_path / "output").exists()


# --- two hosts ------------------------------------------------------------------------------------
@contextlib.contextmanager
def two_hosts(
    tmp_path: Path,
    script: str,
    *,
    hyperparameters: Mapping[str, Json] | None = None,
    variables: Mapping[str, str] | None = None,
    worker: bool = True,
) -> Iterator[tuple[Launcher, Launcher]]:
    """A leader and a worker, started together."""
    shared = {"TRAINWORKS_CONTROL_PORT": str(free_port()), **(variables or {})}
    launchers = []
    with contextlib.ExitStack() as stack:
        for host in HOSTS if worker else HOSTS[:1]:
            base = tmp_path / host
            config: dict[str, Json] = {
                "hosts": list(HOSTS),
                "current_host": host,
                "network_interface_name": "lo",
            }
            write_inputs(base, script, hyperparameters or {}, config)
            launchers.append(stack.enter_context(Launcher(base, variables=shared)))
        yield launchers[0], launchers[-1]


def test_two_hosts_succeed_together_each_with_its_own_name(tmp_path: Path) -> None:
    with two_hosts(tmp_path, "import os; print('I am', os.environ['SM_CURRENT_HOST'])") as (
        leader,
        worker,
    ):
        assert (leader.wait(), worker.wait()) == (0, 0)
    assert f"I am {LEADER}" in leader.text
    assert f"I am {WORKER}" in worker.text
    assert leader.succeeded
    assert worker.succeeded
    leader.assert_ended_within(5)
    worker.assert_ended_within(5)


@pytest.mark.parametrize("failing", HOSTS)
def test_a_failure_on_one_host_is_the_same_end_on_both(tmp_path: Path, failing: str) -> None:
    script = (
        "import os, signal\n"
        f"if os.environ['SM_CURRENT_HOST'] == {failing!r}: raise ValueError('the cause')\n"
        "signal.pause()\n"
    )
    with two_hosts(tmp_path, script) as (leader, worker):
        assert (leader.wait(), worker.wait()) == (1, 1)
    assert leader.failure == worker.failure
    assert leader.failure.startswith(f"ValueError: the cause\ntrain.py on host {failing}")
    assert not leader.succeeded
    assert not worker.succeeded
    leader.assert_ended_within(5)
    worker.assert_ended_within(5)


def test_a_stubborn_process_on_the_other_host_is_killed(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"if os.environ['SM_CURRENT_HOST'] == {LEADER!r}: sys.exit(42)\n"
        "print('ready', flush=True)\nwhile True: signal.pause()\n"
    )
    with two_hosts(tmp_path, script) as (leader, worker):
        assert (leader.wait(), worker.wait()) == (42, 42)
    leader.assert_ended_within(6)
    worker.assert_ended_within(6)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_host_ends_the_other(tmp_path: Path, lost: int) -> None:
    with two_hosts(
        tmp_path, "import signal; print('ready', flush=True); signal.pause()"
    ) as launchers:
        for launcher in launchers:
            launcher.read_until("ready")
        launchers[lost].process.kill()
        other = launchers[1 - lost]
        assert other.wait() == 66
    assert other.failure.startswith(f"lost host {HOSTS[lost]}: ")
    assert not other.succeeded


def test_a_host_lost_after_its_own_success_is_lost_all_the_same(tmp_path: Path) -> None:
    script = f"import os, signal\nif os.environ['SM_CURRENT_HOST'] == {LEADER!r}: signal.pause()\n"
    with two_hosts(tmp_path, script) as (leader, worker):
        worker.read_until("this host has finished; it waits for the others")
        worker.process.kill()
        assert leader.wait() == 66
    assert leader.failure.startswith(f"lost host {WORKER}: ")


def test_a_host_that_is_silent_counts_as_lost(tmp_path: Path) -> None:
    limits = {"TRAINWORKS_HEARTBEAT_LIMIT_SECONDS": "8"}
    script = "import signal; print('ready', flush=True); signal.pause()"
    with two_hosts(tmp_path, script, variables=limits) as (leader, worker):
        leader.read_until("ready")
        worker.read_until("ready")
        worker.process.send_signal(signal.SIGSTOP)
        assert leader.wait() == 66
        worker.process.send_signal(signal.SIGCONT)
        assert worker.wait() == 66
    assert "no message from it" in leader.failure


@pytest.mark.parametrize("refusing", [0, 1])
def test_a_refusal_on_one_host_is_the_end_of_the_others_at_once(
    tmp_path: Path, refusing: int
) -> None:
    """Remove the code of one host: the others must not wait for it until the join time-out."""
    launchers = []
    variables = {"TRAINWORKS_CONTROL_PORT": str(free_port())}
    with contextlib.ExitStack() as stack:
        for number, host in enumerate(HOSTS):
            config: dict[str, Json] = {
                "hosts": list(HOSTS),
                "current_host": host,
                "network_interface_name": "lo",
            }
            write_inputs(tmp_path / host, "print('started')", {}, config)
            if number == refusing:
                (tmp_path / host / "code/train.py").unlink()
            launchers.append(stack.enter_context(Launcher(tmp_path / host, variables=variables)))
        assert [launcher.wait() for launcher in launchers] == [64, 64]
    assert launchers[0].failure == launchers[1].failure
    assert f"no code found ({tmp_path / HOSTS[refusing]}/code)" in launchers[0].failure
    assert not [launcher for launcher in launchers if "\nstarted\n" in launcher.text]
    for launcher in launchers:
        launcher.assert_ended_within(5)


def test_a_host_that_never_comes_is_named(tmp_path: Path) -> None:
    with two_hosts(
        tmp_path, "", variables={"TRAINWORKS_JOIN_LIMIT_SECONDS": "1"}, worker=False
    ) as (leader, _):
        assert leader.wait() == 66
    assert leader.failure == f"hosts that did not join within 1 s: {WORKER}"


def test_a_leader_that_never_comes_is_named(tmp_path: Path) -> None:
    write_inputs(tmp_path, "", {}, {"hosts": list(HOSTS), "current_host": WORKER})
    variables = {"TRAINWORKS_JOIN_LIMIT_SECONDS": "1", "TRAINWORKS_CONTROL_PORT": str(free_port())}
    with Launcher(tmp_path, variables=variables) as launcher:
        assert launcher.wait() == 66
    assert f"the leader {LEADER} did not answer on port" in launcher.failure
    assert "refused" in launcher.failure


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stop_signal_to_one_host_stops_both_with_their_grace(
    tmp_path: Path, stopped: int
) -> None:
    with two_hosts(tmp_path, WAIT_FOR_TERM.replace("STATUS", "0")) as launchers:
        for launcher in launchers:
            launcher.read_until("ready")
        launchers[stopped].process.send_signal(signal.SIGTERM)
        assert [launcher.wait() for launcher in launchers] == [0, 0]
    for launcher in launchers:
        assert "saw SIGTERM" in launcher.text
        assert "job stopped" in launcher.text
        assert not launcher.succeeded


def test_a_stop_signal_while_waiting_for_the_others(tmp_path: Path) -> None:
    with two_hosts(tmp_path, "", worker=False) as (leader, _):
        leader.read_until("waiting for 1 other host")
        leader.process.send_signal(signal.SIGTERM)
        assert leader.wait() == 143
    assert "before the program was started" in leader.failure


def test_a_taken_port_is_said(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        with two_hosts(tmp_path, "", variables={"TRAINWORKS_CONTROL_PORT": port}, worker=False) as (
            leader,
            _,
        ):
            assert leader.wait() == 66
    assert f"cannot listen on port {port}" in leader.failure


def test_torchrun_gets_its_words_on_each_host(tmp_path: Path) -> None:
    """A stand-in for torchrun: any program that takes its words and gives a status."""
    torchrun = tmp_path / "torchrun"
    torchrun.write_text('#!/bin/sh\necho "$@"\n', encoding="utf-8")
    torchrun.chmod(0o755)
    manifest = write_manifest(
        tmp_path / "image.json", {"python": sys.executable, "torchrun": str(torchrun)}
    )
    hyperparameters: dict[str, Json] = {
        "sagemaker_torch_distributed_enabled": "true",
        "sagemaker_mpi_num_of_processes_per_host": "2",
        "epochs": "3",
    }
    variables = {"TRAINWORKS_IMAGE_MANIFEST": str(manifest)}
    with two_hosts(tmp_path, "", hyperparameters=hyperparameters, variables=variables) as launchers:
        assert [launcher.wait() for launcher in launchers] == [0, 0]
    for rank, launcher in enumerate(launchers):
        words = (
            f"--nnodes=2 --nproc-per-node=2 --master-addr={LEADER} --master-port=7777"
            f" --node-rank={rank}"
        )
        assert f"{words} --no-python " in launcher.text
        assert f"rank.py -- {sys.executable} train.py --epochs 3" in launcher.text
    assert re.search(
        r"^trainworks: 2 of 2 hosts are here after \d+ s: starting torchrun$",
        launchers[0].text,
        re.MULTILINE,
    )


def test_the_leader_says_that_the_hosts_have_come_while_they_install(tmp_path: Path) -> None:
    """People looked for a firewall, because its last line was that it waits for the others."""
    python, done = tmp_path / "python", tmp_path / "done"
    wait = f'case "$*" in *install.py*) until [ -e {done} ]; do sleep 0.1; done; exit 0;; esac'
    python.write_text(f'#!/bin/sh\n{wait}\nexec {sys.executable} "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    for host in HOSTS:
        (tmp_path / host / "code").mkdir(parents=True)
        (tmp_path / host / "code/requirements.txt").write_text("anything\n", encoding="utf-8")
    manifest = write_manifest(tmp_path / "image.json", {"python": str(python)})
    with two_hosts(
        tmp_path, "", variables={"TRAINWORKS_IMAGE_MANIFEST": str(manifest)}
    ) as launchers:
        launchers[0].read_until("waiting until they are prepared")
        done.touch()
        assert [launcher.wait() for launcher in launchers] == [0, 0]
    lines = [
        line for line in launchers[0].text.splitlines() if " of 2 hosts are here after " in line
    ]
    assert [line.rpartition(" s: ")[2] for line in lines] == [
        "waiting until they are prepared",
        "starting train.py",
    ]


# --- PID 1 ----------------------------------------------------------------------------------------
def test_as_process_one_it_reaps_forwards_and_keeps_the_status(tmp_path: Path) -> None:
    """Run in a PID namespace of its own: orphans are reaped, SIGTERM reaches the script, the status
    is the script's.

    A zombie that stays keeps the script from its end, and SIGKILL comes after 5 s.
    """
    probe = subprocess.run(
        ("unshare", "--fork", "--pid", "--mount-proc", "true"), check=False, capture_output=True
    )
    if probe.returncode:
        pytest.skip(f"no PID namespace can be made here: {probe.stderr.decode().strip()}")
    script = (
        "import os, subprocess, sys, time\n"
        "print('parent is', os.getppid(), flush=True)\n"
        "def state(pid):\n"
        "    try: return open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[0]\n"
        "    except OSError: return 'reaped'\n"
        "def zombies(): return [pid for pid in os.listdir('/proc')"
        " if pid.isdecimal() and state(pid) == 'Z']\n"
        "subprocess.run(['sh', '-c', 'sleep 0 & exec true'])\n"
        "orphan = subprocess.run(['sh', '-c',"
        " 'setsid sh -c \"exit 0\" & echo $!'], stdout=subprocess.PIPE)\n"
        + WAIT_FOR_TERM.replace(
            "    sys.exit(STATUS)",
            "    while zombies(): time.sleep(0.01)\n"
            "    print('no zombies', flush=True)\n"
            "    sys.exit(5)",
        )
    )
    write_inputs(tmp_path, script, {}, {})
    prefix = ("unshare", "--fork", "--pid", "--mount-proc", "--kill-child=SIGTERM")
    with Launcher(tmp_path, prefix=prefix) as launcher:
        launcher.read_until("ready")
        launcher.signal_process_one(signal.SIGTERM)
        assert launcher.wait() == 5
    assert "parent is 1" in launcher.text
    assert "no zombies" in launcher.text


def test_the_entry_point_runs_from_its_place_in_an_image(tmp_path: Path) -> None:
    """Run bin/train beside lib/, with a foreign PYTHONPATH."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "lib").mkdir()
    (tmp_path / "bin/train").write_bytes((REPOSITORY / "launcher/entrypoint/train").read_bytes())
    (tmp_path / "lib/trainworks_launcher").symlink_to(REPOSITORY / "launcher/trainworks_launcher")
    evil = tmp_path / "evil"
    evil.mkdir()
    (evil / "json.py").write_text("raise SystemExit('user module')", encoding="utf-8")
    done = subprocess.run(
        (sys.executable, "-I", str(tmp_path / "bin/train"), "--version"),
        env={"PYTHONPATH": str(evil), "PATH": os.defpath},
        capture_output=True,
        timeout=TIME_OUT,
        check=False,
    )
    assert (done.returncode, done.stdout.decode()) == (0, "trainworks-launcher 0.1.0\n")


# --- the end of a job waits for none of these ----------------------------------------------------
AUDITED = """
import os, runpy, sys
log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
def hook(event, arguments):
    if event == "open" and isinstance(arguments[0], str) and arguments[0].startswith("/proc/"):
        os.write(log, (arguments[0] + chr(10)).encode())
sys.addaudithook(hook)
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a program and writes down which files of the kernel it opens."""


def test_the_end_of_a_job_reads_no_environment_of_a_process(tmp_path: Path) -> None:
    """A process that hangs in a driver holds the lock that such a read waits for.

    Proc(5), stat, has none.
    """
    opened = tmp_path / "opened"
    program = (sys.executable, "-ISc", AUDITED, str(opened), *TRAIN[2:])
    script = (
        "import subprocess\n"
        "subprocess.run(['setsid', '-f', 'env', '-i', 'sh', '-c', 'echo daemon $$ end;"
        " exec sleep 300 >&- 2>&-'])\n"
    )
    write_inputs(tmp_path, script, {}, {})
    with Launcher(tmp_path, program=program) as launcher:
        assert launcher.wait() == 0, launcher.text
    assert not Path(f"/proc/{launcher.text.partition('daemon ')[2].split()[0]}").exists()
    files = opened.read_text(encoding="utf-8").splitlines()
    assert any(file.endswith("/stat") for file in files)
    assert [
        file for file in files if file.endswith(("/environ", "/cmdline", "/maps", "/mem"))
    ] == []


def test_the_guard_reads_no_environment_of_a_process(tmp_path: Path) -> None:
    opened, directory = tmp_path / "opened", tmp_path / "job"
    directory.mkdir()
    hard = resource.getrlimit(resource.RLIMIT_MSGQUEUE)[1]
    mark = (hard if hard != resource.RLIM_INFINITY else 819200) - 70001
    words = [
        "prlimit",
        f"--msgqueue={mark}:",
        "setsid",
        "-f",
        "env",
        "-i",
        "sh",
        "-c",
        "echo $$; exec sleep 300 >&-",
    ]
    started = subprocess.run(words, check=True, stdout=subprocess.PIPE)
    pid = int(started.stdout)
    guard = str(LAUNCHER / "trainworks_launcher/programs/guard.py")
    command = (sys.executable, "-ISc", AUDITED, str(opened), guard, str(mark), str(directory))
    subprocess.run(
        command, check=True, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=TIME_OUT
    )
    assert (
        not Path(f"/proc/{pid}").exists()
        or Path(f"/proc/{pid}/stat").read_text("ascii").split()[2] == "Z"
    )
    files = opened.read_text(encoding="utf-8").splitlines()
    assert any(file.endswith("/limits") for file in files)
    assert not any(file.endswith("/environ") for file in files)
    assert not directory.exists()


HOME = "import os\nprint('home', os.environ.get('PYTHONHOME'), flush=True)\n"


@pytest.mark.parametrize("mode", ["none", "torch_distributed"])
def test_pythonhome_of_another_python_is_left_out_with_a_line(tmp_path: Path, mode: str) -> None:
    """A scheduler may hand on the environment of the host: each Python would
    end with 1 before its first line.
    """
    variables = {"PYTHONHOME": "/opt/another/python", "PATH": os.environ["PATH"]}
    if mode == "none":
        write_inputs(tmp_path, HOME, {}, {})
        launcher = Launcher(tmp_path, variables=variables)
    else:
        launcher = ranks(tmp_path, HOME, 2, variables=variables)
    with launcher:
        assert launcher.wait() == 0, launcher.text
    assert launcher.text.count("home None\n") == (1 if mode == "none" else 2)
    assert (
        "warning: left out PYTHONHOME=/opt/another/python: it is of another Python than "
        in launcher.text
    )


def test_pythonhome_of_the_jobs_own_python_stays(tmp_path: Path) -> None:
    """An image may set PYTHONHOME for its own Python, in any place."""
    home = tmp_path / "python"
    (home / "bin").mkdir(parents=True)
    program = home / "bin/python"
    program.write_text(
        f'#!/bin/sh\necho home "$PYTHONHOME"\nunset PYTHONHOME\nexec {sys.executable} "$@"\n',
        encoding="ascii",
    )
    program.chmod(0o755)
    manifest = write_manifest(tmp_path / "image.json", {"python": str(program)})
    write_inputs(tmp_path, HOME, {}, {})
    variables = {"PYTHONHOME": str(home), "TRAINWORKS_IMAGE_MANIFEST": str(manifest)}
    with Launcher(tmp_path, variables=variables) as launcher:
        assert launcher.wait() == 0, launcher.text
    assert f"home {home}\n" in launcher.text
    assert "left out" not in launcher.text
