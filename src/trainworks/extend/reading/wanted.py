"""A requirements file, read with what it includes, and the wheels and folders that it names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from trainworks.extend.reading.lines import OptionLine, check_hashes, read_requirements
from trainworks.extend.reading.text import decode
from trainworks.extend.requirements import FolderRequirement, GitRequirement, PackageRequirement, Wheel
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
class Wanted:
    """What a requirements file and all that it includes ask for.

    Attributes:
        requirements: Of distributions with a version; among them those that name a wheel.
        sources: Of git repositories.
        folders: Of folders of this machine.
        constraints: Of which versions, where anything asks for them.
        options: Where packages come from and which, in the order of the lines.
        wheels: Path or address of a wheel, as a requirement names it, to the wheel; those of the network come later.
        notes: What a person should know.
    """

    requirements: tuple[PackageRequirement, ...] = ()
    sources: tuple[GitRequirement, ...] = ()
    folders: tuple[WantedFolder, ...] = ()
    constraints: tuple[PackageRequirement, ...] = ()
    options: tuple[OptionLine, ...] = ()
    wheels: Mapping[str, Wheel] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def hashed(self) -> bool:
        """Whether the user locked them: they are taken as they are."""
        return any(requirement.hashed for requirement in self.requirements)


def read_wanted(
    file: Path, environment: Mapping[str, str], *, forbidden: tuple[str, ...] = ()
) -> tuple[Wanted, list[str]]:
    """Read a requirements file, the files that it includes (``-r``, ``-c``), and the wheels and folders that it names.

    Included files lie relative to the file that names them, as for pip. So do wheels and folders, or else relative to
    the current folder, where pip looks for them.

    Args:
        file: The requirements file.
        environment: Variables that lines may name.
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
        try:
            text = decode(path.read_bytes())
        except (OSError, ValueError) as error:
            problems.append(f"{place}: {path}: {error.strerror if isinstance(error, OSError) else error}")
            return
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

    read(file, "--requirements", (), constraint=False)
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
        notes=tuple(notes),
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
