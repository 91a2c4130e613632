"""Restarts: which round of the ranks got a step further than those before it,
and when a job is ended for none.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from trainworks_launcher.supervise.attribution.crash_loop import CrashLoop, Handlers
from trainworks_launcher.supervise.outcome.evidence import KnownFailure
from trainworks_launcher.supervise.outcome.outcome import FAILED, Outcome
from trainworks_launcher.supervise.processes.attempts import Attempts
from trainworks_launcher.supervise.processes.ranks import Rank


class Lives:
    """Attempts of a host with two ranks."""

    def __init__(self, **more: str | float) -> None:
        self.rounds = Attempts(**more)  # type: ignore[arg-type]
        self._start()

    def _start(self) -> list[bool]:
        ranks = [Rank(local, 100 + local, local) for local in (1, 0)]
        return [over for over in map(self.rounds.started, ranks) if over is not None]

    def further(self) -> bool:
        """End the round, and begin the next one. Return whether the ended one got further."""
        (last,) = self._start()
        return last


def test_a_round_that_leaves_nothing_got_no_step_further() -> None:
    lives = Lives()
    attempts = [(lives.further(), lives.rounds.restarts) for _ in range(4)]
    assert attempts == [(True, 1), (False, 2), (False, 3), (False, 4)]


@pytest.mark.parametrize("where", ["checkpoints", "heartbeat"])
def test_a_file_that_is_written_is_a_step_further(tmp_path: Path, where: str) -> None:
    file = tmp_path / "deep" / "file"
    file.parent.mkdir()
    place = file if where == "heartbeat" else tmp_path
    lives = Lives(**{where: str(place)})
    lives.further()
    assert not lives.further()
    file.write_text("1", encoding="ascii")
    os.utime(file, (1, 1))  # the clock of a file server is another one
    assert lives.further()
    assert not lives.further()


def test_too_many_files_speak_for_the_job(tmp_path: Path) -> None:
    for number in range(5001):
        (tmp_path / str(number)).touch()
    lives = Lives(checkpoints=str(tmp_path))
    assert [lives.further() for _ in range(3)] == [True] * 3


def test_a_long_round_and_one_that_lost_a_host_are_not_judged() -> None:
    lives = Lives()
    lives.further()
    assert not lives.further()
    lives.rounds.excuse()
    assert lives.further()
    assert not lives.further()
    lives = Lives(longest=0.0)
    assert [lives.further() for _ in range(3)] == [True] * 3


# --- who gives up ---------------------------------------------------------------------------------
FURTHER, NOTHING = True, False
FAILURE = KnownFailure(
    Outcome(
        FAILED,
        3,
        "algo-2",
        "ValueError: boom",
        rank=3,
        place="train.py on host algo-2",
        end="exit status 3",
    ),
    is_effect=False,
)
TERMINATED = KnownFailure(
    Outcome(
        FAILED,
        143,
        "algo-1",
        rank=0,
        place="train.py on host algo-1",
        end="killed by SIGTERM",
    ),
    is_effect=True,
)
"""torchrun has ended this rank, because another one has failed."""


class Job:
    """A leader, algo-1, and its actions."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []
        self.lines: list[str] = []
        self.known: KnownFailure | None = None
        of_leader = Handlers(
            lambda _: None, self.outcomes.append, self.lines.append, known=lambda: self.known
        )
        of_worker = of_leader._replace(tell=self._tell)
        self.leader = CrashLoop("algo-1", True, of_leader)
        self.worker = CrashLoop("algo-2", False, of_worker)

    def _tell(self, rounds: int) -> None:
        self.leader.receive_count("algo-2", {"rounds": rounds})


def own(job: Job, last: bool) -> None:
    job.leader.count_restart(last, None)


def other(job: Job, last: bool) -> None:
    job.worker.count_restart(last, FAILURE)


@pytest.mark.parametrize(
    ("course", "ends"),
    [
        ([(own, NOTHING)] * 2, False),
        ([(own, NOTHING)] * 3, True),
        ([(own, NOTHING)] * 2 + [(own, FURTHER)] + [(own, NOTHING)] * 2, False),
        ([(own, NOTHING), (other, NOTHING)] * 3, True),
        # The other has not told yet.
        (
            [(own, NOTHING), (other, NOTHING)] * 2 + [(own, NOTHING)],
            False,
        ),
        ([(own, NOTHING), (other, FURTHER)] * 9, False),
        ([(own, FURTHER), (other, NOTHING)] * 9, False),
        ([(own, NOTHING), (other, NOTHING)] * 2 + [(own, NOTHING), (other, FURTHER)], False),
    ],
)
def test_three_fruitless_restarts_of_all_hosts_end_a_job(
    course: list[tuple[Callable[[Job, bool], None], bool]], ends: bool
) -> None:
    job = Job()
    for judged, last in course:
        judged(job, last)
    assert bool(job.outcomes) == ends


def test_a_lost_host_begins_the_count_anew() -> None:
    job = Job()
    for _ in range(2):
        own(job, NOTHING)
        other(job, NOTHING)
    job.leader.begin_anew()
    own(job, NOTHING)
    assert not job.outcomes
    own(job, NOTHING)
    own(job, NOTHING)
    assert len(job.outcomes) == 1


def at(line: int, message: str) -> KnownFailure:
    outcome = FAILURE.outcome._replace(
        cause=f"ValueError: {message}", frames=f'  File "/opt/train.py", line {line}, in step'
    )
    return KnownFailure(outcome, is_effect=False)


def test_the_same_failure_is_the_same_exception_at_the_same_line_whatever_it_says() -> None:
    job = Job()
    for number in range(3):
        job.leader.count_restart(NOTHING, at(7, f"object at {number}"))
    assert len(job.outcomes) == 1


def test_another_failure_is_a_step_further() -> None:
    job = Job()
    for line in range(9):
        job.leader.count_restart(NOTHING, at(line, "always the same"))
    assert not job.outcomes


def test_the_sentence_is_the_cause_beside_the_last_failure() -> None:
    job = Job()
    for failure in (None, FAILURE, None):
        job.leader.count_restart(NOTHING, failure)
    (outcome,) = job.outcomes
    assert outcome.is_decided
    assert outcome.text.splitlines() == [
        "3 restarts in a row without a step further: ValueError: boom",
        "train.py on host algo-2: exit status 3",
    ]
    assert (outcome.kind, outcome.status, outcome.host, outcome.rank) == (FAILED, 3, "algo-2", 3)
    assert job.lines == [
        "the last restart got no step further (1 in a row; 3 end the job)",
        "the last restart got no step further (2 in a row; 3 end the job)",
    ]


@pytest.mark.parametrize("effect_comes", [(0,), (1,), (2,), (0, 1, 2)])
def test_a_rank_that_torchrun_has_ended_is_not_the_last_failure(
    effect_comes: tuple[int, ...],
) -> None:
    """The leader may see its own rank end before the other host says why."""
    job = Job()
    job.leader.count_restart(NOTHING, FAILURE)
    job.leader.receive_count("algo-2", {"rounds": 1})
    for number in (1, 2):
        job.leader.count_restart(NOTHING, TERMINATED if number in effect_comes else FAILURE)
        job.known = TERMINATED if 0 in effect_comes else None
        job.leader.receive_count("algo-2", {"rounds": number + 1})
    (outcome,) = job.outcomes
    assert (outcome.rank, outcome.status) == (3, 3)
    assert outcome.text.startswith("3 restarts in a row without a step further: ValueError: boom")


def test_an_end_by_torchrun_is_named_where_nothing_else_is_known() -> None:
    job = Job()
    for failure in (None, TERMINATED, None):
        job.leader.count_restart(NOTHING, failure)
    (outcome,) = job.outcomes
    assert (outcome.rank, outcome.status) == (0, 143)
