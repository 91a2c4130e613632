"""The environment variables that the user's script is given: names and text forms of
sagemaker-training. Pure.

Computed on each host from that host's own facts and never forwarded from another one: a rank sees
its own host in SM_CURRENT_HOST. Text forms: a string as it is, null as "", everything else compact
JSON with sorted keys. Where a value differs from sagemaker-training's on purpose,
docs/environment.md says so and why; a test runs both over many inputs and allows no other
difference.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Mapping

from trainworks_launcher.contract import names
from trainworks_launcher.contract.hyperparameters import Reserved, truth
from trainworks_launcher.contract.json_values import Json, compact, mapping, text_form, texts
from trainworks_launcher.contract.modes import MODES, SWITCHES
from trainworks_launcher.contract.settings import log_level, region_of
from trainworks_launcher.environment.directories import OUTPUT
from trainworks_launcher.environment.environment import Environment
from trainworks_launcher.environment.resource_config import HOMOGENEOUS
from trainworks_launcher.job import model_parallel
from trainworks_launcher.job.job import Job
from trainworks_launcher.job.placement import MODEL_PARALLEL

HOST_SPECIFIC = frozenset(
    (
        "CURRENT_HOST",
        "SM_CURRENT_HOST",
        "SM_CURRENT_HOST_RANK",
        "SM_CURRENT_INSTANCE_GROUP",
        "SM_CURRENT_INSTANCE_GROUP_HOSTS",
        "SM_CURRENT_INSTANCE_TYPE",
        "SM_DISTRIBUTION_INSTANCE_GROUPS",
        "SM_NETWORK_INTERFACE_NAME",
        "SM_NUM_CPUS",
        "SM_NUM_GPUS",
        "SM_NUM_NEURONS",
        "SM_RESOURCE_CONFIG",
        "SM_TRAINING_ENV",
    )
)
"""Variables that differ between the hosts of one job.

A user's ``-x`` of one of them would copy the leader's.
"""


def exported_variables(job: Job) -> Mapping[str, str]:
    """Return all variables for the job's host."""
    environment = job.environment
    user, reserved = environment.user_hyperparameters, environment.reserved
    exported = {
        f"SM_{name.upper()}": text_form(value)
        for name, value in _sm_values(job, user, reserved).items()
    }
    exported.update(_of_job(job, reserved))
    exported.update(_of_host(job))
    for name in environment.platform.kept:
        exported.pop(name, None)
        if environment.variables.get(name):
            exported[name] = environment.variables[name]
    return MappingProxyType(dict(sorted(exported.items())))


def _sm_values(job: Job, user: Mapping[str, Json], reserved: Reserved) -> Mapping[str, Json]:
    """Return the values of the variables that begin with SM_, by the rest of their names."""
    properties = _properties(job, user, reserved)
    all_hosts, channels = texts(properties["hosts"]), mapping(properties["channel_input_dirs"])
    channel_names: list[Json] = [*sorted(channels)]
    master: dict[str, Json] = {"master_addr": _master(job), "master_port": job.network.master_port}
    job_name = (
        job.environment.variables.get(names.JOB_NAME_VARIABLE)
        or reserved.text(names.JOB_NAME)
        or None
    )
    training_environment: dict[str, Json] = {**properties, "job_name": job_name, **master}
    values: dict[str, Json] = {
        **{name: value for name, value in properties.items() if name not in _ONLY_AS_PROPERTY},
        **master,
        "channels": channel_names,
        "current_host_rank": all_hosts.index(job.placement.host),
        "entry_script": job.program.entry.name,
        "framework_params": properties["additional_framework_parameters"],
        "host_count": len(all_hosts),
        "hps": dict(user),
        "output_failure": f"{job.environment.output}/{names.FAILURE_FILE}",
        "source_dir": job.environment.code.directory,
        "training_env": training_environment,
        "user_args": [*job.program.arguments],
    }
    topology = job.environment.hosts.document.get("topology")
    if topology:
        values["topology"] = topology
    for prefix, rows in (("channel", channels), ("hp", user)):
        # A shell cannot read a variable with a hyphen in its name, so there is
        # a second name without.
        values.update(
            {
                f"{prefix}_{name.replace('-', '_')}": value
                for name, value in rows.items()
                if "-" in name
            }
        )
        values.update({f"{prefix}_{name}": value for name, value in rows.items()})
    return values


def _master(job: Job) -> str:
    """Return where rank 0 is."""
    return job.placement.leader_address if len(job.placement.hosts) > 1 else names.LOOPBACK


def _of_job(job: Job, reserved: Reserved) -> dict[str, str]:
    """Return the other variables that tell about the job: the same on every host, but for the
    leader's own address.
    """
    environment = job.environment
    platform_job_name = environment.variables.get(names.JOB_NAME_VARIABLE, "")
    exported = {
        "MASTER_ADDR": _master(job),
        "MASTER_PORT": str(job.network.master_port),
        "SAGEMAKER_JOB_NAME": reserved.text(names.JOB_NAME) or platform_job_name,
        "SAGEMAKER_REGION": region_of(environment.variables, reserved),
        names.RESTARTS_VARIABLE: str(environment.platform.restarts),
        names.SUBMIT_DIRECTORY_VARIABLE: environment.code.directory,
    }
    if job.placement.mode == MODEL_PARALLEL:
        parallel, _ = model_parallel.parameters(environment.hyperparameters, environment.variables)
        exported[names.MODEL_PARALLEL_VARIABLE] = compact(
            model_parallel.complete(mapping(parallel))
        )
    if environment.drivers.distributed:
        exported[names.DISTRIBUTED_CONFIG_VARIABLE] = compact(dict(environment.drivers.distributed))
    return exported


def _of_host(job: Job) -> dict[str, str]:
    """Return the variables that programs on this host need."""
    environment, placement = job.environment, job.placement
    python_path = environment.variables.get("PYTHONPATH", "")
    exported = {
        "CURRENT_HOST": placement.host,
        "PYTHONPATH": environment.code.directory + (f":{python_path}" if python_path else ""),
        **environment.locale,
    }
    if "PYTHONUNBUFFERED" not in environment.variables:
        # A log that appears only at the end is of no use.
        exported["PYTHONUNBUFFERED"] = "1"
    # Programs look their host up by its name: a made-up one is only for mpirun,
    # which pairs hosts by it.
    if len(placement.hosts) > 1 and (
        environment.platform.names_resolve or MODES[placement.mode].by_mpirun
    ):
        exported.update(_hostname_variables(environment, placement.host))
    known = {
        "HOME": environment.home,
        "TMPDIR": environment.temporary,
        names.CHECKPOINT_DIRECTORY_VARIABLE: environment.checkpoint_directory,
        names.RESUME_VARIABLE: environment.resume_from,
    }
    return {**exported, **{name: value for name, value in known.items() if value}}


_ONLY_AS_PROPERTY = frozenset(
    (
        "additional_framework_parameters",
        "channel_input_dirs",
        "distribution_hosts",
        "hyperparameters",
        "is_master",
        "is_modelparallel_enabled",
        "is_smddpmprun_installed",
        "is_smddprun_installed",
        "master_hostname",
        "topology",
    )
)
"""Properties that are in SM_TRAINING_ENV and have no variable of their own, or
one by another name.
"""


def _properties(job: Job, user: Mapping[str, Json], reserved: Reserved) -> dict[str, Json]:
    """Return what SM_TRAINING_ENV tells about the job: the properties of
    sagemaker-training's Environment.
    """
    environment, entry = job.environment, job.program.entry
    instance = environment.manifest.instances.get(job.placement.instance_type)
    neurons = 0
    if instance is not None and environment.devices.neuron_devices:
        neurons = instance.neuron_cores
    interface = job.network.interface
    if not interface and not environment.hosts.document.get("network_interface_name"):
        # The platform's usual one, if it exists on this host.
        interfaces = environment.devices.interfaces
        if not interfaces or names.INTERFACE in interfaces:
            interface = names.INTERFACE
    parallel, _ = model_parallel.parameters(environment.hyperparameters, environment.variables)
    framework_parameters: dict[str, Json] = {}
    for name, value in reserved.items():
        if name in names.RESERVED_NAMES:
            continue
        if name in SWITCHES:
            framework_parameters[name] = truth(value)
        else:
            framework_parameters[name] = value
    return {
        **_properties_of_hosts(job, reserved),
        **_directories(environment),
        "additional_framework_parameters": framework_parameters,
        "framework_module": environment.variables.get(names.TRAINING_MODULE_VARIABLE),
        "hyperparameters": dict(user),
        "input_data_config": dict(environment.input_data_config),
        "is_modelparallel_enabled": parallel is not None,
        "is_smddpmprun_installed": "smddpmprun" in environment.programs,
        "is_smddprun_installed": "smddprun" in environment.programs,
        "log_level": log_level(environment.variables, reserved),
        "module_name": entry.module_name,
        "network_interface_name": interface,
        "num_cpus": environment.devices.cpus,
        "num_gpus": environment.devices.gpus,
        "num_neurons": neurons,
        "user_entry_point": entry.name,
    }


def _directories(environment: Environment) -> dict[str, Json]:
    """Return the properties that say where something is."""
    base, results = environment.base_directory, environment.places
    return {
        "channel_input_dirs": {
            name: f"{base}/input/data/{name}" for name in environment.input_data_config
        },
        "input_config_dir": f"{base}/input/config",
        "input_data_dir": f"{base}/input/data",
        "input_dir": f"{base}/input",
        "model_dir": results["SM_MODEL_DIR"],
        "module_dir": environment.code.directory,
        "output_data_dir": results["SM_OUTPUT_DATA_DIR"],
        "output_dir": results[OUTPUT],
        "output_intermediate_dir": results["SM_OUTPUT_INTERMEDIATE_DIR"],
    }


def _properties_of_hosts(job: Job, reserved: Reserved) -> dict[str, Json]:
    """Return the properties that say which hosts there are, in which groups,
    and which one this is.
    """
    placement, hosts = job.placement, job.environment.hosts
    mode, host = placement.mode, placement.host
    all_hosts = hosts.names or placement.hosts
    groups, group = hosts.groups, hosts.group_of(host)
    if group is not None:
        group_name, group_hosts = group.name, group.hosts
    else:
        group_name, group_hosts = hosts.current_group or HOMOGENEOUS, all_hosts
    rows = hosts.document.get("instance_groups")
    group_names: list[Json] = [row.name for row in groups]
    by_name: dict[str, Json] = {}
    if isinstance(rows, list):
        for named, row in zip(groups, rows):
            by_name[named.name] = dict(mapping(row))

    on_by_default: list[Json] = [group_name] if mode != "none" else []
    distributed = reserved.get(names.DISTRIBUTION_INSTANCE_GROUPS, on_by_default)
    taking_part: list[str] = []
    if mode != "none":
        taking_part += placement.distribution_hosts
    elif groups:
        for named in groups:
            if named.name in texts(distributed):
                taking_part += named.hosts
    else:
        taking_part += all_hosts
    master = taking_part[0] if taking_part else all_hosts[0]
    own_config: dict[str, Json] = {**hosts.document, "current_host": host, "hosts": [*all_hosts]}
    return {
        "current_host": host,
        "current_instance_group": group_name,
        "current_instance_group_hosts": [*group_hosts],
        "current_instance_type": placement.instance_type,
        "distribution_hosts": [*taking_part],
        "distribution_instance_groups": distributed,
        "hosts": [*all_hosts],
        "instance_groups": group_names,
        "instance_groups_dict": by_name,
        "is_hetero": len(groups) > 1,
        "is_master": host == master,
        "master_hostname": master,
        "resource_config": own_config,
        "topology": hosts.document.get("topology", []),
    }


def _hostname_variables(environment: Environment, host: str) -> dict[str, str]:
    """Return the variables of the hostname shim, if the kernel's hostname is
    not this host's name in the job.

    Every container of a platform may answer the same word to gethostname(), and
    MPI then pairs the wrong processes.
    """
    if environment.hostname == host or not environment.hostname_shim:
        return {}
    preload = environment.variables.get("LD_PRELOAD", "")
    libraries = [environment.hostname_shim] + [word for word in preload.split(":") if word]
    return {"LD_PRELOAD": ":".join(libraries), names.HOSTNAME_VARIABLE: host}
