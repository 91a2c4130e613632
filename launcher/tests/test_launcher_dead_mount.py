"""A file that never answers is named, and does not keep the launcher for ever.

A FIFO without a writer blocks its reader, as a dead network file system does.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from launcher_support import write_inputs, write_manifest

from trainworks_launcher.contract.errors import RefusalError
from trainworks_launcher.environment.command_line import NOTHING_ASKED
from trainworks_launcher.environment.patience import read_patiently


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    write_inputs(tmp_path, "print()", {}, {})
    path = tmp_path / "image.json"
    os.mkfifo(path)
    return path


def variables(manifest: Path) -> dict[str, str]:
    base = str(manifest.parent)
    return {
        "SAGEMAKER_BASE_DIR": base,
        "TRAINWORKS_IMAGE_MANIFEST": str(manifest),
        "PATH": os.environ["PATH"],
    }


def test_a_file_that_never_answers_is_named(manifest: Path) -> None:
    with pytest.raises(RefusalError) as refused:
        read_patiently(variables(manifest), NOTHING_ASKED, lambda _: None, limit=1.0)
    assert f"the image's manifest {manifest} does not answer (file system tmpfs) within 1 s" in str(
        refused.value
    )
    os.close(os.open(manifest, os.O_WRONLY))  # the reader goes on, and ends
    for thread in threading.enumerate():
        if thread.name == "trainworks-look":
            thread.join()


def test_what_does_not_answer_is_said_long_before_the_limit(manifest: Path, tmp_path: Path) -> None:
    lines: list[str] = []

    def answer(line: str) -> None:
        lines.append(line)
        manifest.write_bytes(write_manifest(tmp_path / "other.json", {}).read_bytes())

    environment = read_patiently(variables(manifest), NOTHING_ASKED, answer)
    assert not environment.problems
    assert lines[0].startswith(
        f"still reading this host after 10 s: the image's manifest {manifest} does not answer"
    )
