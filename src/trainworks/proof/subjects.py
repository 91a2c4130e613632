"""What ``prove`` gives proof of: the image of a target, or an image that ``extend`` made."""

from __future__ import annotations

import hashlib
import os
import tomllib
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from trainworks.engine import choose
from trainworks.engine.processes import run
from trainworks.engine.protocol import BuiltImage, Engine
from trainworks.errors import OutputError, ProofError, UnknownNameError
from trainworks.extend.image import TITLE_LABEL, plan_extension
from trainworks.extend.render import RECIPES
from trainworks.extend.request import ExtendRequest
from trainworks.facts.load import BUILT, load
from trainworks.imagetest.packages import Answer
from trainworks.imagetest.questions import list_packages
from trainworks.plan.model import ImagePlan
from trainworks.plan.resolve import make_plan
from trainworks.plan.select import request_for, rows_named
from trainworks.proof.components import Component, Contents, contents_of, extension_contents, package_components
from trainworks.proof.provenance import Builder, Checkout, extension_provenance, provenance
from trainworks.render.dockerfile import INPUTS_LABEL, Rendering, render
from trainworks.terminal.output import say
from trainworks.terminal.progress import DISPLAY

SOURCES = ("build.py", "images", "launcher", "src", "templates", f":(exclude)images/{BUILT}")
"""What of a checkout decides an image, as git's pathspecs; the record of builds is written after them."""

GIT_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Subject:
    """An image that was built from what is here now.

    Attributes:
        name: Of the target, or of the extended image.
        engine: Which has it.
        image: The image.
        look: Asks the image, and returns what is in it; raises ``ProofError`` where it cannot say.
        provenance: Returns what it was built from: the predicate, given its contents, who builds, and the hashes of the
            files beside it.
    """

    name: str
    engine: Engine
    image: BuiltImage
    look: Callable[[], Contents]
    provenance: Callable[[Contents, Builder, Mapping[str, str]], dict[str, object]]


def target_subject(options: Namespace, root: Path) -> Subject:
    """Return a target's image.

    Raises:
        UnknownNameError: No such target, or the engine has no image of it.
        ProofError: It was built from something else than this checkout.
    """
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
    image = _built(engine, plan.tags[0], rendering, "build.py")

    def look() -> Contents:
        return _target_contents(plan, rendering, image, _ask(engine, plan.tags[0]), engine, root)

    def predicate(contents: Contents, builder: Builder, documents: Mapping[str, str]) -> dict[str, object]:
        names = [f"images/lock/{name}.toml" for name in (plan.target.name, "artifacts", "base-images")]
        checkout = read_checkout(root, names)
        return provenance(plan, request, rendering, contents, checkout=checkout, builder=builder, documents=documents)

    return Subject(name=plan.target.name, engine=engine, image=image, look=look, provenance=predicate)


def extension_subject(options: Namespace, root: Path, environment: Mapping[str, str]) -> Subject:
    """Return an image that ``extend`` made.

    Raises:
        ExtendError, UnknownNameError: As ``extend`` does.
        LockError: The lock of its requirements is not there, or not for them.
        ProofError: It was made from something else than what is here now.
    """
    request = ExtendRequest(
        base=options.base,
        tag=options.target,
        requirements=options.requirements,
        apt=tuple(options.apt),
        source=options.source,
        entry_point=options.entry_point,
        engine=options.engine,
    )
    extension = plan_extension(request, root, environment)
    engine, plan, rendering = extension.engine, extension.plan, extension.rendering
    image = _built(engine, plan.tag, rendering, "build.py extend")

    def look() -> Contents:
        inherited = _base_components(plan.base.reference, extension.image, engine, root)
        return extension_contents(plan, image, _ask(engine, plan.tag), inherited)

    def predicate(contents: Contents, builder: Builder, documents: Mapping[str, str]) -> dict[str, object]:
        checkout = read_checkout(root, [f"templates/{name}" for name in RECIPES])
        return extension_provenance(plan, rendering, contents, checkout=checkout, builder=builder, documents=documents)

    return Subject(name=plan.tag, engine=engine, image=image, look=look, provenance=predicate)


def _built(engine: Engine, reference: str, rendering: Rendering, command: str) -> BuiltImage:
    again = f"`python {command}` with the same choice builds it, or says that nothing changed"
    image = engine.inspect(reference)
    if image is None:
        raise UnknownNameError(f"{engine.name} has no image {reference}", hint=again)
    if image.labels.get(INPUTS_LABEL) != rendering.digest:
        raise ProofError(
            [f"{reference} was not built from this checkout as it is now"],
            hint=f"proof is given of what was built: {again}",
        )
    return image


def _ask(engine: Engine, reference: str) -> Answer:
    say(f"asking {reference} what is in it")
    with DISPLAY.task("reading", log=False), engine.container(reference) as container:
        return list_packages(container)


def _target_contents(
    plan: ImagePlan, rendering: Rendering, image: BuiltImage, found: Answer, engine: Engine, root: Path
) -> Contents:
    launcher = tomllib.loads(_text(root / "launcher" / "pyproject.toml"))["project"]
    base = engine.inspect(plan.image)
    return contents_of(
        plan,
        rendering,
        image,
        found,
        base_identifier=base.identifier if base else "",
        launcher_version=launcher["version"],
        launcher_license=launcher["license"],
    )


def _base_components(reference: str, image: BuiltImage, engine: Engine, root: Path) -> tuple[Component, ...]:
    """Return what is in an image that was extended; hashes and downloads only where this checkout built it."""
    found = _ask(engine, reference)
    facts = load(root)
    for row in facts.targets:
        if facts.name_of(row) == image.labels.get(TITLE_LABEL):
            plan = make_plan(request_for(row, facts), facts)
            rendering = render(plan, facts)
            if image.labels.get(INPUTS_LABEL) == rendering.digest:
                return _target_contents(plan, rendering, image, found, engine, root).components
    say(f"  {reference} was not built from this checkout as it is now: its files' hashes are not known here")
    return package_components(reference, found, {})


def read_checkout(root: Path, names: Iterable[str]) -> Checkout:
    """Return the checkout's commit, whether it has changes, and the hashes of some of its files, if they are there."""
    files = {name: root / name for name in names}
    commit = ""
    changed = False
    if _git(root, "rev-parse", "--show-toplevel") == str(root.resolve()):
        commit = _git(root, "rev-parse", "HEAD")
        changed = bool(_git(root, "status", "--porcelain", "--", *SOURCES))
    return Checkout(
        commit=commit,
        changed=changed,
        files={name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items() if path.is_file()},
    )


def _git(root: Path, *words: str) -> str:
    """Return what git says of a folder; ``""`` without git, or where it is no repository."""
    try:
        environment = {**os.environ, "LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0"}
        done = run(("git", "-C", str(root), *words), timeout=GIT_SECONDS, environment=environment)
    except FileNotFoundError:
        return ""
    return done.output.decode().strip() if done.status == 0 else ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise OutputError(
            f"{error.filename}: {error.strerror}", hint="run from a checkout of trainworks, or name one with --root"
        ) from error
