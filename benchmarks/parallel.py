#!/usr/bin/env python3
"""Measures four targets built with `-j 2` beside the same four one after another, both from a cold cache.

The four are targets of a framework made here, `plain`: all that an image has without PyTorch, so that they are small
(Debian packages, compiler, Open MPI, mpi4py, NumPy, SciPy, sagemaker-training, launcher). They stand on four base
images of different content: they have no stage in common, and nothing but running side by side can help. The command
is a user's: `build.py --only`, by default with every image test. Cold: every round gets base images that were never
there before, so that no layer is known, and cache mounts of this benchmark alone, emptied before. What stays warm for
both: a package mirror may remember what was asked before, so a round that is not measured comes first.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from builds import CACHE, OWN_CACHES, freeze, ignore, say
from measure import Figure, Section, clock, describe, load, machine, run, write
from trainworks.assemble.many import PlannedTarget, plan_targets
from trainworks.engine import choose
from trainworks.engine.protocol import BuildRequest, Engine
from trainworks.engine.scratch import private_folder
from trainworks.facts.load import load as load_facts
from trainworks.facts.rows import Facts
from trainworks.plan.resolve import base_reference, make_plan
from trainworks.plan.select import request_for, rows_like
from trainworks.render.dockerfile import render

PROMISED = 0.7
"""The most that two at once may take of the time of one after another."""

NAMES = ("one", "two", "three", "four")
AT_ONCE = 2
CELL = "cpu"
LIKE = "pytorch"
"""The framework whose `cpu` target lends its lock, without the framework itself."""

FRAMEWORK = "plain"


def main(words: list[str]) -> int:
    """Measure, and print or record the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", help="docker or buildah; default: the first that answers")
    parser.add_argument("--repeat", type=int, default=1, help="pairs of rounds (default: 1)")
    parser.add_argument("--until", choices=("build", "test"), default="test")
    parser.add_argument("--no-warm-up", action="store_true", help="a round ran lately: the mirrors are warm")
    parser.add_argument("--write", action="store_true", help="record the figures in benchmarks/results.*")
    options = parser.parse_args(words)
    engine = choose(options.engine)
    with tempfile.TemporaryDirectory(prefix="trainworks-benchmark-") as name:
        root = Path(name)
        freeze(root)
        facts = load_facts(root)
        suffix = write_targets(root, facts)
        if not options.no_warm_up:
            say("a round that is not measured")
            one_round(root, engine, facts, suffix, AT_ONCE, "build")
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


def write_targets(root: Path, facts: Facts, names: Sequence[str] = NAMES) -> str:
    """Give the copied facts targets that differ in their base images; returns a suffix of the bases' names."""
    suffix = uuid.uuid4().hex[:6]
    row = next(
        row
        for row in facts.targets
        if (row.framework, row.cuda) == (LIKE, CELL) and facts.name_of(row) in facts.built_by_target
    )
    plan = make_plan(request_for(row, facts), facts)
    # What only the framework needs is in no image without it, although the lock has it.
    lock = root / "images" / "lock" / f"{plan.target.name}.toml"
    bases = root / "images" / "bases.toml"
    text = bases.read_text(encoding="utf-8")
    base_block = next(part for part in text.split("[[base]]")[1:] if f'name = "{row.base}"' in part)
    targets = f'framework = "{FRAMEWORK}"\nsummary = "no framework: for a benchmark"\n'
    for number, name in enumerate(names):
        new = f"{row.base}{name}{suffix}"
        # The name of the base image follows from the row: another image text makes it another one.
        block = base_block.replace(f'"{row.base}"', f'"{new}"').replace('image = "', f'image = "{new}/')
        text += f"\n[[base]]{block}"
        targets += (
            f'\n[[target]]\nversion = "{number}"\ncuda = "{CELL}"\nbase = "{new}"\nversions = {{}}\n'
            f'stack = "{row.stack}"\nsize_budget_megabytes = {row.size_budget_megabytes}\nsource = "a benchmark"\n'
        )
        file = f"{FRAMEWORK}-{number}-{CELL}-py{plan.target.python.replace('.', '')}-{new}.toml"
        lock.with_name(file).write_bytes(lock.read_bytes())
    bases.write_text(text, encoding="utf-8")
    (root / "images" / f"{FRAMEWORK}.toml").write_text(targets, encoding="utf-8")
    return suffix


def one_round(
    root: Path, engine: Engine, facts: Facts, suffix: str, at_once: int, until: str
) -> tuple[float, dict[str, Any]]:
    """Build the four from a cold cache; seconds of the whole command, and its report."""
    new = load_facts(root)
    bases = [base for base in new.bases if base.name.endswith(suffix)]
    original = next(base for base in facts.bases if bases[0].name.startswith(base.name))
    with private_folder() as folder:
        names = sorted({found["id"] for text in dockerfiles(root, suffix) for found in CACHE.finditer(text)})
        if not all(name.startswith(OWN_CACHES.partition("=")[2]) for name in names):
            raise SystemExit(f"these cache mounts are not this benchmark's alone: {names}")
        mounts = " ".join(f"--mount=type=cache,id={name},target=/caches/{n}" for n, name in enumerate(names))
        image = base_reference(original, facts)
        build(engine, folder, image, f"RUN {mounts} find /caches -mindepth 2 -delete", "empty")
        for base in bases:
            # Another time of a file makes another layer, and breaks no promise of the image.
            line = f"RUN touch -d @{secrets.randbelow(1_500_000_000)} /etc/issue"
            build(engine, folder, image, line, base_reference(base, new))
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
            engine.remove(base_reference(base, new))
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


def chosen(root: Path, suffix: str) -> list[PlannedTarget]:
    """Return the four, planned."""
    facts = load_facts(root)
    return plan_targets(rows_like([f"*{suffix}"], facts), facts)


def tags(root: Path, suffix: str) -> list[str]:
    """Return the names of the four images."""
    return [target.plan.tags[0] for target in chosen(root, suffix) if target.plan]


def dockerfiles(root: Path, suffix: str) -> list[str]:
    """Return the four Dockerfiles."""
    facts = load_facts(root)
    return [render(target.plan, facts).dockerfile for target in chosen(root, suffix) if target.plan]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
