"""A requirements file, read with what it includes and the wheels that it names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trainworks.extend.reading.lines import check_hashes, read_requirements
from trainworks.extend.reading.text import decode
from trainworks.extend.requirements import GitRequirement, PackageRequirement, Wheel
from trainworks.extend.wheels import read_wheel
from trainworks.host.pip import local_path


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a requirements file and all that it includes ask for.

    Attributes:
        requirements: Of distributions with a version; among them those that name a wheel.
        sources: Of git repositories.
        constraints: Of which versions, where anything asks for them.
        wheels: Path or address of a wheel, as a requirement names it, to the wheel.
    """

    requirements: tuple[PackageRequirement, ...] = ()
    sources: tuple[GitRequirement, ...] = ()
    constraints: tuple[PackageRequirement, ...] = ()
    wheels: Mapping[str, Wheel] = field(default_factory=dict)

    @property
    def hashed(self) -> bool:
        """Whether the user locked them: they are taken as they are."""
        return any(requirement.hashed for requirement in self.requirements)


def read_wanted(file: Path) -> tuple[Wanted, list[str]]:
    """Read a requirements file, the files that it includes (``-r``, ``-c``) and the wheels that it names.

    Included files lie relative to the file that names them, as for pip. So do wheels, or else relative to the current
    folder, where pip looks for them.

    Returns:
        What they ask for, and everything that is wrong with them.
    """
    requirements: list[PackageRequirement] = []
    sources: list[GitRequirement] = []
    constraints: list[PackageRequirement] = []
    wheels: dict[str, Wheel] = {}
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
        found = read_requirements(text, str(path))
        problems.extend(found.problems)
        for include in found.includes:
            deeper = constraint or include.constraint
            read(path.parent / include.path, include.place, (*above, there), constraint=deeper)
        if constraint:
            constraints.extend(found.requirements)
            direct = [each.place for each in found.requirements if each.wheel]
            direct += [each.place for each in found.sources]
            problems.extend(f"{each}: a constraint is a name with versions, such as numpy<2" for each in direct)
            return
        requirements.extend(found.requirements)
        sources.extend(found.sources)
        for requirement in found.requirements:
            if requirement.wheel:
                try:
                    wheels[requirement.wheel] = _read_wheel(requirement, path.parent)
                except (OSError, ValueError) as error:
                    reason = error.strerror if isinstance(error, OSError) else error
                    problems.append(f"{requirement.place}: {reason}")

    read(file, "--requirements", (), constraint=False)
    problems += check_hashes(requirements, sources)
    wanted = Wanted(
        requirements=tuple(requirements), sources=tuple(sources), constraints=tuple(constraints), wheels=wheels
    )
    return wanted, problems


def _read_wheel(requirement: PackageRequirement, folder: Path) -> Wheel:
    """Read the wheel that a requirement names; raises ``OSError`` or ``ValueError``."""
    named = local_path(requirement.wheel.partition("#")[0])
    assert named is not None, "an address on the network is a problem of its line"
    path = folder / named if (folder / named).exists() else named
    extras = requirement.specification.extras
    wheel = read_wheel(path.name, path.read_bytes(), extras=f"[{','.join(sorted(extras))}]" if extras else "")
    if requirement.hashed and wheel.sha256 not in requirement.hashes:
        raise ValueError(f"the file has another hash: sha256:{wheel.sha256}")
    return wheel
