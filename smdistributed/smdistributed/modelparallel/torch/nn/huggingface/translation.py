"""State dicts between Hugging Face's names and smp's own transformer modules.

This library keeps a model's own modules and names, split or not: a state dict of it is one of
Hugging Face already. The functions therefore return what they get, and refuse the one thing that
they cannot translate: the state dict of a model that the proprietary library built of its
transformer modules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

from smdistributed.modelparallel.torch.exceptions import SMPUnsupportedError

__all__ = ["named", "translate"]

MODELS = ("bert", "gpt2", "gptj", "gptneo", "gptneox", "roberta", "t5")
"""Those that have a module beside this one: scripts import these names from there."""

TRANSLATIONS = frozenset(
    {
        *(f"translate_state_dict_to_hf_{model}" for model in MODELS),
        *(f"translate_hf_state_dict_to_smdistributed_{model}" for model in MODELS),
        *(f"translate_hf_{model}_state_dict_to_smdistributed" for model in MODELS),
        "translate_hf_state_dict_to_smdistributed",
        "translate_state_dict_to_smdistributed",
        # Of one block of GPT-2.
        "translate_hf_block_state_dict_to_smdistributed",
        "translate_layer_state_dict_to_hf_gpt2_block",
    }
)
"""What scripts call `translate`."""

StateDict = TypeVar("StateDict", bound=Mapping[str, Any])

# What public scripts call the layers of a DistributedTransformer.
_FOREIGN = re.compile(r"(^|\.)seq_layers\.")


def translate(state_dict: StateDict, max_seq_len: int | None = None) -> StateDict:  # noqa: ARG001
    """Return the state dict: its names are Hugging Face's on both sides.

    Args:
        state_dict: Of an ``smp.DistributedModel``, or of a model of Hugging Face.
        max_seq_len: Accepted; masks are not in the state dict.

    Raises:
        SMPUnsupportedError: It comes from the proprietary library's transformer modules.
    """
    for name in state_dict:
        if _FOREIGN.search(name):
            raise SMPUnsupportedError(
                f"the state dict has {name!r}, a layer of smp.nn.DistributedTransformer, which is"
                " not part of this library. Translate it to Hugging Face's names where it was made"
            )
    return state_dict


def named(name: str) -> Callable[..., Any]:
    """Return what the module of a model has under a name: a translation, or a stand-in for a hook.

    Hooks are between a model of Hugging Face and smp's transformer modules. A name that ends in
    ``hooks`` is a function of no arguments whose three hooks go to ``smp.tp_register_with_module``:
    scripts call it whether or not a module is split, so only the hooks refuse.

    Raises:
        AttributeError: The name is neither.
    """
    if name in TRANSLATIONS:
        return translate
    if not re.search("hooks?$", name):
        raise AttributeError(f"smp.nn.huggingface has no {name!r}")
    if name.endswith("hooks"):
        return lambda: (named(name.removesuffix("s")),) * 3

    def hook(*_args: object, **_kwargs: object) -> NoReturn:
        raise SMPUnsupportedError(
            f"{name} is for smp.nn.DistributedTransformer, which is not part of this library: use"
            " the model as it is"
        )

    hook.__name__ = hook.__qualname__ = name
    return hook
