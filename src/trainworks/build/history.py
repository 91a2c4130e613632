"""Remembers on this machine what each image was last built from, so that a plan can say what a build would change."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from trainworks.engine.progress import Timings
from trainworks.render.forecast import Inputs

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class LastBuild:
    """The inputs of the last build of an image, when it ended (ISO 8601, UTC), and how long its steps took."""

    ended: str
    inputs: Inputs
    timings: Timings = field(default_factory=Timings)


def last_build(tag: str, environment: Mapping[str, str]) -> LastBuild | None:
    """Return what an image was last built from on this machine; ``None`` where nobody knows."""
    with suppress(OSError, RuntimeError, ValueError, KeyError, TypeError):
        content = json.loads(_file(tag, environment).read_text(encoding="utf-8"))
        if content["schema"] == SCHEMA and content["tag"] == tag:
            timings = Timings(**content.get("timings", {}))
            return LastBuild(ended=str(content["ended"]), inputs=content["inputs"], timings=timings)
    return None


def record_build(tag: str, inputs: Inputs, environment: Mapping[str, str], timings: Timings | None = None) -> None:
    """Remember a build that has succeeded; a home that cannot be written to costs later plans their comparison only.

    Steps that it did not run keep the times of the builds before it.
    """
    before = last_build(tag, environment)
    known = (before.timings if before else Timings()).updated(timings or Timings())
    content = {
        "schema": SCHEMA,
        "tag": tag,
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        "inputs": inputs,
        "timings": asdict(known),
    }
    with suppress(OSError, RuntimeError):
        path = _file(tag, environment)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = path.with_suffix(".new")
        draft.write_text(json.dumps(content, indent=1), encoding="utf-8")
        draft.replace(path)


def _file(tag: str, environment: Mapping[str, str]) -> Path:
    cache = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainworks" / "builds"
    return cache / f"{hashlib.sha256(tag.encode()).hexdigest()[:32]}.json"
