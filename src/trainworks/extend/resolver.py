"""uv on this machine, which resolves for the Python of a base image.

uv has this machine's settings, and must not run third-party code. It would do so only to build a
project. So its Python is a trap: when it is started in the folder of a project, it writes the
folder to a file and ends before anything is imported. The project is then built in the base image,
and uv is called again with the metadata of the wheel.
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
from itertools import pairwise
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
from trainworks.host.downloads import Client, hash_file
from trainworks.host.pip import find_local_path
from trainworks.host.uv import find_uv
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

_REINSTALL = "--reinstall-package"
_REQUIRE_HASHES = "--require-hashes"
"""Options of an installation that a lock does not have: they are about its files."""

NONE: Mapping[str, str] = MappingProxyType({})

_PAIRS = ("-r", "-c", "--excludes", "--overrides", "--find-links", "--target", "--extra", "--group")
_AT_ONCE = 8

Learn = Callable[[Path], Message]
"""Returns the metadata of the project in a folder, whose build the trap has stopped."""


@dataclass(frozen=True, kw_only=True)
class FetchedFile:
    """A file that was downloaded, or lies on this machine.

    Attributes:
        name: The distribution's name, as indexes write it.
        version: The distribution's version.
        file: A wheel, a source archive, or the folder of a project.
        sha256: The file's hash; ``""`` for a folder.
        direct: Whether a requirement names its address or path.
        local: Whether the file was on this machine before.
        repository: Address and commit of a git repository, which has no file, in uv's form:
            ``git+ADDRESS@COMMIT``.
        address: The address in the user's requirement, if ``direct``; may have a login.
        uploaded: When the index received the file; ``None`` if the index does not say.
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
    """The packages that one resolution adds to an environment.

    Attributes:
        rows: Packages of uv's own lock (PEP 751).
        folder: The lock's folder: paths in ``rows`` are relative to it.
        lines: Texts that may have a login for an address: the user's lines, and uv's settings.
        hashes: Hashes in the user's lines, kind and value, by the distribution's name.
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
            base: The image that uv resolves for.
            folder: A private folder.
            client: Downloads files.
            fresh: Whether earlier downloads are ignored.
        """
        self._base = base
        self._client = client
        self.folder = folder
        self.learn: Learn = _unknown
        self.log = ""
        """The error output of uv's failed calls."""
        self.cache: Path
        """uv's own cache: uv may build the projects that it unpacks there."""
        self._home = folder / "home"
        self._notes = folder / "noted"
        self._home.mkdir()
        caches = folder / "cache" if fresh else cache_folder(os.environ)
        self.cache = caches / "uv"
        self._files = caches / "files"
        self._metadata_tables: list[str] = []
        self._calls = 0

        python = self._make_trap(folder / "trap")
        platform = _platform(base)
        self.words: tuple[str, ...] = (
            "--python",
            str(python),
            "--python-version",
            base.full_version or f"{base.version}.0",
            "--python-platform",
            platform,
        )
        interpreter_tag = f"cp{base.version.replace('.', '')}"
        machine, _, level = platform.partition("-")
        self._best_tag = f"{interpreter_tag}-{interpreter_tag}-{level}_{machine}"
        tags = wheel_tags(python=base.version, machine=base.machine, glibc=base.glibc)
        self.tags = [str(tag) for tag in tags]

    def _make_trap(self, folder: Path) -> Path:
        """Make the Python that starts no build; return its path."""
        words = ("venv", "--quiet", "--no-project", "--python", sys.executable, str(folder))
        self._run(*words, environment=os.environ)
        (packages,) = folder.glob("lib/python*/site-packages")
        text = _TRAP.format(home=str(self._home.resolve()), notes=str(self._notes))
        (packages / "trainworks_trap.py").write_text(text, encoding="utf-8")
        (packages / "trainworks_trap.pth").write_text("import trainworks_trap\n", encoding="utf-8")
        return folder / "bin" / "python"

    def environment_of(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Return uv's variables, with a settings file that has the metadata of built projects."""
        environment = {
            **variables,
            "UV_CACHE_DIR": str(self.cache),
            "UV_PYTHON_DOWNLOADS": "never",
            "UV_NO_PROGRESS": "1",
        }
        if not self._metadata_tables:
            return environment

        user_settings = [path.read_text(encoding="utf-8") for path in _settings_in(variables)]
        file = self.file("uv/uv.toml", ["".join(user_settings), *self._metadata_tables])
        if variables.get("UV_CONFIG_FILE"):
            environment["UV_CONFIG_FILE"] = file
        environment["XDG_CONFIG_DIRS"] = str(Path(file).parent.parent)
        return environment

    def file(self, name: str, lines: Sequence[str]) -> str:
        """Write a file for a call of uv, in a new folder, and return its path."""
        self._calls += 1
        path = self.folder / f"call-{self._calls}" / name
        path.parent.mkdir(parents=True)
        path.touch(mode=0o600)
        text = "".join(f"{line}\n" for line in lines)
        path.write_text(text, encoding="utf-8")
        return str(path)

    def ask(self, *words: str, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        """Call uv, and again with the metadata of each project that it tried to build."""
        read_projects: set[Path] = set()
        while True:
            self._notes.unlink(missing_ok=True)
            result = self._run(*words, environment=self.environment_of(environment))
            if result.returncode == 0:
                return result

            projects = [path for path in self._noted_projects() if path not in read_projects]
            if not projects:
                self.log = result.stderr
                return result
            read_projects.update(projects)
            for project in projects:
                self._metadata_tables.append(_table(self.learn(project)))

    def _noted_projects(self) -> list[Path]:
        """Return the folders of the projects that uv tried to build in the last call."""
        if not self._notes.is_file():
            return []
        lines = self._notes.read_text(encoding="utf-8").splitlines()
        folders = [Path(line) for line in dict.fromkeys(lines)]
        return [folder for folder in folders if folder.is_dir()]

    def lock(
        self,
        environment: Environment,
        words: Sequence[str],
        variables: Mapping[str, str],
        before: Mapping[str, str] = NONE,
    ) -> Lock | None:
        """Resolve an installation to a lock.

        Installed versions stay where they can, and so do the versions of an older lock.

        Args:
            environment: Where the packages are installed.
            words: The words of ``uv pip install``.
            variables: Variables of uv.
            before: Versions of an older lock, by name.

        Returns:
            ``None`` where uv refuses the installation; ``log`` has its reason.
        """
        installed: dict[str, str] = {}
        for distribution in environment:
            installed[canonicalize_name(distribution.metadata["Name"])] = distribution.version
        reinstalled = [word.partition("=")[2] for word in words if word.startswith(_REINSTALL)]
        file = self._preferences({**installed, **before}, reinstalled)
        has_archives = any(word.startswith("--no-binary") for word in words)
        releases = environment.releases(
            file.with_name("releases"), self._best_tag, without=reinstalled, archives=has_archives
        )
        kept_files = {}
        for path in sorted(releases.iterdir()):
            name = canonicalize_name(path.name.split("-")[0])
            if name in self._base.kept:
                kept_files[name] = path

        command = ["pip", "compile", *self.words]
        command += ["--format", "pylock.toml", "--output-file", str(file), "--no-header", "--quiet"]
        command += ["--no-build-isolation", "--find-links", str(releases)]
        if kept_files:
            # No index is asked for a kept package: its version is certain, and an index without
            # hashes would have to send the file.
            lines = [f"{name} @ {path.as_uri()}" for name, path in kept_files.items()]
            command += ["-c", self.file("kept.txt", lines)]
        command += self._sources_of(words)
        if self.ask(*command, environment=variables).returncode != 0:
            return None

        rows = []
        for row in tomllib.loads(file.read_text(encoding="utf-8")).get("packages", ()):
            is_kept = row["name"] in kept_files
            if row["name"] in reinstalled or (not is_kept and _is_new(row, installed)):
                rows.append(row)
        return self._checked_lock(rows, file.parent, words, variables)

    def _preferences(self, versions: Mapping[str, str], reinstalled: Sequence[str]) -> Path:
        """Write a lock with the versions that uv prefers, and return its path."""
        packages = [
            _row(name, version) for name, version in versions.items() if name not in reinstalled
        ]
        return Path(self.file("pylock.toml", [_HEAD, *(packages or ["packages = []"])]))

    def _checked_lock(
        self,
        rows: Sequence[Mapping[str, Any]],
        folder: Path,
        words: Sequence[str],
        variables: Mapping[str, str],
    ) -> Lock | None:
        """Return a lock of these rows; ``None`` where a package lacks a required hash."""
        lines = _lines_of(words)
        hashes = _hashes_in(lines)
        unhashed = [row["name"] for row in rows if row["name"] not in hashes]
        if unhashed and _REQUIRE_HASHES in words:
            self.log = f"error: --require-hashes: no line has a hash of {', '.join(unhashed)}"
            return None
        lines += _addresses_in(variables)
        return Lock(rows=rows, folder=folder, lines=lines, hashes=hashes)

    def _sources_of(self, words: Sequence[str]) -> list[str]:
        """Return the words of ``uv pip compile`` for those of an installation.

        A compilation reads its requirements from files, and has no ``-r``.
        """
        compile_words: list[str] = []
        requirements: list[str] = []
        remaining = iter(words)
        for word in remaining:
            if word == "-r":
                compile_words.append(next(remaining))
            elif word in _PAIRS:
                compile_words += (word, next(remaining))
            elif not word.startswith("-"):
                requirements.append(word)
            elif not word.startswith((_REINSTALL, _REQUIRE_HASHES)):
                compile_words.append(word)
        return [*compile_words, self.file("asked.txt", requirements)]

    def selected(
        self, folder: Path, words: Sequence[str], variables: Mapping[str, str]
    ) -> dict[str, str] | None:
        """Return the versions that uv selects from a lock of the user.

        Args:
            folder: An empty folder.
            words: They name the lock.
            variables: Variables of uv.

        Returns:
            ``None`` where uv cannot use the lock.
        """
        options = ["--target", str(folder), "--dry-run", "--output-format", "json"]
        options.append("--no-build-isolation")
        command = ("pip", "install", *self.words, *options, *words)
        result = self.ask(*command, environment=variables)
        if result.returncode != 0:
            return None
        changes = json.loads(result.stdout)["changes"]
        return {change["name"]: change.get("version", "") for change in changes}

    def fetch(self, lock: Lock) -> list[FetchedFile]:
        """Download the file of each package of a lock, the one that the base would install.

        Raises:
            LockError: None fits, a hash is another one, or a server does not answer.
        """
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return list(pool.map(lambda row: self._fetch(row, lock), lock.rows))

    def known_file(self, sha256: str, name: str = "") -> Path | None:
        """Return an earlier download with this hash; of this name, if one is given."""
        paths = [path for path in (self._files / sha256).glob("[!.]*") if name in ("", path.name)]
        if paths and hash_file(paths[0]).sha256 == sha256:
            return paths[0]
        return None

    def _fetch(self, row: Mapping[str, Any], lock: Lock) -> FetchedFile:
        """Return the file of a package."""
        name = canonicalize_name(row["name"])
        folder_or_repository = _without_file(name, row, lock.folder)
        if folder_or_repository is not None:
            return folder_or_repository

        record = row.get("archive") or self._best(row.get("wheels", ())) or row.get("sdist")
        if record is None:
            raise LockError(
                f"{name} {row.get('version', '')} has no file"
                f" for Python {self._base.version} of the base"
            )
        address = record.get("url")
        if not address:
            address = Path(os.path.normpath(lock.folder / record["path"])).as_uri()
        expected = record.get("hashes", {}).get("sha256", "")
        file, sha256 = self._file_at(address, expected, lock)
        _check_hashes(file, sha256, expected, lock.hashes.get(name, set()))

        is_direct = "archive" in row
        return FetchedFile(
            name=name,
            version=str(row.get("version") or _version_of(file.name)),
            file=file,
            sha256=sha256,
            direct=is_direct,
            local=find_local_path(address) is not None,
            address=address if is_direct else "",
            uploaded=record.get("upload-time"),
        )

    def _file_at(self, address: str, expected: str, lock: Lock) -> tuple[Path, str]:
        """Return the file at an address, and its hash.

        Args:
            address: A local file is not copied.
            expected: The hash in the lock; ``""`` if the lock has none.
            lock: Its lines may have a login for the address.
        """
        local_file = find_local_path(address)
        if local_file is not None:
            return local_file, hash_file(local_file).sha256
        if expected:
            earlier_download = self.known_file(expected, _file_name(address))
            if earlier_download is not None:
                return earlier_download, expected
        return self._download(_with_login(address, lock.lines), expected)

    def _best(self, wheels: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """Return the wheel that fits the base best."""
        rank_by_tag = {tag: rank for rank, tag in enumerate(self.tags)}
        best_wheel = None
        best_rank = len(rank_by_tag)
        for wheel in wheels:
            name = wheel.get("name")
            if not name:
                address = wheel.get("url") or wheel["path"]
                name = unquote(address.rsplit("/", 1)[-1])
            for tag in parse_wheel_filename(name)[3]:
                rank = rank_by_tag.get(str(tag), best_rank)
                if rank < best_rank:
                    best_wheel, best_rank = wheel, rank
        return best_wheel

    def _download(self, address: str, sha256: str) -> tuple[Path, str]:
        """Download a file into the cache; return its path there and its hash."""
        name = _file_name(address)
        # The draft lies beside its place, so that the complete file appears at once.
        draft = self._files / f".{uuid4().hex}" / name
        draft.parent.mkdir(parents=True, mode=0o700)
        try:
            actual_sha256 = self._client.download(address, draft, sha256=sha256).sha256
            target = self._files / actual_sha256 / name
            target.parent.mkdir(parents=True, exist_ok=True)
            draft.replace(target)
        finally:
            shutil.rmtree(draft.parent, ignore_errors=True)
        return target, actual_sha256

    def _run(self, *words: str, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        """Run uv in the resolver's own home folder, and return its end; a failure is not raised."""
        command = (find_uv(), *words)
        return subprocess.run(
            command,
            cwd=self._home,
            env=dict(environment),
            capture_output=True,
            text=True,
            check=False,
        )


def _check_hashes(
    file: Path, sha256: str, expected: str, line_hashes: set[tuple[str, str]]
) -> None:
    """Refuse a file with another hash than the lock's, or than any of a user's line.

    Args:
        file: The file.
        sha256: Its hash.
        expected: The hash in the lock; ``""`` if the lock has none.
        line_hashes: Kind and value of each hash in the user's line, one of which must match.
    """
    fits_line = not line_hashes
    for kind, value in line_hashes:
        if _hash_of(file, kind) == value:
            fits_line = True
    fits_lock = expected in ("", sha256)
    if fits_lock and fits_line:
        return
    expected_hashes = f"sha256:{expected}"
    if line_hashes:
        expected_hashes = ", ".join(f"{kind}:{value}" for kind, value in sorted(line_hashes))
    raise LockError(
        f"Hash mismatch for {file.name}: expected {expected_hashes}, found sha256:{sha256}"
    )


def _unknown(folder: Path) -> Message:
    raise LockError(f"{folder.name} says what it requires only when it is built")


def _platform(base: ExtendedBase) -> str:
    """Return uv's platform, such as ``x86_64-manylinux_2_34``."""
    levels = _LEVELS.get(base.machine)
    major, _, minor = base.glibc.partition(".")
    if levels is None or major != "2":
        raise LockError(f"uv knows no platform with {base.machine} and glibc {base.glibc}")
    fitting = [level for level in levels if level <= int(minor)]
    level = max(fitting, default=levels[0])
    return f"{base.machine}-manylinux_2_{level}"


def _table(metadata: Message) -> str:
    """Return a distribution's metadata as a table of ``uv.toml``, which spares uv a build."""
    requires = [_text(value) for value in metadata.get_all("Requires-Dist") or []]
    extras = [_text(value) for value in metadata.get_all("Provides-Extra") or []]
    lines = [
        "",
        "[[dependency-metadata]]",
        f"name = {_text(metadata['Name'])}",
        f"version = {_text(metadata['Version'])}",
        f"requires-dist = [{', '.join(requires)}]",
        f"provides-extra = [{', '.join(extras)}]",
    ]
    python = metadata["Requires-Python"]
    if python:
        lines.append(f"requires-python = {_text(python)}")
    return "\n".join(lines)


def _file_name(address: str) -> str:
    """Return the name of the file at an address.

    An index may quote a slash in the name: it does not mean a folder.
    """
    path = unquote(urlsplit(address).path)
    return PurePosixPath(path).name or "file"


def _text(value: object) -> str:
    """Return untrusted text as a TOML string."""
    printable = "".join(character for character in str(value) if character.isprintable())
    return json.dumps(printable, ensure_ascii=False)


def _lines_of(words: Sequence[str]) -> list[str]:
    """Return the requirement lines that an installation's words have or name, without comments."""
    lines: list[str] = []
    option_values: set[str] = set()
    for word, following in pairwise(words):
        if word in _PAIRS:
            option_values.add(following)
        file = Path(following)
        if word == "-r" and file.suffix not in (".toml", ".py"):
            lines += file.read_text(encoding="utf-8").splitlines()
    lines += [word for word in words if not word.startswith("-") and word not in option_values]

    bare_lines = [re.sub(r"(^|\s+)#.*$", "", line).strip() for line in lines]
    return [line for line in bare_lines if line]


_HEAD = 'lock-version = "1.0"\ncreated-by = "trainworks"\n'


def _row(name: str, version: str) -> str:
    """Return a package of a lock, which uv then prefers."""
    return f"[[packages]]\nname = {_text(name)}\nversion = {_text(version)}\n"


def _is_new(row: Mapping[str, Any], installed: Mapping[str, str]) -> bool:
    """Whether a lock's package has to be installed.

    A package with an address or a path always is new; another if its version is not installed.
    """
    if not {"archive", "directory", "vcs"}.isdisjoint(row):
        return True
    installed_version = installed.get(canonicalize_name(row["name"]), "")
    if not installed_version:
        return True
    return Version(installed_version) != Version(str(row["version"]))


def _hash_of(file: Path, kind: str) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, kind).hexdigest()


def _hashes_in(lines: Sequence[str]) -> dict[str, set[tuple[str, str]]]:
    """Return the hashes of lines, kind and value, by the distribution's name."""
    hashes: dict[str, set[tuple[str, str]]] = {}
    for line in lines:
        line_hashes = re.findall(r"--hash[= ](sha256|sha384|sha512):([0-9a-f]+)", line)
        if line_hashes:
            hashes.setdefault(name_in(line), set()).update(line_hashes)
    return hashes


def name_in(line: str) -> str:
    """Return the name of the distribution in a requirement line, as indexes write it.

    ``Torch[x]>=2``, ``torch(==2)`` and ``ADDRESS/torch-VERSION-py3-none-any.whl`` are ``torch``.
    """
    # A name, extras, and then a version, an address, a marker or the end of the requirement.
    if re.match(r"[A-Za-z0-9][\w.-]*\s*(\[[^\]]*\]\s*)?(@|[(=<>!~;\s]|$)", line):
        return canonicalize_name(re.match(r"[\w.-]+", line).group())  # type: ignore[union-attr]
    address = re.split(r"[\s;#\[?]", line, maxsplit=1)[0]
    file = unquote(address.rsplit("/", 1)[-1])
    return canonicalize_name(re.split(r"-\d", file)[0])


def _version_of(file: str) -> str:
    """Return the version in a file's name, such as ``pkg-1.0-py3-none-any.whl``; or ``"0"``."""
    match = re.match(r".+?-(\d[^-]*?)(?:-.*\.whl|\.tar\.\w+|\.tgz|\.zip)$", file)
    return match.group(1) if match else "0"


def _without_file(name: str, row: Mapping[str, Any], folder: Path) -> FetchedFile | None:
    """Return a lock's package that is a folder or a repository; ``None`` for one with files."""
    version = str(row.get("version", ""))
    directory = row.get("directory")
    if directory:
        path = Path(os.path.normpath(folder / directory["path"]))
        return FetchedFile(
            name=name, version=version, file=path, sha256="", direct=True, local=True
        )

    vcs = row.get("vcs")
    if not vcs:
        return None
    address = vcs.get("url")
    if not address:
        address = Path(os.path.normpath(folder / vcs["path"])).as_uri()
    repository = f"{vcs['type']}+{address}@{vcs['commit-id']}"
    if vcs.get("subdirectory"):
        repository += f"#subdirectory={vcs['subdirectory']}"
    return FetchedFile(
        name=name,
        version=version,
        file=folder,
        sha256="",
        direct=True,
        local=True,
        repository=repository,
    )


def _settings_in(variables: Mapping[str, str]) -> list[Path]:
    """Return the file of uv's settings that variables name, if any.

    ``UV_CONFIG_FILE`` wins over the first system file in ``XDG_CONFIG_DIRS``.
    """
    if variables.get("UV_CONFIG_FILE"):
        return [Path(variables["UV_CONFIG_FILE"])]
    for folder in variables.get("XDG_CONFIG_DIRS", "").split(os.pathsep):
        file = Path(folder, "uv", "uv.toml")
        if folder and file.is_file():
            return [file]
    return []


def _tables_in(variables: Mapping[str, str]) -> Iterator[Mapping[str, Any]]:
    """Yield uv's settings: those of the file that variables name, and those of the project."""
    project = Path(variables.get("UV_PROJECT", "."))
    for file in (*_settings_in(variables), project / "uv.toml", project / "pyproject.toml"):
        if not file.is_file():
            continue
        table = tomllib.loads(file.read_text(encoding="utf-8"))
        if file.name == "pyproject.toml":
            table = table.get("tool", {}).get("uv", {})
        yield table


def indexes_in(variables: Mapping[str, str]) -> list[str]:
    """Return the addresses of indexes in uv's settings, with their logins.

    Args:
        variables: Variables of uv: they name the settings and the project, and may
            have an index's login, such as ``UV_INDEX_INTERNAL_USERNAME``.
    """
    addresses: list[str] = []
    for table in _tables_in(variables):
        for index in table.get("index", ()):
            name = re.sub(r"[^A-Z0-9]", "_", str(index.get("name", "")).upper())
            user = variables.get(f"UV_INDEX_{name}_USERNAME", "")
            password = variables.get(f"UV_INDEX_{name}_PASSWORD", "")
            login = ":".join(quote(part, safe="") for part in (user, password) if part)
            address = str(index.get("url", ""))
            if login:
                address = address.replace("://", f"://{login}@", 1)
            addresses.append(address)
    return addresses


def _addresses_in(variables: Mapping[str, str]) -> list[str]:
    """Return the addresses in uv's settings that may have a login: of indexes, and of pages."""
    addresses = indexes_in(variables)
    for table in _tables_in(variables):
        addresses += table.get("find-links", ())
    return addresses


def _complete_login(address: str, login: str) -> str:
    """Return a login with the password that the user's keyring has for the address."""
    program = shutil.which("keyring")
    if ":" in login or not program:
        return login
    words = (program, "get", address, unquote(login))
    result = subprocess.run(
        words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        return login
    password = quote(result.stdout.strip(), safe="")
    return f"{login}:{password}"


def _with_login(address: str, lines: Sequence[str]) -> str:
    """Return an address with the login that an index of its host has in some line.

    A file's own address has no login.
    """
    parts = urlsplit(address)
    for line in lines:
        logins = re.findall(r"(\w+)://([^/@\s]+)@([^/\s]+)", os.path.expandvars(line))
        for scheme, login, host in logins:
            if (scheme.removeprefix("git+"), host) != (parts.scheme, parts.netloc):
                continue
            full_login = _complete_login(f"{scheme}://{host}", login)
            query = f"?{parts.query}" if parts.query else ""
            return urljoin(address, f"//{full_login}@{host}{parts.path}") + query
    return address
