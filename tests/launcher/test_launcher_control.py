"""The control channel against everybody who may connect: hosts with and without the secret, strangers, floods.

Real sockets and real launchers on loopback; what is sent is bounded in number and time.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launcher_support import TIME_OUT, Launcher, environment, free_port, plan, write_inputs, write_manifest

from trainworks_launcher.environment import read_environment
from trainworks_launcher.errors import RefusalError
from trainworks_launcher.network import Limits
from trainworks_launcher.plan import Control
from trainworks_launcher.supervise.control import Events, Role, proof
from trainworks_launcher.supervise.control.leader import Leader
from trainworks_launcher.supervise.control.messages import MESSAGE_LIMIT, Decoder, digest, read_outcome
from trainworks_launcher.supervise.control.strangers import ROOM
from trainworks_launcher.supervise.control.worker import Worker
from trainworks_launcher.supervise.loop import Loop
from trainworks_launcher.supervise.outcome import FAILED, STOPPED, SUCCEEDED, Outcome
from trainworks_launcher.values import Json

LEADER, WORKER, THIRD = "127.0.0.1", "127.0.0.2", "127.0.0.3"
SECRET = "0123456789abcdef-a-long-one"
WAIT = "import signal; print('ready', flush=True); signal.pause()"


# --------------------------------------------------------------------------------------------------------- pure parts
def transcript() -> proof.Transcript:
    return proof.Transcript("digest", "algo-2", "a" * 64, "b" * 64, "ssh-ed25519 HOST", "ssh-ed25519 LEADER")


def test_a_proof_is_of_one_side_one_secret_and_everything_that_was_said() -> None:
    shown = proof.make_proof(SECRET, proof.WORKER, transcript())
    assert proof.is_proof(SECRET, proof.WORKER, transcript(), shown)
    assert not proof.is_proof(SECRET, proof.LEADER, transcript(), shown)
    assert not proof.is_proof(SECRET + "x", proof.WORKER, transcript(), shown)
    for name in vars(transcript()):
        assert not proof.is_proof(SECRET, proof.WORKER, replace(transcript(), **{name: "other"}), shown), name


def test_a_proof_cannot_be_moved_from_one_field_to_the_next() -> None:
    one, other = replace(transcript(), digest="ab", host="c"), replace(transcript(), digest="a", host="bc")
    assert proof.make_proof(SECRET, proof.WORKER, one) != proof.make_proof(SECRET, proof.WORKER, other)


def test_nonces_are_never_the_same() -> None:
    made = {proof.make_nonce() for _ in range(1000)}
    assert len(made) == 1000
    assert all(proof.read_nonce(nonce) for nonce in made)


@given(st.one_of(st.none(), st.booleans(), st.integers(), st.text(), st.lists(st.text())))
def test_nothing_else_is_a_proof(value: Json) -> None:
    assert not proof.is_proof(SECRET, proof.WORKER, transcript(), value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None), max_size=20),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=8), children, max_size=4),
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
KINDS += ("finish", "bye", "alive")
FIELDS: tuple[str, ...] = (
    "host",
    "digest",
    "ssh_host_key",
    "nonce",
    "proof",
    "public_key",
    "reason",
    "ssh_port",
    "outcome",
    "status",
)
FIELDS += ("text",)
MESSAGES = st.builds(
    lambda kind, fields: {**fields, "type": kind},
    st.sampled_from(KINDS) | JSON,
    st.dictionaries(st.sampled_from(FIELDS), JSON | st.sampled_from((LEADER, WORKER, SUCCEEDED, STOPPED, 0, 70000))),
)


def encode(messages: list[dict[str, Json]]) -> bytes:
    return b"".join(json.dumps(message).encode() + b"\n" for message in messages)


@given(st.lists(MESSAGES, max_size=5), st.data())
def test_messages_survive_any_division_into_pieces(messages: list[dict[str, Json]], data: st.DataObject) -> None:
    encoded = encode(messages)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(encoded)), max_size=6)))
    decoder, found = Decoder(), []
    for start, end in zip([0, *cuts], [*cuts, len(encoded)], strict=True):
        found += decoder.feed(encoded[start:end])
    assert json.dumps(found) == json.dumps(messages)


@given(st.lists(st.binary(max_size=200) | st.just(b"\n") | st.just(b"[" * 5000), max_size=8))
def test_bytes_are_messages_or_one_kind_of_error(chunks: list[bytes]) -> None:
    decoder = Decoder()
    with contextlib.suppress(ValueError):
        for chunk in chunks:
            for message in decoder.feed(chunk):
                read_outcome(message)


@pytest.mark.parametrize(
    "data",
    [b"[" * 60_000 + b"\n", b'{"a":' * 10_000 + b"\n", b"9" * 60_000 + b"\n", b"\x00" * (MESSAGE_LIMIT + 1), b"null\n"],
)
def test_deep_long_and_wrong_lines_are_errors_and_not_crashes(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        Decoder().feed(data)


@given(MESSAGES)
def test_an_outcome_can_always_be_written_down(message: dict[str, Json]) -> None:
    outcome = read_outcome(message)
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
    made = read_environment({"TRAINWORKS_JOB_SECRET": SECRET, "SAGEMAKER_BASE_DIR": str(tmp_path)})
    assert made.job_secret == SECRET
    assert SECRET not in repr(made)
    assert SECRET not in plan(environment(hosts=("a", "b"), host="a", job_secret=SECRET)).to_json()


# ------------------------------------------------------------------------------------- roles in this process, on a loop
@dataclass
class Heard:
    """What a role told its supervisor."""

    said: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)

    def events(self) -> Events:
        return Events(
            welcome=lambda *_: self.said.append("welcome"),
            peers=lambda _: self.said.append("peers"),
            go=lambda: self.said.append("go"),
            stop=lambda: self.said.append("stop"),
            restart=lambda: self.said.append("restart"),
            suspect=lambda suspect: self.said.append(f"suspect {suspect.outcome.rank}"),
            judge=lambda outcome: outcome,
            finish=self.outcomes.append,
            left=lambda: self.said.append("left"),
            log=self.log.append,
        )


def in_turns(loop: Loop, seconds: float = 0.01) -> None:
    """Let the loop run for a moment."""
    made = Loop.run
    loop.after(seconds, loop.stop)
    made(loop)
    loop._stopped = False


@contextlib.contextmanager
def leader_on_a_loop(
    secret: str = "", minimum_hosts: int = 0, limits: Limits | None = None
) -> Iterator[tuple[Loop, Control, Leader, Heard]]:
    loop, heard = Loop(), Heard()
    control = Control(LEADER, (LEADER, WORKER), free_port(), minimum_hosts)
    role = Leader(loop, control, limits or Limits(), "none", "", secret, heard.events())
    try:
        role.begin()
        yield loop, control, role, heard
    finally:
        role.close()
        loop.close()


def send(opened: socket.socket, data: bytes) -> None:
    """Send what the other end still takes."""
    with contextlib.suppress(OSError):
        opened.sendall(data)


def join(control: Control, **changes: Json) -> bytes:
    message: dict[str, Json] = {"type": "join", "host": WORKER, "digest": digest(control, "none"), "ssh_host_key": ""}
    return encode([{**message, **changes}])


NETWORK = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@NETWORK
@given(st.lists(MESSAGES, min_size=1, max_size=4), st.sampled_from(["", SECRET]))
def test_no_message_of_a_stranger_reaches_the_job(messages: list[dict[str, Json]], secret: str) -> None:
    with leader_on_a_loop(secret) as (loop, control, _, heard), socket.create_connection((LEADER, control.port)) as it:
        send(it, encode(messages))
        in_turns(loop)
        assert heard.said == ["welcome"]
        assert heard.outcomes == []
        assert len(heard.log) <= 2


@NETWORK
@given(st.lists(MESSAGES, min_size=1, max_size=4))
def test_no_message_of_a_host_of_the_job_breaks_the_leader(messages: list[dict[str, Json]]) -> None:
    with leader_on_a_loop() as (loop, control, role, heard), socket.create_connection((LEADER, control.port)) as it:
        send(it, join(control))
        in_turns(loop)
        role.ready(0)
        send(it, encode(messages))
        in_turns(loop)
        role.ended(Outcome(SUCCEEDED, 0, LEADER))
        in_turns(loop)
        assert len(heard.outcomes) <= 1


@NETWORK
@given(st.lists(MESSAGES, min_size=1, max_size=4), st.sampled_from(["", SECRET]))
def test_no_message_of_a_leader_breaks_a_worker(messages: list[dict[str, Json]], secret: str) -> None:
    loop, heard = Loop(), Heard()
    with socket.create_server((LEADER, 0)) as server:
        control = Control(LEADER, (LEADER, WORKER), server.getsockname()[1])
        role: Role = Worker(loop, control, Limits(), "none", WORKER, "", secret, heard.events())
        role.begin()
        in_turns(loop)
        opened, _ = server.accept()
        with opened:
            send(opened, encode(messages))
            in_turns(loop)
        role.close()
    loop.close()
    assert len(heard.outcomes) <= 1
    if secret:
        assert not {"go", "stop", "restart", "welcome"} & set(heard.said)


def test_a_proof_is_good_for_one_connection_only() -> None:
    with leader_on_a_loop(SECRET) as (loop, control, _, heard):
        nonce = proof.make_nonce()

        def begin_join() -> tuple[socket.socket, Mapping[str, Json]]:
            opened = socket.create_connection((LEADER, control.port))
            send(opened, join(control, nonce=nonce))
            in_turns(loop)
            return opened, Decoder().feed(opened.recv(4096))[0]

        first, challenge = begin_join()
        second, other = begin_join()
        theirs = str(challenge["nonce"])
        said = proof.Transcript(digest(control, "none"), WORKER, nonce, theirs, "", "")
        assert proof.is_proof(SECRET, proof.LEADER, said, challenge["proof"])
        assert other["nonce"] != theirs
        answer = encode([{"type": "answer", "proof": proof.make_proof(SECRET, proof.WORKER, said)}])
        send(second, answer)
        in_turns(loop)
        assert b"refused" in second.recv(4096)
        send(first, answer)
        in_turns(loop)
        assert b"welcome" in first.recv(4096)
        third, again = begin_join()
        assert again["type"] == "refused"
        for opened in (first, second, third):
            opened.close()
        assert "it has already joined" in str(again["reason"])
        assert heard.said == ["welcome"]


def test_strangers_have_bounded_room_and_the_newcomer_gets_in() -> None:
    with contextlib.ExitStack() as stack:
        loop, control, _, heard = stack.enter_context(leader_on_a_loop())
        silent = [stack.enter_context(socket.create_connection((LEADER, control.port))) for _ in range(ROOM + 50)]
        in_turns(loop, 0.2)
        host = stack.enter_context(socket.create_connection((LEADER, control.port)))
        send(host, join(control))
        in_turns(loop)
        assert b"welcome" in host.recv(4096)
        silent[0].settimeout(TIME_OUT)
        assert silent[0].recv(1) == b""  # the oldest had to go
        silent[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            silent[-1].recv(1)
        assert [line for line in heard.log if "dropped" in line] == [
            "dropped a connection from 127.0.0.1: too many connections; more from that address are not logged"
        ]


def test_a_leader_of_many_hosts_may_open_as_many_connections() -> None:
    kept = resource.getrlimit(resource.RLIMIT_NOFILE)
    many = tuple(f"algo-{number}" for number in range(1, 2001))
    loop, heard = Loop(), Heard()
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, kept[1]))
    try:
        role = Leader(loop, Control(many[0], many, free_port()), Limits(), "none", "", "", heard.events())
        role.begin()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= min(2000 + ROOM, kept[1])
        role.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, kept)
        loop.close()


def test_the_log_names_a_few_strangers_and_then_says_that_it_stops() -> None:
    with leader_on_a_loop() as (loop, control, _, heard):
        for number in range(40):
            with socket.create_connection((LEADER, control.port), source_address=(f"127.0.1.{number + 1}", 0)) as it:
                send(it, b"hello\n")
                in_turns(loop, 0.005)
        dropped = [line for line in heard.log if "dropped" in line]
        assert len(dropped) == 6
        assert dropped[-1] == "more such connections are dropped and not logged"


def test_a_host_that_restarts_before_the_start_may_join_again() -> None:
    with leader_on_a_loop() as (loop, control, role, heard):
        role.ready(0)
        with socket.create_connection((LEADER, control.port)) as it:
            send(it, join(control))
            in_turns(loop)
        in_turns(loop)
        assert heard.outcomes == []
        with socket.create_connection((LEADER, control.port)) as it:
            send(it, join(control) + encode([{"type": "ready", "ssh_port": 0}]))
            in_turns(loop)
            assert heard.said == ["welcome", "peers", "go"]
        in_turns(loop)
        # After the start a host that leaves is lost, and lost it stays.
        assert [(outcome.kind, outcome.host) for outcome in heard.outcomes] == [(FAILED, WORKER)]


def test_a_host_that_leaves_before_the_start_and_stays_away_is_lost() -> None:
    with leader_on_a_loop(limits=Limits(heartbeat=0.05)) as (loop, control, role, heard):
        role.ready(0)
        with socket.create_connection((LEADER, control.port)) as it:
            send(it, join(control))
            in_turns(loop)
        in_turns(loop)
        assert "it may come again within 0.05 s" in heard.log[-1]
        in_turns(loop, 0.1)
        assert [(outcome.kind, outcome.host) for outcome in heard.outcomes] == [(FAILED, WORKER)]


def test_a_job_that_may_lose_hosts_starts_without_one_that_never_came() -> None:
    with leader_on_a_loop(minimum_hosts=1, limits=Limits(join=0.05)) as (loop, control, role, heard):
        role.ready(0)
        in_turns(loop, 0.1)
        assert heard.said == ["welcome", "peers", "go"]
        assert f"lost host {WORKER}: did not join within 0.05 s; going on with 1 of 2 hosts" in heard.log
        with socket.create_connection((LEADER, control.port)) as late:
            send(late, join(control))
            in_turns(loop)
            assert read_outcome(Decoder().feed(late.recv(4096))[0]).kind == FAILED
        role.ended(Outcome(SUCCEEDED, 0, LEADER))
        assert [outcome.kind for outcome in heard.outcomes] == [SUCCEEDED]


def test_a_job_that_may_lose_hosts_starts_without_one_that_is_never_prepared() -> None:
    with leader_on_a_loop(minimum_hosts=1, limits=Limits(prepare=0.05)) as (loop, control, role, heard):
        role.ready(0)
        with socket.create_connection((LEADER, control.port)) as it:
            send(it, join(control))
            in_turns(loop, 0.1)
            assert heard.said == ["welcome", "peers", "go"]
            assert "were not prepared" not in "".join(outcome.text for outcome in heard.outcomes)


# --------------------------------------------------------------------------------------------- real launchers, loopback
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
    """Launchers of one job. started: the hosts that are, default all. own: variables of single hosts."""
    shared = {"TRAINWORKS_CONTROL_PORT": str(free_port()), **(variables or {})}
    with contextlib.ExitStack() as stack:
        made = []
        for host in started or names:
            config: dict[str, Json] = {"hosts": list(names), "current_host": host, "network_interface_name": "lo"}
            write_inputs(tmp_path / host, script, hyperparameters or {}, config)
            environment_ = {**shared, **(own or {}).get(host, {})}
            made.append(stack.enter_context(Launcher(tmp_path / host, variables=environment_)))
        yield tuple(made)


def test_hosts_with_the_secret_join_and_ranks_do_not_see_it(tmp_path: Path) -> None:
    script = "import os; print('names', sorted(name for name in os.environ if 'SECRET' in name))"
    with hosts(tmp_path, script, variables={"TRAINWORKS_JOB_SECRET": SECRET}) as made:
        assert [launcher.wait() for launcher in made] == [0, 0], made[0].text + made[1].text
    for launcher in made:
        assert "names []" in launcher.text
        assert SECRET not in launcher.text


def test_a_host_with_a_secret_refuses_a_leader_without_one(tmp_path: Path) -> None:
    with hosts(tmp_path, "", own={WORKER: {"TRAINWORKS_JOB_SECRET": SECRET}}) as (leader, worker):
        assert (leader.wait(), worker.wait()) == (66, 66)
    expected = f"host {WORKER} has TRAINWORKS_JOB_SECRET, the leader {LEADER} has none: set it to one value on every"
    assert leader.failure.startswith(expected)
    assert worker.failure == leader.failure


def test_hosts_without_the_leaders_secret_do_not_get_in(tmp_path: Path) -> None:
    # Long enough for three hosts to start on a busy machine.
    limit = {"TRAINWORKS_JOIN_LIMIT_SECONDS": "4"}
    own = {LEADER: {"TRAINWORKS_JOB_SECRET": SECRET}, THIRD: {"TRAINWORKS_JOB_SECRET": SECRET + "x"}}
    with hosts(tmp_path, "", names=(LEADER, WORKER, THIRD), variables=limit, own=own) as made:
        assert [launcher.wait() for launcher in made] == [66, 66, 66]
    leader, none, another = made
    assert f"hosts that did not join within 4 s: {WORKER}" in leader.failure
    assert THIRD in leader.failure
    for worker, words in (
        (none, "it has no TRAINWORKS_JOB_SECRET, and the leader has one"),
        (another, "it does not know this host's TRAINWORKS_JOB_SECRET"),
    ):
        assert f"the leader {LEADER} did not let this host in" in worker.failure
        assert words in worker.failure
        assert worker.text.count(words) <= 3
    assert not any(SECRET in launcher.text for launcher in made)


GARBAGE = (
    b"GET / HTTP/1.1\r\n\r\n",
    b"\xff" * 200_000,
    b'{"type":"join","host":"evil"}\n',
    b'{"type":"join","host":{"a":[]},"digest":1e999,"ssh_host_key":null}\n',
    b"[]\n" * 9,
    b"[" * 4000 + b"\n",
    b'{"type":"finish","outcome":"failed","status":9,"host":"x","text":"evil"}\n{"type":"go"}\n',
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
        kept: list[socket.socket] = []
        for number in range(2000):
            with contextlib.suppress(OSError):
                opened = socket.create_connection((LEADER, port), 1.0, source_address=("127.9.9.9", 0))
                opened.setblocking(False)
                with contextlib.suppress(OSError):
                    opened.send(GARBAGE[number % len(GARBAGE)])
                kept.append(opened)
            for old in kept[-300:]:
                with contextlib.suppress(OSError):
                    old.send(b" ")  # slowly on and on
            if len(kept) > 600:
                kept.pop(0).close()
            if number == 500:
                (worker,) = stack.enter_context(hosts(tmp_path, "", started=(WORKER,), variables=variables))
        assert worker is not None
        assert (leader.wait(), worker.wait()) == (0, 0), leader.text + worker.text
        for opened in kept:
            opened.close()
    lines = leader.text.splitlines()
    assert sum("127.9.9.9" in line for line in lines) == 1
    assert len(lines) < 10, leader.text
    assert "Traceback" not in leader.text


def test_garbage_and_stolen_names_change_nothing_but_one_line(tmp_path: Path) -> None:
    variables = {"TRAINWORKS_CONTROL_PORT": str(free_port())}
    address = (LEADER, int(variables["TRAINWORKS_CONTROL_PORT"]))
    with hosts(tmp_path, WAIT.replace("signal.pause()", "0"), started=(LEADER,), variables=variables) as (leader,):
        leader.read_until("waiting for")
        for data in GARBAGE:
            with socket.create_connection(address, TIME_OUT) as stranger, contextlib.suppress(OSError):
                stranger.sendall(data)
                stranger.shutdown(socket.SHUT_WR)
                while stranger.recv(4096):
                    pass
        with hosts(tmp_path, "", started=(WORKER,), variables=variables) as (worker,):
            assert (leader.wait(), worker.wait()) == (0, 0)
    assert leader.text.count("dropped a connection") == 1


def test_a_second_host_of_the_same_name_changes_nothing(tmp_path: Path) -> None:
    variables = {"TRAINWORKS_CONTROL_PORT": str(free_port()), "TRAINWORKS_JOIN_LIMIT_SECONDS": "1"}
    with hosts(tmp_path / "job", WAIT, variables=variables) as (leader, worker):
        worker.read_until("ready")
        leader.read_until("ready")
        with hosts(tmp_path / "double", "", started=(WORKER,), variables=variables) as (double,):
            assert double.wait() == 66
        assert "it has already joined" in double.failure
        assert leader.process.poll() is worker.process.poll() is None
        leader.process.send_signal(signal.SIGTERM)
        assert (leader.wait(), worker.wait()) == (143, 143)


# ------------------------------------------------------------------------------- jobs that may go on with fewer hosts
TORCHRUN = """#!/bin/sh
# A stand-in for torchrun that starts its rank again: what matters here is what the launchers tell each other.
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
    manifest = write_manifest(tmp_path / "image.json", {"python": sys.executable, "torchrun": str(torchrun)})
    asked: dict[str, Json] = {
        "sagemaker_torch_distributed_enabled": "true",
        "sagemaker_torch_distributed_min_hosts": str(minimum),
    }
    variables = {
        "TRAINWORKS_IMAGE_MANIFEST": str(manifest),
        "TRAINWORKS_HEARTBEAT_LIMIT_SECONDS": str(heartbeat),
        "TRAINWORKS_CONTROL_PORT": str(port or free_port()),
    }
    script = "import signal; print('rank runs', flush=True); signal.pause()"
    with hosts(tmp_path, script, names=(LEADER, WORKER, THIRD), hyperparameters=asked, variables=variables) as made:
        for launcher in made:
            launcher.read_until("rank runs")
        yield made


def test_a_job_goes_on_without_a_lost_host_and_says_so(tmp_path: Path) -> None:
    with elastic_job(tmp_path, 2) as (leader, worker, third):
        third.process.kill()
        for launcher in (leader, worker):
            launcher.read_until(f"lost host {THIRD}: it closed the connection; going on with 2 of 3 hosts")
            launcher.read_until("rank runs", 2)
        worker.process.kill()
        assert leader.wait() == 66
    assert leader.failure.startswith(f"lost host {WORKER}: ")
    assert "--nnodes=2:3" in leader.text


def test_a_lost_host_that_wakes_again_is_told(tmp_path: Path) -> None:
    with elastic_job(tmp_path, 2, heartbeat=3) as (leader, worker, third):
        third.process.send_signal(signal.SIGSTOP)
        leader.read_until("going on with 2 of 3 hosts")
        worker.read_until("going on with 2 of 3 hosts")
        third.process.send_signal(signal.SIGCONT)
        assert third.wait() == 66, third.text
        assert f"lost host {THIRD}: no message from it for" in third.failure
        assert "the job goes on without it" in third.failure
        assert leader.process.poll() is worker.process.poll() is None


def test_a_lost_host_that_is_started_again_is_told(tmp_path: Path) -> None:
    port = free_port()
    with elastic_job(tmp_path, 2, port=port) as (leader, _, third):
        third.process.kill()
        leader.read_until("going on with 2 of 3 hosts")
        env = {
            "TRAINWORKS_CONTROL_PORT": str(port),
            "TRAINWORKS_IMAGE_MANIFEST": str(tmp_path / "image.json"),
        }
        with Launcher(tmp_path / THIRD, variables=env) as again:
            assert again.wait() == 66
        assert again.failure == f"lost host {THIRD}: it closed the connection; the job goes on without it"
        assert leader.process.poll() is None


def test_a_job_of_too_few_hosts_ends(tmp_path: Path) -> None:
    with elastic_job(tmp_path, 3) as made:
        made[2].process.kill()
        assert [launcher.wait() for launcher in made[:2]] == [66, 66]
    assert made[1].failure.startswith(f"lost host {THIRD}: ")
    assert time.monotonic() - made[0].started < TIME_OUT
