"""Child processes and what PID 1 owes to all others: start, signal, drain, reap."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Iterable, Mapping, Sequence

from trainworks_launcher import output

_DRAIN_SECONDS = 0.7
_REAP_SECONDS = 5.0


class Child:
    """One running command in a session of its own, with its output being copied."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], cwd: str) -> None:
        """Start it. Raises OSError if it cannot be started."""
        self.argv = tuple(argv)
        self.tail = output.Tail()
        self._process = subprocess.Popen(
            self.argv,
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,
        )
        self.pid = self._process.pid
        self._pumps = []
        for stream, target in ((self._process.stdout, 1), (self._process.stderr, 2)):
            if stream is not None:
                self._pumps.append(output.Pump(os.dup(stream.fileno()), target, self.tail))
                stream.close()

    @property
    def running(self) -> bool:
        """Whether its end has not been noted yet."""
        return self._process.returncode is None

    @property
    def returncode(self) -> int:
        """Its return code, negative after a signal; 0 while it runs."""
        return self._process.returncode or 0

    def has_just_ended(self) -> bool:
        """Whether it has ended since it was last looked at; its status is taken then."""
        return self._process.returncode is None and self._process.poll() is not None

    def signal(self, number: int) -> None:
        """Send a signal to the command itself."""
        if self.running:
            send(self.pid, number)

    def signal_group(self, number: int) -> None:
        """Send a signal to everything in the command's process group, gone or not."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def drain(self) -> None:
        """Wait, bounded, for the rest of the output; then end what the child left behind and take its last words.

        Waiting comes first: ``script > >(tee log)`` leaves a process behind that is about to write what matters.
        """
        deadline = time.monotonic() + _DRAIN_SECONDS
        for pump in self._pumps:
            pump.join(max(0.0, deadline - time.monotonic()))
        self.signal_group(signal.SIGKILL)
        for pump in self._pumps:
            pump.join(max(0.0, deadline + _DRAIN_SECONDS - time.monotonic()))

    def kill(self) -> None:
        """KILL it with its group and wait, bounded."""
        self.signal_group(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_REAP_SECONDS)
        self.drain()


def send(pid: int, number: int) -> None:
    """Send a signal to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def stat(pid: int) -> tuple[int, str]:
    """(parent, start time) of a process from proc(5); (0, "") if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0, ""
    return int(fields[1]), fields[19]


def children_of(parent: int) -> tuple[int, ...]:
    """Direct children of a process."""
    pids = (int(name) for name in os.listdir("/proc") if name.isdecimal())  # noqa: PTH208  (names, not paths)
    return tuple(pid for pid in pids if stat(pid)[0] == parent)


def noted_ranks(directory: Path) -> tuple[int, ...]:
    """Process ids that rank.py noted below the runtime directory and that are still the same processes."""
    found: list[int] = []
    for file in sorted(directory.joinpath("ranks").glob("*")):
        try:
            started = file.read_text(encoding="ascii")
        except OSError:
            continue
        pid = int(file.name)
        if started and stat(pid)[1] == started:
            found.append(pid)
    return tuple(found)


def reap_orphans(known: Iterable[int]) -> None:
    """As PID 1, take the status of every ended process that became ours; those ``known`` are waited for elsewhere."""
    ours = frozenset(known)
    while True:
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if found is None or found.si_pid in ours:
            return
        os.waitpid(found.si_pid, 0)
