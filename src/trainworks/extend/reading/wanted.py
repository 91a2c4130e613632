"""A requirements file, read with what it includes, and the wheels and folders that it names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from trainworks.extend.reading.lines import OptionLine, RequirementLines, check_hashes, read_requirements
from trainworks.extend.reading.locks import read_lock, select
from trainworks.extend.reading.others import kind_of, sentence_of
from trainworks.extend.reading.projects import read_project
from trainworks.extend.reading.selection import Kept, Lock
from trainworks.extend.reading.text import decode
from trainworks.extend.reading.wheel import read_wheel
from trainworks.extend.requirements import ExtendedBase, FolderRequirement, GitRequirement, PackageRequirement, Wheel
from trainworks.extend.source import SourceTree, read_source
from trainworks.host.pip import local_path


@dataclass(frozen=True, kw_only=True)
class WantedFolder:
    """A folder whose project is built: what asks for it, where it is, and its files."""

    requirement: FolderRequirement
    folder: Path
    tree: SourceTree


@dataclass(frozen=True, kw_only=True)
class WantedLock:
    """A lock of another tool, and the folder that its paths are relative to."""

    lock: Lock
    folder: Path


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Which parts of a project are wanted, beside its own dependencies."""

    extras: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a requirements file and all that it includes ask for.

    Attributes:
        requirements: Of distributions with a version; among them those that name a wheel.
        sources: Of git repositories.
        folders: Of folders of this machine.
        constraints: Of which versions, where anything asks for them.
        options: Where packages come from and which, in the order of the lines.
        wheels: Path or address of a wheel, as a requirement names it, to the wheel; those of the network come later.
        locks: Locks of other tools, of which a base gets what fits it (``with_locks``).
        hashes: Name and version to the hashes of the files that locks have.
        notes: What a person should know.
    """

    requirements: tuple[PackageRequirement, ...] = ()
    sources: tuple[GitRequirement, ...] = ()
    folders: tuple[WantedFolder, ...] = ()
    constraints: tuple[PackageRequirement, ...] = ()
    options: tuple[OptionLine, ...] = ()
    wheels: Mapping[str, Wheel] = field(default_factory=dict)
    locks: tuple[WantedLock, ...] = ()
    hashes: Mapping[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def hashed(self) -> bool:
        """Whether the user locked them: they are taken as they are."""
        return any(requirement.hashed for requirement in self.requirements)


def read_wanted(
    file: Path | None,
    environment: Mapping[str, str],
    *,
    parts: Parts | None = None,
    project: Path | None = None,
    forbidden: tuple[str, ...] = (),
) -> tuple[Wanted, list[str]]:
    """Read a requirements file, the files that it includes (``-r``, ``-c``), and the wheels and folders that it names.

    Included files lie relative to the file that names them, as for pip. So do wheels and folders, or else relative to
    the current folder, where pip looks for them.

    Args:
        file: The requirements file, a project file or a lock; ``None`` for the groups of ``project`` alone.
        environment: Variables that lines may name.
        parts: What is wanted of a project file or a lock: of ``file``, or else of ``project``.
        project: Project file of the code that is installed.
        forbidden: Texts of this machine that must not be in an image.

    Returns:
        What they ask for, and everything that is wrong with them.
    """
    reading = _Reading(environment, parts or Parts(), file, forbidden)
    if file is not None:
        reading.read(file, "--requirements")
    reading.read_parts(project)
    return reading.wanted(), reading.problems


class _Reading:
    """Files that are read one after the other: what they ask for so far, and what is wrong with them.

    Attributes:
        problems: What is wrong.
    """

    def __init__(
        self, environment: Mapping[str, str], parts: Parts, file: Path | None, forbidden: tuple[str, ...]
    ) -> None:
        """Nothing is read yet. The arguments are those of ``read_wanted``."""
        self.problems: list[str] = []
        self._environment = environment
        self._parts = parts
        self._file = file
        self._forbidden = forbidden
        self._done: set[tuple[Path, bool]] = set()
        self._found: list[RequirementLines] = []
        self._constraints: list[PackageRequirement] = []
        self._options: list[OptionLine] = []
        self._folders: list[WantedFolder] = []
        self._wheels: dict[str, Wheel] = {}
        self._locks: list[WantedLock] = []
        self._notes: list[str] = []

    def read(self, path: Path, place: str, above: tuple[Path, ...] = (), *, constraint: bool = False) -> None:
        """Read a file and what it includes.

        Args:
            path: The file.
            place: What names it, for messages.
            above: The files that include it.
            constraint: Whether it says only in which versions something is wanted, if anything asks for it.
        """
        there = path.resolve()
        if there in above:
            self.problems.append(f"{place}: {path} includes itself: {' -> '.join(map(str, (*above, there)))}")
            return
        if (there, constraint) in self._done:
            return
        self._done.add((there, constraint))
        found = self._lines_of(path, place)
        if found is None:
            return
        self.problems += found.problems
        self._notes += found.notes
        self._options += [_from(path.parent, option) for option in found.options]
        for include in found.includes:
            named = local_path(include.path)
            if named is None:
                self.problems.append(f"{include.place}: it is on the network: download the file and name it")
                continue
            deeper = constraint or include.constraint
            self.read(path.parent / named, include.place, (*above, there), constraint=deeper)
        if constraint:
            self._constrain(found)
        else:
            self._want(found, path.parent)

    def read_parts(self, project: Path | None) -> None:
        """Read the parts of a project that are wanted, unless the file that was read has them."""
        parts, file = self._parts, self._file
        if not (parts.extras or parts.groups) or (file is not None and kind_of(file.name)):
            return
        if project is not None:
            self.read(project, "--source")
        else:
            chosen = [f"--extra {each}" for each in parts.extras] + [f"--group {each}" for each in parts.groups]
            self.problems += [f"{each}: there is no pyproject.toml and no lock that could have it" for each in chosen]

    def wanted(self) -> Wanted:
        """Return what all of them ask for; what does not go together is a problem."""
        requirements = [each for found in self._found for each in found.requirements]
        sources = [each for found in self._found for each in found.sources]
        self.problems += check_hashes(
            requirements,
            sources,
            [each.requirement for each in self._folders],
            all_hashed=any(option.name == "--require-hashes" for option in self._options),
        )
        self.problems += [problem for each in self._folders for problem in each.tree.problems]
        return Wanted(
            requirements=tuple(requirements),
            sources=tuple(sources),
            folders=tuple(self._folders),
            constraints=tuple(self._constraints),
            options=tuple(self._options),
            wheels=self._wheels,
            locks=tuple(self._locks),
            notes=tuple(self._notes),
        )

    def _lines_of(self, path: Path, place: str) -> RequirementLines | None:
        """Return the lines of a file; ``None`` for a lock, which is kept for later, and for what cannot be read."""
        if sentence := sentence_of(path.name):
            self.problems.append(f"{place}: {path} {sentence}")
            return None
        try:
            text = decode(path.read_bytes())
        except (OSError, ValueError) as error:
            self.problems.append(f"{place}: {path}: {_reason(error)}")
            return None
        parts = self._parts
        match kind_of(path.name):
            case "uv" | "pylock" as kind:
                try:
                    lock = read_lock(text, str(path), uv=kind == "uv", extras=parts.extras, groups=parts.groups)
                except ValueError as error:
                    self.problems.append(f"{place}: {path}: {error}")
                else:
                    self._locks.append(WantedLock(lock=lock, folder=path.parent))
                return None
            case "project":
                own = path == self._file
                return read_project(text, str(path), extras=parts.extras, groups=parts.groups, own=own)
            case _:
                return read_requirements(text, str(path), self._environment)

    def _constrain(self, found: RequirementLines) -> None:
        self._constraints += found.requirements
        direct = [each.place for each in found.requirements if each.wheel]
        direct += [each.place for each in found.sources] + [each.place for each in found.folders]
        self.problems += [f"{each}: a constraint is a name with versions, such as numpy<2" for each in direct]

    def _want(self, found: RequirementLines, folder: Path) -> None:
        self._found.append(found)
        folders, problems = _read_folders(found.folders, folder, self._forbidden)
        wheels, wrong = _read_wheels(found.requirements, folder)
        self._folders += folders
        self._wheels |= wheels
        self.problems += problems + wrong


def with_locks(
    wanted: Wanted, base: ExtendedBase, kept: Kept, *, forbidden: tuple[str, ...] = ()
) -> tuple[Wanted, list[str]]:
    """Add what a base gets of the locks that are named; return everything that is wrong, too.

    Args:
        wanted: What is asked for.
        base: The image that is extended.
        kept: What of it is never replaced.
        forbidden: Texts of this machine that must not be in an image.
    """
    problems: list[str] = []
    for each in wanted.locks:
        found = select(each.lock, base, kept)
        problems += found.problems
        folders, unreadable = _read_folders(found.folders, each.folder, forbidden)
        wheels, wrong = _read_wheels(found.requirements, each.folder)
        problems += [*unreadable, *(problem for folder in folders for problem in folder.tree.problems), *wrong]
        wanted = replace(
            wanted,
            requirements=(*wanted.requirements, *found.requirements),
            sources=(*wanted.sources, *found.sources),
            folders=(*wanted.folders, *folders),
            constraints=(*wanted.constraints, *found.constraints),
            options=(*wanted.options, *(_from(each.folder, option) for option in found.options)),
            wheels={**wanted.wheels, **wheels},
            hashes={**wanted.hashes, **found.hashes},
            notes=(*wanted.notes, *found.notes),
        )
    return wanted, problems


def _from(folder: Path, option: OptionLine) -> OptionLine:
    """Return an option whose folder is looked for where pip does: beside the file, or else in the current folder."""
    named = local_path(option.value) if option.name in ("--find-links", "--index-url", "--extra-index-url") else None
    if named is None:
        return option
    place = folder / named
    return replace(option, value=str((place if place.exists() else named).resolve()))


def _reason(error: OSError | ValueError) -> str:
    return str(error.strerror if isinstance(error, OSError) else error)


def _read_folders(
    named: Iterable[FolderRequirement], folder: Path, forbidden: tuple[str, ...]
) -> tuple[list[WantedFolder], list[str]]:
    """Read the folders that a file in a folder names; return also what is wrong."""
    found: list[WantedFolder] = []
    problems: list[str] = []
    for each in named:
        try:
            found.append(_read_folder(each, folder, forbidden))
        except ValueError as error:
            problems.append(f"{each.place}: {error}")
    return found, problems


def _read_wheels(named: Iterable[PackageRequirement], folder: Path) -> tuple[dict[str, Wheel], list[str]]:
    """Read the wheels of this machine that a file in a folder names; return also what is wrong."""
    found: dict[str, Wheel] = {}
    problems: list[str] = []
    for each in named:
        if each.wheel and local_path(each.wheel) is not None:
            try:
                found[each.wheel] = _read_wheel(each, folder)
            except (OSError, ValueError) as error:
                problems.append(f"{each.place}: {_reason(error)}")
    return found, problems


def _read_folder(requirement: FolderRequirement, folder: Path, forbidden: tuple[str, ...]) -> WantedFolder:
    """Read the folder that a requirement names; raises ``ValueError``."""
    named = Path(requirement.path).expanduser()
    path = folder / named if (folder / named).is_dir() else named
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder")
    if not any((path / name).is_file() for name in ("setup.py", "pyproject.toml")):
        raise ValueError(f"{path} is not a project: it has no pyproject.toml and no setup.py")
    return WantedFolder(
        requirement=requirement, folder=path, tree=read_source(path, name=str(path), forbidden=forbidden)
    )


def _read_wheel(requirement: PackageRequirement, folder: Path) -> Wheel:
    """Read the wheel that a requirement names; raises ``OSError`` or ``ValueError``."""
    named = local_path(requirement.wheel.partition("#")[0])
    assert named is not None, "a wheel of the network is downloaded"
    path = folder / named if (folder / named).exists() else named
    return wheel_of(requirement, path.name, path.read_bytes())


def wheel_of(requirement: PackageRequirement, file: str, content: bytes) -> Wheel:
    """Return the wheel that a requirement names; raises ``ValueError`` for what is not one, or has another hash."""
    extras = requirement.specification.extras
    wheel = read_wheel(file, content, extras=f"[{','.join(sorted(extras))}]" if extras else "")
    if requirement.hashes and wheel.sha256 not in requirement.hashes:
        raise ValueError(f"the file has another hash: sha256:{wheel.sha256}")
    return wheel
