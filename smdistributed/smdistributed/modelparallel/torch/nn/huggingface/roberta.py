"""Translation of RoBERTa's state dicts: see ``translation``."""

from .translation import named as __getattr__  # noqa: F401  scripts import what it knows
