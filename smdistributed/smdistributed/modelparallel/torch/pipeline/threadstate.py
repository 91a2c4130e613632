"""The state of torch that belongs to a thread, and must follow the work to another thread or rank.

Gradient mode, inference mode and autocast are taken at each remote call and hold again where the
call is served. Function modes cannot travel: a served call runs under those of the serving rank's
own step, which runs the same script. So a call within a mode that the step did not begin with is
refused.
"""

from __future__ import annotations

import contextvars
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

# ruff: noqa: SLF001  torch has no public names for the stacks of modes of a thread.
_C: Any = torch._C
_cuda: Any = torch.cuda
_overrides: Any = torch.overrides

_DEVICES = ("cpu", "cuda")


class Flags(NamedTuple):
    """Modes of one thread.

    Attributes:
        grad: Whether operations are recorded for a backward pass.
        inference: Whether inference mode is on.
        autocast: Device and type of each autocast that is on.
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]


BACKWARD = Flags(True, False, ())
"""The flags of a backward pass."""


def capture() -> Flags:
    """Return the flags of this thread."""
    autocast = tuple(
        (d, torch.get_autocast_dtype(d)) for d in _DEVICES if torch.is_autocast_enabled(d)
    )
    return Flags(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast)


class ApplyFlags:
    """A context in which flags hold on this thread.

    Autograd runs CUDA nodes in the calling thread meanwhile: a backward pass that waits for another
    rank would block torch's one thread for a device, and with it all other backward passes.
    """

    def __init__(self, flags: Flags) -> None:
        self.flags = flags
        self._entered: list[Any] = []

    def __enter__(self) -> None:
        """Apply the flags."""
        wanted, now = self.flags, capture()
        self._entered.append(torch.autograd.set_multithreading_enabled(False))
        if wanted.inference != now.inference:
            self._enter(torch.inference_mode(wanted.inference))
        if wanted.autocast != now.autocast:
            # A cached cast may belong to the call that waits below this one.
            torch.clear_autocast_cache()
            types = dict(wanted.autocast)
            for device in {*types, *dict(now.autocast)}:
                self._enter(
                    torch.autocast(device, dtype=types.get(device), enabled=device in types)
                )
        if torch.is_grad_enabled() != wanted.grad:
            self._entered.append(torch.set_grad_enabled(wanted.grad))

    def _enter(self, manager: Any) -> None:
        manager.__enter__()
        self._entered.append(manager)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Return to the flags before."""
        while self._entered:
            self._entered.pop().__exit__(kind, error, trace)


class CallerThread:
    """What else the thread that called the step has: context variables,
    function modes, CUDA device and stream.

    Others take it over.

    Attributes:
        variables: Its context variables.
        started: Those that the next microbatch begins with.
    """

    def __init__(self) -> None:
        self.variables = contextvars.copy_context()
        self.started = self.variables.copy()
        self.modes: list[TorchFunctionMode] = list(_overrides._get_current_function_mode_stack())
        self.dispatch: list[Any] = list(_get_current_dispatch_mode_stack())
        self.hooks = _top_hooks()
        initialized: bool = _cuda.is_initialized()
        self.stream = torch.cuda.current_stream() if initialized else None

    def enter(self) -> None:
        """Give it to this thread."""
        for mode in self.modes:
            _overrides._push_mode(mode)
        if self.stream is not None:
            torch.cuda.set_stream(self.stream)  # sets the device, too

    def leave(self) -> None:
        """Leave the function modes on this thread."""
        for _ in self.modes:
            _overrides._pop_mode()

    def plain(self) -> bool:
        """Return whether this thread has no hooks or modes but these, so that a
        foreign call may run on it.
        """
        return (
            _C._len_torch_function_stack() == len(self.modes)
            and _C._len_torch_dispatch_stack() == 0
            and not _saved_tensors_hooks()
            and (self.stream is None or torch.cuda.current_stream() == self.stream)
        )

    def scope(self, tensors: Sequence[torch.Tensor]) -> str | None:
        """Return the name of a scope of this thread that a call of another rank would not be in.

        None: there is none.

        Those of torch's checkpointing and devices, and hooks that return what
        was saved, change nothing there.

        Args:
            tensors: Those that are given to the call.
        """
        function = (
            _overrides._get_current_function_mode_stack()
            if _C._len_torch_function_stack() != len(self.modes)
            else self.modes
        )
        dispatch = _get_current_dispatch_mode_stack() if _C._len_torch_dispatch_stack() else ()
        for mode in (*function, *dispatch):
            known = any(mode is each for each in (*self.modes, *self.dispatch))
            if not known and not type(mode).__module__.startswith(_HARMLESS):
                return type(mode).__name__
        hooks = _top_hooks() if torch.is_grad_enabled() else None
        if (
            hooks is None
            or hooks == self.hooks
            or str(getattr(hooks[0], "__module__", "")).startswith(_HARMLESS)
        ):
            return None
        return None if _keeps(hooks, tensors) else "saved_tensors_hooks"


_HARMLESS = (
    "torch.utils.checkpoint",
    "torch.utils._device",
    "torch.autograd.graph",
    "smdistributed.",
)
_get_top: Any = getattr(_C._autograd, "_top_saved_tensors_default_hooks", None)


def _top_hooks() -> tuple[Any, Any] | None:
    """Return the hooks that what autograd saves goes through.

    None too where torch does not say them.
    """
    return None if _get_top is None else _get_top(True)


def _keeps(hooks: tuple[Any, Any], tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether hooks return the values that were saved: tried with the
    largest tensor of a call.
    """
    floats = [
        tensor
        for tensor in tensors
        if tensor.is_floating_point() and tensor.layout is torch.strided
    ]
    if not floats:
        return True
    saved = max(floats, key=torch.Tensor.numel).detach().clone()
    pack, unpack = hooks
    with torch.no_grad():
        back = unpack(pack(saved.clone()))
    return isinstance(back, torch.Tensor) and torch.equal(back.to(saved.device, saved.dtype), saved)


def _saved_tensors_hooks() -> bool:
    """Return whether what autograd saves on this thread goes through hooks.
    torch refuses to disable them then.
    """
    try:
        with disable_saved_tensors_hooks("never shown"):
            return False
    except RuntimeError:
        return True
