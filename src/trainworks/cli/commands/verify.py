"""``build.py verify``: checks the signed proof of an image, from files alone."""

from __future__ import annotations

import argparse
import json
import os
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

from trainworks.cli.output import put


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``build.py verify``."""
    grammar = argparse.ArgumentParser(
        prog="build.py verify",
        description="Checks the signed proof of an image; see docs/proof.md.",
        allow_abbrev=False,
    )
    grammar.add_argument(
        "image", metavar="IMAGE", help="a name that the engine has; sha256:...; or HOST/NAME@sha256:..."
    )
    grammar.add_argument(
        "--proof",
        type=Path,
        metavar="DIR",
        help="what `build.py prove` wrote; default: what is attached in the registry",
    )
    grammar.add_argument("--key", type=Path, required=True, metavar="FILE", help="public key of who signed (PEM)")
    grammar.add_argument("--engine", metavar="NAME", help="docker or buildah; default: the first that answers")
    grammar.add_argument("--format", choices=("text", "json"), default="text", help="of the result on stdout")
    grammar.add_argument("--root", type=Path, metavar="DIR", help=argparse.SUPPRESS)
    return grammar


def run(options: Namespace, _root: Path) -> int:
    """Check a proof, and print what it proves."""
    from trainworks.cli.prove import describe, verify

    proven = verify(options, os.environ)
    content = {"image": options.image, **asdict(proven)}
    put(json.dumps(content, indent=2) + "\n" if options.format == "json" else describe(options.image, proven))
    return 0
