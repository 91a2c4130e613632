"""At the first failure of a job every host is asked what its ranks have noted
so far, before the cause is told.

The process of a rank may outlive its connections by far: exit handlers, threads, the tear-down of a
GPU. Its peers see a broken connection and fail at once. So the leader asks, and each host answers
at once with the records that are there, also of ranks that still run, and with the number of ranks
that have neither ended nor noted anything. Where a failure only blames another process, these are
awaited; a host tells of each as soon as it has ended or noted something.

Nothing is decided by a time: the table in ``outcome.evidence`` decides, by what has come. The
limits bound the waiting.
"""

from __future__ import annotations

from typing import Callable, Mapping

from trainworks_launcher.contract.json_values import Json, number
from trainworks_launcher.supervise.event_loop import Loop

KIND = "noted"
"""The kind of the messages: the leader's question, and each host's answers with ``waiting``, how
many ranks may still note something.
"""

ANSWER_SECONDS = 2.0
"""How long the leader waits for a host that does not answer, where the cause is
certain otherwise.
"""

AWAITED_SECONDS = 5.0
"""How long it waits for ranks that have noted nothing: they may be blocked for
ever in a call to a lost peer.
"""

_LOOK_SECONDS = 0.1
_WEIGH_SECONDS = 0.01


class Inquiry:
    """The question about the first failure, on one host. Every method runs in the loop's thread."""

    def __init__(
        self,
        loop: Loop,
        look: Callable[[], int],
        tell: Callable[[Mapping[str, Json]], None],
        is_certain: Callable[[], bool],
    ) -> None:
        """Nothing has failed.

        Args:
            loop: The loop of the run.
            look: Tells the leader of what the ranks of this host have noted since the last look;
                returns how many may still note something.
            tell: Sends a message of this kind: the leader's to all other hosts,
                another host's to the leader.
            is_certain: Whether a failure is known that tells of itself.
        """
        self._loop = loop
        self._look = look
        self._tell = tell
        self._is_certain = is_certain
        self._waiting: dict[str, int] = {}  # by host, "" for the leader itself
        self._asked: frozenset[str] = frozenset()
        self._then: Callable[[], None] | None = None  # set on the leader alone
        self._answered = -1
        self._is_looking = False
        self._is_planned = False
        self._late = False
        self._over = False

    # --- the leader -------------------------------------------------------------------------------
    def begin(self, hosts: Mapping[str, str], then: Callable[[], None]) -> None:
        """Ask all hosts, and call ``then`` when enough is known, at once if that is so already."""
        if self._over:
            then()
            return
        if self._then is not None:
            return
        self._then = then
        self._asked = frozenset(("", *hosts))
        self._tell({})
        self._loop.after(ANSWER_SECONDS, self._do_without_answers)
        self._loop.after(AWAITED_SECONDS, self._end)
        self._begin_to_look()

    def moved(self) -> None:
        """Evidence has come: weigh it soon, once for all that comes together.

        A job may have thousands of hosts.
        """
        if self._then is not None and not self._over and not self._is_planned:
            self._is_planned = True
            self._loop.after(_WEIGH_SECONDS, self._weigh)

    def _weigh(self) -> None:
        """End if enough is known."""
        self._is_planned = False
        answered = self._asked.issubset(self._waiting)
        is_complete = answered and not any(self._waiting.values())
        if is_complete or (self._is_certain() and (answered or self._late)):
            self._end()

    def _do_without_answers(self) -> None:
        self._late = True
        self.moved()

    def _end(self) -> None:
        """Enough is known, or the time is over."""
        if not self._over and self._then is not None:
            self._over = True
            self._then()

    # --- each host --------------------------------------------------------------------------------
    def heard(self, host: str, message: Mapping[str, Json]) -> None:
        """The leader asks, or another host answers."""
        if "waiting" in message:
            self._waiting[host] = number(message.get("waiting"))
            self.moved()
        else:
            self._begin_to_look()

    def _begin_to_look(self) -> None:
        if not self._is_looking:
            self._is_looking = True
            self._look_again()

    def _look_again(self) -> None:
        """Look, and answer where something has changed; the job's end ends this, too."""
        waiting = self._look()
        if waiting != self._answered:
            self._answered = waiting
            self._waiting[""] = waiting
            if self._then is None:
                self._tell({"waiting": waiting})
        self.moved()
        if waiting and not self._over:
            self._loop.after(_LOOK_SECONDS, self._look_again)
