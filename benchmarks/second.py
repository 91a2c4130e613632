#!/usr/bin/env python3
"""Measures what a registry gets when a second target is pushed after a first one: its bytes beside its own wheels.

Both images are of this machine's Docker, built by `build.py` from this checkout. They are pushed by `docker push`, one
after the other, to a registry on loopback that has nothing yet. Its storage says how many bytes each push added, and
the locks say which wheels only the second target has.

Needs Docker with both images, and docker-registry (Debian) on PATH, in .cache/registry or by an option.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from lazy import answers, process
from measure import ROOT, Figure, Section, describe, load, machine, run, table, write
from trainworks.facts.load import load as load_facts
from trainworks.facts.rows import LockedPackage
from trainworks.plan.resolve import make_plan
from trainworks.plan.select import request_for

sys.path.insert(0, str(ROOT / "tests"))

from ports import free_port

PROMISE = 1.02
"""The most that a second target may send, as a share of the wheels that only it has."""

LISTED = 1_000_000
"""Bytes from which a layer has a line of its own in the table."""


@contextmanager
def registry(folder: Path, program: str) -> Iterator[str]:
    """Have a registry on loopback for the time of the block, and return its address.

    Raises:
        SystemExit: It ended by itself.
    """
    port = free_port()
    configuration = folder / "registry.yml"
    content = {
        "version": 0.1,
        "log": {"level": "error", "accesslog": {"disabled": True}},
        "http": {"addr": f"127.0.0.1:{port}", "secret": "of the benchmark"},
        "storage": {"filesystem": {"rootdirectory": str(folder / "storage")}},
    }
    configuration.write_text(json.dumps(content), encoding="utf-8")  # JSON is YAML
    command = [program, "serve", str(configuration)]
    with process(command, folder / "registry.log", lambda: answers(("127.0.0.1", port))):
        yield f"127.0.0.1:{port}"


def stored(folder: Path) -> int:
    """Return the bytes of everything that a registry has, each blob once."""
    return sum(path.stat().st_size for path in (folder / "storage").rglob("data"))


def push(image: str, target: str) -> None:
    """Push an image of this machine's Docker."""
    run(("docker", "tag", image, target))
    try:
        run(("docker", "push", "--quiet", target))
    finally:
        run(("docker", "rmi", "--no-prune", target))


def layers(address: str, name: str) -> dict[str, tuple[int, str]]:
    """Return the layers of a pushed image: digest to the bytes, and the command that made it."""
    base = f"http://{address}/v2/{name}"
    accept = {"Accept": "application/vnd.docker.distribution.manifest.v2+json"}
    with urllib.request.urlopen(urllib.request.Request(f"{base}/manifests/1", headers=accept), timeout=60) as answer:
        manifest = json.load(answer)
    with urllib.request.urlopen(f"{base}/blobs/{manifest['config']['digest']}", timeout=60) as answer:
        history = json.load(answer)["history"]
    commands = [each.get("created_by", "") for each in history if not each.get("empty_layer")]
    return {
        layer["digest"]: (layer["size"], command) for layer, command in zip(manifest["layers"], commands, strict=True)
    }


def wheels(name: str) -> Mapping[str, LockedPackage]:
    """Return the wheels that are in a target's image, by hash.

    Raises:
        SystemExit: There is no such target.
    """
    facts = load_facts(ROOT)
    for row in facts.targets:
        if facts.name_of(row) == name:
            plan = make_plan(request_for(row, facts), facts)
            return {package.sha256: package for step in plan.steps if step.in_image for package in step.python}
    raise SystemExit(f"no target has the name {name}")


def image_of(name: str) -> str:
    """Return the reference of a target's image in this machine's Docker."""
    framework, tag = name.split("-", 1)
    return f"trainworks/{framework}-training:{tag}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", help="a target, such as `build.py --list` names it")
    parser.add_argument("second", help="another target")
    parser.add_argument("--registry", help="docker-registry's program")
    parser.add_argument("--folder", type=Path, help="where the registry may store both images for a while")
    parser.add_argument("--write", action="store_true", help="record the result in benchmarks/results.md")
    options = parser.parse_args()
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), str(ROOT / ".cache/registry/usr/bin")))
    program = shutil.which(options.registry or "docker-registry", path=path)
    if not program:
        raise SystemExit("NOT MEASURED: a push needs docker-registry (tools/set-up-engine all)")
    facts = machine(images=f"{options.first}, {options.second}")
    has, other = wheels(options.first), wheels(options.second)
    own = sum(package.size for package in other.values() if package.sha256 not in has)
    with tempfile.TemporaryDirectory(prefix="second-", dir=options.folder) as name:
        folder = Path(name)
        with registry(folder, program) as address:
            push(image_of(options.first), f"{address}/first:1")
            first = stored(folder)
            # Another repository of the registry: Docker asks it to mount what the first one has.
            push(image_of(options.second), f"{address}/second:1")
            second = stored(folder) - first
            before, after = layers(address, "first"), layers(address, "second")
    sent = {digest: layer for digest, layer in after.items() if digest not in before}
    facts["load at the end"] = load()
    ratio = second / own
    rows = [("layer that was sent", "MB")]
    rows += [(f"`{command[:90]}`", f"{size / 1e6:,.1f}") for size, command in sent.values() if size >= LISTED]
    small = [size for size, _ in sent.values() if size < LISTED]
    rows.append((f"{len(small)} smaller ones", f"{sum(small) / 1e6:,.1f}"))
    text = f"The first push sent {first / 1e6:,.0f} MB. Of the second image's {len(after)} layers, which have "
    text += f"{sum(size for size, _ in after.values()) / 1e6:,.0f} MB, {len(after) - len(sent)} were there already."
    verdict = "kept" if ratio <= PROMISE else "BROKEN"
    section = Section(
        title=f"Push of {options.second} after {options.first}",
        machine=facts,
        figures=(
            Figure(
                name="bytes that the registry got",
                unit="MB",
                ours=(second / 1e6,),
                peer=(own / 1e6,),
                note=f"{ratio:.3f} of the wheels that only this target has, promised at most {PROMISE}: {verdict}",
            ),
        ),
        peer="the wheels of the second target that the first one lacks, as the package index has them.",
        details=(text, table(rows)),
    )
    print(describe(section))
    if options.write:
        write(f"second-{options.second}", section)


if __name__ == "__main__":
    main()
