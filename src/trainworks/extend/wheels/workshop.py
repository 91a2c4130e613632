"""Where an extension's wheels are built: the base image, with the extension's Debian packages, for no other image."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainworks.assemble.image import ImageSpec
from trainworks.assemble.order import BuildOptions
from trainworks.engine.protocol import Engine
from trainworks.extend.plan import WheelSource
from trainworks.extend.render import render_wheels
from trainworks.extend.requirements import ExtendedBase, Wheel
from trainworks.extend.resolving.releases import Archive
from trainworks.extend.toolkit import Workbench
from trainworks.extend.wheels.cache import cache_key, cached_wheel, keep_wheel
from trainworks.extend.wheels.sources import archive_source, build_wheels
from trainworks.host.pip import PipSettings
from trainworks.host.settings import HostSettings

PIP_SECRETS = ("pip.conf", "ca.pem", "netrc")
APT_SECRETS = ("apt.conf", "sources.list")
"""What of this machine's settings the installation reads."""


@dataclass(frozen=True, kw_only=True)
class Workshop:
    """Builds wheels for one extension.

    Attributes:
        base: The image that is extended.
        apt: Debian packages of the extension.
        bench: What compiles.
        recipes: Templates, by name.
        engine: Builds.
        settings: Of this machine.
        options: How to build.
        cache: Folder of wheels that were built before.
        done: Wheels of this extension, by the sha256 of their archive.
    """

    base: ExtendedBase
    apt: tuple[str, ...]
    bench: Workbench
    recipes: Mapping[str, str]
    engine: Engine
    settings: HostSettings
    options: BuildOptions
    cache: Path
    done: dict[str, Wheel] = field(default_factory=dict)

    def build_archives(self, archives: Sequence[Archive]) -> tuple[Wheel, ...]:
        """Build source archives; what was built for this extension is not built again."""
        missing = [archive for archive in archives if archive.sha256 not in self.done]
        wheels = self.build([archive_source(archive) for archive in missing])
        self.done.update({archive.sha256: wheel for archive, wheel in zip(missing, wheels, strict=True)})
        return tuple(self.done[archive.sha256] for archive in archives)

    def build(self, sources: Sequence[WheelSource]) -> tuple[Wheel, ...]:
        """Return wheels, in the same order: those of the user's cache, or else built."""
        places = [self.cache / cache_key(source, self.base, self.apt, self.bench) for source in sources]
        wheels = [
            None if self.options.no_cache else cached_wheel(place, source)
            for place, source in zip(places, sources, strict=True)
        ]
        missing = [source for source, wheel in zip(sources, wheels, strict=True) if wheel is None]
        built = iter(self._build(missing))
        found = []
        for place, source, wheel in zip(places, sources, wheels, strict=True):
            found.append(wheel or keep_wheel(place, source, next(built)))
        return tuple(found)

    def _build(self, sources: Sequence[WheelSource]) -> tuple[Wheel, ...]:
        if not sources:
            return ()
        rendering = render_wheels(tuple(sources), self.base, self.apt, self.recipes, self.bench)
        name = f"trainworks/wheels:{rendering.digest[-12:]}"
        spec = ImageSpec(
            name=name,
            tags=(name,),
            rendering=rendering,
            settings=self.settings,
            secrets=secrets_for(self.settings, self.base, self.apt),
            add_files=lambda folder: _add_local_archives(sources, self.settings.pip, folder),
            architecture=self.base.architecture,
        )
        return build_wheels(tuple(sources), spec, self.base, self.engine, self.options)


def secrets_for(settings: HostSettings, base: ExtendedBase, apt: tuple[str, ...]) -> dict[str, bytes]:
    """Return what of this machine's settings the steps read."""
    names = (*PIP_SECRETS, *(APT_SECRETS if apt else ()))
    # Archives of this machine serve another suite of Debian, and no Ubuntu.
    content = settings.secrets(base.suite if base.distribution == "debian" else "", "")
    return {name: content[name] for name in names}


def _add_local_archives(sources: Sequence[WheelSource], settings: PipSettings, folder: Path) -> tuple[str, ...]:
    """Copy the source archives that this machine has in pip's folders into the context of a build of wheels."""
    pins = " ".join(source.pin for source in sources)
    found = []
    for path in sorted(path for local in settings.local_folders for path in local.glob("*.tar.gz")):
        content = path.read_bytes()
        if path.name not in found and hashlib.sha256(content).hexdigest() in pins:
            (folder / "archives" / path.name).write_bytes(content)
            found.append(path.name)
    return tuple(found)
