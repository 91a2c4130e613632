"""Share real launcher processes among the launcher's tests, and the made-up environments of
``trainworks_testing.launcher_environments``.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from trainworks_launcher.contract.json_values import Json
from trainworks_testing.clock import PATIENCE, assert_within, start_clock
from trainworks_testing.launcher_environments import (
    INSTANCES,
    NO_GPU,
    PROGRAMS,
    environment,
    manifest,
    manifest_document,
    plan,
)

__all__ = [
    "INSTANCES",
    "NO_GPU",
    "PROGRAMS",
    "environment",
    "manifest",
    "manifest_document",
    "plan",
]

WAIT_FOR_SIGNALS = """
import os, signal

def wait_for_signals():
    waking, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    while True:
        os.read(waking, 1)
"""
"""The end of a script that has handlers.

A signal that comes right before the system call of ``signal.pause`` is only noted: its handler runs
after the call, which never ends. The pipe has a byte for it.
"""

REPOSITORY = Path(__file__).resolve().parents[2]
LAUNCHER = REPOSITORY / "launcher"
TIME_OUT = PATIENCE

GLOO_ENDS = """
import atexit, time
atexit.register(time.sleep, 0.3)
"""
"""How a script of a test begins that uses gloo: its end waits for gloo's threads.

Without that one of a few good ranks is aborted after its last line ("terminate called without an
active exception"): a thread of gloo still frees a tensor when Python ends (pytorch issue 190489).
The fault is torch's, not the launcher's.
"""

LAUNCHER_PYTHON = os.environ.get("TRAINWORKS_LAUNCHER_PYTHON", "") or sys.executable
"""The Python of the launcher: this one, or for example a Python 3.8."""

TRAIN = (LAUNCHER_PYTHON, "-IS", str(LAUNCHER / "trainworks_launcher" / "__main__.py"))
"""The words that start the launcher."""


def write_inputs(
    base: Path, script: str, hyperparameters: Mapping[str, Json], config: Mapping[str, Json]
) -> None:
    """The files that a platform mounts."""
    (base / "code").mkdir(parents=True, exist_ok=True)
    (base / "input/config").mkdir(parents=True, exist_ok=True)
    (base / "code/train.py").write_text(script, encoding="utf-8")
    document = {"sagemaker_program": "train.py", **hyperparameters}
    (base / "input/config/hyperparameters.json").write_text(json.dumps(document), encoding="utf-8")
    if config:
        (base / "input/config/resourceconfig.json").write_text(json.dumps(config), encoding="utf-8")


def stand_in(folder: Path) -> None:
    """Write the stand-in for nvidia-smi into a folder for PATH."""
    program = folder / "nvidia-smi"
    target = Path(__file__).with_name("stand_in_nvidia_smi.py")
    program.write_text(
        f'#!/bin/sh\nexec "{sys.executable}" -IS "{target}" "$@"\n', encoding="utf-8"
    )
    program.chmod(0o755)


def write_manifest(
    path: Path, programs: Mapping[str, str], hostname_shim: str = "", **changes: Json
) -> Path:
    """A manifest file whose programs are ``programs``."""
    path.write_text(
        json.dumps(
            manifest_document()
            | {"programs": dict(programs), "hostname_shim": hostname_shim}
            | changes
        ),
        encoding="utf-8",
    )
    return path


def pids_with_variable(name: str, value: str) -> list[int]:
    """Processes started with this environment variable."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"{name}={value}".encode() in path.read_bytes().split(b"\0"):
                pids.append(int(path.parent.name))
    return pids


class Launcher:
    """A real launcher process on a base directory, with everything it prints."""

    def __init__(
        self,
        base: Path,
        *arguments: str,
        variables: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        stderr: int = subprocess.STDOUT,
        program: Sequence[str] = TRAIN,
    ) -> None:
        self.base = base
        self.output = b""
        self.status = -1
        self.end_time = 0.0
        env = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SM_", "SAGEMAKER_"))
        }
        env.update({"SAGEMAKER_BASE_DIR": str(base), "TRAINWORKS_IMAGE_MANIFEST": ""})
        if not prefix:
            # A launcher that a test kills leaves its directory behind: let it
            # be one of the test's, with a short name.
            scratch = base / "tmp"
            if not scratch.exists():
                real_folder = tempfile.mkdtemp(prefix="tw-")
                atexit.register(shutil.rmtree, real_folder, ignore_errors=True)
                base.mkdir(parents=True, exist_ok=True)
                scratch.symlink_to(real_folder)
            env["TMPDIR"] = str(scratch.resolve())
        env.update(variables or {})
        command = [*prefix, *program, *arguments]
        start_clock()
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            command,
            env=env,
            stdout=subprocess.PIPE,
            stderr=stderr,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def __enter__(self) -> Launcher:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(TIME_OUT)
        # A launcher that a test killed could not end its script.
        for pid in pids_with_variable("SAGEMAKER_BASE_DIR", str(self.base)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.process.stdout is not None:
            self.process.stdout.close()

    def read_until(self, words: str, count: int = 1) -> None:
        """Read until ``words`` were printed ``count`` times.

        Fails with all output if the process ends before.
        """
        while self.output.count(words.encode()) < count:
            assert self._read(), f"{words!r} was never printed:\n{self.text}"

    def wait(self) -> int:
        """The exit status, with all output read."""
        while self._read():
            pass
        status = self.process.wait(TIME_OUT)
        self.end_time = time.monotonic()
        return status

    @property
    def seconds(self) -> float:
        """Return how long the launcher ran."""
        return self.end_time - self.started

    def assert_ended_within(self, seconds: float) -> None:
        """Fail if the launcher ran longer, on a machine without other work."""
        assert_within(seconds, self.started, self.end_time, self.text)

    def signal_process_one(self, number: int) -> None:
        """Signal the launcher itself where it is process 1 of a PID namespace,
        below ``unshare``.
        """
        os.kill(self.process_one(), number)

    def process_one(self) -> int:
        """Process id, as seen from here, of the launcher that is process 1 of a PID namespace."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text(
            encoding="ascii"
        )
        return int(children.split()[0])

    @property
    def text(self) -> str:
        return self.output.decode("utf-8", "replace")

    @property
    def failure(self) -> str:
        """The text of output/failure without its last newline, "" if there is none."""
        path = self.base / "output/failure"
        return path.read_text(encoding="utf-8").removesuffix("\n") if path.exists() else ""

    @property
    def succeeded(self) -> bool:
        return (self.base / "output/success").exists()

    def _read(self) -> bool:
        stream: IO[bytes] | None = self.process.stdout
        assert stream is not None
        with selectors.DefaultSelector() as selector:
            selector.register(stream, selectors.EVENT_READ)
            assert selector.select(TIME_OUT), f"nothing was printed for {TIME_OUT} s:\n{self.text}"
        chunk = os.read(stream.fileno(), 65536)
        self.output += chunk
        return bool(chunk)
