"""Checks of an image without a plan, also of another maker's image.

A fault is a result that has not passed. A program that the image lacks is not a fault, but a note.
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
from trainworks.imagetest.job_files import READ, JobFiles
from trainworks.imagetest.probe.files import DamagedFile, InstalledFiles
from trainworks.imagetest.results import CheckResult, one_line
from trainworks.imagetest.test_promises import damages
from trainworks.plan import checks as kinds
from trainworks.plan.declared_checks import DRIVER_LIBRARIES

OLDEST_PYTHON = (3, 8)
"""The oldest Python that can run the probe."""

ROOTS = ("/usr", "/opt")
"""Folders with programs and libraries, besides that of the job's Python."""

CHANGED = re.compile(r".*/etc/.*|/(?:var|root|home)/.*|.*\.pyc")
"""Files of packages that change in use: settings, and the bytecode of pip."""

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
"""Lines of a traceback in a result."""

_SHOWN = 200
"""Characters of a program's version in a note."""


@dataclass(kw_only=True)
class ImageReport:
    """The results of all checks, and notes about programs that the image lacks."""

    report: Callable[[CheckResult], None]
    results: list[CheckResult] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, component: str, title: str, problems: list[str], since: float) -> None:
        """Add and report one result; it has passed if there are no problems."""
        lines = [one_line(problem) for problem in problems[: secrets.MOST_FINDINGS]]
        if len(problems) > secrets.MOST_FINDINGS:
            lines.append(f"... and {len(problems) - secrets.MOST_FINDINGS} more")
        result = CheckResult(
            component=component,
            title=title,
            passed=not problems,
            detail="\n".join(lines),
            seconds=time.monotonic() - since,
        )
        self.results.append(result)
        self.report(result)


def check_any_image(
    engine: Engine,
    image: BuiltImage,
    report: Callable[[CheckResult], None],
    *,
    removed: tuple[str, ...] = (),
) -> ImageReport:
    """Run the checks of an image that need no plan.

    The layers of the image are read. Its programs run isolated; where the engine cannot isolate,
    no program runs.

    Args:
        engine: The engine that has the image.
        image: The image; checks that run a program need ``/bin/sh`` and Python 3.8 in it.
        report: Receives each result at once.
        removed: Patterns of delivered files that the makers of the base image removed
            or replaced on purpose.

    Raises:
        EngineUnavailableError: The engine is gone.
    """
    outcome = ImageReport(report=report)
    published: list[str] = []
    start = time.monotonic()
    try:
        files = JobFiles(tree=read_tree(engine, image.reference, READ), image=image)
        _check_files(files, outcome, start)
        missing_isolation = engine.isolates()
        if missing_isolation:
            outcome.notes.append(
                "none of its programs was run, only its files were read:"
                f" {engine.name} cannot isolate: {missing_isolation}"
            )
        else:
            start = time.monotonic()
            delivered = replace(AS_DELIVERED, removed=removed)
            with engine.container(image.reference, isolated="asked") as container:
                published = _check_with_python(container, files, outcome, delivered)
    except (BuildError, EngineError, ImageTestError) as error:
        outcome.add("start", "the image can be asked", error.message.splitlines(), start)

    start = time.monotonic()
    caches = []
    findings = []
    for finding in secrets.scan(engine, image, (), published):
        if finding.rule.startswith("package cache"):
            caches.append(finding)
        else:
            findings.append(finding)
    lines = secrets.summary(tuple(findings)).splitlines()
    outcome.add("secrets", "no key or credential in any layer", lines, start)
    if caches:
        outcome.notes.append(
            f"{len(caches)} files of package caches are in its layers: they only cost space"
        )
    return outcome


def _check_files(files: JobFiles, outcome: ImageReport, start: float) -> None:
    _note_missing_programs(files, outcome)
    outcome.add(
        "links", "links of programs and libraries have their targets", files.dangling(), start
    )
    outcome.add("links", "no stub of libcuda stands before the driver's", files.stubs(), start)


def _check_with_python(
    container: Container,
    files: JobFiles,
    outcome: ImageReport,
    delivered: kinds.DeliveredFilesCheck,
) -> list[str]:
    """Run the checks that need a Python of the image; return its Python distributions."""
    if files.program("mpirun"):
        completed = container.run(("mpirun", "--version"), timeout=_LIMIT)
        first_line = completed.output.strip().partition("\n")[0]
        outcome.notes.append(f"mpirun is {first_line[:_SHOWN]}")
    pythons = _usable_pythons(container, files, outcome)
    if not pythons:
        return []
    job_programs = (files.program("python3"), files.program("python"))
    job_pythons = [path for path in pythons if path in job_programs]
    python = job_pythons[0] if job_pythons else pythons[0]
    _check_torch(container, python, outcome)

    start = time.monotonic()
    request = probe_request.request_of((*OF_LIBRARIES, delivered), files.image, python=python)
    request["distributions"] = True
    answer = probe_request.ask(container, request, interpreter=pythons[0])
    libraries, duplicates, *paths = answer["problems"]
    libraries = _without_optional(container, python, libraries, outcome)
    title = f"all shared libraries under {', '.join(ROOTS)} find what they need"
    outcome.add("libraries", title, libraries, start)
    outcome.add("libraries", "nothing is installed twice", duplicates, start)
    # A folder that is missing may be mounted; a relative one is another one for each program.
    path_problems = []
    for lines in paths:
        path_problems += [line for line in lines if "stray colon" in line or "not absolute" in line]
    outcome.add("paths", "PATH and LD_LIBRARY_PATH have absolute folders", path_problems, start)

    names = [row["name"] for row in answer["distributions"]]
    stock = answer["files"]
    title = (
        f"{stock['packages']} system packages and"
        f" {len(names)} Python distributions are as delivered"
    )
    lines = damages(_damaged(stock), ())
    damaged = [line.replace("component system, ", "") for line in lines]
    outcome.add("files", title, damaged, start)
    privileged = [
        f"{row['path']} has {row['rights']}" for row in stock["privileged"] if not row["package"]
    ]
    outcome.add("files", "only packages bring setuid and setgid files", privileged, start)
    outcome.add("files", "what everybody runs, not everybody can change", _changeable(stock), start)
    return names


def _usable_pythons(container: Container, files: JobFiles, outcome: ImageReport) -> list[str]:
    """Return the Pythons that can run the checks; add a note if there is none."""
    usable, unusable = [], []
    for path in files.pythons():
        version = _version_of(container, path)
        if version >= OLDEST_PYTHON:
            usable.append(path)
        else:
            text = ".".join(str(part) for part in version)
            unusable.append(f"{path} is {text or 'silent'}")
    if not usable:
        reason = ", ".join(unusable) or "it has none"
        outcome.notes.append(
            f"its files were not looked at: that needs a Python from 3.8 on in the image ({reason})"
        )
    return usable


def _without_optional(
    container: Container, python: str, problems: list[str], outcome: ImageReport
) -> list[str]:
    """Return problems without those of optional parts of modules: the module can be imported."""
    lines_by_module: dict[str, list[str]] = {}
    for line in problems[:-1]:
        match = _EXTENSION.match(line)
        module = match[1] if match else ""
        lines_by_module.setdefault(module, []).append(line)
    needed = lines_by_module.pop("", [])
    for module, lines in lines_by_module.items():
        if probe_request.can_import(container, python, module, timeout=_LIMIT):
            needed += lines
        else:
            more = f", and {len(lines) - 1} more such" if len(lines) > 1 else ""
            outcome.notes.append(f"{module} can be imported, but {lines[0]}{more}")
    if all(line.startswith("... and ") for line in needed):
        outcome.notes += needed
        return []
    advice = problems[-1:]
    return [*needed, *advice]


class Frameworks(TypedDict):
    """The answer of ``probe.frameworks``."""

    version: list[int]
    torch: str
    cuda: str
    nccl: bool
    error: str


FRAMEWORKS = probe_request.ProbeProgram(modules=("probe.frameworks",), shape=Frameworks)
"""The program that reads the versions of Python and of its frameworks."""


def _frameworks(container: Container, python: str, *, torch: bool) -> Frameworks:
    request = {"torch": torch}
    return probe_request.ask_program(container, (python,), FRAMEWORKS, request, timeout=_LIMIT)


def _version_of(container: Container, python: str) -> tuple[int, ...]:
    """Return the version of a Python; ``()`` if the Python does not answer."""
    try:
        return tuple(_frameworks(container, python, torch=False)["version"])
    except ImageTestError:
        return ()


def _check_torch(container: Container, python: str, outcome: ImageReport) -> None:
    """Check that torch can be imported, if the image has it, and note a missing NCCL."""
    start = time.monotonic()
    title = "import torch succeeds"
    try:
        frameworks = _frameworks(container, python, torch=True)
    except ImageTestError as error:
        outcome.add("torch", title, error.message.splitlines()[-_LAST_LINES:], start)
        return
    cuda = frameworks["cuda"]
    if frameworks["error"]:
        lines = frameworks["error"].strip().splitlines()
        outcome.add("torch", title, lines[-_LAST_LINES:], start)
    elif frameworks["torch"]:
        build = f", CUDA {cuda}" if cuda else ", without CUDA"
        outcome.add("torch", f"{title}: {frameworks['torch']}{build}", [], start)
    else:
        outcome.notes.append(f"{python} has no torch")
    if cuda and not frameworks["nccl"]:
        outcome.notes.append(
            "no libnccl.so.2 is found by its name:"
            " plugins and other programs than torch look for it so"
        )


def _note_missing_programs(files: JobFiles, outcome: ImageReport) -> None:
    """Add a note for each program or folder that a way to start training needs and lacks."""
    image = files.image
    uses = {
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
    for name, use in uses.items():
        is_there = files.tree.kind(name) if name.startswith("/") else files.program(name)
        if not is_there:
            outcome.notes.append(f"no {name}: {use}")
    if files.user != "0":
        outcome.notes.append(
            f"it runs as user {files.user}: files that only root can read were not looked at"
        )
    if not files.home_is_writable():
        outcome.notes.append(
            "its user cannot write into HOME: caches of torch and Hugging Face need a folder"
        )
    if image.entry_point:
        outcome.notes.append(
            f"a program after the image's name is given to {' '.join(image.entry_point)}"
        )
    ports = image.configuration.get("ExposedPorts")
    if ports:
        names = sorted(str(port) for port in ports)  # type: ignore[attr-defined]
        outcome.notes.append(f"it exposes {', '.join(names)}")


def _damaged(stock: InstalledFiles) -> list[DamagedFile]:
    """Return the damaged files that are a fault of any image.

    Modes and owners are left out: another maker may have set them on purpose.
    """
    rows = []
    for row in stock["damaged"]:
        path, problem = row["path"], row["problem"]
        is_used_file = CHANGED.fullmatch(path) or path.endswith(".md5sums")
        is_right = problem.startswith(("belongs to", "has mode", "cannot be read"))
        is_other_link = "which is of the package" in problem
        if row["owner"] and not is_used_file and not is_right and not is_other_link:
            rows.append(row)
    return rows


def _changeable(stock: InstalledFiles) -> list[str]:
    """Return programs, libraries and settings that every user can change.

    And folders for temporary files without the sticky bit.
    """
    system_folders = ("/usr/", "/etc", "/bin", "/sbin", "/lib", "/opt/")
    lines = []
    for path, mode in stock["open"]:
        is_of_system = path.startswith(system_folders) and not path.startswith("/opt/ml/")
        is_temporary = path in ("/tmp", "/var/tmp")  # noqa: S108 (the image's folders)
        if is_of_system or (is_temporary and not mode & stat.S_ISVTX):
            lines.append(f"{path} has mode {mode:04o}")
    return lines
