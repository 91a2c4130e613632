"""Test the requirements of a lock, where a component's wheel is not the package index's."""

from __future__ import annotations

from dataclasses import replace

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from trainworks.facts.rows import Facts
from trainworks.inputs.lock_artifacts import check_locks
from trainworks.plan.locks import list_requirements
from trainworks.plan.target import context_of, find_artifact_rows


def test_a_wheel_of_its_own_is_asked_for_as_its_public_version(facts: Facts) -> None:
    requirements = {
        facts.name_of(row): str(requirement)
        for row in facts.targets
        for requirement in list_requirements(context_of(row, facts), facts)
        if requirement.name == "torch"
    }
    assert requirements["pytorch-1.10.2-cu113-py38-ubuntu20.04-vendor"] == "torch==1.10.2"
    assert requirements["pytorch-2.13.0-cpu-py311-debian12"] == "torch==2.13.0+cpu", (
        "PyTorch's own index has it"
    )


def test_a_lock_has_what_the_artifacts_row_says_that_its_wheel_requires(facts: Facts) -> None:
    compared = 0
    for row in facts.targets:
        packages = {
            package.name: package
            for package in facts.locks[facts.name_of(row)].packages
            if not package.build
        }
        target = context_of(row, facts)
        torch = target.fitting.get("torch")
        for wheel in find_artifact_rows(torch, target, facts) if torch else ():
            required = [Requirement(text) for text in wheel.requires_dist]
            for requirement in required:
                locked = packages[canonicalize_name(requirement.name)]
                assert requirement.specifier.contains(locked.version, prereleases=True), (
                    f"{facts.name_of(row)}: {requirement}"
                )
            if required:
                assert set(packages["torch"].requires) == {
                    canonicalize_name(requirement.name) for requirement in required
                }
                compared += 1
    assert compared, "no row says what its wheel requires"


def test_extras_and_the_build_without_cuda_are_asked_for(facts: Facts) -> None:
    requirements = {
        facts.name_of(row): str(requirement)
        for row in facts.targets
        for requirement in list_requirements(context_of(row, facts), facts)
        if requirement.name in {"tensorflow", "tensorflow-cpu", "mxnet-cu112", "islpy"}
    }
    assert requirements["tensorflow-2.21.0-cpu-py311-debian12"] == "tensorflow-cpu==2.21.0"
    assert requirements["tensorflow-2.21.0-cu129-py311-debian12"] == "tensorflow[and-cuda]==2.21.0"
    assert requirements["mxnet-1.9.1-cu112-py38-ubuntu20.04-vendor"] == "mxnet-cu112==1.9.1"
    assert requirements["pytorch-2.9.0-neuron-py312-ubuntu24.04-vendor"] == "islpy<2026.2"


def test_a_lock_beyond_its_targets_limits_does_not_fit(facts: Facts) -> None:
    row = next(row for row in facts.targets if row.limits == ("numpy<1.24",))
    stricter = replace(row, limits=("numpy<1.20",))
    targets = [stricter if target == row else target for target in facts.targets]
    changed = replace(facts, targets=tuple(targets))
    assert check_locks([row], facts)[0] == []
    (problem,) = check_locks([stricter], changed)[0]
    assert problem.endswith("has numpy 1.23.5, the target's limit is numpy<1.20")
