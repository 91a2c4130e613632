"""What of the user's own lines is answered with what the image has, and what is refused."""

from __future__ import annotations

import re
from typing import Any, Mapping, Sequence

from trainworks_launcher.programs.installing.environment import (
    RefusedError,
    build_of,
    distributions,
    is_later,
    needs_of,
    normalised,
)
from trainworks_launcher.programs.installing.inputs import SOURCES, Line, Reading
from trainworks_launcher.programs.installing.standards import Requirement

_TRAPS = {"pytorch": "torch", "apex": "apex @ git+ the address of NVIDIA's repository"}
"""Names under which the package index has something else than what people mean."""
_LEFT_OUT = (
    *(
        "cudatoolkit",
        "pkg-resources",
        "pypiwin32",
        "pyobjc",
        "pyobjc-core",
        "python",
        "pywin32",
        "pywinpty",
    ),
    *("tensorflow-macos", "tensorflow-metal", "windows-curses"),
)
"""What pip freeze writes on other systems or by a mistake of Debian's, and conda's own.

No index has it for Linux.
"""


class Answer:
    """What of the user's own lines is answered with what the image has.

    Attributes:
        kept: Name to version.
        excluded: Names that uv leaves out wherever they are asked for.
        freed: Companions of which a project asks for a version that goes with
            another framework: uv takes any.
        said: Lines for the log: what is not installed as it was asked for.
        lines: What uv gets.
        left: Where indexes are named that are left out.
    """

    def __init__(self, manifest: Mapping[str, Any], reading: Reading) -> None:
        """Look at what is asked for.

        Raises RefusedError with all lines that ask for what the image cannot give.
        """
        lines = [*reading.lines, *reading.looked_at]
        self._python = reading.python
        installed = distributions(self._python)
        companions = manifest.get("companions", {})
        self.kept: dict[str, str] = {}
        self._needs: list[tuple[str, Any]] = []
        for name, version in manifest.get("protected", {}).items():
            self.kept[name] = version
            if name in installed:
                self.kept[name] = installed[name].version
                self._needs += [(name, need) for need in needs_of(self._python, installed[name])]
        self.excluded, self.lines = set(_LEFT_OUT), list(reading.lines)
        self.said: list[str] = []
        self.left: list[str] = []
        self._refused: list[str] = []
        self._newer: dict[str, str] = {}
        for line in lines:
            if not line.name:
                self._look_at_index(line, manifest.get("wheel_index", ""))
                continue
            if line.name in companions and line.wanted.specifier:
                self._newer[line.name] = str(line.wanted.specifier)
            self._look_at_requirement(line)

        self.freed = self._free_companions(lines, companions)
        if self.excluded & set(self.kept):
            self.excluded |= set(self.kept)
        if self.excluded - set(_LEFT_OUT):
            # Lines that are left out are of another build of the framework.
            libraries = {normalised(name) for name in manifest.get("libraries", ())}
            missing = libraries - set(installed)
            named = sorted({line.name for line in lines} & missing)
            if named:
                self.said.append(
                    f"{', '.join(named)}: not installed, only another build needs them"
                )
            self.excluded |= missing
        if self._refused:
            raise RefusedError(*self._refused, newer=self._newer)

        # A project has them from an index of another build, or from a folder of its own.
        self.without_source = sorted(reading.sources & {*self.kept, *companions})
        for name in self.without_source:
            self.said.append(f"the source of {name} is not used: this image has its own")

    def _look_at_requirement(self, line: Line) -> None:
        """Decide whether a requirement is installed, left out or refused."""
        name, place, specifier = line.name, line.place, line.wanted.specifier
        asked = f"{name}{specifier}"
        have = self.kept.get(name, "")
        if name in _TRAPS and not line.wanted.url:
            self._refused.append(
                f"{place}: {name} of the package index is something else: ask for {_TRAPS[name]}"
            )
        elif name in _LEFT_OUT:
            self.said.append(f"{place}: {asked} is left out: it is not for this system")
        elif not have:
            self._look_at_needs(line, asked)
        elif not _holds(line.wanted, have):
            at_least = [limit.version for limit in specifier if limit.operator[0] not in "<!"]
            if any(is_later(version, have) for version in at_least):
                self._newer[name] = str(specifier)
                self._refused.append(
                    f"{place}: {asked}, and this image has {name} {have}:"
                    f" choose an image with {asked}"
                )
            elif not _holds(line.wanted, build_of(self._python, name, have)):
                what = "an address" if line.wanted.url else asked
                self.said.append(
                    f"{place}: {what} is not installed: this image keeps {name} {have}"
                )
            self.excluded.add(name)

    def _look_at_needs(self, line: Line, asked: str) -> None:
        """Leave out a version that a distribution which is kept does not go with."""
        exact = [
            limit.version for limit in line.wanted.specifier if re.match(r"==[^*]+$", str(limit))
        ]
        if not exact:
            return
        for owner, need in self._needs:
            if normalised(need.name) != line.name:
                continue
            if need.specifier.contains(exact[0], prereleases=True):
                continue
            self.said.append(
                f"{line.place}: {asked} is not installed:"
                f" this image's {owner} {self.kept[owner]} needs {line.name}{need.specifier}"
            )
            self.excluded.add(line.name)

    def _free_companions(self, lines: Sequence[Line], companions: Mapping[str, str]) -> list[str]:
        """Let companions of a framework that is answered have any version:
        theirs goes with the one that was asked for.

        Args:
            lines: What is asked for.
            companions: Names to the names of their frameworks.

        Returns:
            Names of those that a project asks for: its file is uv's to read.
        """
        freed = []
        for line in lines:
            framework = companions.get(line.name, "")
            if not framework:
                continue
            exact = [
                each.version for each in line.wanted.specifier if re.match(r"===?[^*]+$", str(each))
            ]
            own = build_of(self._python, framework, self.kept.get(framework, "")).partition("+")[2]
            builds = {version.partition("+")[2] for version in exact} - {"", own}
            is_answered = framework in self.excluded and (exact or line.wanted.url)
            if not is_answered and not builds:
                continue
            asked = "an address" if line.wanted.url else f"{line.name}{line.wanted.specifier}"
            have = f"{framework} {self.kept.get(framework, '')}"
            self.said.append(
                f"{line.place}: {asked} goes with another {framework}:"
                f" the release for {have} is taken"
            )
            if line in self.lines:
                name = Requirement(line.name)
                self.lines[self.lines.index(line)] = Line(
                    line.place, line.name, name, line.constraint
                )
            else:
                freed.append(line.name)
        return freed

    def _look_at_index(self, line: Line, own: str) -> None:
        """Leave out an index of the framework's vendor that has another build
        than the image's own.
        """
        option, _, address = line.text.partition(" ")
        vendor = re.match(r"https?://[^/]+/", own)
        if vendor is None or option not in SOURCES:
            return
        if address.startswith(vendor.group()) and address.rstrip("/") != own:
            self._python.say(
                f"{line.place}: {address} is not needed: it has another build than this image"
            )
            self.lines.remove(line)
            self.left.append(line.place)


def _holds(wanted: Any, version: str) -> bool:
    return not wanted.url and bool(wanted.specifier.contains(version, prereleases=True))
