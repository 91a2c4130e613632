"""Create parameters that take no memory until the model is partitioned.

All layers of torch create their parameters by ``torch.empty``. Inside ``delayed()`` the memory that
it returns is mapped but not used, and the operations that would fill it are recorded.
``materialize`` allocates the memory of the tensors that a rank owns, and runs the recorded
operations.

The random generator advances as if every operation had run, and each recorded operation keeps the
state of the generator. So the values are those of a plain construction, on every rank and for every
partition. An operation that cannot be recorded, such as one that reads the values, fills the memory
at once. Then only the saving of memory is lost.
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

SMALLEST = 1 << 16
"""Bytes below which memory is allocated at once: a mapping of its own costs more."""
KEPT = 4096
"""Largest number of elements of a tensor that is kept with a recorded operation that reads it."""

_OVERWRITES = {"normal_", "uniform_", "zero_", "fill_", "bernoulli_", "exponential_", "random_"}
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)


@dataclass(frozen=True)
class _Place:
    """The place of a tensor in its storage, in elements.

    Attributes:
        size: Its shape.
        stride: Its strides.
        offset: Index of its first element.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, base: torch.Tensor) -> torch.Tensor:
        """Return the tensor at this place in another storage, which a flat tensor has."""
        return base.as_strided(self.size, self.stride, self.offset)


@dataclass
class _Blank:
    """A storage that is not filled yet.

    Attributes:
        dtype: Type of its elements.
        count: Number of its elements.
        writes: Recorded operations, in their order. Each takes all elements as a flat tensor.
    """

    dtype: torch.dtype
    count: int
    writes: list[Callable[[torch.Tensor], object]] = field(default_factory=list)

    def fill(self, base: torch.Tensor) -> None:
        """Run the recorded operations on other memory, a flat tensor of as many elements."""
        with torch.no_grad():
            for write in self.writes:
                write(base)


_blanks: dict[int, _Blank] = {}  # by the address of the storage
_empty = torch.ops.aten.empty.memory_format


@contextlib.contextmanager
def delayed(enabled: bool = True) -> Iterator[None]:
    """Delay the filling of parameters that are created in this context."""
    if not enabled:
        yield
        return
    with _Recorder():  # type: ignore[no-untyped-call]
        yield


def is_delayed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor waits for its memory."""
    return _address(tensor) in _blanks


def materialize(tensors: Iterable[tuple[str, torch.Tensor]], *, forget: bool = True) -> None:
    """Give memory and values to the delayed parameters and buffers among some tensors.

    The tensors keep their identity: their ``data`` is replaced. Views of one storage share the new
    memory. The generator of random numbers is as before afterwards.

    Args:
        tensors: Names and tensors.
        forget: Whether the recorded operations of all other tensors are dropped. These then read as
            zeros, as before.

    Raises:
        RuntimeError: A delayed parameter was written to after its context had ended.
    """
    if not _blanks:
        return
    bases: dict[int, torch.Tensor] = {}
    kept = []  # storages: an address must not be reused while other tensors may still have it
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
    """Copy part ``index`` of ``degree`` equal parts of an axis, now or when the target is
    materialized.

    With a delayed source the target's ``data`` is replaced by a blank storage, and the copy is
    recorded as its write. Else the target is written in place at once.

    Args:
        target: Gets the part. If the source is delayed, it becomes delayed, too.
        source: The full tensor.
        axis: The axis that is divided.
        degree: Number of parts.
        index: Number of the part, from 0.
    """
    blank = _blanks.get(_address(source))
    if blank is None:
        with torch.no_grad():
            target.copy_(source.chunk(degree, axis)[index])
        return
    place = _place(source)

    def write(base: torch.Tensor) -> None:
        """Fill the full tensor, and copy the part into the target's memory."""
        full = torch.empty(blank.count, dtype=blank.dtype)
        blank.fill(full)
        part = place.of(full).chunk(degree, axis)[index]
        base.copy_(part.reshape(-1))

    target.data = _make_blank(tuple(target.shape), target.dtype)
    _blanks[_address(target)].writes.append(write)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode of torch that creates blank storages, and records the writes to them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record a write to a blank storage, or call the function. torch calls this.

        If the function does more with a blank storage than write to it, the storage is filled.

        Returns:
            The result of the function; for a recorded write the written tensor itself.

        Raises:
            Exception: An error of the function. A recorded write has its error when it runs, in
                `materialize`.
        """
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
    """Return a new tensor without values, as ``torch.empty`` does, with a blank storage where that
    is possible.

    A blank storage is memory that is mapped and not used: it reads as zeros. It is registered in
    the module-level ``_blanks``, by its address, until the memory is freed or filled, or
    `materialize` drops the entry. While it is registered, writes to the tensor within the context
    are recorded, where that is possible, and not run.

    Blank is the storage of a plain tensor: strided, contiguous, of a floating-point type, on the
    CPU, not pinned, and of at least `SMALLEST` bytes. Any other tensor is made by torch at once.

    Args:
        size: Its shape.
        rest: Further positional arguments of torch's ``empty``. With any, the tensor is not plain.
        options: Named arguments of torch's ``empty``, such as dtype, layout and device.

    Raises:
        RuntimeError: torch refuses the arguments, or there is no memory.
        OSError: The system refuses the mapping.
    """
    dtype = options.get("dtype") or torch.get_default_dtype()
    device = torch.device(options.get("device") or "cpu")
    layout, memory_format = options.get("layout"), options.get("memory_format")
    is_plain = (
        not rest
        and layout in (None, torch.strided)
        and device.type == "cpu"
        and dtype.is_floating_point
        and not options.get("pin_memory")
        and memory_format in (None, torch.contiguous_format, torch.preserve_format)
    )
    if is_plain and math.prod(size) * _bytes_of(dtype) >= SMALLEST:
        return _make_blank(tuple(size), dtype)
    tensor: torch.Tensor = _empty(size, *rest, **options)
    return tensor


def _make_blank(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of zeros that takes no memory, and register its storage as blank in
    ``_blanks``.

    The entry is removed when the memory is freed.

    Raises:
        OSError: The system refuses the mapping.
    """
    count = math.prod(size)
    memory, base = _map(count, dtype)
    address = _address(base)
    _blanks[address] = _Blank(dtype, count)
    weakref.finalize(memory, _blanks.pop, address, None)
    return base.view(size)


def _map(count: int, dtype: torch.dtype) -> tuple[mmap.mmap, torch.Tensor]:
    """Return a mapping of zeros, which takes no memory before writes to it, and a tensor of it.

    Raises:
        OSError: The system refuses the mapping.
    """
    memory = mmap.mmap(-1, max(count, 1) * _bytes_of(dtype), flags=_FLAGS)
    return memory, torch.frombuffer(memory, dtype=dtype, count=count)


def _can_be_noted(
    func: Any, leaves: list[Any], touched: list[torch.Tensor], kwargs: dict[str, Any]
) -> bool:
    """Return whether a call only writes to its first argument, and reads only small tensors.

    False where that is not certain. Nothing is run.

    Args:
        func: The function.
        leaves: Its arguments, flat.
        touched: The arguments with a blank storage.
        kwargs: Its keyword arguments.
    """
    target = leaves[0]
    if len(touched) > 1 or target is not touched[0]:
        return False
    written = []
    for position, argument in enumerate(_schema(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(position)
    if written != [0] or not _schema(func).name.endswith("_"):
        return False
    if target.dtype != _blanks[_address(target)].dtype or kwargs.get("generator") is not None:
        return False
    others = [leaf for leaf in leaves[1:] if isinstance(leaf, torch.Tensor)]
    return all(other.numel() <= KEPT for other in others)


def _note(func: Any, leaves: list[Any], spec: pytree.TreeSpec) -> None:
    """Record a call that writes to a blank storage. It does not run now.

    A call that draws random numbers runs once on other memory, so that the generator advances.

    The record is added to the blank storage's writes. A call that overwrites all elements drops the
    earlier records. Other tensors among the arguments are copied.

    Args:
        func: The function.
        leaves: Its arguments, flat. The first one is the tensor that is written.
        spec: Their structure.
    """
    target, blank = leaves[0], _blanks[_address(leaves[0])]
    place = _place(target)
    # The other arguments may change before the call runs: keep copies.
    rest = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves[1:]]
    is_random = torch.Tag.nondeterministic_seeded in func.tags
    state = torch.get_rng_state() if is_random else None

    def run(tensor: torch.Tensor) -> None:
        """Call the function on another tensor."""
        args, kwargs = pytree.tree_unflatten([tensor, *rest], spec)
        func(*args, **kwargs)

    def write(base: torch.Tensor) -> None:
        """Call the function as it was recorded, on memory that is allocated now."""
        if state is not None:
            torch.set_rng_state(state)
        run(place.of(base))

    if is_random:  # draw the values and drop them, so that the generator advances
        _, unused = _map(blank.count, blank.dtype)
        run(place.of(unused))
    is_full = target.numel() == blank.count and target.is_contiguous()
    if is_full and _schema(func).name.rpartition("::")[2] in _OVERWRITES:
        blank.writes.clear()  # all earlier values are overwritten
    blank.writes.append(write)


def _fill_now(tensor: torch.Tensor) -> None:
    """Run the recorded operations of a tensor's storage, which is blank no longer.

    The storage is removed from ``_blanks``, and its memory is written. The generator of random
    numbers is as before afterwards.

    Raises:
        Exception: An error of a recorded operation.
    """
    blank = _blanks.pop(_address(tensor), None)
    if blank is not None:
        with _random_state_kept():
            blank.fill(_flat(tensor, blank))


def _is_view(func: Any) -> bool:
    """Return whether a function returns views of its arguments."""
    returns = _schema(func).returns
    for value in returns:
        if value.alias_info is None or value.alias_info.is_write:
            return False
    return bool(returns)


def _schema(func: Any) -> Any:
    """Return torch's schema of a function: its arguments, and which of them it writes to."""
    return func._schema  # noqa: SLF001  torch has no public name for what an operation writes to


@contextlib.contextmanager
def _random_state_kept() -> Iterator[None]:
    """Restore torch's generator of random numbers at the end of a block."""
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)


def _bytes_of(dtype: torch.dtype) -> int:
    """Return the bytes of an element of a floating-point type."""
    return torch.finfo(dtype).bits // 8


def _address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage in host memory; 0 for a tensor without one."""
    if tensor.layout != torch.strided or tensor.device.type != "cpu":
        return 0
    return tensor.untyped_storage().data_ptr()


def _place(tensor: torch.Tensor) -> _Place:
    """Return the place of a tensor in its storage."""
    return _Place(tuple(tensor.size()), tuple(tensor.stride()), int(tensor.storage_offset()))


def _flat(tensor: torch.Tensor, blank: _Blank) -> torch.Tensor:
    """Return a tensor of all elements of the storage."""
    return torch.empty(0, dtype=blank.dtype).set_(tensor.untyped_storage(), 0, (blank.count,), (1,))
