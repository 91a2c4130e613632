#!/usr/bin/env python3
"""Measures `build.py extend` beside Dockerfiles that call uv: one gives the
same three things, one installs only.

What is the same: packages, their lock with hashes, and bytecode. All begin without a lock, without
a layer of their own and without a downloaded wheel, as the first time.
"""

from __future__ import annotations

import argparse
import os
import sys
import uuid

from builds import ignore, say
from measure import ROOT, Figure, Section, clock, clock_process, describe, load, machine, write
from trainworks.engine import choose
from trainworks.engine.protocol import BuildRequest, Secret
from trainworks.engine.temporary_folders import private_folder
from trainworks.host.settings import read_host_settings

PROMISED = 1.3
"""The most that `extend` may take of the time of the peer with lock and
bytecode, both until the image is there.
"""

LINES = ("transformers", "datasets", "accelerate")

HEAD = """\
FROM {base}
COPY requirements.txt /tmp/requirements.txt
RUN --mount=type=secret,id=uv.toml --mount=type=secret,id=ca.pem \\
    if [ -s /run/secrets/ca.pem ]; then export SSL_CERT_FILE=/run/secrets/ca.pem; fi; \\
    export UV_CONFIG_FILE=/run/secrets/uv.toml UV_CACHE_DIR=/tmp/uv; \\
"""
PEERS = {
    "peer": (
        "uv pip freeze > /tmp/before && uv pip install --compile-bytecode -r"
        " /tmp/requirements.txt && uv pip freeze | grep -vxFf /tmp/before >"
        " /tmp/exact && uv pip compile --quiet --no-deps --generate-hashes"
        " /tmp/exact --output-file /opt/requirements.lock && rm -rf /tmp/uv\n"
    ),
    "bare": "uv pip install -r /tmp/requirements.txt && rm -rf /tmp/uv\n",
}


def main(words: list[str]) -> int:
    """Measure, and print or record the section."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", help="the image that is extended")
    parser.add_argument(
        "--repeat", type=int, default=3, help="measured rounds; one that is not comes first"
    )
    parser.add_argument(
        "--write", action="store_true", help="record the figures in benchmarks/results.*"
    )
    options = parser.parse_args(words)
    engine, settings = choose("docker"), read_host_settings(os.environ)
    secrets = {**settings.secrets("", ""), "uv.toml": b'index-strategy = "unsafe-best-match"\n'}
    measured: dict[str, list[float]] = {"ours": [], "tested": [], **{name: [] for name in PEERS}}
    loads = []
    tag = f"trainworks-benchmark/extend:{uuid.uuid4().hex[:12]}"
    with private_folder() as folder:
        (folder / "requirements.txt").write_text(
            "".join(f"{line}\n" for line in LINES), encoding="utf-8"
        )
        request = BuildRequest(
            name="peer",
            context=folder,
            tags=(tag,),
            secrets=tuple(Secret(identifier=name, content=text) for name, text in secrets.items()),
            arguments=settings.proxies,
            no_cache=True,
        )
        command = [
            sys.executable,
            str(ROOT / "build.py"),
            "extend",
            "--base",
            options.base,
            "--tag",
            tag,
        ]
        command += [
            "-r",
            str(folder / "requirements.txt"),
            "--engine",
            "docker",
            "--no-cache",
            "--until",
        ]
        for number in range(options.repeat + 1):
            loads.append(load())
            for name in ("ours", "peer", "bare", "tested"):
                for lock in folder.glob("*.locked.txt"):
                    lock.unlink()
                if name in PEERS:
                    text = HEAD.format(base=options.base) + f"    {PEERS[name]}"
                    (folder / "Dockerfile").write_text(text, encoding="utf-8")
                    seconds = clock(lambda: engine.build(request, ignore))
                else:
                    # What wheels are built with decides which cache of the
                    # engine is used: a new one each time.
                    more = (
                        "build" if name == "ours" else "test",
                        "--build-env",
                        f"ROUND={uuid.uuid4().hex}",
                    )
                    seconds = clock_process((*command, *more))
                engine.remove(tag)
                say(f"round {number}, {name}: {seconds:.1f} s")
                measured[name] += [seconds] if number else []
    peer = tuple(measured["peer"])
    limit = PROMISED * sorted(peer)[len(peer) // 2]
    note = (
        f"promised: at most {PROMISED} of the peer. Load when each round began: {', '.join(loads)}"
    )
    section = Section(
        title=f"An extension with {', '.join(LINES)}",
        machine=machine(engine=f"{engine.name} {engine.probe().version}", base=options.base),
        figures=(
            Figure(
                name="until the image is built",
                unit="s",
                ours=tuple(measured["ours"]),
                peer=peer,
                promise=limit,
                note=note,
            ),
            Figure(
                name="with its tests",
                unit="s",
                ours=tuple(measured["tested"]),
                peer=peer,
                note=(
                    "every distribution is imported in the new image, and every layer is searched"
                    " for secrets; the peer tests nothing"
                ),
            ),
            Figure(
                name="beside an installation without lock and bytecode",
                unit="s",
                ours=tuple(measured["ours"]),
                peer=tuple(measured["bare"]),
                note="`uv pip install -r requirements.txt` alone",
            ),
        ),
        peer=(
            "A Dockerfile: `uv pip install --compile-bytecode`, `uv pip compile --generate-hashes`,"
            " and the export of its image."
        ),
    )
    print(describe(section))
    if options.write:
        write("extend", section)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
