"""Says what was done to an image since it was built: its label names its layers, and their digests all that is in them.

So nothing has to be known of the build. An image of more layers is the one that was built, with the files that these
change or hide.
"""

from __future__ import annotations

import posixpath
import tarfile
from collections.abc import Iterator, Mapping, Sequence

from trainworks.engine.protocol import BuiltImage, Engine
from trainworks.imagetest.results import CheckResult, folded
from trainworks.render.dockerfile import LAYERS_LABEL

DIGITS = 16
"""How much of a layer's digest the label has: it tells layers apart, and is no signature."""


def layers_of(image: BuiltImage) -> str:
    """Return the text of the label: the beginnings of the digests of the layers, lowest first."""
    return " ".join(name.rpartition(":")[2][:DIGITS] for name in image.layers)


def compare_layers(image: BuiltImage, engine: Engine) -> CheckResult | None:
    """Compare an image with the layers that it was built with: a line for each file that is another one.

    Returns:
        The result; ``None`` for an image whose label does not name its layers.
    """
    built, found = image.labels.get(LAYERS_LABEL, "").split(), layers_of(image).split()
    if not built:
        return None
    other = [number for number, name in enumerate(built, start=1) if found[number - 1 : number] != [name]]
    lines = [f"layer {number} of {len(built)} is not the one that was built" for number in other]
    if not other and found != built:
        lines = [*_on_top(image, engine, len(built))]
    return CheckResult(
        component="content",
        title=f"its {len(built)} layers are those that were built, and no others",
        passed=not lines,
        detail="\n".join(lines),
        seconds=0,
    )


def _on_top(image: BuiltImage, engine: Engine, built: int) -> Iterator[str]:
    """Yield what the layers on top of those that were built change."""
    with engine.layers(image.reference) as layers:
        members = {_key(layer.name): [(_path_of(each), each) for each in layer.archive] for layer in layers}
    there: dict[str, tarfile.TarInfo] = {}
    for number, name in enumerate(image.layers, start=1 - built):
        inside = members.get(_key(name))
        if number > 0 and inside is None:
            yield f"layer {number} on top, {name}, cannot be read"
        elif number > 0:
            alike: dict[str, list[str]] = {}
            for path, how in _changed(inside or (), there):
                alike.setdefault(how, []).append(path)
            for how, paths in alike.items():
                yield from (f"{path} {how} (layer {number} on top)" for path in folded(paths))
        there.update(inside or ())


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
