"""Puts all that the checks of a plan want to know from inside the image into one run of the probe."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib import resources

from trainworks.engine.protocol import BuiltImage, Completed, Container
from trainworks.errors import ImageTestError
from trainworks.imagetest import probe
from trainworks.plan.checks import (
    Check,
    LoadedLibraryCheck,
    PathCheck,
    PythonPackageCheck,
    SearchPathCheck,
    SharedLibrariesCheck,
    SingleLibraryCheck,
    SizeCheck,
)

SYSTEM_PYTHON = "/usr/bin/python3"
"""Runs the probe: the image's own Python, not the environment's, so that a broken environment can be looked at."""

ENVIRONMENT_PYTHON = "/opt/venv/bin/python"
"""The Python that the image's contract gives to its users."""

_START = "import base64,sys,zlib;exec(compile(zlib.decompress(base64.b64decode(sys.argv.pop(1))),'probe.py','exec'))"
_BASE_TIMEOUT = 300.0


def oversized(check: SizeCheck, image: BuiltImage) -> bool:
    """Say whether the image is larger than promised."""
    return image.size > check.megabytes * 1_000_000


def request_of(checks: Iterable[Check], image: BuiltImage, *, python: str = ENVIRONMENT_PYTHON) -> probe.Request:
    """Return the questions of these checks to the probe."""
    request: probe.Request = {
        "root": "/",
        "python": python,
        "shared_libraries": [],
        "single_libraries": [],
        "search_paths": [],
        "absent": [],
        "loaded_libraries": [],
        "distributions": [],
        "sizes": False,
    }
    for check in checks:
        match check:
            case SharedLibrariesCheck():
                request["shared_libraries"].append(shared_libraries_question(check))
            case SingleLibraryCheck(soname=soname):
                request["single_libraries"].append(soname)
            case SearchPathCheck(variable=variable):
                request["search_paths"].append(variable)
            case PathCheck(path=path, state="absent"):
                request["absent"].append(path)
            case LoadedLibraryCheck():
                request["loaded_libraries"].append(loaded_library_question(check))
            case PythonPackageCheck(distribution=distribution):
                request["distributions"].append(distribution)
            case SizeCheck():
                # Adding up every file is worth its seconds only for an image that is too large.
                request["sizes"] = request["sizes"] or oversized(check, image)
            case _:
                pass
    return request


def shared_libraries_question(check: SharedLibrariesCheck) -> probe.SharedLibrariesQuestion:
    """Return the check as the probe's question; equal questions have equal places in request and answer."""
    return {"roots": list(check.roots), "provided": list(check.provided)}


def loaded_library_question(check: LoadedLibraryCheck) -> probe.LoadedLibraryQuestion:
    """Return the check as the probe's question."""
    return {"module": check.module, "library": check.library}


def command_of(request: probe.Request, *, interpreter: str = SYSTEM_PYTHON) -> tuple[str, ...]:
    """Return the command that asks a request: the probe itself and the request are its arguments, nothing is copied."""
    source = resources.files("trainworks.imagetest").joinpath("probe.py").read_bytes()
    return (interpreter, "-I", "-c", _START, probe.encode(source), probe.encode(json.dumps(request).encode()))


def answer_of(completed: Completed) -> probe.Answer:
    """Return the answer in a command's output; raises ``ImageTestError`` with that output where there is none."""
    for output in reversed(completed.output.splitlines()):
        if output.startswith(probe.MARKER):
            answer: probe.Answer = json.loads(output[len(probe.MARKER) :])
            return answer
    raise ImageTestError(
        f"the image could not be asked: {SYSTEM_PYTHON} in it ended with status {completed.status} and printed\n"
        f"{completed.output.strip()[-2000:] or '(nothing)'}",
        hint="Every image needs the distribution's python3 with its standard library (packages python3-minimal and "
        "libpython3-stdlib).",
    )


def ask(container: Container, request: probe.Request) -> probe.Answer:
    """Run the probe in a container."""
    timeout = _BASE_TIMEOUT + probe.IMPORT_TIMEOUT * (1 + len(request["loaded_libraries"]))
    return answer_of(container.run(command_of(request), timeout=timeout))
