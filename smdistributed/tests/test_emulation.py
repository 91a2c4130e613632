"""Scripts that insist on CUDA, unchanged on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys

CALLS = """
import warnings

warnings.simplefilter("error")
import smdistributed.PACKAGE
import torch, torch.distributed as dist
from torch import nn
from trainworks_smdistributed import emulation

assert not emulation.cuda_is_available()
assert torch.cuda.is_available() and torch.cuda.device_count() == 2
torch.cuda.set_device(1)
assert torch.cuda.current_device() == 1
torch.cuda.set_device(torch.device("cuda", 0))
torch.cuda.set_device("cuda:0")
cpu = torch.device("cpu")

# devices
for device in (
    torch.device("cuda"),
    torch.device("cuda", 1),
    torch.device("cuda:1"),
    torch.device(0),
    torch.device(type="cuda", index=1),
):
    assert device == cpu, device
assert torch.device("meta").type == "meta" and torch.device("cpu", 0).index == 0
x = torch.ones(2, 3)
for moved in (
    x.cuda(),
    x.cuda(0),
    x.cuda(torch.device("cuda:0"), non_blocking=True),
    x.cuda(device=0),
    x.to("cuda:0"),
    x.to(0),
    x.to(device="cuda"),
    x.to(torch.device("cuda", 1), non_blocking=True),
    x.pin_memory(),
    x.to("cuda", torch.float32),
):
    assert moved is x
assert x.to("cuda", torch.float64).dtype == torch.float64
for made in (
    torch.zeros(1, device="cuda"),
    torch.tensor([1], device=0),
    torch.arange(3, device=torch.device("cuda:1")),
    torch.empty_like(x, device="cuda"),
    x.new_zeros(2, device="cuda:0"),
    torch.cuda.FloatTensor([1.0, 2.0]),
    torch.cuda.LongTensor(3),
):
    assert made.device == cpu
net = nn.Linear(3, 3, device="cuda")
assert net.cuda() is net and net.cuda(0) is net and net.to("cuda:1") is net and net.to(0) is net
assert net.to(device="cuda", dtype=torch.float64).weight.dtype == torch.float64
net.float()

# what scripts ask
assert torch.cuda.get_device_name(0) == torch.cuda.get_device_properties(0).name
assert torch.cuda.get_device_properties("cuda:0").total_memory > 0
free, total = torch.cuda.mem_get_info()
assert 0 < free <= total
assert torch.cuda.get_device_capability() >= (8, 0) and torch.cuda.is_bf16_supported()
# Builds for CUDA ask it in each step of an optimizer.
assert not torch.cuda.is_current_stream_capturing()
for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
    assert getattr(torch.cuda, name)(0) == 0
assert torch.cuda.memory_stats()["num_alloc_retries"] == 0
torch.cuda.empty_cache()
torch.cuda.synchronize()
torch.cuda.reset_peak_memory_stats()
torch.cuda.ipc_collect()
torch.cuda.manual_seed(1)
torch.cuda.manual_seed_all(1)
torch.manual_seed(1)
torch.cuda.set_rng_state_all(torch.cuda.get_rng_state_all())
torch.cuda.random.get_rng_state_all()
with torch.random.fork_rng():
    torch.rand(1)
with torch.random.fork_rng(devices=[0], enabled=True):
    torch.rand(1)
from torch.utils.checkpoint import checkpoint

checkpoint(nn.Dropout(), x.clone().requires_grad_(), use_reentrant=False).sum().backward()
torch.backends.cudnn.benchmark = True
torch.backends.cudnn.deterministic = True
torch.backends.cudnn.version()
torch.backends.cuda.matmul.allow_tf32 = True
with torch.cuda.device(1):
    pass
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
start.record()
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    x.record_stream(stream)
end.record()
end.synchronize()
assert start.elapsed_time(end) > 0 and end.query()
torch.cuda.current_stream().wait_stream(stream)
stream.synchronize()
torch.cuda.nvtx.range_push("a")
torch.cuda.nvtx.range_pop()

# mixed precision
scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for cast in (
    torch.autocast("cuda"),
    torch.autocast("cuda", torch.float16),
    torch.autocast(device_type="cuda"),
    torch.amp.autocast("cuda", dtype=torch.bfloat16),
):
    with cast:
        assert net(x).dtype == torch.bfloat16
        loss = net(x).float().sum()
before = net.weight.clone()
scaler.scale(loss).backward()
assert scaler.get_scale() == 4.0
scaler.unscale_(optimizer)
scaler.step(optimizer)
scaler.update()
assert not torch.equal(before, net.weight)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own about the old names
    with torch.cuda.amp.autocast(), torch.cuda.amp.autocast(enabled=True, dtype=torch.float16):
        assert net(x).dtype == torch.bfloat16
    assert torch.cuda.amp.GradScaler(enabled=True).is_enabled()

# data and files
loader = torch.utils.data.DataLoader(torch.arange(4), batch_size=2, pin_memory=True)
assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
import io

def load(where):
    buffer = io.BytesIO()
    torch.save({"x": x}, buffer)
    buffer.seek(0)
    return torch.load(buffer, map_location=where)["x"].device

for where in (
    None,
    "cuda:0",
    torch.device("cuda"),
    {"cuda:0": "cuda:1"},
    lambda storage, place: storage.cuda(1),
):
    assert load(where) == cpu

# processes
dist.init_process_group(
    backend="nccl",
    rank=0,
    world_size=1,
    init_method="tcp://127.0.0.1:0",
    device_id=torch.device("cuda:0"),
)
assert dist.get_backend() == "gloo"
dist.new_group([0], backend="nccl")
ddp = nn.parallel.DistributedDataParallel(net, device_ids=[0], output_device=0)
ddp2 = nn.parallel.DistributedDataParallel(net, [0], 0)
ddp(x.cuda()).sum().backward()
from torch.distributed.device_mesh import init_device_mesh

assert init_device_mesh("cuda", (1,)).device_type == "cpu"
dist.destroy_process_group()
"""

WITHOUT = """
import smdistributed.modelparallel.torch as smp
import torch
assert not torch.cuda.is_available()
assert torch.device("cuda", 1).type == "cuda"
try:
    torch.zeros(1).cuda()
except (AssertionError, RuntimeError):
    print("no CUDA")
"""

TRANSFORMERS = """
import smdistributed.modelparallel.torch as smp
from transformers.utils import is_torch_cuda_available
assert is_torch_cuda_available()
"""


def run(script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LOCAL_WORLD_SIZE": "2", **variables}
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=environment,
    )


def test_a_script_that_insists_on_cuda_runs_with_either_library() -> None:
    for package in ("modelparallel.torch", "dataparallel.torch.torch_smddp"):
        done = run(CALLS.replace("PACKAGE", package), SMP_CPU_EMULATION="1")
        assert (done.returncode, done.stderr) == (0, "")


def test_transformers_finds_cuda() -> None:
    done = run(TRANSFORMERS, SMP_CPU_EMULATION="1")
    assert done.returncode == 0, done.stderr


def test_nothing_is_emulated_unless_asked_for() -> None:
    for value in ("", "0"):
        done = run(WITHOUT, SMP_CPU_EMULATION=value)
        assert (done.returncode, done.stdout) == (0, "no CUDA\n"), done.stderr
