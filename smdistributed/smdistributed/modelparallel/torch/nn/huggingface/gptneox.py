"""Translation of GPT-NeoX's state dicts: see ``translation``."""

from .translation import missing as __getattr__  # noqa: F401  hooks by any name
from .translation import translate

__all__ = [
    "translate_hf_gptneox_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed_gptneox",
    "translate_state_dict_to_hf_gptneox",
    "translate_state_dict_to_smdistributed",
]

translate_state_dict_to_hf_gptneox = translate
translate_hf_state_dict_to_smdistributed = translate
translate_hf_state_dict_to_smdistributed_gptneox = translate
translate_hf_gptneox_state_dict_to_smdistributed = translate
translate_state_dict_to_smdistributed = translate
