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
    """Compares the clock with the leader's; present where several hosts are checked."""

    def __init__(self, attempt: Attempt) -> None:
        """Nothing is asked yet."""
        self._attempt = attempt

    def connected(self) -> None:
        """Ask the leader for the time."""
        from trainworks_launcher.supervise.control.clock_offset import KIND, ClockComparison

        attempt, plan = self._attempt, self._attempt.plan
        clocks = ClockComparison(attempt.role, plan.host, plan.role == "leader", attempt.log)
        attempt.handlers[KIND] = clocks.receive
        clocks.ask()


class DataPathCheck(Part):
    """Tries the ways that the ranks will take; present in a job of several hosts."""

    def __init__(self, attempt: Attempt, control: Control, done: Callable[[], None]) -> None:
        """Nothing is tried yet. done: this host has tried all ways."""
        self._attempt = attempt
        self._control = control
        self._done = done
        self._trials: list[data_path.DataPath] = []  # one, once the hosts are connected

    def connected(self) -> None:
        """Try the ways to the other hosts; again if the leader starts anew."""
        if not self._trials:
            trial = self._make_trial()
            self._trials.append(trial)
            self._attempt.handlers[data_path.KIND] = trial.receive
        for trial in self._trials:
            trial.begin()

    def _make_trial(self) -> data_path.DataPath:
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
        self._attempt.log(f"warning: {sentence}")

    def _fail(self, cause: str) -> None:
        self._attempt.report(Outcome(FAILED, names.EXIT_HOSTS, self._attempt.plan.host, cause))

    @property
    def is_ready(self) -> bool:
        """Whether all ways were tried."""
        return all(trial.over for trial in self._trials)

    def go(self) -> None:
        """Release the port: it is the ranks' store's from now on."""
        self.close()

    def close(self) -> None:
        """Close what is open."""
        for trial in self._trials:
            trial.close()
