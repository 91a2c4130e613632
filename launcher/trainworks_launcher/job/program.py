"""Choose the user's program, its code, its requirements and its arguments. Pure."""

from __future__ import annotations

from typing import Mapping, NamedTuple

from trainworks_launcher.contract import names
from trainworks_launcher.contract.errors import Problem
from trainworks_launcher.contract.hyperparameters import Reserved
from trainworks_launcher.contract.json_values import Json, text, text_form, texts, unusable
from trainworks_launcher.contract.settings import LEVELS, Reader, log_level
from trainworks_launcher.environment.entry_point import (
    Code,
    EntryPoint,
    choose_entry_point,
    choose_given_program,
    program_name,
)
from trainworks_launcher.environment.environment import Environment
from trainworks_launcher.job import staging
from trainworks_launcher.job.arguments import (
    ORDERS,
    check_sizes,
    choose_order,
    choose_style,
    to_arguments,
)


class Program(NamedTuple):
    """The user's program with its code and arguments.

    Attributes:
        entry: The file, module or command that is started.
        code: The directory of the code, and the command line that fetches remote code.
        requirements: Command line that installs the project and its requirements.txt; ``()`` for
            none.
        arguments: Arguments of the program, such as ``("--lr", "0.1")``.
        order: The order of the hyperparameters among the arguments, one of ``arguments.ORDERS``.
        warnings: Lines to print before the start.
    """

    entry: EntryPoint
    code: Code
    requirements: tuple[str, ...]
    arguments: tuple[str, ...]
    order: str = ORDERS[0]
    warnings: tuple[str, ...] = ()


def read_program(environment: Environment) -> tuple[Program, list[Problem]]:
    """Choose the program of a job, with its code and its arguments.

    Args:
        environment: The environment of the host.

    Returns:
        The program, and its problems; with problems the program cannot be run. Nothing is raised.
    """
    user, reserved = environment.user_hyperparameters, environment.reserved
    reader = Reader(reserved, environment.variables)
    style, order = choose_style(reader), choose_order(reader)
    reader.problems += _check_texts(environment, user, reserved, style)
    reader.problems += check_sizes(user, style)
    # The command and the arguments of ModelTrainer of the SageMaker SDK.
    trainer = environment.drivers
    arguments = (*trainer.arguments, *to_arguments(user, style, order))
    # The program of the command line comes first, then ModelTrainer's command, then the entry
    # point in the hyperparameters or the variables.
    if environment.invocation.program:
        words = environment.invocation.program
        entry, arguments, entry_problems = choose_given_program(
            words, environment.code, environment.programs
        )
    elif trainer.command:
        entry, entry_problems = EntryPoint("line", trainer.command), []
    else:
        name = program_name(environment.variables, reserved)
        # An unreadable file may be the reason for missing code.
        known_problems = (*environment.problems, *reader.problems)
        entry, entry_problems = choose_entry_point(
            name, environment.code, environment.programs, known_problems
        )
    reader.problems += entry_problems
    code = staging.with_fetch(environment, reader)
    requirements = staging.installation(environment, code, entry, reader)
    warnings = (
        *_warnings(user, reserved),
        *trainer.notes,
        *code.notes,
        *staging.ignored_lock_files(code),
    )
    program = Program(entry, code, requirements, arguments, order, warnings)
    return program, reader.problems


def _check_texts(
    environment: Environment, user: Mapping[str, Json], reserved: Reserved, style: str
) -> list[Problem]:
    """Return a problem for each name or value that a variable or an argument cannot have.

    Args:
        environment: The environment of the host.
        user: The user's hyperparameters.
        reserved: The platform's hyperparameters.
        style: The style of the arguments, one of ``arguments.STYLES``.
    """
    problems: list[Problem] = []
    for name, value in user.items():
        where = f"hyperparameter {name!r}"
        name_problems = _check_name(name, "hyperparameter", where)
        if name_problems:
            problems += name_problems
            continue
        reason = _first_unusable(*to_arguments({name: value}, style), text_form(value))
        if reason:
            advice = "a program can only be given text: leave it out"
            problems.append(Problem(f"its value {reason}", where, advice))
    for name in environment.input_data_config:
        problems += _check_name(name, "channel", f"channel {name!r}")
    for name, value in reserved.items():
        if not isinstance(value, str):
            continue
        reason = unusable(value)
        if reason:
            where = f"hyperparameter {name}"
            problems.append(Problem(f"its value {reason}", where, "leave it out"))
    problems += _check_resource_config(environment)
    # None: the level in one of the two places is not a level.
    if log_level(environment.variables, reserved) is None:
        problems.append(_log_level_problem(environment, reserved))
    return problems


def _check_resource_config(environment: Environment) -> list[Problem]:
    """Return a problem for each text of the resource config that a variable cannot have."""
    where = names.RESOURCE_CONFIG_FILE
    problems: list[Problem] = []
    for name, value in environment.hosts.document.items():
        reason = _first_unusable(text(value), *texts(value))
        if reason:
            problems.append(Problem(f"{name!r} {reason}", where, "leave it out"))
    for group in environment.hosts.groups:
        reason = _first_unusable(group.name, group.instance_type)
        if reason:
            problems.append(Problem(f"an instance group {reason}", where, "leave it out"))
    return problems


def _log_level_problem(environment: Environment, reserved: Reserved) -> Problem:
    """Return the problem of an unknown log level, with the setting that has the level."""
    level = reserved.get(names.LOG_LEVEL)
    where = f"hyperparameter {names.LOG_LEVEL}"
    if level in (None, ""):
        level = environment.variables.get(names.LOG_LEVEL_VARIABLE)
        where = f"variable {names.LOG_LEVEL_VARIABLE}"
    advice = f"give a number such as 20, or one of {', '.join(LEVELS)}"
    return Problem(f"{level!r} is not a log level", where, advice)


def _first_unusable(*values: str) -> str:
    """Return the reason why a process cannot be given the first such text; ``""`` for none.

    For example ``has a NUL character``.
    """
    for value in values:
        reason = unusable(value)
        if reason:
            return reason
    return ""


def _check_name(name: str, kind: str, where: str) -> list[Problem]:
    """Return a problem for a name that cannot be a part of a variable's name; else ``[]``.

    Such a name is empty, has a ``=`` (environ(7)), or has a character that no text of a process
    can have.

    Args:
        name: The name of a hyperparameter or a channel.
        kind: ``hyperparameter`` or ``channel``.
        where: The place of the name, for the problem.
    """
    if not name:
        reason = "is empty"
    elif "=" in name:
        reason = "has a '='"
    else:
        reason = unusable(name)
    if not reason:
        return []
    problem = f"the name of the {kind} {reason}, so no variable can have it"
    return [Problem(problem, where, "use letters, digits, . _ -")]


def _warnings(user: Mapping[str, Json], reserved: Reserved) -> list[str]:
    """Warn of hyperparameters that share one variable, and of an output in S3.

    ``learning_rate`` and ``Learning_Rate`` share SM_HP_LEARNING_RATE.
    """
    hyperparameter_of: dict[str, str] = {}
    warnings: list[str] = []
    if reserved.text(names.S3_OUTPUT).startswith("s3://"):
        warnings.append(
            f"{names.S3_OUTPUT} is set, but this launcher uploads nothing while the job runs: what"
            " is in output/intermediate stays there; write checkpoints to the checkpoint directory"
        )
    for name in user:
        variable = f"SM_HP_{name.upper()}"
        if variable in hyperparameter_of:
            warnings.append(
                f"the hyperparameters {hyperparameter_of[variable]!r} and {name!r} share the"
                " variable"
                f" {variable}, which has the value of {name!r}; arguments and SM_HPS have both"
            )
        hyperparameter_of[variable] = name
    return warnings
