"""Which images have passed their checks on this machine, so that an image that is there is not asked twice.

An engine's identifier is the digest of an image's configuration, which holds the digests of its layers: the same
identifier is the same image. The results count while all else that decides them is the same too: the checks, the texts
that must not be inside, the base, the engine, and every line of this package.
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
    """The results of an image that passed every check, and when that was (UTC, ISO 8601, to the second)."""

    results: tuple[CheckResult, ...]
    when: str


class CheckMemory:
    """What one image was asked before, in this user's cache (``host.cache``)."""

    def __init__(
        self,
        image: BuiltImage,
        engine: Engine,
        checks: tuple[Check, ...],
        *,
        forbidden: tuple[str, ...],
        base: BuiltImage | None,
        environment: Mapping[str, str],
    ) -> None:
        """Name the results by what decides them; arguments as of ``imagetest.run.run_checks``."""
        probe = engine.probe()
        decides = (
            *(image.identifier, base.identifier if base else "", probe.name, probe.version),
            *(repr(check) for check in checks),
            *sorted(forbidden),
            _own_code(),
        )
        self._image = image
        self._name = hashlib.sha256("\0".join(decides).encode()).hexdigest()
        self._environment = environment

    def passed(self) -> PassedChecks | None:
        """Return what passed before; ``None`` where nothing is known, or the file cannot be read."""
        with suppress(OSError, RuntimeError, ValueError, TypeError, KeyError):
            found = json.loads(self._path().read_bytes())
            return PassedChecks(results=tuple(CheckResult(**each) for each in found["results"]), when=found["when"])
        return None

    def remember(self, results: tuple[CheckResult, ...], *, whole: bool = False) -> PassedChecks:
        """Keep results that all passed; a cache that cannot be written, or a user without one, keeps nothing.

        ``whole``: whether these are all checks of the image, so that it counts as tested.
        """
        now = PassedChecks(results=results, when=datetime.now(UTC).isoformat(timespec="seconds"))
        if results and all(each.passed for each in results):
            with suppress(OSError, RuntimeError):
                write_cached(self._path(), json.dumps(asdict(now)).encode())
                if whole:
                    text = json.dumps({"when": now.when, "checks": len(results)})
                    write_cached(_path_of(self._image, self._environment), text.encode())
        return now

    def _path(self) -> Path:
        return cache_folder(self._environment, "tested", f"{self._name}.json")


def when_tested(image: BuiltImage, environment: Mapping[str, str]) -> tuple[str, int] | None:
    """Return when an image passed all its checks on this machine, and how many; ``None`` where that is not known."""
    with suppress(OSError, RuntimeError, ValueError, TypeError, KeyError):
        found = json.loads(_path_of(image, environment).read_bytes())
        return str(found["when"]), int(found["checks"])
    return None


def _path_of(image: BuiltImage, environment: Mapping[str, str]) -> Path:
    return cache_folder(environment, "content", f"{image.identifier.rpartition(':')[2]}.json")


@cache
def _own_code() -> str:
    """Return the digest of this package's source."""
    package = Path(trainworks.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
