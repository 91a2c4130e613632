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
"""The most files with the same damage that have a line each."""


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """The result of one check.

    Attributes:
        component: The component that declares the check.
        title: The check in words.
        passed: Whether the image passes; a check that could not run has not passed.
        detail: The reason of a failure, and what to do; empty when passed.
        seconds: Seconds that the run waited for this check after the checks before
            it; several run in parallel.
    """

    component: str
    title: str
    passed: bool
    detail: str
    seconds: float


def title_of(check: kinds.Check) -> str:
    """Return a check in words, as they read when it passes: ``import torch succeeds``."""
    match check:
        case kinds.PathCheck(path=path, state="absent"):
            return f"{path} does not exist"
        case kinds.PathCheck(path=path, state="executable"):
            return f"{path} is executable"
        case kinds.PathCheck(path=path, state=state):
            return f"{path} is a {state}"
        case kinds.CommandCheck(command=command, expect=expect, why=why):
            # The meaning says more than a program of one line; a failure shows the command.
            if why:
                return why
            result = f"prints {expect!r}" if expect else "succeeds"
            return f"{shlex.join(command)} {result}"
        case kinds.ImportCheck(module=module):
            return f"import {module} succeeds"
        case kinds.PythonPackageCheck(distribution=distribution, version=version):
            return f"{distribution} {version} is installed"
        case kinds.PythonImportsCheck(distributions=distributions):
            noun = "distribution" if len(distributions) == 1 else "distributions"
            return f"{len(distributions)} {noun} can be imported"
        case kinds.DebianPackageCheck(package=package, version=version):
            name = f"{package} {version}" if version else package
            return f"Debian package {name} is installed"
        case kinds.LoadedLibraryCheck(module=module, library=library):
            return f"import {module} loads {library}"
        case kinds.LoadableLibraryCheck(library=library):
            return f"{library} can be loaded"
        case kinds.OpenableLibrariesCheck(libraries=libraries, by_name=by_name):
            manner = " by its name" if by_name else ""
            return f"each of {', '.join(libraries)} can be opened{manner}"
        case kinds.HardenedLibrariesCheck(libraries=libraries):
            verb = "are" if len(libraries) > 1 else "is"
            return f"{', '.join(libraries)} {verb} hardened as Debian's libraries"
        case kinds.SharedLibrariesCheck(roots=roots):
            return f"all shared libraries under {', '.join(roots)} find what they need"
        case kinds.SingleLibraryCheck(soname=soname):
            return f"at most one {soname} exists"
        case kinds.ElfNeedsCheck(roots=roots, libraries=libraries, cuda=cuda):
            platform = f"CUDA {cuda}" if cuda else ", ".join(libraries)
            return f"files under {', '.join(roots)} were built for {platform}"
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
            if why:
                return why
            output = f" and prints {expect!r}" if expect else ""
            return f"a container starts with {shlex.join(arguments)}{output}"
    assert_never(check)


def line(result: CheckResult, *, width: int = 10) -> str:
    """Return the line for a person: ``ok`` or ``FAIL``, component, check.

    The reason of a failure is indented below.

    Args:
        result: The result.
        width: The space for the component's name (``component_width``).
    """
    status = "ok" if result.passed else "FAIL"
    first_line = f"{status:<4}  {result.component:<{width}}  {one_line(result.title)}"
    if result.passed:
        return first_line
    return f"{first_line}\n{textwrap.indent(result.detail, ' ' * 6)}"


def component_width(checks: Iterable[kinds.Check]) -> int:
    """Return the length of the longest component name, for lines in columns."""
    return max((len(check.component) for check in checks), default=0)


def one_line(path: str) -> str:
    """Return a path on one line: its name may have line ends.

    Other control characters are removed before output to a terminal.
    """
    return path.replace("\n", "\\n")


def folded(paths: Iterable[str]) -> list[str]:
    """Return paths as lines; many paths of a folder are one line with their number.

    For example ``/opt/lib/ (12 files, as /opt/lib/a.so)``.
    """
    paths_by_folder: dict[str, list[str]] = {}
    for path in paths:
        paths_by_folder.setdefault(posixpath.dirname(path), []).append(path)
    lines: list[str] = []
    for folder, folder_paths in paths_by_folder.items():
        if len(folder_paths) <= ALIKE:
            lines += map(one_line, folder_paths)
        else:
            text = f"{folder}/ ({len(folder_paths)} files, as {folder_paths[0]})"
            lines.append(one_line(text))
    return lines
