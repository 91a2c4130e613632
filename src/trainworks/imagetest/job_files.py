"""Reads from an image's files which jobs it can run; no program of the image is started."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from trainworks.engine.protocol import BuiltImage
from trainworks.engine.tree import ImageTree

READ: Final = re.compile(r"/etc/(?:passwd|ld\.so\.cache)")
"""The files that are read with their content."""

DEFAULT_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""The PATH that an engine sets for an image without one."""

_KERNEL: Final = ("/proc/", "/sys/", "/dev/", "/run/")
"""Folders that only a container has."""

_OF_LIBRARIES: Final = re.compile(r"/(?:usr|opt|lib)/.*\.so[^/]*")

_CACHED_DRIVER: Final = re.compile(rb"(/[^\0]*/libcuda\.so\.1)\0")


@dataclass(frozen=True, kw_only=True)
class _Account:
    """Number and home folder of a row in passwd(5)."""

    number: str
    home: str


@dataclass(frozen=True, kw_only=True)
class JobFiles:
    """The files of an image as its jobs see them: by PATH, as its user."""

    tree: ImageTree
    image: BuiltImage

    def _folders(self, variable: str, default: str = "") -> list[str]:
        value = self.image.environment.get(variable, default)
        return [folder for folder in value.split(":") if folder.startswith("/")]

    def program(self, name: str) -> str:
        """Return the path of a program on PATH; ``""`` where there is none."""
        for folder in self._folders("PATH", DEFAULT_PATH):
            path = posixpath.join(folder, name)
            if self.tree.runs(path):
                return path
        return ""

    def pythons(self) -> list[str]:
        """Return the interpreters that could answer questions, each file once.

        The one of a job comes first, then the system's and those of environments in /opt.
        """
        candidates = [self.program("python3"), self.program("python"), "/usr/bin/python3"]
        environments = [
            path for path in self.tree.below("/opt") if re.fullmatch(r"/opt/[^/]+/bin/python", path)
        ]
        candidates += sorted(environments)
        programs = [path for path in candidates if path and self.tree.runs(path)]
        return list(dict.fromkeys(programs))

    def dangling(self) -> list[str]:
        """Return the links of programs and libraries whose target does not exist, sorted."""
        folders = self._folders("PATH", DEFAULT_PATH)
        program_folders = {self.tree.real(folder) for folder in folders} - {""}
        paths = []
        for path in self._links():
            is_program = posixpath.dirname(path) in program_folders
            is_library = _OF_LIBRARIES.fullmatch(path) is not None
            if (is_program or is_library) and not self.tree.kind(path):
                paths.append(path)
        return sorted(paths)

    def _links(self) -> Iterator[str]:
        for path, member in self.tree.members.items():
            if member.kind == "link" and not f"{member.target}/".startswith(_KERNEL):
                yield path

    def stubs(self) -> list[str]:
        """Return the stubs of the CUDA driver in the loader's cache or in LD_LIBRARY_PATH."""
        cache = self.tree.read("/etc/ld.so.cache") or b""
        drivers = [path.decode(errors="replace") for path in _CACHED_DRIVER.findall(cache)]
        folders = self._folders("LD_LIBRARY_PATH")
        drivers += [posixpath.join(folder, "libcuda.so.1") for folder in folders]
        stubs = [path for path in dict.fromkeys(drivers) if "/stubs/" in path]
        return [path for path in stubs if self.tree.kind(path) == "file"]

    @property
    def user(self) -> str:
        """The number of the user that a container runs as; a name if /etc/passwd lacks the user."""
        name = self.image.user.partition(":")[0] or "0"
        if name.isdigit():
            return name
        account = self._account(0, name)
        return account.number if account else name

    def _account(self, column: int, value: str) -> _Account | None:
        """Return the account with a value in a column of passwd(5)."""
        text = (self.tree.read("/etc/passwd") or b"").decode(errors="replace")
        for line in text.splitlines():
            words = line.split(":")
            if len(words) > 5 and words[column] == value:
                return _Account(number=words[2], home=words[5])
        return None

    def home_is_writable(self) -> bool:
        """Whether the user may write into the home folder, by its owner and mode."""
        home = self.image.environment.get("HOME", "")
        if not home:
            account = self._account(2, self.user)
            home = account.home if account else "/"
        member = self.tree.members.get(self.tree.real(home))
        if member is None or member.kind != "folder":
            return home == "/" and self.user == "0"
        if self.user == "0" or member.mode & 0o002:
            return True
        return str(member.owner) == self.user and bool(member.mode & 0o200)
