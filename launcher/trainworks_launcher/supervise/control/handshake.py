"""The join: proofs that both ends know the job's secret, without sending it, and the key for what
they say afterwards.

HMAC-SHA256, challenge and response. A job without a secret joins in the same way with an empty one.
Its proofs prove nothing, and its key is known to everybody who has read the join, but to nobody who
has not.

A proof covers everything that the two sides tell each other when a host joins: its name, the job
and a fresh nonce of each side. A stranger in between can therefore not take a proof to another
connection, another host or another job.

The leader shows its proof first, to every host that asks: from it the secret can only be guessed,
which a long one (``names.JOB_SECRET_MINIMUM`` characters) makes hopeless.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
from typing import NamedTuple

from trainworks_launcher.contract.json_values import Json, text

_HEXADECIMAL = re.compile(r"[0-9a-f]{64}")


class Transcript(NamedTuple):
    """What a proof covers.

    Attributes:
        job: What the host that joins says of its job (``identity``).
        host: Host that joins.
        worker_nonce: 64 hexadecimal digits, fresh for each connection.
        leader_nonce: As ``worker_nonce``.
    """

    job: str
    host: str
    worker_nonce: str
    leader_nonce: str


def make_nonce() -> str:
    """Return a fresh nonce."""
    return os.urandom(32).hex()  # as secrets.token_hex, which loads more modules than all of this


def read_nonce(value: Json) -> str:
    """Return the nonce (or proof) in a message, "" if it is none."""
    return value if isinstance(value, str) and _HEXADECIMAL.fullmatch(value) else ""


def make_proof(secret: str, side: str, transcript: Transcript) -> str:
    """That ``side`` knows the secret, for this transcript only."""
    said = json.dumps([side, *transcript]).encode()
    return hmac.new(secret.encode("utf-8", "surrogateescape"), said, hashlib.sha256).hexdigest()


def make_key(secret: str, transcript: Transcript) -> bytes:
    """Return the key of the connection that was proved so; 32 bytes."""
    return bytes.fromhex(make_proof(secret, "key", transcript))


def is_proof(secret: str, side: str, transcript: Transcript, shown: Json) -> bool:
    """Return whether ``shown`` is that proof; takes the same time wherever it is wrong."""
    return hmac.compare_digest(
        make_proof(secret, side, transcript).encode(), text(shown).encode("utf-8", "replace")
    )
