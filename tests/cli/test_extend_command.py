"""Test ``build.py extend`` as far as it goes without an engine: refusals, copied files, resolved
requirements.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from image.here import Here
from trainworks.cli import main
from trainworks.errors import ExtendError, LockError
from trainworks.extend.inputs import ExtensionInputs, notes, read_inputs
from trainworks.extend.lock import (
    inputs_digest,
    lock_path_of,
    locked_commits,
    locks_of,
    read_lock,
    write_lock,
)
from trainworks.extend.plan import WheelSource
from trainworks.extend.render import INSTALLER
from trainworks.extend.request import ExtendRequest
from trainworks.extend.requirement_inputs import (
    OptionalDependencies,
    RequestedRequirements,
    read_requirements,
)
from trainworks.extend.requirements import (
    BaseDistribution,
    ExtendedBase,
    ExtensionLock,
    GitRequirement,
)
from trainworks.extend.resolve import check_python
from trainworks.extend.user_code import read_source
from trainworks.extend.vcs_sources import folder_source, git_sources
from trainworks.facts.rows import Facts
from trainworks.imagetest.probe_request import IMPORTS, ask_program
from trainworks.imagetest.secrets import SecretFinding, added

# A key in form only: its body says that it is one of a test.
PRIVATE_KEY = (
    "-----BEGIN OPENSSH PRIVATE KEY-----\n"
    + "bm90YWtleW5vdGFrZXlub3Rha2V5bm90YWtleW5vdGFrZXk\n" * 3
    + "-----END OPENSSH PRIVATE KEY-----\n"
)

BASE = ExtendedBase(
    reference="my/base:1",
    identifier="sha256:" + "b" * 64,
    python="/usr/bin/python3",
    version="3.11",
    glibc="2.36",
    machine="x86_64",
    environment={},
    distributions=(
        BaseDistribution(name="Frame_Work", version="2.0+vendor"),
        BaseDistribution(name="broken", version="not a version"),
    ),
    kept={"frame-work": "2.0+vendor"},
)


@pytest.fixture
def code(tmp_path: Path) -> Path:
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "train.py").write_text("print('trained')\n")
    return folder


Refused = Callable[..., tuple[int, str]]


@pytest.fixture
def refused(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Refused:
    """Give the command line.

    No engine can be reached, so a run that gets so far ends with another status.
    """
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")

    def call(*words: str | Path, tag: str = "my/train:1") -> tuple[int, str]:
        names = ("--base", "my/base:1", "--tag", tag)
        status = main(("extend", *names, *map(str, words)), root)
        return status, capsys.readouterr().err

    return call


def test_everything_that_is_wrong_is_said_at_once(
    refused: Refused, code: Path, tmp_path: Path
) -> None:
    (code / ".env").write_text("TOKEN=1\n")
    (code / "deploy.pem").write_text(PRIVATE_KEY)
    requirements = tmp_path / "requirements.txt"
    requirements.write_text(
        "six\nhttps://token@git.example/x.whl\n--index-url https://packages.example/simple\n"
    )
    status, text = refused(
        *("--requirements", requirements, "--source", code, "--entry-point", "trian.py"),
        tag="My/Train",
    )
    assert status == 12
    assert "5 problems with the extension" in text
    parts = (
        "--tag 'My/Train'",
        "line 2",
        ".env is a file that holds secrets",
        "deploy.pem: private key",
        "mean train.py?",
    )
    assert [part for part in parts if part not in text] == []
    assert ".trainworksignore" in text


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ((), "give --requirements, --source or --apt"),
        (("--requirements", "none.txt"), "none.txt: No such file or directory"),
        (("--requirements", os.devnull), "nothing is asked for"),
        (("--source", "none"), "--source none does not exist"),
        (("--source", "none", "--entry-point", "train.py"), "--source none does not exist"),
        (("--entry-point", "train.py"), "--source, which is not given"),
        (("--apt", "lib gl1"), "--apt 'lib gl1' is not the name of a Debian package"),
    ],
)
def test_what_is_missing(refused: Refused, words: tuple[str, ...], reason: str) -> None:
    status, text = refused(*words)
    assert status == 12
    assert reason in text


def test_without_problems_the_engine_is_next(refused: Refused, code: Path) -> None:
    status, text = refused(
        "--source", code, "--entry-point", "train.py", "--apt", "g++", "--apt", "libgl1"
    )
    assert status == 6, text
    assert "code: 1 file, 0.0 kB" in text


UV_LOCK = (
    "version = 1\n"
    'requires-python = ">=3.11"\n'
    "[[package]]\n"
    'name = "app"\n'
    'version = "1"\n'
    'source = { SOURCE = "." }\n'
)
APP = '[project]\nname = "app"\nversion = "1"\n'


def inputs_of(
    code: Path, *, extras: tuple[str, ...] = (), groups: tuple[str, ...] = ()
) -> ExtensionInputs:
    request = ExtendRequest(
        base="my/base:1",
        tag="my/train:1",
        source=code,
        extras=extras,
        groups=groups,
        entry_point="train.py",
    )
    return read_inputs(request, (), {})


@pytest.mark.parametrize(
    ("files", "file"),
    [
        ({"requirements.txt": "", "uv.lock": UV_LOCK, "pylock.toml": ""}, "requirements.txt"),
        (
            {
                "uv.lock": UV_LOCK.replace("SOURCE", "virtual"),
                "pylock.toml": "",
                "pyproject.toml": APP,
            },
            "uv.lock",
        ),
        ({"pylock.toml": 'lock-version = "1.0"\ncreated-by = "x"\npackages = []\n'}, "pylock.toml"),
        ({"pyproject.toml": APP}, "pyproject.toml"),
        ({}, ""),
    ],
)
def test_what_the_code_itself_says_is_installed(
    code: Path, files: dict[str, str], file: str
) -> None:
    write_files(code, files)
    inputs = inputs_of(code)
    assert inputs.file == (code / file if file else None)
    text = "".join(notes(ExtendRequest(base="b", tag="t", source=code), inputs))
    others = [name for name in files if name != file and "lock" in name]
    assert [
        name for name in others if f"{code / name} is not read: --requirements" not in text
    ] == []


@pytest.mark.parametrize(("kind", "project"), [("editable", "pyproject.toml"), ("virtual", "")])
def test_a_project_that_its_lock_does_not_install_is_not_built(
    code: Path, kind: str, project: str
) -> None:
    write_files(code, {"uv.lock": UV_LOCK.replace("SOURCE", kind), "pyproject.toml": APP})
    inputs = inputs_of(code)
    # Either way the launcher is told that it has nothing to install.
    assert (inputs.project, inputs.installed) == (project, ("pyproject.toml",))


def test_extras_and_groups_of_the_code(code: Path) -> None:
    text = f"{APP}optional-dependencies.fast = ['six']\n[dependency-groups]\ndev = ['pytest']\n"
    write_files(code, {"requirements.txt": "einops\n", "pyproject.toml": text})
    inputs = inputs_of(code, extras=("fast",), groups=("dev",))
    assert plain(inputs.requested) == ["einops"]
    assert inputs.requested.words == ["--group", f"{code / 'pyproject.toml'}:dev"]
    assert inputs.extras == ("fast",)
    (code / "pyproject.toml").unlink()
    with pytest.raises(ExtendError, match="--group dev: there is no pyproject"):
        inputs_of(code, groups=("dev",))
    with pytest.raises(ExtendError, match="--extra fast: there is no project"):
        inputs_of(code, extras=("fast",))


def test_a_file_of_another_tool_in_the_code_is_said(code: Path) -> None:
    write_files(code, {"environment.yml": "", "config.yml": ""})
    text = "".join(notes(ExtendRequest(base="b", tag="t", source=code), inputs_of(code)))
    assert "environment.yml is not read: it is conda's: `conda run" in text
    assert "config.yml" not in text


def test_pips_letter_names_the_requirements(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "environment.yml").write_text("name: x\n")
    status, text = refused("-r", tmp_path / "environment.yml")
    assert status == 12
    assert text.count("conda") == 2
    assert "1 problem with the extension" in text


def test_a_compiler_and_a_variable_are_checked_before_anything_starts(refused: Refused) -> None:
    words = ("--apt", "g++", "--with", "nvc", "--build-env", "NAME")
    status, message = refused(*words)
    assert status == 2, message
    assert "argument --build-env: must be NAME=VALUE, got 'NAME'" in message
    assert "unknown compiler in --with: 'nvc'; did you mean nvcc?" in message


def test_an_error_for_programs(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(("extend", "--base", "b:1", "--tag", "t:1", "--format", "json"), root)
    content = json.loads(capsys.readouterr().out)
    assert (status, content["error"], content["exit_status"]) == (12, "ExtendError", 12)


# The code.


def test_history_caches_and_what_is_ignored_stay_outside(code: Path) -> None:
    for name in (
        ".git/config",
        "pkg/__pycache__/a.pyc",
        "pkg/a.py",
        "data/big.bin",
        "data/keep.txt",
        "x.log",
    ):
        (code / name).parent.mkdir(parents=True, exist_ok=True)
        (code / name).write_text("x\n")
    (code / "pkg" / "a.py").chmod(0o755)
    (code / ".dockerignore").write_text("train.py\n")
    (code / ".trainworksignore").write_text("# comment\n*.log\ndata\n!data/keep.txt\n")
    tree = read_source(code)
    assert tree.problems == ()
    assert [(file.path, file.mode) for file in tree.files] == [
        ("data/keep.txt", 0o644),
        ("pkg/a.py", 0o755),
        ("train.py", 0o644),
    ]
    assert set(tree.left_out) == {
        *(
            ".git/",
            "pkg/__pycache__/",
            "data/big.bin",
            "x.log",
            ".dockerignore",
            ".trainworksignore",
        )
    }


def test_a_dockerignore_counts_where_there_is_no_file_of_ours(code: Path) -> None:
    (code / "a.log").touch()
    (code / ".dockerignore").write_text("*.log\n")
    assert [file.path for file in read_source(code).files] == ["train.py"]


@pytest.mark.parametrize(
    "name",
    [
        ".env",
        ".env.production",
        "keys/id_rsa",
        ".aws/credentials",
        ".aws/config",
        ".ssh/config",
        "a.p12",
        ".netrc",
    ],
)
def test_files_for_secrets_are_refused_by_name_unless_they_are_ignored(
    code: Path, name: str
) -> None:
    (code / name).parent.mkdir(exist_ok=True)
    (code / name).write_text("x\n")
    (problem,) = read_source(code).problems
    assert name in problem
    (code / ".trainworksignore").write_text(f"{name}\n")
    assert read_source(code).problems == ()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (PRIVATE_KEY, "private key"),
        ("key = 'AKIA" + "Q" * 16 + "'\n", "AWS access key"),
        ("see http://proxy.example:3128 here\n", "setting of the build host"),
        ("login(token='hf_" + "aB3" * 12 + "')\n", "Hugging Face token"),
        ("TOKEN = 'ghp_" + "aB3" * 12 + "'\n", "GitHub token"),
        ("TOKEN = 'glpat-" + "aB3" * 7 + "'\n", "GitLab token"),
        ("openai.api_key = 'sk-proj-" + "aB3_" * 12 + "'\n", "OpenAI key"),
        ("SLACK = 'xoxb-" + "123456789012-" * 2 + "'\n", "Slack token"),
        ("os.environ['WANDB_API_KEY'] = '" + "0a" * 20 + "'\n", "Weights & Biases key"),
    ],
)
def test_secrets_are_found_by_content(code: Path, content: str, problem: str) -> None:
    (code / "settings.py").write_text(content)
    (found_problem,) = read_source(code, forbidden=("http://proxy.example:3128",)).problems
    assert "settings.py" in found_problem
    assert problem in found_problem


def test_a_certificate_and_an_example_are_no_secrets(code: Path) -> None:
    (code / "ca.pem").write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    (code / ".env.example").write_text("TOKEN=\n")
    assert read_source(code).problems == ()


def test_links_are_followed_inside_only(code: Path, tmp_path: Path) -> None:
    (tmp_path / "outside.py").touch()
    (code / "inside.py").symlink_to("train.py")
    (code / "outside.py").symlink_to(tmp_path / "outside.py")
    (code / "broken.py").symlink_to("none.py")
    (code / "folder").symlink_to(tmp_path)
    tree = read_source(code)
    assert [file.path for file in tree.files] == ["inside.py", "train.py"]
    assert [problem.partition(": ")[2] for problem in tree.problems] == [
        "folder is a link to a folder: copy the folder, or ignore the link",
        "broken.py is a broken link",
        f"outside.py is a link that leads out of {code}",
    ]


def test_nothing_but_ignored_files(code: Path) -> None:
    (code / ".trainworksignore").write_text("*\n")
    assert "no files to copy" in read_source(code).problems[0]


# Requirements.


def write_files(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def read(
    folder: Path, files: dict[str, str], name: str = "requirements.txt", **more: Any
) -> RequestedRequirements:
    write_files(folder, files)
    return read_requirements(folder / name, {"TOKEN": "secret"}, **more)


def plain(requested: RequestedRequirements) -> list[str]:
    return [line.partition("  #@ ")[0] for line in requested.lines]


def test_lines_go_on_to_uv_as_they_are_with_where_they_stood(tmp_path: Path) -> None:
    requested = read(
        tmp_path,
        {
            "requirements.txt": (
                "# head\n"
                "Pandas>=2 ; python_version > '3' # tail\n"
                "-r more/other.txt\n"
                "--pre\n"
                "six==1 \\\n"
                "  --hash=sha256:00\n"
                "--extra-index-url https://me:${TOKEN}@h.example/simple\n"
            ),
            "more/other.txt": (
                "-c limits.txt\n"
                "-r ../requirements.txt\n"
                "einops @ https://h.example/einops-1.tar.gz\n"
            ),
            "more/limits.txt": "-r deeper.txt\nnumpy<2\n",
            "more/deeper.txt": "scipy<1.14\n",
        },
    )
    assert requested.problems == []
    file = tmp_path / "requirements.txt"
    assert requested.lines == [
        f"Pandas>=2 ; python_version > '3'  #@ {file} line 2",
        # pip installs the packages that a file of constraints includes.
        f"scipy<1.14  #@ {tmp_path}/more/deeper.txt line 1",
        f"einops @ https://h.example/einops-1.tar.gz  #@ {tmp_path}/more/other.txt line 3",
        f"--pre  #@ {file} line 4",
        f"six==1    --hash=sha256:00  #@ {file} line 5",
        f"--extra-index-url https://me:${{TOKEN}}@h.example/simple  #@ {file} line 7",
    ]
    assert requested.constraints == ["numpy<2"]
    assert (requested.variables, requested.hashed) == ({"TOKEN"}, True)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_encodings(encoding: str, tmp_path: Path) -> None:
    (tmp_path / "r.txt").write_bytes("einops # é\n".encode(encoding))
    assert plain(read_requirements(tmp_path / "r.txt", {})) == ["einops"]
    (tmp_path / "r.txt").write_bytes("einops # é\n".encode("latin-1"))
    assert "r.txt is not UTF-8: `iconv" in read_requirements(tmp_path / "r.txt", {}).problems[0]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("-r none.txt", "none.txt: No such file or directory"),
        ("./none", "none is not a folder, a wheel or a source archive"),
        ("--index-url https://me:secret@packages.example/simple", "has a password or token in it"),
        (
            "--extra-index-url https://token@packages.example/simple",
            "name a variable with it: ${NAME}",
        ),
        (
            "--index-url https://me:${NOT_SET}@packages.example/simple",
            "the variable NOT_SET is not set",
        ),
        ("https://token@packages.example/x-1-py3-none-any.whl", "has a password or token in it"),
        ("https://h.example/x-1-py3-none-any.whl?token=secret", "has a password or token in it"),
        (
            "x @ https://h.example/x-1.zip?raw=1&X-Amz-Signature=secret&a=b#sha256=0",
            "has a password or token in it",
        ),
        ("https://h.example/x-1-py3-none-any.whl?jwt=secret", "has a password or token in it"),
        ("https://h.example/x-1-py3-none-any.whl?my_pat=secret", "has a password or token in it"),
        ("https://h.example/x-1-py3-none-any.whl?a=1;pass=secret", "has a password or token in it"),
        ("https://me:it'secret@h.example/x-1-py3-none-any.whl", "has a password or token in it"),
        ("https://me:it@secret@h.example/x-1-py3-none-any.whl", "has a password or token in it"),
        (
            "https://h.example/x-1-py3-none-any.whl?sig=${NOT_SET}",
            "the variable NOT_SET is not set",
        ),
        (
            "-c limits.txt",
            "limits.txt line 2: x @ https://h.example/x-1.zip: the address has a password",
        ),
        ("git+ftp://git.example/x", "begins with git+https://"),
        ("git+https://token@git.example/x", "has a password or token in it"),
        ("git+https://git.example/x@--upload-pack=evil", "is not the name of a branch"),
        ("git+https://git.example/x#subdirectory=../y", "is not a folder of the repository"),
    ],
)
def test_lines_that_are_refused(line: str, problem: str, tmp_path: Path) -> None:
    limits = "six<2\nx @ https://me:secret@h.example/x-1.zip\n"
    (found_problem,) = read(
        tmp_path, {"requirements.txt": f"six\n\n{line}  # why\n", "limits.txt": limits}
    ).problems
    assert problem in found_problem
    assert "secret" not in found_problem


def test_values_of_a_query_that_are_no_secret_are_taken(tmp_path: Path) -> None:
    line = "https://h.example/x-1-py3-none-any.whl?path=a&compass=b&patch=c&raw=1"
    requested = read(tmp_path, {"requirements.txt": f"{line}\n"})
    assert (requested.problems, plain(requested)) == ([], [line])


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("git+https://h.example/a/b.git", {"url": "https://h.example/a/b.git"}),
        ("git+ssh://git@h.example/a@v1.0", {"url": "ssh://git@h.example/a", "reference": "v1.0"}),
        (
            "git+file:///a@main#egg=B[x]&subdirectory=py/b",
            {
                "url": "file:///a",
                "reference": "main",
                "name": "b",
                "extras": "[x]",
                "subdirectory": "py/b",
            },
        ),
        (
            "b[x]@git+https://h.example/a@f/new ; python_version > '3'",
            {
                "url": "https://h.example/a",
                "reference": "f/new",
                "name": "b",
                "extras": "[x]",
                "marker": "python_version > '3'",
            },
        ),
    ],
)
def test_git_requirements(line: str, expected: dict[str, str], tmp_path: Path) -> None:
    (git_requirement,) = read(tmp_path, {"requirements.txt": line}).repositories
    assert git_requirement == GitRequirement(place=git_requirement.place, **expected)


def test_files_and_folders_of_this_machine_go_into_the_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read paths relative to the file, which is where a job starts, or to the current folder."""
    monkeypatch.chdir(tmp_path)
    lines = (
        "./dist/x-1.0-py3-none-any.whl[a] ; python_version > '3'\n"
        f"y @ {(tmp_path / 'my dir').as_uri()}/y-1.tar.gz\n"
        "-e ./lib[b]\nlib2 @ ./lib\n--find-links wheels\n"
    )
    files = {
        "requirements.txt": lines,
        "dist/x-1.0-py3-none-any.whl": "x",
        "my dir/y-1.tar.gz": "y",
    }
    requested = read(
        tmp_path, {**files, "lib/setup.py": "", "lib/.git/config": "", "wheels/.keep": ""}
    )
    assert requested.problems == []
    assert plain(requested) == [
        "/run/inputs/files/x-1.0-py3-none-any.whl[a] ; python_version > '3'",
        "/run/inputs/files/y-1.tar.gz",
    ]
    assert requested.files.keys() == {"files/x-1.0-py3-none-any.whl", "files/y-1.tar.gz"}
    assert [(folder.origin, folder.extras) for folder in requested.folders] == [
        ("./lib", "[b]"),
        ("./lib", ""),
    ]
    assert [file.path for file in requested.folders[0].tree.files] == ["setup.py"]
    assert requested.links == [tmp_path / "wheels"]
    (tmp_path / "more").mkdir()
    (tmp_path / "more/r.txt").write_text("./lib\n")
    assert len(read_requirements(Path("more/r.txt"), {}).folders) == 1
    (tmp_path / "lib" / ".env").touch()
    assert (
        ".env is a file that holds secrets"
        in read_requirements(tmp_path / "requirements.txt", {}).problems[0]
    )


PYPROJECT = """
[project]
name = "mine"
version = "1"
dependencies = ["einops"]
optional-dependencies = {fast = ["numba"]}
[dependency-groups]
dev = ["pytest", {include-group = "lint"}]
lint = ["ruff"]
"""


@pytest.mark.parametrize(
    "name", ["pyproject.toml", "uv.lock", "pylock.toml", "pylock.dev.toml", "train.py"]
)
def test_projects_locks_and_scripts_are_uvs_to_read(tmp_path: Path, name: str) -> None:
    text = "# ///\n" if name == "train.py" else PYPROJECT
    optional = OptionalDependencies(extras=("fast",), groups=("dev",))
    requested = read(tmp_path, {name: text}, name, optional=optional)
    assert (requested.problems, requested.lines, bool(requested)) == ([], [], True)
    assert requested.words == ["-r", str(tmp_path / name), "--extra", "fast", "--group", "dev"]
    assert requested.read == {name: text}
    # A package that is installed beside a lock gets its requirements from the lock.
    assert requested.hashed == ("lock" in name)


def test_what_uv_reads_has_no_login_and_poetry_alone_is_refused(tmp_path: Path) -> None:
    index = '[[tool.uv.index]]\nurl = "https://me:word@h.example/simple"\n'
    (problem,) = read(
        tmp_path, {"pyproject.toml": f"{PYPROJECT}{index}"}, "pyproject.toml"
    ).problems
    assert "pyproject.toml line 11: the address has a password or token in it" in problem
    assert "word@" not in problem
    poetry = "[tool.poetry]\nname = 'x'\n"
    assert (
        "poetry export" in read(tmp_path, {"pyproject.toml": poetry}, "pyproject.toml").problems[0]
    )
    assert (
        "this is not TOML"
        in read(tmp_path, {"pyproject.toml": "a = ["}, "pyproject.toml").problems[0]
    )


def test_a_lock_says_whether_its_project_is_installed(tmp_path: Path) -> None:
    assert read(tmp_path, {"uv.lock": UV_LOCK.replace("SOURCE", "virtual")}, "uv.lock").virtual
    assert not read(tmp_path, {"uv.lock": UV_LOCK.replace("SOURCE", "editable")}, "uv.lock").virtual


@pytest.mark.parametrize(
    "name", ["environment.yml", "env-gpu.yaml", "Pipfile", "Pipfile.lock", "poetry.lock"]
)
def test_a_file_of_another_tool_gets_the_command_that_converts_it(
    name: str, tmp_path: Path
) -> None:
    (problem,) = read(tmp_path, {name: ""}, name).problems
    assert (
        "> requirements.txt` writes what pip reads" in problem or "-o requirements.txt" in problem
    )


# The lock.

LOCK = ExtensionLock(
    pins=(
        "--extra-index-url https://h.example/simple\n"
        "six==1.17.0 \\\n"
        f"    --hash=sha256:{'0' * 64}\n"
    ),
    local={"mine": "1.0"},
    commits={"git+https://h.example/lib@main": "0123456789" * 4},
    project="mine",
    notes=["fsspec 2026.9.0 -> 2024.9.0"],
)


def test_a_lock_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = lock_path_of(tmp_path / "requirements.txt", BASE.reference)
    write_lock(path, LOCK, "sha256:one", BASE)
    assert read_lock(path, "sha256:one") == LOCK
    assert LOCK.locked == (("mine", "1.0"), ("six", "1.17.0"))
    assert read_lock(path, "sha256:two") is None
    assert locked_commits(path) == LOCK.commits
    assert LOCK.hashes == {("six", "1.17.0"): ("0" * 64,)}
    assert locks_of(tmp_path / "requirements.txt") == [path.name]
    assert lock_path_of(tmp_path / "requirements.txt", "my/base:2") != path
    path.write_text("mine\n")
    with pytest.raises(ExtendError, match="was not written by extend"):
        read_lock(path, "sha256:one")


@pytest.mark.parametrize("data", ["{'commits': 1}", '{"commits": {}, "unknown": 1}'])
def test_a_lock_that_somebody_has_spoiled_is_named(data: str, tmp_path: Path) -> None:
    path = lock_path_of(tmp_path / "requirements.txt", BASE.reference)
    write_lock(path, LOCK, "sha256:one", BASE)
    path.write_text(re.sub(r"(?m)^# data: .*", f"# data: {data}", path.read_text()))
    with pytest.raises(ExtendError, match=f"the data of {re.escape(str(path))} cannot be read"):
        read_lock(path, "sha256:one")


def test_what_decides_a_lock(tmp_path: Path) -> None:
    """Keep the lock after a change of code that cannot change the requirements."""
    requested = read(tmp_path, {"requirements.txt": "six\n"})

    def digest(files: dict[str, str], base: ExtendedBase = BASE) -> str:
        folder = write_files(tmp_path / "src", files)
        source = folder_source(read_source(folder).files, folder)
        return inputs_digest(requested, [source], {}, base)

    first = digest({"setup.py": "1", "a.py": "1"})
    assert digest({"a.py": "2"}) == first
    assert digest({"setup.py": "2"}) != first
    assert digest({"setup.py": "1"}, replace(BASE, kept={"frame-work": "3"})) != first
    assert digest({"setup.py": "1"}, replace(BASE, identifier="sha256:" + "c" * 64)) == first


@pytest.mark.usefixtures("repository")
def test_a_folder_has_the_version_that_its_repository_says(tmp_path: Path) -> None:
    """Give the folder the version of the same commit by git+file://: setuptools_scm reads it, where
    there is no git.
    """
    folder = tmp_path / "repository"
    source = folder_source(read_source(folder).files, folder)
    requirement = GitRequirement(place="", url=folder.as_uri())
    (of_git,), _ = git_sources(
        [requirement], {}, {"XDG_CACHE_HOME": str(tmp_path / "cache")}, resolving=True
    )
    name = "source/.git_archival.txt"
    assert unpacked(source)[name] == unpacked(of_git)[name]
    assert "describe-name: v1.0-1-g" in unpacked(source)[name]


# Git.


@pytest.fixture
def repository(tmp_path: Path) -> Callable[..., str]:
    """Return a function that runs git in a repository with a tag, a branch and a submodule."""

    def git(*words: str, folder: str = "repository") -> str:
        names = (
            "user.name=a",
            "user.email=a@b.example",
            "protocol.file.allow=always",
            "init.defaultBranch=main",
        )
        options = [word for name in names for word in ("-c", name)]
        done = subprocess.run(
            ("git", "-C", str(tmp_path / folder), *options, *words),
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    for name in ("repository", "part"):
        (tmp_path / name).mkdir()
        git("init", "--quiet", folder=name)
        (tmp_path / name / f"{name}.py").write_text("first\n")
        git("add", ".", folder=name)
        git("commit", "--quiet", "--message", "first", folder=name)
    git("tag", "v1.0")
    (tmp_path / "repository" / "repository.py").write_text("second\n")
    git("commit", "--quiet", "--all", "--message", "second")
    return git


def unpacked(source: WheelSource) -> dict[str, str]:
    with tarfile.open(fileobj=io.BytesIO(source.archive)) as archive:
        members = {
            member.name: archive.extractfile(member) for member in archive if member.isfile()
        }
        return {name: file.read().decode() for name, file in members.items() if file}


@pytest.mark.parametrize(
    ("reference", "text"), [("", "second"), ("main", "second"), ("v1.0", "first")]
)
def test_a_git_requirement_is_pinned_to_its_commit(
    reference: str, text: str, repository: Callable[..., str], tmp_path: Path
) -> None:
    requirement = GitRequirement(
        place="", url=(tmp_path / "repository").as_uri(), reference=reference
    )
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    (source,), commits = git_sources([requirement], {}, environment, resolving=True)
    commit = repository("rev-parse", f"{reference or 'main'}^{{commit}}")
    assert commits == {str(requirement): commit}
    version = "v1.0-0-g" if text == "first" else "v1.0-1-g"
    files = unpacked(source)
    assert files.keys() == {"source/repository.py", "source/.git_archival.txt"}
    assert (files["source/repository.py"], version in files["source/.git_archival.txt"]) == (
        f"{text}\n",
        True,
    )
    # The branch goes on: the commit of the lock stays, and needs no repository.
    (tmp_path / "repository" / "repository.py").write_text("third\n")
    repository("commit", "--quiet", "--all", "--message", "third")
    (tmp_path / "repository").rename(tmp_path / "gone")
    (again,), same = git_sources([requirement], commits, environment, resolving=False)
    assert (again.archive, same) == (source.archive, commits)


def test_submodules_are_in_the_archive(
    repository: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository("submodule", "--quiet", "add", (tmp_path / "part").as_uri())
    repository("commit", "--quiet", "--message", "with a part")
    # Only a test has a submodule on this machine: git refuses one by default.
    for name, value in (("COUNT", "1"), ("KEY_0", "protocol.file.allow"), ("VALUE_0", "always")):
        monkeypatch.setenv(f"GIT_CONFIG_{name}", value)
    requirement = GitRequirement(place="", url=(tmp_path / "repository").as_uri())
    (source,), _ = git_sources(
        [requirement], {}, {"XDG_CACHE_HOME": str(tmp_path / "cache")}, resolving=True
    )
    assert unpacked(source)["source/part/part.py"] == "first\n"


@pytest.mark.parametrize(
    ("reference", "resolving", "reason"),
    [
        ("none", True, "cannot fetch"),
        ("0" * 40, True, "cannot fetch"),
        ("main", False, "has no commit in the lock"),
    ],
)
def test_a_reference_that_is_not_there(
    reference: str, resolving: bool, reason: str, repository: Callable[..., str], tmp_path: Path
) -> None:
    requirement = GitRequirement(
        place="", url=(tmp_path / "repository").as_uri(), reference=reference
    )
    with pytest.raises(LockError, match=reason):
        git_sources(
            [requirement], {}, {"XDG_CACHE_HOME": str(tmp_path / "cache")}, resolving=resolving
        )
    assert repository("status", "--porcelain") == ""


# The image tests.


def installed(folder: Path, name: str, files: dict[str, str], *, entry_points: str = "") -> None:
    """Install a distribution as pip would: files, metadata and RECORD."""
    metadata = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n",
        "entry_points.txt": entry_points,
    }
    files = {
        **files,
        **{f"{name}-1.dist-info/{metadata_file}": text for metadata_file, text in metadata.items()},
    }
    for path, text in {
        **files,
        f"{name}-1.dist-info/RECORD": "".join(f"{path},,\n" for path in files),
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"good/__init__.py": "", "good/part/__init__.py": "raise ValueError('not at the top')"},
            "",
        ),
        (
            {"bad/__init__.py": "import setuptools_of_nobody"},
            "import bad: ModuleNotFoundError: No module named",
        ),
        (
            {"space/part/__init__.py": "raise OSError('first\\nlast line')"},
            "import space.part: OSError: last line",
        ),
        (
            {"single.py": "raise RuntimeError('no operator')"},
            "import single: RuntimeError: no operator",
        ),
        (
            {"kill.py": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"},
            "was killed by signal 11",
        ),
        ({"quits.py": "import os; os._exit(3)"}, "ended the process with status 3"),
        (
            {"exits.py": "import sys; sys.exit('no licence')"},
            "import exits: SystemExit: no licence",
        ),
        ({"driver.py": "raise ImportError('libcuda.so.1: cannot open shared object file')"}, ""),
        ({"tests/__init__.py": "1 / 0", "real.py": ""}, ""),
        ({"plugin.py": "import host_of_plugins"}, ""),
        ({"data/file.txt": "1", "../../../bin/tool.py": "1 / 0"}, ""),
    ],
)
def test_what_is_installed_is_imported(files: dict[str, str], message: str, tmp_path: Path) -> None:
    """Import by the program itself, in a real Python with real distributions."""
    folder = tmp_path / "lib" / "python" / "site-packages"
    installed(folder, "first", {"first.py": ""})
    installed(folder, "subject", files, entry_points="[host_of_plugins.readers]\nx = plugin:x\n")
    container = Here({**os.environ, "PYTHONPATH": str(folder)})
    names = ("first", "subject")
    answer = ask_program(container, (sys.executable,), IMPORTS, names, timeout=60)
    lines = answer["failed"]
    assert len(lines) == bool(message)
    assert all(
        (line["name"], line["version"]) == ("subject", "1") and message in line["reason"]
        for line in lines
    )


def test_what_the_base_has_is_not_its_extensions_fault() -> None:
    def finding(where: str, path: str) -> SecretFinding:
        return SecretFinding(where=where, path=path, rule="private key", advice="")

    base = (finding("layer a", "etc/key"), finding("label x", ""))
    findings = (
        finding("layer b", "etc/key"),
        finding("label x", ""),
        finding("layer b", "new/key"),
        finding("label y", ""),
    )
    assert added(findings, base) == findings[2:]


# --- the Python that code is for ------------------------------------------------------------------
OTHER = ">=3.12"
HEAD_OF_SCRIPT = f"# /// script\n# requires-python = '{OTHER}'\n# ///\n"


@pytest.mark.parametrize(
    ("files", "options", "named"),
    [
        ({"train.py": HEAD_OF_SCRIPT}, ("--entry-point", "train.py"), "train.py"),
        (
            {"pyproject.toml": f"[project]\nname='a'\nrequires-python='{OTHER}'\n"},
            (),
            "pyproject.toml",
        ),
        # A shell script installs the project in its own way, and the code is
        # for that Python all the same.
        (
            {"pyproject.toml": f"[project]\nname='a'\nrequires-python='{OTHER}'\n", "run.sh": ""},
            ("--entry-point", "run.sh"),
            "pyproject.toml",
        ),
        ({"train.py": HEAD_OF_SCRIPT}, (), ""),
        (
            {"train.py": "print(1)\n", "pyproject.toml": "[tool.ruff]\n"},
            ("--entry-point", "train.py"),
            "",
        ),
    ],
)
def test_code_for_another_python_is_refused_before_anything(
    files: dict[str, str],
    options: tuple[str, ...],
    named: str,
    code: Path,
    root: Path,
    facts: Facts,
) -> None:
    for name, text in files.items():
        (code / name).write_text(text)
    entry = options[1] if options else None
    request = ExtendRequest(base="my/base:1", tag="my/train:1", source=code, entry_point=entry)
    inputs = read_inputs(request, (), {})
    installer = root / "launcher" / INSTALLER
    base = replace(BASE, kept={"torch": "2.13.0+cpu"})
    if not named:
        check_python(inputs.for_python, base, installer, facts)
        return
    with pytest.raises(ExtendError) as refused:
        check_python(inputs.for_python, base, installer, facts)
    problem = f"{code / named}: requires-python is {OTHER}, and this image has Python 3.11.0"
    assert problem in refused.value.message
    assert "extend pytorch-" in refused.value.hint
    assert "-py313-" in refused.value.hint
