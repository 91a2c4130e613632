"""Origins of a flag, a variable or a choice. Pure."""

from __future__ import annotations

from enum import IntEnum


class Origin(IntEnum):
    """The origin of a choice, from the weakest to the strongest: a stronger one wins.

    Attributes:
        DEFAULT: This launcher.
        PLATFORM: The platform's files.
        IMAGE: The image: its manifest, its programs, the container's environment.
        FABRIC: The host's network fabric: requirements of EFA.
        USER: The job: its hyperparameters and its code.
    """

    DEFAULT = 0
    PLATFORM = 1
    IMAGE = 2
    FABRIC = 3
    USER = 4

    @property
    def word(self) -> str:
        """The name in texts and in JSON, for example ``platform``."""
        return self.name.lower()
