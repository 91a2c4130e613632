"""``prove`` writes what an image is made of and signs it; ``verify`` checks that, from files alone."""

from __future__ import annotations

import hashlib
import json
import re
from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path

from trainworks.engine import choose
from trainworks.errors import CommandLineError, HostError, OutputError, ProofError, UnknownNameError
from trainworks.host.bootstrap import EPOCH
from trainworks.host.settings import read_host_settings
from trainworks.proof import verify as verifying
from trainworks.proof.attach import attach, attached, check_same, find_pushed
from trainworks.proof.components import BillOfMaterials
from trainworks.proof.cyclonedx import cyclonedx
from trainworks.proof.envelope import SigningKey, key_identifier, sign
from trainworks.proof.keys import signing_key, verifying_key
from trainworks.proof.provable_image import extended_image, target_image
from trainworks.proof.provenance import CYCLONEDX, LOCAL_BUILDER, PROVENANCE, SPDX, Builder, statement
from trainworks.proof.spdx import spdx
from trainworks.proof.verify import ATTESTATIONS_FILE, DOCUMENTS, PROVENANCE_FILE, Verified
from trainworks.registry.client import Registries
from trainworks.terminal.output import say


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What was written.

    Attributes:
        name: Of which target, or of which extended image.
        bill: The image and its components.
        files: The files.
        key: The public key's hash; ``""``: unsigned.
        attached: File name to the digest of what it became in the registry.
    """

    name: str
    bill: BillOfMaterials
    files: tuple[Path, ...]
    key: str
    attached: Mapping[str, str]


def prove(options: Namespace, root: Path, environment: Mapping[str, str]) -> Proof:
    """Write the proof of a target's image, or of an extended one, to a folder.

    Raises:
        CommandLineError: Options of both are given.
        UnknownNameError: No such target, or base image.
        ExtendError, LockError: What the image was extended with is not here.
        ProofError: There is no such image, it was built from something else than this checkout, or the key is none.
        OutputError: The folder cannot be written.
        RegistryError: It cannot be attached.
    """
    _check_choice(options)
    # The key first: a wrong one is known before anything is asked or written.
    key = signing_key(options.key, environment) if options.key else None
    time = _time(environment)
    subject = extended_image(options, root, environment) if options.base else target_image(options, root)
    with ExitStack() as stack:
        pushed = None
        if options.attach:
            registries = stack.enter_context(Registries(read_host_settings(environment), report=say))
            pushed = find_pushed(options.attach, registries)
            check_same(pushed, subject.image)
        bill = subject.look()
        if pushed is not None:
            bill = replace(bill, pushed=(pushed.address, pushed.sha256))
        builder = Builder(
            identifier=options.builder or LOCAL_BUILDER,
            version=metadata.version("trainworks"),
            engine=subject.engine.probe(),
        )
        texts = texts_of(bill, partial(subject.provenance, bill, builder), builder=builder, key=key, time=time)
        files = _write(options.output, texts)
        return Proof(
            name=subject.name,
            bill=bill,
            files=files,
            key=key_identifier(key.public_key()) if key else "",
            attached=attach(pushed, texts) if pushed else {},
        )


def _check_choice(options: Namespace) -> None:
    """See that the options are those of a target, or those of an extension."""
    names: tuple[str, ...] = ("requirements", "apt", "source", "entry_point")
    advice = "is about an extended image: name its --base too"
    if options.base:
        names, advice = ("with_components", "without_components"), "is about a target's image, and --base is given"
    wrong = [f"--{name.removesuffix('_components').replace('_', '-')}" for name in names if getattr(options, name)]
    if wrong:
        raise CommandLineError([f"{option} {advice}" for option in wrong])


def texts_of(
    bill: BillOfMaterials,
    provenance: Callable[[Mapping[str, str]], Mapping[str, object]],
    *,
    builder: Builder,
    key: SigningKey | None,
    time: int,
) -> dict[str, str]:
    """Return the files of a proof: name to text. The same values give the same texts.

    Args:
        bill: The image and its components.
        provenance: Returns the predicate that says what it was built from; is given the other files' hashes.
        builder: Who vouches for it.
        key: Signs, if there is one; one of KMS gives other signatures each time.
        time: What the documents give as their time, in seconds since 1970.
    """
    predicates: dict[str, Mapping[str, object]] = {
        CYCLONEDX: cyclonedx(bill, builder_version=builder.version, time=time),
        SPDX: spdx(bill, builder_version=builder.version, time=time),
    }
    texts = {DOCUMENTS[kind]: text_of(predicate) for kind, predicate in predicates.items()}
    digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
    predicates[PROVENANCE] = provenance(digests)
    statements = {kind: statement(bill, kind, predicates[kind]) for kind in DOCUMENTS}
    texts[PROVENANCE_FILE] = text_of(statements[PROVENANCE])
    if key is not None:
        texts[ATTESTATIONS_FILE] = "".join(f"{sign(each, key)}\n" for each in statements.values())
    return texts


def text_of(document: Mapping[str, object]) -> str:
    """Return a document as its file has it."""
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _time(environment: Mapping[str, str]) -> int:
    """Return the time that documents give: the standard variable's, else that of all our base images."""
    said = environment.get("SOURCE_DATE_EPOCH", "")
    if not said:
        return EPOCH
    if not (said.isascii() and said.isdigit() and len(said) < 12):
        raise HostError(f"SOURCE_DATE_EPOCH is {said!r}", hint="it has to be a number of seconds since 1970")
    return int(said)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ProofError([f"{path}: {error.strerror}"]) from error


def _write(folder: Path, texts: Mapping[str, str]) -> tuple[Path, ...]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Signatures of an earlier proof would not fit the documents beside them.
        (folder / ATTESTATIONS_FILE).unlink(missing_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{error.filename}: {error.strerror}", hint="choose another --output") from error
    return tuple(folder / name for name in texts)


def verify(options: Namespace, environment: Mapping[str, str]) -> Verified:
    """Check the proof in a folder, or the one that is attached to an image in a registry; return what it proves.

    Raises:
        ProofError: Anything does not hold, or is not there.
        RegistryError: The registry does not answer.
    """
    key = verifying_key(options.key, environment)
    if options.proof is None:
        with Registries(read_host_settings(environment), report=say) as registries:
            pushed = find_pushed(options.image, registries)
            files = attached(pushed)
        if ATTESTATIONS_FILE not in files:
            raise ProofError([f"{pushed.address}: no signed proof is attached to it"])
        sha256 = pushed.sha256
    else:
        sha256 = _image_digest(options.image, options.engine)
        files = {name: _read(options.proof / name) for name in (ATTESTATIONS_FILE, *DOCUMENTS.values())}
    lines = _decoded(ATTESTATIONS_FILE, files.pop(ATTESTATIONS_FILE)).splitlines()
    documents = {name: _json(name, content) for name, content in files.items()}
    return verifying.verify(lines, key, sha256, documents)


def _image_digest(image: str, engine_name: str | None) -> str:
    """Return the hash that names an image: what is given, or that of the configuration which an engine has."""
    if match := re.fullmatch(r"(?:\S+@)?sha256:([0-9a-f]{64})", image):
        return match[1]
    engine = choose(engine_name, report=say)
    found = engine.inspect(image)
    if found is None:
        raise UnknownNameError(f"{engine.name} has no image {image}", hint="name one that it has, or sha256:... itself")
    return found.identifier.removeprefix("sha256:")


def _decoded(name: str, content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise ProofError([f"{name}: it is no text"]) from None


def _json(name: str, content: bytes) -> object:
    try:
        return json.loads(_decoded(name, content))
    except ValueError:
        raise ProofError([f"{name}: it is no JSON"]) from None


def describe(image: str, proven: Verified) -> str:
    """Return for people what a good proof says."""
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
