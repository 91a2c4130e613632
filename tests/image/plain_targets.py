"""Small targets of a framework made for tests: all that an image has without
PyTorch, on bases of different content.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path

from builds import ignore  # of benchmarks/, which the tests put on the path
from trainworks.build.matrix import plan_targets
from trainworks.engine.protocol import BuildRequest, Engine
from trainworks.facts.load import load as load_facts
from trainworks.facts.rows import Facts
from trainworks.plan.resolve import make_plan
from trainworks.plan.select import request_for, rows_like

CELL = "cpu"
LIKE = "pytorch"
"""The framework whose `cpu` target lends its lock, without the framework itself."""

FRAMEWORK = "plain"


def write_targets(root: Path, facts: Facts, names: Sequence[str]) -> str:
    """Give the copied facts targets that differ in their base images.

    Returns a suffix of the bases' names.
    """
    suffix = uuid.uuid4().hex[:6]
    row = next(
        row
        for row in facts.targets
        if (row.framework, row.cuda) == (LIKE, CELL) and facts.name_of(row) in facts.built_by_target
    )
    plan = make_plan(request_for(row, facts), facts)
    # The packages of the framework alone are in no image without it, although the lock has them.
    lock = root / "images" / "lock" / f"{plan.target.name}.toml"
    bases = root / "images" / "bases.toml"
    text = bases.read_text(encoding="utf-8")
    base_block = next(part for part in text.split("[[base]]")[1:] if f'name = "{row.base}"' in part)
    targets = f'framework = "{FRAMEWORK}"\nsummary = "no framework: for a test"\n'
    for number, name in enumerate(names):
        new = f"{row.base}{name}{suffix}"
        # The name of the base image follows from the row: another image text makes it another one.
        block = base_block.replace(f'"{row.base}"', f'"{new}"').replace(
            'image = "', f'image = "{new}/'
        )
        text += f"\n[[base]]{block}"
        targets += (
            "\n"
            "[[target]]\n"
            f'version = "{number}"\n'
            f'cuda = "{CELL}"\n'
            f'base = "{new}"\n'
            "versions = {}\n"
            f'stack = "{row.stack}"\n'
            f"size_budget_megabytes = {row.size_budget_megabytes}\n"
            'source = "a test"\n'
        )
        file = f"{FRAMEWORK}-{number}-{CELL}-py{plan.target.python.replace('.', '')}-{new}.toml"
        lock.with_name(file).write_bytes(lock.read_bytes())
    bases.write_text(text, encoding="utf-8")
    (root / "images" / f"{FRAMEWORK}.toml").write_text(targets, encoding="utf-8")
    return suffix


def build(engine: Engine, folder: Path, base: str, line: str, tag: str) -> None:
    """Build an image of one step, which is never taken from the cache."""
    (folder / "Dockerfile").write_text(f"FROM {base}\n{line}\n", encoding="utf-8")
    name = tag if "/" in tag else f"trainworks-test/{tag}:latest"
    engine.build(BuildRequest(name=tag, context=folder, tags=(name,), no_cache=True), ignore)


def tags(root: Path, suffix: str) -> list[str]:
    """Return the names of the images."""
    facts = load_facts(root)
    return [
        target.plan.tags[0]
        for target in plan_targets(rows_like([f"*{suffix}"], facts), facts)
        if target.plan
    ]
