"""Shell scripts as simple commands: enough of the language to tell words, redirections and programs apart."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

SHELLS = frozenset({"sh", "bash", "dash", "ash", "zsh", "ksh"})

TOKEN = re.compile(
    r"""(?P<blank>(?:[^\S\n]|\\\n)+)
    | (?P<comment>(?<![^\s;&|()`])\#[^\n]*)
    | (?P<redirect>(?:\d*|&)(?:<<<|<<-?|<>|>>|>\||[<>]&|[<>]))
    | (?P<operator>\n|&&|\|\||;;|\|&|[;&|()`])
    | (?P<word>(?:\\.|'[^']*'|"(?:\\.|[^"\\])*"|\$\{[^}]*\}|[^\s;&|()<>`\\'"]|['"\\])+)""",
    re.VERBOSE | re.DOTALL,
)
SUBSTITUTION = re.compile(r"\$\(((?:[^()]|\([^()]*\))*)\)")

BEFORE_PROGRAMS = frozenset(
    {
        *("!", "{", "}", "if", "then", "elif", "else", "fi", "while", "until", "do", "done", "time", "exec", "command"),
        *("sudo", "env", "nice", "nohup", "timeout", "xargs", "eatmydata", "builtin", "flock"),
    }
)
"""Words after which the name of a program comes."""

DEEPEST_SCRIPT = 8
"""Levels of `sh -c '...'` and of `"$(...)"` within each other that are read."""


@dataclass(frozen=True)
class Word:
    """One word of a command; ``value`` is without quotes, as the program gets it. Variables are not replaced."""

    value: str
    line: int


@dataclass(frozen=True)
class Redirect:
    """A redirection; ``word_before`` is the word directly before the operator, empty if a space is between them."""

    operator: str
    target: str
    line: int
    word_before: str


@dataclass
class Command:
    """A simple command; its words have the assignments in front of the program, its here-documents their first line."""

    line: int
    words: list[Word] = field(default_factory=list)
    redirects: list[Redirect] = field(default_factory=list)
    heredocs: list[Word] = field(default_factory=list)

    @property
    def own_words(self) -> list[Word]:
        """The program and its arguments, without what stands in front of them."""
        for number, word in enumerate(self.words):
            if word.value not in BEFORE_PROGRAMS and not re.match(r"-|[A-Za-z_]\w*\+?=|\d+[smhd]?$", word.value):
                return self.words[number:]
        return []

    @property
    def program(self) -> str:
        """The program's name without its folder; empty if there is none."""
        return self.own_words[0].value.rpartition("/")[2] if self.own_words else ""

    @property
    def arguments(self) -> list[str]:
        """The words after the program."""
        return [word.value for word in self.own_words[1:]]

    @property
    def called(self) -> str:
        """The program's name and its arguments, with a space between them."""
        return " ".join([self.program, *self.arguments])

    def texts(self) -> Iterator[tuple[str, int]]:
        """Yield words and here-documents, with their lines."""
        yield from ((word.value, word.line) for word in (*self.words, *self.heredocs))


def commands_of(script: str, first: int, depth: int = 0) -> list[Command]:
    """Return the simple commands of a script that begins on line ``first``.

    Scripts within it are read as well (``sh -c``, ``$(...)``, ``bash <<EOF``); ``depth`` are the scripts around it.
    """
    found: list[Command] = []
    command = Command(first)
    wanted: Redirect | None = None
    waiting: list[tuple[str, str, Command]] = []
    place, line, touching = 0, first, ""
    while place < len(script):
        token = TOKEN.match(script, place)
        assert token is not None, "each character begins a token"
        kind, text = str(token.lastgroup), token[0]
        place = token.end()
        if kind == "word" and wanted is not None:
            if wanted.operator.startswith("<<") and wanted.operator != "<<<":
                waiting.append((wanted.operator, unquoted(text), command))
            else:
                command.redirects.append(Redirect(wanted.operator, unquoted(text), line, wanted.word_before))
            wanted, touching = None, ""
        elif kind == "word":
            touching = unquoted(text)
            command.line = command.words[0].line if command.words else line
            command.words.append(Word(touching, line))
            if '"' in text and depth < DEEPEST_SCRIPT:
                for inner in SUBSTITUTION.finditer(text):
                    at = line + text.count("\n", 0, inner.start())
                    found += commands_of(inner[1], at, depth + 1)
        elif kind == "redirect":
            wanted = Redirect(text.lstrip("0123456789"), "", line, touching)
        else:
            touching = ""
            if kind == "operator":
                found += _ended(command, depth)
                command, wanted = Command(line), None
        line += text.count("\n")
        if text == "\n":
            for operator, name, reader in waiting:
                body, after = _here_document(script, place, name, indented=operator == "<<-")
                reader.heredocs.append(Word(body, line))
                line += script.count("\n", place, after)
                place = after
                if depth < DEEPEST_SCRIPT and _is_script(reader, body):
                    found += commands_of(body, reader.heredocs[-1].line, depth + 1)
            waiting = []
    return found + _ended(command, depth)


def _ended(command: Command, depth: int) -> list[Command]:
    """Return a command and those of `sh -c '...'` in it; nothing if it is empty."""
    found = [command] if command.words or command.redirects else []
    words = command.own_words
    for number in range(len(words) - 1):
        shell = any(word.value.rpartition("/")[2] in SHELLS for word in words[:number])
        if shell and re.fullmatch(r"-[a-zA-Z]*c", words[number].value) and depth < DEEPEST_SCRIPT:
            found += commands_of(words[number + 1].value, words[number + 1].line, depth + 1)
            break
    return found


def _here_document(script: str, place: int, name: str, *, indented: bool) -> tuple[str, int]:
    """Return the text of a here-document, and where the script goes on."""
    end = place
    for text in script[place:].splitlines(keepends=True):
        if (text.strip() if indented else text.rstrip("\r\n")) == name:
            return script[place:end], end + len(text)
        end += len(text)
    return script[place:], len(script)


def _is_script(reader: Command, body: str) -> bool:
    """Return whether a here-document is a shell script: nothing but the shell reads it, or a shell by name."""
    shebang = re.match(r"#!\s*(?:/\S*/)?(?:env\s+)?(\w+)", body)
    program = reader.program or (shebang[1] if shebang else "")
    return not program or program in SHELLS


def unquoted(written: str) -> str:
    """Return a word as its program gets it: without quotes and escapes. Variables are not replaced."""
    result: list[str] = []
    quote = ""
    characters = iter(written)
    for character in characters:
        if quote == "'" and character != "'":
            result.append(character)
        elif character == "\\":
            following = next(characters, "")
            if following != "\n":
                result.append(following if not quote or following in '"\\$`' else character + following)
        elif character == quote:
            quote = ""
        elif character in "'\"" and not quote:
            quote = character
        else:
            result.append(character)
    return "".join(result)
