"""The control channel against everybody who may connect: hosts with and without
the secret, strangers, floods.

Real sockets and real launchers on loopback; messages are bounded in number and time.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launcher_control import (
    JOB,
    LEADER,
    THIRD,
    WORKER,
    FakeLeader,
    Heard,
    encode,
    in_turns,
    join,
    joined,
    leader_on_a_loop,
    receive,
    send,
    until,
)
from launcher_support import (
    TIME_OUT,
    Launcher,
    environment,
    manifest,
    plan,
    write_inputs,
    write_manifest,
)

from trainworks_launcher.contract import names
from trainworks_launcher.contract.errors import RefusalError
from trainworks_launcher.contract.json_values import Json
from trainworks_launcher.environment.command_line import Invocation
from trainworks_launcher.environment.entry_point import Code
from trainworks_launcher.environment.environment import Devices, read_environment
from trainworks_launcher.environment.platforms import Description
from trainworks_launcher.job.network import Limits
from trainworks_launcher.plan.plan import Control
from trainworks_launcher.supervise.control import Role, data_path, handshake, identity, rivals
from trainworks_launcher.supervise.control.leader import Leader
from trainworks_launcher.supervise.control.message_authentication import LEADER as LEADERS
from trainworks_launcher.supervise.control.message_authentication import WORKER as WORKERS
from trainworks_launcher.supervise.control.message_authentication import Seal
from trainworks_launcher.supervise.control.messages import (
    MESSAGE_LIMIT,
    PROTOCOL,
    Decoder,
    read_outcome,
    read_suspect,
    suspect_fields,
)
from trainworks_launcher.supervise.control.pending_connections import ROOM
from trainworks_launcher.supervise.control.worker import Worker
from trainworks_launcher.supervise.event_loop import READ, Loop
from trainworks_launcher.supervise.outcome.evidence import Kind, Suspect
from trainworks_launcher.supervise.outcome.outcome import FAILED, STOPPED, SUCCEEDED, Outcome
from trainworks_testing.ports import free_port

SECRET = "0123456789abcdef-a-long-one"
WAIT = "import signal; print('ready', flush=True); signal.pause()"


# --- pure parts -----------------------------------------------------------------------------------
def transcript() -> handshake.Transcript:
    return handshake.Transcript("job", "algo-2", "a" * 64, "b" * 64)


def test_a_proof_is_of_one_side_one_secret_and_everything_that_was_said() -> None:
    shown = handshake.make_proof(SECRET, WORKERS, transcript())
    assert handshake.is_proof(SECRET, WORKERS, transcript(), shown)
    assert not handshake.is_proof(SECRET, LEADERS, transcript(), shown)
    assert not handshake.is_proof(SECRET + "x", WORKERS, transcript(), shown)
    for name in transcript()._fields:
        assert not handshake.is_proof(
            SECRET, WORKERS, transcript()._replace(**{name: "other"}), shown
        ), name


def test_a_proof_cannot_be_moved_from_one_field_to_the_next() -> None:
    one, other = (
        transcript()._replace(job="ab", host="c"),
        transcript()._replace(job="a", host="bc"),
    )
    assert handshake.make_proof(SECRET, WORKERS, one) != handshake.make_proof(
        SECRET, WORKERS, other
    )


def test_nonces_are_never_the_same() -> None:
    nonces = {handshake.make_nonce() for _ in range(1000)}
    assert len(nonces) == 1000
    assert all(handshake.read_nonce(nonce) for nonce in nonces)


@given(st.one_of(st.none(), st.booleans(), st.integers(), st.text(), st.lists(st.text())))
def test_nothing_else_is_a_proof(value: Json) -> None:
    assert not handshake.is_proof(SECRET, WORKERS, transcript(), value)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(codec=None), max_size=20),
    lambda children: (
        st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=8), children, max_size=4)
    ),
    max_leaves=8,
)
KINDS: tuple[str, ...] = (
    "join",
    "answer",
    "challenge",
    "refused",
    "welcome",
    "ready",
    "go",
    "ended",
    "stopping",
    "stop",
    "without",
)
KINDS += ("finish", "bye", "alive", "probe", "samples")
FIELDS: tuple[str, ...] = ("host", "job", "nonce", "proof", "reason", "outcome", "status")
FIELDS += ("text", "age", "rank", "count", "secret")
MESSAGES = st.builds(
    lambda kind, fields: {**fields, "type": kind},
    st.sampled_from(KINDS) | JSON,
    st.dictionaries(
        st.sampled_from(FIELDS),
        JSON | st.sampled_from((LEADER, WORKER, SUCCEEDED, STOPPED, 0, 70000)),
    ),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(MESSAGES, max_size=5), st.data())
def test_messages_survive_any_division_into_pieces(
    messages: list[dict[str, Json]], data: st.DataObject
) -> None:
    encoded = encode(messages)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(encoded)), max_size=6)))
    decoder, decoded = Decoder(), []
    for start, end in zip([0, *cuts], [*cuts, len(encoded)], strict=True):
        decoded += decoder.feed(encoded[start:end])
    assert json.dumps(decoded) == json.dumps(messages)


@given(st.lists(st.binary(max_size=200) | st.just(b"\n") | st.just(b"[" * 5000), max_size=8))
def test_bytes_are_messages_or_one_kind_of_error(chunks: list[bytes]) -> None:
    decoder = Decoder()
    with contextlib.suppress(ValueError):
        for chunk in chunks:
            for message in decoder.feed(chunk):
                read_outcome(message, WORKER)


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 60_000 + b"\n",
        b'{"a":' * 10_000 + b"\n",
        b"9" * 60_000 + b"\n",
        b"\x00" * (MESSAGE_LIMIT + 1),
        b"null\n",
    ],
)
def test_deep_long_and_wrong_lines_are_errors_and_not_crashes(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        Decoder().feed(data)


@given(MESSAGES)
def test_an_outcome_can_always_be_written_down(message: dict[str, Json]) -> None:
    outcome = read_outcome(message, WORKER)
    assert read_suspect(message, WORKER, 5.0).at <= 5.0
    assert outcome.kind in (SUCCEEDED, FAILED, STOPPED)
    assert 0 <= outcome.status <= 255
    assert (outcome.kind == FAILED) <= (outcome.status != 0)
    (outcome.text + outcome.host).encode("utf-8")


@pytest.mark.parametrize("secret", ["short", "fifteen-letters"])
def test_a_secret_that_can_be_guessed_is_refused(secret: str) -> None:
    with pytest.raises(RefusalError, match="characters can be guessed") as refused:
        plan(environment(hosts=("a", "b"), host="a", job_secret=secret))
    assert secret not in str(refused.value)


def test_the_secret_is_in_no_plan_and_in_no_text_of_the_environment(tmp_path: Path) -> None:
    job_environment = read_environment(
        {"TRAINWORKS_JOB_SECRET": SECRET, "SAGEMAKER_BASE_DIR": str(tmp_path)}
    )
    assert job_environment.job_secret == SECRET
    assert SECRET not in repr(job_environment)
    assert SECRET not in plan(environment(hosts=("a", "b"), host="a", job_secret=SECRET)).to_json()


# --- roles in this process, on a loop -------------------------------------------------------------
NETWORK = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@NETWORK
@given(st.lists(MESSAGES, min_size=1, max_size=4), st.sampled_from(["", SECRET]))
def test_no_message_of_a_stranger_reaches_the_job(
    messages: list[dict[str, Json]], secret: str
) -> None:
    with (
        leader_on_a_loop(secret) as (loop, control, _, heard),
        socket.create_connection((LEADER, control.port)) as connection,
    ):
        send(connection, encode(messages))
        in_turns(loop)
        assert heard.calls == ["welcome"]
        assert heard.outcomes == []
        assert len(heard.log) <= 2


@NETWORK
@given(st.lists(MESSAGES, min_size=1, max_size=4))
def test_no_message_of_a_host_of_the_job_breaks_the_leader(messages: list[dict[str, Json]]) -> None:
    with leader_on_a_loop() as (loop, control, role, heard), joined(loop, control) as peer:
        role.ready()
        peer.say(*messages)
        role.ended(Outcome(SUCCEEDED, 0, LEADER))
        in_turns(loop)
        assert len(heard.outcomes) <= 1


@NETWORK
@given(st.lists(MESSAGES, min_size=1, max_size=4), st.sampled_from(["", SECRET]))
def test_no_message_of_a_leader_breaks_a_worker(
    messages: list[dict[str, Json]], secret: str
) -> None:
    loop, heard = Loop(), Heard()
    with socket.create_server((LEADER, 0)) as server:
        control = Control(LEADER, (LEADER, WORKER), server.getsockname()[1])
        role: Role = Worker(
            loop, control, Limits(), handshake.Credentials(WORKER, JOB, secret), heard.events()
        )
        role.begin()
        in_turns(loop)
        opened, _ = server.accept()
        with opened:
            send(opened, encode(messages))
            in_turns(loop)
        role.close()
    loop.close()
    assert heard.outcomes == []
    assert heard.calls == []


def test_a_proof_is_good_for_one_connection_only() -> None:
    with leader_on_a_loop(SECRET) as (loop, control, _, heard):
        nonce = handshake.make_nonce()

        def begin_join() -> tuple[socket.socket, Mapping[str, Json]]:
            opened = socket.create_connection((LEADER, control.port))
            send(opened, join(nonce=nonce, secret=True))
            return opened, Decoder().feed(receive(loop, opened))[0]

        first, challenge = begin_join()
        second, other = begin_join()
        theirs = str(challenge["nonce"])
        proof_transcript = handshake.Transcript(identity.as_text(JOB), WORKER, nonce, theirs)
        assert handshake.is_proof(SECRET, LEADERS, proof_transcript, challenge["proof"])
        assert other["nonce"] != theirs
        answer = encode(
            [{"type": "answer", "proof": handshake.make_proof(SECRET, WORKERS, proof_transcript)}]
        )
        send(second, answer)
        assert b"refused" in receive(loop, second)
        send(first, answer)
        assert b"welcome" in receive(loop, first)
        third, again = begin_join()
        assert again["type"] == "refused"
        for opened in (first, second, third):
            opened.close()
        assert "it has already joined" in str(again["reason"])
        assert heard.calls == ["welcome"]


# --- the job's identity ---------------------------------------------------------------------------
def identity_with(
    host: str = "algo-1", control: Control | None = None, mode: str = "none", **changes: object
) -> Json:
    job_environment = environment(
        {"epochs": 3, "api_key": "secret"}, hosts=("algo-1", "algo-2"), host=host
    )
    control = control or Control("algo-1", ("algo-1", "algo-2"), 7780)
    return identity.identity_of(job_environment._replace(**changes), control, mode)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"host": "algo-2"}, ""),
        ({"hostname": "ip-10-0-0-1", "base_directory": "/elsewhere"}, ""),
        ({"devices": Devices(gpus=8)}, ""),
        ({"variables": {"TRAINING_JOB_NAME": "try-1"}}, "job name"),
        (
            {
                "platform": Description("slurm"),
                "variables": {"SLURM_JOB_ID": "8", "SLURM_STEP_ID": "1"},
            },
            "job name",
        ),
        ({"variables": {"SAGEMAKER_PROGRAM": "other.py"}}, "program"),
        (
            {
                "hyperparameters": {
                    "sagemaker_program": "train.py",
                    "epochs": 4,
                    "api_key": "secret",
                }
            },
            "hyperparameters",
        ),
        (
            {
                "hyperparameters": {
                    "sagemaker_program": "train.py",
                    "epochs": 3,
                    "api_key": "another",
                }
            },
            "",
        ),
        ({"mode": "mpi"}, "mode"),
        ({"control": Control("algo-1", ("algo-1", "algo-2"), 7780, 1)}, "hosts"),
        ({"control": Control("algo-1", ("algo-1", "algo-2"), 7781)}, ""),
    ],
)
def test_what_hosts_of_one_job_have_in_common(changes: dict[str, Any], part: str) -> None:
    assert identity.differences(identity_with(), identity_with(**changes)) == part  # type: ignore[arg-type]


def test_an_edited_script_and_another_image_make_another_job(tmp_path: Path) -> None:
    """A worker that still waits with the old code must not join a leader with the new one."""
    for words in (("train.py", "--node", "1"), ("/bin/bash", "train.py"), ("-m", "train")):
        hyperparameters: dict[str, Any] = {
            "code": Code(str(tmp_path), entries=("train.py",)),
            "invocation": Invocation(words),
        }
        (tmp_path / "train.py").write_text("print(1)")
        old = identity_with(**hyperparameters)
        (tmp_path / "train.py").write_text(f"print({len(words)}, {words[0]!r})")
        assert identity.differences(old, identity_with(**hyperparameters)) == "code"  # type: ignore[arg-type]
        (tmp_path / "train.py").unlink()
        missing = identity_with(**hyperparameters)
        if words[0] != "/bin/bash":
            assert identity.differences(missing, old) == ""  # type: ignore[arg-type]
            assert identity.differences(old, missing) == ""  # type: ignore[arg-type]
    image, unknown = (
        identity_with(manifest=manifest()._replace(document=text)) for text in ("{}", "")
    )
    assert identity.differences(identity_with(), image) == "image"  # type: ignore[arg-type]
    assert identity.differences(identity_with(), unknown) == ""  # type: ignore[arg-type]


def test_a_host_of_another_job_or_an_earlier_attempt_is_refused_with_what_differs() -> None:
    """Two jobs on one network, with the same hosts, program and mode.

    And a launcher of another version.
    """
    with leader_on_a_loop() as (loop, control, _, heard):
        for job, words in (({**JOB, "job name": "try-1"}, "job name"), (None, "launcher version")):
            with socket.create_connection((LEADER, control.port)) as connection:
                send(connection, join(job=job))
                (refused,) = Decoder().feed(receive(loop, connection))
            assert refused["reason"] == f"it belongs to another job: different {words}"
        assert "different job name" in heard.log[-1]
        assert heard.calls == ["welcome"]


# --- seals ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "how", ["again", "out of order", "left out", "changed", "unsealed", "as the leader's"]
)
def test_only_the_next_message_of_the_host_itself_is_obeyed(how: str) -> None:
    with leader_on_a_loop() as (loop, control, role, heard), joined(loop, control) as peer:
        role.ready()
        first, second = peer.lines(
            [{"type": "note", "text": "one"}, {"type": "note", "text": "two"}]
        )
        sent = {
            "again": first + first,
            "out of order": second + first,
            "left out": second,
            "changed": first.replace(b"one", b"eno"),
            "unsealed": b'{"type": "note"}\n',
            "as the leader's": Seal(bytes(32), LEADERS).closed(b'{"type": "note"}') + b"\n",
        }[how]
        send(peer.opened, sent)
        until(loop, lambda: "left before the start" in heard.log[-1])
        assert "a message does not have the seal of this job" in heard.log[-1]
        assert heard.messages == []


def test_a_part_of_the_launcher_may_send_messages_of_its_own() -> None:
    with leader_on_a_loop() as (loop, control, role, heard), joined(loop, control) as peer:
        role.tell("sample", seconds=3)
        assert peer.hear() == [{"type": "sample", "seconds": 3}]
        role.tell("sample", LEADER)
        role.tell("sample", WORKER, only="you")
        assert peer.hear() == [{"type": "sample", "only": "you"}]
        peer.say({"type": "samples", "ranks": [1, 2]}, {"type": "alive"})
        assert heard.messages == [(WORKER, "samples", {"type": "samples", "ranks": [1, 2]})]


@pytest.mark.parametrize("statuses", [(0, 1), (1, 0), (0, 0), (3, 1)])
def test_a_stopped_job_has_the_status_of_the_first_program_that_failed(
    statuses: tuple[int, int],
) -> None:
    with leader_on_a_loop() as (loop, control, role, heard), joined(loop, control) as peer:
        role.ready()
        peer.say({"type": "ready"})
        role.stopping()
        role.ended(Outcome(STOPPED, statuses[0], LEADER, "of the leader"))
        peer.say(
            {"type": "ended", "outcome": STOPPED, "status": statuses[1], "cause": "of the worker"}
        )
        until(loop, lambda: heard.outcomes)
        assert (heard.outcomes[0].kind, heard.outcomes[0].status) == (
            STOPPED,
            statuses[0] or statuses[1],
        )


@pytest.mark.parametrize("age", [10**400, -1, float("nan"), float("inf"), "1", None, True])
def test_an_age_of_any_kind_is_a_time_before_now(age: Json) -> None:
    suspect = read_suspect({"age": age, "ended": age, "evidence": age}, WORKER, 5.0)
    assert 5.0 - 86400 <= suspect.at <= 5.0
    assert 5.0 - 86400 <= suspect.ended_at <= 5.0
    assert suspect.kind is Kind.UNSEEN


@pytest.mark.parametrize("kind", [*Kind])
@pytest.mark.parametrize("ended_at", [4.0, math.inf])
def test_the_evidence_of_a_rank_survives_the_wire(kind: Kind, ended_at: float) -> None:
    suspect = Suspect(kind, 3.0, ended_at, Outcome(FAILED, 1, WORKER, "ValueError: first", 3))
    assert read_suspect(suspect_fields(suspect, 5.0), WORKER, 5.0) == suspect


def test_what_another_host_says_does_nothing_to_a_terminal() -> None:
    hostile_text = "\x1b[2J\x1b]0;owned\x07real\x9b31m \x1b[31mred\x1b[0m\u202e\r\nnext\x00"
    with leader_on_a_loop() as (loop, control, role, heard), joined(loop, control) as peer:
        role.ready()
        peer.say(
            {
                "type": "ended",
                "outcome": FAILED,
                "status": 3,
                "host": "\x1b[2Jx\ny",
                "cause": hostile_text,
            }
        )
        until(loop, lambda: heard.outcomes)
        (outcome,) = heard.outcomes
        assert (outcome.host, outcome.text) == ("x y", "real 31m red \nnext ")


# --- a worker -------------------------------------------------------------------------------------
def test_a_worker_starts_once_and_not_before_it_is_prepared() -> None:
    with contextlib.ExitStack() as stack:
        fake_leader = FakeLeader(stack)
        leader = fake_leader.let_in(stack)
        leader.say({"type": "go"})
        assert fake_leader.heard.calls == ["welcome"]
        fake_leader.role.ready()
        leader.say({"type": "go"}, {"type": "go"}, {"type": "go"})
        assert fake_leader.heard.calls == ["welcome", "go"]


def test_a_worker_joins_a_leader_that_starts_anew_before_the_job_does() -> None:
    with contextlib.ExitStack() as stack:
        leader = FakeLeader(stack)
        first = leader.let_in(stack)
        leader.role.ready()
        first.opened.close()
        again = leader.let_in(stack)
        assert again.hear() == [{"type": "ready"}]
        again.say({"type": "go"})
        assert leader.heard.calls == ["welcome", "welcome", "go"]
        again.opened.close()
        until(leader.loop, lambda: leader.heard.outcomes)
        assert leader.heard.outcomes[0].text == f"lost host {LEADER}: it closed the connection"


def test_a_leader_that_does_not_start_anew_is_lost() -> None:
    with contextlib.ExitStack() as stack:
        leader = FakeLeader(stack, limits=Limits(heartbeat=0.05))
        leader.let_in(stack).opened.close()
        leader.server.close()
        until(leader.loop, lambda: leader.heard.outcomes)
        assert leader.heard.outcomes[0].text.startswith(f"lost host {LEADER}: ")


def test_every_address_of_the_leaders_name_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first address of the name answers nothing.

    A resolver cannot be made to say so without root.
    """
    with contextlib.ExitStack() as stack:
        real, dead = socket.getaddrinfo, stack.enter_context(socket.socket())
        dead.bind((LEADER, 0))  # bound and not listening: refused
        addresses = lambda *words, **more: [  # noqa: E731
            *real(LEADER, dead.getsockname()[1], type=socket.SOCK_STREAM),
            *real(*words, **more),
        ]
        monkeypatch.setattr(socket, "getaddrinfo", addresses)
        leader = FakeLeader(stack)
        leader.let_in(stack)
        assert leader.heard.calls == ["welcome"]


def test_a_worker_with_another_secret_ends_soon_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(names, "REFUSAL_LIMIT_SECONDS", 0.2)
    with leader_on_a_loop(SECRET) as (loop, control, _, at_leader):
        for secret, words in (
            ("", "it has no TRAINWORKS_JOB_SECRET"),
            (SECRET + "x", "it has another TRAINWORKS_JOB"),
        ):
            heard = Heard()
            role = Worker(
                loop, control, Limits(), handshake.Credentials(WORKER, JOB, secret), heard.events()
            )
            role.begin()
            until(loop, lambda: heard.outcomes)  # noqa: B023
            role.close()
            assert words in heard.outcomes[0].text
        assert "it has no TRAINWORKS_JOB_SECRET, and the leader has one" in "".join(at_leader.log)


# --- outages --------------------------------------------------------------------------------------
class Relay:
    """A relay between two hosts: forwards connections, until it is told to swallow their data."""

    def __init__(self, loop: Loop, port: int, stack: contextlib.ExitStack) -> None:
        self.loop, self.port, self.stack = loop, port, stack
        self.stalled: set[socket.socket] = set()
        self.open: list[socket.socket] = []
        self.server = stack.enter_context(socket.create_server((LEADER, 0)))
        self.server.setblocking(False)
        loop.watch(self.server, READ, self._accept)

    def _accept(self, _: int) -> None:
        one = self.stack.enter_context(self.server.accept()[0])
        other = self.stack.enter_context(socket.create_connection((LEADER, self.port)))
        for here, there in ((one, other), (other, one)):
            here.setblocking(False)
            self.open.append(here)
            self.loop.watch(here, READ, partial(self._passed_on, here, there))

    def _passed_on(self, here: socket.socket, there: socket.socket, _events: int) -> None:
        self._forward(here, there)

    def _forward(self, here: socket.socket, there: socket.socket) -> None:
        if here in self.stalled:
            self.loop.unwatch(here)
            return
        data = b""
        with contextlib.suppress(OSError):
            data = here.recv(65536)
        if data:
            send(there, data)
        else:
            self.loop.unwatch(here)
            there.shutdown(socket.SHUT_RDWR)

    def stall(self, *, both: bool = True) -> None:
        """Swallow the data of the present connections, or only of their way to the leader.

        New ones are forwarded.
        """
        connections = self.open if both else self.open[::2]
        self.stalled.update(connections)

    def heal(self) -> None:
        """Forward again, also the data from meanwhile."""
        for here, there in zip(self.open[::2], self.open[1::2], strict=True):
            for one, other in ((here, there), (there, here)):
                if one in self.stalled and one.fileno() >= 0:
                    self.loop.watch(one, READ, partial(self._passed_on, one, other))
        self.stalled.clear()


@pytest.mark.parametrize("both", [True, False])
def test_a_connection_that_stays_silent_after_an_outage_ends_nothing(both: bool) -> None:
    """Keep a connection silent as the kernel's is, whose tries to send again get rarer: questions
    on fresh connections are signs of life, for both sides, and the messages from meanwhile come
    when the connection does.
    """
    limits = Limits(heartbeat=1.2)
    with contextlib.ExitStack() as stack:
        loop, control, leader, at_leader = stack.enter_context(leader_on_a_loop(limits=limits))
        between = Relay(loop, control.port, stack)
        port = between.server.getsockname()[1]
        heard = Heard()
        worker = Worker(
            loop,
            control._replace(port=port),
            limits,
            handshake.Credentials(WORKER, JOB, ""),
            heard.events(),
        )
        stack.callback(worker.close)
        worker.begin()
        until(loop, lambda: heard.calls)
        worker.ready()
        leader.ready()
        until(loop, lambda: heard.calls == ["welcome", "go"])
        between.stall(both=both)
        leader.tell("one")
        worker.tell("two")
        in_turns(loop, 2.0)
        assert (heard.outcomes, at_leader.outcomes, len(heard.messages), at_leader.messages) == (
            [],
            [],
            not both,
            [],
        )
        between.heal()
        until(loop, lambda: heard.messages and at_leader.messages)
        between.stall()
        between.server.close()  # now nothing gets through
        loop.unwatch(between.server)
        until(loop, lambda: heard.outcomes and at_leader.outcomes)
        assert heard.outcomes[0].text.startswith(f"lost host {LEADER}: no message from it for")
        assert at_leader.outcomes[0].text.startswith(f"lost host {WORKER}: no message from it for")


def test_a_sign_of_life_beside_the_connection_counts_once_and_only_from_the_host_itself() -> None:
    with (
        leader_on_a_loop(limits=Limits(heartbeat=0.3)) as (loop, control, role, heard),
        joined(loop, control) as peer,
    ):
        role.ready()
        peer.say({"type": "ready"})

        def ask(count: int, shown: str) -> bytes:
            with socket.create_connection((LEADER, control.port)) as probe:
                message: dict[str, Json] = {
                    "type": "probe",
                    "host": WORKER,
                    "count": count,
                    "proof": shown,
                }
                send(probe, encode([message]))
                return receive(loop, probe)

        assert b'"probe"' in ask(1, peer.seal.probe(1))
        for count, shown in (
            (1, peer.seal.probe(1)),
            (2, peer.seal.probe(1)),
            (3, ""),
            (4, Seal(bytes(32), WORKERS).probe(4)),
        ):
            assert ask(count, shown) == b""
        until(loop, lambda: heard.outcomes)
        assert heard.outcomes[0].text.startswith(f"lost host {WORKER}: no message from it")


def test_strangers_have_bounded_room_and_the_newcomer_gets_in() -> None:
    with contextlib.ExitStack() as stack:
        loop, control, _, heard = stack.enter_context(leader_on_a_loop())
        silent = [
            stack.enter_context(socket.create_connection((LEADER, control.port)))
            for _ in range(ROOM + 50)
        ]
        in_turns(loop, 0.2)
        stack.enter_context(joined(loop, control))
        silent[0].settimeout(TIME_OUT)
        assert silent[0].recv(1) == b""  # the oldest had to go
        silent[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            silent[-1].recv(1)
        assert [line for line in heard.log if "dropped" in line] == [
            (
                "dropped a connection from 127.0.0.1: too many connections;"
                " more from that address are not logged"
            )
        ]


def test_a_leader_of_many_hosts_may_open_as_many_connections() -> None:
    limits_before = resource.getrlimit(resource.RLIMIT_NOFILE)
    many = tuple(f"algo-{number}" for number in range(1, 2001))
    loop, heard = Loop(), Heard()
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, limits_before[1]))
    try:
        role = Leader(
            loop,
            Control(many[0], many, free_port()),
            Limits(),
            handshake.Credentials(many[0], JOB, ""),
            heard.events(),
        )
        role.begin()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= min(2000 + ROOM, limits_before[1])
        role.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits_before)
        loop.close()


def test_the_log_names_a_few_strangers_and_then_says_that_it_stops() -> None:
    with leader_on_a_loop() as (loop, control, _, heard):
        for number in range(40):
            with socket.create_connection(
                (LEADER, control.port), source_address=(f"127.0.1.{number + 1}", 0)
            ) as connection:
                send(connection, b"hello\n")
                in_turns(loop, 0.005)
        dropped = [line for line in heard.log if "dropped" in line]
        assert len(dropped) == 6
        assert dropped[-1] == "more such connections are dropped and not logged"


def test_a_host_that_restarts_before_the_start_may_join_again() -> None:
    with leader_on_a_loop() as (loop, control, role, heard):
        role.ready()
        with joined(loop, control):
            pass
        until(loop, lambda: "left before the start" in heard.log[-1])
        assert heard.outcomes == []
        with joined(loop, control) as peer:
            peer.say({"type": "ready"})
            assert heard.calls == ["welcome", "go"]
        in_turns(loop)
        # After the start a host that leaves is lost, and lost it stays.
        assert [(outcome.kind, outcome.host) for outcome in heard.outcomes] == [(FAILED, WORKER)]


def test_a_host_that_leaves_before_the_start_and_stays_away_is_lost() -> None:
    with leader_on_a_loop(limits=Limits(heartbeat=0.05)) as (loop, control, role, heard):
        role.ready()
        with joined(loop, control):
            pass
        until(loop, lambda: "it may come again within 0.05 s" in heard.log[-1])
        in_turns(loop, 0.1)
        assert [(outcome.kind, outcome.host) for outcome in heard.outcomes] == [(FAILED, WORKER)]


def test_a_job_that_may_lose_hosts_starts_without_one_that_never_came() -> None:
    with leader_on_a_loop(minimum_hosts=1, limits=Limits(join=0.05)) as (
        loop,
        control,
        role,
        heard,
    ):
        role.ready()
        in_turns(loop, 0.1)
        assert heard.calls == ["welcome", "go"]
        assert (
            f"lost host {WORKER}: did not join within 0.05 s; continuing with 1 of 2 hosts"
            in heard.log
        )
        with joined(loop, control) as late:
            assert late.first["outcome"] == FAILED
        role.ended(Outcome(SUCCEEDED, 0, LEADER))
        assert [outcome.kind for outcome in heard.outcomes] == [SUCCEEDED]


def test_a_job_that_may_lose_hosts_starts_without_one_that_is_never_prepared() -> None:
    with leader_on_a_loop(minimum_hosts=1, limits=Limits(prepare=0.05)) as (
        loop,
        control,
        role,
        heard,
    ):
        role.ready()
        with joined(loop, control):
            in_turns(loop, 0.1)
            assert heard.calls == ["welcome", "go"]
            assert "were not prepared" not in "".join(outcome.text for outcome in heard.outcomes)


# --- real launchers, loopback ---------------------------------------------------------------------
@contextlib.contextmanager
def hosts(
    tmp_path: Path,
    script: str,
    *,
    names: tuple[str, ...] = (LEADER, WORKER),
    started: tuple[str, ...] = (),
    hyperparameters: Mapping[str, Json] | None = None,
    variables: Mapping[str, str] | None = None,
    own: Mapping[str, Mapping[str, str]] | None = None,
) -> Iterator[tuple[Launcher, ...]]:
    """Launchers of one job. started: the hosts that are, default all. own:
    variables of single hosts.
    """
    shared = {"TRAINWORKS_CONTROL_PORT": str(free_port()), **(variables or {})}
    with contextlib.ExitStack() as stack:
        launchers = []
        for host in started or names:
            config: dict[str, Json] = {
                "hosts": list(names),
                "current_host": host,
                "network_interface_name": "lo",
            }
            write_inputs(tmp_path / host, script, hyperparameters or {}, config)
            environment_ = {**shared, **(own or {}).get(host, {})}
            launchers.append(stack.enter_context(Launcher(tmp_path / host, variables=environment_)))
        yield tuple(launchers)


def test_hosts_with_the_secret_join_and_ranks_do_not_see_it(tmp_path: Path) -> None:
    script = "import os; print('names', sorted(name for name in os.environ if 'SECRET' in name))"
    with hosts(tmp_path, script, variables={"TRAINWORKS_JOB_SECRET": SECRET}) as launchers:
        assert [launcher.wait() for launcher in launchers] == [0, 0], (
            launchers[0].text + launchers[1].text
        )
    for launcher in launchers:
        assert "names []" in launcher.text
        assert SECRET not in launcher.text


def test_a_host_with_a_secret_refuses_a_leader_without_one(tmp_path: Path) -> None:
    with hosts(tmp_path, "", own={WORKER: {"TRAINWORKS_JOB_SECRET": SECRET}}) as (leader, worker):
        assert (leader.wait(), worker.wait()) == (66, 66)
    expected = (
        f"host {WORKER} has TRAINWORKS_JOB_SECRET, the leader {LEADER} has none: set it to one"
        " value on every"
    )
    assert leader.failure.startswith(expected)
    assert worker.failure == leader.failure


def test_hosts_without_the_leaders_secret_do_not_get_in(tmp_path: Path) -> None:
    port = {"TRAINWORKS_CONTROL_PORT": str(free_port())}
    own = {
        LEADER: {"TRAINWORKS_JOB_SECRET": SECRET, "TRAINWORKS_JOIN_LIMIT_SECONDS": "4"},
        THIRD: {"TRAINWORKS_JOB_SECRET": SECRET + "x"},
    }
    others = hosts(
        tmp_path,
        "",
        names=(LEADER, WORKER, THIRD),
        started=(WORKER, THIRD),
        variables=port,
        own=own,
    )
    with others as (none, another):
        for launcher in (none, another):
            launcher.read_until("joining")  # the leader's time begins when they are there
        alone = hosts(
            tmp_path, "", names=(LEADER, WORKER, THIRD), started=(LEADER,), variables=port, own=own
        )
        with alone as (leader,):
            assert [launcher.wait() for launcher in (leader, none, another)] == [66, 66, 66]
    lacks, differs = (
        "it has no TRAINWORKS_JOB_SECRET, and the leader has one",
        "it has another TRAINWORKS_JOB_SECRET",
    )
    assert (
        leader.failure
        == f"hosts that did not join within 4 s: {WORKER} (refused: {lacks}), {THIRD} (refused:"
        f" {differs} than the leader)"
    )
    for worker, words in ((none, lacks), (another, f"{differs} than this host")):
        assert f"the leader {LEADER} did not let this host in" in worker.failure
        assert words in worker.failure
        assert worker.text.count(words) <= 3
    assert not any(SECRET in launcher.text for launcher in (leader, none, another))


GARBAGE = (
    b"GET / HTTP/1.1\r\n\r\n",
    b"\xff" * 200_000,
    b'{"type":"join","host":"evil"}\n',
    b'{"type":"join","host":{"a":[]},"digest":1e999}\n',
    b"[]\n" * 9,
    b"[" * 4000 + b"\n",
    b'{"type":"finish","outcome":"failed","status":9,"host":"x","cause":"evil"}\n{"type":"go"}\n',
    json.dumps({"type": "join", "host": WORKER, "digest": "0"}).encode() + b"\n",
    b"",
)


def test_a_host_joins_while_strangers_flood_the_port(tmp_path: Path) -> None:
    """2,000 connections before and while the worker comes: silent, slow, half open, garbage."""
    variables = {"TRAINWORKS_JOB_SECRET": SECRET, "TRAINWORKS_CONTROL_PORT": str(free_port())}
    port = int(variables["TRAINWORKS_CONTROL_PORT"])
    with contextlib.ExitStack() as stack:
        (leader,) = stack.enter_context(hosts(tmp_path, "", started=(LEADER,), variables=variables))
        leader.read_until("waiting for")
        worker: Launcher | None = None
        connections: list[socket.socket] = []
        for number in range(2000):
            with contextlib.suppress(OSError):
                opened = socket.create_connection(
                    (LEADER, port), 1.0, source_address=("127.9.9.9", 0)
                )
                opened.setblocking(False)
                with contextlib.suppress(OSError):
                    opened.send(GARBAGE[number % len(GARBAGE)])
                connections.append(opened)
            for old in connections[-30:]:
                with contextlib.suppress(OSError):
                    old.send(b" ")  # slowly on and on
            if len(connections) > 600:
                connections.pop(0).close()
            if number == 500:
                (worker,) = stack.enter_context(
                    hosts(tmp_path, "", started=(WORKER,), variables=variables)
                )
        assert worker is not None
        assert (leader.wait(), worker.wait()) == (0, 0), leader.text + worker.text
        for opened in connections:
            opened.close()
    lines = leader.text.splitlines()
    assert sum("127.9.9.9" in line for line in lines) == 1
    assert len(lines) < 12, leader.text
    assert "Traceback" not in leader.text


def test_garbage_and_stolen_names_change_nothing_but_one_line(tmp_path: Path) -> None:
    variables = {"TRAINWORKS_CONTROL_PORT": str(free_port())}
    address = (LEADER, int(variables["TRAINWORKS_CONTROL_PORT"]))
    script = WAIT.replace("signal.pause()", "0")
    with hosts(tmp_path, script, started=(LEADER,), variables=variables) as (leader,):
        leader.read_until("waiting for")
        for data in GARBAGE:
            with (
                socket.create_connection(address, TIME_OUT) as stranger,
                contextlib.suppress(OSError),
            ):
                stranger.sendall(data)
                stranger.shutdown(socket.SHUT_WR)
                while stranger.recv(4096):
                    pass
        with hosts(tmp_path, script, started=(WORKER,), variables=variables) as (worker,):
            assert (leader.wait(), worker.wait()) == (0, 0)
    assert leader.text.count("dropped a connection") == 1


def test_a_second_host_of_the_same_name_changes_nothing(tmp_path: Path) -> None:
    variables = {"TRAINWORKS_CONTROL_PORT": str(free_port())}
    short = {**variables, "TRAINWORKS_JOIN_LIMIT_SECONDS": "10"}
    with hosts(tmp_path / "job", WAIT, variables=variables) as (leader, worker):
        worker.read_until("ready")
        leader.read_until("ready")
        with hosts(tmp_path / "double", WAIT, started=(WORKER,), variables=short) as (double,):
            assert double.wait() == 66
        assert "it has already joined" in double.failure
        assert leader.process.poll() is worker.process.poll() is None
        leader.process.send_signal(signal.SIGTERM)
        assert (leader.wait(), worker.wait()) == (143, 143)


# --- jobs that may go on with fewer hosts ---------------------------------------------------------
TORCHRUN = """#!/bin/sh
# A stand-in for torchrun that starts its rank again:
# what matters here is what the launchers tell each other.
echo "words: $*"
while [ "${1#--}" != "$1" ]; do shift; done
while true; do
    RANK=0 LOCAL_RANK=0 "$@" &
    wait $!
done
"""


@contextlib.contextmanager
def elastic_job(
    tmp_path: Path, minimum: int, *, heartbeat: float = 12, port: int = 0
) -> Iterator[tuple[Launcher, ...]]:
    torchrun = tmp_path / "torchrun"
    torchrun.write_text(TORCHRUN, encoding="utf-8")
    torchrun.chmod(0o755)
    manifest = write_manifest(
        tmp_path / "image.json", {"python": sys.executable, "torchrun": str(torchrun)}
    )
    hyperparameters: dict[str, Json] = {
        "sagemaker_torch_distributed_enabled": "true",
        "sagemaker_torch_distributed_min_hosts": str(minimum),
    }
    variables = {
        "TRAINWORKS_IMAGE_MANIFEST": str(manifest),
        "TRAINWORKS_HEARTBEAT_LIMIT_SECONDS": str(heartbeat),
        "TRAINWORKS_CONTROL_PORT": str(port or free_port()),
        "MASTER_PORT": str(free_port()),  # jobs of other tests run on this machine, too
    }
    script = "import signal; print('rank runs', flush=True); signal.pause()"
    with hosts(
        tmp_path,
        script,
        names=(LEADER, WORKER, THIRD),
        hyperparameters=hyperparameters,
        variables=variables,
    ) as elastic_launchers:
        for launcher in elastic_launchers:
            launcher.read_until("rank runs")
        yield elastic_launchers


def test_a_job_goes_on_without_a_lost_host_and_says_so(tmp_path: Path) -> None:
    with elastic_job(tmp_path, 2) as (leader, worker, third):
        third.process.kill()
        for launcher in (leader, worker):
            launcher.read_until(
                f"lost host {THIRD}: it closed the connection; continuing with 2 of 3 hosts"
            )
            launcher.read_until("rank runs", 2)
        worker.process.kill()
        assert leader.wait() == 66
    assert leader.failure.startswith(f"lost host {WORKER}: ")
    assert "--nnodes=2:3" in leader.text


def test_a_lost_host_that_wakes_again_is_told(tmp_path: Path) -> None:
    with elastic_job(tmp_path, 2, heartbeat=8) as (leader, worker, third):
        third.process.send_signal(signal.SIGSTOP)
        leader.read_until("continuing with 2 of 3 hosts")
        worker.read_until("continuing with 2 of 3 hosts")
        third.process.send_signal(signal.SIGCONT)
        assert third.wait() == 66, third.text
        assert f"lost host {THIRD}: no message from it for" in third.failure
        assert "the job continues without it" in third.failure
        assert leader.process.poll() is worker.process.poll() is None


def test_a_lost_host_that_is_started_again_is_told(tmp_path: Path) -> None:
    port = free_port()
    with elastic_job(tmp_path, 2, port=port) as (leader, _, third):
        third.process.kill()
        leader.read_until("continuing with 2 of 3 hosts")
        env = {
            "TRAINWORKS_CONTROL_PORT": str(port),
            "TRAINWORKS_IMAGE_MANIFEST": str(tmp_path / "image.json"),
        }
        with Launcher(tmp_path / THIRD, variables=env) as again:
            assert again.wait() == 66
        assert (
            again.failure
            == f"lost host {THIRD}: it closed the connection; the job continues without it"
        )
        assert leader.process.poll() is None


def test_a_job_of_too_few_hosts_ends(tmp_path: Path) -> None:
    with elastic_job(tmp_path, 3) as launchers:
        launchers[2].process.kill()
        assert [launcher.wait() for launcher in launchers[:2]] == [66, 66]
    assert launchers[1].failure.startswith(f"lost host {THIRD}: ")
    assert time.monotonic() - launchers[0].started < TIME_OUT


# --- launchers of other versions ------------------------------------------------------------------
def test_a_host_with_an_older_launcher_is_told_so_and_not_of_a_secret() -> None:
    """An older launcher sends no number of the protocol."""
    with (
        leader_on_a_loop() as (loop, control, _, heard),
        socket.create_connection((LEADER, control.port)) as opened,
    ):
        (message,) = Decoder().feed(
            encode([{"type": "join", "host": WORKER, "job": dict(JOB), "nonce": "c" * 64}])
        )
        send(opened, encode([dict(message)]))
        (answer,) = Decoder().feed(receive(loop, opened))
    assert answer["type"] == "refused"
    assert str(answer["reason"]).startswith(
        "it runs another version of the launcher: use one image"
    )
    assert "it runs another version of the launcher" in "\n".join(heard.log)


def test_a_worker_says_that_the_leader_has_an_older_launcher() -> None:
    with contextlib.ExitStack() as stack:
        fake = FakeLeader(stack)
        opened = fake.accept(stack)
        (message,) = Decoder().feed(receive(fake.loop, opened))
        assert message["protocol"] == PROTOCOL
        # As an older leader answers, whose proof covers something else.
        send(
            opened,
            encode([{"type": "challenge", "nonce": "d" * 64, "proof": "e" * 64, "secret": False}]),
        )
        until(
            fake.loop,
            lambda: any("another version of the launcher" in line for line in fake.heard.log),
        )
    assert not any("JOB_SECRET" in line for line in fake.heard.log)


def test_two_leaders_need_the_secret_to_end_each_other() -> None:
    """A stranger who says that it leads, too, ends no job that has a secret."""
    limits = Limits()
    with leader_on_a_loop(SECRET, limits=limits) as (loop, control, role, heard):
        with socket.create_connection((LEADER, control.port)) as opened:
            nonce = handshake.make_nonce()
            send(
                opened,
                encode([{"type": "leads", "host": "other", "job": dict(JOB), "nonce": nonce}]),
            )
            (answer,) = Decoder().feed(receive(loop, opened))
            assert answer["type"] == "leads"
            proof_transcript = handshake.Transcript(
                identity.as_text(JOB), "other", nonce, str(answer["nonce"])
            )
            assert handshake.is_proof(SECRET, LEADERS, proof_transcript, answer["proof"])
            send(
                opened,
                encode(
                    [
                        {
                            "type": "leads",
                            "proof": handshake.make_proof("guess", WORKERS, proof_transcript),
                        }
                    ]
                ),
            )
            until(loop, lambda: any("dropped a connection" in line for line in heard.log))
        assert role.phase == 0
        assert not heard.outcomes
        with socket.create_connection((LEADER, control.port)) as opened:
            nonce = handshake.make_nonce()
            send(
                opened,
                encode([{"type": "leads", "host": "other", "job": dict(JOB), "nonce": nonce}]),
            )
            (answer,) = Decoder().feed(receive(loop, opened))
            proof_transcript = handshake.Transcript(
                identity.as_text(JOB), "other", nonce, str(answer["nonce"])
            )
            send(
                opened,
                encode(
                    [
                        {
                            "type": "leads",
                            "proof": handshake.make_proof(SECRET, WORKERS, proof_transcript),
                        }
                    ]
                ),
            )
            until(loop, lambda: heard.outcomes)
    assert heard.outcomes[0].cause.startswith(
        f"two hosts lead this job: {LEADER}, which is this host, and other (127.0"
    )


# --- a kernel without IPv6 ------------------------------------------------------------------------
class SocketWithoutIpv6(socket.socket):
    """The sockets of a kernel that was started with ipv6.disable=1."""

    def __init__(self, family: int = -1, *arguments: int, **more: int) -> None:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
        super().__init__(family, *arguments, **more)


def test_the_data_path_is_tested_without_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "socket", SocketWithoutIpv6)
    mark = "00" * 16
    with contextlib.closing(Loop()) as loop:
        listener = data_path._Listener(loop, "", 0, "algo-1", mark)
        trials: list[data_path._Trial] = []

        def ended(trial: data_path._Trial) -> None:
            trials.append(trial)
            if len(trials) == 2:
                loop.stop()

        for address in ("127.0.0.1", "fd00::2"):
            peer = data_path.Peer("algo-1", address, listener.port, mark, "data")
            data_path._Trial(loop, peer, (address, listener.port), "", ended)
        loop.run()
        listener.close()
    results = {trial.peer.address: (trial.reason, trial.refused) for trial in trials}
    assert results == {
        "127.0.0.1": ("", False),
        "fd00::2": (os.strerror(errno.EAFNOSUPPORT), True),
    }


def test_an_address_of_ipv6_is_not_a_host_without_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "socket", SocketWithoutIpv6)
    assert not rivals._is_local(socket.AF_INET6, ("::1", 7777, 0, 0))
    assert rivals._is_local(socket.AF_INET, ("127.0.0.1", 7777))
