"""The user's program: which one, where it is, and with which words it is started. Pure.

Six kinds. ``script``: a .py file. ``module``: ``-m package.module``. ``shell``: a .sh file.
``package``: the code directory is a project that pip can install, and the program is a module of
it. ``command``: any other executable file.
``line``: a line of shell that ModelTrainer calls a command; it is its user's, and run as it is.
"""

from __future__ import annotations

import re
from typing import Container, Mapping, NamedTuple, Sequence

from trainworks_launcher.contract import names
from trainworks_launcher.contract.errors import Problem, nearest
from trainworks_launcher.contract.json_values import Json, text

_NAME = re.compile(r"[A-Za-z0-9._+-][A-Za-z0-9._+/-]*")
_MODULE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")
REQUIREMENTS = "requirements.txt"
"""File at the root of the code that is installed before the start."""

PROJECT_FILES = ("setup.py", "pyproject.toml")
"""Files at the root of the code that make it a project, the first one that is there (the second one
only if it says how to build or what: many a pyproject.toml only has settings of a linter).
"""

INSTALLED = ".trainworks-installed"
"""File at the root of the code in an image that ``build.py extend`` made: a JSON object with
``installed``, the names of REQUIREMENTS and of the project file whose installation is done, and
``files``, the sha256 of every file of the code at that time.
"""

REMOTE = "s3://"
"""Where code can be fetched from."""


class Code(NamedTuple):
    """The user's code as found on this host.

    Attributes:
        directory: Where it runs.
        archive: A tar.gz to unpack there first: a local path, or an address at
            REMOTE; ``""`` for none.
        entries: Relative paths of the files, sorted and bounded. For an archive, with the files
            that exist already; ``()`` while the archive is not fetched.
        executable: Those of ``entries`` that have the execute bit.
        project: Which of PROJECT_FILES makes it an installable project; ``""`` for none.
        notes: Lines for the log about where it comes from.
        fetch: Command line of the program that fetches a remote archive.
        requirements: File that is installed before the start, if it is among the entries.
        installed: What INSTALLED names, if the code has not changed since.
    """

    directory: str
    archive: str = ""
    entries: tuple[str, ...] = ()
    executable: tuple[str, ...] = ()
    project: str = ""
    notes: tuple[str, ...] = ()
    fetch: tuple[str, ...] = ()
    requirements: str = REQUIREMENTS
    installed: tuple[str, ...] = ()

    @property
    def remote(self) -> bool:
        """Whether it has to be fetched before its content is known."""
        return self.archive.startswith(REMOTE)


class EntryPoint(NamedTuple):
    """The user's program: its kind (see above) and its name as given, inside the code directory."""

    kind: str
    name: str

    @property
    def module_name(self) -> str:
        """The name without ``.py``, as SM_MODULE_NAME has it."""
        return self.name[: -len(".py")] if self.name.endswith(".py") else self.name

    @property
    def module(self) -> str:
        """For ``python -m``: ``package/train.py`` is ``package.train``."""
        return self.module_name.replace("/", ".") if self.kind == "package" else self.name

    @property
    def in_python(self) -> bool:
        """Whether a Python interpreter runs it."""
        return self.kind in ("script", "module", "package")


def program_name(variables: Mapping[str, str], reserved: Mapping[str, Json]) -> str:
    """Return the entry point asked for: SAGEMAKER_PROGRAM, else the hyperparameter (as
    sagemaker-training).

    ``""`` if neither is given.
    """
    return (variables.get(names.PROGRAM_VARIABLE) or text(reserved.get(names.PROGRAM))).strip()


def code_location(
    base_directory: str, variables: Mapping[str, str], reserved: Mapping[str, Json]
) -> str:
    """Return where the job's code is: its hyperparameter, else
    SAGEMAKER_SUBMIT_DIRECTORY, else BASE/code.

    The hyperparameter belongs to one job, the variable is usually baked into an
    image, so the former wins.
    """
    asked = text(reserved.get(names.SUBMIT_DIRECTORY)) or variables.get(
        names.SUBMIT_DIRECTORY_VARIABLE, ""
    )
    return asked.strip() or f"{base_directory}/{names.CODE_DIRECTORY}"


def parse_entry_point(program: str, code: Code | None = None) -> EntryPoint:
    """Tell the kind of a program from its name, and from the code where that is known.

    In a project a .py file is a module of it, and so is a name that is not a file: it can import
    its siblings by their package. Raises ValueError with the reason for a name that could leave the
    code directory or be taken for an option.
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
    if program.endswith(".sh"):
        return EntryPoint("shell", program)
    script = program.endswith(".py")
    if code is not None and code.project and (script or program not in code.entries):
        package = EntryPoint("package", program)
        if _MODULE.fullmatch(package.module):
            return package
    return EntryPoint("script" if script else "command", program)


def choose_entry_point(
    program: str, code: Code, programs: Container[str], known: Sequence[Problem]
) -> tuple[EntryPoint, list[Problem]]:
    """Choose the entry point and check it against the code.

    An archive that is not fetched yet is checked later.

    Args:
        program: The name asked for; ``""`` for none.
        code: The code on this host.
        programs: Programs that exist on this host.
        known: What is wrong with the job otherwise. Missing code is not
            reported beside it: it may follow from that.

    Returns:
        The entry point, and what is wrong with it.
    """
    where = f"{names.PROGRAM_VARIABLE} or hyperparameter {names.PROGRAM}"
    place = code.archive or code.directory
    problems: list[Problem] = []
    nothing = EntryPoint("script", "")
    if not code.entries and not code.remote and not known:
        advice = (
            "put the training script there, or say where it is with"
            f" {names.SUBMIT_DIRECTORY_VARIABLE}"
        )
        problems.append(Problem("no code found", place, advice))
    if not program and any(problem.where.endswith(names.HYPERPARAMETERS_FILE) for problem in known):
        return nothing, problems  # the file that cannot be read may name it
    if not program:
        scripts = [name for name in code.entries if name.endswith(".py") and "/" not in name]
        advice = (
            f"set it to one of: {', '.join(scripts[:8])}"
            if scripts
            else "set it to the name of the script"
        )
        return nothing, [*problems, Problem("no entry point is given", where, advice)]
    try:
        point = parse_entry_point(program, code)
    except ValueError as error:
        advice = "give a path below the code directory"
        return nothing, [*problems, Problem(f"the entry point {error}", where, advice)]
    a_file = point.kind != "module" and (point.kind != "package" or point.name.endswith(".py"))
    if a_file and code.entries and point.name not in code.entries:
        candidates = [name for name in code.entries if "/" not in name] or code.entries
        advice = nearest(point.name, candidates)
        problems.append(Problem(f"file not found: {point.name!r} in {place}", where, advice))
    elif point.kind == "command" and code.entries and point.name not in code.executable:
        advice = "make it executable (chmod +x), or name it .py or .sh"
        problems.append(Problem(f"the entry point {point.name!r} is not executable", where, advice))
    return point, [*problems, *_missing_python(point, programs)]


def _missing_python(point: EntryPoint, programs: Container[str]) -> list[Problem]:
    if not point.in_python or "python" in programs:
        return []
    return [Problem("Python is not installed in this image", "program python", "install python3")]


def choose_given_program(
    words: Sequence[str], code: Code, programs: Container[str]
) -> tuple[EntryPoint, tuple[str, ...], list[Problem]]:
    """Choose the entry point of a command line, which may be anywhere on the host.

    Args:
        words: The program and its arguments, as ``source.inspect_program`` returns them.
        code: The code, as that function returns it.
        programs: Programs that exist on this host.

    Returns:
        The entry point, its arguments, and what is wrong with it.
    """
    name, rest = words[0], tuple(words[1:])
    problems: list[Problem] = []
    where = "the command line"
    if name == "-m":
        module = rest[0] if rest else ""
        if not _MODULE.fullmatch(module):
            advice = "give the name of the module: train -- -m package.train"
            problems.append(
                Problem(f"{module!r} is not the name of a Python module", where, advice)
            )
        point, rest = EntryPoint("module", module), rest[1:]
    else:
        kind = "script" if name.endswith(".py") else "shell" if name.endswith(".sh") else "command"
        point = EntryPoint(kind, name)
        if name not in code.entries:
            problem = (
                f"file not found: {name!r} in {code.directory},"
                " and no program on PATH has this name"
            )
            problems.append(Problem(problem, where, nearest(name, code.entries)))
        elif kind == "command" and name not in code.executable:
            advice = "make it executable (chmod +x), or name it .py or .sh"
            problems.append(Problem(f"{name!r} is not executable", where, advice))
    return point, rest, [*problems, *_missing_python(point, programs)]


def program_words(entry: EntryPoint, code: Code, python: str, shell: str) -> tuple[str, ...]:
    """argv of the program on its own, without its arguments; relative to the code directory.

    A shell script with the execute bit is run as it is, so that its own first
    line chooses the interpreter.
    """
    if entry.kind == "script":
        return (python, entry.name)
    if entry.kind == "line":
        # -e: its first failure is its end, as under ModelTrainer's own starter.
        return (shell, "-ec", entry.name, "command")
    if entry.in_python:
        return (python, "-m", entry.module)
    if entry.kind == "shell" and entry.name not in code.executable:
        return (shell, entry.name)
    return (entry.name if entry.name.startswith("/") else f"./{entry.name}",)
