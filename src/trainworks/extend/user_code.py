"""Reads the user's code on this machine: the files for an image, those that stay outside, and
secrets, which are refused.
"""

from __future__ import annotations

import io
import os
import re
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from docker.utils.build import PatternMatcher

from trainworks.engine.protocol import Layer
from trainworks.extend.plan import INSTALLED_FILE
from trainworks.facts.rows import SourceFile
from trainworks.imagetest.secrets import scan_layers

IGNORE_FILES = (".trainworksignore", ".dockerignore")
"""The first of these at the root of the code lists paths that stay outside, as a .dockerignore."""

NEVER = frozenset(
    (
        ".git",
        ".hg",
        ".svn",
        "__pycache__",
        ".venv",
        ".tox",
        ".nox",
        ".ipynb_checkpoints",
        ".idea",
        ".vscode",
        ".mypy_cache",
        ".pytest_cache",
        ".ruff_cache",
        ".cache",
        ".DS_Store",
        INSTALLED_FILE,
        *IGNORE_FILES,
    )
)
"""Names that no program needs: history, environments and caches of this machine."""

SECRET_NAME = re.compile(
    r"(?:.*/)?(?:\.env(?:\.(?!example$|sample$|template$)[^/]+)?|\.envrc|id_(?:rsa|dsa|ecdsa|ed25519)|\.netrc|\.pgpass"
    r"|[^/]+\.(?:p12|pfx|jks|keystore|ppk))|(?:.*/)?\.(?:aws|ssh|gnupg)/.+"
)
"""Names of files that are made to hold secrets; any other file is judged by its content."""

TOKENS = {
    "Hugging Face token": rb"\bhf_[A-Za-z0-9]{30,}\b",
    "GitHub token": rb"\b(?:gh[pousr]_[A-Za-z0-9]{36}|github_pat_\w{40,})",
    "GitLab token": rb"\bglpat-[A-Za-z0-9_-]{20,}",
    "OpenAI key": rb"\bsk-(?:proj-|svcacct-)?[A-Za-z0-9_-]{40,}",
    "Slack token": rb"\bxox[abprs]-[A-Za-z0-9-]{20,}",
    "Weights & Biases key": rb"WANDB_API_KEY['\"\]]*\s*[:=]\s*['\"]?[0-9a-f]{40}\b",
}
"""Patterns of keys in code, beside those that no layer of an image may have."""

LARGEST_BYTES = 1_000_000_000
"""Larger folders hold a data set or a model, which a job gets as a channel."""

_SHOWN = 8
_TOKENS = tuple((kind, re.compile(pattern)) for kind, pattern in TOKENS.items())


@dataclass(frozen=True, kw_only=True)
class SourceTree:
    """A folder of code as it goes into an image.

    Attributes:
        files: The files, sorted by path.
        left_out: Paths that stay outside; a folder ends in a slash.
        problems: Reasons to refuse the folder.
    """

    files: tuple[SourceFile, ...] = ()
    left_out: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(len(file.content) for file in self.files)


@dataclass
class _Paths:
    """Paths below a folder of code.

    Attributes:
        copied: Files that go into the image.
        left_out: Paths that stay outside; a folder ends in a slash.
        problems: Links to folders.
    """

    copied: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def _list_files(folder: Path, ignored: Iterable[str]) -> _Paths:
    """Sort the paths of a folder into those to copy and those to leave out, with problems.

    Args:
        folder: The root of the code.
        ignored: Paths that are left out, besides those of the ignore files.
    """
    # The SDK's stubs ask for paths where it wants texts.
    matcher: Any = PatternMatcher(_patterns(folder))
    has_exceptions = _has_exceptions(matcher)
    paths = _Paths()
    for parent, folder_names, file_names in os.walk(folder):
        for name in sorted(folder_names):
            path = Path(parent, name)
            relative = path.relative_to(folder).as_posix()
            # A folder with an exception below is entered: its files are matched one by one.
            is_ignored = not has_exceptions and matcher.matches(relative)
            if name in NEVER or is_ignored:
                paths.left_out.append(f"{relative}/")
                folder_names.remove(name)
            elif path.is_symlink():
                paths.problems.append(
                    f"{relative} is a link to a folder: copy the folder, or ignore the link"
                )
                folder_names.remove(name)
        for name in file_names:
            relative = Path(parent, name).relative_to(folder).as_posix()
            if name in NEVER or relative in ignored or matcher.matches(relative):
                paths.left_out.append(relative)
            else:
                paths.copied.append(relative)
    return paths


def _read_files(folder: Path, paths: Iterable[str], problems: list[str]) -> list[SourceFile]:
    """Read files of the code; add a problem for each that cannot be taken."""
    files: list[SourceFile] = []
    total = 0
    for relative in paths:
        path = folder / relative
        problem = _problem_of(path, relative, folder)
        if problem:
            problems.append(problem)
            continue
        status = path.stat()
        total += status.st_size
        if total > LARGEST_BYTES:
            size = f"{LARGEST_BYTES / 1e6:,.0f} MB"
            problems.append(
                f"it has more than {size} (with {relative}): pass data to the job as a channel"
            )
            break
        try:
            content = path.read_bytes()
        except OSError as error:
            problems.append(f"{relative}: {error.strerror}")
            continue
        mode = 0o755 if status.st_mode & 0o100 else 0o644
        files.append(SourceFile(path=relative, content=content, mode=mode))
    return files


def _problem_of(path: Path, relative: str, folder: Path) -> str:
    """Return the reason why a file cannot be copied, or ``""``."""
    if not path.resolve().is_relative_to(folder.resolve()):
        return f"{relative} is a link that leads out of {folder}"
    if not path.is_file():
        state = "a broken link" if path.is_symlink() else "not a regular file"
        return f"{relative} is {state}"
    if SECRET_NAME.fullmatch(relative):
        return f"{relative} is a file that holds secrets"
    return ""


def read_source(
    folder: Path, *, name: str = "", ignored: Iterable[str] = (), forbidden: tuple[str, ...] = ()
) -> SourceTree:
    """Read the code that goes into an image.

    Args:
        folder: The root of the code.
        name: The name of the folder in messages; default: ``--source FOLDER``.
        ignored: Further paths that stay outside.
        forbidden: Literal strings that must not be in any image, such as this machine's proxy.

    Returns:
        The files, and the paths that were left out. Secrets, links that lead outside, special files
        and too many bytes are problems, reported all at once.
    """
    name = name or f"--source {folder}"
    if not folder.is_dir():
        state = "is not a folder" if folder.exists() else "does not exist"
        return SourceTree(problems=(f"{name} {state}",))
    paths = _list_files(folder, ignored)
    problems = paths.problems
    files = _read_files(folder, sorted(paths.copied), problems)
    problems += _secrets_in(files, forbidden)
    if not files and not problems:
        problems.append("no files to copy")
    return SourceTree(
        files=tuple(files),
        left_out=tuple(sorted(paths.left_out)),
        problems=tuple(f"{name}: {problem}" for problem in problems),
    )


def _patterns(folder: Path) -> list[str]:
    """Return the patterns of the first ignore file that exists."""
    for name in IGNORE_FILES:
        path = folder / name
        if not path.is_file():
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        lines = [line.strip() for line in text.splitlines()]
        return [line for line in lines if line and not line.startswith("#")]
    return []


def _has_exceptions(matcher: Any) -> bool:
    """Whether a file below an ignored folder may be copied.

    The matcher always has one exception, for its own file.
    """
    exceptions = [pattern for pattern in matcher.patterns if pattern.exclusion]
    return len(exceptions) > 1


def _secrets_in(files: Iterable[SourceFile], forbidden: tuple[str, ...]) -> list[str]:
    """Return secrets in these files, by the rules of the image tests and those for tokens."""
    files = list(files)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for file in files:
            member = tarfile.TarInfo(f"opt/ml/code/{file.path}")
            member.size = len(file.content)
            archive.addfile(member, io.BytesIO(file.content))
    buffer.seek(0)
    with tarfile.open(fileobj=buffer) as archive:
        findings = scan_layers([Layer(name="code", archive=archive)], forbidden)

    problems = [
        f"{finding.path.removeprefix('opt/ml/code/')}: {finding.rule}" for finding in findings
    ]
    for file in files:
        for kind, pattern in _TOKENS:
            if pattern.search(file.content):
                problems.append(f"{file.path}: {kind}")
    return problems


def some(paths: tuple[str, ...]) -> str:
    """Return the first paths, and how many more there are."""
    text = ", ".join(paths[:_SHOWN])
    if len(paths) > _SHOWN:
        text += f" and {len(paths) - _SHOWN} more"
    return text
