"""Rules: each with the smallest plan that breaks it and the nearest one that keeps it.

Known-bad sets of versions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from trainworks.errors import CompatibilityError
from trainworks.facts.ranges import PROPERTIES, Properties, Value, references, satisfies
from trainworks.facts.rows import Artifact, BaseImage, Facts, Rule
from trainworks.plan.compatibility import all_hold, find_conflicts
from trainworks.plan.components import choose_parts, collect_artifact_properties, collect_properties
from trainworks.plan.resolve import plan_row, plan_target
from trainworks.plan.target import context_of
from trainworks.plan.variants import choose_usual_components
from trainworks.render.dockerfile import render


@dataclass(frozen=True)
class Case:
    """The smallest plan that breaks a rule, and the change that keeps the rule."""

    rule: str
    broken: Properties
    change: Mapping[str, Value | None]


def case(rule: str, broken: Mapping[str, Value], **change: Value | None) -> Case:
    return Case(
        rule,
        broken,
        {name.replace("_", "-").replace("--", "."): value for name, value in change.items()},
    )


def gpus(*names: str) -> frozenset[str]:
    return frozenset(names)


INDEX = {"sources": "packages"}
PYTORCH = {"framework": "pytorch"}

CASES = (
    case(
        "image-is-of-base", {"image.base": "ubuntu20.04", "base": "ubuntu22.04"}, base="ubuntu20.04"
    ),
    case(
        "builder-image-is-of-base",
        {"builder.base": "ubuntu22.04", "base": "ubuntu20.04"},
        base="ubuntu22.04",
    ),
    case("builder-cuda-is-image-cuda", {"builder.cuda": "12.8.0", "cuda": "12.8.1"}, cuda="12.8.0"),
    case("cuda-is-the-cells", {"cell.cuda": "11.6", "cuda": "11.3.1"}, cuda="11.6.2"),
    case("driver-cuda-11", {"cuda": "11.8.0", "driver": "450.80"}, driver="450.80.02"),
    case("driver-cuda-12", {"cuda": "12.0.0", "driver": "520.61.05"}, driver="525.60.13"),
    case("driver-cuda-13", {"cuda": "13.0.0", "driver": "575.57.08"}, driver="580.65.06"),
    case("launcher-python", {"base": "debian10", "base.python": "3.7"}, base__python="3.8"),
    case(
        "python-is-there", {"base.pythons": frozenset({"3.10"}), "python": "3.11"}, cpython="3.11.9"
    ),
    case("cpython-is-the-targets", {"cpython": "3.11.9", "python": "3.12"}, python="3.11"),
    case(
        "architectures-cuda-11",
        {"cuda": "11.8", "architectures": gpus("90", "100")},
        architectures=gpus("90"),
    ),
    case(
        "architectures-before-cuda-11.8",
        {"cuda": "11.7.1", "architectures": gpus("80", "90")},
        architectures=gpus("80"),
    ),
    case(
        "architectures-before-cuda-12.8",
        {"cuda": "12.6.3", "architectures": gpus("90", "120")},
        architectures=gpus("90"),
    ),
    case(
        "architectures-cuda-12",
        {"cuda": "12.0", "architectures": gpus("35", "80")},
        architectures=gpus("80"),
    ),
    case(
        "architectures-cuda-13",
        {"cuda": "13.0.2", "architectures": gpus("70", "80")},
        architectures=gpus("75", "80"),
    ),
    case("cudnn-cuda-11", {"cuda": "11.0", "cudnn": "7.6.5.32"}, cudnn="8.0.4.30"),
    case("cudnn-cuda-13", {"cuda": "13.0", "cudnn": "8.9.7.29"}, cudnn="9.13.0.50"),
    case("torch-cudnn-8", {**PYTORCH, "torch": "2.3.1", "cudnn": "9.1.0.70"}, cudnn="8.9.2.26"),
    case("torch-cudnn-9", {**PYTORCH, "torch": "2.4.0", "cudnn": "8.9.2.26"}, cudnn="9.1.0.70"),
    case("tensorflow-cudnn-9", {"tensorflow": "2.18.0", "cudnn": "8.9.6.50"}, cudnn="9.3.0.75"),
    case("tensorflow-cudnn-8", {"tensorflow": "2.17.0", "cudnn": "9.3.0.75"}, cudnn="8.9.6.50"),
    case(
        "torch-build-cuda-11",
        {"torch.build": "cu113", "cell": "cu116", "cell.cuda": "11.6"},
        torch__build="cu116",
    ),
    case(
        "torch-build-cuda-12",
        {"torch.build": "cu128", "cell": "cu126", "cell.cuda": "12.6"},
        torch__build="cu124",
    ),
    case(
        "torch-build-cuda-13",
        {"torch.build": "cu129", "cell": "cu133", "cell.cuda": "13.3"},
        torch__build="cu130",
    ),
    case("torch-build-cpu", {"torch.build": "cu121", "cell": "cpu"}, torch__build="cpu"),
    case("torch-1.10-cuda", {**PYTORCH, "torch": "1.10.2", "cuda": "11.6.2"}, cuda="11.3.1"),
    case("torch-2.0-cuda", {**PYTORCH, "torch": "2.0.1", "cuda": "12.1.0"}, cuda="11.8.0"),
    case("torch-2.4-cuda", {**PYTORCH, "torch": "2.5.1", "cuda": "12.6.3"}, cuda="12.4.1"),
    case("torch-2.6-cuda", {**PYTORCH, "torch": "2.6.0", "cuda": "12.1.1"}, cuda="12.6.3"),
    case("torch-2.7-cuda", {**PYTORCH, "torch": "2.7.1", "cuda": "12.4.1"}, cuda="12.8.1"),
    case("torch-2.9-cuda", {**PYTORCH, "torch": "2.10.0", "cuda": "12.9.1"}, cuda="13.0.2"),
    case("torch-2.11-cuda", {**PYTORCH, "torch": "2.11.0", "cuda": "12.4.1"}, cuda="12.9.1"),
    case(
        "torch-2.12-cuda-of-the-index",
        {**PYTORCH, "torch": "2.14.1", "cuda": "13.2.86", **INDEX},
        cuda="13.0.96",
    ),
    case(
        "torch-2.15-cuda-of-the-index",
        {**PYTORCH, "torch": "2.15.0", "cuda": "13.0.96", **INDEX},
        cuda="13.2.86",
    ),
    case("torch-python-3.10", {"torch": "1.10.2", "python": "3.10"}, python="3.9"),
    case("torch-python-3.11", {"torch": "1.13.1", "python": "3.11"}, python="3.10"),
    case("torch-python-3.12", {"torch": "2.1.2", "python": "3.12"}, python="3.11"),
    case("torch-python-3.13", {"torch": "2.5.1", "python": "3.13"}, python="3.12"),
    case("torch-python-3.14", {"torch": "2.8.0", "python": "3.14"}, python="3.13"),
    case("tensorflow-2.5-cuda", {"tensorflow": "2.11.1", "cuda": "12.0"}, cuda="11.2.2"),
    case("tensorflow-2.12-cuda", {"tensorflow": "2.14.0", "cuda": "11.7.1"}, cuda="11.8.0"),
    case("tensorflow-2.15-cuda", {"tensorflow": "2.15.1", "cuda": "12.1.1"}, cuda="12.2.2"),
    case("tensorflow-2.16-cuda", {"tensorflow": "2.17.1", "cuda": "12.2.2"}, cuda="12.3.2"),
    case("tensorflow-2.18-cuda", {"tensorflow": "2.21.0", "cuda": "13.0.2"}, cuda="12.9.1"),
    case(
        "nccl-architectures-cuda-12",
        {"nccl": "2.10.3", "cuda": "12.0.0", "sources": "vendor"},
        architectures=gpus("70", "80"),
    ),
    case(
        "nccl-build-is-not-newer",
        {"nccl.build": "cuda12.9", "cuda": "12.5.1"},
        nccl__build="cuda12.5",
    ),
    case(
        "efa-installer-base", {"efa-installer": "1.22.0", "base": "ubuntu18.04"}, base="ubuntu22.04"
    ),
    case(
        "efa-installer-ubuntu20.04",
        {"efa-installer": "1.43.0", "base": "ubuntu20.04"},
        efa_installer="1.42.0",
    ),
    case(
        "efa-installer-ubuntu22.04",
        {"efa-installer": "1.17.3", "base": "ubuntu22.04"},
        efa_installer="1.18.0",
    ),
    case(
        "efa-installer-ubuntu24.04",
        {"efa-installer": "1.32.0", "base": "ubuntu24.04"},
        efa_installer="1.33.0",
    ),
    case(
        "efa-installer-amzn2023",
        {"efa-installer": "1.24.1", "base": "amzn2023"},
        efa_installer="1.25.0",
    ),
    case(
        "efa-installer-debian12",
        {"efa-installer": "1.35.0", "base": "debian12"},
        efa_installer="1.36.0",
    ),
    case(
        "efa-installer-debian13",
        {"efa-installer": "1.45.1", "base": "debian13"},
        efa_installer="1.46.0",
    ),
    case(
        "efa-installer-ngc",
        {
            "efa-installer": "1.48.0",
            "base": "amzn2023",
            "cuda": "13.0.2",
            "efa-installer.flags": frozenset(),
        },
        efa_installer__flags=frozenset({"--disable-ngc"}),
    ),
    case(
        "efa-installer-1.47.0",
        {"efa-installer": "1.47.0", "aws-ofi-nccl": "1.18.0"},
        aws_ofi_nccl="1.20.0",
    ),
    case("aws-ofi-nccl-broadcast-hang", {"aws-ofi-nccl": "1.18.0"}, aws_ofi_nccl="1.20.0"),
    case(
        "aws-ofi-nccl-needs-libfabric",
        {"aws-ofi-nccl": "1.7.4", "nccl": "2.19.3"},
        libfabric="1.18.1",
    ),
    case("aws-ofi-nccl-nccl-2.4.8", {"aws-ofi-nccl": "1.1.1", "nccl": "2.4.7"}, nccl="2.4.8"),
    case("aws-ofi-nccl-nccl-2.17.1", {"aws-ofi-nccl": "1.10.0", "nccl": "2.16.5"}, nccl="2.17.1"),
    case("aws-ofi-nccl-nccl-tested", {"aws-ofi-nccl": "1.21.1", "nccl": "2.32.3"}, nccl="2.31.2"),
    case(
        "aws-ofi-nccl-cuda-headers",
        {"aws-ofi-nccl": "1.21.1", "cuda-headers": "12.1.105"},
        cuda_headers="12.2.53",
    ),
    case(
        "aws-ofi-nccl-libfabric-1.18",
        {"aws-ofi-nccl": "1.8.1", "libfabric": "1.17.1"},
        libfabric="1.18.0amzn1.0",
    ),
    case(
        "aws-ofi-nccl-libfabric-1.22",
        {"aws-ofi-nccl": "1.14.2", "libfabric": "1.21.0amzn1.0"},
        libfabric="1.22.0",
    ),
    case(
        "nccl-2.19-sync-memops",
        {"efa-installer": "1.28.0", "nccl": "2.19.3"},
        efa_installer="1.29.1",
    ),
    case("aws-ofi-nccl-gpudirect", {"aws-ofi-nccl": "1.7.4"}, aws_ofi_nccl="1.7.3"),
    case("gdrcopy-prefix", {"gdrcopy": "2.1"}, gdrcopy="2.2"),
    case(
        "smp-open-mpi", {"smp": "1.7.0", "open-mpi": "5.0.3", "sources": "vendor"}, open_mpi="4.1.1"
    ),
    case(
        "smddp-open-mpi",
        {"smddp": "1.4.0", "open-mpi": "5.0.3", "sources": "vendor"},
        open_mpi="4.1.1",
    ),
    case(
        "metis-5.1.0-cmake-4",
        {"metis": "5.1.0", "sources": "vendor", "cmake": "4.0.0"},
        cmake="3.31.6",
    ),
    case("metis-gklib", {"metis": "5.2.1", "sources": "vendor"}, gklib="5.1.1"),
    case(
        "rmm-cmake-3.14", {"rmm": "0.15.0", "sources": "vendor", "cmake": "3.13.5"}, cmake="3.14.0"
    ),
    case(
        "rmm-cmake-3.18",
        {"rmm": "21.06.00", "sources": "vendor", "cmake": "3.17.5"},
        cmake="3.18.2.post1",
    ),
    case(
        "rmm-cmake-3.23",
        {"rmm": "22.12.00", "sources": "vendor", "cmake": "3.23.0"},
        cmake="3.23.1",
    ),
    case("rmm-nvtx", {"rmm": "0.15.0", "sources": "vendor", "cuda": "12.9.1"}, cuda="12.8.1"),
    case("smp-smddp", {"smp": "1.7.0", "sources": "vendor"}, smddp="1.4.0"),
    case("smp-libraries", {"smp": "1.7.0", "rmm": "0.15.0", "sources": "vendor"}, metis="5.1.0"),
    case("smp-torch", {"smp": "1.15.0", "torch": "2.1.0", "sources": "vendor"}, torch="2.0.1"),
    case(
        "smp-tensorflow",
        {"smp": "1.8.0", "tensorflow": "2.7.0", "sources": "vendor"},
        tensorflow="2.6.3",
    ),
    case("smp-cuda", {"smp": "1.15.0", "cuda": "12.1.0", "sources": "vendor"}, cuda="11.8.0"),
    case("smp-2", {"smp": "2.8.0", "sources": "vendor"}, smp="1.15.0"),
    case("smddp-cuda", {"smddp": "2.6.0", "cuda": "13.0.0", "sources": "vendor"}, cuda="12.4.1"),
    case("smddp-torch", {"smddp": "2.6.0", "torch": "2.6.0", "sources": "vendor"}, torch="2.5.1"),
    case(
        "smddp-tensorflow",
        {"smddp": "1.8.0", "tensorflow": "2.12.0", "sources": "vendor"},
        tensorflow="2.11.1",
    ),
    case("smddp-boost", {"smddp": "1.4.0", "boost": "1.74.0", "sources": "vendor"}, boost="1.73.0"),
    case(
        "smddp-openssl",
        {"smddp": "2.3.0", "base": "ubuntu22.04", "sources": "vendor"},
        base="ubuntu20.04",
    ),
    case("smddp-gdrcopy", {"smddp": "1.7.0", "sources": "vendor"}, gdrcopy="2.3.1"),
    case("smddp-libfabric", {"smddp": "1.2.0", "sources": "vendor"}, libfabric="1.14.1"),
    case("smddp-instance-type", {"smddp": "2.3.0", "sources": "vendor"}, smddp="2.2.0"),
    case("smddp-smdebug", {"smddp": "1.4.0", "sources": "vendor"}, smddp=None),
)


def properties_that_hold(rule_case: Case) -> Properties:
    changed = {**rule_case.broken, **rule_case.change}
    return {name: value for name, value in changed.items() if value is not None}


def rule_of(name: str, facts: Facts) -> Rule:
    return next(rule for rule in facts.rules if rule.name == name)


def test_every_rule_has_its_two_cases(facts: Facts) -> None:
    assert [rule_case.rule for rule_case in CASES] == [rule.name for rule in facts.rules]


@pytest.mark.parametrize("rule_case", CASES, ids=lambda rule_case: rule_case.rule)
def test_rule(rule_case: Case, facts: Facts) -> None:
    rule = rule_of(rule_case.rule, facts)
    conditions = {**rule.when, **rule.require}
    names = {
        *conditions,
        *(name for allowed in conditions.values() for name in references(allowed)),
    }
    assert rule_case.broken.keys() | rule_case.change.keys() <= names, (
        "a smallest plan has nothing that the rule does not ask about"
    )
    assert [conflict.rule for conflict in find_conflicts([rule], rule_case.broken)] == [
        rule_case.rule
    ]
    assert find_conflicts([rule], properties_that_hold(rule_case)) == ()
    if rule.require:
        assert all_hold(rule.when, properties_that_hold(rule_case)), (
            "the rule has to speak about the plan that keeps it"
        )


@pytest.mark.parametrize("rule_case", CASES, ids=lambda rule_case: rule_case.rule)
def test_a_conflict_says_all(rule_case: Case, facts: Facts) -> None:
    rule = rule_of(rule_case.rule, facts)
    (conflict,) = find_conflicts([rule], rule_case.broken)
    for part in (rule.name, rule.reason, rule.source, rule.instead, *rule.when, *rule.require):
        assert part in str(conflict)


def test_all_conflicts_are_said_at_once(facts: Facts) -> None:
    properties: Properties = {
        "smp": "1.15.0",
        "torch": "2.1.0",
        "cuda": "12.1.0",
        "sources": "vendor",
    }
    broken_rules = {conflict.rule for conflict in find_conflicts(facts.rules, properties)}
    assert {"smp-torch", "smp-cuda", "smp-libraries", "smp-open-mpi"} <= broken_rules


def test_no_artifact_says_again_what_a_rule_says(facts: Facts) -> None:
    """A breach would be said twice, and once without a reason."""
    again = [
        (rule.name, artifact.version)
        for artifact in facts.artifacts
        for rule in facts.rules
        if list(rule.when) == [artifact.name]
        and satisfies(artifact.version, rule.when[artifact.name], {})
        if rule.require.items() & artifact.requires.items()
    ]
    assert again == []


# From rows to properties.


@pytest.fixture
def row_facts(facts: Facts) -> Facts:
    """Give the facts with a vendor target that has everything a rule can ask about."""
    image = BaseImage(
        name="nvidia/cuda:base",
        base="ubuntu20.04",
        source="test",
        provides={"cuda": "11.3.1", "cudnn": "8.2.0"},
    )
    devel = replace(image, name="nvidia/cuda:devel")
    cuda = replace(facts.cudas[1], name="cu113", version="11.3", architectures=("70", "80"))
    stack = replace(
        facts.stacks[0], name="test", sources="vendor", components={"efa-installer": "1.15.2"}
    )
    artifacts = (
        Artifact(
            name="efa-installer",
            version="1.15.2",
            source="test",
            url="https://example.com/e",
            sha256="0" * 64,
            provides={"libfabric": "1.14.1"},
            flags=("--minimal",),
        ),
        Artifact(
            name="metis",
            version="5.2.1",
            source="test",
            url="https://example.com/m",
            together={"gklib": "1"},
        ),
        Artifact(name="gklib", version="1", source="test", url="https://example.com/g"),
    )
    row = replace(
        next(row for row in facts.targets if row.framework == "pytorch"),
        version="1.10.2",
        cuda="cu113",
        base="ubuntu20.04",
        stack="test",
        image=image.name,
        builder_image=devel.name,
        versions={"torch": "1.10.2+cu113", "metis": "5.2.1"},
    )
    return replace(
        facts,
        base_images=(image, devel),
        cudas=(cuda,),
        stacks=(stack,),
        artifacts=artifacts,
        targets=(row,),
    )


def test_what_a_target_can_be_asked_about(row_facts: Facts) -> None:
    (row,) = row_facts.targets
    components = [
        component
        for component in row_facts.components
        if component.name in {"efa-installer", "libfabric", "torch", "metis"}
    ]
    target = context_of(row, row_facts)
    parts = choose_parts(target, components, row_facts)
    properties = collect_properties(target, components) | collect_artifact_properties(
        parts.artifacts
    )
    assert properties == {
        "framework": "pytorch",
        "pytorch": "1.10.2",
        "torch": "1.10.2+cu113",
        "torch.build": "cu113",
        "metis": "5.2.1",
        "gklib": "1",
        "metis.flags": frozenset(),
        "efa-installer": "1.15.2",
        "efa-installer.flags": frozenset({"--minimal"}),
        "libfabric": "1.14.1",
        "cell": "cu113",
        "cell.cuda": "11.3",
        "cuda": "11.3.1",
        "cudnn": "8.2.0",
        "driver": row_facts.cudas[0].minimum_driver,
        "architectures": frozenset({"70", "80"}),
        "python": "3.8",
        "base": "ubuntu20.04",
        "base.python": "3.8",
        "base.pythons": frozenset({"3.8", "3.9"}),
        "glibc": "2.31",
        "sources": "vendor",
        "image.base": "ubuntu20.04",
        "builder.base": "ubuntu20.04",
        "builder.cuda": "11.3.1",
    }
    assert properties.keys() >= PROPERTIES.keys(), (
        "every property that the documentation names is one"
    )


def test_the_head_of_the_rules_explains_every_property(root: Path) -> None:
    text = (root / "images" / "compatibility.toml").read_text(encoding="utf-8")
    head = text.partition("\n\n")[0]
    explained = dict(re.findall(r"^#   ([a-z.]+) {2,}(.+)$", head, re.MULTILINE))
    meanings = {name: meaning.replace("`", "") for name, meaning in PROPERTIES.items()}
    assert {name: explained.get(name) for name in meanings} == meanings


def test_a_target_without_cuda_has_none_of_its_properties(facts: Facts) -> None:
    row = next(row for row in facts.targets if row.cuda == "cpu")
    target = replace(context_of(row, facts), versions={"cudnn": "9"})
    properties = collect_properties(target, ())
    assert (
        not {"cuda", "cell.cuda", "cudnn", "driver", "architectures", "image.base"}
        & properties.keys()
    )


def test_an_artifact_that_does_not_fit_is_said_beside_the_rules(row_facts: Facts) -> None:
    (row,) = row_facts.targets
    installer, *others = row_facts.artifacts
    spoiled = replace(
        row_facts,
        artifacts=(replace(installer, requires={"base": "ubuntu22.04"}), *others),
        rules=(
            Rule(
                name="flags", when={"efa-installer.flags": "!--x"}, reason="", instead="", source=""
            ),
            Rule(
                name="image",
                when={"image.base": "present"},
                reason="why",
                instead="else",
                source="who",
            ),
        ),
    )
    components = [
        component for component in spoiled.components if component.name == "efa-installer"
    ]
    with pytest.raises(CompatibilityError) as caught:
        plan_target(context_of(row, spoiled), components, spoiled)
    unfit, broken = caught.value.problems
    assert (
        unfit == "efa-installer 1.15.2: requires base ubuntu22.04; this target has base ubuntu20.04"
        " (source: test)"
    )
    assert broken.startswith("image: image.base ubuntu20.04: why")


def test_every_target_of_the_matrix_fits(facts: Facts) -> None:
    for row in facts.targets:
        target = context_of(row, facts)
        parts = choose_parts(target, choose_usual_components(target, facts), facts)
        assert (parts.unfit, parts.broken) == ((), ()), facts.name_of(row)


def test_advice_is_part_of_the_plan_and_refuses_nothing(facts: Facts) -> None:
    row = next(row for row in facts.targets if row.framework == "pytorch")
    rule = Rule(
        name="hint",
        when={"sources": "packages"},
        reason="r",
        instead="i",
        source="s",
        severity="advise",
    )
    advised = replace(facts, rules=(rule,))
    assert plan_row(row, advised).advice == ("hint: sources packages: r; instead: i (source: s)",)


def test_no_target_is_advised_to_do_what_its_image_does(facts: Facts) -> None:
    """A variable with a value that an advice names is not set in that image's Dockerfile."""
    advised_variables = set()
    for row in facts.targets:
        plan = plan_row(row, facts)
        text = render(plan, facts, check=False).dockerfile
        for advice in plan.advice:
            for name in re.findall(r"\b[A-Z][A-Z_]{5,}=\w+", advice):
                advised_variables.add(name)
                assert name not in text, f"{plan.target.name}: {advice}"
    assert advised_variables, "no target is advised to set a variable: this test looks at nothing"
