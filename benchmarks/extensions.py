#!/usr/bin/env python3
"""Measures `build.py extend` with requirements that have nothing to build: resolved, built and tested in one command.

The peer is `uv pip install` of the lock that ours wrote, in a container of the same base with an empty cache. It
resolves nothing, makes no image and tests nothing: what ours takes more is what those cost, and that pip installs. Both
compile bytecode, and take turns. Needs docker and the base image (`build.py --framework pytorch --cuda cpu`).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import uuid
from pathlib import Path

from uv import find_uv_bin

from measure import ROOT, Figure, Section, clock_process, describe, load, machine, run, write
from trainworks.engine.docker import DockerEngine
from trainworks.host.pip import uv_configuration
from trainworks.host.settings import read_host_settings

MORE = 10.0
"""How many seconds more than the peer an extension may take."""


def main() -> int:
    """Measure, print, and with `--write` record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", required=True, help="an image of ours that docker has")
    parser.add_argument("--requirements", nargs="+", default=["einops", "transformers==4.57.6"], metavar="LINE")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="measurements of each (default: 3)")
    parser.add_argument("--write", action="store_true", help="record the figures in benchmarks/results.json and .md")
    options = parser.parse_args()
    program = DockerEngine().probe().program
    facts = machine()
    ours: list[float] = []
    peer: list[float] = []
    for _ in range(options.repeat):
        with tempfile.TemporaryDirectory(prefix="trainworks-benchmark-") as folder:
            wanted = Path(folder, "requirements.txt")
            wanted.write_text("\n".join(options.requirements) + "\n", encoding="utf-8")
            tag = f"trainworks-benchmark-{uuid.uuid4().hex[:12]}:1.0"
            words = ("extend", "--base", options.base, "--tag", tag, "--requirements", str(wanted), "--no-cache")
            try:
                ours.append(clock_process((sys.executable, str(ROOT / "build.py"), *words, "--engine", "docker")))
            finally:
                run((program, "rmi", "--force", tag))
            (lock,) = Path(folder).glob("*.locked.txt")
            configuration = Path(folder, "uv.toml")
            settings = read_host_settings(os.environ)
            configuration.write_text(uv_configuration(settings.pip), encoding="utf-8")
            authorities = Path(folder, "ca.pem")
            authorities.write_bytes(settings.ca)
            mounts = [f"{find_uv_bin()}:/opt/uv:ro", f"{lock}:/lock.txt:ro", f"{configuration}:/uv.toml:ro"]
            variables = ["--env", "SSL_CERT_FILE=/ca.pem"] if settings.ca else []
            mounts += [f"{authorities}:/ca.pem:ro"] if settings.ca else []
            options_of_uv = ("--no-deps", "--require-hashes", "--compile-bytecode", "--config-file", "/uv.toml")
            install = ("/opt/uv", "pip", "install", "--python", "/opt/venv/bin/python", *options_of_uv)
            peer.append(
                clock_process(
                    (
                        *(program, "run", "--rm", "--network", "host", "--entrypoint", "", *variables),
                        *(word for mount in mounts for word in ("--volume", mount)),
                        *(options.base, *install, "--requirements", "/lock.txt"),
                    )
                )
            )
    section = Section(
        title=f"An extension of {options.base} with {', '.join(options.requirements)}",
        machine={**facts, "load at the end": load()},
        figures=(
            Figure(
                name="extend, from nothing to a tested image",
                unit="s",
                ours=tuple(ours),
                peer=tuple(peer),
                promise=statistics.median(peer) + MORE,
            ),
        ),
        peer="`uv pip install` of the finished lock, in a container of the base: no resolution, no image, no test.",
        details=(f"Promised are at most {MORE:g} s more than the peer.",),
    )
    sys.stdout.write(describe(section))
    if options.write:
        write("extensions", section)
    return 0


if __name__ == "__main__":
    sys.exit(main())
