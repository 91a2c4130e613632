"""Run a script that needs CUDA on a host without it: ``SMP_CPU_EMULATION=1``.

torch uses the CPU for every cuda device, and the functions of ``torch.cuda`` that scripts call
return plausible values. The results are those of a CPU. Speed and memory figures have no meaning.
The emulation is for tests, and to try out a job.

The libraries themselves call ``cuda_is_available``, which tells whether the host has CUDA.
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
"""The environment variable that turns the emulation on with the value 1."""

cuda_is_available: Callable[[], bool] = torch.cuda.is_available
"""Returns whether this host has CUDA, also while the emulation is on."""

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
    """Install the emulation if the variable is set and the host has no CUDA."""
    if os.environ.get(VARIABLE) == "1" and not _installed and not cuda_is_available():
        install()


def install() -> None:
    """Install the emulation in this process and this thread. A second call does nothing."""
    global _installed
    if _installed:
        return
    _installed = True
    _answer_for_cuda()
    _map_devices()
    # Every loader of such a script would cause this warning.
    warnings.filterwarnings(
        "ignore", message=".*'pin_memory' argument is set as true but no accelerator is found"
    )
    # torch has modes for each thread. threadstate.py applies this one to the threads of a step.
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
    """Return the CPU for a cuda device; any other value unchanged."""
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
        return "cpu"
    return value


def _cpu_names(values: dict[str, Any]) -> dict[str, Any]:
    """Return keyword arguments with the CPU for cuda devices."""
    mapped = {}
    for key, value in values.items():
        # An integer is the number of a cuda device.
        is_number = key == "device" and type(value) is int
        mapped[key] = torch.device("cpu") if is_number else _cpu(value)
    return mapped


def _device(*args: Any, **kwargs: Any) -> torch.device:
    """Return ``torch.device(...)``; for a cuda device the CPU without an index, as tensors have
    it.
    """
    first = args[0] if args else kwargs.get("type", kwargs.get("device"))
    if type(first) is int or _cpu(first) is not first:
        return torch.device("cpu")
    return torch.device(*args, **kwargs)


def _answering(value: object) -> Callable[..., Any]:
    """Return a new function that returns a value and does nothing.

    It is a new one each time, because torch's compiler refuses a function with two names.
    """
    return lambda *_args, **_kwargs: value


class _Stream:
    """A stream with work that is done at once."""

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
    """A point in time.

    Attributes:
        seconds: The time, as of `time.perf_counter`.
    """

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
    """Let ``torch.cuda`` answer as on a host with one device for each of its processes."""
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

    def stream(value: object) -> _Stream:
        return value if isinstance(value, _Stream) else _Stream()

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
    # The compiler of PyTorch 2.4, which an optimizer imports, tests for torch's own classes.
    with contextlib.suppress(ImportError, AttributeError):
        own: Any = importlib.import_module("torch._streambase")
        own._EventBase.register(_Event)  # noqa: SLF001
        own._StreamBase.register(_Stream)  # noqa: SLF001
    # These set a state that the CPU has already, or that does not exist.
    for name in NOTHING:
        answers[name] = _answering(None)
    for name in ("memory_allocated", "memory_reserved", "memory_cached"):
        answers[name], answers[f"max_{name}"] = _answering(0), _answering(0)
    for dtype in DTYPES:
        answers[f"{dtype}Tensor"] = getattr(torch, f"{dtype}Tensor")
    for name, answer in answers.items():
        # Some of them are in another module, too, and are called from there.
        for place in (torch.cuda, torch.cuda.random, torch.cuda.memory, torch.cuda.streams):
            if place is torch.cuda or hasattr(place, name):
                setattr(place, name, answer)
    for name in ("range_push", "range_pop", "range_start", "range_end", "mark"):
        setattr(torch.cuda.nvtx, name, _answering(None))


def _map_devices() -> None:
    """Replace the functions that take a device and are out of reach of a TorchFunctionMode."""
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

    def itself(value: Any, *_args: Any, **_kwargs: Any) -> Any:
        return value

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
        if dtype is torch.float16:
            dtype = torch.bfloat16  # a CPU has few operations in float16
        cast(self, _cpu(device_type), dtype, *args, **kwargs)

    load = torch.load

    @functools.wraps(load)
    def load_to_cpu(file: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if map_location is None:
            map_location = "cpu"
        elif isinstance(map_location, dict):
            map_location = {_cpu(key): _cpu(value) for key, value in map_location.items()}
            map_location["cuda:0"] = "cpu"
        return load(file, _cpu(map_location), *args, **kwargs)

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
            gloo_kwargs = {key: _gloo(value) for key, value in kwargs.items()}
            return function(*map(_gloo, args), **gloo_kwargs)

        return call

    for owner, name, replacement in (
        (Module, "to", module_to),
        (Module, "cuda", itself),
        (DistributedDataParallel, "__init__", wrap_module),
        (autocast, "__init__", cast_on_cpu),
        (GradScaler, "__init__", with_cpu(GradScaler.__init__)),
        (DeviceMesh, "__init__", with_cpu(DeviceMesh.__init__)),
        # The real one refuses a `_Stream`.
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
    """Return gloo for a backend with NCCL, such as "cpu:gloo,cuda:nccl"; other values unchanged."""
    if isinstance(value, str) and "nccl" in value.lower().replace(":", ",").split(","):
        return "gloo"
    return value
