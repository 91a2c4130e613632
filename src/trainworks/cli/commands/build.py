"""``build.py``: plan, render, build and test an image, as far as ``--until`` says."""

from __future__ import annotations

import argparse
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from trainworks.cli.grammar import (
    APT_SETTINGS,
    DOCKER_HOST,
    FACTS,
    HOST_SETTINGS,
    IMAGE_ERRORS,
    MEMORY,
    PLANNING_ERRORS,
    SNAPSHOT,
    Example,
    Grammar,
    Manual,
)
from trainworks.cli.options import (
    add_artifact,
    add_build_options,
    add_components,
    add_engine,
    add_format,
    add_repositories,
    add_until,
)
from trainworks.errors import (
    BuildError,
    HostError,
    InterruptionError,
    RecipeError,
    RegistryError,
    UnknownNameError,
)
from trainworks.terminal.output import put, put_result

if TYPE_CHECKING:
    from trainworks.build.options import BuildOrder
    from trainworks.build.session import BuildSession
    from trainworks.facts.rows import Facts, TargetRow
    from trainworks.plan.model import Request

STAGES = ("plan", "render", "build", "test")
"""How far ``--until`` goes; each includes those before it."""


def _parse_count(text: str) -> int:
    """Parse a positive integer; raises ``ArgumentTypeError``, as argparse expects."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return int(text)


def parser() -> Grammar:
    """Return the grammar of ``build.py``."""
    manual = Manual(
        command="build",
        program="build.py",
        usage=(
            "build.py [build] TARGET [options]\n"
            "       build.py [build] --framework FRAMEWORK --cuda CELL [options]\n"
            "       build.py [build] --list | --all | --only GLOB [options]"
        ),
        summary="build and test an image; the default command",
        details=(
            "Builds a container image for distributed training, and tests what its components"
            " promise. A plan shows what the image is made of without building it."
        ),
        examples=(
            Example("--list", "list the targets, and which were built"),
            Example(
                "--list --framework pytorch --cuda cu121",
                "list those of one framework and CUDA release",
            ),
            Example("--list --all", "list also what only another machine can build"),
            Example(
                "--framework pytorch --cuda cu121 --until plan",
                "show the components, and what would be rebuilt and why",
            ),
            Example(
                "--framework pytorch --cuda cpu --until render --output context",
                "write the Dockerfile and its files",
            ),
            Example(
                "--framework pytorch --cuda cu121",
                "build and test the newest PyTorch for CUDA 12.1",
                "an engine",
            ),
            Example("--all -j 2", "build and test every target, two at once", "an engine"),
        ),
        result=(
            "the image's name on stdout, after every test has passed. `build.py push NAME` pushes"
            " it. Progress and errors go to stderr."
        ),
        done="built, and all tests passed",
        fails=(*PLANNING_ERRORS, *IMAGE_ERRORS, RecipeError, BuildError, HostError, RegistryError),
        reads=(FACTS, HOST_SETTINGS, APT_SETTINGS, SNAPSHOT, DOCKER_HOST, MEMORY),
        see_also=("check", "extend", "push", "docs/targets.md"),
    )
    grammar = Grammar(manual, check=check)
    what = grammar.add_argument_group("what to build")
    what.add_argument(
        "target",
        nargs="?",
        default="",
        metavar="TARGET",
        help="build this target; --list names all",
    )
    what.add_argument(
        "--framework", metavar="FRAMEWORK", help="choose a framework, such as pytorch"
    )
    what.add_argument("--cuda", metavar="CELL", help="choose a CUDA release, such as cu121, or cpu")
    what.add_argument(
        "--framework-version",
        metavar="VERSION",
        help="choose a version; default: the newest for this CUDA",
    )
    what.add_argument(
        "--python", metavar="PYTHON", help="choose a Python, such as 3.13; default: the oldest"
    )
    what.add_argument(
        "--sources",
        choices=("packages", "vendor"),
        default="packages",
        help="use Debian and Python packages (default), or vendors' installers",
    )
    what.add_argument(
        "--architecture",
        choices=("amd64", "arm64"),
        default="amd64",
        help="choose the processors: amd64 (default), or arm64 (Graviton, GB200)",
    )
    add_components(what)
    add_artifact(what, "take this wheel of smp or smddp, not that of the row")
    many = grammar.add_argument_group("many targets")
    many.add_argument(
        "--all",
        action="store_true",
        help="build every target that is locked; with --list: show every target",
    )
    many.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="GLOB",
        help="build targets of this name, such as 'pytorch-*'",
    )
    many.add_argument(
        "-j",
        "--jobs",
        type=_parse_count,
        default=1,
        metavar="N",
        help="build N targets at once (default: 1)",
    )
    many.add_argument(
        "--bake",
        action="store_true",
        help="write docker-bake.json for `docker buildx bake` to --output",
    )
    how = grammar.add_argument_group("how")
    how.add_argument(
        "--list", action="store_true", help="list the targets of these values, and which were built"
    )
    how.add_argument(
        "--state",
        choices=("current", "older", "never"),
        default="",
        help="with --list: built from today's recipe, an older one, or not at all",
    )
    add_until(how, STAGES)
    add_engine(how)
    add_format(how)
    add_build_options(how)
    how.add_argument(
        "--mirror",
        metavar="DIR|URL",
        help="take downloads from this mirror (see `build.py mirror`)",
    )
    how.add_argument(
        "--offline",
        action="store_true",
        help="with --mirror: take every download from there, or fail",
    )
    how.add_argument(
        "--strict",
        action="store_true",
        help="fail if an input is not locked or a source cannot be reached",
    )
    how.add_argument(
        "--locked",
        action="store_true",
        help="fail if the package archive is not in its locked state",
    )
    how.add_argument(
        "--pull", action="store_true", help="pull the base image again, or make it again"
    )
    how.add_argument(
        "--trust-first-use",
        action="store_true",
        help="record what is not locked at its first download, with a warning",
    )
    how.add_argument(
        "--record",
        action="store_true",
        help="record the build in images/built.toml; implies --strict",
    )
    push = grammar.add_argument_group("push (docs/ship.md)")
    push.add_argument(
        "--push",
        action="store_true",
        help="push the image after its tests have passed; implies --strict",
    )
    add_repositories(push)
    return grammar


def run(options: Namespace, root: Path) -> int:
    """Build a target or many, as far as ``--until`` says, or list them (``--list``).

    Prints the result: a list, a plan, the folder of a build context, or the image's name.

    Returns:
        0; for many targets the exit status of the worst failure.

    Raises:
        ImageTestError: A check of the image failed; the image is in the engine.
    """
    # Each later layer is imported when it is reached: a list or a plan needs no engine's libraries.
    if options.list:
        return _list_targets(options, root)
    from trainworks.build.run import run_target
    from trainworks.build.session import BuildSession
    from trainworks.facts.load import load
    from trainworks.inputs.mirror import read_mirror
    from trainworks.plan.resolve import make_plan

    order = _make_order(options)
    mirror = read_mirror(options.mirror, offline=options.offline)
    session = BuildSession(root=root, facts=load(root), mirror=mirror)
    request = _make_request(options, session.facts)
    if options.all or options.only or options.bake:
        return _build_many(options, request, session, order)
    if options.trust_first_use:
        from trainworks.build.trust_on_first_use import with_first_use

        session = with_first_use(request, session)
    result = run_target(request, make_plan(request, session.facts), session, order)
    put_result(options.format, result.report, result.text)
    # The name of a broken image is printed, too: the image can be looked into.
    if result.broken is not None:
        raise result.broken
    return 0


def _list_targets(options: Namespace, root: Path) -> int:
    """Print the targets of the options, and which of them were built; return 0."""
    from trainworks.facts.load import load
    from trainworks.inspect.listing import format_json_list, format_list, state_of
    from trainworks.render.build_records import find_current_builds

    facts = load(root)
    current = find_current_builds(facts)
    # Unknown names were refused when the words were checked.
    rows, _problems = _select_rows(options, facts)
    if options.state:
        rows = [row for row in rows if state_of(row, facts, current) == options.state]
    if options.format == "json":
        put(format_json_list(rows, facts, current))
        return 0
    chooses_rows = bool(options.only or options.state or options.target)
    put(format_list(rows, facts, current, whole=options.all or chooses_rows))
    return 0


FILTERS = {
    "framework": "framework",
    "framework_version": "version",
    "cuda": "cuda",
    "python": "python",
    "sources": "sources",
    "architecture": "architecture",
}
"""The options that choose rows, each with its field of a ``Request``."""


def check(options: Namespace, root: Path) -> list[str | UnknownNameError]:
    """Return the problems of the options: options that exclude one another, and unknown names."""
    from trainworks.facts.load import load

    facts = load(root)
    if options.list:
        _rows, unknown_names = _select_rows(options, facts)
        return [*_check_list_options(options), *unknown_names]
    return [*_find_conflicts(options), *_find_unknown_names(options, facts)]


def _check_list_options(options: Namespace) -> list[str]:
    """Return the problem of options that ``--list`` does not take; empty without any."""
    allowed = (*FILTERS, "target", "only", "state", "all", "list", "format", "root")
    refused = [flag for name, flag in options.given.items() if name not in allowed]
    if not refused:
        return []
    filters = ", ".join(f"--{name.replace('_', '-')}" for name in FILTERS)
    flags = " and ".join(refused)
    return [f"{flags}: --list takes {filters}, --only, --state and --all, nothing else"]


def _select_rows(
    options: Namespace, facts: Facts
) -> tuple[list[TargetRow], list[UnknownNameError]]:
    """Return the rows of ``--list``, and an error for each unknown name in its filters."""
    from trainworks.plan.select import matching_rows, rows_like

    filters = {}
    for name, field in FILTERS.items():
        # The defaults of ``--sources`` and ``--architecture`` choose a build, not rows.
        if name in options.given:
            filters[field] = getattr(options, name)
    patterns = [*options.only]
    if options.target:
        patterns.append(options.target)
    rows = list(facts.targets)
    problems = []
    try:
        rows = rows_like(patterns, facts)
    except UnknownNameError as error:
        problems.append(error)
    rows, unknown = matching_rows(filters, rows, facts)
    return rows, [*problems, *unknown]


def _find_unknown_names(options: Namespace, facts: Facts) -> list[UnknownNameError]:
    """Return an error for each unknown name in the options of a build."""
    from trainworks.engine import ENGINES
    from trainworks.plan.names import make_unknown_name_error

    problems: list[UnknownNameError] = []
    is_for_many = options.all or options.only or options.bake
    if not is_for_many:
        problems += _find_unknown_values(options, facts)
    if options.engine and options.engine not in ENGINES:
        problems.append(make_unknown_name_error("engine", options.engine, ENGINES))
    return problems


def _find_unknown_values(options: Namespace, facts: Facts) -> list[UnknownNameError]:
    """Return an error for each unknown name in the options that choose one target."""
    from trainworks.plan.select import unknown_names

    try:
        return unknown_names(_make_request(options, facts), facts)
    except UnknownNameError as error:
        return [error]


def _make_request(options: Namespace, facts: Facts) -> Request:
    """Return the request for a target, from its name or from the options that choose it.

    Raises:
        UnknownNameError: No target has the name.
    """
    from trainworks.plan.model import Request
    from trainworks.plan.select import request_for, row_named

    request = Request(
        framework=options.framework or "",
        cuda=options.cuda or "",
        version=options.framework_version,
        python=options.python,
        sources=options.sources,
        architecture=options.architecture,
        with_components=tuple(options.with_components),
        without_components=tuple(options.without_components),
        artifacts=tuple(options.artifact),
    )
    if not options.target:
        return request
    return request_for(row_named(options.target, facts), facts, request)


def _find_conflicts(options: Namespace) -> list[str]:
    """Return a message for each set of options that do not go together; empty without any."""
    is_for_many = options.all or options.only or options.bake
    chosen = {
        "--framework": options.framework,
        "--cuda": options.cuda,
        "--python": options.python,
        "--framework-version": options.framework_version,
    }
    named = [flag for flag, value in chosen.items() if value]
    missing = [flag for flag in ("--framework", "--cuda") if not chosen[flag]]
    fixed = [flag for name, flag in options.given.items() if name in FILTERS]
    # Each message, and the condition under which it is a problem.
    refused = {
        "--push is for one target; `build.py push TARGET` pushes what is built already": (
            options.push and is_for_many
        ),
        "--record is for tested images: it does not go with --until": (
            options.record and options.until != "test"
        ),
        (
            "--push needs --repository HOST/NAME, and pushes tested images:"
            " it does not go with --until"
        ): options.push and (not options.repository or options.until != "test"),
        "--state belongs to --list": options.state,
        "--repository, --tag and --moving-tag belong to --push": (
            not options.push and (options.repository or options.fixed_tags or options.moving_tags)
        ),
        "--trust-first-use is for builds of one target": (
            options.trust_first_use and (is_for_many or options.until in ("plan", "render"))
        ),
        "--trust-first-use downloads, and --offline forbids it": (
            options.trust_first_use and options.offline
        ),
        "--offline needs --mirror DIR or --mirror URL": options.offline and not options.mirror,
        f"{' and '.join(named)}: --all and --only choose targets by their names": is_for_many
        and named,
        "--bake needs --output DIR, a folder for the file and the contexts": (
            options.bake and not options.output
        ),
        f"TARGET or {' and '.join(missing)} must be given; --list shows the targets": (
            not (is_for_many or options.target) and missing
        ),
        (
            f"{' and '.join(fixed)} and TARGET {options.target}: a TARGET has all its values, leave"
            " one of them out"
        ): options.target and fixed,
        "--output is for --until render and --bake": (
            options.output and options.until != "render" and not options.bake
        ),
        "--junit is for tested images: it does not go with --until": (
            options.junit and options.until != "test"
        ),
        "--all, --only and --bake are for many targets, and TARGET names one": (
            options.target and is_for_many
        ),
    }
    return [message for message, wrong in refused.items() if wrong]


def _make_order(options: Namespace) -> BuildOrder:
    """Return how a build is done: everything in the options but the choice of targets."""
    from trainworks.build.options import BuildOrder, PushOrder

    push = PushOrder(
        repositories=tuple(options.repository),
        fixed_tags=tuple(options.fixed_tags),
        moving_tags=tuple(options.moving_tags),
    )
    return BuildOrder(
        until=options.until,
        engine=options.engine,
        output=options.output,
        junit=options.junit,
        no_cache=options.no_cache,
        pull=options.pull,
        locked=options.locked,
        verbose=options.verbose,
        test_again=options.record or options.junit is not None,
        mirror=options.mirror,
        offline=options.offline,
        strict=options.strict,
        record=options.record,
        push=push if options.push else None,
    )


def _build_many(options: Namespace, like: Request, session: BuildSession, order: BuildOrder) -> int:
    """Build the targets of ``--only``, or write their bake file (``--bake``); print the results.

    Args:
        options: The options of the command line.
        like: The request with the components and wheels for all targets.
        session: The checkout and the mirror.
        order: How each build is done.

    Returns:
        The exit status of the worst failure; 0 without any.

    Raises:
        InterruptionError: Ctrl-C ended the builds; the results so far are printed.
    """
    from trainworks.build.matrix import as_json, as_text, build_many, plan_targets, worst
    from trainworks.plan.select import rows_like

    targets = plan_targets(rows_like(options.only, session.facts), session.facts, like)
    if options.bake:
        from trainworks.build.bake import write_bake

        bake = write_bake(
            targets, session, options.output, mirror=options.mirror, strict=options.strict
        )
        content = {"file": str(bake.file), "targets": bake.targets, "groups": bake.groups}
        put_result(options.format, content, f"{bake.file}\n")
        return 0
    summary = build_many(targets, session, order, at_once=options.jobs)
    text = as_json(summary) if options.format == "json" else as_text(summary)
    put(text)
    if summary.interrupted:
        raise InterruptionError(reported=True)
    return worst(summary.targets)
