"""Validate a job as one host sees it, or refuse it with all of its problems. Pure.

A job has three parts, each read by a function of its own file: the user's program (program.py),
the placement of ranks on hosts (placement.py) and the network between the hosts (network.py).
``make_job(environment, host)`` makes the job of another host (other_hosts.py), for example for
``train --plan --host algo-2``.
"""

from __future__ import annotations

from typing import Mapping, NamedTuple, Sequence

from trainworks_launcher.contract import names
from trainworks_launcher.contract.errors import Problem, RefusalError
from trainworks_launcher.contract.settings import Reader
from trainworks_launcher.environment.environment import Environment
from trainworks_launcher.job import idle, starters
from trainworks_launcher.job.network import Network, read_network
from trainworks_launcher.job.other_hosts import environment_of
from trainworks_launcher.job.placement import Placement, read_placement
from trainworks_launcher.job.program import Program, read_program


class Job(NamedTuple):
    """A validated job as one host sees it: the input of ``plan.modes.plan_host``.

    Attributes:
        environment: The host, its image and the files of the platform, as they were read.
        program: The user's program, its code and its arguments.
        placement: The mode, the hosts, and the processes of each host.
        network: The interface, the fabric, the ports and the time limits.
    """

    environment: Environment
    program: Program
    placement: Placement
    network: Network

    @property
    def inherited(self) -> Mapping[str, str]:
        """The container's environment variables; a value among them is the user's choice."""
        return self.environment.variables

    @property
    def warnings(self) -> tuple[str, ...]:
        """Lines to print before the start."""
        return (
            *self.environment.warnings,
            *self.program.warnings,
            *self.placement.warnings,
            *self.network.warnings,
            *idle.warnings(self.environment, self.program, self.placement),
        )


class JobRefusedError(RefusalError):
    """A refusal of a job by a host that knows the other hosts of the job.

    This host tells the other hosts of the refusal (``plan.plan.plan_of_refusal``).

    Attributes:
        placement: The hosts of the job; a wrong value is replaced by the nearest one.
        network: The port of the control channel, and the time limits.
    """

    def __init__(self, problems: Sequence[Problem], placement: Placement, network: Network) -> None:
        """Hold the problems, the placement and the network."""
        super().__init__(problems)
        self.placement = placement
        self.network = network


def make_job(environment: Environment, host: str = "") -> Job:
    """Validate the job of one host. Nothing is started or changed.

    Args:
        environment: The environment of this host.
        host: Name of the host that the job is made for, such as ``algo-2``; default: this host.

    Raises:
        JobRefusedError: The job has problems; the error holds all of them.
    """
    environment = environment_of(environment, host)
    program, program_problems = read_program(environment)
    placement, placement_problems = read_placement(environment, host)
    network, network_problems = read_network(environment, placement)
    problems = [
        *environment.problems,
        *program_problems,
        *placement_problems,
        *network_problems,
        *starters.check(environment, program, placement),
        *_check_settings(environment),
    ]
    if problems:
        raise JobRefusedError(problems, placement, network)
    return Job(environment, program, placement, network)


_SWITCHES = (
    names.LOG_PREFIX_VARIABLE,
    names.CLEAN_EXIT_VARIABLE,
    names.GIVE_UP_VARIABLE,
    names.SUMMARY_VARIABLE,
)
"""Variables with the value ``on`` or ``off``."""


def _check_settings(environment: Environment) -> list[Problem]:
    """Return the problems of the variables that set the launcher itself, and of a short secret."""
    # The reader notes a problem for each word that is not one of these; the words are not used.
    reader = Reader({}, environment.variables)
    for name in _SWITCHES:
        reader.word(name, ("on", "off"))
    reader.word(names.CHECK_VARIABLE, names.CHECK_LEVELS)
    reader.word(names.NUMA_VARIABLE, names.NUMA_BINDINGS)
    secret = environment.job_secret
    if secret and len(secret) < names.JOB_SECRET_MINIMUM:
        problem = f"a secret of {len(secret)} characters can be guessed"
        advice = (
            f"make one of at least {names.JOB_SECRET_MINIMUM},"
            " for example with: openssl rand -hex 32"
        )
        reader.refuse(problem, f"variable {names.JOB_SECRET_VARIABLE}, or its file", advice)
    return reader.problems


def describe(job: Job) -> str:
    """Return one line for the log: the mode, the host's rank, the processes and the program.

    For example ``mode mpi, host algo-1 (1 of 2), 8 processes on this host, 16 in all, train.py``.
    """
    placement = job.placement
    program = job.program.entry.name
    if placement.has_ssh_workers:
        hosts = len(placement.distribution_hosts)
        ranks = f"{placement.processes} process(es) on {hosts} host(s) that serve ssh"
        return f"mode {placement.mode}, started by host {placement.host}, {ranks}, {program}"
    host = f"host {placement.host} ({_host_rank_text(placement)})"
    return f"mode {placement.mode}, {host}, {_processes_text(placement)}, {program}"


def _host_rank_text(placement: Placement) -> str:
    """Return the host's rank among the hosts of the job, such as ``1 of 2``."""
    job_hosts = len(placement.hosts)
    hosts = len(placement.distribution_hosts)
    if placement.has_ranks:
        text = f"{placement.host_rank + 1} of {hosts}"
    else:
        text = f"takes no part in it, {hosts} do"
    if hosts < job_hosts:
        text += f", {job_hosts} in the job"
    return text


def _processes_text(placement: Placement) -> str:
    """Return the processes of the host and of the job: ``8 processes on this host, 16 in all``."""
    count = placement.processes_per_host
    text = "1 process on this host"
    if count != 1:
        text = f"{count} processes on this host"
    if placement.has_ranks and placement.processes > count:
        text += f", {placement.processes} in all"
    return text
