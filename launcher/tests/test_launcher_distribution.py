"""Test the SDK's reading of a ``distribution``: by a table, and beside the real SDK, which is asked
where it is there.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import pytest
from launcher_support import REPOSITORY, environment, manifest_document, plan
from real_sdk import Case, ask

from trainworks_launcher.contract.json_values import Json, mapping
from trainworks_launcher.environment.environment import Devices
from trainworks_launcher.environment.manifest import parse_manifest
from trainworks_preflight.distribution import Group, translate

P4D = "ml.p4d.24xlarge"
PEER = REPOSITORY / ".cache" / "peers" / "sdk-v2" / "bin" / "python"
SMP: Json = {"enabled": True, "parameters": {"pipeline_parallel_degree": 2}}
MPI: Json = {"enabled": True, "processes_per_host": 8}


def cluster(instance_type: str = P4D, count: int = 2) -> tuple[Group, ...]:
    return (Group("", instance_type, count),)


@pytest.mark.parametrize(
    ("distribution", "expected"),
    [
        ({}, {}),
        (
            {"mpi": {"enabled": True, "processes_per_host": 8, "custom_mpi_options": "-x A=1"}},
            {
                "sagemaker_mpi_enabled": True,
                "sagemaker_mpi_num_of_processes_per_host": 8,
                "sagemaker_mpi_custom_mpi_options": "-x A=1",
            },
        ),
        (
            {"torch_distributed": {"enabled": True}},
            {"sagemaker_torch_distributed_enabled": True, "sagemaker_instance_type": P4D},
        ),
        (
            {"smdistributed": {"modelparallel": SMP}, "mpi": MPI},
            {
                "sagemaker_mpi_enabled": True,
                "sagemaker_mpi_num_of_processes_per_host": 8,
                "sagemaker_mpi_custom_mpi_options": "",
                "mp_parameters": {"pipeline_parallel_degree": 2},
                "sagemaker_distributed_dataparallel_enabled": False,
                "sagemaker_instance_type": P4D,
            },
        ),
        (
            {"pytorchddp": {"enabled": True, "custom_mpi_options": "-verbose"}},
            {
                "sagemaker_distributed_dataparallel_enabled": True,
                "sagemaker_instance_type": P4D,
                "sagemaker_distributed_dataparallel_custom_mpi_options": "-verbose",
            },
        ),
        (
            {"torchrun": {"process_count_per_node": 4}},
            {
                "sagemaker_torch_distributed_enabled": True,
                "sagemaker_mpi_num_of_processes_per_host": 4,
            },
        ),
        (
            {"mpi": {"process_count_per_node": 4, "mpi_additional_options": ["-x", "A=b c"]}},
            {
                "sagemaker_mpi_enabled": True,
                "sagemaker_mpi_num_of_processes_per_host": 4,
                "sagemaker_mpi_custom_mpi_options": "-x 'A=b c'",
            },
        ),
    ],
)
def test_hyperparameters_of_a_distribution(distribution: Json, expected: dict[str, Json]) -> None:
    translation = translate(distribution, cluster())
    assert (dict(translation.hyperparameters), translation.problems) == (expected, ())


@pytest.mark.parametrize(
    ("distribution", "message"),
    [
        ("mpi", "is a str, not a dict (distribution)"),
        ({"mpi": True}, "is True, not a dict (distribution['mpi']); write {'enabled': True}"),
        ({"mpi": {"enabled": True}, "pytorchdpp": {"enabled": True}}, "did you mean 'pytorchddp'?"),
        ({"dataparallel": {"enabled": True}}, "write {'smdistributed': {'dataparallel': ...}}"),
        (
            {"mpi": {"processes_per_host": 8}},
            "'enabled' is missing, and the SDK takes that for False",
        ),
        ({"mpi": {"enabled": "True"}}, "'enabled' is 'True', not True or False"),
        ({"mpi": {"enabled": True, "process_per_host": 8}}, "did you mean 'processes_per_host'?"),
        ({"smdistributed": {"datparallel": {"enabled": True}}}, "did you mean 'dataparallel'?"),
        (
            {"mpi": {"enabled": True, "processes_per_host": 0}},
            "'processes_per_host' is 0, and the SDK leaves it out",
        ),
        (
            {"smdistributed": {"modelparallel": SMP}},
            "model parallelism goes with mpi, which is not on",
        ),
        (
            {"smdistributed": {"modelparallel": {"enabled": True}}, "mpi": MPI},
            "'parameters' is missing or empty",
        ),
        (
            {"torch_distributed": {"enabled": True}, "mpi": MPI},
            "the SDK sends torch_distributed only",
        ),
        ({"torchrun": {"processes": 4}}, "torchrun has no field 'processes'"),
        ({"torchrun": {}, "mpi": {}}, "ModelTrainer takes one of them"),
        ({"mpi": {"mpi_additional_options": "-x A=1"}}, "give a list of texts"),
    ],
)
def test_mistakes_are_named_with_what_to_do(distribution: Json, message: str) -> None:
    texts = [str(problem) for problem in translate(distribution, cluster()).problems]
    assert any(message in text for text in texts), texts


def random_cases(count: int) -> list[Case]:
    """Distributions as people write and miswrite them."""
    source = random.Random(7)

    def switch(**more: Sequence[Json]) -> Json:
        table: dict[str, Json] = {"enabled": source.choice([True, True, True, False])}
        if source.random() < 0.15:
            del table["enabled"]
        for name, values in more.items():
            if source.random() < 0.4:
                table[name] = source.choice(values)
        return table if source.random() < 0.98 else True

    def parameters() -> Json:
        rows: dict[str, Sequence[Json]] = {
            "partitions": [1, 2, 0, "2"],
            "pipeline_parallel_degree": [2],
            "microbatches": [4, 0, True],
            "pipeline": ["simple", "interleaved", "other"],
            "placement_strategy": ["spread", "none"],
            "optimize": ["speed", "memory", 1],
            "auto_partition": [True, False, "yes"],
            "default_partition": [0, 1, 2],
            "ddp": [True, False, 1],
            "horovod": [True, False],
            "ddp_port": [0, 8080, -1, "8080"],
            "ddp_dist_backend": ["auto"],
            "memory_weight": [0.2, 1.5, -1, 1],
            "partition_file": ["a", 1],
        }
        return {
            name: source.choice(values) for name, values in rows.items() if source.random() < 0.2
        }

    def inner() -> Json:
        distribution: dict[str, Json] = {}
        if source.random() < 0.5:
            distribution["dataparallel"] = switch(custom_mpi_options=["-verbose"])
        if source.random() < 0.6 or not distribution:
            distribution["modelparallel"] = switch(parameters=[parameters(), parameters(), [], 3.5])
        if source.random() < 0.05:
            distribution["other"] = {}
        return distribution if source.random() < 0.95 else {}

    groups_named: list[Json] = [["a"], ["b"], ["a", "b"], ["stranger"], []]

    def distribution() -> dict[str, Json]:
        rows: list[tuple[str, float, Json]] = [
            ("mpi", 0.4, switch(processes_per_host=[8, 0, "8"], custom_mpi_options=["-x A=1", ""])),
            ("torch_distributed", 0.3, switch()),
            ("smdistributed", 0.4, inner()),
            ("pytorchddp", 0.15, switch(custom_mpi_options=["-verbose"])),
            ("parameter_server", 0.1, switch()),
            ("multi_worker_mirrored_strategy", 0.1, switch()),
            ("instance_groups", 0.2, source.choice(groups_named)),
            ("unknown", 0.05, {"enabled": True}),
        ]
        return {name: value for name, chance, value in rows if source.random() < chance}

    def case() -> Case:
        types = (P4D, "ml.g4dn.xlarge", "ml.p5.48xlarge", "ml.trn1.32xlarge", "ml.m5.large")
        groups = (Group("a", source.choice(types), 1), Group("b", source.choice(types), 2))
        cut = source.choice((0, 0, 1, 2))
        script = source.choice(("train.py", "train.py", "run.sh"))
        return Case(distribution(), groups[:cut] or cluster(source.choice(types)), script)

    return [case() for _ in range(count)]


@pytest.mark.engine
def test_the_same_hyperparameters_as_the_real_sdk() -> None:
    if not PEER.exists():
        pytest.skip("the SageMaker SDK is not there; run: tools/set-up-peers sdk-v2")
    cases = random_cases(600)
    answers = ask(cases, str(PEER))
    assert answers is not None
    taken = [
        (case, answer) for case, answer in zip(cases, answers, strict=True) if not answer.refused
    ]
    assert 100 < len(taken) < 500, "both kinds of cases"
    different = []
    for case, answer in taken:
        translation = translate(dict(case.distribution), case.groups)
        if any("is True, not a dict" in str(problem) for problem in translation.problems):
            continue  # the SDK may never look at it; we always do
        if dict(translation.hyperparameters) != answer.sent:
            different.append((case, answer, translation))
    assert different == []


@pytest.mark.engine
def test_the_tensorflow_estimator_of_the_real_sdk_sends_what_starts_a_job() -> None:
    if not PEER.exists():
        pytest.skip("the SageMaker SDK is not there; run: tools/set-up-peers sdk-v2")
    modes: dict[str, Json] = {
        "parameter_server": {"parameter_server": {"enabled": True}},
        "mpi": {"mpi": MPI},
        "multi_worker_mirrored_strategy": {"multi_worker_mirrored_strategy": {"enabled": True}},
    }
    groups = cluster(count=2)
    cases = [
        Case({**mapping(mode)}, groups, "train.py", "tensorflow", "2.21") for mode in modes.values()
    ]
    answers = ask(cases, str(PEER))
    assert answers is not None
    for mode, answer in zip(modes, answers, strict=True):
        assert not answer.refused
        document = manifest_document(components={"tensorflow": {"version": "2.21.0"}})
        image = parse_manifest(json.dumps(document), "made-up")
        devices = Devices(gpus=8, cpus=8, interfaces=("eth0", "lo"))
        node_plan = plan(
            environment(answer.sent, hosts=("algo-1", "algo-2"), devices=devices, manifest=image)
        )
        assert node_plan.mode == mode
