"""Plan mode mpi: the leader runs mpirun, which starts the ranks of every host.

mpirun starts its daemon on another host through the launcher of that host (programs/agent.py), not
through ssh. Each rank starts through programs/rank.py, which gives the rank the environment of its
own host: the variables in the environment file that the host's launcher wrote, then the variables
of mpirun and of the user's ``-x``. So the leader's host-specific values reach no other host, and no
value is too long for a command line.

Some platforms start no launcher on the workers, which only serve ssh, for example the Kubernetes
MPI operator (``Placement.has_ssh_workers``). The one launcher then starts mpirun, which gives the
ranks the launcher's variables with ``-x``, without the host-specific ones.

Sources of the MCA parameters: the reference of Open MPI (``ompi_info --all``,
``prte_info --all``), and the command line of sagemaker-training, for which jobs were tuned.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Collection, Mapping, NamedTuple, Sequence

from trainworks_launcher.contract import names
from trainworks_launcher.contract.errors import Problem, RefusalError
from trainworks_launcher.contract.origins import Origin
from trainworks_launcher.environment.entry_point import program_words
from trainworks_launcher.job.job import Job
from trainworks_launcher.mpirun.dialects import Dialect, dialect_of
from trainworks_launcher.mpirun.flags import (
    Setting,
    UserOptions,
    merge_parameters,
    parse_user_options,
)
from trainworks_launcher.plan.modes import common
from trainworks_launcher.plan.modes.common import Variable
from trainworks_launcher.plan.plan import (
    NodePlan,
    Reason,
    Shell,
    control_of,
    network_variables,
    role_of,
    words_of,
)
from trainworks_launcher.plan.script_environment import HOST_SPECIFIC, exported_variables

_FROM_USER = "from the job's custom_mpi_options"

_UNKNOWN_VERSION = ""
"""The version for ``dialect_of`` where an image has no manifest: the names of Open MPI 4, which
Open MPI 5 still accepts.
"""

_AGENTS_AT_ONCE = 32
"""Number of hosts that mpirun contacts at the same time through their launchers."""

_SSH_CLIENTS_AT_ONCE = 128
"""The least limit of ssh clients at the same time: the default of Open MPI."""

_INTERFACE_VARIABLE = "OMPI_MCA_btl_tcp_if_include"
_INTERFACE_PARAMETERS = frozenset(("btl_tcp_if_include", "btl_tcp_if_exclude"))

_NOT_HANDED_ON = frozenset((names.HOSTNAME_VARIABLE, "LD_PRELOAD", "HOME"))
"""Variables with the launcher's own value, besides HOST_SPECIFIC: not for ranks of other hosts."""


def plan(job: Job) -> NodePlan:
    """Plan the job's host. Raises RefusalError for contradictory options."""
    return plan_ranks(job)


def plan_ranks(
    job: Job,
    variables: Sequence[Variable] = (),
    before: Sequence[Reason] = (),
    warnings: Sequence[str] = (),
) -> NodePlan:
    """Plan a host of a job in which mpirun starts the ranks.

    Args:
        job: The job.
        variables: Variables of the ranks besides those of every mode.
        before: Words between rank.py and the user's program, such as smddprun.
        warnings: Warnings of the mode.

    Returns:
        The plan. It has no command line on a host where mpirun of the leader starts the ranks.

    Raises:
        RefusalError: The user's options contradict each other, or requirements would be missing on
            hosts without a launcher.
    """
    # Whether the workers only serve ssh, without a launcher of their own.
    has_ssh_workers = job.placement.has_ssh_workers
    programs = common.programs_of_mode(job)
    network, network_why = network_variables(job)
    where = job.placement.mpi_options_where
    version = job.environment.manifest.components.get(names.OPEN_MPI, _UNKNOWN_VERSION)
    dialect = dialect_of(version)
    user, problems = parse_user_options(job.placement.mpi_options, dialect, where)
    rows = (*variables, *_interface_variable(job, user, dialect))
    mode_variables, mode_why = common.variables(job, rows)
    parameters, left_out, parameter_problems = merge_parameters(
        _parameters(job, dialect), user, dialect, job.inherited, where
    )
    if has_ssh_workers and job.program.requirements:
        problem = "requirements are not installed on the workers"
        advice = "put them into the image (build.py extend), or install them before mpirun"
        problems.append(Problem(problem, job.program.code.requirements, advice))
    problems += parameter_problems
    if problems:
        raise RefusalError(problems)

    host_specific = {*HOST_SPECIFIC, *network, *mode_variables}
    exports = _choose_exports(job, user, host_specific)
    env = MappingProxyType({**exported_variables(job), **network, **mode_variables})
    hidden: tuple[str, ...] = ()
    if _INTERFACE_VARIABLE in env:
        # mpirun would give the leader's value to the ranks of every host.
        hidden = (_INTERFACE_VARIABLE,)

    line = [Reason("mpirun", "starts the ranks of every host", Origin.IMAGE, (programs["mpirun"],))]
    line += _options(job, user)
    for setting in parameters:
        line.append(_parameter(setting, dialect))
    line += exports.reasons.values()
    if has_ssh_workers:
        line.append(_handed_on(env, exports.reasons))
    if user.rest:
        line.append(Reason("other options", _FROM_USER, Origin.USER, user.rest))
    line.append(_rank_wrapper(job, exports.reasons))
    line += [*before, *_program(job)]

    argv: tuple[str, ...] = ()
    if job.placement.host == job.placement.leader or has_ssh_workers:
        argv = words_of(line)
        why = list(line)
        for option, reason in (*left_out, *exports.left_out):
            why.append(Reason(f"left out {option}", reason, Origin.USER))
    else:
        no_command = "mpirun on the leader starts the ranks of this host through this launcher"
        why = [Reason("no command", no_command)]
    shell = None
    if has_ssh_workers:
        shell = Shell(programs["ssh"])
    return NodePlan(
        mode=job.placement.mode,
        host=job.placement.host,
        role=role_of(job),
        needs=tuple(programs.values()),
        argv=argv,
        env=env,
        cwd=job.program.code.directory,
        code=job.program.code,
        requirements=job.program.requirements,
        processes=job.placement.processes,
        hidden=hidden,
        ranks_by="mpirun",
        control=control_of(job),
        shell=shell,
        limits=job.network.limits,
        why=(*why, *network_why, *mode_why),
        warnings=(*job.warnings, *warnings, *user.warnings, *exports.warnings),
    )


def _reaches_hosts(job: Job) -> bool:
    """Return whether mpirun starts ranks on other hosts."""
    return len(job.placement.distribution_hosts) > 1 or job.placement.has_ssh_workers


def _interface_variable(job: Job, user: UserOptions, dialect: Dialect) -> tuple[Variable, ...]:
    """Return the variable that limits Open MPI to the interface of this host towards the others.

    Without this variable Open MPI uses every interface with an address of a subnet that another
    host also has, even a bridge for containers that reaches no other host. Each host has its own
    value, because its interface may have another name.

    ``()`` where the user or the platform chooses the interface, where the host has only one, and
    for a job of one host.
    """
    devices = job.environment.devices
    if job.placement.has_ssh_workers or not _reaches_hosts(job) or not devices.routed:
        return ()
    is_chosen_by_platform = bool(job.environment.hosts.interface)
    interfaces = [name for name in devices.interfaces if name != "lo"]
    if is_chosen_by_platform or len(interfaces) < 2:
        return ()
    user_parameters = {dialect.canonical(parameter.name) for parameter in user.parameters}
    for name in _INTERFACE_PARAMETERS:
        if name in user_parameters or f"OMPI_MCA_{name}" in job.inherited:
            return ()
    why = "MPI's traffic uses the interface of this host that reaches the others, and no other one"
    return (Variable(_INTERFACE_VARIABLE, devices.routed, why),)


def _rank_wrapper(job: Job, exports: Mapping[str, Reason]) -> Reason:
    """Return the words that start rank.py, which stands before the user's program, with a reason.

    A ``Reason`` holds the words of one part of mpirun's command line (``words``) and why they are
    there, for ``train --plan``.

    rank.py reads the environment file that the launcher of its host wrote, and replaces the
    variables that mpirun brought from the leader. ``--keep NAME,NAME`` lists variables that it
    leaves as mpirun brought them. ``--size`` is the number of ranks of the job.

    Args:
        job: The job.
        exports: Variable of the user's ``-x`` -> its words for mpirun. The host's own values do not
            replace these variables.
    """
    size = ("--size", str(job.placement.processes))
    if job.placement.has_ssh_workers:
        # The platform's workers only serve ssh: no launcher wrote an environment file there, so
        # that there is nothing to keep.
        return common.rank_wrapper(job, "refuses a job with fewer ranks than planned", size)
    why = "gives each rank the environment of its own host"
    return common.rank_wrapper(job, why, (*size, "--keep", ",".join(exports)))


def _handed_on(env: Mapping[str, str], exports: Mapping[str, Reason]) -> Reason:
    """Return ``-x NAME`` for each variable of this launcher that ranks on other hosts need.

    mpirun reads the values from its own environment.

    Args:
        env: The variables of the plan.
        exports: Variable of the user's ``-x`` -> its words. They are in the command line already.
    """
    words: list[str] = []
    for name in sorted(env.keys() - exports.keys() - HOST_SPECIFIC - _NOT_HANDED_ON):
        words += ("-x", name)
    why = "no launcher runs on the workers: mpirun gives the ranks this one's variables"
    return Reason("-x NAME...", why, words=tuple(words))


def _parameters(job: Job, dialect: Dialect) -> tuple[Setting, ...]:
    """Return the launcher's MCA parameters, by the names of the installed Open MPI.

    A job in which mpirun reaches no other host has only those of any job.
    """
    settings = _parameters_of_any_job(dialect)
    if not _reaches_hosts(job):
        return tuple(settings)
    interface = job.network.interface
    if interface:
        why = f"bind MPI's traffic to this interface: {job.network.interface_why}"
        for name in ("btl_tcp_if_include", dialect.canonical("oob_tcp_if_include")):
            settings.append(Setting(name, interface, Origin.PLATFORM, why))
    host, hostname = job.placement.host, job.environment.hostname
    has_own_name = hostname == host or job.environment.hostname_shim
    if dialect.major >= 5 and not has_own_name:
        why = f"this host calls itself {hostname}: by its address mpirun knows that it is {host}"
        settings.append(Setting("prte_do_not_resolve", "0", Origin.PLATFORM, why))
    if any(_has_domain(name) for name in job.placement.hosts):
        name = dialect.canonical("orte_keep_fqdn_hostnames")
        why = "hosts are called by names with a domain"
        settings.append(Setting(name, "1", Origin.PLATFORM, why))
    why = (
        "a peer of a rank that died waits before it aborts:"
        " the daemon of that rank tells of its end first"
    )
    settings.append(Setting("opal_abort_delay", "1", Origin.DEFAULT, why))
    settings += _parameters_of_agent(job, dialect)
    return tuple(settings)


def _has_domain(host: str) -> bool:
    """Return whether a host's name has a domain, as ``node1.cluster``; not for ``10.0.0.1``."""
    is_address = host.replace(".", "").isdigit()
    return "." in host and not is_address


def _parameters_of_any_job(dialect: Dialect) -> list[Setting]:
    """Return the parameters that every job has. Some have no counterpart in Open MPI 5."""
    pml_why = "plain point-to-point messages; NCCL has its own way to the fabric"
    copy_why = "a container may not read another process's memory, and each try is logged"
    btl_why = "without verbs devices this transport only prints warnings"
    abort_why = "a rank that fails ends the job, not only itself"
    pml = Setting("pml", "ob1", Origin.DEFAULT, pml_why)
    if dialect.major >= 5:
        return [pml, Setting("smsc", "^cma", Origin.DEFAULT, copy_why)]
    return [
        pml,
        Setting("btl", "^openib", Origin.DEFAULT, btl_why),
        Setting("orte_abort_on_non_zero_status", "1", Origin.DEFAULT, abort_why),
        Setting("btl_vader_single_copy_mechanism", "none", Origin.DEFAULT, copy_why),
    ]


def _parameters_of_agent(job: Job, dialect: Dialect) -> list[Setting]:
    """Return the parameters by which mpirun starts its daemons on the other hosts."""
    environment = job.environment
    agent = f"{environment.launcher_python} -I {environment.launcher_directory}/programs/agent.py"
    agent_why = "ask the launcher of each host to start it"
    concurrent = _AGENTS_AT_ONCE
    if job.placement.has_ssh_workers:
        agent_why = "ssh with the keys that the platform mounted"
        # An ssh client ends with the daemon of Open MPI 5; the agent of a launcher ends at once.
        # So all clients run at once; mpirun's own default is the least.
        concurrent = max(len(job.placement.distribution_hosts), _SSH_CLIENTS_AT_ONCE)
    tree_why = "only the leader may start something, so it contacts every host itself"
    concurrent_why = "contact so many hosts at once"
    settings = [
        Setting("plm_rsh_agent", agent, Origin.PLATFORM, agent_why),
        Setting("plm_rsh_no_tree_spawn", "1", Origin.PLATFORM, tree_why),
        Setting("plm_rsh_num_concurrent", str(concurrent), Origin.PLATFORM, concurrent_why),
    ]
    return [setting._replace(name=dialect.canonical(setting.name)) for setting in settings]


def _parameter(setting: Setting, dialect: Dialect) -> Reason:
    """Return the option of an MCA parameter, such as ``--mca pml ob1``."""
    option = setting.option or dialect.option(setting.name)
    words = (option, setting.name, setting.value)
    return Reason(f"{option} {setting.name}", setting.why, setting.origin, words)


def _options(job: Job, user: UserOptions) -> list[Reason]:
    """Return mpirun's options that are no MCA parameters: hosts, processes, binding, mapping.

    An option of the user replaces the launcher's.
    """
    hosts = job.placement.distribution_hosts
    if not _reaches_hosts(job):
        # The platform's name of a single host may not resolve, and mpirun would try ssh.
        hosts = ("localhost",)
    slots = ",".join(f"{host}:{count}" for host, count in zip(hosts, job.placement.slots))
    slots_why = common.counts_and_why(job)
    processes = str(job.placement.processes)
    processes_origin = job.placement.processes_origin
    options = dict(_DEFAULT_OPTIONS)
    for option in user.left_out:
        options.pop(option, None)
    for option, values in user.keyed:
        words = (f"--{option}", *values)
        options[option] = Reason(f"--{option}", _FROM_USER, Origin.USER, words)
    return [
        Reason("--host", slots_why, Origin.PLATFORM, ("--host", slots)),
        Reason("-np", "processes in all", processes_origin, ("-np", processes)),
        *options.values(),
    ]


_DEFAULT_OPTIONS = {
    "allow-run-as-root": Reason(
        "--allow-run-as-root",
        "containers run as root, and mpirun refuses root without it",
        words=("--allow-run-as-root",),
    ),
    "bind-to": Reason(
        "--bind-to",
        "data loaders need the cores of the whole host, so no process is pinned",
        words=("--bind-to", "none"),
    ),
    "map-by": Reason(
        "--map-by",
        "fill one host before the next, so that neighbouring ranks share a host",
        words=("--map-by", "slot"),
    ),
}
"""mpirun's option -> its words, which an option of the user replaces."""


class _Exports(NamedTuple):
    """The variables that the user exports with ``-x``.

    Attributes:
        reasons: Variable -> its words, such as ``("-x", "LR=0.1")``.
        left_out: Pairs of an ``-x`` that mpirun does not get, and the reason.
        warnings: Lines for the log.
    """

    reasons: Mapping[str, Reason]
    left_out: Sequence[tuple[str, str]]
    warnings: Sequence[str]


def _choose_exports(job: Job, user: UserOptions, host_specific: Collection[str]) -> _Exports:
    """Choose the variables that mpirun exports to the ranks for the user's ``-x``.

    ``-x NAME`` makes mpirun read the leader's value from its own environment, so that no secret is
    on a command line. A variable without ``-x`` comes to a rank from the rank's own host.

    Args:
        job: The job.
        user: The user's options.
        host_specific: Variables of which each host has its own value; these are left out.
    """
    reasons: dict[str, Reason] = {}
    left_out: list[tuple[str, str]] = []
    warnings: list[str] = []
    leader_values = {**job.inherited, **exported_variables(job)}
    fabric = job.network.fabric
    for name in _forwarded_names(user, leader_values):
        fabric_why = fabric.why_left_out(name, leader_values.get(name, ""))
        if name in host_specific:
            why = "each host has its own value, and its ranks get that one"
            left_out.append((f"-x {name}", why))
        elif fabric_why:
            left_out.append((f"-x {name}", fabric_why))
        elif name not in leader_values:
            warnings.append(f"left out -x {name}: it is not set")
        else:
            why = f"{_FROM_USER}, the leader's value"
            reasons[name] = Reason(f"-x {name}", why, Origin.USER, ("-x", name))
    for name, value in user.exports:
        fabric_why = fabric.why_left_out(name, value)
        if fabric_why:
            left_out.append((f"-x {name}={value}", fabric_why))
            warnings.append(f"left out -x {name}={value}: {fabric_why}")
            continue
        reasons[name] = Reason(f"-x {name}", _FROM_USER, Origin.USER, ("-x", f"{name}={value}"))
    return _Exports(MappingProxyType(reasons), left_out, warnings)


def _forwarded_names(user: UserOptions, variables: Mapping[str, str]) -> list[str]:
    """Return the variables of the user's ``-x NAME``; ``-x NCCL_*`` has several."""
    forwarded: list[str] = []
    for pattern in user.forwarded:
        if pattern.endswith("*"):
            prefix = pattern[:-1]
            forwarded += sorted(name for name in variables if name.startswith(prefix))
        else:
            forwarded.append(pattern)
    return forwarded


def _program(job: Job) -> tuple[Reason, ...]:
    """Return the user's program; a Python program runs under mpi4py if the image has mpi4py."""
    python = job.environment.programs.get("python", "python3")
    words = program_words(job.program.entry, job.program.code, python, common.shell_of(job))
    if "mpi4py" not in job.environment.manifest.components or not job.program.entry.in_python:
        return common.explained_program(job, words)
    # Without mpi4py's runner Python finalizes MPI at its exit after an exception, and waits for the
    # other ranks for ever.
    why = "the entry point, under mpi4py, which aborts the job on an uncaught exception"
    return common.explained_program(job, (words[0], "-m", "mpi4py", *words[1:]), why)
