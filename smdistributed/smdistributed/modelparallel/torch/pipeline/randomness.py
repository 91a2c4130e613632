"""Random numbers that do not depend on which message came first.

A rank has one generator, and its contexts take turns as messages arrive. So each context has a stream of its own: it
starts from the step's seed and from the context's place in the step, and goes on where it stopped when the context
waited. The place is the number of the microbatch, or for a remote call a number that the caller draws from its stream:
so a caller that puts its generator back, as torch's checkpoint does, gets what it got before. The script's own stream
advances by one number in a step, on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_SEEDS = 1 << 63


def place(*numbers: int) -> int:
    """Return one number for several: the same in every process, as Python gives integers no random hash."""
    return hash(numbers)


def draw() -> int:
    """Draw the place of a remote call."""
    return int(torch.randint(_SEEDS - 1, (), dtype=torch.int64, device="cpu"))


class Streams:
    """The streams of a step, on the generators that this rank uses: that of the CPU, and of its GPU if it has one."""

    def __init__(self) -> None:
        self._seed = draw()
        self._generators: list[torch.Generator] = [torch.default_generator]
        if torch.cuda.is_initialized() and torch.cuda.default_generators:  # type: ignore[no-untyped-call]
            self._generators.append(torch.cuda.default_generators[torch.cuda.current_device()])

    def start(self, number: int) -> None:
        """Start the stream of a place."""
        seed = place(self._seed, number) % _SEEDS
        for generator in self._generators:
            generator.manual_seed(seed)

    def stop(self) -> list[torch.Tensor]:
        """Return where the present stream stopped."""
        return [generator.get_state() for generator in self._generators]

    def resume(self, states: Sequence[torch.Tensor]) -> None:
        """Go on with a stream."""
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)
