"""Made-up environments of the launcher, with nothing of this machine in them, for tests of plans.

The other modules of this package need no launcher.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from trainworks_launcher.contract.hyperparameters import decode_values
from trainworks_launcher.contract.json_values import Json
from trainworks_launcher.environment import platforms
from trainworks_launcher.environment.entry_point import Code
from trainworks_launcher.environment.environment import Devices, Environment
from trainworks_launcher.environment.manifest import Manifest, parse_manifest
from trainworks_launcher.environment.resource_config import read_hosts
from trainworks_launcher.job.job import make_job
from trainworks_launcher.plan.modes import plan_host
from trainworks_launcher.plan.plan import NodePlan

PROGRAMS = {
    name: f"/usr/bin/{name}"
    for name in ("python", "bash", "sh", "mpirun", "torchrun", "ray", "ssh", "sshd", "ssh-keygen")
}

INSTANCES: dict[str, Json] = {
    "ml.fast.xlarge": {"gpus": 8, "neuron_cores": 0, "efa": True, "efa_rdma": True},
    "ml.fabric.xlarge": {"gpus": 4, "neuron_cores": 0, "efa": True, "efa_rdma": False},
    "ml.plain.xlarge": {"gpus": 0, "neuron_cores": 0, "efa": False, "efa_rdma": False},
    "ml.neuron.xlarge": {"gpus": 0, "neuron_cores": 32, "efa": True, "efa_rdma": True},
}

NO_GPU = Devices(gpus=0, cpus=4, interfaces=("eth0", "lo"))


def manifest_document(open_mpi: str = "5.0.11", **changes: Json) -> dict[str, Json]:
    """Return an image manifest as the builder writes it, with these keys changed."""
    return {
        "schema": 1,
        "name": "made-up",
        "components": {
            "open-mpi": {"version": open_mpi, "prefix": "/opt/venv"},
            "mpi4py": {"version": "4.1.2"},
        },
        "missing": [
            {"component": "aws-ofi-nccl", "cost": "NCCL talks TCP between hosts instead of EFA"}
        ],
        "instances": INSTANCES,
        "programs": dict(PROGRAMS),
        "hostname_shim": "/opt/trainworks/lib/libhostname.so",
        **changes,
    }


def manifest(open_mpi: str = "5.0.11") -> Manifest:
    """Return the manifest of a made-up image."""
    return parse_manifest(json.dumps(manifest_document(open_mpi)), "made-up")


def environment(
    hyperparameters: Mapping[str, Json] | None = None,
    *,
    hosts: Sequence[str] = (),
    host: str = "algo-1",
    instance_type: str = "ml.plain.xlarge",
    interface: str = "eth0",
    variables: Mapping[str, str] | None = None,
    devices: Devices = NO_GPU,
    open_mpi: str = "5.0.11",
    resource_config: Mapping[str, Json] | None = None,
    **changes: object,
) -> Environment:
    """Return a whole environment with nothing of this machine in it.

    Args:
        hyperparameters: Those of the job, beside ``sagemaker_program``.
        hosts: The hosts of the job. Without hosts the resource config is empty.
        host: The host that this environment is of.
        instance_type: One of ``INSTANCES``.
        interface: The network interface that the platform names.
        variables: The variables of the process.
        devices: The devices of the host.
        open_mpi: The version of Open MPI in the image.
        resource_config: A whole resource config, instead of one of these values.
        changes: Fields of the environment with other values.
    """
    config: dict[str, Json] = {}
    if hosts:
        config = {
            "current_host": host,
            "hosts": list(hosts),
            "current_instance_type": instance_type,
            "network_interface_name": interface,
        }
    hosts_config = config if resource_config is None else resource_config
    value = Environment(
        base_directory="/opt/ml",
        variables=MappingProxyType(dict(variables or {"PATH": "/usr/bin:/bin"})),
        hyperparameters=decode_values({"sagemaker_program": "train.py", **(hyperparameters or {})}),
        hosts=read_hosts(hosts_config),
        input_data_config=MappingProxyType({}),
        manifest=_for_its_devices(manifest(open_mpi), instance_type),
        devices=devices,
        code=Code("/opt/ml/code", entries=("run.sh", "tool", "train.py"), executable=("tool",)),
        hostname=host,
        programs=MappingProxyType(dict(PROGRAMS)),
        hostname_shim="/opt/trainworks/lib/libhostname.so",
        launcher_python="/usr/bin/python3",
        launcher_directory="/opt/trainworks/lib/trainworks_launcher",
        platform=platforms.describe(platforms.Sources(variables or {}, config, host)),
    )
    return value._replace(**changes)  # type: ignore[arg-type]


def _for_its_devices(given_manifest: Manifest, instance_type: str) -> Manifest:
    """Return an image with Neuron for hosts that have its cores."""
    if "neuron" not in instance_type:
        return given_manifest
    return given_manifest._replace(
        components=MappingProxyType({**given_manifest.components, "neuron-runtime": "2.32"})
    )


def plan(job_environment: Environment, host: str = "") -> NodePlan:
    """Return the plan of a host; ``""``: of the environment's own host."""
    return plan_host(make_job(job_environment, host))
