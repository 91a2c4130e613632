"""A dockerd of a test's own: new, in a network of its own, apart from the machine's."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True, kw_only=True)
class Daemon:
    """A running dockerd.

    Attributes:
        host: Its address, as ``DOCKER_HOST`` takes it.
        process: Its process, which ``kill`` ends.
    """

    host: str
    process: subprocess.Popen[bytes]

    def beside(self, *words: str) -> tuple[str, ...]:
        """Return the command that runs a program in the daemon's network: where its bridge is."""
        return ("nsenter", f"--target={self.process.pid}", "--net", "--", *words)


@contextlib.contextmanager
def own_daemon(data: Path, *options: str) -> Iterator[Daemon]:
    """Run a dockerd that keeps everything in the folder ``data``.

    Skip, in its words, where none starts.

    Its network namespace is its own: two daemons in one take each other's
    ``docker0`` and rules away.
    """
    program = shutil.which("dockerd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/bin")
    if program is None:
        pytest.skip("no dockerd on this machine")
    # Not below pytest's folder: a socket's path has 108 bytes.
    state = Path("/run") / f"trainworks-{uuid.uuid4().hex[:8]}"
    state.mkdir()
    argv = (
        *(
            "unshare",
            "--net",
            program,
            "--data-root",
            str(data),
            "--exec-root",
            str(state / "exec"),
        ),
        *("--pidfile", str(state / "pid"), "--host", f"unix://{state}/docker.sock", *options),
    )
    before = len(mounts_below(data))
    ready = threading.Event()
    words: list[str] = []
    with subprocess.Popen(argv, stderr=subprocess.PIPE, start_new_session=True) as process:

        def listen() -> None:
            assert process.stderr is not None
            for line in process.stderr:
                words.append(line.decode(errors="replace"))
                if b"API listen on" in line:
                    ready.set()

        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        try:
            if not ready.wait(60):
                pytest.skip(f"a second dockerd does not start here: {''.join(words[-3:])}")
            yield Daemon(host=f"unix://{state}/docker.sock", process=process)
        finally:
            # Its containerd, shims and steps have the state folder or the data
            # folder in their command lines.
            process.kill()
            process.wait(30)
            for pid in {*processes_with(str(state)), *processes_with(str(data))}:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            thread.join(10)
            # The daemon mounts its folder on itself; the mounts from before are another daemon's to
            # unmount.
            for mount in reversed([*mounts_below(state), *mounts_below(data)[before:]]):
                subprocess.run(("umount", "--lazy", mount), check=False)
            shutil.rmtree(state, ignore_errors=True)


def mounts_below(folder: Path) -> list[str]:
    """Return where something is mounted at or below a folder, in the order of mounting."""
    lines = Path("/proc/mounts").read_text().splitlines()
    return [
        where
        for line in lines
        if (where := line.split()[1]) == str(folder) or where.startswith(f"{folder}/")
    ]


def processes_with(text: str) -> list[int]:
    """Return the processes that have a text in their command lines, this one apart."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (
                text.encode() in (folder / "cmdline").read_bytes()
                and int(folder.name) != os.getpid()
            ):
                pids.append(int(folder.name))
    return pids
