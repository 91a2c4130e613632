"""Test the day of the package archive that an image is of: an archive on loopback moves between
builds, with each engine.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from image.archives import PACKAGE, SUITE, Archive, dated
from image.support import ROOT, engine_that_answers
from lock.servers import serving
from trainworks.build.base import ensure_base
from trainworks.build.image import ImageSpec, build_image
from trainworks.build.layer_audit import layers_of
from trainworks.build.options import BuildOptions
from trainworks.engine import ENGINES
from trainworks.engine.docker import DockerEngine
from trainworks.engine.protocol import BuildRequest, BuiltImage, Engine
from trainworks.errors import LockError
from trainworks.facts.load import load
from trainworks.facts.rows import LockedArchive, SourceFile
from trainworks.host.apt import AptSource
from trainworks.host.archives import RECORD, read_todays_states
from trainworks.host.bootstrap import bootstrap
from trainworks.host.downloads import Client
from trainworks.host.settings import HostSettings, read_host_settings
from trainworks.plan.model import IMAGE_TIME, Request
from trainworks.plan.own_base import OwnBase, own_base
from trainworks.plan.resolve import make_plan
from trainworks.render.dockerfile import ARCHIVES_LABEL, BASE_LABEL, LAYERS_LABEL, Rendering
from trainworks.terminal.build_progress import BuildProgress

pytestmark = pytest.mark.engine

FIRST, SECOND = datetime(2026, 11, 1, 6, tzinfo=UTC), datetime(2026, 11, 8, 6, tzinfo=UTC)


@dataclass
class Days:
    """An image with a package of the archive, on a base of its own, and a layer
    that has nothing to do with it.
    """

    engine: Engine
    archive: Archive
    base: OwnBase
    settings: HostSettings
    tag: str
    other: str = "one"
    packages: tuple[str, ...] = (PACKAGE,)
    layers: int = 1
    built: list[str] = field(default_factory=list)

    def lock(self) -> None:
        """Lock the state of today."""
        with Client(self.settings) as client:
            self.base = replace(
                self.base, states=read_todays_states(self.base.row, self.settings, client)
            )

    def build(
        self, *, snapshots: bool = True, locked: bool = False, no_cache: bool = False
    ) -> BuiltImage:
        """Build; ``snapshots``: whether this machine knows where the archive of other days is."""
        states = ";".join(
            f"{state.suite} {state.date} {state.contents}" for state in self.base.states
        )
        secrets = "--mount=type=secret,id=apt.conf --mount=type=secret,id=sources.list"
        mounts = f"{secrets} --mount=type=bind,source=files/system,target=/mnt"
        dockerfile = (
            f"FROM {self.base.name} AS system\n"
            f'RUN {mounts} sh /mnt/install-packages --record "{states}" {" ".join(self.packages)}'
            " \\\n"
            "    && rm -rf /var/log/* /var/cache/apt/* /var/cache/debconf/*-old"
            " /var/lib/dpkg/*-old\n"
        )
        for number in range(self.layers):
            dockerfile += (
                f"FROM system AS wheels{number}\n"
                f"RUN mkdir -p /opt/root/opt && echo {self.other}"
                f" > /opt/root/opt/wheel{number} \\\n"
                f"    && find /opt/root -exec touch -h -d @{IMAGE_TIME} {{}} +\n"
            )
        dockerfile += "FROM system AS image\n"
        dockerfile += "".join(
            f"COPY --from=wheels{number} /opt/root /\n" for number in range(self.layers)
        )
        script = (ROOT / "templates" / "files" / "system" / "install-packages").read_bytes()
        snapshot = self.archive.snapshot if snapshots else ""
        settings = replace(self.settings, snapshot=snapshot)
        spec = ImageSpec(
            name="days",
            tags=(self.tag,),
            rendering=Rendering(
                dockerfile=dockerfile,
                files=(SourceFile(path="files/system/install-packages", content=script),),
                stage_components={},
            ),
            settings=settings,
            secrets=settings.apt_secrets(SUITE),
            base=self.base,
        )
        image = build_image(
            spec, self.engine, BuildOptions(until="build", locked=locked, no_cache=no_cache)
        ).image
        self.built.append(image.identifier)
        return image

    def install_in_base(self, version: str) -> None:
        """Give the base the package in this version."""
        folder = self.archive.folder / "with-package"
        folder.mkdir()
        file = f"{PACKAGE}_{version}_all.deb"
        shutil.copyfile(self.archive.folder / file, folder / file)
        (folder / "Dockerfile").write_text(
            f"FROM {self.base.name}\n"
            f"COPY {file} /tmp/\n"
            f"RUN dpkg --install /tmp/{file} && rm -f /tmp/{file}\n"
        )
        request = BuildRequest(name="base", context=folder, tags=(self.base.name,))
        self.engine.build(request, lambda _event: None)

    def version(self, image: BuiltImage) -> str:
        """Return the version of the package that an image has."""
        with self.engine.container(image.identifier) as container:
            return str(container.run(("cat", "/usr/share/demo")).output).strip()

    @property
    def same_bytes(self) -> bool:
        """Return whether this engine writes no times of its own into layers: not Docker before 26,
        and with its own store.
        """
        return not isinstance(self.engine, DockerEngine) or self.engine.sets_times()


@pytest.fixture(params=list(ENGINES))
def days(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Days]:
    engine = engine_that_answers(request.param)
    plan = make_plan(Request(framework="pytorch", cuda="cpu"), load(ROOT))
    debian = own_base(plan)
    assert debian is not None
    ensure_base(debian, engine, read_host_settings(os.environ), BuildProgress())
    mark = uuid.uuid4().hex[:12]
    name, tag = f"trainworks-test/days-base:{mark}", f"trainworks-test/days:{mark}"
    context = tmp_path / "base"
    context.mkdir()
    # The base's own record of its archive is not in question; no other test has made layers on the
    # base.
    text = (
        f"FROM {debian.name}\nRUN rm -f /usr/share/trainworks/archives && echo {mark} > /etc/mark\n"
    )
    (context / "Dockerfile").write_text(text)
    engine.build(BuildRequest(name="base", context=context, tags=(name,)), lambda _event: None)
    with serving() as server:
        archive = Archive(server, tmp_path)
        archive.sign("1", FIRST)
        row = replace(debian.row, suite=SUITE, archives={SUITE: "main"}, snapshot="", digest="")
        source = AptSource(uri=archive.today, suite=SUITE, components="main", trusted=True)
        settings = read_host_settings(os.environ)
        settings = replace(settings, apt=replace(settings.apt, sources=(source,)), suite=SUITE)
        mine = Days(
            engine=engine,
            archive=archive,
            base=OwnBase(row=row, name=name, origin="bootstrapped"),
            settings=settings,
            tag=tag,
        )
        mine.lock()
        try:
            yield mine
        finally:
            for reference in (tag, name):
                engine.remove(reference)


def line_of_state(state: LockedArchive) -> str:
    return f"{state.suite} {state.date} {state.contents[:12]}"


def test_a_locked_day_is_built_again_after_the_archive_has_moved(days: Days) -> None:
    first = days.build(no_cache=True)
    label = f"{SUITE} {dated(FIRST)} {days.base.states[0].contents[:12]}"
    assert (days.version(first), first.labels[ARCHIVES_LABEL], first.labels[BASE_LABEL]) == (
        "1",
        label,
        "bootstrapped",
    )
    days.archive.sign("2", SECOND)
    again = days.build(no_cache=True, locked=True)
    assert (days.version(again), again.labels[ARCHIVES_LABEL]) == ("1", label)
    assert again.labels[LAYERS_LABEL] == layers_of(again)
    if days.same_bytes:
        assert (again.layers, again.identifier) == (first.layers, first.identifier)


def test_a_row_that_moves_renews_the_system_layers_and_no_other(days: Days) -> None:
    first = days.build()
    of_first = days.base
    days.archive.sign("2", SECOND)
    days.lock()
    second = days.build(locked=True)
    assert (days.version(second), second.labels[ARCHIVES_LABEL]) == (
        "2",
        line_of_state(days.base.states[0]),
    )
    if days.same_bytes:
        same = [
            first_layer == other
            for first_layer, other in zip(first.layers, second.layers, strict=True)
        ]
        assert same == [*[True] * (len(same) - 2), False, True]
        # An image that was built before under the name says nothing about this one.
        days.base = of_first
        assert days.build(locked=True).identifier == first.identifier


def test_one_security_update_of_twenty_packages_gives_one_new_layer(days: Days) -> None:
    """Keep the digests of the base and of the layers of wheels, so that a registry has them
    already.

    The update is of a package that the base itself has.
    """
    days.archive.others = {f"trainworks-other-{number}": "1" for number in range(19)}
    days.packages = tuple(days.archive.others)
    days.layers = 5
    days.archive.sign("1", FIRST)
    days.install_in_base("1")
    days.lock()
    first = days.build(locked=True)
    assert days.version(first) == "1"
    days.archive.sign("2", SECOND)
    days.lock()
    second = days.build(locked=True)
    with days.engine.container(second.identifier) as container:
        versions = container.run(
            ("sh", "-c", "cat /usr/share/demo /usr/share/trainworks-other-*")
        ).output.split()
    assert versions == ["2", *["1"] * 19]
    if days.same_bytes:
        new = [
            number for number, layer in enumerate(second.layers) if layer != first.layers[number]
        ]
        assert len(first.layers) == len(second.layers)
        # Behind the layers of the base, and before those of wheels.
        assert new == [len(second.layers) - days.layers - 1]


def test_a_bootstrapped_base_has_the_release_and_no_update(days: Days, tmp_path: Path) -> None:
    """Get the same bytes on each day between two point releases, although this machine's archive
    changes.
    """
    facts = load(ROOT)
    debian = own_base(make_plan(Request(framework="pytorch", cuda="cpu"), facts))
    assert debian is not None
    settings = read_host_settings(os.environ)
    suite, uri = settings.suite, days.archive.today
    updates = AptSource(uri=uri, suite=f"{suite}-security", components="main", trusted=True)
    settings = replace(
        settings, apt=replace(settings.apt, sources=(*settings.apt.sources, updates))
    )
    days.archive.requests.clear()
    base_identifier = bootstrap(debian, tmp_path / "base.tar", settings, lambda _line: None)
    assert days.archive.requests == []
    base_image = days.engine.inspect(debian.name)
    assert base_image is not None
    assert base_identifier.rpartition(":")[2] == base_image.identifier.rpartition(":")[2]
    with days.engine.container(debian.name) as container:
        recorded = container.run(("cat", RECORD)).output.splitlines()
    assert [line.split()[0] for line in recorded] == [debian.row.suite]


def test_where_only_todays_archive_is_the_image_says_so(
    days: Days, capsys: pytest.CaptureFixture[str]
) -> None:
    days.archive.sign("2", SECOND)
    with pytest.raises(LockError, match=f"{SUITE} is locked as of {dated(FIRST)}"):
        days.build(snapshots=False, locked=True)
    image = days.build(snapshots=False)
    assert f"the archive has it of {dated(SECOND)}" in capsys.readouterr().err
    assert days.version(image) == "2"
    assert image.labels[ARCHIVES_LABEL].startswith(f"{SUITE} {dated(SECOND)} ")
    # Its layers are in the engine's cache, and their origin does not change when a snapshot can be
    # reached.
    days.other = "two"
    later = days.build()
    assert (days.version(later), later.labels[ARCHIVES_LABEL]) == (
        "2",
        image.labels[ARCHIVES_LABEL],
    )
    with pytest.raises(LockError, match="has system packages of another day than the lock"):
        days.build(locked=True)
    right = days.build(locked=True, no_cache=True)
    assert (days.version(right), right.labels[ARCHIVES_LABEL]) == (
        "1",
        line_of_state(days.base.states[0]),
    )


def test_the_same_packages_signed_again_are_the_same_state(days: Days) -> None:
    first = days.build(snapshots=False)
    days.archive.sign("1", SECOND)
    state = days.base.states[0]
    again = days.build(snapshots=False, locked=True, no_cache=True)
    assert again.labels[ARCHIVES_LABEL] == first.labels[ARCHIVES_LABEL] == line_of_state(state)
    with Client(days.settings) as client:
        assert read_todays_states(days.base.row, days.settings, client, days.base.states) == (
            state,
        )


def test_the_label_is_of_the_layers_and_not_of_today(days: Days) -> None:
    """Keep the layers of a removed image: today's archive says nothing about them."""
    first = days.build(snapshots=False)
    days.engine.tag(first.identifier, f"{days.tag}-kept")
    days.engine.remove(days.tag)
    days.archive.sign("2", SECOND)
    again = days.build(snapshots=False)
    days.engine.remove(f"{days.tag}-kept")
    assert days.version(again) == "1"
    assert again.labels[ARCHIVES_LABEL] == first.labels[ARCHIVES_LABEL]
