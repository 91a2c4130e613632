#!/usr/bin/env python3
"""Run a suite, and write what ran, where, and how it ended to evidence/: tools/evidence.py run
SUITE "NAME: COMMAND"...

Commands run one after the other until one fails, each by a shell. One that counts tests writes
JUnit's XML to $JUNIT. `tools/evidence.py gpu report.json` makes a record of a report of `make gpu`.
Add a record to git, and run `make docs`: then it is in docs/status.md. Only Python's own library is
needed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
FOLDER = "evidence"
GPU_RESULTS = {"PASSED": "passed", "FAILED": "failed", "NOT TESTED": "not tested"}
NAMES = 20
"""The most failed tests that are named: enough to see which room is broken."""


def digest_of(record: Mapping[str, Any]) -> str:
    """Return what `digest` of a record must be: the sha256 of everything else in it
    (`trainworks.attestation.evidence`).
    """
    rest = {name: value for name, value in record.items() if name != "digest"}
    return (
        "sha256:"
        + hashlib.sha256(
            json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()
        ).hexdigest()
    )


def asked(*words: str) -> str:
    """Return what a program prints; nothing where it is absent or fails."""
    if not shutil.which(words[0]):
        return ""
    return subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()


def checkout() -> tuple[str, bool]:
    """Return git's commit, and whether files differ from it; records do not count."""
    return asked("git", "rev-parse", "HEAD"), bool(
        asked("git", "status", "--porcelain", "--", f":!{FOLDER}")
    )


def machine() -> dict[str, Any]:
    """Return what this machine is."""
    text = (
        Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").is_file() else ""
    )
    name = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    docker = asked("docker", "version", "--format", "{{.Server.Version}}")
    return {
        "cpu": name[1] if name else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "engine": f"Docker {docker}" if docker else asked("buildah", "--version"),
    }


def write(
    suite: str,
    parts: Sequence[Mapping[str, Any]],
    more: Mapping[str, Any],
    where: Mapping[str, Any],
) -> Path:
    """Write a record, and return its path.

    Seconds are whole: programs that copy JSON write 20.0 as 20.
    """
    record: dict[str, Any] = {
        "schema": 1,
        "suite": suite,
        **more,
        "where": {**machine(), **where},
        "parts": parts,
    }
    record["seconds"] = sum(part["seconds"] for part in parts)
    record["digest"] = digest_of(record)
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    path = ROOT / FOLDER / f"{stamp}-{re.sub(r'[^a-z0-9]+', '-', suite.lower())}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"{path.relative_to(ROOT)}: `git add` it and run `make docs`, and docs/status.md has it")
    return path


def counted(junit: Path) -> dict[str, Any]:
    """Return how many tests passed, failed and were skipped, and the names of those that failed."""
    if not junit.is_file():
        return {}
    cases = list(ElementTree.parse(junit).getroot().iter("testcase"))
    failed = [
        case for case in cases if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = [case for case in cases if case.find("skipped") is not None]
    names = [f"{case.get('classname')}.{case.get('name')}" for case in failed[:NAMES]]
    numbers = {
        "passed": len(cases) - len(failed) - len(skipped),
        "failed": len(failed),
        "skipped": len(skipped),
    }
    return {"tests": numbers, **({"failures": names} if names else {})}


def run(suite: str, steps: Sequence[str]) -> int:
    """Run the steps of a suite until one fails; return its exit status."""
    before, status, parts = checkout(), 0, []
    for number, step in enumerate(steps, start=1):
        name, _, command = step.partition(": ")
        print(f"== {number} of {len(steps)}: {name} ==", flush=True)
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            variables = {**os.environ, "JUNIT": f"{folder}/junit.xml"}
            status = subprocess.run(("sh", "-c", command), check=False, env=variables).returncode
            found = counted(Path(variables["JUNIT"]))
        ended = (
            {"result": "failed", "cause": f"exit status {status}"}
            if status
            else {"result": "passed", "cause": ""}
        )
        parts.append({"name": name, **ended, **found, "seconds": round(time.monotonic() - begun)})
        if status:
            break
    date, after = time.strftime("%Y-%m-%d", time.gmtime()), checkout()
    write(
        suite,
        parts,
        {"date": date, "commit": before[0], "changed": before[1] or after != before},
        {},
    )
    return status


def of_gpu(report: Mapping[str, Any]) -> Path:
    """Write the record of a report of tests/gpu/run.py.

    Raises ValueError for one that shows nothing of a GPU.
    """
    if report.get("schema") != 1:
        raise ValueError("it is not a report of tests/gpu/run.py")
    if report["device"] != "cuda":
        raise ValueError("it is of a CPU, which stands in for a GPU")
    versions = dict(report["versions"])
    if not versions.get("devices"):
        raise ValueError("it names no GPU")
    if all(part["result"] == "NOT TESTED" for part in report["parts"]):
        raise ValueError("nothing was tested")
    parts = [
        {
            "name": part["part"],
            "result": GPU_RESULTS[part["result"]],
            "cause": part["cause"],
            "seconds": round(part["seconds"]),
        }
        for part in report["parts"]
    ]
    commit = report["commit"].removesuffix("+")
    more = {
        "date": report["date"],
        "commit": commit,
        "changed": commit != report["commit"] or not commit,
    }
    where = {"gpus": versions.pop("devices"), **versions}
    return write(
        "make gpu",
        parts,
        {**more, "image": report.get("image", ""), "tested": report["digest"]},
        where,
    )


def main() -> int:
    """Run a suite, or read a report; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    suite = commands.add_parser("run", help="run a suite and record it")
    suite.add_argument("suite")
    suite.add_argument("steps", nargs="+", metavar="NAME: COMMAND")
    commands.add_parser("gpu", help="record a report of `make gpu`").add_argument(
        "report", type=Path
    )
    given = parser.parse_args()
    if given.command == "run":
        return run(given.suite, given.steps)
    try:
        of_gpu(json.loads(given.report.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"{given.report}: {error}; no record is written", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
