#!/usr/bin/env python3
"""Write a record of a run to evidence/, sign it, verify it.

    tools/evidence.py run SUITE "NAME: COMMAND"...   runs commands, and records how they ended
    tools/evidence.py gpu report.json                records a report of `make gpu`
    tools/evidence.py sign RECORD --key KEY          writes RECORD.sig by ssh-keygen
    tools/evidence.py verify [RECORD...]             says who signed each record, or "unsigned"

The commands of a suite run one after the other until one fails, each by a shell. One that counts
tests writes JUnit's XML to $JUNIT. The list of all tests, with result and seconds of each, lies
beside the record as STAMP-SUITE.tests.gz; the record has its sha256. Add both to git, and run
`make docs`: then they are in docs/status.md. Only Python's own library is needed, and ssh-keygen
for signatures.
"""

from __future__ import annotations

import argparse
import gzip
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
FOLDER = "evidence"
RECORDS = (FOLDER, "images/built.toml", "docs/tables/images.md")
"""What is written when something was run or built: it changes nothing of what is tested."""

GPU_RESULTS = {"PASSED": "passed", "FAILED": "failed", "NOT TESTED": "not tested"}
NAMES = 20
"""The most failed tests that a record names: enough to see which room is broken. The list beside it
has all.
"""

INPUTS = "trainworks.inputs"
"""The label of the builder's images: the digest of all that decides the image."""

OURS = "trainworks/"
"""How names of the builder's images begin."""

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
    others = [f":!{path}" for path in RECORDS]
    changes = output_of("git", "status", "--porcelain", "--", *others)
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


@dataclass(frozen=True)
class Image:
    """An image of the builder in an engine's store.

    Attributes:
        engine: ``docker`` or ``buildah``.
        name: ``trainworks/NAME:TAG``.
        identifier: ``sha256:...`` of its configuration.
        inputs: The digest of its inputs, as its label has it.
        digests: ``sha256:...`` of its manifests in registries, where the engine knows them.
    """

    engine: str
    name: str
    identifier: str
    inputs: str
    digests: tuple[str, ...] = ()


def images() -> list[Image]:
    """Return the builder's images that Docker and buildah have, by their names; empty without
    either.
    """
    return sorted([*docker_images(), *buildah_images()], key=lambda image: image.name)


def docker_images() -> list[Image]:
    """Return the builder's images that Docker has; empty if it does not answer."""
    only_ours = ("--filter", f"label={INPUTS}")
    identifiers = output_of("docker", "image", "ls", "--quiet", "--no-trunc", *only_ours).split()
    if not identifiers:
        return []
    described = output_of("docker", "image", "inspect", *dict.fromkeys(identifiers))
    rows = []
    for image in json.loads(described or "[]"):
        # A digest is the same in each registry: where it was pushed to is not recorded.
        digests = {address.rpartition("@")[2] for address in image["RepoDigests"] or ()}
        inputs = image["Config"]["Labels"][INPUTS]
        for name in image["RepoTags"] or ():
            if name.startswith(OURS):
                rows.append(Image("docker", name, image["Id"], inputs, tuple(sorted(digests))))
    return rows


def buildah_images() -> list[Image]:
    """Return the builder's images that buildah has; empty without buildah. It keeps no digests of
    pushed images.
    """
    only_ours = ("--filter", f"label={INPUTS}")
    listed = output_of("buildah", "images", "--json", "--no-trunc", *only_ours)
    rows = []
    for image in json.loads(listed or "[]"):
        names = [name.removeprefix("localhost/") for name in image.get("names") or ()]
        names = [name for name in names if name.startswith(OURS)]
        if not names:
            continue
        described = output_of("buildah", "inspect", "--type", "image", image["id"])
        if not described:
            # It was removed meanwhile.
            continue
        inputs = json.loads(described)["OCIv1"]["config"]["Labels"][INPUTS]
        identifier = f"sha256:{image['id'].removeprefix('sha256:')}"
        for name in names:
            rows.append(Image("buildah", name, identifier, inputs))
    return rows


def inputs_today(names: Sequence[str]) -> dict[str, list[str]]:
    """Return for each name of an image the digests of inputs that this checkout gives it, by the
    builder; {} where `make setup` was not run.
    """
    python = ROOT / ".venv" / "bin" / "python"
    if not names or not python.is_file():
        return {}
    printed = output_of(str(python), str(ROOT / "tools" / "image_inputs.py"), *names)
    return dict(json.loads(printed or "{}"))


def images_of_run(before: Sequence[Image], after: Sequence[Image]) -> list[dict[str, Any]]:
    """Return the images that a run built, and those that it found built from this checkout: only
    these are used without a build.

    Images of other inputs, which earlier checkouts left in the engine, are not among them. Nor are
    images that the run built and removed again.

    Args:
        before: The engines' images when the run began.
        after: Those when it ended.
    """
    today = inputs_today(sorted({image.name for image in after}))
    rows = []
    for image in after:
        is_built = not any(
            (old.engine, old.name, old.identifier) == (image.engine, image.name, image.identifier)
            for old in before
        )
        if not is_built and image.inputs not in today.get(image.name, ()):
            continue
        row: dict[str, Any] = {
            "name": image.name,
            "engine": image.engine,
            "id": image.identifier,
            "built": is_built,
        }
        if image.digests:
            row["digests"] = list(image.digests)
        rows.append(row)
    return rows


def write(
    suite: str,
    parts: Sequence[Mapping[str, Any]],
    more: Mapping[str, Any],
    where: Mapping[str, Any],
    tests: str = "",
) -> Path:
    """Write a record, and the list of its tests beside it if there is one; return the record's
    path.

    Seconds are whole: programs that copy JSON write 20.0 as 20.

    Args:
        suite: The suite: ``make test``.
        parts: The parts of the run.
        more: Further keys of the record.
        where: Further keys of the machine.
        tests: The text of the list (``list_tests``).
    """
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    path = ROOT / FOLDER / f"{stamp}-{re.sub(r'[^a-z0-9]+', '-', suite.lower())}.json"
    path.parent.mkdir(exist_ok=True)
    record: dict[str, Any] = {
        "schema": 1,
        "suite": suite,
        **more,
        "where": {**machine(), **where},
        "parts": parts,
    }
    record["seconds"] = sum(part["seconds"] for part in parts)
    files = [path.relative_to(ROOT)]
    if tests:
        # The same list gives the same bytes: no time, no name.
        packed = gzip.compress(tests.encode(), mtime=0)
        list_of(path).write_bytes(packed)
        files.append(list_of(path).relative_to(ROOT))
        record["tests"] = f"sha256:{hashlib.sha256(packed).hexdigest()}"
    record["digest"] = digest_of(record)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    words = " ".join(map(str, files))
    print(f"{words}: `git add` and `make docs` put the run into docs/status.md")
    return path


def list_of(record: Path) -> Path:
    """Return the path of the list of tests beside a record."""
    return record.with_suffix(".tests.gz")


@dataclass(frozen=True)
class Test:
    """A test of JUnit's XML.

    Attributes:
        file: Its module: ``tests.plan.test_select``.
        name: Its name with its parameters.
        result: ``passed``, ``failed`` or ``skipped``.
        seconds: Its duration.
        properties: What it recorded (pytest's ``record_property``), by name.
    """

    file: str
    name: str
    result: str
    seconds: float
    properties: Mapping[str, str]


def read_tests(junit: Path) -> list[Test]:
    """Return the tests of a JUnit file; empty without such a file."""
    if not junit.is_file():
        return []
    tests = []
    for case in ElementTree.parse(junit).getroot().iter("testcase"):
        properties = {}
        for row in case.iter("property"):
            properties[row.get("name", "")] = row.get("value", "")
        test = Test(
            file=case.get("classname", ""),
            name=case.get("name", ""),
            result=result_of(case),
            seconds=float(case.get("time", 0)),
            properties=properties,
        )
        tests.append(test)
    return tests


def result_of(case: ElementTree.Element) -> str:
    """Return how a test of JUnit's XML ended: "passed", "failed" or "skipped"."""
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    if case.find("skipped") is not None:
        return "skipped"
    return "passed"


def count_tests(tests: Sequence[Test]) -> dict[str, Any]:
    """Return how tests ended: their numbers, each file's numbers and seconds, the names of those
    that failed, and what tests recorded; {} without tests.
    """
    if not tests:
        return {}
    total = {"passed": 0, "failed": 0, "skipped": 0}
    files: dict[str, dict[str, Any]] = {}
    failures = []
    properties: dict[str, str] = {}
    for test in tests:
        empty = {"passed": 0, "failed": 0, "skipped": 0, "seconds": 0.0}
        file = files.setdefault(test.file, empty)
        total[test.result] += 1
        file[test.result] += 1
        file["seconds"] += test.seconds
        properties |= test.properties
        if test.result == "failed":
            failures.append(f"{test.file}.{test.name}")
    for file in files.values():
        file["seconds"] = round(file["seconds"])
    ended: dict[str, Any] = {"tests": total, "files": dict(sorted(files.items()))}
    if failures:
        ended["failures"] = failures[:NAMES]
    if properties:
        ended["properties"] = dict(sorted(properties.items()))
    return ended


def list_tests(part: str, tests: Sequence[Test]) -> str:
    """Return the lines of a part for the list of tests, by name; "" without tests.

    For example ``# what needs no engine``, then ``passed 0.12 tests.plan.test_select.test_a`` with
    tabs between.
    """
    if not tests:
        return ""
    lines = [f"# {part}"]
    for test in sorted(tests, key=lambda test: (test.file, test.name)):
        lines.append(f"{test.result}\t{test.seconds:.2f}\t{test.file}.{test.name}")
    return "\n".join(lines) + "\n"


def check_step(text: str) -> str:
    """Return a step of a suite as it is; an empty command would pass as a test.

    Raises:
        ArgumentTypeError: It has not the form ``NAME: COMMAND``.
    """
    name, _, command = text.partition(": ")
    if not name.strip() or not command.strip():
        raise argparse.ArgumentTypeError(f"write it as 'NAME: COMMAND', not {text!r}")
    return text


def run(suite: str, steps: Sequence[str]) -> int:
    """Run the steps of a suite until one fails, and write the record; return the exit status of the
    last step.
    """
    before, images_before = checkout(), images()
    status, listed = 0, ""
    parts: list[dict[str, Any]] = []
    for number, step in enumerate(steps, start=1):
        name, _, command = step.partition(": ")
        print(f"== {number} of {len(steps)}: {name} ==", flush=True)
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            variables = {**os.environ, "JUNIT": f"{folder}/junit.xml"}
            status = subprocess.run(("sh", "-c", command), check=False, env=variables).returncode
            tests = read_tests(Path(variables["JUNIT"]))
        seconds = round(time.monotonic() - started)
        result, cause = "passed", ""
        if status:
            result, cause = "failed", f"exit status {status}"
        part = {"name": name, "result": result, "cause": cause, **count_tests(tests)}
        parts.append({**part, "seconds": seconds})
        listed += list_tests(name, tests)
        if status:
            break
    date, after = time.strftime("%Y-%m-%d", time.gmtime()), checkout()
    commit, was_changed = before
    # A file may have changed during the run.
    is_changed = was_changed or after != before
    more = {
        "date": date,
        "commit": commit,
        "changed": is_changed,
        "images": images_of_run(images_before, images()),
    }
    write(suite, parts, more, {}, listed)
    return status


def of_gpu(report: Any) -> Path:
    """Write the record of a report of tests/gpu/run.py.

    Raises ValueError for one that shows nothing of a GPU.
    """
    if not isinstance(report, dict) or report.get("schema") != 1:
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


def check_record(path: Path) -> None:
    """Raise ValueError for a record, or a list of its tests, that is not as it was written."""
    record = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(record, dict) or "digest" not in record:
        raise ValueError("it is not a record: it has no digest")
    if record["digest"] != digest_of(record):
        raise ValueError("changed: its digest does not fit")
    # The digest has the sha256 of the list: who signs the record signs the list.
    if "tests" not in record:
        return
    tests = list_of(path)
    if not tests.is_file():
        raise ValueError(f"its list of tests is missing: {tests.name}")
    if record["tests"] != f"sha256:{hashlib.sha256(tests.read_bytes()).hexdigest()}":
        raise ValueError(f"its list of tests was changed: {tests.name}")


def describe_error(error: Exception) -> str:
    """Return in words why a file is not a record or a report.

    For example ``No such file or directory``, or ``the key 'device' is missing``.
    """
    if isinstance(error, json.JSONDecodeError):
        return f"it is not JSON: {error}"
    if isinstance(error, UnicodeDecodeError):
        return f"it is not text: {error}"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, KeyError):
        return f"the key {error} is missing, or its value is not known"
    if isinstance(error, ValueError):
        return str(error)
    return f"it has another form: {error}"


def verify(records: Sequence[Path], signers: Path) -> int:
    """Print for each record who signed it; return 1 if one, or its list of tests, is not as it was
    written, else 0.
    """
    status = 0
    for path in records:
        try:
            check_record(path)
            signer = signer_of(path, signers)
            print(f"{path.name}: {f'signed by {signer}' if signer else 'unsigned'}")
        except (OSError, ValueError) as error:
            print(f"{path.name}: {describe_error(error)}")
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
    suite.add_argument("steps", nargs="+", type=check_step, metavar="NAME: COMMAND")
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
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        problem = describe_error(error)
        print(f"{options.report}: {problem}; no record is written", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
