"""Types of the promises of an image: a recipe declares them, and the tests of the image check them.

The front matter of a recipe has the promises that this recipe keeps. ``plan`` fills in the versions
and adds the promises of every image. Each promise names its component, so that a failure names the
component too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainworks.facts import field_types


@dataclass(frozen=True, kw_only=True)
class _Promise:
    """The field of every check: the component that makes the promise."""

    component: str


@dataclass(frozen=True, kw_only=True)
class PathCheck(_Promise):
    """A path of the image exists as the named kind, or (``absent``) does not exist.

    ``path`` is absolute and may be a glob for ``absent``.
    """

    path: field_types.SomePath
    state: Literal["file", "directory", "executable", "absent"]
    kind: Literal["path"] = "path"


@dataclass(frozen=True, kw_only=True)
class CommandCheck(_Promise):
    """A command of the image ends with status 0 and prints ``expect`` (a
    substring of stdout and stderr together).
    """

    command: tuple[str, ...]
    expect: str = ""
    why: str = ""
    kind: Literal["command"] = "command"


@dataclass(frozen=True, kw_only=True)
class ImportCheck(_Promise):
    """A Python module can be imported by the image's Python (``/opt/venv/bin/python``)."""

    module: field_types.Module
    kind: Literal["import"] = "import"


@dataclass(frozen=True, kw_only=True)
class PythonPackageCheck(_Promise):
    """Exactly this version of a Python distribution is installed in the image's environment."""

    distribution: field_types.AnyDistribution
    version: str
    kind: Literal["python-package"] = "python-package"


@dataclass(frozen=True, kw_only=True)
class PythonImportsCheck(_Promise):
    """The packages of these Python distributions can be imported, each in its own process.

    Attributes:
        distributions: The distributions. Their topmost packages are imported, or else their
            modules.
        released: The known dates of releases: ``("torch", "2025-01-29")``.
        python: Path of the interpreter.
    """

    distributions: tuple[str, ...]
    released: tuple[tuple[str, str], ...] = ()
    python: str = "/opt/venv/bin/python"
    kind: Literal["python-imports"] = "python-imports"


@dataclass(frozen=True, kw_only=True)
class DebianPackageCheck(_Promise):
    """A Debian package is installed.

    Its upstream version equals ``version`` or starts with ``version`` and a dot.

    An empty ``version`` asks for any.
    """

    package: str
    version: str = ""
    kind: Literal["debian-package"] = "debian-package"


@dataclass(frozen=True, kw_only=True)
class LoadedLibraryCheck(_Promise):
    """After ``import MODULE`` the process has the library mapped from exactly this path (by
    ``/proc/self/maps``).
    """

    module: field_types.Module
    library: field_types.Library
    kind: Literal["loaded-library"] = "loaded-library"


@dataclass(frozen=True, kw_only=True)
class SharedLibrariesCheck(_Promise):
    """Every ELF file under ``roots`` finds all its NEEDED libraries.

    ``provided`` are sonames that the host's driver brings at run time
    (``libcuda.so.1``): they may be missing.
    """

    roots: tuple[str, ...]
    provided: tuple[field_types.Soname, ...] = ()
    kind: Literal["shared-libraries"] = "shared-libraries"


@dataclass(frozen=True, kw_only=True)
class SingleLibraryCheck(_Promise):
    """At most one file of this soname exists in the whole image (two NCCLs in
    one image fail at run time).
    """

    soname: field_types.Soname
    kind: Literal["single-library"] = "single-library"


@dataclass(frozen=True, kw_only=True)
class LoadableLibraryCheck(_Promise):
    """A library can be loaded into a fresh process of the image's Python, with its dependencies.

    Attributes:
        library: A name that the loader finds by itself (``libnccl-net.so``, as NCCL loads its
            plugin), or a path, which may be a glob that one file fits.
        provided: Sonames that the host's driver brings. Without a driver ``dlopen`` fails for these
            too: then the loader's search is followed instead.
    """

    library: field_types.Library
    provided: tuple[field_types.Soname, ...] = ()
    kind: Literal["loadable-library"] = "loadable-library"


@dataclass(frozen=True, kw_only=True)
class OpenableLibrariesCheck(_Promise):
    """Every library that fits a pattern can be opened by itself, by the image's Python.

    Other libraries open these by name during a job, and no ELF file NEEDs them. The libraries that
    one of them needs from its own folder may be open before.

    Attributes:
        libraries: Patterns of paths, as of a shell; each fits at least one
            file. Links are passed by.
        provided: Sonames that the host's driver brings, as in ``LoadableLibraryCheck``.
        by_name: Whether each is opened by its name alone, as programs that are not of its wheel do.
    """

    libraries: tuple[field_types.Library, ...]
    provided: tuple[field_types.Soname, ...] = ()
    by_name: bool = False
    kind: Literal["openable-libraries"] = "openable-libraries"


@dataclass(frozen=True, kw_only=True)
class HardenedLibrariesCheck(_Promise):
    """Every file that fits a pattern is linked as Debian hardens its own:
    read-only relocations, no executable stack.

    Attributes:
        libraries: Patterns of paths, as of a shell; each fits at least one
            file. Links are passed by.
        guards: Whether at least one of the files guards its stack, and one calls functions of libc
            that know a buffer's size. A compiler puts these in only where code has such a buffer.
    """

    libraries: tuple[field_types.Library, ...]
    guards: bool = True
    kind: Literal["hardened-libraries"] = "hardened-libraries"


@dataclass(frozen=True, kw_only=True)
class ElfNeedsCheck(_Promise):
    """Files under ``roots`` were built against the image's libraries, not another major version.

    Attributes:
        roots: The folders of the ELF files.
        libraries: Sonames up to the major version (``libcudart.so.12``). An ELF file that NEEDs a
            library of that name needs exactly this one, or a longer soname (``libcudart.so.12.1``).
        cuda: The version of CUDA, such as ``12.1``: no Python distribution of the environment may
            be for another major version (``1.0+cu130``, ``nvidia-nccl-cu13``). ``""``: any.
    """

    roots: tuple[str, ...]
    libraries: tuple[field_types.Library, ...]
    cuda: str = ""
    kind: Literal["elf-needs"] = "elf-needs"


@dataclass(frozen=True, kw_only=True)
class DuplicatePackagesCheck(_Promise):
    """Nothing is installed twice.

    No Python distribution is twice on the environment's search path (a remainder, or one that
    shadows the other), no Debian package is there for two architectures, and no library of
    ``libraries`` (names without ``.so``, as ``libcudart``) is there with two major versions.
    """

    libraries: tuple[field_types.Library, ...] = ()
    kind: Literal["duplicate-packages"] = "duplicate-packages"


@dataclass(frozen=True, kw_only=True)
class OwnedFilesCheck(_Promise):
    """Every file and link of the image belongs to a package of the system, to a Python
    distribution, or to ``owned``.

    ``owned`` are patterns of recipes (``owns``) and of generated files
    (``images/generated-files.toml``): ``*`` stays within a folder, and ``**`` goes through all
    folders below.
    """

    owned: tuple[str, ...]
    kind: Literal["owned-files"] = "owned-files"


@dataclass(frozen=True, kw_only=True)
class PathRights:
    """The rights that paths may have at most.

    Attributes:
        paths: Patterns of paths.
        mode: The highest mode, octal: ``0640``.
        group: The group that the paths may belong to.
        attributes: Names of the extended attributes that they may have.
    """

    paths: tuple[str, ...]
    mode: str
    group: str
    attributes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DeliveredFilesCheck(_Promise):
    """Every file is as its maker delivered it: there, with its contents, and
    readable for every user.

    The sums are those of Python wheels (RECORD), of Debian's packages (documentation left out), and
    the declared ones. Bytecode is held to its source. Programs are executable, and those that
    ``update-alternatives`` chose are there.

    Attributes:
        removed: Patterns of delivered files that recipes remove or replace (``removes``), as in
            ``OwnedFilesCheck``.
        digests: Files that no package lists: component (or ``""``), path, SHA-256.
        copies: Files that no package lists: path, and the path of the file that it is a copy of,
            where that one exists.
        closed: Patterns of paths that only some users may read.
        sourced: Patterns of Python modules that no package lists and that bytecode was made of. A
            folder that has files of ``digests`` has no other.
        links: Links that no package lists: path and target of each, ``""`` for any target.
        privileged: Packages and paths of files that have rights of their own,
            where the package is installed.
        shared: Folders in which every user makes files, and changes no file of another user.
        rights: Who may read or change some paths: rows of ``images/rights.toml``.
    """

    removed: tuple[str, ...]
    digests: tuple[tuple[str, str, str], ...]
    copies: tuple[tuple[str, str], ...]
    closed: tuple[str, ...]
    sourced: tuple[str, ...]
    links: tuple[tuple[str, str], ...]
    privileged: tuple[tuple[str, str], ...]
    shared: tuple[str, ...] = ()
    rights: tuple[PathRights, ...] = ()
    kind: Literal["delivered-files"] = "delivered-files"


@dataclass(frozen=True, kw_only=True)
class MakersListsCheck(_Promise):
    """Each package is one of the plan's, and its list of files the one that its maker sent with it.

    Attributes:
        distributions: Names of the Python distributions that the image may have.
        debian: The Debian packages that are asked for, and patterns of those that an installer
            brings; others are needed by these.
        trims: Patterns of files that recipes remove from wheels, below site-packages (``trims``).
        strips: Patterns of libraries that recipes strip of symbols, likewise (``strips``).
    """

    distributions: tuple[str, ...]
    debian: tuple[str, ...]
    trims: tuple[str, ...] = ()
    strips: tuple[str, ...] = ()
    kind: Literal["makers-lists"] = "makers-lists"


@dataclass(frozen=True, kw_only=True)
class WorldWritableCheck(_Promise):
    """Only its owner can write to a path.

    ``allowed`` are folders for all, which must have the sticky bit.
    """

    allowed: tuple[str, ...]
    kind: Literal["world-writable"] = "world-writable"


@dataclass(frozen=True, kw_only=True)
class PrivilegedFilesCheck(_Promise):
    """Only declared files are setuid or setgid, or have capabilities.

    ``allowed`` are pairs of a system package and the path that it brings: the package must really
    be the file's owner.
    """

    allowed: tuple[tuple[str, str], ...]
    kind: Literal["privileged-files"] = "privileged-files"


@dataclass(frozen=True, kw_only=True)
class SearchPathCheck(_Promise):
    """Every entry of a path-like variable of the image's environment exists as a directory."""

    variable: str
    kind: Literal["search-path"] = "search-path"


@dataclass(frozen=True, kw_only=True)
class SecretsCheck(_Promise):
    """No private key, no credential, no CA or proxy of the build host, no package cache in any
    layer or the history.

    ``forbidden`` are literal strings that must not occur (for example the build host's proxy or
    index URL); the values come from the build host when the check runs and never stand in a plan.
    ``published`` are distributions of a package index: a key in one of their files, as their RECORD
    has it, is public and opens nothing.
    """

    published: tuple[str, ...] = ()
    kind: Literal["secrets"] = "secrets"


@dataclass(frozen=True, kw_only=True)
class SizeCheck(_Promise):
    """The image, uncompressed, is at most ``megabytes`` (1 MB = 1,000,000 bytes)."""

    megabytes: int
    kind: Literal["size"] = "size"


@dataclass(frozen=True, kw_only=True)
class LabelCheck(_Promise):
    """The image's configuration carries this label."""

    label: str
    value: str
    kind: Literal["label"] = "label"


@dataclass(frozen=True, kw_only=True)
class ConfigurationCheck(_Promise):
    """The image's configuration is the one that was rendered, and nothing was added.

    All other keys of a configuration have the engine's default, such as user, signal and volumes.

    Attributes:
        environment: Names and values of its variables, sorted.
        labels: Names of its labels, besides those that a build adds;
            ``LabelCheck`` has their values.
        entry_point: The program that a container runs.
        command: Default arguments of the entry point.
        working_folder: The folder that a container starts in.
        others: Whether the base image may have variables and labels of its own.
        architecture: The architecture of its programs: ``amd64``; ``""`` if not known.
        steps: The instructions that made the last layers, as
            ``render.steps.image_steps`` has them: its history.
    """

    environment: tuple[tuple[str, str], ...]
    labels: tuple[str, ...]
    entry_point: tuple[str, ...]
    command: tuple[str, ...]
    working_folder: str
    others: bool = False
    architecture: str = ""
    steps: tuple[str, ...] = ()
    kind: Literal["configuration"] = "configuration"


@dataclass(frozen=True, kw_only=True)
class StartCheck(_Promise):
    """A container that is started with these arguments, as a platform does it, ends with status 0.

    It prints ``expect``, a substring of stdout and stderr together. The arguments go through the
    image's entry point.

    Attributes:
        arguments: The arguments of the container.
        expect: The text that the container prints; ``""`` for any.
        why: The purpose in words; ``""`` if the arguments say enough.
        alone: Whether the container has no network, and cannot resolve its own name, if the engine
            can isolate containers.
    """

    arguments: tuple[str, ...]
    expect: str = ""
    why: str = ""
    alone: bool = False
    kind: Literal["start"] = "start"


Check = (
    PathCheck
    | CommandCheck
    | ImportCheck
    | PythonPackageCheck
    | PythonImportsCheck
    | DebianPackageCheck
    | LoadedLibraryCheck
    | LoadableLibraryCheck
    | OpenableLibrariesCheck
    | HardenedLibrariesCheck
    | SharedLibrariesCheck
    | ElfNeedsCheck
    | SingleLibraryCheck
    | DuplicatePackagesCheck
    | OwnedFilesCheck
    | DeliveredFilesCheck
    | MakersListsCheck
    | WorldWritableCheck
    | PrivilegedFilesCheck
    | SearchPathCheck
    | SecretsCheck
    | SizeCheck
    | LabelCheck
    | ConfigurationCheck
    | StartCheck
)
"""Any promise; ``kind`` tells them apart, in Python and in the plan's JSON."""

PROGRAMS = (
    CommandCheck,
    ImportCheck,
    PythonImportsCheck,
    LoadedLibraryCheck,
    OpenableLibrariesCheck,
    StartCheck,
)
"""Types of promises that start programs of the image or import its modules, and take minutes.

All other promises read files.
"""
