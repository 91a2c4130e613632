"""Runs one training job in local mode with the SageMaker Python SDK 2, as a
user's own program would.

Started by the tests with the Python of .cache/peers/sdk-v2, in an empty directory: reads the job
from the file named by its argument and writes the result to ``result.json``. Nothing of ours is
imported.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import boto3
from sagemaker.estimator import Estimator  # type: ignore[import-not-found]
from sagemaker.local import LocalSession  # type: ignore[import-not-found]
from sagemaker.pytorch import PyTorch  # type: ignore[import-not-found]

job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
through_s3 = (
    {"default_bucket": job["bucket"], "s3_endpoint_url": job["store"]} if job["store"] else {}
)
session = LocalSession(boto3.Session(), **through_s3)
# The documented way to keep code on this machine: it is mounted, and no S3 is asked.
session.config = {"local": {"local_code": not job["store"], "container_root": str(Path.cwd())}}
estimator = {"Estimator": Estimator, "PyTorch": PyTorch}[job["estimator"]](
    role="arn:aws:iam::123456789012:role/trainworks",
    instance_type="local",
    sagemaker_session=session,
    **job["arguments"],
)
result = {"error": "", "model": ""}
try:
    estimator.fit(job["channels"] or None)
    result["model"] = estimator.model_data
except Exception as error:  # noqa: BLE001  (what a user sees is what the test looks at)
    result["error"] = f"{type(error).__name__}: {error}"
Path("result.json").write_text(json.dumps(result), encoding="utf-8")
