"""Measure the modules of a model in one forward pass, and describe them for the partitioner."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from smdistributed.modelparallel.torch.transport import containers, pytrees

from .partitioner import Node

# Modules of torch that never read a child's parameters: they can be split. Others of torch do, such
# as MultiheadAttention with out_proj.
_DIVISIBLE = (
    nn.Sequential,
    nn.ModuleList,
    nn.ModuleDict,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
)


_traces = False


def is_tracing() -> bool:
    """Return whether the model runs only to be measured, before its partition."""
    return _traces


@contextmanager
def tracing() -> Iterator[None]:
    """Let the model, when it is called in this context, be measured and leave by `TraceDone`."""
    global _traces
    _traces = True
    try:
        yield
    finally:
        _traces = False


class TraceDone(BaseException):
    """Leaves the user's step function when the model was traced."""


@dataclass
class Call:
    """What one module did in the traced pass, over all its calls.

    Attributes:
        order: Number of calls that began before its first one.
        work: Seconds, or floating-point operations.
        activations: Bytes of its outputs.
    """

    order: int
    work: float = 0.0
    activations: int = 0


Trace = dict[str, Call]


class _Whole:
    """What torch's counter asks for the modules that run: it counts the whole here.

    Its own looks for gradients, and ends where a module is given a part of a
    parameter, which has none in this pass.
    """

    parents = frozenset({"Global"})

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def trace_forward(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, seconds: bool = False
) -> Trace:
    """Call ``module(*args, **kwargs)`` without gradients, and return what each module did, by name.

    The inputs are copied first: a module may change them in place.

    Args:
        module: The root.
        args: Its arguments.
        kwargs: Its keyword arguments.
        seconds: Measure time, after one more call to warm up. Otherwise
            operations are counted: the same in every run.
    """
    trace: Trace = {}
    begun: dict[str, list[float]] = {}
    counter: Any = nullcontext()
    now: Callable[[], float] = time.perf_counter
    if not seconds:
        from torch.utils.flop_counter import FlopCounterMode

        counter = FlopCounterMode(display=False)
        counter.mod_tracker = _Whole()
        now = counter.get_total_flops
    handles = []
    for name, part in module.named_modules():

        def before(_module: nn.Module, _args: Any, _kwargs: Any, name: str = name) -> None:
            trace.setdefault(name, Call(len(trace)))
            begun.setdefault(name, []).append(now())

        def after(
            _module: nn.Module, _args: Any, _kwargs: Any, output: Any, name: str = name
        ) -> None:
            call = trace[name]
            call.work += now() - begun[name].pop()
            call.activations += _bytes(output)

        handles.append(part.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
        handles.append(part.register_forward_hook(after, with_kwargs=True))
    try:
        with torch.no_grad():
            if seconds:  # the first call of an operator costs more than the next ones
                module(*_copied(args), **_copied(kwargs))
                trace.clear()
            with counter:
                module(*_copied(args), **_copied(kwargs))
    finally:
        for handle in handles:
            handle.remove()
    return trace


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Restore what a module and its parts keep, and the states of all random
    number generators, at the end.
    """
    attributes = [(part, dict(part.__dict__)) for part in module.modules()]
    held = [
        (cell, containers.content(cell))
        for part, own in attributes
        for cell in containers.cells(own, type(part).__module__.partition(".")[0])
    ]
    buffers = [
        (buffer, buffer.detach().clone())
        for part in module.modules()
        for buffer in part.buffers(recurse=False)
    ]
    numpy = sys.modules.get("numpy")
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    states = (
        torch.get_rng_state(),
        random.getstate(),
        None if numpy is None else numpy.random.get_state(),
    )
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        if numpy is not None:
            numpy.random.set_state(states[2])
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        for part, own in attributes:
            part.__dict__.clear()
            part.__dict__.update(own)
        for cell, content in held:
            if not containers.same(containers.content(cell), content):
                containers.assign(cell, content)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


def describe(root: nn.Module, trace: Mapping[str, Call]) -> Node:
    """Return the tree of ``root`` as the partitioner wants it.

    Args:
        root: The model.
        trace: What ``trace_forward`` returned; empty: the modules run in the
            order of their definition.
    """
    seen: set[int] = set()

    def visit(name: str, module: nn.Module) -> Node:
        seen.add(id(module))
        children = [
            visit(f"{name}.{key}" if name else key, child)
            for key, child in module.named_children()
            if id(child) not in seen
        ]
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        call = trace.get(name)
        return Node(
            name,
            tuple(children),
            {memory_key(t): t.numel() * t.element_size() for t in tensors},
            activations=call.activations if call else 0,
            work=call.work if call else 0.0,
            order=call.order if call else None,
            whole=_whole(module),
            attached=isinstance(module, nn.ParameterList | nn.ParameterDict),
        )

    return visit("", root)


def memory_key(tensor: torch.Tensor) -> int:
    """Return what is equal for tensors that share memory."""
    address = 0 if tensor.is_meta else tensor.untyped_storage().data_ptr()
    return address or id(tensor)


def _whole(module: nn.Module) -> bool:
    if isinstance(module, _DIVISIBLE):
        return False
    return type(module).__module__.startswith("torch.nn.modules") or parametrize.is_parametrized(
        module
    )


def _bytes(output: Any) -> int:
    return sum(t.numel() * t.element_size() for t in pytrees.tensors_in(output))


def _copied(values: Any) -> Any:
    return pytrees.mapped(torch.clone, values)
