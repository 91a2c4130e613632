"""Checks the proof of an image: from files in a folder, or as it is attached to the image in a registry."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from trainworks.engine import choose, image_in
from trainworks.errors import ProofError
from trainworks.facts.rows import Facts
from trainworks.host.settings import read_host_settings
from trainworks.inspect.targets import find_image
from trainworks.proof.attach import attached, find_pushed
from trainworks.proof.keys import verifying_key
from trainworks.proof.requests import VerifyRequest
from trainworks.proof.strict_json import read_json
from trainworks.proof.verify import ATTESTATIONS_FILE, DOCUMENTS, Verified, verify
from trainworks.registry.tools import Registries
from trainworks.terminal.output import say

LARGEST = 256_000_000
"""The most bytes of a file of a proof that are read; the bill of materials of a large image has a hundredth."""


def verify_image(request: VerifyRequest, facts: Facts, environment: Mapping[str, str]) -> Verified:
    """Check the proof of an image; return what it proves.

    Args:
        request: Which image, whose key, and where the proof is.
        facts: The targets, whose names are images too.
        environment: The process's environment.

    Raises:
        UnknownNameError: The engine does not have the image.
        ProofError: The proof does not exist or does not hold.
        RegistryError: The registry does not answer, or its answer is malformed.
    """
    key = verifying_key(request.key)
    if request.proof is None:
        with Registries(read_host_settings(environment), report=say) as registries:
            pushed = find_pushed(request.image, registries)
            envelopes = attached(pushed)
        if not envelopes:
            raise ProofError([f"{pushed.address}: no signed proof is attached to it"])
        return verify(envelopes, key, pushed.sha256, {}, request.policy)
    sha256 = _image_digest(request.image, request.engine, facts)
    files = {name: _read(request.proof / name) for name in (ATTESTATIONS_FILE, *DOCUMENTS.values())}
    lines = _decoded(ATTESTATIONS_FILE, files.pop(ATTESTATIONS_FILE)).splitlines()
    documents = {name: _json(name, content) for name, content in files.items()}
    return verify(lines, key, sha256, documents, request.policy)


def _image_digest(image: str, engine_name: str | None, facts: Facts) -> str:
    """Return the hash of an image: the one in its name, or that of the configuration that an engine has."""
    if match := re.fullmatch(r"(?:\S+@)?sha256:([0-9a-f]{64})", image):
        return match[1]
    engine = choose(engine_name, report=say)
    found = image_in(engine, find_image(image, engine, facts))
    return found.identifier.removeprefix("sha256:")


def _read(path: Path) -> bytes:
    """Return the content of a file that comes from outside: a plain one of this folder, and of a size to be read."""
    try:
        # Not to wait for the writer of a pipe, and not to follow a link to a device without an end.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ProofError([f"{path}: not a plain file"])
            content = file.read(LARGEST + 1)
    except OSError as error:
        words = "a link, and not a plain file" if error.errno == errno.ELOOP else error.strerror
        raise ProofError([f"{path}: {words}"]) from error
    if len(content) > LARGEST:
        raise ProofError([f"{path}: has more than {LARGEST // 1_000_000} MB; no proof of an image has"])
    return content


def _decoded(name: str, content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ProofError([f"{name}: not a text in UTF-8: {error}"]) from None


def _json(name: str, content: bytes) -> object:
    try:
        return read_json(_decoded(name, content))
    except ValueError as error:
        raise ProofError([f"{name}: not valid JSON: {error}"]) from None


def describe(image: str, proven: Verified) -> str:
    """Return what a good proof says, for people."""
    commit = f"commit {proven.commit}" if proven.commit else "a checkout outside of git"
    changed = ", with changes that are in no commit" if proven.changed else ""
    return (
        f"{image}: proof holds\n"
        f"  image     sha256:{proven.sha256}\n"
        f"  signed    by the key {proven.key}\n"
        f"  builder   {proven.builder}\n"
        f"  built     from {commit}{changed}\n"
        f"  contents  {proven.components} components\n"
    )
