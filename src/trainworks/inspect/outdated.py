"""Finds what a rebuild of an image would bring: apt and uv are asked inside the image, with this machine's settings."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

from packaging.utils import canonicalize_name
from uv import find_uv_bin

from trainworks.engine import choose, image_in, read_files
from trainworks.engine.protocol import BuildRequest, Engine, Secret
from trainworks.engine.scratch import private_folder
from trainworks.errors import HostError, LockError, UnknownNameError
from trainworks.facts.rows import Base, Facts
from trainworks.host.archives import LIMITS, newer_than, todays_states
from trainworks.host.downloads import Client
from trainworks.host.pip import uv_configuration
from trainworks.host.settings import HostSettings, read_host_settings
from trainworks.inspect.targets import find_image
from trainworks.plan.model import IMAGE_TIME
from trainworks.plan.variants import TITLE_LABEL, image_named
from trainworks.terminal.output import say
from trainworks.terminal.progress import DISPLAY

QUESTION = """\
mkdir /answer && cd /answer || exit 1
cp /etc/os-release . || :
# Options win over settings: no file switches the check of the archive's signature off.
ask_apt() {
    export APT_CONFIG=/run/secrets/apt.conf LC_ALL=C.UTF-8
    apt-get update --quiet=2 -o APT::Update::Error-Mode=any -o Acquire::AllowInsecureRepositories=false \\
        -o Acquire::AllowWeakRepositories=false -o Acquire::AllowDowngradeToInsecureRepositories=false \\
        && apt-get dist-upgrade --simulate --quiet=2 >upgrade && dpkg-query --show >packages
}
ask_uv() {
    export UV_CACHE_DIR=/tmp/uv UV_CONFIG_FILE=/run/secrets/uv.toml NETRC=/run/secrets/netrc
    if [ -s /run/secrets/ca.pem ]; then export SSL_CERT_FILE=/run/secrets/ca.pem; fi
    set -- /run/uv pip list --python "$1" --format json
    "$@" >installed && "$@" --outdated >newest
}
if command -v apt-get >/dev/null; then ask_apt 2>apt.words; echo $? >apt.status; fi
python=$(command -v python || command -v python3) && { ask_uv "$python" 2>uv.words; echo $? >uv.status; }
exit 0
"""
"""Writes files into ``/answer``; one ``.status`` for each program that was asked."""

SECRETS = ("apt.conf", "sources.list", "ca.pem", "netrc", "uv.toml")

CHANGE = re.compile(r"^Inst (?P<name>\S+) (?:\[(?P<installed>\S+)\] )?\((?P<update>\S+) (?P<suites>.*)\)", re.MULTILINE)
"""A line of a simulated upgrade (apt-get(8)): the package, its versions, and the suites that have the newer one."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """A package in another version: that of an archive, of an index, or of the lock.

    Attributes:
        name: The package.
        installed: Its version in the image; ``""`` for a package that an update brings along.
        update: The other version.
    """

    name: str
    installed: str
    update: str


@dataclass(frozen=True, kw_only=True)
class OutdatedReport:
    """How an image compares with what its package archive, its package index and the lock of its target have today.

    Attributes:
        name: The image.
        identity: Its identifier.
        packages: How many packages of the distribution were compared.
        updates: What a suite of security updates has newer.
        others: What the other suites have newer, such as those of a point release.
        python: Python packages of which the index has a newer release.
        locked: Python packages in other versions than today's lock; empty for an image of no target.
        archives: Each suite that has moved since it was locked, in words: what the next image brings.
        days: Whole days since the build; None for an image with a constant time.
    """

    name: str
    identity: str
    packages: int
    updates: tuple[Update, ...]
    others: tuple[Update, ...] = ()
    python: tuple[Update, ...] = ()
    locked: tuple[Update, ...] = ()
    archives: tuple[str, ...] = ()
    days: int | None = None

    def as_values(self) -> dict[str, object]:
        """Return the report for programs."""
        return asdict(self)

    def as_text(self) -> str:
        """Return the report for people: a line for each package."""
        number = len(self.updates)
        lines = [f"{self.name}: {number or 'no'} security update{'' if number == 1 else 's'} missing"]
        for rows, end in (
            (self.updates, ""),
            (self.others, " (no security update)"),
            (self.locked, " (locked)"),
            (self.python, " (newest of the index)"),
        ):
            lines += [f"  {each.name} {each.installed or 'absent'} -> {each.update}{end}" for each in rows]
        lines += [f"{each}: `build.py lock --upgrade system` moves the lock" for each in self.archives]
        if self.days is not None:
            lines.append(f"built {self.days} day{'' if self.days == 1 else 's'} ago")
        lines.append(f"compared: {self.packages} packages of the distribution")
        return "\n".join(lines) + "\n"


def find_outdated(name: str, engine_name: str | None, facts: Facts, environment: Mapping[str, str]) -> OutdatedReport:
    """Compare an image with its package archive, its package index, and today's lock of its target.

    Args:
        name: A target, or an image of the engine.
        engine_name: Which engine has the image; ``None``: the first that answers.
        facts: The targets, and the distributions that bases stand on.

    Raises:
        UnknownNameError: The engine does not have the image, or it has no apt.
        BuildError: The image has no shell.
        HostError: The archive or the index cannot be reached, or the archive is not signed.
    """
    engine = choose(engine_name, report=say)
    reference = find_image(name, engine, facts)
    image = image_in(engine, reference)
    named = image_named(image.labels.get(TITLE_LABEL, ""), facts)
    with engine.container(image.reference) as container:
        release = _release(container.run(("cat", "/etc/os-release")).output)
    settings = read_host_settings(environment)
    base = next(
        (each for each in facts.bases if each.name == release.get("ID", "") + release.get("VERSION_ID", "")), None
    )
    suite = release.get("VERSION_CODENAME", "") if release.get("ID") == "debian" else ""
    say(f"asking apt and uv in {reference}")
    answer = ask(image.identifier, suite, settings, engine, wheel_index=named.row.wheel_index if named else "")
    if "apt.status" not in answer:
        raise UnknownNameError(
            f"{reference} has no apt: it is an image of {release.get('PRETTY_NAME', 'an unknown distribution')}",
            hint="scan its bill of materials instead (docs/ship.md)",
        )
    changes = [*CHANGE.finditer(answer["upgrade"])]
    installed: dict[str, str] = {
        canonicalize_name(row["name"]): row["version"] for row in json.loads(answer.get("installed") or "[]")
    }
    lock = facts.locks.get(facts.name_of(named.row)) if named else None
    return OutdatedReport(
        name=reference,
        identity=image.identifier,
        packages=len(answer["packages"].splitlines()),
        updates=tuple(_update(each) for each in changes if "-security" in each["suites"].lower()),
        others=tuple(_update(each) for each in changes if "-security" not in each["suites"].lower()),
        python=tuple(
            Update(name=row["name"], installed=row["version"], update=row["latest_version"])
            for row in json.loads(answer.get("newest") or "[]")
        ),
        locked=tuple(
            Update(name=each.name, installed=installed[each.name], update=each.version)
            for each in (lock.packages if lock else ())
            if not each.build and installed.get(each.name, each.version) != each.version
        ),
        archives=moved_archives(base, facts, settings) if base else (),
        days=days_since(image.created),
    )


def ask(
    identifier: str, suite: str, settings: HostSettings, engine: Engine, *, wheel_index: str = ""
) -> dict[str, str]:
    """Return the files of ``QUESTION``, which runs in a step on top of an image: steps get this machine's settings.

    Args:
        identifier: The image.
        suite: Code name of its Debian, whose packages this machine's archive has too; ``""``: its own sources hold.
        wheel_index: The package index of its framework, where this machine names none.

    Raises:
        BuildError: The image has no shell.
        HostError: A program that was asked failed; in its own words.
    """
    own = settings.apt.sources
    settings = replace(settings, apt=replace(settings.apt, sources=tuple(replace(each, trusted=False) for each in own)))
    uv = uv_configuration(settings.pip, vendor_index=wheel_index)
    secrets = {**settings.secrets(suite, ""), "uv.toml": uv.encode()}
    tag = f"trainworks/outdated:{uuid4().hex[:12]}"
    asked = f"{tag}-asked"
    mounts = " ".join(f"--mount=type=secret,id={name}" for name in SECRETS)
    mounts += " --mount=type=bind,source=uv,target=/run/uv --mount=type=bind,source=question,target=/run/question"
    with private_folder() as context:
        (context / "Dockerfile").write_text(
            f"FROM {asked} AS asked\nUSER root\nRUN {mounts} sh /run/question\n"
            "FROM scratch\nCOPY --from=asked /answer /\n",
            encoding="utf-8",
        )
        (context / "question").write_text(QUESTION, encoding="utf-8")
        (context / "uv").write_bytes(Path(find_uv_bin()).read_bytes())
        (context / "uv").chmod(0o755)
        request = BuildRequest(
            name=tag,
            context=context,
            tags=(tag,),
            secrets=tuple(Secret(identifier=name, content=secrets[name]) for name in SECRETS),
            arguments=settings.proxies,
            no_cache=True,
            network=settings.network,
        )
        try:
            engine.tag(identifier, asked)
            with DISPLAY.task("asking", log=False):
                engine.build(request, lambda _event: None)
            answer = read_files(engine, tag)
        finally:
            for each in (tag, asked):
                engine.remove(each)
    for program, whose in (("apt", "package archive"), ("uv", "package index")):
        if answer.get(f"{program}.status", "0").strip() != "0":
            # An address may have a password in it.
            words = re.sub(r"//[^/\s@]+@", "//", answer[f"{program}.words"]).strip()
            raise HostError(
                f"the {whose} of the image was not compared: {program} said:\n{words[-2000:]}",
                hint="the image is asked with this machine's sources, proxies and certificates",
            )
    return answer


def _update(change: re.Match[str]) -> Update:
    return Update(name=change["name"], installed=change["installed"] or "", update=change["update"])


def _release(text: str) -> dict[str, str]:
    pairs = (line.partition("=") for line in text.splitlines())
    return {name: value.strip("\"'") for name, sign, value in pairs if sign}


def moved_archives(base: Base, facts: Facts, settings: HostSettings) -> tuple[str, ...]:
    """Return the suites of a base whose packages are others than when they were locked, a sentence each."""
    locked = facts.archives_of(base)
    if not locked:
        return ()
    with Client(settings, limits=LIMITS) as client:
        try:
            today = {each.suite: each for each in todays_states(base, settings, client, locked)}
        except (LockError, HostError) as error:
            return (f"the lock of the archive was not compared: {error.message}",)
    return tuple(newer_than(each, today[each.suite]) for each in locked if today.get(each.suite, each) != each)


def days_since(created: str) -> int | None:
    """Return the whole days since an image's creation time; None without one, and for the constant of rebuilds."""
    if not created:
        return None
    # The daemon writes nanoseconds, which Python does not read.
    then = datetime.fromisoformat(f"{created[:19]}+00:00")
    return None if then.timestamp() <= IMAGE_TIME else max((datetime.now(UTC) - then).days, 0)
