"""The image tests of an image that is there: ours or another maker's, built here or pulled."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from trainworks.build.image import CheckReport, ImageResult, test_image
from trainworks.build.layer_audit import compare_layers
from trainworks.build.passed_checks import now
from trainworks.build.session import BuildSession
from trainworks.build.target import image_spec
from trainworks.engine import choose, image_in
from trainworks.engine.protocol import BuiltImage, Engine
from trainworks.engine.tree import read_tree
from trainworks.errors import BuildError, EngineError, UnknownNameError
from trainworks.imagetest.any_image import check_any_image
from trainworks.imagetest.interpreter import MANIFEST
from trainworks.imagetest.results import line, one_line
from trainworks.inspect.targets import find_image
from trainworks.plan.checks import PROGRAMS, Check, DeliveredFilesCheck
from trainworks.plan.resolve import make_plan
from trainworks.plan.variants import BASE_NAME_LABEL, TITLE_LABEL, image_named, request_of
from trainworks.render.dockerfile import INPUTS_LABEL, render
from trainworks.terminal.output import say


@dataclass(frozen=True, kw_only=True)
class CheckRequest:
    """An image to check, and how.

    Attributes:
        name: A target, or an image under any name.
        engine: The name of the engine, or ``None`` for the first that answers.
        junit: The file for the results as JUnit XML; ``None`` for no file.
        static: Whether to run only the checks that start no program of the image.
        without_plan: Whether to check an image that is made from one of ours like
            one of another maker.
    """

    name: str
    engine: str | None
    junit: Path | None
    static: bool = False
    without_plan: bool = False


def check_image(check: CheckRequest, session: BuildSession) -> ImageResult:
    """Compare an image with its digests and with its build, and run the image tests on it.

    A person who asks wants the bytes to be asked: only a build remembers what an image of one
    identifier has passed. An image with more layers than it was built with gets a line for each
    file that these change.

    What the image should have is decided by its name, or else by the title that its labels have: a
    target, with what the image has besides or lacks. An image of another maker is asked what can be
    asked without a plan.

    Args:
        check: The image, and how to check it.
        session: The checkout whose recipes say what is promised.

    Raises:
        UnknownNameError: The engine has no such image, or what it should have cannot be known.
        CompatibilityError, FactsError, LockError: As planning does.
        EngineError, EngineUnavailableError, OutputError: See ``trainworks.errors``.
    """
    facts = session.facts
    engine = choose(check.engine, report=say)
    reference = find_image(check.name, engine, facts)
    image = image_in(engine, reference)
    title = image.labels.get(TITLE_LABEL, "")
    named = image_named(reference, facts) or image_named(title, facts)
    if named is None and image.labels.get(INPUTS_LABEL):
        named = image_named(_name_inside(image, engine), facts)
    request = request_of(named.row, named.variant, facts) if named else None
    if named is None or check.without_plan:
        if check.junit is not None:
            raise UnknownNameError(
                f"{reference} is no image of build.py: it has no promises for JUnit XML",
                hint="`--format json` has what was found",
            )
        removed = make_plan(request, facts).checks if request else ()
        return _check_without_plan(image, engine, removed)
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
    for result in compared:
        say(line(result))
    if not as_now:
        say(
            f"{reference} was not built from this checkout as it is now:"
            " what changed since may fail"
        )
    # Labels can be forged, so an image that is ours by its labels runs isolated, or not at all.
    static, obstacle = check.static, engine.isolates()
    if obstacle and not static:
        say(
            "only its files are checked, none of its programs is run:"
            f" {engine.name} cannot isolate one ({obstacle})"
        )
        static = True
    spec = replace(image_spec(plan, rendering, session), isolated="job")
    if static:
        static_checks = [row for row in spec.checks if not isinstance(row, PROGRAMS)]
        spec = replace(spec, checks=tuple(static_checks))
    report = CheckReport(junit=check.junit, every_line=True)
    test_run = test_image(spec, image, engine, report=report, whole=not static)
    return ImageResult(
        image=image,
        engine=engine,
        checks=(*compared, *test_run.results),
        tested=test_run.when,
        seconds=0,
        looked_at=True,
    )


def _name_inside(image: BuiltImage, engine: Engine) -> str:
    """Return the name of an image in its own manifest, or ``""``; its labels are not read."""
    with suppress(BuildError, EngineError, ValueError, KeyError, TypeError, RecursionError):
        tree = read_tree(engine, image.reference, re.compile(re.escape(MANIFEST)))
        return str(json.loads(tree.read(MANIFEST) or b"")["name"])
    return ""


def _check_without_plan(
    image: BuiltImage, engine: Engine, base_checks: tuple[Check, ...]
) -> ImageResult:
    """Check an image without a plan.

    Args:
        image: The image.
        engine: The engine that has the image.
        base_checks: The checks of its base image, if that is ours.
    """
    removed: list[str] = []
    for check in base_checks:
        if isinstance(check, DeliveredFilesCheck):
            removed += check.removed
    origin = "made from an image of build.py" if base_checks else "not built by build.py"
    say(f"{image.reference} is {origin}: asking what can be asked without a plan")
    report = check_any_image(
        engine, image, lambda result: say(line(result)), removed=tuple(removed)
    )
    for note in report.notes:
        say(f"note  {one_line(note)}")
    failed = sum(not result.passed for result in report.results)
    passed = len(report.results) - failed
    say(f"{passed} checks passed, {failed} failed, {len(report.notes)} notes")
    return ImageResult(
        image=image,
        engine=engine,
        checks=tuple(report.results),
        notes=tuple(report.notes),
        tested=now(),
        seconds=0,
        looked_at=True,
    )
