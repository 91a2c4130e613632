"""Test the modes: the refusals of each, and the parts of its plan that matter.

Whole plans are in test_launcher_plan.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import permutations
from types import MappingProxyType

import pytest
from launcher_support import PROGRAMS, REPOSITORY, environment, manifest, manifest_document, plan

from trainworks_launcher.contract.errors import RefusalError
from trainworks_launcher.contract.json_values import Json
from trainworks_launcher.contract.modes import MODES, SWITCHES
from trainworks_launcher.environment.command_line import Invocation
from trainworks_launcher.environment.entry_point import Code
from trainworks_launcher.environment.environment import Devices, Environment
from trainworks_launcher.environment.manifest import parse_manifest
from trainworks_launcher.environment.resource_config import read_hosts
from trainworks_launcher.job import model_parallel
from trainworks_launcher.job.job import describe, make_job
from trainworks_launcher.plan.modes import plan_host
from trainworks_launcher.plan.plan import NodePlan

TWO = ("algo-1", "algo-2")
GPUS = "ml.fast.xlarge"
PER_HOST = "sagemaker_mpi_num_of_processes_per_host"
MPI: Mapping[str, Json] = {"sagemaker_mpi_enabled": True}
TORCH: Mapping[str, Json] = {"sagemaker_torch_distributed_enabled": True}
SMP: Mapping[str, Json] = {**MPI, PER_HOST: 8, "mp_parameters": {"partitions": 2, "ddp": True}}
SMDDP: Mapping[str, Json] = {"sagemaker_distributed_dataparallel_enabled": True}
DDP: Mapping[str, Json] = {"sagemaker_pytorch_ddp_enabled": True}
XLA: Mapping[str, Json] = {"sagemaker_pytorch_xla_multi_worker_enabled": True}
MIRRORED: Mapping[str, Json] = {"sagemaker_multi_worker_mirrored_strategy_enabled": True}
PARAMETERS: Mapping[str, Json] = {"sagemaker_parameter_server_enabled": True}
SMDDP_PROGRAMS = {
    **PROGRAMS,
    "smddprun": "/opt/venv/bin/smddprun",
    "smddpmprun": "/opt/venv/bin/smddpmprun",
}


def gpus(hyperparameters: Mapping[str, Json], *hosts: str, **changes: object) -> Environment:
    """Hosts with EFA devices, and with eight GPUs by the instance table only."""
    devices = Devices(efa=("rdmap0",), interfaces=("eth0",))
    job_environment = environment(
        hyperparameters, hosts=hosts or TWO, instance_type=GPUS, devices=devices
    )
    return job_environment._replace(**changes)  # type: ignore[arg-type]


def with_components(job_environment: Environment, **versions: str) -> Environment:
    components = {**job_environment.manifest.components, **versions}
    return job_environment._replace(
        manifest=job_environment.manifest._replace(components=MappingProxyType(components))
    )


def refusal(job_environment: Environment) -> str:
    with pytest.raises(RefusalError) as refused:
        plan(job_environment)
    assert refused.value.status == 64
    return str(refused.value)


def program_of(node_plan: NodePlan) -> tuple[str, ...]:
    """Return the command that mpirun starts as each rank, behind our wrapper."""
    return node_plan.argv[node_plan.argv.index("--") + 1 :]


# --- choosing the mode ----------------------------------------------------------------------------
@pytest.mark.parametrize("switch", sorted(SWITCHES))
def test_a_switch_chooses_its_mode(switch: str) -> None:
    assert make_job(environment({switch: "true"})).placement.mode == SWITCHES[switch]


def test_parameters_of_smp_and_mpi_are_one_mode_and_with_torchrun_another() -> None:
    assert make_job(gpus(SMP)).placement.mode == "smdistributed.modelparallel"
    with_torchrun = plan(gpus({**TORCH, "mp_parameters": {"hybrid_shard_degree": 8}}))
    assert with_torchrun.mode == "torch_distributed"
    assert with_torchrun.argv[-3:] == ("train.py", "--mp_parameters", "hybrid_shard_degree=8")
    plain = plan(gpus(TORCH))
    assert with_torchrun.argv[: len(plain.argv)] == plain.argv


def test_parameters_of_smp_may_come_as_a_variable() -> None:
    job_environment = gpus(
        {**MPI, PER_HOST: 8},
        variables=MappingProxyType({"SM_HP_MP_PARAMETERS": '{"partitions": 2, "ddp": true}'}),
    )
    assert make_job(job_environment).placement.mode == "smdistributed.modelparallel"


def test_what_the_refusal_of_smps_mode_says_is_smps_mode() -> None:
    """``--mode mpi --processes-per-host N`` and the variable that the refusal names."""
    name, value = re.findall(r"(\w+)='({.*})'", MODES["smdistributed.modelparallel"].selected_by)[0]
    invocation = Invocation(mode="mpi", processes_per_host=2)
    job_environment = environment(
        dict(invocation.hyperparameters), variables={"PATH": "/usr/bin", name: value}
    )
    assert plan(job_environment._replace(invocation=invocation)).mode == (
        "smdistributed.modelparallel"
    )


@pytest.mark.parametrize(
    ("hyperparameters", "expected"),
    [
        ({**MPI, **TORCH}, "mpi and torch_distributed are both switched on"),
        ({**MPI, **SMDDP}, "mpi and smdistributed.dataparallel are both switched on"),
        ({**SMP, **SMDDP}, "smp is not supported together with smddp"),
        ({**SMP, **DDP}, "smp is not supported together with smddp"),
        ({**TORCH, **XLA}, "torch_distributed and pytorchxla are both switched on"),
        ({**MIRRORED, **MPI}, "mpi and multi_worker_mirrored_strategy are both switched on"),
        (
            {"mp_parameters": {"partitions": 2}},
            "no setting says how to start the model parallel processes",
        ),
        (
            {"sagemaker_parameter_serve_enabled": True},
            "switches on a mode that this launcher does not know",
        ),
    ],
)
def test_contradictory_switches_are_refused(
    hyperparameters: Mapping[str, Json], expected: str
) -> None:
    assert expected in refusal(gpus(hyperparameters))


# --- facts of the image ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("hyperparameters", "version", "refused"),
    [
        (TORCH, "1.12.1", "torch_distributed needs torch 1.13 or later"),
        (TORCH, "1.13.0", ""),
        (TORCH, "2.4.1+cpu", ""),
        (TORCH, "1.9", "torch_distributed needs torch 1.13 or later"),
        (DDP, "1.11.0", "pytorchddp needs torch 1.12 or later"),
        (DDP, "1.12.0", ""),
        (DDP, "nightly", ""),
        (SMDDP, "1.11.0", ""),
    ],
)
def test_a_framework_that_is_too_old_is_refused(
    hyperparameters: Mapping[str, Json], version: str, refused: str
) -> None:
    job_environment = with_components(gpus(hyperparameters), torch=version)
    if refused:
        assert refused in refusal(job_environment)
    else:
        assert plan(job_environment).argv


@pytest.mark.parametrize(
    ("version", "mark"), [("1.13.1", "_"), ("2.0.1+cu118", "_"), ("2.1.0", "-"), ("2.15.0", "-")]
)
@pytest.mark.parametrize("restarts", [0, 2])
def test_torchrun_gets_the_options_that_its_version_reads(
    version: str, mark: str, restarts: int
) -> None:
    """Write underscores for older versions, in each option, and not in the words behind it."""
    hyperparameters = {**TORCH, "sagemaker_torch_distributed_max_restarts": restarts}
    argv = plan(with_components(gpus(hyperparameters), torch=version)).argv
    options = [word.partition("=") for word in argv[1 : argv.index(f"--no{mark}python") + 1]]
    assert f"--nproc{mark}per{mark}node" in [name for name, *_ in options]
    other = "-" if mark == "_" else "_"
    assert not [name for name, *_ in options if other in name.removeprefix("--")]
    if restarts:
        assert ("--rdzv" + mark + "endpoint", "=", "algo-1:7777") in options


@pytest.mark.parametrize(
    ("hyperparameters", "program"),
    [
        (MPI, "mpirun"),
        (SMP, "mpirun"),
        (SMDDP, "mpirun"),
        (DDP, "mpirun"),
        (TORCH, "torchrun"),
        (XLA, "python"),
    ],
)
def test_a_mode_whose_program_is_missing_is_refused_by_name(
    hyperparameters: Mapping[str, Json], program: str
) -> None:
    programs = MappingProxyType({name: path for name, path in PROGRAMS.items() if name != program})
    text = refusal(with_components(gpus(hyperparameters, programs=programs), torch_xla="1"))
    assert (
        f"{program} is not installed" in text or f"{program.capitalize()} is not installed" in text
    )


def test_missing_programs_are_told_with_all_other_problems() -> None:
    job_environment = gpus(
        {**MPI, PER_HOST: 9, "sagemaker_program": "tran.py"}, programs=MappingProxyType({})
    )
    text = refusal(job_environment)
    expected = (
        "mpirun is not installed, and the job asks for mpi",
        "give at most 8",
        "did you mean 'train.py'?",
    )
    assert [words for words in expected if words not in text] == []


@pytest.mark.parametrize("hyperparameters", [XLA, MIRRORED])
def test_a_mode_whose_package_is_missing_is_refused_unless_it_may_be_installed(
    hyperparameters: Mapping[str, Json],
) -> None:
    package = "torch_xla" if hyperparameters is XLA else "tensorflow"
    assert f"needs {package}" in refusal(gpus(hyperparameters))
    code = Code("/opt/ml/code", entries=("requirements.txt", "train.py"))
    assert plan(gpus(hyperparameters, code=code)).argv
    assert plan(with_components(gpus(hyperparameters), **{package: ""})).argv


@pytest.mark.parametrize(
    ("hyperparameters", "library"), [(SMP, "smp"), (SMDDP, "smddp"), (DDP, "smddp")]
)
def test_a_library_that_the_image_lacks_is_a_warning_with_its_cost(
    hyperparameters: Mapping[str, Json], library: str
) -> None:
    job_environment = gpus(hyperparameters)
    assert any(f"the image has no {library}" in line for line in plan(job_environment).warnings)
    missing = (*job_environment.manifest.missing, *manifest().missing[:0])
    row = type(job_environment.manifest.missing[0])(library, "training is slow")
    changed = job_environment._replace(
        manifest=job_environment.manifest._replace(missing=(*missing, row))
    )
    assert any(
        line.endswith(f"the image has no {library}: training is slow")
        for line in plan(changed).warnings
    )
    node_plan = plan(with_components(job_environment, **{library: "1"}))
    assert not any("has no" in line and library in line for line in node_plan.warnings)


# --- counts ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("processes", "devices", "kind", "expected"),
    [
        (None, Devices(), GPUS, 8),
        (None, Devices(gpus=2), GPUS, 2),
        (None, Devices(), "ml.neuron.xlarge", 32),
        (None, Devices(neuron_devices=16), "ml.neuron.xlarge", 32),
        (None, Devices(), "local", 1),
        (4, Devices(), GPUS, 4),
    ],
)
def test_processes_follow_the_devices_else_the_instance_table(
    processes: int | None, devices: Devices, kind: str, expected: int
) -> None:
    job_environment = environment(
        {**TORCH, PER_HOST: processes}, hosts=TWO, instance_type=kind, devices=devices
    )
    assert make_job(job_environment).placement.slots == (expected, expected)


@pytest.mark.parametrize(
    ("processes", "devices", "kind", "refused"),
    [
        (9, Devices(), GPUS, "give at most 8: one process per GPU"),
        (3, Devices(gpus=2), GPUS, "give at most 2: one process per GPU"),
        (33, Devices(), "ml.neuron.xlarge", "give at most 32: one process per Neuron core"),
    ],
)
@pytest.mark.parametrize("mode", [TORCH, MPI])
def test_more_processes_than_devices_are_refused(
    mode: Mapping[str, Json], processes: int, devices: Devices, kind: str, refused: str
) -> None:
    job_environment = environment(
        {**mode, PER_HOST: processes}, hosts=TWO, instance_type=kind, devices=devices
    )
    assert refused in refusal(job_environment)


def test_model_parallelism_needs_the_processes_per_host() -> None:
    text = refusal(gpus({key: value for key, value in SMP.items() if key != PER_HOST}))
    assert "smdistributed.modelparallel needs the processes per host" in text
    assert PER_HOST in text


@pytest.mark.parametrize("hyperparameters", [MPI, SMP, SMDDP, DDP, XLA, MIRRORED, PARAMETERS])
def test_trainium_takes_torchrun_only(hyperparameters: Mapping[str, Json]) -> None:
    text = refusal(environment(hyperparameters, hosts=TWO, instance_type="ml.neuron.xlarge"))
    assert "does not run on Trainium" in text
    assert "use torch_distributed" in text


def test_devices_that_are_not_seen_are_said() -> None:
    assert any(
        "8 GPU(s) by the image's instance table" in line for line in plan(gpus(TORCH)).warnings
    )


# --- model parallelism ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("parameters", "refused"),
    [
        ({"partitions": 2}, ""),
        (
            {
                "pipeline_parallel_degree": 4,
                "microbatches": 8,
                "ddp": True,
                "pipeline": "interleaved",
            },
            "",
        ),
        ({"sharded_data_parallel_degree": 16, "ddp": True, "ddp_dist_backend": "auto"}, ""),
        ({"ddp": True}, "neither pipeline_parallel_degree nor partitions"),
        ({"microbatches": 4}, "neither pipeline_parallel_degree nor partitions"),
        (
            {"tensor_parallel_degree": 2, "ddp": True},
            "give pipeline_parallel_degree, or its older name partitions",
        ),
        ({"pipeline_parallel_degree": 1, "tensor_parallel_degree": 2, "ddp": True}, ""),
        ({"partitions": 0}, "partitions is 0"),
        ({"partitions": "2"}, "partitions is '2'"),
        ({"partitions": True}, "partitions is True"),
        (
            {"partitions": 2, "pipeline_parallel_degree": 4},
            "partitions is 2 and pipeline_parallel_degree is 4",
        ),
        ({"partitions": 2, "pipeline": "interleavd"}, "did you mean 'interleaved'?"),
        ({"partitions": 2, "placement_strategy": 3}, "use one of: cluster, spread, DPT, DTP"),
        ({"partitions": 2, "optimize": "sped"}, "did you mean 'speed'?"),
        ({"partitions": 2, "ddp": "yes"}, "give true or false"),
        ({"partitions": 2, "horovod": True, "checkpoint_attentions": False, "surprise": 1}, ""),
        ({"partitions": 2, "fp16": True, "bf16": True}, "fp16 is True beside bf16 True"),
        (
            {"sharded_data_parallel_degree": 2, "tensor_parallel_degree": 2},
            "tensor_parallel_degree is 2 beside sharded_data_parallel_degree 2",
        ),
        (
            {"sharded_data_parallel_degree": 2, "shard_optimizer_state": True},
            "shard_optimizer_state is True beside sharded_data_parallel_degree 2",
        ),
        (
            {
                "partitions": 1,
                "sdp_reduce_bucket_size": 0,
                "sdp_gradient_clipping": 1.0,
                "activation_loading_horizon": 1,
            },
            "",
        ),
        ({"partitions": 1, "sdp_gradient_clipping": -1}, "give a number of at least 0"),
        ({"partitions": 1, "sdp_reduce_bucket_size": 5e8}, "give a whole number of at least 0"),
        ({"partitions": 1, "ddp_port": None, "active_microbatches": None}, ""),
        ({"pipeline_parallel_degree": None}, "pipeline_parallel_degree is None"),
        ({"partitions": 1, "activation_loading_horizon": 0}, "give a whole number of at least 1"),
        ({"partitions": 1, "prescaled_batch": 1}, "give true or false"),
        ({"partitions": 2, "placement_strategy": "TDP"}, ""),
        ({"partitions": 2, "placement_strategy": "TPP"}, "did you mean 'TPD'?"),
        ({"partitions": 2, "ddp": True, "ddp_dist_backend": "mpi"}, "ddp_dist_backend is 'mpi'"),
        ({"partitions": 2, "ddp_port": 99}, "ddp_port is given without ddp"),
        ({"partitions": 2, "ddp": True, "ddp_port": 99999}, "give a whole number from 1 to 65535"),
        ({"partitions": 2, "ddp": True, "ddp_port": "none"}, "give a whole number from 1 to 65535"),
        ({"partitions": 2, "default_partition": 2}, "give 0 to 1"),
        ({"partitions": 2, "default_partition": 1, "auto_partition": False}, ""),
        ({"partitions": 2, "auto_partition": False}, "without a default_partition"),
        ({"partitions": 2, "memory_weight": 1.5}, "give a number from 0 to 1"),
        ({"partitions": 2, "memory_weight": 1}, ""),
        ({"partitions": 2, "partition_file": 1}, "give a text"),
        ("degree=2", "is not an object of parameters"),
        ([1], "is not an object of parameters"),
    ],
)
def test_parameters_of_smp_are_checked(parameters: Json, refused: str) -> None:
    problems = model_parallel.check(parameters, "hyperparameter mp_parameters")
    assert [str(problem) for problem in problems if refused not in str(problem)] == []
    assert bool(problems) == bool(refused)


def test_the_launcher_and_the_library_read_the_same_file() -> None:
    library = (
        REPOSITORY
        / "smdistributed"
        / "smdistributed"
        / "modelparallel"
        / "torch"
        / "job"
        / "parameters.json"
    )
    copy = REPOSITORY / "launcher" / "trainworks_launcher" / "job" / "smp_parameters.json"
    assert copy.read_bytes() == library.read_bytes(), "run `make docs`"


@pytest.mark.parametrize(
    "letters", ["cluster", "spread", *("".join(permutation) for permutation in permutations("DPT"))]
)
def test_every_placement_strategy_is_taken(letters: str) -> None:
    assert model_parallel.check({"partitions": 2, "placement_strategy": letters}, "") == []


@pytest.mark.parametrize(
    ("parameters", "processes", "refused"),
    [
        ({"partitions": 2}, 2, ""),
        ({"partitions": 2, "ddp": True}, 8, ""),
        # The script may give ddp to smp.init, as AWS's own acceptance script does.
        ({"partitions": 2}, 8, ""),
        (
            {"partitions": 2, "ddp": False},
            8,
            "8 processes train 4 copies of the model, and ddp is false (here)",
        ),
        ({"partitions": 2}, 1, "1 process(es) for models of 2"),
        ({"partitions": 2, "tensor_parallel_degree": 2, "ddp": True}, 8, ""),
        (
            {"partitions": 2, "tensor_parallel_degree": 2, "ddp": True},
            6,
            "start a multiple of 4 processes",
        ),
        ({"tensor_parallel_degree": 2}, 2, ""),
        (
            {"tensor_parallel_degree": 2, "ddp": False},
            2,
            "tensor_parallel_degree is 2, and ddp is false",
        ),
        ({"sharded_data_parallel_degree": 4, "ddp": True}, 8, ""),
        ({"sharded_data_parallel_degree": 3, "ddp": True}, 8, "give a divisor of 8"),
        ({"partitions": "2"}, 8, ""),
        (None, 8, ""),
    ],
)
def test_the_degrees_of_smp_divide_the_processes(
    parameters: Json, processes: int, refused: str
) -> None:
    problems = [
        str(problem) for problem in model_parallel.check_processes(parameters, "here", processes)
    ]
    assert [text for text in problems if refused not in text] == []
    assert bool(problems) == bool(refused)


@pytest.mark.parametrize(
    ("sharded", "library", "torch", "refused"),
    [
        (2, True, "2.4.1+cu121", True),
        ("2", True, "2.4.1", False),
        (1, True, "2.4.1", False),
        (2, False, "2.4.1", False),
        (2, True, "2.6.0", False),
        (2, True, "2.13.0+cpu", False),
        (2, True, "", False),
    ],
)
def test_sharding_is_refused_where_the_images_torch_cannot_do_it(
    sharded: Json, torch: str, *, library: bool, refused: bool
) -> None:
    """The library would refuse sharding on every rank.

    Of a value of another type the plan says so itself.
    """
    protected = {
        **({model_parallel.OPEN_LIBRARY: "1.0"} if library else {}),
        **({"torch": torch} if torch else {}),
    }
    parameters: Json = {"sharded_data_parallel_degree": sharded, "ddp": True}
    problems = model_parallel.check_library(parameters, "here", protected)
    assert [str(problem) for problem in problems if "needs PyTorch 2.6" in str(problem)] == list(
        map(str, problems)
    )
    assert bool(problems) == refused


@pytest.mark.parametrize(
    ("value", "library", "refused"),
    [(True, True, True), (False, True, False), (True, False, False)],
)
def test_a_partition_file_is_refused_with_the_open_library(
    *, value: bool, library: bool, refused: bool
) -> None:
    protected = {model_parallel.OPEN_LIBRARY: "1.0"} if library else {}
    problems = model_parallel.check_library(
        {"partitions": 2, "load_partition": value}, "here", protected
    )
    assert ["what a partition file has in it" in str(problem) for problem in problems] == [
        True
    ] * refused


@pytest.mark.parametrize(
    ("hyperparameters", "variables", "kind", "is_advised"),
    [
        (SMP, {}, "ml.plain.xlarge", True),
        (SMP, {}, "", True),
        (SMP, {"SMP_CPU_EMULATION": "1"}, "ml.plain.xlarge", False),
        (SMP, {}, "ml.fast.xlarge", False),
        ({"sagemaker_distributed_dataparallel_enabled": True}, {}, "ml.plain.xlarge", True),
        ({"sagemaker_mpi_enabled": True}, {}, "ml.plain.xlarge", False),
    ],
)
def test_smp_and_smddp_without_a_gpu_name_what_a_script_for_cuda_needs(
    hyperparameters: Mapping[str, Json],
    variables: Mapping[str, str],
    kind: str,
    *,
    is_advised: bool,
) -> None:
    """The warning is a line of the job's log and of `train explain`."""
    job_environment = environment(
        {**hyperparameters, "sagemaker_mpi_num_of_processes_per_host": 2},
        hosts=("algo-1",),
        instance_type=kind,
        variables={"PATH": "/usr/bin:/bin", **variables},
    )
    assert (
        any("SMP_CPU_EMULATION=1" in warning for warning in plan(job_environment).warnings)
        is is_advised
    )


def test_a_key_that_smp_does_not_know_is_a_warning() -> None:
    node_plan = plan(
        gpus(
            {
                **SMP,
                "mp_parameters": {"partitions": 2, "ddp": True, "microbatch": 4, "zero2d": False},
            }
        )
    )
    (warning,) = [line for line in node_plan.warnings if "smp does not know" in line]
    assert (
        warning
        == "mp_parameters has 'microbatch', which smp does not know; did you mean 'microbatches'?"
    )


@pytest.mark.parametrize(
    ("parameters", "degree"),
    [
        ({"partitions": 2, "ddp": True}, 2),
        ({"pipeline_parallel_degree": 4, "ddp": True}, 4),
        ({"sharded_data_parallel_degree": 2, "ddp": True}, 1),
    ],
)
def test_the_script_gets_the_pipeline_degree_under_both_names(
    parameters: dict[str, Json], degree: int
) -> None:
    expected = {**parameters, "partitions": degree, "pipeline_parallel_degree": degree}
    by_hyperparameter = plan(gpus({**SMP, "mp_parameters": parameters}))
    variables = MappingProxyType({"SM_HP_MP_PARAMETERS": json.dumps(parameters)})
    by_variable = plan(gpus({**MPI, PER_HOST: 8}, variables=variables))
    for node_plan in (by_hyperparameter, by_variable):
        assert json.loads(node_plan.env["SM_HP_MP_PARAMETERS"]) == expected
    assert "--mp_parameters" in by_hyperparameter.argv
    assert "SM_HP_MP_PARAMETERS" not in plan(gpus(MPI)).env


@pytest.mark.parametrize("off", ["False", "0", False])
def test_switches_reach_the_script_as_booleans(off: Json) -> None:
    hyperparameters = {
        **SMDDP,
        "sagemaker_mpi_enabled": off,
        "sagemaker_distributed_dataparallel_enabled": "True",
    }
    document = json.loads(plan(gpus(hyperparameters)).env["SM_FRAMEWORK_PARAMS"])
    assert document["sagemaker_mpi_enabled"] is False
    assert document["sagemaker_distributed_dataparallel_enabled"] is True


def test_smp_problems_are_told_with_the_others() -> None:
    text = refusal(gpus({**SMP, "mp_parameters": {"partitions": 0, "optimize": "x"}, PER_HOST: 9}))
    assert [
        words
        for words in ("partitions is 0", "optimize is 'x'", "give at most 8")
        if words not in text
    ] == []


@pytest.mark.parametrize(
    ("parameters", "programs", "wrapped"),
    [
        ({"partitions": 2, "ddp": True}, SMDDP_PROGRAMS, True),
        ({"partitions": 2, "ddp": True, "ddp_dist_backend": "auto"}, SMDDP_PROGRAMS, True),
        ({"partitions": 2, "ddp": True, "ddp_dist_backend": "nccl"}, SMDDP_PROGRAMS, False),
        ({"partitions": 2, "ddp": True}, PROGRAMS, False),
    ],
)
def test_smddpmprun_is_used_where_it_is_and_the_backend_is_auto(
    parameters: Json, programs: Mapping[str, str], wrapped: bool
) -> None:
    node_plan = plan(
        gpus({**SMP, "mp_parameters": parameters}, programs=MappingProxyType(dict(programs)))
    )
    head = ("/opt/venv/bin/smddpmprun", "-i", GPUS, "--allow-bypass") if wrapped else ()
    assert program_of(node_plan)[: len(head) + 1] == (*head, "/usr/bin/python")


@pytest.mark.parametrize(
    ("torch", "expected"),
    [("", (None, None)), ("1.13.1", ("simple", None)), ("2.4.1", ("simple", "ring"))],
)
def test_nccl_is_set_for_smp_by_the_version_of_torch(
    torch: str, expected: tuple[str | None, str | None]
) -> None:
    env = plan(with_components(gpus(SMP), torch=torch)).env
    assert (env.get("NCCL_PROTO"), env.get("NCCL_ALGO")) == expected


# --- data parallelism -----------------------------------------------------------------------------
@pytest.mark.parametrize("hyperparameters", [SMDDP, DDP])
def test_smddp_is_started_alike_under_both_names(hyperparameters: Mapping[str, Json]) -> None:
    job_environment = gpus(hyperparameters, programs=MappingProxyType(SMDDP_PROGRAMS))
    leader, worker = plan(job_environment), plan(job_environment, "algo-2")
    assert program_of(leader)[:2] == ("/opt/venv/bin/smddprun", "/usr/bin/python")
    assert worker.argv == ()
    for env in (leader.env, worker.env):
        assert env["SMDATAPARALLEL_USE_HOMOGENEOUS"] == "1"
        assert (env["SMDATAPARALLEL_SERVER_ADDR"], env["SMDATAPARALLEL_SERVER_PORT"]) == (
            "algo-1",
            "7592",
        )
        assert env["SAGEMAKER_INSTANCE_TYPE"] == GPUS
        assert env["FI_PROVIDER"] == "efa"


def test_smddp_on_one_host_without_efa_and_without_smddprun() -> None:
    node_plan = plan(environment(SMDDP, hosts=("algo-1",), devices=Devices(gpus=2)))
    assert node_plan.env["SMDATAPARALLEL_USE_SINGLENODE"] == "1"
    assert (
        not {"SMDATAPARALLEL_USE_HOMOGENEOUS", "FI_PROVIDER", "NCCL_PROTO"} & node_plan.env.keys()
    )
    assert program_of(node_plan)[0] == "/usr/bin/python"


def test_smddp_beside_torchrun_is_a_library() -> None:
    job_environment = gpus({**SMDDP, **TORCH})
    assert plan(job_environment).mode == "torch_distributed"
    assert program_of(plan(job_environment))[:2] != ("/opt/venv/bin/smddprun", "/usr/bin/python")
    assert any("the image has no smddp" in line for line in plan(job_environment).warnings)
    assert not any(
        "smddp" in line for line in plan(with_components(job_environment, smddp="1")).warnings
    )


def test_smddp_takes_its_own_custom_options() -> None:
    hyperparameters = {
        **SMDDP,
        "sagemaker_distributed_dataparallel_custom_mpi_options": "-x NCCL_DEBUG=INFO",
    }
    line = " ".join(plan(gpus(hyperparameters)).argv)
    assert "-x NCCL_DEBUG=INFO" in line
    broken = refusal(
        gpus({**SMDDP, "sagemaker_distributed_dataparallel_custom_mpi_options": "-x 'A=1"})
    )
    assert "sagemaker_distributed_dataparallel_custom_mpi_options" in broken


def test_smddp_takes_the_instance_type_that_the_sdk_knows() -> None:
    job_environment = gpus({**SMDDP, "sagemaker_instance_type": "ml.other.xlarge"})
    assert plan(job_environment).env["SAGEMAKER_INSTANCE_TYPE"] == "ml.other.xlarge"


# --- torchrun on Neuron ---------------------------------------------------------------------------
def test_neuron_cores_are_the_processes_of_torchrun() -> None:
    node_plan = plan(
        environment(
            TORCH, hosts=TWO, instance_type="ml.neuron.xlarge", devices=Devices(efa=("rdmap0",))
        )
    )
    assert "--nproc-per-node=32" in node_plan.argv
    assert node_plan.env["FI_PROVIDER"] == "efa"
    assert node_plan.env["FI_EFA_USE_DEVICE_RDMA"] == "1"


def test_neuron_graphs_are_compiled_beforehand_where_asked() -> None:
    variables = MappingProxyType({"RUN_NEURON_PARALLEL_COMPILE": "1"})
    job_environment = environment(TORCH, hosts=TWO, instance_type="ml.neuron.xlarge")
    assert "neuron_parallel_compile is not installed" in refusal(
        job_environment._replace(variables=variables)
    )
    programs = MappingProxyType(
        {**PROGRAMS, "neuron_parallel_compile": "/opt/venv/bin/neuron_parallel_compile"}
    )
    planned = plan(job_environment._replace(variables=variables, programs=programs))
    assert planned.argv[:2] == ("/opt/venv/bin/neuron_parallel_compile", "/usr/bin/torchrun")
    assert set(planned.needs) == set(planned.argv[:2])


@pytest.mark.parametrize("program", ["run.sh", "tool"])
def test_torchrun_starts_programs_that_are_not_pythons(program: str) -> None:
    argv = plan(gpus({**TORCH, "sagemaker_program": program})).argv
    assert "--no-python" in argv
    assert argv[-1].endswith(program)


# --- XLA ------------------------------------------------------------------------------------------
def test_xla_is_for_scripts_on_gpus() -> None:
    text = refusal(environment({**XLA, "sagemaker_program": "run.sh"}, hosts=TWO))
    expected = (
        "pytorchxla is for GPUs only",
        "pytorchxla starts Python scripts only",
        "pytorchxla needs torch_xla",
    )
    assert [words for words in expected if words not in text] == []


# --- parameter servers ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("framework", "components", "beside"),
    [
        ("", {"tensorflow": "2.18.0", "torch": "2.4.1"}, ["TensorFlow parameter server"]),
        ("", {"mxnet": "1.9.1"}, ["MXNet scheduler", "MXNet server"]),
        ("", {"torch": "2.4.1"}, []),
        ("torch", {"tensorflow": "2.18.0", "torch": "2.4.1"}, []),
    ],
)
def test_the_framework_of_the_image_decides_about_the_servers(
    framework: str, components: dict[str, str], beside: list[str]
) -> None:
    job_environment = with_components(gpus(PARAMETERS), **components)
    job_environment = job_environment._replace(
        manifest=job_environment.manifest._replace(framework=framework)
    )
    assert [row.name for row in plan(job_environment).auxiliaries] == beside


def test_the_framework_is_the_manifests() -> None:
    document = manifest_document() | {"target": {"framework": "pytorch"}}
    assert parse_manifest(json.dumps(document), "image.json").framework == "torch"


def test_parameter_servers_without_a_framework_are_refused() -> None:
    assert "parameter_server needs TensorFlow, MXNet or PyTorch" in refusal(gpus(PARAMETERS))


def test_one_host_needs_no_tensorflow_server() -> None:
    node_plan = plan(with_components(gpus(PARAMETERS, "algo-1"), tensorflow="2"))
    assert node_plan.auxiliaries == ()
    assert "TF_CONFIG" not in node_plan.env


@pytest.mark.parametrize("hyperparameters", [PARAMETERS, MIRRORED])
def test_a_cluster_that_does_not_fit_into_a_variable_is_refused(
    hyperparameters: Mapping[str, Json],
) -> None:
    hosts = tuple(f"algo-{number}" for number in range(1, 9000))
    text = refusal(with_components(gpus(hyperparameters, *hosts), tensorflow="2"))
    assert "TF_CONFIG names 8999 hosts, which is more than the 131,072 bytes of the kernel" in text


@pytest.mark.parametrize("port", ["none", 0, 70000])
def test_the_schedulers_port_is_a_port(port: Json) -> None:
    job_environment = with_components(gpus({**PARAMETERS, "_ps_port": port}), mxnet="1.9.1")
    if port == 0:
        assert plan(job_environment).env["DMLC_PS_ROOT_PORT"] == "8000"
    else:
        assert "is not a TCP port (hyperparameter _ps_port)" in refusal(job_environment)


# --- heterogeneous clusters -----------------------------------------------------------------------
def clusters(
    hyperparameters: Mapping[str, Json], groups: Json = None, **changes: object
) -> Environment:
    """Four hosts: two of kind "data" first, then two of kind "train" with eight GPUs each."""
    config: dict[str, Json] = {
        "current_host": "algo-1",
        "current_instance_type": "ml.plain.xlarge",
        "current_group_name": "data",
        "hosts": ["algo-1", "algo-2", "algo-3", "algo-4"],
        "network_interface_name": "eth0",
        "instance_groups": [
            {
                "instance_group_name": "data",
                "instance_type": "ml.plain.xlarge",
                "hosts": ["algo-1", "algo-4"],
            },
            {"instance_group_name": "train", "instance_type": GPUS, "hosts": ["algo-3", "algo-2"]},
            {"instance_group_name": "idle", "instance_type": GPUS, "hosts": []},
        ],
    }
    job_hyperparameters = {**hyperparameters, "sagemaker_distribution_instance_groups": groups}
    job_environment = environment(job_hyperparameters, resource_config=MappingProxyType(config))
    return with_components(job_environment._replace(**changes), torch_xla="1", tensorflow="2")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "hyperparameters", [MPI, SMP, SMDDP, DDP, TORCH, XLA, MIRRORED, PARAMETERS]
)
def test_a_distribution_over_a_group_counts_the_groups_hosts_only(
    hyperparameters: Mapping[str, Json],
) -> None:
    cluster = clusters(hyperparameters, ["train"])
    job = make_job(cluster, "algo-2")
    assert (job.placement.leader, job.placement.distribution_hosts, job.placement.host_rank) == (
        "algo-3",
        ("algo-3", "algo-2"),
        1,
    )
    plans = {host: plan_host(make_job(cluster, host)) for host in job.placement.hosts}
    assert {host: host_plan.role for host, host_plan in plans.items()} == {
        "algo-1": "worker",
        "algo-2": "worker",
        "algo-3": "leader",
        "algo-4": "worker",
    }
    for outside in ("algo-1", "algo-4"):
        assert plans[outside].argv[:2] == ("/usr/bin/python", "train.py")
        assert plans[outside].shell is None
        assert not any(
            name.startswith(("SMDATAPARALLEL", "XRT_", "TF_CONFIG")) for name in plans[outside].env
        )
    channels = {(host_plan.control, host_plan.mode) for host_plan in plans.values()}
    assert len(channels) == 1, (
        "all hosts of the job are on one control channel, and of one mind about it"
    )
    control = plans["algo-1"].control
    assert control is not None
    assert (control.leader, control.hosts) == ("algo-3", ("algo-3", "algo-1", "algo-2", "algo-4"))
    assert {host_plan.env["MASTER_ADDR"] for host_plan in plans.values()} == {"algo-3"}
    assert plans["algo-2"].env["FI_PROVIDER"] == "efa"
    assert "FI_PROVIDER" not in plans["algo-1"].env


def test_ranks_of_a_group() -> None:
    node_plan = plan(clusters(MPI, ["train"]), "algo-3")
    assert node_plan.argv[node_plan.argv.index("--host") + 1] == "algo-3:8,algo-2:8"
    assert node_plan.argv[node_plan.argv.index("-np") + 1] == "16"
    node_plan = plan(clusters(TORCH, ["train"]), "algo-2")
    assert {"--nnodes=2", "--nproc-per-node=8", "--master-addr=algo-3", "--node-rank=1"} <= set(
        node_plan.argv
    )
    document = json.loads(node_plan.env["SM_TRAINING_ENV"])
    assert (document["distribution_hosts"], document["master_hostname"]) == (
        ["algo-3", "algo-2"],
        "algo-3",
    )


def test_groups_are_in_the_order_of_the_resource_config() -> None:
    job = make_job(clusters(MPI, ["train", "data"]), "algo-3")
    assert job.placement.distribution_hosts == ("algo-1", "algo-4", "algo-3", "algo-2")
    assert job.placement.slots == (1, 1, 8, 8)
    node_plan = plan(clusters(MPI, ["train", "data"]), "algo-1")
    assert (
        node_plan.argv[node_plan.argv.index("--host") + 1] == "algo-1:1,algo-4:1,algo-3:8,algo-2:8"
    )
    assert node_plan.argv[node_plan.argv.index("-np") + 1] == "18"


def test_without_a_group_named_all_hosts_take_part_and_it_is_said() -> None:
    node_plan = plan(clusters(MPI), "algo-1")
    assert node_plan.argv[node_plan.argv.index("-np") + 1] == "18"
    assert any("names none: all hosts take part" in line for line in node_plan.warnings)


def test_one_name_may_come_as_a_text() -> None:
    assert make_job(clusters(MPI, "train")).placement.distribution_hosts == ("algo-3", "algo-2")


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        (["trian"], "instance group 'trian'"),
        (["train", "x"], "instance group 'x'"),
        (["idle"], "the instance group 'idle' has no host"),
    ],
)
def test_a_group_without_hosts_is_refused(groups: Json, expected: str) -> None:
    assert expected in refusal(clusters(MPI, groups))


def test_a_group_is_refused_where_the_platform_names_none() -> None:
    text = refusal(
        environment({**MPI, "sagemaker_distribution_instance_groups": ["train"]}, hosts=TWO)
    )
    assert "instance group 'train'" in text
    assert "resourceconfig.json has no instance groups" in text


def test_counts_are_judged_by_the_groups_own_instance_type() -> None:
    assert "9 processes per host on 8 GPU(s) of ml.fast.xlarge" in refusal(
        clusters({**MPI, PER_HOST: 9}, ["train"])
    )
    assert make_job(clusters({**MPI, PER_HOST: 9}, ["data"])).placement.slots == (9, 9)


def test_a_group_of_one_host_needs_no_ssh() -> None:
    cluster = clusters(MPI, ["train"])
    groups: list[Json] = [
        {
            "instance_group_name": "data",
            "instance_type": "ml.plain.xlarge",
            "hosts": ["algo-1", "algo-2", "algo-4"],
        },
        {"instance_group_name": "train", "instance_type": GPUS, "hosts": ["algo-3"]},
    ]
    config = read_hosts({**cluster.hosts.document, "instance_groups": groups})
    alone = plan(cluster._replace(hosts=config), "algo-3")
    assert (alone.role, alone.shell, alone.needs) == ("leader", None, ("/usr/bin/mpirun",))
    assert alone.argv[alone.argv.index("--host") + 1] == "localhost:8"


@pytest.mark.parametrize(
    ("hyperparameters", "groups", "host", "expected"),
    [
        (
            MPI,
            ["train"],
            "algo-2",
            (
                "mode mpi, host algo-2 (2 of 2, 4 in the job),"
                " 8 processes on this host, 16 in all, train.py"
            ),
        ),
        (
            MPI,
            ["train"],
            "algo-4",
            (
                "mode mpi, host algo-4 (takes no part in it, 2 do, 4 in the job), 1 process on this"
                " host, train.py"
            ),
        ),
        (
            {},
            None,
            "algo-4",
            "mode none, host algo-4 (4 of 4), 1 process on this host, 4 in all, train.py",
        ),
    ],
)
def test_the_line_of_the_log(
    hyperparameters: Mapping[str, Json], groups: Json, host: str, expected: str
) -> None:
    assert describe(make_job(clusters(hyperparameters, groups), host)) == expected


def test_each_mode_can_be_chosen_or_says_what_selects_it() -> None:
    for mode in MODES.values():
        ways = (mode.switch, mode.selected_by, mode.name == "none")
        assert sum(map(bool, ways)) == 1, mode.name
