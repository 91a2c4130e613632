"""Programs that stand in front of ``mpirun`` and ``sshd`` for those who start a
job without this launcher.

Both names lead to this module (the image's recipes of ``open-mpi`` and
``ssh``), which becomes the real program.

A program under ``train`` on several hosts calls ``mpirun`` with a list of them: it gets the
launcher's agent, which starts its daemons through the launchers of those hosts
(``supervise.processes.mpirun_agents``).

Kubernetes operators (MPIJob, TrainJob with MPI) run ``/usr/sbin/sshd -De`` on the workers: it gets
a host key here, because images have none. They describe the job to ``mpirun`` in variables of Open
MPI 4, which Open MPI 5 does not read (kubeflow/mpi-operator#731): it gets them by its own names,
with the job's keys (``supervise.ssh.mounted_keys``).

``ModelTrainer`` (SageMaker Python SDK 3) with source code replaces the image's entry point by a
script and a driver of its own. Its MPI driver calls both programs, and gets wrong, as read in
sagemaker-train 1.27.0 and tried in containers:

- The SDK's local mode says that the network interface is ``ethwe``. No
  container has it, and mpirun refuses to start.
- mpirun is given the platform's name of this host, which the container does not
  know as its own, so it asks ssh.
- ``-np`` is the number of processes of one host, not of all.
- Between hosts it needs one private key that all of them hold. It would be
  everybody's who has the image.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Mapping, Sequence

from trainworks_launcher.contract import names
from trainworks_launcher.contract.errors import RefusalError
from trainworks_launcher.contract.files import text_of
from trainworks_launcher.contract.redaction import Redactor
from trainworks_launcher.environment import directories
from trainworks_launcher.environment.environment import read_manifest
from trainworks_launcher.environment.network_routes import (
    interface_that_reaches,
    network_interfaces,
)
from trainworks_launcher.environment.platforms import slurm
from trainworks_launcher.mpirun.dialects import Dialect, dialect_of
from trainworks_launcher.supervise.attribution import outcome_files
from trainworks_launcher.supervise.outcome.outcome import FAILED, Outcome
from trainworks_launcher.supervise.processes import output
from trainworks_launcher.supervise.processes.mpirun_agents import SOCKET
from trainworks_launcher.supervise.ssh import mounted_keys

_DRIVER = "/mpi_driver.py"
"""How the path of the SDK's MPI driver ends.

It starts both programs itself, so it is their parent.
"""

_HOST_KEYS = "/etc/ssh"
_PARAMETER = "OMPI_MCA_"
"""How the environment variables of Open MPI's parameters begin."""

_PROGRAMS = Path(__file__).resolve().parents[1] / "programs"
_AGENT = f"{sys.executable} -I {_PROGRAMS / 'agent.py'}"
"""What mpirun starts its daemons on other hosts with."""

_VALUES_OF = {"-mca": 2, "--mca": 2, "-x": 1, "--host": 1, "-np": 1}
"""The options that the driver gives before the job's own, with the number of their values."""

NO_KEY = (
    "the SDK's own MPI driver cannot start on {hosts} hosts in this image: it needs a private key"
    " that all hosts have, and this image holds none. Let the launcher start the job: add"
    ' command="train" to SourceCode(entry_script=...); it needs no keys, and reads'
    " MPI(process_count_per_node=...)"
)
"""Said where the driver would wait 300 seconds and then say that a host was not reachable."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Stand in for the program by whose name this was called.

    Returns only for a refusal, or if the real one fails.
    """
    words = list(sys.argv if arguments is None else arguments)
    program = Path(words[0]).name
    manifest, _ = read_manifest(os.environ)
    real = manifest.programs.get(program, "")
    if not real:
        sys.stderr.write(f"trainworks: this image has no {program}\n")
        return names.EXIT_NOT_FOUND
    environment = dict(os.environ) if program != "mpirun" else without_slurm(os.environ)
    options = words[1:]
    parent = text_of(f"/proc/{os.getppid()}/cmdline").split("\0")
    if any(word.endswith(_DRIVER) for word in parent):
        hosts = _hosts(environment)
        if (
            program == "sshd"
            and len(hosts) > 1
            and not list(Path(_HOST_KEYS).glob("ssh_host_*_key"))
        ):
            return _refuse(environment, hosts)
        if program == "mpirun":
            given = environment.get("SM_NETWORK_INTERFACE_NAME", "")
            missing = "" if given in network_interfaces() else given
            leader = environment.get("SM_MASTER_ADDR", "")
            options, notes = corrected(
                options, missing, interface_that_reaches(leader) if missing else ""
            )
            for note in notes:
                output.log(note)
            name = environment.get("SM_CURRENT_HOST", "")
            environment.update(_known_by_its_name(environment, manifest.hostname_shim, name))
    elif program == "sshd":
        options = [*_host_key(options, manifest.programs.get("ssh-keygen", "")), *options]
    elif Path(environment.get(names.RUNTIME_DIRECTORY_VARIABLE) or "/dev/null", SOCKET).exists():
        dialect = dialect_of(manifest.components.get(names.OPEN_MPI, ""))
        environment = {**_reached_by_the_launchers(environment, dialect), **environment}
    elif environment.get(names.MPI_HOSTFILE_VARIABLE):
        dialect = dialect_of(manifest.components.get(names.OPEN_MPI, ""))
        environment.update(own_names(environment, dialect))
        environment.update(
            _reached_with_the_jobs_keys(environment, dialect, manifest.programs.get("ssh", ""))
        )
        name = _own_line(environment[names.MPI_HOSTFILE_VARIABLE])
        environment.update(_known_by_its_name(environment, manifest.hostname_shim, name))
    try:
        os.execve(real, [real, *options], environment)
    except OSError as error:
        sys.stderr.write(
            f"trainworks: cannot execute {program} as {real!r}: {error.strerror or error}\n"
        )
        if isinstance(error, FileNotFoundError):
            return names.EXIT_NOT_FOUND
        return names.EXIT_NOT_EXECUTABLE


def corrected(
    options: Sequence[str], missing: str, reaching: str
) -> tuple[list[str], tuple[str, ...]]:
    """Return (mpirun's words, what to say about them).

    ``missing`` is the platform's network interface if it does not exist, else ""; it becomes
    ``reaching``, by which this host reaches the leader ("" if unknown: nothing is replaced). The
    number of ranks is not changed: a job must not get another size than its command line says, but
    its log says which size that is.
    """
    words = list(options)
    notes: dict[str, None] = {}
    ranks, slots = 0, 0
    index = 0
    while index < len(words) and words[index].startswith("-"):
        option = words[index]
        following = index + 1 + _VALUES_OF.get(option, 0)
        values = words[index + 1 : following]
        last = index + len(values)
        index = last + 1
        if not values:
            continue
        value = values[0]
        if option == "-np" and value.isdigit():
            ranks = int(value)
        elif option == "--host":
            slots = sum(_slots_of(host) for host in value.split(","))
        elif value.endswith("_if_include") or value.startswith("NCCL_SOCKET_IFNAME="):
            prefix, equals, interface = words[last].rpartition("=")
            if reaching and interface == missing:
                words[last] = f"{prefix}{equals}{reaching}"
                notes[
                    f"the network interface {missing!r} does not exist on this host;"
                    f" mpirun gets {reaching!r}"
                ] = None
    if 0 < ranks < slots:
        notes[
            f"the SDK's own MPI driver asks for {ranks} process(es), and the hosts have room for"
            f" {slots}: it counts the processes of one host only. The job's world has {ranks}"
            ' process(es), and some hosts have none. With SourceCode(..., command="train") the'
            " launcher starts them all"
        ] = None
    return words, tuple(notes)


def _slots_of(host: str) -> int:
    """Return the slots of one entry of ``--host``: ``algo-1:8`` has 8, ``algo-1`` one."""
    _, colon, count = host.rpartition(":")
    return int(count) if colon and count.isdigit() else 1


def without_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without those by which mpirun would take itself for
    a part of Slurm's step.

    It would ask srun to start its daemons, which is not in the image, and load plugins that Slurm's
    server for MPI has and the image's Open MPI has not. Where srun is on PATH, mpirun may ask it.
    """
    if "SLURM_JOB_ID" not in environment:
        return dict(environment)
    hidden = slurm.HIDDEN[
        "ranks" if shutil.which("srun", path=environment.get("PATH")) else "mpirun"
    ]
    return {name: value for name, value in environment.items() if not name.startswith(hidden)}


def own_names(environment: Mapping[str, str], dialect: Dialect) -> dict[str, str]:
    """Return the parameters of mpirun that a Kubernetes operator gives, by the
    names that this Open MPI reads.

    Those with an old name that Open MPI 5 renamed, which it would ignore; a
    variable that is set is left as it is.
    """
    found: dict[str, str] = {}
    for name, value in environment.items():
        given = name[len(_PARAMETER) :] if name.startswith(_PARAMETER) else ""
        new = dialect.canonical(given)
        if given and new != given and new.startswith(dialect.runtime_prefixes):
            found.setdefault(variable_of(dialect, new), value)
    return {name: value for name, value in found.items() if name not in environment}


def variable_of(dialect: Dialect, parameter: str) -> str:
    """Return the environment variable of a parameter of the run-time."""
    return f"{'PRTE_MCA_' if dialect.own_classes else _PARAMETER}{parameter}"


def _reached_by_the_launchers(environment: Mapping[str, str], dialect: Dialect) -> dict[str, str]:
    """Return variables by which mpirun reaches the other hosts of a job through their launchers."""
    parameters = {
        "plm_rsh_agent": _AGENT,
        "plm_rsh_no_tree_spawn": "1",  # only the first host may start something on the others
        # An agent lives as long as its daemon.
        "plm_rsh_num_concurrent": str(max(len(_hosts(environment)), 128)),
    }
    found = {
        variable_of(dialect, dialect.canonical(name)): value for name, value in parameters.items()
    }
    return {
        **found,
        "SHELL": "/bin/sh",
    }  # what mpirun writes its daemons' commands for; the launchers run them with it


def _reached_with_the_jobs_keys(
    environment: Mapping[str, str], dialect: Dialect, ssh: str
) -> dict[str, str]:
    """Return variables by which mpirun reaches the workers with the mounted keys.

    {} if there are none.
    """
    keys = mounted_keys.find()
    agent = variable_of(dialect, dialect.canonical("plm_rsh_agent"))
    if keys is None or not ssh or agent in environment:
        return {}
    directory = Path(tempfile.mkdtemp(prefix="trainworks-ssh-"))
    limit = environment.get(names.JOIN_LIMIT_VARIABLE) or f"{names.JOIN_LIMIT_SECONDS:g}"
    mounted_keys.write_client_files(
        directory, ssh, keys, (sys.executable, "-I", str(_PROGRAMS / "connect.py"), limit)
    )
    return {
        names.RUNTIME_DIRECTORY_VARIABLE: str(directory),
        agent: _AGENT,
        # Workers have not these files: mpirun reaches each of them itself.
        variable_of(dialect, dialect.canonical("plm_rsh_no_tree_spawn")): "1",
    }


def _host_key(options: Sequence[str], keygen: str) -> Sequence[str]:
    """Return options for an sshd that has no host key.

    () if it has one, or none can be made (sshd then says so).
    """
    try:
        more, said = mounted_keys.server_options(options, keygen)
    except (OSError, RefusalError) as error:
        why = error.problems[0].what if isinstance(error, RefusalError) else error
        more, said = [], f"sshd gets no host key: {why}"
    if said:
        output.log(said)
    return more


def _hosts(environment: Mapping[str, str]) -> list[str]:
    """Return the job's hosts, as the SDK's script exports them."""
    try:
        hosts = json.loads(environment.get("SM_HOSTS", "[]"))
    except ValueError:
        return []
    return [str(host) for host in hosts] if isinstance(hosts, list) else []


def _own_line(hostfile: str) -> str:
    """Return what a hostfile calls this host, "" if it does not have it: the
    launcher pod may be a worker, too.
    """
    own = os.uname().nodename.split(".")[0]
    lines = text_of(hostfile).splitlines()  # mpirun says where it cannot be read
    return next(
        (words[0] for words in map(str.split, lines) if words and words[0].split(".")[0] == own), ""
    )


def _known_by_its_name(environment: Mapping[str, str], shim: str, name: str) -> dict[str, str]:
    """Return variables that let mpirun find its own host among the job's, so
    that it needs no ssh to itself.
    """
    if not shim or not Path(shim).is_file() or not name:
        return {}
    preload = f"{shim}:{environment['LD_PRELOAD']}" if environment.get("LD_PRELOAD") else shim
    return {"LD_PRELOAD": preload, names.HOSTNAME_VARIABLE: name}


def _refuse(environment: Mapping[str, str], hosts: Sequence[str]) -> int:
    """Say why the job cannot start, where the platform looks for it too, and
    end the driver, which would not notice.
    """
    text = NO_KEY.format(hosts=len(hosts))
    base = environment.get(names.BASE_DIRECTORY_VARIABLE) or names.BASE_DIRECTORY
    reports = f"{base}/{directories.RESULTS[directories.OUTPUT]}"
    output.log(text)
    host = environment.get("SM_CURRENT_HOST", "")
    outcome_files.write(
        reports, Outcome(FAILED, names.EXIT_NOT_STARTED, host, text), Redactor(environment)
    )
    os.kill(os.getppid(), signal.SIGTERM)
    return names.EXIT_NOT_STARTED
