"""Run by the SDK's own Python: reads cases as JSON from stdin, writes what the real SDK sends, or that it refuses."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from typing import Any

import boto3
import sagemaker  # type: ignore[import-not-found]
from sagemaker.instance_group import InstanceGroup  # type: ignore[import-not-found]
from sagemaker.pytorch import PyTorch  # type: ignore[import-not-found]


def sent(case: dict[str, Any], session: Any) -> dict[str, Any]:
    """The hyperparameters of a distribution, decoded; the error's text if the SDK refuses."""
    distribution = case["distribution"]
    groups = [InstanceGroup(*group) for group in case["groups"]]
    if groups and "instance_groups" in distribution:
        by_name = {group.instance_group_name: group for group in groups}
        stranger = InstanceGroup("stranger", "ml.p4d.24xlarge", 1)
        distribution["instance_groups"] = [by_name.get(name, stranger) for name in distribution["instance_groups"]]
    elif "instance_groups" in distribution:
        distribution["instance_groups"] = [
            InstanceGroup(name, "ml.p4d.24xlarge", 1) for name in distribution["instance_groups"]
        ]
    cluster = {"instance_groups": groups} if groups else {"instance_type": case["instance_type"], "instance_count": 2}
    estimator = PyTorch(
        entry_point=case["entry_point"],
        role="arn:aws:iam::000000000000:role/none",
        image_uri="image",
        distribution=distribution,
        sagemaker_session=session,
        **cluster,
    )
    return {name: json.loads(value) for name, value in estimator.hyperparameters().items()}


def main() -> None:
    """Answer every case."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    session = sagemaker.Session(boto_session=boto3.Session("x", "x", region_name="us-east-1"))
    answers: list[dict[str, Any]] = []
    for case in json.load(sys.stdin):
        try:
            answers.append({"sent": sent(case, session)})
        except (ValueError, KeyError, TypeError, AttributeError) as error:  # whatever the SDK's code meets
            answers.append({"refused": f"{type(error).__name__}: {error}"})
    sys.stdout.write("\n" + json.dumps(answers))


main()
