"""Random numbers that do not depend on which message came first.

A rank has one generator, and its contexts take turns as messages arrive. So each context has a
stream of its own: it starts from the step's seed and from the context's place in the step, and goes
on where it stopped when the context waited. The place is the number of the microbatch, or for a
remote call a number that the caller draws from its stream: so a caller that puts its generator
back, as torch's checkpoint does, gets what it got before. The script's own stream advances by one
number in a step, on every rank.

So it is with the generators of Python's ``random`` and of numpy, for models that draw from them. To
put these back takes some 50 us whenever contexts change, so others are spared that: a model draws
if its code names the generator, or if the generator was moved in a step. The script's own streams
of these two do not advance.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

_SEEDS = 1 << 63


def place(*numbers: int) -> int:
    """Return one number for several: the same in every process, as Python gives
    integers no random hash.
    """
    return hash(numbers)


def draw() -> int:
    """Draw the place of a remote call."""
    return int(torch.randint(_SEEDS - 1, (), dtype=torch.int64, device="cpu"))


class _Generator(NamedTuple):
    """A generator of this process.

    Attributes:
        seed: Starts it from a number.
        get: Returns where it is.
        set: Goes on from there.
    """

    seed: Callable[[int], Any]
    get: Callable[[], Any]
    set: Callable[[Any], Any]


def _of_torch() -> list[_Generator]:
    found: list[torch.Generator] = [torch.default_generator]
    if torch.cuda.is_initialized() and torch.cuda.default_generators:  # type: ignore[no-untyped-call]
        found.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return [_Generator(each.manual_seed, each.get_state, each.set_state) for each in found]


def _of_others() -> dict[str, _Generator]:
    """Return Python's generator, and numpy's if that is loaded, by the names of their packages."""
    found = {"random": _Generator(random.seed, random.getstate, random.setstate)}
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        found["numpy"] = _Generator(
            lambda seed: numpy.seed(seed % (1 << 32)), numpy.get_state, numpy.set_state
        )
    return found


def _mark(name: str, generator: _Generator) -> Any:
    """Return what differs once a generator has moved, and can be compared."""
    state = generator.get()
    return (state[1].tobytes(), *state[2:]) if name == "numpy" else state


class Streams:
    """The streams of a step, on the generators that this rank uses: that of the
    CPU, and of its GPU if it has one.

    Args:
        drawn: Names of the other packages whose generators the model uses.
    """

    def __init__(self, drawn: Iterable[str] = ()) -> None:
        self._seed = draw()
        self._generators = _of_torch()
        others = _of_others()
        self._generators += [others[name] for name in sorted(drawn) if name in others]
        self._rest = {
            name: (each, _mark(name, each)) for name, each in others.items() if name not in drawn
        }

    def start(self, number: int) -> None:
        """Start the stream of a place."""
        seed = place(self._seed, number) % _SEEDS
        for generator in self._generators:
            generator.seed(seed)

    def stop(self) -> list[Any]:
        """Return where the present stream stopped."""
        return [generator.get() for generator in self._generators]

    def resume(self, states: Sequence[Any]) -> None:
        """Go on with a stream."""
        for generator, state in zip(self._generators, states, strict=True):
            generator.set(state)

    def moved(self) -> set[str]:
        """Return the packages whose generators were moved in the step, and were
        not known to be used.
        """
        return {name for name, (each, before) in self._rest.items() if _mark(name, each) != before}
