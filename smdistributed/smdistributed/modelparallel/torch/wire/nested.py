"""Nested values taken apart: their tensors, and the rest, which can be sent and put together again.

torch's pytree knows lists, tuples, dictionaries and registered classes. For all others a value is one leaf, and what
it holds would travel as a constant: without its gradient. So dataclasses, subclasses of containers and Hugging Face's
caches are opened here too, as `copy.copy` does it, and become objects of their own class again.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import io
import pickle
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

_CONTAINERS = (
    dict,
    list,
    tuple,
    set,
    frozenset,
    collections.deque,
    collections.UserDict,
    collections.UserList,
)
_CACHES = "transformers.cache_utils"
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, slice})


class Tree(NamedTuple):
    """A nested value without its tensors.

    Attributes:
        spec: The structure; None if the value is one tensor.
        leaves: What is in it; None in the place of a tensor and of an opened object. A tensor of a class of its own, or
            with attributes, has a `Mark` there.
        places: Positions of the tensors among the leaves.
        opened: Position and parts of each object with tensors that pytree does not know.
    """

    spec: pytree.TreeSpec | None
    leaves: tuple[Any, ...]
    places: tuple[int, ...]
    opened: tuple[tuple[int, Tree], ...] = ()

    def __reduce__(self) -> Any:
        """Pickle the structure apart: the same few travel all the time."""
        data = None if self.spec is None else _dump(self.spec)
        return _from_pickle, (data, self.leaves, self.places, self.opened)


class Mark(NamedTuple):
    """What a tensor is beside its values.

    Attributes:
        kind: Its class.
        attributes: Those that a script gave it.
    """

    kind: type[torch.Tensor]
    attributes: dict[str, Any]

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Make a tensor with the same values the same."""
        if self.kind is not torch.Tensor:
            tensor = tensor.as_subclass(self.kind)
        for name, value in self.attributes.items():
            setattr(tensor, name, value)
        return tensor


def mark(tensor: torch.Tensor) -> Mark | None:
    """Return what a tensor is beside its values; None: nothing. Classes with an inside of their own are not known."""
    kind = type(tensor)
    own = kind not in _TENSORS and kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    attributes = {} if kind not in _TENSORS and not own else tensor.__dict__
    if not own and not attributes:
        return None
    given = {name: value for name, value in attributes.items() if not name.startswith("_")}
    return Mark(kind if own else torch.Tensor, given) if own or given else None


_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_ONE = Tree(None, (None,), (0,))


def flatten(value: Any) -> tuple[Tree, list[torch.Tensor]]:
    """Take the tensors out of a nested value."""
    if isinstance(value, torch.Tensor) and mark(value) is None:
        return _ONE, [value]
    leaves, spec = pytree.tree_flatten(value)
    tensors: list[torch.Tensor] = []
    inner: list[torch.Tensor] = []
    places: list[int] = []
    opened: list[tuple[int, Tree]] = []
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            leaves[place] = mark(leaf)
            places.append(place)
            tensors.append(leaf)
        elif type(leaf) not in _PLAIN and (parts := _parts(leaf)) is not None:
            tree, found = flatten(parts)
            if found:
                leaves[place] = None
                opened.append((place, tree))
                inner += found
    return Tree(spec, tuple(leaves), tuple(places), tuple(opened)), tensors + inner


def unflatten(tree: Tree, tensors: Sequence[Any]) -> Any:
    """Put the tensors, or others in their place, back into a nested value."""
    return tensors[0] if tree.spec is None else _built(tree, iter(tensors))


def mapped(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Return a nested value with another in the place of each tensor."""
    tree, tensors = flatten(value)
    return unflatten(tree, [function(tensor) for tensor in tensors])


def _built(tree: Tree, tensors: Iterator[Any]) -> Any:
    if tree.spec is None:
        return next(tensors)
    leaves = list(tree.leaves)
    for place in tree.places:
        beside: Mark | None = leaves[place]
        leaves[place] = next(tensors) if beside is None else beside.put(next(tensors))
    for place, parts in tree.opened:
        leaves[place] = _object(*_built(parts, tensors))
    return pytree.tree_unflatten(leaves, tree.spec)


# ---- objects that pytree does not know -------------------------------------------------------------------------------


@functools.lru_cache(4096)
def _opens(kind: Any) -> bool:
    """Return whether a class only holds what is in it, so that a copy is as good as the object."""
    return (
        dataclasses.is_dataclass(kind)
        or issubclass(kind, _CONTAINERS)
        or any(base.__module__ == _CACHES for base in kind.__mro__)
    )


def _parts(value: Any) -> tuple[Any, ...] | None:
    """Return what `_object` makes an equal object of; None: the value is not to be opened."""
    kind: Any = type(value)
    if not _opens(kind):
        return None
    if kind in (set, frozenset):
        return kind, (list(value),), None, None, None
    try:
        parts = value.__reduce_ex__(4)
    except Exception:  # noqa: BLE001  it stays whole, and whoever sends it is told
        return None
    if not isinstance(parts, tuple) or len(parts) > 5:
        return None
    make, args, state, items, pairs = (*parts, None, None, None)[:5]
    return make, args, state, items and list(items), pairs and [tuple(pair) for pair in pairs]


def _object(make: Callable[..., Any], args: tuple[Any, ...], state: Any, items: Any, pairs: Any) -> Any:
    value = make(*args)
    if state is not None and hasattr(value, "__setstate__"):
        value.__setstate__(state)
    elif state is not None:
        attributes, slots = state if isinstance(state, tuple) else (state, None)
        if attributes:
            value.__dict__.update(attributes)
        for name, each in (slots or {}).items():
            object.__setattr__(value, name, each)  # also where the class is frozen
    for each in items or ():
        value.append(each)
    for key, each in pairs or ():
        value[key] = each
    return value


# ---- pickled ---------------------------------------------------------------------------------------------------------

_pickled: dict[pytree.TreeSpec, bytes] = {}
_specs: dict[bytes, pytree.TreeSpec] = {}
_MOST = 4096


class _HiddenTensorError(TypeError):
    pass


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """Refuse tensors. Python asks this for what is none of its own basic types."""
        if isinstance(value, torch.Tensor):
            raise _HiddenTensorError
        return NotImplemented


def dumps(value: object) -> bytes:
    """Pickle a value that may have trees in it.

    Raises:
        TypeError: A tensor is in it, where a tree has none: its gradient would be lost. Or pickle does not know a part.
    """
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, 5).dump(value)
    except _HiddenTensorError:
        raise TypeError(f"a tensor is in {holder(value)}, where its gradient would be lost") from None
    return buffer.getvalue()


def holder(value: Any) -> str:
    """Return words for the object in a value that has a tensor in it."""
    if isinstance(value, Tree):
        value = (*value.leaves, *(tree for _, tree in value.opened))
    for each in value if isinstance(value, tuple) else ():
        if hides(each):
            return holder(each)
    return "the keys of a dictionary" if isinstance(value, tuple) else f"an object of {type(value)}"


def hides(value: Any) -> bool:
    """Return whether a tensor is in an object that ``flatten`` does not open."""
    try:
        _Pickler(io.BytesIO(), 5).dump(value)
    except _HiddenTensorError:
        return True
    except Exception:  # noqa: BLE001  pickle does not know it: that has its own error
        return False
    return False


def _from_pickle(data: bytes | None, *rest: Any) -> Tree:
    return Tree(None if data is None else _load(data), *rest)


def _dump(spec: pytree.TreeSpec) -> bytes:
    """Return a structure as bytes."""
    try:
        known = _pickled.get(spec)
    except TypeError:  # a context without a hash
        return dumps(spec)
    if known is None:
        if len(_pickled) >= _MOST:
            _pickled.clear()
        known = _pickled[spec] = dumps(spec)
    return known


def _load(data: bytes) -> pytree.TreeSpec:
    spec = _specs.get(data)
    if spec is None:
        if len(_specs) >= _MOST:
            _specs.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's own class for leaves
            spec = pickle.loads(data)  # noqa: S301  from a rank of this job
        assert isinstance(spec, pytree.TreeSpec)
        _specs[data] = spec
    return spec
