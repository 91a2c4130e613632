"""Reads the command line and walks the layers as far as ``--until`` says."""

from __future__ import annotations

import json
import os
import signal
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TextIO

from trainworks.cli.arguments import (
    build_parser,
    check_parser,
    extend_parser,
    lint_parser,
    lock_parser,
    mirror_parser,
    schema_parser,
)
from trainworks.cli.listing import list_json, list_text
from trainworks.errors import ImageTestError, LintError, LockError, OutputError, TrainworksError
from trainworks.facts.load import load
from trainworks.plan.model import ImagePlan, Request
from trainworks.plan.resolve import make_plan

if TYPE_CHECKING:
    from trainworks.facts.rows import Facts, TargetRow
    from trainworks.render.dockerfile import Rendering
    from trainworks.render.forecast import Forecast

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None, root: Path | None = None) -> int:
    """Run ``build.py``.

    Args:
        arguments: Those of the command line, without the program; default: the process's own.
        root: The checkout; default: the current folder.

    Returns:
        The exit status; see the end of ``--help``.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    parsers = {
        "build": build_parser,
        "check": check_parser,
        "extend": extend_parser,
        "lint": lint_parser,
        "lock": lock_parser,
        "mirror": mirror_parser,
        "schema": schema_parser,
    }
    command = words.pop(0) if words and words[0] in parsers and words[0] != "build" else "build"
    parser = parsers[command]()
    options = parser.parse_args(words)
    checkout = options.root or root or Path.cwd()
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        if command == "check":
            return _check(options, checkout)
        if command == "lint":
            return _lint(options)
        if command == "lock":
            return _lock(options, checkout)
        if command == "mirror":
            return _mirror(options, checkout)
        if command == "schema":
            return _schema(checkout)
        if command == "extend":
            return _extend(options, checkout)
        return _main(options, parser, checkout)
    except TrainworksError as error:
        # Failed image tests and findings of lint are on stdout already, and that is one JSON text.
        wants_json = command in ("build", "check", "extend", "lint") and options.format == "json"
        _say_error(error, as_json=wants_json and not isinstance(error, (ImageTestError, LintError)))
        return error.exit_status
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted: everything that was started has been stopped\n")
        return INTERRUPTED
    except BrokenPipeError:
        # Nobody reads our progress any more (`2>&1 | head`): what it was about has been stopped, as by Ctrl-C.
        _silence(sys.stderr)
        return INTERRUPTED
    except OSError as error:
        # A disk that is full, or a folder that may not be written, where no layer expected it.
        where = f"{error.filename}: " if error.filename else ""
        _say_error(OutputError(f"{where}{error.strerror or error}"), as_json=False)
        return OutputError.exit_status
    finally:
        signal.signal(signal.SIGTERM, previous)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    """Make SIGTERM end a build as Ctrl-C does."""
    raise KeyboardInterrupt


def _silence(stream: TextIO) -> None:
    """Let what is still to be written to a stream go nowhere; Python would fail on it once more when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _put(text: str) -> None:
    """Write a result to stdout at once, so that a full disk is known while the exit status can still say so."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has seen enough (`| head`): nothing is wrong, and nothing more can be said.
        _silence(sys.stdout)
    except OSError as error:
        _silence(sys.stdout)
        raise OutputError(f"stdout cannot be written: {error.strerror}") from error


def _say_error(error: TrainworksError, *, as_json: bool) -> None:
    from trainworks.cli.report import describe

    if as_json:
        content = {"error": type(error).__name__, "message": error.message, "hint": error.hint}
        _put(json.dumps({**content, "exit_status": error.exit_status}, indent=2) + "\n")
    sys.stderr.write(describe(error) + "\n")


def _main(options: Namespace, parser: ArgumentParser, root: Path) -> int:
    if options.list:
        facts = load(root)
        _put(list_json(facts) if options.format == "json" else list_text(facts))
        return 0
    missing = [flag for flag, value in (("--framework", options.framework), ("--cuda", options.cuda)) if not value]
    if missing:
        parser.error(f"{' and '.join(missing)} must be given; --list shows what there is")
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
    from trainworks.render.dockerfile import render

    rendering = render(plan, facts)
    if options.until == "plan":
        return _show_plan(plan, rendering, facts, options)
    if options.until == "render":
        return _show_rendering(plan, rendering, options)
    return _build(plan, rendering, options)


def _show_plan(plan: ImagePlan, rendering: Rendering, facts: Facts, options: Namespace) -> int:
    from trainworks.cli.history import last_build
    from trainworks.render.forecast import forecast

    last = last_build(plan.tags[0], os.environ)
    expected = forecast(plan, rendering, facts, last.inputs if last else None, last.ended if last else "")
    if options.format == "json":
        _put(json.dumps({**json.loads(plan.as_json()), "forecast": expected.as_values()}, indent=2) + "\n")
    else:
        _put(describe_plan(plan) + describe_forecast(expected))
    return 0


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
    from trainworks.cli.context import replace_output, write_context

    if options.output is not None:
        replace_output(rendering, options.output)
        write_context(rendering, options.output)
    if options.format == "json":
        content = {
            "name": plan.target.name,
            "tags": plan.tags,
            "dockerfile": rendering.dockerfile,
            "files": [file.path for file in rendering.files],
        }
        _put(json.dumps(content, indent=2) + "\n")
    elif options.output is None:
        _put(rendering.dockerfile)
    else:
        _put(f"{options.output}\n")
    return 0


def _build(plan: ImagePlan, rendering: Rendering, options: Namespace) -> int:
    from trainworks.cli.build import broken_promises, build_image, check_image, describe_result, say
    from trainworks.cli.history import record_build
    from trainworks.cli.mirror import Mirror, check_mirror, read_mirror, refuse_unlocked
    from trainworks.cli.report import BuildProgress
    from trainworks.engine import choose
    from trainworks.host.settings import read_host_settings
    from trainworks.render.forecast import inputs_of

    refuse_unlocked(plan)
    settings = read_host_settings(os.environ)
    mirror = read_mirror(options.mirror) if options.mirror else Mirror()
    if options.mirror:
        settings = mirror.settings(settings)
    if mirror.folder:
        check_mirror(plan, mirror.folder)
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
        mirror=mirror.folder,
        no_cache=options.no_cache,
    )
    record_build(plan.tags[0], inputs_of(plan, rendering), os.environ)
    say(describe_result(plan, result, engine))
    report: dict[str, object] = {
        "name": plan.target.name,
        "tags": plan.tags,
        "identifier": result.image.identifier,
        "size": result.image.size,
        "seconds": round(result.seconds, 2),
        "base_seconds": round(result.base_seconds, 2),
        "engine": asdict(information),
    }
    broken: ImageTestError | None = None
    if options.until == "test":
        results = check_image(plan, result.image, engine, settings, junit=options.junit)
        report["checks"] = [asdict(outcome) for outcome in results]
        broken = broken_promises(plan, results)
    _put(json.dumps(report, indent=2) + "\n" if options.format == "json" else f"{plan.tags[0]}\n")
    if broken is not None:
        raise broken
    return 0


def _extend(options: Namespace, root: Path) -> int:
    from trainworks.cli.extend import extend

    try:
        template = (root / "templates" / "extend.j2").read_text(encoding="utf-8")
    except OSError as error:
        raise OutputError(
            f"{error.filename}: {error.strerror}", hint="run from a checkout of trainworks, or name one with --root"
        ) from error
    done = extend(options, template, os.environ)
    if options.until == "render" and options.format == "text":
        _put(f"{options.output}\n" if options.output else str(done.report["dockerfile"]))
    else:
        _put(json.dumps(done.report, indent=2) + "\n" if options.format == "json" else f"{options.tag}\n")
    if done.broken is not None:
        raise done.broken
    return 0


def _lock(options: Namespace, root: Path) -> int:
    from trainworks.cli.build import say
    from trainworks.cli.lock import write_python_lock
    from trainworks.cli.lock_inputs import check_locks, lock_artifacts, lock_base_images
    from trainworks.host.downloads import Client
    from trainworks.host.settings import read_host_settings

    facts = load(root)
    rows = _chosen(options.only, facts)
    if options.check:
        return _report_locks(*check_locks(rows, facts), strict=options.strict)
    settings = read_host_settings(os.environ)
    problems: list[str] = []
    for row in rows:
        try:
            _put(f"{write_python_lock(row, facts, settings, os.environ, root)}\n")
        except LockError as error:
            problems.append(str(error))
    with Client(settings) as client:
        problems += lock_artifacts(rows, facts, client, root, mirror=options.mirror, report=say)
        problems += lock_base_images(rows, facts, client, root, report=say)
    if problems:
        unique = tuple(dict.fromkeys(problems))
        raise LockError(
            f"{len(unique)} input{'s are' if len(unique) > 1 else ' is'} not locked:\n  " + "\n  ".join(unique),
            hint="the others are, and stay so; the same command on a machine that reaches the rest goes on from here",
        )
    return 0


def _chosen(names: Sequence[str], facts: Facts) -> list[TargetRow]:
    """Return the targets of these names, all of them where none is named."""
    from trainworks.plan.names import unknown

    rows = {facts.name_of(row): row for row in facts.targets}
    for name in names:
        if name not in rows:
            raise unknown("target", name, rows)
    return [rows[name] for name in names or rows]


def _report_locks(problems: Sequence[str], unlocked: Sequence[str], *, strict: bool) -> int:
    if unlocked:
        _put("not locked, so not built:\n  " + "\n  ".join(unlocked) + "\n")
    failures = [*problems, *(f"not locked: {each}" for each in unlocked if strict)]
    if failures:
        raise LockError(
            "images/lock does not fit the rows:\n  " + "\n  ".join(failures),
            hint="`python build.py lock --only TARGET` locks a target again",
        )
    _put("every lock fits its rows\n")
    return 0


def _mirror(options: Namespace, root: Path) -> int:
    from trainworks.cli.build import say
    from trainworks.cli.mirror import fill_mirror
    from trainworks.host.downloads import Client
    from trainworks.host.settings import read_host_settings

    facts = load(root)
    rows = _chosen(options.only, facts)
    settings = read_host_settings(os.environ)
    with Client(settings) as client:
        fill_mirror(rows, facts, options.folder, client, settings, report=say)
    _put(f"{options.folder}\n")
    return 0


def _check(options: Namespace, root: Path) -> int:
    from trainworks.cli.check import as_json, as_text, check, exit_status_of

    findings = check(load(root), options.only)
    _put(as_json(findings) if options.format == "json" else as_text(findings))
    return exit_status_of(findings)


def _lint(options: Namespace) -> int:
    from trainworks.cli.lint import as_error, as_json, as_text, find_hadolint, lint_files

    report = lint_files(options.files, find_hadolint())
    _put(as_json(report) if options.format == "json" else as_text(report))
    findings = as_error(report)
    if findings is not None:
        raise findings
    return 0


def _schema(root: Path) -> int:
    from trainworks.cli.schema import write_schemas

    for path in write_schemas(root / "images" / "schema"):
        _put(f"{path}\n")
    return 0
