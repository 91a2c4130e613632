#!/usr/bin/env python3
"""Measures four targets built with `-j 2` beside the same four one after another, both from a cold cache.

The four are the `cpu` target of PyTorch on four base images of the same content and of different names, made here:
they have no stage in common, so that nothing but running side by side can help. `build.py --only` builds all four,
and with `--until test` (the default) checks every promise, as a user's command does. Cold: every round gets base
images that were never there before, so that no layer is known, and cache mounts of this benchmark alone, emptied
before. The base image itself is in the engine's store, and a package mirror may remember what was asked before: the
one-after-another round goes first in the first pair, second in the next.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any

from builds import CACHE, freeze, ignore, say
from measure import Figure, Section, clock, describe, load, machine, run, write
from trainworks.engine import choose
from trainworks.engine.protocol import BuildRequest, Engine
from trainworks.engine.scratch import private_folder
from trainworks.facts.load import load as load_facts
from trainworks.facts.rows import Facts
from trainworks.plan.resolve import base_reference

PROMISED = 0.7
"""The most that two at once may take of the time of one after another."""

NAMES = ("one", "two", "three", "four")
AT_ONCE = 2
CELL = "cpu"
FRAMEWORK = "pytorch"


def main(words: list[str]) -> int:
    """Measure, and print or record the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", help="docker or buildah; default: the first that answers")
    parser.add_argument("--repeat", type=int, default=1, help="pairs of rounds (default: 1)")
    parser.add_argument("--until", choices=("build", "test"), default="test")
    parser.add_argument("--write", action="store_true", help="record the figures in benchmarks/results.*")
    options = parser.parse_args(words)
    engine = choose(options.engine)
    with tempfile.TemporaryDirectory(prefix="trainworks-benchmark-") as name:
        root = Path(name)
        freeze(root)
        facts = load_facts(root)
        suffix = write_targets(root, facts)
        alone: list[float] = []
        together: list[float] = []
        loads = []
        for number in range(options.repeat):
            for at_once in (1, AT_ONCE) if number % 2 == 0 else (AT_ONCE, 1):
                before = load()
                seconds, report = one_round(root, engine, facts, suffix, at_once, options.until)
                (alone if at_once == 1 else together).append(seconds)
                loads.append(f"-j {at_once}: {before}")
                each = ", ".join(f"{target['seconds']:.1f}" for target in report["targets"])
                say(f"-j {at_once}: {seconds:.1f} s ({each}); load when it began {before}")
    section = Section(
        title=f"Four targets at once, until {options.until}, with {engine.name}",
        machine=machine(engine=f"{engine.name} {engine.probe().version}"),
        figures=(
            Figure(
                name=f"four cold targets, -j {AT_ONCE}",
                unit="s",
                ours=tuple(together),
                peer=tuple(alone),
                promise=PROMISED * sorted(alone)[len(alone) // 2],
                note=f"promised: at most {PROMISED} of one after another; it is "
                f"{sorted(together)[len(together) // 2] / sorted(alone)[len(alone) // 2]:.2f}. "
                f"Load when each round began: {', '.join(loads)}",
            ),
        ),
        peer="the same command with `-j 1`, from a cold cache too.",
    )
    print(describe(section))
    if options.write:
        write("parallel", section)
    return 0


def write_targets(root: Path, facts: Facts) -> str:
    """Give the copied facts four targets that differ in their base images' names; returns a suffix of those names."""
    suffix = uuid.uuid4().hex[:6]
    row = next(row for row in facts.targets if (row.framework, row.cuda) == (FRAMEWORK, CELL) and row.built)
    bases, targets = root / "images" / "bases.toml", root / "images" / f"{FRAMEWORK}.toml"
    base_block = block(bases.read_text(encoding="utf-8"), "base", f'name = "{row.base}"')
    target_block = block(targets.read_text(encoding="utf-8"), "target", f'cuda = "{CELL}"')
    lock = root / "images" / "lock" / f"{facts.name_of(row)}.toml"
    content = lock.read_text(encoding="utf-8")
    more_bases, more_targets = "", ""
    for name in NAMES:
        new = f"{row.base}{name}{suffix}"
        # The name of the base image follows from the row: another image text makes it another one.
        more_bases += base_block.replace(f'"{row.base}"', f'"{new}"').replace('image = "', f'image = "{new}/')
        more_targets += target_block.replace(f'"{row.base}"', f'"{new}"')
        other = lock.with_name(lock.name.replace(row.base, new))
        other.write_text(content.replace(row.base, new), encoding="utf-8")
    for file, more in ((bases, more_bases), (targets, more_targets)):
        file.write_text(f"{file.read_text(encoding='utf-8')}\n{more}", encoding="utf-8")
    return suffix


def block(text: str, table: str, line: str) -> str:
    """Return the rows' table of a TOML file that has a line."""
    return next(f"[[{table}]]{part}\n" for part in text.split(f"[[{table}]]")[1:] if line in part)


def one_round(
    root: Path, engine: Engine, facts: Facts, suffix: str, at_once: int, until: str
) -> tuple[float, dict[str, Any]]:
    """Build the four from a cold cache; seconds of the whole command, and its report."""
    new = load_facts(root)
    bases = [base for base in new.bases if base.name.endswith(suffix)]
    original = next(base for base in facts.bases if bases[0].name.startswith(base.name))
    mark = uuid.uuid4().hex
    with private_folder() as folder:
        caches = {
            found["id"] for path in (root / "templates").rglob("*.j2") for found in CACHE.finditer(path.read_text())
        }
        names = {re.sub(r"\{\{.*?\}\}", original.suite, name) for name in caches}
        mounts = " ".join(f"--mount=type=cache,id={name},target=/caches/{n}" for n, name in enumerate(sorted(names)))
        build(engine, folder, base_reference(original), f"RUN {mounts} find /caches -mindepth 2 -delete", "empty")
        for base in bases:
            # A file makes the content another one; with labels alone the layers would be the same.
            line = f"RUN echo {mark}-{base.name} > /etc/trainworks-benchmark"
            build(engine, folder, base_reference(original), line, base_reference(base))
    environment = {**os.environ, "XDG_CACHE_HOME": str(root / "cache")}
    words = ("--only", f"*{suffix}", "-j", str(at_once), "--until", until, "--engine", engine.name)
    command = (sys.executable, str(root / "build.py"), *words, "--format", "json")
    output: list[str] = []
    try:
        seconds = clock(lambda: output.append(run(command, environment=environment)))
        report: dict[str, Any] = json.loads(output[0])
    finally:
        for target in tags(root, suffix):
            engine.remove(target)
        for base in bases:
            engine.remove(base_reference(base))
        engine.remove("trainworks-benchmark/empty:latest")
        shutil.rmtree(root / "cache", ignore_errors=True)
    if [target["outcome"] for target in report["targets"]] != ["done"] * len(NAMES):
        raise SystemExit(f"not all four were built:\n{output[0][:4000]}")
    return seconds, report


def build(engine: Engine, folder: Path, base: str, line: str, tag: str) -> None:
    """Build an image of one step, which is never taken from the cache."""
    (folder / "Dockerfile").write_text(f"FROM {base}\n{line}\n", encoding="utf-8")
    name = tag if "/" in tag else f"trainworks-benchmark/{tag}:latest"
    engine.build(BuildRequest(name=tag, context=folder, tags=(name,), no_cache=True), ignore)


def tags(root: Path, suffix: str) -> list[str]:
    """Return the names of the four images."""
    from trainworks.cli.many import choose_rows, chosen_targets

    facts = load_facts(root)
    chosen = chosen_targets(choose_rows([f"*{suffix}"], facts), facts)
    return [target.plan.tags[0] for target in chosen if target.plan]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
