"""Asks an image: every question is a program for the image's own Python, and
has one form of answer.

A question gets a mark of its own, which stands before and behind the answer, a value of JSON whose
types are checked. Whatever else the image prints is nothing. What has no such answer is a question
that was not answered, never a pass.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib import resources
from secrets import token_hex
from typing import TypedDict, TypeVar, cast

from trainworks import imagetest
from trainworks.engine.protocol import BuiltImage, Completed, Container
from trainworks.engine.retry import ATTEMPTS
from trainworks.errors import ImageTestError
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

PROBE_MODULES = tuple(
    f"probe.{each}"
    for each in (
        "packages",
        "files",
        "libraries",
        "bytecode",
        "settings",
        "delivered",
        "lists",
        "answers",
    )
)
"""The program that answers checks: its modules, each after what it imports."""

_HINT = (
    "every image needs the distribution's python3 with its standard library (packages"
    " python3-minimal and libpython3-stdlib)"
)
_SHOWN = 2000
"""Characters of an output that an error shows."""

Shape = TypeVar("Shape")

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
"""Unpacks the modules and the request, which are its arguments, and prints the
answer of the last module.

The mark is another one for each question: nothing in an image can print it that
was not made to deceive.
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
    """Say whether the image is larger than promised."""
    return image.size > check.megabytes * 1_000_000


def request_of(
    checks: Iterable[kinds.Check], image: BuiltImage, *, python: str = ENVIRONMENT_PYTHON
) -> Request:
    """Return the questions of these checks."""
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
    if any(isinstance(check, FILES) for check in checks):
        owned = [
            pattern
            for check in checks
            if isinstance(check, kinds.OwnedFilesCheck)
            for pattern in check.owned
        ]
        delivered = [
            asdict(check) for check in checks if isinstance(check, kinds.DeliveredFilesCheck)
        ]
        request["files"] = (owned, delivered[0] if delivered else None)
    for check in checks:
        if isinstance(check, kinds.MakersListsCheck):
            request["lists"] = list(check.debian)
    return request


def probed(checks: Iterable[kinds.Check]) -> list[kinds.Check]:
    """Return the checks that are answered inside with lines, in their order."""
    return [
        check
        for check in checks
        if check.kind in QUESTIONS
        and not (isinstance(check, kinds.PathCheck) and check.state != "absent")
    ]


def new_mark() -> str:
    """Return a mark for one question."""
    return f"answer-{token_hex(16)}:"


def command_of(
    interpreter: Sequence[str], program: Sequence[str], request: object, mark: str
) -> tuple[str, ...]:
    """Return the command that asks a question: modules and request are its
    arguments, nothing is copied.

    A request is text of tens of kilobytes at most: one argument has at most 128 KiB.

    Args:
        interpreter: The image's Python, with its options.
        program: Modules of this package, each after what it imports; the last
            one has a function ``answer``.
        request: What ``answer`` is called with.
        mark: What stands before and behind the answer.
    """
    sources = resources.files(imagetest)
    modules = []
    for each in program:
        file = sources.joinpath(*each.split(".")).with_suffix(".py")  # type: ignore[attr-defined]
        modules.append((f"{imagetest.__name__}.{each}", file.read_text(encoding="utf-8")))
    packed = (
        base64.b64encode(zlib.compress(json.dumps(each).encode(), 9)).decode()
        for each in (modules, request)
    )
    return (*interpreter, "-c", _START, mark, *packed)


def answer_in(completed: Completed, mark: str, shape: type[Shape]) -> Shape:
    """Return the answer between the marks in a command's output.

    Raises:
        ImageTestError: There is no answer, or more than one, or it has another
            form than was asked for.
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
        found = json.loads(answers[0], parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise ImageTestError(
            f"the image's answer is malformed: it is not JSON ({type(error).__name__})"
        ) from error
    if wrong := misfit(found, shape):
        raise ImageTestError(f"the image's answer is malformed: {wrong}")
    return cast(Shape, found)


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is no number of JSON")


def ask_program(
    container: Container,
    interpreter: Sequence[str],
    program: Sequence[str],
    request: object,
    shape: type[Shape],
    *,
    timeout: float,
) -> Shape:
    """Ask one question of an image; arguments as of ``command_of`` and ``answer_in``.

    It is asked again where nothing came back: the engine may have lost it.

    Args:
        container: A container of the image.
        timeout: Seconds.

    Raises:
        ImageTestError: As ``answer_in`` does.
        EngineError, EngineUnavailableError: The engine failed.
    """
    mark = new_mark()
    command = command_of(interpreter, program, request, mark)
    return answer_in(told(container, command, timeout=timeout), mark, shape)


def told(container: Container, command: tuple[str, ...], *, timeout: float) -> Completed:
    """Run a command that prints something, again where nothing came: the engine may have lost it
    (``engine.backend``).

    A program that is silent each time is silent, and whoever asked says what that means.

    Args:
        container: Where it runs.
        command: The program and its arguments; it only asks, so it may run again.
        timeout: Seconds.
    """
    completed = container.run(command, timeout=timeout)
    for _ in range(ATTEMPTS - 1):
        if completed.status != 0 or completed.output:
            break
        completed = container.run(command, timeout=timeout)
    return completed


def ask(container: Container, request: Request, *, interpreter: str = SYSTEM_PYTHON) -> Answer:
    """Ask the program inside.

    Raises ``ImageTestError`` if the image does not answer each question of the request.
    """
    starts = ("loaded-library", "loadable-library", "openable-libraries")
    checks = request.get("checks", [])
    children = 1 + sum(check["kind"] in starts for check in checks)
    timeout = _BASE_TIMEOUT + IMPORT_TIMEOUT * children
    try:
        answer = ask_program(
            container, (interpreter, "-I"), PROBE_MODULES, request, Answer, timeout=timeout
        )
    except ImageTestError as error:
        raise ImageTestError(
            f"cannot run the checks inside the image: {error.message}", hint=_HINT
        ) from error
    lacks = [
        key
        for key in ("files", "contents", "packages", "sizes", "distributions", "lists")
        if request.get(key)
    ]
    lacks = [key for key in lacks if key not in answer]
    if lacks or len(answer.get("problems", ())) != len(checks):
        raise ImageTestError(
            "the image's answer is malformed: it does not answer what was asked", hint=_HINT
        )
    return answer


class Imported(TypedDict):
    """What ``probe.importing`` answers."""

    imported: str


def can_import(container: Container, python: str, module: str, *, timeout: float) -> str:
    """Return why a module cannot be imported, in the image's own words; ``""`` where it can."""
    try:
        ask_program(
            container,
            (python,),
            ("probe.importing",),
            {"module": module},
            Imported,
            timeout=timeout,
        )
    except ImageTestError as error:
        return error.message
    return ""


def take_contents(container: Container, *, digests: bool) -> ImageContents:
    """Return everything in an image.

    ``digests`` of its files too, which takes seconds for each GB.
    """
    return ask(container, {"contents": "digests" if digests else "files"})["contents"]


def list_packages(container: Container) -> PackagesAnswer:
    """Return the packages in a container."""
    return ask(container, {"packages": True})["packages"]
