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
_ANSWER_SECONDS = 15.0
"""From the connection to the welcome; a leader that is busy with many hosts takes some of it."""

_NOT_JOINED_SECONDS = (20.0, 60.0)
"""Times at which the log describes the tries of this host, and their results."""

_STRANGE_SECONDS = 45.0
"""How long another program may answer at the leader's port, each time.

A leader that finds its port taken ends.
"""

_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 1.0
_LOGGED_REASONS = 5


class LeaderConnection(NamedTuple):
    """The connection to a leader that has admitted this host.

    Attributes:
        connection: The connection, to be handed over.
        has_no_secret: This host has a secret, and the leader has none. This host may only report
            that.
    """

    connection: Connection
    has_no_secret: bool


class SearchHandlers(NamedTuple):
    """The worker's handlers for events of a search.

    Attributes:
        found: The leader has admitted this host.
        over: No leader admits this host: the outcome of the job.
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
        self._refused = ""  # in the words of the present other end
        self._strange_since = 0.0  # 0: the last try met no other program
        self._tries = 0
        self._pause = _FIRST_PAUSE
        for seconds in _NOT_JOINED_SECONDS:
            if seconds < limit:
                loop.after(seconds, self.log_tries)

    def begin(self, lost: str = "") -> None:
        """Begin. lost: why the leader that had admitted this host is gone; ``""`` for none."""
        self._reasons.lost = lost
        if lost:
            self._again(lost)
        else:
            self._try()

    def log_tries(self) -> None:
        """Log the tries and their results, unless the search is over."""
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
        """Begin a try to connect, without waiting for it."""
        if self._phases.now is not SearchPhase.CONNECTING:
            return
        if time.monotonic() >= self._deadline:
            self._handlers.over(
                Outcome(FAILED, names.EXIT_HOSTS, self._own.host, self._reasons.text())
            )
            return
        name = self._control.address or self._control.leader
        self._lookup = Lookup(self._loop, name, self._control.port, self._resolved)

    def _resolved(self, addresses: Addresses, reason: str) -> None:
        if not addresses:
            # The names of pods appear after the pods.
            self._reasons.note(reason)
            self._strange_since = 0.0
            self._again(reason)
            return
        # A name may have several addresses, and only one that answers: try the next one each time.
        family, address = addresses[self._tries % len(addresses)]
        self._tries += 1
        self._reasons.address = str(address[0])
        self._attempt = Attempt(self._loop, family, address, _CONNECT_SECONDS, self._connected)

    def _again(self, reason: str) -> None:
        """Schedule the next try, after one that has failed."""
        if self._phases.take("failed"):
            self._reasons.last = reason
            self._loop.after(self._pause, self._try)
            self._pause = min(self._pause * 1.5, _LONGEST_PAUSE)

    def _connected(self, opened: socket.socket | None, reason: str) -> None:
        if opened is None:
            self._strange_since = 0.0
            self._again(reason)
            return
        try:
            connection = Connection(self._loop, opened, self._message, self._lost)
        except OSError as error:
            opened.close()
            self._again(str(error))
            return
        self._phases.must("joined")
        self._connection = connection
        self._reasons.answered = True
        self._refused = ""
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
        kind, transcript = text(message.get("type")), connection.transcript
        if kind not in _KINDS or transcript is None or not self._phases.take(kind):
            connection.is_foreign = True
            self._distrust(connection, "it does not speak the launcher's protocol")
        elif kind == "refused":
            self._refused = reason = one_line(message.get("reason"))
            is_final = names.JOB_SECRET_VARIABLE in reason or OTHER_LAUNCHER in reason
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
        """Check the leader's proof that it knows the secret, and send this host's proof."""
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
        """Shorten the search: the other end may be the leader of another job, which ends soon."""
        soon = time.monotonic() + names.REFUSAL_LIMIT_SECONDS
        if soon < self._deadline:
            self._deadline, self._reasons.limit = soon, 0.0

    def _distrust(self, connection: Connection, reason: str) -> None:
        """Close a connection to another program; the leader may have the port later."""
        self._refused = self._refused or reason
        connection.close()
        self._lost(connection, reason)

    def _lost(self, connection: Connection, reason: str) -> None:
        """Handle a lost connection.

        The leader is still starting, or has refused this host, or another program has the port.
        """
        reason = self._refused or f"{reason} before it let this host in"
        if not connection.is_foreign:
            self._strange_since = 0.0
        else:
            now = time.monotonic()
            self._strange_since = self._strange_since or now
            reason = f"another program has this port there, so that the leader ends: {reason}"
            reason = f"{reason}; free the port, or set {names.CONTROL_PORT_VARIABLE} on every host"
            if now - self._strange_since >= _STRANGE_SECONDS:
                self._deadline, self._reasons.limit = now, 0.0
        self._reasons.note(reason)
        self._again(reason)


_KINDS = ("challenge", "refused", "welcome", "finish")


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
        self._noted: dict[str, None] = {}  # in order

    def note(self, reason: str) -> None:
        """Log a new reason, once; the search may last for the whole join limit."""
        if reason not in self._noted and len(self._noted) < _LOGGED_REASONS:
            self._noted[reason] = None
            self._log(f"{self._control.leader} does not let this host in yet: {reason}")

    def log_tries(self, seconds: float) -> None:
        """Log the last try and its result."""
        control = self._control
        name = control.address or control.leader
        where = name if self.address in ("", name) else f"{name} ({self.address})"
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
        """Return the cause for the job's outcome."""
        leader = self._control.leader
        if self.lost:
            return f"lost host {leader}: {self.lost}"
        verb = "let this host in" if self.answered else "answer"
        within = f" within {self.limit:g} s" if self.limit else ""
        reasons = "; ".join(dict.fromkeys([*self._noted, self.last]))
        return f"the leader {leader} did not {verb} on port {self._control.port}{within}: {reasons}"
