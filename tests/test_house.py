"""Rules of the tree that no tool checks: facts are in ``images/``, and each
list of files is the list of its rows.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from trainworks.cli.commands import COMMANDS
from trainworks.engine import ENGINES
from trainworks.facts.rows import Facts
from trainworks_launcher.contract.modes import MODES
from trainworks_launcher.environment.platforms import PLATFORMS
from trainworks_launcher.environment.platforms.simple import ROWS

VERSION = re.compile(r"(?<![\w.])\d+\.\d+\.\d+(?:\.\d+)*(?![\w.])")
ADDRESS = re.compile(r"(?:https?|file|ftp)://[^\s\"'`<>)]+")

ALLOWED: Mapping[tuple[str, str], str] = {
    ("templates/components/smddp-open.j2", "127.0.0.1"): "the loopback address",
    ("templates/components/smp-open.j2", "127.0.0.1"): "the loopback address",
    (
        "cli/grammar.py",
        "2.13.0",
    ): "in the name of a target that examples use; a test looks for it in the matrix",
    (
        "cli/grammar.py",
        "2.4.1",
    ): "in the name of a target that examples use; a test looks for it in the matrix",
    ("facts/field_types.py", "2.4.1"): "an example in an error message",
    (
        "attestation/cyclonedx.py",
        "http://cyclonedx.org/schema/bom-1.6.schema.json",
    ): "the name of a format, never fetched",
    (
        "attestation/provenance.py",
        "https://cyclonedx.org/bom",
    ): "the name of a format, never fetched",
    (
        "attestation/provenance.py",
        "https://slsa.dev/provenance/v1",
    ): "the name of a format, never fetched",
    ("host/advisories.py", "2.4.1"): "an example of a version with a label",
    ("extend/requirement_inputs.py", "https://"): "how an address of a git requirement begins",
    ("imagetest/probe/packages.py", "12.2.0"): "an example of a Debian version in a docstring",
    ("imagetest/probe/libraries.py", "2.4.1"): "an example of a version with a label",
    ("imagetest/probe/libraries.py", "2.8.3"): "an example of a version with a label",
    ("plan/select.py", "2.10.0"): "an example of how versions are ordered",
    ("registry/tools.py", "127.0.0.1"): "the loopback address",
    ("cli/commands/verify.py", "https://ci.example/images"): "an example",
    ("plan/select.py", "2.9.1"): "an example of how versions are ordered",
    ("__init__.py", "0.1.0"): "the builder's own version, that of pyproject.toml",
}
"""Literals in code that look like facts, and why each is none."""


def texts(root: Path) -> Iterator[tuple[str, str]]:
    """Yield name and text of each file that must not hold facts: the builder and the templates."""
    source = root / "src" / "trainworks"
    for path in sorted(source.rglob("*.py")):
        yield path.relative_to(source).as_posix(), path.read_text(encoding="utf-8")
    for path in sorted((root / "templates").rglob("*")):
        if path.is_file():
            yield path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")


def literals(root: Path) -> set[tuple[str, str]]:
    return {
        (name, word.rstrip(".,;:`"))
        for name, text in texts(root)
        for pattern in (VERSION, ADDRESS)
        for word in pattern.findall(text)
    }


def test_no_version_and_no_address_in_code_or_templates(root: Path) -> None:
    assert literals(root) - ALLOWED.keys() == set(), "a fact is a row of images/, with its source"


def test_every_exception_is_still_needed(root: Path) -> None:
    assert ALLOWED.keys() - literals(root) == set()


@pytest.mark.parametrize(
    "text", ["torch==2.4.1", 'version = "12.1.105"', "curl https://mirror.example/x", "9.1.0.70"]
)
def test_what_looks_like_a_fact_is_found(text: str) -> None:
    assert VERSION.search(text) or ADDRESS.search(text)


def test_instance_types_stand_in_images_only(facts: Facts, root: Path) -> None:
    names = [row.name.removeprefix("ml.") for row in facts.instances]
    assert len(names) > 30
    files = [
        path
        for folder in ("src", "templates")
        for path in (root / folder).rglob("*")
        if path.suffix != ".pyc"
    ]
    types_found = [
        (path.relative_to(root).as_posix(), name)
        for path in files
        # An editable install leaves a copy of the README there.
        if path.is_file() and ".egg-info" not in str(path)
        for name in names
        if name in path.read_text(encoding="utf-8", errors="replace")
    ]
    assert types_found == []


def test_nothing_stands_on_modules_that_pip_keeps_to_itself(root: Path) -> None:
    """pip says of ``pip._internal`` that it changes without notice. Its commands do not."""
    folders = (root / "src", root / "templates", root / "launcher" / "trainworks_launcher")
    files = [
        path
        for folder in folders
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    ]
    assert len(files) > 100
    assert [str(path) for path in files if b"pip._internal" in path.read_bytes()] == []


OWN_NAME_FROM_INDEX = re.compile(r"install\b.*\btrainworks\[")
"""An installation of the builder by its name, which any person can register at an index."""


def test_no_file_says_to_install_the_builder_from_an_index(root: Path) -> None:
    listed = subprocess.check_output(("git", "ls-files", "-z"), cwd=root, text=True)
    names = listed.rstrip("\0").split("\0")
    assert len(names) > 500
    files = [name for name in names if not name.startswith("docs/adr/")]
    naming = []
    for name in files:
        path = root / name
        # A submodule or a link to a folder has no text.
        # One that is deleted, but not yet in a commit.
        if not path.exists():
            continue
        if OWN_NAME_FROM_INDEX.search(path.read_text(encoding="utf-8", errors="replace")):
            naming.append(name)
    assert naming == [], "an index may have another owner's package of that name: '.[ecr]'"


@pytest.mark.parametrize("path", ["launcher/build/lib/x.py", "trainworks_launcher-1.whl"])
def test_what_the_page_on_any_image_builds_is_not_added_to_git(root: Path, path: str) -> None:
    """`git add` would take it, and a record would say that the checkout has changes."""
    done = subprocess.run(("git", "check-ignore", "--quiet", path), cwd=root, check=False)
    assert done.returncode == 0


def test_one_file_for_each_engine(root: Path) -> None:
    modules = {place.partition(":")[0].rpartition(".")[2] for place in ENGINES.values()}
    assert modules == set(ENGINES)
    assert [
        name
        for name in modules
        if not (root / "src" / "trainworks" / "engine" / f"{name}.py").is_file()
    ] == []


def test_one_file_for_each_mode(root: Path) -> None:
    modules = {row.file for row in MODES.values()}
    files = {
        path.stem
        for path in (root / "launcher" / "trainworks_launcher" / "plan" / "modes").glob("*.py")
    }
    assert files - {"__init__", "common"} == modules


def test_one_file_or_one_row_for_each_platform(root: Path) -> None:
    files = {
        path.stem
        for path in (root / "launcher" / "trainworks_launcher" / "environment" / "platforms").glob(
            "*.py"
        )
    }
    assert files - {"__init__", "common", "simple"} == {
        name for name, row in PLATFORMS.items() if not row.in_rows
    }
    assert set(ROWS) == {name for name, row in PLATFORMS.items() if row.in_rows}


def test_one_file_for_each_command(root: Path) -> None:
    files = {path.stem for path in (root / "src" / "trainworks" / "cli" / "commands").glob("*.py")}
    assert files - {"__init__"} == set(COMMANDS)


def test_one_recipe_for_each_component_and_files_only_for_components(
    facts: Facts, root: Path
) -> None:
    components = {row.recipe_name for row in facts.components}
    assert {path.stem for path in (root / "templates" / "components").iterdir()} == components
    assert {path.name for path in (root / "templates" / "files").iterdir()} <= {
        *components,
        *(row.name for row in facts.components),
    }


def test_what_is_proved_names_tests_that_exist(facts: Facts, root: Path) -> None:
    for row in facts.components:
        assert not row.proved_by or row.proved, f"{row.name}: what did the tests prove?"
        assert not row.proved or row.proved_by or "by hand" in row.proved, (
            f"{row.name}: which tests proved it?"
        )
        for test in row.proved_by:
            file, _, function = test.partition("::")
            assert (root / file).is_file(), test
            tree = ast.parse((root / file).read_text(encoding="utf-8"))
            assert function in {
                node.name for node in tree.body if isinstance(node, ast.FunctionDef)
            }, test


def test_one_lock_for_each_target(facts: Facts, root: Path) -> None:
    locks = {path.stem for path in (root / "images" / "lock").iterdir()}
    assert locks - {"archives", "artifacts", "base-images"} == {
        facts.name_of(row) for row in facts.targets
    }
