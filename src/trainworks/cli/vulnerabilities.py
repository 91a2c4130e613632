"""``build.py vulnerabilities``: holds advisories against what is in an image, or in a bill of materials."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from packageurl import PackageURL
from packaging.utils import canonicalize_name

from trainworks.cli.advisories import Read, published, read_given
from trainworks.cli.attach import attach_vex, check_same, find_pushed
from trainworks.cli.contents import plan_of_target, reference_of
from trainworks.cli.fetching import Fetching
from trainworks.cli.output import say
from trainworks.cli.progress import DISPLAY
from trainworks.engine import choose
from trainworks.engine.protocol import BuiltImage
from trainworks.engine.scratch import private_folder
from trainworks.errors import (
    CompatibilityError,
    HostError,
    LockError,
    OutputError,
    UnknownNameError,
    VulnerabilityError,
)
from trainworks.facts.rows import Facts
from trainworks.host.apt import AptSource, parse_deb822, parse_one_line
from trainworks.host.distribution import Registries
from trainworks.host.downloads import Client, Limits
from trainworks.host.security import Candidate, Pocket, fixes_in, security_pocket, security_sources
from trainworks.host.settings import HostSettings, read_host_settings
from trainworks.imagetest.questions import list_packages
from trainworks.plan.model import ImagePlan
from trainworks.plan.resolve import base_reference
from trainworks.proof.components import (
    Component,
    Contents,
    artifact_component,
    artifacts_of,
    base_component,
    in_order,
    package_components,
)
from trainworks.proof.cyclonedx import references_of
from trainworks.vulnerabilities import LEVELS
from trainworks.vulnerabilities.advisory import Advisory, Affected
from trainworks.vulnerabilities.ignore import Sorted, read_rows, sort_findings
from trainworks.vulnerabilities.installed import Installed, qualifiers_of, read_purl
from trainworks.vulnerabilities.match import Finding, counted, match
from trainworks.vulnerabilities.versions import BEGINNING, UnreadableVersionError, compare_debian, newest
from trainworks.vulnerabilities.vex import Subject, recommendation, vex

TITLE = "org.opencontainers.image.title"
"""The label in which our images have their target's name."""

LIMITS = Limits(attempts=2, pause=0.5)
"""A report without a database is of use too: nobody is to wait long for one that cannot be had."""

KINDS = {"generic": "downloads", "oci": "the base image as such", "rpm": "packages of rpm"}
"""What package URLs without a database are of, for people."""

SHOWN = 8
"""How many names stand for a long list of them."""

SYSTEM = "system"
"""The step that installs all packages of the distribution, and what their dependencies bring."""

SOURCES_OF_IMAGE = (
    "cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null; echo; echo '#:'; "
    'for file in /etc/apt/sources.list.d/*.sources; do cat "$file" 2>/dev/null; echo; done'
)
"""Prints an image's archives: those of one line each, a mark, those of the newer form."""


@dataclass(frozen=True, kw_only=True)
class Looked:
    """An image, as far as advisories are concerned.

    Attributes:
        subject: What documents call it.
        image: The engine's image; nothing of a bill of materials.
        identity: Its identifier, or the bill of materials' serial number.
        packages: What is in it.
        plan: What it was built from, where it is one of ours.
        sources: Its own package archives, where it could be asked.
    """

    subject: Subject
    image: BuiltImage | None
    identity: str
    packages: tuple[Installed, ...]
    plan: ImagePlan | None
    sources: tuple[AptSource, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Compared:
    """What the packages of one ecosystem were compared with: ``sources``, and why others could not be had."""

    ecosystem: str
    packages: int
    sources: tuple[str, ...]
    missing: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was found, and what was looked at.

    Attributes:
        looked: The image.
        found: Open and ignored findings.
        compared: Each ecosystem of the image.
        unmatched: What no database is about: kind of package URL to names with versions.
        unreadable: Files of databases that are no advisories, and advisories whose versions cannot be read.
        pages: Where to read about a vulnerability, by ecosystem.
        time: Of the report, in seconds since 1970.
    """

    looked: Looked
    found: Sorted
    compared: tuple[Compared, ...]
    unmatched: Mapping[str, Sequence[str]]
    unreadable: tuple[str, ...]
    pages: Mapping[str, str]
    time: int


def find(options: Namespace, facts: Facts, environment: Mapping[str, str]) -> Report:
    """Look for known vulnerabilities, as the command line says.

    Raises:
        UnknownNameError: The engine has no such image.
        OutputError: A file that was named cannot be read.
        ImageTestError, ProofError: The image cannot say what is in it.
    """
    now = _now(environment)
    # Files first: a wrong one is known before anything is asked.
    rows = read_rows(_read(options.ignore), str(options.ignore)) if options.ignore else ()
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
                _ask_archive(ecosystem, suite, looked, settings, advisories, sources, missing)
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


# What is in it.


def look(name: str, engine_name: str | None, facts: Facts) -> Looked:
    """Return what is in an image of the engine's, a target's image, or what a bill of materials lists."""
    path = Path(name)
    if path.is_file():
        return read_bill(path, facts)
    if name.endswith(".json"):
        raise OutputError(f"{name}: no such file", hint="`build.py prove TARGET --output DIR` writes sbom.cdx.json")
    engine = choose(engine_name)
    reference = reference_of(name, facts)
    image = engine.inspect(reference)
    if image is None:
        raise UnknownNameError(
            f"{engine.name} has no image {reference}",
            hint=f"`{engine.name} images` lists what there is; one of a registry has to be pulled first",
        )
    say(f"asking {reference} what is in it")
    with DISPLAY.task("reading", log=False), engine.container(image.reference) as container:
        found = list_packages(container)
        archives = container.run(("/bin/sh", "-c", SOURCES_OF_IMAGE)).output
    plan = _plan(image.labels.get(TITLE, ""), facts)
    components: tuple[Component, ...] = package_components(reference, found, {})
    if plan is not None:
        components += tuple(artifact_component(each) for each in artifacts_of(plan, installed=True))
    components = in_order(components)
    if plan is not None:
        base = engine.inspect(plan.image)
        components = (base_component(plan, base.identifier if base else ""), *components)
    purls = dict(zip(references_of(components), (each.purl for each in components), strict=True))
    repository, tag = split_reference(reference)
    sha256 = image.identifier.removeprefix("sha256:")
    own = Contents(reference=f"{repository}:{tag}", sha256=sha256, components=()).purl if tag else ""
    one_line, _, newer = archives.partition("#:\n")
    return Looked(
        subject=Subject(name=repository, version=tag, reference=own, bill=None, purls=purls),
        image=image,
        identity=image.identifier,
        packages=_packages(purls, facts),
        plan=plan,
        sources=(*parse_one_line(one_line), *parse_deb822(newer)),
    )


def split_reference(reference: str) -> tuple[str, str]:
    """Return an image's name and tag; an identifier has no tag, and a name without one means ``latest``."""
    if reference.startswith("sha256:") or "@" in reference:
        return reference, ""
    name, colon, tag = reference.rpartition(":")
    return (name, tag) if colon and "/" not in tag else (reference, "latest")


def read_bill(path: Path, facts: Facts) -> Looked:
    """Read a bill of materials, ours or any other in CycloneDX's JSON; raises ``OutputError`` where it is none."""
    try:
        document: Any = json.loads(_read(path))
        if document["bomFormat"] != "CycloneDX":
            raise OutputError(f"{path}: it is no CycloneDX document but {document['bomFormat']!r:.60}")
        purls = {
            str(each.get("bom-ref") or each["purl"]): str(each["purl"])
            for each in _nested(document.get("components") or ())
            if each.get("purl")
        }
        image = (document.get("metadata") or {}).get("component") or {}
        name, version = str(image.get("name") or path.name), str(image.get("version") or "")
        serial, number = str(document.get("serialNumber") or ""), int(document.get("version") or 1)
        reference = str(image.get("bom-ref") or "")
        packages = _packages(purls, facts)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise OutputError(
            f"{path}: it is no bill of materials in CycloneDX's JSON: {error}",
            hint="`build.py prove TARGET --output DIR` writes one, sbom.cdx.json; so do syft and trivy",
        ) from None
    if not packages:
        raise OutputError(f"{path}: it lists no package with a package URL")
    target = next((each for each in map(facts.name_of, facts.targets) if each.partition("-")[2] == version), "")
    return Looked(
        subject=Subject(
            name=name,
            version=version,
            reference=reference,
            bill=(serial, number) if serial.startswith("urn:uuid:") else None,
            purls=purls,
        ),
        image=None,
        identity=serial or path.name,
        packages=packages,
        plan=_plan(target, facts),
    )


def _nested(components: Iterable[Any]) -> Iterable[Any]:
    """Yield components, and those that are parts of others."""
    for each in components:
        yield each
        yield from _nested(each.get("components") or ())


def _packages(purls: Mapping[str, str], facts: Facts) -> tuple[Installed, ...]:
    return tuple(read_purl(purl, reference, facts.databases) for reference, purl in purls.items())


def _plan(name: str, facts: Facts) -> ImagePlan | None:
    """Return what a target is built from now, only to say which component brings a package."""
    with suppress(LockError, CompatibilityError):
        return plan_of_target(name, facts) if name else None
    return None


# The distribution's own archive.


def _ask_archive(
    ecosystem: str,
    suite: str,
    looked: Looked,
    settings: HostSettings,
    advisories: list[Advisory],
    sources: Mapping[str, list[str]],
    missing: Mapping[str, list[str]],
) -> None:
    """Add the security updates that an image lacks, or why nobody knows."""
    packages = [each for each in looked.packages if each.ecosystem == ecosystem]
    lines = security_sources(suite, settings, looked.sources, debian=ecosystem.startswith("Debian:"))
    if not lines:
        missing[ecosystem].append(
            f"{suite}-security: neither this machine's apt nor the image says where its archive is"
        )
        return
    purls = (PackageURL.from_string(looked.subject.purls[each.reference]) for each in packages)
    architectures = Counter(qualifiers_of(purl).get("arch", "") for purl in purls)
    del architectures["all"], architectures[""]
    architecture = next((each for each, _ in architectures.most_common(1)), "amd64")
    say(f"asking the archive of {suite} for security updates")
    try:
        with security_pocket(suite, architecture, {each.name for each in packages}, settings, lines) as pocket:
            updates = security_updates(packages, pocket)
    except (HostError, OutputError) as error:
        missing[ecosystem].append(error.message)
        return
    except UnreadableVersionError as error:
        missing[ecosystem].append(f"{suite}-security: a version cannot be read: {error}")
        return
    advisories += updates
    signed = f", signed {pocket.signed:%Y-%m-%d %H:%M} UTC" if pocket.signed else ""
    sources[ecosystem].append(f"{pocket.suite}: the archive's own security updates{signed}")


def security_updates(packages: Sequence[Installed], pocket: Pocket) -> list[Advisory]:
    """Return an advisory for each vulnerability that a newer package of the pocket says to fix.

    Its changelog names them; an update that names none is an advisory of its own.
    """
    offered: dict[str, list[Candidate]] = {}
    for candidate in pocket.candidates:
        offered.setdefault(candidate.name, []).append(candidate)
    behind: dict[tuple[str, str], list[tuple[Installed, Candidate]]] = {}
    for package in packages:
        of_name = {each.version: each for each in offered.get(package.name, ())}
        best = newest(tuple(of_name), compare_debian)
        if best and compare_debian(package.version, best) < 0:
            behind.setdefault((package.known_as, package.compared), []).append((package, of_name[best]))
    found: list[Advisory] = []
    for (source, version), pairs in sorted(behind.items()):
        ecosystem = pairs[0][0].ecosystem
        # Packages of one source share a changelog; some have a link to another's. The smallest is the cheapest to read.
        candidates = sorted((each for _, each in pairs), key=lambda each: (each.size, each.name))
        changelog = next(filter(None, (pocket.changelog(each) for each in candidates)), "")
        fixes: dict[str, str] = {}
        for fixed, names in fixes_in(changelog):
            if compare_debian(version, fixed) < 0:
                for name in names:
                    # The newest entry first: a fix that was corrected later is good from then on.
                    fixes.setdefault(name, fixed)
        update = candidates[0].source_version
        unnamed = f"the security update {source} {update}, whose changelog names no CVE"
        for name, fixed in (fixes or {f"{pocket.suite}:{source}": update}).items():
            found.append(
                Advisory(
                    identifier=name,
                    database=pocket.suite,
                    affected=(
                        Affected(
                            ecosystem=ecosystem, name=source, ranges=((("introduced", BEGINNING), ("fixed", fixed)),)
                        ),
                    ),
                    summary="" if fixes else unnamed,
                )
            )
    return found


# What is printed.


def components_of(report: Report) -> Callable[[Installed], str]:
    """Return what says which component of an image brings a package."""
    plan = report.looked.plan
    brings: dict[tuple[str, str], str] = {}
    for step in plan.steps if plan else ():
        if not step.in_image:
            continue
        brings.update({("pypi", str(canonicalize_name(each.name))): step.component for each in step.python})
        if step.component != SYSTEM:
            brings.update({("deb", name): step.component for name in step.debian})

    others = {"deb": "packages of the distribution", "pypi": "Python packages"}
    if plan is not None:
        others = {"deb": SYSTEM, "pypi": "other Python packages"}

    def component_of(package: Installed) -> str:
        name = str(canonicalize_name(package.name)) if package.kind == "pypi" else package.name
        return brings.get((package.kind, name)) or others.get(package.kind, package.kind)

    return component_of


def as_text(report: Report) -> str:
    """Return a report for people: what is open by the component that brings it, worst first, and what to do."""
    found = report.found
    lines = [_headline(report)]
    component_of = components_of(report)
    by_component: dict[str, list[Finding]] = {}
    for finding in found.open:
        names = {component_of(each) for each in finding.packages}
        by_component.setdefault(", ".join(sorted(names)), []).append(finding)
    for component, findings in by_component.items():
        lines += ["", component]
        width = max(len(each.identifier) for each in findings)
        for finding in findings:
            lines += _finding_lines(finding, width, report)
    if found.ignored:
        lines += ["", "ignored"]
        lines += [f"  {one.identifier}  {one.name}: {row.reason} (until {row.until})" for one, row in found.ignored]
    notes = [f"no longer ignored since {row.until}: {row.identifier} of {row.package}" for row in found.expired]
    notes += [f"nothing to ignore: {row.identifier} of {row.package} was not found" for row in found.unused]
    notes += [f"cannot be compared: {each}" for each in report.unreadable]
    if notes:
        lines += ["", "to look at", *(f"  {note}" for note in notes)]
    steps = what_to_do(report)
    if steps:
        lines += ["", "what to do", *(f"  {step}" for step in steps)]
    return "\n".join([*lines, "", *_compared_lines(report)]) + "\n"


def _headline(report: Report) -> str:
    found, subject = report.found, report.looked.subject
    name = f"{subject.name}:{subject.version}" if subject.version else subject.name
    packages = {(each.ecosystem, each.name, each.version) for each in found.open}
    levels = ", ".join(f"{number} {level}" for level, number in counted(found.open, LEVELS).items())
    ignored = f"; {len(found.ignored)} ignored" if found.ignored else ""
    if not any(each.sources for each in report.compared):
        return f"{name}: nothing was compared{ignored}"
    if not found.open:
        return f"{name}: no known vulnerability in what was compared{ignored}"
    return (
        f"{name}: {_number(len(found.open), 'vulnerability', 'vulnerabilities')} "
        f"in {_number(len(packages), 'package')}: {levels}{ignored}"
    )


def _finding_lines(finding: Finding, width: int, report: Report) -> list[str]:
    rating = finding.rating
    level = f"{rating.level} {rating.score:.1f}" if rating.score is not None else rating.level
    names = sorted({each.name for each in finding.packages} - {finding.name})
    installed = f" ({', '.join(names)})" if names else ""
    fixed = f"fixed in {finding.fixed}" if finding.fixed else "no fix yet"
    line = f"  {level:<12}  {finding.identifier:<{width}}  {finding.name} {finding.version}{installed}, {fixed}"
    page = report.pages.get(finding.ecosystem, "")
    # What only the archive knows of has no page of its own.
    link = page.format(id=finding.identifier) if page and "-security:" not in finding.identifier else ""
    return [f"{line}  {link}".rstrip(), *([f"{'':16}{finding.summary}"] if finding.summary else [])]


def what_to_do(report: Report) -> list[str]:
    """Return the next steps, for what is open and has a fix."""
    kinds = {finding.packages[0].kind for finding in report.found.open if finding.fixed}
    plan = report.looked.plan
    steps = []
    if "deb" in kinds:
        if plan is None:
            newer = "a newer base image, then build again"
        elif plan.image == base_reference(plan.base):
            newer = (
                f"remove the base image {plan.image} from the engine, and build again with --no-cache: "
                "both then have what the archive has now"
            )
        else:
            newer = (
                f"a newer base image (its row; `python build.py lock --only {plan.target.name}` records its digest), "
                "then build again with --no-cache"
            )
        steps.append(f"packages of the distribution: {newer}")
    if "pypi" in kinds:
        if plan is None:
            newer = "newer versions in what installs them, then build again"
        else:
            newer = (
                f"`python build.py lock --only {plan.target.name}` takes the newest that the rows allow; a framework's "
                "own version is its row in images; then build again"
            )
        steps.append(f"Python packages: {newer}")
    if any(not finding.fixed for finding in report.found.open):
        steps.append("what has no fix yet: leave the package out, or look at it and say so in a file for --ignore")
    return steps


def _compared_lines(report: Report) -> list[str]:
    lines = ["compared"]
    for each in report.compared:
        lines.append(
            f"  {each.ecosystem}, {_number(each.packages, 'package')}{'' if each.sources else ': with nothing'}"
        )
        lines += [f"    with {source}" for source in each.sources]
        lines += [f"    not with {reason}" for reason in each.missing]
        if not (each.sources or each.missing):
            lines.append("    no database that was read has an advisory about them")
    if any(each.missing for each in report.compared):
        lines.append("    a database from elsewhere: --database FILE (images/databases.toml says where they are)")
    lines.append("not compared")
    for kind, names in report.unmatched.items():
        shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
        lines.append(f"  {KINDS.get(kind, kind)}, which no database is about: {shown}")
    lines.append("  libraries inside of wheels and of what components compile: nobody lists them")
    return lines


def as_values(report: Report) -> dict[str, object]:
    """Return a report for programs."""
    component_of = components_of(report)
    found, subject = report.found, report.looked.subject

    def finding_values(finding: Finding) -> dict[str, object]:
        page = report.pages.get(finding.ecosystem, "")
        return {
            "id": finding.identifier,
            "aliases": list(finding.aliases),
            "ecosystem": finding.ecosystem,
            "package": finding.name,
            "version": finding.version,
            "installed": [
                {
                    "name": each.name,
                    "version": each.version,
                    "component": component_of(each),
                    "bom_ref": each.reference,
                    "purl": subject.purls[each.reference],
                }
                for each in finding.packages
            ],
            "fixed": finding.fixed or None,
            "recommendation": recommendation(finding),
            "severity": finding.rating.level,
            "score": finding.rating.score,
            "vector": finding.rating.vector or None,
            "summary": finding.summary,
            "url": page.format(id=finding.identifier) if page else None,
            "links": list(finding.links),
            "databases": list(finding.databases),
        }

    return {
        "name": f"{subject.name}:{subject.version}" if subject.version else subject.name,
        "identity": report.looked.identity,
        "target": report.looked.plan.target.name if report.looked.plan else None,
        "time": datetime.fromtimestamp(report.time, UTC).isoformat(),
        "counts": dict(counted(found.open, LEVELS)),
        "findings": [finding_values(each) for each in found.open],
        "ignored": [
            {**finding_values(each), "reason": row.reason, "until": row.until.isoformat(), "state": row.state}
            for each, row in found.ignored
        ],
        "expired": [
            {"id": row.identifier, "package": row.package, "until": row.until.isoformat()} for row in found.expired
        ],
        "unused": [
            {"id": row.identifier, "package": row.package, "until": row.until.isoformat()} for row in found.unused
        ],
        "compared": [
            {"ecosystem": each.ecosystem, "packages": each.packages, "with": each.sources, "without": each.missing}
            for each in report.compared
        ],
        "not_compared": report.unmatched,
        "unreadable": list(report.unreadable),
    }


def as_vex(report: Report) -> dict[str, object]:
    """Return a report as CycloneDX."""
    return vex(
        report.looked.subject,
        report.found,
        report.pages,
        builder_version=metadata.version("trainworks"),
        time=report.time,
    )


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


def as_error(report: Report, level: str) -> VulnerabilityError | None:
    """Return why an image does not pass a gate: what is of this level or worse, and what nobody could look at."""
    bad = [each for each in report.found.open if LEVELS.index(each.rating.level) <= LEVELS.index(level)]
    blind = [each.ecosystem for each in report.compared if not each.sources]
    reasons = []
    if bad:
        reasons.append(f"{_number(len(bad), 'vulnerability', 'vulnerabilities')} of level {level} or worse")
    if blind:
        reasons.append(f"packages of {', '.join(blind)} were compared with nothing")
    if not reasons:
        return None
    hint = "give a database with --database; what was not looked at is not taken for good" if not bad else ""
    return VulnerabilityError(f"{report.looked.subject.name}: {'; '.join(reasons)}", hint=hint, reported=True)


def _number(number: int, word: str, plural: str = "") -> str:
    return f"{number} {word if number == 1 else plural or word + 's'}"


def _now(environment: Mapping[str, str]) -> int:
    """Return the time of the report: ``SOURCE_DATE_EPOCH``, for a report that can be made again, else the clock's."""
    said = environment.get("SOURCE_DATE_EPOCH", "")
    return int(said) if said.isascii() and said.isdigit() and len(said) < 12 else int(time.time())


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise OutputError(f"{path}: it is no text") from None
