"""Read a manifest of Kubeflow with the models of its SDK, and print their result.

Started by the tests with the Python of .cache/peers/kubeflow: JSON in, JSON out.
"""

import json
import sys
from dataclasses import dataclass

from kubeflow.training import ApiClient, KubeflowOrgV1PyTorchJob  # type: ignore[import-not-found]
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob  # type: ignore[import-not-found]


@dataclass
class Response:
    """The answer of an API server, as far as the client's decoder reads it."""

    data: str


text = sys.stdin.read()
if json.loads(text)["kind"] == "TrainJob":
    manifest = TrainerV1alpha1TrainJob.from_json(text).to_dict()
else:
    client = ApiClient()
    job = client.deserialize(Response(text), KubeflowOrgV1PyTorchJob)
    manifest = client.sanitize_for_serialization(job)
print(json.dumps(manifest))
