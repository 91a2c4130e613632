"""Answers all questions of an image's checks: what is wrong, check by check,
and what else was asked.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Callable
from typing import Any, TypedDict

from trainworks.imagetest.probe.delivered import damaged_files
from trainworks.imagetest.probe.files import (
    DamagedFile,
    Image,
    ImageContents,
    InstalledFiles,
    Owners,
    ProbedDistribution,
    contents_of,
    matching,
    pattern_of,
    rights_of,
    told,
)
from trainworks.imagetest.probe.libraries import (
    check_duplicate_packages,
    check_elf_needs,
    check_hardened_libraries,
    check_loadable_library,
    check_loaded_library,
    check_openable_libraries,
    check_shared_libraries,
    check_single_library,
)
from trainworks.imagetest.probe.lists import PackageLists, lists_of
from trainworks.imagetest.probe.packages import PackagesAnswer, all_packages


class Request(TypedDict, total=False):
    """All questions of one run.

    ``root`` is ``/`` in an image (tests ask about a folder); ``python`` is the interpreter of the
    image's environment. ``checks`` are fields of ``trainworks.plan.checks``, of the kinds in
    ``QUESTIONS``. ``files`` asks what is wrong with the files: patterns of those whose owner is
    known, and the fields of a ``DeliveredFilesCheck``, or nothing. ``lists`` asks for the packages'
    own lists, with the Debian packages that the plan asks for. ``contents`` asks for all files:
    ``files`` (with their owners) or ``digests`` (with what is in them too).
    """

    root: str
    python: str
    checks: list[dict[str, Any]]
    distributions: bool
    sizes: bool
    files: tuple[list[str], dict[str, Any] | None]
    contents: str
    packages: bool
    lists: list[str]


class Answer(TypedDict, total=False):
    """What is wrong with each check, in their order: lines for people, none where nothing is."""

    problems: list[list[str]]
    distributions: list[ProbedDistribution]
    distributions_error: str
    sizes: list[tuple[str, int]]
    files: InstalledFiles
    contents: ImageContents
    packages: PackagesAnswer
    lists: PackageLists


def check_search_path(check: dict[str, Any], image: Image) -> list[str]:
    """Return what is wrong with the entries of a path-like variable."""
    variable = check["variable"]
    value = os.environ.get(variable, "")
    problems = ["PATH is not set"] if variable == "PATH" and not value else []
    for entry in value.split(":") if value else ():
        if not entry:
            problems.append(
                "an entry is empty, which means the current folder: remove the stray colon"
            )
        elif not entry.startswith("/"):
            problems.append(f"{entry} is not absolute: it means another folder for every program")
        elif not os.path.isdir(image.root + entry):
            problems.append(
                f"{entry}"
                f" {'is not a folder' if os.path.exists(image.root + entry) else 'does not exist'}"
            )
    return told(problems, f"correct {variable} in the image's environment")


def check_absent(check: dict[str, Any], image: Image) -> list[str]:
    """Return the paths that fit a pattern which nothing may fit."""
    return told(
        matching(image.root, check["path"]),
        "must not be in the image: remove it in the step that brings it",
    )


QUESTIONS: dict[str, Callable[[dict[str, Any], Image], list[str]]] = {
    "shared-libraries": check_shared_libraries,
    "elf-needs": check_elf_needs,
    "loadable-library": check_loadable_library,
    "openable-libraries": check_openable_libraries,
    "hardened-libraries": check_hardened_libraries,
    "loaded-library": check_loaded_library,
    "single-library": check_single_library,
    "duplicate-packages": check_duplicate_packages,
    "search-path": check_search_path,
    "path": check_absent,
}
"""The kinds of checks that are answered here; of paths only those that must be absent."""


def largest(image: Image) -> list[tuple[str, int]]:
    """Return the ten largest components: Python packages each for itself,
    everything else by folder.
    """
    totals: dict[str, int] = {}
    for path, status in image.files():
        if stat.S_ISREG(status.st_mode):
            match = re.match(r".*/(?:site|dist)-packages/(?:nvidia/)?[^/]+", path)
            folder = (
                "/".join(path.split("/")[:4])
                if path.count("/") > 3
                else os.path.dirname(path) or "/"
            )
            component = match[0] if match else folder
            totals[component] = totals.get(component, 0) + status.st_size
    return sorted(totals.items(), key=lambda item: -item[1])[:10]


def look_at_files(
    image: Image, owners: Owners, owned: list[str], delivered: dict[str, Any] | None
) -> InstalledFiles:
    """Say what is wrong with the files, ``owned`` and ``delivered`` as in ``Request``."""
    rest = [(path, status) for path, status in image.files() if not stat.S_ISDIR(status.st_mode)]
    declared = pattern_of(owned)
    damaged: list[DamagedFile] = []
    if delivered is not None:
        owners.read_sums()
        damaged = damaged_files(delivered, image, owners)
    return {
        "files": len(rest),
        "packages": len(owners.names),
        "unowned": [
            path for path, _ in rest if not owners.owns(path) and not declared.fullmatch(path)
        ],
        "open": [
            (path, stat.S_IMODE(status.st_mode))
            for path, status in image.files()
            if not stat.S_ISLNK(status.st_mode) and status.st_mode & stat.S_IWOTH
        ],
        "privileged": [
            {"path": path, "rights": rights, "package": owners.packages.get(path, "")}
            for path, status in rest
            if stat.S_ISREG(status.st_mode) and (rights := rights_of(image.root + path, status))
        ],
        "error": owners.error,
        "damaged": damaged,
    }


def answer(request: Request) -> Answer:
    """Answer everything, the files first: programs that other questions start leave some."""
    image = Image(request.get("root", "/"), request.get("python", sys.executable))
    found: Answer = {}
    asked, wanted = request.get("files"), request.get("contents")
    if asked or wanted:
        owners = Owners(image)
        if asked:
            found["files"] = look_at_files(image, owners, *asked)
        if wanted:
            found["contents"] = contents_of(image, owners, digests=wanted == "digests")
    found["problems"] = [
        QUESTIONS[check["kind"]](check, image) for check in request.get("checks", ())
    ]
    if request.get("distributions"):
        found["distributions"], found["distributions_error"] = image.distributions()
    if request.get("sizes"):
        found["sizes"] = largest(image)
    if "lists" in request:
        found["lists"] = lists_of(image, request["lists"])
    if request.get("packages"):
        found["packages"] = all_packages(image.root)
    return found
