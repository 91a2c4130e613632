"""The result of a check, and its text for people."""

from __future__ import annotations

import posixpath
import shlex
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import assert_never

from trainworks.plan import checks as kinds

ALIKE = 10
"""How many files with the same damage are named, one line each."""


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """One promise, kept or broken.

    Attributes:
        component: The component that promises it.
        title: The promise in words.
        passed: Whether the image keeps it; a check that could not run is not passed.
        detail: Why not, and what to do; empty when passed.
        seconds: How long the run waited for this check, when those before it
            were done; several are asked at once.
    """

    component: str
    title: str
    passed: bool
    detail: str
    seconds: float


def title_of(check: kinds.Check) -> str:
    """Return the promise in words, as it reads when it is kept."""
    match check:
        case kinds.PathCheck(path=path, state="absent"):
            return f"{path} does not exist"
        case kinds.PathCheck(path=path, state="executable"):
            return f"{path} is executable"
        case kinds.PathCheck(path=path, state=state):
            return f"{path} is a {state}"
        case kinds.CommandCheck(command=command, expect=expect, why=why):
            # What it means says more than a program of one line; a failure shows the command.
            return why or f"{shlex.join(command)} {f'prints {expect!r}' if expect else 'succeeds'}"
        case kinds.ImportCheck(module=module):
            return f"import {module} succeeds"
        case kinds.PythonPackageCheck(distribution=distribution, version=version):
            return f"{distribution} {version} is installed"
        case kinds.PythonImportsCheck(distributions=distributions):
            return (
                f"{len(distributions)}"
                f" distribution{'s' if len(distributions) != 1 else ''} can be imported"
            )
        case kinds.DebianPackageCheck(package=package, version=version):
            return f"Debian package {package}{f' {version}' if version else ''} is installed"
        case kinds.LoadedLibraryCheck(module=module, library=library):
            return f"import {module} loads {library}"
        case kinds.LoadableLibraryCheck(library=library):
            return f"{library} can be loaded"
        case kinds.OpenableLibrariesCheck(libraries=libraries, by_name=by_name):
            return (
                f"each of {', '.join(libraries)} can be opened{' by its name' if by_name else ''}"
            )
        case kinds.HardenedLibrariesCheck(libraries=libraries):
            return (
                f"{', '.join(libraries)} {'are' if len(libraries) > 1 else 'is'} hardened as"
                " Debian's libraries"
            )
        case kinds.SharedLibrariesCheck(roots=roots):
            return f"all shared libraries under {', '.join(roots)} find what they need"
        case kinds.SingleLibraryCheck(soname=soname):
            return f"at most one {soname} exists"
        case kinds.ElfNeedsCheck(roots=roots, libraries=libraries, cuda=cuda):
            what = f"CUDA {cuda}" if cuda else ", ".join(libraries)
            return f"files under {', '.join(roots)} were built for {what}"
        case kinds.DuplicatePackagesCheck():
            return "no Python distribution, Debian package or CUDA library is installed twice"
        case kinds.OwnedFilesCheck():
            return "every file belongs to a package or a recipe"
        case kinds.DeliveredFilesCheck():
            return "every file is as its maker delivered it"
        case kinds.MakersListsCheck():
            return "every package is one of the plan's, and its list of files is its maker's"
        case kinds.WorldWritableCheck(allowed=allowed):
            return f"no file can be changed by every user, except {', '.join(allowed)}"
        case kinds.PrivilegedFilesCheck():
            return "no setuid, setgid or capability except the declared ones"
        case kinds.SearchPathCheck(variable=variable):
            return f"every entry of {variable} exists"
        case kinds.SecretsCheck():
            return "no key, credential, host setting or package cache in any layer"
        case kinds.SizeCheck(megabytes=megabytes):
            return f"the image is at most {megabytes} MB"
        case kinds.LabelCheck(label=label, value=value):
            return f"label {label} is {value}"
        case kinds.ConfigurationCheck():
            return "environment, entry point and the rest of the configuration are the plan's"
        case kinds.StartCheck(arguments=arguments, expect=expect, why=why):
            said = f" and prints {expect!r}" if expect else ""
            return why or f"a container starts with {shlex.join(arguments)}{said}"
    assert_never(check)


def line(result: CheckResult, *, width: int = 10) -> str:
    """Return the line for a person: ``ok`` or ``FAIL``, component, promise.

    The reason indented below.

    ``width`` is the space for the component's name; ``component_width`` finds it for a plan.
    """
    first = (
        f"{'ok' if result.passed else 'FAIL':<4}  {result.component:<{width}} "
        f" {one_line(result.title)}"
    )
    return first if result.passed else f"{first}\n{textwrap.indent(result.detail, ' ' * 6)}"


def component_width(checks: Iterable[kinds.Check]) -> int:
    """Return the length of the longest component name, so that the lines of a
    plan stand in columns.
    """
    return max((len(check.component) for check in checks), default=0)


def one_line(path: str) -> str:
    """Return a path on one line: its name may have line ends.

    Control characters are what the terminal cleans.
    """
    return path.replace("\n", "\\n")


def folded(paths: Iterable[str]) -> list[str]:
    """Return paths.

    Of a folder with more than a few the folder, and how many there are below it.
    """
    below: dict[str, list[str]] = {}
    for path in paths:
        below.setdefault(posixpath.dirname(path), []).append(path)
    lines: list[str] = []
    for folder, inside in below.items():
        lines += map(
            one_line,
            (
                inside
                if len(inside) <= ALIKE
                else [f"{folder}/ ({len(inside)} files, as {inside[0]})"]
            ),
        )
    return lines
