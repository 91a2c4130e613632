"""Reports on images: sizes by component, and differences between two images."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from image.here import Here
from trainworks.engine.protocol import BuiltImage, HistoryEntry
from trainworks.facts.rows import Facts
from trainworks.imagetest import probe_request
from trainworks.imagetest.probe.answers import Request
from trainworks.inspect.image_difference import (
    Change,
    FileChange,
    as_text,
    compare_images,
    find_counted_folder,
)
from trainworks.inspect.inspected_image import ImageFile, InspectedImage, make_inspected_image
from trainworks.inspect.size_report import as_text as size_text
from trainworks.inspect.size_report import make_size_report
from trainworks.inspect.targets import plan_of_target

CPU = "pytorch-2.13.0-cpu-py311-debian12"
PACKAGES = "/opt/venv/lib/python3.11/site-packages"


def image(
    files: dict[str, tuple[int, str]], *, name: str = CPU, layers: int = 0, **python: str
) -> InspectedImage:
    """Return an image of these files (path to bytes and owner) and Python distributions."""
    identity = hashlib.sha256(repr((sorted(files.items()), python, layers)).encode()).hexdigest()
    return InspectedImage(
        image=BuiltImage(
            reference="trainworks/pytorch-training:x",
            identifier=f"sha256:{identity}",
            size=sum(size for size, _ in files.values()) + layers,
            labels={"org.opencontainers.image.title": name},
            environment={"LANG": "C.UTF-8"},
            entry_point=("/opt/trainworks/bin/train",),
            command=("train",),
            created="2026-11-21T07:00:00Z",
        ),
        history=(
            HistoryEntry(created_by="RUN a", size=5),
            HistoryEntry(created_by="ENV A=1", size=0),
        ),
        files={
            path: ImageFile(path=path, size=size, mode=0o644, owner=owner)
            for path, (size, owner) in files.items()
        },
        packages={"libc6": "2.36-9"},
        python=python,
        name=name,
        components={"torch": python.get("torch", "")},
    )


BEFORE = image(
    {
        f"{PACKAGES}/torch/lib/libtorch_cpu.so": (400_000_000, "python torch"),
        f"{PACKAGES}/networkx/graph.py": (2_000_000, "python networkx"),
        "/usr/lib/libc.so.6": (3_000_000, "package libc6"),
        "/opt/trainworks/image.json": (900, ""),
        "/srv/mine": (70, ""),
    },
    torch="2.12.0",
    networkx="3.6.1",
)
AFTER = image(
    {
        f"{PACKAGES}/torch/lib/libtorch_cpu.so": (450_000_000, "python torch"),
        f"{PACKAGES}/sympy/core.py": (9_000_000, "python sympy"),
        "/usr/lib/libc.so.6": (3_000_000, "package libc6"),
        "/opt/trainworks/image.json": (900, ""),
    },
    layers=1_000_000,
    torch="2.13.0",
    sympy="1.14.0",
)


def test_contents_are_files_packages_and_distributions_with_owners(tmp_path: Path) -> None:
    metadata = f"{tmp_path}{PACKAGES}/My_Package-1.0.dist-info"
    Path(metadata).mkdir(parents=True)
    Path(metadata, "METADATA").write_text("Name: My_Package\n")
    Path(metadata, "RECORD").write_text(
        "my/code.py,,\nmy/twin.py,,\nMy_Package-1.0.dist-info/METADATA,,\n"
    )
    code = tmp_path / PACKAGES.lstrip("/") / "my"
    (code / "__pycache__").mkdir(parents=True)
    (code / "code.py").write_text("print()\n")
    os.link(code / "code.py", code / "twin.py")
    (code / "__pycache__" / "code.cpython-311.pyc").write_bytes(b"123")
    database = tmp_path / "var/lib/dpkg"
    (database / "info").mkdir(parents=True)
    (database / "info" / "libc6:amd64.list").write_text("/usr/lib/libc.so.6\n")
    (database / "status").write_text(
        "Package: libc6\nStatus: install ok installed\nVersion: 2.36-9\n\n"
        "Package: gone\nStatus: deinstall ok config-files\nVersion: 1\n"
    )
    (tmp_path / "usr/lib").mkdir(parents=True)
    (tmp_path / "usr/lib/libc.so.6").symlink_to("libc-2.36.so")
    (tmp_path / "opt/trainworks").mkdir()
    (tmp_path / "opt/trainworks/image.json").write_text('{"name": "x"}')
    request: Request = {"root": str(tmp_path), "contents": "digests"}
    contents = probe_request.ask(Here(), request, interpreter=sys.executable)["contents"]
    assert dict(contents["packages"]) == {"libc6": "2.36-9"}
    assert dict(contents["python"]) == {"my-package": "1.0"}
    assert json.loads(contents["manifest"]) == {"name": "x"}
    files = {path: (size, file, owner) for path, size, _, file, owner in contents["files"]}
    digest = hashlib.sha256(b"print()\n").hexdigest()
    assert files[f"{PACKAGES}/my/code.py"] == (8, digest, "python my-package")
    assert files[f"{PACKAGES}/my/twin.py"] == (
        0,
        digest,
        "python my-package",
    ), "the same bytes, counted once"
    assert files[f"{PACKAGES}/my/__pycache__/code.cpython-311.pyc"][2] == "python my-package"
    assert files["/usr/lib/libc.so.6"] == (0, "-> libc-2.36.so", "package libc6")
    assert files["/opt/trainworks/image.json"][2] == ""


# --- size -----------------------------------------------------------------------------------------


def test_a_debian_package_belongs_to_the_component_that_asks_for_it(facts: Facts) -> None:
    """Count a package that only other packages or the system need as the system's."""
    plan = plan_of_target(CPU, facts)
    assert plan is not None
    compiler = next(step for step in plan.steps if step.component == "compiler")
    owners = {
        f"/usr/lib/{name}": f"package {name}"
        for name in (*compiler.debian, "libgcc-12-dev", "perl-base")
    }
    files = {
        path: ImageFile(path=path, size=1, mode=0o644, owner=owner)
        for path, owner in owners.items()
    }
    report = make_size_report(replace(AFTER, files=files), plan, facts)
    sizes = {part.component: part.size for part in report.parts}
    assert sizes == {"compiler": len(compiler.debian), "system": 2}


def test_files_belong_to_the_component_that_their_package_came_with(facts: Facts) -> None:
    report = make_size_report(AFTER, plan_of_target(CPU, facts), facts)
    sizes = {part.component: part.size for part in report.parts}
    assert sizes == {"torch": 459_000_000, "system": 3_000_000, "manifest": 900}
    assert report.overwritten == 1_000_000
    assert sum(sizes.values()) + report.overwritten == report.size
    assert report.budget == 1_900_000_000
    text = size_text(report)
    assert "24% of its 1.90 GB" in text
    assert "450 MB  python torch 2.13.0 (torch)" in text


def test_the_sizes_of_components_make_one_bar(facts: Facts) -> None:
    sizes = {"torch": (500_000_000, "python torch"), "networkx": (200_000_000, "python networkx")}
    files = {f"{PACKAGES}/{name}/all.so": size for name, size in sizes.items()}
    shown = image({**files, "/srv/mine": (1_000_000, "")}, layers=99_000_000, torch="2.13.0")
    lines = size_text(make_size_report(shown, None, facts)).splitlines()[2:5]
    assert lines == [
        f"  other Python distributions              700 MB   87.5%       2 files  {'#' * 35}",
        f"  other files                               1 MB    0.1%       1 files  {' ' * 35}.",
        f"  replaced or removed by a later layer     99 MB  {' ' * 57}#####",
    ]


def test_of_a_foreign_image_packages_are_known_and_no_budget(facts: Facts) -> None:
    assert plan_of_target("somebody-elses", facts) is None
    report = make_size_report(BEFORE, None, facts)
    assert {part.component for part in report.parts} == {
        *("Debian packages", "other Python distributions", "other files"),
    }
    assert "of its" not in size_text(report)


def test_a_difference_has_packages_files_and_settings() -> None:
    changed = replace(AFTER.image, environment={"LANG": "C", "NEW": "1"}, entry_point=("/bin/sh",))
    difference = compare_images(
        BEFORE, replace(AFTER, image=changed, packages={"libc6": "2.36-9", "curl": "8"})
    )
    assert difference.components == (Change(name="torch", before="2.12.0", after="2.13.0"),)
    assert difference.python == (
        Change(name="networkx", before="3.6.1", after=None),
        Change(name="sympy", before=None, after="1.14.0"),
        Change(name="torch", before="2.12.0", after="2.13.0"),
    )
    assert difference.packages == (Change(name="curl", before=None, after="8"),)
    assert [change.name for change in difference.environment] == ["LANG", "NEW"]
    assert [change.name for change in difference.settings] == ["entry point"]
    assert [file.path for file in difference.files if file.after is None] == [
        f"{PACKAGES}/networkx/graph.py",
        "/srv/mine",
    ]
    assert difference.folders[0].folder == f"{PACKAGES}/torch"
    text = as_text(difference)
    for expected in (
        "Python packages: 1 added, 1 removed, 1 changed",
        "~ torch 2.12.0 -> 2.13.0",
        "+ curl 8",
        "~ entry point /opt/trainworks/bin/train -> /bin/sh",
        "files: 1 added, 2 removed, 1 changed",
    ):
        assert expected in text


FILES = st.dictionaries(
    st.sampled_from(["/a", "/etc/b", f"{PACKAGES}/torch/c.py"]),
    st.tuples(st.integers(0, 9), st.just("")),
    max_size=3,
)


@given(FILES, FILES)
def test_a_difference_is_nothing_of_an_image_to_itself_and_mirrors(
    left: dict[str, tuple[int, str]], right: dict[str, tuple[int, str]]
) -> None:
    before, after = image(left), image(right)
    assert as_text(compare_images(before, before)).endswith("no differences\n")
    there, back = compare_images(before, after), compare_images(after, before)
    assert back.files == tuple(
        FileChange(path=row.path, before=row.after, after=row.before) for row in there.files
    )
    assert sum(folder.growth for folder in there.folders) == after.image.size - before.image.size


def test_a_change_of_rights_or_of_content_is_a_change() -> None:
    files = {"/a": ImageFile(path="/a", size=1, mode=0o644, content="x")}
    for other in (replace(files["/a"], mode=0o755), replace(files["/a"], content="y")):
        difference = compare_images(
            replace(BEFORE, files=files), replace(BEFORE, files={"/a": other})
        )
        assert difference.files == (FileChange(path="/a", before=1, after=1),)


@pytest.mark.parametrize(
    ("path", "folder"),
    [
        (f"{PACKAGES}/torch/lib/x.so", f"{PACKAGES}/torch"),
        (f"{PACKAGES}/six.py", "/opt/venv/lib"),
        ("/usr/share/doc/libc6/copyright", "/usr/share/doc"),
        ("/etc/passwd", "/etc"),
        ("/vmlinuz", "/"),
    ],
)
def test_files_are_counted_by_folder(path: str, folder: str) -> None:
    assert find_counted_folder(path) == folder


def test_the_target_of_an_image_is_the_name_in_its_manifest(facts: Facts) -> None:
    manifest = {"name": CPU, "components": {"torch": {"version": "2.13.0"}}}
    contents = {
        "manifest": json.dumps(manifest),
        "python": [["numpy", "2.1.0"], ["numpy", "2.2.0"], ["torch", "2.13.0"]],
        "packages": [["libc6", "2.36-9"]],
        "files": [["/srv/mine", 70, 0o644, "", ""], ["/etc/hostname", 9, 0o644, "", ""]],
    }
    read = make_inspected_image(AFTER.image, AFTER.history, contents, facts)
    assert read.name == CPU
    assert read.components == {"torch": "2.13.0"}
    assert read.python == {"numpy": "2.1.0, 2.2.0", "torch": "2.13.0"}
    assert list(read.files) == ["/srv/mine"], "an engine adds /etc/hostname to each container"
