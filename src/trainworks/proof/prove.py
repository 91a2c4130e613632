"""Writes the proof of an image to files, signs it, and attaches it to the image in a registry."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path

from trainworks.errors import HostError, OutputError
from trainworks.host.bootstrap import EPOCH
from trainworks.host.settings import read_host_settings
from trainworks.proof.attach import attach, check_same, find_pushed
from trainworks.proof.components import BillOfMaterials
from trainworks.proof.cyclonedx import cyclonedx
from trainworks.proof.envelope import PrivateKey, key_identifier, sign
from trainworks.proof.keys import signing_key
from trainworks.proof.provable_image import extended_image, target_image
from trainworks.proof.provenance import CYCLONEDX, LOCAL_BUILDER, PROVENANCE, Builder, statement
from trainworks.proof.requests import ProveRequest
from trainworks.proof.verify import ATTESTATIONS_FILE, CYCLONEDX_FILE, PROVENANCE_FILE
from trainworks.registry.tools import Registries
from trainworks.terminal.output import say


@dataclass(frozen=True, kw_only=True)
class Proof:
    """A proof that was written.

    Attributes:
        name: The target, or the extended image.
        bill: The image and its components.
        files: The files.
        key: The hash of the public key; ``""``: not signed.
        attached: Name to digest, of what was attached in the registry.
    """

    name: str
    bill: BillOfMaterials
    files: tuple[Path, ...]
    key: str
    attached: Mapping[str, str]


def prove(request: ProveRequest, root: Path, environment: Mapping[str, str]) -> Proof:
    """Write the proof of a target's image, or of an extended one, to a folder.

    Raises:
        UnknownNameError: The target, the image or the base image does not exist.
        ExtendError, LockError: The inputs of the extension are not complete.
        ProofError: The image was built from something else than this checkout, or the key cannot be used.
        OutputError: The folder cannot be written.
        RegistryError: The registry refuses the files.
    """
    # The key first: a wrong one is known before anything is asked or written.
    key = signing_key(request.key, environment) if request.key else None
    time = _time(environment)
    if request.extension is not None:
        provable = extended_image(request.extension, root, environment)
    else:
        provable = target_image(request, root)
    with ExitStack() as stack:
        pushed = None
        if request.attach:
            registries = stack.enter_context(Registries(read_host_settings(environment), report=say))
            pushed = find_pushed(request.attach, registries)
            check_same(pushed, provable.image)
        bill = provable.list_contents()
        if pushed is not None:
            bill = replace(bill, pushed=(pushed.address, pushed.sha256))
        builder = Builder(
            identifier=request.builder or LOCAL_BUILDER,
            version=metadata.version("trainworks"),
            engine=provable.engine.probe(),
        )
        texts = texts_of(bill, partial(provable.provenance, bill, builder), builder=builder, key=key, time=time)
        files = _write(request.output, texts)
        identifier = key_identifier(key.public_key()) if key else ""
        return Proof(
            name=provable.name,
            bill=bill,
            files=files,
            key=identifier,
            attached=attach(pushed, texts, key=identifier, time=time) if pushed else {},
        )


def texts_of(
    bill: BillOfMaterials,
    provenance: Callable[[Mapping[str, str]], Mapping[str, object]],
    *,
    builder: Builder,
    key: PrivateKey | None,
    time: int,
) -> dict[str, str]:
    """Return the files of a proof: name to text. The same values give the same texts.

    Args:
        provenance: Returns the predicate of the provenance, given the hashes of the other files.
        builder: The builder that the documents name.
        key: Signs the statements; ``None``: they are not signed.
        time: The time of the documents, in seconds since 1970.
    """
    materials = cyclonedx(bill, builder_version=builder.version, time=time)
    text = text_of(materials)
    made = provenance({CYCLONEDX_FILE: hashlib.sha256(text.encode()).hexdigest()})
    statements = (statement(bill, PROVENANCE, made), statement(bill, CYCLONEDX, materials))
    texts = {CYCLONEDX_FILE: text, PROVENANCE_FILE: text_of(statements[0])}
    if key is not None:
        texts[ATTESTATIONS_FILE] = "".join(f"{sign(each, key)}\n" for each in statements)
    return texts


def text_of(document: Mapping[str, object]) -> str:
    """Return a document as it is written to its file."""
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _time(environment: Mapping[str, str]) -> int:
    """Return the time of the documents: the standard variable's, or else that of all our base images."""
    said = environment.get("SOURCE_DATE_EPOCH", "")
    if not said:
        return EPOCH
    if not (said.isascii() and said.isdigit() and len(said) < 12):
        raise HostError(f"SOURCE_DATE_EPOCH must be a number of seconds since 1970, got {said!r}")
    return int(said)


def _write(folder: Path, texts: Mapping[str, str]) -> tuple[Path, ...]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Signatures of an earlier proof would not fit the documents beside them.
        (folder / ATTESTATIONS_FILE).unlink(missing_ok=True)
        for name, text in texts.items():
            # Beside, and renamed: a link that lies there is replaced, not followed.
            with tempfile.NamedTemporaryFile(
                "w", encoding="utf-8", dir=folder, prefix=f".{name}.", delete=False
            ) as draft:
                draft.write(text)
            Path(draft.name).chmod(0o644)
            Path(draft.name).replace(folder / name)
    except OSError as error:
        raise OutputError(f"{error.filename}: {error.strerror}", hint="choose another --output") from error
    return tuple(folder / name for name in texts)
