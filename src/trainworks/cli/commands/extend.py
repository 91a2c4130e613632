"""``build.py extend``: make a tested image from a base image, requirements and code."""

from __future__ import annotations

import argparse
import os
import re
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainworks.cli.grammar import (
    APT_SETTINGS,
    DOCKER_HOST,
    HOST_SETTINGS,
    IMAGE_ERRORS,
    MEMORY,
    Example,
    Grammar,
    Manual,
)
from trainworks.cli.options import add_build_options, add_engine, add_format, add_until
from trainworks.errors import BuildError, ExtendError, HostError, LockError, UnknownNameError
from trainworks.terminal.output import put_result

if TYPE_CHECKING:
    from trainworks.extend.request import ExtendRequest

STAGES = ("plan", "render", "build", "test")
"""How far ``--until`` goes; each includes those before it."""


def parser() -> Grammar:
    """Return the grammar of ``build.py extend``."""
    manual = Manual(
        command="extend",
        summary="make a tested image from a base image, requirements and your code",
        details=(
            "Makes an image from a base image, requirements and code, and tests it."
            " Requirements without hashes are resolved for the base first;"
            " a file with the hashes is written beside yours."
        ),
        examples=(
            Example(
                "extend --base my/pytorch:1 --tag my/train:1 --source src --entry-point train.py",
                "add your code to an image with Python",
                needs="an engine",
            ),
            Example(
                "extend --base my/pytorch:1 --tag my/train:1"
                " --requirements wanted.txt --apt libgl1",
                "add Python and Debian packages",
                needs="an engine",
            ),
        ),
        result="the new image's name, after all tests have passed. `build.py push NAME` pushes it.",
        done="made, and all tests passed",
        fails=(*IMAGE_ERRORS, UnknownNameError, BuildError, HostError, LockError, ExtendError),
        reads=(HOST_SETTINGS, APT_SETTINGS, DOCKER_HOST, MEMORY),
        see_also=("push", "prove", "report"),
    )
    grammar = Grammar(manual, check=check)
    grammar.add_argument(
        "--base",
        required=True,
        metavar="IMAGE|TARGET",
        help="extend this image of the engine or a registry, or of a target",
    )
    grammar.add_argument(
        "--tag", required=True, metavar="IMAGE", help="name the new image, such as my/train:1"
    )
    grammar.add_argument(
        "--with",
        action="append",
        default=[],
        dest="with_components",
        metavar="COMPONENT",
        help="build wheels with this compiler, which is not in the image: nvcc",
    )
    add_contents(grammar)
    add_until(grammar, STAGES)
    add_engine(grammar)
    add_format(grammar)
    add_build_options(grammar)
    return grammar


def variable(text: str) -> tuple[str, str]:
    """Return the name and the value of ``NAME=VALUE``.

    Raises:
        ArgumentTypeError: There is no ``=``, or the name is not that of a variable. argparse shows
            the message.
    """
    name, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {text!r}")
    return name, value


def add_contents(grammar: Grammar) -> None:
    """Add the options for the contents of an extended image, which ``prove`` takes too."""
    grammar.add_argument(
        *("--requirements", "-r"),
        type=Path,
        metavar="FILE",
        help="install these; default: requirements.txt or lock of --source",
    )
    grammar.add_argument(
        "--extra",
        action="append",
        default=[],
        metavar="NAME",
        help="install this extra of the project or lock",
    )
    grammar.add_argument(
        "--group",
        action="append",
        default=[],
        metavar="NAME",
        help="install this dependency group of it",
    )
    grammar.add_argument(
        "--only-binary",
        action="append",
        default=[],
        metavar="PACKAGE",
        help="never build this package from source; :all: for every package",
    )
    grammar.add_argument(
        "--strict",
        action="store_true",
        help="refuse lines of another torch; default: keep the base's",
    )
    grammar.add_argument(
        "--apt", action="append", default=[], metavar="PACKAGE", help="install this Debian package"
    )
    grammar.add_argument(
        "--build-env",
        action="append",
        default=[],
        type=variable,
        metavar="NAME=VALUE",
        help="set this for builds of wheels, such as TORCH_CUDA_ARCH_LIST=9.0",
    )
    grammar.add_argument(
        "--build-network",
        action="store_true",
        help="let builds of wheels download: they have a network, and no secrets",
    )
    grammar.add_argument(
        "--no-build-isolation",
        action="append",
        default=[],
        metavar="PACKAGE",
        help="build this package with the base's packages in sight, such as torch",
    )
    grammar.add_argument(
        "--source",
        type=Path,
        metavar="DIR",
        help="copy this folder to /opt/ml/code; install a project",
    )
    grammar.add_argument(
        "--entry-point",
        metavar="FILE",
        help="run this file below --source; default: the job names one",
    )


def check(options: Namespace, root: Path) -> list[UnknownNameError]:
    """Return an error for each name in ``--with`` that is not a compiler; none is raised."""
    from trainworks.facts.load import load
    from trainworks.plan.names import make_unknown_name_error

    if not options.with_components:
        return []
    compilers = [component.name for component in load(root).components if component.compiles]
    errors = []
    for name in options.with_components:
        if name not in compilers:
            errors.append(make_unknown_name_error("compiler in --with:", name, compilers))
    return errors


def extension_of(options: Namespace, tag: str) -> ExtendRequest:
    """Return the request for an extended image, from its base and the options for its contents.

    Args:
        options: The options of ``add_contents``, ``--base``, ``--with`` and ``--engine``.
        tag: The name of the extended image: ``my/train:1``.
    """
    from trainworks.extend.request import ExtendRequest

    return ExtendRequest(
        base=options.base,
        tag=tag,
        requirements=options.requirements,
        only_binary=tuple(options.only_binary),
        apt=tuple(options.apt),
        with_components=tuple(options.with_components),
        build_environment=dict(options.build_env),
        build_network=options.build_network,
        built_whole=tuple(options.no_build_isolation),
        source=options.source,
        extras=tuple(options.extra),
        groups=tuple(options.group),
        entry_point=options.entry_point,
        strict=options.strict,
        engine=options.engine,
    )


def run(options: Namespace, root: Path) -> int:
    """Make and test an image from a base, requirements and code, and print its name; return 0.

    Raises:
        ImageTestError: A check of the image failed.
    """
    from trainworks.extend.image import extend

    request = replace(
        extension_of(options, options.tag),
        until=options.until,
        output=options.output,
        junit=options.junit,
        no_cache=options.no_cache,
        verbose=options.verbose,
        test_again=options.junit is not None,
    )
    done = extend(request, root, os.environ)
    put_result(options.format, done.report, done.text)
    if done.broken is not None:
        raise done.broken
    return 0
