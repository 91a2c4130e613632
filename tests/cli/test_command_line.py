"""Test ``build.py`` as a person runs it: a real process, its output on each stream, and its end."""

from __future__ import annotations

import json
import os
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import tomllib
import venv
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from trainworks.cli import main
from trainworks.facts.rows import Facts

CPU = ("--framework", "pytorch", "--cuda", "cpu")
NO_ENGINE = {"PATH": "", "DOCKER_HOST": "unix:///nonexistent/docker.sock"}
"""Environment of every test of this file: no engine, so none of them begins to build an image."""


def run(
    root: Path,
    *words: str,
    environment: Mapping[str, str] | None = None,
    program: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, str(program or root / "build.py"), *words]
    variables = {
        **os.environ,
        **NO_ENGINE,
        "PYTHONWARNINGS": "error::ResourceWarning",
        **(environment or {}),
    }
    return subprocess.run(
        argv, env=variables, capture_output=True, text=True, check=False, timeout=300
    )


Call = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def call(root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """Run the command line inside this process, for commands that end before an engine: a new
    process costs 0.4 s.
    """

    def call_main(
        *words: str, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        with monkeypatch.context() as patch:
            for name, value in {**NO_ENGINE, **(environment or {})}.items():
                patch.setenv(name, value)
            try:
                status = main(words, root)
            except SystemExit as error:
                status = int(str(error.code))
        output, errors = capsys.readouterr()
        return subprocess.CompletedProcess(words, status, output, errors)

    return call_main


def json_of(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


# Results.


def test_list_for_people(root: Path, facts: Facts) -> None:
    done = run(root, "--list", "--all")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["target", "patched", "to", "built"]
    rows = {line.split()[0]: line for line in lines[1:]}
    assert rows.keys() == {facts.name_of(row) for row in facts.targets}
    names = [name.split("-") for name in rows]
    numbers = []
    for name in names:
        parts = name[1].split(".")
        numbers.append((name[0], tuple(map(int, parts))))
    assert numbers == sorted(numbers), "2.10.0 comes after 2.7.1"
    for row in facts.targets:
        end = facts.end_of_patch(row)
        assert f"  {end.date if end else 'supported'}  " in rows[facts.name_of(row)]
    assert [line for line in lines if line != line.rstrip()] == []


def test_list_leaves_out_what_the_projects_machine_cannot_build(call: Call, facts: Facts) -> None:
    marked = [row for row in facts.targets if row.unbuilt]
    *lines, last = call("--list").stdout.splitlines()
    assert len(lines) == 1 + len(facts.targets) - len(marked)
    assert last == f"{len(marked)} more cannot be built on the project's own machine: add --all"
    assert not [line for line in lines if "  vendor  " in line or "arm64" in line]
    # A person who asks for nothing else gets these; JSON has the reason of each.
    lines = call("--list", "--sources", "vendor").stdout.splitlines()[1:]
    assert len(lines) == sum(facts.sources_of(row) == "vendor" for row in facts.targets)
    assert all(re.search(r"  no; \d+ parts$", line) for line in lines)
    assert "add --all" not in call("--list", "--all").stdout


@pytest.mark.parametrize("state", ["current", "older", "never"])
def test_list_filters_by_state(state: str, call: Call) -> None:
    rows = json_of(call("--list", "--format", "json"))
    names = {row["name"] for row in rows if row["state"] == state}
    assert {
        row["name"] for row in json_of(call("--list", "--state", state, "--format", "json"))
    } == names
    for row in rows:
        assert (row["state"] == "never") == (row["built"] is None)
        assert (row["state"] == "current") == bool(row["built"] and row["built"]["current"])


def test_the_first_column_of_the_list_names_a_target_for_every_command(call: Call) -> None:
    names = [line.split()[0] for line in call("--list", "--all").stdout.splitlines()[1:]]
    # That each name is one: test_every_target_has_a_name_and_a_command_of_its_own.
    for name in (names[0], names[-1]):
        assert [line.split()[0] for line in call("--list", name).stdout.splitlines()[1:]] == [name]
        for words in ((name,), ("build", name)):
            assert call(*words, "--until", "plan").stdout.startswith(f"{name}\n")


def test_list_for_programs(call: Call, facts: Facts) -> None:
    rows = json_of(call("--list", "--format", "json"))
    assert {row["name"] for row in rows} == {facts.name_of(row) for row in facts.targets}
    assert rows[0].keys() == {
        *(
            "name",
            "framework",
            "version",
            "cuda",
            "python",
            "base",
            "architecture",
            "sources",
            "stack",
            "versions",
            "unbuilt",
            "end_of_patch",
            "state",
            "built",
        ),
    }
    assert all(row["versions"] for row in rows)


def test_plan_for_people(call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    done = call("--framework", "pytorch", "--cuda", "cu121", "--without", "curl", "--until", "plan")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(
        "pytorch-2.4.1-cu121-py311-debian12\n  image  trainworks/pytorch-training:2.4.1-cu121"
    )
    assert "  torch               2.4.1       PyTorch" in done.stdout
    assert (
        "  aws-ofi-nccl        1.21.1      NCCL's network plugin for EFA, from its source\n"
        in done.stdout
    )
    assert "  without curl: scripts that call `curl` fail\n" in done.stdout
    assert "libgl" not in done.stdout, "no image has it by default"
    assert "checks after the build; at most 6300 MB\n" in done.stdout
    downloads = (
        r"  downloads about [23],\d{3} MB and 3 files of unknown size, less what caches have\n"
    )
    assert re.search(downloads, done.stdout)
    # The record is that of the target's own image.
    recorded = r"  image: [56],\d{3} MB when a build was last recorded\n"
    assert not re.search(recorded, done.stdout)
    usual = call("--framework", "pytorch", "--cuda", "cu121", "--until", "plan").stdout
    assert re.search(downloads + recorded, usual)


def test_a_plan_names_the_recipes_that_were_never_run(
    capsys: pytest.CaptureFixture[str], root: Path, facts: Facts
) -> None:
    shown = {}
    for sources, cuda in (("vendor", "cu113"), ("packages", "cu121")):
        assert (
            main(
                ("--framework", "pytorch", "--cuda", cuda, "--sources", sources, "--until", "plan"),
                root,
            )
            == 0
        )
        lines = capsys.readouterr().out.splitlines()
        shown[sources] = [
            line.partition(": ")[2] for line in lines if "were rendered and never run: " in line
        ]
    (names,) = shown["vendor"]
    proved = {row.name for row in facts.components if row.sources == ("vendor",) and row.proved}
    assert {"open-mpi", "metis"} <= proved
    assert not proved & set(names.split(", "))
    assert {"cudnn", "smp", "smddp"} <= set(names.split(", "))
    assert shown["packages"] == []


def test_plan_for_programs_is_the_same_in_every_run(root: Path) -> None:
    words = (
        "--framework",
        "pytorch",
        "--cuda",
        "cu124",
        "--python",
        "3.13",
        "--until",
        "plan",
        "--format",
        "json",
    )
    first = run(root, *words, environment={"PYTHONHASHSEED": "1"})
    assert json_of(first)["target"]["base"] == "debian13"
    assert (
        run(root, *words, environment={"PYTHONHASHSEED": "2", "TZ": "Asia/Tokyo"}).stdout
        == first.stdout
    )


def test_with_and_without(call: Call) -> None:
    without = ("mpi4py", "open-mpi", "libfabric", "aws-ofi-nccl", "gdrcopy", "libfabric-cuda")
    words = (
        "--with",
        "rmm-python",
        *(word for name in without for word in ("--without", name)),
        "--until",
        "plan",
    )
    plan = json_of(call("--framework", "pytorch", "--cuda", "cu121", *words, "--format", "json"))
    names = {step["component"] for step in plan["steps"]}
    assert "rmm-python" in names
    assert names.isdisjoint(without)


def test_rendering_on_stdout_is_the_dockerfile(root: Path, call: Call) -> None:
    done = call("--framework", "pytorch", "--cuda", "cu121", "--until", "render")
    assert (done.returncode, done.stderr) == (0, "")
    golden = (
        root / "tests" / "golden" / "render" / "pytorch-2.4.1-cu121-py311-debian12" / "Dockerfile"
    )
    assert done.stdout == golden.read_text(encoding="utf-8")


def contents(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Return everything below a folder: permissions, time and bytes of each file, by its path."""
    entries = {}
    for path in sorted(folder.rglob("*")):
        content = path.read_bytes() if path.is_file() else b""
        status = path.stat()
        entries[path.relative_to(folder).as_posix()] = (
            status.st_mode,
            int(status.st_mtime),
            content,
        )
    return entries


def test_output_is_the_same_context_every_time_whatever_the_umask(
    call: Call, tmp_path: Path
) -> None:
    words = (*CPU, "--until", "render", "--output")
    first, second = tmp_path / "first", tmp_path / "new" / "second"
    assert call(*words, str(first)).stdout == f"{first}\n"
    previous = os.umask(0o077)
    try:
        assert call(*words, str(second)).returncode == 0
    finally:
        os.umask(previous)
    assert contents(first) == contents(second)
    assert {"Dockerfile", "image.json", "requirements/torch.txt", "wheels/torch/.keep"} <= contents(
        first
    ).keys()
    assert call(*words, str(first)).returncode == 0, "a context of ours may be written again"
    assert contents(first) == contents(second)


def test_output_is_what_json_lists(call: Call, tmp_path: Path) -> None:
    content = json_of(
        call(*CPU, "--until", "render", "--output", str(tmp_path / "context"), "--format", "json")
    )
    files = {
        path for path in contents(tmp_path / "context") if (tmp_path / "context" / path).is_file()
    }
    assert files == {"Dockerfile", *content["files"]}
    assert (tmp_path / "context" / "Dockerfile").read_text(encoding="utf-8") == content[
        "dockerfile"
    ]


def test_an_earlier_context_of_another_target_leaves_nothing_behind(
    call: Call, tmp_path: Path
) -> None:
    folder = tmp_path / "context"
    for cuda in ("cu121", "cpu"):
        call("--framework", "pytorch", "--cuda", cuda, "--until", "render", "--output", str(folder))
    assert not (folder / "requirements" / "nccl.txt").exists()


@pytest.mark.parametrize(
    "files",
    [
        pytest.param({"notes.txt": "mine"}, id="nothing of ours"),
        pytest.param({"Dockerfile": "FROM scratch\n"}, id="a Dockerfile of somebody else"),
        pytest.param(
            {"Dockerfile": "# x\n# Written by trainworks\n", "thesis.tex": "mine"},
            id="ours, and something beside it",
        ),
    ],
)
def test_output_removes_nothing_that_is_not_ours(
    files: Mapping[str, str], call: Call, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    done = call(*CPU, "--until", "render", "--output", str(folder))
    assert (done.returncode, done.stdout) == (9, "")
    assert "has files that trainworks did not write" in done.stderr
    assert {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()} == files


def test_the_current_folder_may_be_another(root: Path, call: Call, tmp_path: Path) -> None:
    argv = [sys.executable, str(root / "build.py"), "--list"]
    done = subprocess.run(
        argv, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout == call("--list").stdout


@pytest.mark.parametrize("first", [("--root", "{root}"), ("--root={root}",)])
def test_the_checkout_may_stand_before_the_command(
    first: tuple[str, ...], root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word.format(root=root) for word in first]
    assert main([*words, "--list"], tmp_path) == 0
    assert "pytorch-2.13.0-cpu-py311-debian12" in capsys.readouterr().out
    assert main([*words, "--list", "--format", "json"], tmp_path) == 0
    assert "pytorch-2.13.0-cpu-py311-debian12" in {
        entry["name"] for entry in json.loads(capsys.readouterr().out)
    }


# Errors: one class, one exit status; stderr has the failure, its reason and the next step.


def test_malformed_facts_are_all_said(checkout: Path, call: Call) -> None:
    for name in ("cuda", "bases"):
        path = checkout / "images" / f"{name}.toml"
        path.write_text(
            path.read_text(encoding="utf-8").replace("source =", "sauce =", 1), encoding="utf-8"
        )
    done = call(*CPU, "--root", str(checkout))
    assert done.returncode == 3
    assert "4 problems in the facts:\n  images/bases.toml: base 1 (name = 'debian12'" in done.stderr
    assert "images/cuda.toml: cuda 1 (name = 'cpu'): unknown key 'sauce'" in done.stderr


def test_a_recipe_that_does_not_fit(checkout: Path, call: Call) -> None:
    path = checkout / "templates" / "components" / "tensorboard.j2"
    path.write_text(
        path.read_text(encoding="utf-8").replace("requirements)", "requirement)"), encoding="utf-8"
    )
    done = call(*CPU, "--root", str(checkout), "--until", "render")
    assert (done.returncode, done.stdout) == (5, "")
    assert "templates/components/tensorboard.j2: it reads `requirement`" in done.stderr


def test_a_lock_that_is_missing(checkout: Path, call: Call) -> None:
    (checkout / "images" / "lock" / "pytorch-2.13.0-cpu-py311-debian12.toml").unlink()
    done = call(*CPU, "--root", str(checkout), "--until", "plan")
    assert (done.returncode, done.stdout) == (11, "")
    assert "hint: `python build.py lock --only pytorch-2.13.0-cpu-py311-debian12`" in done.stderr


def test_without_an_engine_one_command_is_named(call: Call) -> None:
    done = call(*CPU)
    assert (done.returncode, done.stdout) == (6, "")
    assert "error: no container engine answers. Tried:\n  docker: " in done.stderr
    assert "\n  buildah: " in done.stderr
    assert done.stderr.endswith("hint: `make engine` installs one and starts it\n")


@pytest.mark.parametrize("engine", ["docker", "buildah"])
def test_an_engine_that_was_asked_for_and_does_not_answer(engine: str, call: Call) -> None:
    done = call(*CPU, "--engine", engine)
    assert (done.returncode, done.stdout) == (6, "")
    assert "hint: " in done.stderr
    assert "Traceback" not in done.stderr


def test_settings_that_pip_refuses(call: Call) -> None:
    done = call(*CPU, environment={"PIP_TIMEOUT": "soon"})
    assert (done.returncode, done.stdout) == (10, "")
    assert (
        "pip cannot read its settings: An error occurred during configuration: option timeout:"
        in done.stderr
    )


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_output_that_cannot_be_written(place: str, call: Call, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    done = call(*CPU, "--until", "render", "--output", str(tmp_path / place))
    assert (done.returncode, done.stdout) == (9, "")
    assert f"error: {tmp_path / 'file'}" in done.stderr
    assert (tmp_path / "file").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize("there", [False, True], ids=["a new folder", "an empty folder"])
def test_a_context_that_does_not_fit_on_the_disk_leaves_nothing(
    there: bool, root: Path, tmp_path: Path
) -> None:
    """A limit on the size of files ends the writing at the first large one, as
    a full disk does somewhere.
    """
    output = tmp_path / "context"
    if there:
        output.mkdir()
    done = subprocess.run(
        [
            sys.executable,
            str(root / "build.py"),
            *CPU,
            "--until",
            "render",
            "--output",
            str(output),
        ],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.returncode == 9, done.stderr
    assert "File too large" in done.stderr
    assert (list(output.iterdir()) == []) if there else not output.exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no full device")
@pytest.mark.parametrize(
    "words", [("--list",), ("--list", "--format", "json"), ("--list", "--cuda", "cpu")]
)
def test_a_full_disk_is_one_line(words: tuple[str, ...], root: Path) -> None:
    with Path("/dev/full").open("w") as full:
        argv = [sys.executable, str(root / "build.py"), *words]
        done = subprocess.run(
            argv, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=300
        )
    assert done.returncode == 9
    assert done.stderr == "error: cannot write to stdout: No space left on device\n"


@pytest.mark.parametrize("words", [("--list",), ("--list", "--format", "json")])
def test_a_reader_that_goes_away_is_no_error(words: tuple[str, ...], root: Path) -> None:
    """End quietly when the reader closes the pipe, as ``| head`` does.

    Here the pipe is closed before anything is written, for less text than it could hold.
    """
    reading, writing = os.pipe()
    os.close(reading)
    argv = [sys.executable, str(root / "build.py"), *words]
    try:
        done = subprocess.run(
            argv, stdout=writing, stderr=subprocess.PIPE, text=True, check=False, timeout=300
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


# The front door on a bare checkout.


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a Python that has nothing installed."""
    folder = tmp_path_factory.mktemp("bare") / "environment"
    venv.create(folder, with_pip=False, symlinks=True)
    return folder / "bin" / "python"


@pytest.fixture
def program(root: Path, tmp_path: Path) -> Path:
    """Give the program of a checkout that has nothing else."""
    for name in ("build.py", "pyproject.toml"):
        (tmp_path / name).write_bytes((root / name).read_bytes())
    return tmp_path / "build.py"


def bare_run(python: Path, program: Path, *words: str) -> subprocess.CompletedProcess[str]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    argv = [str(python), str(program), *words]
    return subprocess.run(
        argv, env=variables, capture_output=True, text=True, check=False, timeout=300
    )


def test_a_bare_checkout_names_the_one_command_to_type(
    bare_python: Path, root: Path, program: Path
) -> None:
    done = bare_run(bare_python, program, "--list")
    assert (done.returncode, done.stdout) == (1, "")
    content = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    names = [requirement.partition(">")[0] for requirement in content["project"]["dependencies"]]
    assert done.stderr.startswith(f"error: {bare_python} lacks {', '.join(names)}\n")
    assert done.stderr.endswith("hint: run `make setup`, then this again\n")


def test_a_dependency_that_is_missing_when_it_is_needed_is_named(
    tmp_path: Path, root: Path
) -> None:
    """Run in an environment that is older than the checkout.

    The commands import a dependency when they need it.
    """
    shutil.copy(root / "build.py", tmp_path)
    (tmp_path / "pyproject.toml").write_text(
        '[project]\ndependencies = ["packaging>=1", "docker>=99", "trainworks-needs-this>=1"]\n',
        encoding="utf-8",
    )
    (tmp_path / "src" / "trainworks").mkdir(parents=True)
    (tmp_path / "src" / "trainworks" / "__init__.py").touch()
    (tmp_path / "src" / "trainworks" / "cli.py").write_text(
        "def main(root):\n    import trainworks_needs_this\n", encoding="utf-8"
    )
    done = bare_run(Path(sys.executable), tmp_path / "build.py", "--list")
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {sys.executable} lacks docker>=99 (it has ")
    assert "), trainworks-needs-this\n" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_environment_of_the_checkout_is_found_by_any_python(
    bare_python: Path, program: Path, tmp_path: Path
) -> None:
    stand_in = tmp_path / ".venv" / "bin" / "python"
    stand_in.parent.mkdir(parents=True)
    stand_in.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n', encoding="utf-8")
    stand_in.chmod(0o755)
    done = bare_run(bare_python, program, "--cuda", "two words")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(program), "--cuda", "two words"]


def test_an_environment_that_cannot_be_looked_at_is_as_none(
    bare_python: Path, program: Path, tmp_path: Path
) -> None:
    """Put the environment behind a folder that only its owner may read.

    Root is refused a link to a name that is too long as well.
    """
    stand_in = tmp_path / ".venv" / "bin" / "python"
    stand_in.parent.mkdir(parents=True)
    stand_in.symlink_to(f"/{'x' * 300}")
    done = bare_run(bare_python, program, "--list")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.endswith("hint: run `make setup`, then this again\n")


# Signals, and time.


def test_a_second_interrupt_while_python_shuts_down_changes_nothing(
    root: Path, tmp_path: Path
) -> None:
    for name in ("ready", "never", "ending", "end"):
        os.mkfifo(tmp_path / name)
    stand_in = tmp_path / "apt-config"
    stand_in.write_text(
        f'#!/bin/sh\necho $$ > "{tmp_path}/ready"\nread nothing < "{tmp_path}/never"\n'
    )
    stand_in.chmod(0o755)
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, pathlib, sys\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "@atexit.register\n"
        "def wait():\n"
        "    if sys.argv[0].endswith('build.py'):"
        "  # not the Python that it asks for pip's settings\n"
        "        (folder / 'ending').write_text('')\n"
        "        (folder / 'end').read_text()\n"
    )
    environment = {**os.environ, **NO_ENGINE, "PATH": str(tmp_path), "PYTHONPATH": str(tmp_path)}
    argv = [sys.executable, str(root / "build.py"), *CPU]
    process = subprocess.Popen(
        argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        (tmp_path / "ready").read_text()
        process.send_signal(signal.SIGINT)
        (tmp_path / "ending").read_text()
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        (tmp_path / "end").write_text("")
        _, errors = process.communicate(timeout=300)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert errors == "\ninterrupted: everything that was started has been stopped\n"


def test_interrupted_before_the_first_import_has_ended(root: Path, tmp_path: Path) -> None:
    """A module that the command line imports is a pipe here: the test has
    Ctrl-C come while it is read.
    """
    package = tmp_path / "argparse"
    package.mkdir()
    os.mkfifo(tmp_path / "ready")
    (package / "__init__.py").write_text(
        "import signal\n"
        f"open({str(tmp_path / 'ready')!r}, 'w').close()\n"
        "while True:\n"
        "    signal.pause()\n"
    )
    argv = [sys.executable, str(root / "build.py"), "--list"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    process = subprocess.Popen(
        argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        (tmp_path / "ready").read_text()
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=300)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, output, errors) == (
        130,
        "",
        "\ninterrupted: nothing had been started\n",
    )


@pytest.mark.parametrize(
    ("number", "words"),
    [(signal.SIGINT, ()), (signal.SIGTERM, ()), (signal.SIGTERM, ("--format", "json"))],
)
def test_interrupted_is_said_in_one_line(
    number: signal.Signals, words: tuple[str, ...], root: Path, tmp_path: Path
) -> None:
    """A stand-in for ``apt-config`` keeps the command waiting at a known place
    for as long as the test wants.
    """
    ready, never = tmp_path / "ready", tmp_path / "never"
    os.mkfifo(ready)
    os.mkfifo(never)
    stand_in = tmp_path / "apt-config"
    stand_in.write_text(
        f'#!/bin/sh\necho $$ > "{ready}"\nread nothing < "{never}"\n', encoding="utf-8"
    )
    stand_in.chmod(0o755)
    argv = [sys.executable, str(root / "build.py"), *CPU, *words]
    environment = {**os.environ, **NO_ENGINE, "PATH": str(tmp_path)}
    process = subprocess.Popen(
        argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        child = os.pidfd_open(int(ready.read_text(encoding="utf-8")))
        process.send_signal(number)
        output, errors = process.communicate(timeout=300)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert (json.loads(output)["error"] == "InterruptionError") if words else (output == "")
    assert errors == "\ninterrupted: everything that was started has been stopped\n"
    readable, _, _ = select.select([child], [], [], 10)
    os.close(child)
    assert readable, "what was started has been stopped"


MODULES = "import argparse, dataclasses, json, pathlib, re, subprocess, tomllib, typing"


def test_planning_is_quick(root: Path) -> None:
    """Issue 2 asks for half a second from process start, which is six to eight
    starts of Python with a few modules.

    Processor time, and both in turns: other tests make this machine slower by as much for both.
    """

    def seconds(*words: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *words], capture_output=True, check=True, timeout=300)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    planning = (
        str(root / "build.py"),
        "--framework",
        "pytorch",
        "--cuda",
        "cu121",
        "--until",
        "plan",
    )
    seconds(*planning)  # the first start of a new checkout compiles it
    turns = [(seconds(*planning), seconds("-c", MODULES)) for _ in range(3)]
    ours, peer = (min(column) for column in zip(*turns, strict=True))
    assert ours < 14 * peer, turns
