"""What the files of an image say of the jobs that it can run: no program of it has to."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from trainworks.engine.protocol import BuiltImage
from trainworks.engine.tree import ImageTree

READ: Final = re.compile(r"/etc/(?:passwd|ld\.so\.cache)")
"""The files whose content is asked for."""

DEFAULT_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""What an engine sets where the image does not."""

_KERNEL: Final = ("/proc/", "/sys/", "/dev/", "/run/")
"""What is there in a container alone."""

_OF_LIBRARIES: Final = re.compile(r"/(?:usr|opt|lib)/.*\.so[^/]*")

_CACHED_DRIVER: Final = re.compile(rb"(/[^\0]*/libcuda\.so\.1)\0")


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
        """Return the interpreters that could answer questions, a file once:
        what a job gets, then the system's.
        """
        places = [self.program("python3"), self.program("python"), "/usr/bin/python3"]
        places += sorted(
            path for path in self.tree.below("/opt") if re.fullmatch(r"/opt/[^/]+/bin/python", path)
        )
        found: dict[str, None] = {}
        for path in places:
            if path and self.tree.runs(path):
                found.setdefault(path)
        return list(found)

    def dangling(self) -> list[str]:
        """Return the links of programs and libraries that lead nowhere, sorted."""
        programs = {self.tree.real(folder) for folder in self._folders("PATH", DEFAULT_PATH)} - {""}
        return sorted(
            path
            for path in self._links()
            if self._matters(path, programs) and not self.tree.kind(path)
        )

    def _links(self) -> Iterator[str]:
        for path, member in self.tree.members.items():
            if member.kind == "link" and not f"{member.target}/".startswith(_KERNEL):
                yield path

    @staticmethod
    def _matters(path: str, programs: set[str]) -> bool:
        return posixpath.dirname(path) in programs or _OF_LIBRARIES.fullmatch(path) is not None

    def stubs(self) -> list[str]:
        """Return the stubs of the CUDA driver that the loader would take: by
        its cache, or LD_LIBRARY_PATH.
        """
        cache = self.tree.read("/etc/ld.so.cache") or b""
        found = [each.decode(errors="replace") for each in _CACHED_DRIVER.findall(cache)]
        found += [
            posixpath.join(folder, "libcuda.so.1") for folder in self._folders("LD_LIBRARY_PATH")
        ]
        there = (path for path in dict.fromkeys(found) if self.tree.kind(path) == "file")
        return [path for path in there if "/stubs/" in path]

    @property
    def user(self) -> str:
        """The number of the user that a container runs as.

        Its name where the image does not know it.
        """
        name = self.image.user.partition(":")[0] or "0"
        return name if name.isdigit() else self._account(0, name).get("number", name)

    def _account(self, column: int, value: str) -> dict[str, str]:
        text = (self.tree.read("/etc/passwd") or b"").decode(errors="replace")
        for line in text.splitlines():
            words = line.split(":")
            if len(words) > 5 and words[column] == value:
                return {"number": words[2], "home": words[5]}
        return {}

    def home_is_writable(self) -> bool:
        """Return whether the user may write into the home folder, by its owner and mode."""
        home = self.image.environment.get("HOME", "") or self._account(2, self.user).get(
            "home", "/"
        )
        member = self.tree.members.get(self.tree.real(home))
        if member is None or member.kind != "folder":
            return home == "/" and self.user == "0"
        if self.user == "0" or member.mode & 0o002:
            return True
        return str(member.owner) == self.user and bool(member.mode & 0o200)
