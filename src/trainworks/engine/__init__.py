"""Container engines: one file each, one line each in ``ENGINES``, and the choice between them."""

from __future__ import annotations

import importlib
from typing import Final, cast

from trainworks.engine.protocol import Engine
from trainworks.errors import EngineUnavailableError
from trainworks.plan.names import unknown

ENGINES: Final = {
    "docker": "trainworks.engine.docker:DockerEngine",
    "buildah": "trainworks.engine.buildah:BuildahEngine",
}
"""Name to class, in the order in which they are tried; imported when asked for."""


def create(name: str) -> Engine:
    """Return the engine of this name, not yet asked whether it answers.

    Raises:
        UnknownNameError: There is no such engine.
    """
    if name not in ENGINES:
        raise unknown("engine", name, ENGINES)
    module, _, attribute = ENGINES[name].partition(":")
    return cast(Engine, getattr(importlib.import_module(module), attribute)())


def choose(name: str | None = None) -> Engine:
    """Return an engine that answers: the one asked for, or the first that does.

    Raises:
        UnknownNameError: There is no such engine.
        EngineUnavailableError: It does not answer, or none does; says what was tried, in each one's own words.
    """
    if name is not None:
        engine = create(name)
        engine.probe()
        return engine
    tried = []
    hint = "`make engine` installs one and starts it"
    for candidate in ENGINES:
        engine = create(candidate)
        try:
            engine.probe()
        except EngineUnavailableError as error:
            tried.append(f"\n  {candidate}: {error.message}")
            hint = error.hint if error.denied else hint
        else:
            return engine
    raise EngineUnavailableError(
        "no container engine answers. Tried:" + "".join(tried),
        hint=hint,
    )
