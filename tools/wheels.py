#!/usr/bin/env python3
"""Build the wheels of the three packages, and their checksums: the same bytes for the same commit.

    tools/wheels.py                writes dist/*.whl and dist/SHA256SUMS
    tools/wheels.py --tag v0.1.0   for the commit of a release: also compares with the tag

What has a version must have the same one: the packages, their modules, the rows of smdistributed
and the changelogs' first headings. With ``--tag`` these headings have the day of the release. The
wheels are those of the last commit, with its time. `make setup` has installed what builds them, in
the versions of tools/requirements.lock; other versions, or another zlib, give other bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (".", "launcher", "smdistributed")
"""Folders with a pyproject.toml of which a wheel is built."""

SUMS = "SHA256SUMS"
TAG = re.compile(r"v(\d+\.\d+\.\d+)")


@dataclass(frozen=True)
class Place:
    """Where a version is written: each match of ``pattern`` in ``file`` has it as its group."""

    file: str
    pattern: str


PROJECT, MODULE = r'^version = "(.+)"$', r'^__version__ = "(.+)"$'
HEADING = r"^## (\S+), .+$"
PLACES = (
    Place("pyproject.toml", PROJECT),
    Place("src/trainworks/__init__.py", MODULE),
    Place("CHANGELOG.md", HEADING),
    Place("launcher/pyproject.toml", PROJECT),
    Place("launcher/trainworks_launcher/__init__.py", MODULE),
    Place("launcher/CHANGELOG.md", HEADING),
    Place("smdistributed/pyproject.toml", PROJECT),
    Place("smdistributed/CHANGELOG.md", HEADING),
    Place("images/stacks.toml", r'^sm(?:ddp|p) = "(.+)"$'),
)
RELEASED = re.compile(r"^## \S+, \d{4}-\d{2}-\d{2}$", re.MULTILINE)
"""A heading of a changelog with the day of the release."""


class VersionError(Exception):
    """The wheels are not those of a version: what to change is in the message."""


def main() -> int:
    """Build the wheels; return 1, with the reason, if something does not agree or fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tag", metavar="vX.Y.Z", help="the tag of the release")
    parser.add_argument("--output", type=Path, metavar="DIR", help="where to write; default: dist")
    parser.add_argument("--root", type=Path, default=ROOT, metavar="DIR", help="the checkout")
    options = parser.parse_args()
    try:
        check_versions(options.root, options.tag)
        check_committed(options.root)
        wheels = build(options.root, options.output or options.root / "dist")
    except (VersionError, OSError) as error:
        print(f"wheels: {error}", file=sys.stderr)
        return 1
    for path in wheels:
        print(path)
    return 0


def check_committed(root: Path) -> None:
    """Check that the commit has what the checkout has.

    Raises:
        VersionError: A file that git knows has changes, or git failed.
    """
    changes = git(root, "status", "--porcelain", "--untracked-files=no").decode()
    if changes:
        raise VersionError(f"these changes are not committed; commit them first\n{changes}")


def check_versions(root: Path, tag: str | None) -> None:
    """Check that each place has the version of the tag; without one, that of the builder.

    Raises:
        VersionError: The tag has another form, or a place does not agree; each is named.
        OSError: A file cannot be read.
    """
    if tag is None:
        version = versions_of(root, PLACES[0])[0]
    else:
        match = TAG.fullmatch(tag)
        if match is None:
            raise VersionError(f"the tag of a release is vX.Y.Z, not {tag}")
        version = match[1]
    problems = []
    for place in PLACES:
        for written in versions_of(root, place):
            if written != version:
                problems.append(f"{place.file} has {written}: write {version}")
        is_dated = place.pattern != HEADING or RELEASED.search(first_heading(root, place.file))
        if tag and not is_dated:
            problems.append(f"{place.file}: write '## {version}, YYYY-MM-DD', the release's day")
    if problems:
        lines = "\n  ".join(problems)
        raise VersionError(f"the version is {version}, and this does not agree:\n  {lines}")


def versions_of(root: Path, place: Place) -> list[str]:
    """Return the versions in a file; of a changelog only the first heading's.

    Raises:
        VersionError: It has none.
        OSError: The file cannot be read.
    """
    if place.pattern == HEADING:
        text = first_heading(root, place.file)
    else:
        text = (root / place.file).read_text(encoding="utf-8")
    versions = re.findall(place.pattern, text, re.MULTILINE)
    if not versions:
        raise VersionError(f"{place.file} has no line of the form {place.pattern}")
    return versions


def first_heading(root: Path, file: str) -> str:
    """Return the first heading of the second level in a changelog, or ``""``.

    Raises:
        OSError: The file cannot be read.
    """
    for line in (root / file).read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            return line
    return ""


def build(root: Path, output: Path) -> list[Path]:
    """Build the wheels of the last commit, and write them into a folder with their checksums.

    They take the place of all wheels of ours that the folder has.

    Args:
        root: The checkout.
        output: The folder; it is made if there is none.

    Returns:
        The wheels, and the file with their checksums.

    Raises:
        VersionError: git, tar or uv failed; the folder is as it was.
        OSError: A file cannot be written.
    """
    # setuptools gives its files the modes that this process allows.
    os.umask(0o022)
    with tempfile.TemporaryDirectory() as folder:
        tree, built = Path(folder, "tree"), Path(folder, "built")
        tree.mkdir()
        archive = git(root, "-c", "tar.umask=0022", "archive", "--format=tar", "HEAD")
        run(("tar", "--extract", "--directory", str(tree)), dict(os.environ), archive)
        time = git(root, "log", "-1", "--format=%ct").decode().strip()
        for package in PACKAGES:
            build_wheel(tree / package, built, time)
        output.mkdir(parents=True, exist_ok=True)
        for old in output.glob("trainworks*.whl"):
            old.unlink()
        for wheel in built.glob("*.whl"):
            shutil.copyfile(wheel, output / wheel.name)
    wheels = sorted(output.glob("trainworks*.whl"))
    sums = output / SUMS
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in wheels]
    sums.write_text("".join(lines), encoding="ascii")
    return [*wheels, sums]


def build_wheel(project: Path, output: Path, time: str) -> None:
    """Build the wheel of a folder with the tools of this Python's environment, without an index.

    Args:
        project: The folder with pyproject.toml.
        output: Where the wheel is written.
        time: The time of the files in it, in seconds since 1970.

    Raises:
        VersionError: uv failed.
    """
    python = Path(sys.executable)
    command = (
        str(python.with_name("uv")),
        "build",
        "--quiet",
        "--wheel",
        "--offline",
        "--no-build-isolation",
        "--python",
        str(python),
        "--out-dir",
        str(output),
        str(project),
    )
    run(command, {**os.environ, "SOURCE_DATE_EPOCH": time})


def git(root: Path, *words: str) -> bytes:
    """Return the output of git in a checkout. Raises VersionError if it fails."""
    return run(("git", "-C", str(root), *words), dict(os.environ))


def run(command: Sequence[str], environment: dict[str, str], content: bytes = b"") -> bytes:
    """Return the output of a program that reads some content.

    Raises:
        VersionError: The program failed; with its message.
        OSError: There is no such program.
    """
    done = subprocess.run(command, env=environment, input=content, capture_output=True, check=False)
    if done.returncode:
        message = done.stderr.decode(errors="replace")
        raise VersionError(f"`{' '.join(command)}` ended with status {done.returncode}\n{message}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
