"""One rule for the text of a requirements file: builder and pip read the same lines of the same bytes."""

from __future__ import annotations

import codecs

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pip._internal.req import req_file

from trainworks.extend.reading import text as builder

ENCODINGS = {
    "utf-8": b"",
    "utf-8-sig": b"",
    "utf-16-le": codecs.BOM_UTF16_LE,
    "utf-16-be": codecs.BOM_UTF16_BE,
    "utf-32-le": codecs.BOM_UTF32_LE,
    "utf-32-be": codecs.BOM_UTF32_BE,
}
# Python's str.splitlines knows more ends of a line than people type; all readers use it.
PIECES = st.sampled_from(
    ["six", "pandas>=2", " ", "\t", "#", " # why", "\\", "\n", "\r\n", "\\\n", "é", "日本", "--hash=sha256:00", "; x"]
)
TEXTS = st.lists(PIECES, max_size=30).map("".join)


def lines_of_pip(text: str) -> list[tuple[int, str]]:
    return list(req_file.ignore_comments(req_file.join_lines(enumerate(text.splitlines(), start=1))))


@given(TEXTS, st.sampled_from(sorted(ENCODINGS)))
def test_an_encoding_changes_nothing(text: str, encoding: str) -> None:
    content = ENCODINGS[encoding] + text.encode(encoding)
    for decoded in (builder.decode(content), req_file._decode_req_file(content, "r")):
        assert decoded == text


@given(TEXTS)
def test_lines_are_joined_and_numbered_as_pip_does(text: str) -> None:
    expected = lines_of_pip(text)
    assert list(builder.logical_lines(text)) == expected


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("# -*- coding: latin-1 -*-\nsix # é\n".encode("latin-1"), "# -*- coding: latin-1 -*-\nsix # é\n"),
        ("# why\n# vim: set fileencoding=cp1252 :\nsix # €".encode("cp1252"), "# why\n# vim: set fileencoding=cp1252 "),
        (b"# one\n# two\n# coding: none-such\nsix", "# one\n# two\n# coding: none-such\nsix"),
        (b"six # coding: none-such", "six # coding: none-such"),
        (b"", ""),
    ],
)
def test_a_coding_line_is_a_comment_in_the_first_two_lines(content: bytes, expected: str) -> None:
    assert builder.decode(content).startswith(expected)
    assert builder.decode(content) == req_file._decode_req_file(content, "r")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("six # é".encode("latin-1"), "it is not UTF-8: save it as UTF-8"),
        (b"# coding: none-such\nsix", "its coding line names none-such, which is not an encoding"),
        (b"# coding: ascii\nsix # \xff", "it is not ASCII: save it as UTF-8"),
        (codecs.BOM_UTF16_LE + b"s", "it is not UTF-16-LE: save it as UTF-8"),
    ],
)
def test_what_cannot_be_read_is_said_in_the_same_words(content: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        builder.decode(content)


def test_variables_are_those_that_pip_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"TOKEN": "secret", "EMPTY": "", "lower": "x"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NONE", raising=False)
    line = "${TOKEN} $TOKEN ${EMPTY} ${lower} ${NONE} ${TOKEN}"
    assert [(1, builder.with_variables(line, values))] == list(req_file.expand_env_variables([(1, line)]))
