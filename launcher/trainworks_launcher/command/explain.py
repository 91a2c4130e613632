"""Explain a host's plan: each flag and variable with its value, its origin and its reason. Pure.

Flags come from the reasons that the plan's command line is made of. A variable that a mode or the
network fabric sets has a reason in the plan. The variables of every script have their meaning in
the table below, by name.
"""

from __future__ import annotations

import json
import shlex
import textwrap
from itertools import zip_longest
from types import MappingProxyType
from typing import Mapping, NamedTuple, Sequence

from trainworks_launcher.contract import names
from trainworks_launcher.contract.json_values import Json, readable
from trainworks_launcher.contract.origins import Origin
from trainworks_launcher.plan.plan import NodePlan, Reason

_VALUE_LIMIT = 160
"""Characters of a variable that the table shows: SM_TRAINING_ENV alone would fill a screen."""

_NARROWEST, _WIDEST = 60, 180
"""Columns of the table; a terminal outside these gets the nearest."""


class Row(NamedTuple):
    """One line of an explanation.

    Attributes:
        kind: ``flag``, ``variable``, ``process`` (it runs before or beside the command) or
            ``choice``.
        name: The flag, variable, process or choice.
        value: Its value; ``""`` for a flag without one.
        origin: Who decided, as ``Origin.word``.
        why: The reason.
    """

    kind: str
    name: str
    value: str
    origin: str
    why: str


_PLATFORM, _USER = Origin.PLATFORM.word, Origin.USER.word
_IMAGE, _DEFAULT = Origin.IMAGE.word, Origin.DEFAULT.word

_VARIABLES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "CURRENT_HOST": (_PLATFORM, "this host's name in the job"),
        "HOME": (_DEFAULT, "for caches, because this user's own cannot be written"),
        "LANG": (_IMAGE, "the locale that was set is not installed"),
        "LD_PRELOAD": (_IMAGE, "makes gethostname() return this host's name in the job"),
        "MASTER_ADDR": (_PLATFORM, "host of rank 0; in a job of one host, its loopback address"),
        "MASTER_PORT": (
            _DEFAULT,
            f"port of rank 0; set the variable {names.MASTER_PORT_VARIABLE} to choose another",
        ),
        "PYTHONPATH": (_USER, "the code directory, so that the script's modules are found"),
        "PYTHONUNBUFFERED": (_DEFAULT, "output appears when it is written, not at the end"),
        "SAGEMAKER_JOB_NAME": (_PLATFORM, "name of the job"),
        "SAGEMAKER_REGION": (_PLATFORM, "region of the job"),
        names.SUBMIT_DIRECTORY_VARIABLE: (_USER, "where the code is"),
        names.MODEL_PARALLEL_VARIABLE: (
            _USER,
            "smp's parameters, with the pipeline degree under both of its names",
        ),
        names.CHECKPOINT_DIRECTORY_VARIABLE: (_PLATFORM, "where checkpoints are kept"),
        names.RESUME_VARIABLE: (_PLATFORM, "the newest complete checkpoint there"),
        names.RESTARTS_VARIABLE: (
            _PLATFORM,
            "how often the job was started again, if the platform says it",
        ),
        names.HOSTNAME_VARIABLE: (_PLATFORM, "the name that gethostname() returns"),
        "TMPDIR": (
            _DEFAULT,
            "the usual one forbids execution, or its name is too long for sockets",
        ),
        "SM_CHANNELS": (_PLATFORM, "names of the data channels"),
        "SM_CURRENT_HOST": (_PLATFORM, "this host's name in the job"),
        "SM_CURRENT_HOST_RANK": (_PLATFORM, "index of this host in SM_HOSTS, from 0"),
        "SM_CURRENT_INSTANCE_GROUP": (_PLATFORM, "instance group of this host"),
        "SM_CURRENT_INSTANCE_GROUP_HOSTS": (_PLATFORM, "hosts of this host's instance group"),
        "SM_CURRENT_INSTANCE_TYPE": (_PLATFORM, "instance type of this host"),
        "SM_DISTRIBUTION_INSTANCE_GROUPS": (
            _USER,
            "instance groups that take part in the distribution",
        ),
        "SM_ENTRY_SCRIPT": (_USER, "the entry point"),
        "SM_FRAMEWORK_MODULE": (_IMAGE, f"from the variable {names.TRAINING_MODULE_VARIABLE}"),
        "SM_FRAMEWORK_PARAMS": (_USER, "reserved hyperparameters of frameworks"),
        "SM_HOSTS": (_PLATFORM, "every host of the job"),
        "SM_HOST_COUNT": (_PLATFORM, "number of hosts"),
        "SM_HPS": (_USER, "all hyperparameters of the script"),
        "SM_INPUT_CONFIG_DIR": (_PLATFORM, "directory of the platform's files"),
        "SM_INPUT_DATA_CONFIG": (_PLATFORM, "settings of the data channels"),
        "SM_INPUT_DATA_DIR": (_PLATFORM, "directory of the data channels"),
        "SM_INPUT_DIR": (_PLATFORM, "directory of all input"),
        "SM_INSTANCE_GROUPS": (_PLATFORM, "names of the cluster's instance groups"),
        "SM_INSTANCE_GROUPS_DICT": (_PLATFORM, "the cluster's instance groups with their hosts"),
        "SM_IS_HETERO": (_PLATFORM, "whether the cluster has several instance groups"),
        "SM_LOG_LEVEL": (_USER, f"hyperparameter {names.LOG_LEVEL}, Python's logging level"),
        "SM_MASTER_ADDR": (_PLATFORM, "as MASTER_ADDR, by the newer SDK's name"),
        "SM_MASTER_PORT": (_DEFAULT, "as MASTER_PORT, by the newer SDK's name"),
        "SM_MODEL_DIR": (_PLATFORM, "the model is written there, and kept"),
        "SM_MODULE_DIR": (_USER, "where the code is"),
        "SM_MODULE_NAME": (_USER, "the entry point without .py"),
        "SM_NETWORK_INTERFACE_NAME": (_PLATFORM, "network interface between the hosts"),
        "SM_NUM_CPUS": (_PLATFORM, "CPUs of this host"),
        "SM_NUM_GPUS": (_PLATFORM, "GPUs of this host"),
        "SM_NUM_NEURONS": (_PLATFORM, "Neuron cores of this host"),
        "SM_OUTPUT_DATA_DIR": (_PLATFORM, "other results are written there"),
        "SM_OUTPUT_DIR": (_PLATFORM, "directory of all output but the model"),
        "SM_OUTPUT_FAILURE": (_PLATFORM, "file of the failure's text"),
        "SM_OUTPUT_INTERMEDIATE_DIR": (_PLATFORM, "results while the job runs"),
        "SM_RESOURCE_CONFIG": (
            _PLATFORM,
            "the platform's file of that name, with this host's values",
        ),
        "SM_SOURCE_DIR": (_USER, "where the code is, by the newer SDK's name"),
        "SM_TOPOLOGY": (_PLATFORM, "how the hosts are connected"),
        "SM_TRAINING_ENV": (_PLATFORM, "all of this as one object"),
        "SM_USER_ARGS": (_USER, "the script's arguments"),
        "SM_USER_ENTRY_POINT": (_USER, "the entry point"),
    }
)
"""Variable that every script is given -> (origin, meaning)."""

_VARIABLES_BY_PREFIX: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "LC_": (_IMAGE, "the locale that was set is not installed"),
        "SM_CHANNEL_": (_PLATFORM, "directory of this data channel"),
        "SM_HP_": (_USER, "the hyperparameter of this name"),
    }
)


def explain(plan: NodePlan, inherited: Mapping[str, str]) -> tuple[Row, ...]:
    """Explain every word of a plan's command line, and every variable of the plan.

    Args:
        plan: The plan.
        inherited: The variables of the container. A variable with the same value is the user's.

    Returns:
        Flags, variables, processes and choices, in this order. A variable without a known meaning
        has an empty reason; the tests check that there is none.
    """
    reasons = {reason.subject: reason for reason in plan.why}
    rows: list[Row] = []
    for reason in plan.why:
        if reason.words:
            value = _value_of_flag(reason)
            rows.append(Row("flag", reason.subject, value, reason.origin.word, reason.why))
    for name, value in sorted(plan.env.items()):
        origin, why = _explain_variable(name, reasons)
        if inherited.get(name) == value:
            origin = _USER
            if why and name not in reasons:
                why += "; set in the environment"
        rows.append(Row("variable", name, value, origin, why))
    if plan.code.fetch:
        why = "fetches the code, before anything else"
        rows.append(Row("process", "code", shlex.join(plan.code.fetch), _USER, why))
    if plan.requirements:
        why = "installs what the code needs, once on each host"
        rows.append(Row("process", "requirements", shlex.join(plan.requirements), _USER, why))
    for auxiliary in plan.auxiliaries:
        command = shlex.join(auxiliary.argv)
        rows.append(Row("process", auxiliary.name, command, _DEFAULT, "runs beside the program"))
        for name, value in sorted(auxiliary.env.items()):
            why = f"only for the {auxiliary.name}"
            rows.append(Row("process", name, value, _DEFAULT, why))
    for reason in plan.why:
        # A reason without words is about a variable, which has a row, or about a choice.
        if not reason.words and reason.subject not in plan.env:
            rows.append(Row("choice", reason.subject, "", reason.origin.word, reason.why))
    return tuple(rows)


def _value_of_flag(reason: Reason) -> str:
    """Return the words of a flag after its name, quoted for a shell.

    For example ``ob1`` of ``--mca pml ob1`` with the subject ``--mca pml``, or ``2`` of
    ``--nnodes=2``. All words, if they do not begin with the subject.
    """
    subject = reason.subject.split(" ")
    if list(reason.words[: len(subject)]) == subject:
        return shlex.join(reason.words[len(subject) :])
    line = " ".join(reason.words)
    if line.startswith(f"{reason.subject}="):
        return line[len(reason.subject) + 1 :]
    return shlex.join(reason.words)


def _explain_variable(name: str, reasons: Mapping[str, Reason]) -> tuple[str, str]:
    """Return (origin, reason) of a variable: those of the plan, else its general meaning.

    Two empty texts for an unknown variable.
    """
    if name in reasons:
        return reasons[name].origin.word, reasons[name].why
    if name in _VARIABLES:
        return _VARIABLES[name]
    for prefix, meaning in _VARIABLES_BY_PREFIX.items():
        if name.startswith(prefix):
            return meaning
    return "", ""


def to_json(plan: NodePlan, rows: Sequence[Row]) -> str:
    """Return an explanation as JSON text: mode, host, role, and the rows with their fields."""
    row_objects: list[Json] = []
    for row in rows:
        row_objects.append(dict(row._asdict()))
    document: dict[str, Json] = {
        "mode": plan.mode,
        "host": plan.host,
        "role": plan.role,
        "rows": row_objects,
    }
    return readable(json.dumps(document, indent=2, ensure_ascii=False)) + "\n"


_HEADINGS = (
    ("flag", "Command line"),
    ("variable", "Variables"),
    ("process", "Before and beside it"),
    ("choice", "Choices"),
)


def to_table(plan: NodePlan, rows: Sequence[Row], width: int, ranks: Sequence[str] = ()) -> str:
    """Return an explanation as a table.

    Long values of variables are shortened, long texts wrapped. No word is broken, so that all can
    be copied. A name or a value with a word longer than its column has lines of its own. A word
    longer than the table makes its line longer.

    Args:
        plan: The plan that is explained; its warnings come last.
        rows: The explanation.
        width: Columns of the terminal.
        ranks: The map of the ranks (``rank_map``); () for none.
    """
    width = min(max(width, _NARROWEST), _WIDEST)
    lines = [f"mode {plan.mode}, host {plan.host} ({plan.role})"]
    if ranks:
        lines += ["", *ranks]
    # The name has at most 3 tenths of the line, the value 4 tenths of the rest. The reason has what
    # is left.
    name_width = min(max((len(row.name) for row in rows), default=0), width * 3 // 10)
    origin_width = max((len(row.origin) for row in rows), default=0)
    rest = width - name_width - origin_width - _BLANKS
    value_width = rest * 4 // 10
    widths = (name_width, value_width, origin_width, rest - value_width)
    for kind, heading in _HEADINGS:
        chosen = [row for row in rows if row.kind == kind]
        if not chosen:
            continue
        lines += ["", f"{heading}:"]
        for row in chosen:
            value = row.value
            if kind == "variable" and len(value) > _VALUE_LIMIT:
                value = f"{value[:_VALUE_LIMIT]}... ({len(value):,} characters)"
            lines += _format_row((row.name, value, row.origin, row.why), widths)
    if plan.warnings:
        lines += ["", "Warnings:"]
        for warning in plan.warnings:
            lines += textwrap.wrap(warning, width, initial_indent="  ", subsequent_indent="    ")
    return "\n".join(lines) + "\n"


def _format_row(cells: tuple[str, str, str, str], widths: Sequence[int]) -> list[str]:
    """Return a row of the table: as many lines as its longest cell needs.

    Args:
        cells: Name, value, origin and reason.
        widths: Characters of each column.
    """
    name, value, *others = (_wrapped(cell, width) for cell, width in zip(cells, widths))
    # A name with a word that is too long stands above the row, such a value below it.
    above: list[str] = []
    below: list[str] = []
    if max(map(len, name)) > widths[0]:
        above = ["  " + " ".join(name)]
        name = [""]
    if max(map(len, value)) > widths[1]:
        width_below = sum(widths) + 2 * len(widths) - len(_BELOW)
        below = [_BELOW + line for line in _wrapped(cells[1], width_below)]
        value = [""]

    lines = []
    for parts in zip_longest(name, value, *others, fillvalue=""):
        padded = [part.ljust(width) for part, width in zip(parts, widths)]
        lines.append("  " + "  ".join(padded).rstrip())
    return [*above, *lines, *below]


_BELOW = " " * 6
"""Before a value on lines of its own."""

_BLANKS = 8
"""Two blanks before each of the four columns."""


def _wrapped(text: str, width: int) -> list[str]:
    """Return the lines of a cell; words are never broken."""
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]
