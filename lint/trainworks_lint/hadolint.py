"""hadolint's findings, which are shown beside ours where it is installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trainworks_lint.findings import Finding, Severity, masked

SEVERITY_OF_LEVEL: dict[str, Severity] = {"error": "error", "warning": "warning", "info": "advice", "style": "advice"}
"""hadolint's levels in our words."""

LIMIT_SECONDS = 30.0
"""Limit for one file. A file takes about 0.2 s; a RUN with thousands of commands can take minutes."""

LONGEST_MESSAGE = 200
"""Characters of hadolint's own error message that a note shows."""


class HadolintError(Exception):
    """Hadolint gave no findings; the text says why."""


def find_hadolint() -> str:
    """Return the path of hadolint; empty if it is not installed. The folder of this Python comes before PATH."""
    return shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint") or ""


def version_of(program: str) -> str:
    """Return hadolint's version.

    Raises:
        HadolintError: If it cannot be started.
    """
    return (_run(program, LIMIT_SECONDS, "--version").split() or ["of unknown version"])[-1]


def findings_of(
    program: str, paths: Sequence[Path], limit: float = LIMIT_SECONDS
) -> list[tuple[tuple[Finding, ...], str]]:
    """Return hadolint's findings in each file, and why there are none if it failed.

    Args:
        program: The path of hadolint. It reads ``.hadolint.yaml`` of the current folder.
        paths: The files.
        limit: For each file, in seconds.
    """

    def findings(path: Path) -> tuple[tuple[Finding, ...], str]:
        try:
            return _findings(program, path, limit), ""
        except HadolintError as error:
            return (), str(error)

    pool = ThreadPoolExecutor(os.cpu_count() or 1)
    try:
        return list(pool.map(findings, paths))
    finally:
        # After Ctrl-C, no further hadolint is started.
        pool.shutdown(cancel_futures=True)


def _findings(program: str, path: Path, limit: float) -> tuple[Finding, ...]:
    # A name that begins with - would be an option.
    name = str(path) if not str(path).startswith("-") else f"./{path}"
    output = _run(program, limit, "--no-fail", "--format", "json", name)
    try:
        entries = json.loads(output)
        return tuple(
            Finding(
                int(entry["line"]),
                entry["code"],
                SEVERITY_OF_LEVEL.get(entry["level"], "advice"),
                masked(entry["message"]),
                reason="",
                fix="",
            )
            for entry in entries
        )
    except (ValueError, KeyError, TypeError) as error:
        raise HadolintError("cannot read hadolint's output") from error


def _run(program: str, limit: float, *arguments: str) -> str:
    try:
        result = subprocess.run(
            [program, *arguments], capture_output=True, encoding="utf-8", timeout=limit, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise HadolintError(f"hadolint did not finish within {limit:g} s") from error
    except OSError as error:
        raise HadolintError(f"cannot start hadolint: {program} ({error.strerror})") from error
    if result.returncode != 0:
        words = " ".join((result.stderr or result.stdout).split())
        raise HadolintError(f"hadolint ended with status {result.returncode}: {words[:LONGEST_MESSAGE]}".rstrip(": "))
    return result.stdout
