"""The base image of a build: from the engine's store, else from its registry,
else made of the package archive.

One whose digest is locked is pulled; where no registry answers, the plan is made again without the
digest, and its base is bootstrapped. The two have different names.
"""

from __future__ import annotations

import os
import time

from trainworks.build.context import one_at_a_time
from trainworks.engine.protocol import Engine
from trainworks.engine.temporary_folders import private_folder
from trainworks.host.settings import HostSettings
from trainworks.plan.own_base import OwnBase
from trainworks.terminal.build_progress import BuildProgress

PULL_SECONDS = 300.0
"""How long a pull of a base image may take before it is bootstrapped instead."""


def pull_base(
    base: OwnBase, engine: Engine, progress: BuildProgress, *, again: bool = False
) -> bool:
    """Pull a base image by its digest, unless the engine has it; say whether it is there.

    Registries that have the same image are asked in the row's order.

    Args:
        again: Whether it is pulled in any case.

    Raises:
        EngineUnavailableError, EngineError: The engine fails.
    """
    with one_at_a_time(base.name, os.environ):
        if not again and engine.inspect(base.name) is not None:
            return True
        for image in (base.row.image, *base.row.alternatives):
            folder, slash, last = image.rpartition("/")
            reference = f"{folder}{slash}{last.partition(':')[0]}@{base.row.digest}"
            progress.line(f"  pulling {reference}")
            with progress.display.task("pulling", log=False):
                found = engine.pull(reference, timeout=PULL_SECONDS)
            if found:
                engine.tag(reference, base.name)
                return True
        return False


def ensure_base(
    base: OwnBase,
    engine: Engine,
    settings: HostSettings,
    progress: BuildProgress,
    *,
    again: bool = False,
) -> None:
    """Bootstrap a base image, unless the engine has it or it is one to pull.

    Another build of it is waited for.

    Args:
        settings: This machine's settings, with the archive that is read.
        again: Whether it is made in any case.

    Raises:
        HostError: This machine cannot make it.
        BuildError, EngineUnavailableError, OutputError: The engine or a folder fails.
    """
    if base.origin == "pulled" or (not again and engine.inspect(base.name) is not None):
        return
    with one_at_a_time(base.name, os.environ):
        if again or engine.inspect(base.name) is None:
            _bootstrap(base, engine, settings, progress)


def _bootstrap(
    base: OwnBase, engine: Engine, settings: HostSettings, progress: BuildProgress
) -> None:
    """Make a base image, load it into the engine, and show the progress."""
    # Only here: a base image is made once on a machine.
    from trainworks.host.bootstrap import bootstrap

    started = time.monotonic()
    progress.line(f"  bootstrapping {base.name} from the {base.row.suite} package archive")
    with private_folder() as folder, progress.display.task("bootstrapping", log=False) as task:
        archive = folder / "base.tar"

        def note(line: str) -> None:
            task.note = line
            if progress.verbose:
                progress.line(f"  {'base':<20} {line}")

        bootstrap(base, archive, settings, note)
        engine.load(archive)
    progress.line(f"  {'base':<20} {time.monotonic() - started:6.1f} s  {base.name}")
