"""Turns the checks of a plan into one run of the probe and one run of the inventory inside the image."""

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
from trainworks.imagetest import inventory, packages, probe
from trainworks.plan import checks as kinds

SYSTEM_PYTHON = "/usr/bin/python3"
"""Runs the probe: the system's Python, not the environment's, so that a broken environment can be checked."""

ENVIRONMENT_PYTHON = "/opt/venv/bin/python"
"""The Python that the image's contract gives to its users."""

_START = (
    "import base64,sys,zlib;"
    "source,request=(zlib.decompress(base64.b64decode(word)) for word in sys.argv[1:]);"
    "sys.argv[1:]=[request.decode()];"
    "exec(compile(source,'{script}','exec'))"
)
"""Unpacks a script and its request, and runs the script with the request as its one argument."""

_BASE_TIMEOUT = 300.0


def oversized(check: kinds.SizeCheck, image: BuiltImage) -> bool:
    """Say whether the image is larger than promised."""
    return image.size > check.megabytes * 1_000_000


def request_of(
    checks: Iterable[kinds.Check], image: BuiltImage, *, python: str = ENVIRONMENT_PYTHON
) -> probe.ProbeRequest:
    """Return the questions of these checks to the probe."""
    checks = tuple(checks)
    return {
        "root": "/",
        "python": python,
        "checks": [asdict(check) for check in probed(checks)],
        "distributions": any(isinstance(check, kinds.PythonPackageCheck) for check in checks),
        # Adding up every file is worth its seconds only for an image that is too large.
        "sizes": any(isinstance(check, kinds.SizeCheck) and oversized(check, image) for check in checks),
    }


def probed(checks: Iterable[kinds.Check]) -> list[kinds.Check]:
    """Return the checks that the probe answers, in their order."""
    return [
        check
        for check in checks
        if check.kind in probe.QUESTIONS and not (isinstance(check, kinds.PathCheck) and check.state != "absent")
    ]


def inventory_request_of(checks: Iterable[kinds.Check]) -> inventory.InventoryRequest:
    """Return the questions of these checks to the inventory."""
    checks = tuple(checks)
    owned = [pattern for check in checks if isinstance(check, kinds.OwnedFilesCheck) for pattern in check.owned]
    delivered: inventory.DeliveredRequest | None = None
    for check in checks:
        if isinstance(check, kinds.DeliveredFilesCheck):
            delivered = {
                "removed": list(check.removed),
                "digests": list(check.digests),
                "copies": list(check.copies),
                "closed": list(check.closed),
                "sourced": list(check.sourced),
                "links": list(check.links),
                "privileged": list(check.privileged),
            }
    return {"root": "/", "owned": owned, "contents": "", "delivered": delivered}


def command_of(
    request: probe.ProbeRequest | inventory.InventoryRequest | packages.PackagesRequest,
    *,
    script: str = "probe.py",
    interpreter: str = SYSTEM_PYTHON,
) -> tuple[str, ...]:
    """Return the command that asks a request: the script itself and the request are its arguments, nothing is copied.

    A request is text of tens of kilobytes at most: one argument has at most 128 KiB.
    """
    source = resources.files("trainworks.imagetest").joinpath(script).read_bytes()
    start = _START.format(script=script)
    return (interpreter, "-I", "-c", start, _packed(source), _packed(json.dumps(request).encode()))


def _packed(value: bytes) -> str:
    """Pack bytes into one argument of a command line."""
    return base64.b64encode(zlib.compress(value, 9)).decode("ascii")


def answer_of(completed: Completed) -> probe.ProbeAnswer:
    """Return the probe's answer; raises ``ImageTestError`` as ``_read`` does."""
    answer: probe.ProbeAnswer = json.loads(_read(completed, probe.MARKER))
    return answer


def inventory_of(completed: Completed) -> inventory.InventoryAnswer:
    """Return the inventory's answer; raises ``ImageTestError`` as ``_read`` does."""
    answer: inventory.InventoryAnswer = json.loads(_read(completed, inventory.MARKER))
    return answer


def _read(completed: Completed, marker: str) -> str:
    """Return the answer in a command's output; raises ``ImageTestError`` with that output where there is none."""
    for output in reversed(completed.output.splitlines()):
        if output.startswith(marker):
            return output[len(marker) :]
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


def ask(container: Container, request: probe.ProbeRequest, *, interpreter: str = SYSTEM_PYTHON) -> probe.ProbeAnswer:
    """Run the probe in a container."""
    children = 1 + sum(
        check["kind"] in ("loaded-library", "loadable-library", "openable-libraries") for check in request["checks"]
    )
    command = command_of(request, interpreter=interpreter)
    return answer_of(told(container, command, timeout=_BASE_TIMEOUT + probe.IMPORT_TIMEOUT * children))


def take_contents(container: Container, *, digests: bool) -> inventory.InventoryContents:
    """Return everything in an image; ``digests`` of its files too, which takes seconds for each GB.

    Raises:
        ImageTestError: The image has no Python to run the script with.
    """
    wanted = "digests" if digests else "files"
    request: inventory.InventoryRequest = {"root": "/", "owned": [], "contents": wanted, "delivered": None}
    contents = take_inventory(container, request)["contents"]
    assert contents is not None
    return contents


def take_inventory(
    container: Container, request: inventory.InventoryRequest, *, interpreter: str = SYSTEM_PYTHON
) -> inventory.InventoryAnswer:
    """Run the inventory in a container."""
    command = command_of(request, script="inventory.py", interpreter=interpreter)
    return inventory_of(told(container, command, timeout=_BASE_TIMEOUT + inventory.RPM_TIMEOUT))


def list_packages(container: Container) -> packages.PackagesAnswer:
    """Return the packages in a container; raises ``ImageTestError`` if the image cannot list them."""
    completed = told(container, command_of({"root": "/"}, script="packages.py"), timeout=_BASE_TIMEOUT)
    answer: packages.PackagesAnswer = json.loads(_read(completed, packages.MARKER))
    return answer
