"""The environment variables that the user's script is given: names and text forms of sagemaker-training. Pure.

Computed on each host from that host's own facts and never forwarded from another one: a rank sees its own host in
SM_CURRENT_HOST. Text forms: a string as it is, null as "", everything else compact JSON with sorted keys.
Where a value differs from sagemaker-training's on purpose, docs/environment.md says so and why; a test runs both over
many inputs and allows no other difference.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Mapping, Sequence

from trainworks_launcher import cluster, model_parallel, names
from trainworks_launcher.arguments import to_arguments
from trainworks_launcher.entry import EntryPoint
from trainworks_launcher.environment import Environment
from trainworks_launcher.errors import Problem
from trainworks_launcher.values import Json, compact, mapping, text, texts, unusable

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
"""Variables that differ between the hosts of one job; a user's ``-x`` of one of them would copy the leader's."""


def exported_variables(
    environment: Environment,
    *,
    mode: str,
    user: Mapping[str, Json],
    reserved: Mapping[str, Json],
    entry: EntryPoint,
    hosts: Sequence[str],
    host: str,
    distribution_hosts: Sequence[str],
    interface: str,
    instance_type: str,
    master_port: int,
    arguments: Sequence[str],
) -> Mapping[str, str]:
    """All variables for ``host``. ``distribution_hosts``: those that take part, rank 0's first. ``interface`` is the
    one in use (it may replace the platform's)."""
    base = environment.base_directory
    config = environment.resource_config
    module_directory = environment.code.directory
    job_name = text(reserved.get(names.JOB_NAME))
    platform_job_name = environment.variables.get(names.JOB_NAME_VARIABLE, "")
    master = distribution_hosts[0] if len(hosts) > 1 else names.LOOPBACK
    properties = _properties(
        environment,
        mode=mode,
        user=user,
        reserved=reserved,
        entry=entry,
        hosts=hosts,
        host=host,
        distribution_hosts=distribution_hosts,
        interface=interface,
        instance_type=instance_type,
    )
    all_hosts = texts(properties["hosts"])
    training_environment: dict[str, Json] = {
        **properties,
        "job_name": platform_job_name or job_name or None,
        "master_addr": master,
        "master_port": master_port,
    }
    values: dict[str, Json] = {name: value for name, value in properties.items() if name not in _ONLY_AS_PROPERTY}
    channels = mapping(properties["channel_input_dirs"])
    channel_names: list[Json] = [*sorted(channels)]
    values.update(
        {
            "channels": channel_names,
            "current_host_rank": all_hosts.index(host),
            "entry_script": entry.name,
            "framework_params": properties["additional_framework_parameters"],
            "host_count": len(all_hosts),
            "hps": dict(user),
            "master_addr": master,
            "master_port": master_port,
            "output_failure": f"{base}/{names.FAILURE_FILE}",
            "source_dir": module_directory,
            "training_env": training_environment,
            "user_args": [*arguments],
        }
    )
    if config.get("topology"):
        values["topology"] = config.get("topology")
    for prefix, rows in (("channel", channels), ("hp", user)):
        # A shell cannot read a variable with a hyphen in its name, so there is a second name without.
        values.update({f"{prefix}_{name.replace('-', '_')}": value for name, value in rows.items() if "-" in name})
        values.update({f"{prefix}_{name}": value for name, value in rows.items()})
    exported = {f"SM_{name.upper()}": _text_form(value) for name, value in values.items()}
    exported["CURRENT_HOST"] = host
    exported["SAGEMAKER_JOB_NAME"] = job_name or platform_job_name
    exported["SAGEMAKER_REGION"] = region_of(environment, reserved)
    exported[names.SUBMIT_DIRECTORY_VARIABLE] = module_directory
    exported["MASTER_ADDR"] = master
    exported["MASTER_PORT"] = str(master_port)
    python_path = environment.variables.get("PYTHONPATH", "")
    exported["PYTHONPATH"] = module_directory + (f":{python_path}" if python_path else "")
    if len(hosts) > 1:
        exported.update(_hostname_variables(environment, host))
    exported.update(_log_variables(environment))
    return MappingProxyType(dict(sorted(exported.items())))


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
"""Properties that are in SM_TRAINING_ENV and have no variable of their own, or one by another name."""


def _properties(
    environment: Environment,
    *,
    mode: str,
    user: Mapping[str, Json],
    reserved: Mapping[str, Json],
    entry: EntryPoint,
    hosts: Sequence[str],
    host: str,
    distribution_hosts: Sequence[str],
    interface: str,
    instance_type: str,
) -> dict[str, Json]:
    """What SM_TRAINING_ENV tells of the job: the properties of sagemaker-training's Environment, by their names."""
    base = environment.base_directory
    config = environment.resource_config
    all_hosts = texts(config.get("hosts")) or tuple(hosts)
    groups = cluster.instance_groups(config)
    group = cluster.group_of(config, host)
    group_name = group.name if group else text(config.get("current_group_name")) or cluster.HOMOGENEOUS
    rows = config.get("instance_groups")
    group_names: list[Json] = [row.name for row in groups]
    by_name: dict[str, Json] = {
        named.name: dict(mapping(row)) for named, row in zip(groups, rows if isinstance(rows, list) else [])
    }
    on_by_default: list[Json] = [group_name] if mode != "none" else []
    distributed = reserved.get(names.DISTRIBUTION_INSTANCE_GROUPS, on_by_default)
    asked = texts(distributed)
    taking_part = [name for row in groups if row.name in asked for name in row.hosts] if groups else all_hosts
    if mode != "none":
        taking_part = [*distribution_hosts]
    master = taking_part[0] if taking_part else all_hosts[0]
    framework_parameters: dict[str, Json] = {
        name: value for name, value in reserved.items() if name not in names.RESERVED_NAMES
    }
    parallel, _ = model_parallel.parameters(environment.hyperparameters, environment.variables)
    own_config: dict[str, Json] = {**config, "current_host": host, "hosts": [*all_hosts]}
    return {
        "additional_framework_parameters": framework_parameters,
        "channel_input_dirs": {name: f"{base}/input/data/{name}" for name in environment.input_data_config},
        "current_host": host,
        "current_instance_group": group_name,
        "current_instance_group_hosts": [*(group.hosts if group else all_hosts)],
        "current_instance_type": instance_type,
        "distribution_hosts": [*taking_part],
        "distribution_instance_groups": distributed,
        "framework_module": environment.variables.get(names.TRAINING_MODULE_VARIABLE),
        "hosts": [*all_hosts],
        "hyperparameters": dict(user),
        "input_config_dir": f"{base}/input/config",
        "input_data_config": dict(environment.input_data_config),
        "input_data_dir": f"{base}/input/data",
        "input_dir": f"{base}/input",
        "instance_groups": group_names,
        "instance_groups_dict": by_name,
        "is_hetero": len(groups) > 1,
        "is_master": host == master,
        "is_modelparallel_enabled": parallel is not None,
        "is_smddpmprun_installed": "smddpmprun" in environment.programs,
        "is_smddprun_installed": "smddprun" in environment.programs,
        "log_level": _log_level(environment, reserved),
        "master_hostname": master,
        "model_dir": f"{base}/model",
        "module_dir": environment.code.directory,
        "module_name": entry.module_name,
        "network_interface_name": interface or _default_interface(environment),
        "num_cpus": environment.devices.cpus,
        "num_gpus": environment.devices.gpus,
        "num_neurons": _neuron_cores(environment, instance_type),
        "output_data_dir": f"{base}/output/data",
        "output_dir": f"{base}/output",
        "output_intermediate_dir": f"{base}/output/intermediate",
        "resource_config": own_config,
        "topology": config.get("topology", []),
        "user_entry_point": entry.name,
    }


def check_exported(
    environment: Environment, user: Mapping[str, Json], reserved: Mapping[str, Json], style: str
) -> list[Problem]:
    """What cannot become a variable, or an argument of this style: told with its source, before anything is started."""
    problems: list[Problem] = []
    for name, value in user.items():
        where = f"hyperparameter {name!r}"
        wrong = _check_name(name, "hyperparameter", where)
        problems += wrong
        bad = (
            ""
            if wrong
            else next(filter(None, map(unusable, (*to_arguments({name: value}, style), _text_form(value)))), "")
        )
        if bad:
            problems.append(Problem(f"its value {bad}", where, "a program can only be given text: leave it out"))
    for name in environment.input_data_config:
        problems += _check_name(name, "channel", f"channel {name!r}")
    for name, value in reserved.items():
        bad = unusable(value) if isinstance(value, str) else ""
        if bad:
            problems.append(Problem(f"its value {bad}", f"hyperparameter {name}", "leave it out"))
    for name, value in environment.resource_config.items():
        bad = next(filter(None, map(unusable, (text(value), *texts(value)))), "")
        if bad:
            problems.append(Problem(f"{name!r} {bad}", names.RESOURCE_CONFIG_FILE, "leave it out"))
    for group in cluster.instance_groups(environment.resource_config):
        bad = unusable(group.name) or unusable(group.instance_type)
        if bad:
            problems.append(Problem(f"an instance group {bad}", names.RESOURCE_CONFIG_FILE, "leave it out"))
    if _log_level(environment, reserved) is None:
        value = reserved.get(names.LOG_LEVEL)
        given = reserved.get(names.LOG_LEVEL) not in (None, "")
        where = f"hyperparameter {names.LOG_LEVEL}" if given else f"variable {names.LOG_LEVEL_VARIABLE}"
        shown = value if given else environment.variables.get(names.LOG_LEVEL_VARIABLE)
        advice = f"give a number such as 20, or one of {', '.join(_LEVELS)}"
        problems.append(Problem(f"{shown!r} is not a log level", where, advice))
    return problems


def _check_name(name: str, what: str, where: str) -> list[Problem]:
    """What keeps a name from being part of a variable's name (environ(7): no ``=``) and of an argument."""
    bad = "is empty" if not name else "has a '='" if "=" in name else unusable(name)
    advice = "use letters, digits, . _ -"
    return [Problem(f"the name of the {what} {bad}, so no variable can have it", where, advice)] if bad else []


def warn_exported(user: Mapping[str, Json], reserved: Mapping[str, Json]) -> list[str]:
    """Warnings: hyperparameters whose names differ only in case share one variable; what is asked for and not done."""
    held: dict[str, str] = {}
    warnings: list[str] = []
    if text(reserved.get(names.S3_OUTPUT)).startswith("s3://"):
        warnings.append(
            f"{names.S3_OUTPUT} is set, but this launcher uploads nothing while the job runs: what is in"
            " output/intermediate stays there; write checkpoints to the checkpoint directory"
        )
    for name in user:
        variable = f"SM_HP_{name.upper()}"
        if variable in held:
            warnings.append(
                f"the hyperparameters {held[variable]!r} and {name!r} share the variable {variable}, which has the"
                f" value of {name!r}; arguments and SM_HPS have both"
            )
        held[variable] = name
    return warnings


_LEVELS: Mapping[str, int] = MappingProxyType(
    {"CRITICAL": 50, "FATAL": 50, "ERROR": 40, "WARNING": 30, "WARN": 30, "INFO": 20, "DEBUG": 10, "NOTSET": 0}
)
"""Names that Python's logging has for its levels; a script is told the number, in any case."""


def _log_level(environment: Environment, reserved: Mapping[str, Json]) -> Json:
    """The log level for the script: the hyperparameter, else the variable, else 20; None if it is not a level."""
    value = reserved.get(names.LOG_LEVEL)
    if value is None or value == "":
        given = environment.variables.get(names.LOG_LEVEL_VARIABLE, "").strip()
        value = int(given) if given.isdecimal() and len(given) < 10 else given or names.LOG_LEVEL_DEFAULT
    if isinstance(value, str):
        return _LEVELS.get(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _default_interface(environment: Environment) -> str:
    """The platform's usual interface where none is named, if it exists here."""
    known = environment.devices.interfaces
    named = environment.resource_config.get("network_interface_name")
    return names.INTERFACE if not named and (names.INTERFACE in known or not known) else ""


def _text_form(value: Json) -> str:
    """A value as the text of an environment variable."""
    if value is None:
        return ""
    return value if isinstance(value, str) else compact(value)


def region_of(environment: Environment, reserved: Mapping[str, Json]) -> str:
    """The region: the job's hyperparameter, else the first variable that is set."""
    given = text(reserved.get(names.REGION))
    return given or next(filter(None, map(environment.variables.get, names.REGION_VARIABLES)), "") or ""


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
