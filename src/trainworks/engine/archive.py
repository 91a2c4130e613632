"""Write image archives in ``docker save`` form from a folder, and read them layer by layer, as streams."""

from __future__ import annotations

import hashlib
import io
import json
import os
import stat
import tarfile
import uuid
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Final

from trainworks.engine.protocol import Layer
from trainworks.errors import BuildError, OutputError
from trainworks.facts.rows import Architecture

_BLOCK: Final = 512
_EXTENDED: Final = "SCHILY.xattr."


def write_archive(
    rootfs: Path,
    destination: Path,
    *,
    name: str,
    environment: Mapping[str, str],
    command: tuple[str, ...],
    created: int,
    architecture: Architecture = "amd64",
) -> str:
    """Write an image of one layer from a root file system, byte for byte the same for the same files.

    The layer is written once, straight into the archive. Owners go in as numbers, names are sorted, and times after
    ``created`` are set to it, so that two bootstraps of one distribution give one image.

    Args:
        rootfs: A folder with the files of ``/``; sockets are left out.
        destination: The archive to write; replaced only when the new one is complete.
        command: The image's default command.
        created: Seconds since 1970, the time of the image and the latest time of a file.
        architecture: What its programs run on.

    Returns:
        The image's identifier, ``sha256:`` and the hash of its configuration.

    Raises:
        OutputError: The folder cannot be read or the archive not written.
    """
    partial = destination.with_name(f".{destination.name}.{uuid.uuid4().hex[:12]}")
    try:
        try:
            with partial.open("xb") as file:
                configuration = _configuration(environment, command, created, architecture)
                identifier = _write(rootfs, file, name=name, configuration=configuration, created=created)
            partial.replace(destination)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        where = error.filename or destination
        raise OutputError(f"cannot write {destination}: {where} ({error.strerror or error})") from error
    return identifier


def _write(rootfs: Path, file: IO[bytes], *, name: str, configuration: dict[str, Any], created: int) -> str:
    # The header with the layer's size comes before its bytes: write a blank one, and replace it at the end.
    file.write(bytes(_BLOCK))
    digesting = _Digesting(file)
    with tarfile.open(fileobj=digesting, mode="w|", format=tarfile.PAX_FORMAT) as layer:
        for member, source in _members(rootfs, created):
            if source is None:
                layer.addfile(member)
            else:
                with source.open("rb") as content:
                    layer.addfile(member, content)
    difference = digesting.hexadecimal
    file.write(bytes(-digesting.size % _BLOCK))
    layer_name = f"{difference}.tar"
    configuration["rootfs"] = {"type": "layers", "diff_ids": [f"sha256:{difference}"]}
    described = json.dumps(configuration, sort_keys=True, separators=(",", ":")).encode()
    identifier = hashlib.sha256(described).hexdigest()
    manifest = [{"Config": f"{identifier}.json", "RepoTags": [name], "Layers": [layer_name]}]
    with tarfile.open(fileobj=file, mode="w|", format=tarfile.GNU_FORMAT) as outer:
        for file_name, text in (
            (f"{identifier}.json", described),
            ("manifest.json", json.dumps(manifest, separators=(",", ":")).encode()),
        ):
            outer.addfile(_plain(file_name, len(text), created), io.BytesIO(text))
    file.seek(0)
    file.write(_plain(layer_name, digesting.size, created).tobuf(tarfile.GNU_FORMAT))
    return f"sha256:{identifier}"


def _plain(name: str, size: int, created: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size, member.mtime, member.mode = size, created, 0o644
    return member


def _configuration(
    environment: Mapping[str, str], command: tuple[str, ...], created: int, architecture: Architecture
) -> dict[str, Any]:
    moment = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "architecture": architecture,
        "os": "linux",
        "created": moment,
        "config": {"Env": [f"{key}={value}" for key, value in environment.items()], "Cmd": list(command)},
        "history": [{"created": moment, "created_by": "trainworks: root file system"}],
    }


def _members(rootfs: Path, created: int) -> Iterator[tuple[tarfile.TarInfo, Path | None]]:
    """Yield every entry below the folder, sorted, with the file whose bytes follow; hard links keep their link."""
    first: dict[tuple[int, int], str] = {}
    for path in _walk(rootfs):
        status = path.lstat()
        if stat.S_ISSOCK(status.st_mode):
            continue
        member = tarfile.TarInfo(str(path.relative_to(rootfs)) if path != rootfs else ".")
        member.mode = stat.S_IMODE(status.st_mode)
        member.uid, member.gid = status.st_uid, status.st_gid
        member.mtime = min(int(status.st_mtime), created)
        member.pax_headers = _extended_attributes(path)
        kind = stat.S_IFMT(status.st_mode)
        source = None
        if kind == stat.S_IFDIR:
            member.type = tarfile.DIRTYPE
        elif kind == stat.S_IFLNK:
            member.type, member.linkname = tarfile.SYMTYPE, str(path.readlink())
        elif kind == stat.S_IFREG:
            key = (status.st_dev, status.st_ino)
            if status.st_nlink > 1 and key in first:
                member.type, member.linkname = tarfile.LNKTYPE, first[key]
            else:
                first[key] = member.name
                member.size, source = status.st_size, path
        elif kind == stat.S_IFIFO:
            member.type = tarfile.FIFOTYPE
        else:
            member.type = tarfile.CHRTYPE if kind == stat.S_IFCHR else tarfile.BLKTYPE
            member.devmajor, member.devminor = os.major(status.st_rdev), os.minor(status.st_rdev)
        yield member, source


def _walk(folder: Path) -> Iterator[Path]:
    yield folder
    with os.scandir(folder) as entries:
        found = sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries)
    for name, is_folder in found:
        if is_folder:
            yield from _walk(folder / name)
        else:
            yield folder / name


def _extended_attributes(path: Path) -> dict[str, str]:
    """Return the extended attributes that a layer keeps: file capabilities only (``ping`` has one)."""
    try:
        names = os.listxattr(path, follow_symlinks=False)
        values = {
            name: os.getxattr(path, name, follow_symlinks=False) for name in names if name == "security.capability"
        }
    except (OSError, AttributeError):
        # A file system or kernel without extended attributes.
        return {}
    # PAX values are text to tarfile; surrogate escapes carry the bytes through.
    return {_EXTENDED + name: value.decode("utf-8", "surrogateescape") for name, value in values.items()}


class _Digesting(io.RawIOBase):
    """Writes bytes to a file, and counts and hashes them."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__()
        self._file = file
        self._digest = hashlib.sha256()
        self.size = 0

    @property
    def hexadecimal(self) -> str:
        return self._digest.hexdigest()

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        self._digest.update(content)
        self._file.write(content)
        self.size += len(content)
        return len(content)


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
    """Yield the layers of a ``docker save`` archive that is read as a stream, each once, in the archive's order.

    Both layouts are known: ``ID/layer.tar`` and ``HASH.tar`` of older engines, ``blobs/sha256/HASH`` of newer ones,
    where layers stand beside configurations, are recognised by their first bytes, and may be compressed.
    """
    for name, content, is_layer in files_of(stream):
        if is_layer:
            with tarfile.open(fileobj=content, mode="r|*", bufsize=1 << 16) as inner:
                yield Layer(name=_layer_name(name), archive=inner)


def files_of(stream: IO[bytes]) -> Iterator[tuple[str, IO[bytes], bool]]:
    """Yield each file of an archive: name, content, and whether it is a layer. Read it before the next one."""
    with tarfile.open(fileobj=stream, mode="r|") as outer:
        for member in outer:
            if not member.isreg():
                continue
            content = outer.extractfile(member)
            assert content is not None
            peeking = io.BufferedReader(_Raw(content), 1 << 16)
            head = peeking.peek(_BLOCK)[:_BLOCK]
            is_layer = head[257:262] == b"ustar" or head[:2] == b"\x1f\x8b" or _empty_tar(member, head)
            yield member.name, peeking, is_layer
    # tarfile stops at the end mark. The engine's padding after it must be read, or the engine gets a broken pipe.
    while stream.read(1 << 16):
        pass


def _layer_name(member: str) -> str:
    return member.removesuffix("/layer.tar").removesuffix(".tar").rpartition("/")[2]


def _empty_tar(member: tarfile.TarInfo, head: bytes) -> bool:
    return member.size >= 2 * _BLOCK and len(head) == _BLOCK and not any(head)


class _Raw(io.RawIOBase):
    """A member of a streamed archive as a raw file. tarfile's own object would seek, which a stream cannot."""

    def __init__(self, content: IO[bytes]) -> None:
        super().__init__()
        self._content = content

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        chunk = self._content.read(len(buffer))
        buffer[: len(chunk)] = chunk
        return len(chunk)
