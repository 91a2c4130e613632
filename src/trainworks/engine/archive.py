"""Write image archives in ``docker save`` form from a folder, and read them
layer by layer, as streams.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import os
import tarfile
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Final, cast

from trainworks.engine.entries import Entry, entries_of
from trainworks.engine.protocol import Layer
from trainworks.errors import BuildError, OutputError
from trainworks.facts.rows import Architecture

_BLOCK: Final = 512
_GZIP: Final = b"\x1f\x8b"
_CAPABILITY: Final = "security.capability"


@dataclass(frozen=True, kw_only=True)
class ImageConfiguration:
    """The configuration of an image that is written from a folder.

    Attributes:
        created: Seconds since 1970, the time of the image and the latest time of a file.
        environment: The image's environment.
        command: The image's default command.
        architecture: The architecture of the image's programs.
    """

    created: int
    environment: Mapping[str, str] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    architecture: Architecture = "amd64"


def write_archive(
    rootfs: Path, destination: Path, *, name: str, configuration: ImageConfiguration
) -> str:
    """Write an image of one layer from a root file system, byte for byte the
    same for the same files.

    Owners go in as numbers, names are sorted, and times after the image's own are set to it, so
    that two bootstraps of one distribution give one image.

    Args:
        rootfs: A folder with the files of ``/``; sockets are left out.
        destination: The archive to write; replaced only when the new one is complete.
        name: The image's name, ``REPOSITORY:TAG``.
        configuration: The image's configuration.

    Returns:
        The image's identifier, ``sha256:`` and the hash of its configuration.

    Raises:
        OutputError: The folder cannot be read or the archive not written.
    """
    created = configuration.created
    partial = destination.with_name(f".{destination.name}.{uuid.uuid4().hex[:12]}")
    try:
        try:
            with (
                tempfile.TemporaryFile(dir=destination.parent) as layer,
                partial.open("xb") as file,
            ):
                with tarfile.open(fileobj=layer, mode="w|", format=tarfile.PAX_FORMAT) as content:
                    content.add(
                        rootfs, ".", filter=lambda member: _as_in_a_layer(member, rootfs, created)
                    )
                layer.seek(0)
                difference = hashlib.file_digest(layer, "sha256").hexdigest()
                moment = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
                variables = [f"{key}={value}" for key, value in configuration.environment.items()]
                document = {
                    "architecture": configuration.architecture,
                    "os": "linux",
                    "created": moment,
                    "config": {
                        "Env": variables,
                        "Cmd": list(configuration.command),
                    },
                    "history": [{"created": moment, "created_by": "trainworks: root file system"}],
                    "rootfs": {"type": "layers", "diff_ids": [f"sha256:{difference}"]},
                }
                described = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
                identifier = hashlib.sha256(described).hexdigest()
                layer_name = f"{difference}.tar"
                manifest = [
                    {"Config": f"{identifier}.json", "RepoTags": [name], "Layers": [layer_name]}
                ]
                with tarfile.open(fileobj=file, mode="w|", format=tarfile.GNU_FORMAT) as outer:
                    for member_name, member_content in (
                        (layer_name, layer),
                        (f"{identifier}.json", io.BytesIO(described)),
                        (
                            "manifest.json",
                            io.BytesIO(json.dumps(manifest, separators=(",", ":")).encode()),
                        ),
                    ):
                        member = tarfile.TarInfo(member_name)
                        member.size, member.mtime = member_content.seek(0, os.SEEK_END), created
                        member_content.seek(0)
                        outer.addfile(member, member_content)
            partial.replace(destination)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        where = error.filename or destination
        raise OutputError(
            f"cannot write {destination}: {where} ({error.strerror or error})"
        ) from error
    return f"sha256:{identifier}"


def _as_in_a_layer(member: tarfile.TarInfo, rootfs: Path, created: int) -> tarfile.TarInfo:
    """Change a member to be the same on every machine, and return it.

    It loses this machine's names and late times, and gets its file capabilities (``ping`` has
    one).

    Args:
        member: The member.
        rootfs: The folder that has the file.
        created: The latest time, in seconds since 1970.
    """
    member.uname = member.gname = ""
    member.name = member.name.removeprefix("./")
    if member.islnk():
        member.linkname = member.linkname.removeprefix("./")
    member.mtime = min(int(member.mtime), created)
    # A file system or kernel without extended attributes raises.
    with contextlib.suppress(OSError):
        value = os.getxattr(rootfs / member.name, _CAPABILITY, follow_symlinks=False)
        # PAX values are text to tarfile; surrogate escapes carry the bytes through.
        member.pax_headers = {
            f"SCHILY.xattr.{_CAPABILITY}": value.decode("utf-8", "surrogateescape")
        }
    return member


def images_in(archive: Path) -> tuple[tuple[str, ...], ...]:
    """Return the names of each image in a ``docker save`` archive, in its order.

    Raises:
        OutputError: The file cannot be read.
        BuildError: It is not such an archive.
    """
    try:
        with tarfile.open(archive, "r:*") as outer:
            member = outer.extractfile("manifest.json")
            if member is None:
                raise KeyError("manifest.json")
            manifest = json.load(member)
        return tuple(tuple(image.get("RepoTags") or ()) for image in manifest)
    except OSError as error:
        raise OutputError(f"cannot read {archive}: {error.strerror or error}") from error
    except (tarfile.TarError, KeyError, ValueError) as error:
        raise BuildError(f"{archive} is not an image archive of `docker save` ({error})") from error


def layers_of(stream: IO[bytes]) -> Iterator[Layer]:
    """Yield the layers of a ``docker save`` archive that is read as a stream,
    each once, in the archive's order.

    Both layouts are known: ``ID/layer.tar`` and ``HASH.tar`` of older engines,
    ``blobs/sha256/HASH`` of newer ones, where layers stand beside configurations, are recognised by
    their first bytes, and may be compressed.
    """
    for name, content, is_layer in files_of(stream):
        if is_layer:
            with tarfile.open(fileobj=content, mode="r|*", bufsize=1 << 16) as inner:
                short = name.removesuffix("/layer.tar").removesuffix(".tar").rpartition("/")[2]
                yield Layer(name=short, archive=inner)


@dataclass(frozen=True, kw_only=True)
class StoredLayer:
    """A layer of an archive, as its bytes are.

    Attributes:
        digest: ``sha256:`` and 64 digits, of the uncompressed bytes: an image names its layers so.
        entries: What it says of each path.
    """

    digest: str
    entries: Mapping[str, Entry]


def stored_layers(stream: IO[bytes]) -> Iterator[StoredLayer]:
    """Yield each layer of a ``docker save`` archive with the digest of its bytes.

    The digests are computed: in some layouts the names in an archive are others.

    Args:
        stream: The archive, which is read once.
    """
    for _, content, is_layer in files_of(stream):
        if not is_layer:
            continue
        compressed = cast("io.BufferedReader", content).peek(2)[:2] == _GZIP
        plain = cast("IO[bytes]", gzip.GzipFile(fileobj=content)) if compressed else content
        hashed = _Hashed(plain)
        with tarfile.open(fileobj=cast("IO[bytes]", hashed), mode="r|", bufsize=1 << 16) as inner:
            entries = entries_of(inner)
        # tarfile stops at the end mark; what is behind it is in the digest, too.
        while hashed.read(1 << 20):
            pass
        yield StoredLayer(digest=f"sha256:{hashed.digest.hexdigest()}", entries=entries)


class _Hashed:
    """A stream whose bytes are hashed as they are read."""

    def __init__(self, content: IO[bytes]) -> None:
        self._content = content
        self.digest = hashlib.sha256()

    def read(self, size: int = -1, /) -> bytes:
        chunk = self._content.read(size)
        self.digest.update(chunk)
        return chunk


def files_of(stream: IO[bytes]) -> Iterator[tuple[str, IO[bytes], bool]]:
    """Yield each file of an archive: name, content, and whether it is a layer.

    The content has to be read before the next file is requested. A layer is recognised by its
    first bytes: a tar, a compressed one, or an empty one, which begins with zeros.
    """
    with tarfile.open(fileobj=stream, mode="r|") as outer:
        for member in outer:
            if not member.isreg():
                continue
            content = outer.extractfile(member)
            assert content is not None
            peeking = io.BufferedReader(_Raw(content), 1 << 16)
            head = peeking.peek(_BLOCK)[:_BLOCK]
            empty = member.size >= 2 * _BLOCK and len(head) == _BLOCK and not any(head)
            yield member.name, peeking, head[257:262] == b"ustar" or head[:2] == _GZIP or empty
    # tarfile stops at the end mark. The engine's padding after it must be read,
    # or the engine gets a broken pipe.
    while stream.read(1 << 16):
        pass


class _Raw(io.RawIOBase):
    """A member of a streamed archive as a raw file. tarfile's own object would
    seek, which a stream cannot.
    """

    def __init__(self, content: IO[bytes]) -> None:
        super().__init__()
        self._content = content

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        chunk = self._content.read(len(buffer))
        buffer[: len(chunk)] = chunk
        return len(chunk)
