"""Test the summary of a job: figures of hosts become a line, and a real launcher prints it once."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from launcher_support import Launcher, stand_in, write_inputs

from trainworks_launcher.contract.json_values import Json, decode, mapping
from trainworks_launcher.supervise.job_summary import Figures, line, read_figures
from trainworks_testing.ports import free_port

LEADER = Figures(8.21, 1, 840.0, 3 << 30, (90, 64))
WORKER = Figures(9.0, 1, 900.0, 61 << 30, (80,))


@pytest.mark.parametrize(
    ("seconds", "hosts", "message"),
    [
        (
            18360.0,
            (LEADER, WORKER),
            (
                "306 min on 2 hosts, first output after 8.2 s, 1 restart, 14 min without progress,"
                " at most 61.0 GiB of memory (algo-2), GPUs busy 78 %, the least busy one 64 %"
            ),
        ),
        (0.25, (Figures(),), "0.2 s on 1 host"),
        (700.0, (Figures(0.5),), "12 min on 1 host, first output after 0.5 s"),
        (36001.0, (Figures(), None), "10.0 h on 2 hosts"),
        (
            1.0,
            (Figures(restarts=2, memory=1 << 29),),
            "1.0 s on 1 host, 2 restarts, at most 0.5 GiB of memory",
        ),
        (1.0, (Figures(memory=38 << 20),), "1.0 s on 1 host, at most 38 MiB of memory"),
        (1.0, (Figures(memory=1),), "1.0 s on 1 host, at most 1 MiB of memory"),
    ],
)
def test_the_line(seconds: float, hosts: tuple[Figures | None, ...], message: str) -> None:
    assert (
        line(seconds, {f"algo-{number}": host for number, host in enumerate(hosts, 1)})
        == f"summary: {message}"
    )


def test_figures_survive_the_way_to_the_leader() -> None:
    for figures in (LEADER, WORKER, Figures()):
        assert read_figures(mapping(decode(json.dumps(figures._asdict())))) == figures


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"first_output": "soon", "restarts": -3, "idle": [], "memory": "much", "gpus": "two"},
        {"gpus": [[1, 2], "x", None, -1, 10**9], "restarts": True},
        {"gpus": [*range(9999)], "memory": -1},
    ],
)
def test_what_another_host_says_is_bounded(message: dict[str, Json]) -> None:
    assert len(line(1.0, {"a": read_figures(message)})) < 200


def gpu_host(tmp_path: Path, **more: str) -> dict[str, str]:
    """Variables of a host with two GPUs, of which the first gets busier."""
    stand_in(tmp_path)
    return {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "NVML_USE": "1",
        "TRAINWORKS_CHECK": "off",
        **more,
    }


@pytest.mark.parametrize(
    ("visible", "busy"), [("0,1", "the least busy one 50 %"), ("1", "busy 50 %"), ("", "")]
)
def test_the_use_of_the_gpus_that_the_job_may_use(tmp_path: Path, visible: str, busy: str) -> None:
    """The script ends when the library has been asked for the second time."""
    fifo = tmp_path / "asked"
    if visible:
        os.mkfifo(fifo)
    program_text = f"open({str(fifo)!r}).read()" if visible else ""
    write_inputs(tmp_path, program_text, {}, {})
    host_variables = gpu_host(tmp_path, CUDA_VISIBLE_DEVICES=visible, NVML_USE=str(fifo))
    with Launcher(tmp_path, variables=host_variables) as launcher:
        assert launcher.wait() == 0, launcher.text
    assert busy in launcher.text
    assert ("GPUs busy" in launcher.text) == bool(visible)


@pytest.mark.parametrize("fault", ["hang", "crash", "no driver"])
def test_a_broken_driver_costs_the_job_nothing(tmp_path: Path, fault: str) -> None:
    write_inputs(tmp_path, "print('it ran')", {}, {})
    with Launcher(tmp_path, variables=gpu_host(tmp_path, NVML_FAULT=fault)) as launcher:
        assert launcher.wait() == 0, launcher.text
    assert "summary: " in launcher.text
    assert "GPUs busy" not in launcher.text


@pytest.mark.parametrize(("script", "status"), [("print(1)", 0), ("exit(3)", 3)])
def test_every_job_has_one(tmp_path: Path, script: str, status: int) -> None:
    write_inputs(tmp_path, script, {}, {})
    with Launcher(tmp_path) as launcher:
        assert launcher.wait() == status
    *_, summary, last = launcher.text.splitlines()
    assert re.match(r"trainworks: summary: [\d.]+ s on 1 host", summary)
    assert ("first output" in summary) == (status == 0)
    assert last.startswith("trainworks: job ")


def test_the_time_is_that_of_all_attempts(tmp_path: Path) -> None:
    script = (
        "import os, signal, time\n"
        "time.sleep(1)\n"
        "if os.environ['TRAINWORKS_RESTART_COUNT'] == '0': os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    write_inputs(tmp_path, script, {}, {})
    variables = {
        "TRAINWORKS_MAX_RESTARTS": "1",
        "TRAINWORKS_CHECKPOINT_DIRECTORY": str(tmp_path),
    }
    with Launcher(tmp_path, variables=variables) as launcher:
        assert launcher.wait() == 0, launcher.text
    (summary,) = re.findall(r"summary: ([\d.]+) s on 1 host, .*1 restart", launcher.text)
    assert float(summary) >= 2, "each attempt took a second"


def test_the_leader_gathers_what_the_hosts_know(tmp_path: Path) -> None:
    hosts = ["127.0.0.1", "127.0.0.2"]
    for host in hosts:
        config: dict[str, Json] = {
            "hosts": [*hosts],
            "current_host": host,
            "network_interface_name": "lo",
        }
        # Only the worker prints: the line has its figure.
        script = f"import os\nif os.environ['SM_CURRENT_HOST'] == {hosts[1]!r}: print('it ran')\n"
        write_inputs(tmp_path / host, script, {}, config)
    shared = {"TRAINWORKS_CONTROL_PORT": str(free_port())}
    with (
        Launcher(tmp_path / hosts[0], variables=shared) as leader,
        Launcher(tmp_path / hosts[1], variables=shared) as worker,
    ):
        assert (leader.wait(), worker.wait()) == (0, 0)
    assert re.search(r"summary: [\d.]+ s on 2 hosts, first output after ", leader.text)
    assert "summary: " not in worker.text


@pytest.mark.parametrize(
    ("words", "script", "variables"),
    [
        ((), "print(1)", {"TRAINWORKS_SUMMARY": "off"}),
        ((), "print(1)", {"TRAINWORKS_SUMMARY": "none"}),
        ((), "", {"SAGEMAKER_PROGRAM": "other.py"}),
        (("--plan",), "print(1)", {}),
    ],
)
def test_off_a_refusal_and_a_plan_print_nothing(
    tmp_path: Path, words: tuple[str, ...], script: str, variables: dict[str, str]
) -> None:
    write_inputs(tmp_path, script, {}, {})
    command = ("train", *words) if words else ()
    with Launcher(tmp_path, *command, variables=variables) as launcher:
        launcher.wait()
    assert "summary: " not in launcher.text
