"""What a job took: figures of hosts become a line and a file, and a real launcher writes them once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launcher_support import TIME_OUT, Launcher, write_inputs

from ports import free_port
from trainworks_launcher.contract.values import Json, decode, mapping
from trainworks_launcher.supervise.loop import Loop
from trainworks_launcher.supervise.outcome.outcome import FAILED, SUCCEEDED, Outcome
from trainworks_launcher.supervise.summary.figures import Figures, Gpu, Looked, Summary, read_figures
from trainworks_launcher.supervise.summary.gauges import Gauges

HERE = Path(__file__).parent
LEADER = Figures(
    8.21, 1, 840.0, 3 << 30, (Gpu(0, 90, 100, 7), Gpu(1, 64, 80, 9)), {0: Looked(14, 14), 1: Looked(14, 9)}
)
WORKER = Figures(9.0, 1, 900.0, 61 << 30, (Gpu(0, 80, 100, 7),), {5: Looked(14, 2), 6: Looked(14, 13)})


def summary(*hosts: Figures | None, kind: str = SUCCEEDED, seconds: float = 18360.0) -> Summary:
    named = {f"algo-{number}": host for number, host in enumerate(hosts, 1)}
    return Summary(Outcome(kind, 0 if kind == SUCCEEDED else 3), "mpi", seconds, named)


# ---------------------------------------------------------------------------------------------------------- in words
@pytest.mark.parametrize(
    ("made", "line"),
    [
        (
            summary(LEADER, WORKER),
            "18360 s on 2 hosts",
        ),
        (summary(Figures(), seconds=0.25), "0.2 s on 1 host"),
        (summary(Figures(0.5), seconds=700.0), "12 min on 1 host, first output after 0.5 s"),
        (summary(Figures(), None, seconds=36001.0), "10.0 h on 2 hosts"),
        (summary(Figures(restarts=2, memory=1 << 29)), "306 min on 1 host, 2 restarts, at most 0.5 GiB of memory"),
    ],
)
def test_the_line(made: Summary, line: str) -> None:
    if made.hosts.get("algo-2") == WORKER:
        line = (
            "306 min on 2 hosts, first output after 8.2 s, 1 restart, 14 min without progress, the others waited most "
            "for rank 5 on algo-2, at most 61.0 GiB of memory (algo-2), GPUs busy 78 %, the least "
            "busy one 64 %"
        )
    assert made.line() == f"summary: {line}"


def test_the_file() -> None:
    document = summary(LEADER, None, kind=FAILED).document()
    assert {name: value for name, value in document.items() if name != "hosts"} == {
        "schema": 1,
        "writer": "trainworks",
        "kind": "failed",
        "status": 3,
        "mode": "mpi",
        "seconds": 18360.0,
        "seconds_to_first_output": 8.2,
        "restarts": 1,
        "seconds_without_progress": 840.0,
        "waited_for": None,
    }
    first, second = json.loads(json.dumps(document["hosts"]))
    assert first["highest_memory_bytes"] == 3 << 30
    assert first["gpus"][1] == {
        "index": 1,
        "mean_use_percent": 64,
        "highest_use_percent": 80,
        "highest_memory_bytes": 9,
    }
    assert (second["host"], second["highest_memory_bytes"], second["gpus"]) == ("algo-2", None, None)
    assert summary(LEADER, WORKER).document()["waited_for"] == {"rank": 5, "host": "algo-2", "looks": 14, "waited": 2}


@pytest.mark.parametrize(
    ("ranks", "most"),
    [
        ({}, None),
        ({0: Looked(9, 0)}, None),  # nobody waits for it
        ({0: Looked(9, 0), 1: Looked(9, 0)}, None),
        ({0: Looked(9, 9), 1: Looked(9, 9)}, None),  # all wait, for the network perhaps
        ({0: Looked(9, 9), 1: Looked(9, 0)}, 1),
        ({0: Looked(9, 9), 1: Looked(9, 0), 2: Looked(9, 0)}, None),  # two of them
        ({0: Looked(9, 9), 1: Looked(9, 0), 2: Looked(4, 0)}, 1),
        ({0: Looked(9, 9), 1: Looked(9, 5)}, None),
        ({0: Looked(30, 9), 1: Looked(30, 1)}, 1),  # most of their looks were at the start
        ({0: Looked(9, 9), 1: Looked(1, 0)}, None),  # it was hardly looked at, for it said something
    ],
)
def test_the_rank_that_others_waited_for(ranks: dict[int, Looked], most: int | None) -> None:
    found = summary(Figures(ranks=ranks)).waited_for()
    assert (found and found[1]) == most


def test_figures_survive_the_way_to_the_leader() -> None:
    for figures in (LEADER, WORKER, Figures()):
        assert read_figures(mapping(decode(json.dumps(figures.fields())))) == figures


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"first_output": "soon", "restarts": -3, "idle": [], "memory": "much", "gpus": "two", "ranks": 7},
        {"gpus": [[1, 2], "x", [0, -1, 2, 3], None], "ranks": [[0], [1, 2, "x"], {}], "restarts": True},
        {"ranks": [[number, 1, 1] for number in range(9999)], "memory": -1},
    ],
)
def test_what_another_host_says_is_bounded(message: dict[str, Json]) -> None:
    """Whatever it is, it can be printed and written."""
    made = summary(read_figures(message))
    assert len(json.dumps(made.document())) + len(made.line()) < 2000


# ------------------------------------------------------------------------------------------------------------ gauges
def test_memory_is_summed_up_where_the_kernel_keeps_no_count() -> None:
    loop = Loop()
    gauges = Gauges(loop, lambda: None)
    words = (sys.executable, "-c", "kept = b'x' * (64 << 20); print('has it', flush=True); input()")
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"has it\n"
        gauges.begin((), None)
        child.communicate(b"\n", TIME_OUT)
    assert (gauges.memory() or 0) > 64 << 20
    gauges.end()
    loop.close()


@pytest.fixture(scope="module")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the library that stands in for NVIDIA's: two GPUs, of which the first gets busier."""
    folder = tmp_path_factory.mktemp("nvml")
    target = folder / "libnvidia-ml.so.1"
    subprocess.run(("gcc", "-shared", "-fPIC", "-o", target, HERE / "stand_in_nvml.c"), check=True, timeout=TIME_OUT)
    return folder


def gpu_host(tmp_path: Path, nvml: Path, **more: str) -> dict[str, str]:
    """Variables of a host whose nvidia-smi lists two GPUs."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'GPU 0: A'\necho 'GPU 1: A'\n", encoding="utf-8")
    program.chmod(0o755)
    path = f"{program.parent}:{os.environ['PATH']}"
    return {"PATH": path, "LD_LIBRARY_PATH": str(nvml), "NVML_USE": "1", "TRAINWORKS_CHECK": "off", **more}


def read_summary(base: Path) -> dict[str, Json]:
    found = decode((base / "output/data/summary.json").read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(("visible", "indices"), [("0,1", [0, 1]), ("1", [1]), ("", [])])
def test_the_use_of_the_gpus_that_the_job_may_use(tmp_path: Path, nvml: Path, visible: str, indices: list[int]) -> None:
    """The script ends when the library has been asked for the second time."""
    asked = tmp_path / "asked"
    if indices:
        os.mkfifo(asked)
    write_inputs(tmp_path, f"open({str(asked)!r}).read()" if indices else "", {}, {})
    with Launcher(
        tmp_path, variables=gpu_host(tmp_path, nvml, CUDA_VISIBLE_DEVICES=visible, NVML_USE=str(asked))
    ) as made:
        assert made.wait() == 0, made.text
    (host,) = json.loads(json.dumps(read_summary(tmp_path)["hosts"]))
    assert [gpu["index"] for gpu in host["gpus"] or ()] == indices, made.text
    for gpu in host["gpus"] or ():
        assert gpu["highest_memory_bytes"] == (1 << 33) + gpu["index"]
        assert gpu["mean_use_percent"] in (range(70, 91) if gpu["index"] == 0 else (50,))


@pytest.mark.parametrize("fault", ["hang", "crash", "no driver"])
def test_a_broken_driver_costs_the_job_nothing(tmp_path: Path, nvml: Path, fault: str) -> None:
    write_inputs(tmp_path, "print('it ran')", {}, {})
    with Launcher(tmp_path, variables=gpu_host(tmp_path, nvml, NVML_FAULT=fault)) as made:
        assert made.wait() == 0, made.text
    (host,) = json.loads(json.dumps(read_summary(tmp_path)["hosts"]))
    assert host["gpus"] is None


# ------------------------------------------------------------------------------------------------------- a whole job
@pytest.mark.parametrize(("script", "kind", "status"), [("print(1)", "succeeded", 0), ("exit(3)", "failed", 3)])
def test_every_job_has_one(tmp_path: Path, script: str, kind: str, status: int) -> None:
    write_inputs(tmp_path, script, {}, {})
    with Launcher(tmp_path) as made:
        assert made.wait() == status
    document = read_summary(tmp_path)
    assert (document["kind"], document["status"], document["mode"], document["restarts"]) == (kind, status, "none", 0)
    assert (document["seconds_to_first_output"] is None) == (kind == "failed")
    *_, said, last = made.text.splitlines()
    assert said.startswith("trainworks: summary: ")
    assert last.startswith("trainworks: job ")
    assert [path.name for path in (tmp_path / "output/data").iterdir()] == ["summary.json"]


def test_the_leader_gathers_what_the_hosts_know(tmp_path: Path) -> None:
    hosts = ["127.0.0.1", "127.0.0.2"]
    for host in hosts:
        config: dict[str, Json] = {"hosts": [*hosts], "current_host": host, "network_interface_name": "lo"}
        write_inputs(tmp_path / host, "print('it ran')", {}, config)
    shared = {"TRAINWORKS_CONTROL_PORT": str(free_port())}
    with (
        Launcher(tmp_path / hosts[0], variables=shared) as leader,
        Launcher(tmp_path / hosts[1], variables=shared) as worker,
    ):
        assert (leader.wait(), worker.wait()) == (0, 0)
    rows = json.loads(json.dumps(read_summary(tmp_path / hosts[0])["hosts"]))
    assert [row["host"] for row in rows] == hosts
    assert all(row["seconds_to_first_output"] is not None for row in rows)
    assert "summary: " in leader.text
    assert "summary: " not in worker.text
    assert not (tmp_path / hosts[1] / "output/data/summary.json").exists()


@pytest.mark.parametrize(
    ("words", "script", "variables"),
    [
        ((), "print(1)", {"TRAINWORKS_SUMMARY": "off"}),
        ((), "print(1)", {"TRAINWORKS_SUMMARY": "none"}),
        ((), "", {"SAGEMAKER_PROGRAM": "other.py"}),
        (("--plan",), "print(1)", {}),
    ],
)
def test_off_a_refusal_and_a_plan_write_nothing(
    tmp_path: Path, words: tuple[str, ...], script: str, variables: dict[str, str]
) -> None:
    write_inputs(tmp_path, script, {}, {})
    with Launcher(tmp_path, *(("train", *words) if words else ()), variables=variables) as made:
        made.wait()
    assert "summary: " not in made.text
    assert not list(tmp_path.glob("output/data/*"))


def test_an_earlier_jobs_summary_goes_and_the_scripts_own_stays(tmp_path: Path) -> None:
    file = tmp_path / "output/data/summary.json"
    write_inputs(tmp_path, f"import os\nprint('there' if os.path.exists({str(file)!r}) else 'gone')\n", {}, {})
    for _ in range(2):
        with Launcher(tmp_path) as made:
            assert made.wait() == 0
        assert "gone\n" in made.text
    file.write_text('{"accuracy": 0.9}', encoding="ascii")
    with Launcher(tmp_path) as made:
        assert made.wait() == 0
    assert "there\n" in made.text
    assert "is the script's own file, and is kept" in made.text
    assert file.read_text(encoding="ascii") == '{"accuracy": 0.9}'
