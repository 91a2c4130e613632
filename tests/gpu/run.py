#!/usr/bin/env python3
"""Run everything that one NVIDIA GPU can show: `python3 tests/gpu/run.py --report report.json`.

The runner needs a checkout and a Python with CUDA PyTorch, and nothing else. Each part is a program
of its own, in a process group of its own, with a bound in seconds, and all that it started is ended
with it.

Exit status: 0 if no part failed and one passed, 1 if one failed, 3 if nothing could be tested.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import ctypes
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from together import NOT_TESTED_STATUS, ROOT, cause_of

HERE = Path(__file__).resolve().parent
TESTED = ("launcher", "smdistributed", "tests/gpu", "benchmarks/pipeline.py")
PASSED, FAILED, NOT_TESTED = "PASSED", "FAILED", "NOT TESTED"
NOTHING_STATUS = 3
IMAGE = Path("/opt/trainworks/image.json")
"""Record of the image that this runs in, if it is one of ours."""

LAST_LINES = 30
LOOK_SECONDS = 120.0
_PR_SET_CHILD_SUBREAPER = 36  # prctl(2)

LOOK = """
import json, sys
from trainworks_launcher.checks import gpus

found = {"python": sys.version.split()[0], "driver": gpus.query_gpus(60.0).driver, "devices": []}
try:
    import torch

    found |= {"torch": torch.__version__, "cuda": torch.version.cuda or ""}
    if torch.cuda.is_available():
        found["devices"] = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
        found["nccl"] = (
            ".".join(map(str, torch.cuda.nccl.version()))
            if torch.distributed.is_nccl_available()
            else ""
        )
except ImportError:
    pass
print("facts", json.dumps(found))
"""


@dataclass(frozen=True)
class Part:
    """A part of the suite: a file that has BOUND and NEEDS."""

    name: str
    title: str
    bound: float
    file: Path


@dataclass
class Result:
    """The end of a part. `cause` says why it failed or was not tested."""

    part: str
    result: str
    seconds: float
    cause: str = ""
    last_lines: list[str] = field(default_factory=list)
    figures: Any = None


def parts_in(folder: Path) -> list[Part]:
    """Return the parts of a folder, by name. They are read, not imported."""
    parts = []
    for file in sorted(folder.glob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        constants = {
            statement.targets[0].id: statement.value
            for statement in tree.body
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)
        }
        if {"BOUND", "NEEDS"} <= constants.keys():
            title = (ast.get_docstring(tree) or file.stem).splitlines()[0]
            parts.append(Part(file.stem, title, float(ast.literal_eval(constants["BOUND"])), file))
    return parts


def run_part(part: Part, options: dict[str, Any]) -> Result:
    """Run a part to its end or its bound."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        result, output = Path(folder, "result"), Path(folder, "output")
        with output.open("wb") as stream:
            child = subprocess.Popen(
                [sys.executable, str(part.file), "run", json.dumps(options), str(result)],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                env=_environment(),
                cwd=folder,
                start_new_session=True,
            )
        late = False
        try:
            status = child.wait(part.bound)
        except subprocess.TimeoutExpired:
            late, status = True, 0
        finally:
            _end(child)
        seconds = round(time.monotonic() - begun, 1)
        text = output.read_text(encoding="utf-8", errors="replace")
        lines = text.splitlines()[-LAST_LINES:]
        figures_text = result.read_text(encoding="utf-8") if result.is_file() else ""
    if late:
        return Result(part.name, FAILED, seconds, f"it had not ended after {part.bound:g} s", lines)
    if status == NOT_TESTED_STATUS:
        return Result(part.name, NOT_TESTED, seconds, figures_text)
    if status < 0:
        return Result(
            part.name, FAILED, seconds, f"it was killed by {signal.Signals(-status).name}", lines
        )
    if status or not figures_text:
        return Result(part.name, FAILED, seconds, cause_of(text), lines)
    return Result(part.name, PASSED, seconds, figures=json.loads(figures_text))


def look() -> dict[str, Any]:
    """Return versions and devices, as a process of its own sees them: torch or
    the driver may crash it.
    """
    try:
        seen = subprocess.run(
            [sys.executable, "-c", LOOK],
            capture_output=True,
            text=True,
            timeout=LOOK_SECONDS,
            env=_environment(),
        )
    except subprocess.TimeoutExpired:
        return {"problem": f"torch or the driver does not answer within {LOOK_SECONDS:g} s"}
    for line in seen.stdout.splitlines():
        if line.startswith("facts "):
            facts: dict[str, Any] = json.loads(line.removeprefix("facts "))
            return facts
    return {"problem": cause_of(seen.stderr)}


def digest() -> str:
    """Return a digest of the files that are tested: their paths and their bytes."""
    total = hashlib.sha256()
    for place in TESTED:
        for file in (
            [ROOT / place] if place.endswith(".py") else sorted((ROOT / place).rglob("*.py"))
        ):
            total.update(
                f"{file.relative_to(ROOT)}\0".encode() + hashlib.sha256(file.read_bytes()).digest()
            )
    return f"sha256:{total.hexdigest()}"


def commit() -> str:
    """Return git's commit, with `+` if files differ from it.

    Nothing where git or its folder is absent.
    """
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        # In a container the checkout is often another user's, which git refuses by default.
        git = ["git", "-c", f"safe.directory={ROOT}"]
        head, changed = (
            subprocess.run(
                [*git, *words], cwd=ROOT, capture_output=True, text=True, check=True
            ).stdout.strip()
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "--", *TESTED))
        )
        return head + ("+" if changed else "")
    return ""


def main(words: Sequence[str] | None = None) -> int:
    """Run the suite; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--list", action="store_true", help="print the parts and their bounds, and run nothing"
    )
    parser.add_argument(
        "--only", metavar="PART", action="append", help="run this part; may be given again"
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="write a report in JSON")
    parser.add_argument(
        "--archive", type=Path, metavar="FILE", help="a tar file with lib/ of an image's EFA plugin"
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: try the parts with gloo"
    )
    parser.add_argument(
        "--times", type=float, default=1, metavar="N", help="multiply all bounds: a busy machine"
    )
    parser.add_argument(
        "--parts", type=Path, default=HERE, metavar="FOLDER", help="take the parts from here"
    )
    command_options = parser.parse_args(words)
    parts = parts_in(command_options.parts)
    if unknown := set(command_options.only or ()) - {part.name for part in parts}:
        parser.error(f"there is no part {', '.join(sorted(unknown))}; see --list")
    parts = [
        replace(part, bound=part.bound * command_options.times)
        for part in parts
        if not command_options.only or part.name in command_options.only
    ]
    if command_options.list:
        for part in parts:
            print(f"{part.name:<16} {part.bound:>4g} s  {part.title}")
        return 0
    with contextlib.suppress(OSError, AttributeError):
        # Elsewhere than on Linux a process that escapes its group stays.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    options = {
        "device": command_options.device,
        "archive": str(command_options.archive.resolve()) if command_options.archive else "",
    }
    facts = look()
    print(" ".join(f"{name}={value}" for name, value in facts.items()), flush=True)
    results = []
    for part in parts:
        print(f"{part.name:<16} ", end="", flush=True)
        results.append(result := run_part(part, options))
        print(f"{result.result:<10} {result.seconds:>6.1f} s  {result.cause}", flush=True)
        figures = result.figures.values() if isinstance(result.figures, dict) else ()
        for line in (
            *result.last_lines,
            *(figure for figure in figures if isinstance(figure, str)),
        ):
            print(f"    {line}")
    failed = any(result.result == FAILED for result in results)
    passed = any(result.result == PASSED for result in results)
    if command_options.report:
        report = {
            "schema": 1,
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "device": command_options.device,
            "versions": facts,
            "commit": commit(),
            "digest": digest(),
            "image": (
                f"sha256:{hashlib.sha256(IMAGE.read_bytes()).hexdigest()}"
                if IMAGE.is_file()
                else ""
            ),
            "parts": [asdict(result) for result in results],
        }
        command_options.report.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if not failed and not passed:
        print("nothing was tested")
    if failed:
        return 1
    return 0 if passed else NOTHING_STATUS


def _environment() -> dict[str, str]:
    """Return the variables of a part: it finds this checkout's code, and the
    helpers of its tests.
    """
    paths = [
        ROOT / folder
        for folder in (
            "tests/gpu",
            "smdistributed",
            "smdistributed/tests",
            "launcher",
            "benchmarks",
        )
    ]
    before = os.environ.get("PYTHONPATH")
    path_before = [before] if before else []
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*map(str, paths), *path_before]),
    }


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a part with all that it started.

    A process that left its process group has become a child of this process.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    while orphans := list(_children()):
        for orphan in orphans:
            with contextlib.suppress(ProcessLookupError):
                os.kill(orphan, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(orphan, 0)


def _children() -> Iterator[int]:
    """Yield the children of this process, as proc(5) has them."""
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name, in parentheses, may have any character in it.
            if int(entry.read_text(errors="replace").rpartition(")")[2].split()[1]) == os.getpid():
                yield int(entry.parent.name)


if __name__ == "__main__":
    sys.exit(main())
