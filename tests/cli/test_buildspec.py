"""``buildspec.yml``: CodeBuild's file, held against the buildspec reference and
against the targets.

No CodeBuild has read the file. The schema is the part of the reference that the file uses, written
from AWS CodeBuild's user guide: "Build specification reference" and "Batch build buildspec
reference".
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainworks.build.matrix import plan_targets
from trainworks.cli.commands import lock, prove, push
from trainworks.cli.commands.build import parser
from trainworks.facts.rows import Facts

TEXTS = {"type": "array", "items": {"type": "string"}, "minItems": 1}
PHASE = {
    "type": "object",
    "additionalProperties": False,
    "required": ["commands"],
    "properties": {
        "run-as": {"type": "string"},
        "on-failure": {"enum": ["ABORT", "CONTINUE"]},
        "runtime-versions": {"type": "object"},
        "commands": TEXTS,
        "finally": TEXTS,
    },
}
TASK = {
    "type": "object",
    "additionalProperties": False,
    "required": ["identifier"],
    "properties": {
        "identifier": {"type": "string", "pattern": "^[A-Za-z0-9_]{1,128}$"},
        "buildspec": {"type": "string"},
        "debug-session": {"type": "boolean"},
        "ignore-failure": {"type": "boolean"},
        "env": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "compute-type": {"type": "string"},
                "fleet": {"type": "string"},
                "image": {"type": "string"},
                "privileged-mode": {"type": "boolean"},
                "type": {"type": "string"},
                "variables": {"type": "object", "additionalProperties": {"type": "string"}},
            },
        },
    },
}
FILES = {
    "files": TEXTS,
    "base-directory": {"type": "string"},
    "discard-paths": {"enum": [True, False, "yes", "no"]},
}
SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["version", "phases"],
    "properties": {
        "version": {"const": 0.2},
        "run-as": {"type": "string"},
        "env": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "shell": {"enum": ["bash", "/bin/sh", "powershell.exe", "cmd.exe"]},
                "variables": {"type": "object", "additionalProperties": {"type": "string"}},
                "parameter-store": {"type": "object"},
                "exported-variables": TEXTS,
                "secrets-manager": {"type": "object"},
                "git-credential-helper": {"enum": ["yes", "no"]},
            },
        },
        "batch": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "fast-fail": {"type": "boolean"},
                "build-list": {"type": "array", "minItems": 1, "items": TASK},
            },
        },
        "phases": {
            "type": "object",
            "additionalProperties": False,
            "properties": dict.fromkeys(("install", "pre_build", "build", "post_build"), PHASE),
        },
        "reports": {
            "type": "object",
            "maxProperties": 5,
            "additionalProperties": {
                "type": "object",
                "additionalProperties": False,
                "required": ["files"],
                "properties": {
                    **FILES,
                    "file-format": {"enum": ["JUNITXML", "CUCUMBERJSON", "NUNITXML", "TESTNGXML"]},
                },
            },
        },
        "artifacts": {
            "type": "object",
            "additionalProperties": False,
            "required": ["files"],
            "properties": {**FILES, "name": {"type": "string"}},
        },
        "cache": {"type": "object", "additionalProperties": False, "properties": {"paths": TEXTS}},
    },
}


@pytest.fixture(scope="module")
def content(root: Path) -> Any:
    return yaml.safe_load((root / "buildspec.yml").read_text(encoding="utf-8"))


def test_it_is_what_the_reference_says(content: Any, validate: Callable[[Any, Any], None]) -> None:
    validate(content, SCHEMA)


def test_the_batch_is_every_target_that_can_be_built(content: Any, facts: Facts) -> None:
    targets = plan_targets(facts.targets, facts)
    expected = {target.name for target in targets if target.plan and not target.plan.unlocked}
    tasks = content["batch"]["build-list"]
    assert {task["env"]["variables"]["TARGET"] for task in tasks} == expected
    assert len({task["identifier"] for task in tasks}) == len(tasks)
    on_arm = {
        task["env"]["variables"]["TARGET"]
        for task in tasks
        if task["env"].get("type") == "ARM_CONTAINER"
    }
    assert on_arm == {name for name in expected if name.endswith("-arm64")}


def test_the_committed_file_is_the_generated_one(root: Path) -> None:
    program = root / "tools" / "write_buildspec.py"
    done = subprocess.run((sys.executable, str(program), "--check"), check=False, timeout=300)
    assert done.returncode == 0


def words_of(content: Any) -> list[list[str]]:
    """Return the words of each command of the build phase, without its
    condition and where its output goes.
    """
    commands = [command.partition(" || ") for command in content["phases"]["build"]["commands"]]
    assert {condition for condition, _, _ in commands} == {"test -e up-to-date"}
    return [shlex.split(command.partition(" > ")[0]) for _, _, command in commands]


def options_of(words: list[str]) -> Namespace:
    """Return the options of a call of `build.py` without a command's name."""
    return parser().parse_args(words[2:])


def test_what_it_runs_is_there_and_takes_these_words(content: Any, root: Path) -> None:
    locks, build, pushes, proves = words_of(content)
    assert all(
        words[:2] == [".venv/bin/python", "build.py"] for words in (locks, build, pushes, proves)
    )
    assert lock.parser().parse_args(locks[3:]).only == options_of(build).only == ["$TARGET"]
    assert prove.parser().parse_args(proves[3:]).pushed == "$REPOSITORY:$TARGET"
    options = options_of(build)
    assert (options.only, options.until, options.strict) == (["$TARGET"], "test", True)
    assert pushes[2] == "push"
    pushed = push.parser().parse_args(pushes[3:])
    assert (pushed.image, pushed.repository, pushed.moving_tags) == (
        "$TARGET",
        ["$REPOSITORY"],
        ["$TARGET"],
    )
    makefile = (root / "Makefile").read_text(encoding="utf-8")
    oras, setup = content["phases"]["install"]["commands"]
    assert oras.startswith("command -v oras || ")
    assert all(f"\n{goal}:" in makefile for goal in setup.split()[1:])


def test_an_image_without_oras_gets_it_before_anything_else(content: Any, tmp_path: Path) -> None:
    """The rows for arm64 are built on Amazon Linux, which has Docker and no oras.

    Programs write down their words.
    """
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("docker", "make"):
        text = f'#!/bin/sh\necho {name} "$@" >> {tmp_path}/asked\necho container\n'
        (folder / name).write_text(text, encoding="ascii")
        (folder / name).chmod(0o755)
    environment = {"PATH": str(folder), **content["env"]["variables"]}
    script = "\n".join(content["phases"]["install"]["commands"])
    done = subprocess.run(
        ("/bin/sh", "-ec", script), env=environment, cwd=tmp_path, check=False, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "asked").read_text(encoding="ascii").splitlines() == [
        f"docker create {content['env']['variables']['ORAS_IMAGE']}",
        "docker cp container:/bin/oras /usr/local/bin/",
        "docker rm container",
        "make setup engine",
    ]


def test_nothing_that_is_not_built_and_tested_is_pushed(content: Any) -> None:
    """CodeBuild ends a phase at the first command that fails.

    The proof of a push names the digest that the registry has.
    """
    assert content["phases"]["build"]["on-failure"] == "ABORT"
    assert [words[2] for words in words_of(content)] == ["lock", "--only", "push", "prove"]
    assert "post_build" not in content["phases"]


def test_reports_come_from_where_they_are_written(content: Any) -> None:
    folder = str(options_of(words_of(content)[1]).junit)
    assert content["artifacts"]["base-directory"] == folder
    assert {report["base-directory"] for report in content["reports"].values()} == {folder}
    assert f"mkdir -p {folder}" in content["phases"]["pre_build"]["commands"]


@pytest.mark.parametrize(
    ("only_outdated", "pulled", "status", "left_alone"),
    [
        pytest.param("", 0, 0, False, id="not on a schedule"),
        pytest.param("yes", 0, 0, True, id="nothing is missing"),
        pytest.param("yes", 0, 18, False, id="an update is missing"),
        pytest.param("yes", 0, 10, False, id="the archive does not answer"),
        pytest.param("yes", 1, 0, False, id="never pushed"),
    ],
)
def test_a_schedule_builds_what_lacks_an_update(
    content: Any, tmp_path: Path, only_outdated: str, pulled: int, status: int, left_alone: bool
) -> None:
    """The shell's part, with programs that only have an exit status."""
    for program, ends_with in (("bin/docker", pulled), (".venv/bin/python", status)):
        path = tmp_path / program
        path.parent.mkdir(parents=True)
        path.write_text(f"#!/bin/sh\nexit {ends_with}\n", encoding="ascii")
        path.chmod(0o755)
    (tmp_path / "reports").mkdir()
    environment = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "ONLY_OUTDATED": only_outdated}
    command = content["phases"]["pre_build"]["commands"][-1]
    done = subprocess.run(
        ("bash", "-c", command), cwd=tmp_path, env=environment, check=False, timeout=300
    )
    assert done.returncode == 0
    assert (tmp_path / "up-to-date").exists() == left_alone
