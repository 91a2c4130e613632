"""Run a script that insists on CUDA on a machine without it: ``SMP_CPU_EMULATION=1``.

A cuda device is read as the CPU wherever torch is given one, and what scripts ask of ``torch.cuda``
is answered. The results are those of a CPU; nothing is as fast, and a memory figure says nothing.
It is for tests, and to try out a job.

The libraries themselves ask ``cuda_is_available``, which is the machine's own answer.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import time
import types
import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from torch.overrides import TorchFunctionMode

from .environment import ranks_of

VARIABLE = "SMP_CPU_EMULATION"
"""The environment variable that asks for the emulation with the value 1."""

cuda_is_available: Callable[[], bool] = torch.cuda.is_available
"""Whether this machine has CUDA, emulation or not."""

NAME = "CPU that stands in for a CUDA device"

DTYPES = ("Bool", "Byte", "Char", "Short", "Int", "Long", "Half", "BFloat16", "Float", "Double")

NOTHING = (
    "init",
    "synchronize",
    "empty_cache",
    "ipc_collect",
    "manual_seed",
    "manual_seed_all",
    "seed",
    "seed_all",
    "set_rng_state",
    "set_rng_state_all",
    "set_stream",
    "set_per_process_memory_fraction",
    "reset_peak_memory_stats",
    "reset_accumulated_memory_stats",
    "reset_max_memory_allocated",
    "reset_max_memory_cached",
)
"""Functions of ``torch.cuda`` that do nothing."""

_installed = False


def install_if_asked() -> None:
    """Install the emulation where the environment asks for it and the machine has no CUDA."""
    if os.environ.get(VARIABLE) == "1" and not _installed and not cuda_is_available():
        install()


def install() -> None:
    """Put the emulation in place, in this process and this thread.

    A second time it does nothing.
    """
    global _installed
    if _installed:
        return
    _installed = True
    _answer_for_cuda()
    _map_devices()
    # True of every loader of such a script, and of no interest.
    warnings.filterwarnings(
        "ignore", message=".*'pin_memory' argument is set as true but no accelerator is found"
    )
    # Torch keeps modes for each thread: threadstate.py gives this one to the threads of a step.
    _CudaAsCpu().__enter__()  # type: ignore[no-untyped-call]


class _CudaAsCpu(TorchFunctionMode):
    """Gives torch's functions the CPU for every cuda device."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("cuda", "pin_memory"):
            return args[0]
        if func is torch.device:
            return _device(*args, **(kwargs or {}))
        if name == "to" and len(args) > 1 and type(args[1]) is int:
            args = (args[0], torch.device("cpu"), *args[2:])
        return func(*map(_cpu, args), **_cpu_names(kwargs or {}))


def _cpu(value: Any) -> Any:
    """Return the CPU for a cuda device, and everything else as it is."""
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    return (
        "cpu"
        if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:"))
        else value
    )


def _cpu_names(values: dict[str, Any]) -> dict[str, Any]:
    # The number of a device, as an int, is that of a cuda device.
    return {
        key: torch.device("cpu") if key == "device" and type(value) is int else _cpu(value)
        for key, value in values.items()
    }


def _device(*args: Any, **kwargs: Any) -> torch.device:
    """Return ``torch.device(...)``, and the CPU without an index for a cuda
    device: that is what tensors have.
    """
    first = args[0] if args else kwargs.get("type", kwargs.get("device"))
    cuda = type(first) is int or _cpu(first) is not first
    return torch.device("cpu") if cuda else torch.device(*args, **kwargs)


def _answering(value: object) -> Callable[..., Any]:
    """Return a new function that does nothing else: torch's compiler refuses
    one function under two names.
    """
    return lambda *_args, **_kwargs: value


class _Stream:
    """A stream of work that is done at once."""

    device = torch.device("cpu")
    cuda_stream = 0
    priority = 0
    query = _answering(True)
    synchronize, wait_event, wait_stream = _answering(None), _answering(None), _answering(None)

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_exc: object) -> None:
        pass

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event()
        event.record()
        return event


class _Event:
    """A point in time."""

    query = _answering(True)
    synchronize, wait = _answering(None), _answering(None)

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self.seconds = 0.0

    def record(self, *_stream: object) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, end: _Event) -> float:
        """Return the milliseconds to a later event."""
        return (end.seconds - self.seconds) * 1000


class _OnDevice(contextlib.AbstractContextManager["_OnDevice", None]):
    """``with torch.cuda.device(0)``."""

    def __init__(self, device: object = None) -> None:
        self.idx = device

    def __exit__(self, *_exc: object) -> None:
        pass


def _answer_for_cuda() -> None:
    """Let ``torch.cuda`` answer as on a machine with one device for each process of the host."""
    page, pages = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PHYS_PAGES")
    device = types.SimpleNamespace(
        name=NAME,
        major=8,
        minor=0,
        total_memory=page * pages,
        multi_processor_count=os.cpu_count() or 1,
        uuid="",
    )
    current = [0]

    def set_device(device: Any) -> None:
        index = device if type(device) is int else torch.device(device).index
        current[0] = index or 0

    def stream(given: object) -> _Stream:
        return given if isinstance(given, _Stream) else _Stream()

    def state(*_args: Any) -> torch.Tensor:
        return torch.get_rng_state()

    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "is_bf16_supported": lambda *_args, **_kwargs: True,
        "device_count": lambda: max(ranks_of(os.environ).local_size, 1),
        "set_device": set_device,
        "current_device": lambda: current[0],
        "device": _OnDevice,
        "get_device_name": lambda *_args: NAME,
        "get_device_capability": lambda *_args: (device.major, device.minor),
        "get_device_properties": lambda *_args: device,
        "can_device_access_peer": lambda *_args: False,
        "mem_get_info": lambda *_args: (page * os.sysconf("SC_AVPHYS_PAGES"), page * pages),
        "memory_stats": lambda *_args: defaultdict(int),
        "memory_summary": lambda *_args, **_kwargs: "",
        "memory_snapshot": lambda *_args: [],
        "get_rng_state": state,
        "get_rng_state_all": lambda: [state()],
        "initial_seed": lambda: torch.initial_seed(),
        "Stream": _Stream,
        "Event": _Event,
        "stream": stream,
        "current_stream": lambda *_args: _Stream(),
        "default_stream": lambda *_args: _Stream(),
    }
    # The compiler of PyTorch 2.4, which an optimizer imports, asks whether they
    # are of torch's own classes.
    with contextlib.suppress(ImportError, AttributeError):
        own: Any = importlib.import_module("torch._streambase")
        own._EventBase.register(_Event)  # noqa: SLF001
        own._StreamBase.register(_Stream)  # noqa: SLF001
    # What a script sets is the CPU's already, or there is nothing to set.
    for name in NOTHING:
        answers[name] = _answering(None)
    for name in ("memory_allocated", "memory_reserved", "memory_cached"):
        answers[name], answers[f"max_{name}"] = _answering(0), _answering(0)
    for dtype in DTYPES:
        answers[f"{dtype}Tensor"] = getattr(torch, f"{dtype}Tensor")
    for name, answer in answers.items():
        # Some are in a module below as well, and read from it.
        for place in (torch.cuda, torch.cuda.random, torch.cuda.memory, torch.cuda.streams):
            if place is torch.cuda or hasattr(place, name):
                setattr(place, name, answer)
    for name in ("range_push", "range_pop", "range_start", "range_end", "mark"):
        setattr(torch.cuda.nvtx, name, _answering(None))


def _map_devices() -> None:
    """Give the CPU to what takes a device and is not one of torch's overridable functions."""
    from torch.amp.autocast_mode import autocast
    from torch.amp.grad_scaler import GradScaler
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn import Module
    from torch.nn.parallel import DistributedDataParallel

    def with_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*map(_cpu, args), **_cpu_names(kwargs))

        return call

    def itself(each: Any, *_args: Any, **_kwargs: Any) -> Any:
        return each

    to = Module.to

    def module_to(module: Module, *args: Any, **kwargs: Any) -> Module:
        if args and type(args[0]) is int:
            args = (torch.device("cpu"), *args[1:])
        return to(module, *map(_cpu, args), **_cpu_names(kwargs))

    wrap = DistributedDataParallel.__init__

    @functools.wraps(wrap)
    def wrap_module(self: Any, module: Module, *args: Any, **kwargs: Any) -> None:
        # torch refuses devices, the first two arguments, for a module on the CPU.
        for name in ("device_ids", "output_device"):
            kwargs.pop(name, None)
        wrap(self, module, None, None, *args[2:], **kwargs)

    cast = autocast.__init__

    @functools.wraps(cast)
    def cast_on_cpu(
        self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any
    ) -> None:
        # A CPU has few operations in float16.
        cast(
            self,
            _cpu(device_type),
            torch.bfloat16 if dtype is torch.float16 else dtype,
            *args,
            **kwargs,
        )

    load = torch.load

    @functools.wraps(load)
    def load_to_cpu(file: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(map_location, dict):
            map_location = {_cpu(key): _cpu(value) for key, value in map_location.items()} | {
                "cuda:0": "cpu"
            }
        return load(file, "cpu" if map_location is None else _cpu(map_location), *args, **kwargs)

    fork = torch.random.fork_rng

    @functools.wraps(fork)
    def fork_cpu(
        _devices: object = None, enabled: bool = True, *_args: Any, **_kwargs: Any
    ) -> contextlib.AbstractContextManager[None]:
        return fork([], enabled)

    init_process_group, new_group = (
        torch.distributed.init_process_group,
        torch.distributed.new_group,
    )

    def with_gloo(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs.pop("device_id", None)
            return function(
                *map(_gloo, args), **{key: _gloo(value) for key, value in kwargs.items()}
            )

        return call

    for owner, name, replacement in (
        (Module, "to", module_to),
        (Module, "cuda", itself),
        (DistributedDataParallel, "__init__", wrap_module),
        (autocast, "__init__", cast_on_cpu),
        (GradScaler, "__init__", with_cpu(GradScaler.__init__)),
        (DeviceMesh, "__init__", with_cpu(DeviceMesh.__init__)),
        # It takes no stand-in for a stream.
        (torch.Tensor, "record_stream", _answering(None)),
        (torch.UntypedStorage, "cuda", itself),
        (torch.TypedStorage, "cuda", itself),
        (torch.random, "fork_rng", fork_cpu),
        (torch, "load", load_to_cpu),
        (torch, "set_default_device", with_cpu(torch.set_default_device)),
    ):
        setattr(owner, name, replacement)
    for function in (init_process_group, new_group):
        for place in (torch.distributed, torch.distributed.distributed_c10d):
            setattr(place, function.__name__, with_gloo(function))


def _gloo(value: Any) -> Any:
    """Return gloo for a backend that needs CUDA."""
    return (
        "gloo"
        if isinstance(value, str) and "nccl" in value.lower().replace(":", ",").split(",")
        else value
    )
