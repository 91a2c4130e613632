"""Checks of an image without a plan, also of another maker: what is broken in it, and what a
training job finds there.

Faults are results that did not pass. What an image lacks is no fault of it: these are notes.
"""

from __future__ import annotations

import re
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypedDict

from trainworks.engine.protocol import BuiltImage, Container, Engine
from trainworks.engine.tree import read_tree
from trainworks.errors import BuildError, EngineError, ImageTestError
from trainworks.imagetest import probe_request, secrets
from trainworks.imagetest.inside.files import DamagedFile, InstalledFiles
from trainworks.imagetest.job_files import READ, JobFiles
from trainworks.imagetest.results import CheckResult, one_line
from trainworks.imagetest.test_promises import damages
from trainworks.plan import checks as kinds
from trainworks.plan.declared_checks import DRIVER_LIBRARIES

OLDEST_PYTHON = (3, 8)
"""The oldest Python that can run the questions."""

ROOTS = ("/usr", "/opt")
"""Where programs and libraries are looked for, besides the folder of the job's Python."""

CHANGED = re.compile(r".*/etc/.*|/(?:var|root|home)/.*|.*\.pyc")
"""Files of packages that are changed as they are used: settings, and what pip compiles."""

OF_LIBRARIES = (
    kinds.SharedLibrariesCheck(component="any", roots=ROOTS, provided=DRIVER_LIBRARIES),
    kinds.DuplicatePackagesCheck(
        component="any",
        libraries=("libcudart", "libcublas", "libcudnn", "libnccl", "libcusparse", "libcufft"),
    ),
    kinds.SearchPathCheck(component="any", variable="PATH"),
    kinds.SearchPathCheck(component="any", variable="LD_LIBRARY_PATH"),
)

AS_DELIVERED = kinds.DeliveredFilesCheck(
    component="any",
    removed=(),
    digests=(),
    copies=(),
    closed=("/**",),
    sourced=(),
    links=(),
    privileged=(),
)

_EXTENSION = re.compile(r"\S+/(?:site|dist)-packages/([A-Za-z_]\w*)/\S+\.so\b.* does not find ")

_LIMIT = 600.0

_LAST_LINES = 5
"""Lines of a traceback that a result has."""

_SHOWN = 200
"""Characters of what a program says of itself."""


@dataclass(kw_only=True)
class Looked:
    """What was found: faults and what was in order, and what a job does not find."""

    report: Callable[[CheckResult], None]
    results: list[CheckResult] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def say(self, component: str, title: str, problems: list[str], since: float) -> None:
        """Add and report one result; ``problems`` are its lines, none where it is in order."""
        more = (
            [f"... and {len(problems) - secrets.SHOWN} more"]
            if len(problems) > secrets.SHOWN
            else []
        )
        result = CheckResult(
            component=component,
            title=title,
            passed=not problems,
            detail="\n".join([*map(one_line, problems[: secrets.SHOWN]), *more]),
            seconds=time.monotonic() - since,
        )
        self.results.append(result)
        self.report(result)


def look_at(
    engine: Engine,
    image: BuiltImage,
    report: Callable[[CheckResult], None],
    *,
    removed: tuple[str, ...] = (),
) -> Looked:
    """Ask an image everything that can be asked without a plan.

    What its files say is read from its layers. Its programs run isolated; where
    the engine cannot isolate, none runs.

    Args:
        engine: The engine that has the image.
        image: The image; it needs ``/bin/sh`` and Python 3.8 for all but what its layers say.
        report: Called with each result as soon as it is known.
        removed: Patterns of delivered files that the makers of its base removed
            or replaced on purpose.

    Raises:
        EngineUnavailableError: The engine is gone.
    """
    looked = Looked(report=report)
    published: list[str] = []
    start = time.monotonic()
    try:
        files = JobFiles(tree=read_tree(engine, image.reference, READ), image=image)
        _say_what_files_tell(files, looked, start)
        words = engine.isolates()
        if words:
            looked.notes.append(
                "no program of it was run, only its files were read:"
                f" {engine.name} cannot isolate: {words}"
            )
        else:
            start = time.monotonic()
            with engine.container(image.reference, isolated="asked") as container:
                published = _ask_inside(
                    container, files, looked, replace(AS_DELIVERED, removed=removed)
                )
    except (BuildError, EngineError, ImageTestError) as error:
        looked.say("start", "the image can be asked", error.message.splitlines(), start)
    start = time.monotonic()
    found = secrets.scan(engine, image, (), published)
    caches = tuple(each for each in found if each.rule.startswith("package cache"))
    rest = secrets.summary(tuple(each for each in found if each not in caches))
    looked.say("secrets", "no key or credential in any layer", rest.splitlines(), start)
    if caches:
        looked.notes.append(
            f"{len(caches)} files of package caches are in its layers: they only cost space"
        )
    return looked


def _say_what_files_tell(files: JobFiles, looked: Looked, start: float) -> None:
    _note_what_a_job_finds(files, looked)
    looked.say("links", "no link of a program or library leads nowhere", files.dangling(), start)
    looked.say("links", "no stub of libcuda stands before the driver's", files.stubs(), start)


def _ask_inside(
    container: Container, files: JobFiles, looked: Looked, delivered: kinds.DeliveredFilesCheck
) -> list[str]:
    """Ask what a Python of the image can tell; return its Python distributions."""
    start = time.monotonic()
    if files.program("mpirun"):
        said = container.run(("mpirun", "--version"), timeout=_LIMIT)
        looked.notes.append(f"mpirun is {said.output.strip().partition(chr(10))[0][:_SHOWN]}")
    able, others = [], []
    for path in files.pythons():
        version = _version_of(container, path)
        if version >= OLDEST_PYTHON:
            able.append(path)
        else:
            others.append(f"{path} is {'.'.join(map(str, version)) or 'silent'}")
    if not able:
        have = ", ".join(others) or "it has none"
        looked.notes.append(
            f"its files were not looked at: that needs a Python from 3.8 on in the image ({have})"
        )
        return []
    named = (files.program("python3"), files.program("python"))
    job = next((path for path in able if path in named), able[0])
    _ask_torch(container, job, looked)
    start = time.monotonic()
    request = probe_request.request_of((*OF_LIBRARIES, delivered), files.image, python=job)
    request["distributions"] = True
    answer = probe_request.ask(container, request, interpreter=able[0])
    libraries, twice, *paths = answer["problems"]
    libraries = _without_optional(container, job, libraries, looked)
    looked.say(
        "libraries",
        f"all shared libraries under {', '.join(ROOTS)} find what they need",
        libraries,
        start,
    )
    looked.say("libraries", "nothing is installed twice", twice, start)
    # A folder that is not there may be mounted; one that is relative is another
    # one for each program.
    wrong = [
        line for lines in paths for line in lines if "stray colon" in line or "not absolute" in line
    ]
    looked.say("paths", "PATH and LD_LIBRARY_PATH have absolute folders", wrong, start)
    names, stock = [each["name"] for each in answer["distributions"]], answer["files"]
    title = (
        f"{stock['packages']} system packages and"
        f" {len(names)} Python distributions are as delivered"
    )
    damaged = [line.replace("component system, ", "") for line in damages(_damaged(stock), ())]
    looked.say("files", title, damaged, start)
    given = [
        f"{each['path']} has {each['rights']}"
        for each in stock["privileged"]
        if not each["package"]
    ]
    looked.say("files", "only packages bring setuid and setgid files", given, start)
    looked.say("files", "what everybody runs, not everybody can change", _changeable(stock), start)
    return names


def _without_optional(
    container: Container, python: str, problems: list[str], looked: Looked
) -> list[str]:
    """Return what is missing but for libraries that only a part of a module needs: it can be
    imported without them.
    """
    modules: dict[str, list[str]] = {}
    for line in problems[:-1]:
        match = _EXTENSION.match(line)
        modules.setdefault(match[1] if match else "", []).append(line)
    kept = modules.pop("", [])
    for module, lines in modules.items():
        if probe_request.can_import(container, python, module, timeout=_LIMIT):
            kept += lines
        else:
            more = f", and {len(lines) - 1} more such" if len(lines) > 1 else ""
            looked.notes.append(f"{module} can be imported, but {lines[0]}{more}")
    if all(line.startswith("... and ") for line in kept):
        looked.notes += kept
        return []
    return [*kept, *problems[-1:]]


class Frameworks(TypedDict):
    """What ``inside.frameworks`` answers."""

    version: list[int]
    torch: str
    cuda: str
    nccl: bool
    error: str


def _frameworks(container: Container, python: str, *, torch: bool) -> Frameworks:
    program, request = ("inside.frameworks",), {"torch": torch}
    return probe_request.ask_program(
        container, (python,), program, request, Frameworks, timeout=_LIMIT
    )


def _version_of(container: Container, python: str) -> tuple[int, ...]:
    """Return the version of a Python; ``()`` of one that does not answer."""
    try:
        return tuple(_frameworks(container, python, torch=False)["version"])
    except ImageTestError:
        return ()


def _ask_torch(container: Container, python: str, looked: Looked) -> None:
    start = time.monotonic()
    try:
        found = _frameworks(container, python, torch=True)
    except ImageTestError as error:
        looked.say(
            "torch", "import torch succeeds", error.message.splitlines()[-_LAST_LINES:], start
        )
        return
    if found["error"]:
        lines = found["error"].strip().splitlines()
        looked.say("torch", "import torch succeeds", lines[-_LAST_LINES:], start)
    elif found["torch"]:
        cuda = f", CUDA {found['cuda']}" if found["cuda"] else ", without CUDA"
        looked.say("torch", f"import torch succeeds: {found['torch']}{cuda}", [], start)
    else:
        looked.notes.append(f"{python} has no torch")
    if found["cuda"] and not found["nccl"]:
        looked.notes.append(
            "no libnccl.so.2 is found by its name:"
            " plugins and other programs than torch look for it so"
        )


def _note_what_a_job_finds(files: JobFiles, looked: Looked) -> None:
    """Add a note for each thing that a way to start training needs, and that the image has not."""
    image = files.image
    needs = {
        "bash": "job scripts of Slurm and `bash -c` of Kubernetes",
        "python3": "nothing can be trained",
        "train": "SageMaker runs `train`, or an ENTRYPOINT that understands it",
        "torchrun": "torch's launcher",
        "mpirun": "jobs with MPI",
        "sshd": "mpirun between containers, where no launcher starts its daemons",
        "gcc": "torch.compile on CPUs, and packages that are compiled",
        "git": "requirements from repositories",
        "/opt/ml": "SageMaker mounts it; elsewhere scripts that write there fail",
    }
    there = {name for name in needs if not name.startswith("/") and files.program(name)}
    if files.tree.kind("/opt/ml"):
        there.add("/opt/ml")
    looked.notes += [f"no {name}: {what}" for name, what in needs.items() if name not in there]
    if files.user != "0":
        looked.notes.append(
            f"it runs as user {files.user}: files that only root can read were not looked at"
        )
    if not files.home_is_writable():
        looked.notes.append(
            "its user cannot write into HOME: caches of torch and Hugging Face need a folder"
        )
    if image.entry_point:
        looked.notes.append(
            f"a program after the image's name is given to {' '.join(image.entry_point)}"
        )
    if ports := image.configuration.get("ExposedPorts"):
        looked.notes.append(f"it exposes {', '.join(sorted(str(each) for each in ports))}")  # type: ignore[attr-defined]


def _damaged(stock: InstalledFiles) -> list[DamagedFile]:
    return [
        each
        for each in stock["damaged"]
        if each["owner"]
        and not CHANGED.fullmatch(each["path"])
        and not each["problem"].startswith(("belongs to", "has mode", "cannot be read"))
        and "which is of the package" not in each["problem"]
        and not each["path"].endswith(".md5sums")
    ]


def _changeable(stock: InstalledFiles) -> list[str]:
    """Return programs, libraries and settings that every user can change, and
    folders for all without sticky bit.
    """
    return [
        f"{path} has mode {mode:04o}"
        for path, mode in stock["open"]
        if (
            path.startswith(("/usr/", "/etc", "/bin", "/sbin", "/lib", "/opt/"))
            and not path.startswith("/opt/ml/")
        )
        or (path in ("/tmp", "/var/tmp") and not mode & stat.S_ISVTX)  # noqa: S108 (the image's folders)
    ]
