"""The directories that a script is told to write to: there and writable before
it starts, or the job is refused.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from launcher_support import LAUNCHER, TIME_OUT, Launcher, write_inputs

from trainworks_launcher.contract.errors import RefusalError
from trainworks_launcher.environment import directories
from trainworks_launcher.environment.command_line import Invocation
from trainworks_launcher.environment.environment import read_environment
from trainworks_testing.ports import free_port

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
    os.geteuid() != 0 or not shutil.which("setpriv") or not Path(PYTHON).exists(),
    reason="needs root, setpriv, Python",
)


@pytest.fixture
def room() -> Iterator[Path]:
    """A directory that every user can enter, with a copy of the launcher:
    pytest's own are for one user.
    """
    with tempfile.TemporaryDirectory() as folder_name:
        directory = Path(folder_name)
        directory.chmod(0o755)
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(
            LAUNCHER / "trainworks_launcher", directory / "lib/trainworks_launcher", ignore=ignored
        )
        yield directory


def train(
    room: Path,
    where: Path,
    variables: Mapping[str, str] | None = None,
    user: int = STRANGER,
    program: str = "train.py",
    limits: tuple[str, ...] = (),
) -> subprocess.CompletedProcess[str]:
    """``train -- train.py`` in a directory, as another user."""
    (room / "tmp").mkdir(exist_ok=True)
    (room / "tmp").chmod(0o1777)
    host_variables = {
        "PATH": "/usr/bin:/bin",
        "HOME": "/",
        "TMPDIR": str(room / "tmp"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    words = [
        "setpriv",
        f"--reuid={user}",
        f"--regid={user}",
        "--clear-groups",
        *limits,
        PYTHON,
        "-IS",
    ]
    words += [str(room / "lib/trainworks_launcher/__main__.py"), "train", "--", program]
    return subprocess.run(
        words,
        cwd=where,
        env={**host_variables, **(variables or {})},
        capture_output=True,
        text=True,
        timeout=TIME_OUT,
    )


def work(room: Path, mode: int) -> Path:
    """A working directory with the script."""
    work_folder = room / "work"
    work_folder.mkdir()
    (work_folder / "train.py").write_text(SAVE, encoding="utf-8")
    work_folder.chmod(mode)
    return work_folder


@as_root
@pytest.mark.parametrize("slurm", [False, True])
def test_another_user_can_save_the_model(room: Path, slurm: bool) -> None:
    where = work(room, 0o777)
    step = (
        {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURMD_NODENAME": "n1"} if slurm else {}
    )
    result = train(room, where, step)
    assert result.returncode == 0, result.stderr
    assert len(list(where.rglob("of_the_script"))) == 4
    home = room / "tmp" / f"trainworks-home-{STRANGER}"
    assert f"caches in {home}" in result.stdout
    assert home.stat().st_mode & 0o777 == 0o700
    assert f"HOME=/ cannot be used (user {STRANGER} may not write into /)" in result.stderr


@as_root
def test_a_user_who_may_not_start_threads_is_told_the_limit(room: Path) -> None:
    result = train(room, work(room, 0o777), limits=("prlimit", "--nproc=1"))
    assert result.returncode == 70
    assert "Traceback" not in result.stderr
    assert (
        f"trainworks: cannot start the job: this container may not start threads: user {STRANGER}"
        " may have 1 processes and threads (ulimit -u) (can't start new thread); raise that limit"
        in result.stderr.splitlines()
    )


@as_root
@pytest.mark.parametrize("limited", [0, 1])
def test_a_host_that_may_not_start_threads_tells_the_others(room: Path, limited: int) -> None:
    """End the other hosts before the join limit."""
    hosts = ("127.0.0.1", "127.0.0.2")
    for host in hosts:
        (room / host).mkdir()
    shared = {"TRAINWORKS_HOSTS": ",".join(hosts), "TRAINWORKS_CONTROL_PORT": str(free_port())}
    with ThreadPoolExecutor() as pool:
        ends = [
            pool.submit(
                train,
                room,
                work(room / host, 0o777),
                {**shared, "TRAINWORKS_HOST": host},
                user=STRANGER + number,
                limits=("prlimit", "--nproc=1") if number == limited else (),
            )
            for number, host in enumerate(hosts)
        ]
        results = [end.result() for end in ends]
    assert [end.returncode for end in results] == [70, 70], results[0].stderr + results[1].stderr
    for end in results:
        assert "this container may not start threads" in end.stderr
        assert f"user {STRANGER + limited} may have 1 processes" in end.stderr


COMPILE = """
import os, subprocess, tempfile
made = os.path.join(tempfile.gettempdir(), "compiled-for-a-test.sh")
with open(made, "w") as opened:
    opened.write("#!/bin/sh\\necho executed\\n")
os.chmod(made, 0o755)
subprocess.run([made], check=True)
"""
NO_EXEC = (
    "set -e; for place in {}; do mount --bind $place $place;"
    " mount -o remount,bind,noexec $place; done; "
)


@as_root
@pytest.mark.parametrize(
    ("places", "status", "words"),
    [
        ("/tmp", 0, "the job's processes get TMPDIR=/var/tmp"),
        ("/tmp /var/tmp /dev/shm", 1, "--tmpfs /tmp:exec"),
    ],
)
def test_a_temporary_directory_without_execution_is_told(
    tmp_path: Path, places: str, status: int, words: str
) -> None:
    """Docker mounts ``--tmpfs /tmp`` so; torch.compile failed there after minutes."""
    write_inputs(tmp_path, COMPILE, {}, {})
    begin = NO_EXEC.format(places) + 'unset TMPDIR TEMP TMP; exec "$@"'
    with Launcher(tmp_path, prefix=("unshare", "--mount", "sh", "-c", begin, "sh")) as launcher:
        assert launcher.wait() == status, launcher.text
    assert "files in /tmp cannot be executed (it is mounted noexec)" in launcher.text
    assert words in launcher.text
    assert ("\nexecuted\n" in launcher.text) is (status == 0)


def test_a_temporary_directory_with_a_long_name_is_told_and_another_one_taken(
    tmp_path: Path,
) -> None:
    """A socket in the directory has a path that the kernel refuses: multiprocessing makes them, and
    so do data loaders.
    """
    long = tmp_path / ("x" * 80)
    long.mkdir()
    script = """
        import multiprocessing.connection, os, tempfile

        multiprocessing.connection.Listener(family="AF_UNIX").close()
        below = os.path.dirname(os.environ["TRAINWORKS_RUNTIME_DIRECTORY"])
        print("with", os.environ["TMPDIR"], "below", below)
    """
    write_inputs(tmp_path, textwrap.dedent(script), {}, {})
    with Launcher(tmp_path, variables={"TMPDIR": str(long)}) as launcher:
        assert launcher.wait() == 0, launcher.text
    message = f"the name of {long} is too long for the sockets that programs make in it"
    assert f"{message}: the job's processes get TMPDIR=/tmp" in launcher.text
    assert "\nwith /tmp below /tmp\n" in launcher.text


def test_a_locale_that_the_image_lacks_becomes_one_that_it_has(tmp_path: Path) -> None:
    script = (
        'import locale, os; locale.setlocale(locale.LC_ALL, ""); print("with", *map(os.getenv,'
        ' ("LANG", "LC_ALL")))'
    )
    write_inputs(tmp_path, script, {}, {})
    variables = {
        "LANG": "C.UTF-8",
        "LC_ALL": "xx_XX.UTF-8",
        "LC_TIME": "yy_YY.UTF-8",
        "LC_NAME": "",
    }
    with Launcher(tmp_path, variables=variables) as launcher:
        assert launcher.wait() == 0, launcher.text
    message = "the locale of LC_ALL=xx_XX.UTF-8, LC_TIME=yy_YY.UTF-8 is not installed"
    assert f"{message}: the job's processes get C.UTF-8" in launcher.text
    assert "\nwith C.UTF-8 C.UTF-8\n" in launcher.text


@as_root
def test_a_place_that_cannot_be_written_refuses_the_job_before_it_starts(room: Path) -> None:
    where = work(room, 0o755)
    before = sorted(room.rglob("*"))
    result = train(room, where)
    assert result.returncode == 64
    assert "caches in" not in result.stdout
    assert (
        "nothing can be written to SM_MODEL_DIR, SM_OUTPUT_DIR, SM_OUTPUT_DATA_DIR" in result.stderr
    )
    assert f"user {STRANGER} may not write into {where}" in result.stderr
    assert "SAGEMAKER_BASE_DIR" in result.stderr
    assert [
        path for path in sorted(room.rglob("*")) if path not in before and path.name != "tmp"
    ] == []


@as_root
def test_two_jobs_of_one_directory_keep_their_failures_apart(room: Path) -> None:
    """Run jobs of an array: the same directory, the same user, one job after the other."""
    where = work(room, 0o777)
    for number, words in (("72", "cause_of_A"), ("76", "cause_of_B")):
        (where / "train.py").write_text(f"raise ValueError({words!r})", encoding="utf-8")
        result = train(
            room,
            where,
            {"SLURM_JOB_ID": number, "SLURM_JOB_NUM_NODES": "1", "SLURMD_NODENAME": "n1"},
        )
        assert result.returncode == 1, result.stderr
        assert words in result.stderr.splitlines()[-1]
    for number, words in (("72", "cause_of_A"), ("76", "cause_of_B")):
        failure = (where / "output" / number / "output/failure").read_text(encoding="utf-8")
        assert failure.startswith(f"ValueError: {words}")


@as_root
def test_a_home_that_somebody_else_prepared_is_not_taken(room: Path) -> None:
    """Take no home whose name can be guessed: files that are read from a cache may be run."""
    where = work(room, 0o777)
    trap = room / "tmp" / f"trainworks-home-{STRANGER}"
    trap.mkdir(parents=True)
    trap.chmod(0o777)
    result = train(room, where, {"TMPDIR": str(room / "tmp")})
    assert result.returncode == 0, result.stderr
    assert f"caches in {trap}" not in result.stdout
    # The next place in the order.
    shutil.rmtree(f"/tmp/trainworks-home-{STRANGER}", ignore_errors=True)


@as_root
@pytest.mark.parametrize(
    ("home", "is_kept"), [("mine", True), ("not/there/yet", True), ("/proc/self", False)]
)
def test_a_home_that_can_be_written_is_kept(room: Path, home: str, is_kept: bool) -> None:
    where = work(room, 0o777)
    (where / "mine").mkdir(mode=0o777)
    (where / "mine").chmod(0o777)
    result = train(room, where, {"HOME": str(where / home)})
    assert result.returncode == 0, result.stderr
    assert (f"caches in {where / home}" in result.stdout) is is_kept
    assert ("HOME=" in result.stderr) is not is_kept


def test_a_directory_that_a_person_names_is_made_and_is_judged_the_same_the_second_time(
    room: Path,
) -> None:
    where = work(room, 0o777)
    named = {"SAGEMAKER_BASE_DIR": str(where / "out")}
    refused = [train(room, where, named, 0, "trian.py") for _ in range(2)]
    assert [result.returncode for result in refused] == [64, 64]
    # On a busy machine a line before the refusal says that the host's files are slow to answer.
    first, second = (result.stderr.splitlines()[-1] for result in refused)
    assert first == second
    assert [path.name for path in where.iterdir()] == ["train.py"], (
        "a refusal leaves nothing behind"
    )
    result = train(room, where, named, 0)
    assert result.returncode == 0, result.stderr
    assert (where / "out/model/of_the_script").is_file()


def test_a_refusal_in_a_working_directory_leaves_it_as_it_is(room: Path) -> None:
    where = work(room, 0o777)
    result = train(room, where, user=0, program="trian.py")
    assert result.returncode == 64
    assert [path.name for path in where.iterdir()] == ["train.py"]


@pytest.mark.parametrize(
    ("make", "path", "words"),
    [
        (lambda base: (base / "model").write_text(""), "model", "model is not a directory"),
        (lambda base: (base / "model").write_text(""), "model/in/it", "model is not a directory"),
        (
            lambda base: (base / "model").symlink_to("nowhere"),
            "model",
            "is a link whose target does not exist",
        ),
        (lambda base: (base / "model").mkdir(), "model", ""),
        (lambda _: None, "a/b/c", ""),
    ],
)
def test_why_a_place_cannot_be_written(tmp_path: Path, make: object, path: str, words: str) -> None:
    assert callable(make)
    make(tmp_path)
    reason = directories.why_not_writable(str(tmp_path / path))
    assert (words in reason) if words else reason == ""


def test_what_was_made_for_a_job_that_is_refused_goes_again(tmp_path: Path) -> None:
    made_directories = directories.make({"A": str(tmp_path / "a/b"), "C": str(tmp_path / "c")})
    assert [Path(path).name for path in made_directories] == ["a", "b", "c"]
    (tmp_path / "c/kept").touch()
    directories.take_back(made_directories)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    (tmp_path / "file").touch()
    with pytest.raises(
        RefusalError, match=r"nothing can be written to F: .*file is not a directory"
    ):
        directories.make({"D": str(tmp_path / "d/e"), "F": str(tmp_path / "file/f")})
    with pytest.raises(RefusalError, match="nothing can be written to /proc/self/fd/none: "):
        directories.make({"D": str(tmp_path / "d/e"), "F": "/proc/self/fd/none"})
    assert not (tmp_path / "d").exists()


def test_a_checkpoint_directory_is_made_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    variables = {"PATH": "/usr/bin:/bin", "SAGEMAKER_BASE_DIR": str(tmp_path / "base")}
    named = {**variables, "TRAINWORKS_CHECKPOINT_DIRECTORY": str(tmp_path / "checkpoints")}
    environment = read_environment(named, Invocation(("train.py",)))
    assert environment.problems == ()
    assert environment.places["TRAINWORKS_CHECKPOINT_DIRECTORY"] == str(tmp_path / "checkpoints")
    file = {**variables, "TRAINWORKS_CHECKPOINT_DIRECTORY": str(tmp_path / "train.py")}
    (problem,) = directories.find_problems(read_environment(file, Invocation(("train.py",))).places)
    assert "train.py is not a directory" in problem.what
    assert "set TRAINWORKS_CHECKPOINT_DIRECTORY" in problem.advice


# --- which places are kept ------------------------------------------------------------------------
DOCKER = """\
110 80 0:43 / / rw,relatime - overlay overlay rw,lowerdir=/a,upperdir=/b
111 110 0:46 / /proc rw - proc proc rw
112 110 0:47 / /dev rw - tmpfs tmpfs rw
131 112 0:51 / /dev/shm rw - tmpfs shm rw,size=65536k
133 110 254:0 /var/lib/docker/containers/5c/hostname /etc/hostname rw - ext4 /dev/vda rw
"""
HOST = "22 27 0:21 / /proc rw - proc proc rw\n27 1 254:0 / / rw - ext4 /dev/vda rw\n"
VOLUME = "0c1d" * 16


@pytest.mark.parametrize(
    ("table", "path", "is_kept"),
    [
        pytest.param(HOST, "/opt/ml/model", True, id="a host's own disk"),
        pytest.param("", "/opt/ml/model", True, id="no table: nothing is known"),
        pytest.param(DOCKER, "/opt/ml/model", False, id="the container's layers"),
        pytest.param(DOCKER, "/dev/shm/model", False, id="memory"),
        pytest.param(
            DOCKER + "140 110 254:0 /home/me /w rw - ext4 /dev/vda rw", "/w", True, id="bind mount"
        ),
        pytest.param(
            DOCKER + "140 110 254:0 /home/me /w rw - ext4 /dev/vda rw",
            "/w/a/b",
            True,
            id="below it",
        ),
        pytest.param(
            DOCKER + "140 110 254:0 /home/me /w rw - ext4 /dev/vda rw",
            "/work",
            False,
            id="beside it",
        ),
        pytest.param(
            DOCKER + "140 110 254:0 /m /opt/ml/model rw - ext4 /dev/vda rw",
            "/opt/ml/output",
            False,
            id="one",
        ),
        pytest.param(DOCKER + "140 110 0:60 / /w rw - nfs4 server:/home rw", "/w", True, id="NFS"),
        pytest.param(
            DOCKER + "140 110 0:60 / /w rw - fuse.s3fs s3fs rw", "/w", True, id="S3 by FUSE"
        ),
        pytest.param(
            DOCKER + "140 110 0:44 /builds/x /w rw - overlay overlay rw",
            "/w",
            True,
            id="engine in a container",
        ),
        pytest.param(
            DOCKER + "140 110 0:60 / /opt/ml rw - tmpfs tmpfs rw",
            "/opt/ml/model",
            False,
            id="--tmpfs",
        ),
        pytest.param(
            DOCKER + r"140 110 254:0 /m /my\040files rw - ext4 /dev/vda rw",
            "/my files",
            True,
            id="a blank",
        ),
        pytest.param(
            DOCKER
            + f"140 110 254:0 /var/lib/docker/volumes/{VOLUME}/_data /opt/ml rw - ext4 /dev/vda rw",
            *("/opt/ml/model", False),
            id="a volume without a name, which --rm removes",
        ),
        pytest.param(
            DOCKER
            + "140 110 254:0 /var/lib/docker/volumes/mine/_data /opt/ml rw - ext4 /dev/vda rw",
            *("/opt/ml/model", True),
            id="a volume with a name",
        ),
        pytest.param(
            DOCKER + "140 110 8:1 /pods/6f/volumes/kubernetes.io~empty-dir/scratch /opt/ml rw - xfs"
            " /dev/sda1 rw",
            *("/opt/ml/model", False),
            id="an emptyDir",
        ),
        pytest.param(
            DOCKER
            + "140 110 254:0 /m /opt/ml/model rw - ext4 /dev/vda rw\n141 110 0:60 / /opt/ml rw -"
            " tmpfs x rw",
            *("/opt/ml/model", False),
            id="a mount that another one hides",
        ),
        pytest.param(
            DOCKER + "140 110 0:60 / /w rw - tmpfs x rw\n141 140 254:0 /m /w rw - ext4 /dev/vda rw",
            *("/w/model", True),
            id="the upper one of two at the same place",
        ),
        pytest.param(
            "27 1 0:30 /@ / rw - btrfs /dev/vda rw", "/home/me", True, id="a host on btrfs"
        ),
        pytest.param(
            "27 1 0:30 /@/docker/btrfs/subvolumes/5c / rw - btrfs /dev/vda rw\n"
            "28 27 0:30 /@/docker/containers/5c/hostname /etc/hostname rw - btrfs /dev/vda rw",
            *("/opt/ml/model", False),
            id="a container on btrfs",
        ),
        pytest.param(
            "27 1 254:0 /var/lib/docker/vfs/dir/5c / rw - ext4 /dev/vda rw",
            *("/opt/ml/model", False),
            id="a container in a directory (vfs, enroot, Charliecloud)",
        ),
        pytest.param(
            "27 1 0:33 / / rw - fuse.fuse-overlayfs x rw\n30 27 0:40 / /home/me rw - lustre fs rw",
            *("/home/me/job", True),
            id="rootless, with the home mounted",
        ),
        pytest.param(
            "40 27 0:60 / /data rw - nfs4 server:/data rw", "/opt/ml/model", True, id="chroot"
        ),
    ],
)
def test_a_place_is_kept_only_on_a_mount_or_on_a_hosts_disk(
    table: str, path: str, is_kept: bool
) -> None:
    assert directories.is_kept(path, table) is is_kept


@pytest.mark.parametrize(
    ("kept_places", "named_places", "model", "output", "note", "lost"),
    [
        (("opt", "w"), {}, "opt/model", "opt/output", "", ""),
        (
            ("w",),
            {},
            "w/model",
            "w/output",
            "results go to {}/w/model and {}/w/output, in the working directory",
            "",
        ),
        (
            ("opt/model", "w"),
            {},
            "opt/model",
            "w/output",
            "results go to {}/w/output, in the working directory",
            "",
        ),
        (("opt/model",), {}, "opt/model", "opt/output", "", "no mount keeps {}/opt/output;"),
        ((), {}, "opt/model", "opt/output", "", "no mount keeps {}/opt/model and {}/opt/output;"),
        (("opt", "own"), {"SM_MODEL_DIR": "own/m"}, "own/m", "opt/output", "", ""),
        (
            ("opt",),
            {"SM_MODEL_DIR": "own/m"},
            "own/m",
            "opt/output",
            "",
            "no mount keeps {}/own/m;",
        ),
    ],
)
def test_each_result_goes_to_the_first_place_that_keeps_it(
    kept_places: tuple[str, ...],
    named_places: Mapping[str, str],
    model: str,
    output: str,
    note: str,
    lost: str,
    tmp_path: Path,
) -> None:
    choice = directories.choose(
        (f"{tmp_path}/opt", f"{tmp_path}/w"),
        {variable: f"{tmp_path}/{path}" for variable, path in named_places.items()},
        "",
        lambda path: any(path.startswith(f"{tmp_path}/{place}") for place in kept_places),
    )
    assert choice.paths["SM_MODEL_DIR"] == f"{tmp_path}/{model}"
    assert choice.paths["SM_OUTPUT_DIR"] == f"{tmp_path}/{output}"
    assert choice.paths["SM_OUTPUT_DATA_DIR"] == f"{tmp_path}/{output}/data"
    assert note.format(*[tmp_path] * 2) in choice.note if note else choice.note == ""
    assert lost.format(*[tmp_path] * 2) in choice.warning if lost else choice.warning == ""


# --- full disks -----------------------------------------------------------------------------------
FILL = """
import os
with open(os.environ["SM_MODEL_DIR"] + "/model.pt", "wb", buffering=0) as opened:
    try:
        while True:
            opened.write(bytes(5000))
    except OSError:
        raise RuntimeError("unexpected pos 704 vs 598") from None
"""


def test_a_failure_beside_a_full_disk_says_which_place_is_full(tmp_path: Path) -> None:
    """Name the place, as torch.save's own message does not."""
    write_inputs(tmp_path, FILL, {}, {})
    script = f'mount -t tmpfs -o size=1m tmpfs {tmp_path}/model && exec "$@"'
    prefix = ("unshare", "--mount", "sh", "-c", script, "sh")
    (tmp_path / "model").mkdir(exist_ok=True)
    if subprocess.run((*prefix, "true"), check=False, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    with Launcher(tmp_path, prefix=prefix, variables={"TRAINWORKS_CHECK": "off"}) as launcher:
        assert launcher.wait() == 1
    first, second = launcher.failure.splitlines()[:2]
    assert first == "RuntimeError: unexpected pos 704 vs 598"
    assert second.endswith(f"exit status 1; no space is left in {tmp_path}/model")
    assert f"trainworks: no space is left in {tmp_path}/model\n" in launcher.text
