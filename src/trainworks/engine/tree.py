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
"""Bytes of the largest file that is read: dpkg's status file has some megabytes."""

_MOST_LINKS: Final = 40
"""The largest number of links in a path, as for the kernel."""

_WHITEOUT: Final = ".wh."
_OPAQUE: Final = ".wh..wh..opq"


@dataclass(frozen=True, kw_only=True)
class TreeMember:
    """A path of an image.

    Attributes:
        kind: ``file``, ``folder``, ``link`` or ``other``.
        mode: The bits of its mode.
        owner: The number of its user.
        target: The text of a link.
    """

    kind: str
    mode: int
    owner: int
    target: str = ""


@dataclass(kw_only=True)
class ImageTree:
    """The files of an image as a container sees them before it starts.

    Attributes:
        members: Each path, absolute and without links in it.
        contents: The bytes of the files that were read.
    """

    members: dict[str, TreeMember] = field(default_factory=dict)
    contents: dict[str, bytes] = field(default_factory=dict)

    def real(self, path: str) -> str:
        """Return a path with its links resolved inside the image; ``""`` if no file is there."""
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
            if member.target.startswith("/"):
                place = ""
            target_parts = [name for name in member.target.split("/") if name]
            rest = target_parts + rest
        return place or "/"

    def kind(self, path: str) -> str:
        """Return the kind of the file that a path leads to; ``""`` if no file is there."""
        place = self.real(path)
        if place == "/":
            return "folder"
        return self.members[place].kind if place else ""

    def runs(self, path: str) -> bool:
        """Return whether a path leads to a file that its mode lets run."""
        member = self.members.get(self.real(path))
        return member is not None and member.kind == "file" and bool(member.mode & 0o111)

    def read(self, path: str) -> bytes | None:
        """Return the content of the file that a path leads to.

        ``None`` if there is no such file, or if its content was not read.
        """
        return self.contents.get(self.real(path))

    def below(self, folder: str) -> Iterator[str]:
        """Yield every path below a folder, whose own links are resolved."""
        start = self.real(folder).rstrip("/") + "/"
        for path in self.members:
            if path.startswith(start):
                yield path


def read_tree(engine: Engine, reference: str, wanted: re.Pattern[str]) -> ImageTree:
    """Read the paths of an image, and the content of files with a path that matches.

    Args:
        engine: The engine that has the image.
        reference: The name of the image.
        wanted: Matches the absolute paths of the files to read, of at most ``LARGEST_FILE`` bytes.

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
    """Return the files of several layers, as a container sees them.

    Args:
        layers: The layers, lowest first.
        wanted: As of ``read_tree``.
    """
    tree = ImageTree()
    for layer in layers:
        # The paths of this layer: its own whiteouts do not remove them.
        added: set[str] = set()
        # The folders that this layer has emptied of lower layers.
        emptied: set[str] = set()
        for member in layer.archive:
            path = posixpath.normpath(f"/{member.name}")
            path = path.removeprefix("/") if path.startswith("//") else path
            folder, name = posixpath.split(path)
            if name == _OPAQUE:
                # Once: a layer may have many of them, and each search costs.
                if folder not in emptied:
                    _remove(tree, folder, but=added, itself=False)
                    emptied.add(folder)
            elif name.startswith(_WHITEOUT):
                hidden = posixpath.join(folder, name.removeprefix(_WHITEOUT))
                _remove(tree, hidden, but=added, itself=True)
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
    """Put a member of a layer into a tree, in the place of the path's member of lower layers."""
    kind = "other"
    if member.isdir():
        kind = "folder"
    elif member.issym():
        kind = "link"
    elif member.isreg() or member.islnk():
        kind = "file"
    tree.contents.pop(path, None)
    before = tree.members.get(path)
    # Something else in the place of a folder hides the folder's content.
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
    """Remove the paths of lower layers below a path.

    Args:
        tree: The image.
        path: The path.
        but: Paths of the layer itself, which stay.
        itself: Whether the path is removed too.
    """
    member = tree.members.get(path)
    if itself and path not in but:
        tree.members.pop(path, None)
        tree.contents.pop(path, None)
    if path != "/" and (member is None or member.kind != "folder"):
        return
    start = path.rstrip("/") + "/"
    below = [other for other in tree.members if other.startswith(start) and other not in but]
    for other in below:
        tree.members.pop(other, None)
        tree.contents.pop(other, None)
