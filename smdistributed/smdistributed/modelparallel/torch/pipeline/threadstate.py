"""The state of torch that belongs to a thread, and must follow the work to another thread or rank.

Gradient mode, inference mode and autocast are captured at each remote call and applied where the
call is served. Function modes cannot travel. A served call runs under the modes of the serving
rank's own step, which runs the same script. So a call within a mode that the step did not begin
with is refused.
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
    """Return the gradient mode, inference mode and autocast of this thread, as they are now."""
    autocast = tuple(
        (device, torch.get_autocast_dtype(device))
        for device in _DEVICES
        if torch.is_autocast_enabled(device)
    )
    return Flags(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast)


class ApplyFlags:
    """A context manager that applies flags to this thread.

    Within it autograd runs CUDA nodes in the calling thread. Otherwise a backward pass that waits
    for another rank would block torch's one thread for a device, and with it all other backward
    passes.
    """

    def __init__(self, flags: Flags) -> None:
        self.flags = flags
        self._entered: list[Any] = []

    def __enter__(self) -> None:
        """Apply the flags to this thread. Only modes that differ are entered.

        A change of autocast empties torch's cache of casted parameters.
        """
        flags, before = self.flags, capture()
        self._entered.append(torch.autograd.set_multithreading_enabled(False))
        if flags.inference != before.inference:
            self._enter(torch.inference_mode(flags.inference))
        if flags.autocast != before.autocast:
            # A cached cast may belong to the call that waits below this one on the stack.
            torch.clear_autocast_cache()
            dtypes = dict(flags.autocast)
            for device in {*dtypes, *dict(before.autocast)}:
                dtype = dtypes.get(device)
                self._enter(torch.autocast(device, dtype=dtype, enabled=device in dtypes))
        if torch.is_grad_enabled() != flags.grad:
            self._entered.append(torch.set_grad_enabled(flags.grad))

    def _enter(self, manager: Any) -> None:
        """Enter a context manager, which `__exit__` leaves."""
        manager.__enter__()
        self._entered.append(manager)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Restore the flags from before, the last one first.

        An error of the block is not caught.
        """
        while self._entered:
            self._entered.pop().__exit__(kind, error, trace)


class CallerThread:
    """More state of the thread that called the step: context variables, function modes, CUDA
    device and stream.

    The other threads of the step take this state over.

    Attributes:
        variables: Context variables of the thread.
        started: Context variables that the next microbatch begins with.
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
        """Apply the caller's function modes and CUDA stream to this thread."""
        for mode in self.modes:
            _overrides._push_mode(mode)
        if self.stream is not None:
            torch.cuda.set_stream(self.stream)  # sets the device, too

    def leave(self) -> None:
        """Remove the caller's function modes from this thread."""
        for _ in self.modes:
            _overrides._pop_mode()

    def has_only_caller_modes(self) -> bool:
        """Return whether the present thread has no other hooks or modes than the caller's.

        Then a call of another rank may run on this thread.

        Function modes are compared by number alone.
        """
        return (
            _C._len_torch_function_stack() == len(self.modes)
            and _C._len_torch_dispatch_stack() == 0
            and not _saved_tensors_hooks()
            and (self.stream is None or torch.cuda.current_stream() == self.stream)
        )

    def scope(self, tensors: Sequence[torch.Tensor]) -> str | None:
        """Return the name of a scope of this thread that would have no effect on a remote call.

        Modes of torch's checkpointing and of devices are allowed, and so are hooks that return the
        tensors which autograd saved.

        To find out what hooks of saved tensors do, they are called once with a copy of the largest
        argument (`_return_saved_values`).

        Args:
            tensors: The arguments of the call.

        Returns:
            For example ``"saved_tensors_hooks"``; None if there is no such scope.

        Raises:
            Exception: An error of such a hook.
        """
        # The stack is copied only if its length differs: this runs in each remote call.
        function_modes = self.modes
        if _C._len_torch_function_stack() != len(self.modes):
            function_modes = _overrides._get_current_function_mode_stack()
        dispatch_modes: Sequence[Any] = ()
        if _C._len_torch_dispatch_stack():
            dispatch_modes = _get_current_dispatch_mode_stack()
        of_caller = set(map(id, (*self.modes, *self.dispatch)))
        for mode in (*function_modes, *dispatch_modes):
            if id(mode) not in of_caller and not type(mode).__module__.startswith(
                _HARMLESS_MODULES
            ):
                return type(mode).__name__

        if not torch.is_grad_enabled():
            return None  # autograd saves no tensors
        hooks = _top_hooks()
        if hooks is None or hooks == self.hooks:
            return None
        if str(getattr(hooks[0], "__module__", "")).startswith(_HARMLESS_MODULES):
            return None
        if _return_saved_values(hooks, tensors):
            return None
        return "saved_tensors_hooks"


_HARMLESS_MODULES = (
    "torch.utils.checkpoint",
    "torch.utils._device",
    "torch.autograd.graph",
    "smdistributed.",
)
"""Beginnings of the Python modules of modes and hooks that need not reach another rank."""
_get_top: Any = getattr(_C._autograd, "_top_saved_tensors_default_hooks", None)


def _top_hooks() -> tuple[Any, Any] | None:
    """Return the pack and unpack hooks for the tensors that autograd saves.

    None without hooks, and where torch cannot tell.
    """
    if _get_top is None:
        return None
    hooks: tuple[Any, Any] | None = _get_top(True)
    return hooks


def _return_saved_values(hooks: tuple[Any, Any], tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether hooks return the saved values unchanged.

    The hooks are called, with a copy of the largest tensor of floats of a call. Without such a
    tensor True is returned.

    Args:
        hooks: (pack, unpack), as of torch.autograd.graph.saved_tensors_hooks.
        tensors: The arguments of the call.

    Raises:
        Exception: An error of a hook.
    """
    floats = []
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.layout is torch.strided:
            floats.append(tensor)
    if not floats:
        return True
    saved = max(floats, key=torch.Tensor.numel).detach().clone()
    pack, unpack = hooks
    with torch.no_grad():
        back = unpack(pack(saved.clone()))
    return isinstance(back, torch.Tensor) and torch.equal(back.to(saved.device, saved.dtype), saved)


def _saved_tensors_hooks() -> bool:
    """Return whether hooks for saved tensors are set on this thread.

    torch refuses to disable such hooks while they are set.

    The setting is as before when this returns.
    """
    try:
        with disable_saved_tensors_hooks("never shown"):
            return False
    except RuntimeError:
        return True
