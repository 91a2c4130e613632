"""A Python that stands by for a rank: it has imported, takes over after a restart, and ends as any other process.

torchrun is a stand-in here: it starts one rank through the class of torch that starts ranks, as often as it may. The
real one is in test_launcher_standby_engine.py.
"""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from launcher_support import LAUNCHER, TIME_OUT, environment, pids_with_variable, plan

from trainworks_launcher.contract import names
from trainworks_launcher.contract.settings import Reader
from trainworks_launcher.contract.values import Json
from trainworks_launcher.job.elastic import read_elastic
from trainworks_launcher.supervise import hooks

PROGRAMS = LAUNCHER / "trainworks_launcher/programs"

TORCH = """
import subprocess
class SubprocessHandler:
    def __init__(self, args, env):
        self.proc = self._popen(args, env)
    def _popen(self, args, env):
        return subprocess.Popen(args, env=env, start_new_session=True)
"""
"""What of torch.distributed.elastic.multiprocessing.api starts ranks."""

TORCHRUN = """
import os, sys
from torch.distributed.elastic.multiprocessing.api import SubprocessHandler
most = int(sys.argv[1])
for life in range(most + 1):
    env = {"RANK": "0", "LOCAL_RANK": "0", "TORCHELASTIC_RESTART_COUNT": str(life)}
    env["TORCHELASTIC_MAX_RESTARTS"] = str(most)
    process = SubprocessHandler(tuple(sys.argv[2:]), {**os.environ, **env}).proc
    children = open(f"/proc/self/task/{os.getpid()}/children").read().split()  # one that has ended is there, too
    print("torchrun: rank", process.pid, "children", len(children), flush=True)
    print("torchrun: status", process.wait(), flush=True)
    sys.stdin.readline()  # the test lets it go on
"""

SCRIPT = """
import sys
standby = "heavy" in sys.modules
import os, signal, threading
life = os.environ["TORCHELASTIC_RESTART_COUNT"]
print("life", life, "of", os.getpid(), "standby", standby, sys.argv, __name__, __file__, flush=True)
assert "TRAINWORKS_STANDBY_CHANNEL" not in os.environ
assert not [name for name in sys.modules if name.startswith("trainworks")]
assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
if life == "0":
    signal.pause()  # until the test ends it
"""

HEAVY = """
import os, threading
print("heavy was imported", flush=True)
threading.Thread(target=threading.Event().wait, daemon=True).start()  # as OpenBLAS does
"""

READY = "stands by has imported"


class Job:
    """standby.py with the stand-in for torchrun and one rank, whose ends the test decides.

    python: of torchrun. before: what torchrun puts in front of the rank. runs: what runs the script.
    """

    def __init__(
        self,
        folder: Path,
        script: str = "",
        *,
        modules: str = "heavy",
        python: str = sys.executable,
        most: int = 1,
        before: Sequence[str] = (),
        runs: str = sys.executable,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.text = ""
        self.folder = folder
        api = folder / "torch/distributed/elastic/multiprocessing/api.py"
        api.parent.mkdir(parents=True)
        api.write_text(TORCH, encoding="utf-8")
        (folder / "heavy.py").write_text(HEAVY, encoding="utf-8")
        (folder / "train.py").write_text(SCRIPT + script, encoding="utf-8")
        torchrun = folder / "torchrun"
        torchrun.write_text(f"#!{python}\n{TORCHRUN}", encoding="utf-8")
        torchrun.chmod(0o755)
        rank = (*before, sys.executable, "-I", str(PROGRAMS / "rank.py"), "--", runs, "train.py", "--epochs", "2")
        words = (sys.executable, str(PROGRAMS / "standby.py"), modules, "0", str(torchrun), str(most), *rank)
        hooked = {"PYTHONPATH": f"{PROGRAMS / 'python'}:{folder}", names.PYTHON_HOOKS_VARIABLE: "exit standby"}
        self.process = subprocess.Popen(
            words,
            env={"PATH": os.environ["PATH"], "STANDBY_TEST": str(folder), **hooked, **(env or {})},
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def read_until(self, pattern: str, count: int = 1) -> re.Match[str]:
        """Read until the pattern was printed so often, and return its last match."""
        assert self.process.stdout is not None
        while True:
            found = list(re.finditer(pattern, self.text))
            if len(found) >= count:
                return found[count - 1]
            assert select.select((self.process.stdout,), (), (), TIME_OUT)[0], self.text
            chunk = os.read(self.process.stdout.fileno(), 65536)
            assert chunk, f"{pattern!r} was never printed:\n{self.text}"
            self.text += chunk.decode()

    def go_on(self) -> None:
        """Let torchrun go on after the end of a rank."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def kill_rank(self) -> None:
        """End the rank of the first life."""
        os.kill(int(self.read_until(r"life 0 of (\d+)")[1]), signal.SIGKILL)
        assert self.read_until(r"torchrun: status (-?\d+)\n")[1] == "-9"

    def standby(self) -> int:
        """Process id of the Python that stands by: it alone was told so."""
        (found,) = (
            pid
            for pid in pids_with_variable("STANDBY_TEST", str(self.folder))
            if names.STANDBY_CHANNEL_VARIABLE.encode() + b"=" in Path(f"/proc/{pid}/environ").read_bytes()
        )
        return found

    def wait(self) -> str:
        """The whole output of a job whose ranks need no help any more."""
        self.text += self.process.communicate(timeout=TIME_OUT)[0].decode()
        return self.text


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[Job]]:
    """The jobs of a test: none leaves a process, whatever becomes of the test."""
    jobs: list[Job] = []
    yield jobs
    for job in jobs:
        job.process.kill()
        job.process.wait(TIME_OUT)
        for stream in (job.process.stdin, job.process.stdout):
            if stream is not None:
                stream.close()
    for pid in pids_with_variable("STANDBY_TEST", str(tmp_path)):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("", 0),
        ("sys.exit(3)", 3),
        ("raise ValueError('no')", 1),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV),
        ("os.abort()", -signal.SIGABRT),
        ("os._exit(255)", 255),
    ],
)
def test_a_standby_takes_over_and_ends_as_its_script_does(
    tmp_path: Path, started: list[Job], end: str, status: int
) -> None:
    job = Job(tmp_path, end)
    started.append(job)
    job.read_until(READY)
    assert "heavy was imported" not in job.text  # what an import prints is the rank's
    standby = job.standby()
    job.kill_rank()
    job.go_on()
    said = job.read_until(r"life 1 of (\d+) standby (\w+) (.*)\n")
    assert (int(said[1]), said[2]) == (standby, "True")
    assert said[3] == f"['train.py', '--epochs', '2'] __main__ {tmp_path}/train.py"
    assert job.read_until(r"torchrun: rank (\d+)", 2)[1] == said[1]
    assert job.read_until(r"torchrun: status (-?\d+)\n", 2)[1] == str(status), job.text
    assert job.text.count("heavy was imported") == 1
    assert (" File " in job.text) is ("raise" in end)
    assert "standby.py" not in job.text  # its traceback is that of the script alone
    job.go_on()
    job.wait()
    assert pids_with_variable("STANDBY_TEST", str(tmp_path)) == []


def test_a_standby_gets_the_signals_of_a_rank(tmp_path: Path, started: list[Job]) -> None:
    """Also one that the script waits for in a thread, though a thread of an import was there before it was blocked."""
    waits = (
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})\n"
        "print('waiting', flush=True)\n"
        "signal.sigwait({signal.SIGTERM})\n"
        "sys.exit(7)\n"
    )
    job = Job(tmp_path, waits)
    started.append(job)
    job.read_until(READY)
    job.kill_rank()
    job.go_on()
    rank = int(job.read_until(r"life 1 of (\d+) standby True")[1])
    job.read_until("waiting")
    os.killpg(rank, signal.SIGTERM)  # as torchrun does
    assert job.read_until(r"torchrun: status (-?\d+)\n", 2)[1] == "7"


def test_each_life_has_a_standby_but_the_last(tmp_path: Path, started: list[Job]) -> None:
    job = Job(tmp_path, most=2)
    started.append(job)
    job.read_until(READY)
    job.kill_rank()
    job.go_on()
    job.read_until("torchrun: status 0")
    job.go_on()
    job.read_until("torchrun: status 0", 2)
    # The rank, and who stands by for it.
    assert re.findall(r"torchrun: rank \d+ children (\d)", job.text) == ["2", "2", "1"]


def test_a_standby_that_has_ended_is_no_failure(tmp_path: Path, started: list[Job]) -> None:
    job = Job(tmp_path)
    started.append(job)
    job.read_until(READY)
    standby = job.standby()
    with os.fdopen(os.pidfd_open(standby)) as watched:
        os.kill(standby, signal.SIGKILL)
        assert select.select((watched,), (), (), TIME_OUT)[0]
    job.kill_rank()
    job.go_on()
    job.read_until("life 1 of .* standby False")
    assert job.read_until(r"torchrun: status (-?\d+)\n", 2)[1] == "0"
    assert "local rank 0 starts without its standby Python: it has ended" in job.text


def test_a_module_that_cannot_be_imported_is_no_failure(tmp_path: Path, started: list[Job]) -> None:
    (tmp_path / "broken.py").write_text("import not_there", encoding="utf-8")
    job = Job(tmp_path, modules="heavy,broken")
    started.append(job)
    job.read_until("a standby Python cannot import heavy,broken: ModuleNotFoundError")
    job.kill_rank()
    job.go_on()
    job.read_until("life 1 of .* standby False")
    assert job.read_until(r"torchrun: status (-?\d+)\n", 2)[1] == "0"
    assert job.text.count("life 1") == 1


def test_a_module_that_is_not_there_is_left_out(tmp_path: Path, started: list[Job]) -> None:
    job = Job(tmp_path, modules="heavy,heavy.part")
    started.append(job)
    job.read_until(f"{READY} heavy in ")
    job.kill_rank()
    job.go_on()
    job.read_until("life 1 of .* standby True")


def test_a_standby_that_still_imports_is_no_failure(tmp_path: Path, started: list[Job]) -> None:
    (tmp_path / "endless.py").write_text("import threading; threading.Event().wait()", encoding="utf-8")
    job = Job(tmp_path, modules="endless")
    started.append(job)
    job.kill_rank()
    job.go_on()
    job.read_until("life 1 of .* standby False")
    assert "it has not imported yet" in job.text
    job.read_until(r"torchrun: status 0")
    job.go_on()
    job.wait()
    assert pids_with_variable("STANDBY_TEST", str(tmp_path)) == []


def test_a_standby_ends_with_torchrun(tmp_path: Path, started: list[Job]) -> None:
    job = Job(tmp_path)
    started.append(job)
    job.read_until(READY)
    job.read_until("life 0")
    with os.fdopen(os.pidfd_open(job.standby())) as watched:
        job.process.kill()
        assert select.select((watched,), (), (), TIME_OUT)[0]
    assert job.text.count("life ") == 1  # and without a start of its script


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"PYTHONPATH": "."}, "Python does not read the launcher's sitecustomize"),
        ({names.PYTHON_HOOKS_VARIABLE: "exit"}, "Python does not read the launcher's sitecustomize"),
        ({"OTHER": "1"}, "torchrun runs with "),
    ],
)
def test_where_no_python_would_wait_torchrun_runs_alone(
    tmp_path: Path, started: list[Job], changes: dict[str, str], why: str
) -> None:
    """A process that does not wait would run the script a second time, beside the rank."""
    other = tmp_path / "python"
    other.symlink_to(sys.executable)
    job = Job(tmp_path, env=changes, python=str(other) if "OTHER" in changes else sys.executable)
    started.append(job)
    job.read_until(f"there is no standby Python: {why}")
    job.kill_rank()
    job.go_on()
    job.read_until("life 1 of .* standby False")
    assert job.read_until(r"torchrun: status (-?\d+)\n", 2)[1] == "0"
    assert (job.text.count("life 0"), job.text.count("life 1")) == (1, 1)


def test_what_binds_a_rank_to_its_cpus_binds_its_standby(tmp_path: Path, started: list[Job]) -> None:
    """torchrun puts numactl in front of a rank's words; here it is nice, which becomes its program as well."""
    job = Job(tmp_path, "print('niceness', os.nice(0), flush=True)", before=("nice", "-n", "3"))
    started.append(job)
    job.read_until(READY)
    job.kill_rank()
    job.go_on()
    job.read_until("life 1 of .* standby True")
    assert job.read_until(r"niceness (\d+)\n")[1] == str(min(19, os.nice(0) + 3))


def test_a_script_of_another_python_has_no_standby(tmp_path: Path, started: list[Job]) -> None:
    other = tmp_path / "python"
    other.symlink_to(sys.executable)
    job = Job(tmp_path, runs=str(other))
    started.append(job)
    job.read_until("no rank has a standby Python: .* does not run its script or module")
    job.kill_rank()
    job.go_on()
    job.read_until("life 1 of .* standby False")


# ---------------------------------------------------------------------------------------------------------- the plan
ASKED: dict[str, Json] = {"sagemaker_torch_distributed_enabled": "true", "sagemaker_torch_distributed_max_restarts": 2}


def test_torchrun_is_started_with_standbys_where_they_are_asked_for() -> None:
    made = environment(ASKED, variables={"PATH": "", "TRAINWORKS_STANDBY": "on"})
    planned = plan(made)
    program = "/opt/trainworks/lib/trainworks_launcher/programs/standby.py"
    assert planned.argv[:5] == ("/usr/bin/python", program, "torch,torch._dynamo", "10", "/usr/bin/torchrun")
    assert "standby" in hooks.variables(planned, made)[names.PYTHON_HOOKS_VARIABLE].split()
    plain = environment(ASKED)
    assert planned.argv[4:] == plan(plain).argv
    assert "standby" not in hooks.variables(plan(plain), plain)[names.PYTHON_HOOKS_VARIABLE].split()


@pytest.mark.parametrize(
    ("hyperparameters", "why"),
    [
        ({**ASKED, "sagemaker_torch_distributed_max_restarts": 0}, "no restart is allowed"),
        ({**ASKED, "sagemaker_program": "run.sh"}, "the program is not Python"),
    ],
)
def test_where_standbys_have_no_effect_that_is_said(hyperparameters: dict[str, Json], why: str) -> None:
    planned = plan(environment(hyperparameters, variables={"PATH": "", "TRAINWORKS_STANDBY": "on"}))
    assert "standby" not in " ".join(planned.argv)
    assert f"TRAINWORKS_STANDBY has no effect: {why}" in planned.warnings


@pytest.mark.parametrize(
    ("value", "modules"),
    [
        ("", ()),
        ("off", ()),
        ("on", ("torch", "torch._dynamo")),
        (" torch , transformers.models ", ("torch", "transformers.models")),
    ],
)
def test_what_a_standby_imports(value: str, modules: tuple[str, ...]) -> None:
    reader = Reader(ASKED, {"TRAINWORKS_STANDBY": value})
    assert read_elastic(reader, "torch_distributed", 1, 1).standby == modules
    assert reader.problems == []


@pytest.mark.parametrize("value", ["torch;os", "torch,", "3", "torch os"])
def test_what_cannot_be_imported_is_refused(value: str) -> None:
    reader = Reader(ASKED, {"TRAINWORKS_STANDBY": value})
    read_elastic(reader, "torch_distributed", 1, 1)
    assert "is not the name of a Python module (variable TRAINWORKS_STANDBY)" in str(reader.problems[0])


def test_the_programs_know_the_names() -> None:
    """They import nothing of ours, so they have our constants as text."""
    for program in ("standby.py", "python/sitecustomize.py"):
        assert f'"{names.STANDBY_CHANNEL_VARIABLE}"' in (PROGRAMS / program).read_text(encoding="utf-8")
