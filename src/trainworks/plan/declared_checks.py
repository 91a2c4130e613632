"""Makes the promises of an image, from the front matter of its recipes and from its plan."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from packaging.version import Version

from trainworks.errors import FactsError
from trainworks.facts.rows import CheckRow, Facts, Recipe
from trainworks.facts.schema import shape_of, short
from trainworks.plan import checks
from trainworks.plan.checks import Check
from trainworks.plan.model import COMMAND, ENTRY_POINT, WORKING_FOLDER, Step
from trainworks.plan.own_base import INCLUDED_PACKAGES
from trainworks.plan.target import TargetContext
from trainworks.suggestions import nearest

IMAGE = "image"
"""The component of promises that belong to the image as a whole."""

CHECK_TYPES: Mapping[str, type[Any]] = {
    check_type.kind: check_type for check_type in get_args(Check)
}
"""Kinds of promises that a front matter may declare, by the word it uses."""

CUDA_LIBRARIES = ("libcudart", "libcublas", "libcublasLt", "libnvrtc", "libcupti", "libnvJitLink")
"""Libraries of the CUDA toolkit that have its major version in their soname.

Others do not: CUDA 13's cuSPARSE is still 12.
"""

SINGLE_CUDA_LIBRARIES = (
    *("libcudart", "libcublas", "libcublasLt", "libnvrtc", "libnvJitLink", "libcudnn", "libnccl"),
    *("libcufft", "libcurand", "libcusolver", "libcusparse"),
)
"""Libraries of which two major versions are one too many (Triton's profilers
load their own CUPTI, by its path).
"""

COMPILER = "compiler"
"""The component that brings a compiler; an image without it has no compiler."""

COMPILERS = ("/usr/bin/*gcc*", "/usr/bin/cc", "/usr/include/python3*")

PIP_CHECK_ARM64 = (
    "sh",
    "-ec",
    (
        'found=$(python -m pip check) || test -n "$found"; printf "%s\\n" "$found" | { ! grep -v'
        ' -e "^nvidia-.* is not supported on this platform$" -e "^No broken requirements found"; }'
    ),
)
"""As ``pip check``, but NVIDIA's wheels for arm64 may name their platform
``sbsa`` inside, which pip does not know.

The index has them as ``aarch64``, so pip installs them: WHEEL of ``nvidia-cusparselt-cu13`` 0.8.1.
"""

FILLED_IN = ("version", "version_major", "python")
"""Names in braces that a front matter may have, such as ``{version}``."""

NAME_IN_BRACES = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
"""A name in braces in a front matter.

Programs among the words of a command may have other braces.
"""

RESULTS = ("/opt/ml/model", "/opt/ml/output", "/opt/ml/output/data")
"""Folders for the results of a job, for every user."""

FOLDERS_FOR_ALL = (
    "/tmp",  # noqa: S108
    "/var/tmp",  # noqa: S108
    "/run/lock",
    *RESULTS,
)
"""Folders in which every user may write.

Their sticky bit keeps users from removing files of others.
"""

SHARED_FOLDERS = ("/tmp", "/var/tmp", *RESULTS)  # noqa: S108  (names of folders in an image)
"""Folders in which every user creates files, and changes no file of another user."""

FOR_SOME_USERS = (
    *(
        "/root/**",
        "/root",
        "/etc/*shadow*",
        "/etc/*-",
        "/etc/.pwd.lock",
        "/etc/security/opasswd",
        "/etc/ssl/private",
        "/var/**",
    ),
    *("/run/**", "/etc/credstore*", "/etc/sudoers*", "/usr/lib/credstore*", "/usr/lib/dbus-1.0/*"),
    *("/etc/polkit-1/**", "/usr/share/polkit-1/**"),
)
"""Paths that a Linux system hides from users.

All other paths can be read by everyone, because any user may start a job.
"""

UNKNOWN_USER = (
    "setpriv",
    "--reuid",
    "54321",
    "--regid",
    "54321",
    "--clear-groups",
    "env",
    "HOME=/nonexistent",
)
"""Words that start a command with a user number without a name.

Kubernetes does so if containers may not run as root.
"""

USE_AS_UNKNOWN_USER = (
    f"for folder in {' '.join(RESULTS)}; do file=$(mktemp -p $folder); rm $file; done; "
    "train --version; python -c 'import pip; print(\"imported\")'"
)

TRITON = frozenset({"triton", "pytorch-triton"})
"""Names of the compiler that torch.compile uses for GPUs."""

TRITON_TOOLS = (
    "import glob, importlib.util, os, subprocess; (folder,) ="
    " importlib.util.find_spec('triton').submodule_search_locations; every = lambda name:"
    " glob.glob(os.path.join(folder, '**', name), recursive=True); [subprocess.run([path,"
    " '--version'], check=True) for path in every('ptxas') or ['ptxas']]; print('libdevice is',"
    " 'there' if any(map(os.path.getsize, every('libdevice*.bc'))) else 'missing')"
)

TORCHRUN_FROM = Version("1.13")
"""The first PyTorch whose torchrun the launcher starts
(launcher/trainworks_launcher/contract/modes.py).
"""

MEETING = """
import torch, torch.distributed as group
group.init_process_group("gloo")
one = torch.ones(1)
group.all_reduce(one)
print("ranks that met:", int(one))
"""
"""A job's program: its ranks connect, and sum a tensor over all of them."""

DRIVER_LIBRARIES = ("libcuda.so.1", "libnvidia-ml.so.1")
"""Libraries of the host's driver, which no image has."""


def declared_checks(
    steps: Sequence[Step], recipes: Mapping[str, Recipe], python: str
) -> list[Check]:
    """Return the promises of the recipes' front matters, with versions filled in.

    Promises of recipes without a step, and promises ``beside`` a missing component, are checked
    too: else only the user of an optional component would find its malformed promise.

    Raises:
        FactsError: Promises are malformed; the error names all of them.
    """
    values_by_recipe: dict[str, list[Mapping[str, object]]] = {}
    problems: list[str] = []
    for recipe in recipes.values():
        recipe_values = values_by_recipe.setdefault(recipe.name, [])
        for number, row in enumerate(recipe.checks, start=1):
            values, row_problems = _read_values(row, f"{recipe.name}.j2: check {number}")
            recipe_values.append(values)
            problems += row_problems
    if problems:
        raise FactsError(problems)

    chosen = {step.component for step in steps}
    declared: list[Check] = []
    for step in steps:
        known = collect_known_versions(step, python)
        rows = recipes[step.recipe].checks
        for row, values in zip(rows, values_by_recipe[step.recipe], strict=True):
            # A promise ``beside`` another component holds only in an image that has that one.
            if row.beside and row.beside not in chosen:
                continue
            filled_in = {key: _fill_in_all(value, known) for key, value in values.items()}
            declared.append(CHECK_TYPES[row.kind](component=step.component, **filled_in))
    return declared


def _read_values(row: CheckRow, where: str) -> tuple[Mapping[str, object], list[str]]:
    """Return the values of a promise with the types of its kind, and their problems.

    Args:
        row: The promise in a front matter: ``{kind = "import", module = "torch"}``.
        where: The recipe and the number of the promise, for messages: ``torch.j2: check 1``.
    """
    where = f"templates/components/{where} (kind = {short(row.kind)})"
    check_type = CHECK_TYPES.get(row.kind)
    if check_type is None:
        near = nearest(row.kind, sorted(CHECK_TYPES))
        advice = f"there are {', '.join(CHECK_TYPES)}"
        if near:
            advice = f"did you mean {near}?"
        return {}, [f"{where}: unknown kind; {advice}"]
    if "component" in row.values:
        problem = "a promise is its recipe's, and cannot name another component"
        return {}, [f"{where}: key 'component': {problem}"]
    check, problems = shape_of(check_type).read({**row.values, "component": IMAGE})
    values = {}
    if check is not None:
        problems += _check_texts(row, check, shape_of(check_type).required)
        values = {key: getattr(check, key) for key in row.values}
    return values, [f"{where}: {problem}" for problem in problems]


def _check_texts(row: CheckRow, check: Any, required: Sequence[str]) -> list[str]:
    """Return a line for each required text that is empty, and for each unknown name in braces."""
    texts = [key for key in required if key != "component"]
    problems = []
    for key in texts:
        if getattr(check, key) in ("", ()):
            problems.append(f"key '{key}': is empty")
    known = ", ".join(f"{{{name}}}" for name in FILLED_IN)
    # Programs may have braces of their own.
    for key in sorted(row.values.keys() - {"command", "arguments"}):
        names = NAME_IN_BRACES.findall(str(getattr(check, key)))
        unknown = [name for name in names if name not in FILLED_IN]
        problems += [
            f"key '{key}': {{{name}}} is never filled in; known: {known}" for name in unknown
        ]
    return problems


def collect_known_versions(step: Step, python: str) -> Mapping[str, str]:
    """Return the values of ``FILLED_IN`` for a component: ``{"version": "2.6", ...}``."""
    values = (step.version, _get_major(step.version), python)
    return dict(zip(FILLED_IN, values, strict=True))


def fill_in_versions(text: str, known: Mapping[str, str]) -> str:
    """Replace names in braces in a text: ``lib.so.{version}`` becomes ``lib.so.2.1``."""
    for name, version in known.items():
        text = text.replace(f"{{{name}}}", version)
    return text


def _fill_in_all(value: object, known: Mapping[str, str]) -> object:
    """Replace names in braces in a text, or in all texts of a tuple."""
    if isinstance(value, str):
        return fill_in_versions(value, known)
    if isinstance(value, tuple):
        return tuple(_fill_in_all(item, known) for item in value)
    return value


def image_checks(
    steps: Sequence[Step],
    labels: Mapping[str, str],
    environment: Mapping[str, str],
    target: TargetContext,
) -> list[Check]:
    """Return the promises that follow from the plan, or hold for every image."""
    return [
        *_checks_of_packages(steps, target),
        *_checks_of_files(steps, target),
        *_checks_of_cuda(steps, target),
        *_checks_of_configuration(labels, environment, target),
        *_checks_of_torchrun(steps),
        *_CHECKS_OF_USE,
        checks.SizeCheck(component=IMAGE, megabytes=target.row.size_budget_megabytes),
    ]


def _checks_of_packages(steps: Sequence[Step], target: TargetContext) -> list[Check]:
    """Return the promises about packages of Python and of the distribution."""
    promises: list[Check] = []
    for step in steps:
        if not step.in_image or not step.python:
            continue
        component = step.component
        names = []
        for package in step.python:
            names.append(package.name)
            promise = checks.PythonPackageCheck(
                component=component, distribution=package.name, version=package.version
            )
            promises.append(promise)
        promises.append(checks.PythonImportsCheck(component=component, distributions=tuple(names)))
        if target.cell.version and not TRITON.isdisjoint(names):
            promises.append(
                checks.CommandCheck(
                    component=component,
                    command=("python", "-c", TRITON_TOOLS),
                    expect="libdevice is there",
                    why=(
                        "Triton's own assembler starts, and its library of functions for the"
                        " device is there"
                    ),
                )
            )
    if target.sources == "packages":
        # Vendors' images have CUDA libraries as files: there, wheels that require them as packages
        # are not satisfied.
        command: tuple[str, ...] = PIP_CHECK_ARM64
        if target.base.architecture == "amd64":
            command = ("python", "-m", "pip", "check")
        promises.append(
            checks.CommandCheck(
                component=IMAGE,
                command=command,
                why="every Python package has what it requires, in a version that it accepts",
            )
        )
    system = next(step for step in steps if step.component == "system")
    for name in system.debian:
        promises.append(checks.DebianPackageCheck(component="system", package=name))
    return promises


def _checks_of_files(steps: Sequence[Step], target: TargetContext) -> list[Check]:
    """Return the promises about paths that exist, and paths that must not."""
    # The host's driver is mounted only into containers of images with CUDA.
    provided: tuple[str, ...] = ()
    if target.cell.version:
        provided = DRIVER_LIBRARIES
    folders = (
        "/opt/ml/code",
        "/opt/ml/model",
        "/opt/ml/output/data",
        "/opt/ml/input/config",
        "/opt/ml/input/data",
    )
    absent = [
        "/opt/builder",
        "/var/lib/apt/lists/*_Packages*",
        "/var/cache/apt/*.bin",
        "/root/.cache",
    ]
    has_compiler = any(step.component == COMPILER for step in steps)
    if not has_compiler:
        absent = [*COMPILERS, *absent]
    promises: list[Check] = [
        checks.SharedLibrariesCheck(component=IMAGE, roots=("/opt",), provided=provided),
        checks.SearchPathCheck(component=IMAGE, variable="PATH"),
        checks.SearchPathCheck(component=IMAGE, variable="LD_LIBRARY_PATH"),
    ]
    for path in folders:
        promises.append(checks.PathCheck(component=IMAGE, path=path, state="directory"))
    for path in absent:
        promises.append(checks.PathCheck(component=IMAGE, path=path, state="absent"))
    return promises


def _checks_of_cuda(steps: Sequence[Step], target: TargetContext) -> list[Check]:
    """Return the promises about the versions of CUDA's libraries.

    Without CUDA there may be none of them.
    """
    cuda = target.cell.version
    if not cuda:
        return [checks.DuplicatePackagesCheck(component=IMAGE, libraries=())]
    versions = dict.fromkeys(CUDA_LIBRARIES, cuda)
    for step in steps:
        if step.component == "cudnn":
            versions["libcudnn"] = step.version
    # The sonames, such as ``libcudart.so.12``.
    libraries = [
        f"{name}.so.{_get_major(version)}" for name, version in versions.items() if version
    ]
    return [
        checks.ElfNeedsCheck(
            component=IMAGE, roots=("/opt",), libraries=tuple(libraries), cuda=cuda
        ),
        checks.DuplicatePackagesCheck(component=IMAGE, libraries=SINGLE_CUDA_LIBRARIES),
    ]


def _checks_of_configuration(
    labels: Mapping[str, str], environment: Mapping[str, str], target: TargetContext
) -> list[Check]:
    """Return the promises about the image's configuration."""
    promises: list[Check] = []
    for label, value in labels.items():
        promises.append(checks.LabelCheck(component=IMAGE, label=label, value=value))
    configuration = checks.ConfigurationCheck(
        component=IMAGE,
        environment=tuple(sorted(environment.items())),
        labels=tuple(labels),
        entry_point=ENTRY_POINT,
        command=COMMAND,
        working_folder=WORKING_FOLDER,
        # CUDA images have many variables about their versions.
        others=bool(target.row.image),
        architecture=target.base.architecture,
    )
    promises.append(configuration)
    return promises


def _checks_of_torchrun(steps: Sequence[Step]) -> list[Check]:
    """Return the promise that ranks of one host connect if its name cannot be resolved."""
    torch_versions = [Version(step.version) for step in steps if step.component == "torch"]
    if not any(version >= TORCHRUN_FROM for version in torch_versions):
        return []
    mode = ("--mode", "torch_distributed", "--processes-per-host", "2")
    return [
        checks.StartCheck(
            component="torch",
            arguments=("train", *mode, "--", "python", "-c", MEETING),
            expect="ranks that met: 2",
            why=(
                "two ranks of torchrun meet on a host that has"
                " no network and cannot resolve its own name"
            ),
            alone=True,
        )
    ]


_CHECKS_OF_USE: tuple[Check, ...] = (
    checks.StartCheck(
        component=IMAGE, arguments=("sh", "-c", 'echo "in $PWD"'), expect=f"in {WORKING_FOLDER}\n"
    ),
    checks.CommandCheck(
        component=IMAGE,
        command=(*UNKNOWN_USER, "sh", "-ec", USE_AS_UNKNOWN_USER),
        expect="imported",
        why=(
            "a user whom the image does not know can start"
            " the launcher and Python, and leave results"
        ),
    ),
    checks.CommandCheck(
        component=IMAGE,
        command=(
            "sh",
            "-ec",
            'new=$(mktemp); ldconfig -X -C "$new"; cmp "$new" /etc/ld.so.cache; rm "$new"',
        ),
        why="the loader's cache has every library that ldconfig finds",
    ),
    checks.SecretsCheck(component=IMAGE),
)
"""Promises of every image."""


def _get_major(version: str) -> str:
    """Return the major version: ``12`` of ``12.6``."""
    return version.partition(".")[0]


def file_checks(recipes: Sequence[Recipe], facts: Facts) -> list[Check]:
    """Return the promises about all files: their origin, content and rights."""
    owned: list[str] = []
    removed: list[str] = []
    recipe_links: list[tuple[str, str]] = []
    for recipe in recipes:
        owned += recipe.owns
        removed += recipe.removes
        recipe_links += recipe.links.items()
    sourced = [pattern for pattern in owned if pattern.endswith("/**")]

    # The forms of these rows are those of ``DeliveredFilesCheck``.
    digests: list[tuple[str, str, str]] = []
    copies: list[tuple[str, str]] = []
    links: list[tuple[str, str]] = []
    for row in facts.generated_files:
        owned += row.paths
        for path in row.paths:
            if row.sha256:
                digests.append(("", path, row.sha256))
            if row.copy_of:
                copies.append((path, row.copy_of))
            if row.leads_to:
                links.append((path, row.leads_to))
    privileged: list[tuple[str, str]] = []
    for program in facts.privileged_files:
        privileged += [(program.package, path) for path in program.paths]
    rights = [
        checks.PathRights(
            paths=row.paths, mode=row.mode, group=row.group, attributes=row.attributes
        )
        for row in facts.rights
    ]
    return [
        checks.OwnedFilesCheck(component=IMAGE, owned=tuple(owned)),
        checks.DeliveredFilesCheck(
            component=IMAGE,
            removed=tuple(removed),
            digests=tuple(digests),
            copies=tuple(copies),
            closed=FOR_SOME_USERS,
            sourced=tuple(sourced),
            links=(*links, *recipe_links),
            privileged=tuple(privileged),
            shared=SHARED_FOLDERS,
            rights=tuple(rights),
        ),
        checks.WorldWritableCheck(component=IMAGE, allowed=FOLDERS_FOR_ALL),
        checks.PrivilegedFilesCheck(component=IMAGE, allowed=tuple(privileged)),
    ]


def make_lists_check(
    steps: Sequence[Step], recipes: Sequence[Recipe], declared: Sequence[Check]
) -> Check:
    """Return the promise that the image has the plan's packages, with their makers' lists of files.

    Args:
        steps: The components.
        recipes: The recipes of the components in the image.
        declared: The promises of the recipes; some are about distributions that are built from
            this repository.
    """
    names: set[str] = set()
    for check in declared:
        if isinstance(check, checks.PythonPackageCheck):
            names.add(check.distribution)
    for step in steps:
        if step.in_image:
            names.update(package.name for package in step.python)
        # A download or a build of a component has the component's name, or that of the artifact.
        names.add(step.component)
        names.update(artifact.name for artifact in step.artifacts)
    brought: list[str] = []
    trims: list[str] = []
    strips: list[str] = []
    for recipe in recipes:
        brought += recipe.brings
        trims += recipe.trims
        strips += recipe.strips
    system = next(step for step in steps if step.component == "system")
    return checks.MakersListsCheck(
        component=IMAGE,
        distributions=tuple(sorted(names)),
        debian=(*system.debian, *INCLUDED_PACKAGES, *brought),
        trims=tuple(trims),
        strips=tuple(strips),
    )
