"""Matching: each vulnerability of each package once, with the rating and the fix that its advisories have."""

from __future__ import annotations

from typing import Any

import pytest

from trainworks.facts.rows import Facts
from trainworks.vulnerabilities import LEVELS
from trainworks.vulnerabilities.advisory import MalformedAdvisoryError, ecosystems_of, read_advisory
from trainworks.vulnerabilities.installed import read_purl
from trainworks.vulnerabilities.match import Finding, Matches, match
from trainworks.vulnerabilities.severity import rate
from vulnerabilities.support import (
    CVSS3_MEDIUM,
    CVSS4_CRITICAL,
    PACKAGES,
    REAL,
    advisory,
    affected,
)


@pytest.fixture
def matching(facts: Facts) -> Any:
    """Give what holds advisories (as JSON has them) against package URLs."""

    def run(purls: tuple[str, ...], *written: object) -> Matches:
        installed = [read_purl(purl, purl, facts.databases) for purl in purls]
        wanted = {each.key for each in installed}
        read = (read_advisory(each, "a database", wanted) for each in written)
        return match(installed, [each for each in read if each is not None])

    return run


def short(finding: Finding) -> tuple[str, str, str, str, str]:
    return finding.identifier, finding.name, finding.version, finding.fixed, finding.rating.level


def test_published_advisories_of_an_image(matching: Any) -> None:
    found = matching(PACKAGES, *REAL).findings
    assert [short(each) for each in found] == [
        ("CVE-2025-32434", "torch", "2.5.1+cpu", "2.6.0", "critical"),
        ("CVE-2023-32681", "requests", "2.30.0", "2.31.0", "medium"),
        ("CVE-2023-5363", "openssl", "3.0.11-1~deb12u1", "3.0.11-1~deb12u2", "unknown"),
    ]
    assert [each.rating.score for each in found] == [9.3, 6.1, None]
    assert found[1].aliases == ("GHSA-j8r2-6x86-q33q", "PYSEC-2023-74")
    assert found[2].aliases == ("DSA-5532-1",)
    assert [each.name for each in found[2].packages] == ["libssl3", "openssl"]


def test_their_fixed_versions_have_none_of_them(matching: Any) -> None:
    fixed = (
        "pkg:pypi/torch@2.6.0%2Bcpu",
        "pkg:pypi/requests@2.31.0",
        "pkg:deb/debian/libssl3@3.0.11-1~deb12u2?distro=debian-12&upstream=openssl%403.0.11-1~deb12u2",
    )
    assert matching(fixed, *REAL) == Matches(findings=(), unreadable=())


def test_a_source_package_and_its_version_are_what_debians_advisories_name(matching: Any) -> None:
    purl = "pkg:deb/debian/libstdc%2B%2B6@12.2.0-14%2Bb1?distro=debian-12.5&upstream=gcc-12%4012.2.0-14"
    of_source = advisory("A", affected("Debian:12", "gcc-12", "introduced=0", "fixed=12.2.0-14+deb12u1"))
    of_binary = advisory("B", affected("Debian:12", "libstdc++6", "introduced=0"))
    other_release = advisory("C", affected("Debian:11", "gcc-12", "introduced=0"))
    at_the_binarys = advisory("D", affected("Debian:12", "gcc-12", "introduced=12.2.0-14+b1"))
    found = matching((purl,), of_source, of_binary, other_release, at_the_binarys).findings
    assert [each.identifier for each in found] == ["A"]


def test_ubuntu_is_known_by_its_long_name(matching: Any) -> None:
    purl = "pkg:deb/ubuntu/libc6@2.35-0ubuntu3?distro=ubuntu-22.04&upstream=glibc"
    plain = advisory(
        "UBUNTU-CVE-2000-1", affected("Ubuntu:22.04:LTS", "glibc", "introduced=0"), upstream=["CVE-2000-1"]
    )
    paid = advisory("UBUNTU-CVE-2000-2", affected("Ubuntu:Pro:22.04:LTS", "glibc", "introduced=0"))
    assert [each.identifier for each in matching((purl,), plain, paid).findings] == ["CVE-2000-1"]


def test_ubuntus_notices_say_which_release_has_which_vulnerability(matching: Any) -> None:
    row = {
        "id": "CVE-2000-2",
        "severity": [{"type": "CVSS_V3", "score": CVSS3_MEDIUM}, {"type": "Ubuntu", "score": "low"}],
    }
    cves = {"cves_map": {"cves": [row]}}
    here = affected("Ubuntu:22.04:LTS", "glibc", "introduced=0", "fixed=2.36", database_specific=cves)
    notice = advisory("USN-1-1", here, upstream=["CVE-2000-1", "CVE-2000-2", "UBUNTU-CVE-2000-1"])
    (found,) = matching(("pkg:deb/ubuntu/libc6@2.35?distro=ubuntu-22.04&upstream=glibc",), notice).findings
    assert (found.identifier, found.aliases, found.rating.score) == ("CVE-2000-2", ("USN-1-1",), 6.1)


@pytest.mark.parametrize("purl", ["pkg:rpm/amzn/glibc@2.34-52?distro=amzn-2023", "pkg:generic/open-mpi@4.1.7"])
def test_what_no_database_is_about_has_no_ecosystem(facts: Facts, purl: str) -> None:
    assert read_purl(purl, purl, facts.databases).ecosystem == ""


def test_python_names_have_many_spellings(matching: Any) -> None:
    found = matching(("pkg:pypi/Ruamel_YAML@1.0",), advisory("A", affected("PyPI", "ruamel.yaml", "introduced=0")))
    assert [short(each)[:3] for each in found.findings] == [("A", "ruamel-yaml", "1.0")]


def test_enumerated_versions_hold_beside_ranges(matching: Any) -> None:
    old = affected("PyPI", "a", "introduced=5", "fixed=6", versions=["1.0", "not-a-version"])
    found = matching(("pkg:pypi/a@1.0.0", "pkg:pypi/a@2.0"), advisory("A", old)).findings
    assert [short(each)[:4] for each in found] == [("A", "a", "1.0.0", "6")]


def test_commits_are_no_versions(matching: Any) -> None:
    git = {"type": "GIT", "repo": "https://git.example/a", "events": [{"introduced": "0"}]}
    package = {"package": {"ecosystem": "PyPI", "name": "a"}, "ranges": [git]}
    no_package = {"ranges": [git]}
    assert matching(("pkg:pypi/a@1.0",), advisory("A", package), advisory("B", no_package)).findings == ()


def test_withdrawn_advisories_are_not_heard(matching: Any) -> None:
    gone = advisory("A", affected("PyPI", "a", "introduced=0"), withdrawn="2026-01-01T00:00:00Z")
    assert matching(("pkg:pypi/a@1.0",), gone).findings == ()


def test_aliases_by_way_of_others_are_one(matching: Any) -> None:
    package = affected("PyPI", "a", "introduced=0", "fixed=2.0")
    later = affected("PyPI", "a", "introduced=0", "fixed=2.1")
    written = (
        advisory("GHSA-1", package, aliases=["X-1"]),
        advisory("PYSEC-1", package, aliases=["X-2"]),
        advisory("Y-1", later, aliases=["X-1", "X-2"], summary="said once"),
        advisory("GHSA-2", package),
    )
    for order in (written, written[::-1], (*written[2:], *written[:2])):
        first, second = matching(("pkg:pypi/a@1.0",), *order).findings
        assert (first.identifier, set(first.aliases)) == ("GHSA-1", {"PYSEC-1", "X-1", "X-2", "Y-1"})
        # Whoever knows of a later fix knows more.
        assert (first.fixed, first.summary) == ("2.1", "said once")
        assert second.identifier == "GHSA-2"


@pytest.mark.parametrize(
    "named",
    [
        {"upstream": ["CVE-2000-1", "CVE-2000-2"]},
        {"aliases": ["CVE-2000-1", "CVE-2000-2"]},
        {"upstream": ["CVE-2000-1", "OURS-CVE-2000-1", "CVE-2000-2", "OURS-CVE-2000-2"]},
    ],
    ids=["upstream", "aliases", "each twice"],
)
def test_an_advisory_about_several_vulnerabilities_is_counted_as_those(
    named: dict[str, list[str]], matching: Any
) -> None:
    package = affected("Debian:12", "a", "introduced=0", "fixed=1.0-2")
    written = (
        advisory("DSA-1-1", package, **named),
        advisory("DEBIAN-CVE-2000-1", package, upstream=["CVE-2000-1"]),
    )
    found = matching(("pkg:deb/debian/a@1.0-1?distro=debian-12",), *written).findings
    assert [(each.identifier, each.aliases) for each in found] == [
        ("CVE-2000-1", ("DSA-1-1", "DEBIAN-CVE-2000-1")),
        ("CVE-2000-2", ("DSA-1-1",)),
    ]


def test_two_versions_of_a_package_are_two_findings_and_two_copies_one(facts: Facts) -> None:
    read = read_advisory(advisory("A", affected("PyPI", "a", "introduced=0")), "a database", {("PyPI", "a")})
    assert read is not None
    purls = {"one": "pkg:pypi/a@1.0", "two": "pkg:pypi/a@1.0", "three": "pkg:pypi/a@2.0"}
    installed = [read_purl(purl, reference, facts.databases) for reference, purl in purls.items()]
    found = match(installed, [read]).findings
    assert [(each.version, [one.reference for one in each.packages]) for each in found] == [
        ("1.0", ["one", "two"]),
        ("2.0", ["three"]),
    ]


def test_what_cannot_be_compared_is_named(matching: Any) -> None:
    odd = advisory("A", affected("PyPI", "a", "introduced=first"))
    found = matching(("pkg:pypi/a@1.0",), odd, advisory("B", affected("PyPI", "a", "introduced=0")))
    assert [each.identifier for each in found.findings] == ["B"]
    assert found.unreadable == ("A: a 1.0: Invalid version: 'first'",)


@pytest.mark.parametrize(
    ("identifier", "scores", "words", "expected"),
    [
        ("A", [("CVSS_V3", CVSS3_MEDIUM), ("CVSS_V4", CVSS4_CRITICAL)], [], ("critical", 9.3, "CVSSv4")),
        ("A", [("CVSS_V3", CVSS3_MEDIUM)], ["CRITICAL"], ("medium", 6.1, "CVSSv31")),
        ("A", [("CVSS_V3", CVSS3_MEDIUM.replace("3.1", "3.0"))], [], ("medium", 6.1, "CVSSv3")),
        ("A", [("CVSS_V2", "AV:N/AC:L/Au:N/C:P/I:P/A:P")], [], ("high", 7.5, "CVSSv2")),
        ("A", [("CVSS_V3", "CVSS:3.1/AV:N/AC:L/PR:N/UI:N/S:U/C:N/I:N/A:N")], [], ("negligible", 0.0, "CVSSv31")),
        ("A", [("CVSS_V3", "CVSS:3.1/nonsense")], ["MODERATE"], ("medium", None, "")),
        ("A", [("Ubuntu", "high")], [], ("high", None, "")),
        ("A", [], ["not yet assigned"], ("unknown", None, "")),
        ("A", [], ["low", "HIGH"], ("high", None, "")),
        ("A", [("CVSS_V4", CVSS4_CRITICAL)], ["unimportant"], ("negligible", None, "")),
        ("MAL-2026-1", [], [], ("critical", None, "")),
        ("A", [], [], ("unknown", None, "")),
    ],
)
def test_ratings(
    identifier: str, scores: list[tuple[str, str]], words: list[str], expected: tuple[str, float | None, str]
) -> None:
    rating = rate(identifier, scores, words)
    assert (rating.level, rating.score, rating.method) == expected
    assert rating.level in LEVELS


def test_the_worst_is_believed_unless_the_distribution_says_that_it_is_none(matching: Any) -> None:
    score = {"severity": [{"type": "CVSS_V4", "score": CVSS4_CRITICAL}]}
    a, b = (affected("Debian:12", name, "introduced=0") for name in ("a", "b"))
    no_danger = {**a, "ecosystem_specific": {"urgency": "unimportant"}}
    found = matching(
        ("pkg:deb/debian/a@1.0-1?distro=debian-12", "pkg:deb/debian/b@1.0-1?distro=debian-12"),
        advisory("CVE-2000-1", a, b, **score),
        advisory("DEBIAN-CVE-2000-1", no_danger, upstream=["CVE-2000-1"]),
    ).findings
    assert [(each.name, each.rating.level) for each in found] == [("b", "critical"), ("a", "negligible")]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([], "no attribute 'get'|list indices"),
        ({}, "'id' is missing"),
        ({"id": 7}, "7 is no text"),
        ({"id": "A\x1b[2J"}, "is no identifier"),
        (advisory("A", affected("PyPI", "a"), aliases=["B C"]), "'B C' is no identifier"),
        (advisory("A", {"package": {"ecosystem": "PyPI", "name": "a"}, "ranges": [{"type": "ECOSYSTEM"}]}), "'events'"),
        (advisory("A", affected("PyPI", "a", "introduced=0"), references=[{}]), "'url' is missing"),
    ],
)
def test_what_is_no_advisory_is_said(value: object, words: str) -> None:
    with pytest.raises(MalformedAdvisoryError, match=words):
        read_advisory(value, "a database", {("PyPI", "a")})


def test_ecosystems_are_those_of_all_packages() -> None:
    assert ecosystems_of(advisory("A", affected("PyPI", "a"), affected("Debian:12", "b"))) == {"PyPI", "Debian:12"}
    with pytest.raises(MalformedAdvisoryError, match="'ecosystem' is missing"):
        ecosystems_of({"affected": [{"package": {"name": "a"}}]})


def test_a_text_of_an_advisory_moves_no_cursor() -> None:
    written = advisory("A", affected("PyPI", "a", "introduced=0"), details="one\x1b[31m\n\ntwo " + "x" * 300)
    read = read_advisory(written, "a database", {("PyPI", "a")})
    assert read is not None
    assert read.summary.startswith("one [31m two x")
    assert len(read.summary) == 160
