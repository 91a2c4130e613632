"""Suppressions, places, and texts of every kind."""

from __future__ import annotations

import dockerfile
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainworks_lint.checks.images import KEYWORDS
from trainworks_lint.document import SyntaxProblem, parse
from trainworks_lint.linter import lint

HEAD = "FROM debian@sha256:0\n"


def found(text: str) -> list[tuple[int, str]]:
    return [(finding.line, finding.rule) for finding in lint(HEAD + text)]


# Suppressions.


def test_a_suppression_holds_for_the_next_instruction_with_all_its_lines() -> None:
    text = "# trainworks: ignore=failure-hidden its tests need a GPU\nRUN make \\\n && make check || true\n"
    assert found(text) == []
    assert found(text + "RUN make || true\n") == [(5, "failure-hidden")]


def test_a_suppression_inside_an_instruction_holds_for_the_next_line() -> None:
    text = "RUN a || true; \\\n # trainworks: ignore=failure-hidden why not\n b || true; \\\n c || true\n"
    assert found(text) == [(2, "failure-hidden"), (5, "failure-hidden")]


def test_one_comment_suppresses_several_rules_and_other_comments_may_follow() -> None:
    text = (
        "# trainworks: ignore=key-made-in-build,failure-hidden a test image without a network\n"
        "# hadolint ignore=DL3000\n"
        "RUN ssh-keygen -A || true\n"
    )
    assert found(text) == []


@pytest.mark.parametrize(
    ("comment", "what"),
    [
        ("# trainworks: ignore=failure-hidden", "the suppression has no reason, so it does not hold"),
        ("# trainworks: ignore=failure-hiden typing error", "unknown rule failure-hiden; did you mean failure-hidden?"),
        ("# trainworks: ignore=, nothing", "no rule is named"),
        (
            "# trainworks: ignore=key-copied there was one",
            "key-copied finds nothing in the next instruction: the suppression is not needed",
        ),
    ],
)
def test_a_wrong_suppression_is_a_finding_and_suppresses_nothing(comment: str, what: str) -> None:
    findings = lint(f"{HEAD}{comment}\nRUN a || true\n")
    assert [(finding.line, finding.rule) for finding in findings] == [(2, "suppression"), (3, "failure-hidden")]
    assert findings[0].what == what


# Places.


def test_every_finding_says_where_why_and_what_to_do() -> None:
    (finding,) = lint(f"{HEAD}RUN pip install 'a==1' b>=2 -c c.txt\n")
    assert (finding.line, finding.rule, finding.severity) == (2, "unquoted-version-operator", "error")
    assert finding.what == "`b>=2` writes the file `=2` and does not limit the version"
    assert "redirection" in finding.reason
    assert "quotes" in finding.fix


def test_another_escape_character_and_windows_line_ends() -> None:
    text = "# escape=`\r\nFROM debian@sha256:0\r\nRUN a `\r\n  && b || true\r\n"
    assert [(finding.line, finding.rule) for finding in lint(text)] == [(4, "failure-hidden")]


def test_two_here_documents_of_one_instruction() -> None:
    text = "RUN <<A\nmake\nA\nCOPY <<B <<C /x/\nb || true\nB\n-----BEGIN PRIVATE KEY-----\nC\nRUN a || true\n"
    assert found(text) == [(8, "private-key-text"), (10, "failure-hidden")]


# Long and deep.


@pytest.mark.parametrize(
    "script",
    [
        " \\\n && ".join(f"step-{number} > log" for number in range(1_200)),
        "; ".join(f"step-{number}" for number in range(1_500)),
        " | ".join(f"step-{number}" for number in range(1_500)),
        " && ".join("rm -f a || true" for _ in range(500)),
        "( " * 400 + "step" + " )" * 400,
    ],
    ids=["and", "semicolon", "pipe", "cleanup", "parentheses"],
)
def test_a_long_script_is_read_to_its_end(script: str) -> None:
    text = f"RUN {script} \\\n && pip install a>=1 -c c.txt\n"
    findings = found(text)
    assert findings[-1] == (text.count("\n") + 1, "unquoted-version-operator")
    assert "too-deeply-nested" not in {rule for _, rule in findings}


@pytest.mark.parametrize("opening", ["( ", "if a; then ", "echo $( "])
def test_a_script_that_is_too_deep_is_a_finding(opening: str) -> None:
    closing = {"( ": " )", "if a; then ": "; fi", "echo $( ": " )"}[opening]
    script = opening * 1_500 + "step" + closing * 1_500
    assert found(f"RUN {script}\nRUN a || true\n") == [(2, "too-deeply-nested"), (3, "failure-hidden")]


def test_a_text_that_is_not_a_dockerfile_is_one_finding_of_syntax() -> None:
    text = "# compose\nservices:\n  web:\n    image: debian\n    ports: [80]\n" * 20
    assert [(finding.line, finding.rule) for finding in lint(text)].count((2, "syntax")) == 1
    assert sum(finding.rule == "syntax" for finding in lint(text)) == 1


# Texts of every kind.

WORDS = st.sampled_from(
    [
        *("FROM", "RUN", "ARG", "ENV", "COPY", "ADD", "ONBUILD", "SHELL", "LABEL", "from", "AS", "a", "scratch"),
        *("\\\n", "\n", "\n\n", "\r\n", "<<EOF", "EOF\n", "<<-'X'", "X\n", "# c\n", "# escape=`\n", "`\n", "\t", " "),
        *("--from=a:latest", "--mount=type=bind,from=b", "--mount=", '["a"', '"]', '["a", "-c", "b>=1"]', "$(", ")"),
        *("$V", "${V:-", "}", "V=1", "'", '"', "\\", "`", "[[", "]]", "[", "]", "((", ">", ">=1", "<", "|", "||"),
        *("&&", ";", "if", "then", "fi", "for", "do", "done", "case", "esac", "{", "true", "sh -c", "bash -ec '"),
        *("pip install", "git clone", "git checkout", "curl", "-o", "-", "--", "https://a/b", "http://a", "sudo -u"),
        *("env", "xargs", "timeout", "é", "\0", "\ud800", "\u2028", "# trainworks: ignore=", "syntax", "reason"),
    ]
)
TEXTS = st.one_of(st.lists(WORDS, max_size=25).map(" ".join), st.lists(WORDS, max_size=25).map("".join), st.text())


@settings(deadline=None, max_examples=150)
@given(TEXTS)
@example("")
@example("FROM")
@example("RUN")
@example("RUN \\")
@example("FROM a\nCOPY --from=\n")
@example("FROM a\nENV\nARG\nADD\nSHELL []\nONBUILD")
def test_no_text_is_too_odd(text: str) -> None:
    last = text.replace("\r\n", "\n").count("\n") + 1
    for finding in lint(text):
        assert 1 <= finding.line <= last
        assert finding.rule
        assert finding.what


@settings(deadline=None, max_examples=150)
@given(TEXTS)
@example("FROM a\nRUN a \\\n  # comment\n\n  b\n")
@example("FROM a\nRUN --mount=type=bind,from=b   a \\\\\\\nb")
@example("# escape=`\nFROM a\nRUN a `\n b \\\n")
def test_continued_lines_are_joined_as_buildkit_joins_them(text: str) -> None:
    """Our text knows its lines and BuildKit's does not: they have to be the same text."""
    try:
        document = parse(text)
    except SyntaxProblem:
        return
    commands = dockerfile.parse_string(
        text.replace("\r\n", "\n").replace("\0", "\ufffd").encode("utf-8", "replace").decode()
    )
    for instruction, command in zip(document.instructions, commands, strict=True):
        if not command.heredocs and instruction.keyword in KEYWORDS:
            assert command.original.strip().endswith(instruction.source.text.strip())
        assert len(instruction.source.lines) == len(instruction.source.text)
        assert all(instruction.line <= line <= instruction.end_line for line in instruction.source.lines)
