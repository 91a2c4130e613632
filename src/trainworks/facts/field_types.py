"""Forms of the texts of rows, as types of their fields.

Every text that reaches a Dockerfile has one.

An empty text has every form: where a field must be given, ``schema`` refuses it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True)
class Form:
    """The form of a text: an expression for the complete text, and its words for people."""

    pattern: re.Pattern[str]
    words: str


def _form(pattern: str, words: str) -> Form:
    return Form(re.compile(pattern), words)


_PART = r"(?!\.{1,2}(/|\Z))[^\s/:*?\[\]\"'$`\\]+"
_WILD_PART = r"(?!\.{1,2}(/|\Z)|\*\*)[^\s/\"'$`\\]+"
_REAL = "(?!0{39})"
"""Ahead of a sum: zeros stand for one that has yet to be looked up."""
_BOUNDS = r"(<=|>=|==|!=|<|>)([0-9]|\{cuda\})[A-Za-z0-9.+]*"
_LIBRARY = r"[A-Za-z0-9._+{}-]+"

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
"""The name of an environment variable."""
FILE = _form(r"[A-Za-z0-9][A-Za-z0-9._+!~-]*", "the name of a file, without a folder")

AbsolutePath = Annotated[str, _form(rf"(/{_PART})+", "an absolute path, without `..`")]
"""Without ``.``, ``..`` and a slash at its end: one file has one name."""
PathPattern = Annotated[
    str,
    _form(
        rf"/{_PART}((/{_WILD_PART})*|/{_PART}(/{_WILD_PART})*/\*\*)",
        "an absolute path without `..`, in which `*` may stand behind the first folder, "
        "and `/**` at the end behind two",
    ),
]
"""Paths: ``*`` stays within a folder that is named, ``/**`` is for all below two folders that are.

One that begins with ``*``, or is for everything in ``/usr``, would switch off
the test that every file has an owner.
"""
SomePath = Annotated[str, _form(r"/[^\s\"'$`\\]+", "an absolute path, in which `*` may stand")]
File = Annotated[str, FILE]
Url = Annotated[str, _form(r"https:/{2}[A-Za-z0-9._~:/?#@!&*+,;=%-]+", "an https:// URL")]
"""Without what a shell reads as its own, quotes and brackets: recipes write
addresses into commands.
"""
Snapshot = Annotated[
    str,
    _form(
        r"https?:/{2}(?=.*\{archive\})(?=.*\{date\})[A-Za-z0-9._~:/@%{}-]+",
        "an http:// or https:// URL with {archive} and {date}",
    ),
]
Package = Annotated[
    str,
    _form(
        r"[A-Za-z0-9]([A-Za-z0-9.+_-]*[A-Za-z0-9+])?", "the name of a package of the distribution"
    ),
]
"""apt-get(8) reads ``name-`` as a package to remove."""
Name = Annotated[str, _form(r"[a-z0-9]+([.-][a-z0-9]+)*", "lower-case letters, digits and dashes")]
Group = Annotated[str, _form(r"[a-z_][a-z0-9_-]*", "the name of a group of users")]
Digits = Annotated[str, _form(r"[0-9]+(\.[0-9]+)*", "numbers and dots")]
Python = Annotated[str, _form(r"3\.[0-9]+", "MAJOR.MINOR, for example '3.11'")]
Minor = Annotated[str, _form(r"[0-9]+\.[0-9]+", "MAJOR.MINOR, for example '2.4'")]
Version = Annotated[
    str, _form(r"[0-9]+(\.[0-9]+)*([.+-]?[a-z0-9]+)*", "a version, for example '2.4.1'")
]
Release = Annotated[str, _form(r"[A-Za-z0-9][A-Za-z0-9._+~-]*", "a version, for example '2.4.1'")]
"""As vendors write it."""
Image = Annotated[
    str,
    _form(
        r"[a-z0-9][A-Za-z0-9._/-]*(:[0-9]+/[A-Za-z0-9._/-]+)?(:[A-Za-z0-9_][A-Za-z0-9._-]*)?",
        "an image's name, for example 'debian:bookworm-slim'",
    ),
]
Sha256 = Annotated[str, _form(rf"{_REAL}[0-9a-f]{{64}}", "64 hexadecimal digits, not zeros")]
Digest = Annotated[
    str, _form(rf"sha256:{_REAL}[0-9a-f]{{64}}", "'sha256:' and 64 hexadecimal digits, not zeros")
]
Inputs = Annotated[str, _form(r"sha256:[0-9a-f]{64}", "'sha256:' and 64 hexadecimal digits")]
Commit = Annotated[str, _form(rf"{_REAL}[0-9a-f]{{40}}", "40 hexadecimal digits, not zeros")]
Fingerprint = Annotated[str, _form(r"[0-9A-F]{40}", "40 upper-case hexadecimal digits")]
Tag = Annotated[str, _form(r"[A-Za-z0-9][A-Za-z0-9._/+-]*", "the name of a git tag")]
Flag = Annotated[
    str, _form(r"-{0,2}[A-Za-z0-9][A-Za-z0-9._=/:+-]*", "one option or word, without blanks")
]
Day = Annotated[str, _form(r"[0-9]{4}-[0-9][0-9]-[0-9][0-9]", "a day, for example '2026-11-22'")]
Second = Annotated[
    str,
    _form(
        r"[0-9]{4}-[01][0-9]-[0-3][0-9]T[0-2][0-9]:[0-5][0-9]:[0-5][0-9]Z",
        "a time such as 2026-11-25T02:10:59Z",
    ),
]
Cell = Annotated[
    str,
    _form(
        r"cpu|neuron|cu[0-9]{3}", "'cpu', 'neuron', or 'cu' and three digits, for example 'cu121'"
    ),
]
WheelSuffix = Annotated[str, _form(r"cu[0-9]+", "'cu' and digits")]
Mode = Annotated[str, _form(r"[0-7]{4}", "four octal digits, for example '0640'")]
Compute = Annotated[
    str, _form(r"[0-9]+[a-z]?", "an architecture as nvcc names it, without the dot: '80'")
]
Distribution = Annotated[
    str,
    _form(r"[a-z0-9]+(-[a-z0-9]+)*", "a normalised name: lower-case letters, digits and dashes"),
]
Distributions = Annotated[
    str,
    _form(r"[a-z0-9*]+(-[a-z0-9*]+)*", "the name of a Python distribution, in which `*` may stand"),
]
AnyDistribution = Annotated[
    str, _form(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", "the name of a Python distribution")
]
Requirement = Annotated[
    str,
    _form(
        rf"[A-Za-z0-9{{][A-Za-z0-9._*{{}}-]*(\[[A-Za-z0-9._,-]+\])?({_BOUNDS}(,{_BOUNDS})*)?",
        "the name of a Python distribution, with extras or a range such as <1.24 behind it",
    ),
]
Module = Annotated[
    str, _form(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*", "the name of a Python module")
]
Soname = Annotated[str, _form(_LIBRARY, "the name of a library")]
Library = Annotated[
    str, _form(rf"/[^\s\"'$`\\]+|{_LIBRARY}", "the name or the absolute path of a library")
]
FabricName = Annotated[
    str,
    _form(
        r"(?!PATH\Z|LD_|PYTHON|BASH_ENV\Z|ENV\Z|IFS\Z)[A-Z_][A-Z0-9_]*",
        "the name of a variable in capitals,"
        " and not one that decides which programs and libraries run",
    ),
]
FabricValue = Annotated[
    str, _form(r"[A-Za-z0-9._:/,+-]+", "one word, without blanks and quotes: it goes to mpirun")
]

# Numbers up to several times what the largest host or image has.
Gpus = Annotated[int, range(257)]
NeuronCores = Annotated[int, range(1025)]
Gibibytes = Annotated[int, range(262_145)]
Budget = Annotated[int, range(1, 1_000_001)]
