"""Reports on the real `cpu` image and on one made from it by steps of which
every effect is known.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from documented import promised
from image.support import ROOT, BuiltByCommand, build_once
from trainworks.engine.protocol import BuildRequest

pytestmark = pytest.mark.engine

CHANGED = "trainworks-test/reports:changed"

DOCKERFILE = """\
FROM {base}
RUN /opt/venv/bin/python -B -m pip uninstall --yes networkx
RUN dpkg --purge --force-depends media-types
RUN mkdir /srv/new && head -c 3000000 /dev/zero > /srv/new/zeros && chmod 600 /etc/profile
ENV NEW_VARIABLE=1
LABEL maker=tests
ENTRYPOINT ["/bin/sh"]
"""


def command(cache: Path, *words: str) -> str:
    done = subprocess.run(
        (sys.executable, str(ROOT / "build.py"), *words),
        cwd=ROOT,
        env={
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(cache),
            "XDG_CACHE_HOME": str(cache),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def image(shared: Path) -> BuiltByCommand:
    """Give the `cpu` image of Docker."""
    return build_once(shared, "docker")


@pytest.fixture(scope="module")
def base(image: BuiltByCommand) -> str:
    """Give the reference of that image."""
    return image.reference


@pytest.fixture(scope="module")
def changed(image: BuiltByCommand, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Give an image of known changes."""
    folder = tmp_path_factory.mktemp("context")
    (folder / "Dockerfile").write_text(DOCKERFILE.format(base=image.reference))
    engine = image.engine
    engine.build(BuildRequest(name="changed", context=folder, tags=(CHANGED,)), lambda _event: None)
    try:
        yield CHANGED
    finally:
        engine.remove(CHANGED)


def test_a_difference_between_real_images_is_what_was_done(
    base: str, changed: str, tmp_path: Path
) -> None:
    difference: dict[str, Any] = json.loads(
        command(tmp_path, "diff", base, changed, "--format", "json")
    )
    assert set(difference) == promised("diff")
    assert [(row["name"], row["after"]) for row in difference["python"]] == [("networkx", None)]
    assert [(row["name"], row["after"]) for row in difference["packages"]] == [
        ("media-types", None)
    ]
    assert difference["components"] == []
    assert [(row["name"], row["before"], row["after"]) for row in difference["environment"]] == [
        ("NEW_VARIABLE", None, "1")
    ]
    assert {row["name"] for row in difference["labels"]} == {"maker"}
    assert [(row["name"], row["after"]) for row in difference["settings"]] == [
        ("arguments", ""),
        ("entry point", "/bin/sh"),
    ]
    files = {row["path"]: (row["before"], row["after"]) for row in difference["files"]}
    assert files["/srv/new/zeros"] == (None, 3_000_000)
    size, now = files["/etc/profile"]
    assert size == now, "only its mode is another"
    outside = {
        path
        for path in files
        if not path.startswith(("/opt/venv/", "/srv/new/", "/var/", "/usr/share/"))
    }
    assert outside <= {"/etc/profile", "/etc/mime.types"}
    growth = {row["folder"]: row["growth"] for row in difference["folders"]}
    assert growth["/srv/new"] == 3_000_000
    assert -8_000_000 < growth["/opt/venv/lib/python3.11/site-packages/networkx"] < -3_000_000, (
        "with its bytecode, if any"
    )
    assert len(difference["layers"]) == 2


def test_a_size_report_adds_up(base: str, tmp_path: Path) -> None:
    report: dict[str, Any] = json.loads(command(tmp_path, "report", base, "--format", "json"))
    assert set(report) == promised("report")
    parts = {part["component"]: part["size"] for part in report["parts"]}
    # Layers and files are counted by two programs. A layer writes files a second time that it
    # changes: the layer of packages has the updates of the base's packages (docs/adr/0095).
    assert report["overwritten"] < report["size"] / 20
    assert parts["torch"] > parts["sagemaker-training"] > parts["open-mpi"] > 0
    assert parts.get("other files", 0) == 0, "every byte of an image has an owner"
