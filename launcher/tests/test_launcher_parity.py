"""The script's environment beside the real sagemaker-training's, for many inputs: equal, but for
one table of reasons.

``TRAINWORKS_PARITY_CASES`` (default 300) and ``TRAINWORKS_PARITY_SEED`` choose
the generated inputs.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from environment_differences import DIFFERENCES, ENDED, SWITCHES, Case, Difference, Exported, table
from launcher_support import PROGRAMS, REPOSITORY

from trainworks_launcher.contract import modes
from trainworks_launcher.contract.json_values import Json
from trainworks_launcher.environment.environment import read_environment
from trainworks_launcher.job.job import Job, make_job
from trainworks_launcher.plan.script_environment import exported_variables

PEER = REPOSITORY / ".cache" / "peers" / "sagemaker-training" / "bin" / "python"
CASES = int(os.environ.get("TRAINWORKS_PARITY_CASES", "300"))
SEED = os.environ.get("TRAINWORKS_PARITY_SEED", "1")
TIME_OUT = 300.0
needs_peer = pytest.mark.skipif(
    not PEER.exists(), reason="no sagemaker-training: tools/set-up-peers sagemaker-training"
)


# --- inputs on the disk ---------------------------------------------------------------------------
def write(base: Path, case: Case) -> dict[str, str]:
    """The case as the platform would mount it; its variables."""
    for directory in ("input/config", "code", "other"):
        (base / directory).mkdir(parents=True, exist_ok=True)
    for directory in ("code", "other"):
        (base / directory / "train.py").write_text("", encoding="utf-8")
    if case.archive:
        with tarfile.open(base / "sourcedir.tar.gz", "w:gz") as archive:
            archive.add(base / "code" / "train.py", "train.py")
    documents = {
        "hyperparameters": case.hyperparameters,
        "resourceconfig": case.config,
        "inputdataconfig": case.channels,
    }
    for name, document in documents.items():
        if document is not None:
            text = json.dumps(document).replace("{base}", str(base))
            (base / f"input/config/{name}.json").write_text(text, encoding="utf-8")
    return {
        "PATH": os.environ["PATH"],
        **{name: value.replace("{base}", str(base)) for name, value in case.variables.items()},
    }


@contextlib.contextmanager
def cpus(case: Case) -> Iterator[int]:
    """The CPUs that the case may use."""
    before = os.sched_getaffinity(0)
    if case.one_cpu:
        os.sched_setaffinity(0, {min(before)})
    try:
        yield len(os.sched_getaffinity(0))
    finally:
        os.sched_setaffinity(0, before)


def theirs(inputs: Sequence[tuple[Path, Mapping[str, str]]]) -> list[dict[str, Any]]:
    """Return the variables that the real package makes of all inputs, in one process."""
    document = json.dumps(
        [{"base": str(base), "variables": dict(variables)} for base, variables in inputs]
    )
    driver = Path(__file__).with_name("peer_sagemaker_training.py")
    environment = {
        "PATH": os.environ["PATH"],
        "SAGEMAKER_BASE_DIR": str(inputs[0][0]),
        "HOME": str(inputs[0][0]),
    }
    answer = subprocess.run(
        [str(PEER), str(driver)],
        input=document,
        capture_output=True,
        text=True,
        env=environment,
        timeout=TIME_OUT,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr[-4000:]
    answers: list[dict[str, Any]] = json.loads(answer.stdout)
    assert len(answers) == len(inputs)
    return answers


def ours(base: Path, variables: Mapping[str, str]) -> Job:
    """Return the variables that the launcher makes of one input.

    Interfaces, programs and the place of rank 0's store are given, not probed: machines differ in
    them.
    """
    environment = read_environment({**variables, "SAGEMAKER_BASE_DIR": str(base)})
    devices = environment.devices._replace(
        interfaces=("eth0", "lo"), reaching="eth0", own_route="", free_port=0
    )
    return make_job(
        environment._replace(devices=devices, programs=MappingProxyType(dict(PROGRAMS)))
    )


def corrected(
    case: Case, base: Path, count: int, variables: Mapping[str, str], rows: Sequence[Difference]
) -> dict[str, str]:
    exported = Exported(str(base), count, variables)
    for row in rows:
        row.correct(case, exported)
    return exported.texts()


def differences(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Return the differences, one line each; of SM_TRAINING_ENV only the properties that differ."""
    differing: list[str] = []
    for name in sorted({*one, *other}):
        if one.get(name) == other.get(name):
            continue
        pair = (one.get(name), other.get(name))
        if name == "SM_TRAINING_ENV":
            here, there = (json.loads(text or "{}") for text in pair)
            names = [
                key
                for key in sorted({*here, *there})
                if repr(here.get(key)) != repr(there.get(key))
            ]
            differing.append(
                f"{name}: "
                + ", ".join(f"{key}: {here.get(key)!r} and {there.get(key)!r}" for key in names)
            )
        else:
            differing.append(f"{name}: {pair[0]!r} and {pair[1]!r}")
    return differing


# --- inputs, made by chance -----------------------------------------------------------------------
NAMES = (
    "epochs",
    "batch-size",
    "lr",
    "LR",
    "n",
    "größe",
    "日本",
    "a.b",
    "a b",
    "it's",
    '"q"',
    "$HOME",
    "model_dir",
    "a-b",
    "a_b",
)
VALUES: tuple[Any, ...] = (
    *(
        "3",
        "0.5",
        "1e-05",
        "1e400",
        "-0",
        "1_000",
        " 3 ",
        "007",
        "9" * 40,
        "NaN",
        "true",
        "True",
        "null",
        "None",
        "",
    ),
    *(
        '""',
        '"3"',
        '"it is"',
        "it is",
        "größe 日本 😀",
        '"größe"',
        "it's",
        '"',
        "\\",
        "a\nb\t",
        "$(id) `id` ; rm",
        "--x",
        "-1",
    ),
    *(
        "[]",
        "{}",
        "[1, 2]",
        "['a']",
        '["a", null, true]',
        '{"b": 1, "a": {"c": [1, {"d": null}]}}',
        '{"ü": "ö"}',
        "[1,",
    ),
    *(3, 0.1, True, None, "x" * 3000),
    [1, "a"],
    {"k": "v", "a": [1, None]},
)
CHANNELS = ("train", "test", "my-data", "a.b", "code", "tränen", "a_b", "with space", "T1")
SETTINGS: tuple[Json, ...] = (
    {},
    {"TrainingInputMode": "File", "ContentType": "a/b", "RecordWrapperType": "None"},
    None,
)


def cluster(chance: random.Random) -> dict[str, Json]:
    """A resource config as the platform, SDK v2's or v3's local mode, or a person writes it."""
    kind = chance.choice(("platform", "groups", "v2 local", "v3 local", "short"))
    suffix = "-" + "".join(chance.choices("abcdefgh", k=5)) if kind == "v2 local" else ""
    hosts = [f"algo-{number}{suffix}" for number in range(1, chance.randint(1, 4) + 1)]
    config: dict[str, Json] = {"current_host": chance.choice(hosts), "hosts": [*hosts]}
    if kind == "short":
        return config
    config["network_interface_name"] = (
        "ethwe" if kind == "v3 local" else chance.choice(("eth0", "eth0", "lo"))
    )
    if kind == "platform":
        config["current_instance_type"] = "ml.plain.xlarge"
        group: dict[str, Json] = {
            "instance_group_name": "homogeneousCluster",
            "instance_type": "ml.plain.xlarge",
            "hosts": [*hosts],
        }
        config.update({"current_group_name": "homogeneousCluster", "instance_groups": [group]})
    if kind == "groups":
        edge = chance.randint(1, len(hosts))
        parts = {"one": hosts[:edge], "two-ü": hosts[edge:]}
        types = {"one": "ml.plain.xlarge", "two-ü": "ml.other.xlarge"}
        listed: list[Json] = [
            {"instance_group_name": name, "instance_type": types[name], "hosts": [*part]}
            for name, part in parts.items()
            if part
        ]
        config["instance_groups"] = listed
        own = next(name for name, part in parts.items() if config["current_host"] in part)
        config["current_instance_type"] = types[own]
        if chance.random() < 0.8:
            config["current_group_name"] = own
    if chance.random() < 0.2:
        units: list[Json] = [{"hostName": host, "capacityUnitId": "u"} for host in hosts]
        config["topology"] = chance.choice(([], None, units))
    if chance.random() < 0.2:
        config["unknown_key"] = chance.choice(VALUES)
    return config


def generate(chance: random.Random) -> Case:
    """Return one input: a job that both launchers accept."""
    config = cluster(chance)
    hyperparameters: dict[str, Json] = {
        name: chance.choice(VALUES) for name in chance.sample(NAMES, chance.randint(0, 5))
    }
    variables: dict[str, str] = {}
    if chance.random() < 0.3:
        variables["SAGEMAKER_PROGRAM"] = "train.py"
    if chance.random() < 0.9 or not variables:
        hyperparameters["sagemaker_program"] = chance.choice(("train.py", '"train.py"'))
    optional: dict[str, Sequence[Json]] = {
        "sagemaker_container_log_level": ("20", 10, "30"),
        "sagemaker_job_name": ("job-h", '"job-h"'),
        "sagemaker_region": ("region-h", '"region-h"'),
        "sagemaker_s3_output": ("s3://bucket/output",),
        "sagemaker_submit_directory": ("{base}/other", '"{base}/other"'),
        "sagemaker_enable_cloudwatch_metrics": ("false", True),
        "sagemaker_instance_type": ("ml.plain.xlarge",),
        "sagemaker_unknown_parameter": VALUES,
        "default_user_module_name": ("m",),
        "_tuning_objective_metric": ("loss",),
    }
    hyperparameters.update(
        {name: chance.choice(values) for name, values in optional.items() if chance.random() < 0.15}
    )
    known_switches = [switch for switch in SWITCHES if switch in modes.SWITCHES]
    if chance.random() < 0.5:
        switch = chance.choice(known_switches)
        hyperparameters[switch] = chance.choice(("true", True))
        hyperparameters["sagemaker_mpi_num_of_processes_per_host"] = chance.choice(("1", 2))
        if switch == "sagemaker_mpi_enabled":
            hyperparameters["sagemaker_mpi_custom_mpi_options"] = chance.choice(
                ("", "-verbose -x A=1", '"--NCCL_DEBUG INFO"')
            )
            if chance.random() < 0.2:
                hyperparameters["mp_parameters"] = '{"partitions": 1, "ddp": true}'
        groups = config.get("instance_groups")
        if isinstance(groups, list) and chance.random() < 0.5:
            names = [group["instance_group_name"] for group in groups if isinstance(group, dict)]
            hyperparameters["sagemaker_distribution_instance_groups"] = json.dumps(
                chance.sample(names, chance.randint(1, len(names)))
            )
    elif chance.random() < 0.3:
        hyperparameters[chance.choice(known_switches)] = chance.choice(
            ("false", False, "False", "0", 0, "")
        )
    settings = {
        "TRAINING_JOB_NAME": ("job-v",),
        "TRAINING_JOB_ARN": ("arn:aws:x",),
        "AWS_REGION": ("region-a",),
        "AWS_DEFAULT_REGION": ("region-d",),
        "SAGEMAKER_CONTAINER_LOG_LEVEL": ("10", "40"),
        "SAGEMAKER_SUBMIT_DIRECTORY": ("{base}/other",),
        "SAGEMAKER_TRAINING_MODULE": ("package.module:main",),
        "SM_HP_MP_PARAMETERS": ("{}", ""),
        "PYTHONPATH": ("/extra", "/extra:/more"),
        "PYTHONUNBUFFERED": ("", "1"),
        "CURRENT_HOST": ("somebody",),
        "SM_STUDIO_LOCAL_MODE": ("true",),
    }
    variables.update(
        {name: chance.choice(values) for name, values in settings.items() if chance.random() < 0.15}
    )
    channels = {
        name: chance.choice(SETTINGS) for name in chance.sample(CHANNELS, chance.randint(0, 4))
    }
    return Case(hyperparameters, config, channels, variables)


# --- tests ----------------------------------------------------------------------------------------
@needs_peer
@pytest.mark.engine
def test_the_environment_is_sagemaker_trainings_but_for_the_table(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    cases = [generate(chance) for _ in range(CASES)]
    inputs = [(tmp_path / str(number), case) for number, case in enumerate(cases)]
    inputs_written = [(base, write(base, case)) for base, case in inputs]
    wrong_cases: list[str] = []
    for case, (base, variables), peer in zip(
        cases, inputs_written, theirs(inputs_written), strict=True
    ):
        if "error" in peer:
            wrong_cases.append(f"{case}: sagemaker-training raised {peer}")
            continue
        job = ours(base, variables)
        expected = corrected(
            case, base, len(os.sched_getaffinity(0)), peer["variables"], DIFFERENCES
        )
        different = differences(expected, exported_variables(job))
        if different:
            wrong_cases.append(f"{case}\n    wanted and made: {different}")
        if [*job.program.arguments] != peer["arguments"]:
            wrong_cases.append(
                f"{case}\n    arguments {peer['arguments']}, {job.program.arguments}"
            )
    assert not wrong_cases, f"{len(wrong_cases)} of {CASES} with seed {SEED}:\n" + "\n".join(
        wrong_cases[:5]
    )


@needs_peer
@pytest.mark.engine
@pytest.mark.parametrize("row", DIFFERENCES, ids=lambda row: row.about.split(":")[0].split(",")[0])
def test_each_difference_is_there_and_is_as_the_table_says(tmp_path: Path, row: Difference) -> None:
    variables = write(tmp_path, row.example)
    with cpus(row.example) as count:
        exported = exported_variables(ours(tmp_path, variables))
        (peer,) = theirs([(tmp_path, variables)])
    assert (
        differences(
            corrected(row.example, tmp_path, count, peer["variables"], DIFFERENCES), exported
        )
        == []
    )
    others = [other for other in DIFFERENCES if other is not row]
    left = differences(corrected(row.example, tmp_path, count, peer["variables"], others), exported)
    assert left, "the row no longer says a difference: delete it"


@needs_peer
@pytest.mark.engine
@pytest.mark.parametrize(
    ("title", "error", "case"), [(title, error, case) for title, error, _, case in ENDED]
)
def test_what_ends_sagemaker_training_is_a_job_here(
    tmp_path: Path, title: str, error: str, case: Case
) -> None:
    del title
    variables = write(tmp_path, case)
    (peer,) = theirs([(tmp_path, variables)])
    assert peer["error"] == error
    assert exported_variables(ours(tmp_path, variables))["SM_USER_ENTRY_POINT"] == "train.py"


def test_golden_table_of_the_documentation() -> None:
    path = REPOSITORY / "docs" / "tables" / "differences.md"
    begin, end = "<!-- generated: differences -->\n", "<!-- end of generated -->"
    head, _, rest = path.read_text(encoding="utf-8").partition(begin)
    _, _, tail = rest.partition(end)
    message = f"{head}{begin}{table()}{end}{tail}"
    if os.environ.get("TRAINWORKS_UPDATE_GOLDEN"):
        path.write_text(message, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == message, (
        "run this test with TRAINWORKS_UPDATE_GOLDEN=1, or: make golden"
    )
