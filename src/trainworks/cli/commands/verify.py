"""``build.py verify``: checks the attestations that cosign verified against a policy."""

from __future__ import annotations

import re
from argparse import Namespace
from dataclasses import asdict, replace
from pathlib import Path

from trainworks.cli.grammar import Example, Grammar, Manual
from trainworks.cli.options import add_format
from trainworks.errors import ProofError
from trainworks.terminal.output import put_result


def parser() -> Grammar:
    """Return the grammar of ``build.py verify``."""
    manual = Manual(
        command="verify",
        summary="check cosign's verified attestations of an image against a policy",
        details=(
            "Reads what `cosign verify-attestation` printed for the types slsaprovenance1 and"
            " cyclonedx, and for --gpu urn:trainworks:evidence:1: from files, or stdin. cosign"
            " checks the signatures; this checks that the statements are about the image and say"
            " what you demand. docs/ship.md has the whole command line."
        ),
        examples=(
            Example(
                "verify r.example.org/pytorch@sha256:... proven.jsonl",
                "show what the proof says",
                needs="cosign's output",
            ),
            Example(
                "verify r.example.org/pytorch@sha256:... proven.jsonl --builder"
                " https://ci.example/images --unchanged",
                "demand who built it, and a checkout without changes",
                needs="cosign's output",
            ),
        ),
        result=(
            "the image, the builder and the commit that are proved."
            " Whose key it is, you have to know."
        ),
        done="it holds",
        fails=(ProofError,),
        reads=(),
        see_also=("prove", "docs/ship.md"),
    )
    grammar = Grammar(manual, check=_check)
    grammar.add_argument(
        "image", metavar="ADDRESS", help="the image that cosign checked: HOST/NAME@sha256:..."
    )
    grammar.add_argument(
        "files", nargs="*", type=Path, metavar="FILE", help="read cosign's output; default: stdin"
    )
    grammar.add_argument(
        "--builder", default="", metavar="URI", help="demand that this builder built the image"
    )
    grammar.add_argument(
        "--commit", default="", metavar="HASH", help="demand that it was built from this git commit"
    )
    grammar.add_argument(
        "--unchanged", action="store_true", help="demand a checkout without changes"
    )
    grammar.add_argument(
        "--gpu",
        default="",
        metavar="NAME",
        help="demand evidence of a green run on such a GPU: H100",
    )
    grammar.add_argument(
        "--part",
        action="append",
        default=[],
        metavar="NAME",
        help="demand this part of that run; default: seven",
    )
    add_format(grammar)
    return grammar


def _check(options: Namespace, _root: Path) -> list[str]:
    """Return the problems of malformed values, and of options that do not go together."""
    problems = []
    if not _digest_of(options.image):
        problems.append(f"{options.image}: name the image by its digest: HOST/NAME@sha256:...")
    if options.commit and not re.fullmatch("[0-9a-fA-F]{7,40}", options.commit):
        problems.append(
            f"--commit {options.commit}: not a git commit: give 7 to 40 hexadecimal digits"
        )
    if options.part and not options.gpu:
        problems.append("--part needs --gpu")
    return problems


def _digest_of(image: str) -> str:
    """Return the 64 digits of ``HOST/NAME@sha256:...`` or ``sha256:...``; ``""`` for other text."""
    match = re.fullmatch(r"(?:\S+@)?sha256:([0-9a-f]{64})", image)
    if match is None:
        return ""
    return match[1]


def run(options: Namespace, _root: Path) -> int:
    """Check the statements that cosign printed against the options, and print what they prove.

    Raises:
        ProofError: The statements are not about the image, or do not say what is demanded.
    """
    from trainworks.attestation.verify import Policy, describe, read_output, verify

    policy = Policy(
        builder=options.builder, commit=options.commit, unchanged=options.unchanged, gpu=options.gpu
    )
    if options.part:
        policy = replace(policy, parts=tuple(options.part))
    proven = verify(read_output(options.files), _digest_of(options.image), policy)
    content = {"image": options.image, **asdict(proven)}
    put_result(options.format, content, describe(options.image, proven))
    return 0
