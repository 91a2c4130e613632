"""Checks OpenPGP signatures with GnuPG, in a keyring with one key that exists during one check."""

from __future__ import annotations

import os
import shutil
from itertools import pairwise
from pathlib import Path

from trainworks.engine.subprocesses import Finished, run
from trainworks.engine.temporary_folders import private_folder
from trainworks.errors import LockError

SECONDS = 600.0
"""How long one call of the program may take: it reads files of gigabytes."""

TROUBLES = {
    "EXPKEYSIG": "the key has expired",
    "REVKEYSIG": "the key has been revoked",
    "EXPSIG": "the signature has expired",
    "BADSIG": "the file or its signature was changed",
}
"""GnuPG's status words for signatures that are not good, and their meaning."""


def check_signature(file: Path, signature: Path, key: Path, fingerprint: str) -> None:
    """Check that the key with this fingerprint, and no other, has signed a file.

    GnuPG runs in a temporary home, without the keys of the user.

    Args:
        file: The file.
        signature: Its detached signature.
        key: The file with the vendor's public key.
        fingerprint: The vendor's fingerprint, 40 hexadecimal digits, from the artifact's row.

    Raises:
        LockError: The signature or the key is not the vendor's, or GnuPG is not installed.
    """
    program = shutil.which("gpg")
    if program is None:
        raise LockError(
            "GnuPG is not installed", hint="install it with `apt-get install gpg` (or gnupg2)"
        )
    # Short: a socket's path has 108 bytes at most, and the program refuses a
    # home with a longer one.
    with private_folder() as home:

        def gpg(*words: str) -> Finished:
            """Run GnuPG; its status words go to stdout."""
            environment = {**os.environ, "LC_ALL": "C.UTF-8", "GNUPGHOME": str(home)}
            options = (
                "--batch",
                "--no-tty",
                "--no-autostart",
                "--no-auto-key-retrieve",
                "--status-fd",
                "1",
            )
            return run((program, *options, *words), timeout=SECONDS, environment=environment)

        imported = gpg("--import", str(key))
        if imported.status != 0:
            raise LockError(f"{key.name} is not an OpenPGP key ({_find_last_line(imported)})")
        keys = _parse_fingerprints(gpg("--with-colons", "--list-keys"))
        if fingerprint not in keys:
            raise LockError(f"the key has fingerprint {', '.join(keys)}, expected {fingerprint}")
        result = gpg("--trust-model", "always", "--verify", str(signature), str(file))
        statuses = _parse_status_words(result)
        troubles = [reason for word, reason in TROUBLES.items() if word in statuses]
        trouble = troubles[0] if troubles else ""
        # The last word is the fingerprint of the primary key: vendors sign with one of its subkeys.
        signers = statuses.get("VALIDSIG", [])[-1:]
        is_good = result.status == 0 and "GOODSIG" in statuses and signers == [fingerprint]
        if trouble or not is_good:
            raise LockError(f"the signature is not valid: {trouble or _find_last_line(result)}")


def _parse_status_words(result: Finished) -> dict[str, list[str]]:
    """Return the words after each status of gpg.

    ``[GNUPG:] GOODSIG KEY NAME`` becomes ``GOODSIG``: ``KEY``, ``NAME``.
    """
    statuses = {}
    for line in result.output.decode(errors="replace").splitlines():
        words = line.split()
        if line.startswith("[GNUPG:] ") and len(words) > 1:
            statuses[words[1]] = words[2:]
    return statuses


def _find_last_line(result: Finished) -> str:
    """Return the last line of a program's errors; without any, its exit status."""
    errors = result.errors.decode(errors="replace")
    lines = [line for line in errors.splitlines() if line.strip()]
    return lines[-1] if lines else f"status {result.status}"


def _parse_fingerprints(result: Finished) -> list[str]:
    """Return the fingerprints of primary keys: each ``fpr`` line that follows a ``pub`` line."""
    lines = result.output.decode(errors="replace").splitlines()
    rows = [line.split(":") for line in lines if ":" in line]
    fingerprints = []
    for before, row in pairwise(rows):
        if before[0] == "pub" and row[0] == "fpr":
            fingerprints.append(row[9])
    return fingerprints
