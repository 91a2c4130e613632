"""NCCL over EFA from source: which images get which parts of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trainworks.facts.rows import Facts, TargetRow
from trainworks.plan.model import ImagePlan, Request
from trainworks.plan.resolve import make_plan, plan_row

DEBIANS_RDMA_CORE = {"ibverbs-providers", "libibverbs1", "librdmacm1"}
PLUGIN = {"cuda-headers", "gdrcopy", "libfabric-cuda", "aws-ofi-nccl"}


def packages_rows(facts: Facts) -> list[TargetRow]:
    return [row for row in facts.targets if facts.sources_of(row) == "packages"]


def plan_of(row: TargetRow, facts: Facts) -> ImagePlan:
    return plan_row(row, facts)


def parts(plan: ImagePlan) -> set[str]:
    return {step.component for step in plan.steps}


def test_every_cuda_image_has_the_plugin_and_no_other_image_has(facts: Facts) -> None:
    for row in packages_rows(facts):
        plan, has_cuda = plan_of(row, facts), bool(facts.cuda_by_name[row.cuda].version)
        assert (parts(plan) & PLUGIN) == (PLUGIN if has_cuda else set()), plan.target.name


def test_one_rdma_core_from_source_where_the_distributions_is_too_old(facts: Facts) -> None:
    seen = set()
    for row in packages_rows(facts):
        plan, has_cuda = plan_of(row, facts), bool(facts.cuda_by_name[row.cuda].version)
        system = next(set(step.debian) for step in plan.steps if step.component == "system")
        compiled = "rdma-core" in parts(plan)
        assert compiled == (has_cuda and row.base.startswith("debian12")), plan.target.name
        assert system & DEBIANS_RDMA_CORE == (set() if compiled else DEBIANS_RDMA_CORE), (
            plan.target.name
        )
        seen.add((row.base, compiled))
    assert seen == {
        ("debian12", True),
        ("debian12", False),
        ("debian13", False),
        ("debian12-arm64", True),
        ("debian12-arm64", False),
    }


def test_without_the_compiled_one_the_distributions_is_there(facts: Facts) -> None:
    plan = make_plan(
        Request(framework="pytorch", cuda="cu121", without_components=("rdma-core",)), facts
    )
    system = next(set(step.debian) for step in plan.steps if step.component == "system")
    assert system >= DEBIANS_RDMA_CORE
    assert {
        check.package for check in plan.checks if check.kind == "debian-package"
    } >= DEBIANS_RDMA_CORE


def test_the_launcher_sets_what_this_libfabric_reads(facts: Facts) -> None:
    for row in packages_rows(facts):
        assert {variable.name for variable in plan_of(row, facts).fabric} == {
            "FI_PROVIDER",
            "FI_EFA_FORK_SAFE",
        }


def test_only_what_says_so_is_downloaded_by_itself(facts: Facts) -> None:
    """METIS of the same version has a row for vendor targets, and is Debian's package in these."""
    downloads = {
        (step.component, artifact.name, artifact.git or artifact.url.partition("/pool/")[0])
        for row in packages_rows(facts)
        for step in plan_of(row, facts).steps
        for artifact in step.artifacts
    }
    assert downloads == {
        ("rdma-core", "rdma-core", "https://ftp.debian.org/debian"),
        ("gdrcopy", "gdrcopy", "https://github.com/NVIDIA/gdrcopy"),
        ("libfabric-cuda", "libfabric-cuda", "https://github.com/ofiwg/libfabric"),
        ("aws-ofi-nccl", "aws-ofi-nccl", "https://github.com/aws/aws-ofi-nccl"),
        ("aws-ofi-nccl", "libfabric-headers", "https://ftp.debian.org/debian"),
    }


def test_headers_are_of_a_cuda_of_their_own_and_never_in_the_image(facts: Facts) -> None:
    plan = make_plan(Request(framework="pytorch", cuda="cu121"), facts)
    files = {}
    for step in plan.steps:
        files[step.component] = {(package.name, package.version) for package in step.python}
    assert ("nvidia-cuda-runtime-cu12", "12.8.90") in files["cuda-headers"]
    assert ("nvidia-cuda-runtime-cu12", "12.1.105") in files["cuda"]
    promised = {
        (check.distribution, check.version)
        for check in plan.checks
        if check.kind == "python-package"
    }
    assert ("nvidia-cuda-runtime-cu12", "12.1.105") in promised
    assert not files["cuda-headers"] & promised


def test_the_page_names_the_versions_that_images_have(facts: Facts, root: Path) -> None:
    page = (root / "docs" / "efa.md").read_text(encoding="utf-8")
    plan = make_plan(Request(framework="pytorch", cuda="cu121"), facts)
    versions = {step.component: step.version for step in plan.steps}
    for name, label in (
        ("aws-ofi-nccl", "aws-ofi-nccl"),
        ("libfabric", "libfabric"),
        ("rdma-core", "rdma-core"),
        ("gdrcopy", "GDRCopy"),
    ):
        assert re.search(
            rf"^\| {label}\b[^|]*\| {re.escape(versions[name])} \|", page, re.MULTILINE
        ), name


@pytest.mark.parametrize(
    ("without", "gone", "ending"),
    [
        (("aws-ofi-nccl", "gdrcopy", "libfabric-cuda"), PLUGIN, "-debian12-tcp"),
        (("libfabric-cuda",), {"libfabric-cuda"}, "-debian12-without-libfabric-cuda"),
        (("gdrcopy",), {"gdrcopy"}, "-debian12-without-gdrcopy"),
        # No image has the headers: they go with the components that are compiled with them.
        ((), set(), "-debian12"),
    ],
)
def test_what_only_builds_goes_with_what_it_builds(
    facts: Facts, without: tuple[str, ...], gone: set[str], ending: str
) -> None:
    usual = make_plan(Request(framework="pytorch", cuda="cu121"), facts)
    plan = make_plan(Request(framework="pytorch", cuda="cu121", without_components=without), facts)
    assert parts(usual) - parts(plan) == gone
    assert plan.tags[0].endswith(ending)
