"""Measure the modules of a model in one forward pass, and describe them for the partitioner."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from smdistributed.modelparallel.torch.transport import containers, pytrees

from .partitioner import Node

# Modules of torch that never read a child's parameters, and so can be split. Other modules of torch
# do: MultiheadAttention reads the parameters of out_proj.
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
    """Return whether the model runs only to be measured, before the partition."""
    return _traces


@contextmanager
def tracing() -> Iterator[None]:
    """Let a call of the model in this context measure the model, and raise `TraceDone`.

    The switch is of the process, and not of a thread.
    """
    global _traces
    _traces = True
    try:
        yield
    finally:
        _traces = False


class TraceDone(BaseException):
    """Leave the user's step function after the model was traced."""


@dataclass
class Call:
    """The measurements of one module in the traced pass, over all its calls.

    Attributes:
        order: Number of modules that were called before its first call.
        work: Seconds, or floating-point operations, with those of its children.
        activations: Bytes of its outputs.
    """

    order: int
    work: float = 0.0
    activations: int = 0


Trace = dict[str, Call]


class _NoModuleTracker:
    """Replaces the module tracker of torch's counter, which then counts the full model.

    The tracker itself registers hooks for gradients. It fails for a module that is called with a
    slice of a parameter, because nothing has a gradient in the traced pass.
    """

    parents = frozenset({"Global"})

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def trace_forward(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, seconds: bool = False
) -> Trace:
    """Call ``module(*args, **kwargs)`` without gradients, and measure each module.

    The inputs are copied first, because a module may change them in place.

    Hooks are registered for the call, and removed after it. Attributes, buffers and random numbers
    change as the module changes them: `unchanged` restores them.

    Args:
        module: The root.
        args: Arguments of the root.
        kwargs: Keyword arguments of the root.
        seconds: Measure time, after one more call to warm up. Otherwise operations are counted,
            which gives the same numbers in every run.

    Returns:
        Name of a module -> its measurements.

    Raises:
        Exception: An error of the module.
    """
    trace: Trace = {}
    begun: dict[str, list[float]] = {}
    counter: Any = nullcontext()
    now: Callable[[], float] = time.perf_counter
    if not seconds:
        from torch.utils.flop_counter import FlopCounterMode

        counter = FlopCounterMode(display=False)
        counter.mod_tracker = _NoModuleTracker()
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
            if seconds:  # to warm up: the first call of an operator costs more
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
    """Restore the state of a module and its submodules, and of all generators of random numbers, at
    the end of this context.

    The state is attributes, contents of containers in these, and values of buffers; parameters are
    not restored. Copies of all buffers take memory meanwhile.
    """
    attributes = [(part, dict(part.__dict__)) for part in module.modules()]
    contents: list[tuple[Any, Any]] = []
    for part, own in attributes:
        package = type(part).__module__.partition(".")[0]
        for cell in containers.find_containers(own, package):
            contents.append((cell, containers.read_content(cell)))
    buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
    for part in module.modules():
        for buffer in part.buffers(recurse=False):
            buffers.append((buffer, buffer.detach().clone()))

    numpy = sys.modules.get("numpy")
    numpy_state = None if numpy is None else numpy.random.get_state()
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    cuda_states = None
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        cuda_states = torch.cuda.get_rng_state_all()
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
        if cuda_states is not None:
            torch.cuda.set_rng_state_all(cuda_states)
        for part, own in attributes:
            part.__dict__.clear()
            part.__dict__.update(own)
        for cell, content in contents:
            if not containers.has_same_items(containers.read_content(cell), content):
                containers.assign(cell, content)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


def describe(root: nn.Module, trace: Mapping[str, Call]) -> Node:
    """Return the tree of modules as input for the partitioner.

    Nothing is called or changed.

    Args:
        root: The model.
        trace: The result of ``trace_forward``; empty: the modules run in the order of their
            definition.
    """
    visited: set[int] = set()

    def visit(name: str, module: nn.Module) -> Node:
        """Return the node of a module. A module that is there twice has its first place."""
        visited.add(id(module))
        children = []
        for key, child in module.named_children():
            if id(child) not in visited:
                children.append(visit(f"{name}.{key}" if name else key, child))
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        node = Node(
            name,
            tuple(children),
            {memory_key(tensor): _size(tensor) for tensor in tensors},
            whole=_is_indivisible(module),
            attached=isinstance(module, nn.ParameterList | nn.ParameterDict),
        )
        call = trace.get(name)
        if call is None:
            return node
        return replace(node, activations=call.activations, work=call.work, order=call.order)

    return visit("", root)


def memory_key(tensor: torch.Tensor) -> int:
    """Return a key that is equal for tensors with the same memory."""
    # A tensor without memory has the address 0.
    address = 0 if tensor.is_meta else tensor.untyped_storage().data_ptr()
    return address or id(tensor)


def _is_indivisible(module: nn.Module) -> bool:
    """Return whether a module reads the parameters of its children, and so cannot be split."""
    if isinstance(module, _DIVISIBLE):
        return False
    if type(module).__module__.startswith("torch.nn.modules"):
        return True
    return parametrize.is_parametrized(module)


def _size(tensor: torch.Tensor) -> int:
    """Return the size of a tensor in bytes."""
    return tensor.numel() * tensor.element_size()


def _bytes(output: Any) -> int:
    """Return the size in bytes of all tensors in an output."""
    return sum(map(_size, pytrees.tensors_in(output)))


def _copied(values: Any) -> Any:
    """Return a copy of nested values with copies of their tensors."""
    return pytrees.map_tensors(torch.clone, values)
