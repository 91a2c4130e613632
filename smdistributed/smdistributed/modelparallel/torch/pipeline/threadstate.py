"""The state of torch that belongs to a thread, and must follow the work to another thread or rank.

Gradient mode, inference mode and autocast are captured at each remote call and applied where the
call is served. Function modes cannot travel. A served call runs under the modes of the serving
rank's own step, which runs the same script. So a call within a mode that the step did not begin
with is refused. Dispatch modes and hooks of saved tensors stay on their thread: a step, a remote
call or a backward pass within them is refused.
"""

from __future__ import annotations

import contextvars
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

    def find_scope(self) -> Scope | None:
        """Return a scope of this thread that would have no effect on another rank, or None.

        Function modes that the step began with hold on all ranks. Modes and hooks of torch's
        checkpointing, and modes of devices, are allowed.
        """
        # The stack is copied only if its length differs: this runs in each remote call.
        if _C._len_torch_function_stack() != len(self.modes):
            of_caller = set(map(id, self.modes))
            for mode in _overrides._get_current_function_mode_stack():
                if id(mode) not in of_caller and not _is_harmless(type(mode)):
                    return Scope(type(mode).__name__, may_surround_step=True)
        return find_thread_scope()


class Scope(NamedTuple):
    """A mode or hooks that a script has entered.

    Attributes:
        name: For example ``"saved_tensors_hooks"``.
        may_surround_step: Whether a step that begins within it runs under it on all ranks.
    """

    name: str
    may_surround_step: bool


def find_thread_scope() -> Scope | None:
    """Return a dispatch mode, or hooks of saved tensors, that hold on this thread alone, or None.

    Those of torch's checkpointing are allowed. What other hooks do is not tried: it may depend on
    the tensor.
    """
    if _C._len_torch_dispatch_stack():
        for mode in _get_current_dispatch_mode_stack():
            if not _is_harmless(type(mode)):
                return Scope(type(mode).__name__, may_surround_step=False)
    hooks = _top_hooks()
    if hooks is None or all(map(_is_harmless, hooks)):
        return None
    return Scope("saved_tensors_hooks", may_surround_step=False)


_HARMLESS_MODULES = (
    "torch.utils.checkpoint",
    "torch.utils._device",
    "torch.autograd.graph",
    "smdistributed.",
)
"""Beginnings of the Python modules of modes and hooks that need not reach another rank."""


def _is_harmless(code: Any) -> bool:
    """Return whether a class of modes, or a hook, need not reach another rank."""
    return str(getattr(code, "__module__", "")).startswith(_HARMLESS_MODULES)


_get_top: Any = getattr(_C._autograd, "_top_saved_tensors_default_hooks", None)


def _top_hooks() -> tuple[Any, Any] | None:
    """Return the pack and unpack hooks for the tensors that autograd saves.

    None without hooks, and where torch cannot tell.
    """
    if _get_top is None:
        return None
    hooks: tuple[Any, Any] | None = _get_top(True)
    return hooks


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
