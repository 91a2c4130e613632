"""mpirun's options as keyed maps with an origin: default < platform < user. Pure.

Open MPI refuses a command line on which one MCA parameter stands twice with two values (4.x: even with one). So
parameters are merged by name before the line is written: the higher origin wins, the same value is said once, and two
values from the user are an error that shows both. Open MPI 5 renamed the parameters of its run-time (ORTE, now PRRTE);
names are made canonical for the installed dialect first, so that a user's old name meets our new one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Mapping, Sequence

from trainworks_launcher.errors import Problem

ORIGINS = ("default", "platform", "user")
"""From weakest to strongest."""


@dataclass(frozen=True)
class Dialect:
    """How one major line of Open MPI spells things.

    major: 4 or 5. runtime_option: the option for parameters of the run-time. runtime_prefixes: how their names begin.
    renamed: old name -> the name this dialect uses. gone: parameters without a successor -> why they may be dropped.
    """

    major: int
    runtime_option: str
    runtime_prefixes: tuple[str, ...]
    renamed: Mapping[str, str]
    gone: Mapping[str, str]
    renamed_prefixes: tuple[tuple[str, str], ...] = ()

    def canonical(self, name: str) -> str:
        """The name of an MCA parameter as this dialect has it."""
        if name in self.renamed:
            return self.renamed[name]
        for old, new in self.renamed_prefixes:
            if name.startswith(old):
                return new + name[len(old) :]
        return name

    def option(self, name: str) -> str:
        """The option that introduces the (canonical) parameter."""
        return self.runtime_option if name.startswith(self.runtime_prefixes) else "--mca"


# Sources: `ompi_info --all`, `prte_info --all` of Open MPI 5.0 (they list the synonyms), and `ompi_info` of 4.1.
OPEN_MPI_4 = Dialect(
    major=4,
    runtime_option="--mca",
    runtime_prefixes=(),
    renamed={"prte_if_include": "oob_tcp_if_include", "prte_if_exclude": "oob_tcp_if_exclude"},
    gone={},
    renamed_prefixes=(("plm_ssh_", "plm_rsh_"), ("btl_sm_single_copy", "btl_vader_single_copy")),
)
OPEN_MPI_5 = Dialect(
    major=5,
    runtime_option="--prtemca",
    runtime_prefixes=("plm_", "prte_", "oob_", "rmaps_", "ras_", "grpcomm_", "odls_", "routed_"),
    renamed={
        "oob_tcp_if_include": "prte_if_include",
        "oob_tcp_include": "prte_if_include",
        "oob_tcp_if_exclude": "prte_if_exclude",
        "oob_tcp_exclude": "prte_if_exclude",
    },
    gone={
        "orte_abort_on_non_zero_status": "Open MPI 5 always ends a job on the first non-zero status",
        "btl_vader_single_copy_mechanism": "in Open MPI 5 the single-copy mechanism is a component of its own (smsc)",
        "btl_sm_single_copy_mechanism": "in Open MPI 5 the single-copy mechanism is a component of its own (smsc)",
    },
    renamed_prefixes=(("plm_rsh_", "plm_ssh_"), ("btl_vader_", "btl_sm_"), ("orte_", "prte_")),
)


def dialect_of(version: str) -> Dialect:
    """The dialect of an installed version such as "5.0.8"; an unknown version is taken for the older line."""
    major = version.split(".", 1)[0]
    return OPEN_MPI_5 if major.isdecimal() and int(major) >= OPEN_MPI_5.major else OPEN_MPI_4


@dataclass(frozen=True)
class Setting:
    """One named value with its origin and the reason for it (empty for what needs none)."""

    name: str
    value: str
    origin: str
    why: str = ""


@dataclass(frozen=True)
class UserOptions:
    """The user's words, sorted: MCA parameters, exported variables, options with a fixed meaning, the rest.

    parameters and exports: name -> value, in the order given. An export's value is "" with ``forwarded`` naming it when
    only the name was given. keyed: canonical option -> words. rest: everything else, in order and untouched.
    """

    parameters: tuple[tuple[str, str], ...] = ()
    exports: tuple[tuple[str, str], ...] = ()
    forwarded: tuple[str, ...] = ()
    keyed: tuple[tuple[str, tuple[str, ...]], ...] = ()
    rest: tuple[str, ...] = ()


_PARAMETER = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_MCA_OPTIONS = frozenset(("mca", "gmca", "omca", "prtemca", "pmixmca"))
_KEYED_OPTIONS: Mapping[str, int] = {
    "bind-to": 1,
    "map-by": 1,
    "rank-by": 1,
    "allow-run-as-root": 0,
    "oversubscribe": 0,
}
_OURS: Mapping[str, str] = {
    "np": "processes are counted by sagemaker_mpi_num_of_processes_per_host and sagemaker_mpi_num_processes",
    "n": "processes are counted by sagemaker_mpi_num_of_processes_per_host and sagemaker_mpi_num_processes",
    "c": "processes are counted by sagemaker_mpi_num_of_processes_per_host and sagemaker_mpi_num_processes",
    "host": "the platform's resource config lists the hosts",
    "H": "the platform's resource config lists the hosts",
    "hostfile": "the platform's resource config lists the hosts",
    "machinefile": "the platform's resource config lists the hosts",
}


def parse_user_options(words: Sequence[str], where: str) -> tuple[UserOptions, list[Problem]]:
    """Sort the user's words (already split by shell rules). ``where`` names their source in the problems."""
    problems: list[Problem] = []
    parameters: dict[str, str] = {}
    exports: dict[str, str] = {}
    forwarded: list[str] = []
    keyed: dict[str, tuple[str, ...]] = {}
    rest: list[str] = []

    def keep(into: dict[str, str], kind: str, name: str, value: str) -> None:
        if into.get(name, value) != value:
            text = f"{kind} {name} is given as {into[name]!r} and as {value!r}"
            problems.append(Problem(text, where, "give it once"))
        else:
            into[name] = value

    index = 0
    while index < len(words):
        word = words[index]
        option = word.lstrip("-") if word.startswith("-") else ""
        following = words[index + 1 : index + 3]
        index += 1
        if option in _MCA_OPTIONS:
            if len(following) < 2:
                problems.append(Problem(f"{word} needs a name and a value", where, "for example: --mca NAME VALUE"))
                break
            if not _PARAMETER.fullmatch(following[0]):
                text = f"{following[0]!r} is not the name of an MCA parameter"
                problems.append(Problem(text, where, "for example: --mca NAME VALUE"))
            keep(parameters, "MCA parameter", following[0], following[1])
            index += 2
        elif option == "x" or option == "NCCL_DEBUG":
            if not following:
                problems.append(Problem(f"{word} needs a value", where, f"for example: {word} VALUE"))
                break
            # ``--NCCL_DEBUG LEVEL`` is an option of sagemaker-training, not of mpirun; it means the variable.
            name, equals, value = following[0].partition("=") if option == "x" else ("NCCL_DEBUG", "=", following[0])
            index += 1
            if not _VARIABLE.fullmatch(name):
                text = f"-x {following[0]!r} does not begin with the name of a variable"
                problems.append(Problem(text, where, "for example: -x NAME=VALUE"))
            elif equals:
                keep(exports, "-x", name, value)
            elif name not in forwarded:
                forwarded.append(name)
        elif option in _KEYED_OPTIONS:
            count = _KEYED_OPTIONS[option]
            value_words = tuple(words[index : index + count])
            index += count
            if len(value_words) < count:
                problems.append(Problem(f"{word} needs a value", where, f"for example: --{option} none"))
                break
            if keyed.get(option, value_words) != value_words:
                text = f"--{option} is given as {keyed[option][0]!r} and as {value_words[0]!r}"
                problems.append(Problem(text, where, "give it once"))
            keyed[option] = value_words
        elif option in _OURS:
            problems.append(Problem(f"{word} cannot be given here", where, f"leave it out: {_OURS[option]}"))
            index += 1
        elif not option and (not rest or word.startswith("-")):
            text = f"{word!r} is no option: mpirun would start it instead of the training script"
            problems.append(Problem(text, where, "options start with -; quote a value that has a space"))
        else:
            rest.append(word)
    problems.extend(
        Problem(f"-x {name} is given with a value and without", where, "give it once")
        for name in forwarded
        if name in exports
    )
    options = UserOptions(
        parameters=tuple(parameters.items()),
        exports=tuple(exports.items()),
        forwarded=tuple(forwarded),
        keyed=tuple(keyed.items()),
        rest=tuple(rest),
    )
    return options, problems


def merge(settings: Sequence[Setting]) -> tuple[Setting, ...]:
    """One setting per name: the strongest origin wins, the first place in the order is kept.

    Two values of one origin cannot come here: the user's were checked by ``parse_user_options``, and ours are code.
    """
    merged: dict[str, Setting] = {}
    for setting in settings:
        held = merged.get(setting.name)
        if held is None or ORIGINS.index(setting.origin) >= ORIGINS.index(held.origin):
            merged[setting.name] = setting
    return tuple(merged.values())


def merge_parameters(
    ours: Sequence[Setting], user: UserOptions, dialect: Dialect, where: str
) -> tuple[tuple[Setting, ...], tuple[str, ...], list[Problem]]:
    """(MCA parameters of the line, notes, problems).

    A user's ``*_if_exclude`` takes our ``*_if_include`` away and the reverse: Open MPI accepts only one of the two.
    """
    problems: list[Problem] = []
    notes: list[str] = []
    theirs: dict[str, Setting] = {}
    for name, value in user.parameters:
        if name in dialect.gone:
            notes.append(f"left out --mca {name} {value}: {dialect.gone[name]}")
            continue
        canonical = dialect.canonical(name)
        renamed = f"{name} is called {canonical} in Open MPI {dialect.major}" if canonical != name else ""
        held = theirs.get(canonical)
        if held and held.value != value:
            text = f"MCA parameter {canonical} is given as {held.value!r} and, as {name}, as {value!r}"
            problems.append(Problem(text, where, "give it once"))
            continue
        theirs[canonical] = Setting(canonical, value, "user", renamed or "from the job's custom_mpi_options")
    problems.extend(
        Problem(f"MCA parameters {name} and {_opposite(name)} are both given", where, "Open MPI accepts one of them")
        for name in theirs
        if name.endswith("_if_include") and _opposite(name) in theirs
    )
    kept: list[Setting] = []
    for setting in ours:
        opposite = _opposite(setting.name)
        if opposite and opposite in theirs:
            notes.append(f"left out {setting.name} {setting.value}: the job gives {opposite}")
        else:
            kept.append(setting)
    return merge([*kept, *theirs.values()]), tuple(notes), problems


def _opposite(name: str) -> str:
    """The parameter that excludes this one, "" if there is none."""
    for one, other in (("_if_include", "_if_exclude"), ("_if_exclude", "_if_include")):
        if name.endswith(one):
            return name[: -len(one)] + other
    return ""
