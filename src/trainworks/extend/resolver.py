"""uv on this machine, for the Python of a base image. It has this machine's settings, and runs no code of others.

Builds are the one way by which uv runs code of others. Its Python is a trap: in any other folder than our own, that
is in the folder of a project which would be built, it notes the folder and ends before anything is imported. What was
noted is built elsewhere, and uv is asked again with the metadata of that.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from email.message import Message
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote, unquote, urljoin, urlsplit

from packaging.utils import canonicalize_name, parse_wheel_filename
from uv import find_uv_bin

from trainworks.errors import LockError
from trainworks.extend.described import Environment
from trainworks.extend.requirements import ExtendedBase
from trainworks.host.cache import cache_folder
from trainworks.host.downloads import Client, content_of
from trainworks.host.pip import local_path
from trainworks.plan.wheel_tags import wheel_tags

_TRAP = """
import os
try:
    here = os.getcwd()
except OSError:
    here = ""
if here != {home!r}:
    with open({notes!r}, "a") as file:
        file.write(here + "\\n")
    os._exit(97)
"""

_LEVELS = {"x86_64": (17, 28, *range(31, 41)), "aarch64": (17, 28, *range(31, 41))}
"""Versions of glibc 2 that uv has a platform for."""

_SAME_FILES = (
    *("--index=", "--default-index", "--only-binary", "--no-binary", "--prerelease", "--allow-insecure-host"),
    "--no-sources-package",
)
"""Options of an installation that decide which files are looked at."""

_COME = ("installed", "reinstalled")
_PAIRS = ("-r", "-c", "--excludes", "--overrides", "--find-links", "--target", "--extra", "--group")
_AT_ONCE = 8

Learn = Callable[[Path], Message]
"""Returns the metadata of the project in a folder, whose build the trap has stopped."""


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """A file that was downloaded, or lies on this machine.

    Attributes:
        name: The distribution's, as indexes write it.
        version: The distribution's.
        file: The file: a wheel, or a source archive; or the folder of a project.
        sha256: Its hash; ``""`` for a folder.
        direct: Whether a requirement names its address or path.
        local: Whether it was on this machine.
        repository: Of a git repository, which has no file: its address with the commit, as uv names it.
    """

    name: str
    version: str
    file: Path
    sha256: str
    direct: bool
    local: bool
    repository: str = ""


class Resolver:
    """Calls of uv for one base, one after the other."""

    def __init__(self, base: ExtendedBase, folder: Path, client: Client, *, fresh: bool) -> None:
        """Make the trap.

        Args:
            base: Whose Python it is.
            folder: A private one.
            client: Downloads files.
            fresh: Whether nothing that was downloaded before is used.
        """
        self._base, self._client, self.folder = base, client, folder
        self.learn: Learn = _unknown
        self.log = ""
        """What uv said in calls that failed."""
        self.cache: Path
        """uv's own: what it unpacks there may be built."""
        self._home, self._notes = folder / "home", folder / "noted"
        self._home.mkdir()
        caches = folder / "cache" if fresh else cache_folder(os.environ)
        self.cache, self._files = caches / "uv", caches / "files"
        self._known: list[str] = []
        self._counted = 0
        trap = folder / "trap"
        self._run("venv", "--quiet", "--no-project", "--python", sys.executable, str(trap), environment=os.environ)
        (packages,) = trap.glob("lib/python*/site-packages")
        text = _TRAP.format(home=str(self._home.resolve()), notes=str(self._notes))
        (packages / "trainworks_trap.py").write_text(text, encoding="utf-8")
        (packages / "trainworks_trap.pth").write_text("import trainworks_trap\n", encoding="utf-8")
        version = base.full_version or f"{base.version}.0"
        self.words: tuple[str, ...] = ("--python", str(trap / "bin" / "python"), "--python-version", version)
        self.words += ("--python-platform", _platform(base))
        self.tags = [str(tag) for tag in wheel_tags(python=base.version, machine=base.machine, glibc=base.glibc)]

    def environment_of(self, given: Mapping[str, str]) -> dict[str, str]:
        """Return variables with what is known of projects that cannot say it without a build."""
        own = {**given, "UV_CACHE_DIR": str(self.cache), "UV_PYTHON_DOWNLOADS": "never", "UV_NO_PROGRESS": "1"}
        if self._known:
            text = "".join(each.read_text(encoding="utf-8") for each in _settings_in(given))
            file = self.file("uv/uv.toml", [text, *self._known])
            if given.get("UV_CONFIG_FILE"):
                own["UV_CONFIG_FILE"] = file
            own["XDG_CONFIG_DIRS"] = str(Path(file).parent.parent)
        return own

    def file(self, name: str, lines: Sequence[str]) -> str:
        """Write a file of its own for uv, and return its path."""
        self._counted += 1
        folder = self.folder / f"call-{self._counted}"
        path = folder / name
        path.parent.mkdir(parents=True)
        path.touch(mode=0o600)
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return str(path)

    def ask(self, *words: str, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        """Call uv, and again with the metadata of each project that it wanted to build."""
        seen: set[str] = set()
        while True:
            self._notes.unlink(missing_ok=True)
            done = self._run(*words, environment=self.environment_of(environment))
            noted = self._notes.read_text(encoding="utf-8").splitlines() if self._notes.is_file() else []
            if done.returncode == 0:
                return done
            new = [Path(each) for each in dict.fromkeys(noted) if each not in seen and Path(each).is_dir()]
            if not new:
                self.log = done.stderr
                return done
            seen.update(map(str, new))
            self._known += [_table(self.learn(each)) for each in new]

    def changes(self, environment: Environment, words: Sequence[str], given: Mapping[str, str]) -> Changes | None:
        """Return what an installation would change; ``None`` where uv refuses it, whose words are in ``log``.

        Args:
            environment: Where it is installed.
            words: Those of ``uv pip install``.
            given: Variables of uv.
        """
        more = ("--target", str(environment.folder), "--dry-run", "--output-format", "json", "--no-build-isolation")
        done = self.ask("pip", "install", *self.words, *more, *words, environment=given)
        if done.returncode != 0:
            return None
        rows = json.loads(done.stdout)["changes"]
        return Changes(
            removed=[row["name"] for row in rows if row["action"] == "uninstalled"],
            added={row["name"]: row.get("version", "") for row in rows if row["action"] in _COME},
        )

    def fetch(
        self, wanted: Mapping[str, str], words: Sequence[str], given: Mapping[str, str], *, beside: Iterable[str] = ()
    ) -> list[Fetched]:
        """Download the file of each of these versions, one for each, that the base would install.

        Args:
            wanted: Name to version.
            words: Those of the installation: they have indexes, addresses and hashes.
            given: Variables of uv.
            beside: Names of what the base has.

        Raises:
            LockError: uv cannot find one of them, a hash is another one, or a server does not answer.
        """
        if not wanted:
            return []
        lines = _lines_of(words)
        options = [line for line in lines if line.startswith("-") and not line.startswith("-e ")]
        direct = [line for line in lines if re.search(r"://|^/|@ */", line) and line not in options]
        # A source archive that a line names has no version before it is built; the line is there itself.
        pins = [f"{name}=={version}" for name, version in wanted.items() if version]
        exact = self.file("exact.txt", [*options, *direct, *pins])
        output = Path(exact).with_name("pylock.toml")
        more = [word for word in words if word.startswith(_SAME_FILES)]
        more += [word for first, second in _pairs(words) if first == "--find-links" for word in (first, second)]
        chosen = ("--format", "pylock.toml", "--output-file", str(output), "--no-header", "--quiet")
        projects = _projects_in(words)
        if projects or any(map(_is_folder, direct)):
            # What a project has from another place only uv knows, and so it reads the projects. What the base has
            # and keeps is no part of the answer.
            left = sorted({canonicalize_name(name) for name in beside} - set(wanted))
            more += [*projects, *_limits_in(words), "--excludes", self.file("beside.txt", left)]
        else:
            more.append("--no-deps")
        done = self.ask("pip", "compile", *self.words, "--no-build-isolation", *chosen, *more, exact, environment=given)
        if done.returncode != 0:
            raise LockError(f"uv does not find the files of what it has resolved:\n{done.stderr.strip()}")
        rows = tomllib.loads(output.read_text(encoding="utf-8")).get("packages", ())
        rows = [row for row in rows if row["name"] in wanted]
        if lost := sorted(set(wanted) - {row["name"] for row in rows}):
            raise LockError(f"uv names no file of {', '.join(lost)}, which it has resolved")
        logins = [*lines, *_addresses_in(given)]
        hashes = _hashes_in(lines)
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return list(pool.map(lambda row: self._fetch(row, output.parent, logins, hashes), rows))

    def preferred(
        self, pins: Mapping[str, str], words: Sequence[str], given: Mapping[str, str], kept: Iterable[str]
    ) -> dict[str, str]:
        """Return versions of what an installation would bring: those of pins, as far as they go together.

        Args:
            pins: Name to version.
            words: Those of the installation.
            given: Variables of uv.
            kept: Names of what the base keeps, which an index may not have.
        """
        asked = self.file("asked.txt", _lines_of(words))
        output = Path(self.file("preferred.txt", [f"{name}=={version}" for name, version in pins.items()]))
        more = [word for word in words if word.startswith(_SAME_FILES)]
        more += [word for first, second in _pairs(words) if first in ("--find-links", "-c") for word in (first, second)]
        more += [*_projects_in(words), *_limits_in(words), "--excludes", self.file("kept.txt", sorted(kept))]
        form = ("--output-file", str(output), "--no-header", "--no-annotate", "--quiet", "--no-build-isolation")
        done = self.ask("pip", "compile", *self.words, *form, *more, asked, environment=given)
        lines = output.read_text(encoding="utf-8").splitlines() if done.returncode == 0 else ()
        found = [re.fullmatch(r"([\w.-]+)==(\S+)(?: *;.*)?", line) for line in lines]
        return {canonicalize_name(each[1]): each[2] for each in found if each is not None}

    def known_file(self, sha256: str, name: str = "") -> Path | None:
        """Return a file that was downloaded before, under this name or any."""
        found = [path for path in (self._files / sha256).glob("[!.]*") if name in ("", path.name)]
        return found[0] if found and content_of(found[0]).sha256 == sha256 else None

    def _fetch(
        self, row: Mapping[str, Any], folder: Path, logins: Sequence[str], hashes: Mapping[str, set[tuple[str, str]]]
    ) -> Fetched:
        """Return the file of a row of a lock (PEP 751)."""
        name = canonicalize_name(row["name"])
        if (found := _without_file(name, row, folder)) is not None:
            return found
        file = row.get("archive") or self._best(row.get("wheels", ())) or row.get("sdist")
        if file is None:
            raise LockError(f"{name} {row.get('version', '')} has no file for Python {self._base.version} of the base")
        address = file.get("url") or str(folder / file["path"])
        if not file.get("url"):
            address = Path(os.path.normpath(address)).as_uri()
        expected = file.get("hashes", {}).get("sha256", "")
        path = local_path(address)
        if path is not None:
            content, there = content_of(path), path
        elif expected and (known := self.known_file(expected, _file_name(address))):
            content, there = content_of(known), known
        else:
            there = self._download(_with_login(address, logins), expected)
            content = content_of(there)
        given = hashes.get(name, set())
        fits = not given or any(_hash_of(there, kind) == value for kind, value in given)
        if (expected and content.sha256 != expected) or not fits:
            wanted = ", ".join(f"{kind}:{value}" for kind, value in sorted(given)) or f"sha256:{expected}"
            raise LockError(f"Hash mismatch for {there.name}: expected {wanted}, found sha256:{content.sha256}")
        version = str(row.get("version") or _version_of(there.name))
        return Fetched(
            name=name,
            version=version,
            file=there,
            sha256=content.sha256,
            direct="archive" in row,
            local=path is not None,
        )

    def _best(self, wheels: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """Return the wheel that fits the base best."""
        ranks = {tag: rank for rank, tag in enumerate(self.tags)}

        def rank(row: Mapping[str, Any]) -> int:
            name = row.get("name") or unquote((row.get("url") or row["path"]).rsplit("/", 1)[-1])
            tags = parse_wheel_filename(name)[3]
            return min((ranks[str(tag)] for tag in tags if str(tag) in ranks), default=len(ranks))

        found = min(wheels, key=rank, default=None)
        return found if found is not None and rank(found) < len(ranks) else None

    def _download(self, address: str, sha256: str) -> Path:
        """Return a file of the cache, by its hash."""
        name = _file_name(address)
        self._files.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = self.folder / f"download-{abs(hash(address))}" / name
        draft.parent.mkdir(exist_ok=True)
        found = self._client.download(address, draft, sha256=sha256).sha256
        target = self._files / found / name
        target.parent.mkdir(parents=True, exist_ok=True)
        self._moved_near(draft, target).replace(target)
        return target

    def _moved_near(self, draft: Path, target: Path) -> Path:
        """Return a copy of a file on the target's own disk: from there it appears at once."""
        near = target.with_name(f".{target.name}.{os.getpid()}")
        with draft.open("rb") as source, near.open("wb") as copy:
            while block := source.read(1 << 20):
                copy.write(block)
        draft.unlink()
        return near

    def _run(self, *words: str, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        command = (find_uv_bin(), *words)
        return subprocess.run(
            command, cwd=self._home, env=dict(environment), capture_output=True, text=True, check=False
        )


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What an installation changes: names that go; and name to version of what comes, ``""`` where uv says none."""

    removed: Sequence[str]
    added: Mapping[str, str]


def _unknown(folder: Path) -> Message:
    raise LockError(f"{folder.name} says what it requires only when it is built")


def _platform(base: ExtendedBase) -> str:
    levels = _LEVELS.get(base.machine)
    major, _, minor = base.glibc.partition(".")
    if levels is None or major != "2":
        raise LockError(f"uv knows no platform with {base.machine} and glibc {base.glibc}")
    level = max((each for each in levels if each <= int(minor)), default=levels[0])
    return f"{base.machine}-manylinux_2_{level}"


def _table(found: Message) -> str:
    """Return what uv reads of a distribution's metadata instead of a build."""
    requires, extras = found.get_all("Requires-Dist") or [], found.get_all("Provides-Extra") or []
    lines = [
        "[[dependency-metadata]]",
        f"name = {_text(found['Name'])}",
        f"version = {_text(found['Version'])}",
        f"requires-dist = [{', '.join(map(_text, requires))}]",
        f"provides-extra = [{', '.join(map(_text, extras))}]",
    ]
    if python := found["Requires-Python"]:
        lines.append(f"requires-python = {_text(python)}")
    return "\n".join(["", *lines])


def _file_name(address: str) -> str:
    """Return the name of the file at an address: an index may write a slash in another way, and means no folder."""
    return PurePosixPath(unquote(urlsplit(address).path)).name or "file"


def _text(value: object) -> str:
    """Return a text of others as TOML has it."""
    plain = "".join(each for each in str(value) if each.isprintable())
    return json.dumps(plain, ensure_ascii=False)


def _pairs(words: Sequence[str]) -> list[tuple[str, str]]:
    return list(pairwise(words))


def _lines_of(words: Sequence[str]) -> list[str]:
    """Return the lines of requirements among the words of an installation, without their notes."""
    files = [Path(second) for first, second in _pairs(words) if first == "-r" and second not in _projects_in(words)]
    texts = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    values = [second for first, second in _pairs(words) if first in _PAIRS]
    texts += [word for word in words if not word.startswith("-") and word not in values]
    return [text for text in (re.sub(r"(^|\s+)#.*$", "", line).strip() for line in texts) if text]


def _hash_of(file: Path, kind: str) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, kind).hexdigest()


def _hashes_in(lines: Sequence[str]) -> dict[str, set[tuple[str, str]]]:
    """Return the hashes that lines have, kind and value, by the distribution's name."""
    found: dict[str, set[tuple[str, str]]] = {}
    for line in lines:
        given = set(re.findall(r"--hash[= ](sha256|sha384|sha512):([0-9a-f]+)", line))
        if given:
            found.setdefault(name_in(line), set()).update(given)
    return found


def name_in(line: str) -> str:
    """Return the name of the distribution that a line asks for, as indexes write it."""
    if re.match(r"[A-Za-z0-9][\w.-]*\s*(\[[^\]]*\]\s*)?(@|[=<>!~;\s]|$)", line):
        return canonicalize_name(re.match(r"[\w.-]+", line).group())  # type: ignore[union-attr]
    file = unquote(re.split(r"[\s;#\[?]", line, maxsplit=1)[0].rsplit("/", 1)[-1])
    return canonicalize_name(re.split(r"-\d", file)[0])


def _version_of(file: str) -> str:
    found = re.match(r".+?-(\d[^-]*?)(?:-.*\.whl|\.tar\.\w+|\.tgz|\.zip)$", file)
    return found.group(1) if found else "0"


def _without_file(name: str, row: Mapping[str, Any], folder: Path) -> Fetched | None:
    """Return a row of a lock that is a folder or a repository; ``None`` for one with files."""
    place, source = row.get("directory"), row.get("vcs")
    version = str(row.get("version", ""))
    if place:
        path = Path(os.path.normpath(folder / place["path"]))
        return Fetched(name=name, version=version, file=path, sha256="", direct=True, local=True)
    if source:
        inner = f"#subdirectory={source['subdirectory']}" if source.get("subdirectory") else ""
        address = source.get("url") or Path(os.path.normpath(folder / source["path"])).as_uri()
        repository = f"{source['type']}+{address}@{source['commit-id']}{inner}"
        return Fetched(
            name=name, version=version, file=folder, sha256="", direct=True, local=True, repository=repository
        )
    return None


def _limits_in(words: Sequence[str]) -> list[str]:
    """Return the words that name files of what is left out or overridden."""
    rows = [(first, second) for first, second in _pairs(words) if first in ("--excludes", "--overrides")]
    return [word for row in rows for word in row]


def _is_folder(line: str) -> bool:
    """Whether a line names a folder of this machine."""
    found = re.search(r"(?:^|@ *)(file:[^\s;\[#]+)", line)
    path = local_path(found.group(1)) if found else None
    return path is not None and path.is_dir()


def _projects_in(words: Sequence[str]) -> list[str]:
    """Return the words that name files of projects and scripts, and what of them is wanted."""
    found: list[str] = []
    for first, second in _pairs(words):
        if first == "-r" and Path(second).suffix in (".toml", ".py"):
            found.append(second)
        elif first in ("--extra", "--group"):
            found += (first, second)
    return found


def _settings_in(given: Mapping[str, str]) -> list[Path]:
    """Return the file of uv's settings that variables name: its one file, or else that of a system."""
    if given.get("UV_CONFIG_FILE"):
        return [Path(given["UV_CONFIG_FILE"])]
    files = [Path(each, "uv", "uv.toml") for each in given.get("XDG_CONFIG_DIRS", "").split(os.pathsep) if each]
    return [file for file in files if file.is_file()][:1]


def _addresses_in(given: Mapping[str, str]) -> list[str]:
    """Return the addresses of indexes and pages in uv's settings, which may have a login.

    Args:
        given: Variables of uv: they name the settings and the project, and may have an index's login.
    """
    project = Path(given.get("UV_PROJECT", "."))
    found: list[str] = []
    for file in (*_settings_in(given), project / "uv.toml", project / "pyproject.toml"):
        table = tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        table = table.get("tool", {}).get("uv", {}) if file.name == "pyproject.toml" else table
        found += table.get("find-links", ())
        for row in table.get("index", ()):
            name = re.sub(r"[^A-Z0-9]", "_", str(row.get("name", "")).upper())
            user, password = (given.get(f"UV_INDEX_{name}_{each}", "") for each in ("USERNAME", "PASSWORD"))
            login = ":".join(quote(each, safe="") for each in (user, password) if each)
            address = str(row.get("url", ""))
            found.append(address.replace("://", f"://{login}@", 1) if login else address)
    return found


def _whole_login(address: str, login: str) -> str:
    """Return a login with the password that the user's keyring has for it, as uv asks for it."""
    program = shutil.which("keyring")
    if ":" in login or not program:
        return login
    words = (program, "get", address, unquote(login))
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    return f"{login}:{quote(done.stdout.strip(), safe='')}" if done.returncode == 0 else login


def _with_login(address: str, lines: Sequence[str]) -> str:
    """Return an address with the login that an index of its host has; a file's own address has none."""
    parts = urlsplit(address)
    for line in lines:
        for scheme, login, host in re.findall(r"(\w+)://([^/@\s]+)@([^/\s]+)", os.path.expandvars(line)):
            if (scheme.removeprefix("git+"), host) == (parts.scheme, parts.netloc):
                login = _whole_login(f"{scheme}://{host}", login)
                return urljoin(address, f"//{login}@{host}{parts.path}") + (f"?{parts.query}" if parts.query else "")
    return address
