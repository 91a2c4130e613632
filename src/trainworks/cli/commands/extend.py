"""``build.py extend``: a base image, requirements and code become a tested image."""

from __future__ import annotations

import argparse
import json
import os
from argparse import Namespace
from pathlib import Path

from trainworks.cli.output import put
from trainworks.errors import OutputError

STAGES = ("render", "build", "test")
"""How far ``--until`` goes; each includes those before it."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``build.py extend``."""
    grammar = argparse.ArgumentParser(
        prog="build.py extend",
        description="Makes an image of a base image, requirements and code, and proves what is in it.",
        allow_abbrev=False,
    )
    grammar.add_argument("--base", required=True, metavar="IMAGE", help="an image of ours, or a registry's")
    grammar.add_argument("--tag", required=True, metavar="IMAGE", help="name of the new image, such as my/train:1")
    grammar.add_argument("--requirements", type=Path, metavar="FILE", help="to install; resolved and hashed if needed")
    grammar.add_argument("--source", type=Path, metavar="DIR", help="copied to /opt/ml/code")
    grammar.add_argument("--entry-point", metavar="FILE", help="below --source; default: the job names it")
    grammar.add_argument("--until", choices=STAGES, default="test", help="stop after this stage (default: test)")
    grammar.add_argument("--engine", metavar="NAME", help="docker or buildah; default: the first that answers")
    grammar.add_argument("--output", type=Path, metavar="DIR", help="leave the build context in this folder")
    grammar.add_argument("--format", choices=("text", "json"), default="text", help="of the result on stdout")
    grammar.add_argument("--junit", type=Path, metavar="FILE", help="write the image tests' results as JUnit XML")
    grammar.add_argument("--no-cache", action="store_true", help="build every step again")
    grammar.add_argument("--verbose", action="store_true", help="show every line that the build prints")
    grammar.add_argument("--root", type=Path, metavar="DIR", help=argparse.SUPPRESS)
    return grammar


def run(options: Namespace, root: Path) -> int:
    """Extend an image."""
    from trainworks.cli.extend import extend

    try:
        template = (root / "templates" / "extend.j2").read_text(encoding="utf-8")
    except OSError as error:
        raise OutputError(
            f"{error.filename}: {error.strerror}", hint="run from a checkout of trainworks, or name one with --root"
        ) from error
    done = extend(options, template, os.environ)
    if options.until == "render" and options.format == "text":
        put(f"{options.output}\n" if options.output else str(done.report["dockerfile"]))
    else:
        put(json.dumps(done.report, indent=2) + "\n" if options.format == "json" else f"{options.tag}\n")
    if done.broken is not None:
        raise done.broken
    return 0
