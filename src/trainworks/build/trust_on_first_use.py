"""``--trust-first-use``: records the missing hashes of a target, and builds from the same bytes."""

from __future__ import annotations

import os
from dataclasses import replace

from trainworks.build.session import BuildSession
from trainworks.errors import LockError
from trainworks.facts.data import writable_root
from trainworks.facts.load import load
from trainworks.host.cache import cache_folder
from trainworks.host.downloads import Client
from trainworks.inputs.lock_artifacts import LockRun, lock_artifacts, lock_base_images
from trainworks.plan.model import Request
from trainworks.plan.resolve import make_plan
from trainworks.plan.select import row_named
from trainworks.registry.protocol import Patience
from trainworks.registry.tools import Registries
from trainworks.terminal.download_progress import Fetching
from trainworks.terminal.output import say


def with_first_use(request: Request, session: BuildSession) -> BuildSession:
    """Record a target's missing hashes and digests, from today's downloads.

    Locked versions stay.

    Args:
        request: The request of the build.
        session: The session. Its mirror's folder, or one in the user's cache, keeps
            the downloads for the build.

    Returns:
        The session with the new records.

    Raises:
        LockError: Inputs cannot be downloaded, or differ from the published
            hashes; the error names all of them, the others are recorded.
        OutputError: The rows are those of an installed package.
    """
    plan = make_plan(request, session.facts)
    mirror = session.mirror
    folder = mirror.folder or cache_folder(os.environ, "files")
    if not (mirror.folder or mirror.address):
        # Also where all is recorded: an earlier run may have been interrupted after its downloads.
        mirror = replace(mirror, folder=folder)
    if not plan.unlocked:
        return replace(session, mirror=mirror) if folder.is_dir() else session
    writable_root(session.root, "`--trust-first-use`")
    rows = (row_named(plan.target.name, session.facts),)
    run = LockRun(rows=rows, facts=session.facts, root=session.root, report=say)
    fetching = Fetching()
    with Client(session.settings, watch=fetching) as client, fetching.shown("fetching"):
        problems = lock_artifacts(run, client, mirror=folder, missing=True)
    with Registries(session.settings, report=say, patience=Patience(attempts=3)) as registries:
        problems += lock_base_images(run, registries, missing=True)
    facts = load(session.root)
    for url, row in facts.locked_artifact_by_url.items():
        if url not in session.facts.locked_artifact_by_url:
            say(
                "warning: first seen today:"
                f" {url}, sha256 {row.sha256}, {row.size} bytes; commit images/lock"
            )
    for name, digest in facts.digest_by_image.items():
        if name not in session.facts.digest_by_image:
            say(f"warning: first seen today: base image {name}, {digest}; commit images/lock")
    if problems:
        noun = "inputs" if len(problems) > 1 else "input"
        title = f"{len(problems)} {noun} of {plan.target.name} cannot be recorded:"
        raise LockError(
            "\n  ".join((title, *problems)),
            hint="the others are recorded; repeat the command where the rest can be downloaded",
        )
    return BuildSession(root=session.root, facts=facts, mirror=mirror)
