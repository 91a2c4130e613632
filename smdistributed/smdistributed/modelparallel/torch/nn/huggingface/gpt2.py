"""Translation of GPT-2's state dicts: see ``translation``."""

from .translation import missing as __getattr__  # noqa: F401  hooks by any name
from .translation import translate

__all__ = [
    "translate_hf_block_state_dict_to_smdistributed",
    "translate_hf_gpt2_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed_gpt2",
    "translate_layer_state_dict_to_hf_gpt2_block",
    "translate_state_dict_to_hf_gpt2",
    "translate_state_dict_to_smdistributed",
]

translate_state_dict_to_hf_gpt2 = translate
translate_hf_state_dict_to_smdistributed = translate
translate_hf_state_dict_to_smdistributed_gpt2 = translate
translate_hf_gpt2_state_dict_to_smdistributed = translate
translate_state_dict_to_smdistributed = translate
translate_hf_block_state_dict_to_smdistributed = translate
translate_layer_state_dict_to_hf_gpt2_block = translate
