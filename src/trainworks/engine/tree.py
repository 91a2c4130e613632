"""The files of an image, read from its layers: no program of the image has to
run, and no link leads out of it.
"""

from __future__ import annotations

import posixpath
import re
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from trainworks.engine.protocol import Engine, Layer
from trainworks.errors import EngineError

LARGEST_FILE: Final = 64 << 20
"""Bytes of a file that is read: the status file of dpkg has some megabytes."""

_MOST_LINKS: Final = 40
"""How many links a path may go through, as for the kernel."""

_WHITEOUT: Final = ".wh."
_OPAQUE: Final = ".wh..wh..opq"


@dataclass(frozen=True, kw_only=True)
class TreeMember:
    """A path of an image.

    Attributes:
        kind: ``file``, ``folder``, ``link`` or ``other``.
        mode: The bits of its mode.
        owner: The number of its user.
        target: Where a link leads, as it is written in it.
    """

    kind: str
    mode: int
    owner: int
    target: str = ""


@dataclass(kw_only=True)
class ImageTree:
    """What a container of an image sees, before it starts.

    Attributes:
        members: Each path, absolute and without links in it, with what it is.
        contents: The bytes of the files that were asked for.
    """

    members: dict[str, TreeMember] = field(default_factory=dict)
    contents: dict[str, bytes] = field(default_factory=dict)

    def real(self, path: str) -> str:
        """Return a path with its links resolved inside the image; ``""`` where it leads nowhere."""
        rest = [part for part in path.split("/") if part]
        place = ""
        links = 0
        while rest:
            part = rest.pop(0)
            if part == ".":
                continue
            if part == "..":
                place = posixpath.dirname(place).rstrip("/")
                continue
            member = self.members.get(f"{place}/{part}")
            if member is None:
                return ""
            if member.kind != "link":
                place = f"{place}/{part}"
                continue
            links += 1
            if links > _MOST_LINKS:
                return ""
            place = "" if member.target.startswith("/") else place
            rest = [*(each for each in member.target.split("/") if each), *rest]
        return place or "/"

    def kind(self, path: str) -> str:
        """Return the kind of what a path leads to, ``""`` where that is nothing."""
        place = self.real(path)
        if place == "/":
            return "folder"
        return self.members[place].kind if place else ""

    def runs(self, path: str) -> bool:
        """Return whether a path leads to a program."""
        place = self.real(path)
        member = self.members.get(place)
        return member is not None and member.kind == "file" and bool(member.mode & 0o111)

    def read(self, path: str) -> bytes | None:
        """Return the content of a file that was asked for; ``None`` where there is none."""
        return self.contents.get(self.real(path))

    def below(self, folder: str) -> Iterator[str]:
        """Yield every path below a folder, whose own links are resolved."""
        start = self.real(folder).rstrip("/") + "/"
        for path in self.members:
            if path.startswith(start):
                yield path


def read_tree(engine: Engine, reference: str, wanted: re.Pattern[str]) -> ImageTree:
    """Read which files an image has, and the content of those whose path matches.

    Raises:
        BuildError, EngineError, EngineUnavailableError: The engine cannot read the image.
    """
    try:
        with engine.contents(reference) as layers:
            return tree_of(layers, wanted)
    except tarfile.TarError as error:
        raise EngineError(
            f"the files of {reference} cannot be read: {error}",
            hint="pull or build the image again",
        ) from error


def tree_of(layers: Iterable[Layer], wanted: re.Pattern[str]) -> ImageTree:
    """Return the files of layers that are given lowest first."""
    tree = ImageTree()
    for layer in layers:
        added: set[str] = set()
        emptied: set[str] = set()
        for member in layer.archive:
            path = posixpath.normpath(f"/{member.name}")
            path = path.removeprefix("/") if path.startswith("//") else path
            folder, name = posixpath.split(path)
            if name == _OPAQUE:
                # Once: a layer may say it many times, and each look costs.
                if folder not in emptied:
                    _remove(tree, folder, but=added, itself=False)
                    emptied.add(folder)
            elif name.startswith(_WHITEOUT):
                _remove(
                    tree,
                    posixpath.join(folder, name.removeprefix(_WHITEOUT)),
                    but=added,
                    itself=True,
                )
            elif path != "/":
                _add(tree, path, member)
                added.add(path)
                if member.isreg() and member.size <= LARGEST_FILE and wanted.fullmatch(path):
                    stream = layer.archive.extractfile(member)
                    if stream is not None:
                        with stream:
                            tree.contents[path] = stream.read()
    return tree


def _add(tree: ImageTree, path: str, member: tarfile.TarInfo) -> None:
    kind = "other"
    if member.isdir():
        kind = "folder"
    elif member.issym():
        kind = "link"
    elif member.isreg() or member.islnk():
        kind = "file"
    tree.contents.pop(path, None)
    before = tree.members.get(path)
    if before is not None and before.kind == "folder" and kind != "folder":
        _remove(tree, path, but=set(), itself=True)
    mode, owner = member.mode, member.uid
    if member.islnk():
        # Another name of a file of this layer, whose content and mode it has.
        original = posixpath.normpath(f"/{member.linkname}")
        same = tree.members.get(original)
        if same is not None:
            mode, owner = same.mode, same.owner
        if original in tree.contents:
            tree.contents[path] = tree.contents[original]
    target = member.linkname if kind == "link" else ""
    tree.members[path] = TreeMember(kind=kind, mode=mode, owner=owner, target=target)


def _remove(tree: ImageTree, path: str, *, but: set[str], itself: bool) -> None:
    """Forget what lower layers have below a path, and the path itself where it
    is removed as a whole.
    """
    member = tree.members.get(path)
    if itself and path not in but:
        tree.members.pop(path, None)
        tree.contents.pop(path, None)
    if path != "/" and (member is None or member.kind != "folder"):
        return
    start = path.rstrip("/") + "/"
    for each in [each for each in tree.members if each.startswith(start) and each not in but]:
        tree.members.pop(each, None)
        tree.contents.pop(each, None)
