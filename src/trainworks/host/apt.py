"""Read apt's settings on this machine, and write them for apt inside a build of another suite."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trainworks.engine import subprocesses

_PROBE_SECONDS: Final = 20.0
"""Seconds that ``apt-config`` may take."""

KEPT_SETTINGS = re.compile(
    r"Acquire::(http|https|ftp)(::[\w.*-]+)?::(Timeout|Dl-Limit|Verify-Peer|Verify-Host|Pipeline-Depth)"
    r"|Acquire::(http|https|ftp)::Proxy(::[\w.*-]+)?|Acquire::(Retries|ForceIPv4|ForceIPv6|Check-Valid-Until)",
    # apt's names have no case, and its dump has the case of the file.
    re.IGNORECASE,
)
"""Settings about reaching an archive. All others (hooks, paths) are not passed to builds."""

_SUITES_OF_DEBIAN = ("", "-updates", "-security", "-backports")
"""What Debian's own suites have behind the code name; others' have for example ``-pgdg``."""

ONE_LINE = re.compile(
    r"^deb\s+(?:\[(?P<options>[^\]]*)\]\s+)?(?P<uri>\S+)\s+(?P<suite>\S+)(?:\s+(?P<components>.+))?$"
)
"""An archive without suites has no components, and a folder in the place of the suite."""


@dataclass(frozen=True, kw_only=True)
class AptSource:
    """One archive that this machine installs from.

    Attributes:
        uri, suite, components: As in ``sources.list``.
        trusted: Whether the signature is not checked.
        old: Whether the signature may no longer be valid today.
        signed_by: The keyrings for the check, or a key itself;
            ``""``: those for every archive.
    """

    uri: str
    suite: str
    components: str
    trusted: bool = False
    old: bool = False
    signed_by: str = ""


@dataclass(frozen=True, kw_only=True)
class AptSettings:
    """apt's settings: lines ``Name "value";``, and the archives; empty on a machine without apt."""

    lines: tuple[str, ...] = ()
    sources: tuple[AptSource, ...] = ()


def read_apt_settings(root: Path = Path("/")) -> AptSettings:
    """Read this machine's apt configuration and sources; empty on a machine without apt.

    Runs ``apt-config dump``.

    Args:
        root: The folder with ``etc/apt``.
    """
    try:
        # subprocess.run would leave the child behind after an interrupt between fork and return.
        result = subprocesses.run(("apt-config", "dump"), timeout=_PROBE_SECONDS)
        dump = result.output.decode(errors="replace")
    except OSError:
        dump = ""
    lines = []
    for line in dump.splitlines():
        name = line.split(" ", 1)[0]
        is_empty = line.endswith('"";')
        if KEPT_SETTINGS.fullmatch(name) and not is_empty:
            lines.append(line)
    folder = root / "etc" / "apt"
    files = [folder / "sources.list", *sorted((folder / "sources.list.d").glob("*"))]
    sources: list[AptSource] = []
    for path in files:
        if path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
            sources += parse_deb822(text) if path.suffix == ".sources" else parse_one_line(text)
    return AptSettings(lines=tuple(lines), sources=tuple(sources))


def parse_one_line(text: str) -> list[AptSource]:
    """Parse a ``sources.list``: lines ``deb [options] uri suite components``.

    Other lines, such as those of ``deb-src``, are left out.
    """
    sources = []
    for line in text.splitlines():
        match = ONE_LINE.match(line.split("#", 1)[0].strip())
        if match is None:
            continue
        options = match["options"] or ""
        signed = re.search(r"(?:^|\s)signed-by=(\S+)", options)
        source = AptSource(
            uri=match["uri"],
            suite=match["suite"],
            components=(match["components"] or "").strip(),
            trusted="trusted=yes" in options,
            signed_by=signed[1] if signed else "",
        )
        sources.append(source)
    return sources


def parse_deb822(text: str) -> list[AptSource]:
    """Parse a ``.sources`` file: paragraphs of ``Key: value``.

    Returns:
        An archive for each address and suite of a paragraph; disabled paragraphs, and those of
        sources alone, are left out.
    """
    sources = []
    for paragraph in re.split(r"\n\s*\n", text):
        fields = _parse_fields(paragraph)
        is_enabled = fields.get("enabled", "yes").lower() != "no"
        if "deb" not in fields.get("types", "").split() or not is_enabled:
            continue
        components = " ".join(fields.get("components", "").split())
        for uri in fields.get("uris", "").split():
            for suite in fields.get("suites", "").split():
                source = AptSource(
                    uri=uri,
                    suite=suite,
                    components=components,
                    trusted=fields.get("trusted") == "yes",
                    signed_by=fields.get("signed-by", ""),
                )
                sources.append(source)
    return sources


def _parse_fields(paragraph: str) -> dict[str, str]:
    """Return the fields of a paragraph, by names in small letters.

    A value of several lines has line ends.
    """
    fields: dict[str, str] = {}
    key = ""
    for line in paragraph.splitlines():
        if line.startswith("#"):
            continue
        # A line that begins with a blank goes on with the field before it.
        if line[:1] in " \t" and key:
            fields[key] += "\n" + line.strip()
        elif ":" in line:
            key, value = line.split(":", 1)
            key = key.strip().lower()
            fields[key] = value.strip()
    return fields


def parse_suite(release: str) -> str:
    """Return the code name of a Debian by the text of its ``os-release``: ``bookworm``.

    ``""`` for another distribution, and for a Debian without a code name.
    """
    values = dict(line.split("=", 1) for line in release.splitlines() if "=" in line)
    if values.get("ID", "").strip('"') != "debian":
        return ""
    return values.get("VERSION_CODENAME", "").strip('"')


def translate_suite(name: str, own_suite: str, suite: str) -> str:
    """Return the suite of another Debian that a suite of this machine's Debian stands for.

    For example ``trixie-updates`` for ``bookworm-updates``.

    Args:
        name: The suite as a source of this machine names it.
        own_suite: Code name of this machine's Debian; ``""`` on another system.
        suite: Code name of the other Debian.

    Returns:
        ``""`` for a suite that is not Debian's own by its name, and on another system.
    """
    for ending in _SUITES_OF_DEBIAN:
        if own_suite and name == f"{own_suite}{ending}":
            return f"{suite}{ending}"
    return ""


def make_source_lines(suite: str, sources: Iterable[AptSource], own_suite: str) -> tuple[str, ...]:
    """Return the lines of a ``sources.list`` for ``suite``, with this machine's archives.

    Only archives of the machine's own Debian are used, by their suites (``translate_suite``); other
    vendors' archives are not Debian's. The result is empty if there is none, and for another
    distribution (``suite`` is ``""``): then the defaults of the bootstrap tool and of the base
    image apply.
    """
    if not suite:
        return ()
    lines = []
    for source in sources:
        target_suite = translate_suite(source.suite, own_suite, suite)
        if not target_suite or "main" not in source.components.split():
            continue
        words = []
        if source.trusted:
            words.append("trusted=yes")
        if source.old:
            words.append("check-valid-until=no")
        options = f"[{' '.join(words)}] " if words else ""
        lines.append(f"deb {options}{source.uri} {target_suite} main")
    return tuple(dict.fromkeys(lines))


def apt_configuration(settings: AptSettings, *, sources_path: str = "", ca_path: str = "") -> str:
    """Return the text of an ``apt.conf`` for inside a build.

    Args:
        settings: This machine's settings of apt, whose lines go in.
        sources_path: Path of the ``sources.list`` for the build; ``""`` to keep the image's own.
        ca_path: Path of the CA bundle; ``""`` for none.
    """
    lines = list(settings.lines)
    if sources_path:
        lines += [f'Dir::Etc::SourceList "{sources_path}";', 'Dir::Etc::SourceParts "-";']
    if ca_path:
        lines.append(f'Acquire::https::CAInfo "{ca_path}";')
    return "".join(f"{line}\n" for line in lines)
