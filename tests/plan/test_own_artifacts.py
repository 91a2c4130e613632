"""Wheels of smp and smddp that a user gives for one build: planned, rendered,
named apart, and in the provenance.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from trainworks.cli import main
from trainworks.errors import UnknownNameError
from trainworks.facts.rows import Facts
from trainworks.plan.model import ImagePlan, Request
from trainworks.plan.own_artifacts import OwnArtifact, read_own_artifact
from trainworks.plan.resolve import make_plan
from trainworks.render.dockerfile import render

SUM = "ab" * 32
SMP_URL = (
    "https://wheels.example/a%20b/smdistributed_modelparallel-1.11.2-cp38-cp38-linux_x86_64.whl"
)
SMDDP_URL = "https://wheels.example/smdistributed_dataparallel-1.4.3-cp38-cp38-linux_x86_64.whl"
SMP = f"smp={SMP_URL}#sha256={SUM}"
SMDDP = f"smddp={SMDDP_URL}#sha256={SUM}"


def plan_with(facts: Facts, *words: str, cuda: str = "cu113", sources: str = "vendor") -> ImagePlan:
    artifacts = tuple(read_own_artifact(word) for word in words)
    request = Request(
        framework="pytorch",
        cuda=cuda,
        sources=sources,  # type: ignore[arg-type]
        artifacts=artifacts,
    )
    return make_plan(request, facts)


@pytest.mark.parametrize(
    ("name", "word", "url"), [("smp", SMP, SMP_URL), ("smddp", SMDDP, SMDDP_URL)]
)
def test_the_plan_has_the_wheel_with_its_sum_and_version(
    facts: Facts, name: str, word: str, url: str
) -> None:
    usual, plan = plan_with(facts), plan_with(facts, word)
    (step,) = (step for step in plan.steps if step.component == name)
    assert (step.artifacts[0].url, step.artifacts[0].sha256) == (url, SUM)
    assert step.version == step.artifacts[0].version == read_own_artifact(word).file.split("-")[1]
    others = [step for step in plan.steps if step.component not in (name, "manifest")]
    assert others == [step for step in usual.steps if step.component not in (name, "manifest")]
    assert not [line for line in plan.unlocked if line.startswith(f"{name} ")]
    assert plan.tags == (f"{usual.tags[0]}-{name}-{SUM[:8]}",)


def test_both_at_once_are_rendered_and_checked(facts: Facts) -> None:
    plan = plan_with(facts, SMP, SMDDP)
    files = {
        file.path: file.content.decode()
        for file in render(plan, facts).files
        if file.path.startswith("artifacts/")
    }
    for name, url in (("smp", SMP_URL), ("smddp", SMDDP_URL)):
        assert f"{url} {SUM} " in files[f"artifacts/{name}.txt"]
    versions = {
        getattr(check, "distribution", ""): getattr(check, "version", "") for check in plan.checks
    }
    assert versions["smdistributed-modelparallel"] == "1.11.2"
    assert versions["smdistributed-dataparallel"] == "1.4.3"


def test_the_request_that_provenance_states_has_them() -> None:
    request = Request(
        framework="pytorch", cuda="cu113", sources="vendor", artifacts=(read_own_artifact(SMP),)
    )
    assert asdict(request)["artifacts"] == ({"name": "smp", "url": SMP_URL, "sha256": SUM},)
    assert str(OwnArtifact("smp", SMP_URL, SUM)) == SMP


@pytest.mark.parametrize(
    "text",
    [
        "smp",
        f"smp={SMP_URL}",
        f"smp={SMP_URL}#sha256=abc",
        f"smp=http://wheels.example/a-1-cp38-cp38-any.whl#sha256={SUM}",
        f"smp=https://wheels.example/a.tar.gz#sha256={SUM}",
        f"smp=https://wheels.example/a.whl#sha256={SUM}",
    ],
)
def test_what_is_not_a_wheel_with_its_sum_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not"):
        read_own_artifact(text)


def test_what_a_target_does_not_take_is_refused_with_what_it_takes(facts: Facts) -> None:
    with pytest.raises(
        UnknownNameError, match="takes no wheel of that name from an address"
    ) as refused:
        plan_with(facts, SMP.replace("smp=", "metis="))
    assert refused.value.hint == "available: smddp, smp"
    with pytest.raises(UnknownNameError, match=r"has Python 3\.10") as refused:
        plan_with(facts, SMP, cuda="cu118")
    assert refused.value.hint == "give a wheel for cp310"
    with pytest.raises(UnknownNameError, match="takes no wheel of that name"):
        plan_with(facts, SMP, cuda="cu121", sources="packages")


def test_the_command_plans_it(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--framework",
        "pytorch",
        "--cuda",
        "cu113",
        "--sources",
        "vendor",
        "--until",
        "plan",
        "--root",
        str(root),
    ]
    assert main([*words, "--artifact", SMP]) == 0
    printed = capsys.readouterr().out
    assert "1.11.2" in printed
    assert f"-smp-{SUM[:8]}" in printed
    assert main([*words, "--artifact", "smp=nothing"]) == 2
    assert "write NAME=URL#sha256=HASH" in capsys.readouterr().err
