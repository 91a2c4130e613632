"""mpi: the leader runs mpirun, which starts the ranks of every host.

Those of other hosts through their launchers.

How ranks get the environment of their own host: mpirun starts ``rank.py`` on each host, and that
reads the environment file which that host's launcher wrote, lays what mpirun and the user's ``-x``
say over it, and becomes the program. So nothing host-specific travels from the leader, and no value
is too long for a command line.

Where no launcher runs on the other hosts, because they only serve ssh (``Placement.served``), this
one starts mpirun, which gives the ranks what the launcher knows, without what is host-specific.

Where a parameter comes from: the reference of Open MPI (``ompi_info --all``, ``prte_info --all``),
and what sagemaker-training gives mpirun, since jobs were tuned with that.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Collection, Mapping, Sequence

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


def plan(job: Job) -> NodePlan:
    """Plan the job's host. Raises RefusalError for contradictory options."""
    return plan_ranks(job)


def plan_ranks(
    job: Job,
    variables: Sequence[Variable] = (),
    before: Sequence[Reason] = (),
    warnings: Sequence[str] = (),
) -> NodePlan:
    """Plan the host of a job whose ranks are started by mpirun.

    Args:
        job: The job.
        variables: Variables of the ranks besides those of every mode.
        before: Words in front of the program of each rank.
        warnings: Warnings of the mode.

    Raises:
        RefusalError: The options contradict each other.
    """
    served = job.placement.served
    programs = common.programs_of_mode(job)
    network, network_why = network_variables(job)
    where = job.placement.mpi_options_where
    dialect = dialect_of(job.environment.manifest.components.get(names.OPEN_MPI, _GENERIC_VERSION))
    user, problems = parse_user_options(job.placement.mpi_options, dialect, where)
    more_variables, variables_why = common.variables(
        job, (*variables, *_interface_of_host(job, user, dialect))
    )
    parameters, left_out, more = merge_parameters(
        _parameters(job, dialect), user, dialect, job.inherited, where
    )
    if served and job.program.requirements:
        advice = "put them into the image (build.py extend), or install them before mpirun"
        problems.append(
            Problem(
                "requirements are not installed on the workers",
                job.program.code.requirements,
                advice,
            )
        )
    if problems or more:
        raise RefusalError([*problems, *more])
    exports, not_exported, not_set = _exports(
        job, user, {*HOST_SPECIFIC, *network, *more_variables}
    )
    env = MappingProxyType({**exported_variables(job), **network, **more_variables})
    handed_on = _handed_on(env, exports) if served else ()
    line = [
        Reason("mpirun", "starts the ranks of every host", Origin.IMAGE, (programs["mpirun"],)),
        *_options(job, user),
        *(_parameter(setting, dialect) for setting in parameters),
        *exports.values(),
        *handed_on,
    ]
    if user.rest:
        line.append(Reason("other options", _FROM_USER, Origin.USER, user.rest))
    line += [_wrapper(job, exports), *before, *_program(job)]
    if job.placement.host != job.placement.leader and not served:
        argv: tuple[str, ...] = ()
        here = "mpirun on the leader starts the ranks of this host through this launcher"
        why = [Reason("no command", here)]
    else:
        argv = words_of(line)
        why = list(line)
        for what, because in (*left_out, *not_exported):
            why.append(Reason(f"left out {what}", because, Origin.USER))
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
        # mpirun would give the leader's value to the ranks of every host.
        hidden=(_INTERFACE_VARIABLE,) if _INTERFACE_VARIABLE in env else (),
        ranks_by="mpirun",
        control=control_of(job),
        shell=Shell(programs["ssh"]) if served else None,
        limits=job.network.limits,
        why=(*why, *network_why, *variables_why),
        warnings=(*job.warnings, *warnings, *user.warnings, *not_set),
    )


_GENERIC_VERSION = ""
"""Of an image without a manifest: dialect_of takes Open MPI 4, whose names 5.x still accepts."""


_INTERFACE_VARIABLE = "OMPI_MCA_btl_tcp_if_include"
_INTERFACES = frozenset(("btl_tcp_if_include", "btl_tcp_if_exclude"))

_OWN_HOSTS = frozenset((names.HOSTNAME_VARIABLE, "LD_PRELOAD", "HOME"))
"""Variables that a host of its own needs, besides HOST_SPECIFIC."""


def _reaches_hosts(job: Job) -> bool:
    """Return whether mpirun starts ranks on other hosts."""
    return len(job.placement.distribution_hosts) > 1 or job.placement.served


def _interface_of_host(job: Job, user: UserOptions, dialect: Dialect) -> tuple[Variable, ...]:
    """Return the variable that keeps Open MPI to the interface which reaches the other hosts.

    () where none is needed.

    Open MPI takes every interface, also one that reaches no other host, if two hosts have addresses
    of one subnet there (a bridge for containers). Each host has its own variable: its interfaces
    may have other names. What the platform names is on the command line.
    """
    devices = job.environment.devices
    named = job.environment.hosts.interface
    chosen = {dialect.canonical(name) for name, *_ in user.parameters}
    chosen |= {name for name in _INTERFACES if f"OMPI_MCA_{name}" in job.inherited}
    one = len([name for name in devices.interfaces if name != "lo"]) < 2
    alone = not _reaches_hosts(job) or job.placement.served
    if alone or named or one or not devices.routed or chosen & _INTERFACES:
        return ()
    why = "MPI's traffic uses the interface of this host that reaches the others, and no other one"
    return (Variable(_INTERFACE_VARIABLE, devices.routed, why),)


def _wrapper(job: Job, exports: Mapping[str, Reason]) -> Reason:
    """Return the words of rank.py.

    Where no launcher has written a host's environment, ranks have mpirun's.
    """
    size = ("--size", str(job.placement.processes))
    if job.placement.served:
        return common.rank_wrapper(job, "refuses a job with fewer ranks than planned", size)
    why = "gives each rank the environment of its own host"
    return common.rank_wrapper(job, why, (*size, "--keep", ",".join(exports)))


def _handed_on(env: Mapping[str, str], exports: Mapping[str, Reason]) -> tuple[Reason, ...]:
    """Return the words that give ranks on hosts without a launcher what this one knows.

    Values are in its variables.
    """
    found = sorted(env.keys() - exports.keys() - HOST_SPECIFIC - _OWN_HOSTS)
    words = tuple(word for name in found for word in ("-x", name))
    return (
        Reason(
            "-x NAME...",
            "no launcher runs on the workers: mpirun gives the ranks this one's variables",
            words=words,
        ),
    )


def _parameters(job: Job, dialect: Dialect) -> tuple[Setting, ...]:
    """Our MCA parameters, by the names of the dialect."""
    several = _reaches_hosts(job)
    rows = _parameters_of_any_job(dialect)
    if job.network.interface and several:
        why = f"bind MPI's traffic to this interface: {job.network.interface_why}"
        rows.append(Setting("btl_tcp_if_include", job.network.interface, Origin.PLATFORM, why))
        rows.append(
            Setting(
                dialect.canonical("oob_tcp_if_include"), job.network.interface, Origin.PLATFORM, why
            )
        )
    host = job.placement.host
    named = job.environment.hostname == host or job.environment.hostname_shim
    if several and dialect.major >= 5 and not named:
        why = (
            f"this host calls itself {job.environment.hostname}:"
            f" by its address mpirun knows that it is {host}"
        )
        rows.append(Setting("prte_do_not_resolve", "0", Origin.PLATFORM, why))
    if several and any(
        "." in name and not name.replace(".", "").isdigit() for name in job.placement.hosts
    ):
        name = dialect.canonical("orte_keep_fqdn_hostnames")
        rows.append(Setting(name, "1", Origin.PLATFORM, "hosts are called by names with a domain"))
    if several:
        why = (
            "a peer of a rank that died waits before it aborts:"
            " the daemon of that rank tells of its end first"
        )
        rows.append(Setting("opal_abort_delay", "1", Origin.DEFAULT, why))
        rows += _parameters_of_agent(job, dialect)
    return tuple(rows)


def _parameters_of_any_job(dialect: Dialect) -> list[Setting]:
    may_not_read = "a container may not read another process's memory, and each try is logged"
    pml = Setting(
        "pml",
        "ob1",
        Origin.DEFAULT,
        "plain point-to-point messages; NCCL has its own way to the fabric",
    )
    if dialect.major >= 5:
        return [pml, Setting("smsc", "^cma", Origin.DEFAULT, may_not_read)]
    ends = "a rank that fails ends the job, not only itself"
    return [
        pml,
        Setting(
            "btl",
            "^openib",
            Origin.DEFAULT,
            "without verbs devices this transport only prints warnings",
        ),
        Setting("orte_abort_on_non_zero_status", "1", Origin.DEFAULT, ends),
        Setting("btl_vader_single_copy_mechanism", "none", Origin.DEFAULT, may_not_read),
    ]


def _parameters_of_agent(job: Job, dialect: Dialect) -> list[Setting]:
    """Return how mpirun reaches the other hosts."""
    agent = (
        f"{job.environment.launcher_python} -I"
        f" {job.environment.launcher_directory}/programs/agent.py"
    )
    served = job.placement.served
    # ssh to a daemon of Open MPI 5 lives as long as that; the launcher's agent only asks.
    at_once = str(max(len(job.placement.distribution_hosts), 128)) if served else "32"
    how = (
        "ssh with the keys that the platform mounted"
        if served
        else "ask the launcher of each host to start it"
    )
    return [
        Setting(dialect.canonical(name), value, Origin.PLATFORM, why)
        for name, value, why in (
            ("plm_rsh_agent", agent, how),
            (
                "plm_rsh_no_tree_spawn",
                "1",
                "only the leader may start something, so it contacts every host itself",
            ),
            ("plm_rsh_num_concurrent", at_once, "contact so many hosts at once"),
        )
    ]


def _parameter(setting: Setting, dialect: Dialect) -> Reason:
    """Return the words of an MCA parameter."""
    option = setting.option or dialect.option(setting.name)
    words = (option, setting.name, setting.value)
    return Reason(f"{option} {setting.name}", setting.why, setting.origin, words)


def _options(job: Job, user: UserOptions) -> tuple[Reason, ...]:
    """Options that are not parameters.

    A user's value of the same option takes the place of ours.
    """
    # On one host the platform's name of it may resolve nowhere, and mpirun
    # would go and look for it by ssh.
    hosts = job.placement.distribution_hosts if _reaches_hosts(job) else ("localhost",)
    slots = ",".join(f"{host}:{count}" for host, count in zip(hosts, job.placement.slots))
    why = common.counts_and_why(job)
    keyed: dict[str, Reason] = {}
    for option, values, said in (
        ("allow-run-as-root", (), "containers run as root, and mpirun refuses root without it"),
        (
            "bind-to",
            ("none",),
            "data loaders need the cores of the whole host, so no process is pinned",
        ),
        (
            "map-by",
            ("slot",),
            "fill one host before the next, so that neighbouring ranks share a host",
        ),
    ):
        if option not in user.left_out:
            keyed[option] = Reason(f"--{option}", said, words=(f"--{option}", *values))
    for option, given in user.keyed:
        keyed[option] = Reason(f"--{option}", _FROM_USER, Origin.USER, (f"--{option}", *given))
    return (
        Reason("--host", why, Origin.PLATFORM, ("--host", slots)),
        Reason(
            "-np",
            "processes in all",
            job.placement.processes_origin,
            ("-np", str(job.placement.processes)),
        ),
        *keyed.values(),
    )


def _exports(
    job: Job, user: UserOptions, own: Collection[str]
) -> tuple[Mapping[str, Reason], Sequence[tuple[str, str]], Sequence[str]]:
    """Sort the user's ``-x``.

    With a name alone, mpirun takes the leader's value from its own environment, so that no secret
    stands on a command line. What the user does not export comes to a rank from its own host.

    Args:
        job: The job.
        user: The user's options.
        own: Variables of which each host has its own value.

    Returns:
        Name -> the words of ``-x``; what was left out and why; warnings about
        variables that are not set.
    """
    exports: dict[str, Reason] = {}
    left_out: list[tuple[str, str]] = []
    warnings: list[str] = []
    known = {**job.inherited, **exported_variables(job)}
    fabric = job.network.fabric
    for asked in user.forwarded:
        pattern = asked.endswith("*")
        found = (
            sorted(name for name in known if name.startswith(asked[:-1])) if pattern else [asked]
        )
        for name in found:
            if name in own:
                left_out.append(
                    (f"-x {name}", "each host has its own value, and its ranks get that one")
                )
            elif fabric.why_left_out(name, known.get(name, "")):
                left_out.append((f"-x {name}", fabric.why_left_out(name, known[name])))
            elif name not in known:
                warnings.append(f"left out -x {name}: it is not set")
            else:
                exports[name] = Reason(
                    f"-x {name}", f"{_FROM_USER}, the leader's value", Origin.USER, ("-x", name)
                )
    for name, value in user.exports:
        why = fabric.why_left_out(name, value)
        if why:
            left_out.append((f"-x {name}={value}", why))
            warnings.append(f"left out -x {name}={value}: {why}")
            continue
        exports[name] = Reason(f"-x {name}", _FROM_USER, Origin.USER, ("-x", f"{name}={value}"))
    return MappingProxyType(exports), left_out, warnings


def _program(job: Job) -> tuple[Reason, ...]:
    """Return the program; Python programs under mpi4py where the image has it."""
    python = job.environment.programs.get("python", "python3")
    words = program_words(job.program.entry, job.program.code, python, common.shell_of(job))
    if "mpi4py" not in job.environment.manifest.components or not job.program.entry.in_python:
        return common.explained_program(job, words)
    # Without its runner Python tries to finalize MPI at its exit and waits for
    # the other ranks for ever.
    why = "the entry point, under mpi4py, which aborts the job on an uncaught exception"
    return common.explained_program(job, (words[0], "-m", "mpi4py", *words[1:]), why)
