"""Test the report of `build.py outdated` on apt's answer; `tests/image/test_outdated.py` asks a
real one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from lock.servers import Request, Server, serving
from trainworks.build.outdated import (
    CHANGE,
    OSV,
    OutdatedReport,
    Update,
    advisory_service,
    check_report,
    days_since,
    ended_framework,
    installed_distributions,
    is_security,
    moved_components,
    moved_distributions,
    published_advisories,
)
from trainworks.engine.protocol import BuiltImage
from trainworks.engine.tree import ImageTree, TreeMember
from trainworks.errors import NotComparedError, OutdatedError
from trainworks.facts.rows import EndOfPatch, Facts, LockedPackage
from trainworks.host.advisories import Advisory
from trainworks.host.settings import read_host_settings
from trainworks.plan.model import IMAGE_TIME
from trainworks.plan.resolve import make_plan
from trainworks.plan.variants import image_named, request_of

SIMULATED = """\
Inst libssl3 [3.0.11-1~deb12u1] \
(3.0.11-1~deb12u2 Debian:12.4/oldstable, Debian-Security:12/oldstable-security [amd64])
Inst base-files [12.4+deb12u4] (12.4+deb12u12 Debian:12.12/oldstable [amd64]) []
Inst libnew (1.0 Debian-Security:12/oldstable-security [all])
Remv libold [2.0]
Conf libssl3 (3.0.11-1~deb12u2 Debian:12.4/oldstable, Debian-Security:12/oldstable-security [amd64])
"""


def test_a_simulated_upgrade_names_packages_versions_and_suites() -> None:
    rows = [(row["name"], row["installed"], row["update"]) for row in CHANGE.finditer(SIMULATED)]
    assert rows == [
        ("libssl3", "3.0.11-1~deb12u1", "3.0.11-1~deb12u2"),
        ("base-files", "12.4+deb12u4", "12.4+deb12u12"),
        ("libnew", None, "1.0"),
    ]
    assert ["-security" in row["suites"] for row in CHANGE.finditer(SIMULATED)] == [
        True,
        False,
        True,
    ]


def test_the_days_since_a_build_are_those_of_its_creation_time() -> None:
    yesterday = datetime.now(UTC) - timedelta(days=1, hours=2)
    assert days_since(f"{yesterday:%Y-%m-%dT%H:%M:%S}.123456789Z") == 1
    assert days_since(f"{yesterday:%Y-%m-%dT%H:%M:%S}Z") == 1
    assert days_since("") is None
    constant = datetime.fromtimestamp(IMAGE_TIME, UTC)
    assert days_since(f"{constant:%Y-%m-%dT%H:%M:%S}Z") is None


def tree_of_files(*files: str, links: dict[str, str] | None = None, **contents: str) -> ImageTree:
    tree = ImageTree()
    for path in (*files, *(links or {})):
        folder = path
        while folder := folder.rpartition("/")[0]:
            tree.members.setdefault(folder, TreeMember(kind="folder", mode=0o755, owner=0))
        target = (links or {}).get(path, "")
        kind = "link" if target else "file"
        tree.members[path] = TreeMember(kind=kind, mode=0o755, owner=0, target=target)
    tree.contents = {
        path: contents["venv"].encode() for path in files if path.endswith("pyvenv.cfg")
    }
    return tree


IMAGE = BuiltImage(
    reference="x",
    identifier="sha256:0",
    size=0,
    labels={},
    environment={"PATH": "/opt/venv/bin:/usr/bin"},
)
VENV = "/opt/venv/lib/python3.11/site-packages"


@pytest.mark.parametrize(
    ("settings", "distributions"),
    [
        ("include-system-site-packages = false\n", {"a": "1.0+cpu", "b-c": "2"}),
        ("include-system-site-packages = true\n", {"a": "1.0+cpu", "b-c": "2", "system": "3"}),
    ],
)
def test_the_distributions_of_the_python_on_path_are_read(
    settings: str, distributions: dict[str, str]
) -> None:
    tree = tree_of_files(
        "/opt/venv/pyvenv.cfg",
        "/usr/bin/python3.11",
        f"{VENV}/a-1.0+cpu.dist-info/METADATA",
        f"{VENV}/b_c-2.dist-info/METADATA",
        f"{VENV}/bad-no\x1bversion.dist-info/METADATA",
        f"{VENV}/deep/inside-1.dist-info/METADATA",
        "/usr/lib/python3/dist-packages/system-3.egg-info",
        "/usr/lib/python3/dist-packages/a-0.1.egg-info",
        "/opt/other/lib/python3.11/site-packages/other-1.dist-info/METADATA",
        links={
            "/opt/venv/bin/python": "python3",
            "/opt/venv/bin/python3": "../../../usr/bin/python3.11",
        },
        venv=settings,
    )
    for path in [path for path in tree.members if path.endswith(".dist-info")]:
        assert tree.kind(path) == "folder"
    assert installed_distributions(tree, IMAGE) == ("3.11", distributions)


def test_an_image_without_python_has_no_distributions() -> None:
    assert installed_distributions(tree_of_files("/usr/bin/sh", venv=""), IMAGE) == ("", {})


# --- other gaps of an image -----------------------------------------------------------------------


def locked(name: str, version: str, *, build: bool = False) -> LockedPackage:
    return LockedPackage(
        name=name, version=version, file=f"{name}.whl", sha256="1" * 64, build=build
    )


def test_installed_distributions_in_another_version_than_the_lock_are_listed() -> None:
    rows = [
        locked("same", "1"),
        locked("older", "2"),
        locked("absent", "3"),
        locked("setuptools", "9", build=True),
    ]
    installed = {"same": "1", "older": "1", "setuptools": "8", "more": "1"}
    assert moved_distributions(installed, rows) == (
        Update(name="older", installed="1", update="2"),
    )


def test_only_suites_of_security_updates_have_security_updates() -> None:
    assert [is_security(row) for row in CHANGE.finditer(SIMULATED)] == [True, False, True]


def test_a_framework_without_patches_is_that_of_the_target_or_of_what_is_installed(
    facts: Facts,
) -> None:
    frameworks_ended = {(end.framework, end.version) for end in facts.ends}
    for row in facts.targets:
        framework = ended_framework(row, {}, facts)
        minor = ".".join(row.version.split(".")[:2])
        assert (framework is not None) == ((row.framework, minor) in frameworks_ended)
    old = ended_framework(None, {"torch": "2.4.1+cu121"}, facts)
    assert old is not None
    assert (old.framework, old.version, old.successor) == ("pytorch", "2.4", "2.5")
    assert ended_framework(None, {"torch": "99.0"}, facts) is None
    assert ended_framework(None, {"numpy": "2.4.1"}, facts) is None


def test_components_of_other_versions_than_todays_rows_are_listed(facts: Facts) -> None:
    named = image_named("pytorch-2.13.0-cpu-py311-debian12", facts)
    assert named is not None
    request = request_of(named.row, named.variant, facts)
    assert request is not None
    versions = {step.component: step.version for step in make_plan(request, facts).steps}
    manifest = {"components": {name: {"version": version} for name, version in versions.items()}}
    assert moved_components(json.dumps(manifest).encode(), named, facts) == ()
    manifest["components"]["open-mpi"] = {"version": "5.0.1"}
    manifest["components"]["gone"] = {"version": "1"}
    (update,) = moved_components(json.dumps(manifest).encode(), named, facts)
    assert update == Update(name="open-mpi", installed="5.0.1", update=versions["open-mpi"])
    assert moved_components(b"[", named, facts) == ()
    assert moved_components(json.dumps(manifest).encode(), None, facts) == ()


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as mine:
        yield mine


class Service:
    """A service with OSV's interface on loopback: the published advisories, and the pages of one
    distribution.
    """

    def __init__(self, server: Server) -> None:
        self.address = server.url
        self.asked: list[dict[str, Any]] = []
        self.published = {
            ("torch", "2.4.1"): ["GHSA-one", "GHSA-gone"],
            ("requests", "2.30.0"): ["PYSEC-two"],
        }
        server.serve("/v1/querybatch", self.batch)
        details: dict[str, dict[str, Any]] = {
            "GHSA-one": {
                "aliases": ["CVE-2025-1", "CVE-2026-2"],
                "summary": "remote  code",
                "affected": [
                    {
                        "package": {"name": "Torch", "ecosystem": "PyPI"},
                        "ranges": [
                            {"type": "GIT", "events": [{"fixed": "abc"}]},
                            {
                                "type": "ECOSYSTEM",
                                "events": [{"introduced": "0"}, {"fixed": "2.6.0"}],
                            },
                            {
                                "type": "ECOSYSTEM",
                                "events": [{"introduced": "0"}, {"fixed": "1.13.1"}],
                            },
                        ],
                    },
                    {
                        "package": {"name": "other"},
                        "ranges": [{"type": "ECOSYSTEM", "events": [{"fixed": "2.5"}]}],
                    },
                ],
            },
            "GHSA-gone": {"withdrawn": "2026-01-01T00:00:00Z"},
            "PYSEC-two": {},
        }
        for number, detail in details.items():
            server.serve(f"/v1/vulns/{number}", json.dumps({"id": number, **detail}).encode())

    def batch(self, request: Request) -> None:
        content = json.loads(request.rfile.read(int(request.headers["Content-Length"])))
        self.asked.append(content)
        results: list[dict[str, Any]] = []
        for query in content["queries"]:
            key = query["package"]["name"], query["version"]
            advisories = self.published.get(key, [])
            # One at a time: the rest is on another page.
            place = int(query.get("page_token", "0"))
            page: dict[str, Any] = (
                {"vulns": [{"id": number} for number in advisories[place : place + 1]]}
                if advisories
                else {}
            )
            if place + 1 < len(advisories):
                page["next_page_token"] = str(place + 1)
            results.append(page)
        answer = json.dumps({"results": results}).encode()
        request.send_response(200)
        request.send_header("Content-Length", str(len(answer)))
        request.end_headers()
        request.wfile.write(answer)


def test_published_advisories_are_asked_by_version_with_their_next_fix(
    server: Server, facts: Facts
) -> None:
    service = Service(server)
    installed = {"torch": "2.4.1+cu121", "requests": "2.30.0", "numpy": "2.0"}
    assert advisory_service(facts, {OSV: f"{service.address}/"}) == service.address
    advisories, unknown = published_advisories(installed, service.address, read_host_settings({}))
    assert unknown == ()
    assert [
        (advisory.name, advisory.identifier, advisory.fixed, advisory.summary)
        for advisory in advisories
    ] == [
        ("requests", "PYSEC-two", "", ""),
        ("torch", "CVE-2025-1", "2.6.0", "remote code"),
    ]
    assert service.asked[0]["queries"][0] == {
        "package": {"name": "numpy", "ecosystem": "PyPI"},
        "version": "2.0",
    }


@pytest.mark.parametrize("answer", [b"[]", b"{}", b"<html>", b'{"results": [1]}'])
def test_an_image_is_not_called_complete_if_the_service_does_not_answer(
    server: Server, answer: bytes
) -> None:
    server.serve("/v1/querybatch", answer)
    for address in (server.url, f"{server.url}/nowhere"):
        advisories, unknown = published_advisories({"torch": "2"}, address, read_host_settings({}))
        assert advisories == ()
        report = OutdatedReport(
            name="one", identity="sha256:1", packages=9, updates=(), unknown=unknown
        )
        with pytest.raises(NotComparedError, match="Python packages were not compared: ") as raised:
            check_report(report, allow_ended=True)
        assert raised.value.exit_status == 20


def test_an_update_that_is_missing_counts_more_than_what_is_not_known() -> None:
    update = Update(name="libssl3", installed="1", update="2")
    report = OutdatedReport(
        name="one", identity="sha256:1", packages=9, updates=(update,), unknown=("not compared",)
    )
    with pytest.raises(OutdatedError, match="libssl3"):
        check_report(report, allow_ended=True)


def test_a_service_that_the_user_switched_off_is_a_line_and_no_failure(facts: Facts) -> None:
    assert advisory_service(facts, {}) == facts.advisories[0].url
    assert advisory_service(facts, {OSV: ""}) == ""
    report = OutdatedReport(
        name="one", identity="sha256:1", packages=9, updates=(), skipped=("none is asked",)
    )
    check_report(report, allow_ended=False)
    assert "\nnone is asked\n" in report.as_text()


def test_what_makes_an_image_one_to_replace() -> None:
    report = OutdatedReport(name="one", identity="sha256:1", packages=9, updates=())
    assert report.missing() == []
    assert report.as_text().startswith("one: no security updates of the distribution missing\n")
    end = EndOfPatch(
        framework="pytorch", version="2.4", date="2024-10-17", source="x", successor="2.5"
    )
    torch, other = (
        Advisory(name=name, installed="1", identifier=f"CVE-{name}")
        for name in ("torch", "requests")
    )
    report = replace(report, ended=end, advisories=(torch, other))
    assert report.missing() == [
        "pytorch 2.4 has had no patches since 2024-10-17, take 2.5 or newer",
        "advisories are published about torch (CVE-torch), requests (CVE-requests)",
    ]
    assert report.missing(allow_ended=True) == [
        "advisories are published about requests (CVE-requests)"
    ]
    first = report.as_text().splitlines()[0]
    assert (
        first
        == "one: no security updates of the distribution missing; pytorch 2.4 has had no patches"
        " since 2024-10-17, take 2.5 or newer; 2 published advisories about Python packages"
    )
    update = Update(name="libssl3", installed="1", update="2")
    assert (
        replace(report, updates=(update,)).missing()[0] == "security updates are missing: libssl3"
    )
