"""What the modes share: programs that must exist, variables, the plan of a single process. Pure."""

from __future__ import annotations

from types import MappingProxyType
from typing import Mapping, NamedTuple, Sequence

from trainworks_launcher.contract import names
from trainworks_launcher.contract.errors import Problem, RefusalError
from trainworks_launcher.contract.modes import MODES
from trainworks_launcher.contract.names import ARGUMENT_LIMIT_BYTES
from trainworks_launcher.contract.origins import Origin
from trainworks_launcher.environment.entry_point import REQUIREMENTS, program_words
from trainworks_launcher.environment.manifest import Instance
from trainworks_launcher.job.arguments import ORDERS
from trainworks_launcher.job.job import Job
from trainworks_launcher.job.placement import missing_program
from trainworks_launcher.plan.plan import (
    NodePlan,
    Reason,
    control_of,
    network_variables,
    role_of,
    words_of,
)
from trainworks_launcher.plan.script_environment import exported_variables


class Variable(NamedTuple):
    """A variable that a mode gives to its processes.

    Attributes:
        name: Its name.
        value: Its value.
        why: One sentence.
        origin: Who decided.
        ours: Set even where the container sets another value: without it, the
            processes would not find each other.
    """

    name: str
    value: str
    why: str
    origin: Origin = Origin.PLATFORM
    ours: bool = False


def variables(job: Job, rows: Sequence[Variable]) -> tuple[Mapping[str, str], tuple[Reason, ...]]:
    """Return (variables to set, why).

    What the container's environment already sets is the user's choice and is kept.

    Raises RefusalError for one of ours that is too long for the kernel: what
    reads it looks for no file.
    """
    long = [
        row
        for row in rows
        if row.ours and len(row.name) + len(row.value) + 2 > ARGUMENT_LIMIT_BYTES
    ]
    if long:
        hosts = len(job.placement.distribution_hosts)
        limit = f"{ARGUMENT_LIMIT_BYTES:,} bytes of the kernel"
        problem = f"{long[0].name} names {hosts} hosts, which is more than the {limit}"
        raise RefusalError(
            [
                Problem(
                    problem,
                    f"mode {job.placement.mode}",
                    "use fewer hosts, or a mode that does not list them",
                )
            ]
        )
    kept = [row for row in rows if row.ours or row.name not in job.inherited]
    why = tuple(Reason(row.name, row.why, row.origin) for row in kept)
    return MappingProxyType({row.name: row.value for row in kept}), why


def counts_and_why(job: Job) -> str:
    """Return how many processes run on how many hosts, and who decided it."""
    hosts = len(job.placement.distribution_hosts)
    if len(set(job.placement.slots)) == 1:
        return (
            f"{job.placement.slots[0]} process(es) on each of {hosts} host(s):"
            f" {job.placement.processes_why}"
        )
    return f"{sum(job.placement.slots)} processes on {hosts} hosts: {job.placement.processes_why}"


def warn_of_library(job: Job, mode: str = "") -> tuple[str, ...]:
    """Return what will not work without a mode's own library, in the words of the image.

    () where it is there.

    A warning and no refusal: a job may install it with its requirements.txt.

    Args:
        job: The job.
        mode: The mode; default: the job's.
    """
    mode = mode or job.placement.mode
    library = MODES[mode].library
    manifest = job.environment.manifest
    if not library or library in manifest.components:
        return ()
    costs = [row.cost for row in manifest.missing if row.component == library]
    cost = costs[0] if costs else "the script must work without it, or install it"
    return (f"{mode} is asked for, and the image has no {library}: {cost}",)


def warn_without_gpu(job: Job) -> tuple[str, ...]:
    """Return what a script of smp or smddp needs on hosts without a GPU.

    () where there is one, or it is set.
    """
    kind, seen = job.placement.instance_type, job.environment.devices
    row = job.environment.manifest.instances.get(kind, Instance())
    if (
        seen.gpus
        or row.gpus
        or row.neuron_cores
        or job.inherited.get(names.EMULATION_VARIABLE) == "1"
    ):
        return ()
    hosts = f"{kind} has" if kind else "the hosts have"
    return (
        (
            f"{hosts} no GPU: a script that asks for CUDA needs {names.EMULATION_VARIABLE}=1 in the"
            " job's environment"
        ),
    )


def missing_package(job: Job, packages: tuple[str, ...]) -> list[Problem]:
    """Return a problem if the image has none of the Python packages, () if a
    requirements.txt may still install one.
    """
    components = job.environment.manifest.components
    if (
        any(name in components for name in packages)
        or job.program.code.requirements in job.program.code.entries
        or job.program.code.remote
    ):
        return []
    what = " or ".join(packages)
    advice = f"use an image that has {what}, or name it in a {REQUIREMENTS} beside the entry point"
    return [
        Problem(
            f"{job.placement.mode} needs {what}", f"image {job.environment.manifest.name!r}", advice
        )
    ]


def own_process(
    job: Job,
    command: Sequence[Reason],
    choices: Sequence[Reason],
    rows: Sequence[Variable] = (),
    warnings: Sequence[str] = (),
) -> NodePlan:
    """Plan a host that starts its one command by itself.

    Args:
        job: The job.
        command: The command line.
        choices: Why it is started so.
        rows: Variables of the mode.
        warnings: Warnings of the mode.
    """
    network, network_why = network_variables(job)
    more, more_why = variables(job, rows)
    argv = words_of(command)
    return NodePlan(
        mode=job.placement.mode,
        host=job.placement.host,
        role=role_of(job),
        needs=tuple(word for word in argv[:1] if word.startswith("/")),
        argv=argv,
        env=MappingProxyType({**exported_variables(job), **network, **more}),
        cwd=job.program.code.directory,
        code=job.program.code,
        requirements=job.program.requirements,
        control=control_of(job),
        limits=job.network.limits,
        why=(*choices, *command, *network_why, *more_why),
        warnings=(*job.warnings, *warnings),
    )


def programs_of_mode(job: Job) -> Mapping[str, str]:
    """Name -> absolute path of the programs that the mode starts with.

    ``job`` was refused if one is missing.
    """
    placement = job.placement
    wanted = MODES[placement.mode].programs_for(placement.served)
    return MappingProxyType({name: job.environment.programs[name] for name in wanted})


def program(job: Job, name: str, reason: str) -> str:
    """Return the absolute path of one more program. Raises RefusalError if it is missing."""
    path = job.environment.programs.get(name, "")
    if not path:
        raise RefusalError([missing_program(job.environment, name, reason)])
    return path


def shell_of(job: Job) -> str:
    """Return the shell for .sh files without the execute bit: bash where there is one, else sh."""
    available = job.environment.programs
    return available.get("bash") or available.get("sh") or "/bin/sh"


def command(job: Job) -> tuple[Reason, ...]:
    """Return the user's program with its arguments, as it is started on its own."""
    python = job.environment.programs.get("python", "python3")
    return explained_program(
        job, program_words(job.program.entry, job.program.code, python, shell_of(job))
    )


def explained_program(job: Job, words: tuple[str, ...], why: str = "") -> tuple[Reason, ...]:
    """Return the end of a command line: ``words`` start the user's program, the
    script's arguments follow.
    """
    program = Reason(
        "program", why or f"the entry point, a {job.program.entry.kind}", Origin.USER, words
    )
    given = job.environment.invocation.program
    sort = (
        "sorted by name"
        if job.program.order == ORDERS[0]
        else "in the order of the platform's file"
    )
    of = "as on the command line" if given else f"the job's hyperparameters, {sort}"
    arguments = Reason("arguments", of, Origin.USER, job.program.arguments)
    return (program, arguments) if job.program.arguments else (program,)


def rank_wrapper(job: Job, why: str, options: tuple[str, ...] = ()) -> Reason:
    """argv of rank.py, behind which the user's program stands."""
    environment = job.environment
    words = (
        environment.launcher_python,
        "-I",
        f"{environment.launcher_directory}/programs/rank.py",
        *options,
        "--",
    )
    return Reason("rank.py", why, words=words)
