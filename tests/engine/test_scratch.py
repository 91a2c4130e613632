"""Folders that may hold passwords: gone when their process ends, and where it
was killed, gone with the next one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from trainworks.engine.temporary_folders import YOUNG, private_folder

HOLD = """
import sys
from trainworks.engine.temporary_folders import private_folder
with private_folder(sys.argv[1]) as folder:
    (folder / "netrc").write_text("machine index.example password hidden")
    print(folder, flush=True)
    sys.stdin.read()
"""


def hold(parent: Path) -> tuple[subprocess.Popen[str], Path]:
    """Start a process that has a private folder.

    Return the process, and the folder, as old as one of a long build.
    """
    process = subprocess.Popen(
        (sys.executable, "-c", HOLD, str(parent)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    folder = Path(process.stdout.readline().strip())
    assert (folder / "netrc").is_file()
    before = time.time() - YOUNG - 10
    os.utime(folder, (before, before))
    return process, folder


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_what_a_killed_process_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    process, folder = hold(tmp_path)
    end(process)
    assert folder.is_dir(), "nobody was there to remove it"
    with private_folder(str(tmp_path)) as mine:
        assert list(tmp_path.iterdir()) == [mine]
    assert list(tmp_path.iterdir()) == []


def test_what_a_living_process_has_stays(tmp_path: Path) -> None:
    process, folder = hold(tmp_path)
    try:
        with private_folder(str(tmp_path)), private_folder(str(tmp_path)):
            assert (folder / "netrc").is_file()
    finally:
        end(process)


def test_what_is_not_ours_or_young_stays(tmp_path: Path) -> None:
    for name in ("trainworks-private-young", "trainworks-push-old", "other"):
        (tmp_path / name).mkdir()
    os.utime(tmp_path / "trainworks-push-old", (0, 0))
    os.utime(tmp_path / "other", (0, 0))
    (tmp_path / "trainworks-private-file").write_text("")
    os.utime(tmp_path / "trainworks-private-file", (0, 0))
    with private_folder(str(tmp_path)):
        assert len(list(tmp_path.iterdir())) == 5
