"""Translate a ``distribution`` argument of the SageMaker Python SDK to the hyperparameters that the
SDK sends. Pure.

As the SDK's second line (``sagemaker.pytorch.PyTorch`` with an image of one's own: fw_utils.py,
estimator.py, pytorch/estimator.py of 2.257); a differential test calls the real one. Refusals of
the SDK are not repeated, because it sends no job then. ``problems`` are mistakes that the SDK
passes over in silence, and sends another job than was meant: a misspelt key, a forgotten
``enabled``.

The third line's classes are translated too, as ``{"torchrun": {...}}`` and ``{"mpi":
{"process_count_per_node": 8}}``: the fields that ``ModelTrainer`` writes to ``distributed.json``.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from types import MappingProxyType
from typing import Mapping, NamedTuple, Sequence

from trainworks_launcher.contract import names
from trainworks_launcher.contract.errors import Problem, nearest
from trainworks_launcher.contract.json_values import Json, mapping, texts

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
    """An instance group of the estimator; a cluster without groups is one group named ""."""

    name: str
    instance_type: str
    count: int


class Translation(NamedTuple):
    """The result for one ``distribution``.

    Attributes:
        hyperparameters: Decoded hyperparameters; none if the distribution cannot be read.
        problems: Unreadable parts, and mistakes for which the SDK sends another job.
        warnings: Lines for people.
    """

    hyperparameters: Mapping[str, Json]
    problems: tuple[Problem, ...] = ()
    warnings: tuple[str, ...] = ()


def translate(
    distribution: Json, groups: Sequence[Group], framework: str = "pytorch"
) -> Translation:
    """Translate a ``distribution``.

    Args:
        distribution: Decoded JSON. The caller must have replaced a path in ``parameters`` by the
            file's content.
        groups: The cluster.
        framework: Framework of the estimator: pytorch, tensorflow or mxnet.
    """
    if distribution is None:
        distribution = {}
    if not isinstance(distribution, dict):
        kind = type(distribution).__name__
        problem = Problem(
            f"is a {kind}, not a dict", "distribution", 'for example {"torch_distributed": {...}}'
        )
        return Translation(MappingProxyType({}), (problem,))
    if is_trainers(distribution):
        return _from_trainer(distribution)
    malformed = _malformed(distribution)
    if malformed:
        return Translation(MappingProxyType({}), tuple(malformed))
    translator = _Translator(distribution, groups, framework)
    hyperparameters = translator.run()
    problems = (*_spelling(distribution), *translator.problems)
    return Translation(MappingProxyType(hyperparameters), problems, tuple(translator.warnings))


def _malformed(distribution: Mapping[str, Json]) -> list[Problem]:
    """Return a problem for each strategy that is not a dict."""
    strategies = {**_KEYS, **_SMDISTRIBUTED_KEYS}
    rows = [*distribution.items(), *mapping(distribution.get("smdistributed")).items()]
    problems = []
    for name, value in rows:
        if name != GROUPS and name in strategies and not isinstance(value, dict):
            text = f"is {value!r}, not a dict"
            problems.append(Problem(text, _where(name), "write {'enabled': True}"))
    return problems


def group_names(distribution: Mapping[str, Json]) -> tuple[str, ...]:
    """Return the instance groups in a distribution: texts, or in the form of the SDK's objects."""
    groups = distribution.get(GROUPS, [])
    if not isinstance(groups, list):
        return ()
    group_names = []
    for group in groups:
        if isinstance(group, str):
            group_names.append(group)
        else:
            group_names.append(str(mapping(group).get("instance_group_name", "")))
    return tuple(group_names)


def _where(*keys: str) -> str:
    """Write the place of a key as Python code."""
    return "distribution" + "".join(f"[{key!r}]" for key in keys)


def _spelling(distribution: Mapping[str, Json]) -> list[Problem]:
    """Check for keys that the SDK ignores, and for switches that are missing or no booleans."""
    problems: list[Problem] = []
    for name, value in distribution.items():
        if name == GROUPS:
            continue
        if name not in _KEYS:
            advice = nearest(name, (*_KEYS, GROUPS))
            if name in _SMDISTRIBUTED_KEYS:
                advice = f"write {{'smdistributed': {{{name!r}: ...}}}}"
            text = f"the SDK does not know the strategy {name!r} and ignores it"
            problems.append(Problem(text, _where(name), advice))
            continue
        table = mapping(value)
        if name != "smdistributed":
            problems.extend(_switch(table, _KEYS[name], name))
            continue
        for inner, settings in table.items():
            if inner not in _SMDISTRIBUTED_KEYS:
                advice = nearest(inner, _SMDISTRIBUTED_KEYS)
                problems.append(Problem(f"smdistributed has no {inner!r}", _where(name), advice))
            else:
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
        text = (
            "'enabled' is missing, and the SDK takes that for False:"
            " the job would not be distributed"
        )
        problems.append(Problem(text, _where(*place), "add 'enabled': True"))
    elif not isinstance(table["enabled"], bool):
        text = f"'enabled' is {table['enabled']!r}, not True or False"
        problems.append(Problem(text, _where(*place), "write True or False"))
    return problems


class _Translator:
    """Follows the SDK's steps for one distribution that it accepts."""

    def __init__(
        self, distribution: Mapping[str, Json], groups: Sequence[Group], framework: str
    ) -> None:
        self._distribution = dict(distribution)
        self._groups = groups
        self._framework = framework
        self._named = [group.name for group in groups if group.name]
        self.problems: list[Problem] = []
        self.warnings: list[str] = []

    def run(self) -> dict[str, Json]:
        """Return the hyperparameters, as the SDK's ``_pytorch_distribution_configuration``."""
        distribution = self._distribution
        if self._framework == "pytorch" and "pytorchddp" in distribution:
            # pytorchddp is another name of smdistributed.dataparallel, and has no hyperparameter
            # of its own any more.
            distribution["smdistributed"] = {"dataparallel": distribution.pop("pytorchddp")}
        if self._framework == "pytorch" and "pytorchxla" in distribution:
            self.warnings.append(
                "pytorchxla: the SDK sends it only together with a TrainingCompilerConfig"
            )
        if self._named:
            # A distribution that names no group is on the only one.
            only_group = tuple(self._named) if len(self._named) == 1 else ()
            distribution[GROUPS] = list(group_names(distribution) or only_group)
        on = self._on("torch_distributed")
        if self._framework != "pytorch" or not on:
            return self._general()
        hyperparameters: dict[str, Json] = {}
        if "smdistributed" in distribution:
            hyperparameters = self._general()
        hyperparameters[names.TORCH_DISTRIBUTED_ENABLED] = on
        if self._instance_type() is not None:
            hyperparameters["sagemaker_instance_type"] = self._instance_type()
        if "smdistributed" not in distribution:
            for name in distribution:
                if name in _KEYS and name != "torch_distributed" and self._on(name):
                    text = (
                        f"{name} is on together with torch_distributed, and the SDK sends"
                        " torch_distributed only"
                    )
                    self.problems.append(Problem(text, _where(name), "keep one of them"))
            if distribution.get(GROUPS) and len(self._named) > 1:
                text = (
                    "the SDK does not send instance_groups with torch_distributed:"
                    " every host takes part"
                )
                self.warnings.append(text)
        return hyperparameters

    def _on(self, name: str) -> Json:
        """Return the switch of a strategy, False if it is missing."""
        return mapping(self._distribution.get(name)).get("enabled", False)

    def _instance_type(self) -> str | None:
        """Return the estimator's own instance type; None if it has groups."""
        if self._named:
            return None
        return self._groups[0].instance_type

    def _general(self) -> dict[str, Json]:
        """Return the hyperparameters, as the SDK's ``Framework._distribution_configuration``."""
        distribution = self._distribution
        hyperparameters: dict[str, Json] = {}
        if GROUPS in distribution:
            hyperparameters[names.DISTRIBUTION_INSTANCE_GROUPS] = distribution[GROUPS]
        for name, switch in (
            ("pytorchxla", "sagemaker_pytorch_xla_multi_worker_enabled"),
            ("parameter_server", "sagemaker_parameter_server_enabled"),
            ("multi_worker_mirrored_strategy", "sagemaker_multi_worker_mirrored_strategy_enabled"),
        ):
            if name in distribution:
                hyperparameters[switch] = self._on(name)
        if "mpi" in distribution:
            hyperparameters.update(self._mpi(mapping(distribution["mpi"])))
        if "smdistributed" in distribution:
            inner = mapping(distribution["smdistributed"])
            parameters = self._model_parallel(mapping(inner.get("modelparallel")))
            if parameters:
                hyperparameters[names.MODEL_PARALLEL_PARAMETERS] = parameters
            table = mapping(inner.get("dataparallel"))
            hyperparameters["sagemaker_distributed_dataparallel_enabled"] = table.get(
                "enabled", False
            )
            hyperparameters["sagemaker_instance_type"] = self._instance_type()
            if table.get("enabled", False):
                hyperparameters["sagemaker_distributed_dataparallel_custom_mpi_options"] = (
                    table.get("custom_mpi_options", "")
                )
        return hyperparameters

    def _mpi(self, table: Mapping[str, Json]) -> dict[str, Json]:
        hyperparameters: dict[str, Json] = {names.MPI_ENABLED: table.get("enabled", False)}
        per_host = table.get("processes_per_host")
        if per_host:
            hyperparameters[names.PROCESSES_PER_HOST] = per_host
        elif "processes_per_host" in table:
            text = f"'processes_per_host' is {per_host!r}, and the SDK leaves it out"
            self.problems.append(Problem(text, _where("mpi"), "give a whole number of at least 1"))
        hyperparameters[names.MPI_OPTIONS] = table.get("custom_mpi_options", "")
        return hyperparameters

    def _model_parallel(self, table: Mapping[str, Json]) -> Json:
        """Return the parameters of model parallelism, {} if it is off or has none."""
        if table.get("enabled", False) is not True:
            return {}
        place = _where("smdistributed", "modelparallel")
        parameters = table.get("parameters", {})
        if not isinstance(parameters, dict):
            advice = "give a dict, or the path of a JSON file"
            self.problems.append(
                Problem(f"'parameters' is {parameters!r}, not a dict", place, advice)
            )
            return {}
        if not parameters:
            text = (
                "'parameters' is missing or empty,"
                " and without them model parallelism is not switched on"
            )
            self.problems.append(
                Problem(text, place, "add 'parameters': {'pipeline_parallel_degree': 2}")
            )
        if not self._on("torch_distributed") and not self._on("mpi"):
            # With torchrun: the library's second version.
            advice = "add 'mpi': {'enabled': True, 'processes_per_host': 8}"
            self.problems.append(
                Problem("model parallelism goes with mpi, which is not on", _where("mpi"), advice)
            )
        return parameters


def is_trainers(distribution: Mapping[str, Json]) -> bool:
    """Return whether a distribution has fields of the third line's classes."""
    fields = [key for key in mapping(distribution.get("mpi")) if key in _TRAINER_KEYS["mpi"]]
    return "torchrun" in distribution or bool(fields)


def _from_trainer(distribution: Mapping[str, Json]) -> Translation:
    """Translate fields of ``Torchrun(...)`` or ``MPI(...)`` to hyperparameters of the same meaning.

    ModelTrainer itself sends the fields in a file.
    """
    problems: list[Problem] = []
    if len(distribution) > 1:
        both = " and ".join(distribution)
        problems.append(
            Problem(f"{both} are both given", "distribution", "ModelTrainer takes one of them")
        )
    name = "torchrun" if "torchrun" in distribution else "mpi"
    value = distribution[name]
    if value is not None and not isinstance(value, dict):
        problems.append(
            Problem(
                f"is {value!r}, not a dict", _where(name), "write {'process_count_per_node': 8}"
            )
        )
    table = mapping(value)
    for key in table:
        if key not in _TRAINER_KEYS[name]:
            text = f"{name} has no field {key!r}"
            problems.append(Problem(text, _where(name), nearest(key, _TRAINER_KEYS[name])))
    switch = names.TORCH_DISTRIBUTED_ENABLED if name == "torchrun" else names.MPI_ENABLED
    hyperparameters: dict[str, Json] = {switch: True}
    if table.get("process_count_per_node") is not None:
        hyperparameters[names.PROCESSES_PER_HOST] = table["process_count_per_node"]
    if name == "torchrun" and table.get("smp"):
        hyperparameters[names.MODEL_PARALLEL_PARAMETERS] = table["smp"]
    options = table.get("mpi_additional_options")
    if options is not None and name == "mpi":
        if not isinstance(options, list) or len(texts(options)) != len(options):
            where = _where("mpi", "mpi_additional_options")
            problems.append(Problem(f"is {options!r}", where, "give a list of texts"))
        else:
            # Each entry is one word for the class's driver; shell quoting keeps it one word.
            words = [shlex.quote(word) for word in texts(options)]
            hyperparameters[names.MPI_OPTIONS] = " ".join(words)
    if problems:
        return Translation(MappingProxyType({}), tuple(problems))
    return Translation(MappingProxyType(hyperparameters))
