"""Finds the image that ``prove`` gives proof of: a target's image, or one that ``extend`` made."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from trainworks.attestation.components import (
    BillOfMaterials,
    LauncherRelease,
    ListedComponent,
    TargetBuild,
    list_package_components,
    make_extension_bill,
    make_target_bill,
)
from trainworks.attestation.options import ProveRequest
from trainworks.attestation.provenance import (
    Checkout,
    RunDetails,
    make_extension_provenance,
    make_provenance,
)
from trainworks.build.image import find_installed_states
from trainworks.engine import choose, closed, image_in
from trainworks.engine.protocol import BuiltImage, Engine
from trainworks.errors import OutputError, ProofError, UnknownNameError
from trainworks.extend.image import plan_extension
from trainworks.extend.render import RECIPES
from trainworks.extend.request import ExtendRequest
from trainworks.facts.data import data_folder
from trainworks.facts.load import load
from trainworks.host.checkout import read_checkout_state
from trainworks.imagetest.probe.packages import PackagesAnswer
from trainworks.imagetest.probe_request import list_packages
from trainworks.inspect.targets import build_command, find_image
from trainworks.plan.names import make_unknown_name_error
from trainworks.plan.resolve import make_plan
from trainworks.plan.select import request_for
from trainworks.plan.variants import TITLE_LABEL, image_named, request_of
from trainworks.render.dockerfile import INPUTS_LABEL, Rendering, render
from trainworks.terminal.output import say
from trainworks.terminal.progress import DISPLAY


@dataclass(frozen=True, kw_only=True)
class ProvableImage:
    """An image that was built from the checkout as it is now.

    Attributes:
        name: The name of the target, or of the extended image.
        engine: The engine that has the image.
        image: The image.
        list_contents: Runs the image and returns its bill of materials; raises
            ``ProofError`` if that fails.
        provenance: Returns the predicate of its provenance, given its bill of materials, the
            builder, and the files beside it.
    """

    name: str
    engine: Engine
    image: BuiltImage
    list_contents: Callable[[], BillOfMaterials]
    provenance: Callable[[BillOfMaterials, RunDetails], dict[str, object]]


def find_target_image(request: ProveRequest, root: Path) -> ProvableImage:
    """Find the image that was built for a target from the checkout as it is now.

    Args:
        request: The target, the engine, and the components that the target was built with.
        root: The checkout.

    Raises:
        UnknownNameError: The target does not exist, or the engine has no image of it.
        ProofError: The image was built from something else than this checkout.
    """
    facts = load(root)
    target = image_named(request.target, facts)
    if target is None:
        error = make_unknown_name_error("target", request.target, map(facts.name_of, facts.targets))
        if "/" in request.target or ":" in request.target:
            advice = (
                "for an image that `build.py extend` made, give --base and the options of its build"
            )
            raise UnknownNameError(error.message, hint=f"{error.hint}; {advice}")
        raise error
    build_request = replace(
        request_for(target.row, facts),
        with_components=request.with_components,
        without_components=request.without_components,
        artifacts=request.artifacts,
    )
    # The plan comes before the engine, so that an error of the components is reported first.
    plan = make_plan(build_request, facts)
    engine = choose(request.engine, report=say)
    has_choice = request.with_components or request.without_components or request.artifacts
    if not has_choice:
        # The engine may have images of several choices; the name of the one that is found says
        # which components it has.
        reference = find_image(request.target, engine, facts)
        image_request = request_of(target.row, reference.removeprefix(plan.tags[0]), facts)
        if image_request is None:
            raise UnknownNameError(
                f"the name {reference} does not say which components the image has",
                hint="give the --with and --without of its build",
            )
        build_request, plan = image_request, make_plan(image_request, facts)
    rendering = render(plan, facts)
    image = _find_image(engine, plan.tags[0], rendering, f"`{build_command(build_request)}`")
    build = TargetBuild(request=build_request, plan=plan, rendering=rendering)

    def list_contents() -> BillOfMaterials:
        packages = list_image_packages(engine, plan.tags[0])
        return _make_bill(build, image, packages, engine, root)

    def predicate(bill: BillOfMaterials, run: RunDetails) -> dict[str, object]:
        locks = (plan.target.name, "artifacts", "base-images")
        checkout = read_checkout(root, [f"images/lock/{name}.toml" for name in locks])
        # The packages may be of another day than the locked one: the image itself says of which.
        installed = find_installed_states(plan.archives, image.labels)
        built = replace(build, plan=replace(plan, archives=installed))
        return make_provenance(built, bill, checkout=checkout, run=run)

    return ProvableImage(
        name=plan.target.name,
        engine=engine,
        image=image,
        list_contents=list_contents,
        provenance=predicate,
    )


def find_extended_image(
    request: ExtendRequest, root: Path, environment: Mapping[str, str]
) -> ProvableImage:
    """Find an image that ``extend`` made from the same request and files.

    Args:
        request: The request that the image was made by.
        root: The checkout.
        environment: The process's environment.

    Raises:
        ExtendError, UnknownNameError: As ``extend`` does.
        LockError: The lock of its requirements does not exist, or is for other requirements.
        ProofError: The image was made from something else than the files are now.
    """
    # The temporary files of the plan are for a build, and are deleted at once.
    with ExitStack() as stack:
        extension = plan_extension(request, root, environment, stack)
    engine, plan, rendering = extension.engine, extension.plan, extension.spec.rendering
    command = "`python build.py extend` with the same options"
    image = _find_image(engine, plan.tag, rendering, command)

    def list_contents() -> BillOfMaterials:
        inherited = _list_base_components(plan.base.reference, extension.image, engine, root)
        return make_extension_bill(plan, image, list_image_packages(engine, plan.tag), inherited)

    def predicate(bill: BillOfMaterials, run: RunDetails) -> dict[str, object]:
        checkout = read_checkout(root, [f"templates/{name}" for name in RECIPES])
        return make_extension_provenance(plan, rendering, bill, checkout=checkout, run=run)

    return ProvableImage(
        name=plan.tag, engine=engine, image=image, list_contents=list_contents, provenance=predicate
    )


def _find_image(engine: Engine, reference: str, rendering: Rendering, command: str) -> BuiltImage:
    """Return the engine's image of a name, if it was built from a rendering.

    Args:
        engine: The engine.
        reference: The name, ``NAME:TAG``.
        rendering: The build context.
        command: The command that builds the image, for the hint of an error.

    Raises:
        UnknownNameError: The engine has no image of this name.
        ProofError: The image was built from another context.
    """
    hint = f"build it again: {command}"
    image = image_in(engine, reference, hint=hint)
    if image.labels.get(INPUTS_LABEL) != rendering.digest:
        raise ProofError(
            [f"{reference} was not built from this checkout as it is now"],
            hint=hint,
        )
    return image


def list_image_packages(engine: Engine, reference: str) -> PackagesAnswer:
    """Run an image to list its packages, and show the progress.

    Its programs have no network and see nothing of this machine. A line is printed where the
    engine cannot do that.
    """
    say(f"reading the packages of {reference}")
    missing_isolation = engine.isolates()
    if missing_isolation:
        say(
            f"  its programs run without isolation: they see this machine and its network, because"
            f" {engine.name} cannot isolate them ({missing_isolation}); `apt-get install crun`"
        )
    with (
        DISPLAY.task("reading", log=False),
        engine.container(reference, isolated=closed(engine)) as container,
    ):
        return list_packages(container)


def _make_bill(
    build: TargetBuild, image: BuiltImage, packages: PackagesAnswer, engine: Engine, root: Path
) -> BillOfMaterials:
    """Return the bill of materials of a target's image, with facts of the checkout and engine."""
    launcher = read_launcher_release(root)
    base = engine.inspect(build.plan.image)
    base_identifier = base.identifier if base else ""
    return make_target_bill(
        build, image, packages, base_identifier=base_identifier, launcher=launcher
    )


def read_launcher_release(root: Path) -> LauncherRelease:
    """Read the version and the licence of the launcher that goes into images.

    Args:
        root: The checkout, or a folder with ``images`` or ``templates`` alone: the package's own
            launcher goes into images then.

    Raises:
        OutputError: The file cannot be read.
    """
    project = tomllib.loads(_read_text(data_folder(root, "launcher") / "pyproject.toml"))["project"]
    return LauncherRelease(version=project["version"], license=project["license"])


def _list_base_components(
    reference: str, image: BuiltImage, engine: Engine, root: Path
) -> tuple[ListedComponent, ...]:
    """Return the components of an image that was extended.

    They have hashes and downloads if this checkout built the image; otherwise a line is printed,
    and they are the packages that the image lists.
    """
    packages = list_image_packages(engine, reference)
    facts = load(root)
    target = image_named(image.labels.get(TITLE_LABEL, ""), facts)
    request = None
    if target is not None:
        request = request_of(target.row, target.variant, facts)
    if request is not None:
        plan = make_plan(request, facts)
        rendering = render(plan, facts)
        if image.labels.get(INPUTS_LABEL) == rendering.digest:
            build = TargetBuild(request=request, plan=plan, rendering=rendering)
            return _make_bill(build, image, packages, engine, root).components
    say(
        f"  {reference} was not built from this checkout as it is now: the bill of materials has no"
        " hashes of its files"
    )
    return list_package_components(reference, packages, {})


def read_checkout(root: Path, names: Iterable[str]) -> Checkout:
    """Read the checkout's commit, whether it has changes, and the hashes of files.

    Args:
        root: The checkout.
        names: The paths of the files below it; missing files are left out.
    """
    state = read_checkout_state(root)
    hashes = {}
    for name in names:
        path = root / name
        if path.is_file():
            hashes[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return Checkout(commit=state.commit, changed=state.changed, files=hashes)


def _read_text(path: Path) -> str:
    """Read a file of the checkout; raises ``OutputError`` if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise OutputError(
            f"{error.filename or path}: {error.strerror}",
            hint="run from a checkout of trainworks, or name one with --root",
        ) from error
