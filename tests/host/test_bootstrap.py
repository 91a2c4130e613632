"""Test how the bootstrap tool is called: a program in its place prints its words."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainworks.errors import HostError
from trainworks.facts.load import load
from trainworks.host.bootstrap import TOOL, bootstrap
from trainworks.host.pip import PipSettings
from trainworks.host.settings import HostSettings
from trainworks.plan.model import Request
from trainworks.plan.own_base import own_base
from trainworks.plan.resolve import make_plan

ROOT = Path(__file__).parents[2]


def test_scripts_of_packages_run_as_root_or_in_a_user_namespace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / TOOL
    tool.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\nexit 3\n', encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    base = own_base(make_plan(Request(framework="pytorch", cuda="cpu"), load(ROOT)))
    assert base is not None
    words: list[str] = []
    settings = HostSettings(pip=PipSettings())
    with pytest.raises(HostError, match="ended with status 3"):
        bootstrap(base, tmp_path / "base.tar", settings, words.append)
    modes = [word for word in words if word.startswith("--mode")]
    assert modes == ["--mode=root" if os.geteuid() == 0 else "--mode=unshare"]
