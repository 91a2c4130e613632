"""What modules keep on themselves: each microbatch sees what one process would.

Microbatches interleave on a rank, and a microbatch goes from rank to rank. So what is written to an
attribute of a module, or into a container that one holds, belongs to the microbatch that wrote it.
It goes along when the microbatch goes to another rank. Who has not written sees what the microbatch
before wrote, as if they had run in turn. If that is written again after it was seen, the step ends
with an error.

A read of a container, of a module-level variable or of a class cannot be seen. So the first step of
each step function runs its microbatches one after another, and shows whether one changes them after
it has left the rank: then those of the next step do not overlap either.
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
"""Steps of each step function in which all that modules write travels.

Later only what was read in these.
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
"""Number of a module and name of an attribute, and for a container the way to it."""
Turn = tuple[int, bool]
"""A microbatch, and whether it is the script's copy of it on another rank than the root's."""


class _Mark:
    """A value that is none."""

    def __init__(self, words: str) -> None:
        self.words = words

    def __reduce__(self) -> str:
        return "MISSING" if self is MISSING else "UNSENT"


MISSING, UNSENT = _Mark("missing"), _Mark("unsent")


Stamp = tuple[int, int]
"""The rank that wrote, and the number of the write on it."""


class StateHeader(NamedTuple):
    """What is said of the writes that go to another rank. Their values go beside it.

    Attributes:
        writes: What was written, in the order of the values, and by which microbatch.
        held: What the caller had written when it called.
        wanted: What was read on other ranks than those that wrote it.
        variables: Names of the context variables whose values go along.
        hooked: Numbers of Hugging Face's models whose outputs are captured.
        idle: With a result: numbers of the tensors that came with the call and were not read.
        late: In how many microbatches something changed where one that overlaps may have read it.
        lent: With a result: numbers of the tensors and containers in it that a
            module of the sender keeps.
        unused: With a result: numbers of the tensors that came with the call
            and are not in a graph of the result.
    """

    writes: tuple[tuple[Key, Stamp, int], ...] = ()
    held: frozenset[Stamp] = frozenset()
    wanted: tuple[Key, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    hooked: tuple[int, ...] = ()
    idle: tuple[int, ...] = ()
    late: int = 0
    lent: tuple[int, ...] = ()
    unused: tuple[int, ...] = ()


EMPTY_HEADER = StateHeader()


_AFTER: Turn = (1 << 60, False)
"""After all microbatches."""


class _Version:
    """What one microbatch wrote, and what it read.

    Attributes:
        value: What it wrote last.
        shown: What it wrote last, but for a forward that ran again in the
            backward pass: others see that.
        time: When, on this rank.
        reads: How often it read.
        own: How often it wrote on this rank.
        writes: How often it wrote, on any.
        through: Whether it read what an earlier one wrote.
        seen: What that was.
        looked: When it first read that.
        fetched: Whether the value came from another rank, and was read.
        writer: What wrote it: a run of the step function, or a served call.
        sent: What another rank got of it with a call, which the microbatch had not written itself.
    """

    __slots__ = (
        *(
            "fetched",
            "looked",
            "own",
            "reads",
            "seen",
            "sent",
            "shown",
            "through",
            "time",
            "value",
            "writer",
            "writes",
        ),
    )

    def __init__(self) -> None:
        self.value: Any = MISSING
        self.shown: Any = MISSING
        self.seen: Any = MISSING
        self.sent: Any = MISSING
        self.through = self.fetched = False
        self.writer: Any = None
        self.looked = self.time = self.reads = self.own = self.writes = 0


class _Known(NamedTuple):
    """Stands for a container in what is sent: the other rank takes its own one, and no copy.

    Attributes:
        key: Where it was when the step began.
    """

    key: Key


class _Slot:
    """One attribute or container, and who wrote what to it in this step.

    Attributes:
        changed: A container had another content for some time.
        missed: For a new key of a dictionary and who wrote it, who had run without it until then.
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
        self.key, self.where, self.base, self.in_place, self.late = key, where, base, False, False
        self.changed = False
        self.missed: dict[Any, dict[Turn, set[Turn]]] = {}
        self.turns: dict[Turn, _Version] = {}
        self.installed = base

    def counts(self) -> bool:
        """Return whether it is a number that microbatches only add to, and do not use."""
        here = [version for version in self.turns.values() if version.reads or version.own]
        return bool(here) and all(
            version.reads == version.own and _grows(version.seen, version.value) for version in here
        )

    def last(self) -> Any:
        """Return the value after the step."""
        if len(self.key) > 2:
            newest: dict[int, _Version] = {}
            for (number, _), version in sorted(self.turns.items()):
                if version.writes and version.value is not MISSING:
                    held = newest.setdefault(number, version)
                    newest[number] = max(held, version, key=lambda each: each.time)
            pairs = [
                (each.value, self.turns.get((number, False), each).seen)
                for number, each in newest.items()
            ]
            return _added(self.base, pairs) if pairs else self.base
        if len(self.key) == 2 and self.counts():
            return sum(
                (version.value - version.seen for version in self.turns.values() if version.own),
                self.base,
            )
        value = self.find(_AFTER)[1]
        if type(value) in _NUMBERS:
            again = [
                (each.value, each.shown)
                for (_, copy), each in self.turns.items()
                if each.own and not copy
            ]
            value += sum(
                one - other
                for one, other in again
                if type(one) in _NUMBERS and type(other) in _NUMBERS
            )
            return value
        return self.find(_AFTER)[1]

    def find(self, turn: Turn, *, own: bool = True) -> tuple[Turn | None, Any]:
        """Return who wrote what a microbatch sees, and the value.

        Args:
            turn: The microbatch.
            own: Or what it would see without what it wrote itself.
        """
        mine = self.turns.get(turn) if own else None
        if mine is not None and mine.writes:
            return turn, mine.value
        best: tuple[int, bool, int, Turn] | None = None
        for other, version in self.turns.items():
            if version.writes and other[0] < turn[0]:
                found = (other[0], turn == _AFTER or other[1] == turn[1], version.time, other)
                best = found if best is None else max(best, found)
        if best is None:
            return None, self.base
        value = self.turns[best[3]].shown
        return best[3], (
            value if len(self.key) == 2 or turn == _AFTER else _carried(value, self.base)
        )


class _Attribute(containers.StandIn):
    """Stands in a class for an attribute that some object of it writes in a step."""

    def __init__(self, name: str, default: Any) -> None:
        self.name, self.default = name, default

    def __get__(self, module: Any, _: Any = None) -> Any:
        name = self.name
        if module is not None:
            slot = _slots.get((id(module), name)) if _slots else None
            value: Any = UNSENT
            if slot is not None and _views is not None:
                # Who takes a buffer of batch normalization: the module itself,
                # to update it, or another one?
                code = sys._getframe(1).f_code  # noqa: SLF001
                updates = name in running.BUFFERS and running.is_update(code, module)
                value = _views.updated(slot) if updates else _views.read(slot)
            if value is UNSENT:
                own = module.__dict__
                for kind in (
                    own,
                    *(own.get(each, {}) for each in ("_parameters", "_buffers", "_modules")),
                ):
                    if name in kind:
                        return kind[name]
            elif value is not MISSING:
                return value
        if self.default is MISSING:
            raise AttributeError(f"{name!r} is not set")
        bind = getattr(self.default, "__get__", None)
        return self.default if bind is None else bind(module, _)

    def __set__(self, module: Any, value: Any) -> None:
        module.__dict__[self.name] = value
        slot = None if _views is None or _views.quiet else _views.slot(module, self.name)
        if _views is not None and slot is not None:  # `object.__setattr__`
            _views.knows(module, self.name)
            _views.note(slot, value)

    def __delete__(self, module: Any) -> None:
        if self.name not in module.__dict__:
            raise AttributeError(self.name)
        del module.__dict__[self.name]


_slots: dict[tuple[int, str], _Slot] = {}
"""The attributes that were written in the present step, by module and name."""
_views: ModuleState | None = None
_setattr, _delattr = nn.Module.__setattr__, nn.Module.__delattr__
_register_buffer = nn.Module.register_buffer


def _set(module: nn.Module, name: str, value: Any) -> None:
    if _views is not None and name not in _PRIVATE:
        _views.write(module, name, value)
    else:
        _setattr(module, name, value)


def _register(
    module: nn.Module, name: str, tensor: torch.Tensor | None, persistent: bool = True
) -> None:
    if _views is None or name in module.__dict__["_parameters"]:
        _register_buffer(module, name, tensor, persistent)
    else:
        _views.write(
            module, name, tensor, lambda: _register_buffer(module, name, tensor, persistent)
        )


def _delete(module: nn.Module, name: str) -> None:
    before = _views
    slot = None if before is None else before.slot(module, name)
    if before is None or slot is None:
        _delattr(module, name)
        return
    if before.read(slot) is MISSING:
        raise AttributeError(name)
    _put(module, name, MISSING)
    before.knows(module, name)
    before.note(slot, MISSING)


class ModuleState:
    """The views of a rank's microbatches.

    Attributes:
        turn: The microbatch that this thread runs; None: none.
        agreed: Step functions whose microbatches run in turn in the next step.
        quiet: An attribute is being set, and will be noted.
    """

    def __init__(
        self,
        me: int,
        turn: Callable[[], Turn | None],
        here: Callable[[], Key],
        title: Callable[[int], str],
    ) -> None:
        """Make the views of a rank.

        Args:
            me: Rank in the pipeline.
            turn: Returns which microbatch runs on this thread.
            here: Returns which run of the step function or which served call it is.
            title: Returns words for a module.
        """
        self.me, self.turn, self.here, self.title = me, turn, here, title
        self._modules: list[nn.Module] = []
        self._global_state = GlobalState()
        self._numbers: dict[int, int] = {}
        self._owner: list[int] = []
        self._time = itertools.count(1)
        self._steps: dict[str, int] = {}
        self._learns = True
        self._hot: set[Key] = set()
        self._shared: set[Key] = set()
        self._wanted: set[Key] = set()
        self._told: dict[int, int] = {}
        self._cells: dict[int, _Slot] = {}
        self._places: dict[Key, Any] = {}
        self._keys: dict[int, Key] = {}
        self._buffers: list[tuple[int, str, torch.Tensor, int]] = []
        self._kept: set[int] = set()
        self._weak: list[tuple[int, str, Any]] = []
        self._hooks: dict[int, int] = {}
        self._all_hooks: list[int] = []
        self._replaced: dict[tuple[type, str], bool] = {}
        self._log: dict[int, dict[Key, tuple[Stamp, Any]]] = {}
        self._known: dict[tuple[int, bool], set[Stamp]] = {}
        self.quiet = False
        self.agreed: dict[str, bool] = {}
        self._function, self._in_turn = "", False
        self._leaves: list[_Leaf] = []
        self._held: dict[int, dict[str, Any]] = {}
        self._running = running.RunningStatistics()
        self._parameters: list[tuple[int, str, nn.Parameter, int]] = []
        self._entered: set[Turn] = set()
        self._left: set[Turn] = set()
        self._late: dict[str, str] = {}
        self._changed_in: set[int] = set()
        self._told_changed = 0
        self._began_late: set[str] = set()
        self._stays_in_turn: set[str] = set()
        self._said: set[str] = set()
        self._unlike: set[Key] = set()
        self._too_large: set[Key] = set()
        self._locals: list[_Slot] = []
        self._returned: collections.Counter[Turn] = collections.Counter()
        self._moving: set[tuple[int, str]] = set()
        self._lent: list[tuple[str, Any, Any]] = []
        self._unseen: dict[int, tuple[Key, Any, Any]] = {}

    def install(self, modules: list[nn.Module], owner: list[int]) -> None:
        """Look at the modules, in the order that all ranks have, and at the ranks that own them."""
        self._modules, self._owner = modules, owner
        containers.Settings.model = set(map(id, modules))
        self._numbers = {id(module): number for number, module in enumerate(modules)}
        for known in (
            self._steps,
            self._hot,
            self._shared,
            self._wanted,
            self._told,
            self._late,
            self.agreed,
        ):
            known.clear()
        for names in (self._moving, self._began_late, self._stays_in_turn):
            names.clear()
        # Those that a module writes in place in a training pass and reads in an evaluation.
        self._hot.update(
            (number, name)
            for number, module in enumerate(modules)
            if owner[number] == self.me and isinstance(module, nn.modules.batchnorm._NormBase)  # noqa: SLF001
            for name, buffer in module._buffers.items()  # noqa: SLF001
            if buffer is not None
        )
        self._look_at_code()

    def _look_at_code(self) -> None:
        """Look at the code of the modules, and of the hooks that they have."""
        self._global_state = GlobalState(self._modules)
        self._all_hooks = self._hooks_now()
        # Reads of these are seen from the first step on, whenever they are first written.
        for number, module in enumerate(self._modules):
            for name in self._global_state.written & module.__dict__.keys() - _PRIVATE:
                if not hasattr(getattr(type(module), name, None), "__set__"):
                    self._hot.add((number, name))

    def _hooks_now(self) -> list[int]:
        return [id(hook) for module in self._modules for hook in hooks_of(module)]

    def draws(self) -> set[str]:
        """Return the packages whose generators the code of the modules names."""
        return set(self._global_state.draws)

    # --- a step -----------------------------------------------------------------------------------

    def begin(self, function: str) -> bool:
        """Begin a step, and return whether its microbatches must run one after another."""
        global _views
        steps = self._steps[function] = self._steps.get(function, 0) + 1
        self._learns = steps <= _FIRST_STEPS
        self._in_turn = steps == 1 or self.agreed.get(function, False)
        self._function = function
        late = self._late.pop(function, None)
        if late and function not in self._said:
            self._said.add(function)
            _log.warning("%s: microbatches run one after another: %s\n%s", function, late, _FASTER)
        if self._hooks_now() != self._all_hooks:
            self._look_at_code()
        self._entered.clear()
        self._left.clear()
        self._returned.clear()
        self._changed_in.clear()
        self._told_changed = 0
        self._cells = {}
        self._places.clear()
        self._keys.clear()
        for key, cell in self._look():
            self._place(key, cell)
            if steps == 1 or key in self._hot or not _is_far(key, cell):
                self._cells[id(cell)] = _Slot(key, cell, containers.content(cell))
            else:
                self._unseen[id(cell)] = key, cell, containers.content(cell)
        self._locals = [
            slot for slot in self._cells.values() if isinstance(slot.where, containers.Local)
        ]
        for key in self._hot:
            if len(key) == 2:
                self._slot(self._modules[key[0]], key)
        self._parameters = [
            (number, name, parameter, parameter._version)  # noqa: SLF001
            for number, module in enumerate(self._modules)
            if self._owner[number] == self.me
            for name, parameter in module._parameters.items()  # noqa: SLF001
            if parameter is not None and not parameter.is_inference()
        ]
        self._leaves = list(self._look_inside())
        whole = set()  # what goes to other ranks by itself, and not as an attribute of one module
        for leaf in self._leaves:
            if self._in_turn and leaf.travels():
                written = containers.Written.of(leaf.value)
                self._place(leaf.key, written)
                whole.add(id(leaf.value))
                self._cells[id(written)] = _Slot(leaf.key, written, written.get())
        self._hooks = {
            n: self.hooks_of(n) for n, owner in enumerate(self._owner) if owner != self.me
        }
        self._buffers = [
            (number, name, buffer, buffer._version)  # noqa: SLF001
            for number, module in enumerate(self._modules)
            if self._owner[number] == self.me
            for name, buffer in (*module.__dict__["_buffers"].items(), *module.__dict__.items())
            if isinstance(buffer, torch.Tensor)
            and not buffer.requires_grad
            and not buffer.is_inference()
            if id(buffer) not in whole
        ]
        self._kept = {id(buffer) for _, _, buffer, _ in self._buffers}
        self._held = {n: _held(module) for n, module in enumerate(self._modules) if self._in_turn}
        if self._learns:
            roots = (
                (n, *root)
                for n, module in enumerate(self._modules)
                for root in _roots(module, self._global_state)
            )
            self._weak = [root for root in roots if isinstance(root[2], _WEAK)]
        _views = self
        nn.Module.__setattr__, nn.Module.__delattr__ = _set, _delete  # type: ignore[method-assign,assignment]
        nn.Module.register_buffer = _register  # type: ignore[method-assign,assignment]
        return self._in_turn

    def _place(self, key: Key, cell: Any) -> None:
        """Remember where a container is when the step begins: all ranks have one there."""
        self._places[key] = cell
        self._keys[id(containers.held(cell))] = key

    def agree(self, function: str, *, root: bool) -> bool:
        """Return whether the microbatches of the next step run in turn: the
        root's owner says so, for all ranks.
        """
        if root:
            late = function in self._late
            # One microbatch may have set up what all others find: only what changes again keeps
            # microbatches in turn.
            again = (
                max(len(self._changed_in), self._told_changed) > 1 or function in self._began_late
            )
            if late and again:
                self._stays_in_turn.add(function)
            if late:
                self._began_late.add(function)
            self.agreed[function] = late or function in self._stays_in_turn
        return self.agreed.get(function, False)

    def _is_late(self, turn: Turn | None, words: str) -> None:
        """Note that the microbatches of the next step must run in turn, and why."""
        self._late[self._function] = words
        if turn is not None:
            self._changed_in.add(turn[0])

    def end(self) -> None:
        """End a step: what the last microbatch sees stays."""
        global _views
        nn.Module.__setattr__, nn.Module.__delattr__ = _setattr, _delattr  # type: ignore[method-assign]
        nn.Module.register_buffer = _register_buffer  # type: ignore[method-assign]
        _views = None
        self._running.settle_all()
        for slot in _slots.values():
            self._hot.add(slot.key)
            if slot.turns:
                _put(slot.where, slot.key[1], slot.last())
        for slot in self._cells.values():
            if slot.turns and slot.key[2] != _NEW:
                if slot.changed:
                    self._hot.add(slot.key)
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
        self._log.clear()
        self._known.clear()
        self._lent.clear()
        self._unseen.clear()
        containers.Settings.known.clear()

    def forget(self, before: int) -> None:
        """Free what microbatches wrote that have ended and had a successor.

        They are those before a number.
        """
        for slot in (*_slots.values(), *self._cells.values()):
            ended = sorted(
                turn for turn, version in slot.turns.items() if version.writes and turn[0] < before
            )
            for turn in ended:
                slot.turns[turn].through = False  # nobody that it could have seen still writes
                if turn[0] < ended[-1][0] and _differentiable(slot.turns[turn].value):
                    slot.turns[turn].value = slot.turns[turn].shown = MISSING
        for number, log in self._log.items():
            for key in [
                key for key, (_, value) in log.items() if number < before and _differentiable(value)
            ]:
                del log[key]

    def leave(self, turn: Turn, *, backward: bool = False) -> None:
        """Note what a microbatch wrote in place, before another one runs or it
        goes to another rank.

        Args:
            turn: The microbatch.
            backward: It was a backward pass: buffers that this writes again, as it runs a forward
                again, do not count.
        """
        backward = backward or _in_backward()
        for place, (number, name, buffer, version) in enumerate(self._buffers):
            if buffer._version != version:  # noqa: SLF001
                self._buffers[place] = (number, name, buffer, buffer._version)  # noqa: SLF001
                module = self._modules[number]
                # torch does not count what batch normalization writes.
                names = (
                    tuple(module.__dict__["_buffers"]) if name == "num_batches_tracked" else (name,)
                )
                for each in () if backward else names:
                    now = _physical(module, each)
                    if each != name or now is buffer:
                        slot = self._slot(module, (number, each))
                        self._check_first(slot, turn)
                        slot.in_place = True
                        self._note(slot, turn, now)
        for number, name, weak in self._weak:
            if any(
                isinstance(key, torch.Tensor) and not isinstance(key, nn.Parameter)
                for key in list(weak)
            ):
                raise StepError(
                    f"attribute {name!r} of module {self.title(number)} has tensors as weak keys:"
                    " which of them another partition or microbatch finds cannot be as in one"
                    " process\nUse a dictionary with names."
                )
        for title, each, before in self._lent:
            if containers.changed(each, before):
                raise StepError(
                    f"module {title} keeps what it returned, and its caller wrote to that:"
                    " it would not change there\n"
                    "Write to a copy, or place the module with its caller with smp.set_partition."
                )
        for slot in list(self._cells.values()):
            now = containers.content(slot.where)
            if containers.same(now, slot.installed):
                continue
            slot.changed = True
            if slot.key[2] != _NEW and not turn[1] and _remains(slot.installed) != _remains(now):
                self._change(slot, turn, slot.installed, now, backward=backward)
            slot.installed = now
            self._note(slot, turn, now)
            if slot.key[-1] == _LEAF:
                self._is_late(turn, self._where(slot))
                continue
            self._watch(slot.key, now if isinstance(now, list) else list(now.values()))
            holder = (
                _slots.get((id(self._modules[slot.key[0]]), slot.key[1]))
                if slot.key[2] == _NEW
                else None
            )
            if holder is not None:
                self._note(holder, turn, holder.find(turn)[1])
        if not turn[1]:
            if self._in_turn:
                self._compare(turn)
            self._compare_leaves(turn, backward=backward)
        for slot in _slots.values():
            seen = [
                version.seen for version in slot.turns.values() if slot.late and version.through
            ]
            if any(not _equal(value, slot.base) for value in seen) and not slot.counts():
                self._is_late(turn, self._where(slot))
        self._left.add(turn)

    def knows(self, module: nn.Module, name: str) -> None:
        """Note what an attribute of a module is: it was not written without a word."""
        held = self._held.get(self._numbers.get(id(module), -1))
        if held is not None:
            held[name] = _physical(module, name)

    def _compare(self, turn: Turn) -> None:
        """Look, in a step whose microbatches run in turn, at what is written
        without a word to `nn.Module`.
        """
        for number, before in self._held.items():
            module, now = self._modules[number], _held(self._modules[number])
            for name in [
                name
                for name in before | now
                if before.get(name, MISSING) is not now.get(name, MISSING)
            ]:
                slot = _slots.get((id(module), name))
                if slot is None:
                    slot = self._slot(module, (number, name))
                    slot.base = before.get(name, MISSING)
                self._note(slot, turn, now.get(name, MISSING))
                self._is_late(turn, self._where(slot))
            self._held[number] = now

    def _compare_leaves(self, turn: Turn, *, backward: bool) -> None:
        """Look at what was written in place: tensors, arrays and generators in attributes,
        containers and objects.
        """
        for leaf in self._leaves:
            now = leaf.now()
            visit = (self.here(), self._returned[turn])
            before, written_in, changed = leaf.writer, leaf.visit, now is not leaf.state
            if changed:
                leaf.writer, leaf.visit, leaf.state = turn, visit, now
                self._check_owner(leaf)
            if backward or before is None or leaf.direct:
                came_back, came_late = False, False
            else:
                # It wrote, and ran here once more: another one would have
                # written meanwhile, if they overlapped.
                came_back = before == turn and written_in != visit
                came_late = before[0] > turn[0]
            known = (leaf.key[0], leaf.key[1]) in self._moving
            if not self._in_turn and (
                came_late or (changed and not known and self._is_overlapped(turn))
            ):
                raise StepError(f"{self._where_leaf(leaf)}\n{_REMEDY}")
            if self._in_turn and changed:
                self._moving.add((leaf.key[0], leaf.key[1]))
            if (changed and turn in self._left) or (self._in_turn and came_back):
                self._is_late(turn, self._where_leaf(leaf))

    def returned(self, turn: Turn) -> None:
        """Note that a microbatch has come back to this rank from a call of another one."""
        self._returned[turn] += 1

    def _check_owner(self, leaf: _Leaf) -> None:
        """Refuse a write to what a module of another rank holds, unless it goes there."""
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
        """Note that a microbatch has set a context variable, and not set it
        back: the next one sees that.

        Raises:
            StepError: A later one may have begun without it.
        """
        late = f"{words} is set and not set back, where a microbatch that overlaps may have read it"
        if not self._in_turn:
            raise StepError(f"{late}\n{_REMEDY}")
        self._is_late(self.turn(), late)

    def _is_overlapped(self, turn: Turn) -> bool:
        """Return whether a later microbatch has run on this rank already."""
        return any(number > turn[0] and not copy for number, copy in self._entered)

    def _check_first(self, slot: _Slot, turn: Turn) -> None:
        """Look at an attribute that is written for the first time: reads of it
        before were not seen.

        Raises:
            StepError: A later microbatch has run already, and may have read it.
        """
        if self._in_turn or slot.turns or slot.key in self._hot or not self._is_overlapped(turn):
            return
        if self._global_state.reads(slot.key[1]):
            raise StepError(f"{self._where(slot)}\n{_REMEDY}")

    def _change(self, slot: _Slot, turn: Turn, before: Any, now: Any, *, backward: bool) -> None:
        """Look at the change of a container: one that overlaps may have read what was in it."""
        if turn in self._left:
            self._is_late(turn, self._where(slot))
        if self._is_overlapped(turn) and not (_adds(before, now) or backward):
            raise StepError(f"{self._where(slot)}\n{_REMEDY}")
        if isinstance(now, dict) and not backward:
            self._compare_new(slot, turn, before, now)

    def _compare_new(
        self, slot: _Slot, turn: Turn, before: dict[Any, Any], now: dict[Any, Any]
    ) -> None:
        """Compare what microbatches wrote under a new key that the other did
        not see: a memo is equal in both.
        """
        for key in now.keys() - slot.base.keys():
            if key not in before:
                later = {each for each in self._entered if each[0] > turn[0] and each[1] == turn[1]}
                slot.missed.setdefault(key, {})[turn] = later
            elif now[key] is before[key]:
                continue
            for other, version in slot.turns.items():
                missed = turn in slot.missed.get(key, {}).get(other, ()) or (
                    key not in before and other[0] > turn[0]
                )
                if not missed or not isinstance(version.value, dict) or key not in version.value:
                    continue
                one, two = now[key], version.value[key]
                if _is_comparable(one) and _is_comparable(two) and not _equal(one, two):
                    raise self._error(slot, min(turn[0], other[0]), max(turn[0], other[0]), "after")

    def _where(self, slot: _Slot) -> str:
        return f"{self._title(slot)} is written where a microbatch that overlaps may have read it"

    def _watch(self, key: Key, value: Any) -> None:
        """Look at the containers in a value that is new."""
        for cell in containers.cells(value, package(type(self._modules[key[0]]))):
            if id(cell) not in self._unseen:
                self._cells.setdefault(
                    id(cell), _Slot((key[0], key[1], _NEW), cell, containers.content(cell))
                )

    def enter(self, turn: Turn) -> None:
        """Put into the containers what a microbatch sees."""
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
        """Return the place of an attribute; None: it is no business of the views."""
        found = _slots.get((id(module), name))
        if found is None:
            number = self._numbers.get(id(module))
            if number is None or name in _PRIVATE or self.turn() is None:
                return None
            if hasattr(getattr(type(module), name, None), "__set__"):
                return None  # a property: what it sets is an attribute of its own
            found = self._slot(module, (number, name))
        return found

    def _slot(self, module: nn.Module, key: Key) -> _Slot:
        kind, name = type(module), key[1]
        if (kind, name) not in self._replaced:
            default = inspect.getattr_static(kind, name, MISSING)
            default = default.default if isinstance(default, _Attribute) else default
            self._replaced[kind, name] = name in kind.__dict__
            setattr(kind, name, _Attribute(name, default))
        return _slots.setdefault((id(module), name), _Slot(key, module, _physical(module, name)))

    def hooks_of(self, number: int) -> int:
        """Return how many hooks a module has."""
        own = self._modules[number].__dict__
        return sum(len(own[kind]) for kind in HOOKS)

    def check_hooks(self, number: int) -> None:
        """Refuse a hook that was set in this step on a module of another rank,
        which does not have it.
        """
        if self.hooks_of(number) != self._hooks[number] and not variables.is_hooked(
            self._modules[number]
        ):
            raise StepError(
                f"a hook was registered in a step on module {self.title(number)},"
                " which is on another partition, where it would not run\n"
                "Register it before the step on all ranks, or place it with smp.set_partition."
            )

    def write(
        self, module: nn.Module, name: str, value: Any, put: Callable[[], None] | None = None
    ) -> None:
        """Set an attribute.

        Args:
            module: The module.
            name: The name of the attribute.
            value: Its value.
            put: Sets it; None: as any attribute is set.
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
            self.knows(module, name)
        if slot is not None:
            turn = self.turn()
            if new and turn is not None and not turn[1] and not _equal(value, slot.base):
                self._check_first(slot, turn)
            if new and type(value) in _NUMBERS and type(slot.base) in _NUMBERS:
                self.read(slot)  # that could not be seen: it counts, most likely
            self.note(slot, _physical(module, name))
            self._watch(slot.key, value)
            if isinstance(value, _WEAK):
                self._weak.append((slot.key[0], name, value))

    def updated(self, slot: _Slot) -> Any:
        """Return what the running microbatch updates in place of a running statistic.

        UNSENT: none runs here.
        """
        turn = self.turn()
        if turn is None or turn[1]:
            return UNSENT
        return self._running.buffer(slot.where, slot.key[1], turn[0])

    def _settle(self, slot: _Slot) -> None:
        """Put the updates of running statistics into the buffers, as a microbatch reads them.

        Raises:
            StepError: Microbatches overlap: those before this one may not have updated them yet.
        """
        if not self._in_turn:
            raise StepError(
                f"{self._title(slot)} was read where other microbatches update it\n{_REMEDY}"
            )
        self._running.settle(slot.where)
        self._is_late(self.turn(), self._where(slot))

    def read(self, slot: _Slot) -> Any:
        """Return what the running microbatch sees; UNSENT: none runs on this thread."""
        turn = self.turn()
        if turn is None:
            return UNSENT
        if slot.key[1] in running.BUFFERS and self._running.waits(slot.where):
            self._settle(slot)
        source, value = slot.find(turn)
        version = slot.turns.get(turn)
        if version is None:
            version = slot.turns[turn] = _Version()
        if source != turn and not version.through:
            version.through, version.seen, version.looked = True, value, next(self._time)
        version.reads += 1
        version.fetched = True
        if slot.in_place and not _in_backward():
            if turn in self._left:
                self._is_late(turn, self._where(slot))
            for later, other in slot.turns.items():
                if later[0] > turn[0] and later[1] == turn[1] and other.writes:
                    raise self._error(slot, later[0], turn[0], "before")
        if source is not None and slot.turns[source].writer != self.here():
            self._wanted.add(slot.key)
        if value is UNSENT:
            raise StepError(
                f"{self._title(slot)} was set on another partition: it cannot be sent, or was not"
                f" read on this one in the first steps\n{_REMEDY}"
            )
        return value

    def note(self, slot: _Slot, value: Any) -> None:
        """Note what the running microbatch wrote."""
        turn = self.turn()
        if turn is not None:
            self._note(slot, turn, value)

    def _note(self, slot: _Slot, turn: Turn, value: Any, stamp: Stamp | None = None) -> None:
        version = slot.turns.setdefault(turn, _Version())
        if len(slot.key) > 2 and not version.writes:
            version.through, version.seen = True, slot.find(turn)[1]
        if not version.writes or not _in_backward():
            version.shown = value
        version.value, version.time, version.writes = value, next(self._time), version.writes + 1
        version.own += stamp is None
        slot.late |= turn in self._left
        version.writer = self.here() if stamp is None else stamp
        if not turn[1]:
            sent = UNSENT if stamp is None and _has_new_object(slot, value) else value
            self._log.setdefault(turn[0], {})[slot.key] = stamp or (self.me, version.time), sent
        # A switch may be put back before the microbatch ends, and then all is
        # well: conflict() looks again.
        wrong = None if isinstance(value, bool | str | _Mark | None) else self._conflict(slot)
        if wrong is not None:
            raise wrong

    def conflict(self) -> StepError | None:
        """Return what is wrong: a microbatch saw what an earlier one wrote again afterwards."""
        wrong = next(
            filter(None, map(self._conflict, (*_slots.values(), *self._cells.values()))), None
        )
        return wrong or self._changed_unseen()

    def _changed_unseen(self) -> StepError | None:
        """Return what is wrong: something changed that is too large or too deep
        to be looked at all the time.
        """
        for key, cell, before in self._unseen.values():
            if id(cell) not in self._cells and not containers.same(
                before, containers.content(cell)
            ):
                return StepError(
                    f"attribute {key[1]!r} of module {self.title(key[0])} has more than"
                    f" {containers.LARGE} items or {_MOST} containers: what is in it is looked at"
                    " only if it changes in the first step of a step function, and it changed in a"
                    " later one\nKeep it smaller, or make it a buffer."
                )
        return None

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Say of an error of torch's in a backward pass which parameter was written in this step,
        or which container keeps a tensor whose graph may have ended.
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
            slots = [
                slot
                for slot in self._cells.values()
                if any(_differentiable(v.value) for v in slot.turns.values())
            ]
            if type(error) is not RuntimeError or not slots:
                raise
            raise StepError(
                f"{self._title(slots[0])} keeps a tensor that needs a gradient,"
                f" whose graph may have ended: {error}\n"
                "Detach it, or take it out when it is no longer used."
                " Or place the modules that use it on one partition with smp.set_partition."
            ) from error

    def _written_parameter(self) -> str | None:
        """Return words for a parameter of this rank that was written since the
        step began, or None.
        """
        for number, name, parameter, version in self._parameters:
            if parameter._version != version:  # noqa: SLF001
                return f"parameter {name!r} of module {self.title(number)}"
        return None

    def _conflict(self, slot: _Slot) -> StepError | None:
        if len(slot.turns) > 1:
            for turn, version in slot.turns.items():
                if not version.through:
                    continue
                earlier = [
                    (*key, each)
                    for key, each in slot.turns.items()
                    if each.writes and key[0] < turn[0]
                ]
                if slot.in_place:
                    wrong = any(
                        each.time > version.looked and copy == turn[1] for _, copy, each in earlier
                    )
                elif len(slot.key) > 2 and version.sent is not MISSING:
                    wrong = _replaces(version.sent, slot.find(turn, own=False)[1])
                elif len(slot.key) > 2:
                    now = slot.find(turn, own=False)[1]
                    wrong = not containers.same(now, version.seen) and _shares(
                        version.value, version.seen, slot.base
                    )
                else:
                    wrong = not _equal(slot.find(turn, own=False)[1], version.seen)
                if wrong and not slot.counts():
                    return self._error(
                        slot, max(number for number, *_ in earlier), turn[0], "after"
                    )
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
        """Return the stamps of what a microbatch has written so far, as this rank knows."""
        return frozenset(stamp for stamp, _ in self._log.get(microbatch, {}).values())

    def pack(
        self,
        microbatch: int,
        peer: int,
        *,
        copy: bool = False,
        held: frozenset[Stamp] | None = None,
    ) -> tuple[StateHeader, list[Any]]:
        """Return what another rank has to know of a microbatch.

        Args:
            microbatch: The microbatch.
            peer: The other rank.
            copy: It is for the script's copy of the microbatch there.
            held: What that rank has already; None: what was sent to it, but for
                tensors with a gradient.
        """
        if not copy:
            self._share((microbatch, False))
        wanted: tuple[Key, ...] = ()
        if self._told.get(peer, 0) < len(self._wanted):
            self._told[peer], wanted = len(self._wanted), tuple(self._wanted)
        late = max(len(self._changed_in), self._told_changed)
        if not self._log:
            return EMPTY_HEADER._replace(
                wanted=wanted, late=late
            ) if wanted or late else EMPTY_HEADER, []
        known = self._known.setdefault((peer, copy), set())
        writes, values = [], []
        for number in (
            [microbatch] if copy else sorted(each for each in self._log if each <= microbatch)
        ):
            for key, (stamp, value) in self._log[number].items() if number in self._log else ():
                if self._stays(key):
                    continue
                has = stamp in (known if held is None or number < microbatch else held)
                if has and (
                    number < microbatch or held is not None or copy or not _differentiable(value)
                ):
                    continue
                if number < microbatch and _differentiable(value):
                    continue
                idle = (
                    not self._learns
                    and len(key) == 2
                    and key not in self._wanted
                    and not isinstance(value, _PLAIN)
                )
                if idle and has:
                    continue
                known.add(stamp)
                writes.append((key, stamp, number))
                sent = self._named(key, value)
                values.append(UNSENT if idle or not _sendable(sent) else sent)
        if not writes and not wanted and not late and held is None and microbatch not in self._log:
            return EMPTY_HEADER, []
        return StateHeader(tuple(writes), self.held(microbatch), wanted, late=late), values

    def _named(self, key: Key, value: Any) -> Any:
        """Return what was written, with a name for each container in it that
        the other rank has, too.
        """

        def named(item: Any) -> Any:
            known = None if isinstance(item, _PLAIN) else self._keys.get(id(item))
            return item if known is None or known == key else _Known(known)

        if len(key) == 2 or isinstance(value, _Mark):
            return named(value)
        return (
            [*map(named, value)]
            if isinstance(value, list)
            else {name: named(item) for name, item in value.items()}
        )

    def _found(self, value: Any, key: Key) -> Any:
        """Return what came from another rank, with this rank's own containers
        in the place of their names.
        """

        def found(item: Any) -> Any:
            if not isinstance(item, _Known):
                return item
            own = self._resolve(item.key)
            if own is None:
                raise StepError(
                    f"attribute {item.key[1]!r} of module {self.title(item.key[0])} is not the same"
                    f" on two ranks, and was written\n{_REMEDY}"
                )
            return containers.held(own)

        if len(key) == 2 or isinstance(value, _Mark):
            return found(value)
        return (
            [*map(found, value)]
            if isinstance(value, list)
            else {name: found(item) for name, item in value.items()}
        )

    def old(self, microbatch: int) -> set[int]:
        """Return the identities of the tensors that containers have kept from before this step."""
        found: set[int] = set()
        for key in self._log.get(microbatch, {}):
            slot = self._cells.get(id(self._places.get(key)))
            if slot is not None:
                found.update(map(id, tensors_in(list(containers.items(slot.base)))))
        return found

    def _share(self, turn: Turn) -> None:
        """Take along the containers that modules of several ranks hold, as the
        microbatch sees them.
        """
        for slot in self._cells.values() if self._shared else ():
            if slot.key not in self._shared or turn in slot.turns:
                continue
            if _is_far(slot.key, slot.where) and not slot.changed and slot.key not in self._hot:
                continue  # a large table, equal on all ranks
            if all(map(_lasts, containers.items(slot.installed))):
                self._note(slot, turn, slot.installed)
                slot.turns[turn].sent = slot.installed

    def unpack(self, turn: Turn, notes: StateHeader, values: Sequence[Any], peer: int) -> None:
        """Note what another rank wrote."""
        self._wanted.update(notes.wanted)
        if notes.late:
            self._late.setdefault(self._function, "")
            self._told_changed = max(self._told_changed, notes.late)
        known, microbatch = self._known.setdefault((peer, turn[1]), set()), turn[0]
        for (key, stamp, number), value in zip(notes.writes, values, strict=True):
            known.add(stamp)
            turn, value = (number, turn[1]), self._found(value, key)
            if self._log.get(number, {}).get(key, (None,))[0] == stamp and not _differentiable(
                value
            ):
                if not turn[1]:
                    continue
                value = self._log[number][key][1]  # the same objects, as this rank has them already
            where = self._resolve(key)
            if where is None:
                continue
            if len(key) == 2:
                slot = self.slot(where, key[1])
                if slot is not None:
                    if value is not UNSENT:
                        _put(where, key[1], value)
                        self.knows(where, key[1])
                    self._note(slot, turn, value, stamp)
                    slot.turns[turn].fetched = False
                    self._watch(key, value)
                continue
            if (
                isinstance(where, (list, collections.deque)) != isinstance(value, list)
                and value is not UNSENT
            ):
                self._differs(key)
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
            before = cell.find(turn)[1]
            value = _kept(before, value)
            cell.changed = cell.changed or _remains(before) != _remains(value)
            if number == microbatch and not turn[1] and _remains(before) != _remains(value):
                self._change(cell, turn, before, value, backward=False)
            containers.assign(where, value)
            cell.installed = value
            self._note(cell, turn, value, stamp)

    def _differs(self, key: Key) -> None:
        """Say once that ranks hold another kind of object: transformers'
        save_pretrained writes to one rank's.
        """
        if key not in self._unlike:
            self._unlike.add(key)
            what = f"attribute {key[1]!r} of module {self.title(key[0])}"
            _log.warning(
                "%s: something in it is of another kind on another rank; changes of it stay there",
                what,
            )

    def written(self, microbatch: int) -> dict[Key, tuple[Stamp, Any]]:
        """Return what a microbatch has written so far."""
        return dict(self._log.get(microbatch, ()))

    def restore(self, turn: Turn, before: Mapping[Key, tuple[Stamp, Any]]) -> None:
        """Put back, after a remote call, what that did not write: a call back
        to this rank brought copies of it.
        """
        log = self._log.get(turn[0], {})
        for key, (stamp, value) in before.items():
            if log[key][0] != stamp or log[key][1] is value:
                continue
            log[key] = stamp, value
            where = self._resolve(key)
            slot = _slots.get((id(where), key[1])) if len(key) == 2 else self._cells.get(id(where))
            if slot is not None:
                slot.turns[turn].value = slot.turns[turn].shown = slot.installed = value
                if len(key) == 2:
                    _put(where, key[1], value)
                    self.knows(where, key[1])
                else:
                    containers.assign(where, value)

    def unread(self, turn: Turn, notes: StateHeader, values: Sequence[Any], used: Any) -> set[int]:
        """Return the identities of the tensors in values that came from another
        rank, and were not read since.

        Args:
            turn: The microbatch.
            notes: What came.
            values: The values.
            used: What came otherwise, and may have the same tensors in it.
        """
        found: set[int] = set()
        others = [used]
        for (key, _, number), value in zip(notes.writes, values, strict=True):
            slot = (
                _slots.get((id(self._modules[key[0]]), key[1]))
                if len(key) == 2 and number == turn[0]
                else None
            )
            version = None if slot is None else slot.turns.get(turn)
            if version is not None and not version.fetched and not isinstance(value, _PLAIN):
                found.update(map(id, tensors_in(value)))
            elif not isinstance(value, _PLAIN):
                others.append(value)
        return found - set(map(id, tensors_in(others))) if found else found

    def lent(self, result: Any) -> tuple[int, ...]:
        """Return the numbers of the tensors and containers in a result that modules keep."""
        if isinstance(result, torch.Tensor):
            return (0,) if id(result) in self._kept else ()
        found = []
        for number, each in enumerate(_inside(result)):
            if id(each) in self._cells or id(each) in self._kept:
                found.append(number)
        return tuple(found)

    def borrow(self, result: Any, numbers: Sequence[int], title: str) -> None:
        """Look at what of a result its module keeps: whoever writes to it is told."""
        inside = _inside(result) if numbers else ()
        self._lent += [
            (title, inside[number], containers.before(inside[number])) for number in numbers
        ]

    def forward(
        self, turn: Turn, notes: StateHeader, values: Sequence[Any], idle: set[int]
    ) -> None:
        """Note what another rank has read of what was sent to it."""
        for (key, _, _), value in zip(notes.writes, values, strict=True):
            slot = _slots.get((id(self._modules[key[0]]), key[1])) if len(key) == 2 else None
            if slot is not None and turn in slot.turns and not isinstance(value, _PLAIN):
                slot.turns[turn].fetched |= any(id(each) not in idle for each in tensors_in(value))

    def _stays(self, key: Key) -> bool:
        """Return whether a write is no business of other ranks."""
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
        for name, value in _roots(module, self._global_state):
            if name == key[1] and key[-1] == _LEAF:
                leaf = next(
                    itertools.islice(containers.leaves(value, package(type(module))), key[2], None),
                    None,
                )
                return None if leaf is None else containers.Written.of(leaf)
            if name == key[1]:
                return next(
                    itertools.islice(containers.cells(value, package(type(module))), key[2], None),
                    None,
                )
        return None

    def _look_inside(self) -> Iterator[_Leaf]:
        """Yield what modules hold that is no container and can be written in place.

        What modules of several ranks hold is looked at, too: a write would stay on this rank. So
        would one to a tensor in an attribute of a module of another rank.
        """
        found: dict[int, _Leaf] = {}
        weights = {id(each) for module in self._modules for each in module._parameters.values()}  # noqa: SLF001
        for number, module in enumerate(self._modules):
            mine = self._owner[number] == self.me
            own = module.__dict__
            named = list(_roots(module, self._global_state))
            if mine and self._in_turn:
                named += [*own["_parameters"].items(), *own["_buffers"].items()]
            for name, value in named:
                for place, each in enumerate(containers.leaves(value, package(type(module)))):
                    # What a step writes into the weights of a teacher counts, too.
                    of_others = isinstance(each, nn.Parameter) and id(each) not in weights
                    if not self._in_turn and not (_is_cheap(each) or of_others):
                        continue
                    if not mine and not _is_shared(each):
                        continue
                    held = found.setdefault(id(each), _Leaf((number, name, place, _LEAF), each))
                    held.elsewhere |= not mine
                    held.direct |= each is value and (name in own or name in own["_buffers"])
        # torch counts no write to a tensor's `data`, or to an array of its memory.
        uncounted = any(map(self._global_state.reads, ("data", "numpy")))
        for leaf in found.values():
            self._warn_of_size(leaf)
            leaf.by_values = self._in_turn or (uncounted and leaf.travels())
            leaf.state = leaf.now()
            yield leaf

    def _warn_of_size(self, leaf: _Leaf) -> None:
        """Say once that an array is so large that writes to it are not seen."""
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

    def _look(self) -> Iterator[tuple[Key, Any]]:
        """Yield the containers that modules hold, each once."""
        seen: dict[int, tuple[int, Key]] = {}
        for number, module in enumerate(self._modules):
            for name, value in _roots(module, self._global_state):
                for place, cell in enumerate(containers.cells(value, package(type(module)))):
                    owner, key = seen.setdefault(
                        id(cell), (self._owner[number], (number, name, place))
                    )
                    # All ranks have the same at first.
                    alike = isinstance(cell, containers.Settings | containers.Local)
                    if owner != self._owner[number] and not alike:
                        self._shared.add(key)
                    elif key == (number, name, place):
                        yield key, cell


_log = logging.getLogger("smdistributed.modelparallel")
_NEW = "new"
"""In the place of the way to a container that was made in the present step: it
goes along with its attribute.
"""
_LARGEST_PARAMETER = 1 << 18
"""Bytes of a frozen parameter whose values are compared, as torch does not count all writes."""
_LEAF = "leaf"
"""At the end of the key of a tensor, an array or another object that is no container."""
_MOST = 256
"""The containers of one attribute that are compared whenever a microbatch ends or waits.

Others are after each step.
"""
_REMEDY = (
    'Keep it in a local variable, or set "active_microbatches" to 1: then microbatches run one'
    " after another. Or place the modules that use it on one partition with smp.set_partition."
)


_FASTER = (
    "Equal to one process, but slower. Keep it in a local variable, or place the modules that use"
    " it on one partition with smp.set_partition."
)


def _is_far(key: Key, cell: Any) -> bool:
    """Return whether it would cost too much to look at a container whenever a
    microbatch ends or waits.
    """
    large = isinstance(cell, list | dict | set | collections.deque) and len(cell) > containers.LARGE
    return key[2] >= _MOST or large


def _is_cheap(leaf: Any) -> bool:
    """Return whether it costs little to see that something was written in
    place, whenever a microbatch waits.
    """
    if isinstance(leaf, nn.Parameter):
        return False
    kinds = (torch.Tensor, bytearray, array.array, itertools.count, types.GeneratorType)
    return isinstance(leaf, kinds) or containers.is_array(leaf)


def _is_shared(leaf: Any) -> bool:
    """Return whether a write matters to modules of other ranks.

    Each rank has its own generators of random numbers.
    """
    return _is_cheap(leaf) or isinstance(leaf, nn.Parameter)


@dataclass
class _Leaf:
    """What is no container, and can be written in place: a tensor, an array, a generator.

    Attributes:
        key: The number of a module that holds it, the name of the attribute, and its place in that.
        value: The object.
        elsewhere: A module of another rank holds it.
        direct: It is an attribute of a module, so that reads of it are seen.
        writer: The microbatch that wrote it last.
        visit: What that ran then, and how many calls of other ranks it had made.
        by_values: The values of a tensor are compared, and not only its version.
        state: What was seen of it last.
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
        """Return whether its values go to other ranks, where microbatches run in turn.

        A tensor that only its owner has in an attribute goes as that attribute does. A buffer
        stays, and what needs a gradient cannot go.
        """
        if isinstance(
            self.value, nn.Parameter | itertools.count | types.GeneratorType
        ) or not _is_cheap(self.value):
            return False
        if isinstance(self.value, torch.Tensor) and (
            self.value.requires_grad or self.value.is_inference()
        ):
            return False
        return self.elsewhere or not self.direct

    def now(self) -> Any:
        """Return what is seen of it now. The same object as before: it was not written."""
        if isinstance(self.value, torch.Tensor) and not self.by_values:
            now = None if self.value.is_inference() else self.value._version  # noqa: SLF001
            return self.state if now == self.state else now
        # A copy of each frozen weight would cost too much memory.
        frozen = isinstance(self.value, nn.Parameter)
        limit = _LARGEST_PARAMETER if frozen else containers.LARGEST
        return containers.state(self.value, self.state, limit)


def _held(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module, and its buffers."""
    own = module.__dict__
    return {
        n: v
        for n, v in (*own.items(), *own["_buffers"].items())
        if n not in _PRIVATE and not n.startswith("_smp")
    }


def _roots(module: nn.Module, outside: GlobalState) -> Iterator[tuple[str, Any]]:
    """Yield what a module holds, with names: its attributes, and what its hooks have in hand."""
    for name, value in list(module.__dict__.items()):
        if type(value) in containers.ATOMS or name in _PRIVATE or name.startswith("_smp"):
            continue
        yield name, value
    yield from outside.of(module)
    for kind in HOOKS:
        for number, hook in enumerate(list(module.__dict__[kind].values())):
            holder = getattr(hook, "__self__", None)
            if isinstance(holder, nn.Module):
                holder = tuple(
                    value for name, value in holder.__dict__.items() if name not in _PRIVATE
                )
            held = [getattr(hook, "args", ()), getattr(hook, "keywords", None), holder]
            held += containers.enclosed(hook)
            yield f"{kind}[{number}]", tuple(held)


def _inside(value: Any) -> list[Any]:
    return [*tensors_in(value), *containers.cells(value)]


def _physical(module: nn.Module, name: str) -> Any:
    own = module.__dict__
    return own[name] if name in own else own["_buffers"].get(name, MISSING)


def _put(module: nn.Module, name: str, value: Any) -> None:
    own = module.__dict__
    if name in own["_buffers"]:
        own["_buffers"][name] = value
    elif value is MISSING:
        own.pop(name, None)
    elif value is not UNSENT:
        own[name] = value


def _equal(one: Any, other: Any) -> bool:
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


def _kept(before: Any, now: Any) -> Any:
    """Return a content that came from another rank, with the objects before in
    the place of equal ones.
    """
    if isinstance(before, list) and isinstance(now, list):
        pairs = itertools.zip_longest(before[: len(now)], now, fillvalue=MISSING)
        return [one if _equal(one, other) else other for one, other in pairs]
    if isinstance(before, dict) and isinstance(now, dict):
        return {
            key: before[key] if key in before and _equal(before[key], item) else item
            for key, item in now.items()
        }
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


def _lasts(item: Any) -> bool:
    """Return whether an item is of use to another microbatch, or in another step."""
    return isinstance(item, _PLAIN) or (isinstance(item, torch.Tensor) and not item.requires_grad)


def _carried(value: Any, base: Any) -> Any:
    """Return a content without what only its own microbatch can use: tensors
    whose gradients belong to its backward.
    """
    old = {id(item) for item in containers.items(base)}

    def stays(item: Any) -> bool:
        return not isinstance(item, torch.Tensor) or not item.requires_grad or id(item) in old

    if all(map(stays, containers.items(value))):
        return value
    if isinstance(value, list):
        return [item for item in value if stays(item)]
    return {
        key: item if stays(item) else base[key]
        for key, item in value.items()
        if stays(item) or key in base
    }


def _remains(content: Any) -> list[Any]:
    """Return what of a content another microbatch could read, so that two can be compared."""
    pairs = enumerate(content) if isinstance(content, list) else content.items()
    return [
        (key, type(item), item if isinstance(item, _PLAIN) else id(item))
        for key, item in pairs
        if not _differentiable(item)
    ]


def _adds(before: Any, now: Any) -> bool:
    """Return whether a dictionary only got new keys, which are for no number:
    what is computed once is kept so.
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
    """Return whether a plain value that a container had is another one now."""
    if isinstance(before, list) and isinstance(now, list):
        pairs = list(zip(before, now, strict=False))
    elif isinstance(before, dict) and isinstance(now, dict):
        pairs = [(item, now[key]) for key, item in before.items() if key in now]
    else:
        return True
    return any(
        one is not other and isinstance(one, _PLAIN) and not _equal(one, other)
        for one, other in pairs
    )


def _grows(before: Any, now: Any) -> bool:
    """Return whether a number was counted up. A sum of others cannot be told from an average."""
    return type(before) is type(now) is int and now >= before


def _shares(value: Any, before: Any, base: Any) -> bool:
    """Return whether a content was made from another one: it has an item that
    was new in that, and no number.
    """
    old = {id(item) for item in containers.items(base)}
    new = {
        id(item)
        for item in containers.items(before)
        if id(item) not in old and not isinstance(item, _PLAIN)
    }
    return any(id(item) in new for item in containers.items(value))


def _added(base: Any, writers: Sequence[tuple[Any, Any]]) -> Any:
    """Return the content after writers, each with what it left and had seen:
    numbers and appended items add up.
    """
    value = writers[-1][0]
    if isinstance(value, list):
        if all(containers.same(left[: len(seen)], seen) for left, seen in writers):
            return [*base, *(item for left, seen in writers for item in left[len(seen) :])]
        return value

    def number(content: Any, key: Any) -> Any:
        found = content.get(key, 0)
        return found if type(found) in _NUMBERS else None

    total = dict(value)
    for key in [key for key, item in value.items() if type(item) in _NUMBERS]:
        parts = [number(base, key)]
        for left, seen in writers:
            ours, theirs = number(left, key), number(seen, key)
            parts.append(None if ours is None or theirs is None else ours - theirs)
        if None not in parts:
            total[key] = sum(parts)
    return total


def _has_new_object(slot: _Slot, value: Any) -> bool:
    """Return whether a variable or an attribute of a class got an object in
    this step: other ranks have none for it.
    """
    if not isinstance(slot.where, containers.Names) or not isinstance(value, dict):
        return False
    old = set(map(id, slot.base.values()))
    return any(isinstance(each, containers.Held) and id(each) not in old for each in value.values())


def _differentiable(value: Any) -> bool:
    return not isinstance(value, _PLAIN) and any(t.requires_grad for t in tensors_in(value))


def _sendable(value: Any) -> bool:
    if isinstance(value, (*_PLAIN, _Mark)) or type(value) in (torch.Tensor, nn.Parameter):
        return True
    return not isinstance(flatten(value)[0].data, Exception)
