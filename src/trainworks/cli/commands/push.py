"""``build.py push``: an image that is built goes to one or several registries."""

from __future__ import annotations

import argparse
import json
import os
from argparse import Namespace
from pathlib import Path

from trainworks.cli.output import put
from trainworks.facts.load import load
from trainworks.plan.model import Request
from trainworks.plan.resolve import make_plan
from trainworks.plan.select import rows_named


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``build.py push``."""
    grammar = argparse.ArgumentParser(
        prog="build.py push",
        description="Pushes an image that is built to one or several repositories, and prints its image_uri. What a "
        "registry has already is not sent again; see docs/push.md for logins and ECR.",
        epilog="Exit status: 0 pushed, 4 unknown name, 6 no engine, 15 a registry refuses or cannot be reached.",
        allow_abbrev=False,
    )
    grammar.add_argument("image", metavar="IMAGE", help="its name in the engine, or the name of a target")
    add_push_arguments(grammar, required=True)
    grammar.add_argument("--engine", metavar="NAME", help="docker or buildah; default: the first that answers")
    grammar.add_argument("--format", choices=("text", "json"), default="text", help="of the result on stdout")
    grammar.add_argument("--root", type=Path, metavar="DIR", help=argparse.SUPPRESS)
    return grammar


def add_push_arguments(
    grammar: argparse.ArgumentParser | argparse._ArgumentGroup,
    *,
    required: bool = False,
) -> None:
    """Add where to push, and under which tags."""
    grammar.add_argument(
        "--repository",
        action="append",
        default=[],
        required=required,
        metavar="URI",
        help="HOST/NAME, such as ACCOUNT.dkr.ecr.REGION.amazonaws.com/NAME; again for another region or registry",
    )
    grammar.add_argument(
        "--tag",
        action="append",
        default=[],
        dest="fixed_tags",
        metavar="TAG",
        help="a tag that never moves, instead of the one with today's date",
    )
    grammar.add_argument(
        "--moving-tag",
        action="append",
        default=[],
        dest="moving_tags",
        metavar="TAG",
        help="a tag that points here from now on, instead of VERSION-CUDA-OS",
    )


def run(options: Namespace, root: Path) -> int:
    """Push an image."""
    from trainworks.cli.build import say
    from trainworks.cli.push import push_image, report_of, tags_for, text_of
    from trainworks.engine import choose
    from trainworks.host.distribution import Registries
    from trainworks.host.settings import read_host_settings

    is_target = not set(":/") & set(options.image)
    reference = _image_of_target(options.image, root) if is_target else options.image
    tags = tags_for(reference, options.fixed_tags, options.moving_tags)
    engine = choose(options.engine)
    with Registries(read_host_settings(os.environ), report=say) as registries:
        done = push_image(engine, reference, options.repository, tags, registries, os.environ)
    report = {"image": reference, "pushed": report_of(done)}
    put(json.dumps(report, indent=2) + "\n" if options.format == "json" else text_of(done))
    return 0


def _image_of_target(name: str, root: Path) -> str:
    facts = load(root)
    row = rows_named([name], facts)[0]
    request = Request(
        framework=row.framework,
        cuda=row.cuda,
        version=row.version,
        python=facts.python_of(row),
        sources=facts.sources_of(row),
    )
    return make_plan(request, facts).tags[0]
