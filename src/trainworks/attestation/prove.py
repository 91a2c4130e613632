"""Writes the proof of an image to files: the predicates that cosign attests."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path

from trainworks.attestation.components import BillOfMaterials
from trainworks.attestation.cyclonedx import make_cyclonedx
from trainworks.attestation.evidence import EVIDENCE_FILE, MANIFEST, make_statement, read_record
from trainworks.attestation.options import ProveRequest
from trainworks.attestation.provenance import LOCAL_BUILDER, Builder, RunDetails
from trainworks.attestation.subject_image import (
    ProvableImage,
    find_extended_image,
    find_target_image,
)
from trainworks.engine import closed
from trainworks.engine.protocol import BuiltImage
from trainworks.errors import HostError, OutputError, ProofError
from trainworks.host.bootstrap import EPOCH
from trainworks.host.settings import read_host_settings
from trainworks.imagetest.probe_request import SYSTEM_PYTHON
from trainworks.registry.names import split_image
from trainworks.registry.tools import Registries
from trainworks.terminal.output import say

CYCLONEDX_FILE = "sbom.cdx.json"
PROVENANCE_FILE = "provenance.json"
LICENSES_FILE = "licenses.txt"

LONGEST_TIME = 11
"""Digits of the largest number of seconds since 1970 that is accepted."""

LIST_LICENSES = "/opt/trainworks/share/list-licenses"
"""The program of an image that prints its licences (``templates/files/system/list-licenses``)."""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """A proof that was written.

    Attributes:
        name: The target, or the extended image.
        bill: The image and its components.
        files: The files.
        address: The image in the registry, by its digest; ``""`` if it was not looked at there.
    """

    name: str
    bill: BillOfMaterials
    files: tuple[Path, ...]
    address: str


def prove(request: ProveRequest, root: Path, environment: Mapping[str, str]) -> Proof:
    """Write the proof of a target's image, or of an extended one, to a folder.

    The image runs to list its packages. With ``pushed`` its registry is asked for its address.

    Args:
        request: The image, the folder, and what is written besides.
        root: The checkout.
        environment: The process's environment: ``SOURCE_DATE_EPOCH``, proxies, logins.

    Raises:
        UnknownNameError: The target, the image or the base image does not exist.
        ExtendError, LockError: The inputs of the extension are not complete.
        ProofError: The image was built from something else than this checkout,
            or the registry has another one.
        OutputError: The folder cannot be written.
        RegistryError: The registry does not have the image, or does not answer.
    """
    time = _read_time(environment)
    record = read_record(request.evidence) if request.evidence else None
    if request.extension is not None:
        provable = find_extended_image(request.extension, root, environment)
    else:
        provable = find_target_image(request, root)
    address = ""
    if request.pushed:
        with Registries(read_host_settings(environment), report=say) as registries:
            address = find_pushed_address(request.pushed, provable.image, registries)
    bill = replace(provable.list_contents(), address=address)
    builder = Builder(
        identifier=request.builder or LOCAL_BUILDER,
        version=metadata.version("trainworks"),
        engine=provable.engine.probe(),
    )
    texts = make_documents(bill, partial(provable.provenance, bill), builder=builder, time=time)
    if record:
        texts[EVIDENCE_FILE] = format_document(
            make_statement(record, _hash_manifest(provable), address)
        )
    if request.licenses:
        texts[LICENSES_FILE] = list_licenses(provable, bill)
    files = _write(request.output, texts)
    return Proof(name=provable.name, bill=bill, files=files, address=address)


def list_licenses(provable: ProvableImage, bill: BillOfMaterials) -> str:
    """Run an image's own program that lists the licence and the source of each package.

    Args:
        provable: The image.
        bill: The bill of materials of the image, with which the list is compared.

    Returns:
        The lists of Debian packages, Python packages and compiled programs, as one text.

    Raises:
        ProofError: The image has no such program, or a package of the bill of
            materials is not in its lists.
    """
    reference = provable.image.reference
    with provable.engine.container(reference, isolated=closed(provable.engine)) as container:
        lists = [
            container.run((SYSTEM_PYTHON, "-I", LIST_LICENSES, kind))
            for kind in ("debian", "python", "compiled")
        ]
    if any(completed.status for completed in lists):
        output = lists[0].output.strip()
        raise ProofError(
            [f"{reference} does not list its licences: {output}"], hint="build it again"
        )
    text = "\n".join(completed.output for completed in lists)
    # The head of each package is ``==== NAME VERSION``.
    heads = [line for line in text.splitlines() if line.startswith("==== ")]
    listed = {head.removeprefix("==== ") for head in heads}
    problems = []
    for component in bill.components:
        # A copy inside another package is covered by the licences of that package.
        if component.kind not in ("deb", "python") or "inside" in dict(component.properties):
            continue
        if f"{component.name} {component.version}" not in listed:
            problems.append(
                f"no licence is listed of {component.kind} {component.name} {component.version}"
            )
    if problems:
        raise ProofError(problems)
    return text


def _hash_manifest(provable: ProvableImage) -> str:
    """Return the SHA-256 of ``MANIFEST`` in an image, 64 digits, by ``sha256sum`` in the image.

    Raises:
        ProofError: The image has no such file, or no such program.
    """
    with provable.engine.container(
        provable.image.reference, isolated=closed(provable.engine)
    ) as container:
        completed = container.run(("sha256sum", MANIFEST))
    if completed.status:
        reason = completed.output.strip()
        raise ProofError([f"{provable.image.reference} has no {MANIFEST}: {reason}"])
    return completed.output.split()[0]


def find_pushed_address(name: str, image: BuiltImage, registries: Registries) -> str:
    """Ask a registry for the address of an image by digest: ``HOST/NAME@sha256:...``.

    Args:
        name: ``HOST/NAME@sha256:...`` or ``HOST/NAME:TAG``.
        image: The image that the name must have.
        registries: The connections to registries.

    Raises:
        ProofError: The registry has another image under this name.
        RegistryError: It has none, or refuses to show it.
    """
    repository, reference = split_image(name, "latest")
    manifest = registries.read_manifest(repository, reference)
    if not manifest.is_of(image.identifier):
        other = manifest.configuration or "no configuration"
        raise ProofError(
            [f"{name} is another image ({other}), not {image.identifier}"],
            hint="push this image first: `build.py push`",
        )
    return f"{repository}@{manifest.digest}"


def make_documents(
    bill: BillOfMaterials,
    provenance: Callable[[RunDetails], Mapping[str, object]],
    *,
    builder: Builder,
    time: int,
) -> dict[str, str]:
    """Return the texts of a proof by the names of their files. The same values give the same texts.

    Args:
        bill: The image and its components.
        provenance: Returns the predicate of the provenance, given the builder, and the other
            files as its by-products.
        builder: The builder that the documents name.
        time: The time of the documents, in seconds since 1970.
    """
    document = make_cyclonedx(bill, builder=builder, time=time)
    text = format_document(document)
    digest = {"sha256": hashlib.sha256(text.encode()).hexdigest()}
    by_product = {"name": CYCLONEDX_FILE, "uri": document["serialNumber"], "digest": digest}
    predicate = provenance(RunDetails(builder=builder, documents=(by_product,)))
    return {CYCLONEDX_FILE: text, PROVENANCE_FILE: format_document(predicate)}


def format_document(document: Mapping[str, object]) -> str:
    """Return a document as the text of its file: indented JSON in UTF-8."""
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _read_time(environment: Mapping[str, str]) -> int:
    """Return the time of the documents, in seconds since 1970.

    It is ``SOURCE_DATE_EPOCH``, or the fixed time of base images that are made on this machine.

    Raises:
        HostError: The variable is not a number of seconds.
    """
    text = environment.get("SOURCE_DATE_EPOCH", "")
    if not text:
        return EPOCH
    is_number = text.isascii() and text.isdigit()
    if not is_number or len(text) > LONGEST_TIME:
        raise HostError(f"SOURCE_DATE_EPOCH must be a number of seconds since 1970, got {text!r}")
    return int(text)


def _write(folder: Path, texts: Mapping[str, str]) -> tuple[Path, ...]:
    """Write texts to files of a folder, by their names, and return the paths.

    The folder is created. Files of the same names are replaced.

    Raises:
        OutputError: A file cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            _write_file(folder / name, text)
    except OSError as error:
        # A full disk, or one that a process may not fill, is an error of a write: it names no file.
        where = error.filename or folder
        raise OutputError(f"{where}: {error.strerror}", hint="choose another --output") from error
    return tuple(folder / name for name in texts)


def _write_file(path: Path, text: str) -> None:
    """Write a file complete or not at all; a link that lies there is replaced, not followed.

    Raises:
        OSError: The file cannot be written; no part of it is left.
    """
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
    ) as file:
        draft = Path(file.name)
        try:
            file.write(text)
            file.close()
            draft.chmod(0o644)
            draft.replace(path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise
