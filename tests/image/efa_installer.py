"""An installer that is made like AWS's EFA installer, of Debian's parts: AWS's
own cannot be had here.

As AWS's, it unpacks to one folder, takes its flags, installs packages of its own by the package
manager, lists them in /opt/amazon/efa_installed_packages, and brings an Open MPI that the recipe
did not ask for.
"""

from __future__ import annotations

import gzip
import hashlib
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

VERSION = "1.46.99"
"""None of AWS's; rules about versions take it for one that knows Debian 12."""

FILE = f"aws-efa-installer-{VERSION}.tar.gz"
LIBFABRIC = "1.17.0"
FLAGS = ("-y", "--skip-kmod", "--skip-limit-conf", "--no-verify")

CONTROL = f"""Package: efa-test
Version: {VERSION}
Architecture: amd64
Maintainer: Nobody <nobody@example.org>
Depends: libfabric1, libfabric-bin
Description: what the EFA installer puts below /opt/amazon, as links to Debian's libfabric
"""

SCRIPT = f"""#!/bin/sh
set -eu
if [ "$*" != "{" ".join(FLAGS)}" ]; then
    echo "not my flags: $*" >&2
    exit 1
fi
apt-get install --yes --no-install-recommends ./DEBS/efa-test.deb
echo "# EFA installer version: {VERSION}" > /opt/amazon/efa_installed_packages
mkdir -p /opt/amazon/openmpi/bin
echo leftover > /opt/amazon/openmpi/bin/mpirun
"""

LINKS = {
    "efa/bin/fi_info": "/usr/bin/fi_info",
    "efa/lib/libfabric.so.1": "/usr/lib/x86_64-linux-gnu/libfabric.so.1",
}
HEADERS = {
    "efa/include/rdma": "/usr/include/rdma",
    "efa/lib/libfabric.so": "/usr/lib/x86_64-linux-gnu/libfabric.so",
}


def row(sha256: str) -> str:
    """Return its row of images/artifacts.toml."""
    return f"""
[[artifact]]
name = "efa-installer"
version = "{VERSION}"
url = "https://example.org/{FILE}"
sha256 = "{sha256}"
provides = {{ libfabric = "{LIBFABRIC}" }}
flags = [{", ".join(f'"{flag}"' for flag in FLAGS)}]
source = "tests/image/efa_installer.py"
"""


def make_installer(folder: Path, *, headers: bool = False) -> str:
    """Write the archive into a folder; return its sha256.

    The same bytes each time: it is in an engine's cache then.

    ``headers``: it brings libfabric's too, as AWS's does; NCCL's plugin is compiled against them.
    """
    program = shutil.which("dpkg-deb")
    if program is None:
        pytest.skip("NOT TESTED: there is no dpkg-deb here to make a package")
    work = folder / "efa-work"
    package, unpacked = work / "package", work / "aws-efa-installer"
    (package / "DEBIAN").mkdir(parents=True)
    control = CONTROL.replace("libfabric1,", "libfabric1, libfabric-dev,") if headers else CONTROL
    (package / "DEBIAN" / "control").write_text(control)
    links = {**LINKS, **HEADERS} if headers else LINKS
    for name, target in links.items():
        link = package / "opt" / "amazon" / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)
    (unpacked / "DEBS").mkdir(parents=True)
    (unpacked / "efa_installer.sh").write_text(SCRIPT)
    (unpacked / "efa_installer.sh").chmod(0o755)
    deb = unpacked / "DEBS" / "efa-test.deb"
    command = (program, "--root-owner-group", "--build", str(package), str(deb))
    subprocess.run(
        command,
        check=True,
        capture_output=True,
        timeout=300,
        env={"SOURCE_DATE_EPOCH": "0", "PATH": "/usr/bin:/bin"},
    )
    archive = folder / FILE
    with (
        gzip.GzipFile(archive, "wb", mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as tar,
    ):
        tar.add(unpacked, "aws-efa-installer", filter=_anonymous)
    shutil.rmtree(work)
    return hashlib.sha256(archive.read_bytes()).hexdigest()


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mtime = 0
    member.mode = 0o755 if member.isdir() or member.name.endswith(".sh") else 0o644
    return member
