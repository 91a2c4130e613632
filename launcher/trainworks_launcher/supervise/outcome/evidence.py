"""Find the rank that failed first: one table of evidence from all hosts, the strongest first. Pure.

===  ===============================================  =============================================
row  evidence about a rank                            reason of the order
===  ===============================================  =============================================
1    RECORDED: its Python noted an exception that     The failure describes itself, at its source,
     blames no other process, or the status that      with its time.
     ``sys.exit`` was given
1    DIED: the rank ended by itself, with a status    The kernel reports the end. With a record or
     or a signal that no starter sends, and noted     without: the one that came first counts.
     nothing
1    TERMINATED, and no rank had failed before:       No starter had a reason yet: another program
     SIGTERM, the program's own handler of SIGTERM,   sent the signal. So the end is a failure like
     or SIGKILL ended the rank                        the others of this row.
1    UNSEEN, and the starter names the rank: its      The end is the host's own observation; the
     status was read before this host could read it   starter adds the status. Only older kernels
                                                      have this row.
2    LEFT: its program came to its end, or ended      The others missed this rank. The row counts
     with status 0, before a failure that is only     only if a failure of row 3, or a timeout,
     about other processes                            came later.
3    PEER: its exception, or the output of its C++    The effect of another failure, which may be
     runtime, tells that the connection to another    on another host, and always counts before
     process broke; or it is a PeerError of smp       this row.
4    the end of the command, and the rank in the      The report of another program, which sees
     starter's report, also a rank that ended with    ends later than the hosts do. The row decides
     status 0                                         if no host saw a failure.
5    TERMINATED, after another rank had failed        The starter told the rank to end. Such an end
                                                      is never the cause.
===  ===============================================  =============================================

In one row the earliest counts, by the time of its own record wherever there is one. ``kind_of``
finds the kind of one rank, on the rank's host. ``first_failure`` goes down the table with the
evidence of all hosts. A lost host is not a rank: row 3 gives way to a lost host
(``control.exit_aggregation``), and a lost host gives way to no row.
"""

from __future__ import annotations

import math
import re
import signal
from enum import Enum
from typing import NamedTuple, Sequence

from trainworks_launcher.supervise.outcome.outcome import FAILED, Outcome, exit_status, signal_of


class Kind(Enum):
    """The kind of evidence about a rank. The value is the word on the control channel."""

    RECORDED = "recorded"
    DIED = "died"
    TERMINATED = "terminated"
    UNSEEN = "unseen"
    LEFT = "left"
    PEER = "peer"


EFFECTS = (Kind.TERMINATED, Kind.PEER, Kind.UNSEEN)
"""Kinds of evidence about a rank that mostly has not failed by itself.

torchrun ends every rank with SIGTERM after the failure of one; a rank reports the end of a peer.
"""


class Observation(NamedTuple):
    """The state of one process, as its host observes it.

    Attributes:
        returncode: Negative after a signal; None if the process runs, or if its status is not
            known.
        noted: Status by the process's own record: 1 for an exception, else the status that was
            given to ``sys.exit``; None for neither.
        left: The record shows that the process had left its program.
        blames: The exception is about another process.
        of_memory: The kernel killed the process for lack of memory.
        of_sigterm: The process's own handler of SIGTERM ended it.
    """

    returncode: int | None = None
    noted: int | None = None
    left: bool = False
    blames: bool = False
    of_memory: bool = False
    of_sigterm: bool = False


class Suspect(NamedTuple):
    """Evidence about a rank that failed or ended, as its host sends it to the others.

    Attributes:
        kind: Kind of the evidence.
        at: Begin of the trouble: the time of the rank's record, else that of its end. Seconds of
            the reader's own monotonic clock, as ``ended_at``.
        ended_at: End of its process, which is the event that a starter sees; ``math.inf`` while
            the process runs.
        outcome: Host, rank, status (0: not known), cause and text.
        restarts: Number of restarts that the rank's host had seen when the rank started.
    """

    kind: Kind
    at: float
    ended_at: float
    outcome: Outcome
    restarts: int = 0


class Starter(NamedTuple):
    """Evidence from the starter of the ranks.

    Attributes:
        rank: The rank that it names as the first to fail; -1 if it names none.
        sees_all_hosts: Whether its ranks are those of all hosts (mpirun). A torchrun knows only
            the ranks of its own host.
        kill_seconds: Seconds from its SIGTERM to its SIGKILL.
        ended_itself: The starter ended without naming a rank: it was told to end, and has ended
            its ranks.
        ended_early: The rank that it names had ended with status 0, and the starter has ended
            the others for that (mpirun).
    """

    rank: int = -1
    sees_all_hosts: bool = False
    kill_seconds: float = 0.0
    ended_itself: bool = False
    ended_early: bool = False


class First(NamedTuple):
    """The first failure of a job.

    Attributes:
        cause: The evidence that came first.
        failed: The failure that shows the cause: ``cause`` itself or, if that is a rank that had
            left, the failure of the rank that missed it.
    """

    cause: Suspect
    failed: Suspect


class KnownFailure(NamedTuple):
    """The first failure of an attempt, as far as a host knows it.

    Attributes:
        outcome: The failure.
        is_effect: Whether its evidence is one of ``EFFECTS``: it may be the effect of a failure
            that this host does not know yet.
    """

    outcome: Outcome
    is_effect: bool


KILL_SECONDS = {"torchrun": 30.0, "mpirun": 1.0}
"""Seconds from SIGTERM to SIGKILL. Source: torch/distributed/elastic/multiprocessing/api.py,
PContext.close; Open MPI's parameter odls_base_sigkill_timeout.
"""


def kind_of(observation: Observation) -> Kind | None:
    """Return the kind of evidence that one process is.

    None if the process neither failed nor ended, as far as its host knows.
    """
    # What the process itself has noted comes before its status, which exit handlers may change.
    if observation.of_sigterm and observation.noted:
        return Kind.TERMINATED
    if observation.blames:
        return Kind.PEER
    if observation.noted is not None:
        return Kind.RECORDED if observation.noted else Kind.LEFT
    if observation.returncode == 0:
        return Kind.LEFT
    if observation.returncode is None:
        return Kind.LEFT if observation.left else None
    number = signal_of(observation.returncode)
    # Starters send these two signals, and so may other programs.
    if number not in (signal.SIGTERM, signal.SIGKILL) or observation.of_memory:
        return Kind.DIED
    return Kind.LEFT if observation.left else Kind.TERMINATED


def first_failure(suspects: Sequence[Suspect], starter: Starter = Starter()) -> First | None:  # noqa: B008  (a constant)
    """Return the first failure by the table.

    Args:
        suspects: The evidence of all hosts.
        starter: The evidence of the starter.

    Returns:
        The first failure, with the rank that had left before it as its cause, if there is one
        (row 2). None if no host has evidence of a failure (rows 1 to 3): row 4 decides then.
    """
    if starter.ended_early:
        early = suspect_of(suspects, starter.rank)
        if early is not None:
            # Failures that came later are the effect of that end.
            suspects = [row for row in suspects if row.at < early.at]
    # Row 1: failures of the rank itself, and ends by a signal that no starter had a reason to send.
    own = [row for row in suspects if row.kind in (Kind.RECORDED, Kind.DIED)]
    own += [row for row in suspects if row.kind is Kind.UNSEEN and _is_named(row, starter)]
    blamed = [row for row in suspects if row.kind in (Kind.RECORDED, Kind.DIED, Kind.PEER)]
    terminated = [row for row in suspects if row.kind is Kind.TERMINATED]
    unprovoked = [row for row in terminated if not _was_told_to_end(row, blamed, starter)]
    failed = _earliest([*own, *unprovoked], starter)
    if failed is not None and failed.kind is Kind.TERMINATED:
        # The hosts cannot tell which of several ends by SIGTERM was the first; the starter can.
        for row in unprovoked:
            if _is_named(row, starter):
                failed = row
                break
    if failed is None:
        # Row 3, before row 2, because row 2 needs a failure.
        failed = _earliest([row for row in suspects if row.kind is Kind.PEER], starter)
    if failed is None:
        return None
    # Row 2.
    return First(find_left_rank(failed, suspects) or failed, failed)


def find_left_rank(failed: Suspect, suspects: Sequence[Suspect]) -> Suspect | None:
    """Return the rank that had left before a failure that is about other processes (row 2).

    A rank that ends with status 0 after the failure was told to end, and has a handler of
    SIGTERM. A rank with an unknown status counts as one that left if it ended before the failure
    and printed no error: starters report the first rank that fails.

    Returns:
        The rank that left first; None for none.
    """
    if failed.kind is not Kind.PEER and not has_waited(failed.outcome):
        return None
    others = [row for row in suspects if not _is_of_one_rank(row, failed)]
    left = [row for row in others if row.kind is Kind.LEFT and row.at <= failed.ended_at]
    unseen = [row for row in others if row.kind is Kind.UNSEEN and row.at <= failed.at]
    left += [row for row in unseen if _is_silent(row)]
    return min(left, key=lambda row: row.at, default=None)


def _was_told_to_end(ended: Suspect, failures: Sequence[Suspect], starter: Starter) -> bool:
    """Return whether a rank that SIGTERM or SIGKILL ended was told to end by its starter (row 5).

    A starter acts on the end of a process: another rank had failed, and its process had ended,
    before this rank did. The starter sends SIGTERM first, and later SIGKILL to processes that
    still run. The order of ends on two hosts is not certain: a failure of its own on another host
    counts as earlier, unless a starter of all hosts names this rank.

    Args:
        ended: The rank.
        failures: Failures to which its starter may have reacted.
        starter: Evidence from the starter.
    """
    by_sigterm = ended.outcome.status != exit_status(-signal.SIGKILL)
    if by_sigterm and (starter.ended_itself or starter.ended_early):
        return True
    # Seconds from the failure to the starter's signal.
    delay = 0.0 if by_sigterm else starter.kill_seconds
    for other in failures:
        is_of_other_host = other.outcome.host != ended.outcome.host
        if is_of_other_host and starter.sees_all_hosts and _is_named(ended, starter):
            continue
        if other.ended_at + delay <= ended.at:
            return True
        if is_of_other_host and by_sigterm and other.kind is not Kind.PEER:
            return True
    return False


def _earliest(suspects: Sequence[Suspect], starter: Starter) -> Suspect | None:
    """Return the earliest evidence; of several with one time that which the starter names.

    None for no evidence.
    """
    return min(suspects, key=lambda row: (row.at, not _is_named(row, starter)), default=None)


def _is_named(row: Suspect, starter: Starter) -> bool:
    """Return whether the starter names this rank as the first to fail."""
    return starter.rank >= 0 and row.outcome.rank == starter.rank


def _is_of_one_rank(row: Suspect, other: Suspect) -> bool:
    """Return whether two pieces of evidence are about one rank of one host."""
    return (row.outcome.host, row.outcome.rank) == (other.outcome.host, other.outcome.rank)


def _is_silent(row: Suspect) -> bool:
    """Return whether a rank ended without a cause."""
    return not (row.outcome.memory or row.outcome.cause)


def suspect_of(suspects: Sequence[Suspect], rank: int) -> Suspect | None:
    """Return the evidence about the last process with this rank; None without evidence."""
    for row in reversed(suspects):
        if row.outcome.rank == rank:
            return row
    return None


# --- of other ranks -------------------------------------------------------------------------------
_PEER_LEFT = re.compile(
    r"Connection (reset|closed|was likely closed)|Broken"
    r" pipe|remote process exit|communicator was aborted",
    re.IGNORECASE,
)
_PEER_ERROR = re.compile(
    r"(?m)(?:^\s*|caused by |while handling )"
    r"smdistributed\.modelparallel\.torch\.exceptions\.PeerError\b"
)
"""The type of an exception, where a record or a line of Python has it. smp raises this type on
every rank that is not the one that failed, and only there.
"""

_TIMEOUT = re.compile(r"timed? ?out|timeout", re.IGNORECASE)


def blames_a_peer(words: str) -> bool:
    """Return whether an exception reports the failure of another process.

    It does if it is a PeerError of smp, or if it reports a broken connection, mostly to a process
    that has ended. The words are of the kernel, of Gloo ("Connection closed by peer"), of NCCL ("a
    remote process exiting prematurely", "communicator was aborted") and of PyTorch's TCPStore
    ("Connection was likely closed").

    Args:
        words: The exception with its qualified type, as Python prints it, or its origin in a
            record.
    """
    return _PEER_ERROR.search(words) is not None or _PEER_LEFT.search(words) is not None


def tells_of_a_peer(failure: Outcome) -> bool:
    """Return whether a failure only reports the loss of another process."""
    if blames_a_peer(failure.cause):
        return True
    # NCCL says so further down in its message.
    return "NCCL" in failure.cause and blames_a_peer(failure.text)


def has_waited(failure: Outcome) -> bool:
    """Return whether a failure is a timeout, perhaps of a wait for another process."""
    return _TIMEOUT.search(failure.cause) is not None


def suspect_command(outcome: Outcome) -> Suspect:
    """Make evidence of the failure of a host's command.

    Every host's observation of a rank outweighs this evidence (row 4).
    """
    kind = Kind.PEER if tells_of_a_peer(outcome) else Kind.DIED
    return Suspect(kind, math.inf, math.inf, outcome._replace(kind=FAILED))
