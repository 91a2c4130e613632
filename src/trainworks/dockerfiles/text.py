"""Reads a Dockerfile into instructions and stages: dockerfile-parse splits it, this module adds what that lacks.

dockerfile-parse knows neither here-documents nor empty lines within an instruction. Both are hidden from it.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from io import BytesIO, StringIO

from dockerfile_parse import DockerfileParser
from dockerfile_parse.parser import image_from
from dockerfile_parse.util import WordSplitter

ESCAPE = re.compile(r"(?:\s*#\s*\w+\s*=.*\n)*?\s*#\s*escape\s*=\s*([\\`])", re.IGNORECASE)
HERE_DOCUMENT = re.compile(r"(?:^|\s)\d*<<(-?)(['\"]?)([A-Za-z_]\w*)\2(?=\s|$|[;|&>)])")
WITH_DOCUMENTS = re.compile(r"\s*(?:ONBUILD\s+)?(?:RUN|COPY|ADD)\s", re.IGNORECASE)
HEAD = re.compile(
    r"\s*(?:ONBUILD\s+)?(?P<keyword>[A-Z]+)(?:\s|\\\n)*(?P<flags>(?:--[a-z][\w-]*(?:=\S+)?(?:\s|\\\n)+)*)",
    re.IGNORECASE,
)
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
VARIABLE = re.compile(r"(?<!\\)\$(?:\{(?P<braced>\w+)(?:(?P<operator>:?[-+?])(?P<word>[^}]*))?\}|(?P<bare>\w+))")


OPERATORS = "();<>|&`\n"
"""Characters of a shell that end a word and, but for redirections, a command."""

SHELL = re.compile(r"(?:\S*/)?(?:ba|da|z|k)?sh")


@dataclass(frozen=True)
class Command:
    """A simple command of a shell: its first line, and its words without quotes. Variables are not replaced."""

    line: int
    words: tuple[str, ...]

    @property
    def program(self) -> str:
        """The program's name without its folder, behind the assignments in front of it; empty if there is none."""
        return next((word.rpartition("/")[2] for word in self.words if not ASSIGNMENT.fullmatch(word)), "")


@dataclass
class Instruction:
    """One instruction.

    Attributes:
        keyword: In capitals; of ONBUILD, the one that it puts off.
        line: Its first line.
        flags: ``--mount=...``, in order.
        text: What follows them, with the file's line ends, here-documents included; of FROM, the image.
        assignments: What an ARG or ENV sets, variables replaced; no value: empty.
        values: The variables that are known before it: ARG with a default, ENV.
    """

    keyword: str
    line: int
    flags: tuple[str, ...]
    text: str
    assignments: tuple[tuple[str, str], ...] = ()
    values: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def array(self) -> tuple[str, ...]:
        """The words of the exec form; empty where it is not used."""
        try:
            words = json.loads(self.text.replace("\\\n", ""))
        except ValueError:
            return ()
        return tuple(map(str, words)) if isinstance(words, list) else ()

    @cached_property
    def commands(self) -> list[Command]:
        """The commands of a RUN; none for other instructions."""
        if self.keyword != "RUN":
            return []
        script = shlex.join(self.array) if self.array else self.text
        return list(commands_of(script, self.line))

    def flag(self, name: str) -> str:
        """Return the value of a flag; empty if it is not given."""
        return next((flag.partition("=")[2] for flag in self.flags if flag.startswith(f"--{name}=")), "")


@dataclass
class Stage:
    """A stage: its name, the image at its root, and what the stages that it is made from do ``before`` its own."""

    name: str
    image: str
    before: list[Instruction]
    own: list[Instruction]

    @property
    def instructions(self) -> list[Instruction]:
        """All of them, in order."""
        return [*self.before, *self.own]


@dataclass
class Dockerfile:
    """A file: its lines without their ends, its stages, and the ARGs before the first FROM."""

    lines: list[str]
    stages: list[Stage] = field(default_factory=list)
    head: list[Instruction] = field(default_factory=list)

    def instructions(self) -> Iterator[Instruction]:
        """Yield all, in order."""
        yield from self.head
        for stage in self.stages:
            yield from stage.own

    def stage_named(self, name: str) -> Stage | None:
        """Return the stage of that name or number."""
        found = (each for number, each in enumerate(self.stages) if name.lower() in (each.name, str(number)))
        return next(found, None) if name else None


def commands_of(script: str, first: int) -> Iterator[Command]:
    """Yield the simple commands of a script that begins on line ``first``, and those of ``sh -c '...'`` in it.

    Here-documents are read as commands too: those that a shell reads are.
    """
    # A line that goes on is two blanks, so that what is read counts lines.
    stream = StringIO(script.replace("\\\n", "  "))
    lexer = shlex.shlex(stream, posix=True, punctuation_chars=OPERATORS)
    lexer.whitespace, lexer.whitespace_split = " \t\r", True
    words: list[str] = []
    line = first
    while True:
        try:
            token = lexer.get_token()
        except ValueError:
            # A quote without its partner, as in a text that no shell reads.
            token = None
        # An empty word, as in `--option ""`, is a word.
        begins = token[:1] if token else ""
        if (
            token is None
            or (begins and begins in OPERATORS and not token.isspace() and begins not in "<>")
            or "\n" in token
        ):
            if words:
                yield Command(line, tuple(words))
                if len(words) > 2 and any(map(SHELL.fullmatch, words[:-2])) and re.fullmatch(r"-[a-z]*c", words[-2]):
                    yield from commands_of(words[-1], line)
            if token is None:
                return
            words = []
        else:
            if not words:
                line = first + script.count("\n", 0, max(stream.tell() - 1, 0))
            words.append(token)


def read(text: str) -> Dockerfile:
    """Return the stages of a Dockerfile. A text that is none has no stages."""
    lines = text.replace("\r\n", "\n").split("\n")
    shown, texts = _shown(lines)
    parser = DockerfileParser(fileobj=BytesIO("\n".join(shown).encode("utf-8", "replace")))
    document = Dockerfile(lines)
    values: dict[str, str] = {}
    for entry in parser.structure:
        instruction = _instruction(texts.get(entry["startline"], ""), entry["startline"] + 1)
        if entry["instruction"] == "COMMENT" or instruction is None:
            continue
        if instruction.keyword == "FROM":
            image, name = image_from(entry["value"])
            instruction.text = replaced(image or "", _values(document.head))
            parent = document.stage_named(instruction.text)
            before = parent.instructions if parent else []
            image = parent.image if parent else instruction.text
            document.stages.append(Stage((name or "").lower(), image, before, [instruction]))
            values = _values(before)
            continue
        if instruction.keyword in ("ARG", "ENV"):
            outside = _values(document.head) if instruction.keyword == "ARG" else {}
            pairs = _pairs(instruction.keyword, entry["value"])
            instruction.assignments = tuple((name, replaced(to, values) or outside.get(name, "")) for name, to in pairs)
        instruction.values = dict(values)
        values |= _values([instruction])
        (document.stages[-1].own if document.stages else document.head).append(instruction)
    return document


def replaced(text: str, values: Mapping[str, str]) -> str:
    """Return a text with the variables replaced whose values are known; the others stay as they are written."""

    def value(match: re.Match[str]) -> str:
        known = values.get(match["braced"] or match["bare"])
        if match["operator"] in (":+", "+"):
            return match["word"] if known else ""
        return known or (match["word"] if match["operator"] in (":-", "-") else match[0])

    return VARIABLE.sub(value, text)


def _values(instructions: Iterable[Instruction]) -> dict[str, str]:
    return {name: value for each in instructions for name, value in each.assignments if value}


def _pairs(keyword: str, value: str) -> Iterator[tuple[str, str]]:
    """Yield what an ARG or ENV sets, without quotes."""
    words = list(WordSplitter(value).split())
    if keyword == "ENV" and words and "=" not in words[0]:
        words = [f"{words[0]}={' '.join(words[1:])}"]
    yield from ((name, written) for name, _, written in (word.partition("=") for word in words))


def _shown(lines: list[str]) -> tuple[list[str], dict[int, str]]:
    """Return what dockerfile-parse is shown, and the texts of instructions by their first line.

    In the texts, comments and empty lines within are continued lines, so that lines can be counted.
    """
    escape = ESCAPE.match("\n".join(lines))
    continued = re.compile(rf"{re.escape(escape[1] if escape else chr(92))}[ \t]*$")
    shown = list(lines)
    texts: dict[int, str] = {}
    number = 0
    while number < len(lines):
        first, kept, open_ = number, list[str](), True
        while open_ and number < len(lines):
            line = lines[number]
            passed = line.lstrip().startswith("#") or not line.strip()
            open_ = bool(kept) if passed else bool(continued.search(line))
            kept.append("\\" if passed else continued.sub(lambda _: "\\", line))
            if kept[1:] and passed:
                shown[number] = "#"
            number += 1
        if WITH_DOCUMENTS.match(kept[0]):
            for dash, _, name in HERE_DOCUMENT.findall(" ".join(kept)):
                ends = (line.lstrip("\t") == name if dash else line == name for line in lines[number:])
                length = next((at for at, end in enumerate(ends, start=1) if end), 0)
                kept += lines[number : number + length]
                shown[number : number + length] = ["#"] * length
                number += length
        texts[first] = "\n".join(kept)
    return shown, texts


def _instruction(text: str, line: int) -> Instruction | None:
    if head := HEAD.match(text):
        # Line ends of the head stay, so that the text has as many as the file.
        body = "\\\n" * head[0].count("\n") + text[head.end() :]
        return Instruction(head["keyword"].upper(), line, tuple(head["flags"].replace("\\\n", " ").split()), body)
    return None
