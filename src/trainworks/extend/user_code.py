"""The user's code on this machine: what goes into an image, what stays outside,
and which secrets are refused.
"""

from __future__ import annotations

import io
import os
import re
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from docker.utils.build import PatternMatcher

from trainworks.engine.protocol import Layer
from trainworks.extend.plan import INSTALLED_FILE
from trainworks.facts.rows import SourceFile
from trainworks.imagetest.secrets import scan_layers

IGNORE_FILES = (".trainworksignore", ".dockerignore")
"""The first of these at the root of the code says what stays outside, in the
form of a .dockerignore.
"""

NEVER = frozenset(
    {
        *(
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
        ),
        *(
            ".mypy_cache",
            ".pytest_cache",
            ".ruff_cache",
            ".cache",
            ".DS_Store",
            INSTALLED_FILE,
            *IGNORE_FILES,
        ),
    }
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
"""Forms of keys that people write into their code, beside those that no layer
of an image may have.
"""

LARGEST_BYTES = 1_000_000_000
"""Larger folders hold a data set or a model, which a job gets as a channel."""

_SHOWN = 8
_TOKENS = tuple((what, re.compile(form)) for what, form in TOKENS.items())


@dataclass(frozen=True, kw_only=True)
class SourceTree:
    """A folder of code as it goes into an image.

    Attributes:
        files: The files, sorted by path.
        left_out: Paths that stay outside; a folder ends in a slash.
        problems: Why it cannot be taken as it is.
    """

    files: tuple[SourceFile, ...] = ()
    left_out: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(len(file.content) for file in self.files)


def read_source(
    folder: Path, *, name: str = "", ignored: Iterable[str] = (), forbidden: tuple[str, ...] = ()
) -> SourceTree:
    """Read the code that goes into an image.

    Args:
        folder: Its root.
        name: What messages call it; default: ``--source FOLDER``.
        ignored: Further paths that stay outside.
        forbidden: Literal strings that must not be in any image, such as this machine's proxy.

    Returns:
        The files, and what was left out. Secrets, links that lead outside, special files and too
        many bytes are problems, reported all at once.
    """
    name = name or f"--source {folder}"
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        return SourceTree(problems=(f"{name} {what}",))
    # The SDK's stubs ask for paths where it wants texts.
    matcher: Any = PatternMatcher(_patterns(folder))
    paths: list[str] = []
    left_out: list[str] = []
    problems: list[str] = []
    for parent, folders, names in os.walk(folder):
        for each in sorted(folders):
            relative = _relative(Path(parent, each), folder)
            if each in NEVER or (matcher.matches(relative) and not _has_exceptions(matcher)):
                left_out.append(f"{relative}/")
                folders.remove(each)
            elif Path(parent, each).is_symlink():
                problems.append(
                    f"{relative} is a link to a folder: copy the folder, or ignore the link"
                )
                folders.remove(each)
        for each in names:
            relative = _relative(Path(parent, each), folder)
            if each in NEVER or relative in ignored or matcher.matches(relative):
                left_out.append(relative)
            else:
                paths.append(relative)
    files: list[SourceFile] = []
    total = 0
    root = folder.resolve()
    for relative in sorted(paths):
        path = folder / relative
        if not path.resolve().is_relative_to(root):
            problems.append(f"{relative} is a link that leads out of {folder}")
        elif not path.is_file():
            problems.append(
                f"{relative} is {'a broken link' if path.is_symlink() else 'not a regular file'}"
            )
        elif SECRET_NAME.fullmatch(relative):
            problems.append(f"{relative} is a file that holds secrets")
        else:
            total += path.stat().st_size
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
            mode = 0o755 if path.stat().st_mode & 0o100 else 0o644
            files.append(SourceFile(path=relative, content=content, mode=mode))
    problems += _secrets_in(files, forbidden)
    if not files and not problems:
        problems.append("no files to copy")
    return SourceTree(
        files=tuple(files),
        left_out=tuple(sorted(left_out)),
        problems=tuple(f"{name}: {problem}" for problem in problems),
    )


def _relative(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix()


def _patterns(folder: Path) -> list[str]:
    for name in IGNORE_FILES:
        path = folder / name
        if path.is_file():
            lines = (
                line.strip()
                for line in path.read_text(encoding="utf-8", errors="replace").splitlines()
            )
            return [line for line in lines if line and not line.startswith("#")]
    return []


def _has_exceptions(matcher: Any) -> bool:
    """Whether a file below an ignored folder may be wanted: the matcher has an
    exception for its own file, always.
    """
    return len([pattern for pattern in matcher.patterns if pattern.exclusion]) > 1


def _secrets_in(files: Iterable[SourceFile], forbidden: tuple[str, ...]) -> list[str]:
    """Return what the image tests would find in these files: the same rules, before the build
    instead of after it.
    """
    files = list(files)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for file in files:
            member = tarfile.TarInfo(f"opt/ml/code/{file.path}")
            member.size = len(file.content)
            archive.addfile(member, io.BytesIO(file.content))
    buffer.seek(0)
    with tarfile.open(fileobj=buffer) as archive:
        found = scan_layers([Layer(name="code", archive=archive)], forbidden)
    tokens = [
        f"{file.path}: {what}"
        for file in files
        for what, form in _TOKENS
        if form.search(file.content)
    ]
    return [
        *(f"{finding.path.removeprefix('opt/ml/code/')}: {finding.rule}" for finding in found),
        *tokens,
    ]


def some(paths: tuple[str, ...]) -> str:
    """Return the first paths, and how many more there are."""
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    return ", ".join(paths[:_SHOWN]) + more
