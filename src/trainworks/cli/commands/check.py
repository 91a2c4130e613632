"""``build.py check``: plan the whole matrix and show what is incompatible, or test an image."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from trainworks.cli.grammar import (
    DOCKER_HOST,
    FACTS,
    IMAGE_ERRORS,
    PLANNING_ERRORS,
    TARGET,
    Example,
    Grammar,
    Manual,
)
from trainworks.cli.options import add_engine, add_format, add_junit, add_only
from trainworks.terminal.output import put, put_result


def parser() -> Grammar:
    """Return the grammar of ``build.py check``."""
    manual = Manual(
        command="check",
        summary="check targets, or an image against its promises",
        details=(
            "Plans targets without building anything, and shows which parts are incompatible, and"
            " why. --image runs the tests of a build on an image that the engine has, pulled ones"
            " too, closed off from this machine, and reads every byte of its layers: also of an"
            " image that a build has tested. Of an image that build.py did not build, and with"
            " --any, it shows files that are not as packages brought them, libraries that are not"
            " found, keys, and what a job lacks."
        ),
        examples=(
            Example("check", "the whole matrix"),
            Example(f"check --only {TARGET} --format json", "one target, for programs"),
            Example(f"check --image {TARGET}", "the image of a target", needs="an engine"),
            Example(
                "check --image my/train:1 --any",
                "an image of your own Dockerfile",
                needs="an engine",
            ),
            Example(
                f"check --image {TARGET} --only static",
                "its files alone: a minute",
                needs="an engine",
            ),
        ),
        result=(
            "each target that does not fit with rule, reason, remedy and source; then advice; the"
            " last line counts. With --image a line for each check on stderr, and the image's name."
        ),
        done="all fit, or every check of the image passed",
        fails=(*PLANNING_ERRORS, *IMAGE_ERRORS),
        reads=(FACTS, DOCKER_HOST),
        see_also=("lock --check", "images/compatibility.toml"),
    )
    grammar = Grammar(manual, check=_check)
    add_only(grammar)
    grammar.add_argument(
        "--image", metavar="IMAGE|TARGET", help="test this image of the engine, or of a target"
    )
    grammar.add_argument(
        "--any",
        action="store_true",
        help="ask what holds for every image, also of your own Dockerfile",
    )
    add_junit(grammar)
    add_engine(grammar)
    add_format(grammar)
    return grammar


def _check(options: Namespace, _root: Path) -> list[str]:
    """Return the problems of options that do not go together; empty without any."""
    if options.image:
        if options.only in ([], ["static"]):
            return []
        return ["with --image, --only can be 'static': what starts no program of the image"]
    flags = [f"--{name}" for name in ("any", "engine", "junit") if getattr(options, name)]
    if not flags:
        return []
    return [f"{' and '.join(flags)} need --image"]


def run(options: Namespace, root: Path) -> int:
    """Check that targets can be planned, or with ``--image`` test an image.

    Prints the findings. Returns 0 if all is well, or the exit status of the worst finding about a
    target.

    Raises:
        ImageTestError: A check of the image failed.
    """
    if options.image:
        return _check_image(options, root)
    from trainworks.facts.load import load
    from trainworks.inspect.matrix_check import as_json, as_text, check_targets, exit_status_of

    findings = check_targets(load(root), options.only)
    text = as_json(findings) if options.format == "json" else as_text(findings)
    put(text)
    return exit_status_of(findings)


def _check_image(options: Namespace, root: Path) -> int:
    """Test the image of ``--image``, print the results, and return 0.

    Raises:
        ImageTestError: A check failed.
    """
    from trainworks.build.image_check import CheckRequest, check_image
    from trainworks.build.session import BuildSession
    from trainworks.facts.load import load

    check = CheckRequest(
        name=options.image,
        engine=options.engine,
        junit=options.junit,
        static=bool(options.only),
        without_plan=options.any,
    )
    result = check_image(check, BuildSession(root=root, facts=load(root)))
    put_result(options.format, result.as_values(), f"{result.image.reference}\n")
    if result.broken is not None:
        raise result.broken
    return 0
