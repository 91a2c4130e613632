"""What the targets of one run share, and what a build comes to."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from trainworks.errors import ImageTestError
from trainworks.facts.rows import Facts
from trainworks.host.settings import HostSettings, read_host_settings
from trainworks.inputs.mirror import Mirror
from trainworks.inputs.sources import Places

if TYPE_CHECKING:
    from trainworks.build.image import ImageResult


@dataclass(frozen=True, kw_only=True)
class BuildSession:
    """One run: the checkout, its rows, the mirror, and this machine's settings,
    which are read once.
    """

    root: Path
    facts: Facts
    mirror: Mirror = field(default_factory=Mirror)

    @cached_property
    def settings(self) -> HostSettings:
        """This machine's settings, with the mirror in them."""
        return self.mirror.settings(read_host_settings(os.environ))

    @cached_property
    def places(self) -> Places:
        """Where the sources of components are looked for."""
        return self.mirror.places(self.facts, self.settings, os.environ)


@dataclass(frozen=True, kw_only=True)
class BuildReport:
    """What a build, or a part of it, came to.

    Attributes:
        report: For programs, as JSON.
        text: For people, on stdout.
        image: The image; ``None`` where none was built.
    """

    report: dict[str, object]
    text: str
    image: ImageResult | None = None

    @property
    def broken(self) -> ImageTestError | None:
        """The error that ends a command whose image fails a check; ``None`` where none fails."""
        return self.image.broken if self.image is not None else None
