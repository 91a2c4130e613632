"""Translation of RoBERTa's state dicts: see ``translation``."""

from .translation import missing as __getattr__  # noqa: F401  hooks by any name
from .translation import translate

__all__ = [
    "translate_hf_roberta_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed_roberta",
    "translate_state_dict_to_hf_roberta",
    "translate_state_dict_to_smdistributed",
]

translate_state_dict_to_hf_roberta = translate
translate_hf_state_dict_to_smdistributed = translate
translate_hf_state_dict_to_smdistributed_roberta = translate
translate_hf_roberta_state_dict_to_smdistributed = translate
translate_state_dict_to_smdistributed = translate
