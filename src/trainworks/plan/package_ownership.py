"""Shares the lock of a target out among its components: every Python file
belongs to exactly one of them.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence, Set
from fnmatch import fnmatchcase

from trainworks.errors import LockError
from trainworks.facts.rows import Component, Cuda, Facts, LockedPackage
from trainworks.plan.model import Step
from trainworks.plan.target import TargetContext

BUILDER = "builder"
"""The component with the files that serve build stages and are never in an image."""


def get_lock(target: TargetContext) -> tuple[LockedPackage, ...]:
    """Return the files of a target's lock; raises ``LockError`` for a target without one."""
    if target.lock is None:
        name = target.name
        raise LockError(
            f"target {name} has no lock",
            hint=f"`python build.py lock --only {name}` makes images/lock/{name}.toml",
        )
    return target.lock


def list_python_requirements(component: Component, cuda: Cuda) -> tuple[str, ...]:
    """Return a component's requirements for a CUDA cell: ``("torch", "nvidia-*", "ray<2.9")``."""
    rows = component.python
    if not cuda.version and component.python_cpu:
        rows = component.python_cpu
    values = {"{wheel_suffix}": cuda.wheel_suffix, "{cell}": cuda.name, "{cuda}": cuda.version}
    requirements = []
    for row in rows:
        requirements.append(re.sub(r"\{\w+\}", lambda field: values[field[0]], row))
    return tuple(requirements)


def list_python_patterns(component: Component, cuda: Cuda) -> tuple[str, ...]:
    """Return the names of a component's distributions for a CUDA cell; a name may have ``*``."""
    return tuple(parse_distribution_name(row) for row in list_python_requirements(component, cuda))


def parse_distribution_name(requirement: str) -> str:
    """Return the name of a requirement: ``ray`` of ``ray[train]>=2.9``."""
    return re.split(r"[\[<>=!~]", requirement, maxsplit=1)[0]


def share_packages(
    components: Sequence[Component],
    cuda: Cuda,
    lock: Sequence[LockedPackage],
    *,
    fetched: Set[str] = frozenset(),
    lent: Set[str] = frozenset(),
) -> dict[str, tuple[LockedPackage, ...]]:
    """Share the files of a lock out among components: every file belongs to exactly one, in the
    order of components.

    Each component takes the packages that its row names (exact names before patterns); the others
    go to the first component that depends on them. A package that no chosen component needs is left
    out. Build files belong to ``builder`` and to components that only build, which have nothing
    else: a distribution that is needed both while building and in the image (``setuptools``) is in
    the lock twice, maybe in two versions (the CUDA headers). A package that a component replaces is
    left out.

    Args:
        components: The chosen components.
        cuda: The CUDA cell.
        lock: The packages of the target's lock.
        fetched: Components that download their own wheel: only its dependencies are taken.
        lent: Components that are built for another one alone: they get those of their files that
            nothing in the image needs.
    """
    lock = _remove_replaced(lock, components)
    own_names: set[str] = set()
    for component in components:
        if component.name in fetched:
            own_names.update(list_python_patterns(component, cuda))

    building, in_image, lent_components = [], [], []
    for component in components:
        if component.name in lent:
            lent_components.append(component)
        elif component.name == BUILDER or component.build_only:
            building.append(component)
        else:
            in_image.append(component)
    build_packages = {package.name: package for package in lock if package.build}
    image_packages = {package.name: package for package in lock if not package.build}
    build_owners = _find_owners(building, cuda, build_packages)
    image_owners = _find_owners(in_image, cuda, image_packages)
    # A lent component gets only files that nothing else in the image needs.
    unowned = {
        name: package for name, package in image_packages.items() if name not in image_owners
    }
    image_owners |= _find_owners(lent_components, cuda, unowned)

    shares: dict[str, list[LockedPackage]] = {component.name: [] for component in components}
    for package in lock:
        owners = image_owners
        if package.build:
            owners = build_owners
        owner = owners.get(package.name)
        # A component that downloads its own wheel does not take the index's file of it.
        if owner is not None and package.name not in own_names:
            shares[owner].append(package)
    return {name: tuple(packages) for name, packages in shares.items()}


def _remove_replaced(
    lock: Sequence[LockedPackage], components: Sequence[Component]
) -> list[LockedPackage]:
    """Return a lock without the packages that a component replaces."""
    patterns: list[str] = []
    for component in components:
        patterns += component.replaces
    return [package for package in lock if not fits_any(package.name, patterns)]


def fits_any(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a name fits one of the patterns, such as ``nvidia-*``."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _find_owners(
    components: Sequence[Component], cuda: Cuda, packages: Mapping[str, LockedPackage]
) -> dict[str, str]:
    """Return the component of each package: ``{"torch": "torch", "nvidia-nccl-cu12": "nccl"}``.

    The owner is the first component that names the package exactly, or else by a pattern, or else
    depends on the package.
    """
    patterns = []
    for component in components:
        for pattern in list_python_patterns(component, cuda):
            patterns.append((component.name, pattern))
    exact_names = [pattern for _, pattern in patterns if pattern in packages]
    needed = _collect_dependencies(exact_names, packages)
    owner: dict[str, str] = {}
    for component_name, pattern in patterns:
        if pattern in packages:
            owner.setdefault(pattern, component_name)
    for component_name, pattern in patterns:
        if "*" not in pattern:
            continue
        for name in needed:
            if fnmatchcase(name, pattern):
                owner.setdefault(name, component_name)
    for component in components:
        own_packages = [name for name in needed if owner.get(name) == component.name]
        for name in _collect_dependencies(own_packages, packages):
            owner.setdefault(name, component.name)
    return owner


def find_protected_distributions(
    components: Sequence[Component], steps: Sequence[Step]
) -> dict[str, str]:
    """Return the distributions that a job's requirements must not replace, name to version.

    Exact names come first, then matches of patterns.
    """
    locked = _collect_image_versions(steps)
    versions = {step.component: step.version for step in steps}
    protected: dict[str, str] = {}
    for component in components:
        version = versions.get(component.name)
        own_names = {
            parse_distribution_name(row) for row in (*component.python, *component.python_cpu)
        }
        # A component without packages of the index comes with this repository: all names that such
        # a component protects are its own.
        own_names = own_names or {*component.protected}
        for name in component.protected:
            if "*" in name:
                continue
            if name in locked:
                protected.setdefault(name, locked[name])
            # The lock does not have a wheel that is downloaded by itself, or the name of another
            # build: ``tensorflow``, if ``tensorflow-cpu`` is in the image.
            if name in own_names and version:
                protected.setdefault(name, version)
    for component in components:
        for pattern in component.protected:
            if "*" not in pattern:
                continue
            for name, version in locked.items():
                if fnmatchcase(name, pattern):
                    protected.setdefault(name, version)
    return protected


def _collect_image_versions(steps: Sequence[Step]) -> dict[str, str]:
    """Return the locked packages in the image, name to version."""
    versions = {}
    for step in steps:
        if step.in_image:
            for package in step.python:
                versions[package.name] = package.version
    return versions


def find_companion_distributions(
    components: Sequence[Component], steps: Sequence[Step]
) -> dict[str, str]:
    """Return the distributions that are compiled against a component and are not in the image.

    For example ``{"torchvision": "torch"}``.
    """
    locked = _collect_image_versions(steps)
    companions = {}
    for component in components:
        for name in component.companions:
            if name not in locked:
                companions[name] = component.name
    return companions


def find_compiled_distributions(
    components: Sequence[Component], cuda: Cuda, facts: Facts
) -> dict[str, str]:
    """Return the distributions that need a missing component to compile for GPUs.

    For example ``{"deepspeed": "compiler"}``; nothing for an image without CUDA.
    """
    if not cuda.version:
        return {}
    chosen = {component.name for component in components if not component.build_only}
    compiled = {}
    for component in facts.components:
        if component.name not in chosen:
            compiled.update(dict.fromkeys(component.compiles, component.name))
    return compiled


def find_missing_compilers(in_image: Container[str], facts: Facts) -> dict[str, str]:
    """Return the distributions that can be installed only with a missing component.

    Args:
        in_image: The names of the image's components.
        facts: All facts.

    Returns:
        The component by the distribution's name: ``{"flash-attn": "compiler"}``.
    """
    needed = {}
    for component in facts.components:
        if component.name in in_image:
            continue
        for name in component.compiles:
            if name not in component.compiles_later:
                needed[name] = component.name
    return needed


def find_libraries_of_other_builds(
    components: Sequence[Component], steps: Sequence[Step], facts: Facts
) -> tuple[str, ...]:
    """Return the packages that only other builds of a framework need, sorted.

    Such as CUDA's libraries in an image without CUDA: ``pip freeze`` of such a build lists them,
    and so does a project's lock.
    """
    present = (
        _collect_image_versions(steps).keys()
        | find_protected_distributions(components, steps).keys()
    )
    return find_library_names(components, present, facts)


def find_library_names(
    components: Sequence[Component], present: Set[str], facts: Facts
) -> tuple[str, ...]:
    """Return the packages that only other builds of a framework need, sorted.

    Args:
        components: The components with the frameworks.
        present: Names of the distributions in the image.
        facts: All facts.
    """
    frameworks: set[str] = set()
    for component in components:
        if component.frameworks:
            frameworks.update(component.protected)
    patterns = set(frameworks)
    for component in facts.components:
        if component.needs_cuda:
            patterns.update(component.protected)
    dependencies: set[str] = set()
    for lock in facts.locks.values():
        packages = {package.name: package for package in lock.packages if not package.build}
        locked_frameworks = [name for name in frameworks if name in packages]
        dependencies.update(_collect_dependencies(locked_frameworks, packages))
    libraries = [name for name in dependencies - present if fits_any(name, patterns)]
    return tuple(sorted(libraries))


def _collect_dependencies(names: Sequence[str], packages: Mapping[str, LockedPackage]) -> list[str]:
    """Return these packages and all that they depend on, in a stable order."""
    closure = dict.fromkeys(names)
    pending = list(closure)
    while pending:
        for name in packages[pending.pop(0)].requires:
            if name in packages and name not in closure:
                closure[name] = None
                pending.append(name)
    return list(closure)
