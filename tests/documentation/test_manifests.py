"""Manifests of docs/platforms (batch.md, jobset.md, kubeflow.md, mpijob.md): valid by the schemas
of their API, and they start jobs that the launcher understands.

``kubernetes_schemas.json`` beside this file says where its schemas come from.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import botocore.session
import botocore.validate
import jsonschema
import pytest
import yaml

from documentation.blocks import Block, block_of
from documentation.planning import plan
from trainworks_launcher.command import options
from trainworks_launcher.contract import names
from trainworks_launcher.contract.json_values import texts
from trainworks_launcher.environment import platforms
from trainworks_launcher.environment.platforms import Sources
from trainworks_launcher.supervise.outcome.outcome import FAILED, Outcome

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "platforms"
SCHEMAS: dict[str, Any] = json.loads(
    (Path(__file__).with_name("kubernetes_schemas.json")).read_text("utf-8")
)


def blocks(page: str, language: str) -> list[str]:
    text = (PAGES / page).read_text("utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def manifests() -> list[dict[str, Any]]:
    documents = [
        document
        for page in PAGES.glob("*.md")
        for text in blocks(page.name, "yaml")
        for document in yaml.safe_load_all(text)
    ]
    return [document for document in documents if "apiVersion" in document]


MANIFESTS = {f"{manifest['kind']}": manifest for manifest in manifests()}

PARTS = {"tries": "Job", "smp": "Job", "restarts": "JobSet"}
"""Cases of blocks of jobset.md that are a part of a manifest, and the kind that each is for."""


def part_of_page(words: str) -> dict[str, Any]:
    """Return the part of a manifest that has these words."""
    part: dict[str, Any] = yaml.safe_load(block_of("docs/platforms/jobset.md", words))
    return part


def merge(manifest: Any, part: Any) -> Any:
    """Return a manifest with a part put into it, as a strategic merge does: rows of a list are the
    same row if they have the same `name`, and other lists are replaced.
    """
    if isinstance(manifest, dict) and isinstance(part, dict):
        merged = dict(manifest)
        for key, value in part.items():
            merged[key] = merge(manifest[key], value) if key in manifest else value
        return merged
    if not isinstance(manifest, list) or not all("name" in row for row in [*manifest, *part]):
        return part
    rows = {row["name"]: row for row in manifest}
    for row in part:
        rows[row["name"]] = merge(rows.get(row["name"], {}), row)
    return list(rows.values())


def manifest_in(page_blocks: list[Block], kind: str) -> dict[str, Any]:
    """The one manifest of a kind in the blocks of a test."""
    documents = [document for block in page_blocks for document in yaml.safe_load_all(block.text)]
    (manifest,) = [document for document in documents if document["kind"] == kind]
    return dict(manifest)


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema as the API server applies it, and fields that it does not know
    are refused (it drops them).
    """
    if "$ref" in schema:
        return strict(SCHEMAS["pod"])
    strict_schema = dict(schema)
    if strict_schema.pop("x-kubernetes-int-or-string", False):
        return {"type": ["integer", "string"]}
    if "properties" in strict_schema:
        strict_schema["properties"] = {
            name: strict(property_schema)
            for name, property_schema in strict_schema["properties"].items()
        }
        if not strict_schema.pop("x-kubernetes-preserve-unknown-fields", False):
            strict_schema["additionalProperties"] = False
    for name in ("items", "additionalProperties"):
        if isinstance(strict_schema.get(name), dict):
            strict_schema[name] = strict(strict_schema[name])
    return strict_schema


def schema_of(kind: str) -> dict[str, Any]:
    """The schema of a kind; a Job is the inner part of a JobSet."""
    if kind != "Job":
        closed_schema = strict(SCHEMAS["kinds"][kind]["schema"])
    else:
        jobs = SCHEMAS["kinds"]["JobSet"]["schema"]["properties"]["spec"]["properties"][
            "replicatedJobs"
        ]
        closed_schema = {
            "type": "object",
            "properties": {
                "spec": strict(jobs["items"]["properties"]["template"]["properties"]["spec"])
            },
        }
    metadata = {
        "type": "object",
        "properties": {"name": {"type": "string"}},
        "additionalProperties": False,
    }
    closed_schema["properties"] = {**closed_schema["properties"], "metadata": metadata}
    return closed_schema


@pytest.mark.parametrize("kind", ["TrainJob", "PyTorchJob", "MPIJob", "Job", "JobSet"])
def test_manifest_is_valid(kind: str, page_blocks: list[Block]) -> None:
    manifest = manifest_in(page_blocks, kind)
    if kind != "Job":
        row = SCHEMAS["kinds"][kind]
        assert manifest["apiVersion"] == f"{row['group']}/{row['version']}"
    jsonschema.Draft202012Validator(schema_of(kind)).validate(manifest)


@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_a_manifest_is_valid(part: str, page_blocks: list[Block]) -> None:
    (block,) = page_blocks
    kind = PARTS[part]
    manifest = merge(MANIFESTS[kind], yaml.safe_load(block.text))
    assert manifest != MANIFESTS[kind]
    jsonschema.Draft202012Validator(schema_of(kind)).validate(manifest)


def test_the_processes_of_a_trainjob(page_blocks: list[Block], tmp_path: Path) -> None:
    """The field is the operator's variable; the command's own number wins over it."""
    (block,) = page_blocks
    manifest = merge(MANIFESTS["TrainJob"], yaml.safe_load(block.text))
    jsonschema.Draft202012Validator(schema_of("TrainJob")).validate(manifest)
    trainer = manifest["spec"]["trainer"]
    variables = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "digits-node-0-0.digits",
        "PET_MASTER_PORT": "29400",
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
    }
    command = trainer["command"]
    own = [command[0], "--processes-per-host", "2", *command[1:]]
    for words, processes in ((command, 4), (own, 2)):
        folder = tmp_path / str(processes)
        folder.mkdir()
        assert f"--nproc-per-node={processes}" in plan(words, variables, folder)["argv"]


@pytest.mark.parametrize("field", ["containers", "completionMode", "replicatedJobs", "limits"])
def test_a_wrong_field_anywhere_would_be_found(field: str) -> None:
    text = json.dumps(MANIFESTS["JobSet"])
    assert f'"{field}": ' in text
    wrong = json.loads(text.replace(f'"{field}": ', f'"{field}-": '))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(schema_of("JobSet")).validate(wrong)


def commands_in(value: Any) -> list[list[str]]:
    """Every command of a container in a manifest."""
    if isinstance(value, list):
        return [words for item in value for words in commands_in(item)]
    if not isinstance(value, dict):
        return []
    own = [value["command"]] if isinstance(value.get("command"), list) else []
    return own + [words for item in value.values() for words in commands_in(item)]


@pytest.mark.parametrize(
    "kind", ["TrainJob", "PyTorchJob", "MPIJob", "Job", "JobSet", "batch", "smp"]
)
def test_commands_are_understood(kind: str) -> None:
    if kind == "batch":
        manifest = json.loads(blocks("batch.md", "json")[0])
    elif kind == "smp":
        manifest = merge(MANIFESTS["Job"], part_of_page("--mode, mpi"))
    else:
        manifest = MANIFESTS[kind]
    command_lines = commands_in(manifest)
    assert command_lines
    for words in command_lines:
        assert words[0] == "train"
        end = words.index("--")
        _, _, invocation = options.read(words[1:end], words[end:])
        assert invocation.program == ("train.py", "--lr", "0.05")


def test_the_job_of_smp_is_planned(tmp_path: Path) -> None:
    manifest = merge(MANIFESTS["Job"], part_of_page("--mode, mpi"))
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    variables = {row["name"]: row["value"] for row in container["env"]}
    planned = plan(container["command"], {"JOB_COMPLETION_INDEX": "0", **variables}, tmp_path)
    assert planned["mode"] == "smdistributed.modelparallel"
    (hosts,) = [word for word in planned["argv"] if word.endswith(".digits:8")]
    assert hosts.count(":8") == 2


def test_the_hosts_of_an_indexed_job_are_the_names_of_its_pods() -> None:
    """JOB-INDEX.SERVICE, and JOBSET-REPLICATEDJOB-REPLICA-INDEX.JOBSET
    (Kubernetes, Jobs; JobSet, pkg/util).
    """
    job, service, jobset = MANIFESTS["Job"], MANIFESTS["Service"], MANIFESTS["JobSet"]
    pod = job["spec"]["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    (row,) = jobset["spec"]["replicatedJobs"]
    name = jobset["metadata"]["name"]
    for spec, prefix in (
        (job["spec"], job["metadata"]["name"]),
        (row["template"]["spec"], f"{name}-{row['name']}-0"),
    ):
        (container,) = spec["template"]["spec"]["containers"]
        variables = {variable["name"]: variable["value"] for variable in container["env"]}
        for index in range(spec["completions"]):
            description = platforms.describe(
                Sources({**variables, "JOB_COMPLETION_INDEX": str(index)})
            )
            hosts = [f"{prefix}-{number}.{name}" for number in range(spec["completions"])]
            assert list(texts(description.resource_config["hosts"])) == hosts
            assert description.resource_config["current_host"] == hosts[index]


def may_be_tried_again(status: int) -> bool:
    """Return what `retry` of failure.json says of a host that ended with a status: of the
    launcher's own, and of the script's, which has a place.
    """
    own = [value for name, value in vars(names).items() if name.startswith("EXIT_")]
    place = "" if status in own else "train.py on host node-0"
    return Outcome(kind=FAILED, status=status, place=place).retry


def test_the_policies_of_a_job_are_what_the_launcher_says_of_its_statuses() -> None:
    refused = []
    for spec in (
        MANIFESTS["Job"]["spec"],
        MANIFESTS["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"],
    ):
        (rule,) = spec["podFailurePolicy"]["rules"]
        assert (rule["action"], rule["onExitCodes"]["operator"]) == ("FailJob", "In")
        refused += rule["onExitCodes"]["values"]
        (container,) = spec["template"]["spec"]["containers"]
        assert rule["onExitCodes"]["containerName"] == container["name"]
    assert refused == [names.EXIT_NOT_STARTED] * 2
    assert not may_be_tried_again(names.EXIT_NOT_STARTED)

    (rule,) = part_of_page("backoffLimit: 6")["spec"]["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]["operator"]) == ("FailJob", "NotIn")
    tried_again = [status for status in range(1, 256) if may_be_tried_again(status)]
    assert rule["onExitCodes"]["values"] == tried_again


def names_in(schema: Any) -> set[str]:
    """Return the names of all fields in a schema."""
    if isinstance(schema, list):
        return {name for item in schema for name in names_in(item)}
    if not isinstance(schema, dict):
        return set()
    fields = set(schema["properties"]) if isinstance(schema.get("properties"), dict) else set()
    return fields | {name for item in schema.values() for name in names_in(item)}


@pytest.mark.parametrize(
    ("kind", "has_a_policy"),
    [("JobSet", True), ("TrainJob", False), ("PyTorchJob", False), ("MPIJob", False)],
)
def test_the_page_has_a_policy_where_the_api_has_one(kind: str, has_a_policy: bool) -> None:
    assert ("podFailurePolicy" in names_in(SCHEMAS["kinds"][kind]["schema"])) == has_a_policy
    assert ("podFailurePolicy" in json.dumps(MANIFESTS[kind])) == has_a_policy


def test_a_trainjob_patches_pods_and_not_their_job() -> None:
    spec = SCHEMAS["kinds"]["TrainJob"]["schema"]["properties"]["spec"]["properties"]
    runtime = spec["runtimePatches"]["items"]["properties"]["trainingRuntimeSpec"]["properties"]
    job_set = runtime["template"]["properties"]["spec"]["properties"]
    job = job_set["replicatedJobs"]["items"]["properties"]["template"]["properties"]["spec"]
    assert set(job["properties"]) == {"template"}


TRAIN_JOB_PODS = [
    {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "8",
        "PET_NODE_RANK": str(rank),
        "PET_MASTER_ADDR": "digits-node-0-0.digits",
        "PET_MASTER_PORT": "29500",
        "JOB_COMPLETION_INDEX": str(rank),
    }
    for rank in range(2)
]
"""Variables of a TrainJob's two pods (kubeflow/trainer, torch.go; the index is a Job's)."""

PYTORCH_JOB_PODS = [
    {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "8",
        "PET_NODE_RANK": str(rank),
        "PET_MASTER_ADDR": "digits-master-0",
        "PET_MASTER_PORT": "23456",
        "MASTER_ADDR": "digits-master-0",
        "MASTER_PORT": "23456",
        "WORLD_SIZE": "16",
        "RANK": str(rank),
        "PYTHONUNBUFFERED": "1",
    }
    for rank in range(2)
]
"""Variables of a PyTorchJob's two pods (kubeflow/training-operator, envvar.go, master.go)."""


@pytest.mark.parametrize(
    ("kind", "pods"), [("TrainJob", TRAIN_JOB_PODS), ("PyTorchJob", PYTORCH_JOB_PODS)]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_the_command_of_a_kubeflow_manifest_is_planned_in_its_pod(
    kind: str, pods: list[dict[str, str]], rank: int, tmp_path: Path
) -> None:
    command_lines = commands_in(MANIFESTS[kind])
    # A PyTorchJob has a command for the master, and one for the workers.
    words = command_lines[min(rank, len(command_lines) - 1)]
    planned = plan(words, pods[rank], tmp_path)
    assert planned["platform"] == "kubeflow"
    assert planned["mode"] == "torch_distributed"
    arguments = planned["argv"]
    assert "--nnodes=2" in arguments
    assert f"--node-rank={rank}" in arguments
    assert "--nproc-per-node=8" in arguments
    assert f"--master-port={pods[rank]['PET_MASTER_PORT']}" in arguments
    if rank > 0:  # the leader takes its own address
        assert f"--master-addr={pods[rank]['PET_MASTER_ADDR']}" in arguments
    assert arguments[-3:] == ["train.py", "--lr", "0.05"]


def test_the_job_definition_of_aws_batch_is_valid(page_blocks: list[Block]) -> None:
    (block,) = page_blocks
    model = (
        botocore.session.get_session()
        .get_service_model("batch")
        .operation_model("RegisterJobDefinition")
    )
    report = botocore.validate.ParamValidator().validate(json.loads(block.text), model.input_shape)
    assert not report.has_errors(), report.generate_report()
