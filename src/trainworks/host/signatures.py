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

    Args:
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
            raise LockError(f"{key.name} is not an OpenPGP key ({_last_line(imported)})")
        keys = _fingerprints(gpg("--with-colons", "--list-keys"))
        if fingerprint not in keys:
            raise LockError(f"the key has fingerprint {', '.join(keys)}, expected {fingerprint}")
        done = gpg("--trust-model", "always", "--verify", str(signature), str(file))
        words = {line.split()[1]: line.split()[2:] for line in _status_lines(done)}
        trouble = next((reason for word, reason in TROUBLES.items() if word in words), "")
        valid = words.get("VALIDSIG", [])
        # The last word is the fingerprint of the primary key: vendors sign with one of its subkeys.
        if (
            trouble
            or done.status != 0
            or "GOODSIG" not in words
            or not valid
            or valid[-1] != fingerprint
        ):
            raise LockError(f"the signature is not valid: {trouble or _last_line(done)}")


def _status_lines(done: Finished) -> list[str]:
    lines = done.output.decode(errors="replace").splitlines()
    return [line for line in lines if line.startswith("[GNUPG:] ") and len(line.split()) > 1]


def _last_line(done: Finished) -> str:
    lines = [line for line in done.errors.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else f"status {done.status}"


def _fingerprints(done: Finished) -> list[str]:
    """Return the fingerprints of primary keys: each ``fpr`` line that follows a ``pub`` line."""
    lines = [
        line.split(":") for line in done.output.decode(errors="replace").splitlines() if ":" in line
    ]
    return [
        words[9] for before, words in pairwise(lines) if before[0] == "pub" and words[0] == "fpr"
    ]
