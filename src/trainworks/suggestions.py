"""Find the known name that a person meant by an unknown one."""

from __future__ import annotations

import re
from collections.abc import Iterable

LIKE_ENOUGH = 0.65
"""Below this share of common letters a suggestion confuses more than it helps."""

PART = 4
"""A word of fewer letters is not looked for inside of names."""

WORDS = {
    "version": "framework-version",
    "torch-version": "framework-version",
    "pytorch-version": "framework-version",
    "torch": "pytorch",
    "tf": "tensorflow",
    "x86-64": "amd64",
    "x86": "amd64",
    "aarch64": "arm64",
    "podman": "buildah",
    "filter": "only",
}
"""Words that people use for a name that is written otherwise, both in small letters."""

_VERSION = re.compile(r"(v|cu|cuda|py|python)?-?(\d+(?:\.\d+)*)(?:\+.*)?")


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the known name that is meant by a word; ``""`` if none is near enough."""
    return next(iter(alike(word, known)), "")


def alike(word: str, known: Iterable[str]) -> list[str]:
    """Return the known names that may be meant by a word, the nearest first.

    In this order: the same name written otherwise, the name that people call so, names that begin
    with the word or the word with them, names that contain it, and names with nearly the same
    letters. Of versions that begin so, the last one is first; other versions with nearly the same
    digits can be years apart.
    """
    names: dict[str, str] = {}
    for name in known:
        names.setdefault(_plain(name), name)
    asked = _plain(word)
    found = [each for each in (asked, WORDS.get(asked, "")) if each in names]
    if asked[:1].isdigit():
        ends = {each: f"{each}." for each in reversed(names) if each[:1].isdigit()}
        found += [
            each
            for each, end in ends.items()
            if end.startswith(f"{asked}.") or asked.startswith(end)
        ]
    elif len(asked) > 1:
        import difflib  # takes time, and only an error needs it

        found += sorted((each for each in names if each.startswith(asked)), key=len)
        found += sorted(
            (each for each in names if asked.startswith(each) and len(each) > 2),
            key=len,
            reverse=True,
        )
        found += sorted((each for each in names if len(asked) >= PART and asked in each), key=len)
        found += [each for each in names if len(each) >= PART and each in asked]
        found += difflib.get_close_matches(asked, names, n=len(names) or 1, cutoff=LIKE_ENOUGH)
    return [names[each] for each in dict.fromkeys(found)]


def _plain(name: str) -> str:
    """Return a name in small letters without dashes before it.

    Of a version its numbers: ``12.1`` of ``cu121``.
    """
    plain = name.lower().replace("_", "-").lstrip("-")
    version = _VERSION.fullmatch(plain)
    if version is None:
        return plain
    kind, numbers = version.groups()
    major = {"cu": 2, "py": 1}.get(kind, 0)
    return (
        f"{numbers[:major]}.{numbers[major:]}" if major and numbers[major:].isdigit() else numbers
    )
