"""The main job: from a plan to a tested image. Each stage's value is shown or handed on; effects are only here."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from trainworks.build.context import (
    add_local_artifacts,
    add_local_wheels,
    context_folder,
    one_at_a_time,
    replace_output,
    write_context,
)
from trainworks.build.history import LastBuild
from trainworks.engine.progress import StepTally, Timings
from trainworks.engine.protocol import BuildRequest, BuiltImage, Engine, Secret
from trainworks.engine.scratch import private_folder
from trainworks.errors import ImageTestError
from trainworks.host.bootstrap import bootstrap
from trainworks.host.settings import HostSettings
from trainworks.imagetest.results import CheckResult, component_width, line
from trainworks.imagetest.run import run_checks
from trainworks.plan.checks import Check
from trainworks.plan.model import ImagePlan
from trainworks.plan.resolve import base_reference
from trainworks.render.dockerfile import INPUTS_LABEL, Rendering
from trainworks.render.forecast import kept_components
from trainworks.render.steps import build_steps
from trainworks.terminal.build_progress import BuildProgress
from trainworks.terminal.output import say
from trainworks.terminal.progress import DISPLAY
from trainworks.terminal.words import megabytes

PULL_SECONDS = 300.0
"""How long a pull of a base image may take before it is bootstrapped instead."""


@dataclass(frozen=True, kw_only=True)
class BuildResult:
    """What a build came to: the image, and how long it took in seconds (base image included).

    ``unchanged``: the engine had an image of the same inputs, and nothing was built. ``timings`` are of its steps.
    """

    image: BuiltImage
    seconds: float
    base_seconds: float
    unchanged: bool = False
    timings: Timings = field(default_factory=Timings)


def build_image(
    plan: ImagePlan,
    rendering: Rendering,
    engine: Engine,
    settings: HostSettings,
    progress: BuildProgress,
    *,
    output: Path | None = None,
    sources: Sequence[Path] = (),
    no_cache: bool = False,
    last: LastBuild | None = None,
) -> BuildResult:
    """Build the image of a plan; the base image is made first where it is not there yet.

    Where the engine has an image of this name that was built from the very same inputs, that one is the result.

    Args:
        plan: What to build.
        rendering: Its build context.
        engine: What builds it.
        settings: This machine's settings, passed to the steps that download.
        progress: Follows the build, for a person.
        output: Folder to leave the context in; default: a private one that is removed.
        sources: Folders that have files which components download; the first one that has a file wins.
        no_cache: Build every step again.
        last: The last build of this image on this machine: what will take how long.

    Raises:
        BuildError, EngineUnavailableError, HostError, OutputError: See ``trainworks.errors``.
    """
    started = time.monotonic()
    existing = None if no_cache or output else engine.inspect(plan.tags[0])
    if existing is not None and existing.labels.get(INPUTS_LABEL) == rendering.digest:
        progress.line(f"  nothing changed since this image was built: {plan.tags[0]}")
        return BuildResult(image=existing, seconds=time.monotonic() - started, base_seconds=0, unchanged=True)
    ensure_base(plan, engine, settings, progress)
    based = time.monotonic()
    steps = build_steps(rendering.dockerfile, rendering.stage_components)
    kept = kept_components(plan, rendering, last.inputs) if last and not no_cache else ()
    tally = StepTally(steps, last.timings if last else None, kept)
    with ExitStack() as stack:
        if output is None:
            folder = stack.enter_context(context_folder(plan.target.name, os.environ))
        else:
            replace_output(rendering, output)
            folder = output
        write_context(rendering, folder)
        found = add_local_wheels(plan, settings.pip, folder)
        found += add_local_artifacts(plan, sources, folder)
        if found:
            progress.line(f"  from this machine's own folders: {', '.join(found)}")
        stack.enter_context(progress.following(tally))
        image = engine.build(
            BuildRequest(
                name=plan.target.name,
                context=folder,
                tags=plan.tags,
                secrets=tuple(
                    Secret(identifier=name, content=content)
                    for name, content in settings.secrets(
                        plan.base.suite if plan.base.bootstrap else "", plan.wheel_index
                    ).items()
                ),
                arguments=settings.proxies,
                labels={INPUTS_LABEL: rendering.digest},
                stage_components=rendering.stage_components,
                no_cache=no_cache,
            ),
            progress,
        )
    return BuildResult(
        image=image, seconds=time.monotonic() - started, base_seconds=based - started, timings=tally.timings
    )


def ensure_base(plan: ImagePlan, engine: Engine, settings: HostSettings, progress: BuildProgress) -> None:
    """Have a base image that can be bootstrapped under its local name: from the store, else pulled, else made."""
    name = plan.image
    if name != base_reference(plan.base) or engine.inspect(name) is not None:
        # What cannot be bootstrapped is pulled by the engine itself, by the digest in its FROM.
        return
    with one_at_a_time(name, os.environ):
        if engine.inspect(name) is None:
            _make_base(plan, name, engine, settings, progress)


def _make_base(plan: ImagePlan, name: str, engine: Engine, settings: HostSettings, progress: BuildProgress) -> None:
    if plan.base.digest:
        reference = f"{plan.base.image}@{plan.base.digest}"
        progress.line(f"  pulling {reference}")
        with progress.display.task("pulling", log=False):
            pulled = engine.pull(reference, timeout=PULL_SECONDS)
        if pulled:
            engine.tag(reference, name)
            return
        progress.line("  no registry answers: the base image is bootstrapped instead")
    started = time.monotonic()
    progress.line(f"  bootstrapping {name} from the {plan.base.suite} package archive")
    with private_folder() as folder, progress.display.task("bootstrapping", log=False) as task:
        archive = folder / "base.tar"

        def note(line: str) -> None:
            task.note = line
            if progress.verbose:
                progress.line(f"  {'base':<20} {line}")

        bootstrap(plan.base, name, archive, settings, note)
        engine.load(archive)
    progress.line(f"  {'base':<20} {time.monotonic() - started:6.1f} s  {name}")


def check_image(
    plan: ImagePlan, image: BuiltImage, engine: Engine, settings: HostSettings, *, junit: Path | None = None
) -> tuple[CheckResult, ...]:
    """Check every promise of a plan against its image, one line each as it is known, and a line that sums up."""
    with reported_checks(plan.checks) as report:
        results = run_checks(
            engine,
            image,
            plan.checks,
            forbidden=settings.forbidden_texts(plan.wheel_index),
            report=report,
            junit=junit,
        )
    failed = sum(not outcome.passed for outcome in results)
    say(f"{len(results) - failed} checks passed, {failed} failed")
    return results


@contextmanager
def reported_checks(checks: tuple[Check, ...]) -> Iterator[Callable[[CheckResult], None]]:
    """Give what shows each result of these checks, and how many there are of all."""
    width = component_width(checks)
    with DISPLAY.task("checking", len(set(checks)), "checks", log=False) as task:

        def report(outcome: CheckResult) -> None:
            say(line(outcome, width=width))
            task.advance()

        yield report


def broken_promises(plan: ImagePlan, results: Sequence[CheckResult]) -> ImageTestError | None:
    """Return the error that ends a run whose image does not keep every promise, ``None`` where it does."""
    failed = [outcome for outcome in results if not outcome.passed]
    if not failed:
        return None
    names = ", ".join(sorted({outcome.component for outcome in failed}))
    return ImageTestError(
        f"{plan.tags[0]} was built and breaks {len(failed)} of its promises: {names}",
        hint="the lines above that begin with FAIL say why; the image stays in the engine's store for a look",
        reported=True,
    )


def describe_result(plan: ImagePlan, result: BuildResult, engine: Engine) -> str:
    """Return the line that ends a build: the image's name first, because that is what the user goes on with."""
    return (
        f"{plan.tags[0]}  {result.image.identifier}  {megabytes(result.image.size)}"
        f"  built in {result.seconds:.1f} s with {engine.name}"
    )
