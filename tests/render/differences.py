"""The difference between Dockerfiles of this working tree and those of the last commit."""

from __future__ import annotations

import difflib
import io
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from trainworks.render.dockerfile import Rendering

ADVICE = "if the change is meant: `make golden`, then read `git diff tests/golden`"
SAME = "as the last commit renders it: tests/golden is out of date, or was edited by hand"


def describe_differences(
    names: Sequence[str], renderings: Mapping[str, Rendering], root: Path, folder: Path
) -> str:
    """Return the unified diffs of targets. One stands for all targets with the same change.

    Args:
        names: The targets.
        renderings: What this working tree renders, by the target's name.
        root: The checkout, a repository of git with a commit.
        folder: An empty folder, for the last commit and what it renders.

    Raises:
        subprocess.CalledProcessError: git fails.
    """
    render_last_commit(names, root, folder)
    diff_by_change: dict[str, str] = {}
    names_by_change: dict[str, list[str]] = {}
    for name in names:
        diff = compare(folder / "rendered" / name, renderings[name])
        # The same change has other line numbers in another target.
        lines = diff.splitlines(keepends=True)
        change = "".join(line for line in lines if not line.startswith(("@", " ")))
        diff_by_change.setdefault(change, diff)
        names_by_change.setdefault(change, []).append(name)
    parts = []
    for change, alike in names_by_change.items():
        parts.append(f"{', '.join(alike)}:\n{diff_by_change[change]}")
    return "\n".join([*parts, ADVICE])


def render_last_commit(names: Sequence[str], root: Path, folder: Path) -> None:
    """Write the last commit to ``tree``, and what it renders to ``rendered/NAME``.

    A target that the last commit does not have, or does not render, has no folder afterwards.
    """
    archive = subprocess.run(
        ("git", "archive", "HEAD"), cwd=root, stdout=subprocess.PIPE, check=True
    )
    tree = folder / "tree"
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(tree, filter="data")
    for name in names:
        words = (sys.executable, str(tree / "build.py"), "--root", str(tree), "--only", name)
        output = ("--until", "render", "--output", str(folder / "rendered"))
        subprocess.run((*words, *output), capture_output=True, check=False)


def compare(before: Path, after: Rendering) -> str:
    """Return the unified diff of the Dockerfile and of the lists of packages; ``SAME`` for none.

    Args:
        before: The build context of the last commit; it may be absent.
        after: The build context of this working tree.
    """
    old = {path.relative_to(before).as_posix(): path for path in before.rglob("*")}
    old_texts = {}
    for name, path in old.items():
        if is_compared(name) and path.is_file():
            old_texts[name] = path.read_text(encoding="utf-8")
    new_texts = {"Dockerfile": after.dockerfile}
    for file in after.files:
        if is_compared(file.path):
            new_texts[file.path] = file.content.decode()
    lines: list[str] = []
    for name in sorted({*old_texts, *new_texts}):
        lines += diff_lines(name, old_texts.get(name, ""), new_texts.get(name, ""))
    return "".join(lines) or f"{SAME}\n"


def is_compared(name: str) -> bool:
    """Whether the digests of tests/golden depend on a file of a build context."""
    return name == "Dockerfile" or name.startswith("requirements/")


def diff_lines(name: str, old: str, new: str) -> Iterator[str]:
    """Yield the lines of a unified diff of one file."""
    return difflib.unified_diff(
        old.splitlines(keepends=True), new.splitlines(keepends=True), f"HEAD/{name}", name
    )
