"""The compiler of CUDA code, for the stages that build an extension's wheels.

The extension's image does not get it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from trainworks.errors import ExtendError
from trainworks.extend.requirements import ExtendedBase
from trainworks.facts.rows import Facts, LockedPackage, TargetRow
from trainworks.plan.package_ownership import find_missing_compilers
from trainworks.plan.resolve import make_plan
from trainworks.plan.select import request_for
from trainworks.plan.target import context_of

BUILD_TOOL = "wheel"
"""A distribution that older projects need to build; each lock has it for our own builds."""


@dataclass(frozen=True, kw_only=True)
class Workbench:
    """The tools of wheel builds, beside the base and the extension's Debian packages.

    Attributes:
        component: The component of the compiler; ``""`` where none was chosen.
        requirements: Its files, hash-locked, as pip reads them.
        whole: Distributions that are built without build isolation, because they read the
            installed torch.
        variables: The environment of builds, such as ``TORCH_CUDA_ARCH_LIST``.
    """

    component: str = ""
    requirements: str = ""
    whole: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def lines(self) -> tuple[str, ...]:
        """Requirements and variables, a line each.

        A wheel that was built with others may require other packages.
        """
        variables = [f"{name}={value}" for name, value in self.variables.items()]
        return (*self.requirements.splitlines(), *variables)


BARE = Workbench()
"""Nothing beside the base and its Debian packages."""


def workbench_of(
    names: Iterable[str],
    variables: Mapping[str, str],
    base: ExtendedBase,
    row: TargetRow | None,
    facts: Facts,
) -> Workbench:
    """Return the compiler and the environment that wheels are built with.

    The compiler's files are those in the lock of the base's own target. Code is compiled for the
    architectures of its CUDA cell, unless ``variables`` say otherwise.

    Args:
        names: Components that compile; there is at most one.
        variables: The user's variables for builds.
        base: The base image.
        row: The target that the base is of, or that it extends; ``None`` for another maker's image.
        facts: All facts.

    Raises:
        ExtendError: The base's target cannot have a component.
        UnknownNameError: The same, with the targets that can.
    """
    compiled_packages = {
        component.name: component.compiles for component in facts.components if component.compiles
    }
    installed = [name for name in compiled_packages if name in base.components]
    compiler = installed[0] if installed else ""
    component = ""
    files: tuple[LockedPackage, ...] = ()
    if not installed:
        for name in dict.fromkeys(names):
            target = _target_for(name, list(compiled_packages), base, row, facts)
            request = replace(request_for(target, facts), with_components=(name,))
            steps = make_plan(request, facts).steps
            files = next(step.python for step in steps if step.component == name)
            component = compiler = name

    whole = compiled_packages[compiler] if compiler else ()
    if not compiler or row is None:
        return Workbench(whole=whole, variables=dict(variables))
    # Also where the compiler is in the base: without a GPU a build does not know which
    # architectures to compile for, and images lack build tools.
    return Workbench(
        component=component,
        requirements=_pins((*files, *_tools(row, facts))),
        whole=whole,
        variables={**_architectures(row, facts), **variables},
    )


def _target_for(
    name: str, compilers: Sequence[str], base: ExtendedBase, row: TargetRow | None, facts: Facts
) -> TargetRow:
    """Return the base's target, if a compiler can be added to it.

    Args:
        name: The component that compiles.
        compilers: The components that exist.
        base: The base image.
        row: Its target; ``None`` for another maker's image.
        facts: All facts.
    """
    if name not in compilers:
        raise ExtendError([f"--with {name}: builds of wheels can have {', '.join(compilers)}"])
    if row is None:
        problem = f"--with {name}: {base.reference} is not an image of ours"
        raise ExtendError([problem], hint="take a base that has a compiler")
    if not facts.cuda_by_name[row.cuda].version:
        problem = f"--with {name}: {base.reference} has no CUDA"
        raise ExtendError([problem], hint="take a base image with CUDA")
    return row


def _tools(row: TargetRow, facts: Facts) -> tuple[LockedPackage, ...]:
    """Return the build tools of a target's lock that no image has."""
    packages = context_of(row, facts).lock or ()
    return tuple(package for package in packages if package.build and package.name == BUILD_TOOL)


def _pins(files: Iterable[LockedPackage]) -> str:
    lines = [f"{file.name}=={file.version} --hash=sha256:{file.sha256}\n" for file in files]
    return "".join(lines)


def _architectures(row: TargetRow, facts: Facts) -> dict[str, str]:
    """Return PyTorch's variable for the architectures of a target's CUDA cell.

    ``("80", "90")`` become ``8.0;9.0``.
    """
    cell = facts.cuda_by_name[row.cuda]
    versions = [f"{architecture[:-1]}.{architecture[-1]}" for architecture in cell.architectures]
    return {"TORCH_CUDA_ARCH_LIST": ";".join(versions)}


def missing_compilers(
    bench: Workbench, base: ExtendedBase, facts: Facts
) -> dict[str, dict[str, str]]:
    """Return the distributions that lack their compiler, as rows of a manifest."""
    available = {bench.component, *base.components}
    has_cuda = base.launcher and any(name.startswith("nvidia-") for name in base.kept)
    compiled_by = {}
    if has_cuda:
        for component in facts.components:
            if component.name not in available:
                compiled_by.update(dict.fromkeys(component.compiles, component.name))
    return {"compiled_by": compiled_by, "needs": find_missing_compilers(available, facts)}
