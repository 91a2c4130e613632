"""Restarts and lost hosts: what a torchrun job asks for, and whether that can be. Pure.

``max_restarts`` and ``min_hosts`` come as hyperparameters (from the SDK) or as variables (from the
platform that starts the container); both are the user's, so two different values are a
contradiction and none of them wins.
"""

from __future__ import annotations

from typing import NamedTuple

from trainworks_launcher.contract import names
from trainworks_launcher.contract.json_values import Json
from trainworks_launcher.contract.settings import Reader

MODE = "torch_distributed"
"""The only mode whose own launcher starts ranks again, and can go on with fewer hosts."""


class Elastic(NamedTuple):
    """What may happen after a failure.

    Attributes:
        restarts: How often the ranks are started again after a failure; 0: never.
        minimum_hosts: The job goes on with this many hosts when others are
            lost; 0: only with all of them.
    """

    restarts: int = 0
    minimum_hosts: int = 0

    @property
    def is_requested(self) -> bool:
        """Whether the job continues after a failure."""
        return self.restarts > 0 or self.minimum_hosts > 0


def read_elastic(reader: Reader, mode: str, hosts: int, all_hosts: int) -> Elastic:
    """Read what a job asks for.

    Args:
        reader: Of the job's placement; gets what is wrong.
        mode: The job's mode.
        hosts: Number of hosts of the distribution.
        all_hosts: Number of hosts of the job, with those that take no part in the distribution.
    """
    numbers = _Numbers(reader)
    restarts = numbers.read(names.MAX_RESTARTS, names.MAX_RESTARTS_VARIABLE, 0, None)
    minimum = numbers.read(names.MIN_HOSTS, names.MIN_HOSTS_VARIABLE, 1, hosts)
    if mode != MODE and minimum is not None and minimum < hosts:
        where = " or ".join(sorted(numbers.given))
        advice = f"leave it out, or start the job with {MODE}"
        reader.refuse(f"a job of mode {mode} cannot go on with fewer hosts", where, advice)
    if minimum is None or minimum == hosts:
        return Elastic(restarts or 0)
    if hosts < all_hosts:
        where = " or ".join(sorted(numbers.given))
        problem = (
            f"{all_hosts - hosts} of the job's {all_hosts} hosts take no part in the distribution"
        )
        reader.refuse(
            problem, where, "then every host is needed: leave it out, or let all take part"
        )
    if restarts == 0:
        problem = f"{minimum} of {hosts} hosts are enough, and no restart is allowed"
        where = " and ".join(sorted(numbers.given))
        reader.refuse(
            problem, where, "a job goes on without a lost host by a restart: allow at least 1"
        )
    return Elastic(names.ELASTIC_RESTARTS if restarts is None else restarts, minimum)


class _Numbers:
    """Whole numbers, each of which can be given in two places. given: the
    places, as a person knows them.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.given: set[str] = set()

    def read(self, hyperparameter: str, variable: str, least: int, most: int | None) -> int | None:
        """Return the number; None if it is given nowhere, or wrong (then a problem)."""
        found: dict[int, str] = {}
        for where, value in (
            (f"hyperparameter {hyperparameter}", self._reader.reserved.get(hyperparameter)),
            (f"variable {variable}", self._reader.variables.get(variable, "").strip()),
        ):
            if value is None or value == "":
                continue
            self.given.add(where)
            number = _number(value)
            if (
                number is None
                or number != int(number)
                or number < least
                or (most is not None and number > most)
            ):
                possible = f"from {least} to {most}" if most is not None else f"of at least {least}"
                advice = f"give a whole number {possible}, or leave it out"
                if number is not None:
                    nearest = max(least, int(number) if most is None else min(most, int(number)))
                    advice = f"give a whole number {possible}; the nearest is {nearest}"
                self._reader.refuse(f"{value!r} is not possible", where, advice)
            else:
                found.setdefault(int(number), where)
        if len(found) > 1:
            said = " and ".join(str(number) for number in found)
            self._reader.refuse(
                f"{said} contradict each other", " and ".join(found.values()), "keep one"
            )
        return next(iter(found), None)


def _number(value: Json) -> float | None:
    """Return the value as a finite number, None if it is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if abs(number) < 1e6 else None
