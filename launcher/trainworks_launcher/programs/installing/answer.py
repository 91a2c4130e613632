"""Adapt the user's requirements to the image: keep its own builds, and refuse conflicts."""

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

_MISLEADING_NAMES = {"pytorch": "torch", "apex": "apex @ git+ the address of NVIDIA's repository"}
"""Names for which the package index has another project than people expect."""
_NOT_FOR_LINUX = (
    "cudatoolkit", "pkg-resources", "pypiwin32", "pyobjc", "pyobjc-core", "python", "pywin32",
    "pywinpty", "tensorflow-macos", "tensorflow-metal", "windows-curses",
)  # fmt: skip
"""Names that pip freeze writes on other systems or by a mistake of Debian's, and conda's own.

No index has them for Linux.
"""


class Answer:
    """The user's requirements, adapted to the image: which lines uv gets, and which packages stay.

    Attributes:
        kept: Name -> version that the image keeps.
        excluded: Names that uv leaves out in every place.
        freed: Companions for which a project requests a version for another framework: uv may
            take any version.
        notes: Lines for the log about requirements that are not installed as requested.
        lines: The lines for uv.
        left: Places of indexes that are left out.
        without_source: Names for which a project's own source is not used.
    """

    def __init__(self, manifest: Mapping[str, Any], reading: Reading) -> None:
        """Adapt the requested requirements to the image; a left-out index is printed.

        Args:
            manifest: The image's manifest, with ``protected`` and ``companions`` among others.
            reading: The requested requirements.

        Raises:
            RefusedError: Lines conflict with the image; all of them are named.
        """
        lines = [*reading.lines, *reading.project_lines]
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
        self.excluded, self.lines = set(_NOT_FOR_LINUX), list(reading.lines)
        self.notes: list[str] = []
        self.left: list[str] = []
        self._refused: list[str] = []
        self._newer: dict[str, str] = {}
        for line in lines:
            if not line.name:
                self._adapt_index(line, manifest.get("wheel_index", ""))
                continue
            if line.name in companions and line.requirement.specifier:
                self._newer[line.name] = str(line.requirement.specifier)
            self._adapt_requirement(line)

        self.freed = self._free_companions(lines, companions)
        # If one package of the framework is left out, all of them stay as they are.
        if self.excluded & set(self.kept):
            self.excluded |= set(self.kept)
        if self.excluded - set(_NOT_FOR_LINUX):
            # Lines that are left out are of another build of the framework.
            libraries = {normalised(name) for name in manifest.get("libraries", ())}
            missing = libraries - set(installed)
            named = sorted({line.name for line in lines} & missing)
            if named:
                self.notes.append(
                    f"{', '.join(named)}: not installed, only another build needs them"
                )
            self.excluded |= missing
        if self._refused:
            raise RefusedError(*self._refused, newer=self._newer)

        # Those sources are an index of another build, or a folder of the project's own.
        self.without_source = sorted(reading.sources & {*self.kept, *companions})
        for name in self.without_source:
            self.notes.append(f"the source of {name} is not used: this image has its own")

    def _adapt_requirement(self, line: Line) -> None:
        """Decide whether a requirement is installed, left out or refused.

        Adds to ``excluded`` and ``notes``, or to the refusals.
        """
        name, place, specifier = line.name, line.place, line.requirement.specifier
        requested = f"{name}{specifier}"
        installed_version = self.kept.get(name, "")
        if name in _MISLEADING_NAMES and not line.requirement.url:
            self._refused.append(
                f"{place}: {name} of the package index is something else:"
                f" ask for {_MISLEADING_NAMES[name]}"
            )
        elif name in _NOT_FOR_LINUX:
            self.notes.append(f"{place}: {requested} is left out: it is not for this system")
        elif not installed_version:
            self._adapt_to_needs(line, requested)
        elif not _allows(line.requirement, installed_version):
            # The image keeps its own. A request for a later release cannot be fulfilled so: that is
            # a limit of another kind than "<", "<=" and "!=".
            limits = [limit.version for limit in specifier if limit.operator[0] not in "<!"]
            if any(is_later(version, installed_version) for version in limits):
                self._newer[name] = str(specifier)
                self._refused.append(
                    f"{place}: {requested}, and this image has {name} {installed_version}:"
                    f" choose an image with {requested}"
                )
            elif not _allows(line.requirement, build_of(self._python, name, installed_version)):
                # The same release of another build is no difference worth a note.
                shown = "an address" if line.requirement.url else requested
                self.notes.append(
                    f"{place}: {shown} is not installed:"
                    f" this image keeps {name} {installed_version}"
                )
            self.excluded.add(name)

    def _adapt_to_needs(self, line: Line, requested: str) -> None:
        """Leave out a line for one version that a package of the image does not allow.

        Adds to ``excluded`` and ``notes``. Other lines stay.

        Args:
            line: The line.
            requested: Its requirement for people, for example ``numpy==2.1``.
        """
        exact = _versions_matching(r"==[^*]+$", line)
        if not exact:
            return
        for owner, need in self._needs:
            if normalised(need.name) != line.name:
                continue
            if need.specifier.contains(exact[0], prereleases=True):
                continue
            self.notes.append(
                f"{line.place}: {requested} is not installed:"
                f" this image's {owner} {self.kept[owner]} needs {line.name}{need.specifier}"
            )
            self.excluded.add(line.name)

    def _free_companions(self, lines: Sequence[Line], companions: Mapping[str, str]) -> list[str]:
        """Let companions of a replaced framework have any version.

        The user's version belongs to the framework that was requested. Replaces such lines in
        ``lines`` by their name alone, and adds to ``notes``.

        Args:
            lines: All lines.
            companions: Name of a package -> name of its framework.

        Returns:
            Names of companions in a project's file, which uv reads itself.
        """
        freed = []
        for line in lines:
            framework = companions.get(line.name, "")
            if not framework:
                continue
            exact = _versions_matching(r"===?[^*]+$", line)
            build = build_of(self._python, framework, self.kept.get(framework, ""))
            # The part behind "+" names the build of a version: cu121 of VERSION+cu121.
            own = build.partition("+")[2]
            builds = {version.partition("+")[2] for version in exact} - {"", own}
            # The user's framework is not installed, and this line is for just one version.
            is_answered = framework in self.excluded and (exact or line.requirement.url)
            if not is_answered and not builds:
                continue
            requested = f"{line.name}{line.requirement.specifier}"
            if line.requirement.url:
                requested = "an address"
            release = f"{framework} {self.kept.get(framework, '')}"
            self.notes.append(
                f"{line.place}: {requested} goes with another {framework}:"
                f" the release for {release} is taken"
            )
            if line in self.lines:
                name = Requirement(line.name)
                self.lines[self.lines.index(line)] = Line(
                    line.place, line.name, name, line.constraint
                )
            else:
                freed.append(line.name)
        return freed

    def _adapt_index(self, line: Line, own: str) -> None:
        """Leave out an index of the framework's vendor with another build than the image's.

        Removes the line from ``lines``, adds its place to ``left``, and prints a line. Other lines
        stay.

        Args:
            line: A line of options, for example ``--extra-index-url https://...``.
            own: Address of the index with the image's build; ``""`` for none.
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


def _versions_matching(pattern: str, line: Line) -> list[str]:
    """Return the versions of the limits that match a pattern.

    Args:
        pattern: A regular expression, for example ``==[^*]+$``.
        line: A line with a requirement: of ``==1.2,<2`` that pattern gives ``["1.2"]``.
    """
    limits = line.requirement.specifier
    return [limit.version for limit in limits if re.match(pattern, str(limit))]


def _allows(requirement: Any, version: str) -> bool:
    """Return whether a requirement allows a version; False for one with an address of its own."""
    if requirement.url:
        return False
    return bool(requirement.specifier.contains(version, prereleases=True))
