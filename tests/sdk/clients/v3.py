"""Runs one training job in local mode with the SageMaker Python SDK 3, as a
user's own program would.

Started by the tests with the Python of .cache/peers/sdk-v3, in an empty directory: reads the job
from the file named by its argument and writes the result to ``result.json``. Nothing of ours is
imported.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from sagemaker.core.helper.session_helper import Session  # type: ignore[import-not-found]
from sagemaker.train import ModelTrainer  # type: ignore[import-not-found]
from sagemaker.train.configs import Compute, InputData, SourceCode  # type: ignore[import-not-found]
from sagemaker.train.distributed import MPI, Torchrun  # type: ignore[import-not-found]
from sagemaker.train.model_trainer import Mode  # type: ignore[import-not-found]

job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
arguments = job["arguments"]
if "source_code" in arguments:
    arguments["source_code"] = SourceCode(**arguments["source_code"])
if "distributed" in arguments:
    ((kind, settings),) = arguments["distributed"].items()
    arguments["distributed"] = {"MPI": MPI, "Torchrun": Torchrun}[kind](**settings)
trainer = ModelTrainer(
    training_mode=Mode.LOCAL_CONTAINER,
    local_container_root=str(Path.cwd()),
    sagemaker_session=Session(),
    role="arn:aws:iam::123456789012:role/trainworks",
    compute=Compute(instance_type="local_cpu", instance_count=job["hosts"]),
    **arguments,
)
result = {"error": "", "model": ""}
try:
    trainer.train(
        [InputData(channel_name=name, data_source=path) for name, path in job["channels"].items()]
    )
    result["model"] = f"file://{Path.cwd()}/compressed_artifacts/model.tar.gz"
except Exception as error:  # noqa: BLE001  (what a user sees is what the test looks at)
    result["error"] = f"{type(error).__name__}: {error}"
Path("result.json").write_text(json.dumps(result), encoding="utf-8")
