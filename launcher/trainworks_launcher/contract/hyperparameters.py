"""Decode hyperparameters, and separate the user's from the reserved ones. Pure.

The rules are those of sagemaker-training, because scripts rely on them.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Iterator, Mapping

from trainworks_launcher.contract import names
from trainworks_launcher.contract.json_values import Json, decode, text


def decode_values(raw: Mapping[str, Json]) -> Mapping[str, Json]:
    """Decode every value that is JSON text: ``"0.1"`` is 0.1, and ``"adam"`` stays a string.

    The platform delivers only strings, which the SDK has encoded as JSON.
    """
    decoded: dict[str, Json] = {}
    for name, value in raw.items():
        if isinstance(value, str):
            try:
                decoded[name] = decode(value)
            except ValueError:
                decoded[name] = value
        else:
            decoded[name] = value
    return MappingProxyType(decoded)


def is_reserved(name: str) -> bool:
    """Return whether a hyperparameter is for the launcher and not for the script."""
    return name in names.RESERVED_NAMES or name.startswith(names.RESERVED_PREFIX)


class Reserved(Mapping[str, Json]):
    """The reserved hyperparameters, which are for the launcher, such as ``sagemaker_program``."""

    def __init__(self, hyperparameters: Mapping[str, Json]) -> None:
        """Keep the reserved ones among all hyperparameters."""
        self._values = {name: value for name, value in hyperparameters.items() if is_reserved(name)}

    def __getitem__(self, name: str) -> Json:
        """Return the decoded value of a hyperparameter."""
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        """Return the names."""
        return iter(self._values)

    def __len__(self) -> int:
        """Return the number of reserved hyperparameters."""
        return len(self._values)

    def is_on(self, name: str) -> bool:
        """Return whether a switch is on."""
        return truth(self.get(name))

    def text(self, name: str) -> str:
        """Return a text; ``""`` for an absent value, and for a value of another type."""
        return text(self.get(name))


def split_reserved(hyperparameters: Mapping[str, Json]) -> tuple[Mapping[str, Json], Reserved]:
    """Return (the user's hyperparameters, the reserved ones)."""
    user = {name: value for name, value in hyperparameters.items() if not is_reserved(name)}
    return MappingProxyType(user), Reserved(hyperparameters)


def truth(value: Json) -> bool:
    """Return whether a switch is on: ``true`` from the SDK, "True" or "1" in hand-written files."""
    if isinstance(value, str):
        return value.strip().lower() in ("true", "1", "yes")
    return value is True or (isinstance(value, int) and value == 1)
