"""The backend ``smddp`` of torch.distributed: NCCL for tensors on GPUs and gloo for those on CPUs.

``import torch`` (2.5 and later) calls ``autoload``, the entry point ``torch.backends``, in every
process. So nothing is loaded that torch has not loaded, nothing is set but in a job of smddp, and
there is no error: it would be a failed ``import torch``. This module does not import torch itself:
where it is imported first, torch would call a function that is not there yet.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import sys
from typing import Any

from trainworks_smdistributed.environment import complete

__all__ = ["NAME", "autoload", "register"]

NAME = "smddp"

_gloo_groups: list[Any] = []
"""gloo's groups of this process, so that Python has the last reference to each.

The thread that drops the last reference joins the threads of the group, and these may need the GIL
to free their tensors. torch's ``DistributedDataParallel`` drops its reference with the GIL held. If
that were the last one, the process would never end. Python drops its own reference without the GIL.
"""


def autoload() -> None:
    """Register the backend; in a job of smddp set the variables that the explicit import sets.

    In a job of smp offer the modules that are gone, too: a script may import `amp_C` before smp.
    An error is printed to standard error, and not raised.

    Variables of torch.distributed are set in the environment of a job of smddp.
    """
    try:
        register()
        if _is_job(os.environ.get("SM_FRAMEWORK_PARAMS", "")):
            complete(os.environ)
        if os.environ.get("SM_HP_MP_PARAMETERS"):
            from trainworks_smdistributed import legacy

            legacy.install()
    except Exception as error:  # noqa: BLE001  see above
        print(f"smdistributed: torch.distributed has no backend {NAME}: {error}", file=sys.stderr)


def register() -> None:
    """Register the backend with torch.distributed, and install the emulation of CUDA if its
    variable is set. A second call does nothing.

    The emulation replaces functions of torch.cuda in the process.
    """
    import torch.distributed as dist

    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    if os.environ.get("SMP_CPU_EMULATION") == "1":
        from trainworks_smdistributed import emulation

        # Without this function the module is still being imported, and has imported torch: then
        # its importer installs the emulation.
        if hasattr(emulation, "install_if_asked"):
            emulation.install_if_asked()


def _is_job(text: str) -> bool:
    """Return whether the launcher's parameters, a JSON object, are those of a job with smddp."""
    try:
        parameters = json.loads(text or "{}")
    except ValueError:
        return False
    return (
        isinstance(parameters, dict)
        and parameters.get("sagemaker_distributed_dataparallel_enabled") is True
    )


def _create(options: Any, nccl_options: Any) -> Any:
    """Return the process group of a script's ``backend="smddp"``, or the only backend of it.

    torch calls this. Without GPUs it is gloo's backend, else a group with gloo and NCCL.

    gloo's group is kept in the module-level list ``_gloo_groups``, and `_drop_groups` runs at the
    end of the process.

    Args:
        options: Torch's options of the group: store, rank, size, time limit.
        nccl_options: ``pg_options`` of the script, or None.

    Raises:
        RuntimeError: The ranks cannot connect (torch's own error).
    """
    import torch.distributed as dist

    from trainworks_smdistributed import emulation

    store, rank, size = options.store, options.group_rank, options.group_size
    gloo = dist.ProcessGroupGloo(store, rank, size, timeout=options.timeout)
    if not (emulation.cuda_is_available() and dist.is_nccl_available()):
        if not dist.is_initialized():
            _gloo_groups.clear()  # those of a job before this one in the same process
        _gloo_groups.append(gloo)
        atexit.unregister(_drop_groups)
        atexit.register(_drop_groups)
        return gloo
    nccl_options = nccl_options or dist.ProcessGroupNCCL.Options()
    nccl_options._timeout = options.timeout  # noqa: SLF001  torch does the same for its own groups
    nccl_options.global_ranks_in_group = options.global_ranks_in_group
    nccl_options.group_name = options.group_id
    nccl = dist.ProcessGroupNCCL(
        dist.distributed_c10d.PrefixStore("cuda", store), rank, size, nccl_options
    )
    kinds = dist.ProcessGroup.BackendType
    return _both(options, ("cpu", kinds.GLOO, gloo), ("cuda", kinds.NCCL, nccl))


def _drop_groups() -> None:
    """End torch's process group, and gloo's threads, while the interpreter lives.

    Threads that were left to the end of the process aborted it about once in a hundred times. The
    garbage is collected, because ``DistributedDataParallel`` keeps its group in a reference cycle.

    The module-level list is emptied.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
    _gloo_groups.clear()


def _both(options: Any, *backends: tuple[str, Any, Any]) -> Any:
    """Return a process group with a backend for each device.

    The last backend is also for operations without a device.

    Args:
        options: Torch's options of the group: store, rank, size.
        backends: (device such as "cpu", torch's kind of the backend, the backend).
    """
    import torch
    import torch.distributed as dist

    place = (options.store, options.group_rank, options.group_size)
    try:
        group: Any = dist.ProcessGroup(*place)
    except TypeError:  # before torch 2.6
        group = dist.ProcessGroup(*place, dist.ProcessGroup.Options(NAME))  # type: ignore[attr-defined,call-arg]
    # torch makes a group of several backends with the same private calls.
    group._set_default_backend(backends[-1][1])  # noqa: SLF001
    for device, kind, backend in backends:
        backend._set_sequence_number_for_group()  # noqa: SLF001
        group._register_backend(torch.device(device), kind, backend)  # noqa: SLF001
    return group
