"""When restarts lead nowhere: every host tells the leader how many of its
rounds in a row got no step further.

On the leader a round got further also if the job ended in another way than in the round before:
another exception, or the same one in another place (``Outcome.kind_of_failure``).

The leader ends the job when no host that has had a restart got further in
``names.FRUITLESS_RESTARTS`` rounds in a row: progress is mostly printed on one host, and saved on
one. A host that has not told yet of the last round holds the end up, and one that was lost begins
the count anew. What counts as a step further: ``processes.attempts``.
"""

from __future__ import annotations

from typing import Callable, Mapping, NamedTuple

from trainworks_launcher.contract import names
from trainworks_launcher.contract.json_values import Json, number
from trainworks_launcher.supervise.outcome.outcome import FAILED, Outcome, exit_status

MESSAGE = "fruitless"
"""The kind of the message to the leader: ``rounds`` in a row without a step further."""


class Handlers(NamedTuple):
    """The supervisor's handlers for what the count leads to.

    Attributes:
        tell: Tells the leader of this host's count.
        end: Ends the job.
        log: Prints a line.
        known: Returns the first failure that some host has told of since the last round of this
            one; None for none.
    """

    tell: Callable[[int], None]
    end: Callable[[Outcome], None]
    log: Callable[[str], None]
    known: Callable[[], Outcome | None] = lambda: None


class CrashLoop:
    """The count of one host, and on the leader those of all."""

    def __init__(self, host: str, leads: bool, handlers: Handlers) -> None:
        """No restart has come yet.

        Args:
            host: This launcher's name on the control channel.
            leads: Whether it decides.
            handlers: The supervisor's handlers.
        """
        self._host = host
        self._leads = leads
        self._handlers = handlers
        self._own = 0
        self._counts: dict[str, int] = {}
        self._last: Outcome | None = None
        self._kind = ""

    def judged(self, further: bool, failure: Outcome | None) -> None:
        """A round of this host is over. further: it got a step further.
        failure: why, as far as that is known here.
        """
        kind = failure.kind_of_failure if failure is not None else ""
        if self._leads and kind:
            further = further or bool(self._kind and kind != self._kind)
            self._kind = kind
        self._own = 0 if further else self._own + 1
        self._last = failure or self._last
        if self._leads:
            self._count(self._host, self._own)
        else:
            self._handlers.tell(self._own)

    def told(self, host: str, message: Mapping[str, Json]) -> None:
        """Another host has counted."""
        if self._leads:
            self._last = self._handlers.known() or self._last
            self._count(host, number(message.get("rounds")))

    def begin_anew(self) -> None:
        """A host is lost, and the others go on."""
        self._own = 0
        self._counts.clear()

    def _count(self, host: str, rounds: int) -> None:
        before = min(self._counts.values(), default=0)
        self._counts[host] = rounds
        count = min(self._counts.values())
        if count <= before:
            return
        limit = names.FRUITLESS_RESTARTS
        if count < limit:
            self._handlers.log(
                f"the last restart got no step further ({count} in a row; {limit} end the job)"
            )
            return
        sentence = f"{limit} restarts in a row without a step further"
        last = self._last or Outcome(FAILED, 1, self._host)
        status = exit_status(last.status) or 1
        why = f"{sentence}: {last.cause}" if last.cause else sentence
        self._handlers.end(last._replace(kind=FAILED, status=status, cause=why))
