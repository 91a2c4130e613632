"""Translates the files of the SDK's ModelTrainer into hyperparameters. Pure.

ModelTrainer (SageMaker Python SDK, version 3) sends two files to its own starter:
``sourcecode.json`` with the fields of SourceCode, and ``distributed.json`` with the fields of
Torchrun or MPI. If the image is run with its own entry point, or the starter's command is
``train``, these files describe the job. They become the hyperparameters that versions 1 and 2 of
the SDK send for the same settings, so that one set of rules holds for all versions.
"""

from __future__ import annotations

import shlex
from types import MappingProxyType
from typing import Mapping, NamedTuple, Sequence

from trainworks_launcher.contract import names
from trainworks_launcher.contract.errors import Problem
from trainworks_launcher.contract.json_values import NOTHING, Json, kind, text, unusable

_ARCHIVES = (".tar.gz", ".tgz")
_LAUNCHERS = (
    "train",
    "/opt/trainworks/bin/train",
    "exec train",
    "exec /opt/trainworks/bin/train",
)
"""Values of SourceCode.command that start this launcher.

ModelTrainer's shell is process 1 of the container, and the kernel drops a stop signal for it
(pid_namespaces(7)). With ``exec`` the launcher takes the place of the shell, and gets the signal.
"""

_AUTOMATIC = "auto"
"""Value of SourceCode.requirements: install requirements.txt if the file exists."""


class Drivers(NamedTuple):
    """The settings in ModelTrainer's files.

    Attributes:
        hyperparameters: The settings as hyperparameters of the older SDK, for example
            ``{"sagemaker_program": "train.py"}``.
        command: Line of shell that runs instead of an entry point; ``""`` for none.
        arguments: Arguments of ``command``.
        requirements: Requirements file to install; ``""``: requirements.txt.
        distributed: distributed.json as it is, for the script.
        notes: Lines for the log.
        problems: Mistakes in the files, and contradictions with the hyperparameters.
    """

    hyperparameters: Mapping[str, Json] = NOTHING
    command: str = ""
    arguments: tuple[str, ...] = ()
    requirements: str = ""
    distributed: Mapping[str, Json] = NOTHING
    notes: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()


NONE = Drivers()
"""No ModelTrainer, or a job that names its entry point in the older way."""


class _Fields:
    """Reads the fields of one file, and collects the problems with them.

    Attributes:
        file: Name of the file, for messages.
        document: The object in the file.
        problems: Problems with its fields.
    """

    def __init__(self, file: str, document: Mapping[str, Json]) -> None:
        self.file, self.document = file, document
        self.problems: list[Problem] = []

    def text(self, name: str) -> str:
        """Return a text without blanks at its ends; "" if it is absent or null.

        "" also for another value, and for a text that no program can be given: ``problems`` gets
        a problem then.
        """
        value = self.document.get(name)
        if value is not None and not isinstance(value, str):
            self.refuse(f"{name!r} is {kind(value)}", "give a text, or leave it out")
        if self._is_unusable(name, text(value)):
            return ""
        return text(value).strip()

    def list(self, name: str) -> tuple[Json, ...]:
        """Return a list of texts and numbers; () if it is absent or null.

        For another value ``problems`` gets a problem, and () is returned. An entry that no program
        can be given is a problem, too, and is left out.
        """
        value = self.document.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not _are_scalars(value):
            self.refuse(f"{name!r} is {kind(value)}", "give a list of texts and numbers")
            return ()
        entries = []
        for entry in value:
            if isinstance(entry, str) and self._is_unusable(name, entry):
                continue
            entries.append(entry)
        return tuple(entries)

    def _is_unusable(self, name: str, value: str) -> bool:
        """Return whether a text cannot be an argument of a program, and note that as a problem."""
        reason = unusable(value)
        if reason:
            self.refuse(f"{name!r} {reason}", "leave it out")
        return bool(reason)

    def refuse(self, mistake: str, advice: str) -> None:
        """Note a problem with the file."""
        self.problems.append(Problem(mistake, self.file, advice))


def _are_scalars(entries: Sequence[Json]) -> bool:
    return all(isinstance(entry, (str, int, float)) for entry in entries)


class TrainerFiles(NamedTuple):
    """The two files that ModelTrainer of the SageMaker Python SDK writes for its starter.

    Attributes:
        source: sourcecode.json; {} if it is missing.
        distributed: distributed.json; {} if it is missing.
    """

    source: Mapping[str, Json]
    distributed: Mapping[str, Json]


def read_drivers(
    files: TrainerFiles,
    hyperparameters: Mapping[str, Json],
    program: str,
    base: str,
    started_by_us: bool,
) -> Drivers:
    """Read the settings of the two files. Nothing is raised: mistakes become ``problems``.

    NONE if there are no such files. If the job names its entry point in the older way, the files
    are not used, and a note says so.

    Args:
        files: The files.
        hyperparameters: The job's hyperparameters.
        program: The entry point from SAGEMAKER_PROGRAM or a hyperparameter; ``""`` for none.
        base: The base directory.
        started_by_us: Whether another ``train`` has started this one.
    """
    if not files.source:
        return NONE
    if program:
        return Drivers(notes=(f"{names.SOURCE_CODE_FILE} is not used: the job names {program!r}",))
    fields = _Fields(names.SOURCE_CODE_FILE, files.source)
    launch = _Fields(names.DISTRIBUTED_FILE, files.distributed)
    command, script = fields.text("command"), _without_dot(fields.text("entry_script"))
    arguments = tuple(str(entry) for entry in fields.list("args"))
    launcher = ""
    if command in _LAUNCHERS:
        # ModelTrainer's starter has started this launcher: the other fields are the job.
        launcher, command, arguments = command, "", ()
    elif command and started_by_us:
        advice = "make it the one word train, and name the script as entry_script"
        fields.refuse(f"the command starts this launcher again: {command}", advice)

    notes = [f"the job is that of {names.SOURCE_CODE_FILE}, as ModelTrainer wrote it"]
    # ModelTrainer's own starter hands hyperparameters to a script as JSON, and none to a command.
    settings: dict[str, Json] = {names.ARGUMENT_STYLE: "json"}
    if command:
        settings[names.ARGUMENT_STYLE] = "none"
        if script:
            notes.append("entry_script is not used: the job has a command")
        if files.distributed:
            notes.append(
                f"{names.DISTRIBUTED_FILE} is not used: the command starts its processes itself"
            )
    elif script:
        settings[names.PROGRAM] = script
        settings.update(_read_distribution(launch))
    elif launcher:
        advice = f"set entry_script in SourceCode to the script that {launcher} is to start"
        fields.refuse(f"command={launcher!r} needs 'entry_script'", advice)
    else:
        advice = "set entry_script in SourceCode, or your own command"
        fields.refuse("neither 'entry_script' nor 'command' is given", advice)

    directory = fields.text("source_dir")
    if directory:
        location = f"{base}/{names.SOURCE_CHANNEL}" if base else names.SOURCE_CHANNEL
        if directory.endswith(_ARCHIVES):
            location += f"/{directory.rsplit('/', 1)[-1]}"
        settings[names.SUBMIT_DIRECTORY] = location
    requirements = fields.text("requirements")
    if requirements == _AUTOMATIC:
        requirements = ""
    if not command:
        arguments = ()
    elif arguments:
        # The shell gets the arguments as words, and does not parse them.
        command += ' "$@"'
    contradictions = _find_contradictions(settings, hyperparameters)
    distributed = NOTHING if command else files.distributed
    return Drivers(
        hyperparameters=MappingProxyType(settings),
        command=command,
        arguments=arguments,
        requirements=_without_dot(requirements),
        distributed=distributed,
        notes=tuple(notes),
        problems=(*launch.problems, *fields.problems, *contradictions),
    )


def _find_contradictions(
    settings: Mapping[str, Json], hyperparameters: Mapping[str, Json]
) -> list[Problem]:
    """Return a problem for each hyperparameter with another value than in ModelTrainer's files."""
    problems = []
    for name, value in settings.items():
        if name == names.ARGUMENT_STYLE or hyperparameters.get(name) in (None, "", value):
            continue
        problem = Problem(
            f"{hyperparameters[name]!r}, and ModelTrainer's files say {value!r}",
            f"hyperparameter {name}",
            "leave the hyperparameter out",
        )
        problems.append(problem)
    return problems


def _read_distribution(fields: _Fields) -> dict[str, Json]:
    """Return the hyperparameters of Torchrun or MPI.

    The file does not name the class. Only MPI has mpi_additional_options, only Torchrun has smp.
    ``{}`` without a file. ``fields`` gets a problem for a file that is of neither class.
    """
    distributed = fields.document
    if not distributed:
        return {}
    settings: dict[str, Json] = {}
    if "mpi_additional_options" in distributed:
        settings[names.MPI_ENABLED] = True
        options = [str(option) for option in fields.list("mpi_additional_options")]
        if options:
            settings[names.MPI_OPTIONS] = shlex.join(options)
    elif "smp" in distributed:  # its parameters come as the hyperparameter mp_parameters
        settings[names.TORCH_DISTRIBUTED_ENABLED] = True
    else:
        problem = f"is neither Torchrun's nor MPI's: it has {', '.join(distributed)}"
        fields.refuse(problem, "use Torchrun or MPI, or a command")
    if distributed.get("process_count_per_node") is not None:
        settings[names.PROCESSES_PER_HOST] = distributed["process_count_per_node"]
    return settings


def _without_dot(path: str) -> str:
    """Return ``train.py`` for ``./train.py``; the SDK accepts both forms."""
    return path[2:] if path.startswith("./") else path
