"""Records of test runs (``tools/evidence.py``) as statements about an image:
where it ran, and how that ended.
"""

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
"""The file of an image whose hash a record has: the same in every build of one
plan, and in no other image.
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
"""The parts of `make gpu` that show that an image works on a GPU: all that need
nothing but the GPU and the image.
"""

RESULTS = ("passed", "failed", "not tested")
LARGEST = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """A run that was recorded: the suite, its date and commit, the machine's
    GPUs and driver, and how parts ended.
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
        """Return what keeps it from showing that the image works on a GPU.

        Args:
            gpu: The GPU's name, or a part of it.
            parts: What must have passed; more may be not tested, and nothing may have failed.
        """
        where = ", ".join(self.gpus) or "no GPU"
        problems = (
            [] if gpu.lower() in where.lower() else [f"{self.suite} ran on {where}, not on {gpu}"]
        )
        if self.failed:
            problems.append(f"{self.suite} on {where}: failed: {', '.join(self.failed)}")
        missing = [part for part in parts if part not in (*self.passed, *self.failed)]
        if missing:
            problems.append(
                f"{self.suite} on {where}: not tested, and demanded: {', '.join(missing)}"
            )
        if self.changed:
            problems.append(f"{self.suite} ran on a checkout with changes that are in no commit")
        return problems


def read_record(path: Path) -> dict[str, Any]:
    """Return a record from its file.

    Raises OutputError where it cannot be read, ProofError where it was edited.
    """
    try:
        with path.open(encoding="utf-8") as file:
            record = json.loads(file.read(LARGEST + 1))
    except OSError as error:
        raise OutputError(f"{path}: {error.strerror}", hint="give a file of evidence/") from error
    except (ValueError, RecursionError):
        raise ProofError([f"{path}: not a record of `tools/evidence.py`"]) from None
    evidence_of(record)
    return dict(record)


def digest_of(record: Mapping[str, Any]) -> str:
    """Return what the digest of a record must be: the sha256 of all else in it, as in
    `tools/evidence.py`.
    """
    rest = {name: value for name, value in record.items() if name != "digest"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def evidence_of(record: Any) -> Evidence:
    """Return what a record says.

    Raises ProofError where it is none, or is not as it was written.
    """
    try:
        if record["digest"] != digest_of(record):
            raise ProofError(
                ["the record is not what was written: its digest does not follow from its content"]
            )
        ended = {
            name: [str(part["name"]) for part in record["parts"] if part["result"] == name]
            for name in RESULTS
        }
        if record["schema"] != 1 or sum(map(len, ended.values())) != len(record["parts"]):
            raise KeyError
        return Evidence(
            suite=str(record["suite"]),
            date=str(record["date"]),
            commit=str(record["commit"]),
            changed=record["changed"] is not False,
            image=str(record.get("image", "")),
            gpus=tuple(map(str, record["where"].get("gpus", ()))),
            driver=str(record["where"].get("driver", "")),
            passed=tuple(ended["passed"]),
            failed=tuple(ended["failed"]),
            not_tested=tuple(ended["not tested"]),
        )
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError):
        raise ProofError(["the record is not as `tools/evidence.py` writes them"]) from None


def statement_of(record: Mapping[str, Any], manifest: str, address: str) -> dict[str, object]:
    """Return the predicate that cosign attests.

    Args:
        record: What was recorded.
        manifest: The sha256 of ``MANIFEST`` in the image that the statement is to be about.
        address: The image in its registry, by digest.

    Raises:
        ProofError: The record is of another image, or of none.
    """
    ran_in = evidence_of(record).image
    if ran_in != f"sha256:{manifest}":
        raise ProofError(
            [
                (
                    f"the record is of another image: its {MANIFEST} was {ran_in or 'none'}, and is"
                    f" sha256:{manifest}"
                )
            ],
            hint=(
                "run tests/gpu/run.py --report in a container of this image, then"
                " `tools/evidence.py gpu` on it"
            ),
        )
    return {"image": address.rpartition("@")[2], "record": dict(record)}


def stated(predicate: Any, sha256: str) -> Evidence:
    """Return what a statement says that is about the image with this manifest.

    Raises ProofError.
    """
    if not isinstance(predicate, dict) or predicate.get("image") != f"sha256:{sha256}":
        raise ProofError(["the evidence was written for another image"])
    return evidence_of(predicate.get("record"))
