"""Plans, shown whole: one golden file per scenario.

After a wanted change run ``TRAINWORKS_UPDATE_GOLDEN=1 python -m pytest tests/launcher/test_launcher_plan.py``
and read the diff.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import pytest
from launcher_support import GOLDEN, environment, plan

from trainworks_launcher.entry import Code
from trainworks_launcher.environment import Devices, Environment
from trainworks_launcher.plan import ORIGINS, NodePlan, words_of

TWO = ("algo-1", "algo-2")
MPI = {"sagemaker_mpi_enabled": "true", "sagemaker_mpi_num_of_processes_per_host": "2", "epochs": "3"}
TORCH = {"sagemaker_torch_distributed_enabled": "true", "epochs": "3"}
EIGHT_GPUS = Devices(gpus=8, cpus=96, efa=("rdmap16s27",), interfaces=("eth0", "lo"))

SCENARIOS: dict[str, Callable[[], NodePlan]] = {
    "plain-script": lambda: plan(environment({"epochs": "3", "lr": "0.1"})),
    "plain-two-hosts": lambda: plan(environment(hosts=TWO)),
    "shell-with-requirements": lambda: plan(
        environment({"sagemaker_program": "run.sh"}, code=Code("/opt/ml/code", entries=("requirements.txt", "run.sh")))
    ),
    "code-from-archive": lambda: plan(
        environment(code=Code("/opt/ml/code", "/opt/ml/input/data/code/sourcedir.tar.gz", entries=("train.py",)))
    ),
    "mpi-one-host": lambda: plan(environment(MPI)),
    "mpi-two-hosts-leader": lambda: plan(environment(MPI, hosts=TWO)),
    "mpi-two-hosts-worker": lambda: plan(environment(MPI, hosts=TWO), "algo-2"),
    "mpi-two-hosts-open-mpi-4": lambda: plan(environment(MPI, hosts=TWO, open_mpi="4.1.4")),
    "mpi-user-options": lambda: plan(
        environment(
            {
                **MPI,
                "sagemaker_mpi_custom_mpi_options": "-verbose --mca btl_vader_single_copy_mechanism none"
                " --mca pml ucx -x NCCL_DEBUG=VERSION --bind-to core",
            },
            hosts=TWO,
        )
    ),
    "mpi-hostname-shim": lambda: plan(environment(MPI, hosts=TWO, hostname="aws")),
    "torch-one-host": lambda: plan(environment(TORCH, devices=Devices(gpus=4, cpus=8))),
    "torch-two-hosts-efa": lambda: plan(
        environment(TORCH, hosts=TWO, instance_type="ml.fast.xlarge", devices=EIGHT_GPUS), "algo-2"
    ),
    "torch-module": lambda: plan(environment({**TORCH, "sagemaker_program": "-m package.train"})),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_golden_plan(name: str) -> None:
    made = SCENARIOS[name]().to_json()
    path = GOLDEN / f"{name}.json"
    if os.environ.get("TRAINWORKS_UPDATE_GOLDEN"):
        path.write_text(made, encoding="utf-8")
    assert made == path.read_text(encoding="utf-8")


def test_every_golden_file_has_its_scenario() -> None:
    assert sorted(path.stem for path in GOLDEN.glob("*.json")) == sorted(SCENARIOS)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_plan_is_the_same_twice(name: str) -> None:
    assert SCENARIOS[name]() == SCENARIOS[name]()
    assert SCENARIOS[name]().to_json() == SCENARIOS[name]().to_json()


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_word_of_the_command_line_has_its_reason(name: str) -> None:
    made = SCENARIOS[name]()
    assert words_of(made.why) == made.argv
    assert all(reason.why and reason.origin in ORIGINS for reason in made.why)


def test_planning_has_no_effects() -> None:
    """No file, socket, process or directory is touched between the environment and the plan."""
    environments: list[Environment] = [
        environment(MPI, hosts=TWO),
        environment(TORCH, hosts=TWO, devices=EIGHT_GPUS, instance_type="ml.fast.xlarge"),
        environment({"epochs": 1}),
    ]
    for made in environments:  # lazy imports happen here, before anybody listens
        plan(made).to_json()
    heard: list[str] = []
    listening = [True]

    def listen(event: str, arguments: tuple[object, ...]) -> None:
        del arguments
        if listening and event.startswith(("open", "os.", "socket.", "subprocess.", "shutil.", "tempfile.", "import")):
            heard.append(event)

    # A hook cannot be taken away again; emptied of its switch it does nothing.
    sys.addaudithook(listen)
    try:
        for made in environments:
            plan(made).to_json()
            plan(made, "algo-2").to_json() if made.resource_config else None
    finally:
        listening.clear()
    assert heard == []


def test_planning_thousands_of_hosts_is_quick() -> None:
    import time

    hosts = tuple(f"algo-{number}" for number in range(1, 4097))
    started = time.process_time()
    made = plan(environment(MPI, hosts=hosts))
    assert time.process_time() - started < 1.0
    assert made.argv[made.argv.index("-np") + 1] == "8192"
