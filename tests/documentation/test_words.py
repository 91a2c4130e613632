"""Wordings that readers stumbled over do not come back: on the pages, and in texts of the product.

Decisions (docs/adr) keep the words of their day, and CONTRIBUTING.md quotes some of these.
"""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from documentation.blocks import ROOT

WORDINGS = {
    "are lines with `fail`": "failed checks are printed",
    "ways in": "where to start",
    "mend only": "fix only",
    "`its successor`": "`supported`",
    "until its successor": "supported",
    "end with h200": "support GPUs up to the H200",
    "but none whose name": "except those whose name",
    "what cosign has verified": "attestations that cosign verified",
    "to be had": "unavailable",
    "cannot be had": "unavailable",
    "is a line each": "each version change is printed",
    "no source archive of this package": "never build this package from source",
    "steady job is seen": "jobs that print regularly are flagged sooner",
    "waits for nobody": "is not itself waiting",
    "another try may cure": "a retryable failure",
    "lead nowhere": "make no progress; the target does not exist",
    "leads nowhere": "makes no progress; the target does not exist",
    "checkpoints, going on": "stopping and resuming",
    "all ends together": "everything stops together",
    "of yours is kept, but": "your variables win, except",
    "takes the leader's place": "impersonates the leader",
    "green at no commit": "has not passed on any commit",
    "where `train` would stand": "instead of `train`",
    "which is no address": "which is not an address of this host",
    "starts no program of it": "runs none of its programs",
    "no program of it is": "none of its programs is",
    "no program of it was": "none of its programs was",
    "says no word": "prints no warning",
}
"""Wording, in lower case -> what to write instead."""

PRODUCT = ("src", "launcher/trainworks_launcher", "launcher/trainworks_preflight")


def listed(*patterns: str) -> list[str]:
    """Return the tracked and the new files of the checkout that fit these patterns of git."""
    command = ("git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.splitlines() if (ROOT / name).is_file()]


def texts_of(path: Path) -> Iterator[str]:
    """Yield the texts of a page or of a table of rows, or each text and docstring of a module."""
    content = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield content
        return
    for node in ast.walk(ast.parse(content)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def wordings_in(path: Path) -> list[str]:
    """Return the old wordings of a file, each with what to write instead."""
    problems = []
    for text in texts_of(path):
        plain = " ".join(text.lower().split())
        for wording, instead in WORDINGS.items():
            if wording in plain:
                problems.append(f"{path.name}: {wording!r}: write {instead!r}")
    return problems


def test_pages_and_texts_of_the_product_have_none_of_the_old_wordings() -> None:
    names = listed("*.md", "images/*.toml", *(f"{folder}/**/*.py" for folder in PRODUCT))
    assert len(names) > 300
    problems = []
    for name in names:
        if name.startswith("docs/adr/") or name == "CONTRIBUTING.md":
            continue
        problems += wordings_in(ROOT / name)
    assert problems == []


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("page.md", "Restarts that lead\nnowhere end the job.\n"),
        ("module.py", 'HINT = f"{1}: restarts that lead" " nowhere"\n'),
        ("other.py", 'def end() -> None:\n    """End what leads nowhere."""\n'),
    ],
)
def test_an_old_wording_is_found_in_pages_texts_and_docstrings(
    name: str, content: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    (problem,) = wordings_in(tmp_path / name)
    assert "nowhere" in problem
