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
from trainworks_launcher.programs.installing.reading import SOURCES, Line, Reading
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
        self._python = python = reading.python
        there = distributions(python)
        protected, companions = manifest.get("protected", {}), manifest.get("companions", {})
        self.kept = {
            name: there[name].version if name in there else version
            for name, version in protected.items()
        }
        self.excluded, self.said, self.lines = set(_LEFT_OUT), [], list(reading.lines)
        self.left: list[str] = []
        refused, newer = [], {}
        needs = [
            (owner, each)
            for owner in self.kept
            if owner in there
            for each in needs_of(python, there[owner])
        ]
        for line in lines:
            name, place = line.name, line.place
            if not name:
                self._look_at_index(line, manifest.get("wheel_index", ""))
                continue
            have, specifier, asked = (
                self.kept.get(name, ""),
                line.wanted.specifier,
                f"{name}{line.wanted.specifier}",
            )
            newer.update({name: str(specifier)} if name in companions and specifier else {})
            if name in _TRAPS and not line.wanted.url:
                refused.append(
                    f"{place}: {name} of the package index is something else: ask for"
                    f" {_TRAPS[name]}"
                )
            elif name in _LEFT_OUT:
                self.said.append(f"{place}: {asked} is left out: it is not for this system")
            elif have and not _holds(line.wanted, have):
                if any(
                    is_later(each.version, have)
                    for each in specifier
                    if each.operator[0] not in "<!"
                ):
                    newer[name] = str(specifier)
                    refused.append(
                        f"{place}: {asked}, and this image has {name} {have}:"
                        f" choose an image with {asked}"
                    )
                elif not _holds(line.wanted, build_of(python, name, have)):
                    what = "an address" if line.wanted.url else asked
                    self.said.append(
                        f"{place}: {what} is not installed: this image keeps {name} {have}"
                    )
                self.excluded.add(name)
            elif not have:
                exact = [each.version for each in specifier if re.match(r"==[^*]+$", str(each))]
                for owner, need in needs if exact else ():
                    if normalised(need.name) == name and not need.specifier.contains(
                        exact[0], prereleases=True
                    ):
                        what = (
                            f"this image's {owner} {self.kept[owner]} needs {name}{need.specifier}"
                        )
                        self.said.append(f"{place}: {asked} is not installed: {what}")
                        self.excluded.add(name)
        self.freed = self._free_companions(lines, companions)
        if self.excluded & set(self.kept):
            self.excluded |= set(self.kept)
        if self.excluded - set(_LEFT_OUT):  # so these lines are of another build of the framework
            missing = {normalised(name) for name in manifest.get("libraries", ())} - set(there)
            named = sorted({line.name for line in lines} & missing)
            self.said += (
                [f"{', '.join(named)}: not installed, only another build needs them"]
                if named
                else []
            )
            self.excluded |= missing
        if refused:
            raise RefusedError(*refused, newer=newer)
        # A project has them from an index of another build, or from a folder of its own.
        self.without_source = sorted(reading.sources & {*self.kept, *companions})
        self.said += [
            f"the source of {name} is not used: this image has its own"
            for name in self.without_source
        ]

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
        host = re.match(r"https?://[^/]+/", own)
        if (
            option in SOURCES
            and host
            and address.startswith(host.group())
            and address.rstrip("/") != own
        ):
            self._python.say(
                f"{line.place}: {address} is not needed: it has another build than this image"
            )
            self.lines.remove(line)
            self.left.append(line.place)


def _holds(wanted: Any, version: str) -> bool:
    return not wanted.url and bool(wanted.specifier.contains(version, prereleases=True))
