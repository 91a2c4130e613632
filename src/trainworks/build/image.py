"""One image, from its rendering to a tested result: base, context, engine, checks.

Every build goes through here.

``build.target`` and ``extend.image`` say what the image is made of; ``build.matrix`` does
several, one thread each.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from trainworks.build.base import OwnBase, ensure_base
from trainworks.build.context import context_folder, replace_output, write_context
from trainworks.build.layer_audit import layers_of
from trainworks.build.options import BuildOptions
from trainworks.build.passed_checks import PassedChecks, now, passed_before, remember, what_decides
from trainworks.engine.progress import StepTally
from trainworks.engine.protocol import BuildRequest, BuiltImage, Engine, Isolation, Network, Secret
from trainworks.engine.temporary_folders import private_folder
from trainworks.errors import EngineError, ImageTestError, LockError
from trainworks.facts.rows import Architecture, Base, LockedArchive
from trainworks.host.archives import RECORD, ArchiveChoice, find_archive, line_of
from trainworks.host.settings import HostSettings
from trainworks.imagetest.makers import Makers
from trainworks.imagetest.results import CheckResult, component_width, line
from trainworks.plan.checks import Check
from trainworks.render.dockerfile import (
    ARCHIVES_LABEL,
    BASE_LABEL,
    INPUTS_LABEL,
    LAYERS_LABEL,
    Rendering,
)
from trainworks.render.steps import build_steps
from trainworks.terminal.build_progress import BuildProgress
from trainworks.terminal.formatting import megabytes
from trainworks.terminal.output import say
from trainworks.terminal.progress import DISPLAY

NAMED = 3
"""The most files of this machine's folders that are named: of more, as of a
CUDA image's wheels, there are dozens.
"""

ARCHIVE_HINT = (
    "`build.py lock --upgrade system` locks that of today,"
    " and TRAINWORKS_SNAPSHOT names one of other days"
)


@dataclass(frozen=True, kw_only=True)
class ImageSpec:
    """An image to build and test: what it is made of, and what this machine adds to the build.

    Attributes:
        name: What messages call it: a target's name, or the new image's.
        tags: Names that the image gets, first the one to print.
        rendering: The build context.
        settings: This machine's settings.
        secrets: Files that the steps read below ``/run/secrets``: name to content.
        add_files: Puts this machine's own copies of locked files into a
            context, and returns their names.
        checks: What is tested after the build.
        forbidden: Texts of this machine that must not be in the image.
        base: The base image that has its name from this project; ``None``: the
            engine finds what FROM names.
        extends: The image that this one extends; ``None`` for an image of a target.
        architecture: What its programs run on; another one than this machine's needs emulation.
        isolated: Whether its tests run its programs isolated: another maker's may be in it.
        makers: Gives the lists of files that the makers of its packages sent.
        network: What its steps reach; ``None``: what those reach that download
            with this machine's settings.
    """

    name: str
    tags: tuple[str, ...]
    rendering: Rendering
    settings: HostSettings
    secrets: Mapping[str, bytes] = field(repr=False)
    add_files: Callable[[Path], tuple[str, ...]] = lambda _folder: ()
    checks: tuple[Check, ...] = ()
    forbidden: tuple[str, ...] = ()
    base: OwnBase | None = None
    extends: BuiltImage | None = None
    architecture: Architecture = "amd64"
    network: Network | None = None
    isolated: Isolation = ""
    makers: Makers | None = None


@dataclass(frozen=True, kw_only=True)
class ImageResult:
    """A built image.

    Attributes:
        image: The image in the engine's store.
        engine: Which engine has it.
        seconds: How long the build took, base image included, tests not.
        base_seconds: How long the base image took.
        unchanged: Whether the engine had an image of the same inputs, and nothing was built.
        checks: One result for each check; ``None`` where the image was not tested.
        tested: When they were asked (UTC, ISO 8601); ``""`` where the image was not tested.
        looked_at: Whether the image was there, and nothing was to be built.
        notes: What is no fault: what a training job does not find in an image that has no plan.
    """

    image: BuiltImage
    engine: Engine
    seconds: float
    base_seconds: float = 0
    unchanged: bool = False
    checks: tuple[CheckResult, ...] | None = None
    tested: str = ""
    looked_at: bool = False
    notes: tuple[str, ...] = ()

    @property
    def broken(self) -> ImageTestError | None:
        """The error that ends a command whose image fails a check; ``None`` where none fails."""
        failed = [outcome for outcome in self.checks or () if not outcome.passed]
        if not failed:
            return None
        names = ", ".join(sorted({outcome.component for outcome in failed}))
        how = "is there" if self.looked_at else "was built"
        return ImageTestError(
            f"{self.image.reference} {how}, and {len(failed)} of its checks failed: {names}",
            hint=(
                "the lines above that begin with FAIL say why;"
                " the image stays in the engine's store"
            ),
            reported=True,
        )

    def as_values(self) -> dict[str, object]:
        """Return it for a report as JSON."""
        values: dict[str, object] = {
            "identifier": self.image.identifier,
            "size": self.image.size,
            "unchanged": self.unchanged,
            "seconds": round(self.seconds, 2),
            "base_seconds": round(self.base_seconds, 2),
            "engine": asdict(self.engine.probe()),
        }
        if self.checks is None:
            return values
        values |= {"notes": list(self.notes)} if self.notes else {}
        return {**values, "tested": self.tested, "checks": [asdict(each) for each in self.checks]}


def build_image(
    spec: ImageSpec, engine: Engine, options: BuildOptions, progress: BuildProgress | None = None
) -> ImageResult:
    """Build an image and test it, as far as ``options.until`` says.

    Where the engine has an image of this name that was built from the very same inputs, that one is
    the result. Checks that this image has passed are not asked again (``build.passed_checks``),
    unless ``options.test_again``.

    Args:
        spec: The image.
        engine: The engine that builds it.
        options: Options of the build.
        progress: Shows the build to a person; default: on this process's display.

    Raises:
        BuildError, EngineError, EngineUnavailableError, HostError, OutputError: See
        ``trainworks.errors``.
    """
    started = based = time.monotonic()
    progress = progress or BuildProgress(verbose=options.verbose)
    image = unchanged_image(spec, engine, options)
    unchanged = image is not None
    if image is None:
        base = spec.base
        if base is not None:
            spec = on_archive(spec, base, locked=options.locked)
            ensure_base(base, engine, spec.settings, progress, again=options.pull)
            based = time.monotonic()
        image = run_build(spec, engine, options, progress)
    _hold_to_lock(spec, image, locked=options.locked)
    seconds = time.monotonic() - started

    growth = ""
    if spec.extends:
        growth = f", {megabytes(image.size - spec.extends.size)} more than its base"
    state = f"built in {seconds:.1f} s with {engine.name}"
    if unchanged:
        state = "nothing changed since this image was built"
    say(f"{spec.tags[0]}  {image.identifier}  {megabytes(image.size)}{growth}  {state}")

    checked = None
    if options.until == "test":
        if not options.test_again:
            checked = _passed_before(spec, image, engine)
        checked = checked or test_image(
            spec, image, engine, junit=options.junit, every_line=options.verbose, whole=True
        )
    return ImageResult(
        image=image,
        engine=engine,
        seconds=seconds,
        base_seconds=based - started,
        unchanged=unchanged,
        checks=checked.results if checked else None,
        tested=checked.when if checked else "",
    )


def unchanged_image(spec: ImageSpec, engine: Engine, options: BuildOptions) -> BuiltImage | None:
    """Return the engine's image of this name, if it was built from the very
    same inputs and may be taken.
    """
    if options.no_cache or options.pull or options.output is not None:
        return None
    image = engine.inspect(spec.tags[0])
    if image is None or image.labels.get(INPUTS_LABEL) != spec.rendering.digest:
        return None
    # What was made from it may have its name, and has its labels.
    return image if image.labels.get(LAYERS_LABEL) == layers_of(image) else None


def on_archive(spec: ImageSpec, base: OwnBase, *, locked: bool) -> ImageSpec:
    """Return an image that reads the package archive in its locked state, where that is anywhere.

    Else today's.

    Raises:
        LockError: It is nowhere, and ``locked``.
    """
    found = locate_archive(base.row, base.states, spec.settings, locked=locked)
    secrets = {**spec.secrets, **found.settings.apt_secrets(base.row.suite)}
    return replace(spec, settings=found.settings, secrets=secrets)


def locate_archive(
    base: Base, states: tuple[LockedArchive, ...], settings: HostSettings, *, locked: bool = False
) -> ArchiveChoice:
    """Return the package archive in its locked state, where that is anywhere.

    Else today's, and say that.

    Raises:
        LockError: It is nowhere, and ``locked``.
    """
    found = find_archive(base, states, settings)
    if found.differs:
        what = "\n  ".join(
            ("the locked state of the package archive is not to be had:", *found.differs)
        )
        if locked:
            raise LockError(what, hint=ARCHIVE_HINT)
        say(f"{what}\n  system packages come from the archive of today; {ARCHIVE_HINT}")
    return found


def _hold_to_lock(spec: ImageSpec, image: BuiltImage, *, locked: bool) -> None:
    """Refuse an image whose system packages are not of the locked day, where that was asked for."""
    if not locked or spec.base is None:
        return
    read = image.labels.get(ARCHIVES_LABEL, "")
    wanted = _label_of(map(line_of, spec.base.states))
    if read != wanted:
        raise LockError(
            f"{image.reference} has system packages of another day than the lock:"
            f" {read or 'not known'}, not {wanted}",
            hint="its layers were built before: `--pull --no-cache` builds all of them again",
        )


def _label_of(lines: Iterable[str]) -> str:
    """Return the text of the label: suite and date of each state, and the beginning of its hash."""
    words = (line.split() for line in sorted({*lines}))
    return ", ".join(f"{suite} {date} {contents[:12]}" for suite, date, contents in words)


def run_build(
    spec: ImageSpec, engine: Engine, options: BuildOptions, progress: BuildProgress
) -> BuiltImage:
    """Write the context and let the engine build it; the base image has to be there."""
    # The labels also name the layers, and the states of the package archive in them. Both are known
    # only after the build: a step from the cache may be of another day than is expected. So a
    # second build on the image sets these two, and nothing else. In the first one they are empty,
    # so that its labels do not depend on earlier builds on this machine: buildah writes the names
    # of images in between, which follow from their labels, into the history of the last one.
    labels = {INPUTS_LABEL: spec.rendering.digest}
    unknown = {LAYERS_LABEL: ""}
    if spec.base:
        labels[BASE_LABEL] = spec.base.origin
        unknown[ARCHIVES_LABEL] = ""
    image = build_context(spec, labels | unknown, engine, options, progress)
    known = {LAYERS_LABEL: layers_of(image)}
    if spec.base:
        with engine.container(image.identifier) as container:
            record = container.run(("cat", RECORD))
        lines = record.output.splitlines() if record.status == 0 else []
        known[ARCHIVES_LABEL] = _label_of(lines)
    labelled = _label(spec, labels | known, engine, progress)
    if labelled.layers != image.layers:
        raise EngineError(
            f"another build on this machine gave {spec.tags[0]} to its own image meanwhile",
            hint="build again, one checkout after the other",
        )
    return labelled


def build_context(
    spec: ImageSpec,
    labels: Mapping[str, str],
    engine: Engine,
    options: BuildOptions,
    progress: BuildProgress,
) -> BuiltImage:
    """Write the context and let the engine build it, once, with these labels."""
    information, rendering = engine.probe(), spec.rendering
    say(f"{spec.name}: building with {information.name} {information.version}")
    with ExitStack() as stack:
        if options.output is None:
            folder = stack.enter_context(context_folder(spec.name, os.environ))
        else:
            folder = options.output
            replace_output(rendering, folder)
        fill_context(spec, folder)
        steps = build_steps(rendering.dockerfile, rendering.stage_components)
        stack.enter_context(progress.following(StepTally(steps)))
        request = BuildRequest(
            name=spec.name,
            context=folder,
            tags=spec.tags,
            secrets=tuple(
                Secret(identifier=name, content=content) for name, content in spec.secrets.items()
            ),
            arguments=spec.settings.proxies,
            labels=labels,
            stage_components=rendering.stage_components,
            no_cache=options.no_cache,
            architecture=spec.architecture,
            network=spec.network or spec.settings.network,
        )
        return engine.build(request, progress)


def _label(
    spec: ImageSpec, labels: Mapping[str, str], engine: Engine, progress: BuildProgress
) -> BuiltImage:
    """Give the labels to the image that has the name: another one with the same layers gets it."""
    with private_folder() as folder:
        (folder / "Dockerfile").write_text(f"FROM {spec.tags[0]}\n", encoding="utf-8")
        request = BuildRequest(
            name=spec.name,
            context=folder,
            tags=spec.tags,
            labels=labels,
            same_layers=True,
            architecture=spec.architecture,
        )
        return engine.build(request, progress)


def fill_context(spec: ImageSpec, folder: Path) -> None:
    """Write an image's context into an empty folder, with what this machine has
    of its downloads.
    """
    write_context(spec.rendering, folder)
    if found := spec.add_files(folder):
        files = ", ".join(found) if len(found) <= NAMED else f"{len(found)} files"
        say(f"  from this machine's own folders: {files}")


def _passed_before(spec: ImageSpec, image: BuiltImage, engine: Engine) -> PassedChecks | None:
    before = passed_before(image, os.environ, decided_by=_decides(spec, image, engine))
    if before is not None:
        say(
            f"known by its identifier: {len(before.results)} checks passed on {before.when}; "
            "`check --image` and `--junit FILE` ask them again"
        )
    return before


def test_image(
    spec: ImageSpec,
    image: BuiltImage,
    engine: Engine,
    *,
    junit: Path | None,
    every_line: bool,
    whole: bool,
) -> PassedChecks:
    """Run each check on an image: one line for each that fails as soon as it is
    known, and a line that sums up.

    Args:
        spec: What the image should be.
        image: The image.
        engine: The engine that has it.
        junit: File that gets the results as JUnit XML; ``None`` for no file.
        every_line: Whether checks that pass get a line, too.
        whole: Whether these are all checks of the image: a build knows one that
            passes them by its identifier.
    """
    # Only here: pytest takes a while to load, and a build that stops earlier does not need it.
    from trainworks.imagetest.run import run_checks

    width = component_width(spec.checks)
    with DISPLAY.task("checking", len(set(spec.checks)), "checks", log=False) as task:

        def report(outcome: CheckResult) -> None:
            if every_line or not outcome.passed:
                say(line(outcome, width=width))
            task.note = outcome.component
            task.advance()

        results = run_checks(
            engine,
            image,
            spec.checks,
            forbidden=spec.forbidden,
            base=spec.extends,
            isolated=spec.isolated,
            makers=spec.makers,
            report=report,
            junit=junit,
        )
    failed = sum(not outcome.passed for outcome in results)
    say(f"{len(results) - failed} checks passed, {failed} failed")
    passed = PassedChecks(results=results, when=now())
    if whole:
        remember(image, passed, os.environ, decided_by=_decides(spec, image, engine))
    return passed


def _decides(spec: ImageSpec, image: BuiltImage, engine: Engine) -> str:
    return what_decides(image, engine, spec.checks, forbidden=spec.forbidden, base=spec.extends)
