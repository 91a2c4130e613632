"""``build.py prove``: writes what is in an image and what it was built from, and signs it."""

from __future__ import annotations

import argparse
import json
import os
from argparse import Namespace
from pathlib import Path

from trainworks.cli.output import put


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``build.py prove``."""
    grammar = argparse.ArgumentParser(
        prog="build.py prove",
        description=(
            "Writes what is in a target's image (CycloneDX and SPDX) and what it was built from (SLSA provenance), and "
            "signs all of it; see docs/proof.md. The password of an encrypted key comes from TRAINWORKS_KEY_PASSWORD, "
            "the time that documents give from SOURCE_DATE_EPOCH."
        ),
        allow_abbrev=False,
    )
    grammar.add_argument("target", metavar="TARGET", help="one of --list whose image the engine has")
    grammar.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder to write to")
    grammar.add_argument("--key", type=Path, metavar="FILE", help="private key, PEM: Ed25519 or ECDSA P-256")
    grammar.add_argument(
        "--attach", metavar="ADDRESS", help="HOST/NAME:TAG or HOST/NAME@sha256:...: attach it to the image there"
    )
    grammar.add_argument("--builder", metavar="URI", help="who vouches for it (default: urn:trainworks:builder:local)")
    grammar.add_argument(
        "--with", dest="with_components", action="append", default=[], metavar="COMPONENT", help="as the build had it"
    )
    grammar.add_argument(
        "--without", dest="without_components", action="append", default=[], metavar="COMPONENT", help="the same"
    )
    grammar.add_argument("--engine", metavar="NAME", help="docker or buildah; default: the first that answers")
    grammar.add_argument("--format", choices=("text", "json"), default="text", help="of the result on stdout")
    grammar.add_argument("--root", type=Path, metavar="DIR", help=argparse.SUPPRESS)
    return grammar


def run(options: Namespace, root: Path) -> int:
    """Write the proof, and print the names of its files."""
    from trainworks.cli.prove import prove

    proof = prove(options, root, os.environ)
    content = {
        "name": proof.target,
        "image": proof.contents.reference,
        "identifier": f"sha256:{proof.contents.sha256}",
        "components": len(proof.contents.components),
        "key": proof.key,
        "files": [str(path) for path in proof.files],
        "attached": dict(proof.attached),
    }
    lines = "".join(f"{path}\n" for path in proof.files)
    put(json.dumps(content, indent=2) + "\n" if options.format == "json" else lines)
    return 0
