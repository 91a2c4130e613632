"""List the modes of a job, such as torch_distributed and mpi: one row per mode. Pure.

To add a mode, write ``plan/modes/FILE.py`` and add its row to MODES.

A row has the facts for the validation of a job (job/placement.py). The function
``plan(job) -> NodePlan`` in the mode's file is imported only for a job of this mode.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Mapping, NamedTuple

from trainworks_launcher.contract import names


class Mode(NamedTuple):
    """One way to start a job.

    Attributes:
        name: As in the SDK's ``distribution`` argument.
        file: Module in ``plan/modes/``.
        switch: Hyperparameter that selects the mode; ``""`` for none.
        options: Hyperparameter with the user's own mpirun options; ``""`` if the mode has none.
        one_per_host: Each host gets one process, also a host with several GPUs.
        needs_count: The job must set the processes per host.
        programs: Programs that start the ranks.
        by_name: The processes get the names of all hosts, and connect by name.
        trainium: Whether the mode works on hosts with Neuron cores.
        minimum: A component, and its lowest version for the mode. Source: MINIMUM_SOURCE.
        packages: Python packages in the image that decide about the start.
        library: Component without which the mode starts and is useless; ``""`` for none.
        selected_by: What selects a mode that has no switch, in words; ``""`` for the others.
    """

    name: str
    file: str
    switch: str = ""
    options: str = ""
    one_per_host: bool = False
    needs_count: bool = False
    programs: tuple[str, ...] = ()
    by_name: bool = False
    trainium: bool = False
    minimum: tuple[str, str] = ("", "")
    packages: tuple[str, ...] = ()
    library: str = ""
    selected_by: str = ""

    @property
    def by_mpirun(self) -> bool:
        """Whether mpirun starts the ranks, also on hosts without a launcher."""
        return self.programs == _MPIRUN

    def programs_for(self, has_ssh_workers: bool) -> tuple[str, ...]:
        """Return the programs that each host needs, such as ``("mpirun", "ssh")``.

        Args:
            has_ssh_workers: Whether the other hosts have no launcher, and serve ssh.
        """
        if not has_ssh_workers:
            return self.programs
        return (*self.programs, "ssh")


MINIMUM_SOURCE = (
    "AWS guide, 'Use the SageMaker distributed data parallelism library': supported launchers"
)

_MPIRUN = ("mpirun",)
_MPI4PY = "mpi4py"
_TORCH = ("torch",)

_ROWS = (
    Mode("none", "none", one_per_host=True, trainium=True),
    # Replaces none and torch_distributed where the platform starts every rank.
    Mode(
        "tasks",
        "tasks",
        trainium=True,
        selected_by="the platform selects it where it starts every rank",
    ),
    Mode(
        "mpi",
        "mpi",
        names.MPI_ENABLED,
        names.MPI_OPTIONS,
        programs=_MPIRUN,
        packages=(_MPI4PY,),
    ),
    # Selected as in sagemaker-training.
    Mode(
        "smdistributed.modelparallel",
        "modelparallel",
        options=names.MPI_OPTIONS,
        needs_count=True,
        programs=_MPIRUN,
        packages=(_MPI4PY,),
        library="smp",
        selected_by=(
            "mode mpi with smp's parameters is this mode: write --mode mpi --processes-per-host N,"
            f" and set {names.MODEL_PARALLEL_VARIABLE}='{{\"pipeline_parallel_degree\": 2}}' in the"
            " job's environment"
        ),
    ),
    Mode(
        "smdistributed.dataparallel",
        "dataparallel",
        names.DATA_PARALLEL_ENABLED,
        names.DATA_PARALLEL_OPTIONS,
        programs=_MPIRUN,
        packages=(_MPI4PY,),
        library="smddp",
    ),
    Mode(
        "pytorchddp",
        "dataparallel",
        names.PYTORCH_DDP_ENABLED,
        names.DATA_PARALLEL_OPTIONS,
        programs=_MPIRUN,
        minimum=("torch", "1.12"),
        packages=(*_TORCH, _MPI4PY),
        library="smddp",
    ),
    Mode(
        "torch_distributed",
        "torch_distributed",
        names.TORCH_DISTRIBUTED_ENABLED,
        programs=("torchrun",),
        trainium=True,
        minimum=("torch", "1.13"),
        packages=_TORCH,
    ),
    Mode(
        "ray",
        "ray",
        names.RAY_ENABLED,
        one_per_host=True,
        trainium=True,
        programs=("ray", "python"),
        packages=("ray",),
    ),
    Mode(
        "pytorchxla",
        "pytorchxla",
        names.PYTORCH_XLA_ENABLED,
        by_name=True,
        programs=("python",),
        packages=("torch_xla",),
    ),
    Mode(
        "parameter_server",
        "parameter_server",
        names.PARAMETER_SERVER_ENABLED,
        by_name=True,
        one_per_host=True,
        packages=("tensorflow", "mxnet", "torch"),
    ),
    Mode(
        "multi_worker_mirrored_strategy",
        "multi_worker_mirrored_strategy",
        names.MULTI_WORKER_MIRRORED_ENABLED,
        by_name=True,
        one_per_host=True,
        packages=("tensorflow",),
    ),
)
MODES: Mapping[str, Mode] = MappingProxyType({row.name: row for row in _ROWS})
"""Name -> row, in the order in which messages list the modes."""

SWITCHES: Mapping[str, str] = MappingProxyType(
    {row.switch: row.name for row in MODES.values() if row.switch}
)
"""Switch -> name of its mode."""
