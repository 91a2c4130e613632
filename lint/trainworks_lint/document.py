"""Reads a Dockerfile into instructions and stages. BuildKit's own parser splits it; this module finds the lines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import dockerfile

from trainworks_lint.shell import SHELLS, Script, parse_script, program_name
from trainworks_lint.source import Source

DIRECTIVE = re.compile(r"#\s*([A-Za-z][A-Za-z0-9]*)\s*=\s*(\S+)\s*$")
VARIABLE = re.compile(r"(?<![\\$])\$(?:\{(?P<braced>[A-Za-z_]\w*)(?P<operator>[^}]*)\}|(?P<bare>[A-Za-z_]\w*))")
SINGLE_QUOTED = re.compile(r"'[^']*'")
KEYWORD = re.compile(r"\s*(?:ONBUILD\s+)?[A-Za-z]+\s*(?:--[a-z][^\s]*\s+)*", re.IGNORECASE)


class SyntaxProblem(Exception):  # noqa: N818 - it becomes a finding, not an error of the program
    """The error of BuildKit's parser; ``line`` is 1 if it does not name one."""

    def __init__(self, message: str, line: int) -> None:
        """Store both."""
        super().__init__(message)
        self.line = line


@dataclass(frozen=True)
class Heredoc:
    """A here-document of an instruction, and the first line of its content."""

    name: str
    content: str
    line: int


@dataclass
class Instruction:
    """One instruction.

    Attributes:
        keyword: In capitals: ``RUN``.
        arguments: As BuildKit splits them.
        flags: ``--mount=...``, in order.
        exec_form: Its arguments are a JSON array.
        line: Its first line.
        end_line: Its last line.
        source: The text after keyword and flags, continued lines joined, comments left out.
        heredocs: Its here-documents.
        shell: The SHELL that runs it; empty: Docker's default, ``/bin/sh -c``.
        deferred: It is the instruction of an ONBUILD, and runs in another build.
        values: The variables before it whose values the file tells: ARG with a default, ENV.
    """

    keyword: str
    arguments: tuple[str, ...]
    flags: tuple[str, ...]
    exec_form: bool
    line: int
    end_line: int
    source: Source
    heredocs: tuple[Heredoc, ...]
    shell: tuple[str, ...]
    deferred: bool
    values: dict[str, str] = field(default_factory=dict)

    def resolved(self, text: str) -> str:
        """Return a text with the variables replaced whose values are known at this instruction."""
        return replaced(text, self.values)

    def flag(self, name: str) -> str:
        """Return the value of a flag; empty if it is not given."""
        return next((flag.partition("=")[2] for flag in self.flags if flag.partition("=")[0] == f"--{name}"), "")

    @cached_property
    def script(self) -> Script:
        """The shell script of a RUN; empty for other instructions and other interpreters."""
        if self.keyword != "RUN":
            return Script()
        if self.exec_form:
            return _exec_script(self.arguments, self.line)
        script = parse_script(self._script_source())
        script.pipefail = script.pipefail or "pipefail" in self.shell
        return script

    def _script_source(self) -> Source:
        if not self.heredocs:
            return self.source
        opening = re.match(r"<<-?\s*([\"']?)\w+\1\s*(?P<interpreter>\S*)\s*$", self.source.text.strip())
        if opening is None:
            # A command reads the here-document: this is the shell's own syntax.
            text, lines = self.source.text + "\n", [*self.source.lines, self.source.first]
            for heredoc in self.heredocs:
                body = Source.over_lines(f"{heredoc.content}{heredoc.name}\n", heredoc.line)
                text, lines = text + body.text, [*lines, *body.lines]
            return Source(text, lines, self.line)
        first = self.heredocs[0]
        interpreter = program_name(opening["interpreter"])
        if not interpreter and first.content.startswith("#!"):
            words = first.content.splitlines()[0].removeprefix("#!").split()
            interpreter = next((program_name(word) for word in words if program_name(word) != "env"), "")
        if interpreter and interpreter not in SHELLS:
            return Source("", [], self.line)
        return Source.over_lines(first.content, first.line)

    def variable_uses(self) -> Iterator[tuple[str, int]]:
        """Yield the variables that it reads without a default, with their lines."""
        if self.keyword == "RUN":
            for use in self.script.uses:
                if not use.has_default and use.name not in self.script.assigned:
                    yield use.name, use.line
        elif self.keyword not in ("CMD", "ENTRYPOINT", "HEALTHCHECK", "SHELL"):
            text = SINGLE_QUOTED.sub(lambda match: " " * len(match[0]), self.source.text)
            for match in VARIABLE.finditer(text):
                if not match["operator"]:
                    yield match["braced"] or match["bare"], self.source.line(match.start())

    def assignments(self) -> Iterator[tuple[str, str]]:
        """Yield name and value of each variable that an ARG or ENV sets, without quotes; no value: empty."""
        if self.keyword == "ARG":
            for argument in self.arguments:
                name, _, value = argument.partition("=")
                yield name, _unquoted(value)
        elif self.keyword == "ENV":
            for name, value in zip(self.arguments[::2], self.arguments[1::2], strict=False):
                yield name, _unquoted(value)


@dataclass
class Stage:
    """The instructions from one FROM to the next.

    Attributes:
        start: The FROM.
        name: Given by AS, in small letters, or empty.
        image: Its base image, with variables replaced if their values are known.
        parent: The stage of this file that it is made from.
        instructions: Those after FROM.
    """

    start: Instruction
    name: str
    image: str
    parent: Stage | None
    instructions: list[Instruction] = field(default_factory=list)

    def lineage(self) -> Iterator[Stage]:
        """Yield the stage and those it is made from."""
        stage: Stage | None = self
        while stage is not None:
            yield stage
            stage = stage.parent


@dataclass
class Document:
    """A parsed Dockerfile.

    Attributes:
        lines: The file's lines without their ends.
        instructions: All, in order.
        global_arguments: The ARGs before the first FROM.
        stages: In order.
    """

    lines: tuple[str, ...]
    instructions: tuple[Instruction, ...]
    global_arguments: tuple[Instruction, ...]
    stages: tuple[Stage, ...]

    def runs(self) -> Iterator[Instruction]:
        """Yield every RUN."""
        return (instruction for instruction in self.instructions if instruction.keyword == "RUN")

    def stage_named(self, name: str) -> Stage | None:
        """Return the stage of that name or number."""
        for number, stage in enumerate(self.stages):
            if name.lower() == stage.name or name == str(number):
                return stage
        return None


def parse(text: str) -> Document:
    """Return the instructions and stages of a Dockerfile. Raises ``SyntaxProblem`` if BuildKit's parser refuses it."""
    # BuildKit reads bytes. Characters that a Dockerfile cannot contain become replacement characters.
    clean = text.replace("\r\n", "\n").replace("\0", "\ufffd").encode("utf-8", "replace").decode("utf-8")
    try:
        commands = dockerfile.parse_string(clean)
    except dockerfile.GoParseError as error:
        number = re.search(r"\bline (\d+)", str(error))
        raise SyntaxProblem(str(error), int(number[1]) if number else 1) from error
    lines = tuple(clean.split("\n"))
    escape = _escape_character(lines)
    instructions: list[Instruction] = []
    shell: tuple[str, ...] = ()
    for command in commands:
        # The instruction of an ONBUILD is read like any other.
        keyword = (command.sub_cmd or command.cmd or "").upper()
        if keyword == "FROM":
            shell = ()
        source, after = _joined(lines, command.start_line, command.end_line, escape)
        heredocs = []
        for heredoc in command.heredocs:
            heredocs.append(Heredoc(heredoc.name, heredoc.content, after))
            after += heredoc.content.count("\n") + 1
        instructions.append(
            Instruction(
                keyword=keyword,
                arguments=command.value,
                flags=command.flags,
                exec_form=command.json,
                line=command.start_line,
                end_line=command.end_line,
                source=source,
                heredocs=tuple(heredocs),
                shell=shell,
                deferred=bool(command.sub_cmd),
            )
        )
        if keyword == "SHELL":
            shell = command.value
    return _with_stages(lines, instructions)


def _escape_character(lines: tuple[str, ...]) -> str:
    """Return the character that continues a line. A parser directive in the first lines can change it."""
    for line in lines:
        match = DIRECTIVE.match(line.strip())
        if match is None:
            return "\\"
        if match[1].lower() == "escape":
            return match[2][:1]
    return "\\"


def _joined(lines: tuple[str, ...], first: int, last: int, escape: str) -> tuple[Source, int]:
    """Return an instruction's text as BuildKit joins it, without keyword and flags, and the line after it."""
    mark = re.escape(escape)
    continuation = re.compile(rf"(?:(?<=[^{mark}])|^){mark}[ \t]*$")
    text = ""
    places: list[int] = []
    number = first
    while number <= last:
        line = lines[number - 1]
        number += 1
        if number - 1 > first and (not line.strip() or line.lstrip().startswith("#")):
            continue
        kept = continuation.sub("", line)
        text += kept
        places += [number - 1] * len(kept)
        if kept == line:
            break
    start = KEYWORD.match(text)
    source = Source(text, places, first)
    return source.part(start.end() if start else 0, len(text)), number


def _with_stages(lines: tuple[str, ...], instructions: list[Instruction]) -> Document:
    stages: list[Stage] = []
    global_arguments: list[Instruction] = []
    values: dict[str, str] = {}
    for instruction in instructions:
        if instruction.keyword == "FROM" and instruction.arguments:
            arguments = instruction.arguments
            name = arguments[2].lower() if len(arguments) > 2 and arguments[1].upper() == "AS" else ""
            image = replaced(arguments[0], values)
            parent = next((stage for stage in stages if stage.name and stage.name == image.lower()), None)
            stages.append(Stage(instruction, name, image, parent))
        elif stages:
            stage = stages[-1]
            before = stage.instructions[-1] if stage.instructions else None
            if before is not None:
                instruction.values = _values_after(before, values)
            elif stage.parent is not None and stage.parent.instructions:
                instruction.values = _values_after(stage.parent.instructions[-1], values)
            stage.instructions.append(instruction)
        elif instruction.keyword == "ARG":
            global_arguments.append(instruction)
            values.update((name, replaced(value, values)) for name, value in instruction.assignments() if value)
    return Document(lines, tuple(instructions), tuple(global_arguments), tuple(stages))


def _values_after(instruction: Instruction, global_values: Mapping[str, str]) -> dict[str, str]:
    """Return the known variables for the instruction after this one."""
    values = dict(instruction.values)
    for name, value in instruction.assignments():
        # An ARG without a default has the default of the same ARG before the first FROM.
        values[name] = replaced(value, values) if value else global_values.get(name, values.get(name, ""))
    return values


def replaced(text: str, values: Mapping[str, str]) -> str:
    """Return a text with the variables replaced whose values are known; ``${A:-1}`` has a default of its own."""

    def value(match: re.Match[str]) -> str:
        operator = match["operator"] or ""
        known = values.get(match["braced"] or match["bare"], "")
        if operator.lstrip(":").startswith("-") and not known:
            return operator.lstrip(":").removeprefix("-")
        return known if known and not operator.startswith(":+") else match[0]

    return VARIABLE.sub(value, text)


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value


def _exec_script(arguments: tuple[str, ...], line: int) -> Script:
    """Return the script of a RUN in exec form: one command, or the script that a shell runs."""
    quoted = " ".join("'" + argument.replace("'", "'\\''") + "'" for argument in arguments)
    if len(arguments) > 2 and program_name(arguments[0]) in SHELLS and re.fullmatch(r"-[a-zA-Z]*c", arguments[-2]):
        script = parse_script(Source.on_one_line(arguments[-1], line))
        script.pipefail = script.pipefail or "pipefail" in arguments
        return script
    return parse_script(Source.on_one_line(quoted, line))
