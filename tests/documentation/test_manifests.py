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

from documentation.blocks import Block
from trainworks_launcher.command import options
from trainworks_launcher.contract.json_values import texts
from trainworks_launcher.environment import platforms
from trainworks_launcher.environment.platforms import Sources

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


def test_the_policy_of_a_job_that_is_tried_again_is_valid(page_blocks: list[Block]) -> None:
    (block,) = page_blocks
    job = MANIFESTS["Job"]
    policy = yaml.safe_load(block.text)["spec"]
    merged = {**job, "spec": {**job["spec"], **policy}}
    assert merged != job
    jsonschema.Draft202012Validator(schema_of("Job")).validate(merged)


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


@pytest.mark.parametrize("kind", ["TrainJob", "PyTorchJob", "MPIJob", "Job", "JobSet", "batch"])
def test_commands_are_understood(kind: str) -> None:
    manifest = MANIFESTS[kind] if kind != "batch" else json.loads(blocks("batch.md", "json")[0])
    command_lines = commands_in(manifest)
    assert command_lines
    for words in command_lines:
        assert words[0] == "train"
        end = words.index("--")
        _, _, invocation = options.read(words[1:end], words[end:])
        assert invocation.program == ("train.py", "--lr", "0.05")


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


def test_the_job_definition_of_aws_batch_is_valid(page_blocks: list[Block]) -> None:
    (block,) = page_blocks
    model = (
        botocore.session.get_session()
        .get_service_model("batch")
        .operation_model("RegisterJobDefinition")
    )
    report = botocore.validate.ParamValidator().validate(json.loads(block.text), model.input_shape)
    assert not report.has_errors(), report.generate_report()
