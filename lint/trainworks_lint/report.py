"""The report of a run, for people and for programs."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass

from trainworks_lint.findings import SEVERITIES, Finding, Severity


@dataclass(frozen=True)
class FileReport:
    """The findings in one file.

    Attributes:
        path: As it was named on the command line.
        findings: Those of our rules.
        hadolint: Those of hadolint; their rule is hadolint's code.
        note: Why hadolint's findings are missing; empty if they are not.
    """

    path: str
    findings: tuple[Finding, ...]
    hadolint: tuple[Finding, ...] = ()
    note: str = ""

    def count(self) -> Counter[Severity]:
        """Return the number of findings of each severity."""
        return Counter(finding.severity for finding in (*self.findings, *self.hadolint))


@dataclass(frozen=True)
class LintReport:
    """The findings in all files.

    Attributes:
        files: In the order of the command line.
        hadolint: Its version; empty if it did not run at all.
        note: Why it did not run; empty if it did.
    """

    files: tuple[FileReport, ...]
    hadolint: str = ""
    note: str = ""

    def with_findings(self) -> tuple[str, ...]:
        """Return the files with an error or a warning."""
        return tuple(file.path for file in self.files if file.count()["error"] + file.count()["warning"])


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
        if file.note:
            lines.append(f"{file.path}: note: {file.note}")
    lines.append(_sum(report))
    return "\n".join(lines) + "\n"


def _sum(report: LintReport) -> str:
    total = sum((file.count() for file in report.files), Counter[Severity]())
    counts = ", ".join(f"{total[severity]} {_plural(severity, total[severity])}" for severity in SEVERITIES)
    files = f"{len(report.files)} file{'s' if len(report.files) != 1 else ''}"
    return f"{files}: {counts}; {f'hadolint {report.hadolint}' if report.hadolint else report.note}"


def _plural(severity: Severity, count: int) -> str:
    return severity if severity == "advice" or count == 1 else f"{severity}s"


def as_json(report: LintReport) -> str:
    """Return the report as one JSON text; the ``tool`` of a finding is trainworks or hadolint."""
    files = [
        {
            "file": file.path,
            "findings": [
                {"tool": tool, **asdict(finding)}
                for tool, findings in (("trainworks", file.findings), ("hadolint", file.hadolint))
                for finding in findings
            ],
            "note": file.note,
        }
        for file in report.files
    ]
    return json.dumps({"files": files, "hadolint": report.hadolint or None, "note": report.note}, indent=2) + "\n"
