"""Ask the SageMaker Python SDK itself for its reading of a ``distribution``, where its second line
is installed.

The SDK answers in a process of its own, without credentials, and sends nothing: its import looks
for credentials on the network, writes lines of its own, and changes the dicts that it is given.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainworks_launcher.contract.json_values import Json, decode, mapping
from trainworks_preflight.distribution import GROUPS, Group, group_names

_ESTIMATORS = {"pytorch": "PyTorch", "tensorflow": "TensorFlow", "mxnet": "MXNet"}
_LIMIT = (
    300.0  # seconds, and one more for each case; a process that waits for something is given up
)
_ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "none",
    "AWS_SECRET_ACCESS_KEY": "none",
    "AWS_DEFAULT_REGION": "none",
    "AWS_EC2_METADATA_DISABLED": "true",
    "SAGEMAKER_SUPPRESS_V2_WARNING": "1",
}
_START = "import sys; sys.path += sys.argv[1:]; import real_sdk; real_sdk.answer()"


class Case(NamedTuple):
    """The arguments of an estimator.

    ``version`` is the framework's, ``""`` if not known (TensorFlow's needs it).
    """

    distribution: Mapping[str, Json]
    groups: Sequence[Group]
    entry_point: str
    framework: str = "pytorch"
    version: str = ""


class Answer(NamedTuple):
    """The hyperparameters that the SDK sends, decoded, or the error that it raises."""

    sent: Mapping[str, Json]
    refused: str = ""


def ask(cases: Sequence[Case], python: str = sys.executable) -> tuple[Answer, ...] | None:
    """Ask the SDK of a Python.

    Args:
        cases: The questions.
        python: The interpreter; if it is this one, it is not started where it has no ``sagemaker``.

    Returns:
        An answer to each; None if the SDK's second line is not there, or ends without an answer.
    """
    if python == sys.executable and importlib.util.find_spec("sagemaker") is None:
        return None
    own = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    root = Path(__file__).resolve().parents[2] / "launcher"
    questions = []
    for case in cases:
        groups = [vars(group) for group in case.groups]
        questions.append({**case._asdict(), "groups": groups})
    try:
        done = subprocess.run(
            (python, "-c", _START, str(root), str(Path(__file__).parent)),
            input=json.dumps(questions),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=root.anchor,  # -c looks for modules there first: not among a user's files
            env={**own, **_ENVIRONMENT},
            timeout=_LIMIT + len(cases),
            check=True,
            encoding="utf-8",
        )
        answers = decode(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    rows = [mapping(row) for row in answers] if isinstance(answers, list) else []
    return tuple(Answer(mapping(row.get("sent")), str(row.get("refused", ""))) for row in rows)


def _sent(case: Mapping[str, Any], session: Any) -> dict[str, Any]:
    """Return the hyperparameters of an estimator. Raises the SDK's own errors."""
    kind = importlib.import_module("sagemaker.instance_group").InstanceGroup
    framework = case["framework"]
    estimator = getattr(importlib.import_module(f"sagemaker.{framework}"), _ESTIMATORS[framework])
    groups = {
        row["name"]: kind(row["name"], row["instance_type"], row["count"]) for row in case["groups"]
    }
    distribution = dict(case["distribution"])
    first = case["groups"][0]
    if GROUPS in distribution:
        # Objects in a script; one that the cluster does not have is another object.
        groups_named = group_names(distribution)
        distribution[GROUPS] = [
            groups.get(name, kind(name, first["instance_type"], 1)) for name in groups_named
        ]
    cluster: dict[str, Any] = {"instance_groups": list(groups.values())}
    if not first["name"]:
        cluster = {"instance_type": first["instance_type"], "instance_count": first["count"]}
    model_options = {"model_dir": False} if framework == "tensorflow" else {}
    real_estimator = estimator(
        entry_point=case["entry_point"],
        role="arn:aws:iam::000000000000:role/none",
        image_uri="image",
        py_version="py3",
        framework_version=case["version"] or None,
        distribution=distribution,
        sagemaker_session=session,
        **cluster,
        **model_options,
    )
    return {name: json.loads(value) for name, value in real_estimator.hyperparameters().items()}


def answer() -> None:
    """Answer the cases on stdin, as JSON on stdout, in the child process."""
    cases, stdout = json.load(sys.stdin), sys.stdout
    sys.stdout = sys.stderr  # the SDK's log
    session = importlib.import_module("sagemaker").Session()
    answers: list[dict[str, Any]] = []
    for case in cases:
        try:
            answers.append({"sent": _sent(case, session)})
        except Exception as error:  # noqa: BLE001  (whatever the SDK raises is its refusal)
            answers.append({"refused": f"{type(error).__name__}: {error}"})
    json.dump(answers, stdout)
