"""Find targets and their images by name: a target's name means the image that
this machine's engine has.
"""

from __future__ import annotations

from trainworks.engine.protocol import Engine
from trainworks.errors import UnknownNameError
from trainworks.facts.rows import Facts
from trainworks.plan.model import ImagePlan, Request
from trainworks.plan.resolve import plan_row
from trainworks.plan.variants import HASHED, ImageName, image_named, request_of
from trainworks.suggestions import nearest
from trainworks.terminal.output import say


def plan_of_target(name: str, facts: Facts) -> ImagePlan | None:
    """Return the plan of a target with its default components; ``None`` if no target has this name.

    Raises:
        LockError: The target has no lock, or the lock does not fit the row.
        CompatibilityError: Its components are not compatible.
    """
    for row in facts.targets:
        if facts.name_of(row) == name:
            return plan_row(row, facts)
    return None


def find_image(name: str, engine: Engine, facts: Facts, *, elsewhere: bool = False) -> str:
    """Return the reference of the image that a name means.

    A target's name means the target's usual image, or else a variant of it that
    the engine has; a line says which.

    Args:
        name: A target, or an image.
        engine: The engine that has it.
        facts: The targets.
        elsewhere: Whether an image that the engine lacks may be in a registry,
            unless it is one of ours.

    Raises:
        UnknownNameError: The engine has no such image.
    """
    ours = image_named(name, facts)
    if ours is None:
        # The beginning of a target's name is no repository that could be pulled.
        begun = "-" in name and any(facts.name_of(row).startswith(name) for row in facts.targets)
        if (begun or not elsewhere) and engine.inspect(name) is None:
            raise _no_image(name, engine, facts)
        return name
    if engine.inspect(ours.reference) is not None:
        return ours.reference
    variants = variants_in(engine, ours, facts)
    # A reference, or a name with a variant, means one image and no other.
    if variants and not ours.variant and name != ours.reference:
        say(f"{name}: {engine.name} has {variants[0]}{describe_variant(ours, variants[0], facts)}")
        return variants[0]
    there = f"{engine.name} has {', '.join(variants)}; " if variants else ""
    request = request_of(ours.row, ours.variant, facts)
    how = (
        f"`{build_command(request)}` builds it"
        if request
        else "build it again with the same options"
    )
    raise UnknownNameError(f"{engine.name} has no image {ours.reference}", hint=f"{there}{how}")


def variants_in(engine: Engine, ours: ImageName, facts: Facts) -> list[str]:
    """Return the names of a target's other images that an engine has, those
    with the fewest differences first.
    """
    usual = ours.reference.removesuffix(ours.variant) if ours.variant else ours.reference
    found = []
    for name in engine.names():
        variant = name.removeprefix(usual)
        if name.startswith(f"{usual}-") and (
            variant.startswith(HASHED) or request_of(ours.row, variant, facts)
        ):
            found.append(name)
    return sorted(found, key=lambda name: (HASHED in name, name.count("-with"), name))


def describe_variant(ours: ImageName, reference: str, facts: Facts) -> str:
    """Return what a variant has and lacks, and what that costs, after its name.

    ``""`` where only a hash names it.
    """
    request = request_of(ours.row, reference.removeprefix(ours.reference), facts)
    if request is None:
        return ""
    costs = {each.name: each.without for each in facts.components if each.variant}
    said = [
        *([f"with {', '.join(request.with_components)}"] if request.with_components else []),
        *(
            [f"without {', '.join(request.without_components)}"]
            if request.without_components
            else []
        ),
    ]
    cost = "; ".join(costs[name] for name in request.without_components if name in costs)
    return f", built {' and '.join(said)}" + (f": {cost}" if cost else "")


def build_command(request: Request) -> str:
    """Return the command that builds what a request means."""
    options = {
        "--framework": request.framework,
        "--cuda": request.cuda,
        "--framework-version": request.version,
        "--python": request.python,
        "--sources": request.sources if request.sources != "packages" else "",
        "--architecture": request.architecture if request.architecture != "amd64" else "",
    }
    words = [f"{option} {value}" for option, value in options.items() if value]
    words += [f"--with {name}" for name in request.with_components]
    words += [f"--without {name}" for name in request.without_components]
    words += [f"--artifact '{each}'" for each in request.artifacts]
    return " ".join(["python build.py", *words])


def _no_image(name: str, engine: Engine, facts: Facts) -> UnknownNameError:
    near = nearest(name, [*engine.names(), *(facts.name_of(row) for row in facts.targets)])
    did_you_mean = f"did you mean {near}? " if near else ""
    listed = f"`{engine.name} images` lists its images, `python build.py --list` the targets"
    return UnknownNameError(
        f"{engine.name} has no image {name}",
        hint=f"{did_you_mean}{listed}; pull an image of a registry first",
    )
