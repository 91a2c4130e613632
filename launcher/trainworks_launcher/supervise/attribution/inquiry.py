"""Collect the evidence of all hosts at the first failure of a job, before the cause is reported.

The process of a rank may outlive its connections by far: exit handlers, threads, the tear-down of a
GPU. Its peers see a broken connection and fail at once. So the leader asks, and each host answers
at once with the records that exist, also of ranks that still run, and with the number of ranks that
have neither ended nor noted anything. If a failure only blames another process, the leader waits
for these ranks; a host reports each as soon as it has ended or noted something.

Nothing is decided by a time: the table in ``outcome.evidence`` decides, by the evidence that has
come. The limits bound the wait.
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
"""How long the leader waits for hosts that do not answer, if the cause is certain otherwise."""

AWAITED_SECONDS = 5.0
"""How long the leader waits for ranks that have noted nothing: they may be blocked for ever in a
call to a lost peer.
"""

_LOOK_SECONDS = 0.1
"""Between two looks of a host at the records of its ranks."""

_WEIGH_SECONDS = 0.01
"""From a piece of evidence to its weighing: others may come in this time."""


class Inquiry:
    """The question about the first failure, on one host. Every method runs in the loop's thread.

    A host is named by the sender of its messages; ``""`` is the leader itself.
    """

    def __init__(
        self,
        loop: Loop,
        look: Callable[[], int],
        tell: Callable[[Mapping[str, Json]], None],
        is_certain: Callable[[], bool],
    ) -> None:
        """Ask nothing before ``begin``.

        Args:
            loop: The loop of the run.
            look: Sends the leader the records that ranks of this host have made since the last
                look; returns the number of ranks that may still note something.
            tell: Sends a message of this kind: the leader's to all other hosts, another host's to
                the leader.
            is_certain: Returns whether a failure is known that is about the failed rank itself.
        """
        self._loop = loop
        self._look = look
        self._tell = tell
        self._is_certain = is_certain
        # Of the leader: host -> number of its ranks that may still note something.
        self._waiting: dict[str, int] = {}
        self._asked: frozenset[str] = frozenset()
        self._then: Callable[[], None] | None = None  # None outside of an inquiry
        self._is_planned = False  # a weighing
        self._is_time_over = False  # for hosts that do not answer
        self._is_over = False  # ``then`` was called
        # Of each host:
        self._answered = -1  # the last number that was sent
        self._is_looking = False

    # --- the leader -------------------------------------------------------------------------------
    def begin(self, hosts: Mapping[str, str], then: Callable[[], None]) -> None:
        """Ask all hosts, on the leader, and call ``then`` when the evidence is complete enough.

        Returns at once, after sending the question and setting the limits of time.

        That is the case when no rank may still note something, when a failure is certain and all
        hosts have answered, or when the limits are over. ``then`` is called at once if an earlier
        inquiry has ended; during one, nothing happens.

        Args:
            hosts: The other hosts.
            then: Called once, without arguments.
        """
        if self._is_over:
            then()
            return
        if self._then is not None:
            return
        self._then = then
        self._asked = frozenset(("", *hosts))
        self._tell({})
        self._loop.after(ANSWER_SECONDS, self._give_up_answers)
        self._loop.after(AWAITED_SECONDS, self._end)
        self._begin_to_look()

    def note_evidence(self) -> None:
        """Weigh the evidence soon, because some has come; do nothing outside of an inquiry.

        All evidence that comes together is weighed once: a job may have thousands of hosts.
        """
        if self._then is not None and not self._is_over and not self._is_planned:
            self._is_planned = True
            self._loop.after(_WEIGH_SECONDS, self._weigh)

    def _weigh(self) -> None:
        """End the inquiry if the evidence is complete enough; else nothing.

        Complete: all hosts have answered, and no rank may still note something. Enough: a certain
        failure is known, and all have answered or their time is over.
        """
        self._is_planned = False
        have_all_answered = self._asked.issubset(self._waiting)
        is_complete = have_all_answered and not any(self._waiting.values())
        may_decide = have_all_answered or self._is_time_over
        if is_complete or (may_decide and self._is_certain()):
            self._end()

    def _give_up_answers(self) -> None:
        """Do not wait any longer for hosts that have not answered."""
        self._is_time_over = True
        self.note_evidence()

    def _end(self) -> None:
        """End the inquiry, once, and call ``then``."""
        if not self._is_over and self._then is not None:
            self._is_over = True
            self._then()

    # --- each host --------------------------------------------------------------------------------
    def heard(self, host: str, message: Mapping[str, Json]) -> None:
        """Handle the leader's question, or on the leader the answer of another host.

        Args:
            host: The sender.
            message: An answer has ``waiting``, the number of ranks that may still note something.
        """
        if "waiting" in message:
            self._waiting[host] = number(message.get("waiting"))
            self.note_evidence()
        else:
            self._begin_to_look()

    def _begin_to_look(self) -> None:
        """Begin to look at the records of this host's ranks, once."""
        if not self._is_looking:
            self._is_looking = True
            self._look_again()

    def _look_again(self) -> None:
        """Look at the records of this host's ranks, and answer if the number has changed.

        Looks again until no rank may note something, or until the inquiry or the loop ends.
        """
        waiting = self._look()
        if waiting != self._answered:
            self._answered = waiting
            self._waiting[""] = waiting
            # Only the leader has ``_then``.
            if self._then is None:
                self._tell({"waiting": waiting})
        self.note_evidence()
        if waiting and not self._is_over:
            self._loop.after(_LOOK_SECONDS, self._look_again)
