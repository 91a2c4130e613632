"""Give Hugging Face's modules the names of smp's own transformer modules.

In AWS's library `tensor_parallelism` in `smp.model_creation` replaces the modules of a transformer
by smp's own, and scripts use the names of these: `model.transformer.seq_layers`, and `attention`
and `output` of a layer. This library keeps the modules of the model. So they get such names, too.
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
    """Add smp's names to the modules that were created under tensor parallelism.

    The names in states and in lists of modules do not change.

    The modules get further attributes, past ``nn.Module.__setattr__``, so that no submodule is
    registered twice.

    Args:
        model: The full model. Only classes of `transformers` get names, and no attribute of a
            module is replaced.
    """
    for module in model.modules():
        is_split = vars(module).get("_smp_tp", (False,))[0]
        if not is_split or not type(module).__module__.startswith("transformers."):
            continue
        # A model with a head has the transformer under a name of its class, such as gpt_neox.
        _add_name(module, "transformer", (getattr(module, "base_model_prefix", ""),))
        layers = _add_name(module, "seq_layers", _LAYERS)
        if layers is None:
            continue
        for layer in layers.children():
            for name, own_names in _OTHERS.items():
                _add_name(layer, name, own_names)


def _add_name(module: nn.Module, name: str, own_names: tuple[str, ...]) -> nn.Module | None:
    """Add a name to the first submodule that has one of some names.

    The name is an attribute of the module, and no registered submodule.

    Returns:
        The submodule; None if there is none, or if the module has such an attribute already.
    """
    for own_name in own_names:
        submodule = getattr(module, own_name, None)
        if isinstance(submodule, nn.Module):
            break
    else:
        return None
    if submodule is module or hasattr(module, name):
        return None
    object.__setattr__(module, name, submodule)  # not a second submodule
    return submodule
