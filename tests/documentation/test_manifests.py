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
    found = [
        made
        for page in PAGES.glob("*.md")
        for text in blocks(page.name, "yaml")
        for made in yaml.safe_load_all(text)
    ]
    return [made for made in found if "apiVersion" in made]


MANIFESTS = {f"{made['kind']}": made for made in manifests()}


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema as the API server applies it, and fields that it does not know
    are refused (it drops them).
    """
    if "$ref" in schema:
        return strict(SCHEMAS["pod"])
    made = dict(schema)
    if made.pop("x-kubernetes-int-or-string", False):
        return {"type": ["integer", "string"]}
    if "properties" in made:
        made["properties"] = {name: strict(each) for name, each in made["properties"].items()}
        if not made.pop("x-kubernetes-preserve-unknown-fields", False):
            made["additionalProperties"] = False
    for name in ("items", "additionalProperties"):
        if isinstance(made.get(name), dict):
            made[name] = strict(made[name])
    return made


def schema_of(kind: str) -> dict[str, Any]:
    """The schema of a kind; a Job is what a JobSet has inside."""
    if kind != "Job":
        made = strict(SCHEMAS["kinds"][kind]["schema"])
    else:
        jobs = SCHEMAS["kinds"]["JobSet"]["schema"]["properties"]["spec"]["properties"][
            "replicatedJobs"
        ]
        made = {
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
    made["properties"] = {**made["properties"], "metadata": metadata}
    return made


@pytest.mark.parametrize("kind", ["TrainJob", "PyTorchJob", "MPIJob", "Job", "JobSet"])
def test_manifest_is_valid(kind: str) -> None:
    made = MANIFESTS[kind]
    if kind != "Job":
        row = SCHEMAS["kinds"][kind]
        assert made["apiVersion"] == f"{row['group']}/{row['version']}"
    jsonschema.Draft202012Validator(schema_of(kind)).validate(made)


@pytest.mark.parametrize("field", ["containers", "completionMode", "replicatedJobs", "limits"])
def test_a_wrong_field_anywhere_would_be_found(field: str) -> None:
    text = json.dumps(MANIFESTS["JobSet"])
    assert f'"{field}": ' in text
    wrong = json.loads(text.replace(f'"{field}": ', f'"{field}-": '))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(schema_of("JobSet")).validate(wrong)


def commands_in(made: Any) -> list[list[str]]:
    """Every command of a container in a manifest."""
    if isinstance(made, list):
        return [words for each in made for words in commands_in(each)]
    if not isinstance(made, dict):
        return []
    own = [made["command"]] if isinstance(made.get("command"), list) else []
    return own + [words for each in made.values() for words in commands_in(each)]


@pytest.mark.parametrize("kind", ["TrainJob", "PyTorchJob", "MPIJob", "Job", "JobSet", "batch"])
def test_commands_are_understood(kind: str) -> None:
    made = MANIFESTS[kind] if kind != "batch" else json.loads(blocks("batch.md", "json")[0])
    found = commands_in(made)
    assert found
    for words in found:
        assert words[0] == "train"
        end = words.index("--")
        _, _, asked = options.read(words[1:end], words[end:])
        assert asked.program == ("train.py", "--lr", "0.05")


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
        variables = {each["name"]: each["value"] for each in container["env"]}
        for index in range(spec["completions"]):
            found = platforms.describe(Sources({**variables, "JOB_COMPLETION_INDEX": str(index)}))
            hosts = [f"{prefix}-{number}.{name}" for number in range(spec["completions"])]
            assert list(texts(found.resource_config["hosts"])) == hosts
            assert found.resource_config["current_host"] == hosts[index]


def test_the_job_definition_of_aws_batch_is_valid() -> None:
    (text,) = blocks("batch.md", "json")
    model = (
        botocore.session.get_session()
        .get_service_model("batch")
        .operation_model("RegisterJobDefinition")
    )
    report = botocore.validate.ParamValidator().validate(json.loads(text), model.input_shape)
    assert not report.has_errors(), report.generate_report()
