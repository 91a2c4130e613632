"""``build.py promote``: an image goes from one repository to others by its digest."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path

from trainworks.cli.grammar import HOST_SETTINGS, LOGINS, Example, Grammar, Manual
from trainworks.cli.options import add_format, add_tags
from trainworks.errors import HostError, RegistryError
from trainworks.terminal.output import put_result


def parser() -> Grammar:
    """Return the grammar of ``build.py promote``."""
    manual = Manual(
        command="promote",
        summary="copy an image by digest to other repositories, without a rebuild",
        details=(
            "Copies an image by its digest, with everything attached to it, to other repositories."
            " It needs no engine. Within a registry no layer is sent."
        ),
        examples=(
            Example(
                "promote r.example.org/test:2026.11 r.example.org/production",
                "copy a tested image to production, under the same tag",
                needs="registries",
            ),
            Example(
                "promote r.example.org/test:1 east.example.org/a west.example.org/a --tag 1.0"
                " --moving-tag latest",
                "copy to two regions, under a fixed and a moving tag",
                needs="registries",
            ),
        ),
        result="the image_uri of each copy, by digest, for an Estimator; its tags on stderr.",
        done="copied",
        fails=(HostError, RegistryError),
        reads=(LOGINS, HOST_SETTINGS),
        see_also=("push", "prove", "docs/ship.md"),
    )
    grammar = Grammar(manual)
    grammar.add_argument(
        "source", metavar="ADDRESS", help="copy this image: HOST/NAME@sha256:... or HOST/NAME:TAG"
    )
    grammar.add_argument(
        "targets",
        nargs="+",
        metavar="REPOSITORY",
        help="copy to HOST/NAME; several for several regions",
    )
    add_tags(grammar, fixed="the source's tag, if it has one")
    add_format(grammar)
    return grammar


def run(options: Namespace, root: Path) -> int:  # noqa: ARG001 - every command is called so
    """Copy an image to other repositories; print an address for each, and the tags on stderr."""
    from trainworks.host.settings import read_host_settings
    from trainworks.registry.names import check_tags
    from trainworks.registry.push import promote_image, report_of, say_tags, text_of
    from trainworks.registry.tools import Registries
    from trainworks.terminal.output import say

    tags = check_tags(options.fixed_tags, options.moving_tags)
    with Registries(read_host_settings(os.environ), report=say) as registries:
        done = promote_image(options.source, options.targets, tags, registries)
    report = {"source": options.source, "promoted": report_of(done)}
    say_tags(done)
    put_result(options.format, report, text_of(done))
    return 0
