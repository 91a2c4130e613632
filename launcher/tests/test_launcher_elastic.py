"""Test the settings of a job that may restart and lose hosts: problems, and torchrun's words."""

from __future__ import annotations

import pytest
from launcher_support import environment, plan

from trainworks_launcher.contract.errors import Problem, RefusalError
from trainworks_launcher.contract.json_values import Json
from trainworks_launcher.contract.settings import Reader
from trainworks_launcher.job.elastic import Elastic, read_elastic

RESTARTS, MINIMUM = (
    "sagemaker_torch_distributed_max_restarts",
    "sagemaker_torch_distributed_min_hosts",
)
TORCH: dict[str, Json] = {"sagemaker_torch_distributed_enabled": "true"}
HOSTS = ("algo-1", "algo-2", "algo-3")


def read(
    reserved: dict[str, Json],
    variables: dict[str, str] | None = None,
    mode: str = "torch_distributed",
    all_hosts: int = 3,
) -> tuple[Elastic, list[Problem]]:
    reader = Reader(reserved, variables or {})
    return read_elastic(reader, mode, 3, all_hosts), reader.problems


@pytest.mark.parametrize(
    ("reserved", "variables", "expected"),
    [
        ({}, {}, Elastic(0, 0)),
        ({RESTARTS: 2}, {}, Elastic(2, 0)),
        ({}, {"TRAINWORKS_MAX_RESTARTS": " 2 "}, Elastic(2, 0)),
        ({MINIMUM: 2}, {}, Elastic(3, 2)),
        ({MINIMUM: 3}, {}, Elastic(0, 0)),
        ({MINIMUM: 2.0, RESTARTS: "7"}, {}, Elastic(7, 2)),
        (
            {RESTARTS: 4},
            {"TRAINWORKS_MAX_RESTARTS": "4", "TRAINWORKS_MIN_HOSTS": "1"},
            Elastic(4, 1),
        ),
    ],
)
def test_settings(reserved: dict[str, Json], variables: dict[str, str], expected: Elastic) -> None:
    assert read(reserved, variables) == (expected, [])


@pytest.mark.parametrize(
    ("reserved", "variables", "words"),
    [
        (
            {RESTARTS: -1},
            {},
            "-1 is not possible (hyperparameter " + RESTARTS + "); .* the nearest is 0",
        ),
        ({RESTARTS: "many"}, {}, "'many' is not possible"),
        ({RESTARTS: True}, {}, "True is not possible"),
        ({RESTARTS: 1e999}, {}, "inf is not possible"),
        (
            {MINIMUM: 4},
            {},
            "4 is not possible (.*); give a whole number from 1 to 3; the nearest is 3",
        ),
        ({MINIMUM: 0}, {}, "0 is not possible (.*); .* the nearest is 1"),
        (
            {},
            {"TRAINWORKS_MIN_HOSTS": "2.5"},
            "'2.5' is not possible (variable TRAINWORKS_MIN_HOSTS)",
        ),
        ({MINIMUM: 2, RESTARTS: 0}, {}, "2 of 3 hosts are enough, and no restart is allowed"),
        (
            {RESTARTS: 1},
            {"TRAINWORKS_MAX_RESTARTS": "2"},
            "1 and 2 contradict each other (hyperparameter .* variable",
        ),
    ],
)
def test_what_cannot_be_is_said_with_the_nearest_that_can(
    reserved: dict[str, Json], variables: dict[str, str], words: str
) -> None:
    _, problems = read(reserved, variables)
    assert len(problems) == 1
    for part in words.split(".*"):
        assert part.strip() in str(problems[0])


def test_all_problems_come_at_once() -> None:
    hyperparameters: dict[str, Json] = {**TORCH, RESTARTS: "x", MINIMUM: 9}
    with pytest.raises(RefusalError) as refused:
        plan(
            environment(
                hyperparameters,
                hosts=HOSTS,
                variables={"PATH": "", "TRAINWORKS_JOB_SECRET": ""},
                job_secret="short",
            )
        )
    assert len(refused.value.problems) == 3


@pytest.mark.parametrize("mode", ["none", "mpi"])
def test_other_modes_start_again_on_all_hosts_and_need_them_all(mode: str) -> None:
    assert read({RESTARTS: 1}, mode=mode) == (Elastic(1, 0), [])
    _, problems = read({RESTARTS: 1, MINIMUM: 2}, mode=mode)
    where = " or ".join(sorted(f"hyperparameter {name}" for name in (RESTARTS, MINIMUM)))
    assert f"a job of mode {mode} cannot continue with fewer hosts ({where})" in str(problems[0])


def test_a_job_with_hosts_outside_its_distribution_needs_them_all() -> None:
    assert "1 of the job's 4 hosts take no part" in str(read({MINIMUM: 2}, all_hosts=4)[1][0])
    assert read({RESTARTS: 2}, all_hosts=4) == (Elastic(2, 0), [])


def test_torchrun_makes_a_new_group_where_it_is_asked_for() -> None:
    job_environment = environment({**TORCH, MINIMUM: "2"}, hosts=HOSTS)
    for host, is_host in (("algo-1", 1), ("algo-3", 0)):
        words = plan(job_environment, host).argv
        assert words[1:8] == (
            "--nnodes=2:3",
            "--nproc-per-node=1",
            "--rdzv-backend=c10d",
            "--rdzv-endpoint=algo-1:7777",
            f"--rdzv-conf=is_host={is_host},keep_alive_interval=3,keep_alive_max_attempt=5,last_call_timeout=15",
            f"--local-addr={host}",
            "--max-restarts=3",
        )
    assert plan(job_environment).env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    control = plan(job_environment).control
    assert control is not None
    assert control.minimum_hosts == 2


def test_restarts_alone_need_every_host() -> None:
    node_plan = plan(environment({**TORCH, RESTARTS: "2"}, hosts=HOSTS))
    assert "--nnodes=3" in node_plan.argv
    assert "--rdzv-backend=c10d" in node_plan.argv
    assert node_plan.control is not None
    assert node_plan.control.minimum_hosts == 0
    alone = plan(environment({**TORCH, RESTARTS: "2"})).argv
    assert "--master-addr=127.0.0.1" in alone
    assert "--max-restarts=2" in alone


def test_a_lost_host_is_found_by_the_control_channel_before_torch_finds_it() -> None:
    node_plan = plan(
        environment(
            {**TORCH, RESTARTS: 1},
            hosts=HOSTS,
            variables={"TRAINWORKS_HEARTBEAT_LIMIT_SECONDS": "60"},
        )
    )
    (conf,) = [word for word in node_plan.argv if word.startswith("--rdzv-conf=")]
    values = dict(pair.split("=") for pair in conf.partition("=")[2].split(","))
    assert int(values["keep_alive_interval"]) * int(values["keep_alive_max_attempt"]) > 60


def test_without_being_asked_for_rendezvous_stays_static() -> None:
    node_plan = plan(environment(TORCH, hosts=HOSTS))
    assert "--rdzv-backend=c10d" not in node_plan.argv
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" not in node_plan.env


def test_who_has_rank_0_is_said_where_it_is_not_the_leader() -> None:
    node_plan = plan(environment({**TORCH, RESTARTS: 1}, hosts=("b", "a"), host="b"))
    assert (
        node_plan.warnings[-1]
        == "c10d rendezvous numbers ranks by host name: rank 0 is on a, not on the leader b"
    )
