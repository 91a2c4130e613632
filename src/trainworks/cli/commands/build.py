"""``build.py``: walks the layers from a row to a tested image, as far as ``--until`` says."""

from __future__ import annotations

import argparse
import json
import os
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from trainworks.cli.grammar import (
    APT_SETTINGS,
    DOCKER_HOST,
    FACTS,
    HOST_SETTINGS,
    MEMORY,
    Example,
    Grammar,
    add_build_options,
    add_components,
    add_engine,
    add_format,
    add_repositories,
    add_until,
)
from trainworks.errors import (
    BuildError,
    CompatibilityError,
    EngineError,
    EngineUnavailableError,
    FactsError,
    HostError,
    ImageTestError,
    LockError,
    RecipeError,
    RegistryError,
    UnknownNameError,
)
from trainworks.terminal.output import put, put_result

if TYPE_CHECKING:
    from trainworks.facts.rows import Facts
    from trainworks.plan.model import ImagePlan, Request
    from trainworks.render.dockerfile import Rendering
    from trainworks.render.forecast import Forecast

STAGES = ("plan", "render", "build", "test")
"""How far ``--until`` goes; each includes those before it."""


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def parser() -> Grammar:
    """Return the grammar of ``build.py``."""
    grammar = Grammar(
        "build",
        program="build.py",
        usage="build.py [build] --framework FRAMEWORK --cuda CELL [options]\n"
        "       build.py [build] --list | --all | --only GLOB [options]",
        summary="build and test an image; the command that is meant where none is named",
        details="Builds a container image for training on Amazon SageMaker and clusters like it, and tests every "
        "promise that its parts make.",
        examples=(
            Example("--list", "what can be built, and what was built for real"),
            Example("--framework pytorch --cuda cu121 --until plan", "what would it be made of, and built again? why?"),
            Example("--framework pytorch --cuda cpu --until render --output context", "write its Dockerfile and files"),
            Example("--framework pytorch --cuda cu121", "build and test the newest PyTorch for CUDA 12.1", "an engine"),
            Example("--all -j 2", "build and test every target, two at once", "an engine"),
        ),
        result="the image's name on stdout once every test is green; `build.py push NAME` brings it to a registry. "
        "Progress and errors go to stderr.",
        done="done, and tests green",
        fails=(
            FactsError,
            UnknownNameError,
            RecipeError,
            EngineError,
            EngineUnavailableError,
            BuildError,
            ImageTestError,
            HostError,
            LockError,
            CompatibilityError,
            RegistryError,
        ),
        reads=(FACTS, HOST_SETTINGS, APT_SETTINGS, DOCKER_HOST, MEMORY),
        see_also=("check", "extend", "push", "docs/targets.md"),
    )
    what = grammar.add_argument_group("what to build")
    what.add_argument("--framework", metavar="FRAMEWORK", help="for example pytorch")
    what.add_argument("--cuda", metavar="CELL", help="cpu, or for example cu121")
    what.add_argument("--framework-version", metavar="VERSION", help="default: the newest for this CUDA")
    what.add_argument("--python", metavar="PYTHON", help="for example 3.13; default: the oldest of the target")
    what.add_argument(
        "--sources",
        choices=("packages", "vendor"),
        default="packages",
        help="packages: Debian and Python packages only (default); vendor: the vendors' own installers",
    )
    add_components(what)
    many = grammar.add_argument_group("many targets")
    many.add_argument("--all", action="store_true", help="every target; those with unlocked inputs are skipped")
    many.add_argument("--only", action="append", default=[], metavar="GLOB", help="targets of these names: 'pytorch-*'")
    many.add_argument("-j", "--jobs", type=_count, default=1, metavar="N", help="so many at once (default: 1)")
    many.add_argument("--bake", action="store_true", help="write docker-bake.json for `docker buildx bake` to --output")
    how = grammar.add_argument_group("how")
    how.add_argument("--list", action="store_true", help="show every target, and which were built for real")
    add_until(how, STAGES)
    add_engine(how)
    add_format(how)
    add_build_options(how)
    how.add_argument("--mirror", metavar="DIR|URL", help="take from here what it has (`build.py mirror DIR` fills one)")
    how.add_argument("--offline", action="store_true", help="with --mirror: take every download from there, or fail")
    how.add_argument(
        "--strict",
        action="store_true",
        help="fail where an input is not locked or a source cannot be reached; --push and --record imply it",
    )
    how.add_argument(
        "--record", action="store_true", help="write into images/built.toml that it was built, if its tests pass"
    )
    push = grammar.add_argument_group("push (docs/push.md)")
    push.add_argument("--push", action="store_true", help="push the image once it is built and tested")
    add_repositories(push)
    return grammar


def run(options: Namespace, root: Path) -> int:
    """Build a target, as far as ``--until`` says; or list them all."""
    from trainworks.facts.load import load

    if options.list:
        from trainworks.inspect.current import remembered_builds
        from trainworks.inspect.listing import list_json, list_text

        facts = load(root)
        current = remembered_builds(facts, root, os.environ)
        put(list_json(facts, current) if options.format == "json" else list_text(facts, current))
        return 0
    if options.push and (options.all or options.only):
        parser().error("--push is for one target; `build.py push TARGET` pushes what is built already")
    if options.record and options.until != "test":
        parser().error("--record is for what was tested: no --until")
    if options.push and (not options.repository or options.until != "test"):
        parser().error("--push wants --repository HOST/NAME, and pushes what was tested: no --until")
    if not options.push and (options.repository or options.fixed_tags or options.moving_tags):
        parser().error("--repository, --tag and --moving-tag belong to --push")
    if options.offline and not options.mirror:
        parser().error("--offline wants --mirror DIR or --mirror URL")
    if options.all or options.only or options.bake:
        return _many(options, load(root), root)
    missing = [flag for flag, value in (("--framework", options.framework), ("--cuda", options.cuda)) if not value]
    if missing:
        parser().error(f"{' and '.join(missing)} must be given; --list shows what there is")
    from trainworks.plan.model import Request
    from trainworks.plan.resolve import make_plan

    request = Request(
        framework=options.framework,
        cuda=options.cuda,
        version=options.framework_version,
        python=options.python,
        sources=options.sources,
        with_components=tuple(options.with_components),
        without_components=tuple(options.without_components),
    )
    facts = load(root)
    plan = make_plan(request, facts)
    # Each later layer is imported when it is reached: planning stays quick, and needs no engine's libraries.
    if options.until in ("build", "test"):
        return _build(request, plan, facts, options, root)
    from trainworks.render.dockerfile import render

    rendering = render(plan, facts)
    if options.until == "plan":
        return _show_plan(plan, rendering, facts, options)
    return _show_rendering(plan, rendering, options)


def _many(options: Namespace, facts: Facts, root: Path) -> int:
    from trainworks.build.many import build_many

    chosen = {"--framework": options.framework, "--cuda": options.cuda, "--python": options.python}
    named = [flag for flag, value in (chosen | {"--framework-version": options.framework_version}).items() if value]
    if named:
        parser().error(f"{' and '.join(named)}: --all and --only choose targets by their names")
    if options.bake:
        from trainworks.build.bake import write_bake

        if options.output is None:
            parser().error("--bake needs --output DIR, a folder for the file and the contexts")
        return write_bake(options, facts, os.environ)
    return build_many(options, facts, root)


def _show_plan(plan: ImagePlan, rendering: Rendering, facts: Facts, options: Namespace) -> int:
    from trainworks.build.history import last_build
    from trainworks.render.forecast import forecast

    last = last_build(plan.tags[0], os.environ)
    expected = forecast(plan, rendering, facts, last.inputs if last else None, last.ended if last else "")
    content = {**json.loads(plan.as_json()), "forecast": expected.as_values()}
    put_result(options, content, describe_plan(plan) + describe_forecast(expected) + _describe_sources(plan, options))
    return 0


def _describe_sources(plan: ImagePlan, options: Namespace) -> str:
    """Return for people which sources the build would have to download; nothing is asked for."""
    from trainworks.inputs.mirror import read_mirror
    from trainworks.inputs.sources import Places, missing_sources, sources_folder

    mirror = read_mirror(options.mirror, offline=options.offline)
    places = Places(folders=mirror.folders(sources_folder(os.environ)))
    files = list(dict.fromkeys(artifact.file for _, artifact in missing_sources(plan, places)))
    if not files:
        return ""
    return f"  not on this machine yet, downloaded when the image is built: {', '.join(files)}\n"


def describe_forecast(expected: Forecast) -> str:
    """Return for people what a build would do: what is built again and why, the download, the size."""
    if not expected.since:
        lines = ["  not built on this machine yet: everything is built"]
    elif not expected.rebuilds:
        lines = [f"  nothing changed since the build of {expected.since}"]
    else:
        lines = [f"  since the build of {expected.since}:"]
        width = max(len(rebuild.component) for rebuild in expected.rebuilds)
        lines += [f"    {each.component:<{width}}  {'; '.join(each.reasons)}" for each in expected.rebuilds]
        lines.append(f"    layers of the image are written again from {expected.layers_from} on")
        if expected.kept:
            lines.append(f"    from the engine's cache: {', '.join(expected.kept)}")
    unknown = f" and {expected.unknown_sizes} files of unknown size" if expected.unknown_sizes else ""
    lines.append(f"  downloads about {expected.download_bytes / 1e6:,.0f} MB{unknown}, what caches lack of it")
    size = f"about {expected.image_megabytes:,} MB, going by" if expected.image_megabytes else "size not known:"
    lines.append(f"  image: {size} {expected.basis}")
    return "\n".join(lines) + "\n"


def describe_plan(plan: ImagePlan) -> str:
    """Return a plan for people: target, components with their versions, what is missing and what that costs."""
    lines = [plan.target.name, f"  image  {plan.tags[0]}", f"  base   {plan.image}, Python {plan.target.python}"]
    width = max(len(step.component) for step in plan.steps)
    lines += [f"  {step.component:<{width}}  {step.version or '-':<10}  {step.summary}" for step in plan.steps]
    lines += [f"  without {missing.component}: {missing.cost}" for missing in plan.missing]
    lines += [f"  not locked: {what}" for what in plan.unlocked]
    lines += [f"  advice: {advice}" for advice in plan.advice]
    lines.append(f"  {len(plan.checks)} checks after the build; at most {plan.budget_megabytes} MB")
    return "\n".join(lines) + "\n"


def _show_rendering(plan: ImagePlan, rendering: Rendering, options: Namespace) -> int:
    from trainworks.build.context import replace_output, write_context

    if options.output is not None:
        replace_output(rendering, options.output)
        write_context(rendering, options.output)
    content = {
        "name": plan.target.name,
        "tags": plan.tags,
        "dockerfile": rendering.dockerfile,
        "files": [file.path for file in rendering.files],
    }
    put_result(options, content, rendering.dockerfile if options.output is None else f"{options.output}\n")
    return 0


def _build(request: Request, plan: ImagePlan, facts: Facts, options: Namespace, root: Path) -> int:
    from trainworks.build.history import last_build, record_build
    from trainworks.build.image import broken_promises, build_image, check_image, describe_result
    from trainworks.engine import choose
    from trainworks.host.settings import read_host_settings
    from trainworks.inputs.mirror import check_mirror, read_mirror, refuse_unlocked
    from trainworks.inputs.source_code import describe_left_out, reachable_plan
    from trainworks.render.dockerfile import render
    from trainworks.render.forecast import inputs_of
    from trainworks.terminal.build_progress import BuildProgress
    from trainworks.terminal.output import say

    refuse_unlocked(plan)
    mirror = read_mirror(options.mirror, offline=options.offline)
    settings = mirror.settings(read_host_settings(os.environ))
    if mirror.folder:
        check_mirror(plan, mirror.folder, complete=options.offline)
    places = mirror.places(facts, settings, os.environ)
    strict = options.strict or options.push or options.record
    plan, left_out = reachable_plan(request, plan, facts, places, settings, strict=strict, mirror=options.mirror)
    if left_out:
        say(describe_left_out(plan, left_out))
    rendering = render(plan, facts)
    if options.record:
        from trainworks.build.record import refuse_record

        refuse_record(plan, rendering, facts, root)
    engine = choose(options.engine)
    information = engine.probe()
    say(f"{plan.target.name}: building with {information.name} {information.version}")
    progress = BuildProgress(verbose=options.verbose)
    result = build_image(
        plan,
        rendering,
        engine,
        settings,
        progress,
        output=options.output,
        sources=places.folders,
        no_cache=options.no_cache,
        last=last_build(plan.tags[0], os.environ),
    )
    record_build(plan.tags[0], inputs_of(plan, rendering), os.environ, result.timings)
    say(describe_result(plan, result, engine))
    if left_out:
        say(describe_left_out(plan, left_out))
    report: dict[str, object] = {
        "name": plan.target.name,
        "tags": plan.tags,
        "identifier": result.image.identifier,
        "size": result.image.size,
        "unchanged": result.unchanged,
        "seconds": round(result.seconds, 2),
        "base_seconds": round(result.base_seconds, 2),
        "engine": asdict(information),
        "left_out": [asdict(unreachable) for unreachable in left_out],
    }
    broken: ImageTestError | None = None
    if options.until == "test":
        results = check_image(plan, result.image, engine, settings, junit=options.junit)
        report["checks"] = [asdict(outcome) for outcome in results]
        broken = broken_promises(plan, results)
    if options.record and broken is None:
        from trainworks.build.record import record_result

        say(f"recorded in {record_result(plan, rendering, facts, result, engine, root, os.environ)}")
    text = f"{plan.tags[0]}\n"
    if options.push and broken is None:
        from trainworks.registry.client import Registries
        from trainworks.registry.push import push_image, report_of, tags_for, text_of

        tags = tags_for(plan.tags[0], options.fixed_tags, options.moving_tags)
        with Registries(settings, report=say) as registries:
            pushed = push_image(engine, plan.tags[0], options.repository, tags, registries, os.environ)
        report["pushed"] = report_of(pushed)
        text += text_of(pushed)
    put_result(options, report, text)
    if broken is not None:
        raise broken
    return 0
