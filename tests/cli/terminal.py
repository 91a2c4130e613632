"""A terminal with a program in it: an emulator reads the screen, as a person would read it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence

import pyte

SECONDS = 60.0
"""How long anything may take to be shown."""


class Terminal:
    """A program on a terminal of its own; it is killed when the ``with`` block ends."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        columns: int = 80,
        rows: int = 24,
        environment: Mapping[str, str] | None = None,
        echo: bool = False,
    ) -> None:
        self.screen = pyte.HistoryScreen(columns, rows, history=2000, ratio=1.0)
        self._emulator = pyte.ByteStream(self.screen)
        self.raw = b""
        """Everything that the program wrote."""
        self._controller, worker = pty.openpty()
        self._set_size(columns, rows)
        if not echo:
            modes = termios.tcgetattr(worker)
            modes[3] &= ~termios.ECHO
            termios.tcsetattr(worker, termios.TCSANOW, modes)
        with contextlib.closing(os.fdopen(worker, "rb", buffering=0)) as file:
            self.process = subprocess.Popen(
                tuple(command),
                stdin=file,
                stdout=file,
                stderr=file,
                env={
                    **os.environ,
                    "TERM": "xterm-256color",
                    "LC_ALL": "C.UTF-8",
                    **(environment or {}),
                },
                # The terminal is the program's own: a Ctrl-C typed there reaches this program
                # alone.
                start_new_session=True,
                preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            )

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(SECONDS)
        os.close(self._controller)

    @property
    def shown(self) -> list[str]:
        """The rows that a person sees, without empty ones."""
        return [line.rstrip() for line in self.screen.display if line.strip()]

    @property
    def text(self) -> str:
        """Return the text that was written so far and stayed, also lines that have left the screen
        at its top.
        """
        above = [
            "".join(row[column].data for column in range(self.screen.columns))
            for row in self.screen.history.top
        ]
        return "\n".join(line.rstrip() for line in (*above, *self.screen.display)).strip()

    def cursor_is_hidden(self) -> bool:
        return bool(self.screen.cursor.hidden)

    def read(self, until: Callable[[Terminal], bool]) -> None:
        """Let the program go on until the screen is as expected."""
        deadline = time.monotonic() + SECONDS
        while not until(self):
            assert time.monotonic() < deadline, f"never shown; at the end:\n{self.text}"
            assert self._take(), f"the program ended before:\n{self.text}"

    def finish(self) -> int:
        """Read to the end of the program; return its exit status."""
        while self._take():
            pass
        return self.process.wait(SECONDS)

    def type(self, keys: str) -> None:
        os.write(self._controller, keys.encode())

    def resize(self, columns: int, rows: int = 24) -> None:
        self.screen.resize(rows, columns)
        self._set_size(columns, rows)

    def _set_size(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._controller, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def _take(self) -> bool:
        ready, _, _ = select.select([self._controller], [], [], 1)
        if not ready:
            return True
        try:
            content = os.read(self._controller, 1 << 16)
        except OSError:
            # Linux says so when the last program on a terminal has ended.
            return False
        self.raw += content
        self._emulator.feed(content)
        return bool(content)
