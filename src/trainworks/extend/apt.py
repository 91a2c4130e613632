"""The Debian packages of an extension: fetched outside of its base, which then
installs them without a network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from trainworks.build.apt_outside import download_outside
from trainworks.engine.protocol import BuiltImage, Engine
from trainworks.engine.tree import read_tree
from trainworks.errors import ExtendError
from trainworks.facts.rows import Facts
from trainworks.host.foreign_apt import READ, read_foreign
from trainworks.host.settings import HostSettings
from trainworks.terminal.output import say

FOLDER = "packages"
"""Their folder in the context of a build."""

AddFiles = Callable[[Path], tuple[str, ...]]


def packages_for(
    packages: Sequence[str], base: BuiltImage, settings: HostSettings, facts: Facts, engine: Engine
) -> AddFiles:
    """Return what puts the files of Debian packages into a context; they are fetched once.

    Args:
        packages: Names of Debian packages.
        base: The image that they are installed in.
        settings: This machine's settings, with the archives that are read.
        facts: Say which base images are our own.
        engine: What has the base, and runs apt.
    """

    @cache
    def fetched() -> dict[str, bytes]:
        """Fetch the packages once, and return their files by name."""
        say(f"  fetching {', '.join(packages)} for {base.reference}")
        foreign = read_foreign(read_tree(engine, base.reference, READ), settings.apt.sources)
        if foreign is None:
            raise ExtendError([f"--apt: {base.reference} has no list of dpkg's packages"])
        for sentence in foreign.refused:
            say(f"  {sentence}")
        return download_outside(packages, foreign, settings, facts, engine)

    def add(folder: Path) -> tuple[str, ...]:
        """Write the packages into a build context; return no names of files of this machine."""
        place = folder / FOLDER
        place.mkdir(parents=True, exist_ok=True)
        for name, content in fetched().items():
            (place / name).write_bytes(content)
            (place / name).chmod(0o644)
        return ()

    return add
