"""``build.py lock`` and ``build.py mirror`` from end to end, with real servers.

And the refusals of a build.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from lock.conftest import Repository
from lock.servers import Request, Server, dropping, git_repositories
from lock.test_signatures import make_vendor
from lock.test_signatures import pytestmark as needs_gpg
from lock.trees import ROOT, TARGET, add_artifact, add_python_lock, make_tree
from push.hostile import INDEX, Hostile, hostile_registry
from push.support import TOOLS
from trainworks.cli import main
from trainworks.facts.load import load
from trainworks.host.pip import PipSettings
from trainworks.host.settings import HostSettings, read_host_settings
from trainworks.inputs.lock_artifacts import LockRun, lock_base_images
from trainworks.inputs.mirror import read_mirror
from trainworks.registry.protocol import Patience
from trainworks.registry.tools import Registries
from trainworks_testing.certificates import Authority

METIS = b"metis" * 20_000
SHA256 = hashlib.sha256(METIS).hexdigest()
WHEEL = b"wheel"
MANIFEST = json.dumps({"schemaVersion": 2}).encode()
DIGEST = f"sha256:{hashlib.sha256(MANIFEST).hexdigest()}"

LOCK = "images/lock/artifacts.toml"
UNTIL_BUILD = ("--framework", "pytorch", "--cuda", "cpu", "--sources", "vendor", "--until", "build")


@dataclass(frozen=True, kw_only=True)
class Ended:
    status: int
    out: str
    err: str


Call = Callable[..., Ended]


@pytest.fixture
def call(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    authority: Authority,
) -> Call:
    """Call the command in a tree, on a machine that trusts the tests' authority
    and whose pip has no index.
    """
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "PIP_FIND_LINKS", "GIT_SSL_CAINFO"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CERT", str(authority.bundle))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # No build begins.
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")

    def run(*words: str, root: Path) -> Ended:
        status = main(words, root)
        captured = capsys.readouterr()
        return Ended(status=status, out=captured.out, err=captured.err)

    return run


def lock_of(root: Path) -> list[tuple[str, str, int]]:
    return [(row.url, row.sha256, row.size) for row in load(root).locked_artifacts]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return make_tree(tmp_path / "tree")


# Recording.


@pytest.fixture
def base_registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hostile]:
    """Give a registry with a base image; skips without oras."""
    monkeypatch.setenv("PATH", f"{TOOLS}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    if shutil.which("oras") is None:
        pytest.skip("NOT TESTED: no oras (tools/set-up-engine all)")
    with hostile_registry() as mine:
        mine.manifests["vendor/base", "1"] = INDEX, MANIFEST
        yield mine


def test_without_oras_the_rest_is_locked(
    call: Call, tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_tree(tmp_path / "tree", base_image="registry.invalid/base:1")
    url = server.serve("/metis-5.1.0.tar.gz", METIS)
    add_artifact(root, "metis", "5.1.0", url=url)
    monkeypatch.setenv("PATH", "")
    result = call("lock", root=root)
    assert result.status == 11
    assert lock_of(root) == [(url, SHA256, len(METIS))]
    assert "base image registry.invalid/base:1: cannot resolve registry.invalid" in result.err
    assert "hint: the others are locked; run the same command on a machine" in result.err
    result = call("lock", root=root)
    assert result.status == 11
    assert "hint: nothing is written; run the same command on a machine" in result.err


def test_what_can_be_locked_is_and_what_cannot_is_said_at_once(
    call: Call, tmp_path: Path, server: Server, base_registry: Hostile, repository: Repository
) -> None:
    image = f"{base_registry.host}/vendor/base:1"
    root = make_tree(tmp_path / "tree", base_image=image)
    server.answers["/git/"] = git_repositories(repository.path.parent, "/git/")
    url = server.serve("/metis-5.1.0.tar.gz", METIS)
    brings = {"gklib": "1.0", "spdlog": "1.6"}
    add_artifact(root, "metis", "5.1.0", url=url, together=brings)
    git = f"{server.url}/git/{repository.path.name}"
    add_artifact(root, "gklib", "1.0", git=git, tag="v1.0", commit=repository.newer)
    add_artifact(root, "spdlog", "1.6", url=f"{server.url}/spdlog.tar.gz")
    result = call("lock", root=root)
    assert result.status == 11
    assert lock_of(root) == [(url, SHA256, len(METIS))]
    assert [(row.name, row.digest) for row in load(root).locked_base_images] == [(image, DIGEST)]
    assert "error: 3 inputs are not locked:" in result.err
    for part in (
        "pytorch 2.13.0 cpu on debian12 cannot be resolved:",
        (
            f"gklib 1.0: tag v1.0 of {git} points at {repository.commit}, its row says"
            f" {repository.newer}"
        ),
        f"spdlog 1.6: {server.url}/spdlog.tar.gz answers HTTP 404",
    ):
        assert part in result.err
    assert not list((root / "images" / "lock").glob("*.part"))
    result = call("lock", "--format", "json", root=root)
    content = json.loads(result.out)
    assert (result.status, content.keys(), content["written"]) == (
        11,
        {"written", "moved", "problems"},
        [],
    )
    assert len(content["problems"]) == 3


def test_what_is_recorded_is_kept_and_not_downloaded_again(
    call: Call, tree: Path, server: Server
) -> None:
    (tree / LOCK).write_text(
        f'[[artifact]]\nurl = "https://vendor.invalid/a"\nsha256 = "{"1" * 64}"\nsize = 1\n',
        encoding="utf-8",
    )
    url = server.serve("/metis-5.1.0.tar.gz", METIS)
    add_artifact(tree, "metis", "5.1.0", url=url)
    call("lock", root=tree)
    expected = [(url, SHA256, len(METIS)), ("https://vendor.invalid/a", "1" * 64, 1)]
    assert lock_of(tree) == expected
    text = (tree / LOCK).read_bytes()
    call("lock", root=tree)
    assert len(server.seen) == 1
    assert (tree / LOCK).read_bytes() == text


@pytest.mark.parametrize(
    "published", [{"sha256": "1" * 64}, {"size": 7}, {"sha256": "1" * 64, "size": 7}]
)
def test_a_file_that_is_not_what_is_published(
    call: Call, tree: Path, server: Server, published: Mapping[str, object]
) -> None:
    add_artifact(
        tree, "metis", "5.1.0", url=server.serve("/metis-5.1.0.tar.gz", METIS), **published
    )
    result = call("lock", root=tree)
    assert result.status == 11
    assert "metis 5.1.0: " in result.err
    assert f"found sha256 {SHA256}, {len(METIS)} bytes" in result.err
    assert lock_of(tree) == []


def test_a_published_hash_that_holds(call: Call, tree: Path, server: Server) -> None:
    url = server.serve("/metis-5.1.0.tar.gz", dropping(METIS, 60_000))
    add_artifact(tree, "metis", "5.1.0", url=url, sha256=SHA256, size=len(METIS))
    call("lock", root=tree)
    assert lock_of(tree) == [(url, SHA256, len(METIS))]


@needs_gpg
@pytest.mark.parametrize("signer", ["vendor", "other"])
def test_a_signed_file(
    call: Call, tree: Path, server: Server, tmp_path_factory: pytest.TempPathFactory, signer: str
) -> None:
    folder = tmp_path_factory.mktemp("gpg")
    vendors = {name: make_vendor(folder, name) for name in ("vendor", "other")}
    file = folder / "metis-5.1.0.tar.gz"
    file.write_bytes(METIS)
    url = server.serve(f"/{file.name}", METIS)
    add_artifact(
        tree,
        "metis",
        "5.1.0",
        url=url,
        signature=server.serve("/sig", vendors[signer].sign(file).read_bytes()),
        key=server.serve("/key", vendors["vendor"].key.read_bytes()),
        fingerprint=vendors["vendor"].fingerprint,
    )
    result = call("lock", root=tree)
    assert lock_of(tree) == ([(url, SHA256, len(METIS))] if signer == "vendor" else [])
    assert ("metis 5.1.0: the signature is not valid: " in result.err) == (signer == "other")


def test_a_repository_that_is_away_is_no_failure(call: Call, tree: Path, server: Server) -> None:
    """The commit is the pin; the tag is looked at where that is possible."""
    add_artifact(
        tree, "metis", "5.2.1", git=f"{server.url}/nothing.git", tag="v5.2.1", commit="a" * 40
    )
    stacks = tree / "images" / "stacks.toml"
    stacks.write_text(
        stacks.read_text(encoding="utf-8").replace("5.1.0", "5.2.1"), encoding="utf-8"
    )
    result = call("lock", root=tree)
    assert (
        f"metis 5.2.1: its tag was not looked at: cannot fetch {server.url}/nothing.git: "
        in result.err
    )
    assert "1 input is not locked" in result.err, "the Python files"


def test_a_base_image_that_moved(call: Call, tmp_path: Path, base_registry: Hostile) -> None:
    image = f"{base_registry.host}/vendor/base:1"
    root = make_tree(tmp_path / "tree", base_image=image)
    (root / "images" / "lock" / "base-images.toml").write_text(
        f'[[base_image]]\nname = "{image}"\ndigest = "sha256:{"1" * 64}"\n', encoding="utf-8"
    )
    call("lock", root=root)
    assert load(root).digest_by_image == {image: f"sha256:{'1' * 64}"}
    result = call("lock", "--upgrade", root=root)
    assert f"base image {image} moved from sha256:{'1' * 64} to {DIGEST}" in result.err
    assert load(root).digest_by_image == {image: DIGEST}


@pytest.mark.parametrize("digest", ["", f"sha256:{'1' * 64}"])
def test_an_alternative_is_taken_for_a_base_image_that_is_gone(
    call: Call, tmp_path: Path, base_registry: Hostile, digest: str
) -> None:
    """Name the alternative by its tag, or by the digest in its row."""
    gone, there = (f"{base_registry.host}/vendor/{name}:1" for name in ("gone", "base"))
    root = make_tree(
        tmp_path / "tree",
        base_image=gone,
        alternatives=["registry.invalid/base:1", there],
        digest=digest,
    )
    add_python_lock(root, *PACKAGES)
    result = call("lock", root=root)
    assert f"base image {gone} is not available: {there} is taken" in result.err
    assert [(row.name, row.digest, row.reference) for row in load(root).locked_base_images] == [
        (gone, DIGEST, there)
    ]
    call(
        *UNTIL_BUILD[:-1],
        "render",
        "--output",
        str(tmp_path / "context"),
        "--without",
        "metis",
        root=root,
    )
    assert f"FROM {there}@{DIGEST} AS builder" in (tmp_path / "context" / "Dockerfile").read_text(
        encoding="utf-8"
    )
    (manifest,) = (tmp_path / "context").rglob("image.json")
    assert f"{there}@{DIGEST}" in json.loads(manifest.read_text(encoding="utf-8"))["base_images"]


def test_a_base_image_that_is_there_needs_no_alternative(
    call: Call, tmp_path: Path, base_registry: Hostile
) -> None:
    image = f"{base_registry.host}/vendor/base:1"
    base_registry.manifests["vendor/base", DIGEST] = INDEX, MANIFEST
    root = make_tree(
        tmp_path / "tree", base_image=image, alternatives=["registry.invalid/base:1"], digest=DIGEST
    )
    assert "base image" not in call("lock", root=root).err
    assert load(root).locked_base_images == ()


def with_debian(root: Path, image: str, *alternatives: str) -> None:
    """Let Debian's base image be this one, which this machine makes of its
    archive where no registry has it.
    """
    path = root / "images" / "bases.toml"
    text = path.read_text(encoding="utf-8")
    listed = ", ".join(f'"{alternative}"' for alternative in alternatives)
    rows = f'image = "{image}"\nalternatives = [{listed}]\narchives = {{ bookworm = "debian" }}\n'
    text = re.sub(r'image = "debian:bookworm-slim"\n(alternatives = .*\n)?', rows, text)
    path.write_text(text, encoding="utf-8")


def test_debians_digest_and_those_of_tools_are_recorded_at_the_first_contact(
    call: Call, tree: Path, base_registry: Hostile
) -> None:
    """Read from a second address where the first one does not answer; the digests stay."""
    gone, there = "registry.invalid/debian:1", f"{base_registry.host}/vendor/base:1"
    with_debian(tree, gone, there)
    tools = f'[[tool]]\nname = "oras"\nimage = "{there}"\nsource = "the test\'s own"\n'
    (tree / "images" / "tool-images.toml").write_text(tools, encoding="utf-8")
    call("lock", root=tree)
    rows = {row.name: (row.digest, row.reference) for row in load(tree).locked_base_images}
    assert rows == {gone: (DIGEST, there), there: (DIGEST, "")}
    base_registry.manifests.clear()
    call("lock", root=tree)
    assert {row.name for row in load(tree).locked_base_images} == rows.keys()


@pytest.mark.parametrize("suite", ["bookworm", "bookworm-security"])
def test_debians_digest_moves_with_the_release_and_not_with_its_updates(
    tree: Path, base_registry: Hostile, suite: str
) -> None:
    """Updates are installed on the base: a new one would be a new layer under all others."""
    present = f"{base_registry.host}/vendor/base:1"
    with_debian(tree, present)
    old = f"sha256:{'1' * 64}"
    (tree / "images" / "lock" / "base-images.toml").write_text(
        f'[[base_image]]\nname = "{present}"\ndigest = "{old}"\n', encoding="utf-8"
    )
    facts = load(tree)
    run = LockRun(rows=facts.targets, facts=facts, root=tree, report=lambda _line: None)
    with Registries(read_host_settings({}), patience=Patience(attempts=1)) as registries:
        lock_base_images(run, registries, upgrade=True, system=frozenset({suite}))
    assert load(tree).digest_by_image[present] == (DIGEST if suite == "bookworm" else old)


def test_the_system_is_locked_where_only_the_package_archive_answers(
    call: Call, tmp_path: Path
) -> None:
    """Lock as in a network with a mirror of Debian alone: the command needs no registry of a
    vendor.
    """
    root = make_tree(tmp_path / "tree", base_image="registry.invalid/base:1")
    assert call("lock", root=root).status == 11
    result = call("lock", "--upgrade", "system", root=root)
    assert result.status == 0, result.err
    assert "base image registry.invalid/base:1: cannot resolve registry.invalid" in result.err
    assert "its digest is not recorded" in result.err


def test_files_may_be_carried_in_by_hand_and_downloads_stay(
    call: Call, tree: Path, server: Server
) -> None:
    folder = tree.parent / "mirror"
    folder.mkdir()
    (folder / "metis-5.1.0.tar.gz").write_bytes(METIS)
    add_artifact(
        tree,
        "metis",
        "5.1.0",
        url="https://vendor.invalid/metis-5.1.0.tar.gz",
        together={"gklib": "1"},
    )
    add_artifact(tree, "gklib", "1", url=server.serve("/gklib.tar.gz", b"gklib"))
    call("lock", "--mirror", str(folder), root=tree)
    assert [url.rsplit("/", 1)[-1] for url, _, _ in lock_of(tree)] == [
        "gklib.tar.gz",
        "metis-5.1.0.tar.gz",
    ]
    assert (folder / "gklib.tar.gz").read_bytes() == b"gklib"


def test_a_name_that_two_files_have_is_taken_from_no_folder(
    call: Call, tree: Path, server: Server
) -> None:
    folder = tree.parent / "mirror"
    folder.mkdir()
    (folder / "smddp.whl").write_bytes(b"another one")
    url = server.serve("/cu113/smddp.whl", METIS)
    add_artifact(tree, "metis", "5.1.0", url=url)
    add_artifact(tree, "smddp", "1", url="https://vendor.invalid/cu117/smddp.whl")
    call("lock", "--mirror", str(folder), root=tree)
    assert lock_of(tree) == [(url, SHA256, len(METIS))]
    assert (folder / "smddp.whl").read_bytes() == b"another one"


def test_ctrl_c_ends_the_resolver_too(tree: Path, plain_server: Server) -> None:
    """uv waits for an index that never answers, and SIGINT comes to the
    command: both are gone, exit status 130.
    """
    has_asked = threading.Event()

    def waiting(_request: Request) -> None:
        has_asked.set()
        plain_server.over.wait()

    index = plain_server.serve("/simple/", waiting)
    command = [
        sys.executable,
        "-c",
        "import sys; from trainworks.cli import main; sys.exit(main())",
        "lock",
    ]
    environment = {
        **os.environ,
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_INDEX_URL": index,
        "PIP_FIND_LINKS": "",
    }
    environment["PYTHONPATH"] = str(ROOT / "src")
    with subprocess.Popen(
        [*command, "--root", str(tree)], env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        assert has_asked.wait(60)
        # Started by a thread or not: all tasks of the command are looked at.
        tasks = Path(f"/proc/{process.pid}/task").iterdir()
        resolvers = [
            int(word)
            for task in tasks
            for word in (task / "children").read_text(encoding="utf-8").split()
        ]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "everything that was started has been stopped" in errors
    assert len(resolvers) == 1
    with pytest.raises(ProcessLookupError):
        os.kill(resolvers[0], 0)


def test_an_interrupt_keeps_what_was_recorded(call: Call, tree: Path, server: Server) -> None:
    """Ctrl-C in the second download: the first one stands in the lock, and the
    command says it was interrupted.
    """
    first = server.serve("/metis-5.1.0.tar.gz", METIS)

    def interrupting(_request: Request) -> None:
        # A real signal ends a wait for bytes as well.
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        server.over.wait()

    add_artifact(tree, "metis", "5.1.0", url=first, together={"gklib": "1"})
    add_artifact(tree, "gklib", "1", url=server.serve("/gklib.tar.gz", interrupting))
    result = call("lock", root=tree)
    assert result.status == 130
    assert lock_of(tree) == [(first, SHA256, len(METIS))]


# Checking.

PACKAGES = (
    {
        "name": "cmake",
        "version": "3.31.0",
        "file": "cmake-3.31.0-py3-none-any.whl",
        "sha256": "1" * 64,
        "build": True,
    },
    {
        "name": "uv",
        "version": "0.13.8",
        "file": "uv-0.13.8-py3-none-any.whl",
        "sha256": "2" * 64,
        "build": True,
    },
    {
        "name": "setuptools",
        "version": "1",
        "file": "setuptools-1-py3-none-any.whl",
        "sha256": "3" * 64,
        "build": True,
    },
    {
        "name": "wheel",
        "version": "1",
        "file": "wheel-1-py3-none-any.whl",
        "sha256": "4" * 64,
        "build": True,
    },
)


def test_every_lock_of_this_repository_fits(call: Call, root: Path) -> None:
    result = call("lock", "--check", root=root)
    assert result.status == 0, result.err


def test_locks_that_fit(call: Call, tree: Path) -> None:
    add_python_lock(tree, *PACKAGES)
    add_artifact(tree, "metis", "5.1.0", url="https://vendor.invalid/a", sha256=SHA256)
    assert call("lock", "--check", "--strict", root=tree) == Ended(
        status=0, out="every lock fits its rows\n", err=""
    )


def test_what_was_never_recorded_is_listed_and_fails_only_when_strict(
    call: Call, tmp_path: Path
) -> None:
    tree = make_tree(tmp_path / "tree", base_image="registry.invalid/base:1")
    add_artifact(tree, "metis", "5.1.0", url="https://vendor.invalid/a")
    before = sorted(tree.rglob("*"))
    unlocked = [f"{TARGET}: its Python files", f"{TARGET}: base image registry.invalid/base:1"]
    unlocked.append("metis 5.1.0: https://vendor.invalid/a")
    result = call("lock", "--check", root=tree)
    assert (result.status, result.err) == (0, "")
    listing = "\n  ".join(unlocked)
    assert result.out == f"not locked, so not built:\n  {listing}\nevery lock fits its rows\n"
    result = call("lock", "--check", "--strict", root=tree)
    assert result.status == 11
    assert all(f"not locked: {row}" in result.err for row in unlocked)
    assert sorted(tree.rglob("*")) == before


def test_everything_that_does_not_fit_is_said_at_once(call: Call, tree: Path) -> None:
    wrong = {
        **PACKAGES[1],
        "version": "0.12.0",
        "file": "uv-0.12.0-py3-none-any.whl",
        "requires": ["absent"],
    }
    add_python_lock(tree, wrong, *PACKAGES[2:])
    add_artifact(tree, "metis", "5.1.0", url="https://vendor.invalid/a", sha256=SHA256)
    (tree / LOCK).write_text(
        f'[[artifact]]\nurl = "https://vendor.invalid/a"\nsha256 = "{"1" * 64}"\nsize = 1\n'
        f'[[artifact]]\nurl = "https://vendor.invalid/gone"\nsha256 = "{"1" * 64}"\nsize = 1\n',
        encoding="utf-8",
    )
    (tree / "images" / "lock" / "base-images.toml").write_text(
        f'[[base_image]]\nname = "gone:1"\ndigest = "{DIGEST}"\n', encoding="utf-8"
    )
    result = call("lock", "--check", root=tree)
    assert result.status == 11
    for part in (
        "images/lock does not fit the rows:",
        f"images/lock/{TARGET}.toml: cmake==3.31.0 is missing",
        f"images/lock/{TARGET}.toml: has uv 0.12.0, the target's version is 0.13.8",
        f"images/lock/{TARGET}.toml: uv requires absent, which is missing",
        "metis 5.1.0: images/lock/artifacts.toml and its row in images/artifacts.toml differ:"
        " expected sha256 " + SHA256,
        "images/lock/artifacts.toml: https://vendor.invalid/gone stands in no row any more",
        "images/lock/base-images.toml: gone:1 stands in no row any more",
    ):
        assert part in result.err


# Mirrors.


def python_files(server: Server) -> list[dict[str, object]]:
    """Serve an index with the locked files; return their rows."""
    rows: list[dict[str, object]] = []
    for package in PACKAGES:
        content = WHEEL + str(package["name"]).encode()
        sha256 = hashlib.sha256(content).hexdigest()
        server.serve(f"/files/{package['file']}", content)
        wrong = f'<a href="/wrong/{package["file"]}#sha256={"0" * 64}">another</a>'
        page = f'{wrong}<a href="../../files/{package["file"]}#sha256={sha256}">this one</a>'
        server.serve(f"/simple/{package['name']}/", page.encode())
        rows.append({**package, "sha256": sha256})
    return rows


def test_a_mirror_is_filled_goes_on_and_is_checked(
    call: Call, tree: Path, server: Server, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", f"{server.url}/simple")
    server.answers["/git/"] = git_repositories(repository.path.parent, "/git/")
    git = f"{server.url}/git/{repository.path.name}"
    add_python_lock(tree, *python_files(server))
    url = f"{server.url}/metis-5.1.0.tar.gz"
    add_artifact(tree, "metis", "5.1.0", url=url, sha256=SHA256, together={"gklib": "1.0"})
    add_artifact(tree, "gklib", "1.0", git=git, tag="v1.0", commit=repository.commit)
    folder = tree.parent / "mirror"

    result = call("mirror", str(folder), "--only", TARGET, root=tree)
    assert result.status == 11
    assert f"1 file is not in {folder}:\n  metis 5.1.0: {url} answers HTTP 404" in result.err

    server.serve("/metis-5.1.0.tar.gz", METIS)
    (folder / "metis-5.1.0.tar.gz.part").write_bytes(METIS[:1000])
    spoiled = folder / str(PACKAGES[0]["file"])
    spoiled.write_bytes(b"spoiled")
    server.seen.clear()
    result = call("mirror", str(folder), root=tree)
    assert (result.status, result.out) == (0, f"{folder}\n")
    assert "  metis-5.1.0.tar.gz: resumed at 1 kB\n" in result.err
    requests = [
        (request.path, request.range) for request in server.seen if "/git/" not in request.path
    ]
    assert requests == [
        ("/metis-5.1.0.tar.gz", "bytes=1000-"),
        ("/simple/cmake/", ""),
        (f"/files/{PACKAGES[0]['file']}", ""),
    ]
    files = {
        "metis-5.1.0.tar.gz",
        f"gklib-{repository.commit}.bundle",
        *(str(row["file"]) for row in PACKAGES),
    }
    assert {path.name for path in folder.iterdir()} == files | {"SHA256SUMS", "index.html"}
    subprocess.run(
        ("sha256sum", "--check", "--strict", "SHA256SUMS"),
        cwd=folder,
        check=True,
        capture_output=True,
    )
    server.seen.clear()
    result = call("mirror", str(folder), "--format", "json", root=tree)
    assert (result.status, json.loads(result.out)) == (
        0,
        {"folder": str(folder), "targets": [TARGET]},
    )
    assert server.seen == []


def test_what_a_mirror_cannot_have(call: Call, tree: Path, server: Server) -> None:
    add_python_lock(tree, *PACKAGES[:1])
    add_artifact(
        tree,
        "metis",
        "5.1.0",
        url="https://vendor.invalid/a/x.tar.gz",
        together={"gklib": "1", "thrust": "1"},
    )
    add_artifact(tree, "gklib", "1", url="https://vendor.invalid/b/x.tar.gz", sha256="1" * 64)
    add_artifact(tree, "thrust", "1", url=server.serve("/c/x.tar.gz", METIS), sha256="2" * 64)
    folder = tree.parent / "mirror"
    result = call("mirror", str(folder), root=tree)
    assert result.status == 11
    for part in (
        (
            "metis 5.1.0: no sha256 of https://vendor.invalid/a/x.tar.gz is recorded; `python"
            " build.py lock` records it"
        ),
        "thrust 1: x.tar.gz is also gklib 1, another file; use a folder for each",
        "gklib 1: cannot download https://vendor.invalid/b/x.tar.gz",
        f"cmake 3.31.0: no index of this machine's pip has {PACKAGES[0]['file']}",
    ):
        assert part in result.err
    assert [
        path.name for path in folder.iterdir() if path.name not in ("SHA256SUMS", "index.html")
    ] == []


def test_wrong_bytes_never_come_into_a_mirror(call: Call, tree: Path, server: Server) -> None:
    add_python_lock(tree)
    url = server.serve("/metis-5.1.0.tar.gz", METIS[:-1])
    add_artifact(tree, "metis", "5.1.0", url=url, sha256=SHA256)
    folder = tree.parent / "mirror"
    result = call("mirror", str(folder), root=tree)
    assert (
        f"metis 5.1.0: {url} is not what was pinned: expected sha256 {SHA256}, found " in result.err
    )
    assert [
        path.name for path in folder.iterdir() if path.name not in ("SHA256SUMS", "index.html")
    ] == []


# Refusals of a build, before it asks for an engine: none answers.

NO_ENGINE = ("--engine", "docker")


def test_a_build_of_what_is_not_locked(call: Call, tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "tree", base_image="registry.invalid/base:1")
    add_python_lock(tree, *PACKAGES)
    add_artifact(tree, "metis", "5.1.0", url="https://vendor.invalid/a.tar.gz")
    result = call(*UNTIL_BUILD, *NO_ENGINE, root=tree)
    assert result.status == 11
    for part in (
        f"{TARGET} has inputs that are not locked",
        "base image registry.invalid/base:1: no digest",
        "metis 5.1.0: no sha256 of https://vendor.invalid/a.tar.gz",
        f"`python build.py lock --only {TARGET}`",
    ):
        assert part in result.err


def test_trust_on_first_use_records_what_is_missing_and_keeps_the_bytes(
    call: Call, tmp_path: Path, server: Server, base_registry: Hostile
) -> None:
    image = f"{base_registry.host}/vendor/base:1"
    root = make_tree(tmp_path / "tree", base_image=image)
    add_python_lock(root, *PACKAGES)
    python = (root / "images" / "lock" / f"{TARGET}.toml").read_bytes()
    url = server.serve("/metis-5.1.0.tar.gz", METIS)
    add_artifact(root, "metis", "5.1.0", url=url, together={"gklib": "1"})
    published = hashlib.sha256(b"gklib").hexdigest()
    add_artifact(root, "gklib", "1", url="https://vendor.invalid/gklib.tar.gz", sha256=published)
    result = call(*UNTIL_BUILD, *NO_ENGINE, "--trust-first-use", root=root)
    assert lock_of(root) == [(url, SHA256, len(METIS))], "only what has no hash is downloaded"
    assert load(root).digest_by_image == {image: DIGEST}
    assert (root / "images" / "lock" / f"{TARGET}.toml").read_bytes() == python, (
        "nothing is resolved anew"
    )
    assert [line for line in result.err.splitlines() if "first seen today" in line] == [
        (
            "warning: first seen today:"
            f" {url}, sha256 {SHA256}, {len(METIS)} bytes; commit images/lock"
        ),
        f"warning: first seen today: base image {image}, {DIGEST}; commit images/lock",
    ]
    assert (
        tmp_path / "cache" / "trainworks" / "files" / "metis-5.1.0.tar.gz"
    ).read_bytes() == METIS
    assert "not locked" not in result.err
    server.seen.clear()
    assert (
        "first seen today" not in call(*UNTIL_BUILD, *NO_ENGINE, "--trust-first-use", root=root).err
    )
    assert server.seen == []
    cached_file = tmp_path / "cache" / "trainworks" / "files" / str(PACKAGES[1]["file"])
    cached_file.write_bytes(b"spoilt")
    result = call(*UNTIL_BUILD, *NO_ENGINE, "--trust-first-use", root=root)
    assert f"{cached_file.name} is not what was pinned" in result.err, (
        "what an earlier run kept is used"
    )
    planned = call(*UNTIL_BUILD[:-1], "plan", root=root).out
    assert "  trusted on first use: metis 5.1.0\n" in planned
    assert "trusted on first use: gklib" not in planned
    call(*UNTIL_BUILD[:-1], "render", "--output", str(tmp_path / "context"), root=root)
    (manifest,) = (tmp_path / "context").rglob("image.json")
    assert json.loads(manifest.read_text(encoding="utf-8"))["first_use"] == [
        f"base image {image}",
        "metis 5.1.0",
    ]


def test_trust_on_first_use_names_what_cannot_be_had(
    call: Call, tree: Path, server: Server
) -> None:
    add_python_lock(tree, *PACKAGES)
    add_artifact(tree, "metis", "5.1.0", url=f"{server.url}/gone.tar.gz")
    result = call(*UNTIL_BUILD, *NO_ENGINE, "--trust-first-use", root=tree)
    assert result.status == 11
    assert f"1 input of {TARGET} cannot be recorded:" in result.err
    assert f"metis 5.1.0: {server.url}/gone.tar.gz answers HTTP 404" in result.err


def test_a_build_from_a_folder_that_lacks_something(call: Call, tree: Path) -> None:
    add_python_lock(tree, *PACKAGES)
    add_artifact(tree, "metis", "5.1.0", url="https://vendor.invalid/a.tar.gz", sha256=SHA256)
    folder = tree.parent / "mirror"
    assert (
        f"--mirror {folder}: no such folder"
        in call(*UNTIL_BUILD, "--mirror", str(folder), root=tree).err
    )
    folder.mkdir()
    (folder / str(PACKAGES[1]["file"])).write_bytes(WHEEL)
    result = call(*UNTIL_BUILD, *NO_ENGINE, "--mirror", str(folder), root=tree)
    assert result.status == 11
    assert f"{folder} does not have the right files of {TARGET}" in result.err
    assert result.err.count("  cmake 3.31.0: ") + result.err.count(" is missing") == 0
    result = call(*UNTIL_BUILD, *NO_ENGINE, "--mirror", str(folder), "--offline", root=tree)
    assert result.status == 11
    for part in (
        f"{folder} does not have all of {TARGET}",
        "metis 5.1.0: a.tar.gz is missing",
        f"cmake 3.31.0: {PACKAGES[0]['file']} is missing",
        f"{PACKAGES[1]['file']} is not what was pinned: expected sha256 {'2' * 64}, found sha256 ",
        f"`python build.py mirror {folder} --only {TARGET}` fills it",
    ):
        assert part in result.err


@pytest.mark.parametrize("offline", [True, False])
@pytest.mark.parametrize(("scheme", "trusted"), [("https", ()), ("http", ("mirror.example:8080",))])
def test_an_address_is_a_secret_and_offline_the_only_source(
    scheme: str, trusted: tuple[str, ...], *, offline: bool
) -> None:
    address = f"{scheme}://user:word@mirror.example:8080/all"
    mirror = read_mirror(f"{address}/", offline=offline)
    pip = PipSettings(
        index_url="https://index.example/simple", extra_index_urls=("https://more.example",)
    )
    settings = mirror.settings(HostSettings(pip=pip))
    secrets = settings.secrets("bookworm", "https://vendor.example/whl")
    mark = "only" if offline else ""
    assert secrets["mirror"] == f"{address}\n{mark}\n".encode()
    for name in ("pip.conf", "uv.toml"):
        content = secrets[name].decode()
        assert f"{address}/index.html" in content
        assert ("no-index = true" in content) == offline
        hosts = [host for host in ("index.example", "more.example") if host in content]
        assert hosts == ([] if offline else ["index.example", "more.example"])
    assert settings.pip.trusted_hosts == trusted
    assert "word" not in repr(replace(settings, pip=PipSettings()))
    assert address in settings.forbidden_texts("")
