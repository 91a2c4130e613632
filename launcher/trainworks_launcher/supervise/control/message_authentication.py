"""The seal of a message: proof that it comes from the host that joined, and in
the order in which it was sent. Pure.

Both sides derive a key in the join (``handshake.make_key``), and of it one for each direction. A
seal is HMAC-SHA256 over the number of the message on its connection and its bytes. A message that
was changed, left out, repeated, or sent on by somebody else is therefore not opened. Messages are
not encrypted.
"""

from __future__ import annotations

import hmac

LEADER, WORKER = "leader", "worker"
"""The two sides of a connection: what one has said cannot be sent back to it as the other's."""

SEAL_BYTES = 65
"""What a seal adds to a message: a blank and 64 hexadecimal digits."""


class Seal:
    """One side's seals of one connection."""

    def __init__(self, key: bytes, side: str) -> None:
        """side: ``LEADER`` or ``WORKER``, whichever this host is."""
        other = WORKER if side == LEADER else LEADER
        self._side, self._other_side = side.encode(), other.encode()
        self._own, self._other = (
            hmac.digest(key, who, "sha256") for who in (self._side, self._other_side)
        )
        self._probes = hmac.digest(key, b"probes", "sha256")
        self._sent = self._heard = 0

    def closed(self, line: bytes) -> bytes:
        """Return the next line to send, with its seal."""
        self._sent += 1
        return line + b" " + _seal(self._own, self._sent, line)

    def opened(self, line: bytes) -> bytes:
        """Return the next line that came, without its seal.

        Raises ValueError if it is not the other's next one.
        """
        line, _, shown = line.rpartition(b" ")
        self._heard += 1
        if not hmac.compare_digest(_seal(self._other, self._heard, line), shown):
            raise ValueError("a message does not have the seal of this job")
        return line

    def probe(self, count: int) -> str:
        """Return the proof that this side says something outside the
        connection, for the ``count``-th time.
        """
        return _seal(self._probes, count, self._side).decode()

    def is_probe(self, count: int, shown: str) -> bool:
        """Return whether ``shown`` is the other side's proof."""
        return hmac.compare_digest(
            _seal(self._probes, count, self._other_side), shown.encode("utf-8", "replace")
        )


def _seal(key: bytes, count: int, line: bytes) -> bytes:
    return hmac.digest(key, count.to_bytes(8, "big") + line, "sha256").hex().encode()
