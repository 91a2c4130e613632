"""What is refused of a lock before anything is built: gaps, other versions, files that contradict their rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainworks.errors import LockError
from trainworks.facts.rows import Facts, Lock
from trainworks.plan.locks import check_lock, lock_problems
from trainworks.plan.target import context_of

CPU = "pytorch-2.13.0-cpu-py311-debian12"
CUDA = "pytorch-2.4.1-cu121-py311-debian12"
CPU_PLATFORM = "Python 3.11, x86_64, glibc 2.36"
NEURON = "pytorch-2.9.0-neuron-py312-ubuntu24.04-vendor"


def spoiled(facts: Facts, target: str, name: str, *, build: bool = False, **values: object) -> Facts:
    """Return the facts with other values of one package in one lock; with none of them, without the package."""
    found = []
    hit = False
    for package in facts.locks[target].packages:
        if (package.name, package.build) != (name, build):
            found.append(package)
            continue
        hit = True
        if values:
            found.append(replace(package, **values))  # type: ignore[arg-type]
    assert hit, "the damage must hit something"
    return replace(facts, locks={**facts.locks, target: Lock(target=target, packages=tuple(found))})


def problems(facts: Facts, target: str) -> tuple[str, ...]:
    row = next(row for row in facts.targets if facts.name_of(row) == target)
    return lock_problems(context_of(row, facts), facts)


def test_every_lock_of_this_repository_can_be_built_from(facts: Facts) -> None:
    assert [problem for row in facts.targets for problem in lock_problems(context_of(row, facts), facts)] == []


@pytest.mark.parametrize(
    ("target", "name", "build", "values", "said"),
    [
        (CPU, "bcrypt", False, {}, ("paramiko requires bcrypt, which is missing",)),
        (
            CPU,
            "bcrypt",
            False,
            {"version": "5.0.1", "file": "bcrypt-5.0.0.tar.gz"},
            ("bcrypt 5.0.1: its file is bcrypt-5.0.0.tar.gz, of another package or version",),
        ),
        (
            CPU,
            "pip",
            False,
            {"version": "1.0", "file": "pip-1.0-py3-none-any.whl"},
            ("has pip 1.0, the target's version is 26.3",),
        ),
        (CPU, "setuptools", True, {}, ("setuptools is missing",)),
        (
            CPU,
            "bcrypt",
            False,
            {"file": "paramiko-5.0.0.tar.gz"},
            ("bcrypt 5.0.0: its file is paramiko-5.0.0.tar.gz, of another package or version",),
        ),
        (CPU, "bcrypt", False, {"file": "bcrypt-5.0.tar.gz"}, ()),
        (
            CPU,
            "torch",
            False,
            {"version": "2.13.0", "file": "torch-2.13.0-cp311-cp311-linux_x86_64.whl"},
            ("has torch 2.13.0, the target's version is 2.13.0+cpu",),
        ),
        (
            NEURON,
            "islpy",
            False,
            {"version": "2026.10", "file": "islpy-2026.10-cp312-cp312-linux_x86_64.whl"},
            ("has islpy 2026.10, its component's row asks for islpy<2026.2",),
        ),
        *(
            (CPU, name, build, {"file": file}, (f"{name} {version}: its file is for {tag}, not for {CPU_PLATFORM}",))
            for name, build, version, tag, file in (
                (
                    "bcrypt",
                    False,
                    "5.0.0",
                    "cp311-cp311-macosx_11_0_arm64",
                    "bcrypt-5.0.0-cp311-cp311-macosx_11_0_arm64.whl",
                ),
                ("bcrypt", False, "5.0.0", "cp313-cp313-linux_x86_64", "bcrypt-5.0.0-cp313-cp313-linux_x86_64.whl"),
                (
                    "bcrypt",
                    False,
                    "5.0.0",
                    "cp311-cp311-manylinux_2_40_x86_64",
                    "bcrypt-5.0.0-cp311-cp311-manylinux_2_40_x86_64.whl",
                ),
                (
                    "bcrypt",
                    False,
                    "5.0.0",
                    "cp311-cp311-musllinux_1_2_x86_64",
                    "bcrypt-5.0.0-cp311-cp311-musllinux_1_2_x86_64.whl",
                ),
                ("bcrypt", False, "5.0.0", "cp311-cp311-win_amd64", "bcrypt-5.0.0-cp311-cp311-win_amd64.whl"),
                ("bcrypt", False, "5.0.0", "py2-none-any", "bcrypt-5.0.0-py2-none-any.whl"),
            )
        ),
    ],
)
def test_one_damage_is_one_problem(
    target: str, name: str, build: bool, values: dict[str, object], said: tuple[str, ...], facts: Facts
) -> None:
    assert problems(spoiled(facts, target, name, build=build, **values), target) == said


def test_a_component_that_names_its_packages_by_a_pattern_is_looked_at_too(facts: Facts) -> None:
    target = "pytorch-2.4.1-cu121-py311-debian12"
    runtime = "nvidia-cuda-runtime-cu12"
    other = spoiled(
        facts, target, runtime, version="12.4.1", file=f"{runtime.replace('-', '_')}-12.4.1-py3-none-any.whl"
    )
    assert problems(other, target) == ("has nvidia-cuda-runtime-cu12 12.4.1, the target's version of cuda is 12.1.105",)


def test_a_cell_without_cuda_takes_no_lock_of_a_cuda_build(facts: Facts) -> None:
    """The wheel of torch 2.11 and later for ARM asks for CUDA: nothing else of such a lock says so."""
    cuda = [
        each for each in facts.locks[CUDA].packages if each.name.startswith(("nvidia-", "cuda-")) and not each.build
    ]
    lock = Lock(target=CPU, packages=(*facts.locks[CPU].packages, *cuda))
    (said,) = problems(replace(facts, locks={**facts.locks, CPU: lock}), CPU)
    assert said == (
        f"has {', '.join(f'{each.name} {each.version}' for each in cuda[:3])} and {len(cuda) - 3} more, packages of "
        "CUDA; the target's cell cpu is without CUDA"
    )


def test_the_error_has_all_problems_and_the_command_that_mends_them(facts: Facts) -> None:
    broken = spoiled(spoiled(facts, CPU, "bcrypt"), CPU, "urllib3")
    with pytest.raises(LockError) as caught:
        check_lock(context_of(next(row for row in facts.targets if facts.name_of(row) == CPU), broken), broken)
    first, *others = caught.value.message.splitlines()
    assert first == f"images/lock/{CPU}.toml does not fit its rows:"
    assert "  paramiko requires bcrypt, which is missing" in others
    assert "  botocore requires urllib3, which is missing" in others
    assert f"build.py lock --only {CPU}" in caught.value.hint
