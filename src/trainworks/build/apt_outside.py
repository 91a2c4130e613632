"""Runs apt for an image outside of it: in a step on our own base image, with
the image's list of packages beside it.

The step has this machine's settings of apt, which may have logins, and runs our own programs alone.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final
from uuid import uuid4

import requests

from trainworks.build.base import ensure_base, pull_base
from trainworks.engine import read_files
from trainworks.engine.protocol import BuildRequest, Engine, Secret
from trainworks.engine.temporary_folders import private_folder
from trainworks.errors import CompatibilityError, HostError, LockError
from trainworks.facts.rows import MACHINES, Facts
from trainworks.host.foreign_apt import FOLDER, ForeignDebian
from trainworks.host.settings import HostSettings
from trainworks.plan.own_base import OwnBase, own_base
from trainworks.plan.resolve import plan_row, remove_pulled_bases
from trainworks.terminal.build_progress import BuildProgress
from trainworks.terminal.progress import DISPLAY

_SECRETS: Final = ("apt.conf", "sources.list", "ca.pem")

_START: Final = f"""\
mkdir -p /answer/debs/partial && cd /answer || exit 1
# This machine's settings stand last: they win.
cat {FOLDER}/apt.conf /run/secrets/apt.conf >/tmp/apt.conf
export APT_CONFIG=/tmp/apt.conf LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive
# Options win over settings: no file switches the check of the archive's signature off.
update() {{
    apt-get update --quiet=2 -o APT::Update::Error-Mode=any $1
}}
"""

_SIGNED: Final = (
    "-o Acquire::AllowInsecureRepositories=false -o Acquire::AllowWeakRepositories=false "
    "-o Acquire::AllowDowngradeToInsecureRepositories=false"
)

_CREDENTIALS: Final = re.compile(r"//[^/\s@]+@")

_LAST_CHARACTERS: Final = 2000
"""Characters of apt's output in an error."""


def upgrade_outside(
    image: ForeignDebian, settings: HostSettings, facts: Facts, engine: Engine
) -> str:
    """Simulate an upgrade of an image with today's archives, in a step on our own base image.

    Args:
        image: apt's inputs from the image.
        settings: This machine's archives, proxies and CAs.
        facts: The rows of base images.
        engine: The engine that runs the step.

    Returns:
        The output of ``apt-get dist-upgrade --simulate``: lines ``Inst NAME ...``.

    Raises:
        HostError: apt failed, in its own words, or there is no base image to run it in.
        BuildError, EngineError, EngineUnavailableError: The engine failed.
    """
    # Also the archives that this machine trusts without a signature must have one here: the
    # answer is about security.
    own_sources = [replace(source, trusted=False) for source in settings.apt.sources]
    settings = replace(settings, apt=replace(settings.apt, sources=tuple(own_sources)))
    asking = f"update '{_SIGNED}' && apt-get dist-upgrade --simulate --quiet=2 >upgrade"
    failed = "the package archive of the image was not compared"
    answer = _run(asking, failed, _Machine(settings=settings, facts=facts, engine=engine), image)
    return answer["upgrade"].decode(errors="replace")


def download_outside(
    packages: Sequence[str],
    image: ForeignDebian,
    settings: HostSettings,
    facts: Facts,
    engine: Engine,
) -> dict[str, bytes]:
    """Download packages for an image, and those that they need and the image lacks.

    Args:
        packages: The names of the packages.
        image: apt's inputs from the image.
        settings: This machine's archives, proxies and CAs.
        facts: The rows of base images.
        engine: The engine that runs the step.

    Returns:
        The files ``NAME.deb``: path to content.

    Raises:
        HostError, BuildError, EngineError, EngineUnavailableError: As ``upgrade_outside`` does.
    """
    words = shlex.join(packages)
    sources = settings.apt_secrets(image.suite)["sources.list"]
    # The engine keeps the answer for as long as image, packages and archives are the same.
    asking = (
        f": {hashlib.sha256(sources).hexdigest()}; update && "
        "apt-get install --download-only --yes --no-install-recommends"
        f" -o Dir::Cache::archives=/answer/debs {words}"
    )
    failed = f"{', '.join(packages)} cannot be fetched for the image"
    answer = _run(
        asking, failed, _Machine(settings=settings, facts=facts, engine=engine), image, cached=True
    )
    return {name: content for name, content in answer.items() if name.endswith(".deb")}


@dataclass(frozen=True, kw_only=True)
class _Machine:
    """The parts of this machine that a step needs: its settings, our base images, the engine."""

    settings: HostSettings
    facts: Facts
    engine: Engine


def _run(
    asking: str, failed: str, machine: _Machine, image: ForeignDebian, *, cached: bool = False
) -> dict[str, bytes]:
    """Run a line of shell on our own base image; return the files that it left in ``/answer``.

    The image of the step is removed from the engine.

    Args:
        asking: The line of shell.
        failed: The beginning of the message of an error.
        machine: The settings and the engine.
        image: apt's inputs from the image, which the step mounts.
        cached: Whether an answer that the engine has in its cache may be taken.

    Raises:
        HostError: apt failed, in its own words, or there is no base image to run it in.
        BuildError, EngineError, EngineUnavailableError: The engine failed.
    """
    settings, engine = machine.settings, machine.engine
    base = _our_base(image.suite, machine)
    content = settings.apt_secrets(image.suite)
    secrets = {
        "apt.conf": content["apt.conf"],
        "sources.list": content["sources.list"],
        "ca.pem": settings.ca,
    }
    tag = f"trainworks/outside:{uuid4().hex[:12]}"
    mounts = " ".join(f"--mount=type=secret,id={name}" for name in _SECRETS)
    mounts += f" --mount=type=bind,source=foreign,target={FOLDER}"
    mounts += " --mount=type=bind,source=question,target=/run/question"
    with private_folder() as context:
        (context / "Dockerfile").write_text(
            f"FROM {base} AS asked\n"
            f"RUN {mounts} sh /run/question\n"
            "FROM scratch\n"
            "COPY --from=asked /answer /\n",
            encoding="utf-8",
        )
        script = (
            f"{_START}{{ {asking}; }} >>words 2>&1\n"
            "echo $? >apt-status\n"
            "rm -rf debs/partial debs/lock\n"
            "exit 0\n"
        )
        _write(context / "question", script.encode())
        # The certificates of a bare base image are none.
        trusted = {"ca.pem": Path(requests.utils.DEFAULT_CA_BUNDLE_PATH).read_bytes()}
        for name, text in {**trusted, **image.files}.items():
            _write(context / "foreign" / name, text)
        request = BuildRequest(
            name=tag,
            context=context,
            tags=(tag,),
            secrets=tuple(Secret(identifier=name, content=text) for name, text in secrets.items()),
            arguments=settings.proxies,
            no_cache=not cached,
            network=settings.network,
        )
        try:
            with DISPLAY.task("asking apt", log=False):
                engine.build(request, lambda _event: None)
            answer = read_files(engine, tag)
        finally:
            engine.remove(tag)
    if answer.get("apt-status", b"").strip() != b"0":
        # An address may have a password in it.
        words = _CREDENTIALS.sub("//", answer.get("words", b"").decode(errors="replace")).strip()
        more = "".join(f"\n{each}" for each in image.refused)
        raise HostError(
            f"{failed}: apt said:\n{words[-_LAST_CHARACTERS:]}{more}",
            hint="the archive is asked with this machine's sources, proxies and certificates",
        )
    return answer


def _write(path: Path, content: bytes) -> None:
    """Write a file that every user of the step can read: apt drops its privileges."""
    path.parent.mkdir(exist_ok=True)
    path.parent.chmod(0o755)
    path.write_bytes(content)
    path.chmod(0o644)


def _our_base(suite: str, machine: _Machine) -> str:
    """Return the name of a base image of ours, which is pulled or made where the engine has none.

    One that the engine has comes first, then one of the image's own Debian, then the newest.
    """
    processor, engine = os.uname().machine, machine.engine
    base_by_name: dict[str, OwnBase] = {}
    # Bases that are pulled come first; the same ones are made where no registry answers.
    for facts in (machine.facts, remove_pulled_bases(machine.facts)):
        for row in facts.targets:
            try:
                base = own_base(plan_row(row, facts))
            except (LockError, CompatibilityError):
                # A target that cannot be planned has no base either.
                continue
            if base is not None and MACHINES[base.row.architecture] == processor:
                base_by_name.setdefault(base.name, base)
    # Those of the image's own suite first (False comes before True).
    bases = sorted(base_by_name.values(), key=lambda base: base.row.suite != suite)
    for base in bases:
        if engine.inspect(base.name) is not None:
            return base.name
    progress = BuildProgress()
    for base in bases:
        if base.origin == "pulled":
            if pull_base(base, engine, progress):
                return base.name
            continue
        ensure_base(base, engine, machine.settings, progress)
        return base.name
    raise HostError(
        f"no base image of this project runs on {processor}",
        hint="run this on a machine of another kind",
    )
