"""Test failures of an engine: a step is tried again, and is then the engine's failure, not a
command's, a step's or an image's.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from testinfra.host import Host  # type: ignore[import-untyped]

from engine.daemons import own_daemon
from engine.faults import ALWAYS, BUILDAH, FORGETFUL, LOSING, RUNTIME, Faulty
from engine.helpers import BASE, request
from trainworks.engine.buildah import BuildahEngine
from trainworks.engine.docker import DockerEngine
from trainworks.engine.protocol import Engine, Job, StepEvent
from trainworks.engine.retry import ATTEMPTS
from trainworks.errors import EngineError, EngineUnavailableError
from trainworks.imagetest.results import CheckResult
from trainworks.imagetest.run import run_checks
from trainworks.imagetest.test_promises import ImageUnderTest
from trainworks.plan.checks import CommandCheck, LabelCheck, PathCheck

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(os.geteuid() != 0, reason="a dockerd needs root"),
    pytest.mark.skipif(
        platform.machine() not in {"x86_64", "aarch64"}, reason="the number of a kernel call"
    ),
]

WORDS = {"buildah": "Close_Fd sealing memfd copy: Device or resource busy", "docker": "OCI runtime"}
CHECKS = (
    CommandCheck(component="a", command=("true",)),
    PathCheck(component="b", path="/etc/passwd", state="file"),
    CommandCheck(component="c", command=("false",)),
    LabelCheck(component="d", label="none", value="none"),
)


@pytest.fixture
def buildah(
    request: pytest.FixtureRequest,
    base_archive: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[Engine, Faulty]:
    """Give a buildah that fails when it runs a command: before that, or as the parameter says."""
    program = shutil.which("buildah")
    if program is None:
        pytest.skip("no buildah on this machine")
    faulty = Faulty(tmp_path, getattr(request, "param", BUILDAH), program)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    engine = BuildahEngine()
    try:
        assert engine.probe().program == str(faulty.path)
    except EngineUnavailableError as error:
        pytest.skip(f"buildah does not answer: {error.message}")
    engine.load(base_archive)
    return engine, faulty


@pytest.fixture(scope="module")
def daemon(
    base_archive: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, Faulty]]:
    """Give a dockerd whose runtime fails when a command is to be run in a container."""
    folder = tmp_path_factory.mktemp("daemon")
    runc = shutil.which("runc", path=f"{os.environ['PATH']}:/usr/sbin:/usr/bin")
    if runc is None:
        pytest.skip("no runc on this machine")
    faulty = Faulty(folder, RUNTIME, runc)
    runtime = ("--add-runtime", f"faulty={faulty.path}", "--default-runtime", "faulty")
    with own_daemon(folder / "data", "--iptables=false", *runtime) as daemon:
        engine = DockerEngine(host=daemon.host)
        engine.load(base_archive)
        yield engine, faulty


@pytest.fixture(params=["buildah", "daemon"])
def failing(request: pytest.FixtureRequest) -> tuple[Engine, Faulty]:
    """Give an engine that fails, and how often it will."""
    faulty_engine: tuple[Engine, Faulty] = request.getfixturevalue(request.param)
    return faulty_engine


def check(
    engine: Engine, reported: list[CheckResult], junit: Path | None = None
) -> tuple[CheckResult, ...]:
    image = engine.inspect(BASE)
    assert image is not None
    subject = ImageUnderTest(engine=engine, image=image, checks=CHECKS)
    return run_checks(subject, report=reported.append, junit=junit)


def test_a_check_is_tried_again_and_says_what_the_image_has(failing: tuple[Engine, Faulty]) -> None:
    engine, faulty = failing
    faulty.times = ATTEMPTS - 1
    results = check(engine, [])
    assert faulty.times == 0, "the engine did not fail: the test tests nothing"
    assert [result.passed for result in results] == [True, True, False, False]
    assert "false\nended with status 1" in results[2].detail


def test_an_engine_that_keeps_failing_breaks_no_promise(
    failing: tuple[Engine, Faulty], tmp_path: Path
) -> None:
    engine, faulty = failing
    faulty.times = ALWAYS
    reported: list[CheckResult] = []
    with pytest.raises(EngineError) as caught:
        check(engine, reported, tmp_path / "junit.xml")
    assert faulty.times <= ALWAYS - ATTEMPTS, (
        "several checks are asked at once; each is tried as often"
    )
    assert reported == []
    assert not (tmp_path / "junit.xml").exists()
    assert caught.value.message.startswith(f"{engine.name} failed running true in a container: ")
    assert WORDS[engine.name] in caught.value.message
    assert caught.value.exit_status == 19
    faulty.times = 0
    assert len(check(engine, reported)) == len(CHECKS), "the same engine works again"


def test_what_a_command_does_is_not_the_engines(failing: tuple[Engine, Faulty]) -> None:
    engine, faulty = failing
    faulty.times = 0
    with engine.container(BASE) as container:
        for command, status in (
            (("no-such-program",), {126, 127}),
            (("/etc/passwd",), {126, 127}),
            (("/etc",), {126, 127}),
            (("sh", "-c", "exit 126"), {126}),
            (("sh", "-c", "exit 125"), {125}),
            (("sh", "-c", "kill -9 $$"), {137}),
            (("sh", "-c", f"echo '{WORDS['buildah']}' >&2; exit 1"), {1}),
        ):
            assert container.run(command).status in status, command


def test_a_job_is_started_once(buildah: tuple[Engine, Faulty]) -> None:
    engine, faulty = buildah
    faulty.times = 1
    assert engine.run(BASE, Job(command=("sh", "-c", "echo one; exit 3"))).output == "one\n"
    faulty.times = ALWAYS
    with pytest.raises(EngineError, match=WORDS["buildah"]):
        engine.run(BASE, Job(command=("sh", "-c", "echo one")))


def hide_runtimes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the OCI runtimes out of PATH: buildah itself starts the steps of a build then."""
    folder.mkdir()
    for place in os.environ["PATH"].split(os.pathsep):
        programs = Path(place).iterdir() if Path(place).is_dir() else ()
        for program in programs:
            link = folder / program.name
            if program.name not in ("crun", "runc") and not link.is_symlink():
                link.symlink_to(program)
    monkeypatch.setenv("PATH", str(folder))


def test_a_step_is_tried_again(
    buildah: tuple[Engine, Faulty], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, faulty = buildah
    hide_runtimes(tmp_path / "programs", monkeypatch)
    events: list[StepEvent] = []
    dockerfile = f"FROM {BASE} AS only\nRUN echo {tmp_path.name} && echo done\n"
    context = request(tmp_path / "context", dockerfile, components={"only": "torch"}, no_cache=True)
    faulty.times = 1
    built = engine.build(context, events.append)
    engine.remove(built.identifier)
    assert faulty.times == 0
    assert [event.text for event in events if event.state == "output" and event.text == "done"] == [
        "done"
    ]
    faulty.times = ALWAYS
    with pytest.raises(EngineError) as caught:
        engine.build(context, events.append)
    assert faulty.times <= ALWAYS - ATTEMPTS, (
        "several checks are asked at once; each is tried as often"
    )
    assert caught.value.message.startswith(
        "buildah itself failed during the build of tiny, torch: RUN echo"
    )
    assert WORDS["buildah"] in caught.value.message


@pytest.mark.parametrize("buildah", [FORGETFUL], indirect=True)
def test_a_list_of_images_is_asked_for_again(buildah: tuple[Engine, Faulty]) -> None:
    engine, faulty = buildah
    faulty.times = ATTEMPTS - 1
    assert BASE.removeprefix("localhost/") in engine.names()
    assert faulty.times == 0
    faulty.times = ALWAYS
    with pytest.raises(EngineError, match=r"buildah failed listing images: .* image not known"):
        engine.names()


@pytest.mark.parametrize("buildah", [LOSING], indirect=True)
def test_what_a_command_printed_is_whole_or_the_engine_lost_it(
    buildah: tuple[Engine, Faulty],
) -> None:
    engine, faulty = buildah
    speak = ("sh", "-c", "echo out; echo error >&2; exit 3")
    with engine.container(BASE) as container:
        faulty.times = 1
        done = container.run(speak)
        assert (done.status, sorted(done.output.split())) == (3, ["error", "out"])
        assert faulty.times == 0
        faulty.times = 1
        command_result = Host(container.testinfra_backend()).run("echo out; echo error >&2; exit 3")
        assert (command_result.rc, command_result.stdout, command_result.stderr) == (
            3,
            "out\n",
            "error\n",
        )
        faulty.times = ALWAYS
        with pytest.raises(
            EngineError,
            match="buildah failed running sh in a container: the end of what it printed",
        ):
            container.run(speak)
        assert faulty.times <= ALWAYS - ATTEMPTS, (
            "several checks are asked at once; each is tried as often"
        )
    # A job is never run twice.
    faulty.times = 1
    job = engine.run(BASE, Job(command=speak))
    assert (job.status, job.output) == (3, "\n(buildah lost the end of this output)\n")
    assert sorted(engine.run(BASE, Job(command=speak)).output.split()) == ["error", "out"]
