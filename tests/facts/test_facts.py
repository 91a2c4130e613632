"""The real rows: complete, sourced, and in step with the recipes and the locks."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from trainworks.facts import lockfile
from trainworks.facts.load import load
from trainworks.facts.ranges import satisfies
from trainworks.facts.rows import Facts
from trainworks.plan.components import choose_parts
from trainworks.plan.package_ownership import list_python_patterns
from trainworks.plan.target import context_of, find_artifact_rows


def test_every_row_says_where_it_comes_from(facts: Facts) -> None:
    sources = [
        row.source
        for rows in (facts.bases, facts.cudas, facts.components, facts.stacks)
        for row in rows
    ]
    sources += [
        row.source
        for rows in (
            facts.instances,
            facts.families,
            facts.fabric,
            facts.generated_files,
            facts.privileged_files,
        )
        for row in rows
    ]
    sources += [
        row.source
        for rows in (facts.targets, facts.artifacts, facts.base_images, facts.rules)
        for row in rows
    ]
    assert len(sources) > 60
    assert [source for source in sources if len(source) < 8] == []


def test_every_artifact_is_reached_by_a_target(facts: Facts) -> None:
    reached = set()
    for row in facts.targets:
        target = context_of(row, facts)
        parts = choose_parts(target, list(target.components.values()), facts)
        for artifacts in parts.artifacts.values():
            reached |= {(artifact.name, artifact.version, artifact.file) for artifact in artifacts}
    lost = {
        f"{artifact.name} {artifact.version}"
        for artifact in facts.artifacts
        if (artifact.name, artifact.version, artifact.file) not in reached
    }
    assert lost == set()


def test_components_and_recipes_are_the_same_set(facts: Facts) -> None:
    assert set(facts.recipes) == {row.recipe_name for row in facts.components}


def test_targets_and_locks_are_the_same_set(facts: Facts) -> None:
    assert set(facts.locks) == {facts.name_of(row) for row in facts.targets}


def test_of_optional_components_only_inputs_of_others_do_not_say_what_their_absence_costs(
    facts: Facts,
) -> None:
    """The loader refuses other rows of packages without this key (golden/facts/problems.txt)."""
    silent = {row.name for row in facts.components if not row.required and not row.without}
    inputs = {"cpython", "cudnn", "cmake", "cuda-headers", "efa-installer", "libfabric", "boost"}
    assert silent == inputs, (
        "images/components.toml: a component that an image can lack has the key 'without'; one"
        " that is only an input of vendors' parts has none, and is named in this test"
    )


def test_rows_and_locks_have_the_same_versions(facts: Facts) -> None:
    """Every version that a target declares is that of the first distribution
    that the component's row names.
    """
    compared = 0
    for row in facts.targets:
        cuda = facts.cuda_by_name[row.cuda]
        for name, version in {**facts.stack_by_name[row.stack].components, **row.versions}.items():
            component = context_of(row, facts).fitting.get(name)
            if component is None or not component.python:
                continue
            pattern = list_python_patterns(component, cuda)[0]
            packages = facts.locks[facts.name_of(row)].packages
            locked = {
                package.version
                for package in packages
                if fnmatchcase(package.name, pattern)
                and package.build is (name == "builder" or component.build_only)
            }
            if find_artifact_rows(component, context_of(row, facts), facts):
                # A file that is downloaded by itself has a build of its own; the lock has the
                # requirements of the same version.
                version = version.partition("+")[0]
            assert version in locked, f"{facts.name_of(row)}: {name} {version}, locked {locked}"
            compared += 1
    assert compared >= 6 * len(facts.targets)


@pytest.mark.parametrize("name", ["cuda", "nccl"])
def test_every_cuda_target_declares_what_its_framework_pulls_in(name: str, facts: Facts) -> None:
    with_cuda = [row for row in facts.targets if facts.cuda_by_name[row.cuda].version]
    assert [
        facts.name_of(row) for row in with_cuda if name not in context_of(row, facts).versions
    ] == []


def test_every_target_has_its_framework_in_the_version_that_it_is_named_after(facts: Facts) -> None:
    for row in facts.targets:
        target = context_of(row, facts)
        own = [component.name for component in target.fitting.values() if component.frameworks]
        declared = [
            target.versions[name].partition("+")[0] for name in own if name in target.versions
        ]
        assert row.version in declared, facts.name_of(row)


def test_every_cuda_target_has_one_cudnn(facts: Facts) -> None:
    """Find one cuDNN: from the base image, or as a wheel of its own component or of the framework's
    requirements.
    """
    for row in facts.targets:
        if facts.cuda_by_name[row.cuda].version and "cudnn" not in context_of(row, facts).versions:
            names = [package.name for package in facts.locks[facts.name_of(row)].packages]
            suffix = facts.cuda_by_name[row.cuda].wheel_suffix
            assert [name for name in names if name.startswith("nvidia-cudnn-")] == [
                f"nvidia-cudnn-{suffix}"
            ]


def test_the_cuda_of_a_target_is_that_of_its_cell(facts: Facts) -> None:
    for row in facts.targets:
        if cell := facts.cuda_by_name[row.cuda].version:
            assert context_of(row, facts).versions["cuda"].startswith(cell + ".")


def test_every_dependency_in_a_lock_is_in_the_lock(facts: Facts) -> None:
    for lock in facts.locks.values():
        for build in (False, True):
            names = {package.name for package in lock.packages if package.build is build}
            needed = {
                need
                for package in lock.packages
                if package.build is build
                for need in package.requires
            }
            assert needed <= names, lock.target


def test_loading_twice_gives_the_same_facts(facts: Facts, root: Path) -> None:
    assert load(root) == facts


def test_facts_are_frozen(facts: Facts) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        facts.targets[0].version = "0"  # type: ignore[misc]


def test_generated_files_are_what_the_facts_say(root: Path) -> None:
    done = subprocess.run(
        [sys.executable, "tools/generate.py", "--check"], cwd=root, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr.decode()) == (0, "")


def test_schemas_know_every_key_of_every_file(facts: Facts, root: Path) -> None:
    frameworks = {row.framework for row in facts.targets}
    files = [*(root / "images").glob("*.toml"), *(root / "images" / "lock").glob("*.toml")]
    for path in files:
        shared = path.name in {lockfile.ARTIFACTS, lockfile.BASE_IMAGES, lockfile.ARCHIVES}
        in_lock = f"lock-{path.stem}" if shared else "lock"
        kind = path.stem
        if path.parent.name == "lock":
            kind = in_lock
        elif path.stem in frameworks:
            kind = "framework"
        schema = json.loads(
            (root / "images" / "schema" / f"{kind}.json").read_text(encoding="utf-8")
        )
        for key, value in tomllib.loads(path.read_text(encoding="utf-8")).items():
            assert key in schema["properties"], path
            if isinstance(value, list):
                shape = schema["properties"][key]["items"]
                for row in value:
                    assert row.keys() <= shape["properties"].keys(), path
                    assert set(shape["required"]) <= row.keys(), path


def test_the_preflights_table_is_what_the_rows_say(facts: Facts, root: Path) -> None:
    table = json.loads(
        (root / "launcher" / "trainworks_preflight" / "facts.json").read_text(encoding="utf-8")
    )
    written_rows = [{"name": name, **row} for name, row in table["instances"].items()]
    expected = [dataclasses.asdict(row) for row in facts.instances]
    assert written_rows == [
        {name: row[name] for name in row if name != "source"} for row in expected
    ], "make docs"
    assert table["families"] == [row.name for row in facts.families]


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ({}, {"FI_PROVIDER", "FI_EFA_USE_DEVICE_RDMA", "RDMAV_FORK_SAFE"}),
        ({"libfabric": "1.11.1"}, {"FI_PROVIDER", "FI_EFA_USE_DEVICE_RDMA", "RDMAV_FORK_SAFE"}),
        ({"libfabric": "1.13"}, {"FI_PROVIDER", "FI_EFA_USE_DEVICE_RDMA", "FI_EFA_FORK_SAFE"}),
        (
            {"libfabric": "1.17.1amzn1.0"},
            {"FI_PROVIDER", "FI_EFA_USE_DEVICE_RDMA", "FI_EFA_FORK_SAFE"},
        ),
        ({"libfabric": "2.7.0amzn2.0"}, {"FI_PROVIDER", "FI_EFA_FORK_SAFE"}),
        ({"libfabric": "2.7.0", "aws-ofi-nccl": "1.22.0"}, {"FI_PROVIDER", "FI_EFA_FORK_SAFE"}),
        (
            {"libfabric": "2.7.0", "aws-ofi-nccl": "1.5.0-aws"},
            {"FI_PROVIDER", "FI_EFA_FORK_SAFE", "NCCL_PROTO"},
        ),
        (
            {"libfabric": "1.18.1", "efa-installer": "1.24.1", "nccl": "2.19.3"},
            {"FI_PROVIDER", "FI_EFA_FORK_SAFE", "FI_EFA_SET_CUDA_SYNC_MEMOPS"},
        ),
        (
            {"libfabric": "1.19.0", "efa-installer": "1.29.1", "nccl": "2.19.3"},
            {"FI_PROVIDER", "FI_EFA_FORK_SAFE"},
        ),
        (
            {"libfabric": "1.18.1", "efa-installer": "1.24.1", "nccl": "2.18.3"},
            {"FI_PROVIDER", "FI_EFA_FORK_SAFE"},
        ),
    ],
)
def test_versions_decide_what_hosts_with_efa_need(
    facts: Facts, versions: dict[str, str], expected: set[str]
) -> None:
    chosen = set()
    for row in facts.fabric:
        if all(satisfies(versions.get(name), row.when[name], {}) for name in row.when):
            chosen.add(row.name)
    assert chosen == expected
