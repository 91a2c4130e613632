"""The image tests of an image that is there: ours or another maker's, built here or pulled."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from trainworks.build.image import ImageResult, test_image
from trainworks.build.layer_audit import compare_layers
from trainworks.build.passed_checks import now
from trainworks.build.session import BuildSession
from trainworks.build.target import image_spec
from trainworks.engine import choose, image_in
from trainworks.engine.protocol import BuiltImage, Engine
from trainworks.engine.tree import read_tree
from trainworks.errors import BuildError, EngineError, UnknownNameError
from trainworks.imagetest.any_image import look_at
from trainworks.imagetest.interpreter import MANIFEST
from trainworks.imagetest.results import line, one_line
from trainworks.inspect.targets import find_image
from trainworks.plan.checks import PROGRAMS, Check, DeliveredFilesCheck
from trainworks.plan.resolve import make_plan
from trainworks.plan.variants import BASE_NAME_LABEL, TITLE_LABEL, image_named, request_of
from trainworks.render.dockerfile import INPUTS_LABEL, render
from trainworks.terminal.output import say


def check_image(
    name: str,
    session: BuildSession,
    *,
    engine_name: str | None,
    junit: Path | None,
    static: bool = False,
    without_plan: bool = False,
) -> ImageResult:
    """Compare an image with its digests and with its build, and run the image tests on it.

    A person who asks wants the bytes to be asked: only a build remembers what an image of one
    identifier has passed. An image with more layers than it was built with gets a line for each
    file that these change.

    What the image should have is decided by its name, or else by the title that its labels have: a
    target, with what the image has besides or lacks. An image of another maker is asked what can be
    asked without a plan.

    Args:
        name: A target, or an image under any name.
        session: The checkout whose recipes say what is promised.
        engine_name: The engine, or ``None`` for the first that answers.
        junit: Where to write the results as JUnit XML.
        static: Whether to ask only what starts no program of the image.
        without_plan: Whether to ask an image that is made from one of ours like
            one of another maker.

    Raises:
        UnknownNameError: The engine has no such image, or what it should have cannot be known.
        CompatibilityError, FactsError, LockError: As planning does.
        EngineError, EngineUnavailableError, OutputError: See ``trainworks.errors``.
    """
    facts = session.facts
    engine = choose(engine_name, report=say)
    reference = find_image(name, engine, facts)
    image = image_in(engine, reference)
    title = image.labels.get(TITLE_LABEL, "")
    named = image_named(reference, facts) or image_named(title, facts)
    if named is None and image.labels.get(INPUTS_LABEL):
        named = image_named(_name_inside(image, engine), facts)
    request = request_of(named.row, named.variant, facts) if named else None
    if named is None or without_plan:
        if junit is not None:
            raise UnknownNameError(
                f"{reference} is no image of build.py: it has no promises for JUnit XML",
                hint="`--format json` has what was found",
            )
        removed = make_plan(request, facts).checks if request else ()
        return _look_at(image, engine, removed)
    if request is None:
        raise UnknownNameError(
            f"{reference}: the name {title or reference}"
            " does not say which components the image has",
            hint=(
                "build it again with the same --with and --without,"
                " and --junit FILE: that runs its tests"
            ),
        )
    plan = make_plan(request, facts)
    rendering = render(plan, facts)
    as_now = image.labels.get(INPUTS_LABEL) == rendering.digest
    if not as_now and image.labels.get(BASE_NAME_LABEL) != plan.labels[BASE_NAME_LABEL]:
        raise UnknownNameError(
            f"{reference} extends {image.labels.get(BASE_NAME_LABEL, 'another image')}",
            hint=(
                "`--any` asks what holds for every image; `python build.py extend` with the same"
                " options and --junit FILE runs its own tests, and builds nothing"
            ),
        )
    compared = compare_layers(image, engine)
    for each in compared:
        say(line(each))
    if not as_now:
        say(
            f"{reference} was not built from this checkout as it is now:"
            " what changed since may fail"
        )
    # That it is ours is what its own labels say: its programs run isolated, or none of them does.
    words = engine.isolates()
    if words and not static:
        say(
            "only its files are checked, no program of it is run:"
            f" {engine.name} cannot isolate one ({words})"
        )
        static = True
    spec = replace(image_spec(plan, rendering, session), isolated="job")
    if static:
        spec = replace(
            spec, checks=tuple(check for check in spec.checks if not isinstance(check, PROGRAMS))
        )
    checked = test_image(spec, image, engine, junit=junit, every_line=True, whole=not static)
    return ImageResult(
        image=image,
        engine=engine,
        checks=(*compared, *checked.results),
        tested=checked.when,
        seconds=0,
        looked_at=True,
    )


def _name_inside(image: BuiltImage, engine: Engine) -> str:
    """Return the name that an image has in its own manifest, whatever its labels say.

    ``""`` where it has none.
    """
    with suppress(BuildError, EngineError, ValueError, KeyError, TypeError, RecursionError):
        tree = read_tree(engine, image.reference, re.compile(re.escape(MANIFEST)))
        return str(json.loads(tree.read(MANIFEST) or b"")["name"])
    return ""


def _look_at(image: BuiltImage, engine: Engine, promised: tuple[Check, ...]) -> ImageResult:
    """Ask an image without a plan.

    ``promised`` is what the image that it is made of promises, where it is ours.
    """
    removed = [
        pattern
        for check in promised
        if isinstance(check, DeliveredFilesCheck)
        for pattern in check.removed
    ]
    what = "made from an image of build.py" if promised else "not built by build.py"
    say(f"{image.reference} is {what}: asking what can be asked without a plan")
    looked = look_at(engine, image, lambda result: say(line(result)), removed=tuple(removed))
    for note in looked.notes:
        say(f"note  {one_line(note)}")
    failed = sum(not each.passed for each in looked.results)
    say(f"{len(looked.results) - failed} checks passed, {failed} failed, {len(looked.notes)} notes")
    return ImageResult(
        image=image,
        engine=engine,
        checks=tuple(looked.results),
        notes=tuple(looked.notes),
        tested=now(),
        seconds=0,
        looked_at=True,
    )
