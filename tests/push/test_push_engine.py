"""The real `cpu` image: pushed to a registry that dies in between, pulled by a clean engine, checked there."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import uuid
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519

from engine.helpers import CREATED, busybox, make_rootfs
from image.support import build_once, engine_that_answers
from proof.support import public_text, tiny_proof
from push.support import PASSWORD, ROOT, RegistryServer
from trainworks.cli import main
from trainworks.engine import ENGINES
from trainworks.engine.archive import write_archive
from trainworks.engine.buildah import BuildahEngine
from trainworks.engine.protocol import BuildRequest
from trainworks.errors import ProofError, RegistryError, UnknownNameError
from trainworks.facts.load import load
from trainworks.facts.rows import Facts
from trainworks.imagetest.run import run_checks
from trainworks.plan.model import Request
from trainworks.plan.resolve import make_plan
from trainworks.proof.attach import attach, check_same, find_pushed
from trainworks.registry.client import Registries
from trainworks.registry.push import Pushed, Tags, push_image, tags_for

pytestmark = pytest.mark.engine

KILLED_AFTER = 60_000_000
"""Bytes that the registry has when it is killed: in the middle of a layer, after some."""


def push(image: str, *repositories: str) -> subprocess.Popen[str]:
    words = [word for repository in repositories for word in ("--repository", repository)]
    command = (sys.executable, str(ROOT / "build.py"), "push", image, *words, "--engine", "docker", "--format", "json")
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.usefixtures("logged_in")
def test_a_push_survives_its_registry_and_a_clean_engine_gets_the_same_image(
    server: RegistryServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine_that_answers("buildah")
    # The machine of this test trusts another CA, and the build wants its own.
    with monkeypatch.context() as usual:
        usual.delenv("SSL_CERT_FILE")
        usual.delenv("DOCKER_CONFIG")
        reference = build_once("docker").reference
    repository = f"{server.host}/team/pytorch-training"

    def restart() -> None:
        while server.received() < KILLED_AFTER:
            if over.wait(0.05):
                return
        server.kill()
        server.start()
        killed.set()

    over, killed = threading.Event(), threading.Event()
    watcher = threading.Thread(target=restart)
    watcher.start()
    try:
        with push(reference, repository) as process:
            output, errors = process.communicate(timeout=600)
    finally:
        over.set()
        watcher.join(60)
    assert process.returncode == 0, errors
    assert killed.is_set()
    assert "attempt 2 of" in errors
    (pushed,) = json.loads(output)["pushed"]
    # Only the layer that was under way is sent twice.
    assert pushed["layers"]["sent"] >= 5
    assert pushed["layers"]["there"] == 0
    assert len(server.requests("POST", "/blobs/uploads/")) <= 2 * 2 + 2 * pushed["layers"]["sent"]
    day = time.strftime("%Y%m%d", time.gmtime())
    assert pushed["tags"][1] == "2.13.0-cpu-debian12"
    assert pushed["tags"][0].startswith("2.13.0-cpu-py311-debian12-2")
    assert pushed["tags"][0] <= f"2.13.0-cpu-py311-debian12-{day}"
    for secret in (PASSWORD,):
        assert secret not in output + errors + server.log

    # The same image once more: no layer is read or sent, every name is the same.
    with push(reference, repository) as process:
        again = json.loads(process.communicate(timeout=120)[0])["pushed"][0]
    assert (again["sent_bytes"], again["image_uri"]) == (0, pushed["image_uri"])

    # A clean engine: buildah with a store of its own.
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "docker" / "config.json"))
    store = ("--root", str(tmp_path / "store"), "--runroot", str(tmp_path / "run"))
    clean = BuildahEngine(options=store)
    try:
        assert clean.inspect(reference) is None
        assert clean.pull(pushed["image_uri"], timeout=300)
        found = clean.inspect(pushed["image_uri"])
        assert found is not None
        listed = subprocess.run(
            ("buildah", *store, "images", "--digests", "--json"), check=True, capture_output=True, text=True
        )
        assert pushed["digest"] in listed.stdout
        plan = make_plan(Request(framework="pytorch", cuda="cpu"), load(ROOT))
        quick = tuple(check for check in plan.checks if check.component == "torch")[:8]
        results = run_checks(clean, found, quick, forbidden=(), report=lambda _outcome: None)
        assert [outcome.title for outcome in results if not outcome.passed] == []
        assert len(results) == len(set(quick)) > 3
    finally:
        subprocess.run(("buildah", *store, "rmi", "--all", "--force"), check=False, capture_output=True)
        shutil.rmtree(tmp_path / "store", ignore_errors=True)


@pytest.mark.parametrize("name", list(ENGINES))
@pytest.mark.usefixtures("logged_in")
def test_tags_of_a_day_with_two_contents(
    name: str, server: RegistryServer, registries: Registries, tmp_path: Path
) -> None:
    """What never moves is refused or gets a name of its own; what moves does; two repositories cost one upload."""
    engine = engine_that_answers(name)
    program = busybox()
    if program is None:
        pytest.skip("no busybox: `apt-get install busybox-static`")
    rootfs = make_rootfs(tmp_path / "rootfs", program)
    reference = f"trainworks-push-{uuid.uuid4().hex[:12]}:1.0-cpu-py311-debian12"
    places = [f"{server.host}/team/{each}" for each in ("one", "two")]
    day = datetime(2026, 11, 21, tzinfo=UTC)
    done: list[list[Pushed]] = []
    try:
        for flavour in ("first", "second", "second"):
            write_archive(
                rootfs,
                tmp_path / "image.tar",
                name=reference,
                environment={"FLAVOUR": flavour},
                command=("/bin/sh",),
                created=CREATED,
            )
            engine.load(tmp_path / "image.tar")
            tags = tags_for(reference)
            done.append(push_image(engine, reference, places, tags, registries, os.environ, today=day))
        first, second, again = done
        assert [each.layers for each in first] == [
            {"sent": 1, "mounted": 0, "there": 0},
            {"sent": 0, "mounted": 1, "there": 0},
        ]
        assert [each.sent_bytes for each in (*second, *again)] == [0] * 4, "only the configuration is another one"
        assert [each.digest for each in second] == [each.digest for each in again]
        assert first[0].tags == ["1.0-cpu-py311-debian12-20261121", "1.0-cpu-debian12"]
        dated, moving = second[0].tags
        assert re.fullmatch(r"1\.0-cpu-py311-debian12-20261121-[0-9a-f]{8}", dated)
        assert again[0].tags == second[0].tags
        place = registries.repository(places[0])
        assert place.descriptor(first[0].tags[0])["digest"] == first[0].digest
        assert place.descriptor(dated)["digest"] == place.descriptor(moving)["digest"] == second[0].digest
        assert first[0].digest != second[0].digest
        with pytest.raises(RegistryError, match=rf"is another image \({first[0].digest}\), and this tag never moves"):
            push_image(engine, reference, places, Tags(fixed=(first[0].tags[0],)), registries, os.environ)
        assert place.descriptor(first[0].tags[0])["digest"] == first[0].digest
    finally:
        engine.remove(reference)


@pytest.mark.parametrize("name", list(ENGINES))
@pytest.mark.usefixtures("logged_in")
def test_a_proof_is_attached_to_what_either_engine_has_pushed(
    name: str, server: RegistryServer, registries: Registries, facts: Facts, tmp_path: Path
) -> None:
    """The configuration that the engine knows an image by is the very one that the registry has."""
    engine = engine_that_answers(name)
    program = busybox()
    if program is None:
        pytest.skip("no busybox: `apt-get install busybox-static`")
    rootfs = make_rootfs(tmp_path / "rootfs", program)
    place = f"{server.host}/team/{name}"
    key = ed25519.Ed25519PrivateKey.generate()
    public = tmp_path / "public.pem"
    public.write_bytes(public_text(key))
    references = [f"trainworks-proof-{uuid.uuid4().hex[:12]}:1.0-cpu-py311-debian12" for _ in range(2)]
    try:
        images = []
        for reference in references:
            context = tmp_path / reference.partition(":")[0]
            context.mkdir()
            (context / "image").write_text(reference)
            write_archive(
                rootfs, context / "base.tar", name=f"{reference}-base", environment={}, command=(), created=CREATED
            )
            engine.load(context / "base.tar")
            (context / "Dockerfile").write_text(f"FROM {reference}-base\nCOPY image /image\n")
            request = BuildRequest(name="image", context=context, tags=(reference,), labels={"same": "labels"})
            images.append(engine.build(request, lambda _event: None))
        push_image(engine, references[0], [place], Tags(moving=("one",)), registries, os.environ)
        pushed = find_pushed(f"{place}:one", registries)
        check_same(pushed, images[0])
        with pytest.raises(ProofError, match=f"is another image .*, not {images[1].identifier}"):
            check_same(pushed, images[1])
        address = (pushed.address, pushed.sha256)
        attach(pushed, tiny_proof(facts, tmp_path / "tree", pushed=address).texts(key))
        assert main(["verify", pushed.address, "--key", str(public)]) == 0
    finally:
        for reference in references:
            engine.remove(reference)
            engine.remove(f"{reference}-base")


def test_an_image_that_is_not_there(registries: Registries) -> None:
    engine = engine_that_answers("docker")
    with pytest.raises(UnknownNameError, match="docker has no image nobody/made-this:1"):
        push_image(engine, "nobody/made-this:1", ["127.0.0.1:1/a"], tags_for("nobody/made-this:1"), registries, {})
