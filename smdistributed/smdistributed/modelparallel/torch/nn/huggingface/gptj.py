"""Translation of GPT-J's state dicts: see ``translation``."""

from .translation import missing as __getattr__  # noqa: F401  hooks by any name
from .translation import translate

__all__ = [
    "translate_hf_gptj_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed_gptj",
    "translate_state_dict_to_hf_gptj",
    "translate_state_dict_to_smdistributed",
]

translate_state_dict_to_hf_gptj = translate
translate_hf_state_dict_to_smdistributed = translate
translate_hf_state_dict_to_smdistributed_gptj = translate
translate_hf_gptj_state_dict_to_smdistributed = translate
translate_state_dict_to_smdistributed = translate
