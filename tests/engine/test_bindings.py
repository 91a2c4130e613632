"""Test the keys of steps with mounts: a key changes exactly when the mounted files change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from trainworks.engine.mount_cache_keys import ARGUMENT, content_hash, with_content_keys
from trainworks.errors import BuildError

DOCKERFILE = """\
# a comment
FROM base:1 AS made
COPY files/a /a
RUN make

FROM made AS used
RUN --mount=type=bind,source=files/a,target=/m \\
    # in between
    --mount=type=cache,target=/c \\
    cat /m
FROM base:1
RUN --mount=type=bind,source=files/b,target=/m cat /m
RUN --mount=type=secret,id=x true
"""


def context(folder: Path) -> Path:
    (folder / "files" / "b" / "deep").mkdir(parents=True)
    (folder / "files" / "a").write_text("a")
    (folder / "files" / "b" / "deep" / "b").write_text("b")
    return folder


def keys(dockerfile: str, folder: Path, image: str = "sha256:1") -> list[str]:
    text = with_content_keys(dockerfile, folder, identify=lambda _: image)
    return [
        line.partition("=")[2] for line in text.splitlines() if line.startswith(f"ARG {ARGUMENT}=")
    ]


def test_only_steps_that_mount_files_get_a_key_and_the_rest_stays(tmp_path: Path) -> None:
    text = with_content_keys(DOCKERFILE, context(tmp_path), identify=lambda _: "sha256:1")
    lines = text.splitlines()
    assert [line for line in lines if not line.startswith("ARG ")] == DOCKERFILE.splitlines()
    following = [lines[number + 1] for number, line in enumerate(lines) if line.startswith("ARG ")]
    assert [line[:40] for line in following] == [
        "RUN --mount=type=bind,source=files/a,tar",
        "RUN --mount=type=bind,source=files/b,tar",
    ]


def test_a_file_without_mounts_is_unchanged(tmp_path: Path) -> None:
    text = "FROM x\nRUN true\n"
    assert with_content_keys(text, tmp_path, identify=lambda _: "") == text


def test_the_same_content_gives_the_same_keys_anywhere(tmp_path: Path) -> None:
    assert keys(DOCKERFILE, context(tmp_path / "one")) == keys(
        DOCKERFILE, context(tmp_path / "two")
    )


def write_b(folder: Path) -> None:
    (folder / "files" / "b" / "deep" / "b").write_text("other")


def write_a(folder: Path) -> None:
    (folder / "files" / "a").write_text("other")


def make_executable(folder: Path) -> None:
    (folder / "files" / "b" / "deep" / "b").chmod(0o755)


def rename(folder: Path) -> None:
    (folder / "files" / "b" / "deep").rename(folder / "files" / "b" / "shallow")


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        (write_b, (False, True)),
        (write_a, (True, False)),
        (make_executable, (False, True)),
        (rename, (False, True)),
    ],
)
def test_a_change_changes_the_keys_that_depend_on_it(
    tmp_path: Path, change: Callable[[Path], None], changed: tuple[bool, bool]
) -> None:
    before = keys(DOCKERFILE, context(tmp_path))
    change(tmp_path)
    after = keys(DOCKERFILE, tmp_path)
    assert tuple(old != new for old, new in zip(before, after, strict=True)) == changed


def test_a_mounted_image_counts_by_its_identifier(tmp_path: Path) -> None:
    dockerfile = "FROM base:1\nRUN --mount=from=tools:1,target=/m /m/tool\n"
    first, second = (keys(dockerfile, tmp_path, image=image) for image in ("sha256:1", "sha256:2"))
    assert len(first) == 1
    assert first != second


@pytest.mark.parametrize("stage", ["made", "Made", "0"])
def test_a_mounted_stage_is_refused_with_the_way_out(tmp_path: Path, stage: str) -> None:
    dockerfile = (
        f"FROM base:1 AS made\nFROM base:1\nRUN --mount=type=bind,from={stage},target=/m true\n"
    )
    with pytest.raises(
        BuildError, match=f"line 3 of the Dockerfile mounts the stage {stage}"
    ) as caught:
        keys(dockerfile, tmp_path)
    assert f"COPY --from={stage}" in caught.value.hint


def test_links_are_hashed_as_links(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "link").symlink_to("/nonexistent")
    first = content_hash(tmp_path / "folder")
    (tmp_path / "folder" / "link").unlink()
    (tmp_path / "folder" / "link").symlink_to("/elsewhere")
    assert content_hash(tmp_path / "folder") != first
