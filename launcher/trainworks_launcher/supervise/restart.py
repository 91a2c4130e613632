"""Starting again: after a failure that another try may cure, all hosts end what
runs and try the job once more.

A try is a whole run: the hosts join, start together and end together. The leader decides with a
try's outcome whether there is another one (``Outcome.again``); a host that loses the leader decides
for itself. A host joins for the next try when nothing of its last one is left, and the next one
starts when all have joined: so there are never ranks of two. A host whose container its platform
has started anew knows of no earlier try; it joins like the others, who tell it.

From the second failure without a newer checkpoint or step on the leader lets the hosts wait before
they start: 1, 2, 4 ... 60 s. They have joined then, so a stop signal to one of them ends the wait
on all.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Mapping, Optional, Sequence, Tuple

from trainworks_launcher.contract import names
from trainworks_launcher.contract.checkpoints import newest_complete, state_of, step_in
from trainworks_launcher.contract.files import text_of, written_at
from trainworks_launcher.contract.inspection import run_in_time
from trainworks_launcher.contract.json_values import Json, number, texts
from trainworks_launcher.contract.stop_signals import STOP_SIGNALS
from trainworks_launcher.supervise.outcome.outcome import FAILED, Outcome
from trainworks_launcher.supervise.processes import shared_memory

State = Tuple[Optional[int], Optional[int]]

if TYPE_CHECKING:
    from trainworks_launcher.plan.plan import NodePlan

KIND = "tries"
"""Kind of the messages: what ``Tries.fields`` has, to the leader from a host
that joins, and back from it.
"""

_CAUSES = 20
_CAUSE_CHARACTERS = 500
_KILLS = 3
"""Restarts in a row that ended in the same kill without a step further: no further restart."""

_LONGEST_PAUSE = 60.0
_CLEAN_UP_SECONDS = 5.0
"""How long a look at /dev/shm and at all processes is waited for.

Without an answer everything stays.
"""

_CURABLE = (names.EXIT_HOSTS, names.EXIT_HANG)


class Tries:
    """What this host knows of the tries of its job.

    Attributes:
        restarts: How often the job was started again.
        causes: Why, in order; the last ones.
        lost: Steps that were done and are done again; None where a step was not known.
        prepared: The plan with which this host has been prepared; None: it was not.
        pause: Seconds before the next try starts.
        program_began: When the program was started for the first time (monotonic clock); 0.0:
            it was not.
    """

    def __init__(self, plan: NodePlan, heartbeat: str = "") -> None:
        """Of the first try. heartbeat: a file in which the script may say its step.

        ``""`` if there is none.
        """
        self.restarts = 0
        self.program_began = 0.0
        self.causes: tuple[str, ...] = ()
        self.lost: int | None = 0
        self._step = -1
        self._heartbeat = str(Path(plan.cwd, heartbeat)) if heartbeat else ""
        self._began = self._ended = 0.0
        self._counted = True
        self.prepared: NodePlan | None = None
        self._signals: list[int] = []
        self._seen = 0
        self._limit = plan.restarts
        # torchrun starts ranks again itself, but not for a lost host; and with
        # fewer hosts than all only it does so.
        self._lost_hosts_only = plan.ranks_by == "torchrun"
        if plan.control is not None and plan.control.minimum_hosts:
            self._limit = 0
        self._restarts_ranks = plan.restarts > 0
        self._checkpoints = plan.env.get(names.CHECKPOINT_DIRECTORY_VARIABLE, "")
        self._started_before = plan.env.get(names.RESTARTS_VARIABLE, "")
        self._last: tuple[str, State] | None = None
        # How often in a row a try ended as the one before, without a step further.
        self._same = 0
        # How often in a row a try ended without a step further, whatever its end.
        self._fruitless = 0
        self.pause = 0.0
        self._shared_memory: frozenset[shared_memory.Key] | None = None

    def judge(self, outcome: Outcome, *, started: bool) -> Outcome:
        """Return the outcome of a try, with whether there is another one.
        started: the program was started.
        """
        if not self._is_curable(outcome, started):
            return outcome._replace(again=False)
        state = self._state()
        last, self._last = self._last, (outcome.kind_of_failure, state)
        if last is None or state != last[1]:
            self._same = self._fruitless = 0
            self.pause = 0.0
            return outcome._replace(again=True)

        self._fruitless += 1
        self.pause = min(_LONGEST_PAUSE, 2.0 ** (self._fruitless - 1))
        is_same = None not in state and self._last == last and bool(outcome.place)
        self._same = self._same + 1 if is_same else 0
        # A kill from outside may be a preemption, which says nothing about the next try; the same
        # kill after three restarts does.
        most = _KILLS if outcome.retry else 1
        return outcome._replace(again=self._same < most)

    def _is_curable(self, outcome: Outcome, started: bool) -> bool:
        """Return whether a failure is one that another try may cure, and a try is left."""
        if outcome.kind != FAILED or self.restarts >= self._limit:
            return False
        if not started and self.restarts == 0:
            return False
        if not outcome.place:
            return outcome.status in _CURABLE
        return not self._lost_hosts_only and not outcome.memory

    def _state(self) -> State:
        """Return what changes with a newer checkpoint or step.

        None for what does not answer in time.
        """

        def look() -> State:
            files = state_of(self._checkpoints) if self._checkpoints else 0
            return files, written_at(self._heartbeat) if self._heartbeat else 0

        unknown: State = (None, None)
        return run_in_time(look, unknown)

    def count(self, outcome: Outcome, began: float) -> str:
        """Another try begins. Returns the line that says so.

        began: when the program of the last one did, in seconds since 1970; 0: it did not.
        """
        self.restarts += 1
        if began:
            self._began, self._ended = began, time.time()
            self._step = -1
            if self._heartbeat:
                beat = run_in_time(lambda: self._said_since(began), "")
                if beat.isdecimal() and len(beat) < _DIGITS:
                    self._step = int(beat)
            self._counted = False
        cause = outcome.text.partition("\n")[0][:_CAUSE_CHARACTERS]
        self.causes = (*self.causes, cause)[-_CAUSES:]
        return f"starting again on every host ({self.restarts} of {self._limit}): {cause}"

    def _said_since(self, began: float) -> str:
        """Return what the heartbeat file says, if it was written since then
        (seconds since 1970).
        """
        if written_at(self._heartbeat) / 1e9 < began:
            return ""
        return text_of(self._heartbeat).strip()

    def note_shared_memory(self) -> None:
        """Note what is in /dev/shm before the first try: it is not of this job."""
        if self._restarts_ranks and self._shared_memory is None:
            self._shared_memory = run_in_time(lambda: frozenset(shared_memory.files()), None)

    def clean_up_shared_memory(self, until: float = 0.0) -> str:
        """Remove what dead ranks have left in /dev/shm.

        Returns a line for the log; ``""`` for none.

        until: when the ranks that run now have started, in seconds since 1970; 0: none runs.
        """
        before = self._shared_memory
        if before is None:
            return ""
        line = run_in_time(
            lambda: shared_memory.clean_up(before, until=until), None, _CLEAN_UP_SECONDS
        )
        return str(line) if line is not None else ""

    def keep_signals(self, numbers: Sequence[int]) -> None:
        """Signals came at the end of a try: they are for the next one."""
        self._signals += [number for number in numbers if number in STOP_SIGNALS]

    def new_signals(self, before: Sequence[int]) -> Sequence[int]:
        """Return the signals that no try has seen. before: those that came
        while no try had its own handlers.
        """
        numbers = [*before[self._seen :], *self._signals]
        self._seen, self._signals = len(before), []
        return numbers

    def of_job(self, outcome: Outcome) -> Outcome:
        """Return the outcome of the last try as that of the job."""
        return outcome._replace(
            restarts=self.restarts,
            earlier=self.causes,
            lost_steps=self.lost if self._counted else None,
        )

    def fields(self) -> dict[str, Json]:
        """Return what another host is told."""
        return {
            "restarts": self.restarts,
            "causes": list(self.causes),
            "lost": self.lost,
            "step": self._step,
        }

    def learn(self, message: Mapping[str, Json]) -> bool:
        """Take what another host told. Returns whether it was new."""
        restarts = min(number(message.get("restarts")), self._limit)
        step, lost = message.get("step"), message.get("lost")
        if not isinstance(step, int):
            step = -1
        if (restarts, step) <= (self.restarts, self._step):
            return False
        if restarts > self.restarts:
            self.restarts = restarts
            self.causes = tuple(texts(message.get("causes")))[-_CAUSES:]
            self.lost = lost if isinstance(lost, int) else None
        self._step = step
        return True

    def find(self) -> tuple[str, float]:
        """Return the newest complete checkpoint, and when it was written; ``""`` if there is none.

        May never return, where a file system is dead: to be called in a thread.
        """
        found = newest_complete(self._checkpoints) if self._checkpoints else ""
        return found, written_at(found) / 1e9

    def go_on(self, found: str, saved: float) -> tuple[Mapping[str, str], str]:
        """Return what the processes of another try are told, and a line about where it goes on.

        A value of ``""`` takes its variable away.

        Args:
            found: The checkpoint, as ``find`` returns it.
            saved: When it was written.
        """
        from_step = step_in(found) if found else 0
        start = found or "its beginning: no checkpoint"
        line = f"try {self.restarts + 1} of the job goes on from {start}"
        if self._step >= 0 and from_step >= 0:
            steps = max(0, self._step - from_step)
            line += f"; {steps} step(s) are lost: the last try had come to step {self._step}"
            if self.lost is not None:
                self.lost += steps
        else:
            self.lost = None
            if self._began:
                kept = min(max(saved, self._began), self._ended)
                line += f"; the last {self._ended - kept:.0f} s of the last try are lost"
        self._counted = True

        before = int(self._started_before or "0")
        variables = {
            names.RESTARTS_VARIABLE: str(before + self.restarts),
            names.RESUME_VARIABLE: found,
        }
        return variables, line


_DIGITS = 16
