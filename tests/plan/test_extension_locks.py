"""Locks and project files of other tools: what of them a base image gets."""

from __future__ import annotations

from dataclasses import replace

import pytest
from packaging.utils import canonicalize_name

from trainworks.extend.reading.locks import read_lock, select
from trainworks.extend.reading.others import OF_OTHER_TOOLS, kind_of, sentence_of
from trainworks.extend.reading.projects import read_project
from trainworks.extend.reading.selection import Kept, Selection
from trainworks.extend.requirements import BaseDistribution, ExtendedBase, GitRequirement
from trainworks.extend.resolving.lock import with_hashes_of
from trainworks.extend.resolving.releases import LockedRelease

BASE = ExtendedBase(
    reference="my/base:1",
    identifier="sha256:" + "b" * 64,
    python="/usr/bin/python3",
    version="3.11",
    glibc="2.36",
    machine="x86_64",
    environment={},
    distributions=(BaseDistribution(name="torch", version="2.13.0+cpu"),),
)
KEPT = Kept(versions={"torch": "2.13.0+cpu"}, patterns=("nvidia-*", "triton"))
REGISTRY = 'source = { registry = "https://pypi.example/simple" }\n'


def digest(letter: str) -> str:
    return f"sha256:{letter * 64}"


def row(name: str, version: str, more: str = "", source: str = REGISTRY, letter: str = "0") -> str:
    wheel = f'wheels = [{{ url = "https://f.example/{name}-{version}-py3-none-any.whl", hash = "{digest(letter)}" }}]\n'
    return f'[[package]]\nname = "{name}"\nversion = "{version}"\n{source}{wheel}{more}\n'


PROJECT = """
version = 1
requires-python = ">=3.10"

[[package]]
name = "app"
version = "0.1"
source = { editable = "." }
dependencies = [
    { name = "tool" },
    { name = "torch" },
    { name = "old", marker = "python_full_version < '3.11'" },
    { name = "twice", version = "1", marker = "sys_platform == 'win32'" },
    { name = "twice", version = "2", marker = "sys_platform != 'win32'" },
    { name = "extended", extra = ["fast"] },
]

[package.optional-dependencies]
plots = [{ name = "drawing" }]

[package.dev-dependencies]
dev = [{ name = "checker" }]

[package.metadata]
requires-dist = [{ name = "torch", specifier = ">=2.4" }, { name = "tool" }]

"""
ROWS = (
    row("tool", "1.0", letter="a")
    + row("torch", "2.15.0", 'dependencies = [{ name = "nvidia-cublas" }, { name = "sympy" }]\n')
    + row("nvidia-cublas", "13")
    + row("sympy", "1")
    + row("old", "1")
    + row("twice", "1")
    + row("twice", "2")
    + row("extended", "1", '[package.optional-dependencies]\nfast = [{ name = "nvidia-ml-py" }]\n')
    + row("nvidia-ml-py", "13")
    + row("drawing", "1")
    + row("checker", "1")
)


def of_uv(text: str, *, extras: tuple[str, ...] = (), groups: tuple[str, ...] = ()) -> Selection:
    return select(read_lock(text, "uv.lock", uv=True, extras=extras, groups=groups), BASE, KEPT)


def texts(found: Selection) -> list[str]:
    return sorted(each.text for each in found.requirements)


def test_of_a_uv_lock_what_the_project_needs_in_the_base_is_taken() -> None:
    found = of_uv(PROJECT + ROWS)
    assert found.problems == ()
    # Not what only torch needs, nor what another Python, extra or group does.
    assert texts(found) == ["extended==1", "nvidia-ml-py==13", "tool==1.0", "torch>=2.4", "twice==2"]
    assert found.hashes["tool", "1.0"] == ("a" * 64,)
    assert found.notes == ("uv.lock: torch 2.15.0 is not installed: the image keeps its own torch 2.13.0+cpu",)
    assert [(each.name, each.value) for each in found.options] == [("--extra-index-url", "https://pypi.example/simple")]


def test_extras_and_groups_are_chosen_by_name() -> None:
    found = of_uv(PROJECT + ROWS, extras=("Plots",), groups=("dev",))
    assert {"drawing==1", "checker==1"} <= set(texts(found))
    assert of_uv(PROJECT + ROWS, extras=("plot",), groups=("tests",)).problems == (
        "--extra plot: uv.lock does not have it: it has plots",
        "--group tests: uv.lock does not have it: it has dev",
    )


def test_what_the_project_asks_of_torch_itself_is_a_requirement() -> None:
    """So that a project that pins another torch is refused, as with a requirements file."""
    found = of_uv(PROJECT.replace(">=2.4", "==2.9.1") + ROWS)
    (torch,) = (each for each in found.requirements if each.name == "torch")
    assert (torch.text, torch.place) == ("torch==2.9.1", "uv.lock: app requires torch==2.9.1")


def test_a_lock_without_a_project_and_without_hashes_has_versions() -> None:
    found = of_uv('version = 1\n[[package]]\nname = "einops"\nversion = "0.7.0"\n')
    assert (texts(found), found.hashes, found.problems) == (["einops==0.7.0"], {}, ())


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            '{ git = "https://h.example/a.git?rev=main&subdirectory=py#0123" }',
            ("git", "https://h.example/a.git", "0123"),
        ),
        ('{ editable = "packages/tool" }', ("folder", "packages/tool")),
        ('{ directory = "../tool" }', ("folder", "../tool")),
        ('{ virtual = "packages/tool" }', ("nothing",)),
        (
            '{ url = "https://h.example/tool-1.0-py3-none-any.whl" }',
            ("wheel", "https://h.example/tool-1.0-py3-none-any.whl"),
        ),
        ('{ path = "dist/tool-1.0-py3-none-any.whl" }', ("wheel", "dist/tool-1.0-py3-none-any.whl")),
        ('{ registry = "../wheels" }', ("links", "../wheels")),
    ],
)
def test_sources_of_a_uv_lock(source: str, expected: tuple[str, ...]) -> None:
    rest = "".join(ROWS.partition(row("tool", "1.0", letter="a"))[2:])
    found = of_uv(PROJECT + row("tool", "1.0", source=f"source = {source}\n") + rest)
    assert found.problems == ()
    there: list[tuple[str, ...]] = [("git", each.url, each.reference) for each in found.sources]
    there += [("folder", each.path) for each in found.folders]
    there += [("wheel", each.wheel) for each in found.requirements if each.wheel]
    there += [("links", each.value) for each in found.options if each.name == "--find-links"]
    assert there == ([] if expected == ("nothing",) else [expected])


def test_a_password_of_an_index_in_a_lock_is_in_no_message() -> None:
    found = of_uv((PROJECT + ROWS).replace("https://pypi.example", "https://me:hunter2@pypi.example"))
    (option,) = found.options
    assert option.value == "https://me:hunter2@pypi.example/simple"
    assert "hunter2" not in repr(found)


def test_a_project_that_is_not_installed() -> None:
    assert read_lock(PROJECT.replace("editable", "virtual"), "uv.lock", uv=True).virtual
    assert not read_lock(PROJECT, "uv.lock", uv=True).virtual


PYLOCK = """
lock-version = "1.0"
created-by = "test"
requires-python = ">=3.10"
extras = ["plots"]
dependency-groups = ["dev"]
"""


def package(name: str, version: str, more: str = "", tag: str = "py3-none-any", letter: str = "0") -> str:
    file = f"{name.replace('-', '_')}-{version}-{tag}.whl"
    return (
        f'[[packages]]\nname = "{name}"\nversion = "{version}"\n{more}'
        f'wheels = [{{ url = "https://f.example/{file}", hashes = {{ sha256 = "{letter * 64}" }} }}]\n\n'
    )


def of_pylock(text: str, *, extras: tuple[str, ...] = (), groups: tuple[str, ...] = ()) -> Selection:
    return select(read_lock(text, "pylock.toml", uv=False, extras=extras, groups=groups), BASE, KEPT)


def test_of_a_pylock_what_markers_and_files_allow_is_taken() -> None:
    text = (
        PYLOCK
        + package("tool", "1.0", letter="a")
        + package("old", "1", "marker = \"python_full_version < '3.11'\"\n")
        + package("drawing", "1", "marker = \"'plots' in extras\"\n")
        + package("checker", "1", "marker = \"'dev' in dependency_groups\"\n")
        + package("torch", "2.15.0", tag="cp312-cp312-manylinux_2_28_x86_64")
        + package("nvidia-cublas", "13", tag="py3-none-manylinux_2_27_x86_64")
    )
    found = of_pylock(text)
    assert (found.problems, texts(found)) == ((), ["tool==1.0"])
    assert found.hashes["tool", "1.0"] == ("a" * 64,)
    # It holds where something else asks for it.
    assert [each.text for each in found.constraints] == ["tool==1.0", "nvidia-cublas==13"]
    assert found.notes == (
        "pylock.toml: torch 2.15.0 is not installed: the image keeps its own torch 2.13.0+cpu",
        "pylock.toml: not installed, part of what the image keeps: nvidia-cublas",
    )
    assert texts(of_pylock(text, extras=("plots",), groups=("dev",))) == ["checker==1", "drawing==1", "tool==1.0"]


def test_every_problem_of_a_pylock_is_said() -> None:
    found = of_pylock(
        PYLOCK.replace(">=3.10", ">=3.12")
        + package("one", "1", tag="cp312-cp312-manylinux_2_28_x86_64")
        + package("two", "1", tag="cp311-cp311-win_amd64")
        + package("three", "1")
        + package("three", "2")
        + '[[packages]]\nname = "four"\nvcs = { type = "hg", url = "https://h.example/x", commit-id = "0" }\n'
    )
    assert [problem.partition(": ")[2] for problem in found.problems] == [
        "it is for Python >=3.12, and the base has 3.11"
    ]
    found = of_pylock(
        PYLOCK
        + package("one", "1", tag="cp312-cp312-manylinux_2_28_x86_64")
        + package("two", "1", tag="cp311-cp311-win_amd64")
        + package("three", "1")
        + package("three", "2")
        + '[[packages]]\nname = "four"\nvcs = { type = "hg", url = "https://h.example/x", commit-id = "0" }\n'
    )
    parts = ("one 1: No wheel found", "two 1: No wheel found", "three: two versions", "four: repositories of hg")
    assert len(found.problems) == len(parts)
    for part, problem in zip(parts, found.problems, strict=True):
        assert part in problem


def test_repositories_folders_and_archives_of_a_pylock() -> None:
    found = of_pylock(
        PYLOCK
        + '[[packages]]\nname = "a"\nvcs = { type = "git", url = "https://h.example/a", commit-id = "0123" }\n'
        + '[[packages]]\nname = "app"\ndirectory = { path = ".", editable = true }\n'
        + '[[packages]]\nname = "b"\ndirectory = { path = "lib" }\n'
        + '[[packages]]\nname = "c"\nversion = "1"\n'
        + f'archive = {{ url = "https://h.example/c-1-py3-none-any.whl", hashes = {{ sha256 = "{"c" * 64}" }} }}\n'
    )
    assert found.problems == ()
    place = found.sources[0].place
    assert found.sources == (GitRequirement(place=place, url="https://h.example/a", reference="0123", name="a"),)
    assert [each.path for each in found.folders] == ["lib"]
    assert [(each.wheel, each.hashes) for each in found.requirements] == [
        ("https://h.example/c-1-py3-none-any.whl", ("c" * 64,))
    ]


@pytest.mark.parametrize(
    ("text", "uv", "reason"),
    [
        ("version = ", True, "this is not TOML"),
        ("version = 2", True, "its format has version 2, and 1 is read: write a pylock.toml"),
        ("", True, "its format has version None"),
        ("", False, "this is not a lock as PEP 751 has it"),
        ('lock-version = "2.0"\ncreated-by = "x"\npackages = []', False, "its format is not read"),
    ],
)
def test_what_is_not_a_lock(text: str, uv: bool, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_lock(text, "lock", uv=uv)


@pytest.mark.parametrize(
    "text", ["version = 1\npackage = [1]", 'version = 1\n[[package]]\nname = "a"\nversion = "x y"']
)
def test_a_lock_of_another_form_is_a_problem_and_no_traceback(text: str) -> None:
    assert "it cannot be read" in of_uv(text).problems[0]


def test_the_lock_of_extend_has_the_files_of_the_other_lock_only() -> None:
    releases = [LockedRelease(name=name, version="1", hashes=("a", "b")) for name in ("x", "y", "z")]
    found, problems = with_hashes_of(releases, {("x", "1"): ("b",), ("y", "1"): ("c",)})
    assert [each.hashes for each in found] == [("b",), (), ("a", "b")]
    assert problems == ["y 1: the index has other files than the lock"]


# Project files.

TOML = """
[project]
name = "mine"
dependencies = ["pandas>=2", "x @ git+https://h.example/x@v1"]

[project.optional-dependencies]
plots = ["matplotlib"]
all = ["mine[plots]", "six"]

[dependency-groups]
test = ["pytest", {include-group = "lint"}]
lint = ["ruff"]

[tool.uv.sources]
pandas = { index = "other" }
"""


@pytest.mark.parametrize(
    ("extras", "groups", "expected"),
    [
        ((), (), ["pandas"]),
        (("all",), (), ["matplotlib", "pandas", "six"]),
        ((), ("Test",), ["pandas", "pytest", "ruff"]),
    ],
)
def test_a_project_file_is_a_requirements_file(
    extras: tuple[str, ...], groups: tuple[str, ...], expected: list[str]
) -> None:
    read = read_project(TOML, "pyproject.toml", extras=extras, groups=groups)
    assert read.problems == ()
    assert sorted(each.name for each in read.requirements) == expected
    assert [each.reference for each in read.sources] == ["v1"]
    assert read.notes == ("pyproject.toml: tool.uv.sources is not read (pandas): uv.lock has what uv takes",)


def test_the_groups_alone() -> None:
    read = read_project(TOML, "pyproject.toml", extras=("all",), groups=("lint",), own=False)
    assert [each.name for each in read.requirements] == ["ruff"]
    assert read.problems == ()


@pytest.mark.parametrize(
    ("text", "extras", "groups", "problem"),
    [
        ("[project", (), (), "p: this is not TOML"),
        ("[build-system]", (), (), "p: it has no [project] and no [dependency-groups]"),
        ("[dependency-groups]\na = []", (), (), "p: it has no [project]: choose groups with --group (a)"),
        ("[tool.poetry.dependencies]\nsix = '*'", (), (), "p: it has no [project]: `poetry export"),
        ("[project]\ndynamic = ['dependencies']", (), (), "its dependencies are dynamic: give its folder as --source"),
        ("[project]\ndependencies = ['pandas=2']", (), (), "p dependencies: pandas=2: this is not a requirement"),
        (TOML, ("plot",), (), "--extra plot: p does not have it: it has all, plots"),
        (TOML, (), ("tests",), "--group tests: p does not have it: it has lint, test"),
        ("[dependency-groups]\na = [{include-group = 'b'}]", (), ("a",), "p group a: "),
        ("[dependency-groups]\na = [{include-group = 'a'}]", (), ("a",), "p group a: "),
    ],
)
def test_project_files_that_are_refused(
    text: str, extras: tuple[str, ...], groups: tuple[str, ...], problem: str
) -> None:
    (found,) = read_project(text, "p", extras=extras, groups=groups).problems
    assert problem in found


# Files of other tools.


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("environment.yml", "conda"),
        ("env-gpu.yaml", "conda"),
        ("Pipfile", "pipenv requirements"),
        ("Pipfile.lock", "pipenv requirements"),
        ("poetry.lock", "poetry export"),
        ("pdm.lock", "pdm export"),
        ("pixi.toml", "pixi run"),
        ("setup.py", "-e ."),
        ("setup.cfg", "-e ."),
        ("x-1-py3-none-any.whl", "name it in a requirements file"),
        ("requirements.txt", ""),
        ("requirements-dev.in", ""),
    ],
)
def test_files_of_other_tools_get_one_sentence(name: str, word: str) -> None:
    assert word in sentence_of(name)
    assert bool(word) == bool(sentence_of(name))


def test_what_extend_reads_is_known_by_its_name() -> None:
    assert [kind_of(name) for name in ("uv.lock", "pylock.toml", "pylock.train.toml", "pyproject.toml", "r.txt")] == [
        *("uv", "pylock", "pylock", "project", "")
    ]
    assert all(map(sentence_of, OF_OTHER_TOOLS))


def test_what_is_kept_is_known_by_its_name() -> None:
    names = ("torch", "nvidia-cublas", "triton", "numpy")
    assert [KEPT.has(canonicalize_name(name)) for name in names] == [True, True, True, False]
    assert replace(KEPT, patterns=()).has("triton") is False
