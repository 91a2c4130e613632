"""torch.compile equals eager mode, and a kernel of Triton runs."""

from __future__ import annotations

import shutil
from typing import Any

from together import NotTestedError, main, near

NEEDS = ("torch", "cuda")
BOUND = 120


def run(options: dict[str, Any]) -> dict[str, float]:
    import torch
    from torch import nn

    on_gpu = options["device"] == "cuda"
    if on_gpu:
        try:
            import triton  # noqa: F401
        except ImportError as error:
            raise NotTestedError(f"there is no Triton: {error}") from error
        if not any(map(shutil.which, ("cc", "gcc", "clang"))):
            raise NotTestedError("there is no C compiler, which Triton needs to start a kernel")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 8)).to(
        options["device"]
    )
    data = torch.randn(32, 64, device=options["device"])
    # On a CPU the graph is only traced: to compile it would need a C++ compiler and half a minute.
    compiler = "inductor" if on_gpu else "aot_eager"
    fast: Any = torch.compile(model, backend=compiler)
    gradients = []
    for module in (model, fast):
        model.zero_grad()
        module(data).pow(2).mean().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    worst = max((a - b).abs().max().item() for a, b in zip(*gradients, strict=True))
    figures = {"torch.compile": near("gradients of a compiled model", worst, 1e-4)}
    if on_gpu:
        figures["Triton"] = near("a kernel of Triton", added(), 0.0)
    return figures


def added() -> float:
    """Return the largest error of a sum made by a kernel of Triton."""
    import torch
    import triton
    import triton.language as tl

    globals()["tl"] = tl  # where the kernel looks for it

    @triton.jit  # type: ignore[untyped-decorator]
    def add(left, right, out, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = at < count
        tl.store(
            out + at,
            tl.load(left + at, mask=inside) + tl.load(right + at, mask=inside),
            mask=inside,
        )

    left, right = torch.randn(2, 10_001, device="cuda")
    out = torch.empty_like(left)
    add[(triton.cdiv(left.numel(), 256),)](left, right, out, left.numel(), BLOCK=256)
    return float((out - (left + right)).abs().max())


if __name__ == "__main__":
    main(globals())
