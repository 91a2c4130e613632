"""Test how build steps install the distribution's packages: several at once, from one cache, none
waits for another.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from image.support import ROOT, BuiltByCommand
from trainworks.facts.load import load
from trainworks.host.settings import read_host_settings
from trainworks.plan.model import Request
from trainworks.plan.resolve import make_plan

pytestmark = pytest.mark.engine

SMALL = "hello"
"""A package that needs nothing else, and that no image of ours has."""


class Steps:
    """Runs `install-packages` as a build step does: in a fresh container of the
    base image, with the shared cache.
    """

    def __init__(self, program: str, folder: Path) -> None:
        """Take the client and a folder for the cache, the settings and the pipes."""
        plan = make_plan(Request(framework="pytorch", cuda="cpu"), load(ROOT))
        self.cache = folder / "cache"
        self.pipes = folder / "pipes"
        settings = folder / "settings"
        for new_folder in (self.cache, self.pipes, settings):
            new_folder.mkdir()
        for name, content in read_host_settings(os.environ).secrets(plan.base.suite, "").items():
            (settings / name).write_bytes(content)
        mounts = {
            self.cache: "/var/cache/apt",
            self.pipes: "/pipes",
            settings: "/run/secrets",
            ROOT / "templates" / "files" / "system": "/mnt",
        }
        self.command = (
            *(program, "run", "--rm", "--network", "host"),
            *(
                word
                for source, target in mounts.items()
                for word in ("--volume", f"{source}:{target}")
            ),
            *(plan.image, "sh", "/mnt/install-packages"),
        )

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start a step."""
        return subprocess.Popen(
            (*self.command, *words), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a step to its end."""
        return subprocess.run(
            (*self.command, *words),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=300,
        )


@pytest.fixture
def steps(docker_image: BuiltByCommand, tmp_path: Path) -> Iterator[Steps]:
    """Give steps with an empty cache; the base image is there because the real image was built."""
    yield Steps(docker_image.engine.probe().program, tmp_path)
    # Files in it are root's, and some are read-only for others.
    shutil.rmtree(tmp_path / "cache")


@pytest.fixture(scope="module")
def downloaded(
    docker_image: BuiltByCommand, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """Give a cache into which one step has downloaded; tests spoil copies of it."""
    first = Steps(docker_image.engine.probe().program, tmp_path_factory.mktemp("downloaded"))
    done = first.run(SMALL)
    assert done.returncode == 0, done.stdout
    yield first.cache
    shutil.rmtree(first.cache)


def test_a_step_that_unpacks_keeps_no_other_waiting(steps: Steps) -> None:
    for name in ("inside", "go-on"):
        os.mkfifo(steps.pipes / name)
    slow = steps.start("--run", "sh", "-c", "echo > /pipes/inside; cat /pipes/go-on")
    try:
        (steps.pipes / "inside").read_text()
        assert slow.poll() is None
        done = steps.run(SMALL)
        assert done.returncode == 0, done.stdout
        assert slow.poll() is None
        (steps.pipes / "go-on").write_text("gone on\n")
        output, _ = slow.communicate(timeout=300)
    finally:
        slow.kill()
        slow.wait()
    assert slow.returncode == 0, output
    assert "gone on" in output


def test_what_was_downloaded_once_is_not_downloaded_again(steps: Steps) -> None:
    first = steps.run(SMALL)
    assert first.returncode == 0, first.stdout
    assert re.search(r"Need to get [1-9]", first.stdout)
    second = steps.run(SMALL)
    assert second.returncode == 0, second.stdout
    assert re.search(r"Need to get 0 B", second.stdout)
    assert not re.search(r"^Get:\d+ .* Packages ", second.stdout, re.MULTILINE)


def test_a_step_that_fails_leaves_what_it_downloaded_and_nothing_half_done(steps: Steps) -> None:
    failed = steps.run(
        "--run", "sh", "-c", f"apt-get install --yes --download-only {SMALL} && exit 9"
    )
    assert failed.returncode == 9, failed.stdout
    assert {path.name for path in (steps.cache / "trainworks").iterdir()} == {
        "lists.tar",
        "packages",
    }
    assert [
        path.name.split("_")[0] for path in (steps.cache / "trainworks" / "packages").iterdir()
    ] == [SMALL]
    again = steps.run(SMALL)
    assert again.returncode == 0, again.stdout
    assert "Need to get 0 B" in again.stdout


def test_an_unknown_package_ends_the_step(steps: Steps) -> None:
    failed = steps.run("no-such-package-anywhere")
    assert failed.returncode == 100, failed.stdout
    assert "Unable to locate package no-such-package-anywhere" in failed.stdout


def fill(steps: Steps, downloaded: Path) -> tuple[Path, Path]:
    """Fill the cache with a copy; return the lists and the one package that are in it."""
    subprocess.run(("cp", "--archive", f"{downloaded}/.", str(steps.cache)), check=True)
    (package,) = (steps.cache / "trainworks" / "packages").iterdir()
    return steps.cache / "trainworks" / "lists.tar", package


def spoil_inside(archive: Path) -> None:
    """Put zeros over the lists inside, as a disk does that lost its power: the
    archive itself can be unpacked.
    """
    content = bytearray(archive.read_bytes())
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            if member.name.endswith(("_Packages", ".bin")):
                content[member.offset_data : member.offset_data + member.size] = bytes(member.size)
    archive.write_bytes(content)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda lists: lists.write_bytes(b""),
        lambda lists: os.truncate(lists, 100_000),
        lambda lists: lists.write_bytes(b"no archive at all\n" * 1000),
        spoil_inside,
    ],
    ids=["empty", "truncated", "something else", "zeros inside"],
)
def test_spoiled_lists_are_downloaded_again(
    steps: Steps, downloaded: Path, spoil: Callable[[Path], None]
) -> None:
    lists, _ = fill(steps, downloaded)
    spoil(lists)
    healed = steps.run(SMALL)
    assert healed.returncode == 0, healed.stdout
    assert (
        "install-packages: the cached lists are spoiled, and are downloaded again" in healed.stdout
    )
    after = steps.run(SMALL)
    assert after.returncode == 0, after.stdout
    assert "spoiled" not in after.stdout
    assert not re.search(r"^Get:\d+ .* Packages ", after.stdout, re.MULTILINE), (
        "the cache has the lists again"
    )


@pytest.mark.parametrize(
    "spoil",
    [
        lambda package: os.truncate(package, package.stat().st_size // 2),
        lambda package: package.write_bytes(b""),
        lambda package: package.write_bytes(bytes(package.stat().st_size)),
    ],
    ids=["half", "empty", "zeros"],
)
def test_a_spoiled_package_is_downloaded_again(
    steps: Steps, downloaded: Path, spoil: Callable[[Path], None]
) -> None:
    _, package = fill(steps, downloaded)
    content = package.read_bytes()
    spoil(package)
    healed = steps.run(SMALL)
    assert healed.returncode == 0, healed.stdout
    assert (
        f"install-packages: {package.name} in the cache is spoiled, and is downloaded again"
        in healed.stdout
    )
    assert package.read_bytes() == content
    assert "Need to get 0 B" in steps.run(SMALL).stdout
