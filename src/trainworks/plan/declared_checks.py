"""What an image promises: by the front matter of its recipes, and by its plan alone."""

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
from trainworks.plan.target import TargetContext
from trainworks.suggestions import nearest

IMAGE = "image"
"""The name under which promises that belong to no single component are reported."""

CHECK_TYPES: Mapping[str, type[Any]] = {
    check_type.kind: check_type for check_type in get_args(Check)
}
"""Kinds of promises that a front matter may declare, by the word it uses."""

CUDA_LIBRARIES = ("libcudart", "libcublas", "libcublasLt", "libnvrtc", "libcupti", "libnvJitLink")
"""Libraries of the CUDA toolkit whose soname has the toolkit's own major version (CUDA 13's
cuSPARSE is still 12).
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
"""What a front matter may name in braces."""

NAME_IN_BRACES = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
"""A name that a front matter wants filled in.

Programs among the words of a command may have braces of their own.
"""

RESULTS = ("/opt/ml/model", "/opt/ml/output", "/opt/ml/output/data")
"""Where a job leaves what it made, whichever user it runs as."""

FOLDERS_FOR_ALL = (
    "/tmp",  # noqa: S108
    "/var/tmp",  # noqa: S108
    "/run/lock",
    *RESULTS,
)
"""Where every user of a Linux system may write, and of an image.

With the sticky bit: files stay their owner's.
"""

SHARED_FOLDERS = ("/tmp", "/var/tmp", *RESULTS)  # noqa: S108  (names of folders in an image)
"""Folders in which every user makes files, and changes no file of another user."""

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
"""What a Linux system keeps from its users.

Everything else can be read by all: jobs are started by any user.
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
"""Starts a command as Kubernetes does where no user of an image may be root:
with a number that has no name.
"""

USE_AS_ANYONE = (
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
"""A job's program: its ranks find each other, and add up what each of them has."""

DRIVER_LIBRARIES = ("libcuda.so.1", "libnvidia-ml.so.1")
"""Libraries that come with the host's driver and are never in an image."""


def declared_checks(
    steps: Sequence[Step], recipes: Mapping[str, Recipe], python: str
) -> list[Check]:
    """Return the promises of the recipes' front matters.

    Raises ``FactsError`` with every malformed one.

    Those of recipes that no step has, and those ``beside`` a component that is not there, must be
    well-formed too: a malformed promise of an optional component would be found only when a user
    chooses it.
    """
    read = {
        recipe.name: [_values(row, f"{recipe.name}.j2: check {number}") for number, row in rows]
        for recipe in recipes.values()
        for rows in [tuple(enumerate(recipe.checks, start=1))]
    }
    if problems := [problem for each in read.values() for _, wrong in each for problem in wrong]:
        raise FactsError(problems)
    chosen = {step.component for step in steps}
    found: list[Check] = []
    for step in steps:
        known = known_versions(step, python)
        for row, (values, _) in zip(recipes[step.recipe].checks, read[step.recipe], strict=True):
            if not row.beside or row.beside in chosen:
                filled_in = {key: _fill(value, known) for key, value in values.items()}
                found.append(CHECK_TYPES[row.kind](component=step.component, **filled_in))
    return found


def _values(row: CheckRow, where: str) -> tuple[Mapping[str, object], list[str]]:
    """Return the values of a promise as its kind has them, and what is wrong with them."""
    where = f"templates/components/{where} (kind = {short(row.kind)})"
    check_type = CHECK_TYPES.get(row.kind)
    if check_type is None:
        near = nearest(row.kind, sorted(CHECK_TYPES))
        advice = f"did you mean {near}?" if near else f"there are {', '.join(CHECK_TYPES)}"
        return {}, [f"{where}: unknown kind; {advice}"]
    if "component" in row.values:
        return {}, [
            (
                f"{where}: key 'component':"
                " a promise is its recipe's, and cannot name another component"
            )
        ]
    check, wrong = shape_of(check_type).read({**row.values, "component": IMAGE})
    if check is not None:
        # Of each text that a kind asks for; one with a default may be empty.
        wrong += [
            f"key '{key}': is empty"
            for key in shape_of(check_type).required
            if key != "component" and getattr(check, key) in ("", ())
        ]
        wrong += [
            f"key '{key}': {{{name}}} is never filled in; known:"
            f" {', '.join(f'{{{each}}}' for each in FILLED_IN)}"
            for key in sorted(row.values.keys() - {"command", "arguments"})
            for name in NAME_IN_BRACES.findall(str(getattr(check, key)))
            if name not in FILLED_IN
        ]
    values = {key: getattr(check, key) for key in row.values} if check is not None else {}
    return values, [f"{where}: {problem}" for problem in wrong]


def known_versions(step: Step, python: str) -> Mapping[str, str]:
    """Return the values of ``FILLED_IN``."""
    return dict(zip(FILLED_IN, (step.version, _major(step.version), python), strict=True))


def filled(text: str, known: Mapping[str, str]) -> str:
    """Put versions into a text in the place of their names in braces."""
    for name, version in known.items():
        text = text.replace(f"{{{name}}}", version)
    return text


def _fill(value: object, known: Mapping[str, str]) -> object:
    """Put versions into texts, and into those of lists."""
    if isinstance(value, str):
        return filled(value, known)
    if isinstance(value, tuple):
        return tuple(_fill(item, known) for item in value)
    return value


def image_checks(
    steps: Sequence[Step],
    labels: Mapping[str, str],
    environment: Mapping[str, str],
    target: TargetContext,
) -> list[Check]:
    """Return the promises that no recipe has to write: they follow from the
    plan, or hold for every image.
    """
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
    found: list[Check] = []
    for step in steps:
        if not step.in_image:
            continue
        found += [
            checks.PythonPackageCheck(
                component=step.component, distribution=package.name, version=package.version
            )
            for package in step.python
        ]
        if step.python:
            names = tuple(package.name for package in step.python)
            found.append(checks.PythonImportsCheck(component=step.component, distributions=names))
            if target.cell.version and TRITON & {*names}:
                found.append(
                    checks.CommandCheck(
                        component=step.component,
                        command=("python", "-c", TRITON_TOOLS),
                        expect="libdevice is there",
                        why=(
                            "Triton's own assembler starts, and its library of functions for the"
                            " device is there"
                        ),
                    )
                )
    if target.sources == "packages":
        # Vendors' images bring CUDA libraries as files: there wheels that
        # require them as packages are not satisfied.
        found.append(
            checks.CommandCheck(
                component=IMAGE,
                command=(
                    ("python", "-m", "pip", "check")
                    if target.base.architecture == "amd64"
                    else PIP_CHECK_ARM64
                ),
                why="every Python package has what it requires, in a version that it accepts",
            )
        )
    system = next(step for step in steps if step.component == "system")
    return [
        *found,
        *(
            checks.DebianPackageCheck(component="system", package=package)
            for package in system.debian
        ),
    ]


def _checks_of_files(steps: Sequence[Step], target: TargetContext) -> list[Check]:
    """Return the promises about what is there, and what is not."""
    provided = DRIVER_LIBRARIES if target.cell.version else ()
    there = (
        "/opt/ml/code",
        "/opt/ml/model",
        "/opt/ml/output/data",
        "/opt/ml/input/config",
        "/opt/ml/input/data",
    )
    absent = (
        *(() if any(step.component == COMPILER for step in steps) else COMPILERS),
        "/opt/builder",
        "/var/lib/apt/lists/*_Packages*",
        "/var/cache/apt/*.bin",
        "/root/.cache",
    )
    return [
        checks.SharedLibrariesCheck(component=IMAGE, roots=("/opt",), provided=provided),
        *(
            checks.SearchPathCheck(component=IMAGE, variable=name)
            for name in ("PATH", "LD_LIBRARY_PATH")
        ),
        *(checks.PathCheck(component=IMAGE, path=path, state="directory") for path in there),
        *(checks.PathCheck(component=IMAGE, path=path, state="absent") for path in absent),
    ]


def _checks_of_cuda(steps: Sequence[Step], target: TargetContext) -> list[Check]:
    """Return the promises about the versions of CUDA's libraries.

    Without CUDA there may be none of them.
    """
    cell = target.cell
    found: list[Check] = []
    if cell.version:
        versions = dict.fromkeys(CUDA_LIBRARIES, cell.version)
        versions |= {
            f"lib{step.component}": step.version for step in steps if step.component == "cudnn"
        }
        libraries = tuple(
            f"{name}.so.{_major(version)}" for name, version in versions.items() if version
        )
        found.append(
            checks.ElfNeedsCheck(
                component=IMAGE, roots=("/opt",), libraries=libraries, cuda=cell.version
            )
        )
    single = SINGLE_CUDA_LIBRARIES if cell.version else ()
    return [*found, checks.DuplicatePackagesCheck(component=IMAGE, libraries=single)]


def _checks_of_configuration(
    labels: Mapping[str, str], environment: Mapping[str, str], target: TargetContext
) -> list[Check]:
    """Return the promises about the image's configuration."""
    return [
        *(
            checks.LabelCheck(component=IMAGE, label=label, value=value)
            for label, value in labels.items()
        ),
        checks.ConfigurationCheck(
            component=IMAGE,
            environment=tuple(sorted(environment.items())),
            labels=tuple(labels),
            entry_point=ENTRY_POINT,
            command=COMMAND,
            working_folder=WORKING_FOLDER,
            # Images of CUDA have many variables that say what is in them.
            others=bool(target.row.image),
            architecture=target.base.architecture,
        ),
    ]


def _checks_of_torchrun(steps: Sequence[Step]) -> list[Check]:
    """Return the promise that ranks of one host meet without its name, whatever
    torchrun of this version does.
    """
    if not any(
        step.component == "torch" and Version(step.version) >= TORCHRUN_FROM for step in steps
    ):
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
        command=(*UNKNOWN_USER, "sh", "-ec", USE_AS_ANYONE),
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
"""What holds for every image, whatever is in it."""


def _major(version: str) -> str:
    return version.partition(".")[0]


def file_checks(recipes: Sequence[Recipe], facts: Facts) -> list[Check]:
    """Return the promises about all files of the image: known origin, as
    delivered, no rights given away.
    """
    owned = [pattern for recipe in recipes for pattern in recipe.owns]
    owned += [pattern for row in facts.generated_files for pattern in row.paths]
    allowed = [(row.package, path) for row in facts.privileged_files for path in row.paths]
    digests = [
        ("", path, row.sha256) for row in facts.generated_files if row.sha256 for path in row.paths
    ]
    return [
        checks.OwnedFilesCheck(component=IMAGE, owned=tuple(owned)),
        checks.DeliveredFilesCheck(
            component=IMAGE,
            removed=tuple(pattern for recipe in recipes for pattern in recipe.removes),
            digests=tuple(digests),
            copies=tuple(
                (path, row.copy_of)
                for row in facts.generated_files
                if row.copy_of
                for path in row.paths
            ),
            closed=FOR_SOME_USERS,
            sourced=tuple(
                pattern for recipe in recipes for pattern in recipe.owns if pattern.endswith("/**")
            ),
            links=(
                *(
                    (path, row.leads_to)
                    for row in facts.generated_files
                    if row.leads_to
                    for path in row.paths
                ),
                *(pair for recipe in recipes for pair in recipe.links.items()),
            ),
            privileged=tuple(allowed),
            shared=SHARED_FOLDERS,
            rights=tuple(
                checks.PathRights(paths=row.paths, mode=row.mode, group=row.group)
                for row in facts.rights
            ),
        ),
        checks.WorldWritableCheck(component=IMAGE, allowed=FOLDERS_FOR_ALL),
        checks.PrivilegedFilesCheck(component=IMAGE, allowed=tuple(allowed)),
    ]


def lists_of_makers(
    steps: Sequence[Step], recipes: Sequence[Recipe], declared: Sequence[Check]
) -> Check:
    """Return the promise that the image has the plan's packages, and these
    their makers' lists of files.

    Args:
        steps: The components.
        recipes: Those of the components in the image.
        declared: What the recipes promise, by name also distributions that are
            made of this repository.
    """
    names = {
        check.distribution for check in declared if isinstance(check, checks.PythonPackageCheck)
    }
    for step in steps:
        names |= {package.name for package in step.python if step.in_image}
        # What a component downloads or builds itself has its name, or that of the download.
        names |= {step.component, *(artifact.name for artifact in step.artifacts)}
    system = next(step for step in steps if step.component == "system")
    return checks.MakersListsCheck(
        component=IMAGE,
        distributions=tuple(sorted(names)),
        debian=system.debian,
        trims=tuple(pattern for recipe in recipes for pattern in recipe.trims),
        strips=tuple(pattern for recipe in recipes for pattern in recipe.strips),
    )
