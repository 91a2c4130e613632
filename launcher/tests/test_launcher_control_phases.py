"""Test the phases of the control channel's two ends: the effect of each event in each of them, on
real roles on loopback.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum

import pytest
from launcher_control import (
    LEADER,
    THIRD,
    WORKER,
    FakeLeader,
    Heard,
    Peer,
    encode,
    joined,
    leader_on_a_loop,
    receive,
    send,
    until,
)

from trainworks_launcher.contract.json_values import Json
from trainworks_launcher.supervise.control import phases
from trainworks_launcher.supervise.control.leader import Leader
from trainworks_launcher.supervise.control.messages import outcome_fields, suspect_fields
from trainworks_launcher.supervise.control.phases import LeaderPhase, Phases, Table, WorkerPhase
from trainworks_launcher.supervise.control.worker import Worker
from trainworks_launcher.supervise.outcome.evidence import Kind, Suspect
from trainworks_launcher.supervise.outcome.outcome import FAILED, SUCCEEDED, Outcome

WELL, BADLY = Outcome(SUCCEEDED, 0, WORKER), Outcome(FAILED, 3, WORKER, "it failed")
SUSPECT = Suspect(Kind.DIED, 0.0, 0.0, BADLY._replace(rank=0))
MESSAGES: Mapping[str, Mapping[str, Json]] = {
    "ended well": {"type": "ended", **outcome_fields(WELL)},
    "ended badly": {"type": "ended", **outcome_fields(BADLY)},
    "suspect": {"type": "suspect", **suspect_fields(SUSPECT, 0.0)},
    "finish": {"type": "finish", **outcome_fields(BADLY)},
}
"""Those that need more than their kind."""

TABLES: tuple[Table[IntEnum], ...] = (phases.LEADER, phases.WORKER, phases.SEARCH)  # type: ignore[assignment]


def read(matrix: str) -> Iterator[tuple[str, str, str, list[str]]]:
    """Yield (event, phase, next phase, messages to the supervisor) of each cell of a table.

    "." is left out.

    A cell is the next phase, "-" if it stays, and after a "+" the messages. "error" is an error of
    the program.
    """
    heading, *rows = (line for line in matrix.splitlines() if line.strip())
    for row in rows:
        event, cells = row[:16].strip(), row[16:].split()
        for phase, cell in zip(heading.split()[1:], cells, strict=True):
            follows, *heard = cell.split("+")
            if cell != ".":
                yield event, phase, phase if follows == "-" else follows, heard


@pytest.mark.parametrize("table", TABLES, ids=["leader", "worker", "search"])
def test_every_phase_is_reached_and_leads_to_the_last_one(table: Table[IntEnum]) -> None:
    first, *_, last = table
    assert list(table) == list(type(first))
    assert not table[last]

    def reached(phase: IntEnum) -> set[IntEnum]:
        reached_phases, new = {phase}, {phase}
        while new:
            new = {
                follows for new_phase in new for follows in table[new_phase].values()
            } - reached_phases
            reached_phases |= new
        return reached_phases

    assert reached(first) == set(table)
    assert all(last in reached(phase) for phase in table)


def test_what_does_not_count_changes_nothing_and_what_must_count_is_an_error() -> None:
    leader_phases = Phases(phases.LEADER)
    assert not leader_phases.take("leave")
    assert leader_phases.now.name == "GATHERING"
    with pytest.raises(RuntimeError, match="LeaderPhase: no 'leave' in phase GATHERING"):
        leader_phases.must("leave")
    assert leader_phases.take("stopping")
    assert not leader_phases.take("go")
    assert leader_phases.now.name == "STOPPING"


# --- the leader -----------------------------------------------------------------------------------
OF_LEADER = """
event           GATHERING      RUNNING        STOPPING     FINISHED  LINGERING  LEAVING
ready           -              -              -            -         -          -
suspect         -+suspect 0    -+suspect 0    -+suspect 0  -         -          -
ended well      -              -              -            -         -          -
ended badly     FINISHED       FINISHED       -            -         -          -
stopping        STOPPING+stop  STOPPING+stop  -            -         -          -
bye             -              -              -            -         -          LEFT+left
alive           -              -              -            -         -          -
go              -              -              -            -         -          -
finish          -              -              -            -         -          -
closed          -              FINISHED       -            -         -          LEFT+left
own ready       -              -              -            -         -          -
own suspect     -+suspect 0    -+suspect 0    -+suspect 0  -         -          -
own well        -              -              -            -         -          -
own badly       FINISHED       FINISHED       -            -         -          -
own stopping    STOPPING+stop  STOPPING+stop  -            -         -          -
own leave       error          error          error        LEAVING   error      error
""".replace("suspect 0", "suspect_0")


def bring_leader(phase: str, role: Leader, peer: Peer) -> None:
    """Bring a leader of two hosts, or of a third one that never comes, to a phase."""
    if phase == "RUNNING":
        role.ready()
        peer.say({"type": "ready"})
        until(peer.loop, lambda: role.phase is LeaderPhase.RUNNING)
    elif phase == "STOPPING":
        role.stopping()
    elif phase != "GATHERING":
        role.ended(BADLY)
        if phase in ("LINGERING", "LEAVING"):
            role.leave()
    assert role.phase.name == phase


def wait_until_read(peer: Peer, port: int, heard: Heard) -> None:
    """Let a stranger come: when the leader has dropped it, it has read the messages of the others
    from before.
    """
    with socket.create_connection((LEADER, port)) as stranger:
        send(stranger, b"hello\n")
        until(peer.loop, lambda: "dropped a connection" in "".join(heard.log))


@pytest.mark.parametrize(("event", "phase", "follows", "messages"), list(read(OF_LEADER)))
def test_what_an_event_does_to_the_leader(
    event: str, phase: str, follows: str, messages: list[str]
) -> None:
    hosts = (LEADER, WORKER, THIRD) if phase == "LINGERING" else (LEADER, WORKER)
    calls: Mapping[str, Callable[[Leader], None]] = {
        "own ready": lambda role: role.ready(),
        "own suspect": lambda role: role.suspect(SUSPECT),
        "own well": lambda role: role.ended(WELL),
        "own badly": lambda role: role.ended(BADLY),
        "own stopping": lambda role: role.stopping(),
        "own leave": lambda role: role.leave(),
    }
    with (
        leader_on_a_loop(hosts=hosts) as (loop, control, role, heard),
        joined(loop, control) as peer,
    ):
        bring_leader(phase, role, peer)
        before = len(heard.calls)
        if follows == "error":
            with pytest.raises(RuntimeError, match=f"no 'leave' in phase {phase}"):
                calls[event](role)
            return
        if event in calls:
            calls[event](role)
        elif event == "closed":
            peer.opened.close()
        else:
            peer.say(dict(MESSAGES.get(event, {"type": event})))
        wait_until_read(peer, control.port, heard)
        assert role.phase.name == follows
        assert [call.replace(" ", "_") for call in heard.calls[before:]] == messages


# --- the worker -----------------------------------------------------------------------------------
OF_WORKER = """
event           JOINING   PREPARING  READY      BOUND      FINISHED  LEAVING
go              .         -          BOUND+go   -          -         -
stop            .         -+stop     -+stop     -+stop     -         -
without         .         -+restart  -+restart  -+restart  -         -
finish          .         FINISHED   FINISHED   FINISHED   -         -
alive           .         -          -          -          -         -
ready           .         -          -          -          -         -
welcome         .         -          -          -          -         -
closed          .         JOINING    JOINING    FINISHED   .         LEFT+left
own ready       -         READY      -          -          -         -
own stopping    -         BOUND      BOUND      -          -         -
own suspect     -         -          -          -          -         -
own well        FINISHED  BOUND      BOUND      -          -         -
own badly       FINISHED  BOUND      BOUND      -          -         -
own leave       error     error      error      error      LEAVING   error
"""


def bring_worker(phase: str, leader: FakeLeader, peer: Peer | None) -> None:
    """Bring a worker to a phase; its leader has let it in but for the first one."""
    role = leader.role
    if peer is not None and phase != "PREPARING":
        role.ready()
    if peer is not None and phase in ("BOUND", "FINISHED", "LEAVING"):
        say(leader, peer, {"type": "go"})
    if peer is not None and phase in ("FINISHED", "LEAVING"):
        say(leader, peer, dict(MESSAGES["finish"]))
    if phase == "LEAVING":
        role.leave()
    assert role.phase.name == phase


def say(leader: FakeLeader, peer: Peer, message: dict[str, Json]) -> None:
    """Send a message to a worker, and wait until it has read it: a kind that the channel does not
    know comes to `told`.
    """
    heard_before = len(leader.heard.messages)
    peer.say(message, {"type": "mark"})
    until(
        leader.loop,
        lambda: any(kind == "mark" for _, kind, _ in leader.heard.messages[heard_before:]),
    )


@pytest.mark.parametrize(("event", "phase", "follows", "messages"), list(read(OF_WORKER)))
def test_what_an_event_does_to_a_worker(
    event: str, phase: str, follows: str, messages: list[str]
) -> None:
    calls: Mapping[str, Callable[[Worker], None]] = {
        "own ready": lambda role: role.ready(),
        "own suspect": lambda role: role.suspect(SUSPECT),
        "own well": lambda role: role.ended(WELL),
        "own badly": lambda role: role.ended(BADLY),
        "own stopping": lambda role: role.stopping(),
        "own leave": lambda role: role.leave(),
    }
    with contextlib.ExitStack() as stack:
        leader = FakeLeader(stack)
        peer = None
        if phase != "JOINING":
            peer = leader.let_in(stack)
            until(leader.loop, lambda: leader.heard.calls == ["welcome"])
        bring_worker(phase, leader, peer)
        before = len(leader.heard.calls)
        if follows == "error":
            with pytest.raises(RuntimeError, match=f"no 'leave' in phase {phase}"):
                calls[event](leader.role)
            return
        if event in calls:
            calls[event](leader.role)
        elif peer is not None and event == "closed":
            peer.opened.close()
            until(leader.loop, lambda: leader.role.phase is WorkerPhase[follows])
        elif peer is not None:
            say(leader, peer, dict(MESSAGES.get(event, {"type": event})))
        assert leader.role.phase.name == follows
        assert leader.heard.calls[before:] == messages


# --- the search -----------------------------------------------------------------------------------
OF_SEARCH = """
event           ASKED       ANSWERED
challenge       dropped     dropped
refused         kept        kept
welcome         dropped     PREPARING
finish          dropped     FINISHED
go              dropped     dropped
alive           dropped     dropped
join            dropped     dropped
"""


@pytest.mark.parametrize(("event", "phase", "follows"), [cell[:3] for cell in read(OF_SEARCH)])
def test_what_a_leader_may_say_before_it_has_let_a_worker_in(
    event: str, phase: str, follows: str
) -> None:
    message = dict(MESSAGES.get(event, {"type": event}))
    with contextlib.ExitStack() as stack:
        leader = FakeLeader(stack)
        if phase == "ASKED":
            opened = leader.accept(stack)
            assert b'"join"' in receive(leader.loop, opened)
            send(opened, encode([message]))
        else:
            peer = leader.prove(stack)
            opened = peer.opened
            peer.say(message)
        if follows not in ("dropped", "kept"):
            until(leader.loop, lambda: leader.role.phase is WorkerPhase[follows])
            return
        if follows == "kept":
            opened.close()
        until(leader.loop, lambda: leader.heard.log)
        (line,) = leader.heard.log
        assert "does not let this host in yet: " in line
        assert "did not answer" not in line, "it went by the time, not by the message"
        if follows == "dropped":
            leader.accept(stack)  # and it tries again
        assert leader.role.phase is WorkerPhase.JOINING


def test_a_worker_that_ended_without_a_leader_is_let_in_by_none() -> None:
    """Refuse the worker: else it would prepare a host whose part in the job is over."""
    with contextlib.ExitStack() as stack:
        leader = FakeLeader(stack)
        peer = leader.prove(stack)
        leader.role.ended(BADLY)
        assert leader.heard.outcomes == [BADLY]
        with contextlib.suppress(OSError):
            peer.say({"type": "welcome"})
        assert receive(leader.loop, peer.opened) == b""
        assert leader.heard.calls == []


def test_a_worker_tells_the_leader_that_lets_it_in_what_happened_before() -> None:
    with contextlib.ExitStack() as stack:
        leader = FakeLeader(stack)
        leader.role.stopping()
        peer = leader.let_in(stack)
        assert peer.hear() == [{"type": "stopping"}]
        assert leader.role.phase is WorkerPhase.BOUND
