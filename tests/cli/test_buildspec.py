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
    conditions and where its output goes.
    """
    words = []
    for command in content["phases"]["build"]["commands"]:
        *conditions, last = command.split(" || ")
        assert conditions[0] == "test -e up-to-date"
        words.append(shlex.split(last.partition(" > ")[0]))
    return words


PROJECT = "arn:aws:codebuild:eu-west-1:111122223333:build/images"
"""The project that the provenance names as the builder."""


def expand(word: str) -> str:
    """Return a word as the shell of a build has it."""
    variables = {"CODEBUILD_BUILD_ARN": f"{PROJECT}:b1e6661e-e4f2-4156-9ab9-82a19EXAMPLE"}
    command = ("bash", "-euc", f'printf %s "{word}"')
    return subprocess.run(command, env=variables, check=True, capture_output=True, text=True).stdout


def options_of(words: list[str]) -> Namespace:
    """Return the options of a call of `build.py` without a command's name."""
    return parser().parse_args(words[2:])


def test_what_it_runs_is_there_and_takes_these_words(content: Any, root: Path) -> None:
    locks, build, pushes, proves, _ = words_of(content)
    assert all(
        words[:2] == [".venv/bin/python", "build.py"] for words in (locks, build, pushes, proves)
    )
    assert lock.parser().parse_args(locks[3:]).only == options_of(build).only == ["$TARGET"]
    assert prove.parser().parse_args(proves[3:]).pushed == "$REPOSITORY:$TARGET"
    assert expand(prove.parser().parse_args(proves[3:]).builder) == PROJECT
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
    setup = content["phases"]["install"]["commands"][-1]
    assert all(f"\n{goal}:" in makefile for goal in setup.split()[1:])


def record_words(folder: Path, *names: str) -> None:
    """Make programs that write their words to `asked` beside the folder, and print `container`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        text = f'#!/bin/sh\necho {name} "$@" >> {folder.parent}/asked\necho container\n'
        (folder / name).write_text(text, encoding="ascii")
        (folder / name).chmod(0o755)


def copied(image: str, path: str) -> list[str]:
    """Return the calls of docker that copy a program out of an image."""
    return [
        f"docker create {image}",
        f"docker cp container:{path} /usr/local/bin/",
        "docker rm container",
    ]


@pytest.mark.parametrize("key", ["", "awskms:///alias/images"])
def test_an_image_gets_the_programs_that_it_lacks_before_anything_else(
    content: Any, tmp_path: Path, key: str
) -> None:
    """The rows for arm64 are built on Amazon Linux, which has Docker, no oras and no cosign; the
    latter is for those who sign.
    """
    record_words(tmp_path / "bin", "docker", "make")
    variables = {**content["env"]["variables"], "PATH": str(tmp_path / "bin"), "SIGNING_KEY": key}
    script = "\n".join(content["phases"]["install"]["commands"])
    done = subprocess.run(
        ("/bin/sh", "-ec", script), env=variables, cwd=tmp_path, check=False, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    expected = copied(variables["ORAS_IMAGE"], "/bin/oras")
    if key:
        expected += copied(variables["COSIGN_IMAGE"], "/ko-app/cosign")
    expected += ["make setup engine"]
    assert (tmp_path / "asked").read_text(encoding="ascii").splitlines() == expected


def test_programs_that_are_there_are_not_fetched(content: Any, tmp_path: Path) -> None:
    record_words(tmp_path / "bin", "docker", "make", "oras", "cosign")
    path = {"PATH": str(tmp_path / "bin"), "SIGNING_KEY": "cosign.key"}
    script = "\n".join(content["phases"]["install"]["commands"])
    subprocess.run(("/bin/sh", "-ec", script), env=path, cwd=tmp_path, check=True)
    assert (tmp_path / "asked").read_text(encoding="ascii") == "make setup engine\n"


def test_nothing_that_is_not_built_and_tested_is_pushed(content: Any) -> None:
    """CodeBuild ends a phase at the first command that fails.

    The proof of a push names the digest that the registry has.
    """
    assert content["phases"]["build"]["on-failure"] == "ABORT"
    *builder, sign = words_of(content)
    assert [words[2] for words in builder] == ["lock", "--only", "push", "prove"]
    assert sign[0] == "tools/sign-released"
    assert "post_build" not in content["phases"]


def test_signing_reads_what_push_and_prove_wrote(content: Any, root: Path, tmp_path: Path) -> None:
    """Take the files' names from the commands, and run the last command on such files: what it
    refuses is the name of the image, which comes after its files.
    """
    _, _, pushes, proves, sign = content["phases"]["build"]["commands"]
    push_file = pushes.partition(" > ")[2].strip('"').replace("$TARGET", "a-target")
    proof = str(prove.parser().parse_args(shlex.split(proves.split(" || ")[1])[3:]).output)
    folder = tmp_path / proof.replace("$TARGET", "a-target")
    folder.mkdir(parents=True)
    for name in ("sbom.cdx.json", "provenance.json"):
        (folder / name).write_text("{}", encoding="utf-8")
    (tmp_path / push_file).write_text('{"pushed": [{"image_uri": "an-image"}]}', encoding="utf-8")
    (tmp_path / "tools").symlink_to(root / "tools")
    record_words(tmp_path / "bin", "cosign")
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    for key, calls in (("", 0), ("awskms:///alias/images", 3)):
        variables = {"PATH": path, "SIGNING_KEY": key, "TARGET": "a-target"}
        subprocess.run(("bash", "-ec", sign), env=variables, cwd=tmp_path, check=True)
        asked = tmp_path / "asked"
        lines = asked.read_text(encoding="ascii").splitlines() if asked.exists() else []
        assert len(lines) == calls
    assert all(f"--key {key} --tlog-upload=false" in line for line in lines)
    assert all(line.endswith(" an-image") for line in lines)


def test_what_is_up_to_date_is_not_signed(content: Any, tmp_path: Path) -> None:
    """Run the commands in a folder without this project: one that is not skipped fails."""
    (tmp_path / "up-to-date").touch()
    for command in content["phases"]["build"]["commands"]:
        variables = {"PATH": os.environ["PATH"], "SIGNING_KEY": "cosign.key"}
        subprocess.run(("bash", "-ec", command), env=variables, cwd=tmp_path, check=True)


def test_the_login_comes_before_hours_of_building(content: Any) -> None:
    """tests/cli/test_log_in.py runs the program."""
    assert content["phases"]["pre_build"]["commands"][0] == 'tools/log-in "$REPOSITORY"'
    assert content["env"]["variables"]["LOGIN"] == "ecr"
    assert content["env"]["variables"]["SIGNING_KEY"] == ""


def test_reports_come_from_where_they_are_written(content: Any) -> None:
    folder = str(options_of(words_of(content)[1]).junit)
    assert content["artifacts"]["base-directory"] == folder
    assert {report["base-directory"] for report in content["reports"].values()} == {folder}
    assert f'mkdir -p "{folder}/$TARGET"' in content["phases"]["pre_build"]["commands"]


@pytest.mark.parametrize(
    ("only_outdated", "pulled", "status", "left_alone"),
    [
        pytest.param("", 0, 0, False, id="not on a schedule"),
        pytest.param("yes", 0, 0, True, id="nothing is missing"),
        pytest.param("yes", 0, 18, False, id="an update is missing"),
        pytest.param("yes", 0, 10, False, id="the archive does not answer"),
        pytest.param("yes", 0, 20, False, id="the advisory service does not answer"),
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
