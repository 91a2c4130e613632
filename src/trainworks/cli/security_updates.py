"""The security updates that an image lacks, as the distribution's own archive has them: an advisory for each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from packageurl import PackageURL

from trainworks.cli.looking import Looked
from trainworks.errors import HostError, OutputError
from trainworks.host.security import Candidate, Pocket, fixes_in, security_pocket, security_sources
from trainworks.host.settings import HostSettings
from trainworks.terminal.output import say
from trainworks.vulnerabilities.advisory import Advisory, Affected
from trainworks.vulnerabilities.installed import Installed, qualifiers_of
from trainworks.vulnerabilities.versions import BEGINNING, UnreadableVersionError, compare_debian, newest


def ask_archive(
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
