"""Translation of T5's state dicts: see ``translation``."""

from .translation import missing as __getattr__  # noqa: F401  hooks by any name
from .translation import translate

__all__ = [
    "translate_hf_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed_t5",
    "translate_hf_t5_state_dict_to_smdistributed",
    "translate_state_dict_to_hf_t5",
    "translate_state_dict_to_smdistributed",
]

translate_state_dict_to_hf_t5 = translate
translate_hf_state_dict_to_smdistributed = translate
translate_hf_state_dict_to_smdistributed_t5 = translate
translate_hf_t5_state_dict_to_smdistributed = translate
translate_state_dict_to_smdistributed = translate
