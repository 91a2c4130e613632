"""Dockerfiles of extensions: golden, portable, closed in themselves."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from trainworks.facts.rows import SourceFile
from trainworks.host.pip import PipSettings
from trainworks.host.settings import HostSettings
from trainworks.plan.extend import EntryPoint, ExtensionPlan, make_extension
from trainworks.plan.requirements import BaseImage, Distribution
from trainworks.render.dockerfile import Rendering
from trainworks.render.extend import TEMPLATE, render_extension

REQUIREMENTS = "six==1.17.0 --hash=sha256:" + "0" * 64 + "\n"

OURS = BaseImage(
    reference="trainworks/pytorch-training:2.13.0-cpu-py311-debian12",
    identifier="sha256:" + "b" * 64,
    python="/opt/venv/bin/python",
    version="3.11",
    glibc="2.36",
    machine="x86_64",
    environment={"PATH": "/opt/venv/bin:/opt/ml/code:/usr/bin", "SAGEMAKER_SUBMIT_DIRECTORY": "/opt/ml/code"},
    distributions=(Distribution(name="torch", version="2.13.0+cpu"),),
)
AWS = replace(
    OURS,
    reference="123456789012.dkr.ecr.eu-west-1.amazonaws.com/pytorch-training:2.4-gpu-py311",
    digest="123456789012.dkr.ecr.eu-west-1.amazonaws.com/pytorch-training@sha256:" + "d" * 64,
    python="/opt/conda/bin/python",
    environment={"PATH": "/opt/conda/bin:/usr/bin"},
    launcher=False,
)


def plan_of(base: BaseImage, *, requirements: str = REQUIREMENTS, resolved: bool = True) -> ExtensionPlan:
    return make_extension(
        tag="my/train:1",
        base=base,
        requirements=requirements,
        locked=(("six", "1.17.0"),) if requirements else (),
        resolved=resolved,
        files=(
            SourceFile(path="train.py", content=b"import six\n"),
            SourceFile(path="bin/tool", content=b"#!/bin/sh\n", mode=0o755),
        ),
        entry_point=EntryPoint(kind="script", name="train.py", file="train.py"),
    )


PLANS = {
    "ours": plan_of(OURS),
    "aws": plan_of(AWS, resolved=False),
    "debian-python": plan_of(replace(AWS, digest="", python="/usr/bin/python3", managed=True)),
    "code-only": plan_of(OURS, requirements=""),
}


@pytest.fixture(scope="module", params=list(PLANS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def rendering(name: str, root: Path) -> Rendering:
    return render_extension(PLANS[name], (root / "templates" / TEMPLATE).read_text(encoding="utf-8"))


def test_golden(name: str, rendering: Rendering, golden: Callable[[str, str], None]) -> None:
    golden(f"extend/{name}/Dockerfile", rendering.dockerfile)


def test_what_is_copied_or_mounted_is_there_and_nothing_else(rendering: Rendering) -> None:
    used = set(re.findall(r"type=bind,source=([^\s,]+)", rendering.dockerfile))
    used |= set(re.findall(r"^COPY (\S+) ", rendering.dockerfile, re.MULTILINE))
    assert {file.path.split("/", 1)[0] for file in rendering.files} == used


def test_secrets_are_those_of_the_host(rendering: Rendering) -> None:
    wanted = set(re.findall(r"type=secret,id=([^\s,]+)", rendering.dockerfile))
    assert wanted <= HostSettings(pip=PipSettings()).secrets("", "").keys()
    assert set(re.findall(r"/run/secrets/([\w.]+)", rendering.dockerfile)) == wanted


def test_only_portable_instructions(rendering: Rendering) -> None:
    joined = re.sub(r"(?m)^\s*#.*\n", "", rendering.dockerfile).replace("\\\n", " ")
    words = {line.split(" ", 1)[0] for line in joined.splitlines() if line.strip()}
    assert words <= {"FROM", "RUN", "COPY", "ENV", "LABEL"}


def test_another_base_of_the_same_name_gives_another_digest(root: Path) -> None:
    """Else an image would be taken for unchanged when its base was built again."""
    template = (root / "templates" / TEMPLATE).read_text(encoding="utf-8")
    other = plan_of(replace(OURS, identifier="sha256:" + "c" * 64))
    assert render_extension(other, template).digest != render_extension(PLANS["ours"], template).digest


def test_permissions_of_the_code_are_kept(rendering: Rendering) -> None:
    modes = {file.path: file.mode for file in rendering.files}
    assert (modes["code/bin/tool"], modes["code/train.py"]) == (0o755, 0o644)


def test_every_golden_folder_is_a_plan(root: Path) -> None:
    assert {path.name for path in (root / "tests" / "golden" / "extend").iterdir()} == set(PLANS)
