"""Parameters that take no memory until the model is partitioned.

Inside ``delayed()``, the memory that ``torch.empty`` returns (all layers of torch begin so) is
mapped but not used: the operations that would fill it are noted instead. ``materialize`` gives
memory to what a rank owns and runs them.

The random generator moves on as if every operation had run, and each noted one keeps the state that
it found: the values are those of a plain construction, on every rank and however the model is cut.
What cannot be noted, such as reading the values, fills the memory at once; then only the saving is
lost.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["delayed", "is_delayed", "materialize", "put_slice"]

# Below this many bytes memory is not worth a mapping of its own.
SMALLEST = 1 << 16
# Tensors of at most this many elements that an operation reads are kept with it.
KEPT = 4096

_OVERWRITES = {"normal_", "uniform_", "zero_", "fill_", "bernoulli_", "exponential_", "random_"}
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies in its storage."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, base: torch.Tensor) -> torch.Tensor:
        return base.as_strided(self.size, self.stride, self.offset)


@dataclass
class _Blank:
    """A storage that was not filled: its element type and number, and what
    would fill it, in order.
    """

    dtype: torch.dtype
    count: int
    writes: list[Callable[[torch.Tensor], object]] = field(default_factory=list)

    def fill(self, base: torch.Tensor) -> None:
        with torch.no_grad():
            for write in self.writes:
                write(base)


_blanks: dict[int, _Blank] = {}  # by the address of the storage
_empty = torch.ops.aten.empty.memory_format


@contextlib.contextmanager
def delayed(enabled: bool = True) -> Iterator[None]:
    """Delay the filling of parameters that are made in this context."""
    if not enabled:
        yield
        return
    with _Recorder():  # type: ignore[no-untyped-call]
        yield


def is_delayed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor waits for its memory."""
    return _address(tensor) in _blanks


def materialize(tensors: Iterable[tuple[str, torch.Tensor]], *, forget: bool = True) -> None:
    """Give memory and values to the delayed ones of these named parameters and buffers.

    Args:
        tensors: Names and tensors.
        forget: These were the last: all others are given up.

    Raises:
        RuntimeError: A delayed parameter was written to after its context had ended.
    """
    if not _blanks:
        return
    bases: dict[int, torch.Tensor] = {}
    kept = []  # an address must not be used again while others may still have it
    with _random_state_kept():
        for name, tensor in tensors:
            address = _address(tensor)
            blank = _blanks.get(address)
            if blank is None:
                continue
            if address not in bases:
                if torch.count_nonzero(_flat(tensor, blank)):
                    raise RuntimeError(
                        f"{name} was written to after smp.delay_param_initialization or"
                        " smp.model_creation had ended. Write it inside the context, or load"
                        " values with load_state_dict of the smp.DistributedModel"
                    )
                bases[address] = torch.empty(blank.count, dtype=blank.dtype)
                blank.fill(bases[address])
                kept.append(tensor.untyped_storage())
            tensor.data = _place(tensor).of(bases[address])
    if forget:
        _blanks.clear()


def put_slice(
    target: torch.Tensor, source: torch.Tensor, axis: int, degree: int, index: int
) -> None:
    """Copy part ``index`` of ``degree`` equal parts of an axis, now, or when
    the target is materialized.
    """
    blank = _blanks.get(_address(source))
    if blank is None:
        with torch.no_grad():
            target.copy_(source.chunk(degree, axis)[index])
        return
    place = _place(source)

    def write(base: torch.Tensor) -> None:
        whole = torch.empty(blank.count, dtype=blank.dtype)
        blank.fill(whole)
        base.copy_(place.of(whole).chunk(degree, axis)[index].reshape(-1))

    target.data = _make_blank(tuple(target.shape), target.dtype)
    _blanks[_address(target)].writes.append(write)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes blank memory, and notes what is written to it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _empty:
            return _new(*args, **kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        touched = [
            leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and _address(leaf) in _blanks
        ]
        if not touched or _is_view(func):
            return func(*args, **kwargs)
        if _can_be_noted(func, leaves, touched, kwargs):
            _note(func, leaves, spec)
            return leaves[0]
        for tensor in touched:
            _fill_now(tensor)
        return func(*args, **kwargs)


def _new(size: Any, *rest: Any, **options: Any) -> torch.Tensor:
    dtype = options.get("dtype") or torch.get_default_dtype()
    device = torch.device(options.get("device") or "cpu")
    memory_format = options.get("memory_format")
    if (
        rest
        or device.type != "cpu"
        or not dtype.is_floating_point
        or options.get("pin_memory")
        or memory_format not in (None, torch.contiguous_format, torch.preserve_format)
        or math.prod(size) * _bytes_of(dtype) < SMALLEST
    ):
        made: torch.Tensor = _empty(size, *rest, **options)
        return made
    return _make_blank(tuple(size), dtype)


def _make_blank(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    count = math.prod(size)
    memory, base = _map(count, dtype)
    address = _address(base)
    _blanks[address] = _Blank(dtype, count)
    weakref.finalize(memory, _blanks.pop, address, None)
    return base.view(size)


def _map(count: int, dtype: torch.dtype) -> tuple[mmap.mmap, torch.Tensor]:
    """Return zeros that take no memory until they are written to, and give it back when they go."""
    memory = mmap.mmap(-1, max(count, 1) * _bytes_of(dtype), flags=_FLAGS)
    return memory, torch.frombuffer(memory, dtype=dtype, count=count)


def _can_be_noted(
    func: Any, leaves: list[Any], touched: list[torch.Tensor], kwargs: dict[str, Any]
) -> bool:
    """Whether a call only writes to its first argument, and what it reads is there to be kept."""
    target = leaves[0]
    writes = [
        argument.alias_info is not None and argument.alias_info.is_write
        for argument in _schema(func).arguments
    ]
    others = [leaf for leaf in leaves[1:] if isinstance(leaf, torch.Tensor)]
    return (
        target is touched[0]
        and len(touched) == 1
        and writes[0]
        and sum(writes) == 1
        and _schema(func).name.endswith("_")
        and target.dtype == _blanks[_address(target)].dtype
        and kwargs.get("generator") is None
        and all(other.numel() <= KEPT for other in others)
    )


def _note(func: Any, leaves: list[Any], spec: pytree.TreeSpec) -> None:
    target, blank = leaves[0], _blanks[_address(leaves[0])]
    place = _place(target)
    rest = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves[1:]]
    random = torch.Tag.nondeterministic_seeded in func.tags
    state = torch.get_rng_state() if random else None

    def run(tensor: torch.Tensor) -> None:
        args, kwargs = pytree.tree_unflatten([tensor, *rest], spec)
        func(*args, **kwargs)

    def write(base: torch.Tensor) -> None:
        if state is not None:
            torch.set_rng_state(state)
        run(place.of(base))

    if random:  # the generator moves on as if the values had been drawn for good
        run(place.of(_map(blank.count, blank.dtype)[1]))
    whole = target.numel() == blank.count and target.is_contiguous()
    if whole and _schema(func).name.rpartition("::")[2] in _OVERWRITES:
        blank.writes.clear()
    blank.writes.append(write)


def _fill_now(tensor: torch.Tensor) -> None:
    blank = _blanks.pop(_address(tensor), None)
    if blank is not None:
        with _random_state_kept():
            blank.fill(_flat(tensor, blank))


def _is_view(func: Any) -> bool:
    returns = _schema(func).returns
    return bool(returns) and all(
        v.alias_info is not None and not v.alias_info.is_write for v in returns
    )


def _schema(func: Any) -> Any:
    return func._schema  # noqa: SLF001  torch has no public name for what an operation writes to


@contextlib.contextmanager
def _random_state_kept() -> Iterator[None]:
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)


def _bytes_of(dtype: torch.dtype) -> int:
    return torch.finfo(dtype).bits // 8


def _address(tensor: torch.Tensor) -> int:
    if tensor.layout != torch.strided or tensor.device.type != "cpu":
        return 0
    return tensor.untyped_storage().data_ptr()


def _place(tensor: torch.Tensor) -> _Place:
    return _Place(tuple(tensor.size()), tuple(tensor.stride()), int(tensor.storage_offset()))


def _flat(tensor: torch.Tensor, blank: _Blank) -> torch.Tensor:
    """Return a tensor of all elements of the storage."""
    return torch.empty(0, dtype=blank.dtype).set_(tensor.untyped_storage(), 0, (blank.count,), (1,))
