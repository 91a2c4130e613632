"""Asks the archive of a distribution for its security updates, with this machine's apt.

This machine's own package lists do not change: lists, cache and settings are in a private folder. apt checks the
signature of the archive with the keys that this machine trusts; an archive without a good signature is an error.
"""

from __future__ import annotations

import gzip
import io
import os
import re
import tarfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from email.utils import parsedate_to_datetime
from itertools import pairwise
from pathlib import Path
from typing import Final

from trainworks.engine.processes import Finished, run
from trainworks.engine.scratch import private_folder
from trainworks.errors import HostError
from trainworks.host.apt import AptSource, apt_configuration, sources_for
from trainworks.host.settings import HostSettings

HELPER = "/usr/lib/apt/apt-helper"
"""Reads a compressed index, and downloads a file with apt's settings."""

POCKET = "-security"
"""End of the names of the suites with the security updates of Debian and Ubuntu."""

UPDATE_SECONDS: Final = 300.0
DOWNLOAD_SECONDS: Final = 120.0
COMPARE_SECONDS: Final = 20.0

SIGNED_ONLY = (
    "--option=Acquire::AllowInsecureRepositories=false",
    "--option=Acquire::AllowWeakRepositories=false",
    "--option=Acquire::AllowDowngradeToInsecureRepositories=false",
)
"""Options win over files: settings of this machine do not switch the check of the signature off."""

ENTRY = re.compile(r"^\S+ \((?P<version>[^)\s]+)\) [^;]+;", re.MULTILINE)
"""The first line of one version's entry in a Debian changelog (Debian policy 4.4)."""

CVE = re.compile(r"\bCVE-\d{4}-\d{4,}\b")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A package that the archive offers.

    Attributes:
        name, version: Its name and version.
        source, source_version: Name and version of the source package that it was built from.
        address: Its URL.
        sha256: Its hash.
        size: Its size in bytes.
    """

    name: str
    version: str
    source: str
    source_version: str
    address: str
    sha256: str
    size: int


@dataclass(frozen=True, kw_only=True)
class SecurityPocket:
    """A suite of security updates.

    Attributes:
        suite: Its name, such as ``bookworm-security``.
        signed: The date of its signed index.
        candidates: The packages that were asked about, as the suite has them.
        folder: The private folder of the apt that asked.
        configuration: The settings of that apt.
    """

    suite: str
    signed: datetime
    candidates: tuple[Candidate, ...]
    folder: Path
    configuration: Path

    def changelog(self, candidate: Candidate) -> str:
        """Return the Debian changelog of a package; ``""`` where it has none of its own or cannot be downloaded."""
        target = self.folder / "package.deb"
        target.unlink(missing_ok=True)
        address = (HELPER, "download-file", candidate.address, str(target), f"SHA256:{candidate.sha256}")
        if self._apt(address).status != 0 or not target.is_file():
            return ""
        unpacked = run(("dpkg-deb", "--fsys-tarfile", str(target)), timeout=DOWNLOAD_SECONDS)
        with tarfile.open(fileobj=io.BytesIO(unpacked.output)) as archive:
            for member in archive:
                if re.fullmatch(r"\./usr/share/doc/[^/]+/changelog(\.Debian)?\.gz", member.name) and member.isreg():
                    content = archive.extractfile(member)
                    assert content is not None
                    return gzip.decompress(content.read()).decode(errors="replace")
        return ""

    def _apt(self, argv: tuple[str, ...]) -> Finished:
        return _apt(argv, self.configuration, DOWNLOAD_SECONDS)


def security_sources(
    suite: str, settings: HostSettings, image: Iterable[AptSource] = (), *, debian: bool = True
) -> tuple[str, ...]:
    """Return the ``sources.list`` lines of a suite's security updates.

    Args:
        settings: This machine's; its archives are asked first.
        debian: Whether the suite is one of Debian: this machine's archives have only Debian's suites.

    Raises:
        HostError: Neither this machine nor the image names an archive of the suite.
    """
    own = sources_for(suite, _checked(settings.apt.sources), settings.suite) if debian else ()
    lines = own or sources_for(suite, _checked(image), suite)
    found = tuple(line for line in lines if f" {suite}{POCKET} " in line)
    if not found:
        raise HostError(
            f"no archive of {suite}{POCKET} is configured, neither in this machine's apt nor in the image",
            hint=f"add a source of the suite {suite}{POCKET} to /etc/apt/sources.list.d",
        )
    return found


def _checked(sources: Iterable[AptSource]) -> tuple[AptSource, ...]:
    """Return archives without ``trusted=yes``, which would skip the check of the signature."""
    return tuple(replace(each, trusted=False) for each in sources)


@contextmanager
def security_pocket(
    suite: str, architecture: str, names: Collection[str], settings: HostSettings, lines: Collection[str]
) -> Iterator[SecurityPocket]:
    """Ask the archive for the versions of some packages.

    Args:
        settings: This machine's settings: proxies and CA hold.
        lines: ``security_sources`` of the suite.

    Raises:
        HostError: apt is not installed, or the archive cannot be reached or is not signed; in apt's own words.
    """
    with private_folder() as folder:
        # apt drops its rights when it downloads, and must then still reach its folders.
        folder.chmod(0o755)
        for name in ("lists/partial", "cache/archives/partial"):
            (folder / name).mkdir(parents=True)
        (folder / "status").touch()
        sources = folder / "sources.list"
        # An address may have a password in it.
        sources.touch(mode=0o600)
        sources.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        certificate = folder / "ca.pem"
        certificate.write_bytes(settings.ca)
        configuration = folder / "apt.conf"
        configuration.write_text(
            apt_configuration(
                settings.apt,
                sources_path=str(sources),
                ca_path=str(certificate) if settings.ca else "",
            )
            + f'Dir::State "{folder}";\nDir::State::status "{folder}/status";\nDir::Cache "{folder}/cache";\n'
            f'Dir::Log "{folder}";\nAPT::Architecture "{architecture}";\nAPT::Architectures {{ "{architecture}"; }};\n'
            # What this machine does after an update (command-not-found and others) is about this machine.
            'Acquire::Languages "none";\n#clear APT::Update;\nAPT::Update::Error-Mode "any";\n',
            encoding="utf-8",
        )
        try:
            updated = _apt(("apt-get", "update", "--quiet=2", *SIGNED_ONLY), configuration, UPDATE_SECONDS)
            form = "$(FILENAME)\t$(REPO_URI)"
            listed = _apt(
                ("apt-get", "indextargets", "--format", form, "Created-By: Packages"), configuration, UPDATE_SECONDS
            )
        except OSError as error:
            raise HostError(
                f"cannot ask the archive of {suite}{POCKET}: {error.filename} is not installed",
                hint="`apt-get` and `dpkg` are part of Debian and Ubuntu; run this command there",
            ) from error
        targets = [line.split("\t") for line in listed.output.decode().splitlines()]
        if updated.status != 0 or not targets or not all(Path(path).is_file() for path, _ in targets):
            raise HostError(
                f"cannot read the archive of {suite}{POCKET}: {_first_error(updated)}",
                hint="the keys of the archive are in the packages debian-archive-keyring and ubuntu-keyring",
            )
        signed = _signed(folder / "lists")
        if signed is None:
            raise HostError(f"the archive of {suite}{POCKET} is not signed, or its Release file has no date")
        candidates: list[Candidate] = []
        for path, repository in targets:
            index = _apt((HELPER, "cat-file", path), configuration, UPDATE_SECONDS).output.decode(errors="replace")
            candidates += parse_index(index, repository, names)
        yield SecurityPocket(
            suite=f"{suite}{POCKET}",
            signed=signed,
            candidates=tuple(candidates),
            folder=folder,
            configuration=configuration,
        )


def parse_index(text: str, repository: str, names: Collection[str]) -> list[Candidate]:
    """Return the packages with these names in an index (``Packages``); its paths begin at ``repository``."""
    found = []
    for paragraph in re.split(r"\n\s*\n", text):
        name = re.match(r"Package: (\S+)", paragraph)
        if name is None or name[1] not in names:
            continue
        fields: Mapping[str, str] = dict(re.findall(r"^([A-Za-z0-9-]+): *(.*)$", paragraph, re.MULTILINE))
        # "Source: NAME (VERSION)": the version stands there only where it differs from the package's.
        source = re.match(r"(\S+)(?: \((.*)\))?", fields.get("Source", ""))
        found.append(
            Candidate(
                name=name[1],
                version=fields.get("Version", ""),
                source=source[1] if source else name[1],
                source_version=(source[2] if source else "") or fields.get("Version", ""),
                address=f"{repository.rstrip('/')}/{fields.get('Filename', '')}",
                sha256=fields.get("SHA256", ""),
                size=int(fields.get("Size", "0")),
            )
        )
    return found


def fixes_in(changelog: str) -> list[tuple[str, tuple[str, ...]]]:
    """Return the versions of a Debian changelog, newest first, each with the CVEs that its entry names."""
    places = [(entry.start(), entry["version"]) for entry in ENTRY.finditer(changelog)]
    return [
        (version, tuple(dict.fromkeys(CVE.findall(changelog[start:end]))))
        for (start, version), (end, _) in pairwise([*places, (len(changelog), "")])
    ]


def is_older(installed: str, offered: str) -> bool:
    """Say whether one version of a Debian package is older than another, as dpkg orders them.

    Raises:
        HostError: dpkg is not installed, or cannot read a version.
    """
    if installed == offered:
        return False
    try:
        done = run(("dpkg", "--compare-versions", installed, "lt", offered), timeout=COMPARE_SECONDS)
    except OSError as error:
        raise HostError("cannot compare versions: dpkg is not installed") from error
    if done.status not in (0, 1) or done.words.strip():
        raise HostError(f"dpkg cannot compare the versions {installed} and {offered}: {done.words.strip()}")
    return done.status == 0


def newest(versions: Sequence[str]) -> str:
    """Return the newest of some versions of a Debian package; raises as ``is_older`` does."""
    best, *others = versions
    for each in others:
        if is_older(best, each):
            best = each
    return best


def _apt(argv: tuple[str, ...], configuration: Path, timeout: float) -> Finished:
    environment = {**os.environ, "APT_CONFIG": str(configuration), "LC_ALL": "C.UTF-8"}
    return run(argv, timeout=timeout, environment=environment)


def _first_error(done: Finished) -> str:
    """Return why apt failed: its first message, without the address, which may contain a password."""
    lines = [line for line in done.words.splitlines() if line.startswith(("E:", "W:"))]
    line = next((line for line in lines if "Failed to fetch" in line or "GPG error" in line), "".join(lines[:1]))
    return (
        re.sub(r"[\w+.-]+://[^\s']+", "(address)", line).removeprefix("E: ").removeprefix("W: ")
        or "apt printed no message"
    )


def _signed(lists: Path) -> datetime | None:
    """Return the date of the archive's signed Release file, the oldest of several; nothing where none is signed."""
    signed = [*lists.glob("*InRelease"), *(path.with_suffix("") for path in lists.glob("*Release.gpg"))]
    texts = (path.read_text(encoding="utf-8", errors="replace") for path in signed)
    dates = (re.search(r"^Date: (.+)$", text, re.MULTILINE) for text in texts)
    return min((parsedate_to_datetime(found[1]) for found in dates if found), default=None)
