"""The table of evidence: which rank failed first, row by row.

And the kind of evidence of one process.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence

import pytest
from launcher_support import LAUNCHER

from trainworks_launcher.supervise.outcome.cause import (
    ProcessEnd,
    began_at,
    failure_of,
    observe,
    reason_of,
    status_of,
)
from trainworks_launcher.supervise.outcome.evidence import (
    KILL_SECONDS,
    Kind,
    Observation,
    Starter,
    Suspect,
    blames_a_peer,
    first_failure,
    kind_of,
    suspect_of,
)
from trainworks_launcher.supervise.outcome.outcome import (
    FAILED,
    SUCCEEDED,
    UNKNOWN_END,
    Outcome,
    ProgramPlace,
)
from trainworks_launcher.supervise.outcome.records import Record

BROKEN = "RuntimeError: [pair.cc:534] Connection closed by peer"
PEER_ERROR = (
    "smdistributed.modelparallel.torch.exceptions.PeerError:"
    " rank 0 (pp_rank 0) failed: ValueError: shapes differ"
)
NOBODY = Starter()
TERM, KILL = 143, 137


def seen(
    kind: Kind,
    at: float,
    place: str,
    status: int = 1,
    *,
    cause: str = "",
    end_time: float | None = None,
) -> Suspect:
    """Evidence of a rank: ``b3`` is rank 3 on host b. ended: when its process
    did, default when the trouble began.
    """
    outcome_kind = SUCCEEDED if kind is Kind.LEFT else FAILED
    outcome = Outcome(outcome_kind, status, place[0], cause, int(place[1:]))
    if kind is Kind.UNSEEN:
        outcome = outcome._replace(status=0, end=UNKNOWN_END)
    evidence_end = at if end_time is None else end_time
    return Suspect(kind, at, evidence_end, outcome)


def recorded(at: float, place: str, status: int = 1, end_time: float | None = None) -> Suspect:
    return seen(
        Kind.RECORDED, at, place, status, cause="ValueError: shapes differ", end_time=end_time
    )


def died(at: float, place: str, status: int) -> Suspect:
    return seen(Kind.DIED, at, place, status)


def terminated(at: float, place: str, status: int = TERM) -> Suspect:
    return seen(Kind.TERMINATED, at, place, status)


def peer(at: float, place: str, end_time: float | None = None) -> Suspect:
    return seen(Kind.PEER, at, place, cause=BROKEN, end_time=end_time)


def left(at: float, place: str) -> Suspect:
    return seen(Kind.LEFT, at, place, 0)


def waited(at: float, place: str) -> Suspect:
    return seen(
        Kind.RECORDED,
        at,
        place,
        cause="RuntimeError: Timed out waiting 1800000ms for recv operation",
    )


def unseen(at: float, place: str) -> Suspect:
    return seen(Kind.UNSEEN, at, place)


MPIRUN = Starter(sees_all_hosts=True, kill_seconds=KILL_SECONDS["mpirun"])
TORCHRUN = Starter(kill_seconds=KILL_SECONDS["torchrun"])


@pytest.mark.parametrize(
    ("suspects", "starter", "place"),
    [
        # Row 1: an own failure, with a record or without; the earliest one, on any host.
        ([recorded(2.0, "a0"), recorded(1.0, "b3")], NOBODY, "b3"),
        ([recorded(2.0, "a0"), died(1.0, "b3", 137)], NOBODY, "b3"),
        ([died(2.0, "a0", 14), recorded(1.0, "b3")], NOBODY, "b3"),
        ([died(2.0, "a0", 14), died(1.0, "b3", KILL)], Starter(0), "b3"),
        # Its record's time counts, not the end of its process.
        ([died(2.0, "a0", 14), recorded(1.0, "b3", end_time=6.0)], NOBODY, "b3"),
        ([died(2.0, "a0", 14), recorded(1.0, "b3", end_time=math.inf)], NOBODY, "b3"),
        # Observation at one look: the starter knows which was the first.
        ([died(1.0, "a0", 14), died(1.0, "a1", 137)], Starter(1), "a1"),
        # SIGTERM that no starter had a reason for: on its host nothing had failed before.
        ([terminated(1.0, "a0"), died(1.2, "a1", 17)], NOBODY, "a0"),
        # Handlers of their own.
        (
            [terminated(1.0, "a0", 9), terminated(1.2, "a1", 15)],
            TORCHRUN,
            "a0",
        ),
        ([peer(1.0, "a0"), terminated(1.2, "a1", 9)], TORCHRUN, "a0"),
        ([terminated(1.0, "a0"), peer(1.1, "b1", end_time=1.3)], TORCHRUN, "a0"),
        ([peer(0.9, "a1", end_time=1.3), terminated(1.0, "a0", KILL)], TORCHRUN, "a0"),
        # Torchrun's comes after 30 s.
        (
            [peer(1.0, "a1", end_time=1.1), terminated(9.0, "a0", KILL)],
            TORCHRUN,
            "a0",
        ),
        # Two ends by SIGTERM on two hosts have no known order: a starter of all hosts tells which
        # came first.
        ([terminated(1.0, "a0"), terminated(1.1, "b3")], MPIRUN._replace(rank=3), "b3"),
        ([terminated(1.0, "b3"), recorded(1.1, "a0", 15)], MPIRUN._replace(rank=3), "b3"),
        # A rank whose status its starter took, and tells.
        ([died(2.0, "a0", 14), unseen(1.0, "b3")], Starter(3), "b3"),
        ([died(2.0, "a0", 14), unseen(1.0, "b3")], NOBODY, "a0"),
        # Row 2: a rank that had left, where others missed it.
        ([left(1.0, "a3"), peer(2.0, "a2")], NOBODY, "a3"),
        ([left(1.5, "a3"), left(1.0, "a1"), peer(2.0, "a2")], NOBODY, "a1"),
        ([left(1.0, "a3"), waited(2.0, "a2")], NOBODY, "a3"),
        # Nothing had told the rank to end yet.
        (
            [left(2.5, "a3"), peer(2.0, "a2", end_time=3.0)],
            NOBODY,
            "a3",
        ),
        ([left(9.0, "a3"), peer(2.0, "a2", end_time=3.0)], NOBODY, "a2"),  # a handler of SIGTERM
        ([left(1.0, "a3"), recorded(2.0, "a2")], NOBODY, "a2"),
        ([left(1.0, "a3"), recorded(1.5, "a1"), peer(2.0, "a2")], NOBODY, "a1"),
        ([unseen(1.0, "a3"), peer(2.0, "a2")], NOBODY, "a3"),
        ([unseen(2.5, "a3"), peer(2.0, "a2")], NOBODY, "a2"),  # perhaps ended by the starter
        # Row 3: evidence that blames another process never beats an own failure, however much
        # earlier it was.
        ([peer(1.0, "a0"), recorded(9.0, "b3")], NOBODY, "b3"),
        ([peer(1.0, "a0"), died(9.0, "b3", 139)], NOBODY, "b3"),
        ([peer(2.0, "a0"), peer(1.0, "b3")], NOBODY, "b3"),
        ([peer(1.0, "a0")], Starter(3), "a0"),
        # mpirun ends a job for a rank that ended early: a failure from before that end counts.
        ([died(1.0, "a0", 17), left(2.0, "b3")], MPIRUN._replace(rank=3, ended_early=True), "a0"),
        # Row 5: told to end, after another rank had failed.
        ([peer(1.0, "a0"), terminated(1.2, "a1")], TORCHRUN, "a0"),
        ([peer(1.0, "a0"), terminated(1.2, "a1")], TORCHRUN._replace(rank=1), "a0"),
        ([recorded(1.0, "a0", end_time=1.1), terminated(1.1, "a1")], TORCHRUN, "a0"),
        # Observation a little later, on another host.
        (
            [terminated(1.0, "a0"), died(1.2, "b3", 17)],
            NOBODY,
            "b3",
        ),
        ([peer(1.0, "a0"), terminated(31.5, "a1", KILL)], TORCHRUN, "a0"),
        ([peer(1.0, "a0"), terminated(2.5, "b1", KILL)], MPIRUN, "a0"),
        ([terminated(1.0, "a0"), peer(2.0, "b3")], Starter(ended_itself=True), "b3"),
    ],
)
def test_the_first_failure_is_what_the_strongest_evidence_says(
    suspects: Sequence[Suspect], starter: Starter, place: str
) -> None:
    for ordered in (suspects, suspects[::-1]):
        failure = first_failure(ordered, starter)
        assert failure is not None
        assert f"{failure.cause.outcome.host}{failure.cause.outcome.rank}" == place


@pytest.mark.parametrize(
    ("suspects", "starter"),
    [
        ([], NOBODY),
        ([left(1.0, "a0"), left(2.0, "b3")], NOBODY),
        ([unseen(1.0, "a0")], Starter(3)),
        ([terminated(1.0, "a0"), terminated(1.0, "a1")], Starter(ended_itself=True)),
        (
            [left(1.0, "b3"), terminated(0.9, "a0"), died(2.0, "a1", 14)],
            MPIRUN._replace(rank=3, ended_early=True),
        ),
    ],
)
def test_row_4_the_command_and_its_report_count_where_no_host_has_seen_a_failure(
    suspects: Sequence[Suspect], starter: Starter
) -> None:
    assert first_failure(suspects, starter) is None


def test_a_rank_that_had_left_is_told_with_the_failure_that_missed_it() -> None:
    failure = first_failure([left(1.0, "a3"), peer(2.0, "b2")])
    assert failure is not None
    assert (failure.cause.outcome.rank, failure.failed.outcome.rank) == (3, 2)


@pytest.mark.parametrize(
    ("process", "kind"),
    [
        (Observation(1, noted=1), Kind.RECORDED),
        (Observation(None, noted=1, left=True), Kind.RECORDED),
        (Observation(-15, noted=3, left=True), Kind.RECORDED),
        (Observation(1, noted=1, blames=True), Kind.PEER),
        (Observation(-6, blames=True), Kind.PEER),
        (Observation(0), Kind.LEFT),
        (Observation(0, noted=0, left=True), Kind.LEFT),
        (Observation(None, left=True), Kind.LEFT),
        (Observation(-15, left=True), Kind.LEFT),
        (Observation(-15, noted=0, left=True), Kind.LEFT),
        (Observation(-15), Kind.TERMINATED),
        (Observation(9, noted=9, of_sigterm=True), Kind.TERMINATED),
        (Observation(0, noted=0, of_sigterm=True), Kind.LEFT),
        (Observation(143), Kind.TERMINATED),
        (Observation(-9), Kind.TERMINATED),
        (Observation(-9, of_memory=True), Kind.DIED),
        (Observation(-11), Kind.DIED),
        (Observation(17), Kind.DIED),
        (Observation(None), None),
    ],
)
def test_what_a_host_sees_of_a_process_is_one_kind_of_evidence(
    process: Observation, kind: Kind | None
) -> None:
    assert kind_of(process) is kind


PEERS_OWN = "while handling ValueError: label 17"


@pytest.mark.parametrize(
    ("record", "code", "expected"),
    [
        (Record(7, 1.0, 2.0, "ValueError: label 17\n"), 1, Observation(1, noted=1)),
        (Record(7, 1.0, 2.0, "ValueError: label 17\n"), -15, Observation(-15, noted=1)),
        (Record(7, 1.0, 2.0, f"{BROKEN}\n"), 1, Observation(1, noted=1, blames=True)),
        (Record(7, 1.0, 2.0, f"{PEER_ERROR}\n"), 1, Observation(1, noted=1, blames=True)),
        (
            Record(7, 1.0, 2.0, "OSError: not saved\n", origin=f"while handling {PEER_ERROR}"),
            1,
            Observation(1, 1, blames=True),
        ),
        (Record(7, 1.0, 2.0, f"{PEER_ERROR}\n", origin=PEERS_OWN), 1, Observation(1, noted=1)),
        (
            Record(7, 1.0, 2.0, "OSError: not saved\n", origin=f"while handling {BROKEN}"),
            1,
            Observation(1, 1, blames=True),
        ),
        (
            Record(7, 1.0, 2.0, "RuntimeError: failed\n", origin=f"caused by {BROKEN}"),
            1,
            Observation(1, 1, blames=True),
        ),
        # The rank left its peers for a reason of its own, and missed them then.
        (Record(7, 1.0, 2.0, f"{BROKEN}\n", origin=PEERS_OWN), 1, Observation(1, noted=1)),
        (Record(7, 1.0, 2.0, left=True, exit_status=3), -15, Observation(-15, noted=3, left=True)),
        (
            Record(7, 1.0, 2.0, left=True, exit_status=1, exit_message=BROKEN),
            1,
            Observation(1, 1, left=True, blames=True),
        ),
        (Record(7, 1.0, 2.0, left=True), None, Observation(None, left=True)),
        (
            Record(7, 1.0, 2.0, left=True),
            3,
            Observation(3, noted=3, left=True),
        ),  # raise SystemExit(3)
        (Record(7, 1.0, 2.0, "KeyboardInterrupt"), -15, Observation(-15, noted=130)),
        (
            Record(7, 1.0, 2.0, "KeyError: 1", of_sigterm=True),
            1,
            Observation(1, noted=1, of_sigterm=True),
        ),
        (None, -6, Observation(-6)),
    ],
)
def test_a_record_is_what_is_known_of_a_process(
    record: Record | None, code: int | None, expected: Observation
) -> None:
    records = [record] if record is not None else []
    process_end = ProcessEnd(b"", b"", records, 7, 9.0)
    assert observe(process_end, code) == expected
    assert began_at(process_end, code) == (9.0 if record is None or record.of_sigterm else 2.0)


def test_a_crash_in_the_exit_handlers_has_the_time_of_the_crash() -> None:
    process_end = ProcessEnd(b"", b"", [Record(7, 1.0, 2.0, left=True)], 7, 9.0)
    assert (kind_of(observe(process_end, -11)), began_at(process_end, -11)) == (Kind.DIED, 9.0)
    assert (kind_of(observe(process_end, -15)), began_at(process_end, -15)) == (Kind.LEFT, 2.0)


@pytest.mark.parametrize(
    ("printed", "blames"),
    [
        (
            "terminate called after throwing an instance of 'gloo::IoException'\n  what():  "
            + BROKEN,
            True,
        ),
        ("Connection closed by peer: trying again\nterminate called\n  what():  bad_alloc", False),
        ("Connection closed by peer: trying again", False),
    ],
)
def test_what_a_program_of_cpp_aborts_for_is_what_its_runtime_prints(
    printed: str, *, blames: bool
) -> None:
    assert (
        observe(ProcessEnd(printed.encode(), pid=7, ended_at=9.0), -signal.SIGABRT).blames is blames
    )


@pytest.mark.parametrize(
    ("record", "code", "status"),
    [
        (Record(7, message="ValueError: x"), -15, 1),
        (Record(7, message="ValueError: x"), -9, 1),
        (Record(7, message="ValueError: x"), None, 1),
        (Record(7, message="ValueError: x"), 5, 5),  # os._exit(5) in an exit handler
        (Record(7, message="KeyboardInterrupt"), -2, -2),
        (Record(7, message="KeyError: 1", guessed=True), -15, -15),
        (Record(7, left=True, exit_status=3), -15, 3),
        (Record(7, left=True), -15, -15),
        (None, -15, -15),
    ],
)
def test_a_record_of_the_end_outlives_a_signal(
    record: Record | None, code: int | None, status: int
) -> None:
    records = [record] if record is not None else []
    process_end = ProcessEnd(b"", b"", records, 7)
    assert status_of(process_end, code) == status


def test_a_failure_whose_record_outlives_a_signal_says_both() -> None:
    process_end = ProcessEnd(
        b"",
        b"",
        [Record(7, 1.0, 2.0, left=True, exit_status=1, exit_message="no licence\nfor X")],
        7,
    )
    failure = failure_of(ProgramPlace("x.py", "a", "mpi", 1), -15, process_end)
    assert (failure.status, failure.retry) == (1, False)
    assert failure.text.splitlines()[:2] == [
        "no licence",
        "x.py on host a, rank 1 (mode mpi): exit status 1, noted before killed by SIGTERM",
    ]


def test_the_own_exception_leads_where_a_peer_was_missed_while_it_was_handled() -> None:
    process_end = ProcessEnd(b"", b"", [Record(7, 1.0, 2.0, f"{BROKEN}\n", origin=PEERS_OWN)], 7)
    failure = failure_of(ProgramPlace("x.py", "a", "mpi", 1), 1, process_end)
    assert failure.cause == f"ValueError: label 17 (and then {BROKEN})"


# In the order in which ``reason_of`` looks.
OWN = Record(7, 1.0, 20.0, "ValueError: own")
CHILD = Record(9, 2.0, 18.0, "KeyError: 'of a child'")
LOST_CHILD = Record(
    7, 1.0, 20.0, "subprocess.CalledProcessError: Command '['x']' returned non-zero exit status 1."
)
ENDED = Record(7, 1.0, 20.0)


@pytest.mark.parametrize(
    ("records", "code", "died_of", "line", "earlier"),
    [
        ([CHILD, OWN], 1, OWN, "", ""),
        ([CHILD, LOST_CHILD], 1, CHILD, "", ""),
        ([CHILD], 1, CHILD, "", ""),
        ([CHILD._replace(at=2.0)], 1, None, "", "KeyError: 'of a child'"),
        ([CHILD], -6, None, "", "KeyError: 'of a child'"),
        (
            [CHILD, ENDED._replace(exit_status=1, exit_message="the set is empty")],
            1,
            None,
            "the set is empty",
            CHILD.cause,
        ),
        ([CHILD, ENDED], 2, None, "printed last", "KeyError: 'of a child'"),
        ([ENDED], 3, None, "", ""),
        ([OWN._replace(guessed=True)], 4, None, "", "ValueError: own"),
        ([], 1, None, "", ""),
    ],
)
def test_why_one_process_ended(
    records: Sequence[Record], code: int, died_of: Record | None, line: str, earlier: str
) -> None:
    reason = reason_of(ProcessEnd(b"", b"printed last\n", records, 7, 20.5), code)
    assert (reason.exception, reason.line, reason.earlier) == (died_of, line, earlier)


@pytest.mark.parametrize(
    ("exception", "expected"),
    [
        (
            (
                "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer"
                " [10.77.0.2]:3012"
            ),
            True,
        ),
        (
            (
                "RuntimeError: [../gloo/transport/tcp/pair.cc:547] Read error [10.77.0.2]:30:"
                " Connection reset by peer"
            ),
            True,
        ),
        (
            (
                "DistBackendError: NCCL error\n"
                "ncclRemoteError: possibly due to a remote process exiting prematurely."
            ),
            True,
        ),
        ("torch.distributed.DistBackendError: NCCL communicator was aborted on rank 1.", True),
        (
            (
                "torch.distributed.DistNetworkError:"
                " Connection was likely closed. Did the remote server crash?"
            ),
            True,
        ),
        ("BrokenPipeError: [Errno 32] Broken pipe", True),
        ("ValueError: shapes differ", False),
        (PEER_ERROR, True),
        (f"caused by {PEER_ERROR}", True),
        (f"RuntimeError: failed (caused by {PEER_ERROR})", True),
        # The own exception, while which was handled smp told of another rank.
        (f"KeyError: 'x' (and then {PEER_ERROR})", False),
        # The type counts, and no word of a message.
        (f"ValueError: not a {PEER_ERROR}", False),
        ("PeerError: rank 0 (pp_rank 0) failed: ValueError: shapes differ", False),
        ("smdistributed.modelparallel.torch.exceptions.StepError: shapes differ", False),
    ],
)
def test_an_exception_about_another_process_names_no_cause_of_its_own(
    exception: str, *, expected: bool
) -> None:
    assert blames_a_peer(exception) is expected


def test_smp_has_the_exception_that_blames_a_peer_under_this_name() -> None:
    module, _, name = PEER_ERROR.partition(":")[0].rpartition(".")
    path = LAUNCHER.parent / "smdistributed" / f"{module.replace('.', '/')}.py"
    assert f"\nclass {name}(" in path.read_text(encoding="utf-8")


def test_what_is_known_of_a_rank_is_of_the_process_that_had_it_last() -> None:
    suspects = [recorded(1.0, "a2"), recorded(3.0, "b2"), recorded(2.0, "b1")]
    suspect = suspect_of(suspects, 2)
    assert suspect is not None
    assert suspect.outcome.host == "b"
    assert suspect_of(suspects, 7) is None
