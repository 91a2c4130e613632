"""What a build stage of an extension does: runs in the base image, next to ``install.py`` and the tests' imports.

``python -I inside.py install [FILE]`` installs what was locked, or else what is asked for; it compiles what an import
of it loads, and writes ``RESULT``, or FILE: the lock, or why nothing was installed. ``build WORDS`` is ``uv build``
with pip's settings. It has only the standard library, and syntax of Python 3.8.
"""

# ruff: noqa: B905, E402, PTH109, PTH118
# The oldest interpreter decides.

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import metadata, util
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import unquote

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))

import imports  # type: ignore[import-not-found]
import install  # type: ignore[import-not-found]

sys.path.remove(str(FOLDER))

INPUTS, MANIFEST = Path("/run/inputs"), FOLDER / "manifest.json"
RESULT = Path("/opt/trainworks/extension.lock")
"""Stays in the image: from what it was made."""

LOCKS = (INPUTS / RESULT.name, Path("/run/wheels") / RESULT.name)
"""Where what is to be installed lies: as it was locked, or as the stage with the compiler found out."""

OLD = "730 days"
"""What was replaced by a newer release so long ago is named."""

_ELSEWHERE = {"/dev", "/proc", "/run", "/sys"}


def main(arguments: Sequence[str]) -> int:
    """Do one of the three; return a status."""
    what, *words = arguments
    if what == "import":
        import_and_compile(words)
    with tempfile.TemporaryDirectory() as name:
        order = json.loads((INPUTS / "order.json").read_text(encoding="utf-8")) if what == "install" else {}
        os.environ.update(json.loads(MANIFEST.read_text(encoding="utf-8"))["build_environment"])
        if what == "build":
            return int(install.Installation(install.find_uv(), (), Path(name)).call("build", *words).returncode)
        started, before = time.time(), install.versions()
        locked = next((file for file in LOCKS if file.is_file()), None)
        if locked:
            text = locked.read_text(encoding="utf-8")
            status = 0 if "log" in data_of(text) else install_locked(text, order, Path(name))
            if "log" not in data_of(text):
                with compiling(before, data_of(text)["local"]):
                    pass
        else:
            text = install_anew(order, Path(name))
            status = 0  # that they cannot be installed is an answer, too
    result = Path(*words) if words else RESULT
    result.parent.mkdir(parents=True, exist_ok=True)
    result.write_text(text, encoding="utf-8")
    settle(started)
    return status


def data_of(text: str) -> dict[str, Any]:
    """Return what the first line of a lock says."""
    return dict(json.loads(text.partition("\n")[0][len("# data: ") :]))


def install_locked(text: str, order: Mapping[str, Any], folder: Path) -> int:
    """Install what a lock says, with its hashes; return uv's status."""
    whole = [f"--no-build-isolation-package={name}" for name in json.loads(MANIFEST.read_text())["built_whole"]]
    installation = install.Installation(install.find_uv(), [*order["words"], *whole], folder)
    installation.environment["UV_NO_INSTALLER_METADATA"] = "1"
    pins = installation.file("pins.txt", text.splitlines()[1:])
    files = [*wheels_of(order), *files_of(data_of(text)["local"])]
    status = installation.install("--no-deps", "--require-hashes", "-r", pins) if "\n" in text.strip() else 0
    return int(status or (installation.install("--no-deps", *files) if files else 0))


def wheels_of(order: Mapping[str, Any]) -> list[str]:
    """Return the wheels of what was built from git and folders."""
    folders = (Path("/run/wheels"), Path("/wheels"))
    root = next((each for each in folders if each.is_dir()), folders[0])
    return [str(next((root / each["folder"]).glob("*.whl"))) for each in order["sources"]]


def files_of(local: Mapping[str, str]) -> list[str]:
    """Return the wheels and archives that requirements name by a path."""
    found = {file: re.match(r"(.+?)-\d", file.name) for file in sorted((INPUTS / "files").glob("*"))}
    return [str(file) for file, name in found.items() if name and install.normalised(name.group(1)) in local]


def install_anew(order: Mapping[str, Any], folder: Path) -> str:
    """Install what is asked for; return the text of the lock, whose data have the log where it failed."""
    built = wheels_of(order)
    words = [
        *order["words"],
        *(() if order["hashed"] else (f"{a}{b['extras']}" for a, b in zip(built, order["sources"]))),
    ]
    for option, name in (("-r", "requirements.txt"), ("-c", "constraints.txt")):
        words += [option, str(INPUTS / name)] if (INPUTS / name).is_file() else []
    given = argparse.Namespace(manifest=MANIFEST, strict=order["strict"])
    data: dict[str, Any] = {"status": 1, "commits": order["commits"], "local": {}}
    pins, log = "", folder / "log"
    with log.open("wb") as opened:
        shown = os.dup(2)
        os.dup2(opened.fileno(), 2)
        try:
            data["status"], installation = install.run(given, words, folder)
            if data["status"] == 0 and order["hashed"] and built:
                data["status"] = installation.install("--no-deps", *built)
            if data["status"] == 0:
                pins = lock(installation, order, data)
        except install.RefusedError as error:
            data.update(refused=error.problems, newer=error.newer)
            install.say(str(error))
        finally:
            os.dup2(shown, 2)
    said = log.read_text(encoding="utf-8", errors="replace")
    sys.stderr.write(said)
    data.update({"notes": install.SAID} if data.pop("status") == 0 else {"log": said[-20000:]})
    return f"# data: {json.dumps(data)}\n{pins}"


def lock(installation: install.Installation, order: Mapping[str, Any], data: dict[str, Any]) -> str:
    """Return lines with the hashes of what was installed, as uv writes them, and add what else was to the data."""
    found = {
        name: each for name, each in install.distributions().items() if installation.before.get(name) != each.version
    }
    addresses = {name: _address_of(each) for name, each in found.items()}
    data["local"] = {name: found[name].version for name, address in addresses.items() if address}
    projects = [wheel for wheel, each in zip(wheels_of(order), order["sources"]) if each["project"]]
    data["project"] = next((name for name, at in addresses.items() if projects and at.endswith(projects[0])), "")
    exact = [
        f"{name} @ {addresses[name]}" if addresses[name] else f"{name}=={each.version}"
        for name, each in found.items()
        if not addresses[name].startswith("file:")
    ]
    # Three things of some seconds that do not need each other; two of them wait for indexes.
    python = ("--python", sys.executable)
    hashing = ("compile", *python, "--no-deps", "--generate-hashes", "--no-header", "--no-annotate", "--quiet")
    hashing += (*installation.options, installation.file("exact.txt", exact))
    asking = ("list", *python, "--outdated", "--exclude-newer", OLD, "--format", "json")
    with compiling(installation.before, data["local"]), ThreadPoolExecutor() as pool:
        listing = pool.submit(installation.call, "pip", *asking, quiet=True, stdout=subprocess.PIPE)
        done = installation.call("pip", *hashing, stdout=subprocess.PIPE, encoding="utf-8") if exact else None
        listed = listing.result()
    if done and done.returncode:
        raise install.RefusedError("uv cannot lock what it has installed")
    folders = [Path(each) for each in installation.pip.find_links if "://" not in each]
    files = [path for folder in folders for path in folder.glob("*")]
    for row in json.loads(listed.stdout) if listed.returncode == 0 else ():
        if row["name"] in found and row["name"] not in {*data["local"], *installation.pinned}:
            install.say(f"{row['name']} {row['version']} is old: {row['latest_version']} has been there for two years")
    pins = re.sub(r"(?m)^([\w.-]+)==(\S+)$", lambda pin: _with_hashes(pin, files), done.stdout if done else "")
    options = [text for text, place in order["options"] if place not in install.LEFT]
    return "".join(f"{line}\n" for line in options) + pins


def _address_of(each: metadata.Distribution) -> str:
    """Return where a distribution came from, if it was not an index; take the installer's notes away."""
    address = json.loads(each.read_text("direct_url.json") or "{}").get("url", "")
    notes, record = {"INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json"}, each.read_text("RECORD") or ""
    for file in each.files or ():
        if file.parent.name.endswith(".dist-info") and file.name in notes:
            Path(str(each.locate_file(file))).unlink()
        elif file.name == "RECORD" and file.parent.name.endswith(".dist-info"):
            lines = [row for row in record.splitlines(True) if row.split(",")[0].rpartition("/")[2] not in notes]
            Path(str(each.locate_file(file))).write_bytes("".join(lines).encode())
    return unquote(address)


def _with_hashes(pin: re.Match[str], files: Iterable[Path]) -> str:
    """Return a line with the hashes of the files in local folders, which uv does not say."""
    wanted, found = (install.normalised(pin.group(1)), pin.group(2)), set()
    for path in files:
        named = re.match(r"(.+?)-(\d[^-]*?)(?:-.*\.whl|\.tar\.\w+|\.zip)$", path.name)
        if named and (install.normalised(named.group(1)), named.group(2)) == wanted:
            found.add(hashlib.sha256(path.read_bytes()).hexdigest())
    return pin.group() + "".join(f" \\\n    --hash=sha256:{each}" for each in sorted(found))


@contextmanager
def compiling(before: Mapping[str, str], local: Iterable[str]) -> Iterator[None]:
    """Compile what an import of what is new loads, meanwhile; not code of the user's own: that may start a training."""
    new = [name for name, version in install.versions().items() if before.get(name) != version and name not in local]
    with tempfile.TemporaryDirectory() as home:  # packages write their settings when they are first imported
        own = {**install.elsewhere(home), "PYTHONHASHSEED": "0"}
        words, quiet = (sys.executable, __file__, "import", *sorted(new)), subprocess.DEVNULL
        with subprocess.Popen(words, env=own, cwd=home, stdout=quiet, stderr=quiet):
            yield


def import_and_compile(names: Sequence[str]) -> NoReturn:
    """Import distributions, and end; their bytecode is valid by the source's hash, as times are the engine's."""
    found = [metadata.distribution(name) for name in names]
    paths = {str(each.locate_file(file)) for each in found for file in each.files or () if file.suffix == ".py"}

    def keep(loader: Any, source: str, target: str, content: bytes) -> None:
        if source in paths:
            head = util.MAGIC_NUMBER + b"\3\0\0\0" + util.source_hash(loader.get_data(source))
            loader.set_data(target, head + content[16:])

    SourceFileLoader._cache_bytecode = keep  # type: ignore[attr-defined]  # noqa: SLF001
    sys.dont_write_bytecode = False
    sys.path[:] = [each for each in sys.path if each not in ("", os.getcwd(), str(FOLDER))]
    signal.alarm(int(imports.SECONDS) * len(names))  # one that does not end ends all
    for name in names:
        imports.failure_of(name)
    os._exit(0)  # without what packages do at the end of a process


def settle(started: float) -> None:
    """Leave nothing of uv's own, and give all that has changed one time: same files, same layer."""
    Path(sys.prefix, ".lock").unlink(missing_ok=True)
    moment = int(os.environ["SOURCE_DATE_EPOCH"])
    for parent, folders, names in os.walk("/"):
        folders[:] = [name for name in folders if os.path.join(parent, name) not in _ELSEWHERE]
        for path in (parent, *(os.path.join(parent, name) for name in names)):
            try:
                if os.lstat(path).st_ctime >= started - 0.1:  # the kernel's clock for files is some milliseconds late
                    os.utime(path, (moment, moment), follow_symlinks=False)
            except OSError:  # a mount of the engine's
                continue


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
