"""Names of smp's own transformer modules, at Hugging Face's modules.

A script that asks for smp's transformer (`tensor_parallelism` in `smp.model_creation`) looks layers
up by its names: `model.transformer.seq_layers`, and `attention` and `output` of a layer. Here a
model keeps its own modules, so these answer such names, too.
"""

from __future__ import annotations

from torch import nn

__all__ = ["answer"]

_LAYERS = ("h", "layers", "layer", "block", "blocks")
_OTHERS = {
    "attention": ("attn", "self_attn", "self_attention"),
    "output": ("mlp", "feed_forward", "ffn"),
}


def answer(model: nn.Module) -> None:
    """Let the modules that were made under tensor parallelism answer.

    States and lists of modules have one name still.

    Args:
        model: The whole model. Only classes of `transformers` are touched, and
            no name that a module has itself.
    """
    for module in model.modules():
        if not vars(module).get("_smp_tp", (False,))[0] or not type(module).__module__.startswith(
            "transformers."
        ):
            continue
        # The whole model has the stack of layers under a name of its class, such as gpt_neox.
        _answer(module, "transformer", (getattr(module, "base_model_prefix", ""),))
        if layers := _answer(module, "seq_layers", _LAYERS):
            for layer in layers.children():
                for name, own in _OTHERS.items():
                    _answer(layer, name, own)


def _answer(module: nn.Module, name: str, own: tuple[str, ...]) -> nn.Module | None:
    """Give the first submodule of some names another one; return it."""
    found = next(
        (part for each in own if isinstance(part := getattr(module, each, None), nn.Module)), None
    )
    if found is None or found is module or hasattr(module, name):
        return None
    object.__setattr__(module, name, found)  # not a submodule a second time
    return found
