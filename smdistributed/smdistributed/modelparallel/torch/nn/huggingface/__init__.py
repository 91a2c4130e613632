"""What scripts import to translate between a model of Hugging Face and smp's transformer modules."""

from . import bert, gpt2, gptj, gptneo, gptneox, roberta, t5

__all__ = ["bert", "gpt2", "gptj", "gptneo", "gptneox", "roberta", "t5"]
