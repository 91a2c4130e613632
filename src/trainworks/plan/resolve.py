"""From a row and its components to the plan of an image: versions, files, environment, labels, tags, promises."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, get_args

from trainworks.errors import CompatibilityError, FactsError, LockError
from trainworks.facts.rows import (
    Artifact,
    Base,
    CheckRow,
    Component,
    Cuda,
    Facts,
    LockedPackage,
    Recipe,
    TargetRow,
)
from trainworks.plan import checks
from trainworks.plan.checks import Check
from trainworks.plan.compatibility import all_hold
from trainworks.plan.model import FabricVariable, ImagePlan, InstanceShape, Missing, Request, Step, Target
from trainworks.plan.parts import Parts, parts_of
from trainworks.plan.select import select_components, select_row
from trainworks.plan.versions import components_of

IMAGE = "image"
"""The name under which promises that belong to no single component are reported."""

BUILDER = "builder"
"""The component whose files serve the build stages and are never in an image."""

CHECK_TYPES: Mapping[str, type[Any]] = {check_type.kind: check_type for check_type in get_args(Check)}
"""Kinds of promises that a front matter may declare, by the word it uses."""

ENVIRONMENT: Mapping[str, str] = {
    "PATH": "/opt/trainworks/bin:/opt/venv/bin",
    "LANG": "C.UTF-8",
    "PYTHONUNBUFFERED": "1",
    "SAGEMAKER_SUBMIT_DIRECTORY": "/opt/ml/code",
}
"""What every image sets (design.md section 6); components add theirs in the front matter of their recipes."""

CUDA_ENVIRONMENT: Mapping[str, str] = {
    # The NVIDIA container runtime gives devices and driver libraries only to containers that ask with these two.
    "NVIDIA_VISIBLE_DEVICES": "all",
    "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
}

CUDA_LIBRARIES = ("libcudart", "libcublas", "libcublasLt", "libnvrtc", "libcupti", "libnvJitLink")
"""Libraries of the CUDA toolkit whose soname has the toolkit's own major version (CUDA 13's cuSPARSE is still 12)."""

SINGLE_CUDA_LIBRARIES = (
    *("libcudart", "libcublas", "libcublasLt", "libnvrtc", "libnvJitLink", "libcudnn", "libnccl"),
    *("libcufft", "libcurand", "libcusolver", "libcusparse"),
)
"""Libraries of which two major versions are one too many (Triton's profilers load their own CUPTI, by its path)."""

FOLDERS_FOR_ALL = ("/tmp", "/var/tmp", "/run/lock")  # noqa: S108  (names of folders in an image)
"""Where every user of a Linux system may write; with the sticky bit, so that files stay their owner's."""

DRIVER_LIBRARIES = ("libcuda.so.1", "libnvidia-ml.so.1")
"""Libraries that come with the host's driver and are never in an image."""


def make_plan(request: Request, facts: Facts) -> ImagePlan:
    """Return the plan of the image that a request means.

    Raises:
        UnknownNameError: See ``plan.select``.
        CompatibilityError: Its parts do not go together.
        LockError: The target has no lock, or the lock does not fit the row.
        FactsError: A promise in a recipe's front matter is malformed.
    """
    row = select_row(request, facts)
    return plan_row(row, select_components(request, row, facts), facts)


def plan_row(row: TargetRow, components: Sequence[Component], facts: Facts) -> ImagePlan:
    """Return the plan of one row of the matrix with these components; raises as ``make_plan`` does."""
    parts = parts_of(row, components, facts)
    if parts.unfit or parts.broken:
        raise CompatibilityError(facts.name_of(row), [*parts.unfit, *map(str, parts.broken)])
    return assemble(row, components, parts, facts)


def assemble(row: TargetRow, components: Sequence[Component], parts: Parts, facts: Facts) -> ImagePlan:
    """Return the plan that these parts make.

    Raises:
        LockError: The target has no lock, or the lock does not fit the row.
        FactsError: A promise in a recipe's front matter is malformed.
    """
    base, cuda = facts.base_by_name[row.base], facts.cuda_by_name[row.cuda]
    target = Target(
        name=facts.name_of(row),
        framework=row.framework,
        version=row.version,
        cuda=row.cuda,
        python=facts.python_of(row),
        base=base.name,
        sources=facts.sources_of(row),
    )
    steps = _steps(components, row, cuda, parts.versions, parts.artifacts, facts)
    recipes = [facts.recipes[step.recipe] for step in steps]
    image = _reference(row.image, base, facts)
    labels = _labels(target, row.image or base.image)
    plan_checks = (
        *_declared_checks(steps, facts.recipes, target.python),
        *_image_checks(steps, labels, row, base, cuda),
        *_file_checks(recipes, facts),
    )
    return ImagePlan(
        target=target,
        base=base,
        image=image,
        builder_image=_reference(row.builder_image, base, facts) if row.builder_image else "",
        interpreter=_interpreter(row, base, facts),
        cuda_home=CUDA_HOME if cuda.version and row.image else "",
        cuda_architectures=cuda.architectures,
        steps=steps,
        environment=_environment(cuda, recipes),
        labels=labels,
        tags=(f"trainworks/{row.framework}-training:{_tag(target)}{_variant(components, row, facts)}",),
        programs={name: path for recipe in recipes for name, path in recipe.programs.items()},
        checks=plan_checks,
        missing=_missing(components, row, cuda, facts),
        instances={
            row.name: InstanceShape(gpus=row.gpus, neuron_cores=row.neuron_cores, efa=row.efa, efa_rdma=row.efa_rdma)
            for row in facts.instances
        },
        fabric=tuple(
            FabricVariable(name=row.name, value=row.value, rdma=row.rdma, why=row.why)
            for row in facts.fabric
            if all_hold(row.when, parts.subjects)
        ),
        budget_megabytes=row.size_budget_megabytes,
        wheel_index=row.wheel_index,
        unlocked=_unlocked(steps, row, base, facts),
        advice=tuple(str(conflict) for conflict in parts.advice),
        imports=tuple(module for recipe in recipes for module in recipe.imports),
    )


CUDA_HOME = "/usr/local/cuda"
"""Where NVIDIA's images and installers put the toolkit."""


OWN_PYTHON = "cpython"
"""The component that compiles a Python which the base does not have."""


def _interpreter(row: TargetRow, base: Base, facts: Facts) -> str:
    """Return the path of a target's Python: the distribution's own, one more of its packages, or the compiled one."""
    python = facts.python_of(row)
    if python == base.python:
        return "/usr/bin/python3"
    return base.pythons.get(python, f"/opt/python/bin/python{python}")


def _reference(image: str, base: Base, facts: Facts) -> str:
    """Return what a stage stands on: a local name for what can be bootstrapped, else a reference with its digest."""
    if not image and base.bootstrap:
        return base_reference(base)
    name = image or base.image
    digest = facts.digest_by_image.get(name, "" if image else base.digest)
    return f"{name}@{digest}" if digest else name


def images_of(row: TargetRow, facts: Facts) -> tuple[str, ...]:
    """Return the names of the images that a target's stages are pulled for; none where its base is bootstrapped."""
    base = facts.base_by_name[row.base]
    own = row.image or ("" if base.bootstrap else base.image)
    return tuple(dict.fromkeys(name for name in (own, row.builder_image) if name))


def downloads_of(row: TargetRow, facts: Facts) -> tuple[Artifact, ...]:
    """Return what images of a row may download by themselves, optional components included, with the lock's hashes.

    What does not go with the target is left out: a plan that has it is refused.
    """
    usual = select_components(Request(framework="", cuda=row.cuda), row, facts)
    found = dict(parts_of(row, usual, facts).artifacts)
    for component in components_of(row, facts).values():
        if component not in usual:
            with_it = parts_of(row, (*usual, component), facts).artifacts
            found |= {component.name: with_it.get(component.name, ())}
    artifacts = (artifact for chosen in found.values() for artifact in chosen)
    return tuple({(each.url, each.git, each.commit): each for each in artifacts}.values())


def _unlocked(steps: Sequence[Step], row: TargetRow, base: Base, facts: Facts) -> tuple[str, ...]:
    return (
        *(
            f"base image {name}: no digest"
            for name in images_of(row, facts)
            if "@" not in _reference(name, base, facts)
        ),
        *(
            f"{artifact.name} {artifact.version}: no sha256 of {artifact.url}"
            for step in steps
            for artifact in step.artifacts
            if artifact.url and not artifact.sha256
        ),
    )


def _missing(components: Sequence[Component], row: TargetRow, cuda: Cuda, facts: Facts) -> tuple[Missing, ...]:
    """Return what images of this framework and cell could have, from whatever sources, and this one has not.

    What has the recipe of one that is in the image is the same under another name: the vendors' CUDA wheels.
    """
    chosen = {component.name for component in components}
    recipes = {component.recipe_name for component in components}
    possible = {
        component.name: component
        for component in facts.components
        if any(component.fits(row.framework, sources, cuda) for sources in component.sources)
    }
    return tuple(
        Missing(component=name, cost=component.without)
        for name, component in (possible | dict(facts.fitting_components(row))).items()
        if component.without and name not in chosen and component.recipe_name not in recipes
    )


def _tag(target: Target) -> str:
    return target.name.removeprefix(f"{target.framework}-")


def _variant(components: Sequence[Component], row: TargetRow, facts: Facts) -> str:
    """Return what sets an image apart from its target's usual one, for its tag: two contents never share a name."""
    usual = {component.name for component in select_components(Request(framework="", cuda=row.cuda), row, facts)}
    chosen = {component.name for component in components}
    words = "".join(
        [f"-with-{name}" for name in sorted(chosen - usual)] + [f"-without-{name}" for name in sorted(usual - chosen)]
    )
    return words if len(words) <= VARIANT_LENGTH else f"-variant-{hashlib.sha256(words.encode()).hexdigest()[:12]}"


VARIANT_LENGTH = 80
"""Longer than this a variant is named by a hash: registries take tags of at most 128 characters."""


def _environment(cuda: Cuda, recipes: Sequence[Recipe]) -> dict[str, str]:
    environment = dict(ENVIRONMENT)
    if cuda.version:
        environment |= CUDA_ENVIRONMENT
    for recipe in recipes:
        environment |= recipe.environment
    folders = [folder for recipe in recipes for folder in recipe.path]
    environment["PATH"] = ":".join([environment["PATH"], *folders, "/opt/ml/code", SYSTEM_PATH])
    return environment


SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def _labels(target: Target, base_image: str) -> dict[str, str]:
    device = f"gpu.{target.cuda}" if target.cuda.startswith("cu") else target.cuda
    aws = "com.amazonaws.ml.engines.sagemaker.dlc"
    return {
        "org.opencontainers.image.title": target.name,
        "org.opencontainers.image.version": target.version,
        "org.opencontainers.image.base.name": base_image,
        # AWS reads these to know what a training image is; at most 10 of them (images.md section 1d).
        f"{aws}.framework.{target.framework}.{target.version}": "true",
        f"{aws}.device.{device}": "true",
        f"{aws}.python.py{target.python.replace('.', '')}": "true",
        f"{aws}.os.{target.base}": "true",
        f"{aws}.arch.x86": "true",
        f"{aws}.job.training": "true",
    }


# Python files: the lock of a target is shared out among its components.


def _lock_of(row: TargetRow, facts: Facts) -> tuple[LockedPackage, ...]:
    name = facts.name_of(row)
    if name not in facts.locks:
        raise LockError(
            f"target {name} has no lock", hint=f"`python build.py lock --only {name}` makes images/lock/{name}.toml"
        )
    return facts.locks[name].packages


def python_requirements(component: Component, cuda: Cuda) -> tuple[str, ...]:
    """Return what a component asks of the package index for a CUDA cell: names, some with extras or a range."""
    rows = component.python if cuda.version else component.python_cpu or component.python
    return tuple(row.replace("{wheel_suffix}", cuda.wheel_suffix).replace("{cell}", cuda.name) for row in rows)


def python_patterns(component: Component, cuda: Cuda) -> tuple[str, ...]:
    """Return the names of a component's distributions for a CUDA cell; a name may have ``*``."""
    return tuple(distribution_name(row) for row in python_requirements(component, cuda))


def distribution_name(requirement: str) -> str:
    """Return the name of a requirement, without extras and range."""
    return re.split(r"[\[<>=!~]", requirement, maxsplit=1)[0]


def _steps(
    components: Sequence[Component],
    row: TargetRow,
    cuda: Cuda,
    versions: Mapping[str, str],
    artifacts: Mapping[str, tuple[Artifact, ...]],
    facts: Facts,
) -> tuple[Step, ...]:
    apt = facts.base_by_name[row.base].package_manager == "apt"
    shares = share_packages(components, cuda, _lock_of(row, facts), fetched=artifacts.keys())
    chosen = {component.name for component in components}
    steps = [
        Step(
            component=component.name,
            version=versions.get(component.name, ""),
            summary=component.summary,
            debian=component.debian if apt else component.rpm,
            python=shares[component.name],
            recipe=component.recipe_name,
            artifacts=artifacts.get(component.name, ()),
            builds_with=tuple(name for name in component.builds_with if name in chosen),
            in_image=component.name != BUILDER and not component.build_only,
        )
        for component in components
    ]
    more, more_to_build = _more_python(row, facts)
    every_package = tuple(sorted({*more, *(package for step in steps for package in step.debian)}))
    building = {
        each.name: each.build_debian if apt else each.build_rpm for each in facts.fitting_components(row).values()
    }
    # The builder's environment is made with the compiled Python, so that one is built on its own.
    own_python = building.pop(OWN_PYTHON, ())
    # Those of every component that the target could have: a target's variants share one builder.
    builder = tuple(dict.fromkeys([package for packages in building.values() for package in packages]))
    steps = [
        replace(step, debian=every_package)
        if step.component == "system"
        else replace(step, build_packages=(*builder, *more_to_build))
        if step.component == BUILDER
        else replace(step, build_packages=own_python)
        if step.component == OWN_PYTHON
        else step
        for step in steps
    ]
    _compare_versions(steps, {component.name: component for component in components}, row, cuda, facts)
    return tuple(steps)


def _more_python(row: TargetRow, facts: Facts) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the packages of a further Python of the distribution, for running and for building."""
    base = facts.base_by_name[row.base]
    interpreter = base.pythons.get(facts.python_of(row), "")
    if not interpreter:
        return (), ()
    # Debian, Ubuntu and Amazon Linux all name the package after the program.
    name = interpreter.rsplit("/", 1)[-1]
    return (name,), (f"{name}-dev" if base.package_manager == "apt" else f"{name}-devel",)


def share_packages(
    components: Sequence[Component], cuda: Cuda, lock: Sequence[LockedPackage], *, fetched: Set[str] = frozenset()
) -> dict[str, tuple[LockedPackage, ...]]:
    """Share the files of a lock out among components: every file belongs to exactly one, in the order of components.

    Each component takes what its row names (exact names before patterns); what is left goes to the first component
    that depends on it. What no chosen component needs is left out. Build files belong to ``builder``, and only they
    do: a distribution that is needed both while building and in the image (``setuptools``) stands in the lock twice.
    What a component replaces is left out; of one that is ``fetched`` by itself, only what it depends on is taken.
    """
    lock = [
        package
        for package in lock
        if not any(fnmatchcase(package.name, pattern) for each in components for pattern in each.replaces)
    ]
    own_names = {
        name for each in components if each.name in fetched for name in python_patterns(each, cuda) if "*" not in name
    }
    runtime = {package.name: package for package in lock if not package.build}
    owners = [component for component in components if component.name != BUILDER]
    roots = {
        component.name: [name for name in python_patterns(component, cuda) if name in runtime] for component in owners
    }
    needed = _closure([name for names in roots.values() for name in names], runtime)
    owner: dict[str, str] = {}
    for exact in (True, False):
        for component in owners:
            for pattern in python_patterns(component, cuda):
                if ("*" not in pattern) is exact:
                    for name in needed:
                        if fnmatchcase(name, pattern):
                            owner.setdefault(name, component.name)
    for component in owners:
        own = [name for name in needed if owner.get(name) == component.name]
        for name in _closure(own, runtime):
            owner.setdefault(name, component.name)
    return {
        component.name: tuple(
            package
            for package in lock
            if package.name not in own_names
            and (BUILDER if package.build else owner.get(package.name)) == component.name
        )
        for component in components
    }


def _closure(names: Sequence[str], packages: Mapping[str, LockedPackage]) -> list[str]:
    """Return these packages and all that they depend on, in a stable order."""
    found = dict.fromkeys(names)
    pending = list(found)
    while pending:
        for need in packages[pending.pop(0)].requires:
            if need in packages and need not in found:
                found[need] = None
                pending.append(need)
    return list(found)


def _compare_versions(
    steps: Sequence[Step], components: Mapping[str, Component], row: TargetRow, cuda: Cuda, facts: Facts
) -> None:
    """Refuse a lock that has other versions than the rows declare: the two must move together."""
    problems = []
    for step in steps:
        patterns = python_patterns(components[step.component], cuda)
        if not patterns or not step.version or step.artifacts:
            continue
        # The first distribution that a component's row names is the one whose version is the component's.
        locked = {package.name: package.version for package in step.python if fnmatchcase(package.name, patterns[0])}
        if step.version not in locked.values():
            found = ", ".join(f"{name} {version}" for name, version in locked.items()) or f"no {patterns[0]}"
            problems.append(f"{step.component}: the rows say {step.version}, the lock has {found}")
    if problems:
        name = facts.name_of(row)
        raise LockError(
            f"images/lock/{name}.toml does not fit its rows:\n  " + "\n  ".join(problems),
            hint=f"`python build.py lock --only {name}` makes it again",
        )


# Promises.


def _declared_checks(steps: Sequence[Step], recipes: Mapping[str, Recipe], python: str) -> list[Check]:
    found: list[Check] = []
    problems: list[str] = []
    chosen = {step.component for step in steps}
    for step in steps:
        for number, check_row in enumerate(recipes[step.recipe].checks, start=1):
            if check_row.beside and check_row.beside not in chosen:
                continue
            where = f"templates/components/{step.recipe}.j2: check {number} (kind = {check_row.kind!r})"
            try:
                found.append(_check(check_row, step, python))
            except TypeError as error:
                problems.append(f"{where}: {error}")
    if problems:
        raise FactsError(problems)
    return found


def _check(row: CheckRow, step: Step, python: str) -> Check:
    check_type = CHECK_TYPES.get(row.kind)
    if check_type is None:
        raise TypeError(f"unknown kind; there is: {', '.join(CHECK_TYPES)}")
    known = {"version": step.version, "version_major": _major(step.version), "python": python}
    values = {key: _fill(value, known) for key, value in row.values.items()}
    check: Check = check_type(component=step.component, **values)
    return check


def _fill(value: object, known: Mapping[str, str]) -> object:
    """Put versions into a text in the place of their names in braces, and make lists of TOML tuples."""
    if isinstance(value, str):
        for name, text in known.items():
            value = value.replace(f"{{{name}}}", text)
        return value
    if isinstance(value, list):
        return tuple(_fill(item, known) for item in value)
    return value


def _image_checks(
    steps: Sequence[Step], labels: Mapping[str, str], row: TargetRow, base: Base, cuda: Cuda
) -> list[Check]:
    """Return the promises that no recipe has to write: they follow from the plan, or hold for every image."""
    found: list[Check] = []
    for step in steps:
        if not step.in_image:
            continue
        found += [
            checks.PythonPackageCheck(component=step.component, distribution=package.name, version=package.version)
            for package in step.python
        ]
    system = next(step for step in steps if step.component == "system")
    package_check = checks.DebianPackageCheck if base.package_manager == "apt" else checks.RpmPackageCheck
    found += [package_check(component="system", package=package) for package in system.debian]
    found += [
        checks.SharedLibrariesCheck(
            component=IMAGE,
            roots=("/opt",),
            provided=DRIVER_LIBRARIES if cuda.version else (),
        ),
        checks.SearchPathCheck(component=IMAGE, variable="PATH"),
        checks.SearchPathCheck(component=IMAGE, variable="LD_LIBRARY_PATH"),
    ]
    found += [
        checks.PathCheck(component=IMAGE, path=path, state="directory")
        for path in ("/opt/ml/code", "/opt/ml/model", "/opt/ml/output", "/opt/ml/input")
    ]
    found += [
        checks.PathCheck(component=IMAGE, path=path, state="absent")
        for path in (
            "/usr/bin/*gcc*",
            "/usr/bin/cc",
            "/usr/include/python3*",
            "/opt/builder",
            "/var/lib/apt/lists/*_Packages*",
            "/var/cache/apt/*.bin",
            "/root/.cache",
        )
    ]
    if cuda.version:
        versions = dict.fromkeys(CUDA_LIBRARIES, cuda.version)
        versions |= {f"lib{step.component}": step.version for step in steps if step.component == "cudnn"}
        libraries = tuple(f"{name}.so.{_major(version)}" for name, version in versions.items() if version)
        found.append(checks.ElfNeedsCheck(component=IMAGE, roots=("/opt",), libraries=libraries, cuda=cuda.version))
    found.append(
        checks.DuplicatePackagesCheck(component=IMAGE, libraries=SINGLE_CUDA_LIBRARIES if cuda.version else ())
    )
    found += [checks.LabelCheck(component=IMAGE, label=label, value=value) for label, value in labels.items()]
    found += [
        checks.SecretsCheck(component=IMAGE),
        checks.SizeCheck(component=IMAGE, megabytes=row.size_budget_megabytes),
    ]
    return found


def _major(version: str) -> str:
    return version.partition(".")[0]


def _file_checks(recipes: Sequence[Recipe], facts: Facts) -> list[Check]:
    """Return the promises about all files of the image: that somebody knows them, and that none gives rights away."""
    owned = [pattern for recipe in recipes for pattern in recipe.owns]
    owned += [pattern for row in facts.generated_files for pattern in row.paths]
    allowed = [(row.package, path) for row in facts.privileged_files for path in row.paths]
    return [
        checks.OwnedFilesCheck(component=IMAGE, owned=tuple(owned)),
        checks.WorldWritableCheck(component=IMAGE, allowed=FOLDERS_FOR_ALL),
        checks.PrivilegedFilesCheck(component=IMAGE, allowed=tuple(allowed)),
    ]


def base_reference(base: Base) -> str:
    """Return the local name of a base image; pulled or bootstrapped, it gets this name before a build.

    The name changes with everything that decides the content, so that an old base is never taken for a new one.
    """
    decides = f"{base.suite} {base.image} {base.digest} {BOOTSTRAP_REVISION}"
    return f"trainworks/base:{base.suite}-{hashlib.sha256(decides.encode()).hexdigest()[:12]}"


BOOTSTRAP_REVISION = 2
"""To be raised when ``host.bootstrap`` makes other bytes from the same row."""
