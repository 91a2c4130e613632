"""Test records of test runs: the output of `tools/evidence.py`, the statement of one, and the
refused ones.
"""

from __future__ import annotations

import copy
import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from documentation.blocks import Block
from proof.support import ADDRESS, tiny_proof
from proof.test_verify import IMAGE, check, line
from trainworks.attestation.cyclonedx import serial_number
from trainworks.attestation.evidence import (
    EVIDENCE,
    GPU_PARTS,
    compute_digest,
    make_statement,
    read_record,
)
from trainworks.attestation.provenance import CYCLONEDX, PROVENANCE
from trainworks.errors import ProofError
from trainworks.facts.rows import Facts
from trainworks.plan.resolve import plan_row
from trainworks.render.dockerfile import render

MANIFEST = "d" * 64
STEPS = (
    "two tests: {python} -m pytest -q --junitxml=$JUNIT -p no:cacheprovider test_toy.py",
    "words: test -f test_toy.py",
    "never: touch never",
)


@pytest.fixture
def checkout(root: Path, tmp_path: Path) -> Path:
    """Give a git repository with the program and a test."""
    folder = tmp_path / "checkout"
    (folder / "tools").mkdir(parents=True)
    shutil.copy(root / "tools" / "evidence.py", folder / "tools" / "evidence.py")
    (folder / "test_toy.py").write_text("def test_a(): ...\ndef test_b(): ...\n", encoding="utf-8")
    (folder / ".gitignore").write_text("__pycache__/\n", encoding="utf-8")
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    for words in (
        ("init", "-q", "--initial-branch=main"),
        ("add", "."),
        (*who, "commit", "-qm", "One"),
    ):
        subprocess.run(("git", *words), cwd=folder, check=True)
    return folder


PROGRAMS = ("cat", "cp", "cut", "git", "grep", "sh", "touch")
"""What the runs of these tests need. The engines of this machine are not among them."""


def run_suite(checkout: Path, *steps: str) -> tuple[int, Path]:
    """Run a suite of these steps, without engines other than those in the folder `engines` beside
    the checkout; return its exit status and the path of its record.
    """
    programs = checkout.with_name("programs")
    programs.mkdir(exist_ok=True)
    for name in PROGRAMS:
        program = shutil.which(name)
        assert program, f"{name} is not installed"
        if not (programs / name).exists():
            (programs / name).symlink_to(program)
    words = ("run", "make toys", *(step.format(python=sys.executable) for step in steps))
    path = f"{checkout.with_name('engines')}:{programs}"
    status, printed = evidence_tool(checkout, *words, path=path)
    records = list(checkout.glob("evidence/*-make-toys.json"))
    assert len(records) == 1, printed
    return status, records[0]


def recorded(checkout: Path, *steps: str) -> tuple[int, dict[str, Any]]:
    status, path = run_suite(checkout, *steps)
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    path.unlink()
    return status, record


def test_a_run_is_recorded_with_its_commit_and_its_tests(checkout: Path) -> None:
    status, record = recorded(checkout, *STEPS[:2])
    commit = subprocess.run(
        ("git", "rev-parse", "HEAD"), cwd=checkout, capture_output=True, text=True, check=True
    ).stdout
    assert (status, record["commit"], record["changed"]) == (0, commit.strip(), False)
    first, second = record["parts"]
    assert (first["name"], first["result"]) == ("two tests", "passed")
    assert first["tests"] == {"passed": 2, "failed": 0, "skipped": 0}
    assert (second["name"], second["result"]) == ("words", "passed")
    assert first["files"]["test_toy"].items() >= {"passed": 2, "failed": 0, "skipped": 0}.items()
    assert record["where"].keys() == {
        "cpu",
        "cores",
        "memory_gib",
        "system",
        "kernel",
        "python",
        "engine",
    }
    assert record["digest"] == compute_digest(record)


def test_a_failure_ends_the_run_and_is_recorded_with_its_name(checkout: Path) -> None:
    with (checkout / "test_toy.py").open("a", encoding="utf-8") as file:
        file.write("def test_c(): assert False\n")
    status, record = recorded(checkout, *STEPS)
    (part,) = record["parts"]
    assert (status, part["result"], part["failures"], record["changed"]) == (
        1,
        "failed",
        ["test_toy.test_c"],
        True,
    )
    assert not (checkout / "never").exists()


TOYS = """
def test_a(record_property):
    record_property("a.png", "sha256:12")

def test_b(): ...
"""


def test_the_list_of_all_tests_lies_beside_the_record(checkout: Path) -> None:
    (checkout / "test_toy.py").write_text(TOYS, encoding="utf-8")
    _, path = run_suite(checkout, *STEPS[:2])
    record = json.loads(path.read_text(encoding="utf-8"))
    tests = path.with_suffix(".tests.gz")
    packed = tests.read_bytes()
    assert record["tests"] == f"sha256:{hashlib.sha256(packed).hexdigest()}"
    lines = gzip.decompress(packed).decode().splitlines()
    assert lines[0] == "# two tests"
    assert [re.sub(r"\t[0-9]+\.[0-9]{2}\t", " ", line) for line in lines[1:]] == [
        "passed test_toy.test_a",
        "passed test_toy.test_b",
    ]
    # The same list is the same bytes: the head has neither a time nor a name.
    assert packed == gzip.compress(gzip.decompress(packed), mtime=0)
    assert record["parts"][0]["properties"] == {"a.png": "sha256:12"}


@pytest.mark.parametrize("fault", ["changed", "missing"])
def test_a_list_that_is_not_the_records_is_refused(checkout: Path, fault: str) -> None:
    _, path = run_suite(checkout, STEPS[0])
    assert evidence_tool(checkout, "verify") == (0, f"{path.name}: unsigned\n")
    tests = path.with_suffix(".tests.gz")
    message = f"{path.name}: its list of tests is missing: {tests.name}\n"
    if fault == "changed":
        text = gzip.decompress(tests.read_bytes()).replace(b"test_b", b"test_c")
        tests.write_bytes(gzip.compress(text, mtime=0))
        message = f"{path.name}: its list of tests was changed: {tests.name}\n"
    else:
        tests.unlink()
    assert evidence_tool(checkout, "verify") == (1, message)


def test_a_run_without_tests_has_no_list(checkout: Path) -> None:
    _, path = run_suite(checkout, STEPS[1])
    assert "tests" not in json.loads(path.read_text(encoding="utf-8"))
    assert list(path.parent.iterdir()) == [path]


DOCKER = """\
#!/bin/sh
# Stands in for docker: its images are those of a file, as `docker image inspect` prints them.
case "$1 $2" in
"image ls") grep -o '"Id": "[^"]*"' {file} | cut -d '"' -f 4 ;;
"image inspect") cat {file} ;;
esac
"""

BUILDAH = """\
#!/bin/sh
# Stands in for buildah, which has one image as soon as there is a file.
[ -e {file} ] || {{ echo '[]'; exit; }}
case "$1" in
images) echo '[{{"id": "{id}", "names": ["localhost/trainworks/a:1", "localhost/other:1"]}}]' ;;
inspect) echo '{{"OCIv1": {{"config": {{"Labels": {{"trainworks.inputs": "sha256:5"}}}}}}}}' ;;
esac
"""

CPU_NAME = "pytorch-2.13.0-cpu-py311-debian12"
CPU_IMAGE = "trainworks/pytorch-training:2.13.0-cpu-py311-debian12"


def image_of(name: str, number: int, inputs: str, *digests: str) -> dict[str, Any]:
    """Return an image as Docker describes it."""
    return {
        "Id": f"sha256:{number:064x}",
        "RepoTags": [name],
        "RepoDigests": [f"localhost:5000/team/image@{digest}" for digest in digests],
        "Config": {"Labels": {"trainworks.inputs": inputs}},
    }


@pytest.fixture
def with_builder(checkout: Path, root: Path) -> Path:
    """Give the checkout with the builder of this one."""
    (checkout / ".venv").symlink_to(sys.prefix)
    (checkout / "tools" / "image_inputs.py").symlink_to(root / "tools" / "image_inputs.py")
    return checkout


def test_a_record_has_the_images_that_the_run_built_or_used(
    with_builder: Path, facts: Facts
) -> None:
    """Docker has an image of this checkout, one of another checkout, and one that is built anew;
    buildah builds one.
    """
    engines = with_builder.with_name("engines")
    engines.mkdir()
    stand_ins = {
        "docker": DOCKER.format(file=engines / "images.json"),
        "buildah": BUILDAH.format(file=engines / "built", id="7" * 64),
    }
    for name, text in stand_ins.items():
        (engines / name).write_text(text, encoding="utf-8")
        (engines / name).chmod(0o755)
    (row,) = (row for row in facts.targets if facts.name_of(row) == CPU_NAME)
    of_today = render(plan_row(row, facts), facts).digest
    used = image_of(CPU_IMAGE, 1, of_today, f"sha256:{'d' * 64}")
    left_over = image_of("trainworks/tensorflow-training:old", 2, "sha256:0")
    before = [used, left_over, image_of("trainworks/x:1", 3, "sha256:0")]
    after = [used, left_over, image_of("trainworks/x:1", 4, "sha256:1"), image_of("mine:1", 5, "")]
    for name, images in (("images.json", before), ("after.json", after)):
        (engines / name).write_text(json.dumps(images), encoding="utf-8")
    build = f"build: cp {engines}/after.json {engines}/images.json && touch {engines}/built"
    _, path = run_suite(with_builder, build)
    record = json.loads(path.read_text(encoding="utf-8"))
    by_buildah = f"sha256:{'7' * 64}"
    found = {"name": CPU_IMAGE, "engine": "docker", "id": used["Id"], "built": False}
    assert record["images"] == [
        {"name": "trainworks/a:1", "engine": "buildah", "id": by_buildah, "built": True},
        {**found, "digests": [f"sha256:{'d' * 64}"]},
        {"name": "trainworks/x:1", "engine": "docker", "id": after[2]["Id"], "built": True},
    ]


def test_records_of_builds_do_not_make_a_checkout_changed(checkout: Path) -> None:
    """A run of all targets writes images/built.toml, and its page."""
    for name in ("images/built.toml", "docs/tables/images.md"):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
    step = "records: echo >> images/built.toml; echo >> docs/tables/images.md"
    assert recorded(checkout, step)[1]["changed"] is False
    assert recorded(checkout, "a row: echo >> images/pytorch.toml")[1]["changed"] is True


def evidence_tool(checkout: Path, *words: str, path: str = os.environ["PATH"]) -> tuple[int, str]:
    done = subprocess.run(
        (sys.executable, "tools/evidence.py", *words),
        cwd=checkout,
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("words", [("verify",), ("sign", "evidence/record.json", "--key", "key")])
def test_a_machine_without_ssh_keygen_gets_one_line(
    checkout: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    status, printed = evidence_tool(checkout, *words, path=str(tmp_path))
    assert (status, printed) == (1, "there is no ssh-keygen here; install OpenSSH's client\n")


def test_a_record_is_signed_by_its_writers_key(checkout: Path) -> None:
    """Unsigned, signed, changed after the signature, signed by a key that is not in the list."""
    folder = checkout / "evidence"
    folder.mkdir()
    record = folder / "record.json"
    record.write_text(json.dumps(gpu_record()), encoding="utf-8")
    assert evidence_tool(checkout, "verify") == (0, "record.json: unsigned\n")
    key = checkout / "key"
    subprocess.run(("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key), check=True)
    public = key.with_suffix(".pub").read_text(encoding="utf-8")
    signers = folder / "allowed_signers"
    signers.write_text(f"ada@example.org {public}", encoding="utf-8")
    status, printed = evidence_tool(checkout, "sign", "evidence/record.json", "--key", "key")
    assert status == 0, printed
    assert evidence_tool(checkout, "verify") == (0, "record.json: signed by ada@example.org\n")

    forged = gpu_record() | {"date": "2027-01-01"}
    record.write_text(json.dumps(forged | {"digest": compute_digest(forged)}), encoding="utf-8")
    changed = "record.json: changed after ada@example.org signed it\n"
    assert evidence_tool(checkout, "verify") == (1, changed)
    record.write_text(json.dumps(forged), encoding="utf-8")
    edited = "record.json: changed: its digest does not fit\n"
    assert evidence_tool(checkout, "verify") == (1, edited)

    record.write_text(json.dumps(gpu_record()), encoding="utf-8")
    signers.write_text("", encoding="utf-8")
    status, printed = evidence_tool(checkout, "verify")
    assert status == 1
    assert "signed by a key that is not in" in printed


def test_the_page_signs_a_record_with_a_new_key(
    checkout: Path, page_blocks: list[Block], tmp_path: Path
) -> None:
    folder = checkout / "evidence"
    folder.mkdir()
    (folder / "one.json").write_text(json.dumps(gpu_record()), encoding="utf-8")
    (folder / "two.json").write_text(json.dumps(gpu_record()), encoding="utf-8")
    subprocess.run(("git", "config", "user.email", "ada@example.org"), cwd=checkout, check=True)
    (tmp_path / ".ssh").mkdir()
    (block,) = page_blocks
    done = subprocess.run(
        ("bash", "-euc", block.adapted(record="one")),
        cwd=checkout,
        env={**os.environ, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    expected = "one.json: signed by ada@example.org\ntwo.json: unsigned\n"
    assert done.stdout.endswith(expected)


def gpu_record() -> dict[str, Any]:
    """Return a record as `make gpu` leaves it on a machine with a GPU."""
    record: dict[str, Any] = {
        "schema": 1,
        "suite": "make gpu",
        "date": "2026-11-26",
        "commit": "7" * 40,
        "changed": False,
        "image": f"sha256:{MANIFEST}",
        "where": {
            "cpu": "a CPU",
            "cores": 8,
            "engine": "",
            "gpus": ["NVIDIA H100 80GB HBM3"],
            "driver": "580.65.06",
        },
        "parts": [
            *({"name": name, "result": "passed", "cause": "", "seconds": 20} for name in GPU_PARTS),
            {"name": "plugin", "result": "not tested", "cause": "no archive", "seconds": 0},
        ],
        "seconds": 20,
    }
    return record | {"digest": compute_digest(record)}


@pytest.fixture
def lines(facts: Facts, tmp_path: Path) -> list[str]:
    """Give both statements that each image has."""
    documents = tiny_proof(facts, tmp_path / "tiny").documents()
    inputs = documents["provenance.json"]["buildDefinition"]["resolvedDependencies"]
    next(input_row for input_row in inputs if input_row["name"] == "checkout")["annotations"][
        "changed"
    ] = False
    return [
        line(PROVENANCE, documents["provenance.json"]),
        line(CYCLONEDX, documents["sbom.cdx.json"]),
    ]


def statement(record: dict[str, Any]) -> dict[str, Any]:
    return dict(make_statement(record, MANIFEST, ADDRESS))


def test_a_statement_is_found_by_the_name_of_its_gpu(
    lines: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evidence = line(EVIDENCE, statement(gpu_record()))
    assert check(tmp_path, [*lines, evidence], "--gpu", "h100") == 0
    assert (
        "NVIDIA H100 80GB HBM3, driver 580.65.06: 7 passed, 0 failed, 1 not tested"
        in capsys.readouterr().out
    )
    assert check(tmp_path, [*lines, evidence], "--gpu", "H200") == ProofError.exit_status
    assert "make gpu ran on NVIDIA H100 80GB HBM3, not on H200" in capsys.readouterr().err
    assert check(tmp_path, lines, "--gpu", "H100") == ProofError.exit_status
    assert f"cosign verify-attestation --type {EVIDENCE}" in capsys.readouterr().err
    assert check(tmp_path, lines) == 0


def test_each_part_of_the_minimum_has_to_be_tested(
    lines: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Read a record of `run.py --only launcher`: the passed tests are true, and show next to
    nothing.
    """
    record = gpu_record()
    record["parts"] = [part for part in record["parts"] if part["name"] in ("launcher", "plugin")]
    evidence = line(EVIDENCE, statement(record | {"digest": compute_digest(record)}))
    assert check(tmp_path, [*lines, evidence], "--gpu", "H100") == ProofError.exit_status
    assert (
        "not tested, and demanded: communication, compiled, data_parallel"
        in capsys.readouterr().err
    )
    assert check(tmp_path, [*lines, evidence], "--gpu", "H100", "--part", "launcher") == 0
    assert (
        check(tmp_path, [*lines, evidence], "--gpu", "H100", "--part", "plugin")
        == ProofError.exit_status
    )


def test_an_image_without_cuda_shows_nothing_of_a_gpu(
    facts: Facts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    documents = tiny_proof(facts, tmp_path / "tiny").documents()
    bill = documents["sbom.cdx.json"]
    bill["components"] = [
        component for component in bill["components"] if "cuda" not in component["name"]
    ]
    before, bill["serialNumber"] = bill["serialNumber"], serial_number(bill)
    text = json.dumps(documents["provenance.json"]).replace(before, bill["serialNumber"])
    evidence = line(EVIDENCE, statement(gpu_record()))
    proven = [line(PROVENANCE, json.loads(text)), line(CYCLONEDX, bill), evidence]
    assert check(tmp_path, proven) == 0
    assert check(tmp_path, proven, "--gpu", "H100") == ProofError.exit_status
    assert "the image has no CUDA" in capsys.readouterr().err


def test_the_minimum_is_what_the_page_of_the_suite_says() -> None:
    folder = Path(__file__).parents[1] / "gpu"
    page = (folder / "README.md").read_text(encoding="utf-8")
    paragraph = next(
        part for part in page.split("\n\n") if "`build.py verify --gpu NAME` demands" in part
    )
    assert re.findall(r"`([a-z_]+)`", paragraph) == list(GPU_PARTS)
    assert all((folder / f"{part}.py").is_file() for part in GPU_PARTS)


def at(*path: str | int, value: Any) -> Callable[[dict[str, Any]], None]:
    """Return a function that sets a value inside a predicate."""

    def change(predicate: dict[str, Any]) -> None:
        place: Any = predicate
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value

    return change


def written_again(*path: str | int, value: Any) -> Callable[[dict[str, Any]], None]:
    """Return a function that sets a value inside the record, with the digest that follows: another
    run, not an edit.
    """

    def change(predicate: dict[str, Any]) -> None:
        at("record", *path, value=value)(predicate)
        predicate["record"]["digest"] = compute_digest(predicate["record"])

    return change


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(
            at("record", "where", "gpus", value=["NVIDIA H100", "NVIDIA H100"]), id="more GPUs"
        ),
        pytest.param(at("record", "where", "driver", value="999"), id="the driver"),
        pytest.param(at("record", "commit", value="8" * 40), id="the commit"),
        pytest.param(at("record", "changed", value=True), id="the checkout"),
        pytest.param(at("record", "date", value="2027-01-01"), id="the date"),
        pytest.param(at("record", "suite", value="make test-all"), id="the suite"),
        pytest.param(at("record", "seconds", value=1), id="how long"),
        pytest.param(
            at("record", "parts", -1, "result", value="passed"), id="a part that was not tested"
        ),
        pytest.param(at("record", "parts", 0, "cause", value="none"), id="a cause"),
        pytest.param(at("record", "parts", value=[]), id="no part"),
        pytest.param(at("record", "digest", value=f"sha256:{'0' * 64}"), id="the digest"),
        pytest.param(at("record", "digest", value=5), id="a digest that is a number"),
        pytest.param(at("record", "more", value="words"), id="one more key"),
        pytest.param(at("record", value=None), id="no record"),
        pytest.param(at("record", value=[]), id="a list"),
        pytest.param(at("image", value=f"sha256:{'b' * 64}"), id="another image"),
        pytest.param(at("image", value=IMAGE), id="an image without its algorithm"),
        pytest.param(written_again("parts", 0, "result", value="failed"), id="a run that failed"),
        pytest.param(
            written_again("parts", 0, "result", value="fine"), id="a result that nothing writes"
        ),
        pytest.param(written_again("parts", value=[]), id="a run of nothing"),
        pytest.param(written_again("where", "gpus", value=[]), id="a run without a GPU"),
        pytest.param(
            written_again("where", "gpus", value=["NVIDIA A10G"]), id="a run on another GPU"
        ),
        pytest.param(written_again("changed", value=True), id="a run of a changed checkout"),
        pytest.param(written_again("schema", value=2), id="another schema"),
        pytest.param(written_again("where", value=None), id="a run nowhere"),
    ],
)
def test_what_was_changed_or_does_not_fit_is_refused(
    change: Callable[[dict[str, Any]], None], lines: list[str], tmp_path: Path
) -> None:
    predicate = copy.deepcopy(statement(gpu_record()))
    change(predicate)
    policy = ("--gpu", "H100", "--unchanged")
    changed, good = line(EVIDENCE, predicate), line(EVIDENCE, statement(gpu_record()))
    assert check(tmp_path, [*lines, changed], *policy) == ProofError.exit_status
    # Beside a good statement a bad one takes nothing away.
    assert check(tmp_path, [*lines, changed, good], *policy) == 0


def test_a_record_is_attached_to_the_image_that_it_ran_in(tmp_path: Path) -> None:
    record = gpu_record()
    with pytest.raises(ProofError, match="the record is of another image"):
        make_statement(record, "e" * 64, ADDRESS)
    path = tmp_path / "record.json"
    path.write_text(json.dumps(record), encoding="utf-8")
    assert read_record(path) == record
    for text in ("", "[]", "{", json.dumps(record | {"date": "2027-01-01"}), "[" * 100_000):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ProofError):
            read_record(path)
