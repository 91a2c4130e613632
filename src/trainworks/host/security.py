"""What a distribution's own archive has by way of security updates, asked with this machine's apt.

Nothing of this machine's own apt changes: lists, cache and settings are a private folder's. apt checks the archive's
signature with the keys that this machine trusts.
"""

from __future__ import annotations

import gzip
import io
import os
import re
import tarfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
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
"""Reads an index however it is compressed, and downloads a file with apt's own settings."""

POCKET = "-security"
"""How the suites end in which Debian and Ubuntu publish security updates."""

UPDATE_SECONDS: Final = 300.0
DOWNLOAD_SECONDS: Final = 120.0

ENTRY = re.compile(r"^\S+ \((?P<version>[^)\s]+)\) [^;]+;", re.MULTILINE)
"""The first line of one version's entry in a Debian changelog (Debian policy 4.4)."""

CVE = re.compile(r"\bCVE-\d{4}-\d{4,}\b")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A package that the archive offers.

    Attributes:
        name, version: Its own.
        source, source_version: Those of the source package that it was built from.
        address: Where it lies, and ``sha256`` what it must be.
        size: Bytes.
    """

    name: str
    version: str
    source: str
    source_version: str
    address: str
    sha256: str
    size: int


@dataclass(frozen=True, kw_only=True)
class Pocket:
    """A suite of security updates.

    Attributes:
        suite: Its name.
        signed: When the distribution signed it, where it is signed.
        candidates: What it has of the packages that were asked about.
        folder, configuration: Those of the apt that asked.
    """

    suite: str
    signed: datetime | None
    candidates: tuple[Candidate, ...]
    folder: Path
    configuration: Path

    def changelog(self, candidate: Candidate) -> str:
        """Return a package's Debian changelog, ``""`` where it has none of its own or cannot be downloaded."""
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
        suite: Code name of the distribution's release.
        settings: This machine's; its archives are asked first.
        image: The image's own archives.
        debian: Whether the suite is one of Debian: this machine's archives are of no other distribution.
    """
    own = sources_for(suite, settings.apt.sources, settings.suite) if debian else ()
    lines = own or sources_for(suite, image, suite)
    return tuple(line for line in lines if f" {suite}{POCKET} " in line)


@contextmanager
def security_pocket(
    suite: str, architecture: str, names: Collection[str], settings: HostSettings, lines: Collection[str]
) -> Iterator[Pocket]:
    """Ask the archive what it has of some packages.

    Args:
        suite: Code name of the distribution's release.
        architecture: As dpkg names it.
        names: The packages.
        settings: This machine's settings: proxies and CA hold.
        lines: ``security_sources`` of the suite.

    Raises:
        HostError: There is no apt here, or the archive cannot be reached or trusted; in apt's own words.
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
            updated = _apt(("apt-get", "update", "--quiet=2"), configuration, UPDATE_SECONDS)
            form = "$(FILENAME)\t$(REPO_URI)"
            listed = _apt(
                ("apt-get", "indextargets", "--format", form, "Created-By: Packages"), configuration, UPDATE_SECONDS
            )
        except OSError as error:
            raise HostError(f"{error.filename} is not here to ask the archive with") from error
        targets = [line.split("\t") for line in listed.output.decode().splitlines()]
        if updated.status != 0 or not targets or not all(Path(path).is_file() for path, _ in targets):
            raise HostError(f"the archive of {suite}{POCKET} cannot be read: {_first_error(updated)}")
        candidates: list[Candidate] = []
        for path, repository in targets:
            index = _apt((HELPER, "cat-file", path), configuration, UPDATE_SECONDS).output.decode(errors="replace")
            candidates += parse_index(index, repository, names)
        yield Pocket(
            suite=f"{suite}{POCKET}",
            signed=_signed(folder / "lists"),
            candidates=tuple(candidates),
            folder=folder,
            configuration=configuration,
        )


def parse_index(text: str, repository: str, names: Collection[str]) -> list[Candidate]:
    """Return what an index of packages (``Packages``) has of some names; ``repository`` is where its paths begin."""
    found = []
    for paragraph in re.split(r"\n\s*\n", text):
        name = re.match(r"Package: (\S+)", paragraph)
        if name is None or name[1] not in names:
            continue
        fields: Mapping[str, str] = dict(re.findall(r"^([A-Za-z0-9-]+): *(.*)$", paragraph, re.MULTILINE))
        # "Source: NAME (VERSION)": the version only where it is another one than the package's.
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


def _apt(argv: tuple[str, ...], configuration: Path, timeout: float) -> Finished:
    environment = {**os.environ, "APT_CONFIG": str(configuration), "LC_ALL": "C.UTF-8"}
    return run(argv, timeout=timeout, environment=environment)


def _first_error(done: Finished) -> str:
    """Return why apt failed: its first complaint, without the address, which may have a password in it."""
    lines = [line for line in done.words.splitlines() if line.startswith(("E:", "W:"))]
    line = next((line for line in lines if "Failed to fetch" in line or "GPG error" in line), "".join(lines[:1]))
    return re.sub(r"\S+://\S+", "its address", line).removeprefix("E: ").removeprefix("W: ") or "apt says nothing"


def _signed(lists: Path) -> datetime | None:
    """Return the date of the archive's release file, the oldest where there are several."""
    texts = (path.read_text(encoding="utf-8", errors="replace") for path in lists.glob("*Release"))
    dates = (re.search(r"^Date: (.+)$", text, re.MULTILINE) for text in texts)
    return min((parsedate_to_datetime(found[1]) for found in dates if found), default=None)
