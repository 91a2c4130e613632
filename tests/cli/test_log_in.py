"""`tools/log-in`: one login for each kind of registry, with the words that docker and AWS's
command line get. Both are programs that write down what they were given.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]

ECR = "123456789012.dkr.ecr.eu-west-1.amazonaws.com"

DOCKER = """#!/bin/sh
echo "$*" >>"$RECORD"
cat >"$RECORD.password"
echo "Login Succeeded"
"""

AWS = """#!/bin/sh
echo "aws $*" >>"$RECORD"
[ "$AWS_REFUSES" = "" ] || { echo "Unable to locate credentials" >&2; exit 253; }
echo "pass of $4"
"""


@pytest.fixture
def run(root: Path, tmp_path: Path) -> Run:
    """Give a function that runs the program for a repository, with more variables."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("docker", DOCKER), ("aws", AWS)):
        (folder / name).write_text(text, encoding="utf-8")
        (folder / name).chmod(0o755)

    def call(repository: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
            "RECORD": str(tmp_path / "record"),
            "AWS_REFUSES": "",
            **variables,
        }
        command = (str(root / "tools" / "log-in"), repository)
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    return call


def recorded(folder: Path) -> list[str]:
    """Return the calls of docker and aws, without their programs' input."""
    record = folder / "record"
    return record.read_text(encoding="utf-8").splitlines() if record.exists() else []


@pytest.mark.parametrize(
    ("host", "region"),
    [
        (ECR, "eu-west-1"),
        ("123456789012.dkr.ecr-fips.us-gov-west-1.amazonaws.com", "us-gov-west-1"),
        ("123456789012.dkr-ecr.us-east-2.on.aws", "us-east-2"),
        ("123456789012.dkr.ecr.cn-north-1.amazonaws.com.cn", "cn-north-1"),
    ],
)
def test_ecr_gets_the_password_of_its_own_region(
    run: Run, tmp_path: Path, host: str, region: str
) -> None:
    done = run(f"{host}/team/training", LOGIN="ecr", AWS_REGION="sa-east-1")
    assert done.returncode == 0, done.stderr
    assert recorded(tmp_path) == [
        f"aws ecr get-login-password --region {region}",
        f"login {host} --username AWS --password-stdin",
    ]
    password = (tmp_path / "record.password").read_text(encoding="utf-8")
    assert password == f"pass of {region}\n"


def test_a_password_goes_to_the_registry_by_standard_input(run: Run, tmp_path: Path) -> None:
    variables = {"REGISTRY_USER": "me", "REGISTRY_PASSWORD": "s3cret $HOME %s\\n"}
    done = run("ghcr.io/team/training", LOGIN="password", **variables)
    assert done.returncode == 0, done.stderr
    assert recorded(tmp_path) == ["login ghcr.io --username me --password-stdin"]
    password = (tmp_path / "record.password").read_text(encoding="utf-8")
    assert password == variables["REGISTRY_PASSWORD"] + "\n"


def test_a_machine_that_is_logged_in_asks_nothing(run: Run, tmp_path: Path) -> None:
    assert run("registry.example/team/training", LOGIN="none").returncode == 0
    assert recorded(tmp_path) == []


def test_a_role_that_aws_refuses_is_said_with_what_to_do(run: Run, tmp_path: Path) -> None:
    """docker is not asked to log in with an empty password."""
    done = run(f"{ECR}/training", LOGIN="ecr", AWS_REFUSES="yes")
    assert done.returncode == 1
    assert "Unable to locate credentials" in done.stderr
    assert f"AWS gives no password for {ECR}: this machine needs a role" in done.stderr
    assert len(recorded(tmp_path)) == 1


@pytest.mark.parametrize(
    ("repository", "variables", "message"),
    [
        ("", {"LOGIN": "none"}, "a repository is HOST/NAME, not ''"),
        ("training", {"LOGIN": "none"}, "a repository is HOST/NAME, not 'training'"),
        ("ghcr.io/team", {}, "LOGIN is ecr, password or none, not ''"),
        ("ghcr.io/team", {"LOGIN": "ECR"}, "LOGIN is ecr, password or none, not 'ECR'"),
        ("ghcr.io/team", {"LOGIN": "ecr"}, "ghcr.io is not a registry of Amazon ECR"),
        ("x.dkr/team", {"LOGIN": "ecr"}, "x.dkr is not a registry of Amazon ECR"),
        ("r.example/team", {"LOGIN": "password"}, "REGISTRY_USER and REGISTRY_PASSWORD for r.ex"),
        (
            "r.example/team",
            {"LOGIN": "password", "REGISTRY_USER": "me", "REGISTRY_PASSWORD": ""},
            "REGISTRY_USER and REGISTRY_PASSWORD for r.example",
        ),
    ],
)
def test_what_cannot_be_a_login_is_refused_before_any_is_tried(
    run: Run, tmp_path: Path, repository: str, variables: dict[str, str], message: str
) -> None:
    done = run(repository, **variables)
    assert done.returncode == 2
    assert message in done.stderr
    assert recorded(tmp_path) == []
