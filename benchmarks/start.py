#!/usr/bin/env python3
"""Measures how long a job waits: launcher start, planning for many hosts, and
with `--image` Python's bytecode.

Start: from the start of the process `train` to the moment in which the user's script runs its first
line, for our launcher and for the `train` of sagemaker-training 5.1.4, with the same script, the
same Python for the script and the same platform files; and for that Python alone. The toolkit is
installed with pip into a temporary environment.

`--image NAME` (an image of ours that the engine has): the first `import torch` of a fresh
container, which has to compile what it imports, beside the same image with all bytecode added.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import time
import venv
from collections.abc import Mapping
from pathlib import Path

from measure import ROOT, Figure, Section, clock_process, describe, load, machine, run, write
from trainworks.engine import choose
from trainworks.engine.protocol import BuildRequest, Engine, StepEvent
from trainworks.engine.temporary_folders import private_folder

TOOLKIT = "sagemaker-training==5.1.4"
SYSTEM_PYTHON = "/usr/bin/python3"
"""What the image's ENTRYPOINT runs on; where this machine has none, the Python of this process."""

HOSTS = 4096
FIRST_LINE = (
    "import time\nprint('first line', time.clock_gettime(time.CLOCK_MONOTONIC), flush=True)\n"
)

IMPORT = """
import json, resource, subprocess, sys, time

def importing():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    subprocess.run(["/opt/venv/bin/python", "-c", "import torch"], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return [
        time.perf_counter() - started,
        after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
    ]

print(json.dumps([importing(), importing()]))
"""
"""Run by the system's Python in a fresh container: seconds and processor
seconds of the first and the second import.
"""

COMPILE = "compileall -q -j 0 --invalidation-mode unchecked-hash /opt/venv/lib"
BYTES = "find /opt/venv -name '*.pyc' -printf '%s\\n' | awk '{ sum += $1 } END { print sum + 0 }'"


def write_inputs(base: Path, script: str, hosts: int, hyperparameters: Mapping[str, str]) -> None:
    """Write the files that a platform mounts."""
    for name in ("code", "model", "input/config", "input/data", "output/data"):
        (base / name).mkdir(parents=True)
    # The toolkit waits up to 15 minutes for every host's name to resolve.
    names = ["localhost", *(f"algo-{number + 1}" for number in range(1, hosts))]
    documents = {
        "hyperparameters": {"sagemaker_program": "train.py", **hyperparameters},
        "resourceconfig": {
            "current_host": names[0],
            "hosts": names,
            "network_interface_name": "lo",
        },
        "inputdataconfig": {},
    }
    (base / "code" / "train.py").write_text(script, encoding="utf-8")
    for name, content in documents.items():
        (base / "input" / "config" / f"{name}.json").write_text(
            json.dumps(content), encoding="utf-8"
        )


def install_ours(folder: Path) -> Path:
    """Lay our launcher out as in an image, compiled; its `train`."""
    library = folder / "lib" / "trainworks_launcher"
    shutil.copytree(
        ROOT / "launcher" / "trainworks_launcher",
        library,
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    train = folder / "bin" / "train"
    train.parent.mkdir()
    shutil.copy(ROOT / "launcher" / "entrypoint" / "train", train)
    train.chmod(0o755)
    return train


def first_line(command: tuple[str, ...], environment: Mapping[str, str]) -> float:
    """Return the seconds from the start of a process to the user's first line."""
    started = time.clock_gettime(time.CLOCK_MONOTONIC)
    output = run(command, environment=environment)
    said = [line for line in output.splitlines() if "first line" in line]
    if len(said) != 1:
        raise SystemExit(f"{command} ran the script {len(said)} times:\n{output[-3000:]}")
    return float(said[0].rsplit(" ", 1)[1]) - started


def measure_start(folder: Path, repeat: int) -> list[Figure]:
    """Measure the start of a plain script on one host."""
    environment_folder = folder / "environment"
    venv.create(environment_folder, with_pip=True)
    python = environment_folder / "bin" / "python"
    run(
        (
            str(python),
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "setuptools<81",
            TOOLKIT,
        )
    )
    train = install_ours(folder / "ours")
    system_python = SYSTEM_PYTHON if Path(SYSTEM_PYTHON).exists() else sys.executable
    compiler = "import compileall, sys; sys.exit(not compileall.compile_dir(sys.argv[1], quiet=1))"
    run((system_python, "-c", compiler, str(train.parent.parent / "lib")))
    base = folder / "ml"
    write_inputs(base, FIRST_LINE, 1, {"sagemaker_submit_directory": str(base / "code")})
    environment = {
        "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "HOME": str(folder),
        "LANG": "C.UTF-8",
        "SAGEMAKER_BASE_DIR": str(base),
    }
    # As the image's ENTRYPOINT starts it, whose first line names the interpreter of an image.
    flags = train.read_text(encoding="utf-8").partition("\n")[0].split()[1:]
    commands = {
        "ours": (system_python, *flags, str(train)),
        "peer": (str(python), str(python.parent / "train")),
        "alone": (str(python), str(base / "code" / "train.py")),
    }
    times: dict[str, list[float]] = {name: [] for name in commands}
    for command in commands.values():
        first_line(command, environment)
    for _ in range(repeat):
        for name, command in commands.items():
            times[name].append(first_line(command, environment))
    # Planning only asks whether it is there.
    (python.parent / "torchrun").touch(mode=0o755)
    plans = {}
    for hosts in (2, HOSTS):
        at = folder / f"hosts-{hosts}"
        write_inputs(at, FIRST_LINE, hosts, {"sagemaker_torch_distributed_enabled": "true"})
        command = (*commands["ours"], "--plan")
        plans[hosts] = (command, {**environment, "SAGEMAKER_BASE_DIR": str(at)})
    planning: dict[int, list[float]] = {hosts: [] for hosts in plans}
    for _ in range(repeat):
        for hosts, (command, variables) in plans.items():
            planning[hosts].append(clock_process(command, environment=variables))
    added = {
        name: tuple(total - alone for total, alone in zip(times[name], times["alone"], strict=True))
        for name in ("ours", "peer")
    }
    return [
        Figure(
            name="time added before the user's first line",
            unit="s",
            ours=added["ours"],
            peer=added["peer"],
            note=(
                "each start less the script's Python alone of the same turn;"
                " promised: at least 5 times less"
            ),
        ),
        Figure(
            name="`train` to the user's first line",
            unit="s",
            ours=tuple(times["ours"]),
            peer=tuple(times["peer"]),
            note=(
                "a plain script on one host;"
                " the script's Python, whose start is part of it, is the same"
            ),
        ),
        Figure(
            name="(the script's Python alone, without a launcher)",
            unit="s",
            ours=tuple(times["alone"]),
        ),
        Figure(name="`train --plan`, torchrun on 2 hosts", unit="s", ours=tuple(planning[2])),
        Figure(
            name=f"`train --plan`, torchrun on {HOSTS:,} hosts",
            unit="s",
            ours=tuple(planning[HOSTS]),
        ),
    ]


def measure_bytecode(engine: Engine, image: str, repeat: int) -> list[Figure]:
    """Measure what it costs that an image has no bytecode: in time at a job's
    start, and in bytes saved.
    """

    def ignore(_event: StepEvent) -> None:
        """Follow a build with no interest in its events."""

    compiled = "trainworks-benchmark/compiled:latest"
    with private_folder() as folder:
        (folder / "Dockerfile").write_text(
            f"FROM {image}\nRUN /usr/bin/python3 -m {COMPILE} || true\n", encoding="utf-8"
        )
        made = engine.build(BuildRequest(name="compiled", context=folder, tags=(compiled,)), ignore)
    try:
        sizes = {}
        times: dict[str, list[list[list[float]]]] = {image: [], compiled: []}
        for reference in times:
            with engine.container(reference) as container:
                sizes[reference] = int(container.run(("/bin/sh", "-c", BYTES)).output) / 1e6
        for _ in range(repeat):
            for reference, found in times.items():
                with engine.container(reference) as container:
                    done = container.run(("/usr/bin/python3", "-c", IMPORT))
                if done.status != 0:
                    raise SystemExit(f"{reference} does not work:\n{done.output[-3000:]}")
                found.append(json.loads(done.output.strip().splitlines()[-1]))
    finally:
        engine.remove(compiled)
        engine.remove(made.identifier)
    kinds = (("first", 0), ("second", 1))
    figures = []
    for place, (kind, number) in enumerate(kinds):
        for index, unit in enumerate(("", ", processor time")):
            figures.append(
                Figure(
                    name=f"{kind} `import torch` in a fresh container{unit}",
                    unit="s",
                    ours=tuple(pair[number][index] for pair in times[image]),
                    peer=tuple(pair[number][index] for pair in times[compiled]),
                    note=(
                        "the peer is the same image with all bytecode: below 1, ours waits longer"
                        if place == 0
                        else ""
                    ),
                )
            )
    figures.append(
        Figure(
            name="bytecode in /opt/venv, uncompressed",
            unit="MB",
            ours=(sizes[image],),
            note=f"{sizes[compiled]:.0f} MB when all of /opt/venv is compiled",
        )
    )
    return figures


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=9, metavar="N", help="default: 9")
    parser.add_argument("--image", metavar="NAME", help="measure bytecode in this image too")
    parser.add_argument(
        "--engine", default="docker", metavar="NAME", help="that has the image (default: docker)"
    )
    parser.add_argument(
        "--write", action="store_true", help="record in benchmarks/results.json and results.md"
    )
    options = parser.parse_args()
    if options.repeat < 1:
        parser.error("--repeat must be at least 1")
    facts = machine()
    with private_folder() as folder:
        figures = measure_start(folder, options.repeat)
    if options.image:
        figures += measure_bytecode(choose(options.engine), options.image, options.repeat)
    section = Section(
        title="Start of a job",
        machine={**facts, "load at the end": load()},
        figures=tuple(figures),
        peer=(
            f"`train` of {TOOLKIT}, installed with pip into an environment of this machine's Python"
            f" {platform.python_version()}, which runs the script too; our launcher runs on the"
            " system's Python."
        ),
    )
    sys.stdout.write(describe(section))
    if options.write:
        write("start", section)
    return 0


if __name__ == "__main__":
    sys.exit(main())
