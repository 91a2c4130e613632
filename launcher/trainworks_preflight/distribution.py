"""What the SageMaker Python SDK makes of a ``distribution`` argument: the hyperparameters that a job is sent. Pure.

The rules are those of the SDK's second line (``sagemaker.pytorch.PyTorch`` with an image of one's own: fw_utils.py,
estimator.py, pytorch/estimator.py of 2.257); a differential test calls the real one. Two kinds of complaint are kept
apart. ``refused``: the SDK raises, so no job is ever sent. ``problems``: the SDK says nothing and sends a job that is
not the one that was meant (a misspelt key, a forgotten ``enabled``).

The third line's classes are taken too, as ``{"torchrun": {...}}`` and ``{"mpi": {"process_count_per_node": 8}}``: what
``ModelTrainer`` writes to ``distributed.json``.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from types import MappingProxyType
from typing import Mapping, Sequence

from trainworks_launcher.contract import names
from trainworks_launcher.contract.errors import Problem, nearest
from trainworks_launcher.contract.values import Json, mapping, texts
from trainworks_preflight.facts import Facts

_KEYS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "mpi": ("enabled", "processes_per_host", "custom_mpi_options"),
        "smdistributed": ("dataparallel", "modelparallel"),
        "pytorchddp": ("enabled", "custom_mpi_options"),
        "torch_distributed": ("enabled",),
        "pytorchxla": ("enabled",),
        "parameter_server": ("enabled",),
        "multi_worker_mirrored_strategy": ("enabled",),
    }
)
"""Strategy -> the keys of its dict; every one but smdistributed has ``enabled``."""

_SMDISTRIBUTED_KEYS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"dataparallel": ("enabled", "custom_mpi_options"), "modelparallel": ("enabled", "parameters")}
)
_TRAINER_KEYS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "torchrun": ("process_count_per_node", "smp"),
        "mpi": ("process_count_per_node", "mpi_additional_options"),
    }
)
"""Class of the third line, in small letters -> its fields (sagemaker.train.distributed)."""

GROUPS = "instance_groups"


@dataclass(frozen=True)
class Group:
    """An instance group of the estimator; a cluster without groups has one with the name ""."""

    name: str
    instance_type: str
    count: int


@dataclass(frozen=True)
class Translation:
    """What the SDK makes of a ``distribution``.

    Attributes:
        hyperparameters: What the job is sent, decoded; ``{}`` if the SDK refuses it.
        refused: What the SDK raises an error for.
        problems: What the SDK accepts, but makes another job of than was meant.
        warnings: One sentence each.
    """

    hyperparameters: Mapping[str, Json]
    refused: tuple[Problem, ...] = ()
    problems: tuple[Problem, ...] = ()
    warnings: tuple[str, ...] = ()


def translate(
    distribution: Json, groups: Sequence[Group], facts: Facts, entry_point: str = "", framework: str = "pytorch"
) -> Translation:
    """Translate a ``distribution``.

    Args:
        distribution: Decoded JSON. If ``parameters`` is the path of a file, the caller must have read it and put it in
            place.
        groups: The cluster.
        facts: The table of instance types.
        entry_point: ``""`` if not known.
        framework: Whose estimator: pytorch, tensorflow or mxnet.
    """
    if distribution is None:
        distribution = {}
    if not isinstance(distribution, dict):
        kind = type(distribution).__name__
        problem = Problem(f"is a {kind}, not a dict", "distribution", 'for example {"torch_distributed": {...}}')
        return Translation(MappingProxyType({}), (problem,))
    if _is_trainers(distribution):
        return _from_trainer(distribution)
    malformed = [
        Problem(f"is {value!r}, not a dict", _where(name), "write {'enabled': True}")
        for name, value in (*distribution.items(), *_inner(distribution))
        if name != GROUPS and name in {**_KEYS, **_SMDISTRIBUTED_KEYS} and not isinstance(value, dict)
    ]
    if malformed:
        return Translation(MappingProxyType({}), tuple(malformed))
    translator = _Translator(distribution, groups, facts, entry_point, framework)
    hyperparameters = translator.run()
    return Translation(
        MappingProxyType({} if translator.refused else hyperparameters),
        tuple(translator.refused),
        (*_spelling(distribution), *translator.problems),
        tuple(translator.warnings),
    )


def _where(*keys: str) -> str:
    """Return the place of a key as Python code."""
    return "distribution" + "".join(f"[{key!r}]" for key in keys)


def _inner(distribution: Mapping[str, Json]) -> list[tuple[str, Json]]:
    """Return the strategies under smdistributed."""
    return list(mapping(distribution.get("smdistributed")).items())


def _spelling(distribution: Mapping[str, Json]) -> list[Problem]:
    """Keys that the SDK would pass over in silence, and switches that are missing or no booleans."""
    problems: list[Problem] = []
    for name, value in distribution.items():
        if name == GROUPS:
            continue
        if name not in _KEYS:
            inside = name in _SMDISTRIBUTED_KEYS
            advice = f"write {{'smdistributed': {{{name!r}: ...}}}}" if inside else nearest(name, (*_KEYS, GROUPS))
            problems.append(
                Problem(f"the SDK does not know the strategy {name!r} and ignores it", _where(name), advice)
            )
            continue
        table = mapping(value)
        if name != "smdistributed":
            problems.extend(_switch(table, _KEYS[name], name))
            continue
        for inner, settings in table.items():
            if inner in _SMDISTRIBUTED_KEYS:
                problems.extend(_switch(mapping(settings), _SMDISTRIBUTED_KEYS[inner], name, inner))
    return problems


def _switch(table: Mapping[str, Json], known: Sequence[str], *place: str) -> list[Problem]:
    """Check the keys of one strategy and its ``enabled``."""
    problems = [
        Problem(f"the SDK ignores the key {key!r}", _where(*place), nearest(key, known))
        for key in table
        if key not in known
    ]
    if "enabled" not in table:
        text = "'enabled' is missing, and the SDK takes that for False: the job would not be distributed"
        problems.append(Problem(text, _where(*place), "add 'enabled': True"))
    elif not isinstance(table["enabled"], bool):
        text = f"'enabled' is {table['enabled']!r}, not True or False"
        problems.append(Problem(text, _where(*place), "write True or False"))
    return problems


class _Translator:
    """The SDK's way through one distribution, with everything that it would raise collected."""

    def __init__(
        self, distribution: Mapping[str, Json], groups: Sequence[Group], facts: Facts, entry_point: str, framework: str
    ) -> None:
        self._given = dict(distribution)
        self._groups = groups
        self._facts = facts
        self._entry_point = entry_point
        self._framework = framework
        self._named = [group.name for group in groups if group.name]
        self.refused: list[Problem] = []
        self.problems: list[Problem] = []
        self.warnings: list[str] = []

    def run(self) -> dict[str, Json]:
        """Return the hyperparameters."""
        given = self._given
        if self._framework == "pytorch" and "pytorchddp" in given:
            if "smdistributed" in given:
                text = "pytorchddp and smdistributed are both given"
                self._refuse(text, _where("pytorchddp"), "keep one: the SDK turns the first into the second")
                return {}
            # pytorchddp is another name of smdistributed.dataparallel; its hyperparameter is not sent any more.
            given["smdistributed"] = {"dataparallel": given.pop("pytorchddp")}
        if self._framework == "pytorch" and "pytorchxla" in given:
            self.warnings.append("pytorchxla: the SDK sends it only together with a TrainingCompilerConfig")
        keys = tuple(given)
        self._check_types(self._group_types(), keys)
        self._check_smdistributed()
        if self.refused:
            return {}
        return self._hyperparameters()

    def _refuse(self, what: str, where: str, advice: str = "") -> None:
        self.refused.append(Problem(what, where, advice))

    def _on(self, name: str) -> Json:
        """Return the switch of a strategy, False if it is not there."""
        return mapping(self._given.get(name)).get("enabled", False)

    def _instance_type(self) -> str | None:
        """Return the estimator's own instance type; it has none where it has groups."""
        return None if self._named else self._groups[0].instance_type

    def _group_types(self) -> tuple[str, ...]:
        """Check the instance groups; the instance types that take part in the distribution."""
        where = _where(GROUPS)
        listed = self._given.get(GROUPS, [])
        asked = [
            entry if isinstance(entry, str) else str(mapping(entry).get("instance_group_name", ""))
            for entry in (listed if isinstance(listed, list) else [])
        ]
        if not self._named:
            if asked:
                self._refuse("the cluster has no instance groups", where, "leave it out, or give the estimator groups")
            return tuple(group.instance_type for group in self._groups)
        if len(self._named) == 1 and not asked:
            asked = list(self._named)
        elif len(self._named) > 1 and len(asked) != 1:
            text = f"names {len(asked)} of the cluster's {len(self._named)} instance groups"
            self._refuse(text, where, f"name exactly one of {', '.join(self._named)}")
        elif len(asked) > len(self._named):
            self._refuse(f"names {len(asked)} instance groups, the cluster has {len(self._named)}", where)
        for name in asked:
            if name not in self._named:
                self._refuse(f"instance group {name!r} does not exist", where, nearest(name, self._named))
        names_given: list[Json] = [*asked]
        self._given[GROUPS] = names_given
        return tuple(group.instance_type for group in self._groups if group.name in asked)

    def _check_types(self, types: Sequence[str], keys: Sequence[str]) -> None:
        """What a strategy may not be together with: instance types, and kinds of entry point."""
        for name in types:
            if self._facts.is_neuron(name) and len(keys) > 1:
                both = " and ".join(keys)
                self._refuse(f"{name} takes one key only, not {both}", "distribution", "keep torch_distributed alone")
            elif self._facts.is_neuron(name) and keys not in ((), ("torch_distributed",)):
                self._refuse(f"{keys[0]} does not run on {name}", "distribution", "use torch_distributed there")
        script = not self._entry_point or self._entry_point.endswith(".py")
        if self._framework == "pytorch" and self._on("torch_distributed") and not script:
            text = f"torch_distributed starts Python files only, not {self._entry_point!r}"
            self._refuse(text, "entry_point", "give a .py file")

    def _check_smdistributed(self) -> None:
        """Exactly one of the two."""
        inner = mapping(self._given.get("smdistributed"))
        if len(inner) > 1:
            both = " and ".join(inner)
            self._refuse(f"{both} are both given, and one job cannot have both", _where("smdistributed"), "keep one")
            return
        for name in inner:
            if name not in _SMDISTRIBUTED_KEYS:
                advice = nearest(name, _SMDISTRIBUTED_KEYS)
                self._refuse(f"smdistributed has no {name!r}", _where("smdistributed"), advice)

    def _hyperparameters(self) -> dict[str, Json]:
        """Return the SDK's ``_pytorch_distribution_configuration``; other frameworks have the general one."""
        on = self._on("torch_distributed")
        if self._framework != "pytorch" or not on:
            return self._general()
        made: dict[str, Json] = self._general() if "smdistributed" in self._given else {}
        made[names.TORCH_DISTRIBUTED_ENABLED] = on
        if self._instance_type() is not None:
            made["sagemaker_instance_type"] = self._instance_type()
        if "smdistributed" not in self._given:
            for name in self._given:
                if name in _KEYS and name != "torch_distributed" and self._on(name):
                    text = f"{name} is on together with torch_distributed, and the SDK sends torch_distributed only"
                    self.problems.append(Problem(text, _where(name), "keep one of them"))
            if self._given.get(GROUPS) and len(self._named) > 1:
                text = "the SDK does not send instance_groups with torch_distributed: every host takes part"
                self.warnings.append(text)
        return made

    def _general(self) -> dict[str, Json]:
        """Return the SDK's ``Framework._distribution_configuration``."""
        given = self._given
        made: dict[str, Json] = {}
        if GROUPS in given:
            made[names.DISTRIBUTION_INSTANCE_GROUPS] = given[GROUPS]
        for name, switch in (
            ("pytorchxla", "sagemaker_pytorch_xla_multi_worker_enabled"),
            ("parameter_server", "sagemaker_parameter_server_enabled"),
        ):
            if name in given:
                made[switch] = self._on(name)
        if "mpi" in given:
            made.update(self._mpi(mapping(given["mpi"])))
        data_parallel: Json = False
        if "smdistributed" in given:
            inner = mapping(given["smdistributed"])
            parameters = self._model_parallel(mapping(inner.get("modelparallel")))
            if parameters:
                made[names.MODEL_PARALLEL_PARAMETERS] = parameters
            self._check_torchrun_only()
            table = mapping(inner.get("dataparallel"))
            data_parallel = table.get("enabled", False)
            made["sagemaker_distributed_dataparallel_enabled"] = data_parallel
            made["sagemaker_instance_type"] = self._instance_type()
            if data_parallel:
                made["sagemaker_distributed_dataparallel_custom_mpi_options"] = table.get("custom_mpi_options", "")
        if "multi_worker_mirrored_strategy" in given:
            made["sagemaker_multi_worker_mirrored_strategy_enabled"] = self._mirrored()
        if made.get(names.DISTRIBUTION_INSTANCE_GROUPS) and not (self._on("mpi") or data_parallel):
            text = "instance groups take part in a distribution, and none that the SDK knows them with is on"
            self._refuse(text, _where(GROUPS), "switch mpi or smdistributed.dataparallel on, or leave it out")
        return made

    def _mpi(self, table: Mapping[str, Json]) -> dict[str, Json]:
        made: dict[str, Json] = {names.MPI_ENABLED: table.get("enabled", False)}
        per_host = table.get("processes_per_host")
        if per_host:
            made[names.PROCESSES_PER_HOST] = per_host
        elif "processes_per_host" in table:
            text = f"'processes_per_host' is {per_host!r}, and the SDK leaves it out"
            self.problems.append(Problem(text, _where("mpi"), "give a whole number of at least 1"))
        made[names.MPI_OPTIONS] = table.get("custom_mpi_options", "")
        return made

    def _model_parallel(self, table: Mapping[str, Json]) -> Json:
        """Return the parameters that are sent, {} if there are none or it is off."""
        place = _where("smdistributed", "modelparallel")
        if table.get("enabled", False) is not True:
            return {}
        parameters = table.get("parameters", {})
        if not isinstance(parameters, dict):
            self._refuse(
                f"'parameters' is {parameters!r}, not a dict", place, "give a dict, or the path of a JSON file"
            )
            return {}
        checked = f"{place}['parameters']"
        self.refused.extend(_check_parameters(parameters, checked))
        if not parameters:
            text = "'parameters' is missing or empty, and without them model parallelism is not switched on"
            self.problems.append(Problem(text, place, "add 'parameters': {'pipeline_parallel_degree': 2}"))
        if self._on("torch_distributed"):  # the library's second line: no pipelines, no mpirun
            return parameters
        if not self._on("mpi"):
            advice = "add 'mpi': {'enabled': True, 'processes_per_host': 8}"
            self.problems.append(Problem("model parallelism goes with mpi, which is not on", _where("mpi"), advice))
        return parameters

    def _check_torchrun_only(self) -> None:
        for group in self._groups:
            if self._facts.torchrun_only(group.instance_type) and not self._on("torch_distributed"):
                text = f"smdistributed does not run on {group.instance_type} by itself"
                self._refuse(text, _where("smdistributed"), "add 'torch_distributed': {'enabled': True}")

    def _mirrored(self) -> Json:
        on = self._on("multi_worker_mirrored_strategy")
        place = _where("multi_worker_mirrored_strategy")
        if on and self._framework != "tensorflow":
            self._refuse(f"is for TensorFlow, and this is {self._framework}", place, "use torch_distributed")
        for name in ("smdistributed", "parameter_server"):
            if on and name in self._given:
                self._refuse(f"cannot be together with {name}", place, "keep one of them")
        return on


def _check_parameters(parameters: Mapping[str, Json], where: str) -> list[Problem]:
    """Return the SDK's ``validate_mp_config``, all complaints at once."""
    problems: list[Problem] = []

    def complain(name: str, what: str, advice: str = "") -> None:
        problems.append(Problem(f"{name!r} {what}", where, advice))

    for name, allowed in (
        ("pipeline", ("simple", "interleaved", "_only_forward")),
        ("placement_strategy", ("spread", "cluster")),
        ("optimize", ("speed", "memory")),
    ):
        if name in parameters and parameters[name] not in allowed:
            complain(name, f"is {parameters[name]!r}", nearest(str(parameters[name]), allowed))
    for name in ("microbatches", "partitions", "active_microbatches"):
        value = parameters.get(name, 1)
        if not isinstance(value, int) or value < 1:
            complain(name, f"is {value!r}", "give a whole number of at least 1")
    for name in ("auto_partition", "contiguous", "load_partition", "horovod", "ddp", "deterministic_server"):
        if name in parameters and parameters[name] not in (True, False):
            complain(name, f"is {parameters[name]!r}", "write True or False")
    if not isinstance(parameters.get("partition_file", ""), str):
        complain("partition_file", f"is {parameters['partition_file']!r}", "give the path of a file")
    if parameters.get("auto_partition") is False and "default_partition" not in parameters:
        complain("default_partition", "is missing", "it is needed where auto_partition is False")
    if "default_partition" in parameters:
        partition, partitions = parameters["default_partition"], parameters.get("partitions")
        if not isinstance(partition, (int, float)) or not isinstance(partitions, (int, float)):
            complain("default_partition", "needs 'partitions', and both are numbers", "add 'partitions'")
        elif partition >= partitions:
            complain("default_partition", f"is {partition}, and there are {partitions} partitions", "count from 0")
    weight = parameters.get("memory_weight", 0.0)
    if not isinstance(weight, (int, float)) or weight > 1.0 or weight < 0.0:
        complain("memory_weight", f"is {weight!r}", "give a number from 0.0 to 1.0")
    for name in ("ddp_port", "ddp_dist_backend"):
        if name in parameters and "ddp" not in parameters:
            complain(name, "is there without 'ddp'", "add 'ddp': True")
    port = parameters.get("ddp_port", 0)
    if not isinstance(port, int) or port < 0:
        complain("ddp_port", f"is {port!r}", "give the number of a TCP port")
    if parameters.get("horovod", False) and parameters.get("ddp", False):
        complain("ddp", "and 'horovod' are both on", "keep one of them")
    return problems


def _is_trainers(distribution: Mapping[str, Json]) -> bool:
    """Return whether these are fields of the third line's classes."""
    fields = {key for key in mapping(distribution.get("mpi")) if key in _TRAINER_KEYS["mpi"]}
    return "torchrun" in distribution or bool(fields)


def _from_trainer(distribution: Mapping[str, Json]) -> Translation:
    """Hyperparameters with the meaning of ``Torchrun(...)`` or ``MPI(...)``; the real ones travel in a file."""
    problems: list[Problem] = []
    if len(distribution) > 1:
        both = " and ".join(distribution)
        problems.append(Problem(f"{both} are both given", "distribution", "ModelTrainer takes one of them"))
    name = "torchrun" if "torchrun" in distribution else "mpi"
    value = distribution[name]
    if value is not None and not isinstance(value, dict):
        problems.append(Problem(f"is {value!r}, not a dict", _where(name), "write {'process_count_per_node': 8}"))
    table = mapping(value)
    problems.extend(
        Problem(f"{name} has no field {key!r}", _where(name), nearest(key, _TRAINER_KEYS[name]))
        for key in table
        if key not in _TRAINER_KEYS[name]
    )
    made: dict[str, Json] = {names.TORCH_DISTRIBUTED_ENABLED if name == "torchrun" else names.MPI_ENABLED: True}
    if table.get("process_count_per_node") is not None:
        made[names.PROCESSES_PER_HOST] = table["process_count_per_node"]
    if name == "torchrun" and table.get("smp"):
        made[names.MODEL_PARALLEL_PARAMETERS] = table["smp"]
    options = table.get("mpi_additional_options")
    if options is not None and name == "mpi":
        if not isinstance(options, list) or len(texts(options)) != len(options):
            where = _where("mpi", "mpi_additional_options")
            problems.append(Problem(f"is {options!r}", where, "give a list of texts"))
        else:
            # Each entry is a word to the class's driver; shell quoting keeps it one word.
            made[names.MPI_OPTIONS] = " ".join(shlex.quote(word) for word in texts(options))
    return Translation(MappingProxyType({} if problems else made), tuple(problems))
