"""Connections between ranks: who may connect, where, for how long; and messages with tensors.

The ranks are threads of this process, with one store. Each has its own sockets, as a process would.
"""

from __future__ import annotations

import contextlib
import pickle
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore, PrefixStore

from smdistributed.modelparallel.torch.transport.connect import (
    Rendezvous,
    StartError,
    connect,
    own_address,
)
from smdistributed.modelparallel.torch.transport.transport import LinkGroup, PeerLost, Transport
from trainworks_testing.clock import assert_within, start_clock

LOCAL = ("127.0.0.1", 29500)


def start(
    world: int, store: HashStore, masters: Sequence[tuple[str, int]] | None = None
) -> list[Transport]:
    """Return the connected link of each rank."""

    def rank_starts(rank: int) -> Transport:
        others = [peer for peer in range(world) if peer != rank]
        master = masters[rank] if masters else LOCAL
        return Transport(
            LinkGroup(rank, range(world)),
            connect(Rendezvous(store, world, master), rank, {"pp": others}, timeout=300)["pp"],
        )

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(rank_starts, range(world)))


def close(links: Sequence[Transport]) -> None:
    for link in links:
        link.close()


def address(store: HashStore, rank: int) -> tuple[str, int]:
    host, port = PrefixStore("smp/transport", store).get(f"address/{rank}").decode().split()
    return host, int(port)


LAYOUTS = {(4, 3): (1, 4), (1, 3, 4, 4): (48, 1, 12, 3), (3, 4, 2): (4, 1, 12)}
"""Strides of the sent tensors that fill their memory in another order than a
contiguous one, by shape.
"""


def test_every_kind_of_tensor_arrives_as_it_was_sent() -> None:
    links = start(3, HashStore())
    sent = [
        torch.arange(12, dtype=torch.float64).reshape(3, 4).t(),
        torch.arange(48.0).reshape(1, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        torch.arange(24.0).reshape(2, 3, 4).permute(1, 2, 0),
        torch.arange(24.0).reshape(6, 4)[:, :3],
        torch.arange(3.0).expand(2, 3),
        None,
        torch.tensor(3.5, dtype=torch.bfloat16),
        torch.empty(0, 7),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j, 3 - 1j]).conj(),
        torch.randint(0, 255, (3 << 20,), dtype=torch.uint8),
        torch.randn(5, requires_grad=True),
    ]
    links[2].send(0, {"any": ("object", 1)}, sent)
    links[1].send(0, "second", [])
    received = {}
    for _ in range(2):
        link, peer, message, tensors = links[0].inbox.get(timeout=300)
        assert link is links[0]
        received[peer] = message, tensors
    close(links)
    assert received[1] == ("second", [])
    message, tensors = received[2]
    assert message == {"any": ("object", 1)}
    for was, now in zip(sent, tensors, strict=True):
        if was is None:
            assert now is None
        else:
            assert now is not None
            assert (now.dtype, now.shape, now.requires_grad) == (was.dtype, was.shape, False)
            assert torch.equal(now, was.detach())
            assert now.stride() == LAYOUTS.get(tuple(was.shape), now.contiguous().stride())
    assert links[2].bytes_sent == sum(t.numel() * t.element_size() for t in sent if t is not None)


def test_both_ends_may_send_more_than_the_system_buffers() -> None:
    links = start(2, HashStore())
    large = torch.randn(4 << 20)

    def send(link: Transport) -> None:
        for _ in range(3):
            link.send(1 - link.rank, "large", [large])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(send, links))
    tensors = [links[n % 2].inbox.get(timeout=300)[3][0] for n in range(6)]
    close(links)
    assert all(t is not None and torch.equal(t, large) for t in tensors)


def test_the_end_of_a_peer_is_a_message() -> None:
    links = start(2, HashStore())
    links[1].send(0, "last words", [])
    links[1].close()
    messages = [links[0].inbox.get(timeout=300)[2] for _ in range(2)]
    links[0].close()
    assert messages[0] == "last words"
    assert isinstance(messages[1], PeerLost)
    with pytest.raises(queue.Empty):  # a link that closes itself tells itself nothing
        links[1].inbox.get(timeout=0.1)


class Marks:
    """Makes a file when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return self.path.touch, ()


def test_strangers_are_dropped_and_delay_nobody(tmp_path: Path) -> None:
    store = HashStore()
    attack = pickle.dumps((Marks(tmp_path / "unpickled"), []))
    links: list[Transport | None] = [None, None]

    def rank_starts(rank: int) -> None:
        links[rank] = Transport(
            LinkGroup(rank, range(2)),
            connect(Rendezvous(store, 2, LOCAL), rank, {"pp": [1 - rank]}, timeout=300)["pp"],
        )

    first = threading.Thread(target=rank_starts, args=(0,))
    first.start()
    # Rank 0 publishes its address once rank 1 has joined, so a stranger plays rank 1's first part.
    PrefixStore("smp/transport", store).set("candidate/1", "127.0.0.1")
    strangers = []
    for data in (
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"x" * 100,
        b"\0" * 52,
        b"short",
        struct.pack("<I", len(attack)) + attack,
    ):
        stranger = socket.create_connection(address(store, 0), timeout=300)
        stranger.sendall(data)
        strangers.append(stranger)
    begun = start_clock()
    rank_starts(1)
    first.join(20)
    assert_within(4, begun, time.monotonic(), "a silent stranger delayed the start")
    zero, one = links
    assert zero is not None
    assert one is not None
    for stranger in strangers:
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(100) == b"", "a stranger got an answer"
        stranger.close()
    one.send(0, "hello", [])
    assert zero.inbox.get(timeout=300)[1:3] == (1, "hello")
    assert not (tmp_path / "unpickled").exists()
    close([zero, one])


@contextlib.contextmanager
def another_program_as_rank_0(answer: Callable[[socket.socket], None]) -> Iterator[HashStore]:
    """Give the store of a job in which rank 0 has the address of another program.

    The program reads the greeting of one rank, and then calls `answer` with the connection.
    """
    store = PrefixStore("smp/transport", plain := HashStore())
    with socket.create_server(("127.0.0.1", 0)) as other:
        store.set("token", "ab" * 64)
        store.set("candidate/0", "127.0.0.1")
        store.set("address/0", f"127.0.0.1 {other.getsockname()[1]}")

        def serve() -> None:
            connection, _ = other.accept()
            with connection:
                connection.recv(100)
                answer(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        yield plain
        thread.join()


def test_another_program_at_a_rank_s_address_is_refused() -> None:
    def answer(connection: socket.socket) -> None:
        connection.sendall(b"x" * 32)

    message = r"rank 1 cannot connect with rank 0: .* is another program"
    with another_program_as_rank_0(answer) as store, pytest.raises(StartError, match=message):
        connect(Rendezvous(store, 2, LOCAL), 1, {"pp": [0]}, timeout=300)


def test_an_answer_in_small_parts_does_not_prolong_the_start() -> None:
    """Each part comes within the limit of one read, and the last one after the end of the start."""
    timeout = 1.0

    def answer(connection: socket.socket) -> None:
        connection.settimeout(0.6 * timeout)
        with contextlib.suppress(ConnectionError):
            for part in (b"x", b"x" * 31):
                with contextlib.suppress(TimeoutError):
                    connection.recv(1)  # nothing comes
                connection.sendall(part)

    message = r"cannot connect with rank 0: .* \(timed out\)"
    with another_program_as_rank_0(answer) as store, pytest.raises(StartError, match=message):
        connect(Rendezvous(store, 2, LOCAL), 1, {"pp": [0]}, timeout=timeout)


def test_a_rank_that_cannot_be_reached_is_named_at_once() -> None:
    """Rank 1 does not wait for rank 2 first, which may never come."""
    store = PrefixStore("smp/transport", plain := HashStore())
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    store.set("token", "ab" * 64)
    for rank in (0, 2):
        store.set(f"candidate/{rank}", "127.0.0.1")
    store.set("address/0", f"127.0.0.1 {port}")
    begun, timeout = time.monotonic(), 60
    with pytest.raises(StartError, match=rf"rank 1 cannot connect with rank 0: .* port {port}"):
        connect(Rendezvous(plain, 3, LOCAL), 1, {"pp": [0, 2]}, timeout=timeout)
    assert time.monotonic() - begun < timeout, "the error came with the end of the start"


@pytest.mark.parametrize(
    ("prepare", "text"),
    [
        (lambda _store: None, "rank 2 had not joined the job after 0.5 s"),
        (
            lambda store: store.set("candidate/2", "127.0.0.1"),
            "rank 2 had not connected with rank 0 after 0.5 s",
        ),
    ],
    ids=["never started", "stopped while it started"],
)
def test_a_missing_rank_is_named(prepare: Callable[[Any], None], text: str) -> None:
    store = HashStore()
    prepare(PrefixStore("smp/transport", store))

    def rank_starts(rank: int) -> str:
        others = [peer for peer in range(3) if peer != rank]
        with pytest.raises(StartError) as caught:
            connect(Rendezvous(store, 3, LOCAL), rank, {"pp": others}, timeout=0.5)
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        errors = list(pool.map(rank_starts, range(2)))
    assert text in errors[0]
    assert "check that the hosts reach each other" in errors[0]


def test_ranks_of_one_host_stay_on_loopback() -> None:
    store = HashStore()
    close(start(2, store))
    assert [address(store, rank)[0] for rank in range(2)] == ["127.0.0.1", "127.0.0.1"]


def test_a_master_that_knows_itself_as_loopback_meets_ranks_of_other_hosts() -> None:
    try:
        outside = own_address("192.0.2.1", 9)
    except StartError:
        pytest.skip("this machine has no network address")
    store = HashStore()
    links = start(3, store, [LOCAL, (outside, 29500), LOCAL])
    links[0].send(2, "hello", [])
    assert links[2].inbox.get(timeout=300)[1:3] == (0, "hello")
    close(links)
    assert [address(store, rank)[0] for rank in range(3)] == [outside] * 3


def test_an_unknown_master_is_named() -> None:
    with pytest.raises(
        StartError, match=r"cannot find the way to the master: no\.such\.host\.invalid"
    ):
        own_address("no.such.host.invalid", 1)
