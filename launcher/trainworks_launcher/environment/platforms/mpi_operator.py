"""Kubernetes operators for MPI: MPIJob, and TrainJob with an MPI runtime. Pure.

Only the launcher pod runs this launcher. The workers run sshd, and mpirun reaches them with keys
that the operator mounts (``supervise.ssh.mounted_keys``). Sources: kubeflow/mpi-operator,
pkg/controller/mpi_job_controller.go; kubeflow/trainer, pkg/runtime/framework/plugins/mpi/mpi.go.
"""

from __future__ import annotations

import re
from types import MappingProxyType

from trainworks_launcher.contract import names
from trainworks_launcher.environment.platforms import Description, Sources
from trainworks_launcher.environment.platforms.common import Reader, config_of, read_number

_ROLE = "K_MPI_JOB_ROLE"
_SLOTS = "OMPI_MCA_orte_set_default_slots"
_ADVICE = (
    "the launcher of an MPIJob has them: let its workers run /usr/sbin/sshd -De, which is their"
    " default command"
)

_MPIRUN_READS = (
    names.MPI_HOSTFILE_VARIABLE,
    _SLOTS,
    "OMPI_MCA_orte_keep_fqdn_hostnames",
    "OMPI_MCA_plm_rsh_args",
)
"""The operator's parameters of mpirun, which the plan gives by words."""


def describe(sources: Sources) -> Description:
    """Return the workers of the hostfile, and this pod, which may be one of them."""
    reader = Reader(sources.variables, "an MPIJob", _ADVICE)
    if reader.optional(_ROLE) == "worker":
        reader.refuse("a worker serves ssh, and the launcher pod starts the job", _ROLE)
    path = reader.text(names.MPI_HOSTFILE_VARIABLE)
    if reader.problems:
        return Description(problems=reader.problems)
    default = read_number(reader.optional(_SLOTS))
    lines = [line.split("#")[0].split() for line in sources.read(path).splitlines()]
    counts: dict[str, int] = {}
    for words in filter(None, lines):
        # Open MPI adds up the slots of a host that is there more than once.
        counts[words[0]] = counts.get(words[0], 0) + (_slots(words[1:]) or default)
    if not counts:
        reader.refuse(
            f"the hostfile {path!r} has no host, or cannot be read", names.MPI_HOSTFILE_VARIABLE
        )
    elif len({*counts.values()}) > 1 or not all(counts.values()):
        told = ", ".join(f"{host} slots={count or '?'}" for host, count in counts.items())
        reader.refuse(
            f"each host needs the same number of slots: {told}", names.MPI_HOSTFILE_VARIABLE
        )
    if reader.problems:
        return Description(problems=reader.problems)
    own = next(
        (host for host in counts if host.split(".")[0] == sources.hostname.split(".")[0]), ""
    )
    others = () if own else (sources.hostname,)
    return Description(
        resource_config=config_of((*counts, *others), own or sources.hostname),
        where=path,
        served=tuple(counts),
        processes_per_host=next(iter(counts.values())),
        processes_why=f"the slots of {path}",
        mode="mpi",
        hidden=MappingProxyType({"mpirun": _MPIRUN_READS}),
    )


def _slots(words: list[str]) -> int:
    """Return N of ``slots=N``; 0 if it is not sources."""
    match = re.search(r"(?:^| )slots\s*=\s*(\d+)", " ".join(words))
    return int(match.group(1)) if match else 0
