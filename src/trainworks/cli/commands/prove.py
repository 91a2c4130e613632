"""``build.py prove``: writes the bills of materials and the provenance of an
image, and signs them.
"""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path

from trainworks.cli.commands.extend import add_contents, extension_of
from trainworks.cli.grammar import (
    CPU_TARGET,
    DOCKER_HOST,
    FACTS,
    IMAGE_ERRORS,
    LOGINS,
    PLANNING_ERRORS,
    Example,
    Grammar,
    Manual,
    Source,
)
from trainworks.cli.options import add_artifact, add_components, add_engine, add_format
from trainworks.errors import (
    CommandLineError,
    ExtendError,
    HostError,
    ProofError,
    RecipeError,
    RegistryError,
)
from trainworks.terminal.output import put_result, say


def parser() -> Grammar:
    """Return the grammar of ``build.py prove``."""
    manual = Manual(
        command="prove",
        summary="write what is in an image and what it was built from",
        details=(
            "Writes the bill of materials of a target's image, or of an extended one (CycloneDX),"
            " and what it was built from (SLSA provenance). `cosign attest` signs them, and"
            " attaches them to the image."
        ),
        examples=(
            Example(
                f"prove {CPU_TARGET} --output proof",
                "write bill of materials and provenance",
                needs="an engine",
            ),
            Example(
                f"prove {CPU_TARGET} --output proof --pushed r.example.org/pytorch:1",
                "check that the registry has this image, and show cosign's commands",
                needs="an engine and a registry",
            ),
            Example(
                "prove my/train:1 --base my/pytorch:1 --source"
                " src --entry-point train.py --output proof",
                "prove an image that `build.py extend` made from the same",
                needs="an engine",
            ),
        ),
        result=(
            "the names of the files; with --pushed the commands of cosign that sign them on stderr."
        ),
        done="written",
        fails=(
            *PLANNING_ERRORS,
            *IMAGE_ERRORS,
            RecipeError,
            HostError,
            ExtendError,
            RegistryError,
            ProofError,
        ),
        reads=(
            FACTS,
            DOCKER_HOST,
            LOGINS,
            Source("SOURCE_DATE_EPOCH", "the time that the documents give, in seconds since 1970"),
        ),
        see_also=("verify", "push", "docs/ship.md"),
    )
    grammar = Grammar(manual)
    grammar.add_argument(
        "target",
        metavar="TARGET|IMAGE",
        help="prove the image of this target; with --base: this extended image",
    )
    grammar.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="write to this folder"
    )
    grammar.add_argument(
        "--pushed",
        metavar="ADDRESS",
        help="check that a registry has it: HOST/NAME:TAG or HOST/NAME@sha256:...",
    )
    grammar.add_argument(
        "--evidence",
        type=Path,
        metavar="FILE",
        help="add a record of a run in this image; it needs --pushed",
    )
    grammar.add_argument(
        "--licenses", action="store_true", help="write the licence and source of each package, too"
    )
    grammar.add_argument(
        "--builder", metavar="URI", help="name the builder (default: urn:trainworks:builder:local)"
    )
    add_components(grammar, "name a component that the build added", "name one that it left out")
    add_artifact(grammar, "name a wheel that the build was given")
    grammar.add_argument("--base", metavar="IMAGE|TARGET", help="name the image that was extended")
    add_contents(grammar)
    add_engine(grammar)
    add_format(grammar)
    return grammar


def run(options: Namespace, root: Path) -> int:
    """Write the documents of a proof, and print the names of their files.

    With ``--pushed``, the commands that sign and attach them go to stderr.

    Raises:
        CommandLineError: The options are partly those of a target, partly of an extended image.
    """
    from trainworks.attestation.evidence import EVIDENCE
    from trainworks.attestation.options import ProveRequest
    from trainworks.attestation.prove import prove

    _check_choice(options)
    target, with_components, extension = options.target, tuple(options.with_components), None
    if options.base:
        # The image and the components are then those of the extension.
        extension = extension_of(options, options.target)
        target, with_components = "", ()
    request = ProveRequest(
        target=target,
        output=options.output,
        pushed=options.pushed or "",
        builder=options.builder or "",
        evidence=options.evidence,
        licenses=options.licenses,
        engine=options.engine,
        with_components=with_components,
        without_components=tuple(options.without_components),
        artifacts=tuple(options.artifact),
        extension=extension,
    )
    proof = prove(request, root, os.environ)
    content = {
        "name": proof.name,
        "image": proof.bill.reference,
        "identifier": f"sha256:{proof.bill.sha256}",
        "components": len(proof.bill.components),
        "files": [str(path) for path in proof.files],
        "address": proof.address,
    }
    # Without an image in a registry cosign has nothing to sign.
    if proof.address:
        kinds = ("cyclonedx", "slsaprovenance1", EVIDENCE)
        # The evidence, the last file, is optional.
        for kind, path in zip(kinds, proof.files, strict=False):
            say(f"cosign attest --key KEY --type {kind} --predicate {path} {proof.address}")
    lines = "".join(f"{path}\n" for path in proof.files)
    put_result(options.format, content, lines)
    return 0


def _check_choice(options: Namespace) -> None:
    """Check that the options are those of a target, or those of an extended image.

    Raises:
        CommandLineError: An option is about the other kind of image, or lacks ``--pushed``.
    """
    names: tuple[str, ...] = (
        "requirements",
        "extra",
        "group",
        "apt",
        "build_env",
        "source",
        "entry_point",
    )
    advice = "is about an extended image: name its --base too"
    if options.base:
        names = ("without_components", "artifact")
        advice = "is about a target's image, and --base is given"
    problems = []
    for name in names:
        if getattr(options, name):
            flag = name.removesuffix("_components").replace("_", "-")
            problems.append(f"--{flag} {advice}")
    if options.evidence and not options.pushed:
        problems.append("--evidence is about an image in a registry: give --pushed ADDRESS")
    if problems:
        raise CommandLineError(problems)
