"""Plan mode ray: Ray's head and the program on the leader, Ray's workers on the other hosts.

programs/ray_node.py starts the program when all hosts have joined. ``ray start --block`` runs the
head and the workers beside the program (``Auxiliary``), and they end with the job. ``ray start``
fails when one of Ray's processes dies, and the job then fails, too.
"""

from __future__ import annotations

import shlex

from trainworks_launcher.contract import names
from trainworks_launcher.contract.errors import Problem, RefusalError
from trainworks_launcher.contract.origins import Origin
from trainworks_launcher.job.job import Job
from trainworks_launcher.job.placement import accelerators
from trainworks_launcher.plan.flight_recorder import release
from trainworks_launcher.plan.modes import common
from trainworks_launcher.plan.modes.common import Variable
from trainworks_launcher.plan.plan import Auxiliary, NodePlan, Reason, words_of

_OWN = ("--head", "--address", "--port", "--block", "--node-ip-address")
"""Options of ``ray start`` that only the launcher sets, because the hosts need these to connect."""

_HEAD_ONLY = ("--include-dashboard", "--redis-shard-ports")
"""Options that ``ray start`` refuses for a worker.

Source: ray/scripts/scripts.py, head_only_flags.
"""

_MINIMUM_STORE_BYTES = 75 << 20
"""Size of the smallest object store.

Source: ray/_private/ray_constants.py, OBJECT_STORE_MINIMUM_MEMORY_BYTES.
"""

_AMPLE_SHARED_MEMORY_BYTES = 10**10
"""Size of /dev/shm that is enough for Ray's default object store.

Source: ray_constants.py, REQUIRE_SHM_SIZE_THRESHOLD.
"""

_FIRST_WITH_TOKEN = "2.52.0"
"""First release of Ray with token authentication. An older Ray ignores RAY_AUTH_MODE silently.

Source: RAY_AUTH_MODE in ray/_raylet.so and ray/_private/authentication/ of the wheels of 2.51.0
(absent) and 2.52.0.
"""

_RETRIES = "RAY_NUM_REDIS_GET_RETRIES"
"""How often a worker tries to reach the head, every two seconds; Ray's default is 20.

Source: ray_constants.py.
"""

_DEFAULT_RETRIES = 20  # of Ray itself
_SECONDS_PER_RETRY = 2
_NO_COLOR = "a log shows escape sequences as they are"
_ADDRESS = "RAY_ADDRESS"  # programs/ray_node.py has the same name


def plan(job: Job) -> NodePlan:
    """Plan the job's host.

    Raises RefusalError for a wrong option, and for a Ray that ignores the job's secret.
    """
    programs = common.programs_of_mode(job)
    ray, python = programs["ray"], programs["python"]
    placement = job.placement
    is_head = placement.host == placement.leader
    hosts = len(placement.distribution_hosts)
    join_seconds = job.network.limits.join
    head_address = names.LOOPBACK
    if hosts > 1:
        head_address = placement.leader_address
    port = str(job.network.master_port)
    options, warnings = _options(job, is_head)
    warnings += _check_token(job)

    role, daemon_variables = "head", {}
    if not is_head:
        role = "worker"
        # A worker tries to reach the head until the time for joining is over.
        retries = max(_DEFAULT_RETRIES, int(join_seconds / _SECONDS_PER_RETRY))
        daemon_variables = {_RETRIES: str(retries)}
    program = f"{job.environment.launcher_directory}/programs/ray_node.py"
    ray_node = (program, head_address, port, f"{join_seconds:g}")
    start = (job.environment.launcher_python, "-I", *ray_node, role, "--", ray, "start")
    daemon = Auxiliary(f"Ray {role}", (*start, *words_of(options)), daemon_variables)

    command: list[Reason] = []
    if is_head:
        wait = (python, "-I", *ray_node, str(hosts), "--")
        wait_why = f"starts the program when Ray has {hosts} host(s)"
        command = [Reason("ray_node.py", wait_why, words=wait), *common.command(job)]
    why = [
        Reason(
            "mode ray",
            "Ray's head runs on the leader, a worker on each other host;"
            " the program runs on the leader",
        )
    ]
    for option in options:
        # These words are the daemon's, not the command's.
        why.append(option._replace(words=()))
    rows = _variables(f"{head_address}:{port}", job.environment.job_secret)
    node_plan = common.own_process(job, command, why, rows, warnings)
    return node_plan._replace(auxiliaries=(daemon,), needs=(ray, python))


def _variables(head: str, secret: str) -> list[Variable]:
    """Return the variables of the program and of Ray.

    Args:
        head: Address and port of Ray's head, such as ``10.0.0.1:29500``.
        secret: The job's secret; ``""`` for none.
    """
    head_why = "where Ray's head listens: ray.init() connects to it"
    usage_why = "Ray sends nothing about the job to its makers"
    return [
        Variable(_ADDRESS, head, head_why, ours=True),
        Variable("RAY_USAGE_STATS_ENABLED", "0", usage_why, Origin.DEFAULT),
        Variable("RAY_COLOR_PREFIX", "0", _NO_COLOR, Origin.DEFAULT),
        *_token(secret),
    ]


def _check_token(job: Job) -> tuple[str, ...]:
    """Return a warning if the image's Ray may not ask for a token; ``()`` for a job without secret.

    Raises RefusalError for a Ray without token authentication on several hosts.
    """
    if not job.environment.job_secret:
        return ()
    version = job.environment.manifest.components.get("ray", "")
    first = _FIRST_WITH_TOKEN  # an older Ray ignores the token silently
    if not version:
        warning = (
            f"which Ray is installed is not known: one before {first} ignores"
            f" {names.JOB_SECRET_VARIABLE}"
        )
        return (warning,)
    if release(version) >= release(first):
        return ()
    problem = (
        f"Ray {version} ignores {names.JOB_SECRET_VARIABLE}:"
        " every program that reaches its ports can run code"
    )
    if len(job.placement.distribution_hosts) == 1:
        return (f"{problem}, also on one host; {first} is the first that asks for a token",)
    advice = (
        f"use Ray {first} or later,"
        f" or unset {names.JOB_SECRET_VARIABLE} on a network of the job's own"
    )
    raise RefusalError([Problem(problem, "mode ray, several hosts", advice)])


def _token(secret: str) -> list[Variable]:
    """Return the variables of Ray's token authentication; ``[]`` if the job has no secret.

    Ray then answers only processes that have the token. The token is a hash of the secret, the
    same on every host, from which the secret itself cannot be found.
    """
    if not secret:
        return []
    import hmac  # takes time, and few jobs have a secret

    token = hmac.new(secret.encode(), b"trainworks: ray", "sha256").hexdigest()
    why = f"made of {names.JOB_SECRET_VARIABLE}: Ray answers only to processes that have it"
    return [
        Variable("RAY_AUTH_MODE", "token", why, Origin.USER),
        Variable("RAY_AUTH_TOKEN", token, why, Origin.USER),
    ]


def _options(job: Job, is_head: bool) -> tuple[list[Reason], tuple[str, ...]]:
    """Return (options of ``ray start`` on this host, warnings).

    The user's options are the last, because Ray takes the last of two values.

    Raises RefusalError for an option of the user that only the launcher sets.
    """
    placement, devices = job.placement, job.environment.devices
    port = job.network.master_port
    gpus, _ = accelerators(job.environment, placement.instance_type)
    if is_head:
        words: tuple[str, ...] = ("--head", f"--port={port}")
        options = [Reason("--head", "this host is the leader", Origin.PLATFORM, words)]
    else:
        words = (f"--address={placement.leader_address}:{port}",)
        options = [Reason("--address", "Ray's head is on the leader", Origin.PLATFORM, words)]
    block_why = "ends with a failure when a process of Ray dies"
    gpus_why = "GPUs that this host can open"
    options += [
        Reason("--block", block_why, words=("--block",)),
        Reason("--num-gpus", gpus_why, Origin.PLATFORM, (f"--num-gpus={gpus}",)),
    ]
    if is_head:
        why = (
            "the dashboard is for people;"
            f" {names.RAY_OPTIONS_VARIABLE}=--include-dashboard=true starts it"
        )
        options.append(Reason("--include-dashboard", why, words=("--include-dashboard=false",)))
    # The CPUs are unknown in a plan for another host.
    if devices.efa is not None:
        why = "CPUs that this host may use"
        options.append(Reason("--num-cpus", why, Origin.PLATFORM, (f"--num-cpus={devices.cpus}",)))
    store, warnings = _object_store(job)
    options += store
    ports_why = "Ray takes free ports: two jobs can share a host"
    ports = ("--min-worker-port=0", "--max-worker-port=0")
    options += [
        Reason("--max-worker-port", ports_why, words=ports),
        Reason("--log-color", _NO_COLOR, words=("--log-color=false",)),
    ]
    words = _user_options(job, is_head)
    if words:
        why = f"from {names.RAY_OPTIONS_VARIABLE}"
        options.append(Reason("more options", why, Origin.USER, words))
    return options, warnings


def _user_options(job: Job, is_head: bool) -> tuple[str, ...]:
    """Return the user's options of ``ray start``, such as ``("--num-cpus=4",)``.

    A worker does not get the options that are for a head only.

    Raises RefusalError for an open quote, for a word that is no option, and for an option that the
    launcher sets.
    """
    where = f"variable {names.RAY_OPTIONS_VARIABLE}"
    try:
        words = shlex.split(job.inherited.get(names.RAY_OPTIONS_VARIABLE, ""))
    except ValueError as error:
        problem = Problem(f"cannot be read: {error}", where, "close the quotes")
        raise RefusalError([problem]) from error
    problems: list[Problem] = []
    options: list[str] = []
    for word in words:
        name = word.partition("=")[0]
        if name in _OWN or not word.startswith("--"):
            advice = f"write --NAME=VALUE; leave out {', '.join(_OWN)}, which the launcher gives"
            problems.append(Problem(f"{word!r} cannot be given to ray start", where, advice))
        elif is_head or name not in _HEAD_ONLY:
            options.append(word)
    if problems:
        raise RefusalError(problems)
    return tuple(options)


def _object_store(job: Job) -> tuple[list[Reason], tuple[str, ...]]:
    """Return (options of Ray's object store, warnings), for a host with a small /dev/shm.

    Ray's default would be larger than /dev/shm. Both are empty for an ample or an unknown /dev/shm.
    With too little for the smallest store, the store is in the temporary directory.
    """
    free = job.environment.devices.shared_memory
    if free is None or free >= _AMPLE_SHARED_MEMORY_BYTES:
        return [], ()
    half = free // 2
    if half >= _MINIMUM_STORE_BYTES:
        why = (
            f"half of what /dev/shm has free ({free >> 20} MiB); the other half is for data loaders"
        )
        words: tuple[str, ...] = (f"--object-store-memory={half}",)
        return [Reason("--object-store-memory", why, Origin.PLATFORM, words)], ()
    directory = job.environment.temporary or job.inherited.get("TMPDIR") or "/tmp"  # noqa: S108  (as Ray)
    problem = f"/dev/shm has {free >> 20} MiB free, too little for Ray's object store"  # noqa: S108
    words = (f"--object-store-memory={_MINIMUM_STORE_BYTES}", f"--plasma-directory={directory}")
    warning = (
        f"{problem}, which is in {directory} and small:"
        " start the container with more (docker run --shm-size)"
    )
    return [Reason("--plasma-directory", problem, Origin.PLATFORM, words)], (warning,)
