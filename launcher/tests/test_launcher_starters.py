"""Test that there is one starter: a program that starts ranks is refused where the mode starts
them, and a warning names idle GPUs and a lone process.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from launcher_support import NO_GPU, Launcher, environment, plan, write_inputs, write_manifest

from trainworks_launcher.contract.errors import RefusalError
from trainworks_launcher.contract.json_values import Json
from trainworks_launcher.environment.command_line import Invocation
from trainworks_launcher.environment.entry_point import Code
from trainworks_launcher.environment.resource_config import read_hosts
from trainworks_launcher.job.starters import starter_of
from trainworks_launcher.plan.plan import NodePlan


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (("torchrun", "--nproc-per-node", "2", "train.py"), "torchrun"),
        (("/opt/venv/bin/torchrun", "train.py"), "torchrun"),
        (("python", "-m", "torch.distributed.run", "train.py"), "python -m torch.distributed.run"),
        (
            ("python3.11", "-u", "-m", "torch.distributed.launch", "train.py"),
            "python -m torch.distributed.launch",
        ),
        (("/usr/bin/python3", "/opt/venv/bin/torchrun", "train.py"), "torchrun"),
        (("accelerate", "launch", "train.py"), "accelerate launch"),
        (
            ("python", "-m", "accelerate.commands.launch", "train.py"),
            "python -m accelerate.commands.launch",
        ),
        (("python", "-m", "accelerate", "launch", "train.py"), "accelerate launch"),
        (("deepspeed", "--num_gpus", "2", "train.py"), "deepspeed"),
        (("mpirun", "-np", "2", "python", "train.py"), "mpirun"),
        (("mpiexec", "-n", "2", "python", "train.py"), "mpiexec"),
        (("hyperpodrun", "train.py"), "hyperpodrun"),
        (("horovodrun", "-np", "2", "python", "train.py"), "horovodrun"),
        (("srun", "python", "train.py"), "srun"),
        (("env", "A=1", "-u", "B", "torchrun", "train.py"), "torchrun"),
        (("A=1", "torchrun", "train.py"), "torchrun"),
        (("nohup", "env", "A=1", "nice", "-n", "5", "torchrun", "train.py"), "torchrun"),
        (("timeout", "-k", "5", "1h", "torchrun", "train.py"), "torchrun"),
        (("timeout", "--", "1h", "torchrun", "train.py"), "torchrun"),
        (("timeout", "--signal", "TERM", "1h", "torchrun", "train.py"), "torchrun"),
        (("timeout", "--signal=TERM", "1h", "torchrun", "train.py"), "torchrun"),
        (("nice", "--adjustment", "5", "torchrun", "train.py"), "torchrun"),
        (("env", "--chdir", "/x", "torchrun", "train.py"), "torchrun"),
        (("env", "-S", "A=1 torchrun train.py"), "torchrun"),
        (("numactl", "--interleave=all", "torchrun", "train.py"), "torchrun"),
        (("bash", "-c", "torchrun --nproc-per-node 2 train.py"), "torchrun"),
        (("bash", "-lc", "cd /work && A=1 exec torchrun train.py"), "torchrun"),
        (
            ("sh", "-euc", "set -x; pip list; accelerate launch train.py | tee log"),
            "accelerate launch",
        ),
        (("train.py",), ""),
        (("python", "train.py", "torchrun"), ""),
        (("python", "-c", "import torch.distributed.run"), ""),
        (("python", "-m", "package.train"), ""),
        (("accelerate", "config"), ""),
        (("echo", "torchrun"), ""),
        (("bash", "run.sh", "torchrun"), ""),
        (("bash", "-c", "echo torchrun"), ""),
        (("bash", "-c", "unclosed ' torchrun"), ""),
        (("./torchrun_like.sh",), ""),
        (("env",), ""),
        ((), ""),
    ],
)
def test_a_starter_is_found_in_a_command_line(line: tuple[str, ...], name: str) -> None:
    starter = starter_of(line)
    assert (starter.name if starter else "") == name


def planned(
    words: tuple[str, ...],
    mode: str = "torch_distributed",
    variables: dict[str, str] | None = None,
    **changes: object,
) -> NodePlan:
    invocation = Invocation(words, mode)
    code_files = (
        "torchrun",
        "mpirun",
        "deepspeed",
        "env",
        "bash",
        "accelerate",
        "hello.py",
        "hyperpodrun",
        "train.py",
    )
    code = Code(
        "/work",
        entries=code_files,
        executable=tuple(name for name in code_files if not name.endswith(".py")),
    )
    job_environment = environment(
        dict(invocation.hyperparameters), variables=variables, instance_type="local"
    )
    return plan(job_environment._replace(invocation=invocation, code=code, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["torch_distributed", "mpi", "smdistributed.dataparallel"])
@pytest.mark.parametrize(
    "words",
    [
        ("torchrun", "--nproc-per-node", "2", "hello.py", "--lr", "1"),
        ("env", "A=1", "torchrun", "--nproc_per_node=2", "hello.py", "--lr", "1"),
        ("-m", "torch.distributed.run", "--nproc-per-node", "2", "hello.py", "--lr", "1"),
        ("bash", "-c", "torchrun --nproc-per-node 2 hello.py --lr 1"),
    ],
)
def test_a_starter_behind_a_starter_is_refused_with_the_two_lines(
    mode: str, words: tuple[str, ...]
) -> None:
    with pytest.raises(RefusalError) as refused:
        planned(words, mode)
    assert refused.value.status == 64
    text = str(refused.value)
    assert f"mode {mode} starts the ranks" in text
    assert f"train --mode {mode} --processes-per-host 2 -- hello.py --lr 1" in text
    assert "train --mode none -- " in text
    assert planned(words, "none").argv, "there it is the one starter"


def test_a_starter_is_refused_without_a_mode_where_the_platform_asks_for_one() -> None:
    from trainworks_launcher.environment import platforms

    variables = {
        "PET_NNODES": "1",
        "PET_NPROC_PER_NODE": "2",
        "PET_NODE_RANK": "0",
        "PET_MASTER_ADDR": "p-master-0",
        "PET_MASTER_PORT": "23456",
    }
    description = platforms.describe(platforms.Sources(variables, hostname="p-master-0"))
    changes = {
        "platform": description,
        "hosts": description.hosts,
        "hostname": "p-master-0",
    }
    with pytest.raises(
        RefusalError, match="mode torch_distributed starts the ranks, and the program torchrun"
    ):
        planned(("torchrun", "hello.py"), "", variables, **changes)
    assert planned(("hello.py",), "", variables, **changes).mode == "torch_distributed"
    assert planned(("torchrun", "hello.py"), "none", variables, **changes).mode == "none"


def test_a_line_of_shell_of_a_job_without_a_command_line_is_read_too() -> None:
    from trainworks_launcher.environment.sdk_drivers import Drivers

    hyperparameters: dict[str, Json] = {"sagemaker_torch_distributed_enabled": True}
    job_environment = environment(hyperparameters, instance_type="local")
    with pytest.raises(RefusalError, match="make the script itself the entry point"):
        plan(
            job_environment._replace(
                drivers=Drivers(command="torchrun --nproc-per-node 2 train.py")
            )
        )


# --- idle and alone -------------------------------------------------------------------------------
EIGHT = NO_GPU._replace(gpus=8)


def warnings_of(node_plan: NodePlan) -> list[str]:
    words = ("stay idle", "runs the whole program", "where the other hosts are", "sees no GPU")
    return [word for word in words for line in node_plan.warnings if word in line]


def test_several_gpus_and_one_process_are_said() -> None:
    assert warnings_of(planned(("train.py",), "none", devices=EIGHT)) == ["stay idle"]
    assert warnings_of(planned(("train.py",), "none", devices=NO_GPU._replace(gpus=1))) == []
    assert warnings_of(planned(("train.py",), devices=EIGHT)) == []
    assert warnings_of(planned(("torchrun", "train.py"), "none", devices=EIGHT)) == [], (
        "it starts one on each"
    )


def test_hosts_that_each_run_the_whole_program_are_said_by_the_first() -> None:
    config: dict[str, Json] = {"hosts": ["a", "b"], "current_host": "a"}
    assert warnings_of(planned(("train.py",), "none", hosts=read_hosts(config))) == [
        "runs the whole program"
    ]
    config = {"hosts": ["a", "b"], "current_host": "b"}
    assert warnings_of(planned(("train.py",), "none", hosts=read_hosts(config))) == []
    assert warnings_of(planned(("train.py",), hosts=read_hosts(config))) == []


def planned_on(host: str, words: tuple[str, ...], variables: dict[str, str]) -> NodePlan:
    """Plan a program in mode none on one of the two hosts a and b."""
    config: dict[str, Json] = {"hosts": ["a", "b"], "current_host": host}
    everything = {"PATH": "/usr/bin", **variables}
    return planned(words, "none", everything, hosts=read_hosts(config))


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (
            ("torchrun", "--nproc_per_node", "2", "train.py", "--lr", "1"),
            "train --mode torch_distributed --processes-per-host 2 -- train.py --lr 1",
        ),
        # It would wait on each host for a second one.
        (("torchrun", "--nnodes", "2", "train.py"), "train --mode torch_distributed -- train.py"),
        (
            ("torchrun", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "train.py"),
            "train --mode torch_distributed -- train.py",
        ),
        # The option is the script's own.
        (
            ("torchrun", "train.py", "--master-addr", "a"),
            "train --mode torch_distributed -- train.py --master-addr a",
        ),
        (
            ("-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "package.train"),
            "train --mode torch_distributed --processes-per-host 2 -- -m package.train",
        ),
        (("accelerate", "launch", "train.py"), "train --mode torch_distributed -- train.py"),
        (
            ("deepspeed", "--num_gpus=8", "train.py"),
            "train --mode torch_distributed --processes-per-host 8 -- train.py",
        ),
        (("mpirun", "-np", "2", "python", "train.py"), "train --mode mpi -- train.py"),
        (
            ("bash", "-c", "torchrun --standalone train.py"),
            "train --mode torch_distributed -- train.py",
        ),
    ],
)
def test_a_starter_that_knows_no_other_host_is_said_by_the_first(
    words: tuple[str, ...], instead: str
) -> None:
    first = planned_on("a", words, {})
    assert warnings_of(first) == ["where the other hosts are"]
    assert any(line.endswith(f"one job of all hosts is {instead}") for line in first.warnings)
    assert warnings_of(planned_on("b", words, {})) == []
    assert warnings_of(planned(words, "none")) == [], "it is the one host of its job"


@pytest.mark.parametrize(
    ("words", "variables"),
    [
        (("torchrun", "--nnodes=2", "--rdzv-endpoint=a:29400", "train.py"), {}),
        (("torchrun", "--nnodes", "2", "--master_addr", "a", "train.py"), {}),
        (("torchrun", "train.py"), {"PET_NNODES": "2", "PET_MASTER_ADDR": "a"}),
        (("accelerate", "launch", "--main_process_ip", "a", "train.py"), {}),
        (("accelerate", "launch", "--config_file", "two.yaml", "train.py"), {}),
        (("deepspeed", "--hostfile", "hosts", "train.py"), {}),
        (("mpirun", "-H", "a,b", "python", "train.py"), {}),
        (("mpirun", "--hostfile", "hosts", "python", "train.py"), {}),
    ],
)
def test_a_starter_with_the_other_hosts_is_no_warning(
    words: tuple[str, ...], variables: dict[str, str]
) -> None:
    assert warnings_of(planned_on("a", words, variables)) == []


def test_a_starter_of_a_job_without_a_command_line_is_said_by_its_entry_point() -> None:
    from trainworks_launcher.environment.sdk_drivers import Drivers

    drivers = Drivers(command="torchrun train.py --lr 1")
    job_environment = environment(
        hosts=("algo-1", "algo-2"), instance_type="local", drivers=drivers
    )
    (warning,) = [line for line in plan(job_environment).warnings if "other hosts are" in line]
    assert warning.endswith(
        "mode torch_distributed with the script itself as the entry point (train.py --lr 1)"
    )


def test_each_host_alone_is_no_advice_for_several_hosts() -> None:
    config: dict[str, Json] = {"hosts": ["a", "b"], "current_host": "a"}
    with pytest.raises(RefusalError) as refused:
        planned(("torchrun", "train.py"), hosts=read_hosts(config))
    assert "write: train --mode torch_distributed -- train.py" in str(refused.value)
    assert "--mode none" not in str(refused.value)


@pytest.mark.parametrize(
    ("devices", "variables", "warned"),
    [
        (NO_GPU, {}, True),
        (NO_GPU._replace(gpus=1), {}, False),
        (NO_GPU._replace(visible_gpus=()), {"CUDA_VISIBLE_DEVICES": ""}, False),
        (NO_GPU, {"SMP_CPU_EMULATION": "1"}, False),
    ],
)
def test_an_image_for_cuda_that_sees_no_gpu_says_what_to_do(
    devices: object, variables: dict[str, str], warned: bool
) -> None:
    job_environment = environment()
    with_cuda = job_environment.manifest._replace(
        components={**job_environment.manifest.components, "cuda": "12.1"}
    )
    for mode in ("none", "torch_distributed"):
        node_plan = planned(
            ("train.py",),
            mode,
            {"PATH": "/usr/bin", **variables},
            devices=devices,
            manifest=with_cuda,
        )
        assert ("sees no GPU" in warnings_of(node_plan)) is warned
        assert any("--gpus all" in line for line in node_plan.warnings) is warned
    assert warnings_of(planned(("train.py",), devices=NO_GPU)) == [], "an image for CPUs"


def test_an_image_without_neuron_is_refused_on_its_cores() -> None:
    hyperparameters: dict[str, Json] = {"sagemaker_torch_distributed_enabled": True}
    job_environment = environment(
        hyperparameters, instance_type="ml.neuron.xlarge", hosts=("algo-1",)
    )
    assert "--nproc-per-node=32" in plan(job_environment).argv
    without = {
        name: version
        for name, version in job_environment.manifest.components.items()
        if "neuron" not in name
    }
    with pytest.raises(RefusalError, match="has Neuron cores, and the image has no Neuron"):
        plan(
            job_environment._replace(manifest=job_environment.manifest._replace(components=without))
        )


# --- a starter inside a script --------------------------------------------------------------------
STARTER = """
import os, subprocess, sys

# As torchrun: ranks with numbers of their own below it.
option = "--nproc-per-node"
for i, word in enumerate(sys.argv):
    if word == option:
        count = int(sys.argv[i + 1])
    elif word.startswith(option + "="):
        count = int(word.partition("=")[2])
    elif word in ("--no-python", "--") or word.endswith("rank.py"):
        place = i
        break
words = [word for word in sys.argv[place:] if word not in ("--no-python",)]
size = {**os.environ, "WORLD_SIZE": str(count)}
words = words if os.access(words[0], os.X_OK) else [sys.executable, *words]
ranks = [
    subprocess.Popen(words, env={**size, "RANK": str(rank), "LOCAL_RANK": str(rank)})
    for rank in range(count)
]
sys.exit(max(rank.wait() for rank in ranks))
"""


@pytest.mark.parametrize(("inner", "warned"), [(0, False), (2, True), (3, True)])
def test_a_rank_of_a_starter_inside_a_script_says_that_it_is_not_the_planned_one(
    tmp_path: Path, inner: int, warned: bool
) -> None:
    """A stand-in for torchrun starts the planned ranks, and once more in the
    script: worlds of two below two ranks.
    """
    torchrun = tmp_path / "torchrun"
    torchrun.write_text(f"#!{sys.executable}\n{STARTER}", encoding="utf-8")
    torchrun.chmod(0o755)
    image = write_manifest(
        tmp_path / "image.json", {"python": sys.executable, "torchrun": str(torchrun)}
    )
    starts = f'"{torchrun}" --nproc-per-node {inner} --no-python' if inner else ""
    write_inputs(
        tmp_path,
        "",
        {"sagemaker_program": "run.sh", "sagemaker_torch_distributed_enabled": "true"},
        {},
    )
    (tmp_path / "code/ranks.py").write_text(
        "import os\nprint('world', os.environ['WORLD_SIZE'])\n", encoding="utf-8"
    )
    (tmp_path / "code/run.sh").write_text(
        f"exec {starts} {sys.executable} ranks.py\n", encoding="utf-8"
    )
    hyperparameters = {
        "sagemaker_program": "run.sh",
        "sagemaker_mpi_num_of_processes_per_host": "2",
    }
    write_inputs(
        tmp_path, "", {**hyperparameters, "sagemaker_torch_distributed_enabled": "true"}, {}
    )
    with Launcher(tmp_path, variables={"TRAINWORKS_IMAGE_MANIFEST": str(image)}) as launcher:
        assert launcher.wait() == 0, launcher.text
    assert launcher.text.count("has a starter of its own") == int(warned), launcher.text
