"""``build.py vulnerabilities`` on bills of materials: what it prints, its documents, and how it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.model.bom import Bom

from proof.support import cyclonedx_problems
from trainworks.cli import main
from trainworks.cli.looking import read_bill, split_reference
from trainworks.errors import OutputError
from trainworks.facts.rows import Facts
from vulnerabilities.support import PACKAGES, REAL, advisory, affected, bill, written, zipped

Call = Callable[..., subprocess.CompletedProcess[str]]
TIME = "1795219200"
"""2026-11-21."""

IGNORE = """
[[ignore]]
id = "PYSEC-2023-74"
package = "requests"
reason = "no proxy with a password here"
until = 2026-12-31
state = "not_affected"
justification = "requires_environment"

[[ignore]]
id = "CVE-2023-5363"
package = "openssl"
reason = "until the base image is new"
until = 2026-11-20

[[ignore]]
id = "CVE-2000-0001"
package = "torch"
reason = "a slip of the pen"
until = 2026-12-31
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Give a folder with a bill of materials, a database, and rows to ignore."""
    written(tmp_path / "sbom.cdx.json", bill(PACKAGES))
    odd = advisory("GHSA-odd", affected("PyPI", "torch", "introduced=first"))
    (tmp_path / "all.zip").write_bytes(zipped([*REAL, odd]))
    (tmp_path / "ignore.toml").write_text(IGNORE, encoding="utf-8")
    return tmp_path


@pytest.fixture
def call(folder: Path, root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """Give the command with the folder's database and without an archive, in this process."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", TIME)

    def call_main(*words: str, image: str = "sbom.cdx.json") -> subprocess.CompletedProcess[str]:
        known = ("vulnerabilities", str(folder / image), "--database", str(folder / "all.zip"), "--no-archive")
        status = main([*known, *words], root)
        output, errors = capsys.readouterr()
        return subprocess.CompletedProcess(words, status, output, errors)

    return call_main


def test_the_report_for_people(call: Call, folder: Path, golden: Callable[[str, str], None]) -> None:
    done = call("--ignore", str(folder / "ignore.toml"))
    assert (done.returncode, done.stderr) == (0, "")
    golden("vulnerabilities/report.txt", done.stdout)


def test_the_report_for_programs(call: Call, folder: Path) -> None:
    content = json.loads(call("--format", "json", "--ignore", str(folder / "ignore.toml")).stdout)
    assert (content["name"], content["time"]) == ("an/image:1", "2026-11-21T00:00:00+00:00")
    assert content["counts"] == {"critical": 1, "unknown": 1}
    (torch, openssl), (requests,) = content["findings"], content["ignored"]
    assert (torch["id"], torch["score"], torch["fixed"]) == ("CVE-2025-32434", 9.3, "2.6.0")
    assert torch["url"] == "https://osv.dev/vulnerability/CVE-2025-32434"
    assert [each["name"] for each in openssl["installed"]] == ["libssl3", "openssl"]
    assert openssl["url"] == "https://security-tracker.debian.org/tracker/CVE-2023-5363"
    assert (requests["until"], requests["state"]) == ("2026-12-31", "not_affected")
    assert [each["id"] for each in (*content["expired"], *content["unused"])] == ["CVE-2023-5363", "CVE-2000-0001"]
    assert content["not_compared"] == {"generic": ["open-mpi 4.1.7"]}
    assert content["unreadable"] == ["GHSA-odd: torch 2.5.1+cpu: Invalid version: 'first'"]
    assert {each["ecosystem"]: each["packages"] for each in content["compared"]} == {"Debian:12": 2, "PyPI": 2}


@pytest.mark.parametrize("serial", [{}, {"serialNumber": ""}], ids=["links", "components"])
def test_the_vex_is_valid_and_refers_to_the_bill_of_materials(serial: dict[str, str], call: Call, folder: Path) -> None:
    written(folder / "sbom.cdx.json", bill(PACKAGES, **serial))
    text = call("--format", "cyclonedx", "--ignore", str(folder / "ignore.toml")).stdout
    assert cyclonedx_problems(text) is None
    document: dict[str, Any] = json.loads(text)
    rows = {each["id"]: each for each in document["vulnerabilities"]}
    states = {name: row["analysis"]["state"] for name, row in rows.items()}
    assert states == {"CVE-2025-32434": "in_triage", "CVE-2023-5363": "in_triage", "CVE-2023-32681": "not_affected"}
    assert rows["CVE-2023-32681"]["analysis"]["justification"] == "requires_environment"
    (rating,) = rows["CVE-2025-32434"]["ratings"]
    assert (rating["score"], rating["severity"], rating["method"]) == (9.3, "critical", "CVSSv4")
    references = [each["ref"] for each in rows["CVE-2023-5363"]["affects"]]
    if serial:
        assert {each["bom-ref"] for each in document["components"]} == set(PACKAGES[:4])
        assert references == list(PACKAGES[2:4])
        # CycloneDX's own library reads it too.
        read = Bom.from_json(document)  # type: ignore[attr-defined]
        assert {each.id for each in read.vulnerabilities} == set(rows)
    else:
        assert "components" not in document
        assert references[0].startswith(
            "urn:cdx:3e671687-395b-41f5-a30f-a58921a69b79/1#pkg%3Adeb%2Fdebian%2Flibssl3%40"
        )
    assert text == call("--format", "cyclonedx", "--ignore", str(folder / "ignore.toml")).stdout


@pytest.mark.parametrize("level", ["critical", "unknown"])
def test_a_gate(level: str, call: Call) -> None:
    done = call("--fail-on", level)
    assert done.returncode == 18
    assert f"of level {level} or worse" in done.stderr
    assert done.stdout.startswith("an/image:1: 3 vulnerabilities in 3 packages: 1 critical, 1 medium, 1 unknown\n")


def test_a_gate_lets_pass_what_is_less(call: Call, folder: Path) -> None:
    written(folder / "sbom.cdx.json", bill([PACKAGES[1]]))
    assert call("--fail-on", "high").returncode == 0
    assert call("--fail-on", "medium").returncode == 18


def test_a_gate_is_not_passed_by_what_nobody_looked_at(call: Call, folder: Path) -> None:
    (folder / "all.zip").write_bytes(zipped(REAL[3:]))
    written(folder / "sbom.cdx.json", bill([PACKAGES[0], PACKAGES[2].replace("deb12u1", "deb12u2")]))
    done = call("--fail-on", "critical")
    assert done.returncode == 18
    assert "packages of PyPI were compared with nothing" in done.stderr
    assert "  PyPI, 1 package: with nothing\n    no database that was read has an advisory about" in done.stdout
    assert call().returncode == 0


def test_nothing_found_is_not_said_where_nothing_was_compared(call: Call, folder: Path) -> None:
    (folder / "all.zip").write_bytes(zipped([advisory("A", affected("npm", "a", "introduced=0"))]))
    assert call().stdout.startswith("an/image:1: nothing was compared\n")


def test_the_report_goes_to_a_file(call: Call, folder: Path) -> None:
    done = call("--output", str(folder / "report.json"), "--format", "json")
    assert json.loads(done.stdout) == {"file": str(folder / "report.json")}
    assert len(json.loads((folder / "report.json").read_text(encoding="utf-8"))["findings"]) == 3


def test_our_own_bill_of_materials_names_components(call: Call, root: Path, folder: Path) -> None:
    content = json.loads((root / "tests/golden/proof/sbom.cdx.json").read_text(encoding="utf-8"))
    content["metadata"]["component"]["version"] = "2.13.0-cpu-py311-debian12"
    written(folder / "sbom.cdx.json", content)
    advisories = (
        advisory("A", affected("PyPI", "torch", "introduced=0")),
        advisory("B", affected("Debian:12", "openssl", "introduced=0", "fixed=99")),
    )
    (folder / "all.zip").write_bytes(zipped(advisories))
    text = call().stdout
    assert "\n\ntorch\n  unknown       A  torch 2.13.0+cpu, no fix yet" in text
    assert "\n\nsystem\n  unknown       B  openssl 3.0.17-1~deb12u2 (libssl3), fixed in 99" in text
    assert "remove the base image trainworks/base:bookworm-" in text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "it is no bill of materials in CycloneDX's JSON"),
        ("[]", "it is no bill of materials in CycloneDX's JSON"),
        ('{"bomFormat": "SPDX"}', "it is no CycloneDX document but 'SPDX'"),
        ('{"bomFormat": "CycloneDX"}', "it lists no package with a package URL"),
        ('{"bomFormat": "CycloneDX", "components": [{"purl": "torch"}]}', "it is no bill of materials"),
    ],
)
def test_what_is_no_bill_of_materials(content: str, words: str, facts: Facts, tmp_path: Path) -> None:
    path = tmp_path / "sbom.cdx.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(OutputError, match=words):
        read_bill(path, facts)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--ignore", "nowhere.toml"), "nowhere.toml: No such file"),
        (("--database", "nowhere"), "--database nowhere: no such file or folder"),
        (("--attach", "r.example.org/a@sha256:" + "0" * 64), "--attach is for an image that the engine has"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_printed(words: tuple[str, ...], said: str, call: Call) -> None:
    done = call(*words)
    assert (done.returncode, done.stdout) == (9, "")
    assert said in done.stderr


def test_a_file_that_is_not_there_is_no_image(call: Call) -> None:
    done = call(image="none.json")
    assert done.returncode == 9
    assert "none.json: no such file" in done.stderr


def test_a_real_process_without_a_network_says_what_was_not_compared(root: Path, folder: Path) -> None:
    # A proxy that nobody answers at stands for a network that is not there.
    away = {"HTTPS_PROXY": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9", "NO_PROXY": "", "no_proxy": ""}
    environment = {**os.environ, **away, "XDG_CACHE_HOME": str(folder / "cache"), "PIP_CONFIG_FILE": os.devnull}
    command = (sys.executable, str(root / "build.py"), "vulnerabilities", str(folder / "sbom.cdx.json"), "--no-archive")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0
    assert done.stdout.startswith("an/image:1: nothing was compared\n")
    assert "    not with cannot download https://osv-vulnerabilities.storage.googleapis.com/PyPI/all.zip" in done.stdout
    assert "--database FILE" in done.stdout


@pytest.mark.parametrize(
    ("reference", "parts"),
    [
        ("a/b:1", ("a/b", "1")),
        ("r.example.org:5000/a/b", ("r.example.org:5000/a/b", "latest")),
        ("r.example.org:5000/a/b:1", ("r.example.org:5000/a/b", "1")),
        ("sha256:0123", ("sha256:0123", "")),
        ("a/b@sha256:0123", ("a/b@sha256:0123", "")),
    ],
)
def test_names_and_tags(reference: str, parts: tuple[str, str]) -> None:
    assert split_reference(reference) == parts
