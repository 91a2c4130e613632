"""Versions that do not go together, as far as the Dockerfile itself names them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from trainworks_lint.compatibility import PRESENT, Incompatibility, Part, holds, table
from trainworks_lint.document import Document, Instruction, Stage
from trainworks_lint.findings import Hit
from trainworks_lint.shell import Command


@dataclass(frozen=True)
class Found:
    """The version of a part.

    Attributes:
        version: Numbers, joined by dots.
        line: The line that names it.
        declared: Only an ARG or ENV names it; otherwise a command or an image does.
    """

    version: str
    line: int
    declared: bool


def incompatible_versions(document: Document) -> Iterator[Hit]:
    """Find versions that do not go together."""
    return _broken(document, advice=False)


def versions_with_known_problem(document: Document) -> Iterator[Hit]:
    """Find versions that may fail together."""
    return _broken(document, advice=True)


def declared_version_differs(document: Document) -> Iterator[Hit]:
    """Find versions of ARG and ENV that are not the installed ones."""
    parts = {part.name: part for part in table().parts}
    reported = set()
    for found in _by_stage(document):
        for name, all_found in found.items():
            if parts[name].several:
                continue
            declared = _one(each for each in all_found if each.declared)
            installed = _one(each for each in all_found if not each.declared)
            if declared and installed and not _prefix(declared.version, installed.version):
                what = f"{parts[name].title} {installed.version} is installed, but {declared.version} is declared"
                hit = Hit(installed.line, f"{what} on line {declared.line}")
                if hit not in reported:
                    reported.add(hit)
                    yield hit


def _broken(document: Document, *, advice: bool) -> Iterator[Hit]:
    facts = table()
    parts = {part.name: part for part in facts.parts}
    reported = set()
    for all_found in _by_stage(document):
        found = {}
        for name, several in all_found.items():
            # What is installed counts, not what is declared.
            counting = [each for each in several if not each.declared] or several
            one = counting[0] if parts[name].several else _one(counting)
            if one is not None:
                found[name] = one
        versions = {name: each.version for name, each in found.items()}
        for rule in facts.rules:
            if rule.advice is advice and (failed := _failed(rule, versions)) is not None:
                hit = _hit(rule, failed, found, parts)
                if hit not in reported:
                    # A stage that is made from this one has the same versions.
                    reported.add(hit)
                    yield hit


def _by_stage(document: Document) -> Iterator[Mapping[str, Sequence[Found]]]:
    """Yield for each stage the versions that it and the stages before it name, by part."""
    # Each instruction is searched once.
    own = {id(stage): list(_own(stage, document, table().parts)) for stage in document.stages}
    for stage in document.stages:
        found: dict[str, list[Found]] = {}
        for name, each in (pair for one in reversed([*stage.lineage()]) for pair in own[id(one)]):
            found.setdefault(name, []).append(each)
        yield found


def _one(several: Iterable[Found]) -> Found | None:
    """Return the version that all of them name, with the most numbers; None if they differ."""
    result: Found | None = None
    for each in several:
        if result is not None and not _prefix(result.version, each.version):
            return None
        if result is None or len(each.version) > len(result.version):
            result = each
    return result


def _prefix(one: str, other: str) -> bool:
    """Return whether two versions are the same, one of them perhaps with more numbers."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def _failed(rule: Incompatibility, versions: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the required parts that are wrong; None if the rule is kept, or not about these versions."""
    if not all(holds(versions, part, allowed) for part, allowed in rule.when.items()):
        return None
    if not rule.require:
        return ()
    return tuple(part for part, allowed in rule.require.items() if holds(versions, part, allowed) is False) or None


def _hit(rule: Incompatibility, failed: tuple[str, ...], found: Mapping[str, Found], parts: Mapping[str, Part]) -> Hit:
    said = [_said(parts[name], found[name].version) for name in (*rule.when, *failed) if name in found]
    what = " with ".join(dict.fromkeys(said))
    missing = [parts[name].title for name in failed if rule.require[name] == PRESENT]
    if missing:
        what += f" without {' and '.join(missing)}"
    line = max(found[name].line for name in (*rule.when, *failed) if name in found)
    return Hit(line, what, f"{rule.reason} ({rule.source})", rule.instead)


def _said(part: Part, version: str) -> str:
    return f"{part.title} {version}" if version[:1].isdigit() else part.title


def _own(stage: Stage, document: Document, parts: tuple[Part, ...]) -> Iterator[tuple[str, Found]]:
    """Yield the versions that a stage itself names."""
    for text, lines, declared in _texts(stage, document):
        for part in parts:
            for pattern in part.patterns:
                for match in pattern.finditer(text):
                    version = ".".join(group.strip(".") for group in match.groups() if group)
                    line = lines[min(match.start(1), len(lines) - 1)]
                    yield part.name, Found(version, line, declared)


def _texts(stage: Stage, document: Document) -> Iterator[tuple[str, Sequence[int], bool]]:
    """Yield the texts of a stage in the forms that patterns are written for.

    With the line of each character, and whether the text is an ARG or ENV.
    """
    if stage.parent is None:
        yield _of_image(f"FROM {stage.image}", stage.start.line)
    for instruction in stage.instructions:
        for name, value in instruction.assignments():
            at = re.search(rf"(?<!\w){re.escape(name)}[=\s]", instruction.source.text)
            line = instruction.source.line(at.start() if at else 0)
            text = f"{name}={instruction.resolved(value)}"
            yield text, [line] * len(text), True
        if instruction.keyword == "COPY" and instruction.flag("from"):
            copied = document.stage_named(instruction.flag("from"))
            image = [*copied.lineage()][-1].image if copied is not None else instruction.flag("from")
            yield _of_image(f"COPY --from={image}", instruction.line)
        for command in instruction.script.commands:
            if not command.prints_to_terminal:
                yield _of_command(command, instruction)


def _of_image(text: str, line: int) -> tuple[str, Sequence[int], bool]:
    return text, [line] * len(text), False


def _of_command(command: Command, instruction: Instruction) -> tuple[str, Sequence[int], bool]:
    text = ""
    lines: list[int] = []
    for word in (*command.assignments, *command.words):
        value = instruction.resolved(word.value) + " "
        text += value
        lines += [word.line] * len(value)
    return text.rstrip(), lines or [command.line], False
