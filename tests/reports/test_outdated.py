"""What `build.py outdated` says of apt's answer; `tests/image/test_outdated.py` asks a real one."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from trainworks.assemble.outdated import CHANGE, days_since, installed_distributions
from trainworks.engine.protocol import BuiltImage
from trainworks.engine.tree import ImageTree, TreeMember
from trainworks.plan.model import IMAGE_TIME

SIMULATED = """\
Inst libssl3 [3.0.11-1~deb12u1] (3.0.11-1~deb12u2 Debian:12.4/oldstable, Debian-Security:12/oldstable-security [amd64])
Inst base-files [12.4+deb12u4] (12.4+deb12u12 Debian:12.12/oldstable [amd64]) []
Inst libnew (1.0 Debian-Security:12/oldstable-security [all])
Remv libold [2.0]
Conf libssl3 (3.0.11-1~deb12u2 Debian:12.4/oldstable, Debian-Security:12/oldstable-security [amd64])
"""


def test_a_simulated_upgrade_names_packages_versions_and_suites() -> None:
    rows = [(row["name"], row["installed"], row["update"]) for row in CHANGE.finditer(SIMULATED)]
    assert rows == [
        ("libssl3", "3.0.11-1~deb12u1", "3.0.11-1~deb12u2"),
        ("base-files", "12.4+deb12u4", "12.4+deb12u12"),
        ("libnew", None, "1.0"),
    ]
    assert ["-security" in row["suites"] for row in CHANGE.finditer(SIMULATED)] == [True, False, True]


def test_the_days_since_a_build_are_those_of_its_creation_time() -> None:
    yesterday = datetime.now(UTC) - timedelta(days=1, hours=2)
    assert days_since(f"{yesterday:%Y-%m-%dT%H:%M:%S}.123456789Z") == 1
    assert days_since(f"{yesterday:%Y-%m-%dT%H:%M:%S}Z") == 1
    assert days_since("") is None
    constant = datetime.fromtimestamp(IMAGE_TIME, UTC)
    assert days_since(f"{constant:%Y-%m-%dT%H:%M:%S}Z") is None


def tree_of_files(*files: str, links: dict[str, str] | None = None, **contents: str) -> ImageTree:
    tree = ImageTree()
    for path in (*files, *(links or {})):
        folder = path
        while folder := folder.rpartition("/")[0]:
            tree.members.setdefault(folder, TreeMember(kind="folder", mode=0o755, owner=0))
        target = (links or {}).get(path, "")
        tree.members[path] = TreeMember(kind="link" if target else "file", mode=0o755, owner=0, target=target)
    tree.contents = {path: contents["venv"].encode() for path in files if path.endswith("pyvenv.cfg")}
    return tree


IMAGE = BuiltImage(
    reference="x", identifier="sha256:0", size=0, labels={}, environment={"PATH": "/opt/venv/bin:/usr/bin"}
)
VENV = "/opt/venv/lib/python3.11/site-packages"


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ("include-system-site-packages = false\n", {"a": "1.0+cpu", "b-c": "2"}),
        ("include-system-site-packages = true\n", {"a": "1.0+cpu", "b-c": "2", "system": "3"}),
    ],
)
def test_the_distributions_of_the_python_on_path_are_read(settings: str, found: dict[str, str]) -> None:
    tree = tree_of_files(
        "/opt/venv/pyvenv.cfg",
        "/usr/bin/python3.11",
        f"{VENV}/a-1.0+cpu.dist-info/METADATA",
        f"{VENV}/b_c-2.dist-info/METADATA",
        f"{VENV}/bad-no\x1bversion.dist-info/METADATA",
        f"{VENV}/deep/inside-1.dist-info/METADATA",
        "/usr/lib/python3/dist-packages/system-3.egg-info",
        "/usr/lib/python3/dist-packages/a-0.1.egg-info",
        "/opt/other/lib/python3.11/site-packages/other-1.dist-info/METADATA",
        links={"/opt/venv/bin/python": "python3", "/opt/venv/bin/python3": "../../../usr/bin/python3.11"},
        venv=settings,
    )
    for path in [path for path in tree.members if path.endswith(".dist-info")]:
        assert tree.kind(path) == "folder"
    assert installed_distributions(tree, IMAGE) == ("3.11", found)


def test_an_image_without_python_has_no_distributions() -> None:
    assert installed_distributions(tree_of_files("/usr/bin/sh", venv=""), IMAGE) == ("", {})
