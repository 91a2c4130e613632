"""The image's environment in login shells and ssh sessions, read by a real shell."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from trainworks.plan.resolve import CUDA_ENVIRONMENT, DEVICE_ENVIRONMENT
from trainworks.render.shells import render_profile, render_sshd

ODD = {
    "PATH": "/opt/a b:/usr/bin:/bin",
    "QUOTED": 'it\'s "so" $HOME `id` \\',
    "EMPTY": "",
    "LANG": "C.UTF-8",
}


def after_profile(
    folder: Path, environment: Mapping[str, str], started_with: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment of a shell that has read the profile."""
    profile = folder / "profile.sh"
    profile.write_text(render_profile(environment), encoding="utf-8")
    command = ("/bin/sh", "-euc", '. "$1"; exec /usr/bin/env -0', "sh", str(profile))
    done = subprocess.run(
        command, capture_output=True, check=True, env=dict(started_with), timeout=300
    )
    return dict(word.split("=", 1) for word in done.stdout.decode().rstrip("\0").split("\0"))


def test_every_value_reaches_the_shell_as_it_is(tmp_path: Path) -> None:
    assert after_profile(tmp_path, ODD, {"PATH": "/usr/bin"}).items() >= ODD.items()


@pytest.mark.parametrize(
    ("name", "value_before", "value_after"),
    [
        pytest.param(
            "LANG", "de_DE.UTF-8", "de_DE.UTF-8", id="what the container was started with counts"
        ),
        pytest.param("LANG", "", "", id="empty is a value too"),
        pytest.param(
            "PATH",
            "/usr/local/bin",
            ODD["PATH"],
            id="/etc/profile has set PATH before: ours counts",
        ),
    ],
)
def test_what_is_set_already(
    tmp_path: Path, name: str, value_before: str, value_after: str
) -> None:
    assert after_profile(tmp_path, ODD, {name: value_before})[name] == value_after


def test_a_shell_knows_where_cuda_is_and_asks_for_no_device(tmp_path: Path) -> None:
    """The container runtime gives devices when a container starts, not to a shell."""
    environment = {"PATH": "/usr/bin", **CUDA_ENVIRONMENT}
    found = after_profile(tmp_path, environment, {"PATH": "/usr/bin"})
    assert found["CUDA_HOME"] == CUDA_ENVIRONMENT["CUDA_HOME"]
    assert not found.keys() & DEVICE_ENVIRONMENT.keys()


def test_sshd_gets_one_line_in_its_own_quoting() -> None:
    assert render_sshd({"PATH": "/a b", "QUOTED": 'say "\\"'}).splitlines()[1:] == [
        r'SetEnv "PATH=/a b" "QUOTED=say \"\\\""'
    ]
