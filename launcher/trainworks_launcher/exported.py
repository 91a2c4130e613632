"""The environment variables that the user's script is given: names and text forms of sagemaker-training. Pure.

Computed on each host from that host's own facts and never forwarded from another one: a rank sees its own host in
SM_CURRENT_HOST. Text forms: a string as it is, null as "", everything else compact JSON with sorted keys.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Mapping, Sequence

from trainworks_launcher import names
from trainworks_launcher.entry import EntryPoint
from trainworks_launcher.environment import Environment
from trainworks_launcher.hyperparameters import to_arguments
from trainworks_launcher.values import Json, compact, mapping, number, text, texts

HOST_SPECIFIC = frozenset(
    (
        "CURRENT_HOST",
        "SM_CURRENT_HOST",
        "SM_CURRENT_INSTANCE_GROUP",
        "SM_CURRENT_INSTANCE_GROUP_HOSTS",
        "SM_CURRENT_INSTANCE_TYPE",
        "SM_NETWORK_INTERFACE_NAME",
        "SM_NUM_CPUS",
        "SM_NUM_GPUS",
        "SM_NUM_NEURONS",
        "SM_RESOURCE_CONFIG",
        "SM_TRAINING_ENV",
    )
)
"""Variables that differ between the hosts of one job; a user's ``-x`` of one of them would copy the leader's."""


def exported_variables(
    environment: Environment,
    *,
    user: Mapping[str, Json],
    reserved: Mapping[str, Json],
    entry: EntryPoint,
    hosts: Sequence[str],
    host: str,
    interface: str,
    instance_type: str,
    master_port: int,
) -> Mapping[str, str]:
    """All variables for ``host``. ``interface`` is the one in use (it may replace the platform's)."""
    base = environment.base_directory
    config = environment.resource_config
    groups = config.get("instance_groups")
    group_rows = [mapping(group) for group in groups] if isinstance(groups, list) else []
    by_name: dict[str, Json] = {text(row.get("instance_group_name")): dict(row) for row in group_rows}
    own = next((row for row in group_rows if host in texts(row.get("hosts"))), None)
    group_name = text(own.get("instance_group_name")) if own else text(config.get("current_group_name"))
    group_name = group_name or "homogeneousCluster"
    group_hosts: list[Json] = list(texts(own.get("hosts"))) if own else list(hosts)
    group_names: list[Json] = list(by_name)
    asked_groups = texts(reserved.get(names.DISTRIBUTION_INSTANCE_GROUPS)) or (group_name,)
    channels: dict[str, Json] = {name: f"{base}/input/data/{name}" for name in environment.input_data_config}
    framework_parameters: dict[str, Json] = {
        name: value for name, value in reserved.items() if name not in names.RESERVED_NAMES
    }
    log_level = number(reserved.get(names.LOG_LEVEL)) or 20
    module_directory = environment.code.directory
    job_name = text(reserved.get(names.JOB_NAME)) or environment.variables.get(names.JOB_NAME_VARIABLE, "")
    arguments: list[Json] = list(to_arguments(user))
    framework_module = environment.variables.get(names.TRAINING_MODULE_VARIABLE, "")
    neurons = _neuron_cores(environment, instance_type)
    own_config = {**config, "current_host": host} if config else {}

    shared: dict[str, Json] = {
        "channel_input_dirs": channels,
        "current_host": host,
        "current_instance_group": group_name,
        "current_instance_group_hosts": group_hosts,
        "current_instance_type": instance_type,
        "distribution_instance_groups": list(asked_groups),
        "framework_module": framework_module,
        "hosts": list(hosts),
        "input_config_dir": f"{base}/input/config",
        "input_data_config": dict(environment.input_data_config),
        "input_dir": f"{base}/input",
        "instance_groups": group_names,
        "instance_groups_dict": by_name,
        "is_hetero": len(by_name) > 1,
        "log_level": log_level,
        "model_dir": f"{base}/model",
        "module_dir": module_directory,
        "module_name": entry.module_name,
        "network_interface_name": interface,
        "num_cpus": environment.devices.cpus,
        "num_gpus": environment.devices.gpus,
        "num_neurons": neurons,
        "output_data_dir": f"{base}/output/data",
        "output_dir": f"{base}/output",
        "output_intermediate_dir": f"{base}/output/intermediate",
        "resource_config": own_config,
        "user_entry_point": entry.name,
    }
    training_environment: dict[str, Json] = {
        **shared,
        "additional_framework_parameters": framework_parameters,
        "distribution_hosts": list(hosts),
        "hyperparameters": dict(user),
        "is_master": host == hosts[0],
        "is_modelparallel_enabled": False,
        "job_name": job_name,
        "master_hostname": hosts[0],
    }
    values: dict[str, Json] = {name: value for name, value in shared.items() if name != "channel_input_dirs"}
    channel_names: list[Json] = [*sorted(channels)]
    values["channels"] = channel_names
    values["framework_params"] = framework_parameters
    values["hps"] = dict(user)
    values["training_env"] = training_environment
    values["user_args"] = arguments
    if config.get("topology"):
        values["topology"] = config.get("topology")
    for name, path in channels.items():
        values[f"channel_{name}"] = path
    for name, value in user.items():
        values[f"hp_{name}"] = value
    exported = {f"SM_{name.upper()}": _text_form(value) for name, value in values.items()}
    exported["CURRENT_HOST"] = host
    exported["SAGEMAKER_JOB_NAME"] = job_name
    exported["SAGEMAKER_REGION"] = _region(environment, reserved)
    exported[names.SUBMIT_DIRECTORY_VARIABLE] = module_directory
    exported["MASTER_ADDR"] = hosts[0] if len(hosts) > 1 else names.LOOPBACK
    exported["MASTER_PORT"] = str(master_port)
    python_path = environment.variables.get("PYTHONPATH", "")
    exported["PYTHONPATH"] = module_directory + (f":{python_path}" if python_path else "")
    if len(hosts) > 1:
        exported.update(_hostname_variables(environment, host))
    exported.update(_log_variables(environment))
    return MappingProxyType(dict(sorted(exported.items())))


def _text_form(value: Json) -> str:
    """A value as the text of an environment variable."""
    if value is None:
        return ""
    return value if isinstance(value, str) else compact(value)


def _region(environment: Environment, reserved: Mapping[str, Json]) -> str:
    """The region: first variable that is set, else the hyperparameter."""
    for name in names.REGION_VARIABLES:
        if environment.variables.get(name):
            return environment.variables[name]
    return text(reserved.get(names.REGION))


def _neuron_cores(environment: Environment, instance_type: str) -> int:
    """Neuron cores of this host: the instance table's figure, if there are Neuron devices at all."""
    row = environment.manifest.instances.get(instance_type)
    return row.neuron_cores if row and environment.devices.neuron_devices else 0


def _hostname_variables(environment: Environment, host: str) -> dict[str, str]:
    """The hostname shim, only in jobs of several hosts where the platform's hostname is not the job's name of this one.

    Every container of a platform may answer the same word to gethostname(), and MPI then pairs the wrong processes.
    """
    if environment.hostname == host or not environment.hostname_shim:
        return {}
    preload = environment.variables.get("LD_PRELOAD", "")
    libraries = [environment.hostname_shim] + [word for word in preload.split(":") if word]
    return {"LD_PRELOAD": ":".join(libraries), names.HOSTNAME_VARIABLE: host}


def _log_variables(environment: Environment) -> dict[str, str]:
    """Unbuffered Python output unless the user chose otherwise: a log that appears at the end helps nobody."""
    if "PYTHONUNBUFFERED" in environment.variables:
        return {}
    return {"PYTHONUNBUFFERED": "1"}
