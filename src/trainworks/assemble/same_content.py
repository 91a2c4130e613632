"""Compares an image with the one that was built and tested on this machine, by content: layers and configuration.

The digests of an image's layers name everything that is in them. So an image of the same layers and configuration is
the one that was tested. One with more layers is that one, with the files that these change or hide.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from trainworks.engine.protocol import BuiltImage, Engine
from trainworks.host.cache import cache_folder, write_cached
from trainworks.imagetest.results import CheckResult, folded, one_line

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
    members: dict[str, list[tuple[str, tarfile.TarInfo]]] = {}
    if more:
        with engine.layers(image.reference) as layers:
            members = {_key(layer.name): [(_path_of(each), each) for each in layer.archive] for layer in layers}
    there: dict[str, tarfile.TarInfo] = {}
    for name in tested.layers:
        there.update(members.get(_key(name), ()))
    for number, name in enumerate(more, start=1):
        if _key(name) not in members:
            lines.append(f"layer {number} on top of it, {name}, cannot be read")
        alike: dict[str, list[str]] = {}
        for path, how in _changed(members.get(_key(name), ()), there):
            alike.setdefault(how, []).append(path)
        there.update(members.get(_key(name), ()))
        lines += [f"{path} {how} (layer {number})" for how, paths in alike.items() for path in folded(paths)]
    return CheckResult(
        component="content",
        title=f"the image is the one that was tested on {tested.when}",
        passed=False,
        detail="\n".join(lines) or "its configuration is another one",
        seconds=0,
    )


def _key(name: str) -> str:
    return name.rpartition(":")[2]


def _path_of(member: tarfile.TarInfo) -> str:
    return posixpath.normpath(f"/{member.name}")


def _changed(
    members: Sequence[tuple[str, tarfile.TarInfo]], there: Mapping[str, tarfile.TarInfo]
) -> Iterator[tuple[str, str]]:
    """Yield the paths that a layer changes, and how; folders that are as before are left out."""
    for path, member in sorted(members, key=lambda pair: pair[0]):
        folder, name = posixpath.split(path)
        if name == ".wh..wh..opq":
            yield folder, "has nothing left of what was in it"
        elif name.startswith(".wh."):
            yield posixpath.join(folder, name[len(".wh.") :]), "is removed"
        elif path not in there:
            yield path, "is new"
        else:
            pairs = zip(_FACTS, _facts(member), _facts(there[path]), strict=True)
            different = [(what, new, old) for what, new, old in pairs if new != old]
            if member.type != there[path].type:
                different = [each for each in different if each[0] in ("type", "target")]
            how = [f"{what} {new or 'none'}, was {old or 'none'}" for what, new, old in different]
            if how or not member.isdir():
                yield path, f"has {', '.join(how)}" if how else "is written again"


_FACTS = ("type", "mode", "owner", "size", "target")


def _facts(member: tarfile.TarInfo) -> tuple[str, ...]:
    kind = "folder" if member.isdir() else "link" if member.issym() else "file" if member.isfile() else "other"
    mode = "" if member.issym() else f"{member.mode & 0o7777:04o}"
    owner = f"{member.uid}:{member.gid}"
    return (kind, mode, owner, f"{member.size} B" if member.isreg() else "", member.linkname)


def _of_configuration(found: Mapping[str, object], wanted: Mapping[str, object]) -> Iterator[str]:
    for key, instruction in INSTRUCTIONS.items():
        if found.get(key) != wanted.get(key):
            yield f"{instruction} is {found.get(key)!r}, and was {wanted.get(key)!r}"
    for key, instruction in (("Env", "ENV"), ("Labels", "LABEL")):
        new, old = (_pairs(values.get(key)) for values in (found, wanted))
        for name in sorted(new.keys() | old.keys()):
            if new.get(name) != old.get(name):
                yield f"{instruction} {one_line(name)} is {new.get(name)!r}, and was {old.get(name)!r}"


def _pairs(values: object) -> Mapping[str, object]:
    if isinstance(values, Mapping):
        return values
    return dict(str(entry).partition("=")[::2] for entry in values) if isinstance(values, Sequence) else {}
