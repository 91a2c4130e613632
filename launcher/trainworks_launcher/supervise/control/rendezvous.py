"""A worker's search for the leader: connect, prove to each other to be of the job, join.

The leader may not run yet, may still start, or another program may have its port for a while: each
try that fails is followed by the next one, until a deadline.
"""

from __future__ import annotations

import socket
import time
from typing import Callable, NamedTuple

from trainworks_launcher.contract import names
from trainworks_launcher.contract.json_values import text
from trainworks_launcher.environment import network_routes
from trainworks_launcher.plan.plan import Control
from trainworks_launcher.supervise.control import handshake, identity
from trainworks_launcher.supervise.control.connection import Attempt, Connection
from trainworks_launcher.supervise.control.message_authentication import LEADER, WORKER, Seal
from trainworks_launcher.supervise.control.messages import (
    OTHER_LAUNCHER,
    PROTOCOL,
    Message,
    one_line,
    read_outcome,
)
from trainworks_launcher.supervise.control.phases import SEARCH, Phases, SearchPhase
from trainworks_launcher.supervise.control.resolve import Addresses, Lookup
from trainworks_launcher.supervise.event_loop import Loop
from trainworks_launcher.supervise.outcome.outcome import FAILED, Outcome

_CONNECT_SECONDS = 5.0
"""Limit of a try to connect."""

_ANSWER_SECONDS = 15.0
"""From the connection to the welcome; a leader that is busy with many hosts takes some of it."""

_NOT_JOINED_SECONDS = (20.0, 60.0)
"""Seconds after the begin at which the log describes the tries of this host, and their results."""

_FOREIGN_SECONDS = 45.0
"""How long another program may answer at the leader's port, without a break.

A leader that finds its port taken ends.
"""

# The pause between two tries grows by the factor, from the first to the longest one.
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 1.0
_PAUSE_FACTOR = 1.5
_MAX_LOGGED_REASONS = 5
"""Different reasons that are logged, and kept for the outcome."""


class LeaderConnection(NamedTuple):
    """The connection to a leader that has admitted this host.

    Attributes:
        connection: The connection, to be handed over.
        has_no_secret: Whether this host has a secret, and the leader has none. This host may only
            report that.
    """

    connection: Connection
    has_no_secret: bool


class SearchHandlers(NamedTuple):
    """The worker's handlers for events of a search.

    Attributes:
        found: Called when the leader has admitted this host.
        over: Called with the outcome of the job, if no leader admits this host.
        log: Prints a line.
    """

    found: Callable[[LeaderConnection], None]
    over: Callable[[Outcome], None]
    log: Callable[[str], None]


class Search:
    """One search for the leader."""

    def __init__(
        self,
        loop: Loop,
        control: Control,
        own: handshake.Credentials,
        limit: float,
        handlers: SearchHandlers,
    ) -> None:
        """Do nothing before ``begin``.

        Args:
            loop: The loop of the run.
            control: Address and port of the leader.
            own: Name, job and secret of this host.
            limit: Seconds from now after which the leader counts as missing.
            handlers: The worker's handlers.
        """
        self._loop = loop
        self._control = control
        self._own = own
        self._handlers = handlers
        self._reasons = _Reasons(control, limit, handlers.log)
        self._phases = Phases(SEARCH)
        self._deadline = time.monotonic() + limit
        self._connection: Connection | None = None
        self._attempt: Attempt | None = None
        self._lookup: Lookup | None = None
        self._began = time.monotonic()
        self._leader_has_no_secret = False
        self._refusal = ""  # reason that the present other end has sent
        # Monotonic clock; 0 if the last try did not meet another program.
        self._foreign_since = 0.0
        self._tries = 0
        self._pause = _FIRST_PAUSE_SECONDS
        for seconds in _NOT_JOINED_SECONDS:
            if seconds < limit:
                loop.after(seconds, self.log_tries)

    def begin(self, lost: str = "") -> None:
        """Begin to connect.

        Args:
            lost: Why the connection to a leader that had admitted this host ended; ``""`` for none.
        """
        self._reasons.lost = lost
        if lost:
            # That leader needs a moment to start again.
            self._try_later(lost)
        else:
            self._try()

    def log_tries(self) -> None:
        """Log the last try and its result, unless the search is over."""
        if self._phases.now is not SearchPhase.OVER:
            self._reasons.log_tries(time.monotonic() - self._began)

    def end(self) -> None:
        """Search no more, and close a connection that is not the leader's yet."""
        if self._phases.take("end"):
            if self._lookup is not None:
                self._lookup.cancel()
            if self._attempt is not None:
                self._attempt.cancel()
            if self._connection is not None:
                self._connection.close()

    # --- connecting -------------------------------------------------------------------------------
    def _try(self) -> None:
        """Look up the leader's address, to connect to it; after the deadline, end the search."""
        if self._phases.now is not SearchPhase.CONNECTING:
            return
        if time.monotonic() >= self._deadline:
            self._handlers.over(
                Outcome(FAILED, names.EXIT_HOSTS, self._own.host, self._reasons.text())
            )
            return
        name = self._control.address or self._control.leader
        self._lookup = Lookup(self._loop, name, self._control.port, self._connect)

    def _connect(self, addresses: Addresses, reason: str) -> None:
        """Begin to connect to one of the leader's addresses.

        Args:
            addresses: The addresses; without one the next try is scheduled.
            reason: Why there is none, for example that the name cannot be resolved.
        """
        if not addresses:
            # The names of pods appear after the pods.
            self._reasons.note(reason)
            self._foreign_since = 0.0
            self._try_later(reason)
            return
        # A name may have several addresses, and only one that answers: try the next one each time.
        family, address = addresses[self._tries % len(addresses)]
        self._tries += 1
        self._reasons.address = str(address[0])
        self._attempt = Attempt(self._loop, family, address, _CONNECT_SECONDS, self._ask_to_join)

    def _try_later(self, reason: str) -> None:
        """Schedule the next try after a pause, which grows; do nothing if the search is over.

        Args:
            reason: Why the last try failed.
        """
        if self._phases.take("failed"):
            self._reasons.last = reason
            self._loop.after(self._pause, self._try)
            self._pause = min(self._pause * _PAUSE_FACTOR, _LONGEST_PAUSE_SECONDS)

    def _ask_to_join(self, opened: socket.socket | None, reason: str) -> None:
        """Send the request to join, and limit the time of the answer.

        Args:
            opened: The connected socket; None if the connection failed.
            reason: Why it failed.
        """
        if opened is None:
            self._foreign_since = 0.0
            self._try_later(reason)
            return
        try:
            connection = Connection(self._loop, opened, self._message, self._lost)
        except OSError as error:
            opened.close()
            self._try_later(str(error))
            return
        self._phases.must("joined")
        self._connection = connection
        self._reasons.answered = True
        self._refusal = ""
        own, nonce = self._own, handshake.make_nonce()
        connection.transcript = handshake.Transcript(identity.as_text(own.job), own.host, nonce, "")
        connection.send(
            "join",
            host=own.host,
            job=dict(own.job),
            nonce=nonce,
            secret=bool(own.secret),
            protocol=PROTOCOL,
        )

        def check_welcome() -> None:
            if connection.open and self._phases.now is not SearchPhase.OVER:
                self._distrust(connection, "it did not answer")

        self._loop.after(_ANSWER_SECONDS, check_welcome)

    # --- talking ----------------------------------------------------------------------------------
    def _message(self, connection: Connection, message: Message) -> None:
        """Handle a message of the other end, which may be any program.

        ``welcome`` and ``finish`` end the search. A message that the handshake does not expect
        closes the connection.
        """
        kind, transcript = text(message.get("type")), connection.transcript
        if kind not in _KINDS or transcript is None or not self._phases.take(kind):
            connection.is_foreign = True
            self._distrust(connection, "it does not speak the launcher's protocol")
        elif kind == "refused":
            # The leader closes the connection next, and ``_lost`` tries again.
            self._refusal = one_line(message.get("reason"))
            is_final = names.JOB_SECRET_VARIABLE in self._refusal or OTHER_LAUNCHER in self._refusal
            # With a seal the leader has the right secret, so its refusal may pass.
            if connection.seal is None and is_final:
                self._shorten()
        elif kind == "challenge":
            self._answer(connection, transcript, message)
        elif kind == "welcome":
            connection.trust(self._control.leader)
            self._handlers.found(LeaderConnection(connection, self._leader_has_no_secret))
        else:
            connection.close()
            self._handlers.over(read_outcome(message, self._control.leader))

    def _answer(
        self, connection: Connection, transcript: handshake.Transcript, message: Message
    ) -> None:
        """Check the leader's proof that it knows the secret, and send this host's proof.

        After a wrong proof the connection is closed, and the search goes on for a shorter time.
        Messages are authenticated from this answer on.
        """
        nonce_of_leader = handshake.read_nonce(message.get("nonce"))
        transcript = transcript._replace(leader_nonce=nonce_of_leader)
        # A leader without a secret admits every host: this host joins to report it, and the job
        # ends.
        secret = self._own.secret if message.get("secret") is True else ""
        if nonce_of_leader and handshake.is_proof(secret, LEADER, transcript, message.get("proof")):
            connection.transcript = transcript
            connection.send("answer", proof=handshake.make_proof(secret, WORKER, transcript))
            connection.use_seal(Seal(handshake.make_key(secret, transcript), WORKER))
            self._leader_has_no_secret = secret != self._own.secret
            return
        if message.get("protocol") != PROTOCOL or not self._own.secret:
            reason = f"it runs another version of the launcher: {OTHER_LAUNCHER}"
        else:
            reason = f"it has another {names.JOB_SECRET_VARIABLE} than this host"
        connection.send("refused", reason=reason)
        self._shorten()
        self._distrust(connection, reason)

    def _shorten(self) -> None:
        """Let the search end within ``REFUSAL_LIMIT_SECONDS``.

        It goes on that long, because the other end may be the leader of another job, which ends.
        """
        soon = time.monotonic() + names.REFUSAL_LIMIT_SECONDS
        if soon < self._deadline:
            # 0: the outcome does not name a limit of time, because that is not the reason.
            self._deadline, self._reasons.limit = soon, 0.0

    def _distrust(self, connection: Connection, reason: str) -> None:
        """Close a connection to another program, and try again: the leader may get the port."""
        self._refusal = self._refusal or reason
        connection.close()
        self._lost(connection, reason)

    def _lost(self, connection: Connection, reason: str) -> None:
        """Log why a connection ended before the welcome, and schedule the next try.

        The leader may still be starting, or has refused this host. If another program has answered
        for ``_FOREIGN_SECONDS``, the search ends with the next try.

        Args:
            connection: The connection, which is closed.
            reason: End of a sentence, for example ``it closed the connection``.
        """
        reason = self._refusal or f"{reason} before it let this host in"
        if not connection.is_foreign:
            self._foreign_since = 0.0
        else:
            now = time.monotonic()
            self._foreign_since = self._foreign_since or now
            reason = f"another program has this port there, so that the leader ends: {reason}"
            reason = f"{reason}; free the port, or set {names.CONTROL_PORT_VARIABLE} on every host"
            if now - self._foreign_since >= _FOREIGN_SECONDS:
                self._deadline, self._reasons.limit = now, 0.0
        self._reasons.note(reason)
        self._try_later(reason)


_KINDS = ("challenge", "refused", "welcome", "finish")
"""Kinds of messages that a leader sends during a join."""


class _Reasons:
    """The reasons for which this host has not joined, for the log and for the job's outcome.

    Attributes:
        last: Reason of the last try.
        answered: Whether a program listens at the leader's port.
        limit: As in ``Search``; 0 if the search ends for another reason than the time.
        address: Address of the last try; ``""`` if the name could not be resolved.
        lost: As in ``Search.begin``.
    """

    def __init__(self, control: Control, limit: float, log: Callable[[str], None]) -> None:
        """Start without a reason; parameters as in ``Search``."""
        self.last = "it did not try"
        self.answered = False
        self.limit = limit
        self.address = ""
        self._control = control
        self.lost = ""
        self._log = log
        self._noted: dict[str, None] = {}  # a set in order: the values mean nothing

    def note(self, reason: str) -> None:
        """Log a reason once, and keep it for the outcome; only the first five.

        Args:
            reason: For example ``it has already joined``.
        """
        if reason not in self._noted and len(self._noted) < _MAX_LOGGED_REASONS:
            self._noted[reason] = None
            self._log(f"{self._control.leader} does not let this host in yet: {reason}")

    def log_tries(self, seconds: float) -> None:
        """Log the last try and its result, with advice.

        Args:
            seconds: Time since the begin of the search.
        """
        control = self._control
        name = control.address or control.leader
        where = name if self.address in ("", name) else f"{name} ({self.address})"
        # Without an address even the look-up of the name went out by the default route.
        if self.address:
            interface = network_routes.interface_that_reaches(self.address)
        else:
            interface = network_routes.default_route_interface()
        unplugged = ""
        if network_routes.has_no_carrier(interface):
            unplugged = f"; {interface} has no carrier"
        self._log(
            f"not joined after {seconds:.0f} s: {where} port {control.port}:"
            f" {self.last}{unplugged}; check that the leader {control.leader} is started, that the"
            " name is right, and that the port is open"
        )

    def text(self) -> str:
        """Return the cause for the job's outcome.

        For example ``the leader algo-1 did not answer on port 7788 within 600 s: Connection
        refused``, or ``lost host algo-1: ...`` after an earlier join.
        """
        leader = self._control.leader
        if self.lost:
            return f"lost host {leader}: {self.lost}"
        verb = "let this host in" if self.answered else "answer"
        within = f" within {self.limit:g} s" if self.limit else ""
        reasons = "; ".join(dict.fromkeys([*self._noted, self.last]))
        return f"the leader {leader} did not {verb} on port {self._control.port}{within}: {reasons}"
