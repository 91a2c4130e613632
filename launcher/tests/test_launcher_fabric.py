"""EFA: devices decide, the table is the fallback, and a host without EFA gets nothing."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from typing import Any

import pytest
from launcher_support import REPOSITORY, environment, manifest, manifest_document, plan

from trainworks_launcher.contract.json_values import Json
from trainworks_launcher.environment.environment import Devices
from trainworks_launcher.environment.manifest import GENERIC_FABRIC, Manifest, parse_manifest
from trainworks_launcher.job.fabric import choose_fabric

EFA, NO_EFA, UNKNOWN = Devices(efa=("efa_0",)), Devices(), Devices(efa=None)

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
def test_choice(
    devices: tuple[str, ...] | None, instance_type: str, expected: dict[str, str]
) -> None:
    assert (
        dict(choose_fabric(manifest(), Devices(efa=devices), instance_type, 2, {}).variables)
        == expected
    )


def test_a_missing_plugin_is_told_with_its_cost() -> None:
    (warning,) = choose_fabric(manifest(), EFA, "ml.fast.xlarge", 2, {}).warnings
    assert "aws-ofi-nccl: NCCL talks TCP between hosts instead of EFA" in warning
    assert choose_fabric(manifest(), EFA, "ml.fast.xlarge", 1, {}).warnings == ()
    assert choose_fabric(manifest(), NO_EFA, "ml.plain.xlarge", 2, {}).warnings == ()


def test_an_instance_with_efa_and_no_device_is_told() -> None:
    (warning,) = choose_fabric(manifest(), NO_EFA, "ml.fast.xlarge", 2, {}).warnings
    assert "no EFA device is in this container" in warning


def test_what_the_container_sets_is_kept() -> None:
    fabric = choose_fabric(manifest(), EFA, "ml.fast.xlarge", 2, {"FI_PROVIDER": "tcp"})
    assert "FI_PROVIDER" not in fabric.variables
    assert ("FI_PROVIDER", "kept as the container's environment has it") in fabric.reasons


ROWS = tomllib.loads((REPOSITORY / "images" / "instances.toml").read_text(encoding="utf-8"))[
    "instance"
]
RULES = tomllib.loads((REPOSITORY / "images" / "fabric.toml").read_text(encoding="utf-8"))[
    "variable"
]
KNOWN = {
    "ml.p3.16xlarge": {},
    "ml.p3dn.24xlarge": PLAIN,
    "ml.p4d.24xlarge": RDMA,
    "ml.p4de.24xlarge": RDMA,
    "ml.p5.48xlarge": RDMA,
    "ml.p5en.48xlarge": RDMA,
    "ml.p6-b200.48xlarge": RDMA,
    "ml.trn1.2xlarge": {},
    "ml.trn1.32xlarge": RDMA,
    "ml.g5.2xlarge": {},
    "ml.g5.48xlarge": PLAIN,
    "ml.g4dn.12xlarge": PLAIN,
}
"""Words of the guides about instance types that people ask about.

The other rows have to agree with themselves.
"""


def image(**changes: Json) -> Manifest:
    """A manifest with the real instance table."""
    rows: dict[str, Json] = {}
    for row in ROWS:
        rows[row["name"]] = {"efa": row["efa"], "efa_rdma": row["efa_rdma"]}
    return parse_manifest(json.dumps({**manifest_document(instances=rows), **changes}), "made-up")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_every_instance_type(row: dict[str, Json]) -> None:
    """Plan with its own devices seen, with its devices hidden, and from elsewhere: each variable
    that is set has a reason.
    """
    name = str(row["name"])
    expected = {}
    if row["efa"]:
        expected = RDMA if row["efa_rdma"] else PLAIN
    assert expected == KNOWN.get(name, expected)
    devices = ("rdmap16s27", "rdmap32s27") if row["efa"] else ()
    seen = choose_fabric(image(), Devices(efa=devices), name, 2, {})
    assert dict(seen.variables) == expected
    assert dict(choose_fabric(image(), UNKNOWN, name, 2, {}).variables) == expected
    assert set(seen.variables) <= {subject for subject, why in seen.reasons if why}
    assert bool(seen.warnings) is bool(row["efa"])
    hidden = choose_fabric(image(), NO_EFA, name, 2, {})
    assert (hidden.efa, dict(hidden.variables), bool(hidden.warnings)) == (
        False,
        {},
        bool(row["efa"]),
    )


def test_devices_decide_against_the_table() -> None:
    """A type that the table calls plain, or does not have, with devices: it has EFA."""
    assert choose_fabric(image(), EFA, "ml.p3.16xlarge", 2, {}).efa
    assert choose_fabric(image(), EFA, "ml.newer.48xlarge", 2, {}).efa
    assert not choose_fabric(image(), NO_EFA, "ml.newer.48xlarge", 2, {}).efa


def test_the_images_versions_decide_the_variables() -> None:
    rules: list[Json] = [
        {"name": "FI_PROVIDER", "value": "efa", "rdma": False, "why": "always"},
        {"name": "NCCL_PROTO", "value": "simple", "rdma": False, "why": "an old plugin"},
        {"name": "FAST", "value": "1", "rdma": True, "why": "reads remote memory"},
    ]
    old = choose_fabric(image(fabric=rules), EFA, "ml.p4d.24xlarge", 2, {})
    assert dict(old.variables) == {"FI_PROVIDER": "efa", "NCCL_PROTO": "simple", "FAST": "1"}
    assert ("NCCL_PROTO", "an old plugin") in old.reasons
    assert (
        "FAST" not in choose_fabric(image(fabric=rules), EFA, "ml.p3dn.24xlarge", 2, {}).variables
    )
    assert dict(choose_fabric(image(fabric=[]), EFA, "ml.p4d.24xlarge", 2, {}).variables) == {}


def test_an_image_that_says_nothing_gets_what_every_version_takes() -> None:
    """The launcher's own list is that of the rows for an image without known versions."""
    rules = []
    for rule in RULES:
        conditions = rule.get("when", {}).values()
        if all("absent" in allowed for allowed in conditions):
            rules.append(rule)
    expected = {rule["name"]: rule["value"] for rule in rules}
    assert {variable.name: variable.value for variable in GENERIC_FABRIC} == expected


@pytest.mark.parametrize(
    ("interface", "expected", "message"),
    [
        ("eth0", "eth0", ""),
        ("eth0,eth1", "eth0,eth1", ""),
        (
            "eth0,eth7",
            "eth0",
            "of the network interfaces 'eth0,eth7' only eth0 exist(s) on this host",
        ),
        (
            "ethwe",
            "eth1",
            "the network interface 'ethwe' does not exist on this host; using 'eth1'",
        ),
        (
            "^lo,docker0",
            "eth1",
            "the network interface '^lo,docker0' does not exist on this host; using 'eth1'",
        ),
    ],
)
def test_network_interfaces_that_exist_are_used(
    interface: str, expected: str, message: str
) -> None:
    devices = Devices(interfaces=("eth0", "eth1"), reaching="eth1")
    job_environment = environment(
        {"sagemaker_mpi_enabled": True},
        hosts=("a", "b"),
        host="a",
        interface=interface,
        devices=devices,
    )
    node_plan = plan(job_environment)
    assert node_plan.env["NCCL_SOCKET_IFNAME"] == node_plan.env["GLOO_SOCKET_IFNAME"] == expected
    assert node_plan.argv[node_plan.argv.index("btl_tcp_if_include") + 1] == expected
    assert [warning.startswith(message) for warning in node_plan.warnings] == (
        [True] if message else []
    )


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, "eth0"),
        ({"interface": "eth1"}, None),
        ({"hosts": ()}, None),
        ({"devices": Devices(interfaces=("eth0", "lo"), routed="eth0")}, None),
        ({"devices": Devices(interfaces=("eth0", "eth1", "lo"))}, None),
        ({"variables": {"OMPI_MCA_btl_tcp_if_exclude": "docker0"}}, None),
        ({"asked": {"sagemaker_mpi_custom_mpi_options": "--mca btl_tcp_if_include eth1"}}, None),
    ],
)
def test_open_mpi_keeps_to_the_interface_that_reaches_the_others(
    changed: Mapping[str, Any], expected: str | None
) -> None:
    """Set the variable of each host, where no user names an interface.

    Mpirun would spread that of the leader.
    """
    several = {
        "devices": Devices(interfaces=("eth0", "eth1", "lo"), routed="eth0"),
        "hosts": ("a", "b"),
    }
    variables = {**several, "interface": "", **changed}
    node_plan = plan(
        environment(
            {"sagemaker_mpi_enabled": True, **variables.pop("asked", {})}, host="a", **variables
        )
    )
    name = "OMPI_MCA_btl_tcp_if_include"
    assert node_plan.env.get(name) == expected
    assert (name in node_plan.hidden) == (expected is not None)
    assert expected is None or "btl_tcp_if_include" not in node_plan.argv


@pytest.mark.parametrize(
    ("kind", "left_out"), [("ml.p4d.24xlarge", ""), ("ml.p3dn.24xlarge", "FI_EFA_USE_DEVICE_RDMA")]
)
def test_the_flags_that_the_guide_recommends_reach_every_rank_once(
    kind: str, left_out: str
) -> None:
    """Leave out a type whose devices read no remote memory: libfabric aborts where that is asked
    for.
    """
    recommended = "-x FI_EFA_USE_DEVICE_RDMA=1 -x FI_PROVIDER=efa -x RDMAV_FORK_SAFE=1"
    hyperparameters: dict[str, Json] = {
        "sagemaker_mpi_enabled": True,
        "sagemaker_mpi_num_of_processes_per_host": 8,
        "sagemaker_mpi_custom_mpi_options": recommended,
        "mp_parameters": {"pipeline_parallel_degree": 2, "ddp": True},
    }
    rows: dict[str, Json] = {}
    for row in ROWS:
        if row["name"] == kind:
            rows[kind] = {name: row[name] for name in ("gpus", "efa", "efa_rdma")}
    image = parse_manifest(json.dumps(manifest_document(instances=rows)), "made-up")
    devices = Devices(gpus=8, cpus=8, interfaces=("eth0", "lo"), efa=("rdmap16s27",))
    hosts = ("algo-1", "algo-2")
    node_plan = plan(
        environment(
            hyperparameters, hosts=hosts, instance_type=kind, devices=devices, manifest=image
        )
    )
    exported = [
        node_plan.argv[place + 1] for place, word in enumerate(node_plan.argv) if word == "-x"
    ]
    for name, value in (flag.split("=") for flag in recommended.split("-x ")[1:]):
        exported_words = [word for word in exported if word.partition("=")[0] == name]
        if name == left_out:
            assert exported_words == []
            assert name not in node_plan.env
            assert any(name in warning for warning in node_plan.warnings)
            continue
        assert len(exported_words) == 1
        assert value.strip() == (exported_words[0].partition("=")[2] or node_plan.env[name])
