"""Test that the models of Kubeflow's SDK read and write the manifests of
docs/platforms/kubeflow.md: no field is refused, and none is dropped.
"""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from documentation.blocks import Block
from documentation.test_manifests import manifest_in
from sdk.support import HERE, PEERS

pytestmark = pytest.mark.engine


def with_quantities_as_text(manifest: Any) -> Any:
    """Return a manifest with `limits: {nvidia.com/gpu: "8"}` for `8`: Kubernetes takes both. One of
    the SDK's models writes the text, and one a number with a point.
    """
    if isinstance(manifest, list):
        return [with_quantities_as_text(item) for item in manifest]
    if not isinstance(manifest, dict):
        return manifest
    converted = {name: with_quantities_as_text(value) for name, value in manifest.items()}
    if "limits" in converted:
        converted["limits"] = {
            name: f"{float(number):g}" for name, number in converted["limits"].items()
        }
    return converted


@pytest.mark.parametrize("kind", ["TrainJob", "PyTorchJob"])
def test_the_sdk_reads_the_whole_manifest(kind: str, page_blocks: list[Block]) -> None:
    manifest = manifest_in(page_blocks, kind)
    python = PEERS / "kubeflow" / "bin" / "python"
    assert python.is_file(), f"{python} is missing; make peers makes it"
    done = subprocess.run(
        (python, HERE / "clients" / "kubeflow_models.py"),
        input=json.dumps(manifest),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    read = with_quantities_as_text(json.loads(done.stdout))
    assert read == with_quantities_as_text(manifest)
