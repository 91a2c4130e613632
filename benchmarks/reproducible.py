#!/usr/bin/env python3
"""Builds a target twice with every step run again, and says whether the layers are the same, and if not, in what.

Both builds have the same lock, base image and recipes; what is between them is time. Before each, the cache mounts
(of this benchmark alone) are emptied: everything is downloaded and compiled again. buildah, and Docker 26 with
containerd's store, set every time to a constant, so the image's identifier has to be the same. Docker 20.10 has no
option for that, so that its layers' digests differ with their files' times; what must be the same is everything else,
and a table says what differs.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import IO, Any

from builds import CACHE, empty_caches, freeze
from measure import Figure, Section, describe, machine, table, write
from trainworks.assemble.image import build_image
from trainworks.assemble.order import BuildOptions
from trainworks.assemble.session import BuildSession
from trainworks.assemble.target import image_spec
from trainworks.engine import create
from trainworks.engine.archive import files_of
from trainworks.engine.docker import DockerEngine
from trainworks.engine.protocol import Engine, LayerArchive
from trainworks.facts.load import load
from trainworks.plan.model import ImagePlan, Request
from trainworks.plan.resolve import make_plan
from trainworks.render.dockerfile import render
from trainworks.terminal.build_progress import BuildProgress

TAG = "trainworks-benchmark/reproducible:{number}"

EXAMPLES = 8
"""How many paths are named of each kind of difference."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A file, folder or link of a layer: everything that its archive says of it, the time by itself."""

    kind: bytes
    mode: int
    owner: tuple[int, int]
    link: str
    content: str
    time: float


Entries = Mapping[str, Entry]


@dataclass(frozen=True, kw_only=True)
class ReadLayer:
    """A layer: the hash of its archive, by which a configuration names it, and what is in it."""

    digest: str
    entries: Entries


def read_layer(archive: LayerArchive) -> dict[str, Entry]:
    """Return what is in a layer, in its order."""
    entries = {}
    for member in archive:
        digest = hashlib.sha256()
        if member.isreg() and (stream := archive.extractfile(member)) is not None:
            with stream:
                while block := stream.read(1 << 20):
                    digest.update(block)
        entries[member.name] = Entry(
            kind=member.type,
            mode=member.mode,
            owner=(member.uid, member.gid),
            link=member.linkname,
            content=digest.hexdigest(),
            time=member.mtime,
        )
    return entries


def differences(one: Entries, two: Entries) -> dict[str, list[str]]:
    """Return how two layers differ: what differs to the paths; nothing where they are the same in every respect."""
    found: dict[str, list[str]] = {}
    for path in {**one, **two}:
        before, after = one.get(path), two.get(path)
        if before == after:
            continue
        if before is None or after is None:
            what = "only in one"
        elif replace(before, time=0) == replace(after, time=0):
            what = "time only"
        elif before.content != after.content:
            what = "content"
        else:
            what = "rights, owner or kind"
        found.setdefault(what, []).append(path)
    if not found and list(one) != list(two):
        found["order"] = []
    return found


class Hashing(io.RawIOBase):
    """Passes on what is read of a stream, and hashes it."""

    def __init__(self, stream: IO[bytes]) -> None:
        """Begin at the stream's place."""
        super().__init__()
        self._stream = stream
        self._digest = hashlib.sha256()

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read as much as comes at once."""
        content = self._stream.read(len(buffer))
        buffer[: len(content)] = content
        self._digest.update(content)
        return len(content)

    def finish(self) -> str:
        """Read to the end, and return the hash."""
        while self.read(1 << 20):
            pass
        return self._digest.hexdigest()


def read_image(engine: Engine, reference: str) -> tuple[ReadLayer, ...]:
    """Return every layer of an image, the lowest first, as the engine itself packs it."""
    found: dict[str, ReadLayer] = {}
    manifest = b""
    with engine.archive(reference) as stream:
        for name, content, is_layer in files_of(stream):
            if is_layer:
                hashing = Hashing(content)
                with tarfile.open(fileobj=hashing, mode="r|*") as archive:
                    entries = read_layer(archive)
                found[name] = ReadLayer(digest=hashing.finish(), entries=entries)
            elif name == "manifest.json":
                manifest = content.read()
    return tuple(found[name] for name in json.loads(manifest)[0]["Layers"])


@dataclass(frozen=True, kw_only=True)
class Build:
    """One build: its image's identifier, its layers, and how long it took in seconds."""

    identifier: str
    layers: tuple[ReadLayer, ...]
    seconds: float


def build(root: Path, engine: Engine, plan: ImagePlan, number: int) -> Build:
    """Build with every step run again and nothing in the cache mounts, read the layers, and remove the image."""
    facts = load(root)
    rendering = render(plan, facts)
    caches = sorted({found["id"] for found in CACHE.finditer(rendering.dockerfile)})
    tagged = replace(plan, tags=(TAG.format(number=number),))
    empty_caches(engine, plan, caches)
    try:
        spec = image_spec(tagged, rendering, BuildSession(root=root, facts=facts))
        options = BuildOptions(until="build", no_cache=True)
        done = build_image(spec, engine, options, BuildProgress(StringIO()))
        layers = read_image(engine, tagged.tags[0])
    finally:
        engine.remove(tagged.tags[0])
        empty_caches(engine, plan, caches)
    return Build(identifier=done.image.identifier, layers=layers, seconds=done.seconds)


def compare(one: Build, two: Build, found: Sequence[Mapping[str, Sequence[str]]]) -> list[str]:
    """Return paragraphs: how many layers are the same, and a table of how the others differ."""
    same = sum(before.digest == after.digest for before, after in zip(one.layers, two.layers, strict=True))
    but_times = sum(not each.keys() - {"time only"} for each in found)
    identifier = "the same" if one.identifier == two.identifier else "another"
    files = sum(len(layer.entries) for layer in one.layers)
    text = (
        f"{same} of {len(found)} layers have the same digest; {but_times} of {len(found)} are the same in every entry "
    )
    text += f"but for times ({files:,} entries in all); the image's identifier is {identifier}."
    rows = [("layer", "differs", "entries", "for example")]
    totals: Counter[str] = Counter()
    for number, each in enumerate(found, start=1):
        for what, paths in each.items():
            totals[what] += len(paths)
            examples = ", ".join(f"`{path}`" for path in sorted(paths)[: 1 if what == "time only" else EXAMPLES])
            rows.append((str(number), what, f"{len(paths):,}", examples))
    if not totals:
        return [text]
    summed = ", ".join(f"{what}: {count:,}" for what, count in totals.most_common())
    return [f"{text} Entries that differ: {summed}.", table(rows)]


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="buildah", help="default: buildah")
    parser.add_argument("--framework", default="pytorch")
    parser.add_argument("--cuda", default="cpu")
    parser.add_argument("--write", action="store_true", help="record the result in results.md")
    options = parser.parse_args()
    engine = create(options.engine)
    information = engine.probe()
    with tempfile.TemporaryDirectory(prefix="trainworks-benchmark-") as name:
        root = Path(name)
        freeze(root)
        plan = make_plan(Request(framework=options.framework, cuda=options.cuda), load(root))
        one, two = (build(root, engine, plan, number) for number in (1, 2))
    found = [differences(before.entries, after.entries) for before, after in zip(one.layers, two.layers, strict=True)]
    section = Section(
        title=f"Rebuilding {plan.target.name} from its lock with {engine.name}",
        machine=machine(engine=f"{information.name} {information.version}"),
        figures=(
            Figure(
                name="build with every step run again",
                unit="s",
                ours=(one.seconds, two.seconds),
                note="cache mounts were empty; base image and this machine's own wheels were there",
            ),
        ),
        peer="none: the second build is compared with the first.",
        details=tuple(compare(one, two, found)),
    )
    sys.stdout.write(describe(section))
    if options.write:
        write(f"reproducible-{engine.name}", section)
    if engine.name == "buildah" or (isinstance(engine, DockerEngine) and engine.sets_times()):
        return 0 if one.identifier == two.identifier else 1
    return 1 if any(each.keys() - {"time only"} for each in found) else 0


if __name__ == "__main__":
    sys.exit(main())
