"""Test the inbox of a link: with any reader, nothing is lost, doubled or out of order."""

from __future__ import annotations

import contextlib
import queue
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from smdistributed.modelparallel.torch.transport.transport import PeerLost, Transport
from test_transport import close, start

MESSAGES = 400


def until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not reached():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


@pytest.fixture(params=["read by the thread that waits", "a thread for each connection"])
def links(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[Transport]]:
    """Three connected ranks, threads of this process."""
    if request.param == "a thread for each connection":
        monkeypatch.setattr("sys.platform", "darwin")
    ranks = start(3, HashStore())
    yield ranks
    close(ranks)


@pytest.mark.parametrize("seed", range(3))
def test_messages_of_a_peer_keep_their_order_whoever_reads(
    links: list[Transport], seed: int
) -> None:
    sizes = (0, 1, 100, 5_000, 20_000, 300_000)

    def send(link: Transport) -> None:
        choose = random.Random(seed + link.rank)
        for number in range(MESSAGES):
            link.send(0, number, [torch.full((choose.choice(sizes),), number)])

    senders = [threading.Thread(target=send, args=(link,)) for link in links[1:]]
    for sender in senders:
        sender.start()
    choose = random.Random(seed)
    numbers_of_peer: dict[int, list[int]] = {1: [], 2: []}
    for _ in range(2 * MESSAGES):
        if choose.random() < 0.2:  # computes, while the other thread reads
            torch.randn(64, 64).matmul(torch.randn(64, 64))
        _, peer, number, tensors = links[0].inbox.get(timeout=20)
        assert tensors[0] is not None
        assert bool((tensors[0] == number).all())
        numbers_of_peer[peer].append(number)
    for sender in senders:
        sender.join()
    assert numbers_of_peer == {1: list(range(MESSAGES)), 2: list(range(MESSAGES))}
    assert links[0].inbox.empty()


def test_what_arrives_while_nobody_waits_is_read(links: list[Transport]) -> None:
    large = torch.randn(4 << 20)
    # More than the system buffers: returns when it has been read.
    links[1].send(0, "large", [large])
    until(lambda: not links[0].inbox.empty())
    tensor = links[0].inbox.get(timeout=0)[3][0]
    assert tensor is not None
    assert torch.equal(tensor, large)


@pytest.mark.parametrize(
    "mode", [torch.inference_mode, lambda: torch.device("meta")], ids=["inference", "meta"]
)
def test_tensors_do_not_get_the_modes_of_the_thread_that_waits(
    links: list[Transport], mode: Callable[[], contextlib.AbstractContextManager[object]]
) -> None:
    for number in range(20):
        with mode():
            sender = threading.Thread(
                target=links[1].send, args=(0, number, [torch.ones(2, device="cpu")])
            )
            sender.start()
            tensor = links[0].inbox.get(timeout=300)[3][0]
            sender.join()
        assert tensor is not None
        assert not tensor.is_inference()
        assert tensor.tolist() == [1, 1]


def test_waiting_ends_with_its_time(links: list[Transport]) -> None:
    with pytest.raises(queue.Empty):
        links[0].inbox.get(timeout=0.05)
    links[1].send(0, "late", [])
    assert links[0].inbox.get(timeout=300)[2] == "late"


def test_a_message_whose_reading_was_interrupted_is_the_last_of_its_connection() -> None:
    class Interrupted(BaseException):
        pass

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise Interrupted

    links = start(2, HashStore())
    inbox, connection = links[0].inbox, links[1]._sockets[0]
    waits = threading.get_ident()

    def send_half() -> None:
        until(lambda: inbox._waiting)
        connection.sendall((100).to_bytes(4, "little") + b"x" * 50)
        until(next(iter(inbox._sources.values())).buffered)
        signal.pthread_kill(waits, signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, interrupt)
    sender = threading.Thread(target=send_half)
    try:
        sender.start()
        with pytest.raises(Interrupted):
            inbox.get()
    finally:
        signal.signal(signal.SIGALRM, before)
    sender.join()
    connection.sendall(b"x" * 50)
    _, peer, message, _ = inbox.get(timeout=300)
    assert peer == 1
    assert isinstance(message, PeerLost)
    assert "interrupted" in message.reason
    with pytest.raises(queue.Empty):
        inbox.get(timeout=0.1)
    close(links)
