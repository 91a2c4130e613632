"""``build.py vulnerabilities``: holds advisories against what is in an image, or in a bill of materials."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from trainworks.cli.advisories import Read, published, read_given
from trainworks.cli.looking import look, read_text
from trainworks.cli.security_updates import ask_archive
from trainworks.cli.vulnerability_report import Compared, Report, as_vex
from trainworks.engine.scratch import private_folder
from trainworks.errors import LockError, OutputError
from trainworks.facts.rows import Facts
from trainworks.host.downloads import Client, Limits
from trainworks.host.settings import read_host_settings
from trainworks.proof.attach import attach_vex, check_same, find_pushed
from trainworks.registry.client import Registries
from trainworks.terminal.fetching import Fetching
from trainworks.terminal.output import say
from trainworks.vulnerabilities.advisory import Advisory
from trainworks.vulnerabilities.ignore import read_rows, sort_findings
from trainworks.vulnerabilities.match import match

LIMITS = Limits(attempts=2, pause=0.5)
"""A report without a database is of use too: nobody is to wait long for one that cannot be had."""


def find(options: Namespace, facts: Facts, environment: Mapping[str, str]) -> Report:
    """Look for known vulnerabilities, as the command line says.

    Raises:
        UnknownNameError: The engine has no such image.
        OutputError: A file that was named cannot be read.
        ImageTestError, ProofError: The image cannot say what is in it.
    """
    now = _now(environment)
    # Files first: a wrong one is known before anything is asked.
    rows = read_rows(read_text(options.ignore), str(options.ignore)) if options.ignore else ()
    settings = read_host_settings(environment)
    looked = look(options.image, options.engine, facts)
    if options.attach and looked.image is None:
        raise OutputError("--attach is for an image that the engine has: whose a bill of materials is cannot be seen")
    wanted = {each.key for each in looked.packages if each.ecosystem}
    ecosystems = Counter(each.ecosystem for each in looked.packages if each.ecosystem)
    sources: dict[str, list[str]] = {each: [] for each in ecosystems}
    missing: dict[str, list[str]] = {each: [] for each in ecosystems}
    advisories: list[Advisory] = []
    unreadable: list[str] = []
    fetching = Fetching()
    with (
        fetching.shown("fetching"),
        Client(settings, limits=LIMITS, watch=fetching) as client,
        private_folder() as folder,
    ):
        for value in options.database:
            read = read_given(value, wanted, client, folder)
            advisories += read.advisories
            unreadable += filter(None, [read.unreadable])
            _note(read, "", sources)
        for row in () if options.database else facts.databases:
            own = [each for each in ecosystems if each.partition(":")[0] == row.name]
            if not own:
                continue
            try:
                read, age = published(row, wanted, client, _cache(environment), time.time(), say)
            except (LockError, OutputError) as error:
                for each in own:
                    missing[each].append(error.message)
                continue
            advisories += read.advisories
            unreadable += filter(None, [read.unreadable])
            _note(read, age, sources)
    if options.archive:
        for ecosystem in ecosystems:
            suite = _suite(ecosystem, facts)
            if suite:
                ask_archive(ecosystem, suite, looked, settings, advisories, sources, missing)
    matches = match(looked.packages, advisories)
    unmatched: dict[str, list[str]] = {}
    for package in looked.packages:
        if not package.ecosystem:
            unmatched.setdefault(package.kind, []).append(f"{package.name} {package.version}".strip())
    return Report(
        looked=looked,
        found=sort_findings(matches.findings, rows, datetime.fromtimestamp(now, UTC).date()),
        compared=tuple(
            Compared(
                ecosystem=each,
                packages=number,
                sources=tuple(sources[each]),
                missing=tuple(dict.fromkeys(missing[each])),
            )
            for each, number in sorted(ecosystems.items())
        ),
        unmatched=unmatched,
        unreadable=(*unreadable, *matches.unreadable),
        pages={each: _page(each, facts) for each in ecosystems},
        time=now,
    )


def _cache(environment: Mapping[str, str]) -> Path:
    """Return the folder of downloaded databases."""
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainworks" / "advisories"


def _note(read: Read, age: str, sources: Mapping[str, list[str]]) -> None:
    """Take down which ecosystems a database is about."""
    for ecosystem, names in sources.items():
        if number := read.counts.get(ecosystem):
            newest_of_all = f", the newest of {read.modified[:10]}" if read.modified else ""
            advisories = f"{number:,} advisor{'y' if number == 1 else 'ies'}"
            names.append(f"{read.name}: {advisories}{newest_of_all}{f', {age}' if age else ''}")


def _suite(ecosystem: str, facts: Facts) -> str:
    """Return the code name of a distribution's release; ``""`` where no base has it, or it has no archive of apt's."""
    name, _, release = ecosystem.partition(":")
    wanted = f"{name.lower()}{release.partition(':')[0]}"
    return next((base.suite for base in facts.bases if base.name == wanted), "")


def _page(ecosystem: str, facts: Facts) -> str:
    return next((row.page for row in facts.databases if row.name == ecosystem.partition(":")[0]), "")


def attach_report(report: Report, address: str, environment: Mapping[str, str]) -> str:
    """Attach a report to its image in a registry, as CycloneDX; return the digest of what it became.

    Raises:
        ProofError: What is there is another image.
        RegistryError: The registry does not take it.
    """
    assert report.looked.image is not None
    with Registries(read_host_settings(environment), report=say) as registries:
        pushed = find_pushed(address, registries)
        check_same(pushed, report.looked.image)
        return attach_vex(pushed, json.dumps(as_vex(report), indent=2) + "\n")


def _now(environment: Mapping[str, str]) -> int:
    """Return the time of the report: ``SOURCE_DATE_EPOCH``, for a report that can be made again, else the clock's."""
    said = environment.get("SOURCE_DATE_EPOCH", "")
    return int(said) if said.isascii() and said.isdigit() and len(said) < 12 else int(time.time())
