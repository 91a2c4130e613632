#!/usr/bin/env python3
"""Measures builds beside a plain Dockerfile of the same content: cold, with
nothing changed, after a launcher change.

What is cold in a cold build: no step is taken from the layer cache (`--no-cache`), and the cache
mounts of our recipes (apt's and uv's files) are of this benchmark alone and are emptied before. The
peer has none. What stays warm
for both: the base image is in the engine's store, local wheel files are on this machine's disk, and
a package mirror may remember what was asked before; ours goes first, so what the mirror then
remembers helps the peer.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import sys
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from measure import (
    ROOT,
    Figure,
    Section,
    clock,
    clock_process,
    describe,
    load,
    machine,
    run,
    table,
    write,
)
from peer import WORDS, Peer, write_peer
from trainworks.build.base import ensure_base
from trainworks.engine import choose
from trainworks.engine.protocol import BuildRequest, Engine, StepEvent
from trainworks.engine.temporary_folders import private_folder
from trainworks.facts import load as facts_files
from trainworks.facts.data import FOLDERS
from trainworks.facts.rows import Facts
from trainworks.host.settings import read_host_settings
from trainworks.plan.model import ImagePlan, Request
from trainworks.plan.own_base import own_base
from trainworks.plan.resolve import make_plan
from trainworks.render.dockerfile import render
from trainworks.terminal.build_progress import BuildProgress

FROZEN = ("src", *FOLDERS)
"""What a build reads of a checkout.

A copy of it is measured, so that an edit meanwhile changes nothing.
"""

OWN_CACHES = "id=trainworks-benchmark-"
CACHE = re.compile(r"--mount=type=cache,id=(?P<id>[^,\s]+),target=(?P<target>[^,\s]+)")

QUICK_REPEATS = 9
"""How often what takes less than a second is measured."""

PROMISED = {"noop": 5.0, "launcher": 20.0, "render all": 2.0, "plan": 0.5}
"""Seconds; the image's size is promised by its row."""

RENDER_ALL = """
import sys
from pathlib import Path

sys.path.insert(0, sys.argv[1] + "/src")
from trainworks.facts.load import load
from trainworks.plan.model import Request
from trainworks.plan.resolve import make_plan
from trainworks.render.dockerfile import render

facts = load(Path(sys.argv[1]))
for row in facts.targets:
    base = facts.base_by_name[row.base]
    request = Request(
        framework=row.framework, cuda=row.cuda, version=row.version, python=base.python
    )
    render(make_plan(request, facts), facts)
"""

BYTECODE = "find / -xdev -name '*.pyc' -printf '%s\\n' | awk '{ sum += $1 } END { print sum + 0 }'"


@dataclass(kw_only=True)
class Bench:
    """One run: two images that are built again and again.

    Attributes:
        made: Identifiers of all images that this run made, to be removed at the end.
    """

    engine: Engine
    root: Path
    plan: ImagePlan
    peer: Peer
    tag: str
    caches: dict[str, str]
    made: set[str] = field(default_factory=set)
    number: itertools.count[int] = field(default_factory=itertools.count)
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def ours(self, steps: str = "cached") -> tuple[float, dict[str, Any]]:
        """Build ours as a process of its own.

        Seconds from its start to its end, and what it says of the image.
        """
        command = (
            *(
                sys.executable,
                str(ROOT / "benchmarks" / "ours.py"),
                str(self.root),
                self.engine.name,
                self.tag,
                steps,
            ),
            *(self.plan.target.framework, self.plan.target.cuda),
        )
        output: list[str] = []
        seconds = clock(lambda: output.append(run(command)))
        report: dict[str, Any] = json.loads(output[0])
        self.made.add(report["identifier"])
        return seconds, report

    def theirs(self, *, no_cache: bool = False) -> float:
        """Build the peer; seconds that the engine took."""
        images = []
        seconds = clock(
            lambda: images.append(self.engine.build(self.peer.request(no_cache=no_cache), ignore))
        )
        self.made.add(images[0].identifier)
        return seconds

    def change_launcher(self) -> None:
        """Add a line, never seen before, to the same file of both launchers."""
        line = f"# {self.mark} {next(self.number)}\n"
        for file in (
            self.root / "launcher" / "trainworks_launcher" / "contract" / "names.py",
            self.peer.launcher,
        ):
            with file.open("a", encoding="utf-8") as stream:
                stream.write(line)

    def empty_caches(self) -> None:
        """Empty the cache mounts of this benchmark, which no other build uses."""
        empty_caches(self.engine, self.plan, self.caches)

    def clean(self) -> None:
        """Remove the images of this run.

        What the engine keeps of their steps is its own to collect.
        """
        for name in (self.tag, self.peer.tag, *sorted(self.made)):
            self.engine.remove(name)


def ignore(_event: StepEvent) -> None:
    """Follow a build with no interest in its events."""


def say(text: str) -> None:
    """Write a line for people."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def freeze(folder: Path, *, own_caches: bool = True) -> None:
    """Copy what a build reads of the checkout; by default with cache mounts of its own."""
    skipped = shutil.ignore_patterns("__pycache__", "*.egg-info", ".ruff_cache", ".mypy_cache")
    for name in FROZEN:
        shutil.copytree(ROOT / name, folder / name, ignore=skipped)
    shutil.copy2(ROOT / "build.py", folder / "build.py")
    if not own_caches:
        return
    changed = 0
    for path in (folder / "templates").rglob("*.j2"):
        text = path.read_text(encoding="utf-8")
        changed += text.count("id=trainworks-")
        path.write_text(text.replace("id=trainworks-", OWN_CACHES), encoding="utf-8")
    if not changed:
        raise SystemExit(
            "the recipes have no cache mounts of the name"
            " `trainworks-...` any more: adapt the benchmark"
        )


def empty_caches(engine: Engine, plan: ImagePlan, names: Iterable[str]) -> None:
    """Empty cache mounts, by a build on the plan's base image."""
    with private_folder() as folder:
        mounts = " ".join(
            f"--mount=type=cache,id={name},target=/caches/{number}"
            for number, name in enumerate(names)
        )
        dockerfile = f"FROM {plan.image}\nRUN {mounts} find /caches -mindepth 2 -delete\n"
        (folder / "Dockerfile").write_text(dockerfile, encoding="utf-8")
        tag = "trainworks-benchmark/empty:latest"
        engine.build(BuildRequest(name="empty", context=folder, tags=(tag,), no_cache=True), ignore)
        engine.remove(tag)


def measure_cold(bench: Bench) -> list[Figure]:
    """Measure builds in which every step runs."""
    say("emptying this benchmark's cache mounts")
    bench.empty_caches()
    before = load()
    cold, _ = bench.ours("all")
    say(f"cold: ours {cold:.1f} s")
    between = load()
    theirs = bench.theirs(no_cache=True)
    say(f"cold: peer {theirs:.1f} s")
    again_load = load()
    again, _ = bench.ours("all")
    say(f"every step again, files kept: ours {again:.1f} s")
    return [
        Figure(
            name="cold build",
            unit="s",
            ours=(cold,),
            peer=(theirs,),
            note=(
                f"measured once; load when ours began {before}, when the peer began {between}. Only"
                " the base image was there; no layer, and nothing in the cache mounts"
            ),
        ),
        Figure(
            name="every step again, downloads kept",
            unit="s",
            ours=(again,),
            peer=(theirs,),
            note=(
                f"measured once; load when it began {again_load}."
                " Our cache mounts are as the cold build left them;"
                " the peer keeps no downloads, its figure is that of the cold build"
            ),
        ),
    ]


def measure_warm(bench: Bench, repeat: int) -> list[Figure]:
    """Measure builds with nothing changed, and with one line of the launcher
    changed, ours and the peer in turns.
    """
    noop: tuple[list[float], list[float]] = ([], [])
    change: tuple[list[float], list[float]] = ([], [])
    ran: set[str] = set()
    for _ in range(repeat):
        seconds, report = bench.ours()
        if report["ran"]:
            raise SystemExit(f"nothing was changed and steps ran: {', '.join(report['ran'])}")
        noop[0].append(seconds)
        noop[1].append(bench.theirs())
        bench.change_launcher()
        seconds, report = bench.ours()
        ran |= set(report["ran"])
        change[0].append(seconds)
        change[1].append(bench.theirs())
        say(
            f"nothing changed: {noop[0][-1]:.2f} / {noop[1][-1]:.2f} s; launcher: {seconds:.2f} /"
            f" {change[1][-1]:.2f} s"
        )
    return [
        Figure(
            name="build with nothing changed",
            unit="s",
            ours=tuple(noop[0]),
            peer=tuple(noop[1]),
            promise=PROMISED["noop"],
            note=(
                "ours from the start of our process, which plans, renders and asks the engine; the"
                " peer is the engine's own build command alone"
            ),
        ),
        Figure(
            name="build with one line of the launcher changed",
            unit="s",
            ours=tuple(change[0]),
            peer=tuple(change[1]),
            promise=PROMISED["launcher"],
            note=(
                f"components of which a step ran: {', '.join(sorted(ran))}. The peer's `pip"
                " install` of the launcher fetches setuptools each time, as pip does"
            ),
        ),
    ]


def measure_quick(bench: Bench) -> list[Figure]:
    """Measure planning and rendering, each from the start of a process to its end."""
    target = ("--framework", bench.plan.target.framework, "--cuda", bench.plan.target.cuda)
    build = (sys.executable, str(bench.root / "build.py"), *target)
    commands = {
        "plan": (*build, "--until", "plan"),
        "render": (*build, "--until", "render"),
        "render all": (sys.executable, "-c", RENDER_ALL, str(bench.root)),
        "Python": (sys.executable, "-c", "pass"),
    }
    times: dict[str, list[float]] = {name: [] for name in commands}
    for command in commands.values():
        run(command)
    for _ in range(QUICK_REPEATS):
        for name, command in commands.items():
            times[name].append(clock_process(command))
    count = len(list((bench.root / "images" / "lock").glob("*.toml")))
    names = {
        "plan": "plan, from process start",
        "render": "plan and render, from process start",
        "render all": f"render all {count} targets, from process start",
        "Python": "(Python starting and ending, for comparison)",
    }
    return [
        Figure(name=names[name], unit="s", ours=tuple(values), promise=PROMISED.get(name, 0))
        for name, values in times.items()
    ]


def same_content(bench: Bench) -> int:
    """See that both images have the same Python files, and the peer works.

    How many packages they share.

    Raises:
        SystemExit: They differ, so that nothing measured would compare.
    """
    packages = {}
    for reference in (bench.tag, bench.peer.tag):
        with bench.engine.container(reference) as container:
            done = container.run(
                ("/opt/venv/bin/python", "-m", "pip", "list", "--format", "json", "--no-index")
            )
            trains = container.run(("train", "--version"))
            imports = container.run(
                ("/opt/venv/bin/python", "-c", "import torch, mpi4py.MPI, sagemaker_training")
            )
        for completed in (done, trains, imports):
            if completed.status != 0:
                raise SystemExit(f"{reference} does not work:\n{completed.output[-3000:]}")
        found = json.loads(done.output.strip().splitlines()[0])
        packages[reference] = {
            (canonicalize_name(entry["name"]), entry["version"]) for entry in found
        }
    ours, theirs = packages[bench.tag], packages[bench.peer.tag]
    own = {entry for entry in theirs if entry[0] in ("setuptools", "trainworks-launcher", "wheel")}
    if ours - theirs or theirs - ours - own:
        raise SystemExit(f"the images differ: {sorted((ours ^ theirs) - own)}")
    return len(ours)


def measure_size(bench: Bench) -> tuple[list[Figure], list[str]]:
    """Return the images' sizes, and their layers."""
    sizes, bytecode = [], []
    parts = []
    for title, reference in (("ours", bench.tag), ("the peer", bench.peer.tag)):
        image = bench.engine.inspect(reference)
        assert image is not None
        sizes.append(image.size / 1e6)
        with bench.engine.container(reference) as container:
            bytecode.append(int(container.run(("/bin/sh", "-c", BYTECODE)).output) / 1e6)
        rows = [("layer of " + title, "MB")]
        rows += [
            (instruction(entry.created_by), f"{entry.size / 1e6:,.1f}")
            for entry in bench.engine.history(reference)
            if entry.size
        ]
        parts.append(table(rows))
    figures = [
        Figure(
            name="size of the image, uncompressed",
            unit="MB",
            ours=(sizes[0],),
            peer=(sizes[1],),
            promise=bench.plan.budget_megabytes,
            note=(
                f"of which Python bytecode {bytecode[0]:.0f} MB"
                f" in ours and {bytecode[1]:.0f} MB in the peer's"
            ),
        ),
        Figure(
            name="size without bytecode",
            unit="MB",
            ours=(sizes[0] - bytecode[0],),
            peer=(sizes[1] - bytecode[1],),
        ),
    ]
    return figures, parts


def instruction(text: str) -> str:
    """Return the words of a history entry that tell it from the others."""
    plain = re.sub(r"--mount=\S+|# buildkit|/bin/sh -c|#\(nop\)|\|\d+( \w+=\S*)*|\\", " ", text)
    plain = " ".join(plain.replace("|", "/").replace("`", "'").split())
    return f"`{plain[:76] + '...' if len(plain) > 79 else plain or 'base image'}`"


def prepare(options: argparse.Namespace, engine: Engine, folder: Path) -> Bench:
    """Make everything that is to be built, before any clock runs; the base image too."""
    root = folder / "root"
    root.mkdir()
    freeze(root)
    facts: Facts = facts_files.load(root)
    plan = make_plan(Request(framework="pytorch", cuda=options.cuda), facts)
    rendering = render(plan, facts)
    settings = read_host_settings(os.environ)
    base = own_base(plan)
    assert base is not None
    ensure_base(base, engine, settings, BuildProgress())
    manifest = next(file.content for file in rendering.files if file.path == "image.json")
    peer_folder = folder / "peer"
    peer_folder.mkdir()
    peer = write_peer(
        plan,
        manifest,
        root / "launcher",
        settings,
        peer_folder,
        f"trainworks-benchmark/peer:{plan.target.name}",
    )
    caches = {found["id"]: found["target"] for found in CACHE.finditer(rendering.dockerfile)}
    return Bench(
        engine=engine,
        root=root,
        plan=plan,
        peer=peer,
        tag=f"trainworks-benchmark/ours:{plan.target.name}",
        caches=caches,
    )


def benchmark(options: argparse.Namespace) -> tuple[str, Section]:
    """Measure everything; the section's name and content."""
    engine = choose(options.engine)
    information = engine.probe()
    facts = machine(engine=f"{information.name} {information.version}")
    with private_folder() as folder:
        bench = prepare(options, engine, folder)
        try:
            figures = measure_quick(bench)
            cold = [] if options.skip_cold else measure_cold(bench)
            if options.skip_cold:
                say("building both images once")
                bench.ours()
                bench.theirs()
            shared = same_content(bench)
            say(f"both images have the same {shared} Python packages")
            sizes, layers = measure_size(bench)
            warm = measure_warm(bench, options.repeat)
        finally:
            if not options.keep:
                bench.clean()
                bench.empty_caches()
    section = Section(
        title=f"Builds of {bench.plan.target.name} with {information.name}",
        machine={**facts, "load at the end": load()},
        figures=(*cold, *warm, *sizes, *figures),
        peer=WORDS,
        details=(
            f"Both images have the same {shared} Python packages in /opt/venv, which was compared.",
            *layers,
        ),
    )
    return f"builds {bench.plan.target.name} {information.name}", section


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cuda", default="cpu", metavar="CELL", help="default: cpu")
    parser.add_argument(
        "--engine", default="docker", metavar="NAME", help="docker (default) or buildah"
    )
    parser.add_argument(
        "--repeat", type=int, default=3, metavar="N", help="of the warm builds (default: 3)"
    )
    parser.add_argument("--skip-cold", action="store_true", help="measure no cold build")
    parser.add_argument(
        "--keep", action="store_true", help="leave the images in the engine's store"
    )
    parser.add_argument(
        "--write", action="store_true", help="record in benchmarks/results.json and results.md"
    )
    options = parser.parse_args()
    if options.repeat < 1:
        parser.error("--repeat must be at least 1")
    name, section = benchmark(options)
    sys.stdout.write(describe(section))
    if options.write:
        write(name, section)
    return 0


if __name__ == "__main__":
    sys.exit(main())
