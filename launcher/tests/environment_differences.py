"""List the differences of the script's environment from sagemaker-training's that are on purpose:
the one table of it, with the reasons.

Each row is a correction of sagemaker-training's variables. The test applies all rows to the
variables that the real package exports for an input and demands exactly those of the launcher, for
hundreds of inputs; and for each row it leaves that row out for the row's own example and demands
that they differ, so that no row outlives its difference. The table in docs/tables/differences.md is
made from the rows.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from trainworks_launcher.contract.json_values import Json, compact, mapping, text, texts

SWITCHES = tuple(
    f"sagemaker_{name}_enabled"
    for name in (
        *(
            "mpi",
            "parameter_server",
            "distributed_dataparallel",
            "pytorch_ddp",
            "pytorch_xla_multi_worker",
        ),
        *("multi_worker_mirrored_strategy", "torch_distributed"),
    )
)


ONE_HOST: dict[str, Json] = {
    "current_host": "algo-1",
    "hosts": ["algo-1"],
    "network_interface_name": "eth0",
}


@dataclass(frozen=True)
class Case:
    """One input. ``{base}`` in a text stands for the base directory. None: the file does not exist.

    archive: the code is in BASE/sourcedir.tar.gz and not in BASE/code. one_cpu:
    the process may use one CPU only.
    """

    hyperparameters: Mapping[str, Json] | None = field(
        default_factory=lambda: {"sagemaker_program": "train.py"}
    )
    config: Mapping[str, Json] | None = field(default_factory=lambda: ONE_HOST)
    channels: Mapping[str, Json] | None = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    archive: bool = False
    one_cpu: bool = False

    def decoded(self, name: str) -> Json:
        """A hyperparameter as both launchers decode it."""
        value = (self.hyperparameters or {}).get(name)
        try:
            return json.loads(value) if isinstance(value, str) else value
        except ValueError:
            return value

    @property
    def hosts(self) -> tuple[str, ...]:
        return texts((self.config or {}).get("hosts"))

    @property
    def host(self) -> str:
        return text((self.config or {}).get("current_host"))

    @property
    def groups(self) -> dict[str, tuple[str, ...]]:
        listed = (self.config or {}).get("instance_groups")
        rows = [mapping(row) for row in listed] if isinstance(listed, list) else []
        return {text(row.get("instance_group_name")): texts(row.get("hosts")) for row in rows}


class Exported:
    """The variables that one launcher exports, with SM_TRAINING_ENV decoded, so that a correction
    can change both places.
    """

    def __init__(self, base: str, cpus: int, variables: Mapping[str, str]) -> None:
        self.base = base
        self.cpus = cpus
        self.variables = dict(variables)
        self.properties: dict[str, Json] = json.loads(self.variables.pop("SM_TRAINING_ENV", "{}"))

    def set(self, name: str, value: Json, property_name: str = "") -> None:
        """Set SM_NAME, and the property in SM_TRAINING_ENV if there is one of that name."""
        shown = value if isinstance(value, str) else compact(value)
        if value is None:
            shown = ""
        self.variables[f"SM_{name.upper()}"] = shown
        if (property_name or name) in self.properties:
            self.properties[property_name or name] = value

    def texts(self) -> dict[str, str]:
        """All variables, SM_TRAINING_ENV with them, in the text form that both write."""
        return {**self.variables, "SM_TRAINING_ENV": compact(self.properties)}


@dataclass(frozen=True)
class Difference:
    """One row: the variables, the value of each launcher, and the reason for ours.

    How to get ours from theirs.
    """

    about: str
    theirs: str
    ours: str
    why: str
    correct: Callable[[Case, Exported], None]
    example: Case


def _hyperparameters(**more: Json) -> dict[str, Json]:
    return {"sagemaker_program": "train.py", **more}


def _cluster(**more: Json) -> dict[str, Json]:
    return {
        "current_host": "algo-1",
        "hosts": ["algo-1", "algo-2"],
        "current_instance_type": "ml.plain.xlarge",
        "network_interface_name": "eth0",
        **more,
    }


ONE_GROUP: Json = [
    {
        "instance_group_name": "one",
        "instance_type": "ml.plain.xlarge",
        "hosts": ["algo-1", "algo-2"],
    }
]
TWO_GROUPS: Json = [
    {"instance_group_name": "one", "instance_type": "ml.plain.xlarge", "hosts": ["algo-1"]},
    {"instance_group_name": "two", "instance_type": "ml.plain.xlarge", "hosts": ["algo-2"]},
]


def _code(case: Case, base: str) -> str:
    """Return the real place of the code when the script starts."""
    code_location = text(case.decoded("sagemaker_submit_directory")) or case.variables.get(
        "SAGEMAKER_SUBMIT_DIRECTORY", ""
    )
    code_location = code_location.replace("{base}", base)
    return (
        posixpath.join(base, "code")
        if not code_location or code_location.endswith(".tar.gz")
        else code_location
    )


def _code_directory(case: Case, exported: Exported) -> None:
    exported.set("module_dir", _code(case, exported.base))


def _submit_directory(case: Case, exported: Exported) -> None:
    exported.variables["SAGEMAKER_SUBMIT_DIRECTORY"] = _code(case, exported.base)


def _python_path(case: Case, exported: Exported) -> None:
    inherited = case.variables.get("PYTHONPATH", "")
    exported.variables["PYTHONPATH"] = _code(case, exported.base) + (
        f":{inherited}" if inherited else ""
    )


def _log_level(case: Case, exported: Exported) -> None:
    level = case.decoded("sagemaker_container_log_level")
    value = (
        level
        if level not in (None, "")
        else case.variables.get("SAGEMAKER_CONTAINER_LOG_LEVEL") or 20
    )
    levels = {"DEBUG": 10, "INFO": 20, "WARNING": 30, "ERROR": 40}
    level_number = levels.get(value) or int(value) if isinstance(value, str) else value
    exported.set("log_level", level_number)


def _interface(case: Case, exported: Exported) -> None:
    interface = (case.config or {}).get("network_interface_name", "eth0")
    name_set = interface if interface in ("eth0", "lo") else "eth0"
    exported.set("network_interface_name", name_set)


def _group(case: Case, exported: Exported) -> None:
    if case.groups and "current_group_name" not in (case.config or {}):
        name = next(name for name, hosts in case.groups.items() if case.host in hosts)
        exported.set("current_instance_group", name)
        exported.set("current_instance_group_hosts", [*case.groups[name]])
        if exported.properties["distribution_instance_groups"] == ["homogeneousCluster"]:
            exported.set("distribution_instance_groups", [name])
            hosts = case.groups[name]
            exported.properties.update(
                distribution_hosts=[*hosts],
                master_hostname=hosts[0],
                is_master=hosts[0] == case.host,
            )


def _group_hosts(case: Case, exported: Exported) -> None:
    if not case.groups:
        exported.set("current_instance_group_hosts", [*case.hosts])


def _all_groups(case: Case, exported: Exported) -> None:
    named = case.decoded("sagemaker_distribution_instance_groups")
    if (
        len(case.groups) > 1
        and named is None
        and exported.properties["distribution_instance_groups"]
    ):
        exported.properties.update(
            distribution_hosts=[*case.hosts],
            master_hostname=case.hosts[0],
            is_master=case.hosts[0] == case.host,
        )


def _is_on(value: Json) -> bool:
    return value in (True, 1, "True", "true", "1")


def _switch(case: Case, exported: Exported) -> None:
    on = any(_is_on(case.decoded(name)) for name in SWITCHES)
    if not on and case.decoded("sagemaker_distribution_instance_groups") is None:
        exported.set("distribution_instance_groups", [])
        if case.groups:
            first = case.hosts[0]
            exported.properties.update(
                distribution_hosts=[], master_hostname=first, is_master=first == case.host
            )


def _job_name(case: Case, exported: Exported) -> None:
    own = text(case.decoded("sagemaker_job_name"))
    platform = case.variables.get("TRAINING_JOB_NAME", "")
    exported.variables["SAGEMAKER_JOB_NAME"] = own or platform
    exported.properties["job_name"] = platform or own or None


def _region(case: Case, exported: Exported) -> None:
    if not case.decoded("sagemaker_region") and case.variables.get("AWS_REGION"):
        exported.variables["SAGEMAKER_REGION"] = case.variables["AWS_REGION"]


def _model_parallel(case: Case, exported: Exported) -> None:
    parameters = (case.decoded("mp_parameters"), case.variables.get("SM_HP_MP_PARAMETERS", ""))
    exported.properties["is_modelparallel_enabled"] = any(
        value not in (None, "", {}, "{}") for value in parameters
    )


def _both_names(case: Case, exported: Exported) -> None:
    parameters = mapping(case.decoded("mp_parameters"))
    if parameters and _is_on(case.decoded("sagemaker_mpi_enabled")):
        degree = parameters.get("pipeline_parallel_degree", parameters.get("partitions", 1))
        both: dict[str, Json] = {
            **parameters,
            "partitions": degree,
            "pipeline_parallel_degree": degree,
        }
        exported.variables["SM_HP_MP_PARAMETERS"] = compact(both)


def _booleans(case: Case, exported: Exported) -> None:
    parameters = mapping(json.loads(exported.variables["SM_FRAMEWORK_PARAMS"]))
    switched: dict[str, Json] = {
        name: _is_on(case.decoded(name)) for name in parameters if name in SWITCHES
    }
    exported.set("framework_params", {**parameters, **switched})
    exported.properties["additional_framework_parameters"] = {**parameters, **switched}


def _cpus(case: Case, exported: Exported) -> None:
    del case
    exported.set("num_cpus", exported.cpus)


def _neurons(case: Case, exported: Exported) -> None:
    del case
    exported.set("num_neurons", 0)


def _module(case: Case, exported: Exported) -> None:
    program = text(case.decoded("sagemaker_program"))
    if program.startswith("-m "):
        exported.set("user_entry_point", program[3:])
        exported.set("module_name", program[3:])


def _hyphens(case: Case, exported: Exported) -> None:
    del case
    for prefix in ("SM_HP_", "SM_CHANNEL_"):
        for name in sorted(exported.variables):
            if name.startswith(prefix) and "-" in name:
                exported.variables.setdefault(name.replace("-", "_"), exported.variables[name])


def _additions(case: Case, exported: Exported) -> None:
    hosts = case.hosts
    master = text(exported.properties["master_hostname"]) if len(hosts) > 1 else "127.0.0.1"
    exported.set("current_host_rank", hosts.index(case.host))
    exported.set("entry_script", exported.variables["SM_USER_ENTRY_POINT"])
    exported.set("host_count", len(hosts))
    exported.set("input_data_dir", posixpath.join(exported.base, "input/data"))
    exported.set("master_addr", master)
    exported.set("master_port", 7777)
    exported.set("output_failure", posixpath.join(exported.base, "output/failure"))
    exported.set("source_dir", _code(case, exported.base))
    exported.variables.update({"MASTER_ADDR": master, "MASTER_PORT": "7777"})
    exported.properties.update(
        input_data_dir=posixpath.join(exported.base, "input/data"),
        master_addr=master,
        master_port=7777,
    )


def _unbuffered(case: Case, exported: Exported) -> None:
    if "PYTHONUNBUFFERED" not in case.variables:
        exported.variables["PYTHONUNBUFFERED"] = "1"


def _restarts(case: Case, exported: Exported) -> None:  # noqa: ARG001  SageMaker does not count them
    exported.variables["TRAINWORKS_RESTART_COUNT"] = "0"


DIFFERENCES = (
    Difference(
        "SM_MODULE_DIR",
        "the value of `sagemaker_submit_directory`, even an archive or an S3 address",
        "the directory that the script runs in",
        "it is documented as the location of the module; a script cannot open files in an archive",
        _code_directory,
        Case(_hyperparameters(sagemaker_submit_directory="{base}/sourcedir.tar.gz"), archive=True),
    ),
    Difference(
        "SAGEMAKER_SUBMIT_DIRECTORY",
        "read, then ignored, and left unchanged",
        "the code is taken from it, unless the hyperparameter names another place; then set to the"
        " code's directory",
        "AWS's own guide tells people to set it",
        _submit_directory,
        Case(variables={"SAGEMAKER_SUBMIT_DIRECTORY": "{base}/other"}),
    ),
    Difference(
        "PYTHONPATH",
        "the launcher's whole `sys.path`",
        "the code's directory, then the container's own value",
        "the launcher runs on another Python,"
        " whose packages and standard library must not be mixed in",
        _python_path,
        Case(variables={"PYTHONPATH": "/extra"}),
    ),
    Difference(
        "SM_LOG_LEVEL",
        "`SAGEMAKER_CONTAINER_LOG_LEVEL` is read, then ignored; the name of a level is passed on"
        " (and ends `train`)",
        "the hyperparameter, else the variable, else 20; always the number",
        "the variable is documented, and scripts read the level with `int()`",
        _log_level,
        Case(variables={"SAGEMAKER_CONTAINER_LOG_LEVEL": "10"}),
    ),
    Difference(
        "SM_NETWORK_INTERFACE_NAME",
        "the platform's value",
        "the same if it exists on this host, else the interface that routes to the leader",
        "the SDK's local mode names `ethwe`, but the container has `eth0`;"
        " NCCL would find no interface",
        _interface,
        Case(config={**_cluster(), "network_interface_name": "ethwe"}),
    ),
    Difference(
        "SM_CURRENT_INSTANCE_GROUP, SM_CURRENT_INSTANCE_GROUP_HOSTS",
        "`homogeneousCluster` without hosts,"
        " if groups are listed and `current_group_name` is absent",
        "the group that lists this host",
        "a group that does not exist has no hosts, so mpirun starts on none",
        _group,
        Case(
            config=_cluster(instance_groups=ONE_GROUP),
            hyperparameters=_hyperparameters(sagemaker_mpi_enabled="true"),
        ),
    ),
    Difference(
        "SM_CURRENT_INSTANCE_GROUP_HOSTS",
        "`[]` in a cluster without groups",
        "all hosts of the job",
        "this host is in the group `homogeneousCluster`, so that group is not empty",
        _group_hosts,
        Case(config=_cluster()),
    ),
    Difference(
        "SM_TRAINING_ENV: distribution_hosts, master_hostname, is_master",
        "several groups, none named for the distribution:"
        " each host takes its own group for all of it",
        "all hosts take part, and the launcher warns",
        "one job has one master",
        _all_groups,
        Case(
            config=_cluster(
                current_host="algo-2", current_group_name="two", instance_groups=TWO_GROUPS
            ),
            hyperparameters=_hyperparameters(sagemaker_torch_distributed_enabled="true"),
        ),
    ),
    Difference(
        "SM_DISTRIBUTION_INSTANCE_GROUPS",
        "the group is listed for any switch that is not empty, even for the text `False`",
        "only for a switch that is on",
        "`sagemaker_mpi_enabled: False` means off",
        _switch,
        Case(_hyperparameters(sagemaker_mpi_enabled="False")),
    ),
    Difference(
        "SAGEMAKER_JOB_NAME; SM_TRAINING_ENV: job_name",
        "one from the hyperparameter, the other from `TRAINING_JOB_NAME`;"
        " each is empty if its source is",
        "each from its source, else from the other's",
        "a job has one name",
        _job_name,
        Case(variables={"TRAINING_JOB_NAME": "job-1"}),
    ),
    Difference(
        "SAGEMAKER_REGION",
        "the hyperparameter, else boto3's configuration",
        "the hyperparameter, else `AWS_REGION`, else `AWS_DEFAULT_REGION`",
        "the platform sets `AWS_REGION`, which boto3 does not read",
        _region,
        Case(variables={"AWS_REGION": "region-1"}),
    ),
    Difference(
        "SM_TRAINING_ENV: is_modelparallel_enabled",
        "null or false, because it reads a variable that it sets later",
        "true with `mp_parameters`, else false",
        "scripts read it to decide",
        _model_parallel,
        Case(
            _hyperparameters(
                mp_parameters='{"partitions": 2}',
                sagemaker_mpi_enabled=True,
                sagemaker_mpi_num_of_processes_per_host=2,
            )
        ),
    ),
    Difference(
        "SM_HP_MP_PARAMETERS",
        "the hyperparameter `mp_parameters`",
        "the same with `partitions` and `pipeline_parallel_degree`, the two names of one parameter",
        "Hugging Face looks for `partitions` only, and trains without smp where it is missing",
        _both_names,
        Case(
            _hyperparameters(
                mp_parameters='{"pipeline_parallel_degree": 2}',
                sagemaker_mpi_enabled=True,
                sagemaker_mpi_num_of_processes_per_host=2,
            )
        ),
    ),
    Difference(
        "SM_FRAMEWORK_PARAMS",
        "switches as the SDK or a file wrote them",
        "switches as true or false",
        "a script that tests the value takes the text `False` for true",
        _booleans,
        Case(_hyperparameters(sagemaker_mpi_enabled="False")),
    ),
    Difference(
        "SM_NUM_CPUS",
        "the machine's CPUs",
        "the CPUs that this container may use",
        "a pool of workers sized by the machine slows a small container down",
        _cpus,
        Case(one_cpu=True),
    ),
    Difference(
        "SM_NUM_NEURONS",
        "64 on one instance type, with or without a device",
        "the instance table's cores if there are Neuron devices, else 0",
        "a job without its devices should fail at the start",
        _neurons,
        Case(config={**_cluster(), "current_instance_type": "ml.trn2.48xlarge"}),
    ),
    Difference(
        "SM_USER_ENTRY_POINT, SM_MODULE_NAME",
        "`-m package.module` is not accepted",
        "`package.module`",
        "this launcher can start modules",
        _module,
        Case(_hyperparameters(sagemaker_program="-m package.module")),
    ),
    Difference(
        "SM_HP_NAME, SM_CHANNEL_NAME",
        "`SM_HP_BATCH-SIZE`",
        "also `SM_HP_BATCH_SIZE`, unless another hyperparameter has that name",
        "a shell cannot read a variable with a hyphen; ModelTrainer's scripts use the second name",
        _hyphens,
        Case(_hyperparameters(**{"batch-size": "64"}), channels={"my-data": {}}),
    ),
    Difference(
        "SM_MASTER_ADDR, SM_MASTER_PORT, MASTER_ADDR, MASTER_PORT, SM_CURRENT_HOST_RANK,"
        " SM_HOST_COUNT, SM_INPUT_DATA_DIR, SM_OUTPUT_FAILURE, SM_SOURCE_DIR, SM_ENTRY_SCRIPT",
        "not set (the PyTorch toolkit sets `MASTER_*`)",
        "set in every mode; the master is rank 0's host (there its address, if the name does not"
        " lead to it), and `127.0.0.1` in a job of one host, with a free port under torchrun",
        "ModelTrainer's scripts and `env://` rendezvous read them",
        _additions,
        Case(config=_cluster()),
    ),
    Difference(
        "PYTHONUNBUFFERED",
        "left unchanged",
        "`1` unless the container sets it",
        "otherwise the log appears only when the script ends",
        _unbuffered,
        Case(),
    ),
    Difference(
        "TRAINWORKS_RESTART_COUNT",
        "not set",
        "how often the job was started again; `TRAINWORKS_CHECKPOINT_DIRECTORY` and"
        " `TRAINWORKS_RESUME_FROM` are set where checkpoints are",
        "a script that was started again continues from its checkpoint",
        _restarts,
        Case(),
    ),
)
"""All corrections, in the order in which they are applied."""

ENDED = (
    (
        "no `hyperparameters.json`, `inputdataconfig.json` or `resourceconfig.json`",
        "FileNotFoundError",
        "no hyperparameters, no channels, only this host",
        Case(None, None, None, variables={"SAGEMAKER_PROGRAM": "train.py"}),
    ),
    (
        "one host, and `current_host` is missing",
        "KeyError",
        "it is that host",
        Case(config={"hosts": ["algo-1"]}),
    ),
    (
        "a hyperparameter that is nested a thousand levels deep",
        "RecursionError",
        "passed on as text (from 101 levels)",
        Case(_hyperparameters(deep="[" * 2000 + "]" * 2000)),
    ),
)
"""Inputs that end sagemaker-training with a traceback and are jobs of ours: title, its exception,
our behaviour, the input.
"""


def table() -> str:
    """The rows as the Markdown tables of docs/tables/differences.md."""
    lines = ["| variable | sagemaker-training | trainworks | why |", "|---|---|---|---|"]
    for row in DIFFERENCES:
        about = re.sub(r"\b[A-Z]{2,}[A-Z_]+\b", r"`\g<0>`", row.about)
        lines.append(f"| {about} | {row.theirs} | {row.ours} | {row.why} |")
    lines += ["", "| input | sagemaker-training | trainworks |", "|---|---|---|"]
    lines += [
        f"| {input_title} | ends with {error} | {ours} |" for input_title, error, ours, _ in ENDED
    ]
    return "\n".join(lines) + "\n"
