"""ray: Ray's head on the leader, a worker on every other host, and the program
on the leader when all have joined.

Ray's own command line starts both, and ``--block`` watches what it has started: where one of these
processes dies, it ends with a failure, which is the job's. They are processes beside the program
(``Auxiliary``), ended with the job.
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
"""Options of ``ray start`` without which the hosts would not find each other."""

_HEAD_ONLY = ("--include-dashboard", "--redis-shard-ports")
"""Options that ``ray start`` refuses where it starts a worker.

Source: ray/scripts/scripts.py, head_only_flags.
"""

_LEAST_STORE = 75 << 20
"""Bytes of the smallest object store.

Source: ray/_private/ray_constants.py, OBJECT_STORE_MINIMUM_MEMORY_BYTES.
"""

_AMPLE = 10**10
"""Bytes of /dev/shm from which on Ray's own default fits.

Source: ray_constants.py, REQUIRE_SHM_SIZE_THRESHOLD.
"""

_ASKS_FOR_A_TOKEN = "2.52.0"
"""The first Ray that answers only to who has the token.

An older one ignores RAY_AUTH_MODE without a word. Source: RAY_AUTH_MODE in ray/_raylet.so and
ray/_private/authentication/ of the wheels of 2.51.0 (absent) and 2.52.0.
"""


def plan(job: Job) -> NodePlan:
    """Plan the job's host.

    Raises RefusalError for a wrong option, or a Ray that ignores the secret.
    """
    programs = common.programs_of_mode(job)
    ray, python = programs["ray"], programs["python"]
    placement = job.placement
    head = placement.host == placement.leader
    hosts = len(placement.distribution_hosts)
    port, seconds = str(job.network.master_port), f"{job.network.limits.join:g}"
    leader = placement.leader_address if hosts > 1 else names.LOOPBACK
    options, warnings = _options(job, head)
    warnings += _check_token(job)
    role = "head" if head else "worker"
    patience = {}
    if not head:
        patience[_RETRIES] = str(max(20, int(job.network.limits.join / 2)))
    program = f"{job.environment.launcher_directory}/programs/ray_node.py"
    ray_node = (program, leader, port, seconds)
    start = (job.environment.launcher_python, "-I", *ray_node, role, "--", ray, "start")
    daemon = Auxiliary(f"Ray {role}", (*start, *words_of(options)), patience)
    rows = [
        Variable(
            _ADDRESS,
            f"{leader}:{port}",
            "where Ray's head listens: ray.init() connects to it",
            ours=True,
        ),
        Variable(
            "RAY_USAGE_STATS_ENABLED",
            "0",
            "Ray sends nothing about the job to its makers",
            Origin.DEFAULT,
        ),
        Variable("RAY_COLOR_PREFIX", "0", _NO_COLOR, Origin.DEFAULT),
        *_token(job.environment.job_secret),
    ]
    wait = (python, "-I", *ray_node, str(hosts), "--")
    command = [
        Reason("ray_node.py", f"starts the program when Ray has {hosts} host(s)", words=wait),
        *common.command(job),
    ]
    choice = Reason(
        "mode ray",
        "Ray's head runs on the leader, a worker on each other host;"
        " the program runs on the leader",
    )
    why = [choice]
    why += [Reason(option.subject, option.why, option.origin) for option in options]
    node_plan = common.own_process(job, command if head else (), why, rows, warnings)
    return node_plan._replace(auxiliaries=(daemon,), needs=(ray, python))


_RETRIES = "RAY_NUM_REDIS_GET_RETRIES"
"""How often a worker asks for the head's node, each two seconds; Ray's default is 20.

Source: ray_constants.py.
"""

_NO_COLOR = "a log shows escape sequences as they are"
_ADDRESS = "RAY_ADDRESS"  # programs/ray_node.py has the same name


def _check_token(job: Job) -> tuple[str, ...]:
    """Return a warning where the installed Ray may not ask for the token that
    is made of the job's secret.

    Raises RefusalError on several hosts if it certainly does not.
    """
    if not job.environment.job_secret:
        return ()
    version = job.environment.manifest.components.get("ray", "")
    first = _ASKS_FOR_A_TOKEN
    if not version:
        return (
            (
                f"which Ray is installed is not known: one before {first} ignores"
                f" {names.JOB_SECRET_VARIABLE}"
            ),
        )
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
    """Return the variables by which Ray answers only to processes of the job,
    if the job has a secret.
    """
    if not secret:
        return []
    import hmac  # few jobs have one

    token = hmac.new(secret.encode(), b"trainworks: ray", "sha256").hexdigest()
    why = f"made of {names.JOB_SECRET_VARIABLE}: Ray answers only to processes that have it"
    return [
        Variable("RAY_AUTH_MODE", "token", why, Origin.USER),
        Variable("RAY_AUTH_TOKEN", token, why, Origin.USER),
    ]


def _options(job: Job, head: bool) -> tuple[list[Reason], tuple[str, ...]]:
    """Return the options of ``ray start`` on this host, and warnings.

    Of an option that comes twice Ray takes the last.

    Raises RefusalError for a user's that the launcher gives itself.
    """
    placement, devices = job.placement, job.environment.devices
    leader, port = placement.leader_address, job.network.master_port
    gpus = accelerators(job.environment, placement.instance_type)[0]
    options = [
        (
            Reason(
                "--head", "this host is the leader", Origin.PLATFORM, ("--head", f"--port={port}")
            )
            if head
            else Reason(
                "--address",
                "Ray's head is on the leader",
                Origin.PLATFORM,
                (f"--address={leader}:{port}",),
            )
        ),
        Reason("--block", "ends with a failure when a process of Ray dies", words=("--block",)),
        Reason(
            "--num-gpus", "GPUs that this host can open", Origin.PLATFORM, (f"--num-gpus={gpus}",)
        ),
    ]
    if head:
        why = (
            "the dashboard is for people;"
            f" {names.RAY_OPTIONS_VARIABLE}=--include-dashboard=true starts it"
        )
        options.append(Reason("--include-dashboard", why, words=("--include-dashboard=false",)))
    if devices.efa is not None:  # else the host is not known
        why = "CPUs that this host may use"
        options.append(Reason("--num-cpus", why, Origin.PLATFORM, (f"--num-cpus={devices.cpus}",)))
    store, warnings = _object_store(job)
    why = "Ray takes free ports: two jobs can share a host"
    options += [
        *store,
        Reason("--max-worker-port", why, words=("--min-worker-port=0", "--max-worker-port=0")),
        Reason("--log-color", _NO_COLOR, words=("--log-color=false",)),
    ]
    where = f"variable {names.RAY_OPTIONS_VARIABLE}"
    try:
        given = shlex.split(job.inherited.get(names.RAY_OPTIONS_VARIABLE, ""))
    except ValueError as error:
        raise RefusalError(
            [Problem(f"cannot be read: {error}", where, "close the quotes")]
        ) from error
    wrong = [word for word in given if word.partition("=")[0] in _OWN or not word.startswith("--")]
    if wrong:
        advice = f"write --NAME=VALUE; leave out {', '.join(_OWN)}, which the launcher gives"
        raise RefusalError(
            [Problem(f"{word!r} cannot be given to ray start", where, advice) for word in wrong]
        )
    words = tuple(word for word in given if head or word.partition("=")[0] not in _HEAD_ONLY)
    if words:
        options.append(
            Reason("more options", f"from {names.RAY_OPTIONS_VARIABLE}", Origin.USER, words)
        )
    return options, warnings


def _object_store(job: Job) -> tuple[list[Reason], tuple[str, ...]]:
    """Return the options of Ray's object store, and warnings: Ray would plan
    more than a small /dev/shm has.
    """
    free = job.environment.devices.shared_memory
    if free is None or free >= _AMPLE:
        return [], ()
    half = free // 2
    if half >= _LEAST_STORE:
        why = (
            f"half of what /dev/shm has free ({free >> 20} MiB); the other half is for data loaders"
        )
        return [
            Reason(
                "--object-store-memory", why, Origin.PLATFORM, (f"--object-store-memory={half}",)
            )
        ], ()
    place = job.environment.temporary or job.inherited.get("TMPDIR") or "/tmp"  # noqa: S108  (as Ray)
    problem = f"/dev/shm has {free >> 20} MiB free, too little for Ray's object store"  # noqa: S108
    words = (f"--object-store-memory={_LEAST_STORE}", f"--plasma-directory={place}")
    warning = (
        f"{problem}, which is in {place} and small:"
        " start the container with more (docker run --shm-size)"
    )
    return [Reason("--plasma-directory", problem, Origin.PLATFORM, words)], (warning,)
