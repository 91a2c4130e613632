"""A requirements file, read with what it includes, and the wheels and folders that it names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from trainworks.extend.reading.lines import OptionLine, check_hashes, read_requirements
from trainworks.extend.reading.locks import read_lock, select
from trainworks.extend.reading.others import kind_of, sentence_of
from trainworks.extend.reading.projects import read_project
from trainworks.extend.reading.selection import Kept, Lock
from trainworks.extend.reading.text import decode
from trainworks.extend.requirements import ExtendedBase, FolderRequirement, GitRequirement, PackageRequirement, Wheel
from trainworks.extend.source import SourceTree, read_source
from trainworks.extend.wheels import read_wheel
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
    requirements: list[PackageRequirement] = []
    sources: list[GitRequirement] = []
    folders: list[WantedFolder] = []
    constraints: list[PackageRequirement] = []
    options: list[OptionLine] = []
    wheels: dict[str, Wheel] = {}
    locks: list[WantedLock] = []
    parts = parts or Parts()
    notes: list[str] = []
    problems: list[str] = []
    done: set[tuple[Path, bool]] = set()

    def read(path: Path, place: str, above: tuple[Path, ...], *, constraint: bool) -> None:
        there = path.resolve()
        if there in above:
            problems.append(f"{place}: {path} includes itself: {' -> '.join(map(str, (*above, there)))}")
            return
        if (there, constraint) in done:
            return
        done.add((there, constraint))
        if sentence := sentence_of(path.name):
            problems.append(f"{place}: {path} {sentence}")
            return
        try:
            text = decode(path.read_bytes())
        except (OSError, ValueError) as error:
            problems.append(f"{place}: {path}: {error.strerror if isinstance(error, OSError) else error}")
            return
        match kind_of(path.name):
            case "uv" | "pylock" as kind:
                try:
                    lock = read_lock(text, str(path), uv=kind == "uv", extras=parts.extras, groups=parts.groups)
                except ValueError as error:
                    problems.append(f"{place}: {path}: {error}")
                else:
                    locks.append(WantedLock(lock=lock, folder=path.parent))
                return
            case "project":
                found = read_project(text, str(path), extras=parts.extras, groups=parts.groups, own=path == file)
            case _:
                found = read_requirements(text, str(path), environment)
        problems.extend(found.problems)
        notes.extend(found.notes)
        options.extend(_from(path.parent, option) for option in found.options)
        for include in found.includes:
            named = local_path(include.path)
            if named is None:
                problems.append(f"{include.place}: it is on the network: download the file and name it")
                continue
            deeper = constraint or include.constraint
            read(path.parent / named, include.place, (*above, there), constraint=deeper)
        if constraint:
            constraints.extend(found.requirements)
            direct = [each.place for each in found.requirements if each.wheel]
            direct += [each.place for each in found.sources] + [each.place for each in found.folders]
            problems.extend(f"{each}: a constraint is a name with versions, such as numpy<2" for each in direct)
            return
        requirements.extend(found.requirements)
        sources.extend(found.sources)
        for folder in found.folders:
            try:
                folders.append(_read_folder(folder, path.parent, forbidden))
            except ValueError as error:
                problems.append(f"{folder.place}: {error}")
        for requirement in found.requirements:
            if requirement.wheel and local_path(requirement.wheel) is not None:
                try:
                    wheels[requirement.wheel] = _read_wheel(requirement, path.parent)
                except (OSError, ValueError) as error:
                    reason = error.strerror if isinstance(error, OSError) else error
                    problems.append(f"{requirement.place}: {reason}")

    if file is not None:
        read(file, "--requirements", (), constraint=False)
    if (parts.extras or parts.groups) and not (file is not None and kind_of(file.name)):
        if project is not None:
            read(project, "--source", (), constraint=False)
        else:
            chosen = [f"--extra {each}" for each in parts.extras] + [f"--group {each}" for each in parts.groups]
            problems += [f"{each}: there is no pyproject.toml and no lock that could have it" for each in chosen]
    problems += check_hashes(
        requirements,
        sources,
        [each.requirement for each in folders],
        all_hashed=any(option.name == "--require-hashes" for option in options),
    )
    problems += [problem for each in folders for problem in each.tree.problems]
    wanted = Wanted(
        requirements=tuple(requirements),
        sources=tuple(sources),
        folders=tuple(folders),
        constraints=tuple(constraints),
        options=tuple(options),
        wheels=wheels,
        locks=tuple(locks),
        notes=tuple(notes),
    )
    return wanted, problems


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
        folders: list[WantedFolder] = []
        for folder in found.folders:
            try:
                folders.append(_read_folder(folder, each.folder, forbidden))
                problems += folders[-1].tree.problems
            except ValueError as error:
                problems.append(f"{folder.place}: {error}")
        wheels: dict[str, Wheel] = {}
        for requirement in found.requirements:
            if requirement.wheel and local_path(requirement.wheel) is not None:
                try:
                    wheels[requirement.wheel] = _read_wheel(requirement, each.folder)
                except (OSError, ValueError) as error:
                    reason = error.strerror if isinstance(error, OSError) else error
                    problems.append(f"{requirement.place}: {reason}")
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
