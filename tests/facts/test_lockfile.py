"""Test the format of locks: a written lock is read back as it was, and the committed files are as
they would be written.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainworks.errors import OutputError
from trainworks.facts import lockfile
from trainworks.facts.reader import Reader
from trainworks.facts.rows import (
    Facts,
    LockedArchive,
    LockedArtifact,
    LockedBaseImage,
    LockedPackage,
)

NAMES = st.from_regex(r"[a-z0-9]+(-[a-z0-9]+)*", fullmatch=True)
PACKAGES = st.builds(
    lambda *, end, **keys: LockedPackage(
        file=f"{keys['name'].replace('-', '_')}-{keys['version']}{end}", **keys
    ),
    name=NAMES,
    version=st.from_regex(r"[0-9]+(\.[0-9]+)*(\+cu[0-9]+)?", fullmatch=True),
    end=st.sampled_from(("-py3-none-any.whl", ".tar.gz")),
    sha256=st.from_regex(r"[1-9a-f][0-9a-f]{63}", fullmatch=True),
    size=st.integers(min_value=0, max_value=2**40),
    requires=st.lists(NAMES, max_size=3).map(tuple),
    build=st.booleans(),
)


@settings(max_examples=15, deadline=None)
@given(
    packages=st.lists(
        PACKAGES,
        min_size=1,
        max_size=5,
        unique_by=(lambda row: (row.name, row.build), lambda row: row.sha256),
    )
)
def test_what_is_written_is_what_is_read(
    packages: list[LockedPackage], tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("root")
    (root / "images").mkdir()
    lockfile.write(lockfile.lock_path(root, "target"), lockfile.as_toml(LockedPackage, packages))
    reader = Reader(root / "images")
    locks = lockfile.read_locks(reader, root / "images")
    assert reader.problems == []
    assert locks["target"].packages == tuple(packages)


EDITS = (
    ("size = 1", "size = 1 # more", ""),
    ('name = "b"', 'name = "b"\nbuild = false', ""),
    ('name = "b"', 'name = "B"', "key 'name': 'B' is not a normalised name"),
    ('version = "2"', 'version = "2 "', "key 'version': '2 ' is not a version"),
    ("size = 1", "size = -1", "key 'size': -1 is negative"),
    ("size = 1", 'size = "1"', "key 'size': must be an integer, got '1'"),
    ("size = 1", "sise = 1", "unknown key 'sise'"),
    ("build = true", "build = true\n[more]", "unknown key 'more'"),
    ('["b"]', '["b", "c d"]', "key 'requires.1': 'c d' is not a normalised name"),
    ('name = "b"', 'name = "a"', "package 'a' is in two rows"),
)


@pytest.mark.parametrize(("old", "new", "message"), EDITS)
def test_an_edited_lock_is_read_as_toml(old: str, new: str, message: str, tmp_path: Path) -> None:
    packages = (
        LockedPackage(name="a", version="1", file="a.whl", sha256="1" * 64, requires=("b",)),
        LockedPackage(name="b", version="2", file="b.whl", sha256="2" * 64, size=1),
        LockedPackage(name="c", version="3", file="c.whl", sha256="3" * 64, build=True),
    )
    text = lockfile.as_toml(LockedPackage, packages)
    assert text.count(old) == 1
    (tmp_path / "images").mkdir()
    lockfile.write(lockfile.lock_path(tmp_path, "target"), text.replace(old, new))
    reader = Reader(tmp_path / "images")
    lock = lockfile.read_locks(reader, tmp_path / "images")["target"]
    if message:
        (problem,) = reader.problems
        assert problem.startswith("images/lock/target.toml: ")
        assert message in problem
    else:
        assert (lock.packages, reader.problems) == (packages, [])


def test_the_committed_locks_are_as_they_would_be_written(facts: Facts, root: Path) -> None:
    folder = root / "images" / lockfile.LOCK
    for name, lock in facts.locks.items():
        text = lockfile.lock_path(root, name).read_text(encoding="utf-8")
        assert text == lockfile.as_toml(LockedPackage, lock.packages), name
    for name, row_type, rows in (
        (lockfile.ARTIFACTS, LockedArtifact, facts.locked_artifacts),
        (lockfile.BASE_IMAGES, LockedBaseImage, facts.locked_base_images),
        (lockfile.ARCHIVES, LockedArchive, facts.locked_archives),
    ):
        if rows:
            assert (folder / name).read_text(encoding="utf-8") == lockfile.as_toml(row_type, rows)


def test_a_write_that_fails_leaves_no_part(tmp_path: Path) -> None:
    (tmp_path / "target.toml" / "in the way").mkdir(parents=True)
    with pytest.raises(OutputError, match=r"target\.toml cannot be written"):
        lockfile.write(tmp_path / "target.toml", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["target.toml"]
