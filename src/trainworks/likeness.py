"""Find the known name that a person meant by an unknown one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

LIKE_ENOUGH = 0.65
"""Below this share of common letters a suggestion confuses more than it helps."""

PREFIX = 2
"""A word of fewer letters is not looked for at the beginning of names."""

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
"""Words that people use for a name that is written otherwise, both as ``_plain`` returns them."""

_VERSION = re.compile(r"(v|cu|cuda|py|python)?-?(\d+(?:\.\d+)*)(?:\+.*)?")
_KINDS = {"cuda": "cu", "python": "py", "v": ""}


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the known name that is meant by a word; ``""`` if none is near enough."""
    return next(iter(alike(word, known)), "")


def alike(word: str, known: Iterable[str]) -> list[str]:
    """Return the known names that may be meant by a word, the nearest first.

    In this order: the same name written otherwise, the name that people call so, the nearest version, names that begin
    with the word or the word with them, names that contain it, and names with nearly the same letters. Of equals the
    first one is first.
    """
    ranks = [(rank, name) for name in known for rank in (_rank(word, name),) if rank]
    ranks.sort(key=lambda each: each[0], reverse=True)
    return [name for _, name in ranks]


def fits(word: str, name: str) -> bool:
    """Return whether a word says nothing else than a name: it is written otherwise, or leaves out the end."""
    rank = _rank(word, name)
    return rank[:1] in ((6,), (5,), (3,)) or (rank[:1] == (4,) and rank[2] == 0)


def _rank(word: str, name: str) -> tuple[float, ...]:
    """Return how near a name is to a word, the nearer the greater; ``()`` if it is not meant."""
    asked, plain = _plain(word), _plain(name)
    if asked == plain:
        return (6,)
    if WORDS.get(asked) == plain:
        return (5,)
    if _VERSION.fullmatch(asked):
        # Versions with nearly the same digits can be years apart.
        return _version_rank(asked, plain)
    if len(asked) >= PREFIX and plain.startswith(asked):
        return 3, -len(plain)
    if len(plain) > PREFIX and asked.startswith(plain):
        return 2, len(plain)
    if (len(asked) >= PART and asked in plain) or (len(plain) >= PART and plain in asked):
        return 1, -len(plain)
    import difflib  # takes time, and only an error needs it

    ratio = difflib.SequenceMatcher(None, asked, plain).ratio()
    return (0, ratio, _shared(asked, plain)) if ratio >= LIKE_ENOUGH else ()


def _plain(name: str) -> str:
    return name.lower().replace("_", "-").lstrip("-")


def _shared(one: Sequence[object], other: Sequence[object]) -> int:
    """Return how many items two sequences begin with in common."""
    shorter = min(len(one), len(other))
    return next((place for place in range(shorter) if one[place] != other[place]), shorter)


def _version_rank(word: str, name: str) -> tuple[float, ...]:
    """Return how near two versions are: by the parts that they share, then by the first one that differs.

    What a word leaves open (``2.4``, ``cu12``) any version has, and the newest is the nearest.
    """
    asked, found = _VERSION.fullmatch(word), _VERSION.fullmatch(name)
    if not asked or not found:
        return ()
    one, other = (_KINDS.get(each[1] or "", each[1] or "") for each in (asked, found))
    if one not in ("", other) and not (one == "py" and not other):
        return ()
    wanted, there = _numbers(asked[2], other or one), _numbers(found[2], other)
    shared = _shared(wanted, there)
    if shared == min(len(wanted), len(there)):
        return (4, shared, 0, 0, *there)
    newer = there > wanted
    return (4, shared, -abs(wanted[shared] - there[shared]), newer, *(-each if newer else each for each in there))


def _numbers(text: str, kind: str) -> tuple[int, ...]:
    """Return the numbers of a version: ``12.1``; with its kind also ``121`` (``cu``) and ``311`` (``py``)."""
    if kind == "cu" and text.isdigit() and len(text) > len("12"):
        return int(text[:-1]), int(text[-1])
    if kind == "py" and text.isdigit() and len(text) > 1:
        return int(text[0]), int(text[1:])
    return tuple(int(part) for part in text.split("."))
