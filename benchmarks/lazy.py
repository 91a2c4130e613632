#!/usr/bin/env python3
"""Measures how long a host waits for the first optimizer step: an image pulled lazily beside the same image as a whole.

The image of this machine's Docker is pushed to a registry in a network namespace of its own. Between it and this
machine is a link whose speed `tc` bounds. ctr-remote makes an eStargz image of it: it runs one optimizer step and puts
what that read first in each layer. soci writes an index of the image as it is, and pushes that beside it. Then all ways
take turns, each with a new containerd that has nothing: pulled by stargz-snapshotter or SOCI's snapshotter, which fetch
what is read when it is read, and pulled and unpacked as a whole. The clock runs from the pull to the end of the first
step in a container. What crossed the link until then is counted by the kernel.

Needs root, Docker with the image, skopeo, containerd, runc, iproute2, openssl, /dev/fuse, and on PATH or by an option:
docker-registry (Debian), ctr-remote (Debian: stargz-snapshotter), containerd-stargz-grpc (a release of
stargz-snapshotter; Debian's package does not have it). SOCI is measured with soci and soci-snapshotter-grpc (Debian 13:
soci-snapshotter), and left out without them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import ROOT, Figure, Section, describe, load, machine, run, table, write

SPACE = "lazy-registry"
"""Name of the registry's network namespace; its links are `lazy0`, on this machine, and `lazy1`."""

HERE, THERE, PORT = "10.213.7.1", "10.213.7.2", 5000
REGISTRY = f"{THERE}:{PORT}"

STEP = (
    "import torch; layer = torch.nn.Linear(64, 64); optimizer = torch.optim.AdamW(layer.parameters()); "
    "layer(torch.ones(8, 64)).sum().backward(); optimizer.step(); print('first step', flush=True)"
)
"""The script: what every job of PyTorch does before anything else."""

PROMISE = 0.25
"""The most that lazy pulling may take, as a share of the whole pull."""

WHOLE = "overlayfs"
"""containerd's own snapshotter: it unpacks all layers before a container starts."""

SOCI_HOME = Path("/var/lib/soci-snapshotter-grpc")
"""Where soci keeps its indexes; it has no option for that."""

ON_DEMAND = "noprefetch = true\nno_background_fetch = true"
"""Settings of stargz-snapshotter: what is read is fetched, and nothing else."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to get an image: its name, which image, by which snapshotter, and the settings of that one."""

    name: str
    image: str
    snapshotter: str = WHOLE
    settings: str = ""

    @property
    def lazy(self) -> bool:
        """Whether the container starts before the image is there."""
        return self.snapshotter != WHOLE


PLAIN, ESTARGZ = f"{REGISTRY}/lazy:plain", f"{REGISTRY}/lazy:estargz"
WHOLLY = {ESTARGZ: "as a whole", PLAIN: "as a whole, as it was pushed"}
"""The whole pull of each image, which lazy pulling of that image is compared with."""

WAYS = (
    Way(name="lazily", image=ESTARGZ, snapshotter="stargz"),
    Way(name="lazily, only what is read", image=ESTARGZ, snapshotter="stargz", settings=ON_DEMAND),
    Way(name="lazily, by SOCI's index", image=PLAIN, snapshotter="soci"),
    *(Way(name=name, image=image) for image, name in WHOLLY.items()),
)


@dataclass(frozen=True, kw_only=True)
class Programs:
    """Paths of the programs that not every machine has; those of SOCI are empty if it is not there."""

    registry: str
    ctr: str
    snapshotter: str
    soci: str = ""
    soci_snapshotter: str = ""


@dataclass
class Start:
    """What one host waited for."""

    seconds: float
    pull: float
    megabytes: float


def find(options: argparse.Namespace) -> Programs:
    """Return the programs.

    Raises:
        SystemExit: Something that is needed is missing; says what.
    """
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), str(ROOT / ".cache/registry/usr/bin"), "/usr/sbin"))
    missing = [
        name for name in ("docker", "containerd", "runc", "ip", "tc", "openssl") if not shutil.which(name, path=path)
    ]
    found = {}
    for name, given in (
        ("docker-registry", options.registry),
        ("ctr-remote", options.ctr_remote),
        ("containerd-stargz-grpc", options.snapshotter),
    ):
        found[name] = shutil.which(given or name, path=path) or ""
        missing += [] if found[name] else [name]
    if not Path("/dev/fuse").exists():
        missing.append("/dev/fuse")
    if os.geteuid() != 0:
        missing.append("root")
    if missing:
        raise SystemExit(f"NOT MEASURED: lazy pulling needs {', '.join(missing)}")
    soci = [shutil.which(name, path=path) or "" for name in (options.soci, f"{options.soci}-snapshotter-grpc")]
    return Programs(
        registry=found["docker-registry"],
        ctr=found["ctr-remote"],
        snapshotter=found["containerd-stargz-grpc"],
        soci=soci[0] if all(soci) else "",
        soci_snapshotter=soci[1] if all(soci) else "",
    )


@contextlib.contextmanager
def process(command: list[str], log: Path, ready: Any) -> Iterator[None]:
    """Run a daemon until the block ends; ``ready`` says whether it answers.

    Raises:
        SystemExit: It ended by itself; says with what words.
    """
    with log.open("ab") as stream, subprocess.Popen(command, stdout=stream, stderr=stream) as daemon:
        try:
            while not ready():
                if daemon.poll() is not None:
                    raise SystemExit(f"{command[0]} ended: {log.read_text(encoding='utf-8')[-2000:]}")
                time.sleep(0.02)  # another program's start has no event to wait for
            yield
        finally:
            daemon.send_signal(signal.SIGTERM)
            daemon.wait(120)


def answers(address: tuple[str, int]) -> bool:
    """Return whether a TCP port listens."""
    with contextlib.suppress(OSError), socket.create_connection(address, 1):
        return True
    return False


@contextlib.contextmanager
def registry(folder: Path, program: str) -> Iterator[None]:
    """Have a registry at the other end of a link for the time of the block, with TLS: SOCI takes no other.

    All programs that this process starts trust its certificate.
    """
    configuration, key, certificate = folder / "registry.yml", folder / "registry.key", folder / "registry.pem"
    run(
        (
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-subj", "/CN=lazy", "-addext", f"subjectAltName=IP:{THERE}", "-days", "2"),
            *("-keyout", str(key), "-out", str(certificate)),
        )
    )
    os.environ["SSL_CERT_FILE"] = str(certificate)
    content = {
        "version": 0.1,
        "log": {"level": "error", "accesslog": {"disabled": True}},
        "http": {
            "addr": f":{PORT}",
            "secret": "of the benchmark",
            "tls": {"certificate": str(certificate), "key": str(key)},
        },
        "storage": {"filesystem": {"rootdirectory": str(folder / "storage")}},
    }
    configuration.write_text(json.dumps(content), encoding="utf-8")  # JSON is YAML
    run(("ip", "netns", "add", SPACE))
    try:
        run(("ip", "link", "add", "lazy0", "type", "veth", "peer", "name", "lazy1", "netns", SPACE))
        run(("ip", "addr", "add", f"{HERE}/30", "dev", "lazy0"))
        run(("ip", "link", "set", "lazy0", "up"))
        run(("ip", "-n", SPACE, "addr", "add", f"{THERE}/30", "dev", "lazy1"))
        run(("ip", "-n", SPACE, "link", "set", "lazy1", "up"))
        run(("ip", "-n", SPACE, "link", "set", "lo", "up"))
        command = ["ip", "netns", "exec", SPACE, program, "serve", str(configuration)]
        with process(command, folder / "registry.log", lambda: answers((THERE, PORT))):
            yield
    finally:
        run(("ip", "netns", "del", SPACE))


def set_speed(megabytes: float) -> None:
    """Bound what the registry sends, in MB a second."""
    rate = f"{megabytes * 8:g}mbit"
    run(
        (
            *("tc", "-n", SPACE, "qdisc", "replace", "dev", "lazy1", "root", "tbf"),
            *("rate", rate, "burst", "2mb", "latency", "100ms"),
        )
    )


def sent() -> float:
    """Return the MB that the registry's end of the link has sent."""
    found = json.loads(run(("ip", "-n", SPACE, "-s", "-j", "link", "show", "lazy1")))
    return float(found[0]["stats64"]["tx"]["bytes"]) / 1e6


@dataclass
class Host:
    """A containerd that has nothing yet, with the snapshotter of a way beside it, if that is another program."""

    folder: Path
    programs: Programs
    snapshotter: str = WHOLE
    settings: str = ""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run the daemons for the time of the block, and remove what they had."""
        home = self.folder
        home.mkdir()
        (home / "lazy.toml").write_text(self.settings, encoding="utf-8")
        plugin = f'[proxy_plugins.{self.snapshotter}]\ntype = "snapshot"\naddress = "{home}/lazy.sock"\n'
        (home / "containerd.toml").write_text(
            f'version = 2\nroot = "{home}/root"\nstate = "{home}/state"\n'
            'disabled_plugins = ["io.containerd.grpc.v1.cri"]\n'
            f'[grpc]\naddress = "{home}/containerd.sock"\n' + (plugin if self.snapshotter != WHOLE else ""),
            encoding="utf-8",
        )
        with contextlib.ExitStack() as daemons:
            if self.snapshotter != WHOLE:
                program = {"stargz": self.programs.snapshotter, "soci": self.programs.soci_snapshotter}
                lazy = [program[self.snapshotter], "--address", f"{home}/lazy.sock", "--config", f"{home}/lazy.toml"]
                lazy += ["--root", f"{home}/lazy"]
                daemons.enter_context(process(lazy, home / "lazy.log", (home / "lazy.sock").exists))
            containerd = ["containerd", "--config", f"{home}/containerd.toml"]
            daemons.enter_context(process(containerd, home / "containerd.log", self.answers))
            try:
                yield
            finally:
                self.unmount()
        shutil.rmtree(home)

    def unmount(self) -> None:
        """Unmount what the snapshotter has mounted: it leaves that where it is when it ends."""
        mounted = [line.split()[1] for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()]
        for path in reversed([path for path in mounted if path.startswith(f"{self.folder}/")]):
            run(("umount", "--lazy", path))

    def answers(self) -> bool:
        """Return whether containerd answers."""
        found = subprocess.run((*self.ctr, "version"), capture_output=True, check=False)
        return found.returncode == 0

    @property
    def ctr(self) -> tuple[str, ...]:
        """Return the command line of this containerd's client."""
        return (self.programs.ctr, "--address", str(self.folder / "containerd.sock"))

    @property
    def soci(self) -> tuple[str, ...]:
        """Return the command line of SOCI's client."""
        return (self.programs.soci, "--address", str(self.folder / "containerd.sock"))

    def start(self, image: str) -> Start:
        """Pull an image and make the first step in a container; the clock stops when the step is done."""
        kind = self.snapshotter
        pull = {
            "stargz": (*self.ctr, "images", "rpull"),
            "soci": (*self.soci, "image", "rpull", "--snapshotter", kind),
            WHOLE: (*self.ctr, "images", "pull", "--snapshotter", kind),
        }
        container = (*self.ctr, "run", "--rm", "--snapshotter", kind, image, "first-step", "python", "-c", STEP)
        before, started = sent(), time.perf_counter()
        run((*pull[kind], image))
        pulled = time.perf_counter() - started
        with subprocess.Popen(container, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as child:
            assert child.stdout is not None
            lines = []
            for line in child.stdout:
                lines.append(line)
                if line.startswith("first step"):
                    break
            seconds, megabytes = time.perf_counter() - started, sent() - before
            lines += child.stdout
        if child.returncode != 0:
            raise SystemExit(f"the first step failed: {''.join(lines)[-2000:]}")
        return Start(seconds=seconds, pull=pulled, megabytes=megabytes)


def forget_files() -> None:
    """Empty the kernel's cache of files: a host that pulls an image has never read it."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3\n", encoding="ascii")


def push(image: str, target: str) -> None:
    """Push an image of this machine's Docker, its layers compressed by gzip."""
    skopeo = ("skopeo", "copy", "--quiet", f"docker-daemon:{image}", f"docker://{target}")
    run(skopeo)


def convert(host: Host, source: str, target: str, level: int) -> None:
    """Make the eStargz image of an image, ordered by what the first step reads, and push it."""
    run((*host.ctr, "images", "pull", source))
    more = ("--estargz-compression-level", str(level))
    arguments = ("--entrypoint", json.dumps(["python", "-c", STEP]), "--args", "[]")
    run((*host.ctr, "images", "optimize", "--oci", *more, "--period", "120", *arguments, source, target))
    run((*host.ctr, "images", "push", target))


def index(host: Host, image: str) -> None:
    """Write SOCI's index of an image, and push it beside the image."""
    had = SOCI_HOME.exists()
    run((*host.ctr, "content", "fetch", image))
    run((*host.soci, "create", image))
    run((*host.soci, "push", image))
    if not had:
        shutil.rmtree(SOCI_HOME)


def size(target: str) -> float:
    """Return the MB of an image's layers as the registry has them."""
    found = json.loads(run(("skopeo", "inspect", "--raw", f"docker://{target}")))
    if "manifests" in found:
        digest = found["manifests"][0]["digest"]
        name = f"{target.rsplit(':', 1)[0]}@{digest}"
        found = json.loads(run(("skopeo", "inspect", "--raw", f"docker://{name}")))
    return float(sum(layer["size"] for layer in found["layers"])) / 1e6


def report(
    image: str, facts: dict[str, str], layers: dict[str, float], taken: dict[tuple[float, Way], list[Start]]
) -> Section:
    """Return what the measurements of each speed and way say; ``layers`` are the MB of each image's layers."""
    figures: list[Figure] = []
    rows = [("", "MB a second", "pull", "first step", "MB until then", "of its layers")]
    for (speed, way), starts in taken.items():
        for start in starts:
            share = f"{start.megabytes / layers[way.image]:.0%}"
            seconds = (f"{start.pull:.1f} s", f"{start.seconds:.1f} s")
            rows.append((way.name, f"{speed:g}", *seconds, f"{start.megabytes:,.0f}", share))
        peer = Way(name=WHOLLY[way.image], image=way.image)
        if not way.lazy or (speed, peer) not in taken:
            continue
        lazily, wholly = ([start.seconds for start in taken[speed, each]] for each in (way, peer))
        ratio = statistics.median(a / b for a, b in zip(lazily, wholly, strict=True))
        verdict = "kept" if ratio <= PROMISE else "BROKEN"
        figures.append(
            Figure(
                name=f"{way.name}, {speed:g} MB a second",
                unit="s",
                ours=tuple(lazily),
                peer=tuple(wholly),
                note=f"{ratio:.2f} of the whole pull, promised at most {PROMISE}: {verdict}",
            )
        )
    return Section(
        title=f"First step after a pull of {image.rpartition(':')[2]}",
        machine=facts,
        figures=tuple(figures),
        peer="the same image (eStargz; for SOCI the one that was pushed), pulled and unpacked as a whole by the same "
        "containerd with overlayfs.",
        details=(
            f"Layers: {layers[PLAIN]:,.0f} MB as pushed (gzip), {layers[ESTARGZ]:,.0f} MB as eStargz.",
            table(rows),
        ),
    )


def main() -> None:
    names = [way.name for way in WAYS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("image", help="an image of this machine's Docker, with torch")
    parser.add_argument("--speed", type=float, action="append", help="MB a second of the link; 30 and 100")
    parser.add_argument("--way", action="append", choices=names, help="only this one, and others named so")
    parser.add_argument("--rounds", type=int, default=1, help="measurements of each way at each speed")
    parser.add_argument("--level", type=int, default=6, help="gzip level of the eStargz image")
    parser.add_argument("--keep", type=Path, help="folder of the registry, with a converted image or for one")
    parser.add_argument("--registry", help="docker-registry's program")
    parser.add_argument("--ctr-remote", help="ctr-remote's program")
    parser.add_argument("--snapshotter", help="containerd-stargz-grpc's program")
    parser.add_argument("--soci", default="soci", help="soci's program; soci-snapshotter-grpc is beside it")
    parser.add_argument("--write", action="store_true", help="record the result in benchmarks/results.md")
    options = parser.parse_args()
    programs = find(options)
    # Ended by another program, it still stops its daemons and removes the network.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    facts = machine(image=options.image.removeprefix("trainworks/"))
    taken: dict[tuple[float, Way], list[Start]] = {}
    with contextlib.ExitStack() as stack:
        base = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lazy-")))
        kept = (options.keep or base / "kept").absolute()
        kept.mkdir(parents=True, exist_ok=True)
        converted, indexed = kept / "converted", kept / "indexed"
        stack.enter_context(registry(kept, programs.registry))
        if not converted.exists():
            push(options.image, PLAIN)
            maker = Host(base / "maker", programs)
            with maker.running():
                convert(maker, PLAIN, ESTARGZ, options.level)
            converted.touch()
        if programs.soci and not indexed.exists():
            maker = Host(base / "maker", programs)
            with maker.running():
                index(maker, PLAIN)
            indexed.touch()
        ways = [way for way in WAYS if way.name in (options.way or names)]
        ways = [way for way in ways if way.snapshotter != "soci" or programs.soci]
        layers = {name: size(name) for name in (PLAIN, ESTARGZ)}
        for speed in options.speed or [30.0, 100.0]:
            set_speed(speed)
            for _ in range(options.rounds):
                for way in ways:
                    host = Host(base / "host", programs, way.snapshotter, way.settings)
                    forget_files()
                    with host.running():
                        found = host.start(way.image)
                    taken.setdefault((speed, way), []).append(found)
                    print(f"{speed:g} MB/s, {way.name}: {found}", file=sys.stderr, flush=True)
    facts["load at the end"] = load()
    section = report(options.image, facts, layers, taken)
    print(describe(section))
    if options.write:
        write(f"lazy-{options.image.rpartition(':')[2]}", section)


if __name__ == "__main__":
    main()
