"""Compute the environment variables of the user's script, named as in sagemaker-training. Pure.

Each host computes its own variables and gets none from another host: a rank reads its own host in
SM_CURRENT_HOST. A string keeps its text, null is "", and every other value is compact JSON with
sorted keys. docs/environment.md lists the intended differences from sagemaker-training; a test
compares both with many inputs and finds no other difference.
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

``-x`` of such a variable would copy the leader's value to the ranks of every host.
"""


def exported_variables(job: Job) -> Mapping[str, str]:
    """Return all variables of the script on the job's host, sorted by name.

    A variable that the platform keeps has the container's value; it is absent without one.
    """
    environment = job.environment
    user, reserved = environment.user_hyperparameters, environment.reserved
    exported: dict[str, str] = {}
    for name, value in _sm_values(job, user, reserved).items():
        exported[f"SM_{name.upper()}"] = text_form(value)
    exported.update(_job_variables(job, reserved))
    exported.update(_host_variables(job))
    # Variables of the platform, such as MASTER_ADDR of a PyTorchJob, keep its values.
    for name in environment.platform.kept:
        exported.pop(name, None)
        if environment.variables.get(name):
            exported[name] = environment.variables[name]
    return MappingProxyType(dict(sorted(exported.items())))


def _sm_values(job: Job, user: Mapping[str, Json], reserved: Reserved) -> Mapping[str, Json]:
    """Return the values of the SM_ variables: name without SM_, in lower case -> value.

    For example ``current_host`` for SM_CURRENT_HOST, and ``hp_lr`` for SM_HP_LR.

    Args:
        job: The job.
        user: The user's hyperparameters.
        reserved: The platform's hyperparameters, such as sagemaker_program.
    """
    environment = job.environment
    properties = _properties(job, user, reserved)
    hosts, channels = texts(properties["hosts"]), mapping(properties["channel_input_dirs"])
    channel_names: list[Json] = [*sorted(channels)]
    master: dict[str, Json] = {
        "master_addr": _master_address(job),
        "master_port": job.network.master_port,
    }
    job_name: Json = environment.variables.get(names.JOB_NAME_VARIABLE)
    if not job_name:
        job_name = reserved.text(names.JOB_NAME) or None
    training_environment: dict[str, Json] = {**properties, "job_name": job_name, **master}
    values = {name: value for name, value in properties.items() if name not in _ONLY_AS_PROPERTY}
    values.update(master)
    values.update(
        {
            "channels": channel_names,
            "current_host_rank": hosts.index(job.placement.host),
            "entry_script": job.program.entry.name,
            "framework_params": properties["additional_framework_parameters"],
            "host_count": len(hosts),
            "hps": dict(user),
            "output_failure": f"{environment.output}/{names.FAILURE_FILE}",
            "source_dir": environment.code.directory,
            "training_env": training_environment,
            "user_args": [*job.program.arguments],
        }
    )
    topology = environment.hosts.document.get("topology")
    if topology:
        values["topology"] = topology
    values.update(_named_values("channel", channels))
    values.update(_named_values("hp", user))
    return values


def _named_values(prefix: str, values: Mapping[str, Json]) -> dict[str, Json]:
    """Return one value per channel or hyperparameter: ``hp_batch-size`` and ``hp_batch_size``.

    The second name of a value is for shells, which cannot read a variable with a hyphen.
    """
    named: dict[str, Json] = {}
    for name, value in values.items():
        if "-" in name:
            named[f"{prefix}_{name.replace('-', '_')}"] = value
    # A hyperparameter with underscores of its own replaces the second name of another one.
    for name, value in values.items():
        named[f"{prefix}_{name}"] = value
    return named


def _master_address(job: Job) -> str:
    """Return MASTER_ADDR, the address of rank 0's host; 127.0.0.1 in a job of one host."""
    if len(job.placement.hosts) == 1:
        return names.LOOPBACK
    return job.placement.leader_address


def _job_variables(job: Job, reserved: Reserved) -> dict[str, str]:
    """Return the variables about the job. All hosts have the same, but for the leader's address."""
    environment = job.environment
    platform_job_name = environment.variables.get(names.JOB_NAME_VARIABLE, "")
    exported = {
        "MASTER_ADDR": _master_address(job),
        "MASTER_PORT": str(job.network.master_port),
        "SAGEMAKER_JOB_NAME": reserved.text(names.JOB_NAME) or platform_job_name,
        "SAGEMAKER_REGION": region_of(environment.variables, reserved),
        names.RESTARTS_VARIABLE: str(environment.platform.restarts),
        names.SUBMIT_DIRECTORY_VARIABLE: environment.code.directory,
    }
    if job.placement.mode == MODEL_PARALLEL:
        value, _ = model_parallel.parameters(environment.hyperparameters, environment.variables)
        parameters = model_parallel.complete(mapping(value))
        exported[names.MODEL_PARALLEL_VARIABLE] = compact(parameters)
    if environment.drivers.distributed:
        exported[names.DISTRIBUTED_CONFIG_VARIABLE] = compact(dict(environment.drivers.distributed))
    return exported


def _host_variables(job: Job) -> dict[str, str]:
    """Return the variables of programs on this host, such as PYTHONPATH and HOME."""
    environment, placement = job.environment, job.placement
    python_path = environment.code.directory
    if environment.variables.get("PYTHONPATH"):
        python_path += f":{environment.variables['PYTHONPATH']}"
    exported = {
        "CURRENT_HOST": placement.host,
        "PYTHONPATH": python_path,
        **environment.locale,
    }
    if "PYTHONUNBUFFERED" not in environment.variables:
        # Python would write the output of a script in blocks, the last one at the end.
        exported["PYTHONUNBUFFERED"] = "1"
    # Programs resolve the hostname, so that a name which does not resolve is only for mpirun, which
    # pairs hosts by name.
    is_hostname_usable = environment.platform.names_resolve or MODES[placement.mode].by_mpirun
    if len(placement.hosts) > 1 and is_hostname_usable:
        exported.update(_hostname_variables(environment, placement.host))
    optional = {
        "HOME": environment.home,
        "TMPDIR": environment.temporary,
        names.CHECKPOINT_DIRECTORY_VARIABLE: environment.checkpoint_directory,
        names.RESUME_VARIABLE: environment.resume_from,
    }
    exported.update({name: value for name, value in optional.items() if value})
    return exported


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
"""Properties in SM_TRAINING_ENV without a variable of their own, or with one of another name."""


def _properties(job: Job, user: Mapping[str, Json], reserved: Reserved) -> dict[str, Json]:
    """Return the object in SM_TRAINING_ENV: the properties of sagemaker-training's Environment.

    Args:
        job: The job.
        user: The user's hyperparameters.
        reserved: The platform's hyperparameters, such as sagemaker_program.
    """
    environment, entry = job.environment, job.program.entry
    instance = environment.manifest.instances.get(job.placement.instance_type)
    neurons = 0
    if instance is not None and environment.devices.neuron_devices:
        neurons = instance.neuron_cores
    interface = job.network.interface
    if not interface and not environment.hosts.document.get("network_interface_name"):
        # The usual interface of SageMaker, if it exists on this host.
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
    """Return the properties with a path of a directory."""
    base, results = environment.base_directory, environment.places
    channels: dict[str, Json] = {}
    for name in environment.input_data_config:
        channels[name] = f"{base}/input/data/{name}"
    return {
        "channel_input_dirs": channels,
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
    """Return the properties about the hosts of the job, the instance groups, and this host.

    The master is the first host of the distribution. In mode ``none`` the distribution is every
    host of the instance groups that the user names; without instance groups it is every host.
    """
    placement, hosts = job.placement, job.environment.hosts
    mode, host = placement.mode, placement.host
    all_hosts = hosts.names or placement.hosts
    groups, own_group = hosts.groups, hosts.group_of(host)
    if own_group is not None:
        group_name, group_hosts = own_group.name, own_group.hosts
    else:
        group_name, group_hosts = hosts.current_group or HOMOGENEOUS, all_hosts
    entries = hosts.document.get("instance_groups")
    group_names: list[Json] = [group.name for group in groups]
    groups_by_name: dict[str, Json] = {}
    if isinstance(entries, list):
        for group, entry in zip(groups, entries):
            groups_by_name[group.name] = dict(mapping(entry))

    # In mode none no host has ranks, so that no group is in the distribution by default.
    default_groups: list[Json] = []
    if mode != "none":
        default_groups.append(group_name)
    distribution_groups = reserved.get(names.DISTRIBUTION_INSTANCE_GROUPS, default_groups)
    distribution_hosts: list[str] = []
    if mode != "none":
        distribution_hosts += placement.distribution_hosts
    elif groups:
        for group in groups:
            if group.name in texts(distribution_groups):
                distribution_hosts += group.hosts
    else:
        distribution_hosts += all_hosts
    master = all_hosts[0]
    if distribution_hosts:
        master = distribution_hosts[0]
    own_config: dict[str, Json] = {**hosts.document, "current_host": host, "hosts": [*all_hosts]}
    return {
        "current_host": host,
        "current_instance_group": group_name,
        "current_instance_group_hosts": [*group_hosts],
        "current_instance_type": placement.instance_type,
        "distribution_hosts": [*distribution_hosts],
        "distribution_instance_groups": distribution_groups,
        "hosts": [*all_hosts],
        "instance_groups": group_names,
        "instance_groups_dict": groups_by_name,
        "is_hetero": len(groups) > 1,
        "is_master": host == master,
        "master_hostname": master,
        "resource_config": own_config,
        "topology": hosts.document.get("topology", []),
    }


def _hostname_variables(environment: Environment, host: str) -> dict[str, str]:
    """Return the variables of the hostname shim, a library that replaces gethostname().

    ``{}`` if the kernel's hostname is this host's name in the job. Containers of a platform may all
    have the same hostname, and MPI, which pairs hosts by hostname, then takes them for one host.
    """
    if environment.hostname == host or not environment.hostname_shim:
        return {}
    preload = environment.variables.get("LD_PRELOAD", "")
    libraries = [environment.hostname_shim]
    libraries += [library for library in preload.split(":") if library]
    return {"LD_PRELOAD": ":".join(libraries), names.HOSTNAME_VARIABLE: host}
