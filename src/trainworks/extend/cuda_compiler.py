"""The compiler of CUDA code: in the stages that build an extension's wheels,
and not in its image.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from trainworks.errors import ExtendError
from trainworks.extend.requirements import ExtendedBase
from trainworks.facts.rows import Facts, LockedPackage, TargetRow
from trainworks.plan.package_ownership import compilers_needed
from trainworks.plan.resolve import make_plan
from trainworks.plan.select import request_for
from trainworks.plan.target import context_of

BUILD_TOOL = "wheel"
"""A distribution that builds of older projects import; it is in each lock for our own builds."""


@dataclass(frozen=True, kw_only=True)
class Workbench:
    """What wheels are built with, beside the base and the extension's Debian packages.

    Attributes:
        component: The component of the compiler; ``""`` where none was asked for.
        requirements: Its files, hash-locked, as pip reads them.
        whole: Distributions that are built with the base's torch in sight:
            without it they build something else.
        variables: The environment of builds, such as ``TORCH_CUDA_ARCH_LIST``.
    """

    component: str = ""
    requirements: str = ""
    whole: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def lines(self) -> tuple[str, ...]:
        """What it is made of, a line each: what is built with another one may
        ask for other packages.
        """
        return (
            *self.requirements.splitlines(),
            *(f"{name}={value}" for name, value in self.variables.items()),
        )


BARE = Workbench()
"""Nothing beside the base and its Debian packages."""


def workbench_of(
    names: Iterable[str],
    variables: Mapping[str, str],
    base: ExtendedBase,
    row: TargetRow | None,
    facts: Facts,
) -> Workbench:
    """Return what wheels are built with.

    The compiler's files are those that the base's own target has locked. Code is compiled for the
    architectures of its CUDA cell, unless ``variables`` say otherwise.

    Args:
        names: Components that compile; one at most exists.
        variables: What the user sets for builds.
        base: The base image.
        row: The target that the base is of, or that it extends; ``None`` for another maker's image.
        facts: All facts.

    Raises:
        ExtendError: The base's target cannot have a component.
        UnknownNameError: The same, with the targets that can.
    """
    compilers = {each.name: each for each in facts.components if each.compiles}
    component, named = "", next((name for name in compilers if name in base.components), "")
    files: tuple[LockedPackage, ...] = ()
    if not named:
        for name in dict.fromkeys(names):
            if name not in compilers:
                raise ExtendError(
                    [f"--with {name}: builds of wheels can have {', '.join(compilers)}"]
                )
            if row is None:
                what = f"--with {name}: {base.reference} is not an image of ours"
                raise ExtendError([what], hint="take a base that has a compiler")
            if not facts.cuda_by_name[row.cuda].version:
                raise ExtendError(
                    [f"--with {name}: {base.reference} has no CUDA"],
                    hint="take a base image with CUDA",
                )
            plan = make_plan(replace(request_for(row, facts), with_components=(name,)), facts)
            files = next(step.python for step in plan.steps if step.component == name)
            component = named = name
    if not named or row is None:
        return Workbench(
            whole=compilers[named].compiles if named else (), variables=dict(variables)
        )
    # Where it is in the base: without a GPU a build does not know what to
    # compile for, and images lack build tools.
    return Workbench(
        component=component,
        requirements=_pins((*files, *_tools(row, facts))),
        whole=compilers[named].compiles,
        variables={**_architectures(row, facts), **variables},
    )


def _tools(row: TargetRow, facts: Facts) -> tuple[LockedPackage, ...]:
    """Return what builds import and no image has, as a target's lock has it for its own builds."""
    return tuple(
        each for each in context_of(row, facts).lock or () if each.build and each.name == BUILD_TOOL
    )


def _pins(files: Iterable[LockedPackage]) -> str:
    return "".join(f"{each.name}=={each.version} --hash=sha256:{each.sha256}\n" for each in files)


def _architectures(row: TargetRow, facts: Facts) -> dict[str, str]:
    """Return the variable by which PyTorch's builds are told the architectures
    of a target's CUDA cell.
    """
    cell = facts.cuda_by_name[row.cuda]
    return {
        "TORCH_CUDA_ARCH_LIST": ";".join(f"{each[:-1]}.{each[-1]}" for each in cell.architectures)
    }


def lacking(bench: Workbench, base: ExtendedBase, facts: Facts) -> dict[str, dict[str, str]]:
    """Return which distributions lack their compiler, as a manifest has it."""
    there = {bench.component, *base.components}
    absent = [
        (name, each)
        for each in facts.components
        if each.name not in there
        for name in each.compiles
    ]
    has_cuda = base.launcher and any(name.startswith("nvidia-") for name in base.kept)
    return {
        "compiled_by": {name: each.name for name, each in absent if has_cuda},
        "needs": compilers_needed(there, facts),
    }
