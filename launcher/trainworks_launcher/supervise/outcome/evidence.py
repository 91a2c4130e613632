"""Which rank failed first, by what the hosts have seen: one table of evidence, the strongest first.

Pure.

===  ===============================================  =============================================
row  what a host has seen of a rank                   why it stands there
===  ===============================================  =============================================
1    RECORDED: its Python noted an exception that     The failure tells of itself, at its source,
     blames no other process, or the status that      and when.
     ``sys.exit`` was told
1    DIED: it ended by itself, with a status or a     The kernel tells of it. With a record or
     signal that no starter sends, and noted nothing  without: the one that came first counts.
1    TERMINATED, and no rank had failed before:       No starter had a reason yet: another program
     SIGTERM, the program's own handler of that, or   sent it. So it is a failure like the others
     SIGKILL ended it                                 of this row.
1    UNSEEN, and its starter names it: its status     The end is the host's own observation; the
     was taken before this host could look            starter adds the status. Only older kernels
                                                      have this row.
2    LEFT: its program came to its end, or ended      The others missed it. It counts only where a
     with status 0, before a failure that is only     failure of row 3, or a wait that took too
     about other processes                            long, came later.
3    PEER: its exception, or what its C++ runtime     The effect of another failure, which may be
     printed, says that the connection to another     on another host: it never beats that one.
     process broke
4    the end of the command, and the rank that the    Another program's word, which sees ends later
     starter's report names, also as one that ended   than the hosts do: it decides where no host
     with status 0                                    saw a failure.
5    TERMINATED, after another rank had failed        Its starter told it to end. It never is the
                                                      cause.
===  ===============================================  =============================================

In one row the earliest counts, by its own record's time wherever there is one. ``kind_of`` finds
the kind of one rank where its host is, and ``first_failure`` goes down the table where all of them
are known. A host that is lost is not a rank: row 3 gives way to it (``control.exit_aggregation``),
and it gives way to nothing.
"""

from __future__ import annotations

import math
import re
import signal
from enum import Enum
from typing import NamedTuple, Sequence

from trainworks_launcher.supervise.outcome.outcome import FAILED, Outcome, exit_status, signal_of


class Kind(Enum):
    """What a host has seen of a rank. The value is the word on the control channel."""

    RECORDED = "recorded"
    DIED = "died"
    TERMINATED = "terminated"
    UNSEEN = "unseen"
    LEFT = "left"
    PEER = "peer"


class Seen(NamedTuple):
    """What is known of one process when its host looks.

    Attributes:
        returncode: How it ended, negative after a signal; None if it runs, or
            if the status is not known.
        noted: Status that its own record means: 1 for an exception, else what ``sys.exit`` was
            told; None for neither.
        left: Its record says that it had left its program.
        blames: What it died of is about another process.
        of_memory: The kernel killed it for lack of memory.
        of_sigterm: Its own handler of SIGTERM ended it.
    """

    returncode: int | None = None
    noted: int | None = None
    left: bool = False
    blames: bool = False
    of_memory: bool = False
    of_sigterm: bool = False


class Suspect(NamedTuple):
    """A rank that failed or ended, as its host tells the others.

    Attributes:
        kind: What its host has seen.
        at: When the trouble began: the time of its record, else that of its end. Seconds of the
            reader's own monotonic clock, as ``ended_at``.
        ended_at: When its process ended, which is what a starter sees; ``math.inf`` while it runs.
        outcome: Host, rank, status (0: not known), cause and text.
    """

    kind: Kind
    at: float
    ended_at: float
    outcome: Outcome


class Starter(NamedTuple):
    """What is known from the one who started the ranks.

    Attributes:
        rank: The rank that it names as the first to fail; -1 if it names none.
        sees_all_hosts: Its ranks are those of all hosts (mpirun); each torchrun
            knows those of its own host.
        kill_seconds: How long it waits after SIGTERM before it sends SIGKILL.
        ended_itself: It ended without naming a rank: somebody ended it, and it has ended its ranks.
        ended_early: The rank that it names had ended with status 0, and it has
            ended the others for that (mpirun).
    """

    rank: int = -1
    sees_all_hosts: bool = False
    kill_seconds: float = 0.0
    ended_itself: bool = False
    ended_early: bool = False


class First(NamedTuple):
    """What ended a job.

    Attributes:
        cause: What came first.
        failed: The failure that shows it: ``cause`` itself, or, where that is a rank that had left,
            the one that missed it.
    """

    cause: Suspect
    failed: Suspect


KILL_SECONDS = {"torchrun": 30.0, "mpirun": 1.0}
"""Seconds from SIGTERM to SIGKILL. Source: torch/distributed/elastic/multiprocessing/api.py,
PContext.close; Open MPI's parameter odls_base_sigkill_timeout.
"""


def kind_of(seen: Seen) -> Kind | None:
    """Return the kind of evidence that one rank is.

    None if nothing says that it failed or ended.
    """
    if seen.of_sigterm and seen.noted:
        return Kind.TERMINATED
    if seen.blames:
        return Kind.PEER
    if seen.noted is not None:
        return Kind.RECORDED if seen.noted else Kind.LEFT
    if seen.returncode == 0:
        return Kind.LEFT
    if seen.returncode is None:
        return Kind.LEFT if seen.left else None
    if signal_of(seen.returncode) not in (signal.SIGTERM, signal.SIGKILL) or seen.of_memory:
        return Kind.DIED
    return Kind.LEFT if seen.left else Kind.TERMINATED


def first_failure(suspects: Sequence[Suspect], starter: Starter = Starter()) -> First | None:  # noqa: B008  (a constant)
    """Return what came first by the table.

    None if no host has seen a failure that counts: then row 4 does.
    """
    early = suspect_of(suspects, starter.rank) if starter.ended_early else None
    if early is not None:
        # Failures that came later are the effect of that end.
        suspects = [row for row in suspects if row.at < early.at]
    blamed = [row for row in suspects if row.kind in (Kind.RECORDED, Kind.DIED, Kind.PEER)]
    # Row 1.
    own = [row for row in suspects if row.kind in (Kind.RECORDED, Kind.DIED)]
    own += [row for row in suspects if row.kind is Kind.UNSEEN and _is_named(row, starter)]
    unprovoked = [
        row
        for row in suspects
        if row.kind is Kind.TERMINATED and not _was_told(row, blamed, starter)
    ]
    failed = _earliest([*own, *unprovoked], starter)
    if failed is not None and failed.kind is Kind.TERMINATED:
        # Which of several ends by SIGTERM was the first, no host can say of another host's.
        failed = next((row for row in unprovoked if _is_named(row, starter)), failed)
    # Row 3, because row 2 is about a failure that is there.
    failed = failed or _earliest([row for row in suspects if row.kind is Kind.PEER], starter)
    if failed is None:
        return None
    # Row 2.
    return First(left_before(failed, suspects) or failed, failed)


def left_before(failed: Suspect, suspects: Sequence[Suspect]) -> Suspect | None:
    """Return the rank that had left before a failure that is about other processes (row 2).

    None for none.

    A rank that ends well after that failure was told to end, and has a handler of SIGTERM. One
    whose status is not known has ended well if it ended before, and printed no error: starters
    report the first rank that fails.
    """
    if failed.kind is not Kind.PEER and not has_waited(failed.outcome):
        return None
    others = [row for row in suspects if not _is_of_one_rank(row, failed)]
    left = [row for row in others if row.kind is Kind.LEFT and row.at <= failed.ended_at]
    left += [
        row for row in others if row.kind is Kind.UNSEEN and _is_silent(row) and row.at <= failed.at
    ]
    return min(left, key=lambda row: row.at, default=None)


def _was_told(ended: Suspect, failures: Sequence[Suspect], starter: Starter) -> bool:
    """Return whether a rank that SIGTERM or SIGKILL ended was told to end by its starter (row 5).

    A starter acts on the end of a process: so some rank had failed, and its process had ended,
    before this one did. It sends SIGTERM first, and SIGKILL to what does not end. Which of the ends
    on two hosts came first is not certain: an own failure on another host is believed, unless a
    starter of all hosts names this rank.

    Args:
        ended: The rank.
        failures: What its starter may have had a reason in.
        starter: What is known from the starter.
    """
    by_sigterm = ended.outcome.status != exit_status(-signal.SIGKILL)
    if by_sigterm and (starter.ended_itself or starter.ended_early):
        return True
    patience = 0.0 if by_sigterm else starter.kill_seconds
    for other in failures:
        elsewhere = other.outcome.host != ended.outcome.host
        if elsewhere and starter.sees_all_hosts and _is_named(ended, starter):
            continue
        if other.ended_at + patience <= ended.at:
            return True
        if elsewhere and by_sigterm and other.kind is not Kind.PEER:
            return True
    return False


def _earliest(suspects: Sequence[Suspect], starter: Starter) -> Suspect | None:
    """Return the first in time.

    Of those that were seen at one look the one that the starter names.
    """
    return min(suspects, key=lambda row: (row.at, not _is_named(row, starter)), default=None)


def _is_named(row: Suspect, starter: Starter) -> bool:
    return row.outcome.rank == starter.rank >= 0


def _is_of_one_rank(row: Suspect, other: Suspect) -> bool:
    return (row.outcome.host, row.outcome.rank) == (other.outcome.host, other.outcome.rank)


def _is_silent(row: Suspect) -> bool:
    return not (row.outcome.memory or row.outcome.cause)


def suspect_of(suspects: Sequence[Suspect], rank: int) -> Suspect | None:
    """Return what is known of a rank: of the process that had it last."""
    return next((row for row in reversed(suspects) if row.outcome.rank == rank), None)


# --- of other ranks -------------------------------------------------------------------------------
_PEER_LEFT = re.compile(
    r"Connection (reset|closed|was likely closed)|Broken"
    r" pipe|remote process exit|communicator was aborted",
    re.IGNORECASE,
)
_PEER_WAITED_FOR = re.compile(r"timed? ?out|timeout", re.IGNORECASE)


def blames_a_peer(words: str) -> bool:
    """Return whether an exception is a broken connection: mostly another process ended before it.

    The words are those of the kernel, of Gloo ("Connection closed by peer"), of NCCL ("a remote
    process exiting prematurely", "communicator was aborted") and of PyTorch's TCPStore ("Connection
    was likely closed").
    """
    return _PEER_LEFT.search(words) is not None


def tells_of_a_peer(failure: Outcome) -> bool:
    """Return whether a failure is only that another process has gone.

    NCCL says so further down in its message.
    """
    return blames_a_peer(failure.text if "NCCL" in failure.cause else failure.cause)


def has_waited(failure: Outcome) -> bool:
    """Return whether a failure is a wait that took too long, perhaps for another process."""
    return _PEER_WAITED_FOR.search(failure.cause) is not None


def of_command(outcome: Outcome) -> Suspect:
    """Return the failure of a host's command as evidence that any host's own
    observation beats (row 4).
    """
    kind = Kind.PEER if tells_of_a_peer(outcome) else Kind.DIED
    return Suspect(kind, math.inf, math.inf, outcome._replace(kind=FAILED))
