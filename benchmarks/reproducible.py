#!/usr/bin/env python3
"""Builds a target twice with every step run again, and says whether the layers are the same, and if not, in what.

Both builds have the same lock, base image and recipes; what is between them is time. buildah sets every time to a
constant, so the image's identifier has to be the same; docker 20.10 has no option for that, and a table says what
differs.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from io import StringIO

from measure import ROOT, Figure, Section, describe, machine, table, write
from trainworks.cli.build import build_image
from trainworks.cli.build_progress import BuildProgress
from trainworks.engine import create
from trainworks.engine.protocol import Engine, LayerArchive
from trainworks.facts.load import load
from trainworks.host.settings import read_host_settings
from trainworks.plan.model import ImagePlan, Request
from trainworks.plan.resolve import make_plan
from trainworks.render.dockerfile import render

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


@dataclass(frozen=True, kw_only=True)
class Build:
    """One build: its image's identifier, its layers, and how long it took in seconds."""

    identifier: str
    layers: tuple[Entries, ...]
    seconds: float


def build(engine: Engine, plan: ImagePlan, number: int) -> Build:
    """Build with every step run again, read the layers, and remove the image."""
    facts = load(ROOT)
    tagged = replace(plan, tags=(TAG.format(number=number),))
    settings = read_host_settings(os.environ)
    done = build_image(tagged, render(plan, facts), engine, settings, BuildProgress(StringIO()), no_cache=True)
    try:
        with engine.layers(tagged.tags[0]) as layers:
            read = tuple(read_layer(layer.archive) for layer in layers)
    finally:
        engine.remove(tagged.tags[0])
    return Build(identifier=done.image.identifier, layers=read, seconds=done.seconds)


def compare(one: Build, two: Build, steps: Sequence[str]) -> list[str]:
    """Return paragraphs: how many layers are the same, and a table of those that are not."""
    found = [differences(before, after) for before, after in zip(one.layers, two.layers, strict=True)]
    same = sum(not each for each in found)
    identifier = "the same" if one.identifier == two.identifier else "another"
    files = sum(len(layer) for layer in one.layers)
    text = f"{same} of {len(found)} layers are the same in every entry ({files:,} in all)"
    text += f"; the image's identifier is {identifier}."
    if same == len(found):
        return [text]
    rows = [("layer", "differs", "entries", "for example")]
    totals: Counter[str] = Counter()
    for step, each in zip(steps, found, strict=True):
        for what, paths in each.items():
            totals[what] += len(paths)
            rows.append((step, what, f"{len(paths):,}", ", ".join(f"`{path}`" for path in sorted(paths)[:EXAMPLES])))
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
    plan = make_plan(Request(framework=options.framework, cuda=options.cuda), load(ROOT))
    one, two = (build(engine, plan, number) for number in (1, 2))
    steps = [str(number) for number in range(1, len(one.layers) + 1)]
    section = Section(
        title=f"Rebuilding {plan.target.name} from its lock with {engine.name}",
        machine=machine(engine=f"{information.name} {information.version}"),
        figures=(
            Figure(
                name="build with every step run again",
                unit="s",
                ours=(one.seconds, two.seconds),
                note="base image and downloads were there",
            ),
        ),
        peer="none: the second build is compared with the first.",
        details=tuple(compare(one, two, steps)),
    )
    sys.stdout.write(describe(section))
    if options.write:
        write(f"reproducible-{engine.name}", section)
    return 0 if one.identifier == two.identifier or engine.name != "buildah" else 1


if __name__ == "__main__":
    sys.exit(main())
