#!/usr/bin/env python3
"""Write a record of a run to evidence/, sign it, verify it.

    tools/evidence.py run SUITE "NAME: COMMAND"...   runs commands, and records how they ended
    tools/evidence.py gpu report.json                records a report of `make gpu`
    tools/evidence.py sign RECORD --key KEY          writes RECORD.sig by ssh-keygen
    tools/evidence.py verify [RECORD...]             says who signed each record, or "unsigned"

The commands of a suite run one after the other until one fails, each by a shell. One that counts
tests writes JUnit's XML to $JUNIT. Add a record to git, and run `make docs`: then it is in
docs/status.md. Only Python's own library is needed, and ssh-keygen for signatures.
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

NAMESPACE = "trainworks-evidence"
"""What a signature is for (ssh-keygen -Y, option -n): a signature of a commit is not one of a
record.
"""

SIGNERS = "evidence/allowed_signers"
"""The keys that may sign records, in OpenSSH's form: `NAME KEYTYPE KEY` on each line
(ssh-keygen(1), ALLOWED SIGNERS).
"""


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


def memory_gib() -> int:
    """Return the memory of this machine in whole GiB."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30


def cpu_model() -> str:
    """Return the name of the processor; its architecture where the kernel gives no name."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        text = cpuinfo.read_text(encoding="utf-8")
        model = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
        if model:
            return model[1]
    return platform.machine()


def operating_system() -> str:
    """Return the name of the distribution; the kernel's name where no file says it."""
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()


def container_engine() -> str:
    """Return the name and version of Docker, else of buildah; "" where neither is installed."""
    docker = output_of("docker", "version", "--format", "{{.Server.Version}}")
    if docker:
        return f"Docker {docker}"
    return output_of("buildah", "--version")


def machine() -> dict[str, Any]:
    """Return what this machine is: processor, memory in GiB, system, kernel, Python, engine."""
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": memory_gib(),
        "system": operating_system(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "engine": container_engine(),
    }


def images() -> dict[str, str]:
    """Return the identifiers of the builder's images that Docker has, by their names.

    An image that a suite removed again is not among them.
    """
    listed = output_of(
        "docker",
        "image",
        "ls",
        "--no-trunc",
        "--filter",
        "label=trainworks.inputs",
        "--filter",
        "reference=trainworks/*",
        "--format",
        "{{.Repository}}:{{.Tag}} {{.ID}}",
    )
    return dict(line.split(" ", 1) for line in listed.splitlines())


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


def result_of(case: ElementTree.Element) -> str:
    """Return how a test of JUnit's XML ended: "passed", "failed" or "skipped"."""
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    if case.find("skipped") is not None:
        return "skipped"
    return "passed"


def count_tests(junit: Path) -> dict[str, Any]:
    """Return how the tests of a JUnit file ended: their numbers, each file's numbers and seconds,
    and the names of those that failed; {} without such a file.
    """
    if not junit.is_file():
        return {}
    total = {"passed": 0, "failed": 0, "skipped": 0}
    files: dict[str, dict[str, Any]] = {}
    failures = []
    for case in ElementTree.parse(junit).getroot().iter("testcase"):
        result = result_of(case)
        name = case.get("classname", "")
        file = files.setdefault(name, {"passed": 0, "failed": 0, "skipped": 0, "seconds": 0.0})
        total[result] += 1
        file[result] += 1
        file["seconds"] += float(case.get("time", 0))
        if result == "failed":
            failures.append(f"{name}.{case.get('name')}")
    for file in files.values():
        file["seconds"] = round(file["seconds"])
    ended: dict[str, Any] = {"tests": total, "files": dict(sorted(files.items()))}
    if failures:
        ended["failures"] = failures[:NAMES]
    return ended


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
    more = {"date": date, "commit": commit, "changed": is_changed, "images": images()}
    write(suite, parts, more, {})
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


def sign(record: Path, key: Path) -> int:
    """Write RECORD.sig by ssh-keygen; return its exit status. It asks for the key's password."""
    return subprocess.run(
        ("ssh-keygen", "-Y", "sign", "-f", key, "-n", NAMESPACE, record), check=False
    ).returncode


def signer_of(record: Path, signers: Path) -> str:
    """Return who signed a record, by the name in the list of signers; "" for no signature.

    Raises:
        ValueError: The signature is not one of this record, or its key is not in the list.
    """
    signature = record.with_name(f"{record.name}.sig")
    if not signature.is_file():
        return ""
    if not signers.is_file():
        raise ValueError(f"signed, and there is no list of keys: {signers}")
    lookup = ("ssh-keygen", "-Y", "find-principals", "-s", signature, "-f", signers)
    found = subprocess.run(lookup, capture_output=True, text=True, check=False)
    names = found.stdout.split()
    if found.returncode or not names:
        raise ValueError(f"signed by a key that is not in {signers}")
    words = ("ssh-keygen", "-Y", "verify", "-f", signers, "-I", names[0], "-n", NAMESPACE)
    verified = subprocess.run(
        (*words, "-s", signature), input=record.read_bytes(), capture_output=True, check=False
    )
    if verified.returncode:
        raise ValueError(f"changed after {names[0]} signed it")
    return names[0]


def verify(records: Sequence[Path], signers: Path) -> int:
    """Print for each record who signed it; return 1 if one is not as it was written, else 0."""
    status = 0
    for path in records:
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            if record["digest"] != digest_of(record):
                raise ValueError("changed: its digest does not fit")
            signer = signer_of(path, signers)
            print(f"{path.name}: {f'signed by {signer}' if signer else 'unsigned'}")
        except (OSError, ValueError, KeyError, TypeError) as error:
            print(f"{path.name}: {error}")
            status = 1
    if not records:
        print("there is no record", file=sys.stderr)
        status = 1
    return status


def main() -> int:
    """Run a suite, or read a report; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    suite = commands.add_parser("run", help="run a suite and record it")
    suite.add_argument("suite")
    suite.add_argument("steps", nargs="+", metavar="NAME: COMMAND")
    gpu = commands.add_parser("gpu", help="record a report of `make gpu`")
    gpu.add_argument("report", type=Path)
    signing = commands.add_parser("sign", help="sign a record by a key of ssh-keygen")
    signing.add_argument("record", type=Path)
    signing.add_argument("--key", type=Path, required=True, help="the private key")
    verifying = commands.add_parser("verify", help="say who signed each record")
    verifying.add_argument("records", type=Path, nargs="*", help="default: all of evidence/")
    verifying.add_argument("--signers", type=Path, default=ROOT / SIGNERS, help="the known keys")
    options = parser.parse_args()
    if options.command == "run":
        return run(options.suite, options.steps)
    if options.command in ("sign", "verify") and not shutil.which("ssh-keygen"):
        print("there is no ssh-keygen here; install OpenSSH's client", file=sys.stderr)
        return 1
    if options.command == "sign":
        return sign(options.record, options.key)
    if options.command == "verify":
        records = options.records or sorted((ROOT / FOLDER).glob("*.json"))
        return verify(records, options.signers)
    try:
        of_gpu(json.loads(options.report.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"{options.report}: {error}; no record is written", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
