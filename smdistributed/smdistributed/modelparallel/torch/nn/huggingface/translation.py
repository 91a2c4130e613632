"""Translate state dicts between Hugging Face's names and smp's own transformer modules.

This library keeps a model's own modules and names, split or not. So its state dicts have Hugging
Face's names already, and the functions return them unchanged. They refuse a state dict of the
proprietary library's transformer modules, which they cannot translate.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

from smdistributed.modelparallel.torch.exceptions import SMPUnsupportedError

__all__ = ["named", "translate"]

MODELS = ("bert", "gpt2", "gptj", "gptneo", "gptneox", "roberta", "t5")
"""Models with a Python module in this package, from which scripts import the translations."""

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
"""The public names of `translate`."""

StateDict = TypeVar("StateDict", bound=Mapping[str, Any])

# The layers of a DistributedTransformer, in state dicts of public scripts.
_FOREIGN = re.compile(r"(^|\.)seq_layers\.")


def translate(state_dict: StateDict, max_seq_len: int | None = None) -> StateDict:  # noqa: ARG001
    """Return the state dict unchanged: both sides have Hugging Face's names.

    Args:
        state_dict: State of an ``smp.DistributedModel``, or of a model of Hugging Face.
        max_seq_len: Accepted; masks are not in the state dict.

    Returns:
        The same object.

    Raises:
        SMPUnsupportedError: The state is of the proprietary library's transformer modules.
    """
    for name in state_dict:
        if _FOREIGN.search(name):
            raise SMPUnsupportedError(
                f"the state dict has {name!r}, a layer of smp.nn.DistributedTransformer, which is"
                " not part of this library. Translate it to Hugging Face's names where it was made"
            )
    return state_dict


def named(name: str) -> Callable[..., Any]:
    """Return the function with a public name: a translation, or a stand-in for a hook.

    Hooks convert between a model of Hugging Face and smp's transformer modules. A function with a
    name that ends in ``hooks`` has no arguments, and returns three hooks for
    ``smp.tp_register_with_module``. Scripts call this function also without split modules, so only
    the hooks themselves raise an error.

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
