"""Versions that a Dockerfile installs, held to the rules of ``images/compatibility.toml``.

A version counts where an image has it, where a command names it, or where a step that installs reads the variable that
has it. A variable that nothing reads says nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from trainworks.dockerfiles.text import ASSIGNMENT, Dockerfile, Instruction, Stage, replaced
from trainworks.facts.ranges import Value, references
from trainworks.facts.rows import DockerfilePart, Facts, Severity
from trainworks.plan.compatibility import conflicts, describe

QUIET = frozenset({"echo", "printf", "test", "[", "[["})
"""Programs that install nothing."""

VERSION = re.compile(r"\D?(\d+(?:\.\d+)*)")

DECLARED = "declared-version-differs"
"""The rule besides those of ``images/compatibility.toml``."""


@dataclass(frozen=True)
class Finding:
    """One defect: the line, from 1, what is there, why it is wrong, and what to write; ``advise`` fails nothing."""

    line: int
    rule: str
    severity: Severity
    what: str
    reason: str
    instead: str
    source: str = ""


@dataclass(frozen=True)
class Found:
    """A value and the line that says it; of an ARG or ENV its name, and whether a step that installs reads it."""

    value: str
    line: int
    variable: str = ""
    read: bool = False


Known = Mapping[str, Sequence[Found]]
"""What a stage says of each property."""


def versions_of(document: Dockerfile, facts: Facts) -> Iterator[Finding]:
    """Find versions that do not go together, and those that are declared and not installed."""
    # A stage that is made from another has its versions, and its findings.
    found: dict[Finding, None] = {}
    for stage in document.stages:
        known = _known(stage, document, facts.dockerfile_parts)
        found.update(dict.fromkeys(_incompatible(known, facts)))
        found.update(dict.fromkeys(_declared(known, facts.dockerfile_parts)))
    yield from found


def _incompatible(known: Known, facts: Facts) -> Iterator[Finding]:
    together = {part.name: part.together for part in facts.dockerfile_parts}
    # The smp and smddp of a wheel are the vendor's; the open ones are in images of this project only.
    values: dict[str, Value] = {"sources": "vendor"}
    lines: dict[str, int] = {}
    for name, several in known.items():
        counting = _installed(several) or [each for each in several if each.read]
        if together[name]:
            values[name] = frozenset(word for found in counting for word in found.value.split())
        elif one := _one(counting):
            values[name] = one.value
        if name in values:
            lines[name] = max(found.line for found in counting)
    for artifact in facts.artifacts:
        if values.get(artifact.name) == artifact.version:
            for name, version in artifact.provides.items():
                if name not in values:
                    values[name], lines[name] = version, lines[artifact.name]
    for rule in facts.rules:
        written = {**rule.when, **rule.require}
        asked = dict.fromkeys([*written, *(name for allowed in written.values() for name in references(allowed))])
        # What the Dockerfile does not say may be in the base image.
        if asked.keys() <= values.keys():
            for conflict in conflicts([rule], values):
                told = [name for name in asked if name in lines]
                line = max(lines[name] for name in told)
                yield Finding(
                    line, rule.name, rule.severity, describe(told, values), conflict.reason, rule.instead, rule.source
                )


def _declared(known: Known, parts: Iterable[DockerfilePart]) -> Iterator[Finding]:
    """Find versions of ARG and ENV that are not the installed ones."""
    compared = {part.name for part in parts if part.variables}
    for name in known.keys() & compared:
        installed = _one(_installed(known[name]))
        for each in known[name] if installed else ():
            if installed and each.variable and not _same(each.value, installed.value):
                what = f"{each.variable} is {each.value}, and {name} {installed.value} is installed"
                yield Finding(
                    installed.line,
                    DECLARED,
                    "refuse",
                    what,
                    "a reader, or a script that uses the variable, takes the wrong version",
                    "use the variable in the step that installs",
                )


def _installed(several: Sequence[Found]) -> Sequence[Found]:
    return [each for each in several if not each.variable]


def _one(several: Sequence[Found]) -> Found | None:
    """Return what all of them say, with the most numbers; None if they differ: it is not known which one counts."""
    longest = max(several, key=lambda each: len(each.value), default=None)
    return longest if longest and all(_same(longest.value, each.value) for each in several) else None


def _same(one: str, other: str) -> bool:
    """Return whether two versions are the same, one of them perhaps with more numbers."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def _known(stage: Stage, document: Dockerfile, parts: Sequence[DockerfilePart]) -> Known:
    """Return what a stage and those it is made from say of each property."""
    found: dict[str, list[Found]] = {}
    for text, line in _texts(stage, document):
        for part in parts:
            for pattern in part.patterns:
                for match in re.finditer(pattern, text):
                    groups = [(group or "").strip(".") for group in match.groups()]
                    value = part.form.format(*groups) if part.form else ".".join(filter(None, groups))
                    found.setdefault(part.name, []).append(Found(value, line))
    for number, instruction in enumerate(stage.instructions, start=1):
        for variable, written in instruction.assignments:
            for part in parts:
                version = VERSION.match(written)
                if version and any(re.fullmatch(name, variable) for name in part.variables):
                    read = any(_reads(each, variable) for each in stage.instructions[number:])
                    found.setdefault(part.name, []).append(Found(version[1], instruction.line, variable, read))
    return found


def _reads(instruction: Instruction, variable: str) -> bool:
    """Return whether an instruction takes a variable for something else than to print it."""
    used = re.compile(rf"\$\{{?{re.escape(variable)}\b")
    if instruction.keyword == "ADD":
        return bool(used.search(instruction.text))
    return any(used.search(" ".join(each.words)) for each in instruction.commands if each.program not in QUIET)


def _texts(stage: Stage, document: Dockerfile) -> Iterator[tuple[str, int]]:
    """Yield the texts of a stage in the forms that patterns are written for, with their lines."""
    for instruction in stage.instructions:
        match instruction.keyword:
            case "FROM":
                yield f"FROM {instruction.text}", instruction.line
            case "ENV":
                yield from ((f"{name}={value}", instruction.line) for name, value in instruction.assignments)
            case "COPY" if name := instruction.flag("from"):
                copied = document.stage_named(name)
                yield f"COPY --from={copied.image if copied else name}", instruction.line
            case "ADD":
                yield f"ADD {replaced(instruction.text, instruction.values)}", instruction.line
        values = dict(instruction.values)
        for command in instruction.commands:
            for word in command.words:
                if assigned := ASSIGNMENT.fullmatch(word):
                    values[assigned[1]] = replaced(assigned[2], values)
            if command.program not in QUIET:
                yield replaced(" ".join(command.words), values), command.line
