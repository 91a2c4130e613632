"""Pushes by each engine to registries that die, fail and send elsewhere.

Proofs of pushed images.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import random
import re
import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from engine.helpers import CREATED, busybox, make_rootfs
from image.support import engine_that_answers
from push.hostile import Hostile, digest_of, hostile_registry
from push.support import PASSWORD, ROOT, USER, RegistryServer, docker_configuration
from trainworks.attestation.prove import find_pushed_address
from trainworks.cli import main
from trainworks.engine.archive import ImageConfiguration, write_archive
from trainworks.engine.buildah import BuildahEngine
from trainworks.engine.protocol import BuildRequest
from trainworks.errors import ProofError, RegistryError, UnknownNameError
from trainworks.facts.rows import MACHINES, Architecture
from trainworks.host.pip import PipSettings
from trainworks.host.settings import HostSettings
from trainworks.registry.names import Tags, derive_tags
from trainworks.registry.protocol import Patience
from trainworks.registry.push import SENT, Pushed, PushRequest, push_image
from trainworks.registry.tags import claim_tag
from trainworks.registry.tools import Registries
from trainworks_testing.certificates import Authority

PATH = os.environ["PATH"]

pytestmark = pytest.mark.engine


def push(image: str, *repositories: str, engine: str = "docker") -> subprocess.Popen[str]:
    words = [word for repository in repositories for word in ("--repository", repository)]
    command = (
        sys.executable,
        str(ROOT / "build.py"),
        "push",
        image,
        *words,
        "--engine",
        engine,
        "--format",
        "json",
    )
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def image(name: str, tmp_path: Path) -> Iterator[str]:
    """Give an image of some megabytes that no registry has."""
    engine = engine_that_answers(name)
    reference = f"trainworks-push-{uuid.uuid4().hex[:12]}:1.0-cpu-py311-debian12"
    (tmp_path / "context").mkdir()
    words = ["FROM scratch"]
    for number in range(3):
        (tmp_path / "context" / f"file{number}").write_bytes(os.urandom(3 << 20))
        words.append(f"COPY file{number} /")
    (tmp_path / "context" / "Dockerfile").write_text("\n".join(words) + "\n", encoding="utf-8")
    request = BuildRequest(name="image", context=tmp_path / "context", tags=(reference,))
    engine.build(request, lambda _event: None)
    yield reference
    engine.remove(reference)


WAYS = ("docker", "docker without skopeo", "buildah")


@pytest.fixture(params=WAYS)
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Give an engine's name; each way to push."""
    if shutil.which("oras") is None:
        pytest.skip("NOT TESTED: no oras (tools/set-up-engine all)")
    if request.param == "docker" and shutil.which("skopeo") is None:
        pytest.skip("NOT TESTED: no skopeo (tools/set-up-engine all)")
    if request.param == "docker without skopeo":
        # All programs in their order, without one.
        folders = [Path(folder) for folder in os.environ["PATH"].split(os.pathsep)]
        for number, folder in enumerate(folders):
            (tmp_path / f"bin{number}").mkdir()
            for program in folder.iterdir() if folder.is_dir() else ():
                if program.name != "skopeo":
                    (tmp_path / f"bin{number}" / program.name).symlink_to(program)
        monkeypatch.setenv(
            "PATH",
            os.pathsep.join(str(tmp_path / f"bin{number}") for number in range(len(folders))),
        )
    return str(request.param).partition(" ")[0]


@contextlib.contextmanager
def empty_store(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, ...]]:
    """Give the options of buildah for an empty store, and buildah the logins of the test."""
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(folder / "docker" / "config.json"))
    monkeypatch.setenv("PATH", PATH)
    store = ("--root", str(folder / "store"), "--runroot", str(folder / "run"))
    try:
        yield store
    finally:
        subprocess.run(
            ("buildah", *store, "rmi", "--all", "--force"), check=False, capture_output=True
        )
        shutil.rmtree(folder / "store", ignore_errors=True)


@pytest.mark.usefixtures("logged_in")
def test_a_push_survives_its_registry_and_a_clean_engine_gets_the_same_image(
    name: str, image: str, server: RegistryServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = f"{server.host}/team/image"

    def restart() -> None:
        while not server.requests("POST", "/blobs/uploads"):
            if over.wait(0.02):
                return
        server.kill()
        server.start()
        killed.set()

    over, killed = threading.Event(), threading.Event()
    watcher = threading.Thread(target=restart)
    watcher.start()
    try:
        with push(image, repository, engine=name) as process:
            output, errors = process.communicate(timeout=600)
    finally:
        over.set()
        watcher.join(60)
    assert process.returncode == 0, errors
    assert killed.is_set()
    (pushed,) = json.loads(output)["pushed"]
    assert pushed["how"] == "sent"
    day = time.strftime("%Y%m%d", time.gmtime())
    assert pushed["tags"][1] == "1.0-cpu-debian12"
    assert pushed["tags"][0].startswith("1.0-cpu-py311-debian12-2")
    assert pushed["tags"][0] <= f"1.0-cpu-py311-debian12-{day}"

    # The same image once more: nothing is sent, every name is the same.
    before = len(server.requests("PATCH"))
    with push(image, repository, engine=name) as process:
        again = json.loads(process.communicate(timeout=300)[0])["pushed"][0]
    assert (again["how"], again["image_uri"]) == ("there", pushed["image_uri"])
    # Another repository of this registry: mounted.
    with push(image, f"{server.host}/team/sister", engine=name) as process:
        sister = json.loads(process.communicate(timeout=300)[0])["pushed"][0]
    assert (sister["how"], sister["digest"]) == ("copied", pushed["digest"])
    assert len(server.requests("PATCH")) == before
    assert PASSWORD not in output + errors + server.log

    with empty_store(tmp_path, monkeypatch) as store:
        clean = BuildahEngine(options=store)
        assert clean.pull(pushed["image_uri"], timeout=300)
        found_image = clean.inspect(pushed["image_uri"])
        assert found_image is not None
        mine = engine_that_answers(name).inspect(image)
        assert mine is not None
        # With containerd's store docker knows the image by its manifest, and
        # buildah by its configuration.
        assert mine.identifier in (found_image.identifier, pushed["digest"])
        assert found_image.environment == mine.environment


def test_a_push_to_a_registry_that_fails_at_30_percent_of_requests(
    name: str, image: str, hostile: Hostile
) -> None:
    chance = random.Random(2026)
    hostile.fault = lambda request: (
        chance.random() < 0.3 and request.answer(chance.choice([429, 500]))
    )
    patient = Registries(
        HostSettings(pip=PipSettings()), patience=Patience(attempts=60, pause=0.001)
    )
    with patient as mine:
        engine = engine_that_answers(name)
        (done,) = push_image(
            engine,
            PushRequest(
                reference=image,
                repositories=[f"{hostile.host}/team/image"],
                tags=derive_tags(image),
            ),
            mine,
            os.environ,
        )
        manifest = mine.read_manifest(done.repository, done.tags[0])
    hostile.fault = lambda _request: False
    assert manifest.digest == done.digest
    for layer in manifest.read_descriptors("layers"):
        assert digest_of(hostile.blobs["team/image", str(layer["digest"])]) == layer["digest"]


@pytest.mark.usefixtures("logged_in")
def test_no_login_and_no_layer_of_a_push_goes_to_an_address_without_tls(
    name: str,
    image: str,
    named: tuple[str, Authority],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    host, authority = named
    with hostile_registry(name=host) as clear, hostile_registry(authority, name=host) as other:
        docker_configuration(
            tmp_path / "docker", {other.host: (USER, PASSWORD), clear.host: (USER, PASSWORD)}
        )
        other.login = True
        other.location = lambda own: own.replace(other.url, clear.url)
        assert main(["push", image, "--repository", f"{other.host}/a", "--engine", name]) == 15
        assert clear.seen == []
        assert PASSWORD not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["docker"], indirect=True)
def test_docker_pushes_where_skopeo_is_too_old_for_the_daemon(
    name: str, image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian 12's skopeo with Docker 25 or later."""
    (tmp_path / "old").mkdir()
    old = tmp_path / "old" / "skopeo"
    words = (
        "Error response from daemon: client version 1.22 is too old."
        " Minimum supported API version is 1.24"
    )
    old.write_text(f"#!/bin/sh\necho '{words}' >&2\nexit 1\n")
    old.chmod(0o755)
    monkeypatch.setenv("PATH", f"{old.parent}{os.pathsep}{os.environ['PATH']}")
    engine = engine_that_answers(name)
    built = engine.inspect(image)
    assert built is not None
    with engine.push_command(built, "127.0.0.1:1/a:1", plain=False) as argv:
        assert Path(argv[0]).name == "docker"


@pytest.mark.usefixtures("logged_in")
def test_a_name_of_the_user_s_own_store_stays(
    name: str, image: str, server: RegistryServer
) -> None:
    engine = engine_that_answers(name)
    assert (
        main(["push", image, "--repository", f"{server.host}/a", "--tag", "1", "--engine", name])
        == 0
    )
    assert engine.inspect(f"{server.host}/a:1") is None


@pytest.mark.parametrize("deletes", [True, False])
def test_a_push_prints_the_address_and_the_name_it_was_sent_under_goes_where_it_can(
    name: str, image: str, hostile: Hostile, capsys: pytest.CaptureFixture[str], *, deletes: bool
) -> None:
    """Send no request of the engine for the fixed tag; stdout is the text that `image=$(...)`
    wants.
    """
    hostile.deletes = deletes
    repository = f"{hostile.host}/team/image"
    assert main(["push", image, "--repository", repository, "--tag", "v1", "--engine", name]) == 0
    captured = capsys.readouterr()
    digest = digest_of(hostile.manifests["team/image", "v1"][1])
    assert captured.out == f"{repository}@{digest}\n"
    assert f"  {repository}:v1\n" in captured.err
    tags = {tag for _, tag in hostile.manifests if ":" not in tag}
    sent = {tag for tag in tags if tag.startswith(SENT)}
    assert tags - sent == {"v1", claim_tag("v1")}
    assert len(sent) == (0 if deletes else 1)
    assert all(tag in captured.err for tag in sent)
    tags_put = [
        path.rpartition("/")[2]
        for method, path, _ in hostile.seen
        if method == "PUT" and "/manifests/" in path
    ]
    assert [tag for tag in tags_put if not tag.startswith(SENT)] == [claim_tag("v1"), "v1"]


@pytest.mark.usefixtures("logged_in")
def test_two_pushes_at_once_under_one_fixed_tag(
    name: str, server: RegistryServer, tmp_path: Path
) -> None:
    """Real processes, against a real registry: one gets 0, the other 15 with
    the digest that is there.
    """
    engine = engine_that_answers(name)
    references = [f"trainworks-push-{uuid.uuid4().hex[:12]}:1.{number}-cpu" for number in range(2)]
    try:
        for reference in references:
            context = tmp_path / reference.replace(":", "-")
            context.mkdir()
            (context / "file").write_text(reference)
            (context / "Dockerfile").write_text("FROM scratch\nCOPY file /\n")
            request = BuildRequest(name="image", context=context, tags=(reference,))
            engine.build(request, lambda _event: None)
        for number in range(5):
            place = f"{server.host}/race/r{number}"
            words = ("--repository", place, "--tag", "v1", "--engine", name)
            commands = [
                (sys.executable, str(ROOT / "build.py"), "push", reference, *words)
                for reference in references
            ]
            with contextlib.ExitStack() as stack:
                racing = [
                    stack.enter_context(
                        subprocess.Popen(
                            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
                        )
                    )
                    for command in commands
                ]
                ends = [
                    (*process.communicate(timeout=600), process.returncode) for process in racing
                ]
            ends.sort(key=lambda end: end[2])
            (output, _, first), (_, errors, second) = ends
            assert (first, second) == (0, 15), ends
            with Registries(HostSettings(pip=PipSettings())) as registries:
                digest = registries.read_manifest(place, "v1").digest
            assert output == f"{place}@{digest}\n"
            assert f"v1 is another image ({digest})" in errors
    finally:
        for reference in references:
            engine.remove(reference)


@pytest.mark.usefixtures("logged_in")
def test_tags_of_a_day_with_two_contents(
    name: str, server: RegistryServer, registries: Registries, tmp_path: Path
) -> None:
    """A tag that never moves is refused or gets a name of its own; a tag that moves does.

    Two repositories cost one upload.
    """
    engine = engine_that_answers(name)
    program = busybox()
    if program is None:
        pytest.skip("no busybox: `apt-get install busybox-static`")
    rootfs = make_rootfs(tmp_path / "rootfs", program)
    reference = f"trainworks-push-{uuid.uuid4().hex[:12]}:1.0-cpu-py311-debian12"
    places = [f"{server.host}/team/{repository}" for repository in ("one", "two")]
    day = datetime(2026, 11, 21, tzinfo=UTC)
    done: list[list[Pushed]] = []
    try:
        for flavour in ("first", "second", "second"):
            write_archive(
                rootfs,
                tmp_path / "image.tar",
                name=reference,
                configuration=ImageConfiguration(
                    created=CREATED, environment={"FLAVOUR": flavour}, command=("/bin/sh",)
                ),
            )
            engine.load(tmp_path / "image.tar")
            tags = derive_tags(reference)
            done.append(
                push_image(
                    engine,
                    PushRequest(reference=reference, repositories=places, tags=tags, today=day),
                    registries,
                    os.environ,
                )
            )
        first, second, again = done
        assert [pushed.how for pushed in (*first, *second, *again)] == ["sent", "copied"] * 2 + [
            "there"
        ] * 2
        assert [pushed.digest for pushed in second] == [pushed.digest for pushed in again]
        assert first[0].tags == ["1.0-cpu-py311-debian12-20261121", "1.0-cpu-debian12"]
        dated, moving = second[0].tags
        assert re.fullmatch(r"1\.0-cpu-py311-debian12-20261121-[0-9a-f]{8}", dated)
        assert again[0].tags == second[0].tags

        def digest(tag: str) -> str:
            return registries.read_manifest(places[0], tag).digest

        assert digest(first[0].tags[0]) == first[0].digest
        assert digest(dated) == digest(moving) == second[0].digest
        assert first[0].digest != second[0].digest
        with pytest.raises(
            RegistryError,
            match=rf"is another image \({first[0].digest}\), and this tag never moves",
        ):
            push_image(
                engine,
                PushRequest(
                    reference=reference, repositories=places, tags=Tags(fixed=(first[0].tags[0],))
                ),
                registries,
                os.environ,
            )
        assert digest(first[0].tags[0]) == first[0].digest
    finally:
        engine.remove(reference)


@pytest.mark.usefixtures("logged_in")
def test_one_tag_for_two_architectures(
    name: str,
    server: RegistryServer,
    registries: Registries,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each machine pulls its own image by that tag.

    A newer image takes the place of the one for its architecture.
    """
    engine = engine_that_answers(name)
    rootfs = tmp_path / "rootfs"
    rootfs.mkdir()
    (rootfs / "file").write_text("the same on each")
    place, tag = f"{server.host}/team/{uuid.uuid4().hex[:12]}", "1.0-both"
    references = []
    pushed: dict[str, str] = {}
    architectures: tuple[Architecture, ...] = ("amd64", "arm64", "arm64")
    try:
        for number, architecture in enumerate(architectures):
            reference = f"trainworks-push-{uuid.uuid4().hex[:12]}:1.{number}-{architecture}"
            write_archive(
                rootfs,
                tmp_path / "image.tar",
                name=reference,
                configuration=ImageConfiguration(
                    created=CREATED,
                    environment={"NUMBER": str(number)},
                    command=("/bin/sh",),
                    architecture=architecture,
                ),
            )
            engine.load(tmp_path / "image.tar")
            references.append(reference)
            (done,) = push_image(
                engine,
                PushRequest(
                    reference=reference,
                    repositories=[place],
                    tags=derive_tags(reference, shared=[tag]),
                ),
                registries,
                os.environ,
            )
            pushed[architecture] = done.digest
            assert done.tags[-1] == tag
            listed = registries.read_manifest(place, tag).read_descriptors("manifests")
            assert {
                manifest["platform"]["architecture"]: manifest["digest"] for manifest in listed
            } == pushed
        registries.put_tag(place, "single", registries.read_manifest(place, done.digest))
        tags = derive_tags(references[0], shared=["single"])
        with pytest.raises(RegistryError, match="is an image of one architecture"):
            push_image(
                engine,
                PushRequest(reference=references[0], repositories=[place], tags=tags),
                registries,
                os.environ,
            )
        both = f"{place}:{tag}"
        newest: dict[Architecture, str] = {"amd64": "0", "arm64": "2"}
        own = next(
            newest[architecture]
            for architecture in newest
            if MACHINES[architecture] == platform.machine()
        )
        pulls = [
            ([], own),
            *(
                (["--platform", f"linux/{architecture}"], value)
                for architecture, value in newest.items()
            ),
        ]
        for words, value in pulls:
            with empty_store(tmp_path, monkeypatch) as store:
                subprocess.run(("buildah", *store, "pull", *words, both), check=True, timeout=300)
                found_image = BuildahEngine(options=store).inspect(both)
                assert found_image is not None
                assert found_image.environment["NUMBER"] == value
    finally:
        for reference in references:
            engine.remove(reference)


@pytest.mark.parametrize(
    "name", [pytest.param(WAYS[0], marks=pytest.mark.core), *WAYS[1:]], indirect=True
)
@pytest.mark.usefixtures("logged_in")
def test_what_either_engine_has_pushed_is_proven_as_pushed(
    name: str, server: RegistryServer, registries: Registries, tmp_path: Path
) -> None:
    """The configuration that the engine knows an image by is the very one that the registry has."""
    engine = engine_that_answers(name)
    program = busybox()
    if program is None:
        pytest.skip("no busybox: `apt-get install busybox-static`")
    rootfs = make_rootfs(tmp_path / "rootfs", program)
    place = f"{server.host}/team/image"
    references = [
        f"trainworks-proof-{uuid.uuid4().hex[:12]}:1.0-cpu-py311-debian12" for _ in range(2)
    ]
    try:
        images = []
        for reference in references:
            context = tmp_path / reference.partition(":")[0]
            context.mkdir()
            (context / "image").write_text(reference)
            write_archive(
                rootfs,
                context / "base.tar",
                name=f"{reference}-base",
                configuration=ImageConfiguration(created=CREATED),
            )
            engine.load(context / "base.tar")
            (context / "Dockerfile").write_text(f"FROM {reference}-base\nCOPY image /image\n")
            request = BuildRequest(
                name="image", context=context, tags=(reference,), labels={"same": "labels"}
            )
            images.append(engine.build(request, lambda _event: None))
        push_image(
            engine,
            PushRequest(reference=references[0], repositories=[place], tags=Tags(moving=("one",))),
            registries,
            os.environ,
        )
        address = find_pushed_address(f"{place}:one", images[0], registries)
        assert address == f"{place}@{registries.read_manifest(place, 'one').digest}"
        with pytest.raises(ProofError, match=f"is another image .*, not {images[1].identifier}"):
            find_pushed_address(address, images[1], registries)
    finally:
        for reference in references:
            engine.remove(reference)
            engine.remove(f"{reference}-base")


def test_an_image_that_is_not_there(registries: Registries) -> None:
    engine = engine_that_answers("docker")
    with pytest.raises(UnknownNameError, match="docker has no image nobody/made-this:1"):
        push_image(
            engine,
            PushRequest(
                reference="nobody/made-this:1",
                repositories=["127.0.0.1:1/a"],
                tags=derive_tags("nobody/made-this:1"),
            ),
            registries,
            {},
        )
