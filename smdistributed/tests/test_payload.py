"""Tensors of the pipeline by a backend of torch.distributed that has NCCL's
rules (strict.py), as they go by NCCL.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import distributed as dist

import strict
import test_equality
from jobs import BY_HAND, train_step
from ranks import run_ranks
from smdistributed.modelparallel.torch.job.config import SMPConfigError
from smdistributed.modelparallel.torch.partitioning import placement
from smdistributed.modelparallel.torch.transport.payload import GroupPayload
from smdistributed.modelparallel.torch.transport.transport import LinkGroup, Transport

STRICT = {"SMP_PAYLOAD": "strict"}

DTYPES = (
    *(
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint16,
        torch.uint32,
    ),
    *(
        torch.uint64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    ),
    *(torch.float8_e5m2, torch.float8_e4m3fn),
)


def train(config: dict[str, Any], names: tuple[str, ...]) -> tuple[dict[str, Any], int]:
    """Train as test_equality does.

    Return the differences, and the bytes that took the way through the host.
    """
    from smdistributed.modelparallel.torch.pipeline.runtime import present

    strict.register()
    differences = test_equality.compare(config, names)
    runtime = present()
    assert runtime is not None
    return differences, runtime.transport.bytes_sent


@pytest.mark.parametrize(
    ("degree", "pipeline", "replicas"),
    [
        pytest.param(2, "interleaved", 1, marks=pytest.mark.core),
        (2, "simple", 2),
        (4, "interleaved", 1),
    ],
)
def test_a_pipeline_keeps_nccl_s_order(degree: int, pipeline: str, replicas: int) -> None:
    config = {
        "pipeline_parallel_degree": degree,
        "microbatches": 4,
        "pipeline": pipeline,
        "ddp": replicas > 1,
    }
    for differences, by_host in run_ranks(
        degree * replicas, train, config, test_equality.PLAIN[:3], variables=STRICT
    ):
        assert by_host == 0
        assert all(worst.largest <= 1e-10 for worst in differences.values()), differences


def exchange() -> list[bool]:
    """Send a tensor of each type both ways at once, and some that have no elements."""
    import smdistributed.modelparallel.torch as smp
    from smdistributed.modelparallel.torch.pipeline.runtime import present

    strict.register()
    smp.init({"pipeline_parallel_degree": 2})
    runtime = present()
    assert runtime is not None
    link = runtime.transport
    values = [torch.arange(6).remainder(2).reshape(2, 3).to(dtype) for dtype in DTYPES]
    values += [torch.empty(0, 7), torch.tensor(3.5), torch.arange(6.0).reshape(2, 3).t()]
    values += [
        torch.arange(96.0)[48:].reshape(1, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    ]
    link.send(1 - link.rank, "all", [*values, None])
    _, _, message, tensors = link.inbox.get(timeout=300)
    assert message == "all"
    link.arrived(tensors)
    assert tensors.pop() is None
    smp.barrier()
    return [
        now is not None
        and (now.dtype, now.shape, now.stride()) == (was.dtype, was.shape, was.stride())
        and now.tolist() == was.tolist()
        for was, now in zip(values, tensors, strict=True)
    ]


def test_types_that_nccl_lacks_arrive_too() -> None:
    assert all(all(is_equal) for is_equal in run_ranks(2, exchange, variables=STRICT))


class Noted(GroupPayload):
    """A payload that notes the calls of its methods."""

    def __init__(self, notes: list[str]) -> None:
        self.notes = notes

    def carries(self, tensor: torch.Tensor) -> bool:  # noqa: ARG002
        return True

    def send(self, peer: int, tensors: Sequence[torch.Tensor]) -> None:  # noqa: ARG002
        self.notes.append("send launched")

    def receive(self, peer: int, descriptions: Sequence[Any]) -> list[torch.Tensor]:  # noqa: ARG002
        self.notes.append("receive posted")
        return [torch.zeros(shape) for _, shape, _ in descriptions]

    def arrived(self, tensors: Sequence[torch.Tensor | None]) -> None:
        pass

    def close(self) -> None:
        pass


def test_a_send_is_launched_before_its_receive_is_posted() -> None:
    notes: list[str] = []
    links = [
        Transport(LinkGroup(rank, range(2)), {1 - rank: end}, payload=Noted(notes))
        for rank, end in enumerate(socket.socketpair())
    ]
    links[0].send(1, "first", [torch.ones(2)])
    assert links[1].inbox.get(timeout=300)[2] == "first"
    for link in links:
        link.close()
    assert notes == ["send launched", "receive posted"]


def rules() -> tuple[bool, str, str]:
    """Return whether a send ended before its receive was posted, and the errors for a wrong type
    and a wrong size.
    """
    strict.register()
    dist.init_process_group("gloo", rank=int(os.environ["OMPI_COMM_WORLD_RANK"]), world_size=2)
    group = dist.new_group([0, 1], backend="strict")
    is_completed, errors = True, ["", ""]
    if dist.get_rank() == 0:
        work: Any = dist.isend(torch.ones(4), 1, group=group)
        is_completed = work.is_completed()
        dist.barrier()
        work.wait()
        dist.isend(torch.ones(8), 1, group=group)
        try:
            dist.isend(torch.ones(4, dtype=torch.int16), 1, group=group)
        except TypeError as error:
            errors[0] = str(error)
    else:
        dist.barrier()
        for _ in range(2):
            work = dist.irecv(torch.ones(4), 0, group=group)
            try:
                work.wait()
            except RuntimeError as error:
                errors[1] = str(error)
    dist.barrier()
    return is_completed, errors[0], errors[1]


def test_the_stand_in_has_nccl_s_rules() -> None:
    (early, kind, _), (_, _, size) = run_ranks(2, rules)
    assert not early
    assert "not supported" in kind
    assert size == "a send of 32 bytes meets a receive of 16"


def test_a_rank_that_sees_one_gpu_has_that_one() -> None:
    assert [placement.gpu_of(rank, 1) for rank in range(4)] == [0, 0, 0, 0]
    assert [placement.gpu_of(rank, 4) for rank in range(4)] == [0, 1, 2, 3]


def unknown() -> str:
    import smdistributed.modelparallel.torch as smp

    with pytest.raises(SMPConfigError) as caught:
        smp.init({"pipeline_parallel_degree": 2})
    return str(caught.value)


def test_an_unknown_backend_is_named() -> None:
    for message in run_ranks(2, unknown, variables={"SMP_PAYLOAD": "pigeons"}):
        assert message.startswith("SMP_PAYLOAD=pigeons: torch.distributed has no such backend")


def test_each_context_makes_ready_what_it_uses() -> None:
    """The thread that uses a tensor waits for it: it may have another stream
    than the one that reads messages.
    """
    assert all(run_ranks(2, used_where_made_ready, variables=STRICT))


def used_where_made_ready() -> bool:
    import smdistributed.modelparallel.torch as smp
    from smdistributed.modelparallel.torch.transport.payload import GroupPayload

    strict.register()
    made_ready: set[tuple[int, int]] = set()
    used: list[tuple[int, int]] = []
    arrived = GroupPayload.arrived

    def noted(self: GroupPayload, tensors: Sequence[torch.Tensor | None]) -> None:
        made_ready.update((t.data_ptr(), threading.get_ident()) for t in tensors if t is not None)
        arrived(self, tensors)

    GroupPayload.arrived = noted  # type: ignore[method-assign]

    class Body(torch.nn.Linear):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            used.append((value.data_ptr(), threading.get_ident()))
            return super().forward(value)

    smp.init({**BY_HAND, "microbatches": 4})
    with smp.partition(1):
        body = Body(4, 4)
    model = smp.DistributedModel(torch.nn.Sequential(torch.nn.Linear(4, 4), body))

    step = train_step(lambda model, value: model(value).mean())
    step(model, torch.ones(8, 4))
    smp.barrier()
    return made_ready.issuperset(used) and len(used) == (4 if smp.pp_rank() == 1 else 0)


def build_hybrid() -> Any:
    """Return a small language model: each second layer has linear attention."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    linear_attention: dict[str, Any] = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 4,
    }
    experts: dict[str, Any] = {
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8,
    }
    config: Any = Qwen3NextConfig(
        vocab_size=30,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=4,
        layer_types=["linear_attention", "full_attention"] * 2,
        **linear_attention,
        **experts,
    )
    return Qwen3NextForCausalLM(config)


def sent_in_training(kind: str, use_cache: bool) -> tuple[int, float]:
    """Train a model of Hugging Face; return the bytes that this rank sent, and the loss.

    Args:
        kind: "gpt2" or "hybrid".
        use_cache: Whether the model trains with a cache.
    """
    import networks
    import smdistributed.modelparallel.torch as smp
    from smdistributed.modelparallel.torch.pipeline.runtime import present

    smp.init(BY_HAND)
    torch.manual_seed(1)
    plain: Any = build_hybrid() if kind == "hybrid" else networks.build("gpt2")
    plain.config.use_cache = use_cache
    layers = plain.model.layers if kind == "hybrid" else plain.transformer.h
    # The cache goes on to a remote layer after one of the root's own.
    for layer in layers[1::2]:
        smp.set_partition(layer, 1)
    model = smp.DistributedModel(plain)

    train = train_step(lambda model, ids: model(input_ids=ids, labels=ids).loss)
    loss = float(train(model, torch.arange(240).reshape(40, 6) % 30).reduce_mean())
    runtime = present()
    assert runtime is not None
    return runtime.transport.bytes_sent, loss


@pytest.mark.parametrize("kind", ["gpt2", "hybrid"])
def test_hugging_face_s_cache_does_not_travel_with_each_layer(kind: str) -> None:
    """Count the bytes that the root's rank sends: arguments, and outputs for the other steps.

    A layer's own entry may return.
    """
    (least, expected), _ = run_ranks(2, sent_in_training, kind, False)
    (bytes_sent, loss), _ = run_ranks(2, sent_in_training, kind, True)
    assert loss == expected
    assert bytes_sent <= 1.1 * least
