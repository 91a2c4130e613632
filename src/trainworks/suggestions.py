"""Find the known name that a person meant by an unknown one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

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


def nearest(word: str, valid_names: Iterable[str]) -> str:
    """Return the valid name that a person meant by a word; ``""`` if none is near enough."""
    return next(iter(alike(word, valid_names)), "")


def alike(word: str, valid_names: Iterable[str]) -> list[str]:
    """Return the valid names that a person may have meant by a word, the nearest first.

    In this order: the same name written otherwise, the name of a synonym (``WORDS``), names that
    begin with the word or that the word begins with, names that contain the word, and names with
    nearly the same letters. Of versions that begin with the word, the last one is first; other
    versions with nearly the same digits can be years apart.
    """
    # The plain form of each name, in which names and words are compared.
    name_by_form: dict[str, str] = {}
    for name in valid_names:
        name_by_form.setdefault(_plain(name), name)
    plain_word = _plain(word)
    matches = [plain_word, WORDS.get(plain_word, "")]
    if plain_word[:1].isdigit():
        if plain_word.isdigit():
            # 121 for cu121, 311 for 3.11: whichever of them is a name.
            matches += [f"{plain_word[:2]}.{plain_word[2:]}", f"{plain_word[0]}.{plain_word[1:]}"]
        matches += _alike_versions(plain_word, list(name_by_form))
        # cu121 for the target whose name has cu121 as a part
        if len(word) >= PART:
            matches += [form for form in name_by_form if word.lower() in form]
    elif len(plain_word) > 1:
        matches += _alike_names(plain_word, list(name_by_form))
    return [name_by_form[form] for form in dict.fromkeys(matches) if form in name_by_form]


def _alike_versions(version: str, forms: Sequence[str]) -> Iterator[str]:
    """Yield the versions that continue a version, or that the version continues, last one first."""
    for form in reversed(forms):
        if not form[:1].isdigit():
            continue
        if f"{form}.".startswith(f"{version}.") or version.startswith(f"{form}."):
            yield form


def _alike_names(word: str, forms: Sequence[str]) -> list[str]:
    """Return the names that resemble a word, the nearest first."""
    import difflib  # takes time, and only an error needs it

    longer = [form for form in forms if form.startswith(word)]
    shorter = [form for form in forms if word.startswith(form) and len(form) > 2]
    containing = [form for form in forms if len(word) >= PART and word in form]
    contained = [form for form in forms if len(form) >= PART and form in word]
    close = difflib.get_close_matches(word, forms, n=len(forms) or 1, cutoff=LIKE_ENOUGH)
    longer.sort(key=len)
    shorter.sort(key=len, reverse=True)
    containing.sort(key=len)
    return [*longer, *shorter, *containing, *contained, *close]


def _plain(name: str) -> str:
    """Return a name in small letters without dashes before it.

    A version is reduced to its numbers: ``12.1`` for ``cu121``.
    """
    plain = name.lower().replace("_", "-").lstrip("-")
    version = _VERSION.fullmatch(plain)
    if version is None:
        return plain
    kind, numbers = version.groups()
    # cu121 and py311 are written without a dot.
    major_digits = {"cu": 2, "cuda": 2, "py": 1, "python": 1}.get(kind, 0)
    if major_digits and numbers[major_digits:].isdigit():
        return f"{numbers[:major_digits]}.{numbers[major_digits:]}"
    return numbers
