"""Helpers of the modes: programs, variables, warnings, and the plan of a single command. Pure."""

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
    """A variable that a mode sets for its processes.

    Attributes:
        name: Such as ``DMLC_ROLE``.
        value: Such as ``worker``.
        why: Reason for the value, one sentence.
        origin: The user, the platform, the image or a default.
        ours: Whether the variable replaces a value of the container, because the processes need
            the launcher's value to connect.
    """

    name: str
    value: str
    why: str
    origin: Origin = Origin.PLATFORM
    ours: bool = False


def variables(job: Job, rows: Sequence[Variable]) -> tuple[Mapping[str, str], tuple[Reason, ...]]:
    """Return (variables to set, reasons).

    A variable that the container sets is the user's choice, and stays as it is.

    Raises RefusalError if a variable with ``ours`` is longer than the kernel takes. Other long
    values go to a file, but the libraries that read these variables read no file.
    """
    values: dict[str, str] = {}
    reasons = []
    for row in rows:
        if row.ours:
            _check_size(job, row)
        elif row.name in job.inherited:
            continue
        values[row.name] = row.value
        reasons.append(Reason(row.name, row.why, row.origin))
    return MappingProxyType(values), tuple(reasons)


def _check_size(job: Job, variable: Variable) -> None:
    """Refuse ``NAME=value`` with more bytes than the kernel takes; raises RefusalError."""
    # "=" and the NUL byte at the end count, too.
    size = len(variable.name) + len(variable.value) + 2
    if size <= ARGUMENT_LIMIT_BYTES:
        return
    hosts = len(job.placement.distribution_hosts)
    limit = f"{ARGUMENT_LIMIT_BYTES:,} bytes of the kernel"
    problem = Problem(
        f"{variable.name} names {hosts} hosts, which is more than the {limit}",
        f"mode {job.placement.mode}",
        "use fewer hosts, or a mode that does not list them",
    )
    raise RefusalError([problem])


def counts_and_why(job: Job) -> str:
    """Return the processes of the hosts, such as ``8 process(es) on each of 2 host(s): REASON``."""
    slots, why = job.placement.slots, job.placement.processes_why
    hosts = len(job.placement.distribution_hosts)
    if len(set(slots)) == 1:
        return f"{slots[0]} process(es) on each of {hosts} host(s): {why}"
    return f"{sum(slots)} processes on {hosts} hosts: {why}"


def warn_of_library(job: Job, mode: str = "") -> tuple[str, ...]:
    """Return a warning if the image has no library of the mode, such as smddp; else ``()``.

    The job is not refused, because its requirements.txt may install the library.

    Args:
        job: The job.
        mode: The mode; default: the job's.
    """
    mode = mode or job.placement.mode
    library = MODES[mode].library
    manifest = job.environment.manifest
    if not library or library in manifest.components:
        return ()
    cost = "the script must work without it, or install it"
    for row in manifest.missing:
        if row.component == library:
            cost = row.cost
            break
    return (f"{mode} is asked for, and the image has no {library}: {cost}",)


def warn_without_gpu(job: Job) -> tuple[str, ...]:
    """Return a warning for a script of smp or smddp on hosts without GPUs; else ``()``.

    Neuron cores count as GPUs, and so does the emulation that the job switches on.
    """
    instance_type = job.placement.instance_type
    row = job.environment.manifest.instances.get(instance_type, Instance())
    gpus = job.environment.devices.gpus or row.gpus
    is_emulated = job.inherited.get(names.EMULATION_VARIABLE) == "1"
    if gpus or row.neuron_cores or is_emulated:
        return ()
    hosts = "the hosts have"
    if instance_type:
        hosts = f"{instance_type} has"
    warning = (
        f"{hosts} no GPU: a script that asks for CUDA needs {names.EMULATION_VARIABLE}=1 in the"
        " job's environment"
    )
    return (warning,)


def missing_package(job: Job, packages: tuple[str, ...]) -> list[Problem]:
    """Return a problem if the image has none of these Python packages.

    The job's requirements.txt may still install one: then there is no problem.
    """
    components = job.environment.manifest.components
    code = job.program.code
    if any(name in components for name in packages):
        return []
    # Code that is not fetched yet may have a requirements.txt.
    if code.remote or code.requirements in code.entries:
        return []
    alternatives = " or ".join(packages)
    problem = f"{job.placement.mode} needs {alternatives}"
    where = f"image {job.environment.manifest.name!r}"
    advice = (
        f"use an image that has {alternatives},"
        f" or name it in a {REQUIREMENTS} beside the entry point"
    )
    return [Problem(problem, where, advice)]


def own_process(
    job: Job,
    command: Sequence[Reason],
    choices: Sequence[Reason],
    rows: Sequence[Variable] = (),
    warnings: Sequence[str] = (),
) -> NodePlan:
    """Plan a host that starts one command by itself, such as the user's program.

    Args:
        job: The job.
        command: The command line; empty on a host that runs only auxiliaries.
        choices: Reasons of the mode for this command.
        rows: Variables of the mode.
        warnings: Warnings of the mode.

    Raises:
        RefusalError: A variable is longer than the kernel takes.
    """
    network, network_why = network_variables(job)
    mode_variables, mode_why = variables(job, rows)
    argv = words_of(command)
    needs: tuple[str, ...] = ()
    # A relative program is in the user's code, which may not have been fetched yet.
    if argv and argv[0].startswith("/"):
        needs = (argv[0],)
    return NodePlan(
        mode=job.placement.mode,
        host=job.placement.host,
        role=role_of(job),
        needs=needs,
        argv=argv,
        env=MappingProxyType({**exported_variables(job), **network, **mode_variables}),
        cwd=job.program.code.directory,
        code=job.program.code,
        requirements=job.program.requirements,
        control=control_of(job),
        limits=job.network.limits,
        why=(*choices, *command, *network_why, *mode_why),
        warnings=(*job.warnings, *warnings),
    )


def programs_of_mode(job: Job) -> Mapping[str, str]:
    """Return name -> absolute path of the programs of the mode, such as torchrun.

    All of them exist, because placement.py refuses a job without them. Raises KeyError otherwise.
    """
    placement = job.placement
    required = MODES[placement.mode].programs_for(placement.has_ssh_workers)
    return MappingProxyType({name: job.environment.programs[name] for name in required})


def program(job: Job, name: str, reason: str) -> str:
    """Return the absolute path of another program, such as python.

    Raises RefusalError for a missing program. reason: a clause about the need, for the refusal.
    """
    path = job.environment.programs.get(name, "")
    if not path:
        raise RefusalError([missing_program(job.environment, name, reason)])
    return path


def shell_of(job: Job) -> str:
    """Return the shell for .sh files without the execute bit: bash if the image has it, else sh."""
    available = job.environment.programs
    return available.get("bash") or available.get("sh") or "/bin/sh"


def command(job: Job) -> tuple[Reason, ...]:
    """Return the command line of the user's program with its arguments."""
    python = job.environment.programs.get("python", "python3")
    program = job.program
    words = program_words(program.entry, program.code, python, shell_of(job))
    return explained_program(job, words)


def explained_program(job: Job, words: tuple[str, ...], why: str = "") -> tuple[Reason, ...]:
    """Return the end of a command line: the user's program, and the program's arguments.

    Args:
        job: The job.
        words: The words that start the program, such as ``("/usr/bin/python3", "train.py")``.
        why: Reason for these words; default: the kind of the entry point.
    """
    why = why or f"the entry point, a {job.program.entry.kind}"
    program = Reason("program", why, Origin.USER, words)
    if not job.program.arguments:
        return (program,)
    if job.environment.invocation.program:
        arguments_why = "as on the command line"
    elif job.program.order == ORDERS[0]:
        arguments_why = "the job's hyperparameters, sorted by name"
    else:
        arguments_why = "the job's hyperparameters, in the order of the platform's file"
    arguments = Reason("arguments", arguments_why, Origin.USER, job.program.arguments)
    return (program, arguments)


def rank_wrapper(job: Job, why: str, options: tuple[str, ...] = ()) -> Reason:
    """Return the command line of programs/rank.py, which starts the user's program as a rank.

    Args:
        job: The job.
        why: Reason for rank.py in this mode.
        options: Options of rank.py, such as ``("--size", "16")``.
    """
    environment = job.environment
    words = (
        environment.launcher_python,
        "-I",
        f"{environment.launcher_directory}/programs/rank.py",
        *options,
        "--",
    )
    return Reason("rank.py", why, words=words)
