"""What ModelTrainer of the SageMaker SDK (its third line) says about a job beside its
hyperparameters. Pure.

It sends two files with its own starter: ``sourcecode.json`` (the fields of its SourceCode) and
``distributed.json`` (those of Torchrun or MPI, or nothing). Where an image is run with its own
entry point, or the starter is told to run ``train``, these are the job; they are translated into
the hyperparameters by which the older lines say the same, so that one set of rules holds for all.
"""

from __future__ import annotations

import shlex
from types import MappingProxyType
from typing import Mapping, NamedTuple

from trainworks_launcher.contract import names
from trainworks_launcher.contract.errors import Problem
from trainworks_launcher.contract.json_values import NOTHING, Json, kind, text, unusable

_ARCHIVES = (".tar.gz", ".tgz")
_OURS = ("train", "/opt/trainworks/bin/train")  # commands that hand the job to this launcher
_AUTOMATIC = "auto"  # "requirements.txt, if it is there"


class Drivers(NamedTuple):
    """What ModelTrainer's files say.

    Attributes:
        hyperparameters: What the files ask for, as the hyperparameters of the older SDK.
        command: Line of shell that runs instead of an entry point; ``""`` for none.
        arguments: Arguments of ``command``.
        requirements: File that is installed; ``""`` for the usual one.
        distributed: distributed.json as it is, for the script.
        notes: Lines for the log.
        problems: What is wrong in the files, and what contradicts the hyperparameters.
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
    """Reads the fields of one file and collects what is wrong with them."""

    def __init__(self, file: str, document: Mapping[str, Json]) -> None:
        self.file, self.document = file, document
        self.problems: list[Problem] = []

    def text(self, name: str) -> str:
        """Return a text; "" if it is absent or null."""
        value = self.document.get(name)
        if value is not None and not isinstance(value, str):
            self.refuse(f"{name!r} is {kind(value)}", "give a text, or leave it out")
        return "" if self._unusable(name, text(value)) else text(value).strip()

    def list(self, name: str) -> tuple[Json, ...]:
        """Return a list of texts and numbers; () if it is absent or null."""
        value = self.document.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(
            isinstance(entry, (str, int, float)) for entry in value
        ):
            self.refuse(f"{name!r} is {kind(value)}", "give a list of texts and numbers")
            return ()
        entries = []
        for entry in value:
            if isinstance(entry, str) and self._unusable(name, entry):
                continue
            entries.append(entry)
        return tuple(entries)

    def _unusable(self, name: str, given: str) -> bool:
        """Return whether no program could be given this text; then it is a problem."""
        bad = unusable(given)
        if bad:
            self.refuse(f"{name!r} {bad}", "leave it out")
        return bool(bad)

    def refuse(self, what: str, advice: str) -> None:
        """Note what is wrong in the file."""
        self.problems.append(Problem(what, self.file, advice))


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
    """Read what the two files ask for.

    Args:
        files: What ModelTrainer wrote.
        hyperparameters: The job's hyperparameters.
        program: The entry point that the job names otherwise; ``""`` for none.
        base: The base directory.
        started_by_us: Whether this launcher runs below another one.
    """
    if not files.source:
        return NONE
    if program:
        return Drivers(notes=(f"{names.SOURCE_CODE_FILE} is not used: the job names {program!r}",))
    fields = _Fields(names.SOURCE_CODE_FILE, files.source)
    launch = _Fields(names.DISTRIBUTED_FILE, files.distributed)
    command, script = fields.text("command"), _inside(fields.text("entry_script"))
    arguments = tuple(str(entry) for entry in fields.list("args"))
    ours = command if command in _OURS else ""
    if ours:
        # ModelTrainer's starter was told to start us: the job is the rest of the file.
        command, arguments = "", ()
    elif command and started_by_us:
        advice = "make it the one word train, and name the script as entry_script"
        fields.refuse(f"the command starts this launcher again: {command}", advice)
    notes = [f"the job is that of {names.SOURCE_CODE_FILE}, as ModelTrainer wrote it"]
    asked: dict[str, Json] = {names.ARGUMENT_STYLE: "json"}
    if command:
        asked[names.ARGUMENT_STYLE] = "none"
        if script:
            notes.append("entry_script is not used: the job has a command")
        if files.distributed:
            notes.append(
                f"{names.DISTRIBUTED_FILE} is not used: the command starts its processes itself"
            )
    elif script:
        asked[names.PROGRAM] = script
        asked.update(_distribution(launch))
    elif ours:
        advice = f"set entry_script in SourceCode to the script that {ours} is to start"
        fields.refuse(f"command={ours!r} needs 'entry_script'", advice)
    else:
        advice = "set entry_script in SourceCode, or your own command"
        fields.refuse("neither 'entry_script' nor 'command' is given", advice)
    directory = fields.text("source_dir")
    if directory:
        location = f"{base}/{names.SOURCE_CHANNEL}" if base else names.SOURCE_CHANNEL
        if directory.endswith(_ARCHIVES):
            location += f"/{directory.rsplit('/', 1)[-1]}"
        asked[names.SUBMIT_DIRECTORY] = location
    requirements = fields.text("requirements")
    if requirements == _AUTOMATIC:
        requirements = ""
    if not command:
        arguments = ()
    elif arguments:
        # The arguments are words of their own, never text of the line.
        command += ' "$@"'
    return Drivers(
        hyperparameters=MappingProxyType(asked),
        command=command,
        arguments=arguments,
        requirements=_inside(requirements),
        distributed=NOTHING if command else files.distributed,
        notes=tuple(notes),
        problems=(*launch.problems, *fields.problems, *_contradictions(asked, hyperparameters)),
    )


def _contradictions(
    asked: Mapping[str, Json], hyperparameters: Mapping[str, Json]
) -> list[Problem]:
    """Find what the files and the hyperparameters say differently."""
    return [
        Problem(
            f"{hyperparameters[name]!r}, and ModelTrainer's files say {value!r}",
            f"hyperparameter {name}",
            "leave the hyperparameter out",
        )
        for name, value in asked.items()
        if hyperparameters.get(name) not in (None, "", value) and name != names.ARGUMENT_STYLE
    ]


def _distribution(fields: _Fields) -> dict[str, Json]:
    """Return the hyperparameters of Torchrun or MPI.

    The file does not say which; each has a field that the other has not.
    """
    distributed = fields.document
    if not distributed:
        return {}
    asked: dict[str, Json] = {}
    if "mpi_additional_options" in distributed:
        asked[names.MPI_ENABLED] = True
        options = [str(option) for option in fields.list("mpi_additional_options")]
        if options:
            asked[names.MPI_OPTIONS] = " ".join(shlex.quote(option) for option in options)
    elif "smp" in distributed:  # its parameters come as the hyperparameter mp_parameters
        asked[names.TORCH_DISTRIBUTED_ENABLED] = True
    else:
        problem = f"is neither Torchrun's nor MPI's: it has {', '.join(distributed)}"
        fields.refuse(problem, "use Torchrun or MPI, or a command")
    if distributed.get("process_count_per_node") is not None:
        asked[names.PROCESSES_PER_HOST] = distributed["process_count_per_node"]
    return asked


def _inside(path: str) -> str:
    """Return a path below the code directory, as the SDK takes it: with or
    without ``./`` in front.
    """
    return path[2:] if path.startswith("./") else path
