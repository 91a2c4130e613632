"""What a step of an extension does in the base image, without secrets and without a network.

``install`` installs the wheels of ``WHEELS`` and compiles what an import of them loads; the image
keeps its lock. ``build ANSWER`` makes a wheel of ``SOURCE``, or says what its build requires
beside. ``ask ANSWER MODULES`` says why an import fails. ``tools`` installs a compiler. It has only
the standard library, and syntax of Python 3.8.
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

INPUTS, WHEELS, SOURCE, TOOLS = map(
    Path, ("/run/inputs", "/run/wheels", "/run/source", "/run/compiler")
)
LOCK = "extension.lock"
RESULT = Path("/opt/trainworks") / LOCK
"""Stays in the image: from what it was made."""

PINS = "install.txt"
"""Among the wheels: each with its version and hash."""

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
    """Do one of the five; return a status."""
    what, *words = arguments
    if what == "import":
        import_and_compile(words)
    with tempfile.TemporaryDirectory() as name:
        uv = Uv(Path(name))
        if what == "build":
            return build(uv, Path(words[0]), Path(name))
        if what == "ask":
            Path(words[0]).mkdir(parents=True, exist_ok=True)
            Path(words[0], "error").write_text(import_error(words[1:]), encoding="utf-8")
            return 0
        if what == "tools":
            return uv.install("--no-deps", *(str(file) for file in sorted(TOOLS.glob("*.whl"))))
        started, before = time.time(), versions()
        lock = (INPUTS / LOCK).read_text(encoding="utf-8")
        pins = WHEELS / PINS
        words = [
            "--no-deps",
            "--no-build",
            "--require-hashes",
            "--find-links",
            str(WHEELS),
            "-r",
            str(pins),
        ]
        status = uv.install(*words) if pins.read_text(encoding="utf-8").strip() else 0
        if status:
            return status
        new = {name for name, version in versions().items() if before.get(name) != version}
        # Not code of the user's own: its import may start a training.
        compile_imports(new.difference(data_of(lock)["local"]))
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(lock, encoding="utf-8")
    settle(started)
    return 0


class Uv:
    """uv, that may use what lies here and nothing else."""

    def __init__(self, folder: Path) -> None:
        """folder: a private one, for its cache."""
        places = (str(Path(sys.executable).parent), os.environ.get("PATH", ""), str(FOLDER))
        self._program = shutil.which("uv", path=os.pathsep.join(places)) or "uv"
        self._environment = {
            **os.environ,
            "UV_CACHE_DIR": str(folder / "cache"),
            "UV_CONSTRAINT": "",  # a base's: all that is installed is pinned already
            "UV_NO_CONFIG": "1",
            "UV_NO_INSTALLER_METADATA": "1",
            "UV_NO_PROGRESS": "1",
            "UV_OFFLINE": "1",
            "UV_PYTHON_DOWNLOADS": "never",
        }

    def call(self, *words: str, **more: str) -> int:
        """Call it with these variables, and return its status."""
        return subprocess.run(
            (self._program, *words), env={**self._environment, **more}, check=False
        ).returncode

    def install(self, *words: str, python: str = sys.executable) -> int:
        """Install for a Python, and return the status."""
        return self.call("pip", "install", "--python", python, "--no-index", *words)


def data_of(text: str) -> dict[str, Any]:
    """Return what the first line of a lock says."""
    return dict(json.loads(text.partition("\n")[0][len("# data: ") :]))


def versions() -> dict[str, str]:
    """Return the versions of what this Python has, by name.

    Of two of one name the first is imported.
    """
    found: dict[str, str] = {}
    for each in metadata.distributions():
        if each.metadata["Name"]:
            found.setdefault(re.sub(r"[-_.]+", "-", each.metadata["Name"]).lower(), each.version)
    return found


def build(uv: Uv, answer: Path, folder: Path) -> int:
    """Make a wheel; or write which requirements its backend has that are not there.

    Return a status.
    """
    order = json.loads((SOURCE / "order.json").read_text(encoding="utf-8"))
    answer.mkdir(parents=True, exist_ok=True)
    with tarfile.open(SOURCE / "source.tar") as archive:
        archive.extractall(folder)  # the step is thrown away
    project = folder / "source" / order["subdirectory"]
    words = ["build", "--wheel", "--no-build-isolation", "--out-dir", str(answer), str(project)]
    variables = order["environment"]
    links = ("--find-links", "/run/links")
    if order["whole"]:
        status = uv.install(*links, *order["requires"]) if order["requires"] else 0
        return status or uv.call(*words, "--python", sys.executable, **variables)
    home = folder / "environment"
    python = str(home / "bin" / "python")
    status = uv.call("venv", "--quiet", "--python", sys.executable, str(home))
    if status == 0 and order["requires"]:
        status = uv.install(*links, *order["requires"], python=python)
    if status:
        return status
    asked = folder / "asked.json"
    paths = json.dumps([str(project / each) for each in order["backend_path"]])
    hook = (python, "-I", "-c", _HOOK, order["backend"], paths, str(asked))
    variables["PATH"] = "{}:{}".format(home / "bin", os.environ.get("PATH", ""))
    done = subprocess.run(hook, cwd=project, env={**os.environ, **variables}, check=False)
    if done.returncode:
        return done.returncode
    more = [str(each) for each in json.loads(asked.read_text(encoding="utf-8"))]
    if more and uv.install(*links, *more, python=python):
        (answer / "asked.json").write_text(json.dumps(more), encoding="utf-8")
        return 0
    return uv.call(*words, "--python", python, **variables)


def elsewhere(home: str) -> Mapping[str, str]:
    """Return an environment for imports: what packages write when they are
    first imported goes to this folder.
    """
    return {**os.environ, "HOME": home, "XDG_CACHE_HOME": home, "MPLCONFIGDIR": home}


def import_error(modules: Sequence[str]) -> str:
    """Import modules as a script would, and return the last words of it; ``""`` for success."""
    words = (sys.executable, "-I", "-B", "-c", "import " + ", ".join(modules))
    try:
        with tempfile.TemporaryDirectory() as home:
            own: Any = {
                "stdin": subprocess.DEVNULL,
                "timeout": _IMPORT_SECONDS,
                "env": elsewhere(home),
            }
            done = subprocess.run(words, capture_output=True, check=False, **own)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    if done.returncode == 0:
        return ""
    said = [
        line.strip() for line in done.stderr.decode("utf-8", "replace").splitlines() if line.strip()
    ]
    return str((said or [f"import ended with status {done.returncode}"])[-1])


def compile_imports(names: Collection[str]) -> None:
    """Compile what an import of distributions loads."""
    with tempfile.TemporaryDirectory() as home:
        # Packages write their settings when they are first imported.
        own = {**elsewhere(home), "PYTHONHASHSEED": "0"}
        words, quiet = (sys.executable, __file__, "import"), subprocess.DEVNULL
        # Not as many as there are processors: which modules are loaded may
        # depend on what was loaded before.
        shares = [sorted(names)[number::_SHARES] for number in range(_SHARES)]
        started = [
            subprocess.Popen((*words, *share), env=own, cwd=home, stdout=quiet, stderr=quiet)
            for share in shares
            if share
        ]
        for process in started:
            process.wait()


def import_and_compile(names: Sequence[str]) -> NoReturn:
    """Import distributions, and end.

    Their bytecode is valid by the source's hash, as times are the engine's.
    """
    found = [metadata.distribution(name) for name in names]
    paths = {
        str(each.locate_file(file))
        for each in found
        for file in each.files or ()
        if file.suffix == ".py"
    }

    def keep(loader: Any, source: str, target: str, content: bytes) -> None:
        if source in paths:
            head = util.MAGIC_NUMBER + b"\3\0\0\0" + util.source_hash(loader.get_data(source))
            loader.set_data(target, head + content[16:])

    SourceFileLoader._cache_bytecode = keep  # type: ignore[attr-defined]  # noqa: SLF001
    sys.dont_write_bytecode = False
    sys.path[:] = [each for each in sys.path if each not in ("", os.getcwd(), str(FOLDER))]
    for name in names:
        signal.alarm(int(imports.SECONDS))  # one that does not end ends all
        imports.failure_of(name)
    os._exit(0)  # without what packages do at the end of a process


def settle(started: float) -> None:
    """Leave nothing of uv's own, and give all that has changed one time: same files, same layer."""
    Path(sys.prefix, ".lock").unlink(missing_ok=True)
    moment = int(os.environ["SOURCE_DATE_EPOCH"])
    started -= 0.1  # the kernel's clock for files is some milliseconds late
    pending = ["/"]
    while pending:
        folder = pending.pop()
        try:
            below = list(os.scandir(folder))
            _give_time(folder, os.lstat(folder), started, moment)
        except OSError:  # a mount of the engine's
            continue
        for entry in below:
            try:
                status = entry.stat(follow_symlinks=False)
                if not stat.S_ISDIR(status.st_mode):
                    _give_time(entry.path, status, started, moment)
                elif entry.path not in _ELSEWHERE:
                    pending.append(entry.path)
            except OSError:
                continue


def _give_time(path: str, status: os.stat_result, started: float, moment: int) -> None:
    if status.st_ctime >= started:
        os.utime(path, (moment, moment), follow_symlinks=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
