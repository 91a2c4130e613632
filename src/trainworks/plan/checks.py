"""The promises of an image, as values: what a recipe declares and what the image tests ask the built image.

A promise is written once, in the front matter of the recipe that keeps it; ``plan`` fills in the versions and adds the
promises that hold for every image. Every check names its component, so that a failure says whose it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class PathCheck:
    """A path of the image exists as the named kind, or (``absent``) does not exist.

    ``path`` is absolute and may be a glob for ``absent``.
    """

    component: str
    path: str
    state: Literal["file", "directory", "executable", "absent"]
    kind: Literal["path"] = "path"


@dataclass(frozen=True, kw_only=True)
class CommandCheck:
    """A command of the image ends with status 0 and prints ``expect`` (a substring of stdout and stderr together)."""

    component: str
    command: tuple[str, ...]
    expect: str = ""
    why: str = ""
    kind: Literal["command"] = "command"


@dataclass(frozen=True, kw_only=True)
class ImportCheck:
    """A Python module can be imported by the image's Python (``/opt/venv/bin/python``)."""

    component: str
    module: str
    kind: Literal["import"] = "import"


@dataclass(frozen=True, kw_only=True)
class PythonPackageCheck:
    """Exactly this version of a Python distribution is installed in the image's environment."""

    component: str
    distribution: str
    version: str
    kind: Literal["python-package"] = "python-package"


@dataclass(frozen=True, kw_only=True)
class DebianPackageCheck:
    """A Debian package is installed; its upstream version equals ``version`` or starts with ``version`` and a dot.

    An empty ``version`` asks for any.
    """

    component: str
    package: str
    version: str = ""
    kind: Literal["debian-package"] = "debian-package"


@dataclass(frozen=True, kw_only=True)
class LoadedLibraryCheck:
    """After ``import MODULE`` the process has the library mapped from exactly this path (by ``/proc/self/maps``)."""

    component: str
    module: str
    library: str
    kind: Literal["loaded-library"] = "loaded-library"


@dataclass(frozen=True, kw_only=True)
class SharedLibrariesCheck:
    """Every ELF file under ``roots`` finds all its NEEDED libraries.

    ``provided`` are sonames that the host's driver brings at run time (``libcuda.so.1``): they may be missing.
    """

    component: str
    roots: tuple[str, ...]
    provided: tuple[str, ...] = ()
    kind: Literal["shared-libraries"] = "shared-libraries"


@dataclass(frozen=True, kw_only=True)
class SingleLibraryCheck:
    """At most one file of this soname exists in the whole image (two NCCLs in one image fail at run time)."""

    component: str
    soname: str
    kind: Literal["single-library"] = "single-library"


@dataclass(frozen=True, kw_only=True)
class SearchPathCheck:
    """Every entry of a path-like variable of the image's environment exists as a directory."""

    component: str
    variable: str
    kind: Literal["search-path"] = "search-path"


@dataclass(frozen=True, kw_only=True)
class SecretsCheck:
    """No private key, no credential, no CA or proxy of the build host, no package cache in any layer or the history.

    ``forbidden`` are literal strings that must not occur (for example the build host's proxy or index URL); the values
    come from the build host when the check runs and never stand in a plan.
    """

    component: str
    kind: Literal["secrets"] = "secrets"


@dataclass(frozen=True, kw_only=True)
class SizeCheck:
    """The image, uncompressed, is at most ``megabytes`` (1 MB = 1,000,000 bytes)."""

    component: str
    megabytes: int
    kind: Literal["size"] = "size"


@dataclass(frozen=True, kw_only=True)
class LabelCheck:
    """The image's configuration carries this label."""

    component: str
    label: str
    value: str
    kind: Literal["label"] = "label"


Check = (
    PathCheck
    | CommandCheck
    | ImportCheck
    | PythonPackageCheck
    | DebianPackageCheck
    | LoadedLibraryCheck
    | SharedLibrariesCheck
    | SingleLibraryCheck
    | SearchPathCheck
    | SecretsCheck
    | SizeCheck
    | LabelCheck
)
"""Any promise; ``kind`` tells them apart, in Python and in the plan's JSON."""
