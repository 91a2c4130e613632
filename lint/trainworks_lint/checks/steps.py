"""Shell scripts that do something else than they seem to do."""

from __future__ import annotations

import re
from collections.abc import Iterator

from trainworks_lint.checks.downloads import install_arguments
from trainworks_lint.document import Document
from trainworks_lint.findings import Hit
from trainworks_lint.shell import Command

INSTALLERS = frozenset({"conda", "mamba", "micromamba", "poetry", "uv", "pipx", "pdm"})
VERSION_TEXT = re.compile(r"^['\"]?v?\d+(?:\.\d+)+")
VERSION_NAME = re.compile(r"(?i)version|(?:^|[^a-z])vers?(?![a-z])")


def _installs(command: Command) -> bool:
    return install_arguments(command) is not None or (
        command.program in INSTALLERS and any(word.value in ("install", "add", "create") for word in command.arguments)
    )


def unquoted_version_operator(document: Document) -> Iterator[Hit]:
    """Find version ranges that the shell reads as redirections."""
    for run in document.runs():
        for command in run.script.commands:
            for redirect in command.redirects:
                if redirect.operator not in (">", ">>", "<") or not redirect.word_before:
                    continue
                range_of_version = redirect.target.startswith("=") or (
                    _installs(command) and re.match(r"v?\d+(?:\.|,|$)", redirect.target)
                )
                if range_of_version and not re.fullmatch(r"\d", redirect.word_before):
                    written = f"{redirect.word_before}{redirect.operator}{redirect.target}"
                    does = "reads the file" if redirect.operator == "<" else "writes the file"
                    yield Hit(redirect.line, f"`{written}` {does} `{redirect.target}` and does not limit the version")


def version_compared_as_text(document: Document) -> Iterator[Hit]:
    """Find versions that are compared as text."""
    for run in document.runs():
        for comparison in run.script.comparisons:
            sides = (comparison.left, comparison.right)
            if any(VERSION_TEXT.match(side) for side in sides) or any(
                "$" in side and VERSION_NAME.search(side) for side in sides
            ):
                shown = f"{comparison.left} {comparison.operator} {comparison.right}"
                yield Hit(comparison.line, f"`{shown}` compares text: 1.5 comes after 1.44, and 1.100 before it")
        for command in run.script.commands:
            if command.program in ("[", "test"):
                values = [word.value for word in command.arguments]
                for number, value in enumerate(values):
                    around = (*values[max(number - 1, 0) : number], *values[number + 1 : number + 2])
                    if value in ("<", ">") and any(VERSION_TEXT.match(side) for side in around):
                        yield Hit(command.line, "`test` compares text: 1.5 comes after 1.44, and 1.100 before it")


def failure_hidden(document: Document) -> Iterator[Hit]:
    """Find steps that succeed even if they failed."""
    for run in document.runs():
        for line, written in run.script.hidden_failures:
            yield Hit(line, f"`{written}` lets the step succeed even if it failed")


def sources_deleted(document: Document) -> Iterator[Hit]:
    """Find steps that delete the list of package sources."""
    for run in document.runs():
        for command in run.script.commands:
            if command.program != "rm":
                continue
            for word in command.arguments:
                if re.fullmatch(r"/etc/apt/sources\.list(?:\.d(?:/\*?)?)?|/etc/yum\.repos\.d(?:/\*?)?", word.value):
                    yield Hit(
                        word.line, f"{word.value} is deleted: packages cannot be installed in this image any more"
                    )


def upgrade_in_build(document: Document) -> Iterator[Hit]:
    """Find upgrades of all packages."""
    for run in document.runs():
        for command in run.script.commands:
            values = [word.value for word in command.arguments]
            words = [
                value
                for before, value in zip(["", *values], values, strict=False)
                if not value.startswith("-") and before not in ("--releasever", "-o", "-c", "-t")
            ]
            verb = words[0] if words else ""
            debian = command.program in ("apt", "apt-get") and verb in ("upgrade", "dist-upgrade", "full-upgrade")
            rpm = command.program in ("yum", "dnf", "microdnf", "zypper") and verb in ("upgrade", "update", "dup")
            alpine = command.program == "apk" and verb == "upgrade"
            # With names of packages it upgrades only these.
            if len(words) == 1 and (debian or rpm or alpine):
                yield Hit(
                    command.line,
                    f"`{command.program} {verb}` installs the newest packages, which change from day to day",
                )


def too_deeply_nested(document: Document) -> Iterator[Hit]:
    """Find scripts that are not read to their end."""
    for run in document.runs():
        for line in run.script.unread[:1]:
            yield Hit(line, "this step is too deeply nested to read: parts of it are not checked")


def blank_line_in_instruction(document: Document) -> Iterator[Hit]:
    """Find empty lines within a continued instruction."""
    for instruction in document.instructions:
        first, last = instruction.line, instruction.end_line
        if instruction.heredocs:
            last = instruction.heredocs[0].line - 1
        for number in range(first + 1, last + 1):
            if not document.lines[number - 1].strip():
                yield Hit(number, "an empty line inside a continued instruction")
