"""The image of SageMaker's page about smp, built from sources that can be had
without the vendors' hosts.

Each component of the row of PyTorch 1.10.2 and CUDA 11.3 that is compiled from source is compiled
by the same recipe, in one build. These parts differ, because the vendors' files cannot be
downloaded everywhere:

- NVIDIA's base images: Debian 12 with Debian's own CUDA toolkit 11.8 below /usr/local/cuda, as two
  images in a registry on loopback. Its compiler knows GCC up to 11, so `g++` is Debian's g++-11
  there.
- Commits of git repositories come from the folder that `TRAINWORKS_PROOF` names, a mirror of
  `build.py mirror`. RMM's is a bare repository in an archive; its tree is packed here.
- GDRCopy, which the page does not have, is compiled too.
- Open MPI 4.1, METIS 5.1.0 and Boost are Debian's source packages (`image.vendor`). Boost gets the
  parser of its build tool, which Debian makes with bison.
- The EFA installer is the tests' own, with Debian's libfabric and its headers.
- PyTorch is the CPU wheel of the default sources; smp and smddp are this repository's.
- One GPU architecture instead of four, for the compiler's time.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from image import efa_installer
from image.support import ROOT
from image.vendor import (
    CMAKE,
    CMAKE_VERSION,
    COMPONENT,
    HEADER,
    METIS,
    OPEN_MPI,
    PACKAGES_TARGET,
    Source,
    apt_get,
    artifact,
    fetch_sources,
    heads_of,
)
from push.support import program, wait_until_it_answers
from trainworks_testing.ports import free_port

PROOF = "TRAINWORKS_PROOF"
"""The variable that names the folder of sources.

Only `make proof` sets the variable: half an hour of compilation.
"""

CUDA, TOOLKIT = "cu118", "11.8.89"
TARGET = PACKAGES_TARGET.replace("cpu", CUDA) + "-vendor"
ARCHITECTURE = "80"

BOOST = Source(
    name="boost",
    version="1.74.0",
    package="boost1.74",
    folder="b",
    file="boost1.74_1.74.0+ds1.orig.tar.xz",
    sha256="192f5df504d282cb81288f88232d8af45b64a9ab531e1c7cf8ae955f16f6bb28",
    size=60_678_948,
)
FROM_DEBIAN = (OPEN_MPI, METIS, BOOST)

VERSIONS = {
    "torch": "2.13.0+cpu",
    "nccl": "2.10.3",
    "gdrcopy": "2.5.1",
    "rmm": "0.15.0",
    "cmake": CMAKE_VERSION,
    "metis": METIS.version,
    "boost": BOOST.version,
}
"""Those of the page's row, but for PyTorch, Boost, and GDRCopy, which it does not have."""

MADE = {"rmm": "rmm-0.15.0.tar.gz", "boost": "boost-1.74.0.tar.gz"}
"""Files of the mirror that are packed here."""

RMM_COMMIT = "8005ca53b001193f36bca261b5725a3482cc897b"
FROM_GIT = ("nccl-", "aws-ofi-nccl-", "gdrcopy-", "cnmem-")
ARCHIVES = ("spdlog/v1.6.0.tar.gz", "thrust/1.9.10.tar.gz", "cub/1.9.10.tar.gz")

STACK = f"""
[[stack]]
name = "source-page"
sources = "vendor"
source = "tests/image/source_page.py"

[stack.components]
efa-installer = "{efa_installer.VERSION}"
aws-ofi-nccl = "1.2.0"
open-mpi = "{OPEN_MPI.version}"
mpi4py = "4.1.2"
smddp = "0.1.0"
smp = "0.1.0"
sagemaker-training = "5.1.4"
python-environment = "26.3"
builder = "0.13.8"
"""

ROW = """
[[target]]
version = "2.13.0"
cuda = "{cuda}"
base = "debian12"
image = "{registry}/cuda:runtime"
builder_image = "{registry}/cuda:devel"
stack = "source-page"
versions = {{ {versions} }}
size_budget_megabytes = 2000
wheel_index = "https://download.pytorch.org/whl/cpu"
source = "tests/image/source_page.py"
"""

BASE_IMAGE = """
[[base_image]]
name = "{registry}/cuda:{tag}"
digest = "{digest}"
base = "debian12"
provides = {{ cuda = "{cuda}" }}
source = "tests/image/source_page.py"
"""

# Files that the compilation of a program needs, and its run without a driver.
TOOLKIT_PACKAGES = (
    *("nvidia-cuda-toolkit", "nvidia-cuda-dev", "libcudart11.0", "libnvvm4", "libnvtoolsext1"),
    *(
        "g++-11",
        "gcc-11",
        "cpp-11",
        "libgcc-11-dev",
        "libstdc++-11-dev",
        "libasan6",
        "libtsan0",
        "libcu++-dev",
    ),
)
UNNEEDED = (
    "libcu[bfrs]*_static*.a",
    "libnpp*",
    "libnv[bj]*",
    "libcu[bfs]*.so*",
    "libcurand*",
    "libmetis_static.a",
    "liblapack_static.a",
)
LIBRARIES = "usr/lib/x86_64-linux-gnu"

HEADERS = "cuda-include"
"""Where `make_base_images` leaves the toolkit's headers, beside its folder."""

LOADED = ("libcudart.so.", "libnvToolsExt.so.")
"""Libraries of the toolkit in the runtime image: NVIDIA's has all libraries, and nothing in these
tests loads the others.
"""

UNFIT_RULES = ('name = "torch-build-cuda-11"', 'name = "smp-', 'name = "smddp-')
"""Rules that the target leaves out: a CPU wheel of PyTorch loads no CUDA.

The others are about AWS's smp and smddp.
"""

DEVEL = f"""FROM {{base}}
RUN dpkg-divert --quiet --rename --divert /usr/bin/g++.debian --add /usr/bin/g++ \\
    && dpkg-divert --quiet --rename --divert /usr/bin/gcc.debian --add /usr/bin/gcc
ADD toolkit.tar /
RUN ln -s g++-11 /usr/bin/g++ && ln -s gcc-11 /usr/bin/gcc \\
    && mkdir -p /usr/local/cuda-11.8/bin && ln -s cuda-11.8 /usr/local/cuda \\
    && ln -s /usr/include /usr/local/cuda/include && ln -s /{LIBRARIES} /usr/local/cuda/lib64 \\
    && ln -s /usr/bin/nvcc /usr/local/cuda/bin/nvcc && ldconfig
"""
RUNTIME_PACKAGE = """Package: cuda-runtime-stand-in
Version: 11.8
Architecture: amd64
Maintainer: Nobody <nobody@example.org>
Description: the libraries of Debian's CUDA toolkit, where NVIDIA's images have them
"""
RUNTIME = """FROM {base}
COPY runtime.deb /tmp/
RUN dpkg --install /tmp/runtime.deb \\
    && rm -f /tmp/runtime.deb /var/log/dpkg.log /var/lib/dpkg/*-old \\
    && ln -s cuda-11.8 /usr/local/cuda && ldconfig
"""


def mirror_folder() -> Path:
    """Return the folder of sources; skips where the variable is not set."""
    value = os.environ.get(PROOF)
    if not value:
        pytest.skip("NOT TESTED: by hand only, with `make proof SOURCES=FOLDER`")
    folder = Path(value).resolve()
    assert folder.is_dir(), f"{PROOF}={value}: no such folder"
    return folder


def make_mirror(folder: Path) -> dict[str, str]:
    """Bring every source into a folder.

    Return the hashes of those that were made here, by component.
    """
    mirror = mirror_folder()
    for path in mirror.iterdir():
        if path.name.startswith(FROM_GIT):
            shutil.copy(path, folder)
    for name in ARCHIVES:
        # A mirror is flat: two archives have one name upstream.
        shutil.copy(mirror / name, folder / name.replace("/", "-"))
    tree = folder / MADE["rmm"]
    with tarfile.open(mirror / f"rmm-{RMM_COMMIT}.git.tar.gz") as packed:
        packed.extractall(folder / ".rmm", filter="tar")
    command = (
        "git",
        "-C",
        str(folder / ".rmm" / "rmm.git"),
        "archive",
        "--prefix=rmm-0.15.0/",
        RMM_COMMIT,
    )
    content = subprocess.run(command, check=True, capture_output=True, timeout=300).stdout
    with gzip.GzipFile(tree, "wb", mtime=0) as file:
        file.write(content)
    shutil.rmtree(folder / ".rmm")
    fetch_sources(folder, FROM_DEBIAN)
    _complete_boost(folder)
    hashes = {
        name: hashlib.sha256((folder / file).read_bytes()).hexdigest()
        for name, file in MADE.items()
    }
    return {**hashes, "efa-installer": efa_installer.make_installer(folder, headers=True)}


def _complete_boost(folder: Path) -> None:
    """Pack Debian's Boost with the parser of its build tool, which Debian
    leaves out and makes with bison.
    """
    work = folder / ".boost"
    work.mkdir()
    with apt_get(work, "deb", "main") as run:
        run("download", "bison", "m4")
    for package in work.glob("*.deb"):
        subprocess.run(("dpkg-deb", "--extract", str(package), str(work)), check=True, timeout=300)
    archive = folder / BOOST.file
    root, engine = work / "boost_1_74_0", "tools/build/src/engine"
    root.mkdir()
    subprocess.run(
        ("tar", "-xf", archive, "-C", root, "--strip-components=1"), check=True, timeout=300
    )
    subprocess.run(
        (
            work / "usr/bin/bison",
            "--yacc",
            "--defines=jamgram.hpp",
            "--output=jamgram.cpp",
            "jamgram.y",
        ),
        cwd=root / engine,
        env={"BISON_PKGDATADIR": str(work / "usr/share/bison"), "M4": str(work / "usr/bin/m4")},
        check=True,
        capture_output=True,
        timeout=300,
    )
    # Sorted, of one time and owner: the same bytes for an engine's cache.
    words = (
        "--sort=name",
        "--mtime=@0",
        "--owner=0",
        "--group=0",
        "--numeric-owner",
        "--use-compress-program=gzip -1n",
    )
    subprocess.run(
        ("tar", *words, "-cf", folder / MADE["boost"], "-C", work, root.name),
        check=True,
        timeout=300,
    )
    archive.unlink()
    shutil.rmtree(work)


def make_base_images(folder: Path, base: str, registry: str) -> dict[str, str]:
    """Build the images that stand for NVIDIA's, push them, and return their digests by tag."""
    folder.mkdir()
    with apt_get(folder, "deb", "main contrib non-free") as run:
        run("download", *TOOLKIT_PACKAGES)
    tree = folder / "tree"
    for package in sorted(folder.glob("*.deb")):
        subprocess.run(("dpkg-deb", "--extract", str(package), str(tree)), check=True, timeout=300)
        package.unlink()
    for pattern in UNNEEDED:
        for path in (tree / LIBRARIES).glob(pattern):
            path.unlink()
    with tarfile.open(folder / "toolkit.tar", "w") as tar:
        # Of one time: the same bytes for the engine's cache, which has half an hour of compilation.
        tar.add(tree, ".", filter=lambda member: member.replace(mtime=0, deep=False))
    # As a package: in NVIDIA's image each file belongs to one.
    package = folder / "package"
    (package / "DEBIAN").mkdir(parents=True)
    (package / "DEBIAN" / "control").write_text(RUNTIME_PACKAGE)
    (package / "usr/local/cuda-11.8/lib64").mkdir(parents=True)
    for path in (tree / LIBRARIES).glob("lib*"):
        if path.name.startswith(LOADED):
            shutil.copy(
                path, package / "usr/local/cuda-11.8/lib64" / path.name, follow_symlinks=False
            )
    command = (
        "dpkg-deb",
        "--root-owner-group",
        "--build",
        str(package),
        str(folder / "runtime.deb"),
    )
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    shutil.rmtree(package)
    # A program that is compiled against RMM needs CUDA's headers.
    shutil.copytree(tree / "usr/include", folder.parent / HEADERS)
    shutil.rmtree(tree)
    digests = {}
    for tag, text in (("devel", DEVEL), ("runtime", RUNTIME)):
        (folder / "Dockerfile").write_text(text.format(base=base))
        source = "toolkit.tar" if tag == "devel" else "runtime.deb"
        (folder / ".dockerignore").write_text(f"*\n!{source}\n")
        name = f"{registry}/cuda:{tag}"
        for words in (("build", "--quiet", "--tag", name, str(folder)), ("push", "--quiet", name)):
            subprocess.run(("docker", *words), check=True, capture_output=True, timeout=900)
        words = ("docker", "inspect", "--format", '{{join .RepoDigests " "}}', name)
        output = subprocess.run(
            words, check=True, capture_output=True, text=True, timeout=300
        ).stdout
        # An earlier run's registry may have had the same image.
        (digests[tag],) = {
            word.rpartition("@")[2] for word in output.split() if word.startswith(f"{registry}/")
        }
    shutil.rmtree(folder)
    return digests


@contextmanager
def plain_registry(folder: Path) -> Iterator[str]:
    """Run Debian's registry on loopback, without TLS and without a login.

    Give its host and port.
    """
    port = free_port()
    host = f"127.0.0.1:{port}"
    configuration = folder / "registry.yml"
    configuration.write_text(
        f"version: 0.1\nhttp:\n  addr: {host}\n  secret: of the tests\n"
        f"storage:\n  filesystem:\n    rootdirectory: {folder / 'registry'}\n"
    )
    with (folder / "registry.log").open("wb") as log:
        process = subprocess.Popen((program(), "serve", str(configuration)), stdout=log, stderr=log)
    try:
        wait_until_it_answers(process, port, folder / "registry.log")
        yield host
    finally:
        process.kill()
        process.wait(30)


def make_checkout(
    folder: Path, registry: str, digests: dict[str, str], hashes: dict[str, str]
) -> Path:
    """Copy the checkout and give it the target."""
    for name in ("images", "templates", "launcher", "smdistributed"):
        shutil.copytree(
            ROOT / name,
            folder / name,
            ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", ".*cache"),
        )
    images = folder / "images"
    versions = ", ".join(f'{name} = "{version}"' for name, version in VERSIONS.items())
    made_sources = [
        Source(
            name=name,
            version=VERSIONS[name],
            package=name,
            folder="-",
            file=file,
            sha256=hashes[name],
            size=0,
        )
        for name, file in MADE.items()
    ]
    head, *blocks = (images / "artifacts.toml").read_text(encoding="utf-8").split(HEADER)
    ours = [*(source for source in FROM_DEBIAN if source.name not in MADE), *made_sources]
    heads = heads_of(
        [("torch", VERSIONS["torch"]), *((source.name, source.version) for source in ours)]
    )
    others = [HEADER + block for block in blocks if not block.startswith(heads)]
    together = {
        "rmm": (
            'together = { cnmem = "2019.1", spdlog = "1.6.0", thrust = "1.9.10", cub = "1.9.10" }\n'
        )
    }
    rows = [artifact(source) + together.get(source.name, "") for source in ours]
    rows.append(efa_installer.row(hashes["efa-installer"]))
    (images / "artifacts.toml").write_text("".join([head, *others, *rows]), encoding="utf-8")
    added = {
        "stacks": STACK,
        "pytorch": ROW.format(cuda=CUDA, registry=registry, versions=versions),
        "base-images": "".join(
            BASE_IMAGE.format(registry=registry, tag=tag, digest=digest, cuda=TOOLKIT)
            for tag, digest in digests.items()
        ),
    }
    for name, text in added.items():
        with (images / f"{name}.toml").open("a", encoding="utf-8") as file:
            file.write(text)
    _replace(
        images / "cuda.toml", f'name = "{CUDA}"', "architectures = [", "]", f'"{ARCHITECTURE}"'
    )
    rules = images / "compatibility.toml"
    head, *blocks = rules.read_text(encoding="utf-8").split("[[rule]]\n")
    kept_blocks = [block for block in blocks if not block.startswith(UNFIT_RULES)]
    rules.write_text("[[rule]]\n".join([head, *kept_blocks]), encoding="utf-8")
    components = images / "components.toml"
    head, *blocks = components.read_text(encoding="utf-8").split(COMPONENT)
    # This repository's smp and smddp take the place of AWS's.
    kept_blocks = [
        block
        for block in blocks
        if not (block.startswith(('name = "smp"', 'name = "smddp"')) and '"vendor"' in block)
    ]
    for index, block in enumerate(kept_blocks):
        if block.startswith(('name = "smp"', 'name = "smddp"')):
            both = 'sources = ["packages", "vendor"]'
            kept_blocks[index] = block.replace('sources = ["packages"]', both)
    components.write_text(COMPONENT.join([head, *kept_blocks]), encoding="utf-8")
    lock = (images / "lock" / f"{PACKAGES_TARGET}.toml").read_text(encoding="utf-8")
    (images / "lock" / f"{TARGET}.toml").write_text(lock + CMAKE, encoding="utf-8")
    return folder


def _replace(path: Path, after: str, begin: str, end: str, text: str) -> None:
    """Put a text between two others, the first of them after a third."""
    content = path.read_text(encoding="utf-8")
    start = content.index(begin, content.index(after)) + len(begin)
    path.write_text(content[:start] + text + content[content.index(end, start) :], encoding="utf-8")
