"""Chooses the user's entry point, and makes its command line. Pure.

An entry point has one of six kinds. ``script``: a .py file. ``module``: ``-m package.module``.
``shell``: a .sh file. ``package``: a module of the code directory, which is a project that pip can
install. ``command``: any other executable file. ``line``: a line of shell, the SourceCode.command
of the SDK's ModelTrainer.
"""

from __future__ import annotations

import re
from typing import Container, Mapping, NamedTuple, Sequence

from trainworks_launcher.contract import names
from trainworks_launcher.contract.errors import Problem, nearest
from trainworks_launcher.contract.json_values import Json, text

_PROGRAM_NAME = re.compile(r"[A-Za-z0-9._+-][A-Za-z0-9._+/-]*")
_MODULE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")
REQUIREMENTS = "requirements.txt"
"""File at the root of the code. pip installs its packages before the start."""

PROJECT_FILES = ("setup.py", "pyproject.toml")
"""Files at the root of the code that make it a project; the first one counts. A pyproject.toml
counts only with a table ``[project]`` or ``[build-system]``: many have only settings of a linter.
"""

INSTALLED = ".trainworks-installed"
"""File at the root of the code in an image that ``build.py extend`` made: a JSON object with
``installed``, the names of REQUIREMENTS and of the project file whose installation is done, and
``files``, the sha256 of every file of the code at that time.
"""

REMOTE = "s3://"
"""Beginning of an address from which code can be fetched."""


class Code(NamedTuple):
    """The user's code on this host.

    Attributes:
        directory: Directory in which the code runs.
        archive: A tar.gz to unpack there first: a local path, or an address
            ``s3://BUCKET/KEY``; ``""`` for none.
        entries: Relative paths of the files, sorted and bounded. They include files that the
            directory has before the archive is unpacked; ``()`` while the archive is not fetched.
        executable: Entries with the execute bit.
        project: The one of PROJECT_FILES that makes the code an installable project; ``""`` for
            none.
        notes: Lines for the log about the origin of the code.
        fetch: Command line of the program that fetches a remote archive.
        requirements: Requirements file that is installed before the start, if it is an entry.
        installed: Names of requirements and project files that ``build.py extend`` has installed,
            from INSTALLED, if the code has not changed since.
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
        """Whether the archive has to be fetched before its files are known."""
        return self.archive.startswith(REMOTE)


class EntryPoint(NamedTuple):
    """The user's program.

    Attributes:
        kind: One of the six kinds above, for example ``script``.
        name: Path below the code directory, name of a module, or a line of shell; for example
            ``train.py``.
    """

    kind: str
    name: str

    @property
    def module_name(self) -> str:
        """The name without ``.py``, the value of SM_MODULE_NAME."""
        if self.name.endswith(".py"):
            return self.name[: -len(".py")]
        return self.name

    @property
    def module(self) -> str:
        """The argument of ``python -m``: ``package.train`` for ``package/train.py``."""
        if self.kind == "package":
            return self.module_name.replace("/", ".")
        return self.name

    @property
    def in_python(self) -> bool:
        """Whether a Python interpreter runs the program."""
        return self.kind in ("script", "module", "package")


def program_name(variables: Mapping[str, str], reserved: Mapping[str, Json]) -> str:
    """Return the requested entry point: SAGEMAKER_PROGRAM's, else the hyperparameter's.

    ``""`` if neither is set. sagemaker-training has the same order.
    """
    program = variables.get(names.PROGRAM_VARIABLE) or text(reserved.get(names.PROGRAM))
    return program.strip()


def code_location(
    base_directory: str, variables: Mapping[str, str], reserved: Mapping[str, Json]
) -> str:
    """Return the path or address of the job's code.

    The hyperparameter sagemaker_submit_directory counts before the variable
    SAGEMAKER_SUBMIT_DIRECTORY: it belongs to one job, the variable usually to the image. The
    default is BASE/code.
    """
    location = text(reserved.get(names.SUBMIT_DIRECTORY))
    if not location:
        location = variables.get(names.SUBMIT_DIRECTORY_VARIABLE, "")
    return location.strip() or f"{base_directory}/{names.CODE_DIRECTORY}"


def parse_entry_point(program: str, code: Code | None = None) -> EntryPoint:
    """Return the entry point of a program's name.

    In a project a .py file is a ``package``, and so is a name without a file: the module can then
    import its siblings by their package.

    Args:
        program: The name, for example ``train.py``, ``-m package.train`` or ``run.sh``.
        code: The code; None if it is not known.

    Raises:
        ValueError: The name could leave the code directory, or could be read as an option. The
            text is the reason.
    """
    if program.startswith(("-m ", "-m\t")):
        module = program[2:].strip()
        if not _MODULE_NAME.fullmatch(module):
            raise ValueError(f"{module!r} is not the name of a Python module")
        return EntryPoint("module", module)
    if program.startswith(("-", "/")):
        raise ValueError(f"{program!r} starts with {program[0]!r}")
    if not _PROGRAM_NAME.fullmatch(program):
        raise ValueError(f"{program!r} has characters other than letters, digits and . _ + - /")
    if any(segment in ("", ".", "..") for segment in program.split("/")):
        raise ValueError(f"{program!r} has an empty, '.' or '..' segment")
    if program.endswith(".sh"):
        return EntryPoint("shell", program)
    is_script = program.endswith(".py")
    if code is not None and code.project:
        package = EntryPoint("package", program)
        is_module = is_script or program not in code.entries
        if is_module and _MODULE_NAME.fullmatch(package.module):
            return package
    return EntryPoint("script" if is_script else "command", program)


def choose_entry_point(
    program: str, code: Code, programs: Container[str], known: Sequence[Problem]
) -> tuple[EntryPoint, list[Problem]]:
    """Choose the entry point and check it against the code.

    An archive that is not fetched yet is checked later.

    Args:
        program: The requested name; ``""`` for none.
        code: The code on this host.
        programs: Programs that exist on this host.
        known: The job's other problems. Missing code is not reported beside them, because it may
            follow from them.

    Returns:
        The entry point, and its problems. With problems it may be a script with the name ``""``.
        Nothing is raised.
    """
    where = f"{names.PROGRAM_VARIABLE} or hyperparameter {names.PROGRAM}"
    place = code.archive or code.directory
    problems: list[Problem] = []
    none = EntryPoint("script", "")
    if not code.entries and not code.remote and not known:
        advice = (
            "put the training script there, or say where it is with"
            f" {names.SUBMIT_DIRECTORY_VARIABLE}"
        )
        problems.append(Problem("no code found", place, advice))
    if not program:
        # A file of hyperparameters that cannot be read may name the entry point.
        if any(problem.where.endswith(names.HYPERPARAMETERS_FILE) for problem in known):
            return none, problems
        scripts = [name for name in code.entries if name.endswith(".py") and "/" not in name]
        advice = "set it to the name of the script"
        if scripts:
            advice = f"set it to one of: {', '.join(scripts[:8])}"
        return none, [*problems, Problem("no entry point is given", where, advice)]
    try:
        point = parse_entry_point(program, code)
    except ValueError as error:
        advice = "give a path below the code directory"
        return none, [*problems, Problem(f"the entry point {error}", where, advice)]
    # A module may be one of the image's, not a file of the code.
    is_file = point.kind != "module"
    if point.kind == "package":
        is_file = point.name.endswith(".py")
    if is_file and code.entries and point.name not in code.entries:
        candidates = [name for name in code.entries if "/" not in name] or code.entries
        advice = nearest(point.name, candidates)
        problems.append(Problem(f"file not found: {point.name!r} in {place}", where, advice))
    elif point.kind == "command" and code.entries and point.name not in code.executable:
        advice = "make it executable (chmod +x), or name it .py or .sh"
        problems.append(Problem(f"the entry point {point.name!r} is not executable", where, advice))
    return point, [*problems, *_missing_python(point, programs)]


def _missing_python(point: EntryPoint, programs: Container[str]) -> list[Problem]:
    """Return a problem for an entry point of Python in an image without Python; else ``[]``."""
    if not point.in_python or "python" in programs:
        return []
    return [Problem("Python is not installed in this image", "program python", "install python3")]


def choose_given_program(
    words: Sequence[str], code: Code, programs: Container[str]
) -> tuple[EntryPoint, tuple[str, ...], list[Problem]]:
    """Choose the entry point of a command line: ``train -- python train.py --epochs 3``.

    Args:
        words: The program and its arguments, as ``source_dir.inspect_program`` returns them. The
            program may be anywhere on the host.
        code: The code, as ``source_dir.inspect_program`` returns it.
        programs: Programs that exist on this host.

    Returns:
        The entry point, its arguments, and its problems.
    """
    name, arguments = words[0], tuple(words[1:])
    problems: list[Problem] = []
    where = "the command line"
    if name == "-m":
        module = arguments[0] if arguments else ""
        if not _MODULE_NAME.fullmatch(module):
            advice = "give the name of the module: train -- -m package.train"
            problems.append(
                Problem(f"{module!r} is not the name of a Python module", where, advice)
            )
        point = EntryPoint("module", module)
        return point, arguments[1:], [*problems, *_missing_python(point, programs)]

    kind = "command"
    if name.endswith(".py"):
        kind = "script"
    elif name.endswith(".sh"):
        kind = "shell"
    point = EntryPoint(kind, name)
    if name not in code.entries:
        problem = (
            f"file not found: {name!r} in {code.directory}, and no program on PATH has this name"
        )
        problems.append(Problem(problem, where, nearest(name, code.entries)))
    elif kind == "command" and name not in code.executable:
        advice = "make it executable (chmod +x), or name it .py or .sh"
        problems.append(Problem(f"{name!r} is not executable", where, advice))
    return point, arguments, [*problems, *_missing_python(point, programs)]


def program_words(entry: EntryPoint, code: Code, python: str, shell: str) -> tuple[str, ...]:
    """Return the command line of the program, without its arguments.

    For example ``("/usr/bin/python3", "train.py")``, to be run in the code directory. A shell
    script with the execute bit is run without the shell, so that its first line (``#!``) chooses
    the interpreter.

    Args:
        entry: The entry point.
        code: The code.
        python: Path of the Python for jobs.
        shell: Path of the shell.
    """
    if entry.kind == "script":
        return (python, entry.name)
    if entry.kind == "line":
        # -e: the first command that fails ends the line, as under ModelTrainer's own starter.
        return (shell, "-ec", entry.name, "command")
    if entry.in_python:
        return (python, "-m", entry.module)
    if entry.kind == "shell" and entry.name not in code.executable:
        return (shell, entry.name)
    if entry.name.startswith(("/", "./")):
        return (entry.name,)
    return (f"./{entry.name}",)
