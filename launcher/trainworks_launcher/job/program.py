"""What a job runs on each host: the user's program, its code, what it needs, its arguments.

Pure.
"""

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
    """What a job runs.

    Attributes:
        entry: The user's program.
        code: Where its code is, and how it is fetched.
        requirements: Command line that installs what the code needs; ``()`` for nothing.
        arguments: Arguments of the program.
        order: The order of hyperparameters among them, one of arguments.ORDERS.
        warnings: Lines to print before the start.
    """

    entry: EntryPoint
    code: Code
    requirements: tuple[str, ...]
    arguments: tuple[str, ...]
    order: str = ORDERS[0]
    warnings: tuple[str, ...] = ()


def read_program(environment: Environment) -> tuple[Program, list[Problem]]:
    """Read what the job runs.

    Args:
        environment: The environment of the host.

    Returns:
        The program, and everything that is wrong with it.
    """
    user, reserved = environment.user_hyperparameters, environment.reserved
    reader = Reader(reserved, environment.variables)
    style, order = choose_style(reader), choose_order(reader)
    reader.problems += _check_texts(environment, user, reserved, style)
    reader.problems += check_sizes(user, style)
    trainer = environment.drivers
    arguments = (*trainer.arguments, *to_arguments(user, style, order))
    if environment.invocation.program:
        words = environment.invocation.program
        point, arguments, wrong = choose_given_program(
            words, environment.code, environment.programs
        )
    elif trainer.command:
        point, wrong = EntryPoint("line", trainer.command), []
    else:
        name = program_name(environment.variables, reserved)
        # A file that cannot be read may be the reason why code is missing.
        known = (*environment.problems, *reader.problems)
        point, wrong = choose_entry_point(name, environment.code, environment.programs, known)
    reader.problems += wrong
    code = staging.with_fetch(environment, reader)
    requirements = staging.installation(environment, code, point, reader)
    program = Program(
        entry=point,
        code=code,
        requirements=requirements,
        arguments=arguments,
        order=order,
        warnings=(*_warnings(user, reserved), *trainer.notes, *code.notes, *staging.unread(code)),
    )
    return program, reader.problems


def _check_texts(
    environment: Environment, user: Mapping[str, Json], reserved: Reserved, style: str
) -> list[Problem]:
    """Find what cannot become a variable, or an argument in this style."""
    problems: list[Problem] = []
    for name, value in user.items():
        where = f"hyperparameter {name!r}"
        wrong = _check_name(name, "hyperparameter", where)
        if wrong:
            problems += wrong
            continue
        bad = _first_unusable(*to_arguments({name: value}, style), text_form(value))
        if bad:
            problems.append(
                Problem(f"its value {bad}", where, "a program can only be given text: leave it out")
            )
    for name in environment.input_data_config:
        problems += _check_name(name, "channel", f"channel {name!r}")
    for name, value in reserved.items():
        bad = unusable(value) if isinstance(value, str) else ""
        if bad:
            problems.append(Problem(f"its value {bad}", f"hyperparameter {name}", "leave it out"))
    for name, value in environment.hosts.document.items():
        bad = _first_unusable(text(value), *texts(value))
        if bad:
            problems.append(Problem(f"{name!r} {bad}", names.RESOURCE_CONFIG_FILE, "leave it out"))
    for group in environment.hosts.groups:
        bad = unusable(group.name) or unusable(group.instance_type)
        if bad:
            problems.append(
                Problem(f"an instance group {bad}", names.RESOURCE_CONFIG_FILE, "leave it out")
            )
    if log_level(environment.variables, reserved) is None:
        level = reserved.get(names.LOG_LEVEL)
        where = f"hyperparameter {names.LOG_LEVEL}"
        if level in (None, ""):
            level = environment.variables.get(names.LOG_LEVEL_VARIABLE)
            where = f"variable {names.LOG_LEVEL_VARIABLE}"
        advice = f"give a number such as 20, or one of {', '.join(LEVELS)}"
        problems.append(Problem(f"{level!r} is not a log level", where, advice))
    return problems


def _first_unusable(*values: str) -> str:
    """Return why the first text that no program can be given is one, ``""`` for none."""
    for value in values:
        bad = unusable(value)
        if bad:
            return bad
    return ""


def _check_name(name: str, what: str, where: str) -> list[Problem]:
    """Find what keeps a name from being part of a variable's name (environ(7):
    no ``=``) and of an argument.
    """
    if not name:
        bad = "is empty"
    elif "=" in name:
        bad = "has a '='"
    else:
        bad = unusable(name)
    if not bad:
        return []
    problem = f"the name of the {what} {bad}, so no variable can have it"
    return [Problem(problem, where, "use letters, digits, . _ -")]


def _warnings(user: Mapping[str, Json], reserved: Reserved) -> list[str]:
    """Warn of hyperparameters that share one variable, and of what is asked for and not done."""
    held: dict[str, str] = {}
    warnings: list[str] = []
    if reserved.text(names.S3_OUTPUT).startswith("s3://"):
        warnings.append(
            f"{names.S3_OUTPUT} is set, but this launcher uploads nothing while the job runs: what"
            " is in output/intermediate stays there; write checkpoints to the checkpoint directory"
        )
    for name in user:
        variable = f"SM_HP_{name.upper()}"
        if variable in held:
            warnings.append(
                f"the hyperparameters {held[variable]!r} and {name!r} share the variable"
                f" {variable}, which has the value of {name!r}; arguments and SM_HPS have both"
            )
        held[variable] = name
    return warnings
