"""Rounds of the ranks of one host: from one start to the next one, and whether a round got further than those before.

torchrun starts failed ranks again as often as it may, also where that leads nowhere. A job is ended for it only if
nothing speaks for a step further, so each of these is believed, and one of them on one host is enough:

- a file among the checkpoints, or the heartbeat file, was written, or cannot be looked at in time;
- a rank printed a line that no round before had, or one more often. What differs without a meaning is left out of the
  comparison: times, durations, addresses, process ids, numbers of restarts, and tracebacks;
- the round lived for longer than ``names.FRUITLESS_SECONDS``: a job may save its work where nobody looks, and say
  nothing of it;
- another host was lost, and the ranks were ended for that.

The first round is the measure, and is never fruitless.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections import Counter
from typing import Callable

from trainworks_launcher.contract import names
from trainworks_launcher.contract.files import written_at
from trainworks_launcher.supervise.children.ranks import Rank

_LOOK_SECONDS = 0.8
"""How long files are looked at: a dead network file system never answers, and heartbeats must not wait for it."""

_LINES = 200_000
"""Different lines that are remembered of all rounds; with more nothing is compared any more."""

_PREFIX = rb"^(?:\[rank\d+\]: )?"  # torch puts it in front of each line of an exception
_TRACEBACK = b"(?m)" + _PREFIX + rb"Traceback \(most recent call last\).*\n(?:" + _PREFIX + rb"[ \t].*\n)*.*$"
_MEANINGLESS = rb"""(?xim)
    0x[0-9a-f]+                                                         # addresses
    | \d{4}-\d\d-\d\d[T ]? | \b\d\d?:\d\d:\d\d(?:[.,]\d+)?Z?            # dates, times
    | \b\d\d:\d\d<[\d:?]+                                               # the times of a progress bar
    | (?-i:^\[?[IWEF])\d{4}(?=\ \d\d:) | \b1\d{9}\.\d+                   # glog's dates, seconds since 1970
    | \b\d+(?:\.\d+)?\ ?(?:[num]?s|sec|secs|seconds?|minutes?|it/s|s/it|[KMG]i?B/s)\b
    | /tmp/tmp\w{8}
    | (?:\d+\.\d+\.\d+\.\d+|\])(?::\d+)                                 # ports
    | (?<![a-z])(?:pid|process|thread|restart|attempt|retry)(?:s|_|\W|count|number|id){0,9}\d+
    """


class Rounds:
    """The rounds of one host, in the loop's thread. restarts: how many came after the first one."""

    def __init__(
        self,
        take: Callable[[], None],
        checkpoints: str = "",
        heartbeat: str = "",
        longest: float = names.FRUITLESS_SECONDS,
    ) -> None:
        """No rank has started.

        Args:
            take: Reads what the ranks have written until now.
            checkpoints: Directory of the checkpoints; ``""`` if it is not known.
            heartbeat: Path of the script's heartbeat file; ``""`` if there is none.
            longest: Seconds of a round that can be judged.
        """
        self._take = take
        self._checkpoints = checkpoints
        self._heartbeat = heartbeat
        self._longest = longest
        self._ranks: list[Rank] = []
        self._began = 0.0
        self._printed: Counter[int] = Counter()
        self._files: tuple[int | None, ...] = ()
        self._excused = False
        self._measured = False
        self.restarts = 0

    def started(self, rank: Rank) -> bool | None:
        """A rank has started. If it is the first of a new round, return whether the one before got a step further."""
        place = _place(rank)
        if all(_place(other) != place for other in self._ranks):
            self._began = self._began or time.monotonic()
            self._ranks.append(rank)
            return None
        self._take()
        printed: Counter[int] = Counter()  # lines as far as they are kept, each as a number
        for other in self._ranks:
            printed.update(map(hash, lines_of(other.tail.read(), other.pid)))
        self.restarts += 1
        found = self._got_further(printed)
        self._began, self._excused, self._measured, self._ranks = time.monotonic(), False, True, [rank]
        return found

    def excuse(self) -> None:
        """The ranks of this round are ended for a host that was lost."""
        self._excused = True

    def _got_further(self, printed: Counter[int]) -> bool:
        before, self._files = self._files, self._state_of_files()
        new = any(count > self._printed[line] for line, count in printed.items())
        self._printed |= printed
        return (
            new
            or not self._measured
            or self._excused
            or None in self._files
            or self._files != before
            or len(self._printed) > _LINES
            or time.monotonic() - self._began > self._longest
        )

    def _state_of_files(self) -> tuple[int | None, ...]:
        """Return what changes when one of the files is written; None for what cannot be looked at."""
        from trainworks_launcher.contract.checkpoints import state_of  # only a restart needs it

        looks: list[Callable[[], int | None]] = []
        if self._checkpoints:
            looks.append(lambda: state_of(self._checkpoints))
        if self._heartbeat:
            looks.append(lambda: written_at(self._heartbeat))
        found: list[int | None] = []
        looking = threading.Thread(target=lambda: found.extend(look() for look in looks), daemon=True)
        with contextlib.suppress(RuntimeError):  # no thread can be started: nothing is looked at
            looking.start()
            looking.join(_LOOK_SECONDS)
        return (*found, *[None] * (len(looks) - len(found)))


def _place(rank: Rank) -> int:
    """Return the number that only one rank of a round has on this host: a rank's own may change with the hosts."""
    return rank.local if rank.local >= 0 else rank.number


def lines_of(output: bytes, pid: int = 0) -> list[bytes]:
    """Return the lines of an output without what differs between two runs of the same work.

    Args:
        output: What a process printed.
        pid: Its process id, which it may have printed.
    """
    text = re.sub(_TRACEBACK, b"", output)
    text = re.sub(_MEANINGLESS, b"", re.sub(rb"\b%d\b" % pid, b"", text) if pid else text)
    return [line for line in map(bytes.strip, text.splitlines()) if line]
