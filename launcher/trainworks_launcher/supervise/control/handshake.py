"""The handshake of a join: proofs that both ends know the job's secret, without sending it, and the
key for the messages afterwards.

HMAC-SHA256, challenge and response. A job without a secret uses an empty one. Its proofs prove
nothing, and its key is known to every program that has read the join, but to no other.

A proof covers everything that the two sides send when a host joins: its name, the job and a fresh
nonce of each side. So a stranger in between cannot use a proof on another connection, for another
host or another job.

The leader shows its proof first, to every host that asks. From the proof the secret can only be
guessed, which a long secret (``names.JOB_SECRET_MINIMUM`` characters) makes hopeless.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
from typing import Mapping, NamedTuple

from trainworks_launcher.contract.json_values import Json, text

_HEXADECIMAL = re.compile(r"[0-9a-f]{64}")


class Credentials(NamedTuple):
    """A host's name and job, and the secret with which it proves them.

    Attributes:
        host: Its name.
        job: The identity of its job.
        secret: Of the job; ``""`` for none.
    """

    host: str
    job: Mapping[str, Json]
    secret: str


class Transcript(NamedTuple):
    """The values that a proof covers.

    Attributes:
        job: Identity of the job, as the joining host has sent it.
        host: Host that joins.
        worker_nonce: 64 hexadecimal digits, fresh for each connection.
        leader_nonce: As ``worker_nonce``.
    """

    job: str
    host: str
    worker_nonce: str
    leader_nonce: str


def make_nonce() -> str:
    """Return a fresh nonce: 64 hexadecimal digits."""
    # As secrets.token_hex, which loads more modules than all of this file.
    return os.urandom(32).hex()


def read_nonce(value: Json) -> str:
    """Return the nonce (or proof) in a message; "" if it has another form."""
    if not isinstance(value, str) or not _HEXADECIMAL.fullmatch(value):
        return ""
    return value


def make_proof(secret: str, side: str, transcript: Transcript) -> str:
    """Return the proof that a side knows the secret, for this transcript only.

    Args:
        secret: The job's secret; ``""`` for none.
        side: ``LEADER`` or ``WORKER``: a proof of one side is none of the other.
        transcript: The values of the join.

    Returns:
        64 hexadecimal digits.
    """
    message = json.dumps([side, *transcript]).encode()
    return hmac.new(secret.encode("utf-8", "surrogateescape"), message, hashlib.sha256).hexdigest()


def make_key(secret: str, transcript: Transcript) -> bytes:
    """Return the key of the connection with this transcript; 32 bytes."""
    return bytes.fromhex(make_proof(secret, "key", transcript))


def is_proof(secret: str, side: str, transcript: Transcript, received: Json) -> bool:
    """Return whether a value from the other end is the proof that ``make_proof`` returns.

    Takes the same time for every wrong value, so that it cannot be guessed digit by digit.
    """
    expected = make_proof(secret, side, transcript).encode()
    return hmac.compare_digest(expected, text(received).encode("utf-8", "replace"))
