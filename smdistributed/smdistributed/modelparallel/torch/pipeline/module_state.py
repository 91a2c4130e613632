"""The state that modules keep on themselves: each microbatch sees the values of a single process.

Microbatches interleave on a rank, and a microbatch goes from rank to rank. So a value that is
written to an attribute of a module, or into a container of a module, belongs to the microbatch that
wrote it. The value goes along when the microbatch goes to another rank. A microbatch that has not
written sees the value of the microbatch before, as if they had run in turn. If this value is
written again after a later microbatch has read it, the step ends with an error.

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

__all__ = ["EMPTY_HEADER", "ModuleState", "StateHeader", "Turn"]

_FIRST_STEPS = 3
"""The first steps of each step function, in which all state travels that modules write.

Later steps send only the state that was read on another rank in these steps.
"""

_PRIVATE = frozenset(nn.Module().__dict__) - {"training"} | {
    "forward",
    "_orig_forward",
    "_call_impl",
    "_apply",
    "_output_capturing_hooks_installed",
}
"""Attributes of torch, of this library, and of Hugging Face's hooks (variables.py)."""

_NUMBERS = (int, float, complex)
_WEAK = (weakref.WeakKeyDictionary, WeakIdKeyDictionary)
_PLAIN = containers.PLAIN

Key = tuple[Any, ...]
"""Where state is: (number of a module, name of an attribute), and for a container a third item, the
number of the container in the attribute. For example ``(3, "cache", 0)``.
"""


class Turn(NamedTuple):
    """A microbatch on this rank.

    Attributes:
        microbatch: Number of the microbatch.
        is_copy: Whether it is the script's copy of the microbatch on another rank than the root's.
    """

    microbatch: int
    is_copy: bool = False


class _Mark:
    """A mark in the place of a value."""

    def __init__(self, words: str) -> None:
        self.words = words

    def __reduce__(self) -> str:
        return "MISSING" if self is MISSING else "UNSENT"


MISSING, UNSENT = _Mark("missing"), _Mark("unsent")


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


_AFTER = Turn(1 << 60)
"""Stands for a microbatch after all others."""


class _Version:
    """The writes and reads of one microbatch to one piece of state.

    Attributes:
        value: The value of its last write.
        shown: The value that other microbatches see: of the last write outside a forward that ran
            again in the backward pass.
        time: Time of the last write, counted in writes and first reads of this rank.
        reads: Number of its reads.
        own: Number of its writes on this rank.
        writes: Number of its writes on any rank.
        saw_earlier: Whether it read the value of an earlier microbatch.
        seen: The value that it read then.
        read_time: Time of this read.
        fetched: Whether a value that came from another rank was read.
        writer: The writer of the value: the key of a context, or the stamp of another rank.
        sent: For shared state that the microbatch had not written: the value that went along.
    """

    __slots__ = (
        "fetched",
        "own",
        "read_time",
        "reads",
        "saw_earlier",
        "seen",
        "sent",
        "shown",
        "time",
        "value",
        "writer",
        "writes",
    )

    def __init__(self) -> None:
        self.value: Any = MISSING
        self.shown: Any = MISSING
        self.seen: Any = MISSING
        self.sent: Any = MISSING
        self.saw_earlier = self.fetched = False
        self.writer: Any = None
        self.read_time = self.time = self.reads = self.own = self.writes = 0


class _ContainerName(NamedTuple):
    """Stands for a container in a value that is sent: the receiver takes its own container.

    Attributes:
        key: Where the container was when the step began.
    """

    key: Key


class _Slot:
    """One attribute or container, with the writes and reads of this step.

    Attributes:
        key: Where the state is.
        where: The module of an attribute, or the container.
        base: The value at the beginning of the step.
        in_place: Whether a tensor in the attribute was written in place.
        late: Whether a microbatch wrote after it had left the rank once.
        changed: Whether a container had another content for some time.
        missed: New key of a dictionary -> microbatch that wrote it -> later microbatches that had
            run without the key.
        turns: The versions of the microbatches.
        installed: The content that a container has now.
    """

    __slots__ = (
        "base",
        "changed",
        "in_place",
        "installed",
        "key",
        "late",
        "missed",
        "turns",
        "where",
    )

    def __init__(self, key: Key, where: Any, base: Any) -> None:
        self.key, self.where, self.base = key, where, base
        self.in_place = self.late = self.changed = False
        self.missed: dict[Any, dict[Turn, set[Turn]]] = {}
        self.turns: dict[Turn, _Version] = {}
        self.installed = base

    def counts(self) -> bool:
        """Return whether it is a number that microbatches only add to, and do not use.

        Such a number may be added to in any order.
        """
        is_used = False
        for version in self.turns.values():
            if not version.reads and not version.own:
                continue
            is_used = True
            if version.reads != version.own or not _is_counted_up(version.seen, version.value):
                return False
        return is_used

    def last(self) -> Any:
        """Return the value after the step."""
        if len(self.key) > 2:
            return self._last_content()
        if self.counts():
            total = self.base
            for version in self.turns.values():
                if version.own:
                    total = total + (version.value - version.seen)
            return total
        value = self.find(_AFTER)[1]
        if type(value) in _NUMBERS:
            # A forward that ran again in the backward pass counts again, as in one process.
            repeated = 0
            for turn, version in self.turns.items():
                if not version.own or turn.is_copy:
                    continue
                if type(version.value) in _NUMBERS and type(version.shown) in _NUMBERS:
                    repeated += version.value - version.shown
            value += repeated
        return value

    def _last_content(self) -> Any:
        """Return the content of a container after the step."""
        newest: dict[int, _Version] = {}  # of each microbatch: its own version, or its copy's
        for turn, version in sorted(self.turns.items(), key=lambda item: item[0]):
            if not version.writes or version.value is MISSING:
                continue
            other = newest.setdefault(turn.microbatch, version)
            if version.time > other.time:
                newest[turn.microbatch] = version
        if not newest:
            return self.base
        writers = []
        for microbatch, version in newest.items():
            own_version = self.turns.get(Turn(microbatch), version)
            writers.append((version.value, own_version.seen))
        return _sum_of_writes(self.base, writers)

    def find(self, turn: Turn, *, own: bool = True) -> tuple[Turn | None, Any]:
        """Return the value that a microbatch sees.

        Args:
            turn: The microbatch.
            own: Whether its own writes count.

        Returns:
            The microbatch that wrote the value, or None for the value from before the step; the
            value.
        """
        version = self.turns.get(turn) if own else None
        if version is not None and version.writes:
            return turn, version.value
        # The last write of the nearest microbatch before; of its copy only if nothing else is.
        best: tuple[int, bool, int, Turn] | None = None
        for other, version in self.turns.items():
            if version.writes and other.microbatch < turn.microbatch:
                is_alike = turn == _AFTER or other.is_copy == turn.is_copy
                candidate = (other.microbatch, is_alike, version.time, other)
                if best is None or candidate > best:
                    best = candidate
        if best is None:
            return None, self.base
        writer = best[3]
        value = self.turns[writer].shown
        if len(self.key) > 2 and turn != _AFTER:
            value = _without_gradients(value, self.base)
        return writer, value


class _Attribute(containers.StandIn):
    """A descriptor in a class, for an attribute that an object of the class writes in a step."""

    def __init__(self, name: str, default: Any) -> None:
        self.name, self.default = name, default

    def __get__(self, module: Any, _: Any = None) -> Any:
        name = self.name
        if module is not None:
            slot = _slots.get((id(module), name)) if _slots else None
            value: Any = UNSENT
            if slot is not None and _active is not None:
                # A buffer of batch normalization: does the module itself take it, to update it?
                code = sys._getframe(1).f_code  # noqa: SLF001
                if name in running.BUFFERS and running.is_update(code, module):
                    value = _active.updated(slot)
                else:
                    value = _active.read(slot)
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
        bind = getattr(self.default, "__get__", None)
        if bind is None:
            return self.default
        return bind(module, _)

    def __set__(self, module: Any, value: Any) -> None:
        """Note a write by ``object.__setattr__``, which does not call nn.Module's."""
        module.__dict__[self.name] = value
        if _active is None or _active.quiet:
            return
        slot = _active.slot(module, self.name)
        if slot is not None:
            _active.note_attribute(module, self.name)
            _active.note(slot, value)

    def __delete__(self, module: Any) -> None:
        if self.name not in module.__dict__:
            raise AttributeError(self.name)
        del module.__dict__[self.name]


_slots: dict[tuple[int, str], _Slot] = {}
"""The attributes that were written in the present step, by module and name."""
_active: ModuleState | None = None
"""The state of the present step; None between steps."""
_setattr, _delattr = nn.Module.__setattr__, nn.Module.__delattr__
_register_buffer = nn.Module.register_buffer


def _set(module: nn.Module, name: str, value: Any) -> None:
    if _active is not None and name not in _PRIVATE:
        _active.write(module, name, value)
    else:
        _setattr(module, name, value)


def _register(
    module: nn.Module, name: str, tensor: torch.Tensor | None, persistent: bool = True
) -> None:
    if _active is None or name in module.__dict__["_parameters"]:
        _register_buffer(module, name, tensor, persistent)
    else:
        register = functools.partial(_register_buffer, module, name, tensor, persistent)
        _active.write(module, name, tensor, register)


def _delete(module: nn.Module, name: str) -> None:
    module_state = _active
    slot = None if module_state is None else module_state.slot(module, name)
    if module_state is None or slot is None:
        _delattr(module, name)
        return
    if module_state.read(slot) is MISSING:
        raise AttributeError(name)
    _store(module, name, MISSING)
    module_state.note_attribute(module, name)
    module_state.note(slot, MISSING)


class ModuleState:
    """The state of the modules, as each microbatch of a rank sees it.

    Attributes:
        turn: Returns the microbatch that this thread runs, or None.
        agreed: Name of a step function -> whether its microbatches run in turn in the next step.
        quiet: Whether an attribute is being set by `write`, which notes the write itself.
    """

    def __init__(
        self,
        me: int,
        turn: Callable[[], Turn | None],
        here: Callable[[], Key],
        title: Callable[[int], str],
    ) -> None:
        """Make the state of a rank.

        Args:
            me: Rank in the pipeline.
            turn: Returns the microbatch that this thread runs, or None.
            here: Returns the key of the present context.
            title: Returns words for a module, by its number.
        """
        self.me, self.turn, self.here, self.title = me, turn, here, title
        self._modules: list[nn.Module] = []
        self._global_state = GlobalState()
        self._numbers: dict[int, int] = {}
        self._owner: list[int] = []
        self._time = itertools.count(1)
        self._steps: dict[str, int] = {}
        self._learns = True
        self._tracked: set[Key] = set()
        self._shared: set[Key] = set()
        self._remote_reads: set[Key] = set()
        self._reads_told: dict[int, int] = {}
        self._cells: dict[int, _Slot] = {}
        self._places: dict[Key, Any] = {}
        self._keys: dict[int, Key] = {}
        self._buffers: list[tuple[int, str, torch.Tensor, int]] = []
        self._buffer_ids: set[int] = set()
        self._weak: list[tuple[int, str, Any]] = []
        self._hooks: dict[int, int] = {}
        self._all_hooks: list[int] = []
        self._replaced: dict[tuple[type, str], bool] = {}
        self._writes: dict[int, dict[Key, tuple[Stamp, Any]]] = {}
        self._known_by_peer: dict[tuple[int, bool], set[Stamp]] = {}
        self.quiet = False
        self.agreed: dict[str, bool] = {}
        self._function, self._in_turn = "", False
        self._leaves: list[_Leaf] = []
        self._attributes_before: dict[int, dict[str, Any]] = {}
        self._running = running.RunningStatistics()
        self._parameters: list[tuple[int, str, nn.Parameter, int]] = []
        self._entered: set[Turn] = set()
        self._left_rank: set[Turn] = set()
        self._late: dict[str, str] = {}
        self._changed_microbatches: set[int] = set()
        self._peer_changes = 0
        self._has_changed_once: set[str] = set()
        self._stays_in_turn: set[str] = set()
        self._warned: set[str] = set()
        self._unlike: set[Key] = set()
        self._too_large: set[Key] = set()
        self._locals: list[_Slot] = []
        self._returned: collections.Counter[Turn] = collections.Counter()
        self._moving: set[tuple[int, str]] = set()
        self._lent: list[tuple[str, Any, Any]] = []
        self._unseen: dict[int, tuple[Key, Any, Any]] = {}

    def install(self, modules: list[nn.Module], owner: list[int]) -> None:
        """Begin to follow the modules of a model.

        Args:
            modules: All modules, in the order that all ranks have.
            owner: For each module the rank that owns it.
        """
        self._modules, self._owner = modules, owner
        containers.Settings.model = set(map(id, modules))
        self._numbers = {id(module): number for number, module in enumerate(modules)}
        for dictionary in (self._steps, self._reads_told, self._late, self.agreed):
            dictionary.clear()
        for keys in (self._tracked, self._shared, self._remote_reads, self._moving):
            keys.clear()
        for functions in (self._has_changed_once, self._stays_in_turn):
            functions.clear()
        # Buffers that a module writes in place in a training pass and reads in an evaluation.
        for number, module in enumerate(modules):
            if owner[number] != self.me:
                continue
            if isinstance(module, nn.modules.batchnorm._NormBase):  # noqa: SLF001
                for name, buffer in module._buffers.items():  # noqa: SLF001
                    if buffer is not None:
                        self._tracked.add((number, name))
        self._read_code()

    def _read_code(self) -> None:
        """Find the global state that the code of the modules and of their hooks names."""
        self._global_state = GlobalState(self._modules)
        self._all_hooks = self._hooks_now()
        # Attributes that the code writes: their reads are observed from the first step on.
        for number, module in enumerate(self._modules):
            for name in self._global_state.written & module.__dict__.keys() - _PRIVATE:
                if not hasattr(getattr(type(module), name, None), "__set__"):
                    self._tracked.add((number, name))

    def _hooks_now(self) -> list[int]:
        return [id(hook) for module in self._modules for hook in hooks_of(module)]

    def draws(self) -> set[str]:
        """Return the packages with random generators that the code of the modules names."""
        return set(self._global_state.draws)

    # --- a step -----------------------------------------------------------------------------------

    def begin(self, function: str) -> bool:
        """Begin a step, and return whether its microbatches must run one after another."""
        global _active
        steps = self._steps[function] = self._steps.get(function, 0) + 1
        self._learns = steps <= _FIRST_STEPS
        self._in_turn = steps == 1 or self.agreed.get(function, False)
        self._function = function
        late = self._late.pop(function, None)
        if late and function not in self._warned:
            self._warned.add(function)
            _log.warning("%s: microbatches run one after another: %s\n%s", function, late, _FASTER)
        if self._hooks_now() != self._all_hooks:
            self._read_code()
        self._entered.clear()
        self._left_rank.clear()
        self._returned.clear()
        self._changed_microbatches.clear()
        self._peer_changes = 0
        self._cells = {}
        self._places.clear()
        self._keys.clear()
        self._begin_containers(is_first_step=steps == 1)
        for key in self._tracked:
            if len(key) == 2:
                self._slot(self._modules[key[0]], key)
        self._begin_tensors()
        self._hooks = {}
        for number, owner in enumerate(self._owner):
            if owner != self.me:
                self._hooks[number] = self.hooks_of(number)
        self._attributes_before = {}
        if self._in_turn:
            self._attributes_before = dict(enumerate(map(_attributes_of, self._modules)))
        if self._learns:
            self._weak = []
            for number, module in enumerate(self._modules):
                for name, value in _roots(module, self._global_state):
                    if isinstance(value, _WEAK):
                        self._weak.append((number, name, value))
        _active = self
        nn.Module.__setattr__, nn.Module.__delattr__ = _set, _delete  # type: ignore[method-assign,assignment]
        nn.Module.register_buffer = _register  # type: ignore[method-assign,assignment]
        return self._in_turn

    def _begin_containers(self, *, is_first_step: bool) -> None:
        """Record the content of the containers that modules hold."""
        for key, cell in self._containers():
            self._place(key, cell)
            if is_first_step or key in self._tracked or not _is_too_large(key, cell):
                self._cells[id(cell)] = _Slot(key, cell, containers.content(cell))
            else:
                self._unseen[id(cell)] = key, cell, containers.content(cell)
        self._locals = [
            slot for slot in self._cells.values() if isinstance(slot.where, containers.Local)
        ]

    def _begin_tensors(self) -> None:
        """Record the versions of the tensors that modules hold, and other objects that can be
        written in place.
        """
        self._parameters.clear()
        for number, module in enumerate(self._modules):
            if self._owner[number] != self.me:
                continue
            for name, parameter in module._parameters.items():  # noqa: SLF001
                if parameter is not None and not parameter.is_inference():
                    self._parameters.append((number, name, parameter, parameter._version))  # noqa: SLF001

        self._leaves = list(self._find_leaves())
        own_travellers = set()  # ids of leaves that go to other ranks by themselves
        for leaf in self._leaves:
            if self._in_turn and leaf.travels():
                written = containers.Written.of(leaf.value)
                self._place(leaf.key, written)
                own_travellers.add(id(leaf.value))
                self._cells[id(written)] = _Slot(leaf.key, written, written.get())

        self._buffers.clear()
        for number, module in enumerate(self._modules):
            if self._owner[number] != self.me:
                continue
            own = module.__dict__
            for name, value in (*own["_buffers"].items(), *own.items()):
                if not isinstance(value, torch.Tensor) or id(value) in own_travellers:
                    continue
                if not value.requires_grad and not value.is_inference():
                    self._buffers.append((number, name, value, value._version))  # noqa: SLF001
        self._buffer_ids = {id(buffer) for _, _, buffer, _ in self._buffers}

    def _place(self, key: Key, cell: Any) -> None:
        """Record where a container is when the step begins: all ranks have one there."""
        self._places[key] = cell
        self._keys[id(containers.held(cell))] = key

    def agree(self, function: str, *, root: bool) -> bool:
        """Return whether the microbatches of the next step of a function run in turn.

        The owner of the root module decides for all ranks.

        Args:
            function: Name of the step function.
            root: Whether this rank owns the root module.
        """
        if root:
            has_late_change = function in self._late
            # A single microbatch may have set up state for all others. Only state that changes
            # again keeps the microbatches in turn for good.
            changes = max(len(self._changed_microbatches), self._peer_changes)
            if has_late_change:
                if changes > 1 or function in self._has_changed_once:
                    self._stays_in_turn.add(function)
                self._has_changed_once.add(function)
            self.agreed[function] = has_late_change or function in self._stays_in_turn
        return self.agreed.get(function, False)

    def _require_turns(self, turn: Turn | None, reason: str) -> None:
        """Let the microbatches of the next step run in turn.

        Args:
            turn: The microbatch that changed state; None if not known.
            reason: Words for a warning.
        """
        self._late[self._function] = reason
        if turn is not None:
            self._changed_microbatches.add(turn.microbatch)

    def end(self) -> None:
        """End a step: the modules keep the state that the last microbatch sees."""
        global _active
        nn.Module.__setattr__, nn.Module.__delattr__ = _setattr, _delattr  # type: ignore[method-assign]
        nn.Module.register_buffer = _register_buffer  # type: ignore[method-assign]
        _active = None
        self._running.settle_all()
        for slot in _slots.values():
            self._tracked.add(slot.key)
            if slot.turns:
                _store(slot.where, slot.key[1], slot.last())
        for slot in self._cells.values():
            if slot.turns and slot.key[2] != _NEW:
                if slot.changed:
                    self._tracked.add(slot.key)
                containers.assign(slot.where, slot.last())
        for (kind, name), own in self._replaced.items():
            default = kind.__dict__[name].default
            delattr(kind, name)
            if own:
                setattr(kind, name, default)
        self._replaced.clear()
        _slots.clear()
        self._cells.clear()
        self._places.clear()
        self._keys.clear()
        self._writes.clear()
        self._known_by_peer.clear()
        self._lent.clear()
        self._unseen.clear()
        containers.Settings.known.clear()

    def forget(self, before: int) -> None:
        """Free tensors of microbatches that have ended and had a successor.

        Args:
            before: The microbatches with a smaller number have ended.
        """
        for slot in (*_slots.values(), *self._cells.values()):
            ended = sorted(
                turn
                for turn, version in slot.turns.items()
                if version.writes and turn.microbatch < before
            )
            for turn in ended:
                version = slot.turns[turn]
                version.saw_earlier = False  # no earlier microbatch can write any more
                is_last = turn.microbatch == ended[-1].microbatch
                if not is_last and _differentiable(version.value):
                    version.value = version.shown = MISSING
        for number, writes in self._writes.items():
            if number >= before:
                continue
            for key, (_, value) in list(writes.items()):
                if _differentiable(value):
                    del writes[key]

    def leave(self, turn: Turn, *, backward: bool = False) -> None:
        """Find and note the writes in place of a microbatch, before another one runs on this rank
        or this one goes to another rank.

        Args:
            turn: The microbatch.
            backward: Whether it was a backward pass. Then writes to buffers do not count: they are
                of a forward that ran again.

        Raises:
            StepError: Another microbatch may have read the state before this write.
        """
        # Hot: this runs at each change of contexts. Plain loops, and no calls for unchanged state.
        backward = backward or _in_backward()
        for place, (number, name, buffer, version) in enumerate(self._buffers):
            if buffer._version != version:  # noqa: SLF001
                self._buffers[place] = (number, name, buffer, buffer._version)  # noqa: SLF001
                if not backward:
                    self._note_buffer(turn, number, name, buffer)
        for number, name, weak in self._weak:
            for key in list(weak):
                if isinstance(key, torch.Tensor) and not isinstance(key, nn.Parameter):
                    raise StepError(
                        f"attribute {name!r} of module {self.title(number)} has tensors as weak"
                        " keys: which of them another partition or microbatch finds cannot be as in"
                        " one process\nUse a dictionary with names."
                    )
        for title, lent_object, before in self._lent:
            if containers.changed(lent_object, before):
                raise StepError(
                    f"module {title} keeps what it returned, and its caller wrote to that:"
                    " it would not change there\n"
                    "Write to a copy, or place the module with its caller with smp.set_partition."
                )
        for slot in list(self._cells.values()):
            content = containers.content(slot.where)
            if not containers.same(content, slot.installed):
                self._note_content(slot, turn, content, backward=backward)
        if not turn.is_copy:
            if self._in_turn:
                self._find_silent_writes(turn)
            self._compare_leaves(turn, backward=backward)
        for slot in _slots.values():
            if not slot.late:
                continue
            for reader in slot.turns.values():
                if reader.saw_earlier and not _equal(reader.seen, slot.base):
                    if not slot.counts():
                        self._require_turns(turn, self._where(slot))
                    break
        self._left_rank.add(turn)

    def _note_buffer(self, turn: Turn, number: int, name: str, buffer: torch.Tensor) -> None:
        """Note that a buffer was written in place."""
        module = self._modules[number]
        names = (name,)
        if name == "num_batches_tracked":
            # torch does not count the writes to the running statistics, but this one comes along.
            names = tuple(module.__dict__["_buffers"])
        for written_name in names:
            value = _stored_value(module, written_name)
            if written_name != name or value is buffer:
                slot = self._slot(module, (number, written_name))
                self._check_first(slot, turn)
                slot.in_place = True
                self._note(slot, turn, value)

    def _note_content(self, slot: _Slot, turn: Turn, content: Any, *, backward: bool) -> None:
        """Note that a container has a new content."""
        slot.changed = True
        is_new = slot.key[2] == _NEW
        if not is_new and not turn.is_copy and _is_comparably_other(slot.installed, content):
            self._change(slot, turn, slot.installed, content, backward=backward)
        slot.installed = content
        self._note(slot, turn, content)
        if slot.key[-1] == _LEAF:
            self._require_turns(turn, self._where(slot))
            return
        self._watch(slot.key, content if isinstance(content, list) else list(content.values()))
        if is_new:
            # The container goes along with the attribute that holds it.
            attribute = _slots.get((id(self._modules[slot.key[0]]), slot.key[1]))
            if attribute is not None:
                self._note(attribute, turn, attribute.find(turn)[1])

    def note_attribute(self, module: nn.Module, name: str) -> None:
        """Record the value of an attribute that was written by way of `nn.Module`."""
        attributes = self._attributes_before.get(self._numbers.get(id(module), -1))
        if attributes is not None:
            attributes[name] = _stored_value(module, name)

    def _find_silent_writes(self, turn: Turn) -> None:
        """Find and note writes to attributes that did not go by way of `nn.Module`.

        Only in a step with microbatches in turn.
        """
        for number, before in self._attributes_before.items():
            module = self._modules[number]
            attributes = _attributes_of(module)
            for name in before | attributes:
                value = attributes.get(name, MISSING)
                if before.get(name, MISSING) is value:
                    continue
                slot = _slots.get((id(module), name))
                if slot is None:
                    slot = self._slot(module, (number, name))
                    slot.base = before.get(name, MISSING)
                self._note(slot, turn, value)
                self._require_turns(turn, self._where(slot))
            self._attributes_before[number] = attributes

    def _compare_leaves(self, turn: Turn, *, backward: bool) -> None:
        """Find writes in place to tensors, arrays and generators in attributes, containers and
        objects.

        Raises:
            StepError: Another microbatch may have read the object before this write.
        """
        for leaf in self._leaves:
            state = leaf.now()
            visit = (self.here(), self._returned[turn])
            last_writer, last_visit = leaf.writer, leaf.visit
            changed = state is not leaf.state
            if changed:
                leaf.writer, leaf.visit, leaf.state = turn, visit, state
                self._check_owner(leaf)
            came_back = came_late = False
            if not backward and last_writer is not None and not leaf.direct:
                # The microbatch wrote, left, and runs here again: another one would have written
                # meanwhile, if they overlapped.
                came_back = last_writer == turn and last_visit != visit
                came_late = last_writer.microbatch > turn.microbatch
            attribute = (leaf.key[0], leaf.key[1])
            if not self._in_turn:
                is_unexpected = changed and attribute not in self._moving
                if came_late or (is_unexpected and self._is_overlapped(turn)):
                    raise StepError(f"{self._where_leaf(leaf)}\n{_REMEDY}")
            elif changed:
                self._moving.add(attribute)
            if (changed and turn in self._left_rank) or (self._in_turn and came_back):
                self._require_turns(turn, self._where_leaf(leaf))

    def returned(self, turn: Turn) -> None:
        """Note that a microbatch has come back to this rank from a call of another rank."""
        self._returned[turn] += 1

    def _check_owner(self, leaf: _Leaf) -> None:
        """Refuse a write to an object of another rank's module, unless the value travels."""
        if leaf.elsewhere and not (self._in_turn and leaf.travels()):
            raise StepError(
                f"{self._leaf_title(leaf)} is on another partition, and was written in"
                f" place\n{_REMEDY}"
            )

    def _leaf_title(self, leaf: _Leaf) -> str:
        return f"attribute {leaf.key[1]!r} of module {self.title(leaf.key[0])}"

    def _where_leaf(self, leaf: _Leaf) -> str:
        return (
            f"{self._leaf_title(leaf)} is written where a microbatch that overlaps may have read it"
        )

    def variable_left(self, words: str) -> None:
        """Note that a microbatch has set a context variable and not reset it, so that the next
        microbatch sees the value.

        Args:
            words: Words for the variable.

        Raises:
            StepError: A later microbatch may have begun without the value.
        """
        late = f"{words} is set and not set back, where a microbatch that overlaps may have read it"
        if not self._in_turn:
            raise StepError(f"{late}\n{_REMEDY}")
        self._require_turns(self.turn(), late)

    def _is_overlapped(self, turn: Turn) -> bool:
        """Return whether a later microbatch has run on this rank already."""
        for other in self._entered:
            if other.microbatch > turn.microbatch and not other.is_copy:
                return True
        return False

    def _check_first(self, slot: _Slot, turn: Turn) -> None:
        """Check the first write to an attribute: reads before it were not observed.

        Raises:
            StepError: A later microbatch has run already, and may have read the attribute.
        """
        if (
            self._in_turn
            or slot.turns
            or slot.key in self._tracked
            or not self._is_overlapped(turn)
        ):
            return
        if self._global_state.reads(slot.key[1]):
            raise StepError(f"{self._where(slot)}\n{_REMEDY}")

    def _change(self, slot: _Slot, turn: Turn, before: Any, now: Any, *, backward: bool) -> None:
        """Check the change of a container: an overlapping microbatch may have read the content.

        Raises:
            StepError: A later microbatch has run already, and the content was not only added to.
        """
        if turn in self._left_rank:
            self._require_turns(turn, self._where(slot))
        if self._is_overlapped(turn) and not (_only_adds_keys(before, now) or backward):
            raise StepError(f"{self._where(slot)}\n{_REMEDY}")
        if isinstance(now, dict) and not backward:
            self._compare_new(slot, turn, before, now)

    def _compare_new(
        self, slot: _Slot, turn: Turn, before: dict[Any, Any], now: dict[Any, Any]
    ) -> None:
        """Compare the values of a new key that two microbatches wrote without seeing each other.

        A memo has equal values in both; different values mean that one depends on the other.

        Raises:
            StepError: The values differ.
        """
        for key in now.keys() - slot.base.keys():
            if key not in before:
                later = set()
                for other in self._entered:
                    if other.microbatch > turn.microbatch and other.is_copy == turn.is_copy:
                        later.add(other)
                slot.missed.setdefault(key, {})[turn] = later
            elif now[key] is before[key]:
                continue
            for other, version in slot.turns.items():
                is_missed = turn in slot.missed.get(key, {}).get(other, ())
                is_missed |= key not in before and other.microbatch > turn.microbatch
                if not is_missed or not isinstance(version.value, dict) or key not in version.value:
                    continue
                value, other_value = now[key], version.value[key]
                if not _is_comparable(value) or not _is_comparable(other_value):
                    continue
                if not _equal(value, other_value):
                    first, last = sorted((turn.microbatch, other.microbatch))
                    raise self._error(slot, first, last, "after")

    def _where(self, slot: _Slot) -> str:
        return f"{self._title(slot)} is written where a microbatch that overlaps may have read it"

    def _watch(self, key: Key, value: Any) -> None:
        """Begin to follow the containers in a new value."""
        for cell in containers.cells(value, package(type(self._modules[key[0]]))):
            if id(cell) not in self._unseen and id(cell) not in self._cells:
                slot = _Slot((key[0], key[1], _NEW), cell, containers.content(cell))
                self._cells[id(cell)] = slot

    def enter(self, turn: Turn) -> None:
        """Put the contents that a microbatch sees into the containers."""
        self._entered.add(turn)
        for slot in self._locals:  # another microbatch may have run on this thread, or none yet
            slot.installed = slot.find(turn)[1]
            if not containers.same(containers.content(slot.where), slot.installed):
                containers.assign(slot.where, slot.installed)
        for slot in self._cells.values():
            if slot.turns:
                value = slot.find(turn)[1]
                if value is not slot.installed:
                    containers.assign(slot.where, value)
                    slot.installed = value

    # --- attributes -------------------------------------------------------------------------------

    def slot(self, module: nn.Module, name: str) -> _Slot | None:
        """Return the slot of an attribute; None if the attribute is not followed."""
        slot = _slots.get((id(module), name))
        if slot is None:
            number = self._numbers.get(id(module))
            if number is None or name in _PRIVATE or self.turn() is None:
                return None
            if hasattr(getattr(type(module), name, None), "__set__"):
                return None  # a property: it sets an attribute, which has a slot of its own
            slot = self._slot(module, (number, name))
        return slot

    def _slot(self, module: nn.Module, key: Key) -> _Slot:
        """Return the slot of an attribute, and put a descriptor into the class of the module."""
        kind, name = type(module), key[1]
        if (kind, name) not in self._replaced:
            default = inspect.getattr_static(kind, name, MISSING)
            if isinstance(default, _Attribute):
                default = default.default
            self._replaced[kind, name] = name in kind.__dict__
            setattr(kind, name, _Attribute(name, default))
        place = (id(module), name)
        if place not in _slots:
            _slots[place] = _Slot(key, module, _stored_value(module, name))
        return _slots[place]

    def hooks_of(self, number: int) -> int:
        """Return the number of hooks of a module."""
        own = self._modules[number].__dict__
        return sum(len(own[kind]) for kind in HOOKS)

    def check_hooks(self, number: int) -> None:
        """Refuse a hook that was registered in this step on a module of another rank.

        Raises:
            StepError: The owner of the module does not have the hook.
        """
        if self.hooks_of(number) == self._hooks[number]:
            return
        if not variables.is_hooked(self._modules[number]):
            raise StepError(
                f"a hook was registered in a step on module {self.title(number)},"
                " which is on another partition, where it would not run\n"
                "Register it before the step on all ranks, or place it with smp.set_partition."
            )

    def write(
        self, module: nn.Module, name: str, value: Any, put: Callable[[], None] | None = None
    ) -> None:
        """Set an attribute of a module, and note the write.

        Args:
            module: The module.
            name: The name of the attribute.
            value: The new value.
            put: Sets the attribute; None: ``nn.Module.__setattr__``.

        Raises:
            StepError: It is a buffer of another rank, or another microbatch may have read it.
        """
        own = module.__dict__
        put = put or functools.partial(_setattr, module, name, value)
        if id(module) not in self._numbers or isinstance(value, nn.Module | nn.Parameter):
            put()
            return
        if name in own["_parameters"] or name in own["_modules"]:
            put()
            return
        new = (id(module), name) not in _slots
        slot = self.slot(module, name)
        if slot is not None and name in own["_buffers"] and self._owner[slot.key[0]] != self.me:
            raise StepError(
                f"{self._title(slot)} is a buffer on another partition, where it would not"
                f" change\n{_REMEDY}"
            )
        self.quiet = True
        try:
            put()
        finally:
            self.quiet = False
            self.note_attribute(module, name)
        if slot is not None:
            turn = self.turn()
            if new and turn is not None and not turn[1] and not _equal(value, slot.base):
                self._check_first(slot, turn)
            if new and type(value) in _NUMBERS and type(slot.base) in _NUMBERS:
                # The read before could not be observed: most likely the number is counted up.
                self.read(slot)
            self.note(slot, _stored_value(module, name))
            self._watch(slot.key, value)
            if isinstance(value, _WEAK):
                self._weak.append((slot.key[0], name, value))

    def updated(self, slot: _Slot) -> Any:
        """Return the tensor that the running microbatch updates in place of a running statistic.

        UNSENT if no microbatch runs on this thread.
        """
        turn = self.turn()
        if turn is None or turn[1]:
            return UNSENT
        return self._running.buffer(slot.where, slot.key[1], turn[0])

    def _settle(self, slot: _Slot) -> None:
        """Put the updates of running statistics into the buffers, because a microbatch reads them.

        Raises:
            StepError: Microbatches overlap, and earlier ones may update the statistics later.
        """
        if not self._in_turn:
            raise StepError(
                f"{self._title(slot)} was read where other microbatches update it\n{_REMEDY}"
            )
        self._running.settle(slot.where)
        self._require_turns(self.turn(), self._where(slot))

    def read(self, slot: _Slot) -> Any:
        """Return the value that the running microbatch sees, and note the read.

        UNSENT if no microbatch runs on this thread.

        Raises:
            StepError: A later microbatch has written in place already, or the value is not here.
        """
        turn = self.turn()
        if turn is None:
            return UNSENT
        if slot.key[1] in running.BUFFERS and self._running.waits(slot.where):
            self._settle(slot)
        source, value = slot.find(turn)
        version = slot.turns.get(turn)
        if version is None:
            version = slot.turns[turn] = _Version()
        if source != turn and not version.saw_earlier:
            version.saw_earlier, version.seen = True, value
            version.read_time = next(self._time)
        version.reads += 1
        version.fetched = True
        if slot.in_place and not _in_backward():
            if turn in self._left_rank:
                self._require_turns(turn, self._where(slot))
            for other, other_version in slot.turns.items():
                is_later = other.microbatch > turn.microbatch and other.is_copy == turn.is_copy
                if is_later and other_version.writes:
                    raise self._error(slot, other.microbatch, turn.microbatch, "before")
        if source is not None and slot.turns[source].writer != self.here():
            self._remote_reads.add(slot.key)
        if value is UNSENT:
            raise StepError(
                f"{self._title(slot)} was set on another partition: it cannot be sent, or was not"
                f" read on this one in the first steps\n{_REMEDY}"
            )
        return value

    def note(self, slot: _Slot, value: Any) -> None:
        """Note a write of the running microbatch."""
        turn = self.turn()
        if turn is not None:
            self._note(slot, turn, value)

    def _note(self, slot: _Slot, turn: Turn, value: Any, stamp: Stamp | None = None) -> None:
        """Note a write.

        Args:
            slot: The state that was written.
            turn: The microbatch that wrote.
            value: The new value.
            stamp: The write on another rank that the value came from; None for a write on this
                rank.

        Raises:
            StepError: A later microbatch has read the value before.
        """
        version = slot.turns.setdefault(turn, _Version())
        if len(slot.key) > 2 and not version.writes:
            version.saw_earlier, version.seen = True, slot.find(turn)[1]
        if not version.writes or not _in_backward():
            version.shown = value
        version.value, version.time = value, next(self._time)
        version.writes += 1
        slot.late |= turn in self._left_rank
        if stamp is None:
            version.own += 1
            version.writer = self.here()
        else:
            version.writer = stamp
        if not turn.is_copy:
            sent = value
            if stamp is None and _has_new_object(slot, value):
                sent = UNSENT
            writes = self._writes.setdefault(turn.microbatch, {})
            writes[slot.key] = (stamp or (self.me, version.time), sent)
        # A switch may be reset before the microbatch ends, and then there is no conflict: so
        # conflict() checks these at the end of the step.
        if not isinstance(value, bool | str | _Mark | None):
            conflict = self._conflict(slot)
            if conflict is not None:
                raise conflict

    def conflict(self) -> StepError | None:
        """Return an error if a microbatch read a value that an earlier one wrote again later."""
        for slot in (*_slots.values(), *self._cells.values()):
            conflict = self._conflict(slot)
            if conflict is not None:
                return conflict
        return self._changed_unseen()

    def _changed_unseen(self) -> StepError | None:
        """Return an error if a container changed that is too large or too deep to be followed."""
        for key, cell, before in self._unseen.values():
            if id(cell) in self._cells:
                continue
            if not containers.same(before, containers.content(cell)):
                return StepError(
                    f"attribute {key[1]!r} of module {self.title(key[0])} has more than"
                    f" {containers.LARGE} items or {_MOST} containers: what is in it is looked at"
                    " only if it changes in the first step of a step function, and it changed in a"
                    " later one\nKeep it smaller, or make it a buffer."
                )
        return None

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Explain an error of torch in a backward pass: name the parameter that was written in this
        step, or the container that keeps a tensor of a freed graph.

        Raises:
            StepError: With the explanation.
            RuntimeError: The error itself, without an explanation.
        """
        try:
            yield
        except RuntimeError as error:
            written = self._written_parameter()
            if type(error) is RuntimeError and written is not None:
                raise StepError(
                    f"{written} was written in the step, where other microbatches still need its"
                    f" former value for their gradients: {error}\nWrite it after the step, or set"
                    ' "active_microbatches" to 1, so that microbatches run in turn.'
                ) from error
            holder = self._slot_with_graph()
            if type(error) is not RuntimeError or holder is None:
                raise
            raise StepError(
                f"{self._title(holder)} keeps a tensor that needs a gradient,"
                f" whose graph may have ended: {error}\n"
                "Detach it, or take it out when it is no longer used."
                " Or place the modules that use it on one partition with smp.set_partition."
            ) from error

    def _slot_with_graph(self) -> _Slot | None:
        """Return a container in which a microbatch has put a tensor that requires a gradient."""
        for slot in self._cells.values():
            for version in slot.turns.values():
                if _differentiable(version.value):
                    return slot
        return None

    def _written_parameter(self) -> str | None:
        """Return words for a parameter of this rank that was written in this step, or None."""
        for number, name, parameter, version in self._parameters:
            if parameter._version != version:  # noqa: SLF001
                return f"parameter {name!r} of module {self.title(number)}"
        return None

    def _conflict(self, slot: _Slot) -> StepError | None:
        """Return an error if a microbatch read a value that an earlier one wrote again later."""
        if len(slot.turns) < 2:
            return None
        for turn, version in slot.turns.items():
            if version.saw_earlier and _is_outdated(slot, turn, version) and not slot.counts():
                writers = []
                for other, other_version in slot.turns.items():
                    if other_version.writes and other.microbatch < turn.microbatch:
                        writers.append(other.microbatch)
                return self._error(slot, max(writers), turn.microbatch, "after")
        return None

    def _error(self, slot: _Slot, writer: int, reader: int, when: str) -> StepError:
        return StepError(
            f"{self._title(slot)} was written by microbatch {writer} {when} microbatch {reader}"
            f" read it\n{_REMEDY}"
        )

    def _title(self, slot: _Slot) -> str:
        return f"attribute {slot.key[1]!r} of module {self.title(slot.key[0])}"

    # --- other ranks ------------------------------------------------------------------------------

    def held(self, microbatch: int) -> frozenset[Stamp]:
        """Return the stamps of the writes of a microbatch that this rank knows."""
        return frozenset(stamp for stamp, _ in self._writes.get(microbatch, {}).values())

    def pack(
        self,
        microbatch: int,
        peer: int,
        *,
        copy: bool = False,
        held: frozenset[Stamp] | None = None,
    ) -> tuple[StateHeader, list[Any]]:
        """Return the state that another rank needs of a microbatch.

        Args:
            microbatch: The microbatch.
            peer: The other rank.
            copy: Whether it is for the script's copy of the microbatch on that rank.
            held: Stamps of the writes that the rank has; None: the writes that were sent to it,
                without tensors that require a gradient.

        Returns:
            A header, and the values of its writes.
        """
        if not copy:
            self._share(Turn(microbatch))
        remote_reads: tuple[Key, ...] = ()
        if self._reads_told.get(peer, 0) < len(self._remote_reads):
            self._reads_told[peer] = len(self._remote_reads)
            remote_reads = tuple(self._remote_reads)
        late = max(len(self._changed_microbatches), self._peer_changes)
        if not self._writes:
            if not remote_reads and not late:
                return EMPTY_HEADER, []
            return EMPTY_HEADER._replace(remote_reads=remote_reads, late=late), []

        known = self._known_by_peer.setdefault((peer, copy), set())
        writes: list[tuple[Key, Stamp, int]] = []
        values: list[Any] = []
        numbers = [microbatch]
        if not copy:
            numbers = sorted(number for number in self._writes if number <= microbatch)
        for number in numbers:
            is_earlier = number < microbatch
            peer_has = known if held is None or is_earlier else held
            for key, (stamp, value) in self._writes.get(number, {}).items():
                if self._stays(key):
                    continue
                has = stamp in peer_has
                # A tensor that requires a gradient is sent again for each call, because the graph
                # of a call has only the tensors that came with the call.
                is_differentiable = _differentiable(value)
                if has and (is_earlier or held is not None or copy or not is_differentiable):
                    continue
                if is_earlier and is_differentiable:
                    continue
                # After the first steps, attributes are sent only if another rank has read them.
                is_unread = (
                    not self._learns
                    and len(key) == 2
                    and key not in self._remote_reads
                    and not isinstance(value, _PLAIN)
                )
                if is_unread and has:
                    continue
                known.add(stamp)
                writes.append((key, stamp, number))
                sent = self._with_names(key, value)
                if is_unread or not _sendable(sent):
                    sent = UNSENT
                values.append(sent)
        is_unchanged = not writes and not remote_reads and not late
        if is_unchanged and held is None and microbatch not in self._writes:
            return EMPTY_HEADER, []
        return StateHeader(tuple(writes), self.held(microbatch), remote_reads, late=late), values

    def _with_names(self, key: Key, value: Any) -> Any:
        """Replace each container in a value by its name, where the other rank has it, too.

        Args:
            key: Where the value is.
            value: The value of an attribute, or the content of a container.
        """

        def name_of(item: Any) -> Any:
            if isinstance(item, _PLAIN):
                return item
            item_key = self._keys.get(id(item))
            if item_key is None or item_key == key:
                return item
            return _ContainerName(item_key)

        return _map_value(name_of, key, value)

    def _with_own_containers(self, value: Any, key: Key) -> Any:
        """Replace the names of containers by this rank's own containers.

        Args:
            value: A value that came from another rank.
            key: Where the value is.

        Raises:
            StepError: This rank has no such container.
        """

        def own_container(item: Any) -> Any:
            if not isinstance(item, _ContainerName):
                return item
            container = self._resolve(item.key)
            if container is None:
                raise StepError(
                    f"attribute {item.key[1]!r} of module {self.title(item.key[0])} is not the same"
                    f" on two ranks, and was written\n{_REMEDY}"
                )
            return containers.held(container)

        return _map_value(own_container, key, value)

    def old(self, microbatch: int) -> set[int]:
        """Return the ``id()`` of the tensors that containers keep from before this step."""
        old_tensors: set[int] = set()
        for key in self._writes.get(microbatch, {}):
            slot = self._cells.get(id(self._places.get(key)))
            if slot is not None:
                old_tensors.update(map(id, tensors_in(list(containers.items(slot.base)))))
        return old_tensors

    def _share(self, turn: Turn) -> None:
        """Note the containers that modules of several ranks hold, so that they travel with the
        microbatch.
        """
        if not self._shared:
            return
        for slot in self._cells.values():
            if slot.key not in self._shared or turn in slot.turns:
                continue
            if (
                _is_too_large(slot.key, slot.where)
                and not slot.changed
                and slot.key not in self._tracked
            ):
                continue  # a large table, equal on all ranks
            if all(map(_is_useful_later, containers.items(slot.installed))):
                self._note(slot, turn, slot.installed)
                slot.turns[turn].sent = slot.installed

    def unpack(self, turn: Turn, header: StateHeader, values: Sequence[Any], peer: int) -> None:
        """Take over the writes of another rank.

        Args:
            turn: The microbatch that came.
            header: Describes the writes.
            values: The values of the writes.
            peer: The other rank.

        Raises:
            StepError: A value cannot be sent, or another microbatch may have read it before.
        """
        self._remote_reads.update(header.remote_reads)
        if header.late:
            self._late.setdefault(self._function, "")
            self._peer_changes = max(self._peer_changes, header.late)
        known = self._known_by_peer.setdefault((peer, turn.is_copy), set())
        for (key, stamp, number), sent_value in zip(header.writes, values, strict=True):
            known.add(stamp)
            writer = Turn(number, turn.is_copy)
            value = self._with_own_containers(sent_value, key)
            own_write = self._writes.get(number, {}).get(key)
            if own_write is not None and own_write[0] == stamp and not _differentiable(value):
                if not writer.is_copy:
                    continue
                value = own_write[1]  # this rank has the same objects already
            where = self._resolve(key)
            if where is None:
                continue
            if len(key) == 2:
                self._unpack_attribute(writer, key, value, stamp)
                continue
            is_list = isinstance(where, (list, collections.deque))
            if value is not UNSENT and is_list != isinstance(value, list):
                self._warn_of_kind(key)
                continue
            if isinstance(where, containers.Names) and value is not UNSENT:
                settled = where.settled(value)
                value = UNSENT if settled is None else settled
            if value is UNSENT:
                raise StepError(
                    f"attribute {key[1]!r} of module {self.title(key[0])} cannot be sent\n{_REMEDY}"
                )
            cell = self._cells.get(id(where))
            if cell is None:
                cell = self._cells[id(where)] = _Slot(key, where, containers.content(where))
            before = cell.find(writer)[1]
            value = _with_old_objects(before, value)
            if _is_comparably_other(before, value):
                cell.changed = True
                if number == turn.microbatch and not turn.is_copy:
                    self._change(cell, writer, before, value, backward=False)
            containers.assign(where, value)
            cell.installed = value
            self._note(cell, writer, value, stamp)

    def _unpack_attribute(self, turn: Turn, key: Key, value: Any, stamp: Stamp) -> None:
        """Take over the value of an attribute that another rank wrote."""
        module, name = self._modules[key[0]], key[1]
        slot = self.slot(module, name)
        if slot is None:
            return
        if value is not UNSENT:
            _store(module, name, value)
            self.note_attribute(module, name)
        self._note(slot, turn, value, stamp)
        slot.turns[turn].fetched = False
        self._watch(key, value)

    def _warn_of_kind(self, key: Key) -> None:
        """Warn once that ranks hold objects of different kinds in the same place.

        save_pretrained of transformers, for example, writes to the objects of one rank.
        """
        if key not in self._unlike:
            self._unlike.add(key)
            title = f"attribute {key[1]!r} of module {self.title(key[0])}"
            _log.warning(
                "%s: something in it is of another kind on another rank; changes of it stay there",
                title,
            )

    def written(self, microbatch: int) -> dict[Key, tuple[Stamp, Any]]:
        """Return the writes of a microbatch so far: key -> (stamp, value)."""
        return dict(self._writes.get(microbatch, ()))

    def restore(self, turn: Turn, before: Mapping[Key, tuple[Stamp, Any]]) -> None:
        """Put this rank's objects back after a remote call that did not write to them.

        A call back to this rank may have brought copies.

        Args:
            turn: The microbatch.
            before: The writes before the remote call.
        """
        writes = self._writes.get(turn.microbatch, {})
        for key, (stamp, value) in before.items():
            if writes[key][0] != stamp or writes[key][1] is value:
                continue
            writes[key] = stamp, value
            where = self._resolve(key)
            is_attribute = len(key) == 2
            slot = _slots.get((id(where), key[1])) if is_attribute else self._cells.get(id(where))
            if slot is None:
                continue
            version = slot.turns[turn]
            version.value = version.shown = slot.installed = value
            if is_attribute:
                _store(where, key[1], value)
                self.note_attribute(where, key[1])
            else:
                containers.assign(where, value)

    def unread(self, turn: Turn, header: StateHeader, values: Sequence[Any], used: Any) -> set[int]:
        """Return the ``id()`` of the tensors that came from another rank and were not read since.

        Args:
            turn: The microbatch.
            header: Describes the state that came.
            values: The values of this state.
            used: Tensors that came in another way, and may be the same ones.
        """
        unread: set[int] = set()
        others = [used]
        for (key, _, number), value in zip(header.writes, values, strict=True):
            if isinstance(value, _PLAIN):
                continue
            version = None
            if len(key) == 2 and number == turn.microbatch:
                slot = _slots.get((id(self._modules[key[0]]), key[1]))
                version = None if slot is None else slot.turns.get(turn)
            if version is not None and not version.fetched:
                unread.update(map(id, tensors_in(value)))
            else:
                others.append(value)
        if unread:
            unread -= set(map(id, tensors_in(others)))
        return unread

    def lent(self, result: Any) -> tuple[int, ...]:
        """Return the numbers of the tensors and containers in a result that modules keep."""
        if isinstance(result, torch.Tensor):
            return (0,) if id(result) in self._buffer_ids else ()
        numbers = []
        for number, item in enumerate(_inside(result)):
            if id(item) in self._cells or id(item) in self._buffer_ids:
                numbers.append(number)
        return tuple(numbers)

    def borrow(self, result: Any, numbers: Sequence[int], title: str) -> None:
        """Follow the parts of a result that its module keeps: writes to these parts are refused.

        Args:
            result: The result of a remote call.
            numbers: Numbers of the parts, as `lent` returned them on the module's rank.
            title: Words for the module.
        """
        if not numbers:
            return
        inside = _inside(result)
        for number in numbers:
            self._lent.append((title, inside[number], containers.before(inside[number])))

    def note_reads(
        self, turn: Turn, header: StateHeader, values: Sequence[Any], unread: set[int]
    ) -> None:
        """Note which of the values that were sent to another rank were read there.

        Args:
            turn: The microbatch.
            header: Describes the values.
            values: The values.
            unread: ``id()`` of the tensors that were not read.
        """
        for (key, _, _), value in zip(header.writes, values, strict=True):
            if len(key) > 2 or isinstance(value, _PLAIN):
                continue
            slot = _slots.get((id(self._modules[key[0]]), key[1]))
            if slot is None or turn not in slot.turns:
                continue
            for tensor in tensors_in(value):
                if id(tensor) not in unread:
                    slot.turns[turn].fetched = True

    def _stays(self, key: Key) -> bool:
        """Return whether a write stays on this rank."""
        if len(key) > 2:
            return bool(key[2] == _NEW)
        return key[1] in self._modules[key[0]].__dict__["_buffers"]

    def _resolve(self, key: Key) -> Any:
        """Return the module or the container of a key."""
        module = self._modules[key[0]]
        if len(key) == 2:
            return module
        if key in self._places:
            return self._places[key]
        home = package(type(module))
        for name, value in _roots(module, self._global_state):
            if name != key[1]:
                continue
            if key[-1] == _LEAF:
                leaf = _item_at(containers.leaves(value, home), key[2])
                return None if leaf is None else containers.Written.of(leaf)
            return _item_at(containers.cells(value, home), key[2])
        return None

    def _find_leaves(self) -> Iterator[_Leaf]:
        """Yield the objects of modules that are no containers and can be written in place.

        Objects of modules of other ranks are followed, too, because a write would stay on this
        rank.
        """
        leaves: dict[int, _Leaf] = {}
        weights: set[int] = set()
        for module in self._modules:
            weights.update(map(id, module._parameters.values()))  # noqa: SLF001
        for number, module in enumerate(self._modules):
            is_mine = self._owner[number] == self.me
            own = module.__dict__
            home = package(type(module))
            named = list(_roots(module, self._global_state))
            if is_mine and self._in_turn:
                named += [*own["_parameters"].items(), *own["_buffers"].items()]
            for name, value in named:
                for place, item in enumerate(containers.leaves(value, home)):
                    # A parameter of another model, such as a teacher, counts, too.
                    is_foreign_weight = isinstance(item, nn.Parameter) and id(item) not in weights
                    is_cheap = _is_cheap_to_compare(item) or is_foreign_weight
                    if not self._in_turn and not is_cheap:
                        continue
                    if not is_mine and not _is_shared(item):
                        continue
                    leaf = leaves.setdefault(id(item), _Leaf((number, name, place, _LEAF), item))
                    leaf.elsewhere |= not is_mine
                    leaf.direct |= item is value and (name in own or name in own["_buffers"])
        # torch counts no write to a tensor's `data`, or to a numpy array in its memory.
        has_uncounted = any(map(self._global_state.reads, ("data", "numpy")))
        for leaf in leaves.values():
            self._warn_of_size(leaf)
            leaf.by_values = self._in_turn or (has_uncounted and leaf.travels())
            leaf.state = leaf.now()
            yield leaf

    def _warn_of_size(self, leaf: _Leaf) -> None:
        """Warn once of an array that is too large for its values to be compared."""
        place = leaf.key[:2]
        if not containers.is_buffer(leaf.value) or place in self._too_large:
            return
        octets = containers.size(leaf.value)
        if octets <= containers.LARGEST or containers.is_constant(leaf.value):
            return
        self._too_large.add(place)
        _log.warning(
            "%s has an array of %d MiB: above %d MiB what a step writes into it is not seen. It"
            " would stay on its rank, and microbatches would not wait for it. Make it a torch"
            " tensor, or read-only (array.flags.writeable = False).",
            self._leaf_title(leaf),
            octets >> 20,
            containers.LARGEST >> 20,
        )

    def _containers(self) -> Iterator[tuple[Key, Any]]:
        """Yield the containers that modules hold, each once.

        Containers that modules of several ranks hold are recorded as shared.
        """
        first_holders: dict[int, tuple[int, Key]] = {}  # by id(): owner and key
        for number, module in enumerate(self._modules):
            home = package(type(module))
            for name, value in _roots(module, self._global_state):
                for place, cell in enumerate(containers.cells(value, home)):
                    holder = (self._owner[number], (number, name, place))
                    owner, key = first_holders.setdefault(id(cell), holder)
                    # All ranks have the same settings and thread-local values at first.
                    is_alike = isinstance(cell, containers.Settings | containers.Local)
                    if owner != self._owner[number] and not is_alike:
                        self._shared.add(key)
                    elif key == (number, name, place):
                        yield key, cell


_log = logging.getLogger("smdistributed.modelparallel")
_NEW = "new"
"""Third item of the key of a container that was made in the present step. Such a container travels
with its attribute.
"""
_LARGEST_PARAMETER = 1 << 18
"""Largest size in bytes of a frozen parameter with compared values. torch does not count all
writes.
"""
_LEAF = "leaf"
"""Last item of the key of a tensor, an array or another object that is no container."""
_MOST = 256
"""Number of containers of one attribute that are compared whenever a microbatch ends or waits.

Further containers are compared at the end of a step.
"""
_REMEDY = (
    'Keep it in a local variable, or set "active_microbatches" to 1: then microbatches run one'
    " after another. Or place the modules that use it on one partition with smp.set_partition."
)


_FASTER = (
    "Equal to one process, but slower. Keep it in a local variable, or place the modules that use"
    " it on one partition with smp.set_partition."
)


def _is_too_large(key: Key, cell: Any) -> bool:
    """Return whether a container is too large, or too deep, to be compared whenever a microbatch
    ends or waits.
    """
    large = isinstance(cell, list | dict | set | collections.deque) and len(cell) > containers.LARGE
    return key[2] >= _MOST or large


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
        elsewhere: Whether a module of another rank holds the object.
        direct: Whether the object is an attribute of a module, so that reads are observed.
        by_values: Whether the values of a tensor are compared, and not only its version.
        writer: The microbatch that wrote last.
        visit: The context of that write, and the number of remote calls that the microbatch had
            made.
        state: The state of the object when it was compared last.
    """

    key: Key
    value: Any
    elsewhere: bool = False
    direct: bool = False
    by_values: bool = False
    writer: Turn | None = None
    visit: tuple[Key, int] | None = None
    state: Any = None

    def travels(self) -> bool:
        """Return whether the values go to other ranks when microbatches run in turn.

        A tensor that only its owner has in an attribute travels as this attribute. A buffer stays
        on its rank. A tensor that requires a gradient cannot travel.
        """
        if isinstance(self.value, nn.Parameter | itertools.count | types.GeneratorType):
            return False
        if not _is_cheap_to_compare(self.value):
            return False
        is_tensor = isinstance(self.value, torch.Tensor)
        if is_tensor and (self.value.requires_grad or self.value.is_inference()):
            return False
        return self.elsewhere or not self.direct

    def now(self) -> Any:
        """Return the present state of the object.

        If the object was not written since the last comparison, this is the same state object.
        """
        if isinstance(self.value, torch.Tensor) and not self.by_values:
            version = None if self.value.is_inference() else self.value._version  # noqa: SLF001
            return self.state if version == self.state else version
        # A copy of each frozen weight would cost too much memory.
        is_parameter = isinstance(self.value, nn.Parameter)
        limit = _LARGEST_PARAMETER if is_parameter else containers.LARGEST
        return containers.state(self.value, self.state, limit)


def _item_at(items: Iterator[Any], index: int) -> Any:
    """Return an item of an iterator, or None if the iterator ends before."""
    return next(itertools.islice(items, index, None), None)


def _map_value(function: Callable[[Any], Any], key: Key, value: Any) -> Any:
    """Apply a function to the value of an attribute, or to each item in the content of a
    container.
    """
    if len(key) == 2 or isinstance(value, _Mark):
        return function(value)
    if isinstance(value, list):
        return [function(item) for item in value]
    return {name: function(item) for name, item in value.items()}


def _is_outdated(slot: _Slot, turn: Turn, version: _Version) -> bool:
    """Return whether an earlier microbatch has written since a microbatch read.

    Args:
        slot: The state.
        turn: The microbatch that read.
        version: The version of this microbatch.
    """
    if slot.in_place:
        # The value is the same tensor: the times tell.
        for other, other_version in slot.turns.items():
            is_earlier = other.microbatch < turn.microbatch and other.is_copy == turn.is_copy
            if is_earlier and other_version.writes and other_version.time > version.read_time:
                return True
        return False
    value = slot.find(turn, own=False)[1]
    if len(slot.key) == 2:
        return not _equal(value, version.seen)
    if version.sent is not MISSING:
        return _replaces(version.sent, value)
    if containers.same(value, version.seen):
        return False
    return _shares(version.value, version.seen, slot.base)


def _attributes_of(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module, and its buffers."""
    own = module.__dict__
    return {
        name: value
        for name, value in (*own.items(), *own["_buffers"].items())
        if name not in _PRIVATE and not name.startswith("_smp")
    }


def _roots(module: nn.Module, global_state: GlobalState) -> Iterator[tuple[str, Any]]:
    """Yield the objects that a module can reach, with names.

    They are its attributes, global state that its code names, and state of its hooks.
    """
    for name, value in list(module.__dict__.items()):
        if type(value) in containers.ATOMS or name in _PRIVATE or name.startswith("_smp"):
            continue
        yield name, value
    yield from global_state.of(module)
    for kind in HOOKS:
        for number, hook in enumerate(list(module.__dict__[kind].values())):
            holder = getattr(hook, "__self__", None)
            if isinstance(holder, nn.Module):
                holder = tuple(
                    value for name, value in holder.__dict__.items() if name not in _PRIVATE
                )
            objects = [getattr(hook, "args", ()), getattr(hook, "keywords", None), holder]
            objects += containers.enclosed(hook)
            yield f"{kind}[{number}]", tuple(objects)


def _inside(value: Any) -> list[Any]:
    """Return the tensors and containers in a value."""
    return [*tensors_in(value), *containers.cells(value)]


def _stored_value(module: nn.Module, name: str) -> Any:
    """Return the value of an attribute or buffer as the module has it, without a note of the read.

    MISSING if there is none.
    """
    own = module.__dict__
    if name in own:
        return own[name]
    return own["_buffers"].get(name, MISSING)


def _store(module: nn.Module, name: str, value: Any) -> None:
    """Set an attribute or buffer, without a note of the write. MISSING removes it."""
    own = module.__dict__
    if name in own["_buffers"]:
        own["_buffers"][name] = value
    elif value is MISSING:
        own.pop(name, None)
    elif value is not UNSENT:
        own[name] = value


def _equal(one: Any, other: Any) -> bool:
    """Return whether two values are equal, as far as this can be told."""
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
        return all(map(_equal, one, other))
    return type(one) is type(other) and isinstance(one, _PLAIN) and one == other


def _with_old_objects(before: Any, now: Any) -> Any:
    """Return a content that came from another rank, with this rank's objects in the place of equal
    ones.

    Args:
        before: The content of the container on this rank.
        now: The content that came.
    """
    if isinstance(before, list) and isinstance(now, list):
        items = list(now)
        for index, old_item in enumerate(before[: len(now)]):
            if _equal(old_item, items[index]):
                items[index] = old_item
        return items
    if isinstance(before, dict) and isinstance(now, dict):
        content = dict(now)
        for key, item in now.items():
            if key in before and _equal(before[key], item):
                content[key] = before[key]
        return content
    return now


def _is_comparable(value: Any) -> bool:
    """Return whether ``_equal`` can tell that two such values differ."""
    if isinstance(value, tuple):
        return all(map(_is_comparable, value))
    return isinstance(value, _PLAIN) or (
        isinstance(value, torch.Tensor) and not value.requires_grad
    )


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)  # noqa: SLF001


def _is_useful_later(item: Any) -> bool:
    """Return whether another microbatch or step can use an item."""
    if isinstance(item, torch.Tensor):
        return not item.requires_grad
    return isinstance(item, _PLAIN)


def _without_gradients(value: Any, base: Any) -> Any:
    """Return a content without the new tensors that require a gradient.

    Only the microbatch that made such a tensor can use it, in its own backward pass.

    Args:
        value: The content.
        base: The content at the beginning of the step; its items stay.
    """
    old = {id(item) for item in containers.items(base)}

    def stays(item: Any) -> bool:
        return not isinstance(item, torch.Tensor) or not item.requires_grad or id(item) in old

    if all(map(stays, containers.items(value))):
        return value
    if isinstance(value, list):
        return [item for item in value if stays(item)]
    content = {}
    for key, item in value.items():
        if stays(item):
            content[key] = item
        elif key in base:
            content[key] = base[key]
    return content


def _comparable_items(content: Any) -> list[Any]:
    """Return the items of a content that another microbatch could read, in a form in which two
    contents can be compared.

    Returns:
        For each item (key, class, value); objects have their ``id()`` as value.
    """
    pairs = enumerate(content) if isinstance(content, list) else content.items()
    items = []
    for key, item in pairs:
        if not _differentiable(item):
            value = item if isinstance(item, _PLAIN) else id(item)
            items.append((key, type(item), value))
    return items


def _is_comparably_other(before: Any, now: Any) -> bool:
    """Return whether two contents differ in an item that another microbatch could read."""
    return _comparable_items(before) != _comparable_items(now)


def _only_adds_keys(before: Any, now: Any) -> bool:
    """Return whether a content is a dictionary that only got new keys, without numbers as values.

    A memo of computed values is such a dictionary.
    """
    if not isinstance(now, dict) or not before.keys() <= now.keys():
        return False
    for key, item in now.items():
        if key not in before:
            if type(item) in _NUMBERS:
                return False
        elif item is not before[key]:
            return False
    return True


def _replaces(before: Any, now: Any) -> bool:
    """Return whether a plain value in a container was replaced by another one."""
    if isinstance(before, list) and isinstance(now, list):
        pairs = list(zip(before, now, strict=False))
    elif isinstance(before, dict) and isinstance(now, dict):
        pairs = [(item, now[key]) for key, item in before.items() if key in now]
    else:
        return True
    for old_item, item in pairs:
        if isinstance(old_item, _PLAIN) and not _equal(old_item, item):
            return True
    return False


def _is_counted_up(before: Any, now: Any) -> bool:
    """Return whether an integer was counted up.

    Only integers: a sum of other numbers cannot be distinguished from an average.
    """
    return type(before) is type(now) is int and now >= before


def _shares(value: Any, before: Any, base: Any) -> bool:
    """Return whether a content was made from another one.

    Then it has an object that was new in the other one.

    Args:
        value: The content.
        before: The content that it may have been made from.
        base: The content at the beginning of the step.
    """
    old = {id(item) for item in containers.items(base)}
    new = set()
    for item in containers.items(before):
        if id(item) not in old and not isinstance(item, _PLAIN):
            new.add(id(item))
    return any(id(item) in new for item in containers.items(value))


def _sum_of_writes(base: Any, writers: Sequence[tuple[Any, Any]]) -> Any:
    """Return the content of a container after several microbatches wrote to it.

    Numbers and appended items of all microbatches add up. Otherwise the last one counts.

    Args:
        base: The content before.
        writers: For each microbatch (its last content, the content that it had read).
    """
    last = writers[-1][0]
    if isinstance(last, list):
        items = list(base)
        for content, seen in writers:
            if not containers.same(content[: len(seen)], seen):
                return last
            items += content[len(seen) :]
        return items

    total = dict(last)
    for key, item in last.items():
        if type(item) not in _NUMBERS:
            continue
        numbers = [base.get(key, 0)]
        differences = [numbers[0]]
        for content, seen in writers:
            numbers += [content.get(key, 0), seen.get(key, 0)]
        if not all(type(number) in _NUMBERS for number in numbers):
            continue
        for content, seen in writers:
            differences.append(content.get(key, 0) - seen.get(key, 0))
        total[key] = sum(differences)
    return total


def _has_new_object(slot: _Slot, value: Any) -> bool:
    """Return whether a variable, or an attribute of a class, got an object in this step.

    Other ranks do not have this object.
    """
    if not isinstance(slot.where, containers.Names) or not isinstance(value, dict):
        return False
    old = set(map(id, slot.base.values()))
    return any(isinstance(item, containers.Held) and id(item) not in old for item in value.values())


def _differentiable(value: Any) -> bool:
    """Return whether a value contains a tensor that requires a gradient."""
    if isinstance(value, _PLAIN):
        return False
    return any(tensor.requires_grad for tensor in tensors_in(value))


def _sendable(value: Any) -> bool:
    """Return whether a value can be sent to another rank."""
    if isinstance(value, (*_PLAIN, _Mark)) or type(value) in (torch.Tensor, nn.Parameter):
        return True
    return not isinstance(flatten(value)[0].data, Exception)
