"""``build.py push``: an image that is built goes to one or several registries."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path

from trainworks.cli.grammar import (
    DOCKER_HOST,
    FACTS,
    HOST_SETTINGS,
    LOGINS,
    TARGET,
    Example,
    Grammar,
    Manual,
)
from trainworks.cli.options import add_engine, add_format, add_repositories
from trainworks.errors import (
    EngineError,
    EngineUnavailableError,
    FactsError,
    HostError,
    LockError,
    RegistryError,
    UnknownNameError,
)
from trainworks.terminal.output import put_result


def parser() -> Grammar:
    """Return the grammar of ``build.py push``."""
    manual = Manual(
        command="push",
        summary="push a built image to ECR or another registry",
        details=(
            "Pushes a built image to one or several repositories. Layers that a registry has are"
            " not sent again, also after a broken connection. Missing ECR repositories are created."
        ),
        examples=(
            Example(
                f"push {TARGET} --repository r.example.org/pytorch",
                "push a target's image, under a dated and a moving tag",
                needs="an engine and a registry",
            ),
            Example(
                "push my/train:1-arm64 --repository r.example.org/train --multi-arch-tag 1",
                "add an image for arm64 to a tag of both architectures",
                needs="an engine and a registry",
            ),
            Example(
                "push my/train:1 --repository"
                " 123456789012.dkr.ecr.eu-west-1.amazonaws.com/a --tag 1.0",
                "push your own image to ECR, under your own tag",
                needs="an engine and a registry",
            ),
        ),
        result="the image_uri of each repository, by digest, for an Estimator; its tags on stderr.",
        done="pushed",
        fails=(
            FactsError,
            UnknownNameError,
            EngineError,
            EngineUnavailableError,
            HostError,
            LockError,
            RegistryError,
        ),
        reads=(FACTS, LOGINS, HOST_SETTINGS, DOCKER_HOST),
        see_also=("promote", "prove", "docs/ship.md"),
    )
    grammar = Grammar(manual)
    grammar.add_argument(
        "image", metavar="IMAGE|TARGET", help="push this image of the engine, or of a target"
    )
    add_repositories(grammar, required=True)
    grammar.add_argument(
        "--multi-arch-tag",
        action="append",
        default=[],
        dest="shared_tags",
        metavar="TAG",
        help="add the image to this tag, beside other architectures' images",
    )
    add_engine(grammar)
    add_format(grammar)
    return grammar


def run(options: Namespace, root: Path) -> int:
    """Push an image to repositories; print an address for each, and the tags on stderr.

    Raises:
        UnknownNameError: The engine has no such image.
        RegistryError: A tag is malformed, or a registry refuses.
    """
    from trainworks.engine import choose
    from trainworks.facts.load import load
    from trainworks.host.settings import read_host_settings
    from trainworks.inspect.targets import find_image
    from trainworks.plan.names import make_unknown_name_error
    from trainworks.plan.variants import image_named
    from trainworks.registry.names import check_repository, check_tags, derive_tags
    from trainworks.registry.push import PushRequest, push_image, report_of, say_tags, text_of
    from trainworks.registry.tools import Registries
    from trainworks.terminal.output import say

    facts = load(root)
    check_tags(options.fixed_tags, options.moving_tags)
    for repository in options.repository:
        check_repository(repository)
    # Before an engine is asked: a word without ``:`` and ``/`` is not a reference but a target.
    is_reference = ":" in options.image or "/" in options.image
    if not is_reference and image_named(options.image, facts) is None:
        raise make_unknown_name_error("target", options.image, map(facts.name_of, facts.targets))
    engine = choose(options.engine, report=say)
    reference = find_image(options.image, engine, facts)
    tags = derive_tags(reference, options.fixed_tags, options.moving_tags, options.shared_tags)
    request = PushRequest(reference=reference, repositories=options.repository, tags=tags)
    with Registries(read_host_settings(os.environ), report=say) as registries:
        done = push_image(engine, request, registries, os.environ)
    report = {"image": reference, "pushed": report_of(done)}
    say_tags(done)
    put_result(options.format, report, text_of(done))
    return 0
