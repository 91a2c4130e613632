"""Finds targets and their images by name: a target's name means its image in this engine."""

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
        engine: The engine to search.
        facts: The targets.
        elsewhere: Whether an image that the engine lacks may be in a registry,
            unless it is one of ours.

    Raises:
        UnknownNameError: The engine has no such image.
    """
    ours = image_named(name, facts)
    if ours is None:
        # The beginning of a target's name is no repository that could be pulled.
        targets = [facts.name_of(row) for row in facts.targets]
        is_beginning = "-" in name and any(target.startswith(name) for target in targets)
        must_be_local = is_beginning or not elsewhere
        if must_be_local and engine.inspect(name) is None:
            raise _make_unknown_image_error(name, engine, facts)
        return name
    if engine.inspect(ours.reference) is not None:
        return ours.reference
    variants = find_variants(engine, ours, facts)
    # A reference, or a name with a variant, means one image and no other.
    if variants and not ours.variant and name != ours.reference:
        variant = variants[0]
        say(f"{name}: {engine.name} has {variant}{describe_variant(ours, variant, facts)}")
        return variant
    hint = "build it again with the same options"
    request = request_of(ours.row, ours.variant, facts)
    if request:
        hint = f"`{build_command(request)}` builds it"
    if variants:
        hint = f"{engine.name} has {', '.join(variants)}; {hint}"
    raise UnknownNameError(f"{engine.name} has no image {ours.reference}", hint=hint)


def find_variants(engine: Engine, ours: ImageName, facts: Facts) -> list[str]:
    """Return a target's other images in an engine, those with the fewest differences first."""
    usual = ours.reference.removesuffix(ours.variant)
    variants = []
    for name in engine.names():
        if not name.startswith(f"{usual}-"):
            continue
        variant = name.removeprefix(usual)
        if variant.startswith(HASHED) or request_of(ours.row, variant, facts):
            variants.append(name)

    def count_differences(name: str) -> tuple[bool, int, str]:
        # A hash stands for more differences than a name can hold.
        return HASHED in name, name.count("-with"), name

    return sorted(variants, key=count_differences)


def describe_variant(ours: ImageName, reference: str, facts: Facts) -> str:
    """Return the components that a variant has and lacks, with the cost, as words after its name.

    For example ``, built without gdrcopy: copies of small buffers are slower``; ``""`` if only a
    hash names the variant.
    """
    request = request_of(ours.row, reference.removeprefix(ours.reference), facts)
    if request is None:
        return ""
    differences = []
    if request.with_components:
        differences.append(f"with {', '.join(request.with_components)}")
    if request.without_components:
        differences.append(f"without {', '.join(request.without_components)}")
    cost_by_name = {row.name: row.without for row in facts.components if row.variant}
    missing = [name for name in request.without_components if name in cost_by_name]
    text = f", built {' and '.join(differences)}"
    cost = "; ".join(cost_by_name[name] for name in missing)
    if cost:
        text += f": {cost}"
    return text


def build_command(request: Request) -> str:
    """Return the command that builds an image: ``python build.py --framework pytorch ...``."""
    options = {
        "--framework": request.framework,
        "--cuda": request.cuda,
        "--framework-version": request.version,
        "--python": request.python,
    }
    # The defaults of these two need no option.
    if request.sources != "packages":
        options["--sources"] = request.sources
    if request.architecture != "amd64":
        options["--architecture"] = request.architecture
    words = [f"{option} {value}" for option, value in options.items() if value]
    words += [f"--with {name}" for name in request.with_components]
    words += [f"--without {name}" for name in request.without_components]
    words += [f"--artifact '{artifact}'" for artifact in request.artifacts]
    return " ".join(["python build.py", *words])


def _make_unknown_image_error(name: str, engine: Engine, facts: Facts) -> UnknownNameError:
    """Return the error for an image that the engine lacks, with the nearest name."""
    targets = [facts.name_of(row) for row in facts.targets]
    near = nearest(name, [*engine.names(), *targets])
    did_you_mean = ""
    if near:
        did_you_mean = f"did you mean {near}? "
    listed = f"`{engine.name} images` lists its images, `python build.py --list` the targets"
    return UnknownNameError(
        f"{engine.name} has no image {name}",
        hint=f"{did_you_mean}{listed}; pull an image of a registry first",
    )
