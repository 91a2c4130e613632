"""Read settings of the job: single values of a reserved hyperparameter or a variable. Pure."""

from __future__ import annotations

from types import MappingProxyType
from typing import Mapping

from trainworks_launcher.contract import names
from trainworks_launcher.contract.errors import Problem, nearest
from trainworks_launcher.contract.json_values import Json, text

LEVELS: Mapping[str, int] = MappingProxyType(
    {
        "CRITICAL": 50,
        "FATAL": 50,
        "ERROR": 40,
        "WARNING": 30,
        "WARN": 30,
        "INFO": 20,
        "DEBUG": 10,
        "NOTSET": 0,
    }
)
"""Name of a log level of Python -> the number that the script gets."""

_LAST_PORT = 65535
_LEVEL_DIGITS = 9
"""Digits of the largest log level that is read."""

_SECONDS_LIMIT = 1e7
"""A number of seconds is below this, about four months: a longer limit is a mistake."""


class Reader:
    """Reads settings for one part of a job, and collects the problems of that part.

    Attributes:
        reserved: Reserved hyperparameters, by their names.
        variables: The process's environment.
        problems: The problems so far.
        warnings: Lines to print before the start.
    """

    def __init__(self, reserved: Mapping[str, Json], variables: Mapping[str, str]) -> None:
        """Read nothing yet."""
        self.reserved = reserved
        self.variables = variables
        self.problems: list[Problem] = []
        self.warnings: list[str] = []

    def refuse(self, problem: str, where: str, advice: str = "") -> None:
        """Add a problem.

        The caller continues with the nearest value, to find the other problems, too.

        Args:
            problem: The mistake, such as ``'80a' is not a TCP port``.
            where: The setting, such as ``variable MASTER_PORT``.
            advice: The remedy; ``""`` for none.
        """
        self.problems.append(Problem(problem, where, advice))

    def count(self, name: str) -> int | None:
        """Read a hyperparameter that is a whole number of at least 1.

        Returns:
            The number; None for an absent or empty value. None also for a wrong value, which is
            added to ``problems``.
        """
        value = self.reserved.get(name)
        if value is None or value == "":
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            advice = "give a whole number of at least 1, or leave it out"
            self.refuse(f"{value!r} is not a count", f"hyperparameter {name}", advice)
            return None
        return value

    def port(self, name: str, default: int) -> int:
        """Read a TCP port from a variable; the default for an absent or wrong value.

        A wrong value is added to ``problems``.
        """
        value = self.variables.get(name, "").strip()
        if not value:
            return default
        is_number = value.isdecimal() and len(value) <= len(str(_LAST_PORT))
        if not is_number or not 1 <= int(value) <= _LAST_PORT:
            self.refuse(f"{value!r} is not a TCP port", f"variable {name}", "use 1024 to 65535")
            return default
        return int(value)

    def word(self, name: str, words: tuple[str, ...]) -> str:
        """Read one of a few words from a variable; the first one for an absent or wrong value.

        A wrong value is added to ``problems``.
        """
        value = self.variables.get(name, "").strip()
        if value and value not in words:
            self.refuse(f"{value!r} is not understood", f"variable {name}", nearest(value, words))
        if value not in words:
            return words[0]
        return value

    def seconds(self, name: str, default: float) -> float:
        """Read a positive number of seconds from a variable; the default if absent or wrong.

        A wrong value is added to ``problems``.
        """
        value = self.variables.get(name, "").strip()
        if not value:
            return default
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if not 0 < number < _SECONDS_LIMIT:
            advice = f"give seconds as a number, the default is {default:g}"
            self.refuse(f"{value!r} is not a number of seconds", f"variable {name}", advice)
            return default
        return number


def log_level(variables: Mapping[str, str], reserved: Mapping[str, Json]) -> Json:
    """Return the log level for the script: the hyperparameter, else the variable, else 20.

    A number is returned as it is, a name as its number. None if the value is not a level.
    """
    value = reserved.get(names.LOG_LEVEL)
    if value is None or value == "":
        word = variables.get(names.LOG_LEVEL_VARIABLE, "").strip()
        if not word:
            return names.LOG_LEVEL_DEFAULT
        if word.isdecimal() and len(word) <= _LEVEL_DIGITS:
            return int(word)
        return LEVELS.get(word)
    if isinstance(value, str):
        return LEVELS.get(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        return None
    return value


def region_of(variables: Mapping[str, str], reserved: Mapping[str, Json]) -> str:
    """Return the region: the hyperparameter, else the first variable with a value, else ""."""
    region = text(reserved.get(names.REGION))
    if region:
        return region
    for name in names.REGION_VARIABLES:
        if variables.get(name):
            return variables[name]
    return ""
