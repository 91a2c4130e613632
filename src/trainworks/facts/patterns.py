"""Patterns of the texts of rows; every text that reaches a Dockerfile has one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trainworks.facts.rows import (
    Artifact,
    Base,
    BaseImage,
    Built,
    Component,
    Cuda,
    EndOfPatch,
    FabricVariable,
    GeneratedFiles,
    Instance,
    LockedArchive,
    LockedArtifact,
    LockedBaseImage,
    LockedPackage,
    PrivilegedFiles,
    Rule,
    Stack,
    TargetRow,
)

Patterns = Mapping[str, tuple[re.Pattern[str], str]]
"""By key: the pattern, and how a person would say it. Each text of a list and each value of a table must match."""

_PART = r"(?!\.{1,2}(/|\Z))[^\s/:*?\[\]\"'$`\\]+"
_WILD_PART = r"(?!\.{1,2}(/|\Z)|\*\*)[^\s/\"'$`\\]+"

PATH = re.compile(rf"(/{_PART})+\Z")
"""An absolute path, without ``.``, ``..`` and a slash at its end: one file has one name."""

PATH_PATTERN = re.compile(rf"/{_PART}((/{_WILD_PART})*|/{_PART}(/{_WILD_PART})*/\*\*)\Z")
"""Paths: ``*`` stays within a folder that is named, ``/**`` is for all below two folders that are.

One that begins with ``*``, or is for everything in ``/usr``, would switch off the test that every file has an owner.
"""

_PATH = (PATH, "an absolute path, without `..`")
_PATH_PATTERN = (
    PATH_PATTERN,
    "an absolute path without `..`, in which `*` may stand behind the first folder, and `/**` at the end behind two",
)
_MODULE = (re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*\Z"), "the name of a Python module")

FRONT_MATTER_PATTERNS: Patterns = {
    "path": (PATH, "the absolute path of a folder"),
    "libraries": (PATH, "the absolute path of a folder"),
    "programs": (PATH, "the absolute path of a program"),
    "owns": _PATH_PATTERN,
    "removes": _PATH_PATTERN,
    "imports": _MODULE,
}
"""Patterns of the texts of a front matter, by key, as in ``PATTERNS``."""

_LIBRARY = r"[A-Za-z0-9._+{}-]+"

CHECK_PATTERNS: Patterns = {
    "path": (re.compile(r"/[^\s\"'$`\\]+\Z"), "an absolute path, in which `*` may stand"),
    "command": (re.compile(r"(?s).+"), "a word of a command"),
    "arguments": (re.compile(r"(?s).+"), "a word of a command"),
    "module": _MODULE,
    "distribution": (re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?\Z"), "the name of a Python distribution"),
    "library": (re.compile(rf"(/[^\s\"'$`\\]+|{_LIBRARY})\Z"), "the name or the absolute path of a library"),
    "libraries": (re.compile(rf"(/[^\s\"'$`\\]+|{_LIBRARY})\Z"), "the name or the absolute path of a library"),
    "soname": (re.compile(rf"{_LIBRARY}\Z"), "the name of a library"),
    "provided": (re.compile(rf"{_LIBRARY}\Z"), "the name of a library"),
}
"""Patterns of the texts of checks in a front matter, by key, as in ``PATTERNS``."""

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
"""The name of an environment variable."""

NAME = re.compile(r"[a-z0-9]+([.-][a-z0-9]+)*\Z")
_REAL = "(?!0{39})"
"""Ahead of a sum: zeros stand for one that has yet to be looked up."""

SHA256 = re.compile(rf"{_REAL}[0-9a-f]{{64}}\Z")
DIGEST = re.compile(rf"(sha256:{_REAL}[0-9a-f]{{64}})?\Z")
OPTIONAL_SHA256 = re.compile(rf"({_REAL}[0-9a-f]{{64}})?\Z")
COMMIT = re.compile(rf"({_REAL}[0-9a-f]{{40}})?\Z")
FINGERPRINT = re.compile(r"([0-9A-F]{40})?\Z")
URL = re.compile(r"(https:/{2}[A-Za-z0-9._~:/?#@!&*+,;=%-]+)?\Z")
"""Without what a shell reads as its own, quotes and brackets: recipes write addresses into commands."""
SNAPSHOT = re.compile(r"(https?:/{2}(?=.*\{archive\})(?=.*\{date\})[A-Za-z0-9._~:/@%{}-]+)?\Z")
SECOND = re.compile(r"[0-9]{4}-[01][0-9]-[0-3][0-9]T[0-2][0-9]:[0-5][0-9]:[0-5][0-9]Z\Z")
VERSION = re.compile(r"[0-9]+(\.[0-9]+)*([.+-]?[a-z0-9]+)*\Z")
PYTHON = re.compile(r"3\.[0-9]+\Z")
OPTIONAL_NAME = re.compile(r"([a-z0-9]+([.-][a-z0-9]+)*)?\Z")
IMAGE = re.compile(r"[a-z0-9][A-Za-z0-9._/-]*(:[0-9]+/[A-Za-z0-9._/-]+)?(:[A-Za-z0-9_][A-Za-z0-9._-]*)?\Z")
OPTIONAL_IMAGE = re.compile(rf"({IMAGE.pattern.removesuffix(chr(92) + 'Z')})?\Z")
DIGITS = re.compile(r"[0-9]+(\.[0-9]+)*\Z")
OPTIONAL_DIGITS = re.compile(r"([0-9]+(\.[0-9]+)*)?\Z")
RELEASE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+~-]*\Z")
PACKAGE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.+_-]*[A-Za-z0-9+])?\Z")
"""apt-get(8) reads ``name-`` as a package to remove."""
FLAG = re.compile(r"-{0,2}[A-Za-z0-9][A-Za-z0-9._=/:+-]*\Z")
BOUNDS = r"(<=|>=|==|!=|<|>)([0-9]|\{cuda\})[A-Za-z0-9.+]*"
REQUIREMENT = re.compile(rf"[A-Za-z0-9{{][A-Za-z0-9._*{{}}-]*(\[[A-Za-z0-9._,-]+\])?({BOUNDS}(,{BOUNDS})*)?\Z")
DISTRIBUTION = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*\Z")
FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+!~-]*\Z")

_DAY = (re.compile(r"[0-9]{4}-[0-9][0-9]-[0-9][0-9]\Z"), "a day, for example '2026-11-22'")
_PACKAGES = (PACKAGE, "the name of a package of the distribution")
_DISTRIBUTIONS = (
    re.compile(r"[a-z0-9*]+(-[a-z0-9*]+)*\Z"),
    "the name of a Python distribution, in which `*` may stand",
)
_IMAGE = (IMAGE, "an image's name, for example 'debian:bookworm-slim'")
_RELEASE = (RELEASE, "a version, for example '2.4.1'")
_REQUIREMENT = (REQUIREMENT, "the name of a Python distribution, with extras or a range such as <1.24 behind it")

PATTERNS: Mapping[type[Any], Patterns] = {
    Base: {
        "name": (NAME, "lower-case letters, digits and dashes"),
        "suite": (NAME, "lower-case letters, digits and dashes"),
        "version": (DIGITS, "numbers and dots"),
        "glibc": (DIGITS, "numbers and dots"),
        "image": _IMAGE,
        "digest": (DIGEST, "'sha256:' and 64 hexadecimal digits, not zeros, or absent"),
        "python": (PYTHON, "MAJOR.MINOR, for example '3.11'"),
        "pythons": (PATH, "the absolute path of an interpreter"),
        "archive": (URL, "an https:// URL, or absent"),
        "archives": (NAME, "lower-case letters, digits and dashes"),
        "snapshot": (SNAPSHOT, "an http:// or https:// URL with {archive} and {date}, or absent"),
    },
    Built: {
        "inputs": (re.compile(r"sha256:[0-9a-f]{64}\Z"), "'sha256:' and 64 hexadecimal digits"),
        "date": _DAY,
    },
    EndOfPatch: {
        "version": (re.compile(r"[0-9]+\.[0-9]+\Z"), "MAJOR.MINOR, for example '2.4'"),
        "date": _DAY,
        "successor": (re.compile(r"([0-9]+\.[0-9]+)?\Z"), "MAJOR.MINOR, for example '2.5', or absent"),
    },
    BaseImage: {
        "name": _IMAGE,
        "alternatives": _IMAGE,
        "digest": (DIGEST, "'sha256:' and 64 hexadecimal digits, not zeros, or absent"),
    },
    Cuda: {
        "name": (
            re.compile(r"(cpu|neuron|cu[0-9]{3})\Z"),
            "'cpu', 'neuron', or 'cu' and three digits, for example 'cu121'",
        ),
        "version": (OPTIONAL_DIGITS, "numbers and dots, or absent"),
        "wheel_suffix": (re.compile(r"(cu[0-9]+)?\Z"), "'cu' and digits, or absent"),
        "minimum_driver": (OPTIONAL_DIGITS, "numbers and dots, or absent"),
        "architectures": (re.compile(r"[0-9]+[a-z]?\Z"), "an architecture as nvcc names it, without the dot: '80'"),
    },
    Component: {
        "name": (NAME, "lower-case letters, digits and dashes"),
        "recipe": (OPTIONAL_NAME, "lower-case letters, digits and dashes, or absent"),
        "debian": _PACKAGES,
        "build_debian": _PACKAGES,
        "python": _REQUIREMENT,
        "python_cpu": _REQUIREMENT,
        "replaces_debian": _PACKAGES,
        "protected": _DISTRIBUTIONS,
        "replaces": _DISTRIBUTIONS,
        "companions": _DISTRIBUTIONS,
        "compiles": _DISTRIBUTIONS,
        "compiles_later": _DISTRIBUTIONS,
        "variant": (OPTIONAL_NAME, "lower-case letters, digits and dashes, or absent"),
    },
    Stack: {"components": _RELEASE},
    Artifact: {
        "name": (NAME, "lower-case letters, digits and dashes"),
        "version": _RELEASE,
        "tag": (re.compile(r"([A-Za-z0-9][A-Za-z0-9._/+-]*)?\Z"), "the name of a git tag, or absent"),
        "flags": (FLAG, "one option or word, without blanks"),
        "provides": _RELEASE,
        "together": _RELEASE,
        "url": (URL, "an https:// URL, or absent"),
        "git": (URL, "an https:// URL, or absent"),
        "signature": (URL, "an https:// URL, or absent"),
        "key": (URL, "an https:// URL, or absent"),
        "sha256": (OPTIONAL_SHA256, "64 hexadecimal digits, not zeros, or absent"),
        "commit": (COMMIT, "40 hexadecimal digits, not zeros, or absent"),
        "fingerprint": (FINGERPRINT, "40 upper-case hexadecimal digits, or absent"),
    },
    Rule: {"name": (NAME, "lower-case letters, digits and dashes")},
    FabricVariable: {
        "name": (
            re.compile(r"(?!PATH\Z|LD_|PYTHON|BASH_ENV\Z|ENV\Z|IFS\Z)[A-Z_][A-Z0-9_]*\Z"),
            "the name of a variable in capitals, and not one that decides which programs and libraries run",
        ),
        "value": (re.compile(r"[A-Za-z0-9._:/,+-]+\Z"), "one word, without blanks and quotes: it goes to mpirun"),
    },
    GeneratedFiles: {
        "paths": _PATH_PATTERN,
        "sha256": (OPTIONAL_SHA256, "64 hexadecimal digits, not zeros, or absent"),
        "copy_of": (re.compile(rf"({PATH.pattern.removesuffix(chr(92) + 'Z')})?\Z"), f"{_PATH[1]}, or absent"),
    },
    PrivilegedFiles: {"package": _PACKAGES, "paths": _PATH},
    TargetRow: {
        "version": (VERSION, "a version, for example '2.4.1'"),
        "python": (re.compile(r"(3\.[0-9]+)?\Z"), "MAJOR.MINOR, for example '3.11', or absent"),
        "versions": _RELEASE,
        "image": (OPTIONAL_IMAGE, f"{_IMAGE[1]}, or absent"),
        "builder_image": (OPTIONAL_IMAGE, f"{_IMAGE[1]}, or absent"),
        "wheel_index": (URL, "an https:// URL, or absent"),
        "limits": _REQUIREMENT,
    },
    LockedArtifact: {"sha256": (SHA256, "64 hexadecimal digits, not zeros")},
    LockedBaseImage: {
        "name": _IMAGE,
        "digest": (DIGEST, "'sha256:' and 64 hexadecimal digits, not zeros"),
    },
    LockedArchive: {
        "suite": (NAME, "lower-case letters, digits and dashes"),
        "date": (SECOND, "a time such as 2026-11-25T02:10:59Z"),
        "sha256": (SHA256, "64 hexadecimal digits, not zeros"),
        "contents": (SHA256, "64 hexadecimal digits, not zeros"),
    },
    LockedPackage: {
        "name": (DISTRIBUTION, "a normalised name: lower-case letters, digits and dashes"),
        "file": (FILE, "the name of a file, without a folder"),
        "requires": (DISTRIBUTION, "a normalised name: lower-case letters, digits and dashes"),
        "sha256": (SHA256, "64 hexadecimal digits, not zeros"),
        "version": (VERSION, "a version, for example '2.4.1'"),
    },
}
"""The pattern of a text, by row type and key, and how a person would say it.

Of a list it is each text that must, of a table each value. Everything that reaches a Dockerfile has a pattern.
"""

BOUNDED: Mapping[type[Any], Mapping[str, range]] = {
    Instance: {
        "gpus": range(257),
        "neuron_cores": range(1025),
        "efa_devices": range(257),
        "memory_gib": range(262_145),
    },
    TargetRow: {"size_budget_megabytes": range(1, 1_000_001)},
}
"""The numbers that can be meant, by row type and key: up to several times what the largest host or image has."""
