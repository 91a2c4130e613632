"""Turns the checks of a plan into one run of the program inside the image."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable
from dataclasses import asdict
from importlib import resources

from trainworks.engine.again import ATTEMPTS
from trainworks.engine.protocol import BuiltImage, Completed, Container
from trainworks.errors import ImageTestError
from trainworks.imagetest import inside
from trainworks.imagetest.inside.answers import QUESTIONS, Answer, Request
from trainworks.imagetest.inside.files import IMPORT_TIMEOUT, ImageContents
from trainworks.imagetest.inside.packages import PackagesAnswer
from trainworks.plan import checks as kinds

SYSTEM_PYTHON = "/usr/bin/python3"
"""Runs the program: the system's Python, not the environment's, so that a broken environment can be checked."""

ENVIRONMENT_PYTHON = "/opt/venv/bin/python"
"""The Python that the image's contract gives to its users."""

MODULES = ("packages", "files", "libraries", "delivered", "answers")
"""Those of ``inside``, each after what it imports."""

MARKER = "trainworks-answer: "
"""What the line with the answer, as JSON, begins with."""

_START = f"""
import base64, json, sys, types, zlib
modules, request = (json.loads(zlib.decompress(base64.b64decode(word))) for word in sys.argv[1:])
for name, source in modules:
    sys.modules[name] = module = types.ModuleType(name)
    exec(compile(source, name, "exec"), module.__dict__)
print({MARKER!r} + json.dumps(module.answer(request)))
"""
"""Unpacks the modules and the request, which are its arguments, and runs them."""

_BASE_TIMEOUT = 420.0

FILES = (kinds.OwnedFilesCheck, kinds.DeliveredFilesCheck, kinds.WorldWritableCheck, kinds.PrivilegedFilesCheck)
"""The checks of all files, which one walk answers."""


def oversized(check: kinds.SizeCheck, image: BuiltImage) -> bool:
    """Say whether the image is larger than promised."""
    return image.size > check.megabytes * 1_000_000


def request_of(checks: Iterable[kinds.Check], image: BuiltImage, *, python: str = ENVIRONMENT_PYTHON) -> Request:
    """Return the questions of these checks."""
    checks = tuple(checks)
    request: Request = {"root": "/", "python": python, "checks": [asdict(check) for check in probed(checks)]}
    if any(isinstance(check, kinds.PythonPackageCheck) for check in checks):
        request["distributions"] = True
    # Adding up every file is worth its seconds only for an image that is too large.
    if any(isinstance(check, kinds.SizeCheck) and oversized(check, image) for check in checks):
        request["sizes"] = True
    if any(isinstance(check, FILES) for check in checks):
        owned = [pattern for check in checks if isinstance(check, kinds.OwnedFilesCheck) for pattern in check.owned]
        delivered = [asdict(check) for check in checks if isinstance(check, kinds.DeliveredFilesCheck)]
        request["files"] = (owned, delivered[0] if delivered else None)
    return request


def probed(checks: Iterable[kinds.Check]) -> list[kinds.Check]:
    """Return the checks that are answered inside with lines, in their order."""
    return [
        check
        for check in checks
        if check.kind in QUESTIONS and not (isinstance(check, kinds.PathCheck) and check.state != "absent")
    ]


def command_of(request: Request, *, interpreter: str = SYSTEM_PYTHON) -> tuple[str, ...]:
    """Return the command that asks a request: the program and the request are its arguments, nothing is copied.

    A request is text of tens of kilobytes at most: one argument has at most 128 KiB.
    """
    sources = resources.files(inside)
    modules = [(f"{inside.__name__}.{each}", (sources / f"{each}.py").read_text(encoding="utf-8")) for each in MODULES]
    packed = (base64.b64encode(zlib.compress(json.dumps(each).encode(), 9)).decode() for each in (modules, request))
    return (interpreter, "-I", "-c", _START, *packed)


def answer_of(completed: Completed) -> Answer:
    """Return the answer in a command's output; raises ``ImageTestError`` with that output where there is none."""
    for output in reversed(completed.output.splitlines()):
        if output.startswith(MARKER):
            answer: Answer = json.loads(output[len(MARKER) :])
            return answer
    raise ImageTestError(
        f"cannot run the checks inside the image: {SYSTEM_PYTHON} ended with status {completed.status} and printed\n"
        f"{completed.output.strip()[-2000:] or '(nothing)'}",
        hint="every image needs the distribution's python3 with its standard library (packages python3-minimal and "
        "libpython3-stdlib).",
    )


def told(container: Container, command: tuple[str, ...], *, timeout: float) -> Completed:
    """Run a command that prints something, again where nothing came: the engine may have lost it (``engine.backend``).

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
    """Run the program in a container; raises ``ImageTestError`` if the image has no Python to run it with."""
    starts = ("loaded-library", "loadable-library", "openable-libraries")
    children = 1 + sum(check["kind"] in starts for check in request.get("checks", ()))
    command = command_of(request, interpreter=interpreter)
    return answer_of(told(container, command, timeout=_BASE_TIMEOUT + IMPORT_TIMEOUT * children))


def take_contents(container: Container, *, digests: bool) -> ImageContents:
    """Return everything in an image; ``digests`` of its files too, which takes seconds for each GB."""
    return ask(container, {"contents": "digests" if digests else "files"})["contents"]


def list_packages(container: Container) -> PackagesAnswer:
    """Return the packages in a container."""
    return ask(container, {"packages": True})["packages"]
