"""Test that devices are those that this container may open, and that a user's settings are held to
them as the launcher's own are.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from launcher_support import NO_GPU, environment, manifest, plan

from trainworks_launcher.checks import FAILED, Checks
from trainworks_launcher.checks.gpus import Gpus
from trainworks_launcher.checks.host_state import HostState
from trainworks_launcher.checks.rules import find_problems
from trainworks_launcher.command.explain import explain
from trainworks_launcher.contract.errors import RefusalError
from trainworks_launcher.contract.json_values import Json
from trainworks_launcher.environment import cgroups, devices, platforms
from trainworks_launcher.environment.command_line import Invocation
from trainworks_launcher.environment.entry_point import Code
from trainworks_launcher.environment.environment import Devices
from trainworks_launcher.environment.platforms import Sources
from trainworks_launcher.job.fabric import LOCKED_BYTES, choose_fabric
from trainworks_launcher.job.job import make_job
from trainworks_launcher.plan.host_checks import checks_of
from trainworks_launcher.supervise import supervisor

EFA, NO_EFA, UNKNOWN = Devices(efa=("efa_0",)), Devices(), Devices(efa=None)

# --- EFA ------------------------------------------------------------------------------------------
NAMES = ("rdmap16s27", "rdmap32s27", "rdmap48s27")


def host_with_efa(root: Path, *, by_class: bool = True, mapped: bool = True) -> tuple[str, str]:
    """A host's listing of three EFA devices and one that is none, whose nodes
    are in another order.
    """
    (root / "dev").mkdir()
    for number, name in enumerate(("mlx5_0", *reversed(NAMES))):
        node = f"uverbs{number}"
        (root / "class/infiniband" / name).mkdir(parents=True)
        if mapped and by_class:
            (root / "class/infiniband_verbs" / node).mkdir(parents=True)
            (root / "class/infiniband_verbs" / node / "ibdev").write_text(f"{name}\n")
        elif mapped:
            (root / "class/infiniband" / name / "device/infiniband_verbs" / node).mkdir(
                parents=True
            )
    return str(root / "class"), str(root / "dev")


@pytest.mark.parametrize("by_class", [True, False])
def test_an_efa_device_counts_if_its_own_node_can_be_opened(tmp_path: Path, by_class: bool) -> None:
    places = host_with_efa(tmp_path, by_class=by_class)
    assert devices.efa_devices(*places) == (
        (),
        NAMES,
    ), "the host's devices, and none is this container's"
    (tmp_path / "dev/uverbs0").touch()  # the other device's
    (tmp_path / "dev/uverbs1").touch()
    (tmp_path / "dev/uverbs2").mkdir()  # cannot be opened for writing
    assert devices.efa_devices(*places) == (NAMES[2:], NAMES[:2])
    (tmp_path / "dev/uverbs2").rmdir()
    (tmp_path / "dev/uverbs2").touch()
    (tmp_path / "dev/uverbs3").touch()
    assert devices.efa_devices(*places) == (NAMES, ())


def test_nodes_are_counted_where_the_kernel_does_not_say_whose_they_are(tmp_path: Path) -> None:
    places = host_with_efa(tmp_path, mapped=False)
    (tmp_path / "dev/uverbs0").touch()
    assert devices.efa_devices(*places) == (NAMES[:1], NAMES[1:])
    shutil.rmtree(tmp_path / "class")
    assert devices.efa_devices(*places) == ((), ())


def test_the_limit_of_locked_memory_does_not_hold_for_everybody(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("CapEff:\t0000000000000000\n")
    limit = devices.locked_memory(str(status))
    status.write_text("CapEff:\t0000000000004000\n")
    assert devices.locked_memory(str(status)) is None
    pid = os.fork()
    if pid == 0:  # a limit of this process would be the other tests' too
        import resource

        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
        status.write_text("CapEff:\t0000000000000000\n")
        os._exit(0 if devices.locked_memory(str(status)) == 65536 else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert limit is None or limit > 0


@pytest.mark.parametrize(
    ("usable", "closed", "locked", "message"),
    [
        ((), NAMES, None, "the container can open none of its devices"),
        (NAMES, (), 65536, "only 64 KiB of memory may be locked"),
        (NAMES, (), LOCKED_BYTES, ""),
        (NAMES[:1], NAMES[1:], None, ""),
    ],
)
def test_without_devices_and_memory_efa_is_not_asked_for(
    usable: tuple[str, ...], closed: tuple[str, ...], locked: int | None, message: str
) -> None:
    host_devices = NO_GPU._replace(efa=usable, closed_efa=closed, locked_memory=locked)
    for hosts in ((), ("algo-1", "algo-2")):
        node_plan = plan(
            environment(hosts=hosts, instance_type="ml.fast.xlarge", devices=host_devices)
        )
        assert ("FI_PROVIDER" in node_plan.env) is (not message)
        lines = [
            line
            for line in node_plan.warnings
            if "EFA" in line and "plugin" not in line and "ofi" not in line
        ]
        assert len(lines) == bool(message), lines
        assert message in "".join(lines)


def test_a_user_cannot_ask_for_what_the_host_has_not() -> None:
    rdma = {"FI_EFA_USE_DEVICE_RDMA": "1"}
    fabric = choose_fabric(manifest(), EFA, "ml.fabric.xlarge", 1, rdma)
    why = "the EFA devices of ml.fabric.xlarge do not read remote memory: libfabric aborts"
    assert fabric.warnings == (f"left out FI_EFA_USE_DEVICE_RDMA=1: {why}",)
    # Of an image whose libfabric needs no such variable, and still aborts.
    newer = manifest()._replace(fabric=())
    assert choose_fabric(newer, EFA, "ml.fabric.xlarge", 1, rdma).warnings == fabric.warnings
    for kind, value in (
        ("ml.fast.xlarge", "1"),
        ("ml.unknown.xlarge", "1"),
        ("ml.fabric.xlarge", "0"),
    ):
        variables = {"FI_EFA_USE_DEVICE_RDMA": value}
        assert choose_fabric(manifest(), EFA, kind, 1, variables).warnings == ()
    for closed in ((), ("efa_0",)):
        without = choose_fabric(
            manifest(), Devices(closed_efa=closed), "local", 1, {"FI_PROVIDER": "efa"}
        )
        assert without.warnings[-1].startswith("left out FI_PROVIDER=efa: ")
    assert (
        choose_fabric(manifest(), NO_EFA, "local", 1, {"FI_PROVIDER": "tcp;ofi_rxm"}).warnings == ()
    )
    assert (
        choose_fabric(manifest(), UNKNOWN, "ml.fast.xlarge", 1, {"FI_PROVIDER": "efa"}).warnings
        == ()
    )


def test_what_is_left_out_reaches_no_process(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(
        "import os; print('rdma', os.environ.get('FI_EFA_USE_DEVICE_RDMA'))"
    )
    job_environment = environment(
        hosts=("algo-1",),
        instance_type="ml.fabric.xlarge",
        base_directory=str(tmp_path),
        variables={"PATH": "/usr/bin:/bin", "FI_EFA_USE_DEVICE_RDMA": "1"},
        devices=NO_GPU._replace(efa=("efa_0",)),
    )
    job_environment = job_environment._replace(
        code=job_environment.code._replace(directory=str(tmp_path), entries=("train.py",)),
        programs={**job_environment.programs, "python": shutil.which("python3") or ""},
    )
    planned = plan(job_environment)
    assert planned.left_out == ("FI_EFA_USE_DEVICE_RDMA",)
    assert supervisor.run_plan(planned._replace(checks=None), job_environment) == 0
    assert "rdma None" in capfd.readouterr().out


@pytest.mark.parametrize("option", ["-x FI_EFA_USE_DEVICE_RDMA=1", "-x FI_EFA_USE_DEVICE_RDMA"])
def test_what_is_left_out_is_not_on_mpiruns_line(option: str) -> None:
    node_plan = plan(
        environment(
            {
                "sagemaker_mpi_enabled": True,
                "sagemaker_mpi_custom_mpi_options": f"{option} -x KEPT=1",
            },
            hosts=("algo-1", "algo-2"),
            instance_type="ml.fabric.xlarge",
            variables={"PATH": "/usr/bin:/bin", "FI_EFA_USE_DEVICE_RDMA": "1"},
            devices=NO_GPU._replace(efa=("efa_0",), gpus=4),
        )
    )
    assert "FI_EFA_USE_DEVICE_RDMA" not in " ".join(node_plan.argv)
    assert "KEPT=1" in node_plan.argv
    assert any(
        line.startswith("left out") and "FI_EFA_USE_DEVICE_RDMA" in line
        for line in node_plan.warnings
    )


# --- GPUs -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("value", "count", "visible"),
    [
        (None, 2, None),
        ("", 2, ()),
        ("0", 2, ("0",)),
        ("1,0", 2, ("1", "0")),
        ("0,5,1", 2, ("0",)),
        ("-1", 2, ()),
        ("GPU-1f,GPU-2f", 2, ("GPU-1f", "GPU-2f")),
        ("0,1,2", 0, ()),
        ("3", None, ("3",)),
        ("9" * 5000, 2, ()),
    ],
)
def test_gpus_that_are_visible(
    value: str | None, count: int | None, visible: tuple[str, ...] | None
) -> None:
    variables = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    assert platforms.visible_gpus(variables, count) == visible


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"TRAINWORKS_HOSTS": "a,b", "TRAINWORKS_HOST": "a"},
        {"WORLD_SIZE": "1", "RANK": "0"},
        {"OMPI_COMM_WORLD_SIZE": "1"},
        {"SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_GPUS_PER_NODE": "8"},
    ],
)
def test_visible_gpus_are_counted_once_for_every_platform(variables: dict[str, str]) -> None:
    assert platforms.describe(Sources({**variables, "CUDA_VISIBLE_DEVICES": "0"})).gpus == 1
    sagemaker = Sources(
        {"CUDA_VISIBLE_DEVICES": "0"}, {"hosts": ["algo-1"], "current_host": "algo-1"}
    )
    assert platforms.describe(sagemaker).gpus == 1


def test_no_visible_gpu_is_not_the_instance_types_number() -> None:
    host_devices = Devices(gpus=0, visible_gpus=())
    hyperparameters = {"sagemaker_torch_distributed_enabled": True}
    node_plan = plan(
        environment(
            hyperparameters, hosts=("algo-1",), instance_type="ml.fast.xlarge", devices=host_devices
        )
    )
    assert "--nproc-per-node=1" in node_plan.argv


def test_only_gpus_that_the_job_uses_are_judged() -> None:
    two = Gpus(
        devices={0: {"uuid": "GPU-aa"}, 1: {"uuid": "GPU-bb", "driver_version": "[GPU is lost]"}}
    )
    seen = HostState(gpus=two)
    assert [finding.severity for finding in find_problems(Checks(gpus=2), seen)] == [FAILED]
    for visible in (("0",), ("GPU-a",)):
        assert find_problems(Checks(gpus=1, visible_gpus=visible), seen) == ()
    assert find_problems(Checks(gpus=1, visible_gpus=("1",)), seen) != ()


def test_gpus_that_were_left_out_on_purpose_are_not_missed() -> None:
    host_devices = Devices(gpus=1, visible_gpus=("0",))
    job = make_job(
        environment(hosts=("algo-1",), instance_type="ml.fast.xlarge", devices=host_devices)
    )
    checks = checks_of(job.environment, job.placement, job.network)
    assert checks is not None
    assert (checks.gpus, checks.row_gpus, checks.visible_gpus) == (1, 0, ("0",))


# --- NUMA -----------------------------------------------------------------------------------------
class Sockets(NamedTuple):
    """A host's own listing of its GPUs and NUMA nodes, and the part that this process may use."""

    gpu_nodes: Sequence[str | None] = ("0", "0", "1", "1")
    cpu_lists: Sequence[str] = ("0-1,4", "2-3")
    cpus: Sequence[int] = (0, 1, 2, 3, 4)
    gpus: int = 4
    visible: tuple[str, ...] | None = None
    numactl: str = "exit 0"


def nodes_on(root: Path, host: Sockets) -> tuple[int, ...]:
    """Return the launcher's findings on such a host."""
    for number, cpus in enumerate(host.cpu_lists):
        node = root / f"sys/devices/system/node/node{number}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(f"{cpus}\n")
    for number, at in enumerate(host.gpu_nodes):
        address = f"0000:{number:x}e:00.0"
        (root / "driver" / address.upper()).mkdir(parents=True)
        device = root / "sys/bus/pci/devices" / address
        device.mkdir(parents=True)
        if at is not None:
            (device / "numa_node").write_text(f"{at}\n")
    (root / "bin").mkdir()
    if host.numactl:
        (root / "bin/numactl").write_text(f"#!/bin/sh\n{host.numactl}\n")
        (root / "bin/numactl").chmod(0o755)
    variables = {"PATH": f"{root}/bin"}
    return devices.nodes_of_gpus(
        host.gpus,
        host.visible,
        variables,
        devices.KernelFolders(f"{root}/sys", f"{root}/driver"),
        host.cpus,
    )


@pytest.mark.parametrize(
    ("host", "nodes"),
    [
        (Sockets(), (0, 0, 1, 1)),
        (Sockets(gpu_nodes=("1", "0", "1", "0")), (1, 0, 1, 0)),
        (Sockets(cpus=(4, 3)), (0, 0, 1, 1)),
        (Sockets(gpus=2, visible=("3", "0")), (1, 0)),
        # numactl is tried with a CPU that this process may use
        (Sockets(cpus=(3, 4), numactl='[ "$1" = --physcpubind=4 ]'), (0, 0, 1, 1)),
    ],
)
def test_gpus_of_two_nodes(tmp_path: Path, host: Sockets, nodes: tuple[int, ...]) -> None:
    assert nodes_on(tmp_path, host) == nodes


@pytest.mark.parametrize(
    "host",
    [
        Sockets(cpu_lists=("0-4",), gpu_nodes=("0",) * 4),
        Sockets(gpu_nodes=("0", "0", "0", "0")),  # the CPUs of the other node would be unused
        Sockets(gpu_nodes=("-1", "-1", "-1", "-1")),  # torch takes node 0 for all of them
        Sockets(gpu_nodes=("0", "0", "1", "-1")),
        Sockets(gpu_nodes=("0", "0", "1", None)),  # torch ends the job: no such file
        Sockets(gpu_nodes=("0", "0", "1", "2")),  # a node without CPUs, such as a GPU's own memory
        Sockets(cpu_lists=("0-4", "")),
        Sockets(cpus=(0, 1, 4)),  # torch ends the job: no CPU to bind to
        Sockets(gpus=8),  # the driver lists others than the container can open
        Sockets(gpus=2),
        Sockets(gpus=1, visible=("3",)),
        Sockets(gpus=2, visible=("GPU-1f", "GPU-2f")),
        Sockets(gpu_nodes=(), gpus=4),
        Sockets(gpu_nodes=(), gpus=0),
        Sockets(numactl=""),
        Sockets(numactl="echo 'This system does not support NUMA policy' >&2; exit 1"),
    ],
)
def test_ranks_are_not_bound_where_torch_would_fail_or_choose_wrongly(
    tmp_path: Path, host: Sockets
) -> None:
    assert nodes_on(tmp_path, host) == ()


TWO_SOCKETS = Devices(gpus=4, gpu_nodes=(0, 0, 1, 1))
TORCHRUN = {"sagemaker_torch_distributed_enabled": True}


@pytest.mark.parametrize(
    ("torch", "variable", "host_devices", "more", "words"),
    [
        ("2.9.0", None, TWO_SOCKETS, {}, ["--numa-binding=node"]),
        ("2.13.0", "auto", TWO_SOCKETS, {}, ["--numa-binding=node"]),
        ("2.15.0", "off", TWO_SOCKETS, {}, []),
        ("2.15.0", "exclusive", TWO_SOCKETS, {}, ["--numa-binding=exclusive"]),
        ("2.15.0", "socket", Devices(gpus=1), {}, ["--numa-binding=socket"]),
        ("2.8.1", None, TWO_SOCKETS, {}, []),
        ("", None, TWO_SOCKETS, {}, []),
        ("2.15.0", None, Devices(gpus=4), {}, []),
        # rank 1's GPU is not GPU 1
        ("2.15.0", None, TWO_SOCKETS, {"sagemaker_mpi_num_of_processes_per_host": 2}, []),
    ],
)
def test_ranks_of_torchrun_are_bound_to_the_cpus_near_their_gpu(
    torch: str, variable: str | None, host_devices: Devices, more: dict[str, Json], words: list[str]
) -> None:
    variables = {} if variable is None else {"TRAINWORKS_NUMA_BINDING": variable}
    components = {"torch": torch} if torch else {}
    image = manifest()._replace(components=components)
    node_plan = plan(
        environment({**TORCHRUN, **more}, devices=host_devices, variables=variables, manifest=image)
    )
    assert [word for word in node_plan.argv if "numa" in word] == words
    assert [row.value for row in explain(node_plan, variables) if row.name == "--numa-binding"] == [
        word.partition("=")[2] for word in words
    ]


@pytest.mark.parametrize(("torch", "variable"), [("2.8.1", "node"), ("2.15.0", "sockets")])
def test_a_binding_that_cannot_be_is_refused(torch: str, variable: str) -> None:
    image = manifest()._replace(components={"torch": torch})
    variables = {"TRAINWORKS_NUMA_BINDING": variable}
    with pytest.raises(RefusalError, match="TRAINWORKS_NUMA_BINDING"):
        plan(environment(TORCHRUN, devices=TWO_SOCKETS, variables=variables, manifest=image))


# --- CPU limits -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("membership", "files", "quota"),
    [
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("0::/", {"cpu.max": "100000 100000"}, 1),
        ("0::/", {"cpu.max": "150000 100000"}, 2),
        ("0::/", {"cpu.max": "50000 100000"}, 1),
        ("0::/job/step", {"job/cpu.max": "400000 100000", "job/step/cpu.max": "max 100000"}, 4),
        ("0::/job/step", {"job/cpu.max": "400000 100000", "job/step/cpu.max": "200000 100000"}, 2),
        ("0::/not/seen/from/inside", {"cpu.max": "300000 100000"}, 3),
        (
            "3:cpu,cpuacct:/x",
            {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"},
            None,
        ),
        (
            "3:cpu,cpuacct:/x",
            {"cpu/cpu.cfs_quota_us": "250000", "cpu/cpu.cfs_period_us": "100000"},
            3,
        ),
        (
            "3:cpu,cpuacct:/x",
            {"cpu/x/cpu.cfs_quota_us": "100000", "cpu/x/cpu.cfs_period_us": "50000"},
            2,
        ),
        (
            "3:cpuset:/x",
            {"cpu/cpu.cfs_quota_us": "250000", "cpu/cpu.cfs_period_us": "100000"},
            None,
        ),
        ("0::/", {"cpu.max": "what"}, None),
        ("", {}, None),
    ],
)
def test_the_limit_of_cpu_time_is_read_from_the_control_group(
    membership: str, files: dict[str, str], quota: int | None, tmp_path: Path
) -> None:
    (tmp_path / "membership").write_text(membership + "\n", encoding="ascii")
    for name, text in files.items():
        (tmp_path / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cgroup" / name).write_text(text + "\n", encoding="ascii")
    assert cgroups.cpu_quota(str(tmp_path / "membership"), str(tmp_path / "cgroup")) == quota


LIMITED = Devices(gpus=0, cpus=3, interfaces=("eth0", "lo"), cpus_limited=True)


@pytest.mark.parametrize(
    ("invocation", "seen", "program", "more", "threads"),
    [
        (Invocation(("train.py",)), Devices(gpus=0, cpus=8), "train.py", {}, None),
        (Invocation(("train.py",)), LIMITED, "train.py", {}, "3"),
        (Invocation(("run.sh",)), LIMITED, "run.sh", {}, None),
        (
            Invocation(("train.py",), "torch_distributed", 2),
            Devices(gpus=0, cpus=8),
            "train.py",
            {},
            "4",
        ),
        (Invocation(("train.py",), "torch_distributed", 2), LIMITED, "train.py", {}, "1"),
        (Invocation(("train.py",), "mpi", 8), Devices(gpus=0, cpus=4), "train.py", {}, "1"),
        (Invocation(("train.py",), "mpi", 2), LIMITED, "train.py", {"OMP_NUM_THREADS": "7"}, None),
    ],
)
def test_each_rank_gets_its_part_of_the_cpus(
    invocation: Invocation, seen: Devices, program: str, more: dict[str, str], threads: str | None
) -> None:
    code = Code("/opt/ml/code", entries=(program,), executable=(program,))
    variables = {"PATH": "/usr/bin:/bin", **more}
    node_plan = plan(
        environment(
            dict(invocation.hyperparameters),
            invocation=invocation,
            devices=seen,
            code=code,
            variables=variables,
        )
    )
    assert node_plan.env.get("OMP_NUM_THREADS") == threads
    assert node_plan.env["SM_NUM_CPUS"] == str(seen.cpus)
