"""Checks the clock of this host and its network, while the host is prepared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Callable

from trainworks_launcher.contract import names
from trainworks_launcher.supervise.control import data_path
from trainworks_launcher.supervise.outcome.outcome import FAILED, Outcome
from trainworks_launcher.supervise.part import Part

if TYPE_CHECKING:
    from trainworks_launcher.plan.plan import Control
    from trainworks_launcher.supervise.attempt import Attempt

_INDEPENDENT = ("none", "tasks")
"""Modes whose programs need not talk to each other."""

_STORE_MODES = ("torch_distributed", "ray")
"""Modes that cannot start without the leader's MASTER_PORT."""


class ClockCheck(Part):
    """Compares the clock with the leader's; present if several hosts are checked."""

    def __init__(self, attempt: Attempt) -> None:
        """Ask nothing before ``connected``."""
        self._attempt = attempt

    def connected(self) -> None:
        """Ask the leader for the time; the answer may be a warning in the log."""
        from trainworks_launcher.supervise.control.clock_offset import KIND, ClockComparison

        attempt, plan = self._attempt, self._attempt.plan
        clocks = ClockComparison(attempt.role, plan.host, plan.role == "leader", attempt.log)
        attempt.handlers[KIND] = clocks.receive
        clocks.ask()


class DataPathCheck(Part):
    """Tests the connections that the ranks will use; present in a job of several hosts."""

    def __init__(self, attempt: Attempt, control: Control, done: Callable[[], None]) -> None:
        """Test nothing before ``connected``.

        Args:
            attempt: The state of the attempt.
            control: The hosts of the job.
            done: Called when this host has tested all its connections.
        """
        self._attempt = attempt
        self._control = control
        self._done = done
        self._test: data_path.DataPath | None = None

    def connected(self) -> None:
        """Begin the test; send the offer again if the leader starts anew."""
        if self._test is None:
            self._test = self._make_test()
            self._attempt.handlers[data_path.KIND] = self._test.receive
        self._test.begin()

    def _make_test(self) -> data_path.DataPath:
        """Return the test of this host, by its plan and its variables."""
        attempt, plan = self._attempt, self._attempt.plan
        variables = {**attempt.environment.variables, **plan.env}
        port = variables.get(names.MASTER_PORT_VARIABLE, "")
        store = None
        if port.isdecimal():
            store = data_path.Store(int(port), plan.mode in _STORE_MODES)
        own = data_path.LocalHost(
            host=plan.member or plan.host,
            place=data_path.place_of(variables, attempt.environment.devices),
            store=store,
            needs_path=plan.mode not in _INDEPENDENT,
            may_lose_hosts=self._control.minimum_hosts > 0,
        )
        events = data_path.Events(done=self._done, warn=self._warn, fail=self._fail)
        return data_path.DataPath(attempt.loop, own, self._control.hosts, attempt.role, events)

    def _warn(self, sentence: str) -> None:
        """Log a warning."""
        self._attempt.log(f"warning: {sentence}")

    def _fail(self, cause: str) -> None:
        """Report a failure of this host, with status ``names.EXIT_HOSTS``."""
        self._attempt.report(Outcome(FAILED, names.EXIT_HOSTS, self._attempt.plan.host, cause))

    @property
    def is_ready(self) -> bool:
        """Whether this host has tested all its connections; also before ``connected``."""
        return self._test is None or self._test.over

    def go(self) -> None:
        """Close the port of the ranks' store, which rank 0 needs from now on."""
        self.close()

    def close(self) -> None:
        """Close the ports and connections of the test."""
        if self._test is not None:
            self._test.close()
