"""Test that import-linter refuses an import between the three packages of the workspace."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

IMPORTS = {
    "trainworks": "import trainworks_preflight",
    "trainworks_launcher": "import trainworks",
    "trainworks_preflight": "import trainworks_launcher, trainworks_smdistributed",
    "smdistributed/dataparallel": "import trainworks",
    "smdistributed/modelparallel": "import trainworks_preflight",
    "trainworks_smdistributed": "import trainworks_launcher",
}
"""Packages of one file each, by their folders. Only preflight may import the launcher."""

ROOT_CONTRACTS = ("builder-and-launcher", "builder-and-preflight", "smdistributed-not-imported")


@pytest.mark.parametrize(
    ("settings", "contracts", "chains"),
    [
        (
            "pyproject.toml",
            ROOT_CONTRACTS,
            (
                "trainworks -> trainworks_preflight",
                "trainworks_launcher -> trainworks",
                "trainworks_preflight -> trainworks_smdistributed",
            ),
        ),
        (
            "smdistributed/pyproject.toml",
            ("workspace-not-imported",),
            (
                "smdistributed.dataparallel -> trainworks",
                "smdistributed.modelparallel -> trainworks_preflight",
                "trainworks_smdistributed -> trainworks_launcher",
            ),
        ),
    ],
)
def test_imports_between_the_packages_are_refused(
    root: Path, tmp_path: Path, settings: str, contracts: Sequence[str], chains: Sequence[str]
) -> None:
    """import-linter looks for packages in its working directory first."""
    for folder, text in IMPORTS.items():
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "__init__.py").write_text(f"{text}\n", encoding="ascii")
    program = Path(sys.executable).with_name("lint-imports")
    words = [str(program), str(root / settings), "--no-cache"]
    for contract in contracts:
        words += ["--contract", contract]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"Contracts: 0 kept, {len(contracts)} broken." in done.stdout
    for chain in chains:
        assert f"{chain} (l.1)" in done.stdout
