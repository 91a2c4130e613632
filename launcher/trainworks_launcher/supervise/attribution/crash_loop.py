"""Detect a crash loop: restarts of the ranks by torchrun without progress.

Every host counts how many of its last restarts, in a row, followed an attempt without progress,
and sends that number to the leader. ``processes.attempts`` says what progress is on one host. On
the leader an attempt made progress also if it failed in another way than the attempt before:
another exception, or the same exception in another place (``Outcome.kind_of_failure``). A failure
that may be only the effect of another one is not compared: the evidence of the first one may come
later, from another host.

The leader ends the job when the smallest number of all hosts that have had a restart reaches
``names.FRUITLESS_RESTARTS``: progress is mostly printed on one host, and saved on one. A host that
has not yet sent its number for the last restart delays the end. A lost host resets all numbers.
"""

from __future__ import annotations

from typing import Callable, Mapping, NamedTuple

from trainworks_launcher.contract import names
from trainworks_launcher.contract.json_values import Json, number
from trainworks_launcher.supervise.outcome.evidence import KnownFailure
from trainworks_launcher.supervise.outcome.outcome import FAILED, Outcome, exit_status

MESSAGE = "fruitless"
"""The kind of a worker's message to the leader. Its field ``rounds``: restarts in a row without
progress.
"""


class Handlers(NamedTuple):
    """The supervisor's handlers for what the count leads to.

    Attributes:
        tell: Sends this host's number to the leader.
        end: Ends the job with an outcome.
        log: Prints a line.
        known: Returns the first failure that hosts have reported since the last restart of this
            host; None for none.
    """

    tell: Callable[[int], None]
    end: Callable[[Outcome], None]
    log: Callable[[str], None]
    known: Callable[[], KnownFailure | None] = lambda: None


class CrashLoop:
    """The number of fruitless restarts of one host, and on the leader those of all hosts."""

    def __init__(self, host: str, leads: bool, handlers: Handlers) -> None:
        """Begin before the first restart.

        Args:
            host: This launcher's name on the control channel.
            leads: Whether this host is the leader, which decides.
            handlers: The supervisor's handlers.
        """
        self._host = host
        self._is_leader = leads
        self._handlers = handlers
        self._fruitless_restarts = 0
        self._restarts_by_host: dict[str, int] = {}  # on the leader alone
        self._last_failure: KnownFailure | None = None
        self._last_kind = ""

    def count_restart(self, further: bool, failure: KnownFailure | None) -> None:
        """Count a restart of this host's ranks; on a worker, send the number to the leader.

        On the leader this may print a line or end the job.

        Args:
            further: Whether the attempt before the restart made progress on this host.
            failure: The end of that attempt; None if this host does not know it.
        """
        kind = ""
        if failure is not None and not failure.is_effect:
            kind = failure.outcome.kind_of_failure
        # Another way of failing is progress; the leader alone compares them.
        if self._is_leader and kind:
            # The first failure has none to differ from.
            is_new_kind = self._last_kind not in ("", kind)
            further = further or is_new_kind
            self._last_kind = kind
        if further:
            self._fruitless_restarts = 0
            self._last_failure = None
        else:
            self._fruitless_restarts += 1
        self._keep(failure)
        if self._is_leader:
            self._compare_hosts(self._host, self._fruitless_restarts)
        else:
            self._handlers.tell(self._fruitless_restarts)

    def receive_count(self, host: str, message: Mapping[str, Json]) -> None:
        """Take the number in a worker's message; do nothing on a worker.

        This may print a line or end the job.

        Args:
            host: The worker.
            message: For example ``{"rounds": 2}``; an unreadable number counts as 0.
        """
        if not self._is_leader:
            return
        self._keep(self._handlers.known())
        self._compare_hosts(host, number(message.get("rounds")))

    def _keep(self, failure: KnownFailure | None) -> None:
        """Keep a failure as the last one, unless it may be the effect of the one that is kept."""
        if failure is None:
            return
        last = self._last_failure
        if last is None or last.is_effect or not failure.is_effect:
            self._last_failure = failure

    def begin_anew(self) -> None:
        """Reset the numbers of all hosts: a host is lost, and the others go on."""
        self._fruitless_restarts = 0
        self._restarts_by_host.clear()

    def _compare_hosts(self, host: str, restarts: int) -> None:
        """Note the number of a host, and act if that raises the smallest number of all hosts.

        Below the limit a line is printed. At the limit the job ends with the last failure. Its
        cause then begins with ``N restarts in a row without a step further``. The new attempt does
        not change that: its ranks fail again, or torchrun ends them.

        Args:
            host: The host.
            restarts: Its restarts in a row without progress, so far.
        """
        before = min(self._restarts_by_host.values(), default=0)
        self._restarts_by_host[host] = restarts
        count = min(self._restarts_by_host.values())
        # Each number is told once, when the last host has reached it.
        if count <= before:
            return
        limit = names.FRUITLESS_RESTARTS
        if count < limit:
            self._handlers.log(
                f"the last restart got no step further ({count} in a row; {limit} end the job)"
            )
            return
        cause = f"{limit} restarts in a row without a step further"
        last_failure = Outcome(FAILED, 1, self._host)
        if self._last_failure is not None:
            last_failure = self._last_failure.outcome
        if last_failure.cause:
            cause += f": {last_failure.cause}"
        # A failure that another host reported may have no status yet.
        status = exit_status(last_failure.status) or 1
        self._handlers.end(
            last_failure._replace(kind=FAILED, status=status, cause=cause, is_decided=True)
        )
