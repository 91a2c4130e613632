"""The text of a requirements file, as pip reads it. The launcher's install.py has the same rule for jobs. Pure."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Mapping

_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    # Before UTF-16, whose little-endian mark is the beginning of this one.
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_CODING = re.compile(rb"coding[:=]\s*([-\w.]+)")
_COMMENT = re.compile(r"(^|\s+)#.*$")
_VARIABLE = re.compile(r"\$\{([A-Z0-9_]+)\}")


def decode(content: bytes) -> str:
    """Return the text of a requirements file: by its byte order mark, its coding line (PEP 263), or else UTF-8.

    Raises:
        ValueError: It has another encoding, or names one that does not exist.
    """
    mark, encoding = next(((mark, name) for mark, name in _MARKS if content.startswith(mark)), (b"", ""))
    if not encoding:
        comments = (line for line in content.split(b"\n")[:2] if line.startswith(b"#"))
        coding = next(filter(None, map(_CODING.search, comments)), None)
        encoding = coding[1].decode("ascii", "replace") if coding else "utf-8"
    try:
        return content[len(mark) :].decode(encoding)
    except LookupError:
        raise ValueError(f"its coding line names {encoding}, which is not an encoding") from None
    except UnicodeError:
        raise ValueError(
            f"it is not {encoding.upper()}: save it as UTF-8, or name its encoding in the first line, such as "
            "# -*- coding: latin-1 -*-"
        ) from None


def logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield lines with the number of their first part: a backslash joins lines; comments and empty lines are left out.

    >>> list(logical_lines("# head\\nsix  # why\\npandas \\\\\\n >=2\\n"))
    [(2, 'six'), (3, 'pandas  >=2')]
    """
    parts: list[str] = []
    start = 0
    for number, raw in enumerate(text.splitlines(), start=1):
        comment = _COMMENT.match(raw)
        if not parts:
            start = number
        if raw.endswith("\\") and not comment:
            parts.append(raw.strip("\\"))
            continue
        yield from _without_comment(start, "".join((*parts, f" {raw}" if comment else raw)))
        parts = []
    if parts:
        yield from _without_comment(start, "".join(parts))


def _without_comment(number: int, line: str) -> Iterator[tuple[int, str]]:
    if kept := _COMMENT.sub("", line).strip():
        yield number, kept


def with_variables(line: str, environment: Mapping[str, str]) -> str:
    """Return a line with the variables that it names as ``${NAME}``; one that is empty or missing stays as it is."""
    return _VARIABLE.sub(lambda found: environment.get(found[1]) or found[0], line)


def without_credentials(line: str) -> str:
    """Return a line for a message: without the users and passwords of addresses in it."""
    return re.sub(r"(://)[^/@\s]*@", r"\1", line)
