"""Makes the plan of an image from a row and its components: versions, files, environment, labels,
tags.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Literal

from trainworks.errors import CompatibilityError
from trainworks.facts.rows import Artifact, Base, Component, Facts, Recipe, TargetRow
from trainworks.plan.compatibility import all_hold
from trainworks.plan.components import Parts, choose_parts
from trainworks.plan.declared_checks import (
    collect_known_versions,
    declared_checks,
    file_checks,
    fill_in_versions,
    image_checks,
    make_lists_check,
)
from trainworks.plan.locks import check_lock
from trainworks.plan.model import (
    FabricVariable,
    ImagePlan,
    InstanceShape,
    Missing,
    Request,
    Step,
    Target,
)
from trainworks.plan.own_artifacts import variant_of_artifacts, with_own_artifacts
from trainworks.plan.package_ownership import (
    BUILDER,
    find_companion_distributions,
    find_compiled_distributions,
    find_libraries_of_other_builds,
    find_missing_compilers,
    find_protected_distributions,
    get_lock,
    share_packages,
)
from trainworks.plan.select import select_components, select_row
from trainworks.plan.target import OWN_PYTHON, TargetContext, context_of
from trainworks.plan.variants import (
    BASE_NAME_LABEL,
    TITLE_LABEL,
    choose_usual_components,
    make_reference,
    make_variant,
)

ENVIRONMENT: Mapping[str, str] = {
    "PATH": "/opt/trainworks/bin:/opt/venv/bin",
    "LANG": "C.UTF-8",
    "PYTHONUNBUFFERED": "1",
    "SAGEMAKER_SUBMIT_DIRECTORY": "/opt/ml/code",
}
"""The environment of every image; components add theirs in the front matter of their recipes."""

CUDA_HOME = "/usr/local/cuda"
"""The folder of the toolkit in NVIDIA's images and installers."""

DEVICE_ENVIRONMENT: Mapping[str, str] = {
    # The NVIDIA container runtime gives devices and driver libraries only to
    # containers that ask with these two.
    "NVIDIA_VISIBLE_DEVICES": "all",
    "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
}
"""What an image for CUDA asks of the NVIDIA container runtime when a container starts."""

CUDA_ENVIRONMENT: Mapping[str, str] = {
    # Builds for CUDA look there first; AWS's images and their tests have it.
    "CUDA_HOME": CUDA_HOME,
    **DEVICE_ENVIRONMENT,
}

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""The end of every image's PATH."""

BOOTSTRAP_REVISION = 4
"""To be raised when ``host.bootstrap`` makes other bytes from the same row."""


def make_plan(request: Request, facts: Facts) -> ImagePlan:
    """Return the plan of the image that a request means.

    Raises:
        UnknownNameError: See ``plan.select``.
        CompatibilityError: Its parts do not go together.
        LockError: The target has no lock, or the lock does not fit the row.
        FactsError: A promise in a recipe's front matter is malformed.
    """
    row, facts = with_own_artifacts(request.artifacts, select_row(request, facts), facts)
    target = context_of(row, facts)
    components = select_components(request, target, facts)
    return plan_target(target, components, facts, variant_of_artifacts(request.artifacts))


def plan_row(row: TargetRow, facts: Facts) -> ImagePlan:
    """Return the plan of one row of the matrix with its default components.

    Raises as ``make_plan`` does.
    """
    target = context_of(row, facts)
    return plan_target(target, choose_usual_components(target, facts), facts)


def plan_target(
    target: TargetContext, components: Sequence[Component], facts: Facts, own_variant: str = ""
) -> ImagePlan:
    """Return the plan of a target with these components; raises as ``make_plan`` does.

    own_variant: Further words for the image's name, for differences besides its components.
    """
    parts = choose_parts(target, components, facts)
    if parts.unfit or parts.broken:
        broken_rules = [str(conflict) for conflict in parts.broken]
        raise CompatibilityError(target.name, [*parts.unfit, *broken_rules])
    return assemble(target, components, parts, facts, own_variant)


def assemble(
    context: TargetContext,
    components: Sequence[Component],
    parts: Parts,
    facts: Facts,
    own_variant: str = "",
) -> ImagePlan:
    """Return the plan that these parts make; own_variant: see ``plan_target``.

    Raises:
        LockError: The target has no lock, or the lock does not fit the row.
        FactsError: A promise in a recipe's front matter is malformed.
    """
    check_lock(context, facts)
    row, base, cell = context.row, context.base, context.cell
    target = _describe_target(context)
    steps = _make_steps(components, context, parts.artifacts)
    image_steps = [step for step in steps if step.in_image]
    recipes = [facts.recipes[step.recipe] for step in image_steps]
    variant = make_variant(components, context, facts) + own_variant
    labels = _make_labels(target, row.image or base.image, variant)
    environment = _merge_environment(context, image_steps, recipes)
    declared = declared_checks(image_steps, facts.recipes, target.python)
    plan_checks = (
        *declared,
        *image_checks(steps, labels, environment, context),
        *file_checks(recipes, facts),
        make_lists_check(steps, recipes, declared),
    )

    # A base that is named by its registry has no origin; another one is pulled by its digest, or
    # made of packages.
    origin: Literal["", "pulled", "bootstrapped"] = ""
    origin_base = base
    if base.bootstrap and not row.image:
        digest = facts.digest_of(base)
        origin = "bootstrapped"
        if digest:
            origin = "pulled"
        origin_base = replace(base, digest=digest)
    builder_image = ""
    if row.builder_image:
        builder_image = _pin_reference(row.builder_image, base, facts)
    # Packages bring CUDA as wheels: only an image that the row names has the toolkit's folder.
    cuda_home = ""
    if cell.version and row.image:
        cuda_home = CUDA_HOME
    programs: dict[str, str] = {}
    imports: list[str] = []
    for recipe in recipes:
        programs.update(recipe.programs)
        imports += recipe.imports
    in_image = [component for component in components if not component.build_only]
    names_in_image = [component.name for component in in_image]
    built_whole: list[str] = []
    for component in in_image:
        built_whole += component.compiles
    return ImagePlan(
        target=target,
        base=origin_base,
        image=_pin_reference(row.image, base, facts),
        origin=origin,
        archives=facts.archives_of(base),
        builder_image=builder_image,
        interpreter=_find_interpreter(context),
        cuda_home=cuda_home,
        cuda_architectures=cell.architectures,
        steps=steps,
        environment=environment,
        labels=labels,
        tags=(make_reference(row, facts, variant),),
        programs=programs,
        checks=plan_checks,
        missing=_find_missing_components(components, context, facts),
        instances=_collect_instance_shapes(facts),
        families=tuple(family.name for family in facts.families),
        fabric=_choose_fabric_variables(parts, facts),
        minimum_driver=cell.minimum_driver,
        budget_megabytes=row.size_budget_megabytes,
        wheel_index=row.wheel_index,
        unlocked=_find_unlocked_inputs(steps, context, facts),
        first_use=_find_inputs_of_first_use(steps, context, facts),
        advice=tuple(str(conflict) for conflict in parts.advice),
        imports=tuple(imports),
        protected=find_protected_distributions(components, steps),
        companions=find_companion_distributions(components, steps),
        compiled_by=find_compiled_distributions(components, cell, facts),
        needs=find_missing_compilers(names_in_image, facts),
        built_whole=tuple(built_whole),
        libraries=find_libraries_of_other_builds(components, steps, facts),
    )


def _describe_target(context: TargetContext) -> Target:
    """Return the names and versions of a target, as a plan shows them."""
    return Target(
        name=context.name,
        framework=context.row.framework,
        version=context.row.version,
        cuda=context.row.cuda,
        python=context.python,
        base=context.base.name,
        sources=context.sources,
        architecture=context.base.architecture,
    )


def _collect_instance_shapes(facts: Facts) -> dict[str, InstanceShape]:
    """Return the shapes of all instances, by name."""
    names = [field.name for field in fields(InstanceShape)]
    shapes = {}
    for row in facts.instances:
        values = {name: getattr(row, name) for name in names}
        shapes[row.name] = InstanceShape(**values)
    return shapes


def _choose_fabric_variables(parts: Parts, facts: Facts) -> tuple[FabricVariable, ...]:
    """Return the variables for network fabrics that fit these parts."""
    variables = []
    for row in facts.fabric:
        if all_hold(row.when, parts.properties):
            variable = FabricVariable(name=row.name, value=row.value, rdma=row.rdma, why=row.why)
            variables.append(variable)
    return tuple(variables)


def _find_interpreter(target: TargetContext) -> str:
    """Return the path of a target's Python.

    The distribution's own Python, a further one of its packages, or the compiled one:
    ``/opt/python/bin/python3.11``.
    """
    if target.python == target.base.python:
        return "/usr/bin/python3"
    return target.base.pythons.get(target.python, f"/opt/python/bin/python{target.python}")


def _pin_reference(image: str, base: Base, facts: Facts) -> str:
    """Return the reference of a stage's image, with its digest if that is known.

    For a base that can be bootstrapped, the local name.

    Args:
        image: The image that the target's row names; ``""`` for the base's own.
        base: The operating system of the target.
        facts: The recorded digests.
    """
    if not image and base.bootstrap:
        return base_reference(base, facts)
    name = image or base.image
    digest_of_row = ""
    if not image:
        digest_of_row = base.digest
    digest = facts.digest_by_image.get(name, digest_of_row)
    if not digest:
        return name
    # A registry may have lost the image: then the digest is that of its alternative.
    reference = facts.alternative_by_image.get(name, name)
    return f"{reference}@{digest}"


def remove_pulled_bases(facts: Facts) -> Facts:
    """Return the facts without the digests of bases that can be bootstrapped.

    A plan of these facts bootstraps such a base, as if no registry answered.
    """
    bases = []
    bootstrapped_images = set()
    for base in facts.bases:
        if base.bootstrap:
            bootstrapped_images.add(base.image)
            bases.append(replace(base, digest=""))
        else:
            bases.append(base)
    locked_images = [row for row in facts.locked_base_images if row.name not in bootstrapped_images]
    return replace(facts, bases=tuple(bases), locked_base_images=tuple(locked_images))


def list_images(target: TargetContext) -> tuple[str, ...]:
    """Return the names of the images that are pulled for a target's stages.

    A base that is bootstrapped is not one of them.
    """
    row, base = target.row, target.base
    image = row.image
    if not image and not base.bootstrap:
        image = base.image
    names = [name for name in (image, row.builder_image) if name]
    return tuple(dict.fromkeys(names))


def list_downloads(row: TargetRow, facts: Facts) -> tuple[Artifact, ...]:
    """Return the possible downloads of a row's images, optional components included.

    The artifacts have the lock's hashes. Artifacts that do not fit the target are left out: a plan
    with such an artifact is refused.
    """
    target = context_of(row, facts)
    usual = choose_usual_components(target, facts)
    # An optional component is planned beside the usual ones: its artifact may depend on theirs.
    artifacts = dict(choose_parts(target, usual, facts).artifacts)
    for component in target.components.values():
        if component not in usual:
            parts = choose_parts(target, (*usual, component), facts)
            artifacts[component.name] = parts.artifacts.get(component.name, ())
    unique = {}
    for component_artifacts in artifacts.values():
        for artifact in component_artifacts:
            unique[artifact.url, artifact.git, artifact.commit] = artifact
    return tuple(unique.values())


def _find_unlocked_inputs(
    steps: Sequence[Step], target: TargetContext, facts: Facts
) -> tuple[str, ...]:
    """Return a line for each input without a digest or hash."""
    lines = []
    for name in list_images(target):
        if "@" not in _pin_reference(name, target.base, facts):
            lines.append(f"base image {name}: no digest")
    for artifact in _collect_artifacts(steps):
        # An artifact without a URL comes from git, and is pinned by its commit.
        if artifact.url and not artifact.sha256:
            label = f"{artifact.name} {artifact.version}"
            lines.append(f"{label}: no sha256 of {artifact.url}")
    return tuple(lines)


def _collect_artifacts(steps: Sequence[Step]) -> list[Artifact]:
    """Return the artifacts of all components."""
    artifacts: list[Artifact] = []
    for step in steps:
        artifacts += step.artifacts
    return artifacts


def _find_inputs_of_first_use(
    steps: Sequence[Step], target: TargetContext, facts: Facts
) -> tuple[str, ...]:
    """Return the inputs with a hash or digest in the lock alone, and without a signature.

    Their maker publishes no hash: the lock has that of the first download.
    """
    published = {row.url for row in facts.artifacts if row.sha256 or row.signature}
    published |= {row.name for row in facts.base_images if row.digest}
    published |= {row.image for row in facts.bases if row.digest}
    # The digest of a row is not that of an alternative.
    published -= facts.alternative_by_image.keys()
    unpublished = [name for name in list_images(target) if name not in published]
    lines = [f"base image {name}" for name in unpublished if name in facts.digest_by_image]
    for artifact in _collect_artifacts(steps):
        is_locked = bool(artifact.url and artifact.sha256)
        if is_locked and artifact.url not in published:
            lines.append(f"{artifact.name} {artifact.version}")
    return tuple(lines)


def _find_missing_components(
    components: Sequence[Component], target: TargetContext, facts: Facts
) -> tuple[Missing, ...]:
    """Return the default components of this framework and cell that the image lacks.

    The components of all kinds of sources count: an image of packages may lack one of AWS.
    """
    row, cell = target.row, target.cell
    chosen = {component.name for component in components}
    recipes = {component.recipe_name for component in components}
    folders: set[str] = set()
    for name in recipes:
        folders.update(facts.recipes[name].path)
    candidates = {}
    for component in facts.components:
        for sources in component.sources:
            if component.fits(row.framework, sources, cell, row.base):
                candidates[component.name] = component
    candidates.update(target.fitting)

    missing = []
    for name, component in candidates.items():
        # A component with the recipe of one in the image is the same under another name: the
        # vendors' CUDA wheels.
        if name in chosen or component.recipe_name in recipes:
            continue
        # A component that is only added on request is missing in no image.
        if not component.default or not component.without:
            continue
        # A component that only makes folders which other parts have is not missing: AWS's paths.
        own_folders = facts.recipes[component.recipe_name].path
        if own_folders and folders.issuperset(own_folders):
            continue
        missing.append(Missing(component=name, cost=component.without))
    return tuple(missing)


def _merge_environment(
    target: TargetContext, steps: Sequence[Step], recipes: Sequence[Recipe]
) -> dict[str, str]:
    """Merge the variables of every image, of the base, of CUDA, and of recipes; later ones win."""
    environment = {**ENVIRONMENT, **target.base.environment}
    if target.cell.version:
        environment |= CUDA_ENVIRONMENT
    folders: list[str] = []
    libraries: list[str] = []
    for step, recipe in zip(steps, recipes, strict=True):
        known = collect_known_versions(step, target.python)
        for name, value in recipe.environment.items():
            environment[name] = fill_in_versions(value, known)
        folders += recipe.path
        libraries += recipe.libraries
    environment["PATH"] = ":".join([environment["PATH"], *folders, "/opt/ml/code", SYSTEM_PATH])
    if libraries:
        environment["LD_LIBRARY_PATH"] = ":".join(libraries)
    return environment


def _make_labels(target: Target, base_image: str, variant: str) -> dict[str, str]:
    """Return the labels of an image: names for people, and those that AWS reads."""
    device = target.cuda
    if device.startswith("cu"):
        device = f"gpu.{device}"
    architecture: str = target.architecture
    if architecture == "amd64":
        architecture = "x86"
    version = target.version.replace(".", "-")
    python = target.python.replace(".", "")
    aws = "com.amazonaws.ml.engines.sagemaker.dlc"
    return {
        TITLE_LABEL: f"{target.name}{variant}",
        "org.opencontainers.image.version": target.version,
        BASE_NAME_LABEL: base_image,
        # AWS reads these to recognise a training image; at most 10 of them. AWS writes the version
        # with dashes.
        f"{aws}.framework.{target.framework}.{version}": "true",
        f"{aws}.device.{device}": "true",
        f"{aws}.python.py{python}": "true",
        f"{aws}.os.{target.base}": "true",
        f"{aws}.arch.{architecture}": "true",
        f"{aws}.job.training": "true",
    }


def _make_steps(
    components: Sequence[Component],
    target: TargetContext,
    artifacts: Mapping[str, tuple[Artifact, ...]],
) -> tuple[Step, ...]:
    """Return the steps of an image: each component with its packages and artifacts.

    Args:
        components: The chosen components.
        target: The target.
        artifacts: The artifacts of each component, by the component's name.
    """
    # ``select_components`` sets ``build_only`` for a component that only builds another one.
    lent = set()
    for component in components:
        if component.build_only and not target.components[component.name].build_only:
            lent.add(component.name)
    shares = share_packages(
        components, target.cell, get_lock(target), fetched=artifacts.keys(), lent=lent
    )
    chosen = {component.name for component in components}
    replaced_packages: set[str] = set()
    for component in components:
        replaced_packages.update(component.replaces_debian)
    python_package, python_build_package = _find_python_packages(target)
    debian_packages = {*python_package}

    steps: dict[str, Step] = {}
    for component in components:
        name = component.name
        debian = [package for package in component.debian if package not in replaced_packages]
        debian_packages.update(debian)
        builds_with = [other for other in component.builds_with if other in chosen]
        steps[name] = Step(
            component=name,
            version=target.versions.get(name, ""),
            summary=component.summary,
            debian=tuple(debian),
            python=shares[name],
            recipe=component.recipe_name,
            artifacts=artifacts.get(name, ()),
            builds_with=tuple(builds_with),
            in_image=name != BUILDER and not component.build_only,
        )

    # The packages of every component that the target could have: its variants share one builder.
    build_packages: list[str] = []
    for component in target.fitting.values():
        if component.name != OWN_PYTHON:
            build_packages += component.build_debian
    builder = (*dict.fromkeys(build_packages), *python_build_package)
    if "system" in steps:
        steps["system"] = replace(steps["system"], debian=tuple(sorted(debian_packages)))
    if BUILDER in steps:
        steps[BUILDER] = replace(steps[BUILDER], build_packages=builder)
    if OWN_PYTHON in steps:
        # The builder's environment is made with the compiled Python: that is built on its own.
        packages: tuple[str, ...] = ()
        if OWN_PYTHON in target.fitting:
            packages = target.fitting[OWN_PYTHON].build_debian
        steps[OWN_PYTHON] = replace(steps[OWN_PYTHON], build_packages=packages)
    return tuple(steps.values())


def _find_python_packages(target: TargetContext) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the packages of a further Python of the distribution, for running and for building.

    For example ``(("python3.12",), ("python3.12-dev",))``; empty for another Python.
    """
    base = target.base
    interpreter = base.pythons.get(target.python, "")
    if not interpreter:
        return (), ()
    # Debian and Ubuntu name the package after the program.
    name = interpreter.rsplit("/", 1)[-1]
    return (name,), (f"{name}-dev",)


def base_reference(base: Base, facts: Facts) -> str:
    """Return the local name of a base image: ``trainworks/base:bookworm-0123456789ab``.

    A base with a digest is pulled, another one is bootstrapped. The name has a hash of everything
    that decides the content, so that an old base is never taken for a new one, nor a pulled base
    for a bootstrapped one.
    """
    digest = facts.digest_of(base)
    content = f"{base.suite} {base.image} {digest} {BOOTSTRAP_REVISION}"
    if not digest:
        # Only the release counts: updates of the archive are in another layer.
        for state in facts.archives_of(base):
            if state.suite == base.suite:
                content += f" {state.suite} {state.contents}"
    suite = base.suite
    if base.architecture != "amd64":
        suite += f"-{base.architecture}"
    content_hash = hashlib.sha256(content.encode()).hexdigest()[:12]
    return f"trainworks/base:{suite}-{content_hash}"
