"""EFA: devices decide, the table is the fallback, and a host without EFA gets nothing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from launcher_support import manifest

from trainworks_launcher.fabric import choose_fabric

RDMA = {"FI_PROVIDER": "efa", "RDMAV_FORK_SAFE": "1", "FI_EFA_USE_DEVICE_RDMA": "1"}
PLAIN = {"FI_PROVIDER": "efa", "RDMAV_FORK_SAFE": "1"}


@pytest.mark.parametrize(
    ("devices", "instance_type", "expected"),
    [
        (("rdmap0s1",), "ml.fast.xlarge", RDMA),
        (("efa_0",), "ml.fabric.xlarge", PLAIN),
        (("efa_0",), "ml.unknown.xlarge", PLAIN),
        ((), "ml.fast.xlarge", {}),
        ((), "ml.plain.xlarge", {}),
        ((), "local", {}),
        (None, "ml.fast.xlarge", RDMA),
        (None, "ml.plain.xlarge", {}),
        (None, "ml.unknown.xlarge", {}),
    ],
)
def test_choice(devices: Sequence[str] | None, instance_type: str, expected: dict[str, str]) -> None:
    assert dict(choose_fabric(manifest(), devices, instance_type, 2, {}).variables) == expected


def test_a_missing_plugin_is_told_with_its_cost() -> None:
    (warning,) = choose_fabric(manifest(), ("efa_0",), "ml.fast.xlarge", 2, {}).warnings
    assert "aws-ofi-nccl: NCCL talks TCP between hosts instead of EFA" in warning
    assert choose_fabric(manifest(), ("efa_0",), "ml.fast.xlarge", 1, {}).warnings == ()
    assert choose_fabric(manifest(), (), "ml.plain.xlarge", 2, {}).warnings == ()


def test_an_instance_with_efa_and_no_device_is_told() -> None:
    (warning,) = choose_fabric(manifest(), (), "ml.fast.xlarge", 2, {}).warnings
    assert "no EFA device is in this container" in warning


def test_what_the_container_sets_is_kept() -> None:
    made = choose_fabric(manifest(), ("efa_0",), "ml.fast.xlarge", 2, {"FI_PROVIDER": "tcp"})
    assert "FI_PROVIDER" not in made.variables
    assert ("FI_PROVIDER", "kept as the container's environment has it") in made.reasons
