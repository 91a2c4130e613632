"""Sharing the files of a lock among components: over the real locks, and over made-up ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainworks.facts.rows import Component, Cuda, Facts, LockedPackage
from trainworks.plan.package_ownership import list_python_patterns, share_packages
from trainworks.plan.resolve import make_plan
from trainworks.plan.select import request_for
from trainworks.plan.target import context_of

CUDA = Cuda(name="cu121", version="12.1", wheel_suffix="cu12", source="made up")

NAMES = ("a", "b", "c", "d", "e", "nvidia-x-cu12", "nvidia-y-cu12")
PATTERNS = (*NAMES, "nvidia-x-{wheel_suffix}", "nvidia-*", "not-locked")


def component(name: str, *patterns: str, build_only: bool = False) -> Component:
    return Component(
        name=name, summary=name, source="made up", python=patterns, build_only=build_only
    )


def builds(row: Component) -> bool:
    return row.name == "builder" or row.build_only


def package(name: str, *requires: str, build: bool = False) -> LockedPackage:
    return LockedPackage(
        name=name, version="1", file=f"{name}.whl", sha256="0" * 64, requires=requires, build=build
    )


def names_of(shares: dict[str, tuple[LockedPackage, ...]]) -> dict[str, list[str]]:
    return {name: [package.name for package in packages] for name, packages in shares.items()}


def reachable(
    components: Sequence[Component], lock: Sequence[LockedPackage], *, build: bool = False
) -> set[str]:
    """Return the packages that must be installed, found the slow and plain way: repeat until
    nothing new comes.
    """
    packages = {package.name: package for package in lock if package.build is build}
    wanted_names = {
        name
        for row in components
        if builds(row) is build
        for name in list_python_patterns(row, CUDA)
    }
    reached_names = wanted_names & packages.keys()
    while True:
        more = reached_names | {
            need for name in reached_names for need in packages[name].requires if need in packages
        }
        if more == reached_names:
            return reached_names
        reached_names = more


@st.composite
def locks(draw: st.DrawFn) -> list[LockedPackage]:
    names = draw(st.lists(st.sampled_from(NAMES), unique=True, min_size=1))
    runtime = [
        package(name, *draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=3)))
        for name in names
    ]
    build = [
        package(name, build=True)
        for name in draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=3))
    ]
    return [*runtime, *build]


@st.composite
def chosen(draw: st.DrawFn) -> list[Component]:
    names = draw(st.lists(st.sampled_from(["one", "two", "three", "headers"]), unique=True))
    patterns = st.lists(st.sampled_from(PATTERNS), unique=True, max_size=3)
    builder = component("builder", *draw(patterns))
    return [
        builder,
        *(component(name, *draw(patterns), build_only=name == "headers") for name in names),
    ]


@given(components=chosen(), lock=locks())
@settings(max_examples=40, deadline=None)
def test_every_needed_file_has_exactly_one_owner_and_no_other_file_has_any(
    components: list[Component], lock: list[LockedPackage]
) -> None:
    shares = share_packages(components, CUDA, lock)
    assert set(shares) == {row.name for row in components}
    owned = Counter(package for packages in shares.values() for package in packages)
    assert set(owned.values()) <= {1}
    for build in (False, True):
        names = {package.name for package in owned if package.build is build}
        assert names == reachable(components, lock, build=build)
    for row in components:
        assert {package.build for package in shares[row.name]} <= {builds(row)}


@given(components=chosen(), lock=locks())
@settings(max_examples=25, deadline=None)
def test_a_component_has_what_its_row_names(
    components: list[Component], lock: list[LockedPackage]
) -> None:
    shares = names_of(share_packages(components, CUDA, lock))
    order = [row.name for row in components if not builds(row)]
    exact = {
        row.name: [name for name in list_python_patterns(row, CUDA) if "*" not in name]
        for row in components
    }
    for name in reachable(components, lock):
        namers = [owner for owner in order if name in exact[owner]]
        owner = next(owner for owner in order if name in shares[owner])
        if namers:
            assert owner == namers[0], "the first component that names it"


@given(components=chosen(), lock=locks())
@settings(max_examples=25, deadline=None)
def test_files_keep_the_order_of_the_lock(
    components: list[Component], lock: list[LockedPackage]
) -> None:
    for packages in share_packages(components, CUDA, lock).values():
        places = [lock.index(package) for package in packages]
        assert places == sorted(places)


def test_needed_both_while_building_and_at_run_time() -> None:
    """``setuptools`` compiles source distributions, and torch needs it in the
    image: it is in both places.
    """
    lock = [
        package("torch", "setuptools"),
        package("setuptools"),
        package("setuptools", build=True),
    ]
    shares = share_packages(
        [component("builder", "uv", "setuptools"), component("torch", "torch")], CUDA, lock
    )
    assert names_of(shares) == {"builder": ["setuptools"], "torch": ["torch", "setuptools"]}
    assert shares["builder"][0].build


def test_what_only_builds_has_its_own_version_of_what_is_in_the_image() -> None:
    lock = [
        package("torch", "runtime"),
        package("runtime"),
        package("runtime", build=True),
        package("uv", build=True),
    ]
    components = [component("builder", "uv"), component("headers", "runtime", build_only=True)]
    shares = share_packages([*components, component("torch", "torch")], CUDA, lock)
    assert names_of(shares) == {
        "builder": ["uv"],
        "headers": ["runtime"],
        "torch": ["torch", "runtime"],
    }
    assert shares["headers"][0].build
    left_out = share_packages([components[0], component("torch", "torch")], CUDA, lock)
    assert names_of(left_out) == {"builder": ["uv"], "torch": ["torch", "runtime"]}


def test_a_shared_dependency_goes_to_the_first_component_and_a_named_one_to_its_own() -> None:
    lock = [
        package("torch", "numpy", "nccl"),
        package("rmm", "numpy"),
        package("numpy"),
        package("nccl"),
    ]
    components = [component("torch", "torch"), component("nccl", "nccl"), component("rmm", "rmm")]
    assert names_of(share_packages(components, CUDA, lock)) == {
        "torch": ["torch", "numpy"],
        "nccl": ["nccl"],
        "rmm": ["rmm"],
    }


def test_a_pattern_takes_what_is_needed_and_nothing_else() -> None:
    lock = [package("torch", "nvidia-a"), package("nvidia-a"), package("nvidia-unused")]
    components = [component("cuda", "nvidia-*"), component("torch", "torch")]
    assert names_of(share_packages(components, CUDA, lock)) == {
        "cuda": ["nvidia-a"],
        "torch": ["torch"],
    }


def test_circles_of_dependencies_end() -> None:
    lock = [package("a", "b"), package("b", "a")]
    assert names_of(share_packages([component("one", "a")], CUDA, lock)) == {"one": ["a", "b"]}


@pytest.mark.parametrize("distribution", ["torch", "setuptools"])
def test_no_real_target_lacks_what_torch_needs(distribution: str, facts: Facts) -> None:
    """Over the real locks: everything that torch depends on, however
    indirectly, is in some step of the image.
    """
    targets_with_it = 0
    for row in facts.targets:
        lock = facts.locks[facts.name_of(row)].packages
        components = list(context_of(row, facts).components.values())
        replaced = [pattern for component in components for pattern in component.replaces]
        shares = share_packages(components, facts.cuda_by_name[row.cuda], lock)
        installed = {
            package.name: package
            for packages in shares.values()
            for package in packages
            if not package.build
        }
        for need in (need for package in installed.values() for need in package.requires):
            is_known = need in installed or any(fnmatchcase(need, pattern) for pattern in replaced)
            assert is_known, f"{facts.name_of(row)}: {need}"
        targets_with_it += distribution in installed
    assert targets_with_it > 0


def test_cuda_libraries_are_in_no_layer_of_a_framework(facts: Facts) -> None:
    """A bump of torch or tensorflow must not carry gigabytes of NVIDIA's libraries with it."""
    for row in facts.targets:
        components = list(context_of(row, facts).components.values())
        lock = facts.locks[facts.name_of(row)].packages
        shares = names_of(share_packages(components, facts.cuda_by_name[row.cuda], lock))
        for component in components:
            if component.frameworks:
                assert [
                    name for name in shares[component.name] if fnmatchcase(name, "nvidia-*")
                ] == []


def test_the_libraries_of_other_builds_are_known_by_name(facts: Facts) -> None:
    """List the packages that ``pip freeze`` shows of a CUDA build, and that an image without CUDA
    must not get.

    Never a package of the image.
    """
    rows = {facts.name_of(row): row for row in facts.targets}
    cpu, cuda = (
        make_plan(request_for(rows[name], facts), facts)
        for name in ("pytorch-2.13.0-cpu-py311-debian12", "pytorch-2.4.1-cu121-py311-debian12")
    )
    assert {"nvidia-cublas-cu12", "nvidia-cublas", "nvidia-cudnn-cu12", "triton"} <= {
        *cpu.libraries
    }
    assert not {"torch", "nvidia-ml-py", "numpy"} & {*cpu.libraries, *cuda.libraries}
    assert not set(cuda.libraries) & set(cuda.protected)
