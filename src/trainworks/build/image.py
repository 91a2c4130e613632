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

from trainworks.build.base import ensure_base
from trainworks.build.context import context_folder, replace_output, write_context
from trainworks.build.layer_audit import layers_of
from trainworks.build.options import BuildOptions
from trainworks.build.passed_checks import (
    PassedChecks,
    identity_of_checks,
    now,
    passed_before,
    remember,
)
from trainworks.engine.progress import StepTally
from trainworks.engine.protocol import BuildRequest, BuiltImage, Engine, Isolation, Network, Secret
from trainworks.engine.temporary_folders import private_folder
from trainworks.errors import EngineError, ImageTestError, LockError
from trainworks.facts.rows import Architecture, Base, LockedArchive
from trainworks.host.archives import RECORD, ArchiveChoice, find_archive, format_state
from trainworks.host.settings import HostSettings
from trainworks.imagetest.makers import Makers
from trainworks.imagetest.results import CheckResult, component_width, line
from trainworks.plan.checks import Check
from trainworks.plan.own_base import OwnBase
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

MOST_NAMES = 3
"""The most files of this machine's folders that a line names: there may be dozens of wheels."""

HASH_IN_LABEL = 12
"""Characters of a state's hash in an image's label."""

ARCHIVE_HINT = (
    "`build.py lock --upgrade system` locks that of today,"
    " and TRAINWORKS_SNAPSHOT names one of other days"
)


@dataclass(frozen=True, kw_only=True)
class ImageSpec:
    """An image to build and test, with this machine's additions to the build.

    Attributes:
        name: The name in messages: a target's name, or the new image's.
        tags: Names that the image gets, first the one to print.
        rendering: The build context.
        settings: This machine's settings.
        secrets: Files that the steps read below ``/run/secrets``: name to content.
        add_files: Puts this machine's own copies of locked files into a
            context, and returns their names.
        checks: The checks after the build.
        forbidden: Texts of this machine that must not be in the image.
        base: The base image that has its name from this project; ``None``: the
            engine finds the image of FROM.
        extends: The image that this one extends; ``None`` for an image of a target.
        architecture: The architecture of the programs; another one than this machine's needs
            emulation.
        isolated: The isolation of programs in tests: another maker's may be in the image.
        makers: Gives the lists of files of the packages' makers.
        network: The network of the steps; ``None``: that of steps that download with this
            machine's settings.
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
        engine: The engine that has the image.
        seconds: The duration of the build with the base image, without tests.
        base_seconds: The duration of the base image's build.
        unchanged: Whether the engine had an image of the same inputs, and nothing was built.
        checks: One result for each check; ``None`` if the image was not tested.
        tested: The time of the checks (UTC, ISO 8601); ``""`` if the image was not tested.
        looked_at: Whether the image was only checked, and nothing was to be built.
        notes: Notes that are no faults: programs that an image without a plan lacks for training.
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
        state = "is there" if self.looked_at else "was built"
        return ImageTestError(
            f"{self.image.reference} {state}, and {len(failed)} of its checks failed: {names}",
            hint=("the lines above with FAIL say why; the image stays in the engine's store"),
            reported=True,
        )

    def as_values(self) -> dict[str, object]:
        """Return the result as an object for JSON; without checks if the image was not tested."""
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
        if self.notes:
            values["notes"] = list(self.notes)
        values["tested"] = self.tested
        values["checks"] = [asdict(result) for result in self.checks]
        return values


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """The report of an image's checks, besides the lines of those that fail.

    Attributes:
        junit: The file for the results as JUnit XML; ``None`` for no file.
        every_line: Whether checks that pass get a line, too.
    """

    junit: Path | None
    every_line: bool


def build_image(
    spec: ImageSpec, engine: Engine, options: BuildOptions, progress: BuildProgress | None = None
) -> ImageResult:
    """Build an image and test it, as far as ``options.until`` says.

    An image of this name that the engine has built from the same inputs is the result. Checks that
    this image has passed do not run again (``build.passed_checks``), unless
    ``options.test_again``. A line with the image's size and time is printed; failed checks are in
    the result, and raise nothing.

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
    _check_archive_states(spec, image, locked=options.locked)
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
        if checked is None:
            report = CheckReport(junit=options.junit, every_line=options.verbose)
            checked = test_image(spec, image, engine, report=report, whole=True)
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
    """Return the engine's image of this name, if it was built from the same inputs.

    ``None`` without one, and for options that want a build in any case: ``no_cache``, ``pull`` and
    ``output``, whose folder only a build fills.
    """
    if options.no_cache or options.pull or options.output is not None:
        return None
    image = engine.inspect(spec.tags[0])
    if image is None or image.labels.get(INPUTS_LABEL) != spec.rendering.digest:
        return None
    # An image that was made from this one inherits its labels, and may have got its name: it has
    # more layers than the label says.
    if image.labels.get(LAYERS_LABEL) != layers_of(image):
        return None
    return image


def on_archive(spec: ImageSpec, base: OwnBase, *, locked: bool) -> ImageSpec:
    """Return an image whose steps read the package archive in its locked state, else today's.

    A line is printed if no archive has the locked state.

    Args:
        spec: The image.
        base: Its base, with the locked states.
        locked: Whether another state than the locked one is an error.

    Raises:
        LockError: No archive has the locked state, and ``locked``.
    """
    archive = locate_archive(base.row, base.states, spec.settings, locked=locked)
    secrets = {**spec.secrets, **archive.settings.apt_secrets(base.row.suite)}
    return replace(spec, settings=archive.settings, secrets=secrets)


def locate_archive(
    base: Base, states: tuple[LockedArchive, ...], settings: HostSettings, *, locked: bool = False
) -> ArchiveChoice:
    """Find the package archive in its locked state, else today's archive, and print which one.

    Args:
        base: The base with its suites.
        states: The locked states; none: today's archive is read, and nothing is printed.
        settings: This machine's archives.
        locked: Whether another state than the locked one is an error.

    Raises:
        LockError: No archive has the locked state, and ``locked``.
    """
    archive = find_archive(base, states, settings)
    if archive.differs:
        head = "the locked archive snapshot is unavailable:"
        problem = "\n  ".join((head, *archive.differs))
        if locked:
            raise LockError(problem, hint=ARCHIVE_HINT)
        say(f"{problem}\n  system packages come from the archive of today; {ARCHIVE_HINT}")
    return archive


def _check_archive_states(spec: ImageSpec, image: BuiltImage, *, locked: bool) -> None:
    """Check that an image's system packages are of the locked day, if ``locked``.

    Raises:
        LockError: A layer of the image is of another day.
    """
    if not locked or spec.base is None:
        return
    label = image.labels.get(ARCHIVES_LABEL, "")
    expected = _make_archives_label(map(format_state, spec.base.states))
    if label != expected:
        raise LockError(
            f"{image.reference} has system packages of another day than the lock:"
            f" {label or 'not known'}, not {expected}",
            hint="its layers were built before: `--pull --no-cache` builds all of them again",
        )


def _make_archives_label(lines: Iterable[str]) -> str:
    """Return the text of the label for states of the package archive.

    For example ``bookworm 2026-11-21T10:00:00Z 0123456789ab``: suite, date, and the beginning of
    the hash; several states have commas between them.

    Args:
        lines: Lines ``SUITE DATE CONTENTS``, as in ``host.archives.RECORD``.
    """
    states = []
    for state_line in sorted(set(lines)):
        suite, date, contents = state_line.split()
        states.append(f"{suite} {date} {contents[:HASH_IN_LABEL]}")
    return ", ".join(states)


def find_installed_states(
    archives: Iterable[LockedArchive], labels: Mapping[str, str]
) -> tuple[LockedArchive, ...]:
    """Return the states of the package archive that an image's packages came from.

    An image is of the locked states, or of others, if these were not available when it was built.

    Args:
        archives: The locked states.
        labels: The image's labels. One that is not known there is left out.

    Returns:
        The suites of ``archives``, with date and hash of the label; the hash is its beginning.
    """
    states: dict[str, tuple[str, str]] = {}
    for state in filter(None, labels.get(ARCHIVES_LABEL, "").split(", ")):
        suite, date, contents = state.split()
        states[suite] = date, contents
    installed = []
    for archive in archives:
        if archive.suite in states:
            date, contents = states[archive.suite]
            installed.append(replace(archive, date=date, contents=contents))
    return tuple(installed)


def run_build(
    spec: ImageSpec, engine: Engine, options: BuildOptions, progress: BuildProgress
) -> BuiltImage:
    """Write the context, build it, and label the image with its layers and archive states.

    The base image has to be in the engine's store.

    Raises:
        BuildError: A step failed.
        EngineError: Another build moved the image's name meanwhile.
    """
    # The labels also name the layers, and the states of the package archive in them. Both are known
    # only after the build: a step from the cache may be of another day than is expected. So a
    # second build on the image sets these two, and nothing else. In the first one they are empty,
    # so that its labels do not depend on earlier builds on this machine: buildah writes the names
    # of images in between, which follow from their labels, into the history of the last one.
    labels = {INPUTS_LABEL: spec.rendering.digest}
    empty_labels = {LAYERS_LABEL: ""}
    if spec.base:
        labels[BASE_LABEL] = spec.base.origin
        empty_labels[ARCHIVES_LABEL] = ""
    image = build_context(spec, labels | empty_labels, engine, options, progress)
    late_labels = {LAYERS_LABEL: layers_of(image)}
    if spec.base:
        with engine.container(image.identifier) as container:
            record = container.run(("cat", RECORD))
        lines = record.output.splitlines() if record.status == 0 else []
        late_labels[ARCHIVES_LABEL] = _make_archives_label(lines)
    labelled = _label(spec, labels | late_labels, engine, progress)
    # ``FROM`` names the image by its tag, which another build may have moved.
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
    """Write the context, and build it once with these labels.

    The context is in a temporary folder, which is deleted, or in ``options.output``, which stays.

    Raises:
        BuildError: A step failed.
        OutputError: The context cannot be written.
    """
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
        secrets = []
        for name, content in spec.secrets.items():
            secrets.append(Secret(identifier=name, content=content))
        request = BuildRequest(
            name=spec.name,
            context=folder,
            tags=spec.tags,
            secrets=tuple(secrets),
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
    """Build an image with more labels and the same layers; the name moves to that image."""
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
    """Write an image's context into an empty folder, with this machine's copies of downloads.

    A line is printed about the copies, if there are any.

    Raises:
        OutputError: A file cannot be written.
    """
    write_context(spec.rendering, folder)
    names = spec.add_files(folder)
    if names:
        files = f"{len(names)} files"
        if len(names) <= MOST_NAMES:
            files = ", ".join(names)
        say(f"  from this machine's own folders: {files}")


def _passed_before(spec: ImageSpec, image: BuiltImage, engine: Engine) -> PassedChecks | None:
    """Return the checks that an image has passed on this machine, and print that; or ``None``."""
    before = passed_before(image, os.environ, decided_by=_identify_checks(spec, image, engine))
    if before is not None:
        say(
            f"known by its identifier: {len(before.results)} checks passed on {before.when}; "
            "`check --image` and `--junit FILE` ask them again"
        )
    return before


def test_image(
    spec: ImageSpec, image: BuiltImage, engine: Engine, *, report: CheckReport, whole: bool
) -> PassedChecks:
    """Run the checks of an image: a line for each failure at once, and a line with the numbers.

    Args:
        spec: The specification of the image.
        image: The image.
        engine: The engine that has it.
        report: The lines and the file for the results.
        whole: Whether these are all checks of the image: if they pass, later builds skip them
            for this image's identifier.

    Returns:
        The results of all checks, also of those that failed, and the time.
    """
    # Only here: pytest takes a while to load, and a build that stops earlier does not need it.
    from trainworks.imagetest.run import run_checks
    from trainworks.imagetest.test_promises import ImageUnderTest

    subject = ImageUnderTest(
        engine=engine,
        image=image,
        checks=spec.checks,
        forbidden=spec.forbidden,
        base=spec.extends,
        isolated=spec.isolated,
        makers=spec.makers,
    )
    width = component_width(spec.checks)
    with DISPLAY.task("checking", len(set(spec.checks)), "checks", log=False) as task:

        def show(outcome: CheckResult) -> None:
            if report.every_line or not outcome.passed:
                say(line(outcome, width=width))
            task.note = outcome.component
            task.advance()

        results = run_checks(subject, report=show, junit=report.junit)
    failed = sum(not outcome.passed for outcome in results)
    say(f"{len(results) - failed} checks passed, {failed} failed")
    passed = PassedChecks(results=results, when=now())
    if whole:
        remember(image, passed, os.environ, decided_by=_identify_checks(spec, image, engine))
    return passed


def _identify_checks(spec: ImageSpec, image: BuiltImage, engine: Engine) -> str:
    """Return the digest of all that decides the results of an image's checks."""
    return identity_of_checks(
        image, engine, spec.checks, forbidden=spec.forbidden, base=spec.extends
    )
