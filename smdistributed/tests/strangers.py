"""Models and loops as other authors write them, each with state in some place: written once, run
plainly and under smp.

A program makes a model, says which of its modules go to the second partition, and trains. `Job` is
the part that differs: plain processes loop over the microbatches, ranks of smp call a step
function.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import numpy
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

WIDTH, ROWS, MICROBATCHES = 4, 8, 4


class Job:
    """The services that a program needs of the process that it runs in."""

    def wrap(self, model: nn.Module, remote: tuple[str, ...]) -> Any:
        """Return the model to train."""
        raise NotImplementedError

    def optimizer(self, optimizer: Any) -> Any:
        """Return the optimizer to use."""
        raise NotImplementedError

    def step(self, function: Callable[..., Any]) -> Callable[..., list[float]]:
        """Return a function that runs another one on each microbatch, and returns its losses."""
        raise NotImplementedError


def batch(step: int, width: int = WIDTH) -> tuple[torch.Tensor, torch.Tensor]:
    both = torch.randn(2, ROWS, width, generator=torch.Generator().manual_seed(step)).double()
    return both[0], both[1]


def squares(model: Any, x: torch.Tensor, y: torch.Tensor, *rest: Any) -> Any:
    loss = ((model(x, *rest) - y) ** 2).mean()
    model.backward(loss)
    return loss


def adam(model: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def plain_loop(job: Job, model: Any, steps: int = 4) -> list[float]:
    """Train as most scripts do."""
    optimizer, train = job.optimizer(adam(model)), job.step(squares)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        losses += train(model, *batch(step))
        optimizer.step()
    return losses


Loop = Callable[[Job, Any], list[float]]


class Program(NamedTuple):
    """A program.

    Attributes:
        make: Returns the model.
        remote: Names of the modules that go to the second partition.
        loop: Trains, and returns numbers to compare.
    """

    make: Callable[[], nn.Module]
    remote: tuple[str, ...] = ("body",)
    loop: Loop = plain_loop


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return torch.tanh(self.layer(x))


class Net(nn.Module):
    def __init__(self, body: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.body, self.last = (
            nn.Linear(WIDTH, WIDTH),
            body or Body(),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.body(self.first(x)))


# --- state on the module --------------------------------------------------------------------------


class Curriculum(Body):
    """Difficulty goes up with the number of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.levels, self.calls = [0.1, 0.5, 1.0], 0

    def forward(self, x: torch.Tensor) -> Any:
        level = self.levels[min(self.calls // 3, len(self.levels) - 1)]
        self.calls += 1
        return super().forward(x) * level


class GrowingCurriculum(Net):
    """The root appends a level when the loss of the model before fell.

    The body uses the last one.
    """

    def __init__(self) -> None:
        self_levels = [1.0]
        super().__init__(ReadsLevels(self_levels))
        self.levels = self_levels

    def forward(self, x: torch.Tensor) -> Any:
        if float(x.mean()) > 0:
            self.levels.append(self.levels[-1] * 0.9)
        return super().forward(x)


class ReadsLevels(Body):
    def __init__(self, levels: list[float]) -> None:
        super().__init__()
        self.levels = levels

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * self.levels[-1]


class WarmsUp(Body):
    """A residual branch that fades in."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> Any:
        seen: Any = self.seen
        seen += 1
        return x + super().forward(x) * min(1.0, int(seen) / 10)


class RunningMean(Body):
    """Divides by an average of its earlier inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = 1.0

    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x) / self.mean
        self.mean = 0.9 * self.mean + 0.1 * float(x.detach().abs().mean())
        return y


class LazyPositions(Body):
    """Makes its table when the first input comes, and anew for a longer one."""

    table: Any

    def __init__(self) -> None:
        super().__init__()
        self.longest = 0

    def forward(self, x: torch.Tensor) -> Any:
        if x.shape[0] > self.longest:
            self.longest = x.shape[0]
            self.register_buffer(
                "table", torch.linspace(0, 1, self.longest).to(x)[:, None], persistent=False
            )
        return super().forward(x + self.table[: x.shape[0]])


class MaskCache(Body):
    """Keeps a mask for each length."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: dict[int, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> Any:
        rows = x.shape[0]
        if rows not in self.masks:
            self.masks[rows] = torch.tril(torch.ones(rows, rows, dtype=x.dtype))
        return self.masks[rows] @ super().forward(x)


class Queue(Body):
    """MoCo's queue: a buffer that is written in place, and its pointer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.ones(6, WIDTH))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> Any:
        queue: Any = self.queue
        pointer: Any = self.pointer
        y = super().forward(x) + queue.mean(0).detach().clone()
        place = int(pointer)
        queue[place] = y.detach().mean(0)
        pointer[0] = (place + 1) % len(queue)
        return y


class Codebook(Body):
    """VQ's code book, which moves by averages."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.linspace(-1, 1, 3 * WIDTH).reshape(3, WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        codes: Any = self.codes
        h = super().forward(x)
        nearest = torch.cdist(h.detach(), codes).argmin(1)
        out = h + (codes[nearest] - h).detach()
        for number in set(nearest.tolist()):
            codes[number] = 0.9 * codes[number] + 0.1 * h.detach()[nearest == number].mean(0)
        return out


class Histogram(Net):
    """Counts in a NumPy array that both sides hold."""

    def __init__(self) -> None:
        counts = numpy.zeros(4)
        super().__init__(Counts(counts))
        self.counts = counts

    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        return y * (1 + 0.01 * float(self.counts.max()))


class Counts(Body):
    def __init__(self, counts: Any) -> None:
        super().__init__()
        self.counts = counts

    def forward(self, x: torch.Tensor) -> Any:
        self.counts += numpy.histogram(x.detach().numpy(), bins=4, range=(-2, 2))[0]
        return super().forward(x)


class Centers(Net):
    """A plain tensor that both sides hold: the body moves it, the root takes distances from it."""

    def __init__(self) -> None:
        center = torch.zeros(WIDTH, dtype=torch.float64)
        super().__init__(MovesCenter(center))
        self.center = center

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) + self.center.clone()


class MovesCenter(Body):
    def __init__(self, center: torch.Tensor) -> None:
        super().__init__()
        self.center = center

    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        self.center.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return y


class LastLosses(Net):
    """Scales by the last few outputs, in a deque."""

    def __init__(self) -> None:
        super().__init__()
        self.recent: collections.deque[float] = collections.deque([1.0], maxlen=3)

    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x) / (sum(self.recent) / len(self.recent))
        self.recent.append(1 + float(y.detach().abs().mean()))
        return y


class Scaled(Body):
    """A property whose setter keeps another attribute."""

    def __init__(self) -> None:
        super().__init__()
        self._scale = 1.0

    @property
    def scale(self) -> float:
        return self._scale

    @scale.setter
    def scale(self, value: float) -> None:
        self._scale = max(value, 0.1)

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * self.scale


class SetsScale(Net):
    def forward(self, x: torch.Tensor) -> Any:
        body: Any = self.body
        body.scale = float(x.mean())
        return super().forward(x)


class Switched(Body):
    enabled: bool = True

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) if self.enabled else x


class ComparesWithout(Net):
    """A module with and without its adapter, as DPO compares."""

    def forward(self, x: torch.Tensor) -> Any:
        h = self.first(x)
        body: Any = self.body
        with body.disabled(), torch.no_grad():
            reference = body(h)
        return self.last(body(h) - reference)


class OwnGenerator(Body):
    """Layer drop by a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.chance = random.Random(5)

    def forward(self, x: torch.Tensor) -> Any:
        return x if self.chance.random() < 0.5 else super().forward(x)


class Delegates(nn.Module):
    """Looks up its missing attributes in the module that it wraps."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x) * self.gain


class Gain(Body):
    def __init__(self) -> None:
        super().__init__()
        self.gain = 1.0

    def forward(self, x: torch.Tensor) -> Any:
        self.gain = 1.0 + 0.1 * float(x.detach().mean())
        return super().forward(x)


# --- state outside of modules ---------------------------------------------------------------------


class Config(dict[str, Any]):
    """Attributes are keys, as OmegaConf and easydict have it."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class Configured(Net):
    def __init__(self) -> None:
        config = Config(temperature=1.0, inner=Config(depth=1))
        super().__init__(ReadsConfig(config))
        self.config = config

    def forward(self, x: torch.Tensor) -> Any:
        self.config.temperature = 1.0 + float(x.abs().mean())
        self.config.inner.depth += 1
        return super().forward(x)


class ReadsConfig(Body):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) / (self.config.temperature + 0.01 * self.config.inner.depth)


class CountsInClass(Body):
    """Counts in an attribute of its class."""

    calls: ClassVar[int] = 0

    def forward(self, x: torch.Tensor) -> Any:
        CountsInClass.calls += 1
        return super().forward(x) * (1 + 0.01 * (CountsInClass.calls % 7))


class Hub:
    """mmengine's message hub: one object for a name."""

    _instances: ClassVar[dict[str, Hub]] = {}

    def __init__(self) -> None:
        self.scalars: dict[str, float] = {"scale": 1.0}

    @classmethod
    def get(cls, name: str) -> Hub:
        return cls._instances[name]


Hub._instances["train"] = Hub()


class ReadsHub(Body):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * Hub.get("train").scalars["scale"]


class WritesHub(Net):
    def forward(self, x: torch.Tensor) -> Any:
        Hub.get("train").scalars["scale"] = 1.0 + float(x.abs().mean())
        return super().forward(x)


LOSSES: dict[str, Any] = {}


class AddsLoss(Body):
    """Leaves an auxiliary loss in a module-level dictionary."""

    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        LOSSES["z"] = y.square().mean()
        return y


class TakesLoss(Net):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) + LOSSES.pop("z")


SCOPE = threading.local()
SCOPE.scale = 1.0


@contextlib.contextmanager
def scaled(value: float) -> Iterator[None]:
    before, SCOPE.scale = SCOPE.scale, value
    try:
        yield
    finally:
        SCOPE.scale = before


class ReadsScope(Body):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * SCOPE.scale


class EntersScope(Net):
    def forward(self, x: torch.Tensor) -> Any:
        with scaled(1.0 + float(x.abs().mean())):
            return super().forward(x)


@functools.lru_cache(maxsize=8)
def table(rows: int) -> torch.Tensor:
    return torch.linspace(0, 1, rows, dtype=torch.float64)[:, None]


class CachedTable(Body):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x + table(x.shape[0]))


# --- data that goes from layer to layer -----------------------------------------------------------


@dataclasses.dataclass
class Output:
    """The output of a layer."""

    hidden: torch.Tensor
    aux: torch.Tensor | None = None
    depth: int = 0


class ReturnsOutput(Body):
    def forward(self, x: Any) -> Any:
        hidden = super().forward(x.hidden)
        return Output(hidden, aux=hidden.square().mean(), depth=x.depth + 1)


class PassesOutput(Net):
    def forward(self, x: torch.Tensor) -> Any:
        out = self.body(self.body(Output(self.first(x))))
        return self.last(out.hidden) + out.aux * out.depth


class Experts(Body):
    """Keeps its auxiliary loss on itself, as many mixtures of experts do."""

    aux: Any = None

    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        self.aux = y.softmax(-1).var()
        return y


class SumsAux(Net):
    def __init__(self) -> None:
        super().__init__(nn.Sequential(Experts(), Experts()))

    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        return y + sum(module.aux for module in self.modules() if isinstance(module, Experts))


class WritesContext(Body):
    """Counts in a dictionary that is passed along, and leaves a tensor there."""

    def forward(self, x: torch.Tensor, context: Any = None) -> Any:
        context["depth"] += 1
        context["last"] = super().forward(x)
        return context["last"]


class PassesContext(Net):
    def forward(self, x: torch.Tensor) -> Any:
        context: dict[str, Any] = {"depth": 0}
        h = self.body(self.body(self.first(x), context), context=context)
        return self.last(h) * context["depth"] + context["last"]


class Hooked(Net):
    """Hooks keep the outputs of layers, for a loss on features."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(Body(), Body()))
        self.features: dict[str, Any] = {}
        for name, module in self.body.named_children():
            module.register_forward_hook(functools.partial(self.keep, name))

    def keep(self, name: str, _: nn.Module, __: Any, out: Any) -> None:
        self.features[name] = out

    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        return y + self.features["0"].mean() - self.features["1"].mean()


def reversed_gradients(_: Any, grads: Any, __: Any) -> Any:
    return tuple(None if gradient is None else gradient * -0.5 for gradient in grads)


class ScalesGradients(Net):
    """A backward hook, as in GAN training and gradient reversal."""

    def __init__(self) -> None:
        super().__init__()
        self.body.register_full_backward_hook(reversed_gradients)


class Spectral(Net):
    def __init__(self) -> None:
        super().__init__()
        body: Any = self.body
        parametrizations.spectral_norm(body.layer)


class WeightNorm(Net):
    def __init__(self) -> None:
        super().__init__()
        body: Any = self.body
        parametrizations.weight_norm(body.layer)


class Tied(Net):
    """The last layer of the body has the weight of the first layer of the root."""

    def __init__(self) -> None:
        super().__init__()
        body: Any = self.body
        body.layer.weight = self.first.weight


class Checkpointed(Net):
    def forward(self, x: torch.Tensor) -> Any:
        h: Any = checkpoint(self.first, x, use_reentrant=False)
        return self.last(checkpoint(self.body, h, use_reentrant=False))


class Tasks(nn.Module):
    """A head for each task, chosen by a word."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.heads = nn.ModuleDict({name: Body() for name in ("one", "two")})

    def forward(self, x: torch.Tensor, task: str) -> Any:
        return self.heads[task](self.first(x))


class Drop(Body):
    """Stands for a dropout whose rate a script changes: scaled by the rate that it would keep."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = 0.0

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * (1 - self.rate)


class BatchNormed(Net):
    def __init__(self) -> None:
        super().__init__(nn.Sequential(Body(), nn.BatchNorm1d(WIDTH)))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return self.norm(super().forward(x))


def notebook() -> Callable[[str, torch.Tensor], None]:
    """Return a function that notes its arguments, for the script to look at later."""
    seen: list[Any] = []
    last: dict[str, Any] = {}
    times: collections.Counter[str] = collections.Counter()
    calls = 0

    def note(name: str, value: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        seen.append(value.detach().mean())
        last[name] = value
        times[name] += 1

    return note


NOTE = notebook()


class NotedBody(Body):
    def __init__(self) -> None:
        super().__init__()
        self.rate = 0.0

    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        if self.rate:
            NOTE("body", y)
        return y


class Noted(Net):
    """Both partitions note their inputs in variables that none of them reads."""

    def __init__(self) -> None:
        super().__init__(NotedBody())
        self.rate = 0.0

    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        if self.rate:
            NOTE("root", y)
        return y


def averaged(forward: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    """Return a forward that scales the result of another one by an average of it."""
    mean = 0.0

    def averaging(x: torch.Tensor) -> Any:
        nonlocal mean
        y = forward(x)
        mean = 0.9 * mean + 0.1 * float(y.detach().mean())
        return y * (1 + mean)

    return averaging


class Averaged(Net):
    """A forward that was replaced on each side of the remote module, and one in it."""

    def __init__(self) -> None:
        super().__init__()
        for module in (self.first, self.body, self.last):
            module.forward = averaged(module.forward)


class TaughtBody(Body):
    """Adds the output of a teacher that is no part of the model."""

    def __init__(self, teacher: nn.Module) -> None:
        super().__init__()
        self.teacher = [teacher]

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) + self.teacher[0](x).detach()


class Taught(Net):
    """A teacher that follows a layer of the root, and that the root asks."""

    def __init__(self, body: nn.Module | None = None, teacher: nn.Module | None = None) -> None:
        super().__init__(body)
        self.teacher = [teacher or nn.Linear(WIDTH, WIDTH).double()]

    def forward(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            teacher = self.teacher[0].parameters()
            for mine, theirs in zip(self.first.parameters(), teacher, strict=True):
                theirs.mul_(0.9).add_(0.1 * mine)
        return super().forward(x) + self.teacher[0](x).detach()


def taught_in_both(teacher: nn.Module) -> nn.Module:
    return Taught(TaughtBody(teacher), teacher)


class WritesArray(Body):
    def forward(self, x: torch.Tensor, counts: Any = None) -> Any:
        y = super().forward(x)
        counts[-1] += float(y.detach().mean())
        return y


class PassesArray(Net):
    """Passes an array along, of more than a mebibyte."""

    def __init__(self) -> None:
        super().__init__(WritesArray())

    def forward(self, x: torch.Tensor) -> Any:
        counts = numpy.zeros(150_000)
        y = self.body(self.body(self.first(x), counts), counts)
        return self.last(y) * (1 + float(counts[-1]))


class ReturnsTable(Body):
    """Returns its own table, too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.ones(WIDTH).double()

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * self.table.clone(), self.table


class WritesResult(Net):
    """Writes into a table that a module keeps and has returned, from a later step on."""

    def __init__(self) -> None:
        super().__init__(ReturnsTable())
        self.rate = 0.0

    def forward(self, x: torch.Tensor) -> Any:
        y, table = self.body(self.first(x))
        if self.rate:
            table.mul_(1.01)
        return self.last(y)


# --- loops ----------------------------------------------------------------------------------------


def accumulates(job: Job, model: Any) -> list[float]:
    """Step the optimizer after every second step."""
    optimizer, train = job.optimizer(adam(model)), job.step(squares)
    losses = []
    for step in range(6):
        losses += train(model, *batch(step))
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def averages_weights(job: Job, model: Any) -> list[float]:
    """Keep an average of the weights, and end with it."""
    optimizer, train = job.optimizer(adam(model)), job.step(squares)
    losses: list[float] = []
    average: dict[str, torch.Tensor] = {}
    for step in range(4):
        optimizer.zero_grad()
        losses += train(model, *batch(step))
        optimizer.step()
        for name, value in model.state_dict().items():
            average[name] = 0.9 * average[name] + 0.1 * value if name in average else value.clone()
    model.load_state_dict(average)
    return losses + train(model, *batch(9))


def unfreezes(job: Job, model: Any) -> list[float]:
    """Train the body from the third step on."""
    optimizer, train = job.optimizer(adam(model)), job.step(squares)
    losses = []
    for step in range(5):
        for name, parameter in model.named_parameters():
            if "body." in name:
                parameter.requires_grad_(step >= 2)
        optimizer.zero_grad()
        losses += train(model, *batch(step))
        optimizer.step()
    return losses


def schedules(job: Job, model: Any) -> list[float]:
    """Two groups, one without decay, and a one-cycle schedule."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=0.01)
    optimizer, train = job.optimizer(adamw), job.step(squares)
    rate: Any = torch.optim.lr_scheduler.OneCycleLR(adamw, max_lr=0.05, total_steps=6)
    losses = []
    for step in range(5):
        optimizer.zero_grad()
        losses += train(model, *batch(step))
        optimizer.step()
        rate.step()
    return losses


def changes_rate(job: Job, model: Any) -> list[float]:
    """Set the rate of every dropout between steps."""
    optimizer, train = job.optimizer(adam(model)), job.step(squares)
    losses = []
    for step in range(4):
        for module in model.modules():
            if isinstance(module, Drop):
                module.rate = 0.1 * step
        optimizer.zero_grad()
        losses += train(model, *batch(step))
        optimizer.step()
    return losses


def begins_late(job: Job, model: Any) -> list[float]:
    """Switch on in the fifth step the actions that modules do at a rate."""
    optimizer, train = job.optimizer(adam(model)), job.step(squares)
    losses = []
    for step in range(7):
        for module in model.modules():
            if hasattr(module, "rate"):
                module.rate = float(step >= 4)
        optimizer.zero_grad()
        losses += train(model, *batch(step))
        optimizer.step()
    return losses


def by_task(job: Job, model: Any) -> list[float]:
    optimizer, train = job.optimizer(adam(model)), job.step(squares)
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        losses += train(model, *batch(step), ("one", "two")[step % 2])
        optimizer.step()
    return losses


def longer_later(job: Job, model: Any) -> list[float]:
    """Make batches longer: tables that are kept by length are made anew in a later step."""
    optimizer, train = job.optimizer(adam(model)), job.step(squares)
    losses = []
    for step in range(6):
        x, y = batch(step)
        times = 1 + step // 3
        optimizer.zero_grad()
        losses += train(model, x.repeat(times, 1), y.repeat(times, 1))
        optimizer.step()
    return losses


def evaluates_between(job: Job, model: Any) -> list[float]:
    """Evaluate after each step, with other modes."""
    optimizer, train = job.optimizer(adam(model)), job.step(squares)
    look = job.step(lambda model, x, y: ((model(x) - y) ** 2).mean())
    losses = []
    for step in range(4):
        model.train()
        optimizer.zero_grad()
        losses += train(model, *batch(step))
        optimizer.step()
        model.eval()
        with torch.no_grad():
            losses += look(model, *batch(50 + step))
    return losses


def clips(job: Job, model: Any) -> list[float]:
    optimizer, train = job.optimizer(adam(model)), job.step(squares)
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        losses += train(model, *batch(step))
        losses.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
    return losses


PROGRAMS: dict[str, Program] = {
    "curriculum by calls": Program(lambda: Net(Curriculum())),
    "curriculum that the root extends": Program(GrowingCurriculum),
    "warm-up in a buffer": Program(lambda: Net(WarmsUp())),
    "average in a number": Program(lambda: Net(RunningMean())),
    "table made when it is needed": Program(lambda: Net(LazyPositions())),
    "table made anew for longer batches": Program(lambda: Net(LazyPositions()), loop=longer_later),
    "mask for each length": Program(lambda: Net(MaskCache()), loop=longer_later),
    "queue in a buffer": Program(lambda: Net(Queue())),
    "code book": Program(lambda: Net(Codebook())),
    "counts in an array": Program(Histogram),
    "center in a tensor": Program(Centers),
    "last losses in a deque": Program(LastLosses),
    "property that the root sets": Program(lambda: SetsScale(Scaled())),
    "adapter switched off": Program(lambda: ComparesWithout(Switched())),
    "own generator": Program(lambda: Net(OwnGenerator())),
    "delegating wrapper": Program(lambda: Net(Delegates(Gain()))),
    "inner module of a wrapper": Program(lambda: Net(Delegates(Gain())), ("body.inner",)),
    "configuration with attributes": Program(Configured),
    "count in a class": Program(lambda: Net(CountsInClass())),
    "message hub": Program(lambda: WritesHub(ReadsHub())),
    "losses at module level": Program(lambda: TakesLoss(AddsLoss())),
    "scope of a thread": Program(lambda: EntersScope(ReadsScope())),
    "cached function": Program(lambda: Net(CachedTable()), loop=longer_later),
    "dataclass between layers": Program(lambda: PassesOutput(ReturnsOutput())),
    "auxiliary losses on layers": Program(SumsAux),
    "auxiliary losses of one remote layer": Program(SumsAux, ("body.1",)),
    "dictionary that is passed along": Program(lambda: PassesContext(WritesContext())),
    "features by hooks": Program(Hooked),
    "features by hooks of both partitions": Program(Hooked, ("body.1",)),
    "gradients reversed by a hook": Program(ScalesGradients),
    "notes in variables of an outer function": Program(Noted, loop=begins_late),
    "forwards replaced by closures": Program(Averaged),
    "teacher in a list": Program(Taught),
    "teacher of two partitions in a list": Program(
        lambda: taught_in_both(nn.Linear(WIDTH, WIDTH).double())
    ),
    "large array that is passed along": Program(PassesArray),
    "result that is written late": Program(WritesResult, loop=begins_late),
    "spectral norm": Program(Spectral),
    "weight norm": Program(WeightNorm),
    "tied weights": Program(Tied),
    "checkpoint": Program(Checkpointed),
    "heads by task": Program(Tasks, ("heads.two",), by_task),
    "dropout schedule": Program(lambda: Net(Drop()), loop=changes_rate),
    "batch normalization": Program(BatchNormed, loop=evaluates_between),
    "accumulated gradients": Program(Net, loop=accumulates),
    "average of weights": Program(Net, loop=averages_weights),
    "gradual unfreezing": Program(Net, loop=unfreezes),
    "groups and a schedule": Program(Net, loop=schedules),
    "evaluation between steps": Program(lambda: Net(RunningMean()), loop=evaluates_between),
    "clipping": Program(Net, loop=clips),
}
