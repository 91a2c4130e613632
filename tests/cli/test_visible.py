"""Test that no printed text commands the terminal."""

from __future__ import annotations

import json
import sys
import unicodedata

import pytest

from trainworks.terminal.output import put, put_json, say
from trainworks.terminal.visible import visible


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("plain \u00e9 \u4e2d \U0001f600", "plain \u00e9 \u4e2d \U0001f600"),
        ("a\n\tb", "a\n\tb"),
        ("\x1b[2J", "\\u001b[2J"),
        ("\x1b]0;t\x07", "\\u001b]0;t\\u0007"),
        ("\r\x08\x7f\x9b31m", "\\u000d\\u0008\\u007f\\u009b31m"),
        ("\u202egnp\u2066\u200f", "\\u202egnp\\u2066\\u200f"),
        ("a\u2028b\u2029c", "a\\u2028b\\u2029c"),
        ("\udcff", "\\udcff"),
        ("\U000e0041", "\\U000e0041"),
    ],
)
def test_what_is_hidden_is_written(text: str, seen: str) -> None:
    assert visible(text) == seen


def test_no_control_character_is_left() -> None:
    everything = "".join(map(chr, range(sys.maxunicode + 1)))
    left = {
        character
        for character in visible(everything)
        if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")
    }
    assert left == {"\n", "\t"}


def test_lines_results_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "a\x1b[2J\x7f\u202e"
    say(hostile)
    put(f"{hostile}\n")
    put_json({"name": hostile})
    captured = capsys.readouterr()
    text, _, document = captured.out.partition("\n")
    assert captured.err == "a\\u001b[2J\\u007f\\u202e\n"
    assert text == "a\\u001b[2J\\u007f\\u202e"
    assert json.loads(document) == {"name": hostile}
