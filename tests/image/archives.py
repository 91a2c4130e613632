"""A package archive of the tests' own, on loopback: one suite with one package,
in as many states as a test needs.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path

from lock.servers import Server
from trainworks.host.archives import DATE

SUITE = "tiny"
PACKAGE = "trainworks-demo"


@dataclass(frozen=True, kw_only=True)
class Package:
    """A Debian package: its file's name, its bytes, and its row in the list of packages."""

    file: str
    content: bytes
    row: str


class Archive:
    """A Debian archive as it is at ``today``.

    Each state that it had is below ``archive/main/DATE``, as a snapshot service has it.
    """

    def __init__(self, server: Server, folder: Path, *, keeps: bool = True) -> None:
        """Make an archive without a state; ``keeps``: whether there are snapshots of it."""
        self._server, self.folder, self._keeps = server, folder, keeps
        self._home = folder / "gpg"
        self._home.mkdir(mode=0o700)
        self._gpg("--quick-generate-key", "archive@example.org", "default", "default", "never")
        self.others: dict[str, str] = {}
        self.today = f"{server.url}/today"
        self.snapshot = f"{server.url}/archive/{{archive}}/{{date}}"
        self.requests = server.seen

    def sign(self, version: str, day: datetime) -> None:
        """Be in a state: the package in this version, and ``others`` in theirs,
        signed on this day.
        """
        package_files = [self._package(PACKAGE, version, "demo")]
        package_files += [
            self._package(other, its_own, other) for other, its_own in self.others.items()
        ]
        packages = "".join(package_file.row for package_file in package_files).encode()
        path = "main/binary-amd64/Packages"
        release = (
            "Origin: Tests\n"
            "Suite: stable\n"
            f"Codename: {SUITE}\n"
            f"Date: {format_datetime(day, usegmt=True)}\n"
            "Architectures: amd64 all\n"
            "Components: main\n"
            "SHA256:\n"
            f" {hashlib.sha256(packages).hexdigest()} {len(packages)} {path}\n"
        )
        signed = self._gpg("--clearsign", "--output", "-", input_bytes=release.encode())
        places = ["/today"]
        if self._keeps:
            places.append(f"/archive/main/{day.astimezone(UTC):%Y%m%dT%H%M%SZ}")
        for place in places:
            self._server.serve(f"{place}/dists/{SUITE}/InRelease", signed)
            self._server.serve(f"{place}/dists/{SUITE}/{path}", packages)
            for package_file in package_files:
                self._server.serve(f"{place}/pool/{package_file.file}", package_file.content)

    def _package(self, package: str, version: str, file: str) -> Package:
        """Make a package with a file that says its version."""
        name = f"{package}_{version}_all.deb"
        tree = self.folder / f"tree-{package}-{version}"
        if not tree.is_dir():
            (tree / "DEBIAN").mkdir(parents=True)
            (tree / "DEBIAN" / "control").write_text(
                f"Package: {package}\n"
                f"Version: {version}\n"
                "Architecture: all\n"
                "Maintainer: Tests <t@example.org>\n"
                "Description: a package of the tests\n",
                encoding="utf-8",
            )
            (tree / "usr" / "share").mkdir(parents=True)
            (tree / "usr" / "share" / file).write_text(f"{version}\n", encoding="utf-8")
            environment = {**os.environ, "SOURCE_DATE_EPOCH": "1500000000"}
            command = (
                "dpkg-deb",
                "--root-owner-group",
                "--build",
                str(tree),
                str(self.folder / name),
            )
            subprocess.run(command, check=True, capture_output=True, env=environment)
        content = (self.folder / name).read_bytes()
        control = (tree / "DEBIAN" / "control").read_text(encoding="utf-8")
        sums = f"Size: {len(content)}\nSHA256: {hashlib.sha256(content).hexdigest()}\n\n"
        return Package(file=name, content=content, row=f"{control}Filename: pool/{name}\n{sums}")

    def _gpg(self, *words: str, input_bytes: bytes = b"") -> bytes:
        command = ("gpg", "--homedir", str(self._home), "--batch", "--passphrase", "", *words)
        return subprocess.run(command, check=True, capture_output=True, input=input_bytes).stdout


def dated(day: datetime) -> str:
    """Return a day as a lock has it."""
    return day.strftime(DATE)
