"""Installs requirements with uv and keeps what the image was built around: one program, for a job and for an extension.

Run as ``python -I install.py [--manifest FILE] [--strict] [--lock FOLDER] -- WORDS``, with the Python that it installs
for. WORDS are those of ``uv pip install``: folders, options, ``-r FILE``. The image's manifest says what is kept
(``protected``), what is compiled against that (``companions``), what other builds of it need (``libraries``), and what
compiles with a component that the image lacks (``compiled_by``). ``--lock`` writes what was installed; ``--exact``
installs what was locked, and ``--build`` makes wheels: WORDS are then those of ``uv build``.

What is kept is a constraint. A line of the user's own that asks for an older or another build of it is answered with
what the image has, and printed; one that asks for a newer release is refused. What of the image lost a requirement is
asked for in a second call. uv is told what pip's settings say. Where there is no uv, pip installs with the constraints.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import math
import os
import py_compile
import re
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any, Container, Iterable, Iterator, Mapping, NamedTuple, Sequence

from pip._vendor.packaging.requirements import Requirement  # type: ignore[import-not-found, unused-ignore]
from pip._vendor.packaging.version import Version  # type: ignore[import-not-found, unused-ignore]

# Those of contract/names.py: this file imports nothing of ours.
_RUNTIME_DIRECTORY = "TRAINWORKS_RUNTIME_DIRECTORY"
_MANIFEST_VARIABLE, _MANIFEST = "TRAINWORKS_IMAGE_MANIFEST", "/opt/trainworks/image.json"
_IMPORT_SECONDS = 300
_CONDA = "is conda's: `conda run -n NAME python -m pip list --format=freeze > requirements.txt` writes what pip reads"
_OTHERS = (
    (r".*\.ya?ml", _CONDA),
    (r"Pipfile(\.lock)?", "is pipenv's: `pipenv requirements > requirements.txt` writes what pip reads"),
    (r"poetry\.lock", "is Poetry's: `poetry export -o requirements.txt` (poetry-plugin-export) writes what pip reads"),
    (r"setup\.(py|cfg)", "belongs to a project: name its folder in a requirements file, such as ./"),
)
_TRAPS = {"pytorch": "torch", "apex": "apex @ git+ the address of NVIDIA's repository"}
"""Names under which the package index has something else than what people mean."""
_LEFT_OUT = (
    "cudatoolkit",
    "pkg-resources",
    "pypiwin32",
    "pyobjc",
    "pyobjc-core",
    "python",
    "pywin32",
    "pywinpty",
    "windows-curses",
)
"""What pip freeze writes on other systems or by a mistake of Debian's, and conda's own; no index has it for Linux."""


class RefusedError(Exception):
    """Why nothing is installed, for a person; ``newer``: what a newer image would have, by name."""

    def __init__(self, *problems: str, newer: Mapping[str, str] | None = None) -> None:
        """problems: a line each; newer: names and specifiers."""
        super().__init__("; ".join(problems))
        self.problems = problems
        self.newer = dict(newer or {})


SAID: list[str] = []
"""The lines for the log."""


class Line(NamedTuple):
    """A requirement of the user's own: where it stands, and what it asks for."""

    place: str
    wanted: Any

    @property
    def name(self) -> str:
        """The distribution's name as indexes write it."""
        return normalised(self.wanted.name)


def say(text: str) -> None:
    """Print a line for the log."""
    SAID.append(text)
    sys.stderr.write(f"trainworks: {text}\n")
    sys.stderr.flush()


def normalised(name: str) -> str:
    """Return a distribution's name as indexes write it."""
    return re.sub(r"[-_.]+", "-", name).lower()


# --------------------------------------------------------------------------------------------- what is installed
def distributions() -> dict[str, metadata.Distribution]:
    """Return what this Python has, by name; of two of one name the first is imported."""
    found: dict[str, metadata.Distribution] = {}
    for each in metadata.distributions():
        if each.metadata["Name"]:
            found.setdefault(normalised(each.metadata["Name"]), each)
    return found


def versions() -> dict[str, str]:
    """Return the versions of what this Python has."""
    return {name: each.version for name, each in distributions().items()}


def applying(text: str) -> Any:
    """Return a requirement that applies to this machine; None for another, and for what is not a requirement."""
    try:
        wanted = Requirement(text)
    except ValueError:
        return None
    return wanted if wanted.marker is None or wanted.marker.evaluate({"extra": ""}) else None


def losing() -> dict[str, Any]:
    """Return the distributions that lack what they require, in a version that they accept: name to the first one."""
    found = distributions()
    lacking: dict[str, Any] = {}
    for name, each in found.items():
        for wanted in filter(None, map(applying, each.requires or ())):
            other = found.get(normalised(wanted.name))
            if other is None or not wanted.specifier.contains(other.version, prereleases=True):
                lacking.setdefault(name, wanted)
    return lacking


def build_of(name: str) -> str:
    """Return the version with its build that a distribution says of itself, such as ``VERSION+cu121``; or ``""``."""
    try:
        found = metadata.distribution(name)
        text = Path(str(found.locate_file(f"{name}/version.py"))).read_text(encoding="utf-8", errors="replace")
    except (metadata.PackageNotFoundError, OSError):
        return ""
    said = re.search(r"^__version__\s*(?::[^=\n]+)?=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    return said.group(1) if said and said.group(1).startswith(f"{found.version}+") else ""


# --------------------------------------------------------------------------------------------- what the user asks for
def lines_of(path: Path, options: list[str], seen: frozenset[Path] = frozenset()) -> Iterator[Line]:
    """Yield the requirements of a file, to look at them: uv reads the file itself, and says what is wrong with a line.

    Args:
        path: A requirements file or ``pyproject.toml``; what a file includes is followed.
        options: Gets those of pip's options that uv takes on its command line only.
        seen: Files that include this one.

    Raises:
        RefusedError: The file, or a line of it, is another tool's.
    """
    other = next((sentence for pattern, sentence in _OTHERS if re.fullmatch(pattern, path.name)), "")
    if other:
        raise RefusedError(f"{path} {other}")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RefusedError(f"cannot read {path}: {error.strerror}") from error
    text = content.decode("utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig", "replace")
    is_project = path.suffix == ".toml"
    numbered = enumerate(_rows_of(path, text) if is_project else text.splitlines(), 1)
    for number, line in numbered:
        while not is_project and line.endswith("\\") and not line.lstrip().startswith("#"):
            line = f"{line[:-1]} {next(numbered, (0, ''))[1]}"
        bare = re.sub(r"(^|\s+)#.*$|\s--hash.*$", "", line).strip()
        # The builder writes lines anew for its build stage, and where they stood.
        origin = re.search(r"\s#@ (.+)$", line)
        place = origin.group(1) if origin else str(path) if is_project else f"{path} line {number}"
        name, _, value = re.sub(r"^(--?[a-z-]+)[\s=]+", r"\1 ", bare).partition(" ")
        included = (path.parent / value).resolve()
        if name in ("-r", "--requirement", "-c", "--constraint") and "://" not in value and included not in seen:
            yield from lines_of(path.parent / value, options, seen | {path.resolve(), included})
        elif name == "--pre":
            options.append("--prerelease=allow")
        elif name == "--extra-index-url":
            options.append("")
        elif name == "--trusted-host":
            options.append(f"--allow-insecure-host={value}")
        if re.match(r"[\w.-]+=[^=]", bare) or "@ file:///croot" in bare:
            raise RefusedError(f"{place}: {name} {_CONDA}")
        wheel = re.search(
            r"(?:^|/)([\w.]+)-(\d[^-/]*)(?:-\d[^-/]*)?-[^-/]+-[^-/]+-[^-/]+\.whl", bare.replace("%2B", "+")
        )
        wanted = applying(f"{wheel.group(1)}=={wheel.group(2)}" if wheel else bare)
        if wanted is not None:
            yield Line(place, wanted)


def _rows_of(path: Path, text: str) -> list[str]:
    """Return what a project depends on, as its file says; a project may say it elsewhere."""
    try:
        import tomllib  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        from pip._vendor import tomli as tomllib  # type: ignore[import-not-found, no-redef, unused-ignore]
    try:
        return [row for row in tomllib.loads(text).get("project", {}).get("dependencies", ()) if isinstance(row, str)]
    except ValueError as error:
        raise RefusedError(f"cannot read {path}: {error}") from error


class Image:
    """What an image keeps, and what of the user's own lines is answered with it.

    Attributes:
        kept: Name to version.
        excluded: Names that uv leaves out wherever they are asked for.
        said: Lines for the log: what is not installed as it was asked for.
    """

    def __init__(self, kept: Mapping[str, str], libraries: Iterable[str], lines: Sequence[Line]) -> None:
        """Look at the lines. Raises RefusedError with all that ask for what the image cannot give.

        Args:
            kept: What the manifest says; what is installed counts.
            libraries: Distributions that only another build of the framework needs.
            lines: The user's.
        """
        there = distributions()
        self.kept = {name: there[name].version if name in there else version for name, version in kept.items()}
        self.excluded = set(_LEFT_OUT)
        self.said: list[str] = []
        refused: list[str] = []
        newer: dict[str, str] = {}
        needs = [
            (normalised(wanted.name), owner, wanted.specifier)
            for owner in self.kept
            for wanted in filter(None, map(applying, (there[owner].requires or ()) if owner in there else ()))
        ]
        for line in lines:
            name, asked = line.name, f"{line.name}{line.wanted.specifier}"
            have = self.kept.get(name, "")
            if name in _TRAPS and not line.wanted.url:
                refused.append(f"{line.place}: {name} of the package index is something else: ask for {_TRAPS[name]}")
            elif name in _LEFT_OUT:
                self.said.append(f"{line.place}: {asked} is left out: it is not for this system")
            elif have and not self._holds(line.wanted, have):
                if any(_is_newer(each.version, have) for each in line.wanted.specifier if each.operator[0] not in "<!"):
                    refused.append(
                        f"{line.place}: {asked}, and this image has {name} {have}: choose an image with {asked}"
                    )
                elif not (build_of(name) and self._holds(line.wanted, build_of(name))):
                    what = "an address" if line.wanted.url else asked
                    self.said.append(f"{line.place}: {what} is not installed: this image keeps {name} {have}")
                self.excluded.add(name)
            for owner, versions_ in [(owner, each) for need, owner, each in needs if need == name and not have]:
                exact = [each.version for each in line.wanted.specifier if re.match(r"==[^*]+$", str(each))]
                if exact and not versions_.contains(exact[0], prereleases=True):
                    what = f"this image's {owner} {self.kept[owner]} needs {name}{versions_}"
                    self.said.append(f"{line.place}: {asked} is not installed: {what}")
                    self.excluded.add(name)
        if self.excluded & set(self.kept):
            self.excluded |= set(self.kept)
        if self.excluded - set(_LEFT_OUT):  # so these lines are of another build of the framework
            missing = {normalised(name) for name in libraries} - set(there)
            named = sorted({line.name for line in lines} & missing)
            self.said += [f"{', '.join(named)}: not installed, only another build needs them"] if named else []
            self.excluded |= missing
        if refused:
            raise RefusedError(*refused, newer=newer)

    @staticmethod
    def _holds(wanted: Any, version: str) -> bool:
        return not wanted.url and bool(wanted.specifier.contains(version, prereleases=True))


def _is_newer(version: str, have: str) -> bool:
    """Whether a version is of a later release than another; its build does not count."""
    try:
        return bool(Version(version.replace(".*", "")).release > Version(have).release)
    except ValueError:
        return False


# --------------------------------------------------------------------------------------------- pip's settings, for uv
def pip_settings() -> dict[str, str]:
    """Return what pip would use: its files and ``PIP_*``, the more special one over the general one."""
    words = (sys.executable, "-m", "pip", "config", "list", "--disable-pip-version-check")
    done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False)
    found: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in done.stdout.decode("utf-8", "replace").splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.partition(".")
        if section in found:
            found[section][{"default-timeout": "timeout"}.get(name, name)] = str(ast.literal_eval(value)).strip()
    return {name: value for section in found.values() for name, value in section.items() if value}


def for_uv(pip: Mapping[str, str], folder: Path) -> tuple[dict[str, str], list[str]]:
    """Return pip's settings as variables and options of uv; what may have a password is in a file of this folder."""
    rows: dict[str, object] = {}
    if shutil.which("keyring"):
        rows["keyring-provider"] = "subprocess"
    links = [
        each if "://" in each else str(Path(each).expanduser().absolute()) for each in pip.get("find-links", "").split()
    ]
    rows.update({"find-links": links} if links else {})
    rows.update({"allow-insecure-host": pip["trusted-host"].split()} if "trusted-host" in pip else {})
    switches = {"no-index": ("no-index", True), "pre": ("prerelease", "allow"), "no-deps": ("no-deps", True)}
    true = ("y", "yes", "t", "true", "on", "1")
    rows.update({key: value for name, (key, value) in switches.items() if pip.get(name, "").lower() in true})
    if pip.get("no-build-isolation", "true").lower() not in true:  # pip's own reading of it
        rows["no-build-isolation"] = True
    text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in rows.items())
    for address in pip.get("extra-index-url", "").split():
        text += f"\n[[index]]\nurl = {json.dumps(address)}\n"
    if "index-url" in pip:
        text += f"\n[[index]]\nurl = {json.dumps(pip['index-url'])}\ndefault = true\n"
    file = folder / "uv.toml"
    file.touch(mode=0o600)
    file.write_text(text, encoding="utf-8")
    bundle = next(filter(None, [pip.get("cert"), *map(os.environ.get, ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"))]), "")
    found = {
        "UV_CONFIG_FILE": str(file),
        "UV_NO_PROGRESS": "1",
        "UV_SYSTEM_CERTS": "1",
        "SSL_CERT_FILE": bundle,
        "SSL_CLIENT_CERT": pip.get("client-cert", ""),
        "UV_HTTP_TIMEOUT": str(math.ceil(float(pip.get("timeout") or 0)) or ""),
        "UV_HTTP_RETRIES": pip.get("retries", ""),
        "HTTP_PROXY": pip.get("proxy", ""),
        "HTTPS_PROXY": pip.get("proxy", ""),
        "UV_CACHE_DIR": "" if os.access(str(Path.home()), os.W_OK) else str(folder / "cache"),
        "UV_BREAK_SYSTEM_PACKAGES": pip.get("break-system-packages", ""),
    }
    options = [f"--{name}={pip[name]}" for name in ("target", "prefix") if name in pip]
    options += [""] if "extra-index-url" in pip else []
    for name in ("only-binary", "no-binary", "constraint"):
        options += [f"--{name}={value}" for value in re.split(r"[\s,]+", pip.get(name, "")) if value]
    own = {name: value for name, value in os.environ.items() if name.startswith("UV_")}
    return {**{name: value for name, value in found.items() if value}, **own}, options


# --------------------------------------------------------------------------------------------- the installation
class Installation:
    """Calls of uv for this Python, one after the other.

    Attributes:
        before: The versions before the first one.
    """

    def __init__(self, uv: str, image: Image, options: Iterable[str], folder: Path) -> None:
        """options: of every call; folder: a private one, for uv's files."""
        self.before, self._lacking = versions(), losing()
        self._image, self._folder = image, folder
        self._stay: set[str] = set()
        pip = pip_settings()
        self._has_source = any(name in pip for name in ("index-url", "extra-index-url", "find-links", "no-index"))
        self._folders = [each for each in pip.get("find-links", "").split() if "://" not in each]
        variables, more = for_uv(pip, folder)
        self._environment = {**os.environ, **variables}
        if "" in (
            *options,
            *more,
        ):  # several indexes: pip asks all; with one only, uv says more of what is wrong with it
            self._environment["UV_INDEX_STRATEGY"] = "unsafe-best-match"
        self._uv, self._options = uv, tuple(dict.fromkeys(filter(None, [*options, *more])))
        kept = [f"{name}=={version}" for name, version in image.kept.items()]
        self._kept = ("-c", self._file("kept.txt", kept)) if kept else ()

    def _file(self, name: str, lines: Iterable[str]) -> str:
        path = self._folder / name
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return str(path)

    def _install(self, words: Sequence[str], *, quiet: bool = False) -> int:
        """Install, and return uv's status. quiet: what it says is shown where it succeeds only."""
        command = (self._uv, "pip", "install", "--python", sys.executable, *self._options, *words)
        done = subprocess.run(command, env=self._environment, check=False, stderr=subprocess.PIPE if quiet else None)
        if quiet and done.returncode == 0:
            sys.stderr.write(done.stderr.decode("utf-8", "replace"))
        return done.returncode

    def first(self, words: Sequence[str]) -> int:
        """Install what is asked for; return uv's status."""
        excluded = ("--excludes", self._file("excluded.txt", sorted(self._image.excluded)))
        return self._install((*words, *excluded, *self._kept))

    def call(self, *words: str) -> int:
        """Call uv itself, with pip's settings; return its status."""
        return subprocess.run((self._uv, *words), env=self._environment, check=False).returncode

    def exact(self, words: Sequence[str]) -> int:
        """Install what is locked, and nothing else; return uv's status. Its bytecode is valid by the source's hash."""
        status = self._install((*words, "--no-deps"))
        for name, each in distributions().items():
            for file in each.files or () if self.before.get(name) != each.version else ():
                path = Path(str(each.locate_file(file)))
                if path.suffix == ".py" and path.is_file():
                    py_compile.compile(
                        str(path), invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH, quiet=2
                    )
        return status

    def lock(self, folder: Path) -> int:
        """Write ``lock.txt``, with the hashes of what was installed, and ``report.json``; return uv's status."""
        found = {name: each for name, each in distributions().items() if self.before.get(name) != each.version}
        local = {name for name, each in found.items() if each.read_text("direct_url.json")}
        exact = [f"{name}=={each.version}" for name, each in found.items() if name not in local]
        file = folder / "lock.txt"
        asking = (
            "pip",
            "compile",
            "--python",
            sys.executable,
            "--no-deps",
            "--generate-hashes",
            "--no-header",
            "--quiet",
        )
        more = ("--no-annotate", "--output-file", str(file))
        status = self.call(*asking, *more, *self._options, self._file("exact.txt", exact)) if exact else 0
        if exact and status == 0:
            text = re.sub(r"(?m)^([\w.-]+)==(\S+)$", self._with_hashes, file.read_text(encoding="utf-8"))
            file.write_text(text, encoding="utf-8")
        # What has no wheel for this Python would be built, wherever it is installed.
        nowhere = ("--target", str(folder / "nothing"), "--dry-run", "--no-deps", "--no-build")

        def has_wheels(*words: str) -> bool:
            asking = (self._uv, "pip", "install", "--python", sys.executable, *self._options, *nowhere, *words)
            return subprocess.run(asking, env=self._environment, check=False, capture_output=True).returncode == 0

        built = [] if status or not exact or has_wheels("-r", str(file)) else [e for e in exact if not has_wheels(e)]
        checked = subprocess.run(
            (sys.executable, "-m", "pip", "check", "--disable-pip-version-check"), check=False, stdout=subprocess.PIPE
        )
        complaints = checked.stdout.decode("utf-8", "replace").splitlines()
        report = {
            "complaints": [line for line in complaints if normalised(line.split(" ")[0]) in self._stay],
            "installed": {name: each.version for name, each in found.items()},
            "local": sorted(local),
            "built": [each.partition("==")[0] for each in built],
        }
        (folder / "report.json").write_text(json.dumps(report), encoding="utf-8")
        return status

    def _with_hashes(self, pin: re.Match[str]) -> str:
        """Return a line with the hashes of the files in local folders, which uv does not say."""
        found = set()
        for path in [path for folder in self._folders for path in Path(folder).glob("*")]:
            named = re.match(r"(.+?)-(\d[^-]*?)(?:-.*\.whl|\.tar\.\w+|\.zip)$", path.name)
            if named and (normalised(named.group(1)), named.group(2)) == (normalised(pin.group(1)), pin.group(2)):
                found.add(hashlib.sha256(path.read_bytes()).hexdigest())
        return pin.group() + "".join(f" \\\n    --hash=sha256:{each}" for each in sorted(found))

    def mend(self, lines: Sequence[Line], companions: Container[str]) -> None:
        """Let what lost its requirements move, too: wheels only, as nobody asked for it.

        Raises RefusedError for what the image keeps, and for what the user's own lines ask for in just this version.
        """
        pinned = {line.name for line in lines if line.wanted.url or str(line.wanted.specifier).startswith("==")}
        tried: set[str] = set()
        while True:
            lacking, now = losing(), distributions()
            new = sorted(name for name in lacking if name not in self._lacking and name not in tried)
            # A project of the user's own stays, and a line said what it does not get.
            lost = [name for name in new if '"dir_info"' not in (now[name].read_text("direct_url.json") or "")]
            tried.update(new)
            if not lost:
                return
            for name in lost:
                what, need = f"{name} {now[name].version}", f"{lacking[name].name}{lacking[name].specifier}"
                have = self._image.kept.get(normalised(lacking[name].name), "")
                if name in self._image.kept:
                    what = f"the requirements take from this image's {what} what it requires ({need})"
                    raise RefusedError(f"{what}; ask for other versions")
                if have and name in pinned and name not in companions:
                    raise RefusedError(
                        f"{what} requires {need}, and this image has {lacking[name].name} {have}; ask for a version of"
                        f" {name} that fits {have}, or choose an image with {need}"
                    )
            if not self._moved(lost):
                for name in [name for name in lost if not self._moved([name])]:
                    need = f"{lacking[name].name}{lacking[name].specifier}"
                    self._stay.add(name)
                    say(f"{name} {now[name].version} stays, and does not go with the requirements: it requires {need}")

    def _moved(self, names: Sequence[str]) -> bool:
        """Ask for distributions beside what was brought, which stays as it is; return whether that went."""
        now = {name: version for name, version in versions().items() if name not in names}
        brought = [f"{name}=={version}" for name, version in now.items() if self.before.get(name) != version]
        only = [f"--only-binary={name}" for name in names]
        limits = ("-c", self._file("brought.txt", brought)) if brought else ()
        return self._install((*names, *only, *self._kept, *limits), quiet=True) == 0

    def ask_again(self, name: str, index: str) -> bool:
        """Take a distribution from the framework's own index, where nobody named another; return whether that went."""
        if not index or self._has_source:
            return False
        say(f"{name} is taken from {index}, which has the build for this image")
        self._environment["UV_INDEX_STRATEGY"] = "unsafe-best-match"
        return self._install((name, f"--reinstall-package={name}", f"--index={index}", *self._kept)) == 0


def import_error(name: str) -> str:
    """Import a module in a process of its own, as a script would, and return its last words; ``""`` for success."""
    words = (sys.executable, "-I", "-c", f"import {name}")
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, timeout=_IMPORT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    said = [line.strip() for line in done.stderr.decode("utf-8", "replace").splitlines() if line.strip()]
    return "" if done.returncode == 0 else (said or [f"import ended with status {done.returncode}"])[-1]


def look_at(manifest: Mapping[str, Any], installation: Installation) -> None:
    """Say what moved and what may compile later; raise RefusedError for a companion that cannot be imported."""
    before, after = installation.before, versions()
    for name, framework in manifest.get("companions", {}).items():
        error = import_error(name.replace("-", "_")) if after.get(name) != before.get(name) else ""
        if error and installation.ask_again(name, manifest.get("wheel_index", "")):
            error, after = import_error(name.replace("-", "_")), versions()
        if error:
            have = f"{framework} {after.get(framework, '')}"
            index = manifest.get("wheel_index")
            way = f"add --extra-index-url {index} to the requirements file" if index else f"ask for a build for {have}"
            what = f"{name} {after.get(name, '')} does not work with this image's {have}"
            raise RefusedError(f"{what} ({error}); {way}, or remove it")
    for name, old in sorted(before.items()):
        if after.get(name) != old:
            say(f"{name} {old} -> {after.get(name, 'removed')}")
    for name, component in manifest.get("compiled_by", {}).items():
        if after.get(name) != before.get(name):
            say(
                f"warning: {name} may compile code for GPUs when it is first used, and this image has no {component}: "
                f"take an image that was built --with {component}"
            )


def run(given: argparse.Namespace, words: Sequence[str], folder: Path) -> int:
    """Do what the words say; return the installer's status. Raises RefusedError."""
    manifest = json.loads(given.manifest.read_text(encoding="utf-8")) if given.manifest.is_file() else {}
    uv = shutil.which("uv", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))))
    options: list[str] = []
    files = [Path(word) for before, word in zip(words, words[1:]) if before == "-r"]
    projects = [Path(word, "pyproject.toml") for word in words if Path(word, "pyproject.toml").is_file()]
    lines = [line for file in (*files, *projects) for line in lines_of(file, options)]
    if given.exact or given.build:
        installation = Installation(str(uv), Image({}, (), ()), options, folder)
        return installation.call("build", *words) if given.build else installation.exact(words)
    image = Image(manifest.get("protected", {}), manifest.get("libraries", ()), lines)
    for note in image.said:
        say(note)
    if image.said and given.strict:
        raise RefusedError("--strict: lines are not answered with what the image has")
    if uv is None:
        say("this image has no uv: pip installs, and what of the image loses a requirement is not looked after")
        kept = folder / "kept.txt"
        kept.write_text("".join(f"{name}=={version}\n" for name, version in image.kept.items()), encoding="utf-8")
        pip = (sys.executable, "-m", "pip", "install", "--disable-pip-version-check", *words, "-c", str(kept))
        return subprocess.run(pip, check=False).returncode
    installation = Installation(uv, image, options, folder)
    status = installation.first(words)
    if status == 0:
        installation.mend(lines, manifest.get("companions", {}))
        look_at(manifest, installation)
    return installation.lock(given.lock) if status == 0 and given.lock else status


def main(arguments: Sequence[str]) -> int:
    """Install; the installer's status, or 1 with one line on standard error."""
    split = list(arguments).index("--")
    parser = argparse.ArgumentParser()
    parser.add_argument("--manifest", type=Path, default=Path(os.environ.get(_MANIFEST_VARIABLE) or _MANIFEST))
    parser.add_argument("--lock", type=Path)
    for switch in ("--strict", "--exact", "--build"):
        parser.add_argument(switch, action="store_true")
    given = parser.parse_args(arguments[:split])
    status, refused = 1, RefusedError()
    with tempfile.TemporaryDirectory(dir=os.environ.get(_RUNTIME_DIRECTORY)) as folder:
        try:
            status = run(given, arguments[split + 1 :], Path(folder))
        except RefusedError as error:
            refused = error
    if given.lock:
        answer = {"status": status, "said": SAID, "refused": refused.problems, "newer": refused.newer}
        (given.lock / "status.json").write_text(json.dumps(answer), encoding="utf-8")
    if refused.problems:
        say(str(refused))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
