"""Container engines: one file and one line in ``ENGINES`` each, and the choice between them."""

from __future__ import annotations

import importlib
from typing import Final, cast

from trainworks.engine.protocol import BuiltImage, Engine, Isolation, Report, ignore
from trainworks.errors import EngineUnavailableError, UnknownNameError
from trainworks.plan.names import make_unknown_name_error

ENGINES: Final = {
    "docker": "trainworks.engine.docker:DockerEngine",
    "buildah": "trainworks.engine.buildah:BuildahEngine",
}
"""Name to class, in the order in which they are tried. A class is imported when it is needed."""


def create(name: str) -> Engine:
    """Return the engine of this name, without a probe.

    Raises:
        UnknownNameError: No engine has this name.
    """
    if name not in ENGINES:
        raise make_unknown_name_error("engine", name, ENGINES)
    module, _, attribute = ENGINES[name].partition(":")
    return cast(Engine, getattr(importlib.import_module(module), attribute)())


def choose(name: str | None = None, *, report: Report = ignore) -> Engine:
    """Return an engine that answers: the named one, or the first that does.

    Args:
        name: Name of the engine; default: try all.
        report: Receives a line if an engine is slow to answer.

    Raises:
        UnknownNameError: No engine has this name.
        EngineUnavailableError: The named engine does not answer, or none does;
            lists each engine's own error.
    """
    if name is not None:
        engine = create(name)
        engine.probe(report)
        return engine
    tried = []
    hint = "`make engine` installs one and starts it"
    for candidate in ENGINES:
        engine = create(candidate)
        try:
            engine.probe(report)
        except EngineUnavailableError as error:
            tried.append(f"\n  {candidate}: {error.message}")
            # An engine that is there and forbidden to this user needs no second one.
            hint = error.hint if error.denied else hint
        else:
            return engine
    raise EngineUnavailableError(
        "no container engine answers. Tried:" + "".join(tried),
        hint=hint,
    )


def closed(engine: Engine) -> Isolation:
    """Return the isolation for reading an image that this machine built, or builds on.

    ``""``, no isolation, if the engine cannot isolate.
    """
    return "" if engine.isolates() else "asked"


def image_in(engine: Engine, reference: str, *, hint: str = "") -> BuiltImage:
    """Return an image of the engine's store.

    Args:
        engine: The engine.
        reference: The name of the image.
        hint: The hint of the error; default: how to list the engine's images.

    Raises:
        UnknownNameError: The engine has no such image.
    """
    image = engine.inspect(reference)
    if image is None:
        listed = f"`{engine.name} images` lists them; pull an image of a registry first"
        raise UnknownNameError(f"{engine.name} has no image {reference}", hint=hint or listed)
    return image


def read_files(engine: Engine, reference: str) -> dict[str, bytes]:
    """Return the content of each file of a small image, by the file's name.

    Such an image holds the files that a build step wrote for the builder.
    """
    content_by_name = {}
    with engine.layers(reference) as layers:
        for layer in layers:
            for member in layer.archive:
                if not member.isfile():
                    continue
                content = layer.archive.extractfile(member)
                if content is None:
                    continue
                name = member.name.rsplit("/", 1)[-1]
                with content:
                    content_by_name[name] = content.read()
    return content_by_name
