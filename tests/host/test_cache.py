"""Files of the user's cache: complete or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainworks.host.cache import cache_folder, write_cached


def test_a_file_of_the_cache_is_replaced(tmp_path: Path) -> None:
    path = cache_folder({"XDG_CACHE_HOME": str(tmp_path)}, "pushes", "a.json")
    for content in (b"old", b"new"):
        write_cached(path, content)
        assert path.read_bytes() == content
    assert list(path.parent.iterdir()) == [path]


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.json" / "in the way").mkdir(parents=True)
    with pytest.raises(OSError, match=r"a\.json"):
        write_cached(tmp_path / "a.json", b"{}")
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
