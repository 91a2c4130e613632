"""Test ``build.py --bake``: the file, held against bake's reference and read by buildx itself, and
the files beside it.

The schema is made from docker/buildx, docs/bake-reference.md (the table of target's attributes) and
bake/bake.go (names of targets): it says where something is wrong, also where there is no buildx.
"""

from __future__ import annotations

import json
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainworks.cli import main
from trainworks.facts.rows import Facts
from trainworks.inputs.sources import sources_of
from trainworks.plan.resolve import make_plan
from trainworks.plan.select import request_for, rows_like

CPU = "pytorch-2.13.0-cpu-py311-debian12"

TEXT = {"type": "string"}
FLAG = {"type": "boolean"}
TEXTS = {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1}
MAP = {"type": "object", "additionalProperties": {"type": ["string", "null"]}}
NAME = "^[a-zA-Z0-9_-]+$"
SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["group", "target"],
    "properties": {
        "variable": {
            "type": "object",
            "propertyNames": {"pattern": "^[A-Za-z_][A-Za-z0-9_]*$"},
            "additionalProperties": {
                "type": "object",
                "properties": {"default": {"type": ["string", "null"]}},
                "additionalProperties": False,
            },
        },
        "group": {
            "type": "object",
            "propertyNames": {"pattern": NAME},
            "additionalProperties": {
                "type": "object",
                "properties": {"targets": TEXTS},
                "required": ["targets"],
                "additionalProperties": False,
            },
        },
        "target": {
            "type": "object",
            "propertyNames": {"pattern": NAME},
            "additionalProperties": {
                "type": "object",
                "additionalProperties": False,
                "properties": {
                    **dict.fromkeys(("context", "dockerfile", "dockerfile-inline", "target"), TEXT),
                    **dict.fromkeys(("args", "contexts", "labels"), MAP),
                    **dict.fromkeys(
                        ("attest", "annotations", "cache-from", "cache-to", "inherits", "output"),
                        TEXTS,
                    ),
                    **dict.fromkeys(
                        ("no-cache-filter", "platforms", "secret", "ssh", "tags"), TEXTS
                    ),
                    **dict.fromkeys(("no-cache", "pull"), FLAG),
                },
            },
        },
    },
}


SOME = "pytorch-2.[01][3-5.]*"


@pytest.fixture(scope="module")
def baked(
    root: Path, facts: Facts, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any], str]:
    folder, mirror = tmp_path_factory.mktemp("bake") / "baked", tmp_path_factory.mktemp("mirror")
    for row in rows_like([SOME], facts):
        for _, artifact in sources_of(make_plan(request_for(row, facts), facts)):
            # Its content is looked at in the build alone.
            (mirror / artifact.file).touch()
    words = ("--bake", "--only", SOME, "--mirror", str(mirror), "--output", str(folder))
    command = (sys.executable, str(root / "build.py"), *words)
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout == f"{folder / 'docker-bake.json'}\n"
    return (
        folder,
        json.loads((folder / "docker-bake.json").read_text(encoding="utf-8")),
        done.stderr,
    )


def test_the_file_is_what_bakes_reference_says(
    baked: tuple[Path, dict[str, Any], str], facts: Facts, validate: Callable[[Any, Any], None]
) -> None:
    folder, content, output = baked
    validate(content, SCHEMA)
    packages = [row for row in rows_like([SOME], facts) if facts.sources_of(row) == "packages"]
    assert len(content["target"]) == len(packages) > 1
    assert "-vendor: skipped: " in output
    members = [name for group in content["group"].values() for name in group["targets"]]
    assert set(members) == set(content["target"]), (
        "every group has targets of the file, every target a group"
    )
    assert set(content["group"]["default"]["targets"]) == set(content["target"])
    assert content["group"]["cpu"]["targets"] == ["pytorch-2_13_0-cpu-py311-debian12"]
    assert not set(content["group"]) & set(content["target"]), "a group hides a target of its name"
    for target in content["target"].values():
        assert (folder / target["context"] / target["dockerfile"]).is_file()


def test_buildx_reads_it(
    baked: tuple[Path, dict[str, Any], str], root: Path, tmp_path: Path
) -> None:
    program = root / ".cache/buildx/usr/libexec/docker/cli-plugins/docker-buildx"
    if not program.is_file():
        pytest.skip("NOT TESTED: no buildx here (tools/set-up-engine all)")
    folder, content, _ = baked
    variables = {
        "REPOSITORY": "registry.example/team",
        "CACHE": "registry.example/cache",
        "BASE_DEBIAN12": "debian@sha256:1234",
    }
    # The printed file is the one that would be built; no daemon is asked.
    done = subprocess.run(
        (str(program), "bake", "--print", "--push"),
        cwd=folder,
        env={
            "HOME": str(tmp_path),
            "DOCKER_HOST": f"unix://{tmp_path}/nowhere",
            "PATH": "",
            **variables,
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    read = json.loads(done.stdout)
    assert set(read["target"]) == set(content["target"])
    target = read["target"]["pytorch-2_13_0-cpu-py311-debian12"]
    assert target["tags"] == ["registry.example/team/pytorch-training:2.13.0-cpu-py311-debian12"]
    assert target["cache-to"] == [f"type=registry,ref=registry.example/cache:{CPU},mode=max"]
    assert list(target["contexts"].values()) == ["docker-image://debian@sha256:1234"]
    assert target["secret"] == content["target"]["pytorch-2_13_0-cpu-py311-debian12"]["secret"]
    assert target["args"] == {"SOURCE_DATE_EPOCH": "1577836800"}
    assert target["output"] == ["type=image,rewrite-timestamp=true,push=true"], "with --push"


def test_everything_that_a_target_names_is_declared_or_there(
    baked: tuple[Path, dict[str, Any], str],
) -> None:
    folder, content, _ = baked
    used = set(re.findall(r"\$\{(\w+)", json.dumps(content["target"])))
    assert used == set(content["variable"])
    for target in content["target"].values():
        dockerfile = (folder / target["context"] / "Dockerfile").read_text(encoding="utf-8")
        secrets = dict(re.findall(r"id=([\w.]+),src=(\S+)", "\n".join(target["secret"])))
        assert set(secrets) == set(re.findall(r"type=secret,id=([\w.]+)", dockerfile))
        assert all((folder / path).is_file() for path in secrets.values())
        outside = {
            name for name in re.findall(r"^FROM (\S+)", dockerfile, re.MULTILINE) if ":" in name
        }
        assert outside == set(target["contexts"]), (
            "a base that only this machine's engine has comes as a context"
        )


def test_the_machines_settings_are_in_private_files_and_not_in_the_file(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "https://user:swordfish@packages.example/simple")
    assert main(["--bake", "--only", CPU, "--output", str(tmp_path)], root) == 0
    secrets = tmp_path / "secrets"
    assert "swordfish" in (secrets / CPU / "uv.toml").read_text(encoding="utf-8")
    assert stat.S_IMODE(secrets.stat().st_mode) == 0o700
    assert (secrets / ".gitignore").read_text(encoding="utf-8") == "*\n"
    others = [
        path for path in tmp_path.rglob("*") if path.is_file() and secrets not in path.parents
    ]
    assert [path for path in others if b"swordfish" in path.read_bytes()] == []


def test_the_same_file_every_time(root: Path, tmp_path: Path) -> None:
    texts = []
    for _ in range(2):
        assert main(["--bake", "--only", "*-cpu-*", "--output", str(tmp_path)], root) == 0
        texts.append((tmp_path / "docker-bake.json").read_bytes())
    assert texts[0] == texts[1]


def test_one_target(baked: tuple[Path, dict[str, Any], str]) -> None:
    """Compare with the text that a reader would write by hand; ``${...}`` is for bake."""
    _, content, _ = baked
    target = dict(content["target"]["pytorch-2_13_0-cpu-py311-debian12"])
    (base,) = target.pop("contexts").items()
    assert base[0].startswith("trainworks/base:bookworm-")
    assert base[1] == "docker-image://${BASE_DEBIAN12}"
    # The image under a tag that moves may differ from the rendered one.
    assert target.pop("labels") == {}
    assert f"id=uv.toml,src=secrets/{CPU}/uv.toml" in target.pop("secret")
    tag = "${REPOSITORY}/pytorch-training:2.13.0-cpu-py311-debian12"
    assert target == {
        "context": f"contexts/{CPU}",
        "dockerfile": "Dockerfile",
        "tags": [tag],
        "platforms": ["linux/amd64"],
        "args": {"SOURCE_DATE_EPOCH": "1577836800"},
        "output": ["type=image,rewrite-timestamp=true"],
        "cache-from": [
            f'${{CACHE == "" ? "type=registry,ref={tag}" : "type=registry,ref=${{CACHE}}:{CPU}"}}'
        ],
        "cache-to": [
            f'${{CACHE == "" ? "type=inline" : "type=registry,ref=${{CACHE}}:{CPU},mode=max"}}'
        ],
    }


def test_an_unlocked_target_is_refused_where_that_is_asked_for(root: Path, tmp_path: Path) -> None:
    assert (
        main(
            [
                "--bake",
                "--only",
                "pytorch-2.0.1-*-vendor",
                "--strict",
                "--output",
                str(tmp_path / "a"),
            ],
            root,
        )
        == 11
    )
    assert not (tmp_path / "a").exists()


def test_bake_needs_a_folder(root: Path) -> None:
    assert main(["--bake"], root) == 2
