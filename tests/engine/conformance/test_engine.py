"""Test the duties of every engine, for real."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from testinfra.host import Host  # type: ignore[import-untyped]

from engine.helpers import BASE, request
from trainworks.engine import create, isolation, read_files, subprocesses
from trainworks.engine.docker import DockerEngine
from trainworks.engine.protocol import (
    BuildRequest,
    BuiltImage,
    Engine,
    Job,
    Mount,
    Progress,
    Secret,
    StepEvent,
)
from trainworks.engine.tree import read_tree
from trainworks.errors import BuildError, OutputError
from trainworks_testing.clock import PATIENCE, assert_within, start_clock

pytestmark = pytest.mark.engine

FULL = f"""\
FROM {BASE} AS compiler
RUN --mount=type=cache,target=/cache,id=trainworks-conformance,sharing=locked \\
    date >> /cache/runs; echo compiling
RUN --mount=type=secret,id=token --mount=type=secret,id=other \\
    sha256sum < /run/secrets/token > /digest && echo hidden
FROM {BASE} AS tools
RUN --mount=type=bind,source=files,target=/context cat /context/data > /data
FROM {BASE} AS final
COPY --from=compiler /digest /digest
COPY --from=tools /data /data
COPY --chmod=0755 files/tool /usr/bin/tool
ENV ANSWER=42
LABEL org.example.flavour="tiny"
ENTRYPOINT ["/usr/bin/tool"]
CMD ["by", "default"]
"""
FILES = {
    "files/tool": (
        "#!/bin/sh\n"
        'echo "arguments: $*"\n'
        'echo "answer $ANSWER mode $MODE"\n'
        "cat /given/text 2>/dev/null\n"
        'test "$1" != fail || exit 5\n'
        'test "$1" != wait || sleep 600\n'
    ),
    "files/data": "data\n",
}
SECRET = b"a secret that nobody may find " + b"0123456789abcdef" * 4
COMPONENTS = {"compiler": "metis", "tools": "python", "final": "launcher"}


BUILT: list[str] = []


def ignore(_: StepEvent) -> None:
    pass


def build(engine: Engine, build_request: BuildRequest, progress: Progress) -> BuiltImage:
    built = engine.build(build_request, progress)
    BUILT.append(built.identifier)
    return built


@pytest.fixture(autouse=True)
def _nothing_is_left(engine: Engine, image: tuple[str, list[StepEvent]]) -> Iterator[None]:
    """Remove images that lost their name to a later build of the same test."""
    BUILT.clear()
    yield
    current_image = engine.inspect(image[0])
    for identifier in BUILT:
        if current_image is None or identifier != current_image.identifier:
            with contextlib.suppress(BuildError):
                engine.remove(identifier)


def full_build(
    engine: Engine, folder: Path, tag: str, **options: Any
) -> tuple[list[StepEvent], Any]:
    events: list[StepEvent] = []
    secrets = (Secret(identifier="token", content=SECRET), Secret(identifier="other", content=b"x"))
    built = build(
        engine,
        request(
            folder,
            options.pop("dockerfile", FULL),
            files=options.pop("files", FILES),
            tags=(tag,),
            secrets=secrets,
            components=COMPONENTS,
            **options,
        ),
        events.append,
    )
    return events, built


@pytest.fixture(scope="module")
def image(
    engine: Engine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, list[StepEvent]]]:
    tag = f"trainworks-conformance-{uuid.uuid4().hex[:12]}:full"
    events, _ = full_build(engine, tmp_path_factory.mktemp("full"), tag, no_cache=True)
    yield tag, events
    engine.remove(tag)


def test_probe_names_itself_its_version_and_its_program(engine: Engine) -> None:
    information = engine.probe()
    assert information.name == engine.name
    assert information.version[0].isdigit()
    assert Path(information.program).is_absolute()


def test_the_base_image_is_there_with_its_environment(engine: Engine) -> None:
    built = engine.inspect(BASE)
    assert built is not None
    assert built.environment == {"PATH": "/bin:/usr/bin", "FLAVOUR": "tiny"}
    assert built.identifier.startswith("sha256:")
    assert built.size > 500_000


def test_an_unknown_image_is_none_or_an_error_that_names_it(engine: Engine) -> None:
    missing = "trainworks-conformance:there-is-none"
    assert engine.inspect(missing) is None
    engine.remove(missing)
    with pytest.raises(BuildError, match="there-is-none"):
        engine.history(missing)
    with pytest.raises(BuildError, match="there-is-none"), engine.container(missing):
        pass
    with pytest.raises(BuildError, match="there-is-none"):
        engine.tag(missing, "trainworks-conformance:other")


def test_what_is_no_archive_cannot_be_loaded(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "text.tar").write_text("no archive")
    with pytest.raises(BuildError, match=r"text\.tar"):
        engine.load(tmp_path / "text.tar")
    with pytest.raises(OutputError, match="cannot read"):
        engine.load(tmp_path / "missing.tar")


def test_tag_and_remove(engine: Engine, tag: str) -> None:
    engine.tag(BASE, tag)
    tagged, base = engine.inspect(tag), engine.inspect(BASE)
    assert tagged is not None
    assert base is not None
    assert tagged.identifier == base.identifier
    assert {tag, BASE} <= set(engine.names())
    engine.remove(tag)
    assert engine.inspect(tag) is None
    assert tag not in engine.names()
    assert engine.inspect(BASE) is not None


def test_pull_from_where_nothing_is(engine: Engine) -> None:
    assert engine.pull("registry.invalid/nothing:there", timeout=300) is False


def test_the_built_image_has_labels_environment_and_name(
    engine: Engine, image: tuple[str, list[StepEvent]]
) -> None:
    built = engine.inspect(image[0])
    assert built is not None
    assert built.reference == image[0]
    assert built.labels["org.example.flavour"] == "tiny"
    assert built.environment["ANSWER"] == "42"
    assert built.environment["FLAVOUR"] == "tiny"


def test_events_are_in_order_and_name_the_component(image: tuple[str, list[StepEvent]]) -> None:
    _, events = image
    for component, word in (("metis", "compiling"), ("metis", "hidden")):
        states = [
            event
            for event in events
            if event.component == component and f"echo {word}" in event.step
        ]
        assert [event.state for event in states] == ["started", "output", "done"]
        assert states[1].text == word
    order = [
        event.step[:30]
        for event in events
        if event.component == "launcher" and event.state == "started"
    ]
    copies = [step for step in order if step.startswith("COPY")]
    assert [step.split()[1] for step in copies] == [
        "--from=compiler",
        "--from=tools",
        "--chmod=0755",
    ]


def test_no_secret_in_any_layer_history_or_configuration(
    engine: Engine, image: tuple[str, list[StepEvent]]
) -> None:
    digest = hashlib.sha256(SECRET).hexdigest().encode()
    contents = []
    with engine.layers(image[0]) as layers:
        names = []
        for layer in layers:
            names.append(layer.name)
            for member in layer.archive:
                file = layer.archive.extractfile(member) if member.isreg() else None
                if file is not None:
                    with file:
                        contents.append(file.read())
                assert "run/secrets/token" not in member.name or member.size == 0
    assert len(names) == len(set(names)) >= 4
    assert any(digest in content for content in contents)
    assert not any(SECRET in content for content in contents)
    assert SECRET.decode() not in repr(engine.history(image[0])) + repr(engine.inspect(image[0]))
    temporary = str(Path(tempfile.gettempdir()))
    assert f"{temporary}/trainworks-" not in repr(engine.history(image[0]))


def test_history_is_first_step_first_with_sizes(
    engine: Engine, image: tuple[str, list[StepEvent]]
) -> None:
    history = engine.history(image[0])
    assert history[0].size > 500_000
    order = [entry.created_by for entry in history]
    assert "ENTRYPOINT" in order[-2]
    assert "CMD" in order[-1]
    assert sum(entry.size for entry in history[1:]) < 100_000


def test_the_size_of_an_image_is_not_that_of_its_compressed_layers(
    engine: Engine, tmp_path: Path, tag: str
) -> None:
    dockerfile = f"FROM {BASE}\nCOPY files/zeros /zeros\n"
    _, built = full_build(
        engine, tmp_path, tag, dockerfile=dockerfile, files={"files/zeros": "\0" * 20_000_000}
    )
    assert 20_000_000 < built.size < 25_000_000


def test_a_build_starts_from_every_name_of_an_image(
    engine: Engine, image: tuple[str, list[StepEvent]], tmp_path: Path, tag: str
) -> None:
    built = engine.inspect(image[0])
    assert built is not None
    for number, name in enumerate((image[0], *built.digests)):
        _, child = full_build(
            engine, tmp_path / str(number), tag, dockerfile=f"FROM {name}\nLABEL child=yes\n"
        )
        assert child.labels.items() >= {**built.labels, "child": "yes"}.items()


def test_a_build_for_a_label_makes_no_layer(
    engine: Engine, image: tuple[str, list[StepEvent]], tmp_path: Path, tag: str
) -> None:
    first = engine.inspect(image[0])
    assert first is not None
    build_request = dataclasses.replace(
        request(tmp_path, f"FROM {image[0]}\n", tags=(tag,)), labels={"more": "1"}
    )
    built = engine.build(dataclasses.replace(build_request, same_layers=True), ignore)
    assert built.labels["more"] == "1"
    assert (built.layers, built.entry_point, built.command) == (
        first.layers,
        first.entry_point,
        first.command,
    )
    assert engine.inspect(image[0]) == first, "another name's image is removed"
    again = engine.build(
        dataclasses.replace(build_request, labels={"more": "2"}, same_layers=True), ignore
    )
    assert again.labels["more"] == "2"
    assert engine.name != "docker" or engine.inspect(built.identifier) is None, (
        "it is left without a name"
    )


def test_a_second_build_is_cached_even_with_another_secret(
    engine: Engine, tmp_path: Path, tag: str
) -> None:
    _, first = full_build(engine, tmp_path / "a", tag)
    events, second = full_build(engine, tmp_path / "b", tag)
    assert second.identifier == first.identifier
    assert not [event for event in events if event.state == "output" and event.component]
    assert {event.step for event in events if event.state == "cached"} >= {
        event.step for event in events if event.step.startswith(("RUN", "COPY"))
    }


def test_a_changed_file_rebuilds_only_the_later_steps(
    engine: Engine, tmp_path: Path, tag: str
) -> None:
    full_build(engine, tmp_path / "a", tag)
    changed = {**FILES, "files/data": f"other data {uuid.uuid4()}\n"}
    events, _ = full_build(engine, tmp_path / "b", tag, files=changed)
    states = {event.step: event.state for event in events if event.step.startswith(("RUN", "COPY"))}
    rebuilt = {step.split(" ", 2)[1] for step, state in states.items() if state == "done"}
    cached = {step for step, state in states.items() if state == "cached"}
    assert "--mount=type=bind,source=files,target=/context" in rebuilt
    assert "--from=tools" in rebuilt
    assert len([step for step in cached if "type=secret" in step or "type=cache" in step]) == 2


def test_proxies_reach_the_steps_and_nothing_else(engine: Engine, tmp_path: Path, tag: str) -> None:
    dockerfile = f'FROM {BASE} AS only\nRUN echo {uuid.uuid4()}; echo "proxy is $http_proxy"\n'
    proxy = "http://user:password@proxy.invalid:3128"

    def lines(value: str) -> list[str]:
        events: list[StepEvent] = []
        folder = tmp_path / uuid.uuid4().hex
        build(
            engine,
            request(folder, dockerfile, tags=(tag,), arguments={"http_proxy": value}),
            events.append,
        )
        return [
            event.text
            for event in events
            if event.state == "output" and event.text.startswith("proxy is")
        ]

    assert lines(proxy) == [f"proxy is {proxy}"]
    assert lines("http://other.invalid") == [], "another proxy must not change the cache's key"
    assert "password" not in repr(engine.history(tag)) + repr(engine.inspect(tag))


def test_a_failing_step_names_component_command_status_and_lines(
    engine: Engine, tmp_path: Path
) -> None:
    dockerfile = (
        f"FROM {BASE} AS ok\n"
        "RUN true\n"
        f"FROM {BASE} AS bad\n"
        "COPY --from=ok /bin/sh /x\n"
        "RUN seq 1 40; exit 9\n"
    )
    events: list[StepEvent] = []
    with pytest.raises(BuildError) as caught:
        engine.build(
            request(tmp_path, dockerfile, components={"bad": "torch", "ok": "base"}), events.append
        )
    lines = caught.value.message.splitlines()
    assert lines[0] == "building tiny failed in component torch"
    assert lines[1] == "  step: RUN seq 1 40; exit 9"
    assert lines[2] == "  end: exit status 9"
    assert [line.strip() for line in lines[4:]] == [str(number) for number in range(21, 41)]
    assert [event.component for event in events if event.state == "failed"] == ["torch"]


def test_a_malformed_dockerfile_is_a_build_error(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="RUNN"):
        engine.build(request(tmp_path, f"FROM {BASE}\nRUNN true\n"), ignore)


def test_a_missing_context_file_is_a_build_error(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="no-such-file"):
        engine.build(
            request(
                tmp_path, f"FROM {BASE} AS a\nCOPY no-such-file /\n", components={"a": "torch"}
            ),
            ignore,
        )


def test_a_container_answers_testinfra(engine: Engine, image: tuple[str, list[StepEvent]]) -> None:
    with engine.container(image[0]) as container:
        host = Host(container.testinfra_backend())
        assert host.file("/etc/os-release").exists
        assert host.file("/usr/bin/tool").mode == 0o755
        assert host.run("true").rc == 0
        result = host.run("echo out; echo err >&2; exit 3")
        assert (result.rc, result.stdout, result.stderr) == (3, "out\n", "err\n")
        assert host.check_output("echo $ANSWER") == "42"


def test_a_container_runs_commands_with_status_and_output(
    engine: Engine, image: tuple[str, list[StepEvent]]
) -> None:
    with engine.container(image[0]) as container:
        done = container.run(("sh", "-c", "echo a; echo b >&2; echo $FLAVOUR; exit 4"))
        assert done.status == 4
        assert sorted(done.output.split()) == ["a", "b", "tiny"]
        assert container.run(("sh", "-c", "printf x; kill -9 $$")).status == 137
        assert container.run(("no-such-program",)).status in {126, 127}
        container.run(("touch", "/left"))
        assert container.run(("ls", "/left")).status == 0
        began = start_clock()
        late = container.run(("sh", "-c", "echo begun; sleep 600"), timeout=2)
        assert late.status == 124
        assert "begun" in late.output
        assert_within(60, began, time.monotonic(), late.output)
        assert container.run(("ls", "/left")).status == 0
    with engine.container(image[0]) as container:
        assert container.run(("ls", "/left")).status != 0


def test_run_passes_entry_point_mounts_environment_and_status(
    engine: Engine, image: tuple[str, list[StepEvent]], tmp_path: Path
) -> None:
    (tmp_path / "text").write_text("given text\n")
    mounts = (Mount(source=tmp_path, target="/given", read_only=True),)
    done = engine.run(
        image[0], Job(command=("train", "it"), mounts=mounts, environment={"MODE": "a b"})
    )
    assert done.status == 0
    assert done.output == "arguments: train it\nanswer 42 mode a b\ngiven text\n"
    assert engine.run(image[0], Job(command=())).output.startswith("arguments: by default\n")
    assert engine.run(image[0], Job(command=("fail",))).status == 5
    assert engine.run(BASE, Job(command=("no-such-program",))).status == 127
    late = engine.run(image[0], Job(command=("wait",), timeout=2))
    assert late.status == 124
    assert late.output.startswith("arguments: wait\n")


def test_containers_and_jobs_get_the_processor_that_qemu_is_told(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QEMU_CPU", "neoverse-n2,pauth=off")
    ask = ("sh", "-c", 'echo "$QEMU_CPU"')
    with engine.container(BASE) as container:
        assert container.run(ask).output.split() == ["neoverse-n2,pauth=off"]
        assert (
            Host(container.testinfra_backend()).check_output('echo "$QEMU_CPU"')
            == "neoverse-n2,pauth=off"
        )
    assert engine.run(BASE, Job(command=ask)).output.split() == ["neoverse-n2,pauth=off"]
    assert engine.run(BASE, Job(command=ask, environment={"QEMU_CPU": "max"})).output.split() == [
        "max"
    ]
    monkeypatch.delenv("QEMU_CPU")
    assert engine.run(
        BASE, Job(command=("sh", "-c", 'echo "${QEMU_CPU-unset}"'))
    ).output.split() == ["unset"]


def test_run_may_write_to_a_mount(engine: Engine, tmp_path: Path) -> None:
    done = engine.run(
        BASE,
        Job(
            command=("sh", "-c", "echo hi > /out/file"),
            mounts=(Mount(source=tmp_path, target="/out"),),
        ),
    )
    assert done.status == 0
    assert (tmp_path / "file").read_text() == "hi\n"


def test_two_builds_at_once(engine: Engine, tmp_path: Path, tag: str) -> None:
    def build_one(number: int) -> str:
        dockerfile = f"FROM {BASE} AS a\nRUN echo {number} {uuid.uuid4()} > /number && sleep 1\n"
        folder = tmp_path / str(number)
        return engine.build(
            request(folder, dockerfile, tags=(f"{tag}-{number}",)), ignore
        ).identifier

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        identifiers = list(pool.map(build_one, (1, 2)))
    try:
        assert len(set(identifiers)) == 2
        for number in (1, 2):
            assert engine.run(f"{tag}-{number}", Job(command=("cat", "/number"))).output.startswith(
                f"{number} "
            )
    finally:
        for number in (1, 2):
            engine.remove(f"{tag}-{number}")


BUILDER = """
import sys
from pathlib import Path
from trainworks.engine import create
from trainworks.engine.protocol import BuildRequest, Secret

def say(event):
    print(event.state, event.component, event.text, flush=True)

request = BuildRequest(
    name="tiny",
    context=Path(sys.argv[2]),
    tags=(),
    stage_components={"a": "torch"},
    secrets=(Secret(identifier="token", content=b"x"),),
)
create(sys.argv[1]).build(request, say)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "ctrl-c twice"])
def test_an_interrupted_build_leaves_nothing(
    engine: Engine, tmp_path: Path, number: signal.Signals
) -> None:
    mark = str(uuid.uuid4().int)[:9]
    context = tmp_path / "context"
    # The second sleep leaves the process group, as a daemon would.
    request(
        context, f"FROM {BASE} AS a\nRUN setsid sleep 1{mark} & echo begun {mark}; sleep 2{mark}\n"
    )
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    before = leftovers(engine, BASE)
    with subprocess.Popen(
        (sys.executable, "-c", BUILDER, engine.name, str(context)),
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line == f"output torch begun {mark}\n":
                break
        process.send_signal(signal.SIGINT)
        if number is signal.SIGKILL:
            process.send_signal(signal.SIGINT)
        try:
            _, errors = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
    assert "KeyboardInterrupt" in errors
    assert [
        path.name for path in temporary.iterdir() if not path.name.startswith("buildah-cache")
    ] == []
    deadline = time.monotonic() + PATIENCE
    # A build of a test beside this one has such containers for as long as it runs.
    left = leftovers(engine, BASE) - before
    while left & leftovers(engine, BASE):
        assert time.monotonic() < deadline, left
        time.sleep(1)
    # dockerd ends the step's processes on its own side, just after its client is gone.
    while running(mark):
        assert time.monotonic() < deadline, running(mark)
        os.sched_yield()


def running(mark: str) -> list[str]:
    lines_found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if line.startswith(b"sleep") and mark.encode() in line:
            lines_found.append(f"{folder.name} {line!r}")
    return lines_found


def leftovers(engine: Engine, tag: str) -> set[str]:
    """Return the containers of an image that the engine has.

    Those of others come and go: tests beside this one have images of their own.
    """
    information = engine.probe()
    if engine.name == "docker":
        # Not by `ancestor`: Docker knows no ancestor of an image that BuildKit built.
        argv = (information.program, "ps", "--all", "--format", "{{.Names}} {{.Image}}")
        lines = [
            line.split()
            for line in subprocesses.run(argv, timeout=300).output.decode().splitlines()
        ]
        return {name for name, image in lines if tag in image}
    done = subprocesses.run((information.program, "containers", "--json"), timeout=300)
    listed = json.loads(done.output or b"null") or []
    return {entry["id"] for entry in listed if tag in (entry.get("imagename") or "")}


def test_nothing_is_left_of_containers_and_runs(
    engine: Engine, image: tuple[str, list[StepEvent]]
) -> None:
    before = leftovers(engine, image[0])

    def work() -> None:
        with engine.container(image[0]) as container:
            container.run(("true",))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    engine.run(image[0], Job(command=("x",)))
    assert leftovers(engine, image[0]) <= before


KILLED = """
import os, signal, sys
from trainworks.engine import create
with create(sys.argv[1]).container(sys.argv[2]) as container:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_next_builder_removes_the_container_of_one_that_was_killed(
    engine: Engine, image: tuple[str, list[StepEvent]]
) -> None:
    before = leftovers(engine, image[0])
    killed = subprocess.run((sys.executable, "-c", KILLED, engine.name, image[0]), check=False)
    assert killed.returncode == -signal.SIGKILL
    # The builder of a test beside this one may have removed it already.
    assert len(leftovers(engine, image[0]) - before) <= 1
    with create(engine.name).container(image[0]):
        pass
    assert leftovers(engine, image[0]) <= before


def test_cold_builds_are_byte_identical_where_the_engine_can(
    engine: Engine, tmp_path: Path, tag: str
) -> None:
    if isinstance(engine, DockerEngine) and not engine.sets_times():
        pytest.skip(
            "this Docker writes the time of the build into the image (it needs 26, with"
            " containerd's store)"
        )
    identifiers = {
        full_build(engine, tmp_path / str(number), tag, no_cache=True)[1].identifier
        for number in (1, 2)
    }
    assert len(identifiers) == 1


def test_a_build_without_a_network_sees_nothing_of_this_machine(
    engine: Engine, tmp_path: Path, tag: str
) -> None:
    """Build a step that runs code of others: buildah's usual isolation shows it services on
    loopback, and processes.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = f"{server.getsockname()[1]:04X}"
        look = f"grep :{port} /proc/net/tcp; cat /proc/net/dev; ls -d /proc/[0-9]*"
        text = (
            f"FROM {BASE} AS asked\n"
            f"RUN ({look}) > /answer 2>&1\n"
            "FROM scratch\n"
            "COPY --from=asked /answer /\n"
        )
        build_request = dataclasses.replace(request(tmp_path, text, tags=(tag,)), network="none")
        engine.build(build_request, ignore)
    answer = read_files(engine, tag)["answer"].decode()
    assert f":{port}" not in answer
    devices = re.findall(r"^ *(\w+):", answer, re.MULTILINE)
    assert devices[0] == "lo"
    assert not [name for name in devices if name.startswith(("e", "cni", "docker"))]
    assert answer.count("/proc/") < 10, answer


CLOSED = """\
echo user $(id -u)
grep -E '^(CapEff|CapBnd|NoNewPrivs):' /proc/self/status
echo networks $(ls /sys/class/net)
echo processes $(ls -d /proc/[0-9]* | wc -l)
touch /etc/new /tmp/new 2>/dev/null || echo read-only
echo '#!/bin/sh' >$TMPDIR/program && chmod +x $TMPDIR/program && $TMPDIR/program && echo temporary
"""


@pytest.fixture
def closing(engine: Engine) -> Engine:
    """Give an engine that can isolate here."""
    if words := engine.isolates():
        pytest.skip(f"NOT TESTED: {engine.name} cannot isolate here: {words}")
    return engine


def test_an_asked_container_is_closed(closing: Engine) -> None:
    with closing.container(BASE, isolated="asked") as container:
        words = container.run(("sh", "-c", CLOSED)).output.split()
    number = words.index("processes") + 1
    assert int(words.pop(number)) < 10
    closed = (
        "user 0 CapBnd: 0000000000000000 CapEff: 0000000000000000 NoNewPrivs: 1 networks lo"
        " processes read-only"
    )
    assert sorted(words) == sorted(f"{closed} temporary".split())


def test_an_asked_container_cannot_reach_a_process_of_the_host(closing: Engine) -> None:
    with subprocess.Popen(("sleep", "600.25")) as ours:
        try:
            script = (
                f"kill {ours.pid} && echo killed=$((1)); for each in /proc/[0-9]*; do cat"
                " $each/cmdline; done"
            )
            with closing.container(BASE, isolated="asked") as container:
                output = container.run(("sh", "-c", script)).output
            assert "killed=1" not in output
            assert "600.25" not in output
            assert ours.poll() is None
        finally:
            ours.kill()


def test_an_asked_container_ends_endless_output_and_endless_work(closing: Engine) -> None:
    with closing.container(BASE, isolated="asked") as container:
        endless = container.run(("yes",), timeout=600)
        assert endless.status == subprocesses.TOO_MUCH
        assert endless.output.endswith(
            f"(stopped after {isolation.OUTPUT_BYTES} bytes of output)\n"
        )
        assert len(endless.output) < 10_000
        assert container.run(("sh", "-c", "while :; do :; done"), timeout=2).status == 124
        assert container.run(("echo", "still here")).output == "still here\n"


def test_an_asked_container_has_a_limit_of_processes(closing: Engine) -> None:
    script = (
        f"i=0; while [ $i -lt {2 * isolation.MOST_PROCESSES} ];"
        " do sleep 60 & i=$((i + 1)); done; echo all"
    )
    with closing.container(BASE, isolated="asked") as container:
        assert not container.run(("sh", "-c", script), timeout=PATIENCE).output.endswith("all\n")


def test_a_job_that_is_isolated_may_change_its_own_files_and_users(closing: Engine) -> None:
    script = (
        "touch /tmp/new && echo wrote; echo networks $(ls /sys/class/net); grep NoNewPrivs"
        " /proc/self/status"
    )
    with closing.container(BASE, isolated="job") as container:
        lines = container.run(("sh", "-c", script)).output.split()
    assert lines == ["wrote", "networks", "lo", "NoNewPrivs:", "1"]


def test_an_isolated_run_starts_the_entry_point(
    closing: Engine, image: tuple[str, list[StepEvent]]
) -> None:
    done = closing.run(image[0], Job(command=("a", "b"), isolated="asked"))
    assert (done.status, done.output.splitlines()[0]) == (0, "arguments: a b")


def test_the_files_of_an_image_are_read_without_it(
    engine: Engine, tmp_path: Path, tag: str
) -> None:
    dockerfile = (
        f"FROM {BASE}\n"
        "RUN mkdir /gone /kept && echo a >/gone/a && echo a >/kept/a"
        " && ln -s ../etc /kept/etc && ln -s /kept/../../../kept/a"
        " /kept/up && ln -s /none /kept/none && ln -s loop /kept/loop\n"
        "RUN rm -r /gone && echo b >/kept/a && rm /bin/sh\n"
    )
    _, built = full_build(engine, tmp_path, tag, dockerfile=dockerfile)
    tree = read_tree(engine, built.reference, re.compile("/kept/a|/etc/passwd"))
    assert tree.read("/kept/a") == b"b\n"
    assert tree.read("/kept/up") == b"b\n"
    assert (tree.read("/kept/etc/passwd") or b"").startswith(b"root:")
    assert [
        tree.kind(path) for path in ("/gone/a", "/gone", "/kept/none", "/kept/loop", "/bin/sh")
    ] == [""] * 5
    assert [tree.kind(path) for path in ("/", "/kept", "/bin/ls")] == ["folder", "folder", "file"]
    assert tree.runs("/bin/ls")
    assert sorted(tree.below("/kept")) == [
        f"/kept/{name}" for name in ("a", "etc", "loop", "none", "up")
    ]
