"""Test the locks that are refused before a build: gaps, other versions, files that contradict their
rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from trainworks.errors import LockError
from trainworks.facts.rows import Facts, Lock
from trainworks.plan.locks import check_lock, find_lock_problems
from trainworks.plan.target import context_of

CPU = "pytorch-2.13.0-cpu-py311-debian12"
CUDA = "pytorch-2.4.1-cu121-py311-debian12"
RUNTIME = "nvidia-cuda-runtime-cu12"
NEURON = "pytorch-2.9.0-neuron-py312-ubuntu24.04-vendor"


def spoiled(
    facts: Facts, target: str, name: str, *, build: bool = False, **values: object
) -> Facts:
    """Return the facts with other values of one package in one lock.

    With none of them, without the package.
    """
    packages = []
    hit = False
    for package in facts.locks[target].packages:
        if (package.name, package.build) != (name, build):
            packages.append(package)
            continue
        hit = True
        if values:
            packages.append(replace(package, **values))  # type: ignore[arg-type]
    assert hit, "the damage must hit something"
    return replace(
        facts, locks={**facts.locks, target: Lock(target=target, packages=tuple(packages))}
    )


def problems(facts: Facts, target: str) -> tuple[str, ...]:
    row = next(row for row in facts.targets if facts.name_of(row) == target)
    return find_lock_problems(context_of(row, facts), facts)


def test_every_lock_of_this_repository_can_be_built_from(facts: Facts) -> None:
    assert [
        problem
        for row in facts.targets
        for problem in find_lock_problems(context_of(row, facts), facts)
    ] == []


DAMAGES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    (CPU, "bcrypt", {}),
    (CPU, "bcrypt", {"version": "5.0.1", "file": "bcrypt-5.0.0.tar.gz"}),
    (CPU, "pip", {"version": "1.0", "file": "pip-1.0-py3-none-any.whl"}),
    (CPU, "bcrypt", {"file": "paramiko-5.0.0.tar.gz"}),
    (CPU, "bcrypt", {"file": "bcrypt-5.0.tar.gz"}),
    (CPU, "torch", {"version": "2.13.0", "file": "torch-2.13.0-cp311-cp311-linux_x86_64.whl"}),
    (NEURON, "islpy", {"version": "2026.10", "file": "islpy-2026.10-cp312-cp312-linux_x86_64.whl"}),
    *(
        (CPU, "bcrypt", {"file": f"bcrypt-5.0.0-{tag}.whl"})
        for tag in (
            "cp311-cp311-macosx_11_0_arm64",
            "cp313-cp313-linux_x86_64",
            "cp311-cp311-manylinux_2_40_x86_64",
            "cp311-cp311-musllinux_1_2_x86_64",
            "cp311-cp311-win_amd64",
            "py2-none-any",
        )
    ),
    (
        CUDA,
        RUNTIME,
        {"version": "12.4.1", "file": f"{RUNTIME.replace('-', '_')}-12.4.1-py3-none-any.whl"},
    ),
)
"""A lock, one of its packages, and its wrong values; nothing: the package is missing.

One problem each, or none.
"""


def test_golden_problems_of_locks(facts: Facts, golden: Callable[[str, str], None]) -> None:
    lines = []
    for target, name, values in DAMAGES:
        lock_problems = problems(spoiled(facts, target, name, **values), target)
        assert len(lock_problems) == (values != {"file": "bcrypt-5.0.tar.gz"}), (
            "zeros at the end of a version count for nothing"
        )
        problem_list = ", ".join(lock_problems) or "nothing"
        lines.append(f"{name} of {target}: {values or 'missing'}\n  {problem_list}\n")
    golden("plan/locks.txt", "".join(lines))
    assert problems(spoiled(facts, CPU, "setuptools", build=True), CPU) == (
        "setuptools is missing",
    )


def test_a_cell_without_cuda_takes_no_lock_of_a_cuda_build(facts: Facts) -> None:
    """The wheel of torch 2.11 and later for ARM asks for CUDA: nothing else of
    such a lock says so.
    """
    cuda = [
        package
        for package in facts.locks[CUDA].packages
        if package.name.startswith(("nvidia-", "cuda-")) and not package.build
    ]
    lock = Lock(target=CPU, packages=(*facts.locks[CPU].packages, *cuda))
    (problem,) = problems(replace(facts, locks={**facts.locks, CPU: lock}), CPU)
    assert (
        problem
        == f"has {', '.join(f'{package.name} {package.version}' for package in cuda[:3])} and"
        f" {len(cuda) - 3} more, packages of CUDA; the target's cell cpu is without CUDA"
    )


def test_the_error_has_all_problems_and_the_command_that_mends_them(facts: Facts) -> None:
    broken = spoiled(spoiled(facts, CPU, "bcrypt"), CPU, "urllib3")
    with pytest.raises(LockError) as caught:
        check_lock(
            context_of(next(row for row in facts.targets if facts.name_of(row) == CPU), broken),
            broken,
        )
    first, *others = caught.value.message.splitlines()
    assert first == f"images/lock/{CPU}.toml does not fit its rows:"
    assert "  paramiko requires bcrypt, which is missing" in others
    assert "  botocore requires urllib3, which is missing" in others
    assert f"build.py lock --only {CPU}" in caught.value.hint
