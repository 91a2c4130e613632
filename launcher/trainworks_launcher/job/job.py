"""From the environment to a validated job, or to one refusal with every problem in it. Pure.

A job has three parts, each read by its own function: ``program`` (what runs), ``placement`` (where
it runs) and ``network`` (how the hosts reach each other). A job is made for one host.
``make_job(environment, host)`` makes it for another host, with what is known about that one.
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
    """A validated job as seen from one host: everything that a mode needs to plan that host.

    Attributes:
        environment: What the launcher knows about the host, the image and the platform's files.
        program: What runs.
        placement: Where it runs.
        network: How the hosts reach each other.
    """

    environment: Environment
    program: Program
    placement: Placement
    network: Network

    @property
    def inherited(self) -> Mapping[str, str]:
        """The container's environment; a value in it is the user's choice."""
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
    """A refusal by a host that knows which job it belongs to.

    Attributes:
        placement: Where the job runs, as far as it could be read.
        network: How this host reaches the other hosts, to tell them.
    """

    def __init__(self, problems: Sequence[Problem], placement: Placement, network: Network) -> None:
        """Keep all three."""
        super().__init__(problems)
        self.placement = placement
        self.network = network


def make_job(environment: Environment, host: str = "") -> Job:
    """Validate everything and make the job of one host. Nothing is started or changed.

    Args:
        environment: What was read on this host.
        host: Name of the host; default: this host.

    Raises:
        JobRefusedError: Something is wrong. It has all problems.
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


def _check_settings(environment: Environment) -> list[Problem]:
    """Check the settings of the launcher itself: the form of the log, and a
    secret that can be guessed.
    """
    reader = Reader({}, environment.variables)
    for name in (
        names.LOG_PREFIX_VARIABLE,
        names.CLEAN_EXIT_VARIABLE,
        names.GIVE_UP_VARIABLE,
        names.SUMMARY_VARIABLE,
    ):
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
    """Return one line for the log: the mode, this host's place in it, the
    processes, the program.
    """
    placement = job.placement
    hosts, part = len(placement.hosts), len(placement.distribution_hosts)
    if placement.served:
        ranks = f"{placement.processes} process(es) on {part} host(s) that serve ssh"
        return (
            f"mode {placement.mode}, started by host {placement.host}, {ranks},"
            f" {job.program.entry.name}"
        )
    place = (
        f"{placement.host_rank + 1} of {part}"
        if placement.takes_part
        else f"takes no part in it, {part} do"
    )
    if part < hosts:
        place += f", {hosts} in the job"
    count = placement.processes_per_host
    total = (
        f", {placement.processes} in all"
        if placement.takes_part and placement.processes > count
        else ""
    )
    processes = f"{count} process{'' if count == 1 else 'es'} on this host{total}"
    return (
        f"mode {placement.mode}, host {placement.host} ({place}), {processes},"
        f" {job.program.entry.name}"
    )
