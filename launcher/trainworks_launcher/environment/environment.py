"""Reads the host and the job once, in one place, into one frozen value: ``Environment``.

Two modules have effects before a job runs: this one and ``command/cli.py``. This module reads
environment variables, the platform's files and the image manifest, and probes the host; it changes
nothing. A file that cannot be read becomes a problem in the value. ``job/job.py`` reports all
problems together.
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
    list_names,
    locked_memory,
    nodes_of_gpus,
)
from trainworks_launcher.environment.manifest import Manifest, Missing, parse_manifest
from trainworks_launcher.environment.resource_config import Hosts
from trainworks_launcher.environment.source_dir import inspect_code, inspect_program

BOTO3 = "boto3"
"""Value of ``Environment.aws_client`` where the image's Python has that library."""

PROGRAMS = (
    *("python", "bash", "sh", "mpirun", "torchrun", "ray", "ssh"),
    *("smddprun", "smddpmprun", "neuron_parallel_compile", "aws"),
)
"""Programs that a plan may name. The manifest says their paths, else PATH does."""

_GENERIC_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType({"python": ("python3", "python")})
_PROBE_SECONDS = 20.0
"""Limit for a program that this module starts, for example ``mpirun --version``."""

_SHOWN = 3
"""Variables of an unknown scheduler that a warning names."""


class Devices(NamedTuple):
    """The GPUs, CPUs, network devices and memory of this host.

    Attributes:
        gpus: Number of NVIDIA GPUs that this process may use.
        visible_gpus: GPUs that CUDA_VISIBLE_DEVICES leaves of the container's, by number or UUID,
            for example ``("0", "GPU-8932f937")``; None: all.
        neuron_devices: Number of Neuron devices.
        cpus: Number of CPUs that this container may use.
        cpus_limited: Whether ``cpus`` comes from a limit of CPU time (a cgroup's quota), not from
            the number of CPUs.
        efa: Names of the EFA devices that can be opened here, for example ``("rdmap0s6",)``; None
            if they cannot be known (preflight).
        closed_efa: Names of the host's other EFA devices.
        locked_memory: Bytes of memory that a process may lock; None: no limit is known.
        gpu_nodes: NUMA node of each GPU, for example ``(0, 0, 1, 1)``; ``()`` where ranks cannot be
            bound to the CPUs of their GPU's node.
        interfaces: Names of network interfaces, for example ``("eth0", "lo")``.
        reaching: Interface that routes to the leader. It is looked up in two cases: the platform's
            interface does not exist; or the platform names none, and the host's own name leads to
            the address of another interface. Otherwise ``""``.
        shared_memory: Bytes of /dev/shm that are free; None if they cannot be known (preflight).
        own_address: Address that the host's own name leads to; ``""``: the name leads to none, or
            it was not looked up.
        routed: Interface that routes to the leader, in a job of several hosts;
            ``""``: none is known.
        own_route: Address of this host on ``routed``, where this host is the leader and the
            leader's name does not lead to this host; else ``""``.
        free_port: TCP port of the loopback interface on which no program listens, for the ranks'
            store of a job of one host; 0: it was not looked up.
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
    """The host and the job as read once. Paths are absolute; mappings are read-only.

    Attributes:
        base_directory: Root of the platform's directories, for example ``/opt/ml``.
        variables: The process's environment, without the job's secret.
        hyperparameters: Decoded hyperparameters, the user's and the reserved ones.
        hosts: The job's hosts, from ``platform``.
        input_data_config: The platform's file input/config/inputdataconfig.json.
        manifest: The image's manifest.
        devices: This host's devices.
        code: The user's code.
        hostname: The kernel's host name.
        programs: Name -> path, of programs that exist.
        hostname_shim: Path of the shim if the file exists, else ``""``.
        launcher_python: Python that runs this launcher.
        launcher_directory: Directory of this launcher, with the small programs that it starts
            (rank.py, agent.py).
        drivers: Settings from the files of the SDK's ModelTrainer. ``hyperparameters`` has them
            already, except for a command and its arguments.
        platform: The platform that started this host, and its description of the job's hosts.
        invocation: The words after ``train``. ``hyperparameters`` has them already, except for the
            program: its first word is a path below the code's directory, or an absolute path.
        job_secret: Secret by which the job's hosts recognise each other. No other field has it, so
            that no process of the user gets it.
        aws_client: How to ask AWS: BOTO3, or the path of the aws command line; ``""`` if neither
            exists or is needed.
        checkpoint_directory: Directory of checkpoints; ``""`` if none is known.
        resume_from: Path of the newest complete checkpoint there; ``""`` if there is none.
        results: Directories of the job's results, and why they were chosen.
        refusals: Directory for the report of a job that is not started; ``""``: no report is
            written.
        home: Home directory for the job's processes if theirs cannot be written, for example
            ``/tmp/trainworks-home-1000``; ``""``: theirs can.
        temporary: Directory for temporary files if the usual one does not serve; ``""``: it does.
        locale: Variable with a locale that the image lacks -> a locale that the image has, for
            example ``{"LC_ALL": "C.UTF-8"}``.
        contained: Whether this process runs in a container. The engine then ends the job's
            processes together with this one.
        warnings: Lines to print before the start.
        problems: Files and variables that could not be read, and why.
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
        """The hyperparameters for the launcher, for example ``sagemaker_mpi_enabled``."""
        return Reserved(self.hyperparameters)

    @property
    def user_hyperparameters(self) -> Mapping[str, Json]:
        """The hyperparameters for the script."""
        return split_reserved(self.hyperparameters)[0]

    @property
    def places(self) -> Mapping[str, str]:
        """Variable -> path of every directory that the script writes to.

        For example ``SM_MODEL_DIR`` -> ``/opt/ml/model``.
        """
        return {
            **directories.paths_below(self.base_directory, self.checkpoint_directory),
            **self.results.paths,
        }

    @property
    def output(self) -> str:
        """Directory of the job's output, and of the launcher's reports."""
        return self.places[directories.OUTPUT]

    def __repr__(self) -> str:
        """Return all fields but the job's secret."""
        fields = self._asdict()
        del fields["job_secret"]
        shown = [f"{name}={value!r}" for name, value in fields.items()]
        return f"Environment({', '.join(shown)})"


def read_environment(
    variables: Mapping[str, str], invocation: Invocation = NOTHING_ASKED
) -> Environment:
    """Read the host and the job.

    Never raises for bad input: unreadable or malformed files become ``problems``.

    Args:
        variables: The process's environment, with the job's secret (``secret.take_variables``).
        invocation: The words after ``train``.
    """
    # The job's settings.
    variables = _with_plain_rendezvous(variables)
    base = base_directory(variables, bool(invocation.program))
    documents = _Documents(base, are_needed=not invocation.program)
    trainer, hyperparameters = _read_hyperparameters(documents, variables, invocation)
    reserved = Reserved(hyperparameters)

    # The platform, and the job's hosts.
    hostname = os.uname().nodename
    resource_config = documents.read(names.RESOURCE_CONFIG_FILE)
    job_secret, secret_problems = secret.read_secret(variables)
    program_file = ""
    if invocation.program:
        program_file = Path(invocation.program[0]).name
    sources = platforms.Sources(
        variables=variables,
        resource_config=resource_config,
        hostname=hostname,
        read=_read_text,
        address=_own_address,
        program=program_file,
    )
    platform = platforms.describe(sources)
    hosts = platform.hosts

    # The job's data, checkpoints and code.
    input_data_config = documents.read(names.INPUT_DATA_CONFIG_FILE)
    checkpoints = _find_checkpoints(documents, variables)
    manifest, manifest_problems = read_manifest(variables)
    programs = _find_programs(manifest, variables)
    invocation, code, code_problems = _find_code(base, variables, reserved, invocation, trainer)

    # The directories that the job's processes write to.
    home, home_warning = directories.choose_home(variables)
    temporary, temporary_warning = directories.choose_temporary(variables)
    with inspecting("the directory of the results", base):
        results, refusals = _choose_results(base, variables, platform, checkpoints)
    locale, locale_warning = directories.choose_locale(variables)

    # Warnings about variables.
    lines = (home_warning, temporary_warning, locale_warning, results.warning)
    warnings = [line for line in lines if line]
    warnings += _warn_of_misspelt_names(variables)
    warnings += _warn_of_more_hosts(variables, platform)
    warnings += platform.warnings
    if _starts_tasks_without_pmi(variables, platform):
        words = invocation.program or (entry_point.program_name(variables, reserved),)
        warnings += _warn_of_missing_pmi(code, words)

    # The image.
    modes = _requested_modes(reserved, platform)
    packages: list[str] = []
    for mode in modes:
        packages += mode.packages
    if not manifest.document:
        manifest, programs, line = _observe_image(programs, variables, packages)
        warnings.append(line)
    manifest = _add_versions(manifest, modes, packages, programs)
    shim = ""
    if manifest.hostname_shim and Path(manifest.hostname_shim).is_file():
        shim = manifest.hostname_shim

    # The host itself. The shim makes gethostname() return the platform's name of the host.
    own_name = hostname
    if shim and platform.names_resolve:
        own_name = hosts.current
    devices = _probe_devices(variables, platform, own_name, modes)
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
        resume_from=_find_newest_checkpoint(checkpoints),
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


def _requested_modes(reserved: Reserved, platform: platforms.Description) -> list[Mode]:
    """Return the modes that a hyperparameter switches on, else the platform's own; ``[]`` for none.

    Several modes are a mistake of the job, which ``job/placement.py`` refuses.
    """
    modes = [MODES[mode] for switch, mode in SWITCHES.items() if reserved.is_on(switch)]
    if not modes and platform.mode:
        return [MODES[platform.mode]]
    return modes


def _starts_tasks_without_pmi(
    variables: Mapping[str, str], platform: platforms.Description
) -> bool:
    """Return whether the platform starts several ranks without PMI, by which MPI connects ranks."""
    if platform.tasks is None or sum(platform.tasks.counts) < 2:
        return False
    return not any(name.startswith(("PMI_", "PMIX_")) for name in variables)


def _with_plain_rendezvous(variables: Mapping[str, str]) -> Mapping[str, str]:
    """Return the variables with MASTER_ADDR and MASTER_PORT in the form that programs read.

    An IPv6 address loses its brackets; a port beside the address becomes MASTER_PORT if that is
    not set: ``[fd00::1]:29500`` is MASTER_ADDR=fd00::1 and MASTER_PORT=29500.
    """
    address = variables.get("MASTER_ADDR", "")
    bare_address = without_brackets(address)
    # Kubernetes sets MASTER_PORT=tcp://10.0.0.1:80 in every pod beside a Service named master.
    is_of_service = variables.get(names.MASTER_PORT_VARIABLE, "").startswith("tcp://")
    if bare_address == address and not is_of_service:
        return variables

    plain = dict(variables)
    if is_of_service:
        del plain[names.MASTER_PORT_VARIABLE]
    if bare_address != address:
        plain["MASTER_ADDR"] = bare_address
        _, _, port = address.partition("]:")
        if port and not plain.get(names.MASTER_PORT_VARIABLE):
            plain[names.MASTER_PORT_VARIABLE] = port
    return plain


class _Documents:
    """Reads the platform's JSON files below a base directory.

    Attributes:
        base: The base directory, for example ``/opt/ml``.
        problems: The files that cannot be used, and why.
    """

    def __init__(self, base: str, *, are_needed: bool) -> None:
        """Read nothing yet. A missing base directory is a problem if the files are needed."""
        self.base = base
        self.problems: list[Problem] = []
        if are_needed and not Path(base).is_dir():
            advice = (
                f"set {names.BASE_DIRECTORY_VARIABLE} to a directory with code/ and input/config/;"
                " see: train --help"
            )
            self._refuse("directory not found; the job's files are expected in it", base, advice)

    def read(self, name: str) -> Mapping[str, Json]:
        """Return the object in a file; an empty one if the file does not exist or cannot be used.

        A file may be missing: outside the platform a job needs none of the files. A file that
        cannot be read, is not JSON, or is not an object is added to ``problems``.
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

    def _refuse(self, mistake: str, where: str, advice: str) -> None:
        self.problems.append(Problem(mistake, where, advice))


def _read_hyperparameters(
    documents: _Documents, variables: Mapping[str, str], invocation: Invocation
) -> tuple[sdk_drivers.Drivers, Mapping[str, Json]]:
    """Return the settings of ModelTrainer's files, and the job's hyperparameters, read-only.

    Of a hyperparameter that several sources set, the command line's value counts, then that of
    hyperparameters.json, then that of ModelTrainer's files.
    """
    hyperparameters = decode_values(documents.read(names.HYPERPARAMETERS_FILE))
    files = sdk_drivers.TrainerFiles(
        source=documents.read(names.SOURCE_CODE_FILE),
        distributed=documents.read(names.DISTRIBUTED_FILE),
    )
    trainer = sdk_drivers.read_drivers(
        files,
        hyperparameters,
        entry_point.program_name(variables, Reserved(hyperparameters)),
        documents.base,
        names.RUNTIME_DIRECTORY_VARIABLE in variables,
    )
    merged = {**trainer.hyperparameters, **hyperparameters, **invocation.hyperparameters}
    return trainer, MappingProxyType(merged)


def _find_code(
    base: str,
    variables: Mapping[str, str],
    reserved: Reserved,
    invocation: Invocation,
    trainer: sdk_drivers.Drivers,
) -> tuple[Invocation, entry_point.Code, list[Problem]]:
    """Return the command line with the path of its program, the code, and the code's problems.

    The code is the working directory for a program of the command line, and for ModelTrainer's
    command without code; else it is at the job's location.
    """
    problems: list[Problem] = []
    if invocation.program:
        working_directory = str(Path.cwd())
        search = variables.get("PATH", os.defpath)
        with inspecting("the code", working_directory):
            words, code = inspect_program(working_directory, invocation.program, search)
        invocation = invocation._replace(program=words)
    elif trainer.command and names.SUBMIT_DIRECTORY not in reserved:
        # A command without code of its own runs in the working directory of the image.
        code = entry_point.Code(directory=str(Path.cwd()))
    else:
        location = entry_point.code_location(base, variables, reserved)
        if not _can_be_path(location):  # job/ reports the hyperparameter
            location = f"{base}/{names.CODE_DIRECTORY}"
        path = "" if "://" in location else location
        program = entry_point.program_name(variables, reserved)
        with inspecting("the code", path):
            code, problems = inspect_code(base, location, program)
    if trainer.requirements:
        code = code._replace(requirements=trainer.requirements)
    return invocation, code, problems


def _find_checkpoints(documents: _Documents, variables: Mapping[str, str]) -> str:
    """Return the directory of checkpoints: the variable's, else the platform's; ``""`` for none."""
    directory = variables.get(names.CHECKPOINT_DIRECTORY_VARIABLE, "").strip()
    if not directory:
        config = documents.read(names.CHECKPOINT_CONFIG_FILE)
        directory = text(config.get("LocalPath")).strip()
    if directory and _can_be_path(directory):
        return str(Path(directory).absolute())

    default = f"{documents.base}/{names.CHECKPOINTS}"
    with inspecting("the checkpoints", default):
        if Path(default).is_dir():
            return default
    return ""


def _find_newest_checkpoint(directory: str) -> str:
    """Return the path of the newest complete checkpoint; ``""`` if there is none."""
    if not directory:
        return ""
    with inspecting("the checkpoints", directory):
        if not Path(directory).is_dir():
            return ""
        # Loaded only here: most jobs have no checkpoint.
        from trainworks_launcher.contract.checkpoints import newest_complete

        return newest_complete(directory)


def base_directory(variables: Mapping[str, str], has_program: bool) -> str:
    """Return the root of the job's directories: the variable's, else the platform's ``/opt/ml``.

    Args:
        variables: The process's environment.
        has_program: Whether the command line names the program. Such a job needs none of the
            platform's files: if ``/opt/ml`` is missing, its root is the working directory.
    """
    base = variables.get(names.BASE_DIRECTORY_VARIABLE)
    if base:
        return str(Path(base).absolute())
    if has_program and not Path(names.BASE_DIRECTORY).is_dir():
        return str(Path.cwd())
    return str(Path(names.BASE_DIRECTORY).absolute())


def _warn_of_misspelt_names(variables: Mapping[str, str]) -> list[str]:
    """Return a warning for each variable with a name that is nearly one of the launcher's."""
    prefix = names.OWN_PREFIX
    own = set()
    # Every variable of the launcher is a constant NAME_VARIABLE of contract/names.py.
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


def _warn_of_more_hosts(variables: Mapping[str, str], platform: platforms.Description) -> list[str]:
    """Return a warning where a variable of an unknown scheduler may mean several hosts.

    Only a job that is planned for one host gets the warning, and only if neither a person nor the
    platform's own file has named that host.
    """
    is_several = len(platform.hosts.names) > 1
    if is_several or platform.ranks_elsewhere or platform.served or platform.problems:
        return []
    if platform.platform in ("hosts", "sagemaker", "hyperpod"):
        return []
    hints = [*cluster_hosts.find_hints(variables)]
    hints += [f"{name} is set" for name in _HOSTS_BY_LIBRARY if name in variables]
    if not hints:
        return []
    advice = f"if it has more, set {names.HOSTS_VARIABLE} and {names.HOST_VARIABLE} on each of them"
    shown = ", ".join(hints[:_SHOWN])
    return [f"{shown}: this host is planned as a job of its own; {advice}"]


_HOSTS_BY_LIBRARY = ("DET_TASK_TYPE", "MODAL_TASK_ID")
"""Variables of schedulers with a library, and no variable, for the job's other hosts: Determined
(determined.get_cluster_info), Modal (modal.experimental.get_cluster_info).
"""


def _choose_results(
    base: str, variables: Mapping[str, str], platform: platforms.Description, checkpoints: str
) -> tuple[directories.Results, str]:
    """Return the directories of the results, and ``Environment.refusals``.

    SageMaker uploads the results from the base directory, and a person who sets the variable of
    the base directory expects the results there. Any other job may write to the working directory
    instead; if the scheduler names the job, to ``output/JOB`` there, because other jobs may be
    started from the same directory.

    ``Environment.refusals`` is the output directory, for the report of a job that is not started.
    It is ``""`` if the results go to the working directory, or if the parent of the output
    directory does not exist. Nothing is made.
    """
    table = _read_text(directories.MOUNTS, "surrogateescape")
    is_of_sagemaker = platform.platform == "sagemaker"
    is_uploaded = is_of_sagemaker and names.JOB_NAME_VARIABLE in variables
    roots: tuple[str, ...] = (base,)
    second_root = ""
    if not is_of_sagemaker and not variables.get(names.BASE_DIRECTORY_VARIABLE):
        working_directory = str(Path.cwd())
        second_root = working_directory
        job = re.sub(r"[^A-Za-z0-9._-]+", "-", platform.job_id).lstrip(".")
        if job:
            second_root = f"{working_directory}/output/{job}"
        roots = (base, second_root)
        if base == working_directory:
            roots = (second_root,)
    settings: Mapping[str, str] = {} if is_of_sagemaker else variables

    def is_kept(path: str) -> bool:
        return is_uploaded or directories.is_kept(path, table)

    results = directories.choose(roots, settings, checkpoints, is_kept)
    output = results.paths[directories.OUTPUT]
    # A job that is not started leaves nothing in the working directory, and makes no directories.
    is_in_second_root = bool(second_root) and output == f"{second_root}/output"
    if is_in_second_root or not Path(output).parent.is_dir():
        return results, ""
    return results, output


def _warn_of_missing_pmi(code: entry_point.Code, words: Sequence[str]) -> list[str]:
    """Return a warning if the program uses MPI: without PMI each task is a world of its own."""
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
    """Return ``Environment.refusals`` of a job that could not be read.

    Args:
        variables: The process's environment.
        has_program: Whether the command line names the program.
    """
    base = base_directory(variables, has_program)
    config = _Documents(base, are_needed=False).read(names.RESOURCE_CONFIG_FILE)
    platform = platforms.describe(platforms.Sources(variables, config))
    _, refusals = _choose_results(base, variables, platform, "")
    return refusals


def _own_address() -> str:
    """Return this host's address on the interface of the default route, "" if there is none."""
    from trainworks_launcher.environment import network_routes

    interface = network_routes.default_route_interface()
    if not interface:
        return ""
    return network_routes.address_of(interface) or ""


def _free_port() -> int:
    """Return a free TCP port of the loopback interface; 0 for none."""
    from trainworks_launcher.environment import network_routes

    return network_routes.free_port()


def _read_text(path: str, errors: str = "strict") -> str:
    """Return the text of a file that a platform names, "" if it cannot be read."""
    try:
        return files.read_text(Path(path), errors=errors)
    except (OSError, ValueError):
        return ""


def read_manifest(variables: Mapping[str, str]) -> tuple[Manifest, list[Problem]]:
    """Return the image's manifest, and its problems.

    An image without a file at the default path has the generic manifest. So has one whose manifest
    cannot be used; the problems tell why. Nothing is raised.
    """
    requested = variables.get(names.IMAGE_MANIFEST_VARIABLE)
    path = Path(requested or names.IMAGE_MANIFEST)
    try:
        with inspecting("the image's manifest", str(path)):
            document = path.read_text(encoding="utf-8")
        return parse_manifest(document, str(path)), []
    except FileNotFoundError:
        if not requested:
            return Manifest(), []
        where = f"{names.IMAGE_MANIFEST_VARIABLE}={requested}"
        return Manifest(), [Problem("file not found", where, "unset it, or correct it")]
    except (OSError, UnicodeDecodeError) as error:
        return Manifest(), [Problem(f"the image manifest cannot be read: {error}", str(path))]
    except RefusalError as refusal:
        return Manifest(), list(refusal.problems)


def _find_programs(manifest: Manifest, variables: Mapping[str, str]) -> Mapping[str, str]:
    """Return name -> absolute path of each program of PROGRAMS that exists and can be executed.

    The manifest's path of a program counts alone; without one PATH is searched.
    """
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
    """Return a manifest for an image that has none, the image's programs, and a line for the log.

    The Python for jobs is the first one that has a framework: the one that the launcher is
    installed in, else the one on PATH. Programs beside that Python (torchrun) are found before
    those on PATH.
    """
    # Loaded only here: an image of the builder has a manifest, and this module starts a process.
    from trainworks_launcher.environment.observed import (
        Observed,
        has_nccl_plugin,
        observe,
        pythons_of_jobs,
    )

    on_path = programs.get("python", "")
    observations = {path: observe(path, packages) for path in pythons_of_jobs(on_path)}
    python = on_path
    for path, observation in observations.items():
        if observation.has_framework:
            python = path
            break
    if python != on_path:
        search = f"{Path(python).parent}{os.pathsep}{variables.get('PATH', os.defpath)}"
        beside = _find_programs(Manifest(), {**variables, "PATH": search})
        programs = {**beside, "python": python}

    observed = observations.get(python, Observed())
    missing: tuple[Missing, ...] = ()
    if "nccl" in observed.components and not has_nccl_plugin(variables):
        missing = (Missing(names.NCCL_PLUGIN, names.WITHOUT_NCCL_PLUGIN),)
    manifest = Manifest(
        components=observed.components, protected=observed.protected, missing=missing
    )
    return manifest, MappingProxyType({**programs}), observed.line(python)


def _add_versions(
    manifest: Manifest, modes: Sequence[Mode], packages: Sequence[str], programs: Mapping[str, str]
) -> Manifest:
    """Return the manifest with the versions that the modes need and that the manifest lacks.

    A user may have installed more packages into an image of the builder. An image without a
    manifest is observed by ``_observe_image``. For this, ``mpirun --version`` or the image's Python
    is started; a version that cannot be found is ``""`` or left out.
    """
    versions: dict[str, str] = {}
    takes_mpi_options = any(mode.options for mode in modes)
    is_unknown = names.OPEN_MPI not in manifest.components
    if takes_mpi_options and is_unknown and "mpirun" in programs:
        versions[names.OPEN_MPI] = _read_open_mpi_version(programs["mpirun"])
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


def _read_open_mpi_version(mpirun: str) -> str:
    """Return the version that ``mpirun --version`` prints, for example 4.1.5; "" if it fails."""
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
    """Return whether the kernel accepts a text as a path. Bytes that are not UTF-8 are accepted."""
    try:
        return "\0" not in location and bool(os.fsencode(location))
    except UnicodeEncodeError:
        return False


def look_again(environment: Environment) -> Environment:
    """Return the environment with the code that has been fetched and unpacked meanwhile.

    Its problems are those of the code alone. The rest of the environment is not read again.
    """
    directory = environment.code.directory
    program = entry_point.program_name(environment.variables, environment.reserved)
    code, problems = inspect_code(environment.base_directory, directory, program)
    code = code._replace(requirements=environment.code.requirements)
    return environment._replace(code=code, problems=tuple(problems))


def _find_aws_client(needed: bool, programs: Mapping[str, str]) -> str:
    """Return how to ask AWS: BOTO3, the path of the aws command line, or ``""`` for neither.

    Only a job that needs AWS starts a process for this: the image's Python, which looks for boto3
    without importing it. Python is not asked if it takes longer than ``_PROBE_SECONDS``.
    """
    if not needed:
        return ""
    if "python" in programs:
        import subprocess

        question = "import importlib.util, sys; sys.exit(importlib.util.find_spec('boto3') is None)"
        argv = (programs["python"], "-I", "-c", question)
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            answer = subprocess.run(argv, capture_output=True, timeout=_PROBE_SECONDS, check=False)
            if answer.returncode == 0:
                return BOTO3
    return programs.get("aws", "")


def _probe_devices(
    variables: Mapping[str, str],
    platform: platforms.Description,
    own_name: str,
    modes: Sequence[Mode],
) -> Devices:
    """Count and list the host's devices, by the kernel's own files.

    Host names may be looked up, device nodes are opened for a moment, and nvidia-smi may be run.

    Args:
        variables: The process's environment.
        platform: The platform that started this host.
        own_name: Name that gethostname() returns to a program of the job.
        modes: The modes that the job requests.
    """
    interfaces = list_names("/sys/class/net")
    network = _look_up_network(platform, own_name, interfaces)

    present = count_gpus(variables)
    visible = platforms.visible_gpus(variables, present)
    gpus = present if visible is None else len(visible)
    if platform.gpus is not None:
        gpus = min(gpus, platform.gpus)

    usable_efa, closed_efa = efa_devices()
    cpus, quota = _count_cpus(), cgroups.cpu_quota()
    is_one_host = len(platform.hosts.names) < 2
    starts_torchrun = any("torchrun" in mode.programs for mode in modes)
    port = 0
    if is_one_host and starts_torchrun:
        port = _free_port()
    neuron_nodes = list_names("/dev", re.compile(r"neuron\d+").fullmatch)
    memory_limit = None
    if usable_efa:  # EFA locks the memory that it transfers
        memory_limit = locked_memory()
    return Devices(
        gpus=gpus,
        gpu_nodes=nodes_of_gpus(gpus, visible, variables),
        visible_gpus=visible,
        neuron_devices=len(neuron_nodes),
        cpus=min(cpus, quota or cpus),
        cpus_limited=quota is not None and quota < cpus,
        efa=usable_efa,
        closed_efa=closed_efa,
        locked_memory=memory_limit,
        interfaces=interfaces,
        shared_memory=_free_bytes("/dev/shm"),  # noqa: S108  (the kernel's own)
        free_port=port,
        **network,
    )


def _look_up_network(
    platform: platforms.Description, own_name: str, interfaces: Sequence[str]
) -> Mapping[str, str]:
    """Return the fields of ``Devices`` that say how this host reaches the others."""
    # network_routes imports socket: a plain script on one host starts faster without it.
    hosts = platform.hosts
    if len(hosts.names) > 1:
        from trainworks_launcher.environment import network_routes

        host_names = ", ".join(dict.fromkeys((hosts.names[0], own_name)))
        with inspecting(f"the look-up of host names (DNS) for {host_names}"):
            return network_routes.look_up_network(platform, own_name, interfaces)._asdict()
    if hosts.interface not in ("", *interfaces):
        from trainworks_launcher.environment import network_routes

        return {"reaching": network_routes.interface_that_reaches(*hosts.names)}
    return {}


def _count_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS has no such limit
        return os.cpu_count() or 1


def _free_bytes(path: str) -> int | None:
    """Return the free bytes of a file system; None if nothing is mounted there."""
    try:
        file_system = os.statvfs(path)
    except OSError:
        return None
    return file_system.f_frsize * file_system.f_bavail
