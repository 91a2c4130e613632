"""Resolves requirements for a base image as pip would in it: what is installed stays where it fits. Runs uv.

uv knows nothing of what an image has installed. Each distribution of the base takes part as a wheel made for the
occasion, with its name, its version and what it requires; an output file of earlier makes uv prefer those versions, as
pip prefers what is installed. Nothing is built on this machine: a release that has a source archive only, and no
metadata that can be trusted without running it, is first taken to require nothing. What is taken as an archive is built
in the base image, and then everything is resolved again with what its wheel requires.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote

from packaging.requirements import Requirement as Specification
from packaging.utils import canonicalize_name
from packaging.version import Version

from trainworks.engine.scratch import private_folder
from trainworks.errors import BuildError, LockError
from trainworks.extend.kept import Move, broken_by, fulfilled, moves_of, same_version
from trainworks.extend.requirements import BaseDistribution, ExtendedBase
from trainworks.extend.resolving.answers import (
    LINE,
    NO_ANSWER,
    PRE_RELEASE,
    UNBUILT,
    because,
    is_of,
    is_version,
    metadata,
    metadata_in,
    release_of,
    takes,
    without_extra,
    write_lines,
)
from trainworks.extend.resolving.releases import Archive, BuildArchives, LockedRelease, Older, Resolution, Resolvable
from trainworks.extend.resolving.stand_ins import no_builds, stand_in
from trainworks.host.downloads import Client, UnreachableError
from trainworks.host.index import archives_only
from trainworks.host.pip import uv_configuration
from trainworks.host.settings import HostSettings
from trainworks.inputs.lock_python import run_uv, uv_platform

MOST_BUILDS = 12
"""So many releases of source archives are built to find a set of versions; then the search is given up."""


def resolve(
    wanted: Resolvable,
    base: ExtendedBase,
    settings: HostSettings,
    environment: Mapping[str, str],
    *,
    where: str,
    build: BuildArchives,
) -> Resolution:
    """Resolve requirements for a base image.

    What is installed keeps its version where that fits, as pip keeps it. Where a distribution that stays would lose
    what it requires, it takes part in the resolution too.

    Args:
        wanted: What is asked for.
        base: The image.
        settings: This machine's indexes.
        environment: The process's.
        where: Whose requirements these are, for messages.
        build: Builds source archives whose metadata is not known without running them.

    Raises:
        LockError: No set of releases fits, or the index does not answer; with uv's own words.
        BuildError: A source archive cannot be built.
    """
    with private_folder() as folder, Client(settings) as client:
        search = _Search(wanted, base, settings, environment, folder, client, f"{where} for {base.reference}")
        releases, removed = search.run(build)
        return Resolution(releases=releases, removed=removed, notes=tuple(search.notes(releases, removed)))


class _Search:
    """One resolution: uv is asked until nothing has to be built for an answer, and nothing of the base is broken."""

    def __init__(
        self,
        wanted: Resolvable,
        base: ExtendedBase,
        settings: HostSettings,
        environment: Mapping[str, str],
        folder: Path,
        client: Client,
        what: str,
    ) -> None:
        self._wanted, self._base, self._environment, self._what = wanted, base, environment, what
        self._settings, self._folder, self._client = settings, folder, client
        self._installed: dict[str, BaseDistribution] = {canonicalize_name(row.name): row for row in base.distributions}
        self._assumed: dict[tuple[str, str], tuple[str, ...]] = {}
        self._built: dict[str, tuple[str, ...]] = {}
        self._early: set[str] = set()
        self._unfit: dict[tuple[str, str], bool] = {}
        self._guesses = 0
        self._roots: list[str] = []
        self._floors: dict[str, str] | None = None
        installed = folder / "installed"
        installed.mkdir()
        self._pins = [stand_in(row, installed, base) for row in base.distributions if is_version(row.version)]
        self._lines = list(wanted.lines)
        for number, wheel in enumerate(wanted.wheels):
            path = folder / str(number) / wheel.file
            path.parent.mkdir()
            path.write_bytes(wheel.content)
            self._lines.append(f"{wheel.name}{wheel.extras} @ {path.as_uri()}")
        self._configuration = uv_configuration(
            settings.pip, folders=[str(installed), *map(str, settings.pip.local_folders)]
        )
        no_builds(folder / "python")

    def run(self, build: BuildArchives) -> tuple[tuple[LockedRelease, ...], tuple[str, ...]]:
        """Return what is installed, and what is removed."""
        own = {wheel.name: wheel.version for wheel in self._wanted.wheels}
        removed: list[str] = []
        while True:
            lines = (*self._lines, *self._roots)
            try:
                versions, parents = self._versions(lines, wheels=self._roots, floors=self._floors or {})
                if self._floors is None:
                    self._floors = self._find_floors(versions)
                    if self._floors:
                        continue
            except LockError as error:
                if NO_ANSWER not in error.message:
                    raise
                if self._floors and self._is_possible(lines, {}):
                    self._floors = {}
                elif self._roots:
                    self._give_up_roots(removed, error)
                else:
                    self._build_guesses(build, error)
                continue
            changed = {
                name: version for name, version in (versions | own).items() if not self._is_installed(name, version)
            }
            removed = [name for name in removed if name not in versions]
            broken = [each for each in broken_by(changed.items(), self._base, removed) if each not in self._roots]
            if broken:
                self._roots += broken
                continue
            releases = self._files({name: version for name, version in changed.items() if name not in own}, parents)
            if self._find_unfit(releases):
                continue
            # What an archive says of itself is not always what its wheel requires: DeepSpeed asks for more beside CUDA.
            unbuilt = [each.archive for each in releases if each.archive and str(each.archive) not in self._built]
            if not unbuilt:
                return releases, tuple(removed)
            self._build(unbuilt, build)

    def _find_floors(self, versions: Mapping[str, str]) -> dict[str, str]:
        """Return the newest version of each newcomer for which something that the base has moves.

        pip takes the newest release of what is not installed, and moves what is installed if that release asks for it.
        uv stays with what it prefers, and takes an older newcomer.
        """
        newcomers = {
            name: Version(version)
            for name, version in versions.items()
            if name not in self._installed and is_version(version)
        }
        try:
            newest = self._versions(self._lines, preferring=False)[0]
        except LockError:
            return {}
        raised = {
            name: version
            for name, version in newest.items()
            if name in newcomers and is_version(version) and Version(version) > newcomers[name]
        }
        if not raised or self._is_possible(self._lines, raised):
            return raised
        floors: dict[str, str] = {}
        for name, version in raised.items():
            if self._is_possible(self._lines, {**floors, name: version}):
                floors[name] = version
        return floors

    def _is_possible(self, lines: Sequence[str], floors: Mapping[str, str]) -> bool:
        try:
            self._versions(lines, wheels=self._roots, floors=floors)
        except LockError:
            return False
        return True

    def _find_unfit(self, releases: Sequence[LockedRelease]) -> bool:
        """Exclude releases that are not for the base's Python, and return whether there are any.

        uv looks at the oldest Python that a release is for, and not at the newest; pip looks at both.
        """
        asked = [each for each in releases if each.wheel and (each.name, each.version) not in self._unfit]
        with ThreadPoolExecutor(8) as pool:
            heads = pool.map(self._metadata_of, asked)
            for each, head in zip(asked, heads, strict=True):
                found = re.search(r"^Requires-Python: *(.+?)\s*$", head, re.MULTILINE)
                self._unfit[each.name, each.version] = bool(found) and not takes(
                    found[1] if found else "", self._base.full_version or self._base.version
                )
        return any(self._unfit[each.name, each.version] for each in asked)

    def _metadata_of(self, release: LockedRelease) -> str:
        """Return the head of a wheel's metadata; ``""`` where its index does not have it beside the wheel."""
        address = release.wheel.partition("#")[0]
        if not address.startswith(("http://", "https://")):
            return metadata_in(self._folder / unquote(address.removeprefix("file://")))
        try:
            answer = self._client.get(f"{address}.metadata")
        except UnreachableError:
            return ""
        return answer.text.partition("\n\n")[0] if answer.ok else ""

    def _build(self, archives: Sequence[Archive], build: BuildArchives) -> None:
        """Build archives for what they require."""
        guessed = sum((archive.name, archive.version) in self._assumed for archive in archives)
        self._guesses += guessed
        if self._guesses > MOST_BUILDS:
            raise LockError(
                f"{self._what} cannot be resolved: {MOST_BUILDS} source archives were built to find releases that fit "
                f"each other, the last of {archives[0].name}",
                hint="ask for versions that have wheels",
            )
        try:
            wheels = build(archives)
        except BuildError as error:
            raise BuildError(error.message, hint=" ".join((*map(self._oldness, archives), error.hint))) from error
        for archive, wheel in zip(archives, wheels, strict=True):
            self._assumed[archive.name, archive.version] = self._built[str(archive)] = wheel.requires

    def _oldness(self, archive: Archive) -> str:
        """Return the advice about a release that was not asked for; ``""`` for the newest."""
        newest = self._versions([archive.name], alone=True)[0].get(archive.name, archive.version)
        if same_version(newest, archive.version):
            return ""
        kept = ", ".join(f"{name} {version}" for name, version in self._base.kept.items())
        return (
            f"{archive} is old, the newest is {newest}: no newer one fits the other requirements and what the base "
            f"keeps ({kept}). Leave {archive.name} out, or take another base."
        )

    def _build_guesses(self, build: BuildArchives, error: LockError) -> None:
        """Build the newest releases of which it is a guess what they require; raises the error without any."""
        guesses = [(name, version) for name, version in self._assumed if f"{name} {version}" not in self._built]
        if not guesses:
            raise error
        newest = dict(sorted(guesses, key=lambda each: Version(each[1])))
        archives = [each.archive for each in self._files(newest, {}) if each.archive]
        for name in newest.keys() - {each.name for each in archives}:
            self._assumed.pop((name, newest[name]))
        self._build(archives, build)

    def _give_up_roots(self, removed: list[str], error: LockError) -> None:
        """Remove what of the base goes with the requirements in no release; raises the error for what is kept."""
        before = len(removed)
        for name in self._roots:
            self._remove_if_it_cannot_stay(name, removed)
        if len(removed) == before:
            removed += [name for name in self._roots if name not in self._base.kept]
        if len(removed) == before:
            raise error
        self._roots = [name for name in self._roots if name not in removed]

    def _remove_if_it_cannot_stay(self, name: str, removed: list[str]) -> None:
        """Note a distribution of the base that goes with the requirements in no release; raises if it is kept."""
        try:
            self._versions((*self._lines, name), wheels=[name])
        except LockError as error:
            if name in self._base.kept or NO_ANSWER not in error.message:
                raise
            removed.append(name)

    def notes(self, releases: Sequence[LockedRelease], removed: Sequence[str]) -> Iterator[str]:
        """Yield what the user should know."""
        by_name = {each.name: each for each in releases}
        own = [(wheel.name, wheel.version) for wheel in self._wanted.wheels]
        after: dict[str, str] = {name: row.version for name, row in self._installed.items() if name not in removed}
        after |= {each.name: each.version for each in releases} | dict(own)
        for move in moves_of([*((each.name, each.version) for each in releases), *own], self._base):
            asking = self._asking(move, by_name)
            why = f"asked for by {asking}" if asking else f"to go with {self._lost(move.name, after)}"
            yield f"{move.name} {move.old} -> {move.new}, {why}"
        for name in removed:
            version = self._installed[name].version
            yield f"{name} {version} of the base is removed: it does not go with {self._lost(name, after)}"
        yield from map(str, self._older(by_name))

    def _lost(self, name: str, after: Mapping[str, str]) -> str:
        """Return what a distribution of the base does not go with."""
        before: dict[str, str] = {each: row.version for each, row in self._installed.items()}
        lost = [
            Specification(text).name
            for text in self._installed[name].requires
            if fulfilled(text, before, self._base) and not fulfilled(text, after, self._base)
        ]
        return " and ".join(f"{each} {after.get(canonicalize_name(each), '(removed)')}" for each in lost)

    def _asking(self, move: Move, releases: Mapping[str, LockedRelease]) -> str:
        """Return who does not take the version that a base has; ``""`` where it only goes with what was replaced."""
        if any(wheel.name == move.name for wheel in self._wanted.wheels):
            return "the requirements"
        for line in self._wanted.lines:
            wanted = Specification(line.partition(" --hash")[0])
            if canonicalize_name(wanted.name) == move.name and not wanted.specifier.contains(
                move.old, prereleases=True
            ):
                return "the requirements"
        if any(
            canonicalize_name(limit.name) == move.name and not limit.specifier.contains(move.old, prereleases=True)
            for limit in map(Specification, self._wanted.constraints)
        ):
            return "a constraint"
        if move.name in self._roots:
            return ""
        parents = [releases[name] for name in map(canonicalize_name, releases[move.name].parents) if name in releases]
        wheels = [f"{each.name} {each.version}" for each in self._wanted.wheels if self._exclude(each.requires, move)]
        asking: list[str] = []
        silent: list[str] = []
        for each in parents:
            requires = self._requires(each) if each.name not in self._roots else ()
            if requires is None or self._exclude(requires, move):
                (silent if requires is None else asking).append(f"{each.name} {each.version}")
        return " and ".join((wheels + asking) or silent or ["the requirements"])

    def _exclude(self, requires: Iterable[str], move: Move) -> bool:
        return any(
            is_of(text, move.name) and not fulfilled(without_extra(text), {move.name: move.old}, self._base)
            for text in requires
        )

    def _requires(self, release: LockedRelease) -> Sequence[str] | None:
        """Return what a release requires; ``None`` where its index does not have the metadata beside the wheel."""
        known = self._assumed.get((release.name, release.version))
        if known is not None:
            return known
        if not release.wheel:
            return None
        head = self._metadata_of(release)
        return re.findall(r"^Requires-Dist: (.+?)\s*$", head, re.MULTILINE) if head else None

    def _older(self, releases: Mapping[str, LockedRelease]) -> Iterator[Older]:
        """Yield the direct requirements that are not locked at the newest release that they allow."""
        wanted = {canonicalize_name(Specification(line.partition(" --hash")[0]).name) for line in self._wanted.lines}
        asked = [line for line in self._wanted.lines if self._is_open(line)]
        if not asked:
            return
        try:
            newest = self._versions(asked, alone=True)[0]
        except LockError:
            # It is said beside a resolution, and none of its own.
            return
        for name in sorted(wanted & newest.keys()):
            row = self._installed.get(name)
            version = releases[name].version if name in releases else row.version if row else ""
            if not version or not is_version(version) or Version(version) >= Version(newest[name]):
                continue
            if name not in releases:
                reason = "the base has it, and it is kept" if name in self._base.kept else "the base has it already"
            else:
                reason = self._why_not(name, newest[name])
            yield Older(name=name, version=version, newest=newest[name], reason=reason)

    def _is_open(self, line: str) -> bool:
        """Whether a requirement allows more than one version."""
        wanted = Specification(line.partition(" --hash")[0])
        if wanted.marker is not None and not wanted.marker.evaluate({**self._base.markers, "extra": ""}):
            return False
        return not any(each.operator in ("==", "===") and not each.version.endswith("*") for each in wanted.specifier)

    def _why_not(self, name: str, version: str) -> str:
        """Return why a release is not taken."""
        try:
            self._versions((*self._lines, f"{name}=={version}"))
        except LockError as error:
            return because(error.message)
        return "the other requirements were fulfilled first, with versions that it does not take"

    def _is_installed(self, name: str, version: str) -> bool:
        row = self._installed.get(canonicalize_name(name))
        return row is not None and same_version(row.version, version)

    def _versions(
        self,
        lines: Sequence[str],
        *,
        wheels: Sequence[str] = (),
        alone: bool = False,
        floors: Mapping[str, str] = MappingProxyType({}),
        preferring: bool = True,
    ) -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
        """Return the version of each name, and who requires it.

        Args:
            lines: The requirements.
            wheels: Names of which no source archive is taken.
            alone: Each by itself, without what it requires, without wishes about wheels, and without the base.
            floors: Name to the oldest version that is taken.
            preferring: Whether what is installed stays where it fits.
        """
        kept = [] if alone else [f"{name}=={version}" for name, version in self._base.kept.items()]
        kept += [f"{name}>={version}" for name, version in floors.items()]
        more = ["--annotation-style", "line", *(["--no-deps"] if alone else [])]
        for name in () if alone else (*wheels, *self._wanted.choice.only_binary):
            more += ["--only-binary", name]
        text = self._ask(lines, kept, more, () if alone or not preferring else self._pins)
        versions: dict[str, str] = {}
        parents: dict[str, tuple[str, ...]] = {}
        for line in text.splitlines():
            found = LINE.match(line)
            if found is None:
                continue
            name = canonicalize_name(found["name"])
            versions[name] = found["version"] or self._wheel_version(name)
            parents[name] = tuple((found["via"] or "").split(", "))
        return versions, parents

    def _wheel_version(self, name: str) -> str:
        return next((wheel.version for wheel in self._wanted.wheels if wheel.name == name), "")

    def _files(self, versions: Mapping[str, str], parents: Mapping[str, tuple[str, ...]]) -> tuple[LockedRelease, ...]:
        """Return the files of releases."""
        if not versions:
            return ()
        more = ["--no-deps", "--format", "pylock.toml"]
        text = self._ask([f"{name}=={version}" for name, version in versions.items()], (), more, ())
        tags = {tag: rank for rank, tag in enumerate(self._base.tags)}
        rows: dict[str, Any] = {canonicalize_name(row["name"]): row for row in tomllib.loads(text)["packages"]}
        return tuple(
            release_of(rows[name], name, version, tags, parents.get(name, ()))
            for name, version in sorted(versions.items())
        )

    def _ask(
        self, lines: Sequence[str], constraints: Iterable[str], more: Sequence[str], preferred: Iterable[str]
    ) -> str:
        """Ask uv once, and again for each release of which only a build would tell what it requires."""
        base, folder, choice = self._base, self._folder, self._wanted.choice
        more = [*more, *(word for name in choice.no_binary for word in ("--no-binary", name))]
        write_lines(folder / "requirements.in", lines)
        while True:
            early = [f"{name}>=0.dev0" for name in sorted(self._early)]
            unfit = [f"{name}!={version}" for (name, version), wrong in self._unfit.items() if wrong]
            write_lines(folder / "constraints.txt", (*constraints, *self._wanted.constraints, *early, *unfit))
            output = folder / ("pylock.toml" if "pylock.toml" in more else "preferred.txt")
            # uv prefers the versions that an output of earlier has, as pip prefers what is installed.
            output.unlink(missing_ok=True)
            if preferred:
                write_lines(output, preferred)
            (folder / "uv.toml").write_text(
                self._configuration + "".join(map(metadata, self._assumed.items())), encoding="utf-8"
            )
            arguments = [
                *("pip", "compile", "requirements.in", "--quiet", "--no-header", "--output-file", output.name, *more),
                *("--constraint", "constraints.txt", "--config-file", "uv.toml"),
                *(
                    "--python-version",
                    base.full_version or base.version,
                    "--python",
                    "python/bin/python",
                    "--no-build-isolation",
                ),
                *("--python-platform", uv_platform(base.machine, base.glibc)),
            ]
            arguments += ["--prerelease", "allow"] if choice.prereleases else []
            try:
                run_uv(arguments, folder, self._what, self._environment)
                return output.read_text(encoding="utf-8")
            except LockError as error:
                unbuilt, asked = UNBUILT.search(error.message), PRE_RELEASE.search(error.message)
                if unbuilt and (unbuilt["name"], unbuilt["version"]) not in self._assumed:
                    self._assume(unbuilt["name"], unbuilt["version"])
                elif asked and asked["name"] not in self._early:
                    self._early.add(asked["name"])
                else:
                    python = base.full_version or base.version
                    unfit = [f"{name} {version}" for (name, version), wrong in self._unfit.items() if wrong]
                    said = "".join(f"\n{each} is not for Python {python}" for each in unfit)
                    raise LockError(f"{error.message}{said}", hint=error.hint) from error

    def _assume(self, name: str, version: str) -> None:
        """Assume what a release requires: nothing, or what another release of it does that was built.

        A release that is taken is built, and what it really requires counts then.
        """
        known = [requires for each, requires in self._built.items() if each.partition(" ")[0] == name]
        if known:
            for other in archives_only(name, self._settings.pip, self._client):
                self._assumed.setdefault((name, other), known[-1])
        self._assumed[name, version] = known[-1] if known else ()
