"""Turns the names of licences into SPDX expressions, if a name means exactly one licence."""

from __future__ import annotations

import re
from collections.abc import Sequence

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

SAME = {"expat": "MIT", "mit license": "MIT", "artistic": "Artistic-1.0"}
"""Names with one meaning that SPDX spells otherwise: Debian's (DEP 5) and that
of the Python classifier for MIT.
"""

GNU = re.compile(r"(A?GPL|LGPL|GFDL)-(\d+)(?:\.(\d+))?(\+?)", re.IGNORECASE)
"""Debian's names of GNU's licences: ``GPL-2+``."""

LONGEST_NAME = 100
"""Characters: a longer text is a licence's text and not its name."""


def spdx_expression(name: str) -> str:
    """Return the SPDX expression of a licence's name.

    ``""`` if the name is not certain to mean one.
    """
    text = re.sub(r"\s+", " ", name).strip()
    # DEP 5 writes "or" and "and" in small letters; a comma changes how they bind, "with" needs
    # SPDX's own exceptions.
    if " with " in text.lower() or "," in text:
        words = [text]
    else:
        parts = re.split(r"(\(|\)| or | and )", text, flags=re.IGNORECASE)
        words = [part for part in parts if part.strip()]
    expression = " ".join(_normalise_name(word.strip()) for word in words)
    try:
        return str(canonicalize_license_expression(expression))
    except InvalidLicenseExpression:
        return ""


def _normalise_name(word: str) -> str:
    """Return SPDX's spelling of a licence's name: ``GPL-2+`` is ``GPL-2.0-or-later``.

    A name that is not known otherwise is returned unchanged.
    """
    match = GNU.fullmatch(word)
    if match is None:
        return SAME.get(word.lower(), word)
    family, major, minor, plus = match.groups()
    scope = "or-later" if plus else "only"
    return f"{family.upper()}-{major}.{minor or 0}-{scope}"


def python_licenses(expression: str, name: str, classifiers: Sequence[str]) -> tuple[str, ...]:
    """Return the licences in the metadata of a Python distribution: the newest
    field with a value wins.

    Args:
        expression: ``License-Expression``.
        name: ``License``, which may be a whole text; the classifiers say it shorter then.
        classifiers: The last words of those that are about licences.
    """
    if expression:
        return (expression,)
    # Tools write UNKNOWN where the field is missing.
    is_name = bool(name) and name.upper() != "UNKNOWN"
    is_text = "\n" in name or len(name) >= LONGEST_NAME
    if is_name and not is_text:
        return (name,)
    return tuple(classifiers)


def join_expressions(expressions: Sequence[str]) -> str:
    """Return one SPDX expression that demands all of several: ``MIT AND (A OR B)``."""
    if len(expressions) == 1:
        return expressions[0]
    # AND binds closer than OR.
    parts = [f"({text})" if " OR " in text else text for text in expressions]
    return " AND ".join(parts)
