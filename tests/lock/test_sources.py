"""Sources of ``packages`` targets: found, downloaded, or left out, before a build.

With real servers.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from lock.conftest import Repository
from lock.servers import Server, git_repositories
from lock.trees import PACKAGES_TARGET, add_artifact, add_component, add_python_lock, make_tree
from trainworks.cli import main
from trainworks.facts.load import load
from trainworks.facts.rows import Artifact
from trainworks.host.apt import AptSettings, AptSource
from trainworks.inputs.sources import Places, archives_of
from trainworks.plan.model import Request
from trainworks.plan.resolve import make_plan
from trainworks_testing.certificates import Authority

COST = "the plugin's users wait"
HELPERS_COST = "the helper is missed"
PYTHON = [
    {
        "name": name,
        "version": version,
        "file": f"{name}-{version}-py3-none-any.whl",
        "sha256": digit * 64,
        "build": True,
    }
    for name, version, digit in (
        ("uv", "0.13.8", "1"),
        ("setuptools", "1", "2"),
        ("wheel", "1", "3"),
    )
]
ARCHIVE = b"an archive of source code"
SHA256 = hashlib.sha256(ARCHIVE).hexdigest()
STAGE = "FROM builder AS {{ component }}\n{{ fetch(component, artifacts) }}"
BUILD = ("--framework", "pytorch", "--cuda", "cpu", "--until", "build", "--engine", "docker")
NO_ENGINE = "/nonexistent/docker.sock"
"""Where the engine is asked for: no build begins."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    status: int
    out: str
    err: str


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A checkout with one target, and this machine's cache of sources."""

    root: Path
    cache: Path
    capture: pytest.CaptureFixture[str]

    def call(self, *words: str) -> Ended:
        status = main(words, self.root)
        captured = self.capture.readouterr()
        return Ended(status=status, out=captured.out, err=captured.err)


@pytest.fixture
def machine(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    authority: Authority,
) -> Machine:
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "GIT_SSL_CAINFO"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_CERT", str(authority.bundle))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{NO_ENGINE}")
    root = make_tree(tmp_path / "tree", sources="packages")
    add_python_lock(root, *PYTHON, target=PACKAGES_TARGET)
    return Machine(root=root, cache=tmp_path / "cache" / "trainworks" / "sources", capture=capsys)


def add_plugin(machine: Machine, git: str, commit: str) -> None:
    """Add a plugin from git, and a helper made of an archive that only serves the plugin."""
    plugin = {"artifact": True, "default": True, "without": COST, "variant": "slow"}
    add_component(machine.root, "plugin", "1.0", STAGE, **plugin)
    add_artifact(machine.root, "plugin", "1.0", git=git, tag="v1.0", commit=commit)
    helper = {"artifact": True, "default": True, "needs": ["plugin"], "without": HELPERS_COST}
    add_component(machine.root, "helper", "2.0", STAGE, **helper)


def serve_plugin(machine: Machine, server: Server, repository: Repository) -> str:
    server.answers["/git/"] = git_repositories(repository.path.parent, "/git/")
    add_plugin(machine, f"{server.url}/git/{repository.path.name}", repository.commit)
    add_artifact(
        machine.root, "helper", "2.0", url=server.serve("/helper.tar.gz", ARCHIVE), sha256=SHA256
    )
    return f"plugin-{repository.commit}.bundle"


def tag_of(machine: Machine, without: tuple[str, ...]) -> str:
    request = Request(framework="pytorch", cuda="cpu", without_components=without)
    return make_plan(request, load(machine.root)).tags[0]


# Reached: from the origin once, then from the cache.


def test_sources_are_downloaded_before_an_engine_is_asked_and_once(
    machine: Machine, server: Server, repository: Repository
) -> None:
    bundle = serve_plugin(machine, server, repository)
    result = machine.call("--framework", "pytorch", "--cuda", "cpu", "--until", "plan")
    assert (
        f"not on this machine yet, downloaded when the image is built: {bundle}, helper.tar.gz\n"
        in result.out
    )
    assert server.seen == []
    result = machine.call(*BUILD)
    assert NO_ENGINE in result.err
    assert [line for line in result.err.splitlines() if "downloading" in line] == [
        f"  downloading {bundle}",
        "  downloading helper.tar.gz",
    ]
    assert sorted(path.name for path in machine.cache.iterdir()) == sorted(
        [bundle, "helper.tar.gz"]
    )
    server.seen.clear()
    assert "downloading" not in machine.call(*BUILD).err
    assert server.seen == []
    assert (
        "not on this machine"
        not in machine.call("--framework", "pytorch", "--cuda", "cpu", "--until", "plan").out
    )


@pytest.mark.parametrize("content", [b"", b"half a file"])
def test_a_spoiled_cache_is_filled_again(
    machine: Machine, server: Server, repository: Repository, content: bytes
) -> None:
    bundle = serve_plugin(machine, server, repository)
    machine.call(*BUILD)
    good = {path.name: path.read_bytes() for path in machine.cache.iterdir()}
    for name in good:
        (machine.cache / name).write_bytes(content)
    result = machine.call(*BUILD)
    assert [line for line in result.err.splitlines() if "downloading" in line] == [
        f"  downloading {bundle}",
        "  downloading helper.tar.gz",
    ]
    assert (machine.cache / "helper.tar.gz").read_bytes() == good["helper.tar.gz"]
    assert "downloading" not in machine.call(*BUILD).err


def test_a_mirror_that_has_a_part_of_it(
    machine: Machine, server: Server, repository: Repository
) -> None:
    bundle = serve_plugin(machine, server, repository)
    machine.call(*BUILD)
    mirror = machine.root.parent / "mirror"
    mirror.mkdir()
    shutil.move(machine.cache / bundle, mirror / bundle)
    (machine.cache / "helper.tar.gz").unlink()
    del server.answers["/git/"]
    result = machine.call(*BUILD, "--mirror", str(mirror))
    assert [line for line in result.err.splitlines() if "downloading" in line] == [
        "  downloading helper.tar.gz"
    ]
    assert "warning" not in result.err
    assert [path.name for path in mirror.iterdir()] == [bundle]
    # Offline the cache does not count: all sources come from the folder alone.
    result = machine.call(*BUILD, "--mirror", str(mirror), "--offline")
    assert (result.status, f"{mirror} does not have all of {PACKAGES_TARGET}" in result.err) == (
        11,
        True,
    )
    assert "helper 2.0: helper.tar.gz is missing" in result.err


def test_a_served_mirror_is_asked_first_and_its_bytes_are_checked(
    machine: Machine, server: Server, plain_server: Server, repository: Repository
) -> None:
    bundle = serve_plugin(machine, server, repository)
    machine.call(*BUILD)
    plain_server.serve(f"/all/{bundle}", (machine.cache / bundle).read_bytes())
    shutil.rmtree(machine.cache)
    server.seen.clear()
    machine.call(*BUILD, "--mirror", f"{plain_server.url}/all")
    assert [request.path for request in plain_server.seen] == [
        f"/all/{bundle}",
        "/all/helper.tar.gz",
    ]
    assert [request.path for request in server.seen] == ["/helper.tar.gz"]
    shutil.rmtree(machine.cache)
    plain_server.serve(f"/all/{bundle}", b"something else")
    result = machine.call(*BUILD, "--mirror", f"{plain_server.url}/all")
    assert (result.status, f"{bundle} of the mirror does not have commit" in result.err) == (
        11,
        True,
    )
    assert not (machine.cache / bundle).exists()


def test_wrong_bytes_are_an_error_and_nothing_is_left_out(
    machine: Machine, server: Server, repository: Repository
) -> None:
    bundle = serve_plugin(machine, server, repository)
    server.serve("/helper.tar.gz", b"other bytes")
    result = machine.call(*BUILD)
    assert (result.status, "is not what was pinned" in result.err, "warning" in result.err) == (
        11,
        True,
        False,
    )
    assert [path.name for path in machine.cache.iterdir()] == [bundle]


def test_debian_sources_come_from_the_mirror_that_apt_uses() -> None:
    bases = load(Path(__file__).resolve().parents[2]).bases
    main_archive = next(base.archive for base in bases if base.name == "debian12")
    apt = AptSettings(
        sources=(
            AptSource(uri="http://mirror.example/debian/", suite="bookworm", components="main"),
            AptSource(
                uri="http://mirror.example/debian", suite="bookworm-updates", components="main"
            ),
            AptSource(uri="http://vendor.example/apt", suite="stable", components="main"),
        )
    )
    file = Artifact(
        name="a",
        version="1",
        source="the tests",
        url=f"{main_archive}/pool/main/a/a/a_1.orig.tar.xz",
    )
    own = Places(folders=(), archives=archives_of(bases, apt, "bookworm"))
    assert own.origins(file) == (
        "http://mirror.example/debian/pool/main/a/a/a_1.orig.tar.xz",
        file.url,
    )
    assert Places(folders=(), archives=archives_of(bases, apt, "")).origins(file) == (file.url,)
    other = Artifact(
        name="b", version="1", source="the tests", url="https://vendor.example/pool/main/b.tar.gz"
    )
    assert own.origins(other) == (other.url,)


# Not reached: left out by default, with another name.


def test_what_cannot_be_reached_is_left_out_and_said(machine: Machine, server: Server) -> None:
    add_plugin(machine, "https://code.invalid/plugin", "1" * 40)
    add_artifact(
        machine.root, "helper", "2.0", url=server.serve("/helper.tar.gz", ARCHIVE), sha256=SHA256
    )
    result = machine.call(*BUILD)
    (warning,) = [line for line in result.err.splitlines() if line.startswith("warning: ")]
    tag = tag_of(machine, ("plugin", "helper"))
    assert tag.endswith("-debian12-slow")
    for part in (
        f"{tag} is built without plugin (",
        "code.invalid",
        COST,
        "`python build.py mirror DIR`",
    ):
        assert part in warning


def test_what_an_image_lacks_is_said_by_what_the_others_need(machine: Machine) -> None:
    """The helper only serves the plugin: its own cost would say nothing more."""
    add_plugin(machine, "https://code.invalid/plugin", "1" * 40)
    add_artifact(
        machine.root, "helper", "2.0", git="https://code.invalid/helper", tag="v2", commit="2" * 40
    )
    result = machine.call(*BUILD)
    (warning,) = [line for line in result.err.splitlines() if line.startswith("warning: ")]
    assert "is built without plugin, helper (" in warning
    assert COST in warning
    assert HELPERS_COST not in warning
    assert NO_ENGINE in result.err


@pytest.mark.parametrize(
    "words", [("--strict",), ("--with", "plugin"), ("--push", "--repository", "r.invalid/a")]
)
def test_what_must_not_be_left_out(
    machine: Machine, words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A push looks for the program before anything else, and does not come to run the program.
    oras = tmp_path / "programs" / "oras"
    oras.parent.mkdir()
    oras.symlink_to("/bin/false")
    monkeypatch.setenv("PATH", str(oras.parent), prepend=os.pathsep)
    add_plugin(machine, "https://code.invalid/plugin", "1" * 40)
    add_artifact(
        machine.root, "helper", "2.0", url="https://other.invalid/helper.tar.gz", sha256=SHA256
    )
    build = (
        [word for word in BUILD if word not in ("--until", "build")] if "--push" in words else BUILD
    )
    result = machine.call(*build, *words)
    assert result.status == 10
    for part in (
        f"{PACKAGES_TARGET} needs sources that cannot be downloaded:",
        f"  plugin: plugin-{'1' * 40}.bundle: ",
    ):
        assert part in result.err
    assert ("  helper: helper.tar.gz: " in result.err) == ("plugin" not in words)
    assert "or build without: --without plugin" in result.err
    assert NO_ENGINE not in result.err


def test_a_required_component_is_never_left_out(machine: Machine) -> None:
    add_component(machine.root, "plugin", "1.0", STAGE, artifact=True, required=True)
    add_artifact(
        machine.root, "plugin", "1.0", url="https://code.invalid/plugin.tar.gz", sha256=SHA256
    )
    result = machine.call(*BUILD)
    assert (result.status, "plugin: plugin.tar.gz: " in result.err) == (10, True)
    assert "build without" not in result.err


def test_a_host_that_does_not_answer_is_asked_once(machine: Machine) -> None:
    add_plugin(machine, "https://code.invalid/plugin", "1" * 40)
    add_artifact(
        machine.root, "helper", "2.0", git="https://code.invalid/helper", tag="v2", commit="2" * 40
    )
    result = machine.call(*BUILD)
    assert result.err.count("downloading ") == 1
    assert result.err.count("code.invalid/plugin") == 1
    assert f"not tried: code.invalid did not give plugin-{'1' * 40}.bundle" in result.err


def test_a_bake_file_has_the_sources_or_is_not_written(
    machine: Machine, server: Server, repository: Repository
) -> None:
    bundle = serve_plugin(machine, server, repository)
    output = machine.root.parent / "bake"
    answers = dict(server.answers)
    server.answers.clear()
    result = machine.call("--bake", "--output", str(output))
    assert (result.status, output.exists()) == (10, False)
    server.answers.update(answers)
    result = machine.call("--bake", "--output", str(output), "--format", "json")
    assert (result.status, json.loads(result.out)["file"]) == (0, str(output / "docker-bake.json"))
    context = output / "contexts" / PACKAGES_TARGET
    assert (context / "artifacts" / "plugin" / bundle).is_file()


def test_offline_wants_a_mirror(machine: Machine) -> None:
    result = machine.call(*BUILD, "--offline")
    assert (result.status, "--offline needs --mirror DIR or --mirror URL" in result.err) == (
        2,
        True,
    )


# Names.


@pytest.mark.parametrize(
    ("without", "ending"),
    [
        ((), "-debian12"),
        (("plugin", "helper"), "-debian12-slow"),
        (("helper",), "-debian12-without-helper"),
        (("plugin", "helper", "other"), "-debian12-slow-without-other"),
    ],
)
def test_the_name_says_what_is_missing(
    machine: Machine, without: tuple[str, ...], ending: str
) -> None:
    add_plugin(machine, "https://code.invalid/plugin", "1" * 40)
    add_artifact(
        machine.root, "helper", "2.0", url="https://code.invalid/helper.tar.gz", sha256=SHA256
    )
    other = {"default": True, "without": "nothing else has it"}
    add_component(machine.root, "other", "1.0", "FROM builder AS other", **other)
    assert tag_of(machine, without).endswith(ending)
