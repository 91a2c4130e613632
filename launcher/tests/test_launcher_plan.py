"""Plans, shown: one golden file for each kind, and in one file how the other
scenarios differ from it.

After a wanted change run ``make golden`` and read the difference.
"""

from __future__ import annotations

import difflib
import itertools
import sys
from collections.abc import Callable
from types import MappingProxyType

import pytest
from launcher_support import PROGRAMS, environment, plan

from trainworks_launcher.contract.hyperparameters import decode_values
from trainworks_launcher.contract.json_values import Json
from trainworks_launcher.contract.origins import Origin
from trainworks_launcher.environment.entry_point import Code
from trainworks_launcher.environment.environment import Devices, Environment
from trainworks_launcher.plan.plan import NodePlan, words_of

TWO = ("algo-1", "algo-2")
MPI = {
    "sagemaker_mpi_enabled": "true",
    "sagemaker_mpi_num_of_processes_per_host": "2",
    "epochs": "3",
}
TORCH = {"sagemaker_torch_distributed_enabled": "true", "epochs": "3"}
EIGHT_GPUS = Devices(gpus=8, cpus=96, efa=("rdmap16s27",), interfaces=("eth0", "lo"))
TWO_GROUPS: dict[str, Json] = {
    "current_host": "algo-1",
    "hosts": ["algo-1", "algo-2", "algo-3"],
    "network_interface_name": "eth0",
    "instance_groups": [
        {"instance_group_name": "data", "instance_type": "ml.plain.xlarge", "hosts": ["algo-1"]},
        {
            "instance_group_name": "train",
            "instance_type": "ml.fast.xlarge",
            "hosts": ["algo-2", "algo-3"],
        },
    ],
}
SMP = {
    "sagemaker_mpi_enabled": "true",
    "sagemaker_mpi_num_of_processes_per_host": "8",
    "mp_parameters": '{"pipeline_parallel_degree": 2, "microbatches": 4, "ddp": true}',
}
SMDDP_PROGRAMS = {
    **PROGRAMS,
    "smddprun": "/opt/venv/bin/smddprun",
    "smddpmprun": "/opt/venv/bin/smddpmprun",
}


def mode(switch: str, host: str = "", **changes: object) -> NodePlan:
    """A host of a job of two hosts with eight GPUs and EFA, in an image that
    has every framework and library.
    """
    job_environment = environment(
        {switch: "true", "epochs": "3"},
        hosts=TWO,
        instance_type="ml.fast.xlarge",
        devices=EIGHT_GPUS,
    )
    components = {"torch": "2.4.1", "torch_xla": "2.4.0", "smp": "1.15", "smddp": "2.5"}
    components.update(changes.pop("components", {}))  # type: ignore[call-overload]
    job_environment = job_environment._replace(programs=MappingProxyType(SMDDP_PROGRAMS), **changes)  # type: ignore[arg-type]
    all_components = MappingProxyType({**job_environment.manifest.components, **components})
    return plan(
        job_environment._replace(
            manifest=job_environment.manifest._replace(components=all_components)
        ),
        host,
    )


SCENARIOS: dict[str, Callable[[], NodePlan]] = {
    "plain-script": lambda: plan(environment({"epochs": "3", "lr": "0.1"})),
    "plain-two-hosts": lambda: plan(environment(hosts=TWO)),
    "shell-with-requirements": lambda: plan(
        environment(
            {"sagemaker_program": "run.sh"},
            code=Code("/opt/ml/code", entries=("requirements.txt", "run.sh")),
        )
    ),
    "code-from-archive": lambda: plan(
        environment(
            code=Code(
                "/opt/ml/code", "/opt/ml/input/data/code/sourcedir.tar.gz", entries=("train.py",)
            )
        )
    ),
    "mpi-one-host": lambda: plan(environment(MPI)),
    "mpi-two-hosts-leader": lambda: plan(environment(MPI, hosts=TWO)),
    "mpi-two-hosts-worker": lambda: plan(environment(MPI, hosts=TWO), "algo-2"),
    "mpi-two-hosts-open-mpi-4": lambda: plan(environment(MPI, hosts=TWO, open_mpi="4.1.4")),
    "mpi-user-options": lambda: plan(
        environment(
            {
                **MPI,
                "sagemaker_mpi_custom_mpi_options": (
                    "-verbose --mca btl_vader_single_copy_mechanism none"
                    " --mca pml ucx -x NCCL_DEBUG=VERSION --bind-to core"
                ),
            },
            hosts=TWO,
        )
    ),
    "mpi-hostname-shim": lambda: plan(environment(MPI, hosts=TWO, hostname="aws")),
    "torch-one-host": lambda: plan(environment(TORCH, devices=Devices(gpus=4, cpus=8))),
    "torch-two-hosts-efa": lambda: plan(
        environment(TORCH, hosts=TWO, instance_type="ml.fast.xlarge", devices=EIGHT_GPUS), "algo-2"
    ),
    "torch-neuron": lambda: plan(
        environment(
            TORCH,
            hosts=TWO,
            instance_type="ml.neuron.xlarge",
            devices=Devices(neuron_devices=16, efa=("rdmap16s27",), interfaces=("eth0", "lo")),
            variables={"PATH": "/usr/bin:/bin", "RUN_NEURON_PARALLEL_COMPILE": "1"},
            programs=MappingProxyType(
                {**PROGRAMS, "neuron_parallel_compile": "/usr/bin/neuron_parallel_compile"}
            ),
        )
    ),
    "modelparallel-two-hosts-leader": lambda: mode(
        "sagemaker_mpi_enabled",
        hyperparameters=decode_values({**SMP, "sagemaker_program": "train.py"}),
    ),
    "dataparallel-two-hosts-leader": lambda: mode("sagemaker_distributed_dataparallel_enabled"),
    "dataparallel-two-hosts-worker": lambda: mode(
        "sagemaker_distributed_dataparallel_enabled", "algo-2"
    ),
    "pytorchddp-one-host": lambda: plan(
        environment({"sagemaker_pytorch_ddp_enabled": "true"}, devices=EIGHT_GPUS)
    ),
    "pytorchxla-two-hosts": lambda: mode("sagemaker_pytorch_xla_multi_worker_enabled", "algo-2"),
    "multi-worker-mirrored-two-hosts": lambda: mode(
        "sagemaker_multi_worker_mirrored_strategy_enabled",
        "algo-2",
        components={"tensorflow": "2.18.0"},
    ),
    "parameter-server-tensorflow-leader": lambda: mode(
        "sagemaker_parameter_server_enabled", components={"tensorflow": "2.18.0"}
    ),
    "parameter-server-tensorflow-worker": lambda: mode(
        "sagemaker_parameter_server_enabled", "algo-2", components={"tensorflow": "2.18.0"}
    ),
    "parameter-server-mxnet-leader": lambda: mode(
        "sagemaker_parameter_server_enabled", components={"mxnet": "1.9.1"}
    ),
    "parameter-server-torch": lambda: mode("sagemaker_parameter_server_enabled", "algo-2"),
    "ray-two-hosts-leader": lambda: mode("sagemaker_ray_enabled"),
    "ray-two-hosts-worker": lambda: mode("sagemaker_ray_enabled", "algo-2"),
    "group-leader": lambda: plan(
        environment(
            {**MPI, "sagemaker_distribution_instance_groups": '["train"]'},
            resource_config=MappingProxyType(TWO_GROUPS),
        ),
        "algo-2",
    ),
    "group-host-outside": lambda: plan(
        environment(
            {**MPI, "sagemaker_distribution_instance_groups": '["train"]'},
            resource_config=MappingProxyType(TWO_GROUPS),
        )
    ),
    "torch-module": lambda: plan(environment({**TORCH, "sagemaker_program": "-m package.train"})),
}


LIKE = {
    "plain-two-hosts": "plain-script",
    "shell-with-requirements": "plain-script",
    "code-from-archive": "plain-script",
    "mpi-one-host": "mpi-two-hosts-leader",
    "mpi-user-options": "mpi-two-hosts-leader",
    "mpi-hostname-shim": "mpi-two-hosts-leader",
    "group-leader": "mpi-two-hosts-leader",
    "group-host-outside": "plain-two-hosts",
    "dataparallel-two-hosts-leader": "modelparallel-two-hosts-leader",
    "dataparallel-two-hosts-worker": "mpi-two-hosts-worker",
    "pytorchddp-one-host": "dataparallel-two-hosts-leader",
    "torch-one-host": "torch-two-hosts-efa",
    "torch-module": "torch-one-host",
    "torch-neuron": "torch-two-hosts-efa",
    "pytorchxla-two-hosts": "torch-two-hosts-efa",
    "parameter-server-tensorflow-worker": "parameter-server-tensorflow-leader",
    "parameter-server-mxnet-leader": "parameter-server-tensorflow-leader",
    "parameter-server-torch": "plain-two-hosts",
    "ray-two-hosts-worker": "ray-two-hosts-leader",
}
"""Scenario -> the one beside which it is shown; the others are whole."""


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name not in LIKE])
def test_golden_plan(name: str, golden: Callable[[str, str], None]) -> None:
    golden(f"{name}.json", SCENARIOS[name]().to_json())


def test_golden_differences(golden: Callable[[str, str], None]) -> None:
    """Show the differences of each other scenario.

    SM_ variables are those of a real peer (test_launcher_parity).
    """
    lines: list[str] = []
    for name, like in LIKE.items():
        lines_alike, other = (
            SCENARIOS[scenario]().to_json().splitlines() for scenario in (like, name)
        )
        # Without the numbers of lines, which a change far away would move.
        differing = [
            line
            for line in difflib.unified_diff(lines_alike, other, n=0, lineterm="")
            if line[1:2] == " "
        ]
        shown = [
            f"{line[0]} {line[1:].strip()}"
            for line in differing
            if not line[1:].strip().startswith('"SM_')
        ]
        assert shown, "two scenarios with one plan"
        lines += [f"# {name} is {like}, but", *shown, ""]
    golden("others.diff", "\n".join(lines))


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_plan_is_the_same_twice(name: str) -> None:
    assert SCENARIOS[name]() == SCENARIOS[name]()
    assert SCENARIOS[name]().to_json() == SCENARIOS[name]().to_json()


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_word_of_the_command_line_has_its_reason(name: str) -> None:
    node_plan = SCENARIOS[name]()
    assert words_of(node_plan.why) == node_plan.argv
    assert all(reason.why and reason.origin in Origin for reason in node_plan.why)


def test_planning_has_no_effects() -> None:
    """Touch no file, socket, process or directory between the environment and the plan."""
    environments: list[Environment] = [
        environment(MPI, hosts=TWO),
        environment(TORCH, hosts=TWO, devices=EIGHT_GPUS, instance_type="ml.fast.xlarge"),
        environment({"epochs": 1}),
    ]
    for job_environment in environments:  # lazy imports happen here, before anybody listens
        plan(job_environment).to_json()
    heard: list[str] = []
    listening = [True]

    def listen(event: str, arguments: tuple[object, ...]) -> None:
        del arguments
        if listening and event.startswith(
            ("open", "os.", "socket.", "subprocess.", "shutil.", "tempfile.", "import")
        ):
            heard.append(event)

    # A hook cannot be taken away again; emptied of its switch it does nothing.
    sys.addaudithook(listen)
    try:
        for job_environment in environments:
            plan(job_environment).to_json()
            plan(job_environment, "algo-2").to_json() if job_environment.hosts.document else None
    finally:
        listening.clear()
    assert heard == []


@pytest.mark.parametrize(
    ("switch", "words"),
    [
        ("sagemaker_mpi_enabled", ("-np", "8192")),
        ("sagemaker_distributed_dataparallel_enabled", ("-np", "8192")),
        ("sagemaker_torch_distributed_enabled", ("--nnodes=4096", "--nproc-per-node=2")),
        ("sagemaker_multi_worker_mirrored_strategy_enabled", ("/usr/bin/python", "train.py")),
    ],
)
def test_planning_thousands_of_hosts_is_quick(switch: str, words: tuple[str, str]) -> None:
    """Every host in a group, so that the groups are gone through as well.

    The host last in the list for torchrun.
    """
    import time

    hosts = [f"algo-{number}" for number in range(1, 4097)]
    groups: Json = [{"instance_group_name": "all", "instance_type": "local", "hosts": [*hosts]}]
    config: dict[str, Json] = {
        "current_host": "algo-1",
        "hosts": [*hosts],
        "instance_groups": groups,
    }
    hyperparameters = {switch: "true", "sagemaker_mpi_num_of_processes_per_host": "2"}
    job_environment = environment(hyperparameters, resource_config=MappingProxyType(config))
    components = MappingProxyType({**job_environment.manifest.components, "tensorflow": "2.18.0"})
    job_environment = job_environment._replace(
        manifest=job_environment.manifest._replace(components=components)
    )
    host = "algo-1" if "-np" in words else "algo-4096"
    started = time.process_time()
    argv = plan(job_environment, host).argv
    assert time.process_time() - started < 1.0
    assert words in set(itertools.pairwise(argv))
