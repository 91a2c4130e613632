"""``build.py check DOCKERFILE``: its versions, held to the rules of ``images/compatibility.toml`` (docs/adr/0037).

A version counts where an image has it, where a command names it, or where a step that installs reads the variable that
has it. A variable that nothing reads says nothing.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from trainworks.errors import OutputError
from trainworks.facts.ranges import Value, references
from trainworks.facts.rows import DockerfilePart, Facts, Severity
from trainworks.plan.compatibility import conflicts, describe

IGNORED = re.compile(r"\s*#\s*trainworks:\s*ignore=([a-z0-9.,-]+)\s+\S")
CONTINUED = re.compile(r"\\[ \t]*$")
HERE_DOCUMENT = re.compile(r"(?:^|\s)\d*<<(-?)(['\"]?)([A-Za-z_]\w*)\2(?=\s|$|[;|&>)])")
INSTRUCTION = re.compile(
    r"\s*(?:ONBUILD\s+)?(?P<keyword>[A-Z]+)\s*(?P<flags>(?:--[a-z][\w-]*(?:=\S+)?\s+)*)(?P<text>.*)",
    re.IGNORECASE | re.DOTALL,
)
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
VARIABLE = re.compile(r"(?<!\\)\$(?:\{(?P<braced>\w+)(?:(?P<operator>:?[-+?])(?P<word>[^}]*))?\}|(?P<bare>\w+))")
SHELL = re.compile(r"(?:\S*/)?(?:ba|da|z|k)?sh")

OPERATORS = "();<>|&`\n"
"""Characters of a shell that end a word and, but for redirections, a command."""

QUIET = frozenset({"echo", "printf", "test", "[", "[["})
"""Programs that install nothing."""

VERSION = re.compile(r"\D?(\d+(?:\.\d+)*)")


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


@dataclass
class Instruction:
    """One instruction.

    Attributes:
        keyword: In capitals; of ONBUILD, the one that it puts off.
        line: Its first line.
        flags: ``--mount=...``, in order.
        text: What follows them, on one line, and the here-documents; of FROM, the image.
        ignored: Rules that comments before it or in it ignore.
        assignments: What an ARG or ENV sets, variables replaced; no value: empty.
        values: The variables that are known before it: ARG with a default, ENV.
    """

    keyword: str
    line: int
    flags: tuple[str, ...]
    text: str
    ignored: frozenset[str]
    assignments: tuple[tuple[str, str], ...] = ()
    values: Mapping[str, str] = field(default_factory=dict)

    @property
    def commands(self) -> Iterator[tuple[str, ...]]:
        """The commands of a RUN, as words without quotes, variables not replaced; none for other instructions."""
        if self.keyword == "RUN":
            try:
                words = json.loads(self.text)
            except (ValueError, RecursionError):
                words = None
            yield from commands_of(shlex.join(map(str, words)) if isinstance(words, list) else self.text)


@dataclass
class Stage:
    """A stage: its name, the image at its root, and its instructions after those of the stages that it is made from."""

    name: str
    image: str
    instructions: list[Instruction]


def commands_of(script: str) -> Iterator[tuple[str, ...]]:
    """Yield the words of each simple command of a script, here-documents too, and those of ``sh -c '...'`` in it."""
    lexer = shlex.shlex(script, posix=True, punctuation_chars=OPERATORS)
    lexer.whitespace, lexer.whitespace_split = " \t\r", True
    words: list[str] = []
    while True:
        try:
            token = lexer.get_token()
        except ValueError:
            # A quote without its partner, as in a text that no shell reads.
            token = None
        # An empty word, as in `--option ""`, is a word; what begins like a redirection belongs to the command.
        if token is None or (token and token[0] in OPERATORS and ("\n" in token or token[0] not in "<>")):
            if words:
                yield tuple(words)
                if len(words) > 2 and any(map(SHELL.fullmatch, words[:-2])) and re.fullmatch(r"-[a-z]*c", words[-2]):
                    yield from commands_of(words[-1])
            if token is None:
                return
            words = []
        else:
            words.append(token)


def instructions_of(text: str) -> Iterator[Instruction]:
    """Yield the instructions of a Dockerfile as they are written; a text that is none has none, or odd ones."""
    lines = text.replace("\r\n", "\n").split("\n")
    parts: list[str] = []
    ignored: set[str] = set()
    first = number = 0
    while number < len(lines):
        line = lines[number]
        number += 1
        if comment := IGNORED.match(line):
            ignored.update(comment[1].split(","))
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        first = first if parts else number
        parts.append(CONTINUED.sub("", line))
        if CONTINUED.search(line) and any(map(str.strip, lines[number:])):
            continue
        found = INSTRUCTION.match("".join(parts))
        if found and found["keyword"].upper() in ("RUN", "COPY", "ADD"):
            for dash, _, name in HERE_DOCUMENT.findall(found["text"]):
                ends = (each.lstrip("\t") == name if dash else each == name for each in lines[number:])
                length = next((at for at, end in enumerate(ends, start=1) if end), 0)
                parts += ["\n", "\n".join(lines[number : number + length])]
                number += length
            found = INSTRUCTION.match("".join(parts))
        if found:
            yield Instruction(
                found["keyword"].upper(),
                first,
                tuple(found["flags"].split()),
                found["text"].strip(),
                frozenset(ignored),
            )
        parts, ignored = [], set()


def stages_of(text: str) -> list[Stage]:
    """Return the stages of a Dockerfile, with all values that are known in each instruction."""
    stages: list[Stage] = []
    outside: dict[str, str] = {}
    values: dict[str, str] = {}
    for each in instructions_of(text):
        each.values = dict(values) if stages else dict(outside)
        if each.keyword == "FROM":
            words = [*each.text.split(), "", "", ""]
            each.text = replaced(words[0], outside)
            parent = stage_named(each.text, stages)
            name = words[2].lower() if words[1].lower() == "as" else ""
            inherited = parent.instructions if parent else []
            stages.append(Stage(name, parent.image if parent else each.text, [*inherited, each]))
            values = {name: value for before in inherited for name, value in before.assignments if value}
            continue
        if each.keyword in ("ARG", "ENV"):
            try:
                words = shlex.split(each.text)
            except ValueError:
                words = each.text.split()
            if each.keyword == "ENV" and words and "=" not in words[0]:
                words = [f"{words[0]}={' '.join(words[1:])}"]
            default = outside if stages and each.keyword == "ARG" else {}
            pairs = (word.partition("=")[::2] for word in words)
            each.assignments = tuple((name, replaced(to, each.values) or default.get(name, "")) for name, to in pairs)
        (values if stages else outside).update({name: value for name, value in each.assignments if value})
        if stages:
            stages[-1].instructions.append(each)
    return stages


def stage_named(name: str, stages: Sequence[Stage]) -> Stage | None:
    """Return the stage of that name or number."""
    found = (each for number, each in enumerate(stages) if name.lower() in (each.name, str(number)))
    return next(found, None) if name else None


def replaced(text: str, values: Mapping[str, str]) -> str:
    """Return a text with the variables replaced whose values are known; the others stay as they are written."""

    def value(match: re.Match[str]) -> str:
        known = values.get(match["braced"] or match["bare"])
        if match["operator"] in (":+", "+"):
            return match["word"] if known else ""
        return known or (match["word"] if match["operator"] in (":-", "-") else match[0])

    return VARIABLE.sub(value, text)


def check_text(text: str, facts: Facts) -> tuple[Finding, ...]:
    """Return what is wrong in a Dockerfile, by line; what a comment ignores is left out."""
    found: dict[Finding, None] = {}
    stages = stages_of(text)
    # A stage that is made from another has its versions, and its findings.
    for stage in stages:
        known = _known(stage, stages, facts.dockerfile_parts)
        ignored = {(each.line, rule) for each in stage.instructions for rule in each.ignored}
        for finding in _incompatible(known, facts):
            if (finding.line, finding.rule) not in ignored:
                found[finding] = None
    return tuple(sorted(found, key=lambda each: (each.line, each.rule)))


def _incompatible(known: Known, facts: Facts) -> Iterator[Finding]:
    together = {part.name: part.together for part in facts.dockerfile_parts}
    # The smp and smddp of a wheel are the vendor's; the open ones are in images of this project only.
    values: dict[str, Value] = {"sources": "vendor"}
    lines: dict[str, int] = {}
    for name, several in known.items():
        counting = [each for each in several if not each.variable] or [each for each in several if each.read]
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


def _one(several: Sequence[Found]) -> Found | None:
    """Return what all of them say, with the most numbers; None if they differ: it is not known which one counts."""
    longest = max(several, key=lambda each: len(each.value), default=None)
    return longest if longest and all(_same(longest.value, each.value) for each in several) else None


def _same(one: str, other: str) -> bool:
    """Return whether two versions are the same, one of them perhaps with more numbers."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def _known(stage: Stage, stages: Sequence[Stage], parts: Sequence[DockerfilePart]) -> Known:
    """Return what a stage and those it is made from say of each property."""
    found: dict[str, list[Found]] = {}
    for text, line in _texts(stage, stages):
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
    return any(used.search(" ".join(words)) for words in instruction.commands if not _is_quiet(words))


def _is_quiet(words: Sequence[str]) -> bool:
    """Return whether a command installs nothing."""
    program = next((word for word in words if not ASSIGNMENT.fullmatch(word)), "")
    return program.rpartition("/")[2] in QUIET


def _texts(stage: Stage, stages: Sequence[Stage]) -> Iterator[tuple[str, int]]:
    """Yield the texts of a stage in the forms that patterns are written for, with their lines."""
    for instruction in stage.instructions:
        match instruction.keyword:
            case "FROM":
                yield f"FROM {instruction.text}", instruction.line
            case "ENV":
                yield from ((f"{name}={value}", instruction.line) for name, value in instruction.assignments)
            case "COPY":
                for name in (flag.removeprefix("--from=") for flag in instruction.flags if flag.startswith("--from=")):
                    copied = stage_named(name, stages)
                    yield f"COPY --from={copied.image if copied else name}", instruction.line
            case "ADD":
                yield f"ADD {replaced(instruction.text, instruction.values)}", instruction.line
        values = dict(instruction.values)
        for words in instruction.commands:
            for word in words:
                if assigned := ASSIGNMENT.fullmatch(word):
                    values[assigned[1]] = replaced(assigned[2], values)
            if not _is_quiet(words):
                yield replaced(" ".join(words), values), instruction.line


@dataclass(frozen=True)
class FileCheck:
    """The findings in one file, which is named as on the command line."""

    file: str
    findings: tuple[Finding, ...]

    @property
    def fits(self) -> bool:
        """Whether there is nothing but advice."""
        return all(each.severity == "advise" for each in self.findings)


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
            if not stages_of(texts[path]):
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
