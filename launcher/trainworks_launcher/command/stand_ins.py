"""Stand-ins for ``mpirun`` and ``sshd``, for programs that start a job without this launcher.

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

_NUMBER_OF_VALUES = {"-mca": 2, "--mca": 2, "-x": 1, "--host": 1, "-np": 1}
"""The options that the driver gives before the job's own, with the number of their values."""

_MIN_AGENTS = 128
"""Agents that run at once, at least; mpirun's own default."""

NO_KEY = (
    "the SDK's own MPI driver cannot start on {hosts} hosts in this image: it needs a private key"
    " that all hosts have, and this image holds none. Let the launcher start the job: add"
    ' command="train" to SourceCode(entry_script=...); it needs no keys, and reads'
    " MPI(process_count_per_node=...)"
)
"""Said where the driver would wait 300 seconds and then say that a host was not reachable."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Become the real program by whose name this was called, with corrected words and variables.

    Returns only for a refusal, or if the real program cannot be executed; then a line says why.

    Args:
        arguments: The name and the words; default: those of this process.

    Returns:
        127 or 126, as a shell; ``names.EXIT_NOT_STARTED`` for a refusal.
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
        hosts = _read_hosts(environment)
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
            environment.update(_set_own_name(environment, manifest.hostname_shim, name))
    elif program == "sshd":
        options = [*_make_host_key(options, manifest.programs.get("ssh-keygen", "")), *options]
    elif Path(environment.get(names.RUNTIME_DIRECTORY_VARIABLE) or "/dev/null", SOCKET).exists():
        dialect = dialect_of(manifest.components.get(names.OPEN_MPI, ""))
        environment = {**_variables_for_agents(environment, dialect), **environment}
    elif environment.get(names.MPI_HOSTFILE_VARIABLE):
        dialect = dialect_of(manifest.components.get(names.OPEN_MPI, ""))
        environment.update(own_names(environment, dialect))
        environment.update(
            _variables_for_ssh(environment, dialect, manifest.programs.get("ssh", ""))
        )
        name = _find_own_name(environment[names.MPI_HOSTFILE_VARIABLE])
        environment.update(_set_own_name(environment, manifest.hostname_shim, name))
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
    """Correct the words of the SDK's MPI driver for mpirun.

    The number of ranks is not changed: a job must not get another size than its command line says,
    but a note says which size that is.

    Args:
        options: mpirun's words, the driver's own first.
        missing: The platform's network interface, if this host does not have it; else ``""``.
        reaching: The interface that reaches the leader, which replaces the missing one; ``""`` if
            it is not known: nothing is replaced.

    Returns:
        The words, and notes for the log.
    """
    words = list(options)
    notes: dict[str, None] = {}
    ranks, slots = 0, 0
    index = 0
    # The driver's options end at the first word that is not one: the program.
    while index < len(words) and words[index].startswith("-"):
        option = words[index]
        following = index + 1 + _NUMBER_OF_VALUES.get(option, 0)
        values = words[index + 1 : following]
        # Of --mca NAME VALUE and -x NAME=VALUE the last word has the value.
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
    if not colon or not count.isdigit():
        return 1
    return int(count)


def without_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without those by which mpirun would see itself as part of Slurm's step.

    mpirun would ask srun, which is not in the image, to start its daemons, and load plugins that
    the image's Open MPI does not have. If srun is on PATH, mpirun may ask it: then fewer variables
    are left out.
    """
    if "SLURM_JOB_ID" not in environment:
        return dict(environment)
    hidden = slurm.HIDDEN["mpirun"]
    if shutil.which("srun", path=environment.get("PATH")):
        hidden = slurm.HIDDEN["ranks"]
    return {name: value for name, value in environment.items() if not name.startswith(hidden)}


def own_names(environment: Mapping[str, str], dialect: Dialect) -> dict[str, str]:
    """Return a Kubernetes operator's parameters of mpirun, by the names that this Open MPI reads.

    These are parameters of the run-time with an old name, which Open MPI 5 would ignore. A variable
    that is set already is left out.

    Args:
        environment: The container's variables, for example ``OMPI_MCA_plm_rsh_args``.
        dialect: The spelling of the installed Open MPI.

    Returns:
        Variable -> value, to be added.
    """
    renamed: dict[str, str] = {}
    for name, value in environment.items():
        if not name.startswith(_PARAMETER):
            continue
        old = name[len(_PARAMETER) :]
        new = dialect.canonical(old)
        if old and new != old and new.startswith(dialect.runtime_prefixes):
            renamed.setdefault(variable_of(dialect, new), value)
    return {name: value for name, value in renamed.items() if name not in environment}


def variable_of(dialect: Dialect, parameter: str) -> str:
    """Return the environment variable of a parameter of the run-time.

    For example ``PRTE_MCA_plm_ssh_agent`` for ``plm_ssh_agent``, in Open MPI 5.
    """
    prefix = "PRTE_MCA_" if dialect.own_classes else _PARAMETER
    return f"{prefix}{parameter}"


def _variables_for_agents(environment: Mapping[str, str], dialect: Dialect) -> dict[str, str]:
    """Return variables by which mpirun reaches the other hosts of a job through their launchers."""
    parameters = {
        "plm_rsh_agent": _AGENT,
        # Only the first host may start something on the others.
        "plm_rsh_no_tree_spawn": "1",
        # An agent lives as long as its daemon, so all of them run at once.
        "plm_rsh_num_concurrent": str(max(len(_read_hosts(environment)), _MIN_AGENTS)),
    }
    # mpirun writes the commands of its daemons for this shell, with which the launchers run them.
    variables = {"SHELL": "/bin/sh"}
    for name, value in parameters.items():
        variables[variable_of(dialect, dialect.canonical(name))] = value
    return variables


def _variables_for_ssh(
    environment: Mapping[str, str], dialect: Dialect, ssh: str
) -> dict[str, str]:
    """Return variables by which mpirun reaches the workers with the mounted keys.

    Writes the files of the ssh client to a new private directory, which is not removed. Raises
    OSError if they cannot be written.

    Args:
        environment: The container's variables.
        dialect: The spelling of the installed Open MPI.
        ssh: Path of the ssh client; ``""`` for none.

    Returns:
        {} if there are no keys or no client, or if an agent is set already.
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
        # The workers do not have these files: mpirun reaches each of them itself.
        variable_of(dialect, dialect.canonical("plm_rsh_no_tree_spawn")): "1",
    }


def _make_host_key(options: Sequence[str], keygen: str) -> Sequence[str]:
    """Make or copy a host key for an sshd that has none, and log that.

    Args:
        options: sshd's words.
        keygen: Path of ssh-keygen.

    Returns:
        Options for sshd; () if it has a key. Also if none can be made: then sshd reports that.
    """
    try:
        key_options, note = mounted_keys.server_options(options, keygen)
    except (OSError, RefusalError) as error:
        reason = error.problems[0].what if isinstance(error, RefusalError) else error
        key_options, note = [], f"sshd gets no host key: {reason}"
    if note:
        output.log(note)
    return key_options


def _read_hosts(environment: Mapping[str, str]) -> list[str]:
    """Return the job's hosts, as the SDK's script exports them in SM_HOSTS; [] if unreadable."""
    try:
        hosts = json.loads(environment.get("SM_HOSTS", "[]"))
    except ValueError:
        return []
    if not isinstance(hosts, list):
        return []
    return [str(host) for host in hosts]


def _find_own_name(hostfile: str) -> str:
    """Return the name of this host in a hostfile: the launcher pod may be a worker, too.

    ``""`` if the file does not have this host, or cannot be read: mpirun reports that.
    """
    own = os.uname().nodename.split(".")[0]
    for line in text_of(hostfile).splitlines():
        # For example: worker-0.job.default.svc slots=8
        words = line.split()
        if words and words[0].split(".")[0] == own:
            return words[0]
    return ""


def _set_own_name(environment: Mapping[str, str], shim: str, name: str) -> dict[str, str]:
    """Return variables by which mpirun finds its own host among the job's.

    Without them mpirun would need ssh to its own host.

    Args:
        environment: The container's variables.
        shim: Path of the library that answers gethostname(); ``""`` for none.
        name: Name of this host in the job; ``""`` if it is not known.

    Returns:
        {} without a library or a name.
    """
    if not shim or not Path(shim).is_file() or not name:
        return {}
    preload = shim
    if environment.get("LD_PRELOAD"):
        preload = f"{shim}:{environment['LD_PRELOAD']}"
    return {"LD_PRELOAD": preload, names.HOSTNAME_VARIABLE: name}


def _refuse(environment: Mapping[str, str], hosts: Sequence[str]) -> int:
    """Log why the job cannot start, write the outcome, and end the SDK's driver (SIGTERM).

    The driver, the parent of this process, would not notice.

    Args:
        environment: The container's variables.
        hosts: The hosts of the job.

    Returns:
        ``names.EXIT_NOT_STARTED``.
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
