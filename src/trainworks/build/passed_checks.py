"""Remembers the images that have passed their checks on this machine, so that an image is not
checked twice.

An engine's identifier is the digest of an image's configuration, which holds the digests of its
layers: the same identifier is the same image, while the engine's store is sound. Only a build
believes that: `check --image` asks the bytes. The results count while all else that decides them is
the same too: the checks, the texts that must not be inside, the base, the engine, and every line of
this package.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import trainworks
from trainworks.engine.protocol import BuiltImage, Engine
from trainworks.host.cache import cache_folder, write_cached
from trainworks.imagetest.results import CheckResult
from trainworks.plan.checks import Check


@dataclass(frozen=True, kw_only=True)
class PassedChecks:
    """The results of an image's checks.

    Attributes:
        results: One result for each check.
        when: The time of the checks (UTC, ISO 8601, to the second).
    """

    results: tuple[CheckResult, ...]
    when: str


def identity_of_checks(
    image: BuiltImage,
    engine: Engine,
    checks: tuple[Check, ...],
    *,
    forbidden: tuple[str, ...],
    base: BuiltImage | None,
) -> str:
    """Return the digest of all that decides the results of an image's checks.

    Args:
        image: The image.
        engine: The engine that runs it.
        checks: The checks.
        forbidden: Texts that must not be in the image.
        base: The image that it extends; ``None``: it is a target's.
    """
    probe = engine.probe()
    base_identifier = base.identifier if base else ""
    parts = [image.identifier, base_identifier, probe.name, probe.version]
    parts += [repr(check) for check in checks]
    parts += sorted(forbidden)
    parts.append(_own_code())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def passed_before(
    image: BuiltImage, environment: Mapping[str, str], *, decided_by: str
) -> PassedChecks | None:
    """Return the checks that an image has passed on this machine.

    ``None`` where nothing is known, or the file cannot be read.

    Args:
        image: The image.
        environment: The process's environment, which names the folder of this user's
            cache (``host.cache``).
        decided_by: The digest of all that decides the results (``identity_of_checks``).
    """
    with suppress(OSError, RuntimeError, ValueError, TypeError, KeyError):
        file = _folder_of(image, environment) / f"{decided_by}.json"
        content = json.loads(file.read_bytes())
        results = [CheckResult(**row) for row in content["results"]]
        return PassedChecks(results=tuple(results), when=content["when"])
    return None


def remember(
    image: BuiltImage, passed: PassedChecks, environment: Mapping[str, str], *, decided_by: str
) -> None:
    """Write the results of all checks of an image into the user's cache, if all passed.

    A cache that cannot be written keeps nothing; that is no error.

    Args:
        image: The image.
        passed: The results.
        environment: The process's environment, which names the cache.
        decided_by: The digest of all that decides the results (``identity_of_checks``).
    """
    have_passed = all(result.passed for result in passed.results)
    if not passed.results or not have_passed:
        return
    with suppress(OSError, RuntimeError):
        path = _folder_of(image, environment) / f"{decided_by}.json"
        write_cached(path, json.dumps(asdict(passed)).encode())


def now() -> str:
    """Return the time in the form of ``PassedChecks.when``."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _folder_of(image: BuiltImage, environment: Mapping[str, str]) -> Path:
    """Return the folder with the results of an image; it may not exist."""
    return cache_folder(environment, "tested", image.identifier.rpartition(":")[2])


@cache
def _own_code() -> str:
    """Return the digest of this package's source."""
    package = Path(trainworks.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
