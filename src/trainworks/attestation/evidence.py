"""Records of test runs (``tools/evidence.py``) as statements about an image."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainworks.errors import OutputError, ProofError

EVIDENCE = "urn:trainworks:evidence:1"
"""The type of the statement, for ``cosign attest --type``."""

EVIDENCE_FILE = "evidence.json"
MANIFEST = "/opt/trainworks/image.json"
"""The file of an image with the hash in a record: every build of a plan has the same file, and no
other image has it.
"""

GPU_PARTS = (
    "communication",
    "compiled",
    "data_parallel",
    "failures",
    "hangs",
    "launcher",
    "pipelines",
)
"""The parts of `make gpu` that show that an image works on a GPU: those that need only both."""

RESULTS = ("passed", "failed", "not tested")
LARGEST = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """A recorded run of a test suite in an image.

    Attributes:
        suite: The suite: ``make gpu``.
        date: The time of the run, as the record has it.
        commit: The git commit of the checkout.
        changed: Whether the checkout had changes that are in no commit.
        image: ``sha256:...`` of the image's ``MANIFEST``; ``""`` if the run was in none.
        gpus: The names of the GPUs.
        driver: The version of NVIDIA's driver; ``""`` without one.
        passed: The names of the parts that passed.
        failed: The names of the parts that failed.
        not_tested: The names of the parts that were skipped.
    """

    suite: str
    date: str
    commit: str
    changed: bool
    image: str
    gpus: tuple[str, ...]
    driver: str
    passed: tuple[str, ...]
    failed: tuple[str, ...]
    not_tested: tuple[str, ...]

    def problems(self, gpu: str, parts: Sequence[str]) -> list[str]:
        """Return the reasons why the run does not show that the image works on a GPU.

        Empty if it does.

        Args:
            gpu: The GPU's name, or a part of it.
            parts: The parts that must have passed; others may be not tested, and none may have
                failed.
        """
        gpus = ", ".join(self.gpus) or "no GPU"
        problems = []
        if gpu.lower() not in gpus.lower():
            problems.append(f"{self.suite} ran on {gpus}, not on {gpu}")
        if self.failed:
            problems.append(f"{self.suite} on {gpus}: failed: {', '.join(self.failed)}")
        tested = (*self.passed, *self.failed)
        missing = [part for part in parts if part not in tested]
        if missing:
            problems.append(
                f"{self.suite} on {gpus}: not tested, and demanded: {', '.join(missing)}"
            )
        if self.changed:
            problems.append(f"{self.suite} ran on a checkout with changes that are in no commit")
        return problems


def read_record(path: Path) -> dict[str, Any]:
    """Read and check a record of ``tools/evidence.py``, and return it as an object of JSON.

    Raises:
        OutputError: The file cannot be read.
        ProofError: The file is not a record, or the record was edited.
    """
    try:
        with path.open(encoding="utf-8") as file:
            record = json.loads(file.read(LARGEST + 1))
    except OSError as error:
        raise OutputError(f"{path}: {error.strerror}", hint="give a file of evidence/") from error
    except (ValueError, RecursionError):
        raise ProofError([f"{path}: not a record of `tools/evidence.py`"]) from None
    parse_record(record)
    return dict(record)


def compute_digest(record: Mapping[str, Any]) -> str:
    """Compute the digest that a record must have: ``sha256:...`` of its other keys.

    ``tools/evidence.py`` computes it in the same way.
    """
    content = {name: value for name, value in record.items() if name != "digest"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def parse_record(record: Any) -> Evidence:
    """Return the facts of a record, a parsed JSON value.

    Raises:
        ProofError: The value is not a record, or the record was edited.
    """
    try:
        if record["digest"] != compute_digest(record):
            raise ProofError(
                ["the record is not what was written: its digest does not follow from its content"]
            )
        parts_by_result: dict[str, list[str]] = {result: [] for result in RESULTS}
        for part in record["parts"]:
            # An unknown result is a KeyError: the record is malformed.
            parts_by_result[part["result"]].append(str(part["name"]))
        if record["schema"] != 1:
            raise KeyError("schema")
        return Evidence(
            suite=str(record["suite"]),
            date=str(record["date"]),
            commit=str(record["commit"]),
            changed=record["changed"] is not False,
            image=str(record.get("image", "")),
            gpus=tuple(map(str, record["where"].get("gpus", ()))),
            driver=str(record["where"].get("driver", "")),
            passed=tuple(parts_by_result["passed"]),
            failed=tuple(parts_by_result["failed"]),
            not_tested=tuple(parts_by_result["not tested"]),
        )
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError):
        raise ProofError(["the record is not as `tools/evidence.py` writes them"]) from None


def make_statement(record: Mapping[str, Any], manifest: str, address: str) -> dict[str, object]:
    """Return the statement about a recorded run in an image: the predicate that cosign attests.

    Args:
        record: The record of a run.
        manifest: The sha256 of ``MANIFEST`` in the image of the statement.
        address: The image in its registry, by digest.

    Raises:
        ProofError: The record is of another image, or of none.
    """
    recorded_image = parse_record(record).image
    if recorded_image != f"sha256:{manifest}":
        problem = (
            f"the record is of another image: its {MANIFEST} was {recorded_image or 'none'}, and is"
            f" sha256:{manifest}"
        )
        raise ProofError(
            [problem],
            hint=(
                "run tests/gpu/run.py --report in a container of this image, then"
                " `tools/evidence.py gpu` on it"
            ),
        )
    return {"image": address.rpartition("@")[2], "record": dict(record)}


def read_evidence(predicate: Any, sha256: str) -> Evidence:
    """Return the evidence in a statement about an image.

    Args:
        predicate: The predicate of the statement, a parsed JSON value.
        sha256: The hash of the image's manifest.

    Raises:
        ProofError: The statement is about another image, malformed, or its record was edited.
    """
    if not isinstance(predicate, dict) or predicate.get("image") != f"sha256:{sha256}":
        raise ProofError(["the evidence was written for another image"])
    return parse_record(predicate.get("record"))
