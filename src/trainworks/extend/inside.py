"""What a build stage of an extension does beside installing: runs in the base image, next to ``install.py``.

``python -I inside.py lock [words of install.py]`` installs, and writes ``/out``: what was installed with its hashes, or
why nothing was. ``exact WORDS`` installs what was locked, and compiles what an import of it loads. ``build WORDS`` is
``uv build`` with pip's settings. It has only the standard library, and syntax of Python 3.8.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import install  # type: ignore[import-not-found]

OUT = Path("/out")
OLD = "730 days"
"""What was replaced by a newer release so long ago is named."""

_COMPILE = """
import importlib, os, py_compile, sys
sys.dont_write_bytecode = True
for name in sys.argv[2:]:
    try:
        importlib.import_module(name)
    except BaseException:
        pass
loaded = {getattr(each, "__file__", None) or "" for each in list(sys.modules.values())}
for path in loaded & set(sys.stdin.read().split("\\n")):
    py_compile.compile(path, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH, quiet=2)
"""


def lock(installation: install.Installation) -> int:
    """Write ``lock.txt``, with the hashes of what was installed, and ``report.json``; return uv's status."""
    found = {
        name: each for name, each in install.distributions().items() if installation.before.get(name) != each.version
    }
    local = {name for name, each in found.items() if each.read_text("direct_url.json")}
    exact = [f"{name}=={each.version}" for name, each in found.items() if name not in local]
    file, python = OUT / "lock.txt", ("--python", sys.executable)
    words = ("--no-deps", "--generate-hashes", "--no-header", "--no-annotate", "--quiet", "--output-file", str(file))
    status = 0
    if exact:
        pins = installation.file("exact.txt", exact)
        status = installation.call("pip", "compile", *python, *words, *installation.options, pins).returncode
    if exact and status == 0:
        folders = [each for each in installation.pip.find_links if "://" not in each]
        files = [path for folder in folders for path in Path(folder).glob("*")]
        text = re.sub(r"(?m)^([\w.-]+)==(\S+)$", lambda pin: _with_hashes(pin, files), file.read_text(encoding="utf-8"))
        file.write_text(text, encoding="utf-8")
    # What has no wheel for this Python would be built, wherever it is installed.
    nowhere = ("--target", str(OUT / "nothing"), "--dry-run", "--no-deps", "--no-build", *installation.options)

    def has_wheels(*words: str) -> bool:
        done = installation.call("pip", "install", *python, *nowhere, *words, quiet=True, stdout=subprocess.DEVNULL)
        return bool(done.returncode == 0)

    built = [] if status or not exact or has_wheels("-r", str(file)) else [e for e in exact if not has_wheels(e)]
    checking = (sys.executable, "-m", "pip", "check", "--disable-pip-version-check")
    asked = subprocess.run(checking, check=False, stdout=subprocess.PIPE, text=True) if installation.stay else None
    complaints = asked.stdout.splitlines() if asked else []
    report = {
        "complaints": [line for line in complaints if install.normalised(line.split(" ")[0]) in installation.stay],
        "installed": {name: each.version for name, each in found.items()},
        "local": sorted(local),
        "left": install.LEFT,
        "built": [each.partition("==")[0] for each in built],
    }
    (OUT / "report.json").write_text(json.dumps(report), encoding="utf-8")
    asking = ("pip", "list", *python, "--outdated", "--exclude-newer", OLD, "--format", "json")
    listed = installation.call(*asking, quiet=True, stdout=subprocess.PIPE)
    rows = json.loads(listed.stdout) if status == 0 and listed.returncode == 0 else ()
    old = [row for row in rows if row["name"] in found and row["name"] not in {*local, *installation.pinned}]
    for row in old:
        install.say(f"{row['name']} {row['version']} is old: {row['latest_version']} has been there for two years")
    return int(status)


def _with_hashes(pin: re.Match[str], files: Sequence[Path]) -> str:
    """Return a line with the hashes of the files in local folders, which uv does not say."""
    found = set()
    for path in files:
        named = re.match(r"(.+?)-(\d[^-]*?)(?:-.*\.whl|\.tar\.\w+|\.zip)$", path.name)
        if named and (install.normalised(named.group(1)), named.group(2)) == (
            install.normalised(pin.group(1)),
            pin.group(2),
        ):
            found.add(hashlib.sha256(path.read_bytes()).hexdigest())
    return pin.group() + "".join(f" \\\n    --hash=sha256:{each}" for each in sorted(found))


def compile_imported(installation: install.Installation) -> None:
    """Compile what an import of what is new loads, valid by the source's hash: file times are the engine's."""
    modules, paths = set(), set()
    for each in [each for name, each in install.distributions().items() if installation.is_new(name, each.version)]:
        files = [file for file in each.files or () if file.suffix == ".py"]
        paths |= {str(each.locate_file(file)) for file in files}
        if not each.read_text("direct_url.json"):  # code of the user's own may start a training
            tops = {file.parts[0].split(".")[0] for file in files if len(file.parts) < 3}
            modules |= {top for top in tops if top.isidentifier()}
    with tempfile.TemporaryDirectory() as home:  # some packages write their settings when they are first imported
        words = (sys.executable, "-c", _COMPILE, "-", *sorted(modules))
        environment = {**os.environ, "HOME": home, "XDG_CACHE_HOME": home, "MPLCONFIGDIR": home}
        text, quiet = "\n".join(paths), subprocess.DEVNULL
        subprocess.run(words, input=text, text=True, env=environment, cwd=home, check=False, stdout=quiet, stderr=quiet)


def main(arguments: Sequence[str]) -> int:
    """Do one of the three; return the installer's status."""
    what, *words = arguments
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if what != "lock":
            uv = shutil.which("uv", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))
            installation = install.Installation(str(uv), (), folder)
            if what == "build":
                return int(installation.call("build", *words).returncode)
            status = installation.install(*words, "--no-deps")
            compile_imported(installation)
            return int(status)
        parser = argparse.ArgumentParser()
        parser.add_argument("--manifest", type=Path)
        parser.add_argument("--strict", action="store_true")
        split = words.index("--")
        status, refused = 1, install.RefusedError()
        try:
            status, installed = install.run(parser.parse_args(words[:split]), words[split + 1 :], folder)
            status = lock(installed) if status == 0 and installed else status
        except install.RefusedError as error:
            refused = error
            install.say(str(error))
        answer = {"status": status, "said": install.SAID, "refused": refused.problems, "newer": refused.newer}
        (OUT / "status.json").write_text(json.dumps(answer), encoding="utf-8")
        return int(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
