"""Read pip's settings and requirements files, by pip's documentation, without a module of pip.

``install.py`` imports this module. The builder runs it as a program, which prints the settings as
JSON.

The command ``pip config list`` finds the files and variables of settings, and merges them. Of a
requirements file the lines and options are parsed; uv interprets the requirements.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, Iterator, NamedTuple, NoReturn, Sequence

_COMMENT = re.compile(r"(^|\s+)#.*$")
_SECTIONS = ("global", "install", ":env:")
"""Sections of pip's settings: a later one wins."""

_TYPES_OF_NUMBERS = {"timeout": float, "retries": int}

_YES, _NO = ("y", "yes", "t", "true", "on", "1"), ("n", "no", "f", "false", "off", "0")


class SettingsError(Exception):
    """pip cannot read its settings, or a file of requirements; with the reason."""


class Settings(NamedTuple):
    """The settings of ``pip install``, from files and ``PIP_*``.

    Attributes:
        index_url: ``""`` for PyPI.
        extra_index_urls: Further indexes.
        find_links: Folders and pages.
        no_index: Whether no index is used.
        trusted_hosts: Hosts without a check of certificates.
        pre: Whether pre-releases are allowed.
        cert: A bundle of certificates; ``""`` for none.
        client_cert: A file; ``""`` for none.
        timeout: Seconds; ``""`` for pip's own.
        retries: Times; ``""`` for pip's own.
        proxy: An address; ``""`` for none.
        no_binary: Names, or ``:all:``.
        only_binary: Names, or ``:all:``.
        constraints: Files.
        target: A folder; ``""`` for the environment.
        prefix: A folder; ``""`` for the environment.
        no_deps: Whether dependencies are left out.
        build_isolation: Whether builds have an environment of their own.
        keyring_provider: ``""`` for pip's own choice.
        break_system_packages: Whether the distribution's Python may be changed.
    """

    index_url: str = ""
    extra_index_urls: Sequence[str] = ()
    find_links: Sequence[str] = ()
    no_index: bool = False
    trusted_hosts: Sequence[str] = ()
    pre: bool = False
    cert: str = ""
    client_cert: str = ""
    timeout: str = ""
    retries: str = ""
    proxy: str = ""
    no_binary: Sequence[str] = ()
    only_binary: Sequence[str] = ()
    constraints: Sequence[str] = ()
    target: str = ""
    prefix: str = ""
    no_deps: bool = False
    build_isolation: bool = True
    keyring_provider: str = ""
    break_system_packages: bool = False

    @property
    def names_a_source(self) -> bool:
        """Whether packages come from another source than PyPI."""
        return bool(self.index_url or self.extra_index_urls or self.find_links or self.no_index)


_FIELD_OF_KEY = {
    "index-url": "index_url",
    "pypi-url": "index_url",
    "extra-index-url": "extra_index_urls",
    "find-links": "find_links",
    "no-index": "no_index",
    "trusted-host": "trusted_hosts",
    "pre": "pre",
    "cert": "cert",
    "client-cert": "client_cert",
    "timeout": "timeout",
    "default-timeout": "timeout",
    "retries": "retries",
    "proxy": "proxy",
    "no-binary": "no_binary",
    "only-binary": "only_binary",
    "constraint": "constraints",
    "target": "target",
    "prefix": "prefix",
    "no-deps": "no_deps",
    "no-dependencies": "no_deps",
    "no-build-isolation": "build_isolation",
    "keyring-provider": "keyring_provider",
    "break-system-packages": "break_system_packages",
}


def read_settings() -> Settings:
    """Read the settings of this Python's ``pip install``, from its files and variables.

    Raises:
        SettingsError: pip cannot read a file, or a value has the wrong form.
    """
    by_section: dict[str, dict[str, str]] = {section: {} for section in _SECTIONS}
    has_pip = importlib.util.find_spec("pip") is not None
    listed = _ask_pip("list") if has_pip else _variables_of_pip()
    for line in listed.splitlines():
        # For example: global.index-url='https://...'
        name, equals, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if not equals or section not in by_section or key not in _FIELD_OF_KEY:
            continue
        text = str(ast.literal_eval(value))
        if by_section[section].get(key, text) != text:
            # Two files set the key. They are listed by their names, not in order: only pip knows
            # which one counts.
            text = _ask_pip("get", name).rstrip("\n")
        by_section[section][key] = text
    values: dict[str, Any] = {}
    for section in _SECTIONS:
        for key, value in by_section[section].items():
            # pip ignores empty values.
            if value:
                _set(values, key, value)
    return Settings(**values)


def _variables_of_pip() -> str:
    """Return pip's variables in the form of ``pip config list``, for a Python without pip.

    pip's files are not read: only pip knows which of them count.
    """
    prefix = "PIP_"
    rows = []
    for name, value in os.environ.items():
        if name.startswith(prefix):
            key = name[len(prefix) :].lower().replace("_", "-")
            rows.append(f":env:.{key}={value!r}\n")
    return "".join(rows)


def _ask_pip(*words: str) -> str:
    """Run ``pip config`` with these words; return its output. Raises SettingsError if it fails."""
    command = (sys.executable, "-I", "-m", "pip", "config", *words, "--disable-pip-version-check")
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode:
        errors = done.stderr.decode("utf-8", "replace")
        reason = " ".join(errors.split()) or f"pip ended with {done.returncode}"
        raise SettingsError(f"pip cannot read its settings: {reason}")
    return done.stdout.decode("utf-8", "replace")


def _set(values: dict[str, Any], key: str, value: str) -> None:
    """Convert a value of pip's settings, and set it in place of an earlier one.

    Names of ``no-binary`` and ``only-binary`` are added to the earlier ones.

    Args:
        values: Field of ``Settings`` -> its value.
        key: pip's name, for example ``extra-index-url``.
        value: The value as text.

    Raises:
        SettingsError: The value has the wrong form.
    """
    name = _FIELD_OF_KEY[key]
    default = Settings._field_defaults[name]
    if isinstance(default, bool):
        if value.lower() not in (*_YES, *_NO):
            raise SettingsError(
                f"pip cannot read its settings: {key} is {value!r}, and neither yes nor no"
            )
        values[name] = value.lower() in _YES
    elif name in ("no_binary", "only_binary"):
        formats = [name_ for name_ in value.split(",") if name_]
        values[name] = [*values.get(name, ()), *formats]
    elif isinstance(default, tuple):
        values[name] = value.split()
    else:
        values[name] = value.strip()
        try:
            _TYPES_OF_NUMBERS.get(name, str)(values[name])
        except ValueError as error:
            raise SettingsError(
                f"pip cannot read its settings: {key} is {value!r}, and not a number"
            ) from error


class Row(NamedTuple):
    """A line of a requirements file.

    Attributes:
        file: The file.
        number: Number of its first line.
        place: Origin of the line, if a program wrote the file; else ``""``.
        requirement: The requirement; ``""`` for a line of options.
        options: Its options.
        constraint: Whether the requirement only constrains.
        problem: Why pip cannot read the line, which is then all in ``requirement``; else ``""``.
    """

    file: Path
    number: int
    place: str
    requirement: str
    options: argparse.Namespace
    constraint: bool
    problem: str = ""


class _Options(argparse.ArgumentParser):
    """Parses the options of a line; an error becomes a SettingsError."""

    def error(self, message: str) -> NoReturn:
        """Raise SettingsError, in place of an exit of the program."""
        raise SettingsError(message)


def _make_parser() -> argparse.ArgumentParser:
    """Return a parser for the options that pip allows in a line of a requirements file."""
    parser = _Options(add_help=False, allow_abbrev=False, argument_default=None)
    parser.add_argument("-i", "--index-url", "--pypi-url")
    for name in (
        "--extra-index-url",
        "--trusted-host",
        "--no-binary",
        "--only-binary",
        "--use-feature",
        "--hash",
    ):
        parser.add_argument(name, action="append", default=[])
    for names in (
        ("-r", "--requirement"),
        ("-c", "--constraint"),
        ("-e", "--editable"),
        ("-f", "--find-links"),
        ("-C", "--config-settings", "--config-setting"),
        ("--global-option",),
    ):
        parser.add_argument(*names, action="append", default=[])
    for name in ("--no-index", "--pre", "--prefer-binary", "--require-hashes"):
        parser.add_argument(name, action="store_true")
    return parser


def read_rows(file: Path, *, constraint: bool = False, above: Sequence[Path] = ()) -> Iterator[Row]:
    """Yield the lines of a requirements file, and of the files that it includes, in their order.

    A line that pip cannot read has a ``problem``, so that a caller can name all of them.

    Args:
        file: The file.
        constraint: Whether its requirements only constrain.
        above: Files that include this one.

    Raises:
        SettingsError: A file includes itself.
        UnicodeDecodeError: A file is not UTF-8.
        OSError: A file does not exist.
    """
    if file.resolve() in above:
        raise SettingsError(f"{file} includes itself")
    parser = _make_parser()
    for number, text, place in _logical_lines(_text_of(file)):
        requirement, option_words = _split_options(text)
        try:
            options = parser.parse_args(shlex.split(option_words))
        except (SettingsError, ValueError) as error:
            yield Row(file, number, place, text, parser.parse_args([]), constraint, str(error))
            continue
        if requirement or not (options.requirement or options.constraint):
            yield Row(file, number, place, requirement, options, constraint)
            continue
        included = [(name, False) for name in options.requirement]
        included += [(name, True) for name in options.constraint]
        for name, only_constrains in included:
            if "://" in name:
                yield Row(file, number, place, "", options, constraint)
            else:
                files = (*above, file.resolve())
                yield from read_rows(file.parent / name, constraint=only_constrains, above=files)


def _split_options(text: str) -> tuple[str, str]:
    """Split a line before its first option: ``numpy --hash=x`` into ``numpy`` and ``--hash=x``."""
    words = text.split(" ")
    first_option = len(words)
    for index, word in enumerate(words):
        if word.startswith("-"):
            first_option = index
            break
    return " ".join(words[:first_option]).strip(), " ".join(words[first_option:])


def _text_of(file: Path) -> str:
    """Return the text of a file in UTF-8, or in UTF-16 with a byte order mark.

    Raises OSError or UnicodeDecodeError.
    """
    content = file.read_bytes()
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return content.decode("utf-16")
    return content.decode("utf-8-sig")


def _logical_lines(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield number, text and origin of each logical line.

    A backslash joins lines, comments are removed, and variables are replaced by their values.
    """
    parts: list[str] = []
    start = 1
    for number, line in enumerate(text.splitlines(), start=1):
        is_comment = line.lstrip().startswith("#")
        if not parts:
            start = number
        # A comment with a backslash at its end does not go on, but ends the lines before it.
        if line.endswith("\\") and not is_comment:
            parts.append(line.rstrip("\\"))
            continue
        if is_comment:
            line = f" {line}"
        joined = "".join([*parts, line])
        parts = []
        yield from _without_comment(start, joined)
    if parts:
        yield from _without_comment(start, "".join(parts))


def _without_comment(number: int, line: str) -> Iterator[tuple[int, str, str]]:
    """Yield number, text and origin of a logical line; nothing for an empty one.

    ``${NAME}`` is replaced by the variable's value, unless that is empty. The origin is the text
    after ``#@``, which a program writes.
    """
    origin = re.search(r" #@ (.+)$", line)
    plain = _COMMENT.sub("", line).strip()
    for variable, name in re.findall(r"(\$\{([A-Z0-9_]+)\})", plain):
        plain = plain.replace(variable, os.environ.get(name) or variable)
    if plain:
        yield number, plain, origin.group(1) if origin else ""


def main() -> int:
    """Print pip's settings as JSON; return the exit status."""
    try:
        settings = read_settings()
    except SettingsError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{json.dumps(settings._asdict())}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
