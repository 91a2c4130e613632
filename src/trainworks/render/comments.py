"""Files of a build context without their comments: those that differ in comments alone are one file.

Python also loses its docstrings and its layout. Files of unknown kinds stay as they are. Pure, and the same in every
version of Python that runs the builder: nothing printed by ``ast`` is used, whose text and nodes differ by version.
"""

from __future__ import annotations

import json
import re
import tokenize
import tomllib
from collections.abc import Callable
from functools import lru_cache

INTERPRETER = re.compile(r"#!.*\b(python|sh)[\d.]*\b")
"""The first line of a script: what runs it."""

COMMENT_LINE = re.compile(r"^[ \t]*(#(?!!).*)?\n", re.MULTILINE)
"""An empty line, or one with only a comment; ``#!`` is not a comment."""

C_COMMENT = re.compile(r"""("(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')|/\*.*?\*/|//[^\n]*""", re.DOTALL)
"""A comment of C, or a text, which may hold what looks like one."""

LAYOUT = frozenset({tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER})

BLOCKS = {tokenize.INDENT: "\1", tokenize.DEDENT: "\2"}
"""The tokens for the begin and the end of an indented block, at any depth in spaces."""

BEGINS = frozenset(number for number, name in tokenize.tok_name.items() if name in ("FSTRING_START", "TSTRING_START"))
ENDS = frozenset(number for number, name in tokenize.tok_name.items() if name in ("FSTRING_END", "TSTRING_END"))
"""The tokens around an f-string since Python 3.12; before, it is one token."""

PLAIN = re.compile(r"[bBrRuU]*['\"]")
"""The begin of a string that runs no code."""


@lru_cache(maxsize=1024)
def without_comments(path: str, content: bytes) -> bytes:
    """Return what a file says without its comments; one that cannot be read as what its name says, as it is.

    Args:
        path: Its path in the build context; the kind of a file without an ending is in its first line.
        content: Its bytes.
    """
    try:
        text = content.decode()
        return _reader_of(path, text)(text).encode()
    except (SyntaxError, ValueError, tokenize.TokenError):
        return content


def _reader_of(path: str, text: str) -> Callable[[str], str]:
    name = path.rsplit("/", 1)[-1]
    found = INTERPRETER.match(text)
    kind = name.rsplit(".", 1)[1] if "." in name else found[1] if found else name
    return READERS.get(name) or READERS.get(kind, str)


def _python(text: str) -> str:
    """Return the tokens of a program. A statement that is only a string does nothing, unless docstrings are read."""
    lines = re.split(r"(?<=\n)", text)
    silent = "__doc__" not in text
    kept: list[str] = []
    statement: list[str] = []
    begins: list[tuple[int, int]] = []
    for token in tokenize.generate_tokens(iter(lines).__next__):
        if token.type in BEGINS:
            begins.append(token.start)
        if begins:
            if token.type in ENDS:
                begin = begins.pop()
                if not begins:
                    statement.append(_between(lines, begin, token.end))
        elif token.type in BLOCKS:
            kept.append(BLOCKS[token.type])
        elif token.type == tokenize.NEWLINE:
            if not (silent and all(map(PLAIN.match, statement))):
                kept += [*statement, "\n"]
            statement = []
        elif token.type not in LAYOUT:
            statement.append(token.string)
    return "\0".join(kept)


def _between(lines: list[str], begin: tuple[int, int], end: tuple[int, int]) -> str:
    """Return the text between two places, each a line from 1 on and a column."""
    text = "".join(lines[begin[0] - 1 : end[0]])
    return text[begin[1] : len(text) - len(lines[end[0] - 1]) + end[1]]


def _lines(text: str) -> str:
    """Return a text without the lines that are comments; what follows a heredoc may be the heredoc's own text."""
    head, mark, rest = text.partition("<<")
    return COMMENT_LINE.sub("", head) + mark + rest


def _c(text: str) -> str:
    return re.sub(r"\s*\n", "\n", C_COMMENT.sub(lambda found: found[1] or " ", text)).lstrip()


def _pyproject(text: str) -> str:
    """Return the build settings of a distribution, without those of linters and tests."""
    content = tomllib.loads(text)
    builders = [
        each.lower().replace("-", "_") for each in content.get("build-system", {}).get("requires", ["setuptools"])
    ]
    tools = {
        name: settings
        for name, settings in content.pop("tool", {}).items()
        if any(builder.startswith(name.lower().replace("-", "_")) for builder in builders)
    }
    return json.dumps(content | {"tool": tools}, default=str)


READERS: dict[str, Callable[[str], str]] = {
    "py": _python,
    "python": _python,
    "pyproject.toml": _pyproject,
    "c": _c,
    "sh": _lines,
    "conf": _lines,
    "Dockerfile": _lines,
}
"""The reader of a file, by its name, its ending, or its interpreter."""
