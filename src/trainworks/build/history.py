"""Remembers on this machine what each image was last built from, so that a plan can say what a build would change."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

from trainworks.host.cache import cache_folder, write_cached
from trainworks.render.forecast import Inputs

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class LastBuild:
    """The inputs of the last build of an image, and when it ended (ISO 8601, UTC)."""

    ended: str
    inputs: Inputs


def last_build(tag: str, environment: Mapping[str, str]) -> LastBuild | None:
    """Return what an image was last built from on this machine; ``None`` where that is not known."""
    with suppress(OSError, RuntimeError, ValueError, KeyError, TypeError):
        content = json.loads(cache_folder(environment, "builds", _name(tag)).read_text(encoding="utf-8"))
        if content["schema"] == SCHEMA and content["tag"] == tag:
            return LastBuild(ended=str(content["ended"]), inputs=content["inputs"])
    return None


def remember_build(tag: str, inputs: Inputs, environment: Mapping[str, str]) -> None:
    """Remember a build that has succeeded; where the cache folder cannot be written, later plans compare nothing."""
    ended = datetime.now(UTC).isoformat(timespec="seconds")
    content = {"schema": SCHEMA, "tag": tag, "ended": ended, "inputs": inputs}
    with suppress(OSError, RuntimeError):
        write_cached(cache_folder(environment, "builds", _name(tag)), json.dumps(content, indent=1).encode())


def _name(tag: str) -> str:
    return f"{hashlib.sha256(tag.encode()).hexdigest()[:32]}.json"
