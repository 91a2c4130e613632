"""``build.py vulnerabilities``: known vulnerabilities of what is in an image."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from pathlib import Path

from trainworks.cli.grammar import (
    APT_SETTINGS,
    CPU_TARGET,
    DOCKER_HOST,
    FACTS,
    HOST_SETTINGS,
    LOGINS,
    Example,
    Grammar,
    Source,
    add_engine,
    add_format,
)
from trainworks.errors import (
    EngineError,
    EngineUnavailableError,
    FactsError,
    HostError,
    ImageTestError,
    ProofError,
    RegistryError,
    UnknownNameError,
    VulnerabilityError,
)
from trainworks.terminal.output import put, put_result, say, write_file
from trainworks.vulnerabilities import LEVELS


def parser() -> Grammar:
    """Return the grammar of ``build.py vulnerabilities``."""
    grammar = Grammar(
        "vulnerabilities",
        summary="find known vulnerabilities of what is in an image",
        details="Holds published advisories (OSV format), and the security updates of the distribution's own archive, "
        "against the packages of an image or of a bill of materials. What could not be compared is said.",
        examples=(
            Example(f"vulnerabilities {CPU_TARGET}", "the image of a target", needs="an engine and a network"),
            Example(
                "vulnerabilities proof/sbom.cdx.json --database advisories --no-archive --fail-on high",
                "a gate that needs no network: advisories of a folder, against a bill of materials",
                needs="both files",
            ),
            Example(
                "vulnerabilities my/train:2 --ignore looked-at.toml --format cyclonedx --output vex.cdx.json",
                "without what somebody has looked at, for programs that read CycloneDX",
                needs="an engine and a network",
            ),
        ),
        result="what is open, by the component that brings it, worst first: identifier, package, version with the fix, "
        "link; what to do next; what was compared with what, and how old that is.",
        done="reported",
        fails=(
            FactsError,
            UnknownNameError,
            EngineError,
            EngineUnavailableError,
            ImageTestError,
            HostError,
            RegistryError,
            ProofError,
            VulnerabilityError,
        ),
        reads=(
            FACTS,
            HOST_SETTINGS,
            APT_SETTINGS,
            DOCKER_HOST,
            LOGINS,
            Source("XDG_CACHE_HOME", "folder of downloaded advisories, which are kept for a day; default: ~/.cache"),
            Source("SOURCE_DATE_EPOCH", "the time that the report gives, in seconds since 1970; default: now"),
        ),
        see_also=("prove", "docs/vulnerabilities.md"),
    )
    grammar.add_argument(
        "image", metavar="IMAGE|TARGET|FILE", help="an image of the engine's store, a target's name, or sbom.cdx.json"
    )
    grammar.add_argument(
        "--database",
        action="append",
        default=[],
        metavar="DIR|FILE|URL",
        help="advisories in the OSV format, instead of downloading the published ones; may be repeated",
    )
    grammar.add_argument(
        "--no-archive", dest="archive", action="store_false", help="do not ask the distribution's package archive"
    )
    grammar.add_argument("--ignore", type=Path, metavar="FILE", help="TOML rows [[ignore]]: id, package, reason, until")
    grammar.add_argument(
        "--fail-on", choices=LEVELS, help="end with 18 where anything is open that is as bad as this, or worse"
    )
    grammar.add_argument("--output", type=Path, metavar="FILE", help="write the report there instead of to stdout")
    grammar.add_argument(
        "--attach", metavar="ADDRESS", help="to this image in a registry: HOST/NAME:TAG or HOST/NAME@sha256:..., as VEX"
    )
    add_engine(grammar)
    add_format(grammar, ("text", "json", "cyclonedx"), "of the report; cyclonedx is 1.6, with VEX")
    return grammar


def run(options: Namespace, root: Path) -> int:
    """Report on an image."""
    from trainworks.cli.vulnerabilities import attach_report, find
    from trainworks.cli.vulnerability_report import as_error, as_text, as_values, as_vex
    from trainworks.facts.load import load

    report = find(options, load(root), os.environ)
    if options.format == "text":
        text = as_text(report)
    else:
        text = json.dumps(as_vex(report) if options.format == "cyclonedx" else as_values(report), indent=2) + "\n"
    if options.attach:
        say(f"attached to {options.attach} as {attach_report(report, options.attach, os.environ)}")
    if options.output is None:
        put(text)
    else:
        write_file(options.output, text)
        put_result(options, {"file": str(options.output)}, f"{options.output}\n")
    error = as_error(report, options.fail_on) if options.fail_on else None
    if error is not None:
        raise error
    return 0
