"""What can be wrong in a Dockerfile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainworks.facts.rows import Severity

KINDS: Mapping[str, tuple[Severity, str, str]] = {
    "unquoted-version": (
        "refuse",
        "the shell reads > and < as redirections: any version is installed, and a file is written",
        'put the requirement in quotes: "name>=1.2"',
    ),
    "key-in-layer": (
        "refuse",
        "every user of the image can read every layer, including files that a later step deletes",
        "RUN --mount=type=secret,id=NAME for the step that needs it; make host keys when the container starts",
    ),
    "download-unchecked": (
        "refuse",
        "a changed or manipulated file is installed without an error",
        "`echo 'SHA256  FILE' | sha256sum --check` in the same RUN; ADD --checksum=sha256:...; pip: URL#sha256=...",
    ),
    "declared-version-differs": (
        "refuse",
        "a reader, or a script that uses the variable, takes the wrong version",
        "use the variable in the step that installs",
    ),
    "version-not-read": (
        "advise",
        "the declared version is not the installed version",
        "use it in the step that installs the component, or remove it",
    ),
}
"""The rules besides those of ``images/compatibility.toml``: severity, reason, and what to write instead."""


@dataclass(frozen=True)
class Finding:
    """One defect: the line, from 1, what is there, why it is wrong, and what to write; ``advise`` fails nothing."""

    line: int
    rule: str
    severity: Severity
    what: str
    reason: str
    instead: str
    source: str = ""


def finding(rule: str, line: int, what: str) -> Finding:
    """Return a finding of one of ``KINDS``."""
    severity, reason, instead = KINDS[rule]
    return Finding(line, rule, severity, what, reason, instead)
