"""The state that modules keep on themselves: each microbatch sees the values of a single process.

Microbatches interleave on a rank, and a microbatch goes from rank to rank. So a value that is
written to an attribute of a module, or into a container of a module, belongs to the microbatch that
wrote the value. The value goes along when the microbatch goes to another rank. A microbatch that
has not written sees the value of the microbatch before, as if they had run one after another. If
this value is written again after a later microbatch has read it, the step ends with an error.

Reads of containers, of module-level variables and of classes cannot be observed. So the first step
of each step function runs its microbatches one after another. If a microbatch changes such state
after it has left the rank once, the microbatches of the next step do not overlap either.
"""

from __future__ import annotations

import array
import collections
import contextlib
import functools
import inspect
import itertools
import logging
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from smdistributed.modelparallel.torch.exceptions import StepError
from smdistributed.modelparallel.torch.transport import containers
from smdistributed.modelparallel.torch.transport.pytrees import flatten, tensors_in

from . import running, variables
from .global_state import HOOKS, GlobalState, hooks_of, package

__all__ = ["EMPTY_HEADER", "MicrobatchRun", "ModuleState", "StateHeader"]

_FIRST_STEPS = 3
"""The first steps of each step function, in which all state travels that modules write.

Later steps send only the state that was read on another rank in these steps.
"""

_NOT_FOLLOWED = frozenset(nn.Module().__dict__) - {"training"} | {
    "forward",
    "_orig_forward",
    "_call_impl",
    "_apply",
    "_output_capturing_hooks_installed",
}
"""Names of attributes of torch, of this library, and of Hugging Face's hooks (variables.py).

Writes to these attributes are no state of a microbatch.
"""

_NUMBER_CLASSES = (int, float, complex)
_WEAK_DICTIONARIES = (weakref.WeakKeyDictionary, WeakIdKeyDictionary)
_PLAIN_CLASSES = containers.PLAIN_CLASSES

_log = logging.getLogger("smdistributed.modelparallel")

_MADE_IN_STEP = "new"
"""Third item of the key of a container that was made in the present step. Such a container travels
with its attribute.
"""
_LEAF = "leaf"
"""Last item of the key of a tensor, an array or another object that is no container."""
_MOST_CONTAINERS = 256
"""Number of containers of one attribute that are compared whenever a microbatch ends or waits.

Further containers are compared at the end of a step.
"""
_LARGEST_PARAMETER = 1 << 18
"""Largest size in bytes of a frozen parameter with compared values. torch does not count all
writes.
"""

_REMEDY = (
    'Keep it in a local variable, or set "active_microbatches" to 1: then microbatches run one'
    " after another. Or place the modules that use it on one partition with smp.set_partition."
)
"""Second line of an error about a write that another microbatch may have missed."""

_FASTER = (
    "Equal to one process, but slower. Keep it in a local variable, or place the modules that use"
    " it on one partition with smp.set_partition."
)
"""Second line of the warning that microbatches run one after another."""

Key = tuple[Any, ...]
"""Where state is: (number of a module, name of an attribute), and for a container a third item, the
number of the container in the attribute. For example ``(3, "hidden")`` is an attribute, and ``(3,
"cache", 0)`` is the first container in an attribute.
"""


class MicrobatchRun(NamedTuple):
    """A microbatch as it runs on this rank.

    Runs are ordered by the number of the microbatch. In a single process they would run in this
    order.

    Attributes:
        microbatch: Number of the microbatch, from 0.
        is_copy: Whether the script's own code runs on a rank that does not own the root module.
            There the step function runs too, on outputs that were received.
    """

    microbatch: int
    is_copy: bool = False


class _Mark:
    """A mark in the place of a value: `MISSING` or `UNSENT`.

    Marks are compared by identity. A pickled mark is the same object on the other rank.
    """

    def __init__(self, words: str) -> None:
        self.words = words

    def __reduce__(self) -> str:
        """Return the name of the module-level variable that unpickling looks up."""
        return "MISSING" if self is MISSING else "UNSENT"


MISSING, UNSENT = _Mark("missing"), _Mark("unsent")
"""``MISSING``: there is no such attribute. ``UNSENT``: the value is on another rank only."""


Stamp = tuple[int, int]
"""Names a write: the rank that wrote, and the number of the write on this rank."""


class StateHeader(NamedTuple):
    """Describes state that goes to another rank. The values are in `AttachedState`.

    Attributes:
        writes: The writes, in the order of the values: (key, stamp, microbatch).
        held: Stamps of the writes that the microbatch had made on the sender.
        remote_reads: Keys of state that was read on other ranks than it was written.
        variables: Names of the context variables with attached values.
        hooked: Numbers of Hugging Face's models that capture their outputs.
        unread: With a result: numbers of the tensors that came with the call and were not read.
        late: Number of microbatches that changed state which an overlapping one may have read.
        lent: With a result: numbers of the tensors and containers in the result that a module of
            the sender keeps.
        unused: With a result: numbers of the tensors that came with the call and are not in a
            graph of the result.
    """

    writes: tuple[tuple[Key, Stamp, int], ...] = ()
    held: frozenset[Stamp] = frozenset()
    remote_reads: tuple[Key, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    hooked: tuple[int, ...] = ()
    unread: tuple[int, ...] = ()
    late: int = 0
    lent: tuple[int, ...] = ()
    unused: tuple[int, ...] = ()


EMPTY_HEADER = StateHeader()


_AFTER_ALL = MicrobatchRun(1 << 60)
"""Stands for a microbatch after all others: it sees the state after the step."""


class _Version:
    """The writes and reads of one microbatch to one piece of state.

    Attributes:
        value: The value of its last write; MISSING before.
        visible_value: The value that other microbatches see: of the last write outside a forward
            that ran again in the backward pass.
        time: Time of the last write, by the logical clock of this rank, which counts writes and
            first reads.
        reads: Number of its reads.
        own_writes: Number of its writes on this rank.
        writes: Number of its writes on any rank.
        has_read_earlier: Whether it read the value of an earlier microbatch.
        earlier_value: The value that it read then.
        read_time: Time of this read, by the same clock as ``time``.
        is_fetched: Whether a value that came from another rank was read.
        writer: The writer of the value: the key of a context, or the stamp of another rank.
        sent_value: For shared state that the microbatch had not written: the value that went
            along.
    """

    __slots__ = (
        "earlier_value",
        "has_read_earlier",
        "is_fetched",
        "own_writes",
        "read_time",
        "reads",
        "sent_value",
        "time",
        "value",
        "visible_value",
        "writer",
        "writes",
    )

    def __init__(self) -> None:
        self.value: Any = MISSING
        self.visible_value: Any = MISSING
        self.earlier_value: Any = MISSING
        self.sent_value: Any = MISSING
        self.has_read_earlier = self.is_fetched = False
        self.writer: Any = None
        self.read_time = self.time = self.reads = self.own_writes = self.writes = 0


class _ContainerName(NamedTuple):
    """Stands for a container in a value that is sent: the receiver takes its own container.

    Attributes:
        key: Where the container was when the step began.
    """

    key: Key


class _Slot:
    """One attribute or container, with the writes and reads of this step.

    Attributes:
        key: Where the state is: two items for an attribute, three or more for a container.
        holder: The module of an attribute, or the container.
        initial_value: The value at the beginning of the step; of a container the content.
        is_written_in_place: Whether a tensor in the attribute was written in place.
        has_late_write: Whether a microbatch wrote after it had left the rank once.
        has_changed: Whether a container had another content for some time.
        missed_by: New key of a dictionary -> microbatch that wrote it -> later microbatches that
            had run without the key.
        versions: The writes and reads of each microbatch.
        installed_content: The content that a container has now.
    """

    __slots__ = (
        "has_changed",
        "has_late_write",
        "holder",
        "initial_value",
        "installed_content",
        "is_written_in_place",
        "key",
        "missed_by",
        "versions",
    )

    def __init__(self, key: Key, holder: Any, initial_value: Any) -> None:
        self.key, self.holder, self.initial_value = key, holder, initial_value
        self.is_written_in_place = self.has_late_write = self.has_changed = False
        self.missed_by: dict[Any, dict[MicrobatchRun, set[MicrobatchRun]]] = {}
        self.versions: dict[MicrobatchRun, _Version] = {}
        self.installed_content = initial_value

    def is_counter(self) -> bool:
        """Return whether the state is an integer that microbatches only add to, and do not use.

        Additions have the same sum in any order, so such writes are no conflict. False if no
        microbatch has read or written on this rank.
        """
        is_used = False
        for version in self.versions.values():
            if not version.reads and not version.own_writes:
                continue
            is_used = True
            # ``counter += 1`` reads once for each write. A further read uses the number.
            if version.reads != version.own_writes:
                return False
            if not _is_counted_up(version.earlier_value, version.value):
                return False
        return is_used

    def value_after_step(self) -> Any:
        """Return the value that the state has after the step.

        For an attribute this is the value of the last microbatch, or the sum of all additions to
        a counter; MISSING if the attribute was deleted. For a container it is a content.

        The slot and the module are not changed: `ModuleState.end` writes the value.
        """
        if len(self.key) > 2:
            return self._content_after_step()
        if self.is_counter():
            total = self.initial_value
            for version in self.versions.values():
                if version.own_writes:
                    total = total + (version.value - version.earlier_value)
            return total
        value = self.find_visible(_AFTER_ALL)[1]
        if type(value) in _NUMBER_CLASSES:
            # A forward that ran again in the backward pass counts again, as in one process.
            repeated = 0
            for run, version in self.versions.items():
                if not version.own_writes or run.is_copy:
                    continue
                has_numbers = (
                    type(version.value) in _NUMBER_CLASSES
                    and type(version.visible_value) in _NUMBER_CLASSES
                )
                if has_numbers:
                    repeated += version.value - version.visible_value
            value += repeated
        return value

    def _content_after_step(self) -> Any:
        """Return the content that the container has after the step: a list for a list or deque,
        else a dictionary.

        Contents of several microbatches are joined, see `_sum_of_writes`. The container is not
        written.
        """
        # A microbatch may have written in its own run and in its copy: the later write counts.
        newest: dict[int, _Version] = {}
        for run, version in sorted(self.versions.items(), key=lambda item: item[0]):
            if not version.writes or version.value is MISSING:
                continue
            other = newest.setdefault(run.microbatch, version)
            if version.time > other.time:
                newest[run.microbatch] = version
        if not newest:
            return self.initial_value
        writers = []
        for microbatch, version in newest.items():
            own_version = self.versions.get(MicrobatchRun(microbatch), version)
            writers.append((version.value, own_version.earlier_value))
        return _sum_of_writes(self.initial_value, writers)

    def find_visible(
        self, run: MicrobatchRun, *, own: bool = True
    ) -> tuple[MicrobatchRun | None, Any]:
        """Return the value that a microbatch sees.

        Nothing is noted: `ModuleState.read` records a read.

        Args:
            run: The microbatch.
            own: Whether its own writes count.

        Returns:
            (writer, value). The writer is the microbatch that wrote the value, or None for the
            value from before the step. The value may be a mark, `MISSING` or `UNSENT`. To another
            microbatch a container shows no new tensors that require a gradient.
        """
        version = self.versions.get(run) if own else None
        if version is not None and version.writes:
            return run, version.value
        # The last write of the nearest earlier microbatch. Its run of the same kind goes before:
        # a copy sees what a copy wrote, if that is there.
        best: tuple[int, bool, int, MicrobatchRun] | None = None
        for other, version in self.versions.items():
            if version.writes and other.microbatch < run.microbatch:
                is_alike = run == _AFTER_ALL or other.is_copy == run.is_copy
                candidate = (other.microbatch, is_alike, version.time, other)
                if best is None or candidate > best:
                    best = candidate
        if best is None:
            return None, self.initial_value
        writer = best[3]
        value = self.versions[writer].visible_value
        if len(self.key) > 2 and run != _AFTER_ALL:
            value = _without_gradients(value, self.initial_value)
        return writer, value


class _Attribute(containers.AttributeDescriptor):
    """A descriptor in a class, for an attribute that an object of the class writes in a step.

    It makes reads of the attribute observable. It is removed from the class when the step ends.

    Attributes:
        name: Name of the attribute.
        default: The value that the class had under this name; MISSING without one.
    """

    def __init__(self, name: str, default: Any) -> None:
        self.name, self.default = name, default

    def __get__(self, module: Any, owner: Any = None) -> Any:
        """Return the value that the running microbatch sees, and note the read.

        Without a running microbatch, or on an object that is not followed, this is the attribute,
        parameter, buffer or submodule of the object, or else the default of the class.

        The read is recorded in the slot of the attribute (`ModuleState.read`). For a running
        statistic that batch normalization itself takes for an update, the tensor of this microbatch
        is returned, and no read is recorded.

        Raises:
            AttributeError: The microbatch sees no such attribute.
            StepError: As `ModuleState.read`: the values would depend on the order of the
                microbatches.
        """
        name = self.name
        if module is not None:
            slot = _attribute_slots.get((id(module), name)) if _attribute_slots else None
            value: Any = UNSENT
            if slot is not None and _active_state is not None:
                # A buffer of batch normalization: does the module itself take it, to update it?
                code = sys._getframe(1).f_code  # noqa: SLF001
                if name in running.BUFFERS and running.is_update(code, module):
                    value = _active_state.statistic_to_update(slot)
                else:
                    value = _active_state.read(slot)
            if value is UNSENT:
                own = module.__dict__
                if name in own:
                    return own[name]
                for kind in ("_parameters", "_buffers", "_modules"):
                    members = own.get(kind, {})
                    if name in members:
                        return members[name]
            elif value is not MISSING:
                return value
        if self.default is MISSING:
            raise AttributeError(f"{name!r} is not set")
        # A default that is a descriptor itself, such as a function, is bound to the object.
        bind = getattr(self.default, "__get__", None)
        if bind is None:
            return self.default
        return bind(module, owner)

    def __set__(self, module: Any, value: Any) -> None:
        """Set the attribute, and record a write that did not go by way of `nn.Module`.

        ``object.__setattr__`` comes here without a call of nn.Module's.

        The value is in the object's ``__dict__`` also if the write is then refused.

        Raises:
            StepError: A later microbatch has read the value before.
        """
        module.__dict__[self.name] = value
        if _active_state is None or _active_state.quiet:
            return
        slot = _active_state.find_slot(module, self.name)
        if slot is not None:
            _active_state.set_known_value(module, self.name)
            _active_state.record_write(slot, value)

    def __delete__(self, module: Any) -> None:
        """Delete the attribute from the object.

        Raises:
            AttributeError: The object has no such attribute of its own.
        """
        if self.name not in module.__dict__:
            raise AttributeError(self.name)
        del module.__dict__[self.name]


_attribute_slots: dict[tuple[int, str], _Slot] = {}
"""The attributes that were written in the present step: (``id()`` of a module, name) -> slot."""
_active_state: ModuleState | None = None
"""The state of the present step; None between steps."""
# torch's own methods, which a step replaces by those below.
_torch_setattr, _torch_delattr = nn.Module.__setattr__, nn.Module.__delattr__
_torch_register_buffer = nn.Module.register_buffer


def _set_attribute(module: nn.Module, name: str, value: Any) -> None:
    """Set an attribute as ``nn.Module.__setattr__`` does, and note the write.

    It takes the place of ``nn.Module.__setattr__`` in a step, for all modules of the process.

    Raises:
        StepError: As `ModuleState.write`.
    """
    if _active_state is not None and name not in _NOT_FOLLOWED:
        _active_state.write(module, name, value)
    else:
        _torch_setattr(module, name, value)


def _register_buffer(
    module: nn.Module, name: str, tensor: torch.Tensor | None, persistent: bool = True
) -> None:
    """Add a buffer as ``nn.Module.register_buffer`` does, and note the write.

    It takes the place of ``nn.Module.register_buffer`` in a step, for all modules of the process.

    Raises:
        StepError: As `ModuleState.write`.
        KeyError: As torch: the name is that of another attribute, or has a dot.
        TypeError: As torch: the value is no tensor, or the name no string.
    """
    if _active_state is None or name in module.__dict__["_parameters"]:
        _torch_register_buffer(module, name, tensor, persistent)
    else:
        register = functools.partial(_torch_register_buffer, module, name, tensor, persistent)
        _active_state.write(module, name, tensor, register)


def _delete_attribute(module: nn.Module, name: str) -> None:
    """Delete an attribute as ``nn.Module.__delattr__`` does, and note the deletion as a write.

    It takes the place of ``nn.Module.__delattr__`` in a step, for all modules of the process.

    Raises:
        AttributeError: The running microbatch sees no such attribute.
        StepError: The value is on another rank only, or a later microbatch has read it before.
    """
    module_state = _active_state
    slot = None if module_state is None else module_state.find_slot(module, name)
    if module_state is None or slot is None:
        _torch_delattr(module, name)
        return
    if module_state.read(slot) is MISSING:
        raise AttributeError(name)
    _store(module, name, MISSING)
    module_state.set_known_value(module, name)
    module_state.record_write(slot, MISSING)


class ModuleState:
    """The state of the modules, as each microbatch of a rank sees it.

    In a step this object replaces methods of `nn.Module`, so that writes to attributes are noted.
    Containers, tensors and other objects are compared when a microbatch is suspended or ends.

    Attributes:
        rank: Rank in the pipeline.
        current_run: Returns the microbatch that this thread runs, or None.
        context_key: Returns the key of the present context.
        module_title: Returns words for a module, by its number.
        agreed: Name of a step function -> whether its microbatches run one after another in the
            next step.
        quiet: Whether an attribute is being set by `write`, which notes the write itself.
    """

    def __init__(
        self,
        rank: int,
        current_run: Callable[[], MicrobatchRun | None],
        context_key: Callable[[], Key],
        module_title: Callable[[int], str],
    ) -> None:
        """Make the state of a rank, without modules: `install` adds them.

        Args:
            rank: Rank in the pipeline.
            current_run: Returns the microbatch that this thread runs, or None.
            context_key: Returns the key of the present context.
            module_title: Returns words for a module, by its number.
        """
        self.rank, self.current_run = rank, current_run
        self.context_key, self.module_title = context_key, module_title
        self.quiet = False
        self.agreed: dict[str, bool] = {}

        # The modules, and what is known of them for all steps.
        self._modules: list[nn.Module] = []
        self._owner_ranks: list[int] = []
        self._module_numbers: dict[int, int] = {}  # by id() of a module
        self._remote_submodules: dict[int, list[int]] = {}  # by number of a called module
        self._global_state = GlobalState()
        self._known_hook_ids: list[int] = []
        self._tracked_keys: set[Key] = set()  # their reads are observed from the step's begin on
        self._shared_keys: set[Key] = set()  # containers that modules of several ranks hold
        self._remotely_read_keys: set[Key] = set()
        self._reads_told_to_peer: dict[int, int] = {}  # rank -> number of keys
        self._attributes_written_in_place: set[tuple[int, str]] = set()
        self._clock = itertools.count(1)

        # By name of a step function.
        self._steps: dict[str, int] = {}
        self._late_writes: dict[str, str] = {}  # words for the last late write of the step
        self._functions_with_late_write: set[str] = set()
        self._functions_always_in_turn: set[str] = set()
        self._warned_functions: set[str] = set()

        # Warnings that were printed.
        self._warned_keys: set[Key] = set()
        self._warned_arrays: set[Key] = set()

        # The present step.
        self._function, self._runs_in_turn = "", False
        self._sends_all_state = True
        self._container_slots: dict[int, _Slot] = {}  # by id() of the container
        self._thread_local_slots: list[_Slot] = []
        self._containers_by_key: dict[Key, Any] = {}
        self._key_by_container_id: dict[int, Key] = {}
        self._unobserved_containers: dict[int, tuple[Key, Any, Any]] = {}  # with their content
        self._buffers: list[tuple[int, str, torch.Tensor, int]] = []  # the last one is a version
        self._buffer_ids: set[int] = set()
        self._parameters: list[tuple[int, str, nn.Parameter, int]] = []
        self._leaves: list[_Leaf] = []
        self._weak_dictionaries: list[tuple[int, str, Any]] = []
        self._attributes_before: dict[int, dict[str, Any]] = {}
        self._hook_numbers: dict[int, set[int]] = {}  # by number of a module of another rank
        self._descriptors: dict[tuple[type, str], bool] = {}  # whether the class had the name
        self._running = running.RunningStatistics()
        self._writes_by_microbatch: dict[int, dict[Key, tuple[Stamp, Any]]] = {}
        self._known_by_peer: dict[tuple[int, bool], set[Stamp]] = {}
        self._lent_items: list[tuple[str, Any, Any]] = []
        self._started_runs: set[MicrobatchRun] = set()
        self._runs_that_left: set[MicrobatchRun] = set()
        self._return_counts: collections.Counter[MicrobatchRun] = collections.Counter()
        self._late_microbatches: set[int] = set()
        self._peer_late_count = 0

    def install(self, modules: list[nn.Module], owner_ranks: list[int]) -> None:
        """Begin to follow the modules of a model, and forget all of an earlier model.

        The code of the modules and of their hooks is read, to find state outside of the modules.
        The modules are not changed; the set of module ids of `containers.ObjectAttributes` is
        replaced.

        Args:
            modules: All modules, in the order that all ranks have.
            owner_ranks: For each module the rank that owns it.
        """
        self._modules, self._owner_ranks = modules, owner_ranks
        containers.ObjectAttributes.model_module_ids = set(map(id, modules))
        self._module_numbers = {id(module): number for number, module in enumerate(modules)}
        self._remote_submodules = {}
        for dictionary in (self._steps, self._reads_told_to_peer, self._late_writes, self.agreed):
            dictionary.clear()
        self._tracked_keys.clear()
        self._shared_keys.clear()
        self._remotely_read_keys.clear()
        self._attributes_written_in_place.clear()
        self._functions_with_late_write.clear()
        self._functions_always_in_turn.clear()
        # Buffers that a module writes in place in a training pass and reads in an evaluation.
        for number, module in enumerate(modules):
            if owner_ranks[number] != self.rank:
                continue
            if isinstance(module, nn.modules.batchnorm._NormBase):  # noqa: SLF001
                for name, buffer in module._buffers.items():  # noqa: SLF001
                    if buffer is not None:
                        self._tracked_keys.add((number, name))
        self._read_code()

    def _read_code(self) -> None:
        """Find the global state that the code of the modules and of their hooks names.

        Attributes that this code writes are added to the tracked keys.

        The ids of the present hooks are stored, so that `begin` notices a new hook.
        """
        self._global_state = GlobalState(self._modules)
        self._known_hook_ids = self._find_hook_ids()
        for number, module in enumerate(self._modules):
            for name in (
                self._global_state.written_attributes & module.__dict__.keys() - _NOT_FOLLOWED
            ):
                # A property sets another attribute, which is tracked itself.
                if not hasattr(getattr(type(module), name, None), "__set__"):
                    self._tracked_keys.add((number, name))

    def _find_hook_ids(self) -> list[int]:
        """Return the ``id()`` of each hook that is registered on a module now."""
        return [id(hook) for module in self._modules for hook in hooks_of(module)]

    def find_random_packages(self) -> set[str]:
        """Return the packages with random generators that the code of the modules names.

        For example ``{"numpy", "random"}``.
        """
        return set(self._global_state.random_packages)

    # --- a step -----------------------------------------------------------------------------------

    def begin(self, function: str) -> bool:
        """Begin a step: record the state of all modules, and replace methods of `nn.Module`.

        A warning is logged once for each step function with microbatches that must not overlap.

        Until `end`, attribute writes of all modules of the process come to this object. The classes
        of modules with tracked attributes get descriptors, which observe reads.

        Args:
            function: Name of the step function.

        Returns:
            Whether the microbatches of this step must run one after another.
        """
        global _active_state
        steps = self._steps[function] = self._steps.get(function, 0) + 1
        self._sends_all_state = steps <= _FIRST_STEPS
        self._runs_in_turn = steps == 1 or self.agreed.get(function, False)
        self._function = function
        late = self._late_writes.pop(function, None)
        if late and function not in self._warned_functions:
            self._warned_functions.add(function)
            _log.warning("%s: microbatches run one after another: %s\n%s", function, late, _FASTER)
        if self._find_hook_ids() != self._known_hook_ids:
            self._read_code()
        self._started_runs.clear()
        self._runs_that_left.clear()
        self._return_counts.clear()
        self._late_microbatches.clear()
        self._peer_late_count = 0
        self._container_slots = {}
        self._containers_by_key.clear()
        self._key_by_container_id.clear()
        self._begin_containers(is_first_step=steps == 1)
        for key in self._tracked_keys:
            if len(key) == 2:
                self._ensure_slot(self._modules[key[0]], key)
        self._begin_tensors()
        self._hook_numbers = {}
        for number, owner in enumerate(self._owner_ranks):
            if owner != self.rank:
                self._hook_numbers[number] = self._find_hook_numbers(number)
        self._attributes_before = {}
        if self._runs_in_turn:
            self._attributes_before = dict(enumerate(map(_attributes_of, self._modules)))
        # Weak dictionaries are searched for in the first steps only: that takes time.
        if self._sends_all_state:
            self._weak_dictionaries = []
            for number, module in enumerate(self._modules):
                for name, value in _find_roots(module, self._global_state):
                    if isinstance(value, _WEAK_DICTIONARIES):
                        self._weak_dictionaries.append((number, name, value))
        # Last: from now on each write to a module is one of a microbatch.
        _active_state = self
        nn.Module.__setattr__, nn.Module.__delattr__ = _set_attribute, _delete_attribute  # type: ignore[method-assign,assignment]
        nn.Module.register_buffer = _register_buffer  # type: ignore[method-assign,assignment]
        return self._runs_in_turn

    def _begin_containers(self, *, is_first_step: bool) -> None:
        """Record the content of the containers that modules hold.

        Each gets a slot, which is compared at each change of microbatches. A container that is too
        large for that is kept in `_unobserved_containers`, and compared at the end of the step.

        Args:
            is_first_step: Whether this is the first step of the step function. Then large
                containers are followed, too.
        """
        for key, container in self._find_containers():
            self._record_place(key, container)
            if is_first_step or key in self._tracked_keys or not _is_too_large(key, container):
                self._container_slots[id(container)] = _Slot(
                    key, container, containers.read_content(container)
                )
            else:
                self._unobserved_containers[id(container)] = (
                    key,
                    container,
                    containers.read_content(container),
                )
        self._thread_local_slots = []
        for slot in self._container_slots.values():
            if isinstance(slot.holder, containers.ThreadLocalValues):
                self._thread_local_slots.append(slot)

    def _begin_tensors(self) -> None:
        """Record the versions of the tensors that modules hold, and the state of other objects
        that can be written in place.

        These are parameters and buffers of this rank, tensors in attributes, and leaves: arrays,
        generators and tensors inside of containers. A version is torch's count of the writes in
        place to a tensor. A leaf with values that other ranks need gets a slot, as a container has.
        """
        self._parameters.clear()
        for number, module in enumerate(self._modules):
            if self._owner_ranks[number] != self.rank:
                continue
            for name, parameter in module._parameters.items():  # noqa: SLF001
                if parameter is not None and not parameter.is_inference():
                    self._parameters.append((number, name, parameter, parameter._version))  # noqa: SLF001

        self._leaves = list(self._find_leaves())
        own_travellers = set()  # ids of leaves that go to other ranks by themselves
        for leaf in self._leaves:
            if self._runs_in_turn and leaf.can_be_sent():
                written = containers.LeafValues.of(leaf.value)
                self._record_place(leaf.key, written)
                own_travellers.add(id(leaf.value))
                self._container_slots[id(written)] = _Slot(leaf.key, written, written.get())

        self._buffers.clear()
        for number, module in enumerate(self._modules):
            if self._owner_ranks[number] != self.rank:
                continue
            own = module.__dict__
            for name, value in (*own["_buffers"].items(), *own.items()):
                if not isinstance(value, torch.Tensor) or id(value) in own_travellers:
                    continue
                # torch counts no versions of a tensor that was made in inference mode.
                if not value.requires_grad and not value.is_inference():
                    self._buffers.append((number, name, value, value._version))  # noqa: SLF001
        self._buffer_ids = {id(buffer) for _, _, buffer, _ in self._buffers}

    def _record_place(self, key: Key, container: Any) -> None:
        """Record where a container is when the step begins: all ranks have one there."""
        self._containers_by_key[key] = container
        self._key_by_container_id[id(containers.represented_object(container))] = key

    def decide_next_order(self, function: str, *, owns_root: bool) -> bool:
        """Decide whether the microbatches of the next step of a function run one after another.

        The owner of the root module decides from the late writes of this step, and stores the
        decision in `agreed`. Other ranks return what this rank has told them.

        On the owner a step in which two microbatches wrote late, or a second step with a late
        write, keeps the microbatches of this function in turn until `install`.

        Args:
            function: Name of the step function.
            owns_root: Whether this rank owns the root module, and so decides.

        Returns:
            Whether they run one after another.
        """
        if owns_root:
            has_late_write = function in self._late_writes
            # A single microbatch may have set up state for all others. Only state that changes
            # again keeps the microbatches in turn for good.
            late_count = max(len(self._late_microbatches), self._peer_late_count)
            if has_late_write:
                if late_count > 1 or function in self._functions_with_late_write:
                    self._functions_always_in_turn.add(function)
                self._functions_with_late_write.add(function)
            self.agreed[function] = has_late_write or function in self._functions_always_in_turn
        return self.agreed.get(function, False)

    def _require_sequential_step(self, run: MicrobatchRun | None, reason: str) -> None:
        """Note a late write: the microbatches of the next step shall run one after another.

        Nothing is logged now: the next step logs the reason.

        Args:
            run: The microbatch that changed state; None if not known.
            reason: Words for a warning.
        """
        self._late_writes[self._function] = reason
        if run is not None:
            self._late_microbatches.add(run.microbatch)

    def end(self) -> None:
        """End a step: the modules keep the state that the last microbatch sees.

        Attributes, containers and running statistics of the modules are written, and the methods of
        `nn.Module` are torch's again. Nothing happens if no step has begun.

        The descriptors are removed from the classes of modules, and all records of the step are
        dropped, also after an error. Attributes and containers that were written stay tracked in
        later steps.

        Raises:
            Exception: An error of the code of a user's container, which refuses the value.
        """
        global _active_state
        # First: the writes below are no writes of a microbatch.
        nn.Module.__setattr__, nn.Module.__delattr__ = _torch_setattr, _torch_delattr  # type: ignore[method-assign]
        nn.Module.register_buffer = _torch_register_buffer  # type: ignore[method-assign]
        _active_state = None
        try:
            self._write_final_values()
        finally:
            self._drop_records()

    def _write_final_values(self) -> None:
        """Give the modules the values that the last microbatch saw.

        Raises:
            Exception: An error of the code of a user's container.
        """
        self._running.settle_all()
        for slot in _attribute_slots.values():
            self._tracked_keys.add(slot.key)
            if slot.versions:
                _store(slot.holder, slot.key[1], slot.value_after_step())
        for slot in self._container_slots.values():
            if slot.versions and slot.key[2] != _MADE_IN_STEP:
                if slot.has_changed:
                    self._tracked_keys.add(slot.key)
                containers.assign(slot.holder, slot.value_after_step())

    def _drop_records(self) -> None:
        """Drop the records of a step, and take the descriptors from the classes of modules."""
        for (kind, name), had_name in self._descriptors.items():
            default = kind.__dict__[name].default
            delattr(kind, name)
            if had_name:
                setattr(kind, name, default)
        self._descriptors.clear()
        _attribute_slots.clear()
        self._container_slots.clear()
        self._containers_by_key.clear()
        self._key_by_container_id.clear()
        self._writes_by_microbatch.clear()
        self._known_by_peer.clear()
        self._lent_items.clear()
        self._unobserved_containers.clear()
        containers.ObjectAttributes.by_object_id.clear()

    def free_ended(self, first_running: int) -> None:
        """Free tensors of microbatches that have ended and had a successor.

        Only tensors that require a gradient are freed: each of them keeps a graph alive.

        The freed value is replaced by MISSING in its slot, or is dropped from the writes that go to
        other ranks.

        Args:
            first_running: The microbatches with a smaller number have ended.
        """
        for slot in (*_attribute_slots.values(), *self._container_slots.values()):
            ended = []
            for run, version in slot.versions.items():
                if version.writes and run.microbatch < first_running:
                    ended.append(run)
            ended.sort()
            for run in ended:
                version = slot.versions[run]
                version.has_read_earlier = False  # no earlier microbatch can write any more
                # The next microbatch may still read the value of the last one.
                is_last = run.microbatch == ended[-1].microbatch
                if not is_last and _has_differentiable_tensor(version.value):
                    version.value = version.visible_value = MISSING
        for number, writes in self._writes_by_microbatch.items():
            if number >= first_running:
                continue
            for key, (_, value) in list(writes.items()):
                if _has_differentiable_tensor(value):
                    del writes[key]

    def leave(self, run: MicrobatchRun, *, backward: bool = False) -> None:
        """Find and note what a microbatch wrote in place, before another one runs on this rank or
        this one goes to another rank.

        Versions of buffers, contents of containers and states of leaves are compared with the
        recorded ones, and the new ones are recorded. A write after an earlier `leave` of the same
        microbatch is a late write: then the microbatches of the next step run one after another. In
        a step with such microbatches, writes to attributes that did not go by way of `nn.Module`
        are found, too.

        Args:
            run: The microbatch.
            backward: Whether it was a backward pass. Then writes to buffers do not count: they are
                of a forward that ran again.

        Raises:
            StepError: Another microbatch may have read the state before this write; a write cannot
                be repeated on other ranks; the caller wrote to what a remote module returned and
                keeps; or a weak dictionary of a module has tensors as keys.
        """
        # Hot: this runs at each change of contexts. Plain loops, and no calls for unchanged state.
        backward = backward or _is_in_backward()
        for place, (number, name, buffer, version) in enumerate(self._buffers):
            if buffer._version != version:  # noqa: SLF001
                self._buffers[place] = (number, name, buffer, buffer._version)  # noqa: SLF001
                if not backward:
                    self._record_buffer_write(run, number, name, buffer)
        for number, name, weak in self._weak_dictionaries:
            for key in list(weak):
                if isinstance(key, torch.Tensor) and not isinstance(key, nn.Parameter):
                    raise StepError(
                        f"attribute {name!r} of module {self.module_title(number)} has tensors as"
                        " weak keys: which of them another partition or microbatch finds cannot be"
                        " as in one process\nUse a dictionary with names."
                    )
        for title, lent_object, before in self._lent_items:
            if containers.has_changed(lent_object, before):
                raise StepError(
                    f"module {title} keeps what it returned, and its caller wrote to that:"
                    " it would not change there\n"
                    "Write to a copy, or place the module with its caller with smp.set_partition."
                )
        # A copy of the slots, because a new container adds a slot.
        for slot in list(self._container_slots.values()):
            content = containers.read_content(slot.holder)
            if not containers.has_same_items(content, slot.installed_content):
                self._record_container_write(slot, run, content, backward=backward)
        if not run.is_copy:
            if self._runs_in_turn:
                self._find_silent_writes(run)
            self._compare_leaves(run, backward=backward)
        # A late write matters if a microbatch has read another value than the step began with.
        for slot in _attribute_slots.values():
            if not slot.has_late_write:
                continue
            for reader in slot.versions.values():
                if reader.has_read_earlier and not _are_equal(
                    reader.earlier_value, slot.initial_value
                ):
                    if not slot.is_counter():
                        self._require_sequential_step(run, self._late_write_text(slot))
                    break
        self._runs_that_left.add(run)

    def _record_buffer_write(
        self, run: MicrobatchRun, number: int, name: str, buffer: torch.Tensor
    ) -> None:
        """Note that a microbatch has written a buffer in place.

        The slot of the attribute is made if there is none, and is marked as written in place. A
        write to the batch count of batch normalization notes a write to all buffers of the module.

        Args:
            run: The microbatch.
            number: Number of the module.
            name: Name of the buffer.
            buffer: The tensor. If the module has another one now, nothing is noted.

        Raises:
            StepError: A later microbatch may have read the buffer.
        """
        module = self._modules[number]
        names = (name,)
        if name == "num_batches_tracked":
            # torch does not count the writes to the running statistics, but this one comes along.
            names = tuple(module.__dict__["_buffers"])
        for written_name in names:
            value = _stored_value(module, written_name)
            if written_name != name or value is buffer:
                slot = self._ensure_slot(module, (number, written_name))
                self._check_first_write(slot, run)
                slot.is_written_in_place = True
                self._record_write(slot, run, value)

    def _record_container_write(
        self, slot: _Slot, run: MicrobatchRun, content: Any, *, backward: bool
    ) -> None:
        """Note that a microbatch has given a container a new content.

        The slot gets the content as the installed one. New containers in the content are followed,
        too. A write to a leaf, with reads that cannot be observed, lets the next step run its
        microbatches one after another.

        Args:
            slot: The container.
            run: The microbatch.
            content: The new content.
            backward: Whether a backward pass wrote.

        Raises:
            StepError: A later microbatch may have read the content before, or two microbatches
                wrote different values for one key.
        """
        slot.has_changed = True
        is_new = slot.key[2] == _MADE_IN_STEP
        before = slot.installed_content
        if not is_new and not run.is_copy and _is_comparably_other(before, content):
            self._check_container_change(slot, run, before, content, backward=backward)
        slot.installed_content = content
        self._record_write(slot, run, content)
        if slot.key[-1] == _LEAF:
            # Reads of such an object cannot be observed: so no microbatch may overlap.
            self._require_sequential_step(run, self._late_write_text(slot))
            return
        items = content if isinstance(content, list) else list(content.values())
        self._follow_containers(slot.key, items)
        if is_new:
            # The container goes along with the attribute that holds it.
            attribute = _attribute_slots.get((id(self._modules[slot.key[0]]), slot.key[1]))
            if attribute is not None:
                self._record_write(attribute, run, attribute.find_visible(run)[1])

    def set_known_value(self, module: nn.Module, name: str) -> None:
        """Store the present value of an attribute as known, so that `_find_silent_writes` does not
        find it. The attribute was written by way of `nn.Module`, and that write is noted already.
        """
        attributes = self._attributes_before.get(self._module_numbers.get(id(module), -1))
        if attributes is not None:
            attributes[name] = _stored_value(module, name)

    def _find_silent_writes(self, run: MicrobatchRun) -> None:
        """Find and note writes to attributes that did not go by way of `nn.Module`.

        For example ``module.__dict__["step"] = 3``. Only in a step with microbatches that run one
        after another, because it takes time.

        Each write lets the microbatches of the next step run one after another, too. The present
        attributes are stored as the known ones.

        Raises:
            StepError: A later microbatch has read the value before.
        """
        for number, before in self._attributes_before.items():
            module = self._modules[number]
            attributes = _attributes_of(module)
            for name in before | attributes:
                value = attributes.get(name, MISSING)
                if before.get(name, MISSING) is value:
                    continue
                slot = _attribute_slots.get((id(module), name))
                if slot is None:
                    slot = self._ensure_slot(module, (number, name))
                    slot.initial_value = before.get(name, MISSING)
                self._record_write(slot, run, value)
                self._require_sequential_step(run, self._late_write_text(slot))
            self._attributes_before[number] = attributes

    def _compare_leaves(self, run: MicrobatchRun, *, backward: bool) -> None:
        """Find writes in place to tensors, arrays and generators in attributes, containers and
        objects, and let the next step run its microbatches one after another if need be.

        Each changed leaf gets its new state, and the microbatch as its last writer.

        Args:
            run: The microbatch that may have written.
            backward: Whether a backward pass ran.

        Raises:
            StepError: Another microbatch may have read the object before this write, or the object
                is of another rank's module.
        """
        for leaf in self._leaves:
            state = leaf.read_state()
            visit = (self.context_key(), self._return_counts[run])
            last_writer, last_visit = leaf.last_writer, leaf.last_visit
            has_changed = state is not leaf.state
            if has_changed:
                leaf.last_writer, leaf.last_visit, leaf.state = run, visit, state
                self._check_leaf_owner(leaf)
            came_back = came_late = False
            if not backward and last_writer is not None and not leaf.is_attribute:
                # The microbatch wrote, left, and runs here again: another one would have written
                # meanwhile, if they overlapped.
                came_back = last_writer == run and last_visit != visit
                came_late = last_writer.microbatch > run.microbatch
            attribute = (leaf.key[0], leaf.key[1])
            if not self._runs_in_turn:
                # In an overlapped step only those writes are expected that an earlier step has
                # seen: after these, microbatches were found to be able to overlap.
                is_unexpected = has_changed and attribute not in self._attributes_written_in_place
                if came_late or (is_unexpected and self._is_overlapped(run)):
                    raise StepError(f"{self._late_leaf_write_text(leaf)}\n{_REMEDY}")
            elif has_changed:
                self._attributes_written_in_place.add(attribute)
            is_late_write = has_changed and run in self._runs_that_left
            if is_late_write or (self._runs_in_turn and came_back):
                self._require_sequential_step(run, self._late_leaf_write_text(leaf))

    def count_return(self, run: MicrobatchRun) -> None:
        """Count that a microbatch has come back to this rank from a call of another rank."""
        self._return_counts[run] += 1

    def _check_leaf_owner(self, leaf: _Leaf) -> None:
        """Refuse a write to an object of another rank's module, unless the value is sent there.

        The value is sent only in a step that runs its microbatches one after another.

        Raises:
            StepError: The write would stay on this rank.
        """
        if leaf.is_on_other_rank and not (self._runs_in_turn and leaf.can_be_sent()):
            raise StepError(
                f"{self._leaf_title(leaf)} is on another partition, and was written in"
                f" place\n{_REMEDY}"
            )

    def _leaf_title(self, leaf: _Leaf) -> str:
        """Return words for the attribute that holds an object."""
        return f"attribute {leaf.key[1]!r} of module {self.module_title(leaf.key[0])}"

    def _late_leaf_write_text(self, leaf: _Leaf) -> str:
        """Return the text of an error or a warning about a late write to an object."""
        return (
            f"{self._leaf_title(leaf)} is written where a microbatch that overlaps may have read it"
        )

    def record_variable_left(self, words: str) -> None:
        """Note that a microbatch has set a context variable and not reset it, so that the next
        microbatch sees the value.

        In a step that runs its microbatches one after another this is no error: the next step is
        made to run so, too.

        Args:
            words: Words for the variable.

        Raises:
            StepError: A later microbatch may have begun without the value.
        """
        late = f"{words} is set and not set back, where a microbatch that overlaps may have read it"
        if not self._runs_in_turn:
            raise StepError(f"{late}\n{_REMEDY}")
        self._require_sequential_step(self.current_run(), late)

    def _is_overlapped(self, run: MicrobatchRun) -> bool:
        """Return whether a later microbatch has run on this rank already."""
        for other in self._started_runs:
            if other.microbatch > run.microbatch and not other.is_copy:
                return True
        return False

    def _check_first_write(self, slot: _Slot, run: MicrobatchRun) -> None:
        """Check the first write to an attribute: reads before it were not observed.

        Args:
            slot: The attribute. One with observed reads is not checked here, but by
                `find_conflict`.
            run: The microbatch that writes.

        Raises:
            StepError: A later microbatch has run already, and may have read the attribute.
        """
        if self._runs_in_turn:
            return
        are_reads_observed = bool(slot.versions) or slot.key in self._tracked_keys
        if are_reads_observed or not self._is_overlapped(run):
            return
        if self._global_state.names_attribute(slot.key[1]):
            raise StepError(f"{self._late_write_text(slot)}\n{_REMEDY}")

    def _check_container_change(
        self, slot: _Slot, run: MicrobatchRun, before: Any, now: Any, *, backward: bool
    ) -> None:
        """Check the change of a container: an overlapping microbatch may have read the content.

        A change after the microbatch has left the rank once is a late write: the microbatches of
        the next step run one after another.

        Args:
            slot: The container.
            run: The microbatch that wrote.
            before: The content that the microbatch saw before.
            now: The new content.
            backward: Whether a backward pass wrote.

        Raises:
            StepError: A later microbatch has run already, and the content was not only added to; or
                two microbatches wrote different values for one new key.
        """
        if run in self._runs_that_left:
            self._require_sequential_step(run, self._late_write_text(slot))
        if self._is_overlapped(run) and not (_only_adds_keys(before, now) or backward):
            raise StepError(f"{self._late_write_text(slot)}\n{_REMEDY}")
        if isinstance(now, dict) and not backward:
            self._check_new_keys(slot, run, before, now)

    def _check_new_keys(
        self, slot: _Slot, run: MicrobatchRun, before: dict[Any, Any], now: dict[Any, Any]
    ) -> None:
        """Compare the values of a new key that two microbatches wrote without seeing each other.

        A memo has equal values in both; different values mean that one depends on the other.

        Args:
            slot: The dictionary. ``slot.missed_by`` gets the microbatches that ran without the key.
            run: The microbatch that wrote.
            before: The items before the write.
            now: The items after the write.

        Raises:
            StepError: The values differ.
        """
        for key in now.keys() - slot.initial_value.keys():
            if key not in before:
                later = set()
                for other in self._started_runs:
                    if other.microbatch > run.microbatch and other.is_copy == run.is_copy:
                        later.add(other)
                slot.missed_by.setdefault(key, {})[run] = later
            elif now[key] is before[key]:
                continue
            for other, version in slot.versions.items():
                is_missed = run in slot.missed_by.get(key, {}).get(other, ())
                is_missed |= key not in before and other.microbatch > run.microbatch
                if not is_missed or not isinstance(version.value, dict) or key not in version.value:
                    continue
                value, other_value = now[key], version.value[key]
                if not _is_comparable(value) or not _is_comparable(other_value):
                    continue
                if not _are_equal(value, other_value):
                    first, last = sorted((run.microbatch, other.microbatch))
                    raise self._make_order_error(slot, first, last, "after")

    def _late_write_text(self, slot: _Slot) -> str:
        """Return the text of an error or a warning about a late write."""
        return (
            f"{self._slot_title(slot)} is written where a microbatch that overlaps may have read it"
        )

    def _follow_containers(self, key: Key, value: Any) -> None:
        """Begin to follow the containers in a value that was written in this step.

        Each gets a slot whose key says that it was made in this step. Containers that are followed
        already, or that are too large, are left as they are.

        Args:
            key: Where the value is.
            value: The value.
        """
        for container in containers.find_containers(value, package(type(self._modules[key[0]]))):
            if (
                id(container) not in self._unobserved_containers
                and id(container) not in self._container_slots
            ):
                slot = _Slot(
                    (key[0], key[1], _MADE_IN_STEP), container, containers.read_content(container)
                )
                self._container_slots[id(container)] = slot

    def enter(self, run: MicrobatchRun) -> None:
        """Put the contents that a microbatch sees into the containers, before it runs here.

        The microbatch counts as started from then on. Containers are written in place; attributes
        are not, because `read` finds the value of the microbatch.
        """
        self._started_runs.add(run)
        # Another microbatch may have run on this thread, or none yet: so the content of a
        # thread-local object is read first.
        for slot in self._thread_local_slots:
            slot.installed_content = slot.find_visible(run)[1]
            if not containers.has_same_items(
                containers.read_content(slot.holder), slot.installed_content
            ):
                containers.assign(slot.holder, slot.installed_content)
        for slot in self._container_slots.values():
            if slot.versions:
                value = slot.find_visible(run)[1]
                if value is not slot.installed_content:
                    containers.assign(slot.holder, value)
                    slot.installed_content = value

    # --- attributes -------------------------------------------------------------------------------

    def find_slot(self, module: nn.Module, name: str) -> _Slot | None:
        """Return the slot of an attribute, which is made if the attribute has none yet.

        None if the attribute is not followed: of a module outside the model, of torch, a property,
        or on a thread that runs no microbatch.

        A new slot puts a descriptor into the class of the module, see `_ensure_slot`.
        """
        slot = _attribute_slots.get((id(module), name))
        if slot is None:
            number = self._module_numbers.get(id(module))
            if number is None or name in _NOT_FOLLOWED or self.current_run() is None:
                return None
            if hasattr(getattr(type(module), name, None), "__set__"):
                return None  # a property: it sets an attribute, which has a slot of its own
            slot = self._ensure_slot(module, (number, name))
        return slot

    def _ensure_slot(self, module: nn.Module, key: Key) -> _Slot:
        """Return the slot of an attribute, which is made if the attribute has none yet.

        A new slot puts a descriptor into the class of the module until the step ends: from then on
        reads of the attribute are observed.

        Args:
            module: The module that has the attribute.
            key: (number of the module, name of the attribute).
        """
        kind, name = type(module), key[1]
        if (kind, name) not in self._descriptors:
            default = inspect.getattr_static(kind, name, MISSING)
            # A base class may have a descriptor already: its default is the class's own value.
            if isinstance(default, _Attribute):
                default = default.default
            self._descriptors[kind, name] = name in kind.__dict__
            setattr(kind, name, _Attribute(name, default))
        place = (id(module), name)
        if place not in _attribute_slots:
            _attribute_slots[place] = _Slot(key, module, _stored_value(module, name))
        return _attribute_slots[place]

    def _find_hook_numbers(self, number: int) -> set[int]:
        """Return the ids that torch gave to the hooks of a module; no two hooks share one.

        Hugging Face's hooks are left out: they are set on the owner, too (variables.py).

        Args:
            number: Number of the module.
        """
        own = self._modules[number].__dict__
        hook_numbers = set()
        for kind in HOOKS:
            for hook_number, hook in own[kind].items():
                if not variables.is_of_collector(hook):
                    hook_numbers.add(hook_number)
        return hook_numbers

    def _find_remote_submodules(self, number: int) -> list[int]:
        """Return the numbers of a module and its submodules that are on other ranks.

        The list is computed once for each module, and kept until `install`.

        Modules that were made in a step are left out: other ranks do not know them.

        Args:
            number: Number of the module.
        """
        remote = self._remote_submodules.get(number)
        if remote is None:
            remote = []
            for module in self._modules[number].modules():
                submodule_number = self._module_numbers.get(id(module))
                # A module that was made in a step has no number.
                if submodule_number is None or self._owner_ranks[submodule_number] == self.rank:
                    continue
                remote.append(submodule_number)
            self._remote_submodules[number] = remote
        return remote

    def check_hooks(self, number: int) -> None:
        """Refuse a remote call if this step has registered or removed a hook, which another rank
        would not notice.

        The hooks of the called module and of its submodules on other ranks are compared with those
        at the begin of the step. Hooks of modules on this rank run here and may change.

        Args:
            number: Number of the called module.

        Raises:
            StepError: A hook was registered or removed.
        """
        for submodule_number in self._find_remote_submodules(number):
            hook_numbers = self._find_hook_numbers(submodule_number)
            numbers_before = self._hook_numbers[submodule_number]
            if hook_numbers == numbers_before:
                continue
            title = self.module_title(submodule_number)
            if hook_numbers - numbers_before:
                raise StepError(
                    f"a hook was registered in a step on module {title},"
                    " which is on another partition, where it would not run\n"
                    "Register it before the step on all ranks, or place it with smp.set_partition."
                )
            raise StepError(
                f"a hook was removed in a step from module {title},"
                " which is on another partition, where it would still run\n"
                "Remove it before the step on all ranks, or place it with smp.set_partition."
            )

    def write(
        self, module: nn.Module, name: str, value: Any, put: Callable[[], None] | None = None
    ) -> None:
        """Set an attribute of a module, and note the write of the running microbatch.

        Submodules and parameters are set, too, but are no state of a microbatch.

        If the write is refused for its order, the attribute is set nevertheless. On a thread
        without a microbatch, and for a module outside of the model, the attribute is set without a
        note. Containers in the value are followed from then on.

        Args:
            module: The module.
            name: The name of the attribute.
            value: The new value.
            put: Sets the attribute; None: ``nn.Module.__setattr__``.

        Raises:
            StepError: It is a buffer of another rank, and is not set; or a later microbatch may
                have read the former value.
            Exception: An error of ``put``, such as torch's own for a name or a value that it
                refuses.
        """
        own = module.__dict__
        put = put or functools.partial(_torch_setattr, module, name, value)
        is_of_model = id(module) in self._module_numbers
        if not is_of_model or isinstance(value, nn.Module | nn.Parameter):
            put()
            return
        if name in own["_parameters"] or name in own["_modules"]:
            put()
            return
        is_first = (id(module), name) not in _attribute_slots
        slot = self.find_slot(module, name)
        is_buffer = slot is not None and name in own["_buffers"]
        if slot is not None and is_buffer and self._owner_ranks[slot.key[0]] != self.rank:
            raise StepError(
                f"{self._slot_title(slot)} is a buffer on another partition, where it would not"
                f" change\n{_REMEDY}"
            )
        # `put` may come to the descriptor's __set__: this write is noted below, and only once.
        self.quiet = True
        try:
            put()
        finally:
            self.quiet = False
            self.set_known_value(module, name)
        if slot is None:
            return
        run = self.current_run()
        is_first_of_run = is_first and run is not None and not run.is_copy
        # Last, because the comparison of two tensors takes time.
        if run is not None and is_first_of_run and not _are_equal(value, slot.initial_value):
            self._check_first_write(slot, run)
        has_numbers = type(value) in _NUMBER_CLASSES and type(slot.initial_value) in _NUMBER_CLASSES
        if is_first and has_numbers:
            # The read before could not be observed: most likely the number is counted up.
            self.read(slot)
        self.record_write(slot, _stored_value(module, name))
        self._follow_containers(slot.key, value)
        if isinstance(value, _WEAK_DICTIONARIES):
            self._weak_dictionaries.append((slot.key[0], name, value))

    def statistic_to_update(self, slot: _Slot) -> Any:
        """Return the tensor that the running microbatch updates in place of a running statistic.

        UNSENT if no microbatch runs on this thread, or only its copy: then the buffer itself is
        updated.

        The tensor is made with zeros at the first call, and is joined to the buffer at the end of
        the step.
        """
        run = self.current_run()
        if run is None or run.is_copy:
            return UNSENT
        return self._running.buffer(slot.holder, slot.key[1], run.microbatch)

    def _settle_statistics(self, slot: _Slot) -> None:
        """Put the updates of running statistics into the buffers, because a microbatch reads them.

        The next step is made to run its microbatches one after another.

        Args:
            slot: The buffer. All running statistics of its module are updated in place.

        Raises:
            StepError: Microbatches overlap, and earlier ones may update the statistics later.
        """
        if not self._runs_in_turn:
            raise StepError(
                f"{self._slot_title(slot)} was read where other microbatches update it\n{_REMEDY}"
            )
        self._running.settle(slot.holder)
        self._require_sequential_step(self.current_run(), self._late_write_text(slot))

    def read(self, slot: _Slot) -> Any:
        """Return the value that the running microbatch sees, and note the read.

        UNSENT if no microbatch runs on this thread. MISSING if the attribute was deleted.

        The version of the microbatch in the slot counts the read, and keeps the value of the
        earlier microbatch that it saw. A read that comes after a leave, of a tensor that is written
        in place, lets the next step run its microbatches one after another. A value of another
        context is noted as one that other ranks read.

        Raises:
            StepError: A later microbatch has written in place already; the value is on another rank
                and was not sent; or the value is a running statistic that overlapping microbatches
                update.
        """
        run = self.current_run()
        if run is None:
            return UNSENT
        if slot.key[1] in running.BUFFERS and self._running.waits(slot.holder):
            self._settle_statistics(slot)
        source, value = slot.find_visible(run)
        version = slot.versions.get(run)
        if version is None:
            version = slot.versions[run] = _Version()
        if source != run and not version.has_read_earlier:
            version.has_read_earlier, version.earlier_value = True, value
            version.read_time = next(self._clock)
        version.reads += 1
        version.is_fetched = True
        # A tensor that is written in place has one value for all: a later microbatch's is wrong.
        if slot.is_written_in_place and not _is_in_backward():
            if run in self._runs_that_left:
                self._require_sequential_step(run, self._late_write_text(slot))
            for other, other_version in slot.versions.items():
                is_later = other.microbatch > run.microbatch and other.is_copy == run.is_copy
                if is_later and other_version.writes:
                    raise self._make_order_error(slot, other.microbatch, run.microbatch, "before")
        if source is not None and slot.versions[source].writer != self.context_key():
            self._remotely_read_keys.add(slot.key)
        if value is UNSENT:
            raise StepError(
                f"{self._slot_title(slot)} was set on another partition: it cannot be sent, or was"
                f" not read on this one in the first steps\n{_REMEDY}"
            )
        return value

    def record_write(self, slot: _Slot, value: Any) -> None:
        """Note a write of the running microbatch; nothing is noted if none runs on this thread.

        Raises:
            StepError: A later microbatch has read the value before.
        """
        run = self.current_run()
        if run is not None:
            self._record_write(slot, run, value)

    def _record_write(
        self, slot: _Slot, run: MicrobatchRun, value: Any, stamp: Stamp | None = None
    ) -> None:
        """Note a write in the slot, and among the writes that go to other ranks.

        The attribute or container itself is not written.

        A microbatch that writes to a container for the first time counts as having read it before.

        Args:
            slot: The state that was written.
            run: The microbatch that wrote.
            value: The new value.
            stamp: The write on another rank that the value came from; None for a write on this
                rank.

        Raises:
            StepError: A later microbatch has read the value before.
        """
        version = slot.versions.setdefault(run, _Version())
        # Reads of containers are not observed: a microbatch that writes is taken to have read.
        if len(slot.key) > 2 and not version.writes:
            version.has_read_earlier, version.earlier_value = True, slot.find_visible(run)[1]
        if not version.writes or not _is_in_backward():
            version.visible_value = value
        version.value, version.time = value, next(self._clock)
        version.writes += 1
        slot.has_late_write |= run in self._runs_that_left
        if stamp is None:
            version.own_writes += 1
            version.writer = self.context_key()
        else:
            version.writer = stamp
        if not run.is_copy:
            sent_value = value
            if stamp is None and _has_new_object(slot, value):
                sent_value = UNSENT
            writes = self._writes_by_microbatch.setdefault(run.microbatch, {})
            writes[slot.key] = (stamp or (self.rank, version.time), sent_value)
        # A switch may be reset before the microbatch ends, and then there is no conflict: so
        # find_conflict() checks these at the end of the step.
        if not isinstance(value, bool | str | _Mark | None):
            conflict = self._find_slot_conflict(slot)
            if conflict is not None:
                raise conflict

    def find_conflict(self) -> StepError | None:
        """Return an error if a microbatch read a value that an earlier one wrote again later.

        The error is not raised. None if all microbatches saw what one process would show them.

        A container that was too large to be followed, and has changed, is an error, too.
        """
        for slot in (*_attribute_slots.values(), *self._container_slots.values()):
            conflict = self._find_slot_conflict(slot)
            if conflict is not None:
                return conflict
        return self._find_unobserved_change()

    def _find_unobserved_change(self) -> StepError | None:
        """Return an error if a container changed that is too large or too deep to be followed.

        None if there is no such change.
        """
        for key, container, before in self._unobserved_containers.values():
            if id(container) in self._container_slots:
                continue
            if not containers.has_same_items(before, containers.read_content(container)):
                return StepError(
                    f"attribute {key[1]!r} of module {self.module_title(key[0])} has more than"
                    f" {containers.MOST_COMPARED_ITEMS} items or {_MOST_CONTAINERS} containers:"
                    " what is in it is looked at only if it changes in the first step of a step"
                    " function, and it changed in a later one\nKeep it smaller, or make it a"
                    " buffer."
                )
        return None

    @contextlib.contextmanager
    def explain_backward_errors(self) -> Iterator[None]:
        """Explain an error of torch in a backward pass: name the parameter that was written in this
        step, or the container that keeps a tensor of a freed graph.

        This is a context manager around the pass. Other errors than a plain RuntimeError go on
        unchanged.

        Raises:
            StepError: With the explanation.
            RuntimeError: The error itself, if no such parameter or container is found.
        """
        try:
            yield
        except RuntimeError as error:
            # An error of a subclass has a message of its own.
            if type(error) is not RuntimeError:
                raise
            written = self._find_written_parameter()
            if written is not None:
                raise StepError(
                    f"{written} was written in the step, where other microbatches still need its"
                    f" former value for their gradients: {error}\nWrite it after the step, or set"
                    ' "active_microbatches" to 1, so that microbatches run in turn.'
                ) from error
            holder = self._find_slot_with_graph()
            if holder is None:
                raise
            raise StepError(
                f"{self._slot_title(holder)} keeps a tensor that needs a gradient,"
                f" whose graph may have ended: {error}\n"
                "Detach it, or take it out when it is no longer used."
                " Or place the modules that use it on one partition with smp.set_partition."
            ) from error

    def _find_slot_with_graph(self) -> _Slot | None:
        """Return a container in which a microbatch has put a tensor that requires a gradient."""
        for slot in self._container_slots.values():
            for version in slot.versions.values():
                if _has_differentiable_tensor(version.value):
                    return slot
        return None

    def _find_written_parameter(self) -> str | None:
        """Return words for a parameter of this rank that was written in this step, or None."""
        for number, name, parameter, version in self._parameters:
            if parameter._version != version:  # noqa: SLF001
                return f"parameter {name!r} of module {self.module_title(number)}"
        return None

    def _find_slot_conflict(self, slot: _Slot) -> StepError | None:
        """Return an error if a microbatch read a value that an earlier one wrote again later.

        The error is not raised. None if there is no such read.

        Only slots with two or more microbatches, and no counters, can have a conflict.
        """
        if len(slot.versions) < 2:
            return None
        for run, version in slot.versions.items():
            if not version.has_read_earlier or not _is_outdated(slot, run, version):
                continue
            if slot.is_counter():
                continue
            writers = []
            for other, other_version in slot.versions.items():
                if other_version.writes and other.microbatch < run.microbatch:
                    writers.append(other.microbatch)
            return self._make_order_error(slot, max(writers), run.microbatch, "after")
        return None

    def _make_order_error(self, slot: _Slot, writer: int, reader: int, when: str) -> StepError:
        """Return an error: one microbatch wrote before or after another one read.

        Args:
            slot: The state.
            writer: Number of the microbatch that wrote.
            reader: Number of the microbatch that read.
            when: "before" or "after": the write, as seen from the read.
        """
        return StepError(
            f"{self._slot_title(slot)} was written by microbatch {writer} {when} microbatch"
            f" {reader} read it\n{_REMEDY}"
        )

    def _slot_title(self, slot: _Slot) -> str:
        """Return words for an attribute: ``attribute 'cache' of module 3 (Linear)``, say."""
        return f"attribute {slot.key[1]!r} of module {self.module_title(slot.key[0])}"

    # --- other ranks ------------------------------------------------------------------------------

    def find_known_stamps(self, microbatch: int) -> frozenset[Stamp]:
        """Return the stamps of the writes of a microbatch that this rank knows."""
        writes = self._writes_by_microbatch.get(microbatch, {})
        return frozenset(stamp for stamp, _ in writes.values())

    def pack(
        self,
        microbatch: int,
        peer: int,
        *,
        copy: bool = False,
        held: frozenset[Stamp] | None = None,
    ) -> tuple[StateHeader, list[Any]]:
        """Return the state that another rank needs of a microbatch and of earlier ones.

        The returned writes are remembered as known by the other rank.

        Before, each container that modules of several ranks hold is noted as written by the
        microbatch, so that its content goes along. Keys that this rank has learned to be read
        remotely are told to the other rank once.

        Args:
            microbatch: The microbatch.
            peer: The other rank.
            copy: Whether it is for the script's copy of the microbatch on that rank.
            held: Stamps of the writes that the rank has; None: the writes that were sent to it,
                without tensors that require a gradient.

        Returns:
            A header, and the values of its writes; `EMPTY_HEADER` and no values if the other rank
            needs none. A value that cannot be sent is UNSENT.

        Raises:
            StepError: A later microbatch has read a shared container before.
        """
        if not copy:
            self._record_shared_containers(MicrobatchRun(microbatch))
        remote_reads: tuple[Key, ...] = ()
        if self._reads_told_to_peer.get(peer, 0) < len(self._remotely_read_keys):
            self._reads_told_to_peer[peer] = len(self._remotely_read_keys)
            remote_reads = tuple(self._remotely_read_keys)
        late = max(len(self._late_microbatches), self._peer_late_count)
        if not self._writes_by_microbatch:
            if not remote_reads and not late:
                return EMPTY_HEADER, []
            return EMPTY_HEADER._replace(remote_reads=remote_reads, late=late), []

        known = self._known_by_peer.setdefault((peer, copy), set())
        writes: list[tuple[Key, Stamp, int]] = []
        values: list[Any] = []
        numbers = [microbatch]
        if not copy:
            numbers = sorted(n for n in self._writes_by_microbatch if n <= microbatch)
        for number in numbers:
            is_earlier = number < microbatch
            peer_has = known if held is None or is_earlier else held
            for key, (stamp, value) in self._writes_by_microbatch.get(number, {}).items():
                if self._is_kept_on_rank(key):
                    continue
                has = stamp in peer_has
                # A tensor that requires a gradient is sent again for each call, because the graph
                # of a call has only the tensors that came with the call.
                is_differentiable = _has_differentiable_tensor(value)
                if has and (is_earlier or held is not None or copy or not is_differentiable):
                    continue
                # Only the microbatch that made such a tensor can use it (_without_gradients).
                if is_earlier and is_differentiable:
                    continue
                # After the first steps, attributes are sent only if another rank has read them.
                is_unread = (
                    not self._sends_all_state
                    and len(key) == 2
                    and key not in self._remotely_read_keys
                    and not isinstance(value, _PLAIN_CLASSES)
                )
                if is_unread and has:
                    continue
                known.add(stamp)
                writes.append((key, stamp, number))
                sent = self._with_names(key, value)
                if is_unread or not _is_sendable(sent):
                    sent = UNSENT
                values.append(sent)
        is_unchanged = not writes and not remote_reads and not late
        if is_unchanged and held is None and microbatch not in self._writes_by_microbatch:
            return EMPTY_HEADER, []
        stamps = self.find_known_stamps(microbatch)
        return StateHeader(tuple(writes), stamps, remote_reads, late=late), values

    def _with_names(self, key: Key, value: Any) -> Any:
        """Return a value with a name in the place of each container that the other rank has, too.

        The value is copied for that, and not changed.

        Args:
            key: Where the value is.
            value: The value of an attribute, or the content of a container.
        """

        def name_of(item: Any) -> Any:
            """Return the name of a container; any other item unchanged."""
            if isinstance(item, _PLAIN_CLASSES):
                return item
            item_key = self._key_by_container_id.get(id(item))
            if item_key is None or item_key == key:
                return item
            return _ContainerName(item_key)

        return _map_value(name_of, key, value)

    def _with_own_containers(self, value: Any, key: Key) -> Any:
        """Return a value with this rank's own containers in the place of their names.

        The value is copied for that, and not changed.

        Args:
            value: A value that came from another rank.
            key: Where the value is.

        Raises:
            StepError: This rank has no such container.
        """

        def own_container(item: Any) -> Any:
            """Return this rank's container of a name; any other item unchanged."""
            if not isinstance(item, _ContainerName):
                return item
            container = self._find_holder(item.key)
            if container is None:
                raise StepError(
                    f"attribute {item.key[1]!r} of module {self.module_title(item.key[0])} is not"
                    f" the same on two ranks, and was written\n{_REMEDY}"
                )
            return containers.represented_object(container)

        return _map_value(own_container, key, value)

    def find_old_tensors(self, microbatch: int) -> set[int]:
        """Return the ``id()`` of the tensors that containers keep from before this step.

        Nothing is changed.

        Args:
            microbatch: The microbatch; only containers count that it has written.
        """
        old_tensors: set[int] = set()
        for key in self._writes_by_microbatch.get(microbatch, {}):
            slot = self._container_slots.get(id(self._containers_by_key.get(key)))
            if slot is not None:
                items = list(containers.items_of(slot.initial_value))
                old_tensors.update(map(id, tensors_in(items)))
        return old_tensors

    def _record_shared_containers(self, run: MicrobatchRun) -> None:
        """Note a write of each container that modules of several ranks hold, so that its content
        travels with the microbatch.

        A container with an item that only its own microbatch can use, such as a tensor that
        requires a gradient, is left out; so is one that is too large and never changed.

        Raises:
            StepError: A later microbatch has read the content before.
        """
        if not self._shared_keys:
            return
        for slot in self._container_slots.values():
            if slot.key not in self._shared_keys or run in slot.versions:
                continue
            has_ever_changed = slot.has_changed or slot.key in self._tracked_keys
            if not has_ever_changed and _is_too_large(slot.key, slot.holder):
                continue  # a large table, equal on all ranks
            if all(map(_is_useful_later, containers.items_of(slot.installed_content))):
                self._record_write(slot, run, slot.installed_content)
                slot.versions[run].sent_value = slot.installed_content

    def unpack(
        self, run: MicrobatchRun, header: StateHeader, values: Sequence[Any], peer: int
    ) -> None:
        """Take over the writes of another rank: write them to this rank's modules, and note them.

        The writes are remembered as known by the other rank. Values of attributes are set, and
        containers get the content that came. Keys that other ranks read, and late writes of other
        ranks, are noted for the next step. A value of another kind than this rank's object is
        dropped, with a warning in the log, once for each place.

        Args:
            run: The microbatch that came.
            header: Describes the writes.
            values: The values of the writes.
            peer: The other rank.

        Raises:
            StepError: A value cannot be sent; another microbatch may have read it before; a
                container is not on this rank; or two microbatches wrote different values for one
                key.
        """
        self._remotely_read_keys.update(header.remote_reads)
        if header.late:
            # Only the rank of the late write has words for a warning.
            self._late_writes.setdefault(self._function, "")
            self._peer_late_count = max(self._peer_late_count, header.late)
        known = self._known_by_peer.setdefault((peer, run.is_copy), set())
        for (key, stamp, number), sent_value in zip(header.writes, values, strict=True):
            known.add(stamp)
            writer = MicrobatchRun(number, run.is_copy)
            value = self._with_own_containers(sent_value, key)
            own_write = self._writes_by_microbatch.get(number, {}).get(key)
            has_write = own_write is not None and own_write[0] == stamp
            if own_write is not None and has_write and not _has_differentiable_tensor(value):
                if not writer.is_copy:
                    continue
                value = own_write[1]  # this rank has the same objects already
            holder = self._find_holder(key)
            if holder is None:
                continue
            if len(key) == 2:
                self._unpack_attribute(writer, key, value, stamp)
                continue
            is_list = isinstance(holder, (list, collections.deque))
            if value is not UNSENT and is_list != isinstance(value, list):
                self._warn_of_kind(key)
                continue
            if isinstance(holder, containers.Namespace) and value is not UNSENT:
                settled = holder.with_own_objects(value)
                value = UNSENT if settled is None else settled
            if value is UNSENT:
                raise StepError(
                    f"attribute {key[1]!r} of module {self.module_title(key[0])} cannot be"
                    f" sent\n{_REMEDY}"
                )
            slot = self._container_slots.get(id(holder))
            if slot is None:
                slot = _Slot(key, holder, containers.read_content(holder))
                self._container_slots[id(holder)] = slot
            before = slot.find_visible(writer)[1]
            value = _with_old_objects(before, value)
            if _is_comparably_other(before, value):
                slot.has_changed = True
                if number == run.microbatch and not run.is_copy:
                    self._check_container_change(slot, writer, before, value, backward=False)
            containers.assign(holder, value)
            slot.installed_content = value
            self._record_write(slot, writer, value, stamp)

    def _unpack_attribute(self, run: MicrobatchRun, key: Key, value: Any, stamp: Stamp) -> None:
        """Take over the value of an attribute that another rank wrote.

        The module gets the value, unless it is UNSENT. The write is noted in both cases: a read of
        a value that was not sent is an error.

        Args:
            run: The microbatch that wrote.
            key: Where the attribute is.
            value: The value, or a mark.
            stamp: Names the write.

        Raises:
            StepError: A later microbatch has read the value before.
        """
        module, name = self._modules[key[0]], key[1]
        slot = self.find_slot(module, name)
        if slot is None:
            return
        if value is not UNSENT:
            _store(module, name, value)
            self.set_known_value(module, name)
        self._record_write(slot, run, value, stamp)
        slot.versions[run].is_fetched = False
        self._follow_containers(key, value)

    def _warn_of_kind(self, key: Key) -> None:
        """Warn once that ranks hold objects of different kinds in the same place.

        save_pretrained of transformers, for example, writes to the objects of one rank.

        Args:
            key: Where the object is. The place is remembered, and not warned of again.
        """
        if key not in self._warned_keys:
            self._warned_keys.add(key)
            title = f"attribute {key[1]!r} of module {self.module_title(key[0])}"
            _log.warning(
                "%s: something in it is of another kind on another rank; changes of it stay there",
                title,
            )

    def writes_so_far(self, microbatch: int) -> dict[Key, tuple[Stamp, Any]]:
        """Return a copy of the writes of a microbatch so far: key -> (stamp, value)."""
        return dict(self._writes_by_microbatch.get(microbatch, ()))

    def restore_own_objects(
        self, run: MicrobatchRun, before: Mapping[Key, tuple[Stamp, Any]]
    ) -> None:
        """Put this rank's objects back after a remote call that did not write to them.

        A call back to this rank may have brought copies. A write with the same stamp as before is
        such a copy: attributes and containers get the object from before the call again.

        The writes and the slots get the former objects, too.

        Args:
            run: The microbatch.
            before: The writes before the remote call, as `writes_so_far` returned them.
        """
        writes = self._writes_by_microbatch.get(run.microbatch, {})
        for key, (stamp, value) in before.items():
            if writes[key][0] != stamp or writes[key][1] is value:
                continue
            writes[key] = stamp, value
            holder = self._find_holder(key)
            is_attribute = len(key) == 2
            if is_attribute:
                slot = _attribute_slots.get((id(holder), key[1]))
            else:
                slot = self._container_slots.get(id(holder))
            if slot is None:
                continue
            version = slot.versions[run]
            version.value = version.visible_value = slot.installed_content = value
            if is_attribute:
                _store(holder, key[1], value)
                self.set_known_value(holder, key[1])
            else:
                containers.assign(holder, value)

    def find_unread_tensors(
        self, run: MicrobatchRun, header: StateHeader, values: Sequence[Any], used: Any
    ) -> set[int]:
        """Return the ``id()`` of the tensors that came from another rank and were not read since.

        Only attributes that the microbatch itself wrote can be found: reads of a container are not
        observed, so its tensors count as read.

        Args:
            run: The microbatch.
            header: Describes the state that came.
            values: The values of this state.
            used: Tensors that came in another way, and may be the same ones.
        """
        unread: set[int] = set()
        others = [used]
        for (key, _, number), value in zip(header.writes, values, strict=True):
            if isinstance(value, _PLAIN_CLASSES):
                continue
            version = None
            # Reads of a container are not observed: its tensors count as read.
            if len(key) == 2 and number == run.microbatch:
                slot = _attribute_slots.get((id(self._modules[key[0]]), key[1]))
                version = None if slot is None else slot.versions.get(run)
            if version is not None and not version.is_fetched:
                unread.update(map(id, tensors_in(value)))
            else:
                others.append(value)
        if unread:
            unread -= set(map(id, tensors_in(others)))
        return unread

    def find_lent_items(self, result: Any) -> tuple[int, ...]:
        """Return which tensors and containers of a result a module keeps, so that a write of the
        caller would have to change the module.

        An item is numbered by its position in `_find_tensors_and_containers` of the result.

        They are buffers of this rank, and containers that a module held at the begin of the step or
        got in it. The caller on another rank gets copies: it must not write to these
        (`watch_lent_items`). Nothing is changed.

        Args:
            result: What the module returned.

        Returns:
            Their positions, from 0, in `_find_tensors_and_containers` of the result. A result that
            is a single tensor has position 0. An empty tuple if no module keeps a part.
        """
        if isinstance(result, torch.Tensor):
            return (0,) if id(result) in self._buffer_ids else ()
        numbers = []
        for number, item in enumerate(_find_tensors_and_containers(result)):
            if id(item) in self._container_slots or id(item) in self._buffer_ids:
                numbers.append(number)
        return tuple(numbers)

    def watch_lent_items(self, result: Any, numbers: Sequence[int], title: str) -> None:
        """Record the parts of a result that its module keeps: `leave` refuses writes of the caller
        to them.

        A copy of the content or version of each part is kept until the step ends.

        Args:
            result: The result of a remote call.
            numbers: Numbers of the parts, as `find_lent_items` returned them on the module's rank.
            title: Words for the module.
        """
        if not numbers:
            return
        items = _find_tensors_and_containers(result)
        for number in numbers:
            self._lent_items.append((title, items[number], containers.snapshot(items[number])))

    def record_remote_reads(
        self, run: MicrobatchRun, header: StateHeader, values: Sequence[Any], unread: set[int]
    ) -> None:
        """Note which of the values that were sent to another rank were read there.

        A read value is marked as fetched in the version of the microbatch: then it may be sent in
        later steps.

        Args:
            run: The microbatch.
            header: Describes the values.
            values: The values.
            unread: ``id()`` of the tensors that were not read.
        """
        for (key, _, _), value in zip(header.writes, values, strict=True):
            if len(key) > 2 or isinstance(value, _PLAIN_CLASSES):
                continue
            slot = _attribute_slots.get((id(self._modules[key[0]]), key[1]))
            if slot is None or run not in slot.versions:
                continue
            for tensor in tensors_in(value):
                if id(tensor) not in unread:
                    slot.versions[run].is_fetched = True

    def _is_kept_on_rank(self, key: Key) -> bool:
        """Return whether a write stays on this rank.

        So do writes to buffers, and to containers that were made in this step: the latter travel
        within the attribute that holds them.

        Args:
            key: Where the state is.
        """
        if len(key) > 2:
            return bool(key[2] == _MADE_IN_STEP)
        return key[1] in self._modules[key[0]].__dict__["_buffers"]

    def _find_holder(self, key: Key) -> Any:
        """Return the module of an attribute, or the container of a key with three or more items.

        None if this rank has no container in this place.

        A leaf is returned within `containers.LeafValues`, which can be assigned to as a container
        can.

        Args:
            key: Where the state is.
        """
        module = self._modules[key[0]]
        if len(key) == 2:
            return module
        if key in self._containers_by_key:
            return self._containers_by_key[key]
        # Not there when the step began: look for it among the objects of the module now.
        home = package(type(module))
        for name, value in _find_roots(module, self._global_state):
            if name != key[1]:
                continue
            if key[-1] == _LEAF:
                leaf = _item_at(containers.find_leaves(value, home), key[2])
                return None if leaf is None else containers.LeafValues.of(leaf)
            return _item_at(containers.find_containers(value, home), key[2])
        return None

    def _find_leaves(self) -> Iterator[_Leaf]:
        """Yield the objects of modules that are no containers and can be written in place.

        Objects of modules of other ranks are followed, too, because a write would stay on this
        rank. Each object comes once, with its present state. A warning is logged for an array that
        is too large.

        Yields:
            Leaves with their present state, after all modules were searched.
        """
        leaves: dict[int, _Leaf] = {}
        weights: set[int] = set()
        for module in self._modules:
            weights.update(map(id, module._parameters.values()))  # noqa: SLF001
        for number, module in enumerate(self._modules):
            is_mine = self._owner_ranks[number] == self.rank
            own = module.__dict__
            home = package(type(module))
            named = list(_find_roots(module, self._global_state))
            if is_mine and self._runs_in_turn:
                named += [*own["_parameters"].items(), *own["_buffers"].items()]
            for name, value in named:
                for place, item in enumerate(containers.find_leaves(value, home)):
                    # A parameter of another model, such as a teacher, counts, too.
                    is_foreign_weight = isinstance(item, nn.Parameter) and id(item) not in weights
                    is_cheap = _is_cheap_to_compare(item) or is_foreign_weight
                    # With overlapping microbatches the objects are compared far more often.
                    if not self._runs_in_turn and not is_cheap:
                        continue
                    if not is_mine and not _is_shared(item):
                        continue
                    leaf = leaves.setdefault(id(item), _Leaf((number, name, place, _LEAF), item))
                    leaf.is_on_other_rank |= not is_mine
                    is_in_module = name in own or name in own["_buffers"]
                    leaf.is_attribute |= item is value and is_in_module
        # torch counts no write to a tensor's `data`, or to a numpy array in its memory.
        has_uncounted_writes = any(map(self._global_state.names_attribute, ("data", "numpy")))
        for leaf in leaves.values():
            self._warn_of_size(leaf)
            is_uncounted = has_uncounted_writes and leaf.can_be_sent()
            leaf.compares_values = self._runs_in_turn or is_uncounted
            leaf.state = leaf.read_state()
            yield leaf

    def _warn_of_size(self, leaf: _Leaf) -> None:
        """Warn once of an array that is too large for its values to be compared.

        The warning goes to the log. The place is remembered, and not warned of again.
        """
        place = leaf.key[:2]
        if not containers.is_buffer(leaf.value) or place in self._warned_arrays:
            return
        octets = containers.size_in_bytes(leaf.value)
        if octets <= containers.MOST_COMPARED_BYTES or containers.is_constant(leaf.value):
            return
        self._warned_arrays.add(place)
        # Sizes in bytes, shifted by 20 bits: MiB.
        _log.warning(
            "%s has an array of %d MiB: above %d MiB what a step writes into it is not seen. It"
            " would stay on its rank, and microbatches would not wait for it. Make it a torch"
            " tensor, or read-only (array.flags.writeable = False).",
            self._leaf_title(leaf),
            octets >> 20,
            containers.MOST_COMPARED_BYTES >> 20,
        )

    def _find_containers(self) -> Iterator[tuple[Key, Any]]:
        """Yield the containers that modules hold, each once, with the key of its first place.

        The keys of containers that modules of several ranks hold are added to the shared keys.

        Yields:
            (key, container). The key is (number of a module, name of the attribute, number of the
            container in it).
        """
        first_holders: dict[int, tuple[int, Key]] = {}  # by id(): owner and key
        for number, module in enumerate(self._modules):
            home = package(type(module))
            for name, value in _find_roots(module, self._global_state):
                for place, container in enumerate(containers.find_containers(value, home)):
                    holder = (self._owner_ranks[number], (number, name, place))
                    owner, key = first_holders.setdefault(id(container), holder)
                    # All ranks have the same settings and thread-local values at first.
                    is_alike = isinstance(
                        container, containers.ObjectAttributes | containers.ThreadLocalValues
                    )
                    if owner != self._owner_ranks[number] and not is_alike:
                        self._shared_keys.add(key)
                    elif key == (number, name, place):
                        yield key, container


def _is_too_large(key: Key, container: Any) -> bool:
    """Return whether a container is too large, or too deep, to be compared whenever a microbatch
    ends or waits.

    Args:
        key: Where the container is; the third item is its number in the attribute.
        container: The container.
    """
    is_collection = isinstance(container, list | dict | set | collections.deque)
    is_large = is_collection and len(container) > containers.MOST_COMPARED_ITEMS
    return key[2] >= _MOST_CONTAINERS or is_large


def _is_cheap_to_compare(leaf: Any) -> bool:
    """Return whether it costs little to find a write in place to an object."""
    if isinstance(leaf, nn.Parameter):
        return False
    kinds = (torch.Tensor, bytearray, array.array, itertools.count, types.GeneratorType)
    return isinstance(leaf, kinds) or containers.is_array(leaf)


def _is_shared(leaf: Any) -> bool:
    """Return whether a write to an object matters to modules of other ranks.

    A generator of random numbers does not: each rank has its own.
    """
    return _is_cheap_to_compare(leaf) or isinstance(leaf, nn.Parameter)


@dataclass
class _Leaf:
    """An object that is no container and can be written in place: a tensor, an array, a generator.

    Attributes:
        key: (number of a module that holds the object, name of the attribute, number of the object
            in the attribute, `_LEAF`).
        value: The object.
        is_on_other_rank: Whether a module of another rank holds the object.
        is_attribute: Whether the object is an attribute of a module, so that reads are observed.
        compares_values: Whether the values of a tensor are compared, and not only its version.
        last_writer: The microbatch that wrote last; None before the first write of the step.
        last_visit: The context of that write, and the number of remote calls that the microbatch
            had made.
        state: The state of the object when it was compared last.
    """

    key: Key
    value: Any
    is_on_other_rank: bool = False
    is_attribute: bool = False
    compares_values: bool = False
    last_writer: MicrobatchRun | None = None
    last_visit: tuple[Key, int] | None = None
    state: Any = None

    def can_be_sent(self) -> bool:
        """Return whether the values go to other ranks when microbatches run one after another.

        A tensor that only its owner has in an attribute travels as this attribute. A buffer stays
        on its rank. A tensor that requires a gradient cannot travel.

        Nothing is changed.
        """
        if isinstance(self.value, nn.Parameter | itertools.count | types.GeneratorType):
            return False
        if not _is_cheap_to_compare(self.value):
            return False
        is_tensor = isinstance(self.value, torch.Tensor)
        if is_tensor and (self.value.requires_grad or self.value.is_inference()):
            return False
        return self.is_on_other_rank or not self.is_attribute

    def read_state(self) -> Any:
        """Return the present state of the object, for a comparison by identity with `state`.

        If the object was not written since the last comparison, this is the same state object.
        Otherwise it is the new version of a tensor, or what `containers.read_state` returns.

        Nothing is stored: the caller sets `state`. Of a tensor that is too large to be compared,
        above 256 KiB for a parameter, only torch's count of writes tells, and of such an array
        nothing.
        """
        if isinstance(self.value, torch.Tensor) and not self.compares_values:
            version = None if self.value.is_inference() else self.value._version  # noqa: SLF001
            # Equal numbers may be two objects: the caller compares by identity.
            return self.state if version == self.state else version
        # A copy of each frozen weight would cost too much memory.
        is_parameter = isinstance(self.value, nn.Parameter)
        limit = _LARGEST_PARAMETER if is_parameter else containers.MOST_COMPARED_BYTES
        return containers.read_state(self.value, self.state, limit)


def _item_at(items: Iterator[Any], index: int) -> Any:
    """Return the item of an iterator at an index from 0, or None if the iterator ends before."""
    return next(itertools.islice(items, index, None), None)


def _map_value(function: Callable[[Any], Any], key: Key, value: Any) -> Any:
    """Return the value of an attribute, or the content of a container, with a function applied.

    The value itself is not changed.

    Args:
        function: Gets the value of an attribute, a mark, or each item of a content, and returns
            what takes its place.
        key: Where the value is: two items for an attribute, more for a container.
        value: The value, or the content: a list or a dictionary.
    """
    if len(key) == 2 or isinstance(value, _Mark):
        return function(value)
    if isinstance(value, list):
        return [function(item) for item in value]
    return {name: function(item) for name, item in value.items()}


def _is_outdated(slot: _Slot, run: MicrobatchRun, version: _Version) -> bool:
    """Return whether an earlier microbatch has written, since a microbatch read, a value that
    differs.

    For a tensor that is written in place any later write counts. A container counts if an object in
    the content of the microbatch is new in the one that it had read.

    Args:
        slot: The state.
        run: The microbatch that read.
        version: The version of this microbatch.
    """
    if slot.is_written_in_place:
        # The value is the same tensor before and after: only the times of the writes tell.
        for other, other_version in slot.versions.items():
            is_earlier = other.microbatch < run.microbatch and other.is_copy == run.is_copy
            if is_earlier and other_version.writes and other_version.time > version.read_time:
                return True
        return False
    value = slot.find_visible(run, own=False)[1]
    if len(slot.key) == 2:
        return not _are_equal(value, version.earlier_value)
    if version.sent_value is not MISSING:
        # The microbatch sent a shared container along, and has not written to it.
        return _replaces_plain_value(version.sent_value, value)
    if containers.has_same_items(value, version.earlier_value):
        return False
    return _is_made_from(version.value, version.earlier_value, slot.initial_value)


def _attributes_of(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module and its buffers, by name.

    Attributes of torch, of this library and of Hugging Face's hooks are left out.
    """
    own = module.__dict__
    return {
        name: value
        for name, value in (*own.items(), *own["_buffers"].items())
        if name not in _NOT_FOLLOWED and not name.startswith("_smp")
    }


def _find_roots(module: nn.Module, global_state: GlobalState) -> Iterator[tuple[str, Any]]:
    """Yield the objects that a search for containers begins with: (name, object).

    They are the attributes of the module, global state that its code names, and state of its hooks.

    Nothing is changed. Plain values are left out, because they cannot be written in place.

    Args:
        module: The module.
        global_state: Has the global state of all modules of the model.
    """
    # Copies of the items, because the caller may add attributes or hooks meanwhile.
    for name, value in list(module.__dict__.items()):
        if (
            type(value) in containers.EXACT_PLAIN_CLASSES
            or name in _NOT_FOLLOWED
            or name.startswith("_smp")
        ):
            continue
        yield name, value
    yield from global_state.iterate_state(module)
    for kind in HOOKS:
        for number, hook in enumerate(list(module.__dict__[kind].values())):
            holder = getattr(hook, "__self__", None)
            if isinstance(holder, nn.Module):
                # Of a module only its own attributes: its submodules are followed by themselves.
                attributes = holder.__dict__.items()
                holder = tuple(value for name, value in attributes if name not in _NOT_FOLLOWED)
            objects = [getattr(hook, "args", ()), getattr(hook, "keywords", None), holder]
            objects += containers.read_closure(hook)
            yield f"{kind}[{number}]", tuple(objects)


def _find_tensors_and_containers(value: Any) -> list[Any]:
    """Return the tensors, and after these the containers, in a value.

    The order is the same on the rank that sends the value and on the one that receives it.
    """
    return [*tensors_in(value), *containers.find_containers(value)]


def _stored_value(module: nn.Module, name: str) -> Any:
    """Return the value of an attribute or buffer as the module has it, without a note of the read.

    MISSING if there is none.
    """
    own = module.__dict__
    if name in own:
        return own[name]
    return own["_buffers"].get(name, MISSING)


def _store(module: nn.Module, name: str, value: Any) -> None:
    """Set an attribute or buffer, without a note of the write.

    torch's checks of names and values are left out.

    Args:
        module: The module.
        name: Name of the attribute or buffer.
        value: The value. MISSING removes an attribute; UNSENT leaves it as it is.
    """
    own = module.__dict__
    if name in own["_buffers"]:
        own["_buffers"][name] = value
    elif value is MISSING:
        own.pop(name, None)
    elif value is not UNSENT:
        own[name] = value


def _are_equal(one: Any, other: Any) -> bool:
    """Return whether two values are equal, as far as this can be told.

    False for different objects with a meaning of equality of their own, and for tensors that
    require a gradient.

    A comparison of tensors on a GPU waits for the GPU.
    """
    if one is other:
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return (
            one.shape == other.shape
            and one.dtype == other.dtype
            and not one.requires_grad
            and torch.equal(one, other)
        )
    if isinstance(one, tuple) and type(one) is type(other) and len(one) == len(other):
        return all(map(_are_equal, one, other))
    # Of equal classes: ``True == 1`` is no equal value.
    return type(one) is type(other) and isinstance(one, _PLAIN_CLASSES) and one == other


def _with_old_objects(before: Any, now: Any) -> Any:
    """Return a content that came from another rank, with this rank's objects in the place of equal
    ones.

    The caller compares contents by the identity of their items.

    Neither content is changed. A content of another kind than the present one is returned itself.

    Args:
        before: The content of the container on this rank.
        now: The content that came.
    """
    if isinstance(before, list) and isinstance(now, list):
        items = list(now)
        for index, old_item in enumerate(before[: len(now)]):
            if _are_equal(old_item, items[index]):
                items[index] = old_item
        return items
    if isinstance(before, dict) and isinstance(now, dict):
        content = dict(now)
        for key, item in now.items():
            if key in before and _are_equal(before[key], item):
                content[key] = before[key]
        return content
    return now


def _is_comparable(value: Any) -> bool:
    """Return whether ``_are_equal`` can tell that two such values differ."""
    if isinstance(value, tuple):
        return all(map(_is_comparable, value))
    if isinstance(value, torch.Tensor):
        return not value.requires_grad
    return isinstance(value, _PLAIN_CLASSES)


def _is_in_backward() -> bool:
    """Return whether autograd runs a backward pass on this thread."""
    return bool(torch._C._current_graph_task_id() != -1)  # noqa: SLF001


def _is_useful_later(item: Any) -> bool:
    """Return whether another microbatch or step can use an item of a container.

    A tensor that requires a gradient belongs to the graph of one microbatch.
    """
    if isinstance(item, torch.Tensor):
        return not item.requires_grad
    return isinstance(item, _PLAIN_CLASSES)


def _without_gradients(value: Any, initial_content: Any) -> Any:
    """Return a content without the new tensors that require a gradient.

    Only the microbatch that made such a tensor can use it, in its own backward pass. In a
    dictionary an item from before the step takes the place of such a tensor.

    Args:
        value: The content: a list or a dictionary. It is returned itself if nothing is left out.
        initial_content: The content at the beginning of the step; its items stay.
    """
    old = {id(item) for item in containers.items_of(initial_content)}

    def stays(item: Any) -> bool:
        return not isinstance(item, torch.Tensor) or not item.requires_grad or id(item) in old

    if all(map(stays, containers.items_of(value))):
        return value
    if isinstance(value, list):
        return [item for item in value if stays(item)]
    content = {}
    for key, item in value.items():
        if stays(item):
            content[key] = item
        elif key in initial_content:
            content[key] = initial_content[key]
    return content


def _comparable_items(content: Any) -> list[Any]:
    """Return the items of a content that another microbatch could read, in a form in which two
    contents can be compared.

    The content is not changed.

    Returns:
        For each item (key, class, value); objects have their ``id()`` as value. Tensors that
        require a gradient, and values with such a tensor, are left out.
    """
    pairs = enumerate(content) if isinstance(content, list) else content.items()
    items = []
    for key, item in pairs:
        if not _has_differentiable_tensor(item):
            value = item if isinstance(item, _PLAIN_CLASSES) else id(item)
            items.append((key, type(item), value))
    return items


def _is_comparably_other(before: Any, now: Any) -> bool:
    """Return whether two contents differ in an item that another microbatch could read."""
    return _comparable_items(before) != _comparable_items(now)


def _only_adds_keys(before: Any, now: Any) -> bool:
    """Return whether a content is a dictionary that only got new keys, without numbers as values.

    A memo of computed values is such a dictionary. A new number may be the start of a count, which
    depends on the order of the microbatches.

    True also for an unchanged dictionary.

    Args:
        before: The content before the write.
        now: The content after the write.
    """
    if not isinstance(now, dict) or not before.keys() <= now.keys():
        return False
    for key, item in now.items():
        if key not in before:
            if type(item) in _NUMBER_CLASSES:
                return False
        elif item is not before[key]:
            return False
    return True


def _replaces_plain_value(before: Any, now: Any) -> bool:
    """Return whether a plain value in a container was replaced by another one.

    True, too, if the two contents are of different kinds. Items that were added or removed do not
    count.

    Args:
        before: The content before.
        now: The content after.
    """
    if isinstance(before, list) and isinstance(now, list):
        pairs = list(zip(before, now, strict=False))
    elif isinstance(before, dict) and isinstance(now, dict):
        pairs = [(item, now[key]) for key, item in before.items() if key in now]
    else:
        return True
    for old_item, item in pairs:
        if isinstance(old_item, _PLAIN_CLASSES) and not _are_equal(old_item, item):
            return True
    return False


def _is_counted_up(before: Any, now: Any) -> bool:
    """Return whether an integer was counted up, or has stayed the same.

    Only integers: a sum of other numbers cannot be distinguished from an average.
    """
    return type(before) is type(now) is int and now >= before


def _is_made_from(value: Any, before: Any, initial_content: Any) -> bool:
    """Return whether a content was made from another one.

    Then it has an object that was new in the other one. Plain values do not count, because equal
    ones may be the same object.

    A content without such an object may still depend on the other one: plain values do not tell.

    Args:
        value: The content.
        before: The content that it may have been made from.
        initial_content: The content at the beginning of the step; its objects are not new.
    """
    old = {id(item) for item in containers.items_of(initial_content)}
    new = set()
    for item in containers.items_of(before):
        if id(item) not in old and not isinstance(item, _PLAIN_CLASSES):
            new.add(id(item))
    return any(id(item) in new for item in containers.items_of(value))


def _sum_of_writes(initial_content: Any, writers: Sequence[tuple[Any, Any]]) -> Any:
    """Return the content of a container after several microbatches wrote to it.

    Numbers and appended items of all microbatches add up. Otherwise the last one counts.

    Args:
        initial_content: The content before the step: a list or a dictionary.
        writers: For each microbatch, in order, (its last content, the content that it had read).
            At least one.

    Returns:
        A new list or dictionary; the last content itself, if a list was not only appended to.
    """
    last = writers[-1][0]
    if isinstance(last, list):
        items = list(initial_content)
        for content, seen in writers:
            has_only_appended = containers.has_same_items(content[: len(seen)], seen)
            if not has_only_appended:
                return last
            items += content[len(seen) :]
        return items

    total = dict(last)
    for key, item in last.items():
        if type(item) not in _NUMBER_CLASSES:
            continue
        initial_number = initial_content.get(key, 0)
        numbers = [initial_number]
        for content, seen in writers:
            numbers += [content.get(key, 0), seen.get(key, 0)]
        if not all(type(number) in _NUMBER_CLASSES for number in numbers):
            continue
        differences = [initial_number]
        for content, seen in writers:
            differences.append(content.get(key, 0) - seen.get(key, 0))
        total[key] = sum(differences)
    return total


def _has_new_object(slot: _Slot, value: Any) -> bool:
    """Return whether a Python module's variable, or an attribute of a class, got an object in this
    step.

    Other ranks do not have this object, and it cannot be sent.

    Args:
        slot: The variables of a Python module or the attributes of a class; False for other slots.
        value: The new content: name -> value.
    """
    if not isinstance(slot.holder, containers.Namespace) or not isinstance(value, dict):
        return False
    old = set(map(id, slot.initial_value.values()))
    held_objects = [item for item in value.values() if isinstance(item, containers.ObjectReference)]
    return any(id(held_object) not in old for held_object in held_objects)


def _has_differentiable_tensor(value: Any) -> bool:
    """Return whether a value contains a tensor that requires a gradient."""
    if isinstance(value, _PLAIN_CLASSES):
        return False
    return any(tensor.requires_grad for tensor in tensors_in(value))


def _is_sendable(value: Any) -> bool:
    """Return whether a value can be sent to another rank: plain, a mark, a tensor, or one that
    pickle takes.

    Other values are pickled for that, which calls their ``__reduce_ex__``.
    """
    if isinstance(value, (*_PLAIN_CLASSES, _Mark)):
        return True
    if type(value) in (torch.Tensor, nn.Parameter):
        return True
    # `flatten` returns an exception in the place of data that cannot be pickled.
    return not isinstance(flatten(value)[0].data, Exception)
