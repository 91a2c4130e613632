"""The git commit of a checkout, and whether the files that decide images differ from it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from trainworks.engine.subprocesses import run
from trainworks.facts.load import BUILT

SOURCES = (
    "build.py",
    "images",
    "launcher",
    "smdistributed",
    "src",
    "templates",
    f":(exclude)images/{BUILT}",
)
"""The files of a checkout that decide an image, as git pathspecs.

The record of builds is written after a build.
"""

GIT_SECONDS = 60.0
"""Seconds that one call of git may take."""


@dataclass(frozen=True, kw_only=True)
class CheckoutState:
    """What git says of a checkout.

    Attributes:
        commit: The commit, 40 hexadecimal digits; ``""`` outside of git.
        changed: Whether a file that decides images differs from the commit; also true if git
            cannot tell.
    """

    commit: str
    changed: bool


def read_checkout_state(root: Path) -> CheckoutState:
    """Ask git for the commit of a checkout and for changed files; writes nothing.

    A folder inside of another repository is not a checkout: it has no commit, and no changes.
    """
    if _run_git(root, "rev-parse", "--show-toplevel") != str(root.resolve()):
        return CheckoutState(commit="", changed=False)
    changes = _run_git(root, "status", "--porcelain", "--", *SOURCES)
    # With an unreadable index, for example, nothing shows that the files are the commit's.
    changed = changes is None or changes != ""
    return CheckoutState(commit=_run_git(root, "rev-parse", "HEAD") or "", changed=changed)


def _run_git(root: Path, *words: str) -> str | None:
    """Run git for a folder, and return its output; None if git fails or is not installed.

    git fails outside of a repository. It changes nothing.
    """
    command = ("git", "-C", str(root), *words)
    # Without GIT_OPTIONAL_LOCKS, ``git status`` writes the index.
    environment = {**os.environ, "LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0"}
    try:
        result = run(command, timeout=GIT_SECONDS, environment=environment)
    except FileNotFoundError:
        return None
    if result.status != 0:
        return None
    return result.output.decode().strip()
