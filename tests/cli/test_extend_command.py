"""``build.py extend`` as far as it goes without an engine: what is refused, what is copied, what is resolved."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from trainworks.cli import main
from trainworks.cli.extension_lock import resolve
from trainworks.cli.source import read_source
from trainworks.errors import LockError
from trainworks.host.pip import PipSettings
from trainworks.host.settings import HostSettings
from trainworks.imagetest.secrets import Finding, added
from trainworks.plan.requirements import BaseImage, Distribution

# A key in form only: the body says what it is.
PRIVATE_KEY = (
    "-----BEGIN OPENSSH PRIVATE KEY-----\n"
    + "bm90YWtleW5vdGFrZXlub3Rha2V5bm90YWtleW5vdGFrZXk\n" * 3
    + "-----END OPENSSH PRIVATE KEY-----\n"
)

BASE = BaseImage(
    reference="my/base:1",
    identifier="sha256:" + "b" * 64,
    python="/usr/bin/python3",
    version="3.11",
    glibc="2.36",
    machine="x86_64",
    environment={},
    distributions=(
        Distribution(name="Frame_Work", version="2.0+vendor", extras=('local-tool>=1; extra == "tools"',)),
        Distribution(name="broken", version="not a version"),
    ),
)


@pytest.fixture
def code(tmp_path: Path) -> Path:
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "train.py").write_text("print('trained')\n")
    return folder


Refused = Callable[..., tuple[int, str]]


@pytest.fixture
def refused(root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Refused:
    """Give the command line; no engine can be reached, so whoever gets so far ends with another status."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")

    def call(*words: str | Path) -> tuple[int, str]:
        names = ("--base", "my/base:1", "--tag", "my/train:1")
        status = main(("extend", *names, *map(str, words)), root)
        return status, capsys.readouterr().err

    return call


def test_everything_that_is_wrong_is_said_at_once(refused: Refused, code: Path, tmp_path: Path) -> None:
    (code / ".env").write_text("TOKEN=1\n")
    (code / "deploy.pem").write_text(PRIVATE_KEY)
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("six\ngit+https://git.example/x\n")
    status, text = refused(
        *("--tag", "My/Train", "--requirements", requirements, "--source", code, "--entry-point", "trian.py")
    )
    assert status == 12
    assert "5 problems with the extension" in text
    parts = ("--tag 'My/Train'", "line 2", ".env is a file for secrets", "deploy.pem: private key", "mean train.py?")
    assert [part for part in parts if part not in text] == []
    assert ".trainworksignore" in text


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ((), "neither --requirements nor --source"),
        (("--requirements", "none.txt"), "none.txt: No such file or directory"),
        (("--source", "none"), "--source none does not exist"),
        (("--source", "none", "--entry-point", "train.py"), "--source none does not exist"),
        (("--entry-point", "train.py"), "--source, which is not given"),
    ],
)
def test_what_is_missing(refused: Refused, words: tuple[str, ...], reason: str) -> None:
    status, text = refused(*words)
    assert status == 12
    assert reason in text


def test_without_problems_the_engine_is_next(refused: Refused, code: Path) -> None:
    status, text = refused("--source", code, "--entry-point", "train.py")
    assert status == 6, text
    assert "code: 1 file, 0.0 kB; the largest is train.py" in text


def test_an_error_for_programs(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(("extend", "--base", "b:1", "--tag", "t:1", "--format", "json"), root)
    content = json.loads(capsys.readouterr().out)
    assert (status, content["error"], content["exit_status"]) == (12, "ExtendError", 12)


# The code.


def test_history_caches_and_what_is_ignored_stay_outside(code: Path) -> None:
    for name in (".git/config", "pkg/__pycache__/a.pyc", "pkg/a.py", "data/big.bin", "data/keep.txt", "x.log"):
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
        *(".git/", "pkg/__pycache__/", "data/big.bin", "x.log", ".dockerignore", ".trainworksignore")
    }


def test_a_dockerignore_counts_where_there_is_no_file_of_ours(code: Path) -> None:
    (code / "a.log").touch()
    (code / ".dockerignore").write_text("*.log\n")
    assert [file.path for file in read_source(code).files] == ["train.py"]


@pytest.mark.parametrize(
    "name",
    [".env", ".env.production", "keys/id_rsa", ".aws/credentials", ".aws/config", ".ssh/config", "a.p12", ".netrc"],
)
def test_files_for_secrets_are_refused_by_name_unless_they_are_ignored(code: Path, name: str) -> None:
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
    ],
)
def test_secrets_are_found_by_content(code: Path, content: str, problem: str) -> None:
    (code / "settings.py").write_text(content)
    (found,) = read_source(code, forbidden=("http://proxy.example:3128",)).problems
    assert "settings.py" in found
    assert problem in found


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
    assert "no file is left" in read_source(code).problems[0]


# Requirements.


def wheel(folder: Path, name: str, version: str, *requires: str) -> None:
    stem = f"{name}-{version}"
    lines = [
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        *(f"Requires-Dist: {row}\n" for row in requires),
    ]
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as file:
        file.writestr(f"{stem}.dist-info/METADATA", "".join(lines))
        file.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{stem}.dist-info/RECORD", "")


@pytest.fixture
def settings(tmp_path: Path) -> HostSettings:
    """Give pip settings with a folder of wheels and no index: nothing here needs a network."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    wheel(folder, "user_tool", "1.0", "frame-work>=2", "helper")
    wheel(folder, "user_tool", "2.0", "frame-work>=3")
    wheel(folder, "helper", "5")
    wheel(folder, "local_tool", "1.5")
    wheel(folder, "frame_work", "3.0")
    return HostSettings(pip=PipSettings(find_links=(str(folder),), no_index=True))


def resolved(text: str, settings: HostSettings, base: BaseImage = BASE) -> list[str]:
    lines = resolve(text, base, settings, os.environ, where="requirements.txt").splitlines()
    assert all("--hash=sha256:" in line for line in lines if line.startswith(" "))
    return [line.removesuffix(" \\") for line in lines if not line.startswith(" ")]


def test_requirements_are_resolved_around_what_the_base_has(settings: HostSettings) -> None:
    # Version 2.0 would need another framework; the base's own has a version that no index has.
    assert resolved("user-tool\n", settings) == ["helper==5", "user-tool==1.0"]


def test_an_extra_of_what_the_base_has_is_installed(settings: HostSettings) -> None:
    assert resolved("Frame.Work[tools]\n", settings) == ["local-tool==1.5"]


def test_nothing_to_install(settings: HostSettings) -> None:
    assert resolved("frame-work\n", settings) == []


def test_a_conflict_through_a_dependency_names_both_versions(settings: HostSettings) -> None:
    with pytest.raises(LockError) as caught:
        resolved("user-tool==2.0\n", settings)
    for part in ("requirements.txt for my/base:1 cannot be resolved", "frame-work>=3", "frame-work==2.0+vendor"):
        assert part in str(caught.value)
    assert "never replaced" in caught.value.hint


def test_only_wheels_are_installed(settings: HostSettings) -> None:
    folder = settings.pip.local_folders[0]
    (folder / "source_only-1.0.tar.gz").write_bytes(b"")
    with pytest.raises(LockError) as caught:
        resolved("source-only\n", settings)
    assert "only wheels are installed" in caught.value.hint


def test_the_base_python_decides(settings: HostSettings) -> None:
    text = "helper ; python_version < '3.10'\nlocal-tool ; python_version >= '3.10'\n"
    assert resolved(text, settings) == ["local-tool==1.5"]
    assert resolved(text, settings, replace(BASE, version="3.9")) == ["helper==5"]


# The image tests.


def test_what_the_base_has_is_not_its_extensions_fault() -> None:
    def finding(where: str, path: str) -> Finding:
        return Finding(where=where, path=path, rule="private key", advice="")

    base = (finding("layer a", "etc/key"), finding("label x", ""))
    found = (
        finding("layer b", "etc/key"),
        finding("label x", ""),
        finding("layer b", "new/key"),
        finding("label y", ""),
    )
    assert added(found, base) == found[2:]
