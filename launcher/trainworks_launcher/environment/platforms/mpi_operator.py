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
from trainworks_launcher.environment.platforms.common import Reader, make_config, read_number

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
"""The operator's parameters of mpirun. The plan gives mpirun the same settings as options."""


def describe(sources: Sources) -> Description:
    """Return the workers of the hostfile, and this pod unless the hostfile has its name.

    Reads the hostfile. Nothing is raised: ``problems`` has what is missing or wrong.
    """
    reader = Reader(sources.variables, "an MPIJob", _ADVICE)
    if reader.optional(_ROLE) == "worker":
        reader.refuse("a worker serves ssh, and the launcher pod starts the job", _ROLE)
    path = reader.text(names.MPI_HOSTFILE_VARIABLE)
    if reader.problems:
        return Description(problems=reader.problems)
    default = read_number(reader.optional(_SLOTS))
    slots_of: dict[str, int] = {}
    for line in sources.read(path).splitlines():
        words = line.split("#")[0].split()
        if not words:
            continue
        host, slots = words[0], _slots(words[1:]) or default
        # Open MPI adds up the slots of a host that is listed more than once.
        slots_of[host] = slots_of.get(host, 0) + slots
    is_even = len({*slots_of.values()}) == 1 and all(slots_of.values())
    if not slots_of:
        reader.refuse(
            f"the hostfile {path!r} has no host, or cannot be read", names.MPI_HOSTFILE_VARIABLE
        )
    elif not is_even:
        listed = ", ".join(f"{host} slots={slots or '?'}" for host, slots in slots_of.items())
        reader.refuse(
            f"each host needs the same number of slots: {listed}", names.MPI_HOSTFILE_VARIABLE
        )
    if reader.problems:
        return Description(problems=reader.problems)

    hosts = [*slots_of]
    own_pod = sources.hostname.split(".")[0]
    own = ""
    for host in hosts:
        if host.split(".")[0] == own_pod:
            own = host
            break
    if not own:
        own = sources.hostname
        hosts.append(own)
    return Description(
        resource_config=make_config(hosts, own),
        where=path,
        served=tuple(slots_of),
        processes_per_host=next(iter(slots_of.values())),
        processes_why=f"the slots of {path}",
        mode="mpi",
        hidden=MappingProxyType({"mpirun": _MPIRUN_READS}),
    )


def _slots(words: list[str]) -> int:
    """Return N of ``slots=N``; 0 if the line of the hostfile has no slots."""
    match = re.search(r"(?:^| )slots\s*=\s*(\d+)", " ".join(words))
    return int(match.group(1)) if match else 0
