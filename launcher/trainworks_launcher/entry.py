"""The user's program: which one, where it is, and with which words it is started. Pure.

Four kinds. ``script``: a .py file. ``module``: ``-m package.module``. ``shell``: a .sh file. ``command``: any other
executable file of the code directory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Mapping

from trainworks_launcher import names
from trainworks_launcher.values import Json, text

_NAME = re.compile(r"[A-Za-z0-9._+-][A-Za-z0-9._+/-]*")
_MODULE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")
REQUIREMENTS = "requirements.txt"
"""File beside the entry point that is installed before the start."""


@dataclass(frozen=True)
class Code:
    """The user's code as found on this host.

    directory: where it is run from. archive: a local tar.gz to unpack there first, "" for none. entries: relative
    paths in it, sorted, bounded. executable: those of them with the execute bit.
    """

    directory: str
    archive: str = ""
    entries: tuple[str, ...] = ()
    executable: tuple[str, ...] = ()


@dataclass(frozen=True)
class EntryPoint:
    """The user's program: its kind ("script", "module", "shell", "command") and its name inside the code directory."""

    kind: str
    name: str

    @property
    def module_name(self) -> str:
        """The name without ``.py``, as SM_MODULE_NAME has it."""
        return self.name[: -len(".py")] if self.name.endswith(".py") else self.name


def program_name(variables: Mapping[str, str], reserved: Mapping[str, Json]) -> str:
    """The entry point asked for: SAGEMAKER_PROGRAM, else the hyperparameter (that order is TT's); "" if neither."""
    return (variables.get(names.PROGRAM_VARIABLE) or text(reserved.get(names.PROGRAM))).strip()


def code_location(base_directory: str, variables: Mapping[str, str], reserved: Mapping[str, Json]) -> str:
    """Where the code is said to be: the job's hyperparameter, else SAGEMAKER_SUBMIT_DIRECTORY, else BASE/code.

    The hyperparameter belongs to one job, the variable is usually baked into an image, so the former wins.
    """
    asked = text(reserved.get(names.SUBMIT_DIRECTORY)) or variables.get(names.SUBMIT_DIRECTORY_VARIABLE, "")
    return asked.strip() or f"{base_directory}/{names.CODE_DIRECTORY}"


def is_archive(location: str) -> bool:
    """Whether a code location is a tar.gz."""
    return location.endswith((".tar.gz", ".tgz"))


def parse_entry_point(program: str) -> EntryPoint:
    """Tell the kind of a program from its name.

    Raises ValueError with the reason for a name that could leave the code directory or be taken for an option.
    """
    if program.startswith(("-m ", "-m\t")):
        module = program[2:].strip()
        if not _MODULE.fullmatch(module):
            raise ValueError(f"{module!r} is not the name of a Python module")
        return EntryPoint("module", module)
    if program.startswith(("-", "/")):
        raise ValueError(f"{program!r} starts with {program[0]!r}")
    if not _NAME.fullmatch(program):
        raise ValueError(f"{program!r} has characters other than letters, digits and . _ + - /")
    if any(segment in ("", ".", "..") for segment in program.split("/")):
        raise ValueError(f"{program!r} has an empty, '.' or '..' segment")
    if program.endswith(".py"):
        return EntryPoint("script", program)
    return EntryPoint("shell" if program.endswith(".sh") else "command", program)


def program_words(entry: EntryPoint, code: Code, python: str, shell: str) -> tuple[str, ...]:
    """argv of the program on its own, without its arguments; relative to the code directory.

    A shell script with the execute bit is run as it is, so that its own first line chooses the interpreter.
    """
    if entry.kind == "script":
        return (python, entry.name)
    if entry.kind == "module":
        return (python, "-m", entry.name)
    if entry.kind == "shell" and entry.name not in code.executable:
        return (shell, entry.name)
    return (f"./{entry.name}",)
