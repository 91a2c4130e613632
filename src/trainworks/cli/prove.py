"""``prove`` writes what an image is made of and signs it; ``verify`` checks that, from files alone."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tomllib
from argparse import Namespace
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from trainworks.cli.attach import attach, attached, check_same, find_pushed
from trainworks.cli.keys import signing_key, verifying_key
from trainworks.cli.output import say
from trainworks.engine import choose
from trainworks.engine.processes import run
from trainworks.errors import HostError, OutputError, ProofError
from trainworks.facts.load import load
from trainworks.host.bootstrap import EPOCH
from trainworks.host.distribution import Registries
from trainworks.host.settings import read_host_settings
from trainworks.imagetest.questions import list_packages
from trainworks.plan.model import ImagePlan, Request
from trainworks.plan.resolve import make_plan
from trainworks.plan.select import request_for, rows_named
from trainworks.proof import verify as verifying
from trainworks.proof.components import Contents, contents_of
from trainworks.proof.cyclonedx import cyclonedx
from trainworks.proof.envelope import SigningKey, key_identifier, sign
from trainworks.proof.provenance import (
    CYCLONEDX,
    LOCAL_BUILDER,
    PROVENANCE,
    SPDX,
    Builder,
    Checkout,
    provenance,
    statement,
)
from trainworks.proof.spdx import spdx
from trainworks.proof.verify import ATTESTATIONS_FILE, DOCUMENTS, PROVENANCE_FILE, Verified
from trainworks.render.dockerfile import INPUTS_LABEL, Rendering, render

SOURCES = ("build.py", "images", "launcher", "src", "templates")
"""What of a checkout decides an image."""

GIT_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What was written.

    Attributes:
        target: Of which target.
        contents: Of which image, and what is in it.
        files: The files.
        key: The public key's hash; ``""``: unsigned.
        attached: File name to the digest of what it became in the registry.
    """

    target: str
    contents: Contents
    files: tuple[Path, ...]
    key: str
    attached: Mapping[str, str]


def prove(options: Namespace, root: Path, environment: Mapping[str, str]) -> Proof:
    """Write the proof of a target's image to a folder.

    Raises:
        UnknownNameError: No such target.
        ProofError: There is no such image, it was built from something else than this checkout, or the key is none.
        OutputError: The folder cannot be written.
        RegistryError: It cannot be attached.
    """
    # The key first: a wrong one is known before anything is asked or written.
    key = signing_key(options.key, environment) if options.key else None
    time = _time(environment)
    facts = load(root)
    (row,) = rows_named([options.target], facts)
    request = replace(
        request_for(row, facts),
        with_components=tuple(options.with_components),
        without_components=tuple(options.without_components),
    )
    plan = make_plan(request, facts)
    rendering = render(plan, facts)
    engine = choose(options.engine)
    image = engine.inspect(plan.tags[0])
    again = f"`python build.py` with the same choice builds it, or says that nothing changed: {options.target}"
    if image is None:
        raise ProofError([f"{engine.name} has no image {plan.tags[0]}"], hint=again)
    if image.labels.get(INPUTS_LABEL) != rendering.digest:
        raise ProofError(
            [f"{plan.tags[0]} was not built from this checkout as it is now"],
            hint=f"proof is given of what was built: {again}",
        )
    with ExitStack() as stack:
        pushed = None
        if options.attach:
            registries = stack.enter_context(Registries(read_host_settings(environment), report=say))
            pushed = find_pushed(options.attach, registries)
            check_same(pushed, image)
        say(f"{plan.target.name}: asking {plan.tags[0]} what is in it")
        launcher = _launcher(root)
        base = engine.inspect(plan.image)
        with engine.container(plan.tags[0]) as container:
            found = list_packages(container)
        contents = contents_of(
            plan,
            rendering,
            image,
            found,
            base_identifier=base.identifier if base else "",
            launcher_version=launcher["version"],
            launcher_license=launcher["license"],
        )
        if pushed is not None:
            contents = replace(contents, pushed=(pushed.address, pushed.sha256))
        builder = Builder(
            identifier=options.builder or LOCAL_BUILDER, version=metadata.version("trainworks"), engine=engine.probe()
        )
        texts = texts_of(
            plan, request, rendering, contents, checkout=read_checkout(root, plan), builder=builder, key=key, time=time
        )
        files = _write(options.output, texts)
        return Proof(
            target=plan.target.name,
            contents=contents,
            files=files,
            key=key_identifier(key.public_key()) if key else "",
            attached=attach(pushed, texts) if pushed else {},
        )


def texts_of(
    plan: ImagePlan,
    request: Request,
    rendering: Rendering,
    contents: Contents,
    *,
    checkout: Checkout,
    builder: Builder,
    key: SigningKey | None,
    time: int,
) -> dict[str, str]:
    """Return the files of a proof: name to text. The same values give the same texts."""
    predicates: dict[str, dict[str, object]] = {
        CYCLONEDX: cyclonedx(contents, builder_version=builder.version, time=time),
        SPDX: spdx(contents, builder_version=builder.version, time=time),
    }
    texts = {DOCUMENTS[kind]: text_of(predicate) for kind, predicate in predicates.items()}
    digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
    predicates[PROVENANCE] = provenance(
        plan, request, rendering, contents, checkout=checkout, builder=builder, documents=digests
    )
    statements = {kind: statement(contents, kind, predicates[kind]) for kind in DOCUMENTS}
    texts[PROVENANCE_FILE] = text_of(statements[PROVENANCE])
    if key is not None:
        texts[ATTESTATIONS_FILE] = "".join(f"{sign(each, key)}\n" for each in statements.values())
    return texts


def text_of(document: Mapping[str, object]) -> str:
    """Return a document as its file has it."""
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def read_checkout(root: Path, plan: ImagePlan) -> Checkout:
    """Return the checkout's commit, whether it has changes, and the hashes of the target's locks."""
    names = [f"{plan.target.name}.toml", "artifacts.toml", "base-images.toml"]
    locks = {f"images/lock/{name}": root / "images" / "lock" / name for name in names}
    commit = ""
    changed = False
    if _git(root, "rev-parse", "--show-toplevel") == str(root.resolve()):
        commit = _git(root, "rev-parse", "HEAD")
        changed = bool(_git(root, "status", "--porcelain", "--", *SOURCES))
    return Checkout(
        commit=commit,
        changed=changed,
        locks={name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in locks.items() if path.is_file()},
    )


def _git(root: Path, *words: str) -> str:
    """Return what git says of a folder; ``""`` without git, or where it is no repository."""
    try:
        environment = {**os.environ, "LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0"}
        done = run(("git", "-C", str(root), *words), timeout=GIT_SECONDS, environment=environment)
    except FileNotFoundError:
        return ""
    return done.output.decode().strip() if done.status == 0 else ""


def _launcher(root: Path) -> dict[str, str]:
    """Return what the launcher's project says of itself."""
    try:
        text = (root / "launcher" / "pyproject.toml").read_text(encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{error.filename}: {error.strerror}") from error
    project: dict[str, str] = tomllib.loads(text)["project"]
    return project


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
    engine = choose(engine_name)
    found = engine.inspect(image)
    if found is None:
        raise ProofError([f"{engine.name} has no image {image}"], hint="name one that it has, or sha256:... itself")
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
