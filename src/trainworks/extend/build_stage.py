"""Runs a step of an extension in the base image, without secrets and without a network.

``install`` installs the wheels of ``WHEELS`` and compiles the modules that an import of them loads;
the image keeps its lock. ``build ANSWER`` makes a wheel of ``SOURCE``, or writes the requirements
that its build lacks. ``ask ANSWER MODULES`` says why an import fails. ``tools`` installs a
compiler. The program needs only the standard library of Python 3.8.
"""

# ruff: noqa: E402, PTH109
# The oldest interpreter decides.

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from importlib import metadata, util
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, NoReturn

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))

import imports  # type: ignore[import-not-found]

sys.path.remove(str(FOLDER))

INPUTS = Path("/run/inputs")
WHEELS = Path("/run/wheels")
SOURCE = Path("/run/source")
TOOLS = Path("/run/compiler")
LOCK = "extension.lock"
RESULT = Path("/opt/trainworks") / LOCK
"""The lock in the image."""

PINS = "install.txt"
"""A file among the wheels: the version and hash of each."""

_IMPORT_SECONDS = 300
_SHARES = 2
"""Processes that import at the same time, to compile."""

_ELSEWHERE = {"/dev", "/proc", "/run", "/sys"}

_HOOK = """
import importlib, json, sys
backend, paths, answer = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
sys.path[:0] = paths
module, _, name = backend.partition(":")
found = importlib.import_module(module)
for part in filter(None, name.split(".")):
    found = getattr(found, part)
hook = getattr(found, "get_requires_for_build_wheel", None)
requires = list(hook({})) if hook else []
with open(answer, "w") as file:
    json.dump(requires, file)
"""
"""Asks a build backend (PEP 517); run by the Python that has it."""


def main(arguments: Sequence[str]) -> int:
    """Run one of the five commands; return a status."""
    command, *words = arguments
    if command == "import":
        import_and_compile(words)
    with tempfile.TemporaryDirectory() as name:
        uv = Uv(Path(name))
        if command == "build":
            return build(uv, Path(words[0]), Path(name))
        if command == "ask":
            answer = Path(words[0])
            answer.mkdir(parents=True, exist_ok=True)
            (answer / "error").write_text(import_error(words[1:]), encoding="utf-8")
            return 0
        if command == "tools":
            wheels = [str(file) for file in sorted(TOOLS.glob("*.whl"))]
            return uv.install("--no-deps", *wheels)
        started = time.time()
        status = install(uv)
    # uv's folder is removed before: that changes the time of the folder around it.
    if status == 0:
        settle(started)
    return status


def install(uv: Uv) -> int:
    """Install the wheels of an extension, and compile what an import of them loads.

    Return a status.
    """
    before = versions()
    lock = (INPUTS / LOCK).read_text(encoding="utf-8")
    pins = WHEELS / PINS
    if pins.read_text(encoding="utf-8").strip():
        options = ("--no-deps", "--no-build", "--require-hashes", "--find-links", str(WHEELS))
        status = uv.install(*options, "-r", str(pins))
        if status:
            return status
    new = {name for name, version in versions().items() if before.get(name) != version}
    # Code of the user's own is not imported: that may start a training.
    compile_imports(new.difference(data_of(lock)["local"]))
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(lock, encoding="utf-8")
    return 0


class Uv:
    """uv without indexes and without this machine's settings."""

    def __init__(self, folder: Path) -> None:
        """folder: a private one, for its cache."""
        folders = (str(Path(sys.executable).parent), os.environ.get("PATH", ""), str(FOLDER))
        self._program = shutil.which("uv", path=os.pathsep.join(folders)) or "uv"
        self._environment = {
            **os.environ,
            "UV_CACHE_DIR": str(folder / "cache"),
            "UV_CONSTRAINT": "",  # a base's: all packages are pinned already
            "UV_NO_CONFIG": "1",
            "UV_NO_INSTALLER_METADATA": "1",
            "UV_NO_PROGRESS": "1",
            "UV_OFFLINE": "1",
            "UV_PYTHON_DOWNLOADS": "never",
        }

    def call(self, *words: str, **variables: str) -> int:
        """Call uv with more variables, and return its status."""
        environment = {**self._environment, **variables}
        return subprocess.run((self._program, *words), env=environment, check=False).returncode

    def install(self, *words: str, python: str = sys.executable) -> int:
        """Install for a Python, and return the status."""
        return self.call("pip", "install", "--python", python, "--no-index", *words)


def data_of(text: str) -> dict[str, Any]:
    """Return the data in the first line of a lock."""
    first_line = text.partition("\n")[0]
    return dict(json.loads(first_line[len("# data: ") :]))


def versions() -> dict[str, str]:
    """Return the versions of this Python's distributions, by name.

    Of two distributions of one name, the first is imported.
    """
    version_by_name: dict[str, str] = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            name = re.sub(r"[-_.]+", "-", name).lower()
            version_by_name.setdefault(name, distribution.version)
    return version_by_name


def build(uv: Uv, answer: Path, folder: Path) -> int:
    """Make a wheel; or write the requirements of its backend that are missing.

    Return a status.
    """
    order = json.loads((SOURCE / "order.json").read_text(encoding="utf-8"))
    answer.mkdir(parents=True, exist_ok=True)
    with tarfile.open(SOURCE / "source.tar") as archive:
        archive.extractall(folder)  # the step is thrown away
    project = folder / "source" / order["subdirectory"]
    words = ["build", "--wheel", "--no-build-isolation", "--out-dir", str(answer), str(project)]
    links = ("--find-links", "/run/links")
    if order["whole"]:
        if order["requires"]:
            status = uv.install(*links, *order["requires"])
            if status:
                return status
        return uv.call(*words, "--python", sys.executable, **order["environment"])

    home = folder / "environment"
    python = str(home / "bin" / "python")
    status = uv.call("venv", "--quiet", "--python", sys.executable, str(home))
    if status == 0 and order["requires"]:
        status = uv.install(*links, *order["requires"], python=python)
    if status:
        return status
    variables = dict(order["environment"])
    variables["PATH"] = "{}:{}".format(home / "bin", os.environ.get("PATH", ""))
    requirements_file = folder / "asked.json"
    backend_path = json.dumps([str(project / path) for path in order["backend_path"]])
    hook = (python, "-I", "-c", _HOOK, order["backend"], backend_path, str(requirements_file))
    environment = {**os.environ, **variables}
    result = subprocess.run(hook, cwd=project, env=environment, check=False)
    if result.returncode:
        return result.returncode

    more = [str(line) for line in json.loads(requirements_file.read_text(encoding="utf-8"))]
    if more and uv.install(*links, *more, python=python):
        # They are not among the wheels: the builder fetches them and builds again.
        (answer / "asked.json").write_text(json.dumps(more), encoding="utf-8")
        return 0
    return uv.call(*words, "--python", python, **variables)


def elsewhere(home: str) -> Mapping[str, str]:
    """Return an environment for imports, in which packages write their settings to a folder."""
    return {**os.environ, "HOME": home, "XDG_CACHE_HOME": home, "MPLCONFIGDIR": home}


def import_error(modules: Sequence[str]) -> str:
    """Import modules in a Python of their own; return the last line of an error, or ``""``.

    A Python that a signal ended has its signal in the line, because the last line of its output may
    be a mere warning.
    """
    command = (sys.executable, "-I", "-B", "-c", "import " + ", ".join(modules))
    try:
        with tempfile.TemporaryDirectory() as home:
            result = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_IMPORT_SECONDS,
                env=elsewhere(home),
                check=False,
            )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    if result.returncode == 0:
        return ""
    lines = result.stderr.decode("utf-8", "replace").splitlines()
    printed = [line.strip() for line in lines if line.strip()]
    if result.returncode < 0:
        name = signal.Signals(-result.returncode).name
        return ": ".join([f"import ended by {name}", *printed[-1:]])
    if not printed:
        return f"import ended with status {result.returncode}"
    return printed[-1]


def compile_imports(names: Collection[str]) -> None:
    """Compile the modules that an import of distributions loads."""
    # Packages write their settings when they are first imported: into this folder.
    with tempfile.TemporaryDirectory() as home:
        environment = {**elsewhere(home), "PYTHONHASHSEED": "0"}
        # The number of processes is fixed: a module that one import loads may depend on the
        # imports before it.
        shares = [sorted(names)[number::_SHARES] for number in range(_SHARES)]
        processes = []
        for share in shares:
            if share:
                process = subprocess.Popen(
                    (sys.executable, __file__, "import", *share),
                    env=environment,
                    cwd=home,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
                processes.append(process)
        for process in processes:
            process.wait()


def import_and_compile(names: Sequence[str]) -> NoReturn:
    """Import distributions, and end.

    Their bytecode is valid by the source's hash, because the engine sets the times of files.
    """
    sources = set()
    for name in names:
        distribution = metadata.distribution(name)
        for file in distribution.files or ():
            if file.suffix == ".py":
                sources.add(str(distribution.locate_file(file)))

    def keep(loader: Any, source: str, target: str, content: bytes) -> None:
        if source in sources:
            source_hash = util.source_hash(loader.get_data(source))
            head = util.MAGIC_NUMBER + b"\3\0\0\0" + source_hash
            loader.set_data(target, head + content[16:])

    SourceFileLoader._cache_bytecode = keep  # type: ignore[attr-defined]  # noqa: SLF001
    sys.dont_write_bytecode = False
    own_folders = ("", os.getcwd(), str(FOLDER))
    sys.path[:] = [folder for folder in sys.path if folder not in own_folders]
    for name in names:
        signal.alarm(int(imports.SECONDS))  # an import that does not end ends the process
        imports.failure_of(name)
    os._exit(0)  # without the packages' own work at the end of a process


def settle(started: float) -> None:
    """Remove uv's own files, and give one time to all changed files: same files, same layer."""
    Path(sys.prefix, ".lock").unlink(missing_ok=True)
    moment = int(os.environ["SOURCE_DATE_EPOCH"])
    started -= 0.1  # the kernel's clock for files is some milliseconds late
    pending = ["/"]
    while pending:
        folder = pending.pop()
        try:
            entries = list(os.scandir(folder))
            _give_time(folder, os.lstat(folder), started, moment)
        except OSError:  # a mount of the engine's
            continue
        for entry in entries:
            try:
                status = entry.stat(follow_symlinks=False)
                if not stat.S_ISDIR(status.st_mode):
                    _give_time(entry.path, status, started, moment)
                elif entry.path not in _ELSEWHERE:
                    pending.append(entry.path)
            except OSError:
                continue


def _give_time(path: str, status: os.stat_result, started: float, moment: int) -> None:
    """Set the time of a file that has changed since a moment."""
    if status.st_ctime >= started:
        os.utime(path, (moment, moment), follow_symlinks=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
