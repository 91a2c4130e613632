"""Test the compiler of an extension's wheels, and the warnings."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainworks.errors import ExtendError, UnknownNameError
from trainworks.extend.cuda_compiler import BARE, missing_compilers, workbench_of
from trainworks.extend.requirements import ExtendedBase
from trainworks.facts.rows import Facts
from trainworks.plan.select import row_named

CU132 = "pytorch-2.15.0-cu132-py311-debian12"
BASE = ExtendedBase(
    reference="my/base:1",
    identifier="sha256:" + "b" * 64,
    python="/opt/venv/bin/python",
    version="3.11",
    glibc="2.36",
    machine="x86_64",
    environment={},
    distributions=(),
    kept={"torch": "2.15.0", "nvidia-cuda-runtime": "13.2.86"},
)


# --- the compiler ---------------------------------------------------------------------------------
def test_nvcc_is_the_one_that_the_target_has_locked(facts: Facts) -> None:
    bench = workbench_of(("nvcc",), {"MAX_JOBS": "2"}, BASE, row_named(CU132, facts), facts)
    pins = dict(line.split(" ")[0].split("==") for line in bench.requirements.splitlines())
    assert pins["nvidia-cuda-nvcc"] == pins["nvidia-nvvm"] == pins["nvidia-cuda-crt"] == "13.2.86"
    assert {"nvidia-cuda-cccl", "wheel"} <= pins.keys()
    assert all(" --hash=sha256:" in line for line in bench.requirements.splitlines())
    assert bench.variables == {
        "TORCH_CUDA_ARCH_LIST": "7.5;8.0;8.6;8.9;9.0;10.0;10.3;12.0",
        "MAX_JOBS": "2",
    }
    assert {"deepspeed", "flash-attn"} <= set(bench.whole)


def test_the_users_architectures_win(facts: Facts) -> None:
    chosen = {"TORCH_CUDA_ARCH_LIST": "9.0"}
    assert workbench_of(("nvcc",), chosen, BASE, row_named(CU132, facts), facts).variables == chosen


def test_a_base_that_has_nvcc_gets_none(facts: Facts) -> None:
    base = replace(BASE, components={"nvcc": "13.2.86"})
    bench = workbench_of(("nvcc",), {}, base, row_named(CU132, facts), facts)
    assert bench.component == ""
    assert [line.split("==")[0] for line in bench.requirements.splitlines()] == ["wheel"], (
        "images lack what builds import"
    )
    assert "8.0;8.6" in bench.variables["TORCH_CUDA_ARCH_LIST"], (
        "a build sees no GPU to compile for"
    )
    assert "deepspeed" in bench.whole, "it is built with torch in sight all the same"


def test_without_a_choice_there_are_the_users_variables_alone(facts: Facts) -> None:
    bench = workbench_of((), {"A": "1"}, BASE, row_named(CU132, facts), facts)
    assert bench == replace(BARE, variables={"A": "1"})


@pytest.mark.parametrize("cell", ["2.4.1-cu121", "2.10.0-cu128"])
def test_cuda_12_has_none_and_the_nearest_target_that_has_is_named(cell: str, facts: Facts) -> None:
    with pytest.raises(UnknownNameError) as caught:
        workbench_of(("nvcc",), {}, BASE, row_named(f"pytorch-{cell}-py311-debian12", facts), facts)
    assert "the wheels of CUDA 12 have ptxas, but neither nvcc nor cicc" in caught.value.message
    assert "pytorch-2.14.1-cu130-py311-debian12" in (caught.value.hint or "")


def test_another_makers_image_and_another_component_are_refused(facts: Facts) -> None:
    with pytest.raises(ExtendError, match="my/base:1 is not an image of ours"):
        workbench_of(("nvcc",), {}, BASE, None, facts)
    with pytest.raises(ExtendError, match="--with git: builds of wheels can have nvcc"):
        workbench_of(("git",), {}, BASE, row_named(CU132, facts), facts)


# --- missing compilers ----------------------------------------------------------------------------
def test_what_needs_the_compiler_is_named_where_it_is_missing(facts: Facts) -> None:
    missing = missing_compilers(BARE, BASE, facts)
    assert missing["compiled_by"]["deepspeed"] == "nvcc"
    assert "deepspeed" not in missing["needs"], "it is installed without nvcc"
    assert missing["needs"]["flash-attn"] == "nvcc"
    assert (
        missing_compilers(BARE, replace(BASE, kept={"torch": "2.13.0+cpu"}), facts)["compiled_by"]
        == {}
    )
    nvcc_missing = missing_compilers(replace(BARE, component="nvcc"), BASE, facts)
    assert (
        nvcc_missing
        == missing_compilers(BARE, replace(BASE, components={"nvcc": "13.2.86"}), facts)
        == {"compiled_by": {}, "needs": {}}
    )
