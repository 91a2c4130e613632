"""A target with vendor sources, for real: METIS compiled by the vendors' recipe, from a mirror."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from image.efa_installer import make_installer
from image.support import BuiltByCommand, engine_that_answers
from image.vendor import (
    METIS,
    TARGET,
    artifact,
    build,
    build_once,
    fetch_sources,
    fill,
    make_checkout,
)
from lock.servers import Answer, Server, dropping, failing, files_of, serving, trickling, whole_file
from trainworks.engine.protocol import Job
from trainworks.errors import BuildError
from trainworks.facts.load import load
from trainworks.plan.model import Request
from trainworks.plan.resolve import make_plan
from trainworks_testing.clock import PATIENCE

pytestmark = pytest.mark.engine


@pytest.fixture(scope="session")
def mirror(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder for everything that the target downloads; the sources are there."""
    folder = tmp_path_factory.mktemp("mirror")
    fetch_sources(folder)
    return folder


@pytest.fixture(scope="session")
def installer(mirror: Path) -> str:
    """Give the hash of the installer, which is in the mirror then."""
    return make_installer(mirror)


@pytest.fixture(scope="session")
def checkout(mirror: Path, installer: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a checkout that has the target; the mirror is full then."""
    root = make_checkout(tmp_path_factory.mktemp("vendor"), installer)
    fill(root, mirror)
    return root


@pytest.fixture(scope="session")
def vendor_image(checkout: Path, mirror: Path) -> BuiltByCommand:
    """Give the image, as Docker built it from the served mirror."""
    return build_once(checkout, mirror, "docker")


def test_every_promise_is_kept(vendor_image: BuiltByCommand, checkout: Path) -> None:
    plan = make_plan(Request(framework="pytorch", cuda="cpu", sources="vendor"), load(checkout))
    checks = vendor_image.report["checks"]
    assert [check["title"] for check in checks if not check["passed"]] == []
    assert len(checks) == len(set(plan.checks))
    assert plan.target.name == TARGET
    assert {step.component: step.version for step in plan.steps}["metis"] == METIS.version


def test_what_only_builds_is_not_in_the_image(vendor_image: BuiltByCommand) -> None:
    done = vendor_image.engine.run(
        vendor_image.reference, Job(command=("ls", "/opt", "/opt/amazon"), timeout=300)
    )
    assert done.status == 0
    assert set(done.output.split()) == {
        *("/opt:", "amazon", "metis", "ml", "trainworks", "venv"),
        *("/opt/amazon:", "efa", "efa_installed_packages"),
    }


def test_an_installer_leaves_what_it_installed_and_nothing_else(
    vendor_image: BuiltByCommand,
) -> None:
    script = (
        "find / -xdev -name '*efa*installer.sh';"
        " dpkg-query -W -f '${Package} ${Status}\\n' efa-test libfabric1"
    )
    done = vendor_image.engine.run(
        vendor_image.reference, Job(command=("sh", "-c", script), timeout=300)
    )
    assert done.output == "efa-test install ok installed\nlibfabric1 install ok installed\n"


def test_buildah_builds_from_a_folder(checkout: Path, mirror: Path) -> None:
    """Build with no server and no index: everything that is downloaded lies in the folder.

    Docker's image shows the promises.
    """
    engine = engine_that_answers("buildah")
    done = build(checkout, "buildah", "--mirror", str(mirror), "--offline", "--until", "build")
    assert done.returncode == 0, done.stderr[-6000:]
    tag, *_ = json.loads(done.stdout)["tags"]
    result = engine.run(
        tag, Job(command=("find", "/opt/metis", "-name", "libmetis.*"), timeout=PATIENCE)
    )
    assert result.output.startswith("/opt/metis/"), result.output


@pytest.fixture
def spoiling_server(mirror: Path) -> Iterator[Server]:
    """Give a server of the whole mirror, in which a test spoils METIS: an
    engine may have forgotten any other step.
    """
    with serving() as server:
        server.serve("/", files_of(mirror))
        yield server


WRONG = "f" * 64


# With vendor_image the mirror is full, and most steps are in the engine's cache.
@pytest.mark.usefixtures("vendor_image")
@pytest.mark.parametrize(
    ("answer", "expected_message"),
    [
        pytest.param(
            lambda _, content: whole_file(content[:-1] + b"?"),
            "is not what was pinned",
            id="one wrong byte",
        ),
        pytest.param(
            lambda _, content: whole_file(content[:1000]), "is not what was pinned", id="truncated"
        ),
        pytest.param(
            lambda _, content: dropping(content, 1000),
            "cannot download ",
            id="broken off again and again",
        ),
        pytest.param(lambda *_: failing(404), "answers HTTP 404", id="not there"),
        pytest.param(
            lambda server, content: trickling(server, content), "cannot download ", id="too slow"
        ),
    ],
)
def test_what_a_mirror_spoils_is_refused_by_name(
    mirror: Path,
    installer: str,
    spoiling_server: Server,
    answer: Callable[[Server, bytes], Answer],
    expected_message: str,
    tmp_path: Path,
) -> None:
    # Its list has an address that no cache knows, so the step is run and not remembered.
    row = artifact(METIS, url=f"{METIS.url.rpartition('/')[0]}/{uuid.uuid4().hex}/{METIS.file}")
    root = make_checkout(tmp_path / "checkout", installer, {"metis": row})
    spoiling_server.serve(
        f"/{METIS.file}", answer(spoiling_server, (mirror / METIS.file).read_bytes())
    )
    arguments = ("--mirror", spoiling_server.url, "--offline", "--until", "build")
    done = build(root, "docker", *arguments, PIP_DEFAULT_TIMEOUT="1")
    assert done.returncode == BuildError.exit_status, done.stderr[-3000:]
    message = json.loads(done.stdout)["message"]
    assert "failed in component metis" in message.splitlines()[0], message
    (error,) = [line for line in message.splitlines() if f"error: metis {METIS.version}: " in line]
    assert f"{spoiling_server.url}/{METIS.file} " in error
    assert expected_message in error, message


@pytest.mark.usefixtures("vendor_image")
def test_a_hash_that_the_row_has_wrong_is_refused_by_name(
    mirror: Path, installer: str, spoiling_server: Server, tmp_path: Path
) -> None:
    root = make_checkout(tmp_path / "checkout", installer, {"metis": artifact(METIS, sha256=WRONG)})
    spoiling_server.serve(f"/{METIS.file}", (mirror / METIS.file).read_bytes())
    done = build(root, "docker", "--mirror", spoiling_server.url, "--offline", "--until", "build")
    assert done.returncode == BuildError.exit_status, done.stderr[-3000:]
    message = json.loads(done.stdout)["message"]
    assert f"error: metis {METIS.version}: " in message
    assert (
        f"expected sha256 {WRONG}, {METIS.size} bytes; found {METIS.sha256}, {METIS.size} bytes"
        in message
    )
    assert "not unpacked" in message
