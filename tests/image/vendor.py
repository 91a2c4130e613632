"""A small target with vendor sources that can be built for real here: rows
beside the checkout's, a source from Debian.

METIS is compiled by the very recipe of the vendor targets. Its source is in Debian's archive as a
source package: the same upstream version, in a file of Debian's making (without a folder that
Debian may not distribute), so its hash stands in this file and in no row of the product. The EFA
installer is the tests' own. All other recipes are run by hand: `image.source_page`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from image import efa_installer
from image.support import ROOT, BuiltByCommand, engine_that_answers
from trainworks.host.settings import read_host_settings

PACKAGES_TARGET = "pytorch-2.13.0-cpu-py311-debian12"
TARGET = f"{PACKAGES_TARGET}-vendor"
ARCHIVE = "https://vendor.example.org/sources"
"""Where the rows say that the sources are.

No request goes there: everything comes from the mirror alone.
"""

SUITE = "bookworm"
"""The Debian whose source packages are built."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """The upstream part of a Debian source package, as an artifact of ours."""

    name: str
    version: str
    package: str
    folder: str
    file: str
    sha256: str
    size: int

    @property
    def url(self) -> str:
        """The address in the file's row."""
        return f"{ARCHIVE}/{self.folder}/{self.package}/{self.file}"


OPEN_MPI = Source(
    name="open-mpi",
    version="4.1.4",
    package="openmpi",
    folder="o",
    file="openmpi_4.1.4.orig.tar.xz",
    sha256="ddaee7dbdb01eb4fab1fda5b5e03e8bbff026711806c095c1f39bb410f99f263",
    size=6_916_772,
)
METIS = Source(
    name="metis",
    version="5.1.0",
    package="metis",
    folder="m",
    file="metis_5.1.0.dfsg.orig.tar.xz",
    sha256="c50a88b92b01fa3972c5c92cf50117f126c62589b8f793657c7d865c59c23615",
    size=3_546_136,
)
SOURCES = (METIS,)

TORCH = "2.13.0+cpu"

CMAKE_VERSION = "3.18.2.post1"
"""The version that AWS's images pin, from the package index."""

CMAKE = f"""
[[package]]
name = "cmake"
version = "{CMAKE_VERSION}"
file = "cmake-{CMAKE_VERSION}-py3-none-manylinux1_x86_64.whl"
sha256 = "f5839595152154467f7fde1ddab15628bdf927a9c5671918764a90cd57dd25b4"
size = 18202950
build = true
"""

STACK = f"""
[[stack]]
name = "vendor-test"
sources = "vendor"
source = "tests/image/vendor.py"

[stack.components]
cmake = "{CMAKE_VERSION}"
efa-installer = "{efa_installer.VERSION}"
metis = "{METIS.version}"
python-environment = "26.3"
builder = "0.13.8"
"""

ROW = f"""
[[target]]
version = "2.13.0"
cuda = "cpu"
base = "debian12"
stack = "vendor-test"
versions = {{ torch = "{TORCH}" }}
size_budget_megabytes = 1300
wheel_index = "https://download.pytorch.org/whl/cpu"
source = "tests/image/vendor.py"
"""


HEADER = "[[artifact]]\n"
COMPONENT = "[[component]]\n"
LEFT_OUT = ("mpi4py", "sagemaker-training", "ssh")


def artifact(source: Source, *, url: str = "", sha256: str = "") -> str:
    """Return the row of a source; its URL or hash may be another one."""
    return f"""
{HEADER}name = "{source.name}"
version = "{source.version}"
url = "{url or source.url}"
sha256 = "{sha256 or source.sha256}"
size = {source.size}
source = "Debian 12, source package {source.package}"
"""


def heads_of(artifacts: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Return how the rows of artifacts begin, given as name and version."""
    return tuple(f'name = "{name}"\nversion = "{version}"\n' for name, version in artifacts)


def make_checkout(folder: Path, installer: str, rows: Mapping[str, str] | None = None) -> Path:
    """Copy the checkout and give it the target, with Debian's files in the
    place of upstream's of the same versions.

    ``installer`` is the hash of the tests' own; ``rows`` are artifact rows, by
    name, that stand for the sources'.
    """
    for name in ("images", "templates", "launcher"):
        shutil.copytree(
            ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
        )
    images = folder / "images"
    artifacts = images / "artifacts.toml"
    head, *blocks = artifacts.read_text(encoding="utf-8").split(HEADER)
    ours = [(rows or {}).get(source.name) or artifact(source) for source in SOURCES]
    # The wheel of torch that AWS has is for another Python than Debian 12's:
    # ours comes from the index.
    heads = heads_of([("torch", TORCH), *((source.name, source.version) for source in SOURCES)])
    others = [HEADER + block for block in blocks if not block.startswith(heads)]
    artifacts.write_text(
        "".join([head, *others, *ours, efa_installer.row(installer)]), encoding="utf-8"
    )
    # Open MPI takes long to compile (`image.source_page` does), and the mirror
    # has no part in the others.
    components = images / "components.toml"
    blocks = components.read_text(encoding="utf-8").split(COMPONENT)
    left_out = tuple(f'name = "{name}"' for name in LEFT_OUT)
    for index, block in enumerate(blocks):
        if block.startswith(left_out):
            blocks[index] = block.replace("default = true", "default = false")
    components.write_text(COMPONENT.join(blocks), encoding="utf-8")
    for name, text in (("stacks", STACK), ("pytorch", ROW)):
        with (images / f"{name}.toml").open("a", encoding="utf-8") as file:
            file.write(text)
    lock = (images / "lock" / f"{PACKAGES_TARGET}.toml").read_text(encoding="utf-8")
    (images / "lock" / f"{TARGET}.toml").write_text(lock + CMAKE, encoding="utf-8")
    return folder


@contextmanager
def apt_get(folder: Path, kind: str, components: str) -> Iterator[Callable[..., None]]:
    """Give apt-get of Debian 12 with lists of its own, from the archive that
    this machine's apt uses.

    Args:
        folder: Where apt-get writes; its lists are removed at the end.
        kind: `deb` or `deb-src`.
        components: `main` and others, as in a line of `sources.list`.
    """
    settings = read_host_settings(os.environ).apt
    addresses = {source.uri for source in settings.sources if source.suite == SUITE}
    if not addresses:
        pytest.skip(
            f"NOT TESTED: this machine's apt has no archive of Debian {SUITE},"
            " whose packages are wanted"
        )
    private = folder / ".apt"
    (private / "lists" / "partial").mkdir(parents=True)
    (private / "cache" / "archives" / "partial").mkdir(parents=True)
    # Trusted, because another distribution has no key of Debian's; the hashes above decide.
    lines = [
        f"{kind} [trusted=yes] {address} {SUITE} {components}\n" for address in sorted(addresses)
    ]
    (private / "sources.list").write_text("".join(lines))
    options = (
        *("-o", f"Dir::Etc::SourceList={private}/sources.list", "-o", "Dir::Etc::SourceParts=-"),
        *("-o", f"Dir::State::lists={private}/lists", "-o", f"Dir::Cache={private}/cache"),
        *("-o", "APT::Sandbox::User=root"),
    )

    def run(*words: str) -> None:
        try:
            done = subprocess.run(
                ("apt-get", *options, "--quiet", *words),
                cwd=folder,
                capture_output=True,
                text=True,
                check=False,
                timeout=600,
            )
        except FileNotFoundError:
            pytest.skip("NOT TESTED: there is no apt-get here to bring Debian's packages")
        if done.returncode != 0:
            pytest.skip(f"NOT TESTED: no packages of Debian 12 here: {done.stderr.strip()[-300:]}")

    run("update")
    yield run
    shutil.rmtree(private)


def fetch_sources(folder: Path, sources: Sequence[Source] = SOURCES) -> None:
    """Bring sources into a folder, by ``apt-get source``.

    Other files of such packages are removed.
    """
    before = set(folder.iterdir())
    with apt_get(folder, "deb-src", "main") as run:
        run("source", "--download-only", "--only-source", *(source.package for source in sources))
    for path in set(folder.iterdir()) - before:
        if path.name not in {source.file for source in sources}:
            path.unlink()


def build_command(root: Path, engine: str, *more: str) -> tuple[str, ...]:
    """Return the command line that builds the target of another checkout with an engine."""
    return (
        *(
            sys.executable,
            str(ROOT / "build.py"),
            "--root",
            str(root),
            "--framework",
            "pytorch",
            "--cuda",
            "cpu",
        ),
        *("--sources", "vendor", "--engine", engine, "--format", "json", *more),
    )


def build(
    root: Path, engine: str, *more: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Build the image."""
    environment = {**os.environ, **variables}
    return subprocess.run(
        build_command(root, engine, *more),
        capture_output=True,
        text=True,
        check=False,
        timeout=2400,
        env=environment,
    )


def fill(root: Path, mirror: Path) -> None:
    """Fill a mirror that has the sources already with the rest, by the product's own command."""
    command = (
        sys.executable,
        str(ROOT / "build.py"),
        "mirror",
        str(mirror),
        "--only",
        TARGET,
        "--root",
        str(root),
    )
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]


class Quiet(SimpleHTTPRequestHandler):
    """Python's own server of files, without its lines."""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Say nothing."""


@contextmanager
def served(mirror: Path) -> Iterator[str]:
    """Serve a mirror on loopback; give its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(mirror))) as server:
        thread = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join(10)


_BUILT: dict[str, BuiltByCommand] = {}


def build_once(root: Path, mirror: Path, name: str) -> BuiltByCommand:
    """Build and test the target with an engine, from a served mirror, the first time."""
    if name not in _BUILT:
        engine = engine_that_answers(name)
        with served(mirror) as address:
            done = build(root, name, "--mirror", address, "--offline")
        assert done.returncode == 0, done.stderr[-6000:]
        report = json.loads(done.stdout)
        _BUILT[name] = BuiltByCommand(
            engine=engine,
            root=root,
            reference=report["tags"][0],
            report=report,
            progress=done.stderr,
        )
    return _BUILT[name]
