"""Checks of an image without a plan, whoever built it: what is broken in it, and what a training job finds there.

Faults are results that did not pass. What an image lacks is no fault of it: these are notes.
"""

from __future__ import annotations

import json
import re
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from trainworks.engine.protocol import BuiltImage, Container, Engine
from trainworks.errors import BuildError, EngineError, ImageTestError
from trainworks.imagetest import questions, secrets
from trainworks.imagetest.inside.files import DamagedFile, InstalledFiles
from trainworks.imagetest.results import CheckResult
from trainworks.imagetest.test_promises import damages
from trainworks.plan import checks as kinds
from trainworks.plan.promises import DRIVER_LIBRARIES

OLDEST_PYTHON = (3, 8)
"""The oldest Python that can run the questions."""

ROOTS = ("/usr", "/opt")
"""Where programs and libraries are looked for, besides the folder of the job's Python."""

CHANGED = re.compile(r".*/etc/.*|/(?:var|root|home)/.*|.*\.pyc")
"""Files of packages that are changed as they are used: settings, and what pip compiles."""

OF_LIBRARIES = (
    kinds.SharedLibrariesCheck(component="any", roots=ROOTS, provided=DRIVER_LIBRARIES),
    kinds.DuplicatePackagesCheck(
        component="any", libraries=("libcudart", "libcublas", "libcudnn", "libnccl", "libcusparse", "libcufft")
    ),
    kinds.SearchPathCheck(component="any", variable="PATH"),
    kinds.SearchPathCheck(component="any", variable="LD_LIBRARY_PATH"),
)

AS_DELIVERED = kinds.DeliveredFilesCheck(
    component="any", removed=(), digests=(), copies=(), closed=("/**",), sourced=(), links=(), privileged=()
)

_EXTENSION = re.compile(r"\S+/(?:site|dist)-packages/([A-Za-z_]\w*)/\S+\.so\b.* does not find ")

_LIMIT = 600.0

_FACTS = r"""
say() { printf '%s\t%s\n' "$1" "$2"; }
for each in bash python3 python train torchrun mpirun sshd git gcc; do
  say "$each" "$(command -v "$each")"
done
for each in "$(command -v python3)" "$(command -v python)" /usr/bin/python3 /opt/*/bin/python; do
  [ -x "$each" ] && say runs "$each $("$each" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>&1 | tail -n 1)"
done
say uid "$(id -u)"
[ -w "${HOME:-/}" ] && say home "${HOME:-/}"
[ -d /opt/ml ] && say /opt/ml there
say mpi "$(mpirun --version 2>&1 | head -n 1)"
for each in $(ldconfig -p 2>/dev/null | sed -n 's/^\tlibcuda\.so\.1 .* => //p'); do say cached "$each"; done
for each in $(printf '%s' "$LD_LIBRARY_PATH" | tr ':' ' '); do
  [ -e "$each/libcuda.so.1" ] && say cached "$each/libcuda.so.1"
done
find -L /usr /opt /lib -name '*.so*' -type l 2>/dev/null | while read -r each; do say dangling "$each"; done
find -L $(printf '%s' "$PATH" | tr ':' ' ') -maxdepth 1 -type l 2>/dev/null | while read -r each; do
  say dangling "$each"
done
exit 0
"""

_TORCH = """
import ctypes, json
found = {"nccl": ""}
try:
    import torch
    found.update(torch=torch.__version__, cuda=torch.version.cuda or "")
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
try:
    version = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    found["nccl"] = str(version.value)
except (OSError, AttributeError):
    pass
print()
print(json.dumps(found))
"""


@dataclass(kw_only=True)
class Looked:
    """What was found: faults and what was in order, and what a job does not find."""

    report: Callable[[CheckResult], None]
    results: list[CheckResult] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def say(self, component: str, title: str, problems: list[str], since: float) -> None:
        """Add and report one result; ``problems`` are its lines, none where it is in order."""
        more = [f"... and {len(problems) - secrets.SHOWN} more"] if len(problems) > secrets.SHOWN else []
        result = CheckResult(
            component=component,
            title=title,
            passed=not problems,
            detail="\n".join([*problems[: secrets.SHOWN], *more]),
            seconds=time.monotonic() - since,
        )
        self.results.append(result)
        self.report(result)


def look_at(
    engine: Engine, image: BuiltImage, report: Callable[[CheckResult], None], *, removed: tuple[str, ...] = ()
) -> Looked:
    """Ask an image everything that can be asked without a plan.

    Args:
        engine: The engine that has the image.
        image: The image; it needs ``/bin/sh`` for all but its layers, and Python 3.8 for its files.
        report: Called with each result as soon as it is known.
        removed: Patterns of delivered files that the makers of its base removed or replaced on purpose.

    Raises:
        EngineUnavailableError: The engine is gone.
    """
    looked = Looked(report=report)
    published: list[str] = []
    start = time.monotonic()
    try:
        with engine.container(image.reference) as container:
            published = _ask_inside(container, image, looked, replace(AS_DELIVERED, removed=removed))
    except (BuildError, EngineError, ImageTestError) as error:
        looked.say("start", "the image can be asked", [error.message], start)
    start = time.monotonic()
    found = secrets.scan(engine, image, (), published)
    caches = tuple(each for each in found if each.rule.startswith("package cache"))
    rest = secrets.summary(tuple(each for each in found if each not in caches))
    looked.say("secrets", "no key or credential in any layer", rest.splitlines(), start)
    if caches:
        looked.notes.append(f"{len(caches)} files of package caches are in its layers: they only cost space")
    return looked


def _ask_inside(
    container: Container, image: BuiltImage, looked: Looked, delivered: kinds.DeliveredFilesCheck
) -> list[str]:
    """Ask what a shell and a Python of the image can tell; return its Python distributions."""
    start = time.monotonic()
    facts: dict[str, list[str]] = {}
    for line in container.run(("/bin/sh", "-c", _FACTS), timeout=_LIMIT).output.splitlines():
        name, tab, value = line.partition("\t")
        if tab and value:
            facts.setdefault(name, []).append(value)
    _note_what_a_job_finds(facts, image, looked)
    dangling = sorted({*facts.get("dangling", ())})
    looked.say("links", "no link of a program or library leads nowhere", dangling, start)
    stubs = [each for each in facts.get("cached", ()) if "/stubs/" in each]
    looked.say("links", "no stub of libcuda stands before the driver's", stubs, start)
    pythons = [each.split(" ", 1) for each in facts.get("runs", ())]
    able = [path for path, said in pythons if _version(said) >= OLDEST_PYTHON]
    if not able:
        have = ", ".join(f"{path} is {said}" for path, said in pythons) or "it has none"
        looked.notes.append(f"its files were not looked at: that needs a Python from 3.8 on in the image ({have})")
        return []
    job = next((path for path in able if path in (*facts.get("python3", ()), *facts.get("python", ()))), able[0])
    _ask_torch(container, job, looked)
    start = time.monotonic()
    request = questions.request_of((*OF_LIBRARIES, delivered), image, python=job)
    request["distributions"] = True
    answer = questions.ask(container, request, interpreter=able[0])
    libraries, twice, *paths = answer["problems"]
    libraries = _without_optional(container, job, libraries, looked)
    looked.say("libraries", f"all shared libraries under {', '.join(ROOTS)} find what they need", libraries, start)
    looked.say("libraries", "nothing is installed twice", twice, start)
    # A folder that is not there may be mounted; one that is relative is another one for each program.
    wrong = [line for lines in paths for line in lines if "stray colon" in line or "not absolute" in line]
    looked.say("paths", "PATH and LD_LIBRARY_PATH have absolute folders", wrong, start)
    names, stock = [each["name"] for each in answer["distributions"]], answer["files"]
    title = f"{stock['packages']} system packages and {len(names)} Python distributions are as delivered"
    damaged = [line.replace("component system, ", "") for line in damages(_damaged(stock), ())]
    looked.say("files", title, damaged, start)
    given = [f"{each['path']} has {each['rights']}" for each in stock["privileged"] if not each["package"]]
    looked.say("files", "only packages bring setuid and setgid files", given, start)
    looked.say("files", "what everybody runs, not everybody can change", _changeable(stock), start)
    return names


def _without_optional(container: Container, python: str, problems: list[str], looked: Looked) -> list[str]:
    """Return what is missing but for libraries that only a part of a module needs: it can be imported without them."""
    modules: dict[str, list[str]] = {}
    for line in problems[:-1]:
        match = _EXTENSION.match(line)
        modules.setdefault(match[1] if match else "", []).append(line)
    kept = modules.pop("", [])
    for module, lines in modules.items():
        if container.run((python, "-c", f"import {module}"), timeout=_LIMIT).status == 0:
            more = f", and {len(lines) - 1} more such" if len(lines) > 1 else ""
            looked.notes.append(f"{module} can be imported, but {lines[0]}{more}")
        else:
            kept += lines
    if all(line.startswith("... and ") for line in kept):
        looked.notes += kept
        return []
    return [*kept, *problems[-1:]]


def _ask_torch(container: Container, python: str, looked: Looked) -> None:
    start = time.monotonic()
    done = container.run((python, "-c", _TORCH), timeout=_LIMIT)
    if done.status != 0:
        looked.say("torch", "import torch succeeds", done.output.strip().splitlines()[-5:], start)
        return
    found = json.loads(done.output.splitlines()[-1])
    if "torch" in found:
        cuda = f", CUDA {found['cuda']}" if found["cuda"] else ", without CUDA"
        looked.say("torch", f"import torch succeeds: {found['torch']}{cuda}", [], start)
    else:
        looked.notes.append(f"{python} has no torch")
    if found.get("cuda") and not found["nccl"]:
        looked.notes.append(
            "no libnccl.so.2 is found by its name: plugins and other programs than torch look for it so"
        )


def _note_what_a_job_finds(facts: dict[str, list[str]], image: BuiltImage, looked: Looked) -> None:
    """Add a note for each thing that a way to start training needs, and that the image has not."""
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
    looked.notes += [f"no {name}: {what}" for name, what in needs.items() if name not in facts]
    looked.notes += [f"mpirun is {said}" for said in facts.get("mpi", ()) if "mpirun" in facts]
    if facts.get("uid", ["0"]) != ["0"]:
        looked.notes.append(f"it runs as user {facts['uid'][0]}: files that only root can read were not looked at")
    if "home" not in facts:
        looked.notes.append("its user cannot write into HOME: caches of torch and Hugging Face need a folder")
    if image.entry_point:
        looked.notes.append(f"a program after the image's name is given to {' '.join(image.entry_point)}")
    if ports := image.configuration.get("ExposedPorts"):
        looked.notes.append(f"it exposes {', '.join(sorted(str(each) for each in ports))}")  # type: ignore[attr-defined]


def _version(said: str) -> tuple[int, ...]:
    return tuple(map(int, said.split("."))) if re.fullmatch(r"\d+\.\d+", said) else (0,)


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
    """Return programs, libraries and settings that every user can change, and folders for all without sticky bit."""
    return [
        f"{path} has mode {mode:04o}"
        for path, mode in stock["open"]
        if (path.startswith(("/usr/", "/etc", "/bin", "/sbin", "/lib", "/opt/")) and not path.startswith("/opt/ml/"))
        or (path in ("/tmp", "/var/tmp") and not mode & stat.S_ISVTX)  # noqa: S108 (the image's folders)
    ]
