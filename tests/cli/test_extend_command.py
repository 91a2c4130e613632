"""``build.py extend`` as far as it goes without an engine: what is refused, what is copied, what is resolved."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from lock.servers import serving
from trainworks.cli import main
from trainworks.engine.protocol import BuiltImage
from trainworks.errors import BuildError, ExtendError, LockError
from trainworks.extend.image import with_index_of
from trainworks.extend.inputs import ExtensionInputs, notes, read_inputs
from trainworks.extend.plan import WheelSource
from trainworks.extend.reading.options import Choice
from trainworks.extend.reading.wanted import read_wanted
from trainworks.extend.reading.wheel import read_wheel
from trainworks.extend.request import ExtendRequest
from trainworks.extend.requirements import BaseDistribution, ExtendedBase, GitRequirement, PackageRequirement, Wheel
from trainworks.extend.resolving.lock import (
    lock_path_of,
    lock_requirements,
    locked_archives,
    locked_notes,
    locked_removals,
    locks_of,
    release_dates,
    with_pins,
)
from trainworks.extend.resolving.releases import Archive, BuildArchives, Resolution, Resolvable
from trainworks.extend.resolving.search import resolve
from trainworks.extend.source import read_source
from trainworks.extend.wheels.files import download_wheels
from trainworks.extend.wheels.sources import find_sources
from trainworks.facts.rows import Facts
from trainworks.host.pip import PipSettings
from trainworks.host.settings import HostSettings
from trainworks.imagetest import imports
from trainworks.imagetest.secrets import SecretFinding, added

# A key in form only: the body says what it is.
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
        BaseDistribution(name="Frame_Work", version="2.0+vendor", requires=('local-tool>=1; extra == "tools"',)),
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
def refused(root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Refused:
    """Give the command line; no engine can be reached, so whoever gets so far ends with another status."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")

    def call(*words: str | Path, tag: str = "my/train:1") -> tuple[int, str]:
        names = ("--base", "my/base:1", "--tag", tag)
        status = main(("extend", *names, *map(str, words)), root)
        return status, capsys.readouterr().err

    return call


def test_everything_that_is_wrong_is_said_at_once(refused: Refused, code: Path, tmp_path: Path) -> None:
    (code / ".env").write_text("TOKEN=1\n")
    (code / "deploy.pem").write_text(PRIVATE_KEY)
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("six\nhttps://git.example/x.whl\n--index-url https://packages.example/simple\n")
    status, text = refused(
        *("--requirements", requirements, "--source", code, "--entry-point", "trian.py"), tag="My/Train"
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
    status, text = refused("--source", code, "--entry-point", "train.py", "--apt", "g++", "--apt", "libgl1")
    assert status == 6, text
    assert "code: 1 file, 0.0 kB; the largest is train.py" in text


UV_LOCK = 'version = 1\n[[package]]\nname = "app"\nversion = "1"\nsource = { SOURCE = "." }\n'
APP = '[project]\nname = "app"\nversion = "1"\n'


def inputs_of(code: Path, *, extras: tuple[str, ...] = (), groups: tuple[str, ...] = ()) -> ExtensionInputs:
    request = ExtendRequest(
        base="my/base:1", tag="my/train:1", source=code, extras=extras, groups=groups, entry_point="train.py"
    )
    return read_inputs(request, (), {})


@pytest.mark.parametrize(
    ("files", "file"),
    [
        ({"requirements.txt": "", "uv.lock": UV_LOCK, "pylock.toml": ""}, "requirements.txt"),
        ({"uv.lock": UV_LOCK, "pylock.toml": "", "pyproject.toml": APP}, "uv.lock"),
        ({"pylock.toml": 'lock-version = "1.0"\ncreated-by = "x"\npackages = []\n'}, "pylock.toml"),
        ({"pyproject.toml": APP}, "pyproject.toml"),
        ({}, ""),
    ],
)
def test_what_the_code_itself_says_is_installed(code: Path, files: dict[str, str], file: str) -> None:
    written(code, files)
    inputs = inputs_of(code)
    assert inputs.file == (code / file if file else None)
    said = "".join(notes(ExtendRequest(base="b", tag="t", source=code), inputs))
    others = [name for name in files if name != file and "lock" in name]
    assert [name for name in others if f"{code / name} is not read: --requirements" not in said] == []


@pytest.mark.parametrize(("kind", "project"), [("editable", "pyproject.toml"), ("virtual", "")])
def test_a_project_that_its_lock_does_not_install_is_not_built(code: Path, kind: str, project: str) -> None:
    written(code, {"uv.lock": UV_LOCK.replace("SOURCE", kind), "pyproject.toml": APP})
    inputs = inputs_of(code)
    # Either way the launcher is told that it has nothing to install.
    assert (inputs.project, inputs.installed) == (project, ("pyproject.toml",))


def test_extras_and_groups_of_the_code(code: Path) -> None:
    text = f"{APP}optional-dependencies.fast = ['six']\n[dependency-groups]\ndev = ['pytest']\n"
    written(code, {"requirements.txt": "einops\n", "pyproject.toml": text})
    inputs = inputs_of(code, extras=("fast",), groups=("dev",))
    assert [each.name for each in inputs.wanted.requirements] == ["einops", "pytest"]
    assert inputs.extras == ("fast",)
    with pytest.raises(ExtendError) as caught:
        inputs_of(code, extras=("none",), groups=("none",))
    assert len(caught.value.problems) == 2
    (code / "pyproject.toml").unlink()
    with pytest.raises(ExtendError, match="--group dev: there is no pyproject"):
        inputs_of(code, groups=("dev",))


def test_a_file_of_another_tool_in_the_code_is_said(code: Path) -> None:
    written(code, {"environment.yml": "", "config.yml": ""})
    said = "".join(notes(ExtendRequest(base="b", tag="t", source=code), inputs_of(code)))
    assert "environment.yml is not read: it is conda's: `conda run" in said
    assert "config.yml" not in said


def test_pips_letter_names_the_requirements(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "environment.yml").write_text("name: x\n")
    status, text = refused("-r", tmp_path / "environment.yml")
    assert status == 12
    assert text.count("conda") == 2
    assert "1 problem with the extension" in text


def test_a_compiler_and_a_variable_are_checked_before_anything_starts(refused: Refused) -> None:
    words = ("--apt", "g++", "--with", "nvc", "--build-env", "NAME")
    status, said = refused(*words)
    assert status == 2, said
    assert "argument --build-env: must be NAME=VALUE, got 'NAME'" in said
    assert "unknown compiler in --with: 'nvc'; did you mean nvcc?" in said


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
    assert "no files to copy" in read_source(code).problems[0]


# Requirements.


def wheel(folder: Path, name: str, version: str, *requires: str, python: str = ">=3.6") -> None:
    stem = f"{name}-{version}"
    lines = [
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Python: {python}\n",
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


def no_build(archives: Sequence[Archive]) -> Sequence[Wheel]:
    raise AssertionError(f"nothing has to be built, but {archives}")


def build_here(archives: Sequence[Archive], folder: Path) -> list[Wheel]:
    """Build source archives of a folder with this machine's pip."""
    built = []
    for archive in archives:
        out = folder / "built" / str(archive)
        words = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index")
        subprocess.run((*words, "--wheel-dir", str(out), str(folder / archive.file)), check=True, timeout=120)
        (path,) = out.glob("*.whl")
        built.append(read_wheel(path.name, path.read_bytes(), built=True))
    return built


def resolution(
    text: str,
    settings: HostSettings,
    base: ExtendedBase = BASE,
    *,
    wheels: tuple[Wheel, ...] = (),
    limits: str = "",
    choice: Choice | None = None,
    build: BuildArchives = no_build,
) -> Resolution:
    wanted = Resolvable(
        lines=tuple(text.splitlines()),
        constraints=tuple(limits.splitlines()),
        wheels=wheels,
        choice=choice or Choice(),
    )
    return resolve(wanted, base, settings, os.environ, where="requirements.txt", build=build)


def resolved(
    text: str,
    settings: HostSettings,
    base: ExtendedBase = BASE,
    *,
    wheels: tuple[Wheel, ...] = (),
    limits: str = "",
    choice: Choice | None = None,
) -> list[str]:
    found = resolution(text, settings, base, wheels=wheels, limits=limits, choice=choice).releases
    assert all(each.hashes for each in found)
    return [f"{each.name}=={each.version}" for each in found]


def having(*rows: BaseDistribution, kept: tuple[str, ...] = ()) -> ExtendedBase:
    """Return a base with other distributions; ``kept`` are the names of those that stay."""
    versions = {row.name: row.version for row in rows}
    return replace(BASE, distributions=rows, kept={name: versions[name] for name in kept})


def test_requirements_are_resolved_around_what_the_base_keeps(settings: HostSettings) -> None:
    # Version 2.0 would need another framework; the base's own has a version that no index has.
    found = resolution("user-tool\n", settings)
    assert [f"{each.name}=={each.version}" for each in found.releases] == ["helper==5", "user-tool==1.0"]
    (note,) = found.notes
    assert note.startswith("user-tool 1.0 is not the newest that is asked for, 2.0: ")
    assert "depends on frame-work>=3" in note


def test_an_extra_of_what_the_base_has_is_installed(settings: HostSettings) -> None:
    assert resolved("Frame.Work[tools]\n", settings) == ["local-tool==1.5"]


def test_a_constraint_holds_for_what_is_needed_and_installs_nothing(settings: HostSettings) -> None:
    wheel(settings.pip.local_folders[0], "helper", "6")
    assert resolved("user-tool\n", settings) == ["helper==6", "user-tool==1.0"]
    assert resolved("user-tool\n", settings, limits="helper<6\nlocal-tool<2\n") == ["helper==5", "user-tool==1.0"]


def test_what_a_wheel_of_this_machine_needs_is_resolved_and_an_index_does_not_replace_it(
    settings: HostSettings, tmp_path: Path
) -> None:
    # An index has the same name and version, which needs something else.
    wheel(settings.pip.local_folders[0], "mine", "1", "local-tool")
    wheel(tmp_path, "mine", "1", "helper", "user-tool; extra == 'all'")
    read = partial(read_wheel, "mine-1-py3-none-any.whl", (tmp_path / "mine-1-py3-none-any.whl").read_bytes())
    assert resolved("", settings, wheels=(read(),)) == ["helper==5"]
    assert resolved("", settings, wheels=(read(extras="[all]"),)) == ["helper==5", "user-tool==1.0"]


def test_nothing_to_install(settings: HostSettings) -> None:
    assert resolution("frame-work\n", settings).releases == ()


def test_a_conflict_through_a_dependency_names_both_versions(settings: HostSettings) -> None:
    with pytest.raises(LockError) as caught:
        resolved("user-tool==2.0\n", settings)
    for part in ("requirements.txt for my/base:1 cannot be resolved", "frame-work>=3", "frame-work==2.0+vendor"):
        assert part in str(caught.value)


def test_what_the_base_does_not_keep_moves_and_who_asks_for_it_is_said(settings: HostSettings) -> None:
    """As datasets 3.2.0 does with fsspec, which torch takes in any version."""
    (folder,) = settings.pip.local_folders
    for version in ("2024.9.0", "2026.9.0", "2026.10.0"):
        wheel(folder, "files", version)
    wheel(folder, "sets", "3.2.0", "files<=2024.9.0")
    base = having(
        BaseDistribution(name="frame", version="2", requires=("files>=0.8",)),
        BaseDistribution(name="files", version="2026.9.0"),
        kept=("frame",),
    )
    found = resolution("sets\n", settings, base)
    assert [f"{each.name}=={each.version}" for each in found.releases] == ["files==2024.9.0", "sets==3.2.0"]
    assert found.notes == ("files 2026.9.0 -> 2024.9.0, asked for by sets 3.2.0",)
    # What is installed is kept where it fits, though there is a newer one.
    assert resolved("files\nhelper\n", settings, base) == ["helper==5"]
    for text, version in (("files==2024.9.0", "2024.9.0"), ("files>2026.9.0", "2026.10.0")):
        found = resolution(text, settings, base)
        assert found.notes == (f"files 2026.9.0 -> {version}, asked for by the requirements",)


def test_what_would_lose_its_requirement_moves_too(settings: HostSettings) -> None:
    """As boto3 has to when an old awscli brings its botocore."""
    (folder,) = settings.pip.local_folders
    for version in ("1", "2"):
        wheel(folder, "core", version)
        wheel(folder, "client", version, f"core=={version}")
    wheel(folder, "command", "1", "core==1")
    base = having(
        BaseDistribution(name="client", version="2", requires=("core==2",)), BaseDistribution(name="core", version="2")
    )
    found = resolution("command", settings, base)
    assert [f"{each.name}=={each.version}" for each in found.releases] == ["client==1", "command==1", "core==1"]
    assert found.notes == ("client 2 -> 1, to go with core 1", "core 2 -> 1, asked for by command 1")


def test_what_the_base_lacks_comes_in_its_newest_release(settings: HostSettings) -> None:
    """As pip takes databricks-sdk for sagemaker, and moves certifi for it."""
    (folder,) = settings.pip.local_folders
    wheel(folder, "certs", "2")
    wheel(folder, "sdk", "1", "certs")
    wheel(folder, "sdk", "2", "certs>=2")
    wheel(folder, "sdk", "3", "certs>=3")
    wheel(folder, "app", "1", "certs", "sdk")
    base = having(BaseDistribution(name="certs", version="1"))
    found = resolution("app", settings, base)
    assert [f"{each.name}=={each.version}" for each in found.releases] == ["app==1", "certs==2", "sdk==2"]
    assert found.notes == ("certs 1 -> 2, asked for by sdk 2",)
    # What is kept does not move for it.
    base = having(BaseDistribution(name="certs", version="1"), kept=("certs",))
    assert resolved("app", settings, base) == ["app==1", "sdk==1"]


def test_an_index_that_does_not_answer_removes_nothing(settings: HostSettings) -> None:
    (folder,) = settings.pip.local_folders
    for version in ("1", "2"):
        wheel(folder, "core", version)
    wheel(folder, "command", "1", "core==1")
    base = having(
        BaseDistribution(name="client", version="2", requires=("core==2",)), BaseDistribution(name="core", version="2")
    )
    with serving() as server:
        # A page without a type: uv ends, whatever else there is.
        server.serve("/client/", b"no index")
        pip = replace(settings.pip, no_index=False, index_url=server.url)
        with pytest.raises(LockError, match="Content-Type"):
            resolution("command", replace(settings, pip=pip), base)


def test_what_cannot_stay_is_removed_and_said_unless_it_is_kept(settings: HostSettings) -> None:
    (folder,) = settings.pip.local_folders
    for version in ("1", "2"):
        wheel(folder, "core", version)
    wheel(folder, "command", "1", "core<2")
    base = having(
        BaseDistribution(name="toolkit", version="5", requires=("core>=2", "absent")),
        BaseDistribution(name="core", version="2"),
    )
    found = resolution("command", settings, base)
    assert (found.removed, [f"{each.name}=={each.version}" for each in found.releases]) == (
        ("toolkit",),
        ["command==1", "core==1"],
    )
    assert "toolkit 5 of the base is removed: it does not go with core 1" in found.notes
    with pytest.raises(LockError, match="toolkit"):
        resolution("command", settings, replace(base, kept={"toolkit": "5"}))


PROJECT_OF_ARCHIVE = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "{name}"
version = "{version}"
dynamic = ["dependencies"]
[tool.hatch.build.targets.wheel]
include = ["{name}.py"]
[tool.hatch.metadata.hooks.custom]
"""
HOOK_OF_ARCHIVE = """
from hatchling.metadata.plugin.interface import MetadataHookInterface
class Hook(MetadataHookInterface):
    def update(self, metadata):
        {mark}
        metadata["dependencies"] = {requires}
"""


def source_archive(folder: Path, name: str, version: str, *requires: str, mark: str = "", metadata: str = "2.1") -> str:
    """Write a source archive that only running it tells what it requires, and return its hash.

    With metadata of 2.2 it says that it requires nothing, and uv believes it.
    """
    files = {
        "PKG-INFO": f"Metadata-Version: {metadata}\nName: {name}\nVersion: {version}\n",
        "pyproject.toml": PROJECT_OF_ARCHIVE.format(name=name, version=version),
        "hatch_build.py": HOOK_OF_ARCHIVE.format(requires=list(requires), mark=mark),
        f"{name}.py": "",
    }
    path = folder / f"{name}-{version}.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for file, text in files.items():
            member = tarfile.TarInfo(f"{name}-{version}/{file}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_release_for_an_older_python_is_not_taken_as_pip_does_not_take_it(settings: HostSettings) -> None:
    """dataclasses 0.8 is for Python 3.6 alone, and packages of its time ask for any."""
    (folder,) = settings.pip.local_folders
    wheel(folder, "old_tool", "1.0", "classes")
    wheel(folder, "classes", "0.6")
    wheel(folder, "classes", "0.8", python=">=3.6, <3.7")
    assert resolved("old-tool", settings) == ["classes==0.6", "old-tool==1.0"]
    with pytest.raises(LockError, match=r"classes 0\.8 is not for Python 3\.11"):
        resolved("classes==0.8", settings)


def test_the_newest_release_is_built_where_it_has_no_wheel(settings: HostSettings) -> None:
    """As hydra-core's parser, and DeepSpeed, of which only a development release of 2020 has a wheel."""
    (folder,) = settings.pip.local_folders
    wheel(folder, "speed", "0.3.1.dev5")
    digest = source_archive(folder, "speed", "0.19.8", "helper")
    build = partial(build_here, folder=folder)
    found = resolution("speed", settings, build=build)
    assert found.notes == ()
    helper, speed = found.releases
    assert (helper.name, helper.archive) == ("helper", None)
    assert speed.archive == Archive(name="speed", version="0.19.8", file="speed-0.19.8.tar.gz", sha256=digest)
    # Without archives there is the development release alone, which the user is told.
    (old,) = resolution("speed", settings, choice=Choice(only_binary=(":all:",))).releases
    assert old.version == "0.3.1.dev5"
    (note,) = resolution("speed", settings, choice=Choice(only_binary=("speed",))).notes
    assert note.startswith("speed 0.3.1.dev5 is not the newest that is asked for, 0.19.8: ")


def test_what_an_archive_requires_counts_when_it_is_known(settings: HostSettings) -> None:
    """Its metadata say nothing before it is built: it is taken, built, found not to fit, and left."""
    (folder,) = settings.pip.local_folders
    for version, need in (("1", "helper"), ("2", "frame-work>=3"), ("3", "frame-work>=3")):
        source_archive(folder, "speed", version, need)
    built: list[str] = []

    def build(archives: Sequence[Archive]) -> list[Wheel]:
        built.extend(map(str, archives))
        return build_here(archives, folder)

    found = resolution("speed", settings, build=build)
    assert [f"{each.name}=={each.version}" for each in found.releases] == ["helper==5", "speed==1"]
    assert built[0] == "speed 3"
    assert built[-1] == "speed 1"
    assert "speed 1 is not the newest that is asked for, 3" in found.notes[-1]


def test_what_a_wheel_requires_counts_where_its_archive_says_less(settings: HostSettings) -> None:
    """As DeepSpeed, whose wheel asks for NVIDIA's management library if it was built beside CUDA."""
    (folder,) = settings.pip.local_folders
    source_archive(folder, "speed", "3", "helper", metadata="2.2")
    found = resolution("speed", settings, build=partial(build_here, folder=folder))
    assert [f"{each.name}=={each.version}" for each in found.releases] == ["helper==5", "speed==3"]


def test_an_old_release_that_cannot_be_built_is_said_to_be_old(settings: HostSettings) -> None:
    """As vllm 0.1, which requires no torch of its day and is all that is left beside another one."""
    (folder,) = settings.pip.local_folders
    source_archive(folder, "speed", "1")
    wheel(folder, "speed", "2", "frame-work>=3")

    def build(archives: Sequence[Archive]) -> Sequence[Wheel]:
        raise BuildError(f"{archives[0]} cannot be built", hint="look")

    with pytest.raises(BuildError, match="speed 1 cannot be built") as caught:
        resolution("speed", settings, build=build)
    assert caught.value.hint.startswith("speed 1 is old, the newest is 2: ")
    assert "(frame-work 2.0+vendor)" in caught.value.hint


def test_source_archives_run_no_code_on_this_machine(settings: HostSettings, tmp_path: Path) -> None:
    (folder,) = settings.pip.local_folders
    source_archive(folder, "speed", "1", mark=f"open({str(tmp_path / 'ran')!r}, 'w')")
    wheel(tmp_path, "speed", "1")
    made = read_wheel("speed-1-py3-none-any.whl", (tmp_path / "speed-1-py3-none-any.whl").read_bytes(), built=True)
    found = resolution("speed", settings, build=lambda archives: [made for _ in archives])
    assert [str(each.archive) for each in found.releases] == ["speed 1"]
    assert not (tmp_path / "ran").exists()
    build_here([each.archive for each in found.releases if each.archive], folder)
    assert (tmp_path / "ran").exists(), "it would have run, had it been built"


def test_no_early_release_that_nobody_asked_for(settings: HostSettings) -> None:
    (folder,) = settings.pip.local_folders
    wheel(folder, "helper", "6rc1")
    wheel(folder, "daring", "1", "helper>=6rc1")
    assert resolved("helper", settings) == ["helper==5"]
    # A package may ask for one, as for pip.
    assert resolved("daring", settings) == ["daring==1", "helper==6rc1"]


def test_a_version_of_the_base_that_is_not_the_newest_is_said(settings: HostSettings) -> None:
    found = resolution("helper", settings, having(BaseDistribution(name="helper", version="4")))
    assert found.releases == ()
    assert found.notes == ("helper 4 is not the newest that is asked for, 5: the base has it already",)


def test_the_base_python_decides(settings: HostSettings) -> None:
    text = "helper ; python_version < '3.10'\nlocal-tool ; python_version >= '3.10'\n"
    assert resolved(text, settings) == ["local-tool==1.5"]
    assert resolved(text, settings, replace(BASE, version="3.9")) == ["helper==5"]
    # Some requirements ask for its last number, as redis does.
    text = "helper ; python_full_version < '3.11.3'\n"
    for version, expected in (("3.11.2", ["helper==5"]), ("3.11.7", [])):
        assert resolved(text, settings, replace(BASE, full_version=version)) == expected


# Requirements files and what they include.


def written(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder / "requirements.txt"


def test_included_files_are_read_from_where_they_are_named(tmp_path: Path) -> None:
    wanted, problems = read_wanted(
        written(
            tmp_path,
            {
                "requirements.txt": "-r more/base.txt\n-r more/again.txt\npandas\n-c limits.txt\n",
                "more/base.txt": "-r again.txt\nsix\n",
                "more/again.txt": "einops\n-c ../limits.txt\n",
                "limits.txt": "numpy<3\n",
            },
        ),
        {},
    )
    assert problems == []
    assert [each.text for each in wanted.requirements] == ["einops", "six", "pandas"]
    assert [str(each.specification) for each in wanted.constraints] == ["numpy<3"]


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"requirements.txt": "-r requirements.txt"}, "includes itself"),
        ({"requirements.txt": "-r a.txt", "a.txt": "-c b.txt", "b.txt": "-r a.txt"}, "a.txt includes itself"),
        ({"requirements.txt": "-r none.txt"}, "line 1: -r none.txt: "),
        ({"requirements.txt": "-c a.txt", "a.txt": "./x-1-py3-none-any.whl"}, "a constraint is a name with versions"),
        ({"requirements.txt": "./x-1-py3-none-any.whl"}, "line 1: ./x-1-py3-none-any.whl: No such file or directory"),
        (
            {"requirements.txt": "./x-1-py3-none-any.whl", "x-1-py3-none-any.whl": "no zip"},
            "x-1-py3-none-any.whl is not a wheel",
        ),
        ({"requirements.txt": "-r a.txt", "a.txt": "six\n--user"}, "a.txt line 2: --user: --user is not an option"),
        ({"requirements.txt": "-r https://h.example/r.txt"}, "it is on the network: download the file and name it"),
        ({"requirements.txt": "./none"}, "none is not a folder"),
        ({"requirements.txt": "./lib", "lib/x.py": ""}, "lib is not a project: it has no pyproject.toml"),
        ({"requirements.txt": "--require-hashes\nsix==1"}, "line 2: six==1: no hash"),
    ],
)
def test_includes_that_are_refused(files: dict[str, str], problem: str, tmp_path: Path) -> None:
    (found,) = read_wanted(written(tmp_path, files), {})[1]
    assert problem in found


def test_a_local_wheel_is_taken_with_its_hash(tmp_path: Path) -> None:
    (tmp_path / "dist").mkdir()
    wheel(tmp_path / "dist", "mine", "1")
    file = tmp_path / "dist" / "mine-1-py3-none-any.whl"
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    for line in ("./dist/mine-1-py3-none-any.whl", file.as_uri(), f"mine @ {file.as_uri()}#sha256={digest}"):
        wanted, problems = read_wanted(written(tmp_path, {"requirements.txt": line}), {})
        assert problems == []
        assert [each.pin for each in wanted.wheels.values()] == [f"mine==1 --hash=sha256:{digest}"]
    line = f"./dist/mine-1-py3-none-any.whl --hash=sha256:{'0' * 64}"
    assert "the file has another hash" in read_wanted(written(tmp_path, {"requirements.txt": line}), {})[1][0]


def test_a_wheel_of_the_network_is_downloaded_once_and_its_hash_is_checked(tmp_path: Path) -> None:
    wheel(tmp_path, "mine", "1+cu12", "helper")
    content = (tmp_path / "mine-1+cu12-py3-none-any.whl").read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    settings = HostSettings(pip=PipSettings())
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache")}

    def named(line: str) -> tuple[PackageRequirement, ...]:
        wanted, problems = read_wanted(written(tmp_path, {"requirements.txt": line}), {})
        assert problems == []
        return wanted.requirements

    with serving() as server:
        address = server.serve("/v1/mine-1+cu12-py3-none-any.whl", content).replace("+", "%2B")
        for _ in range(2):
            (found,) = download_wheels(named(f"mine[x] @ {address}#sha256={digest}"), settings, environment).values()
            assert (found.pin, found.requires) == (f"mine[x]==1+cu12 --hash=sha256:{digest}", ("helper",))
        assert len(server.seen) == 1
        wrong = f"--hash=sha256:{'0' * 64}"
        lines = f"{address}?other {wrong}\n{server.url}/none-1-py3-none-any.whl {wrong}"
        with pytest.raises(ExtendError) as caught:
            download_wheels(named(lines), settings, environment)
    assert "line 1" in str(caught.value)
    assert "is not what was pinned" in str(caught.value)
    assert "line 2" in str(caught.value)
    assert "answers HTTP 404" in str(caught.value)


def test_a_folder_is_read_with_its_secrets_and_what_it_ignores(tmp_path: Path) -> None:
    files = {
        "requirements.txt": "-e ./lib[x]\n-e lib\n",
        "lib/pyproject.toml": "[project]\n",
        "lib/a.py": "",
        "lib/a.log": "",
        "lib/.trainworksignore": "*.log\n",
    }
    wanted, problems = read_wanted(written(tmp_path, files), {})
    assert problems == []
    first, second = wanted.folders
    assert [file.path for file in first.tree.files] == ["a.py", "pyproject.toml"]
    assert (first.requirement.extras, second.requirement.extras) == ("[x]", "")
    assert "installed as a wheel" in wanted.notes[0]
    (tmp_path / "lib" / ".env").write_text("TOKEN=1\n")
    assert ".env is a file that holds secrets" in read_wanted(tmp_path / "requirements.txt", {})[1][0]


def test_a_folder_of_files_lies_beside_the_file_that_names_it(tmp_path: Path) -> None:
    files = {"requirements.txt": "-r more/a.txt\n", "more/a.txt": "--find-links wheels\n-f none\n", "more/wheels/x": ""}
    first, second = read_wanted(written(tmp_path, files), {})[0].options
    assert (first.value, first.written) == (str(tmp_path / "more" / "wheels"), "wheels")
    assert second.value == str(Path("none").resolve())


def test_pre_releases_count_where_they_are_asked_for(settings: HostSettings) -> None:
    wheel(settings.pip.local_folders[0], "helper", "6rc1")
    assert resolved("helper\n", settings) == ["helper==5"]
    assert resolved("helper\n", settings, choice=Choice(prereleases=True)) == ["helper==6rc1"]


def locked(
    wanted: Resolvable, path: Path, settings: HostSettings, base: ExtendedBase, with_index: HostSettings | None = None
) -> str:
    more = with_index or settings
    text, _ = lock_requirements(
        wanted,
        path,
        base,
        settings,
        os.environ,
        build=no_build,
        with_index=more,
        companions={"torchvision"},
        output=None,
        resolving=True,
    )
    return text


def test_the_build_that_goes_with_the_bases_torch_is_looked_for_in_its_own_index(
    settings: HostSettings, tmp_path: Path
) -> None:
    """The default index has the one for CUDA, whose requirement a torch for the CPU fulfils too."""
    base = having(BaseDistribution(name="torch", version="2.13.0+cpu"), kept=("torch",))
    (folder,) = settings.pip.local_folders
    wheel(folder, "torchvision", "0.28.0", "torch==2.13.0")
    wanted, path = Resolvable(lines=("torchvision",)), tmp_path / "lock.txt"
    with pytest.raises(ExtendError, match=r"torchvision 0\.28\.0 is not built for the base's torch 2\.13\.0\+cpu"):
        locked(wanted, path, settings, base)
    assert not path.exists()
    (tmp_path / "own").mkdir()
    wheel(tmp_path / "own", "torchvision", "0.28.0+cpu", "torch==2.13.0")
    both = replace(settings, pip=replace(settings.pip, find_links=(str(folder), str(tmp_path / "own"))))
    assert "\ntorchvision==0.28.0+cpu " in locked(wanted, path, settings, base, both)


def test_a_lock_says_what_moves_what_is_built_and_when_it_was_released() -> None:
    text = (
        "# files 2026.9.0 -> 2024.9.0, asked for by sets 3.2.0\n"
        "# client 2 -> 1, to go with core 1\n"
        f"# speed 0.19.8 is built from speed-0.19.8.tar.gz sha256:{'1' * 64}\n"
        "# toolkit 5 of the base is removed: it does not go with core 1\n"
        "# sets 3.2.0 is not the newest that is asked for, 5: a reason\n"
        f"files==2024.9.0 \\\n    --hash=sha256:{'2' * 64} \\\n    --hash=sha256:{'3' * 64}  # 2024-09-04\n"
        f"speed==0.19.8 \\\n    --hash=sha256:{'1' * 64}\n"
    )
    assert [each.partition(" ")[0] for each in locked_notes(text)] == ["files", "client", "speed", "toolkit", "sets"]
    assert locked_notes(text)[2] == "speed 0.19.8 is built from speed-0.19.8.tar.gz"
    assert locked_removals(text) == ("toolkit",)
    assert release_dates(text) == {"files": "2024-09-04"}
    (archive,) = locked_archives(text)
    assert archive == Archive(name="speed", version="0.19.8", file="speed-0.19.8.tar.gz", sha256="1" * 64)
    built = Wheel(file="speed-0.19.8-py3-none-any.whl", content=b"built", built=True)
    pins = with_pins(text, {str(archive): built})
    assert f"\n{built.pin}\n" in pins
    assert f"--hash=sha256:{'1' * 64}" not in pins
    assert release_dates(pins) == {"files": "2024-09-04"}


def test_each_base_has_a_lock_of_its_own(settings: HostSettings, tmp_path: Path) -> None:
    file = written(tmp_path, {"requirements.txt": "user-tool"})
    wanted = Resolvable(lines=("user-tool",))
    texts = {}
    for base in (BASE, replace(BASE, reference="h.example:5000/b@sha256:0", version="3.10"), BASE):
        path = lock_path_of(file, base.reference)
        texts[path] = locked(wanted, path, settings, base)
        assert path.read_text() == texts[path]
    assert {path.name: path.read_text() for path in texts} == {
        "requirements.my+base+1.locked.txt": texts[lock_path_of(file, "my/base:1")],
        "requirements.h.example+5000+b+sha256+0.locked.txt": texts[lock_path_of(file, "h.example:5000/b@sha256:0")],
    }
    assert sorted(locks_of(file)) == sorted(path.name for path in texts)


@pytest.mark.parametrize(
    ("title", "pip", "indexes"),
    [
        ("pytorch-2.13.0-cpu-py311-debian12", PipSettings(), 1),
        ("pytorch-2.13.0-cpu-py311-debian12", PipSettings(index_url="https://packages.example/simple"), 0),
        ("another maker's", PipSettings(), 0),
    ],
)
def test_the_index_that_our_base_was_built_from_counts_where_the_user_names_none(
    title: str, pip: PipSettings, indexes: int, facts: Facts
) -> None:
    """The default index has no torchvision for the cpu image's torch, and PyTorch's has."""
    labels = {"org.opencontainers.image.title": title}
    image = BuiltImage(reference="my/base:1", identifier="sha256:b", size=1, labels=labels, environment={})
    found = with_index_of(image, facts, HostSettings(pip=pip)).pip
    assert len(found.extra_index_urls) == indexes
    assert replace(found, extra_index_urls=()) == pip


# Git.


@pytest.fixture
def repository(tmp_path: Path) -> Callable[..., str]:
    """Give what runs git in a repository with a tag, a branch and a submodule."""

    def git(*words: str, folder: str = "repository") -> str:
        names = ("user.name=a", "user.email=a@b.example", "protocol.file.allow=always", "init.defaultBranch=main")
        options = [word for name in names for word in ("-c", name)]
        done = subprocess.run(
            ("git", "-C", str(tmp_path / folder), *options, *words), capture_output=True, text=True, check=True
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
        members = {member.name: archive.extractfile(member) for member in archive if member.isfile()}
        return {name: file.read().decode() for name, file in members.items() if file}


@pytest.mark.parametrize(("reference", "text"), [("", "second"), ("main", "second"), ("v1.0", "first")])
def test_a_git_requirement_is_pinned_to_its_commit(
    reference: str, text: str, repository: Callable[..., str], tmp_path: Path
) -> None:
    requirement = GitRequirement(place="", url=(tmp_path / "repository").as_uri(), reference=reference)
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    (source,), commits = find_sources([requirement], {}, environment, resolving=True)
    commit = repository("rev-parse", f"{reference or 'main'}^{{commit}}")
    assert commits == {str(requirement): commit}
    version = "v1.0-0-g" if text == "first" else "v1.0-1-g"
    files = unpacked(source)
    assert files.keys() == {"source/repository.py", "source/.git_archival.txt"}
    assert (files["source/repository.py"], version in files["source/.git_archival.txt"]) == (f"{text}\n", True)
    # The branch goes on: the commit of the lock stays, and needs no repository.
    (tmp_path / "repository" / "repository.py").write_text("third\n")
    repository("commit", "--quiet", "--all", "--message", "third")
    (tmp_path / "repository").rename(tmp_path / "gone")
    (again,), same = find_sources([requirement], commits, environment, resolving=False)
    assert (again.archive, same) == (source.archive, commits)


def test_submodules_are_in_the_archive(
    repository: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository("submodule", "--quiet", "add", (tmp_path / "part").as_uri())
    repository("commit", "--quiet", "--message", "with a part")
    # A submodule on this machine is what only a test has: git refuses that by default.
    for name, value in (("COUNT", "1"), ("KEY_0", "protocol.file.allow"), ("VALUE_0", "always")):
        monkeypatch.setenv(f"GIT_CONFIG_{name}", value)
    requirement = GitRequirement(place="", url=(tmp_path / "repository").as_uri())
    (source,), _ = find_sources([requirement], {}, {"XDG_CACHE_HOME": str(tmp_path / "cache")}, resolving=True)
    assert unpacked(source)["source/part/part.py"] == "first\n"


@pytest.mark.parametrize(
    ("reference", "resolving", "reason"),
    [("none", True, "cannot fetch"), ("0" * 40, True, "cannot fetch"), ("main", False, "has no commit in the lock")],
)
def test_a_reference_that_is_not_there(
    reference: str, resolving: bool, reason: str, repository: Callable[..., str], tmp_path: Path
) -> None:
    requirement = GitRequirement(place="", url=(tmp_path / "repository").as_uri(), reference=reference)
    with pytest.raises(LockError, match=reason):
        find_sources([requirement], {}, {"XDG_CACHE_HOME": str(tmp_path / "cache")}, resolving=resolving)
    assert repository("status", "--porcelain") == ""


# The image tests.


def installed(folder: Path, name: str, files: dict[str, str], *, entry_points: str = "") -> None:
    """Install a distribution as pip would: files, metadata and RECORD."""
    metadata = {"METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n", "entry_points.txt": entry_points}
    files = {**files, **{f"{name}-1.dist-info/{each}": text for each, text in metadata.items()}}
    for path, text in {**files, f"{name}-1.dist-info/RECORD": "".join(f"{path},,\n" for path in files)}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"good/__init__.py": "", "good/part/__init__.py": "raise ValueError('not at the top')"}, ""),
        ({"bad/__init__.py": "import setuptools_of_nobody"}, "import bad: ModuleNotFoundError: No module named"),
        (
            {"space/part/__init__.py": "raise OSError('first\\nlast line')"},
            "import space.part: OSError: last line",
        ),
        ({"single.py": "raise RuntimeError('no operator')"}, "import single: RuntimeError: no operator"),
        ({"kill.py": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"}, "was killed by signal 11"),
        ({"quits.py": "import os; os._exit(3)"}, "ended the process with status 3"),
        ({"exits.py": "import sys; sys.exit('no licence')"}, "import exits: SystemExit: no licence"),
        ({"driver.py": "raise ImportError('libcuda.so.1: cannot open shared object file')"}, ""),
        ({"tests/__init__.py": "1 / 0", "real.py": ""}, ""),
        ({"plugin.py": "import host_of_plugins"}, ""),
        ({"data/file.txt": "1", "../../../bin/tool.py": "1 / 0"}, ""),
    ],
)
def test_what_is_installed_is_imported(files: dict[str, str], said: str, tmp_path: Path) -> None:
    """By the program itself, in a real Python with real distributions."""
    folder = tmp_path / "lib" / "python" / "site-packages"
    installed(folder, "first", {"first.py": ""})
    installed(folder, "subject", files, entry_points="[host_of_plugins.readers]\nx = plugin:x\n")
    done = subprocess.run(
        (sys.executable, imports.__file__, "first", "subject"),
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = [json.loads(line.removeprefix(imports.MARKER)) for line in done.stdout.splitlines() if line != imports.END]
    assert len(lines) == bool(said)
    assert all((line["name"], line["version"]) == ("subject", "1") and said in line["reason"] for line in lines)


def test_what_the_base_has_is_not_its_extensions_fault() -> None:
    def finding(where: str, path: str) -> SecretFinding:
        return SecretFinding(where=where, path=path, rule="private key", advice="")

    base = (finding("layer a", "etc/key"), finding("label x", ""))
    found = (
        finding("layer b", "etc/key"),
        finding("label x", ""),
        finding("layer b", "new/key"),
        finding("label y", ""),
    )
    assert added(found, base) == found[2:]
