"""``build.py check DOCKERFILE``: everything that is found in files, as a report for people and for programs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from trainworks.dockerfiles.text import Dockerfile, read
from trainworks.dockerfiles.versions import Finding, versions_of
from trainworks.errors import OutputError
from trainworks.facts.rows import Facts

IGNORED = re.compile(r"\s*#\s*trainworks:\s*ignore=([a-z0-9.,-]+)\s+\S")


@dataclass(frozen=True)
class FileCheck:
    """The findings in one file, which is named as on the command line."""

    file: str
    findings: tuple[Finding, ...]

    @property
    def fits(self) -> bool:
        """Whether there is nothing but advice."""
        return all(each.severity == "advise" for each in self.findings)


def check_text(text: str, facts: Facts) -> tuple[Finding, ...]:
    """Return what is wrong in a Dockerfile, by line; what a comment ignores is left out."""
    document = read(text)
    ignored = {*_ignored(document)}
    kept = (each for each in versions_of(document, facts) if (each.line, each.rule) not in ignored)
    return tuple(sorted(kept, key=lambda each: (each.line, each.rule)))


def _ignored(document: Dockerfile) -> Iterator[tuple[int, str]]:
    """Yield lines and rules that comments ignore: ``# trainworks: ignore=RULE reason`` before or in an instruction."""
    starts = [*(each.line for each in document.instructions()), len(document.lines) + 1]
    for number, line in enumerate(document.lines, start=1):
        if comment := IGNORED.match(line):
            within = number > 1 and document.lines[number - 2].rstrip().endswith(("\\", "`"))
            first = max((each for each in starts if each < number), default=number) if within else number
            own = min(each for each in starts if each >= first)
            last = min((each for each in starts if each > max(own, number)), default=own)
            yield from ((each, rule) for each in range(own, last) for rule in comment[1].split(","))


def check_files(paths: Sequence[Path], facts: Facts) -> tuple[FileCheck, ...]:
    """Check files.

    Raises:
        OutputError: Files cannot be read, or are no Dockerfiles; names all of them.
    """
    texts: dict[Path, str] = {}
    problems = []
    for path in paths:
        try:
            texts[path] = path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            problems.append(f"cannot read {path}: {error.strerror}")
        else:
            if not read(texts[path]).stages:
                problems.append(f"{path} is not a Dockerfile: it has no FROM")
    if problems:
        raise OutputError("\n".join(problems), hint="name Dockerfiles; `--only TARGET` checks a target")
    return tuple(FileCheck(str(path), check_text(text, facts)) for path, text in texts.items())


def as_json(files: Sequence[FileCheck]) -> str:
    """Return the findings for programs."""
    return json.dumps([{**asdict(each), "fits": each.fits} for each in files], indent=2) + "\n"


def as_text(files: Sequence[FileCheck]) -> str:
    """Return the findings for people: a paragraph for each, and the totals."""
    lines = []
    for file in files:
        for each in file.findings:
            word = "advice" if each.severity == "advise" else "error"
            source = f" (source: {each.source})" if each.source else ""
            lines += [
                f"{file.file}:{each.line}: {word}: {each.what} [{each.rule}]",
                f"    reason:  {each.reason}{source}",
                f"    instead: {each.instead}",
            ]
    found = [each.severity for file in files for each in file.findings]
    errors, advice = found.count("refuse"), found.count("advise")
    counted = f"{len(files)} file{'s' if len(files) != 1 else ''}"
    lines.append(f"{counted}: {errors} error{'s' if errors != 1 else ''}, {advice} advice")
    return "\n".join(lines) + "\n"
