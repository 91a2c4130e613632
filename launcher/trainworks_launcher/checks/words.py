"""Words that the rules share. Pure."""

from __future__ import annotations

REPLACE = "replace this host; its platform repairs or replaces it if you report it"
"""Advice where the hardware is broken."""


def count_of(number: int, what: str) -> str:
    """Return ``1 GPU`` or ``2 GPUs``."""
    return f"{number} {what}{'' if number == 1 else 's'}"
