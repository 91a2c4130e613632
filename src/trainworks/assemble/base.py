"""The base image of a build: from the engine's store, else from its registry, else made of the package archive."""

from __future__ import annotations

import os
import time

from trainworks.assemble.context import one_at_a_time
from trainworks.engine.protocol import Engine
from trainworks.engine.scratch import private_folder
from trainworks.facts.rows import Base
from trainworks.host.settings import HostSettings
from trainworks.plan.resolve import base_reference
from trainworks.terminal.build_progress import BuildProgress

PULL_SECONDS = 300.0
"""How long a pull of a base image may take before it is bootstrapped instead."""


def ensure_base(base: Base, engine: Engine, settings: HostSettings, progress: BuildProgress) -> None:
    """Make a base image that can be bootstrapped, unless the engine has it; another build of it is waited for.

    Raises:
        HostError: It cannot be pulled, and this machine cannot make it.
        BuildError, EngineUnavailableError, OutputError: The engine or a folder fails.
    """
    name = base_reference(base)
    if engine.inspect(name) is not None:
        return
    with one_at_a_time(name, os.environ):
        if engine.inspect(name) is None and not _pulled(base, name, engine, progress):
            _bootstrap(base, name, engine, settings, progress)


def _pulled(base: Base, name: str, engine: Engine, progress: BuildProgress) -> bool:
    if not base.digest:
        return False
    reference = f"{base.image}@{base.digest}"
    progress.line(f"  pulling {reference}")
    with progress.display.task("pulling", log=False):
        found = engine.pull(reference, timeout=PULL_SECONDS)
    if found:
        engine.tag(reference, name)
    else:
        progress.line("  no registry answers: the base image is bootstrapped instead")
    return found


def _bootstrap(base: Base, name: str, engine: Engine, settings: HostSettings, progress: BuildProgress) -> None:
    # Only here: a base image is made once on a machine.
    from trainworks.host.bootstrap import bootstrap

    started = time.monotonic()
    progress.line(f"  bootstrapping {name} from the {base.suite} package archive")
    with private_folder() as folder, progress.display.task("bootstrapping", log=False) as task:
        archive = folder / "base.tar"

        def note(line: str) -> None:
            task.note = line
            if progress.verbose:
                progress.line(f"  {'base':<20} {line}")

        bootstrap(base, name, archive, settings, note)
        engine.load(archive)
    progress.line(f"  {'base':<20} {time.monotonic() - started:6.1f} s  {name}")
