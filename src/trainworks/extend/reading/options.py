"""What the option lines of requirements files change: where packages come from, and which versions count. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from packaging.utils import canonicalize_name

from trainworks.extend.reading.lines import OptionLine
from trainworks.extend.requirements import ExtendedBase
from trainworks.host.pip import PipSettings


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Which versions and files count.

    Attributes:
        prereleases: Also those that no requirement asks for (``--pre``).
        only_binary: Distributions that are taken as wheels only; ``:all:`` for all.
        no_binary: Distributions that are built from their source; ``:all:`` for all.
    """

    prereleases: bool = False
    only_binary: tuple[str, ...] = ()
    no_binary: tuple[str, ...] = ()


def choice_of(options: Iterable[OptionLine]) -> Choice:
    """Return which versions and files count, as pip reads it: the later line wins for a distribution."""
    binary: dict[str, str] = {}
    prereleases = False
    for option in options:
        prereleases |= option.name == "--pre"
        if option.name not in ("--only-binary", "--no-binary"):
            continue
        for name in filter(None, (word.strip() for word in option.value.split(","))):
            if name == ":all:":
                binary = {}
            if name == ":none:":
                binary = {each: found for each, found in binary.items() if found != option.name}
            else:
                binary[name if name == ":all:" else canonicalize_name(name)] = option.name
    return Choice(
        prereleases=prereleases,
        only_binary=tuple(name for name, option in binary.items() if option == "--only-binary"),
        no_binary=tuple(name for name, option in binary.items() if option == "--no-binary"),
    )


def settings_with(settings: PipSettings, options: Iterable[OptionLine]) -> PipSettings:
    """Return pip's settings as the lines of a requirements file change them, in their order."""
    for option in options:
        value = option.value
        match option.name:
            case "--index-url":
                # pip forgets the indexes that it had before.
                settings = replace(settings, index_url=value, extra_index_urls=())
            case "--extra-index-url":
                settings = replace(settings, extra_index_urls=(*settings.extra_index_urls, value))
            case "--find-links":
                settings = replace(settings, find_links=(*settings.find_links, value))
            case "--trusted-host":
                settings = replace(settings, trusted_hosts=(*settings.trusted_hosts, value))
            case "--no-index":
                settings = replace(settings, no_index=True)
    return settings


def without_vendor(
    options: Sequence[OptionLine], base: ExtendedBase, hosts: Container[str]
) -> tuple[tuple[OptionLine, ...], list[str]]:
    """Leave out the indexes of a framework's vendor that have another build than the base, and say so.

    The framework is the base's own. What is compiled against it has to be of the same build, which the index of
    another one does not have.

    Args:
        options: The lines.
        base: The image that is extended.
        hosts: Hosts of vendors' indexes.

    Returns:
        The lines that count, and a note for each of the others.
    """
    version = next((row.version for row in base.distributions if canonicalize_name(row.name) == "torch"), "")
    build = version.partition("+")[2]
    kept, notes = [], []
    for option in options:
        parts = urlsplit(option.value)
        if version and parts.hostname in hosts and (not build or build not in parts.path.split("/")):
            notes.append(f"{option.place}: not needed: torch {version} is the image's own")
        else:
            kept.append(option)
    return tuple(kept), notes
