"""Runs the probe in an image: programs for the image's own Python, and their answers.

Each run has a new mark, which stands before and behind the answer. An answer is a value of JSON
with checked types; other output of the image is ignored. A run without an answer is an error, never
a passed check.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from secrets import token_hex
from typing import Generic, TypedDict, TypeVar, cast

from trainworks import imagetest
from trainworks.engine.protocol import BuiltImage, Completed, Container
from trainworks.engine.retry import ATTEMPTS
from trainworks.errors import ImageTestError
from trainworks.imagetest.imports import ImportFailures
from trainworks.imagetest.probe.answers import QUESTIONS, Answer, Request
from trainworks.imagetest.probe.files import IMPORT_TIMEOUT, ImageContents
from trainworks.imagetest.probe.packages import PackagesAnswer
from trainworks.imagetest.shape import misfit
from trainworks.plan import checks as kinds

SYSTEM_PYTHON = "/usr/bin/python3"
"""Runs the program: the system's Python, not the environment's, so that a
broken environment can be checked.
"""

ENVIRONMENT_PYTHON = "/opt/venv/bin/python"
"""The Python that the image's contract gives to its users."""

_HINT = (
    "every image needs the distribution's python3 with its standard library (packages"
    " python3-minimal and libpython3-stdlib)"
)
_SHOWN = 2000
"""Characters of an output that an error shows."""

Shape = TypeVar("Shape")


@dataclass(frozen=True, kw_only=True)
class ProbeProgram(Generic[Shape]):
    """A program for the image's own Python.

    Attributes:
        modules: Modules of this package, each after those that it imports; the last one has a
            function ``answer``.
        shape: The form of the answer.
    """

    modules: tuple[str, ...]
    shape: type[Shape]


PROBE = ProbeProgram(
    modules=(
        "probe.packages",
        "probe.files",
        "probe.libraries",
        "probe.bytecode",
        "probe.settings",
        "probe.delivered",
        "probe.lists",
        "probe.answers",
    ),
    shape=Answer,
)
"""The program that answers checks."""

IMPORTS = ProbeProgram(modules=("imports",), shape=ImportFailures)
"""The program that imports the modules of distributions."""

_START = """
import base64, json, sys, types, zlib
def unpack(word):
    return json.loads(zlib.decompress(base64.b64decode(word)).decode())
mark, modules, request = sys.argv[1], unpack(sys.argv[2]), unpack(sys.argv[3])
sys.argv[1:] = []
for name, source in modules:
    sys.modules[name] = module = types.ModuleType(str(name))
    exec(compile(source, str(name), "exec"), module.__dict__)
answer = json.dumps(module.answer(request))
sys.stdout.write("\\n" + mark + answer + mark + "\\n")
sys.stdout.flush()
"""
"""Unpacks the modules and the request, which are arguments, and prints the last module's answer.

Each run has another mark: only a program that was made to deceive could print the mark.
"""

_BASE_TIMEOUT = 420.0

FILES = (
    kinds.OwnedFilesCheck,
    kinds.DeliveredFilesCheck,
    kinds.WorldWritableCheck,
    kinds.PrivilegedFilesCheck,
)
"""The checks of all files, which one walk answers."""


def oversized(check: kinds.SizeCheck, image: BuiltImage) -> bool:
    """Return whether the image is larger than declared."""
    return image.size > check.megabytes * 1_000_000


def request_of(
    checks: Iterable[kinds.Check], image: BuiltImage, *, python: str = ENVIRONMENT_PYTHON
) -> Request:
    """Return the request of these checks to the probe."""
    checks = tuple(checks)
    request: Request = {
        "root": "/",
        "python": python,
        "checks": [asdict(check) for check in probed(checks)],
    }
    if any(isinstance(check, kinds.PythonPackageCheck) for check in checks):
        request["distributions"] = True
    # Adding up every file is worth its seconds only for an image that is too large.
    if any(isinstance(check, kinds.SizeCheck) and oversized(check, image) for check in checks):
        request["sizes"] = True
    owned: list[str] = []
    delivered: dict[str, object] | None = None
    for check in checks:
        if isinstance(check, kinds.OwnedFilesCheck):
            owned += check.owned
        if isinstance(check, kinds.DeliveredFilesCheck) and delivered is None:
            delivered = asdict(check)
        if isinstance(check, kinds.MakersListsCheck):
            request["lists"] = list(check.debian)
    if any(isinstance(check, FILES) for check in checks):
        request["files"] = (owned, delivered)
    return request


def probed(checks: Iterable[kinds.Check]) -> list[kinds.Check]:
    """Return the checks that the probe answers with lines, in their order."""
    probed_checks = []
    for check in checks:
        # testinfra checks a path that must exist.
        is_existing_path = isinstance(check, kinds.PathCheck) and check.state != "absent"
        if check.kind in QUESTIONS and not is_existing_path:
            probed_checks.append(check)
    return probed_checks


def new_mark() -> str:
    """Return the mark of one run: ``answer-``, 32 hexadecimal digits and a colon."""
    return f"answer-{token_hex(16)}:"


def command_of(
    interpreter: Sequence[str], program: ProbeProgram[Shape], request: object, mark: str
) -> tuple[str, ...]:
    """Return the command that runs a program: modules and request are arguments, nothing is copied.

    A request is text of tens of kilobytes at most: one argument has at most 128 KiB.

    Args:
        interpreter: The image's Python, with its options.
        program: The program.
        request: The argument of ``answer``.
        mark: The mark before and behind the answer.
    """
    sources = resources.files(imagetest)
    modules = []
    for name in program.modules:
        file = sources.joinpath(*name.split(".")).with_suffix(".py")  # type: ignore[attr-defined]
        modules.append((f"{imagetest.__name__}.{name}", file.read_text(encoding="utf-8")))
    return (*interpreter, "-c", _START, mark, _pack(modules), _pack(request))


def _pack(value: object) -> str:
    """Return a value as one argument: JSON, compressed, in base64."""
    compressed = zlib.compress(json.dumps(value).encode(), 9)
    return base64.b64encode(compressed).decode()


def answer_in(completed: Completed, mark: str, shape: type[Shape]) -> Shape:
    """Return the answer between the marks in a command's output.

    Raises:
        ImageTestError: There is no answer, or more than one, or the answer has another
            form than ``shape``.
    """
    before, *answers = completed.output.split(mark)
    if not answers:
        raise ImageTestError(
            f"the image does not answer: the program ended with status {completed.status} and"
            f" printed\n{before.strip()[-_SHOWN:] or '(nothing)'}"
        )
    if len(answers) != 2:
        raise ImageTestError(
            f"the image's answer is malformed: its mark is there {len(answers)} times, not twice"
        )
    try:
        value = json.loads(answers[0], parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise ImageTestError(
            f"the image's answer is malformed: it is not JSON ({type(error).__name__})"
        ) from error
    problem = misfit(value, shape)
    if problem:
        raise ImageTestError(f"the image's answer is malformed: {problem}")
    return cast(Shape, value)


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is no number of JSON")


def ask_program(
    container: Container,
    interpreter: Sequence[str],
    program: ProbeProgram[Shape],
    request: object,
    *,
    timeout: float,
) -> Shape:
    """Run a program in an image, and return its answer.

    The program runs again if there is no output: the engine may have lost the output.

    Args:
        container: A container of the image.
        interpreter: The image's Python, with its options.
        program: The program.
        request: The argument of ``answer``.
        timeout: Seconds.

    Raises:
        ImageTestError: As ``answer_in`` does.
        EngineError, EngineUnavailableError: The engine failed.
    """
    mark = new_mark()
    command = command_of(interpreter, program, request, mark)
    return answer_in(run_printing(container, command, timeout=timeout), mark, program.shape)


def run_printing(container: Container, command: tuple[str, ...], *, timeout: float) -> Completed:
    """Run a command that prints something; run the command again if there is no output.

    The engine may have lost the output (``engine.exec_status``). A command that prints nothing in
    each run ends with an empty output.

    Args:
        container: The container for the command.
        command: The program and its arguments; it changes nothing, so it may run again.
        timeout: Seconds.
    """
    completed = container.run(command, timeout=timeout)
    for _ in range(ATTEMPTS - 1):
        if completed.status != 0 or completed.output:
            break
        completed = container.run(command, timeout=timeout)
    return completed


def ask(container: Container, request: Request, *, interpreter: str = SYSTEM_PYTHON) -> Answer:
    """Run the probe in a container, and return its answers.

    Raises ``ImageTestError`` if the image does not answer each part of the request.
    """
    kinds_with_child = ("loaded-library", "loadable-library", "openable-libraries")
    checks = request.get("checks", [])
    children = 1 + sum(check["kind"] in kinds_with_child for check in checks)
    timeout = _BASE_TIMEOUT + IMPORT_TIMEOUT * children
    try:
        answer = ask_program(container, (interpreter, "-I"), PROBE, request, timeout=timeout)
    except ImageTestError as error:
        raise ImageTestError(
            f"cannot run the checks inside the image: {error.message}", hint=_HINT
        ) from error
    keys = ("files", "contents", "packages", "sizes", "distributions", "lists")
    missing = [key for key in keys if request.get(key) and key not in answer]
    if missing or len(answer.get("problems", ())) != len(checks):
        raise ImageTestError(
            "the image's answer is malformed: it does not answer what was asked", hint=_HINT
        )
    return answer


class Imported(TypedDict):
    """The answer of ``probe.importing``."""

    imported: str


IMPORTING = ProbeProgram(modules=("probe.importing",), shape=Imported)
"""The program that imports one module."""


def can_import(container: Container, python: str, module: str, *, timeout: float) -> str:
    """Return why a module cannot be imported, in the image's own words; ``""`` where it can."""
    try:
        ask_program(container, (python,), IMPORTING, {"module": module}, timeout=timeout)
    except ImageTestError as error:
        return error.message
    return ""


def take_contents(container: Container, *, digests: bool) -> ImageContents:
    """Return everything in an image; digests of files take seconds for each GB."""
    contents = "digests" if digests else "files"
    return ask(container, {"contents": contents})["contents"]


def list_packages(container: Container) -> PackagesAnswer:
    """Return the packages in a container."""
    return ask(container, {"packages": True})["packages"]
