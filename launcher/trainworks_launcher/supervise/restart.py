"""Restarts of the job: after a failure that another attempt may cure, all hosts end their processes
and start the job once more.

An attempt is a whole run: the hosts join, start together and end together. The leader decides with
an attempt's outcome whether another one follows (``Outcome.again``); a host that loses the leader
decides for itself. A host joins for the next attempt when no process of its last one is left, and
the next attempt starts when all hosts have joined: so ranks of two attempts never run at once. A
host whose container was started anew by its platform knows of no earlier attempt. It joins like the
others, which send it what they know.

From the second failure without a newer checkpoint or step on, the leader lets the hosts wait before
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

if TYPE_CHECKING:
    from trainworks_launcher.plan.plan import NodePlan

SavedState = Tuple[Optional[int], Optional[int]]
"""Values that change with a newer checkpoint, and with a newer step in the heartbeat file; None
for one that cannot be read in time.
"""

KIND = "tries"
"""Kind of the messages with ``AttemptHistory.fields``: to the leader from a host that joins, and
back from the leader.
"""

_MAX_CAUSES = 20
_MAX_CAUSE_CHARACTERS = 500
_MAX_STEP_DIGITS = 16
_SAME_KILLS = 3
"""Restarts in a row that ended in the same kill without a step further: no further restart."""

_NANOSECONDS = 1e9
"""In a second."""

_LONGEST_PAUSE_SECONDS = 60.0
_CLEAN_UP_SECONDS = 5.0
"""Limit of a look at /dev/shm and at all processes. Without an answer everything stays."""

_CURABLE_STATUSES = (names.EXIT_HOSTS, names.EXIT_HANG)
"""Statuses of failures that are not the script's, and that another attempt may cure."""


class AttemptHistory:
    """The attempts of a job, as far as this host knows them.

    Attributes:
        restarts: Number of attempts after the first one.
        causes: First line of each failure before those restarts, in order; the last 20.
        lost: Number of steps that had to be repeated; None if a step is not known.
        prepared: The plan with which this host has been prepared; None before that.
        pause: Seconds to wait before the next attempt starts.
        program_began: First start of the program (monotonic clock); 0.0 before that.
    """

    def __init__(self, plan: NodePlan, heartbeat: str = "") -> None:
        """Begin with the first attempt.

        Args:
            plan: The plan of this host.
            heartbeat: Path of the file in which the script may write its step; ``""`` for none.
        """
        self.restarts = 0
        self.program_began = 0.0
        self.causes: tuple[str, ...] = ()
        self.lost: int | None = 0
        self.prepared: NodePlan | None = None
        self.pause = 0.0
        self._heartbeat = str(Path(plan.cwd, heartbeat)) if heartbeat else ""
        self._checkpoints = plan.env.get(names.CHECKPOINT_DIRECTORY_VARIABLE, "")
        self._restarts_of_platform = int(plan.env.get(names.RESTARTS_VARIABLE) or "0")
        # Of the last attempt: its last step, its times (seconds since 1970), and whether its lost
        # steps are in ``lost``.
        self._step = -1
        self._began = self._ended = 0.0
        self._is_counted = True
        # Signals between two attempts, and how many of those before the first one were read.
        self._signals: list[int] = []
        self._read_signals = 0
        self._limit = plan.restarts
        # torchrun itself starts failed ranks again, but not after the loss of a host. If the job
        # may go on with fewer hosts, torchrun alone starts ranks again.
        self._lost_hosts_only = plan.ranks_by == "torchrun"
        if plan.control is not None and plan.control.minimum_hosts:
            self._limit = 0
        self._restarts_ranks = plan.restarts > 0
        self._last: tuple[str, SavedState] | None = None  # kind of the last failure
        # Attempts in a row that ended as the one before, without a step further.
        self._same = 0
        # Attempts in a row that ended without a step further, whatever their end.
        self._fruitless = 0
        self._shared_memory: frozenset[shared_memory.Key] | None = None

    def judge(self, outcome: Outcome, *, started: bool) -> Outcome:
        """Return the outcome of an attempt, with whether another attempt follows (``again``).

        Sets ``pause``. Looks at the checkpoints, with a time limit. Keeps the kind of the failure
        and the state of the checkpoints for the next call.

        Args:
            outcome: The outcome.
            started: Whether the program was started.
        """
        if not self._is_curable(outcome, started):
            return outcome._replace(again=False)
        state = self._read_saved_state()
        # The failure before this one: (kind of the failure, state of the checkpoints).
        last, self._last = self._last, (outcome.kind_of_failure, state)
        if last is None or state != last[1]:
            # The first failure, or one after progress.
            self._same = self._fruitless = 0
            self.pause = 0.0
            return outcome._replace(again=True)

        self._fruitless += 1
        self.pause = min(_LONGEST_PAUSE_SECONDS, 2.0 ** (self._fruitless - 1))
        # Without a place the failure is not the script's. A state that is not known may be newer.
        is_same = None not in state and self._last == last and bool(outcome.place)
        self._same = self._same + 1 if is_same else 0
        # A kill from outside may be a preemption, which says nothing about the next attempt; the
        # same kill after three restarts does.
        limit = _SAME_KILLS if outcome.retry else 1
        return outcome._replace(again=self._same < limit)

    def _is_curable(self, outcome: Outcome, started: bool) -> bool:
        """Return whether another attempt may cure a failure, and a restart is left."""
        if outcome.kind != FAILED or self.restarts >= self._limit:
            return False
        if not started and self.restarts == 0:
            # A job that cannot start at all has a wrong setting.
            return False
        if not outcome.place:
            # The end is not that of a program.
            return outcome.status in _CURABLE_STATUSES
        # With the same memory the script would be killed again.
        return not self._lost_hosts_only and not outcome.memory

    def _read_saved_state(self) -> SavedState:
        """Read the state of the checkpoints and of the heartbeat file, with a time limit.

        0 for a directory or a file that the job does not have.
        """

        def read() -> SavedState:
            checkpoints = state_of(self._checkpoints) if self._checkpoints else 0
            heartbeat = written_at(self._heartbeat) if self._heartbeat else 0
            return checkpoints, heartbeat

        unknown: SavedState = (None, None)
        return run_in_time(read, unknown)

    def count(self, outcome: Outcome, began: float) -> str:
        """Count a restart, and read the step of the attempt that has ended.

        Args:
            outcome: How that attempt ended.
            began: Start of its program, in seconds since 1970; 0 if it was not started.

        Returns:
            A line for the log.
        """
        self.restarts += 1
        if began:
            self._began, self._ended = began, time.time()
            self._step = self._read_step(began)
            self._is_counted = False
        cause = outcome.text.partition("\n")[0][:_MAX_CAUSE_CHARACTERS]
        self.causes = (*self.causes, cause)[-_MAX_CAUSES:]
        return f"starting again on every host ({self.restarts} of {self._limit}): {cause}"

    def _read_step(self, began: float) -> int:
        """Read the step in the heartbeat file, with a time limit.

        Args:
            began: Start of the attempt, in seconds since 1970.

        Returns:
            The step; -1 if the file was not written since then, or has something else.
        """
        if not self._heartbeat:
            return -1

        def read() -> str:
            if written_at(self._heartbeat) / _NANOSECONDS < began:
                return ""
            return text_of(self._heartbeat).strip()

        step = run_in_time(read, "")
        if not step.isdecimal() or len(step) >= _MAX_STEP_DIGITS:
            return -1
        return int(step)

    def note_shared_memory(self) -> None:
        """Note the files in /dev/shm before the first attempt: they are not of this job."""
        if self._restarts_ranks and self._shared_memory is None:
            self._shared_memory = run_in_time(lambda: frozenset(shared_memory.files()), None)

    def clean_up_shared_memory(self, until: float = 0.0) -> str:
        """Remove the files that dead ranks have left in /dev/shm, with a time limit.

        Nothing is removed if ranks are not restarted, or if the files before the job are not known.

        Args:
            until: Start of the ranks that run now, in seconds since 1970; 0 if none runs.

        Returns:
            A line for the log; ``""`` for none.
        """
        before = self._shared_memory
        if before is None:
            return ""
        leftovers = run_in_time(
            lambda: shared_memory.clean_up(before, until=until), None, _CLEAN_UP_SECONDS
        )
        if leftovers is None:
            return ""
        return str(leftovers)

    def keep_signals(self, numbers: Sequence[int]) -> None:
        """Keep the stop signals that came at the end of an attempt for the next one."""
        self._signals += [number for number in numbers if number in STOP_SIGNALS]

    def new_signals(self, before: Sequence[int]) -> Sequence[int]:
        """Return the signals that no attempt has seen; each is returned once.

        Args:
            before: All signals that came while no attempt had its own handlers. The list grows.
        """
        numbers = [*before[self._read_signals :], *self._signals]
        self._read_signals, self._signals = len(before), []
        return numbers

    def of_job(self, outcome: Outcome) -> Outcome:
        """Return the outcome of the last attempt as that of the job, with the restarts."""
        return outcome._replace(
            restarts=self.restarts,
            earlier=self.causes,
            lost_steps=self.lost if self._is_counted else None,
        )

    def fields(self) -> dict[str, Json]:
        """Return this history as the fields of a message."""
        return {
            "restarts": self.restarts,
            "causes": list(self.causes),
            "lost": self.lost,
            "step": self._step,
        }

    def learn(self, message: Mapping[str, Json]) -> bool:
        """Take the history of another host, if that host knows of more.

        Args:
            message: With ``fields`` of the other host.

        Returns:
            Whether it knows of more restarts, or of a later step of the last attempt.
        """
        restarts = min(number(message.get("restarts")), self._limit)
        step, lost = message.get("step"), message.get("lost")
        if not isinstance(step, int):
            step = -1
        # The number of restarts decides; of the same number, the later step.
        if (restarts, step) <= (self.restarts, self._step):
            return False
        if restarts > self.restarts:
            self.restarts = restarts
            self.causes = tuple(texts(message.get("causes")))[-_MAX_CAUSES:]
            self.lost = lost if isinstance(lost, int) else None
        self._step = step
        return True

    def find_checkpoint(self) -> tuple[str, float]:
        """Find the newest complete checkpoint.

        Call this in a thread: on a dead file system it may never return.

        Returns:
            Its path, ``""`` for none, and when it was written, in seconds since 1970.
        """
        checkpoint = newest_complete(self._checkpoints) if self._checkpoints else ""
        return checkpoint, written_at(checkpoint) / _NANOSECONDS

    def resume(self, checkpoint: str, saved: float) -> tuple[Mapping[str, str], str]:
        """Count the lost steps of the last attempt, and describe where the next one goes on.

        Adds to ``lost``, or sets it to None if a step is not known.

        Args:
            checkpoint: The checkpoint, as ``find_checkpoint`` returns it.
            saved: When it was written, in seconds since 1970.

        Returns:
            Variables of the next attempt's processes (``""`` removes a variable), and a line for
            the log.
        """
        from_step = step_in(checkpoint) if checkpoint else 0
        start = checkpoint or "its beginning: no checkpoint"
        line = f"try {self.restarts + 1} of the job continues from {start}"
        if self._step >= 0 and from_step >= 0:
            steps = max(0, self._step - from_step)
            line += f"; {steps} step(s) are lost: the last try had come to step {self._step}"
            if self.lost is not None:
                self.lost += steps
        else:
            self.lost = None
            if self._began:
                # A checkpoint may be older than the attempt, or written while it ended.
                kept_until = min(max(saved, self._began), self._ended)
                line += f"; the last {self._ended - kept_until:.0f} s of the last try are lost"
        self._is_counted = True

        variables = {
            names.RESTARTS_VARIABLE: str(self._restarts_of_platform + self.restarts),
            names.RESUME_VARIABLE: checkpoint,
        }
        return variables, line
