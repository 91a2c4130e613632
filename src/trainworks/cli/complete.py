"""What can follow on a command line: the answer that the shells' completion asks for.

Grammar and facts say it all; no engine, registry or network is asked, because an answer has to come at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

from trainworks.cli.commands import BUILD, COMMANDS, grammar_of
from trainworks.cli.grammar import Argument, Grammar
from trainworks.facts.rows import Component, Facts, TargetRow
from trainworks.facts.skim import skim
from trainworks.plan.select import version_key

Paths = Literal["none", "files", "folders"]

PATHS: Mapping[str, Paths] = {"FILE": "files", "DIR": "folders"}
"""Placeholders of values that the shell itself completes."""


@dataclass(frozen=True)
class Candidate:
    """A word that can stand there, and what it is."""

    word: str
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What can stand in the place of the last word, and whether a path can.

    Attributes:
        candidates: Only those that begin as the word does.
        paths: Which names of files the shell adds.
    """

    candidates: tuple[Candidate, ...] = ()
    paths: Paths = "none"

    def as_text(self) -> str:
        """Return it for a shell: the kind of paths, then a line for each word: the word, a tab, what it is."""
        lines = [self.paths, *(f"{each.word}\t{each.note}" for each in self.candidates)]
        return "".join(f"{line}\n" for line in lines)


def complete(words: Sequence[str], root: Path) -> Answer:
    """Return what can stand in the place of the last word.

    Args:
        words: Those of a command line after the program, up to the one that is being typed, which may be empty.
        root: The checkout whose facts are meant where the words do not name one.
    """
    *before, current = words or ("",)
    if not before and not current.startswith("-"):
        return _matching(current, _commands())
    name = before.pop(0) if before and before[0] in COMMANDS else BUILD
    line = Line(grammar_of(name), root)
    for word in before:
        line.take(word)
    return line.answer(current)


def _commands() -> Iterator[Candidate]:
    return (Candidate(name, grammar_of(name).summary) for name in COMMANDS)


def _matching(word: str, candidates: Iterable[Candidate], *, head: str = "", paths: Paths = "none") -> Answer:
    fitting = (Candidate(head + each.word, each.note) for each in candidates if each.word.startswith(word))
    return Answer(candidates=tuple(fitting), paths=paths)


@dataclass
class Line:
    """What was typed so far.

    Attributes:
        grammar: Of the command.
        default_root: The checkout, where ``--root`` names no other.
        given: Values by the longest name of their option, or ``""`` for positional ones.
        waiting: The option whose value comes next.
        only_positional: Whether ``--`` has been passed.
    """

    grammar: Grammar
    default_root: Path
    given: dict[str, list[str]] = field(default_factory=dict)
    waiting: Argument | None = None
    only_positional: bool = False

    @cached_property
    def options(self) -> Mapping[str, Argument]:
        """Options by each of their names."""
        return {name: argument for argument in self.grammar.arguments() for name in argument.names}

    def take(self, word: str) -> None:
        """Take a word that is complete."""
        if self.waiting is not None:
            self._give(self.waiting.names[-1], word)
            self.waiting = None
        elif self.only_positional or not word.startswith("-"):
            self._give("", word)
        elif word == "--":
            self.only_positional = True
        else:
            name, equals, value = word.partition("=")
            argument = self.options.get(name)
            if argument is None:
                return
            if _takes_value(argument) and not equals:
                self.waiting = argument
            else:
                self._give(argument.names[-1], value)

    def _give(self, name: str, value: str) -> None:
        self.given.setdefault(name, []).append(value)

    def answer(self, word: str) -> Answer:
        """Return what the word that is being typed can become."""
        if self.waiting is not None:
            return self._values(self.waiting, word)
        name, equals, value = word.partition("=")
        if equals and name in self.options and not self.only_positional:
            return self._values(self.options[name], value, head=f"{name}=")
        if word.startswith("-") and not self.only_positional:
            return _matching(word, self._options())
        argument = self._positional()
        if argument is not None:
            return self._values(argument, word)
        return Answer() if self.only_positional else _matching(word, self._options())

    def _options(self) -> Iterator[Candidate]:
        for argument in self.grammar.arguments():
            if argument.names and (argument.repeats or argument.names[-1] not in self.given):
                yield Candidate(argument.names[-1], argument.help)

    def _positional(self) -> Argument | None:
        """Return the positional argument that comes next."""
        arguments = [argument for argument in self.grammar.arguments() if not argument.names]
        for argument in arguments[len(self.given.get("", ())) :]:
            return argument
        return next((argument for argument in arguments[-1:] if argument.repeats), None)

    def _values(self, argument: Argument, word: str, *, head: str = "") -> Answer:
        if argument.value == "COMMAND":
            return _matching(word, _commands())
        if argument.choices:
            return _matching(word, map(Candidate, argument.choices), head=head)
        placeholders = argument.value.split("|")
        paths: Paths = next((PATHS[each] for each in placeholders if each in PATHS), "none")
        candidates = [each for placeholder in placeholders for each in self._named(placeholder, argument)]
        used = self.given.get(argument.names[-1] if argument.names else "", ()) if argument.repeats else ()
        return _matching(word, (each for each in candidates if each.word not in used), head=head, paths=paths)

    # What the facts say.

    @cached_property
    def facts(self) -> Facts:
        """The rows of the checkout."""
        root = self._first("--root")
        return skim(Path(root).expanduser() if root else self.default_root)

    def _first(self, option: str) -> str:
        return self.given.get(option, [""])[0]

    def _rows(self, leaving: str = "") -> Iterator[TargetRow]:
        """Yield the targets that the words so far allow, whatever they say of one option."""
        sources = self.options.get("--sources")
        wanted = {
            "--framework": self._first("--framework"),
            "--cuda": self._first("--cuda"),
            "--framework-version": self._first("--framework-version"),
            "--python": self._first("--python"),
            "--sources": self._first("--sources") or (sources.default if sources and sources.default else ""),
        }
        rows = {self.facts.name_of(row): row for row in self.facts.targets}
        named = rows.keys() & self.given.get("", ())
        for name, row in rows.items():
            values = {
                "--framework": row.framework,
                "--cuda": row.cuda,
                "--framework-version": row.version,
                "--python": self.facts.python_of(row),
                "--sources": self.facts.sources_of(row),
            }
            fits = all(not value or option == leaving or values[option] == value for option, value in wanted.items())
            if fits and (not named or name in named):
                yield row

    def _named(self, placeholder: str, argument: Argument) -> Iterator[Candidate]:
        """Yield the values that a placeholder can stand for."""
        if placeholder == "ENGINE":
            from trainworks.engine import ENGINES

            yield from map(Candidate, ENGINES)
        elif placeholder in ("TARGET", "GLOB"):
            for row in sorted(self.facts.targets, key=lambda row: (row.framework, version_key(row.version), row.cuda)):
                note = f"{row.framework} {row.version}, {row.cuda}, Python {self.facts.python_of(row)}"
                yield Candidate(self.facts.name_of(row), f"{note}, {self.facts.sources_of(row)}")
        elif placeholder == "FRAMEWORK":
            yield from _distinct((row.framework, "") for row in self._rows("--framework"))
        elif placeholder == "CELL":
            cells = ((row.cuda, self.facts.cuda_by_name[row.cuda].version) for row in self._rows("--cuda"))
            yield from _distinct((cell, f"CUDA {version}" if version else "") for cell, version in cells)
        elif placeholder == "VERSION":
            yield from _distinct((row.version, row.framework) for row in self._rows("--framework-version"))
        elif placeholder == "PYTHON":
            yield from _distinct((self.facts.python_of(row), "") for row in self._rows("--python"))
        elif placeholder == "COMPONENT":
            yield from self._components(without="--without" in argument.names)

    def _components(self, *, without: bool) -> Iterator[Candidate]:
        """Yield the optional components of the targets that are meant: what they lack, or what they have."""
        found: dict[str, Component] = {}
        for row in self._rows():
            sources, cell = self.facts.sources_of(row), self.facts.cuda_by_name[row.cuda]
            found |= {
                each.name: each for each in self.facts.components if each.fits(row.framework, sources, cell, row.base)
            }
        for name, component in found.items():
            if not component.required and component.default == without:
                yield Candidate(name, component.summary)


def _takes_value(argument: Argument) -> bool:
    return bool(argument.value or argument.choices)


def _distinct(pairs: Iterable[tuple[str, str]]) -> Iterator[Candidate]:
    """Yield each word once, versions in their order."""
    found: dict[str, list[str]] = {}
    for word, note in pairs:
        found.setdefault(word, []).append(note)
    for word in sorted(found, key=lambda word: (version_key(word), word)):
        yield Candidate(word, ", ".join(sorted({note for note in found[word] if note})))
