"""Programs that stand in front of ``mpirun`` and ``sshd`` for a driver that is not ours.

``ModelTrainer`` (SageMaker Python SDK 3) with source code replaces the image's entry point by a script and a driver of
its own, so this launcher never sees the job. Its MPI driver calls ``mpirun`` and ``/usr/sbin/sshd``; both lead to this
module (the image's recipes of ``open-mpi`` and ``ssh``). For every other caller they become the real program.

What the driver gets wrong, as read in sagemaker-train 1.27.0 and tried in containers:

- The SDK's local mode says that the network interface is ``ethwe``. No container has it, and mpirun refuses to start.
- mpirun is given the platform's name of this host, which the container does not know as its own, so it asks ssh.
- ``-np`` is the number of processes of one host, not of all.
- Between hosts it needs one private key that all of them hold. It would be everybody's who has the image.

Delete this file when the SDK's driver needs none of it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Mapping, Sequence

from trainworks_launcher import names
from trainworks_launcher.environment import interface_that_reaches, network_interfaces, read_manifest
from trainworks_launcher.masking import Masker
from trainworks_launcher.supervise import outcome_files, output
from trainworks_launcher.supervise.outcome import FAILED, Outcome

_DRIVER = "/mpi_driver.py"
"""How the path of the SDK's MPI driver ends; it starts both programs itself, so it is their parent."""

_HOST_KEYS = "/etc/ssh"
_VALUES_OF = {"-mca": 2, "--mca": 2, "-x": 1, "--host": 1, "-np": 1}
"""The options that the driver gives before the job's own, with the number of their values."""

NO_KEY = (
    "the SDK's own MPI driver cannot start on {hosts} hosts in this image: it needs a private key that all hosts have,"
    ' and this image holds none. Let the launcher start the job: add command="train" to SourceCode(entry_script=...);'
    " it makes keys for each job and reads MPI(process_count_per_node=...)"
)
"""Said where the driver would wait 300 seconds and then say that a host was not reachable."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Stand in for the program by whose name this was called; returns only for a refusal, or if the real one fails."""
    words = list(sys.argv if arguments is None else arguments)
    program = Path(words[0]).name
    manifest = read_manifest(os.environ, [])
    real = manifest.programs.get(program, "")
    if not real:
        sys.stderr.write(f"trainworks: this image has no {program}\n")
        return names.EXIT_NOT_FOUND
    environment = dict(os.environ)
    options = words[1:]
    if _called_by_the_driver():
        hosts = _hosts(environment)
        if program == "sshd" and len(hosts) > 1 and not list(Path(_HOST_KEYS).glob("ssh_host_*_key")):
            return _refuse(environment, hosts)
        if program == "mpirun":
            given = environment.get("SM_NETWORK_INTERFACE_NAME", "")
            missing = "" if given in network_interfaces() else given
            leader = environment.get("SM_MASTER_ADDR", "")
            options, notes = corrected(options, missing, interface_that_reaches(leader) if missing else "")
            for note in notes:
                output.log(note)
            environment.update(_known_by_its_name(environment, manifest.hostname_shim))
    try:
        os.execve(real, [real, *options], environment)
    except OSError as error:
        sys.stderr.write(f"trainworks: cannot execute {program} as {real!r}: {error.strerror or error}\n")
        return names.EXIT_NOT_FOUND if isinstance(error, FileNotFoundError) else names.EXIT_NOT_EXECUTABLE


def corrected(options: Sequence[str], missing: str, reaching: str) -> tuple[list[str], tuple[str, ...]]:
    """Return (mpirun's words, what to say about them).

    ``missing`` is the platform's network interface if it does not exist, else ""; it becomes ``reaching``, by which
    this host reaches the leader ("" if unknown: nothing is replaced). The number of ranks is not changed: a job must
    not get another size than its command line says, but its log says which size that is.
    """
    words = list(options)
    notes: dict[str, None] = {}
    ranks, slots = 0, 0
    index = 0
    while index < len(words) and words[index].startswith("-"):
        option, values = words[index], words[index + 1 : index + 1 + _VALUES_OF.get(words[index], 0)]
        last = index + len(values)
        index = last + 1
        if option == "-np" and values and values[0].isdigit():
            ranks = int(values[0])
        elif option == "--host" and values:
            slots = sum(_slots(host) for host in values[0].split(","))
        elif values and (values[0].endswith("_if_include") or values[0].startswith("NCCL_SOCKET_IFNAME=")):
            prefix, equals, given = words[last].rpartition("=")
            if reaching and given == missing:
                words[last] = f"{prefix}{equals}{reaching}"
                notes[f"the network interface {missing!r} does not exist on this host; mpirun gets {reaching!r}"] = None
    if 0 < ranks < slots:
        notes[
            f"the SDK's own MPI driver asks for {ranks} process(es), and the hosts have room for {slots}: it counts the"
            f" processes of one host only. The job's world has {ranks} process(es), and some hosts have none. With"
            ' SourceCode(..., command="train") the launcher starts them all'
        ] = None
    return words, tuple(notes)


def _slots(host: str) -> int:
    """Slots of an entry of ``--host``: the number behind its colon, else 1."""
    count = host.rpartition(":")[2]
    return int(count) if ":" in host and count.isdigit() else 1


def _called_by_the_driver() -> bool:
    """Return whether the parent process is the SDK's MPI driver."""
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return any(word.endswith(_DRIVER.encode()) for word in words)


def _hosts(environment: Mapping[str, str]) -> list[str]:
    """Return the job's hosts, as the SDK's script exports them."""
    try:
        hosts = json.loads(environment.get("SM_HOSTS", "[]"))
    except ValueError:
        return []
    return [str(host) for host in hosts] if isinstance(hosts, list) else []


def _known_by_its_name(environment: Mapping[str, str], shim: str) -> dict[str, str]:
    """Return variables that let mpirun find its own host among the job's, so that it needs no ssh to itself."""
    if not shim or not Path(shim).is_file() or not environment.get("SM_CURRENT_HOST"):
        return {}
    preload = f"{shim}:{environment['LD_PRELOAD']}" if environment.get("LD_PRELOAD") else shim
    return {"LD_PRELOAD": preload, names.HOSTNAME_VARIABLE: environment["SM_CURRENT_HOST"]}


def _refuse(environment: Mapping[str, str], hosts: Sequence[str]) -> int:
    """Say why the job cannot start, where the platform looks for it too, and end the driver, which would not notice."""
    text = NO_KEY.format(hosts=len(hosts))
    base = environment.get(names.BASE_DIRECTORY_VARIABLE) or names.BASE_DIRECTORY
    output.log(text)
    host = environment.get("SM_CURRENT_HOST", "")
    outcome_files.write(base, Outcome(FAILED, names.EXIT_NOT_STARTED, host, text), Masker(environment))
    os.kill(os.getppid(), signal.SIGTERM)
    return names.EXIT_NOT_STARTED
