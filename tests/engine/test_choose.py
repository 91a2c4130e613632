"""Test which engine is taken, and the message when none is there.

Each case is a process of its own, with its own PATH.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from trainworks import engine
from trainworks.engine.docker import DockerEngine
from trainworks.errors import EngineUnavailableError, UnknownNameError

CHOOSE = """
import sys
from trainworks.engine import choose
from trainworks.errors import TrainworksError
try:
    choose(*sys.argv[1:], report=lambda line: print(line, file=sys.stderr))
except TrainworksError as error:
    print(error)
    sys.exit(error.exit_status)
"""


def choose(
    tmp_path: Path, *arguments: str, code: str = CHOOSE, path: str = ""
) -> subprocess.CompletedProcess[str]:
    environment = {
        "PATH": path or str(tmp_path),
        "DOCKER_HOST": f"unix://{tmp_path}/no.sock",
        "HOME": str(tmp_path),
    }
    return subprocess.run(
        (sys.executable, "-W", "error", "-c", code, *arguments),
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def program(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_nothing_there_names_what_was_tried_and_what_to_type(tmp_path: Path) -> None:
    done = choose(tmp_path)
    assert done.returncode == EngineUnavailableError.exit_status, done.stderr
    first, docker, buildah, hint = done.stdout.splitlines()
    assert first == "no container engine answers. Tried:"
    assert docker.startswith(
        f"  docker: the docker daemon at unix://{tmp_path}/no.sock does not answer"
    )
    assert "No such file" in docker
    assert buildah == "  buildah: there is no `buildah` program on PATH"
    assert "make engine" in hint


def test_a_daemon_that_takes_the_call_and_says_nothing_is_not_waited_for_long(
    tmp_path: Path,
) -> None:
    lines: list[str] = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "no.sock"))
        listener.listen()
        with pytest.raises(EngineUnavailableError, match="does not answer: ") as caught:
            DockerEngine(host=f"unix://{tmp_path}/no.sock", first_answer=1).probe(lines.append)
    assert (
        f"the docker daemon at unix://{tmp_path}/no.sock does not answer: " in caught.value.message
    )
    assert lines == [
        f"waiting for the docker daemon at unix://{tmp_path}/no.sock to answer, at most 1 s"
    ]


AS_NOBODY = f"""
import os
import docker, docker.context, docker.errors, requests
from trainworks.engine import buildah, docker
os.seteuid(65534)
{CHOOSE}"""
"""Everything is imported before: another user may not read this Python's own files."""


def test_a_daemon_that_this_user_may_not_use_names_the_group() -> None:
    if os.geteuid() != 0:
        pytest.skip(
            "NOT TESTED: only root can start a process of another user, who may not use the socket"
        )
    with tempfile.TemporaryDirectory() as name, socket.socket(socket.AF_UNIX) as listener:
        folder = Path(name)
        folder.chmod(0o755)
        listener.bind(str(folder / "no.sock"))
        (folder / "no.sock").chmod(0o600)
        done = choose(folder, code=AS_NOBODY)
    assert done.returncode == EngineUnavailableError.exit_status, done.stderr
    assert "no.sock: Permission denied" in done.stdout
    assert done.stdout.splitlines()[-1].startswith(
        "hint: your user may not use this daemon: join its group"
    )


OLD = "echo 'buildah version 1.19.6 (image-spec 1.0.1)'"
CLOSED = (
    'case "$1" in --version) echo "buildah version 1.28.2";; *) echo "Error: mkdir: denied" >&2;'
    " exit 125;; esac"
)


@pytest.mark.parametrize(
    ("script", "before", "message"),
    [
        ("", "", "no `buildah` program"),
        (OLD, "", "is version 1.19.6, and cache mounts need 1.24"),
        # A folder of PATH that cannot be read: root may read every one, but no
        # file system has so long a name.
        (OLD, f"/{'x' * 300}:", "is version 1.19.6"),
        (CLOSED, "", "cannot open its store: Error: mkdir: denied"),
    ],
)
def test_a_buildah_that_cannot_be_used_says_why(
    script: str, before: str, message: str, tmp_path: Path
) -> None:
    if script:
        program(tmp_path, "buildah", script)
    done = choose(tmp_path, "buildah", path=f"{before}{tmp_path}")
    assert done.returncode == EngineUnavailableError.exit_status, done.stderr
    assert message in done.stdout


def test_an_unknown_engine_has_a_nearest_name() -> None:
    with pytest.raises(UnknownNameError, match="unknown engine 'dokcer'") as caught:
        engine.choose("dokcer")
    assert caught.value.hint == "did you mean docker? (available: docker, buildah)"


def test_choosing_imports_no_sdk_before_it_is_needed() -> None:
    code = (
        "import sys; from trainworks.engine import create;"
        " create('docker'); print('docker' in sys.modules)"
    )
    done = subprocess.run(
        (sys.executable, "-c", code), capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout == "False\n"


def test_every_engine_is_one_file() -> None:
    folder = Path(engine.__file__).parent
    for name, target in engine.ENGINES.items():
        assert (folder / f"{name}.py").is_file()
        assert target.startswith(f"trainworks.engine.{name}:")
        assert engine.create(name).name == name
