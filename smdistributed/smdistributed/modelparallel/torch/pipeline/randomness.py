"""Random numbers that do not depend on the order of messages.

A rank has one generator, and its contexts take turns as messages arrive. So each context has its
own stream of random numbers. A stream starts from the seed of the step and from the context's place
in the step. After a wait of the context, the stream goes on where it stopped. The place is the
number of the microbatch, or for a remote call a number that the caller draws from its own stream.
So a caller that resets its generator, as torch's checkpoint does, gets the same numbers again. The
script's own stream advances by one number in a step, on every rank.

The generators of Python's ``random`` and of numpy are treated in the same way, but only for models
that draw from them, because to reset these takes about 50 us at each change of contexts. A model
draws from a generator if its code names the generator, or if the generator moved in a step. The
script's own streams of these two do not advance.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

_SEEDS = 1 << 63
"""Number of seeds: torch takes integers of 64 bits with a sign."""


def place(*numbers: int) -> int:
    """Return one integer for several integers: the same one in every process, because Python hashes
    integers without a random seed.
    """
    return hash(numbers)


def draw() -> int:
    """Draw the place of a remote call from the present stream of torch's CPU generator."""
    return int(torch.randint(_SEEDS - 1, (), dtype=torch.int64, device="cpu"))


class _Generator(NamedTuple):
    """A generator of this process.

    Attributes:
        seed: Starts the generator from a number.
        get: Returns the state of the generator.
        set: Sets the state.
    """

    seed: Callable[[int], Any]
    get: Callable[[], Any]
    set: Callable[[Any], Any]


def _of_torch() -> list[_Generator]:
    """Return torch's generator of the CPU, and of this rank's GPU."""
    generators: list[torch.Generator] = [torch.default_generator]
    if torch.cuda.is_initialized() and torch.cuda.default_generators:  # type: ignore[no-untyped-call]
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return [
        _Generator(generator.manual_seed, generator.get_state, generator.set_state)
        for generator in generators
    ]


def _of_others() -> dict[str, _Generator]:
    """Return Python's generator, and numpy's if numpy is loaded, by the names of the packages.

    numpy is not imported for that. Its generator takes the seed modulo 2**32.
    """
    generators = {"random": _Generator(random.seed, random.getstate, random.setstate)}
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        generators["numpy"] = _Generator(
            lambda seed: numpy.seed(seed % (1 << 32)), numpy.get_state, numpy.set_state
        )
    return generators


def _comparable_state(name: str, generator: _Generator) -> Any:
    """Return the state of a generator in a form in which two states can be compared by ``==``.

    The generator is not moved on.

    Args:
        name: Name of the package, "random" or "numpy".
        generator: The generator.
    """
    state = generator.get()
    if name == "numpy":
        # An array among the items has no single result of ``==``.
        return (state[1].tobytes(), *state[2:])
    return state


class Streams:
    """The streams of a step, on the generators of this rank's CPU and GPU.

    Args:
        drawn: Names of other packages with generators that the model draws from.
    """

    def __init__(self, drawn: Iterable[str] = ()) -> None:
        """Draw the seed of the step from torch's CPU generator, and note the states of the
        generators that are not reset.
        """
        self._seed = draw()
        self._generators = _of_torch()
        others = _of_others()
        self._generators += [others[name] for name in sorted(drawn) if name in others]
        self._unused: dict[str, tuple[_Generator, Any]] = {}
        for name, generator in others.items():
            if name not in drawn:
                self._unused[name] = (generator, _comparable_state(name, generator))

    def start(self, number: int) -> None:
        """Start the stream of a place: set all generators from the seed of the step.

        Also torch's generator of this rank's GPU, if CUDA is initialized.

        Args:
            number: The place, as `place` returns it.
        """
        seed = place(self._seed, number) % _SEEDS
        for generator in self._generators:
            generator.seed(seed)

    def stop(self) -> list[Any]:
        """Return the states at which the present stream stops."""
        return [generator.get() for generator in self._generators]

    def resume(self, states: Sequence[Any]) -> None:
        """Continue a stream from the states that `stop` returned.

        Args:
            states: States of the generators, in the order of `stop`. They are set in the whole
                process.
        """
        for generator, state in zip(self._generators, states, strict=True):
            generator.set(state)

    def moved(self) -> set[str]:
        """Return the packages with generators that moved in the step, though no code names them.

        For example ``{"numpy"}``.
        """
        moved = set()
        for name, (generator, state) in self._unused.items():
            if _comparable_state(name, generator) != state:
                moved.add(name)
        return moved
