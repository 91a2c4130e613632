"""The directories that a script is told to write to: there and writable before it starts, or the job is refused."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from launcher_support import LAUNCHER, TIME_OUT

from trainworks_launcher.contract.errors import RefusalError
from trainworks_launcher.given import places
from trainworks_launcher.given.environment import read_environment
from trainworks_launcher.given.invocation import Invocation

SAVE = """
import os
for name in ("SM_MODEL_DIR", "SM_OUTPUT_DIR", "SM_OUTPUT_DATA_DIR", "SM_OUTPUT_INTERMEDIATE_DIR"):
    with open(os.path.join(os.environ[name], "of_the_script"), "w") as opened:
        opened.write("saved")
os.makedirs(os.path.expanduser("~/.cache/huggingface"), exist_ok=True)
print("caches in", os.path.expanduser("~"))
"""
STRANGER = 1000770000
"""A user without an account, as OpenShift and ``docker run --user`` give."""
PYTHON = "/usr/bin/python3"

as_root = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("setpriv") or not Path(PYTHON).exists(), reason="needs root, setpriv, Python"
)


@pytest.fixture
def room() -> Iterator[Path]:
    """A directory that every user can enter, with a copy of the launcher: pytest's own are for one user."""
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        directory.chmod(0o755)
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(LAUNCHER / "trainworks_launcher", directory / "lib/trainworks_launcher", ignore=ignored)
        yield directory


def train(
    room: Path, where: Path, variables: Mapping[str, str] | None = None, user: int = STRANGER, program: str = "train.py"
) -> subprocess.CompletedProcess[str]:
    """``train -- train.py`` in a directory, as another user."""
    (room / "tmp").mkdir(exist_ok=True)
    (room / "tmp").chmod(0o1777)
    given = {"PATH": "/usr/bin:/bin", "HOME": "/", "TMPDIR": str(room / "tmp"), "PYTHONDONTWRITEBYTECODE": "1"}
    words = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", PYTHON, "-IS"]
    words += [str(room / "lib/trainworks_launcher/__main__.py"), "train", "--", program]
    return subprocess.run(
        words, cwd=where, env={**given, **(variables or {})}, capture_output=True, text=True, timeout=TIME_OUT
    )


def work(room: Path, mode: int) -> Path:
    """A working directory with the script."""
    made = room / "work"
    made.mkdir()
    (made / "train.py").write_text(SAVE, encoding="utf-8")
    made.chmod(mode)
    return made


@as_root
@pytest.mark.parametrize("slurm", [False, True])
def test_another_user_can_save_the_model(room: Path, slurm: bool) -> None:
    where = work(room, 0o777)
    step = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURMD_NODENAME": "n1"} if slurm else {}
    ended = train(room, where, step)
    assert ended.returncode == 0, ended.stderr
    assert len(list(where.rglob("of_the_script"))) == 4
    home = room / "tmp" / f"trainworks-home-{STRANGER}"
    assert f"caches in {home}" in ended.stdout
    assert home.stat().st_mode & 0o777 == 0o700
    assert f"HOME=/ cannot be used (user {STRANGER} may not write into /)" in ended.stderr


@as_root
def test_a_place_that_cannot_be_written_refuses_the_job_before_it_starts(room: Path) -> None:
    where = work(room, 0o755)
    before = sorted(room.rglob("*"))
    ended = train(room, where)
    assert ended.returncode == 64
    assert "caches in" not in ended.stdout
    assert "nothing can be written to SM_MODEL_DIR, SM_OUTPUT_DIR, SM_OUTPUT_DATA_DIR" in ended.stderr
    assert f"user {STRANGER} may not write into {where}" in ended.stderr
    assert "SAGEMAKER_BASE_DIR" in ended.stderr
    assert [path for path in sorted(room.rglob("*")) if path not in before and path.name != "tmp"] == []


@as_root
def test_two_jobs_of_one_directory_keep_their_failures_apart(room: Path) -> None:
    """As of an array: the same directory, the same user, one job after the other."""
    where = work(room, 0o777)
    for number, words in (("72", "cause_of_A"), ("76", "cause_of_B")):
        (where / "train.py").write_text(f"raise ValueError({words!r})", encoding="utf-8")
        ended = train(room, where, {"SLURM_JOB_ID": number, "SLURM_JOB_NUM_NODES": "1", "SLURMD_NODENAME": "n1"})
        assert ended.returncode == 1, ended.stderr
        assert words in ended.stderr.splitlines()[-1]
    for number, words in (("72", "cause_of_A"), ("76", "cause_of_B")):
        failure = (where / "output" / number / "output/failure").read_text(encoding="utf-8")
        assert failure.startswith(f"ValueError: {words}")


@as_root
def test_a_home_that_somebody_else_prepared_is_not_taken(room: Path) -> None:
    """Its name can be guessed, and what is read from a cache may be run."""
    where = work(room, 0o777)
    trap = room / "tmp" / f"trainworks-home-{STRANGER}"
    trap.mkdir(parents=True)
    trap.chmod(0o777)
    ended = train(room, where, {"TMPDIR": str(room / "tmp")})
    assert ended.returncode == 0, ended.stderr
    assert f"caches in {trap}" not in ended.stdout
    shutil.rmtree(f"/tmp/trainworks-home-{STRANGER}", ignore_errors=True)  # the next place in the order


@as_root
@pytest.mark.parametrize(("home", "kept"), [("mine", True), ("not/there/yet", True), ("/proc/self", False)])
def test_a_home_that_can_be_written_is_kept(room: Path, home: str, kept: bool) -> None:
    where = work(room, 0o777)
    (where / "mine").mkdir(mode=0o777)
    (where / "mine").chmod(0o777)
    ended = train(room, where, {"HOME": str(where / home)})
    assert ended.returncode == 0, ended.stderr
    assert (f"caches in {where / home}" in ended.stdout) is kept
    assert ("HOME=" in ended.stderr) is not kept


def test_a_directory_that_a_person_names_is_made_and_is_judged_the_same_the_second_time(room: Path) -> None:
    where = work(room, 0o777)
    named = {"SAGEMAKER_BASE_DIR": str(where / "out")}
    refused = [train(room, where, named, 0, "trian.py") for _ in range(2)]
    assert [ended.returncode for ended in refused] == [64, 64]
    assert refused[0].stderr == refused[1].stderr
    assert [path.name for path in where.iterdir()] == ["train.py"], "a refusal leaves nothing behind"
    ended = train(room, where, named, 0)
    assert ended.returncode == 0, ended.stderr
    assert (where / "out/model/of_the_script").is_file()


def test_a_refusal_in_a_working_directory_leaves_it_as_it_is(room: Path) -> None:
    where = work(room, 0o777)
    ended = train(room, where, user=0, program="trian.py")
    assert ended.returncode == 64
    assert [path.name for path in where.iterdir()] == ["train.py"]


@pytest.mark.parametrize(
    ("make", "path", "words"),
    [
        (lambda base: (base / "model").write_text(""), "model", "model is not a directory"),
        (lambda base: (base / "model").write_text(""), "model/in/it", "model is not a directory"),
        (lambda base: (base / "model").symlink_to("nowhere"), "model", "is a link that leads nowhere"),
        (lambda base: (base / "model").mkdir(), "model", ""),
        (lambda _: None, "a/b/c", ""),
    ],
)
def test_why_a_place_cannot_be_written(tmp_path: Path, make: object, path: str, words: str) -> None:
    assert callable(make)
    make(tmp_path)
    said = places.why_not_writable(str(tmp_path / path))
    assert (words in said) if words else said == ""


def test_what_was_made_for_a_job_that_is_refused_goes_again(tmp_path: Path) -> None:
    made = places.make({"A": str(tmp_path / "a/b"), "C": str(tmp_path / "c")})
    assert [Path(path).name for path in made] == ["a", "b", "c"]
    (tmp_path / "c/kept").touch()
    places.take_back(made)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    (tmp_path / "file").touch()
    with pytest.raises(RefusalError, match=r"nothing can be written to F: .*file is not a directory"):
        places.make({"D": str(tmp_path / "d/e"), "F": str(tmp_path / "file/f")})
    with pytest.raises(RefusalError, match="nothing can be written to /proc/self/fd/none: "):
        places.make({"D": str(tmp_path / "d/e"), "F": "/proc/self/fd/none"})
    assert not (tmp_path / "d").exists()


def test_a_checkpoint_directory_is_made_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    given = {"PATH": "/usr/bin:/bin", "SAGEMAKER_BASE_DIR": str(tmp_path / "base")}
    named = {**given, "TRAINWORKS_CHECKPOINT_DIRECTORY": str(tmp_path / "checkpoints")}
    found = read_environment(named, Invocation(("train.py",)))
    assert found.problems == ()
    assert found.places["TRAINWORKS_CHECKPOINT_DIRECTORY"] == str(tmp_path / "checkpoints")
    file = {**given, "TRAINWORKS_CHECKPOINT_DIRECTORY": str(tmp_path / "train.py")}
    (problem,) = places.problems_of(read_environment(file, Invocation(("train.py",))).places)
    assert "train.py is not a directory" in problem.what
    assert "set TRAINWORKS_CHECKPOINT_DIRECTORY" in problem.advice
