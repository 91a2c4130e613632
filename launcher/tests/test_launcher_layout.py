"""Test promises about the package itself: its needs, its lists, and the time of its start."""

from __future__ import annotations

import ast
import itertools
import os
import re
import resource
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from launcher_support import LAUNCHER, TIME_OUT, Launcher, write_inputs

import trainworks_launcher
from trainworks_launcher.contract import names
from trainworks_launcher.contract.modes import MODES, SWITCHES
from trainworks_launcher.environment.entry_point import program_name
from trainworks_launcher.plan import script_environment
from trainworks_launcher.plan.modes import planner
from trainworks_testing.old_python import NOT_TESTED, find_oldest_python

if TYPE_CHECKING:
    from collections.abc import Callable

PACKAGE = LAUNCHER / "trainworks_launcher"
PREFLIGHT = LAUNCHER / "trainworks_preflight"
SOURCES = sorted(PACKAGE.rglob("*.py"))


def test_version_is_the_distributions() -> None:
    document = tomllib.loads((LAUNCHER / "pyproject.toml").read_text(encoding="utf-8"))
    assert trainworks_launcher.__version__ == document["project"]["version"]
    assert document["project"]["dependencies"] == []


def test_every_mode_file_has_its_row_and_every_row_its_planner() -> None:
    files = {path.stem for path in (PACKAGE / "plan" / "modes").glob("*.py")} - {
        "__init__",
        "common",
    }
    assert files == {row.file for row in MODES.values()}
    assert all(callable(planner(name)) for name in MODES)
    assert all(MODES[mode].switch == switch for switch, mode in SWITCHES.items())


def test_the_table_of_modes_is_the_registrys() -> None:
    section = (
        (LAUNCHER / "README.md")
        .read_text(encoding="utf-8")
        .partition("## Modes\n")[2]
        .partition("\n\n")[0]
    )
    rows = [line.split("|")[1:3] for line in section.splitlines()[2:]]
    assert [name.strip(" `") for name, _ in rows] == list(MODES)
    for name, switch in rows:
        assert MODES[name.strip(" `")].switch in switch


RUN_BY_THE_USERS_PYTHON = {
    "codeartifact.py": {"boto3", "botocore"},
    "fetch.py": {"boto3", "botocore"},
    "standards.py": {"packaging", "pip", "tomli"},
    "ray_node.py": {"ray"},
    "sitecustomize.py": {"sitecustomize"},
}
"""By the one that has boto3, which was looked up before, or that runs pip.

And the names that they import from it.
"""


@pytest.mark.parametrize(
    "path",
    [*SOURCES, *sorted(PREFLIGHT.rglob("*.py"))],
    ids=lambda path: str(path.relative_to(LAUNCHER)),
)
def test_only_the_standard_library_and_ourselves_are_imported(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            modules = [node.module or ""]
        for module in modules:
            theirs = RUN_BY_THE_USERS_PYTHON.get(path.name, set())
            own = (
                {"trainworks_launcher", "trainworks_preflight"}
                if PREFLIGHT in path.parents
                else {"trainworks_launcher"}
            )
            assert module.split(".")[0] in {*sys.stdlib_module_names, *own, *theirs}


@pytest.mark.parametrize(
    "path",
    [*SOURCES, *sorted(PREFLIGHT.rglob("*.py"))],
    ids=lambda path: str(path.relative_to(LAUNCHER)),
)
def test_no_fact_and_no_shell_in_code(path: Path) -> None:
    """Find no instance name, no URL, no shell, no assignment to the process's environment, no fixed
    sleep.

    The name of SVG's namespace is not an address.
    """
    text = path.read_text(encoding="utf-8").replace(' xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.search(r"\bml\.[a-z]\w*\.\w*xlarge", text)
    assert not re.search(r"https?://\w", text)
    assert not re.search(
        r"shell=True|os\.system\(|os\.environ\[[^]]+\] *=|os\.putenv|time\.sleep\(", text
    )


PURE_ROOMS = ("job", "plan", "mpirun", "environment/platforms", "supervise/outcome")


def files_of(room: str) -> list[str]:
    """Return the files of a room; one that has none was renamed or moved."""
    files = [str(path.relative_to(PACKAGE)) for path in (PACKAGE / room).rglob("*.py")]
    assert files, f"no file in {room}"
    return sorted(files)


PURE = [name for room in PURE_ROOMS for name in files_of(room)]
PURE += [
    *(
        "contract/errors.py",
        "contract/hyperparameters.py",
        "contract/redaction.py",
        "contract/names.py",
    ),
    *(
        "contract/origins.py",
        "contract/modes.py",
        "contract/settings.py",
        "contract/json_values.py",
    ),
    *(
        "environment/resource_config.py",
        "environment/entry_point.py",
        "environment/command_line.py",
        "environment/manifest.py",
    ),
    *("command/explain.py", "command/options.py"),
    *(
        "supervise/phase.py",
        "supervise/preparation/installing.py",
        "supervise/preparation/steps.py",
    ),
    *(f"supervise/hang/{name}.py" for name in ("outlier_rank", "progress", "stacks")),
    *(f"../trainworks_preflight/{name}.py" for name in ("advice", "distribution", "facts")),
]


@pytest.mark.parametrize("name", PURE)
def test_the_middle_imports_nothing_with_effects(name: str) -> None:
    tree = ast.parse((PACKAGE / name).read_text(encoding="utf-8"))
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not imported & {
        "os",
        "socket",
        "subprocess",
        "pathlib",
        "shutil",
        "tempfile",
        "time",
        "random",
    }


DOCUMENT_READERS = {"job/placement.py", "job/program.py", "plan/script_environment.py"}
"""Files that check the resource config, or hand it to the script, as it was read."""


@pytest.mark.parametrize(
    "name", sorted(name for room in ("job", "plan", "supervise") for name in files_of(room))
)
def test_rooms_after_the_environment_read_typed_values(name: str) -> None:
    """The dictionaries of the platform's files are read once: ``Environment`` has ``hosts`` and
    ``reserved``.
    """
    tree = ast.parse((PACKAGE / name).read_text(encoding="utf-8"))
    expressions = [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Attribute, ast.Subscript))
    ]
    for expression in expressions:
        assert not expression.endswith(".resource_config")
        assert ".hyperparameters.get" not in expression
        assert ".hyperparameters[" not in expression
        assert name in DOCUMENT_READERS or not expression.endswith("hosts.document")
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert not imported & {"split_reserved", "read_hosts"}


def test_every_public_name_in_names_is_documented() -> None:
    body = ast.parse((PACKAGE / "contract" / "names.py").read_text(encoding="utf-8")).body
    for node, following in itertools.pairwise(body):
        if isinstance(node, ast.Assign):
            documented = isinstance(following, ast.Expr) and isinstance(
                following.value, ast.Constant
            )
            assert documented, f"names.py line {node.lineno} has no docstring below it"


def test_refusals_have_a_range_of_their_own() -> None:
    statuses = (
        names.EXIT_NOT_STARTED,
        names.EXIT_PREPARATION,
        names.EXIT_HOSTS,
        names.EXIT_LAUNCHER,
    )
    assert len(set(statuses)) == len(statuses)
    assert all(64 <= status <= 79 for status in statuses)


def test_host_specific_names_are_really_exported() -> None:
    from launcher_support import environment, plan

    assert (
        set(plan(environment(hosts=("a", "b"), host="a")).env) >= script_environment.HOST_SPECIFIC
    )


HANDED_ON = (
    *("HOSTNAME_VARIABLE", "PYTHON_HOOKS_VARIABLE", "RUNTIME_DIRECTORY_VARIABLE"),
    *("RESUME_VARIABLE", "RESTARTS_VARIABLE", "PLACE_VARIABLE"),
)
"""Variables that only the launcher sets."""


def test_help_explains_the_settings_that_people_set_and_its_second_page_every_one(
    tmp_path: Path,
) -> None:
    pages = []
    for words in (("--help",), ("--help", "all")):
        with Launcher(tmp_path, *words) as launcher:
            assert launcher.wait() == 0
        pages.append(launcher.text)
    lines = [line for page in pages for line in page.splitlines()]
    assert max(map(len, lines)) <= 120
    assert all(str(status) in pages[0] for status in (64, 65, 66, 70))
    settings = [line.split()[0] for line in pages[0].partition("Settings, ")[2].splitlines()[1:]]
    assert len(settings) == 10
    variable_names = {
        value
        for name, value in vars(names).items()
        if name.endswith("_VARIABLE") and name not in HANDED_ON
    }
    every = {line.split()[0] for line in pages[1].partition("Settings, ")[2].splitlines()[1:]}
    assert every == {name for name in variable_names if name.startswith("TRAINWORKS_")} | {
        "MASTER_PORT",
        "SAGEMAKER_BASE_DIR",
    }


def test_it_starts_quickly(tmp_path: Path) -> None:
    """Measure from the start to the end of an empty script, in CPU seconds beside those of a few
    modules of Python's own.

    The launcher takes twice as many as they do, on a busy machine as on a quiet one, where a second
    is worth another amount.
    """
    write_inputs(tmp_path, "", {}, {})

    def job() -> None:
        with Launcher(tmp_path) as launcher:
            assert launcher.wait() == 0

    def peer() -> None:
        words = (sys.executable, "-c", "import asyncio, json, logging, subprocess, urllib.request")
        subprocess.run(words, check=True, timeout=TIME_OUT)

    used = [(_processor_seconds(job), _processor_seconds(peer)) for _ in range(3)]
    ours, peers = zip(*used, strict=True)
    assert min(ours) < 4 * min(peers), used


LONGEST_PATH = 14
"""Functions of ours between the command line and the start of the program, both included."""

COUNTING_TRAIN = """
import sys
from trainworks_launcher.command.cli import main

def count(event, arguments):
    if event == "subprocess.Popen" and "train.py" in str(arguments[1]):
        frame, functions = sys._getframe(1), []
        while frame is not None:
            if "trainworks_launcher" in frame.f_code.co_filename:
                functions.append(frame.f_code.co_name)
            frame = frame.f_back
        print("path:", *reversed(functions), file=sys.stderr)

sys.addaudithook(count)
sys.exit(main([]))
"""


def printed_by(program: str, base: Path, marker: str, **variables: str) -> list[list[str]]:
    """Run a program that starts `train`; return the words of each of its lines with a marker."""
    done = subprocess.run(
        (sys.executable, "-c", program),
        env={
            "SAGEMAKER_BASE_DIR": str(base),
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(LAUNCHER),
            **variables,
        },
        capture_output=True,
        timeout=TIME_OUT,
        check=False,
    )
    lines = done.stderr.decode().splitlines()
    assert done.returncode == 0, lines
    return [line.split()[1:] for line in lines if line.startswith(marker)]


def test_the_path_from_the_command_line_to_the_program_is_short(tmp_path: Path) -> None:
    write_inputs(tmp_path, "", {}, {})
    paths = printed_by(COUNTING_TRAIN, tmp_path, "path:")
    assert len(paths) == 1
    assert paths[0][0] == "main"
    assert len(paths[0]) <= LONGEST_PATH, paths


LISTING_TRAIN = """
import sys
from trainworks_launcher.command.cli import main

status = main([])
room = "trainworks_launcher.supervise.parts."
parts = [name[len(room):] for name in sys.modules if name.startswith(room)]
print("parts:", *parts, file=sys.stderr)
sys.exit(status)
"""


def test_a_plain_job_loads_only_the_parts_that_it_needs(tmp_path: Path) -> None:
    write_inputs(tmp_path, "", {}, {})
    for hang, parts in (("warn", {"hang_detection", "summary"}), ("off", {"summary"})):
        (loaded,) = printed_by(LISTING_TRAIN, tmp_path, "parts:", TRAINWORKS_HANG=hang)
        assert set(loaded) == parts


def _processor_seconds(work: Callable[[], None]) -> float:
    """Return the CPU seconds of the processes that are started and waited for."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    work()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_it_runs_on_the_oldest_python(tmp_path: Path) -> None:
    python = find_oldest_python()
    if not python:
        pytest.skip(NOT_TESTED)
    write_inputs(
        tmp_path, "import sys; print('script', sys.argv[1:]); sys.exit(9)", {"epochs": "3"}, {}
    )
    env = {"SAGEMAKER_BASE_DIR": str(tmp_path), "PATH": os.environ["PATH"]}
    compiled = subprocess.run(
        (
            python,
            "-I",
            "-W",
            "error",
            "-c",
            f"for p in {[str(path) for path in SOURCES]!r}: compile(open(p).read(), p, 'exec')",
        ),
        env=env,
        capture_output=True,
        timeout=TIME_OUT,
        check=False,
    )
    assert compiled.returncode == 0, compiled.stderr.decode()
    # The base of a type is evaluated where it has a name.
    libraries = [
        path.relative_to(LAUNCHER)
        for path in SOURCES
        if not {"programs", "__main__.py"} & {*path.parts}
    ]
    modules = [".".join(path.with_suffix("").parts) for path in libraries]
    script = f"import sys; sys.path.insert(0, {str(LAUNCHER)!r})\n" + "".join(
        f"import {name}\n" for name in modules
    )
    imported = subprocess.run(
        (python, "-I", "-W", "error", "-c", script),
        env=env,
        capture_output=True,
        timeout=TIME_OUT,
        check=False,
    )
    assert imported.returncode == 0, imported.stderr.decode()
    for words, status, expected_output in (
        (("--plan",), 0, '"mode": "none"'),
        ((), 9, "script ['--epochs', '3']"),
    ):
        done = subprocess.run(
            (python, "-I", "-W", "error", str(PACKAGE / "__main__.py"), *words),
            env=env,
            capture_output=True,
            timeout=TIME_OUT,
            check=False,
        )
        assert (done.returncode, expected_output in done.stdout.decode()) == (status, True), (
            done.stderr.decode()
        )


@pytest.mark.parametrize(
    ("words", "status", "expected_output"),
    [
        (("--", "./run.sh"), 9, "job failed (exit status 9"),
        (("--", "run.sh"), 9, "job failed (exit status 9"),
        (("--", "bash", "-c", "exit 9"), 9, "job failed (exit status 9"),
        (("--", "-m", "package.train", "--lr", "1"), 9, "job failed (exit status 9"),
        (("explain", "--", "./run.sh"), 0, "the entry point, a shell"),
        (("--mode", "torchrun", "--", "./run.sh"), 64, "did you mean 'torch_distributed'?"),
        (("torchrun", "run.sh"), 127, "No such file or directory"),
        (("train", "torchrun", "x.py"), 64, "train --mode torch_distributed -- x.py"),
        (("--help", "all"), 0, "usage: train"),
        (("check",), 0, ""),
    ],
)
def test_each_way_to_start_runs_on_the_oldest_python(
    tmp_path: Path, words: tuple[str, ...], status: int, expected_output: str
) -> None:
    """Each runs to its end: a method of a newer Python is missed only when it is called."""
    python = find_oldest_python()
    if not python:
        pytest.skip(NOT_TESTED)
    code = tmp_path / "code"
    (code / "package").mkdir(parents=True)
    (code / "run.sh").write_text("#!/bin/sh\nexit 9\n", encoding="ascii")
    (code / "run.sh").chmod(0o755)
    (code / "package/train.py").write_text("import sys; sys.exit(9)\n", encoding="ascii")
    program = (python, "-IS", "-W", "error", str(PACKAGE / "__main__.py"))
    variables = {"SAGEMAKER_BASE_DIR": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        (*program, *words),
        cwd=code,
        env=variables,
        capture_output=True,
        timeout=TIME_OUT,
        check=False,
    )
    output = (done.stdout + done.stderr).decode()
    assert (done.returncode, "Traceback" in output) == (status, False), output
    assert expected_output in output


@pytest.mark.parametrize("python", [sys.executable, find_oldest_python()], ids=["this", "oldest"])
def test_the_end_of_a_process_is_seen_on_each_python(python: str) -> None:
    """The end of a rank that another process started is seen at once, not from its starter."""
    if not python:
        pytest.skip(NOT_TESTED)
    script = """if True:
        import errno, os, select, subprocess
        from trainworks_launcher.supervise.processes.processes import open_pidfd

        process = subprocess.Popen(("sleep", "600"))
        descriptor = open_pidfd(process.pid)
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        print(poll.poll(0), os.get_inheritable(descriptor))
        process.kill()
        print(poll.poll() == [(descriptor, select.POLLIN)])
        process.wait()
        try:
            open_pidfd(process.pid)
        except OSError as error:
            print(errno.errorcode[error.errno])
    """
    done = subprocess.run(
        (python, "-B", "-W", "error", "-c", script),
        env={"PYTHONPATH": str(LAUNCHER), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=TIME_OUT,
        check=False,
    )
    assert done.stdout.splitlines() == ["[] False", "True", "ESRCH"], done.stderr


def test_the_hostname_shim_answers_the_jobs_name_or_libcs(tmp_path: Path) -> None:
    built = tmp_path / "libhostname.so"
    source = LAUNCHER / "hostname_shim" / "hostname.c"
    try:
        subprocess.run(
            (
                "cc",
                "-shared",
                "-fPIC",
                "-O2",
                "-Wall",
                "-Wextra",
                "-Werror",
                "-o",
                str(built),
                str(source),
                "-ldl",
            ),
            check=True,
            timeout=TIME_OUT,
        )
    except FileNotFoundError:
        pytest.skip("no C compiler here")
    script = "import socket, os; print(socket.gethostname(), os.uname().nodename)"
    real = os.uname().nodename
    for variables, expected in (
        ({"TRAINWORKS_HOSTNAME": "algo-7"}, f"algo-7 {real}"),
        ({"TRAINWORKS_HOSTNAME": ""}, f"{real} {real}"),
        ({}, f"{real} {real}"),
    ):
        done = subprocess.run(
            (sys.executable, "-I", "-c", script),
            env={"LD_PRELOAD": str(built), **variables},
            capture_output=True,
            timeout=TIME_OUT,
            check=True,
        )
        assert done.stdout.decode().strip() == expected


def test_the_entry_point_is_executable_and_isolated() -> None:
    path = LAUNCHER / "entrypoint" / "train"
    assert os.access(path, os.X_OK)
    assert path.read_text(encoding="utf-8").startswith("#!/usr/bin/python3 -IS\n")


def test_an_empty_program_is_no_program() -> None:
    assert (
        program_name({"SAGEMAKER_PROGRAM": ""}, {"sagemaker_program": " train.py "}) == "train.py"
    )
