"""Translation of BERT's state dicts: see ``translation``."""

from .translation import missing as __getattr__  # noqa: F401  hooks by any name
from .translation import translate

__all__ = [
    "translate_hf_bert_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed_bert",
    "translate_state_dict_to_hf_bert",
    "translate_state_dict_to_smdistributed",
]

translate_state_dict_to_hf_bert = translate
translate_hf_state_dict_to_smdistributed = translate
translate_hf_state_dict_to_smdistributed_bert = translate
translate_hf_bert_state_dict_to_smdistributed = translate
translate_state_dict_to_smdistributed = translate
