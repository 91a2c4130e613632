"""``build.py verify``: checks the signed proof of an image, from files alone."""

from __future__ import annotations

import os
import re
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

from trainworks.cli.grammar import DOCKER_HOST, LOGINS, Example, Grammar, add_engine, add_format
from trainworks.errors import (
    CommandLineError,
    EngineError,
    EngineUnavailableError,
    HostError,
    ProofError,
    RegistryError,
    UnknownNameError,
)
from trainworks.terminal.output import put_result


def parser() -> Grammar:
    """Return the grammar of ``build.py verify``."""
    grammar = Grammar(
        "verify",
        summary="check the signed proof of an image",
        details="Checks the signed proof of an image, from files or as attached in the registry.",
        examples=(
            Example(
                "verify my/train:1 --proof proof --key public.pem",
                "check an image of the engine with the files of `build.py prove`",
                needs="an engine and a key",
            ),
            Example(
                "verify r.example.org/pytorch@sha256:... --key public.pem",
                "check an image in a registry with its attached proof",
                needs="a registry and a key",
            ),
            Example(
                "verify r.example.org/pytorch:1 --key public.pem --builder https://ci.example/images --unchanged",
                "demand who built it, and a checkout without changes",
                needs="a registry and a key",
            ),
        ),
        result="the image, the key, the builder and the commit that are proved. Whose key it is, you have to know.",
        done="it holds",
        fails=(UnknownNameError, EngineError, EngineUnavailableError, HostError, RegistryError, ProofError),
        reads=(LOGINS, DOCKER_HOST),
        see_also=("prove", "docs/proof.md"),
    )
    grammar.add_argument(
        "image",
        metavar="IMAGE|TARGET|ADDRESS",
        help="check this image: a name, sha256:..., or HOST/NAME@sha256:...",
    )
    grammar.add_argument(
        "--proof",
        type=Path,
        metavar="DIR",
        help="read the files of `build.py prove`; default: the registry",
    )
    grammar.add_argument("--key", required=True, metavar="KEY", help="the signer's public key: a PEM file")
    grammar.add_argument("--builder", default="", metavar="URI", help="demand that this builder built the image")
    grammar.add_argument("--commit", default="", metavar="HASH", help="demand that it was built from this git commit")
    grammar.add_argument("--unchanged", action="store_true", help="demand a checkout without changes")
    add_engine(grammar)
    add_format(grammar)
    return grammar


def run(options: Namespace, root: Path) -> int:
    """Check a proof, and print what it proves."""
    from trainworks.facts.load import load
    from trainworks.proof.requests import VerifyRequest
    from trainworks.proof.verify import Policy
    from trainworks.proof.verify_image import describe, verify_image

    if options.commit and not re.fullmatch("[0-9a-fA-F]{7,40}", options.commit):
        raise CommandLineError([f"--commit {options.commit}: not a git commit: give 7 to 40 hexadecimal digits"])
    policy = Policy(builder=options.builder, commit=options.commit, unchanged=options.unchanged)
    request = VerifyRequest(
        image=options.image, key=options.key, proof=options.proof, engine=options.engine, policy=policy
    )
    proven = verify_image(request, load(root), os.environ)
    content = {"image": options.image, **asdict(proven)}
    put_result(options.format, content, describe(options.image, proven))
    return 0
