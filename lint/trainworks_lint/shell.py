"""Reads shell scripts: commands, words, redirects and variables, from tree-sitter's grammar of bash."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

from trainworks_lint.source import Source

SHELLS = frozenset({"sh", "bash", "dash", "ash", "zsh", "ksh"})

PRINTERS = frozenset({"echo", "printf"})

LANGUAGE = Language(tree_sitter_bash.language())

# Programs that run the program named in their arguments: their options that take a value, and the number of operands
# before that program.
WRAPPERS: dict[str, tuple[frozenset[str], int]] = {
    "sudo": (frozenset({"-u", "-g", "-C", "-h", "-p"}), 0),
    "env": (frozenset({"-u", "-C", "-S"}), 0),
    "exec": (frozenset({"-a"}), 0),
    "nice": (frozenset({"-n"}), 0),
    "time": (frozenset({"-o", "-f"}), 0),
    "timeout": (frozenset({"-k", "-s"}), 1),
    "flock": (frozenset({"-w", "-E"}), 1),
    "xargs": (frozenset({"-I", "-n", "-P", "-L", "-d", "-a", "-s", "-E"}), 0),
    "nohup": (frozenset(), 0),
    "command": (frozenset(), 0),
    "builtin": (frozenset(), 0),
    "eatmydata": (frozenset(), 0),
}

ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")

ANSWERING = frozenset({"grep", "egrep", "fgrep", "diff", "cmp", "which"})
"""Programs whose status 1 is an answer and not a failure."""

CLEANERS = frozenset({"rm", "rmdir", "unlink", "true", ":"})
"""Programs that only delete, or do nothing. The image is complete even if they fail."""

CLEANING_VERBS: dict[str, frozenset[str]] = {
    **dict.fromkeys(("pip", "pip3", "uv"), frozenset({"uninstall", "purge", "clean"})),
    **dict.fromkeys(
        ("apt", "apt-get", "yum", "dnf", "microdnf"), frozenset({"remove", "purge", "autoremove", "clean"})
    ),
    **dict.fromkeys(("conda", "mamba", "micromamba"), frozenset({"clean", "remove", "uninstall"})),
    "find": frozenset({"-delete", "rm", "rmdir"}),
    "python": frozenset({"uninstall", "purge"}),
    "python3": frozenset({"uninstall", "purge"}),
}
"""Programs that only delete if one of these words is among their arguments."""

LONGEST_CLEANUP = 20
"""A chain of more commands is not recognised as one that only deletes."""

DEEPEST_SCRIPT = 8
"""Levels of `sh -c '...'` within each other that are read."""

DEEPEST_NESTING = 1000
"""Levels of nested syntax that are read. A chain of && counts as one level, however long it is."""

CHAINS = frozenset({"program", "list", "redirected_statement"})
"""Nodes that do not count as a level: the grammar puts each link of `a && b > c && d` into the next one."""

LONGEST_WORD = 256
"""Characters before a redirection among which the word that it touches is looked for."""


@dataclass(frozen=True)
class Word:
    """One word of a command.

    Attributes:
        written: As it is in the file.
        value: Without quotes, as the program gets it. Variables are not replaced.
        line: Its line.
    """

    written: str
    value: str
    line: int


@dataclass(frozen=True)
class Redirect:
    """A redirection.

    Attributes:
        operator: ``>``, ``>>``, ``<``...
        target: The file's name as written.
        line: Its line.
        word_before: The word directly before the operator; empty if there is a space between them.
    """

    operator: str
    target: str
    line: int
    word_before: str


@dataclass(frozen=True)
class Command:
    """A simple command.

    Attributes:
        words: The program and its arguments, wrappers such as ``sudo`` included.
        assignments: Variables set for it; without words: set in the shell.
        redirects: Its redirections, without here-documents.
        heredoc: The text of its here-documents.
        line: Its first line.
        pipe_targets: The programs that its output is piped through, the last one at the end.
    """

    words: tuple[Word, ...]
    assignments: tuple[Word, ...]
    redirects: tuple[Redirect, ...]
    heredoc: str
    line: int
    pipe_targets: tuple[str, ...]

    @property
    def own_words(self) -> tuple[Word, ...]:
        """The words without wrappers (sudo, env, timeout...) and their options."""
        words = self.words
        while words and program_name(words[0].value) in WRAPPERS:
            valued, operands = WRAPPERS[program_name(words[0].value)]
            words = words[1:]
            while words:
                value = words[0].value
                if value.startswith("-"):
                    words = words[2:] if value in valued else words[1:]
                elif ASSIGNMENT.match(value):
                    words = words[1:]
                elif operands:
                    operands -= 1
                    words = words[1:]
                else:
                    break
        return words

    @property
    def program(self) -> str:
        """The program's name without its folder; empty for a bare assignment."""
        words = self.own_words
        return program_name(words[0].value) if words else ""

    @property
    def arguments(self) -> tuple[Word, ...]:
        """The words after the program."""
        return self.own_words[1:]

    @property
    def prints_to_terminal(self) -> bool:
        """Whether it only prints into the log of the build."""
        writes = any(redirect.operator in (">", ">>", "&>", ">|") for redirect in self.redirects)
        return self.program in PRINTERS and not writes and not self.pipe_targets


@dataclass(frozen=True)
class VariableUse:
    """A variable that is read; ``has_default`` if the script handles the case that it is not set (``${A:-1}``)."""

    name: str
    line: int
    has_default: bool


@dataclass(frozen=True)
class Comparison:
    """Two texts compared by ``<`` or ``>`` in ``[``, ``[[`` or ``test``."""

    left: str
    operator: str
    right: str
    line: int


@dataclass
class Script:
    """A shell script, together with the scripts inside it (``sh -c '...'``).

    Attributes:
        commands: In order.
        uses: Variables that are read.
        assigned: Variables that are set.
        comparisons: Of texts.
        hidden_failures: Line and text of each ``|| true`` that hides a failure.
        pipefail: It switches pipefail on.
        unread: Lines of parts that are nested too deeply to be read.
    """

    commands: list[Command] = field(default_factory=list)
    uses: list[VariableUse] = field(default_factory=list)
    assigned: set[str] = field(default_factory=set)
    comparisons: list[Comparison] = field(default_factory=list)
    hidden_failures: list[tuple[int, str]] = field(default_factory=list)
    pipefail: bool = False
    unread: list[int] = field(default_factory=list)


def program_name(word: str) -> str:
    """Return the last part of a path."""
    return word.rstrip("/").rpartition("/")[2]


def parse_script(source: Source) -> Script:
    """Return a script's commands. It never fails: a text that is not shell gives fewer commands."""
    script = Script()
    _Reader(source, script, depth=0).read()
    return script


class _Reader:
    """Walks one syntax tree and adds what it finds to a script."""

    def __init__(self, source: Source, script: Script, depth: int) -> None:
        self.source = source
        self.script = script
        self.depth = depth
        self.escaped: set[int] = set()
        self.redirects: dict[int, list[Node]] = {}

    def read(self) -> None:
        # One byte for each character, so that offsets are the same; the words are cut from the text itself.
        # The grammar loses its way at `[ a \> b ]`: it is shown an operator of the same length that it knows.
        self.escaped = {match.start() for match in re.finditer(r"(?<=\s)\\[<>](?=\s)", self.source.text)}
        shown = re.sub(r"(?<=\s)\\[<>](?=\s)", "!=", self.source.text)
        tree = Parser(LANGUAGE).parse(shown.encode("ascii", "replace"))
        self.walk(tree.root_node, ())

    def text(self, node: Node) -> str:
        return self.source.text[node.start_byte : node.end_byte]

    def line(self, node: Node) -> int:
        return self.source.line(node.start_byte)

    def walk(self, root: Node, pipe_targets: tuple[str, ...]) -> None:
        """Visit all nodes in order. A stack of our own: a chain of && is as deep as it is long."""
        pending: list[tuple[Node, str, tuple[str, ...], int]] = [(root, "", pipe_targets, 0)]
        while pending:
            node, parent, targets, depth = pending.pop()
            if depth > DEEPEST_NESTING:
                self.script.unread.append(self.line(node))
                continue
            children = node.children
            if node.type == "pipeline":
                visited = list(zip(children, self.pipeline(node, targets), strict=True))
            else:
                self.visit(node, parent, targets)
                visited = [(child, targets) for child in children]
            deeper = depth + (node.type not in CHAINS)
            pending += [(child, node.type, through, deeper) for child, through in reversed(visited)]

    def visit(self, node: Node, parent: str, pipe_targets: tuple[str, ...]) -> None:
        match node.type:
            case "command" | "declaration_command" | "unset_command":
                self.command(node, self.redirects.get(node.id, []), pipe_targets)
            case "redirected_statement":
                # To the grammar, `a && b > c` is one statement that is redirected; the shell redirects b.
                body = node.child_by_field_name("body")
                while body is not None and body.type in ("list", "pipeline") and body.named_children:
                    body = body.named_children[-1]
                if body is not None:
                    own = [child for child in node.children if child.type.endswith("_redirect")]
                    self.redirects[body.id] = [*self.redirects.get(body.id, []), *own]
            case "list":
                self.hidden_failure(node)
            case "variable_assignment":
                name = node.child_by_field_name("name")
                if name is not None:
                    self.script.assigned.add(self.text(name).partition("[")[0])
                if parent not in ("command", "declaration_command"):
                    word = self.word(node)
                    self.script.commands.append(Command((), (word,), (), "", word.line, pipe_targets))
            case "for_statement":
                name = node.child_by_field_name("variable")
                if name is not None:
                    self.script.assigned.add(self.text(name))
            case "simple_expansion" | "expansion":
                self.expansion(node)
            case "binary_expression":
                self.comparison(node)
            case _:
                pass

    def word(self, node: Node) -> Word:
        written = self.text(node)
        return Word(written, unquoted(written), self.line(node))

    def command(self, node: Node, redirects: list[Node], pipe_targets: tuple[str, ...]) -> None:
        words: list[Word] = []
        assignments: list[Word] = []
        nodes: list[Node] = []
        for child in node.children:
            if child.type == "variable_assignment":
                assignments.append(self.word(child))
            elif child.type.endswith("_redirect"):
                redirects = [*redirects, child]
            elif child.type != "ERROR":
                words.append(self.word(child))
                nodes.append(child)
        found: list[Redirect] = []
        heredoc = ""
        pending = list(redirects)
        while pending:
            redirect = pending.pop(0)
            if redirect.type == "heredoc_redirect":
                heredoc += "".join(self.text(child) for child in redirect.children if child.type == "heredoc_body")
                pending += [child for child in redirect.children if child.type == "file_redirect"]
                # `cat <<EOF | bash` : the grammar keeps what follows the mark inside the redirection.
            elif redirect.type == "file_redirect":
                # The grammar takes the words after a redirection for further targets; they are arguments.
                targets = redirect.children_by_field_name("destination")
                operator = next((child for child in redirect.children if not child.is_named), None)
                if targets and operator is not None:
                    start = redirect.start_byte
                    before = self.source.text[max(start - LONGEST_WORD, 0) : start]
                    touching = re.search(r"[^\s;&|()<>]+$", before)
                    found.append(
                        Redirect(
                            self.text(operator),
                            self.text(targets[0]),
                            self.line(redirect),
                            touching[0] if touching and operator.start_byte == start else "",
                        )
                    )
                for child in targets[1:]:
                    words.append(self.word(child))
                    nodes.append(child)
        command = Command(tuple(words), tuple(assignments), tuple(found), heredoc, self.line(node), pipe_targets)
        self.script.commands.append(command)
        if node.type == "declaration_command":
            self.script.assigned.update(word.value for word in words[1:] if re.fullmatch(r"\w+", word.value))
        if command.program in ("read", "mapfile", "readarray", "getopts"):
            self.script.assigned.update(word.value for word in command.arguments if re.fullmatch(r"\w+", word.value))
        if command.program == "set" and any("pipefail" in word.value for word in command.arguments):
            self.script.pipefail = True
        self.nested(command, words, nodes)

    def nested(self, command: Command, words: list[Word], nodes: list[Node]) -> None:
        """Read `sh -c '...'`, wherever in the command it stands."""
        if command.program in PRINTERS:
            return
        for number, word in enumerate(words):
            if program_name(word.value) not in SHELLS:
                continue
            for at in range(number + 1, len(words) - 1):
                if re.fullmatch(r"-[a-zA-Z]*c", words[at].value):
                    self.nested_text(nodes[at + 1], pipefail=any(w.value == "pipefail" for w in words[number:at]))
                    return

    def nested_text(self, node: Node, *, pipefail: bool) -> None:
        if self.depth >= DEEPEST_SCRIPT:
            self.script.unread.append(self.line(node))
            return
        inner = self.source.part(node.start_byte, node.end_byte)
        if node.type in ("raw_string", "string"):
            inner = inner.part(1, len(inner.text) - 1)
        if node.type == "string":
            inner = inner.without_escapes('"\\$`')
        self.script.pipefail = self.script.pipefail or pipefail
        _Reader(inner, self.script, self.depth + 1).read()

    def pipeline(self, node: Node, outer: tuple[str, ...]) -> list[tuple[str, ...]]:
        """Return for each child of a pipeline the programs that its output is piped through."""
        parts = [child for child in node.children if child.is_named]
        # `a | b > file` is a redirection of the whole pipeline to the grammar; only the names matter here.
        names = [self.first_program(part) for part in parts]
        if names and names[-1] in ("true", ":"):
            self.script.hidden_failures.append((self.line(parts[-1]), f"| {names[-1]}"))
        through = []
        following = names[1:]
        for child in node.children:
            through.append((*following, *outer))
            if child.is_named:
                following = following[1:]
        return through

    def first_program(self, node: Node) -> str:
        """Return the program of the first command within a node."""
        return next((command.program for command in self.commands_of(node) if command.program), "")

    def commands_of(self, root: Node, *, last_first: bool = False) -> Iterator[Command]:
        """Yield the simple commands within a node, without those inside their words."""
        pending = [root]
        while pending:
            node = pending.pop()
            if node.type == "command":
                probe = Script()
                # At this depth it reads no scripts inside the command.
                _Reader(self.source, probe, DEEPEST_SCRIPT).command(node, [], ())
                yield from probe.commands[:1]
            else:
                pending += node.children if last_first else reversed(node.children)

    def hidden_failure(self, node: Node) -> None:
        if len(node.children) != 3 or node.children[1].type != "||":
            return
        left, _, right = node.children
        words = self.text(right).split()
        if words not in (["true"], [":"], ["exit", "0"], ["/bin/true"]):
            return
        if left.type == "command" and self.first_program(left) in ANSWERING:
            return
        # The last one first: in a long chain it is the nearest.
        commands = list(islice(self.commands_of(left, last_first=True), LONGEST_CLEANUP))
        if 0 < len(commands) < LONGEST_CLEANUP and all(map(_only_cleans, commands)):
            return
        self.script.hidden_failures.append((self.line(node.children[1]), f"|| {' '.join(words)}"))

    def expansion(self, node: Node) -> None:
        names = [child for child in node.children if child.type == "variable_name"]
        if names:
            operators = {self.text(child) for child in node.children if not child.is_named}
            has_default = bool(operators & {":-", "-", ":=", "=", ":+", "+", ":?", "?"})
            self.script.uses.append(VariableUse(self.text(names[0]), self.line(node), has_default))

    def comparison(self, node: Node) -> None:
        left, operator, right = (node.child_by_field_name(name) for name in ("left", "operator", "right"))
        if left is None or operator is None or right is None:
            return
        sign = self.text(operator).strip()
        if sign in ("<", ">") or operator.start_byte in self.escaped:
            parent = node.parent
            while parent is not None and parent.type in ("binary_expression", "parenthesized_expression"):
                parent = parent.parent
            # In (( )) numbers are compared.
            if parent is not None and parent.type == "test_command" and not self.text(parent).startswith("(("):
                self.script.comparisons.append(Comparison(self.text(left), sign, self.text(right), self.line(operator)))


def _only_cleans(command: Command) -> bool:
    """Return whether a command only deletes files or packages."""
    verbs = CLEANING_VERBS.get(command.program, frozenset())
    return command.program in CLEANERS or any(word.value in verbs for word in command.arguments)


def unquoted(written: str) -> str:
    """Return a word as its program gets it: without quotes and escapes. Variables are not replaced."""
    result: list[str] = []
    quote = ""
    characters = iter(written)
    for character in characters:
        if quote == "'":
            if character == "'":
                quote = ""
            else:
                result.append(character)
        elif character == "\\":
            following = next(characters, "")
            result.append(following if not quote or following in '"\\$`' else character + following)
        elif character == quote:
            quote = ""
        elif character in "'\"" and not quote:
            quote = character
        else:
            result.append(character)
    return "".join(result)


def mentions(command: Command) -> Iterator[tuple[int, str]]:
    """Yield the words, assignments and here-documents of a command, with their lines."""
    for word in (*command.words, *command.assignments):
        yield word.line, word.value
    if command.heredoc:
        yield command.line, command.heredoc
