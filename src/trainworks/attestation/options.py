"""The request of ``prove``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainworks.extend.request import ExtendRequest
from trainworks.plan.own_artifacts import OwnArtifact


@dataclass(frozen=True, kw_only=True)
class ProveRequest:
    """An image to give proof of, and where to write it.

    Attributes:
        output: The folder to write to.
        target: The target whose image it is; ``""`` with ``extension``.
        pushed: The image's address in a registry; ``""``: it is not looked at there.
        builder: The URI of the builder; ``""``: this machine.
        evidence: A record of a run in the image, of ``evidence/``; ``None``: none is stated.
        licenses: Whether to write the texts of all licences, too.
        engine: Which engine has the image; ``None``: the first that answers.
        with_components, without_components: The choice of components that the
            target was built with.
        artifacts: The wheels that the target was built with in the place of its row's.
        extension: The request that the image was extended by; ``None``: the image is a target's.
    """

    output: Path
    target: str = ""
    pushed: str = ""
    builder: str = ""
    evidence: Path | None = None
    licenses: bool = False
    engine: str | None = None
    with_components: tuple[str, ...] = ()
    without_components: tuple[str, ...] = ()
    artifacts: tuple[OwnArtifact, ...] = ()
    extension: ExtendRequest | None = None
