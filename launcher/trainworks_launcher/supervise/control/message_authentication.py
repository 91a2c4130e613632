"""The seal of a message: proof that the message comes from the host that joined, and in the order
of sending. Pure.

Both sides derive a key in the join (``handshake.make_key``), and from this key one for each
direction. A seal is HMAC-SHA256 over the number of the message on its connection and its bytes. So
a message that was changed, left out, repeated, or forwarded by another program is not accepted.
Messages are not encrypted.
"""

from __future__ import annotations

import hmac

LEADER, WORKER = "leader", "worker"
"""The two sides of a connection. A message of one side cannot be sent back as one of the other."""

SEAL_BYTES = 65
"""Size of a seal: a blank and 64 hexadecimal digits."""

_COUNT_BYTES = 8
"""Size of the number of a message in its seal."""


class Seal:
    """The seals of one connection, on one side."""

    def __init__(self, key: bytes, side: str) -> None:
        """Derive the keys of the two directions.

        Args:
            key: The key of the connection (``handshake.make_key``).
            side: The side of this host: ``LEADER`` or ``WORKER``.
        """
        other = WORKER if side == LEADER else LEADER
        self._side, self._other_side = side.encode(), other.encode()
        self._own, self._other = (
            hmac.digest(key, who, "sha256") for who in (self._side, self._other_side)
        )
        self._probes = hmac.digest(key, b"probes", "sha256")
        self._sent = self._heard = 0

    def closed(self, line: bytes) -> bytes:
        """Return the next line to send with its seal; the number of sent messages grows."""
        self._sent += 1
        return line + b" " + _seal(self._own, self._sent, line)

    def opened(self, line: bytes) -> bytes:
        """Check the seal of the next received line; return the line without the seal.

        The number of received messages grows, so each line is checked once.

        Raises:
            ValueError: The line is not the other side's next message.
        """
        line, _, shown = line.rpartition(b" ")
        self._heard += 1
        if not hmac.compare_digest(_seal(self._other, self._heard, line), shown):
            raise ValueError("a message does not have the seal of this job")
        return line

    def probe(self, count: int) -> str:
        """Return the proof for a probe of this side outside the connection.

        Args:
            count: Number of the probe, below 2**63.

        Returns:
            64 hexadecimal digits.
        """
        return _seal(self._probes, count, self._side).decode()

    def is_probe(self, count: int, shown: str) -> bool:
        """Return whether a text is the other side's proof for the probe with this number."""
        return hmac.compare_digest(
            _seal(self._probes, count, self._other_side), shown.encode("utf-8", "replace")
        )


def _seal(key: bytes, count: int, line: bytes) -> bytes:
    """Return the HMAC of a number and a line, as 64 hexadecimal digits.

    count: below 2**64; a larger one raises OverflowError.
    """
    return hmac.digest(key, count.to_bytes(_COUNT_BYTES, "big") + line, "sha256").hex().encode()
