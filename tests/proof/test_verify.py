"""A policy over cosign's output; tests/push/test_cosign.py has the program itself."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from proof.support import ADDRESS, Proven, tiny_proof
from trainworks.attestation.provenance import CYCLONEDX, PROVENANCE
from trainworks.cli import main
from trainworks.errors import OutputError, ProofError
from trainworks.facts.rows import Facts

IMAGE = ADDRESS.rpartition(":")[2]


def line(kind: str, predicate: Mapping[str, Any], image: str = IMAGE) -> str:
    """Return the output of ``cosign verify-attestation`` 2.5 for a statement: its envelope, in one
    line.
    """
    statement = {
        "_type": "https://in-toto.io/Statement/v0.1",
        "predicateType": kind,
        "subject": [{"name": "r.example.org/team/image", "digest": {"sha256": image}}],
        "predicate": predicate,
    }
    return enveloped(json.dumps(statement))


def enveloped(payload: str) -> str:
    content = {
        "payloadType": "application/vnd.in-toto+json",
        "payload": base64.b64encode(payload.encode()).decode(),
        "signatures": [{"keyid": "", "sig": "MEUCIQ"}],
    }
    return json.dumps(content)


@pytest.fixture
def lines(proven: Proven) -> list[str]:
    """Give both statements of the tiny image."""
    documents = proven.documents()
    return [
        line(PROVENANCE, documents["provenance.json"]),
        line(CYCLONEDX, documents["sbom.cdx.json"]),
    ]


@pytest.fixture
def other(proven: Proven) -> str:
    """Give provenance that names another builder."""
    predicate = proven.provenance()
    predicate["runDetails"]["builder"]["id"] = "https://other.example"
    return line(PROVENANCE, predicate)


def check(folder: Path, lines: list[str], *words: str, image: str = ADDRESS) -> int:
    path = folder / "proven.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return main(["verify", image, str(path), *words])


def test_what_a_proof_says(
    lines: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(tmp_path, lines, "--format", "json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "image": ADDRESS,
        "sha256": IMAGE,
        "builder": "https://ci.example/builder",
        "commit": "7" * 40,
        "changed": True,
        "components": 10,
        "cuda": True,
        "evidence": [],
    }


def test_from_stdin_and_from_several_files(
    lines: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        "sys.stdin", io.StringIO("\n".join(["", "Verification for r.example.org", *lines]))
    )
    assert main(["verify", ADDRESS]) == 0
    assert "https://ci.example/builder" in capsys.readouterr().out
    paths = [tmp_path / "one", tmp_path / "two"]
    for path, text in zip(paths, lines, strict=True):
        path.write_text(text, encoding="utf-8")
    assert main(["verify", f"sha256:{IMAGE}", *map(str, paths)]) == 0


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--builder", "https://ci.example/builder", "--commit", "7" * 40], ""),
        (["--commit", "7777777"], ""),
        (
            ["--builder", "https://ci.example"],
            "the builder is https://ci.example/builder, not https://ci.example",
        ),
        (["--commit", "1234567"], "built from the commit 7777"),
        (["--unchanged"], "built from a checkout with changes that are in no commit"),
    ],
)
def test_a_policy_is_demanded(
    lines: list[str],
    words: list[str],
    problem: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert check(tmp_path, lines, *words) == (ProofError.exit_status if problem else 0)
    assert problem in capsys.readouterr().err


def test_one_of_several_proofs_that_holds_is_enough(
    lines: list[str], other: str, tmp_path: Path
) -> None:
    """Accept a corrected builder, a second party: an attachment cannot be removed in many
    registries.
    """
    both = [other, *lines, line("https://tests.example/result", {}), line(PROVENANCE, {}, "b" * 64)]
    for builder in ("https://ci.example/builder", "https://other.example"):
        assert check(tmp_path, both, "--builder", builder) == 0
    assert check(tmp_path, both, "--builder", "https://third.example") == ProofError.exit_status


def test_documents_of_another_image_that_were_signed_for_this_one(
    lines: list[str], facts: Facts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sign with a wrong variable in CI: cosign signs any document for any image."""

    def message_of(*documents: str) -> str:
        assert check(tmp_path, list(documents)) == ProofError.exit_status
        return capsys.readouterr().err

    other = tiny_proof(
        facts, tmp_path / "other", f"r.example.org/team/image@sha256:{'b' * 64}"
    ).documents()
    materials = line(CYCLONEDX, other["sbom.cdx.json"])
    assert f"the bill of materials is about another image: sha256:{'b' * 64}" in message_of(
        line(PROVENANCE, other["provenance.json"]), materials
    )
    assert "the bill of materials is about another image" in message_of(lines[0], materials)
    assert "the provenance is of another bill of materials" in message_of(
        line(PROVENANCE, other["provenance.json"]), lines[1]
    )
    nowhere = tiny_proof(facts, tmp_path / "nowhere", "").documents()
    assert "write it with `prove --pushed ADDRESS`" in message_of(
        lines[0], line(CYCLONEDX, nowhere["sbom.cdx.json"])
    )
    # Those of both images side by side: the ones of this image are found.
    assert check(tmp_path, [materials, *lines, line(PROVENANCE, other["provenance.json"])]) == 0


def test_a_bill_of_materials_that_was_edited(
    lines: list[str], proven: Proven, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edited = proven.documents()["sbom.cdx.json"]
    del edited["components"][0]
    assert check(tmp_path, [lines[0], line(CYCLONEDX, edited)]) == ProofError.exit_status
    assert "its serial number does not follow from its content" in capsys.readouterr().err


def test_what_is_missing_is_named_with_cosigns_type(
    lines: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(tmp_path, lines[:1]) == ProofError.exit_status
    assert (
        "no statement of the type https://cyclonedx.org/bom"
        " (cosign verify-attestation --type cyclonedx)" in (capsys.readouterr().err)
    )
    assert check(tmp_path, []) == ProofError.exit_status
    assert check(tmp_path, lines, image=f"sha256:{'b' * 64}") == ProofError.exit_status
    assert (
        f"it is about another image: sha256:{'a' * 64}, not sha256:{'b' * 64}"
        in capsys.readouterr().err
    )


def test_what_does_not_say_that_nothing_was_changed_says_that_it_was(
    lines: list[str], proven: Proven, tmp_path: Path
) -> None:
    predicate = proven.provenance()
    inputs = predicate["buildDefinition"]["resolvedDependencies"]
    next(input_row for input_row in inputs if input_row["name"] == "checkout")["annotations"][
        "changed"
    ] = 0
    assert check(tmp_path, [line(PROVENANCE, predicate), lines[1]]) == 0
    assert (
        check(tmp_path, [line(PROVENANCE, predicate), lines[1]], "--unchanged")
        == ProofError.exit_status
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "line 3: not an envelope"),
        ("{" * 100_000, "line 3: not an envelope"),
        ('{"a":' * 100_000, "line 3: not an envelope"),
        ('{"payload": "?"}', "line 3: not an envelope"),
        ('{"payload": 5}', "line 3: not an envelope"),
        (enveloped("[" * 100_000), "line 3: not an envelope"),
    ],
    ids=["empty", "open", "deep", "not base64", "a number", "deep payload"],
)
def test_what_cosign_does_not_print_is_refused(
    lines: list[str], text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(tmp_path, [*lines, text]) == ProofError.exit_status
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("predicate", [{}, {"buildDefinition": {"resolvedDependencies": [5]}}, []])
def test_provenance_of_another_form_is_refused(
    lines: list[str], predicate: Any, tmp_path: Path
) -> None:
    assert check(tmp_path, [line(PROVENANCE, predicate), lines[1]]) == ProofError.exit_status


def test_wrong_words_and_files(
    lines: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(tmp_path, lines, image="r.example.org/team/image:1") == 2
    assert "name the image by its digest" in capsys.readouterr().err
    assert check(tmp_path, lines, "--commit", "7") == 2
    absent = tmp_path / "absent"
    assert main(["verify", ADDRESS, str(absent)]) == OutputError.exit_status
    assert f"cannot read cosign's output: {absent}: No such file" in capsys.readouterr().err
    (tmp_path / "binary").write_bytes(b"\xff")
    assert main(["verify", ADDRESS, str(tmp_path / "binary")]) == ProofError.exit_status
    assert "cannot read cosign's output" in capsys.readouterr().err
