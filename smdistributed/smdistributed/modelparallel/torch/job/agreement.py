"""What must be the same on all ranks and is compared: the configuration, and
the shapes of the first batches.

A job whose ranks differ in these waits for ever, or trains with half of its
data, and nothing says so.
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
"""How long rank 0 waits for the others to read that configurations differ."""


def agree_on_configuration(
    store: Store, rank: int, size: int, config: Config, seconds: float
) -> None:
    """Wait until all ranks have the same configuration.

    Args:
        store: The job's key-value store.
        rank: Global rank of this process.
        size: Number of ranks of the job.
        config: This rank's configuration.
        seconds: How long to wait for the other ranks.

    Raises:
        SMPConfigError: Two ranks have different values. Every rank raises the same error.
        RuntimeError: A rank did not call this in time (torch's own error).
    """
    store = PrefixStore("smp/configuration", store)
    patience = timedelta(seconds=seconds)
    mine = dataclasses.asdict(config)
    if rank == 0:
        store.set("of rank 0", json.dumps(mine))
    else:
        store.wait(["of rank 0"], patience)
        differences = _differences(json.loads(store.get("of rank 0")), mine)
        if differences:
            words = (
                f"rank 0 and rank {rank} have different configurations: {', '.join(differences)}"
            )
            store.set(
                "answer", f"{words}\nCall smp.init with the same configuration on every rank."
            )
        elif store.add("ranks that have the same", 1) == size - 1:
            store.set("answer", "")
    store.wait(["answer"], patience)
    answer = store.get("answer").decode()
    if answer:
        _wait_for_readers(store, rank, size)
        raise SMPConfigError(answer)


def _wait_for_readers(store: Store, rank: int, size: int) -> None:
    """Let rank 0, whose process keeps the store, end after the others have read the answer."""
    if rank > 0 and store.add("ranks that have read it", 1) == size - 1:
        store.set("read by all", "")
    if rank == 0:
        with contextlib.suppress(RuntimeError):  # one of them was killed: its error is its own
            store.wait(["read by all"], timedelta(seconds=_READERS_SECONDS))


def _differences(first: Mapping[str, Any], mine: Mapping[str, Any]) -> list[str]:
    # As the other one comes: a tuple is a list.
    own: Mapping[str, Any] = json.loads(json.dumps(mine))
    return [
        f"{key} = {first[key]!r} and {own[key]!r}"
        for key in sorted(first)
        if first[key] != own[key]
    ]


def agree_on_batch(store: Store, step: str, call: Call, arguments: Mapping[str, Any]) -> None:
    """Compare the shapes of a batch with those that the first rank of this model was given.

    Args:
        store: The job's key-value store.
        step: Name of the step function.
        call: This call of it, which has the same number on all ranks of the model.
        arguments: The arguments of the call, by name.

    Raises:
        StepError: A tensor has another shape here.
    """
    members = state.topo.members(CommGroup.MP_GROUP)
    store = PrefixStore(f"smp/batch/{call.group}/{call.number}", store)
    mine = dict(_shapes("", arguments))
    if state.topo.rank == members[0]:
        store.set("shapes", json.dumps(mine))
        return
    first = json.loads(store.get("shapes"))
    for name, shape in mine.items():
        # A rank whose inputs are not used may pass tensors without rows.
        if name in first and first[name] != shape and 0 not in shape and 0 not in first[name]:
            raise StepError(
                f"smp.step: function {step}, argument {name}:"
                f" rank {members[0]} was given a tensor of shape {tuple(first[name])},"
                f" and rank {state.topo.rank} one of shape {tuple(shape)}\n"
                "All ranks of a model must be given the same batch: choose the samples"
                " by smp.dp_rank() and smp.dp_size(), not by the rank of the process."
            )


def _shapes(name: str, value: Any) -> Iterator[tuple[str, list[int]]]:
    """Yield the names and shapes of all tensors of nested arguments.

    Containers of other types are not looked into.
    """
    if isinstance(value, torch.Tensor):
        yield name, list(value.shape)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _shapes(f"{name}[{key!r}]" if name else str(key), item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _shapes(f"{name}[{index}]", item)
