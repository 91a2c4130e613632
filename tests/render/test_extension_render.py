"""Dockerfiles of extensions: golden, portable, closed in themselves."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from trainworks.extend.plan import EntryPoint, ExtensionPlan, WheelSource, make_extension
from trainworks.extend.render import RECIPES, Installer, render_extension
from trainworks.extend.requirements import BaseDistribution, ExtendedBase, ExtensionLock
from trainworks.extend.toolkit import Workbench
from trainworks.facts.rows import SourceFile
from trainworks.host.apt import AptSettings, AptSource
from trainworks.host.pip import PipSettings
from trainworks.host.settings import HostSettings
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
    environment={"PATH": "/opt/venv/bin:/opt/ml/code:/usr/bin", "SAGEMAKER_SUBMIT_DIRECTORY": "/opt/ml/code"},
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
    WheelSource(archive=b"one", origin="git+https://git.example/lib@v1", subdirectory="python", extras="[all]"),
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
INSTALLER = Installer(
    programs={"install.py": b"print()\n"}, manifest={"protected": {"torch": "2.13.0+cpu"}}, order={"words": []}
)


def plan_of(base: ExtendedBase, *, requirements: str = REQUIREMENTS, project: bool = False) -> ExtensionPlan:
    return make_extension(
        tag="my/train:1",
        base=base,
        lock=ExtensionLock(pins=requirements),
        files=(
            SourceFile(path="train.py", content=b"import six\n"),
            SourceFile(path="bin/tool", content=b"#!/bin/sh\n", mode=0o755),
        ),
        entry_point=EntryPoint(kind="script", name="train.py", file="train.py"),
        sources=SOURCES if project else (),
        inputs=(LOCAL,) if project else (),
        apt=("libgl1", "g++") if project else (),
        installed=("requirements.txt", "setup.py") if project else (),
    )


PLANS = {
    "ours": plan_of(OURS),
    "aws": plan_of(AWS),
    "debian-python": plan_of(replace(AWS, digest="", python="/usr/bin/python3", managed=True)),
    "code-only": plan_of(OURS, requirements=""),
    "project": plan_of(OURS, project=True),
}


@pytest.fixture(scope="module")
def recipes(root: Path) -> dict[str, str]:
    return {name: (root / "templates" / name).read_text(encoding="utf-8") for name in RECIPES}


@pytest.fixture(scope="module", params=PLANS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def rendering(name: str, recipes: dict[str, str]) -> Rendering:
    return render_extension(PLANS[name], recipes, replace(INSTALLER, bench=BENCH, uv=b"uv" if name == "aws" else b""))


def resolution(recipes: dict[str, str], *, lines: bytes = b"six\n") -> Rendering:
    wanted = [SourceFile(path="requirements.txt", content=lines)]
    plan = replace(PLANS["project"], lock=ExtensionLock())
    return render_extension(plan, recipes, replace(INSTALLER, bench=BENCH), wanted)


def test_golden(name: str, rendering: Rendering, golden: Callable[[str, str], None]) -> None:
    golden(f"extend/{name}/Dockerfile", rendering.dockerfile)


def test_what_is_copied_or_mounted_is_there_and_nothing_else(rendering: Rendering) -> None:
    used = set(re.findall(r"type=bind,source=([^\s,]+)", rendering.dockerfile))
    used |= set(re.findall(r"^COPY ([^-\s]\S+) ", rendering.dockerfile, re.MULTILINE))
    paths = [file.path for file in rendering.files]
    assert [path for path in paths if not any(path == each or path.startswith(f"{each}/") for each in used)] == []
    assert [each for each in used if not any(path == each or path.startswith(f"{each}/") for path in paths)] == []


def test_secrets_are_those_of_the_host(rendering: Rendering) -> None:
    wanted = set(re.findall(r"type=secret,id=([^\s,]+)", rendering.dockerfile))
    settings = HostSettings(pip=PipSettings(), suite="bookworm", apt=AptSettings(sources=(ARCHIVE,)), ca=b"ca")
    secrets = settings.secrets("bookworm", "")
    secrets["variables"] = b""
    assert wanted <= secrets.keys()
    # Debian packages are fetched before: nothing that the base runs for them has a secret.
    assert not wanted & {"apt.conf", "sources.list"}
    programs = [file.content.decode() for file in rendering.files if file.path.startswith("files/")]
    texts = "\n".join((rendering.dockerfile, *programs))
    assert set(re.findall(r"/run/secrets/([\w.]+)", texts)) == wanted


def test_a_wheel_that_was_built_is_not_built_again_for_other_requirements(recipes: dict[str, str]) -> None:
    """Its step is the same while they are resolved, in the image, and beside other requirements."""
    installer = replace(INSTALLER, bench=BENCH)
    texts = [resolution(recipes, lines=lines).dockerfile for lines in (b"six", b"einops")]
    texts.append(render_extension(PLANS["project"], recipes, installer).dockerfile)
    assert texts[0] == texts[1] == texts[2], "what resolves is what the lock alone gives"
    steps = re.findall(r"\n# (\S+)\n(RUN .*?rm -rf /tmp/work)\n", texts[0], re.DOTALL)
    assert [origin for origin, _ in steps] == [source.origin for source in SOURCES]
    assert "inputs" not in steps[0][1], "what they mount decides whether they run again"


def test_only_portable_instructions(rendering: Rendering) -> None:
    joined = re.sub(r"(?m)^\s*#.*\n", "", rendering.dockerfile).replace("\\\n", " ")
    words = {line.split(" ", 1)[0] for line in joined.splitlines() if line.strip()}
    assert words <= {"FROM", "RUN", "COPY", "ENV", "LABEL"}


def test_another_base_of_the_same_name_gives_another_digest(recipes: dict[str, str]) -> None:
    """Else an image would be taken for unchanged when its base was built again."""
    other = plan_of(replace(OURS, identifier="sha256:" + "c" * 64))
    assert (
        render_extension(other, recipes, INSTALLER).digest != render_extension(PLANS["ours"], recipes, INSTALLER).digest
    )


def test_the_marker_has_every_file_of_the_code(recipes: dict[str, str]) -> None:
    """The launcher compares them before it trusts that all is installed."""
    files = {file.path: file.content for file in render_extension(PLANS["project"], recipes, INSTALLER).files}
    marker = json.loads(files["code/.trainworks-installed"])
    assert marker["installed"] == ["requirements.txt", "setup.py"]
    code = {name.removeprefix("code/"): text for name, text in files.items() if name.startswith("code/")}
    del code[".trainworks-installed"]
    assert marker["files"] == {name: hashlib.sha256(text).hexdigest() for name, text in code.items()}
    assert "code/.trainworks-installed" not in {
        file.path for file in render_extension(PLANS["ours"], recipes, INSTALLER).files
    }


@pytest.mark.parametrize("name", PLANS)
def test_permissions_of_the_code_are_kept(name: str, recipes: dict[str, str]) -> None:
    modes = {file.path: file.mode for file in render_extension(PLANS[name], recipes, INSTALLER).files}
    assert (modes["code/bin/tool"], modes["code/train.py"]) == (0o755, 0o644)


def test_every_golden_folder_is_a_plan(root: Path) -> None:
    assert {path.name for path in (root / "tests" / "golden" / "extend").iterdir()} == set(PLANS)
