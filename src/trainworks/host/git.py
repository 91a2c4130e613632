"""Resolve tags of git repositories, and write bundles for a mirror.

Git verifies content by the commit.
"""

from __future__ import annotations

import contextlib
import io
import re
import tarfile
from pathlib import Path

from trainworks.engine.subprocesses import Finished, own_environment, run
from trainworks.engine.temporary_folders import private_folder
from trainworks.errors import LockError
from trainworks.host.bootstrap import EPOCH
from trainworks.host.downloads import UnreachableError, remove_credentials

SECONDS = 3600.0
"""Time-out of one call; whole histories are fetched."""


def find_tag_commit(
    repository: str, tag: str, *, ca_path: str = "", seconds: float = SECONDS
) -> str:
    """Ask a repository for the commit that a tag points at; ``""`` if it has no such tag.

    Args:
        repository: The address of the repository.
        tag: The name of the tag: ``v1.0``.
        ca_path: The file of the CA bundle; ``""``: git's own.
        seconds: Seconds that the repository may take to answer.

    Raises:
        UnreachableError: The repository does not answer.
        LockError: Git is not installed.
    """
    listing = _run_git(
        ("ls-remote", repository, f"refs/tags/{tag}", f"refs/tags/{tag}^{{}}"),
        repository,
        ca_path,
        seconds,
    )
    commit_by_name = {}
    for line in listing.output.decode().splitlines():
        commit, _, name = line.partition("\t")
        commit_by_name[name] = commit
    # An annotated tag is an object of its own; its commit is listed with ^{}.
    plain_commit = commit_by_name.get(f"refs/tags/{tag}", "")
    return commit_by_name.get(f"refs/tags/{tag}^{{}}", plain_commit)


def list_tags(repository: str, *, ca_path: str = "", seconds: float = SECONDS) -> list[str]:
    """Ask a repository for the names of its tags; takes and raises as ``find_tag_commit`` does."""
    listing = _run_git(("ls-remote", "--tags", "--refs", repository), repository, ca_path, seconds)
    return [line.partition("refs/tags/")[2] for line in listing.output.decode().splitlines()]


def make_bundle(repository: str, tag: str, commit: str, target: Path, *, ca_path: str = "") -> None:
    """Write a bundle of a commit and its whole history: a file that git can fetch from.

    Args:
        repository: The address of the repository.
        tag: A tag that points at the commit; ``""`` if there is none.
        commit: The commit, 40 hexadecimal digits.
        target: The file to write; it appears when it is complete.
        ca_path: The file of the CA bundle; ``""``: git's own.

    Raises:
        UnreachableError: The repository does not answer, or does not have the commit.
        LockError: The tag points at another commit, or git is not installed.
    """
    # A bundle has no commit without a name.
    name = f"refs/tags/{tag}" if tag else "refs/heads/pinned"
    part = target.with_name(f"{target.name}.part").absolute()
    with private_folder() as folder:
        _run_git(("init", "--quiet", "--bare", str(folder)), repository, ca_path)
        source = name if tag else commit
        fetch = ("fetch", "--quiet", "--no-tags", repository, f"+{source}:{name}")
        _run_git(("-C", str(folder), *fetch), repository, ca_path)
        parsed = _run_git(
            ("-C", str(folder), "rev-parse", f"{name}^{{commit}}"), repository, ca_path
        )
        actual_commit = parsed.output.decode().strip()
        if actual_commit != commit:
            raise make_moved_tag_error(repository, tag, commit, actual_commit)
        bundle = ("bundle", "create", "--quiet", str(part), name)
        _run_git(("-C", str(folder), *bundle), repository, ca_path)
    part.replace(target)


def is_bundle_of(bundle: Path, commit: str) -> bool:
    """Return whether a file is an intact bundle that has a commit.

    Raises:
        LockError: Git is not installed.
    """
    with private_folder() as folder:
        _run_git(("init", "--quiet", "--bare", str(folder)), str(bundle), "")
        fetch = ("fetch", "--quiet", "--no-tags", str(bundle.absolute()), "+refs/*:refs/bundle/*")
        try:
            _run_git(("-C", str(folder), *fetch), str(bundle), "")
            _run_git(
                ("-C", str(folder), "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"),
                str(bundle),
                "",
            )
        except UnreachableError:
            return False
    return True


def make_source_archive(repository: str, reference: str) -> tuple[str, bytes]:
    """Clone a repository, and make a reproducible tar of its files at a reference.

    Submodules are in the tar, too. ``.git_archival.txt`` gives setuptools_scm the version that it
    would ask git for.

    Args:
        repository: The address of the repository.
        reference: A branch, a tag or a commit; ``""`` for the default branch.

    Returns:
        The commit of the reference, and the tar with the files below ``source/``.

    Raises:
        UnreachableError: The repository does not answer, or does not have the reference.
        LockError: Git is not installed.
    """
    with private_folder() as parent:
        folder = parent / "source"
        # The history is fetched without files; a checkout fetches them.
        _run_git(
            (
                "clone",
                "--quiet",
                "--no-checkout",
                "--filter=blob:none",
                "--",
                repository,
                str(folder),
            ),
            repository,
            "",
        )

        def git(*words: str) -> str:
            return _run_git(("-C", str(folder), *words), repository, "").output.decode().strip()

        names = ["HEAD"]
        if reference:
            names = [f"refs/remotes/origin/{reference}", f"refs/tags/{reference}", reference]
        commit = ""
        for name in names:
            # git fails for a name that the repository does not have.
            with contextlib.suppress(UnreachableError):
                commit = git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
                break
        if not commit:
            # A commit outside of all branches, such as a pull request's; git rejects anything else.
            # Behind ``--`` no reference is an option: ``--upload-pack`` would name a program.
            git("fetch", "--quiet", "--", "origin", reference)
            commit = git("rev-parse", "FETCH_HEAD^{commit}")
        git("checkout", "--quiet", "--detach", commit)
        git("submodule", "--quiet", "update", "--init", "--recursive")
        # A repository without tags has no version.
        with contextlib.suppress(UnreachableError):
            version = git("describe", "--tags", "--long", "--match", "*[0-9]*")
            (folder / ".git_archival.txt").write_text(
                f"node: {commit}\ndescribe-name: {version}\n", encoding="utf-8"
            )
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            archive.add(folder, "source", filter=_normalise_member)
        return commit, buffer.getvalue()


def make_git_archival(folder: Path) -> str:
    """Return the text of a folder's ``.git_archival.txt``: setuptools_scm reads its version there.

    ``""`` for a folder that is not the root of a git repository with a tag, and
    without git.
    """
    if not (folder / ".git").exists():
        return ""
    words = ("-C", str(folder))
    try:
        commit = _run_git((*words, "rev-parse", "HEAD"), str(folder), "").output.decode().strip()
        describe = ("describe", "--tags", "--long", "--match", "*[0-9]*")
        version = _run_git((*words, *describe), str(folder), "").output.decode()
    except (LockError, UnreachableError):
        return ""
    return f"node: {commit}\ndescribe-name: {version.strip()}\n"


def _normalise_member(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Remove owner and time from a member of a tar, which differ between clones.

    Returns:
        The member; ``None`` for git's own files, which are left out.
    """
    if member.name.rsplit("/", 1)[-1] == ".git":
        return None
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mtime = EPOCH
    member.mode = 0o755 if member.mode & 0o100 else 0o644
    return member


def make_moved_tag_error(repository: str, tag: str, commit: str, actual_commit: str) -> LockError:
    """Return the error for a tag that does not point at the commit of its row.

    Args:
        repository: The address of the repository.
        tag: The name of the tag.
        commit: The commit in the row.
        actual_commit: The tag's commit in the repository; ``""``: there is no such tag.
    """
    state = f"points at {actual_commit}" if actual_commit else "does not exist"
    return LockError(
        f"tag {tag} of {remove_credentials(repository)} {state}, its row says {commit}"
    )


def _run_git(
    words: tuple[str, ...], repository: str, ca_path: str, seconds: float = SECONDS
) -> Finished:
    """Run git without questions to the user, and return its output.

    Args:
        words: The arguments of git.
        repository: The address of the repository, for messages.
        ca_path: The file of the CA bundle; ``""``: git's own.
        seconds: Seconds after which git is ended.

    Raises:
        UnreachableError: git failed, or did not end in time.
        LockError: Git is not installed.
    """
    environment = {**own_environment(), "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    # Bytes per second, and the seconds after which a slower connection is ended.
    environment |= {"GIT_HTTP_LOW_SPEED_LIMIT": "1000", "GIT_HTTP_LOW_SPEED_TIME": "60"}
    if ca_path:
        environment["GIT_SSL_CAINFO"] = ca_path
    try:
        result = run(("git", *words), timeout=seconds, environment=environment)
    except FileNotFoundError as error:
        raise LockError(
            "git is not installed", hint="install it with `apt-get install git`"
        ) from error
    if result.timed_out:
        raise UnreachableError(
            f"{remove_credentials(repository)} does not answer within {seconds:.0f} s"
        )
    if result.status != 0:
        lines = result.words.splitlines()
        errors = [line for line in lines if line.startswith(("fatal:", "error:"))]
        error_text = errors[0] if errors else result.words
        # git repeats the address: after "unable to access", in quotes.
        prefix = r"^(?:fatal|error): (?:unable to access '[^']*': )?"
        reason = re.sub(prefix, "", error_text.strip())
        raise UnreachableError(
            f"cannot fetch {remove_credentials(repository)}: {remove_credentials(reason)}"
        )
    return result
