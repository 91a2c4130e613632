"""Compare the configuration, and the shapes of the first batches, over the ranks.

A job with different ones would wait for ever, or train with half of its data, without an error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store

from smdistributed.modelparallel.torch.exceptions import SMPConfigError, StepError

from .collective_calls import Call
from .config import Config
from .state import state
from .topology import CommGroup

_READERS_SECONDS = 10.0
"""Seconds that rank 0 waits until the others have read that configurations differ."""


def agree_on_configuration(
    store: Store, rank: int, size: int, config: Config, seconds: float
) -> None:
    """Compare the configuration with that of rank 0, and wait until all ranks have done so.

    Rank 0 stores its values. Each other rank compares its own, and the first that differs, or the
    last that does not, stores the answer for all.

    Keys below ``smp/configuration`` are written to the store.

    Args:
        store: The job's key-value store.
        rank: Global rank of this process.
        size: Number of ranks of the job.
        config: This rank's configuration.
        seconds: The longest wait for the other ranks, in each of at most two waits.

    Raises:
        SMPConfigError: Two ranks have different values. Every rank raises the same error.
        RuntimeError: A rank did not call this in time (torch's own error).
    """
    store = PrefixStore("smp/configuration", store)
    limit = timedelta(seconds=seconds)
    own_values = dataclasses.asdict(config)
    if rank == 0:
        store.set("of rank 0", json.dumps(own_values))
    else:
        store.wait(["of rank 0"], limit)
        differences = _differences(json.loads(store.get("of rank 0")), own_values)
        if differences:
            store.set(
                "answer",
                f"rank 0 and rank {rank} have different configurations: {', '.join(differences)}\n"
                "Call smp.init with the same configuration on every rank.",
            )
        elif store.add("ranks that have the same", 1) == size - 1:  # the last of the others
            store.set("answer", "")
    store.wait(["answer"], limit)
    answer = store.get("answer").decode()
    if answer:
        _wait_for_readers(store, rank, size)
        raise SMPConfigError(answer)


def _wait_for_readers(store: Store, rank: int, size: int) -> None:
    """Let rank 0 end after the others have read the answer, because its process has the store.

    On rank 0 this waits `_READERS_SECONDS` at most, and then returns, too.

    Raises:
        RuntimeError: The store cannot be used, on another rank than 0.
    """
    if rank > 0 and store.add("ranks that have read it", 1) == size - 1:
        store.set("read by all", "")
    if rank == 0:
        # A rank that was killed does not read the answer.
        with contextlib.suppress(RuntimeError):
            store.wait(["read by all"], timedelta(seconds=_READERS_SECONDS))


def _differences(first: Mapping[str, Any], own_values: Mapping[str, Any]) -> list[str]:
    """Return a text for each key with different values, such as "microbatches = 2 and 4".

    Args:
        first: Values of rank 0, from JSON.
        own_values: Values of this rank.
    """
    # By way of JSON, too: it turns a tuple into a list.
    own: Mapping[str, Any] = json.loads(json.dumps(own_values))
    differences = []
    for key in sorted(first):
        if first[key] != own[key]:
            differences.append(f"{key} = {first[key]!r} and {own[key]!r}")
    return differences


def agree_on_batch(store: Store, step: str, call: Call, arguments: Mapping[str, Any]) -> None:
    """Compare the shapes of a batch with the shapes on the first rank of this model.

    The first rank stores its shapes, and does not wait. The others wait for these.

    A key below ``smp/batch`` is written to the store. An argument that this or the first rank alone
    has is not compared.

    Args:
        store: The job's key-value store.
        step: Name of the step function.
        call: The call of the step function. It has the same number on all ranks of the model.
        arguments: Name of an argument -> its value.

    Raises:
        StepError: A tensor has another shape on this rank.
        RuntimeError: The first rank has not stored its shapes in time, or the store cannot be used
            (torch's own error).
    """
    members = state.topo.members(CommGroup.MP_GROUP)
    store = PrefixStore(f"smp/batch/{call.group}/{call.number}", store)
    own_shapes = dict(_shapes("", arguments))
    if state.topo.rank == members[0]:
        store.set("shapes", json.dumps(own_shapes))
        return
    first = json.loads(store.get("shapes"))
    for name, shape in own_shapes.items():
        if name not in first or first[name] == shape:
            continue
        # A rank with unused inputs may pass tensors without rows.
        if 0 not in shape and 0 not in first[name]:
            raise StepError(
                f"smp.step: function {step}, argument {name}:"
                f" rank {members[0]} was given a tensor of shape {tuple(first[name])},"
                f" and rank {state.topo.rank} one of shape {tuple(shape)}\n"
                "All ranks of a model must be given the same batch: choose the samples"
                " by smp.dp_rank() and smp.dp_size(), not by the rank of the process."
            )


def _shapes(name: str, value: Any) -> Iterator[tuple[str, list[int]]]:
    """Yield the names and shapes of all tensors in nested mappings, lists and tuples.

    For example ``("batch['labels'][0]", [8, 128])``.

    Other objects are passed over.
    """
    if isinstance(value, torch.Tensor):
        yield name, list(value.shape)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _shapes(f"{name}[{key!r}]" if name else str(key), item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _shapes(f"{name}[{index}]", item)
