"""What scripts import to translate between a model of Hugging Face and smp's
transformer modules, and their names.
"""

from . import bert, gpt2, gptj, gptneo, gptneox, roberta, t5
from .names import answer

__all__ = ["answer", "bert", "gpt2", "gptj", "gptneo", "gptneox", "roberta", "t5"]
