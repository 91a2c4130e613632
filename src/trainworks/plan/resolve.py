"""From a row and its components to the plan of an image: versions, files,
environment, labels, tags.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

from trainworks.errors import CompatibilityError
from trainworks.facts.rows import (
    Artifact,
    Base,
    Component,
    Facts,
    Recipe,
    TargetRow,
)
from trainworks.plan.compatibility import all_hold
from trainworks.plan.components import Parts, parts_of
from trainworks.plan.declared_checks import (
    declared_checks,
    file_checks,
    filled,
    image_checks,
    known_versions,
    lists_of_makers,
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
    companion_distributions,
    compiled_distributions,
    compilers_needed,
    libraries_of_other_builds,
    lock_of,
    protected_distributions,
    share_packages,
)
from trainworks.plan.select import select_components, select_row
from trainworks.plan.target import OWN_PYTHON, TargetContext, context_of
from trainworks.plan.variants import (
    BASE_NAME_LABEL,
    TITLE_LABEL,
    reference_of,
    usual_components,
    variant_of,
)

ENVIRONMENT: Mapping[str, str] = {
    "PATH": "/opt/trainworks/bin:/opt/venv/bin",
    "LANG": "C.UTF-8",
    "PYTHONUNBUFFERED": "1",
    "SAGEMAKER_SUBMIT_DIRECTORY": "/opt/ml/code",
}
"""What every image sets; components add theirs in the front matter of their recipes."""

CUDA_HOME = "/usr/local/cuda"
"""Where NVIDIA's images and installers put the toolkit."""

CUDA_ENVIRONMENT: Mapping[str, str] = {
    # What builds for CUDA looks there first; AWS's images and their tests have it.
    "CUDA_HOME": CUDA_HOME,
    # The NVIDIA container runtime gives devices and driver libraries only to
    # containers that ask with these two.
    "NVIDIA_VISIBLE_DEVICES": "all",
    "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
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
    return plan_target(target, usual_components(target, facts), facts)


def plan_target(
    target: TargetContext, components: Sequence[Component], facts: Facts, own_variant: str = ""
) -> ImagePlan:
    """Return the plan of a target with these components; raises as ``make_plan`` does.

    own_variant: What sets the image apart besides its components.
    """
    parts = parts_of(target, components, facts)
    if parts.unfit or parts.broken:
        raise CompatibilityError(target.name, [*parts.unfit, *map(str, parts.broken)])
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
    target = _target_of(context)
    steps = _steps(components, context, parts.artifacts)
    inside = [step for step in steps if step.in_image]
    recipes = [facts.recipes[step.recipe] for step in inside]
    image = _reference(row.image, base, facts)
    own = base.bootstrap and not row.image
    variant = variant_of(components, context, facts) + own_variant
    labels = _labels(target, row.image or base.image, variant)
    environment = _environment(context, inside, recipes)
    declared = declared_checks(inside, facts.recipes, target.python)
    plan_checks = (
        *declared,
        *image_checks(steps, labels, environment, context),
        *file_checks(recipes, facts),
        lists_of_makers(steps, recipes, declared),
    )
    return ImagePlan(
        target=target,
        base=replace(base, digest=facts.digest_of(base)) if own else base,
        image=image,
        origin=("pulled" if facts.digest_of(base) else "bootstrapped") if own else "",
        archives=facts.archives_of(base),
        builder_image=_reference(row.builder_image, base, facts) if row.builder_image else "",
        interpreter=_interpreter(context),
        cuda_home=CUDA_HOME if cell.version and row.image else "",
        cuda_architectures=cell.architectures,
        steps=steps,
        environment=environment,
        labels=labels,
        tags=(reference_of(row, facts, variant),),
        programs={name: path for recipe in recipes for name, path in recipe.programs.items()},
        checks=plan_checks,
        missing=_missing(components, context, facts),
        instances=_shapes(facts),
        families=tuple(row.name for row in facts.families),
        fabric=tuple(
            FabricVariable(name=row.name, value=row.value, rdma=row.rdma, why=row.why)
            for row in facts.fabric
            if all_hold(row.when, parts.properties)
        ),
        minimum_driver=cell.minimum_driver,
        budget_megabytes=row.size_budget_megabytes,
        wheel_index=row.wheel_index,
        unlocked=_unlocked(steps, context, facts),
        first_use=_first_use(steps, context, facts),
        advice=tuple(str(conflict) for conflict in parts.advice),
        imports=tuple(module for recipe in recipes for module in recipe.imports),
        protected=protected_distributions(components, steps),
        companions=companion_distributions(components, steps),
        compiled_by=compiled_distributions(components, cell, facts),
        needs=compilers_needed([each.name for each in components if not each.build_only], facts),
        built_whole=tuple(
            name for each in components if not each.build_only for name in each.compiles
        ),
        libraries=libraries_of_other_builds(components, steps, facts),
    )


def _target_of(context: TargetContext) -> Target:
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


def _shapes(facts: Facts) -> dict[str, InstanceShape]:
    return {
        row.name: InstanceShape(
            **{each.name: getattr(row, each.name) for each in fields(InstanceShape)}
        )
        for row in facts.instances
    }


def _interpreter(target: TargetContext) -> str:
    """Return the path of a target's Python: the distribution's own, one more of
    its packages, or the compiled one.
    """
    if target.python == target.base.python:
        return "/usr/bin/python3"
    return target.base.pythons.get(target.python, f"/opt/python/bin/python{target.python}")


def _reference(image: str, base: Base, facts: Facts) -> str:
    """Return what a stage stands on: a local name for what can be bootstrapped,
    else a reference with its digest.
    """
    if not image and base.bootstrap:
        return base_reference(base, facts)
    name = image or base.image
    digest = facts.digest_by_image.get(name, "" if image else base.digest)
    reference = facts.alternative_by_image.get(name, name)
    return f"{reference}@{digest}" if digest else name


def without_pulled_bases(facts: Facts) -> Facts:
    """Return facts by which every base that can be bootstrapped is: for where
    no registry answers.
    """
    own = {base.image for base in facts.bases if base.bootstrap}
    return replace(
        facts,
        bases=tuple(replace(base, digest="") if base.bootstrap else base for base in facts.bases),
        locked_base_images=tuple(row for row in facts.locked_base_images if row.name not in own),
    )


def images_of(target: TargetContext) -> tuple[str, ...]:
    """Return the names of the images that a target's stages are pulled for.

    None where its base is bootstrapped.
    """
    row, base = target.row, target.base
    own = row.image or ("" if base.bootstrap else base.image)
    return tuple(dict.fromkeys(name for name in (own, row.builder_image) if name))


def downloads_of(row: TargetRow, facts: Facts) -> tuple[Artifact, ...]:
    """Return what images of a row may download by themselves, optional
    components included, with the lock's hashes.

    What does not go with the target is left out: a plan that has it is refused.
    """
    target = context_of(row, facts)
    usual = usual_components(target, facts)
    found = dict(parts_of(target, usual, facts).artifacts)
    for component in target.components.values():
        if component not in usual:
            with_it = parts_of(target, (*usual, component), facts).artifacts
            found |= {component.name: with_it.get(component.name, ())}
    artifacts = (artifact for chosen in found.values() for artifact in chosen)
    return tuple({(each.url, each.git, each.commit): each for each in artifacts}.values())


def _unlocked(steps: Sequence[Step], target: TargetContext, facts: Facts) -> tuple[str, ...]:
    return (
        *(
            f"base image {name}: no digest"
            for name in images_of(target)
            if "@" not in _reference(name, target.base, facts)
        ),
        *(
            f"{artifact.name} {artifact.version}: no sha256 of {artifact.url}"
            for step in steps
            for artifact in step.artifacts
            if artifact.url and not artifact.sha256
        ),
    )


def _first_use(steps: Sequence[Step], target: TargetContext, facts: Facts) -> tuple[str, ...]:
    """Return the inputs whose hash or digest stands in the lock alone, and
    which no signature covers.
    """
    published = {row.url for row in facts.artifacts if row.sha256 or row.signature}
    published |= {row.name for row in facts.base_images if row.digest} | {
        row.image for row in facts.bases if row.digest
    }
    published -= facts.alternative_by_image.keys()
    return (
        *(
            f"base image {name}"
            for name in images_of(target)
            if name in facts.digest_by_image and name not in published
        ),
        *(
            f"{artifact.name} {artifact.version}"
            for step in steps
            for artifact in step.artifacts
            if artifact.url and artifact.sha256 and artifact.url not in published
        ),
    )


def _missing(
    components: Sequence[Component], target: TargetContext, facts: Facts
) -> tuple[Missing, ...]:
    """Return what images of this framework and cell have by default, from
    whatever sources, and this one has not.

    What is added on request only is missing in no image. What has the recipe of one that is in the
    image is the same under another name: the vendors' CUDA wheels. So is what only makes folders
    that other parts have: AWS's paths.
    """
    row, cell = target.row, target.cell
    chosen = {component.name for component in components}
    recipes = {component.recipe_name for component in components}
    possible = {
        component.name: component
        for component in facts.components
        if any(
            component.fits(row.framework, sources, cell, row.base) for sources in component.sources
        )
    }
    folders = {folder for name in recipes for folder in facts.recipes[name].path}
    missing = []
    for name, component in (possible | dict(target.fitting)).items():
        if (
            name in chosen
            or component.recipe_name in recipes
            or not (component.default and component.without)
        ):
            continue
        own_folders = facts.recipes[component.recipe_name].path
        if own_folders and folders.issuperset(own_folders):
            continue
        missing.append(Missing(component=name, cost=component.without))
    return tuple(missing)


def _environment(
    target: TargetContext, steps: Sequence[Step], recipes: Sequence[Recipe]
) -> dict[str, str]:
    environment = {**ENVIRONMENT, **target.base.environment}
    if target.cell.version:
        environment |= CUDA_ENVIRONMENT
    for step, recipe in zip(steps, recipes, strict=True):
        known = known_versions(step, target.python)
        environment |= {name: filled(value, known) for name, value in recipe.environment.items()}
    folders = [folder for recipe in recipes for folder in recipe.path]
    environment["PATH"] = ":".join([environment["PATH"], *folders, "/opt/ml/code", SYSTEM_PATH])
    if libraries := [folder for recipe in recipes for folder in recipe.libraries]:
        environment["LD_LIBRARY_PATH"] = ":".join(libraries)
    return environment


def _labels(target: Target, base_image: str, variant: str) -> dict[str, str]:
    device = f"gpu.{target.cuda}" if target.cuda.startswith("cu") else target.cuda
    aws = "com.amazonaws.ml.engines.sagemaker.dlc"
    return {
        TITLE_LABEL: f"{target.name}{variant}",
        "org.opencontainers.image.version": target.version,
        BASE_NAME_LABEL: base_image,
        # AWS reads these to know what a training image is; at most 10 of them. Its own have a
        # version with dashes.
        f"{aws}.framework.{target.framework}.{target.version.replace('.', '-')}": "true",
        f"{aws}.device.{device}": "true",
        f"{aws}.python.py{target.python.replace('.', '')}": "true",
        f"{aws}.os.{target.base}": "true",
        f"{aws}.arch.{'x86' if target.architecture == 'amd64' else target.architecture}": "true",
        f"{aws}.job.training": "true",
    }


def _steps(
    components: Sequence[Component],
    target: TargetContext,
    artifacts: Mapping[str, tuple[Artifact, ...]],
) -> tuple[Step, ...]:
    lent = {
        each.name
        for each in components
        if each.build_only and not target.components[each.name].build_only
    }
    shares = share_packages(
        components, target.cell, lock_of(target), fetched=artifacts.keys(), lent=lent
    )
    chosen = {component.name for component in components}
    replaced = {package for component in components for package in component.replaces_debian}
    steps = [
        Step(
            component=component.name,
            version=target.versions.get(component.name, ""),
            summary=component.summary,
            debian=tuple(package for package in component.debian if package not in replaced),
            python=shares[component.name],
            recipe=component.recipe_name,
            artifacts=artifacts.get(component.name, ()),
            builds_with=tuple(name for name in component.builds_with if name in chosen),
            in_image=component.name != BUILDER and not component.build_only,
        )
        for component in components
    ]
    more, more_to_build = _more_python(target)
    every_package = tuple(sorted({*more, *(package for step in steps for package in step.debian)}))
    building = {each.name: each.build_debian for each in target.fitting.values()}
    # The builder's environment is made with the compiled Python, so that one is built on its own.
    own_python = building.pop(OWN_PYTHON, ())
    # Those of every component that the target could have: a target's variants share one builder.
    builder = tuple(
        dict.fromkeys([package for packages in building.values() for package in packages])
    )
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
    return tuple(steps)


def _more_python(target: TargetContext) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the packages of a further Python of the distribution, for running and for building."""
    base = target.base
    interpreter = base.pythons.get(target.python, "")
    if not interpreter:
        return (), ()
    # Debian and Ubuntu name the package after the program.
    name = interpreter.rsplit("/", 1)[-1]
    return (name,), (f"{name}-dev",)


def base_reference(base: Base, facts: Facts) -> str:
    """Return the local name of a base image: one with a digest is pulled,
    another one is bootstrapped.

    The name changes with everything that decides the content, so that an old base is never taken
    for a new one, nor one that was pulled for one that was bootstrapped. Of the archive that is the
    release: its updates are in another layer.
    """
    digest = facts.digest_of(base)
    decides = f"{base.suite} {base.image} {digest} {BOOTSTRAP_REVISION}"
    if not digest:
        release = [state for state in facts.archives_of(base) if state.suite == base.suite]
        decides += "".join(f" {state.suite} {state.contents}" for state in release)
    suite = base.suite if base.architecture == "amd64" else f"{base.suite}-{base.architecture}"
    return f"trainworks/base:{suite}-{hashlib.sha256(decides.encode()).hexdigest()[:12]}"
