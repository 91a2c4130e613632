"""How bad a vulnerability is: CVSS vectors where an advisory has one, else the word that its database gives it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cvss import CVSS2, CVSS3, CVSS4, CVSSError

from trainworks.vulnerabilities import LEVELS

WORDS: Mapping[str, str] = {
    "critical": "critical",
    "high": "high",
    "important": "high",
    "medium": "medium",
    "moderate": "medium",
    "low": "low",
    "negligible": "negligible",
    "unimportant": "negligible",
}
"""Words of GitHub, Debian and Ubuntu; every other one (``not yet assigned``, ``end-of-life``) says nothing."""

CALCULATORS = {
    "CVSS_V4": (CVSS4, "CVSSv4"),
    "CVSS_V3": (CVSS3, "CVSSv3"),
    "CVSS_V2": (CVSS2, "CVSSv2"),
}
"""By OSV's name of a kind of score, the best first: its calculator, and CycloneDX's name."""

MALICIOUS = "MAL-"
"""How identifiers of packages begin that were made to do harm; they have no score."""


@dataclass(frozen=True, kw_only=True)
class Rating:
    """How bad it is; ``score`` from 0 to 10 and ``vector`` only where the level comes from one."""

    level: str = "unknown"
    score: float | None = None
    vector: str = ""
    method: str = ""

    @property
    def key(self) -> tuple[int, float]:
        """What ratings are sorted by, worst first."""
        return LEVELS.index(self.level), -(self.score or 0)


def rate(identifier: str, scores: Iterable[tuple[str, str]], words: Sequence[str]) -> Rating:
    """Return the rating of one advisory.

    Args:
        identifier: The advisory's.
        scores: Kinds and scores, as OSV has them; a vector that cannot be read counts as none.
        words: What databases say besides.
    """
    given = dict(scores)
    # Ubuntu puts its word where others have a vector.
    said = [WORDS[word.lower()] for word in (*words, *given.values()) if word.lower() in WORDS]
    if "negligible" in said:
        # The distribution knows how it builds and uses the package; a score speaks of the worst case anywhere.
        return Rating(level="negligible")
    if identifier.startswith(MALICIOUS):
        return Rating(level="critical")
    for kind, (calculator, method) in CALCULATORS.items():
        try:
            # Version 4 has one score only; those of the others are first the base score.
            read = calculator(given[kind])
            score = float(read.base_score if kind == "CVSS_V4" else read.scores()[0])
        except (KeyError, CVSSError):
            continue
        return Rating(level=level_of(score), score=score, vector=given[kind], method=method_of(given[kind], method))
    return min((Rating(level=level) for level in said), key=lambda each: each.key, default=Rating())


def level_of(score: float) -> str:
    """Return the word for a score (CVSS 3.1, section 5, and 4.0, section 6)."""
    bounds = ((9.0, "critical"), (7.0, "high"), (4.0, "medium"), (0.1, "low"))
    return next((level for bound, level in bounds if score >= bound), "negligible")


def method_of(vector: str, method: str) -> str:
    """Return CycloneDX's name of a vector's kind."""
    return "CVSSv31" if vector.startswith("CVSS:3.1/") else method


def worst(ratings: Iterable[Rating]) -> Rating:
    """Return the rating of what several advisories rate: negligible where any says so, else the worst."""
    found = sorted(ratings, key=lambda each: each.key)
    return found[-1] if found[-1].level == "negligible" else found[0]
