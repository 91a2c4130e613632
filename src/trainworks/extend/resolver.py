"""uv on this machine, for the Python of a base image.

It has this machine's settings, and runs no code of others.

Builds are the one way by which uv runs code of others. Its Python is a trap: in any other folder
than our own, that is in the folder of a project which would be built, it notes the folder and ends
before anything is imported. What was noted is built elsewhere, and uv is asked again with the
metadata of that.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from email.message import Message
from itertools import pairwise, starmap
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any
from urllib.parse import quote, unquote, urljoin, urlsplit
from uuid import uuid4

from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

from trainworks.errors import LockError
from trainworks.extend.described import Environment
from trainworks.extend.requirements import ExtendedBase
from trainworks.host.cache import cache_folder
from trainworks.host.downloads import Client, content_of
from trainworks.host.pip import local_path
from trainworks.host.uv import uv_program
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

_FOR_FILES = ("--reinstall-package", "--require-hashes")
"""Options of an installation that no lock has: which of its files are taken,
and how they are held to hashes.
"""

NONE: Mapping[str, str] = MappingProxyType({})

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
        repository: Of a git repository, which has no file: its address with the
            commit, as uv names it.
        address: Of a file that a requirement names, as uv was told it; it may have a login.
        uploaded: When its index got it; ``None`` where it does not say so.
    """

    name: str
    version: str
    file: Path
    sha256: str
    direct: bool
    local: bool
    repository: str = ""
    address: str = field(default="", repr=False)
    uploaded: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class Lock:
    """What one resolution adds to an environment.

    Attributes:
        rows: Packages of uv's own lock (PEP 751).
        folder: Where it lies: paths are seen from there.
        lines: What may have a login for an address: the user's lines, and uv's settings.
        hashes: Those of the user's lines, kind and value, by the distribution's name.
    """

    rows: Sequence[Mapping[str, Any]]
    folder: Path
    lines: Sequence[str] = field(repr=False)
    hashes: Mapping[str, set[tuple[str, str]]]


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
        self._run(
            "venv",
            "--quiet",
            "--no-project",
            "--python",
            sys.executable,
            str(trap),
            environment=os.environ,
        )
        (packages,) = trap.glob("lib/python*/site-packages")
        text = _TRAP.format(home=str(self._home.resolve()), notes=str(self._notes))
        (packages / "trainworks_trap.py").write_text(text, encoding="utf-8")
        (packages / "trainworks_trap.pth").write_text("import trainworks_trap\n", encoding="utf-8")
        version = base.full_version or f"{base.version}.0"
        self.words: tuple[str, ...] = (
            "--python",
            str(trap / "bin" / "python"),
            "--python-version",
            version,
        )
        self.words += ("--python-platform", _platform(base))
        python = f"cp{base.version.replace('.', '')}"
        machine, _, level = _platform(base).partition("-")
        self._best_tag = f"{python}-{python}-{level}_{machine}"
        self.tags = [
            str(tag)
            for tag in wheel_tags(python=base.version, machine=base.machine, glibc=base.glibc)
        ]

    def environment_of(self, given: Mapping[str, str]) -> dict[str, str]:
        """Return variables with what is known of projects that cannot say it without a build."""
        own = {
            **given,
            "UV_CACHE_DIR": str(self.cache),
            "UV_PYTHON_DOWNLOADS": "never",
            "UV_NO_PROGRESS": "1",
        }
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
            noted = (
                self._notes.read_text(encoding="utf-8").splitlines()
                if self._notes.is_file()
                else []
            )
            if done.returncode == 0:
                return done
            new = [
                Path(each)
                for each in dict.fromkeys(noted)
                if each not in seen and Path(each).is_dir()
            ]
            if not new:
                self.log = done.stderr
                return done
            seen.update(map(str, new))
            self._known += [_table(self.learn(each)) for each in new]

    def lock(
        self,
        environment: Environment,
        words: Sequence[str],
        given: Mapping[str, str],
        before: Mapping[str, str] = NONE,
    ) -> Lock | None:
        """Resolve an installation to a lock.

        ``None`` where uv refuses it, whose words are in ``log``.

        What is installed stays as it is where it can, and so does what an older lock has.

        Args:
            environment: Where it is installed.
            words: Those of ``uv pip install``.
            given: Variables of uv.
            before: Versions of an older lock, by name.
        """
        there: dict[str, str] = {
            canonicalize_name(row.metadata["Name"]): row.version for row in environment
        }
        again = [word.partition("=")[2] for word in words if word.startswith(_FOR_FILES[0])]
        preferred = {
            name: version for name, version in {**there, **before}.items() if name not in again
        }
        rather = list(starmap(_row, preferred.items())) or ["packages = []"]
        file = Path(self.file("pylock.toml", [_HEAD, *rather]))
        archives = any(word.startswith("--no-binary") for word in words)
        releases = environment.releases(
            file.with_name("releases"), self._best_tag, without=again, archives=archives
        )
        # No index is asked for what is kept: the version is certain, and an index without hashes
        # would have to send it.
        files = {
            canonicalize_name(path.name.split("-")[0]): path for path in sorted(releases.iterdir())
        }
        kept = [
            f"{name} @ {path.as_uri()}" for name, path in files.items() if name in self._base.kept
        ]
        form = ("--format", "pylock.toml", "--output-file", str(file), "--no-header", "--quiet")
        limits = ("-c", self.file("kept.txt", kept)) if kept else ()
        own = (
            "--no-build-isolation",
            "--find-links",
            str(releases),
            *limits,
            *self._sources_of(words),
        )
        done = self.ask("pip", "compile", *self.words, *form, *own, environment=given)
        if done.returncode != 0:
            return None
        rows = tomllib.loads(file.read_text(encoding="utf-8")).get("packages", ())
        of_base = {each for each in self._base.kept if each in files}
        rows = [
            row
            for row in rows
            if row["name"] in again or (row["name"] not in of_base and _is_new(row, there))
        ]
        lines = _lines_of(words)
        hashes = _hashes_in(lines)
        bare = [row["name"] for row in rows if row["name"] not in hashes]
        if bare and _FOR_FILES[1] in words:
            self.log = f"error: --require-hashes: no line has a hash of {', '.join(bare)}"
            return None
        return Lock(
            rows=rows, folder=file.parent, lines=[*lines, *_addresses_in(given)], hashes=hashes
        )

    def _sources_of(self, words: Sequence[str]) -> list[str]:
        """Return the words of an installation for a lock, whose requirements are files."""
        found: list[str] = []
        asked: list[str] = []
        rest = iter(words)
        for word in rest:
            if word == "-r":
                found.append(next(rest))
            elif word in _PAIRS:
                found += (word, next(rest))
            elif not word.startswith("-"):
                asked.append(word)
            elif not word.startswith(_FOR_FILES):
                found.append(word)
        return [*found, self.file("asked.txt", asked)]

    def selected(
        self, folder: Path, words: Sequence[str], given: Mapping[str, str]
    ) -> dict[str, str] | None:
        """Return the versions that uv takes of a lock of the user's own.

        ``None`` where it cannot use it.

        Args:
            folder: An empty one.
            words: They name the lock.
            given: Variables of uv.
        """
        form = (
            "--target",
            str(folder),
            "--dry-run",
            "--output-format",
            "json",
            "--no-build-isolation",
        )
        done = self.ask("pip", "install", *self.words, *form, *words, environment=given)
        rows = json.loads(done.stdout)["changes"] if done.returncode == 0 else ()
        return (
            {row["name"]: row.get("version", "") for row in rows} if done.returncode == 0 else None
        )

    def fetch(self, lock: Lock) -> list[Fetched]:
        """Download the file of each package of a lock, the one that the base would install.

        Raises:
            LockError: None fits, a hash is another one, or a server does not answer.
        """
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return list(pool.map(lambda row: self._fetch(row, lock), lock.rows))

    def known_file(self, sha256: str, name: str = "") -> Path | None:
        """Return a file that was downloaded before, under this name or any."""
        found = [path for path in (self._files / sha256).glob("[!.]*") if name in ("", path.name)]
        return found[0] if found and content_of(found[0]).sha256 == sha256 else None

    def _fetch(self, row: Mapping[str, Any], lock: Lock) -> Fetched:
        """Return the file of a package."""
        name, folder = canonicalize_name(row["name"]), lock.folder
        if (without := _without_file(name, row, folder)) is not None:
            return without
        file = row.get("archive") or self._best(row.get("wheels", ())) or row.get("sdist")
        if file is None:
            raise LockError(
                f"{name} {row.get('version', '')} has no file"
                f" for Python {self._base.version} of the base"
            )
        address = file.get("url") or str(folder / file["path"])
        if not file.get("url"):
            address = Path(os.path.normpath(address)).as_uri()
        expected = file.get("hashes", {}).get("sha256", "")
        path = local_path(address)
        if path is not None:
            there, found = path, content_of(path).sha256
        elif expected and (known := self.known_file(expected, _file_name(address))):
            there, found = known, expected
        else:
            there, found = self._download(_with_login(address, lock.lines), expected)
        given = lock.hashes.get(name, set())
        fits = not given or any(_hash_of(there, kind) == value for kind, value in given)
        if (expected and found != expected) or not fits:
            wanted = (
                ", ".join(f"{kind}:{value}" for kind, value in sorted(given))
                or f"sha256:{expected}"
            )
            raise LockError(
                f"Hash mismatch for {there.name}: expected {wanted}, found sha256:{found}"
            )
        version = str(row.get("version") or _version_of(there.name))
        return Fetched(
            name=name,
            version=version,
            file=there,
            sha256=found,
            direct="archive" in row,
            local=path is not None,
            address=address if "archive" in row else "",
            uploaded=file.get("upload-time"),
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

    def _download(self, address: str, sha256: str) -> tuple[Path, str]:
        """Return a file of the cache and its hash, by which it is found there."""
        name = _file_name(address)
        # Beside its place: from there it appears at once.
        draft = self._files / f".{uuid4().hex}" / name
        draft.parent.mkdir(parents=True, mode=0o700)
        try:
            found = self._client.download(address, draft, sha256=sha256).sha256
            target = self._files / found / name
            target.parent.mkdir(parents=True, exist_ok=True)
            draft.replace(target)
        finally:
            shutil.rmtree(draft.parent, ignore_errors=True)
        return target, found

    def _run(self, *words: str, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        command = (uv_program(), *words)
        return subprocess.run(
            command,
            cwd=self._home,
            env=dict(environment),
            capture_output=True,
            text=True,
            check=False,
        )


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
    """Return the name of the file at an address: an index may write a slash in
    another way, and means no folder.
    """
    return PurePosixPath(unquote(urlsplit(address).path)).name or "file"


def _text(value: object) -> str:
    """Return a text of others as TOML has it."""
    plain = "".join(each for each in str(value) if each.isprintable())
    return json.dumps(plain, ensure_ascii=False)


def _pairs(words: Sequence[str]) -> list[tuple[str, str]]:
    return list(pairwise(words))


def _lines_of(words: Sequence[str]) -> list[str]:
    """Return the lines of requirements among the words of an installation, without their notes."""
    named = [Path(second) for first, second in _pairs(words) if first == "-r"]
    files = [file for file in named if file.suffix not in (".toml", ".py")]
    texts = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    values = [second for first, second in _pairs(words) if first in _PAIRS]
    texts += [word for word in words if not word.startswith("-") and word not in values]
    return [text for text in (re.sub(r"(^|\s+)#.*$", "", line).strip() for line in texts) if text]


_HEAD = 'lock-version = "1.0"\ncreated-by = "trainworks"\n'


def _row(name: str, version: str) -> str:
    """Return what uv would rather have, as a package of a lock that is there already."""
    return f"[[packages]]\nname = {_text(name)}\nversion = {_text(version)}\n"


def _is_new(row: Mapping[str, Any], there: Mapping[str, str]) -> bool:
    """Whether a package of a lock is not what is there: another version, or
    what an address or a path names.
    """
    if not {"archive", "directory", "vcs"}.isdisjoint(row):
        return True
    have = there.get(canonicalize_name(row["name"]), "")
    return not have or Version(have) != Version(str(row["version"]))


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
            name=name,
            version=version,
            file=folder,
            sha256="",
            direct=True,
            local=True,
            repository=repository,
        )
    return None


def _settings_in(given: Mapping[str, str]) -> list[Path]:
    """Return the file of uv's settings that variables name: its one file, or
    else that of a system.
    """
    if given.get("UV_CONFIG_FILE"):
        return [Path(given["UV_CONFIG_FILE"])]
    files = [
        Path(each, "uv", "uv.toml")
        for each in given.get("XDG_CONFIG_DIRS", "").split(os.pathsep)
        if each
    ]
    return [file for file in files if file.is_file()][:1]


def _tables_in(given: Mapping[str, str]) -> Iterator[Mapping[str, Any]]:
    """Yield uv's settings that variables name: those of a file or a system, and
    those of the project.
    """
    project = Path(given.get("UV_PROJECT", "."))
    for file in (*_settings_in(given), project / "uv.toml", project / "pyproject.toml"):
        table = tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        yield table.get("tool", {}).get("uv", {}) if file.name == "pyproject.toml" else table


def indexes_in(given: Mapping[str, str]) -> list[str]:
    """Return the addresses of indexes in uv's settings, with the login that a variable has for one.

    Args:
        given: Variables of uv: they name the settings and the project, and may
            have an index's login.
    """
    found: list[str] = []
    for row in [row for table in _tables_in(given) for row in table.get("index", ())]:
        name = re.sub(r"[^A-Z0-9]", "_", str(row.get("name", "")).upper())
        user, password = (
            given.get(f"UV_INDEX_{name}_{each}", "") for each in ("USERNAME", "PASSWORD")
        )
        login = ":".join(quote(each, safe="") for each in (user, password) if each)
        address = str(row.get("url", ""))
        found.append(address.replace("://", f"://{login}@", 1) if login else address)
    return found


def _addresses_in(given: Mapping[str, str]) -> list[str]:
    """Return the addresses in uv's settings that may have a login: of indexes, and of pages."""
    return [
        *indexes_in(given),
        *(link for table in _tables_in(given) for link in table.get("find-links", ())),
    ]


def _whole_login(address: str, login: str) -> str:
    """Return a login with the password that the user's keyring has for it, as uv asks for it."""
    program = shutil.which("keyring")
    if ":" in login or not program:
        return login
    words = (program, "get", address, unquote(login))
    done = subprocess.run(
        words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    return f"{login}:{quote(done.stdout.strip(), safe='')}" if done.returncode == 0 else login


def _with_login(address: str, lines: Sequence[str]) -> str:
    """Return an address with the login that an index of its host has.

    A file's own address has none.
    """
    parts = urlsplit(address)
    for line in lines:
        for scheme, login, host in re.findall(
            r"(\w+)://([^/@\s]+)@([^/\s]+)", os.path.expandvars(line)
        ):
            if (scheme.removeprefix("git+"), host) == (parts.scheme, parts.netloc):
                login = _whole_login(f"{scheme}://{host}", login)
                return urljoin(address, f"//{login}@{host}{parts.path}") + (
                    f"?{parts.query}" if parts.query else ""
                )
    return address
