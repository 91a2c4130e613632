#!/usr/bin/env python3
"""Run a suite, and write a record of the run to evidence/: tools/evidence.py run SUITE "NAME:
COMMAND"...

The record has the commands, the machine and the results. Commands run one after the other until one
fails, each by a shell. A command that counts tests writes JUnit's XML to $JUNIT. `tools/evidence.py
gpu report.json` makes a record of a report of `make gpu`. Add a record to git, and run `make docs`:
then it is in docs/status.md. Only Python's own library is needed.
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
    """Return the right digest of a record: the sha256 of its other keys
    (`trainworks.attestation.evidence`).
    """
    content = {name: value for name, value in record.items() if name != "digest"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def output_of(*words: str) -> str:
    """Return a program's output; ``""`` if the program is absent."""
    if not shutil.which(words[0]):
        return ""
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    return result.stdout.strip()


def checkout() -> tuple[str, bool]:
    """Return git's commit, and whether files differ from it; records do not count."""
    commit = output_of("git", "rev-parse", "HEAD")
    changes = output_of("git", "status", "--porcelain", "--", f":!{FOLDER}")
    return commit, bool(changes)


def machine() -> dict[str, Any]:
    """Return this machine's processor, cores and engine."""
    information = Path("/proc/cpuinfo")
    text = information.read_text(encoding="utf-8") if information.is_file() else ""
    name = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    docker = output_of("docker", "version", "--format", "{{.Server.Version}}")
    return {
        "cpu": name[1] if name else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "engine": f"Docker {docker}" if docker else output_of("buildah", "--version"),
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


def count_tests(junit: Path) -> dict[str, Any]:
    """Return the numbers of passed, failed and skipped tests, and the names of failed ones."""
    if not junit.is_file():
        return {}
    count = 0
    skipped = 0
    failures = []
    for case in ElementTree.parse(junit).getroot().iter("testcase"):
        count += 1
        if case.find("failure") is not None or case.find("error") is not None:
            failures.append(f"{case.get('classname')}.{case.get('name')}")
        if case.find("skipped") is not None:
            skipped += 1
    numbers = {
        "passed": count - len(failures) - skipped,
        "failed": len(failures),
        "skipped": skipped,
    }
    counts: dict[str, Any] = {"tests": numbers}
    if failures:
        counts["failures"] = failures[:NAMES]
    return counts


def run(suite: str, steps: Sequence[str]) -> int:
    """Run the steps of a suite until one fails; return its exit status."""
    before, status, parts = checkout(), 0, []
    for number, step in enumerate(steps, start=1):
        name, _, command = step.partition(": ")
        print(f"== {number} of {len(steps)}: {name} ==", flush=True)
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            variables = {**os.environ, "JUNIT": f"{folder}/junit.xml"}
            status = subprocess.run(("sh", "-c", command), check=False, env=variables).returncode
            counts = count_tests(Path(variables["JUNIT"]))
        seconds = round(time.monotonic() - started)
        result, cause = "passed", ""
        if status:
            result, cause = "failed", f"exit status {status}"
        part = {"name": name, "result": result, "cause": cause, **counts, "seconds": seconds}
        parts.append(part)
        if status:
            break
    date, after = time.strftime("%Y-%m-%d", time.gmtime()), checkout()
    commit, was_changed = before
    # A file may have changed during the run.
    is_changed = was_changed or after != before
    write(suite, parts, {"date": date, "commit": commit, "changed": is_changed}, {})
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
    parts = []
    for row in report["parts"]:
        part = {
            "name": row["part"],
            "result": GPU_RESULTS[row["result"]],
            "cause": row["cause"],
            "seconds": round(row["seconds"]),
        }
        parts.append(part)
    # A plus after the commit says that files differ from it.
    commit = report["commit"].removesuffix("+")
    more = {
        "date": report["date"],
        "commit": commit,
        "changed": commit != report["commit"] or not commit,
        "image": report.get("image", ""),
        "tested": report["digest"],
    }
    where = {"gpus": versions.pop("devices"), **versions}
    return write("make gpu", parts, more, where)


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
    options = parser.parse_args()
    if options.command == "run":
        return run(options.suite, options.steps)
    try:
        of_gpu(json.loads(options.report.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"{options.report}: {error}; no record is written", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
