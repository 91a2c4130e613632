"""Everything the launcher knows of the world, read once, in one place, into one frozen value.

This is one of the two modules with effects before a job runs (the other is ``cli``): it reads
environment variables, the platform's files and the image manifest, and probes the host. Reading
changes nothing. What cannot be read becomes a problem in the value and is reported by ``job``
together with all others.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
from pathlib import Path
from types import MappingProxyType
from typing import Mapping, NamedTuple, Sequence

from trainworks_launcher.contract import files, names, suggestions
from trainworks_launcher.contract.errors import Problem, RefusalError
from trainworks_launcher.contract.hyperparameters import (
    Reserved,
    decode_values,
    split_reserved,
)
from trainworks_launcher.contract.inspection import inspecting
from trainworks_launcher.contract.json_values import (
    NOTHING,
    Json,
    decode,
    kind,
    text,
    without_brackets,
)
from trainworks_launcher.contract.modes import MODES, SWITCHES, Mode
from trainworks_launcher.environment import (
    cgroups,
    cluster_hosts,
    directories,
    entry_point,
    platforms,
    sdk_drivers,
    secret,
)
from trainworks_launcher.environment.command_line import NOTHING_ASKED, Invocation
from trainworks_launcher.environment.devices import (
    count_gpus,
    efa_devices,
    locked_memory,
    names_in,
    nodes_of_gpus,
)
from trainworks_launcher.environment.manifest import Manifest, Missing, parse_manifest
from trainworks_launcher.environment.resource_config import Hosts
from trainworks_launcher.environment.source_dir import look_at_code, look_at_program

BOTO3 = "boto3"
"""Environment.aws_client where the image's Python has that library."""

PROGRAMS = (
    *("python", "bash", "sh", "mpirun", "torchrun", "ray", "ssh"),
    *("smddprun", "smddpmprun", "neuron_parallel_compile", "aws"),
)
"""Programs that a plan may name; the manifest's path, else the first on PATH."""

_GENERIC_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType({"python": ("python3", "python")})
_PROBE_SECONDS = 20.0
_SHOWN = 3


class Devices(NamedTuple):
    """What this host has.

    Attributes:
        gpus: Number of NVIDIA GPUs that this process may use.
        visible_gpus: Which of the container's GPUs CUDA_VISIBLE_DEVICES leaves,
            as it calls them; None: all.
        neuron_devices: Number of Neuron devices.
        cpus: Number of CPUs that this container may use.
        cpus_limited: Whether a limit of CPU time says so, and not the CPUs themselves.
        efa: Names of the EFA devices that can be opened here; None if they
            cannot be known (preflight).
        closed_efa: Names of the host's other EFA devices.
        locked_memory: Bytes of memory that a process may lock; None: no limit is known.
        gpu_nodes: NUMA node of each GPU, where ranks can be bound to the CPUs of theirs; else ().
        interfaces: Names of network interfaces.
        reaching: Interface that routes to the leader; looked up only if the given interface does
            not exist, or none is given and programs that look their host up by its name would use
            another one.
        shared_memory: Bytes of /dev/shm that are free; None if they cannot be known (preflight).
        own_address: What the host's own name leads to then; ``""``: nothing, or
            it was not looked up.
        routed: Interface that routes to the leader, in a job of several hosts;
            ``""``: none is known.
        own_route: Address of this host on ``routed``, where this host is the leader and the
            leader's name does not lead to this host; else ``""``.
        free_port: TCP port of the loopback interface that no program has, for the ranks' store of a
            job of one host; 0: it was not looked up.
    """

    gpus: int = 0
    neuron_devices: int = 0
    cpus: int = 1
    efa: tuple[str, ...] | None = ()
    interfaces: tuple[str, ...] = ()
    reaching: str = ""
    visible_gpus: tuple[str, ...] | None = None
    closed_efa: tuple[str, ...] = ()
    locked_memory: int | None = None
    gpu_nodes: tuple[int, ...] = ()
    cpus_limited: bool = False
    shared_memory: int | None = None
    own_address: str = ""
    routed: str = ""
    own_route: str = ""
    free_port: int = 0


class Environment(NamedTuple):
    """The world as read once. Paths are absolute; mappings are read-only.

    Attributes:
        base_directory: Root of the platform's directories.
        variables: The process's environment, without the job's secret.
        hyperparameters: Decoded hyperparameters, the user's and the reserved ones.
        hosts: The job's hosts: by the platform's resource config, or by what
            ``platform`` says.
        input_data_config: The platform's file of that name.
        manifest: The image's manifest.
        devices: What this host has.
        code: The user's code.
        hostname: The kernel's host name.
        programs: Name -> path, of programs that exist.
        hostname_shim: Path of the shim if the file exists, else ``""``.
        launcher_python: Python that runs this launcher.
        launcher_directory: Directory of this launcher, with the small programs that it starts
            (rank.py, agent.py).
        drivers: What ModelTrainer's files say. It is in ``hyperparameters`` already, except for a
            command and its arguments.
        platform: Who started this host, and what it says about the job's hosts.
        invocation: What the command line asks for. It is in ``hyperparameters`` already, except for
            the program, whose first word is a path below the code's directory or an absolute one.
        job_secret: Secret that hosts prove to know. It is in no other field, so
            that no process of the user gets it.
        aws_client: How to ask AWS: BOTO3, or the path of the aws command line; ``""`` if neither
            exists or is needed.
        checkpoint_directory: Where checkpoints are; ``""`` if that is not known.
        resume_from: Path of the newest complete checkpoint there; ``""`` if there is none.
        results: Where the job's results go, and why; its paths are empty where
            that is below the base directory.
        refusals: Directory for the report of a job that is not started; ``""``:
            nobody would look there.
        home: Home directory for the job's processes where their own cannot be
            written; ``""``: it can.
        temporary: Directory for temporary files where the usual one does not
            serve; ``""``: it does.
        locale: Variables of a locale that the image lacks -> the one that it has.
        contained: Whether this process runs in a container, whose engine ends all of its processes.
        warnings: Lines to print before the start.
        problems: What could not be read.
    """

    base_directory: str
    variables: Mapping[str, str]
    hyperparameters: Mapping[str, Json]
    hosts: Hosts
    input_data_config: Mapping[str, Json]
    manifest: Manifest
    devices: Devices
    code: entry_point.Code
    hostname: str
    programs: Mapping[str, str]
    hostname_shim: str
    launcher_python: str
    launcher_directory: str
    drivers: sdk_drivers.Drivers = sdk_drivers.NONE
    platform: platforms.Description = platforms.NONE
    invocation: Invocation = NOTHING_ASKED
    job_secret: str = ""
    aws_client: str = ""
    checkpoint_directory: str = ""
    resume_from: str = ""
    results: directories.Results = directories.Results({}, {})
    refusals: str = ""
    home: str = ""
    temporary: str = ""
    locale: Mapping[str, str] = MappingProxyType({})
    contained: bool = True
    warnings: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()

    @property
    def reserved(self) -> Reserved:
        """The hyperparameters that are meant for the launcher."""
        return Reserved(self.hyperparameters)

    @property
    def user_hyperparameters(self) -> Mapping[str, Json]:
        """The hyperparameters that are meant for the script."""
        return split_reserved(self.hyperparameters)[0]

    @property
    def places(self) -> Mapping[str, str]:
        """Variable -> path of every directory that the script is told to write to."""
        return {
            **directories.named(self.base_directory, self.checkpoint_directory),
            **self.results.paths,
        }

    @property
    def output(self) -> str:
        """Directory of the job's output, and of the launcher's reports."""
        return self.places[directories.OUTPUT]

    def __repr__(self) -> str:
        """Return all but the job's secret."""
        shown = (
            f"{name}={value!r}" for name, value in self._asdict().items() if name != "job_secret"
        )
        return f"Environment({', '.join(shown)})"


def read_environment(
    variables: Mapping[str, str], invocation: Invocation = NOTHING_ASKED
) -> Environment:
    """Read everything.

    Never raises for bad input: unreadable or malformed files become ``problems``.

    Args:
        variables: The process's environment (the caller passes ``os.environ``).
        invocation: What the command line asks for.
    """
    variables = _with_plain_rendezvous(variables)
    base = base_directory(variables, bool(invocation.program))
    documents = _Documents(base, are_needed=not invocation.program)
    trainer, hyperparameters = _read_hyperparameters(documents, variables, invocation)
    reserved = Reserved(hyperparameters)
    hostname = os.uname().nodename
    platform_file = documents.read(names.RESOURCE_CONFIG_FILE)
    job_secret, secret_problems = secret.read_secret(variables)
    platform = platforms.describe(
        platforms.Sources(
            variables=variables,
            resource_config=platform_file,
            hostname=hostname,
            read=_read_text,
            address=_own_address,
            program=Path(invocation.program[0]).name if invocation.program else "",
        )
    )
    hosts = platform.hosts
    input_data_config = documents.read(names.INPUT_DATA_CONFIG_FILE)
    checkpoints = _checkpoint_directory(documents, variables)
    manifest, manifest_problems = read_manifest(variables)
    programs = _find_programs(manifest, variables)
    invocation, code, code_problems = _look_for_code(base, variables, reserved, invocation, trainer)

    # Where the job's processes write.
    home, home_line = directories.home_of(variables)
    temporary, temporary_line = directories.temporary_of(variables)
    with inspecting("the directory of the results", base):
        results, refusals = _results(base, variables, platform, checkpoints)
    locale, locale_line = directories.locale_of(variables)
    lines = (home_line, temporary_line, locale_line, results.warning)
    warnings = [line for line in lines if line]
    warnings += _misspelt(variables)
    warnings += _more_hosts(variables, platform)
    warnings += platform.warnings
    if _starts_tasks_without_pmi(variables, platform):
        words = invocation.program or (entry_point.program_name(variables, reserved),)
        warnings += _worlds_of_one(code, words)

    # The image.
    modes = _modes_asked_for(reserved, platform)
    packages = tuple(name for mode in modes for name in mode.packages)
    if not manifest.document:
        manifest, programs, line = _observe_image(programs, variables, packages)
        warnings.append(line)
    manifest = _complete(manifest, modes, packages, programs)
    shim = ""
    if manifest.hostname_shim and Path(manifest.hostname_shim).is_file():
        shim = manifest.hostname_shim

    # The host itself.
    own_name = hosts.current if shim and platform.names_resolve else hostname
    devices = _probe(variables, platform, own_name, modes)
    needs_aws = code.remote or bool(variables.get(names.REPOSITORY_VARIABLE))
    without_secret = dict(variables)
    without_secret.pop(names.JOB_SECRET_VARIABLE, None)
    return Environment(
        base_directory=base,
        variables=MappingProxyType(without_secret),
        hyperparameters=hyperparameters,
        hosts=hosts,
        input_data_config=MappingProxyType(dict(input_data_config)),
        manifest=manifest,
        devices=devices,
        code=code,
        hostname=hostname,
        programs=programs,
        hostname_shim=shim,
        launcher_python=sys.executable,
        launcher_directory=str(Path(__file__).resolve().parents[1]),
        drivers=trainer,
        platform=platform,
        invocation=invocation,
        job_secret=job_secret,
        aws_client=_find_aws_client(needs_aws, programs),
        checkpoint_directory=checkpoints,
        resume_from=_newest_checkpoint(checkpoints),
        results=results,
        refusals=refusals,
        home=home,
        temporary=temporary,
        locale=locale,
        contained=cgroups.is_contained(),
        warnings=tuple(warnings),
        problems=(
            *documents.problems,
            *trainer.problems,
            *platform.problems,
            *manifest_problems,
            *code_problems,
            *secret_problems,
        ),
    )


def _modes_asked_for(reserved: Reserved, platform: platforms.Description) -> list[Mode]:
    """Return the modes that a hyperparameter switches on, else the platform's own."""
    modes = [MODES[mode] for switch, mode in SWITCHES.items() if reserved.is_on(switch)]
    if not modes and platform.mode:
        modes = [MODES[platform.mode]]
    return modes


def _starts_tasks_without_pmi(
    variables: Mapping[str, str], platform: platforms.Description
) -> bool:
    """Return whether the platform starts several ranks, and tells them nothing of each other."""
    if platform.tasks is None or sum(platform.tasks.counts) < 2:
        return False
    return not any(name.startswith(("PMI_", "PMIX_")) for name in variables)


def _with_plain_rendezvous(variables: Mapping[str, str]) -> Mapping[str, str]:
    """Return the variables with MASTER_ADDR and MASTER_PORT as programs read them.

    An IPv6 address stands alone; a port beside it is MASTER_PORT's, where that is not set. The
    ``tcp://...`` of a Kubernetes Service named master is not a port.
    """
    address = variables.get("MASTER_ADDR", "")
    alone = without_brackets(address)
    is_of_service = variables.get(names.MASTER_PORT_VARIABLE, "").startswith("tcp://")
    if alone == address and not is_of_service:
        return variables

    plain = dict(variables)
    if is_of_service:
        del plain[names.MASTER_PORT_VARIABLE]
    if alone != address:
        plain["MASTER_ADDR"] = alone
        _, _, port = address.partition("]:")
        if port and not plain.get(names.MASTER_PORT_VARIABLE):
            plain[names.MASTER_PORT_VARIABLE] = port
    return plain


class _Documents:
    """The platform's JSON files below a base directory, and why some of them cannot be used."""

    def __init__(self, base: str, *, are_needed: bool) -> None:
        self.base = base
        self.problems: list[Problem] = []
        if are_needed and not Path(base).is_dir():
            advice = (
                f"set {names.BASE_DIRECTORY_VARIABLE} to a directory with code/ and input/config/;"
                " see: train --help"
            )
            self._refuse("directory not found; the job's files are expected in it", base, advice)

    def read(self, name: str) -> Mapping[str, Json]:
        """Return one of the files.

        Absent is empty (local use), anything else that fails is a problem.
        """
        path = Path(self.base, name)
        try:
            with inspecting("the configuration", str(path)):
                # Files written by hand may begin with a byte order mark.
                value = decode(files.read_text(path, "utf-8-sig"))
        except FileNotFoundError:
            return NOTHING
        except (OSError, ValueError) as error:
            self._refuse(
                f"cannot be read: {error}", str(path), "the platform writes this file as JSON"
            )
            return NOTHING
        if not isinstance(value, dict):
            self._refuse(
                f"is {kind(value)}, not an object", str(path), "the platform writes an object"
            )
            return NOTHING
        return value

    def _refuse(self, what: str, where: str, advice: str) -> None:
        self.problems.append(Problem(what, where, advice))


def _read_hyperparameters(
    documents: _Documents, variables: Mapping[str, str], invocation: Invocation
) -> tuple[sdk_drivers.Drivers, Mapping[str, Json]]:
    """Return what ModelTrainer's files say, and the hyperparameters with that
    and the command line in them.
    """
    given = decode_values(documents.read(names.HYPERPARAMETERS_FILE))
    files = sdk_drivers.TrainerFiles(
        source=documents.read(names.SOURCE_CODE_FILE),
        distributed=documents.read(names.DISTRIBUTED_FILE),
    )
    trainer = sdk_drivers.read_drivers(
        files,
        given,
        entry_point.program_name(variables, Reserved(given)),
        documents.base,
        names.RUNTIME_DIRECTORY_VARIABLE in variables,
    )
    return trainer, MappingProxyType(
        {**trainer.hyperparameters, **given, **invocation.hyperparameters}
    )


def _look_for_code(
    base: str,
    variables: Mapping[str, str],
    reserved: Reserved,
    invocation: Invocation,
    trainer: sdk_drivers.Drivers,
) -> tuple[Invocation, entry_point.Code, list[Problem]]:
    """Return the command line with its program where it was found, the code,
    and why the code cannot be used.
    """
    problems: list[Problem] = []
    if invocation.program:
        with inspecting("the code", str(Path.cwd())):
            words, code = look_at_program(
                str(Path.cwd()), invocation.program, variables.get("PATH", os.defpath)
            )
        invocation = invocation._replace(program=words)
    elif trainer.command and names.SUBMIT_DIRECTORY not in reserved:
        # A command without code of its own: where the image starts programs.
        code = entry_point.Code(directory=str(Path.cwd()))
    else:
        location = entry_point.code_location(base, variables, reserved)
        if not _can_be_path(location):  # ``job`` reports the hyperparameter
            location = f"{base}/{names.CODE_DIRECTORY}"
        with inspecting("the code", "" if "://" in location else location):
            code, problems = look_at_code(
                base, location, entry_point.program_name(variables, reserved)
            )
    if trainer.requirements:
        code = code._replace(requirements=trainer.requirements)
    return invocation, code, problems


def _checkpoint_directory(documents: _Documents, variables: Mapping[str, str]) -> str:
    """Return where checkpoints are: see ``names.CHECKPOINT_DIRECTORY_VARIABLE``.

    ``""`` if that is not known.
    """
    given = variables.get(names.CHECKPOINT_DIRECTORY_VARIABLE, "").strip()
    given = given or text(documents.read(names.CHECKPOINT_CONFIG_FILE).get("LocalPath")).strip()
    default = f"{documents.base}/{names.CHECKPOINTS}"
    if given and _can_be_path(given):
        return str(Path(given).absolute())
    with inspecting("the checkpoints", default):
        return default if Path(default).is_dir() else ""


def _newest_checkpoint(directory: str) -> str:
    """Return the newest complete checkpoint; the module is needed only where there may be one."""
    if not directory:
        return ""
    with inspecting("the checkpoints", directory):
        if not Path(directory).is_dir():
            return ""
        from trainworks_launcher.contract.checkpoints import newest_complete

        return newest_complete(directory)


def base_directory(variables: Mapping[str, str], has_program: bool) -> str:
    """Return the root of the job's directories: the variable, else the platform's own.

    A program of the command line needs none of the platform's files: where the platform's own
    directory is missing, it is the working directory.
    """
    base = variables.get(names.BASE_DIRECTORY_VARIABLE)
    if not base and has_program and not Path(names.BASE_DIRECTORY).is_dir():
        return str(Path.cwd())
    return str(Path(base or names.BASE_DIRECTORY).absolute())


def _misspelt(variables: Mapping[str, str]) -> list[str]:
    """Return a line for each variable that was probably meant for one of the
    launcher's: it changes nothing.
    """
    prefix = names.OWN_PREFIX
    own = set()
    for constant, value in vars(names).items():
        if constant.endswith("_VARIABLE") and isinstance(value, str):
            own.add(value)
    known = {name[len(prefix) :] for name in own if name.startswith(prefix)}
    lines = []
    for name in variables:
        if not name.startswith(prefix) or name in own:
            continue
        near = suggestions.nearest(name[len(prefix) :], known)
        if near:
            lines.append(
                f"{name} is none of the launcher's variables; did you mean {prefix}{near}?"
            )
    return lines


def _more_hosts(variables: Mapping[str, str], platform: platforms.Description) -> list[str]:
    """Return a line about variables by which an unknown scheduler may mean
    several hosts, where one is planned.

    A person who has named the hosts, or started a job of one process among others, needs none.
    """
    is_several = len(platform.hosts.names) > 1
    if is_several or platform.ranks_elsewhere or platform.served or platform.problems:
        return []
    if platform.platform in ("hosts", "sagemaker", "hyperpod"):
        return []
    hints = [*cluster_hosts.hints(variables)]
    hints += [f"{name} is set" for name in _SAYS_NOTHING if name in variables]
    if not hints:
        return []
    advice = f"if it has more, set {names.HOSTS_VARIABLE} and {names.HOST_VARIABLE} on each of them"
    shown = ", ".join(hints[:_SHOWN])
    return [f"{shown}: this host is planned as a job of its own; {advice}"]


_SAYS_NOTHING = ("DET_TASK_TYPE", "MODAL_TASK_ID")
"""Variables of schedulers that tell a job's other hosts by a library alone: Determined
(determined.get_cluster_info), Modal (modal.experimental.get_cluster_info).
"""


def _results(
    base: str, variables: Mapping[str, str], platform: platforms.Description, checkpoints: str
) -> tuple[directories.Results, str]:
    """Return where the results go, and ``Environment.refusals``.

    SageMaker takes them from the base directory, and a person who names one looks there. Nobody
    else keeps anything: they may go to the working directory, to a directory of the job's own if
    the scheduler names it, because other jobs may be started from there. Such a directory gets no
    report of a job that was not started.
    """
    table = _read_text(directories.MOUNTS, "surrogateescape")
    of_sagemaker = platform.platform == "sagemaker"
    uploaded = of_sagemaker and names.JOB_NAME_VARIABLE in variables
    roots: tuple[str, ...] = (base,)
    beside = ""
    if not of_sagemaker and not variables.get(names.BASE_DIRECTORY_VARIABLE):
        job = re.sub(r"[^A-Za-z0-9._-]+", "-", platform.job_id).lstrip(".")
        beside = f"{Path.cwd()}/output/{job}" if job else str(Path.cwd())
        roots = (beside,) if base == str(Path.cwd()) else (base, beside)
    told: Mapping[str, str] = {} if of_sagemaker else variables
    results = directories.choose(
        roots, told, checkpoints, lambda path: uploaded or directories.keeps(path, table)
    )
    output = results.paths[directories.OUTPUT]
    is_beside = bool(beside) and output == f"{beside}/output"
    if is_beside or not Path(output).parent.is_dir():
        return results, ""
    return results, output


def _worlds_of_one(code: entry_point.Code, words: Sequence[str]) -> list[str]:
    """Return a warning if an MPI program is started as tasks that know nothing of each other."""
    from trainworks_launcher.environment.source_dir import imports_mpi

    if not imports_mpi(code, words):
        return []
    warning = (
        "the program imports mpi4py, and srun gave its tasks no PMI:"
        " each of them will be rank 0 of 1; start it with srun --mpi=pmix,"
        " or with one task on each node and train --mode mpi"
    )
    return [warning]


def report_directory(variables: Mapping[str, str], has_program: bool) -> str:
    """Return ``Environment.refusals`` of a job that is not read yet."""
    base = base_directory(variables, has_program)
    config = _Documents(base, are_needed=False).read(names.RESOURCE_CONFIG_FILE)
    return _results(base, variables, platforms.describe(platforms.Sources(variables, config)), "")[
        1
    ]


def _own_address() -> str:
    """Return this host's address on the interface of the default route, "" if there is none."""
    from trainworks_launcher.environment import network_routes

    interface = network_routes.default_route_interface()
    return network_routes.address_of(interface) or "" if interface else ""


def _free_port() -> int:
    from trainworks_launcher.environment import network_routes

    return network_routes.free_port()


def _read_text(path: str, errors: str = "strict") -> str:
    """Return the text of a file that a platform names, "" if it cannot be read."""
    try:
        return files.read_text(Path(path), errors=errors)
    except (OSError, ValueError):
        return ""


def read_manifest(variables: Mapping[str, str]) -> tuple[Manifest, list[Problem]]:
    """Return the image's manifest, the generic one if there is none at the default place.

    And what is wrong with it.
    """
    asked = variables.get(names.IMAGE_MANIFEST_VARIABLE)
    path = Path(asked or names.IMAGE_MANIFEST)
    try:
        with inspecting("the image's manifest", str(path)):
            words = path.read_text(encoding="utf-8")
        return parse_manifest(words, str(path)), []
    except FileNotFoundError:
        where = f"{names.IMAGE_MANIFEST_VARIABLE}={asked}"
        problems = [Problem("file not found", where, "unset it, or correct it")] if asked else []
        return Manifest(), problems
    except (OSError, UnicodeDecodeError) as error:
        return Manifest(), [Problem(f"the image manifest cannot be read: {error}", str(path))]
    except RefusalError as refusal:
        return Manifest(), list(refusal.problems)


def _find_programs(manifest: Manifest, variables: Mapping[str, str]) -> Mapping[str, str]:
    """Return the absolute path of each program that exists and can be executed."""
    search = variables.get("PATH", os.defpath)
    programs: dict[str, str] = {}
    for name in PROGRAMS:
        candidates = _GENERIC_NAMES.get(name, (name,))
        if name in manifest.programs:
            candidates = (manifest.programs[name],)
        for candidate in candidates:
            path = shutil.which(candidate, path=search)
            if path:
                programs[name] = path
                break
    return MappingProxyType(programs)


def _observe_image(
    programs: Mapping[str, str], variables: Mapping[str, str], packages: Sequence[str]
) -> tuple[Manifest, Mapping[str, str], str]:
    """Return what stands in for the manifest of an image that has none, its
    programs, and a line for the log.

    The Python for jobs is the first one that has a framework: the one that the launcher is
    installed in, else the one on PATH. Programs beside it (torchrun) are found before those on
    PATH.
    """
    # Loaded only here: an image of the builder has a manifest, and starts no process to read it.
    from trainworks_launcher.environment.observed import (
        Observed,
        has_nccl_plugin,
        observe,
        pythons_of_jobs,
    )

    on_path = programs.get("python", "")
    answers = {python: observe(python, packages) for python in pythons_of_jobs(on_path)}
    with_framework = [python for python, answer in answers.items() if answer.has_framework]
    python = next(iter(with_framework), on_path)
    if python != on_path:
        beside = f"{Path(python).parent}{os.pathsep}{variables.get('PATH', os.defpath)}"
        programs = {**_find_programs(Manifest(), {**variables, "PATH": beside}), "python": python}
    observed = answers.get(python, Observed())
    manifest = Manifest(components=observed.components, protected=observed.protected)
    if "nccl" in observed.components and not has_nccl_plugin(variables):
        manifest = manifest._replace(
            missing=(Missing(names.NCCL_PLUGIN, names.WITHOUT_NCCL_PLUGIN),)
        )
    return manifest, MappingProxyType({**programs}), observed.line(python)


def _complete(
    manifest: Manifest, modes: Sequence[Mode], packages: Sequence[str], programs: Mapping[str, str]
) -> Manifest:
    """Return the manifest with the versions that the modes need and that it lacks.

    A user may have installed more into an image of ours. Of another image its
    Python was asked already.
    """
    versions: dict[str, str] = {}
    takes_mpi_options = any(mode.options for mode in modes)
    is_unknown = names.OPEN_MPI not in manifest.components
    if takes_mpi_options and is_unknown and "mpirun" in programs:
        versions[names.OPEN_MPI] = _open_mpi_version(programs["mpirun"])
    unknown = [name for name in packages if name not in manifest.components]
    if unknown and manifest.document and "python" in programs:
        from trainworks_launcher.environment.observed import observe

        components = observe(programs["python"], unknown).components
        for name in unknown:
            if name in components:
                versions[name] = components[name]
    if not versions:
        return manifest
    return manifest._replace(components=MappingProxyType({**manifest.components, **versions}))


def _open_mpi_version(mpirun: str) -> str:
    """Return the version that mpirun itself reports, asked only where no manifest says it.

    "" if it says nothing.
    """
    import subprocess

    try:
        answer = subprocess.run(
            [mpirun, "--version"], capture_output=True, timeout=_PROBE_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    match = re.search(rb"Open MPI\)? v?(\d+\.\d+\.\d+)", answer.stdout)
    return match.group(1).decode() if match else ""


def _can_be_path(location: str) -> bool:
    """Return whether the kernel can be asked for it.

    Bytes of a variable that are not UTF-8 are a path like any other.
    """
    try:
        return "\0" not in location and bool(os.fsencode(location))
    except UnicodeEncodeError:
        return False


def look_again(environment: Environment) -> Environment:
    """Return the environment with the code that has been fetched and unpacked meanwhile."""
    directory = environment.code.directory
    program = entry_point.program_name(environment.variables, environment.reserved)
    code, problems = look_at_code(environment.base_directory, directory, program)
    code = code._replace(requirements=environment.code.requirements)
    return environment._replace(code=code, problems=tuple(problems))


def _find_aws_client(needed: bool, programs: Mapping[str, str]) -> str:
    """Return how AWS can be asked, looked up only where the job needs it: see
    ``Environment.aws_client``.
    """
    if not needed:
        return ""
    if "python" in programs:
        import subprocess

        question = "import importlib.util, sys; sys.exit(importlib.util.find_spec('boto3') is None)"
        words = (programs["python"], "-I", "-c", question)
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(words, capture_output=True, timeout=_PROBE_SECONDS, check=False)
            if done.returncode == 0:
                return BOTO3
    return programs.get("aws", "")


def _probe(
    variables: Mapping[str, str],
    platform: platforms.Description,
    own_name: str,
    modes: Sequence[Mode],
) -> Devices:
    """Count and list what the host has, by the kernel's own files.

    Args:
        variables: The process's environment.
        platform: Who started this host.
        own_name: What gethostname() answers a program.
        modes: The modes that the job asks for.
    """
    interfaces = names_in("/sys/class/net")
    network = _look_at_network(platform, own_name, interfaces)
    present = count_gpus(variables)
    visible = platforms.visible_gpus(variables, present)
    gpus = present if visible is None else len(visible)
    if platform.gpus is not None:
        gpus = min(gpus, platform.gpus)
    usable_efa, closed_efa = efa_devices()
    cpus, limit = _count_cpus(), cgroups.cpu_quota()
    is_one_host = len(platform.hosts.names) < 2
    starts_torchrun = any("torchrun" in mode.programs for mode in modes)
    return Devices(
        gpus=gpus,
        gpu_nodes=nodes_of_gpus(gpus, visible, variables),
        visible_gpus=visible,
        neuron_devices=len(names_in("/dev", re.compile(r"neuron\d+").fullmatch)),
        cpus=min(cpus, limit or cpus),
        cpus_limited=limit is not None and limit < cpus,
        efa=usable_efa,
        closed_efa=closed_efa,
        locked_memory=locked_memory() if usable_efa else None,
        interfaces=interfaces,
        shared_memory=_free_bytes("/dev/shm"),  # noqa: S108  (the kernel's own)
        free_port=_free_port() if is_one_host and starts_torchrun else 0,
        **network,
    )


def _look_at_network(
    platform: platforms.Description, own_name: str, interfaces: Sequence[str]
) -> Mapping[str, str]:
    """Return the fields of ``Devices`` that say how this host reaches the others.

    Sockets are not loaded for a plain script on one host.
    """
    hosts = platform.hosts
    if len(hosts.names) > 1:
        from trainworks_launcher.environment import network_routes

        looked_up = ", ".join(dict.fromkeys((hosts.names[0], own_name)))
        with inspecting(f"the look-up of host names (DNS) for {looked_up}"):
            return network_routes.look_at_network(platform, own_name, interfaces)._asdict()
    if hosts.interface not in ("", *interfaces):
        from trainworks_launcher.environment import network_routes

        return {"reaching": network_routes.interface_that_reaches(*hosts.names)}
    return {}


def _count_cpus() -> int:
    """CPUs that this process may use; on a laptop whose kernel has no such limit, all of them."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def _free_bytes(path: str) -> int | None:
    """Return what a process of any user can still write to a file system; None if there is none."""
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_frsize * found.f_bavail
