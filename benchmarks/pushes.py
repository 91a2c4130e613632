#!/usr/bin/env python3
"""Measures a push of a new image to a registry on loopback, and of the same image to a second repository there.

`docker push` and `skopeo copy` push the same in the same run, each to a new registry. With `--image` that is an image
that docker has. Without, every push has an image of its own, so that no program remembers a layer; half of each layer
is random, the other half repeats. Needs docker, skopeo, oras and docker-registry (`make engines`).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from measure import ROOT, Figure, Section, clock_process, describe, load, machine, run, write
from trainworks.engine.docker import DockerEngine

TOOLS = ROOT / ".cache/peers/registry-tools/usr/bin"
REGISTRY = ROOT / ".cache/registry/usr/bin/docker-registry"
MOST = 1.1
"""How many times the better of both peers a push may take."""


@contextlib.contextmanager
def registry(folder: Path) -> Iterator[str]:
    """Run a registry with an empty folder; give its HOST:PORT."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        host = f"127.0.0.1:{free.getsockname()[1]}"
    configuration = folder / "registry.yml"
    configuration.write_text(
        f"version: 0.1\nlog: {{level: error}}\nhttp: {{addr: '{host}'}}\n"
        f"storage: {{filesystem: {{rootdirectory: '{folder / 'storage'}'}}}}\n",
        encoding="utf-8",
    )
    program = shutil.which("docker-registry") or str(REGISTRY)
    with subprocess.Popen(
        (program, "serve", str(configuration)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            deadline = time.monotonic() + 30
            while True:
                with contextlib.suppress(ConnectionRefusedError):
                    socket.create_connection(("127.0.0.1", int(host.partition(":")[2])), 5).close()
                    break
                if time.monotonic() > deadline:
                    raise SystemExit("docker-registry does not answer")
            yield host
        finally:
            process.kill()


@contextlib.contextmanager
def new_image(program: str, folder: Path, *, layers: int, megabytes: int) -> Iterator[str]:
    """Build an image that nothing has seen, in an empty folder; give its name."""
    folder.mkdir()
    name = f"trainworks-benchmark-{uuid.uuid4().hex[:12]}:1.0"
    lines = ["FROM scratch"]
    for number in range(layers):
        half = megabytes * 500_000
        (folder / f"layer{number}").write_bytes(os.urandom(half) + os.urandom(1000) * (half // 1000))
        lines.append(f"COPY layer{number} /")
    (folder / "Dockerfile").write_text("\n".join(lines) + "\n", encoding="utf-8")
    run((program, "build", "--quiet", "--tag", name, str(folder)), environment={**os.environ, "DOCKER_BUILDKIT": "1"})
    try:
        yield name
    finally:
        run((program, "rmi", name))


def commands(program: str, image: str, place: str) -> dict[str, tuple[str, ...]]:
    """Return the command of each program that pushes an image to a repository under the tag 1."""
    skopeo = ("skopeo", "--insecure-policy", "copy", "--quiet", "--dest-tls-verify=false")
    ours = (sys.executable, str(ROOT / "build.py"), "push", image, "--repository", place, "--tag", "1")
    return {
        "docker push": (program, "push", "--quiet", f"{place}:1"),
        "skopeo copy": (*skopeo, f"docker-daemon:{image}", f"docker://{place}:1"),
        "ours": (*ours, "--engine", "docker"),
    }


def push_twice(who: str, program: str, folder: Path, source: contextlib.AbstractContextManager[str]) -> list[float]:
    """Return the seconds of a push to a new registry, and to a second repository there."""
    environment = {
        **os.environ,
        "XDG_CACHE_HOME": str(folder / "cache"),
        "PATH": f"{TOOLS}{os.pathsep}{os.environ['PATH']}",
    }
    seconds = []
    with source as image, registry(folder) as host:
        for name in ("first", "second"):
            place = f"{host}/{name}"
            if who == "docker push":
                run((program, "tag", image, f"{place}:1"))
            seconds.append(clock_process(commands(program, image, place)[who], environment=environment))
            if who == "docker push":
                run((program, "rmi", f"{place}:1"))
    return seconds


def main() -> int:
    """Measure, print, and with `--write` record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="measurements of each (default: 3)")
    parser.add_argument("--image", help="an image that docker has; default: a new one, of layers of one size")
    parser.add_argument("--layers", type=int, default=4, metavar="N", help="layers of the image (default: 4)")
    parser.add_argument("--megabytes", type=int, default=50, metavar="N", help="size of each layer (default: 50)")
    parser.add_argument("--write", action="store_true", help="record the figures in benchmarks/results.json and .md")
    options = parser.parse_args()
    os.environ["PATH"] = f"{TOOLS}{os.pathsep}{os.environ['PATH']}"
    for name in ("skopeo", "oras"):
        if shutil.which(name) is None:
            raise SystemExit(f"there is no {name} program (`make engines`)")
    program = DockerEngine().probe().program
    facts = machine()
    times: dict[tuple[str, str], list[float]] = {}
    whose = ["docker push", "skopeo copy", "ours"]
    for turn in range(options.repeat):
        for who in whose[turn % 3 :] + whose[: turn % 3]:
            with tempfile.TemporaryDirectory(prefix="trainworks-benchmark-") as folder:
                context = Path(folder, "context")
                built = new_image(program, context, layers=options.layers, megabytes=options.megabytes)
                source = contextlib.nullcontext(options.image) if options.image else built
                first, second = push_twice(who, program, Path(folder), source)
            for when, seconds in (("cold", first), ("to a second repository", second), ("both", first + second)):
                times.setdefault((who, when), []).append(seconds)
    figures = []
    for when, promise in (("cold", MOST), ("to a second repository", 0), ("both", MOST)):
        better = min(whose[:2], key=lambda who: statistics.median(times[who, when]))
        peers = "; ".join(f"{who} {statistics.median(times[who, when]):.2f} s" for who in whose[:2])
        most = promise * statistics.median(times[better, when])
        figures.append(
            Figure(
                name=f"push, {when}",
                unit="s",
                ours=tuple(times["ours", when]),
                peer=tuple(times[better, when]),
                promise=most,
                note=peers,
            )
        )
    words = "A second repository is promised nothing by itself: Python starts longer than `docker push` takes there."
    what = options.image or f"an image of {options.layers} layers of {options.megabytes} MB"
    section = Section(
        title=f"Push of {what} from docker's store",
        machine={**facts, "load at the end": load()},
        figures=tuple(figures),
        peer="the better of `docker push` and `skopeo copy`, in each line.",
        details=(f"Promised is at most {MOST} times the peer. {words}",),
    )
    sys.stdout.write(describe(section))
    if options.write:
        write("pushes-image" if options.image else "pushes", section)
    return 0


if __name__ == "__main__":
    sys.exit(main())
