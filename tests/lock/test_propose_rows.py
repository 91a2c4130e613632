"""``tools/propose_rows.py`` against a package index of the test's own: what it prints can be added as it is."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from lock.servers import Request, Server
from trainworks.facts.load import load
from trainworks.facts.rows import Facts
from trainworks.plan.shares import python_patterns


def wheel(name: str, version: str, requires: tuple[str, ...] = ()) -> bytes:
    """Return a wheel without code."""
    stem = f"{name.replace('-', '_')}-{version}.dist-info"
    lines = [f"Requires-Dist: {line}" for line in requires]
    files = {
        f"{stem}/METADATA": "\n".join(["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *lines, ""]),
        f"{stem}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = [
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b'=').decode()},"
        for path, text in files.items()
    ]
    files[f"{stem}/RECORD"] = "\n".join([*record, f"{stem}/RECORD,,", ""])
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return content.getvalue()


class Index:
    """A package index with the versions that the rows have, and nothing newer."""

    def __init__(self, server: Server, facts: Facts) -> None:
        self._server = server
        self._links: dict[str, list[str]] = {}
        for row in facts.targets:
            stack, cuda = facts.stack_by_name[row.stack], facts.cuda_by_name[row.cuda]
            versions = {**stack.components, **row.versions}
            for component in facts.components:
                fits = component.fits(row.framework, stack.sources, cuda, row.base)
                for number, name in enumerate(python_patterns(component, cuda) if fits else ()):
                    if "*" not in name and name != "torch" and name not in self._links:
                        self.add(name, versions.get(component.name, "1.0") if number == 0 else "1.0")
            if "cuda" in row.versions:
                self.add_torch(row.version, row.versions["cuda"])
            else:
                self.add("torch", row.versions["torch"])

    @property
    def url(self) -> str:
        return f"{self._server.url}/simple"

    def add(self, name: str, version: str, *requires: str) -> None:
        file = f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
        content = wheel(name, version, requires)
        address = self._server.serve(f"/files/{file}", content)
        self._links.setdefault(name, []).append(
            f'<a href="{address}#sha256={hashlib.sha256(content).hexdigest()}">{file}</a>'
        )
        page = f"<!DOCTYPE html><html><body>{''.join(self._links[name])}</body></html>"

        def answer(request: Request) -> None:
            request.send_response(200)
            request.send_header("Content-Type", "text/html")
            request.end_headers()
            request.wfile.write(page.encode())

        self._server.serve(f"/simple/{name}/", answer)

    def add_torch(self, version: str, runtime: str) -> None:
        """Add a torch for this version of the CUDA runtime."""
        major = runtime.partition(".")[0]
        requires = (
            ("nvidia-cuda-runtime", runtime),
            (f"nvidia-cudnn-cu{major}", "90.1"),
            (f"nvidia-nccl-cu{major}", "90.2"),
        )
        for name, required in requires:
            self.add(name, required)
        self.add("torch", version, *(f"{name}=={required}" for name, required in requires))


@pytest.fixture(params=[("debian12", (True,))], ids=["cuda"])
def one_row(checkout: Path, request: pytest.FixtureRequest) -> Path:
    """Give a checkout with few targets, one by default: the newest PyTorch for a base, with CUDA, without, or both."""
    facts = load(checkout)
    base, kinds = request.param
    path = checkout / "images" / "pytorch.toml"
    head, *blocks = path.read_text(encoding="utf-8").split("[[target]]")
    for with_cuda in kinds:
        rows = [
            row
            for row in facts.targets
            if (row.framework, row.base, facts.sources_of(row)) == ("pytorch", base, "packages")
            and (row.cuda != "cpu") == with_cuda
        ]
        newest = max(rows, key=lambda row: Version(row.version))
        keys = [f'{key} = "{getattr(newest, key)}"\n' for key in ("version", "cuda", "base", "stack")]
        (block,) = [block for block in blocks if all(key in block for key in keys)]
        head += f"[[target]]{block.partition('#')[0]}"
    path.write_text(head, encoding="utf-8")
    for name in {row.framework for row in facts.targets} - {"pytorch"}:
        (checkout / "images" / f"{name}.toml").unlink()
    (checkout / "images" / "built.toml").write_text("# None.\n", encoding="utf-8")
    shutil.rmtree(checkout / "images" / "lock")
    return checkout


@pytest.fixture
def index(plain_server: Server, one_row: Path) -> Index:
    return Index(plain_server, load(one_row))


@dataclass(frozen=True, kw_only=True)
class Proposed:
    status: int
    rows: dict[str, Any]
    text: str
    err: str


@pytest.fixture
def propose(root: Path, one_row: Path) -> Callable[[str], Proposed]:
    """Run the tool with this index, and read what it prints."""

    def run(url: str) -> Proposed:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
        environment |= {"PIP_CONFIG_FILE": "/dev/null", "PIP_INDEX_URL": url, "UV_NO_CACHE": "1"}
        # Git asks folders of this machine, and no server.
        environment |= {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_VALUE_0": "https://"}
        environment["GIT_CONFIG_KEY_0"] = f"url.file://{one_row}/repositories/.insteadOf"
        command = (sys.executable, str(root / "tools" / "propose_rows.py"), "--root", str(one_row))
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
        return Proposed(status=done.returncode, rows=tomllib.loads(done.stdout), text=done.stdout, err=done.stderr)

    return run


Propose = Callable[[str], Proposed]


def test_nothing_is_proposed_where_the_rows_are_the_newest(propose: Propose, index: Index) -> None:
    proposed = propose(index.url)
    assert proposed.err == ""
    assert (proposed.status, proposed.rows) == (0, {})
    assert proposed.text.endswith("# Nothing is newer than the rows.\n")


def test_the_rows_of_a_newer_version_are_added_as_they_are(propose: Propose, index: Index, one_row: Path) -> None:
    (old,) = load(one_row).targets
    index.add_torch("99.1.0", "13.9.45")
    index.add("mpi4py", "98.0")
    proposed = propose(index.url)
    assert (proposed.status, proposed.err) == (0, "")
    (cuda,), (stack,), (target,) = (proposed.rows[name] for name in ("cuda", "stack", "target"))
    assert (cuda["name"], cuda["version"], cuda["wheel_suffix"]) == ("cu139", "13.9", "cu13")
    assert stack["components"]["mpi4py"] == "98.0"
    assert stack["components"] | {"mpi4py": ""} == {**load(one_row).stack_by_name[old.stack].components, "mpi4py": ""}
    versions = {"torch": "99.1.0", "cuda": "13.9.45", "cudnn": "90.1", "nccl": "90.2"}
    # That of nvcc depends on the CUDA, which was not known before.
    assert target["versions"] | {"nvcc": "?"} == {**old.versions, **versions, "nvcc": "?"}
    assert "add the version for cu139 of: nvcc" in proposed.text
    assert (target["version"], target["cuda"], target["stack"]) == ("99.1.0", "cu139", stack["name"])
    assert "torch 99.1.0 wheel" in target["source"]
    # Each part stands below the name of its file.
    files = re.split(r"^# (images/[a-z]+\.toml)$", proposed.text, flags=re.MULTILINE)[1:]
    for name, rows in zip(files[::2], files[1::2], strict=True):
        with (one_row / name).open("a", encoding="utf-8") as file:
            file.write(rows)
    assert [row.version for row in load(one_row).targets] == [old.version, "99.1.0"]


def test_what_the_index_does_not_know_of_a_new_cuda_is_left_to_the_reviewer(propose: Propose, index: Index) -> None:
    index.add_torch("99.1.0", "77.0.1")
    (cuda,) = propose(index.url).rows["cuda"]
    assert (cuda["name"], cuda["minimum_driver"], cuda["architectures"]) == ("cu770", "?", ["?"])
    assert "CUDA runtime 77.0.1, required by the torch 99.1.0 wheel" in cuda["source"]


@pytest.mark.parametrize("one_row", [("debian12-arm64", (False,))], ids=["cpu"], indirect=True)
def test_a_wheel_for_cuda_is_not_proposed_for_a_cell_without_it(propose: Propose, index: Index) -> None:
    """From 2.11 on the index's torch for ARM asks for CUDA."""
    index.add_torch("99.1.0", "13.9.45")
    proposed = propose(index.url)
    assert (proposed.status, proposed.rows) == (0, {})
    said = "pytorch 99.1.0 for cpu on debian12-arm64 is not proposed: the torch 99.1.0 wheel asks for CUDA"
    assert said in proposed.text


@pytest.mark.parametrize("one_row", [("debian12", (True, False))], ids=["both"], indirect=True)
def test_a_build_whose_index_is_behind_keeps_its_version(propose: Propose, index: Index, one_row: Path) -> None:
    index.add_torch("99.1.0", "13.9.45")
    index.add("mpi4py", "98.0")
    proposed = propose(index.url)
    (cpu,) = [row for row in load(one_row).targets if row.cuda == "cpu"]
    assert proposed.status == 0
    assert [row["cuda"] for row in proposed.rows["target"]] == ["cu139"]
    assert f"torch 99.1.0+cpu is not on the indexes: pytorch for cpu stays {cpu.version}" in proposed.text
    # And counts for the components that all targets have.
    assert proposed.rows["stack"][0]["components"]["mpi4py"] == "98.0"


def test_newer_tags_and_rows_of_what_is_downloaded_by_itself_are_named(
    propose: Propose, index: Index, one_row: Path
) -> None:
    """Tags of another form, such as release candidates, do not count."""
    repository = one_row / "repositories" / "github.com" / "aws" / "aws-ofi-nccl"
    git = ("git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@example.org")
    subprocess.run(("git", "init", "--quiet", str(repository)), check=True)
    subprocess.run((*git, "commit", "--quiet", "--allow-empty", "--message=x"), check=True)
    for tag in ("v1.21.1", "v1.9.0", "v1.22.0", "v1.23.0rc1", "v1.24.0-aws", "nightly-2.0"):
        subprocess.run((*git, "tag", tag), check=True)
    said = propose(index.url).text
    assert "# aws-ofi-nccl: the tag v1.22.0 is newer than the newest row, 1.21.1\n" in said
    assert "# gdrcopy: images/artifacts.toml has 2.6, the newest stack 2.5.1\n" in said
    assert "# gdrcopy: its tags are not known: cannot fetch https://github.com/NVIDIA/gdrcopy: " in said
    (silent,) = [line for line in said.splitlines() if line.startswith("# not asked for")]
    assert "efa-installer" in silent
    assert "rdma-core" in silent


def test_an_index_without_the_packages_is_an_error(propose: Propose, plain_server: Server) -> None:
    proposed = propose(f"{plain_server.url}/simple")
    assert (proposed.status, proposed.text) == (1, "")
    assert proposed.err.startswith("error: pytorch ")
    assert "was not found in the package registry" in proposed.err
