"""Wheels that requirements name: whether a base can load them, and their bytes where they lie on the network."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterable, Mapping
from urllib.parse import unquote, urlsplit

from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

from trainworks.errors import ExtendError, LockError, OutputError
from trainworks.extend.reading.wanted import wheel_of
from trainworks.extend.requirements import ExtendedBase, PackageRequirement, Wheel
from trainworks.host.cache import cache_folder
from trainworks.host.downloads import Client
from trainworks.host.pip import local_path
from trainworks.host.settings import HostSettings
from trainworks.terminal.output import say

_TORCH = re.compile(r"torch(\d+\.\d+)")
"""How wheels outside of indexes say in their local version which release of torch they are compiled for."""


def misfits(requirements: Iterable[PackageRequirement], base: ExtendedBase) -> list[str]:
    """Return the wheels that a base image cannot load, each with what it is made for."""
    tags = frozenset(base.tags)
    torch = next((row.version for row in base.distributions if canonicalize_name(row.name) == "torch"), "")
    problems = []
    for requirement in requirements:
        if not requirement.wheel or not requirement.applies(base):
            continue
        file = file_of(requirement.wheel)
        _, version, _, made_for = parse_wheel_filename(file)
        wanted = _TORCH.search(version.local or "")
        if tags.isdisjoint(made_for):
            problems.append(
                f"{requirement.place}: {file} is made for {_made_for(file)}, and the base has Python {base.version} on "
                f"{base.machine} with glibc {base.glibc}"
            )
        elif wanted and torch and Version(wanted[1]).release != Version(torch).release[:2]:
            problems.append(f"{requirement.place}: {file} is made for torch {wanted[1]}, and the base has {torch}")
    return problems


def file_of(address: str) -> str:
    """Return the file name at the end of a path or an address."""
    path = urlsplit(address).path if "://" in address else address.partition("#")[0]
    return unquote(path).rsplit("/", 1)[-1]


def _made_for(file: str) -> str:
    tags = parse_wheel_filename(file)[3]
    return (
        f"{'.'.join(sorted({tag.interpreter for tag in tags}))} on {'.'.join(sorted({tag.platform for tag in tags}))}"
    )


def download_wheels(
    requirements: Iterable[PackageRequirement],
    settings: HostSettings,
    environment: Mapping[str, str],
) -> dict[str, Wheel]:
    """Return the wheels of the network that requirements name, by their addresses: from the cache, or downloaded.

    Raises:
        ExtendError: Files that cannot be downloaded, or are not what the requirement says; all of them.
    """
    wheels: dict[str, Wheel] = {}
    problems: list[str] = []
    with Client(settings) as client:
        for requirement in requirements:
            address = requirement.wheel
            if not address or local_path(address) is not None or address in wheels:
                continue
            try:
                content = _content(requirement, client, environment)
                wheels[address] = wheel_of(requirement, file_of(address), content)
            except (OSError, ValueError) as error:
                reason = error.strerror if isinstance(error, OSError) else error
                problems.append(f"{requirement.place}: {reason}")
    if problems:
        raise ExtendError(problems, hint="nothing was built")
    return wheels


def _content(requirement: PackageRequirement, client: Client, environment: Mapping[str, str]) -> bytes:
    """Return the bytes of a wheel; raises ``OSError``, and ``ValueError`` where it cannot be downloaded."""
    address = requirement.wheel.partition("#")[0]
    stem = hashlib.sha256(address.encode()).hexdigest()[:16]
    path = cache_folder(environment, "wheels") / f"{stem}-{file_of(address)}"
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes()
    say(f"  downloading {file_of(address)}")
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        client.download(address, path, sha256=requirement.hashes[0] if len(requirement.hashes) == 1 else "")
    except (LockError, OutputError) as error:
        raise ValueError(error.message) from error
    return path.read_bytes()
