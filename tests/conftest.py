"""What the tests of several layers share: the checkout, its facts, and a copy of it that a test may spoil."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aws import SECRET
from trainworks.facts.load import load
from trainworks.facts.rows import Facts

ROOT = Path(__file__).resolve().parent.parent

UPDATE = "TRAINWORKS_UPDATE_GOLDEN"

# A hundred tests start `build.py`: it is compiled once, also where this shell wants no bytecode.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@pytest.fixture(scope="session")
def root() -> Path:
    """Give the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def facts() -> Facts:
    """Give the real facts; they are frozen, so every test may have the same ones."""
    return load(ROOT)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Give a copy of the facts that a test may spoil."""
    for name in ("images", "templates"):
        shutil.copytree(ROOT / name, tmp_path / name)
    (tmp_path / "launcher").mkdir()
    return tmp_path


@pytest.fixture(scope="session")
def validate() -> Callable[[Any, Any], None]:
    """Give jsonschema's function; with its formats it loads for two seconds, which other tests need not wait for."""
    import jsonschema

    return jsonschema.validate


@pytest.fixture(scope="session")
def golden() -> Callable[[str, str], None]:
    """Give a comparison with a file below ``tests/golden``, byte for byte; ``UPDATE`` writes the file instead."""

    def compare(name: str, text: str) -> None:
        path = ROOT / "tests" / "golden" / name
        if os.environ.get(UPDATE):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode())
        advice = f"if the change is meant: `make golden` (or {UPDATE}=1 with pytest), then read `git diff tests/golden`"
        assert path.is_file(), f"{path.relative_to(ROOT)} is missing; {advice}"
        assert text == path.read_bytes().decode(), f"{path.relative_to(ROOT)} differs; {advice}"

    return compare


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have AWS credentials, and none of this machine's own AWS settings."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_CA_BUNDLE", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDOFTHETEST")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
