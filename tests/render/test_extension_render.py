"""Dockerfiles of extensions: golden, portable, closed in themselves."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from trainworks.extend.cuda_compiler import BARE, Workbench
from trainworks.extend.plan import EntryPoint, ExtensionPlan, WheelSource
from trainworks.extend.render import (
    RECIPES,
    Recipes,
    SandboxStep,
    packages_image,
    render_extension,
    render_packages,
    render_sandbox_step,
)
from trainworks.extend.requirements import BaseDistribution, ExtendedBase, ExtensionLock
from trainworks.facts.rows import SourceFile
from trainworks.host.apt import AptSource
from trainworks.render.dockerfile import Rendering

ARCHIVE = AptSource(uri="http://deb.example/debian", suite="bookworm", components="main")
REQUIREMENTS = "six==1.17.0 \\\n    --hash=sha256:" + "0" * 64 + "\n"

OURS = ExtendedBase(
    reference="trainworks/pytorch-training:2.13.0-cpu-py311-debian12",
    identifier="sha256:" + "b" * 64,
    python="/opt/venv/bin/python",
    version="3.11",
    glibc="2.36",
    machine="x86_64",
    environment={
        "PATH": "/opt/venv/bin:/opt/ml/code:/usr/bin",
        "SAGEMAKER_SUBMIT_DIRECTORY": "/opt/ml/code",
    },
    distributions=(BaseDistribution(name="torch", version="2.13.0+cpu"),),
    distribution="debian",
    suite="bookworm",
)
AWS = replace(
    OURS,
    reference="123456789012.dkr.ecr.eu-west-1.amazonaws.com/pytorch-training:2.4-gpu-py311",
    digest="123456789012.dkr.ecr.eu-west-1.amazonaws.com/pytorch-training@sha256:" + "d" * 64,
    python="/opt/conda/bin/python",
    environment={"PATH": "/opt/conda/bin:/usr/bin"},
    launcher=False,
)


SOURCES = (
    WheelSource(
        archive=b"one",
        origin="git+https://git.example/lib@v1",
        subdirectory="python",
        extras="[all]",
    ),
    WheelSource(archive=b"two", origin="--source"),
    WheelSource(archive=b"three", origin="./fused", name="fused"),
)
LOCAL = SourceFile(path="files/local-1.0-py3-none-any.whl", content=b"")
BENCH = Workbench(
    component="nvcc",
    requirements="nvidia-cuda-nvcc==13.2.86 --hash=sha256:" + "2" * 64 + "\n",
    whole=("fused",),
    variables={"TORCH_CUDA_ARCH_LIST": "8.0;9.0"},
)


def plan_of(
    base: ExtendedBase, *, requirements: str = REQUIREMENTS, project: bool = False
) -> ExtensionPlan:
    installed_files = ("requirements.txt", "setup.py") if project else ()
    apt_packages = ("libgl1", "g++") if project else ()
    inputs = (LOCAL,) if project else ()
    sources = SOURCES if project else ()
    return ExtensionPlan(
        tag="my/train:1",
        base=base,
        lock=ExtensionLock(pins=requirements),
        files=(
            SourceFile(path="train.py", content=b"import six\n"),
            SourceFile(path="bin/tool", content=b"#!/bin/sh\n", mode=0o755),
        ),
        entry_point=EntryPoint(kind="script", name="train.py", file="train.py"),
        sources=sources,
        inputs=inputs,
        apt=apt_packages,
        installed=installed_files,
    )


PLANS = {
    "ours": plan_of(OURS),
    "aws": plan_of(AWS),
    "debian-python": plan_of(replace(AWS, digest="", python="/usr/bin/python3", managed=True)),
    "code-only": plan_of(OURS, requirements=""),
    "project": plan_of(OURS, project=True),
}


QUESTIONS = {
    "build": SandboxStep(origin="git+https://git.example/lib@v1", files=(LOCAL,), bench=BARE),
    "compile": SandboxStep(origin="bad\nRUN name", bench=BENCH, tools=True),
    "import": SandboxStep(origin="", bench=BARE, modules=("torchvision", "pyarrow")),
}


@pytest.fixture(scope="module")
def recipes(root: Path) -> Recipes:
    texts = {name: (root / "templates" / name).read_text(encoding="utf-8") for name in RECIPES}
    return Recipes(texts=texts, programs={"build_stage.py": b"print()\n"})


@pytest.fixture(scope="module", params=PLANS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def rendering(name: str, recipes: Recipes) -> Rendering:
    uv_bytes = b"uv" if name == "aws" else b""
    return render_extension(PLANS[name], replace(recipes, uv=uv_bytes))


def test_golden(name: str, rendering: Rendering, golden: Callable[[str, str], None]) -> None:
    golden(f"extend/{name}/Dockerfile", rendering.dockerfile)
    if PLANS[name].apt:
        (packages,) = [file for file in rendering.files if file.path == "files/packages/Dockerfile"]
        golden(f"extend/{name}/packages/Dockerfile", packages.content.decode())


@pytest.mark.parametrize("question", QUESTIONS)
def test_golden_questions(
    question: str, recipes: Recipes, golden: Callable[[str, str], None]
) -> None:
    rendering = render_sandbox_step(PLANS["debian-python"], recipes, QUESTIONS[question])
    golden(f"extend/question-{question}/Dockerfile", rendering.dockerfile)


def test_what_is_copied_or_mounted_is_there_and_nothing_else(rendering: Rendering) -> None:
    used = set(re.findall(r"type=bind,source=([^\s,]+)", rendering.dockerfile))
    used |= set(re.findall(r"^COPY ([^-\s]\S+) ", rendering.dockerfile, re.MULTILINE))
    # The packages that are installed first have a Dockerfile of their own.
    paths = [
        file.path for file in rendering.files if not file.path.startswith(("files/", "packages/"))
    ]
    assert [
        path
        for path in paths
        if not any(path == folder or path.startswith(f"{folder}/") for folder in used)
    ] == []
    assert [
        path_used
        for path_used in used
        if not any(path == path_used or path.startswith(f"{path_used}/") for path in paths)
    ] == []


def test_a_step_that_runs_code_of_others_has_no_secret(
    rendering: Rendering, recipes: Recipes
) -> None:
    question_renderings = [
        render_sandbox_step(PLANS["project"], recipes, question) for question in QUESTIONS.values()
    ]
    for text in (one_rendering.dockerfile for one_rendering in (rendering, *question_renderings)):
        assert "secret," not in text
        assert "/run/secrets" not in text


def test_debian_packages_are_installed_without_a_secret(recipes: Recipes) -> None:
    """Fetch the packages before, on a base of our own."""
    rendering = render_packages(PLANS["project"], recipes)
    texts = [rendering.dockerfile, *(file.content.decode() for file in rendering.files)]
    for text in texts:
        assert "type=secret" not in text
        assert "/run/secrets" not in text


def test_packages_are_installed_again_on_another_base(recipes: Recipes) -> None:
    plan = PLANS["project"]
    other = replace(plan, base=replace(OURS, identifier="sha256:" + "c" * 64))
    assert packages_image(plan, recipes) != packages_image(other, recipes)
    assert packages_image(PLANS["aws"], recipes) == AWS.digest


def test_what_a_wheel_was_built_of_decides_which_image_it_is(recipes: Recipes) -> None:
    plan = PLANS["project"]
    other = replace(plan, sources=(replace(SOURCES[0], archive=b"other"), *SOURCES[1:]))
    assert render_extension(plan, recipes).digest != render_extension(other, recipes).digest


def test_a_base_with_a_user_keeps_it(recipes: Recipes) -> None:
    plan = plan_of(replace(OURS, user="me"))
    lines = render_extension(plan, recipes).dockerfile.splitlines()
    users = [line for line in lines if line.startswith("USER")]
    assert users == ["USER root", "USER me"]
    assert lines[-1] == "USER me"


def test_only_portable_instructions(rendering: Rendering) -> None:
    joined = re.sub(r"(?m)^\s*#.*\n", "", rendering.dockerfile).replace("\\\n", " ")
    words = {line.split(" ", 1)[0] for line in joined.splitlines() if line.strip()}
    assert words <= {"FROM", "RUN", "COPY", "ENV", "LABEL", "USER"}


def test_another_base_of_the_same_name_gives_another_digest(recipes: Recipes) -> None:
    """Change the digest with the base: else an image would be taken for unchanged when its base was
    built again.
    """
    other = plan_of(replace(OURS, identifier="sha256:" + "c" * 64))
    assert (
        render_extension(other, recipes).digest != render_extension(PLANS["ours"], recipes).digest
    )


def test_the_marker_has_every_file_of_the_code(recipes: Recipes) -> None:
    """The launcher compares the files before it trusts that all is installed."""
    files = {file.path: file.content for file in render_extension(PLANS["project"], recipes).files}
    marker = json.loads(files["code/.trainworks-installed"])
    assert marker["installed"] == ["requirements.txt", "setup.py"]
    code = {
        name.removeprefix("code/"): text for name, text in files.items() if name.startswith("code/")
    }
    del code[".trainworks-installed"]
    assert marker["files"] == {
        name: hashlib.sha256(text).hexdigest() for name, text in code.items()
    }
    assert "code/.trainworks-installed" not in {
        file.path for file in render_extension(PLANS["ours"], recipes).files
    }


@pytest.mark.parametrize("name", PLANS)
def test_permissions_of_the_code_are_kept(name: str, recipes: Recipes) -> None:
    modes = {file.path: file.mode for file in render_extension(PLANS[name], recipes).files}
    assert (modes["code/bin/tool"], modes["code/train.py"]) == (0o755, 0o644)


def test_every_golden_folder_is_a_plan(root: Path) -> None:
    names = {path.name for path in (root / "tests" / "golden" / "extend").iterdir()}
    assert names == {*PLANS, *(f"question-{question}" for question in QUESTIONS)}
