"""A full disk and a daemon that dies in mid-build: real engines of our own,
small and apart from the machine's.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.daemons import mounts_below, own_daemon, processes_with
from engine.helpers import BASE, request
from trainworks.engine.buildah import BuildahEngine
from trainworks.engine.docker import DockerEngine
from trainworks.engine.protocol import StepEvent
from trainworks.errors import EngineUnavailableError, OutputError
from trainworks_testing.clock import assert_within, start_clock

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root"),
]

Daemon = tuple[DockerEngine, "subprocess.Popen[bytes]"]
FILL = f"FROM {BASE} AS big\nRUN dd if=/dev/zero of=/big bs=1M count=200\n"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Give a folder on a disk of 64 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(("mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)), check=True)
    try:
        yield folder
    finally:
        for mount in reversed(mounts_below(folder)):
            subprocess.run(("umount", "--lazy", mount), check=False)


@pytest.fixture
def daemon(small_disk: Path, base_archive: Path) -> Iterator[Daemon]:
    """Give a dockerd of our own that keeps its images on the small disk."""
    with own_daemon(small_disk, "--iptables=false") as daemon:
        engine = DockerEngine(host=daemon.host)
        engine.probe()
        engine.load(base_archive)
        yield engine, daemon.process


def ignore(_: StepEvent) -> None:
    pass


def test_a_full_disk_under_docker(daemon: Daemon, small_disk: Path, tmp_path: Path) -> None:
    engine, _ = daemon
    with pytest.raises(OutputError) as caught:
        engine.build(request(tmp_path / "context", FILL, components={"big": "torch"}), ignore)
    assert caught.value.message.startswith("the disk is full: the build of tiny, torch: RUN dd")
    assert f"{small_disk} is on a disk with" in caught.value.message
    assert "of 0.07 GB" in caught.value.message


def test_a_daemon_that_is_killed_in_mid_build(daemon: Daemon, tmp_path: Path) -> None:
    engine, process = daemon
    mark = str(uuid.uuid4().int)[:9]

    def kill_when_begun(event: StepEvent) -> None:
        if event.state == "output" and event.text == "begun":
            process.kill()

    build_request = request(
        tmp_path / "context",
        f"FROM {BASE} AS slow\nRUN echo begun; sleep 1{mark}\n",
        components={"slow": "torch"},
    )
    began = start_clock()
    try:
        with pytest.raises(EngineUnavailableError) as caught:
            engine.build(build_request, kill_when_begun)
    finally:
        for pid in processes_with(f"1{mark}"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert_within(60, began, time.monotonic())
    assert caught.value.message.startswith(
        "the docker daemon stopped answering during the build of tiny, torch: RUN"
    )
    assert "make engine" in caught.value.hint


def test_a_full_disk_under_buildah(small_disk: Path, base_archive: Path, tmp_path: Path) -> None:
    engine = BuildahEngine(
        options=("--root", f"{small_disk}/root", "--runroot", f"{small_disk}/run")
    )
    try:
        engine.probe()
    except EngineUnavailableError as error:
        pytest.skip(f"buildah does not answer: {error.message}")
    engine.load(base_archive)
    with pytest.raises(OutputError) as caught:
        engine.build(request(tmp_path / "context", FILL, components={"big": "torch"}), ignore)
    assert caught.value.message.startswith("the disk is full: the build of tiny, torch: RUN dd")
    assert f"{small_disk}/root is on a disk with" in caught.value.message
