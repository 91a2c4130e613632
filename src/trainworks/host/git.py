"""Git repositories of vendors: where a tag points, and bundles for a mirror. Git verifies content by the commit."""

from __future__ import annotations

import os
from pathlib import Path

from trainworks.engine.processes import Finished, run
from trainworks.engine.scratch import private_folder
from trainworks.errors import LockError
from trainworks.host.downloads import UnreachableError, without_credentials

SECONDS = 3600.0
"""How long one call may take: whole histories are fetched."""


def tag_commit(repository: str, tag: str, *, ca_path: str = "") -> str:
    """Return the commit that a tag points at; ``""`` where the repository has no such tag.

    Raises:
        UnreachableError: The repository does not answer.
        LockError: Git is not installed.
    """
    listing = _git(("ls-remote", repository, f"refs/tags/{tag}", f"refs/tags/{tag}^{{}}"), repository, ca_path)
    found = {}
    for line in listing.output.decode().splitlines():
        commit, _, name = line.partition("\t")
        found[name] = commit
    # An annotated tag has an object of its own, and the commit behind it is listed with ^{}.
    return found.get(f"refs/tags/{tag}^{{}}", found.get(f"refs/tags/{tag}", ""))


def make_bundle(repository: str, tag: str, commit: str, target: Path, *, ca_path: str = "") -> None:
    """Write a bundle of a commit and its whole history: a file that git fetches from as from a repository.

    Args:
        repository: Its address.
        tag: A tag that points at the commit; ``""`` where there is none.
        commit: What must come.
        target: The file; it appears when it is complete.
        ca_path: CA bundle.

    Raises:
        UnreachableError: The repository does not answer, or does not have it.
        LockError: The tag points elsewhere.
    """
    name = f"refs/tags/{tag}" if tag else "refs/heads/pinned"
    part = target.with_name(f"{target.name}.part").absolute()
    with private_folder() as folder:
        _git(("init", "--quiet", "--bare", str(folder)), repository, ca_path)
        fetch = ("fetch", "--quiet", "--no-tags", repository, f"+{name if tag else commit}:{name}")
        _git(("-C", str(folder), *fetch), repository, ca_path)
        found = _git(("-C", str(folder), "rev-parse", f"{name}^{{commit}}"), repository, ca_path)
        there = found.output.decode().strip()
        if there != commit:
            raise moved(repository, tag, commit, there)
        _git(("-C", str(folder), "bundle", "create", "--quiet", str(part), name), repository, ca_path)
    part.replace(target)


def bundle_holds(bundle: Path, commit: str) -> bool:
    """Whether a bundle is whole and has a commit."""
    with private_folder() as folder:
        _git(("init", "--quiet", "--bare", str(folder)), str(bundle), "")
        fetch = ("fetch", "--quiet", "--no-tags", str(bundle.absolute()), "+refs/*:refs/bundle/*")
        try:
            _git(("-C", str(folder), *fetch), str(bundle), "")
            _git(("-C", str(folder), "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"), str(bundle), "")
        except UnreachableError:
            return False
    return True


def moved(repository: str, tag: str, commit: str, there: str) -> LockError:
    """Return the error for a tag that is not where it was."""
    now = f"points at {there}" if there else "does not exist"
    return LockError(f"tag {tag} of {without_credentials(repository)} {now}, its row says {commit}")


def _git(words: tuple[str, ...], repository: str, ca_path: str) -> Finished:
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    environment |= {"GIT_HTTP_LOW_SPEED_LIMIT": "1000", "GIT_HTTP_LOW_SPEED_TIME": "60"}
    if ca_path:
        environment["GIT_SSL_CAINFO"] = ca_path
    try:
        done = run(("git", *words), timeout=SECONDS, environment=environment)
    except FileNotFoundError as error:
        raise LockError("git is not installed", hint="`apt-get install git` brings it") from error
    if done.status != 0:
        lines = [line for line in done.words.splitlines() if line.startswith(("fatal:", "error:"))]
        said = lines[0] if lines else done.words
        raise UnreachableError(
            f"{without_credentials(repository)} cannot be had: {without_credentials(said.partition(': ')[2] or said)}"
        )
    return done
