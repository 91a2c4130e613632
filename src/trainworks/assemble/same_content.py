"""Compares an image with the one that was built and tested on this machine, by content: layers and configuration.

The digests of an image's layers name everything that is in them. So an image of the same layers and configuration is
the one that was tested. One with more layers is that one, with the files that these change or hide.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from trainworks.engine.protocol import BuiltImage, Engine, Layer
from trainworks.host.cache import cache_folder, write_cached
from trainworks.imagetest.results import CheckResult

INSTRUCTIONS = {
    "Entrypoint": "ENTRYPOINT",
    "Cmd": "CMD",
    "User": "USER",
    "WorkingDir": "WORKDIR",
    "Healthcheck": "HEALTHCHECK",
    "OnBuild": "ONBUILD",
    "ExposedPorts": "EXPOSE",
    "Shell": "SHELL",
    "StopSignal": "STOPSIGNAL",
    "Volumes": "VOLUME",
}
"""What a configuration says besides variables and labels, and the instruction that sets it."""

SHOWN = 20
"""How many files of one layer are named."""


@dataclass(frozen=True, kw_only=True)
class TestedImage:
    """What an image was when all its tests had passed.

    Attributes:
        identifier: The digest of its configuration, in which those of the layers are.
        layers: The digests of its layers, lowest first.
        configuration: What it says of a container, by the keys of an image's configuration.
        when: When the tests had passed (UTC, ISO 8601).
        checks: How many there were.
    """

    identifier: str
    layers: tuple[str, ...]
    configuration: Mapping[str, object]
    when: str
    checks: int


def remember(image: BuiltImage, when: str, checks: int, environment: Mapping[str, str]) -> None:
    """Write down an image whose tests all passed; a cache that cannot be written keeps nothing."""
    if image.layers:
        found = TestedImage(
            identifier=image.identifier,
            layers=image.layers,
            configuration=image.configuration,
            when=when,
            checks=checks,
        )
        with suppress(OSError, RuntimeError):
            write_cached(_path(image.layers, environment), json.dumps(asdict(found)).encode())


def known_image(image: BuiltImage, environment: Mapping[str, str]) -> TestedImage | None:
    """Return the tested image that an image is, or is made of; ``None`` where this machine knows none."""
    for number in range(len(image.layers), 0, -1):
        with suppress(OSError, RuntimeError, ValueError, TypeError, KeyError):
            found = json.loads(_path(image.layers[:number], environment).read_bytes())
            return TestedImage(**{**found, "layers": tuple(found["layers"])})
    return None


def _path(layers: Sequence[str], environment: Mapping[str, str]) -> Path:
    return cache_folder(environment, "content", f"{hashlib.sha256(' '.join(layers).encode()).hexdigest()}.json")


def differences(image: BuiltImage, tested: TestedImage, engine: Engine) -> CheckResult:
    """Return, as a failed check, how an image differs from the tested one that it is made of: a line for each thing."""
    lines = [*_of_configuration(image.configuration, tested.configuration)]
    more = image.layers[len(tested.layers) :]
    found = {}
    if more:
        with engine.layers(image.reference) as layers:
            found = {name: list(_changed(layer)) for layer in layers for name in more if _is(layer, name)}
    for number, name in enumerate(more, start=1):
        paths = found.get(name)
        what = f"layer {number} on top of it"
        if paths is None:
            lines.append(f"{what}, {name}, cannot be read")
        else:
            lines += [f"{path}: {what} {does} it" for path, does in paths[:SHOWN]]
            lines += [f"... and {len(paths) - SHOWN} more of {what}"] if len(paths) > SHOWN else []
    return CheckResult(
        component="content",
        title=f"the image is the one that was tested on {tested.when}",
        passed=False,
        detail="\n".join(lines) or "its configuration is another one",
        seconds=0,
    )


def _is(layer: Layer, name: str) -> bool:
    return name.rpartition(":")[2] == layer.name.rpartition(":")[2]


def _changed(layer: Layer) -> Iterator[tuple[str, str]]:
    """Yield the paths that a layer has, and what it does to each; folders only where it has nothing inside them."""
    members = [(f"/{member.name.strip('./')}", member) for member in layer.archive]
    folders = {posixpath.dirname(path) for path, _ in members}
    for path, member in sorted(members, key=lambda pair: pair[0]):
        folder, name = posixpath.split(path)
        if name == ".wh..wh..opq":
            yield _shown(folder), "replaces all of"
        elif name.startswith(".wh."):
            yield _shown(posixpath.join(folder, name[len(".wh.") :])), "removes"
        elif not member.isdir() or path not in folders:
            yield _shown(path), "has"


def _shown(path: str) -> str:
    """Return a path on one line: a name may have any byte in it."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in path)


def _of_configuration(found: Mapping[str, object], wanted: Mapping[str, object]) -> Iterator[str]:
    for key, instruction in INSTRUCTIONS.items():
        if found.get(key) != wanted.get(key):
            yield f"{instruction} is {found.get(key)!r}, and was {wanted.get(key)!r}"
    for key, instruction in (("Env", "ENV"), ("Labels", "LABEL")):
        new, old = (_pairs(values.get(key)) for values in (found, wanted))
        for name in sorted(new.keys() | old.keys()):
            if new.get(name) != old.get(name):
                yield f"{instruction} {_shown(name)} is {new.get(name)!r}, and was {old.get(name)!r}"


def _pairs(values: object) -> Mapping[str, object]:
    if isinstance(values, Mapping):
        return values
    return dict(str(entry).partition("=")[::2] for entry in values) if isinstance(values, Sequence) else {}
