"""Read the restarts and the minimum of hosts of a torchrun job. Pure.

Both are a hyperparameter (from the SDK) or a variable (from the platform that starts the
container). Both settings are the user's, so two different values of one number are refused.
"""

from __future__ import annotations

from typing import NamedTuple

from trainworks_launcher.contract import names
from trainworks_launcher.contract.json_values import Json
from trainworks_launcher.contract.settings import Reader

_NUMBER_LIMIT = 1e6
"""A number of restarts or hosts is below this."""

MODE = "torch_distributed"
"""The only mode with a starter, torchrun, that restarts ranks and continues with fewer hosts."""


class Elastic(NamedTuple):
    """The elasticity of a job.

    Attributes:
        restarts: How often torchrun restarts the ranks after a failure; 0: never.
        minimum_hosts: Number of hosts with which the job continues after the loss of others;
            0: only with all hosts.
    """

    restarts: int = 0
    minimum_hosts: int = 0

    @property
    def is_requested(self) -> bool:
        """Whether the job continues after a failure."""
        return self.restarts > 0 or self.minimum_hosts > 0


def read_elastic(reader: Reader, mode: str, hosts: int, all_hosts: int) -> Elastic:
    """Read the restarts and the minimum of hosts. Nothing is raised: the reader gets the problems.

    A minimum without a number of restarts allows ``ELASTIC_RESTARTS``. A minimum of all hosts is
    the same as none.

    Args:
        reader: The reader of the placement, which gets the problems.
        mode: The job's mode.
        hosts: Number of hosts with ranks.
        all_hosts: Number of hosts of the job, with those without ranks.
    """
    restarts_setting = _Setting(names.MAX_RESTARTS, names.MAX_RESTARTS_VARIABLE, 0, None)
    minimum_setting = _Setting(names.MIN_HOSTS, names.MIN_HOSTS_VARIABLE, 1, hosts)
    restarts, restarts_places = _read_number(restarts_setting, reader)
    minimum, minimum_places = _read_number(minimum_setting, reader)
    places = sorted((*restarts_places, *minimum_places))
    if mode != MODE and minimum is not None and minimum < hosts:
        where = " or ".join(places)
        advice = f"leave it out, or start the job with {MODE}"
        reader.refuse(f"a job of mode {mode} cannot continue with fewer hosts", where, advice)
    if minimum is None or minimum == hosts:
        return Elastic(restarts or 0)
    if hosts < all_hosts:
        problem = (
            f"{all_hosts - hosts} of the job's {all_hosts} hosts take no part in the distribution"
        )
        where = " or ".join(places)
        advice = "then every host is needed: leave it out, or let all take part"
        reader.refuse(problem, where, advice)
    if restarts == 0:
        problem = f"{minimum} of {hosts} hosts are enough, and no restart is allowed"
        where = " and ".join(places)
        advice = "a job continues without a lost host by a restart: allow at least 1"
        reader.refuse(problem, where, advice)
    if restarts is None:
        restarts = names.ELASTIC_RESTARTS
    return Elastic(restarts, minimum)


class _Setting(NamedTuple):
    """A whole number that is a hyperparameter or a variable.

    Attributes:
        hyperparameter: Name of the hyperparameter.
        variable: Name of the variable.
        least: The smallest possible number.
        most: The largest possible number; None for no limit.
    """

    hyperparameter: str
    variable: str
    least: int
    most: int | None

    @property
    def possible(self) -> str:
        """The possible numbers, such as ``from 1 to 4`` or ``of at least 0``."""
        if self.most is None:
            return f"of at least {self.least}"
        return f"from {self.least} to {self.most}"

    def nearest(self, number: float) -> int:
        """Return the possible number that is nearest to a number."""
        nearest = max(self.least, int(number))
        if self.most is None:
            return nearest
        return min(self.most, nearest)


class _Number(NamedTuple):
    """The number of a setting.

    Attributes:
        value: None without a value, and after a problem with the only value.
        places: The places of its values, such as ``hyperparameter NAME``.
    """

    value: int | None
    places: tuple[str, ...]


def _read_number(setting: _Setting, reader: Reader) -> _Number:
    """Read a number from its hyperparameter and its variable. The reader gets the problems.

    Two different numbers are a problem; the first of them is returned.
    """
    values: dict[str, Json] = {
        f"hyperparameter {setting.hyperparameter}": reader.reserved.get(setting.hyperparameter),
        f"variable {setting.variable}": reader.variables.get(setting.variable, "").strip(),
    }
    places: list[str] = []
    place_of_number: dict[int, str] = {}  # the possible numbers only
    for where, value in values.items():
        if value is None or value == "":
            continue
        places.append(where)
        advice = f"give a whole number {setting.possible}, or leave it out"
        number = _number(value)
        if number is not None:
            # The number itself, if it is whole and possible.
            nearest = setting.nearest(number)
            if nearest == number:
                place_of_number.setdefault(nearest, where)
                continue
            advice = f"give a whole number {setting.possible}; the nearest is {nearest}"
        reader.refuse(f"{value!r} is not possible", where, advice)
    if len(place_of_number) > 1:
        numbers = " and ".join(map(str, place_of_number))
        where = " and ".join(place_of_number.values())
        reader.refuse(f"{numbers} contradict each other", where, "keep one")
    return _Number(next(iter(place_of_number), None), tuple(places))


def _number(value: Json) -> float | None:
    """Return a value such as ``3``, ``3.0`` or ``"3"`` as a number of less than 1,000,000.

    None for another value.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    if abs(number) < _NUMBER_LIMIT:
        return number
    return None
