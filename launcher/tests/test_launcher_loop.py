"""Test the event loop of the launcher: the effects of callbacks on each other."""

from __future__ import annotations

import socket

from trainworks_launcher.supervise.event_loop import READ, Loop


def test_a_callback_may_close_a_socket_that_is_ready_in_the_same_round() -> None:
    """Two connections end at once, and the first to be served closes both: a
    data path that is over does so.
    """
    loop = Loop()
    pairs = [socket.socketpair() for _ in range(2)]
    served = []

    def close_both(events: int) -> None:
        served.append(events)
        for mine, _ in pairs:
            loop.unwatch(mine)
            mine.close()
        loop.after(0, loop.stop)

    for mine, other in pairs:
        loop.watch(mine, READ, close_both)
        other.sendall(b"x")
    loop.run()
    assert len(served) == 1
    loop.unwatch(pairs[0][0])
    loop.close()
    for _, other in pairs:
        other.close()
