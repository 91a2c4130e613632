"""The job's secret: from a variable or a file, and out of reach for other
processes of the same user.

Real launchers under a user of their own, with another real process of that user beside them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launcher_support import LAUNCHER, Launcher, write_inputs, write_manifest
from test_launcher_starters import STARTER

from trainworks_launcher.contract import names
from trainworks_launcher.contract.json_values import Json
from trainworks_launcher.environment.environment import read_environment
from trainworks_testing.ports import free_port

SECRET = "canary-0123456789abcdef0123456789"
USER = 61234
needs_root = pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("setpriv") is None,
    reason="NOT TESTED: needs root and setpriv for another user",
)
AS_USER = ("setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups")
READY = """
import os, signal
print("rank", os.getpid(), "is ready", flush=True)
signal.pause()
"""
THIEF = """
import sys, os

for name in os.listdir("/proc"):
    if name.isdecimal() and int(name) != os.getpid():
        try:
            if os.stat(f"/proc/{name}").st_uid not in (0, os.getuid()):
                continue
            status = dict(line.split(":", 1) for line in open(f"/proc/{name}/status"))
            if int(status["Uid"].split()[0]) != os.getuid():
                continue
            words = open(f"/proc/{name}/cmdline").read()
        except OSError:
            continue
        try:
            known = sys.argv[1] in open(f"/proc/{name}/environ").read()
            print("READ", name, "secret" if known else "no", repr(words))
        except OSError as error:
            print("REFUSED", name, error.strerror, repr(words))
        try:
            os.close(os.open(f"/proc/{name}/mem", os.O_RDONLY))
            print("MEMORY", name, repr(words))
        except OSError:
            pass
"""


def launcher_of_user(
    base: Path, script: str, hyperparameters: dict[str, Json] | None = None, **variables: str
) -> Launcher:
    """A launcher that runs as another user than this one, from a copy that this user can read."""
    write_inputs(base, script, hyperparameters or {}, {})
    shutil.copytree(LAUNCHER / "trainworks_launcher", base / "launcher/trainworks_launcher")
    for place in (base, *base.rglob("*")):
        os.chown(place, USER, USER)
    for parent in base.parents:
        if parent.stat().st_uid == os.getuid() and not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o011)
    program = (shutil.which("python3", path="/usr/bin:/usr/local/bin") or sys.executable, "-IS")
    entry = base / "launcher/trainworks_launcher/__main__.py"
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(base), "TMPDIR": str(base), **variables}
    return Launcher(base, prefix=AS_USER, program=(*program, str(entry)), variables=environment)


def lines_seen_by_user() -> list[str]:
    """Return the lines of another process of that user that reads all its processes."""
    command = [*AS_USER, "/usr/bin/python3", "-IS", "-c", THIEF, SECRET]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


@needs_root
def test_another_process_of_the_user_reads_the_secret_nowhere(tmp_path: Path) -> None:
    with launcher_of_user(tmp_path, READY, TRAINWORKS_JOB_SECRET=SECRET) as launcher:
        launcher.read_until("is ready")
        lines = lines_seen_by_user()
        rank = launcher.text.split("rank ")[1].split()[0]
        assert f"READ {rank} no" in "\n".join(lines), "the rank can be debugged"
        assert any(line.startswith("MEMORY " + rank) for line in lines)
        own = [line for line in lines if "__main__.py" in line]
        assert [line.split()[0] for line in own] == ["REFUSED"], own
        assert not [line for line in lines if " secret " in line]
        assert any("guard.py" in line and line.startswith("READ") for line in lines)


@needs_root
def test_a_job_with_a_secret_runs_as_a_user_and_its_files_in_proc_serve(tmp_path: Path) -> None:
    script = (
        "import os, sys; print('has', 'TRAINWORKS_JOB_SECRET' in os.environ); sys.exit('the cause')"
    )
    with launcher_of_user(tmp_path, script, TRAINWORKS_JOB_SECRET=SECRET) as launcher:
        assert launcher.wait() == 1, launcher.text
    assert "has False" in launcher.text
    assert "the cause" in launcher.failure
    assert "Permission" not in launcher.text


@needs_root
def test_ranks_of_a_user_report_and_their_stacks_are_read_while_the_launcher_holds_a_secret(
    tmp_path: Path,
) -> None:
    """torchrun is a stand-in; the hang watch is the real one, and asks each rank for its stacks."""
    torchrun = tmp_path / "torchrun"
    torchrun.write_text(f"#!/usr/bin/python3\n{STARTER}", encoding="utf-8")
    torchrun.chmod(0o755)
    image = write_manifest(
        tmp_path / "image.json", {"python": "/usr/bin/python3", "torchrun": str(torchrun)}
    )
    hyperparameters: dict[str, Json] = {
        "sagemaker_torch_distributed_enabled": "true",
        "sagemaker_mpi_num_of_processes_per_host": "2",
    }
    variables = {"TRAINWORKS_IMAGE_MANIFEST": str(image), "TRAINWORKS_HANG": "fail"}
    variables |= {"TRAINWORKS_HANG_LIMIT_SECONDS": "3", "TRAINWORKS_JOB_SECRET": SECRET}
    waits = "import threading\ndef stuck_here():\n    threading.Event().wait()\nstuck_here()\n"
    with launcher_of_user(tmp_path, waits, hyperparameters, **variables) as launcher:
        assert launcher.wait() == 68, launcher.text
    assert "stuck_here" in launcher.text + launcher.failure, launcher.text


def test_hosts_agree_on_a_secret_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text(f"{SECRET}\n", encoding="utf-8")
    hosts = ("127.0.0.1", "127.0.0.2")
    shared = {"TRAINWORKS_CONTROL_PORT": str(free_port()), "MASTER_PORT": str(free_port())}
    by_file = {"TRAINWORKS_JOB_SECRET_FILE": str(path)}
    launchers = []
    for host, variables in zip(hosts, (by_file, {"TRAINWORKS_JOB_SECRET": SECRET}), strict=True):
        config: dict[str, Json] = {
            "hosts": list(hosts),
            "current_host": host,
            "network_interface_name": "lo",
        }
        write_inputs(tmp_path / host, "print('trains')", {}, config)
        launchers.append(Launcher(tmp_path / host, variables={**shared, **variables}))
    with launchers[0], launchers[1]:
        assert [launcher.wait() for launcher in launchers] == [0, 0], (
            launchers[0].text + launchers[1].text
        )
    assert SECRET not in launchers[0].text + launchers[1].text


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read"), ("", "is empty"), (" \n", "is empty"), ("short", "can be guessed")],
)
def test_a_file_without_a_secret_is_refused(
    tmp_path: Path, content: str | None, message: str
) -> None:
    path = tmp_path / "secret"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    write_inputs(tmp_path / "job", "print('trains')", {}, {})
    with Launcher(
        tmp_path / "job", variables={"TRAINWORKS_JOB_SECRET_FILE": str(path)}
    ) as launcher:
        assert launcher.wait() == 64
    assert message in launcher.text
    assert "trains" not in launcher.text


def test_the_variable_wins_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("another-secret-of-the-job", encoding="utf-8")
    variables = {names.JOB_SECRET_FILE_VARIABLE: str(path), "SAGEMAKER_BASE_DIR": str(tmp_path)}
    assert read_environment(variables).job_secret == "another-secret-of-the-job"
    assert read_environment({**variables, names.JOB_SECRET_VARIABLE: SECRET}).job_secret == SECRET
